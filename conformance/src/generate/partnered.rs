//! Codecs of whole chunks, with a base, other tensors of the parameter, or neither: a case for each vector of `spec/vectors`.

use toml::{Table, Value};

use super::casks;
use super::coded::{bytes, integer, rows, slug, text};
use super::dtypes::DTYPES;
use super::forge::{Cask, Chunk, DELTA, Tensor, id};
use super::sketch::{Outcome, Sketch};
use super::writer::{Entry, State, Store};
use crate::failure::Failure;

const VECTORS: [&str; 4] = [
    include_str!("vectors/partnered-1.0.toml"),
    include_str!("vectors/quantized-1.0.toml"),
    include_str!("vectors/magnitudes-1.0.toml"),
    // Made by the reference reader, without the check in question.
    include_str!("vectors/unchecked-1.0.toml"),
];

/// Texts that vectors hold; they have no others.
const KNOWN: [&str; 46] = [
    "tc.loguniform",
    "tc.blockwise8",
    "tc.cluster",
    "tc.kmeans",
    "grid",
    "codes",
    "signs",
    "escapes",
    "map",
    "absmax",
    "labels",
    "scale",
    "offset",
    "options",
    "levels",
    "protected",
    "tc.rows",
    "tc.factored",
    "tc.magnitudes",
    "tc.rounded",
    "tc.remainder",
    "tc.predict",
    "model",
    "master",
    "exp_avg",
    "exp_avg_sq",
    "low",
    "high",
    "rounding",
    "step",
    "moment",
    "moments",
    "tokens",
    "bits",
    "rows",
    "columns",
    "exponents",
    "magnitudes",
    "fractions",
    "plane0",
    "plane1",
    "plane2",
    "values",
    "rounded0",
    "rounded1",
    "mask",
];

fn known(text: &str) -> Result<&'static str, Failure> {
    KNOWN.into_iter().find(|known| *known == text).ok_or_else(|| format!("`{text}` is not known here").into())
}

fn dtype(named: &str) -> Result<u8, Failure> {
    Ok(DTYPES.iter().position(|(name, _)| *name == named).ok_or("an unknown dtype")? as u8 + 1)
}

/// A chunk of a tensor: now, and in the base.
struct Named {
    dtype: u8,
    role: &'static str,
    data: Vec<u8>,
    base: Option<Vec<u8>>,
}

struct Vector {
    codec: &'static str,
    elements: u64,
    chunk: Named,
    partners: Vec<Named>,
    columns: Vec<(&'static str, Vec<u8>)>,
}

fn named(row: &Table, size: usize) -> Result<Named, Failure> {
    let base = row.get("base").map(bytes).transpose()?;
    let data = match row.get("data") {
        Some(data) => bytes(data)?,
        // Of an invalid one nothing is ever decoded, unless it is said what comes out; it differs from the base, or the chunk would be left out.
        None => base.clone().map_or_else(|| vec![0; size], |base| base.iter().map(|byte| !byte).collect()),
    };
    let role = known(row.get("role").and_then(Value::as_str).unwrap_or("model"))?;
    Ok(Named { dtype: dtype(text(row, "dtype")?)?, role, data, base })
}

fn vector(row: &Table) -> Result<Vector, Failure> {
    let elements = integer(row, "elements")?;
    let size = |row: &Table| -> Result<usize, Failure> {
        Ok((elements as usize * DTYPES[usize::from(dtype(text(row, "dtype")?)?) - 1].1).div_ceil(8))
    };
    let mut columns = Vec::new();
    for column in row.get("columns").and_then(Value::as_array).ok_or("no columns")? {
        let pair = column.as_array().and_then(|pair| Some((pair.first()?.as_str()?, pair.get(1)?)));
        let (name, value) = pair.ok_or("not a column")?;
        columns.push((known(name)?, bytes(value)?));
    }
    let partners = row.get("partners").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_table);
    Ok(Vector {
        codec: known(text(row, "codec")?)?,
        elements,
        chunk: named(row, size(row)?)?,
        partners: partners.map(|row| named(row, size(row)?)).collect::<Result<_, _>>()?,
        columns,
    })
}

/// The tensors of a vector: those of the base, or the new ones.
fn state(vector: &Vector, step: u64, is_base: bool) -> State {
    let entry = |name: String, tensor: &Named| {
        let data = tensor.base.as_ref().filter(|_| is_base).unwrap_or(&tensor.data);
        let entry = Entry::whole(&name, tensor.dtype, &[vector.elements], tensor.role, data);
        Entry { param: Some("p"), ..entry }
    };
    let mut entries: Vec<Entry> = vector.partners.iter().map(|partner| entry(format!("a {}", partner.role), partner)).collect();
    entries.push(entry("t".into(), &vector.chunk));
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    State::new(step, entries)
}

fn store_of(vector: &Vector) -> Result<Store, Failure> {
    let mut store = Store::new()?;
    let is_delta = vector.chunk.base.is_some();
    if is_delta {
        store.save(state(vector, 1, true), None)?;
    }
    let mut snapshot = store.draft(state(vector, 2, false), is_delta.then_some(1));
    let tensors = snapshot.casks.iter_mut().flat_map(|(_, cask)| &mut cask.tensors);
    for tensor in tensors.filter(|tensor| tensor.name == "t") {
        let chunk = &mut tensor.shards[0].chunks[0];
        (chunk.codec, chunk.columns) = (vector.codec, vector.columns.clone());
        if is_delta {
            chunk.kind = DELTA;
        }
    }
    store.commit(snapshot.seal())?;
    Ok(store)
}

pub(crate) fn cases() -> Result<Vec<Sketch>, Failure> {
    let tables: Vec<Table> = VECTORS.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
    let mut cases = Vec::new();
    for (kind, is_valid) in [("chunk", true), ("chunk_decode", true), ("chunk_invalid", false)] {
        for (at, row) in tables.iter().flat_map(|table| rows(table, kind).enumerate()) {
            let vector = vector(row)?;
            let why = row
                .get("name")
                .and_then(Value::as_str)
                .map_or_else(|| format!("a chunk as the writer makes it, {}", at + 1), str::to_owned);
            let area = vector.codec.trim_start_matches("tc.");
            let name = format!("{area}/{}", slug(&why));
            let clause = row.get("clause").and_then(Value::as_str).map_or_else(|| format!("{area} 1"), str::to_owned);
            let alone = vector.partners.is_empty() && vector.chunk.base.is_none() && vector.chunk.role == "model";
            let (input, outcome) = if alone {
                let chunk = Chunk::absolute(vector.codec, vector.columns.clone(), vector.chunk.data.clone());
                let cask = Cask::new(id(0xe6), vec![Tensor::whole("t", vector.chunk.dtype, &[vector.elements], vec![chunk])]);
                let accepted = casks::accept(&name, &clause, &why, &cask);
                (accepted.input, accepted.outcome)
            } else {
                let store = store_of(&vector)?;
                let outcome = Outcome::Accept(store.expected());
                (store.input(), outcome)
            };
            let outcome = if is_valid { outcome } else { Outcome::Reject("corrupt") };
            cases.push(Sketch { name, clause, why, input, outcome });
        }
    }
    Ok(cases)
}
