//! Notes of the save that is being encoded, for later agents.
//!
//! An agent that dies while it encodes leaves its notes. If several agents in a row die at the same save, encoding it is what kills
//! them: the system may lack memory. The save then fails, and later saves go on.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::os::files::{remove_file, replace_file};
use crate::os::folders::{ENCODING_ATTEMPT, RunFolder};

/// Notes of the save that is being encoded.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Notes {
    step: u64,
    /// Generation of each rank of this host, in rank order.
    generations: Vec<u64>,
    /// Number of attempts that began and have not ended.
    attempts: u32,
}

/// An attempt to encode a save. Dropping it does not end it: a task that panics has not ended, either.
#[derive(Debug)]
pub(super) struct EncodingAttempt {
    path: PathBuf,
}

impl EncodingAttempt {
    /// Begins an attempt. Fails with the reason if too many earlier attempts have not ended.
    pub(super) fn begin(run: &RunFolder, step: u64, generations: &[u64]) -> Result<Self, String> {
        let path = path_of(run);
        let found: Option<Notes> = std::fs::read(&path).ok().and_then(|json| serde_json::from_slice(&json).ok());
        let earlier = found.filter(|found| found.step == step && found.generations == generations).map_or(0, |found| found.attempts);
        if earlier >= MOST_ATTEMPTS {
            forget_attempts(run);
            return Err(format!(
                "{earlier} agents have died while they encoded step {step}; the system may lack memory (see the kernel's log), or this is a \
                 fault of the agent (see agent.log). The state stays in its slot until the next save needs that"
            ));
        }
        let notes = Notes { step, generations: generations.to_vec(), attempts: earlier.saturating_add(1) };
        let noted = serde_json::to_vec(&notes).map_err(std::io::Error::other).map(|json| replace_file(&path, &json));
        if let Ok(Err(error)) = noted {
            // A full file system must not stop the work.
            tracing::debug!(%error, "a later agent will not know of this attempt");
        }
        Ok(Self { path })
    }

    /// Ends the attempt, whatever its result.
    pub(super) fn end(self) {
        if let Err(error) = remove_file(&self.path) {
            tracing::debug!(%error, "a later agent will take this attempt for one that has not ended");
        }
    }
}

/// Forgets an attempt that an agent gives up because it was told to end.
pub(super) fn forget_attempts(run: &RunFolder) {
    let _ = remove_file(&path_of(run));
}

fn path_of(run: &RunFolder) -> PathBuf {
    run.root().join(ENCODING_ATTEMPT)
}

/// Number of agents that may die at one save.
const MOST_ATTEMPTS: u32 = 5;

#[cfg(test)]
mod tests {
    use super::{EncodingAttempt, MOST_ATTEMPTS, forget_attempts};
    use crate::os::folders::EngineFolder;

    #[test]
    fn a_save_at_which_agents_die_is_given_up_and_others_are_not() {
        let place = tempfile::tempdir().unwrap();
        let run = EngineFolder::open(Some(&place.path().join("e"))).unwrap().run("0");
        run.create().unwrap();
        for _ in 0..MOST_ATTEMPTS {
            // Each of these agents dies: no attempt ends.
            EncodingAttempt::begin(&run, 7, &[3]).unwrap();
        }
        assert!(EncodingAttempt::begin(&run, 7, &[3]).unwrap_err().contains("step 7"));
        EncodingAttempt::begin(&run, 8, &[4]).unwrap().end();
        for _ in 0..2 * MOST_ATTEMPTS {
            EncodingAttempt::begin(&run, 9, &[5]).unwrap();
            forget_attempts(&run);
        }
    }
}
