//! Consolidation: writes a snapshot of many ranks as a base without shards into a store of its own, for export and
//! archive.
//!
//! The tensors are rewritten whole (`rewrite`), and the snapshot is committed by a writer of the destination like any
//! save.

use std::collections::BTreeMap;

use super::rewrite::Rewriter;
use crate::chain::{Decision, Reason, content_digests};
use crate::commit::{Age, refuse_features};
use crate::tensor::Rect;
use crate::wire::{Digest, Directory, DirectoryShard, DirectoryTensor, blob_slot, tensor_slot};
use crate::writer::Prepared;
use crate::{At, CompactOptions, Error, Metadata, Policy, Result, Saved, Store, WriterOptions};

impl Store {
    /// Writes a snapshot into `destination` as a base in which no tensor is sharded. There is one cask for role
    /// `model`, one for the other roles, and one for the blobs of each rank but the first. Tensors, roles, blobs and
    /// metadata stay the same; the snapshot gets a new id. The destination is created, or must have no snapshot yet.
    /// Needs as much memory as [`Store::compact`].
    pub async fn consolidate_to(&self, destination: &Store, at: impl Into<At>, options: &CompactOptions) -> Result<Saved> {
        let snapshot = self.snapshot(at).await?;
        refuse_features(snapshot.manifest().may_ignore())?;
        let source = &snapshot.newest().directory;
        let writer_options = WriterOptions { policy: Policy::Full, age_floor: options.age_floor, ..WriterOptions::default() };
        let mut writer = destination.writer_with(writer_options).await?;
        if !destination.snapshots().await?.is_empty() {
            let message = "the destination holds snapshots already; consolidate into an empty place";
            return Err(Error::invalid(message).object(destination.url()));
        }
        snapshot.check_content().await?;

        let age = Age::start();
        let blobs = snapshot.blobs().await?;
        let mut slots: BTreeMap<u32, Vec<(usize, Rect)>> = blobs.iter().map(|(rank, _)| (blob_slot(*rank), vec![])).collect();
        let mut rows: Vec<(DirectoryTensor, Vec<DirectoryShard>)> = Vec::new();
        for tensor in 0..source.len() {
            let row = source.tensor(tensor);
            let mut shards = Vec::new();
            if row.alias_of.is_none() {
                let (rect, slot) = (Rect::whole(&row.shape), tensor_slot(0, &row.role));
                slots.entry(slot).or_default().push((tensor, rect.clone()));
                shards.push(DirectoryShard { rect, slot });
            }
            rows.push((row, shards));
        }
        let (mut casks, mut crcs) = (Vec::new(), BTreeMap::new());
        let rewriter = Rewriter::new(destination, &snapshot, options, &|_| true);
        for (slot, shards) in &slots {
            let rewritten = rewriter.rewrite_cask(*slot, shards).await?;
            casks.push(rewritten.cask);
            crcs.insert(*slot, rewritten.crcs.into_iter());
        }
        let bytes = Directory::encode(&rows)?;
        let directory = Directory::decode(bytes.clone().into(), Digest::of(&bytes), destination.limits())?;
        // Each cask lists its checksums in the order of its shards, which is the order of the directory.
        let content = content_digests(&directory, |shard, _| {
            let next = crcs.get_mut(&directory.shard(shard).slot).and_then(Iterator::next);
            next.ok_or_else(|| Error::invalid("a chunk was not encoded"))
        })?;
        let decision = Decision { reason: Reason::Policy, since_base: 0, estimate: None };
        let tensor_bytes = directory.tensor_bytes();
        let (chunk_counts, rounding) = (BTreeMap::new(), None);
        let prepared = Prepared { directory: bytes, tensor_bytes, casks, content, blobs: None, chunk_counts, rounding, decision, age };
        let mut user = snapshot.user().clone();
        user.remove(Decision::KEY);
        let metadata = Metadata { user, file: snapshot.metadata().clone() };
        writer.commit(snapshot.step(), None, &prepared, vec![], &metadata).await?.done()
    }
}
