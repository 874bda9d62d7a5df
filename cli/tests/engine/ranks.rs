//! Several ranks on one host: a snapshot of all ranks or none, and agreement on the newest step that all can load.

use std::collections::BTreeMap;

use tensorcask::blocking::maintain;
use tensorcask::maintain::VerifyOptions;
use tensorcask::{Blob, Dtype, ErrorKind, Metadata, Rect, Slice, TensorView};
use tensorcask_engine::{Engine, EngineOptions, Part, Source, Until, agree};

use super::host::*;

const ROWS: u64 = 6;
const ROW_BYTES: u64 = 50_000;
const WORLD: u32 = 2;

fn start(host: &Host, rank: u32) -> Engine {
    Engine::start(EngineOptions { rank, world: WORLD, ..host.options() }).unwrap()
}

fn data(step: u64) -> Vec<u8> {
    (0..ROWS * ROW_BYTES).map(|i| (i / 7 + step) as u8).collect()
}

/// Rows of a rank.
fn rows(rank: u32) -> std::ops::Range<u64> {
    let share = ROWS / u64::from(WORLD);
    u64::from(rank) * share..(u64::from(rank) + 1) * share
}

fn save_shard(engine: &mut Engine, rank: u32, step: u64) {
    let all = data(step);
    let rows = rows(rank);
    let shard = &all[(rows.start * ROW_BYTES) as usize..(rows.end * ROW_BYTES) as usize];
    let rect = Rect { offset: vec![rows.start, 0], shape: vec![rows.end - rows.start, ROW_BYTES] };
    let tensors = [TensorView::shard("w", Dtype::U8, &[ROWS, ROW_BYTES], rect, shard).unwrap()];
    let blobs = [Blob { rank, name: "rng".into(), data: vec![rank as u8; 4].into() }];
    engine.save(step, &tensors, &blobs, &Metadata::default()).unwrap();
}

fn steps(engine: &Engine) -> Vec<u64> {
    engine.loadable().unwrap().iter().map(|found| found.step).collect()
}

#[test]
fn ranks_of_one_host_make_one_snapshot_and_agree_after_a_loss() {
    let host = Host::new();
    let mut first = start(&host, 0);
    let mut second = start(&host, 1);
    for step in 1..=4 {
        save_shard(&mut first, 0, step);
        save_shard(&mut second, 1, step);
    }
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    for step in 1..=4 {
        let snapshot = host.store().snapshot(step).unwrap();
        assert!(snapshot.read("w", &Slice::all()).unwrap().data == data(step), "step {step}");
        assert_eq!(snapshot.blobs().unwrap().len(), 2);
    }
    // Rank 1 dies before it saves step 5.
    save_shard(&mut first, 0, 5);
    drop((first, second));
    let mut first = start(&host, 0);
    let mut second = start(&host, 1);
    assert_eq!((steps(&first)[0], steps(&second)[0]), (4, 4), "rank 0 cannot load a step that rank 1 lacks");
    assert_eq!(agree(&[steps(&first), steps(&second)]).step, Some(4));
    // Agreement through the store has the same result.
    let other = std::thread::spawn(move || (second.agree_by_store("start-2", LONG).unwrap(), second));
    assert_eq!(first.agree_by_store("start-2", LONG).unwrap(), Some(4));
    let (found, mut second) = other.join().unwrap();
    assert_eq!(found, Some(4));
    for (rank, engine) in [(0, &first), (1, &second)] {
        let restored = engine.restore(4).unwrap();
        assert_eq!(restored.source, Source::Slot);
        let tensor = &restored.tensors[0];
        let rows = rows(rank);
        assert_eq!(tensor.rect.offset[0], rows.start);
        assert!(*tensor.data == data(4)[(rows.start * ROW_BYTES) as usize..(rows.end * ROW_BYTES) as usize]);
    }
    for step in 5..=6 {
        save_shard(&mut second, 1, step);
        save_shard(&mut first, 0, step);
    }
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3, 4, 5, 6]);
    assert!(host.store().snapshot(6).unwrap().read("w", &Slice::all()).unwrap().data == data(6));
    let report = maintain::verify(&host.store(), &VerifyOptions::default()).unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}

#[test]
fn replicated_tensors_are_stored_once_and_any_part_can_be_restored() {
    let host = Host::new();
    let mut first = start(&host, 0);
    let mut second = start(&host, 1);
    let all = data(1);
    let shared = vec![7u8; 1000];
    for (rank, engine) in [(0, &mut first), (1, &mut second)] {
        let rows = rows(rank);
        let shard = &all[(rows.start * ROW_BYTES) as usize..(rows.end * ROW_BYTES) as usize];
        let rect = Rect { offset: vec![rows.start, 0], shape: vec![rows.end - rows.start, ROW_BYTES] };
        let tensors = [
            TensorView::shard("w", Dtype::U8, &[ROWS, ROW_BYTES], rect, shard).unwrap(),
            TensorView::new("shared", Dtype::U8, &[1000], &shared).unwrap(),
        ];
        engine.save(1, &tensors, &[], &Metadata::default()).unwrap();
    }
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    let snapshot = host.store().snapshot(1).unwrap();
    assert!(snapshot.read("shared", &Slice::all()).unwrap().data == shared);
    // The raw state of a rank has its own part and the replicated tensor.
    let part = |shape: [u64; 2], offset: [u64; 2], extent: [u64; 2]| Part {
        shape: shape.to_vec(),
        rect: Rect { offset: offset.to_vec(), shape: extent.to_vec() },
    };
    let own = part([ROWS, ROW_BYTES], [ROWS / 2, 0], [ROWS / 2, ROW_BYTES]);
    let replica = Part { shape: vec![1000], rect: Rect::whole(&[1000]) };
    let wanted = |part: Part| BTreeMap::from([("w".to_owned(), part), ("shared".to_owned(), replica.clone())]);
    let found = second.restore_parts(1, &wanted(own)).unwrap();
    assert_eq!(found.source, Source::Slot);
    assert!(found.tensors.iter().any(|tensor| tensor.name == "shared" && *tensor.data == shared));
    // A snapshot serves any other part.
    let found = second.restore_parts(1, &wanted(part([ROWS, ROW_BYTES], [1, 5], [4, 10]))).unwrap();
    assert_eq!(found.source, Source::Memory);
    let tensor = found.tensors.iter().find(|tensor| tensor.name == "w").unwrap();
    let expected: Vec<u8> = (1..5).flat_map(|row| all[(row * ROW_BYTES + 5) as usize..][..10].to_vec()).collect();
    assert!(*tensor.data == expected);
    // Another shape is an error.
    let refused = second.restore_parts(1, &wanted(part([ROWS, ROW_BYTES - 1], [0, 0], [1, 10]))).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Template, "{refused}");
    assert!(refused.to_string().contains("wanted is"), "{refused}");
    drop(found);
    // Replicas that differ are reported, and the step is not stored.
    for (rank, engine) in [(0, &mut first), (1, &mut second)] {
        let mine = [rank; 4];
        engine.save(2, &[TensorView::new("shared", Dtype::U8, &[4], &mine).unwrap()], &[], &Metadata::default()).unwrap();
    }
    until("the failure is reported", || {
        let waited = first.wait(Until::Durable, LONG).unwrap();
        waited.failures.iter().any(|failure| failure.message.contains("rank 1 has other values than rank 0"))
    });
    assert_eq!(host.stored_steps(), [1]);
}

#[test]
fn each_rank_hears_of_its_own_saves() {
    let host = Host::new();
    let mut first = start(&host, 0);
    let mut second = start(&host, 1);
    save_shard(&mut first, 0, 1);
    save_shard(&mut second, 1, 1);
    // Rank 0 needs two attempts, because its arena is too small for the metadata. From now on, the generations of the
    // ranks differ.
    let mut metadata = Metadata::default();
    metadata.user.insert("notes".into(), "x".repeat(8 << 20).into());
    let own = [TensorView::new("own", Dtype::U8, &[4], &[1, 2, 3, 4]).unwrap()];
    first.save(2, &own, &[], &metadata).unwrap();
    second.save(2, &own, &[], &Metadata::default()).unwrap();
    for engine in [&mut first, &mut second] {
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    let away = Away::take(&host.store_path());
    save_shard(&mut first, 0, 3);
    save_shard(&mut second, 1, 3);
    for engine in [&mut first, &mut second] {
        assert!(engine.wait(Until::Encoded, LONG).unwrap().reached);
        assert!(!engine.wait(Until::Durable, std::time::Duration::from_millis(300)).unwrap().reached, "the step is not in the store");
    }
    away.back();
    second.finish().unwrap();
    first.finish().unwrap();
    assert_eq!(host.stored_steps(), [1, 2, 3]);
}

#[test]
fn missing_ranks_and_ranks_with_other_options_are_reported() {
    let host = Host::new();
    let mut first = start(&host, 0);
    save_shard(&mut first, 0, 1);
    until("the agent reports the missing rank", || {
        host.status().runs[0].problem.as_ref().is_some_and(|problem| problem.ends_with("from rank 1"))
    });
    let other = EngineOptions { rank: 1, world: WORLD, memory_cap: Some(1 << 30), ..host.options() };
    let refused = Engine::start(other).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    assert!(refused.message().contains("rank 0 has another `memory_cap`"), "{refused}");
    let mut second = start(&host, 1);
    save_shard(&mut second, 1, 1);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.status().runs[0].problem, None);
}

/// The rank that saved the step hears of the failure instead of waiting for ever.
#[test]
fn a_run_ends_although_some_rank_lacks_the_last_step() {
    let host = Host::new();
    let start = |rank| Engine::start(EngineOptions { rank, world: 2, ..host.options() }).unwrap();
    let mut first = start(0);
    let mut second = start(1);
    let save = |engine: &mut Engine, rank: u64, step: u64| {
        let data = [step as u8; 100];
        let rect = Rect { offset: vec![rank * 100], shape: vec![100] };
        engine.save(step, &[TensorView::shard("w", Dtype::U8, &[200], rect, &data).unwrap()], &[], &Metadata::default()).unwrap();
    };
    for step in 1..=2 {
        save(&mut first, 0, step);
        save(&mut second, 1, step);
    }
    save(&mut first, 0, 3);
    let (said, says) = std::sync::mpsc::channel();
    for (rank, engine) in [(0, first), (1, second)] {
        let said = said.clone();
        std::thread::spawn(move || said.send((rank, engine.finish())));
    }
    let mut ended: Vec<_> = (0..2).map(|_| says.recv_timeout(LONG).expect("a rank waits for ever")).collect();
    ended.sort_by_key(|(rank, _)| *rank);
    let error = ended[0].1.as_ref().unwrap_err();
    assert!(error.message().contains("step 3: ") && error.message().contains("not all ranks have saved this step"), "{error}");
    assert!(ended[1].1.is_ok(), "{:?}", ended[1].1);
    assert_eq!(host.stored_steps(), [1, 2]);
}

/// The agent notices the death during a wait with a long timeout.
#[test]
fn the_death_of_a_waiting_trainer_is_noticed() {
    let host = Host::new();
    let mut trainer = host.trainer(&[("TEST_STEPS", "1")]);
    while trainer.says().is_some_and(|said| said[0] != "done") {}
    until("step 1 is in the store", || host.stored_steps() == [1]);
    trainer.kill();
    let away = Away::take(&host.store_path());
    let mut trainer = host.trainer(&[("TEST_STEPS", "2"), ("TEST_WAIT", "1")]);
    while trainer.says().is_some_and(|said| said[0] != "done") {}
    assert!(host.status().runs[0].ranks[0].trainer.is_some());
    vary_moment(std::time::Duration::from_millis(200));
    trainer.kill();
    until("the agent has noticed", || host.status().runs[0].ranks[0].trainer.is_none());
    away.back();
}
