//! Stores that every reader must accept.

use serde_json::json;

use super::casks::pattern;
use super::dtypes::{BF16, F32, I64, INT4, U8, U16};
use super::forge::{Blob, id};
use super::sketch::{Outcome, Sketch};
use super::writer::{Entry, Part, State, Store};
use crate::failure::Failure;

/// Returns a model weight and two optimizer tensors. A few elements change with every step.
pub(crate) fn small(step: u64) -> State {
    let mut weights = pattern(24, 1);
    weights[2 * step as usize % 24] ^= 0x10;
    let state = vec![
        Entry::whole("m.w", BF16, &[4, 3], "model", &weights),
        Entry::whole("o.exp_avg", F32, &[2], "exp_avg", &[step as u8; 8]),
        Entry::whole("o.step", I64, &[], "other", &[step as u8, 0, 0, 0, 0, 0, 0, 0]),
    ];
    let mut state = State::new(step, state);
    state.blobs.push((1, vec![Blob::new(0, "rng", &[step as u8; 5])]));
    state
}

/// Returns steps 10 and 20 of [`small`]: a base and a delta.
pub(crate) fn base_and_delta() -> Result<Store, Failure> {
    let mut store = Store::new()?;
    store.save(small(10), None)?;
    store.save(small(20), Some(10))?;
    Ok(store)
}

pub(crate) fn cases() -> Result<Vec<Sketch>, Failure> {
    let mut cases = Vec::new();
    let mut accept = |name: &str, clause: &str, why: &str, store: Store| {
        let outcome = Outcome::Accept(store.expected());
        cases.push(Sketch { name: name.into(), clause: clause.into(), why: why.into(), input: store.into(), outcome });
    };

    let mut store = Store::new()?;
    let mut state = small(10);
    state.metadata.insert("format".into(), "pt".into());
    state.user = [("loss", json!(2.5)), ("note", json!("warm-up")), ("nested", json!({ "a": [1, null, true] }))]
        .map(|(k, v)| (k.to_owned(), v))
        .into_iter()
        .collect();
    store.save(state, None)?;
    accept("store/base", "manifest 1", "one base with metadata and facts of the user", store);

    accept("store/empty", "log 3", "a store that was opened and has no snapshot", Store::new()?);

    accept("chain/base-and-delta", "chain 3", "a delta on a base", base_and_delta()?);

    // The worked example of the chain page, with four-bit zeros in chunk 0.
    let mut store = Store::new()?;
    let long = |first: u8, last: u8| {
        let mut data = vec![0; (1 << 17) + 2];
        (data[5], data[1 << 17]) = (first, last);
        Entry::whole("w", INT4, &[(1 << 18) + 4], "model", &data)
    };
    let with_b = vec![Entry::whole("b", U8, &[3], "model", &[1, 2, 3]), long(7, 9)];
    store.save(State::new(10, vec![long(0, 9)]), None)?;
    store.save(State::new(20, vec![long(7, 9)]), Some(10))?;
    store.save(State::new(30, with_b), Some(20))?;
    accept("chain/three-links", "chain 3", "each chunk takes its own way down: absolute, delta, unchanged, new", store);

    // A master that continues its weight, as in remainder 6. The next link gives it another role and stores nothing.
    let weight = [0x80, 0x3f, 0x80, 0x3f, 0x80, 0xbf, 0x00, 0x40];
    let master = [[0, 0, 0x80, 0x3f], [0, 0, 0x80, 0x3f], [0, 0, 0x80, 0xbf], [0, 0, 0, 0x40]].concat();
    let with_role = |step: u64, role: &'static str| {
        let master = Entry { param: Some("p"), ..Entry::whole("master", F32, &[4], role, &master) };
        State::new(step, vec![master, Entry { param: Some("p"), ..Entry::whole("weight", BF16, &[4], "model", &weight) }])
    };
    let mut store = Store::new()?;
    let mut snapshot = store.draft(with_role(1, "master"), None);
    let tensors = snapshot.casks.iter_mut().flat_map(|(_, cask)| &mut cask.tensors);
    for tensor in tensors.filter(|tensor| tensor.name == "master") {
        let chunk = &mut tensor.shards[0].chunks[0];
        // Planes of one symbol, without an exception.
        let plane = vec![16, 1, 0];
        (chunk.codec, chunk.columns) = ("tc.remainder", vec![("low", plane.clone()), ("high", plane), ("rounding", vec![0])]);
    }
    store.commit(snapshot.seal())?;
    store.save(with_role(2, "ema"), Some(1))?;
    store.save(with_role(3, "master"), Some(2))?;
    accept("chain/another-role", "codecs 5.1", "a chunk has the partners of the role that its tensor had when it was stored", store);

    // The first chunk has 262 rows, the second has one.
    let rows = |row_262: &[u8]| {
        let data = [[1; 262_000].as_slice(), row_262].concat();
        vec![Entry::whole("w", U8, &[263, 1000], "model", &data)]
    };
    let mut store = Store::new()?;
    store.save(State::new(1, rows(&[2; 1000])), None)?;
    store.save(State::new(2, rows(&[[7; 10].as_slice(), &[2; 990]].concat())), Some(1))?;
    accept("chain/chunks-of-rows", "container 6.2", "a matrix whose chunks are of 262 rows and of one", store);

    let mut store = Store::new()?;
    let bits = |bytes: &[u8]| {
        vec![Entry::whole("bits", F32, &[3], "model", bytes), Entry::whole("packed", INT4, &[3], "model", &[0x21, bytes[3] & 3])]
    };
    store.save(State::new(1, bits(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xc0, 0x7f])), None)?;
    store.save(State::new(2, bits(&[0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0xc0, 0x7f])), Some(1))?;
    store.save(State::new(3, bits(&[0, 0, 0, 0x83, 0, 0, 0, 0, 1, 0, 0xc0, 0x7f])), Some(2))?;
    store.save(State::new(4, bits(&[0, 0, 0, 0x81, 0, 0, 0, 0, 1, 0, 0xc0, 0x7f])), Some(3))?;
    accept("chain/deltas-on-deltas", "bitmask 2", "bits are compared: -0, NaN payloads, packed elements; four links", store);

    let mut store = Store::new()?;
    store.save(
        State::new(
            1,
            vec![
                Entry::whole("gone", U8, &[2], "model", &[1, 2]),
                Entry::whole("kept", U8, &[2], "model", &[3, 4]),
                Entry::whole("other", U8, &[4], "model", &[5; 4]),
            ],
        ),
        None,
    )?;
    store.save(
        State::new(
            2,
            vec![
                Entry::whole("kept", U8, &[2], "model", &[3, 4]),
                Entry::whole("new", U8, &[1], "ema", &[9]),
                Entry::whole("other", U16, &[2, 1], "model", &[5; 4]),
            ],
        ),
        Some(1),
    )?;
    accept("chain/new-removed-reshaped", "chain 4.1", "tensors come, go, and change dtype and shape", store);

    let mut store = Store::new()?;
    let sharded = |seed: u8, rows: [u64; 2]| {
        let data = pattern(12, seed);
        let split = 2 * rows[0] as usize;
        let parts = vec![
            Part { offset: vec![0, 0], shape: vec![rows[0], 2], slot: 0, data: data[..split].to_vec() },
            Part { offset: vec![rows[0], 0], shape: vec![rows[1], 2], slot: 2, data: data[split..].to_vec() },
        ];
        let empty = Part { offset: vec![0, 0], shape: vec![0, 7], slot: 2, data: vec![] };
        let tied =
            Entry { name: "tied".into(), dtype: U8, shape: vec![6, 2], role: "model", param: None, alias_of: Some(1), parts: vec![] };
        vec![
            Entry { name: "empty".into(), dtype: F32, shape: vec![0, 7], role: "model", param: None, alias_of: None, parts: vec![empty] },
            Entry { name: "split".into(), dtype: U8, shape: vec![6, 2], role: "model", param: None, alias_of: None, parts },
            tied,
        ]
    };
    let mut second = State::new(2, sharded(2, [4, 2]));
    second.blobs = vec![(1, vec![Blob::new(0, "rng", b"0")]), (3, vec![Blob::new(1, "rng", b"1")])];
    store.save(State::new(1, sharded(1, [4, 2])), None)?;
    store.save(second, Some(1))?;
    store.save(State::new(3, sharded(2, [1, 5])), Some(2))?;
    accept("shards/two-ranks", "manifest 5", "shards of two ranks, an alias, an empty tensor; step 3 is cut otherwise", store);

    let mut store = base_and_delta()?;
    store.append(json!({ "kind": "pinned", "snapshot": store.id_of(20), "pinned": true }))?;
    store.append(json!({ "kind": "forgotten", "snapshots": [store.id_of(10)] }))?;
    store.drop_expected(10, 20);
    accept("log/forgotten-parent", "log 4.1", "a forgotten snapshot stays readable as a parent", store);

    let mut store = base_and_delta()?;
    let mut again = small(21);
    (again.step, again.id) = (20, id(0x22));
    store.save(again, Some(10))?;
    let mut back = small(15);
    back.id = id(0x15);
    store.save(back, None)?;
    accept("log/rolled-back", "log 4.2", "a step saved again, and a latest that is not the highest step", store);

    let mut store = Store::new()?;
    let snapshot = store.draft(small(10), None).seal();
    store.commit_with(
        snapshot,
        |_| {},
        |json| {
            let white = json.replace("\"kind\":\"base\",\"parent\":null,", "");
            white.replacen('{', "{\n\t\"kind\" : \"base\",\r\n ", 1)
        },
    )?;
    store.append_with(json!({ "kind": "opened" }), |_| {}, |json| json.replace("\"writer\":", "  \"\\u0077riter\" : "))?;
    accept("log/json-in-another-form", "log 1.3", "other order, white space, escapes; `parent` absent instead of null", store);

    let mut store = base_and_delta()?;
    store.append_with(
        json!({ "kind": "opened" }),
        |_| {},
        |json| json.replacen('{', "{\"job\":{\"host\":\"node7\",\"process\":4711},", 1),
    )?;
    store.append_with(json!({ "kind": "opened" }), |_| {}, |json| json.replacen('{', "{\"job\":null,", 1))?;
    accept("log/job", "log 3.8", "an entry of a job, and one that says that there is none", store);

    let mut store = base_and_delta()?;
    for agent in ["4712", "null"] {
        let job = format!("{{\"job\":{{\"host\":\"node7\",\"process\":4711,\"agent\":{agent}}},");
        store.append_with(json!({ "kind": "opened" }), |_| {}, |json| json.replacen('{', &job, 1))?;
    }
    accept("log/job-with-agent", "log 3.8", "a job for which another process commits, and one that says that there is none", store);

    let mut store = base_and_delta()?;
    let job = "{\"job\":{\"host\":\"node7\",\"process\":0,\"agent\":4712},";
    store.append_with(json!({ "kind": "opened" }), |_| {}, |json| json.replacen('{', job, 1))?;
    accept("log/job-in-another-container", "log 3.8", "a job whose process has no number where its agent runs", store);

    let mut store = base_and_delta()?;
    store.append_with(
        json!({ "kind": "opened" }),
        |entry| {
            entry.version = "1.3".into();
            entry.may_ignore = vec!["example".into()];
        },
        |json| json,
    )?;
    store.append(json!({ "kind": "upgraded", "must_understand": [], "may_ignore": ["another"] }))?;
    accept("version/may-ignore-features", "README 4.1", "a later minor version and unknown features that a reader may ignore", store);

    let mut store = base_and_delta()?;
    store.objects.insert(format!("casks/{}.cask", "77".repeat(16)), b"left by a failed save".to_vec());
    store.objects.insert(format!("snapshots/99-{}.json", "77".repeat(16)), b"{".to_vec());
    store.objects.insert("catalog/notes.txt".into(), b"not a catalog".to_vec());
    store.objects.insert("elsewhere/readme.txt".into(), b"not ours".to_vec());
    accept("store/stray-objects", "README 2.2", "what no entry names is ignored", store);

    let mut store = base_and_delta()?;
    store.objects.insert(format!("catalog/{:020}-{}.parquet", 3, "0".repeat(64)), b"PAR1 damaged".to_vec());
    accept("log/damaged-catalog", "log 6.2", "a damaged catalog is skipped: the log has it all", store);

    // The parent's optimizer state was dropped after the delta was made, so the parent's manifest names one role less.
    let mut store = Store::new()?;
    let mut base = small(10);
    base.entries.truncate(1);
    let mut delta = small(20);
    delta.entries.truncate(1);
    store.save(base, None)?;
    let mut snapshot = store.draft(delta, Some(10)).seal();
    if let Some(parent) = &mut snapshot.manifest.parent {
        parent.content.insert("exp_avg".into(), "0".repeat(64));
    }
    store.commit(snapshot)?;
    accept("chain/parent-without-a-role", "chain 2.4", "a role that only the child names was dropped from the parent since", store);

    Ok(cases)
}
