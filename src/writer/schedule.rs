//! Schedules: the order in which the chunks of a state are encoded.
//!
//! A *unit* is the chunks of one parameter at the same place: of the model weight, its master and its moments. The
//! chunks of a unit are encoded together, so each base chunk is read and decoded once. Each cask takes its own chunks
//! in a fixed order: tensors by name, shards by position, chunks by index. [`schedule`] finds an order of units that
//! keeps the order of every cask, and cuts it into windows of bounded size, so that a save needs bounded memory however
//! large the state is. The save pipeline and compaction both follow such a schedule. Planning is pure: it reads no
//! tensor and no object.
//!
//! Invariants: the windows name each chunk and each shard without elements exactly once. All chunks that a cask takes from
//! one window come before those that it takes from the next.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::parallel::{self, SAVE_WINDOW_BYTES};
use crate::tensor::ChunkGrid;

/// A shard to schedule.
#[derive(Debug, Clone)]
pub(crate) struct PlannedShard {
    /// Number of the cask that takes the shard.
    pub cask: u32,
    pub grid: ChunkGrid,
    /// Positions of the shards, in the list that is scheduled, that codecs may use for this shard.
    pub partners: Vec<usize>,
}

/// Chunks to encode together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unit {
    /// Positions of the shards in the list that was scheduled.
    pub shards: Vec<usize>,
    /// Index of the chunk in the grid of each shard.
    pub chunk: u64,
}

/// Units to encode in parallel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Window {
    pub units: Vec<Unit>,
    /// Positions, in the list that was scheduled, of shards without elements.
    pub empty_shards: Vec<usize>,
}

/// Entry of a window, in the order in which casks take them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    /// The chunk of a shard, as the position of its unit in the window and of the shard in the unit.
    Chunk {
        shard: usize,
        unit: usize,
        member: usize,
    },
    EmptyShard(usize),
}

impl Window {
    /// Chunks and empty shards by shard, then chunk. The list that was scheduled is in cask order, so this is the order
    /// in which each cask takes them.
    pub(crate) fn in_cask_order(&self) -> Vec<Entry> {
        let chunks = self.units.iter().enumerate().flat_map(|(unit, Unit { shards, chunk })| {
            let entry = move |(member, &shard)| (shard, *chunk, Entry::Chunk { shard, unit, member });
            shards.iter().enumerate().map(entry)
        });
        let empty = self.empty_shards.iter().map(|&shard| (shard, 0, Entry::EmptyShard(shard)));
        let mut entries: Vec<(usize, u64, Entry)> = chunks.chain(empty).collect();
        entries.sort_by_key(|&(shard, chunk, _)| (shard, chunk));
        entries.into_iter().map(|(_, _, entry)| entry).collect()
    }
}

/// Cuts the chunks of shards into windows that all threads share. The list holds the shards cask by cask, each in cask
/// order.
pub(crate) fn schedule(shards: &[PlannedShard]) -> Vec<Window> {
    cut(shards, SAVE_WINDOW_BYTES, parallel::window_bytes(SAVE_WINDOW_BYTES))
}

/// Cuts the chunks of shards into windows of at most `first` bytes, and then of twice as many each time, up to `most`. In
/// the first windows all codecs are tried, so these are short.
fn cut(shards: &[PlannedShard], first: u64, most: u64) -> Vec<Window> {
    let bytes_of = |grid: &ChunkGrid| grid.dtype().byte_count(grid.element_count()).unwrap_or(u64::MAX);
    let total = shards.iter().map(|shard| bytes_of(&shard.grid)).fold(0, u64::saturating_add);
    // Within one window the order does not matter.
    let groups = groups(shards);
    let order = if total <= first { by_group(&groups) } else { merge(shards, &groups) };
    let mut windows = Vec::new();
    let mut window = Window::default();
    let mut bytes = 0u64;
    let mut window_bytes = first;
    for together in order {
        let grids = || together.iter().filter_map(|&shard| Some((shard, shards.get(shard)?.grid)));
        window.empty_shards.extend(grids().filter(|(_, grid)| grid.chunk_count() == 0).map(|(shard, _)| shard));
        for chunk in 0..grids().map(|(_, grid)| grid.chunk_count()).max().unwrap_or(0) {
            let with_chunk = || grids().filter(|(_, grid)| chunk < grid.chunk_count());
            let ranges = with_chunk().map(|(_, grid)| grid.bytes(chunk));
            let unit_bytes = ranges.map(|range| range.end.saturating_sub(range.start)).fold(0, u64::saturating_add);
            if bytes.saturating_add(unit_bytes) > window_bytes && !window.units.is_empty() {
                windows.push(std::mem::take(&mut window));
                bytes = 0;
                window_bytes = window_bytes.saturating_mul(2).min(most);
            }
            bytes = bytes.saturating_add(unit_bytes);
            window.units.push(Unit { shards: with_chunk().map(|(shard, _)| shard).collect(), chunk });
        }
    }
    if window != Window::default() {
        windows.push(window);
    }
    windows
}

/// Group of each shard: shards that are partners of each other have the same number.
fn groups(shards: &[PlannedShard]) -> Vec<usize> {
    // A union-find forest. A root is the first shard of its group.
    let mut parents: Vec<usize> = (0..shards.len()).collect();
    let root = |parents: &[usize], mut shard: usize| {
        while let Some(&parent) = parents.get(shard).filter(|&&parent| parent != shard) {
            shard = parent;
        }
        shard
    };
    for (position, shard) in shards.iter().enumerate() {
        for &partner in &shard.partners {
            let a = root(&parents, position);
            let b = root(&parents, partner);
            if let Some(parent) = parents.get_mut(a.max(b)) {
                *parent = a.min(b);
            }
        }
    }
    (0..shards.len()).map(|position| root(&parents, position)).collect()
}

/// Lists of shards of the same group, in the order of their first shards.
fn by_group(groups: &[usize]) -> Vec<Vec<usize>> {
    let mut members: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (position, &group) in groups.iter().enumerate() {
        members.entry(group).or_default().push(position);
    }
    members.into_values().collect()
}

/// Merges the orders of all casks into one. Returns lists of shards that go together: shards of one group, as far as
/// the orders of their casks allow that.
fn merge(shards: &[PlannedShard], groups: &[usize]) -> Vec<Vec<usize>> {
    let mut casks: BTreeMap<u32, VecDeque<usize>> = BTreeMap::new();
    let mut missing: HashMap<usize, usize> = HashMap::new();
    for (position, (shard, &group)) in shards.iter().zip(groups).enumerate() {
        casks.entry(shard.cask).or_default().push_back(position);
        *missing.entry(group).or_default() += 1;
    }
    let mut casks: Vec<VecDeque<usize>> = casks.into_values().collect();
    let group_of = |position: usize| groups.get(position).copied().unwrap_or(usize::MAX);
    let mut merged = Vec::with_capacity(shards.len());
    loop {
        let firsts: Vec<usize> = casks.iter().filter_map(|cask| cask.front().copied()).collect();
        let members = |of: usize| firsts.iter().copied().filter(move |&first| group_of(first) == group_of(of));
        let is_whole = |&first: &usize| missing.get(&group_of(first)) == Some(&members(first).count());
        let whole = firsts.iter().copied().find(is_whole);
        // If no group is whole, the orders of the casks contradict each other, or a group has two shards in one cask.
        let together: Vec<usize> = match whole {
            Some(first) => members(first).collect(),
            None => firsts.first().copied().into_iter().collect(),
        };
        let Some(&first) = together.first() else { return merged };
        for cask in &mut casks {
            if cask.front().is_some_and(|front| together.contains(front)) {
                cask.pop_front();
            }
        }
        missing.entry(group_of(first)).and_modify(|count| *count = count.saturating_sub(together.len()));
        merged.push(together);
    }
}

#[cfg(test)]
mod tests {
    use super::{Entry, PlannedShard, Unit, Window, cut};
    use crate::Dtype;
    use crate::tensor::ChunkGrid;

    const CHUNK: u64 = 1 << 18;

    /// Shards of u8, given as cask, group and number of elements. A chunk holds up to 2^18 elements.
    fn shards(list: &[(u32, usize, u64)]) -> Vec<PlannedShard> {
        let partners = |group: usize| list.iter().position(|shard| shard.1 == group).into_iter().collect();
        let planned =
            |&(cask, group, count)| PlannedShard { cask, grid: ChunkGrid::new(Dtype::U8, &[count]).unwrap(), partners: partners(group) };
        list.iter().map(planned).collect()
    }

    /// Shards of one cask, each a group of its own.
    fn alone(counts: &[u64]) -> Vec<PlannedShard> {
        shards(&counts.iter().enumerate().map(|(group, &count)| (0, group, count)).collect::<Vec<_>>())
    }

    /// Windows of one size.
    fn schedule(shards: &[PlannedShard], bytes: u64) -> Vec<Window> {
        cut(shards, bytes, bytes)
    }

    fn window(units: &[(&[usize], u64)]) -> Window {
        let units = units.iter().map(|&(shards, chunk)| Unit { shards: shards.to_vec(), chunk }).collect();
        Window { units, empty_shards: vec![] }
    }

    #[test]
    fn units_share_a_window_up_to_its_size() {
        let units: [(&[usize], u64); 3] = [(&[0], 0), (&[1], 0), (&[2], 0)];
        assert_eq!(schedule(&alone(&[4, 4, 4]), 8), [window(&units[..2]), window(&units[2..])]);
        assert_eq!(schedule(&alone(&[4, 4, 4]), 12), [window(&units)]);
    }

    #[test]
    fn windows_grow_up_to_a_limit() {
        let sizes = |most| cut(&alone(&[4; 12]), 4, most).iter().map(|window| window.units.len()).collect::<Vec<_>>();
        assert_eq!(sizes(16), [1, 2, 4, 4, 1]);
        assert_eq!(sizes(4), [1; 12]);
    }

    #[test]
    fn a_window_may_end_inside_a_shard() {
        let expected = [window(&[(&[0], 0), (&[1], 0)]), window(&[(&[1], 1), (&[1], 2)])];
        assert_eq!(schedule(&alone(&[10, 3 * CHUNK]), 2 * CHUNK), expected);
    }

    #[test]
    fn a_unit_larger_than_a_window_has_one_of_its_own() {
        assert_eq!(schedule(&alone(&[2, 100, 2]), 8), [window(&[(&[0], 0)]), window(&[(&[1], 0)]), window(&[(&[2], 0)])]);
    }

    #[test]
    fn an_empty_shard_keeps_its_place_in_the_cask() {
        let expected = Window { empty_shards: vec![0, 2], ..window(&[(&[1], 0), (&[3], 0)]) };
        let windows = schedule(&alone(&[0, 4, 0, 4]), 8);
        assert_eq!(windows, [expected]);
        let chunk = |shard, unit| Entry::Chunk { shard, unit, member: 0 };
        assert_eq!(windows[0].in_cask_order(), [Entry::EmptyShard(0), chunk(1, 0), Entry::EmptyShard(2), chunk(3, 1)]);
        assert_eq!(schedule(&[], 8), []);
        assert_eq!(schedule(&alone(&[0]), 8), [Window { empty_shards: vec![0], ..Window::default() }]);
    }

    #[test]
    fn shards_of_a_parameter_go_together() {
        let state = shards(&[(0, 7, 2 * CHUNK), (0, 8, 4), (1, 7, 2 * CHUNK), (1, 8, 4)]);
        assert_eq!(schedule(&state, 2 * CHUNK), [window(&[(&[0, 2], 0)]), window(&[(&[0, 2], 1)]), window(&[(&[1, 3], 0)])]);
    }

    #[test]
    fn a_shard_that_only_one_cask_has_delays_nobody() {
        let state = shards(&[(0, 7, 4), (0, 8, 4), (1, 6, 4), (1, 7, 4), (1, 8, 4)]);
        assert_eq!(schedule(&state, 12), [window(&[(&[2], 0), (&[0, 3], 0)]), window(&[(&[1, 4], 0)])]);
    }

    #[test]
    fn casks_that_contradict_each_other_keep_their_own_order() {
        let state = shards(&[(0, 7, 4), (0, 8, 4), (1, 8, 4), (1, 7, 4)]);
        assert_eq!(schedule(&state, 12), [window(&[(&[0], 0), (&[1, 2], 0)]), window(&[(&[3], 0)])]);
        let twice_in_one_cask = shards(&[(0, 7, 4), (0, 7, 4), (1, 7, 4)]);
        assert_eq!(schedule(&twice_in_one_cask, 8), [window(&[(&[0], 0)]), window(&[(&[1, 2], 0)])]);
    }

    #[test]
    fn a_small_state_is_one_window_whose_entries_are_in_cask_order() {
        let windows = schedule(&shards(&[(0, 7, 4), (0, 8, 4), (0, 7, 4), (1, 8, 4)]), 100);
        assert_eq!(windows, [window(&[(&[0, 2], 0), (&[1, 3], 0)])]);
        let chunk = |shard, unit, member| Entry::Chunk { shard, unit, member };
        assert_eq!(windows[0].in_cask_order(), [chunk(0, 0, 0), chunk(1, 1, 0), chunk(2, 0, 1), chunk(3, 1, 1)]);
    }
}
