//! The objective `auto`: which codecs make a save durable soonest.
//!
//! A save is durable when all its bytes are encoded and uploaded, and the two run at the same time. For each level
//! (`fastest`, `balanced`, `smallest`) the rest of a save takes about the longer of
//!
//! ```text
//! encoding   remaining bytes x seconds per byte at this level
//! upload     (bytes in flight + remaining bytes x stored share at this level) / rate of the store
//! ```
//!
//! Of the levels that need at most a tenth more than the shortest time, the one with the fewest bytes is taken. Encoding
//! is measured in wall time for each window, so other work on the cores counts. The stored shares come from the chunks
//! for which all codecs are compared. The time of a level that was not used yet follows from a level that was, in
//! proportion to the work that the codecs declare. The rate of the store is the bytes that it took over the time
//! during which requests were open.
//!
//! Nothing here affects what is decoded, only how many bytes are stored and when.

use std::collections::BTreeMap;
use std::time::Duration;

use super::forecast::{BALANCED, Forecast};
use crate::chain::DeltaEstimate;
use crate::codec::{Chosen, ChunkKind, LEVELS, Objective};
use crate::store::PartBudget;
use crate::wire::SnapshotKind;

/// Position of `smallest` in [`LEVELS`].
const SMALLEST: usize = 2;
/// Share of older measurements that is kept at the start of each save.
const KEPT: f64 = 0.5;
/// Largest number of bases in a row because deltas were slow.
const BASES_IN_A_ROW: u32 = 4;
/// Smallest share of the measured bytes with which a level counts as measured. Older measurements fade below it.
const MEASURED: f64 = 1.0 / 16.0;

/// Measured rates of one writer.
#[derive(Debug, Default)]
pub(super) struct Pace {
    bases: KindPace,
    deltas: KindPace,
    /// Stored bytes that the store took, and the time that this needed, in saves before the last one.
    uploaded: Rate,
    /// Uploads of the last save.
    uploads: PartBudget,
    /// Number of bases in a row that were preferred to a delta.
    preferred_bases: u32,
}

/// Measured rates of bases, or of deltas.
#[derive(Debug, Default)]
struct KindPace {
    /// Decoded bytes of windows and the time of encoding, by level.
    encoded: [Rate; LEVELS.len()],
    /// Decoded bytes of all chunks.
    bytes: f64,
    /// Decoded bytes of those chunks that differ from their bases.
    changed_bytes: f64,
    /// Chunks for which all codecs were compared.
    sample: Sample,
}

/// Sums over chunks.
#[derive(Debug, Default)]
struct Sample {
    /// Decoded bytes.
    bytes: f64,
    /// Stored bytes, by level.
    stored: [f64; LEVELS.len()],
    /// Declared work, by level.
    work: [f64; LEVELS.len()],
}

/// An amount and the seconds that it took.
#[derive(Debug, Clone, Copy, Default)]
struct Rate {
    bytes: f64,
    seconds: f64,
}

impl Rate {
    fn seconds_per_byte(self) -> Option<f64> {
        (self.bytes > 0.0).then(|| self.seconds / self.bytes)
    }

    fn bytes_per_second(self) -> Option<f64> {
        (self.bytes > 0.0 && self.seconds > 0.0).then(|| self.bytes / self.seconds)
    }

    fn add(&mut self, bytes: u64, time: Duration) {
        self.bytes += bytes as f64;
        self.seconds += time.as_secs_f64();
    }
}

impl KindPace {
    /// Makes older measurements count less.
    fn fade(&mut self) {
        let Sample { bytes, stored, work } = &mut self.sample;
        let rates = self.encoded.iter_mut().flat_map(|rate| [&mut rate.bytes, &mut rate.seconds]);
        let sums = [&mut self.bytes, &mut self.changed_bytes, bytes].into_iter().chain(stored).chain(work).chain(rates);
        sums.for_each(|sum| *sum *= KEPT);
    }

    /// Seconds of encoding per decoded byte, by level: as measured in the last saves, or from the nearest level that was
    /// measured, in proportion to the declared work.
    fn encode_seconds(&self) -> Option<[f64; LEVELS.len()]> {
        let most = self.encoded.iter().map(|rate| rate.bytes).fold(0.0, f64::max);
        let measured = self.encoded.map(|rate| rate.seconds_per_byte().filter(|_| rate.bytes >= most * MEASURED));
        let mut seconds = [0.0; LEVELS.len()];
        for (level, seconds) in seconds.iter_mut().enumerate() {
            let known = (0..LEVELS.len()).filter(|&known| measured[known].is_some()).min_by_key(|&known| known.abs_diff(level))?;
            let work = |level: usize| self.sample.work[level].max(1.0);
            *seconds = measured[known]? * work(level) / work(known);
        }
        Some(seconds)
    }

    /// Stored bytes per decoded byte, by level.
    fn stored_shares(&self) -> Option<[f64; LEVELS.len()]> {
        let changed = self.changed_bytes / self.bytes.max(1.0);
        (self.sample.bytes > 0.0).then(|| self.sample.stored.map(|bytes| changed * bytes / self.sample.bytes))
    }
}

impl Pace {
    fn of(&mut self, kind: SnapshotKind) -> &mut KindPace {
        match kind {
            SnapshotKind::Base => &mut self.bases,
            SnapshotKind::Delta => &mut self.deltas,
        }
    }

    /// Begins a save of `bytes` decoded bytes.
    pub(super) fn begin(&mut self, kind: SnapshotKind, bytes: u64) -> PacedSave<'_> {
        self.uploaded = self.upload_rate();
        self.uploads = PartBudget::of_save();
        self.uploaded.bytes *= KEPT;
        self.uploaded.seconds *= KEPT;
        self.of(kind).fade();
        if kind == SnapshotKind::Delta {
            self.preferred_bases = 0;
        }
        PacedSave { pace: self, kind, rest: bytes, level: BALANCED, windows: [0; LEVELS.len()], encoded: Rate::default() }
    }

    fn upload_rate(&self) -> Rate {
        let mut rate = self.uploaded;
        let uploads = self.uploads.progress();
        rate.add(uploads.sent_bytes, uploads.busy);
        rate
    }

    /// The forecast for a kind of snapshot; `None` while something is unknown.
    fn forecast(&mut self, kind: SnapshotKind) -> Option<Forecast> {
        let upload = self.upload_rate().seconds_per_byte()?;
        let pace = self.of(kind);
        Some(Forecast { encode: pace.encode_seconds()?, stored: pace.stored_shares()?, upload })
    }

    /// Whether a base would be durable in at most 0.8 of the time of a delta. `false` while one of them was not timed. The
    /// time of deltas is forgotten after [`BASES_IN_A_ROW`], so that another delta is tried and timed.
    pub(super) fn prefers_base(&mut self, bytes: u64, estimate: &DeltaEstimate) -> bool {
        let base = self.seconds(SnapshotKind::Base, bytes, estimate.base_bytes);
        let delta = self.seconds(SnapshotKind::Delta, bytes, estimate.delta_bytes);
        let prefers_base = base.zip(delta).is_some_and(|(base, delta)| base <= delta * 0.8);
        if prefers_base && self.preferred_bases >= BASES_IN_A_ROW {
            self.deltas = KindPace::default();
            self.preferred_bases = 0;
            return false;
        }
        self.preferred_bases = if prefers_base { self.preferred_bases + 1 } else { 0 };
        prefers_base
    }

    /// Seconds until a state of `bytes` is durable, as a base or as a delta that is expected to store `stored` bytes;
    /// `None` while nothing like it was saved.
    fn seconds(&mut self, kind: SnapshotKind, bytes: u64, stored: u64) -> Option<f64> {
        let forecast = self.forecast(kind)?;
        let share = stored as f64 / bytes.max(1) as f64;
        let expected = forecast.stored[SMALLEST].max(f64::MIN_POSITIVE);
        let forecast = Forecast { stored: forecast.stored.map(|of_level| of_level / expected * share), ..forecast };
        Some((0..LEVELS.len()).map(|level| forecast.seconds(level, bytes as f64, 0.0)).fold(f64::INFINITY, f64::min))
    }
}

/// A save that chooses a level for each window.
#[derive(Debug)]
pub(super) struct PacedSave<'a> {
    pace: &'a mut Pace,
    kind: SnapshotKind,
    /// Decoded bytes that are still to be encoded.
    rest: u64,
    level: usize,
    /// Number of windows by level.
    windows: [u64; LEVELS.len()],
    encoded: Rate,
}

impl PacedSave<'_> {
    /// The budget whose uploads are measured.
    pub(super) fn budget(&self) -> PartBudget {
        self.pace.uploads.clone()
    }

    /// Chooses the objective of the next window.
    pub(super) fn next_objective(&mut self) -> Objective {
        let in_flight = self.pace.uploads.progress().bytes_in_flight;
        if let Some(forecast) = self.pace.forecast(self.kind) {
            self.level = forecast.level(self.rest as f64, in_flight as f64);
        }
        LEVELS[self.level]
    }

    /// Records the encoding time of a window.
    pub(super) fn add_window(&mut self, bytes: u64, time: Duration) {
        self.rest = self.rest.saturating_sub(bytes);
        self.windows[self.level] += 1;
        self.encoded.add(bytes, time);
        self.pace.of(self.kind).encoded[self.level].add(bytes, time);
    }

    /// Records the sizes of an encoded chunk.
    pub(super) fn add_chunk(&mut self, bytes: u64, chosen: &Chosen) {
        let pace = self.pace.of(self.kind);
        let bytes = bytes as f64;
        pace.bytes += bytes;
        if chosen.encoded.kind == ChunkKind::Unchanged {
            return;
        }
        pace.changed_bytes += bytes;
        let Some(levels) = &chosen.levels else { return };
        pace.sample.bytes += bytes;
        for (level, estimate) in levels.iter().enumerate() {
            pace.sample.stored[level] += estimate.bytes as f64;
            pace.sample.work[level] += f64::from(estimate.work) * bytes;
        }
    }

    /// Reports what was measured and chosen.
    pub(super) fn report(&self) -> ObjectiveReport {
        let windows = LEVELS.iter().zip(self.windows).filter(|(_, windows)| *windows > 0);
        ObjectiveReport {
            windows: windows.map(|(level, windows)| (level.to_string(), windows)).collect(),
            encode_bytes_per_second: self.encoded.bytes_per_second(),
            upload_bytes_per_second: self.pace.upload_rate().bytes_per_second(),
        }
    }
}

/// Measurements and choices of the objective `auto`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ObjectiveReport {
    /// Number of windows by objective: `fastest`, `balanced`, `smallest`.
    pub windows: BTreeMap<String, u64>,
    /// Measured rate of encoding, in decoded bytes per second; `None` without a chunk.
    pub encode_bytes_per_second: Option<f64>,
    /// Measured rate of the store, in stored bytes per second, in this save and, with less weight, earlier ones; `None` while
    /// nothing was uploaded.
    pub upload_bytes_per_second: Option<f64>,
}

impl std::fmt::Display for ObjectiveReport {
    /// Writes a line such as `fastest for 28 of 31 windows (encoding 310 MB/s, store 2100 MB/s)`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all: u64 = self.windows.values().sum();
        for (position, (name, windows)) in self.windows.iter().enumerate() {
            let comma = if position > 0 { ", " } else { "" };
            write!(f, "{comma}{name} for {windows} of {all} windows")?;
        }
        let rate = |rate: Option<f64>| rate.map_or_else(|| "not measured".to_owned(), |rate| format!("{:.0} MB/s", rate / 1e6));
        write!(f, " (encoding {}, store {})", rate(self.encode_bytes_per_second), rate(self.upload_bytes_per_second))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{KindPace, ObjectiveReport, Pace};
    use crate::chain::DeltaEstimate;
    use crate::codec::{Chosen, ChosenBy, EncodedChunk, LEVELS, LevelEstimate};
    use crate::wire::SnapshotKind;
    use crate::writer::forecast::Forecast;

    /// Levels of a state whose smallest form takes 5 times as long to encode as the fastest: 5, 2 and 1 GB/s, for
    /// 0.35, 0.28 and 0.26 of the bytes.
    fn forecast(cores: f64, megabytes_per_second: f64) -> Forecast {
        let encode = [0.2e-9, 0.5e-9, 1.0e-9].map(|seconds| seconds / cores);
        Forecast { encode, stored: [0.35, 0.28, 0.26], upload: 1e-6 / megabytes_per_second }
    }

    #[test]
    fn three_environments_choose_differently() {
        let level = |cores, rate| forecast(cores, rate).level(1e9, 0.0);
        assert_eq!(level(1.0, 2000.0), 0, "a fast disk: encoding takes longer than uploading");
        assert_eq!(level(1.0, 100.0), 2, "100 MB/s: every byte counts, and encoding is hidden behind the upload");
        assert_eq!(level(1.0, 400.0), 1, "in between");
        assert_eq!(level(0.25, 400.0), 0, "the same store, and other work on the cores");
    }

    #[test]
    fn bytes_in_flight_count_as_upload() {
        assert_eq!(forecast(1.0, 4000.0).level(1e9, 0.0), 0);
        assert_eq!(forecast(1.0, 4000.0).level(1e9, 4e9), 2, "the store has fallen behind: encoding has time");
    }

    #[test]
    fn of_levels_that_take_about_as_long_the_smallest_is_taken() {
        let forecast = Forecast { encode: [1.0, 1.02, 1.05], stored: [0.5, 0.4, 0.3], upload: 0.0 };
        assert_eq!(forecast.level(100.0, 0.0), 2);
        assert_eq!(Forecast { encode: [1.0, 1.2, 1.3], ..forecast }.level(100.0, 0.0), 0);
    }

    /// Records a save of 1000 bytes: the seconds of encoding, and the time to upload 100 bytes.
    fn record(pace: &mut Pace, kind: SnapshotKind, seconds: u64, stored: u64) {
        let mut save = pace.begin(kind, 1000);
        save.next_objective();
        save.add_window(1000, Duration::from_secs(seconds));
        let levels = Some(LEVELS.map(|_| LevelEstimate { bytes: stored, work: 1.0 }));
        let encoded = EncodedChunk { kind: crate::codec::ChunkKind::Absolute, ..EncodedChunk::unchanged(0) };
        save.add_chunk(1000, &Chosen { encoded, decoded: None, by: ChosenBy::Estimate, absolute: None, levels });
        pace.uploaded.add(100, Duration::from_secs(1));
    }

    #[test]
    fn a_base_is_preferred_where_a_delta_takes_longer() {
        let estimate = DeltaEstimate { base_bytes: 600, delta_bytes: 200, last_base_delta_bytes: None, sampled_chunks: 1 };
        let prefers_base = |base_seconds: u64, delta_seconds: u64| {
            let mut pace = Pace::default();
            assert!(!pace.prefers_base(1000, &estimate), "nothing is known");
            record(&mut pace, SnapshotKind::Base, base_seconds, 600);
            assert!(!pace.prefers_base(1000, &estimate), "no delta was timed");
            record(&mut pace, SnapshotKind::Delta, delta_seconds, 200);
            pace.prefers_base(1000, &estimate)
        };
        // Uploads take 6 seconds for a base and 2 for a delta.
        assert!(!prefers_base(1, 3), "the base waits for its upload");
        assert!(!prefers_base(5, 7));
        assert!(prefers_base(5, 20), "the delta takes long to encode");
    }

    #[test]
    fn a_delta_is_tried_again_after_some_bases() {
        let estimate = DeltaEstimate { base_bytes: 600, delta_bytes: 200, last_base_delta_bytes: None, sampled_chunks: 1 };
        let mut pace = Pace::default();
        record(&mut pace, SnapshotKind::Base, 5, 600);
        record(&mut pace, SnapshotKind::Delta, 20, 200);
        let decisions: Vec<bool> = (0..6).map(|_| pace.prefers_base(1000, &estimate)).collect();
        assert_eq!(decisions, [true, true, true, true, false, false], "the fifth save is a delta");
    }

    #[test]
    fn a_level_is_measured_again_once_its_measurement_is_old() {
        let mut pace = KindPace::default();
        pace.sample.work = [1.0, 2.0, 4.0];
        pace.encoded[1].add(1000, Duration::from_secs(80));
        for _ in 0..5 {
            pace.fade();
            pace.encoded[0].add(1000, Duration::from_secs(1));
        }
        let seconds = pace.encode_seconds().unwrap();
        assert!(seconds[1] < 0.003, "twice the time of the fastest, not that of a busy hour: {seconds:?}");
    }

    #[test]
    fn a_report_reads_as_a_line() {
        let windows = [("fastest".to_owned(), 28), ("balanced".to_owned(), 3)].into();
        let report = ObjectiveReport { windows, encode_bytes_per_second: Some(310e6), upload_bytes_per_second: None };
        assert_eq!(
            report.to_string(),
            "balanced for 3 of 31 windows, fastest for 28 of 31 windows (encoding 310 MB/s, store not measured)"
        );
    }
}
