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
        let Some(job) = entry.job.filter(|job| !has_ended(job)) else { return Ok(None) };
        let step = match entry.event {
            Event::Added { step, .. } => Some(step),
            _ => None,
        };
        Ok(Some(Self { job, writer: last.writer, time_ms: entry.time_ms, step }))
    }

    /// The error of a save by hand, or of a copy, that would end the job.
    pub(crate) fn refusal(&self, store: &Store) -> Error {
        let Job { host, process } = &self.job;
        let seconds = now_ms().saturating_sub(self.time_ms) / 1000;
        let age = humantime::format_duration(std::time::Duration::from_secs(seconds));
        let what = match self.step {
            Some(step) => format!("saved step {step} {age} ago"),
            None => format!("opened the store {age} ago"),
        };
        let message = format!(
            "process {process} on host {host} {what}, and owns the store. If its job still runs, its next save would fail with `fenced`. Nothing \
             was written. Write to another store; or take this one over: `--take-over` on the command line, `take_over=True` in Python"
        );
        Error::new(ErrorKind::Conflict, message).object(store.url())
    }
}

/// Whether the process of a job on this host is gone. Of other hosts nothing is known.
fn has_ended(job: &Job) -> bool {
    cfg!(target_os = "linux") && job.host == Job::here().host && !std::path::Path::new(&format!("/proc/{}", job.process)).exists()
}
