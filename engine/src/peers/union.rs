//! Several places with parts of one store as one `ObjectStore` that can be read: mirrors and replicas, here and on peers.
//!
//! Each place comes with a listing of its objects, so a read asks only places that have the object, nearest first. A place
//! that fails is passed over: a host that is gone must not stop a restore. Objects have the same bytes wherever they are,
//! and readers check what they read, so it does not matter which place answers.
//!
//! Writes go to the memory of this process alone. So a reader can commit a step there that the store never had, and then
//! read it as any other step.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error as ObjectError, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as ObjectResult,
};
use tensorcask::{Store, StoreOptions};

/// A place with a part of a store, at its root.
pub(crate) type Place = Arc<dyn ObjectStore>;

/// A place, and its objects when it was listed.
#[derive(Debug, Clone)]
pub(crate) struct ListedPlace {
    pub place: Place,
    pub objects: Vec<ObjectMeta>,
}

/// A store of the objects in all these places, nearest first, without log entries after `last_entry`. Sends no request.
pub(crate) fn union_store(listed: Vec<ListedPlace>, last_entry: u64) -> Store {
    let (mut places, mut found): (Vec<Place>, BTreeMap<Path, Found>) = (Vec::new(), BTreeMap::new());
    for ListedPlace { place, objects } in listed {
        for meta in objects.into_iter().filter(|meta| !is_later(&meta.location, last_entry)) {
            let known = found.entry(meta.location.clone()).or_insert_with(|| Found { meta, places: Vec::new() });
            known.places.push(places.len());
        }
        places.push(place);
    }
    let objects = Union { own: Arc::new(InMemory::new()), places, found: Arc::new(found) };
    Store::with_object_store(Arc::new(objects), Path::default(), StoreOptions::default())
}

#[derive(Debug)]
struct Union {
    /// Objects that this process has written.
    own: Arc<InMemory>,
    places: Vec<Place>,
    /// Objects of the places.
    found: Arc<BTreeMap<Path, Found>>,
}

/// An object, and the numbers of the places that have it.
#[derive(Debug)]
struct Found {
    meta: ObjectMeta,
    places: Vec<usize>,
}

/// Whether an object is a log entry after `last_entry`, or a catalog of one.
fn is_later(location: &Path, last_entry: u64) -> bool {
    let mut parts = location.parts();
    let (Some(folder), Some(name), None) = (parts.next(), parts.next(), parts.next()) else { return false };
    let is_numbered = matches!(folder.as_ref(), "log" | "catalog");
    let number = name.as_ref().split(['.', '-']).next().and_then(|number| number.parse::<u64>().ok());
    is_numbered && number.is_some_and(|number| number > last_entry)
}

impl fmt::Display for Union {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory of {} places", self.places.len())
    }
}

/// Error of a read that no place answered. An object is missing if no place has it, or any place says so.
fn no_answer(errors: Vec<ObjectError>, path: &Path) -> ObjectError {
    let (missing, failed): (Vec<_>, Vec<_>) = errors.into_iter().partition(|error| matches!(error, ObjectError::NotFound { .. }));
    match (missing.is_empty(), failed.into_iter().next()) {
        (true, Some(failed)) => failed,
        (_, failed) => {
            let reason = failed.map_or_else(String::new, |failed| format!(", and a place failed: {failed}"));
            ObjectError::NotFound { path: path.to_string(), source: format!("no place has the object{reason}").into() }
        }
    }
}

/// Reads the body of a range, so that another place can answer if it breaks off.
async fn complete(result: GetResult, options: &GetOptions) -> ObjectResult<GetResult> {
    let Some(GetRange::Bounded(_)) = options.range else { return Ok(result) };
    let (meta, range, attributes, extensions) =
        (result.meta.clone(), result.range.clone(), result.attributes.clone(), result.extensions.clone());
    let bytes = result.bytes().await?;
    let payload = GetResultPayload::Stream(futures::stream::once(futures::future::ready(Ok(bytes))).boxed());
    Ok(GetResult { payload, meta, range, attributes, extensions })
}

#[async_trait]
impl ObjectStore for Union {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> ObjectResult<GetResult> {
        match self.own.get_opts(location, options.clone()).await {
            Err(ObjectError::NotFound { .. }) => {}
            found => return found,
        }
        let Some(known) = self.found.get(location) else { return Err(no_answer(Vec::new(), location)) };
        if options.head {
            // As listed: objects in memory do not change.
            let meta = known.meta.clone();
            let payload = GetResultPayload::Stream(futures::stream::empty().boxed());
            return Ok(GetResult { payload, range: 0..meta.size, meta, attributes: Default::default(), extensions: Default::default() });
        }
        let mut errors = Vec::new();
        for place in known.places.iter().filter_map(|number| self.places.get(*number)) {
            let found = match place.get_opts(location, options.clone()).await {
                Ok(result) => complete(result, &options).await,
                Err(error) => Err(error),
            };
            match found {
                Ok(result) => return Ok(result),
                Err(error) => {
                    tracing::warn!(%place, object = %location, %error, "this place is passed over");
                    errors.push(error);
                }
            }
        }
        Err(no_answer(errors, location))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, ObjectResult<ObjectMeta>> {
        let prefix = prefix.cloned();
        let own = self.own.clone();
        let found = self.found.clone();
        let listed = async move {
            let mut all = own.list(prefix.as_ref()).try_collect::<Vec<_>>().await?;
            let written: BTreeSet<Path> = all.iter().map(|meta| meta.location.clone()).collect();
            let is_below = |path: &Path| prefix.as_ref().is_none_or(|prefix| path.prefix_match(prefix).is_some() && path != prefix);
            let of_places = found.values().map(|found| &found.meta).filter(|meta| is_below(&meta.location));
            all.extend(of_places.filter(|meta| !written.contains(&meta.location)).cloned());
            all.sort_by(|a, b| a.location.cmp(&b.location));
            Ok::<_, ObjectError>(futures::stream::iter(all.into_iter().map(Ok)))
        };
        futures::stream::once(listed).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> ObjectResult<ListResult> {
        let depth = prefix.map_or(0, |prefix| prefix.parts().count());
        let mut objects = Vec::new();
        let mut folders = Vec::new();
        for meta in self.list(prefix).try_collect::<Vec<_>>().await? {
            match meta.location.parts().count() == depth + 1 {
                true => objects.push(meta),
                false => folders.push(Path::from_iter(meta.location.parts().take(depth + 1))),
            }
        }
        folders.dedup();
        Ok(ListResult { common_prefixes: folders, objects, extensions: Default::default() })
    }

    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> ObjectResult<PutResult> {
        if options.mode == PutMode::Create {
            match self.get_opts(location, GetOptions { head: true, ..GetOptions::default() }).await {
                Err(ObjectError::NotFound { .. }) => {}
                Ok(_) => return Err(ObjectError::AlreadyExists { path: location.to_string(), source: "a place has the object".into() }),
                Err(error) => return Err(error),
            }
        }
        self.own.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(&self, location: &Path, options: PutMultipartOptions) -> ObjectResult<Box<dyn MultipartUpload>> {
        self.own.put_multipart_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, ObjectResult<Path>>) -> BoxStream<'static, ObjectResult<Path>> {
        self.own.delete_stream(locations)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> ObjectResult<()> {
        self.own.copy_opts(from, to, options).await
    }
}

#[cfg(test)]
mod tests {
    use object_store::path::Path;

    use super::is_later;

    #[test]
    fn later_entries_and_their_catalogs_do_not_count() {
        let later = |path: &str| is_later(&Path::from(path), 64);
        assert!(later("log/00000000000000000065.json") && later("catalog/00000000000000000128-abc.parquet"));
        assert!(!later("log/00000000000000000064.json") && !later("catalog/00000000000000000064-abc.parquet"));
        assert!(!later("snapshots/100-abc.json") && !later("casks/99.cask") && !later("store.json"));
    }
}
