//! Operations on whole small objects: get, create, list, delete.

use std::io::Read;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::{ObjectStoreExt, PutMode, PutOptions, PutPayload};

use super::{Medium, Objects, concurrently, hard_links};
use crate::{Error, ErrorKind, Limits, Result, boxed};

/// Outcome of a put-if-absent.
#[derive(Debug)]
pub(crate) enum Created {
    /// The object was written and is durable.
    Written,
    /// An object of that name already exists, or a lost answer made it look so.
    Exists,
}

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listed {
    /// Path below the store's root.
    pub path: String,
    pub bytes: u64,
    /// Last write, in milliseconds since 1970, by the clock of the storage.
    pub modified_ms: u64,
}

impl Objects {
    /// Reads a whole object of at most `max_bytes`.
    #[boxed]
    pub(crate) async fn get(&self, object: &str, max_bytes: u64) -> Result<Bytes> {
        self.counters.add(1, 0, 0);
        let client = self.client()?;
        if let Medium::Local(root) = &self.medium {
            let (path, object) = (root.join(object), object.to_owned());
            let bytes = blocking(object.clone(), move || read_file(&path, &object, max_bytes)).await?;
            self.counters.add(0, bytes.len() as u64, 0);
            return Ok(bytes);
        }
        let result = client.get(&self.path(object)).await.map_err(|e| Error::storage(object, e))?;
        Limits::check(result.meta.size, max_bytes, "size of the object").map_err(|e| e.object(object))?;
        let declared = result.meta.size;
        let bytes = result.bytes().await.map_err(|e| Error::storage(object, e))?;
        if bytes.len() as u64 != declared {
            return Err(Error::new(ErrorKind::Storage, format!("{} of {declared} bytes arrived", bytes.len())).object(object));
        }
        self.counters.add(0, declared, 0);
        Ok(bytes)
    }

    /// Reads a whole object, or returns `None` if it does not exist.
    #[boxed]
    pub(crate) async fn get_if_present(&self, object: &str, max_bytes: u64) -> Result<Option<Bytes>> {
        match self.get(object, max_bytes).await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Writes an object that must not exist yet.
    #[boxed]
    pub(crate) async fn create(&self, object: &str, bytes: Bytes) -> Result<Created, object_store::Error> {
        self.counters.add(1, 0, bytes.len() as u64);
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let client = self.client().map_err(|e| object_store::Error::Generic { store: "tensorcask", source: Box::new(e) })?;
        match client.put_opts(&self.path(object), PutPayload::from(bytes), options).await {
            Ok(_) => Ok(Created::Written),
            Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => Ok(Created::Exists),
            Err(e) => match &self.medium {
                Medium::Local(root) => hard_links::explained(e, root, object),
                Medium::Memory | Medium::Remote => Err(e),
            },
        }
    }

    /// Writes an object with a unique name. If a lost answer makes the object look like an existing one, its bytes are
    /// our own.
    #[boxed]
    pub(crate) async fn create_unique(&self, object: &str, bytes: Bytes) -> Result<()> {
        // A server may answer *conflict* to the loser of a race that nobody won. Then no object exists.
        for _ in 0..3 {
            if let Created::Written = self.create(object, bytes.clone()).await.map_err(|e| Error::storage(object, e))? {
                return Ok(());
            }
            match self.get_if_present(object, bytes.len() as u64).await? {
                Some(found) if found == bytes => return Ok(()),
                Some(_) => {
                    return Err(Error::corrupt("an object of this unique or content-addressed name holds other bytes").object(object));
                }
                None => {}
            }
        }
        Err(Error::new(ErrorKind::Storage, "the storage reports that the object exists, but does not return it; try again").object(object))
    }

    /// Writes an object whose name is the digest of its bytes. An existing object of that name is correct, or is
    /// repaired.
    ///
    /// On local disk the object is always written again. An earlier, failed attempt may have left bytes that are not
    /// durable, and reading them back would prove nothing.
    #[boxed]
    pub(crate) async fn put_content_addressed(&self, object: &str, bytes: Bytes) -> Result<()> {
        if self.medium != Medium::Remote {
            return self.put_whole(object, PutPayload::from(bytes)).await;
        }
        match self.create_unique(object, bytes.clone()).await {
            Err(e) if e.kind().is_damaged_object() => {
                tracing::warn!(object, "the object is damaged; writing it again");
                self.put_whole(object, PutPayload::from(bytes)).await
            }
            other => other,
        }
    }

    /// Writes an object and overwrites an existing one. A server that answers *conflict* asks for another attempt.
    #[boxed]
    pub(crate) async fn put_whole(&self, object: &str, payload: PutPayload) -> Result<()> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            self.counters.add(1, 0, payload.content_length() as u64);
            match self.client()?.put(&self.path(object), payload.clone()).await {
                Ok(_) => return Ok(()),
                Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) if attempts < 3 => {}
                Err(e) => return Err(unconditional(object, e)),
            }
        }
    }

    /// Lists the objects in a folder, ordered by name.
    #[boxed]
    pub(crate) async fn list(&self, folder: &str) -> Result<Vec<Listed>> {
        self.counters.add(1, 0, 0);
        let root = self.root.clone();
        let prefix = self.path(folder);
        let mut found: Vec<Listed> = self
            .client()?
            .list(Some(&prefix))
            .try_filter_map(|meta| {
                let relative = meta.location.prefix_match(&root).map(|parts| {
                    let parts: Vec<String> = parts.map(|part| part.as_ref().to_owned()).collect();
                    parts.join("/")
                });
                futures::future::ok(relative.map(|path| Listed { path, bytes: meta.size, modified_ms: modified_ms(&meta) }))
            })
            .try_collect()
            .await
            .map_err(|e| Error::storage(folder, e))?;
        found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    /// Lists the names of the objects in a folder that sort after `after`, ascending. Costs one request on an object
    /// store. On local disk, reads the folder but not the metadata of each file, which is the cost of an `object_store`
    /// listing.
    #[boxed]
    pub(crate) async fn names_after(&self, folder: &str, after: &str) -> Result<Vec<String>> {
        self.counters.add(1, 0, 0);
        let mut names: Vec<String> = match &self.medium {
            Medium::Local(root) => {
                let path = root.join(folder);
                let read = tokio::task::spawn_blocking(move || -> std::io::Result<Vec<String>> {
                    let entries = match std::fs::read_dir(&path) {
                        Ok(entries) => entries,
                        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
                        Err(e) => return Err(e),
                    };
                    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
                });
                let read =
                    read.await.map_err(|e| Error::new(ErrorKind::Storage, format!("the folder could not be read: {e}")).object(folder))?;
                read.map_err(|e| Error::io(folder, e))?
            }
            Medium::Memory | Medium::Remote => {
                let (prefix, offset) = (self.path(folder), self.path(&format!("{folder}/{after}")));
                let listed = self.client()?.list_with_offset(Some(&prefix), &offset);
                let names = listed.map_ok(|meta| meta.location.filename().unwrap_or_default().to_owned());
                names.try_collect().await.map_err(|e| Error::storage(folder, e))?
            }
        };
        names.retain(|name| name.as_str() > after);
        names.sort_unstable();
        Ok(names)
    }

    /// Returns the sizes of objects, or `None` for those that do not exist. Sends `limit` requests at once.
    #[boxed]
    pub(crate) async fn sizes(&self, objects: Vec<String>, limit: usize) -> Result<Vec<Option<u64>>> {
        if let Medium::Local(root) = &self.medium {
            self.counters.add(objects.len() as u64, 0, 0);
            let root = root.clone();
            return blocking(self.url.clone(), move || objects.iter().map(|object| file_bytes(&root.join(object), object)).collect()).await;
        }
        let size = |object: String| async move { Ok(self.head_if_present(&object).await?.map(|found| found.bytes)) };
        concurrently(limit, objects.into_iter().map(size)).await
    }

    /// Returns size and time of an object, or `None` if it does not exist.
    pub(crate) async fn head_if_present(&self, object: &str) -> Result<Option<Listed>> {
        match self.head(object).await {
            Ok(found) => Ok(Some(found)),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Returns size and time of an object.
    #[boxed]
    pub(crate) async fn head(&self, object: &str) -> Result<Listed> {
        self.counters.add(1, 0, 0);
        let meta = self.client()?.head(&self.path(object)).await.map_err(|e| Error::storage(object, e))?;
        Ok(Listed { path: object.to_owned(), bytes: meta.size, modified_ms: modified_ms(&meta) })
    }

    /// Returns the time by the clock of the storage, in milliseconds since 1970. Writes a scratch object to read the
    /// clock, then deletes it.
    #[boxed]
    pub(crate) async fn clock_ms(&self) -> Result<u64> {
        let object = format!("probe/{}", crate::wire::Id::random()?);
        self.create_unique(&object, Bytes::from_static(b"clock")).await?;
        let now = self.head(&object).await;
        self.delete(&object).await?;
        Ok(now?.modified_ms)
    }

    /// Deletes an object. An object that is already gone is not an error.
    #[boxed]
    pub(crate) async fn delete(&self, object: &str) -> Result<()> {
        self.counters.add(1, 0, 0);
        match self.client()?.delete(&self.path(object)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(Error::storage(object, e)),
        }
    }
}

/// Runs work on local files on a thread that may wait. One hop to such a thread takes longer than most requests.
async fn blocking<T: Send + 'static>(object: String, work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(Error::new(ErrorKind::Storage, format!("a task for local files ended early: {e}")).object(object)))
}

/// Reads a file of at most `max_bytes`.
fn read_file(path: &std::path::Path, object: &str, max_bytes: u64) -> Result<Bytes> {
    let fail = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => Error::not_found("no such object").object(object).source(e),
        _ => Error::io(object, e),
    };
    let mut file = std::fs::File::open(path).map_err(fail)?;
    let declared = file.metadata().map_err(fail)?.len();
    Limits::check(declared, max_bytes, "size of the object").map_err(|e| e.object(object))?;
    let mut bytes = crate::limits::zeroed(crate::limits::to_usize(declared, "an object")?, "an object")?;
    file.read_exact(&mut bytes).map_err(fail)?;
    Ok(bytes.into())
}

fn file_bytes(path: &std::path::Path, object: &str) -> Result<Option<u64>> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(Some(found.len())),
        Ok(_) => Ok(None),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(object, e)),
    }
}

fn modified_ms(meta: &object_store::ObjectMeta) -> u64 {
    u64::try_from(meta.last_modified.timestamp_millis()).unwrap_or(0)
}

/// Returns the error of an unconditional write, which cannot have lost to another write.
pub(crate) fn unconditional(object: &str, source: object_store::Error) -> Error {
    match source {
        object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. } => {
            Error::new(ErrorKind::Storage, "the storage reports conflicting requests; try again").object(object).source(source)
        }
        _ => Error::storage(object, source),
    }
}

/// Lists the objects `<folder>/<name>/<object>` of names that sort after `after`, as pairs of name and object. Costs one
/// request on an object store for each page of 1000 objects. On local disk, reads no metadata of files.
#[boxed]
pub(crate) async fn objects_after(objects: &Objects, folder: &str, after: &str) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    if let Medium::Local(_) = &objects.medium {
        for name in objects.names_after(folder, after).await? {
            let inner = objects.names_after(&format!("{folder}/{name}"), "").await?;
            found.extend(inner.into_iter().map(|object| (name.clone(), object)));
        }
        return Ok(found);
    }
    objects.counters.add(1, 0, 0);
    // The digit 0 follows the slash, so the objects of `after` are skipped, too.
    let (prefix, offset) = (objects.path(folder), objects.path(&format!("{folder}/{after}0")));
    let listed = objects.client()?.list_with_offset(Some(&prefix), &offset);
    let mut paths = std::pin::pin!(listed);
    while let Some(meta) = paths.try_next().await.map_err(|e| Error::storage(folder, e))? {
        let mut parts = meta.location.prefix_match(&prefix).into_iter().flatten();
        if let (Some(name), Some(object), None) = (parts.next(), parts.next(), parts.next())
            && name.as_ref() > after
        {
            found.push((name.as_ref().to_owned(), object.as_ref().to_owned()));
        }
    }
    Ok(found)
}
