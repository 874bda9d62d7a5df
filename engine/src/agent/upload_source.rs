//! The sources of a tier: stores in memory for the first tier, else the previous tier.

use std::collections::BTreeSet;

use tensorcask::maintain::{self, VerifyDepth, VerifyOptions};
use tensorcask::wire::Id;
use tensorcask::{ErrorKind, Result, SnapshotStatus, Store};

use super::run::Run;
use super::run_event::{Event, LostSnapshot, LostSnapshots};
use crate::memory::stores::open_epoch;

/// A store that a tier is filled from.
pub(super) struct UploadSource {
    pub store: Store,
    /// Epoch of a store in memory; 0 for a tier.
    pub epoch: u64,
}

/// Lists the existing sources of a tier, the newest last.
pub(super) async fn find_sources(run: &Run, tier: usize) -> Result<Vec<UploadSource>> {
    let candidates = match tier.checked_sub(1) {
        None => {
            let damaged = run.read(|state, _| state.memory.unusable.clone());
            let epochs = run.folder.epochs()?.into_iter().filter(|epoch| !damaged.contains(epoch));
            epochs.map(|epoch| Ok(UploadSource { store: open_epoch(&run.folder, epoch)?, epoch })).collect::<Result<Vec<_>>>()?
        }
        Some(before) => run.tiers.get(before).map(|store| UploadSource { store: store.clone(), epoch: 0 }).into_iter().collect(),
    };
    let mut sources = Vec::with_capacity(candidates.len());
    for source in candidates {
        match source.store.history().run().await {
            Ok(run) => sources.push((run, source)),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            // The encoder creates another store in its place.
            Err(e) if tier == 0 && e.kind() == ErrorKind::Corrupt => {
                let why = format!("the snapshot was damaged in memory before it reached the store: {}", e.message());
                run.apply(Event::MemoryUnusable { epoch: source.epoch, lost: None, why });
            }
            Err(e) => return Err(e),
        }
    }
    // Leaves out snapshots of another run, which an agent that was killed had begun to remove.
    let newest = sources.last().map(|(run, _)| *run);
    Ok(sources.into_iter().filter(|(run, _)| Some(*run) == newest).map(|(_, source)| source).collect())
}

/// Whether any source, or the arena, holds something that a tier may lack. A source that does not answer counts as holding something.
pub(super) async fn holds_anything(run: &Run, sources: &[UploadSource]) -> bool {
    for source in sources {
        let holds = match source.store.history().records().await {
            Ok(records) => !records.is_empty(),
            Err(e) => !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Corrupt),
        };
        if holds {
            return true;
        }
    }
    run.read(|_, arenas| arenas.holds_states())
}

/// Whether a source is damaged, rather than the tier that it is copied to.
pub(super) async fn is_damaged(source: &Store) -> Result<bool> {
    let report = maintain::verify(source, &VerifyOptions { depth: VerifyDepth::Pages, ..VerifyOptions::default() }).await;
    Ok(report.map_or_else(|error| error.kind() == ErrorKind::Corrupt, |report| !report.is_clean()))
}

/// Gives up a store in memory whose snapshots cannot be stored: those that the tier lacks are reported as failed.
pub(super) async fn give_up(run: &Run, source: &UploadSource, destination: &Store, why: String) -> Result<()> {
    let stored = snapshot_ids(destination).await?;
    let lost = match source.store.history().records().await {
        Ok(records) => {
            let lost = records.iter().filter(|record| record.status == SnapshotStatus::Live && !stored.contains(&record.id));
            let snapshots = lost.map(|record| LostSnapshot { id: record.id, sequence: record.sequence, step: record.step }).collect();
            Some(LostSnapshots { snapshots, read: records.last().map_or(0, |record| record.sequence) })
        }
        Err(e) if e.kind() == ErrorKind::Corrupt => None,
        Err(e) => return Err(e),
    };
    run.apply(Event::MemoryUnusable { epoch: source.epoch, lost, why });
    Ok(())
}

/// Ids of all snapshots in the log of a store.
pub(super) async fn snapshot_ids(store: &Store) -> Result<BTreeSet<Id>> {
    Ok(store.history().complete_records().await?.into_iter().map(|record| record.id).collect())
}
