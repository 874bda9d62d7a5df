//! Views of tensors: raw chunks of local files are mapped, wherever in the chain they are; all others have a reason.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tensorcask::codec::CodecRules;
use tensorcask::maintain::{self, GcOptions};
use tensorcask::{
    ChunkGrid, CopyReason, Dtype, ErrorKind, Limits, Metadata, PartPlace, Policy, Rect, Slice, Snapshot, Store, StoreOptions, StoredTensor,
    TensorMap, TensorView, Writer, WriterOptions,
};

use crate::common::{SmallState, noise, without_inline};

/// Elements of a chunk of a tensor with one dimension.
const CHUNK: usize = 1 << 18;

fn local(folder: &Path, options: StoreOptions) -> Store {
    options.open(folder.join("run").to_str().unwrap()).unwrap()
}

async fn writer(store: &Store, codecs: &[&str]) -> Writer {
    let codecs = CodecRules::parse(codecs.iter().copied()).unwrap();
    store.writer_with(WriterOptions { codecs, policy: Policy::Consecutive, ..WriterOptions::default() }).await.unwrap()
}

async fn save(writer: &mut Writer, step: u64, tensors: &[TensorView<'_>]) {
    writer.save(step, tensors, &[], &Metadata::default()).await.unwrap();
}

/// Saves `w`, a vector of bytes, and returns the snapshot.
async fn save_bytes(store: &Store, writer: &mut Writer, step: u64, bytes: &[u8]) -> Snapshot {
    save(writer, step, &[TensorView::new("w", Dtype::U8, &[bytes.len() as u64], bytes).unwrap()]).await;
    store.snapshot(step).await.unwrap()
}

/// Returns all bytes of a map whose shards are ranges of rows.
fn bytes_of(map: &TensorMap) -> Vec<u8> {
    map.parts.iter().flat_map(|part| part.bytes.to_vec()).collect()
}

/// Elements, and the place of each part: the reason why it was copied, if it was.
fn places(map: &TensorMap) -> Vec<(std::ops::Range<u64>, PartPlace)> {
    map.parts.iter().map(|part| (part.stored.elements.clone(), part.stored.place.clone())).collect()
}

/// Returns the file of a part.
fn file_of(place: &PartPlace) -> (&Path, u64) {
    match place {
        PartPlace::File { path, first_byte } => (path, *first_byte),
        other => panic!("not in a file: {other:?}"),
    }
}

/// Asserts that a part's bytes are those of its file in memory: their address belongs to a mapping of the file.
#[cfg(target_os = "linux")]
fn assert_is_mapped(map: &TensorMap) {
    for part in &map.parts {
        let (path, first_byte) = file_of(&part.stored.place);
        let path = path.canonicalize().unwrap();
        let start = part.bytes.as_ptr() as u64;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let held = maps.lines().filter(|line| line.ends_with(path.to_str().unwrap())).any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
            let (from, to) = fields[0].split_once('-').unwrap();
            let range = number(from)..number(to);
            range.contains(&start) && start - range.start + number(fields[2]) == first_byte
        });
        assert!(held, "{path:?} is not mapped at {start:x}:\n{maps}");
    }
}

#[cfg(not(target_os = "linux"))]
fn assert_is_mapped(map: &TensorMap) {
    assert_eq!(map.copied_bytes(), 0);
}

#[tokio::test]
async fn raw_tensors_of_all_kinds_are_mapped() {
    let folder = tempfile::tempdir().unwrap();
    let store = local(folder.path(), without_inline());
    let state = SmallState::at(1);
    // Rows of 1001 elements: a chunk ends inside a page of memory, and its size is no multiple of the alignment.
    let rows = noise(5, 1000 * 1001 * 2);
    let mut tensors = state.tensors();
    tensors.push(TensorView::new("rows", Dtype::Bf16, &[1000, 1001], &rows).unwrap());
    let mut writer = writer(&store, &["*=tc.raw"]).await;
    save(&mut writer, 1, &tensors).await;

    let snapshot = store.snapshot(1).await.unwrap();
    for (name, bytes) in state.expected().into_iter().chain([("rows", rows.clone())]) {
        let map = snapshot.view(name).await.unwrap();
        let tensor = snapshot.tensor(name).unwrap();
        assert_eq!((map.dtype, &map.shape), (tensor.dtype, &tensor.shape));
        assert!(bytes_of(&map) == bytes, "{name}");
        assert_eq!(map.copied_bytes(), 0, "{name}");
        assert_is_mapped(&map);
        match name {
            "model.empty" => assert!(map.parts.is_empty()),
            "model.split" => {
                let shards: Vec<&Rect> = map.parts.iter().map(|part| &part.stored.shard).collect();
                let expected = [(0, 2), (2, 3)].map(|(row, rows)| Rect { offset: vec![row, 0], shape: vec![rows, 3] });
                assert_eq!(shards, expected.iter().collect::<Vec<_>>());
                assert!(map.contiguous().is_none(), "two shards");
                continue;
            }
            _ => assert_eq!(map.parts.len(), 1, "{name}"),
        }
        assert!(map.contiguous().unwrap() == bytes, "{name}");
    }
    let chunks = ChunkGrid::new(Dtype::Bf16, &[1000, 1001]).unwrap().chunk_count();
    assert!(chunks > 1, "chunks were joined");

    let [one, tied] = ["model.sparse", "model.sparse_tied"].map(|name| {
        let stored = futures::executor::block_on(StoredTensor::list(&snapshot, &[name])).unwrap().remove(0);
        assert_eq!(stored.name, name);
        stored.in_one_file().unwrap().place.clone()
    });
    assert_eq!(one, tied, "tied tensors are one place");
    assert_eq!(snapshot.view("no.such").await.unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn a_map_outlives_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let store = local(folder.path(), without_inline());
    let first = noise(1, 3 * CHUNK);
    let second = noise(2, CHUNK);
    let mut writer = store.writer(Policy::Full).await.unwrap();
    let snapshot = save_bytes(&store, &mut writer, 1, &first).await;
    let map = snapshot.view("w").await.unwrap();
    save_bytes(&store, &mut writer, 2, &second).await;
    drop(writer);

    store.forget(&[1]).await.unwrap();
    let now = GcOptions { apply: true, age_floor: Duration::ZERO, collect: true, directories: false };
    assert!(maintain::gc(&store, &now).await.unwrap().deleted.iter().any(|object| object.path.starts_with("casks/")));
    let (path, _) = file_of(&map.parts[0].stored.place);
    assert!(!path.exists());
    assert!(map.contiguous().unwrap() == first, "the map outlives the file");
    assert_eq!(snapshot.view("w").await.unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn unchanged_chunks_of_a_delta_are_mapped_from_the_file_of_the_base() {
    for (rules, is_raw) in [(&[][..], false), (&["*=tc.raw"][..], true)] {
        let folder = tempfile::tempdir().unwrap();
        let store = local(folder.path(), without_inline());
        let mut writer = writer(&store, rules).await;
        let mut bytes = noise(3, 4 * CHUNK);
        let base = save_bytes(&store, &mut writer, 1, &bytes).await.view("w").await.unwrap();
        assert_eq!(base.parts.len(), 1);
        let (base_file, first_byte) = file_of(&base.parts[0].stored.place);

        let start = CHUNK as u64;
        let end = 2 * CHUNK as u64;
        for byte in &mut bytes[CHUNK..2 * CHUNK] {
            *byte = byte.wrapping_mul(3).wrapping_add(1);
            if !is_raw {
                break;
            }
        }
        let map = save_bytes(&store, &mut writer, 2, &bytes).await.view("w").await.unwrap();
        assert!(bytes_of(&map) == bytes);
        assert!(map.contiguous().is_none());
        let places = places(&map);
        let elements: Vec<_> = places.iter().map(|(elements, _)| elements.clone()).collect();
        assert_eq!(elements, [0..start, start..end, end..4 * CHUNK as u64]);
        assert_eq!(file_of(&places[0].1), (base_file, first_byte));
        assert_eq!(file_of(&places[2].1), (base_file, first_byte + end));
        if is_raw {
            assert_ne!(file_of(&places[1].1).0, base_file, "the changed chunk is in the file of the delta");
            assert_eq!(map.copied_bytes(), 0);
            assert_is_mapped(&map);
        } else {
            assert_eq!(places[1].1, PartPlace::Copy(CopyReason::Delta));
            assert_eq!(map.copied_bytes(), end - start);
        }
    }
}

#[tokio::test]
async fn a_compressed_chunk_is_decoded_and_its_neighbours_are_mapped() {
    let folder = tempfile::tempdir().unwrap();
    let store = local(folder.path(), without_inline());
    let mut bytes = noise(4, 5 * CHUNK);
    bytes[CHUNK..3 * CHUNK].fill(9);
    let mut writer = writer(&store, &[]).await;
    let snapshot = save_bytes(&store, &mut writer, 1, &bytes).await;
    let map = snapshot.view("w").await.unwrap();
    assert!(bytes_of(&map) == bytes);
    let places = places(&map);
    assert_eq!(places.len(), 3);
    assert_eq!(places[1], (CHUNK as u64..3 * CHUNK as u64, PartPlace::Copy(CopyReason::Codec("tc.constant".into()))));
    let ((before, _), (after, _)) = (file_of(&places[0].1), file_of(&places[2].1));
    assert_eq!(before, after);
    // Counts of chunks and pages have both kinds.
    assert_eq!(snapshot.inspect().read_counts().chunks, 5);

    let small = StoreOptions { limits: Limits { max_read_bytes: 2 * CHUNK as u64 - 1, ..Limits::default() }, ..without_inline() };
    let limited = local(folder.path(), small).snapshot(1).await.unwrap();
    let error = limited.view("w").await.unwrap_err();
    assert_eq!((error.kind(), error.tensor_name()), (ErrorKind::LimitExceeded, Some("w")));
}

#[tokio::test]
async fn a_snapshot_inside_of_a_log_entry_is_in_memory_already() {
    let folder = tempfile::tempdir().unwrap();
    let state = SmallState::at(1);
    for store in [local(folder.path(), StoreOptions::default()), Store::open("memory://views-of-entries").unwrap()] {
        let mut writer = writer(&store, &["*=tc.raw"]).await;
        save(&mut writer, 1, &state.tensors()).await;
        let snapshot = store.snapshot(1).await.unwrap();
        for (name, bytes) in state.expected() {
            let map = snapshot.view(name).await.unwrap();
            assert!(bytes_of(&map) == bytes, "{name}");
            assert!(map.parts.iter().all(|part| part.stored.place == PartPlace::LogEntry), "{name}");
            assert_eq!(map.copied_bytes(), 0);
        }
        let [one, other] = [snapshot.view("model.sparse").await.unwrap(), snapshot.view("model.sparse_tied").await.unwrap()];
        assert_eq!(one.parts[0].bytes.as_ptr(), other.parts[0].bytes.as_ptr(), "no copies");
    }
}

#[tokio::test]
async fn a_store_that_is_no_folder_is_copied_and_says_so() {
    let store = without_inline().open("memory://views").unwrap();
    let mut writer = writer(&store, &[]).await;
    let mut bytes = noise(6, 2 * CHUNK);
    save_bytes(&store, &mut writer, 1, &bytes).await;
    bytes[0] ^= 1;
    let map = save_bytes(&store, &mut writer, 2, &bytes).await.view("w").await.unwrap();
    assert!(bytes_of(&map) == bytes);
    let places = places(&map);
    assert_eq!(places[0].1, PartPlace::Copy(CopyReason::Delta));
    assert_eq!(places[1].1, PartPlace::Copy(CopyReason::NotLocal));
    assert_eq!(map.copied_bytes(), 2 * CHUNK as u64);
}

#[tokio::test]
async fn damage_names_tensor_and_chunk() {
    let folder = tempfile::tempdir().unwrap();
    let store = local(folder.path(), without_inline());
    let bytes = noise(8, 3 * CHUNK);
    let mut writer = writer(&store, &["*=tc.raw"]).await;
    let snapshot = save_bytes(&store, &mut writer, 1, &bytes).await;
    let map = snapshot.view("w").await.unwrap();
    let (path, first_byte) = file_of(&map.parts[0].stored.place);
    let path: PathBuf = path.to_owned();
    drop(map.clone());

    let whole = std::fs::read(&path).unwrap();
    let mut damaged = whole.clone();
    damaged[first_byte as usize + 2 * CHUNK + 5] ^= 4;
    // A new file: the map of the old one stays as it is.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, &damaged).unwrap();
    let error = snapshot.view("w").await.unwrap_err();
    assert_eq!((error.kind(), error.tensor_name(), error.chunk_number()), (ErrorKind::Corrupt, Some("w"), Some(2)));
    assert_eq!(error.clause_name(), Some("container 5.2"));
    assert!(error.object_name().is_some_and(|object| path.ends_with(object)), "{error}");
    assert!(map.contiguous().unwrap() == bytes);

    std::fs::write(&path, &whole[..first_byte as usize + CHUNK]).unwrap();
    let error = snapshot.view("w").await.unwrap_err();
    assert_eq!((error.kind(), error.tensor_name()), (ErrorKind::Corrupt, Some("w")));
    assert!(error.to_string().contains("truncated"), "{error}");
    assert_eq!(snapshot.read("w", &Slice::all()).await.unwrap_err().kind(), ErrorKind::Corrupt);
}
