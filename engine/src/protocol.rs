//! What trainers and the agent say to each other: a length in decimal digits, a line end, and so many bytes of JSON.
//!
//! Each request has one reply. Both name the version of the protocol; a peer of another version is told so. On the same socket, a
//! request that begins with `GET ` is HTTP and gets the metrics. The messages name runs, ranks and generations, never addresses of
//! memory, so that a later version can carry them between hosts.

use std::collections::BTreeMap;
use std::io::{BufRead, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tensorcask::wire::Id;
use tensorcask::{Error, ErrorKind, Result};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::options::RunSpec;
use crate::status::AgentStatus;

pub(crate) const VERSION: u32 = 3;

/// Bytes of a message, at most.
const MAX_BYTES: usize = 16 << 20;

/// Digits of a length, and the line end.
const MAX_HEAD: u64 = 9;

/// A message with the version of the protocol.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Envelope<T> {
    v: u32,
    message: T,
}

/// What a trainer asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Request {
    /// A trainer, which holds the lock of its rank, begins, or goes on with a new arena or agent.
    Attach(Box<Attach>),
    /// A state was published in the arena; or, where it is encoded inline, in memory.
    Saved { key: String, rank: u32, save: SaveNote },
    /// Waits until a save of a rank is in memory or in the first tier, or failed.
    Wait { key: String, rank: u32, generation: u64, durable: bool, timeout_ms: u64 },
    /// The trainer ends in good order. `clear`: what is in memory goes once it is in the store.
    Detach { key: String, rank: u32, clear: bool },
    /// How everything is.
    Status {},
    /// Encodes and uploads what there is, then ends.
    Stop {},
}

/// A trainer that attaches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Attach {
    pub spec: RunSpec,
    pub rank: u32,
    pub pid: u32,
    pub mode: Mode,
    /// The newest session that it knows of.
    pub session: u64,
    /// The newest snapshot of each tier when it looked, by URL.
    pub latest: BTreeMap<String, Option<Id>>,
}

/// How a trainer attaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    /// It takes the store over; what is in memory counts.
    TakeOver,
    /// It takes the store over; what is in memory is out of date and goes.
    TakeOverAfresh,
    /// It has taken the store over before.
    GoOn,
}

/// A save, as the trainer saw it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct SaveNote {
    pub step: u64,
    pub generation: u64,
    pub stall_ms: f64,
    pub copy_ms: f64,
    pub bytes: u64,
    /// When the call began, in milliseconds since 1970.
    pub time_ms: u64,
}

/// What the agent answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Reply {
    /// To all requests about a rank of a run.
    Progress(Progress),
    /// To `status`.
    Status(Box<AgentStatus>),
    /// It did not work.
    Failed { kind: String, message: String },
}

/// How far the saves of a rank have come.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// Its newest generation that is encoded in memory.
    pub encoded: u64,
    /// Its newest generation that is committed in the first tier.
    pub durable: u64,
    /// Its saves that failed for good, the last of them: older generations among the above that are neither encoded nor durable.
    pub failures: Vec<Failure>,
    /// The start of the job, counted: what ranks save in it belongs together.
    pub session: u64,
    /// The epoch of the memory tier that is damaged: another has to take its place.
    pub damaged_epoch: Option<u64>,
    /// Why the run was given up.
    pub stopped: Option<String>,
    /// What goes wrong at the moment and is tried again.
    pub problem: Option<String>,
    /// States and snapshots that wait.
    pub queue_depth: u64,
}

/// A save that failed for good.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The step.
    pub step: u64,
    /// The save's number in the arena.
    pub generation: u64,
    /// Why.
    pub message: String,
}

impl Progress {
    /// Whether a save failed for good.
    pub(crate) fn has_failed(&self, generation: u64) -> bool {
        self.failures.iter().any(|failure| failure.generation == generation)
    }

    /// Whether a save has come so far.
    pub(crate) fn has_reached(&self, generation: u64, durable: bool) -> bool {
        let newest = if durable { self.durable } else { self.encoded };
        newest >= generation && !self.has_failed(generation)
    }
}

impl Reply {
    /// The reply that tells of an error.
    pub(crate) fn failed(error: &Error) -> Self {
        Self::Failed { kind: error.kind().name().to_owned(), message: error.to_string() }
    }

    /// The progress in a reply, or its error.
    pub(crate) fn progress(self) -> Result<Progress> {
        match self {
            Self::Progress(progress) => Ok(progress),
            Self::Failed { kind, message } => Err(Error::new(kind_of(&kind), format!("the agent says: {message}"))),
            Self::Status(_) => Err(Error::corrupt("the agent answered another question")),
        }
    }
}

fn kind_of(name: &str) -> ErrorKind {
    use ErrorKind::*;
    let kinds = [Corrupt, NotFound, Conflict, Fenced, OutcomeUnknown, InvalidArgument, Unsupported, LimitExceeded, UnsafeStore, Storage];
    kinds.into_iter().find(|kind| kind.name() == name).unwrap_or(Storage)
}

/// The bytes of a message.
fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    let json = serde_json::to_vec(&Envelope { v: VERSION, message }).map_err(|e| Error::invalid(format!("a message: {e}")))?;
    if json.len() > MAX_BYTES {
        return Err(Error::limit(format!("a message of {} bytes to or from the agent", json.len())));
    }
    let mut bytes = format!("{}\n", json.len()).into_bytes();
    bytes.extend_from_slice(&json);
    Ok(bytes)
}

fn decode<T: DeserializeOwned>(json: &[u8]) -> Result<T> {
    #[derive(Deserialize)]
    struct Version {
        v: u32,
    }
    let bad = |e| Error::corrupt(format!("a message of the agent's protocol: {e}"));
    let Version { v } = serde_json::from_slice(json).map_err(bad)?;
    if v != VERSION {
        return Err(Error::unsupported(format!(
            "the agent's protocol has version {VERSION} here and {v} there; end the agent (`tensorcask agent stop`) and start this version's"
        )));
    }
    Ok(serde_json::from_slice::<Envelope<T>>(json).map_err(bad)?.message)
}

fn length_of(head: &[u8]) -> Result<usize> {
    let digits = std::str::from_utf8(head).ok().and_then(|text| text.strip_suffix('\n'));
    let length = digits.and_then(|digits| digits.parse().ok()).filter(|length| *length <= MAX_BYTES);
    length.ok_or_else(|| Error::corrupt("a message without a length"))
}

pub(crate) fn send(out: &mut impl Write, message: &impl Serialize) -> std::io::Result<()> {
    out.write_all(&encode(message).map_err(std::io::Error::other)?)?;
    out.flush()
}

/// The next message; an error of the connection, or of what came over it.
pub(crate) fn receive<T: DeserializeOwned>(input: &mut impl BufRead) -> std::io::Result<Result<T>> {
    let mut head = Vec::new();
    input.by_ref().take(MAX_HEAD).read_until(b'\n', &mut head)?;
    if head.is_empty() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    let length = match length_of(&head) {
        Ok(length) => length,
        Err(e) => return Ok(Err(e)),
    };
    let mut json = Vec::new();
    if input.by_ref().take(length as u64).read_to_end(&mut json)? != length {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(decode(&json))
}

pub(crate) async fn send_async(out: &mut (impl AsyncWrite + Unpin), message: &impl Serialize) -> Result<()> {
    let bytes = encode(message)?;
    out.write_all(&bytes).await.map_err(|e| Error::io("a trainer's connection", e))
}

/// The next message; none at the end.
pub(crate) async fn receive_async<T: DeserializeOwned>(input: &mut (impl AsyncBufRead + Unpin)) -> Result<Option<T>> {
    let fail = |e| Error::io("a trainer's connection", e);
    let mut head = Vec::new();
    (&mut *input).take(MAX_HEAD).read_until(b'\n', &mut head).await.map_err(fail)?;
    if head.is_empty() {
        return Ok(None);
    }
    let length = length_of(&head)?;
    let mut json = Vec::new();
    if (&mut *input).take(length as u64).read_to_end(&mut json).await.map_err(fail)? != length {
        return Ok(None);
    }
    decode(&json).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_travel() {
        let request = Request::Wait { key: "k".into(), rank: 1, generation: 7, durable: true, timeout_ms: 10 };
        let mut bytes = Vec::new();
        send(&mut bytes, &request).unwrap();
        send(&mut bytes, &Request::Status {}).unwrap();
        let mut input = bytes.as_slice();
        assert_eq!(receive::<Request>(&mut input).unwrap().unwrap(), request);
        assert_eq!(receive::<Request>(&mut input).unwrap().unwrap(), Request::Status {});
        assert!(receive::<Request>(&mut input).is_err());
    }

    #[test]
    fn garbage_is_an_error() {
        let mut other = Vec::new();
        send(&mut other, &Request::Status {}).unwrap();
        let other = String::from_utf8(other).unwrap().replace("\"v\":3", "\"v\":1");
        for (bytes, kind) in [
            (&b"12345678901234\n{}"[..], ErrorKind::Corrupt),
            (b"99999999\n{}", ErrorKind::Corrupt),
            (b"x\n{}", ErrorKind::Corrupt),
            (b"2\n{}", ErrorKind::Corrupt),
            (other.as_bytes(), ErrorKind::Unsupported),
        ] {
            let error = receive::<Request>(&mut &*bytes).unwrap().unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
        }
    }
}
