//! Raw states in shared memory: what a restore makes of views of one memory, and arenas that cannot be opened.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;

use rustix::process::Signal;
use tensorcask::{Dtype, ErrorKind, Latest, Metadata, TensorView};
use tensorcask_engine::{Engine, Source, Until};

use super::host::*;

/// Name, dtype, shape and bytes of a restored tensor.
type Fact = (String, Dtype, Vec<u64>, Vec<u8>);

fn facts(engine: &Engine) -> (Source, Vec<Fact>) {
    let found = engine.restore(Latest).unwrap();
    let fact = |tensor: &tensorcask_engine::RestoredTensor<'_>| {
        let stored = tensor.tied_to.map_or(tensor, |first| &found.tensors[first]);
        (tensor.name.clone(), stored.dtype, stored.shape.clone(), tensor.data.to_vec())
    };
    let mut tensors: Vec<_> = found.tensors.iter().map(fact).collect();
    tensors.sort();
    (found.source.clone(), tensors)
}

/// A tensor that is tied to another takes its type and shape from that one, so only tensors of one type and shape may be tied.
#[test]
fn views_of_one_memory_keep_their_types_and_shapes() {
    let host = Host::new();
    let mut engine = host.engine();
    let data = noise(1, 64);
    let view = |name: &str, dtype, shape: &[u64]| TensorView::new(name, dtype, shape, &data).unwrap();
    let state = [
        view("flat", Dtype::F32, &[16]),
        view("matrix", Dtype::F32, &[4, 4]),
        view("numbers", Dtype::I32, &[16]),
        view("tied", Dtype::F32, &[4, 4]),
        view("wide", Dtype::F64, &[8]),
    ];
    engine.save(1, &state, &[], &Metadata::default()).unwrap();
    let (source, raw) = facts(&engine);
    assert_eq!(source, Source::Slot);
    let expected: Vec<_> = state.iter().map(|view| (view.name().to_owned(), view.dtype(), view.shape().to_vec(), data.clone())).collect();
    assert_eq!(raw, expected);
    engine.finish().unwrap();
    let (source, stored) = facts(&host.engine());
    assert!(matches!(source, Source::Tier(0, _)), "{source}");
    assert_eq!(stored, expected);
}

/// A run whose step 2 is in its slot alone. Returns the path of the arena.
fn lose_all_but_the_arena(host: &Host) -> PathBuf {
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::STOP);
    save(&mut engine, 2);
    host.kill_agent();
    drop(engine);
    let runs = std::fs::read_dir(host.engine_folder()).unwrap().map(|entry| entry.unwrap().path());
    let arena = runs.map(|run| run.join("rank-0").join("arena")).find(|arena| arena.exists());
    arena.unwrap()
}

fn restores_step_2(host: &Host) {
    let engine = host.engine();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (2, &Source::Slot));
    check(&found, SMALL);
}

/// An arena may be the only place of a save. What cannot be opened now may be opened later.
#[test]
fn an_arena_that_cannot_be_opened_is_kept() {
    let host = Host::new();
    let arena = lose_all_but_the_arena(&host);
    let refused = |kind: ErrorKind, what: &str| {
        let error = Engine::start(host.options()).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains("Nothing was removed") && error.message().contains(what), "{error}");
    };
    // Others could have written to it.
    std::fs::set_permissions(&arena, std::fs::Permissions::from_mode(0o644)).unwrap();
    refused(ErrorKind::InvalidArgument, "only this user");
    std::fs::set_permissions(&arena, std::fs::Permissions::from_mode(0o600)).unwrap();
    // Another version of the layout.
    let file = std::fs::File::options().read(true).write(true).open(&arena).unwrap();
    let mut version = [0; 8];
    file.read_exact_at(&mut version, 8).unwrap();
    file.write_all_at(&[99, 0, 0, 0, 0, 0, 0, 0], 8).unwrap();
    refused(ErrorKind::Unsupported, "version 99");
    file.write_all_at(&version, 8).unwrap();
    // A place that cannot be read, as a file system with an error.
    let away = arena.with_extension("away");
    std::fs::rename(&arena, &away).unwrap();
    std::os::unix::fs::symlink(&arena, &arena).unwrap();
    refused(ErrorKind::Storage, "symbolic links");
    std::fs::remove_file(&arena).unwrap();
    std::fs::rename(&away, &arena).unwrap();
    restores_step_2(&host);
}

#[test]
fn a_damaged_slot_costs_its_own_state_alone() {
    let host = Host::new();
    let arena = lose_all_but_the_arena(&host);
    // Slot 0 has step 1, and slot 1 has step 2.
    let file = std::fs::File::options().write(true).open(&arena).unwrap();
    file.write_all_at(&[0xff; 8], 4096).unwrap();
    restores_step_2(&host);
    let mut engine = host.engine();
    engine.restore(Latest).unwrap();
    for step in 3..=5 {
        save(&mut engine, step);
    }
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3, 4, 5]);
}

/// A training that was meant to restore, and did not, must not replace what it should have restored.
#[test]
fn a_first_start_that_finds_steps_does_not_replace_them() {
    let host = Host::new();
    let mut engine = host.engine();
    for step in [10, 20] {
        save(&mut engine, step);
    }
    engine.finish().unwrap();
    let state = State::new(10, SMALL);
    let mut engine = host.engine();
    for step in [10, 5, 20] {
        let error = engine.save(step, &state.tensors(), &state.blobs(), &state.metadata()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.message().contains("step 20 is stored") && error.message().contains("restored nothing"), "{error}");
    }
    // Raw states count, too.
    save(&mut engine, 30);
    drop(engine);
    assert!(host.engine().save(25, &state.tensors(), &state.blobs(), &state.metadata()).is_err());
    // A job that has loaded an older step by itself, and one that restores it.
    let mut engine = host.engine();
    engine.discard_after(10).unwrap();
    save(&mut engine, 11);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    drop(engine);
    let mut engine = host.engine();
    engine.restore(10).unwrap();
    save(&mut engine, 11);
    engine.finish().unwrap();
}

/// A store without its log folder is no empty store: memory may hold what it lost.
#[test]
fn memory_is_kept_if_the_log_of_the_store_is_gone() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    drop(engine);
    host.kill_agent();
    for folder in ["log", "catalog"] {
        let _ = std::fs::remove_dir_all(host.store_path().join(folder));
    }
    let engine = host.engine();
    let found = engine.restore(Latest).unwrap();
    assert_eq!(found.step, 1);
    check(&found, SMALL);
}
