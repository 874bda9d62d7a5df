//! Finds settings for all tensors of a state that together take the fewest bytes within a budget of errors.
//!
//! ```text
//! tensors ─> a sample of each ─> every setting: bytes, error ─> the fewest bytes within the budget ─> rules
//! ```
//!
//! Each tensor and setting is tried on its own, on all cores. Errors of different tensors add up, so the choice is a knapsack
//! problem for each kind of error. A price of the error solves it: at a price, each tensor takes the setting with the least
//! bytes + price * error. The lowest price within the budget is found by bisection.
//!
//! Source: Agrawal et al., DynaQuant (arXiv 2306.11800), which searches configurations of pruning, protection and levels.

use std::collections::{BTreeMap, HashMap};

use rayon::prelude::*;
use tensorcask_kernels::errors::updates;
use tensorcask_kernels::floats::numbers;

use super::search::{ChunkTrial, levels, steps_and_bits, try_chunk};
use super::{BoundedSetting, Precision, Setting, round};
use crate::codec::{Chunk, KMeans, LevelError, Partner, sensitivities};
use crate::{Dtype, Error, Result, TensorView, parallel};

/// Elements of a tensor that are tried, from its middle.
const SAMPLE: usize = 1 << 16;

/// Greatest errors of a rounded state. Both are root mean squares over the whole state, relative to what they change.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StateBudget {
    /// Error of the optimizer's update: of Adam's m / (sqrt(v) + 1e-8), and of SGD's momentum.
    pub update: f64,
    /// Error of the weights, each number weighed by its squared gradient: the gradient that [`TensorView::with_gradient`] set, or
    /// else the second moment. Tensors without either keep the same limit by themselves, with all numbers alike. The weights are
    /// the masters, and model tensors without a master.
    pub weights: f64,
}

/// Settings that were found for a state.
#[derive(Debug, Clone, PartialEq)]
pub struct StatePrecision {
    /// Rules with these settings, for saves of this state and later ones.
    pub precision: Precision,
    /// Setting of each tensor that was tried, by name.
    pub settings: BTreeMap<String, Setting>,
    /// Estimated bytes of the tensors that were tried, as a base.
    pub stored_bytes: u64,
    /// Bytes of these tensors without compression.
    pub tensor_bytes: u64,
    /// Errors of the sample with these settings, in the terms of the budget. 0 without such tensors.
    pub errors: StateBudget,
}

/// Finds the settings with which a state takes the fewest bytes within a budget. Tries a sample of each tensor.
///
/// Tried are masters, moments, and model tensors without a master, of f32 or bf16. All others stay exact. Shards of tensors are
/// an `Unsupported` error.
///
/// ```
/// use tensorcask::precision::{StateBudget, search_state};
/// use tensorcask::{Dtype, TensorView};
/// let bytes = |scale: f32| -> Vec<u8> { (1..4000).flat_map(|i| ((i as f32).sin() * scale).to_le_bytes()).collect() };
/// let (weights, first) = (bytes(0.1), bytes(1e-3));
/// let second: Vec<u8> = (1..4000).flat_map(|i| (1e-6 / i as f32).to_le_bytes()).collect();
/// let state = [("model.w", &weights), ("optim.exp_avg.w", &first), ("optim.exp_avg_sq.w", &second)];
/// let state: Vec<TensorView> =
///     state.iter().map(|(name, data)| TensorView::new(*name, Dtype::F32, &[3999], data)).collect::<Result<_, _>>()?;
/// let found = search_state(&state, StateBudget { update: 0.02, weights: 1e-3 })?;
/// assert!(found.errors.update <= 0.02 && found.errors.weights <= 1e-3);
/// assert!(found.stored_bytes < found.tensor_bytes / 2);
/// # Ok::<(), tensorcask::Error>(())
/// ```
pub fn search_state(tensors: &[TensorView<'_>], budget: StateBudget) -> Result<StatePrecision> {
    for (name, limit) in [("update", budget.update), ("weights", budget.weights)] {
        if !(limit.is_finite() && limit >= 0.0) {
            return Err(Error::invalid(format!("the budget {limit} of the {name} error is not a relative error such as 0.01")));
        }
    }
    let mut parameters = Parameters::new();
    for tensor in tensors {
        if tensor.rect().shape != tensor.shape() {
            return Err(Error::unsupported("a search of settings needs whole tensors, not shards").tensor(tensor.name()));
        }
        parameters.entry(tensor.param()).or_default().push(tensor);
    }
    let samples: Vec<Sample<'_>> = tensors.iter().filter_map(|tensor| Sample::of(tensor, &parameters)).collect();
    let trials = parallel::run(|| samples.par_iter().map(Sample::trials).collect::<Result<Vec<Vec<Trial>>>>())?;
    let mut chosen: Vec<usize> = vec![0; samples.len()];
    let kinds =
        [(Kind::Adam, budget.update), (Kind::Momentum, budget.update), (Kind::Sensed, budget.weights), (Kind::Unsensed, budget.weights)];
    for (kind, limit) in kinds {
        let members: Vec<usize> = (0..samples.len()).filter(|&at| samples[at].kind == kind).collect();
        choose_settings(&samples, &trials, &members, kind, limit, &mut chosen)?;
    }
    let settings: Vec<Setting> = chosen.iter().zip(&trials).map(|(&at, trials)| trials[at].setting).collect();
    let error = |kind| joint_error(&samples, &settings, kind);
    let errors =
        StateBudget { update: error(Kind::Adam)?.max(error(Kind::Momentum)?), weights: error(Kind::Sensed)?.max(error(Kind::Unsensed)?) };
    let bytes = chosen.iter().zip(&trials).map(|(&at, trials)| trials[at].bytes).sum::<f64>();
    let settings: BTreeMap<String, Setting> = samples.iter().map(|sample| sample.tensor.name().to_owned()).zip(settings).collect();
    Ok(StatePrecision {
        precision: rules(tensors, &settings)?,
        stored_bytes: bytes as u64,
        tensor_bytes: samples.iter().map(|sample| sample.tensor.data().len() as u64).sum(),
        settings,
        errors,
    })
}

/// Kind of error that rounding a tensor causes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Adam,
    Momentum,
    /// Weights with a gradient or second moment. Their errors are in its units.
    Sensed,
    /// Weights with neither, such as statistics of a batch norm.
    Unsensed,
}

/// Tensors of each parameter.
type Parameters<'a> = HashMap<&'a str, Vec<&'a TensorView<'a>>>;

/// A part of a tensor that stands for all of it.
struct Sample<'a> {
    tensor: &'a TensorView<'a>,
    kind: Kind,
    chunk: Chunk<'a>,
    /// The same elements of the parameter's model weight, first and second moment, and gradient, by role.
    partners: Vec<Partner<'a>>,
    /// Weight of each squared error of a weight; empty for equal weights.
    sensitivities: Vec<f64>,
    /// Elements of the tensor for each element of the sample.
    scale: f64,
}

/// A setting that was tried on a sample.
struct Trial {
    setting: Setting,
    /// Estimated bytes of the whole tensor.
    bytes: f64,
    /// Squared error, and what it is relative to, of the whole tensor.
    error: f64,
}

impl<'a> Sample<'a> {
    fn of(tensor: &'a TensorView<'a>, parameters: &Parameters<'a>) -> Option<Self> {
        let same = |role: &str| {
            parameters.get(tensor.param())?.iter().copied().find(|other| other.role() == role && other.rect() == tensor.rect())
        };
        let has_moment = |role: &str| same(role).is_some_and(|other| other.dtype() == Dtype::F32);
        let kind = match tensor.role() {
            "exp_avg" if has_moment("exp_avg_sq") => Kind::Adam,
            "exp_avg_sq" if has_moment("exp_avg") => Kind::Adam,
            "momentum" => Kind::Momentum,
            "master" => Kind::Unsensed,
            "model" if same("master").is_none() => Kind::Unsensed,
            _ => return None,
        };
        if tensor.dtype() != Dtype::F32 && (kind != Kind::Unsensed || tensor.dtype() != Dtype::Bf16) {
            return None;
        }
        let count = usize::try_from(tensor.rect().element_count()?).ok()?;
        let row = tensor.rect().shape.get(1..).map_or(1, |rest| rest.iter().product::<u64>().max(1));
        // Whole rows, unless a row is longer than the sample.
        let row = usize::try_from(row).ok().filter(|row| *row <= SAMPLE);
        let step = row.unwrap_or(1);
        let taken = count.min(SAMPLE / step * step);
        let start = (count - taken) / 2 / step * step;
        let part = |dtype: Dtype, data: &'a [u8]| {
            let byte = |element: usize| dtype.byte_count(element as u64).and_then(|byte| usize::try_from(byte).ok());
            data.get(byte(start)?..byte(start + taken)?)
        };
        let mut partners = Vec::new();
        for role in ["model", "exp_avg", "exp_avg_sq"] {
            if let Some(found) = same(role).filter(|found| found.role() != tensor.role() && !found.dtype().is_packed()) {
                let data = part(found.dtype(), found.data())?;
                partners.push(Partner { role, dtype: found.dtype(), data, base: None, gradient: None });
            }
        }
        if let Some((dtype, gradient)) = tensor.gradient() {
            partners.push(Partner { role: "gradient", dtype, data: part(dtype, gradient)?, base: None, gradient: None });
        }
        let row_elements = row.filter(|_| tensor.rect().shape.len() > 1).unwrap_or(0) as u64;
        let chunk =
            Chunk { role: tensor.role(), row_elements, ..Chunk::new(tensor.dtype(), taken as u64, part(tensor.dtype(), tensor.data())?) };
        let (kind, sensitivities) = match sensitivities(&Chunk { partners: &partners, ..chunk }) {
            Some(sensitivities) if kind == Kind::Unsensed => (Kind::Sensed, sensitivities),
            _ => (kind, Vec::new()),
        };
        (taken > 0).then(|| Self { tensor, kind, chunk, partners, sensitivities, scale: count as f64 / taken as f64 })
    }

    fn chunk(&self) -> Chunk<'_> {
        Chunk { partners: &self.partners, ..self.chunk }
    }

    /// Tries every setting. The first one is lossless.
    fn trials(&self) -> Result<Vec<Trial>> {
        let errors: &[LevelError] = match self.kind {
            Kind::Sensed => &[LevelError::Relative, LevelError::Sensitive],
            Kind::Adam | Kind::Momentum | Kind::Unsensed => &[LevelError::Relative],
        };
        let pruned = [0u16, 100];
        let kmeans = levels().into_iter().flat_map(|kmeans| errors.iter().map(move |&error| KMeans { error, ..kmeans }));
        let kmeans = kmeans.flat_map(|kmeans| pruned.map(|pruned| Setting::KMeans(KMeans { pruned, ..kmeans })));
        let others = std::iter::once(Setting::Lossless).chain(steps_and_bits()).chain([Setting::Blockwise8]);
        let settings: Vec<Setting> = others.chain(kmeans).filter(|setting| setting.rounds(self.tensor.dtype())).collect();
        let tried = settings.into_par_iter().map(|setting| {
            let ChunkTrial { data, bytes, .. } = try_chunk(&self.chunk(), setting)?;
            Ok(Trial { setting, bytes: bytes as f64 * self.scale, error: self.error(&data)?[0] })
        });
        tried.collect()
    }

    /// Squared error of the tensor if it is stored as `data`, and what it is relative to.
    fn error(&self, data: &[u8]) -> Result<[f64; 2]> {
        let chunk = self.chunk();
        let partner = |role: &str| chunk.partner(role).map(|partner| partner.data).ok_or_else(|| self.lacks(role));
        let sums = match (self.kind, self.tensor.role()) {
            (Kind::Adam, "exp_avg") => updates([chunk.data, data], [partner("exp_avg_sq")?; 2]),
            (Kind::Adam, _) => updates([partner("exp_avg")?; 2], [chunk.data, data]),
            (Kind::Momentum | Kind::Sensed | Kind::Unsensed, _) => {
                let weights = self.sensitivities.iter().copied().chain(std::iter::repeat(1.0));
                let pairs = numbers(chunk.dtype.number_format(), chunk.data).zip(numbers(chunk.dtype.number_format(), data)).zip(weights);
                let pairs = pairs.filter(|((x, y), _)| x.is_finite() && y.is_finite());
                pairs.fold([0.0; 2], |[error, size], ((x, y), weight)| {
                    let x = f64::from(x);
                    let y = f64::from(y);
                    [error + weight * (y - x) * (y - x), size + weight * x * x]
                })
            }
        };
        Ok(sums.map(|sum| sum * self.scale))
    }

    fn lacks(&self, role: &str) -> Error {
        Error::invalid(format!("the tensor of role `{role}` of its parameter has another type")).tensor(self.tensor.name())
    }
}

/// Chooses a trial for each member: the fewest bytes with an error of at most `limit`.
fn choose_settings(
    samples: &[Sample<'_>],
    trials: &[Vec<Trial>],
    members: &[usize],
    kind: Kind,
    limit: f64,
    chosen: &mut [usize],
) -> Result<()> {
    const ROUNDS: usize = 8;
    // Both moments of a parameter change the same update.
    let counted = members.iter().filter(|&&at| samples[at].tensor.role() != "exp_avg_sq");
    let size: f64 = counted.map(|&at| samples[at].error(samples[at].chunk.data).map(|[_, size]| size)).sum::<Result<f64>>()?;
    // Errors of both moments of a parameter add up only nearly. If they exceed the limit, the budget shrinks.
    let mut budget = limit * limit * size;
    for _ in 0..ROUNDS {
        cheapest_within(trials, members, budget, chosen);
        let settings: Vec<Setting> = chosen.iter().zip(trials).map(|(&at, trials)| trials[at].setting).collect();
        let error = joint_error(samples, &settings, kind)?;
        if error <= limit {
            return Ok(());
        }
        budget *= 0.98 * (limit / error).powi(2);
    }
    members.iter().for_each(|&at| chosen[at] = 0);
    Ok(())
}

/// The choice with the fewest bytes at the lowest price of the error for which all errors are within the budget.
fn cheapest_within(trials: &[Vec<Trial>], members: &[usize], budget: f64, chosen: &mut [usize]) {
    let at_price = |price: f64| -> Vec<usize> {
        let cost = |trial: &Trial| trial.bytes + if trial.error > 0.0 { price * trial.error } else { 0.0 };
        let best = |trials: &Vec<Trial>| (0..trials.len()).min_by(|&a, &b| cost(&trials[a]).total_cmp(&cost(&trials[b]))).unwrap_or(0);
        members.iter().map(|&at| best(&trials[at])).collect()
    };
    let error = |choice: &[usize]| members.iter().zip(choice).map(|(&at, &trial)| trials[at][trial].error).sum::<f64>();
    // Prices span all sizes of errors: powers of two.
    let mut low = -200.0f64;
    let mut high = 400.0f64;
    let mut best: Vec<usize> = vec![0; members.len()];
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        let choice = at_price(middle.exp2());
        if error(&choice) <= budget {
            (best, high) = (choice, middle);
        } else {
            low = middle;
        }
    }
    // Single tensors use up the rest of the budget.
    let mut left = budget - error(&best);
    for (&at, trial) in members.iter().zip(&mut best) {
        let now = &trials[at][*trial];
        let fits = |&next: &usize| trials[at][next].error - now.error <= left;
        let fewer = (0..trials[at].len()).filter(fits).min_by(|&a, &b| trials[at][a].bytes.total_cmp(&trials[at][b].bytes));
        if let Some(next) = fewer.filter(|&next| trials[at][next].bytes < now.bytes) {
            left -= trials[at][next].error - now.error;
            *trial = next;
        }
    }
    for (&at, trial) in members.iter().zip(best) {
        chosen[at] = trial;
    }
}

/// Error of a kind over all samples with these settings: root mean square, relative to what it changes.
fn joint_error(samples: &[Sample<'_>], settings: &[Setting], kind: Kind) -> Result<f64> {
    let of_role = |role: &str| (0..samples.len()).filter(|&at| samples[at].tensor.role() == role).collect::<Vec<usize>>();
    let place = |at: usize| (samples[at].tensor.param(), samples[at].tensor.rect().offset.as_slice());
    let seconds: HashMap<(&str, &[u64]), usize> = of_role("exp_avg_sq").into_iter().map(|at| (place(at), at)).collect();
    let stored = |at: usize| {
        let bounded = BoundedSetting { setting: settings[at], bound: None };
        Ok::<_, Error>(round(bounded, &samples[at].chunk())?.data.into_owned())
    };
    let of_sample = |at: usize| -> Result<[f64; 2]> {
        let sample = &samples[at];
        let stored_sample = stored(at)?;
        if kind != Kind::Adam {
            return sample.error(&stored_sample);
        }
        let Some(&second) = seconds.get(&place(at)) else { return Ok([0.0; 2]) };
        let sums = updates([sample.chunk.data, &stored_sample], [samples[second].chunk.data, &stored(second)?]);
        Ok(sums.map(|sum| sum * sample.scale))
    };
    // Each pair of moments is measured once.
    let members: Vec<usize> =
        (0..samples.len()).filter(|&at| samples[at].kind == kind && samples[at].tensor.role() != "exp_avg_sq").collect();
    let sums = parallel::run(|| members.par_iter().map(|&at| of_sample(at)).collect::<Result<Vec<[f64; 2]>>>())?;
    let [error, size] = sums.into_iter().fold([0.0; 2], |[error, size], more| [error + more[0], size + more[1]]);
    Ok(if size > 0.0 { (error / size).sqrt() } else { 0.0 })
}

/// Rules for the settings: for a role of which all tensors were tried, its most frequent setting; then the other tensors by name.
fn rules(tensors: &[TensorView<'_>], settings: &BTreeMap<String, Setting>) -> Result<Precision> {
    let mut roles: BTreeMap<&str, Vec<&TensorView<'_>>> = BTreeMap::new();
    for tensor in tensors {
        roles.entry(tensor.role()).or_default().push(tensor);
    }
    let mut precision = Precision::lossless();
    for (role, members) in &roles {
        let of = |tensor: &&TensorView<'_>| settings.get(tensor.name()).copied();
        let found: Vec<Setting> = members.iter().filter_map(of).collect();
        let count = |setting: &Setting| found.iter().filter(|other| *other == setting).count();
        let frequent = found.iter().max_by_key(|setting| count(setting)).filter(|_| found.len() == members.len()).copied();
        if let Some(setting) = frequent.filter(|setting| *setting != Setting::Lossless) {
            precision = precision.with(&globset::escape(role), setting, None)?;
        }
        for tensor in members {
            let Some(setting) = of(tensor).filter(|setting| *setting != frequent.unwrap_or(Setting::Lossless)) else { continue };
            // A rule takes a name that is a role for the role.
            let is_role = roles.contains_key(tensor.name());
            let name = if is_role { tensor.name().chars().map(|c| format!("[{c}]")).collect() } else { globset::escape(tensor.name()) };
            precision = precision.with(&name, setting, None)?;
        }
    }
    Ok(precision)
}
