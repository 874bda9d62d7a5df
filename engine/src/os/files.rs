//! Small operations on files and folders that name the path in their errors.

use std::fs::{DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use tensorcask::{Error, Result};

/// Creates a folder that must not exist yet.
pub(crate) fn create_folder(path: &Path) -> Result<()> {
    DirBuilder::new().mode(0o700).create(path).map_err(|e| Error::io(path.display().to_string(), e))
}

/// Removes a folder and everything in it; a missing folder is no error.
pub(crate) fn remove_folder(path: &Path) -> Result<()> {
    ignore_missing(path, std::fs::remove_dir_all(path))
}

/// Removes a file; a missing file is no error.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    ignore_missing(path, std::fs::remove_file(path))
}

/// Reads a small file; `None` if it is missing. Any other failure is an error: who takes a file that cannot be read for a missing
/// one may write over it.
pub(crate) fn read_file(path: &Path) -> Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(path.display().to_string(), e)),
    }
}

/// Whether a file or folder is there, or cannot be looked up: then the next look at it fails.
pub(crate) fn may_exist(path: &Path) -> bool {
    !matches!(path.try_exists(), Ok(false))
}

/// Replaces a small file; readers see the old or the new content.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let fail = |e: std::io::Error| Error::io(path.display().to_string(), e);
    // The process id keeps a trainer and the agent from writing to the same temporary file.
    let new = path.with_extension(format!("new-{}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new).map_err(fail)?;
    let replaced = file.write_all(bytes).and_then(|()| std::fs::rename(&new, path)).map_err(fail);
    if replaced.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    replaced
}

/// Lists the folders within a folder by name; none if the folder is missing.
pub(crate) fn list_folders(root: &Path) -> Result<Vec<PathBuf>> {
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

/// Lists the numbers `n` of folders named `<prefix><n>`, ascending.
pub(crate) fn list_numbered(root: &Path, prefix: &str) -> Result<Vec<u64>> {
    let number = |path: PathBuf| path.file_name()?.to_str()?.strip_prefix(prefix)?.parse().ok();
    let mut found: Vec<u64> = list_folders(root)?.into_iter().filter_map(number).collect();
    found.sort_unstable();
    Ok(found)
}

fn ignore_missing(path: &Path, removed: std::io::Result<()>) -> Result<()> {
    match removed {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path.display().to_string(), e)),
        _ => Ok(()),
    }
}
