//! Windows: the chunks of one cask that are encoded together.
//!
//! A cask takes its chunks in a fixed order: tensors by name, shards by position, chunks by index. [`plan`] cuts that
//! order into windows of bounded size, so that a save needs bounded memory however large the state is. The save
//! pipeline and compaction both encode window by window. Planning is pure: it reads no tensor and no object.
//!
//! Invariants: the sections name each chunk exactly once and in cask order; a window is never empty. A shard without
//! elements has no chunk. It is a section of its own, between the windows of its neighbours.

use crate::tensor::ChunkGrid;

/// Largest number of decoded bytes in a window, unless one chunk is larger.
pub(crate) const WINDOW_BYTES: u64 = 32 << 20;

/// A chunk of the planned shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlannedChunk {
    /// Position of the shard in the list that was planned.
    pub shard: usize,
    /// Index of the chunk in the grid of its shard.
    pub chunk: u64,
}

/// A section of a cask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Section {
    /// Chunks to encode together.
    Window(Vec<PlannedChunk>),
    /// Position, in the list that was planned, of a shard without elements.
    EmptyShard(usize),
}

/// Cuts the chunks of shards, given by their grids in cask order, into windows of at most `window_bytes`.
pub(crate) fn plan(grids: impl IntoIterator<Item = ChunkGrid>, window_bytes: u64) -> Vec<Section> {
    let mut sections = Vec::new();
    let mut window = Vec::new();
    let mut planned_bytes = 0u64;
    for (shard, grid) in grids.into_iter().enumerate() {
        if grid.chunk_count() == 0 {
            close(&mut sections, &mut window, &mut planned_bytes);
            sections.push(Section::EmptyShard(shard));
        }
        for chunk in 0..grid.chunk_count() {
            let range = grid.bytes(chunk);
            let chunk_bytes = range.end.saturating_sub(range.start);
            if planned_bytes.saturating_add(chunk_bytes) > window_bytes {
                close(&mut sections, &mut window, &mut planned_bytes);
            }
            planned_bytes = planned_bytes.saturating_add(chunk_bytes);
            window.push(PlannedChunk { shard, chunk });
        }
    }
    close(&mut sections, &mut window, &mut planned_bytes);
    sections
}

/// Ends the open window, if it holds any chunk.
fn close(sections: &mut Vec<Section>, window: &mut Vec<PlannedChunk>, planned_bytes: &mut u64) {
    *planned_bytes = 0;
    if !window.is_empty() {
        sections.push(Section::Window(std::mem::take(window)));
    }
}

#[cfg(test)]
mod tests {
    use super::{PlannedChunk, Section, plan};
    use crate::Dtype;
    use crate::tensor::ChunkGrid;

    /// Grids of one-dimensional u8 shards. A chunk holds up to 2^18 elements.
    fn grids(shapes: &[u64]) -> Vec<ChunkGrid> {
        shapes.iter().map(|&count| ChunkGrid::new(Dtype::U8, &[count]).unwrap()).collect()
    }

    fn window(chunks: &[(usize, u64)]) -> Section {
        Section::Window(chunks.iter().map(|&(shard, chunk)| PlannedChunk { shard, chunk }).collect())
    }

    #[test]
    fn chunks_of_several_shards_share_a_window_up_to_its_size() {
        assert_eq!(plan(grids(&[4, 4, 4]), 8), [window(&[(0, 0), (1, 0)]), window(&[(2, 0)])]);
        assert_eq!(plan(grids(&[4, 4, 4]), 12), [window(&[(0, 0), (1, 0), (2, 0)])]);
    }

    #[test]
    fn a_window_may_end_inside_a_shard() {
        let chunk = 1 << 18;
        assert_eq!(plan(grids(&[10, 3 * chunk]), 2 * chunk), [window(&[(0, 0), (1, 0)]), window(&[(1, 1), (1, 2)])]);
    }

    #[test]
    fn a_chunk_larger_than_a_window_has_one_of_its_own() {
        assert_eq!(plan(grids(&[2, 100, 2]), 8), [window(&[(0, 0)]), window(&[(1, 0)]), window(&[(2, 0)])]);
    }

    #[test]
    fn an_empty_shard_stands_between_windows() {
        assert_eq!(plan(grids(&[0, 4, 0, 4]), 8), [Section::EmptyShard(0), window(&[(1, 0)]), Section::EmptyShard(2), window(&[(3, 0)])]);
        assert_eq!(plan(grids(&[]), 8), []);
    }
}
