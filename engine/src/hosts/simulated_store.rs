//! The store of a simulation: a log with put if absent, parents and receipts. Checks each entry as it is created.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tensorcask::session::Leadership;
use tensorcask::wire::{Id, Leader, SessionStep};

/// A step of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StepName {
    pub session: Id,
    pub key: SessionStep,
}

/// A receipt, and where its bytes really come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Receipt {
    pub parent: Option<Id>,
    pub origin: StepName,
    /// Whether the parts of the step make no snapshot because of it.
    pub is_unusable: bool,
}

/// An entry of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub token: u64,
    pub writer: Id,
    pub change: Change,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    Opened(Leader),
    Added {
        snapshot: Id,
        leader: Leader,
        key: SessionStep,
        parts: Arc<[Receipt]>,
    },
    /// A pin, or another entry that fences nobody.
    Other,
}

#[derive(Debug, Default)]
pub(super) struct SimStore {
    pub log: Vec<Entry>,
    pub parents: BTreeMap<StepName, Option<Id>>,
    pub receipts: BTreeMap<StepName, BTreeMap<u32, Receipt>>,
    /// The log as any reader would read it.
    leadership: Leadership,
    snapshots: BTreeSet<Id>,
    committed: BTreeSet<StepName>,
    given_up: BTreeSet<StepName>,
    ended: BTreeSet<Id>,
    session: Option<Id>,
    /// The first violated invariant.
    pub violation: Option<String>,
}

impl SimStore {
    pub(super) fn violate(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    /// Creates the entry with this number, from 1, unless it exists; returns whether it did.
    pub(super) fn create(&mut self, number: usize, entry: &Entry) -> bool {
        if number <= self.log.len() {
            return false;
        }
        if number > self.log.len() + 1 {
            self.violate(format!("entry {number} leaves a gap after {}", self.log.len()));
        }
        match &entry.change {
            Change::Opened(leader) => {
                if self.session != Some(leader.session) {
                    self.ended.extend(self.session);
                    if self.ended.contains(&leader.session) {
                        self.violate(format!("session {} came back", leader.session));
                    }
                    self.session = Some(leader.session);
                }
                if let Err(refusal) = self.leadership.may_open(*leader) {
                    self.violate(format!("entry {number}, {leader:?}, is not admitted: {refusal}"));
                }
                self.leadership.on_opened(entry.writer, number as u64, Some(*leader));
            }
            Change::Added { snapshot, leader, key, parts } => {
                self.check_added(&StepName { session: leader.session, key: *key }, parts);
                if let Err(refusal) = self.leadership.may_add(entry.writer, *leader, key.step) {
                    self.violate(format!("entry {number}, {key:?} by {leader:?}, is not admitted: {refusal}"));
                }
                self.leadership.on_added(entry.writer, number as u64, key.step);
                self.snapshots.insert(*snapshot);
            }
            Change::Other => {}
        }
        self.log.push(entry.clone());
        true
    }

    fn check_added(&mut self, name: &StepName, parts: &[Receipt]) {
        if self.session != Some(name.session) {
            self.violate(format!("{name:?} was added after its session had ended"));
        }
        if !self.committed.insert(*name) {
            self.violate(format!("{name:?} was committed twice"));
        }
        if self.given_up.contains(name) {
            self.violate(format!("{name:?} was committed after a host had given it up"));
        }
        if parts.iter().any(|part| part.origin != *name) {
            self.violate(format!("{name:?} mixes states of other saves: {parts:?}"));
        }
        if parts.iter().any(|part| part.is_unusable) {
            self.violate(format!("{name:?} has parts that make no snapshot"));
        }
        let parents: BTreeSet<Id> = parts.iter().filter_map(|part| part.parent).collect();
        if parents.len() > 1 {
            self.violate(format!("{name:?} has deltas on {} parents", parents.len()));
        }
        if !parents.is_subset(&self.snapshots) {
            self.violate(format!("{name:?} has a parent that was not committed before"));
        }
    }

    /// A host reports a step as durable.
    pub(super) fn check_durable(&mut self, name: StepName) {
        if !self.committed.contains(&name) {
            self.violate(format!("{name:?} was reported as durable, and is not committed"));
        }
    }

    /// A host reports that a step will never be committed.
    pub(super) fn check_given_up(&mut self, name: StepName) {
        if self.committed.contains(&name) {
            self.violate(format!("{name:?} was reported as given up, and is committed"));
        }
        self.given_up.insert(name);
    }

    /// The newest committed step; 0 if there is none.
    pub(super) fn newest_step(&self) -> u64 {
        let added = self.log.iter().rev().find_map(|entry| match &entry.change {
            Change::Added { key, .. } => Some(key.step),
            Change::Opened(_) | Change::Other => None,
        });
        added.unwrap_or(0)
    }

    /// Receipts of a session, by step.
    pub(super) fn receipts_of(&self, session: Id) -> impl DoubleEndedIterator<Item = (&StepName, &BTreeMap<u32, Receipt>)> {
        let name = |at: u64| StepName { session, key: SessionStep { attempt: at, step: at } };
        self.receipts.range(name(0)..=name(u64::MAX))
    }

    /// Whether a step has all its receipts, and the log has not decided about it.
    pub(super) fn is_undecided(&self, name: StepName, world: u32) -> bool {
        let leading = self.leadership.of(name.session);
        let is_passed = leading.is_some_and(|leading| (name.key.attempt, Some(name.key.step)) <= (leading.leader.attempt, leading.newest));
        self.is_complete(name, world) && !is_passed
    }

    /// A complete step of a session that the log has not decided about.
    pub(super) fn undecided(&self, session: Id, world: u32) -> Option<StepName> {
        self.receipts_of(session).map(|(name, _)| *name).find(|name| self.is_undecided(*name, world))
    }

    /// Whether a step has all its receipts.
    pub(super) fn is_complete(&self, name: StepName, world: u32) -> bool {
        self.receipts.get(&name).is_some_and(|parts| parts.len() == world as usize)
    }

    /// Whether a step lacks a receipt of one of these ranks.
    pub(super) fn lacks(&self, name: StepName, ranks: &BTreeSet<u32>) -> bool {
        ranks.iter().any(|rank| !self.receipts.get(&name).is_some_and(|parts| parts.contains_key(rank)))
    }

    /// Fails if a complete step of a session waits for ever.
    pub(super) fn check_progress(&mut self, session: Id, world: u32) {
        let Some(name) = self.undecided(session, world) else { return };
        self.violate(format!("{name:?} has all its receipts and is never committed; the leader is {:?}", self.leadership.leading()));
    }
}
