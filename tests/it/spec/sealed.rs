//! Sealed JSON: manifests, `store.json`, log entries.

use bytes::Bytes;
use serde::Deserialize;
use tensorcask::wire::{Digest, InlineSnapshot, LogEntry, Manifest, Receipt, StoreFile};
use tensorcask::{Limits, PrecisionDecision};

use super::vectors::{Mismatches, vectors};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SealedVector {
    #[serde(rename = "name")]
    pub(crate) _name: String,
    pub(crate) text: String,
    pub(crate) digest: String,
    pub(crate) canonical: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SealedInvalid {
    pub(crate) name: String,
    pub(crate) text: String,
    pub(crate) sequence: Option<u64>,
    pub(crate) kind: String,
    pub(crate) clause: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PrecisionVector {
    name: String,
    text: String,
}

/// Returns the digest in the last line.
pub(crate) fn seal_of(text: &str) -> &str {
    text.trim_end().rsplit_once("\nsha256:").unwrap().1
}

#[test]
fn manifests() {
    for vector in vectors::<SealedVector>("manifest.toml", "manifest") {
        let (manifest, digest) = Manifest::decode(vector.text.as_bytes(), &Limits::default()).unwrap();
        assert_eq!((digest.to_hex().as_str(), seal_of(&vector.text)), (vector.digest.as_str(), vector.digest.as_str()));
        let again = String::from_utf8(manifest.encode().unwrap().0).unwrap();
        assert_eq!(again == vector.text, vector.canonical, "{again}");
    }
    let mut mismatches = Mismatches::default();
    for vector in vectors::<SealedInvalid>("manifest.toml", "manifest_invalid") {
        let result = Manifest::decode(vector.text.as_bytes(), &Limits::default());
        mismatches.expect(&vector.name, result, &vector.kind, Some(&vector.clause));
    }
    mismatches.assert_none();
}

/// Clause 2.6.
#[test]
fn decisions_for_a_precision() {
    for vector in vectors::<PrecisionVector>("manifest.toml", "precision") {
        let object: serde_json::Value = serde_json::from_str(&vector.text).unwrap();
        let user = serde_json::Map::from_iter([(PrecisionDecision::KEY.to_owned(), object.clone())]);
        let decision = PrecisionDecision::of(&user).unwrap();
        assert_eq!(serde_json::to_value(&decision).unwrap(), object, "{}", vector.name);
    }
}

#[test]
fn receipts() {
    for vector in vectors::<SealedVector>("manifest.toml", "receipt") {
        let receipt = Receipt::decode(vector.text.as_bytes(), &Limits::default()).unwrap();
        assert_eq!(seal_of(&vector.text), vector.digest);
        let again = String::from_utf8(receipt.encode().unwrap()).unwrap();
        assert_eq!(again == vector.text, vector.canonical, "{again}");
    }
    let mut mismatches = Mismatches::default();
    for vector in vectors::<SealedInvalid>("manifest.toml", "receipt_invalid") {
        let result = Receipt::decode(vector.text.as_bytes(), &Limits::default());
        mismatches.expect(&vector.name, result, &vector.kind, Some(&vector.clause));
    }
    mismatches.assert_none();
}

#[test]
fn store_files() {
    for vector in vectors::<SealedVector>("log.toml", "store_file") {
        let file = StoreFile::decode(vector.text.as_bytes(), &Limits::default()).unwrap();
        assert_eq!(seal_of(&vector.text), vector.digest);
        assert_eq!(String::from_utf8(file.encode().unwrap()).unwrap() == vector.text, vector.canonical);
    }
    let mut mismatches = Mismatches::default();
    for vector in vectors::<SealedInvalid>("log.toml", "store_file_invalid") {
        let result = StoreFile::decode(vector.text.as_bytes(), &Limits::default());
        mismatches.expect(&vector.name, result, &vector.kind, Some(&vector.clause));
    }
    mismatches.assert_none();
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EntryVector {
    pub(crate) sequence: u64,
    pub(crate) path: String,
    pub(crate) event: String,
    pub(crate) text: String,
    pub(crate) digest: String,
    pub(crate) canonical: bool,
}

/// An entry with a number that TOML cannot hold.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EntryAlone {
    #[serde(rename = "name")]
    pub(crate) _name: String,
    pub(crate) sequence: String,
    pub(crate) path: String,
    pub(crate) event: String,
    pub(crate) text: String,
    pub(crate) digest: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EntryInline {
    #[serde(rename = "name")]
    pub(crate) _name: String,
    pub(crate) sequence: u64,
    pub(crate) text: String,
    pub(crate) digest: String,
    pub(crate) manifest: String,
}

#[test]
fn log_entries() {
    let mut previous = None;
    for vector in vectors::<EntryVector>("log.toml", "entry") {
        let (entry, digest) = LogEntry::decode(vector.text.as_bytes(), vector.sequence, &Limits::default()).unwrap();
        assert_eq!((entry.event.name(), LogEntry::path_of(vector.sequence)), (vector.event.as_str(), vector.path));
        assert_eq!((digest.to_hex(), entry.previous), (vector.digest, previous));
        assert_eq!(entry.encode().unwrap().0 == vector.text.as_bytes(), vector.canonical);
        previous = Some(digest);
    }
    for vector in vectors::<EntryAlone>("log.toml", "entry_alone") {
        let sequence = vector.sequence.parse().unwrap();
        let (entry, digest) = LogEntry::decode(vector.text.as_bytes(), sequence, &Limits::default()).unwrap();
        assert_eq!((entry.event.name(), LogEntry::path_of(sequence)), (vector.event.as_str(), vector.path));
        assert_eq!((entry.encode().unwrap().0.as_slice(), digest.to_hex()), (vector.text.as_bytes(), vector.digest));
    }
    for vector in vectors::<EntryInline>("log.toml", "entry_inline") {
        let text = Bytes::from(vector.text);
        let limits = Limits::default();
        assert_eq!(LogEntry::decode(&text, vector.sequence, &limits).unwrap().1.to_hex(), vector.digest);
        let manifest = Digest::from_hex(&vector.manifest).unwrap();
        let inline = InlineSnapshot::decode(&text, vector.sequence, manifest, &limits).unwrap();
        assert!(inline.casks.is_empty() && inline.manifest_bytes.ends_with(format!("sha256:{}\n", vector.manifest).as_bytes()));
        for end in 0..text.len() {
            assert!(InlineSnapshot::decode(&text.slice(..end), vector.sequence, manifest, &limits).is_err(), "cut at {end}");
        }
    }
    let mut mismatches = Mismatches::default();
    for vector in vectors::<SealedInvalid>("log.toml", "entry_invalid") {
        let result = LogEntry::decode(vector.text.as_bytes(), vector.sequence.unwrap(), &Limits::default());
        mismatches.expect(&vector.name, result, &vector.kind, Some(&vector.clause));
    }
    mismatches.assert_none();
}
