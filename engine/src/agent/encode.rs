//! The encoder of a run: encodes raw states from the arenas into snapshots in memory, one after the other.

use std::sync::Arc;
use std::time::Instant;

use tensorcask::{AheadUploads, Error, ErrorKind, Latest, Result, TensorView};
use tracing::Instrument;
use tracing::field::Empty;

use super::encoder_queue::{absent_ranks, next_work, remove_former_ranks};
use super::encoding_attempts::EncodingAttempt;
use super::retry::Backoff;
use super::run::Run;
use super::run_event::{EncodedSave, Event, MemoryContents, RankGeneration};
use super::save_log::Encoding;
use super::step_selection::{SaveKey, Selection, StateOfRank};
use crate::arena::Arena;
use crate::arena::image::StoredState;
use crate::arena::slot_access::TakenSlot;
use crate::memory::stores::{is_full, remove_all_epochs};
use crate::memory::tier::{EncodedSnapshot, MemoryTier, Uploads};
use crate::os::folders::describe_free_space;
use crate::rows::trust::{RowTrust, SaveOfRank};
use crate::run::known_tiers::KnownTiers;

/// Encodes states until the agent ends.
pub(super) async fn encode_loop(run: Arc<Run>) {
    let mut memory = None;
    let mut rows = RowTrust::of_ranks(run.spec.local_ranks().start);
    let mut backoff = Backoff::new();
    loop {
        match encode_all(&run, &mut memory, &mut rows).await {
            Ok(()) => {
                backoff.reset();
                run.wakes.encoder_woken().await;
            }
            Err(error) => {
                // The writer may be unusable after an error.
                memory = None;
                run.apply(Event::EncoderProblem(Some(error.to_string())));
                backoff.wait(run.wakes.encoder_woken()).await;
            }
        }
    }
}

async fn encode_all(run: &Run, memory: &mut Option<MemoryTier>, rows: &mut RowTrust) -> Result<()> {
    if let Some(latest) = run.read(|state, _| state.memory.outdated.clone()) {
        *memory = None;
        // A trainer that encodes inline has removed its memory already.
        if !run.spec.inline {
            remove_all_epochs(&run.folder)?;
        }
        KnownTiers::replace(&run.folder, &latest)?;
        run.apply(Event::MemoryCleared);
    }
    // A trainer that encodes inline owns the memory tier.
    if run.is_stopped() || run.spec.inline {
        return Ok(());
    }
    let tier = match memory {
        Some(opened) => opened,
        None => {
            let opened = MemoryTier::open(&run.folder, &run.tiers, run.spec.writer_options()?, run.spec.world).await?;
            note_memory(run, &opened).await?;
            // The first upload takes the store over, even if there is nothing to upload yet.
            run.wakes.wake_uploaders();
            memory.insert(opened)
        }
    };
    loop {
        let has_room = make_room(run, tier).await?;
        note_memory(run, tier).await?;
        let turn = if has_room && !run.is_stopped() { encode_next(run, tier, rows).await? } else { Turn::Idle };
        match turn {
            Turn::Done => {}
            Turn::Idle => {
                run.apply(Event::EncoderProblem(find_obstacle(run, tier)?));
                return Ok(());
            }
            Turn::Reopen => {
                *memory = None;
                run.wakes.wake_encoder();
                return Ok(());
            }
        }
    }
}

/// Reports the contents of memory.
async fn note_memory(run: &Run, memory: &MemoryTier) -> Result<()> {
    let live = memory.live().await?;
    let bytes = memory.bytes()?;
    let chain_depth = match live.last() {
        Some(_) => memory.store().snapshot(Latest).await.map_or(0, |newest| newest.inspect().chain().len() as u64),
        None => 0,
    };
    let steps = live.iter().map(|record| record.step).collect();
    run.apply(Event::MemoryChanged(MemoryContents { epoch: memory.epoch(), steps, bytes, chain_depth }));
    Ok(())
}

/// Whether an upload has given the store in memory up, with all later deltas on its snapshots.
fn is_unusable(run: &Run, memory: &MemoryTier) -> bool {
    run.read(|state, _| state.memory.unusable.contains(&memory.epoch()))
}

/// Removes old snapshots; returns whether there is room for another one.
async fn make_room(run: &Run, memory: &mut MemoryTier) -> Result<bool> {
    if is_unusable(run, memory) {
        memory.begin_epoch().await?;
        note_memory(run, memory).await?;
    }
    // A trainer may be about to restore any snapshot.
    if run.read(|state, _| state.is_restoring) {
        return Ok(memory.bytes()? < run.cap);
    }
    let (uploaded, uploads) = run.read(|state, _| {
        let is_working = state.stopped.is_none() && state.tiers.first().is_some_and(|tier| tier.obstacle().is_none());
        (state.memory.upload_state(memory.epoch()), if is_working { Uploads::Working } else { Uploads::Failing })
    });
    let epoch = memory.epoch();
    let has_room = memory.make_room(run.spec.keep, run.cap, &uploaded, uploads).await?;
    if memory.epoch() != epoch {
        // The older store stays until an upload has read both.
        run.wakes.wake_uploaders();
    }
    Ok(has_room)
}

/// Names an obstacle that keeps waiting states from being encoded and that a retry does not remove: missing ranks, or
/// memory full of snapshots that the store does not have yet.
fn find_obstacle(run: &Run, memory: &MemoryTier) -> Result<Option<String>> {
    let missing = run.read(|_, arenas| arenas.missing(run.spec.local_ranks()));
    if !missing.is_empty() {
        let ranks: Vec<String> = missing.iter().take(8).map(u32::to_string).collect();
        return Ok(Some(format!(
            "a step is committed when all {} ranks on this host have saved it; nothing has come from rank {}",
            run.spec.world,
            ranks.join(", ")
        )));
    }
    let bytes = memory.bytes()?;
    let is_waiting =
        || run.read(|_, arenas| arenas.all(run.spec.local_ranks())).is_some_and(|all| all.iter().any(|arena| arena.has_full_slot()));
    if bytes >= run.cap && is_waiting() {
        return Ok(Some(format!(
            "encoded snapshots use {bytes} bytes of shared memory, over the cap of {}; states wait in the arena until the store has some of them",
            run.cap
        )));
    }
    let absent: Vec<String> = absent_ranks(run).iter().take(8).map(u32::to_string).collect();
    let message = || format!("states wait for rank {}, whose trainer has ended; start it again, or end the job", absent.join(", "));
    Ok((!absent.is_empty()).then(message))
}

/// Why a state is dropped that not all ranks have.
const NOT_COMPLETE: &str = "not all ranks have saved this step in the same session of the job, or a rank has returned to an older step, or \
                            repeated a save, without the others; if all saves fail, end the job and start it again";

/// Result of a turn of the encoder.
enum Turn {
    /// No state can be encoded now.
    Idle,
    /// A state was encoded or dropped.
    Done,
    /// The memory tier must be opened again first.
    Reopen,
}

/// Encodes the next state, if there is one.
async fn encode_next(run: &Run, memory: &mut MemoryTier, rows: &mut RowTrust) -> Result<Turn> {
    let Some(arenas) = run.read(|_, arenas| arenas.all(run.spec.local_ranks())) else { return Ok(Turn::Idle) };
    let key = match next_work(run, &arenas)? {
        Selection::Wait => return Ok(Turn::Idle),
        Selection::Encode(_) if memory.is_of_another_run(&run.tiers).await? => return Ok(Turn::Reopen),
        Selection::Encode(key) => key,
        Selection::Drop(states) => {
            states.into_iter().try_for_each(|state| drop_incomplete(run, &arenas, state))?;
            return Ok(Turn::Done);
        }
    };
    let mut taken = Vec::with_capacity(arenas.len());
    for arena in &arenas {
        match TakenSlot::take(arena, |header| SaveKey::of(header) == key)? {
            Some(found) => taken.push(found),
            // Its trainer has dropped the state. The slots of other ranks are given back.
            None => return Ok(Turn::Idle),
        }
    }
    // A trainer may have found memory out of date and saved since this turn began. Its state does not belong into the
    // old memory.
    if run.is_outdated() {
        return Ok(Turn::Idle);
    }
    // And it may have heard that memory was given up: the next turn begins another store.
    if is_unusable(run, memory) {
        return Ok(Turn::Done);
    }
    encode_taken(run, memory, rows, taken).await
}

/// Drops a state that not all ranks have.
pub(super) fn drop_incomplete(run: &Run, arenas: &[Arc<Arena>], StateOfRank { rank, key }: StateOfRank) -> Result<()> {
    let taken = arenas.get(rank).map(|arena| TakenSlot::take(arena, |header| SaveKey::of(header) == key)).transpose()?.flatten();
    if let Some(taken) = taken {
        let generations =
            vec![RankGeneration { rank: run.spec.local_ranks().start.saturating_add(rank as u32), generation: taken.generation() }];
        let message = Error::not_found(NOT_COMPLETE).to_string();
        run.release_and_apply(vec![taken], Event::Failed { generations, step: key.step, message })?;
    }
    Ok(())
}

/// Encodes taken slots, one per rank, as one snapshot.
async fn encode_taken(run: &Run, memory: &mut MemoryTier, rows: &mut RowTrust, taken: Vec<TakenSlot<'_>>) -> Result<Turn> {
    let generations: Vec<u64> = taken.iter().map(TakenSlot::generation).collect();
    let saves = saves_of(&taken)?;
    let Some(first) = taken.first() else { return Ok(Turn::Idle) };
    let begun = Instant::now();
    let step = first.step()?;
    let generation = first.generation();
    let span = tracing::info_span!("encode", run = run.spec.run, step, generation, encode_ms = Empty, bytes_out = Empty, kind = Empty);
    let attempt = match EncodingAttempt::begin(&run.folder, step, &generations) {
        Ok(attempt) => attempt,
        Err(message) => {
            let generations = by_rank(run, &generations);
            run.release_and_apply(taken, Event::Failed { generations, step, message })?;
            return Ok(Turn::Done);
        }
    };
    // The bytes may have been damaged since the copy.
    let states: Result<Vec<StoredState<'_>>> =
        taken.iter().map(|taken| taken.state().and_then(|state| state.verify().map(|()| state))).collect();
    let ahead = run.ahead_destination().map(AheadUploads::new);
    memory.send_ahead(ahead.as_ref());
    memory.set_previous_save(run.read(|state, _| state.saves.last_committed()));
    let saved = match &states {
        Ok(states) => encode(memory, states, rows, &saves).instrument(span.clone()).await,
        Err(error) => Err(Error::new(error.kind(), error.to_string())),
    };
    memory.send_ahead(None);
    attempt.end();
    let error = match saved {
        Ok(EncodedSnapshot { saved, left_out }) => {
            rows.on_encoded(&saves, &left_out);
            let encode_ms = begun.elapsed().as_secs_f64() * 1e3;
            span.record("encode_ms", encode_ms).record("bytes_out", saved.stored_bytes).record("kind", saved.kind.name());
            remove_former_ranks(run);
            let encoding = Encoding { encode_ms, stored_bytes: saved.stored_bytes, kind: saved.kind.name().to_owned() };
            let epoch = memory.epoch();
            let sequence = saved.sequence;
            run.set_ahead(ahead);
            run.release_and_apply(taken, Event::Encoded(EncodedSave { step, generations, epoch, sequence, encoding }))?;
            return Ok(Turn::Done);
        }
        Err(error) => error,
    };
    if states.is_ok() && error.kind() == ErrorKind::Corrupt && !memory.live().await?.is_empty() {
        tracing::error!(run = run.spec.run, %error, "encoded memory is damaged; creating another store, which begins with a base");
        memory.begin_epoch().await?;
        return Ok(Turn::Done);
    }
    let error = match is_full(&error) {
        true => {
            let bytes: u64 = states.iter().flatten().map(StoredState::data_bytes).sum();
            let free = describe_free_space(run.folder.root());
            let message = format!("no space: step {step} needs up to {bytes} bytes of shared memory in encoded form, and {free}");
            let error = Error::new(ErrorKind::Storage, message).source(error);
            if run.read(|state, _| state.is_restoring) {
                return Err(error);
            }
            let was_empty = memory.live().await?.is_empty();
            let uploaded = run.read(|state, _| state.memory.upload_state(memory.epoch()));
            match memory.start_over(&uploaded).await? {
                false => return Err(error),
                true if !was_empty => return Ok(Turn::Done),
                // Nothing could be removed for this state.
                true => error,
            }
        }
        false if is_final(&error) => error,
        false => return Err(error),
    };
    let generations = by_rank(run, &generations);
    run.release_and_apply(taken, Event::Failed { generations, step, message: error.to_string() })?;
    Ok(Turn::Done)
}

/// The saves of the ranks of this host.
fn by_rank(run: &Run, generations: &[u64]) -> Vec<RankGeneration> {
    let saves = (run.spec.local_ranks().start..).zip(generations);
    saves.map(|(rank, generation)| RankGeneration { rank, generation: *generation }).collect()
}

/// The saves of taken slots.
pub(super) fn saves_of(taken: &[TakenSlot<'_>]) -> Result<Vec<SaveOfRank>> {
    taken.iter().map(|taken| Ok(SaveOfRank { session: taken.session()?, generation: taken.generation() })).collect()
}

/// The tensors of all ranks, with the changed rows that can be taken.
pub(super) fn tensors_with_rows<'a>(states: &[StoredState<'a>], rows: &RowTrust, saves: &[SaveOfRank]) -> Result<Vec<Vec<TensorView<'a>>>> {
    let of_rank =
        |(rank, (state, save)): (usize, (&StoredState<'a>, &SaveOfRank))| state.tensors_with_rows(|since| rows.accepts(rank, *save, since));
    states.iter().zip(saves).enumerate().map(of_rank).collect()
}

async fn encode(memory: &mut MemoryTier, states: &[StoredState<'_>], rows: &RowTrust, saves: &[SaveOfRank]) -> Result<EncodedSnapshot> {
    let tensors = tensors_with_rows(states, rows, saves)?;
    match (states, tensors.as_slice()) {
        ([state], [tensors]) => memory.save(state.step(), tensors, &state.blobs(), &state.metadata()).await,
        _ => memory.save_ranks(states.first().map_or(0, StoredState::step), states, tensors).await,
    }
}

/// Whether a retry cannot help, because the state itself is invalid.
pub(super) fn is_final(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Unsupported | ErrorKind::LimitExceeded | ErrorKind::Corrupt)
}
