//! Options of the trainer's side: the store, memory, policies, and the agent to start.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tensorcask::codec::{CodecRules, ObjectiveSetting, Registry};
use tensorcask::{Error, FiniteCheck, Policy, Precision, Result, Retention, RoleRules, absolute_url, with_absolute_path};

use super::hosts_option::Hosts;
use super::peers_option::Peers;
use super::spec::{RunSpec, environment_of, run_key};
use crate::arena::file::SLOTS;

/// Behaviour of a save while no slot of the arena is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackPressure {
    /// Wait until the agent has encoded a state.
    #[default]
    Wait,
    /// Skip the save, and report it.
    Skip,
    /// Drop the oldest state that the agent has not begun to encode, and report it.
    DropOldestUncommitted,
}

impl BackPressure {
    /// Parses `wait`, `skip` or `drop_oldest_uncommitted`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "wait" => Ok(Self::Wait),
            "skip" => Ok(Self::Skip),
            "drop_oldest_uncommitted" => Ok(Self::DropOldestUncommitted),
            _ => Err(Error::invalid(format!("unknown back-pressure `{}`: use wait, skip or drop_oldest_uncommitted", name.escape_debug()))),
        }
    }
}

/// Behaviour of a save after the agent has died.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnAgentLoss {
    /// Start another agent, which continues the work.
    #[default]
    Restart,
    /// Fail. The state is in the arena nevertheless.
    Fail,
}

/// Process that encodes states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Encode {
    /// The agent, from the raw copy in the arena. Stops the trainer for the shortest time.
    #[default]
    Agent,
    /// The trainer, directly into encoded memory. Needs no arena, for when memory is scarcer than time. While memory is
    /// full of snapshots that the store does not have yet, a save waits or is skipped; nothing can be dropped.
    Inline,
}

/// Options of an [`Engine`](crate::Engine). Start from `EngineOptions::new(store)`.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Path or URL of the first tier. A snapshot is durable once it is committed there.
    pub store: String,
    /// Further tiers. The agent fills each from the previous tier in the background; on many hosts, the agent of the host that
    /// commits for all.
    pub next_tiers: Vec<String>,
    /// Settings of the object stores, as in [`StoreOptions::config`](tensorcask::StoreOptions::config). Other settings come from the
    /// environment of this process when the engine starts. The agent uses the same settings, whoever has started it.
    pub config: BTreeMap<String, String>,
    /// Whether files on local disk are synced before a commit.
    pub fsync: bool,
    /// Name of the run on this host; the URL of the store by default.
    pub run: Option<String>,
    /// Rank of this process, from 0.
    pub rank: u32,
    /// Number of ranks. Each saves its shards, and a step is committed when all ranks have saved it. All ranks are on one
    /// host, unless `hosts` is set.
    pub world: u32,
    /// Session and local ranks of a run on many hosts; `None` for one host. Not with [`Encode::Inline`].
    pub hosts: Option<Hosts>,
    /// Replicas of encoded snapshots in the memory of other hosts; `None` for none. Only with `hosts`.
    pub peers: Option<Peers>,
    /// Number of raw states that fit into the arena, 1 to 16. With one, a save waits until the state before is encoded; that is
    /// the setting with the least memory.
    pub slots: u32,
    /// Number of encoded snapshots to keep in memory, 1 or more. Snapshots that the store does not have yet stay in
    /// addition.
    pub keep: u32,
    /// Bytes of shared memory that encoded snapshots may use; by default half of the folder's file system. Beyond the
    /// cap, the agent removes every snapshot that the store has, even the chain of the next delta, and writes a base
    /// next. States wait in the arena while the store lacks a snapshot. A snapshot that is larger than the cap is kept
    /// alone.
    pub memory_cap: Option<u64>,
    /// Policy for writing bases and deltas.
    pub policy: Policy,
    /// Objective of the choice between codecs. `Auto` makes a snapshot soonest complete in memory, not in the store.
    pub objective: ObjectiveSetting,
    /// Codecs that are assigned to tensors. The objective chooses the codecs of all other tensors.
    pub codecs: CodecRules,
    /// Roles of tensors whose names tell no role, or a wrong one.
    pub roles: RoleRules,
    /// Tensors to round before encoding, and their precision. Raw states in the arena are exact. Several ranks cannot use
    /// [`Precision::auto`].
    pub precision: Precision,
    /// Whether snapshots get statistics of each chunk, as with
    /// [`WriterOptions::statistics`](tensorcask::WriterOptions::statistics).
    pub statistics: bool,
    /// Treatment of a state whose parameters or moments hold NaN or infinities. A refused save is reported as a failure of the
    /// save at the next call.
    pub check: FiniteCheck,
    /// Steps to keep in each tier. After each upload, the agent forgets the others, and reduces steps of
    /// `keep_weights_every` to their weights, as [`maintain::apply_retention`](tensorcask::maintain::apply_retention())
    /// does. [`Retention::free`] says when their objects are deleted. By default all steps are kept.
    pub retention: Option<Retention>,
    /// Whether the agent keeps the base of the next delta decoded. Otherwise it decodes the base for each delta.
    pub keep_base_decoded: bool,
    /// Behaviour of a save while no slot is free.
    pub back_pressure: BackPressure,
    /// Behaviour of a save after the agent has died.
    pub on_agent_loss: OnAgentLoss,
    /// Process that encodes states.
    pub encode: Encode,
    /// Number of threads that copy; 0 means one per core.
    pub copy_threads: usize,
    /// Program of the agent and its first arguments. If empty: `$TENSORCASK_AGENT agent`, else `tensorcask agent`.
    pub agent: Vec<String>,
    /// Idle time after which an agent started by this process ends. Snapshots in memory stay.
    pub agent_idle_exit: Duration,
    /// Folder in shared memory; by default `$TENSORCASK_ENGINE_DIR`, else `/dev/shm/tensorcask-<uid>`.
    pub folder: Option<PathBuf>,
    /// Timeout for asking the store whether memory is up to date. After it, a restore trusts memory.
    pub store_timeout: Duration,
    /// Whether an engine that has restored no step may replace stored steps. Otherwise its first save of such a step fails:
    /// a program that takes a later start for the first one would replace them all.
    pub overwrite: bool,
}

impl EngineOptions {
    /// Default options for a store.
    pub fn new(store: impl Into<String>) -> Self {
        Self {
            store: store.into(),
            next_tiers: Vec::new(),
            config: BTreeMap::new(),
            fsync: true,
            run: None,
            rank: 0,
            world: 1,
            hosts: None,
            peers: None,
            slots: 2,
            keep: 2,
            memory_cap: None,
            policy: Policy::default(),
            objective: ObjectiveSetting::default(),
            codecs: CodecRules::default(),
            roles: RoleRules::default(),
            precision: Precision::default(),
            statistics: false,
            check: FiniteCheck::Off,
            retention: None,
            keep_base_decoded: true,
            back_pressure: BackPressure::default(),
            on_agent_loss: OnAgentLoss::default(),
            encode: Encode::default(),
            copy_threads: 0,
            agent: Vec::new(),
            agent_idle_exit: Duration::from_secs(15 * 60),
            folder: None,
            store_timeout: Duration::from_secs(5),
            overwrite: false,
        }
    }

    /// The description of the run for the agent.
    pub(crate) fn spec(&self) -> Result<RunSpec> {
        if self.rank >= self.world {
            return Err(Error::invalid(format!("rank={} with world={}: ranks are numbered from 0 to world - 1", self.rank, self.world)));
        }
        if self.keep == 0 {
            return Err(Error::invalid("keep=0: must be 1 or more"));
        }
        if !SLOTS.contains(&self.slots) {
            return Err(Error::invalid(format!("slots={}: an arena has {} to {} slots", self.slots, SLOTS.start(), SLOTS.end())));
        }
        if self.slots == 1 && self.back_pressure == BackPressure::DropOldestUncommitted {
            return Err(Error::invalid("slots=1 with the back pressure `drop_oldest_uncommitted`: a save would overwrite the only state"));
        }
        if self.encode == Encode::Inline && self.world > 1 {
            return Err(Error::unsupported("inline encoding supports only one rank; use Encode::Agent"));
        }
        if self.precision.needs_whole_state() && self.world > 1 {
            let message = "the precision `auto` and settings with `sensitive` measure the whole state; with several ranks, \
                           use lossless, near or compact, or other settings";
            return Err(Error::unsupported(message));
        }
        if self.hosts.is_some() && self.encode == Encode::Inline {
            return Err(Error::unsupported("a run on many hosts does not support inline encoding; use Encode::Agent"));
        }
        match (&self.peers, &self.hosts) {
            (None, _) => {}
            (Some(peers), Some(hosts)) => peers.check(hosts.hosts(self.world))?,
            (Some(_), None) => return Err(Error::invalid("`peers` are for a run on many hosts: set `hosts`, too")),
        }
        self.retention.map_or(Ok(()), Retention::check)?;
        self.codecs.check(&Registry::default())?;
        let tiers = std::iter::once(&self.store).chain(&self.next_tiers).map(|url| absolute_url(url)).collect::<Result<Vec<_>>>()?;
        let environment = environment_of(&tiers);
        let run = self.run.clone().unwrap_or_else(|| tiers.first().cloned().unwrap_or_default());
        let (policy, every) = match self.policy {
            Policy::Intermittent { every } => (self.policy.name(), Some(every)),
            other => (other.name(), None),
        };
        Ok(RunSpec {
            key: run_key(&run),
            run,
            tiers,
            config: self.config.iter().map(|(name, value)| (name.clone(), with_absolute_path(name, value.clone()))).collect(),
            environment: Some(environment),
            fsync: self.fsync,
            world: self.world,
            keep: self.keep,
            memory_cap: self.memory_cap,
            policy: policy.to_owned(),
            every,
            objective: self.objective.to_string(),
            codecs: self.codecs.words(),
            roles: self.roles.words(),
            precision: self.precision.words(),
            statistics: self.statistics,
            check: self.check.name().map(str::to_owned),
            retention: self.retention,
            keep_base_decoded: self.keep_base_decoded,
            inline: self.encode == Encode::Inline,
            hosts: self.hosts.as_ref().map(|hosts| hosts.spec(self.rank, self.world)).transpose()?,
            peers: self.peers.as_ref().map(Peers::with_absolute_paths).transpose()?,
        })
    }
}
