//! Notes about the encoded steps of this host that are neither committed nor given up yet, and about the newest durable one,
//! in `undecided.json`: they outlive the agent.
//!
//! Slots are used again while a step waits for its commit. Without the notes, a later agent would take a save that was given
//! up for durable as soon as a newer one is.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tensorcask::wire::{Id, SessionStep};
use tensorcask::{Error, Result};

use super::run_event::RankGeneration;
use crate::os::files::replace_file;
use crate::os::folders::{RunFolder, UNDECIDED_SAVES};

/// Encoded steps of which the fate is not known, and their saves.
#[derive(Debug)]
pub(super) struct UndecidedSaves {
    path: PathBuf,
    session: Id,
    /// Undecided steps, and the newest durable one: a trainer may wait for its save after the agent has ended.
    steps: BTreeMap<SessionStep, Vec<RankGeneration>>,
    /// Newest step that is known to be durable.
    durable: Option<SessionStep>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Notes {
    session: Id,
    steps: Vec<NotedStep>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NotedStep {
    attempt: u64,
    step: u64,
    /// Generation of the save, by rank.
    saves: BTreeMap<u32, u64>,
}

impl UndecidedSaves {
    /// The notes of earlier agents about this session. Notes that cannot be read are a warning: the run goes on without them.
    pub(super) fn read(run: &RunFolder, session: Id) -> Self {
        let path = run.root().join(UNDECIDED_SAVES);
        let mut steps = BTreeMap::new();
        match std::fs::read(&path).and_then(|json| Ok(serde_json::from_slice::<Notes>(&json)?)) {
            Ok(notes) if notes.session == session => steps.extend(notes.steps.into_iter().map(NotedStep::into_entry)),
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(path = %path.display(), %error, "the notes about undecided saves cannot be read"),
        }
        Self { path, session, steps, durable: None }
    }

    /// Notes that a step was encoded.
    pub(super) fn insert(&mut self, key: SessionStep, saves: Vec<RankGeneration>) {
        self.steps.insert(key, saves);
        self.write();
    }

    /// Notes that a step is durable. Call it once that is reported.
    pub(super) fn note_durable(&mut self, key: SessionStep) {
        let older = self.durable.map_or(key, |known| known.min(key));
        self.durable = self.durable.max(Some(key));
        if Some(older) != self.durable {
            self.remove(older);
        }
    }

    /// Forgets a step that was given up. Call it once that is reported.
    pub(super) fn remove(&mut self, key: SessionStep) {
        if self.steps.remove(&key).is_some() {
            self.write();
        }
    }

    /// Steps that are not known to be decided.
    pub(super) fn undecided(&self) -> impl Iterator<Item = SessionStep> + '_ {
        self.steps.keys().copied().filter(|key| Some(*key) != self.durable)
    }

    /// The undecided steps and the newest durable one, with their saves.
    pub(super) fn steps(&self) -> &BTreeMap<SessionStep, Vec<RankGeneration>> {
        &self.steps
    }

    /// A full file system must not stop the saves.
    fn write(&self) {
        if let Err(error) = self.try_write() {
            tracing::warn!(path = %self.path.display(), %error, "a later agent will not know which saves wait for their commit");
        }
    }

    fn try_write(&self) -> Result<()> {
        let steps = self.steps.iter().map(|(key, saves)| NotedStep::new(*key, saves)).collect();
        let json = serde_json::to_vec(&Notes { session: self.session, steps });
        replace_file(&self.path, &json.map_err(|e| Error::invalid(format!("cannot encode the undecided saves: {e}")))?)
    }
}

impl NotedStep {
    fn new(SessionStep { attempt, step }: SessionStep, saves: &[RankGeneration]) -> Self {
        Self { attempt, step, saves: saves.iter().map(|save| (save.rank, save.generation)).collect() }
    }

    fn into_entry(self) -> (SessionStep, Vec<RankGeneration>) {
        let saves = self.saves.into_iter().map(|(rank, generation)| RankGeneration { rank, generation });
        (SessionStep { attempt: self.attempt, step: self.step }, saves.collect())
    }
}
