//! The status report of a run.

use std::time::Instant;

use super::run::Run;
use super::run_parts::{RankState, TierState};
use super::run_state::RunState;
use crate::arena::{Arena, SlotView};
use crate::os::clock::now_ms;
use crate::run::host_notes::HostNotes;
use crate::run::status::{HostsStatus, LevelStatus, RankStatus, RunStatus, SaveStatus, SlotStatus, TierStatus};

/// Reports the status of a run.
pub(super) fn status_of(run: &Run) -> RunStatus {
    let (replicas, peers_problem) = {
        let board = run.replicas();
        (board.statuses(Instant::now()), board.problem(Instant::now()))
    };
    run.read(|state, arenas| {
        let rank = |(rank, state): (&u32, &RankState)| RankStatus {
            rank: *rank,
            trainer: state.trainer,
            arena_bytes: arenas.get(*rank).map_or(0, |arena| arena.file().bytes()),
            arena_present_bytes: arenas.get(*rank).map_or(0, |arena| arena.file().present_bytes()),
            slots: arenas.get(*rank).map_or_else(Vec::new, |arena| slots(arena)),
        };
        RunStatus {
            run: run.spec.run.clone(),
            key: run.spec.key.clone(),
            tiers: run.spec.tiers.iter().zip(&state.tiers).map(|(url, state)| tier(url, state)).collect(),
            ranks: state.ranks.iter().map(rank).collect(),
            levels: levels(state),
            hosts: run.spec.hosts.as_ref().map(|hosts| HostsStatus {
                session: hosts.session.to_string(),
                first_rank: hosts.first_rank,
                ranks: hosts.ranks,
                leader: state.leader.clone(),
                is_without_store: HostNotes::read(&run.folder, hosts.session).is_without_store(),
            }),
            queue_depth: state.queue_depth(arenas.waiting_states()),
            last_commit_step: state.saves.last_commit.map(|commit| commit.step),
            seconds_since_commit: state.saves.last_commit.map(|commit| now_ms().saturating_sub(commit.time_ms) as f64 / 1e3),
            chain_depth: state.memory.chain_depth,
            failed_saves: state.saves.failed,
            memory_steps: state.memory.steps.clone(),
            memory_bytes: replicas.iter().fold(state.memory.bytes, |sum, replica| sum.saturating_add(replica.bytes)),
            memory_cap_bytes: run.cap,
            replicas,
            peers_problem,
            problem: state.fault.clone().or(state.problem.clone()),
            stopped: state.stopped.clone(),
            saves: state.saves.saves().cloned().collect(),
        }
    })
}

fn levels(state: &RunState) -> LevelStatus {
    let newest = |has: fn(&SaveStatus) -> bool| state.saves.saves().filter(|save| has(save)).last().map(|save| save.step);
    let durable = state.saves.last_commit.map(|commit| commit.step);
    LevelStatus {
        copied: newest(|_| true).or(durable),
        encoded: newest(|save| save.encode_ms.is_some()).or(state.memory.steps.last().copied()).or(durable),
        replicated: state.replicated_step,
        durable,
    }
}

fn slots(arena: &Arena) -> Vec<SlotStatus> {
    let slot = |view: SlotView| SlotStatus { state: view.word.state.name().to_owned(), step: view.header.map(|header| header.step) };
    arena.views().map_or_else(|_| Vec::new(), |views| views.into_iter().map(slot).collect())
}

fn tier(url: &str, state: &TierState) -> TierStatus {
    TierStatus { url: url.to_owned(), last_step: state.last_step, pending: state.pending, problem: state.obstacle().cloned() }
}
