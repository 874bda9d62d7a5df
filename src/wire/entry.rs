//! An entry of the log. Spec: `spec/log.md`, clause 3.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Digest, Id, seal};
use crate::version::FormatVersion;
use crate::{Error, Limits, Result};

const FORMAT: &str = "tensorcask-log";

/// What an entry does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Event {
    /// A writer takes over the store.
    Opened {},
    /// A snapshot is committed.
    Added {
        /// Its id.
        snapshot: Id,
        /// Its step.
        step: u64,
        /// The parent of a delta; must agree with the manifest. It stands here so that a chain is known from the log alone.
        parent: Option<Id>,
        /// Digest of its manifest, whose path follows from step and id.
        manifest: Digest,
    },
    /// Snapshots are no longer wanted; kept while a chain needs them.
    Forgotten {
        /// Their ids.
        snapshots: Vec<Id>,
    },
    /// A snapshot is protected from being forgotten, or no longer.
    Pinned {
        /// Its id.
        snapshot: Id,
        /// Whether it is protected from now on.
        pinned: bool,
    },
    /// Another manifest stands for a snapshot from now on: the same content, held by other casks.
    Compacted {
        /// Its id.
        snapshot: Id,
        /// The parent that it still needs, if any.
        parent: Option<Id>,
        /// Digest of the manifest, whose path follows from step, id and this digest.
        manifest: Digest,
        /// The roles that it still has, ascending; none: those that it had.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        roles: Option<Vec<String>>,
    },
    /// Snapshots that nothing may need any more: what only they name is deleted when it is old enough.
    Collecting {
        /// Their ids.
        snapshots: Vec<Id>,
    },
    /// From now on readers and writers have to know these features.
    Upgraded {
        /// Features that readers and writers have to know.
        must_understand: Vec<String>,
        /// Features that writers, compaction and gc have to know.
        may_ignore: Vec<String>,
    },
}

const KINDS: &[&str] = &["opened", "added", "forgotten", "pinned", "compacted", "collecting", "upgraded"];

impl Event {
    /// The name in JSON and listings.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Opened {} => "opened",
            Self::Added { .. } => "added",
            Self::Forgotten { .. } => "forgotten",
            Self::Pinned { .. } => "pinned",
            Self::Compacted { .. } => "compacted",
            Self::Collecting { .. } => "collecting",
            Self::Upgraded { .. } => "upgraded",
        }
    }
}

/// One commit of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogEntry {
    format: String,
    version: String,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
    /// The number, also its name; the first is 1.
    pub sequence: u64,
    /// Digest of the entry before; none for the first.
    pub previous: Option<Digest>,
    /// Random: tells a writer whether an entry that it finds is its own.
    pub token: Id,
    /// Who wrote it.
    pub writer: Id,
    /// When, in milliseconds since 1970, by the writer's clock.
    pub time_ms: u64,
    /// What it does.
    pub event: Event,
}

impl LogEntry {
    /// An entry of the current version.
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
            time_ms,
            event,
        }
    }

    /// Features that a reader may ignore, but no writer.
    pub fn may_ignore(&self) -> &[String] {
        &self.may_ignore
    }

    /// Path of entry `sequence` below the store's root.
    pub fn path_of(sequence: u64) -> String {
        format!("log/{sequence:020}.json")
    }

    /// Whether an object with this path is an entry.
    pub(crate) fn is_path(path: &str) -> bool {
        let digits = path.strip_prefix("log/").and_then(|name| name.strip_suffix(".json"));
        digits.and_then(|digits| digits.parse().ok()).is_some_and(|sequence| sequence > 0 && Self::path_of(sequence) == path)
    }

    /// The stored form and its digest.
    pub fn encode(&self) -> Result<(Vec<u8>, Digest)> {
        let bytes = seal::seal(self)?;
        let (_, digest) = seal::open_seal(&bytes, u64::MAX)?;
        Ok((bytes, digest))
    }

    /// From the stored form, with its digest; `sequence` is the number in its name.
    pub fn decode(bytes: &[u8], sequence: u64, limits: &Limits) -> Result<(Self, Digest)> {
        let (json, digest) = seal::open_seal(bytes, limits.max_entry_bytes)?;
        seal::check_preamble(json, FORMAT)?;
        if let Some(kind) = unknown_kind(json) {
            return Err(
                Error::unsupported(format!("log entry of unknown kind `{}`; upgrade tensorcask", kind.escape_debug())).clause("log 3.3")
            );
        }
        let entry: Self = seal::parse(json)?;
        if entry.sequence != sequence {
            return Err(Error::corrupt(format!("holds sequence {}, but its name says {sequence}", entry.sequence)).clause("log 3.1"));
        }
        if (sequence == 1) != entry.previous.is_none() {
            return Err(Error::corrupt("only the first entry has no entry before it").clause("log 3.2"));
        }
        Ok((entry, digest))
    }
}

fn unknown_kind(json: &[u8]) -> Option<String> {
    let value: Value = serde_json::from_slice(json).ok()?;
    let kind = value.get("event")?.get("kind")?.as_str()?;
    (!KINDS.contains(&kind)).then(|| kind.to_owned())
}
