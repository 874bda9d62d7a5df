//! Report of the profile that the precision `auto` chose.

use serde::Serialize;
use tensorcask::PrecisionDecision;
use tensorcask::precision::ProfileErrors;

/// Decision as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct PrecisionJson {
    profile: &'static str,
    reason: &'static str,
    /// Step of the save that the state was compared with; null without one, as are the measurements.
    since_step: Option<u64>,
    /// Distance of the weights from those of that save, relative to their norm.
    change: Option<f64>,
    near: Option<ProfileErrorsJson>,
    compact: Option<ProfileErrorsJson>,
    #[serde(skip)]
    line: String,
}

/// Errors that a profile would cause.
#[derive(Debug, Serialize)]
pub(crate) struct ProfileErrorsJson {
    /// Distance of the rounded weights, relative to the distance that training has moved them.
    weights: f64,
    /// Relative error of the update of Adam; null if unknown.
    update: Option<f64>,
}

impl PrecisionJson {
    /// Headings of a table of decisions.
    pub(crate) const HEADINGS: [&str; 8] =
        [">step", "precision", "why", ">change", ">near: weights", ">near: update", ">compact: weights", ">compact: update"];

    pub(crate) fn of(decision: &PrecisionDecision) -> Self {
        let measured = decision.measured;
        let errors = |ProfileErrors { weights, update }| ProfileErrorsJson { weights, update };
        Self {
            profile: decision.profile.name(),
            reason: decision.reason.name(),
            since_step: measured.map(|measured| measured.since_step),
            change: measured.map(|measured| measured.change),
            near: measured.map(|measured| errors(measured.near)),
            compact: measured.map(|measured| errors(measured.compact)),
            line: format!("auto: {decision}"),
        }
    }

    /// Decision as one line of text.
    pub(crate) fn line(&self) -> &str {
        &self.line
    }

    /// Cells of a table row.
    pub(crate) fn cells(&self, step: u64) -> Vec<String> {
        let percent = |share: Option<f64>| share.map_or("-".to_owned(), |share| format!("{:.2} %", share * 100.0));
        let of = |errors: &Option<ProfileErrorsJson>| {
            let weights = errors.as_ref().map(|errors| errors.weights);
            let update = errors.as_ref().and_then(|errors| errors.update);
            [percent(weights), percent(update)]
        };
        let first = [step.to_string(), self.profile.to_owned(), self.reason.to_owned(), percent(self.change)];
        first.into_iter().chain(of(&self.near)).chain(of(&self.compact)).collect()
    }
}
