//! From raw states in arenas to snapshots in memory, one after the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcask::{Error, ErrorKind, Result, Saved};
use tracing::Instrument;

use super::ranks::{Held, Next, next};
use super::run::{Run, Seen};
use crate::arena::{Arena, Taken};
use crate::image::Stored;
use crate::slot::State;
use crate::tier::{Log, MemoryTier, clear};

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
    if run.is_out_of_date() {
        *memory = None;
        // One that encodes inline has done so itself.
        if !run.spec.inline {
            clear(&run.place)?;
        }
        Seen::update(&run.place, |seen| *seen = Seen::default())?;
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
        if !has_room || run.stopped() || !encode_next(run, tier).await? {
            let full = no_room(run, tier)?;
            if run.progress().problem != full {
                run.problem(full);
            }
            return Ok(());
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
            facts.committed.clear();
        }
        facts.steps = live.iter().map(|record| record.step).collect();
        (facts.bytes, facts.chain_depth) = (bytes, depth);
    });
    Ok(())
}

/// Gives up old snapshots; whether there is room for one more.
async fn make_room(run: &Run, memory: &mut MemoryTier) -> Result<bool> {
    let uploaded = run.memory().uploaded;
    if !run.is_restoring() {
        memory.prune(run.spec.keep, uploaded).await?;
        match memory.renew(uploaded).await? {
            Log::Short => {}
            Log::Renewed => note_memory(run, memory).await?,
            // Not while the store is away: memory takes what it can then.
            Log::Overdue if run.uploads_go_on() => return Ok(false),
            Log::Overdue => {}
        }
        // Better few snapshots in memory than none that is new.
        if memory.bytes()? >= run.cap {
            memory.prune(1, uploaded).await?;
        }
    }
    Ok(memory.bytes()? < run.cap)
}

/// What to tell while memory is full of what the store does not have yet: something if a state waits.
fn no_room(run: &Run, memory: &MemoryTier) -> Result<Option<String>> {
    let bytes = memory.bytes()?;
    if bytes < run.cap {
        return Ok(None);
    }
    let waits = |arena: &Arc<Arena>| arena.words().is_ok_and(|words| words.iter().any(|word| word.state == State::Full));
    if !run.arenas().is_some_and(|arenas| arenas.iter().any(waits)) {
        return Ok(None);
    }
    Ok(Some(format!(
        "encoded snapshots take {bytes} bytes of shared memory, over the cap of {}; states wait in the arena until the store has taken some",
        run.cap
    )))
}

/// Encodes the next state; whether there was one.
async fn encode_next(run: &Run, memory: &mut MemoryTier) -> Result<bool> {
    let Some(arenas) = run.arenas() else { return Ok(false) };
    let step = match arenas.as_slice() {
        [_] => None,
        several => match next(&several.iter().map(|arena| held(arena)).collect::<Result<Vec<_>>>()?) {
            Next::Wait => return Ok(false),
            Next::Encode(step) => Some(step),
            Next::Drop(all) => {
                for (rank, step) in all {
                    if let Some(taken) = several.get(rank).map(|arena| arena.take(|found| found == step)).transpose()?.flatten() {
                        let generation = taken.generation();
                        taken.release()?;
                        run.failed(generation, step, &Error::not_found("not all ranks have saved this step"));
                    }
                }
                return Ok(true);
            }
        },
    };
    let mut taken = Vec::with_capacity(arenas.len());
    for arena in &arenas {
        match arena.take(|found| step.is_none_or(|step| step == found))? {
            Some(found) => taken.push(found),
            // Dropped by its trainer meanwhile; the others are given back.
            None => return Ok(false),
        }
    }
    let Some(generation) = taken.first().map(Taken::generation) else { return Ok(false) };
    let begun = Instant::now();
    let span = tracing::info_span!("encode", run = run.spec.run, generation);
    match encode(memory, &taken).instrument(span).await {
        Ok(saved) => {
            for (taken, arena) in taken.into_iter().zip(&arenas) {
                arena.set_encoded(taken.generation())?;
                taken.release()?;
            }
            run.encoded(generation, &saved, begun.elapsed().as_secs_f64() * 1e3);
        }
        Err((step, error)) if is_final(&error) => {
            taken.into_iter().try_for_each(Taken::release)?;
            run.failed(generation, step, &error);
        }
        Err((_, error)) => return Err(error),
    }
    Ok(true)
}

/// What a rank holds.
fn held(arena: &Arena) -> Result<Vec<Held>> {
    let steps = arena.steps()?.into_iter();
    Ok(steps.filter_map(|(word, step)| Some(Held { step: step?, generation: word.generation, waits: word.state == State::Full })).collect())
}

async fn encode(memory: &mut MemoryTier, taken: &[Taken<'_>]) -> Result<Saved, (u64, Error)> {
    let states: Vec<Stored<'_>> = taken.iter().map(Taken::state).collect::<Result<_>>().map_err(|error| (0, error))?;
    let step = states.first().map_or(0, Stored::step);
    let saved = async {
        // Memory may have been damaged since the copy.
        states.iter().try_for_each(Stored::verify)?;
        match states.as_slice() {
            [state] => memory.save(state.step(), &state.tensors()?, &state.blobs(), &state.metadata()).await,
            several => memory.save_ranks(step, several).await,
        }
    };
    saved.await.map_err(|error| (step, error))
}

/// Whether trying again cannot help: the state itself is at fault.
fn is_final(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Unsupported | ErrorKind::LimitExceeded | ErrorKind::Corrupt)
}
