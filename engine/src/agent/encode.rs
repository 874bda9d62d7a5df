//! From raw states in arenas to snapshots in memory, one after the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcask::{Ahead, Error, ErrorKind, Result, Saved};
use tracing::Instrument;
use tracing::field::Empty;

use super::ranks::{Name, Next};
use super::run::Run;
use crate::arena::Taken;
use crate::image::Stored;
use crate::place::free_space;
use crate::seen::Seen;
use crate::tier::{MemoryTier, clear, is_full};

/// Waits after a failure: the first, which doubles up to the last.
pub(super) const WAITS: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(20));

/// Encodes whatever comes, for as long as the agent lives.
pub(super) async fn encode_loop(run: Arc<Run>) {
    let mut memory = None;
    let mut wait = WAITS.0;
    loop {
        match encode_all(&run, &mut memory).await {
            Ok(()) => {
                wait = WAITS.0;
                run.encode.notified().await;
            }
            Err(error) => {
                // What failed may have left the writer unusable.
                memory = None;
                run.problem(Some(error.to_string()));
                tokio::time::sleep(WAITS.0).await;
                let _ = tokio::time::timeout(wait, run.encode.notified()).await;
                wait = (wait * 2).min(WAITS.1);
            }
        }
    }
}

async fn encode_all(run: &Run, memory: &mut Option<MemoryTier>) -> Result<()> {
    if let Some(latest) = run.found_instead() {
        *memory = None;
        // One that encodes inline has done so itself.
        if !run.spec.inline {
            clear(&run.place)?;
        }
        Seen::replace(&run.place, &latest)?;
        run.is_fresh();
    }
    // A trainer that encodes inline has the memory tier itself.
    if run.stopped() || run.spec.inline {
        return Ok(());
    }
    let tier = match memory {
        Some(opened) => opened,
        None => {
            let opened = MemoryTier::open(&run.place, &run.tiers, run.spec.writer_options()?, run.spec.world).await?;
            note_memory(run, &opened).await?;
            // The first upload takes the store over, even if there is nothing to upload yet.
            run.upload.iter().for_each(tokio::sync::Notify::notify_one);
            memory.insert(opened)
        }
    };
    loop {
        let has_room = make_room(run, tier).await?;
        note_memory(run, tier).await?;
        let turn = if has_room && !run.stopped() { encode_next(run, tier).await? } else { Turn::Idle };
        match turn {
            Turn::Done => {}
            Turn::Idle => {
                run.problem(what_is_missing(run, tier)?);
                return Ok(());
            }
            Turn::Reopen => {
                *memory = None;
                run.encode.notify_one();
                return Ok(());
            }
        }
    }
}

/// Tells what is in memory.
async fn note_memory(run: &Run, memory: &MemoryTier) -> Result<()> {
    let (live, bytes) = (memory.live().await?, memory.bytes()?);
    let depth = match live.last() {
        Some(_) => memory.store().snapshot(tensorcask::Latest).await.map_or(0, |newest| newest.chain().len() as u64),
        None => 0,
    };
    run.set_memory(|facts| {
        if facts.epoch != memory.epoch() {
            (facts.epoch, facts.uploaded) = (memory.epoch(), 0);
        }
        facts.steps = live.iter().map(|record| record.step).collect();
        (facts.bytes, facts.chain_depth) = (bytes, depth);
    });
    Ok(())
}

/// Gives up old snapshots; whether there is room for one more.
async fn make_room(run: &Run, memory: &mut MemoryTier) -> Result<bool> {
    if run.memory().damaged.contains(&memory.epoch()) {
        memory.begin_epoch().await?;
        note_memory(run, memory).await?;
    }
    // Nothing is given up that a trainer may be about to restore.
    if run.is_restoring() {
        return Ok(memory.bytes()? < run.cap);
    }
    memory.make_room(run.spec.keep, run.cap, &run.sent(memory.epoch()), run.uploads_go_on()).await
}

/// What keeps states that wait from being encoded, as far as trying again does not help: memory full of what the store does not have
/// yet, or ranks that have not come.
fn what_is_missing(run: &Run, memory: &MemoryTier) -> Result<Option<String>> {
    let missing = run.missing_ranks();
    if !missing.is_empty() {
        let ranks: Vec<String> = missing.iter().take(8).map(u32::to_string).collect();
        return Ok(Some(format!(
            "a step is committed when all {} ranks on this host have saved it; nothing has come from rank {}",
            run.spec.world,
            ranks.join(", ")
        )));
    }
    let bytes = memory.bytes()?;
    let waits = || run.arenas().is_some_and(|arenas| arenas.iter().any(|arena| arena.has_waiting()));
    Ok((bytes >= run.cap && waits()).then(|| {
        format!(
            "encoded snapshots take {bytes} bytes of shared memory, over the cap of {}; states wait in the arena until the store has taken some",
            run.cap
        )
    }))
}

/// What became of the next state.
enum Turn {
    /// There is none, for now.
    Idle,
    /// It is encoded, or failed.
    Done,
    /// Memory has to be opened anew for it.
    Reopen,
}

/// Encodes the next state, if there is one.
async fn encode_next(run: &Run, memory: &mut MemoryTier) -> Result<Turn> {
    let Some(arenas) = run.arenas() else { return Ok(Turn::Idle) };
    let name = match run.next(&arenas)? {
        Next::Wait => return Ok(Turn::Idle),
        Next::Encode(_) if memory.is_of_another_run(&run.tiers).await? => return Ok(Turn::Reopen),
        Next::Encode(name) => name,
        Next::Drop(all) => {
            for (rank, name) in all {
                if let Some(taken) = arenas.get(rank).map(|arena| arena.take(|kept| Name::of(kept) == name)).transpose()?.flatten() {
                    let generation = taken.generation();
                    taken.release()?;
                    let error = Error::not_found("not all ranks have saved this step, in the same start of the job");
                    run.failed(&[(rank as u32, generation)], name.step, &error);
                }
            }
            return Ok(Turn::Done);
        }
    };
    let mut taken = Vec::with_capacity(arenas.len());
    for arena in &arenas {
        match arena.take(|kept| Name::of(kept) == name)? {
            Some(found) => taken.push(found),
            // Dropped by its trainer meanwhile; the others are given back.
            None => return Ok(Turn::Idle),
        }
    }
    // A trainer that found the memory tier out of date may have saved since this was begun: its state does not belong there.
    if run.is_out_of_date() {
        return Ok(Turn::Idle);
    }
    let generations: Vec<u64> = taken.iter().map(Taken::generation).collect();
    let Some(first) = taken.first() else { return Ok(Turn::Idle) };
    let (begun, step) = (Instant::now(), first.step()?);
    let generation = first.generation();
    let span = tracing::info_span!("encode", run = run.spec.run, step, generation, encode_ms = Empty, bytes_out = Empty, kind = Empty);
    // Memory may have been damaged since the copy.
    let states: Result<Vec<Stored<'_>>> =
        taken.iter().map(|taken| taken.state().and_then(|state| state.verify().map(|()| state))).collect();
    let ahead = run.sends_ahead().map(Ahead::new);
    memory.send_ahead(ahead.as_ref());
    let saved = match &states {
        Ok(states) => encode(memory, states).instrument(span.clone()).await.map_err(|error| (true, error)),
        Err(error) => Err((false, Error::new(error.kind(), error.to_string()))),
    };
    memory.send_ahead(None);
    let error = match saved {
        Ok(saved) => {
            // All of them first: an agent that goes on releases them, and does not wait for ranks that have it behind them.
            taken.iter().zip(&arenas).try_for_each(|(taken, arena)| arena.set_encoded(taken.generation()))?;
            taken.into_iter().try_for_each(Taken::release)?;
            let encode_ms = begun.elapsed().as_secs_f64() * 1e3;
            span.record("encode_ms", encode_ms).record("bytes_out", saved.stored_bytes).record("kind", saved.kind.name());
            run.remove_former_ranks();
            run.encoded(step, generations, memory.epoch(), &saved, encode_ms, ahead);
            return Ok(Turn::Done);
        }
        // Its base, or what it says of itself.
        Err((true, error)) if error.kind() == ErrorKind::Corrupt && !memory.live().await?.is_empty() => {
            tracing::error!(run = run.spec.run, %error, "encoded memory is damaged; another takes its place, which begins with a base");
            memory.begin_epoch().await?;
            return Ok(Turn::Done);
        }
        Err((_, error)) => error,
    };
    let error = match is_full(&error) {
        true => {
            let bytes: u64 = states.iter().flatten().map(Stored::data_bytes).sum();
            let message =
                format!("no space: encoded, step {step} needs up to {bytes} bytes of shared memory, and {}", free_space(run.place.root()));
            let error = Error::new(ErrorKind::Storage, message).source(error);
            if run.is_restoring() {
                return Err(error);
            }
            // Whether there was anything to give up for it.
            let was_empty = memory.live().await?.is_empty();
            match memory.start_over(&run.sent(memory.epoch())).await? {
                false => return Err(error),
                true if !was_empty => return Ok(Turn::Done),
                true => error,
            }
        }
        false if is_final(&error) => error,
        false => return Err(error),
    };
    taken.into_iter().try_for_each(Taken::release)?;
    run.failed(&(0..).zip(generations).collect::<Vec<_>>(), step, &error);
    Ok(Turn::Done)
}

async fn encode(memory: &mut MemoryTier, states: &[Stored<'_>]) -> Result<Saved> {
    match states {
        [state] => memory.save(state.step(), &state.tensors()?, &state.blobs(), &state.metadata()).await,
        several => memory.save_ranks(several.first().map_or(0, Stored::step), several).await,
    }
}

/// Whether trying again cannot help: the state itself is at fault.
fn is_final(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Unsupported | ErrorKind::LimitExceeded | ErrorKind::Corrupt)
}
