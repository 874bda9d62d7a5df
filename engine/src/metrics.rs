//! The agent's metrics in the text format of Prometheus.

use std::fmt::Write;

use crate::status::{AgentStatus, ReplicaStatus, RunStatus, SaveStatus};

impl AgentStatus {
    /// Formats the metrics as text for Prometheus.
    pub fn metrics(&self) -> String {
        let mut out = String::new();
        let mut gauge = |name: &str, help: &str, rows: Vec<(String, f64)>| {
            let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
            let _ = writeln!(out, "# HELP tensorcask_{name} {help}\n# TYPE tensorcask_{name} {kind}");
            for (labels, value) in rows {
                let _ = writeln!(out, "tensorcask_{name}{labels} {value}");
            }
        };
        gauge("agent_uptime_seconds", "Seconds since the agent started.", vec![(String::new(), self.uptime_s)]);
        gauge("agent_resident_bytes", "Resident memory of the agent.", vec![(String::new(), self.resident_bytes as f64)]);
        let host_memory = vec![(String::new(), self.host_memory_bytes() as f64)];
        gauge("host_memory_bytes", "Memory of the engine on this host: arenas, encoded snapshots, copies, agent.", host_memory);
        let label = |run: &RunStatus| format!("{{run=\"{}\"}}", escape(&run.run));
        let mut per_run = |name: &str, help: &str, value: &dyn Fn(&RunStatus) -> Option<f64>| {
            gauge(name, help, self.runs.iter().filter_map(|run| Some((label(run), value(run)?))).collect());
        };
        per_run("last_commit_step", "Step of the newest commit in the first tier.", &|run| run.last_commit_step.map(|step| step as f64));
        per_run("copied_step", "Newest step in this host's memory.", &|run| run.levels.copied.map(|step| step as f64));
        per_run("encoded_step", "Newest step that is encoded.", &|run| run.levels.encoded.map(|step| step as f64));
        per_run("replicated_step", "Many hosts: newest step of this host that other hosts have copied.", &|run| {
            run.levels.replicated.map(|step| step as f64)
        });
        let is_without = |run: &RunStatus| Some(f64::from(u8::from(run.hosts.as_ref()?.is_without_store)));
        per_run("without_store", "Many hosts: 1 if the session began from memory and the store has not accepted it yet.", &is_without);
        let leader = |run: &RunStatus| run.hosts.as_ref()?.leader.clone();
        per_run("leader_term", "Many hosts: number of the leader in its session.", &|run| Some(leader(run)?.term as f64));
        per_run("leads", "Many hosts: 1 if this host leads.", &|run| Some(f64::from(u8::from(leader(run)?.is_this_host))));
        per_run("seconds_since_commit", "Seconds since that commit.", &|run| run.seconds_since_commit);
        per_run("chain_depth", "Length of the chain of the newest snapshot in memory.", &|run| Some(run.chain_depth as f64));
        per_run("failed_saves_total", "Saves that failed for good.", &|run| Some(run.failed_saves as f64));
        per_run("queue_depth", "States and snapshots that wait to be encoded or committed.", &|run| Some(run.queue_depth as f64));
        per_run("memory_bytes", "Shared memory that encoded snapshots use.", &|run| Some(run.memory_bytes as f64));
        per_run("memory_cap_bytes", "Shared memory that encoded snapshots may use.", &|run| Some(run.memory_cap_bytes as f64));
        per_run("memory_snapshots", "Encoded snapshots in memory.", &|run| Some(run.memory_steps.len() as f64));
        per_run("stopped", "1 if another job took the store over.", &|run| Some(f64::from(u8::from(run.stopped.is_some()))));
        let last = |value: &dyn Fn(&SaveStatus) -> Option<f64>, run: &RunStatus| run.saves.iter().rev().find_map(value);
        per_run("save_stall_seconds", "Time for which the last save stopped the trainer.", &|run| {
            last(&|save| Some(save.stall_ms / 1e3), run)
        });
        per_run("save_copy_seconds", "Copy time of the last save.", &|run| last(&|save| Some(save.copy_ms / 1e3), run));
        per_run("save_encode_seconds", "Encoding time of the last save.", &|run| last(&|save| Some(save.encode_ms? / 1e3), run));
        per_run("save_upload_seconds", "Upload time of the last save.", &|run| last(&|save| Some(save.upload_ms? / 1e3), run));
        per_run("save_commit_seconds", "Time from the call to the commit of the last save.", &|run| {
            last(&|save| Some(save.commit_ms? / 1e3), run)
        });
        per_run("save_bytes_in", "Size of the last state.", &|run| last(&|save| Some(save.bytes_in as f64), run));
        per_run("save_bytes_out", "Size of the last snapshot.", &|run| last(&|save| save.bytes_out.map(|bytes| bytes as f64), run));
        let label = |run: &RunStatus, replica: &ReplicaStatus| format!("{{run=\"{}\",host=\"{}\"}}", escape(&run.run), replica.host);
        let mut per_replica = |name: &str, help: &str, value: &dyn Fn(&ReplicaStatus) -> Option<f64>| {
            let replicas = self.runs.iter().flat_map(|run| run.replicas.iter().map(move |replica| (run, replica)));
            gauge(name, help, replicas.filter_map(|(run, replica)| Some((label(run, replica), value(replica)?))).collect());
        };
        per_replica("replica_held", "1 if this host copies the snapshots of the other host.", &|replica| {
            Some(f64::from(u8::from(replica.is_held)))
        });
        per_replica("replica_last_step", "Newest complete step of the copy.", &|replica| replica.last_step.map(|step| step as f64));
        per_replica("replica_pending", "Steps that the copy lacks.", &|replica| Some(replica.pending as f64));
        per_replica("replica_lag_seconds", "Seconds since the copy began to lack a step.", &|replica| Some(replica.lag_s));
        per_replica("replica_silent_seconds", "Seconds since the other host last answered.", &|replica| Some(replica.silent_s));
        per_replica("replica_bytes", "Shared memory that the copy uses.", &|replica| Some(replica.bytes as f64));
        per_replica("replica_problem", "1 if the copy has a problem.", &|replica| Some(f64::from(u8::from(replica.problem.is_some()))));
        out
    }
}

/// Escapes the value of a label.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use crate::status::{AgentStatus, ReplicaStatus, RunStatus};

    #[test]
    fn metrics_are_valid_prometheus_text() {
        let replicas = vec![ReplicaStatus { host: 3, pending: 2, ..ReplicaStatus::default() }];
        let run = RunStatus { run: "a\"b\\\n".into(), last_commit_step: Some(7), replicas, ..RunStatus::default() };
        let text = AgentStatus { runs: vec![run], ..AgentStatus::default() }.metrics();
        assert!(text.contains("tensorcask_last_commit_step{run=\"a\\\"b\\\\\\n\"} 7\n"), "{text}");
        assert!(text.contains("tensorcask_replica_pending{run=\"a\\\"b\\\\\\n\",host=\"3\"} 2\n"), "{text}");
        assert!(!text.contains("tensorcask_seconds_since_commit{"), "unknown values are left out");
        assert!(text.lines().all(|line| line.starts_with("# ") || line.rsplit(' ').next().unwrap().parse::<f64>().is_ok()), "{text}");
    }
}
