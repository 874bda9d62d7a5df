//! The option `hosts`: a run on many hosts, and the session that all of them are in.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tensorcask::wire::{Digest, Id, RankRange};
use tensorcask::{Error, Result};

/// A run on many hosts, each with an agent of its own. One agent commits for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosts {
    /// Name of this start of the job. It is the same on all hosts, and no other start of the job uses it again.
    pub session: String,
    /// Ranks on this host.
    pub local_ranks: Range<u32>,
    /// First rank of each host, ascending, if the hosts have different numbers of ranks. Empty: each host has as many as this
    /// one, except perhaps the last.
    pub first_ranks: Vec<u32>,
    /// Shortest time without a commit after which another host looks whether the leading one is gone.
    pub patience: Duration,
}

/// The description of a host for its agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostsSpec {
    pub session: Id,
    pub first_rank: u32,
    pub ranks: u32,
    /// First rank of each host; empty if each has as many ranks as this one, except perhaps the last.
    #[serde(default)]
    pub first_ranks: Vec<u32>,
    pub patience_ms: u64,
}

impl Hosts {
    /// Default shortest time without a commit.
    pub const PATIENCE: Duration = Duration::from_secs(10);

    /// A run on many hosts: the name of this start of the job, and the ranks on this host.
    pub fn new(session: impl Into<String>, local_ranks: Range<u32>) -> Self {
        Self { session: session.into(), local_ranks, first_ranks: Vec::new(), patience: Self::PATIENCE }
    }

    /// Session and ranks of the hosts from the environment that `torchrun` or Slurm sets; `None` if neither started this
    /// process. Fails with `Unsupported` if Slurm has not given consecutive ranks to each node (`--distribution=cyclic`).
    ///
    /// `torchrun` names a start by its run id and the count of restarts, Slurm by the id of the job, the number of the job
    /// step, and the count of restarts.
    ///
    /// The session is empty, and must be set, if `torchrun` has no run id (`--rdzv-id`).
    ///
    /// Do not use this with elastic `torchrun`: if the number of nodes changes, or a node is replaced, the workers start
    /// again with the same count of restarts, or with different counts. Share a random name instead, for example by a
    /// broadcast from rank 0.
    ///
    /// ```
    /// let variables = [("TORCHELASTIC_RUN_ID", "job7"), ("TORCHELASTIC_RESTART_COUNT", "2"), ("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", "1")];
    /// let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
    /// let hosts = tensorcask_engine::Hosts::from_variables(13, variable)?.unwrap();
    /// assert_eq!((hosts.session.as_str(), hosts.local_ranks), ("torchrun job7 2", 12..16));
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn from_variables(rank: u32, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        if let Some(found) = Self::of_torchrun(rank, &variable) {
            return Ok(Some(found));
        }
        SlurmStep::from_variables(rank, variable).map(|step| step.hosts(rank)).transpose()
    }

    fn of_torchrun(rank: u32, variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let number = |name: &str| variable(name)?.parse::<u32>().ok();
        let run = variable("TORCHELASTIC_RUN_ID")?;
        let count = variable("TORCHELASTIC_RESTART_COUNT")?;
        // Without `--rdzv-id`, all jobs have this id.
        let session = if run == "none" { String::new() } else { format!("torchrun {run} {count}") };
        let first = rank.checked_sub(number("LOCAL_RANK")?)?;
        Some(Self::new(session, first..first.checked_add(number("LOCAL_WORLD_SIZE")?)?))
    }

    /// The description for the agent.
    pub(crate) fn spec(&self, rank: u32, world: u32) -> Result<HostsSpec> {
        let Range { start, end } = self.local_ranks;
        if !self.local_ranks.contains(&rank) || end > world {
            let message = format!("rank {rank} of {world} with the local ranks {start} to {end}: the local ranks must have it");
            return Err(Error::invalid(message));
        }
        if self.session.is_empty() {
            return Err(Error::invalid("the session has no name; it names one start of the job on all hosts"));
        }
        let mut session = Id([0; 16]);
        session.0.copy_from_slice(Digest::of(self.session.as_bytes()).0.split_at(16).0);
        let patience_ms = u64::try_from(self.patience.as_millis()).unwrap_or(u64::MAX);
        let first_ranks = self.first_ranks.clone();
        let next = first_ranks.iter().copied().find(|first| *first > start).unwrap_or(world);
        let is_ascending = first_ranks.first() == Some(&0) && first_ranks.is_sorted_by(|a, b| a < b) && first_ranks.last() < Some(&world);
        if !(first_ranks.is_empty() || is_ascending && first_ranks.contains(&start) && next == end) {
            let message =
                format!("first ranks {first_ranks:?} of the hosts of {world} ranks, and local ranks {start} to {end}: they disagree");
            return Err(Error::invalid(message));
        }
        Ok(HostsSpec { session, first_rank: start, ranks: end.saturating_sub(start), first_ranks, patience_ms })
    }

    /// Number of hosts of a job with this many ranks.
    pub(crate) fn hosts(&self, world: u32) -> u32 {
        match self.first_ranks.len() {
            0 => world.div_ceil(self.local_ranks.len().max(1) as u32),
            hosts => hosts as u32,
        }
    }
}

/// A job step of Slurm, as a task sees it.
struct SlurmStep {
    session: String,
    /// Number of tasks of each node.
    tasks: Vec<u32>,
    /// Number of this node; `None` if it is beyond the list.
    node: Option<usize>,
    /// Number of this task on its node.
    task: u32,
}

impl SlurmStep {
    fn from_variables(rank: u32, variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let number = |name: &str| variable(name)?.parse::<u32>().ok();
        let job = variable("SLURM_JOB_ID")?;
        let step = variable("SLURM_STEP_ID").unwrap_or_default();
        let session = format!("slurm {job} {step} {}", variable("SLURM_RESTART_COUNT").unwrap_or_else(|| "0".to_owned()));
        let tasks = tasks_per_node(&variable("SLURM_STEP_TASKS_PER_NODE")?)?;
        let node = number("SLURM_NODEID").or(Some(0).filter(|_| tasks.len() == 1));
        // Without the number of the node, all nodes must have as many tasks.
        let node = node.or_else(|| rank.checked_div(*tasks.first()?)).map(|node| node as usize);
        Some(Self { session, node, task: number("SLURM_LOCALID")?, tasks })
    }

    fn hosts(self, rank: u32) -> Result<Hosts> {
        let Self { session, tasks, node, task } = self;
        let mut next = 0u32;
        let mut first_ranks = Vec::with_capacity(tasks.len());
        for tasks in &tasks {
            first_ranks.push(next);
            next = next.saturating_add(*tasks);
        }
        let own = node.and_then(|node| Some((*first_ranks.get(node)?, *tasks.get(node)?)));
        match own {
            Some((first, count)) if task < count && first.checked_add(task) == Some(rank) => {
                let is_even = tasks.iter().rev().skip(1).all(|tasks| *tasks == count) && tasks.last().is_some_and(|last| *last <= count);
                let first_ranks = if is_even { Vec::new() } else { first_ranks };
                Ok(Hosts { first_ranks, ..Hosts::new(session, first..first.saturating_add(count)) })
            }
            _ => Err(Error::unsupported(format!(
                "rank {rank} is task {task} of its node, and the tasks per node are {tasks:?}: the engine needs consecutive ranks on \
                 each node. Run `srun --distribution=block`. If each task starts several ranks, pass the hosts"
            ))),
        }
    }
}

/// Numbers of tasks in the form of Slurm: `4(x2),2` for two nodes of four tasks and one of two.
fn tasks_per_node(text: &str) -> Option<Vec<u32>> {
    let mut tasks = Vec::new();
    for part in text.split(',') {
        let (count, nodes) = match part.split_once("(x") {
            Some((count, nodes)) => (count, nodes.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        tasks.extend(std::iter::repeat_n(count.parse::<u32>().ok()?, nodes));
        if tasks.len() > MOST_HOSTS {
            return None;
        }
    }
    Some(tasks)
}

impl HostsSpec {
    /// Ranks on this host.
    pub(crate) fn rank_range(&self) -> RankRange {
        RankRange { first: self.first_rank, last: self.first_rank.saturating_add(self.ranks).saturating_sub(1) }
    }

    /// Position of this host among those that may take over: its number.
    pub(crate) fn position(&self) -> u32 {
        self.host_of(self.first_rank)
    }

    /// Number of the host of a rank.
    pub(crate) fn host_of(&self, rank: u32) -> u32 {
        match self.first_ranks.len() {
            0 => rank.checked_div(self.ranks).unwrap_or(0),
            _ => self.first_ranks.partition_point(|first| *first <= rank).saturating_sub(1) as u32,
        }
    }

    /// Ranks of a host, in a job of this many.
    pub(crate) fn ranks_of(&self, host: u32, world: u32) -> Range<u32> {
        let first = |host: u32| match self.first_ranks.len() {
            0 => host.saturating_mul(self.ranks),
            _ => self.first_ranks.get(host as usize).copied().unwrap_or(world),
        };
        first(host).min(world)..first(host.saturating_add(1)).min(world)
    }
}

/// Number of hosts that a list may name.
const MOST_HOSTS: usize = 100_000;

#[cfg(test)]
mod tests {
    use super::Hosts;

    fn try_hosts(rank: u32, variables: &[(&str, &str)]) -> tensorcask::Result<Option<Hosts>> {
        Hosts::from_variables(rank, |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    fn hosts(rank: u32, variables: &[(&str, &str)]) -> Option<Hosts> {
        try_hosts(rank, variables).unwrap()
    }

    #[test]
    fn slurm_nodes_of_different_sizes_have_numbers_of_their_own() {
        let on =
            |node, task| [("SLURM_JOB_ID", "7"), ("SLURM_NODEID", node), ("SLURM_LOCALID", task), ("SLURM_STEP_TASKS_PER_NODE", "2,4(x2)")];
        let found = hosts(7, &on("2", "1")).unwrap();
        assert_eq!((found.local_ranks.clone(), found.first_ranks.clone(), found.hosts(10)), (6..10, vec![0, 2, 6], 3));
        let spec = found.spec(7, 10).unwrap();
        assert_eq!((spec.position(), spec.host_of(1), spec.host_of(5), spec.ranks_of(1, 10), spec.ranks_of(2, 10)), (2, 0, 1, 2..6, 6..10));
        assert_eq!(hosts(0, &on("0", "0")).unwrap().local_ranks, 0..2);
        // With --distribution=cyclic, rank 1 is the first task of node 1.
        let error = try_hosts(1, &on("1", "0")).unwrap_err().to_string();
        assert!(error.contains("consecutive ranks") && error.contains("--distribution=block"), "{error}");
        assert!(Hosts { first_ranks: vec![0, 3], ..Hosts::new("job", 0..2) }.spec(0, 4).is_err(), "ranks without a host");
        // The last host has fewer ranks.
        let last = [("SLURM_JOB_ID", "7"), ("SLURM_NODEID", "2"), ("SLURM_LOCALID", "0"), ("SLURM_STEP_TASKS_PER_NODE", "4(x2),2")];
        let spec = hosts(8, &last).unwrap().spec(8, 10).unwrap();
        assert_eq!((spec.position(), spec.ranks_of(1, 10)), (2, 4..8));
    }

    #[test]
    fn slurm_and_nothing() {
        let slurm = [("SLURM_JOB_ID", "77"), ("SLURM_STEP_ID", "0"), ("SLURM_LOCALID", "3"), ("SLURM_STEP_TASKS_PER_NODE", "4(x2)")];
        let found = hosts(7, &slurm).unwrap();
        assert_eq!((found.session.as_str(), found.local_ranks), ("slurm 77 0 0", 4..8));
        assert_eq!(hosts(7, &[]), None);
        let torchrun =
            [("TORCHELASTIC_RUN_ID", "none"), ("TORCHELASTIC_RESTART_COUNT", "0"), ("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "1")];
        let found = hosts(3, &torchrun).unwrap();
        assert!(found.session.is_empty() && found.spec(3, 4).is_err(), "all jobs have this id");
        assert!(try_hosts(1, &slurm).is_err(), "a local rank above the rank");
    }

    #[test]
    fn local_ranks_must_hold_the_rank() {
        let hosts = Hosts::new("job 1", 2..4);
        let spec = hosts.spec(3, 6).unwrap();
        assert_eq!((spec.first_rank, spec.ranks, spec.position()), (2, 2, 1));
        assert_ne!(spec.session, Hosts::new("job 2", 2..4).spec(3, 6).unwrap().session);
        assert!(hosts.spec(1, 6).is_err() && hosts.spec(3, 3).is_err() && Hosts::new("", 2..4).spec(2, 6).is_err());
    }
}
