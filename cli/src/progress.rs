//! Line on stderr with the bytes transferred so far, their rate, and the time left. Shown only if stderr is a terminal,
//! and only by verbs that take longer than [`DELAY`].

use std::fmt;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use tensorcask::IoCounts;
use tensorcask::blocking::Store;

use crate::text::{human_bytes, human_seconds};

/// Time after which the line appears.
const DELAY: Duration = Duration::from_secs(2);

/// Shows the line until it is dropped.
#[derive(Debug)]
pub(crate) struct Progress(Option<Shown>);

#[derive(Debug)]
struct Shown {
    bar: ProgressBar,
    /// Bytes to read in all; 0 if unknown. Only for verbs whose work the library does not plan.
    expected: Arc<AtomicU64>,
    /// Dropping the sender ends the thread that waits to show the bar.
    delayed: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// Shows the line while a store is used.
    pub(crate) fn start(store: &Store, what: &'static str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let store = store.inner().clone();
        let expected = Arc::new(AtomicU64::new(0));
        let known = expected.clone();
        let begun = Arc::new(OnceLock::new());
        let moved = move |state: &ProgressState, out: &mut dyn fmt::Write| {
            let io = store.io();
            let elapsed = state.elapsed();
            let left = match io.work_planned {
                0 => seconds_left(io.bytes_read, known.load(Ordering::Relaxed), elapsed),
                _ => {
                    // The time before the plan is no part of the rate.
                    let &(since, before) = begun.get_or_init(|| (elapsed, io.work_done));
                    let done = io.work_done.saturating_sub(before);
                    let planned = io.work_planned.saturating_sub(before);
                    seconds_left(done, planned, elapsed.saturating_sub(since))
                }
            };
            let _ = out.write_str(&line(io, elapsed, left));
        };
        let style = ProgressStyle::with_template("{spinner} {msg} {moved} in {elapsed}");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_spinner()).with_key("moved", moved);
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()).with_style(style).with_message(what);
        let (sender, receiver) = mpsc::channel();
        let hidden = bar.clone();
        let thread = thread::spawn(move || {
            if receiver.recv_timeout(DELAY) == Err(RecvTimeoutError::Timeout) {
                hidden.set_draw_target(ProgressDrawTarget::stderr());
                hidden.enable_steady_tick(Duration::from_millis(120));
            }
        });
        Self(Some(Shown { bar, expected, delayed: Some((sender, thread)) }))
    }

    /// Sets the number of bytes that will be read in all, for the time left. Calls `bytes` only if the line may be
    /// shown; `None` if they are unknown.
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

/// The numbers of the line.
fn line(io: IoCounts, elapsed: Duration, seconds_left: Option<f64>) -> String {
    let bytes = io.bytes_read.saturating_add(io.bytes_written);
    let rate = bytes as f64 / elapsed.as_secs_f64().max(0.001);
    let left = seconds_left.map_or(String::new(), |left| format!(" about {} left,", human_seconds(left.ceil())));
    format!("{}, {}/s,{left}", human_bytes(bytes), human_bytes(rate as u64))
}

/// Time left, if the work goes on as fast; `None` if it cannot be told yet.
fn seconds_left(done: u64, planned: u64, elapsed: Duration) -> Option<f64> {
    let left = planned.checked_sub(done).filter(|left| *left > 0 && done > 0)?;
    (elapsed >= Duration::from_secs(1)).then(|| left as f64 * elapsed.as_secs_f64() / done as f64)
}

impl Drop for Progress {
    fn drop(&mut self) {
        let Some(Shown { bar, delayed, .. }) = &mut self.0 else { return };
        if let Some((sender, thread)) = delayed.take() {
            drop(sender);
            let _ = thread.join();
        }
        bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tensorcask::IoCounts;

    use super::{line, seconds_left};

    #[test]
    fn the_time_left_follows_from_the_rate() {
        let elapsed = Duration::from_secs(10);
        assert_eq!(seconds_left(100, 400, elapsed), Some(30.0));
        for (done, planned) in [(0, 400), (100, 0), (400, 400), (500, 400)] {
            assert_eq!(seconds_left(done, planned, elapsed), None);
        }
        assert_eq!(seconds_left(100, 400, Duration::from_millis(10)), None, "too early to tell");
    }

    #[test]
    fn the_line_has_bytes_rate_and_time_left() {
        let io = IoCounts { requests: 3, bytes_read: 1 << 20, bytes_written: 3 << 20, ..IoCounts::default() };
        let elapsed = Duration::from_secs(4);
        assert_eq!(line(io, elapsed, None), "4.0 MiB, 1.0 MiB/s,");
        assert_eq!(line(io, elapsed, Some(29.2)), "4.0 MiB, 1.0 MiB/s, about 30 s left,");
    }
}
