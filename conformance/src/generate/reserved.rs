//! Blobs whose names begin with `tc.`. A reader that only wants tensors never looks at them. A reader that does must
//! refuse content that it cannot follow.

use super::forge::Blob;
use super::sketch::{Outcome, Sketch};
use super::stores::small;
use super::writer::{Store, seal};
use crate::failure::Failure;

const CORRUPT: &str = "corrupt";

/// Returns a store with one snapshot, which has the blob `rng` and these blobs of each rank.
fn with_blobs(ranks: Vec<Vec<Blob>>) -> Result<Store, Failure> {
    let mut store = Store::new()?;
    let mut state = small(10);
    let rng = std::mem::take(&mut state.blobs);
    for (rank, mut blobs) in (0u32..).zip(ranks) {
        if rank == 0 {
            blobs.extend(rng.iter().flat_map(|(_, blobs)| blobs.clone()));
            blobs.sort_by(|a, b| a.name.cmp(&b.name));
        }
        state.blobs.push((2 * rank + 1, blobs));
    }
    store.save(state, None)?;
    Ok(store)
}

fn accept(name: &str, clause: &str, why: &str, store: Store) -> Sketch {
    let outcome = Outcome::Accept(store.expected());
    Sketch { name: name.into(), clause: clause.into(), why: why.into(), input: store.into(), outcome }
}

fn either(name: &str, clause: &str, why: &str, kind: &'static str, store: Store) -> Sketch {
    let outcome = Outcome::Either(store.expected(), kind);
    Sketch { name: name.into(), clause: clause.into(), why: why.into(), input: store.into(), outcome }
}

pub(crate) fn cases() -> Result<Vec<Sketch>, Failure> {
    let mut cases = trees()?;
    cases.extend(receipts()?);
    cases.extend(statistics()?);
    Ok(cases)
}

fn tree_of(nodes: &str) -> String {
    format!(r#"{{"format":"tensorcask-tree","version":"1.0","must_understand":[],"may_ignore":[],"nodes":[{nodes}]}}"#)
}

fn trees() -> Result<Vec<Sketch>, Failure> {
    let tree = |json: &str| with_blobs(vec![vec![Blob::new(0, "tc.tree", &seal(json))]]);
    let mut cases = Vec::new();

    let nested = concat!(
        r#"{"dict":[{"str":"w"},{"int":"-3"},{"str":"1"},{"int":"1"},{"str":"\u0007 \"\\ é"}]},{"tensor":["m.w","torch"]},{"list":4},{"bytes":"rng"},"#,
        r#"{"file":"rng"},{"tuple":0},"none",{"float":"fff8000000000001"},{"int":"123456789012345678901234567890"},{"tuple":2},{"bool":true},"#,
        r#"{"str":""}"#
    );
    cases.push(accept("tree/nested", "tree 2", "every kind of node; keys that differ in their kind alone", tree(&tree_of(nested))?));

    let typed = r#"{"tuple":2},{"typed":"collections.Counter"},{"dict":[{"int":"2"}]},{"int":"1"},{"typed":"a type that no reader has"},{"typed":""},"none""#;
    cases.push(accept("tree/typed", "tree 2.8", "values with types, known and unknown", tree(&tree_of(typed))?));

    let made_of_others = concat!(
        r##"{"dict":[{"str":"codes"},{"str":"#class"}]},{"tensor":["m.w","torch"]},{"list":4},{"str":"a.module.that.no.reader.HasAsClass"},"##,
        r#"{"dict":[{"str":"dtype"}]},{"str":"float32"},{"list":2},{"int":"2"},{"int":"3"},{"list":2},{"int":"3"},{"int":"1"}"#
    );
    cases.push(accept("tree/made-of-others", "tree 2.9", "a tensor of an unknown class, made of others", tree(&tree_of(made_of_others))?));

    let deep = |containers: usize| tree_of(&format!(r#"{}"none""#, r#"{"list":1},"#.repeat(containers)));
    cases.push(accept("tree/deep", "tree 2.6", "511 lists within each other, and the list of nodes", tree(&deep(511))?));

    let of_rank = |rank: u32, nodes: &str| vec![Blob::new(rank, "tc.tree", &seal(&tree_of(nodes)))];
    let ranks = |first: &str, second: &str| with_blobs(vec![of_rank(0, first), of_rank(1, second)]);
    let parts = (
        r#"{"dict":[{"str":"l"},{"str":"s"}]},{"part":[1]},{"int":"1"},"none""#,
        r#"{"dict":[{"str":"l"}]},{"part":[0,2]},{"int":"0"},{"int":"2"}"#,
    );
    cases.push(accept("tree/parts-of-a-list", "tree 3", "two ranks that have parts of one list", ranks(parts.0, parts.1)?));

    let list = r#"{"list":2},"none","none""#;
    let faults: &[(&str, &str, &str, &str)] = &[
        ("ends-early", "tree 2.2", "a list of two with one value", r#"{"list":2},"none""#),
        ("goes-on", "tree 2.2", "two nodes at the top", r#""none","none""#),
        ("no-nodes", "tree 2.2", "no node at the top", ""),
        ("type-without-a-value", "tree 2.2", "a type at the end", r#"{"typed":"complex"}"#),
        ("key-twice", "tree 2.3", "a mapping with a key twice", r#"{"dict":[{"str":"a"},{"str":"a"}]},"none","none""#),
        ("key-of-another-kind", "tree 2.1", "a key that is a truth value", r#"{"dict":[{"bool":true}]},"none""#),
        ("zero-before-an-integer", "tree 2.4", "an integer that begins with 0", r#"{"int":"07"}"#),
        ("minus-zero", "tree 2.4", "an integer of minus zero", r#"{"int":"-0"}"#),
        ("upper-case-float", "tree 2.5", "upper-case digits of a float", r#"{"float":"7FF8000000000000"}"#),
        ("short-float", "tree 2.5", "15 digits of a float", r#"{"float":"7ff800000000000"}"#),
        ("unknown-node", "tree 2", "a node of a kind that is not there", r#"{"set":[]}"#),
        ("node-of-two-kinds", "tree 2", "a node that is text and an integer", r#"{"str":"a","int":"1"}"#),
        ("negative-count", "tree 2", "a list of minus one values", r#"{"list":-1}"#),
        ("tensor-missing", "tree 2.7", "a tensor that the snapshot does not have", r#"{"tensor":["m.v","torch"]}"#),
        ("blob-missing", "tree 2.7", "a blob that the snapshot does not have", r#"{"bytes":"notes"}"#),
        ("blob-of-another-rank", "tree 2", "a blob that another rank has", ""),
        ("positions-descend", "tree 3.1", "positions of a part that do not ascend", r#"{"part":[1,0]},"none","none""#),
    ];
    for (name, clause, why, nodes) in faults {
        let store = match *name {
            "blob-of-another-rank" => with_blobs(vec![vec![], of_rank(1, r#"{"bytes":"rng"}"#)])?,
            _ => tree(&tree_of(nodes))?,
        };
        cases.push(either(&format!("tree/{name}"), clause, why, CORRUPT, store));
    }
    cases.push(either("tree/too-deep", "tree 2.6", "512 lists within each other, and the list of nodes", CORRUPT, tree(&deep(512))?));

    let edited = |from: &str, to: &str| tree(&tree_of(list).replacen(from, to, 1));
    let other_forms: &[(&str, &str, &str, &str, &str)] = &[
        ("space", "tree 1.2", "a space in the JSON", r#""nodes":"#, r#""nodes": "#),
        ("escape", "tree 1.2", "a letter written as an escape", "none", r"n\u006fne"),
        (
            "fields-in-another-order",
            "tree 1.2",
            "two fields changed places",
            r#""must_understand":[],"may_ignore":[]"#,
            r#""may_ignore":[],"must_understand":[]"#,
        ),
        ("another-format", "tree 1", "the format of another object", "tensorcask-tree", "tensorcask-log"),
        ("unknown-field", "tree 1", "a field that is not there", r#""may_ignore":[]"#, r#""may_ignore":[],"note":1"#),
    ];
    for (name, clause, why, from, to) in other_forms {
        cases.push(either(&format!("tree/{name}"), clause, why, CORRUPT, edited(from, to)?));
    }
    let feature = edited(r#""must_understand":[]"#, r#""must_understand":["sets"]"#)?;
    cases.push(either("tree/unknown-feature", "tree 1", "a feature that must be understood", "unsupported", feature));
    let ignorable = edited(r#""may_ignore":[]"#, r#""may_ignore":["colours"]"#)?;
    cases.push(accept("tree/feature-to-ignore", "tree 1", "a feature that may be ignored", ignorable));

    let mut bytes = seal(&tree_of(list));
    bytes[40] ^= 1;
    cases.push(either(
        "tree/seal",
        "tree 1",
        "a bit that the seal does not fit",
        CORRUPT,
        with_blobs(vec![vec![Blob::new(0, "tc.tree", &bytes)]])?,
    ));

    let differ = ranks(r#"{"dict":[{"str":"a"}]},{"int":"1"}"#, r#"{"dict":[{"str":"a"}]},{"int":"2"}"#)?;
    cases.push(either("tree/ranks-disagree", "tree 3.2", "two ranks with another number in one place", CORRUPT, differ));
    let nan = |digit: u8| format!(r#"{{"dict":[{{"str":"a"}}]}},{{"list":1}},{{"float":"7ff800000000000{digit}"}}"#);
    let lower = ranks(&nan(0), &nan(1))?;
    cases.push(accept("tree/lower-rank-counts", "tree 3.2", "two ranks with another NaN in one place", lower));
    let gap = ranks(r#"{"part":[0]},"none""#, r#"{"part":[2]},"none""#)?;
    cases.push(either("tree/list-with-a-gap", "tree 3.3", "parts of a list whose second element no rank has", CORRUPT, gap));
    Ok(cases)
}

/// Returns a receipt of these shards.
fn receipt_of(shards: &[String]) -> String {
    let shards = shards.join(",");
    format!(r#"{{"format":"tensorcask-errors","version":"1.0","must_understand":[],"may_ignore":[],"shards":[{shards}]}}"#)
}

fn receipts() -> Result<Vec<Sketch>, Failure> {
    let shard = |tensor: &str, offset: u64, chunks: &str| {
        format!(r#"{{"tensor":"{tensor}","offset":[{offset}],"shape":[1],"setting":"loguniform:16","chunks":[{chunks}]}}"#)
    };
    let receipt = |bytes: &[u8]| with_blobs(vec![vec![Blob::new(0, "tc.errors", bytes)]]);
    let with = |shards: &[String]| receipt(&seal(&receipt_of(shards)));
    let edited = |from: &str, to: &str| receipt(&seal(&receipt_of(&[]).replacen(from, to, 1)));
    let chunk = "[0,1,0.0152587890625,0.0152587890625,1e-9,0,0.0,0.0]";
    let whole =
        r#"{"tensor":"o.exp_avg","offset":[0],"shape":[2],"setting":"loguniform:16","chunks":[[0,2,0.02,0.03,1e-9,0,0,0]]}"#.to_owned();
    let mut cases = vec![
        accept("errors/receipt", "errors 1", "the errors of a tensor that was rounded", with(std::slice::from_ref(&whole))?),
        accept("errors/nothing-was-rounded", "errors 1", "a receipt of no shard", with(&[])?),
        accept(
            "errors/tensor-that-is-gone",
            "errors 1.1",
            "errors of a tensor that the directory does not have",
            with(&[shard("a", 0, chunk), whole])?,
        ),
    ];
    let faults = [
        ("out-of-order", "errors 1", "shards that do not ascend", with(&[shard("o.exp_avg", 1, chunk), shard("o.exp_avg", 0, chunk)])?),
        ("shard-twice", "errors 1", "a shard that stands twice", with(&[shard("o.exp_avg", 0, chunk), shard("o.exp_avg", 0, chunk)])?),
        ("chunk-twice", "errors 2", "a chunk that stands twice", with(&[shard("o.exp_avg", 0, &format!("{chunk},{chunk}"))])?),
        ("negative", "errors 3", "a negative error", with(&[shard("o.exp_avg", 0, "[0,1,-0.5,0,0,0,0,0]")])?),
        ("beyond-binary64", "errors 3.3", "an error beyond binary64", with(&[shard("o.exp_avg", 0, "[0,1,1e999,0,0,0,0,0]")])?),
        ("seven-numbers", "errors 3", "a chunk of seven numbers", with(&[shard("o.exp_avg", 0, "[0,1,0,0,0,0,0]")])?),
        ("half-an-element", "errors 3", "half a sign that changed", with(&[shard("o.exp_avg", 0, "[0,1,0,0,0,0.5,0,0]")])?),
        ("unknown-field", "errors 1", "a field that is not there", edited(r#""may_ignore":[]"#, r#""may_ignore":[],"note":1"#)?),
        ("no-seal", "errors 1", "JSON without a seal", receipt(receipt_of(&[]).as_bytes())?),
    ];
    for (name, clause, why, store) in faults {
        cases.push(either(&format!("errors/{name}"), clause, why, CORRUPT, store));
    }
    let newer = edited("1.0", "2.0")?;
    cases.push(either("errors/of-a-newer-version", "errors 1", "a receipt of a major version that is not known", "unsupported", newer));
    Ok(cases)
}

macro_rules! statistics {
    ($name:literal) => {
        ($name, &include_bytes!(concat!("vectors/statistics/", $name, ".parquet"))[..])
    };
}

/// Statistics, which `conformance/statistics.py` made once.
fn statistics() -> Result<Vec<Sketch>, Failure> {
    let with = |bytes: &[u8]| with_blobs(vec![vec![Blob::new(0, "tc.statistics", bytes)]]);
    let mut cases = Vec::new();
    for ((name, bytes), clause, why) in [
        (statistics!("whole"), "statistics 1", "the statistics of all tensors of a base"),
        (statistics!("other-forms"), "statistics 1.1", "the same rows, with other encodings and row groups of one row"),
        (statistics!("tensor-that-is-gone"), "statistics 1", "statistics of a tensor that the directory does not have"),
        (statistics!("change"), "statistics 4", "a change since a reference step"),
        (statistics!("complex-and-narrow"), "statistics 3.5", "values of complex numbers and of an 8-bit float"),
        (statistics!("not-measured"), "statistics 3.4", "complex numbers and 8-bit floats that were not measured"),
    ] {
        cases.push(accept(&format!("statistics/{name}"), clause, why, with(bytes)?));
    }
    for ((name, bytes), clause, why) in [
        (statistics!("out-of-order"), "statistics 2", "rows that do not ascend"),
        (statistics!("row-twice"), "statistics 2", "a chunk with two rows"),
        (statistics!("wrong-type"), "statistics 1.1", "a count of another type"),
        (statistics!("missing-column"), "statistics 1.1", "a column that is missing"),
        (statistics!("another-column"), "statistics 1.1", "a column that is not there"),
        (statistics!("null-tensor"), "statistics 1.1", "a row without a tensor"),
        (statistics!("unknown-dtype"), "statistics 1.1", "a dtype that is not there"),
        (statistics!("no-such-chunk"), "statistics 2.2", "a chunk that the shard does not have"),
        (statistics!("wrong-elements"), "statistics 2.2", "another number of elements than the chunk has"),
        (statistics!("counts-beyond-elements"), "statistics 3", "more zeros than elements"),
        (statistics!("infinite-sum"), "statistics 3", "a sum that is not finite"),
        (statistics!("values-of-an-integer"), "statistics 3", "a count of NaN of integers"),
        (statistics!("no-values-of-a-float"), "statistics 3", "no counts of a float"),
        (statistics!("minimum-above-maximum"), "statistics 3.1", "a minimum above the maximum"),
        (statistics!("counts-beyond-the-parts"), "statistics 3.5", "more zeros and NaN than parts of complex numbers"),
        (statistics!("some-values-of-a-narrow-float"), "statistics 3.4", "counts of an 8-bit float without exponents"),
        (statistics!("values-of-a-packed-float"), "statistics 3.4", "values of a 4-bit float"),
        (statistics!("short-exponents"), "statistics 3.3", "a histogram of 15 counts"),
        (statistics!("change-without-a-step"), "statistics 4", "a change without a reference step"),
        (statistics!("pages-of-gigabytes"), "statistics 1.2", "pages that claim 2 GiB each"),
        (("no-table", b"PAR1 is no table PAR1".as_slice()), "statistics 1", "bytes that are no Parquet file"),
    ] {
        cases.push(either(&format!("statistics/{name}"), clause, why, CORRUPT, with(bytes)?));
    }
    Ok(cases)
}
