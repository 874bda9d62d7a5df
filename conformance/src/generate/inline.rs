//! Stores with snapshots inside of log entries (log 3.7).

use serde_json::{Value, json};

use super::sketch::{Outcome, Sketch};
use super::stores::small;
use super::writer::{Store, commit_inline, save_inline};
use crate::failure::Failure;

const CORRUPT: &str = "corrupt";

/// Returns a base and a delta, both inside of their entries, after an edit of the delta's entry.
fn base_and_delta(edit: impl Fn(&mut Value, &mut Vec<u8>)) -> Result<Store, Failure> {
    let mut store = Store::new()?;
    save_inline(&mut store, small(10), None)?;
    let snapshot = store.draft(small(20), Some(10));
    commit_inline(&mut store, snapshot.seal(), edit)?;
    Ok(store)
}

/// Returns the same store after an edit of the first cask of the delta.
fn cask_edited(edit: impl Fn(&mut [u8])) -> Result<Store, Failure> {
    base_and_delta(|event, held| {
        let manifest = event["inline"].as_u64().unwrap_or_default() as usize;
        edit(&mut held[manifest..]);
    })
}

pub(crate) fn cases() -> Result<Vec<Sketch>, Failure> {
    let mut cases = Vec::new();
    let mut add = |name: &str, clause: &str, why: &str, store: Store, reject: bool| {
        let outcome = if reject { Outcome::Reject(CORRUPT) } else { Outcome::Accept(store.expected()) };
        cases.push(Sketch { name: format!("inline/{name}"), clause: clause.into(), why: why.into(), input: store.into(), outcome });
    };

    add("base-and-delta", "log 3.7", "a base and a delta, each inside of its entry", base_and_delta(|_, _| {})?, false);

    let mut store = Store::new()?;
    store.save(small(10), None)?;
    save_inline(&mut store, small(20), Some(10))?;
    store.save(small(30), Some(20))?;
    add("in-a-chain-with-objects", "log 3.7", "a delta inside of its entry between two snapshots that are objects", store, false);

    let mut store = Store::new()?;
    let mut same = small(10);
    same.blobs.clear();
    save_inline(&mut store, same.clone(), None)?;
    let mut again = same;
    (again.step, again.id) = (20, small(20).id);
    save_inline(&mut store, again, Some(10))?;
    add("without-casks", "log 3.7", "a delta inside of its entry in which nothing changed: a manifest and no cask", store, false);

    let mut store = base_and_delta(|_, _| {})?;
    store.compact(20, None)?;
    add("compacted", "log 3.7", "a compacted snapshot is read from its objects, not from its first entry", store, false);

    let mut store = Store::new()?;
    let snapshot = store.draft(small(10), None);
    commit_inline(&mut store, snapshot.seal(), |_, held| held.truncate(100))?;
    store.save(small(20), None)?;
    store.forget(&[10], 20)?;
    store.collect(&[10])?;
    add("cut-but-collected", "log 3.7", "a cut snapshot in an entry, which was collected: nobody reads it", store, false);

    let cut = |bytes: usize| base_and_delta(|_, held| held.truncate(held.len() - bytes));
    add("cut-in-a-cask", "log 3.7", "the last byte of the last cask is missing", cut(1)?, true);
    add(
        "cut-in-the-manifest",
        "log 3.7",
        "the entry ends in the middle of the manifest",
        base_and_delta(|_, held| held.truncate(100))?,
        true,
    );
    add("bytes-after-the-last-cask", "log 3.7", "a byte follows the last cask", base_and_delta(|_, held| held.push(0))?, true);
    add(
        "nothing-held",
        "log 3.7",
        "an entry that says that it holds a snapshot and ends at its seal",
        base_and_delta(|_, held| held.clear())?,
        true,
    );
    add(
        "inline-too-small",
        "log 1.2",
        "`inline` is one less than the size of the manifest",
        base_and_delta(|event, _| event["inline"] = json!(event["inline"].as_u64().unwrap_or_default() - 1))?,
        true,
    );
    add(
        "inline-beyond-64-bits",
        "log 1.3",
        "`inline` is 2^64",
        base_and_delta(|event, _| event["inline"] = serde_json::from_str("18446744073709551616").unwrap_or_default())?,
        true,
    );
    add(
        "another-manifest",
        "manifest 1",
        "the entry names another digest than that of the manifest that it holds",
        base_and_delta(|event, _| event["manifest"] = json!("77".repeat(32)))?,
        true,
    );
    add(
        "cask-header-damaged",
        "container 2.2",
        "a bit of the id in the header of the cask is flipped",
        cask_edited(|cask| cask[8] ^= 1)?,
        true,
    );
    add("page-damaged", "container 5.2", "a bit of a page is flipped", cask_edited(|cask| cask[64] ^= 1)?, true);
    add("padding-not-zero", "container 4.3", "a byte of padding in a cask is not zero", cask_edited(|cask| cask[40] = 1)?, true);

    let mut store = Store::new()?;
    store.save(small(10), None)?;
    let path = store.path("log/", 0)?;
    store.objects.entry(path).or_default().push(b'\n');
    add("bytes-after-another-event", "log 1.2", "a byte follows the seal of an entry that holds no snapshot", store, true);
    Ok(cases)
}
