//! The first step whose statistics satisfy a predicate.

use tensorcask::blocking::Store;
use tensorcask::{Bisection, Dtype, ErrorKind, Metadata, NamePatterns, Policy, Predicate, Rank, Rect, TensorView, WriterOptions};

/// Saves 40 steps, in another order than their numbers. A NaN is in the second chunk of one layer from step 23 on, except
/// that it vanishes again at step 30.
fn run(name: &str) -> Store {
    let store = Store::open(&format!("memory://{name}")).unwrap();
    let options = WriterOptions { policy: Policy::Full, statistics: true, ..WriterOptions::default() };
    let mut writer = store.writer_with(options).unwrap();
    let mut values = vec![0.5f32; 300_000];
    for step in (20..40u64).chain(0..20) {
        values[299_999] = if step >= 23 && step != 30 { f32::NAN } else { 0.25 };
        values[0] = step as f32;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let state = [
            TensorView::new("layers.0.w", Dtype::F32, &[100], &bytes[..400]).unwrap(),
            TensorView::new("layers.1.w", Dtype::F32, &[300_000], &bytes).unwrap(),
            TensorView::new("empty", Dtype::F32, &[0], &[]).unwrap(),
        ];
        writer.save(step, &state, &[], &Metadata::default()).unwrap();
    }
    store
}

#[test]
fn steps_are_scanned_by_number_and_a_nan_may_vanish() {
    let store = run("bisect-scan");
    let find = |text: &str| store.history().bisect(&Predicate::parse(text).unwrap()).unwrap();
    let found = find("nan > 0");
    let first = found.first.as_ref().unwrap();
    assert_eq!((first.step, found.last_good, found.examined), (23, Some(22), 24));
    assert!(found.is_certain() && first.tensors.len() == 1);
    let tensor = &first.tensors[0];
    assert_eq!((tensor.statistics.tensor.as_str(), tensor.statistics.elements), ("layers.1.w", 300_000));
    assert_eq!(tensor.first_chunk.as_ref().map(|chunk| chunk.chunk), Some(1));

    let found = find("max >= 35 and nan = 0");
    assert_eq!((found.first.as_ref().unwrap().step, found.last_good), (35, Some(34)));
    assert_eq!(found.first.unwrap().tensors[0].statistics.tensor, "layers.0.w");
    // Only the sum over both chunks exceeds this.
    let found = find("elements > 290000");
    assert_eq!(found.first.unwrap().tensors[0].first_chunk, None);
    let found = find("max > 100");
    assert_eq!((found.first, found.last_good, found.examined), (None, Some(39), 40));
}

#[test]
fn tensors_are_chosen_by_name() {
    let store = run("bisect-names");
    let find = |glob: &str| store.history().bisect(&Predicate::parse("nan > 0").unwrap().of_tensors(NamePatterns::parse([glob]).unwrap()));
    assert_eq!(find("*.0.*").unwrap().first, None);
    assert_eq!(find("layers.*").unwrap().first.unwrap().step, 23);
    assert_eq!(find("decoder.*").unwrap_err().kind(), ErrorKind::NotFound);
    // A tensor without elements has no statistics, and needs none.
    assert!(find("empty").unwrap().is_certain());
}

#[test]
fn reads_no_tensor_bytes_and_no_step_after_the_match() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let store = Store::open(path.to_str().unwrap()).unwrap();
    let options = WriterOptions { policy: Policy::Full, statistics: true, ..WriterOptions::default() };
    let mut writer = store.writer_with(options).unwrap();
    // Numbers that do not compress.
    let mut state = 1u32;
    let mut noise = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state & 0x7f7f_ffff
    };
    for step in 0..4u64 {
        let bytes: Vec<u8> = (0..500_000).flat_map(|_| noise().to_le_bytes()).collect();
        writer.save(step, &[TensorView::new("w", Dtype::F32, &[500_000], &bytes).unwrap()], &[], &Metadata::default()).unwrap();
    }
    let store = Store::open(path.to_str().unwrap()).unwrap();
    let before = store.inner().io().bytes_read;
    assert_eq!(store.history().bisect(&Predicate::parse("nan > 0").unwrap()).unwrap().last_good, Some(3));
    let read = store.inner().io().bytes_read - before;
    assert!(read < 500_000, "{read} bytes of four steps of 2 MB");
}

#[test]
fn an_empty_store_has_no_match_and_a_missing_store_is_an_error() {
    let predicate = Predicate::parse("nan > 0").unwrap();
    let store = Store::open("memory://bisect-empty").unwrap();
    assert_eq!(store.history().bisect(&predicate).unwrap_err().kind(), ErrorKind::NotFound);
    store.writer(Policy::Full).unwrap();
    let found = store.history().bisect(&predicate).unwrap();
    assert!(found.first.is_none() && found.last_good.is_none() && found.examined == 0);
}

#[test]
fn statistics_of_a_part_of_a_tensor_prove_no_more_than_the_part_does() {
    let store = Store::open("memory://bisect-part").unwrap();
    let options = |statistics| WriterOptions { policy: Policy::Full, statistics, ..WriterOptions::default() };
    let mut coordinator = store.writer_with(options(true)).unwrap();
    // Rank 1 takes no statistics. At step 1, each rank would match `norm < 1` alone, but only step 2 matches as a whole.
    for (step, numbers) in [(1, [0.5f32, 9.0]), (2, [0.5, 0.5]), (3, [f32::NAN, 0.5])] {
        let bytes = numbers.map(f32::to_le_bytes);
        let mut receipts = Vec::new();
        for (rank, bytes) in (0..).zip(&bytes) {
            let mut writer = store.rank_writer(Rank { rank, world: 2, attempt: 0 }, options(rank == 0)).unwrap();
            let rect = Rect { offset: vec![rank.into()], shape: vec![1] };
            let shard = TensorView::shard("w", Dtype::F32, &[2], rect, bytes).unwrap();
            receipts.push(writer.save(step, &[shard], &[]).unwrap());
        }
        coordinator.commit_receipts(step, &receipts, &Metadata::default()).unwrap();
    }
    let find = |text: &str| store.history().bisect(&Predicate::parse(text).unwrap()).unwrap();
    for text in ["norm < 1", "nan = 0", "max < 3", "min > 0.1", "norm < 1 and zero >= 0"] {
        let found = find(text);
        assert_eq!((&found.first, found.last_good, &found.unmeasured[..]), (&None, None, &[1, 2, 3][..]), "{text}");
        assert!(!found.is_certain());
    }
    // What one part has too much of, the whole has, too. The number of elements is known.
    for (text, first, unmeasured) in [
        ("nan > 0", 3, &[1, 2][..]),
        ("norm > 0.4", 1, &[]),
        ("max >= 0.5", 1, &[]),
        ("min <= 0.5", 1, &[]),
        ("elements = 2 and nan >= 1", 3, &[1, 2]),
    ] {
        let Bisection { first: found, unmeasured: unknown, .. } = find(text);
        assert_eq!((found.unwrap().step, unknown.as_slice()), (first, unmeasured), "{text}");
    }
    assert_eq!(find("elements != 2").last_good, Some(3));
}

#[test]
fn a_nan_of_a_narrow_float_is_found() {
    for dtype in [Dtype::F8E4M3, Dtype::F8E5M2, Dtype::F8E8M0, Dtype::C64, Dtype::F4E2M1, Dtype::U8, Dtype::Bool] {
        let store = Store::open(&format!("memory://bisect-dtype-{dtype}")).unwrap();
        let mut writer = store.writer_with(WriterOptions { statistics: true, ..WriterOptions::default() }).unwrap();
        let bytes = dtype.byte_count(2).unwrap() as usize;
        for (step, byte) in [(1, 1), (2, 0xff)] {
            let data = vec![if dtype == Dtype::Bool { 1 } else { byte }; bytes];
            writer.save(step, &[TensorView::new("w", dtype, &[2], &data).unwrap()], &[], &Metadata::default()).unwrap();
        }
        let found = store.history().bisect(&Predicate::parse("nan > 0").unwrap()).unwrap();
        let can_be_nan = !matches!(dtype, Dtype::F4E2M1 | Dtype::U8 | Dtype::Bool);
        assert_eq!((found.first.map(|first| first.step), found.unmeasured), (can_be_nan.then_some(2), vec![]), "{dtype}");
        assert_eq!(found.last_good, Some(if can_be_nan { 1 } else { 2 }), "{dtype}");
    }
}

#[test]
fn a_tied_tensor_is_examined_under_the_name_that_was_asked_for() {
    let store = Store::open("memory://bisect-tied").unwrap();
    let mut writer = store.writer_with(WriterOptions { statistics: true, ..WriterOptions::default() }).unwrap();
    for (step, number) in [(1, 0.5f32), (2, f32::NAN)] {
        let bytes = number.to_le_bytes();
        let bias = step.to_string().repeat(4).into_bytes();
        let tensor = |name: &str, bytes| TensorView::new(name, Dtype::F32, &[], bytes).unwrap();
        // Tensors of the same bytes in memory are tied; the first one by name is stored.
        let state = [tensor("embed.weight", &bytes), tensor("lm_head.weight", &bytes), tensor("lm_head.bias", &bias)];
        writer.save(step, &state, &[], &Metadata::default()).unwrap();
    }
    assert!(store.snapshot(1).unwrap().tensor("lm_head.weight").unwrap().alias_of.is_some());
    let names = |glob: Option<&str>| -> Vec<String> {
        let predicate = Predicate::parse("nan > 0").unwrap();
        let predicate = glob.map_or(predicate.clone(), |glob| predicate.of_tensors(NamePatterns::parse([glob]).unwrap()));
        let found = store.history().bisect(&predicate).unwrap();
        assert_eq!(found.last_good, Some(1));
        found.first.unwrap().tensors.into_iter().map(|found| found.statistics.tensor).collect()
    };
    assert_eq!(names(Some("lm_head.weight")), ["lm_head.weight"]);
    assert_eq!(names(Some("lm_head*")), ["lm_head.weight"]);
    // With both names in question, the stored tensor is enough.
    assert_eq!(names(Some("*weight")), ["embed.weight"]);
    assert_eq!(names(None), ["embed.weight"]);
}
