//! Status reports of the agent.

use serde::{Deserialize, Serialize};

/// The agent and its runs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct AgentStatus {
    /// Process id.
    pub pid: u32,
    /// Version of the agent.
    pub version: String,
    /// Seconds since the agent started.
    pub uptime_s: f64,
    /// Resident memory of the process, including the shared memory that it has accessed.
    pub resident_bytes: u64,
    /// Memory of the process alone: resident memory without files and shared memory.
    #[serde(default)]
    pub private_bytes: u64,
    /// Whether the agent was told to stop, and is finishing its work.
    pub draining: bool,
    /// The runs, sorted by name.
    pub runs: Vec<RunStatus>,
}

impl AgentStatus {
    /// Memory that the engine takes on this host: arenas, encoded snapshots, copies of other hosts, and the agent's own. Shared
    /// memory counts once.
    pub fn host_memory_bytes(&self) -> u64 {
        let arenas = |run: &RunStatus| run.ranks.iter().fold(0u64, |sum, rank| sum.saturating_add(rank.arena_present_bytes));
        let of_run = |run: &RunStatus| run.memory_bytes.saturating_add(arenas(run));
        self.runs.iter().fold(self.private_bytes, |sum, run| sum.saturating_add(of_run(run)))
    }
}

/// A run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RunStatus {
    /// Name of the run.
    pub run: String,
    /// Key of the run: the name of its folder.
    pub key: String,
    /// Tiers, nearest first.
    pub tiers: Vec<TierStatus>,
    /// Ranks.
    pub ranks: Vec<RankStatus>,
    /// Newest step of each level.
    pub levels: LevelStatus,
    /// Session and leader, if the run is on many hosts.
    pub hosts: Option<HostsStatus>,
    /// Number of states that wait to be encoded plus snapshots that wait for the first tier.
    pub queue_depth: u64,
    /// Step of the newest commit in the first tier that this agent knows.
    pub last_commit_step: Option<u64>,
    /// Seconds since that commit.
    pub seconds_since_commit: Option<f64>,
    /// Length of the chain of the newest snapshot in memory.
    pub chain_depth: u64,
    /// Number of saves that failed for good.
    pub failed_saves: u64,
    /// Steps of the snapshots in memory.
    pub memory_steps: Vec<u64>,
    /// Bytes of shared memory that encoded snapshots use, with the copies of other hosts.
    pub memory_bytes: u64,
    /// Bytes of shared memory that encoded snapshots may use.
    pub memory_cap_bytes: u64,
    /// Other hosts whose snapshots this host copies, or may have to copy.
    #[serde(default)]
    pub replicas: Vec<ReplicaStatus>,
    /// Current problem of the server for other hosts.
    #[serde(default)]
    pub peers_problem: Option<String>,
    /// Current problem of the encoder; cleared once it works again.
    pub problem: Option<String>,
    /// Reason why this agent stopped the run: another job took its store over.
    pub stopped: Option<String>,
    /// Recent saves, oldest first.
    pub saves: Vec<SaveStatus>,
}

/// Newest step of each level, as far as this agent knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LevelStatus {
    /// Copied into this host's memory.
    pub copied: Option<u64>,
    /// Encoded in this host's memory.
    pub encoded: Option<u64>,
    /// Copied from this host's memory by other hosts, as many as `replicas` of the option `peers` tells.
    #[serde(default)]
    pub replicated: Option<u64>,
    /// Committed in the first tier.
    pub durable: Option<u64>,
}

/// The part of this host in a run on many hosts.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct HostsStatus {
    /// Id of the session: 32 hexadecimal digits.
    pub session: String,
    /// First rank of this host.
    pub first_rank: u32,
    /// Number of ranks of this host.
    pub ranks: u32,
    /// The leader, as this host has last read; `None` before the session begins.
    pub leader: Option<LeaderStatus>,
    /// Whether the session began from the memory of the hosts, because the store did not answer, and the store has not accepted
    /// the session yet.
    #[serde(default)]
    pub is_without_store: bool,
}

/// The leader of a run on many hosts.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LeaderStatus {
    /// Writer id of the leader, as in `tensorcask log`.
    pub writer: String,
    /// Whether this host leads.
    pub is_this_host: bool,
    /// Number of the leader in its session, from 1.
    pub term: u64,
    /// How often the job has returned to an older step in this session.
    pub attempt: u64,
}

/// A tier of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TierStatus {
    /// URL of the tier.
    pub url: String,
    /// Step of the newest snapshot that this agent knows there.
    pub last_step: Option<u64>,
    /// Number of snapshots that the tier lacks.
    pub pending: u64,
    /// Current problem of uploads to the tier.
    pub problem: Option<String>,
}

/// A copy of another host's snapshots in the memory of this host.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ReplicaStatus {
    /// Number of the other host.
    pub host: u32,
    /// Address of its agent.
    pub address: String,
    /// Whether this host copies its snapshots now. Otherwise this host only observes whether the other host answers.
    pub is_held: bool,
    /// Newest complete step of the copy.
    pub last_step: Option<u64>,
    /// Newest complete step of the other host, when it last answered.
    pub source_step: Option<u64>,
    /// Number of steps that the copy lacks.
    pub pending: u64,
    /// Seconds since the copy began to lack a step; 0 if it lacks none.
    pub lag_s: f64,
    /// Seconds since the other host last answered; since the agent started if it never did.
    pub silent_s: f64,
    /// Bytes of shared memory that the copy uses.
    pub bytes: u64,
    /// Current problem of the copy, or of the connection.
    pub problem: Option<String>,
}

/// A rank of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RankStatus {
    /// Rank number.
    pub rank: u32,
    /// Process id of the trainer while it is connected.
    pub trainer: Option<u32>,
    /// Size of the arena.
    pub arena_bytes: u64,
    /// Part of the arena that takes memory: a slot takes none before its first save.
    #[serde(default)]
    pub arena_present_bytes: u64,
    /// Slots of the arena.
    pub slots: Vec<SlotStatus>,
}

/// A slot of an arena.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SlotStatus {
    /// `empty`, `filling`, `full`, `encoding` or `released`.
    pub state: String,
    /// Step of the state, if it is complete.
    pub step: Option<u64>,
}

/// A save and its progress. Times are in milliseconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SaveStatus {
    /// Training step.
    pub step: u64,
    /// Number of the save in the arena.
    pub generation: u64,
    /// Time for which the save stopped the trainer.
    pub stall_ms: f64,
    /// Time of the copy, part of the stall.
    pub copy_ms: f64,
    /// Time from the raw state to a snapshot in memory.
    pub encode_ms: Option<f64>,
    /// Time from memory to the commit in the first tier.
    pub upload_ms: Option<f64>,
    /// Bytes sent to the first tier while the state was being encoded.
    pub ahead_bytes: Option<u64>,
    /// Time from the trainer's call to the commit in the first tier.
    pub commit_ms: Option<f64>,
    /// Size of the state.
    pub bytes_in: u64,
    /// Size of the snapshot.
    pub bytes_out: Option<u64>,
    /// `base` or `delta`.
    pub kind: Option<String>,
    /// Queue depth when the save arrived.
    pub queue_depth: u64,
    /// Reason why the save failed for good.
    pub error: Option<String>,
}
