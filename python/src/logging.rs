//! Sends the library's warnings (an unreadable base, a skipped step) to Python's `logging`, logger `tensorcask`. While
//! the command line runs, warnings go to stderr, as in the binary.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::exceptions::PyException;
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

thread_local! {
    /// Exception that a signal handler has raised during a log call of this thread.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    static IS_LOGGING: Cell<bool> = const { Cell::new(false) };
}

/// Takes the exception that a signal handler has raised during a log call of this thread. The caller of the library raises it.
pub(crate) fn take_raised() -> Option<PyErr> {
    RAISED.with_borrow_mut(Option::take)
}

/// Whether this thread is in a log call, in the middle of an operation.
pub(crate) fn is_logging_here() -> bool {
    IS_LOGGING.get()
}

/// Calls the logger. Python runs the handlers of signals in such calls. The library cannot raise what they raise, so it is kept.
fn log(py: Python<'_>, level: u8, line: &str) {
    // Handlers of signals that have arrived: whatever they raise is no fault of the logger.
    let mut raised = py.check_signals().err();
    let logged = || -> PyResult<()> {
        let logger = py.import("logging")?.call_method1("getLogger", ("tensorcask",))?;
        logger.call_method1("log", (level, "%s", line)).map(|_| ())
    };
    // The library ignores a logger that raises. Only a handler raises what is no `Exception`, such as `KeyboardInterrupt`.
    let interrupts = logged().err().filter(|error| !error.is_instance_of::<PyException>(py));
    raised = raised.or(interrupts);
    if let Some(error) = raised {
        RAISED.with_borrow_mut(|kept| _ = kept.get_or_insert(error));
    }
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
        let was_logging = IS_LOGGING.replace(true);
        // Nothing can be logged while the interpreter shuts down.
        let _ = Python::try_attach(|py| log(py, level, &line));
        IS_LOGGING.set(was_logging);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
