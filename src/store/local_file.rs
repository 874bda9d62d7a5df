//! A large file of a local store that is written in parts.
//!
//! A save may fail, and a process may be killed, at any moment: also on a full disk, where nothing else can be written until
//! the bytes of the unfinished file are free again. So the file has no name until it is complete, where the system can give
//! a name to such a file (Linux, on most of its file systems). It then goes away with the process. Elsewhere the file has a
//! temporary name like those of `object_store`, and is removed as soon as the upload is dropped, without a runtime.

use std::fs::File;
use std::io::{Error, ErrorKind, Result, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use object_store::{MultipartUpload, PutPayload, PutResult, UploadPart};

/// Maps a local file into memory. The file must not change while the bytes are in use.
pub(crate) fn map_file(path: &Path) -> crate::Result<Bytes> {
    tensorcask_kernels::map::map_file(path).map_err(|e| crate::Error::io(path.display().to_string(), e))
}

/// Upload of one file.
#[derive(Debug)]
pub(super) struct LocalFile {
    unfinished: Arc<Unfinished>,
    offset: u64,
}

/// The file, until it is complete. Dropping it removes the file.
#[derive(Debug)]
struct Unfinished {
    path: PathBuf,
    /// Temporary name; `None` if the file has none.
    staged: Option<PathBuf>,
    file: Mutex<Option<File>>,
    fsync: bool,
}

/// Maximum number of temporary names that are tried.
const MAX_NAMES: u32 = 1000;

impl LocalFile {
    /// Begins a file that will replace the one at `path`, if there is one.
    pub(super) async fn begin(path: PathBuf, fsync: bool) -> object_store::Result<Self> {
        let begun = blocking(move || Unfinished::begin(path, fsync)).await;
        begun.map(|unfinished| Self { unfinished: Arc::new(unfinished), offset: 0 })
    }
}

#[async_trait::async_trait]
impl MultipartUpload for LocalFile {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let unfinished = self.unfinished.clone();
        let offset = self.offset;
        self.offset = offset.saturating_add(data.content_length() as u64);
        Box::pin(blocking(move || unfinished.write(offset, &data)))
    }

    async fn complete(&mut self) -> object_store::Result<PutResult> {
        let unfinished = self.unfinished.clone();
        blocking(move || unfinished.complete()).await?;
        Ok(PutResult { e_tag: None, version: None, extensions: Default::default() })
    }

    async fn abort(&mut self) -> object_store::Result<()> {
        let unfinished = self.unfinished.clone();
        blocking(move || unfinished.remove()).await
    }
}

impl Drop for LocalFile {
    /// Frees the space of an unfinished file now, although a write may be under way that cannot be stopped.
    fn drop(&mut self) {
        self.unfinished.discard();
    }
}

impl Unfinished {
    fn begin(path: PathBuf, fsync: bool) -> Result<Self> {
        let folder = path.parent().unwrap_or_else(|| Path::new("/"));
        if !folder.is_dir() {
            create_folder(folder, fsync)?;
        }
        if let Some(file) = without_name(folder) {
            return Ok(Self { path, staged: None, file: Mutex::new(Some(file)), fsync });
        }
        for number in 1..=MAX_NAMES {
            let staged = temporary_name(&path, number);
            match File::options().read(true).write(true).create_new(true).open(&staged) {
                Ok(file) => return Ok(Self { path, staged: Some(staged), file: Mutex::new(Some(file)), fsync }),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
            }
        }
        Err(Error::new(ErrorKind::AlreadyExists, "too many unfinished files of this name; run `tensorcask doctor`"))
    }

    fn write(&self, offset: u64, data: &PutPayload) -> Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let file = file.as_mut().ok_or_else(aborted)?;
        file.seek(SeekFrom::Start(offset))?;
        data.iter().try_for_each(|piece| file.write_all(piece))?;
        if self.fsync {
            begin_writeback(file, offset, data.content_length());
        }
        Ok(())
    }

    /// Makes the bytes durable, and gives the file its name.
    fn complete(&self) -> Result<()> {
        let mut slot = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let file = slot.as_ref().ok_or_else(aborted)?;
        if self.fsync {
            file.sync_all()?;
        }
        match &self.staged {
            Some(staged) => std::fs::rename(staged, &self.path)?,
            None => self.give_name(file)?,
        }
        // The name is the file's from now on: nothing is left to remove.
        *slot = None;
        match self.path.parent() {
            Some(folder) if self.fsync => File::open(folder)?.sync_all(),
            _ => Ok(()),
        }
    }

    /// Gives a file without a name its name. A link cannot replace a file, so it takes a temporary name first if one exists.
    fn give_name(&self, file: &File) -> Result<()> {
        match link(file, &self.path) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            linked => return linked,
        }
        for number in 1..=MAX_NAMES {
            let staged = temporary_name(&self.path, number);
            match link(file, &staged) {
                Ok(()) => return std::fs::rename(&staged, &self.path),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
            }
        }
        Err(Error::new(ErrorKind::AlreadyExists, "too many unfinished files of this name; run `tensorcask doctor`"))
    }

    fn discard(&self) {
        if let Err(error) = self.remove() {
            tracing::warn!(file = ?self.staged, %error, "an unfinished file could not be removed");
        }
    }

    fn remove(&self) -> Result<()> {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner).take();
        match (&self.staged, file) {
            (Some(staged), Some(_)) => std::fs::remove_file(staged),
            _ => Ok(()),
        }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.discard();
    }
}

/// Opens a file that has no name yet; `None` if the system has no such files here.
#[cfg(target_os = "linux")]
fn without_name(folder: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    // `link` needs this folder.
    if !Path::new(DESCRIPTORS).is_dir() {
        return None;
    }
    let flags = i32::try_from(rustix::fs::OFlags::TMPFILE.bits()).ok()?;
    File::options().read(true).write(true).custom_flags(flags).open(folder).ok()
}

/// Gives a file a name.
#[cfg(target_os = "linux")]
fn link(file: &File, path: &Path) -> Result<()> {
    use std::os::fd::AsRawFd;
    let descriptor = format!("{DESCRIPTORS}/{}", file.as_raw_fd());
    Ok(rustix::fs::linkat(rustix::fs::CWD, descriptor, rustix::fs::CWD, path, rustix::fs::AtFlags::SYMLINK_FOLLOW)?)
}

/// Begins to write a part to the disk, without waiting. Otherwise the disk idles while the next parts are encoded, and
/// `fsync` waits for the whole file at the end. Linux does this for pages that are no longer needed.
#[cfg(target_os = "linux")]
fn begin_writeback(file: &File, offset: u64, bytes: usize) {
    let Some(bytes) = std::num::NonZeroU64::new(bytes as u64) else { return };
    // Only advice: a file system may lack it.
    let _ignored = rustix::fs::fadvise(file, offset, Some(bytes), rustix::fs::Advice::DontNeed);
}

#[cfg(not(target_os = "linux"))]
fn begin_writeback(_: &File, _: u64, _: usize) {}

/// Folder with a link to each open file of this process.
#[cfg(target_os = "linux")]
const DESCRIPTORS: &str = "/proc/self/fd";

#[cfg(not(target_os = "linux"))]
fn without_name(_: &Path) -> Option<File> {
    None
}

#[cfg(not(target_os = "linux"))]
fn link(_: &File, _: &Path) -> Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// Name of an unfinished file, by the rule of `object_store`: listings leave it out.
fn temporary_name(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!("#{number}"));
    name.into()
}

/// Creates a folder of a store, and makes it durable.
pub(super) fn create_folder(folder: &Path, fsync: bool) -> Result<()> {
    let existing = folder.ancestors().find(|folder| folder.is_dir()).map(PathBuf::from);
    std::fs::create_dir_all(folder)?;
    for folder in folder.ancestors().filter(|_| fsync) {
        File::open(folder)?.sync_all()?;
        if Some(folder) == existing.as_deref() {
            break;
        }
    }
    Ok(())
}

fn aborted() -> Error {
    Error::other("the upload was given up")
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> object_store::Result<T> {
    let done = tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(Error::other(e)));
    done.map_err(|e| object_store::Error::Generic { store: "LocalFileSystem", source: Box::new(e) })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use object_store::{MultipartUpload, PutPayload};

    use super::{LocalFile, Unfinished, temporary_name};

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn a_file_appears_whole_and_replaces_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("casks/a.cask");
        for bytes in [b"first", b"again"] {
            let mut file = LocalFile::begin(path.clone(), true).await.unwrap();
            let (head, tail) = bytes.split_at(2);
            let head = file.put_part(PutPayload::from(head.to_vec()));
            let tail = file.put_part(PutPayload::from(tail.to_vec()));
            tail.await.unwrap();
            head.await.unwrap();
            assert_ne!(std::fs::read(&path).unwrap_or_default(), bytes);
            file.complete().await.unwrap();
            drop(file);
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
            assert_eq!(names(path.parent().unwrap()), ["a.cask"]);
        }
    }

    /// Without a runtime, and with the same code where the system has no files without a name.
    #[test]
    fn an_unfinished_file_goes_away_when_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.cask");
        std::fs::write(temporary_name(&path, 1), "of a killed process").unwrap();
        let unfinished = Unfinished::begin(path.clone(), false).unwrap();
        unfinished.write(0, &PutPayload::from_static(b"part")).unwrap();
        drop(unfinished);
        let staged = temporary_name(&path, 2);
        std::fs::write(&staged, "part").unwrap();
        let file = std::sync::Mutex::new(Some(std::fs::File::open(&staged).unwrap()));
        drop(Unfinished { path, staged: Some(staged), file, fsync: false });
        assert_eq!(names(folder.path()), ["a.cask#1"]);
    }
}
