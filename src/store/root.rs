//! The folder of a local store: resolved once, and compared before each commit.
//!
//! A path may lead through symbolic links, and a file system may be mounted below it. If requests resolved the path anew each
//! time, a link that is switched would split a store: reads would go to one folder and writes to another. So all requests
//! go to the folder that the path led to when the store was opened. Before a commit, the path is resolved again. If it leads
//! to another folder, nobody who opens the store would find the commit.
//!
//! A mount that disappears leaves the same path on another file system. That alone proves nothing, because a network file system
//! may have been mounted again: the caller then looks whether its store is there.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;

use super::guarded::{self, Guarded};
use crate::{Error, Result};

/// The folder that a path led to when a store was opened.
#[derive(Debug)]
pub(super) struct LocalRoot {
    /// Path without symbolic links.
    pub(super) folder: PathBuf,
    mounted: Mutex<Mounted>,
}

/// The file system of a folder, as it is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mounted {
    device: u64,
    /// Number of the mount, which the system never gives to another; 0 where it has none. A new file system often gets the
    /// device number of one that was unmounted before.
    mount: u64,
}

/// Maximum number of dangling links that are followed, as for links that the system follows.
const MAX_LINKS: u32 = 40;

impl LocalRoot {
    pub(super) fn new(given: &Path) -> io::Result<Self> {
        let folder = resolve(given, MAX_LINKS)?;
        let mounted = Mutex::new(Mounted::of(&folder)?);
        Ok(Self { folder, mounted })
    }

    pub(super) fn mounted(&self) -> Mounted {
        *self.mounted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes another file system for the one of the store.
    pub(super) fn set_mounted(&self, mounted: Mounted) {
        *self.mounted.lock().unwrap_or_else(PoisonError::into_inner) = mounted;
    }
}

/// Creates the client of a local folder.
pub(super) fn local_objects(folder: &Path, fsync: bool) -> Result<Arc<dyn ObjectStore>> {
    let name = || folder.display().to_string();
    let resolved = folder.canonicalize().map_err(|e| Error::io(name(), e))?;
    check_is_text(&resolved).map_err(|e| e.object(name()))?;
    let local = guarded::caught("", || LocalFileSystem::new_with_prefix(folder)).map_err(|e| match folder.try_exists() {
        // Another process has removed it since.
        Ok(false) => Error::io(name(), io::ErrorKind::NotFound.into()),
        _ => Error::storage(name(), e),
    })?;
    Ok(Arc::new(Guarded::new(Arc::new(local.with_fsync(fsync)), "")))
}

/// Refuses a folder that cannot be named as text: `object_store` panics on such a name.
pub(super) fn check_is_text(folder: &Path) -> Result<()> {
    match folder.to_str() {
        Some(_) => Ok(()),
        None => Err(Error::invalid(format!(
            "the folder of a store must have a path in UTF-8, and this one is {}; rename the folder in it whose name is not UTF-8",
            folder.display()
        ))),
    }
}

/// Returns a path without symbolic links. The end of the path need not exist.
fn resolve(path: &Path, links: u32) -> io::Result<PathBuf> {
    match std::fs::canonicalize(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        resolved => return resolved,
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(path.to_owned()) };
    // Without a slash at the end, which would stand for the target.
    match std::fs::read_link(parent.join(name)) {
        // The target of the link is gone. It is still where the path leads.
        Ok(target) if links > 0 => resolve(&parent.join(target), links.saturating_sub(1)),
        _ => Ok(resolve(parent, links)?.join(name)),
    }
}

impl Mounted {
    /// File system of a folder, or of the lowest folder above that exists.
    #[cfg(unix)]
    fn of(folder: &Path) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        for folder in folder.ancestors() {
            match std::fs::metadata(folder) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                found => return Ok(Self { device: found?.dev(), mount: mount_of(folder) }),
            }
        }
        Ok(Self { device: 0, mount: 0 })
    }

    #[cfg(not(unix))]
    fn of(_: &Path) -> io::Result<Self> {
        Ok(Self { device: 0, mount: 0 })
    }
}

/// Number of the mount that a folder lies on, from Linux 6.8 on.
#[cfg(target_os = "linux")]
fn mount_of(folder: &Path) -> u64 {
    /// `STATX_MNT_ID_UNIQUE`
    const UNIQUE: rustix::fs::StatxFlags = rustix::fs::StatxFlags::from_bits_retain(0x4000);
    let found = rustix::fs::statx(rustix::fs::CWD, folder, rustix::fs::AtFlags::empty(), UNIQUE);
    found.ok().filter(|found| found.stx_mask & UNIQUE.bits() != 0).map_or(0, |found| found.stx_mnt_id)
}

#[cfg(all(unix, not(target_os = "linux")))]
fn mount_of(_: &Path) -> u64 {
    0
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::{MAX_LINKS, resolve};

    #[test]
    fn a_path_is_resolved_although_its_end_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let root = std::fs::canonicalize(folder.path()).unwrap();
        let resolved = |path: &str| resolve(&folder.path().join(path), MAX_LINKS).unwrap();
        std::fs::create_dir(root.join("a")).unwrap();
        symlink("a", root.join("current")).unwrap();
        symlink("missing/../b", root.join("dangling")).unwrap();
        symlink("circle", root.join("circle")).unwrap();
        assert_eq!(resolved("current/run/x"), root.join("a/run/x"));
        assert_eq!(resolved("none/run"), root.join("none/run"));
        assert!(resolved("dangling").ends_with("b"));
        assert!(resolve(&root.join("circle"), MAX_LINKS).is_err(), "the system counts links, too");
        std::fs::remove_dir(root.join("a")).unwrap();
        assert_eq!([resolved("current"), resolved("current/")], [root.join("a"), root.join("a")]);
        assert_eq!(resolved("current/run"), root.join("a/run"));
    }
}
