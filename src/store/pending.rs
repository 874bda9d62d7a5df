//! Requests that a storage has not answered yet.
//!
//! A file system on a server that is gone blocks a read or a write for ever, without an error. Nothing can end such a request, so
//! whoever waits for it needs to know which one it is, and since when.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// A request that a storage has not answered yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingRequest {
    /// `read`, `write`, `list`, `look up` or `delete`.
    pub operation: &'static str,
    /// Object or folder, by its path below the root of the store.
    pub object: String,
    /// Begin of the request.
    pub since: SystemTime,
}

/// The pending requests of a store.
#[derive(Debug, Default)]
pub(super) struct PendingRequests(Mutex<Numbered>);

#[derive(Debug, Default)]
struct Numbered {
    next_number: u64,
    /// By number, so that the oldest is the first.
    requests: BTreeMap<u64, PendingRequest>,
}

impl PendingRequests {
    /// Notes a request, until the result is dropped.
    #[must_use]
    pub(super) fn begin(self: &Arc<Self>, operation: &'static str, object: &str) -> Pending {
        let request = PendingRequest { operation, object: object.to_owned(), since: SystemTime::now() };
        let mut numbered = self.lock();
        let number = numbered.next_number;
        numbered.next_number = number.wrapping_add(1);
        numbered.requests.insert(number, request);
        Pending { all: self.clone(), number }
    }

    pub(super) fn oldest(&self) -> Option<PendingRequest> {
        self.lock().requests.values().next().cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Numbered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that is under way. Dropping it ends the request.
#[derive(Debug)]
pub(super) struct Pending {
    all: Arc<PendingRequests>,
    number: u64,
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.all.lock().requests.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::PendingRequests;

    #[test]
    fn the_oldest_request_is_named_until_it_ends() {
        let all = Arc::new(PendingRequests::default());
        let named = || all.oldest().map(|request| (request.operation, request.object));
        assert_eq!(named(), None);
        let read = all.begin("read", "store.json");
        let list = all.begin("list", "log");
        assert_eq!(named(), Some(("read", "store.json".to_owned())));
        drop(read);
        assert_eq!(named(), Some(("list", "log".to_owned())));
        drop(list);
        assert_eq!(named(), None);
    }
}
