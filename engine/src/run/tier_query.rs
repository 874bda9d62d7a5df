//! Questions to a tier: which snapshots it has, and when they were saved.

use std::time::Duration;

use tensorcask::wire::Id;
use tensorcask::{Error, ErrorKind, Result, SnapshotRecord, SnapshotStatus, Store};

/// Contents of a tier.
pub(crate) struct TierContents {
    /// Run id; `None` if there is no store.
    pub run: Option<Id>,
    /// All records of the log.
    pub records: Vec<SnapshotRecord>,
    /// Newest snapshot that can be restored.
    pub latest: Option<SnapshotRecord>,
}

impl TierContents {
    /// Whether the log has a record of this snapshot.
    pub(crate) fn has(&self, id: Id) -> bool {
        self.records.iter().any(|record| record.id == id)
    }
}

/// Reads the log of a tier. A missing store is no error.
pub(crate) async fn query_tier(store: &Store, timeout: Duration) -> Result<TierContents> {
    let answer = tokio::time::timeout(timeout, async { (store.history().run().await, store.history().records().await) }).await;
    let found = match answer {
        Ok((Ok(run), Ok(records))) => {
            let latest = records.iter().rev().find(|record| is_restorable(record)).cloned();
            Ok(TierContents { run: Some(run), records, latest })
        }
        Ok((Err(e), _)) if e.kind() == ErrorKind::NotFound => Ok(TierContents { run: None, records: Vec::new(), latest: None }),
        Ok((Err(error), _) | (_, Err(error))) => Err(error),
        Err(_) => Err(Error::new(ErrorKind::Storage, format!("no answer within {timeout:?}")).object(store.url())),
    };
    if let Err(error) = &found {
        tracing::warn!(store = store.url(), %error, "cannot read the log of the store");
    }
    found
}

/// The nearest tier that exists, and its run id.
pub(crate) async fn nearest_existing(tiers: &[Store]) -> Result<Option<(&Store, Id)>> {
    for tier in tiers {
        match tier.history().run().await {
            Ok(run) => return Ok(Some((tier, run))),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(None)
}

/// Whether a snapshot is live and has all its roles.
pub(crate) fn is_restorable(record: &SnapshotRecord) -> bool {
    record.status == SnapshotStatus::Live && record.roles.is_none()
}

/// Snapshots that can be restored, newest first.
pub(crate) async fn restorable_snapshots(store: &Store) -> Result<Vec<SnapshotRecord>> {
    let mut records = store.history().records().await?;
    records.retain(is_restorable);
    records.reverse();
    Ok(records)
}

/// Time at which a snapshot was saved, equal in all its copies. If its manifest cannot be read: the time of the commit
/// in this tier.
pub(crate) async fn saved_at(store: &Store, record: &SnapshotRecord, timeout: Duration) -> u64 {
    let opened = tokio::time::timeout(timeout, store.snapshot(record.step)).await;
    match opened {
        Ok(Ok(snapshot)) if snapshot.record().id == record.id => snapshot.manifest().time_ms,
        _ => record.time_ms,
    }
}

/// Numbers of the tiers in the order of a restore: nearest first, except that the tier with the latest save comes
/// first. A farther tier has a later save if the job ran on another host in between.
pub(crate) async fn restore_order(stores: &[Store], timeout: Duration) -> Vec<usize> {
    let mut order: Vec<usize> = (0..stores.len()).collect();
    if stores.len() < 2 {
        return order;
    }
    let mut best: Option<Candidate> = None;
    for (tier, store) in stores.iter().enumerate() {
        let Ok(contents) = query_tier(store, timeout).await else { continue };
        let Some(latest) = contents.latest.clone() else { continue };
        if best.as_ref().is_some_and(|best| best.contents.has(latest.id)) {
            continue;
        }
        let time_ms = saved_at(store, &latest, timeout).await;
        if best.as_ref().is_none_or(|best| time_ms > best.time_ms) {
            best = Some(Candidate { tier, contents, time_ms });
        }
    }
    if let Some(Candidate { tier: best, .. }) = best.filter(|best| best.tier > 0) {
        tracing::warn!(tier = stores.get(best).map(Store::url), "this tier has newer snapshots than the nearer tiers");
        order.retain(|tier| *tier != best);
        order.insert(0, best);
    }
    order
}

/// A tier, and the time of its newest save.
struct Candidate {
    tier: usize,
    contents: TierContents,
    time_ms: u64,
}

/// Newest step of all tiers that answer.
pub(crate) async fn newest_step(stores: &[Store], timeout: Duration) -> Option<u64> {
    let first = *restore_order(stores, timeout).await.first()?;
    query_tier(stores.get(first)?, timeout).await.ok()?.latest.map(|latest| latest.step)
}
