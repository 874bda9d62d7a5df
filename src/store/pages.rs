//! Lists a long folder of numbered objects in one round trip.

use std::collections::BTreeMap;

use futures::{StreamExt, TryStreamExt};
use object_store::{ObjectMeta, ObjectStore};

use super::io::name_in;
use super::{Objects, concurrently};
use crate::{Error, Result, boxed};

/// Number of pages requested at once.
const CONCURRENT_PAGES: usize = 16;

/// Lists the names of the objects in a folder, with their sizes where a listing has them: on local disk it has none. An
/// object store answers with one page of `page_objects` names at a time. `pages` are names in ascending order: a page
/// begins after each of them. So all pages are requested at once, if the folder has about the expected objects.
///
/// A listing in another order than that of names may lack objects.
#[boxed]
pub(crate) async fn names_in_pages(
    objects: &Objects,
    folder: &str,
    pages: Vec<String>,
    page_objects: usize,
) -> Result<BTreeMap<String, Option<u64>>> {
    if objects.local_folder().is_some() {
        return Ok(objects.names_after(folder, "").await?.into_iter().map(|name| (name, None)).collect());
    }
    let client = objects.client().await?;
    let last = pages.len().saturating_sub(1);
    let list = |(at, after): (usize, String)| async move {
        let _pending = objects.request("list", folder, 0);
        let prefix = objects.path(folder);
        let offset = objects.path(&format!("{folder}/{after}"));
        let most = if at == last { usize::MAX } else { page_objects };
        let listed = client.list_with_offset(Some(&prefix), &offset).take(most);
        let listed: Vec<ObjectMeta> = listed.try_collect().await.map_err(|e| Error::storage(folder, e))?;
        let named = |meta: ObjectMeta| Ok(name_in(objects, &meta.location, folder)?.map(|name| (name, Some(meta.size))));
        listed.into_iter().map(named).collect::<Result<Vec<_>>>()
    };
    let listed = concurrently(CONCURRENT_PAGES, pages.into_iter().enumerate().map(list)).await?;
    Ok(listed.into_iter().flatten().flatten().collect())
}
