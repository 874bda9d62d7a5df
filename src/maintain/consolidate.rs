//! Consolidation: writes a snapshot of many ranks as a base without shards into a store of its own, for export and
//! archive.
//!
//! The tensors are rewritten whole (`rewrite`), and the snapshot is committed by a writer of the destination like any
//! save.

use std::collections::BTreeMap;

use super::CompactOptions;
use super::rewrite::Rewriter;
use crate::chain::{DecisionReason, Link, PolicyDecision, SaveTimes, content_digests};
use crate::commit::{Age, Log};
use crate::reader::check_content;
use crate::tensor::Rect;
use crate::wire::{Digest, Directory, DirectoryShard, DirectoryTensor, blob_slot};
use crate::writer::{Prepared, slot_of_role};
use crate::{Claim, Error, ErrorKind, Metadata, Policy, Result, SavedSnapshot, StepSelector, Store, WriterOptions};

/// Writes a snapshot of `source` into `destination` as a base in which no tensor is sharded. All tensors go into casks
/// of rank 0. The blobs of each other rank go into one cask of that rank. Tensors, roles, blobs and metadata stay the
/// same; the snapshot gets a new id. The destination is created, or must have no snapshot yet. Needs as much memory as
/// [`compact`](super::compact()).
pub async fn consolidate(
    source: &Store,
    destination: &Store,
    at: impl Into<StepSelector>,
    options: &CompactOptions,
) -> Result<SavedSnapshot> {
    let at = at.into();
    if at == StepSelector::Latest {
        // The entries after a gap name newer steps.
        Log::load_whole(source).await.map_err(|e| e.object(source.url()))?;
    }
    let snapshot = source.snapshot(at).await?;
    let directory_before = &snapshot.chain.newest().directory;
    let writer_options =
        WriterOptions { policy: Policy::Full, claim: Claim::Once, age_floor: options.age_floor, ..WriterOptions::default() };
    check_content(&snapshot.chain).await?;
    snapshot.chain.links().try_for_each(Link::refuse_unwritable)?;
    // A writer would fence the job that writes there.
    refuse_other_snapshots(destination).await?;
    let mut writer = destination.writer_with(writer_options).await?;
    refuse_other_snapshots(destination).await?;

    let age = Age::start();
    let blobs = snapshot.blobs().await?;
    let mut slots: BTreeMap<u32, Vec<(usize, Rect)>> = blobs.iter().map(|(rank, _)| (blob_slot(*rank), vec![])).collect();
    let slot_of_role = slot_of_role(directory_before.tensor_bytes());
    let mut rows: Vec<(DirectoryTensor, Vec<DirectoryShard>)> = Vec::new();
    for tensor in 0..directory_before.len() {
        let row = directory_before.tensor(tensor);
        let mut shards = Vec::new();
        if row.alias_of.is_none() {
            let rect = Rect::whole(&row.shape);
            let slot = slot_of_role(0, &row.role);
            slots.entry(slot).or_default().push((tensor, rect.clone()));
            shards.push(DirectoryShard { rect, slot });
        }
        rows.push((row, shards));
    }
    let mut casks = Vec::new();
    let mut crcs = BTreeMap::new();
    let rewriter = Rewriter::new(destination, &snapshot, options, &|_| true);
    for (slot, rewritten) in rewriter.rewrite_casks(&slots).await? {
        casks.push(rewritten.cask);
        crcs.insert(slot, rewritten.crcs.into_iter());
    }
    let bytes = Directory::encode(&rows)?;
    let directory = Directory::decode(bytes.clone().into(), Digest::of(&bytes), destination.limits())?;
    // Each cask lists its checksums in the order of its shards, which is the order of the directory.
    let content = content_digests(&directory, |shard, _| {
        let next = crcs.get_mut(&directory.shard(shard).slot).and_then(Iterator::next);
        next.ok_or_else(|| Error::invalid("a chunk was not encoded"))
    })?;
    let decision = PolicyDecision { reason: DecisionReason::Policy, since_base: 0, estimate: None };
    // The user metadata has that of the snapshot.
    let precision = None;
    let tensor_bytes = directory.tensor_bytes();
    // Whether the state is finite is in the metadata of the snapshot.
    let chunk_counts = BTreeMap::new();
    let rounding = None;
    let finite = None;
    let times = SaveTimes::default();
    let prepared = Prepared {
        directory: bytes,
        tensor_bytes,
        casks,
        content,
        blobs: None,
        chunk_counts,
        rounding,
        finite,
        decision,
        precision,
        times,
        age,
    };
    let mut user = snapshot.user().clone();
    user.remove(PolicyDecision::KEY);
    let metadata = Metadata { user, file: snapshot.metadata().clone() };
    writer.commit(snapshot.step(), None, &prepared, vec![], &metadata).await?.done()
}

/// Fails if a store has, or has had, a snapshot.
async fn refuse_other_snapshots(destination: &Store) -> Result<()> {
    match destination.history().records().await {
        Ok(records) if records.is_empty() => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Ok(_) => {
            let message = "the destination holds snapshots already; consolidate into an empty place";
            Err(Error::invalid(message).object(destination.url()))
        }
        Err(error) => Err(error),
    }
}
