//! A local store that hangs, as a file system whose server is gone: a call neither returns nor fails. `hang.c` stands in for it.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use tensorcask_engine::Until;

use super::host::*;

/// A file system whose server can go away.
struct Hanging {
    library: PathBuf,
    gate: PathBuf,
}

impl Hanging {
    fn new(host: &Host) -> Self {
        let library = host.stores.path().join("hang.so");
        let gate = host.stores.path().join("gate");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/engine/hang.c");
        let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).args([source, "-ldl"]).status().unwrap();
        assert!(built.success());
        Self { library, gate }
    }

    /// Variables of a process for which files below this folder hang.
    fn variables<'a>(&'a self, below: &'a Path) -> [(&'a str, &'a str); 3] {
        let text = |path: &'a Path| path.to_str().unwrap();
        [("LD_PRELOAD", text(&self.library)), ("TEST_HANG", text(&self.gate)), ("TEST_HANG_BELOW", text(below))]
    }

    fn begin(&self) {
        std::fs::write(&self.gate, b"").unwrap();
    }

    /// Waits until a call hangs.
    fn is_reached(&self) {
        until("a call hangs", || self.gate.with_extension("reached").exists());
    }

    fn end(&self) {
        std::fs::remove_file(&self.gate).unwrap();
    }
}

#[test]
fn a_store_that_hangs_is_named_with_its_request_until_it_answers() {
    let host = Host::new();
    let store = host.store_path();
    let hanging = Hanging::new(&host);
    let mut agent = host.start_agent_with(&hanging.variables(&store));
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    hanging.begin();
    save(&mut engine, 2);
    hanging.is_reached();
    let problem = || host.status().runs[0].tiers[0].problem.clone();
    until("the status says that the store hangs", || problem().is_some());
    let told = problem().unwrap();
    let parts = [store.to_str().unwrap(), "does not answer a request (read log/", " since ", " GMT"];
    assert!(parts.iter().all(|part| told.contains(part)), "{told}");
    // The save is in memory, and the trainer hears the same.
    assert!(engine.wait(Until::Encoded, LONG).unwrap().reached);
    let waited = engine.wait(Until::Durable, std::time::Duration::ZERO).unwrap();
    assert_eq!((waited.reached, waited.problem.as_deref()), (false, Some(told.as_str())));
    hanging.end();
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    until("the problem is gone", || problem().is_none());
    assert_eq!(host.stored_steps(), [1, 2]);
    engine.finish().unwrap();
    host.kill_agent();
    agent.wait().unwrap();
}

#[test]
fn a_trainer_closes_and_an_agent_ends_while_a_store_hangs() {
    let host = Host::new();
    let store = host.store_path();
    let hanging = Hanging::new(&host);
    let mut agent = host.start_agent_with(&hanging.variables(&store));
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    hanging.begin();
    save(&mut engine, 2);
    hanging.is_reached();
    drop(engine);
    // The first signal lets it drain, which would take its whole time limit. The second one ends it.
    host.signal_agent(Signal::TERM);
    until("the agent drains", || agent.try_wait().unwrap().is_some() || host.status().draining);
    host.signal_agent(Signal::TERM);
    agent.wait().unwrap();
    hanging.end();
    // The step is in memory, and the next agent stores it.
    let mut engine = host.engine();
    assert_eq!(engine.restore(tensorcask::Latest).unwrap().step, 2);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2]);
    engine.finish().unwrap();
}
