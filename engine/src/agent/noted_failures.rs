//! Notes for later agents about saves that failed for good. Without them, the next agent would take such a save for durable as
//! soon as a newer one is, or would blame a newer save.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};
use tensorcask::wire::Id;
use tensorcask::{Error, Result};

use super::run_state::RunState;
use crate::files::replace_file;
use crate::folders::{NOTED_FAILURES, RunFolder};
use crate::protocol::Failure;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Notes {
    /// By rank.
    failures: BTreeMap<u32, VecDeque<Failure>>,
    /// Snapshots in memory that cannot be stored.
    lost: BTreeSet<Id>,
}

/// Replaces the notes by the failures that this agent knows.
pub(super) fn note_failures(run: &RunFolder, state: &RunState) -> Result<()> {
    let failures = state.ranks.iter().map(|(rank, state)| (*rank, state.failures.clone())).collect();
    let json = serde_json::to_vec(&Notes { failures, lost: state.lost.clone() });
    let json = json.map_err(|e| Error::invalid(format!("cannot encode the failures of a run: {e}")))?;
    replace_file(&run.root().join(NOTED_FAILURES), &json)
}

/// Takes over the failures that earlier agents have noted. Notes that cannot be read are a warning: the run goes on without them.
pub(super) fn take_noted_failures(run: &RunFolder, state: &mut RunState) {
    let path = run.root().join(NOTED_FAILURES);
    let Ok(json) = std::fs::read(&path) else { return };
    match serde_json::from_slice::<Notes>(&json) {
        Ok(Notes { failures, lost }) => {
            failures.into_iter().for_each(|(rank, failures)| state.ranks.entry(rank).or_default().failures = failures);
            state.lost = lost;
        }
        Err(error) => tracing::warn!(path = %path.display(), %error, "the notes about failed saves cannot be read"),
    }
}
