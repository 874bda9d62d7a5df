//! A custom codec. It is registered as a value, tested against the library's contract, and chosen where it saves bytes.
//! Readers without the codec can still read everything else.
//!
//! `cargo run --example custom_codec`

#![allow(clippy::little_endian_bytes, reason = "tensors are little-endian")]

use std::sync::Arc;

use tensorcask::blocking::Store;
use tensorcask::codec::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, Registry};
use tensorcask::{Dtype, Error, ErrorKind, Latest, Metadata, Policy, Result, Slice, StoreOptions, TensorView};

/// Integers with a constant difference: stores the first integer and the difference.
///
/// Position ids and arange buffers have this form. No codec of the library uses it.
#[derive(Debug)]
struct Arange;

/// Returns the i64 values of a chunk.
fn numbers(data: &[u8]) -> impl Iterator<Item = i64> {
    data.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes))
}

/// Returns the first number and the difference, if they describe the whole chunk.
fn first_and_step(chunk: &Chunk<'_>) -> Option<(i64, i64)> {
    let mut all = numbers(chunk.data);
    let first = all.next().filter(|_| chunk.dtype == Dtype::I64)?;
    let step = all.next().map_or(0, |second| second.wrapping_sub(first));
    let expected = (0i64..).map(|i| first.wrapping_add(step.wrapping_mul(i)));
    numbers(chunk.data).eq(expected.take(chunk.data.len() / 8)).then_some((first, step))
}

impl Codec for Arange {
    /// The prefix `tc.` belongs to the library. Use a name that you own, to keep codecs of different authors apart.
    fn id(&self) -> &str {
        "example.org.arange"
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Never
    }

    fn cost(&self) -> Cost {
        Cost { encode: 1.0, decode: 1.0 }
    }

    fn max_encoded_bytes(&self, _: Dtype, _: u64) -> u64 {
        16
    }

    /// Returns the size of each column, or `None` if the codec does not fit the chunk.
    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        first_and_step(chunk).map(|_| vec![16])
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let (first, step) = first_and_step(chunk).ok_or_else(|| Error::invalid("these numbers do not grow evenly"))?;
        let bytes = [first.to_le_bytes(), step.to_le_bytes()].concat();
        Ok(Encoded { uses_base: false, columns: vec![("arange", bytes)] })
    }

    /// The input may be arbitrary bytes. The result must be an error or a full buffer.
    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        let [bytes] = columns.exactly(["arange"])?;
        let (&[first, step], []) = bytes.as_chunks::<8>() else { return Err(Error::corrupt("an arange of other than 16 bytes")) };
        if columns.dtype != Dtype::I64 {
            return Err(Error::corrupt(format!("an arange of {}", columns.dtype)));
        }
        let first = i64::from_le_bytes(first);
        let step = i64::from_le_bytes(step);
        for (i, slot) in (0i64..).zip(out.as_chunks_mut::<8>().0) {
            *slot = first.wrapping_add(step.wrapping_mul(i)).to_le_bytes();
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    // Tests the contract of every codec, lossless or lossy, on valid and on hostile bytes.
    tensorcask::testing::codec::run_all(&Arange)?;

    let folder = tempfile::tempdir().map_err(|e| Error::io("a temporary folder", e))?;
    let url = folder.path().join("run").display().to_string();
    let positions: Vec<u8> = (0..100_000i64).flat_map(i64::to_le_bytes).collect();
    let weights = vec![1u8; 4000];

    let registry = Registry::default().with(Arc::new(Arange))?;
    let store = Store::with(StoreOptions { registry, ..StoreOptions::default() }.open(&url)?)?;
    let state =
        [TensorView::new("positions", Dtype::I64, &[100_000], &positions)?, TensorView::new("weights", Dtype::F32, &[1000], &weights)?];
    let saved = store.writer(Policy::Full)?.save(1, &state, &[], &Metadata::default())?;
    println!("{} bytes of tensors in {}: {:?}", saved.tensor_bytes, saved.stored_bytes, saved.chunks);
    assert_eq!(store.snapshot(Latest)?.read("positions", &Slice::all())?.data, positions);

    // A reader without the codec reports the missing codec and reads everything else.
    let snapshot = Store::open(&url)?.snapshot(Latest)?;
    let error = snapshot.read("positions", &Slice::all()).err();
    println!("without the codec: {}", error.as_ref().map(ToString::to_string).unwrap_or_default());
    assert_eq!(error.map(|e| e.kind()), Some(ErrorKind::Unsupported));
    assert_eq!(snapshot.read("weights", &Slice::all())?.data, weights);
    Ok(())
}
