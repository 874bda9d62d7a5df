//! Cases of `tc.planes` and `tc.ordered` with columns from `spec/vectors`: the valid ones together in a few cases, each
//! invalid one in its own.

use toml::{Table, Value};

use super::casks;
use super::dtypes::{DTYPES, U8, unit};
use super::forge::{Cask, Chunk, DELTA, Tensor, id};
use super::lenient;
use super::sketch::{Input, Outcome, Sketch};
use super::writer::{Entry, State, Store};
use crate::failure::Failure;
use crate::files::hex;

const ENTROPY: &str = include_str!("vectors/entropy-1.0.toml");
const CODECS: &str = include_str!("vectors/codecs-1.0.toml");

/// Names of all columns in the vectors.
const COLUMNS: [&str; 10] = ["plane0", "plane1", "plane2", "plane3", "plane4", "plane5", "plane6", "plane7", "tokens", "bits"];
const ROTATED: [&str; 6] = ["f16", "bf16", "f32", "f64", "c64", "c128"];

/// A chunk of a test vector.
struct Vector {
    name: String,
    codec: &'static str,
    dtype: u8,
    elements: u64,
    base: Option<Vec<u8>>,
    columns: Vec<(&'static str, Vec<u8>)>,
    /// Decoded bytes. For an invalid vector, the bytes that a reader without the check would decode.
    data: Vec<u8>,
    clause: String,
}

pub(crate) fn cases() -> Result<Vec<Sketch>, Failure> {
    let (entropy, codecs): (Table, Table) = (ENTROPY.parse()?, CODECS.parse()?);
    let mut cases = vec![every_plane(&entropy)?];
    let valid: Vec<Vector> = ["chunk", "chunk_decode"]
        .iter()
        .flat_map(|kind| rows(&codecs, kind))
        .filter_map(|row| vector(row).transpose())
        .collect::<Result<_, _>>()?;
    cases.push(absolute(&valid));
    cases.push(deltas(
        "planes/deltas",
        "planes 1.2",
        "tc.planes",
        "exclusive or with the base, rotated or not, of units of every width",
        &valid,
    )?);
    cases.push(deltas(
        "ordered/every-dtype",
        "ordered 1",
        "tc.ordered",
        "every dtype; one class, several, empty ones; all tokens",
        &valid,
    )?);
    cases.push(long_planes()?);
    for row in rows(&entropy, "plane_invalid") {
        let count = integer(row, "count")?;
        let code = bytes(row.get("code").ok_or("no code")?)?;
        if count == 0 {
            // Skips empty vectors, because no chunk is empty.
            continue;
        }
        let chunk = Chunk::absolute("tc.planes", vec![("plane0", code.clone())], lenient::plane(&code, count as usize));
        let cask = Cask::new(id(0xe0), vec![Tensor::whole("w", U8, &[count], vec![chunk])]);
        let name = text(row, "name")?;
        let clause = text(row, "clause")?;
        let input = Input::Cask(cask.bytes());
        cases.push(Sketch {
            name: format!("entropy/{}", slug(name)),
            clause: clause.into(),
            why: name.into(),
            input,
            outcome: Outcome::Reject("corrupt"),
        });
    }
    for row in rows(&codecs, "chunk_invalid") {
        let Some(vector) = vector(row)? else { continue };
        let input = match &vector.base {
            None => Input::Cask(cask_of(0xe1, [&vector]).bytes()),
            Some(_) => store_of(&[&vector])?.into(),
        };
        let name = format!("{}/{}", &vector.codec[3..], slug(&vector.name));
        cases.push(Sketch { name, clause: vector.clause, why: vector.name, input, outcome: Outcome::Reject("corrupt") });
    }
    Ok(cases)
}

/// Returns all valid planes of the entropy vectors, each in one `u8` tensor whose plane is its bytes.
fn every_plane(entropy: &Table) -> Result<Sketch, Failure> {
    let mut tensors = Vec::new();
    for row in rows(entropy, "plane") {
        let symbols = bytes(row.get("symbols").ok_or("no symbols")?)?;
        let code = bytes(row.get("code").ok_or("no code")?)?;
        if lenient::plane(&code, symbols.len()) != symbols {
            return Err(format!("`{}` decodes to other symbols", text(row, "name")?).into());
        }
        let count = symbols.len() as u64;
        tensors.push(Tensor::whole(text(row, "name")?, U8, &[count], vec![Chunk::absolute("tc.planes", vec![("plane0", code)], symbols)]));
    }
    tensors.retain(|tensor| tensor.shape != [0]);
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let cask = Cask::new(id(0xe2), tensors);
    Ok(casks::accept(
        "entropy/every-kind-of-block",
        "entropy 3",
        "raw, constant, runs, split, and Huffman with a table of its own or the one before",
        &cask,
    ))
}

/// Returns absolute chunks of `tc.planes` of every width.
fn absolute(valid: &[Vector]) -> Sketch {
    let absolute = valid.iter().filter(|vector| vector.codec == "tc.planes" && vector.base.is_none());
    casks::accept(
        "planes/every-width",
        "planes 1",
        "units of 1, 2, 4 and 8 bytes, rotated or not, packed elements",
        &cask_of(0xe3, absolute),
    )
}

/// Returns one tensor of two chunks. The second follows a chunk of another codec and has blocks of 2^12 symbols.
fn long_planes() -> Result<Sketch, Failure> {
    const CHUNK: usize = 1 << 18;
    const LAST: usize = 5000;
    let last: Vec<u8> = (0..LAST).map(|i| if i < 4096 { (i / 64) as u8 } else { 7 }).collect();
    let mut code = vec![12, 0];
    code.extend_from_slice(&last[..4096]);
    code.extend([1, 7]);
    let chunks = vec![Chunk::constant(&[1], CHUNK), Chunk::absolute("tc.planes", vec![("plane0", code)], last)];
    let cask = Cask::new(id(0xe4), vec![Tensor::whole("w", U8, &[(CHUNK + LAST) as u64], chunks)]);
    Ok(casks::accept(
        "planes/last-chunk",
        "entropy 1",
        "the plane of a short last chunk, in a block that is full and one that is not",
        &cask,
    ))
}

fn cask_of<'a>(number: u8, vectors: impl IntoIterator<Item = &'a Vector>) -> Cask {
    let tensor = |(i, vector): (usize, &Vector)| {
        let chunk = Chunk::absolute(vector.codec, vector.columns.clone(), vector.data.clone());
        Tensor::whole(&format!("{i:02} {}", DTYPES[usize::from(vector.dtype) - 1].0), vector.dtype, &[vector.elements], vec![chunk])
    };
    Cask::new(id(number), vectors.into_iter().enumerate().map(tensor).collect())
}

/// Returns a store with a base that holds the bases of the vectors, and a delta that holds their columns. Vectors whose
/// result equals their base cannot be used: the writer would leave them out.
fn store_of(vectors: &[&Vector]) -> Result<Store, Failure> {
    let state = |step, data: &dyn Fn(&Vector) -> Vec<u8>| {
        let entry = |(i, vector): (usize, &&Vector)| {
            Entry::whole(&format!("{i:02} {}", vector.name), vector.dtype, &[vector.elements], "model", &data(vector))
        };
        State::new(step, vectors.iter().enumerate().map(entry).collect())
    };
    let mut store = Store::new()?;
    store.save(state(1, &|vector| vector.base.clone().unwrap_or_default()), None)?;
    let mut snapshot = store.draft(state(2, &|vector| vector.data.clone()), Some(1));
    for (tensor, vector) in snapshot.casks.iter_mut().flat_map(|(_, cask)| &mut cask.tensors).zip(vectors) {
        let chunk = &mut tensor.shards[0].chunks[0];
        (chunk.kind, chunk.codec, chunk.columns) = (DELTA, vector.codec, vector.columns.clone());
    }
    store.commit(snapshot.seal())?;
    Ok(store)
}

fn deltas(name: &str, clause: &str, codec: &str, why: &str, valid: &[Vector]) -> Result<Sketch, Failure> {
    let chosen: Vec<&Vector> =
        valid.iter().filter(|vector| vector.codec == codec && vector.base.as_ref().is_some_and(|base| *base != vector.data)).collect();
    let store = store_of(&chosen)?;
    let outcome = Outcome::Accept(store.expected());
    Ok(Sketch { name: name.into(), clause: clause.into(), why: why.into(), input: store.into(), outcome })
}

/// Returns the vector of a row, or `None` if it belongs to another codec.
fn vector(row: &Table) -> Result<Option<Vector>, Failure> {
    let codec = match text(row, "codec")? {
        "tc.planes" => "tc.planes",
        "tc.ordered" => "tc.ordered",
        _ => return Ok(None),
    };
    let named = text(row, "dtype")?;
    let dtype = DTYPES.iter().position(|(name, _)| *name == named).ok_or("an unknown dtype")? as u8 + 1;
    let elements = integer(row, "elements")?;
    let mut columns = Vec::new();
    for column in row.get("columns").and_then(Value::as_array).ok_or("no columns")? {
        let (name, value) = column.as_array().and_then(|pair| Some((pair.first()?.as_str()?, pair.get(1)?))).ok_or("not a column")?;
        let name = COLUMNS.into_iter().find(|known| *known == name).ok_or("an unknown column")?;
        columns.push((name, bytes(value)?));
    }
    let base = row.get("base").map(bytes).transpose()?;
    let width = unit(dtype);
    let column = |name: &str| columns.iter().find(|column| column.0 == name).map(|column| column.1.as_slice()).unwrap_or_default();
    let size = (elements as usize * DTYPES[usize::from(dtype) - 1].1).div_ceil(8);
    let decoded = match (codec, &base) {
        ("tc.ordered", Some(base)) => {
            let exponent = match named {
                "f8_e4m3" | "f8_e4m3fnuz" => (3, 4),
                "f8_e5m2" | "f8_e5m2fnuz" => (2, 5),
                "f16" => (10, 5),
                "bf16" => (7, 8),
                _ => (23, 8),
            };
            lenient::ordered(column("tokens"), column("bits"), base, width, exponent)
        }
        _ => {
            let planes: Vec<&[u8]> = COLUMNS[..width].iter().map(|name| column(name)).collect();
            lenient::planes(&planes, size / width, width, ROTATED.contains(&named), base.as_deref())
        }
    };
    let mut data = decoded;
    if let Some(wanted) = row.get("data") {
        let wanted = bytes(wanted)?;
        if wanted != data {
            return Err(format!("a vector of {codec} and {named} decodes to {}", hex(&data)).into());
        }
    } else if base.as_ref() == Some(&data) {
        // Changes a byte, or the writer would leave the shard out. No check of such a vector depends on its result.
        data[0] ^= 1;
    }
    let name = row.get("name").and_then(Value::as_str).unwrap_or(named).to_owned();
    let clause = row.get("clause").and_then(Value::as_str).unwrap_or_default().to_owned();
    Ok(Some(Vector { name, codec, dtype, elements, base, columns, data, clause }))
}

pub(super) fn rows<'a>(vectors: &'a Table, kind: &str) -> impl Iterator<Item = &'a Table> {
    vectors.get(kind).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_table)
}

pub(super) fn text<'a>(row: &'a Table, field: &str) -> Result<&'a str, Failure> {
    row.get(field).and_then(Value::as_str).ok_or_else(|| format!("a vector without {field}").into())
}

pub(super) fn integer(row: &Table, field: &str) -> Result<u64, Failure> {
    Ok(u64::try_from(row.get(field).and_then(Value::as_integer).ok_or_else(|| format!("a vector without {field}"))?)?)
}

/// Decodes hex, or pairs of hex and a repeat count.
pub(super) fn bytes(value: &Value) -> Result<Vec<u8>, Failure> {
    let of = |text: &str| -> Result<Vec<u8>, Failure> {
        (0..text.len() / 2).map(|i| Ok(u8::from_str_radix(text.get(2 * i..2 * i + 2).ok_or("odd hex")?, 16)?)).collect()
    };
    match value {
        Value::String(text) => of(text),
        Value::Array(pairs) => {
            let mut all = Vec::new();
            for pair in pairs {
                let pair = pair.as_array().and_then(|pair| Some((pair.first()?.as_str()?, pair.get(1)?.as_integer()?)));
                let (text, times) = pair.ok_or("not a pair")?;
                all.extend(of(text)?.repeat(usize::try_from(times)?));
            }
            Ok(all)
        }
        _ => Err("not hex".into()),
    }
}

/// Converts the name of a vector to the name of a folder.
pub(super) fn slug(name: &str) -> String {
    let words: Vec<String> =
        name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).map(str::to_ascii_lowercase).collect();
    words.join("-")
}
