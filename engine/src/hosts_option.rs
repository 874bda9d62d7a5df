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
    pub patience_ms: u64,
}

impl Hosts {
    /// Default shortest time without a commit.
    pub const PATIENCE: Duration = Duration::from_secs(10);

    /// A run on many hosts: the name of this start of the job, and the ranks on this host.
    pub fn new(session: impl Into<String>, local_ranks: Range<u32>) -> Self {
        Self { session: session.into(), local_ranks, patience: Self::PATIENCE }
    }

    /// Session and local ranks from the environment that `torchrun` or Slurm sets; `None` if neither started this process.
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
    /// let hosts = tensorcask_engine::Hosts::from_variables(13, variable).unwrap();
    /// assert_eq!((hosts.session.as_str(), hosts.local_ranks), ("torchrun job7 2", 12..16));
    /// ```
    pub fn from_variables(rank: u32, variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let number = |name: &str| variable(name)?.parse::<u32>().ok();
        let local = |rank_on_host: &str, count: &str| {
            // Slurm writes `4(x2)` for two hosts of four tasks.
            let count: u32 = variable(count)?.split(['(', ',']).next()?.parse().ok()?;
            let first = rank.checked_sub(number(rank_on_host)?)?;
            Some(first..first.checked_add(count)?)
        };
        let torchrun = || {
            let (run, count) = (variable("TORCHELASTIC_RUN_ID")?, variable("TORCHELASTIC_RESTART_COUNT")?);
            // Without `--rdzv-id`, all jobs have this id.
            let session = if run == "none" { String::new() } else { format!("torchrun {run} {count}") };
            Some(Self::new(session, local("LOCAL_RANK", "LOCAL_WORLD_SIZE")?))
        };
        let slurm = || {
            let (job, step) = (variable("SLURM_JOB_ID")?, variable("SLURM_STEP_ID").unwrap_or_default());
            let session = format!("slurm {job} {step} {}", variable("SLURM_RESTART_COUNT").unwrap_or_else(|| "0".to_owned()));
            Some(Self::new(session, local("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")?))
        };
        torchrun().or_else(slurm)
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
        Ok(HostsSpec { session, first_rank: start, ranks: end.saturating_sub(start), patience_ms })
    }
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

    /// Number of the host of a rank. All hosts have as many ranks, except perhaps the last.
    pub(crate) fn host_of(&self, rank: u32) -> u32 {
        rank.checked_div(self.ranks).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::Hosts;

    fn hosts(rank: u32, variables: &[(&str, &str)]) -> Option<Hosts> {
        Hosts::from_variables(rank, |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
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
        assert_eq!(hosts(1, &slurm), None, "a local rank above the rank");
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
