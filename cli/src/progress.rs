//! Spinner on stderr with the bytes transferred so far and their rate. Shown only if stderr is a terminal.

use std::fmt;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use tensorcask::blocking::Store;

use crate::text::human_bytes;

/// Spins until it is dropped.
#[derive(Debug)]
pub(crate) struct Progress(Option<ProgressBar>);

impl Progress {
    /// Shows the spinner while a store is used.
    pub(crate) fn start(store: &Store, what: &'static str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let store = store.inner().clone();
        let moved = move |state: &ProgressState, out: &mut dyn fmt::Write| {
            let io = store.io();
            let bytes = io.bytes_read.saturating_add(io.bytes_written);
            let rate = bytes as f64 / state.elapsed().as_secs_f64().max(0.001);
            let _ = write!(out, "{}, {}/s,", human_bytes(bytes), human_bytes(rate as u64));
        };
        let style = ProgressStyle::with_template("{spinner} {msg} {moved} in {elapsed}");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_spinner());
        let bar = ProgressBar::new_spinner().with_style(style.with_key("moved", moved)).with_message(what);
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(Some(bar))
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
