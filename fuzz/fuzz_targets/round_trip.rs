//! States of any shape, saved one after another and read back. Each state is unchanged, or was refused as an invalid
//! argument.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use tensorcask::maintain::{self, VerifyOptions};
use tensorcask::wire::{Id, StoreFile};
use tensorcask::{BaseKeeping, Blob, Dtype, ErrorKind, Metadata, Policy, Rect, Slice, Store, StoreOptions, TensorView, WriterOptions};

#[derive(Debug, Arbitrary)]
struct Input {
    policy: u8,
    keep_base: bool,
    alignment: u8,
    states: Vec<State>,
    blobs: Vec<(u8, String, Vec<u8>)>,
    slice: (u8, u8),
}

#[derive(Debug, Arbitrary)]
enum State {
    Fresh(Vec<Tensor>),
    /// Previous state with some bytes changed: tensor, byte, bits.
    Edited(Vec<(u8, u16, u8)>),
}

#[derive(Debug, Arbitrary)]
struct Tensor {
    name: Name,
    dtype: u8,
    shape: Vec<u8>,
    /// Number of rows in the first of two shards, if there are two.
    split: Option<u8>,
    /// Seed of the noise that fills the rest of `data`; zero fills it with zeros.
    seed: u8,
    data: Vec<u8>,
}

#[derive(Debug, Arbitrary)]
enum Name {
    Any(String),
    Weight(bool),
    Moment(bool),
}

/// A tensor with its data.
#[derive(Clone)]
struct Built {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    split: Option<u64>,
    data: Vec<u8>,
}

const MOST_STATES: usize = 4;
const MOST_TENSORS: usize = 4;
const MOST_DIMENSIONS: usize = 3;
const MOST_EXTENT: u64 = 24;
const MOST_BYTES: u64 = 4096;

fuzz_target!(|input: Input| {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(run(input));
});

async fn run(input: Input) {
    // An existing store skips the probe of the medium's guarantees, which would take time.
    let memory = InMemory::new();
    memory.put(&"store.json".into(), StoreFile::new(Id([1; 16])).encode().unwrap().into()).await.unwrap();
    let store = Store::with_object_store(Arc::new(memory), Default::default(), StoreOptions::default());
    let policy = match input.policy % 4 {
        0 => Policy::Full,
        1 => Policy::OneShot,
        2 => Policy::Consecutive,
        _ => Policy::Intermittent { every: 2 },
    };
    let options = WriterOptions {
        policy,
        base_cache: if input.keep_base { BaseKeeping::Memory } else { BaseKeeping::None },
        alignment_exponent: 6 + input.alignment % 7,
        ..WriterOptions::default()
    };
    let mut writer = store.writer_with(options).await.unwrap();
    let blobs: Vec<Blob<'_>> = input
        .blobs
        .iter()
        .map(|(rank, name, bytes)| Blob { rank: u32::from(*rank), name: name.clone(), data: bytes.as_slice().into() })
        .collect();
    let mut states: Vec<Vec<Built>> = Vec::new();
    for state in input.states.iter().take(MOST_STATES) {
        states.push(match state {
            State::Fresh(tensors) => tensors.iter().take(MOST_TENSORS).filter_map(build).collect(),
            State::Edited(edits) => edited(states.last().cloned().unwrap_or_default(), edits),
        });
    }
    let mut saved = Vec::new();
    for (step, state) in (0u64..).zip(&states) {
        let mut views = Vec::new();
        for tensor in state {
            views.extend(views_of(tensor));
        }
        match writer.save(step, &views, &blobs, &Metadata::default()).await {
            Ok(_) => saved.push((step, state)),
            Err(e) => assert!(matches!(e.kind(), ErrorKind::InvalidArgument | ErrorKind::LimitExceeded), "{e}"),
        }
    }
    if saved.is_empty() {
        return;
    }
    let report = maintain::verify(&store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    for (step, state) in saved {
        let snapshot = store.snapshot(step).await.unwrap();
        assert_eq!(snapshot.tensors().len(), state.len());
        for tensor in state {
            assert_eq!(snapshot.read(&tensor.name, &Slice::all()).await.unwrap().data, tensor.data);
            if let (Some(&rows), false) = (tensor.shape.first(), tensor.dtype.is_packed()) {
                let a = u64::from(input.slice.0) % (rows + 1);
                let b = u64::from(input.slice.1) % (rows + 1);
                let from = a.min(b);
                let to = a.max(b);
                let row = (tensor.data.len() as u64).checked_div(rows).unwrap_or(0);
                let found = snapshot.read(&tensor.name, &Slice::rows(from..to)).await.unwrap().data;
                assert_eq!(found, tensor.data[(from * row) as usize..(to * row) as usize]);
            }
        }
        for blob in &blobs {
            assert_eq!(snapshot.read_blob(blob.rank, &blob.name).await.unwrap(), &*blob.data);
        }
    }
}

fn build(tensor: &Tensor) -> Option<Built> {
    let name = match &tensor.name {
        Name::Any(name) => name.clone(),
        Name::Weight(first) => format!("model.{first}"),
        Name::Moment(first) => format!("optimizer.exp_avg.{first}"),
    };
    let dtype = Dtype::ALL[usize::from(tensor.dtype) % Dtype::ALL.len()];
    let shape: Vec<u64> = tensor.shape.iter().take(MOST_DIMENSIONS).map(|&extent| u64::from(extent) % MOST_EXTENT).collect();
    let bytes = dtype.byte_count(shape.iter().product()).filter(|&bytes| bytes <= MOST_BYTES)?;
    let mut data = tensor.data.clone();
    let mut noise = u32::from(tensor.seed);
    data.truncate(bytes as usize);
    while (data.len() as u64) < bytes {
        noise = noise.wrapping_mul(1_664_525).wrapping_add(if noise == 0 { 0 } else { 1_013_904_223 });
        data.push((noise >> 24) as u8);
    }
    clear_unused(dtype, &shape, &mut data);
    // Shards of packed elements need not begin on byte boundaries of the whole tensor.
    let split = match (tensor.split, shape.first()) {
        (Some(split), Some(&rows)) if !dtype.is_packed() && rows > 1 && bytes > 0 => Some(u64::from(split) % (rows - 1) + 1),
        _ => None,
    };
    Some(Built { name, dtype, shape, split, data })
}

/// Clears the unused bits of the last byte of a packed tensor, which must be zero.
fn clear_unused(dtype: Dtype, shape: &[u64], data: &mut [u8]) {
    let used = (shape.iter().product::<u64>() * dtype.bits() % 8) as u32;
    if let (Some(last), 1..) = (data.last_mut(), used) {
        *last &= (1 << used) - 1;
    }
}

fn edited(mut state: Vec<Built>, edits: &[(u8, u16, u8)]) -> Vec<Built> {
    if state.is_empty() {
        return state;
    }
    let count = state.len();
    for &(tensor, at, bits) in edits {
        let tensor = &mut state[usize::from(tensor) % count];
        let length = tensor.data.len();
        if let Some(byte) = tensor.data.get_mut(usize::from(at) % length.max(1)) {
            *byte ^= bits;
        }
        clear_unused(tensor.dtype, &tensor.shape, &mut tensor.data);
    }
    state
}

fn views_of(tensor: &Built) -> Vec<TensorView<'_>> {
    let Some(split) = tensor.split else {
        return vec![TensorView::new(tensor.name.as_str(), tensor.dtype, &tensor.shape, &tensor.data).unwrap()];
    };
    let at = tensor.data.len() / tensor.shape[0] as usize * split as usize;
    let shard = |first: u64, rows: u64, data| {
        let mut rect = Rect::whole(&tensor.shape);
        (rect.offset[0], rect.shape[0]) = (first, rows);
        TensorView::shard(tensor.name.as_str(), tensor.dtype, &tensor.shape, rect, data).unwrap()
    };
    vec![shard(0, split, &tensor.data[..at]), shard(split, tensor.shape[0] - split, &tensor.data[at..])]
}
