//! The journal of changed rows in a trainer: the rows that its saves have named, until the agent has encoded them.
//!
//! A caller names the rows that changed since its save before. The agent may never encode that save: the state may be
//! dropped, the save may be skipped, or the agent may be killed. So the trainer sums up. It names the rows that changed
//! since the newest save that the agent has encoded, together with the number of that save. The agent takes the rows only if
//! it has encoded that save, or a later one: see [`trust`](super::trust).
//!
//! Invariant: the rows of a [`RowClaim::Since`] are all rows that changed after its save, if the caller named all rows in
//! each call. Rows count from the moment of the call, even if the call fails or skips its save.

use std::collections::{HashMap, VecDeque};

use tensorcask::Rect;

use super::set::RowSet;

/// Statement of a save about the rows of one of its shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RowClaim {
    /// Nothing: all rows are compared.
    Silent,
    /// Changed rows are not known, but later saves name them.
    Later,
    /// Rows that may have changed after a save of this rank.
    Since { save: u64, rows: RowSet },
}

/// A shard of a state, with the rows that its save names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShardOfState<'a> {
    pub name: &'a str,
    pub rect: &'a Rect,
    /// Size of the shard.
    pub bytes: usize,
    /// Rows that changed since the save before.
    pub rows: Option<&'a [u64]>,
    /// Whether this save or later ones name rows.
    pub names_rows: bool,
}

/// Rows of each shard that changed in the last saves. A shard is missing once a save did not name its rows.
#[derive(Debug, Default)]
pub(crate) struct RowJournal {
    shards: HashMap<(String, Rect), History>,
}

/// Changes of a shard.
#[derive(Debug, Default)]
struct History {
    /// Save after which all changes are known; `None` until a save succeeds.
    since: Option<u64>,
    /// Later saves, ascending, each with the rows that changed before it.
    saved: VecDeque<(u64, RowSet)>,
    /// Rows that changed after the last save that succeeded.
    pending: RowSet,
}

impl RowJournal {
    /// Adds the rows that a save names. Call it first: they count even if the save fails.
    pub(crate) fn note<'a>(&mut self, shards: impl Iterator<Item = ShardOfState<'a>>) {
        self.claims(shards, 0);
    }

    /// Adds the rows that a save names, and returns its statement about each shard. `encoded`: newest save of this rank that is
    /// encoded. May be called again for the same save.
    pub(crate) fn claims<'a>(&mut self, shards: impl Iterator<Item = ShardOfState<'a>>, encoded: u64) -> Vec<RowClaim> {
        let mut before = std::mem::take(&mut self.shards);
        let claim = |shard: ShardOfState<'a>| {
            let count = shard.rect.shape.first().and_then(|count| usize::try_from(*count).ok());
            // Rows without bytes could be more than memory has bits.
            let Some(count) = count.filter(|count| shard.names_rows && *count <= shard.bytes) else { return RowClaim::Silent };
            let key = (shard.name.to_owned(), shard.rect.clone());
            let known = shard.rows.and_then(|_| before.remove(&key));
            let mut history = known.unwrap_or_else(|| History { pending: RowSet::of_shard(count), ..History::default() });
            history.pending.insert(shard.rows.unwrap_or_default());
            let claim = history.claim(encoded, count);
            self.shards.insert(key, history);
            claim
        };
        shards.map(claim).collect()
    }

    /// Notes that the save whose claims were made last has succeeded.
    pub(crate) fn on_saved(&mut self, generation: u64) {
        self.shards.values_mut().for_each(|history| history.on_saved(generation));
    }
}

impl History {
    fn claim(&mut self, encoded: u64, count: usize) -> RowClaim {
        let Some(since) = self.since else { return RowClaim::Later };
        let since = since.max(encoded);
        while self.saved.front().is_some_and(|(save, _)| *save <= since) {
            self.saved.pop_front();
        }
        self.since = Some(since);
        let mut rows = RowSet::of_shard(count);
        self.saved.iter().map(|(_, rows)| rows).chain([&self.pending]).for_each(|more| rows.add(more));
        RowClaim::Since { save: since, rows }
    }

    fn on_saved(&mut self, generation: u64) {
        let none = RowSet::of_shard(self.pending.bytes().len().saturating_mul(8));
        let rows = std::mem::replace(&mut self.pending, none);
        if self.since.is_none() {
            self.since = Some(generation);
            return;
        }
        self.saved.push_back((generation, rows));
        if self.saved.len() > MAX_SAVES
            && let Some((_, oldest)) = self.saved.pop_front()
            && let Some((_, next)) = self.saved.front_mut()
        {
            // The rows of the oldest now count as changed later than they did, which names too many, never too few.
            next.add(&oldest);
        }
    }
}

/// Saves whose rows are kept apart while the agent has not encoded them.
const MAX_SAVES: usize = 16;

#[cfg(test)]
mod tests {
    use tensorcask::Rect;

    use super::super::set::RowSet;
    use super::{MAX_SAVES, RowClaim, RowJournal, ShardOfState};

    const ROWS: usize = 100;

    fn claim(journal: &mut RowJournal, rows: Option<&[u64]>, encoded: u64) -> RowClaim {
        let rect = Rect::whole(&[ROWS as u64, 4]);
        let shard = ShardOfState { name: "table", rect: &rect, bytes: ROWS * 4, rows, names_rows: true };
        journal.claims([shard].into_iter(), encoded).remove(0)
    }

    fn since(save: u64, rows: &[u64]) -> RowClaim {
        let mut set = RowSet::of_shard(ROWS);
        set.insert(rows);
        RowClaim::Since { save, rows: set }
    }

    #[test]
    fn rows_are_named_since_the_newest_encoded_save() {
        let mut journal = RowJournal::default();
        assert_eq!(claim(&mut journal, None, 0), RowClaim::Later);
        journal.on_saved(1);
        assert_eq!(claim(&mut journal, Some(&[5]), 0), since(1, &[5]), "the agent may have encoded save 1 before it encodes this one");
        journal.on_saved(2);
        assert_eq!(claim(&mut journal, Some(&[6]), 1), since(1, &[5, 6]));
        journal.on_saved(3);
        assert_eq!(claim(&mut journal, Some(&[7]), 3), since(3, &[7]));
        assert_eq!(claim(&mut journal, Some(&[8]), 3), since(3, &[7, 8]), "the save before was skipped");
        journal.on_saved(4);
        // Save 4 was dropped, and save 5 is encoded.
        assert_eq!(claim(&mut journal, Some(&[9]), 3), since(3, &[7, 8, 9]));
        journal.on_saved(5);
        assert_eq!(claim(&mut journal, Some(&[]), 5), since(5, &[]));
    }

    #[test]
    fn a_save_that_names_no_rows_begins_anew() {
        let mut journal = RowJournal::default();
        assert_eq!(claim(&mut journal, Some(&[1]), 0), RowClaim::Later, "nothing is known of the time before");
        journal.on_saved(1);
        assert_eq!(claim(&mut journal, None, 1), RowClaim::Later);
        assert_eq!(claim(&mut journal, Some(&[2]), 1), RowClaim::Later, "the save without rows was skipped");
        journal.on_saved(2);
        assert_eq!(claim(&mut journal, Some(&[3]), 1), since(2, &[3]));
        assert_eq!(journal.claims(std::iter::empty(), 1), []);
        assert_eq!(claim(&mut journal, Some(&[4]), 1), RowClaim::Later, "a state lacked the tensor");
    }

    #[test]
    fn rows_of_many_saves_that_are_not_encoded_take_little_memory() {
        let mut journal = RowJournal::default();
        for save in 1..=90 {
            claim(&mut journal, Some(&[save]), 0);
            journal.on_saved(save);
        }
        assert_eq!(journal.shards.values().next().unwrap().saved.len(), MAX_SAVES);
        assert_eq!(claim(&mut journal, Some(&[]), 0), since(1, &(2..=90).collect::<Vec<_>>()));
        assert_eq!(claim(&mut journal, Some(&[]), 85), since(85, &[86, 87, 88, 89, 90]));
    }

    #[test]
    fn rows_without_bytes_take_no_memory() {
        let rect = Rect::whole(&[u64::MAX, 0]);
        let shard = ShardOfState { name: "empty", rect: &rect, bytes: 0, rows: Some(&[7]), names_rows: true };
        assert_eq!(RowJournal::default().claims([shard].into_iter(), 0), [RowClaim::Silent]);
    }
}
