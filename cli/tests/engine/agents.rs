//! The agent process: its start, its end, and its reports.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tensorcask::{Claim, WriterOptions};
use tensorcask_engine::{AgentOptions, Engine, EngineOptions, Until, agent_metrics, run_agent, stop_agent};

use super::host::*;

fn cli(host: &Host, words: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorcask"));
    let output = command.arg("agent").args(words).arg("--folder").arg(host.engine_folder()).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn an_agent_told_to_stop_finishes_its_work() {
    let host = Host::new();
    let mut agent = host.start_agent(&[]);
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::STOP);
    save(&mut engine, 2);
    save(&mut engine, 3);
    host.signal_agent(Signal::TERM);
    host.signal_agent(Signal::CONT);
    assert!(agent.wait().unwrap().success());
    assert_eq!(host.stored_steps(), [1, 2, 3]);
    // The next save starts another agent.
    save(&mut engine, 4);
    engine.finish().unwrap();
    assert_eq!(host.stored_steps(), [1, 2, 3, 4]);
}

#[test]
fn the_next_agent_continues_without_a_trainer() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::STOP);
    save(&mut engine, 2);
    host.signal_agent(Signal::KILL);
    drop(engine);
    host.agent_is_gone();
    host.run_agent_until_idle();
    assert_eq!(host.stored_steps(), [1, 2]);
}

#[test]
fn one_agent_serves_a_folder_and_ends_when_it_is_idle() {
    let host = Host::new();
    let mut first = host.start_agent(&[]);
    let (code, said) = cli(&host, &[]);
    assert_eq!((code, said.as_str()), (0, "another agent is running\n"));
    host.signal_agent(Signal::TERM);
    assert!(first.wait().unwrap().success());
    host.run_agent_until_idle();
    assert!(!host.engine_folder().join("agent.sock").exists());
    assert_eq!(cli(&host, &["status"]).0, 10);
}

#[test]
fn status_and_metrics_report_the_times_of_a_save() {
    let host = Host::new();
    let mut engine = host.engine();
    for step in 1..=4 {
        save(&mut engine, step);
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    let (code, json) = cli(&host, &["status", "--json"]);
    assert_eq!(code, 0);
    let status: serde_json::Value = serde_json::from_str(&json).unwrap();
    let run = &status["runs"][0];
    assert_eq!((&run["last_commit_step"], &run["failed_saves"]), (&4.into(), &0.into()));
    assert_eq!(run["ranks"][0]["trainer"], std::process::id());
    let save = &run["saves"][3];
    assert_eq!((&save["step"], &save["kind"]), (&4.into(), &"delta".into()));
    let number = |name: &str| save[name].as_f64().unwrap_or_else(|| panic!("{name}: {save}"));
    assert!(number("stall_ms") >= number("copy_ms") && number("copy_ms") > 0.0);
    assert!(number("encode_ms") > 0.0 && number("upload_ms") > 0.0 && number("commit_ms") > 0.0);
    assert_eq!(number("bytes_in"), (SMALL + 40_000 + 1) as f64, "tied tensors are copied once");
    assert!(number("bytes_out") > 0.0 && number("bytes_out") < number("bytes_in"));
    let (_, text) = cli(&host, &["status"]);
    assert!(text.contains("last commit") && text.contains("stall ms"), "{text}");
    let metrics = agent_metrics(Some(&host.engine_folder())).unwrap();
    for name in [
        "last_commit_step",
        "seconds_since_commit",
        "chain_depth",
        "failed_saves_total",
        "queue_depth",
        "save_stall_seconds_sum",
        "save_out_bytes_count",
    ] {
        assert!(metrics.lines().any(|line| line.starts_with(&format!("tensorcask_{name}{{run="))), "{name}: {metrics}");
    }
    assert_eq!(cli(&host, &["metrics"]).0, 0);
    // As Prometheus asks.
    let mut stream = UnixStream::connect(host.engine_folder().join("agent.sock")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: agent\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("application/openmetrics-text"), "{head}");
    assert!(body.contains("tensorcask_save_stall_seconds_count{") && body.ends_with("# EOF\n"), "{body}");
}

#[test]
fn a_watched_status_continues_until_the_agent_ends() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorcask"));
    command.args(["agent", "status", "--watch", "--json", "--folder"]).arg(host.engine_folder());
    let mut watch = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut first = [0; 1];
    watch.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(cli(&host, &["stop"]).0, 0);
    assert_eq!(watch.wait().unwrap().code(), Some(10));
}

#[test]
fn files_are_private_and_invalid_requests_do_no_harm() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    let key = host.status().runs[0].key.clone();
    let mode = |path: std::path::PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let folder = host.engine_folder();
    assert_eq!((mode(folder.clone()), mode(folder.join("agent.sock"))), (0o700, 0o600));
    assert_eq!((mode(folder.join(&key)), mode(folder.join(&key).join("rank-0/arena"))), (0o700, 0o600));
    for request in [&b"garbage\n"[..], b"5\n{}", b"12345678901234567890", b"14\n{\"v\":99,\"x\":1}", b"GET", b""] {
        let mut stream = UnixStream::connect(folder.join("agent.sock")).unwrap();
        stream.write_all(request).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
    }
    save(&mut engine, 2);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
}

#[test]
fn a_finished_run_leaves_no_memory_behind() {
    let host = Host::new();
    let mut engine = host.engine();
    for step in 1..=3 {
        save(&mut engine, step);
    }
    let key = host.status().runs[0].key.clone();
    engine.finish().unwrap();
    assert_eq!(host.stored_steps(), [1, 2, 3]);
    let folder = host.engine_folder().join(key);
    until("memory is freed", || !folder.join("rank-0/arena").exists() && !folder.join("memory-0").exists());
    assert!(host.status().runs.is_empty());
}

/// Memory stays bounded even if the trainer never waits.
#[test]
fn memory_does_not_grow_with_the_number_of_saves() {
    const SAVES: u64 = 300;
    let host = Host::new();
    let mut engine = Engine::start(EngineOptions { keep: 2, ..host.options() }).unwrap();
    let mut most = 0;
    let mut threads = 0;
    for step in 1..=SAVES {
        State::new(step, 64 << 10).save(&mut engine).unwrap();
        if step % 20 == 0 {
            most = most.max(host.status().runs[0].memory_bytes);
            let tasks = format!("/proc/{}/task", host.agent().unwrap().as_raw_nonzero());
            threads = threads.max(std::fs::read_dir(tasks).unwrap().count());
        }
    }
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let key = host.status().runs[0].key.clone();
    assert!(!host.engine_folder().join(key).join("memory-0").exists(), "the log in memory was never cut off");
    assert!(most < 16 << 20, "{most} bytes of memory");
    assert!(threads < 64, "{threads} threads");
    assert_eq!(host.stored_steps().len() as u64, SAVES);
}

/// A reader that waits for the end of the trainer's pipe does not wait for the agent.
/// The trainer lives, and starts another agent with its next save. A save by hand must not end it meanwhile.
#[test]
fn a_job_whose_agent_has_died_still_owns_its_store() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.kill_agent();
    let by_hand = || host.store().writer_with(WriterOptions { claim: Claim::Once, ..WriterOptions::default() });
    let refusal = by_hand().unwrap_err();
    assert!(refusal.message().contains(&format!("process {} on host", std::process::id())), "{refusal}");
    save(&mut engine, 2);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2]);
}

#[test]
fn an_agent_closes_inherited_pipes() {
    let host = Host::new();
    let (mut reader, writer) = std::io::pipe().unwrap();
    // Without close-on-exec, the agent inherits the pipe.
    rustix::io::fcntl_setfd(&writer, rustix::io::FdFlags::empty()).unwrap();
    let mut engine = host.engine();
    rustix::io::fcntl_setfd(&writer, rustix::io::FdFlags::CLOEXEC).unwrap();
    State::new(1, SMALL).save(&mut engine).unwrap();
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    drop(writer);
    let (ended, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || ended.send(reader.read_to_end(&mut Vec::new())));
    assert_eq!(told.recv_timeout(LONG).unwrap().unwrap(), 0);
    assert!(host.agent().is_some());
}

#[test]
fn a_new_agent_does_not_end_before_it_knows_its_work() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let away = Away::take(&host.store_path());
    save(&mut engine, 2);
    assert!(engine.wait(Until::Encoded, LONG).unwrap().reached);
    host.signal_agent(Signal::KILL);
    drop(engine);
    host.agent_is_gone();
    let mut agent = host.start_agent(&["--idle-exit", "1s", "--drain", "1s"]);
    until("the agent has outlived its idle time", || host.status().uptime_s > 3.0);
    assert!(agent.try_wait().unwrap().is_none(), "the agent is not idle");
    host.signal_agent(Signal::TERM);
    assert!(agent.wait().unwrap().success());
    let mut said = String::new();
    agent.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("states wait in shared memory"), "{said}");
    away.back();
    host.run_agent_until_idle();
    assert_eq!(host.stored_steps(), [1, 2]);
}

/// An agent of another version does not understand requests. `stop` ends it with a signal.
#[test]
fn an_agent_of_another_version_can_be_ended() {
    let host = Host::new();
    std::fs::create_dir(host.engine_folder()).unwrap();
    std::fs::set_permissions(host.engine_folder(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["agents::agent_of_another_version", "--exact", "--nocapture"]).env("TEST_AGENT", host.engine_folder());
    let mut agent = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until("the agent listens", || host.engine_folder().join("agent.sock").exists());
    let (code, said) = cli(&host, &["stop"]);
    assert_eq!(code, 0, "{said}");
    let ended = agent.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ended), Some(15), "{ended:?}");
    assert_eq!(cli(&host, &["status"]).0, 10, "no agent is left");
}

/// The body of that agent's process: replies to every request in version 99.
#[test]
fn agent_of_another_version() {
    let Some(folder) = std::env::var_os("TEST_AGENT") else { return };
    let listener = std::os::unix::net::UnixListener::bind(std::path::Path::new(&folder).join("agent.sock")).unwrap();
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let mut request = [0; 8];
        // The second connection, for the process id, sends nothing.
        if stream.read(&mut request).unwrap_or(0) > 0 {
            let _ = stream.write_all(b"8\n{\"v\":99}");
        }
    }
}

/// A `tracing` subscriber sees spans of each save in the trainer and in the agent.
#[test]
fn spans_report_each_stage_of_a_save() {
    let host = Host::new();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["agents::observed_process", "--exact", "--nocapture"]);
    command.env("TEST_OBSERVED", host.engine_folder()).env("TEST_STORE", host.store_path());
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    for (name, fields) in [
        ("save", &["run", "step", "generation", "stall_ms", "copy_ms", "bytes_in", "queue_depth"][..]),
        ("encode", &["run", "step", "generation", "encode_ms", "bytes_out", "kind"]),
        ("upload", &["run", "tier", "step", "snapshots", "upload_ms"]),
        ("committed", &["step", "stall_ms", "copy_ms", "encode_ms", "upload_ms", "commit_ms", "bytes_in", "bytes_out", "ahead_bytes"]),
    ] {
        let lines = said.lines().filter_map(|line| line.split_once(&format!("SEEN {name} ")).map(|(_, fields)| fields));
        let is_whole = |line: &str| fields.iter().all(|field| line.split(' ').any(|word| word.split('=').next() == Some(field)));
        assert!(lines.clone().any(is_whole), "{name}: {said}");
    }
}

/// The body of that process: an agent, a trainer, and a subscriber that prints spans.
#[test]
fn observed_process() {
    let Some(folder) = std::env::var_os("TEST_OBSERVED").map(std::path::PathBuf::from) else { return };
    tracing::subscriber::set_global_default(PrintSpans::default()).unwrap();
    let options = AgentOptions { folder: Some(folder.clone()), ..AgentOptions::default() };
    let agent = std::thread::spawn(move || run_agent(&options).unwrap());
    until("the agent listens", || agent_metrics(Some(&folder)).is_ok());
    let options = EngineOptions { folder: Some(folder.clone()), ..EngineOptions::new(std::env::var("TEST_STORE").unwrap()) };
    let mut engine = Engine::start(options).unwrap();
    save(&mut engine, 1);
    engine.finish().unwrap();
    stop_agent(Some(&folder)).unwrap();
    agent.join().unwrap();
}

/// Name and fields of each span. The id of a span is its position in the list.
#[derive(Default)]
struct PrintSpans(std::sync::Mutex<Vec<(&'static str, Fields)>>);

#[derive(Default, Clone)]
struct Fields(String);

impl tracing::field::Visit for Fields {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0.push_str(&format!(" {}={value:?}", field.name()));
    }
}

impl tracing::Subscriber for PrintSpans {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("tensorcask_engine")
    }

    fn new_span(&self, span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        let mut fields = Fields::default();
        span.record(&mut fields);
        let mut spans = self.0.lock().unwrap();
        spans.push((span.metadata().name(), fields));
        tracing::span::Id::from_u64(spans.len() as u64)
    }

    fn record(&self, span: &tracing::span::Id, values: &tracing::span::Record<'_>) {
        let mut spans = self.0.lock().unwrap();
        let (name, fields) = &mut spans[span.into_u64() as usize - 1];
        values.record(fields);
        println!("SEEN {name} {}", fields.0);
    }

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        if let Some((_, rest)) = fields.0.split_once("message=committed") {
            println!("SEEN committed {rest}");
        }
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// File modes do not stop root from opening the socket, so the agent checks the user id of its peers.
#[test]
fn a_process_of_another_user_is_refused() {
    use std::os::unix::fs::chown;
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65534;
    if !rustix::process::getuid().is_root() {
        eprintln!("NOT RUN: needs root, to start a process as another user");
        return;
    }
    let host = Host::new();
    // A program that the other user may run, and a folder that they may write to.
    let program = host.folder.path().join("tensorcask");
    let folder = host.folder.path().join("theirs");
    std::fs::set_permissions(host.folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_tensorcask"), &program).unwrap();
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o700)).unwrap();
    chown(&folder, Some(NOBODY), Some(NOBODY)).unwrap();
    let as_them = |verb: &[&str]| {
        let mut command = Command::new(&program);
        command.arg("agent").args(verb).arg("--folder").arg(&folder).uid(NOBODY).gid(NOBODY).current_dir("/");
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let mut agent = as_them(&[]).spawn().unwrap();
    until("their agent answers them", || as_them(&["status"]).status().unwrap().success());
    let mut stream = UnixStream::connect(folder.join("agent.sock")).unwrap();
    let mut answer = Vec::new();
    // The agent may close the connection before it reads the request.
    let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n");
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.is_empty(), "{}", String::from_utf8_lossy(&answer));
    assert!(as_them(&["stop"]).status().unwrap().success());
    agent.wait().unwrap();
}

/// The system kills agents for want of memory, for example.
#[test]
fn agents_that_die_one_after_the_other_are_a_problem() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    for _ in 0..2 {
        host.kill_agent();
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    let problem = engine.wait(Until::Durable, Duration::ZERO).unwrap().problem.unwrap();
    assert!(problem.contains("2 agents have ended") && problem.contains("signal: 9") && problem.contains("agent.log"), "{problem}");
    save(&mut engine, 2);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(engine.wait(Until::Durable, Duration::ZERO).unwrap().problem, None);
}

/// A trainer may run for weeks, and start many agents.
#[test]
fn an_agent_that_has_ended_leaves_no_zombie() {
    let host = Host::new();
    let mut engine = host.engine();
    for step in 1..=3 {
        save(&mut engine, step);
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
        let agent = host.agent().unwrap().as_raw_nonzero();
        host.signal_agent(Signal::KILL);
        // A zombie would stay here until this process ends.
        until("the system has forgotten the agent", || !Path::new(&format!("/proc/{agent}")).exists());
    }
}

/// Launchers bind each rank to a few processors. The agent works for all ranks of its host.
#[test]
fn an_agent_is_not_bound_to_the_processors_of_the_rank_that_started_it() {
    let allowed = |task: &Path| {
        let status = std::fs::read_to_string(task.join("status")).unwrap();
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
    };
    let own = || allowed(Path::new("/proc/thread-self"));
    let before = sched_getaffinity(None).unwrap();
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|processor| all.set(processor));
    sched_setaffinity(None, &all).unwrap();
    let all_of_machine = own();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|processor| before.is_set(*processor)).unwrap());
    sched_setaffinity(None, &one).unwrap();
    let bound = own();
    let host = Host::new();
    let mut engine = host.engine();
    sched_setaffinity(None, &before).unwrap();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let tasks = std::fs::read_dir(format!("/proc/{}/task", host.agent().unwrap().as_raw_nonzero())).unwrap();
    // A thread may have ended by now.
    let tasks: Vec<String> = tasks.map(|task| task.unwrap().path()).filter(|task| task.exists()).map(|task| allowed(&task)).collect();
    assert!(!tasks.is_empty() && tasks.iter().all(|allowed| *allowed == all_of_machine), "{tasks:?}, and the rank was bound to {bound}");
}
