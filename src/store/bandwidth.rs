//! A limit of bytes per second that uploads, and whoever else sends, share.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

/// A limit of bytes per second. Clones share it.
///
/// Senders wait for their turn in the order in which they came, one piece of 256 KiB at a time, so that a large upload does
/// not hold up a small one. A sender that is cancelled while it waits has used nothing.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// use tensorcask::{Bandwidth, StoreOptions};
/// let limit = Bandwidth::new(Some(100 << 20));
/// limit.wait_for(4096).await;
/// // Uploads to this store take at most 100 MiB per second.
/// let store = StoreOptions { bandwidth: limit, ..StoreOptions::default() }.open("memory://bandwidth-example")?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Bandwidth {
    limit: Option<Arc<Limit>>,
}

#[derive(Debug)]
struct Limit {
    bytes_per_second: u64,
    /// Time at which the bytes of earlier turns have been sent. The lock is handed on in the order of requests.
    free_at: Mutex<Instant>,
}

impl Bandwidth {
    /// `None` for no limit.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        let limit = |bytes_per_second: u64| Limit { bytes_per_second: bytes_per_second.max(1), free_at: Mutex::new(Instant::now()) };
        Self { limit: bytes_per_second.map(|rate| Arc::new(limit(rate))) }
    }

    /// Waits until these bytes may be sent.
    pub async fn wait_for(&self, bytes: u64) {
        let Some(limit) = &self.limit else { return };
        let mut left = bytes;
        while left > 0 {
            let piece = left.min(PIECE_BYTES);
            limit.wait_for(piece).await;
            left = left.saturating_sub(piece);
        }
    }
}

impl Limit {
    async fn wait_for(&self, bytes: u64) {
        let mut free_at = self.free_at.lock().await;
        tokio::time::sleep_until(*free_at).await;
        // Booked only now, so that a cancelled sender leaves nothing behind. An idle time is not saved up, except for the
        // inaccuracy of the timer.
        let now = Instant::now();
        let begin = (*free_at).max(now.checked_sub(TIMER_SLACK).unwrap_or(now));
        *free_at = begin + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
    }
}

/// Bytes of one turn.
const PIECE_BYTES: u64 = 256 << 10;
const TIMER_SLACK: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::{Bandwidth, PIECE_BYTES};

    /// Seconds of the paused clock, which goes on when all tasks wait.
    fn seconds_since(begun: Instant) -> f64 {
        (begun.elapsed().as_secs_f64() * 10.0).round() / 10.0
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_are_spread_over_time() {
        let limit = Bandwidth::new(Some(1000));
        let begun = Instant::now();
        let mut waited = Vec::new();
        for bytes in [500, 500, 1000, 1] {
            limit.wait_for(bytes).await;
            waited.push(seconds_since(begun));
        }
        assert_eq!(waited, [0.0, 0.5, 1.0, 2.0]);
        tokio::time::sleep(Duration::from_secs(60)).await;
        let begun = Instant::now();
        for _ in 0..2 {
            limit.wait_for(1000).await;
        }
        assert_eq!(seconds_since(begun), 1.0, "an idle time is not saved up");
        let begun = Instant::now();
        Bandwidth::new(None).wait_for(u64::MAX).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_sender_books_nothing() {
        let limit = Bandwidth::new(Some(1000));
        let begun = Instant::now();
        limit.wait_for(1000).await;
        for _ in 0..5 {
            let sender = tokio::time::timeout(Duration::from_millis(100), limit.wait_for(1_000_000));
            assert!(sender.await.is_err());
        }
        limit.wait_for(1000).await;
        assert_eq!(seconds_since(begun), 1.0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_upload_does_not_hold_up_a_small_one() {
        let limit = Bandwidth::new(Some(PIECE_BYTES));
        let begun = Instant::now();
        let large = tokio::spawn({
            let limit = limit.clone();
            async move { limit.wait_for(100 * PIECE_BYTES).await }
        });
        tokio::task::yield_now().await;
        limit.wait_for(PIECE_BYTES).await;
        assert!(seconds_since(begun) <= 2.0, "{:?}", begun.elapsed());
        large.abort();
    }
}
