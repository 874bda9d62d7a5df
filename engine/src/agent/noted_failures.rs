//! Notes for later agents about saves that failed for good. Without them, the next agent would take such a save for durable as
//! soon as a newer one is.

use std::collections::{BTreeMap, VecDeque};

use tensorcask::{Error, Result};

use super::run_state::RunState;
use crate::files::replace_file;
use crate::folders::{NOTED_FAILURES, RunFolder};
use crate::protocol::Failure;

/// Replaces the notes by the failures that this agent knows.
pub(super) fn note_failures(run: &RunFolder, state: &RunState) -> Result<()> {
    let failures: BTreeMap<u32, &VecDeque<Failure>> = state.ranks.iter().map(|(rank, state)| (*rank, &state.failures)).collect();
    let json = serde_json::to_vec(&failures).map_err(|e| Error::invalid(format!("cannot encode the failures of a run: {e}")))?;
    replace_file(&run.root().join(NOTED_FAILURES), &json)
}

/// Takes over the failures that earlier agents have noted. Notes that cannot be read are a warning: the run goes on without them.
pub(super) fn take_noted_failures(run: &RunFolder, state: &mut RunState) {
    let path = run.root().join(NOTED_FAILURES);
    let Ok(json) = std::fs::read(&path) else { return };
    match serde_json::from_slice::<BTreeMap<u32, VecDeque<Failure>>>(&json) {
        Ok(noted) => noted.into_iter().for_each(|(rank, failures)| state.ranks.entry(rank).or_default().failures = failures),
        Err(error) => tracing::warn!(path = %path.display(), %error, "the notes about failed saves cannot be read"),
    }
}
