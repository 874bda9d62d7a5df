//! JSON objects with a digest as their last line. Spec: `spec/log.md`, clause 1.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Digest;
use crate::{Error, Limits, Result};

const PREFIX: &[u8] = b"sha256:";
const SEAL_BYTES: usize = PREFIX.len() + 64 + 1;

/// The stored form of `value`: JSON on one line, then `sha256:<hex>` over all bytes before.
pub(super) fn seal(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(value).map_err(|e| Error::invalid(format!("cannot be written as JSON: {e}")))?;
    bytes.push(b'\n');
    let digest = Digest::of(&bytes);
    bytes.extend_from_slice(PREFIX);
    bytes.extend_from_slice(digest.to_hex().as_bytes());
    bytes.push(b'\n');
    Ok(bytes)
}

/// The digest in the last line of a sealed object, compared with the bytes before it, and those bytes.
pub(super) fn open_seal(bytes: &[u8], max_bytes: u64) -> Result<(&[u8], Digest)> {
    Limits::check(bytes.len() as u64, max_bytes, "size of the object")?;
    let bad = |message: &str| Error::corrupt(message).clause("log 1.2");
    let split = bytes.len().checked_sub(SEAL_BYTES).ok_or_else(|| bad("too short to hold its digest: truncated"))?;
    let (body, seal) = bytes.split_at_checked(split).ok_or_else(|| bad("too short to hold its digest"))?;
    let hex = seal
        .strip_prefix(PREFIX)
        .and_then(|rest| rest.strip_suffix(b"\n"))
        .and_then(|hex| std::str::from_utf8(hex).ok())
        .ok_or_else(|| bad("the last line is not `sha256:<hex>`: truncated or not ours"))?;
    let digest = Digest::from_hex(hex).map_err(|e| e.clause("log 1.2"))?;
    if Digest::of(body) != digest {
        return Err(bad("its bytes do not have the digest in its last line"));
    }
    let json = body.strip_suffix(b"\n").ok_or_else(|| bad("no line end before the digest"))?;
    Ok((json, digest))
}

/// Parses the JSON of a sealed object. Unknown fields, duplicate fields and trailing bytes are errors.
pub(super) fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T> {
    serde_json::from_slice(json).map_err(|e| Error::corrupt(format!("not the JSON that this object has to hold: {e}")).clause("log 1.3"))
}

/// The fields that tell what an object is; read before the rest, which a newer version may have changed.
#[derive(serde::Deserialize)]
struct Preamble {
    format: String,
    version: String,
}

/// What a version that is understood may still demand.
#[derive(serde::Deserialize)]
struct Features {
    #[serde(default)]
    must_understand: Vec<String>,
}

/// Refuses other formats, major versions and features that are not understood.
pub(super) fn check_preamble(json: &[u8], format: &str) -> Result<()> {
    let preamble: Preamble = parse(json)?;
    if preamble.format != format {
        return Err(Error::corrupt(format!("is a `{}`, not a `{format}`", preamble.format.escape_debug())).clause("log 1.4"));
    }
    crate::version::FormatVersion::parse(&preamble.version)?.check()?;
    crate::version::check_feature_names(&parse::<Features>(json)?.must_understand)
}
