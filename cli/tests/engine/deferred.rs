//! Saves with deferred tensors, which a device copies: the slot is claimed first, and published once all tensors are
//! copied.

use tensorcask::{Blob, Dtype, ErrorKind, Latest, Metadata, Rect, Slice, TensorView};
use tensorcask_engine::{BackPressure, Deferred, Encode, Engine, EngineOptions, Outcome, Saving, Source, Until};

use super::host::*;

const BYTES: usize = 3 << 20;

fn later(step: u64) -> Vec<u8> {
    noise(step, BYTES)
}

fn here(step: u64) -> Vec<u8> {
    noise(step + 1000, 5000)
}

/// Begins a save of one present tensor and three deferred ones: the second is tied to the first, the third is empty.
fn begin(engine: &mut Engine, step: u64) -> tensorcask::Result<Saving> {
    let shape = [BYTES as u64 / 4];
    let whole = |name: &str, shape: &[u64]| Deferred::new(name, Dtype::F32, shape, Rect::whole(shape)).unwrap();
    let deferred = [whole("model.w", &shape), whole("model.tied", &shape).tied_to(0), whole("optimizer.exp_avg.none", &[0, 7])];
    let bytes = here(step);
    let tensors = [TensorView::new("model.here", Dtype::U8, &[5000], &bytes).unwrap()];
    engine.begin_save(step, &tensors, &deferred, &[Blob::new("rng", step.to_string().into_bytes())], &Metadata::default())
}

fn end(engine: &mut Engine, mut saving: Saving) -> tensorcask::Result<Outcome> {
    engine.finish_save({
        let mut buffers = saving.buffers().unwrap();
        assert_eq!(buffers.iter().map(|buffer| buffer.len()).collect::<Vec<_>>(), [BYTES, 0]);
        buffers[0].copy_from_slice(&later(step_of(engine)));
        saving
    })
}

/// The step of the save under way: one more than the newest that can be loaded.
fn step_of(engine: &Engine) -> u64 {
    engine.loadable().unwrap().first().map_or(1, |newest| newest.step + 1)
}

fn check(engine: &Engine, step: u64, source: &Source) {
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (step, source));
    let of = |name: &str| &*found.tensors.iter().find(|tensor| tensor.name == name).unwrap().data;
    assert!(of("model.w") == later(step) && of("model.tied") == later(step) && of("model.here") == here(step), "step {step}");
    assert_eq!((of("optimizer.exp_avg.none").len(), &*found.blobs[0].data), (0, step.to_string().as_bytes()));
    assert_eq!(found.tensors.iter().find(|tensor| tensor.name == "optimizer.exp_avg.none").unwrap().role, "exp_avg");
}

#[test]
fn deferred_tensors_belong_to_the_state_once_the_save_is_finished() {
    let host = Host::new();
    let mut engine = host.engine();
    for step in 1..=3 {
        let saving = begin(&mut engine, step).unwrap();
        assert_eq!(step_of(&engine), step, "an unfinished save cannot be loaded");
        assert_eq!(engine.save(9, &[], &[], &Metadata::default()).unwrap_err().kind(), ErrorKind::Conflict, "one at a time");
        let outcome = end(&mut engine, saving).unwrap();
        assert_eq!((outcome.step, outcome.generation), (step, Some(step)));
        check(&engine, step, &Source::Slot);
    }
    // Dropped saves are given up.
    drop(begin(&mut engine, 4).unwrap());
    check(&engine, 3, &Source::Slot);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let saving = begin(&mut engine, 4).unwrap();
    end(&mut engine, saving).unwrap();
    let saving = begin(&mut engine, 5).unwrap();
    drop(engine);
    // The trainer is gone, so the copy stays incomplete, whatever the device has written.
    drop(saving);
    let engine = host.engine();
    check(&engine, 4, &Source::Slot);
    engine.finish().unwrap();
    assert_eq!(host.stored_steps(), [1, 2, 3, 4]);
    let stored = host.store().snapshot(4).unwrap().read("model.tied", &Slice::all()).unwrap();
    assert!(stored.data == later(4));
}

#[test]
fn a_save_with_deferred_tensors_is_skipped_or_refused_like_others() {
    let host = Host::new();
    let mut engine = Engine::start(EngineOptions { back_pressure: BackPressure::Skip, slots: 2, ..host.options() }).unwrap();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    // This state needs a larger arena.
    let saving = begin(&mut engine, 2).unwrap();
    assert!(!saving.is_skipped() && saving.mapping().unwrap().bytes() > 2 * BYTES);
    end(&mut engine, saving).unwrap();
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(rustix::process::Signal::STOP);
    for step in 3..=4 {
        let saving = begin(&mut engine, step).unwrap();
        end(&mut engine, saving).unwrap();
    }
    let mut skipped = begin(&mut engine, 5).unwrap();
    assert!(skipped.is_skipped() && skipped.buffers().unwrap().is_empty() && skipped.mapping().is_none());
    assert_eq!(engine.finish_save(skipped).unwrap().generation, None);
    host.signal_agent(rustix::process::Signal::CONT);
    // A save of another engine is refused.
    let other = Host::new();
    let mut stranger = other.engine();
    let saving = begin(&mut stranger, 1).unwrap();
    assert_eq!(engine.finish_save(saving).unwrap_err().kind(), ErrorKind::InvalidArgument);
    drop(stranger);
    engine.finish().unwrap();
    let mut inline = Engine::start(EngineOptions { encode: Encode::Inline, ..host.options() }).unwrap();
    assert_eq!(begin(&mut inline, 6).unwrap_err().kind(), ErrorKind::Unsupported);
    // Refused: a part outside of its tensor, and a tensor tied to itself or a later one.
    let rect = Rect { offset: vec![3], shape: vec![2] };
    assert_eq!(Deferred::new("w", Dtype::F32, &[4], rect).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let mut engine = other.engine();
    let tied = [Deferred::new("w", Dtype::F32, &[4], Rect::whole(&[4])).unwrap().tied_to(0)];
    assert_eq!(engine.begin_save(1, &[], &tied, &[], &Metadata::default()).unwrap_err().kind(), ErrorKind::InvalidArgument);
}
