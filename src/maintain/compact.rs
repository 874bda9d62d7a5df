//! Compaction: folds a chain into a new base, without changing what any step restores to.
//!
//! The chain is read, rewritten into casks without a base, and committed as `compacted` under the same snapshot id.
//! Deltas made against the snapshot stay valid, because they name it by id and content digest. Spec: `spec/log.md`,
//! clause 4.
//!
//! Invariants: the content digests are checked before the chain is folded. Nothing is committed if the snapshot changed
//! meanwhile.

use super::rewrite::{CompactOptions, Rewriter};
use crate::chain::Link;
use crate::commit::{
    Age, Appended, Log, LogState, MOST_LOOKS, Need, SnapshotRecord, SnapshotStatus, changed_log, load_complete_log, now_ms,
    read_store_file, refuse_features,
};
use crate::error::ResultExt;
use crate::reader::{Snapshot, check_content};
use crate::wire::{Digest, Event, Id, Manifest, SnapshotKind};
use crate::{Error, ErrorKind, Result, StepSelector, Store, boxed};

/// Result of a compaction.
#[derive(Debug, Clone, PartialEq)]
pub struct Compacted {
    /// Log record of the snapshot after the compaction.
    pub record: SnapshotRecord,
    /// Number of the log entry; `None` if the snapshot was a base already.
    pub sequence: Option<u64>,
    /// Number of links of the chain before.
    pub links: usize,
    /// Size of the casks of that chain, in bytes.
    pub chain_bytes: u64,
    /// Size of the snapshot's casks now, in bytes.
    pub stored_bytes: u64,
}

/// Folds the chain of a live snapshot into a base with the same id and content. Deltas made against the snapshot
/// stay as they are. Safe to run beside writers and readers. Memory: a window of 16 MiB, the partners of its
/// chunks, upload parts, and the largest blob.
pub async fn compact(store: &Store, at: impl Into<StepSelector>, options: &CompactOptions) -> Result<Compacted> {
    let at = at.into();
    let mut looks = 0;
    loop {
        let mut log = load_complete_log(store).await?;
        let record = match at {
            StepSelector::Latest => log.state().latest(),
            StepSelector::Step(step) => log.state().at_step(step),
        };
        let record = record
            .cloned()
            .ok_or_else(|| Error::not_found("the store has no such step; `tensorcask ls` lists its steps").object(store.url()))?;
        match compact_one(store, &mut log, record.clone(), options).await {
            // A job has freed the step, or another process has compacted it, while it was read.
            Err(error) if error.is_damage() && looks < MOST_LOOKS && changed_log(store, log.state(), record.id).await?.is_some() => {
                looks += 1;
            }
            compacted => return compacted,
        }
    }
}

#[boxed]
async fn compact_one(store: &Store, log: &mut Log, record: SnapshotRecord, options: &CompactOptions) -> Result<Compacted> {
    refuse_features(read_store_file(store).await?.may_ignore())?;
    let snapshot = Snapshot::load(store, log.state(), record.id).await?;
    let chain = snapshot.inspect().chain();
    let chain_bytes = chain.iter().fold(0u64, |sum, link| sum.saturating_add(link.stored_bytes));
    if chain.len() <= 1 {
        return Ok(Compacted { record, sequence: None, links: chain.len(), chain_bytes, stored_bytes: chain_bytes });
    }
    // A fault of the chain must be found now. After folding, nothing could tell.
    check_content(&snapshot.chain).await?;
    snapshot.chain.links().try_for_each(Link::refuse_unwritable)?;

    let age = Age::start();
    let mut manifest = snapshot.manifest().clone();
    manifest.casks = Rewriter::new(store, &snapshot, options, &|_| true).rewrite().await?;
    (manifest.kind, manifest.parent, manifest.time_ms) = (SnapshotKind::Base, None, now_ms());
    let sequence = commit_manifest(store, log, &record, &manifest, |state, digest| {
        age.check(options.age_floor)?;
        check_unchanged(state, &record)?;
        Ok(Event::Compacted { snapshot: record.id, parent: None, manifest: digest, roles: None })
    })
    .await?;
    let stored_bytes = manifest.stored_bytes();
    tracing::info!(step = record.step, snapshot = %record.id, links = chain.len(), bytes = stored_bytes, "compacted");
    let record = log.state().by_id(record.id).cloned().unwrap_or(record);
    Ok(Compacted { record, sequence: Some(sequence), links: chain.len(), chain_bytes, stored_bytes })
}

/// Writes the new manifest of a snapshot and commits the event that `decide` derives from its digest. Returns the number of
/// the log entry.
pub(super) async fn commit_manifest(
    store: &Store,
    log: &mut Log,
    record: &SnapshotRecord,
    manifest: &Manifest,
    mut decide: impl FnMut(&LogState, Digest) -> Result<Event>,
) -> Result<u64> {
    let (bytes, digest) = manifest.encode()?;
    Manifest::decode(&bytes, store.limits())
        .map_err(|e| Error::invalid(format!("the manifest would not be readable: {}", e.message())).source(e))?;
    let path = Manifest::path_of_compacted(record.step, record.id, digest);
    let mut needs = vec![Need::manifest(path.clone(), digest), Need::directory(manifest.directory, None)];
    needs.extend(Need::casks(manifest));
    store.objects().create_unique(&path, bytes.into()).await?;
    let appended = log.append_relying_on(&needs, None, Id::random()?, |state| decide(state, digest));
    match appended.await.in_object(path)? {
        Appended::Committed(sequence) => {
            log.write_catalog_if_due().await;
            Ok(sequence)
        }
        Appended::Refused(stale) => Err(stale.error),
    }
}

/// Refuses to commit if the snapshot changed since it was read.
pub(super) fn check_unchanged(state: &LogState, before: &SnapshotRecord) -> Result<()> {
    let now = state.by_id(before.id);
    if now.is_some_and(|now| now.status != SnapshotStatus::Collected && now.revision == before.revision) {
        return Ok(());
    }
    let message = format!("step {} was compacted or collected by another process in the meantime; nothing was committed", before.step);
    Err(Error::new(ErrorKind::Conflict, message))
}
