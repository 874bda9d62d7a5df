//! Output files that appear whole or not at all: written to a temporary file, then renamed.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use tensorcask::wire::Id;
use tensorcask::{Error, Result};

/// Temporary file beside its target. `commit` renames it to the target; dropping it without `commit` removes it.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    file: File,
    temporary: PathBuf,
    target: PathBuf,
    committed: bool,
}

impl AtomicFile {
    pub(crate) fn create(target: &Path) -> Result<Self> {
        let shown = target.display().to_string();
        if target.file_name().is_none() {
            return Err(Error::invalid("the path does not name a file").object(shown));
        }
        // Replacing a device or a folder is never intended.
        if std::fs::metadata(target).is_ok_and(|found| !found.is_file()) {
            return Err(Error::invalid("the path exists and is not a regular file; choose another").object(shown));
        }
        let folder = folder_of(target);
        if !folder.exists() {
            let message = format!("the folder does not exist, so `{shown}` cannot be written; create the folder first");
            return Err(Error::not_found(message).object(folder.display().to_string()));
        }
        // The temporary name is short even if the name of the target is at the limit.
        let temporary = target.with_file_name(format!(".{:.16}.tmp", Id::random()?.to_hex()));
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary).map_err(|e| Error::io(shown, e))?;
        Ok(Self { file, temporary, target: target.to_owned(), committed: false })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Syncs the file to disk, then renames it to the target.
    pub(crate) fn commit(mut self) -> Result<()> {
        let fail = |e| Error::io(self.target.display().to_string(), e);
        self.file.sync_all().map_err(fail)?;
        std::fs::rename(&self.temporary, &self.target).map_err(fail)?;
        self.committed = true;
        if cfg!(unix) {
            let folder = folder_of(&self.target);
            let fail = |e| Error::io(folder.display().to_string(), e);
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(fail)?;
        }
        Ok(())
    }
}

fn folder_of(target: &Path) -> &Path {
    target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.committed {
            // The original error matters more than a failed clean-up.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}
