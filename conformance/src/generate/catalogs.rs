//! Stores with catalogs. `conformance/catalogs.py` generated the catalogs once for the store of the case
//! `catalog/none`, with another Parquet library than the project's. The files are in `vectors/catalogs`, each named
//! after its special property.

use serde_json::json;
use sha2::{Digest, Sha256};

use super::forge::id;
use super::sketch::{Outcome, Sketch};
use super::stores::small;
use super::writer::Store;
use crate::failure::Failure;
use crate::files::hex;

/// Returns a store with nine entries, covering every kind that changes a catalog.
fn store() -> Result<Store, Failure> {
    let mut store = Store::new()?;
    let with = |step: u64, user: serde_json::Value| {
        let mut state = small(step);
        state.user = user.as_object().cloned().unwrap_or_default();
        state
    };
    store.save(with(10, json!({ "loss": 2.5, "note": "warm-up", "odd": 1 })), None)?;
    store.save(with(20, json!({ "loss": 2, "odd": "text" })), Some(10))?;
    let mut again = with(21, json!({ "loss": 1.5, "note": "again" }));
    (again.step, again.id) = (20, id(0x22));
    store.save(again, Some(10))?;
    store.save(with(30, json!({})), None)?;
    store.append(json!({ "kind": "pinned", "snapshot": store.id_of(30), "pinned": true }))?;
    store.append(json!({ "kind": "upgraded", "must_understand": [], "may_ignore": ["another"] }))?;
    store.reduce(30, &["model"])?;
    store.forget(&[10], 20)?;
    Ok(store)
}

/// Another writer opens the log, as a leader or as an ordinary writer.
fn open_as(store: &mut Store, writer: u8, leader: serde_json::Value) -> Result<(), Failure> {
    store.writer = id(writer);
    store.append(json!({ "kind": "opened", "leader": leader }))
}

/// Returns a store that the hosts of a session have led: a takeover, a step that is given up, and a return to an older step.
/// An ordinary writer ends the session.
fn led_store() -> Result<Store, Failure> {
    let mut store = Store::new()?;
    let leader = |attempt: u64, term: u64| json!({ "session": hex(&id(0x60)), "after": 2, "attempt": attempt, "term": term });
    store.save(small(10), None)?;
    open_as(&mut store, 0x61, leader(0, 1))?;
    store.save(small(20), None)?;
    open_as(&mut store, 0x62, leader(0, 2))?;
    store.save(small(30), None)?;
    let mut above = leader(0, 3);
    above["above"] = json!(40);
    open_as(&mut store, 0x62, above)?;
    open_as(&mut store, 0x61, leader(1, 4))?;
    let mut again = small(30);
    again.id = id(0x33);
    store.save(again, None)?;
    open_as(&mut store, 0x63, json!(null))?;
    store.save(small(40), None)?;
    Ok(store)
}

/// Returns the store with a catalog of entry `sequence` under the right digest.
fn with(sequence: u64, catalog: &[u8]) -> Result<Store, Failure> {
    Ok(add(store()?, sequence, catalog))
}

fn led_with(sequence: u64, catalog: &[u8]) -> Result<Store, Failure> {
    Ok(add(led_store()?, sequence, catalog))
}

fn add(mut store: Store, sequence: u64, catalog: &[u8]) -> Store {
    store.objects.insert(format!("catalog/{sequence:020}-{}.parquet", hex(&Sha256::digest(catalog))), catalog.to_vec());
    store
}

macro_rules! catalog {
    ($name:literal) => {
        include_bytes!(concat!("vectors/catalogs/", $name, ".parquet"))
    };
}

/// Returns the store with a catalog of its newest entry, but without one entry.
fn without(sequence: u64) -> Result<Store, Failure> {
    let mut store = with(9, catalog!("newest"))?;
    store.objects.remove(&format!("log/{sequence:020}.json"));
    Ok(store)
}

pub(crate) fn cases() -> Result<Vec<Sketch>, Failure> {
    let sketch = |name: &str, clause: &str, why: &str, store: Store, outcome: Outcome| Sketch {
        name: format!("catalog/{name}"),
        clause: clause.into(),
        why: why.into(),
        input: store.into(),
        outcome,
    };
    let accept = |name: &str, clause: &str, why: &str, store: Store| {
        let outcome = Outcome::Accept(store.expected());
        sketch(name, clause, why, store, outcome)
    };
    let reject = |name: &str, clause: &str, why: &str, store: Store| sketch(name, clause, why, store, Outcome::Reject("corrupt"));
    Ok(vec![
        accept("none", "log 6", "the store of the other cases of this folder, without a catalog", store()?),
        accept("newest", "log 6.3", "a catalog of the newest entry", with(9, catalog!("newest"))?),
        accept("older", "log 4.5", "a catalog with entries after it that change what its rows say", with(5, catalog!("older"))?),
        accept(
            "other-forms",
            "log 6.3",
            "row groups, no compression, no dictionaries, more columns and keys, a directory's digest that is wrong",
            {
                let mut store = with(9, catalog!("other-forms"))?;
                let older = catalog!("older");
                store.objects.insert(format!("catalog/{:020}-{}.parquet", 5, hex(&Sha256::digest(older))), older.to_vec());
                store
            },
        ),
        accept("damaged-then-older", "log 6.2", "the newest is damaged, the one before it is whole", {
            let mut store = with(5, catalog!("older"))?;
            let mut damaged = catalog!("newest").to_vec();
            damaged.truncate(damaged.len() / 2);
            store.objects.insert(format!("catalog/{:020}-{}.parquet", 9, hex(&Sha256::digest(&damaged))), damaged);
            store
        }),
        accept("wrong-type", "log 6.3", "`step` is i64: damaged, and skipped", with(9, catalog!("wrong-type"))?),
        accept("null-status", "log 6.3", "a null where none is allowed: damaged, and skipped", with(9, catalog!("null-status"))?),
        accept(
            "pages-of-gigabytes",
            "log 6.3",
            "pages that claim 2 GiB each: damaged, and skipped",
            with(9, catalog!("pages-of-gigabytes"))?,
        ),
        accept("circle", "log 6.3", "snapshots that are their own parents: damaged, and skipped", with(9, catalog!("circle"))?),
        accept("missing-column", "log 6.3", "no column `pinned`: damaged, and skipped", with(9, catalog!("missing-column"))?),
        reject("wrong-entry", "log 6.4", "`tensorcask.entry` is not the digest of the entry", with(9, catalog!("wrong-entry"))?),
        reject("wrong-status", "log 6.4", "a forgotten snapshot is said to be live", with(9, catalog!("wrong-status"))?),
        reject("wrong-roles", "log 6.4", "a reduced snapshot is said to be whole", with(9, catalog!("wrong-roles"))?),
        reject("wrong-writer", "log 6.4", "another author of the last `added` entry", with(9, catalog!("wrong-writer"))?),
        reject("missing-row", "log 6.4", "a snapshot of the log is not there", with(9, catalog!("missing-row"))?),
        // A reader that trusts the catalog gets to the end. One that uses no catalog does not: both must refuse the store.
        reject("over-a-gap", "log 3.1", "an entry is missing below the one that a whole catalog follows", without(3)?),
        reject("over-the-last-entry", "log 6.4", "the entry that a whole catalog follows is missing", without(9)?),
        reject("of-another-entry", "log 6.4", "right for entry 5, and named after entry 6", with(6, catalog!("of-another-entry"))?),
        accept("led-none", "log 8", "hosts of a session lead in turn; the store of the other `led` cases, without a catalog", led_store()?),
        accept("led", "log 6.3", "a catalog that says who leads, with entries of later leaders after it", led_with(7, catalog!("led"))?),
        accept("led-no-more", "log 6.4", "an ordinary writer has ended the session: nobody leads", led_with(11, catalog!("led-no-more"))?),
        accept("led-unknown-field", "log 6.3", "a leadership with another field: skipped", led_with(7, catalog!("led-unknown-field"))?),
        reject("led-wrong-newest", "log 6.4", "a step that is given up counts as open", led_with(7, catalog!("led-wrong-newest"))?),
        reject("led-absent", "log 6.4", "nobody leads by the catalog, and somebody by the log", led_with(7, catalog!("led-absent"))?),
    ])
}
