//! The uploader of a host in a run on many hosts: sends casks and receipts from the mirror to the first tier.
//!
//! It begins with the steps that an earlier agent left in the mirror. While the store does not answer, steps wait here,
//! and the encoder goes on until the mirror is full.

use std::collections::BTreeSet;
use std::sync::Arc;

use tensorcask::session::{Mirror, SessionExchange};
use tensorcask::wire::{Id, SessionName, SessionStep};
use tensorcask::{ErrorKind, Result, Store};
use tokio::sync::OnceCell;
use tokio::sync::mpsc::UnboundedReceiver;

use super::encode::is_final;
use super::host_work::{HostWork, UploadedStep};
use super::retry::Backoff;
use super::run_event::{Event as RunEvent, RankGeneration};
use super::run_state::owes_end;
use crate::hosts::Event;
use crate::os::clock::now_ms;

/// Work of the uploader.
#[derive(Debug, Clone)]
pub(super) enum UploadWork {
    /// Upload a step.
    Step(WaitingStep),
    /// Tell the other hosts that the ranks of this host save no more: all their steps were sent here before.
    End,
}

/// A step in the mirror that is to be uploaded.
#[derive(Debug, Clone)]
pub(super) struct WaitingStep {
    pub key: SessionStep,
    /// Number of the save among those of this agent, from 1; 0 for a save of an earlier agent.
    pub sequence: u64,
    /// Saves of the ranks; empty for a save of an earlier agent.
    pub generations: Vec<RankGeneration>,
}

/// Uploads steps until the agent ends.
pub(super) async fn host_upload_loop(work: Arc<HostWork>, memory: Store, mut waiting: UnboundedReceiver<UploadWork>) {
    let Some(store) = work.run.tiers.first().cloned() else { return };
    let uploader = Uploader { mirror: Mirror::new(&store, &memory), store, run_id: OnceCell::new(), work: work.clone() };
    let earlier = uploader.left_by_earlier_agent().await;
    work.contact.accepted().await;
    for step in earlier {
        uploader.upload(step).await;
    }
    work.run.apply(RunEvent::NothingToUpload { tier: 0, sources: BTreeSet::new() });
    while let Some(next) = waiting.recv().await {
        match next {
            UploadWork::Step(step) => {
                uploader.upload(step).await;
                // The encoder may have waited for room.
                work.run.wakes.wake_encoder();
            }
            UploadWork::End => uploader.end().await,
        }
    }
}

struct Uploader {
    mirror: Mirror,
    store: Store,
    /// Id of the training run, once the store has told it.
    run_id: OnceCell<Id>,
    work: Arc<HostWork>,
}

impl Uploader {
    /// Steps of this session in the mirror. Some may be uploaded.
    async fn left_by_earlier_agent(&self) -> Vec<WaitingStep> {
        let mut backoff = Backoff::new();
        let found = loop {
            match self.steps_in_mirror().await {
                Ok(found) => break found,
                Err(error) if error.kind() == ErrorKind::NotFound => return Vec::new(),
                Err(error) => self.note(&mut backoff, &error).await,
            }
        };
        let waiting = |key: SessionStep| WaitingStep { key, sequence: 0, generations: Vec::new() };
        found.into_iter().map(waiting).collect()
    }

    async fn steps_in_mirror(&self) -> Result<Vec<SessionStep>> {
        let run = self.mirror.memory().history().run().await?;
        let session = SessionName { run, session: self.work.hosts.session };
        self.mirror.steps(session, self.work.run.spec.local_ranks()).await
    }

    /// Uploads a step, however long that takes, unless the log can no longer admit it.
    async fn upload(&self, step: WaitingStep) {
        let WaitingStep { key, sequence, generations } = step;
        let work = &self.work;
        let begun_ms = now_ms();
        if sequence == 0 && !work.has_passed(key) {
            work.apply(Event::Copied(key));
        }
        let mut backoff = Backoff::new();
        while !work.run.is_stopped() && !work.has_passed(key) {
            match self.try_upload(key).await {
                Ok(()) => break,
                // The encoder may have removed the step meanwhile.
                Err(_) if work.has_passed(key) => break,
                Err(error) if is_final(&error) || error.kind() == ErrorKind::Conflict => {
                    work.apply(Event::Dropped(key));
                    let generations = if sequence > 0 { generations } else { work.undecided_saves(key).unwrap_or_default() };
                    work.run.apply(RunEvent::GivenUp { generations, sequence, step: key.step, message: error.to_string() });
                    work.note_unstorable(key);
                    return;
                }
                Err(error) => self.note(&mut backoff, &error).await,
            }
        }
        if work.run.is_stopped() {
            return;
        }
        work.note_uploaded(key, UploadedStep { sequence, generations, begun_ms });
    }

    async fn try_upload(&self, key: SessionStep) -> Result<()> {
        let run = *self.run_id.get_or_try_init(|| async { self.store.history().run().await }).await?;
        let session = SessionName { run, session: self.work.hosts.session };
        self.mirror.agree_on_parent(session, key).await?;
        self.mirror.upload(session, key).await?;
        self.work.contact.note_answer();
        Ok(())
    }

    /// Notes in the store that the ranks of this host save no more, unless one has attached again since.
    async fn end(&self) {
        let work = &self.work;
        let mut backoff = Backoff::new();
        let ranks = work.hosts.rank_range();
        while work.run.read(|state, _| owes_end(state)) {
            match SessionExchange::end_ranks(&self.store, work.hosts.session, ranks).await {
                Ok(()) => return work.run.apply(RunEvent::EndNoted),
                Err(error) => self.note(&mut backoff, &error).await,
            }
        }
    }

    async fn note(&self, backoff: &mut Backoff, error: &tensorcask::Error) {
        self.work.run.apply(RunEvent::UploadFailed { tier: 0, message: error.to_string() });
        backoff.wait(self.work.run.wakes.uploader_woken(0)).await;
    }
}
