//! The folder of a local store changes below a process: a symbolic link is switched, a mount disappears. No save is acknowledged
//! that a fresh process cannot load, and nothing is written to a folder that is not the store's.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{SmallState, copy_folder, objects_of};
use tensorcask::{Error, ErrorKind, Latest, Policy, Result, SavedSnapshot, Slice, Store, Writer};

async fn save(writer: &mut Writer, step: u64) -> Result<SavedSnapshot> {
    let state = SmallState::at(step);
    writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await
}

async fn writer(path: &Path) -> Writer {
    Store::open(path.to_str().unwrap()).unwrap().writer(Policy::Consecutive).await.unwrap()
}

/// Reads the newest step as a new process would.
async fn assert_newest(path: &Path, step: u64) {
    let snapshot = Store::open(path.to_str().unwrap()).unwrap().snapshot(Latest).await.unwrap();
    assert_eq!(snapshot.step(), step);
    for (name, bytes) in SmallState::at(step).expected() {
        assert_eq!(snapshot.read(name, &Slice::all()).await.unwrap().data, bytes, "step {step}, {name}");
    }
}

struct Links {
    folder: tempfile::TempDir,
}

impl Links {
    fn new() -> Self {
        let links = Self { folder: tempfile::tempdir().unwrap() };
        std::fs::create_dir(links.path("a")).unwrap();
        links.switch_to("a");
        links
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn switch_to(&self, target: &str) {
        let _ = std::fs::remove_file(self.path("current"));
        symlink(target, self.path("current")).unwrap();
    }
}

fn assert_switched(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Storage, "{error}");
    assert!(error.to_string().contains("a symbolic link was switched"), "{error}");
}

/// The store is the target of the link, or a folder below.
#[tokio::test]
async fn a_link_that_is_switched_ends_the_save() {
    for below in ["", "run"] {
        for target in ["empty", "copy", "other", "missing"] {
            let links = Links::new();
            let url = links.path("current").join(below);
            let old = links.path("a");
            let new = links.path(target);
            let mut first = writer(&url).await;
            save(&mut first, 1).await.unwrap();
            match target {
                "empty" => std::fs::create_dir(&new).unwrap(),
                "copy" => copy_folder(&old, &new),
                "other" => {
                    for step in [7, 8, 9] {
                        save(&mut writer(&new.join(below)).await, step).await.unwrap();
                    }
                }
                _ => {}
            }
            let before = (objects_of(&old), new.exists().then(|| objects_of(&new)));
            links.switch_to(target);
            assert_switched(&save(&mut first, 2).await.unwrap_err());
            // A handle that was opened before the switch does not begin a new store either.
            assert_switched(&first.store().writer(Policy::Full).await.unwrap_err());
            assert_switched(&first.store().pin(1).await.unwrap_err());
            let committed = |objects: &[(String, Vec<u8>)]| objects.iter().filter(|(path, _)| path.contains("log/")).count();
            assert_eq!(committed(&objects_of(&old)), committed(&before.0), "{below:?}, {target}");
            assert_eq!(new.exists().then(|| objects_of(&new)), before.1, "{below:?}, {target}");
            links.switch_to("a");
            save(&mut first, 3).await.unwrap();
            assert_newest(&url, 3).await;
        }
    }
}

/// The store was opened, and nothing was asked of it, when the path began to lead elsewhere.
#[tokio::test]
async fn a_path_that_changes_before_the_first_save_is_noticed() {
    let links = Links::new();
    let store = Store::open(links.path("current").to_str().unwrap()).unwrap();
    std::fs::create_dir(links.path("b")).unwrap();
    links.switch_to("b");
    assert_switched(&store.writer(Policy::Full).await.unwrap_err());
    assert_eq!(objects_of(&links.path("b")), []);

    let point = links.path("mnt");
    std::fs::create_dir(&point).unwrap();
    let Some(mount) = Mount::new(&point) else { return };
    let store = Store::open(point.to_str().unwrap()).unwrap();
    drop(mount);
    let error = store.writer(Policy::Full).await.unwrap_err();
    assert!(error.to_string().contains("a mount disappeared or was replaced"), "{error}");
    assert_eq!(objects_of(&point), []);
}

/// All of them look up the same path, and each gets an answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_first_requests_at_once_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let store = Store::open(path.to_str().unwrap()).unwrap();
    let ask = async || {
        let asked = std::iter::repeat_with(|| store.clone()).take(64);
        let asked = asked.map(|store| tokio::spawn(async move { store.snapshot(Latest).await.map(|snapshot| snapshot.step()) }));
        let mut answers = Vec::new();
        for answer in asked.collect::<Vec<_>>() {
            answers.push(answer.await.unwrap().map_err(|e| e.kind()));
        }
        answers
    };
    assert_eq!(ask().await, [Err(ErrorKind::NotFound); 64]);
    save(&mut writer(&path).await, 1).await.unwrap();
    assert_eq!(ask().await, [Ok(1); 64]);
}

/// The path still leads to the same place: the store there is made again, as without a link.
#[tokio::test]
async fn a_store_behind_a_link_may_be_deleted() {
    for below in ["", "run"] {
        let links = Links::new();
        let url = links.path("current").join(below);
        let mut writer = writer(&url).await;
        save(&mut writer, 1).await.unwrap();
        std::fs::remove_dir_all(links.path("a").join(below)).unwrap();
        save(&mut writer, 2).await.unwrap();
        assert_newest(&url, 2).await;
        assert!(links.path("a").join(below).join("store.json").exists());
    }
}

/// A handle reads from the folder that it was opened with.
#[tokio::test]
async fn reads_do_not_follow_a_switched_link() {
    let links = Links::new();
    let url = links.path("current");
    for (target, step) in [("a", 1), ("b", 2)] {
        save(&mut writer(&links.path(target)).await, step).await.unwrap();
    }
    let store = Store::open(url.to_str().unwrap()).unwrap();
    links.switch_to("b");
    assert_eq!(store.snapshot(Latest).await.unwrap().step(), 1);
    assert_newest(&url, 2).await;
}

/// A mounted tmpfs. Dropping it unmounts.
struct Mount(PathBuf);

impl Mount {
    fn new(path: &Path) -> Option<Self> {
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"]).arg(path).output();
        if !mounted.is_ok_and(|output| output.status.success()) {
            eprintln!("NOT RUN: mounting a file system needs root");
            return None;
        }
        Some(Self(path.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[tokio::test]
async fn a_mount_that_disappears_ends_the_save() {
    for below in ["", "run"] {
        let folder = tempfile::tempdir().unwrap();
        let point = folder.path().join("mnt");
        let backup = folder.path().join("backup");
        std::fs::create_dir(&point).unwrap();
        let url = point.join(below);
        let Some(mount) = Mount::new(&point) else { return };
        let mut writer = writer(&url).await;
        save(&mut writer, 1).await.unwrap();
        copy_folder(&url, &backup);
        let assert_gone = |error: Error| {
            assert_eq!(error.kind(), ErrorKind::Storage, "{error}");
            assert!(error.to_string().contains("a mount disappeared or was replaced"), "{error}");
        };
        drop(mount);
        assert_gone(save(&mut writer, 2).await.unwrap_err());
        assert_gone(writer.store().writer(Policy::Full).await.unwrap_err());
        assert_eq!(objects_of(&point), [], "nothing is written below the mount point");
        // An empty file system in its place is not the store.
        let Some(mount) = Mount::new(&point) else { return };
        assert_gone(save(&mut writer, 2).await.unwrap_err());
        assert_eq!(objects_of(&point), []);
        drop(mount);
        // The store is there again, in another mount, as after a network file system was mounted again.
        let Some(_mount) = Mount::new(&point) else { return };
        copy_folder(&backup, &url);
        save(&mut writer, 3).await.unwrap();
        assert_newest(&url, 3).await;
        save(&mut writer, 4).await.unwrap();
        assert_newest(&url, 4).await;
    }
}

/// Only a path at which nothing lies has no store. A file system that does not answer, such as one whose server died, must not look
/// like a run that has saved nothing: a job would begin from its first step.
#[tokio::test]
async fn a_folder_that_cannot_be_looked_up_is_no_missing_store() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("file"), b"not a folder").unwrap();
    symlink(path("loop"), path("loop")).unwrap();
    for place in [path("file"), path("file").join("store"), path("loop"), path("loop").join("store"), path(&"n".repeat(300))] {
        let store = Store::open(place.to_str().unwrap()).unwrap();
        let errors = [
            store.snapshot(Latest).await.map(|_| ()).unwrap_err(),
            store.history().records().await.map(|_| ()).unwrap_err(),
            store.writer(Policy::Consecutive).await.map(|_| ()).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Storage, "{}: {error}", place.display());
            assert!(error.to_string().contains(place.to_str().unwrap()), "{error}");
        }
    }
    let missing = Store::open(path("missing").to_str().unwrap()).unwrap();
    assert_eq!(missing.snapshot(Latest).await.unwrap_err().kind(), ErrorKind::NotFound);
}
