//! Several places with parts of one store as one `ObjectStore` that can be read: mirrors and replicas, here and on peers.
//!
//! The first place that has an object answers. A place that fails is passed over: a host that is gone must not stop a
//! restore. So an object counts as missing if no place has it and some place has said so. Objects have the same bytes
//! wherever they are, and readers check what they read, so it does not matter which place answers.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error as ObjectError, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as ObjectResult,
};
use tensorcask::{Store, StoreOptions};

/// A place with a part of a store, at its root.
pub(crate) type Place = Arc<dyn ObjectStore>;

/// A store of the objects in all these places, nearest first. It cannot be written. Sends no request.
pub(crate) fn union_store(places: Vec<Place>) -> Store {
    Store::with_object_store(Arc::new(Union { places }), Path::default(), StoreOptions::default())
}

#[derive(Debug)]
struct Union {
    places: Vec<Place>,
}

impl Union {
    fn refuse<T>(&self) -> ObjectResult<T> {
        Err(ObjectError::NotImplemented { operation: "a write".to_owned(), implementer: self.to_string() })
    }
}

impl fmt::Display for Union {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory of {} places", self.places.len())
    }
}

/// Error of an operation that no place answered. An object is missing if any place says so.
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
        let mut errors = Vec::new();
        for place in &self.places {
            let found = match place.get_opts(location, options.clone()).await {
                Ok(result) => complete(result, &options).await,
                Err(error) => Err(error),
            };
            match found {
                Ok(result) => return Ok(result),
                Err(error) => {
                    if !matches!(error, ObjectError::NotFound { .. }) {
                        tracing::warn!(%place, object = %location, %error, "this place is passed over");
                    }
                    errors.push(error);
                }
            }
        }
        Err(no_answer(errors, location))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, ObjectResult<ObjectMeta>> {
        let (places, prefix) = (self.places.clone(), prefix.cloned());
        let listed = async move {
            let mut found: BTreeMap<Path, ObjectMeta> = BTreeMap::new();
            let mut errors = Vec::new();
            for place in &places {
                match place.list(prefix.as_ref()).try_collect::<Vec<_>>().await {
                    Ok(objects) => {
                        for meta in objects {
                            found.entry(meta.location.clone()).or_insert(meta);
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%place, %error, "this place is passed over");
                        errors.push(error);
                    }
                }
            }
            if errors.len() == places.len() {
                return Err(no_answer(errors, &prefix.unwrap_or_default()));
            }
            Ok(futures::stream::iter(found.into_values().map(Ok)))
        };
        futures::stream::once(listed).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> ObjectResult<ListResult> {
        let depth = prefix.map_or(0, |prefix| prefix.parts().count());
        let (mut objects, mut folders) = (Vec::new(), Vec::new());
        for meta in self.list(prefix).try_collect::<Vec<_>>().await? {
            match meta.location.parts().count() == depth + 1 {
                true => objects.push(meta),
                false => folders.push(Path::from_iter(meta.location.parts().take(depth + 1))),
            }
        }
        folders.dedup();
        Ok(ListResult { common_prefixes: folders, objects, extensions: Default::default() })
    }

    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> ObjectResult<PutResult> {
        self.refuse()
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> ObjectResult<Box<dyn MultipartUpload>> {
        self.refuse()
    }

    fn delete_stream(&self, _: BoxStream<'static, ObjectResult<Path>>) -> BoxStream<'static, ObjectResult<Path>> {
        futures::stream::once(futures::future::ready(self.refuse())).boxed()
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> ObjectResult<()> {
        self.refuse()
    }
}
