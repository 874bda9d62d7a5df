//! Wake-ups of a run's encoder and uploaders.

use tokio::sync::Notify;

/// Wake-ups of a run's encoder and uploaders. A wake-up that comes while a worker is busy makes it look for work once
/// more.
#[derive(Debug)]
pub(super) struct Wakes {
    encoder: Notify,
    /// One per tier.
    uploaders: Vec<Notify>,
}

impl Wakes {
    pub(super) fn new(tiers: usize) -> Self {
        Self { encoder: Notify::new(), uploaders: (0..tiers).map(|_| Notify::new()).collect() }
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
}
