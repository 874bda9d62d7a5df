//! Copies snapshots into another store: once with [`copy`], or as they come with a [`Copier`].
//!
//! Ids, manifests and casks stay the same; the destination gets a log of its own. The entry that adds a snapshot says
//! whether it is reduced. After the copy, its status (live, forgotten, pinned) is mirrored by further log entries.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Copier;
use crate::chain::chain_of;
use crate::commit::{
    DEFAULT_AGE_FLOOR, Log, LogState, SnapshotRecord, SnapshotStatus, check_root, forget_among, has_store, live_step, load_log,
    read_store_file, refuse_features, store_file_of, without_store_file,
};
use crate::error::ResultExt;
use crate::store::{Created, probe};
use crate::wire::{Event, Id, STORE_FILE};
use crate::{Error, ErrorKind, Result, Store, boxed};

/// Options of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyOptions {
    /// Steps to copy, with their chains; `None` for all live snapshots.
    pub steps: Option<Vec<u64>>,
    /// Age floor of garbage collection at the destination: see
    /// [`WriterOptions::age_floor`](crate::WriterOptions::age_floor).
    pub age_floor: Duration,
    /// Part i of n of the casks, as `(i, n)`: only these are copied, and nothing is committed. After all parts were copied, a copy
    /// without a shard commits. `None` for a whole copy.
    pub shard: Option<(u64, u64)>,
    /// Whether to take the destination over from a job that saves to it: its next save fails with `Fenced`. Otherwise such a copy is
    /// refused with `Conflict`.
    pub take_over: bool,
}

impl Default for CopyOptions {
    fn default() -> Self {
        Self { steps: None, age_floor: DEFAULT_AGE_FLOOR, shard: None, take_over: false }
    }
}

/// Result of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopyReport {
    /// Number of snapshots that this copy committed.
    pub snapshots: u64,
    /// Number of snapshots that the destination had already.
    pub present: u64,
    /// Number of live snapshots of the source that the destination has had, and forgotten. It never takes them back.
    pub forgotten: u64,
    /// Number of objects written.
    pub objects: u64,
    /// Size of those objects, in bytes.
    pub bytes: u64,
    /// Bytes of those objects that had been sent ahead.
    pub ahead_bytes: u64,
}

/// Copies live snapshots of `source` and their chains into `destination`. The destination is created, or holds an
/// earlier copy of the same run. Ids, manifests and casks stay the same. The log is a new one: an `added` entry for each
/// snapshot in the order of the source, then `forgotten` for snapshots that are not live at the source, then pins. If steps
/// are given, other steps that the destination had before keep their status. Each cask is checked at the destination, byte by
/// byte, before it is committed. A copy that was interrupted is resumed by copying again. With a shard, only copies casks: see
/// [`CopyOptions::shard`].
///
/// Fails with `Conflict`, after the others are copied, if the destination has forgotten one of the steps that were asked for.
pub async fn copy(source: &Store, destination: &Store, options: &CopyOptions) -> Result<CopyReport> {
    let mut copier = Copier::open(source, destination, Id::random()?, options.clone()).await?;
    if let Some((part, of)) = options.shard {
        return copier.copy_shard(source, part, of).await;
    }
    // Entries after a gap name steps that a reader does not see.
    Log::load_whole(source).await.map_err(|e| e.object(source.url()))?;
    if !options.take_over {
        copier.refuse_owned().await?;
    }
    let (plan, report) = copier.add_missing(source).await?;
    mirror_status(&mut copier.log, copier.writer, &plan.named(options.steps.as_deref())).await?;
    match plan.forgotten.first() {
        Some(step) if options.steps.is_some() => {
            let message = format!("the destination has forgotten step {step}, and never takes it back; copy it into an empty place");
            Err(Error::new(ErrorKind::Conflict, message).object(destination.url()).clause("log 4.1"))
        }
        _ => Ok(report),
    }
}

/// Creates the store `destination`, empty, for the same run as `source`. Does nothing if it exists already.
pub async fn create_for_run_of(source: &Store, destination: &Store) -> Result<()> {
    open_destination(source, destination).await.map(|_| ())
}

/// Snapshots to copy and their chains, in the order of their commits. A link that nobody asked for is copied as
/// forgotten, unless the destination had it before.
pub(super) fn snapshots_to_copy(
    store: &Store,
    state: &LogState,
    destination: &LogState,
    steps: Option<&[u64]>,
) -> Result<Vec<SnapshotRecord>> {
    let roots: Vec<&SnapshotRecord> = match steps {
        None => state.live().collect(),
        Some([]) => return Err(Error::invalid("no step to copy")),
        Some(steps) => steps.iter().map(|&step| live_step(state, step).in_object(store.url())).collect::<Result<_>>()?,
    };
    let asked: BTreeSet<Id> = roots.iter().map(|root| root.id).collect();
    let mut wanted: BTreeMap<u64, SnapshotRecord> = BTreeMap::new();
    for root in roots {
        for mut link in chain_of(state, root.id, store.limits().max_chain_depth)? {
            if steps.is_some() && !asked.contains(&link.id) && destination.by_id(link.id).is_none() {
                link.status = SnapshotStatus::Forgotten;
            }
            wanted.entry(link.sequence).or_insert(link);
        }
    }
    Ok(wanted.into_values().collect())
}

/// Opens the destination, or creates it with the run id of the source.
#[boxed]
pub(super) async fn open_destination(source: &Store, destination: &Store) -> Result<Log> {
    let file = store_file_of(source).await.map_err(|e| e.object(source.url()))?;
    refuse_features(file.may_ignore())?;
    check_root(destination, has_store(destination, Some(file.run))).await?;
    destination.objects().ensure_root()?;
    match read_store_file(destination).await {
        Ok(found) if found.run == file.run => {}
        Ok(_) => {
            let message = "the destination holds another run; copy into an empty place, or into a copy of the same run";
            return Err(Error::invalid(message).object(destination.url()));
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            // Another log begun here would go on in the one that is left (log 4.8).
            without_store_file(destination).await?.map_or(Ok(()), Err)?;
            probe(destination.objects()).await?;
            let created = destination.objects().create(STORE_FILE, file.encode()?.into()).await;
            if let Created::Exists = created.map_err(|e| Error::storage(STORE_FILE, e))?
                && read_store_file(destination).await?.run != file.run
            {
                return Err(Error::new(ErrorKind::Conflict, "another store was created at the destination in the meantime")
                    .object(destination.url()));
            }
        }
        Err(e) => return Err(e),
    }
    load_log(destination).await
}

/// Mirrors the status of copied snapshots at the destination: forgets and pins them as the source did. Those that are pinned there
/// stay.
#[boxed]
async fn mirror_status(log: &mut Log, writer: Id, copied: &[SnapshotRecord]) -> Result<()> {
    let dead: BTreeSet<Id> = copied.iter().filter(|record| record.status != SnapshotStatus::Live).map(|record| record.id).collect();
    forget_among(log, writer, &dead.into_iter().collect::<Vec<_>>()).await?;
    for record in copied.iter().filter(|record| record.pinned) {
        if log.state().by_id(record.id).is_some_and(|found| !found.pinned) {
            log.append(writer, |_| Ok(Event::Pinned { snapshot: record.id, pinned: true })).await?;
            log.write_catalog_if_due().await;
        }
    }
    Ok(())
}
