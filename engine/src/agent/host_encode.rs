//! The encoder of a host in a run on many hosts: encodes raw states from the arenas into the mirror, with the receipts of
//! its ranks. The uploader sends them to the first tier.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcask::session::{HostWriter, Mirror, RankState};
use tensorcask::wire::{Id, SessionName, SessionStep};
use tensorcask::{Error, ErrorKind, Metadata, Result, Store};
use tokio::sync::mpsc::UnboundedSender;

use super::encode::{drop_incomplete, is_final, saves_of, tensors_with_rows};
use super::encoder_queue::{next_work, remove_former_ranks};
use super::encoding_attempts::EncodingAttempt;
use super::first_host::FirstHost;
use super::host_upload::{UploadWork, WaitingStep};
use super::host_work::HostWork;
use super::peer_tasks::receipt_proof;
use super::retry::Backoff;
use super::run::Run;
use super::run_event::{EncodedSave, Event as RunEvent, MemoryContents, RankGeneration};
use super::run_state::owes_end;
use super::save_log::Encoding;
use super::step_selection::{SaveKey, Selection};
use crate::arena::Arena;
use crate::arena::image::StoredState;
use crate::arena::slot_access::TakenSlot;
use crate::hosts::Event;
use crate::memory::stores::{encoded_bytes, is_full, mirror_bytes, remove_all_epochs};
use crate::memory::tier::without_replicas;
use crate::os::folders::describe_free_space;
use crate::peers::MOST_LISTED;
use crate::rows::trust::{LeftOut, RowTrust, SaveOfRank, without_rows};
use crate::run::known_tiers::KnownTiers;

/// Encodes and uploads states until the agent ends.
pub(super) async fn host_encode_loop(work: Arc<HostWork>, store: Store, memory: Store, encoded: UnboundedSender<UploadWork>) {
    let mut encoder = HostEncoder {
        work: work.clone(),
        store,
        memory,
        encoded,
        writer: None,
        first: None,
        silent_since: None,
        saves: 0,
        pruned: None,
        steps: BTreeSet::new(),
        rows: RowTrust::of_ranks(work.run.spec.local_ranks().start),
    };
    let mut backoff = Backoff::new();
    loop {
        match encoder.encode_all().await {
            Ok(()) => {
                backoff.reset();
                work.run.wakes.encoder_woken().await;
            }
            Err(error) => {
                // The writer may be unusable after an error.
                encoder.writer = None;
                work.run.apply(RunEvent::EncoderProblem(Some(describe(&error))));
                backoff.wait(work.run.wakes.encoder_woken()).await;
            }
        }
    }
}

/// Encodes the states of one host.
struct HostEncoder {
    work: Arc<HostWork>,
    /// The first tier, for reading parents.
    store: Store,
    /// The mirror of the first tier.
    memory: Store,
    /// Work for the uploader.
    encoded: UnboundedSender<UploadWork>,
    writer: Option<HostWriter>,
    /// `None` on host 0, without peers, and after a failure.
    first: Option<FirstHost>,
    /// Time of the last request that the store did not answer.
    silent_since: Option<Instant>,
    /// Number of saves so far.
    saves: u64,
    /// Newest step that the log had passed when the mirror was last pruned.
    pruned: Option<SessionStep>,
    /// Steps of this agent in the mirror.
    steps: BTreeSet<SessionStep>,
    /// Which changed rows are taken.
    rows: RowTrust,
}

impl HostEncoder {
    async fn encode_all(&mut self) -> Result<()> {
        let work = self.work.clone();
        let run = &work.run;
        if let Some(latest) = run.read(|state, _| state.memory.outdated.clone()) {
            remove_all_epochs(&run.folder)?;
            KnownTiers::replace(&run.folder, &latest)?;
            run.apply(RunEvent::MemoryCleared);
        }
        self.prune().await?;
        while !run.is_stopped() {
            if self.has_to_wait().await? {
                break;
            }
            let Some(arenas) = run.read(|_, arenas| arenas.all(run.spec.local_ranks())) else { break };
            match next_work(run, &arenas)? {
                Selection::Wait => break,
                Selection::Drop(states) => states.into_iter().try_for_each(|state| drop_incomplete(run, &arenas, state))?,
                Selection::Encode(key) => {
                    let done = self.encode_step(&arenas, key).await?;
                    self.report_memory()?;
                    self.prune().await?;
                    if !done {
                        break;
                    }
                }
            }
        }
        if run.read(|state, arenas| owes_end(state) && arenas.waiting_states() == 0) {
            // Every state of these ranks is encoded or dropped by now. The uploader tells it once, however often it is asked. Fails
            // only if the uploader has ended.
            let _ = self.encoded.send(UploadWork::End);
        }
        run.apply(RunEvent::EncoderProblem(self.find_obstacle().await?));
        Ok(())
    }

    /// Removes older steps from the mirror, if the log has passed more of them since.
    async fn prune(&mut self) -> Result<()> {
        match self.work.decided().filter(|decided| Some(*decided) != self.pruned) {
            Some(decided) => self.prune_up_to(decided).await,
            None => Ok(()),
        }
    }

    /// Removes older steps, and what saves that failed have left. Needs no writer: there is none after an error.
    async fn prune_up_to(&mut self, decided: SessionStep) -> Result<()> {
        let Some(session) = self.session().await? else { return Ok(()) };
        Mirror::new(&self.store, &self.memory).prune(session, decided).await?;
        self.pruned = Some(decided);
        self.steps.retain(|key| *key >= decided);
        self.report_memory()
    }

    /// Name of the session; `None` while the mirror is empty.
    async fn session(&self) -> Result<Option<SessionName>> {
        match self.memory.history().run().await {
            Ok(run) => Ok(Some(SessionName { run, session: self.work.hosts.session })),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn report_memory(&self) -> Result<()> {
        let run = &self.work.run;
        let steps = self.steps.iter().map(|key| key.step).collect();
        run.apply(RunEvent::MemoryChanged(MemoryContents { epoch: 0, steps, bytes: mirror_bytes(&run.folder)?, chain_depth: 0 }));
        Ok(())
    }

    /// Number of steps in the mirror that wait for their commit.
    async fn pending(&self) -> Result<u64> {
        let of_this_agent = self.work.run.read(|state, _| state.tiers.first().map_or(0, |tier| tier.pending));
        let Some(session) = self.session().await? else { return Ok(of_this_agent) };
        let held = Mirror::new(&self.store, &self.memory).steps(session, self.work.run.spec.local_ranks()).await?;
        // Those of an earlier agent, too.
        let undecided = held.into_iter().filter(|key| self.work.waits_for_commit(*key)).count() as u64;
        Ok(of_this_agent.max(undecided))
    }

    /// Whether memory has no room for another step before a step in the mirror is committed. If none waits for its commit, room
    /// will never come, and the next step is encoded beyond the cap.
    async fn has_to_wait(&self) -> Result<bool> {
        let is_full = self.has_too_many_steps() || encoded_bytes(&self.work.run.folder)? >= self.work.run.cap;
        Ok(is_full && self.pending().await? > 0)
    }

    /// Whether the mirror has so many steps that other hosts could soon not list its objects any more.
    fn has_too_many_steps(&self) -> bool {
        // Two casks per rank; receipts, their signature, parent and folder per step. The rest of the listing is for older objects.
        let per_step = self.work.run.spec.local_ranks().len().saturating_mul(2).saturating_add(4);
        self.steps.len() >= MOST_LISTED.checked_div(per_step.saturating_mul(2)).unwrap_or(0)
    }

    /// Says that memory is full, and what follows from that.
    async fn find_obstacle(&self) -> Result<Option<String>> {
        let (run, bytes) = (&self.work.run, encoded_bytes(&self.work.run.folder)?);
        if bytes < run.cap && !self.has_too_many_steps() {
            return Ok(None);
        }
        let pending = self.pending().await?;
        if bytes < run.cap {
            return Ok((pending > 0)
                .then(|| format!("{pending} steps wait for their commit, as many as memory may hold; later states wait in their slots")));
        }
        let of_others = bytes.saturating_sub(mirror_bytes(&run.folder)?);
        let effect = match pending {
            0 => {
                "none of it can be removed, because it is the newest snapshot with its chain: saves go on beyond the cap. Raise `memory_cap`, or \
                 choose a policy with shorter chains"
                    .to_owned()
            }
            _ => format!("{pending} steps wait for their commit; later states wait in their slots until then"),
        };
        Ok(Some(format!(
            "encoded snapshots use {bytes} bytes of shared memory, {of_others} of them copies of other hosts, over the cap of {}; {effect}",
            run.cap
        )))
    }

    /// The parent for a step, agreed on with the other hosts if the store answers.
    async fn parent(&mut self, at: SessionStep) -> Result<Option<Id>> {
        let work = self.work.clone();
        // Hosts whose mirrors differ would choose different parents, so the store is asked as soon as it answers again.
        self.silent_since = self.silent_since.filter(|since| !work.contact.has_answered_since(*since));
        let is_silent = self.silent_since.is_some_and(|since| since.elapsed() < SILENCE);
        let mut is_cut_off = is_silent || work.is_without_store();
        let limit = if self.silent_since.is_some() { ASK_AGAIN } else { PARENT_TIMEOUT };
        if self.first.is_none() {
            // Without readable certificates, this host chooses alone. Its steps do not count as replicated.
            self.first = FirstHost::open(&work).unwrap_or_default();
        }
        let first = self.first.as_ref();
        let writer = match &mut self.writer {
            Some(open) => open,
            None => {
                let opened = match is_cut_off {
                    true => None,
                    false => answer(&work.run, open_writer(&work, &self.store, &self.memory, Log::OfStore), limit).await?,
                };
                is_cut_off |= opened.is_none();
                self.writer.insert(match opened {
                    Some(opened) => opened,
                    None => open_writer(&work, &self.store, &self.memory, Log::OfMirror).await?,
                })
            }
        };
        let session = writer.session();
        let fixed = match is_cut_off {
            true => None,
            false => match (fixed_parent(&work.run, writer, at, limit).await?, first) {
                (None, _) => None,
                (Some(Some(fixed)), _) => Some(fixed),
                (Some(None), None) => answer(&work.run, writer.choose_parent(at), limit).await?,
                // Host 0 may have begun with the step before the store answered again.
                (Some(None), Some(first)) => match first.parent(session, at).await {
                    Some(noted) => answer(&work.run, writer.adopt_parent(at, noted), limit).await?,
                    None => answer(&work.run, writer.choose_parent(at), limit).await?,
                },
            },
        };
        if let Some(parent) = fixed {
            self.silent_since = None;
            if let Some(id) = parent
                && !mirror_parent(&work.run, &self.store, &self.memory, writer, id, limit).await?
            {
                // Without the parent, this host writes whole chunks, which agree with any parent.
                writer.cut_off().await?;
                self.silent_since = Some(Instant::now());
            }
            return Ok(parent);
        }
        if !is_silent {
            self.silent_since = Some(Instant::now());
            tracing::warn!(run = work.run.spec.run, step = at.step, "the store does not answer; host 0 chooses the parent of this step");
        }
        match first {
            None => writer.mirrored_parent(at).await,
            Some(first) => {
                writer.cut_off().await?;
                let noted = first.await_parent(&work.run, session, at).await;
                if let Some(parent) = noted.flatten()
                    && !writer.has_parent(parent).await?
                {
                    if let Err(error) = first.copy_log(&self.memory).await {
                        tracing::debug!(step = at.step, %error, "the log cannot be copied from host 0");
                    }
                    writer.cut_off().await?;
                }
                if noted.is_none() {
                    // Its certificates may have been renewed.
                    self.first = None;
                }
                Ok(noted.flatten())
            }
        }
    }

    /// Encodes a step into the mirror; returns `false` if a trainer has dropped its state meanwhile.
    async fn encode_step(&mut self, arenas: &[Arc<Arena>], key: SaveKey) -> Result<bool> {
        let (work, ranks) = (self.work.clone(), self.work.run.spec.local_ranks());
        let run = &work.run;
        let at = SessionStep { attempt: key.attempt, step: key.step };
        work.apply(Event::Copied(at));
        let parent = self.parent(at).await?;
        work.apply(Event::ParentFixed { key: at, parent });
        let begun = Instant::now();
        let mut taken = Vec::with_capacity(arenas.len());
        for arena in arenas {
            match TakenSlot::take(arena, |header| SaveKey::of(header) == key)? {
                Some(found) => taken.push(found),
                // The slots of other ranks are given back.
                None => {
                    work.apply(Event::Dropped(at));
                    return Ok(false);
                }
            }
        }
        let generations: Vec<RankGeneration> =
            ranks.clone().zip(&taken).map(|(rank, taken)| RankGeneration { rank, generation: taken.generation() }).collect();
        let saves = saves_of(&taken)?;
        let numbers: Vec<u64> = generations.iter().map(|save| save.generation).collect();
        let attempt = match EncodingAttempt::begin(&run.folder, key.step, &numbers) {
            Ok(attempt) => attempt,
            Err(message) => {
                work.apply(Event::Dropped(at));
                run.release_and_apply(taken, RunEvent::Failed { generations, step: key.step, message })?;
                return Ok(true);
            }
        };
        let writer = self.writer.as_mut().ok_or_else(|| Error::invalid("the store was not opened for writing"))?;
        let saved = match states_of(&taken) {
            Ok(states) => save(writer, at, parent, ranks.start, &states, &self.rows, &saves).await,
            Err(error) => Err(error),
        };
        attempt.end();
        let pruned = self.pruned;
        let mut will_have_room = false;
        if saved.as_ref().is_err_and(is_full) {
            // Also removes what this save has written so far, which would take room from the next attempt.
            self.prune_up_to(work.decided().unwrap_or(FIRST_STEP)).await?;
            // A commit makes room, and it may have come meanwhile.
            will_have_room = self.pending().await? > 0 || work.decided().is_some_and(|decided| Some(decided) != pruned);
        }
        let stored_bytes = match saved {
            Ok((stored_bytes, left_out)) => {
                self.rows.on_encoded(&saves, &left_out);
                stored_bytes
            }
            // No commit will make room.
            Err(error) if is_final(&error) || (is_full(&error) && !will_have_room) => {
                work.apply(Event::Dropped(at));
                let message = match is_full(&error) {
                    true => format!("no space for step {}: {}", key.step, describe_free_space(run.folder.root())),
                    false => error.to_string(),
                };
                run.release_and_apply(taken, RunEvent::Failed { generations, step: key.step, message })?;
                return Ok(true);
            }
            Err(error) => {
                if error.is_unanswered() {
                    // The next attempt does without the store.
                    self.silent_since = Some(Instant::now());
                }
                return Err(error);
            }
        };
        work.note_encoded(at, &generations);
        remove_former_ranks(run);
        self.saves = self.saves.saturating_add(1);
        let encoding = Encoding {
            encode_ms: begun.elapsed().as_secs_f64() * 1e3,
            stored_bytes,
            kind: if parent.is_some() { "delta" } else { "base" }.to_owned(),
        };
        let save = EncodedSave {
            step: key.step,
            generations: generations.iter().map(|known| known.generation).collect(),
            epoch: 0,
            sequence: self.saves,
            encoding,
        };
        run.release_and_apply(taken, RunEvent::Encoded(save))?;
        self.steps.insert(at);
        // Fails only if the uploader has ended, together with this run.
        let _ = self.encoded.send(UploadWork::Step(WaitingStep { key: at, sequence: self.saves, generations }));
        Ok(true)
    }
}

/// The log that a writer begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Log {
    OfStore,
    OfMirror,
}

async fn open_writer(work: &HostWork, store: &Store, memory: &Store, log: Log) -> Result<HostWriter> {
    let spec = &work.run.spec;
    let session = work.hosts.session;
    let (ranks, options): (Vec<u32>, _) = (spec.local_ranks().collect(), spec.writer_options()?);
    let mut writer = match log {
        Log::OfStore => HostWriter::open_with_mirror(store, memory, session, &ranks, spec.world, options).await?,
        Log::OfMirror => HostWriter::open_in_mirror(store, memory, session, &ranks, spec.world, options).await?,
    };
    match receipt_proof(&work.run) {
        Ok(proof) => writer.prove_receipts(proof),
        // The state is saved nevertheless. Other hosts do not copy what is not signed.
        Err(error) => tracing::warn!(run = spec.run, %error, "the receipts of this host cannot be signed"),
    }
    Ok(writer)
}

/// Copies what the mirror lacks of a parent, because the committer has not copied it yet. A delta then needs no cask of the store,
/// which may stop answering. Returns `false` if the store does not answer.
async fn mirror_parent(run: &Run, store: &Store, memory: &Store, writer: &mut HostWriter, parent: Id, limit: Duration) -> Result<bool> {
    let copy = async { Mirror::new(store, memory).describe(&writer.chain_of_parent(parent).await?).await };
    match answer(run, copy, limit).await {
        // The save says what is damaged, and writes whole chunks.
        Err(error) if error.is_damage() => Ok(true),
        answered => Ok(answered?.is_some()),
    }
}

/// The parent that a host has fixed for a step; `None` if the store does not answer.
async fn fixed_parent(run: &Run, writer: &mut HostWriter, at: SessionStep, limit: Duration) -> Result<Option<Option<Option<Id>>>> {
    match answer(run, writer.fixed_parent(at), limit).await {
        // The upload gives the step up. The next one has another parent.
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::LimitExceeded) => {
            tracing::warn!(run = run.spec.run, step = at.step, %error, "the parent of a step cannot be read; saving whole chunks");
            Ok(Some(Some(None)))
        }
        answered => answered,
    }
}

/// The answer of the store; `None` if the store does not answer.
async fn answer<T>(run: &Run, request: impl Future<Output = Result<T>>, limit: Duration) -> Result<Option<T>> {
    match run.wakes.encoder_timeout(limit, request).await {
        Some(Ok(answer)) => Ok(Some(answer)),
        // Full memory is no fault of the store.
        Some(Err(error)) if error.kind() != ErrorKind::Storage || is_full(&error) => Err(error),
        Some(Err(error)) => {
            tracing::warn!(%error, "the store does not answer");
            Ok(None)
        }
        None => Ok(None),
    }
}

/// The states in taken slots. Their bytes may have been damaged since the copy.
fn states_of<'t>(taken: &'t [TakenSlot<'_>]) -> Result<Vec<StoredState<'t>>> {
    taken.iter().map(|taken| taken.state().and_then(|state| state.verify().map(|()| state))).collect()
}

/// Encodes the states of all ranks of this host; returns the size of their casks. If changed rows leave one out, all rows of all
/// these ranks are compared, and they are returned.
async fn save(
    writer: &mut HostWriter,
    at: SessionStep,
    parent: Option<Id>,
    first: u32,
    states: &[StoredState<'_>],
    rows: &RowTrust,
    saves: &[SaveOfRank],
) -> Result<(u64, LeftOut)> {
    let own = without_replicas(first, tensors_with_rows(states, rows, saves)?)?;
    let with_metadata = |rank: u32, state: &StoredState<'_>| if rank == 0 { state.metadata() } else { Metadata::default() };
    let parts = (first..).zip(states).zip(own).map(|((rank, state), tensors)| RankState {
        tensors,
        blobs: state.blobs(),
        metadata: with_metadata(rank, state),
    });
    let mut parts = parts.collect::<Vec<_>>();
    let mut left_out = LeftOut::new();
    let receipts = match writer.save(at, parent, &parts).await {
        Ok(receipts) => receipts,
        Err(error) => {
            for (rank, part) in parts.iter_mut().enumerate() {
                if let Some(tensors) = without_rows(&part.tensors, &error) {
                    part.tensors = tensors;
                    left_out.insert(rank, Error::new(error.kind(), error.to_string()));
                }
            }
            if left_out.is_empty() {
                return Err(error);
            }
            writer.save(at, parent, &parts).await?
        }
    };
    let stored_bytes = receipts.iter().flat_map(|receipt| &receipt.casks).fold(0u64, |sum, cask| sum.saturating_add(cask.bytes));
    Ok((stored_bytes, left_out))
}

fn describe(error: &Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => format!("waiting for a host to open the store: {error}"),
        _ => error.to_string(),
    }
}

/// No step of a session is before it.
const FIRST_STEP: SessionStep = SessionStep { attempt: 0, step: 0 };
/// Time for which the store is not asked again after it has not answered.
const SILENCE: Duration = Duration::from_secs(10);
/// Time for an answer after it.
const ASK_AGAIN: Duration = Duration::from_secs(2);
/// Time for agreeing on a parent, after which the host saves the step alone.
const PARENT_TIMEOUT: Duration = Duration::from_secs(10);
