//! Rows that change as a whole: found by comparison, or named by the caller, which then needs no base.

use std::path::Path;

use tensorcask::{BaseKeeping, Dtype, ErrorKind, Metadata, Policy, Rank, SavedSnapshot, Slice, Store, TensorView, Writer, WriterOptions};

const ROWS: u64 = 9000;
const WIDTH: u64 = 48;

/// Returns a row of an f16 embedding, which depends on its number and version.
fn row(number: u64, version: u8) -> impl Iterator<Item = u8> {
    (0..WIDTH).flat_map(move |column| {
        half::f16::from_f32(((number * 31 + column * 7) % 101) as f32 / 50.0 + f32::from(version) / 64.0).to_le_bytes()
    })
}

struct Embedding {
    versions: Vec<u8>,
    bytes: Vec<u8>,
}

impl Embedding {
    fn new() -> Self {
        Self { versions: vec![0; ROWS as usize], bytes: (0..ROWS).flat_map(|number| row(number, 0)).collect() }
    }

    fn change(&mut self, rows: &[u64]) {
        for &number in rows {
            self.versions[number as usize] += 1;
            let at = (number * WIDTH * 2) as usize;
            self.bytes.splice(at..at + WIDTH as usize * 2, row(number, self.versions[number as usize]));
        }
    }

    fn view(&self) -> TensorView<'_> {
        view_of(&self.bytes, WIDTH)
    }
}

fn view_of(bytes: &[u8], width: u64) -> TensorView<'_> {
    TensorView::new("wte.weight", Dtype::F16, &[ROWS, width], bytes).unwrap()
}

async fn writer(folder: &Path, policy: Policy, base_cache: BaseKeeping) -> (Store, Writer) {
    let store = Store::open(folder.to_str().unwrap()).unwrap();
    let writer = store.writer_with(WriterOptions { policy, base_cache, ..WriterOptions::default() }).await.unwrap();
    (store, writer)
}

async fn save(writer: &mut Writer, step: u64, view: TensorView<'_>) -> Result<SavedSnapshot, tensorcask::Error> {
    writer.save(step, &[view], &[], &Metadata::default()).await
}

async fn check(store: &Store, step: u64, expected: &Embedding) {
    let snapshot = store.snapshot(step).await.unwrap();
    assert!(snapshot.read("wte.weight", &Slice::all()).await.unwrap().data == expected.bytes, "step {step}");
    let some = snapshot.read("wte.weight", &Slice::rows(5400..5500)).await.unwrap().data;
    assert!(some == expected.bytes[5400 * WIDTH as usize * 2..5500 * WIDTH as usize * 2], "step {step}");
    snapshot.verify().await.unwrap();
}

#[tokio::test]
async fn rows_that_changed_wholly_take_a_bit_each_for_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let (store, mut writer) = writer(folder.path(), Policy::Consecutive, BaseKeeping::Memory).await;
    let mut state = Embedding::new();
    save(&mut writer, 1, state.view()).await.unwrap();
    state.change(&(0..ROWS).filter(|n| n * n % 17 == 1).collect::<Vec<_>>());
    let saved = save(&mut writer, 2, state.view()).await.unwrap();
    assert!(saved.chunks.contains_key("tc.rows"), "{:?}", saved.chunks);
    check(&store, 2, &state).await;
}

#[tokio::test]
async fn named_rows_need_no_base() {
    let folder = tempfile::tempdir().unwrap();
    let (store, mut writer) = writer(folder.path(), Policy::OneShot, BaseKeeping::None).await;
    let mut state = Embedding::new();
    save(&mut writer, 1, state.view().with_row_hashes()).await.unwrap();
    // One-shot deltas refer to the first step, so rows that changed in earlier steps count, too.
    let mut states = Vec::new();
    for (step, rows) in [(2, vec![3, 700, 5432, 5433]), (3, vec![8999]), (4, vec![])] {
        state.change(&rows);
        // Chunks without a named row are compared by their checksums in the index. The test makes all pages unreadable.
        let saved = save(&mut writer, step, state.view().with_changed_rows(&rows).unwrap()).await.unwrap();
        assert!(saved.parent.is_some() && saved.stored_bytes < 8000, "{saved:?}");
        states.push((step, Embedding { versions: state.versions.clone(), bytes: state.bytes.clone() }));
    }
    for (step, state) in &states {
        check(&store, *step, state).await;
    }
    // A save without row hints ends the tracking, so the base is read back.
    state.change(&[1, 2, 3]);
    save(&mut writer, 5, state.view()).await.unwrap();
    state.change(&[4]);
    save(&mut writer, 6, state.view().with_changed_rows(&[4]).unwrap()).await.unwrap();
    check(&store, 6, &state).await;
}

#[tokio::test]
async fn with_every_chunk_named_no_page_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (store, mut writer) = writer(folder.path(), Policy::Consecutive, BaseKeeping::None).await;
    let mut state = Embedding::new();
    save(&mut writer, 1, state.view().with_row_hashes()).await.unwrap();
    let rows: Vec<u64> = (0..ROWS).step_by(100).collect();
    state.change(&rows);
    let before = store.io().bytes_read;
    let saved = save(&mut writer, 2, state.view().with_changed_rows(&rows).unwrap()).await.unwrap();
    assert!(saved.chunks.keys().eq(["tc.rows"]), "{:?}", saved.chunks);
    let read = store.io().bytes_read - before;
    assert!(read < state.bytes.len() as u64 / 100, "{read} bytes read of {}", state.bytes.len());
    check(&store, 2, &state).await;
}

#[tokio::test]
async fn a_row_that_is_left_out_fails_the_save() {
    for base_cache in [BaseKeeping::Memory, BaseKeeping::Encoded, BaseKeeping::None] {
        let folder = tempfile::tempdir().unwrap();
        let (store, mut writer) = writer(folder.path(), Policy::Consecutive, base_cache.clone()).await;
        let mut state = Embedding::new();
        save(&mut writer, 1, state.view()).await.unwrap();
        state.change(&[10, 6000]);
        let error = save(&mut writer, 2, state.view().with_changed_rows(&[10]).unwrap()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{base_cache:?}: {error}");
        assert!(error.to_string().contains("changed_rows"), "{error}");
        // The writer continues, and the rows of the failed save still count.
        save(&mut writer, 3, state.view().with_changed_rows(&[6000]).unwrap()).await.unwrap();
        check(&store, 3, &state).await;
    }
}

#[tokio::test]
async fn a_row_beside_a_named_one_is_not_left_out_unseen() {
    let cases = [
        (BaseKeeping::None, WIDTH, true),
        (BaseKeeping::None, WIDTH, false),
        (BaseKeeping::None, 8, true),
        (BaseKeeping::Memory, WIDTH, true),
    ];
    for (base_cache, width, has_row_hashes) in cases {
        let folder = tempfile::tempdir().unwrap();
        let (store, mut writer) = writer(folder.path(), Policy::Consecutive, base_cache.clone()).await;
        let mut bytes: Vec<u8> = (0..ROWS * width * 2).map(|at| (at * at % 251) as u8).collect();
        let row_bytes = width as usize * 2;
        let first = view_of(&bytes, width);
        save(&mut writer, 1, if has_row_hashes { first.with_row_hashes() } else { first }).await.unwrap();
        bytes[10 * row_bytes] ^= 1;
        bytes[11 * row_bytes] ^= 1;
        let error = save(&mut writer, 2, view_of(&bytes, width).with_changed_rows(&[10]).unwrap()).await.unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidArgument && error.to_string().contains("row 11"), "{base_cache:?} {width}: {error}");
        save(&mut writer, 3, view_of(&bytes, width).with_changed_rows(&[11]).unwrap()).await.unwrap();
        assert!(store.snapshot(3).await.unwrap().read("wte.weight", &Slice::all()).await.unwrap().data == bytes);
    }
}

/// Rows of a rank count since its last upload, and since the base, whether the uploads between were committed or not.
#[tokio::test]
async fn ranks_name_rows() {
    for policy in [Policy::OneShot, Policy::Consecutive, Policy::Intermittent { every: 3 }] {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().to_str().unwrap()).unwrap();
        let options = WriterOptions { policy, base_cache: BaseKeeping::None, ..WriterOptions::default() };
        let mut coordinator = store.writer_with(options.clone()).await.unwrap();
        let mut rank = store.rank_writer(Rank { rank: 0, world: 1, attempt: 0 }, options).await.unwrap();
        let mut state = Embedding::new();
        for step in 1..=8 {
            let rows: Vec<u64> = (0..ROWS).filter(|row| row % 97 == step).collect();
            state.change(&rows);
            let parent = coordinator.next_parent(step).await.unwrap();
            let before = store.io().bytes_read;
            let receipt = rank.save_on(step, parent, &[state.view().with_changed_rows(&rows).unwrap()], &[]).await.unwrap();
            // Every chunk has a named row, and none is read.
            let read = store.io().bytes_read - before;
            assert!(read < state.bytes.len() as u64 / 20, "{policy:?} {step}: {read} bytes read");
            if step == 4 || step == 5 {
                // Never committed.
                continue;
            }
            let saved = coordinator.commit_receipts(step, &[receipt], &Metadata::default()).await.unwrap();
            assert!(saved.parent.is_none() || saved.stored_bytes < saved.tensor_bytes / 4, "{policy:?} {step}: {saved:?}");
            check(&store, step, &state).await;
        }
        state.change(&[20, 21]);
        let parent = coordinator.next_parent(9).await.unwrap();
        let left_out = rank.save_on(9, parent, &[state.view().with_changed_rows(&[20]).unwrap()], &[]).await;
        assert!(left_out.map_or_else(|error| error.kind() == ErrorKind::InvalidArgument, |_| parent.is_none()));
    }
}

#[tokio::test]
async fn a_new_writer_takes_nothing_for_granted() {
    let folder = tempfile::tempdir().unwrap();
    let (_, mut first) = writer(folder.path(), Policy::Consecutive, BaseKeeping::None).await;
    let mut state = Embedding::new();
    save(&mut first, 1, state.view()).await.unwrap();
    state.change(&[10, 6000]);
    let (store, mut second) = writer(folder.path(), Policy::Consecutive, BaseKeeping::None).await;
    save(&mut second, 2, state.view().with_changed_rows(&[10]).unwrap()).await.unwrap();
    check(&store, 2, &state).await;
}

#[test]
fn rows_beyond_the_tensor_are_refused() {
    let state = Embedding::new();
    assert!(state.view().with_changed_rows(&[ROWS]).is_err());
    assert!(TensorView::new("scalar", Dtype::U8, &[], &[1]).unwrap().with_changed_rows(&[0]).is_err());
}
