//! The check for finite values and automatic retention, through the agent.

use tensorcask::{Dtype, FiniteCheck, Metadata, Policy, Retention, TensorView};
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
