//! Opens files and lists folders below the run's folder. Follows no symbolic link, not even one that was put there.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, fstat, openat, statat};
use rustix::io::Errno;

use super::resource::Resource;

/// A file, opened.
#[derive(Debug)]
pub(super) struct OpenFile {
    pub file: std::fs::File,
    pub facts: FileFacts,
}

/// Size and time of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileFacts {
    pub bytes: u64,
    pub modified: SystemTime,
}

/// A file or folder in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub resource: Resource,
    /// `None` for a folder.
    pub file: Option<FileFacts>,
}

/// Opens a file. Blocks.
pub(super) fn open_file(root: &Path, resource: &Resource) -> rustix::io::Result<OpenFile> {
    let Some((name, folders)) = resource.names().split_last() else { return Err(Errno::ISDIR) };
    let folder = open_folder(root, folders)?;
    let file = openat(&folder, name.as_str(), OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
    let found = fstat(&file)?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => Ok(OpenFile { file: file.into(), facts: FileFacts::of(&found) }),
        _ => Err(Errno::NOENT),
    }
}

/// Lists the served entries of a folder, and those of its folders if `depth` allows. Blocks. Fails with `Errno::OVERFLOW`
/// if there are more than `most`.
pub(super) fn list(root: &Path, resource: &Resource, depth: Depth, most: usize) -> rustix::io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let mut open = vec![resource.clone()];
    while let Some(folder) = open.pop() {
        let opened = match open_folder(root, folder.names()) {
            Ok(opened) => opened,
            // Removed since its parent was listed.
            Err(Errno::NOENT) if folder != *resource => continue,
            Err(error) => return Err(error),
        };
        for name in names_in(&opened)? {
            let Some(child) = folder.child(&name) else { continue };
            let Ok(found) = statat(&opened, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let file = match FileType::from_raw_mode(found.st_mode) {
                FileType::RegularFile => Some(FileFacts::of(&found)),
                FileType::Directory => None,
                _ => continue,
            };
            if file.is_none() && depth == Depth::All {
                open.push(child.clone());
            }
            entries.push(Entry { resource: child, file });
            if entries.len() > most {
                return Err(Errno::OVERFLOW);
            }
        }
    }
    Ok(entries)
}

/// How far a listing goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Depth {
    One,
    All,
}

impl FileFacts {
    fn of(found: &rustix::fs::Stat) -> Self {
        let since = Duration::new(u64::try_from(found.st_mtime).unwrap_or(0), u32::try_from(found.st_mtime_nsec).unwrap_or(0));
        Self { bytes: u64::try_from(found.st_size).unwrap_or(0), modified: UNIX_EPOCH + since }
    }

    /// A tag that changes when the file is replaced.
    pub(super) fn tag(&self) -> String {
        let since = self.modified.duration_since(UNIX_EPOCH).unwrap_or_default();
        format!("\"{:x}-{:x}\"", self.bytes, since.as_nanos())
    }
}

/// Opens a folder, one name after the other, so that no name is a link.
fn open_folder(root: &Path, names: &[String]) -> rustix::io::Result<OwnedFd> {
    const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
    let mut folder = rustix::fs::open(root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    for name in names {
        folder = openat(&folder, name.as_str(), FLAGS, Mode::empty())?;
    }
    Ok(folder)
}

fn names_in(folder: &OwnedFd) -> rustix::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        // A name that is not UTF-8 is not served.
        if let Ok(name) = entry?.file_name().to_str() {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}
