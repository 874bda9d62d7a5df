//! Output files that appear whole or not at all: written to a temporary file, then renamed.

use std::fs::File;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use tensorcask::{Error, Result};

/// Temporary file beside its target. `commit` renames it to the target; dropping it without `commit` removes it.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    temporary: NamedTempFile,
    target: PathBuf,
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
        let mut options = tempfile::Builder::new();
        options.prefix(".").rand_bytes(16).suffix(".tmp");
        #[cfg(unix)]
        options.permissions(std::os::unix::fs::PermissionsExt::from_mode(MODE));
        let temporary = options.tempfile_in(folder).map_err(|e| Error::io(shown, e))?;
        Ok(Self { temporary, target: target.to_owned() })
    }

    pub(crate) fn file(&self) -> &File {
        self.temporary.as_file()
    }

    /// Syncs the file to disk, then renames it to the target.
    pub(crate) fn commit(self) -> Result<()> {
        let Self { temporary, target } = self;
        let fail = |e| Error::io(target.display().to_string(), e);
        temporary.as_file().sync_all().map_err(fail)?;
        temporary.persist(&target).map_err(|e| fail(e.error))?;
        if cfg!(unix) {
            let folder = folder_of(&target);
            let fail = |e| Error::io(folder.display().to_string(), e);
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(fail)?;
        }
        Ok(())
    }
}

fn folder_of(target: &Path) -> &Path {
    target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Permissions of a new file, before the umask applies.
#[cfg(unix)]
const MODE: u32 = 0o666;
