//! Search for the rule of a step, from a few elements of both states.
//!
//! A weight is linear in the decay and in the scale once epsilon is known, so both follow by least squares, with the
//! worst tenth of the elements left out: where rounding errors of the update outweigh the weight, a fit learns nothing.
//! Then the neighbours of each number and the other forms are tried, and the one that gives the most elements *exactly*
//! wins. The betas of a second moment are short decimals: each usual first beta gives gradients, those give the second
//! beta by least squares, and it is rounded to few digits.
//!
//! Rules that were found before are tried first. A search costs thousands of elements, a try costs a few hundred.

use tensorcask_kernels::floats::floats;
use tensorcask_kernels::replay::{Divisor, Moment, Square, Step, Update};

use super::super::adam::{candidates, glance, second_beta};
use super::super::predict::log2_about;
use super::inputs::Inputs;
use super::rule::Rule;

/// Rules that were found last, the most recent first.
#[derive(Debug)]
pub(in crate::codec) struct Known<T> {
    rules: Vec<Match<T>>,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self { rules: Vec::new() }
    }
}

/// A rule, and how many elements of a sample it gives exactly.
#[derive(Debug, Clone, Copy)]
pub(in crate::codec) struct Match<T> {
    pub rule: T,
    exact: usize,
    of: usize,
}

impl<T> Match<T> {
    /// Counts the elements that a rule gives exactly.
    pub(in crate::codec) fn of(rule: T, replayed: &[u8], data: &[u8]) -> Self {
        let exact = replayed.as_chunks::<4>().0.iter().zip(data.as_chunks::<4>().0).filter(|(a, b)| a == b).count();
        Self { rule, exact, of: data.len() / 4 }
    }

    pub(in crate::codec) fn exact_percent(&self) -> usize {
        (100 * self.exact).checked_div(self.of).unwrap_or(100)
    }

    pub(in crate::codec) fn or_better(self, other: Self) -> Self {
        if other.exact > self.exact { other } else { self }
    }
}

/// Number of stretches in the sample of a search.
const STRETCHES: usize = 64;

/// Number of rules to remember: parameter groups differ in decay and learning rate.
const REMEMBERED: usize = 8;

impl<T: Copy + PartialEq> Known<T> {
    /// Returns the best of the known rules, if it does as well as where it was found. Otherwise searches, and remembers
    /// what it finds.
    pub(in crate::codec) fn find(&mut self, count: impl Fn(T) -> Match<T>, search: impl FnOnce() -> Option<T>) -> Option<Match<T>> {
        let known = self.rules.iter().map(|known| (count(known.rule), known.exact_percent()));
        let best = known.reduce(|a, b| if b.0.exact > a.0.exact { b } else { a });
        if let Some((found, before)) = best
            && found.exact_percent() + 4 >= before.clamp(50, 97)
        {
            return Some(found);
        }
        let best = best.map(|(found, _)| found);
        let searched = search().map(&count);
        let found = match (best, searched) {
            (Some(best), Some(searched)) => best.or_better(searched),
            (best, searched) => best.or(searched)?,
        };
        if found.exact_percent() >= 50 {
            self.rules.retain(|known| known.rule != found.rule);
            self.rules.insert(0, found);
            self.rules.truncate(REMEMBERED);
        }
        Some(found)
    }
}

fn count<T>(inputs: Inputs<'_>, data: &[u8], rule: T, wrap: impl Fn(T) -> Rule) -> Match<T>
where
    T: Copy,
{
    let mut out = vec![0; data.len()];
    inputs.replay(wrap(rule), &mut out);
    Match::of(rule, &out, data)
}

/// Searches for the step of weights.
pub(in super::super) fn step(known: &mut Known<Step>, weights: &[u8], first: &[u8], second: &[u8], data: &[u8]) -> Option<Match<Step>> {
    let [weights, first, second, data] = [weights, first, second, data].map(|data| glance(data, STRETCHES));
    let inputs = Inputs::Step { weights: &weights, first: &first, second: &second };
    let count = |step| count(inputs, &data, step, Rule::Step);
    known.find(count, || {
        let points: Vec<Point> = floats(&weights)
            .zip(floats(&data))
            .zip(floats(&first).zip(floats(&second)))
            .map(|((w0, w1), (m, v))| Point { before: w0.into(), now: w1.into(), first: m.into(), root: f64::from(v).sqrt() })
            .filter(|point| [point.before, point.now, point.first, point.root].iter().all(|x| x.is_finite()))
            .collect();
        let (epsilon, fit) = fit_step(&points)?;
        Some(climb(fit, epsilon, count))
    })
}

/// One weight in a fit.
#[derive(Debug, Clone, Copy)]
struct Point {
    before: f64,
    now: f64,
    first: f64,
    /// Root of the second moment.
    root: f64,
}

/// Result of a fit: `now = before + loss * before + scale * first / (root + epsilon)`.
#[derive(Debug, Clone, Copy)]
struct Fit {
    loss: f64,
    scale: f64,
    /// Mean error in bits of an f32.
    bits: f64,
}

/// Mean error in bits above which other values of epsilon do not help.
const HOPELESS: f64 = 12.0;

/// Returns epsilon and the fit with it. `None` if the weights are not one step apart.
fn fit_step(points: &[Point]) -> Option<(f64, Fit)> {
    let few: Vec<Point> = points.iter().step_by(4).copied().collect();
    let score = |epsilon: f64| fit(&few, epsilon).map(|fit| (fit.bits, epsilon));
    let better = |a: (f64, f64), b: (f64, f64)| if b.0 < a.0 { b } else { a };
    let usual = [1e-8, 0.0].into_iter().filter_map(score).reduce(better).filter(|best| best.0 < HOPELESS)?;
    let mut best = [1e-6, 1e-7, 1e-5, 1e-15, 1e-10, 1e-9, 1e-12].into_iter().filter_map(score).fold(usual, better);
    // Bias correction scales epsilon.
    let mut width = 2.0f64;
    while best.1 > 0.0 && width > 1.001 {
        best = [best.1 / width, best.1 * width].into_iter().filter_map(score).fold(best, better);
        width = width.sqrt();
    }
    Some((best.1, fit(points, best.1)?))
}

/// Fits by weighted least squares, three times: the second and third time without the worst tenth.
fn fit(points: &[Point], epsilon: f64) -> Option<Fit> {
    let rows: Vec<[f64; 3]> = points
        .iter()
        .filter_map(|point| {
            let weight = 1.0 / (point.before.abs() + point.now.abs());
            let row = [point.before * weight, point.first / (point.root + epsilon) * weight, (point.now - point.before) * weight];
            row.iter().all(|x| x.is_finite()).then_some(row)
        })
        .collect();
    if rows.is_empty() {
        return None;
    }
    let mut loss = 0.0;
    let mut scale = 0.0;
    let mut errors: Vec<f64> = vec![0.0; rows.len()];
    let mut worst = f64::INFINITY;
    for _ in 0..3 {
        let mut xx = 0.0;
        let mut xy = 0.0;
        let mut yy = 0.0;
        let mut xt = 0.0;
        let mut yt = 0.0;
        for ([x, y, target], _) in rows.iter().zip(&errors).filter(|(_, error)| **error <= worst) {
            (xx, xy, yy) = (xx + x * x, xy + x * y, yy + y * y);
            (xt, yt) = (xt + x * target, yt + y * target);
        }
        let determinant = xx * yy - xy * xy;
        (loss, scale) = match determinant > 1e-12 * xx * yy {
            true => ((xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant),
            // No moment, or moments that are multiples of the weights.
            false if xx > 0.0 => (xt / xx, 0.0),
            false => (0.0, 0.0),
        };
        for (error, [x, y, target]) in errors.iter_mut().zip(&rows) {
            *error = (target - loss * x - scale * y).abs();
        }
        let mut sorted = errors.clone();
        let (_, tenth, _) = sorted.select_nth_unstable_by(rows.len() * 9 / 10, f64::total_cmp);
        worst = *tenth;
    }
    let bits = errors.iter().map(|error| log2_about(1.0 + error * f64::from(1 << 24))).sum::<f64>() / rows.len() as f64;
    (bits.is_finite() && loss.is_finite() && scale.is_finite()).then_some(Fit { loss, scale, bits })
}

/// Returns the number some ulps away.
fn nudged(x: f32, ulps: i32) -> f32 {
    let moved = f32::from_bits(x.to_bits().wrapping_add_signed(ulps));
    if moved.is_finite() && x != 0.0 { moved } else { x }
}

/// Tries the neighbours of a fit, other forms, and bias corrections.
fn climb(fit: Fit, epsilon: f64, count: impl Fn(Step) -> Match<Step>) -> Step {
    let start = Step {
        update: Update::ScaleFirst,
        divisor: Divisor::Divided,
        decay: (1.0 + fit.loss) as f32,
        scale: fit.scale as f32,
        correction: 1.0,
        epsilon: epsilon as f32,
    };
    let neighbours = |mut best: Match<Step>| {
        for _ in 0..2 {
            for ulps in [-2, -1, 1, 2] {
                best = best.or_better(count(Step { decay: nudged(best.rule.decay, ulps), ..best.rule }));
            }
            for ulps in [-4, -3, -2, -1, 1, 2, 3, 4] {
                best = best.or_better(count(Step { scale: nudged(best.rule.scale, ulps), ..best.rule }));
            }
        }
        best
    };
    let mut best = neighbours(count(start));
    for update in Update::ALL {
        let decay = if update.takes_loss() { fit.loss as f32 } else { best.rule.decay };
        if update.takes_loss() != best.rule.update.takes_loss() || update != best.rule.update {
            best = best.or_better(count(Step { update, decay, ..best.rule }));
        }
    }
    for correction in corrections(epsilon) {
        let correction = correction.max(f64::from(f32::MIN_POSITIVE));
        let scale = fit.scale / correction;
        let epsilon = short(epsilon / correction);
        let step = Step { correction: correction as f32, scale: scale as f32, epsilon: epsilon as f32, ..best.rule };
        best = best.or_better(count(step));
        let step = Step { divisor: Divisor::Multiplied, correction: (1.0 / correction) as f32, ..step };
        best = best.or_better(count(step));
    }
    // Some kernels compute the correction in binary32, a few ulps away. The scale moves with it.
    let corrected = best.rule;
    if corrected.correction != 1.0 {
        for correction in [-2, -1, 1, 2].map(|ulps| nudged(corrected.correction, ulps)) {
            for scale in [-2, -1, 0, 1, 2].map(|ulps| nudged(corrected.scale, ulps)) {
                best = best.or_better(count(Step { correction, scale, ..corrected }));
            }
        }
    }
    neighbours(best).rule
}

/// Returns the roots of bias corrections, early in training, that may have scaled epsilon.
fn corrections(epsilon: f64) -> Vec<f64> {
    let mut all = Vec::new();
    for beta in [0.999, 0.95, 0.98, 0.99] {
        let mut power = 1.0;
        for _ in 0..1000 {
            power *= beta;
            let correction = f64::sqrt(1.0 - power);
            let unscaled = epsilon / correction;
            // Epsilon is a short decimal.
            if (short(unscaled) - unscaled).abs() < 0.02 * unscaled && power > 1e-7 {
                all.push(correction);
            }
        }
    }
    // The search takes a bounded time.
    all.truncate(400);
    all
}

/// Returns the nearest number of one digit.
fn short(x: f64) -> f64 {
    let mut unit = 1.0;
    while x > 0.0 && x < unit && unit > 1e-30 {
        unit /= 10.0;
    }
    if x > 0.0 { (x / unit).round() * unit } else { x }
}

/// Searches for the step of second moments.
pub(super) fn moment(known: &mut Known<Moment>, second: &[u8], before: &[u8], now: &[u8], data: &[u8]) -> Option<Match<Moment>> {
    let [second, before, now, data] = [second, before, now, data].map(|data| glance(data, STRETCHES));
    let inputs = Inputs::Moment { second: &second, before: &before, now: &now };
    let count = |moment| count(inputs, &data, moment, Rule::Moment);
    known.find(count, || {
        let points: Vec<[f64; 4]> = floats(&second)
            .zip(floats(&data))
            .zip(floats(&before).zip(floats(&now)))
            .map(|((v0, v1), (m0, m1))| [v0, v1, m0, m1].map(f64::from))
            .filter(|point| point.iter().all(|x| x.is_finite()) && point[1] > 0.0)
            .collect();
        let mut best: Option<Match<Moment>> = None;
        for first in [0.9, 0.95, 0.8, 0.85, 0.98, 0.99, 0.5, 0.0, 0.7, 0.6, 0.92, 0.93, 0.96, 0.97, 0.975, 0.995, 0.999] {
            let with_gradient = points.iter().map(|[v0, v1, m0, m1]| [*v0, *v1, m0 + (m1 - m0) / (1.0 - first)]);
            let Some(beta) = second_beta(with_gradient) else { continue };
            for second in candidates(beta) {
                // 1 - beta, computed in binary64 or in binary32.
                let weights = [(1.0 - first) as f32, 1.0 - first as f32];
                let shares = [(1.0 - second) as f32, 1.0 - second as f32];
                for (weight, share) in weights.into_iter().zip(shares) {
                    let found = count(Moment { square: Square::Fused, decay: second as f32, share, weight });
                    best = Some(best.map_or(found, |best| best.or_better(found)));
                }
            }
            if best.is_some_and(|best| best.exact_percent() >= 80) {
                break;
            }
        }
        let mut best = best?;
        for square in Square::ALL {
            best = best.or_better(count(Moment { square, ..best.rule }));
        }
        Some(best.rule)
    })
}
