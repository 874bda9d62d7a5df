//! The queue of a run's encoder: the states in the arenas of all ranks.

use std::collections::BTreeSet;
use std::sync::Arc;

use tensorcask::Result;

use super::run::Run;
use super::run_state::saves_no_more;
use super::step_selection::{RankStates, Selection, Sessions, select_next};
use crate::arena::Arena;
use crate::arena::slot::SlotState;
use crate::os::files::remove_file;

/// Selects the next work of the encoder. `arenas`: the arenas of all ranks, in rank order.
pub(super) fn next_work(run: &Run, arenas: &[Arc<Arena>]) -> Result<Selection> {
    let (session, finished) = run.read(|state, _| {
        let finished: BTreeSet<u32> = state.ranks.keys().copied().filter(|rank| saves_no_more(state, *rank)).collect();
        (state.session, finished)
    });
    let states = |(rank, arena): (u32, &Arc<Arena>)| {
        Ok(RankStates { headers: arena.headers()?, encoded: arena.encoded()?, is_finished: finished.contains(&rank) })
    };
    let first = run.spec.local_ranks().start;
    let states = (first..).zip(arenas).map(states).collect::<Result<Vec<_>>>()?;
    // Other hosts have no part of a state of an earlier start, or another one.
    let oldest = if run.spec.hosts.is_some() { session } else { 0 };
    Ok(select_next(&states, Sessions { oldest, current: session }, run.spec.world))
}

/// Ranks without a process that other ranks of the host wait for. Nobody waits for a rank that saves no more.
pub(super) fn absent_ranks(run: &Run) -> Vec<u32> {
    let ranks = run.spec.local_ranks();
    let Some(arenas) = run.read(|_, arenas| arenas.all(ranks.clone())) else { return Vec::new() };
    let is_absent = |rank: &u32| !run.has_process(*rank) && !run.read(|state, _| saves_no_more(state, *rank));
    let (waiting, others): (Vec<_>, Vec<_>) = ranks.zip(&arenas).partition(|(_, arena)| arena.has_full_slot());
    match waiting.iter().any(|(rank, _)| run.has_process(*rank)) {
        true => others.into_iter().map(|(rank, _)| rank).filter(is_absent).collect(),
        false => Vec::new(),
    }
}

/// Whether a complete save waits to be encoded, or is being encoded.
pub(super) fn has_work(run: &Run) -> bool {
    if run.is_stopped() || run.is_outdated() || run.spec.inline {
        return false;
    }
    let Some(arenas) = run.read(|_, arenas| arenas.all(run.spec.local_ranks())) else { return false };
    let is_encoding = |arena: &Arc<Arena>| arena.words().is_ok_and(|words| words.iter().any(|word| word.state == SlotState::Encoding));
    matches!(next_work(run, &arenas), Ok(Selection::Encode(_))) || arenas.iter().any(is_encoding)
}

/// Removes arenas of ranks that the job no longer has. Their states are encoded, or were never complete.
pub(super) fn remove_former_ranks(run: &Run) {
    for rank in run.folder.ranks().unwrap_or_default().into_iter().filter(|rank| !run.spec.local_ranks().contains(rank)) {
        if let Err(error) = remove_file(&run.folder.rank(rank).arena()) {
            tracing::warn!(run = run.spec.run, rank, %error, "cannot remove the arena of a rank that the job no longer has");
        }
    }
}
