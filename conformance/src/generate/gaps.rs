//! Faults of JSON, names and places, and cases that the spec leaves to the reader.

use serde_json::{Value, json};

use super::casks::pattern;
use super::dtypes::{I64, U8, U16};
use super::forge::{Blob, Cask, Chunk, DELTA, Shard, Tensor, id};
use super::sketch::{Input, Outcome, Sketch, sorted};
use super::stores::{base_and_delta, small};
use super::writer::{Entry, Part, State, Store, seal};
use crate::failure::Failure;

const CORRUPT: &str = "corrupt";
const UNSUPPORTED: &str = "unsupported";

fn sketch(name: &str, clause: &str, why: &str, store: Store, outcome: Outcome) -> Sketch {
    Sketch { name: name.into(), clause: clause.into(), why: why.into(), input: store.into(), outcome }
}

fn accept(name: &str, clause: &str, why: &str, store: Store) -> Sketch {
    let outcome = Outcome::Accept(store.expected());
    sketch(name, clause, why, store, outcome)
}

fn either(name: &str, clause: &str, kind: &'static str, why: &str, store: Store) -> Sketch {
    let outcome = Outcome::Either(store.expected(), kind);
    sketch(name, clause, why, store, outcome)
}

fn reject(name: &str, clause: &str, kind: &'static str, why: &str, store: Store) -> Sketch {
    sketch(name, clause, why, store, Outcome::Reject(kind))
}

/// Returns a base whose manifest has this JSON as `user`. `found` is the expected report, if the JSON is valid.
fn user(json: &str, found: Value) -> Result<Store, Failure> {
    let mut store = Store::new()?;
    let mut state = small(10);
    if let Value::Object(fields) = found {
        state.user = fields;
    }
    let snapshot = store.draft(state, None).seal();
    let edit = |manifest: String| match manifest.split_once("\"user\":") {
        Some((before, _)) => format!("{before}\"user\":{json}}}"),
        None => manifest,
    };
    store.commit_with(snapshot, |_| {}, edit)?;
    Ok(store)
}

/// Returns a base and an entry whose JSON was edited.
fn entry(edit: impl Fn(String) -> String) -> Result<Store, Failure> {
    let mut store = Store::new()?;
    store.save(small(10), None)?;
    store.append_with(json!({ "kind": "opened" }), |_| {}, edit)?;
    Ok(store)
}

pub(crate) fn cases() -> Result<Vec<Sketch>, Failure> {
    let mut cases = json_of_users()?;
    cases.extend(log()?);
    cases.extend(places()?);
    cases.extend(directories()?);
    cases.extend(deltas_alone());
    Ok(cases)
}

fn json_of_users() -> Result<Vec<Sketch>, Failure> {
    let numbers = r#"{"below":-9223372036854775809,"beyond":18446744073709551616,"greatest":18446744073709551615,"half":5e-1,"least":-9223372036854775808,"one":1,"real":1.0,"tiny":1e-999}"#;
    let found = json!({
        "below": -9_223_372_036_854_775_808.0, "beyond": 18_446_744_073_709_551_616.0, "greatest": u64::MAX, "half": 0.5, "least": i64::MIN,
        "one": 1, "real": 1.0, "tiny": 0.0,
    });
    let times = r#"{"tc.times":{"encode_ms":12.5,"later":[],"previous":{"save_ms":40,"stall_ms":0.25,"step":7},"upload_ms":0}}"#;
    let written = r#"{"tc.times":{"written_ms":1767225600000}}"#;
    let no_times = r#"{"tc.times":{"encode_ms":"soon","previous":[],"upload_ms":-1}}"#;
    let nested = |arrays: usize| -> Result<Store, Failure> {
        // The manifest and `user` are the first two levels.
        let text = format!("{{\"deep\":{}{}}}", "[".repeat(arrays), "]".repeat(arrays));
        let found = (1..arrays).fold(json!([]), |inner, _| json!([inner]));
        user(&text, json!({ "deep": found }))
    };
    let mut cases = vec![
        accept(
            "manifest/numbers-of-the-user",
            "log 1.3",
            "integers of 64 bits are themselves, other numbers the nearest binary64",
            user(numbers, found)?,
        ),
        accept(
            "manifest/times",
            "manifest 2.5",
            "times of saves, with a field that is not known",
            user(times, serde_json::from_str(times)?)?,
        ),
        accept(
            "manifest/times-written",
            "manifest 2.5",
            "the clock of the writer, a whole number",
            user(written, serde_json::from_str(written)?)?,
        ),
        accept(
            "manifest/times-of-another-form",
            "manifest 2.5",
            "times that are no numbers, or negative: facts of the writer never make a snapshot unreadable",
            user(no_times, serde_json::from_str(no_times)?)?,
        ),
        accept(
            "manifest/texts-of-the-user",
            "log 1.3",
            "escapes, a surrogate pair, a byte-order mark and a zero in texts",
            user(r#"{"\u0000":"\ud83e\udd80","a\/b":"\ufeff"}"#, json!({ "\0": "\u{1f980}", "a/b": "\u{feff}" }))?,
        ),
        accept(
            "manifest/not-finite",
            "manifest 1.4",
            "a mark that the state holds NaN; a reader may ignore it",
            user(r#"{"tc.finite":false}"#, json!({ "tc.finite": false }))?,
        ),
        accept(
            "manifest/finite-of-another-type",
            "manifest 1.4",
            "a mark that is no Boolean says nothing",
            user(r#"{"tc.finite":"no"}"#, json!({ "tc.finite": "no" }))?,
        ),
        accept("manifest/nested-127-deep", "log 1.3", "values nested as deep as a writer may", nested(125)?),
    ];
    let bad = [
        ("manifest/half-a-surrogate-pair", r#"{"note":"\ud83e"}"#, "an escape of half a surrogate pair"),
        ("manifest/surrogates-in-reverse", r#"{"note":"\udd80\ud83e"}"#, "a surrogate pair whose halves have changed places"),
        ("manifest/half-a-surrogate-pair-in-a-key", r#"{"\udd80":1}"#, "half a surrogate pair in a key"),
        ("manifest/number-beyond-binary64", r#"{"loss":1e999}"#, "a number beyond the range of binary64"),
        ("manifest/key-twice-in-user", r#"{"a":{"b":1,"b":1}}"#, "a key that stands twice in an object of the user"),
        ("manifest/key-twice-by-an-escape", r#"{"a":1,"\u0061":1}"#, "a key that stands twice, once as an escape"),
        ("manifest/nan", r#"{"loss":NaN}"#, "a number that JSON does not have"),
        ("manifest/trailing-comma", r#"{"loss":1,}"#, "a comma before the end of an object"),
    ];
    for (name, json, why) in bad {
        cases.push(reject(name, "log 1.3", CORRUPT, why, user(json, json!({}))?));
    }
    cases.push(either("manifest/nested-128-deep", "log 1.3", CORRUPT, "values nested deeper than a writer may", nested(126)?));
    Ok(cases)
}

fn log() -> Result<Vec<Sketch>, Failure> {
    let replaced = |from: &'static str, to: &'static str| entry(move |json| json.replacen(from, to, 1));
    let mut cases = vec![
        reject("log/number-with-a-fraction", "log 1.3", CORRUPT, "a sequence of 3.0", replaced("\"sequence\":3", "\"sequence\":3.0")?),
        reject("log/number-with-an-exponent", "log 1.3", CORRUPT, "a sequence of 3e0", replaced("\"sequence\":3", "\"sequence\":3e0")?),
        reject("log/number-beyond-64-bits", "log 1.3", CORRUPT, "a time of 2^64", replaced("1767225600003", "18446744073709551616")?),
        reject("log/negative-number", "log 1.3", CORRUPT, "a time before 1970", replaced("\"time_ms\":", "\"time_ms\":-")?),
        reject("log/byte-order-mark", "log 1.3", CORRUPT, "a byte-order mark before the JSON", entry(|json| format!("\u{feff}{json}"))?),
        reject("log/two-objects", "log 1.3", CORRUPT, "a second object after the first", entry(|json| format!("{json}{{}}"))?),
        reject(
            "log/field-missing",
            "log 1.3",
            CORRUPT,
            "an entry without features that may be ignored",
            replaced("\"may_ignore\":[],", "")?,
        ),
        reject("log/null", "log 1.3", CORRUPT, "null for a time", replaced("1767225600003", "null")?),
        reject("log/token-of-31-digits", "README 1.9", CORRUPT, "an id that is a digit short", replaced("\"token\":\"7", "\"token\":\"")?),
    ];

    for (name, why, nth) in [("log/first-missing", "the first entry is missing", 0), ("log/gap", "an entry between others is missing", 1)] {
        let mut store = base_and_delta()?;
        let path = store.path("log/", nth)?;
        store.objects.remove(&path);
        cases.push(reject(name, "log 3.1", CORRUPT, why, store));
    }

    let mut store = base_and_delta()?;
    store.objects.retain(|path, _| !path.starts_with("log/"));
    cases.push(reject("log/lost", "log 4.8", CORRUPT, "no entry is there, but a directory and manifests that follow one", store));

    let mut store = base_and_delta()?;
    store.objects.insert("log/notes.txt".into(), b"not an entry".to_vec());
    store.objects.insert("log/3.json".into(), b"{}".to_vec());
    cases.push(accept("log/foreign-objects", "README 2.2", "objects whose names are not those of entries are ignored", store));

    let mut store = Store::new()?;
    let mut snapshot = store.draft(small(10), None).seal();
    snapshot.manifest.kind = "delta".into();
    snapshot.manifest.parent = Some(super::writer::Parent { snapshot: store.id_of(10), content: snapshot.manifest.content.clone() });
    store.commit(snapshot)?;
    cases.push(reject("log/its-own-parent", "log 3.4", CORRUPT, "the smallest circle: a snapshot that is its own parent", store));

    let mut store = base_and_delta()?;
    store.append(json!({ "kind": "pinned", "snapshot": "77".repeat(16), "pinned": true }))?;
    cases.push(reject("log/pins-unknown", "log 3.4", CORRUPT, "a snapshot that no entry added is pinned", store));

    let mut store = base_and_delta()?;
    store.objects.remove("store.json");
    cases.push(reject("store/no-store-json", "log 2.1", CORRUPT, "a folder with a log, but without `store.json`", store));

    let mut store = base_and_delta()?;
    let file = json!({ "format": "tensorcask-log", "version": "1.0", "must_understand": [], "may_ignore": [], "run": "40".repeat(16) });
    store.objects.insert("store.json".into(), seal(&sorted(&file).to_string()));
    cases.push(reject("store/format", "log 1.4", CORRUPT, "`store.json` says it is an entry", store));

    let mut store = base_and_delta()?;
    store.forget(&[10], 20)?;
    store.compact(20, None)?;
    let path = store.path("snapshots/10-", 0)?;
    store.objects.insert(path, b"damaged".to_vec());
    cases.push(either(
        "store/damage-that-no-live-step-meets",
        "chain 2.9",
        CORRUPT,
        "the manifest of a forgotten snapshot that no live one needs",
        store,
    ));
    Ok(cases)
}

fn places() -> Result<Vec<Sketch>, Failure> {
    let mut cases = Vec::new();
    let with_blobs = |slot: u32, rank: u32| -> Result<Store, Failure> {
        let mut store = Store::new()?;
        let mut state = small(10);
        state.blobs = vec![(slot, vec![Blob::new(rank, "rng", b"state")])];
        store.save(state, None)?;
        Ok(store)
    };
    cases.push(reject("blobs/in-an-even-slot", "manifest 5.4", CORRUPT, "a blob in the cask of the model", with_blobs(0, 0)?));
    cases.push(reject("blobs/of-another-rank", "manifest 5.4", CORRUPT, "a blob of rank 1 in a cask of rank 0", with_blobs(1, 1)?));

    let mut store = Store::new()?;
    let mut snapshot = store.draft(small(10), None);
    let chunk = &mut snapshot.casks[0].1.tensors[0].shards[0].chunks[0];
    (chunk.codec, chunk.columns) = ("example.zip", vec![("zipped", vec![1, 2, 3])]);
    store.commit(snapshot.seal())?;
    cases.push(reject("store/unknown-codec", "codecs 2", UNSUPPORTED, "a live step with a codec that no reader knows", store));

    let mut store = Store::new()?;
    let mut snapshot = store.draft(small(10), None);
    snapshot.casks[0].1.tensors.push(Tensor::whole("z", U8, &[3], vec![Chunk::raw(&[1, 2, 3])]));
    store.commit(snapshot.seal())?;
    cases.push(either(
        "store/shard-that-the-directory-lacks",
        "manifest 5.2",
        CORRUPT,
        "a cask with a tensor that the directory lacks",
        store,
    ));

    // Rank 1 has saved the step count, too: whole, where rank 0 made a delta.
    let mut store = Store::new()?;
    for (step, parent) in [(10, None), (20, Some(10))] {
        let mut state = small(step);
        state.blobs.push((3, vec![Blob::new(1, "rng", b"state")]));
        let mut snapshot = store.draft(state, parent);
        let replica = Tensor::whole("o.step", I64, &[], vec![Chunk::raw(&[step as u8, 0, 0, 0, 0, 0, 0, 0])]);
        if let Some((_, cask)) = snapshot.casks.iter_mut().find(|(slot, _)| *slot == 3) {
            cask.tensors.push(replica);
        }
        store.commit(snapshot.seal())?;
    }
    cases.push(accept("store/replica-in-another-slot", "manifest 5.2", "a shard that casks of two ranks hold", store));

    let edited = |edit: &dyn Fn(&mut super::writer::Manifest)| -> Result<Store, Failure> {
        let mut store = Store::new()?;
        let mut snapshot = store.draft(small(10), None).seal();
        edit(&mut snapshot.manifest);
        store.commit(snapshot)?;
        Ok(store)
    };
    cases.push(reject(
        "version/manifest-major-2",
        "README 3",
        UNSUPPORTED,
        "a manifest of a major version to come, of another kind of snapshot",
        edited(&|manifest| (manifest.version, manifest.kind) = ("2.0".into(), "patch".into()))?,
    ));
    cases.push(reject(
        "version/manifest-must-understand",
        "README 4",
        UNSUPPORTED,
        "a manifest with a feature that must be understood",
        edited(&|manifest| manifest.must_understand = vec!["example".into()])?,
    ));
    cases.push(accept(
        "version/manifest-1-1",
        "README 3.1",
        "a manifest of a later minor version with a feature that may be ignored",
        edited(&|manifest| (manifest.version, manifest.may_ignore) = ("1.1".into(), vec!["example".into()]))?,
    ));
    cases.push(reject(
        "manifest/role-without-a-tensor",
        "manifest 4.2",
        CORRUPT,
        "a role in `content` that no tensor has",
        edited(&|manifest| _ = manifest.content.insert("ema".into(), "0".repeat(64)))?,
    ));
    Ok(cases)
}

fn directories() -> Result<Vec<Sketch>, Failure> {
    let mut cases = Vec::new();
    let part =
        |offset: &[u64], shape: &[u64], data: &[u8]| Part { offset: offset.to_vec(), shape: shape.to_vec(), slot: 0, data: data.to_vec() };
    let split = |parts: Vec<Part>, shape: &[u64]| -> Result<Store, Failure> {
        let entry = Entry { name: "w".into(), dtype: U8, shape: shape.to_vec(), role: "model", param: None, alias_of: None, parts };
        let mut store = Store::new()?;
        store.save(State::new(1, vec![entry]), None)?;
        Ok(store)
    };
    cases.push(reject(
        "directory/empty-shard",
        "manifest 3.4",
        CORRUPT,
        "a shard without elements of a tensor that has some",
        split(vec![part(&[0], &[0], &[]), part(&[0], &[3], &[1, 2, 3])], &[3])?,
    ));
    cases.push(reject(
        "directory/overlap",
        "manifest 3.4",
        CORRUPT,
        "two shards that share an element",
        split(vec![part(&[0], &[2], &[1, 2]), part(&[1], &[2], &[2, 3])], &[3])?,
    ));
    // Each shard halves the rest, in one dimension after another.
    const DIMENSIONS: usize = 9;
    let mut parts: Vec<Part> = (0..DIMENSIONS)
        .map(|d| {
            let offset: Vec<u64> = (0..DIMENSIONS).map(|i| u64::from(i < d)).collect();
            let shape: Vec<u64> = (0..DIMENSIONS).map(|i| if i <= d { 1 } else { 2 }).collect();
            part(&offset, &shape, &vec![7; 1 << (DIMENSIONS - 1 - d)])
        })
        .collect();
    parts.push(part(&[1; DIMENSIONS], &[1; DIMENSIONS], &[7]));
    parts.sort_by(|a, b| (&a.offset, &a.shape).cmp(&(&b.offset, &b.shape)));
    cases.push(either(
        "directory/split-in-nine-dimensions",
        "manifest 3.4",
        UNSUPPORTED,
        "shards that are smaller in nine dimensions",
        split(parts, &[2; DIMENSIONS])?,
    ));

    let table = |edit: &dyn Fn(&mut super::forge::Table)| -> Result<Store, Failure> {
        let mut store = Store::new()?;
        let mut snapshot = store.draft(small(10), None);
        edit(&mut snapshot.directory);
        store.commit(snapshot.seal())?;
        Ok(store)
    };
    cases.push(reject(
        "directory/role-twice",
        "manifest 3.3",
        CORRUPT,
        "roles that do not ascend strictly",
        table(&|table| {
            // Roles `exp_avg`, `model`, `other`: the last becomes a second `model`.
            *table.column("roles") = b"exp_avgmodelmodel".to_vec();
        })?,
    ));
    cases.push(reject(
        "directory/must-understand",
        "README 4",
        UNSUPPORTED,
        "a directory with a feature that must be understood",
        table(&|table| table.column("head")[16] = 4)?,
    ));
    cases.push(reject("directory/alias-of-itself", "manifest 3.5", CORRUPT, "an alias that names its own row", {
        let twin = Entry { name: "b".into(), dtype: U8, shape: vec![3], role: "model", param: None, alias_of: Some(0), parts: vec![] };
        let mut store = Store::new()?;
        let mut snapshot = store.draft(State::new(1, vec![Entry::whole("a", U8, &[3], "model", &[1, 2, 3]), twin]), None);
        snapshot.directory.set_u32("aliases", 1, 1);
        store.commit(snapshot.seal())?;
        store
    }));
    Ok(cases)
}

/// Returns deltas that a reader of a single cask can judge without their base.
fn deltas_alone() -> Vec<Sketch> {
    let cask = |name: &str, clause: &str, why: &str, dtype, chunk: Chunk| {
        let input = Input::Cask(Cask::new(id(0xcf), vec![Tensor::whole("w", dtype, &[5], vec![chunk])]).bytes());
        Sketch { name: name.into(), clause: clause.into(), why: why.into(), input, outcome: Outcome::Reject(CORRUPT) }
    };
    let delta = |codec, columns: Vec<(&'static str, Vec<u8>)>| Chunk { kind: DELTA, codec, columns, crc: 1, decoded: None };
    let plane = || vec![0x10, 1, 0];
    let empty = Cask::new(
        id(0xd0),
        vec![Tensor {
            name: "w".into(),
            dtype: U8,
            shape: vec![3],
            shards: vec![
                Shard { offset: vec![0], shape: vec![0], chunks: vec![] },
                Shard { offset: vec![0], shape: vec![3], chunks: vec![Chunk::raw(&pattern(3, 1))] },
                Shard { offset: vec![3], shape: vec![0], chunks: vec![] },
            ],
        }],
    );
    vec![
        cask(
            "codecs/delta-column-missing",
            "codecs 4.1",
            "a mask without values, of a delta",
            U8,
            delta("tc.bitmask", vec![("mask", vec![0])]),
        ),
        cask(
            "codecs/delta-column-surplus",
            "codecs 4.1",
            "a plane too many, of a delta",
            U8,
            delta("tc.planes", vec![("plane0", plane()), ("plane1", plane())]),
        ),
        cask(
            "codecs/delta-columns-of-another-width",
            "codecs 4.1",
            "one plane of two, of a delta",
            U16,
            delta("tc.planes", vec![("plane0", plane())]),
        ),
        cask(
            "codecs/delta-columns-swapped",
            "codecs 4.1",
            "bits before tokens",
            super::dtypes::BF16,
            delta("tc.ordered", vec![("bits", vec![]), ("tokens", vec![0, 3, 0, 0, 0, 0x10, 1, 0])]),
        ),
        cask(
            "codecs/ordered-of-integers",
            "ordered 1",
            "ordered differences of `u16`, in a cask alone",
            U16,
            delta("tc.ordered", vec![("tokens", vec![0, 3, 0, 0, 0, 0x10, 1, 0]), ("bits", vec![])]),
        ),
        super::casks::accept("shards/without-elements", "index 3.4", "shards without elements beside one that has some", &empty),
    ]
}
