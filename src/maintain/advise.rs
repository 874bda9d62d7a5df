//! Advice on how often to save and how many saves to keep, from the times that a store records.
//!
//! [`measure`] reads the times, [`advise`] computes. The model is in `interval`. It knows saves that stop the training. A
//! save that runs beside the training stops it for its stall only, but until it is committed, a failure still loses the
//! interval before. This costs one save time per failure, on average, so it counts as a part of the restart.

use std::time::{Duration, Instant};

use super::interval::{daly_interval, lost_share};
use crate::chain::{SaveTimes, StepTimes};
use crate::reader::SnapshotInfo;
use crate::{Error, Latest, Result, Store};

/// Number of newest saves whose times count.
const SAVES: usize = 200;
/// Bytes that `torch.save` is assumed to write and read in a second.
const TORCH_BYTES_PER_S: f64 = 1e9;
/// Bounds of the number of saves to keep.
const KEEP: (u64, u64) = (3, 100);
/// Steps between two saves with `torch.save`.
const TORCH_STEPS: u64 = 1000;

/// Origin of a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Measured: recorded by saves, or measured now.
    Measured,
    /// Given by the user.
    Given,
    /// Assumed, because it is unknown.
    Assumed,
}

impl Origin {
    /// Name in JSON and listings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Given => "given",
            Self::Assumed => "assumed",
        }
    }
}

/// A time that advice rests on.
#[derive(Debug, Clone, PartialEq)]
pub struct TimeEstimate {
    /// Seconds.
    pub seconds: f64,
    /// Origin of the time.
    pub origin: Origin,
    /// How the time was found, as a phrase.
    pub how: String,
}

impl TimeEstimate {
    fn new(seconds: f64, origin: Origin, how: impl Into<String>) -> Self {
        Self { seconds, origin, how: how.into() }
    }
}

/// Times that the user gives, in place of those that the store records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TimeOverrides {
    /// Time for which a save stops the training.
    pub stall: Option<Duration>,
    /// Time of a restore.
    pub restore: Option<Duration>,
    /// Time of a training step.
    pub step: Option<Duration>,
    /// Time of `torch.save`.
    pub torch_save: Option<Duration>,
}

/// Times of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunTimes {
    /// Time for which a save stops the training.
    pub stall: TimeEstimate,
    /// Time from the call of a save to its commit.
    pub save: TimeEstimate,
    /// Time of the slowest stage of a save; saves cannot follow each other faster.
    pub stage: TimeEstimate,
    /// Time of a restore.
    pub restore: TimeEstimate,
    /// Time of a training step; `None` if it is unknown.
    pub step: Option<TimeEstimate>,
    /// Time of `torch.save`.
    pub torch_save: TimeEstimate,
}

/// Advice for a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// Mean time between failures, in seconds.
    pub mtbf_s: f64,
    /// The times that the advice rests on.
    pub times: RunTimes,
    /// Best time of training between two saves, in seconds. If step time is known, a whole number of steps.
    pub interval_s: f64,
    /// Best number of training steps between two saves.
    pub interval_steps: Option<u64>,
    /// Whether saves would have to follow each other faster than they can be written, to reach Daly's interval.
    pub is_limited_by_saves: bool,
    /// Expected share of time lost, from 0 to 1.
    pub lost_share: f64,
    /// Expected share of time lost with `torch.save` every 1,000 steps; `None` if the time of a step is unknown.
    pub torch_lost_share: Option<f64>,
    /// Number of newest saves to keep.
    pub keep_last: u64,
    /// Steps whose multiples to keep beyond those.
    pub keep_every: Option<u64>,
}

/// Computes advice for a run of these times.
pub fn advise(times: RunTimes, mtbf: Duration) -> Result<Advice> {
    let mtbf_s = mtbf.as_secs_f64();
    if mtbf_s <= 0.0 {
        return Err(Error::invalid("the mean time between failures must be above 0"));
    }
    let stall = times.stall.seconds;
    let best = daly_interval(stall, mtbf_s);
    let shortest = (times.stage.seconds - stall).max(0.0);
    let interval_s = best.max(shortest);
    let step_s = times.step.as_ref().map(|step| step.seconds);
    let interval_steps = step_s.map(|step_s| ((interval_s / step_s).round() as u64).max(1));
    let interval_s = match (interval_steps, step_s) {
        (Some(steps), Some(step_s)) => steps as f64 * step_s,
        _ => interval_s.max(f64::MIN_POSITIVE),
    };
    let unprotected = (times.save.seconds - stall).max(0.0);
    let share = lost_share(interval_s, stall, times.restore.seconds + unprotected, mtbf_s);
    let torch = times.torch_save.seconds;
    let torch_share = step_s.map(|step_s| lost_share(TORCH_STEPS as f64 * step_s, torch, torch, mtbf_s));
    let keep_last = ((mtbf_s / interval_s).ceil() as u64).clamp(KEEP.0, KEEP.1);
    // A multiple of the interval, because only steps that are saved can be kept.
    let keep_every = interval_steps.map(|steps| steps.saturating_mul(((mtbf_s / interval_s).round() as u64).max(1)));
    Ok(Advice {
        mtbf_s,
        interval_s,
        interval_steps,
        is_limited_by_saves: shortest > best,
        lost_share: share,
        torch_lost_share: torch_share,
        keep_last,
        keep_every,
        times,
    })
}

/// Finds the times of a run: as given, as the newest saves of the store recorded them, or assumed.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// use std::time::Duration;
/// use tensorcask::maintain::{TimeOverrides, Origin, advise, measure};
/// use tensorcask::{Dtype, Metadata, Policy, Store, TensorView};
/// let store = Store::open("memory://advise-example")?;
/// let mut writer = store.writer(Policy::Full).await?;
/// for step in [100, 200] {
///     writer.save(step, &[TensorView::new("w", Dtype::U8, &[2], &[1, 2])?], &[], &Metadata::default()).await?;
/// }
/// let given = TimeOverrides { step: Some(Duration::from_secs(1)), ..TimeOverrides::default() };
/// let times = measure(&store.snapshots().await?, given)?;
/// assert_eq!((times.stall.origin, times.restore.origin), (Origin::Measured, Origin::Assumed));
/// let advice = advise(times, Duration::from_secs(8 * 3600))?;
/// assert!(advice.lost_share < advice.torch_lost_share.unwrap());
/// # Ok(()) }
/// ```
pub fn measure(snapshots: &[SnapshotInfo], given: TimeOverrides) -> Result<RunTimes> {
    let newest = snapshots.get(snapshots.len().saturating_sub(SAVES)..).unwrap_or_default();
    let Some(last) = newest.last() else { return Err(Error::not_found("the store has no steps; save some first")) };
    let of_steps = SaveTimes::by_step(newest.iter().map(|info| (info.record.step, &info.user)));
    let median_of = |time: fn(&StepTimes) -> Option<f64>, what: &str| {
        let found: Vec<f64> = of_steps.values().filter_map(time).map(|ms| ms / 1e3).collect();
        let how = format!("{what}, median of {}", counted(found.len()));
        median(found).map(|seconds| TimeEstimate::new(seconds, Origin::Measured, how))
    };
    let given_time = |time: Option<Duration>| time.map(|time| TimeEstimate::new(time.as_secs_f64(), Origin::Given, "as given"));
    let recorded_stall = median_of(|times| times.stall_ms, "time for which a save stopped the training");
    let encode = median_of(|times| times.encode_ms, "time of encoding");
    let upload = median_of(|times| times.upload_ms, "time of the upload");
    let both = median_of(|times| Some(times.encode_ms? + times.upload_ms?), "encoding and upload of a save, without its commit");
    let whole = median_of(|times| times.save_ms, "time from the call of a save to its commit").or(both);
    let stall = given_time(given.stall).or(recorded_stall).or(whole.clone());
    let encode_alone =
        || Some(TimeEstimate::new(encode.as_ref()?.seconds, Origin::Assumed, "time of encoding alone, as no save has recorded its upload"));
    let Some(stall) = stall.or_else(encode_alone) else {
        let message = "no save of this store has recorded its times, for example because many ranks saved together; give the time for \
                       which a save stops the training (`--stall 2s`, in Python `stall=\"2s\"`)";
        return Err(Error::not_found(message));
    };
    let save = whole.unwrap_or_else(|| TimeEstimate { origin: Origin::Assumed, how: "as long as the stall".into(), ..stall.clone() });
    let slower = |a: TimeEstimate, b: TimeEstimate| if a.seconds < b.seconds { b } else { a };
    let stage = [encode, upload].into_iter().flatten().fold(stall.clone(), slower);
    let restore = given_time(given.restore).unwrap_or_else(|| TimeEstimate::new(save.seconds, Origin::Assumed, "as long as a save"));
    let step = given_time(given.step).or_else(|| step_time(newest, stall.seconds)).filter(|step| step.seconds > 0.0);
    let torch_save = given_time(given.torch_save).unwrap_or_else(|| {
        let how = "all tensors at 1 GB/s, which the training waits for; reading them back takes as long";
        TimeEstimate::new(last.tensor_bytes as f64 / TORCH_BYTES_PER_S, Origin::Assumed, how)
    });
    Ok(RunTimes { stall, save, stage, restore, step, torch_save })
}

/// Measures the time of a restore: reads, decodes and checks the newest step. Holds only a few chunks at a time.
pub async fn measured_restore(store: &Store) -> Result<TimeEstimate> {
    let begun = Instant::now();
    store.snapshot(Latest).await?.verify().await?;
    Ok(TimeEstimate::new(begun.elapsed().as_secs_f64(), Origin::Measured, "reading, decoding and checking the newest step now"))
}

/// Time of a training step, from the times between saves. In a copy of a store, log entries have the times of the copy;
/// snapshots record the times of their saves.
fn step_time(snapshots: &[SnapshotInfo], stall_s: f64) -> Option<TimeEstimate> {
    let recorded = |info: &SnapshotInfo| SaveTimes::of(&info.user).and_then(|times| times.written_ms);
    let pairs = snapshots.iter().zip(snapshots.iter().skip(1));
    let times = pairs.filter_map(|(a, b)| {
        let steps = b.record.step.checked_sub(a.record.step).filter(|steps| *steps > 0)?;
        let (begin, end) = recorded(a).zip(recorded(b)).unwrap_or((a.record.time_ms, b.record.time_ms));
        let seconds = end.checked_sub(begin)? as f64 / 1e3 - stall_s;
        (seconds > 0.0).then_some(seconds / steps as f64)
    });
    let times: Vec<f64> = times.collect();
    let how = format!("time between saves without the stall, median of {}", counted(times.len()));
    median(times).map(|seconds| TimeEstimate::new(seconds, Origin::Measured, how))
}

fn counted(saves: usize) -> String {
    if saves == 1 { "1 save".to_owned() } else { format!("{saves} saves") }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let low = values.get(values.len().saturating_sub(1) / 2)?;
    let high = values.get(values.len() / 2)?;
    Some((low + high) / 2.0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::Map;

    use super::{Origin, RunTimes, TimeEstimate, TimeOverrides, advise, measure, median};
    use crate::chain::SaveTimes;
    use crate::commit::{SnapshotRecord, SnapshotStatus};
    use crate::reader::SnapshotInfo;
    use crate::wire::{Digest, Id};

    const HOUR: Duration = Duration::from_secs(3600);

    fn times(stall: f64, save: f64, stage: f64, step: Option<f64>) -> RunTimes {
        let known = |seconds| TimeEstimate::new(seconds, Origin::Given, "");
        let restore = known(60.0);
        let torch_save = known(120.0);
        RunTimes { stall: known(stall), save: known(save), stage: known(stage), restore, step: step.map(known), torch_save }
    }

    #[test]
    fn a_short_stall_beats_rare_saves() {
        let advice = advise(times(0.5, 20.0, 15.0, Some(2.0)), HOUR * 8).unwrap();
        // sqrt(2 * 0.5 * 28800) is 169.7 seconds: 85 steps of two seconds.
        assert_eq!((advice.interval_steps, advice.interval_s, advice.is_limited_by_saves), (Some(85), 170.0, false));
        assert!(advice.lost_share < 0.01, "{advice:?}");
        assert!(advice.torch_lost_share.unwrap() > 0.08, "{advice:?}");
        assert_eq!((advice.keep_last, advice.keep_every), (100, Some(85 * 169)));
        let longer = advise(times(0.5, 200.0, 15.0, Some(2.0)), HOUR * 8).unwrap();
        assert!(longer.lost_share > advice.lost_share, "a late commit costs time");
    }

    #[test]
    fn saves_cannot_overtake_each_other() {
        let advice = advise(times(0.01, 300.0, 280.0, Some(1.0)), HOUR).unwrap();
        assert!(advice.is_limited_by_saves && advice.interval_steps == Some(280), "{advice:?}");
        let no_step = advise(times(0.0, 0.0, 0.0, None), HOUR).unwrap();
        assert_eq!((no_step.interval_steps, no_step.torch_lost_share, no_step.keep_every), (None, None, None));
        assert!(no_step.interval_s > 0.0 && no_step.keep_last == 100);
        assert!(advise(times(1.0, 1.0, 1.0, None), Duration::ZERO).is_err());
    }

    #[test]
    fn a_step_takes_as_long_as_between_saves_also_in_a_copy() {
        let info = |step: u64, logged_ms: u64, written_ms: Option<u64>| {
            let times = SaveTimes { written_ms, encode_ms: Some(500.0), upload_ms: Some(500.0), ..SaveTimes::default() };
            let user = Map::from_iter([(SaveTimes::KEY.to_owned(), serde_json::to_value(times).unwrap())]);
            let record = SnapshotRecord {
                sequence: step,
                revision: step,
                id: Id([step as u8; 16]),
                step,
                parent: None,
                manifest: Digest::of(b""),
                status: SnapshotStatus::Live,
                pinned: false,
                time_ms: logged_ms,
                roles: None,
                inline: None,
                summary: None,
            };
            SnapshotInfo { record, tensor_bytes: 1, stored_bytes: 1, user }
        };
        let step_s = |infos: &[SnapshotInfo]| measure(infos, TimeOverrides::default()).unwrap().step.map(|step| step.seconds);
        // A stall of one second, and ten steps in the twenty seconds after it.
        let copied = [info(10, 1_000, Some(100_000)), info(20, 1_100, Some(121_000)), info(30, 1_200, Some(142_000))];
        assert_eq!(step_s(&copied), Some(2.0));
        let unrecorded = [info(10, 100_000, None), info(20, 121_000, None)];
        assert_eq!(step_s(&unrecorded), Some(2.0));
    }

    #[test]
    fn a_store_without_steps_has_no_times() {
        assert!(measure(&[], TimeOverrides::default()).unwrap_err().message().contains("no steps"));
        assert_eq!(
            (median(vec![]), median(vec![3.0]), median(vec![4.0, 1.0]), median(vec![9.0, 1.0, 2.0])),
            (None, Some(3.0), Some(2.5), Some(2.0))
        );
    }
}
