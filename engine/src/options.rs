//! How a trainer wants its states to be kept.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tensorcask::codec::Objective;
use tensorcask::wire::Digest;
use tensorcask::{BaseKeeping, Error, ExistingStep, Policy, Precision, Result, StoreOptions, WriterOptions};

use crate::arena::SLOTS;
use crate::place::Place;

/// What a save does when no slot of the arena is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackPressure {
    /// Waits until the agent has encoded one.
    #[default]
    Wait,
    /// Saves nothing, and says so.
    Skip,
    /// Gives up the oldest state that the agent has not begun to encode, and says so.
    DropOldestUncommitted,
}

impl BackPressure {
    /// From `wait`, `skip` or `drop_oldest_uncommitted`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "wait" => Ok(Self::Wait),
            "skip" => Ok(Self::Skip),
            "drop_oldest_uncommitted" => Ok(Self::DropOldestUncommitted),
            _ => Err(Error::invalid(format!("back-pressure `{}`: use wait, skip or drop_oldest_uncommitted", name.escape_debug()))),
        }
    }
}

/// What a save does when the agent is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnAgentLoss {
    /// Starts another, which goes on where the first ended.
    #[default]
    Restart,
    /// Fails. The state is in the arena all the same.
    Fail,
}

/// Where states are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Encode {
    /// By the agent, from the raw copy in the arena: the least stall.
    #[default]
    Agent,
    /// By the trainer, straight into memory in encoded form: no arena, for when memory is scarcer than time. With memory full of what the store
    /// does not have yet, a save waits or is skipped; there is nothing to drop.
    Inline,
}

/// How an [`Engine`](crate::Engine) works. `EngineOptions::new(store)` is a good start.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Where snapshots are committed first: a path or URL.
    pub store: String,
    /// Further tiers, each filled from the one before in the background.
    pub next_tiers: Vec<String>,
    /// Settings of the object stores, as [`StoreOptions::config`]. The agent takes credentials from its own environment otherwise: that
    /// of the trainer that started it.
    pub config: BTreeMap<String, String>,
    /// Whether files on local disk are synced before a commit counts.
    pub fsync: bool,
    /// Name of the run on this host; the URL of the store if nothing is said.
    pub run: Option<String>,
    /// This process's rank, from 0 on.
    pub rank: u32,
    /// All ranks. They have to be on one host: each saves its shards, and a step is committed when all have saved it.
    pub world: u32,
    /// Raw states that the arena has room for, 2 to 16.
    pub slots: u32,
    /// Snapshots that stay in memory in encoded form, 1 or more, besides those that are not in the store yet.
    pub keep: u32,
    /// Bytes of shared memory that encoded snapshots may take; half of what the folder's file system has if nothing is said. Beyond it,
    /// everything that the store has is given up, also the chain that the next delta would need, and a base follows; while the store lacks
    /// something, states wait in the arena. A snapshot that is larger than this by itself is kept alone.
    pub memory_cap: Option<u64>,
    /// When to write a base.
    pub policy: Policy,
    /// What codecs are chosen for.
    pub objective: Objective,
    /// Which tensors are rounded before they are encoded, and how far; what lies raw in the arena is exact.
    pub precision: Precision,
    /// Whether the agent keeps the base of the next delta decoded; otherwise it is decoded again from its encoded form.
    pub keep_base_decoded: bool,
    /// What a save does when no slot is free.
    pub back_pressure: BackPressure,
    /// What a save does when the agent is gone.
    pub on_agent_loss: OnAgentLoss,
    /// Where states are encoded.
    pub encode: Encode,
    /// Threads that copy; as many as the machine has cores if 0.
    pub copy_threads: usize,
    /// The agent's program and its first arguments; `$TENSORCASK_AGENT agent`, or `tensorcask agent`, if empty.
    pub agent: Vec<String>,
    /// An agent that this process starts ends when it has had nothing to do for so long. Snapshots in memory stay.
    pub agent_idle_exit: Duration,
    /// Folder in shared memory; `$TENSORCASK_ENGINE_DIR`, or `/dev/shm/tensorcask-<uid>`, if nothing is said.
    pub folder: Option<PathBuf>,
    /// How long a restore waits for the store to tell whether memory is up to date, before it trusts memory.
    pub store_timeout: Duration,
}

impl EngineOptions {
    /// Options for a store, all else as it is best for most.
    pub fn new(store: impl Into<String>) -> Self {
        Self {
            store: store.into(),
            next_tiers: Vec::new(),
            config: BTreeMap::new(),
            fsync: true,
            run: None,
            rank: 0,
            world: 1,
            slots: *SLOTS.start(),
            keep: 2,
            memory_cap: None,
            policy: Policy::default(),
            objective: Objective::default(),
            precision: Precision::default(),
            keep_base_decoded: true,
            back_pressure: BackPressure::default(),
            on_agent_loss: OnAgentLoss::default(),
            encode: Encode::default(),
            copy_threads: 0,
            agent: Vec::new(),
            agent_idle_exit: Duration::from_secs(15 * 60),
            folder: None,
            store_timeout: Duration::from_secs(5),
        }
    }

    /// What the agent has to know.
    pub(crate) fn spec(&self) -> Result<RunSpec> {
        if self.rank >= self.world {
            return Err(Error::invalid(format!("rank {} of {}: ranks count from 0 to world - 1", self.rank, self.world)));
        }
        if self.keep == 0 {
            return Err(Error::invalid("`keep` is 1 or more"));
        }
        if !SLOTS.contains(&self.slots) {
            return Err(Error::invalid(format!("{} slots: an arena has {} to {}", self.slots, SLOTS.start(), SLOTS.end())));
        }
        if self.encode == Encode::Inline && self.world > 1 {
            return Err(Error::unsupported("several ranks cannot encode inline yet"));
        }
        let tiers = std::iter::once(&self.store).chain(&self.next_tiers).map(|url| absolute(url)).collect::<Result<Vec<_>>>()?;
        let run = self.run.clone().unwrap_or_else(|| tiers.first().cloned().unwrap_or_default());
        let (policy, every) = match self.policy {
            Policy::Intermittent { every } => (self.policy.name(), Some(every)),
            other => (other.name(), None),
        };
        Ok(RunSpec {
            key: run_key(&run),
            run,
            tiers,
            config: self.config.clone(),
            fsync: self.fsync,
            world: self.world,
            keep: self.keep,
            memory_cap: self.memory_cap,
            policy: policy.to_owned(),
            every,
            objective: [self.objective.size, self.objective.speed, self.objective.precision],
            precision: self.precision.words(),
            keep_base_decoded: self.keep_base_decoded,
            inline: self.encode == Encode::Inline,
        })
    }
}

/// What a run is to the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunSpec {
    /// Name of the run's folder.
    pub key: String,
    pub run: String,
    pub tiers: Vec<String>,
    pub config: BTreeMap<String, String>,
    pub fsync: bool,
    pub world: u32,
    pub keep: u32,
    pub memory_cap: Option<u64>,
    pub policy: String,
    pub every: Option<u64>,
    pub objective: [u16; 3],
    pub precision: Vec<String>,
    pub keep_base_decoded: bool,
    pub inline: bool,
}

impl RunSpec {
    /// The first option in which another description differs.
    pub(crate) fn difference(&self, other: &Self) -> String {
        let fields = |spec: &Self| serde_json::to_value(spec).ok().and_then(|value| value.as_object().cloned()).unwrap_or_default();
        let (ours, theirs) = (fields(self), fields(other));
        let differs = ours.iter().find(|(name, value)| theirs.get(*name) != Some(*value));
        differs.map_or_else(|| "description".to_owned(), |(name, _)| format!("`{name}`"))
    }

    /// The tiers, opened; no request is sent yet.
    pub(crate) fn stores(&self) -> Result<Vec<tensorcask::Store>> {
        let options = || StoreOptions { config: self.config.clone(), fsync: self.fsync, ..StoreOptions::default() };
        self.tiers.iter().map(|url| options().open(url)).collect()
    }

    /// Bytes of shared memory that encoded snapshots may take.
    pub(crate) fn cap(&self, place: &Place) -> Result<u64> {
        self.memory_cap.map_or_else(|| Ok(place.capacity()? / 2), Ok)
    }

    /// How states are encoded into memory.
    pub(crate) fn writer_options(&self) -> Result<WriterOptions> {
        let [size, speed, precision] = self.objective;
        Ok(WriterOptions {
            policy: Policy::from_name(&self.policy, self.every)?,
            base_cache: if self.keep_base_decoded { BaseKeeping::Memory } else { BaseKeeping::None },
            objective: Objective { size, speed, precision },
            precision: Precision::parse(self.precision.iter().map(String::as_str))?,
            // A trainer that resumes from an older step saves the steps after it again.
            existing_step: ExistingStep::Replace,
            ..WriterOptions::default()
        })
    }
}

/// The folder name of a run: not its name itself, which may hold anything.
pub(crate) fn run_key(run: &str) -> String {
    let mut digest = Digest::of(run.as_bytes()).to_hex();
    digest.truncate(16);
    digest
}

/// A local path from the root on: the agent works in another folder.
pub(crate) fn absolute(url: &str) -> Result<String> {
    if url.contains("://") {
        return Ok(url.to_owned());
    }
    // Refuses a text that was meant as a URL, such as `s3:/bucket/run`.
    StoreOptions::default().open(url)?;
    let path = std::path::absolute(url).map_err(|e| Error::io(url, e))?;
    path.to_str().map(str::to_owned).ok_or_else(|| Error::invalid("the path of a store has to be text").object(url))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_url_is_no_local_path() {
        let error = absolute("s3:/bucket/run").unwrap_err();
        assert!(error.to_string().contains("write `s3://bucket/run`"), "{error}");
        assert!(absolute("runs/a:b").unwrap().ends_with("runs/a:b"));
    }
}
