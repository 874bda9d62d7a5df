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
use std::sync::{Mutex, PoisonError};

use super::{Medium, Objects};
use crate::{Error, ErrorKind, Result, boxed};

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

/// Difference between the folder of a store and the folder that its path leads to now.
#[derive(Debug)]
pub(crate) enum RootChange {
    /// The path leads to another folder.
    Elsewhere(PathBuf),
    /// The path leads to another file system, or the same one was mounted again.
    Mounted(Mounted),
}

/// Maximum number of dangling links that are followed, as for links that the system follows.
const MAX_LINKS: u32 = 40;

impl LocalRoot {
    pub(super) fn new(given: &Path) -> io::Result<Self> {
        let folder = resolve(given, MAX_LINKS)?;
        let mounted = Mutex::new(Mounted::of(&folder)?);
        Ok(Self { folder, mounted })
    }

    fn change(&self, given: &Path) -> io::Result<Option<RootChange>> {
        let now = Self::new(given)?;
        let mounted = now.mounted();
        if now.folder != self.folder {
            return Ok(Some(RootChange::Elsewhere(now.folder)));
        }
        Ok((mounted != self.mounted()).then_some(RootChange::Mounted(mounted)))
    }

    fn mounted(&self) -> Mounted {
        *self.mounted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RootChange {
    /// Compares the folder of a local store with the one that its path leads to now.
    #[boxed]
    pub(crate) async fn of(objects: &Objects) -> Result<Option<Self>> {
        let (Medium::Local(given), Some(root)) = (&objects.medium, objects.root_folder.get().cloned()) else { return Ok(None) };
        let _pending = objects.noted("look up", "the root folder");
        let given = given.clone();
        let compared = tokio::task::spawn_blocking(move || root.change(&given)).await;
        let compared = compared.map_err(|e| Error::new(ErrorKind::Storage, format!("its path could not be resolved: {e}")))?;
        compared.map_err(|e| Error::io(&objects.url, e))
    }

    /// Returns the error of a changed root; `None` if the store that the caller knows `is_there` on the other file system, which
    /// then counts as that of the store.
    pub(crate) fn judge(&self, objects: &Objects, is_there: bool) -> Option<Error> {
        let folder = objects.local_folder().unwrap_or_else(|| Path::new("")).display();
        let message = match self {
            Self::Elsewhere(now) => format!(
                "the path of the store now leads to {}, and led to {folder} when the store was opened: a symbolic link was switched. \
                 Nothing was committed. Open the store again to use the new place",
                now.display()
            ),
            Self::Mounted(mounted) if is_there => {
                if let Some(root) = objects.root_folder.get() {
                    *root.mounted.lock().unwrap_or_else(PoisonError::into_inner) = *mounted;
                }
                return None;
            }
            Self::Mounted(_) => format!(
                "{folder} now lies on another file system than when the store was opened, without this store: a mount disappeared or was \
                 replaced. Nothing was committed. Mount the file system again, or open the store again to begin a new one here"
            ),
        };
        Some(Error::new(ErrorKind::Storage, message).object(&objects.url).clause("log 5.6"))
    }
}

impl Objects {
    /// Folder of a local store: the one that its path led to when it was opened, or the path itself before that.
    pub(crate) fn local_folder(&self) -> Option<&Path> {
        match (&self.medium, self.root_folder.get()) {
            (Medium::Local(_), Some(root)) => Some(&root.folder),
            (Medium::Local(given), None) => Some(given),
            _ => None,
        }
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
