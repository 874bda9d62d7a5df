//! Watches a tier for a storage that hangs: an NFS server that is gone blocks a read or a write for ever, without an error.
//!
//! The work goes on, because it would only hang again. The problem is reported until the storage answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcask::{PendingRequest, Store};

use super::run::Run;
use super::run_event::Event;

/// Reports while a tier answers nothing, until the agent ends.
pub(super) async fn storage_watch_loop(run: Arc<Run>, tier: usize) {
    let Some(store) = run.tiers.get(tier) else { return };
    // On many hosts, the encoder has a client of its own.
    let stores: Vec<&Store> = [store].into_iter().chain(run.encoder_store.as_ref().filter(|_| tier == 0)).collect();
    let mut watches = vec![Watch::default(); stores.len()];
    let mut reported = None;
    loop {
        tokio::time::sleep(INTERVAL).await;
        let looks = watches.iter_mut().zip(&stores).map(|(watch, store)| watch.look(Traffic::of(store), Instant::now()));
        // All of them, so that each watch sees each moment.
        let silent: Vec<Option<PendingRequest>> = looks.collect();
        let message = silent.into_iter().flatten().min_by_key(|request| request.since).map(|request| describe(store.url(), &request));
        if message == reported {
            continue;
        }
        match &message {
            Some(problem) => tracing::warn!(run = run.spec.run, tier, problem, "the storage may hang"),
            None => tracing::info!(run = run.spec.run, tier, "the storage answers again"),
        }
        run.apply(Event::TierSilent { tier, message: message.clone() });
        reported = message;
    }
}

fn describe(url: &str, request: &PendingRequest) -> String {
    let PendingRequest { operation, object, since } = request;
    let since = httpdate::fmt_http_date(*since);
    format!("{url} does not answer a request ({operation} {object}) since {since}; waiting for it. Check its mount or its server")
}

/// Requests of a store up to a moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Traffic {
    requests: u64,
    bytes_read: u64,
    bytes_written: u64,
    oldest: Option<PendingRequest>,
}

impl Traffic {
    fn of(store: &Store) -> Self {
        let io = store.io();
        Self { requests: io.requests, bytes_read: io.bytes_read, bytes_written: io.bytes_written, oldest: store.oldest_request() }
    }
}

/// Last observed traffic of a store, and the time of its last change.
#[derive(Debug, Clone, Default)]
struct Watch {
    last: Traffic,
    /// Time of the last change.
    changed: Option<Instant>,
}

impl Watch {
    /// Returns the request that a store does not answer, if nothing has begun or ended for `SILENCE`.
    fn look(&mut self, now: Traffic, time: Instant) -> Option<PendingRequest> {
        if now != self.last || self.changed.is_none() {
            (self.last, self.changed) = (now, Some(time));
        }
        let is_silent = self.changed.is_some_and(|changed| time.duration_since(changed) >= SILENCE);
        self.last.oldest.clone().filter(|_| is_silent)
    }
}

/// Time between looks at a store.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time without a change after which a storage with a request counts as silent.
const SILENCE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant, UNIX_EPOCH};

    use tensorcask::PendingRequest;

    use super::{Traffic, Watch, describe};

    #[test]
    fn a_request_without_an_answer_is_named_until_something_happens() {
        let begun = Instant::now();
        let since = UNIX_EPOCH + Duration::from_secs(100);
        let at = |seconds| begun + Duration::from_secs(seconds);
        let request = |object: &str| PendingRequest { operation: "read", object: object.to_owned(), since };
        let traffic = |requests, object: Option<&str>| Traffic { requests, oldest: object.map(request), ..Traffic::default() };
        let mut watch = Watch::default();
        assert_eq!(watch.look(traffic(1, Some("store.json")), at(100)), None);
        assert_eq!(watch.look(traffic(1, Some("store.json")), at(109)), None);
        assert_eq!(watch.look(traffic(1, Some("store.json")), at(110)), Some(request("store.json")));
        // Another request is under way, so the storage may be slow, not gone.
        assert_eq!(watch.look(traffic(2, Some("store.json")), at(111)), None);
        assert_eq!(watch.look(traffic(2, Some("store.json")), at(121)), Some(request("store.json")));
        // An idle store is not silent.
        assert_eq!(watch.look(traffic(2, None), at(122)), None);
        assert_eq!(watch.look(traffic(2, None), at(999)), None);
        let text = describe("/mnt/run", &request("store.json"));
        assert!(["/mnt/run", "read store.json", "since Thu, 01 Jan 1970 00:01:40 GMT"].iter().all(|part| text.contains(part)), "{text}");
    }
}
