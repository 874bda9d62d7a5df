//! The agent's metrics in the text format of OpenMetrics, which Prometheus reads.

use std::fmt::Error as FormatError;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tensorcask::{Error, Result};

use crate::run::status::{AgentStatus, ReplicaStatus, RunStatus, SaveStatus};

/// Times and sizes of the saves that this agent has committed, by run. Clones share their values.
#[derive(Debug, Clone)]
pub(super) struct SaveHistograms {
    stall: ByRun,
    copy: ByRun,
    encode: ByRun,
    upload: ByRun,
    commit: ByRun,
    bytes_in: ByRun,
    bytes_out: ByRun,
}

type ByRun = Family<[(&'static str, String); 1], Histogram, fn() -> Histogram>;

impl Default for SaveHistograms {
    fn default() -> Self {
        let seconds = || Family::new_with_constructor(seconds as fn() -> _);
        let bytes = || Family::new_with_constructor(bytes as fn() -> _);
        Self {
            stall: seconds(),
            copy: seconds(),
            encode: seconds(),
            upload: seconds(),
            commit: seconds(),
            bytes_in: bytes(),
            bytes_out: bytes(),
        }
    }
}

/// From 1 ms to 9 minutes, by factors of 2.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(1e-3, 2.0, 20))
}

/// From 64 KiB to 1 TiB, by factors of 4.
fn bytes() -> Histogram {
    Histogram::new(exponential_buckets(65536.0, 4.0, 13))
}

impl SaveHistograms {
    /// Adds a save that is committed in the first tier.
    pub(super) fn observe(&self, run: &str, save: &SaveStatus) {
        let add = |family: &ByRun, value: f64| family.get_or_create(&[("run", run.to_owned())]).observe(value);
        let times = [
            (&self.stall, Some(save.stall_ms)),
            (&self.copy, Some(save.copy_ms)),
            (&self.encode, save.encode_ms),
            (&self.upload, save.upload_ms),
            (&self.commit, save.commit_ms),
        ];
        for (family, ms) in times {
            ms.into_iter().for_each(|ms| add(family, ms / 1e3));
        }
        add(&self.bytes_in, save.bytes_in as f64);
        save.bytes_out.into_iter().for_each(|bytes| add(&self.bytes_out, bytes as f64));
    }

    fn register(&self, registry: &mut Registry) {
        let mut add = |name, help: &str, family: &ByRun| registry.register(name, help, family.clone());
        add("save_stall_seconds", "Time for which a save stopped the trainer", &self.stall);
        add("save_copy_seconds", "Copy time of a save, part of the stall", &self.copy);
        add("save_encode_seconds", "Time from the raw state to a snapshot in memory", &self.encode);
        add("save_upload_seconds", "Time from memory to the commit in the first tier", &self.upload);
        add("save_commit_seconds", "Time from the call to the commit in the first tier", &self.commit);
        add("save_in_bytes", "Size of the state of the first rank of this host", &self.bytes_in);
        add("save_out_bytes", "Size of a snapshot, of all ranks of this host", &self.bytes_out);
    }
}

/// Formats the metrics.
pub(super) fn metrics(status: AgentStatus, saves: &SaveHistograms) -> Result<String> {
    let mut registry = Registry::with_prefix("tensorcask");
    saves.register(&mut registry);
    registry.register_collector(Box::new(Gauges(status)));
    let mut out = String::new();
    encode(&mut out, &registry).map_err(|e| Error::invalid(format!("cannot format the metrics: {e}")))?;
    Ok(out)
}

/// The metrics of one moment.
#[derive(Debug)]
struct Gauges(AgentStatus);

impl Collector for Gauges {
    fn encode(&self, mut out: DescriptorEncoder<'_>) -> std::result::Result<(), FormatError> {
        let Self(status) = self;
        for (name, help, value) in OF_AGENT {
            let metric = out.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(value(status)).encode(metric)?;
        }
        for (name, help, value) in OF_RUN {
            let mut metric = out.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (run, value) in status.runs.iter().filter_map(|run| Some((run, value(run)?))) {
                ConstGauge::new(value).encode(metric.encode_family(&[("run", run.run.as_str())])?)?;
            }
        }
        let mut metric = out.encode_descriptor("failed_saves", "Saves that failed for good.", None, MetricType::Counter)?;
        for run in &status.runs {
            ConstCounter::new(run.failed_saves).encode(metric.encode_family(&[("run", run.run.as_str())])?)?;
        }
        for (name, help, value) in OF_REPLICA {
            let mut metric = out.encode_descriptor(name, help, None, MetricType::Gauge)?;
            let replicas = status.runs.iter().flat_map(|run| run.replicas.iter().map(move |replica| (run, replica)));
            for (run, replica, value) in replicas.filter_map(|(run, replica)| Some((run, replica, value(replica)?))) {
                let labels = [("run", run.run.clone()), ("host", replica.host.to_string())];
                ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

/// A gauge: its name, its description, and its value, if that is known.
type Gauge<T> = (&'static str, &'static str, fn(&T) -> Option<f64>);

/// A gauge whose value is always known.
type KnownGauge<T> = (&'static str, &'static str, fn(&T) -> f64);

const OF_AGENT: [KnownGauge<AgentStatus>; 3] = [
    ("agent_uptime_seconds", "Seconds since the agent started.", |agent| agent.uptime_s),
    ("agent_resident_bytes", "Resident memory of the agent.", |agent| agent.resident_bytes as f64),
    ("host_memory_bytes", "Memory of the engine on this host: arenas, encoded snapshots, copies, agent.", |agent| {
        agent.host_memory_bytes() as f64
    }),
];

const OF_RUN: [Gauge<RunStatus>; 14] = [
    ("last_commit_step", "Step of the newest commit in the first tier.", |run| run.last_commit_step.map(|step| step as f64)),
    ("copied_step", "Newest step in this host's memory.", |run| run.levels.copied.map(|step| step as f64)),
    ("encoded_step", "Newest step that is encoded.", |run| run.levels.encoded.map(|step| step as f64)),
    ("replicated_step", "Many hosts: newest step of this host that other hosts have copied.", |run| {
        run.levels.replicated.map(|step| step as f64)
    }),
    ("without_store", "Many hosts: 1 if the session began from memory and the store has not accepted it yet.", |run| {
        Some(one_if(run.hosts.as_ref()?.is_without_store))
    }),
    ("leader_term", "Many hosts: number of the leader in its session.", |run| Some(run.hosts.as_ref()?.leader.as_ref()?.term as f64)),
    ("leads", "Many hosts: 1 if this host leads.", |run| Some(one_if(run.hosts.as_ref()?.leader.as_ref()?.is_this_host))),
    ("seconds_since_commit", "Seconds since that commit.", |run| run.seconds_since_commit),
    ("chain_depth", "Length of the chain of the newest snapshot in memory.", |run| Some(run.chain_depth as f64)),
    ("queue_depth", "States and snapshots that wait to be encoded or committed.", |run| Some(run.queue_depth as f64)),
    ("memory_bytes", "Shared memory that encoded snapshots use.", |run| Some(run.memory_bytes as f64)),
    ("memory_cap_bytes", "Shared memory that encoded snapshots may use.", |run| Some(run.memory_cap_bytes as f64)),
    ("memory_snapshots", "Encoded snapshots in memory.", |run| Some(run.memory_steps.len() as f64)),
    ("stopped", "1 if another job took the store over.", |run| Some(one_if(run.stopped.is_some()))),
];

const OF_REPLICA: [Gauge<ReplicaStatus>; 7] = [
    ("replica_held", "1 if this host copies the snapshots of the other host.", |replica| Some(one_if(replica.is_held))),
    ("replica_last_step", "Newest complete step of the copy.", |replica| replica.last_step.map(|step| step as f64)),
    ("replica_pending", "Steps that the copy lacks.", |replica| Some(replica.pending as f64)),
    ("replica_lag_seconds", "Seconds since the copy began to lack a step.", |replica| Some(replica.lag_s)),
    ("replica_silent_seconds", "Seconds since the other host last answered.", |replica| Some(replica.silent_s)),
    ("replica_bytes", "Shared memory that the copy uses.", |replica| Some(replica.bytes as f64)),
    ("replica_problem", "1 if the copy has a problem.", |replica| Some(one_if(replica.problem.is_some()))),
];

fn one_if(condition: bool) -> f64 {
    f64::from(u8::from(condition))
}

#[cfg(test)]
mod tests {
    use super::{SaveHistograms, metrics};
    use crate::run::status::{AgentStatus, ReplicaStatus, RunStatus, SaveStatus};

    #[test]
    fn metrics_are_valid_prometheus_text() {
        let replicas = vec![ReplicaStatus { host: 3, pending: 2, ..ReplicaStatus::default() }];
        let run = RunStatus { run: "a\"b\\\n".into(), last_commit_step: Some(7), failed_saves: 4, replicas, ..RunStatus::default() };
        let saves = SaveHistograms::default();
        let save = SaveStatus { stall_ms: 3.0, encode_ms: Some(5000.0), bytes_in: 1 << 30, ..SaveStatus::default() };
        (0..2).for_each(|_| saves.observe(&run.run, &save));
        let text = metrics(AgentStatus { runs: vec![run], ..AgentStatus::default() }, &saves).unwrap();
        let label = r#"run="a\"b\\\n""#;
        for line in [
            format!("tensorcask_last_commit_step{{{label}}} 7.0"),
            format!("tensorcask_failed_saves_total{{{label}}} 4"),
            format!("tensorcask_replica_pending{{{label},host=\"3\"}} 2.0"),
            format!("tensorcask_save_stall_seconds_sum{{{label}}} 0.006"),
            format!("tensorcask_save_stall_seconds_bucket{{le=\"0.002\",{label}}} 0"),
            format!("tensorcask_save_stall_seconds_bucket{{le=\"0.004\",{label}}} 2"),
            format!("tensorcask_save_encode_seconds_count{{{label}}} 2"),
            format!("tensorcask_save_in_bytes_bucket{{le=\"1073741824.0\",{label}}} 2"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in:\n{text}");
        }
        assert!(!text.contains("tensorcask_seconds_since_commit{"), "unknown values are left out");
        assert!(!text.contains("tensorcask_save_upload_seconds_count{"), "no save was uploaded");
        assert!(text.lines().all(|line| line.starts_with("# ") || line.rsplit(' ').next().unwrap().parse::<f64>().is_ok()), "{text}");
    }
}
