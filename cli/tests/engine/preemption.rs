//! Preemption in Rust: a signal is noted, and the last save is drained.

use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use tensorcask_engine::{Drained, Preemption, PreemptionOptions, Until};

use super::host::*;

#[test]
fn a_signal_is_noted_and_the_last_save_drained() {
    let host = Host::new();
    let mut engine = host.engine();
    let preemption = Preemption::watch(PreemptionOptions { grace: LONG, ..PreemptionOptions::default() }).unwrap();
    save(&mut engine, 1);
    assert!(!preemption.is_requested() && preemption.reason().is_none() && preemption.time_left() == LONG);
    kill_process(getpid(), Signal::USR1).unwrap();
    until("the signal is noted", || preemption.is_requested());
    assert_eq!(preemption.drain(&mut engine).unwrap(), Drained { level: Until::Durable, problem: None });
    assert_eq!(host.stored_steps(), [1]);
    // The first announcement counts.
    preemption.request("maintenance");
    assert_eq!(preemption.reason().unwrap(), "signal 10");

    // The store does not answer, and no time is left.
    let away = Away::take(&host.store_path());
    save(&mut engine, 2);
    assert!(engine.wait(Until::Encoded, LONG).unwrap().reached);
    let noticed = Preemption::watch(PreemptionOptions { signals: Vec::new(), grace: Duration::ZERO }).unwrap();
    noticed.request("a notice of the cloud");
    assert_eq!(noticed.drain(&mut engine).unwrap().level, Until::Encoded);
    away.back();
    engine.finish().unwrap();
    assert_eq!(host.stored_steps(), [1, 2]);
    assert!(
        Preemption::watch(PreemptionOptions { signals: vec![9], ..PreemptionOptions::default() }).is_err(),
        "SIGKILL cannot be watched"
    );
}
