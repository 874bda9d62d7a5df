//! Snapshots that a place holds completely, although it has only a part of a store's objects.

use std::collections::BTreeMap;

use crate::chain::chain_of;
use crate::commit::{Log, LogState, SnapshotRecord, SnapshotStatus, read_manifest};
use crate::wire::Id;
use crate::{Result, Store, boxed};

/// Steps of which `memory` has every object of the snapshot and its chain, newest first, at most `most`. Compares sizes and
/// reads no tensor: a restore checks every byte. The log of `memory` must be complete.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// use tensorcask::session::held_steps;
/// use tensorcask::{Dtype, Metadata, Policy, Store, TensorView};
/// let store = Store::open("memory://held-example")?;
/// let weights = [1u8; 4096];
/// let state = [TensorView::new("w", Dtype::U8, &[4096], &weights)?];
/// store.writer(Policy::Full).await?.save(7, &state, &[], &Metadata::default()).await?;
/// assert_eq!(held_steps(&store, 10).await?, [7]);
/// # Ok(()) }
/// ```
#[boxed]
pub async fn held_steps(memory: &Store, most: usize) -> Result<Vec<u64>> {
    let log = Log::load_part(memory).await?;
    let is_restorable = |record: &&SnapshotRecord| record.status == SnapshotStatus::Live && record.roles.is_none();
    let mut found = Vec::new();
    let mut held = BTreeMap::new();
    for record in log.state().snapshots().iter().rev().filter(is_restorable) {
        if found.len() >= most {
            break;
        }
        if is_held(memory, log.state(), record, &mut held).await? {
            found.push(record.step);
        }
    }
    Ok(found)
}

/// Whether memory has all objects of a chain. `held`: the answers so far, by snapshot; new ones are added.
async fn is_held(memory: &Store, log: &LogState, record: &SnapshotRecord, held: &mut BTreeMap<Id, bool>) -> Result<bool> {
    let links = match chain_of(log, record.id, memory.limits().max_chain_depth) {
        Ok(links) => links,
        Err(error) if error.is_unreadable() => return Ok(false),
        Err(error) => return Err(error),
    };
    for link in &links {
        let is_link_held = match held.get(&link.id) {
            Some(known) => *known,
            None => has_objects(memory, link).await?,
        };
        held.insert(link.id, is_link_held);
        if !is_link_held {
            return Ok(false);
        }
    }
    Ok(true)
}

async fn has_objects(memory: &Store, link: &SnapshotRecord) -> Result<bool> {
    let objects = memory.objects();
    let place = link.manifest_place();
    let manifest = match read_manifest(memory, &place).await {
        Ok(manifest) => manifest,
        Err(error) if error.is_unreadable() => return Ok(false),
        Err(error) => return Err(error),
    };
    if objects.head_if_present(&format!("directories/{}", manifest.directory)).await?.is_none() {
        return Ok(false);
    }
    // The log entry has the casks of an inline snapshot.
    for cask in manifest.casks.iter().filter(|_| place.inline_in.is_none()) {
        if objects.head_if_present(&cask.path()).await?.is_none_or(|found| found.bytes != cask.bytes) {
            return Ok(false);
        }
    }
    Ok(true)
}
