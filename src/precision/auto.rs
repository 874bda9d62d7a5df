//! The precision `auto`: one of three profiles for each save, by what the state at hand and earlier saves show.
//!
//! ```text
//! state ─> sample ─> sketch of the weights ──────────┐
//!                └─> errors of `near` and `compact` ─┴─> decide ─> profile, reason
//! earlier decision (manifest): sketch, stage ────────────┘   └──> decision (manifest)
//! ```
//!
//! Two questions decide. **Is the rounding small?** Rounding must move the weights by at most a tenth of the distance that
//! training has moved them since the save before, and must change Adam's update by at most 4 %. **Is the training
//! stable?** While the weights move faster and faster, as in warm-up, the profile is `near` at most.
//!
//! A decision depends on the state, and on the decision that the newest earlier snapshot records. So a new process decides
//! as the old one would have. Nothing depends on time.
//!
//! Example: saves every 10 steps, weights that move by 2, 4, 6, 8, 10, 10, 10, ... thousandths of their norm. The rates 4
//! and 8 are rises: more than 1.5 times the lowest rate since the last rise. The rises have taken 4 saves. After 4 saves
//! without a rise the training counts as stable. The third save in a row that permits `compact` is saved so.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tensorcask_kernels::sketch::{BUCKETS, Sketch};

use crate::{Error, Result};

/// Greatest distance of the rounded weights from the weights, relative to the distance that training has moved them since
/// the save before. Both are root mean squares.
const WEIGHTS_LIMIT: f64 = 0.1;
/// Greatest error of Adam's update, relative to the update. Both are root mean squares.
const UPDATE_LIMIT: f64 = 0.04;
/// Factor by which both limits grow for the profile in force and finer ones. The distance is an estimate with a standard
/// error of 9 %.
const TOLERANCE: f64 = 1.25;
/// Factor by which the rate of change grows in a rise.
const RISE: f64 = 1.5;
/// Greatest error that is recorded. If the weights did not change at all, any error is this large.
const MOST: f64 = 1e9;
/// Number of saves in a row that must permit a coarser profile before it is chosen.
const WAIT: u32 = 3;

/// Profile that a save used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Profile {
    /// Nothing is rounded.
    #[default]
    Lossless,
    /// The profile `near`.
    Near,
    /// The profile `compact`.
    Compact,
}

impl Profile {
    /// Returns the word for this profile.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lossless => "lossless",
            Self::Near => "near",
            Self::Compact => "compact",
        }
    }

    fn coarser(self) -> Self {
        match self {
            Self::Lossless => Self::Near,
            Self::Near | Self::Compact => Self::Compact,
        }
    }
}

/// Reason why the precision `auto` chose a profile: what keeps a coarser profile from being used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PrecisionReason {
    /// `lossless`: no earlier snapshot has a state to compare with.
    First,
    /// `lossless`: the state has no weights to measure, or they are not finite.
    NotMeasured,
    /// `lossless` or `near`: a coarser profile would move the weights too far, compared with what training changed.
    WeightsError,
    /// `lossless` or `near`: a coarser profile would change Adam's update too much.
    UpdateError,
    /// `near`: the weights have been moving faster and faster, as in warm-up.
    Rising,
    /// A coarser profile is permitted, but for fewer than 3 saves in a row.
    Waiting,
    /// `compact`: the training is stable.
    Stable,
}

impl PrecisionReason {
    /// Returns the name used in JSON and listings.
    pub fn name(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::NotMeasured => "not_measured",
            Self::WeightsError => "weights_error",
            Self::UpdateError => "update_error",
            Self::Rising => "rising",
            Self::Waiting => "waiting",
            Self::Stable => "stable",
        }
    }
}

/// Errors that a profile would cause, measured on a sample of the state.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct ProfileErrors {
    /// Distance of the rounded weights from the weights, relative to the distance that training has moved them since the
    /// save before.
    pub weights: f64,
    /// Error of Adam's update, relative to the update; `None` in a state without Adam's moments.
    pub update: Option<f64>,
}

/// Change of the weights since an earlier save, and the errors that rounding would cause.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MeasuredChange {
    /// Step of the save before.
    pub since_step: u64,
    /// Distance of the weights from those of the save before, relative to their norm.
    pub change: f64,
    /// Errors of the profile `near`.
    pub near: ProfileErrors,
    /// Errors of the profile `compact`.
    pub compact: ProfileErrors,
}

/// A decision of the precision `auto`, as a manifest records it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PrecisionDecision {
    /// Profile of the save.
    pub profile: Profile,
    /// Reason for the profile.
    pub reason: PrecisionReason,
    /// Number of saves in a row that permitted a coarser profile.
    pub waited: u32,
    /// Measurements; `None` without an earlier state to compare with.
    pub measured: Option<MeasuredChange>,
    /// Stage of the training; `None` before the first measurement.
    stage: Option<Stage>,
    /// The weights, for the comparison with the next state; `None` if they were not measured.
    state: Option<StateSketch>,
}

/// Course of the rate of change so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Stage {
    /// Number of saves from the beginning of the rises to the last rise.
    rising: u32,
    /// Number of saves since the last rise.
    calm: u32,
    /// Lowest change since the last rise, per step and per square root of a step. A straight path moves in proportion to
    /// the steps, a random one to their square root. A rise must show in both, so unequal distances of saves are no rise.
    lowest: [f64; 2],
}

/// Sketch of the sampled weights of a state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct StateSketch {
    /// Checksum of names, types, shapes and sample: only equal ones can be compared.
    layout: u32,
    /// Sums as bits of f32, 8 hexadecimal digits each.
    sums: String,
}

/// Measurements of a sample of the state at hand.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StateSample {
    /// Checksum of names, types, shapes and sample.
    pub layout: u32,
    pub weights: Sketch,
    pub near: SampledErrors,
    pub compact: SampledErrors,
}

/// Rounding errors of the sample.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct SampledErrors {
    /// Sum of squared errors of the weights.
    pub weight_squares: f64,
    pub update: Option<f64>,
}

impl PrecisionDecision {
    /// Key under `user` of a manifest where a writer stores its decision.
    pub const KEY: &str = "tc.precision";

    /// Returns the decision in the user metadata of a snapshot. `None` if there is none, or if it is not valid.
    pub fn of(user: &Map<String, Value>) -> Option<Self> {
        serde_json::from_value(user.get(Self::KEY)?.clone()).ok()
    }

    /// Returns the decision as a manifest stores it.
    pub(crate) fn to_value(&self) -> Result<Value> {
        serde_json::to_value(self).map_err(|e| Error::invalid(format!("the decision for a precision cannot be written as JSON: {e}")))
    }

    /// Decides for a state of `step`. `earlier`: step and decision of the newest snapshot before it that has one.
    pub(crate) fn decide(earlier: Option<(u64, &Self)>, step: u64, sample: Option<&StateSample>) -> Self {
        let in_force = earlier.map(|(_, earlier)| earlier.profile).unwrap_or_default();
        let lossless = |reason, stage| Self {
            profile: Profile::Lossless,
            reason,
            waited: 0,
            measured: None,
            stage,
            state: sample.map(StateSketch::of),
        };
        let stage = earlier.and_then(|(_, earlier)| earlier.stage);
        let Some(sample) = sample else { return lossless(PrecisionReason::NotMeasured, stage) };
        let measured = earlier.and_then(|(since, earlier)| MeasuredChange::new(since, earlier.state.as_ref()?, sample));
        let Some((measured, (since, _))) = measured.zip(earlier) else { return lossless(PrecisionReason::First, None) };
        let stage = Stage::after(stage, measured.change, step.saturating_sub(since));
        let (permitted, reason) = permitted(&measured, stage, in_force);
        let waited = if permitted > in_force { earlier.map_or(0, |(_, earlier)| earlier.waited).saturating_add(1) } else { 0 };
        let (profile, waited) = match permitted > in_force {
            true if waited >= WAIT => (in_force.coarser(), 0),
            true => (in_force, waited),
            false => (permitted, 0),
        };
        let reason = if profile < permitted { PrecisionReason::Waiting } else { reason };
        Self { profile, reason, waited, measured: Some(measured), stage: Some(stage), state: Some(StateSketch::of(sample)) }
    }
}

/// The coarsest profile that the measurements permit, and what keeps a coarser one from being used.
fn permitted(measured: &MeasuredChange, stage: Stage, in_force: Profile) -> (Profile, PrecisionReason) {
    let refusal = |profile: Profile, errors: ProfileErrors| {
        let tolerance = if profile <= in_force { TOLERANCE } else { 1.0 };
        match errors.update {
            _ if errors.weights > WEIGHTS_LIMIT * tolerance => Some(PrecisionReason::WeightsError),
            Some(update) if update > UPDATE_LIMIT * tolerance => Some(PrecisionReason::UpdateError),
            _ => None,
        }
    };
    match (refusal(Profile::Near, measured.near), refusal(Profile::Compact, measured.compact)) {
        (Some(reason), _) => (Profile::Lossless, reason),
        (None, Some(reason)) => (Profile::Near, reason),
        (None, None) if !stage.is_stable() => (Profile::Near, PrecisionReason::Rising),
        (None, None) => (Profile::Compact, PrecisionReason::Stable),
    }
}

impl MeasuredChange {
    /// Compares the state at hand with the sketch of an earlier one. `None` if their weights are not alike.
    fn new(since_step: u64, earlier: &StateSketch, sample: &StateSample) -> Option<Self> {
        let before = earlier.sums().filter(|_| earlier.layout == sample.layout)?;
        let now = sample.weights.sums.map(|sum| f64::from(sum as f32));
        let distance = before.iter().zip(now).map(|(before, now)| (now - f64::from(*before)).powi(2)).sum::<f64>().sqrt();
        let errors = |errors: SampledErrors| ProfileErrors {
            weights: match errors.weight_squares {
                0.0 => 0.0,
                squares => short((squares.sqrt() / distance).min(MOST)),
            },
            update: errors.update.map(short),
        };
        let change = short(distance / sample.weights.squares.sqrt().max(f64::MIN_POSITIVE));
        Some(Self { since_step, change, near: errors(sample.near), compact: errors(sample.compact) })
    }
}

impl Stage {
    /// The stage after a save whose weights are `change` away from those of the save before, `steps` steps earlier.
    fn after(before: Option<Self>, change: f64, steps: u64) -> Self {
        let steps = steps.max(1) as f64;
        let rates = [short(change / steps), short(change / steps.sqrt())];
        let Some(Self { rising, calm, lowest }) = before else { return Self { rising: 1, calm: 0, lowest: rates } };
        if change == 0.0 {
            return Self { rising, calm, lowest };
        }
        let is_rise = rates.iter().zip(lowest).all(|(rate, lowest)| *rate > lowest * RISE);
        match is_rise {
            // A rise of a stable training begins anew.
            true if calm >= rising => Self { rising: 1, calm: 0, lowest: rates },
            true => Self { rising: rising.saturating_add(calm).saturating_add(1), calm: 0, lowest: rates },
            false => Self { rising, calm: calm.saturating_add(1), lowest: [rates[0].min(lowest[0]), rates[1].min(lowest[1])] },
        }
    }

    /// Whether the last rise is as many saves ago as the rises took.
    fn is_stable(self) -> bool {
        self.calm >= self.rising
    }
}

impl StateSketch {
    fn of(sample: &StateSample) -> Self {
        let sums = sample.weights.sums.map(|sum| format!("{:08x}", (sum as f32).to_bits())).concat();
        Self { layout: sample.layout, sums }
    }

    fn sums(&self) -> Option<[f32; BUCKETS]> {
        let mut sums = [0.0; BUCKETS];
        for (at, sum) in sums.iter_mut().enumerate() {
            *sum = f32::from_bits(u32::from_str_radix(self.sums.get(at * 8..at * 8 + 8)?, 16).ok()?);
        }
        sums.iter().all(|sum| sum.is_finite()).then_some(sums)
    }
}

/// A number with 4 digits, so that its text in a manifest is short and exact.
fn short(number: f64) -> f64 {
    format!("{number:.3e}").parse().unwrap_or(number)
}

impl std::fmt::Display for PrecisionDecision {
    /// Writes a line such as `near: rising; weights changed by 0.0104 since step 40; ...`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.profile.name(), self.reason.name())?;
        let Some(MeasuredChange { since_step, change, near, compact }) = self.measured else { return Ok(()) };
        write!(f, "; weights changed by {:.2} % since step {since_step}", change * 100.0)?;
        for (profile, errors) in [(Profile::Near, near), (Profile::Compact, compact)] {
            write!(f, "; {} would move them by {:.2} % of that", profile.name(), errors.weights * 100.0)?;
            if let Some(update) = errors.update {
                write!(f, " and change the update by {:.2} %", update * 100.0)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};
    use tensorcask_kernels::sketch::Sketch;

    use super::{PrecisionDecision, PrecisionReason, Profile, SampledErrors, StateSample};
    use PrecisionReason::{First, NotMeasured, Rising, Stable, UpdateError, Waiting, WeightsError};
    use Profile::{Compact, Lossless, Near};

    /// A training of weights with norm 1.
    struct Training {
        step: u64,
        position: f64,
        /// Distance of the rounded weights, for `near` and `compact`.
        errors: [f64; 2],
        update: [Option<f64>; 2],
        layout: u32,
        last: Option<(u64, PrecisionDecision)>,
    }

    impl Training {
        fn new() -> Self {
            Self { step: 0, position: 0.0, errors: [1e-6, 2e-5], update: [Some(0.014), Some(0.028)], layout: 1, last: None }
        }

        fn sample(&self) -> StateSample {
            let of = |profile: usize| SampledErrors { weight_squares: self.errors[profile].powi(2), update: self.update[profile] };
            // 64 sums that each move by an eighth of the distance.
            let weights = Sketch { sums: [self.position / 8.0; 64], squares: 1.0 };
            StateSample { layout: self.layout, weights, near: of(0), compact: of(1) }
        }

        /// Moves the weights by a distance in some steps, and decides. Each decision is that of a new process, too.
        fn save_after(&mut self, steps: u64, distance: f64) -> (Profile, PrecisionReason) {
            (self.step, self.position) = (self.step + steps, self.position + distance);
            let sample = self.sample();
            let earlier = self.last.as_ref().map(|(step, decision)| (*step, decision));
            let decision = PrecisionDecision::decide(earlier, self.step, Some(&sample));
            let text = Value::Object(Map::from_iter([(PrecisionDecision::KEY.to_owned(), decision.to_value().unwrap())])).to_string();
            let read: Map<String, Value> = serde_json::from_str(&text).unwrap();
            assert_eq!(PrecisionDecision::of(&read).as_ref(), Some(&decision), "{text}");
            self.last = Some((self.step, decision.clone()));
            (decision.profile, decision.reason)
        }

        fn saves(&mut self, distances: &[f64]) -> Vec<(Profile, PrecisionReason)> {
            distances.iter().map(|distance| self.save_after(10, *distance)).collect()
        }
    }

    #[test]
    fn warm_up_is_near_at_most_and_a_stable_training_compact() {
        let mut training = Training::new();
        let warm_up = training.saves(&[0.0, 0.002, 0.004, 0.006, 0.008, 0.010, 0.010, 0.010]);
        let near = (Near, Rising);
        let start = [(Lossless, First), (Lossless, Waiting), (Lossless, Waiting), near, near, near, near, near];
        assert_eq!(warm_up, start);
        // The rises took 4 saves, of which the last moved by 0.008. The fourth save after it permits `compact`.
        assert_eq!(training.saves(&[0.010, 0.010, 0.010, 0.009]), [(Near, Waiting), (Near, Waiting), (Compact, Stable), (Compact, Stable)]);
        // The learning rate rises again: `near` at once, and `compact` after it has been stable for three saves.
        let again = training.saves(&[0.02, 0.02, 0.02, 0.02, 0.02]);
        assert_eq!(again, [near, (Near, Waiting), (Near, Waiting), (Compact, Stable), (Compact, Stable)]);
    }

    #[test]
    fn a_long_warm_up_with_many_saves_does_not_count_as_stable() {
        let mut training = Training::new();
        for save in 0..200 {
            let (profile, reason) = training.save_after(10, 1e-4 * f64::from(save));
            assert_ne!(profile, Compact, "save {save}: {reason:?}");
        }
        let stable = (0..200).take_while(|_| training.save_after(10, 0.02).0 != Compact).count();
        assert!(stable < 200, "{stable}");
    }

    fn stable() -> Training {
        let mut training = Training::new();
        assert_eq!(training.saves(&[0.01; 7]).last(), Some(&(Compact, Stable)));
        training
    }

    #[test]
    fn a_state_that_hovers_at_a_limit_keeps_its_profile() {
        let mut training = stable();
        // Rounding by `compact` moves the weights by 9.5 to 12.4 % of what training does.
        for error in [0.00095, 0.00105, 0.00124, 0.00099, 0.0012].repeat(5) {
            training.errors[1] = error;
            assert_eq!(training.save_after(10, 0.01), (Compact, Stable), "{error}");
        }
        training.errors[1] = 0.00126;
        assert_eq!(training.save_after(10, 0.01), (Near, WeightsError));
        // Below the limit that ended it, but above the one to come back.
        training.errors[1] = 0.00105;
        assert_eq!(training.saves(&[0.01; 5]), [(Near, WeightsError); 5]);
        let mut changes = 0;
        let mut before = Near;
        for error in [0.00095, 0.0013].repeat(20) {
            training.errors[1] = error;
            let (profile, _) = training.save_after(10, 0.01);
            changes += u32::from(std::mem::replace(&mut before, profile) != profile);
        }
        assert_eq!(changes, 0, "three saves in a row must permit a coarser profile");
    }

    #[test]
    fn a_training_that_comes_to_rest_is_saved_without_loss() {
        let mut training = stable();
        let decay: Vec<f64> = (1..20).map(|save| 0.01 * 0.5f64.powi(save)).collect();
        let saves = training.saves(&decay);
        let profiles: Vec<Profile> = saves.iter().map(|(profile, _)| *profile).collect();
        assert!(profiles.is_sorted_by(|a, b| a >= b), "{profiles:?}");
        assert_eq!(saves.last(), Some(&(Lossless, WeightsError)));
        // Rounding moves the weights by 2e-5 and 1e-6: at most an eighth of what training does.
        let at = |profile: Profile| profiles.iter().zip(&decay).filter(move |(at, _)| **at == profile).map(|(_, change)| *change);
        assert!(at(Compact).all(|change| 2e-5 <= change * 0.1251) && at(Near).all(|change| 1e-6 <= change * 0.1251));
        assert_eq!(training.save_after(10, 0.0), (Lossless, WeightsError), "a state that did not change at all");
    }

    #[test]
    fn saves_at_unequal_distances_are_no_rise() {
        // A straight path, and a random walk, as far in 10 steps as the training before.
        let paths: [fn(f64) -> f64; 2] = [|steps| 0.001 * steps, |steps| 0.01 * (steps / 10.0).sqrt()];
        for path in paths {
            let mut training = stable();
            for steps in [1u32, 100, 3, 1000, 10].repeat(4) {
                let (_, reason) = training.save_after(steps.into(), path(steps.into()));
                assert_ne!(reason, Rising, "{steps} steps");
            }
        }
    }

    #[test]
    fn a_large_error_of_the_update_forbids_a_profile() {
        let mut training = stable();
        training.update = [Some(0.02), Some(0.051)];
        assert_eq!(training.saves(&[0.01; 2]), [(Near, UpdateError); 2]);
        training.update = [Some(0.051), Some(0.1)];
        assert_eq!(training.saves(&[0.01; 2]), [(Lossless, UpdateError); 2]);
        training.update = [None, None];
        let back = training.saves(&[0.01; 6]);
        assert_eq!(back.iter().map(|(profile, _)| *profile).collect::<Vec<_>>(), [Lossless, Lossless, Near, Near, Near, Compact]);
    }

    #[test]
    fn a_state_with_nothing_to_compare_is_saved_without_loss() {
        let mut training = stable();
        training.layout = 2;
        assert_eq!(training.save_after(10, 0.01), (Lossless, First), "other weights than before");
        let earlier = training.last.as_ref().map(|(step, decision)| (*step, decision));
        let blank = PrecisionDecision::decide(earlier, training.step + 10, None);
        assert_eq!((blank.profile, blank.reason), (Lossless, NotMeasured));
        let next = PrecisionDecision::decide(Some((training.step + 10, &blank)), training.step + 20, Some(&training.sample()));
        assert_eq!((next.profile, next.reason), (Lossless, First));
    }

    #[test]
    fn a_record_that_is_not_valid_is_ignored() {
        let valid = stable().last.unwrap().1.to_value().unwrap();
        let of = |value: Value| PrecisionDecision::of(&Map::from_iter([(PrecisionDecision::KEY.to_owned(), value)]));
        assert!(of(valid.clone()).is_some());
        for wrong in [json!(null), json!("near"), json!({"profile": "near"}), json!([valid])] {
            assert_eq!(of(wrong.clone()), None, "{wrong}");
        }
        // Sums that cannot be read are no state to compare with.
        for sums in ["", "zz", "7fc00000", "é".repeat(256).as_str()] {
            let mut broken = valid.clone();
            broken["state"]["sums"] = json!(sums);
            let broken = of(broken).unwrap();
            let next = PrecisionDecision::decide(Some((1, &broken)), 2, Some(&Training::new().sample()));
            assert_eq!(next.reason, First, "{sums}");
        }
    }

    #[test]
    fn a_decision_reads_as_a_line() {
        let mut training = stable();
        training.save_after(10, 0.01);
        let line = training.last.unwrap().1.to_string();
        assert_eq!(
            line,
            "compact: stable; weights changed by 1.00 % since step 70; near would move them by 0.01 % of that and change the update \
             by 1.40 %; compact would move them by 0.20 % of that and change the update by 2.80 %"
        );
    }
}
