//! A host for tests: a folder in shared memory, a store, an agent, and trainers in their own processes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tensorcask::blocking::Store;
use tensorcask::{Blob, Dtype, ErrorKind, Latest, Metadata, Policy, Rect, Slice, TensorView};
use tensorcask_engine::{
    AgentStatus, BackPressure, Deferred, Destination, Encode, Engine, EngineOptions, OnAgentLoss, Restored, RestoredTensor, Source, Until,
    agent_status,
};

/// Deadline of all waits. It only keeps a failing test from hanging.
pub(crate) const LONG: Duration = Duration::from_secs(180);

/// A host. Dropping it kills its agent.
pub(crate) struct Host {
    pub folder: tempfile::TempDir,
    pub stores: tempfile::TempDir,
}

impl Host {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::Builder::new().prefix("tc-engine-").tempdir_in("/dev/shm").unwrap(), stores: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn engine_folder(&self) -> PathBuf {
        self.folder.path().join("e")
    }

    pub(crate) fn store_path(&self) -> PathBuf {
        self.stores.path().join("run")
    }

    pub(crate) fn store(&self) -> Store {
        Store::open(self.store_path().to_str().unwrap()).unwrap()
    }

    pub(crate) fn options(&self) -> EngineOptions {
        EngineOptions {
            folder: Some(self.engine_folder()),
            agent: vec![env!("CARGO_BIN_EXE_tensorcask").to_owned(), "agent".to_owned()],
            policy: Policy::Consecutive,
            fsync: false,
            ..EngineOptions::new(self.store_path().to_str().unwrap())
        }
    }

    pub(crate) fn engine(&self) -> Engine {
        Engine::start(self.options()).unwrap()
    }

    pub(crate) fn status(&self) -> AgentStatus {
        agent_status(Some(&self.engine_folder())).unwrap()
    }

    pub(crate) fn agent_log(&self) -> String {
        std::fs::read_to_string(self.engine_folder().join("agent.log")).unwrap_or_default()
    }

    /// Process id of the agent, while it runs.
    pub(crate) fn agent(&self) -> Option<Pid> {
        let pid = std::fs::read_to_string(self.engine_folder().join("agent.lock")).ok()?;
        // A zombie has ended.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Pid::from_raw(pid.parse().ok()?).filter(|_| !stat.contains(") Z "))
    }

    /// Sends a signal to the agent. After `STOP`, returns once all its threads have stopped: one on another core may
    /// still run when the kernel has accepted the signal.
    pub(crate) fn signal_agent(&self, signal: Signal) {
        let agent = self.agent().expect("an agent");
        kill_process(agent, signal).unwrap();
        if signal == Signal::STOP {
            let has_stopped = |thread: std::fs::DirEntry| match std::fs::read_to_string(thread.path().join("stat")) {
                Ok(stat) => stat.contains(") T "),
                Err(_) => true,
            };
            let threads = || std::fs::read_dir(format!("/proc/{}/task", agent.as_raw_nonzero())).unwrap();
            until("the agent stops", || threads().all(|thread| has_stopped(thread.unwrap())));
        }
    }

    /// Kills the agent, and waits until it is gone.
    pub(crate) fn kill_agent(&self) {
        self.signal_agent(Signal::KILL);
        self.agent_is_gone();
    }

    /// Starts an agent and waits until it listens.
    pub(crate) fn start_agent(&self, arguments: &[&str]) -> Child {
        let child = self.spawn_agent(arguments);
        until("the agent listens", || agent_status(Some(&self.engine_folder())).is_ok());
        child
    }

    /// Starts an agent with these variables, and waits until it listens.
    pub(crate) fn start_agent_with(&self, variables: &[(&str, &str)]) -> Child {
        let child = self.agent_command(&[]).envs(variables.iter().copied()).spawn().unwrap();
        until("the agent listens", || agent_status(Some(&self.engine_folder())).is_ok());
        child
    }

    /// Runs an agent that ends once it is idle, and checks that it ends with success.
    pub(crate) fn run_agent_until_idle(&self) {
        assert!(self.spawn_agent(&["--idle-exit", "1s"]).wait().unwrap().success());
    }

    fn spawn_agent(&self, arguments: &[&str]) -> Child {
        self.agent_command(arguments).spawn().unwrap()
    }

    pub(crate) fn agent_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tensorcask"));
        command.arg("agent").arg("--folder").arg(self.engine_folder()).args(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        command
    }

    /// Waits until a killed agent is gone.
    pub(crate) fn agent_is_gone(&self) {
        until("the agent is gone", || self.agent().is_none() && agent_status(Some(&self.engine_folder())).is_err());
    }

    /// Steps in the store.
    pub(crate) fn stored_steps(&self) -> Vec<u64> {
        self.store().snapshots().map_or_else(|_| Vec::new(), |all| all.iter().map(|info| info.record.step).collect())
    }

    /// Starts a trainer in its own process; see [`trainer_process`].
    pub(crate) fn trainer(&self, words: &[(&str, &str)]) -> Trainer {
        self.trainer_by(Command::new(std::env::current_exe().unwrap()), words)
    }

    /// Does the same by a command that starts this program.
    pub(crate) fn trainer_by(&self, mut command: Command, words: &[(&str, &str)]) -> Trainer {
        command.args(["host::trainer_process", "--exact", "--nocapture", "--test-threads=1"]);
        command.env("TEST_TRAINER", self.engine_folder()).env("TEST_STORE", self.store_path());
        command.envs(words.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Trainer { child, lines }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The agent has detached from this process, so only its process id is known.
        if let Some(agent) = self.agent() {
            let _ = kill_process(agent, Signal::KILL);
        }
    }
}

/// Files in a folder.
pub(crate) fn files_in(folder: &Path) -> BTreeSet<PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// A cask in a folder that a manifest, or a file of receipts, names.
pub(crate) fn named_cask(casks: &Path, by: &Path) -> PathBuf {
    let text = std::fs::read_to_string(by).unwrap();
    files_in(casks).into_iter().find(|cask| text.contains(cask.file_stem().unwrap().to_str().unwrap())).unwrap()
}

/// Waits until a condition holds.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LONG, "{what}: not within {LONG:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Varies the moment of a fault. No assertion depends on the moment.
pub(crate) fn vary_moment(delay: Duration) {
    std::thread::sleep(delay);
}

/// A trainer process that can be killed.
pub(crate) struct Trainer {
    pub child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Trainer {
    /// The next line that the trainer prints, as words; skips lines of the test harness.
    pub(crate) fn says(&mut self) -> Option<Vec<String>> {
        loop {
            let line = self.lines.next()?.ok()?;
            if let Some((_, words)) = line.split_once("TRAINER ") {
                return Some(words.split('|').map(str::to_owned).collect());
            }
        }
    }

    /// The other words of the next line, which must begin with this word.
    pub(crate) fn expect(&mut self, word: &str) -> Vec<String> {
        let said = self.says().unwrap_or_else(|| panic!("the trainer ended instead of saying `{word}`"));
        assert_eq!(said[0], word, "{said:?}");
        said[1..].to_vec()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Incompressible bytes that depend on the step.
pub(crate) fn noise(step: u64, bytes: usize) -> Vec<u8> {
    let mut x = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let byte = |_| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 56) as u8
    };
    (0..bytes).map(byte).collect()
}

/// The state of a step: a tensor of this size that repeats the step, and a tensor of noise.
pub(crate) struct State {
    step: u64,
    filled: Vec<u8>,
    noise: Vec<u8>,
}

impl State {
    pub(crate) fn new(step: u64, bytes: usize) -> Self {
        // Every pair of bytes identifies the step, so that a check detects an incomplete copy.
        let filled = [step as u8, (step >> 8) as u8].repeat(bytes / 2);
        Self { step, filled, noise: noise(step, 40_000) }
    }

    pub(crate) fn tensors(&self) -> Vec<TensorView<'_>> {
        vec![
            TensorView::new("model.filled", Dtype::U8, &[self.filled.len() as u64], &self.filled).unwrap(),
            TensorView::new("model.tied", Dtype::U8, &[self.filled.len() as u64], &self.filled).unwrap(),
            TensorView::new("optimizer.exp_avg.noise", Dtype::F32, &[100, 100], &self.noise).unwrap(),
        ]
    }

    pub(crate) fn noise(&self) -> &[u8] {
        &self.noise
    }

    pub(crate) fn blobs(&self) -> Vec<Blob<'static>> {
        vec![Blob::new("rng", self.step.to_string().into_bytes())]
    }

    pub(crate) fn metadata(&self) -> Metadata {
        let mut metadata = Metadata::default();
        metadata.user.insert("loss".into(), (1.0 / (self.step + 1) as f64).into());
        metadata
    }

    pub(crate) fn save(&self, engine: &mut Engine) -> tensorcask::Result<tensorcask_engine::Outcome> {
        let outcome = engine.save(self.step, &self.tensors(), &self.blobs(), &self.metadata())?;
        assert!(outcome.copy <= outcome.stall, "{outcome:?}");
        Ok(outcome)
    }
}

/// Saves a small state.
pub(crate) fn save(engine: &mut Engine, step: u64) -> tensorcask_engine::Outcome {
    State::new(step, SMALL).save(engine).unwrap()
}

/// Saves a step of the same job on another host, until it is durable.
pub(crate) fn save_elsewhere(host: &Host, step: u64) {
    let elsewhere = Host::new();
    let mut other = Engine::start(EngineOptions { folder: Some(elsewhere.engine_folder()), ..host.options() }).unwrap();
    save(&mut other, step);
    assert!(other.wait(Until::Durable, LONG).unwrap().reached);
}

pub(crate) const SMALL: usize = 1 << 20;

/// Checks that every bit of a restored state belongs to its step.
pub(crate) fn check(restored: &Restored<'_>, bytes: usize) {
    let expected = State::new(restored.step, bytes);
    let tensors = expected.tensors();
    assert_eq!(restored.tensors.len(), tensors.len(), "step {}", restored.step);
    for view in &tensors {
        let found = restored.tensors.iter().find(|tensor| tensor.name == view.name()).unwrap();
        assert!(*found.data == *view.data(), "step {}: {} holds other bytes", restored.step, view.name());
        assert_eq!((found.dtype, found.shape.as_slice()), (view.dtype(), view.shape()));
    }
    assert_eq!(restored.blobs, expected.blobs(), "step {}", restored.step);
    assert_eq!(restored.metadata.user, expected.metadata().user, "step {}", restored.step);
}

/// Buffers of a trainer, by tensor name.
#[derive(Default)]
struct Buffers {
    memory: BTreeMap<String, Vec<u8>>,
    order: Vec<String>,
    calls: u64,
    /// Tensor that is not restored.
    unwanted: &'static str,
    refuses: bool,
}

impl Destination for Buffers {
    fn prepare(&mut self, found: &Restored<'_>) -> tensorcask::Result<()> {
        self.calls += 1;
        self.order = found.tensors.iter().map(|tensor| tensor.name.clone()).collect();
        let bytes = |tensor: &RestoredTensor<'_>| tensor.dtype.byte_count(tensor.rect.element_count().unwrap()).unwrap() as usize;
        self.memory = found.tensors.iter().map(|tensor| (tensor.name.clone(), vec![0xee; bytes(tensor)])).collect();
        self.memory.remove(self.unwanted);
        let blobs = State::new(found.step, 0).blobs();
        assert_eq!((&found.blobs, found.tensors[1].tied_to), (&blobs, Some(0)));
        if self.refuses { Err(tensorcask::Error::invalid("no room for this")) } else { Ok(()) }
    }

    fn buffers(&mut self) -> tensorcask::Result<Vec<Option<&mut [u8]>>> {
        let mut memory: BTreeMap<&str, &mut [u8]> =
            self.memory.iter_mut().map(|(name, bytes)| (name.as_str(), bytes.as_mut_slice())).collect();
        Ok(self.order.iter().map(|name| memory.remove(name.as_str())).collect())
    }
}

/// Checks a restore of the newest step into buffers.
pub(crate) fn check_into(engine: &Engine, step: u64, source: &Source) {
    let expected = State::new(step, SMALL);
    for unwanted in ["", "model.filled", "model.tied", "optimizer.exp_avg.noise"] {
        let mut own = Buffers { unwanted, ..Buffers::default() };
        let found = engine.restore_into(Latest, None, &mut own).unwrap();
        // A copy may serve the restore although an unwanted tensor is damaged.
        assert!(found.step == step && (found.source == *source || !unwanted.is_empty()), "{}: {:?}", found.step, found.source);
        assert!(found.tensors.iter().all(|tensor| tensor.data.is_empty()));
        for view in expected.tensors().iter().filter(|view| view.name() != unwanted) {
            assert!(own.memory[view.name()] == view.data(), "step {step} without `{unwanted}`: {} holds other bytes", view.name());
        }
    }
    // A destination that refuses a state is not called again.
    let mut own = Buffers { refuses: true, ..Buffers::default() };
    let error = engine.restore_into(Latest, None, &mut own).unwrap_err();
    assert_eq!((error.kind(), error.message(), own.calls), (ErrorKind::InvalidArgument, "no room for this", 1));
}

/// Checks every bit of a step in the store.
pub(crate) fn check_stored(store: &Store, step: u64, bytes: usize) {
    let snapshot = store.snapshot(step).unwrap();
    let expected = State::new(step, bytes);
    for view in expected.tensors() {
        assert!(snapshot.read(view.name(), &Slice::all()).unwrap().data == view.data(), "step {step}: {}", view.name());
    }
}

/// The body of a trainer process: restores, prints the source, and saves step after step until it is killed. With
/// `TEST_INCOMPLETE`, begins one save and never finishes it.
#[test]
fn trainer_process() {
    let Some(folder) = std::env::var_os("TEST_TRAINER") else { return };
    let word = |name: &str| std::env::var(name).ok();
    let number = |name: &str, default: u64| word(name).map_or(default, |text| text.parse().unwrap());
    let bytes = number("TEST_BYTES", SMALL as u64) as usize;
    let options = EngineOptions {
        folder: Some(folder.into()),
        agent: vec![env!("CARGO_BIN_EXE_tensorcask").to_owned(), "agent".to_owned()],
        policy: Policy::Consecutive,
        fsync: false,
        back_pressure: BackPressure::from_name(&word("TEST_PRESSURE").unwrap_or_else(|| "wait".into())).unwrap(),
        encode: if word("TEST_INLINE").is_some() { Encode::Inline } else { Encode::Agent },
        on_agent_loss: OnAgentLoss::Restart,
        ..EngineOptions::new(word("TEST_STORE").unwrap())
    };
    let mut engine = match Engine::start(options) {
        Ok(engine) => engine,
        Err(e) => {
            println!("TRAINER refused|{}|{e}", e.kind());
            return;
        }
    };
    let mut step = match engine.restore(Latest) {
        Ok(found) => {
            check(&found, bytes);
            println!("TRAINER restored|{}|{}|{}", found.step, found.source, found.passed_over.len());
            found.step
        }
        Err(e) if e.kind() == tensorcask::ErrorKind::NotFound => {
            println!("TRAINER restored|0|nothing|0");
            0
        }
        Err(e) => panic!("{e}"),
    };
    if word("TEST_INCOMPLETE").is_some() {
        let state = State::new(step + 1, bytes);
        let deferred = [Deferred::new("model.late", Dtype::U8, &[1000], Rect::whole(&[1000])).unwrap()];
        let saving = engine.begin_save(step + 1, &state.tensors(), &deferred, &state.blobs(), &state.metadata()).unwrap();
        println!("TRAINER begins|{}", step + 1);
        let _ = std::io::stdin().read_line(&mut String::new());
        drop(saving);
        return;
    }
    let last = number("TEST_STEPS", u64::MAX);
    while step < last {
        step += 1;
        let state = State::new(step, bytes);
        println!("TRAINER begins|{step}");
        let saved = state.save(&mut engine).unwrap();
        assert!(saved.failures.is_empty(), "{:?}", saved.failures);
        println!("TRAINER saved|{step}");
    }
    println!("TRAINER done");
    if word("TEST_WAIT").is_some() {
        let _ = engine.wait(Until::Durable, 60 * LONG);
    }
    // Runs until it is killed, or until its input ends.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Overwrites the middle of a cask.
pub(crate) fn damage(cask: &Path) {
    let cask = std::fs::OpenOptions::new().write(true).open(cask).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&cask, b"damage", cask.metadata().unwrap().len() / 2).unwrap();
}

/// Makes a store unavailable: moves its folder away and puts a file in its place.
pub(crate) struct Away {
    path: PathBuf,
    kept: PathBuf,
}

impl Away {
    pub(crate) fn take(path: &Path) -> Self {
        let kept = path.with_extension("away");
        std::fs::write(&kept, b"no folder").unwrap();
        let away = Self { path: path.to_owned(), kept };
        away.exchange();
        away
    }

    /// Folder of the store while it is away.
    pub(crate) fn kept(&self) -> &Path {
        &self.kept
    }

    pub(crate) fn back(self) {
        self.exchange();
        std::fs::remove_file(&self.kept).unwrap();
    }

    /// Exchanges folder and file in one step, so that an agent never finds the path empty and makes a folder there.
    fn exchange(&self) {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        renameat_with(CWD, &self.path, CWD, &self.kept, RenameFlags::EXCHANGE).unwrap();
    }
}
