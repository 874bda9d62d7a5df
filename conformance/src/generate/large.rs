//! Stores of megabytes or of thousands of objects, for both sides of limits. They are not kept, but generated when
//! needed.

use std::collections::BTreeMap;

use serde_json::json;

use super::dtypes::U8;
use super::sketch::{Input, Outcome, Sketch};
use super::stores::base_and_delta;
use super::writer::{Entry, State, Store, seal};
use crate::failure::Failure;

/// Values of `max_chain_depth`, `max_entry_bytes` and `max_manifest_bytes` in limits.md.
const CHAIN_DEPTH: u64 = 1024;
const ENTRY_BYTES: usize = 1 << 20;
const MANIFEST_BYTES: usize = 64 << 20;
/// Number of bytes that `seal` adds.
const SEAL_BYTES: usize = 72;

/// Appends spaces to JSON until the sealed object has `bytes` bytes.
fn padded(json: &str, bytes: usize) -> String {
    format!("{json}{}", " ".repeat(bytes.saturating_sub(json.len() + 1 + SEAL_BYTES)))
}

/// Returns a chain of `links` snapshots of which only the last is live. A reader of every live step then reads each
/// link once.
fn chain(links: u64) -> Result<Store, Failure> {
    let mut store = Store::new()?;
    for step in 1..=links {
        // Every eighth link changes an element. The others have no cask.
        let mut state = State::new(step, vec![Entry::whole("w", U8, &[2], "model", &[(step / 8) as u8, (step / 2048) as u8])]);
        (state.id[0], state.id[1]) = ((step >> 8) as u8, step as u8);
        store.save(state, (step > 1).then(|| step - 1))?;
    }
    store.forget(&(1..links).collect::<Vec<u64>>(), links)?;
    Ok(store)
}

fn entry(bytes: usize) -> Result<Store, Failure> {
    let mut store = base_and_delta()?;
    store.append_with(json!({ "kind": "opened" }), |_| {}, |json| padded(&json, bytes))?;
    Ok(store)
}

fn manifest(bytes: usize) -> Result<Store, Failure> {
    let mut store = Store::new()?;
    let snapshot = store.draft(super::stores::small(10), None);
    store.commit_with(snapshot.seal(), |_| {}, |json| padded(&json, bytes))?;
    Ok(store)
}

fn store_file(bytes: usize) -> Result<Store, Failure> {
    let mut store = base_and_delta()?;
    let sealed = store.objects.get("store.json").ok_or("a store without store.json")?;
    let json = std::str::from_utf8(&sealed[..sealed.len() - SEAL_BYTES])?.trim_end().to_owned();
    store.objects.insert("store.json".into(), seal(&padded(&json, bytes)));
    Ok(store)
}

type Make = fn() -> Result<Store, Failure>;

/// Name, reason, store, and whether a reader must reject the store.
const CASES: [(&str, &str, Make, bool); 8] = [
    ("chain-1024", "a chain as deep as the limit", || chain(CHAIN_DEPTH), false),
    ("chain-1025", "a chain of one link more than the limit", || chain(CHAIN_DEPTH + 1), true),
    ("entry-at-the-limit", "an entry of 1 MiB, of which most is white space", || entry(ENTRY_BYTES), false),
    ("entry-over-the-limit", "an entry of 1 MiB and a byte", || entry(ENTRY_BYTES + 1), true),
    ("store-file-at-the-limit", "a store.json of 1 MiB", || store_file(ENTRY_BYTES), false),
    ("store-file-over-the-limit", "a store.json of 1 MiB and a byte", || store_file(ENTRY_BYTES + 1), true),
    ("manifest-at-the-limit", "a manifest of 64 MiB", || manifest(MANIFEST_BYTES), false),
    ("manifest-over-the-limit", "a manifest of 64 MiB and a byte", || manifest(MANIFEST_BYTES + 1), true),
];

/// Returns the objects of the case `<area>/<case>`.
pub(crate) fn objects(case: &str) -> Result<BTreeMap<String, Vec<u8>>, Failure> {
    let found = CASES.iter().find(|(name, ..)| case.strip_prefix("limits/") == Some(*name));
    let (_, _, make, _) = found.ok_or_else(|| format!("{case} is no case whose input is made"))?;
    Ok(make()?.objects)
}

pub(crate) fn cases() -> Result<Vec<Sketch>, Failure> {
    let sketch = |(name, why, make, refused): (&str, &str, Make, bool)| {
        let store = make()?;
        let outcome = if refused { Outcome::Reject("limit") } else { Outcome::Accept(store.expected()) };
        let name = format!("limits/{name}");
        let clause = "limits 2".into();
        let why = why.into();
        Ok(Sketch { name, clause, why, input: Input::Large(store.objects), outcome })
    };
    CASES.into_iter().map(sketch).collect()
}
