//! Message of a holder to the host that it copies: the steps whose copies are complete and checked, with all their parents.

use serde::{Deserialize, Serialize};
use tensorcask::wire::{Id, SessionStep};
use tensorcask::{Error, Result};

use crate::os::folders::{RunFolder, publish};

/// The message of a holder to one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CopyReport {
    pub session: Id,
    pub steps: Vec<SessionStep>,
}

impl CopyReport {
    pub(super) fn new(session: Id, whole: &[SessionStep]) -> Self {
        Self { session, steps: whole.to_vec() }
    }

    /// Name of the message to a host.
    pub(super) fn name_for(host: u32) -> String {
        format!("copies/{host}.json")
    }

    pub(super) fn publish(&self, run: &RunFolder, host: u32) -> Result<()> {
        let json = serde_json::to_vec(self).map_err(|e| Error::invalid(format!("copies: {e}")))?;
        publish(run, &Self::name_for(host), &json)
    }

    pub(super) fn decode(json: &[u8]) -> Result<Self> {
        serde_json::from_slice(json).map_err(|e| Error::corrupt(format!("not a list of copied steps: {e}")))
    }

    /// The steps of a session.
    pub(super) fn of(self, session: Id) -> impl Iterator<Item = SessionStep> {
        self.steps.into_iter().filter(move |_| self.session == session)
    }
}
