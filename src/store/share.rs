//! Objects that a store takes from another store of the same storage without a transfer: by a hard link on local disk, by a copy
//! within the storage elsewhere.
//!
//! A link keeps the bytes as long as one of both stores needs them. Objects are never changed in place, so neither store can
//! change what the other one has.

use std::io;
use std::path::Path;
use std::time::SystemTime;

use object_store::ObjectStoreExt;

use super::io::local_file;
use super::local_file::create_folder;
use super::objects::blocking;
use super::objects::{Medium, Objects};
use crate::{Result, boxed};

impl Objects {
    /// Makes an object of `source` an object of the same name here. Returns `false` if the storage cannot do so: the bytes must then
    /// be sent. The object is durable, and its time is that of now.
    #[boxed]
    pub(crate) async fn share(&self, source: &Self, object: &str, bytes: u64) -> Result<bool> {
        let shared = match (&self.medium, &source.medium) {
            (Medium::Local(_), Medium::Local(_)) => self.link(source, object).await?,
            (Medium::Remote, Medium::Remote) if is_same_storage(&self.url, &source.url) => self.copy_within(source, object).await,
            _ => false,
        };
        Ok(shared && self.head_if_present(object).await?.is_some_and(|found| found.bytes == bytes))
    }

    async fn link(&self, source: &Self, object: &str) -> Result<bool> {
        // The transfer says what is wrong with an object that is no regular file, or is absent.
        if local_file(source, object).await.is_err() {
            return Ok(false);
        }
        self.client().await?;
        let (Some(from), Some(to)) = (source.local_folder(), self.local_folder()) else { return Ok(false) };
        let from = from.join(object);
        let to = to.join(object);
        let fsync = self.fsync;
        let _pending = self.request("link", object, 0);
        let linked = blocking(object.to_owned(), move || Ok(link_file(&from, &to, fsync))).await?;
        if let Err(error) = &linked {
            tracing::debug!(object, %error, "the file system does not share this object between both stores");
        }
        Ok(linked.is_ok())
    }

    async fn copy_within(&self, source: &Self, object: &str) -> bool {
        let Ok(client) = self.client().await else { return false };
        let _pending = self.request("copy", object, 0);
        match client.copy(&source.path(object), &self.path(object)).await {
            Ok(()) => true,
            Err(error) => {
                // S3 copies at most 5 GB in one request.
                tracing::debug!(object, %error, "the storage does not copy this object itself");
                false
            }
        }
    }
}

/// Links a file, renews its time and makes the name durable. If that fails, there is no link.
fn link_file(from: &Path, to: &Path, fsync: bool) -> io::Result<()> {
    let folder = to.parent().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    create_folder(folder, fsync)?;
    std::fs::hard_link(from, to)?;
    let renew = || {
        let file = std::fs::File::open(to)?;
        // Garbage collection takes an old object that no entry names yet for a leftover.
        file.set_modified(SystemTime::now())?;
        if fsync {
            file.sync_all()?;
            std::fs::File::open(folder)?.sync_all()?;
        }
        Ok(())
    };
    renew().inspect_err(|_: &io::Error| {
        let _ = std::fs::remove_file(to);
    })
}

/// Whether two URLs are of one bucket or container.
fn is_same_storage(one: &str, other: &str) -> bool {
    let place = |url: &str| {
        let url = url::Url::parse(url).ok()?;
        (!matches!(url.scheme(), "http" | "https")).then(|| (url.scheme().to_owned(), url.authority().to_owned()))
    };
    place(one).is_some_and(|one| Some(one) == place(other))
}

#[cfg(test)]
mod tests {
    use super::is_same_storage;

    #[test]
    fn only_one_bucket_is_one_storage() {
        assert!(is_same_storage("s3://bucket/a", "s3://bucket/b/c"));
        assert!(!is_same_storage("s3://bucket/a", "s3://other/a") && !is_same_storage("s3://bucket/a", "gs://bucket/a"));
        assert!(!is_same_storage("http://host/a", "http://host/b"), "a web server copies nothing");
    }
}
