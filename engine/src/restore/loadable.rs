//! The steps that a rank can restore, newest first, each with its nearest place.
//!
//! The places are asked from the nearest to the farthest. The memory of the hosts may hold only older steps: it can keep a base
//! and lose part of a newer step that the first tier holds completely. So the log decides the order of their steps.

use tensorcask::wire::Id;
use tensorcask::{Result, SnapshotRecord};

use super::hosts_memory::{HostsMemory, open_hosts_memory};
use super::restored::{Loadable, Source};
use super::search::{RestorePlaces, complete_slots};
use crate::memory::stores::open_epoch;
use crate::run::tier_query::{TierContents, is_restorable, query_tier, restorable_snapshots, restore_order};

/// Lists the steps that a rank can restore. Reads no tensor.
pub(crate) async fn loadable(places: &RestorePlaces<'_>) -> Result<Vec<Loadable>> {
    let mut found = Steps::default();
    if !places.is_stale {
        for (_, header) in complete_slots(places)?.into_iter().filter(|(_, header)| header.world == places.spec.world) {
            found.add(header.step, Source::Slot, None);
        }
        for epoch in places.run.epochs()?.into_iter().rev() {
            let records = match restorable_snapshots(&open_epoch(places.run, epoch)?).await {
                Err(error) if error.is_damage() => Vec::new(),
                // It may pass. Without these steps, the ranks would agree on an older one.
                records => records?,
            };
            for record in records {
                found.add(record.step, Source::Memory, Some(record.id));
            }
        }
    }
    let mut hosts = open_hosts_memory(places.spec, places.run, places.store_timeout).await;
    for step in hosts.iter().flat_map(|hosts| &hosts.uncommitted) {
        found.add(*step, Source::Hosts, None);
    }
    // In the order of a restore: if the job left a tier behind, that tier may have steps that the job no longer has.
    let stores = places.spec.stores()?;
    let mut silent = None;
    for tier in restore_order(&stores, places.store_timeout).await.into_iter().filter(|_| !places.is_without_store) {
        let Some(store) = stores.get(tier) else { continue };
        let records = match query_tier(store, places.store_timeout).await {
            Ok(TierContents { latest: Some(_), mut records, .. }) => {
                records.retain(is_restorable);
                records
            }
            Ok(_) => continue,
            Err(error) => {
                tracing::warn!(run = places.spec.run, tier = store.url(), %error, "this tier does not answer; its steps are not listed");
                silent = Some(error);
                continue;
            }
        };
        let source = Source::Tier(tier, store.url().to_owned());
        match hosts.take_if(|_| tier == 0) {
            Some(hosts) => found.add_log(&records, &source, &hosts),
            None => records.iter().rev().for_each(|record| found.add(record.step, source.clone(), Some(record.id))),
        }
    }
    for step in hosts.iter().flat_map(|hosts| &hosts.committed) {
        found.add(*step, Source::Hosts, None);
    }
    match silent {
        // An empty list would mean that nothing was ever saved, and the job would train from the start.
        Some(error) if found.0.is_empty() => Err(error),
        _ => Ok(found.0),
    }
}

/// Steps, newest first.
#[derive(Debug, Default)]
struct Steps(Vec<Loadable>);

impl Steps {
    fn has(&self, step: u64) -> bool {
        self.0.iter().any(|known| known.step == step)
    }

    /// Adds a step that is older than those before, unless it is known.
    fn add(&mut self, step: u64, source: Source, snapshot: Option<Id>) {
        if !self.has(step) {
            self.0.push(Loadable { step, source, snapshot });
        }
    }

    /// Adds the steps of the first tier, `records` in the order of its log, and those of the hosts that were committed there.
    /// Steps that were committed after the session began are placed among the uncommitted steps of the hosts.
    fn add_log(&mut self, records: &[SnapshotRecord], source: &Source, hosts: &HostsMemory) {
        let (before, since): (Vec<_>, Vec<_>) = records.iter().partition(|record| record.sequence <= hosts.after);
        for record in since.into_iter().rev() {
            if !self.has(record.step) {
                let is_older = |known: &Loadable| known.source == Source::Hosts && known.step < record.step;
                let place = self.0.iter().position(is_older).unwrap_or(self.0.len());
                self.0.insert(place, Loadable { step: record.step, source: source.clone(), snapshot: Some(record.id) });
            }
        }
        for record in before.iter().rev() {
            let is_near = hosts.committed.contains(&record.step);
            self.add(record.step, if is_near { Source::Hosts } else { source.clone() }, Some(record.id));
        }
    }
}
