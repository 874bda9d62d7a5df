//! Refills the mirror of a host that was replaced: the casks of its ranks from before are on other hosts only, and the loss of
//! one of those would lose them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::log::SessionLog;
use super::mirror::{needed_links, parents_in};
use crate::commit::{SnapshotRecord, read_manifest};
use crate::maintain::{CopyFailure, copy_checked_cask, present};
use crate::reader::CaskSource;
use crate::wire::{CaskRef, Id, rank_of_slot};
use crate::{ErrorKind, Result, Store, boxed};

/// A cask to copy, and whether it belongs to a base.
#[derive(Debug, Clone)]
pub struct WantedCask {
    pub(super) cask: CaskRef,
    pub(super) of_base: bool,
}

/// Finds and copies the casks that a mirror should have, and lacks.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// use tensorcask::session::{Mirror, Refill, SessionLog};
/// use tensorcask::{Dtype, Metadata, Policy, Store, TensorView};
/// let (store, memory) = (Store::open("memory://refill-example")?, Store::open("memory://refill-example-memory")?);
/// let weights: Vec<u8> = (0..100_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
/// store.writer(Policy::Full).await?.save(1, &[TensorView::new("w", Dtype::U8, &[100_000], &weights)?], &[], &Metadata::default()).await?;
/// Mirror::new(&store, &memory).follow(&SessionLog::open(&store).await?).await?;
/// let mut refill = Refill::new(&memory, 0..1);
/// let missing = refill.missing().await?;
/// assert!(refill.copy(&missing[0], &store).await?);
/// assert!(refill.missing().await?.is_empty());
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Refill {
    memory: Store,
    ranks: Range<u32>,
    log: Option<SessionLog>,
    /// Casks of these ranks, by link.
    links: BTreeMap<Id, Vec<WantedCask>>,
    /// Casks that the mirror was seen to have.
    present: BTreeSet<Id>,
}

impl Refill {
    /// For the mirror in `memory` of a host with these ranks. Sends no request.
    pub fn new(memory: &Store, ranks: Range<u32>) -> Self {
        Self { memory: memory.clone(), ranks, log: None, links: BTreeMap::new(), present: BTreeSet::new() }
    }

    /// Whether the mirror had a log when it was last looked at. An empty log is none.
    pub fn has_log(&self) -> bool {
        self.log.as_ref().is_some_and(|log| log.sequence() > 0)
    }

    /// Casks of these ranks that the mirror lacks, of the newest snapshot, of the parents of steps in the mirror, and of the chains
    /// of both. None before the mirror has a log.
    #[boxed]
    pub async fn missing(&mut self) -> Result<Vec<WantedCask>> {
        let log = match SessionLog::follow(&mut self.log, &self.memory).await {
            Ok(log) => log,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut links = BTreeMap::new();
        for record in needed_links(log.state(), &parents_in(&self.memory, None).await?, self.memory.limits().max_chain_depth)? {
            let casks = match self.links.get(&record.id) {
                Some(known) => Some(known.clone()),
                None => casks_of(&self.memory, &record, &self.ranks).await?,
            };
            links.extend(casks.map(|casks| (record.id, casks)));
        }
        self.links = links;
        let wanted: Vec<&WantedCask> = self.links.values().flatten().collect();
        let known: BTreeSet<Id> = wanted.iter().map(|wanted| wanted.cask.id).collect();
        self.present.retain(|id| known.contains(id));
        let mut missing = Vec::new();
        for wanted in wanted {
            if self.present.contains(&wanted.cask.id) {
                continue;
            }
            match present(&self.memory, &wanted.cask.path(), wanted.cask.bytes).await? {
                Some(_) => _ = self.present.insert(wanted.cask.id),
                None => missing.push(wanted.clone()),
            }
        }
        Ok(missing)
    }

    /// Copies a missing cask from another place, and checks every byte. Returns `false` if it is not there.
    #[boxed]
    pub async fn copy(&mut self, wanted: &WantedCask, from: &Store) -> Result<bool> {
        let WantedCask { cask, of_base } = wanted;
        if present(from, &cask.path(), cask.bytes).await?.is_none() {
            return Ok(false);
        }
        match copy_checked_cask(&CaskSource::object(from, cask), &self.memory, cask, *of_base).await {
            Ok(()) => {
                self.present.insert(cask.id);
                Ok(true)
            }
            Err(CopyFailure::Source(error) | CopyFailure::Destination(error)) => Err(error),
        }
    }
}

/// Casks of these ranks in a snapshot; `None` if the store has no manifest of it: a mirror may not have come to it yet.
pub(super) async fn casks_of(store: &Store, record: &SnapshotRecord, ranks: &Range<u32>) -> Result<Option<Vec<WantedCask>>> {
    let place = record.manifest_place();
    if place.inline_in.is_some() {
        return Ok(Some(Vec::new()));
    }
    if store.objects().head_if_present(&place.path).await?.is_none() {
        return Ok(None);
    }
    let manifest = read_manifest(store, &place).await?;
    let own = manifest.casks.into_iter().filter(|cask| ranks.contains(&rank_of_slot(cask.slot)));
    Ok(Some(own.map(|cask| WantedCask { cask, of_base: record.parent.is_none() }).collect()))
}
