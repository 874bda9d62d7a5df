//! The driver of the hosts of a simulation: performs the actions of their protocol by requests, and reports the outcomes.

use std::collections::BTreeSet;
use std::sync::Arc;

use tensorcask::wire::{Id, SessionStep};

use super::event::{Action, Event, Request, SurveyedStep};
use super::simulated_cluster::Cluster;
use super::simulated_host::{Answer, Append, Query, Task};
use super::simulated_setup::Mistake;
use super::simulated_store::{Change, Entry, Receipt, StepName};

impl Cluster {
    /// Applies an event to a host, and performs the actions.
    pub(super) fn apply(&mut self, host: usize, event: Event) {
        let actions = self.hosts[host].protocol.apply(event);
        actions.into_iter().for_each(|action| self.perform(host, action));
    }

    fn perform(&mut self, host: usize, action: Action) {
        let session = self.hosts[host].session;
        let from = self.hosts[host].read + 1;
        match action {
            Action::FixParent(key) => self.new_task(host, Task::FixParent(key), Query::ReadLog { from }),
            Action::Upload { key, .. } if self.random.one_in(12 * u64::from(self.setup.hosts)) => {
                self.hosts[host].copies.remove(&key);
                self.counts.count("dropped");
                self.apply(host, Event::Dropped(key));
            }
            Action::Upload { key, parent } => self.upload(host, key, parent, 0),
            Action::ReadLog => self.new_task(host, Task::ReadLog, Query::ReadLog { from }),
            Action::Survey => self.new_task(host, Task::Survey, Query::Survey),
            Action::Open { leader } => {
                let writer = self.id();
                let append = Box::new(Append { leader, key: None, parts: Arc::default(), writer, sent: None });
                self.new_task(host, Task::Append(append), Query::ReadLog { from });
            }
            Action::Commit { leader, key } => {
                let writer = self.hosts[host].writer.unwrap_or(Id([0; 16]));
                let append = Box::new(Append { leader, key: Some(key), parts: Arc::default(), writer, sent: None });
                self.new_task(host, Task::Append(append), Query::GetReceipts(key));
            }
            Action::Durable(key) => {
                self.hosts[host].copies.remove(&key);
                self.store.check_durable(StepName { session, key });
            }
            Action::GiveUp(key) => {
                self.hosts[host].copies.remove(&key);
                self.counts.count("given_up");
                self.store.check_given_up(StepName { session, key });
            }
            Action::Stop => {
                self.hosts[host].copies.clear();
                self.counts.count("ended");
                // The trainers fail, and the job starts again.
                if self.hosts[host].trains {
                    self.schedule_restart();
                }
            }
        }
    }

    /// Uploads the part of a rank, the number of which counts on its host.
    fn upload(&mut self, host: usize, key: SessionStep, parent: Option<Id>, rank: u32) {
        let found = &self.hosts[host];
        let parent = parent.filter(|parent| found.snapshots.contains(parent));
        let is_unusable = self.random.one_in(20 * u64::from(self.setup.world()));
        let receipt = Receipt { parent, origin: StepName { session: found.session, key }, is_unusable };
        let query = Query::PutReceipt { key, rank: found.place * self.setup.ranks_per_host + rank, receipt };
        self.new_task(host, Task::Upload { key, parent, rank }, query);
    }

    /// Continues a task with an answer.
    pub(super) fn continue_task(&mut self, host: usize, task: u64, state: Task, answer: Answer) {
        if let Answer::Entries(from, entries) = &answer {
            self.hosts[host].follow(*from, entries);
        }
        match (state, answer) {
            (Task::ReadLog, Answer::Entries(..)) => {
                let view = self.hosts[host].view();
                let former = std::mem::replace(&mut self.hosts[host].former_view, view.clone());
                // Requests may be answered in another order.
                let is_late = self.random.one_in(6);
                self.apply(host, Event::LogRead(if is_late { former } else { view }));
            }
            (Task::ReadLog, _) => self.apply(host, Event::Failed(Request::ReadLog)),
            (Task::Survey, Answer::Listed(listed, ended)) => {
                let own = self.hosts[host].place * self.setup.ranks_per_host;
                let own = own..own + self.setup.ranks_per_host;
                let world = self.setup.world();
                let found = listed.into_iter().map(|(key, ranks)| SurveyedStep {
                    key,
                    is_complete: ranks.len() == world as usize,
                    has_ours: own.clone().all(|rank| ranks.contains(&rank)),
                    is_hopeless: ended.iter().any(|rank| !ranks.contains(rank)),
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

    fn fix_parent(&mut self, host: usize, task: u64, key: SessionStep, answer: Answer) {
        let newest = self.hosts[host].snapshots.last().copied();
        match answer {
            Answer::Entries(..) if self.setup.mistake == Mistake::ParentByEachHost => {
                self.apply(host, Event::ParentFixed { key, parent: newest });
            }
            Answer::Entries(..) | Answer::Exists | Answer::Lost => self.send(host, task, Task::FixParent(key), Query::GetParent(key)),
            Answer::Parent(Some(Some(parent))) if !self.hosts[host].snapshots.contains(&parent) => {
                // Committed after this host read the log. Half of the hosts write whole chunks instead.
                match self.random.one_in(2) {
                    true => self.apply(host, Event::ParentFixed { key, parent: Some(parent) }),
                    false => {
                        let from = self.hosts[host].read + 1;
                        self.send(host, task, Task::FixParent(key), Query::ReadLog { from });
                    }
                }
            }
            Answer::Parent(Some(parent)) => self.apply(host, Event::ParentFixed { key, parent }),
            Answer::Parent(None) => {
                let parent = newest.filter(|_| !self.random.one_in(4));
                self.send(host, task, Task::FixParent(key), Query::PutParent(key, parent));
            }
            // The parent that this host chose.
            _ => self.send(host, task, Task::FixParent(key), Query::GetParent(key)),
        }
    }

    fn append(&mut self, host: usize, task: u64, mut append: Box<Append>, answer: Answer) {
        let from = self.hosts[host].read + 1;
        match answer {
            Answer::Receipts(parts) => {
                let parents: BTreeSet<Id> = parts.iter().filter_map(|part| part.parent).collect();
                if parts.len() < self.setup.world() as usize {
                    self.apply(host, Event::Failed(Request::Append));
                } else if let Some(key) = append.key.filter(|_| parts.iter().any(|part| part.is_unusable)) {
                    self.counts.count("impossible");
                    self.apply(host, Event::Impossible(key));
                } else if parents.len() > 1 {
                    let key = append.key.expect("only commits read receipts");
                    self.store.violate(format!("the receipts of {key:?} name {} parents", parents.len()));
                } else {
                    append.parts = parts.into();
                    self.send(host, task, Task::Append(append), Query::ReadLog { from });
                }
            }
            Answer::Entries(..) => self.append_next(host, task, append),
            Answer::Written => self.appended(host, &append),
            Answer::Lost | Answer::Exists if append.sent.is_none() => self.apply(host, Event::Failed(Request::Append)),
            Answer::Lost | Answer::Exists => self.send(host, task, Task::Append(append), Query::ReadLog { from }),
            Answer::Listed(..) | Answer::Parent(_) => unreachable!("an append asks for neither"),
        }
    }

    /// Sends the entry under the next number of the log that was just read, if the log admits the entry.
    fn append_next(&mut self, host: usize, task: u64, mut append: Box<Append>) {
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
                let number = *number;
                let entry = entry.clone();
                self.send(host, task, Task::Append(append), Query::PutEntry { number, entry });
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
            self.hosts[host].previous_writer = Some(append.writer);
        }
        append.sent = Some((number, entry.clone()));
        self.send(host, task, Task::Append(append), Query::PutEntry { number, entry });
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
