//! A host of a simulation: the protocol, the states in its memory, what it has read of the log, and its requests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tensorcask::session::Leadership;
use tensorcask::wire::{Id, Leader, SessionStep};

use super::event::LogView;
use super::protocol::{HostOptions, HostProtocol};
use super::simulated_store::{Change, Entry, Receipt};

/// A request to the store.
#[derive(Debug, Clone)]
pub(super) enum Query {
    ReadLog { from: usize },
    Survey,
    GetParent(SessionStep),
    PutParent(SessionStep, Option<Id>),
    PutReceipt { key: SessionStep, rank: u32, receipt: Receipt },
    GetReceipts(SessionStep),
    PutEntry { number: usize, entry: Entry },
}

/// An answer of the store.
#[derive(Debug, Clone)]
pub(super) enum Answer {
    /// Entries from this number on.
    Entries(usize, Vec<Entry>),
    /// Ranks with a receipt, by step, and ranks that have ended.
    Listed(Vec<(SessionStep, BTreeSet<u32>)>, BTreeSet<u32>),
    Parent(Option<Option<Id>>),
    Receipts(Vec<Receipt>),
    Written,
    Exists,
    /// No answer came. The request may have taken effect.
    Lost,
}

/// Work of a host that takes several requests.
#[derive(Debug, Clone)]
pub(super) enum Task {
    ReadLog,
    Survey,
    FixParent(SessionStep),
    Upload { key: SessionStep, parent: Option<Id>, rank: u32 },
    Append(Box<Append>),
}

/// An entry on its way into the log.
#[derive(Debug, Clone)]
pub(super) struct Append {
    pub leader: Leader,
    /// The step to commit; `None` for `opened`.
    pub key: Option<SessionStep>,
    pub parts: Arc<[Receipt]>,
    pub writer: Id,
    /// The entry that was sent, and its number.
    pub sent: Option<(usize, Entry)>,
}

pub(super) struct Host {
    /// Position in the cluster, and number of the first rank.
    pub place: u32,
    pub session: Id,
    pub known: u64,
    pub protocol: HostProtocol,
    /// Whether the agent runs.
    pub is_up: bool,
    /// Whether the trainers of the current session are on this host.
    pub trains: bool,
    pub incarnation: u32,
    /// States in memory.
    pub copies: BTreeSet<SessionStep>,
    pub last_copy_ms: u64,
    /// Until when the store cannot be reached.
    pub cut_off_until: u64,
    /// Until when requests are slow.
    pub slow_until: u64,
    pub clock: Clock,
    pub read: usize,
    pub leadership: Leadership,
    pub steps: Vec<(u64, u64)>,
    pub snapshots: Vec<Id>,
    pub writer: Option<Id>,
    pub previous_writer: Option<Id>,
    pub tasks: BTreeMap<u64, Task>,
    /// The log as the request before the last has read it.
    pub former_view: LogView,
}

/// A clock that runs fast or slow, from any beginning.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    pub offset_ms: u64,
    pub permille: u64,
}

impl Clock {
    fn now_ms(self, time_ms: u64) -> u64 {
        self.offset_ms + time_ms * self.permille / 1000
    }
}

fn options(session: Id, known: u64, position: u32, previous_writer: Option<Id>) -> HostOptions {
    HostOptions { session, after: Some(known), position, patience_ms: PATIENCE_MS, previous_writer }
}

/// Shortest time after which a host looks for the cause of a missing commit.
const PATIENCE_MS: u64 = 1500;

impl Host {
    pub(super) fn new(place: u32, session: Id, known: u64, clock: Clock, now_ms: u64) -> Self {
        Self {
            place,
            session,
            known,
            protocol: HostProtocol::new(options(session, known, place, None), clock.now_ms(now_ms)),
            is_up: true,
            trains: true,
            incarnation: 0,
            copies: BTreeSet::new(),
            last_copy_ms: 0,
            cut_off_until: 0,
            slow_until: 0,
            clock,
            read: 0,
            leadership: Leadership::default(),
            steps: Vec::new(),
            snapshots: Vec::new(),
            writer: None,
            previous_writer: None,
            tasks: BTreeMap::new(),
            former_view: LogView::default(),
        }
    }

    /// The agent dies: only copies and notes on disk stay.
    pub(super) fn kill_agent(&mut self) {
        (self.is_up, self.writer) = (false, None);
        self.incarnation += 1;
        self.tasks.clear();
        (self.read, self.leadership) = (0, Leadership::default());
        self.steps.clear();
        self.snapshots.clear();
        self.former_view = LogView::default();
    }

    /// Another agent begins.
    pub(super) fn start_agent(&mut self, now_ms: u64) {
        self.is_up = true;
        let options = options(self.session, self.known, self.place, self.previous_writer);
        self.protocol = HostProtocol::new(options, self.now_ms(now_ms));
    }

    /// Follows entries of the log from number `from` on.
    pub(super) fn follow(&mut self, from: usize, entries: &[Entry]) {
        for (number, entry) in (from..).zip(entries) {
            if number != self.read + 1 {
                continue;
            }
            self.read = number;
            match &entry.change {
                Change::Opened(leader) => self.leadership.on_opened(entry.writer, number as u64, Some(*leader)),
                Change::Added { snapshot, key, .. } => {
                    self.leadership.on_added(entry.writer, number as u64, key.step);
                    self.steps.push((number as u64, key.step));
                    self.snapshots.push(*snapshot);
                }
                Change::Other => {}
            }
        }
    }

    pub(super) fn view(&self) -> LogView {
        LogView::from_steps(self.read as u64, &self.leadership, self.session, self.steps.iter().copied())
    }

    /// Time of this host at a time of the simulation.
    pub(super) fn now_ms(&self, time_ms: u64) -> u64 {
        self.clock.now_ms(time_ms)
    }
}
