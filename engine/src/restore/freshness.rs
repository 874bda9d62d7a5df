//! Freshness of this host's memory: whether another host has continued the job since memory was written.

use std::collections::BTreeMap;
use std::time::Duration;

use tensorcask::wire::Id;
use tensorcask::{Error, ErrorKind, Result, SnapshotRecord, SnapshotStatus, Store};

use super::restored::{PassedOver, Source};
use crate::memory::stores::open_epoch;
use crate::os::folders::RunFolder;
use crate::run::known_tiers::KnownTiers;
use crate::run::spec::RunSpec;
use crate::run::tier_query::{TierContents, query_tier, saved_at};

/// Freshness of this host's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// No tier that answered has anything newer.
    Current,
    /// A tier has newer snapshots of another host, belongs to another run, or has forgotten the newest snapshot in
    /// memory. Holds the newest snapshot of each tier, by URL.
    Stale(BTreeMap<String, Option<Id>>),
}

/// Result of [`check_freshness`].
#[derive(Debug)]
pub(crate) struct FreshnessReport {
    pub freshness: Freshness,
    /// Whether there is no memory.
    pub is_empty: bool,
    /// Step of the newest snapshot in each place that answered: memory, if it is current, and the tiers.
    pub newest_steps: Vec<u64>,
    /// Tiers that did not answer. Memory was trusted in spite of them.
    pub unreachable: Vec<UnreachableTier>,
}

/// A tier that did not answer.
#[derive(Debug)]
pub(crate) struct UnreachableTier {
    tier: usize,
    url: String,
    error: Error,
}

impl UnreachableTier {
    /// Whether this is the first tier, and its storage failed or did not answer in time.
    pub(crate) fn is_silent_first(&self) -> bool {
        self.tier == 0 && self.error.kind() == ErrorKind::Storage
    }

    pub(crate) fn passed_over(&self) -> PassedOver {
        let message = format!("this tier could not be asked when the engine began, so memory was trusted: {}", self.error.message());
        let error = Error::new(self.error.kind(), message);
        PassedOver { source: Source::Tier(self.tier, self.url.clone()), step: None, error }
    }
}

/// This host's memory of a run, as left by earlier processes.
pub(crate) struct LocalMemory {
    /// Notes about the tiers, read before the arena was opened.
    pub known_tiers: KnownTiers,
    /// Whether the arena of the rank holds a complete state.
    pub has_states: bool,
}

/// Compares this host's memory with the tiers. Notes the newest snapshots of the tiers if memory is current.
///
/// Memory is stale if another host made the newest snapshot of the first tier, or made a later save in a farther tier.
/// It is also stale if the first tier has forgotten the newest snapshot in memory.
pub(crate) async fn check_freshness(spec: &RunSpec, run: &RunFolder, local: &LocalMemory, timeout: Duration) -> Result<FreshnessReport> {
    let memory = EncodedMemory::read(run, timeout).await?;
    compare(spec, run, local, memory, timeout).await
}

/// Compares memory, as it was read before, with the tiers.
async fn compare(
    spec: &RunSpec,
    run: &RunFolder,
    local: &LocalMemory,
    mut memory: EncodedMemory,
    timeout: Duration,
) -> Result<FreshnessReport> {
    let stores = spec.stores()?;
    let is_empty = run.epochs()?.is_empty() && !local.has_states;
    let (mut first, mut unreachable): (Option<TierContents>, _) = (None, Vec::new());
    // Time of the newest save that is known to be ours, for comparison with farther tiers.
    let mut newest_here = 0;
    let has_further = stores.len() > 1;
    if let (true, Some((store, TierContents { latest: Some(latest), .. }))) = (has_further, memory.stores.last()) {
        newest_here = saved_at(store, latest, timeout).await;
    }
    let mut latest_of = BTreeMap::new();
    let mut is_stale = false;
    let mut newest_steps = Vec::new();
    for (tier, store) in stores.iter().enumerate() {
        let url = store.url().to_owned();
        let contents = match query_tier(store, timeout).await {
            Ok(contents) => contents,
            Err(error) => {
                unreachable.push(UnreachableTier { tier, url, error });
                continue;
            }
        };
        let known = local.known_tiers.tier(store.url()).latest;
        newest_steps.extend(contents.latest.as_ref().map(|latest| latest.step));
        let latest = contents.latest.as_ref().map(|latest| latest.id);
        let mut continued_elsewhere = match (tier, &contents.latest) {
            (0, _) if (contents.run.is_none() || contents.records.is_empty()) && known.is_some() => {
                // Deleted with its log or without, or on a disk that is not mounted: memory may be the only copy.
                tracing::warn!(
                    store = store.url(),
                    folder = %run.root().display(),
                    "the store is gone; trusting memory (to start from nothing, remove the folder)"
                );
                let error = Error::not_found("the store, or its log, does not exist").object(store.url());
                unreachable.push(UnreachableTier { tier, url, error });
                continue;
            }
            (0, _) => memory.is_outdated_by(&contents, known),
            (_, None) => false,
            (_, Some(newest)) => {
                let in_first = first.as_ref().is_some_and(|first| first.has(newest.id));
                let is_ours = latest == known || memory.has(newest.id) || in_first;
                !is_ours && saved_at(store, newest, timeout).await > newest_here
            }
        };
        if continued_elsewhere && !is_empty {
            // The agent may have added the newest snapshot to memory, and copied it, since memory was read.
            memory = EncodedMemory::read(run, timeout).await?;
            continued_elsewhere = match tier {
                0 => memory.is_outdated_by(&contents, known),
                _ => !latest.is_some_and(|latest| memory.has(latest)),
            };
        }
        if continued_elsewhere && !is_empty {
            tracing::warn!(
                run = spec.run,
                tier = store.url(),
                "the store has newer snapshots than this host's memory, or has forgotten its newest; memory is discarded"
            );
            is_stale = true;
        }
        if let (true, 0, Some(latest)) = (has_further, tier, &contents.latest) {
            newest_here = newest_here.max(saved_at(store, latest, timeout).await);
        }
        if tier == 0 {
            first = Some(contents);
        }
        latest_of.insert(url, latest);
    }
    if is_stale {
        // Noted later, by the agent, when memory is removed.
        return Ok(FreshnessReport { freshness: Freshness::Stale(latest_of), is_empty, newest_steps, unreachable });
    }
    for (url, latest) in latest_of {
        KnownTiers::update(run, &url, |known| known.latest = latest)?;
    }
    newest_steps.extend(memory.stores.iter().rev().find_map(|(_, contents)| contents.latest.as_ref()).map(|latest| latest.step));
    Ok(FreshnessReport { freshness: Freshness::Current, is_empty, newest_steps, unreachable })
}

/// The encoded snapshots in memory, by epoch.
struct EncodedMemory {
    stores: Vec<(Store, TierContents)>,
}

impl EncodedMemory {
    /// Leaves out damaged stores. Any other failure may pass: without these snapshots, memory would seem to be out of date.
    async fn read(run: &RunFolder, timeout: Duration) -> Result<Self> {
        let mut stores = Vec::new();
        for epoch in run.epochs()? {
            let store = open_epoch(run, epoch)?;
            match query_tier(&store, timeout).await {
                Ok(contents) => stores.push((store, contents)),
                Err(error) if error.is_damage() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self { stores })
    }

    fn has(&self, id: Id) -> bool {
        self.stores.iter().any(|(_, contents)| contents.has(id))
    }

    /// Whether the first tier shows that memory is out of date. `known`: the newest snapshot of the tier when this host
    /// last looked.
    fn is_outdated_by(&self, tier: &TierContents, known: Option<Id>) -> bool {
        let latest = tier.latest.as_ref().map(|latest| latest.id);
        let newest = self.stores.iter().rev().find_map(|(_, contents)| contents.latest.as_ref()).map(|latest| latest.id);
        let is_other_run = |(_, ours): &(Store, TierContents)| matches!((ours.run, tier.run), (Some(ours), Some(theirs)) if ours != theirs);
        let is_forgotten = |record: &SnapshotRecord| Some(record.id) == newest && record.status != SnapshotStatus::Live;
        let is_unknown = latest != known && !latest.is_some_and(|latest| self.has(latest));
        self.stores.iter().any(is_other_run) || is_unknown || tier.records.iter().any(is_forgotten)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tensorcask::maintain::{self, CopyOptions};
    use tensorcask::{Dtype, Metadata, Policy, Store, TensorView, WriterOptions};

    use super::{EncodedMemory, Freshness, LocalMemory, compare};
    use crate::memory::tier::MemoryTier;
    use crate::os::folders::EngineFolder;
    use crate::run::known_tiers::KnownTiers;
    use crate::run::options::EngineOptions;

    const LIMIT: Duration = Duration::from_secs(180);

    /// The agent goes on while a trainer starts. The trainer must not take the step for one of another host: it would discard
    /// memory, and newer states that wait there.
    #[tokio::test]
    async fn a_step_that_is_stored_after_memory_was_read_is_not_one_of_another_host() {
        let place = tempfile::tempdir().unwrap();
        let url = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
        let options = EngineOptions { next_tiers: vec![url("far")], ..EngineOptions::new(url("near")) };
        let spec = options.spec().unwrap();
        let run = EngineFolder::open(Some(&place.path().join("engine"))).unwrap().run(&spec.key);
        run.create().unwrap();
        let tiers = spec.stores().unwrap();
        let state = [TensorView::new("w", Dtype::U8, &[3], &[1, 2, 3]).unwrap()];
        let copy = async |from: &Store, to: &Store| _ = maintain::copy(from, to, &CopyOptions::default()).await.unwrap();
        for stored in 1..=2 {
            let mut memory = MemoryTier::open(&run, &tiers, WriterOptions::default(), 1).await.unwrap();
            let read = EncodedMemory::read(&run, LIMIT).await.unwrap();
            memory.save(stored, &state, &[], &Metadata::default()).await.unwrap();
            copy(memory.store(), &tiers[0]).await;
            copy(&tiers[0], &tiers[1]).await;
            let local = LocalMemory { known_tiers: KnownTiers::read(&run).unwrap(), has_states: true };
            let report = compare(&spec, &run, &local, read, LIMIT).await.unwrap();
            assert_eq!(report.freshness, Freshness::Current, "step {stored}");
        }
        // Another host has saved a step.
        let mut writer = tiers[0].writer(Policy::Full).await.unwrap();
        writer.save(3, &state, &[], &Metadata::default()).await.unwrap();
        let local = LocalMemory { known_tiers: KnownTiers::read(&run).unwrap(), has_states: true };
        let read = EncodedMemory::read(&run, LIMIT).await.unwrap();
        assert!(matches!(compare(&spec, &run, &local, read, LIMIT).await.unwrap().freshness, Freshness::Stale(_)));
    }
}
