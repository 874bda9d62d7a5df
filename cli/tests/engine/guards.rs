//! Statistics, the check for finite values and automatic retention, through the agent.

use tensorcask::{Dtype, FiniteCheck, Metadata, Policy, Predicate, Rect, Retention, TensorView};
use tensorcask_engine::{Encode, Engine, EngineOptions, Outcome, Until};

use super::host::*;

fn save_number(engine: &mut Engine, step: u64, number: f32) -> tensorcask::Result<Outcome> {
    let bytes: Vec<u8> = [number; 1000].into_iter().flat_map(f32::to_le_bytes).collect();
    engine.save(step, &[TensorView::new("model.w", Dtype::F32, &[1000], &bytes)?], &[], &Metadata::default())
}

#[test]
fn a_refused_state_is_reported_at_the_next_call_and_saving_goes_on() {
    let host = Host::new();
    let mut engine = Engine::start(EngineOptions { check: FiniteCheck::Refuse, ..host.options() }).unwrap();
    save_number(&mut engine, 1, 1.0).unwrap();
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    save_number(&mut engine, 2, f32::NAN).unwrap();
    let waited = engine.wait(Until::Durable, LONG).unwrap();
    assert!(!waited.reached && waited.failed, "{waited:?}");
    let outcome = save_number(&mut engine, 3, 3.0).unwrap();
    let [failure] = outcome.failures.as_slice() else { panic!("{outcome:?}") };
    assert_eq!(failure.step, 2);
    assert!(failure.message.contains("tensor `model.w`, chunk 0") && failure.message.contains("1000 NaN"), "{}", failure.message);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 3]);
    drop(engine);

    let host = Host::new();
    let inline = EngineOptions { check: FiniteCheck::Refuse, encode: Encode::Inline, ..host.options() };
    let mut engine = Engine::start(inline).unwrap();
    assert!(save_number(&mut engine, 4, f32::INFINITY).unwrap_err().message().contains("1000 infinities"));
}

#[test]
fn the_agent_forgets_old_steps_and_keeps_the_last_finite_one() {
    let host = Host::new();
    let retention = Some(Retention { keep_last: Some(2), ..Retention::default() });
    let options = EngineOptions { check: FiniteCheck::Tag, retention, policy: Policy::Full, ..host.options() };
    let mut engine = Engine::start(options).unwrap();
    for step in 1..=6 {
        save_number(&mut engine, step, if step > 3 { f32::NAN } else { step as f32 }).unwrap();
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    until("old steps are forgotten", || host.stored_steps() == [3, 5, 6]);
    let nothing = EngineOptions { retention: Some(Retention::default()), ..host.options() };
    assert!(Engine::start(nothing).is_err());
}

#[test]
fn snapshots_of_agent_inline_encoder_and_ranks_have_statistics() {
    let nan = Predicate::parse("nan > 0").unwrap();
    let retention = Some(Retention { keep_last: Some(2), ..Retention::default() });
    for encode in [Encode::Agent, Encode::Inline] {
        let host = Host::new();
        let options = EngineOptions { statistics: true, retention, encode, ..host.options() };
        let mut engine = Engine::start(options).unwrap();
        for step in 1..=4 {
            save_number(&mut engine, step, if step > 2 { f32::NAN } else { step as f32 }).unwrap();
            assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
        }
        // Statistics also mark a step as finite or not, so retention keeps the last finite one.
        until("old steps are forgotten", || host.stored_steps() == [2, 3, 4]);
        let found = host.store().history().bisect(&nan).unwrap();
        assert_eq!((found.first.as_ref().map(|first| first.step), found.last_good), (Some(3), Some(2)), "{encode:?}");
        assert!(found.is_certain());
        let second = host.store().snapshot(2).unwrap().statistics().unwrap();
        let sum = second.iter().find(|row| row.tensor == "model.w").and_then(|row| row.values?.sum);
        assert_eq!(sum, Some(2000.0));
    }

    let host = Host::new();
    let mut engines: Vec<Engine> =
        (0..2).map(|rank| Engine::start(EngineOptions { rank, world: 2, statistics: true, ..host.options() }).unwrap()).collect();
    let halves: [Vec<u8>; 2] = [1.0f32, f32::NAN].map(|number| [number; 500].into_iter().flat_map(f32::to_le_bytes).collect());
    for ((engine, half), first_row) in engines.iter_mut().zip(&halves).zip([0, 500]) {
        let rect = Rect { offset: vec![first_row], shape: vec![500] };
        let shard = TensorView::shard("model.w", Dtype::F32, &[1000], rect, half).unwrap();
        engine.save(1, &[shard], &[], &Metadata::default()).unwrap();
    }
    for engine in &mut engines {
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    let first = host.store().history().bisect(&nan).unwrap().first.unwrap();
    let statistics = &first.tensors[0].statistics;
    assert_eq!((first.step, statistics.elements, statistics.values.map(|values| values.nan)), (1, 1000, Some(500)));
}
