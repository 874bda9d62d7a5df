//! Spinner on stderr with the bytes transferred so far, their rate, and the time left. Shown only if stderr is a terminal.

use std::fmt;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use tensorcask::blocking::Store;

use crate::text::{human_bytes, human_seconds};

/// Spins until it is dropped.
#[derive(Debug)]
pub(crate) struct Progress(Option<Shown>);

#[derive(Debug)]
struct Shown {
    bar: ProgressBar,
    /// Bytes to read in all; 0 if unknown.
    expected: Arc<AtomicU64>,
}

impl Progress {
    /// Shows the spinner while a store is used.
    pub(crate) fn start(store: &Store, what: &'static str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let store = store.inner().clone();
        let expected = Arc::new(AtomicU64::new(0));
        let known = expected.clone();
        let moved = move |state: &ProgressState, out: &mut dyn fmt::Write| {
            let io = store.io();
            let bytes = io.bytes_read.saturating_add(io.bytes_written);
            let rate = bytes as f64 / state.elapsed().as_secs_f64().max(0.001);
            let _ = write!(out, "{}, {}/s,", human_bytes(bytes), human_bytes(rate as u64));
            if let Some(left) = seconds_left(io.bytes_read, known.load(Ordering::Relaxed), state.elapsed()) {
                let _ = write!(out, " about {} left,", human_seconds(left.ceil()));
            }
        };
        let style = ProgressStyle::with_template("{spinner} {msg} {moved} in {elapsed}");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_spinner());
        let bar = ProgressBar::new_spinner().with_style(style.with_key("moved", moved)).with_message(what);
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(Some(Shown { bar, expected }))
    }

    /// Sets the number of bytes that will be read in all, for the time left. Calls `bytes` only if the spinner is shown;
    /// `None` if they are unknown.
    pub(crate) fn expect(&self, bytes: impl FnOnce() -> Option<u64>) {
        if let Some(Shown { expected, .. }) = &self.0 {
            expected.store(bytes().unwrap_or(0), Ordering::Relaxed);
        }
    }
}

/// Bytes of the casks of live steps, or of some; `None` if the list of snapshots cannot be read. The verb reports why.
pub(crate) fn stored_bytes(store: &Store, steps: &[u64]) -> Option<u64> {
    let infos = store.snapshots().ok()?;
    let wanted = infos.iter().filter(|info| steps.is_empty() || steps.contains(&info.record.step));
    Some(wanted.map(|info| info.stored_bytes).fold(0, u64::saturating_add))
}

/// Time left, if reading goes on as fast; `None` if it cannot be told yet.
fn seconds_left(read: u64, expected: u64, elapsed: Duration) -> Option<f64> {
    let left = expected.checked_sub(read).filter(|left| *left > 0 && read > 0)?;
    (elapsed >= Duration::from_secs(1)).then(|| left as f64 * elapsed.as_secs_f64() / read as f64)
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(Shown { bar, .. }) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::seconds_left;

    #[test]
    fn the_time_left_follows_from_the_rate() {
        let elapsed = Duration::from_secs(10);
        assert_eq!(seconds_left(100, 400, elapsed), Some(30.0));
        for (read, expected) in [(0, 400), (100, 0), (400, 400), (500, 400)] {
            assert_eq!(seconds_left(read, expected, elapsed), None);
        }
        assert_eq!(seconds_left(100, 400, Duration::from_millis(10)), None, "too early to tell");
    }
}
