//! Runs that nobody trains any more: their agent ends, and their memory can be removed.

use std::process::Command;

use serde_json::Value;
use tensorcask::ErrorKind;
use tensorcask_engine::Until;

use super::host::*;

/// Runs `tensorcask agent clean`; returns the result of each run, by name.
fn clean(host: &Host, arguments: &[&str]) -> Vec<(String, String)> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorcask"));
    command.args(["agent", "clean", "--json", "--folder"]).arg(host.engine_folder()).args(arguments);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let fact = |run: &Value| {
        assert!(run["bytes"].as_u64().unwrap() > 0 && run["seconds_since_change"].is_number());
        (run["run"].as_str().unwrap().to_owned(), run["result"].as_str().unwrap().to_owned())
    };
    report["runs"].as_array().unwrap().iter().map(fact).collect()
}

#[test]
fn a_run_whose_store_is_gone_keeps_neither_agent_nor_memory() {
    let host = Host::new();
    std::fs::write(host.store_path(), "in the way of the store").unwrap();
    let mut engine = host.engine();
    save(&mut engine, 1);
    let name = host.store_path().to_str().unwrap().to_owned();
    let all = |result: &str| vec![(name.clone(), result.to_owned())];
    assert_eq!(clean(&host, &[&name, "--apply"]), all("in_use"));
    drop(engine);
    host.kill_agent();
    // The save waits for the store, and the agent ends nevertheless.
    assert!(host.agent_command(&["--idle-exit", "1s", "--abandon-after", "1s"]).status().unwrap().success());
    let mut engine = host.engine();
    assert_eq!(engine.restore(1).unwrap().step, 1);
    assert!(!engine.wait(Until::Durable, std::time::Duration::ZERO).unwrap().reached);
    drop(engine);
    // With an agent, and then without one.
    assert_eq!(clean(&host, &["--apply"]), all("recent"));
    assert_eq!(clean(&host, &[&name]), all("removable"));
    assert_eq!(clean(&host, &[&name, "--apply"]), all("removed"));
    assert_eq!(clean(&host, &[]), []);
    let mut engine = host.engine();
    // Memory has no step, and nobody knows what the store has.
    assert_eq!(engine.loadable().unwrap_err().kind(), ErrorKind::Storage);
    save(&mut engine, 1);
    drop(engine);
    host.kill_agent();
    assert_eq!(clean(&host, &[&name, "--apply"]), all("removed"));
    assert_eq!(clean(&host, &[]), []);
}
