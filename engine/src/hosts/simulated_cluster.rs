//! A cluster of a simulation: hosts, the store, the job, and everything that goes wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tensorcask::wire::Id;

use super::event::{Action, Event, Request, StepKey, SurveyedStep};
use super::simulated_host::{Answer, Append, Clock, Host, Query, Task};
use super::simulated_setup::{Mistake, Random, Setup};
use super::simulated_store::{Change, Entry, Receipt, SimStore, StepName};

/// How often each thing happened.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Happened {
    commits: u64,
    takeovers: u64,
    sessions: u64,
    returns: u64,
    host_deaths: u64,
    agent_deaths: u64,
    partitions: u64,
    lost_after_effect: u64,
    lost_numbers: u64,
    given_up: u64,
    ended: u64,
}

impl Happened {
    fn all(&self) -> [u64; 11] {
        let Self { commits, takeovers, sessions, returns, host_deaths, agent_deaths, partitions, lost_after_effect, lost_numbers, .. } =
            *self;
        [
            commits,
            takeovers,
            sessions,
            returns,
            host_deaths,
            agent_deaths,
            partitions,
            lost_after_effect,
            lost_numbers,
            self.given_up,
            self.ended,
        ]
    }

    pub(super) fn all_above(&self, least: u64) -> bool {
        self.all().iter().all(|count| *count > least)
    }

    pub(super) fn add(&mut self, other: &Self) {
        let [a, b, c, d, e, f, g, h, i, j, k] = other.all();
        self.commits += a;
        self.takeovers += b;
        self.sessions += c;
        self.returns += d;
        self.host_deaths += e;
        self.agent_deaths += f;
        self.partitions += g;
        self.lost_after_effect += h;
        self.lost_numbers += i;
        self.given_up += j;
        self.ended += k;
    }
}

/// Something that happens at a time. A number of a host is its position in `Cluster::hosts`, which only grows.
#[derive(Debug, Clone)]
enum Happening {
    /// The job saves a step, or returns to an older one.
    Step,
    Copy {
        host: usize,
        key: StepKey,
    },
    Tick {
        host: usize,
        incarnation: u32,
    },
    Arrives {
        host: usize,
        incarnation: u32,
        task: u64,
        query: Query,
        is_answered: bool,
    },
    Answered {
        host: usize,
        incarnation: u32,
        task: u64,
        answer: Answer,
    },
    Fault,
    AgentStarts {
        host: usize,
    },
    Restart,
    /// Somebody pins a step, forgets one or collects garbage.
    Housekeeping,
    /// Ends the simulation if nothing waits.
    End,
}

pub(super) struct Cluster {
    setup: Setup,
    random: Random,
    now_ms: u64,
    queue: BTreeMap<(u64, u64), Happening>,
    order: u64,
    hosts: Vec<Host>,
    pub store: SimStore,
    session: Id,
    attempt: u64,
    next_step: u64,
    is_restarting: bool,
    pub happened: Happened,
    pub requests: u64,
}

/// When faults end, the job ends, and the simulation ends.
const FAULTS_END_MS: u64 = 20_000;
const JOB_ENDS_MS: u64 = 25_000;
const END_MS: u64 = 90_000;

impl Cluster {
    pub(super) fn new(seed: u64, setup: Setup) -> Self {
        let mut cluster = Self {
            setup,
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0xca5c),
            now_ms: 0,
            queue: BTreeMap::new(),
            order: 0,
            hosts: Vec::new(),
            store: SimStore::default(),
            session: Id([0; 16]),
            attempt: 0,
            next_step: 1,
            is_restarting: false,
            happened: Happened::default(),
            requests: 0,
        };
        cluster.restart();
        cluster.at(500, Happening::Fault);
        cluster.at(500, Happening::Housekeeping);
        cluster.at(JOB_ENDS_MS + 8000, Happening::End);
        cluster
    }

    pub(super) fn violation(self) -> Option<String> {
        self.store.violation
    }

    /// Runs until the end, or until an invariant is violated.
    pub(super) fn run(&mut self) {
        while let Some(((now_ms, _), happening)) = self.queue.pop_first() {
            if now_ms > END_MS || self.store.violation.is_some() {
                break;
            }
            self.now_ms = now_ms;
            self.happen(happening);
        }
        if self.store.violation.is_none() {
            self.store.check_progress(self.session, self.setup.world());
        }
    }

    fn at(&mut self, delay_ms: u64, happening: Happening) {
        self.order += 1;
        self.queue.insert((self.now_ms + delay_ms, self.order), happening);
    }

    fn id(&mut self) -> Id {
        Id::from_hex(&format!("{:032x}", self.random.next())).expect("32 digits")
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Step => self.step(),
            Happening::Copy { host, key } => self.copy(host, key),
            Happening::Tick { host, incarnation } => self.tick(host, incarnation),
            Happening::Arrives { host, incarnation, task, query, is_answered } => self.arrive(host, incarnation, task, &query, is_answered),
            Happening::Answered { host, incarnation, task, answer } => {
                let found = self.hosts.get_mut(host).filter(|found| found.is_up && found.incarnation == incarnation);
                if let Some(task_of_host) = found.and_then(|found| found.tasks.remove(&task)) {
                    self.go_on(host, task, task_of_host, answer);
                }
            }
            Happening::Fault => self.fault(),
            Happening::AgentStarts { host } => self.start_agent(host),
            Happening::Restart => self.restart(),
            Happening::Housekeeping => self.housekeep(),
            Happening::End => match self.store.waiting(self.session, self.setup.world()) {
                None => self.queue.clear(),
                Some(_) => self.at(1000, Happening::End),
            },
        }
    }

    // The job.

    /// Starts the job: in a new session, from the newest step in the store.
    fn restart(&mut self) {
        self.is_restarting = false;
        self.session = self.id();
        (self.attempt, self.next_step) = (0, self.store.newest_step() + 1);
        self.happened.sessions += 1;
        for host in 0..self.hosts.len() {
            self.leave_old_session(host);
        }
        let known = self.store.log.len() as u64;
        for place in 0..self.setup.hosts {
            let clock = Clock { offset_ms: self.random.below(100_000), permille: 800 + self.random.below(450) };
            let host = self.hosts.len();
            self.hosts.push(Host::new(place, self.session, known, clock));
            self.at(0, Happening::Tick { host, incarnation: 0 });
            if self.random.one_in(6) {
                self.cut_off(host);
            }
            if place == 0 {
                self.apply(host, Event::Begin { known });
            }
        }
        self.queue.retain(|_, happening| !matches!(happening, Happening::Step));
        self.at(300, Happening::Step);
    }

    /// The trainers of a host are gone. Its agent ends, unless it hears nothing of the new start.
    fn leave_old_session(&mut self, host: usize) {
        let (now_ms, stays) = (self.now_ms, self.random.one_in(3));
        let Some(found) = self.hosts.get_mut(host).filter(|found| found.trains) else { return };
        found.trains = false;
        if found.cut_off_until <= now_ms && !stays {
            found.kill_agent();
            found.copies.clear();
        }
    }

    fn step(&mut self) {
        if self.now_ms > JOB_ENDS_MS || self.is_restarting {
            return;
        }
        let interval = 600 + self.random.below(600);
        self.at(interval, Happening::Step);
        let newest = self.store.newest_step();
        if newest > 2 && self.now_ms < FAULTS_END_MS && self.random.one_in(20) {
            self.attempt += 1;
            self.next_step = newest - self.random.below(2);
            self.happened.returns += 1;
        }
        let key = StepKey { attempt: self.attempt, step: self.next_step };
        self.next_step += 1;
        for host in 0..self.hosts.len() {
            let jitter = self.random.below(300);
            let Some(found) = self.hosts.get_mut(host).filter(|found| found.trains) else { continue };
            let slow = if found.slow_until > self.now_ms { jitter * 8 } else { jitter };
            found.last_copy_ms = (self.now_ms + slow).max(found.last_copy_ms + 1);
            let delay = found.last_copy_ms - self.now_ms;
            self.at(delay, Happening::Copy { host, key });
        }
    }

    fn copy(&mut self, host: usize, key: StepKey) {
        let Some(found) = self.hosts.get_mut(host).filter(|found| found.trains) else { return };
        // Without a free slot, the save is skipped.
        if found.copies.len() < 2 {
            found.copies.insert(key);
            if found.is_up {
                self.apply(host, Event::Copied(key));
            }
        }
    }

    fn tick(&mut self, host: usize, incarnation: u32) {
        let delay = 150 + self.random.below(100);
        let Some(found) = self.hosts.get(host).filter(|found| found.is_up && found.incarnation == incarnation) else { return };
        if !found.protocol.is_ended() {
            let now_ms = found.now_ms(self.now_ms);
            self.apply(host, Event::Tick { now_ms });
            self.at(delay, Happening::Tick { host, incarnation });
        }
    }

    // Faults.

    fn fault(&mut self) {
        if self.now_ms > FAULTS_END_MS {
            return;
        }
        let pause = 300 + self.random.below(3000);
        self.at(pause, Happening::Fault);
        let living: Vec<usize> = (0..self.hosts.len()).filter(|host| self.hosts[*host].is_up || self.hosts[*host].trains).collect();
        if living.is_empty() {
            return;
        }
        // The leader is the most interesting victim.
        let leader = living.iter().copied().find(|host| self.hosts[*host].protocol.leads() && self.hosts[*host].session == self.session);
        let any = living[self.random.below(living.len() as u64) as usize];
        let host = leader.filter(|_| self.random.one_in(2)).unwrap_or(any);
        match self.random.below(10) {
            0 => self.kill_host(host),
            1 => self.schedule_restart(),
            2..=4 => self.kill_agent(host),
            5..=7 => self.cut_off(host),
            _ => self.hosts[host].slow_until = self.now_ms + 1000 + self.random.below(6000),
        }
    }

    fn housekeep(&mut self) {
        let pause = 20 + self.random.below(400);
        let entry = Entry { token: self.random.next(), writer: Id([0; 16]), change: Change::Other };
        self.store.create(self.store.log.len() + 1, &entry);
        if self.now_ms < FAULTS_END_MS {
            self.at(pause, Happening::Housekeeping);
        }
    }

    fn schedule_restart(&mut self) {
        if !self.is_restarting {
            self.is_restarting = true;
            let delay = 500 + self.random.below(3000);
            self.at(delay, Happening::Restart);
        }
    }

    /// A host is lost with its memory. Its job starts again.
    fn kill_host(&mut self, host: usize) {
        self.happened.host_deaths += 1;
        let found = &mut self.hosts[host];
        found.kill_agent();
        found.copies.clear();
        if std::mem::take(&mut found.trains) {
            self.schedule_restart();
        }
    }

    fn kill_agent(&mut self, host: usize) {
        if self.hosts[host].is_up {
            self.happened.agent_deaths += 1;
            self.hosts[host].kill_agent();
            let delay = 100 + self.random.below(3000);
            self.at(delay, Happening::AgentStarts { host });
        }
    }

    fn start_agent(&mut self, host: usize) {
        let found = &mut self.hosts[host];
        if found.is_up || !found.trains {
            return;
        }
        found.start_agent();
        let (incarnation, copies, known) = (found.incarnation, found.copies.clone(), found.known);
        // An opening that the earlier agent did not finish is tried again.
        let begins = found.place == 0;
        self.apply(host, Event::Rejoin);
        if begins {
            self.apply(host, Event::Begin { known });
        }
        copies.into_iter().for_each(|key| self.apply(host, Event::Copied(key)));
        self.at(0, Happening::Tick { host, incarnation });
    }

    fn cut_off(&mut self, host: usize) {
        self.happened.partitions += 1;
        self.hosts[host].cut_off_until = self.now_ms + 300 + self.random.below(8000);
    }

    // Requests.

    /// Sends a request of a task.
    fn ask(&mut self, host: usize, task: u64, state: Task, query: Query) {
        self.requests += 1;
        let found = &mut self.hosts[host];
        found.tasks.insert(task, state);
        let (incarnation, is_slow) = (found.incarnation, found.slow_until > self.now_ms);
        let delay = (2 + self.random.below(60)) * if is_slow { 15 } else { 1 };
        let is_answered = !self.random.one_in(60);
        if self.random.one_in(60) {
            let timeout = 200 + self.random.below(800);
            self.at(timeout, Happening::Answered { host, incarnation, task, answer: Answer::Lost });
        } else {
            self.at(delay, Happening::Arrives { host, incarnation, task, query, is_answered });
        }
    }

    fn new_task(&mut self, host: usize, state: Task, query: Query) {
        self.order += 1;
        self.ask(host, self.order, state, query);
    }

    /// A request arrives at the store. Its sender may be dead by now.
    fn arrive(&mut self, host: usize, incarnation: u32, task: u64, query: &Query, is_answered: bool) {
        let is_cut_off = self.hosts[host].cut_off_until > self.now_ms;
        let answer = if is_cut_off { Answer::Lost } else { self.execute(host, query) };
        let answer = match answer {
            Answer::Written if !is_answered => {
                self.happened.lost_after_effect += 1;
                Answer::Lost
            }
            answer if is_answered => answer,
            _ => Answer::Lost,
        };
        let delay = if matches!(answer, Answer::Lost) { 200 + self.random.below(800) } else { 1 + self.random.below(30) };
        self.at(delay, Happening::Answered { host, incarnation, task, answer });
    }

    fn execute(&mut self, host: usize, query: &Query) -> Answer {
        let session = self.hosts[host].session;
        let name = |key: StepKey| StepName { session, key };
        let shared = match self.setup.mistake {
            Mistake::ReceiptsWithoutSession => Id([0; 16]),
            _ => session,
        };
        let receipts_of = |key: StepKey| StepName { session: shared, key };
        match query {
            Query::ReadLog { from } => Answer::Entries(*from, self.store.log.get(from - 1..).unwrap_or_default().to_vec()),
            Query::Survey => {
                let of_session = self.store.receipts_of(shared);
                let mut listed: Vec<(StepKey, BTreeSet<u32>)> =
                    of_session.map(|(found, ranks)| (found.key, ranks.keys().copied().collect())).collect();
                // Listings may lag.
                if self.random.one_in(4)
                    && let Some((_, ranks)) = listed.last_mut()
                {
                    ranks.pop_last();
                }
                Answer::Listed(listed)
            }
            Query::GetParent(key) => Answer::Parent(self.store.parents.get(&name(*key)).copied()),
            Query::PutParent(key, parent) => match self.store.parents.contains_key(&name(*key)) {
                true => Answer::Exists,
                false => {
                    self.store.parents.insert(name(*key), *parent);
                    Answer::Written
                }
            },
            Query::PutReceipt { key, rank, receipt } => {
                let of_step = self.store.receipts.entry(receipts_of(*key)).or_default();
                match of_step.contains_key(rank) {
                    true => Answer::Exists,
                    false => {
                        of_step.insert(*rank, *receipt);
                        Answer::Written
                    }
                }
            }
            Query::GetReceipts(key) => Answer::Receipts(
                self.store.receipts.get(&receipts_of(*key)).map(|ranks| ranks.values().copied().collect()).unwrap_or_default(),
            ),
            Query::PutEntry { number, entry } => match self.store.create(*number, entry) {
                true => {
                    match &entry.change {
                        Change::Added { .. } => self.happened.commits += 1,
                        Change::Opened(leader) => self.happened.takeovers += u64::from(leader.term > 1),
                        Change::Other => {}
                    }
                    Answer::Written
                }
                false => {
                    self.happened.lost_numbers += 1;
                    Answer::Exists
                }
            },
        }
    }

    // The driver of a host.

    /// Applies an event to a host, and performs the actions.
    fn apply(&mut self, host: usize, event: Event) {
        let actions = self.hosts[host].protocol.apply(event);
        actions.into_iter().for_each(|action| self.perform(host, action));
    }

    fn perform(&mut self, host: usize, action: Action) {
        let (session, from) = (self.hosts[host].session, self.hosts[host].read + 1);
        match action {
            Action::FixParent(key) => self.new_task(host, Task::FixParent(key), Query::ReadLog { from }),
            Action::Upload { key, parent } => self.upload(host, key, parent, 0),
            Action::ReadLog => self.new_task(host, Task::ReadLog, Query::ReadLog { from }),
            Action::Survey => self.new_task(host, Task::Survey, Query::Survey),
            Action::Open { leader } => {
                let writer = self.id();
                let append = Append { leader, key: None, parts: Arc::default(), writer, sent: None };
                self.new_task(host, Task::Append(append), Query::ReadLog { from });
            }
            Action::Commit { leader, key } => {
                let writer = self.hosts[host].writer.unwrap_or(Id([0; 16]));
                let append = Append { leader, key: Some(key), parts: Arc::default(), writer, sent: None };
                self.new_task(host, Task::Append(append), Query::GetReceipts(key));
            }
            Action::Durable(key) => {
                self.hosts[host].copies.remove(&key);
                self.store.check_durable(StepName { session, key });
            }
            Action::GiveUp(key) => {
                self.hosts[host].copies.remove(&key);
                self.happened.given_up += 1;
                self.store.check_given_up(StepName { session, key });
            }
            Action::Stop => {
                self.hosts[host].copies.clear();
                self.happened.ended += 1;
                // The trainers fail, and the job starts again.
                if self.hosts[host].trains {
                    self.schedule_restart();
                }
            }
        }
    }

    /// Uploads the part of a rank, the number of which counts on its host.
    fn upload(&mut self, host: usize, key: StepKey, parent: Option<Id>, rank: u32) {
        let found = &self.hosts[host];
        let parent = parent.filter(|parent| found.snapshots.contains(parent));
        let receipt = Receipt { parent, origin: StepName { session: found.session, key } };
        let query = Query::PutReceipt { key, rank: found.place * self.setup.ranks_per_host + rank, receipt };
        self.new_task(host, Task::Upload { key, parent, rank }, query);
    }

    /// Continues a task with an answer.
    fn go_on(&mut self, host: usize, task: u64, state: Task, answer: Answer) {
        if let Answer::Entries(from, entries) = &answer {
            self.hosts[host].follow(*from, entries);
        }
        match (state, answer) {
            (Task::ReadLog, Answer::Entries(..)) => {
                let view = self.hosts[host].view();
                self.apply(host, Event::LogRead(view));
            }
            (Task::ReadLog, _) => self.apply(host, Event::Failed(Request::ReadLog)),
            (Task::Survey, Answer::Listed(listed)) => {
                let own = self.hosts[host].place * self.setup.ranks_per_host;
                let own = own..own + self.setup.ranks_per_host;
                let world = self.setup.world();
                let found = listed.into_iter().map(|(key, ranks)| SurveyedStep {
                    key,
                    is_complete: ranks.len() == world as usize,
                    has_ours: own.clone().all(|rank| ranks.contains(&rank)),
                });
                self.apply(host, Event::Surveyed(found.collect()));
            }
            (Task::Survey, _) => self.apply(host, Event::Failed(Request::Survey)),
            (Task::FixParent(key), answer) => self.fix_parent(host, task, key, answer),
            (Task::Upload { key, parent, rank }, Answer::Written | Answer::Exists) => {
                if rank + 1 < self.setup.ranks_per_host {
                    self.upload(host, key, parent, rank + 1);
                } else {
                    self.hosts[host].copies.remove(&key);
                    self.apply(host, Event::Uploaded(key));
                }
            }
            (Task::Upload { key, parent, rank }, _) => self.upload(host, key, parent, rank),
            (Task::Append(append), answer) => self.append(host, task, append, answer),
        }
    }

    fn fix_parent(&mut self, host: usize, task: u64, key: StepKey, answer: Answer) {
        let newest = self.hosts[host].snapshots.last().copied();
        match answer {
            Answer::Entries(..) if self.setup.mistake == Mistake::ParentByEachHost => {
                self.apply(host, Event::ParentFixed { key, parent: newest });
            }
            Answer::Entries(..) | Answer::Exists | Answer::Lost => self.ask(host, task, Task::FixParent(key), Query::GetParent(key)),
            Answer::Parent(Some(Some(parent))) if !self.hosts[host].snapshots.contains(&parent) => {
                // Committed after this host read the log. Half of the hosts write whole chunks instead.
                match self.random.one_in(2) {
                    true => self.apply(host, Event::ParentFixed { key, parent: Some(parent) }),
                    false => {
                        let from = self.hosts[host].read + 1;
                        self.ask(host, task, Task::FixParent(key), Query::ReadLog { from });
                    }
                }
            }
            Answer::Parent(Some(parent)) => self.apply(host, Event::ParentFixed { key, parent }),
            Answer::Parent(None) => {
                let parent = newest.filter(|_| !self.random.one_in(4));
                self.ask(host, task, Task::FixParent(key), Query::PutParent(key, parent));
            }
            // The parent that this host chose.
            _ => self.ask(host, task, Task::FixParent(key), Query::GetParent(key)),
        }
    }

    fn append(&mut self, host: usize, task: u64, mut append: Append, answer: Answer) {
        let from = self.hosts[host].read + 1;
        match answer {
            Answer::Receipts(parts) => {
                let parents: BTreeSet<Id> = parts.iter().filter_map(|part| part.parent).collect();
                if parts.len() < self.setup.world() as usize {
                    self.apply(host, Event::Failed(Request::Append));
                } else if parents.len() > 1 {
                    let key = append.key.expect("only commits read receipts");
                    self.store.violate(format!("the receipts of {key:?} name {} parents", parents.len()));
                } else {
                    append.parts = parts.into();
                    self.ask(host, task, Task::Append(append), Query::ReadLog { from });
                }
            }
            Answer::Entries(..) => self.append_next(host, task, append),
            Answer::Written => self.appended(host, &append),
            Answer::Lost | Answer::Exists if append.sent.is_none() => self.apply(host, Event::Failed(Request::Append)),
            Answer::Lost | Answer::Exists => self.ask(host, task, Task::Append(append), Query::ReadLog { from }),
            Answer::Listed(_) | Answer::Parent(_) => unreachable!("an append asks for neither"),
        }
    }

    /// Sends the entry under the next number of the log that was just read, if the log admits the entry.
    fn append_next(&mut self, host: usize, task: u64, mut append: Append) {
        let mistake = self.setup.mistake;
        let found = &self.hosts[host];
        let was_sent = append.sent.is_some();
        if let Some((number, entry)) = &append.sent {
            let stored = self.store.log.get(number - 1).filter(|_| *number <= found.read);
            if stored.is_some_and(|stored| stored.token == entry.token) && mistake != Mistake::LostAnswerIsFailure {
                self.appended(host, &append);
                return;
            }
            if stored.is_none() {
                // Not written yet, as far as this host can see: the same bytes under the same number.
                let (number, entry) = (*number, entry.clone());
                self.ask(host, task, Task::Append(append), Query::PutEntry { number, entry });
                return;
            }
        }
        if mistake == Mistake::LateBeginning && append.leader.term == 1 {
            append.leader.after = found.read as u64;
        }
        let admitted = match append.key {
            None => found.leadership.may_open(append.leader),
            Some(key) => found.leadership.may_add(append.writer, append.leader, key.step),
        };
        let is_unchecked = was_sent && matches!(mistake, Mistake::FenceCheckedOnce | Mistake::LostAnswerIsFailure);
        if admitted.is_err() && !is_unchecked {
            let view = found.view();
            self.apply(host, Event::Refused(view));
            return;
        }
        let number = found.read + 1;
        let change = match append.key {
            None => Change::Opened(append.leader),
            Some(key) => Change::Added { snapshot: self.id(), leader: append.leader, key, parts: append.parts.clone() },
        };
        let entry = Entry { token: self.random.next(), writer: append.writer, change };
        if append.key.is_none() {
            // Noted on disk before the entry is sent.
            self.hosts[host].led_as = Some(append.writer);
        }
        append.sent = Some((number, entry.clone()));
        self.ask(host, task, Task::Append(append), Query::PutEntry { number, entry });
    }

    /// The entry that was sent is in the log.
    fn appended(&mut self, host: usize, append: &Append) {
        let found = &mut self.hosts[host];
        if let Some((number, entry)) = &append.sent {
            found.follow(*number, std::slice::from_ref(entry));
        }
        let view = found.view();
        match append.key {
            None => {
                found.writer = Some(append.writer);
                self.apply(host, Event::Opened { leader: append.leader, view });
            }
            Some(_) => self.apply(host, Event::Committed(view)),
        }
    }
}
