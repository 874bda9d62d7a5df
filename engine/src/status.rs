//! What the agent tells of itself: as JSON, and as metrics for Prometheus.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

/// The agent and its runs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct AgentStatus {
    /// Its process id.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// Seconds since it began.
    pub uptime_s: f64,
    /// Resident memory of the process, shared memory that it touched included.
    pub resident_bytes: u64,
    /// Whether it was told to end.
    pub draining: bool,
    /// Its runs, by name.
    pub runs: Vec<RunStatus>,
}

/// A run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RunStatus {
    /// Its name.
    pub run: String,
    /// Its key: the name of its folder.
    pub key: String,
    /// URLs of the tiers.
    pub tiers: Vec<TierStatus>,
    /// Its ranks.
    pub ranks: Vec<RankStatus>,
    /// States in the arena that wait to be encoded, and snapshots that wait to be committed in the first tier.
    pub queue_depth: u64,
    /// Step of the newest snapshot in the first tier that this agent committed.
    pub last_commit_step: Option<u64>,
    /// Seconds since that commit.
    pub seconds_since_commit: Option<f64>,
    /// Snapshots that the newest one in memory is rebuilt from.
    pub chain_depth: u64,
    /// Saves that failed for good.
    pub failed_saves: u64,
    /// Steps whose encoded snapshots are in memory.
    pub memory_steps: Vec<u64>,
    /// Bytes of shared memory that encoded snapshots take.
    pub memory_bytes: u64,
    /// Bytes that they may take.
    pub memory_cap_bytes: u64,
    /// What went wrong last, until it goes well again.
    pub problem: Option<String>,
    /// Why the run was given up, if it was: another job took its store over.
    pub stopped: Option<String>,
    /// The last saves, oldest first.
    pub saves: Vec<SaveStatus>,
}

/// A tier of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TierStatus {
    /// Its URL.
    pub url: String,
    /// Step of the newest snapshot that this agent committed there.
    pub last_step: Option<u64>,
    /// Snapshots that are still missing there.
    pub pending: u64,
    /// What went wrong there last.
    pub problem: Option<String>,
}

/// A rank of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RankStatus {
    /// The rank.
    pub rank: u32,
    /// The trainer's process id, while it is connected.
    pub trainer: Option<u32>,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// What each slot holds.
    pub slots: Vec<SlotStatus>,
}

/// A slot of an arena.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SlotStatus {
    /// `empty`, `filling`, `full`, `encoding` or `released`.
    pub state: String,
    /// The step, if the state in it is whole.
    pub step: Option<u64>,
}

/// A save, as far as it has come. Times in milliseconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SaveStatus {
    /// The step.
    pub step: u64,
    /// The save's number in the arena.
    pub generation: u64,
    /// How long the trainer stood still.
    pub stall_ms: f64,
    /// Of that, the copy.
    pub copy_ms: f64,
    /// From the raw state to a snapshot in memory.
    pub encode_ms: Option<f64>,
    /// From memory to the first tier, the commit included.
    pub upload_ms: Option<f64>,
    /// Bytes that had gone to the first tier before, while the state was being encoded.
    pub ahead_bytes: Option<u64>,
    /// From the trainer's call to the commit in the first tier.
    pub commit_ms: Option<f64>,
    /// Bytes of the state.
    pub bytes_in: u64,
    /// Bytes of the snapshot.
    pub bytes_out: Option<u64>,
    /// `base` or `delta`.
    pub kind: Option<String>,
    /// States and snapshots that waited when it came.
    pub queue_depth: u64,
    /// Why it failed for good.
    pub error: Option<String>,
}

impl AgentStatus {
    /// The text that Prometheus reads.
    pub fn metrics(&self) -> String {
        let mut out = String::new();
        let mut gauge = |name: &str, help: &str, rows: Vec<(String, f64)>| {
            let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
            let _ = writeln!(out, "# HELP tensorcask_{name} {help}\n# TYPE tensorcask_{name} {kind}");
            for (labels, value) in rows {
                let _ = writeln!(out, "tensorcask_{name}{labels} {value}");
            }
        };
        gauge("agent_uptime_seconds", "Seconds since the agent began.", vec![(String::new(), self.uptime_s)]);
        gauge("agent_resident_bytes", "Resident memory of the agent.", vec![(String::new(), self.resident_bytes as f64)]);
        let label = |run: &RunStatus| format!("{{run=\"{}\"}}", escape(&run.run));
        let mut per_run = |name: &str, help: &str, value: &dyn Fn(&RunStatus) -> Option<f64>| {
            gauge(name, help, self.runs.iter().filter_map(|run| Some((label(run), value(run)?))).collect());
        };
        per_run("last_commit_step", "Step of the newest commit in the first tier.", &|run| run.last_commit_step.map(|step| step as f64));
        per_run("seconds_since_commit", "Seconds since that commit.", &|run| run.seconds_since_commit);
        per_run("chain_depth", "Snapshots that the newest one is rebuilt from.", &|run| Some(run.chain_depth as f64));
        per_run("failed_saves_total", "Saves that failed for good.", &|run| Some(run.failed_saves as f64));
        per_run("queue_depth", "States and snapshots that wait.", &|run| Some(run.queue_depth as f64));
        per_run("memory_bytes", "Shared memory of encoded snapshots.", &|run| Some(run.memory_bytes as f64));
        per_run("memory_cap_bytes", "Shared memory that they may take.", &|run| Some(run.memory_cap_bytes as f64));
        per_run("memory_snapshots", "Encoded snapshots in memory.", &|run| Some(run.memory_steps.len() as f64));
        per_run("stopped", "1 if another job took the store over.", &|run| Some(f64::from(u8::from(run.stopped.is_some()))));
        let last = |value: &dyn Fn(&SaveStatus) -> Option<f64>, run: &RunStatus| run.saves.iter().rev().find_map(value);
        per_run("save_stall_seconds", "How long the last save stopped the trainer.", &|run| last(&|save| Some(save.stall_ms / 1e3), run));
        per_run("save_copy_seconds", "Copy of the last save.", &|run| last(&|save| Some(save.copy_ms / 1e3), run));
        per_run("save_encode_seconds", "Encoding of the last save.", &|run| last(&|save| Some(save.encode_ms? / 1e3), run));
        per_run("save_upload_seconds", "Upload of the last save.", &|run| last(&|save| Some(save.upload_ms? / 1e3), run));
        per_run("save_commit_seconds", "From the call to the commit of the last save.", &|run| {
            last(&|save| Some(save.commit_ms? / 1e3), run)
        });
        per_run("save_bytes_in", "Bytes of the last state.", &|run| last(&|save| Some(save.bytes_in as f64), run));
        per_run("save_bytes_out", "Bytes of the last snapshot.", &|run| last(&|save| save.bytes_out.map(|bytes| bytes as f64), run));
        out
    }
}

/// A label's value.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_lines_of_names_labels_and_numbers() {
        let run = RunStatus { run: "a\"b\\\n".into(), last_commit_step: Some(7), ..RunStatus::default() };
        let text = AgentStatus { runs: vec![run], ..AgentStatus::default() }.metrics();
        assert!(text.contains("tensorcask_last_commit_step{run=\"a\\\"b\\\\\\n\"} 7\n"), "{text}");
        assert!(!text.contains("tensorcask_seconds_since_commit{"), "what is not known is not told");
        assert!(text.lines().all(|line| line.starts_with("# ") || line.rsplit(' ').next().unwrap().parse::<f64>().is_ok()), "{text}");
    }
}
