//! Stores after maintenance, with compacted, reduced and collected snapshots.

use serde_json::{Value, json};

use super::dtypes::{F32, U8};
use super::sketch::{Outcome, Sketch};
use super::stores::{base_and_delta, small};
use super::writer::{Entry, State, Store};
use crate::failure::Failure;

const MODEL: &[&str] = &["model"];

fn accept(name: &str, clause: &str, why: &str, store: Store) -> Sketch {
    let outcome = Outcome::Accept(store.expected());
    Sketch { name: name.into(), clause: clause.into(), why: why.into(), input: store.into(), outcome }
}

fn reject(name: &str, clause: &str, why: &str, store: Store) -> Sketch {
    Sketch { name: name.into(), clause: clause.into(), why: why.into(), input: store.into(), outcome: Outcome::Reject("corrupt") }
}

/// Adds a base that has only these roles, as a copy of a reduced snapshot, after an edit of the entry's event.
fn add_reduced(store: &mut Store, mut state: State, roles: &[&str], edit_event: impl Fn(&mut Value)) -> Result<(), Failure> {
    state.entries.retain(|entry| roles.contains(&entry.role));
    let snapshot = store.draft(state, None);
    let edit = |event: &mut Value| {
        event["roles"] = json!(roles);
        edit_event(event);
    };
    store.commit_with(snapshot.seal(), edit, |json| json)
}

/// Returns a store with bases at 10 and 20.
fn two_bases() -> Result<Store, Failure> {
    let mut store = Store::new()?;
    store.save(small(10), None)?;
    store.save(small(20), None)?;
    Ok(store)
}

/// Returns a store with a base at 10 and deltas at 20 and 30, each against the previous snapshot.
fn three_links() -> Result<Store, Failure> {
    let mut store = base_and_delta()?;
    store.save(small(30), Some(20))?;
    Ok(store)
}

pub(crate) fn cases() -> Result<Vec<Sketch>, Failure> {
    let mut cases = compacted()?;
    cases.extend(reduced()?);
    cases.extend(collected()?);
    Ok(cases)
}

fn compacted() -> Result<Vec<Sketch>, Failure> {
    let mut cases = Vec::new();

    let mut store = three_links()?;
    store.compact(30, None)?;
    cases.push(accept("compacted/into-a-base", "log 4.6", "the last of three links was folded into a base", store));

    let mut store = three_links()?;
    store.compact(20, None)?;
    store.compact(30, Some(20))?;
    store.compact(30, None)?;
    cases.push(accept("compacted/more-than-once", "log 3.5", "another manifest with the parent that it had, then one without", store));

    let mut store = three_links()?;
    store.compact(20, None)?;
    store.forget(&[10], 30)?;
    cases.push(accept("compacted/under-a-delta", "log 4.6", "a delta stays valid when its parent is folded into a base", store));

    let mut store = base_and_delta()?;
    let draft = store.redraft(small(20), None);
    store.commit_compacted(draft.seal(), None, |event| {
        _ = event.as_object_mut().map(|fields| (fields.remove("roles"), fields.remove("parent")))
    })?;
    cases.push(accept("compacted/absent-fields", "log 1.3", "`parent` and `roles` absent instead of null", store));

    let mut store = base_and_delta()?;
    store.compact(20, None)?;
    store.delete(&format!("snapshots/20-{}.json", store.id_of(20)));
    cases.push(accept("compacted/old-manifest-deleted", "log 4.6", "the manifest that a compaction replaced is needed no more", store));

    let mut store = three_links()?;
    let draft = store.redraft(small(30), None);
    store.commit_compacted(draft.seal(), None, |event| event["parent"] = Value::String("77".repeat(16)))?;
    cases.push(reject("compacted/parent-unknown", "log 3.5", "the new parent was never added", store));

    let mut store = three_links()?;
    let draft = store.redraft(small(30), Some(10));
    store.commit_compacted(draft.seal(), None, |_| {})?;
    cases.push(reject("compacted/another-parent", "log 3.5", "the new parent is the parent's parent", store));

    let mut store = three_links()?;
    store.compact(30, None)?;
    store.compact(30, Some(20))?;
    cases.push(reject("compacted/parent-comes-back", "log 3.5", "a base gets the parent again that it had before", store));

    let mut store = base_and_delta()?;
    let draft = store.redraft(small(20), None);
    store.commit_compacted(draft.seal(), None, |event| event["snapshot"] = Value::String("77".repeat(16)))?;
    cases.push(reject("compacted/snapshot-unknown", "log 3.4", "a snapshot that was never added is compacted", store));

    let mut store = base_and_delta()?;
    let draft = store.redraft(small(20), None);
    store.commit_compacted(draft.seal(), None, |event| event["parent"] = Value::String("0a".repeat(16)))?;
    cases.push(reject("compacted/manifest-without-the-parent", "chain 2.3", "the entry names a parent that the new manifest lacks", store));

    let mut store = base_and_delta()?;
    store.compact(20, None)?;
    let path = store.path("snapshots/20-", 0)?;
    let old = store.objects.get(&path.replace(&path[path.len() - 70..], ".json")).cloned().ok_or("no manifest")?;
    store.objects.insert(path, old);
    cases.push(reject(
        "compacted/old-manifest-under-the-new-name",
        "manifest 1",
        "the manifest has another digest than the entry names",
        store,
    ));

    let mut store = base_and_delta()?;
    store.compact(20, None)?;
    let path = store.path("snapshots/20-", 0)?;
    store.objects.remove(&path);
    cases.push(reject("compacted/manifest-missing", "manifest 1", "the new manifest is missing, the old one is there", store));

    let mut store = base_and_delta()?;
    let mut other = small(10);
    other.entries[0].parts[0].data[5] ^= 1;
    let draft = store.redraft(other, None);
    store.commit_compacted(draft.seal(), None, |_| {})?;
    cases.push(reject("compacted/other-content", "chain 2.4", "a compaction of a parent changed a weight", store));
    Ok(cases)
}

fn reduced() -> Result<Vec<Sketch>, Failure> {
    let mut cases = Vec::new();

    let mut store = two_bases()?;
    store.reduce(10, MODEL)?;
    store.delete(&format!("casks/{}ca01", &store.id_of(10)[..28]));
    cases.push(accept("reduced/to-the-model", "log 4.7", "a step that kept its weights; the old cask of the optimizer is gone", store));

    let mut store = two_bases()?;
    store.reduce(10, &["exp_avg", "model"])?;
    store.reduce(10, MODEL)?;
    store.compact(10, None)?;
    cases.push(accept("reduced/twice", "log 3.6", "reduced, reduced further, and compacted without another change of roles", store));

    let mut store = two_bases()?;
    store.save(small(30), None)?;
    store.reduce(20, MODEL)?;
    store.forget(&[30], 10)?;
    cases.push(accept("reduced/is-not-latest", "log 4.2", "a reduced snapshot is live, and not the latest", store));

    let mut store = two_bases()?;
    store.reduce(10, MODEL)?;
    store.forget(&[20], 10)?;
    store.latest = None;
    cases.push(accept("reduced/no-latest", "log 4.2", "the only live snapshot is reduced: none is the latest", store));

    let mut store = Store::new()?;
    store.save(small(10), None)?;
    add_reduced(&mut store, small(20), MODEL, |_| {})?;
    store.latest = Some(10);
    cases.push(accept(
        "reduced/when-added",
        "log 3.6",
        "a copy of a reduced snapshot has only weights from its entry on, and is not the latest",
        store,
    ));

    for (name, roles) in [("none", json!([])), ("unsorted", json!(["model", "exp_avg"])), ("twice", json!(["model", "model"]))] {
        let mut store = Store::new()?;
        store.save(small(10), None)?;
        add_reduced(&mut store, small(20), MODEL, |event| event["roles"] = roles.clone())?;
        let why = "a snapshot is added with an empty list of roles, or with one that does not ascend strictly";
        cases.push(reject(&format!("reduced/added-{name}"), "log 3.6", why, store));
    }

    let mut store = Store::new()?;
    store.save(small(10), None)?;
    add_reduced(&mut store, small(20), &["exp_avg", "model", "other"], |event| event["roles"] = json!(MODEL))?;
    cases.push(reject("reduced/added-with-more", "chain 2.3", "the manifest has a role that its entry says was dropped", store));

    // The delta replaces the part that its parent lost.
    let mut store = Store::new()?;
    let state = |step: u64, shape: u64, last: u8| {
        let moments = vec![3; 4 * shape as usize];
        let state = vec![Entry::whole("m", F32, &[shape], "exp_avg", &moments), Entry::whole("w", U8, &[3], "model", &[1, 2, last])];
        State::new(step, state)
    };
    store.save(state(10, 2, 3), None)?;
    store.save(state(20, 4, 4), Some(10))?;
    store.reduce(10, MODEL)?;
    cases.push(accept(
        "reduced/role-that-no-chunk-needs",
        "chain 3.1",
        "a delta on a reduced parent, all chunks of the lost role absolute",
        store,
    ));

    let mut store = base_and_delta()?;
    store.reduce(10, MODEL)?;
    cases.push(reject("reduced/role-that-a-delta-needs", "chain 3.1", "a live delta on moments that its parent has lost", store));

    let roles = |roles: &[&str]| -> Result<Store, Failure> {
        let mut store = two_bases()?;
        store.reduce_with(10, MODEL, |event| event["roles"] = json!(roles))?;
        Ok(store)
    };
    cases.push(reject("reduced/to-nothing", "log 3.6", "no roles at all", roles(&[])?));
    cases.push(reject("reduced/unsorted", "log 3.6", "roles that descend", roles(&["model", "exp_avg"])?));
    cases.push(reject("reduced/role-twice", "log 3.6", "a role that stands twice", roles(&["model", "model"])?));

    let mut store = two_bases()?;
    store.reduce(10, MODEL)?;
    store.reduce_with(10, MODEL, |event| event["roles"] = json!(["exp_avg", "model"]))?;
    cases.push(reject("reduced/role-comes-back", "log 3.6", "a role that an earlier reduction dropped", store));

    let mut store = two_bases()?;
    let draft = store.redraft(small(10), None);
    store.commit_compacted(draft.seal(), Some(MODEL), |_| {})?;
    cases.push(reject("reduced/manifest-with-more-roles", "chain 2.3", "the new manifest still has roles that the entry drops", store));
    Ok(cases)
}

fn collected() -> Result<Vec<Sketch>, Failure> {
    let mut cases = Vec::new();

    let mut store = two_bases()?;
    store.forget(&[10], 20)?;
    store.collect(&[10])?;
    cases.push(accept("collected/objects-gone", "log 4.1", "casks and manifest of a collected snapshot are gone", store));

    let mut store = two_bases()?;
    store.forget(&[10], 20)?;
    store.collect(&[10])?;
    store.append(json!({ "kind": "forgotten", "snapshots": [store.id_of(10)] }))?;
    store.append(json!({ "kind": "pinned", "snapshot": store.id_of(10), "pinned": true }))?;
    cases.push(accept("collected/forgotten-again", "log 4.1", "what was collected stays so, whatever names it later", store));

    let mut store = base_and_delta()?;
    store.compact(20, None)?;
    store.forget(&[10], 20)?;
    store.collect(&[10])?;
    store.delete(&format!("snapshots/20-{}.json", store.id_of(20)));
    cases.push(accept("collected/parent-of-a-compacted", "log 4.6", "the parent that a compacted snapshot no longer needs", store));

    let mut store = base_and_delta()?;
    store.save(small(30), None)?;
    store.forget(&[10, 20], 30)?;
    store.collect(&[10])?;
    cases.push(accept("collected/parent-of-a-forgotten", "chain 2.9", "a forgotten delta may have lost its parent", store));

    let mut store = base_and_delta()?;
    let mut again = small(20);
    again.id = [0x22; 16];
    store.append(json!({ "kind": "pinned", "snapshot": store.id_of(20), "pinned": true }))?;
    store.append(json!({ "kind": "forgotten", "snapshots": [store.id_of(10)] }))?;
    store.collect(&[10])?;
    store.save(again, None)?;
    store.drop_expected(10, 20);
    cases.push(accept(
        "collected/parent-of-a-superseded",
        "chain 2.9",
        "a superseded delta may have lost its parent, though it is pinned",
        store,
    ));

    let mut store = two_bases()?;
    store.append(json!({ "kind": "collecting", "snapshots": [store.id_of(20)] }))?;
    store.drop_expected(20, 10);
    cases.push(accept("collected/live", "log 4.1", "a live snapshot that an entry collects is collected", store));

    let mut store = base_and_delta()?;
    store.append(json!({ "kind": "collecting", "snapshots": [store.id_of(10)] }))?;
    cases.push(reject("collected/parent-of-a-live", "chain 2.8", "a live delta on a collected parent, whose objects are there", store));

    let mut store = two_bases()?;
    store.append(json!({ "kind": "collecting", "snapshots": ["77".repeat(16)] }))?;
    cases.push(reject("collected/unknown", "log 3.4", "a snapshot that was never added is collected", store));

    let mut store = two_bases()?;
    store.forget(&[10], 20)?;
    store.collect(&[10])?;
    let draft = store.redraft(small(10), None);
    store.commit_compacted(draft.seal(), None, |_| {})?;
    store.drop_expected(10, 20);
    cases.push(accept(
        "collected/compacted-after",
        "log 4.1",
        "a snapshot that was collected stays so, though it was compacted after",
        store,
    ));
    Ok(cases)
}
