//! Notes for later agents about the saves of a run, in `saves.json`: those that failed for good, and those that the first tier may
//! lack. Without them, the next agent would take a save that failed, or that is lost with encoded memory, for durable as soon
//! as a newer one is.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};
use tensorcask::wire::Id;
use tensorcask::{Error, Result};

use super::run_event::Action;
use super::run_parts::CommittedSnapshot;
use super::run_state::{RunState, fail_missing, is_of_many_hosts, take_encoded};
use crate::ipc::messages::Failure;
use crate::memory::stores::store_file;
use crate::os::files::{may_exist, replace_file};
use crate::os::folders::{NOTED_SAVES, RunFolder};

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Notes {
    /// By rank.
    failures: BTreeMap<u32, VecDeque<Failure>>,
    /// Snapshots in memory that cannot be stored.
    lost: BTreeSet<Id>,
    /// Newest generation that is encoded, by rank. Its arena may be gone.
    encoded: BTreeMap<u32, u64>,
    /// Snapshots in memory that the first tier may lack, in commit order.
    unstored: VecDeque<CommittedSnapshot>,
}

/// Replaces the notes by what this agent knows. An agent of many hosts does not note encoded saves, which `undecided.json` has.
pub(super) fn note_saves(run: &RunFolder, state: &RunState) -> Result<()> {
    let failures = state.ranks.iter().map(|(rank, state)| (*rank, state.failures.clone())).collect();
    let notes = Notes { failures, lost: state.lost.clone(), ..Notes::default() };
    let notes = match is_of_many_hosts(state) {
        true => notes,
        false => Notes {
            encoded: state.ranks.iter().map(|(rank, state)| (*rank, state.encoded)).collect(),
            unstored: state.memory.committed.clone(),
            ..notes
        },
    };
    let json = serde_json::to_vec(&notes).map_err(|e| Error::invalid(format!("cannot encode the notes about the saves of a run: {e}")))?;
    replace_file(&run.root().join(NOTED_SAVES), &json)
}

/// Takes over what earlier agents have noted. Fails the saves whose snapshots memory no longer has, and returns the actions
/// that follow. Notes that cannot be read are a warning: the run goes on without them.
pub(super) fn take_noted_saves(run: &RunFolder, state: &mut RunState) -> Vec<Action> {
    let path = run.root().join(NOTED_SAVES);
    match std::fs::read(&path).and_then(|json| Ok(serde_json::from_slice::<Notes>(&json)?)) {
        Ok(Notes { failures, lost, encoded, unstored }) => {
            failures.into_iter().for_each(|(rank, failures)| state.ranks.entry(rank).or_default().failures = failures);
            state.lost = lost;
            if is_of_many_hosts(state) {
                return Vec::new();
            }
            let (kept, removed) = unstored.into_iter().partition(|known| may_exist(&store_file(run, known.epoch)));
            take_encoded(state, encoded, kept);
            fail_missing(state, removed)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "the notes about the saves of a run cannot be read");
            Vec::new()
        }
    }
}
