//! The job that owns a store: the one that wrote to it last, and goes on saving. Spec: `spec/log.md`, 3.8.

use super::{Log, now_ms};
use crate::error::ResultExt;
use crate::wire::{Event, Id, Job, LogEntry};
use crate::{Error, ErrorKind, Result, Store, boxed};

/// A job that saves to a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Owner {
    job: Job,
    pub writer: Id,
    /// Time of its last entry, in milliseconds since 1970.
    time_ms: u64,
    /// Step that this entry added; `None` if the job has opened the store and saved nothing yet.
    step: Option<u64>,
}

impl Owner {
    /// The job that was the last writer in a log; `None` if the last writer saved once, by hand, or copied, or has ended on this host.
    #[boxed]
    pub(crate) async fn of(log: &Log) -> Result<Option<Self>> {
        let Some(last) = log.state().last_writer else { return Ok(None) };
        let path = LogEntry::path_of(last.sequence);
        let bytes = log.store.objects().get(&path, log.store.limits().max_entry_bytes).await?;
        let (entry, _) = LogEntry::decode(&bytes, last.sequence, log.store.limits()).in_object(path)?;
        // Another host leads a session on if its leader ends.
        let is_session = log.state().leadership.leading().is_some();
        let Some(job) = entry.job.filter(|job| is_session || !has_ended(job)) else { return Ok(None) };
        let step = match entry.event {
            Event::Added { step, .. } => Some(step),
            _ => None,
        };
        Ok(Some(Self { job, writer: last.writer, time_ms: entry.time_ms, step }))
    }

    /// The error of a save by hand, or of a copy, that would end the job.
    pub(crate) fn refusal(&self, store: &Store) -> Error {
        let Job { host, process, .. } = &self.job;
        let seconds = now_ms().saturating_sub(self.time_ms) / 1000;
        let age = humantime::format_duration(std::time::Duration::from_secs(seconds));
        let what = match self.step {
            Some(step) => format!("saved step {step} {age} ago"),
            None => format!("opened the store {age} ago"),
        };
        let process = match process {
            0 => "a process in another container".to_owned(),
            number => format!("process {number}"),
        };
        let message = format!(
            "{process} on host {host} {what}, and owns the store. If its job still runs, its next save would fail with `fenced`. Nothing \
             was written. Write to another store; or take this one over: `--take-over` on the command line, `take_over=True` in Python"
        );
        Error::new(ErrorKind::Conflict, message).object(store.url())
    }
}

/// Whether the process of a job on this host is gone. Of other hosts nothing is known.
#[cfg(target_os = "linux")]
fn has_ended(job: &Job) -> bool {
    use rustix::process::{Pid, test_kill_process};
    // Not by `/proc`: it may hide the processes of other users (`hidepid`).
    let is_gone = |process: Pid| test_kill_process(process) == Err(rustix::io::Errno::SRCH);
    let is_over = |process: u32| i32::try_from(process).ok().and_then(Pid::from_raw).is_some_and(is_gone);
    // A trainer starts another agent, and an agent goes on after its trainer.
    job.host == Job::here().host && is_over(job.process) && job.agent.is_none_or(is_over)
}

#[cfg(not(target_os = "linux"))]
fn has_ended(_: &Job) -> bool {
    false
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::{Job, has_ended};

    #[test]
    fn only_a_process_of_this_host_that_is_gone_has_ended() {
        let of = |process| Job { process, ..Job::here() };
        let mut child = std::process::Command::new("true").spawn().unwrap();
        assert!(!has_ended(&of(child.id())), "nobody has waited for it");
        child.wait().unwrap();
        assert!(has_ended(&of(child.id())));
        let here = Job::here().process;
        assert!(has_ended(&Job { agent: Some(child.id()), ..of(child.id()) }));
        assert!(!has_ended(&Job { agent: Some(here), ..of(child.id()) }) && !has_ended(&Job { agent: Some(child.id()), ..of(here) }));
        assert!(!has_ended(&Job { host: "elsewhere".to_owned(), ..of(child.id()) }));
        assert!(!has_ended(&of(1)), "a process of another user, perhaps");
        assert!(!has_ended(&Job { agent: Some(child.id()), ..of(0) }), "a process in another container");
    }
}
