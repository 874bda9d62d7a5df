//! Copies of objects in the memory of hosts that this host has found damaged. They count as absent, in this start of the job and
//! in later ones: otherwise all ranks would agree again on a step that one of them cannot read.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tensorcask::{Error, Result};

use crate::os::files::{read_file, replace_file};
use crate::os::folders::{DAMAGED_COPIES, RunFolder};
use crate::os::lock::lock_beside;

/// A copy of an object. If the object is copied there again, that is another copy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CopyId {
    pub host: u32,
    pub folder: String,
    pub path: String,
    pub modified_ms: u64,
}

/// Path of the list.
fn path(run: &RunFolder) -> PathBuf {
    run.root().join(DAMAGED_COPIES)
}

/// The damaged copies that this host knows. A list that cannot be read is a warning: a copy is found to be damaged again.
pub(crate) fn damaged_copies(run: &RunFolder) -> BTreeSet<CopyId> {
    read(run).unwrap_or_else(|error| {
        tracing::warn!(%error, "the list of damaged copies cannot be read");
        BTreeSet::new()
    })
}

fn read(run: &RunFolder) -> Result<BTreeSet<CopyId>> {
    Ok(read_file(&path(run))?.and_then(|json| serde_json::from_slice(&json).ok()).unwrap_or_default())
}

/// Notes a damaged copy. Another rank of this host may have noted it before.
pub(crate) fn note_damaged_copy(run: &RunFolder, copy: CopyId) -> Result<()> {
    let _held = lock_beside(&path(run))?;
    let mut known = read(run)?;
    if known.contains(&copy) {
        return Ok(());
    }
    while known.len() >= MOST_COPIES {
        known.pop_first();
    }
    known.insert(copy);
    let json = serde_json::to_vec(&known).map_err(|e| Error::invalid(format!("cannot encode the damaged copies: {e}")))?;
    replace_file(&path(run), &json)
}

/// Number of copies to remember.
const MOST_COPIES: usize = 1024;
