//! File locks. The kernel releases them when their process ends, however it ends; forked children do not hold them.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::process::{Flock, FlockType};
use tensorcask::{Error, ErrorKind, Result};

/// A lock that this process holds until the value is dropped, or the process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    file: File,
}

impl Lock {
    /// Takes the lock. Fails with `Conflict`, naming the process id of the holder, if another process holds it.
    pub(crate) fn acquire(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let fail = |e: std::io::Error| Error::io(name.as_str(), e);
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        if held.contains(path) {
            return Err(Error::new(ErrorKind::Conflict, "this process already holds this lock").object(name));
        }
        let mut file = open(path)?;
        match rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => {
                let mut holder = String::new();
                let _ = file.take(32).read_to_string(&mut holder);
                return Err(
                    Error::new(ErrorKind::Conflict, format!("process {} holds this lock", holder.trim().escape_debug())).object(name)
                );
            }
            Err(e) => return Err(fail(e.into())),
        }
        let pid = std::process::id().to_string();
        file.set_len(0).and_then(|()| file.seek(SeekFrom::Start(0))).and_then(|_| file.write_all(pid.as_bytes())).map_err(fail)?;
        held.insert(path.to_owned());
        Ok(Self { path: path.to_owned(), file })
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing any handle of the file ends the kernel's lock, so no thread of this process may open the file until
        // then.
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        held.remove(&self.path);
        let _ = rustix::fs::fcntl_lock(&self.file, FlockOperation::NonBlockingUnlock);
    }
}

/// Whether a process holds a [`Lock`], whatever namespace of process numbers it is in. `true` if that is not known.
pub(crate) fn is_held(path: &Path) -> bool {
    let held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    if held.contains(path) {
        return true;
    }
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => !matches!(rustix::process::fcntl_getlk(&file, &Flock::from(FlockType::WriteLock)), Ok(None)),
        Err(error) => error.kind() != std::io::ErrorKind::NotFound,
    }
}

/// Locks that this process holds: the kernel lets one process lock a file any number of times.
static HELD: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Waits for the lock of a file and holds it until the value is dropped. Excludes other threads of this process, too.
pub(crate) fn lock_file(path: &Path) -> Result<File> {
    let file = open(path)?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive).map_err(|e| Error::io(path.display().to_string(), e.into()))?;
    Ok(file)
}

/// Does the same as [`lock_file`] in a task: whoever waits can be interrupted.
pub(crate) async fn wait_for_lock(path: &Path) -> Result<File> {
    loop {
        if let Some(held) = try_lock_file(path)? {
            return Ok(held);
        }
        tokio::time::sleep(LOCK_POLL).await;
    }
}

/// Holds the lock of a file as [`lock_file`] does, unless another holder has it.
pub(crate) fn try_lock_file(path: &Path) -> Result<Option<File>> {
    let file = open(path)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(Error::io(path.display().to_string(), e.into())),
    }
}

/// Does the same as [`lock_file`] for the file `NAME.lock` beside a file of this name.
pub(crate) fn lock_beside(path: &Path) -> Result<File> {
    lock_file(&path.with_extension("lock"))
}

/// Time between looks whether a lock is free.
const LOCK_POLL: Duration = Duration::from_millis(20);

fn open(path: &Path) -> Result<File> {
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    opened.map_err(|e| Error::io(path.display().to_string(), e))
}

#[cfg(test)]
mod tests {
    use tensorcask::ErrorKind;

    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::{Lock, is_held};

    #[test]
    fn a_process_holds_a_lock_only_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = Lock::acquire(&path).unwrap();
        assert_eq!(Lock::acquire(&path).unwrap_err().kind(), ErrorKind::Conflict);
        assert!(is_held(&path));
        drop(lock);
        assert!(!is_held(&path) && !is_held(&path.with_extension("missing")));
        Lock::acquire(&path).unwrap();
    }

    /// In the process that another test starts: holds a lock until its input ends.
    #[test]
    fn holder() {
        let Some(path) = std::env::var_os("TEST_LOCK") else { return };
        let _lock = Lock::acquire(path.as_ref()).unwrap();
        println!("HOLDS");
        let _ = std::io::stdin().read_line(&mut String::new());
    }

    #[test]
    fn locks_of_another_process_are_seen_and_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["os::lock::tests::holder", "--exact", "--nocapture"]).env("TEST_LOCK", &path);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        while !said.contains("HOLDS") {
            let mut byte = [0];
            child.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
            said.push(char::from(byte[0]));
        }
        assert!(is_held(&path) && is_held(&path));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_held(&path));
    }
}
