//! Copies of a store's snapshots: in this host's memory, and in further tiers.

use std::collections::BTreeSet;
use std::path::Path;

use tensorcask::wire::Id;
use tensorcask::{ErrorKind, Result, SnapshotStatus, Store, StoreOptions, absolute_url};

use super::stores::open_epoch;
use crate::os::folders::EngineFolder;
use crate::run::spec::RunSpec;

/// A place that holds copies of snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotPlace {
    /// `memory`, or the URL of a tier.
    pub name: String,
    /// Live snapshots in this place; `None` if it does not answer.
    pub snapshots: Option<BTreeSet<Id>>,
}

/// Lists further places of a store's snapshots. The store is the first tier of runs on this host; their memory and
/// further tiers are listed, and then the given `tiers`.
pub async fn snapshot_places(folder: Option<&Path>, store: &str, tiers: &[String]) -> Result<Vec<SnapshotPlace>> {
    let mut places = Vec::new();
    let mut stores: Vec<Store> = tiers.iter().map(|url| StoreOptions::default().open(url)).collect::<Result<_>>()?;
    let first = absolute_url(store)?;
    let runs = EngineFolder::find(folder).map_or_else(|| Ok(Vec::new()), |folder| folder.runs())?;
    for run in runs {
        let Some(spec) = RunSpec::read(&run).filter(|spec| spec.tiers.first() == Some(&first)) else { continue };
        let mut snapshots = BTreeSet::new();
        for epoch in run.epochs()? {
            snapshots.extend(live(&open_epoch(&run, epoch)?).await.unwrap_or_default());
        }
        places.push(SnapshotPlace { name: "memory".to_owned(), snapshots: Some(snapshots) });
        stores.extend(spec.stores()?.into_iter().skip(1));
    }
    let mut known = BTreeSet::new();
    for store in stores.into_iter().filter(|store| known.insert(store.url().to_owned())) {
        let snapshots = match live(&store).await {
            Ok(found) => Some(found),
            Err(e) if e.kind() == ErrorKind::NotFound => Some(BTreeSet::new()),
            Err(error) => {
                tracing::warn!(tier = store.url(), %error, "cannot read the log of this tier");
                None
            }
        };
        places.push(SnapshotPlace { name: store.url().to_owned(), snapshots });
    }
    Ok(places)
}

async fn live(store: &Store) -> Result<BTreeSet<Id>> {
    let records = store.history().records().await?;
    Ok(records.into_iter().filter(|record| record.status == SnapshotStatus::Live).map(|record| record.id).collect())
}
