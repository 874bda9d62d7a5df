//! Where else the snapshots of a store are: in this host's memory, and in further tiers.

use std::collections::BTreeSet;
use std::path::Path;

use tensorcask::wire::Id;
use tensorcask::{ErrorKind, Result, Status, Store, StoreOptions};

use crate::options::{RunSpec, absolute};
use crate::place::Place;
use crate::tier::open_epoch;

/// A place that holds snapshots of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotPlace {
    /// `memory`, or the URL of a tier.
    pub name: String,
    /// Live snapshots there; none if it cannot be asked.
    pub snapshots: Option<BTreeSet<Id>>,
}

/// The places beside a store, which is the first tier of a run that is known on this host: its memory, and the further tiers. `tiers`: URLs of
/// tiers that are known otherwise.
pub async fn places_beside(folder: Option<&Path>, store: &str, tiers: &[String]) -> Result<Vec<SnapshotPlace>> {
    let mut places = Vec::new();
    let mut stores: Vec<Store> = tiers.iter().map(|url| StoreOptions::default().open(url)).collect::<Result<_>>()?;
    let first = absolute(store)?;
    let runs = Place::find(folder).map_or_else(|| Ok(Vec::new()), |place| place.runs())?;
    for run in runs {
        let spec = std::fs::read(run.spec()).ok().and_then(|json| serde_json::from_slice::<RunSpec>(&json).ok());
        let Some(spec) = spec.filter(|spec| spec.tiers.first() == Some(&first)) else { continue };
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
                tracing::warn!(tier = store.url(), %error, "this tier cannot be asked what it has");
                None
            }
        };
        places.push(SnapshotPlace { name: store.url().to_owned(), snapshots });
    }
    Ok(places)
}

async fn live(store: &Store) -> Result<BTreeSet<Id>> {
    let records = store.records().await?;
    Ok(records.into_iter().filter(|record| record.status == Status::Live).map(|record| record.id).collect())
}
