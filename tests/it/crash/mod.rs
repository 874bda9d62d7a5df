//! Kills a process before and after each single write of an operation. Afterwards the store is intact, shows the old
//! state or the new one, and accepts further saves.

mod store;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::{self, SmallState, on_this_thread};
use object_store::local::LocalFileSystem;
use store::{CrashStore, When};
use tensorcask::maintain::{self, CompactOptions, CopyOptions, GcOptions, VerifyOptions};
use tensorcask::{Dtype, Metadata, Policy, Slice, Store, StoreOptions, TensorView, Writer};

const CHILD: &str = "TENSORCASK_CRASH_CHILD";

/// Operation that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Save,
    LargeSave,
    Compact,
    Reduce,
    Gc,
    Copy,
}

const VICTIMS: [Victim; 6] = [Victim::Save, Victim::LargeSave, Victim::Compact, Victim::Reduce, Victim::Gc, Victim::Copy];
const COLLECT: GcOptions = GcOptions { apply: true, age_floor: Duration::ZERO, collect: true, directories: false };

/// Maximum sizes of a snapshot inside of a log entry: snapshots are objects, or entries hold the small ones.
const INLINE_BYTES: [u64; 2] = [0, 64 << 10];

fn options(inline_bytes: u64) -> StoreOptions {
    StoreOptions { fsync: false, inline_bytes, ..StoreOptions::default() }
}

fn plain(folder: &Path, inline_bytes: u64) -> Store {
    options(inline_bytes).open(folder.to_str().unwrap()).unwrap()
}

async fn save_small(writer: &mut Writer, step: u64) {
    let state = SmallState::at(step);
    writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await.unwrap();
}

/// Returns bytes that are large enough for an upload in parts.
fn large() -> Vec<u8> {
    let mut x = 1u64;
    let noise = |_| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) as u8
    };
    (0..9 << 20).map(noise).collect()
}

/// Runs an operation on the store `run` of a folder, through `CrashStore`.
async fn run(victim: Victim, inline_bytes: u64, folder: &Path, kill: When) {
    let open = |name: &str, kill: Option<When>| {
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let local = Arc::new(LocalFileSystem::new_with_prefix(folder).unwrap());
        Store::with_object_store(Arc::new(CrashStore::new(local, kill)), Default::default(), options(inline_bytes))
    };
    match victim {
        Victim::Save => save_small(&mut open("run", Some(kill)).writer(Policy::Consecutive).await.unwrap(), 4).await,
        Victim::LargeSave => {
            let mut writer = open("run", Some(kill)).writer(Policy::Consecutive).await.unwrap();
            let bytes = large();
            let state = SmallState::at(4);
            let mut tensors = state.tensors();
            tensors.push(TensorView::new("model.large", Dtype::U8, &[9 << 20], &bytes).unwrap());
            writer.save(4, &tensors, &state.blobs(), &Metadata::default()).await.unwrap();
        }
        Victim::Compact => _ = maintain::compact(&open("run", Some(kill)), 3, &CompactOptions::default()).await.unwrap(),
        Victim::Reduce => {
            let roles = ["model".to_owned()];
            let options = CompactOptions::default();
            let reduced = maintain::keep_roles(&open("run", Some(kill)), &[7], &roles, &options).await.unwrap();
            assert_eq!(reduced[0].held, None);
        }
        Victim::Gc => _ = maintain::gc(&open("run", Some(kill)), &COLLECT).await.unwrap(),
        Victim::Copy => _ = maintain::copy(&open("run", None), &open("copy", Some(kill)), &CopyOptions::default()).await.unwrap(),
    }
}

/// Does nothing unless it was started by the test below.
#[test]
fn child() {
    let Ok(order) = std::env::var(CHILD) else { return };
    let words: Vec<&str> = order.split(' ').collect();
    let victim = VICTIMS[words[0].parse::<usize>().unwrap()];
    let kill = When { write: words[1].parse().unwrap(), after: words[2] == "after" };
    let inline_bytes = words[3].parse().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(run(victim, inline_bytes, Path::new(words[4]), kill));
}

/// Prepares steps 1 to 3 of a chain, and step 7. Step 7 is forgotten unless the operation reduces it. Before a copy,
/// step 1 is forgotten, too, though the others need it.
fn prepare(victim: Victim, inline_bytes: u64, folder: &Path) {
    let store = plain(&folder.join("run"), inline_bytes);
    on_this_thread(async {
        let mut other = store.writer(Policy::Full).await.unwrap();
        save_small(&mut other, 7).await;
        save_small(&mut other, 1).await;
        let mut writer = store.writer(Policy::Consecutive).await.unwrap();
        save_small(&mut writer, 2).await;
        save_small(&mut writer, 3).await;
        if victim != Victim::Reduce {
            store.forget(&[7]).await.unwrap();
        }
        if victim == Victim::Copy {
            store.forget(&[1]).await.unwrap();
            // Skips the probe of a new place, whose eighty scratch objects do not matter here.
            std::fs::create_dir(folder.join("copy")).unwrap();
            std::fs::copy(folder.join("run/store.json"), folder.join("copy/store.json")).unwrap();
        }
    });
}

fn copy_folder(from: &Path, to: &Path) {
    for (name, bytes) in common::objects_of(from) {
        let path = to.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

/// Checks the store and the content of all live steps. Returns the live steps.
async fn steps_of(store: &Store) -> Vec<u64> {
    let report = maintain::verify(store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    let steps: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    for &step in &steps {
        let snapshot = store.snapshot(step).await.unwrap();
        let reduced = snapshot.record().roles.is_some();
        for (name, bytes) in SmallState::at(step).expected().into_iter().filter(|(name, _)| !reduced || name.starts_with("model.")) {
            assert_eq!(snapshot.read(name, &Slice::all()).await.unwrap().data, bytes, "step {step}, {name}");
        }
    }
    steps
}

async fn after_the_crash(victim: Victim, inline_bytes: u64, folder: &Path, finished: bool) {
    let store = plain(&folder.join("run"), inline_bytes);
    let steps = steps_of(&store).await;
    match victim {
        Victim::Save | Victim::LargeSave => assert!(steps == [1, 2, 3, 4] || (!finished && steps == [1, 2, 3]), "{steps:?}"),
        Victim::Copy => assert_eq!(steps, [2, 3]),
        Victim::Reduce => {
            assert_eq!(steps, [7, 1, 2, 3]);
            let reduced = store.snapshot(7).await.unwrap().record().roles.is_some();
            assert!(reduced || !finished);
        }
        Victim::Compact | Victim::Gc => assert_eq!(steps, [1, 2, 3]),
    }
    if finished && victim == Victim::Compact {
        assert_eq!(store.snapshot(3).await.unwrap().inspect().chain().len(), 1);
    }
    if victim == Victim::Copy {
        let copied = plain(&folder.join("copy"), inline_bytes);
        // Each commit at the destination is a state of its own. A parent is live there until it is known not to be.
        let steps = steps_of(&copied).await;
        assert!(steps == [2, 3] || (!finished && [&[][..], &[1], &[1, 2], &[1, 2, 3]].contains(&&steps[..])), "{steps:?}");
        let again = maintain::copy(&store, &copied, &CopyOptions::default()).await.unwrap();
        assert!(!finished || again.objects == 0, "all was there");
        assert_eq!(steps_of(&copied).await, [2, 3]);
    }
    // The next save works, and garbage collection of the leftovers does no harm.
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    save_small(&mut writer, 5).await;
    maintain::gc(&store, &COLLECT).await.unwrap();
    assert_eq!(*steps_of(&store).await.last().unwrap(), 5);
    let casks = std::fs::read_dir(folder.join("run/casks")).unwrap();
    let casks = casks.filter(|entry| !entry.as_ref().unwrap().file_name().to_str().unwrap().contains('#')).count() as u64;
    let mut named = BTreeMap::new();
    for info in store.snapshots().await.unwrap() {
        let chain = store.snapshot(info.record.step).await.unwrap().inspect().chain();
        let objects = chain.into_iter().filter(|link| link.record.inline.is_none());
        named.extend(objects.map(|link| (link.record.id, link.casks as u64)));
    }
    assert_eq!(casks, named.values().sum::<u64>(), "no leftovers");
}

fn kill_each_write_of(victim: Victim) {
    INLINE_BYTES.iter().for_each(|&inline_bytes| kill_each_write(victim, inline_bytes));
}

fn kill_each_write(victim: Victim, inline_bytes: u64) {
    let template = tempfile::tempdir().unwrap();
    prepare(victim, inline_bytes, template.path());
    let number = VICTIMS.iter().position(|v| *v == victim).unwrap();
    let mut crashes = 0;
    for write in 0.. {
        let mut finished = 0;
        for after in [false, true] {
            let place = tempfile::tempdir().unwrap();
            copy_folder(template.path(), place.path());
            let order = format!("{number} {write} {} {inline_bytes} {}", if after { "after" } else { "before" }, place.path().display());
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["crash::child", "--exact", "--nocapture"]).env(CHILD, &order).stdout(Stdio::null()).stderr(Stdio::piped());
            let output = child.output().unwrap();
            let died = std::os::unix::process::ExitStatusExt::signal(&output.status) == Some(libc::SIGABRT);
            assert!(died || output.status.success(), "{order}: {}", String::from_utf8_lossy(&output.stderr));
            finished += u32::from(!died);
            crashes += u32::from(died);
            on_this_thread(after_the_crash(victim, inline_bytes, place.path(), !died));
        }
        if finished == 2 {
            break;
        }
        assert_eq!(finished, 0, "a write is there before and after");
    }
    println!("{victim:?}: {crashes} crashes");
    assert!(crashes >= 4, "{victim:?} wrote next to nothing");
}

#[test]
fn save() {
    kill_each_write_of(Victim::Save);
}

#[test]
fn save_in_parts() {
    kill_each_write_of(Victim::LargeSave);
}

#[test]
fn compact() {
    kill_each_write_of(Victim::Compact);
}

#[test]
fn reduce() {
    kill_each_write_of(Victim::Reduce);
}

#[test]
fn gc() {
    kill_each_write_of(Victim::Gc);
}

#[test]
fn copy() {
    kill_each_write_of(Victim::Copy);
}
