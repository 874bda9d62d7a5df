//! Names the reason if a file system refuses to create a file under a name that must be free.
//!
//! `object_store` writes such a file under another name and then links it, because a link never replaces a file. On exFAT, FAT
//! and some network file systems there are no hard links, and the error only says that an operation is not permitted. So after
//! such an error, a scratch file is linked: whether that works is a proof, and the error can say what is missing.

use std::path::Path;

use super::Created;
use crate::wire::Id;
use crate::{Error, ErrorKind};

/// Explains the error of a create on local disk: there may be no hard links. SFTP has one error for all failures, also for a name
/// that is taken.
pub(super) fn explained(error: object_store::Error, root: &Path, object: &str) -> Result<Created, object_store::Error> {
    if !may_be_refused(&error) {
        return Err(error);
    }
    match refusal(root) {
        Some(refusal) => Err(object_store::Error::Generic { store: "tensorcask", source: Box::new(refusal) }),
        None if root.join(object).is_file() => Ok(Created::Exists),
        None => Err(error),
    }
}

/// Whether an error of a write to a local file may mean that there are no hard links.
fn may_be_refused(error: &object_store::Error) -> bool {
    use std::io::ErrorKind::{PermissionDenied, TooManyLinks, Unsupported};
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    causes.filter_map(|cause| cause.downcast_ref::<std::io::Error>()).any(|cause| {
        matches!(cause.kind(), PermissionDenied | Unsupported | TooManyLinks)
            || cause.raw_os_error().is_some_and(|n| NOT_SUPPORTED.contains(&n))
    })
}

/// Returns the error of a folder whose file system has no hard links; `None` if it has.
fn refusal(folder: &Path) -> Option<Error> {
    let id = Id::random().ok()?;
    let [file, link] = ["file", "link"].map(|what| folder.join(format!(".tensorcask-{what}-{id}")));
    std::fs::write(&file, b"tensorcask looks for hard links").ok()?;
    let linked = std::fs::hard_link(&file, &link);
    for path in [link, file] {
        // A scratch file that stays is harmless.
        let _ = std::fs::remove_file(path);
    }
    let cause = linked.err()?;
    let kind = kind_of(folder).map_or_else(String::new, |kind| format!(" ({kind})"));
    let message = format!(
        "the file system here{kind} has no hard links ({cause}), so two jobs could overwrite each other's commits, and tensorcask \
         refuses it. Use another disk, NFS, or an object store"
    );
    Some(Error::new(ErrorKind::UnsafeStore, message).object(folder.display().to_string()).clause("log 5").source(cause))
}

/// Type of the file system of a folder, such as `exfat` or `fuse.sshfs`, as far as Linux says.
fn kind_of(folder: &Path) -> Option<String> {
    let folder = folder.canonicalize().ok()?;
    kind_in(&std::fs::read_to_string("/proc/self/mountinfo").ok()?, &folder)
}

/// The type of the mount that holds a folder. Of mounts at one place, the last is seen.
fn kind_in(mounts: &str, folder: &Path) -> Option<String> {
    let parsed = mounts.lines().filter_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        // Blanks in names are written as \040.
        let place = mount.split(' ').nth(4)?.replace("\\040", " ");
        folder.starts_with(&place).then(|| (place.len(), file_system.split(' ').next()))
    });
    parsed.max_by_key(|(length, _)| *length).and_then(|(_, kind)| kind.map(str::to_owned))
}

/// `EOPNOTSUPP` and `ENOTSUP` of Linux and macOS.
const NOT_SUPPORTED: [i32; 3] = [95, 102, 45];

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{kind_in, refusal};

    #[test]
    fn a_disk_with_hard_links_is_not_refused_and_stays_clean() {
        let folder = tempfile::tempdir().unwrap();
        assert!(refusal(folder.path()).is_none());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(refusal(Path::new("/no/such/folder")).is_none(), "nothing is proven");
    }

    #[test]
    fn the_innermost_mount_counts() {
        let mounts = "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 8:2 / /mnt/my\\040disk rw shared:1 - exfat /dev/sdb rw\n\
                      3 1 0:9 / /mnt rw - tmpfs tmpfs rw\n4 1 0:9 / /mnt rw - fuse.sshfs host: rw\n";
        let kind = |folder: &str| kind_in(mounts, Path::new(folder));
        assert_eq!(kind("/mnt/my disk/runs"), Some("exfat".into()));
        assert_eq!((kind("/mnt/x"), kind("/home")), (Some("fuse.sshfs".into()), Some("ext4".into())));
    }
}
