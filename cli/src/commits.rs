//! Log entries in words.

use std::collections::HashMap;

use tensorcask::wire::{Event, Id, LogEntry};

/// A log entry, described for people.
#[derive(Debug, Clone)]
pub struct Commit {
    /// Number of the entry.
    pub sequence: u64,
    /// Milliseconds since 1970, by the clock of the writer.
    pub time_ms: u64,
    /// Name of the event, such as `added`.
    pub kind: &'static str,
    /// Id of the writer.
    pub writer: String,
    /// The event in words.
    pub what: String,
    /// Steps that the event concerns.
    pub steps: Vec<u64>,
    /// Ids of the snapshots that the event concerns.
    pub snapshots: Vec<String>,
}

/// Describes log entries. `entries` begins with the first entry of the log.
pub fn commits(entries: &[LogEntry]) -> Vec<Commit> {
    let mut step_of: HashMap<Id, u64> = HashMap::new();
    let mut commits = Vec::with_capacity(entries.len());
    for entry in entries {
        if let Event::Added { snapshot, step, .. } = &entry.event {
            step_of.insert(*snapshot, *step);
        }
        let ids = match &entry.event {
            Event::Added { snapshot, .. } | Event::Pinned { snapshot, .. } | Event::Compacted { snapshot, .. } => vec![*snapshot],
            Event::Forgotten { snapshots } | Event::Collecting { snapshots } => snapshots.clone(),
            _ => vec![],
        };
        let steps: Vec<u64> = ids.iter().filter_map(|id| step_of.get(id)).copied().collect();
        commits.push(Commit {
            sequence: entry.sequence,
            time_ms: entry.time_ms,
            kind: entry.event.name(),
            writer: entry.writer.to_hex(),
            what: describe(&entry.event, &steps, &step_of) + &by_whom(entry),
            steps,
            snapshots: ids.iter().map(Id::to_hex).collect(),
        });
    }
    commits
}

/// Says who opened the store, if it was a job.
fn by_whom(entry: &LogEntry) -> String {
    match (&entry.event, &entry.job) {
        (Event::Opened { .. }, Some(job)) => format!(" by process {} on {}", job.process, job.host),
        _ => String::new(),
    }
}

fn describe(event: &Event, steps: &[u64], step_of: &HashMap<Id, u64>) -> String {
    let numbers: Vec<String> = steps.iter().map(u64::to_string).collect();
    let steps = numbers.join(", ");
    let were = match numbers.len() {
        1 => format!("step {steps} was"),
        _ => format!("steps {steps} were"),
    };
    match event {
        Event::Opened { leader: None } => "opened for writing".to_owned(),
        Event::Opened { leader: Some(leader) } => format!("opened for writing by leader {} of session {}", leader.term, leader.session),
        Event::Added { parent: None, .. } => format!("step {steps}, a base"),
        Event::Added { parent: Some(parent), .. } => match step_of.get(parent) {
            Some(parent) => format!("step {steps}, a delta on step {parent}"),
            None => format!("step {steps}, a delta"),
        },
        Event::Forgotten { .. } => format!("{were} forgotten"),
        Event::Pinned { pinned: true, .. } => format!("step {steps} was pinned"),
        Event::Pinned { pinned: false, .. } => format!("step {steps} was unpinned"),
        Event::Compacted { roles: Some(roles), .. } => format!("step {steps} was reduced to {}", roles.join(", ")),
        Event::Compacted { parent: None, .. } => format!("step {steps} became a base"),
        Event::Compacted { parent: Some(_), .. } => format!("step {steps} was rewritten"),
        Event::Collecting { .. } => format!("{were} given up for deletion"),
        Event::Upgraded { must_understand, may_ignore } => {
            format!("readers must support [{}], writers also [{}]", must_understand.join(", "), may_ignore.join(", "))
        }
        other => other.name().to_owned(),
    }
}
