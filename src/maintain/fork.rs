//! Forks: a new run that begins with one step of another.

use std::time::Duration;

use super::copier::{Copier, open_of_run, source_file};
use super::{CopyOptions, CopyReport};
use crate::chain::chain_of;
use crate::commit::{DEFAULT_AGE_FLOOR, Log, LogState, forget_among, live_step, load_log, read_store_file, without_store_file};
use crate::error::ResultExt;
use crate::wire::Id;
use crate::{Error, ErrorKind, Result, Store, boxed};

/// Options of a fork.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForkOptions {
    /// Step to begin with; `None` for the latest.
    pub step: Option<u64>,
    /// Whether the fork shares casks with the source if both lie on the same file system, and has the storage copy them if both lie
    /// in one bucket. Otherwise every cask is transferred, and every byte of it is checked.
    pub share: bool,
    /// Age floor of garbage collection of the fork: see [`WriterOptions::age_floor`](crate::WriterOptions::age_floor).
    pub age_floor: Duration,
}

impl Default for ForkOptions {
    fn default() -> Self {
        Self { step: None, share: true, age_floor: DEFAULT_AGE_FLOOR }
    }
}

/// Makes `destination` a new run that begins with one step of `source`: with that snapshot and the base of its chain, live, and the
/// deltas between them, forgotten. Later saves there are deltas on it. Returns the step and what was copied.
///
/// The fork needs nothing of the source afterwards: it may forget, collect and lose what it likes. On a local disk, both share
/// the casks by hard links, so the fork takes no space for them; in one bucket, the storage copies them itself; otherwise
/// they are transferred. A fork that was interrupted is resumed by forking again.
///
/// Fails with `NotFound` if the source does not have the step, and with `Conflict` if the destination has steps that are not of the
/// source, or is a copy of the same run.
#[boxed]
pub async fn fork(source: &Store, destination: &Store, options: &ForkOptions) -> Result<(u64, CopyReport)> {
    let mut freed = 0;
    loop {
        // Entries after a gap name steps that a reader does not see.
        let from = Log::load_whole(source).await.map_err(|e| e.object(source.url()))?;
        let step = match options.step {
            Some(step) => step,
            None => latest(&from, source)?,
        };
        match fork_at(source, from.state(), destination, step, options).await {
            // A job may have freed the latest step meanwhile (log 7.6).
            Err(error) if options.step.is_none() && (error.kind() == ErrorKind::NotFound || error.is_given_up()) && freed < MOST_FREED => {
                if latest(&load_log(source).await?, source)? == step {
                    return Err(error);
                }
                freed += 1;
            }
            forked => return forked.map(|report| (step, report)),
        }
    }
}

fn latest(log: &Log, source: &Store) -> Result<u64> {
    let latest = log.state().latest().ok_or_else(|| Error::not_found("the store has no step to begin with").object(source.url()))?;
    Ok(latest.step)
}

#[boxed]
async fn fork_at(source: &Store, from: &LogState, destination: &Store, step: u64, options: &ForkOptions) -> Result<CopyReport> {
    let log = open_fork(source, from, destination).await?;
    let copy_options = CopyOptions { steps: Some(vec![step]), age_floor: options.age_floor, ..CopyOptions::default() };
    let mut copier = Copier::of_log(destination, log, Id::random()?, copy_options);
    copier.refuse_owned().await?;
    copier.shares = options.share;
    copier.replaces = false;
    let (_, report) = copier.add_missing(source).await?;
    // Also what an interrupted fork has added. A writer makes no delta on a chain whose base is forgotten.
    let state = copier.log.state();
    let chain = chain_of(state, live_step(state, step)?.id, destination.limits().max_chain_depth)?;
    let kept = [chain.first(), chain.last()].map(|link| link.map(|link| link.id));
    let links: Vec<Id> = state.live().map(|record| record.id).filter(|id| !kept.contains(&Some(*id))).collect();
    forget_among(&mut copier.log, copier.writer, &links).await?;
    Ok(report)
}

/// Number of times that a fork of the latest step begins again.
const MOST_FREED: usize = 16;

/// Opens the fork, or creates it with a run id of its own. Refuses a store that an interrupted fork of this source cannot have left.
#[boxed]
async fn open_fork(source: &Store, from: &LogState, destination: &Store) -> Result<Log> {
    let file = source_file(source).await?;
    let conflict = |what: &str| Err(Error::new(ErrorKind::Conflict, what).object(destination.url()));
    match read_store_file(destination).await {
        Ok(found) if found.run == file.run => conflict("this is the forked store itself or a copy of it; fork into an empty place"),
        Ok(found) => {
            let there = load_log(destination).await?;
            match there.state().snapshots().iter().all(|known| from.by_id(known.id).is_some()) {
                true => open_of_run(destination, found).await,
                false => conflict("another run has saved here; fork into an empty place"),
            }
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            without_store_file(destination).await?.map_or(Ok(()), Err)?;
            open_of_run(destination, file.for_run(Id::random()?)).await
        }
        Err(e) => Err(e).in_object(destination.url()),
    }
}
