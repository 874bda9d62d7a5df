//! Shared parts of the test files: small states, stores copied into memory, real data.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of this")]
#![allow(clippy::little_endian_bytes, reason = "the bytes of a scalar tensor")]

pub mod training;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use tensorcask::blocking;
use tensorcask::interchange::safetensors::Files;
use tensorcask::{Blob, Dtype, Metadata, Rect, Store, StoreOptions, TensorView};

pub const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/v1");

pub fn data(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(file)
}

/// Returns the objects of a folder, keyed by path below the folder.
pub fn objects_of(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
                // The clock of the storage is read with this object.
                if name != "probe/clock" {
                    found.push((name, std::fs::read(&path).unwrap()));
                }
            }
        }
    }
    found.sort();
    found
}

/// Copies a folder with all that it holds.
pub fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        match entry.path().is_dir() {
            true => copy_folder(&entry.path(), &to.join(entry.file_name())),
            false => _ = std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap(),
        }
    }
}

/// Returns a store in memory that holds exactly these objects.
pub fn store_of(objects: &[(String, Vec<u8>)]) -> Store {
    let memory = InMemory::new();
    futures::executor::block_on(async {
        for (name, bytes) in objects {
            memory.put(&object_store::path::Path::from(name.as_str()), PutPayload::from(bytes.clone())).await.unwrap();
        }
    });
    wrap(Arc::new(memory))
}

/// Whether the thorough tier runs (`TENSORCASK_THOROUGH=1`), which repeats a test over more positions, steps and seeds.
pub fn is_thorough() -> bool {
    std::env::var_os("TENSORCASK_THOROUGH").is_some()
}

/// Returns incompressible bytes.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 56) as u8
    };
    (0..bytes).map(next).collect()
}

/// Returns options of a store whose snapshots are objects, however small.
pub fn without_inline() -> StoreOptions {
    StoreOptions { inline_bytes: 0, ..StoreOptions::default() }
}

/// Returns a store whose snapshots are objects, however small.
pub fn wrap(objects: Arc<dyn ObjectStore>) -> Store {
    Store::with_object_store(objects, Default::default(), without_inline())
}

/// Returns a store that saves small snapshots inside of log entries.
pub fn wrap_inline(objects: Arc<dyn ObjectStore>) -> Store {
    Store::with_object_store(objects, Default::default(), StoreOptions::default())
}

/// Runs a future on a runtime of this thread, which is cheap enough for a hundred thousand damaged stores.
pub fn on_this_thread<F: std::future::Future>(future: F) -> F::Output {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    }
    RUNTIME.with(|runtime| runtime.block_on(future))
}

/// Ends a test that would hang. No test measures time with it.
pub const DEADLINE: Duration = Duration::from_secs(300);

/// Waits until a condition holds, on a clock that is not paused.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let poll = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(DEADLINE, poll).await.unwrap_or_else(|_| panic!("{what}: not within {DEADLINE:?}"));
}

pub fn blocking(store: Store) -> blocking::Store {
    blocking::Store::with(store).unwrap()
}

/// A small state with various codecs, dtypes, shards, ties, scalars, empty tensors and blobs. It changes with the step.
pub struct SmallState {
    pub dense: Vec<u8>,
    pub sparse: Vec<u8>,
    pub zeros: Vec<u8>,
    pub halves: [Vec<u8>; 2],
    pub packed: Vec<u8>,
    pub scalar: Vec<u8>,
    pub rng: Vec<u8>,
}

impl SmallState {
    pub fn at(step: u64) -> Self {
        let noise = |seed: u64, bytes: usize| -> Vec<u8> {
            let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            (0..bytes)
                .map(|_| {
                    x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (x >> 56) as u8
                })
                .collect()
        };
        let mut sparse = noise(7, 2 * 300);
        for i in 0..step as usize {
            sparse[2 * i] ^= 1;
        }
        Self {
            dense: noise(step, 4 * 40),
            sparse,
            zeros: vec![0; 4 * 100],
            halves: [noise(3, 2 * 6), noise(step + 100, 2 * 9)],
            packed: vec![0x21, 0x43, 0x05],
            scalar: step.to_le_bytes().to_vec(),
            rng: noise(step + 50, 20),
        }
    }

    pub fn tensors(&self) -> Vec<TensorView<'_>> {
        let half = |offset: u64, rows: u64, data| {
            TensorView::shard("model.split", Dtype::Bf16, &[5, 3], Rect { offset: vec![offset, 0], shape: vec![rows, 3] }, data).unwrap()
        };
        vec![
            TensorView::new("model.dense", Dtype::F32, &[8, 5], &self.dense).unwrap(),
            TensorView::new("model.sparse", Dtype::Bf16, &[30, 10], &self.sparse).unwrap(),
            TensorView::new("model.sparse_tied", Dtype::Bf16, &[30, 10], &self.sparse).unwrap(),
            TensorView::new("model.packed", Dtype::Int4, &[5], &self.packed).unwrap(),
            TensorView::new("model.empty", Dtype::F32, &[0, 4], &[]).unwrap(),
            half(0, 2, &self.halves[0]),
            half(2, 3, &self.halves[1]),
            TensorView::new("optimizer.exp_avg.dense", Dtype::F32, &[100], &self.zeros).unwrap(),
            TensorView::new("optimizer.step", Dtype::U64, &[], &self.scalar).unwrap().with_role("step", ""),
        ]
    }

    pub fn blobs(&self) -> Vec<Blob<'_>> {
        vec![Blob::new("rng", self.rng.as_slice()), Blob { rank: 1, name: "loader".into(), data: vec![9; 5].into() }]
    }

    pub fn metadata(step: u64) -> Metadata {
        let mut metadata = Metadata::default();
        metadata.user.insert("loss".into(), (1.0 / (step as f64 + 1.0)).into());
        metadata.file.insert("format".into(), "pt".into());
        metadata
    }

    /// Returns the expected bytes of each tensor.
    pub fn expected(&self) -> Vec<(&'static str, Vec<u8>)> {
        vec![
            ("model.dense", self.dense.clone()),
            ("model.empty", vec![]),
            ("model.packed", self.packed.clone()),
            ("model.sparse", self.sparse.clone()),
            ("model.sparse_tied", self.sparse.clone()),
            ("model.split", self.halves.concat()),
            ("optimizer.exp_avg.dense", self.zeros.clone()),
            ("optimizer.step", self.scalar.clone()),
        ]
    }
}

/// A state whose layers are copies of a real one.
pub struct Layers {
    own: Files,
    /// Bytes of the layers. Each has memory of its own: tensors that share memory would be tied.
    pub layers: Vec<Vec<Vec<u8>>>,
}

impl Layers {
    /// Returns layers as they were at the given steps of a training run.
    pub fn at_steps(steps: &[u64]) -> Self {
        let open = |step: u64| Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
        let bytes = |&step: &u64| -> Vec<Vec<u8>> { by_name(&open(step)).iter().map(|view| view.data().to_vec()).collect() };
        Self { own: open(steps[0]), layers: steps.iter().map(bytes).collect() }
    }

    /// Returns the tensors of all layers, each with a parameter of its own.
    pub fn tensors(&self) -> Vec<TensorView<'_>> {
        let views = by_name(&self.own);
        let mut tensors = Vec::new();
        for (layer, contents) in self.layers.iter().enumerate() {
            for (view, bytes) in views.iter().zip(contents) {
                let name = format!("{}.{layer:03}", view.name());
                let param = format!("{}.{layer:03}", view.param());
                let tensor = TensorView::new(name, view.dtype(), view.shape(), bytes).unwrap();
                tensors.push(tensor.with_role(view.role().to_owned(), param));
            }
        }
        tensors
    }
}

fn by_name(files: &Files) -> Vec<TensorView<'_>> {
    let mut views = files.tensors().unwrap();
    views.sort_by(|a, b| a.name().cmp(b.name()));
    views
}
