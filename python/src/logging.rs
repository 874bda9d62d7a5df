//! Sends the library's warnings (an unreadable base, a skipped step) to Python's `logging`, logger `tensorcask`. While
//! the command line runs, warnings go to stderr, as in the binary.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Installs the subscriber.
pub(crate) fn install() {
    // Fails only if another subscriber was set before, and this module sets no other.
    let _ = tracing::subscriber::set_global_default(ToPython);
}

/// Sends warnings to stderr from now on, because this process runs one command.
pub(crate) fn show_on_stderr() {
    IS_COMMAND.store(true, Ordering::Relaxed);
}

static IS_COMMAND: AtomicBool = AtomicBool::new(false);

struct ToPython;

impl Subscriber for ToPython {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO && metadata.is_event() && metadata.target().starts_with("tensorcask")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        if IS_COMMAND.load(Ordering::Relaxed) {
            return tensorcask_cli::show_warning(event);
        }
        let line = tensorcask_cli::line_of(event);
        let level = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            _ => 20,
        };
        // Nothing can be logged while the interpreter shuts down. The library ignores a logger that raises.
        let _ = Python::try_attach(|py| -> PyResult<()> {
            let logger = py.import("logging")?.call_method1("getLogger", ("tensorcask",))?;
            logger.call_method1("log", (level, "%s", line.as_str())).map(|_| ())
        });
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
