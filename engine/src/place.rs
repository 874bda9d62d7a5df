//! Where the engine keeps its files on a host, and who holds them.
//!
//! ```text
//! /dev/shm/tensorcask-<uid>/              0700
//!   agent.sock agent.lock agent.log       one agent
//!   <key>/                                one run
//!     run.json seen.json seen.lock        what the agent has to know of it, and what is known of its tiers
//!     over                                is there once the run is over: what is in memory goes when it is in the store
//!     memory-<n>/                         encoded snapshots: a store, of which the last is in use
//!     rank-<r>/lock arena                 one trainer
//! ```
//!
//! Locks belong to processes and go with them, however they end; children that a trainer forks do not hold them.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::FlockOperation;
use tensorcask::{Error, ErrorKind, Result};

/// Names the folder, where it is set.
pub const FOLDER_VARIABLE: &str = "TENSORCASK_ENGINE_DIR";

/// The engine's folder on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    root: PathBuf,
}

impl Place {
    /// The folder, which is created where it is not there.
    pub(crate) fn open(folder: Option<&Path>) -> Result<Self> {
        let root = Self::path(folder);
        private_folder(&root)?;
        Ok(Self { root })
    }

    /// The folder, if it is there.
    pub(crate) fn find(folder: Option<&Path>) -> Option<Self> {
        let root = Self::path(folder);
        root.is_dir().then_some(Self { root })
    }

    fn path(folder: Option<&Path>) -> PathBuf {
        let named =
            folder.map(Path::to_owned).or_else(|| std::env::var_os(FOLDER_VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from));
        named.unwrap_or_else(|| PathBuf::from(format!("/dev/shm/tensorcask-{}", rustix::process::getuid().as_raw())))
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.root.join("agent.sock")
    }

    pub(crate) fn agent_lock(&self) -> PathBuf {
        self.root.join("agent.lock")
    }

    pub(crate) fn agent_log(&self) -> PathBuf {
        self.root.join("agent.log")
    }

    /// The folder of a run.
    pub(crate) fn run(&self, key: &str) -> RunPlace {
        RunPlace { root: self.root.join(key) }
    }

    /// All runs that left something here.
    pub(crate) fn runs(&self) -> Result<Vec<RunPlace>> {
        let runs = folders(&self.root)?.into_iter().map(|root| RunPlace { root });
        Ok(runs.filter(|run| run.spec().is_file()).collect())
    }

    /// Bytes that the file system has in all.
    pub(crate) fn capacity(&self) -> Result<u64> {
        let found = rustix::fs::statvfs(&self.root).map_err(|e| Error::io(self.root.display().to_string(), e.into()))?;
        Ok(found.f_blocks.saturating_mul(found.f_frsize))
    }
}

/// The folder of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunPlace {
    root: PathBuf,
}

impl RunPlace {
    pub(crate) fn create(&self) -> Result<()> {
        private_folder(&self.root)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn spec(&self) -> PathBuf {
        self.root.join("run.json")
    }

    /// What is known of the tiers.
    pub(crate) fn seen(&self) -> PathBuf {
        self.root.join("seen.json")
    }

    /// Held by whoever changes that.
    pub(crate) fn seen_lock(&self) -> PathBuf {
        self.root.join("seen.lock")
    }

    /// Whether the run was said to be over.
    pub(crate) fn is_over(&self) -> bool {
        self.over().exists()
    }

    pub(crate) fn set_over(&self, over: bool) -> Result<()> {
        if over { replace_file(&self.over(), b"") } else { remove_file(&self.over()) }
    }

    fn over(&self) -> PathBuf {
        self.root.join("over")
    }

    pub(crate) fn rank(&self, rank: u32) -> RankPlace {
        RankPlace { root: self.root.join(format!("rank-{rank}")) }
    }

    /// Ranks that have a folder here.
    pub(crate) fn ranks(&self) -> Result<Vec<u32>> {
        numbered(&self.root, "rank-").map(|found| found.into_iter().filter_map(|rank| u32::try_from(rank).ok()).collect())
    }

    pub(crate) fn memory(&self, epoch: u64) -> PathBuf {
        self.root.join(format!("memory-{epoch}"))
    }

    /// Numbers of the stores in memory, ascending.
    pub(crate) fn epochs(&self) -> Result<Vec<u64>> {
        numbered(&self.root, "memory-")
    }

    /// Removes everything but locks, which others may wait for.
    pub(crate) fn clear(&self) -> Result<()> {
        for epoch in self.epochs()? {
            remove_folder(&self.memory(epoch))?;
        }
        for rank in self.ranks()? {
            remove_file(&self.rank(rank).arena())?;
            remove_file(&self.rank(rank).new_arena())?;
        }
        remove_file(&self.seen())?;
        remove_file(&self.spec())?;
        self.set_over(false)
    }
}

/// The folder of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RankPlace {
    root: PathBuf,
}

impl RankPlace {
    pub(crate) fn create(&self) -> Result<()> {
        private_folder(&self.root)
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    pub(crate) fn arena(&self) -> PathBuf {
        self.root.join("arena")
    }

    /// An arena that is being made.
    pub(crate) fn new_arena(&self) -> PathBuf {
        self.arena().with_extension("new")
    }
}

/// Bytes that are free in the file system of a folder, and how to have more: the end of a sentence about too little.
pub(crate) fn free_space(folder: &Path) -> String {
    let free = rustix::fs::statvfs(folder).map_or(0, |found| found.f_bavail.saturating_mul(found.f_frsize));
    format!(
        "{} has {free} free. Make it larger (mount -o remount,size=..., docker --shm-size, a larger emptyDir of medium Memory), or point \
         {FOLDER_VARIABLE} to a folder with room; folders of runs that are over can be removed",
        folder.display()
    )
}

/// Creates a folder for this user alone, or checks that what is there is one: names in `/dev/shm` are anybody's to take.
fn private_folder(path: &Path) -> Result<()> {
    let fail = |e: std::io::Error| Error::io(path.display().to_string(), e);
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => return Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(fail(e)),
    }
    let meta = std::fs::symlink_metadata(path).map_err(fail)?;
    if !meta.is_dir() || meta.uid() != rustix::process::getuid().as_raw() || meta.mode() & 0o077 != 0 {
        let message = format!("has to be a folder of this user with mode 0700; remove it, or set {FOLDER_VARIABLE} to another");
        return Err(Error::invalid(message).object(path.display().to_string()));
    }
    Ok(())
}

fn folders(root: &Path) -> Result<Vec<PathBuf>> {
    let fail = |e: std::io::Error| Error::io(root.display().to_string(), e);
    let mut found = Vec::new();
    let entries = match std::fs::read_dir(root) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        Err(e) => return Err(fail(e)),
    };
    for entry in entries {
        let entry = entry.map_err(fail)?;
        if entry.file_type().map_err(fail)?.is_dir() {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn numbered(root: &Path, prefix: &str) -> Result<Vec<u64>> {
    let number = |path: PathBuf| path.file_name()?.to_str()?.strip_prefix(prefix)?.parse().ok();
    let mut found: Vec<u64> = folders(root)?.into_iter().filter_map(number).collect();
    found.sort_unstable();
    Ok(found)
}

/// Creates a folder that is not there.
pub(crate) fn create_folder(path: &Path) -> Result<()> {
    DirBuilder::new().mode(0o700).create(path).map_err(|e| Error::io(path.display().to_string(), e))
}

pub(crate) fn remove_folder(path: &Path) -> Result<()> {
    ignore_missing(path, std::fs::remove_dir_all(path))
}

pub(crate) fn remove_file(path: &Path) -> Result<()> {
    ignore_missing(path, std::fs::remove_file(path))
}

fn ignore_missing(path: &Path, removed: std::io::Result<()>) -> Result<()> {
    match removed {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path.display().to_string(), e)),
        _ => Ok(()),
    }
}

/// Replaces a small file; readers see the old or the new.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let fail = |e: std::io::Error| Error::io(path.display().to_string(), e);
    // Trainer and agent may write at the same time.
    let new = path.with_extension(format!("new-{}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new).map_err(fail)?;
    file.write_all(bytes).map_err(fail)?;
    std::fs::rename(&new, path).map_err(fail)
}

/// Waits for the lock of a file, which ends with the value: between threads, too.
pub(crate) fn lock_file(path: &Path) -> Result<File> {
    let fail = |e: std::io::Error| Error::io(path.display().to_string(), e);
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path).map_err(fail)?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive).map_err(|e| fail(e.into()))?;
    Ok(file)
}

/// A lock that this process holds until the value is dropped, or the process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    _file: File,
}

/// Locks of this process: to the kernel, one process may lock a file as often as it likes.
static HELD: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

impl Lock {
    /// Takes the lock; `Conflict`, with the holder's process id, if another holds it.
    pub(crate) fn acquire(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let fail = |e: std::io::Error| Error::io(name.as_str(), e);
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        if held.contains(path) {
            return Err(Error::new(ErrorKind::Conflict, "this process holds it already").object(name));
        }
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path).map_err(fail)?;
        match rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => {
                let mut holder = String::new();
                let _ = file.take(32).read_to_string(&mut holder);
                return Err(Error::new(ErrorKind::Conflict, format!("process {} holds it", holder.trim().escape_debug())).object(name));
            }
            Err(e) => return Err(fail(e.into())),
        }
        let pid = std::process::id().to_string();
        file.set_len(0).and_then(|()| file.seek(SeekFrom::Start(0))).and_then(|_| file.write_all(pid.as_bytes())).map_err(fail)?;
        held.insert(path.to_owned());
        Ok(Self { path: path.to_owned(), _file: file })
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // The registry first: until the file is closed, which the kernel takes as the end of the lock, nobody else here may open it.
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        held.remove(&self.path);
        let _ = rustix::fs::fcntl_lock(&self._file, FlockOperation::NonBlockingUnlock);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_lock_is_held_once_in_a_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = Lock::acquire(&path).unwrap();
        assert_eq!(Lock::acquire(&path).unwrap_err().kind(), ErrorKind::Conflict);
        drop(lock);
        Lock::acquire(&path).unwrap();
    }

    #[test]
    fn a_folder_that_others_can_enter_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("engine");
        Place::open(Some(&root)).unwrap();
        Place::open(Some(&root)).unwrap();
        std::fs::set_permissions(&root, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(Place::open(Some(&root)).unwrap_err().kind(), ErrorKind::InvalidArgument);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        assert!(Place::open(Some(&link)).is_err());
    }
}
