//! Whether a training continues from a stored step. One that does not must not replace stored steps: it is probably a first start
//! that was meant to restore.

use std::sync::atomic::{AtomicBool, Ordering};

use tensorcask::{Error, ErrorKind, Result};

/// What an engine knows about the steps that were stored when it began.
#[derive(Debug, Default)]
pub(crate) struct Continuation {
    /// The newest stored step that was found at the beginning, by commit.
    found: Option<u64>,
    /// Whether the training has said which step it continues from: it has restored one, agreed on one, or saved a newer one.
    is_known: AtomicBool,
}

impl Continuation {
    /// A beginning that has found these newest steps, one from each place.
    pub(crate) fn found(steps: impl IntoIterator<Item = u64>) -> Self {
        Self { found: steps.into_iter().max(), is_known: AtomicBool::new(false) }
    }

    /// Notes that the training continues from a step.
    pub(crate) fn note(&self) {
        self.is_known.store(true, Ordering::Relaxed);
    }

    /// Fails if a save would go behind stored steps, and the training has restored none.
    pub(crate) fn check_save(&self, step: u64, store: &str) -> Result<()> {
        if self.is_known.load(Ordering::Relaxed) {
            return Ok(());
        }
        match self.found {
            Some(found) if step <= found => {
                let message = format!(
                    "step {step} is not saved, because it could replace stored steps: step {found} is stored, and this training has restored \
                     nothing. Restore a step first. A training that continues from a step it has loaded by itself calls discard_after with \
                     that step. A new training needs another store, or the option `overwrite` of the engine"
                );
                Err(Error::new(ErrorKind::Conflict, message).object(store))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Continuation;

    #[test]
    fn only_a_training_that_goes_behind_stored_steps_without_a_restore_is_refused() {
        let begun = Continuation::found([7, 9]);
        assert!(begun.check_save(9, "s").is_err() && begun.check_save(1, "s").is_err());
        begun.check_save(10, "s").unwrap();
        begun.note();
        begun.check_save(1, "s").unwrap();
        Continuation::found([]).check_save(0, "s").unwrap();
    }
}
