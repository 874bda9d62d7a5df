//! Report of the reason why a snapshot became a base or a delta.

use serde::Serialize;
use tensorcask::PolicyDecision;

use crate::text::human_bytes;

/// Decision as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct DecisionJson {
    reason: &'static str,
    since_base: u64,
    estimated_delta_bytes: Option<u64>,
    estimated_last_base_delta_bytes: Option<u64>,
    estimated_base_bytes: Option<u64>,
    sampled_chunks: u64,
}

impl DecisionJson {
    pub(crate) fn of(decision: &PolicyDecision) -> Self {
        Self {
            reason: decision.reason.name(),
            since_base: decision.since_base,
            estimated_delta_bytes: decision.estimate.map(|estimate| estimate.delta_bytes),
            estimated_last_base_delta_bytes: decision.estimate.and_then(|estimate| estimate.last_base_delta_bytes),
            estimated_base_bytes: decision.estimate.map(|estimate| estimate.base_bytes),
            sampled_chunks: decision.estimate.map_or(0, |estimate| estimate.sampled_chunks),
        }
    }

    /// Decision as one line of text.
    pub(crate) fn line(&self) -> String {
        let sizes = self.estimated_delta_bytes.zip(self.estimated_base_bytes);
        let on_base = self.estimated_last_base_delta_bytes;
        let on_base = on_base.map(|bytes| format!(" ({} against the last base)", human_bytes(bytes))).unwrap_or_default();
        let sizes =
            sizes.map(|(delta, base)| format!(": a delta would take {}{on_base}, a base {}", human_bytes(delta), human_bytes(base)));
        let since = match self.since_base {
            0 => String::new(),
            position => format!("; snapshot {position} after the last base"),
        };
        format!("{}{}{since}", self.reason, sizes.unwrap_or_default())
    }

    /// Cells of a table: reason, position after the last base, estimates.
    pub(crate) fn cells(&self) -> [String; 4] {
        let bytes = |bytes: Option<u64>| bytes.map_or("-".to_owned(), human_bytes);
        [self.reason.to_owned(), self.since_base.to_string(), bytes(self.estimated_delta_bytes), bytes(self.estimated_base_bytes)]
    }
}
