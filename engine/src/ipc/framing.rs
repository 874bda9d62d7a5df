//! The byte format of messages on the agent's socket: the length in decimal digits, a line end, and that many bytes of
//! JSON.
//!
//! Every message carries the version of the protocol. On the same socket, a request that begins with `G` is HTTP and
//! gets the metrics.

use std::io::{BufRead, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tensorcask::{Error, Result};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// A message with the version of the protocol.
#[derive(Debug, Serialize, Deserialize)]
struct Envelope<T> {
    v: u32,
    message: T,
}

/// Encodes a message.
fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    let json =
        serde_json::to_vec(&Envelope { v: VERSION, message }).map_err(|e| Error::invalid(format!("cannot encode a message: {e}")))?;
    if json.len() > MAX_BYTES {
        return Err(Error::limit(format!("a message to or from the agent has {} bytes; the maximum is 16 MiB", json.len())));
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
    let bad = |e| Error::corrupt(format!("invalid message of the agent's protocol: {e}"));
    let Version { v } = serde_json::from_slice(json).map_err(bad)?;
    if v != VERSION {
        return Err(Error::unsupported(format!(
            "this process speaks version {VERSION} of the agent's protocol, its peer version {v}. Run `tensorcask agent stop`, \
             then start an agent of this version"
        )));
    }
    Ok(serde_json::from_slice::<Envelope<T>>(json).map_err(bad)?.message)
}

fn length_of(head: &[u8]) -> Result<usize> {
    let digits = std::str::from_utf8(head).ok().and_then(|text| text.strip_suffix('\n'));
    let length = digits.and_then(|digits| digits.parse().ok()).filter(|length| *length <= MAX_BYTES);
    length.ok_or_else(|| Error::corrupt("a message without a valid length"))
}

/// Sends a message.
pub(crate) fn send(out: &mut impl Write, message: &impl Serialize) -> std::io::Result<()> {
    out.write_all(&encode(message).map_err(std::io::Error::other)?)?;
    out.flush()
}

/// Receives the next message. The outer error is one of the connection, the inner error one of the message.
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

/// Sends a message.
pub(crate) async fn send_async(out: &mut (impl AsyncWrite + Unpin), message: &impl Serialize) -> Result<()> {
    let bytes = encode(message)?;
    out.write_all(&bytes).await.map_err(|e| Error::io("the connection of a trainer", e))
}

/// Receives the next message; `None` at the end of the stream.
pub(crate) async fn receive_async<T: DeserializeOwned>(input: &mut (impl AsyncBufRead + Unpin)) -> Result<Option<T>> {
    let fail = |e| Error::io("the connection of a trainer", e);
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

/// Version of the protocol.
const VERSION: u32 = 6;

/// Largest size of a message.
const MAX_BYTES: usize = 16 << 20;

/// Largest size of the length and the line end.
const MAX_HEAD: u64 = 9;

#[cfg(test)]
mod tests {
    use tensorcask::ErrorKind;

    use super::super::messages::Request;
    use super::{VERSION, receive, send};

    #[test]
    fn messages_round_trip() {
        let durable = true;
        let replicated = false;
        let request = Request::Wait { key: "k".into(), rank: 1, generation: 7, durable, replicated, timeout_ms: 10, is_last: false };
        let mut bytes = Vec::new();
        send(&mut bytes, &request).unwrap();
        send(&mut bytes, &Request::Status {}).unwrap();
        let mut input = bytes.as_slice();
        assert_eq!(receive::<Request>(&mut input).unwrap().unwrap(), request);
        assert_eq!(receive::<Request>(&mut input).unwrap().unwrap(), Request::Status {});
        assert!(receive::<Request>(&mut input).is_err());
    }

    #[test]
    fn invalid_messages_are_errors() {
        let mut other = Vec::new();
        send(&mut other, &Request::Status {}).unwrap();
        let other = String::from_utf8(other).unwrap().replace(&format!("\"v\":{VERSION}"), "\"v\":1");
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
