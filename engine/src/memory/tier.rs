//! The memory tier: a store in shared memory with the last snapshots in encoded form.
//!
//! It is an ordinary store. Any reader can restore from it without the agent, and the agent copies its snapshots to the
//! next tier byte by byte. It needs no fsync, because its content dies with the host anyway. A new store replaces it
//! when its log has become long; the new store begins with a base.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tensorcask::maintain::{self, GcOptions};
use tensorcask::{
    AheadUploads, Blob, Error, ErrorKind, Latest, Metadata, PrecisionDecision, PreviousSave, Rank, RankWriter, Rect, Result, SavedSnapshot,
    SnapshotRecord, SnapshotStatus, Store, TensorView, Writer, WriterOptions,
};

use super::stores::{chain_of, memory_bytes, open_epoch, remove_all_epochs};
use crate::arena::image::StoredState;
use crate::os::files::remove_folder;
use crate::os::folders::RunFolder;
use crate::rows::trust::{LeftOut, without_rows};
use crate::run::tier_query::nearest_existing;

/// Part of memory that the next tier has, or can never get.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct UploadState {
    /// Log entry of the current store up to which the next tier has everything.
    pub uploaded: u64,
    /// Whether the next tier has everything of the older stores.
    pub has_older: bool,
    /// Epochs whose snapshots can never be stored in the first tier.
    pub unusable: BTreeSet<u64>,
}

/// Whether the next tier currently accepts uploads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Uploads {
    Working,
    Failing,
}

/// The store in memory that is in use, and its writers.
#[derive(Debug)]
pub(crate) struct MemoryTier {
    folder: RunFolder,
    epoch: u64,
    store: Store,
    writer: Writer,
    ranks: Vec<RankWriter>,
    options: WriterOptions,
    /// No tier and no memory named the run id when this was opened, and nothing has been saved since.
    has_new_run_id: bool,
}

/// A snapshot in memory.
#[derive(Debug)]
pub(crate) struct EncodedSnapshot {
    pub saved: SavedSnapshot,
    /// Ranks that left out a changed row. They were encoded without rows.
    pub left_out: LeftOut,
}

impl MemoryTier {
    /// Opens the newest epoch, or creates the first one with the run id of the nearest existing tier. Fails if that run
    /// id is unknown: a tier does not answer, and memory holds no run id.
    pub(crate) async fn open(folder: &RunFolder, tiers: &[Store], options: WriterOptions, world: u32) -> Result<Self> {
        let mut epoch = folder.epochs()?.last().copied().unwrap_or(0);
        let newest = open_epoch(folder, epoch)?;
        let ours = match newest.history().run().await {
            Ok(run) => Some(run),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => None,
            Err(e) => return Err(e),
        };
        let existing = match nearest_existing(tiers).await {
            Ok(existing) => existing,
            Err(e) if ours.is_none() => return Err(e),
            Err(_) => None,
        };
        // If a new store has to be created, it takes its run id from this one.
        let model = match (newest.history().records().await, existing) {
            (Ok(_), Some((tier, run))) if ours.is_some_and(|ours| ours != run) => {
                tracing::warn!(store = tier.url(), "the store was created anew: removing the snapshots of another run from memory");
                remove_all_epochs(folder)?;
                epoch = folder.epochs()?.last().copied().unwrap_or(0);
                Some(tier)
            }
            (Ok(_), _) => None,
            // A folder without `store.json` is an unfinished creation.
            (Err(e), _) if e.kind() == ErrorKind::NotFound => {
                remove_folder(&folder.memory(epoch))?;
                existing.map(|(tier, _)| tier)
            }
            // The damaged store stays until newer snapshots replace it, because parts of it may be readable.
            (Err(error), _) if error.kind() == ErrorKind::Corrupt => {
                tracing::error!(folder = %folder.memory(epoch).display(), %error, "encoded memory is damaged; creating another store");
                epoch = epoch.saturating_add(1);
                existing.map(|(tier, _)| tier).or(ours.map(|_| &newest))
            }
            (Err(error), _) => return Err(error),
        };
        let store = open_epoch(folder, epoch)?;
        if let Some(model) = model {
            maintain::create_for_run_of(model, &store).await?;
        }
        let is_empty = store.history().records().await.map_or_else(|e| e.kind() == ErrorKind::NotFound, |found| found.is_empty());
        let has_new_run_id = existing.is_none() && is_empty;
        let earlier = match existing.filter(|_| is_empty) {
            Some((tier, _)) => earlier_precision(&options, tier).await,
            None => None,
        };
        let opened = Self::open_writers(folder, epoch, store, options, world, earlier).await?;
        Ok(Self { has_new_run_id, ..opened })
    }

    async fn open_writers(
        folder: &RunFolder,
        epoch: u64,
        store: Store,
        options: WriterOptions,
        world: u32,
        earlier_precision: Option<(u64, PrecisionDecision)>,
    ) -> Result<Self> {
        let mut writer = store.writer_with(WriterOptions { earlier_precision, ..options.clone() }).await?;
        // A save into memory is not the whole save.
        writer.set_previous_save(None);
        let mut ranks = Vec::new();
        if world > 1 {
            for rank in 0..world {
                ranks.push(store.rank_writer(Rank { rank, world, attempt: 0 }, options.clone()).await?);
            }
        }
        Ok(Self { folder: folder.clone(), epoch, store, writer, ranks, options, has_new_run_id: false })
    }

    /// Whether a tier that did not exist at opening now has another run id, and nothing has been saved yet. The caller
    /// must then open the memory tier again.
    pub(crate) async fn is_of_another_run(&self, tiers: &[Store]) -> Result<bool> {
        if !self.has_new_run_id {
            return Ok(false);
        }
        Ok(match nearest_existing(tiers).await? {
            Some((_, run)) => run != self.store.history().run().await?,
            None => false,
        })
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Sends the casks of the next snapshot to the next tier while they are being encoded.
    pub(crate) fn send_ahead(&mut self, ahead: Option<&AheadUploads>) {
        self.writer.send_ahead(ahead.cloned());
        self.ranks.iter_mut().for_each(|rank| rank.send_ahead(ahead.cloned()));
    }

    /// Sets the times of an earlier save, which the next snapshot records.
    pub(crate) fn set_previous_save(&mut self, previous: Option<PreviousSave>) {
        self.writer.set_previous_save(previous);
    }

    /// Encodes a complete state of one process. If its changed rows leave one out, all rows are compared.
    pub(crate) async fn save(
        &mut self,
        step: u64,
        tensors: &[TensorView<'_>],
        blobs: &[Blob<'_>],
        metadata: &Metadata,
    ) -> Result<EncodedSnapshot> {
        self.has_new_run_id = false;
        let error = match self.writer.save(step, tensors, blobs, metadata).await {
            Ok(saved) => return Ok(EncodedSnapshot { saved, left_out: LeftOut::new() }),
            Err(error) => error,
        };
        let Some(tensors) = without_rows(tensors, &error) else { return Err(error) };
        let saved = self.writer.save(step, &tensors, blobs, metadata).await?;
        Ok(EncodedSnapshot { saved, left_out: LeftOut::from([(0, error)]) })
    }

    /// Encodes the states of all ranks, with their tensors, in rank order, and commits them as one snapshot. Stores replicated
    /// tensors once. Compares all rows of a rank whose changed rows leave one out.
    pub(crate) async fn save_ranks(
        &mut self,
        step: u64,
        states: &[StoredState<'_>],
        tensors: Vec<Vec<TensorView<'_>>>,
    ) -> Result<EncodedSnapshot> {
        self.has_new_run_id = false;
        let parent = self.writer.next_parent(step).await?;
        let mut receipts = Vec::with_capacity(states.len());
        let mut left_out = LeftOut::new();
        let parts = without_replicas(0, tensors)?;
        // Random states and counters of a rank are integers.
        let with_floats = parts.iter().filter(|tensors| tensors.iter().any(|tensor| tensor.dtype().is_float())).count();
        for (rank, ((writer, state), own)) in self.ranks.iter_mut().zip(states).zip(parts).enumerate() {
            let blobs = state.blobs();
            writer.set_alone(with_floats == 1);
            receipts.push(match writer.save_on(step, parent, &own, &blobs).await {
                Ok(receipt) => receipt,
                Err(error) => {
                    let Some(own) = without_rows(&own, &error) else { return Err(error) };
                    let receipt = writer.save_on(step, parent, &own, &blobs).await?;
                    left_out.insert(rank, error);
                    receipt
                }
            });
        }
        let metadata = states.first().map(StoredState::metadata).unwrap_or_default();
        let saved = self.writer.commit_receipts(step, &receipts, &metadata).await?;
        Ok(EncodedSnapshot { saved, left_out })
    }

    /// Live snapshots in commit order.
    pub(crate) async fn live(&self) -> Result<Vec<SnapshotRecord>> {
        let mut records = self.store.history().records().await?;
        records.retain(|record| record.status == SnapshotStatus::Live);
        Ok(records)
    }

    /// Bytes of shared memory that all epochs use.
    pub(crate) fn bytes(&self) -> Result<u64> {
        memory_bytes(&self.folder)
    }

    /// Removes snapshots except the last `keep` ones, those that the next tier does not have yet, and those in their
    /// chains. No other process may write to the store meanwhile.
    ///
    /// Also keeps the base of the newest chain, because a writer makes no delta on a chain whose base is forgotten. If
    /// the chain has become long, the base goes, and the next snapshot is a base.
    async fn prune(&mut self, keep: u32, uploads: &UploadState) -> Result<()> {
        let records = self.store.history().complete_records().await?;
        let live: Vec<&SnapshotRecord> = records.iter().filter(|record| record.status == SnapshotStatus::Live).collect();
        let chain = chain_of(&records, live.last().map(|newest| newest.id));
        let base = chain.last().filter(|_| chain.len() < MAX_CHAIN).copied();
        let spare = live.iter().take(live.len().saturating_sub(keep as usize));
        let steps: Vec<u64> =
            spare.filter(|record| record.sequence <= uploads.uploaded && Some(record.id) != base).map(|record| record.step).collect();
        if !steps.is_empty() {
            self.store.forget(&steps).await?;
            let options = GcOptions { apply: true, age_floor: Duration::ZERO, collect: true, directories: false };
            maintain::gc(&self.store, &options).await?;
        }
        if live.len() >= keep as usize {
            self.remove_older(uploads)?;
        }
        Ok(())
    }

    /// Removes older epochs that the next tier has, or can never get.
    fn remove_older(&self, uploads: &UploadState) -> Result<()> {
        let older = self.folder.epochs()?.into_iter().filter(|epoch| *epoch < self.epoch);
        older
            .filter(|epoch| uploads.has_older || uploads.unusable.contains(epoch))
            .try_for_each(|epoch| remove_folder(&self.folder.memory(epoch)))
    }

    /// Makes room for another snapshot below `cap` bytes; returns whether there is room. Removes only what the next
    /// tier has: first old snapshots, then the whole chain of the newest. Also returns `false` if the log has become
    /// too long, unless uploads are failing: then memory takes as much as it can.
    pub(crate) async fn make_room(&mut self, keep: u32, cap: u64, uploaded: &UploadState, uploads: Uploads) -> Result<bool> {
        self.prune(keep, uploaded).await?;
        if self.renew(uploaded).await? == LogLength::Overdue && uploads == Uploads::Working {
            return Ok(false);
        }
        if self.bytes()? < cap {
            return Ok(true);
        }
        // A new snapshot is worth more than several old ones.
        self.prune(1, uploaded).await?;
        if self.bytes()? < cap {
            return Ok(true);
        }
        self.start_over(uploaded).await
    }

    /// Replaces everything in memory by an empty store if the next tier has it all; returns whether it did.
    pub(crate) async fn start_over(&mut self, uploads: &UploadState) -> Result<bool> {
        if self.last_sequence().await? > uploads.uploaded {
            return Ok(false);
        }
        self.remove_older(uploads)?;
        if self.folder.epochs()?.iter().any(|epoch| *epoch < self.epoch) {
            return Ok(false);
        }
        self.begin_epoch().await?;
        remove_folder(&self.folder.memory(self.epoch.saturating_sub(1)))?;
        Ok(true)
    }

    /// Log entry of the last snapshot; 0 if there is none. Fails if a part of the log is missing: what it named may not be uploaded.
    pub(crate) async fn last_sequence(&self) -> Result<u64> {
        Ok(self.store.history().complete_records().await?.last().map_or(0, |record| record.sequence))
    }

    /// Begins a new epoch if the log is long and the next tier has everything.
    async fn renew(&mut self, uploads: &UploadState) -> Result<LogLength> {
        let last = self.last_sequence().await?;
        if last < MAX_ENTRIES || last > uploads.uploaded {
            return Ok(if last < OVERDUE_ENTRIES { LogLength::Acceptable } else { LogLength::Overdue });
        }
        self.begin_epoch().await?;
        Ok(LogLength::Acceptable)
    }

    /// Writes to a new store from now on, which begins with a base. The previous store stays until newer snapshots
    /// replace it.
    pub(crate) async fn begin_epoch(&mut self) -> Result<()> {
        let epoch = self.epoch.saturating_add(1);
        let store = open_epoch(&self.folder, epoch)?;
        maintain::create_for_run_of(&self.store, &store).await?;
        let world = self.ranks.len() as u32;
        let earlier = earlier_precision(&self.options, &self.store).await;
        *self = Self::open_writers(&self.folder, epoch, store, self.options.clone(), world, earlier).await?;
        Ok(())
    }
}

/// Step and newest decision of the precision `auto` in another store. Without an answer, the next saves are lossless until
/// the training has been measured again.
async fn earlier_precision(options: &WriterOptions, store: &Store) -> Option<(u64, PrecisionDecision)> {
    if !options.precision.is_auto() {
        return None;
    }
    match store.snapshot(Latest).await {
        Ok(newest) => newest.inspect().precision().map(|decision| (newest.step(), decision)),
        Err(error) => {
            if error.kind() != ErrorKind::NotFound {
                tracing::warn!(%error, store = store.url(), "the last choice of the precision `auto` cannot be read");
            }
            None
        }
    }
}

/// Removes from each rank the tensors that a lower rank of this host has, too. Such replicas must cover the same part with
/// equal bytes. `first_rank`: number of the first of them.
pub(crate) fn without_replicas(first_rank: u32, ranks: Vec<Vec<TensorView<'_>>>) -> Result<Vec<Vec<TensorView<'_>>>> {
    let mut first: HashMap<(String, Rect), (u32, &[u8])> = HashMap::new();
    let mut kept = Vec::with_capacity(ranks.len());
    for (rank, tensors) in (first_rank..).zip(ranks) {
        let mut own = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            match first.entry((tensor.name().to_owned(), tensor.rect().clone())) {
                Entry::Vacant(entry) => {
                    entry.insert((rank, tensor.data()));
                    own.push(tensor);
                }
                Entry::Occupied(found) if found.get().1 == tensor.data() => {}
                Entry::Occupied(found) => {
                    let message = format!(
                        "rank {rank} has other values than rank {}; give tensors that differ between ranks different names",
                        found.get().0
                    );
                    return Err(Error::invalid(message).tensor(tensor.name()));
                }
            }
        }
        kept.push(own);
    }
    Ok(kept)
}

/// Length of the log in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LogLength {
    Acceptable,
    /// Too long, and the next tier does not have all of it yet.
    Overdue,
}

/// Log entries after which a new epoch begins. A save adds about three, and removing old snapshots reads all entries.
const MAX_ENTRIES: u64 = 128;

/// Log entries after which no snapshot is added until the next tier has all. A trainer that saves without a pause would
/// otherwise never let the next tier catch up, and each save would take longer than the previous one.
const OVERDUE_ENTRIES: u64 = 2 * MAX_ENTRIES;

/// Length of a chain in memory. All links of a chain stay in memory as long as its last link.
const MAX_CHAIN: usize = 16;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tensorcask::precision::Profile;
    use tensorcask::{Dtype, Metadata, Precision, TensorView, WriterOptions};

    use super::{MemoryTier, UploadState, Uploads};
    use crate::os::folders::{EngineFolder, RunFolder};

    /// Opens a tier of one process in its own folder.
    async fn open(temporary: &tempfile::TempDir) -> (RunFolder, MemoryTier) {
        let folder = EngineFolder::open(Some(&temporary.path().join("e"))).unwrap().run("0");
        folder.create().unwrap();
        let tier = MemoryTier::open(&folder, &[], WriterOptions::default(), 1).await.unwrap();
        (folder, tier)
    }

    async fn save(tier: &mut MemoryTier, step: u64) -> u64 {
        let state = [TensorView::new("w", Dtype::U8, &[3], &[1, 2, 3]).unwrap()];
        tier.save(step, &state, &[], &Metadata::default()).await.unwrap().saved.sequence
    }

    #[tokio::test]
    async fn an_older_store_stays_until_it_is_uploaded_or_damaged() {
        for is_damaged in [false, true] {
            let temporary = tempfile::tempdir().unwrap();
            let (folder, mut tier) = open(&temporary).await;
            save(&mut tier, 1).await;
            tier.begin_epoch().await.unwrap();
            // Memory is full, and the newer store has nothing to remove.
            assert!(!tier.make_room(1, 0, &UploadState::default(), Uploads::Working).await.unwrap());
            let mut sequence = 0;
            for step in 2..=4 {
                sequence = save(&mut tier, step).await;
                assert!(tier.make_room(1, u64::MAX, &UploadState::default(), Uploads::Working).await.unwrap());
            }
            assert_eq!(folder.epochs().unwrap(), [0, 1], "step 1 may not be in the store");
            let uploaded = match is_damaged {
                true => UploadState { unusable: BTreeSet::from([0]), ..UploadState::default() },
                false => UploadState { uploaded: sequence, has_older: true, ..UploadState::default() },
            };
            assert!(tier.make_room(1, u64::MAX, &uploaded, Uploads::Working).await.unwrap());
            assert_eq!(folder.epochs().unwrap(), [1]);
        }
    }

    #[tokio::test]
    async fn the_precision_auto_goes_on_in_a_new_epoch() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = EngineFolder::open(Some(&temporary.path().join("e"))).unwrap().run("0");
        folder.create().unwrap();
        let options = WriterOptions { precision: Precision::auto(), ..WriterOptions::default() };
        let mut tier = MemoryTier::open(&folder, &[], options, 1).await.unwrap();
        let mut profiles = Vec::new();
        for step in 1u16..=9 {
            if step == 8 {
                tier.begin_epoch().await.unwrap();
            }
            let sign = |at: u16| if at.count_ones().is_multiple_of(2) { 1e-3 } else { -1e-3 };
            let weights = (0..4096u16).map(|at| f32::from(at).sin() + sign(at) * f32::from(step));
            let bytes: Vec<u8> = weights.flat_map(f32::to_le_bytes).collect();
            let state = [TensorView::new("optim.master.w", Dtype::F32, &[64, 64], &bytes).unwrap()];
            let saved = tier.save(step.into(), &state, &[], &Metadata::default()).await.unwrap();
            profiles.push(saved.saved.precision.unwrap().profile);
        }
        use Profile::{Compact, Lossless, Near};
        assert_eq!(profiles, [Lossless, Lossless, Lossless, Near, Near, Near, Compact, Compact, Compact]);
    }

    #[tokio::test]
    async fn a_store_with_a_damaged_log_is_replaced_by_one_of_the_same_run() {
        let temporary = tempfile::tempdir().unwrap();
        let (folder, mut tier) = open(&temporary).await;
        save(&mut tier, 1).await;
        let run = tier.store().history().run().await.unwrap();
        let log = folder.memory(0).join("log");
        let newest = std::fs::read_dir(&log).unwrap().map(|entry| entry.unwrap().path()).max().unwrap();
        std::fs::write(newest, b"damage").unwrap();
        let mut next = MemoryTier::open(&folder, &[], WriterOptions::default(), 1).await.unwrap();
        assert_eq!((next.epoch(), next.store().history().run().await.unwrap()), (1, run));
        save(&mut next, 2).await;
    }
}
