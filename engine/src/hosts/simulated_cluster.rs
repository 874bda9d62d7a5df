//! A cluster of a simulation: hosts, the store, the job, and everything that goes wrong.

use std::collections::{BTreeMap, BTreeSet};

use tensorcask::wire::{Id, SessionStep};

use super::event::Event;
use super::protocol::waiting;
use super::simulated_host::{Answer, Clock, Host, Query, Task};
use super::simulated_setup::{Mistake, Random, Setup};
use super::simulated_store::{Change, Entry, SimStore, StepName};

/// How often each thing happened.
#[derive(Debug, Clone, Default)]
pub(super) struct Counts(BTreeMap<&'static str, u64>);

impl Counts {
    pub(super) fn count(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }

    pub(super) fn add(&mut self, other: &Self) {
        other.0.iter().for_each(|(what, count)| *self.0.entry(what).or_default() += count);
    }

    /// Whether each of these things happened more often than that.
    pub(super) fn all_above(&self, things: &[&str], least: u64) -> bool {
        things.iter().all(|what| self.0.get(what).is_some_and(|count| *count > least))
    }
}

/// Something that happens at a time. A number of a host is its position in `Cluster::hosts`, which only grows.
#[derive(Debug, Clone)]
enum ScheduledEvent {
    /// The job saves a step, or returns to an older one.
    Step,
    Copy {
        host: usize,
        key: SessionStep,
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
    pub setup: Setup,
    pub random: Random,
    pub now_ms: u64,
    queue: BTreeMap<(u64, u64), ScheduledEvent>,
    order: u64,
    pub hosts: Vec<Host>,
    pub store: SimStore,
    session: Id,
    attempt: u64,
    next_step: u64,
    is_restarting: bool,
    /// Until when the store answers nobody.
    store_away_until: u64,
    pub counts: Counts,
    pub requests: u64,
}

/// When faults end, the job ends, and the simulation ends.
const FAULTS_END_MS: u64 = 20_000;
const JOB_ENDS_MS: u64 = 25_000;
const END_MS: u64 = 180_000;
/// Number of steps that a host keeps while the store is away.
const COPIES_IN_OUTAGE: usize = 20;

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
            store_away_until: 0,
            counts: Counts::default(),
            requests: 0,
        };
        cluster.restart();
        cluster.at(500, ScheduledEvent::Fault);
        cluster.at(500, ScheduledEvent::Housekeeping);
        cluster.at(JOB_ENDS_MS + 8000, ScheduledEvent::End);
        cluster
    }

    pub(super) fn violation(self) -> Option<String> {
        self.store.violation
    }

    /// Runs until the end, or until an invariant is violated.
    pub(super) fn run(&mut self) {
        while let Some(((now_ms, _), event)) = self.queue.pop_first() {
            if now_ms > END_MS || self.store.violation.is_some() {
                break;
            }
            self.now_ms = now_ms;
            self.run_event(event);
        }
        if self.store.violation.is_none() {
            self.store.check_progress(self.session, self.setup.world());
            if let Some((host, name)) = self.waiting_host() {
                self.store.violate(format!("host {host} waits for {name:?} for ever"));
            }
        }
    }

    /// Ranks of hosts of the last session that save no more, and have uploaded everything.
    fn ended_ranks(&self) -> BTreeSet<u32> {
        let is_uploading = |host: &Host| host.tasks.values().any(|task| matches!(task, Task::Upload { .. } | Task::FixParent(_)));
        let has_ended = |host: &&Host| host.trains && host.is_up && host.copies.is_empty() && !is_uploading(host);
        // By then, all copies are made.
        let hosts = self.hosts.iter().filter(|_| self.now_ms > JOB_ENDS_MS + 5000).filter(has_ended);
        hosts.flat_map(|host| (0..self.setup.ranks_per_host).map(|rank| host.place * self.setup.ranks_per_host + rank)).collect()
    }

    /// A living host of the last session that waits for a complete step, or for one that will never be.
    fn waiting_host(&self) -> Option<(u32, StepName)> {
        let living = self.hosts.iter().filter(|host| host.is_up && host.trains && !host.protocol.is_ended());
        let mut waiting = living.flat_map(|host| waiting(&host.protocol).map(|key| (host.place, StepName { session: host.session, key })));
        let ended = self.ended_ranks();
        waiting.find(|(_, name)| self.store.is_complete(*name, self.setup.world()) || self.store.lacks(*name, &ended))
    }

    fn at(&mut self, delay_ms: u64, event: ScheduledEvent) {
        self.order += 1;
        self.queue.insert((self.now_ms + delay_ms, self.order), event);
    }

    pub(super) fn id(&mut self) -> Id {
        Id::from_hex(&format!("{:032x}", self.random.next())).expect("32 digits")
    }

    fn run_event(&mut self, event: ScheduledEvent) {
        match event {
            ScheduledEvent::Step => self.step(),
            ScheduledEvent::Copy { host, key } => self.copy(host, key),
            ScheduledEvent::Tick { host, incarnation } => self.tick(host, incarnation),
            ScheduledEvent::Arrives { host, incarnation, task, query, is_answered } => {
                self.arrive(host, incarnation, task, &query, is_answered)
            }
            ScheduledEvent::Answered { host, incarnation, task, answer } => {
                let found = self.hosts.get_mut(host).filter(|found| found.is_up && found.incarnation == incarnation);
                if let Some(task_of_host) = found.and_then(|found| found.tasks.remove(&task)) {
                    self.continue_task(host, task, task_of_host, answer);
                }
            }
            ScheduledEvent::Fault => self.fault(),
            ScheduledEvent::AgentStarts { host } => self.start_agent(host),
            ScheduledEvent::Restart => self.restart(),
            ScheduledEvent::Housekeeping => self.housekeep(),
            ScheduledEvent::End => match self.store.undecided(self.session, self.setup.world()) {
                None if self.waiting_host().is_none() => self.queue.clear(),
                _ => self.at(1000, ScheduledEvent::End),
            },
        }
    }

    // The job.

    /// Starts the job: in a new session, from the newest step in the store.
    fn restart(&mut self) {
        if self.store_away_until > self.now_ms {
            self.at(self.store_away_until - self.now_ms, ScheduledEvent::Restart);
            return;
        }
        self.is_restarting = false;
        self.session = self.id();
        (self.attempt, self.next_step) = (0, self.store.newest_step() + 1);
        self.counts.count("sessions");
        for host in 0..self.hosts.len() {
            self.leave_old_session(host);
        }
        let known = self.store.log.len() as u64;
        for place in 0..self.setup.hosts {
            let clock = Clock { offset_ms: self.random.below(100_000), permille: 800 + self.random.below(450) };
            let host = self.hosts.len();
            self.hosts.push(Host::new(place, self.session, known, clock, self.now_ms));
            self.at(0, ScheduledEvent::Tick { host, incarnation: 0 });
            if self.random.one_in(6) {
                self.cut_off(host);
            }
            self.apply(host, Event::Begin { known });
        }
        self.queue.retain(|_, event| !matches!(event, ScheduledEvent::Step));
        self.at(300, ScheduledEvent::Step);
    }

    /// The trainers of a host are gone. Its agent ends, unless it hears nothing of the new start.
    fn leave_old_session(&mut self, host: usize) {
        let now_ms = self.now_ms;
        let stays = self.random.one_in(3);
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
        self.at(interval, ScheduledEvent::Step);
        let newest = self.store.newest_step();
        if newest > 2 && self.now_ms < FAULTS_END_MS && self.random.one_in(20) {
            self.attempt += 1;
            self.next_step = newest - self.random.below(2);
            self.counts.count("returns");
        }
        let key = SessionStep { attempt: self.attempt, step: self.next_step };
        self.next_step += 1;
        for host in 0..self.hosts.len() {
            let jitter = self.random.below(300);
            let Some(found) = self.hosts.get_mut(host).filter(|found| found.trains) else { continue };
            let slow = if found.slow_until > self.now_ms { jitter * 8 } else { jitter };
            found.last_copy_ms = (self.now_ms + slow).max(found.last_copy_ms + 1);
            let delay = found.last_copy_ms - self.now_ms;
            self.at(delay, ScheduledEvent::Copy { host, key });
        }
    }

    fn copy(&mut self, host: usize, key: SessionStep) {
        let Some(found) = self.hosts.get_mut(host).filter(|found| found.trains) else { return };
        // Without a free slot, the save is skipped. While the store is away, steps wait in memory.
        let room = if self.store_away_until > self.now_ms { COPIES_IN_OUTAGE } else { 2 };
        if found.copies.len() < room {
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
            self.at(delay, ScheduledEvent::Tick { host, incarnation });
        }
    }

    // Faults.

    fn fault(&mut self) {
        if self.now_ms > FAULTS_END_MS {
            return;
        }
        let pause = 300 + self.random.below(3000);
        self.at(pause, ScheduledEvent::Fault);
        let living: Vec<usize> = (0..self.hosts.len()).filter(|host| self.hosts[*host].is_up || self.hosts[*host].trains).collect();
        if living.is_empty() {
            return;
        }
        // The leader is the most interesting victim.
        let leader = living.iter().copied().find(|host| self.hosts[*host].protocol.leads() && self.hosts[*host].session == self.session);
        let any = living[self.random.below(living.len() as u64) as usize];
        let host = leader.filter(|_| self.random.one_in(2)).unwrap_or(any);
        match self.random.below(11) {
            10 => self.take_store_away(),
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
            self.at(pause, ScheduledEvent::Housekeeping);
        }
    }

    pub(super) fn schedule_restart(&mut self) {
        if !self.is_restarting {
            self.is_restarting = true;
            let delay = 500 + self.random.below(3000);
            self.at(delay, ScheduledEvent::Restart);
        }
    }

    /// A host is lost with its memory. Its job starts again.
    fn kill_host(&mut self, host: usize) {
        self.counts.count("host_deaths");
        let found = &mut self.hosts[host];
        found.kill_agent();
        found.copies.clear();
        if std::mem::take(&mut found.trains) {
            self.schedule_restart();
        }
    }

    fn kill_agent(&mut self, host: usize) {
        if self.hosts[host].is_up {
            self.counts.count("agent_deaths");
            self.hosts[host].kill_agent();
            let delay = 100 + self.random.below(3000);
            self.at(delay, ScheduledEvent::AgentStarts { host });
        }
    }

    fn start_agent(&mut self, host: usize) {
        let now_ms = self.now_ms;
        let found = &mut self.hosts[host];
        if found.is_up || !found.trains {
            return;
        }
        found.start_agent(now_ms);
        let incarnation = found.incarnation;
        let copies = found.copies.clone();
        let known = found.known;
        // An opening that the earlier agent did not finish is tried again.
        self.apply(host, Event::Rejoin);
        self.apply(host, Event::Begin { known });
        copies.into_iter().for_each(|key| self.apply(host, Event::Copied(key)));
        self.at(0, ScheduledEvent::Tick { host, incarnation });
    }

    fn cut_off(&mut self, host: usize) {
        self.counts.count("partitions");
        self.hosts[host].cut_off_until = self.now_ms + 300 + self.random.below(8000);
    }

    /// The store answers nobody for a while. The job starts again only with the store.
    fn take_store_away(&mut self) {
        self.counts.count("outages");
        self.store_away_until = self.now_ms + 300 + self.random.below(10_000);
    }

    // Requests.

    /// Sends a request of a task.
    pub(super) fn send(&mut self, host: usize, task: u64, state: Task, query: Query) {
        self.requests += 1;
        let found = &mut self.hosts[host];
        found.tasks.insert(task, state);
        let incarnation = found.incarnation;
        let is_slow = found.slow_until > self.now_ms;
        let delay = (2 + self.random.below(60)) * if is_slow { 15 } else { 1 };
        let is_answered = !self.random.one_in(60);
        if self.random.one_in(60) {
            let timeout = 200 + self.random.below(800);
            self.at(timeout, ScheduledEvent::Answered { host, incarnation, task, answer: Answer::Lost });
        } else {
            self.at(delay, ScheduledEvent::Arrives { host, incarnation, task, query, is_answered });
        }
    }

    pub(super) fn new_task(&mut self, host: usize, state: Task, query: Query) {
        self.order += 1;
        self.send(host, self.order, state, query);
    }

    /// A request arrives at the store. Its sender may be dead by now.
    fn arrive(&mut self, host: usize, incarnation: u32, task: u64, query: &Query, is_answered: bool) {
        let is_cut_off = self.hosts[host].cut_off_until.max(self.store_away_until) > self.now_ms;
        let answer = if is_cut_off { Answer::Lost } else { self.execute(host, query) };
        let answer = match answer {
            Answer::Written if !is_answered => {
                self.counts.count("lost_after_effect");
                Answer::Lost
            }
            answer if is_answered => answer,
            _ => Answer::Lost,
        };
        let delay = if matches!(answer, Answer::Lost) { 200 + self.random.below(800) } else { 1 + self.random.below(30) };
        self.at(delay, ScheduledEvent::Answered { host, incarnation, task, answer });
    }

    fn execute(&mut self, host: usize, query: &Query) -> Answer {
        let session = self.hosts[host].session;
        let name = |key: SessionStep| StepName { session, key };
        let shared = match self.setup.mistake {
            Mistake::ReceiptsWithoutSession => Id([0; 16]),
            _ => session,
        };
        let receipts_of = |key: SessionStep| StepName { session: shared, key };
        match query {
            Query::ReadLog { from } => Answer::Entries(*from, self.store.log.get(from - 1..).unwrap_or_default().to_vec()),
            Query::Survey => {
                let of_session = self.store.receipts_of(shared);
                let mut listed: Vec<(SessionStep, BTreeSet<u32>)> =
                    of_session.map(|(found, ranks)| (found.key, ranks.keys().copied().collect())).collect();
                // Listings may lag.
                if self.random.one_in(4)
                    && let Some((_, ranks)) = listed.last_mut()
                {
                    ranks.pop_last();
                }
                Answer::Listed(listed, self.ended_ranks())
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
                        Change::Added { .. } => self.counts.count("commits"),
                        Change::Opened(leader) if leader.above.is_some() => self.counts.count("gave_up_in_log"),
                        Change::Opened(leader) if leader.term == 1 && self.hosts[host].place > 0 => self.counts.count("begun_by_another"),
                        Change::Opened(leader) if leader.term > 1 => self.counts.count("takeovers"),
                        Change::Opened(_) | Change::Other => {}
                    }
                    Answer::Written
                }
                false => {
                    self.counts.count("lost_numbers");
                    Answer::Exists
                }
            },
        }
    }
}
