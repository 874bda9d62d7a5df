//! The arenas of a run's ranks, as mapped by the agent.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use tensorcask::{ErrorKind, Result};

use super::run_event::{ArenaSummary, FailedState};
use crate::arena::Arena;
use crate::os::files::remove_file;
use crate::os::folders::RunFolder;

/// The arenas of a run's ranks.
#[derive(Debug, Default)]
pub(super) struct RankArenas {
    arenas: BTreeMap<u32, Arc<Arena>>,
}

impl RankArenas {
    /// Maps the arena of a rank again; `None` if the rank has none.
    pub(super) fn open(&mut self, folder: &RunFolder, rank: u32) -> Result<Option<ArenaSummary>> {
        let arena = match Arena::open(&folder.rank(rank).arena()) {
            Ok(arena) => Arc::new(arena),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.arenas.remove(&rank);
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        // If this agent has not mapped an arena of the rank before, an earlier agent, now dead, has taken its slots.
        if !self.arenas.contains_key(&rank) {
            arena.give_back_taken()?;
        }
        let failed = arena.failed()?;
        let failed = failed.iter().map(|header| FailedState { generation: header.word.generation, step: header.step }).collect();
        let summary = ArenaSummary { session: arena.session()?, encoded: arena.encoded()?, failed };
        self.arenas.insert(rank, arena);
        Ok(Some(summary))
    }

    /// Removes the arena of a rank.
    pub(super) fn remove(&mut self, folder: &RunFolder, rank: u32) -> Result<()> {
        remove_file(&folder.rank(rank).arena())?;
        self.arenas.remove(&rank);
        Ok(())
    }

    pub(super) fn get(&self, rank: u32) -> Option<&Arc<Arena>> {
        self.arenas.get(&rank)
    }

    /// The arenas of these ranks, in rank order; `None` while one is missing.
    pub(super) fn all(&self, ranks: Range<u32>) -> Option<Vec<Arc<Arena>>> {
        ranks.map(|rank| self.arenas.get(&rank).cloned()).collect()
    }

    /// Those of these ranks that have no arena, while a state of another rank waits for theirs.
    pub(super) fn missing(&self, ranks: Range<u32>) -> Vec<u32> {
        if !self.arenas.values().any(|arena| arena.has_full_slot()) {
            return Vec::new();
        }
        ranks.filter(|rank| !self.arenas.contains_key(rank)).collect()
    }

    /// Number of states that wait to be encoded: that of the rank with the most.
    pub(super) fn waiting_states(&self) -> u64 {
        let words = self.arenas.values().filter_map(|arena| arena.words().ok());
        words.map(|words| words.iter().filter(|word| word.state.is_pending()).count() as u64).max().unwrap_or(0)
    }

    /// Whether an arena holds a complete state.
    pub(super) fn holds_states(&self) -> bool {
        let is_complete = |arena: &Arc<Arena>| arena.words().is_ok_and(|words| words.iter().any(|word| word.state.is_complete()));
        self.arenas.values().any(is_complete)
    }
}
