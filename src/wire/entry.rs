//! An entry of the log. Spec: `spec/log.md`, clause 3.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Digest, Id, seal};
use crate::version::FormatVersion;
use crate::{Error, Limits, Result};

const FORMAT: &str = "tensorcask-log";

/// Event of a log entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Event {
    /// A writer takes over the store.
    Opened {
        /// The session that the writer leads, if it commits for many hosts; `None` for an ordinary writer.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        leader: Option<Leader>,
    },
    /// A snapshot is committed.
    Added {
        /// Id of the snapshot.
        snapshot: Id,
        /// Training step of the snapshot.
        step: u64,
        /// Parent of a delta; must agree with the manifest. With it, readers know a chain from the log alone.
        parent: Option<Id>,
        /// Digest of the manifest. The manifest's path follows from step and id.
        manifest: Digest,
        /// Size of the manifest in bytes, if the entry itself holds the manifest and the casks; `None` if they are
        /// objects.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        inline: Option<u64>,
        /// Roles of the snapshot, ascending, if it comes from a store that had reduced it to them; `None` if it has all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        roles: Option<Vec<String>>,
    },
    /// Snapshots are no longer wanted. Each is kept while a chain needs it.
    Forgotten {
        /// Ids of the snapshots.
        snapshots: Vec<Id>,
    },
    /// A snapshot is pinned or unpinned. A pinned snapshot cannot be forgotten.
    Pinned {
        /// Id of the snapshot.
        snapshot: Id,
        /// Whether the snapshot is pinned from now on.
        pinned: bool,
    },
    /// Another manifest replaces the manifest of a snapshot: the same content, held by other casks.
    Compacted {
        /// Id of the snapshot.
        snapshot: Id,
        /// Parent that the snapshot still needs, if any.
        parent: Option<Id>,
        /// Digest of the new manifest. The manifest's path follows from step, id and this digest.
        manifest: Digest,
        /// Roles that remain, ascending; `None` if all roles remain.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        roles: Option<Vec<String>>,
    },
    /// No reader needs these snapshots any more. Garbage collection deletes their own objects once those are old
    /// enough.
    Collecting {
        /// Ids of the snapshots.
        snapshots: Vec<Id>,
    },
    /// Readers and writers must understand these features from now on.
    Upgraded {
        /// Features that readers and writers must understand.
        must_understand: Vec<String>,
        /// Features that writers, compaction and garbage collection must understand.
        may_ignore: Vec<String>,
    },
}

const KINDS: &[&str] = &["opened", "added", "forgotten", "pinned", "compacted", "collecting", "upgraded"];

impl Event {
    /// Name in JSON and listings.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Opened { .. } => "opened",
            Self::Added { .. } => "added",
            Self::Forgotten { .. } => "forgotten",
            Self::Pinned { .. } => "pinned",
            Self::Compacted { .. } => "compacted",
            Self::Collecting { .. } => "collecting",
            Self::Upgraded { .. } => "upgraded",
        }
    }
}

/// Leadership of a session: one host commits the steps that all hosts of a job save.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leader {
    /// Id of the session: one start of a job on all its hosts.
    pub session: Id,
    /// Number of the last log entry when the job started, 0 for an empty log. It orders the sessions of a store.
    pub after: u64,
    /// Number of the attempt that the leader commits: how often the job has returned to an older step in this session.
    pub attempt: u64,
    /// Number of the leader in its session, from 1. The highest term leads.
    pub term: u64,
    /// Steps of the attempt up to this one are given up: their receipts make no snapshot. The leader commits steps above it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub above: Option<u64>,
}

/// A job that goes on saving to a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Name of the host on which the writer runs.
    pub host: String,
    /// Number of the process there that trains or saves; 0 if it is in a container and has none there.
    pub process: u32,
    /// Number of the process that commits for it, if that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<u32>,
}

impl Job {
    /// The job of this process.
    pub fn here() -> Self {
        Self { host: host_name(), process: std::process::id(), agent: None }
    }

    /// The job of another process of this host, for which this process commits.
    pub fn of_trainer(process: u32) -> Self {
        Self { process, agent: Some(std::process::id()), ..Self::here() }
    }
}

/// Name of this host. In a container that numbers its processes anew, also the name of these numbers: the container may have the
/// name of its host, and process 7 there is another one.
#[cfg(target_os = "linux")]
fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    match std::fs::read_link("/proc/self/ns/pid") {
        Ok(numbers) if numbers.as_os_str() != NUMBERS_OF_HOST => format!("{name} ({})", numbers.display()),
        _ => name,
    }
}

/// Name of the process numbers of a Linux host itself (`PROC_PID_INIT_INO` of the kernel).
#[cfg(target_os = "linux")]
const NUMBERS_OF_HOST: &str = "pid:[4026531836]";

#[cfg(not(target_os = "linux"))]
fn host_name() -> String {
    let named = ["HOSTNAME", "COMPUTERNAME"].iter().find_map(|name| std::env::var(name).ok());
    named.unwrap_or_else(|| "unknown".to_owned())
}

/// One commit of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogEntry {
    format: String,
    version: String,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
    /// Number of the entry, also its name. The first entry is number 1.
    pub sequence: u64,
    /// Digest of the previous entry; `None` for the first.
    pub previous: Option<Digest>,
    /// Random token. With it, a writer recognises its own entry after an unclear outcome.
    pub token: Id,
    /// Id of the writer.
    pub writer: Id,
    /// The job that the writer saves for; `None` for one save by hand, for copies, and for entries of other kinds than `opened` and
    /// `added`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<Job>,
    /// Time of the commit by the writer's clock, in milliseconds since 1970.
    pub time_ms: u64,
    /// The event.
    pub event: Event,
}

impl LogEntry {
    /// Creates an entry of the current version.
    pub fn new(sequence: u64, previous: Option<Digest>, token: Id, writer: Id, time_ms: u64, event: Event) -> Self {
        Self {
            format: FORMAT.into(),
            version: FormatVersion::CURRENT.to_string(),
            must_understand: vec![],
            may_ignore: vec![],
            sequence,
            previous,
            token,
            writer,
            job: None,
            time_ms,
            event,
        }
    }

    /// Features that a reader may ignore, but a writer may not.
    pub fn may_ignore(&self) -> &[String] {
        &self.may_ignore
    }

    /// Path of entry `sequence` below the store's root.
    pub fn path_of(sequence: u64) -> String {
        format!("log/{sequence:020}.json")
    }

    /// Returns whether `path` names an entry.
    pub(crate) fn is_path(path: &str) -> bool {
        let digits = path.strip_prefix("log/").and_then(|name| name.strip_suffix(".json"));
        digits.and_then(|digits| digits.parse().ok()).is_some_and(|sequence| sequence > 0 && Self::path_of(sequence) == path)
    }

    /// Encodes the entry. Returns the bytes and their digest.
    pub fn encode(&self) -> Result<(Vec<u8>, Digest)> {
        let bytes = seal::seal(self)?;
        let (_, digest) = seal::open_seal(&bytes, u64::MAX)?;
        Ok((bytes, digest))
    }

    /// Decodes an entry and returns its digest. `sequence` is the number in the entry's name. Does not look at the
    /// manifest and the casks that an entry may hold after its seal.
    pub fn decode(bytes: &[u8], sequence: u64, limits: &Limits) -> Result<(Self, Digest)> {
        let (entry, digest, _) = Self::decode_head(bytes, sequence, limits)?;
        Ok((entry, digest))
    }

    /// Decodes an entry. Also returns the size of its sealed part, after which manifest and casks follow.
    pub(super) fn decode_head(bytes: &[u8], sequence: u64, limits: &Limits) -> Result<(Self, Digest, usize)> {
        let (json, digest, sealed_bytes) = seal::open_first_seal(bytes, limits.max_entry_bytes)?;
        seal::check_preamble(json, FORMAT)?;
        if let Some(kind) = unknown_kind(json) {
            return Err(
                Error::unsupported(format!("log entry of unknown kind `{}`; upgrade tensorcask", kind.escape_debug())).clause("log 3.3")
            );
        }
        let entry: Self = seal::parse(json)?;
        if entry.sequence != sequence {
            return Err(
                Error::corrupt(format!("the entry holds sequence {}, but its name says {sequence}", entry.sequence)).clause("log 3.1")
            );
        }
        if (sequence == 1) != entry.previous.is_none() {
            return Err(Error::corrupt("exactly the first entry must have no `previous` digest").clause("log 3.2"));
        }
        if !matches!(entry.event, Event::Added { inline: Some(_), .. }) && sealed_bytes != bytes.len() {
            return Err(Error::corrupt("bytes follow the digest line of an entry that holds no snapshot").clause("log 1.2"));
        }
        Ok((entry, digest, sealed_bytes))
    }
}

fn unknown_kind(json: &[u8]) -> Option<String> {
    let value: Value = serde_json::from_slice(json).ok()?;
    let kind = value.get("event")?.get("kind")?.as_str()?;
    (!KINDS.contains(&kind)).then(|| kind.to_owned())
}
