//! Objects of a store on local disk: regular files below its root. Spec: `spec/README.md`, clause 2.4.
//!
//! A link may lead out of the store, and a FIFO or a device blocks its reader. So no link below the root is followed, and only
//! regular files are objects. The root itself may be a link.

use std::fs::{DirEntry, FileType, Metadata};
use std::io::ErrorKind as Io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use super::Listed;
use super::open::FOLDERS;
use crate::wire::is_object;
use crate::{Error, ErrorKind, Result};

/// Metadata of the file of an object; `None` if it does not exist. Fails if something else lies there.
pub(super) fn file_of(root: &Path, object: &str) -> Result<Option<Metadata>> {
    let (folder, name) = object.rsplit_once('/').unwrap_or(("", object));
    let Some(folder) = folder_of(root, folder)? else { return Ok(None) };
    match std::fs::symlink_metadata(folder.join(name)) {
        Ok(found) if found.is_file() => Ok(Some(found)),
        Ok(found) => Err(no_object(object, found.file_type())),
        Err(e) if is_absence(&e) => Ok(None),
        Err(e) => Err(Error::io(object, e)),
    }
}

/// Path of a folder below the root; `None` if it does not exist. Fails if a link or a file lies there.
fn folder_of(root: &Path, folder: &str) -> Result<Option<PathBuf>> {
    let mut path = root.to_path_buf();
    for name in folder.split('/').filter(|name| !name.is_empty()) {
        path.push(name);
        match std::fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() => {}
            Ok(found) => return Err(no_object(folder, found.file_type())),
            Err(e) if is_absence(&e) => return Ok(None),
            Err(e) => return Err(Error::io(folder, e)),
        }
    }
    Ok(Some(path))
}

/// Names of the entries of a folder below the root that have this type.
pub(super) fn names(root: &Path, folder: &str, has_type: fn(&FileType) -> bool) -> Result<Vec<String>> {
    let name = |entry: DirEntry| match entry.file_type() {
        Ok(found) => Ok(has_type(&found).then(|| entry.file_name().to_string_lossy().into_owned())),
        Err(e) if is_absence(&e) => Ok(None),
        Err(e) => Err(Error::io(folder, e)),
    };
    entries(root, folder)?.into_iter().filter_map(|entry| name(entry).transpose()).collect()
}

/// Entries of a folder below the root; none if it does not exist.
fn entries(root: &Path, folder: &str) -> Result<Vec<DirEntry>> {
    let Some(path) = folder_of(root, folder)? else { return Ok(Vec::new()) };
    let read = std::fs::read_dir(path).and_then(|entries| entries.collect());
    match read {
        Err(e) if is_absence(&e) => Ok(Vec::new()),
        read => read.map_err(|e| Error::io(folder, e)),
    }
}

/// Lists the objects in a folder and in the folders below it.
pub(super) fn list(root: &Path, folder: &str) -> Result<Vec<Listed>> {
    walk(root, folder, is_object)
}

/// Lists the files of interrupted writes, `PATH#NUMBER` for an object with this path.
pub(super) fn staged(root: &Path) -> Result<Vec<Listed>> {
    let is_staged = |path: &str| {
        let object = path.rsplit_once('#').filter(|(_, number)| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()));
        object.is_some_and(|(object, _)| is_object(object))
    };
    let mut found = Vec::new();
    for folder in FOLDERS.iter().chain(&["receipts", "offers", "probe"]) {
        // A link leads to files of others.
        match walk(root, folder, is_staged) {
            Err(e) if e.kind() == ErrorKind::Corrupt => {}
            files => found.extend(files?),
        }
    }
    found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Deletes a file. A file that is already gone is not an error.
pub(super) fn remove(root: &Path, path: &str) -> Result<()> {
    if file_of(root, path)?.is_none() {
        return Ok(());
    }
    match std::fs::remove_file(root.join(path)) {
        Err(e) if !is_absence(&e) => Err(Error::io(path, e)),
        _ => Ok(()),
    }
}

/// Lists the regular files with such paths in a folder and in the folders below it.
fn walk(root: &Path, folder: &str, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<Listed>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in entries(root, &folder)? {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            // An entry that is gone by now belonged to another process. Neither call follows a link.
            let metadata = match entry.file_type() {
                Ok(kind) if kind.is_dir() => {
                    folders.push(path);
                    continue;
                }
                Ok(kind) if kind.is_file() && is_wanted(&path) => entry.metadata(),
                Ok(_) => continue,
                Err(e) => Err(e),
            };
            match metadata {
                Ok(metadata) => found.push(Listed::of_file(path, &metadata)),
                Err(e) if is_absence(&e) => {}
                Err(e) => return Err(Error::io(path, e)),
            }
        }
    }
    Ok(found)
}

impl Listed {
    /// An object in a file.
    pub(super) fn of_file(path: String, metadata: &Metadata) -> Self {
        // A file of unknown age counts as new: nothing deletes it.
        let since = metadata.modified().map(|time| time.duration_since(UNIX_EPOCH).unwrap_or_default());
        let modified_ms = since.map_or(u64::MAX, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX));
        Self { path, bytes: metadata.len(), modified_ms }
    }
}

/// Whether nothing lies at a path. A file in the place of the root is no absence: it says nothing about the store.
fn is_absence(error: &std::io::Error) -> bool {
    error.kind() == Io::NotFound
}

fn no_object(object: &str, kind: std::fs::FileType) -> Error {
    let what = match (kind.is_symlink(), kind.is_dir()) {
        (true, _) => "is a symbolic link, which tensorcask does not follow within a store; put the files themselves in its place",
        (_, true) => "is a folder, and should be a file",
        _ if kind.is_file() => "is a file, and should be a folder; remove it, or put the folder of the store in its place",
        _ => "is neither a file nor a folder; remove it, or put the file of the store in its place",
    };
    Error::corrupt(what).object(object).clause("README 2.4")
}
