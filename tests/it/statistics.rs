//! Statistics of snapshots: the writer's option, the blob, and readers.

use tensorcask::blocking::{Store, Writer, maintain};
use tensorcask::{Blob, ChangeStatistics, ChunkStatistics, Dtype, ErrorKind, Metadata, Policy, Slice, TensorView, WriterOptions};

fn options(policy: Policy) -> WriterOptions {
    WriterOptions { policy, statistics: true, ..WriterOptions::default() }
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Three chunks of numbers.
fn numbers() -> Vec<f32> {
    (0..600_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e6 - 8.0).collect()
}

#[test]
fn each_chunk_has_a_row_and_an_injected_nan_is_found() {
    let store = Store::open("memory://statistics-nan").unwrap();
    let mut writer = store.writer_with(options(Policy::Consecutive)).unwrap();
    let mut values = numbers();
    let counter = [7u8; 8];
    let save = |writer: &mut Writer, step: u64, values: &[f32]| {
        let bytes = bytes_of(values);
        let state = [
            TensorView::new("layers.0.w", Dtype::F32, &[600_000], &bytes).unwrap(),
            TensorView::new("step", Dtype::I64, &[], &counter).unwrap(),
        ];
        writer.save(step, &state, &[Blob::new("rng", &b"seed"[..])], &Metadata::default()).unwrap();
    };
    save(&mut writer, 1, &values);
    values[300_000] = f32::NAN;
    save(&mut writer, 2, &values);

    let first = store.snapshot(1).unwrap().statistics().unwrap();
    let places: Vec<(&str, u64, u64)> = first.iter().map(|row| (row.tensor.as_str(), row.chunk, row.elements)).collect();
    assert_eq!(places, [("layers.0.w", 0, 262_144), ("layers.0.w", 1, 262_144), ("layers.0.w", 2, 75_712), ("step", 0, 1)]);
    assert!(first.iter().all(|row| row.change.is_none() && row.reference_step.is_none()));
    assert_eq!(first[3].values, None);
    for row in &first[..3] {
        let start = row.chunk as usize * 262_144;
        let chunk = &numbers()[start..start + row.elements as usize];
        let found = row.values.unwrap();
        let extreme = |of: fn(f32, f32) -> f32| chunk.iter().copied().reduce(of).map(f64::from);
        assert_eq!((found.min, found.max), (extreme(f32::min), extreme(f32::max)));
        assert_eq!((found.nan, found.zero), (0, chunk.iter().filter(|number| **number == 0.0).count() as u64));
        let sum: f64 = chunk.iter().map(|&number| f64::from(number)).sum();
        assert!((found.sum.unwrap() - sum).abs() <= 1e-12 * chunk.iter().map(|number| f64::from(number.abs())).sum::<f64>());
    }

    let second = store.snapshot(2).unwrap().statistics().unwrap();
    let with_nan: Vec<u64> = second.iter().filter(|row| row.values.is_some_and(|values| values.nan == 1)).map(|row| row.chunk).collect();
    assert_eq!(with_nan, [1]);
    let unchanged = ChangeStatistics { changed: 0, squares: Some(0.0), ulps: 0 };
    let one = ChangeStatistics { changed: 1, ..unchanged };
    let changes: Vec<Option<ChangeStatistics>> = second.iter().map(|row| row.change).collect();
    assert_eq!(changes, [Some(unchanged), Some(one), Some(unchanged), Some(unchanged)]);
    assert!(second.iter().all(|row| row.reference_step == Some(1)));
    // The statistics are no part of the state: saving it again is no conflict.
    save(&mut writer, 2, &values);
}

#[test]
fn statistics_are_off_unless_asked_for_and_survive_compaction() {
    let store = Store::open("memory://statistics-off").unwrap();
    let bytes = bytes_of(&[1.0, -0.0, 3.0]);
    let state = [TensorView::new("w", Dtype::F32, &[3], &bytes).unwrap()];
    store.writer(Policy::Full).unwrap().save(1, &state, &[], &Metadata::default()).unwrap();
    assert_eq!(store.snapshot(1).unwrap().statistics().unwrap(), []);
    assert_eq!(store.snapshot(1).unwrap().blobs().unwrap(), []);

    let mut writer = store.writer_with(options(Policy::Consecutive)).unwrap();
    writer.save(2, &state, &[], &Metadata::default()).unwrap();
    writer.save(3, &state, &[], &Metadata::default()).unwrap();
    let before = store.snapshot(3).unwrap().statistics().unwrap();
    assert_eq!(before[0].change.map(|change| change.changed), Some(0));
    maintain::compact(&store, 3, &maintain::CompactOptions::default()).unwrap();
    assert_eq!(store.snapshot(3).unwrap().statistics().unwrap(), before);
    let table = ChunkStatistics::table(&[(3, before)]).unwrap();
    assert_eq!((table.num_rows(), table.schema().field(0).name().as_str()), (1, "step"));
}

#[test]
fn damaged_statistics_are_an_error_and_the_tensors_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let store = Store::open(path.to_str().unwrap()).unwrap();
    let bytes = bytes_of(&numbers());
    let state = [TensorView::new("w", Dtype::F32, &[600_000], &bytes).unwrap()];
    store.writer_with(options(Policy::Full)).unwrap().save(1, &state, &[], &Metadata::default()).unwrap();
    let mut hits = 0;
    for cask in std::fs::read_dir(path.join("casks")).unwrap() {
        let cask = cask.unwrap().path();
        let mut content = std::fs::read(&cask).unwrap();
        // The magic number at the start of the Parquet file.
        let found = content.windows(4).position(|window| window == b"PAR1");
        let Some(at) = found else { continue };
        content[at + 10] ^= 1;
        std::fs::write(&cask, content).unwrap();
        hits += 1;
    }
    assert_eq!(hits, 1);
    let snapshot = Store::open(path.to_str().unwrap()).unwrap().snapshot(1).unwrap();
    let error = snapshot.statistics().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.object_name().unwrap().contains("casks/"), "{error}");
    assert!(error.message().contains("statistics of step 1") && error.message().contains("verify"), "{error}");
    assert_eq!(snapshot.read("w", &Slice::all()).unwrap().data, bytes);
}

#[test]
fn the_name_of_the_blob_is_reserved() {
    let store = Store::open("memory://statistics-reserved").unwrap();
    let mut writer = store.writer_with(options(Policy::Full)).unwrap();
    let error = writer.save(1, &[], &[Blob::new(ChunkStatistics::BLOB, &b"all is well"[..])], &Metadata::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}
