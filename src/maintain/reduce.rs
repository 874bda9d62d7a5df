//! Reduction: drops roles, such as optimizer state, from old snapshots that are kept for their weights. Spec:
//! `spec/log.md`, 4.7.
//!
//! A reduced snapshot keeps its id, its blobs and the content of the roles that stay. If each cask holds either roles
//! that stay or roles that go, the manifest drops casks; otherwise the snapshot is rewritten as a base.
//!
//! Invariant: a snapshot is held as it is while it is pinned, is the newest with all roles, or another snapshot needs
//! its other roles.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::CompactOptions;
use super::cask_copy::{create_fresh, fresh_since};
use super::compact::{check_unchanged, commit_manifest};
use super::rewrite::Rewriter;
use crate::chain::chain_of;
use crate::commit::{
    Age, Log, LogState, SnapshotRecord, SnapshotStatus, live_step, load_complete_log, now_ms, read_store_file, refuse_features,
};
use crate::reader::{CaskSource, Snapshot, check_content};
use crate::wire::{CaskRef, Digest, Directory, DirectoryShard, DirectoryTensor, Event, SnapshotKind, blob_slot};
use crate::{Dtype, Error, ErrorKind, Result, Store, boxed, infer_role};

/// Result of the reduction of one snapshot.
#[derive(Debug, Clone, PartialEq)]
pub struct Reduced {
    /// Log record of the snapshot after the reduction.
    pub record: SnapshotRecord,
    /// Size of its casks before, in bytes.
    pub stored_bytes_before: u64,
    /// Size of its casks now, in bytes.
    pub stored_bytes: u64,
    /// Reason why the snapshot stays as it is; `None` if it was reduced.
    pub held: Option<String>,
    pub(super) hold: Hold,
}

/// How long a reason to leave a snapshot as it is holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hold {
    /// Until other snapshots change.
    Brief,
    /// Until an object that is missing or damaged is there again, which no log entry tells.
    Damage,
    /// As long as the snapshot stays as it is.
    Lasting,
}

impl Reduced {
    /// A snapshot that stays as it is.
    fn held(record: SnapshotRecord, reason: String, hold: Hold) -> Self {
        let bytes = record.summary.as_ref().map_or(0, |summary| summary.stored_bytes);
        Self { record, stored_bytes_before: bytes, stored_bytes: bytes, held: Some(reason), hold }
    }
}

/// Reduces the snapshots of these steps to tensors of the given roles, newest first. Blobs stay. A step whose other
/// roles a newer snapshot needs stays as it is and is reported as held. Nothing is deleted until [`gc`](super::gc())
/// runs.
pub async fn keep_roles(store: &Store, steps: &[u64], roles: &[String], options: &CompactOptions) -> Result<Vec<Reduced>> {
    let mut log = load_complete_log(store).await?;
    let mut records = Vec::new();
    for &step in steps.iter().collect::<BTreeSet<_>>() {
        records.push(live_step(log.state(), step)?.clone());
    }
    reduce_all(store, &mut log, records, roles, options, OnDamage::Fail).await
}

/// Treatment of a snapshot that cannot be reduced, because it is damaged or its tensors are tied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnDamage {
    /// The call fails.
    Fail,
    /// The snapshot stays as it is, and the others are reduced.
    Hold,
}

/// Whether an error lies in the snapshot, and not in the store or in another process.
fn is_of_snapshot(error: &Error) -> bool {
    error.is_unreadable() || is_lasting(error)
}

/// Whether a snapshot with this error cannot be reduced, even if all of its objects are there and intact.
fn is_lasting(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidArgument)
}

/// Reduces snapshots to tensors of the given roles, newest first.
#[boxed]
pub(super) async fn reduce_all(
    store: &Store,
    log: &mut Log,
    mut records: Vec<SnapshotRecord>,
    roles: &[String],
    options: &CompactOptions,
    on_damage: OnDamage,
) -> Result<Vec<Reduced>> {
    let roles: BTreeSet<String> = roles.iter().cloned().collect();
    if roles.is_empty() {
        return Err(Error::invalid("no role to keep; name at least one, such as `model`"));
    }
    refuse_features(read_store_file(store).await?.may_ignore())?;
    refuse_features(&log.state().may_ignore)?;
    // Newest first: the snapshots that need an older one are reduced before it.
    records.sort_by_key(|record| std::cmp::Reverse(record.sequence));
    let mut reduced = Vec::new();
    for record in records {
        reduced.push(match reduce(store, log, record.clone(), &roles, options).await {
            Err(error) if on_damage == OnDamage::Hold && (is_of_snapshot(&error) || error.is_too_late()) => {
                tracing::warn!(step = record.step, %error, "the step cannot be reduced to its weights");
                let hold = match error.is_too_late() {
                    true => Hold::Brief,
                    false if is_lasting(&error) => Hold::Lasting,
                    false => Hold::Damage,
                };
                Reduced::held(record, error.message().to_owned(), hold)
            }
            reduced => reduced?,
        });
    }
    Ok(reduced)
}

#[boxed]
async fn reduce(
    store: &Store,
    log: &mut Log,
    record: SnapshotRecord,
    roles: &BTreeSet<String>,
    options: &CompactOptions,
) -> Result<Reduced> {
    let mut age = Age::start();
    if let Some(reason) = reason_to_hold(log.state(), &record, roles) {
        return Ok(Reduced::held(record, reason, Hold::Brief));
    }
    let snapshot = Snapshot::load(store, log.state(), record.id).await?;
    refuse_features(snapshot.manifest().may_ignore())?;
    let guessed = guessed_roles(&snapshot.chain.newest().directory);
    if let Some((role, tensor)) = guessed.iter().find(|(role, _)| !roles.contains(*role)) {
        let step = record.step;
        tracing::warn!(
            step,
            role,
            tensor,
            "the role is a guess from the name, so the tensors of this role stay; state roles when you save"
        );
    }
    let roles: &BTreeSet<String> = &roles.iter().cloned().chain(guessed.into_keys()).collect();
    let mut manifest = snapshot.manifest().clone();
    let before = manifest.stored_bytes();
    let held = |record, reason: &str| Reduced {
        record,
        stored_bytes_before: before,
        stored_bytes: before,
        held: Some(reason.into()),
        hold: Hold::Lasting,
    };
    if manifest.content.keys().all(|role| roles.contains(role)) {
        return Ok(held(record, "it has no other roles"));
    }
    manifest.content.retain(|role, _| roles.contains(role));
    if manifest.content.is_empty() {
        return Ok(held(record, "it has none of these roles"));
    }
    // A delta stays a delta, unless one of its casks holds tensors that stay and tensors that go.
    match remaining_casks(store, &snapshot, roles, options).await? {
        Some(Remaining { casks, older_by }) => {
            manifest.casks = casks;
            age = age.older_by(older_by);
        }
        None => {
            check_content(&snapshot.chain).await?;
            manifest.casks = Rewriter::new(store, &snapshot, options, &|role| roles.contains(role)).rewrite().await?;
            (manifest.kind, manifest.parent) = (SnapshotKind::Base, None);
        }
    }
    // Before the manifest is written: garbage collection keeps what the manifest of an unknown commit names.
    let advice = "if an earlier reduction left it, run `tensorcask gc --apply` first";
    age.check_leftover(options.age_floor, advice)?;
    let directory = directory_of(&snapshot.chain.newest().directory, roles)?;
    let digest = Digest::of(&directory);
    manifest.directory = digest;
    manifest.tensor_bytes = Directory::decode(directory.clone().into(), digest, store.limits())?.tensor_bytes();
    manifest.time_ms = now_ms();
    store.objects().put_content_addressed(&format!("directories/{digest}"), directory.into()).await?;
    let parent = manifest.parent.as_ref().map(|parent| parent.snapshot);
    let kept: Vec<String> = manifest.content.keys().cloned().collect();
    commit_manifest(store, log, &record, &manifest, |state, digest| {
        age.check_leftover(options.age_floor, advice)?;
        check_unchanged(state, &record)?;
        if let Some(reason) = reason_to_hold(state, &record, roles) {
            return Err(Error::new(ErrorKind::Conflict, format!("step {} cannot be reduced any more: {reason}", record.step)));
        }
        Ok(Event::Compacted { snapshot: record.id, parent, manifest: digest, roles: Some(kept.clone()) })
    })
    .await?;
    tracing::info!(step = record.step, snapshot = %record.id, roles = ?kept, "reduced");
    let record = log.state().by_id(record.id).cloned().unwrap_or(record);
    Ok(Reduced { record, stored_bytes_before: before, stored_bytes: manifest.stored_bytes(), held: None, hold: Hold::Brief })
}

/// Roles that some tensor has only by a guess from its name, each with the first such tensor. A master is no guess if its
/// parameter has a 16-bit model weight of the same shape.
fn guessed_roles(directory: &Directory) -> BTreeMap<String, String> {
    let is_master = |tensor: usize| {
        let model = directory.partner(tensor, "model");
        let is_short = |model| matches!(directory.dtype(model), Dtype::Bf16 | Dtype::F16);
        directory.role(tensor) == "master" && directory.dtype(tensor) == Dtype::F32 && model.is_some_and(is_short)
    };
    let mut roles = BTreeMap::new();
    for tensor in 0..directory.len() {
        let role = directory.role(tensor);
        let guess = infer_role(directory.name(tensor));
        if guess.role == role && !guess.is_certain && !is_master(tensor) {
            roles.entry(role.to_owned()).or_insert_with(|| directory.name(tensor).to_owned());
        }
    }
    roles
}

/// Reason why all roles of a snapshot have to stay; `None` if it can be reduced.
fn reason_to_hold(state: &LogState, record: &SnapshotRecord, roles: &BTreeSet<String>) -> Option<String> {
    if state.by_id(record.id).is_some_and(|now| now.pinned) {
        return Some("it is pinned".into());
    }
    if state.latest().is_some_and(|latest| latest.id == record.id) {
        return Some("it is the newest that has all roles".into());
    }
    let narrow = |other: &SnapshotRecord| other.roles.as_ref().is_some_and(|has| has.iter().all(|role| roles.contains(role)));
    let roots = state.snapshots().iter().filter(|other| other.status == SnapshotStatus::Live || other.pinned);
    let mut others = roots.filter(|other| other.id != record.id && other.status != SnapshotStatus::Collected && !narrow(other));
    others.find_map(|other| match chain_of(state, other.id, u64::MAX) {
        Ok(chain) => chain.iter().any(|link| link.id == record.id).then(|| format!("step {} needs it", other.step)),
        // What this step needs is not known.
        Err(error) => Some(format!("the chain of step {} is broken, and may need it: {}; forget that step", other.step, error.message())),
    })
}

/// Casks of a snapshot that hold only roles that stay.
struct Remaining {
    casks: Vec<CaskRef>,
    /// Age of the oldest object that was there already, left by an interrupted reduction.
    older_by: Duration,
}

/// The casks that stay. `None` if a cask holds both kinds of roles, or may need roles that go to be decoded.
#[boxed]
async fn remaining_casks(
    store: &Store,
    snapshot: &Snapshot,
    roles: &BTreeSet<String>,
    options: &CompactOptions,
) -> Result<Option<Remaining>> {
    let directory = &snapshot.chain.newest().directory;
    let mut slots: BTreeMap<u32, SlotContent> = BTreeMap::new();
    for tensor in 0..directory.len() {
        let stays = roles.contains(directory.role(tensor));
        for shard in directory.shards_of(tensor) {
            let content = slots.entry(directory.shard(shard).slot).or_default();
            content.some_stay |= stays;
            content.some_go |= !stays;
        }
    }
    let casks = snapshot.manifest().casks.iter().enumerate();
    let kept: Vec<(usize, usize)> =
        casks.filter(|(_, cask)| slots.get(&cask.slot).is_some_and(|content| content.some_stay)).map(|(at, _)| (0, at)).collect();
    snapshot.chain.load_indexes(&kept).await?;
    for &(_, at) in &kept {
        let index = snapshot.chain.newest().index(at);
        for codec in index.map(|index| index.codecs()).unwrap_or_default() {
            // It is unknown which partners an unknown codec needs: tensors that stay might not decode without roles
            // that go.
            let source = CaskSource::of_link(store, snapshot.chain.newest(), at);
            let codec = store.registry().resolve(codec).map_err(|e| source.locate(e))?;
            // A tensor that stays may be encoded against a partner that goes.
            if roles.iter().flat_map(|role| codec.needs(role)).any(|need| !roles.contains(need.role)) {
                return Ok(None);
            }
        }
    }
    let blobs: BTreeSet<u32> = snapshot.blobs().await?.iter().map(|(rank, _)| blob_slot(*rank)).collect();
    let mut casks = Vec::new();
    let mut older_by = Duration::ZERO;
    // Reading the clock of a storage writes an object: once for all casks.
    let mut clock_ms: Option<u64> = None;
    for (at, cask) in snapshot.manifest().casks.iter().enumerate() {
        match slots.get(&cask.slot).copied().unwrap_or_default() {
            SlotContent { some_stay: true, some_go: true } => return Ok(None),
            SlotContent { some_go: false, .. } => {
                // The reduced manifest lies outside of the log entry, and so must its casks.
                if let Some(bytes) = CaskSource::of_link(store, snapshot.chain.newest(), at).whole() {
                    let now_ms = match clock_ms {
                        Some(now_ms) => now_ms,
                        None => *clock_ms.insert(store.objects().clock_ms().await?),
                    };
                    let found = create_fresh(store, &cask.path(), bytes.clone(), fresh_since(now_ms, options.age_floor)).await?;
                    let age_ms = found.map_or(0, |found| now_ms.saturating_sub(found.modified_ms));
                    older_by = older_by.max(Duration::from_millis(age_ms));
                }
                casks.push(cask.clone());
            }
            SlotContent { .. } if blobs.contains(&cask.slot) => {
                let only_blobs = BTreeMap::from([(cask.slot, vec![])]);
                let rewritten = Rewriter::new(store, snapshot, options, &|_| true).rewrite_casks(&only_blobs).await?;
                casks.extend(rewritten.into_values().map(|rewritten| rewritten.cask));
            }
            SlotContent { .. } => {}
        }
    }
    Ok(Some(Remaining { casks, older_by }))
}

/// Which tensors a slot holds.
#[derive(Clone, Copy, Default)]
struct SlotContent {
    some_stay: bool,
    some_go: bool,
}

/// Stored form of the directory with tensors of these roles only.
fn directory_of(directory: &Directory, roles: &BTreeSet<String>) -> Result<Vec<u8>> {
    let mut numbers: BTreeMap<usize, usize> = BTreeMap::new();
    let mut rows: Vec<(DirectoryTensor, Vec<DirectoryShard>)> = Vec::new();
    for tensor in (0..directory.len()).filter(|&tensor| roles.contains(directory.role(tensor))) {
        let mut row = directory.tensor(tensor);
        if let Some(target) = row.alias_of {
            let moved = numbers.get(&target);
            row.alias_of = Some(*moved.ok_or_else(|| {
                Error::unsupported("it is tied to a tensor of a role that would go; keep that role, too").tensor(&row.name)
            })?);
        }
        numbers.insert(tensor, rows.len());
        rows.push((row, directory.shards_of(tensor).map(|shard| directory.shard(shard)).collect()));
    }
    Directory::encode(&rows)
}
