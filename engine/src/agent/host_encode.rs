//! The encoder of a host in a run on many hosts: encodes raw states from the arenas straight into the first tier, and
//! publishes the receipts of its ranks.

use std::sync::Arc;
use std::time::Instant;

use tensorcask::wire::{RankRange, SessionStep};
use tensorcask::{Error, ErrorKind, HostWriter, Metadata, RankState, Result, SessionExchange, Store};

use super::encode::{drop_incomplete, is_final};
use super::encoder_queue::{next_work, remove_former_ranks};
use super::host_work::{HostWork, UploadedStep};
use super::retry::Backoff;
use super::run_event::{EncodedSave, Event as RunEvent, RankGeneration};
use super::save_log::Encoding;
use super::step_selection::{SaveKey, Selection};
use crate::arena::Arena;
use crate::clock::now_ms;
use crate::hosts::{Event, StepKey};
use crate::image::StoredState;
use crate::known_tiers::KnownTiers;
use crate::memory_stores::remove_all_epochs;
use crate::memory_tier::without_replicas;
use crate::slot_access::TakenSlot;

/// Encodes and uploads states until the agent ends.
pub(super) async fn host_encode_loop(work: Arc<HostWork>) {
    let mut encoder = HostEncoder { work: work.clone(), writer: None, saves: 0 };
    let mut backoff = Backoff::new();
    loop {
        match encoder.encode_all().await {
            Ok(()) => {
                backoff.reset();
                work.run.wakes.encoder_woken().await;
            }
            Err(error) => {
                // The writer may be unusable after an error.
                encoder.writer = None;
                work.run.apply(RunEvent::EncoderProblem(Some(describe(&error))));
                backoff.wait(work.run.wakes.encoder_woken()).await;
            }
        }
    }
}

/// Encodes the states of one host.
struct HostEncoder {
    work: Arc<HostWork>,
    writer: Option<HostWriter>,
    /// Number of saves so far.
    saves: u64,
}

impl HostEncoder {
    async fn encode_all(&mut self) -> Result<()> {
        let work = self.work.clone();
        let run = &work.run;
        if let Some(latest) = run.read(|state, _| state.memory.outdated.clone()) {
            remove_all_epochs(&run.folder)?;
            KnownTiers::replace(&run.folder, &latest)?;
            run.apply(RunEvent::MemoryCleared);
        }
        while !run.is_stopped() {
            let Some(arenas) = run.read(|_, arenas| arenas.all(run.spec.local_ranks())) else { break };
            match next_work(run, &arenas)? {
                Selection::Wait => break,
                Selection::Drop(states) => states.into_iter().try_for_each(|state| drop_incomplete(run, &arenas, state))?,
                Selection::Encode(key) => {
                    if !self.encode_step(&arenas, key).await? {
                        break;
                    }
                }
            }
        }
        if run.read(|state, arenas| state.owes_end() && arenas.waiting_states() == 0)
            && let Some(store) = run.tiers.first()
        {
            // Every state of these ranks is uploaded or dropped by now.
            let ranks = run.spec.local_ranks();
            let ranks = RankRange { first: ranks.start, last: ranks.end.saturating_sub(1) };
            SessionExchange::end_ranks(store, work.hosts.session, ranks).await?;
            run.apply(RunEvent::EndNoted);
        }
        run.apply(RunEvent::EncoderProblem(None));
        Ok(())
    }

    /// Encodes and uploads a step; returns `false` if a trainer has dropped its state meanwhile.
    async fn encode_step(&mut self, arenas: &[Arc<Arena>], key: SaveKey) -> Result<bool> {
        let (work, ranks) = (self.work.clone(), self.work.run.spec.local_ranks());
        let run = &work.run;
        let (at, step) = (SessionStep { attempt: key.attempt, step: key.step }, StepKey { attempt: key.attempt, step: key.step });
        work.apply(Event::Copied(step));
        let writer = match &mut self.writer {
            Some(open) => open,
            None => self.writer.insert(open_writer(&work, run.tiers.first()).await?),
        };
        let parent = writer.fix_parent(at).await?;
        work.apply(Event::ParentFixed { key: step, parent });
        let begun = Instant::now();
        let mut taken = Vec::with_capacity(arenas.len());
        for arena in arenas {
            match TakenSlot::take(arena, |header| SaveKey::of(header) == key)? {
                Some(found) => taken.push(found),
                // The slots of other ranks are given back.
                None => {
                    work.apply(Event::Dropped(step));
                    return Ok(false);
                }
            }
        }
        let generations: Vec<RankGeneration> =
            ranks.clone().zip(&taken).map(|(rank, taken)| RankGeneration { rank, generation: taken.generation() }).collect();
        let saved = match states_of(&taken) {
            Ok(states) => save(writer, at, parent, ranks.start, &states).await,
            Err(error) => Err(error),
        };
        let stored_bytes = match saved {
            Ok(stored_bytes) => stored_bytes,
            Err(error) if is_final(&error) => {
                work.apply(Event::Dropped(step));
                let message = error.to_string();
                run.release_and_apply(taken, RunEvent::Failed { generations, step: key.step, message })?;
                return Ok(true);
            }
            Err(error) => return Err(error),
        };
        // Marked before any slot is released: a later agent then releases the slots instead of waiting for all ranks.
        taken.iter().zip(arenas).try_for_each(|(taken, arena)| arena.raise_encoded(taken.generation()))?;
        remove_former_ranks(run);
        self.saves = self.saves.saturating_add(1);
        let encoding = Encoding {
            encode_ms: begun.elapsed().as_secs_f64() * 1e3,
            stored_bytes,
            kind: if parent.is_some() { "delta" } else { "base" }.to_owned(),
        };
        let save = EncodedSave {
            step: key.step,
            generations: generations.iter().map(|known| known.generation).collect(),
            epoch: 0,
            sequence: self.saves,
            encoding,
        };
        run.release_and_apply(taken, RunEvent::Encoded(save))?;
        work.note_uploaded(step, UploadedStep { sequence: self.saves, generations, uploaded_ms: now_ms() });
        Ok(true)
    }
}

async fn open_writer(work: &HostWork, store: Option<&Store>) -> Result<HostWriter> {
    let (spec, store) = (&work.run.spec, store.ok_or_else(|| Error::invalid("no tier"))?);
    let ranks: Vec<u32> = spec.local_ranks().collect();
    HostWriter::open(store, work.hosts.session, &ranks, spec.world, spec.writer_options()?).await
}

/// The states in taken slots. Their bytes may have been damaged since the copy.
fn states_of<'t>(taken: &'t [TakenSlot<'_>]) -> Result<Vec<StoredState<'t>>> {
    taken.iter().map(|taken| taken.state().and_then(|state| state.verify().map(|()| state))).collect()
}

/// Uploads the states of all ranks of this host; returns the size of their casks.
async fn save(
    writer: &mut HostWriter,
    at: SessionStep,
    parent: Option<tensorcask::wire::Id>,
    first: u32,
    states: &[StoredState<'_>],
) -> Result<u64> {
    let tensors = states.iter().map(StoredState::tensors).collect::<Result<Vec<_>>>()?;
    let own = without_replicas(first, tensors)?;
    let with_metadata = |rank: u32, state: &StoredState<'_>| if rank == 0 { state.metadata() } else { Metadata::default() };
    let parts = (first..).zip(states).zip(own).map(|((rank, state), tensors)| RankState {
        tensors,
        blobs: state.blobs(),
        metadata: with_metadata(rank, state),
    });
    let receipts = writer.save(at, parent, &parts.collect::<Vec<_>>()).await?;
    Ok(receipts.iter().flat_map(|receipt| &receipt.casks).fold(0, |sum, cask| sum.saturating_add(cask.bytes)))
}

fn describe(error: &Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => format!("waiting for a host to open the store: {error}"),
        _ => error.to_string(),
    }
}
