//! The memory tier: a store in shared memory that holds the last snapshots in encoded form.
//!
//! It is a store like any other, so that any reader can restore from it, without the agent too; that its bytes can be copied to another
//! host as they are; and that a snapshot moves to the next tier byte by byte. What it gives up (sync, a long log) it can afford: it
//! goes with the host. Once its log is long, a new store takes its place, which begins with a base.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::time::Duration;

use tensorcask::wire::Id;
use tensorcask::{
    Ahead, Blob, Error, ErrorKind, GcOptions, Metadata, Rank, RankWriter, Rect, Result, Saved, SnapshotRecord, Status, Store, StoreOptions,
    TensorView, Writer, WriterOptions,
};

use crate::image::Stored;
use crate::place::{RunPlace, create_folder, remove_folder};

/// Log entries of one store, at about three for each save: giving up old snapshots reads them all.
const MAX_ENTRIES: u64 = 128;

/// So many that no more is to be added before the next tier has all: a trainer that saves without a pause would never let that happen by
/// itself, and each save would take longer than the one before.
const OVERDUE_ENTRIES: u64 = 2 * MAX_ENTRIES;

/// Snapshots of a chain in memory: all of them stay for as long as the last one does.
const MAX_CHAIN: usize = 16;

/// What the next tier has of memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Sent {
    /// The log entry of the store that is written to up to which it has everything; with any, it has everything of the stores before.
    pub uploaded: u64,
    /// Epochs that cannot be sent any more.
    pub damaged: BTreeSet<u64>,
}

/// What became of the log in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Log {
    /// It is short enough.
    Short,
    /// A new one took its place.
    Renewed,
    /// It is long, and the next tier does not have all of it yet.
    Overdue,
}

/// The store in memory that is written to.
#[derive(Debug)]
pub(crate) struct MemoryTier {
    place: RunPlace,
    epoch: u64,
    store: Store,
    writer: Writer,
    ranks: Vec<RankWriter>,
    options: WriterOptions,
    /// Neither a tier nor memory told which run this is, and nothing has been saved.
    is_unnamed: bool,
}

/// Opens the store of an epoch; it need not be there.
pub(crate) fn open_epoch(place: &RunPlace, epoch: u64) -> Result<Store> {
    open_folder(&place.memory(epoch))
}

/// The nearest tier that is there, and the run that it is of.
async fn named_by(tiers: &[Store]) -> Result<Option<(&Store, Id)>> {
    for tier in tiers {
        match tier.run().await {
            Ok(run) => return Ok(Some((tier, run))),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(None)
}

fn open_folder(folder: &std::path::Path) -> Result<Store> {
    let path = folder.to_str().ok_or_else(|| Error::invalid("the engine's folder has to be text"))?;
    StoreOptions { fsync: false, ..StoreOptions::default() }.open(path)
}

impl MemoryTier {
    /// Opens the newest epoch, or creates the first: of the same run as the nearest tier that is there. Fails where that cannot be told
    /// because a tier cannot be asked, and nothing is in memory that tells it.
    pub(crate) async fn open(place: &RunPlace, tiers: &[Store], options: WriterOptions, world: u32) -> Result<Self> {
        let mut epoch = place.epochs()?.last().copied().unwrap_or(0);
        let newest = open_epoch(place, epoch)?;
        let ours = match newest.run().await {
            Ok(run) => Some(run),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => None,
            Err(e) => return Err(e),
        };
        let known = match named_by(tiers).await {
            Ok(known) => known,
            Err(e) if ours.is_none() => return Err(e),
            Err(_) => None,
        };
        // The store that tells which run it is, where a new one is to be made.
        let model = match (newest.records().await, known) {
            (Ok(_), Some((tier, run))) if ours.is_some_and(|ours| ours != run) => {
                tracing::warn!(store = tier.url(), "the store was made anew: what was in memory is of another run, and goes");
                clear(place)?;
                epoch = place.epochs()?.last().copied().unwrap_or(0);
                Some(tier)
            }
            (Ok(_), _) => None,
            // A folder without its `store.json` never was one.
            (Err(e), _) if e.kind() == ErrorKind::NotFound => {
                remove_folder(&place.memory(epoch))?;
                known.map(|(tier, _)| tier)
            }
            // What can be read of it still can, until newer snapshots take its place.
            (Err(error), _) if error.kind() == ErrorKind::Corrupt => {
                tracing::error!(folder = %place.memory(epoch).display(), %error, "encoded memory is damaged; another takes its place");
                epoch = epoch.saturating_add(1);
                known.map(|(tier, _)| tier).or(ours.map(|_| &newest))
            }
            (Err(error), _) => return Err(error),
        };
        let store = open_epoch(place, epoch)?;
        if let Some(model) = model {
            store.create_beside(model).await?;
        }
        let is_unnamed =
            known.is_none() && store.records().await.map_or_else(|e| e.kind() == ErrorKind::NotFound, |found| found.is_empty());
        Ok(Self { is_unnamed, ..Self::writing(place, epoch, store, options, world).await? })
    }

    async fn writing(place: &RunPlace, epoch: u64, store: Store, options: WriterOptions, world: u32) -> Result<Self> {
        let writer = store.writer_with(options.clone()).await?;
        let mut ranks = Vec::new();
        if world > 1 {
            for rank in 0..world {
                ranks.push(store.rank_writer(Rank { rank, world, attempt: 0 }, options.clone()).await?);
            }
        }
        Ok(Self { place: place.clone(), epoch, store, writer, ranks, options, is_unnamed: false })
    }

    /// Whether a tier that was not there when this was opened is of another run, and nothing has been saved yet: this is to be opened anew.
    pub(crate) async fn is_of_another_run(&self, tiers: &[Store]) -> Result<bool> {
        if !self.is_unnamed {
            return Ok(false);
        }
        Ok(match named_by(tiers).await? {
            Some((_, run)) => run != self.store.run().await?,
            None => false,
        })
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Has the casks of the next snapshot go to the next tier, too, while they are being encoded.
    pub(crate) fn send_ahead(&mut self, ahead: Option<&Ahead>) {
        self.writer.send_ahead(ahead.cloned());
        self.ranks.iter_mut().for_each(|rank| rank.send_ahead(ahead.cloned()));
    }

    /// Encodes a state that one process has whole.
    pub(crate) async fn save(&mut self, step: u64, tensors: &[TensorView<'_>], blobs: &[Blob<'_>], metadata: &Metadata) -> Result<Saved> {
        self.is_unnamed = false;
        self.writer.save(step, tensors, blobs, metadata).await
    }

    /// Encodes what all ranks have in their slots, by rank, and commits it as one snapshot. What several ranks have is stored once.
    pub(crate) async fn save_ranks(&mut self, step: u64, states: &[Stored<'_>]) -> Result<Saved> {
        self.is_unnamed = false;
        let parent = self.writer.next_parent(step).await?;
        let mut receipts = Vec::with_capacity(states.len());
        let tensors = states.iter().map(Stored::tensors).collect::<Result<Vec<_>>>()?;
        for ((writer, state), own) in self.ranks.iter_mut().zip(states).zip(without_replicas(tensors)?) {
            receipts.push(writer.save_on(step, parent, &own, &state.blobs()).await?);
        }
        let metadata = states.first().map(Stored::metadata).unwrap_or_default();
        self.writer.commit_receipts(step, &receipts, &metadata).await
    }

    /// Live snapshots, by commit.
    pub(crate) async fn live(&self) -> Result<Vec<SnapshotRecord>> {
        let mut records = self.store.records().await?;
        records.retain(|record| record.status == Status::Live);
        Ok(records)
    }

    /// Bytes of shared memory that all epochs take.
    pub(crate) fn bytes(&self) -> Result<u64> {
        memory_bytes(&self.place)
    }

    /// Gives up all but the last `keep` snapshots and those that the next tier does not have yet; and what no chain needs any more. Nothing
    /// else may write to the store meanwhile.
    ///
    /// The base of the newest chain stays, because a writer makes no delta on a chain whose base is not wanted; which is what a chain
    /// that has become long needs: the next snapshot is a base then.
    async fn prune(&mut self, keep: u32, sent: &Sent) -> Result<()> {
        let records = self.store.records().await?;
        let live: Vec<&SnapshotRecord> = records.iter().filter(|record| record.status == Status::Live).collect();
        let chain = chain_of(&records, live.last().map(|newest| newest.id));
        let base = chain.last().filter(|_| chain.len() < MAX_CHAIN).copied();
        let spare = live.iter().take(live.len().saturating_sub(keep as usize));
        let steps: Vec<u64> =
            spare.filter(|record| record.sequence <= sent.uploaded && Some(record.id) != base).map(|record| record.step).collect();
        if !steps.is_empty() {
            self.store.forget(&steps).await?;
            let options = GcOptions { apply: true, age_floor: Duration::ZERO, collect: true, directories: false };
            self.store.gc(&options).await?;
        }
        if live.len() >= keep as usize {
            self.remove_older(sent)?;
        }
        Ok(())
    }

    /// Removes the stores before this one, as far as the next tier has them.
    fn remove_older(&self, sent: &Sent) -> Result<()> {
        let older = self.place.epochs()?.into_iter().filter(|epoch| *epoch < self.epoch);
        older
            .filter(|epoch| sent.uploaded > 0 || sent.damaged.contains(epoch))
            .try_for_each(|epoch| remove_folder(&self.place.memory(epoch)))
    }

    /// Makes room for one more snapshot in `cap` bytes, out of what the next tier has already: old snapshots go, then the chain of the newest, whose place a base takes. Whether there is room; while uploads go on, a log that has become long
    /// takes no more.
    pub(crate) async fn make_room(&mut self, keep: u32, cap: u64, sent: &Sent, uploads_go_on: bool) -> Result<bool> {
        self.prune(keep, sent).await?;
        // Not while the store is away: memory takes what it can then.
        if self.renew(sent).await? == Log::Overdue && uploads_go_on {
            return Ok(false);
        }
        if self.bytes()? < cap {
            return Ok(true);
        }
        // Better few snapshots in memory than none that is new.
        self.prune(1, sent).await?;
        if self.bytes()? < cap {
            return Ok(true);
        }
        self.start_over(sent).await
    }

    /// Gives up everything in memory for an empty store, if the next tier has it all; whether it has.
    pub(crate) async fn start_over(&mut self, sent: &Sent) -> Result<bool> {
        if self.last().await? > sent.uploaded {
            return Ok(false);
        }
        self.remove_older(sent)?;
        if self.place.epochs()?.iter().any(|epoch| *epoch < self.epoch) {
            return Ok(false);
        }
        self.begin_epoch().await?;
        remove_folder(&self.place.memory(self.epoch.saturating_sub(1)))?;
        Ok(true)
    }

    /// The log entry of the last snapshot.
    pub(crate) async fn last(&self) -> Result<u64> {
        Ok(self.store.records().await?.last().map_or(0, |record| record.sequence))
    }

    /// Begins a new store if the log of this one is long, and the next tier has all that is in it.
    async fn renew(&mut self, sent: &Sent) -> Result<Log> {
        let last = self.last().await?;
        if last < MAX_ENTRIES || last > sent.uploaded {
            return Ok(if last < OVERDUE_ENTRIES { Log::Short } else { Log::Overdue });
        }
        self.begin_epoch().await?;
        Ok(Log::Renewed)
    }

    /// Writes to a new store from now on, which begins with a base. The one before stays until newer snapshots take its place.
    pub(crate) async fn begin_epoch(&mut self) -> Result<()> {
        let epoch = self.epoch.saturating_add(1);
        let store = open_epoch(&self.place, epoch)?;
        store.create_beside(&self.store).await?;
        let world = self.ranks.len() as u32;
        *self = Self::writing(&self.place, epoch, store, self.options.clone(), world).await?;
        Ok(())
    }
}

/// The snapshots that one is rebuilt from, newest first.
fn chain_of(records: &[SnapshotRecord], newest: Option<Id>) -> Vec<Id> {
    let mut chain = Vec::new();
    let mut next = newest;
    // Parents come before their children.
    for record in records.iter().rev() {
        if Some(record.id) == next {
            chain.push(record.id);
            next = record.parent;
        }
    }
    chain
}

/// Whether there was no space for files.
pub(crate) fn is_full(error: &Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        let io = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        if matches!(io, Some(std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)) {
            return true;
        }
        next = error.source();
    }
    false
}

/// Removes all stores in memory. The next has another number: what an upload that is under way says of one must not be taken for the other.
pub(crate) fn clear(place: &RunPlace) -> Result<()> {
    let epochs = place.epochs()?;
    if let Some(last) = epochs.last() {
        create_folder(&place.memory(last.saturating_add(1)))?;
    }
    epochs.into_iter().try_for_each(|epoch| remove_folder(&place.memory(epoch)))
}

/// Each rank's tensors without those that a rank before it has: a part of the same place, which has to be the same byte for byte.
fn without_replicas(ranks: Vec<Vec<TensorView<'_>>>) -> Result<Vec<Vec<TensorView<'_>>>> {
    let mut first: HashMap<(String, Rect), (usize, &[u8])> = HashMap::new();
    let mut kept = Vec::with_capacity(ranks.len());
    for (rank, tensors) in ranks.into_iter().enumerate() {
        let mut own = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            match first.entry((tensor.name().to_owned(), tensor.rect().clone())) {
                Entry::Vacant(place) => {
                    place.insert((rank, tensor.data()));
                    own.push(tensor);
                }
                Entry::Occupied(found) if found.get().1 == tensor.data() => {}
                Entry::Occupied(found) => {
                    let message = format!(
                        "rank {rank} has other values than rank {}; what each rank has of its own needs a name of its own",
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

/// Bytes of shared memory that all encoded snapshots of a run take.
pub(crate) fn memory_bytes(place: &RunPlace) -> Result<u64> {
    place.epochs()?.into_iter().map(|epoch| folder_bytes(place.memory(epoch))).sum()
}

/// Bytes that the files of a folder take, in whole pages as memory has them.
fn folder_bytes(folder: PathBuf) -> Result<u64> {
    let fail = |path: &std::path::Path, e: std::io::Error| Error::io(path.display().to_string(), e);
    let mut bytes = 0u64;
    let mut folders = vec![folder];
    while let Some(next) = folders.pop() {
        let entries = match std::fs::read_dir(&next) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            entries => entries.map_err(|e| fail(&next, e))?,
        };
        for entry in entries {
            let entry = entry.map_err(|e| fail(&next, e))?;
            match entry.metadata() {
                Ok(found) if found.is_dir() => folders.push(entry.path()),
                Ok(found) => bytes = bytes.saturating_add(found.len().next_multiple_of(4096)),
                // Gone in the meantime.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(fail(&entry.path(), e)),
            }
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use tensorcask::Dtype;

    use super::*;
    use crate::place::Place;

    /// A tier of one process in a folder of its own.
    async fn tier(folder: &tempfile::TempDir) -> (RunPlace, MemoryTier) {
        let place = Place::open(Some(&folder.path().join("e"))).unwrap().run("0");
        place.create().unwrap();
        let tier = MemoryTier::open(&place, &[], WriterOptions::default(), 1).await.unwrap();
        (place, tier)
    }

    async fn save(tier: &mut MemoryTier, step: u64) -> u64 {
        let state = [TensorView::new("w", Dtype::U8, &[3], &[1, 2, 3]).unwrap()];
        tier.save(step, &state, &[], &Metadata::default()).await.unwrap().sequence
    }

    #[tokio::test]
    async fn an_older_store_stays_until_it_is_sent_or_cannot_be() {
        for is_damaged in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let (place, mut tier) = tier(&folder).await;
            save(&mut tier, 1).await;
            tier.begin_epoch().await.unwrap();
            // Full, with nothing in the newer store that could go for more.
            assert!(!tier.make_room(1, 0, &Sent::default(), true).await.unwrap());
            let mut sequence = 0;
            for step in 2..=4 {
                sequence = save(&mut tier, step).await;
                assert!(tier.make_room(1, u64::MAX, &Sent::default(), true).await.unwrap());
            }
            assert_eq!(place.epochs().unwrap(), [0, 1], "nobody has said that step 1 is in the store");
            let sent = match is_damaged {
                true => Sent { damaged: BTreeSet::from([0]), ..Sent::default() },
                false => Sent { uploaded: sequence, ..Sent::default() },
            };
            assert!(tier.make_room(1, u64::MAX, &sent, true).await.unwrap());
            assert_eq!(place.epochs().unwrap(), [1]);
        }
    }

    #[tokio::test]
    async fn memory_whose_log_is_damaged_is_followed_by_another_of_the_same_run() {
        let folder = tempfile::tempdir().unwrap();
        let (place, mut tier) = tier(&folder).await;
        save(&mut tier, 1).await;
        let run = tier.store().run().await.unwrap();
        let log = place.memory(0).join("log");
        let newest = std::fs::read_dir(&log).unwrap().map(|entry| entry.unwrap().path()).max().unwrap();
        std::fs::write(newest, b"damage").unwrap();
        let mut next = MemoryTier::open(&place, &[], WriterOptions::default(), 1).await.unwrap();
        assert_eq!((next.epoch(), next.store().run().await.unwrap()), (1, run));
        save(&mut next, 2).await;
    }
}
