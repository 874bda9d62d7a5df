//! Tensors that change during a save, and codecs that are wrong: either nothing is committed, or what was committed can
//! be read.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use crate::common::data;
use object_store::memory::InMemory;
use tensorcask::codec::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, Raw, Registry};
use tensorcask::interchange::safetensors::Files;
use tensorcask::maintain::{self, VerifyOptions};
use tensorcask::{ErrorKind, FiniteCheck, Metadata, Policy, Result, Slice, Store, StoreOptions, TensorView, Writer, WriterOptions};

fn store_with(codec: impl Codec + 'static) -> Store {
    let registry = Registry::default().with(Arc::new(codec)).unwrap();
    Store::with_object_store(Arc::new(InMemory::new()), Default::default(), StoreOptions { registry, ..StoreOptions::default() })
}

async fn writer_of(store: &Store) -> Writer {
    store.writer_with(WriterOptions { policy: Policy::Consecutive, ..WriterOptions::default() }).await.unwrap()
}

/// Calls a function whenever the writer asks for an estimate, and takes no chunk.
struct Watcher<F>(F);

impl<F> std::fmt::Debug for Watcher<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watcher")
    }
}

impl<F: Fn() + Send + Sync> Codec for Watcher<F> {
    fn id(&self) -> &str {
        "example.org.watcher"
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Never
    }

    fn cost(&self) -> Cost {
        Cost { encode: 1.0, decode: 1.0 }
    }

    fn max_encoded_bytes(&self, _: tensorcask::Dtype, _: u64) -> u64 {
        0
    }

    fn estimate(&self, _: &Chunk<'_>) -> Option<Vec<u64>> {
        (self.0)();
        None
    }

    fn encode(&self, _: &Chunk<'_>) -> Result<Encoded> {
        Err(tensorcask::Error::new(ErrorKind::InvalidArgument, "takes no chunk"))
    }

    fn decode(&self, _: &Columns<'_>, _: &mut [u8]) -> Result<()> {
        Err(tensorcask::Error::new(ErrorKind::Corrupt, "made no chunk"))
    }
}

/// Saves the tensors of a mapped file, of which another program changes a byte of every tensor at some moment.
#[tokio::test]
async fn a_tensor_that_changes_during_a_save_is_refused_or_saved_as_it_was_at_some_moment() {
    let folder = tempfile::tempdir().unwrap();
    let first = data("step-1000.safetensors");
    let second = folder.path().join("second.safetensors");
    let before = std::fs::read(data("step-1001.safetensors")).unwrap();
    std::fs::write(&second, &before).unwrap();
    let ranges: BTreeMap<String, Range<usize>> = {
        let files = Files::open(&[&second]).unwrap();
        let views = files.tensors().unwrap();
        let first = views.iter().map(|view| view.data().as_ptr() as usize).min().unwrap();
        let start = before.len() - views.iter().map(|view| view.data().len()).sum::<usize>();
        let at = |view: &TensorView<'_>| start + view.data().as_ptr() as usize - first;
        views.iter().map(|view| (view.name().to_owned(), at(view)..at(view) + view.data().len())).collect()
    };
    // The bytes to change: one in the middle of each tensor.
    let places: Vec<usize> = ranges.values().map(|range| range.start.midpoint(range.end)).collect();
    let mut after = before.clone();
    places.iter().for_each(|&place| after[place] ^= 1);

    let mut refused = 0;
    let mut saved = 0;
    let mut moment = 0;
    loop {
        std::fs::write(&second, &before).unwrap();
        let calls = Arc::new(AtomicUsize::new(usize::MAX / 2));
        let watcher = {
            let calls = calls.clone();
            let places = places.clone();
            let before = before.clone();
            let file = std::fs::File::options().write(true).open(&second).unwrap();
            Watcher(move || {
                if calls.fetch_add(1, SeqCst) == moment {
                    places.iter().for_each(|&place| file.write_all_at(&[before[place] ^ 1], place as u64).unwrap());
                }
            })
        };
        let store = store_with(watcher);
        let mut writer = writer_of(&store).await;
        let base = Files::open(&[&first]).unwrap();
        writer.save(1000, &base.tensors().unwrap(), &[], &Metadata::default()).await.unwrap();
        calls.store(0, SeqCst);
        let input = Files::open(&[&second]).unwrap();
        let tensors = input.tensors().unwrap();
        match writer.save(1001, &tensors, &[], &Metadata::default()).await {
            Ok(_) => {
                saved += 1;
                check(&store, 1001, &tensors, &ranges, [&before, &after]).await;
            }
            Err(error) => {
                refused += 1;
                assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("changed during the save"), "{error}");
                assert!(error.tensor_name().is_some(), "{error}");
                assert_eq!(steps(&store).await, [1000]);
                writer.save(1002, &tensors, &[], &Metadata::default()).await.unwrap();
                check(&store, 1002, &tensors, &ranges, [&after, &after]).await;
            }
        }
        assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
        if calls.load(SeqCst) <= moment {
            break;
        }
        moment += 3;
    }
    assert!(saved > 0, "the last save ended before its moment came");
    println!("{refused} saves were refused, {saved} were consistent");
}

async fn steps(store: &Store) -> Vec<u64> {
    store.snapshots().await.unwrap().iter().map(|snapshot| snapshot.record.step).collect()
}

/// Checks that each tensor of a step has the bytes of one of two files.
async fn check(store: &Store, step: u64, tensors: &[TensorView<'_>], ranges: &BTreeMap<String, Range<usize>>, files: [&[u8]; 2]) {
    let snapshot = store.snapshot(step).await.unwrap();
    for view in tensors {
        let range = ranges[view.name()].clone();
        let read = snapshot.read(view.name(), &Slice::all()).await.unwrap().data;
        assert!(files.iter().any(|file| file[range.clone()] == read), "step {step}, {}", view.name());
    }
}

/// Stores chunks raw, and calls a function with each result.
struct RawThen<F>(F);

impl<F> std::fmt::Debug for RawThen<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RawThen")
    }
}

impl<F: Fn(&mut Encoded) + Send + Sync> Codec for RawThen<F> {
    fn id(&self) -> &str {
        "example.org.raw-then"
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Never
    }

    fn cost(&self) -> Cost {
        Raw.cost()
    }

    fn max_encoded_bytes(&self, dtype: tensorcask::Dtype, element_count: u64) -> u64 {
        Raw.max_encoded_bytes(dtype, element_count)
    }

    fn estimate(&self, _: &Chunk<'_>) -> Option<Vec<u64>> {
        // Looks better than every other codec.
        Some(vec![1])
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let mut encoded = Raw.encode(chunk)?;
        (self.0)(&mut encoded);
        Ok(encoded)
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        Raw.decode(columns, out)
    }
}

#[tokio::test]
async fn the_check_for_nan_sees_the_bytes_that_are_stored() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changing.safetensors");
    let header = r#"{"w":{"dtype":"F32","shape":[4096],"data_offsets":[0,16384]}}"#;
    let start = 8 + header.len() as u64;
    let nan = f32::NAN.to_le_bytes();
    let content = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &nan, &[0; 16_380]].concat();
    for verify_after_encode in [false, true] {
        std::fs::write(&path, &content).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        // Another program sets the element to 1 after the chunk was encoded.
        let store = store_with(RawThen(move |_: &mut Encoded| file.write_all_at(&1f32.to_le_bytes(), start).unwrap()));
        let check = FiniteCheck::Refuse;
        let options = WriterOptions { policy: Policy::Full, check, verify_after_encode, ..WriterOptions::default() };
        let mut writer = store.writer_with(options).await.unwrap();
        let input = Files::open(&[&path]).unwrap();
        let error = writer.save(1, &input.tensors().unwrap(), &[], &Metadata::default()).await.unwrap_err();
        let expected = if verify_after_encode { "changed during the save" } else { "1 NaN" };
        assert!(error.message().contains(expected), "{error}");
        assert_eq!(steps(&store).await, [0u64; 0], "nothing was committed");
    }
}

#[tokio::test]
async fn a_flipped_bit_between_encoding_and_storing_is_found_before_the_commit() {
    let store = store_with(RawThen(|encoded: &mut Encoded| {
        if let Some(byte) = encoded.columns.first_mut().and_then(|(_, column)| column.last_mut()) {
            *byte ^= 0x10;
        }
    }));
    let mut writer = writer_of(&store).await;
    let input = Files::open(&[data("step-1000.safetensors")]).unwrap();
    let error = writer.save(1000, &input.tensors().unwrap(), &[], &Metadata::default()).await.unwrap_err();
    assert!(error.to_string().contains("example.org.raw-then") && error.tensor_name().is_some(), "{error}");
    assert_eq!(steps(&store).await, [0u64; 0], "nothing was committed");
}
