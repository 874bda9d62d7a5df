//! Reduction: drops roles, such as optimizer state, from snapshots that are kept for their weights. Spec: `spec/log.md`, 4.7.

use std::collections::{BTreeMap, BTreeSet};

use super::compact::{check_unchanged, put_manifest, write_base, write_cask};
use crate::chain::chain_of;
use crate::commit::{Age, Log, LogState, SnapshotRecord, Status, live_step, now_ms, refuse_features};
use crate::error::ResultExt;
use crate::reader::Snapshot;
use crate::wire::blob_slot;
use crate::wire::{CaskRef, Digest, Directory, DirectoryShard, DirectoryTensor, Event, Id, SnapshotKind};
use crate::{CompactOptions, Error, ErrorKind, Result, Retention, Store, boxed};

/// A snapshot that was reduced to some roles, or was not.
#[derive(Debug, Clone, PartialEq)]
pub struct Reduced {
    /// The snapshot, as it is now.
    pub record: SnapshotRecord,
    /// Bytes of its casks before.
    pub stored_bytes_before: u64,
    /// Bytes of its casks now.
    pub stored_bytes: u64,
    /// Why it stays as it is, if it does.
    pub held: Option<String>,
}

impl Store {
    /// Reduces the snapshots of these steps to tensors of some roles, newest first; blobs stay. A step whose other roles a newer
    /// snapshot needs stays as it is, and is told as held. Nothing is deleted until [`Store::gc`] runs.
    pub async fn keep_roles(&self, steps: &[u64], roles: &[String], options: &CompactOptions) -> Result<Vec<Reduced>> {
        let log = Log::load(self).await?;
        let mut records = Vec::new();
        for &step in steps.iter().collect::<BTreeSet<_>>() {
            records.push(live_step(log.state(), step)?.clone());
        }
        self.reduce_all(log, records, roles, options).await
    }

    /// Reduces the snapshots that `retention` does not keep to tensors of some roles.
    pub async fn retain_roles(&self, retention: Retention, roles: &[String], options: &CompactOptions) -> Result<Vec<Reduced>> {
        let log = Log::load(self).await?;
        let records = retention.unwanted(log.state())?;
        self.reduce_all(log, records, roles, options).await
    }

    #[boxed]
    async fn reduce_all(
        &self,
        mut log: Log,
        mut records: Vec<SnapshotRecord>,
        roles: &[String],
        options: &CompactOptions,
    ) -> Result<Vec<Reduced>> {
        let roles: BTreeSet<String> = roles.iter().cloned().collect();
        if roles.is_empty() {
            return Err(Error::invalid("no role to keep"));
        }
        refuse_features(self.read_store_file().await?.may_ignore())?;
        refuse_features(&log.state().may_ignore)?;
        // Newest first: what needed a snapshot does not any more when its turn comes.
        records.sort_by_key(|record| std::cmp::Reverse(record.sequence));
        let mut reduced = Vec::new();
        for record in records {
            reduced.push(self.reduce(&mut log, record, &roles, options).await?);
        }
        Ok(reduced)
    }

    #[boxed]
    async fn reduce(&self, log: &mut Log, record: SnapshotRecord, roles: &BTreeSet<String>, options: &CompactOptions) -> Result<Reduced> {
        let age = Age::start();
        if let Some(reason) = reason_to_hold(log.state(), &record, roles) {
            let bytes = record.summary.as_ref().map_or(0, |summary| summary.stored_bytes);
            return Ok(Reduced { record, stored_bytes_before: bytes, stored_bytes: bytes, held: Some(reason) });
        }
        let snapshot = Snapshot::load(self, log.state(), record.id).await?;
        refuse_features(snapshot.manifest().may_ignore())?;
        let mut manifest = snapshot.manifest().clone();
        let before = manifest.stored_bytes();
        let held = |record, reason: &str| Reduced { record, stored_bytes_before: before, stored_bytes: before, held: Some(reason.into()) };
        if manifest.content.keys().all(|role| roles.contains(role)) {
            return Ok(held(record, "it has no other roles"));
        }
        manifest.content.retain(|role, _| roles.contains(role));
        if manifest.content.is_empty() {
            return Ok(held(record, "it has none of these roles"));
        }
        // A delta stays one, unless a cask holds wanted and unwanted tensors.
        match remaining_casks(self, &snapshot, roles, options).await? {
            Some(casks) => manifest.casks = casks,
            None => {
                snapshot.check_content().await?;
                manifest.casks = write_base(self, &snapshot, options, &|role| roles.contains(role)).await?;
                (manifest.kind, manifest.parent) = (SnapshotKind::Base, None);
            }
        }
        let directory = directory_of(&snapshot.newest().directory, roles)?;
        let digest = Digest::of(&directory);
        manifest.directory = digest;
        manifest.tensor_bytes = Directory::decode(directory.clone().into(), digest, self.limits())?.tensor_bytes();
        manifest.time_ms = now_ms();
        self.put_content_addressed(&format!("directories/{digest}"), directory.into()).await?;
        let (path, digest) = put_manifest(self, &record, &manifest).await?;
        let parent = manifest.parent.as_ref().map(|parent| parent.snapshot);
        let kept: Vec<String> = manifest.content.keys().cloned().collect();
        log.append(Id::random()?, |state| {
            age.check(options.age_floor)?;
            check_unchanged(state, &record)?;
            if let Some(reason) = reason_to_hold(state, &record, roles) {
                return Err(Error::new(ErrorKind::Conflict, format!("step {} cannot be reduced any more: {reason}", record.step)));
            }
            Ok(Event::Compacted { snapshot: record.id, parent, manifest: digest, roles: Some(kept.clone()) })
        })
        .await
        .in_object(path)?;
        log.write_catalog_if_due().await;
        tracing::info!(step = record.step, snapshot = %record.id, roles = ?kept, "reduced");
        let record = log.state().by_id(record.id).cloned().unwrap_or(record);
        Ok(Reduced { record, stored_bytes_before: before, stored_bytes: manifest.stored_bytes(), held: None })
    }
}

/// Why roles of a snapshot have to stay.
fn reason_to_hold(state: &LogState, record: &SnapshotRecord, roles: &BTreeSet<String>) -> Option<String> {
    if state.by_id(record.id).is_some_and(|now| now.pinned) {
        return Some("it is pinned".into());
    }
    if state.latest().is_some_and(|latest| latest.id == record.id) {
        return Some("it is the newest that has all roles".into());
    }
    let narrow = |other: &SnapshotRecord| other.roles.as_ref().is_some_and(|has| has.iter().all(|role| roles.contains(role)));
    let roots = state.snapshots().iter().filter(|other| other.status == Status::Live || other.pinned);
    let mut others = roots.filter(|other| other.id != record.id && other.status != Status::Collected && !narrow(other));
    let needs = |other: &&SnapshotRecord| match chain_of(state, other.id, u64::MAX) {
        Ok(chain) => chain.iter().any(|link| link.id == record.id),
        Err(_) => false,
    };
    others.find(needs).map(|other| format!("step {} needs it", other.step))
}

/// The snapshot's own casks without the roles that go; `None` if one of them holds both, or may not be readable without them.
#[boxed]
async fn remaining_casks(
    store: &Store,
    snapshot: &Snapshot,
    roles: &BTreeSet<String>,
    options: &CompactOptions,
) -> Result<Option<Vec<CaskRef>>> {
    let directory = &snapshot.newest().directory;
    // What stays may be stored as what it differs by from what goes.
    let needs = |role: &String| store.registry().partner_roles(role).into_iter().any(|need| !roles.contains(need.role));
    if roles.iter().any(needs) {
        return Ok(None);
    }
    // By slot: whether it holds tensors that stay, and tensors that go.
    let mut slots: BTreeMap<u32, (bool, bool)> = BTreeMap::new();
    for tensor in 0..directory.len() {
        let stays = roles.contains(directory.role(tensor));
        for shard in directory.shards_of(tensor) {
            let (some_stay, some_go) = slots.entry(directory.shard(shard).slot).or_default();
            *some_stay |= stays;
            *some_go |= !stays;
        }
    }
    let casks = snapshot.manifest().casks.iter().enumerate();
    let kept: Vec<(usize, usize)> =
        casks.filter(|(_, cask)| slots.get(&cask.slot).is_some_and(|slot| slot.0)).map(|(at, _)| (0, at)).collect();
    snapshot.load_indexes(&kept).await?;
    for &(_, at) in &kept {
        let (cask, index) = (&snapshot.manifest().casks[at], snapshot.newest().index(at));
        for codec in index.map(|index| index.codecs()).unwrap_or_default() {
            // What it needs of other roles is not known either: what stays might not be readable without them.
            store.registry().resolve(codec).map(|_| ()).in_object(cask.path())?;
        }
    }
    let blobs: BTreeSet<u32> = snapshot.blobs().await?.iter().map(|(rank, _)| blob_slot(*rank)).collect();
    let mut casks = Vec::new();
    for cask in &snapshot.manifest().casks {
        match slots.get(&cask.slot).copied().unwrap_or_default() {
            (true, true) => return Ok(None),
            (_, false) => casks.push(cask.clone()),
            (false, true) if blobs.contains(&cask.slot) => {
                casks.push(write_cask(store, snapshot, options, cask.slot, &[], &|_| true).await?.0)
            }
            (false, true) => {}
        }
    }
    Ok(Some(casks))
}

/// The directory with tensors of these roles only.
fn directory_of(directory: &Directory, roles: &BTreeSet<String>) -> Result<Vec<u8>> {
    let mut numbers: BTreeMap<usize, usize> = BTreeMap::new();
    let mut rows: Vec<(DirectoryTensor, Vec<DirectoryShard>)> = Vec::new();
    for tensor in (0..directory.len()).filter(|&tensor| roles.contains(directory.role(tensor))) {
        let mut row = directory.tensor(tensor);
        if let Some(target) = row.alias_of {
            let moved = numbers.get(&target);
            row.alias_of = Some(*moved.ok_or_else(|| Error::unsupported("is tied to a tensor of a role that would go").tensor(&row.name))?);
        }
        numbers.insert(tensor, rows.len());
        rows.push((row, directory.shards_of(tensor).map(|shard| directory.shard(shard)).collect()));
    }
    Directory::encode(&rows)
}
