//! Compares the folder of a local store with the one that its path leads to now, before each commit.

use std::io;
use std::path::{Path, PathBuf};

use super::root::{LocalRoot, Mounted};
use super::{Medium, Objects};
use crate::{Error, ErrorKind, Result, boxed};

/// Difference between the folder of a store and the folder that its path leads to now.
#[derive(Debug)]
pub(crate) enum RootChange {
    /// The path leads to another folder.
    Elsewhere(PathBuf),
    /// The path leads to another file system, or the same one was mounted again.
    Mounted(Mounted),
}

impl RootChange {
    /// Compares the folder of a local store with the one that its path leads to now.
    #[boxed]
    pub(crate) async fn of(objects: &Objects) -> Result<Option<Self>> {
        let (Medium::Local(given), Some(root)) = (&objects.medium, objects.local_root().cloned()) else { return Ok(None) };
        let _pending = objects.noted("look up", "the root folder");
        let given = given.clone();
        let compared = tokio::task::spawn_blocking(move || Self::between(&root, &given)).await;
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
                if let Some(root) = objects.local_root() {
                    root.set_mounted(*mounted);
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

    fn between(root: &LocalRoot, given: &Path) -> io::Result<Option<Self>> {
        let now = LocalRoot::new(given)?;
        let mounted = now.mounted();
        if now.folder != root.folder {
            return Ok(Some(Self::Elsewhere(now.folder)));
        }
        Ok((mounted != root.mounted()).then_some(Self::Mounted(mounted)))
    }
}
