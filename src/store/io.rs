//! Operations on whole small objects: get, create, list, delete.

use std::fs::FileType;
use std::io::Read;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt, PutMode, PutOptions, PutPayload};

use super::objects::blocking;
use super::{Created, Listed, Medium, Objects, concurrently, hard_links, local};
use crate::wire::is_object;
use crate::{Error, ErrorKind, Limits, Result, boxed};

/// Scratch object whose time of modification is that of the storage's clock.
const CLOCK: &str = "probe/clock";

impl Objects {
    /// Reads a whole object of at most `max_bytes`.
    #[boxed]
    pub(crate) async fn get(&self, object: &str, max_bytes: u64) -> Result<Bytes> {
        let _pending = self.request("read", object, 0);
        let client = self.client().await?;
        if let Some(root) = self.local_folder() {
            let root = root.to_owned();
            let object = object.to_owned();
            let bytes = blocking(object.clone(), move || read_file(&root, &object, max_bytes)).await?;
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
        let _pending = self.request("write", object, bytes.len() as u64);
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let client = self.client().await.map_err(|e| object_store::Error::Generic { store: "tensorcask", source: Box::new(e) })?;
        match client.put_opts(&self.path(object), PutPayload::from(bytes), options).await {
            Ok(_) => Ok(Created::Written),
            Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => Ok(Created::Exists),
            Err(e) => match self.local_folder() {
                Some(root) => hard_links::explained(e, root, object),
                None => Err(e),
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
            let _pending = self.request("write", object, payload.content_length() as u64);
            match self.client().await?.put(&self.path(object), payload.clone()).await {
                Ok(_) => return Ok(()),
                Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) if attempts < 3 => {}
                Err(e) => return Err(unconditional(object, e)),
            }
        }
    }

    /// Whether the folder of a local store does not exist yet.
    async fn is_no_folder(&self) -> Result<bool> {
        match self.client().await {
            Ok(_) => Ok(false),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// Lists the objects in a folder, ordered by path. Leaves out whatever does not have the name of an object (README 2).
    #[boxed]
    pub(crate) async fn list(&self, folder: &str) -> Result<Vec<Listed>> {
        let _pending = self.request("list", folder, 0);
        if self.is_no_folder().await? {
            return Ok(Vec::new());
        }
        let mut found: Vec<Listed> = match self.local_folder() {
            Some(root) => {
                let root = root.to_owned();
                let folder = folder.to_owned();
                blocking(folder.clone(), move || local::list(&root, &folder)).await?
            }
            None => {
                let prefix = self.path(folder);
                let listed: Vec<ObjectMeta> =
                    self.client().await?.list(Some(&prefix)).try_collect().await.map_err(|e| Error::storage(folder, e))?;
                let of = |meta: ObjectMeta| -> Result<Listed> {
                    Ok(Listed { path: below_root(self, &meta.location, folder)?, bytes: meta.size, modified_ms: modified_ms(&meta) })
                };
                listed.into_iter().map(of).collect::<Result<_>>()?
            }
        };
        found.retain(|listed| is_object(&listed.path));
        found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    /// Lists the names of the objects in a folder that sort after `after`, ascending, without those in folders below it. Costs one
    /// request on an object store. On local disk, reads the folder but not the metadata of each file.
    #[boxed]
    pub(crate) async fn names_after(&self, folder: &str, after: &str) -> Result<Vec<String>> {
        let _pending = self.request("list", folder, 0);
        if self.is_no_folder().await? {
            return Ok(Vec::new());
        }
        let mut names: Vec<String> = match self.folder().await? {
            Some(root) => {
                let folder = folder.to_owned();
                blocking(folder.clone(), move || local::names(&root, &folder, FileType::is_file)).await?
            }
            None => {
                let prefix = self.path(folder);
                let offset = self.path(&format!("{folder}/{after}"));
                let client = self.client().await?;
                let listed = match url_path(&self.url) {
                    // Names with the path of the URL do not sort as those below the root.
                    Some(_) => client.list(Some(&prefix)),
                    None => client.list_with_offset(Some(&prefix), &offset),
                };
                let listed: Vec<ObjectMeta> = listed.try_collect().await.map_err(|e| Error::storage(folder, e))?;
                let names = listed.iter().map(|meta| name_in(self, &meta.location, folder)).collect::<Result<Vec<_>>>()?;
                names.into_iter().flatten().collect()
            }
        };
        names.retain(|name| name.as_str() > after);
        names.sort_unstable();
        Ok(names)
    }

    /// Returns the sizes of objects, or `None` for those that do not exist. Sends `limit` requests at once.
    #[boxed]
    pub(crate) async fn sizes(&self, objects: Vec<String>, limit: usize) -> Result<Vec<Option<u64>>> {
        if let Some(root) = self.local_folder() {
            let Some(first) = objects.first() else { return Ok(Vec::new()) };
            let _pending = self.request("look up", first, 0);
            self.counters.add((objects.len() as u64).saturating_sub(1), 0, 0);
            let root = root.to_owned();
            let bytes = move |object: &String| Ok(local::file_of(&root, object)?.map(|found| found.len()));
            return blocking(self.url.clone(), move || objects.iter().map(bytes).collect()).await;
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
        let _pending = self.request("look up", object, 0);
        if let Some(file) = local_file(self, object).await? {
            return Ok(file);
        }
        let meta = self.client().await?.head(&self.path(object)).await.map_err(|e| Error::storage(object, e))?;
        Ok(Listed { path: object.to_owned(), bytes: meta.size, modified_ms: modified_ms(&meta) })
    }

    /// Returns the time by the clock of the storage, in milliseconds since 1970. Writes a scratch object to read the clock.
    ///
    /// The object has always the same name and is never deleted, because many programs that save have no permission to
    /// delete. Where a storage refuses to overwrite objects, each reading of the clock leaves an object of its own.
    #[boxed]
    pub(crate) async fn clock_ms(&self) -> Result<u64> {
        // An empty object needs no space on most full disks.
        let bytes = Bytes::new();
        if let Err(error) = self.put_whole(CLOCK, PutPayload::from(bytes.clone())).await {
            tracing::debug!(%error, "the scratch object of the clock could not be overwritten; writing another one");
            let object = format!("{CLOCK}-{}", crate::wire::Id::random()?);
            self.create_unique(&object, bytes).await?;
            return Ok(self.head(&object).await?.modified_ms);
        }
        Ok(self.head(CLOCK).await?.modified_ms)
    }

    /// Deletes an object. An object that is already gone is not an error.
    #[boxed]
    pub(crate) async fn delete(&self, object: &str) -> Result<()> {
        let _pending = self.request("delete", object, 0);
        match local_file(self, object).await {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        match self.client().await?.delete(&self.path(object)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(Error::storage(object, e)),
        }
    }
}

/// Path below the root of an object in a listing of a folder. A listing of other places must not pass for an empty one.
fn below_root(objects: &Objects, location: &Path, folder: &str) -> Result<String> {
    let below = |root: &Path| {
        let path = location.prefix_match(root)?.map(|part| part.as_ref().to_owned()).collect::<Vec<_>>().join("/");
        (folder.is_empty() || path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))).then_some(path)
    };
    url_path(&objects.url).as_ref().and_then(below).or_else(|| below(&objects.root)).ok_or_else(|| {
        let message = format!("the server was asked for the names below `{folder}`, and lists `{location}`");
        Error::new(ErrorKind::Storage, message).object(&objects.url).clause("README 2.5")
    })
}

/// Name of an object in a listing of a folder; `None` if it lies in a folder below that.
pub(super) fn name_in(objects: &Objects, location: &Path, folder: &str) -> Result<Option<String>> {
    let path = below_root(objects, location, folder)?;
    Ok(path.rsplit_once('/').filter(|(above, _)| *above == folder).map(|(_, name)| name.to_owned()))
}

/// Path of the URL of a web server. Its listings (WebDAV) give names with this path.
fn url_path(url: &str) -> Option<Path> {
    let is_web = url.starts_with("http://") || url.starts_with("https://");
    Path::from_url_path(url::Url::parse(url).ok().filter(|_| is_web)?.path()).ok()
}

/// Size and time of an object on local disk; `None` on other storage. Fails if it does not exist, or is no regular file.
pub(super) async fn local_file(objects: &Objects, object: &str) -> Result<Option<Listed>> {
    let absent = || Error::not_found("no such object").object(object);
    let root = objects.folder().await.map_err(|e| if e.kind() == ErrorKind::NotFound { absent().source(e) } else { e })?;
    let Some(root) = root else { return Ok(None) };
    let name = object.to_owned();
    match blocking(object.to_owned(), move || local::file_of(&root, &name)).await? {
        Some(found) => Ok(Some(Listed::of_file(object.to_owned(), &found))),
        None => Err(absent()),
    }
}

/// Files that interrupted writes have left on local disk, or that are being written. Listings of objects leave them out.
pub(crate) async fn staged_files(objects: &Objects) -> Result<Vec<Listed>> {
    if objects.is_no_folder().await? {
        return Ok(Vec::new());
    }
    let Some(root) = objects.local_folder().map(std::path::Path::to_owned) else { return Ok(Vec::new()) };
    blocking(objects.url.clone(), move || local::staged(&root)).await
}

/// Deletes the file of an interrupted write. A file that is already gone is not an error.
pub(crate) async fn remove_staged_file(objects: &Objects, path: &str) -> Result<()> {
    let Some(root) = objects.local_folder() else { return Ok(()) };
    let root = root.to_owned();
    let path = path.to_owned();
    blocking(path.clone(), move || local::remove(&root, &path)).await
}

/// Reads the file of an object of at most `max_bytes`.
fn read_file(root: &std::path::Path, object: &str, max_bytes: u64) -> Result<Bytes> {
    let absent = || Error::not_found("no such object").object(object);
    let declared = local::file_of(root, object)?.ok_or_else(absent)?.len();
    Limits::check(declared, max_bytes, "size of the object").map_err(|e| e.object(object))?;
    let fail = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => absent().source(e),
        _ => Error::io(object, e),
    };
    let mut file = std::fs::File::open(root.join(object)).map_err(fail)?;
    let mut bytes = crate::limits::zeroed(crate::limits::to_usize(declared, "an object")?, "an object")?;
    file.read_exact(&mut bytes).map_err(fail)?;
    Ok(bytes.into())
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
    if objects.is_no_folder().await? {
        return Ok(found);
    }
    if let Some(root) = objects.folder().await? {
        let above = folder.to_owned();
        let mut folders = blocking(above.clone(), move || local::names(&root, &above, FileType::is_dir)).await?;
        folders.retain(|name| name.as_str() > after);
        folders.sort_unstable();
        for name in folders {
            let inner = objects.names_after(&format!("{folder}/{name}"), "").await?;
            found.extend(inner.into_iter().map(|object| (name.clone(), object)));
        }
        return Ok(found);
    }
    let _pending = objects.request("list", folder, 0);
    // The digit 0 follows the slash, so the objects of `after` are skipped, too.
    let prefix = objects.path(folder);
    let offset = objects.path(&format!("{folder}/{after}0"));
    let listed = objects.client().await?.list_with_offset(Some(&prefix), &offset);
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

#[cfg(test)]
mod tests {
    use object_store::path::Path;

    use super::{Medium, Objects, below_root};
    use crate::ErrorKind;

    #[test]
    fn a_listing_of_a_web_server_names_the_objects_below_its_url() {
        let listed = |url: &str, root: &str, location: &str| {
            let objects = Objects::new(url.to_owned(), Medium::Remote, None, Path::from(root), true);
            below_root(&objects, &Path::from(location), "casks")
        };
        assert_eq!(listed("http://host/my%20run", "", "my run/casks/a.cask").unwrap(), "casks/a.cask");
        assert_eq!(listed("http://host/run", "", "casks/a.cask").unwrap(), "casks/a.cask");
        assert_eq!(listed("http://host/casks", "", "casks/casks/a.cask").unwrap(), "casks/a.cask");
        assert_eq!(listed("s3://bucket/run", "run", "run/casks/a.cask").unwrap(), "casks/a.cask");
        assert_eq!(listed("http://host/run", "", "other/casks/a.cask").unwrap_err().kind(), ErrorKind::Storage);
    }
}
