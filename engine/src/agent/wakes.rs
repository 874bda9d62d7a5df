//! Wake-ups of a run's encoder and uploaders.

use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

/// Wake-ups of a run's encoder and uploaders. A wake-up that comes while a worker is busy makes it look for work once
/// more.
#[derive(Debug)]
pub(super) struct Wakes {
    encoder: Notify,
    /// One per tier.
    uploaders: Vec<Notify>,
    /// Time at which a trainer first came with other options: it is the next start of the job, and waits for the encoder.
    next_start: watch::Sender<Option<Instant>>,
}

impl Wakes {
    pub(super) fn new(tiers: usize) -> Self {
        Self { encoder: Notify::new(), uploaders: (0..tiers).map(|_| Notify::new()).collect(), next_start: watch::Sender::new(None) }
    }

    pub(super) fn wake_encoder(&self) {
        self.encoder.notify_one();
    }

    pub(super) fn wake_uploader(&self, tier: usize) {
        if let Some(uploader) = self.uploaders.get(tier) {
            uploader.notify_one();
        }
    }

    pub(super) fn wake_uploaders(&self) {
        self.uploaders.iter().for_each(Notify::notify_one);
    }

    /// Waits until the encoder is woken.
    pub(super) async fn encoder_woken(&self) {
        self.encoder.notified().await;
    }

    /// Waits until the uploader of a tier is woken.
    pub(super) async fn uploader_woken(&self, tier: usize) {
        if let Some(uploader) = self.uploaders.get(tier) {
            uploader.notified().await;
        }
    }

    /// Notes that the next start of the job waits for the encoder; returns for how long it has waited.
    pub(super) fn note_next_start(&self) -> Duration {
        self.next_start.send_if_modified(|since| since.replace(since.unwrap_or_else(Instant::now)).is_none());
        self.next_start.borrow().map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// The result of a request of the encoder; `None` if it takes longer than `limit`, or than [`SHORT`] while the next start of
    /// the job waits.
    pub(super) async fn encoder_timeout<T>(&self, limit: Duration, request: impl Future<Output = T>) -> Option<T> {
        let next_start = async {
            // The sender lives as long as these wake-ups.
            let _ = self.next_start.subscribe().wait_for(Option::is_some).await;
            tokio::time::sleep(SHORT).await;
        };
        tokio::select! {
            answer = request => Some(answer),
            () = tokio::time::sleep(limit) => None,
            () = next_start => None,
        }
    }
}

/// Timeout of a request of the encoder while the next start of the job waits.
const SHORT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::{Duration, Wakes};

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    #[tokio::test]
    async fn the_encoder_gives_a_request_up_when_the_next_start_waits() {
        let wakes = Wakes::new(1);
        assert_eq!(wakes.encoder_timeout(DAY, ready(1)).await, Some(1));
        let ((), answer) = tokio::join!(async { _ = wakes.note_next_start() }, wakes.encoder_timeout(DAY, pending::<u32>()));
        assert_eq!(answer, None);
        assert_eq!(wakes.encoder_timeout(DAY, pending::<u32>()).await, None, "the start was noted before the request began");
        assert_eq!(wakes.encoder_timeout(DAY, ready(2)).await, Some(2), "a store that answers is used");
        let first = wakes.note_next_start();
        assert!(wakes.note_next_start() >= first, "the wait is counted from the first note");
    }
}
