//! The time until a save is durable, by level, from measured rates. Pure: holds no clock.

use crate::codec::LEVELS;

/// Position of `balanced` in [`LEVELS`]: the level while nothing is measured.
pub(super) const BALANCED: usize = 1;

/// Expected rates for the rest of a save.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Forecast {
    /// Seconds of encoding per decoded byte, by level.
    pub encode: [f64; LEVELS.len()],
    /// Stored bytes per decoded byte, by level.
    pub stored: [f64; LEVELS.len()],
    /// Seconds of uploading per stored byte.
    pub upload: f64,
}

impl Forecast {
    /// Seconds until `rest` decoded bytes are durable at a level, with `in_flight` bytes on their way already.
    pub(super) fn seconds(&self, level: usize, rest: f64, in_flight: f64) -> f64 {
        let upload = (in_flight + rest * self.stored[level]) * self.upload;
        (rest * self.encode[level]).max(upload)
    }

    /// The level for the rest of a save.
    pub(super) fn level(&self, rest: f64, in_flight: f64) -> usize {
        let seconds = |level: usize| self.seconds(level, rest, in_flight);
        let least = (0..LEVELS.len()).map(seconds).fold(f64::INFINITY, f64::min);
        let near = (0..LEVELS.len()).filter(|&level| seconds(level) <= least * 1.1);
        near.min_by(|&a, &b| self.stored[a].total_cmp(&self.stored[b])).unwrap_or(BALANCED)
    }
}
