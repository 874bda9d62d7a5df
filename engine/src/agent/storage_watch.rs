//! Watches work on a tier for a storage that hangs: an NFS server that is gone blocks a read or a write for ever, without an error.
//!
//! The work goes on, because it would only hang again. The problem is reported until the storage answers.

use std::future::Future;
use std::time::Duration;

use tensorcask::Result;

use super::run::Run;
use super::run_event::Event;

/// Does work on a tier. Reports a problem while the tier sends and receives nothing.
pub(super) async fn watched<T>(run: &Run, tier: usize, work: impl Future<Output = Result<T>>) -> Result<T> {
    let Some(store) = run.tiers.get(tier) else { return work.await };
    let counts = || {
        let io = store.io();
        (io.requests, io.bytes_read, io.bytes_written)
    };
    let mut work = std::pin::pin!(work);
    let (mut last, mut silent) = (counts(), Duration::ZERO);
    loop {
        tokio::select! {
            done = &mut work => {
                if !silent.is_zero() {
                    run.apply(Event::TierSilent { tier, message: None });
                }
                return done;
            }
            () = tokio::time::sleep(SILENCE) => {}
        }
        let now = counts();
        if now != last {
            if !silent.is_zero() {
                run.apply(Event::TierSilent { tier, message: None });
            }
            (last, silent) = (now, Duration::ZERO);
            continue;
        }
        if silent.is_zero() {
            let message = format!("{} has not answered a request for {} s; waiting for it", store.url(), SILENCE.as_secs());
            tracing::warn!(run = run.spec.run, tier, problem = message, "the storage may hang");
            run.apply(Event::TierSilent { tier, message: Some(message) });
        }
        silent += SILENCE;
    }
}

/// Time without a request or a byte after which a storage counts as silent.
const SILENCE: Duration = Duration::from_secs(10);
