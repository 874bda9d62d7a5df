//! Copies one cask.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join;

use super::cask_check::{CaskCheck, WINDOW_BYTES};
use crate::reader::{CaskSource, read_whole_index};
use crate::store::{AheadUploads, Listed, Upload};
use crate::wire::CaskRef;
use crate::{Error, Limits, Result, Store, boxed};

/// Listing of an object, if the store has it with this size.
pub(crate) async fn present(store: &Store, path: &str, bytes: u64) -> Result<Option<Listed>> {
    Ok(store.objects().head_if_present(path).await?.filter(|found| found.bytes == bytes))
}

/// Time from which on an object of an earlier attempt is young enough for a commit. An older one is written again, which renews its
/// time: garbage collection could take it for a leftover, and the commit would be refused (log 7.5).
pub(super) fn fresh_since(now_ms: u64, age_floor: Duration) -> u64 {
    now_ms.saturating_sub(u64::try_from(age_floor.as_millis()).unwrap_or(u64::MAX) / 4)
}

/// Writes an object that an earlier attempt may have left, and renews one from before `since_ms`. Returns the object that was
/// there and is young enough.
#[boxed]
pub(super) async fn create_fresh(store: &Store, path: &str, bytes: Bytes, since_ms: u64) -> Result<Option<Listed>> {
    let found = present(store, path, bytes.len() as u64).await?;
    store.objects().create_unique(path, bytes.clone()).await?;
    match found {
        Some(found) if found.modified_ms < since_ms => store.objects().put_whole(path, bytes.into()).await.map(|()| None),
        found => Ok(found),
    }
}

/// End of the window that begins at an offset of a cask.
fn window_end(start: u64, cask_bytes: u64) -> u64 {
    cask_bytes.min(start.saturating_add(WINDOW_BYTES))
}

/// Copies a cask, except bytes that were sent ahead. Returns the number of those bytes.
#[boxed]
pub(super) async fn copy_cask(source: &CaskSource, destination: &Store, cask: &CaskRef, ahead: Option<&AheadUploads>) -> Result<u64> {
    let path = cask.path();
    let begun = match ahead {
        Some(ahead) => ahead.take(&path).await,
        None => None,
    };
    let (mut upload, mut start, sent) = match begun {
        Some(begun) => (begun.upload, begun.bytes, begun.sent_bytes),
        None => (Upload::new(destination, path.clone(), cask.bytes), 0, 0),
    };
    // The next window is read while this one is sent.
    let mut window = start..window_end(start, cask.bytes);
    let mut bytes = source.get_range(window.clone()).await?;
    while !window.is_empty() {
        start = window.end;
        window = start..window_end(start, cask.bytes);
        let (sent, read) = join(upload.push(vec![bytes]), source.get_range(window.clone())).await;
        sent?;
        bytes = read?;
    }
    upload.finish().await?;
    Ok(sent)
}

/// Reason why [`copy_checked_cask`] failed.
#[derive(Debug)]
pub(crate) enum CopyFailure {
    /// The source cannot be read, or is damaged.
    Source(Error),
    /// The destination cannot be written.
    Destination(Error),
}

/// Copies a cask of a base or a delta, and checks every byte before it is sent. The destination then has exactly the bytes that
/// were checked; if the copy fails, it is as before.
#[boxed]
pub(crate) async fn copy_checked_cask(
    source: &CaskSource,
    destination: &Store,
    cask: &CaskRef,
    of_base: bool,
) -> std::result::Result<(), CopyFailure> {
    let mut upload = Upload::new(destination, cask.path(), cask.bytes);
    match push_checked(source, &mut upload, cask, of_base, destination.limits()).await {
        Ok(()) => upload.finish().await.map_err(CopyFailure::Destination),
        Err(failure) => {
            upload.abort().await;
            Err(failure)
        }
    }
}

#[boxed]
async fn push_checked(
    source: &CaskSource,
    upload: &mut Upload,
    cask: &CaskRef,
    of_base: bool,
    limits: &Limits,
) -> std::result::Result<(), CopyFailure> {
    let (index, tail) = read_whole_index(source, cask, limits).await.map_err(CopyFailure::Source)?;
    let damage = |e: Error| CopyFailure::Source(source.locate(e));
    let mut check = CaskCheck::new(cask, &index, of_base).map_err(damage)?;
    let mut windows = check.windows().into_iter();
    let read = |window: Option<Range<u64>>| async {
        match window {
            Some(window) => source.get_range(window).await.map(Some).map_err(CopyFailure::Source),
            None => Ok(None),
        }
    };
    let mut read_bytes = read(windows.next()).await?;
    while let Some(bytes) = read_bytes {
        // The next window is read while this one is checked and sent.
        let send = async {
            check.check(&bytes).map_err(damage)?;
            upload.push(vec![bytes]).await.map_err(CopyFailure::Destination)
        };
        let (next, sent) = join(read(windows.next()), send).await;
        sent?;
        read_bytes = next?;
    }
    upload.push(vec![tail]).await.map_err(CopyFailure::Destination)
}
