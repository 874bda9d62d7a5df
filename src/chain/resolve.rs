//! Resolves the snapshots that rebuild a step. Uses a loop and never recursion. Validates the whole chain before any
//! byte is decoded.

use crate::commit::{LogState, SnapshotRecord, SnapshotStatus};
use crate::wire::{Id, Manifest};
use crate::{Error, Limits, Result};

/// Returns the chain of a snapshot, newest first.
pub(crate) fn chain_of(state: &LogState, id: Id, max_depth: u64) -> Result<Vec<SnapshotRecord>> {
    let mut chain: Vec<SnapshotRecord> = Vec::new();
    let mut next = Some(id);
    while let Some(id) = next {
        let record = state
            .by_id(id)
            .ok_or_else(|| Error::corrupt(format!("snapshot {id}, which the chain needs, is not in the log")).clause("chain 2.1"))?;
        if record.status == SnapshotStatus::Collected {
            let message = format!("snapshot {id}, which the chain needs, was removed by garbage collection");
            return Err(Error::corrupt(message).object(record.manifest_path()).clause("chain 2.8"));
        }
        if chain.last().is_some_and(|child| child.sequence <= record.sequence) {
            return Err(Error::corrupt(format!("snapshot {id} was not committed before the delta that needs it"))
                .object(record.manifest_path())
                .clause("chain 2.2"));
        }
        chain.push(record.clone());
        Limits::check(chain.len() as u64, max_depth, "depth of the chain")?;
        next = record.parent;
    }
    Ok(chain)
}

/// Checks a manifest against the log and, for a delta, against its parent's manifest.
pub(crate) fn check_link(record: &SnapshotRecord, manifest: &Manifest, parent: Option<&Manifest>) -> Result<()> {
    let bad = |message: String, clause| Err(Error::corrupt(message).object(record.manifest_path()).clause(clause));
    let named = manifest.parent.as_ref().map(|parent| parent.snapshot);
    if manifest.id != record.id || manifest.step != record.step || named != record.parent {
        return bad("id, step or parent differ from those in the log".into(), "chain 2.3");
    }
    if let Some(roles) = &record.roles
        && let Some(role) = manifest.content.keys().find(|role| !roles.contains(role))
    {
        return bad(format!("has role `{}`, which the log says was dropped", role.escape_debug()), "chain 2.3");
    }
    let (Some(reference), Some(parent)) = (&manifest.parent, parent) else { return Ok(()) };
    for (role, digest) in &parent.content {
        if reference.content.get(role) != Some(digest) {
            return bad(format!("was made against other bytes of role `{}` than its parent holds", role.escape_debug()), "chain 2.4");
        }
    }
    Ok(())
}
