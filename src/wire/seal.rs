//! JSON objects with a digest as their last line. Spec: `spec/log.md`, clause 1.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Digest;
use crate::{Error, Limits, Result};

const PREFIX: &[u8] = b"sha256:";
const SEAL_BYTES: usize = PREFIX.len() + 64 + 1;
/// Line end and prefix: the beginning of the first seal in an object.
const SEAL_BEGIN: &[u8] = b"\nsha256:";

/// Encodes `value` as JSON on one line, followed by `sha256:<hex>` over all bytes before.
pub(super) fn seal(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(value).map_err(|e| Error::invalid(format!("cannot be written as JSON: {e}")))?;
    bytes.push(b'\n');
    let digest = Digest::of(&bytes);
    bytes.extend_from_slice(PREFIX);
    bytes.extend_from_slice(digest.to_hex().as_bytes());
    bytes.push(b'\n');
    Ok(bytes)
}

/// Compares the digest in the last line with the bytes before. Returns the JSON and the digest.
pub(super) fn open_seal(bytes: &[u8], max_bytes: u64) -> Result<(&[u8], Digest)> {
    Limits::check(bytes.len() as u64, max_bytes, "size of the object")?;
    let bad = |message: &str| Error::corrupt(message).clause("log 1.2");
    let split = bytes.len().checked_sub(SEAL_BYTES).ok_or_else(|| bad("too short to hold its digest: truncated"))?;
    let (body, seal) = bytes.split_at_checked(split).ok_or_else(|| bad("too short to hold its digest"))?;
    let hex = seal
        .strip_prefix(PREFIX)
        .and_then(|rest| rest.strip_suffix(b"\n"))
        .and_then(|hex| std::str::from_utf8(hex).ok())
        .ok_or_else(|| bad("the last line is not `sha256:<hex>`: truncated, or not a tensorcask object"))?;
    let digest = Digest::from_hex(hex).map_err(|e| e.clause("log 1.2"))?;
    if Digest::of(body) != digest {
        return Err(bad("digest mismatch: the bytes do not have the digest in the last line"));
    }
    let json = body.strip_suffix(b"\n").ok_or_else(|| bad("no line end before the digest"))?;
    Ok((json, digest))
}

/// Opens the sealed object at the beginning of `bytes`. Its seal is the first line that begins with `sha256:`; valid JSON
/// has no such line. Returns the JSON, the digest and the size of the sealed object.
pub(super) fn open_first_seal(bytes: &[u8], max_bytes: u64) -> Result<(&[u8], Digest, usize)> {
    Limits::check(bytes.len() as u64, max_bytes, "size of the object")?;
    let line = bytes.windows(SEAL_BEGIN.len()).position(|window| window == SEAL_BEGIN);
    // Without such a line, the end of the object is reported as the seal that it is not.
    let end = line.map_or(bytes.len(), |line| line.saturating_add(1).saturating_add(SEAL_BYTES));
    let sealed = bytes.get(..end).unwrap_or(bytes);
    let (json, digest) = open_seal(sealed, max_bytes)?;
    Ok((json, digest, sealed.len()))
}

/// Parses the JSON of a sealed object. Unknown fields, duplicate fields and trailing bytes are errors.
pub(super) fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T> {
    serde_json::from_slice(json).map_err(|e| Error::corrupt(format!("invalid JSON for this object: {e}")).clause("log 1.3"))
}

/// Fields that identify the type of an object. They are read first, because a newer version may have changed the rest.
#[derive(serde::Deserialize)]
struct Preamble {
    format: String,
    version: String,
}

/// Features that an object of a supported version requires.
#[derive(serde::Deserialize)]
struct Features {
    #[serde(default)]
    must_understand: Vec<String>,
}

/// Rejects other formats, unsupported major versions, and unknown must-understand features.
pub(super) fn check_preamble(json: &[u8], format: &str) -> Result<()> {
    let preamble: Preamble = parse(json)?;
    if preamble.format != format {
        return Err(Error::corrupt(format!("the object is a `{}`, not a `{format}`", preamble.format.escape_debug())).clause("log 1.4"));
    }
    crate::version::FormatVersion::parse(&preamble.version)?.check()?;
    crate::version::check_feature_names(&parse::<Features>(json)?.must_understand)
}
