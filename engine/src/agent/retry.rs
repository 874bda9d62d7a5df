//! Waiting between attempts of the encoder and of the uploaders.

use std::future::Future;
use std::time::Duration;

/// Exponential backoff.
#[derive(Debug)]
pub(super) struct Backoff {
    wait: Duration,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self { wait: FIRST_WAIT }
    }

    /// Begins again with the shortest wait, after a success.
    pub(super) fn reset(&mut self) {
        self.wait = FIRST_WAIT;
    }

    /// Waits after a failure. `woken` ends the wait early, but not before the shortest wait has passed.
    pub(super) async fn wait(&mut self, woken: impl Future<Output = ()>) {
        tokio::time::sleep(FIRST_WAIT).await;
        let _ = tokio::time::timeout(self.wait, woken).await;
        self.wait = (self.wait * 2).min(LONGEST_WAIT);
    }
}

const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
