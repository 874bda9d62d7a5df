//! Reads byte ranges of an object in few requests.

use std::ops::Range;

use bytes::Bytes;
use object_store::ObjectStoreExt;

use super::coalesce::Coalesce;
use super::io::local_file;
use super::{Objects, concurrently};
use crate::{Error, ErrorKind, Result, boxed};

/// Maximum number of requests in flight per fetch.
const CONCURRENT_REQUESTS: usize = 8;

impl Objects {
    /// Reads one range.
    #[boxed]
    pub(crate) async fn get_range(&self, object: &str, range: Range<u64>) -> Result<Bytes> {
        let bytes = self.get_ranges(object, std::slice::from_ref(&range)).await?.pop();
        bytes.ok_or_else(|| Error::corrupt("a requested range did not arrive").object(object).offset(range.start))
    }

    /// Reads `ranges` and returns them in order. Checks every length, because some object stores return short answers.
    #[boxed]
    pub(crate) async fn get_ranges(&self, object: &str, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let requests = Coalesce::default().requests(ranges.iter().cloned());
        let path = self.path(object);
        let _pending = self.noted("read", object);
        let client = self.client().await?;
        local_file(self, object).await?;
        let fetch = |range: Range<u64>| {
            let path = &path;
            async move {
                let wanted = range.end - range.start;
                let _pending = self.request("read", object, 0);
                let received = match client.get_range(path, range.clone()).await {
                    Ok(bytes) if bytes.len() as u64 == wanted => {
                        self.counters.add(0, wanted, 0);
                        return Ok((range, bytes));
                    }
                    other => other,
                };
                // For a range past the end, some stores return a short answer and others an error. The object's size
                // tells damage from a storage failure.
                let _pending = self.request("look up", object, 0);
                match (received, client.head(path).await) {
                    (_, Ok(meta)) if meta.size < range.end => {
                        Err(Error::corrupt(format!("has {} bytes, but {} were written: truncated", meta.size, range.end)))
                    }
                    (Err(e), _) => Err(Error::storage(object, e)),
                    (Ok(bytes), _) => Err(Error::new(ErrorKind::Storage, format!("{} of {wanted} bytes arrived", bytes.len()))),
                }
                .map_err(|e| e.object(object).offset(range.start))
            }
        };
        let received: Vec<(Range<u64>, Bytes)> = concurrently(CONCURRENT_REQUESTS, requests.into_iter().map(fetch)).await?;
        let slice = |range: &Range<u64>| {
            if range.is_empty() {
                return Some(Bytes::new());
            }
            let at = received.partition_point(|(request, _)| request.start <= range.start).checked_sub(1)?;
            let (request, bytes) = received.get(at)?;
            let start = usize::try_from(range.start - request.start).ok()?;
            let end = usize::try_from(range.end - request.start).ok()?;
            (end <= bytes.len()).then(|| bytes.slice(start..end))
        };
        ranges
            .iter()
            .map(|range| slice(range).ok_or_else(|| Error::corrupt("a requested range did not arrive").object(object).offset(range.start)))
            .collect()
    }
}
