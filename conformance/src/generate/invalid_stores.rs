//! Stores that every reader must reject. Each is a base and a delta with one fault. All digests are right, except one
//! that is itself the fault.

use serde_json::{Value, json};

use super::casks::pattern;
use super::dtypes::U8;
use super::forge::{Chunk, DELTA, UNCHANGED};
use super::sketch::{Outcome, Sketch};
use super::stores::small;
use super::writer::{Entry, Sealed, State, Store, Unsealed, digest_of, seal};
use crate::failure::Failure;

const CORRUPT: &str = "corrupt";
const UNSUPPORTED: &str = "unsupported";
const LIMIT: &str = "limit";

type Cases = Vec<Sketch>;

/// Returns a base of one tensor.
fn base() -> Result<Store, Failure> {
    let mut store = Store::new()?;
    store.save(tiny(10), None)?;
    Ok(store)
}

/// Returns a base and a delta of one tensor.
fn base_and_delta() -> Result<Store, Failure> {
    let mut store = base()?;
    store.save(tiny(20), Some(10))?;
    Ok(store)
}

fn tiny(step: u64) -> State {
    let mut state = small(step);
    state.entries.truncate(1);
    state.blobs.clear();
    state
}

fn reject(cases: &mut Cases, name: &'static str, clause: &'static str, kind: &'static str, why: &'static str, store: Store) {
    cases.push(Sketch { name: name.into(), clause: clause.into(), why: why.into(), input: store.into(), outcome: Outcome::Reject(kind) });
}

/// Returns a store whose newest snapshot is a delta made from an edited draft.
fn drafted(edit: impl Fn(&mut Unsealed)) -> Result<Store, Failure> {
    let mut store = Store::new()?;
    store.save(tiny(10), None)?;
    let mut snapshot = store.draft(tiny(20), Some(10));
    edit(&mut snapshot);
    store.commit(snapshot.seal())?;
    Ok(store)
}

/// Returns a store whose newest snapshot is a delta that was edited before its manifest was sealed.
fn sealed(edit: impl Fn(&mut Sealed)) -> Result<Store, Failure> {
    let mut store = Store::new()?;
    store.save(tiny(10), None)?;
    let mut snapshot = store.draft(tiny(20), Some(10)).seal();
    edit(&mut snapshot);
    store.commit(snapshot)?;
    Ok(store)
}

/// Returns a store whose newest manifest has edited JSON.
fn manifest_json(edit: impl Fn(String) -> String) -> Result<Store, Failure> {
    let mut store = Store::new()?;
    store.save(tiny(10), None)?;
    let snapshot = store.draft(tiny(20), Some(10)).seal();
    store.commit_with(snapshot, |_| {}, edit)?;
    Ok(store)
}

/// Returns a store with `event` as the last log entry.
fn entry(event: Value) -> Result<Store, Failure> {
    let mut store = base()?;
    store.append(event)?;
    Ok(store)
}

/// Returns a store with one object edited after everything was written.
fn damaged(folder: &str, nth: usize, edit: impl Fn(&mut Vec<u8>)) -> Result<Store, Failure> {
    let mut store = base()?;
    let path = store.path(folder, nth)?;
    if let Some(bytes) = store.objects.get_mut(&path) {
        edit(bytes);
    }
    Ok(store)
}

pub(crate) fn cases() -> Result<Cases, Failure> {
    let mut cases = Vec::new();
    log(&mut cases)?;
    manifest(&mut cases)?;
    directory(&mut cases)?;
    casks(&mut cases)?;
    chain(&mut cases)?;
    Ok(cases)
}

fn log(cases: &mut Cases) -> Result<(), Failure> {
    let mut add = |name, clause, kind, why, store| reject(cases, name, clause, kind, why, store);
    let opened = || json!({ "kind": "opened" });
    add("log/seal", "log 1.2", CORRUPT, "one bit of an entry", damaged("log/", 1, |bytes| bytes[60] ^= 1)?);
    add("log/truncated", "log 1.2", CORRUPT, "the last byte of an entry is gone", damaged("log/", 1, |bytes| _ = bytes.pop())?);
    let mut store = base()?;
    store.append_with(opened(), |_| {}, |json| json.replacen('{', "{\"surplus\":1,", 1))?;
    add("log/unknown-field", "log 1.3", CORRUPT, "a field that the table lacks", store);
    let mut store = base()?;
    store.append_with(opened(), |_| {}, |json| json.replacen('{', "{\"time_ms\":1,", 1))?;
    add("log/field-twice", "log 1.3", CORRUPT, "a field that stands twice", store);
    let mut store = base()?;
    store.append_with(opened(), |_| {}, |json| json.replacen('{', "{\"job\":{\"host\":\"a\"},", 1))?;
    add("log/job-without-process", "log 1.3", CORRUPT, "a job without the number of its process", store);
    let mut store = base()?;
    store.append_with(opened(), |entry| entry.writer = entry.writer.to_uppercase(), |json| json)?;
    add("log/upper-case-id", "README 1.9", CORRUPT, "an id in upper-case digits", store);
    let mut store = base()?;
    store.append_with(opened(), |entry| entry.format = "tensorcask-snapshot".into(), |json| json)?;
    add("log/format", "log 1.4", CORRUPT, "an entry that says it is a manifest", store);
    let mut store = base()?;
    store.append_with(opened(), |entry| entry.sequence = 5, |json| json)?;
    add("log/sequence", "log 3.1", CORRUPT, "another number than in the name", store);
    let mut store = base()?;
    store.append_with(opened(), |entry| entry.previous = Some("0".repeat(64)), |json| json)?;
    add("log/previous", "log 3.2", CORRUPT, "an entry that does not continue the one before", store);
    let mut store = base_and_delta()?;
    let path = store.path("log/", 1)?;
    let again = store
        .objects
        .get(&path)
        .map(|bytes| String::from_utf8_lossy(bytes).replace("\"time_ms\":1767225600002", "\"time_ms\":1767225600003"));
    let body = again.ok_or("no entry")?;
    store.objects.insert(path, seal(body.lines().next().unwrap_or_default()));
    add("log/replaced", "log 3.2", CORRUPT, "an entry that was replaced by another with a right seal", store);
    add("log/kind", "log 3.3", UNSUPPORTED, "an event to come", entry(json!({ "kind": "archived", "snapshots": [] }))?);
    let mut store = base()?;
    let path = store.path("log/", 1)?;
    let text = store.objects.get(&path).map(|bytes| String::from_utf8_lossy(bytes).into_owned()).unwrap_or_default();
    let event: Value = serde_json::from_str(text.lines().next().unwrap_or_default())?;
    store.append(event["event"].clone())?;
    add("log/added-twice", "log 3.4", CORRUPT, "a snapshot that is added twice", store);
    add(
        "log/forgets-unknown",
        "log 3.4",
        CORRUPT,
        "a snapshot that no entry added is forgotten",
        entry(json!({ "kind": "forgotten", "snapshots": ["77".repeat(16)] }))?,
    );
    let mut store = base()?;
    store.append_with(opened(), |entry| entry.version = "2.0".into(), |json| json.replacen('{', "{\"new\":1,", 1))?;
    add("version/log-major-2", "README 3", UNSUPPORTED, "an entry of a major version to come, with a new field", store);
    let mut store = base()?;
    store.append_with(opened(), |entry| entry.version = "1.00".into(), |json| json)?;
    add("version/not-a-version", "README 3.2", CORRUPT, "a minor version with a leading zero", store);
    let mut store = base()?;
    store.append_with(opened(), |entry| entry.must_understand = vec!["example".into()], |json| json)?;
    add("version/log-must-understand", "README 4", UNSUPPORTED, "an entry with a feature that must be understood", store);
    add(
        "version/upgraded",
        "README 4",
        UNSUPPORTED,
        "the store was upgraded to a feature that readers must know",
        entry(json!({ "kind": "upgraded", "must_understand": ["example"], "may_ignore": [] }))?,
    );
    let mut store = base()?;
    let file = json!({ "format": "tensorcask-store", "version": "2.0", "must_understand": [], "may_ignore": [], "run": "40".repeat(16) });
    store.objects.insert("store.json".into(), seal(&super::sketch::sorted(&file).to_string()));
    add("version/store-major-2", "README 3", UNSUPPORTED, "a store of a major version to come", store);
    Ok(())
}

fn manifest(cases: &mut Cases) -> Result<(), Failure> {
    let mut add = |name, clause, kind, why, store| reject(cases, name, clause, kind, why, store);
    let mut store = base_and_delta()?;
    let path = store.path("snapshots/", 1)?;
    store.objects.remove(&path);
    add("manifest/missing", "manifest 1", CORRUPT, "the manifest of a snapshot is missing", store);
    let mut store = base_and_delta()?;
    let path = store.path("snapshots/", 1)?;
    let bytes = store.objects.get(&path).cloned().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).replace("\"user\":{}", "\"user\":{\"loss\":1}");
    let forged = seal(text.lines().next().unwrap_or_default());
    if digest_of(&forged) == digest_of(&bytes) {
        return Err("the manifest was not changed".into());
    }
    store.objects.insert(path, forged);
    add("manifest/replaced", "manifest 1", CORRUPT, "another manifest than the log names", store);
    add(
        "manifest/key-twice",
        "log 1.3",
        CORRUPT,
        "a role that stands twice in `content`",
        manifest_json(|json| {
            json.replace("\"content\":{\"model\":", &format!("\"content\":{{\"model\":\"{}\",\"model\":", "0".repeat(64)))
        })?,
    );
    add("manifest/kind", "manifest 2.1", CORRUPT, "a base with a parent", sealed(|snapshot| snapshot.manifest.kind = "base".into())?);
    add("manifest/slots", "manifest 2.2", CORRUPT, "slots that do not ascend", {
        let mut store = Store::new()?;
        let mut snapshot = store.draft(small(10), None).seal();
        snapshot.manifest.casks.swap(0, 1);
        store.commit(snapshot)?;
        store
    });
    add(
        "manifest/cask-offsets",
        "manifest 2.3",
        CORRUPT,
        "an index root that begins before the index",
        sealed(|snapshot| {
            let cask = &mut snapshot.manifest.casks[0];
            cask.root_offset = cask.index_offset - 64;
        })?,
    );
    add(
        "manifest/tensor-bytes",
        "manifest 2.4",
        CORRUPT,
        "another size than the directory gives",
        sealed(|snapshot| snapshot.manifest.tensor_bytes += 1)?,
    );
    add(
        "manifest/content",
        "manifest 4",
        CORRUPT,
        "a content digest that is not that of the tensors",
        sealed(|snapshot| {
            snapshot.manifest.content.insert("model".into(), "0".repeat(64));
        })?,
    );
    Ok(())
}

fn directory(cases: &mut Cases) -> Result<(), Failure> {
    let mut add = |name, clause, kind, why, store| reject(cases, name, clause, kind, why, store);
    let table = |edit: fn(&mut super::forge::Table)| drafted(move |snapshot| edit(&mut snapshot.directory));
    add("directory/damaged", "manifest 3.1", CORRUPT, "one bit of the directory", damaged("directories/", 0, |bytes| bytes[130] ^= 1)?);
    add("directory/magic", "manifest 3.2", CORRUPT, "the magic of a cask", table(|table| table.column("head")[3] = b'K')?);
    add("directory/reserved", "manifest 3.2", CORRUPT, "a reserved byte", table(|table| table.column("head")[12] = 1)?);
    add("directory/major-2", "README 3", UNSUPPORTED, "a major version to come", table(|table| table.column("head")[8] = 2)?);
    add("directory/role-row", "manifest 3.3", CORRUPT, "a role that is not there", table(|table| table.column("tensor roles")[0] = 1)?);
    add(
        "directory/gap",
        "manifest 3.4",
        CORRUPT,
        "shards that do not cover their tensor",
        table(|table| table.set_u64("shard shapes", 0, 3))?,
    );
    add("directory/alias-with-shards", "manifest 3.5", CORRUPT, "an alias that has a shard", {
        let mut store = Store::new()?;
        let twins = ["a", "b"].map(|name| Entry::whole(name, U8, &[3], "model", &[1, 2, 3]));
        let mut snapshot = store.draft(State::new(1, twins.to_vec()), None);
        snapshot.directory.set_u32("aliases", 1, 0);
        // The alias does not count.
        let mut snapshot = snapshot.seal();
        snapshot.manifest.tensor_bytes = 3;
        store.commit(snapshot)?;
        store
    });
    add(
        "limits/directory-tensors",
        "limits 2",
        LIMIT,
        "2^40 tensors in a directory of 1 kilobyte",
        table(|table| table.set_u64("head", 4, 1 << 40))?,
    );
    Ok(())
}

fn casks(cases: &mut Cases) -> Result<(), Failure> {
    let mut add = |name, clause, kind, why, store| reject(cases, name, clause, kind, why, store);
    let mut store = base_and_delta()?;
    let path = store.path("casks/", 0)?;
    store.objects.remove(&path);
    add("store/cask-missing", "manifest 2.3", CORRUPT, "a cask of the base is missing", store);
    add(
        "store/cask-longer",
        "manifest 2.3",
        CORRUPT,
        "a cask with a byte more than the manifest says",
        damaged("casks/", 0, |bytes| bytes.push(0))?,
    );
    add("store/cask-of-another-version", "manifest 2.3", CORRUPT, "a whole cask of the same size, with another digest", {
        let mut store = base_and_delta()?;
        let path = store.path("casks/", 0)?;
        let mut other = Store::new()?;
        let mut state = tiny(10);
        if let Some(part) = state.entries[0].parts.first_mut() {
            part.data[0] ^= 1;
        }
        other.save(state, None)?;
        let bytes = other.objects.get(&path).cloned().ok_or("no cask")?;
        store.objects.insert(path, bytes);
        store
    });
    Ok(())
}

fn chain(cases: &mut Cases) -> Result<(), Failure> {
    let mut add = |name, clause, kind, why, store| reject(cases, name, clause, kind, why, store);
    let w = |data: &[u8]| vec![Entry::whole("w", U8, &[10], "model", data)];
    let old = pattern(10, 1);
    let new = pattern(10, 1).into_iter().map(|byte| byte ^ 0x11).collect::<Vec<u8>>();
    /// Returns a base and a delta of one tensor, after an edit of the delta's chunk.
    fn delta(old: Vec<Entry>, new: Vec<Entry>, edit: impl Fn(&mut Chunk)) -> Result<Store, Failure> {
        let mut store = Store::new()?;
        store.save(State::new(1, old), None)?;
        let mut snapshot = store.draft(State::new(2, new), Some(1));
        edit(&mut snapshot.casks[0].1.tensors[0].shards[0].chunks[0]);
        store.commit(snapshot.seal())?;
        Ok(store)
    }
    let columns = |mask: &[u8], values: &[u8]| vec![("mask", mask.to_vec()), ("values", values.to_vec())];

    add("chain/parent-unknown", "log 3.4", CORRUPT, "a delta on a snapshot that no entry added", {
        let mut store = Store::new()?;
        store.save(tiny(10), None)?;
        let mut snapshot = store.draft(tiny(20), Some(10)).seal();
        if let Some(parent) = &mut snapshot.manifest.parent {
            parent.snapshot = "77".repeat(16);
        }
        store.commit(snapshot)?;
        store
    });
    add(
        "chain/step-differs",
        "chain 2.3",
        CORRUPT,
        "a manifest of another step than its entry",
        sealed(|snapshot| snapshot.manifest.step = 21)?,
    );
    add("chain/parent-differs", "chain 2.3", CORRUPT, "an entry without the parent that the manifest names", {
        let mut store = Store::new()?;
        store.save(tiny(10), None)?;
        let snapshot = store.draft(tiny(20), Some(10)).seal();
        store.commit_with(snapshot, |event| event["parent"] = Value::Null, |json| json)?;
        store
    });
    add(
        "chain/other-content",
        "chain 2.4",
        CORRUPT,
        "a delta made on other bytes than its parent holds",
        sealed(|snapshot| {
            if let Some(parent) = &mut snapshot.manifest.parent {
                parent.content.insert("model".into(), "0".repeat(64));
            }
        })?,
    );
    add("chain/cask-dtype", "chain 3.2", CORRUPT, "another dtype in the cask than in the directory", {
        drafted(|snapshot| {
            snapshot.casks[0].1.tensors[0].dtype =
                super::dtypes::DTYPES.iter().position(|(name, _)| *name == "f16").map_or(0, |i| i as u8 + 1)
        })?
    });
    add("chain/delta-in-base", "chain 3.3", CORRUPT, "a base with a delta chunk", {
        let mut store = Store::new()?;
        let mut snapshot = store.draft(State::new(1, w(&old)), None);
        snapshot.casks[0].1.tensors[0].shards[0].chunks[0] = Chunk::bitmask(&[0; 10], &old, 1);
        store.commit(snapshot.seal())?;
        store
    });
    add("chain/unchanged-in-a-base-that-no-walk-meets", "chain 3.3", CORRUPT, "a base with an unchanged chunk, below a whole one", {
        let mut store = Store::new()?;
        let mut snapshot = store.draft(State::new(1, w(&old)), None);
        let chunk = &mut snapshot.casks[0].1.tensors[0].shards[0].chunks[0];
        (chunk.kind, chunk.codec, chunk.columns) = (UNCHANGED, "", vec![]);
        store.commit(snapshot.seal())?;
        let mut snapshot = store.draft(State::new(2, w(&new)), Some(1));
        snapshot.casks[0].1.tensors[0].shards[0].chunks[0] = Chunk::raw(&new);
        store.commit(snapshot.seal())?;
        store.forget(&[1], 2)?;
        store
    });
    add(
        "chain/no-absolute-chunk",
        "chain 3.1",
        CORRUPT,
        "a delta chunk of a tensor that the parent lacks",
        delta(w(&old), vec![Entry::whole("v", U8, &[10], "model", &new)], |chunk| {
            *chunk = Chunk::bitmask(&[0; 10], &pattern(10, 1), 1);
            chunk.crc = crc32fast::hash(&pattern(10, 1).into_iter().map(|byte| byte ^ 0x11).collect::<Vec<u8>>());
        })?,
    );
    add(
        "chain/unchanged-but-other-checksum",
        "chain 3.4",
        CORRUPT,
        "an unchanged chunk whose checksum is not the parent's",
        delta(w(&old), w(&new), |chunk| {
            (chunk.kind, chunk.codec, chunk.columns) = (UNCHANGED, "", vec![]);
        })?,
    );
    add(
        "chain/decoded-checksum",
        "chain 3.4",
        CORRUPT,
        "a delta whose result has another checksum",
        delta(w(&old), w(&new), |chunk| {
            chunk.columns[1].1[0] ^= 1;
        })?,
    );
    add(
        "codecs/mask-length",
        "bitmask 3",
        CORRUPT,
        "a mask of three bytes for ten units",
        delta(w(&old), w(&new), |chunk| chunk.columns[0].1.push(0))?,
    );
    add(
        "codecs/mask-unused-bits",
        "bitmask 3",
        CORRUPT,
        "a mask with a bit behind the last unit",
        delta(w(&old), w(&new), |chunk| {
            chunk.columns[0].1[1] |= 4;
            chunk.columns[1].1.push(0);
        })?,
    );
    add(
        "codecs/mask-values",
        "bitmask 3",
        CORRUPT,
        "a value more than the mask has ones",
        delta(w(&old), w(&new), |chunk| chunk.columns[1].1.push(0))?,
    );
    let one = columns(&[1, 0], &[1]);
    add(
        "codecs/mask-columns-swapped",
        "codecs 4.1",
        CORRUPT,
        "values before the mask",
        delta(w(&old), w(&new), move |chunk| {
            chunk.columns = one.iter().rev().cloned().collect();
            chunk.kind = DELTA;
        })?,
    );
    Ok(())
}
