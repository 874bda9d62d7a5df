//! Copies snapshots into another store: once with [`copy`], or as they come with a [`Copier`].
//!
//! Ids, manifests and casks stay the same; the destination gets a log of its own. The entry that adds a snapshot says
//! whether it is reduced. After the copy, its status (live, forgotten, pinned) is mirrored by further log entries.

use std::collections::BTreeSet;

use super::copier::{Copier, open_destination};
use super::{CopyOptions, CopyReport};
use crate::commit::{Log, SnapshotRecord, SnapshotStatus, forget_among};
use crate::wire::{Event, Id};
use crate::{Error, ErrorKind, Result, Store, boxed};

/// Copies live snapshots of `source` and their chains into `destination`. The destination is created, or holds an
/// earlier copy of the same run. Ids, manifests and casks stay the same. The log is a new one: an `added` entry for each
/// snapshot in the order of the source, then `forgotten` for snapshots that are not live at the source, then pins. If steps
/// are given, other steps that the destination had before keep their status. Each cask is checked at the destination, byte by
/// byte, before it is committed. A copy that was interrupted is resumed by copying again. With a shard, only copies casks: see
/// [`CopyOptions::shard`].
///
/// Fails with `Conflict`, and adds nothing, if a snapshot would take the place of a step that was saved at the destination, or that
/// is pinned there. Fails with `Conflict`, after the others are copied, if the destination has forgotten one of the steps that were
/// asked for.
pub async fn copy(source: &Store, destination: &Store, options: &CopyOptions) -> Result<CopyReport> {
    let mut copier = Copier::open(source, destination, Id::random()?, options.clone()).await?;
    copier.replaces = false;
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
