//! Search for the forms and numbers of a step, from a few elements of both states.
//!
//! Moments of 8 bits still give scale and decay of the step to about 15 bits by least squares, because their rounding
//! errors cancel over thousands of elements. Then each weight tells its gradient. Where most of the first moment is lost,
//! the gradient hardly depends on the scale: such elements elect the clip factor, as in `tc.gradient`. With it, scale and
//! decay are moved until most gradients are short.
//!
//! Any numbers restore every bit. If no factor makes gradients short, because they were computed in binary32, they still
//! need only as many bits as the weight keeps of them.

use tensorcask_kernels::digits::{ESCAPE, shape};
use tensorcask_kernels::floats::{floats, unit, widen};
use tensorcask_kernels::gradient::{Blend, First, Scale, Second};
use tensorcask_kernels::joint::{self as kernel, Joint as Step, Solved, States};
use tensorcask_kernels::replay::{self as replays, Divisor, Square, Update};

use super::super::adam::{candidates, glance, second_beta};
use super::super::gradient::search::{elect, mantissa};
use super::super::replay::search::step as step_of;
use super::inputs::Lent;
use super::rule::{Found, Rule};
use super::states::FewStates;
use crate::Dtype;

/// Steps that were found last, the most recent first, and the number of chunks to pass over before the next search.
#[derive(Debug, Default)]
pub(super) struct Search {
    known: Vec<Known>,
    wait: u32,
    next_wait: u32,
    /// Number of chunks of weights to pass over before the next search for a step with known gradients.
    learn_wait: u32,
    next_learn_wait: u32,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    step: Step,
    /// Mean length of the gradients where it was found, in bits.
    length: f64,
}

const REMEMBERED: usize = 16;
/// Mean bits that a known step may take more than where it was found.
const SLACK: f64 = 0.7;
/// Greatest number of chunks to pass over after searches that found nothing better.
const MOST_CHUNKS_TO_WAIT: u32 = 4096;
/// Mean bits beyond those where a step was found that tell a step of another number, and the number of chunks to pass over
/// before such a step is searched for again.
const NEW_STEP: f64 = 6.0;
const MOST_CHUNKS_TO_WAIT_FOR_NEW_STEP: u32 = 3;
/// Elements below which no search is tried.
const LEAST_ELEMENTS: usize = 2048;
/// Stretches of a sample: of a fit, of a search, and of a trial.
const FIT_STRETCHES: usize = 4096;
const STRETCHES: usize = 512;
const FEW_STRETCHES: usize = 32;

/// A step that moves nothing: of weights that are missing, and of chunks whose step is not found.
pub(super) const USUAL: Step = Step {
    first: First { blend: Blend::Fused, decay: 0.9, weight: 0.1, scale: Scale::None, clip: 1.0 },
    second: Second { square: Square::Fused, decay: 0.95, share: 0.05 },
    step: replays::Step { update: Update::ScaleFirst, divisor: Divisor::Divided, decay: 1.0, scale: 0.0, correction: 1.0, epsilon: 1e-8 },
};

/// Usual betas, the most usual first.
const FIRST_BETAS: [f64; 7] = [0.9, 0.95, 0.8, 0.98, 0.99, 0.85, 0.5];
const SECOND_BETAS: [f64; 8] = [0.95, 0.999, 0.99, 0.98, 0.9, 0.995, 0.9999, 0.97];

/// Quotients of a few elements, and what they lead to.
struct Tried {
    quotients: Vec<u8>,
    gradients: Vec<u8>,
    /// Number of weights that they give exactly.
    weights: usize,
}

impl Tried {
    fn of(states: States<'_>, by: Step) -> Self {
        let mut quotients = vec![0; states.first.len()];
        kernel::quotients(states, by, &mut quotients);
        let gradients: Vec<u8> = floats(&quotients).flat_map(|quotient| unit(by.first.gradient(quotient))).collect();
        let mut weights = vec![0; gradients.len()];
        kernel::weights(states.before, &gradients, by, &mut weights);
        let weights = count_equal(states.weights, weights, states.weight_cut);
        Self { quotients, gradients, weights }
    }
}

fn count_equal(expected: &[u8], mut found: Vec<u8>, bits: u32) -> usize {
    kernel::cut_all(bits, &mut found);
    found.as_chunks::<4>().0.iter().zip(expected.as_chunks::<4>().0).filter(|(a, b)| a == b).count()
}

/// Returns the mean length of gradients, in bits. Elements whose weight is not explained take more.
fn mean_length(states: States<'_>, by: Step) -> f64 {
    let tried = Tried::of(states, by);
    let length = |quotient: f32| match shape(quotient).1 {
        ESCAPE => 32.0,
        length => f64::from(length),
    };
    let lengths = floats(&tried.quotients).map(length).sum::<f64>();
    let count = states.first.len() / 4;
    (lengths + 24.0 * count.saturating_sub(tried.weights) as f64) / count.max(1) as f64
}

/// Returns the percentages of the weights and of the second moments that a step explains.
pub(super) fn explained(states: States<'_>, by: Step) -> [u64; 2] {
    let tried = Tried::of(states, by);
    let mut squares = vec![0; tried.gradients.len()];
    kernel::squares(states.before.second, &tried.gradients, by.second, &mut squares);
    let squares = count_equal(states.second, squares, states.second_cut);
    [tried.weights, squares].map(|equal| (100 * equal).checked_div(states.first.len() / 4).unwrap_or(0) as u64)
}

/// First moments that gradients lead to, before they are rounded.
fn blended(states: States<'_>, gradients: &[u8], by: First) -> Vec<u8> {
    let mut out = vec![0; gradients.len()];
    tensorcask_kernels::gradient::blend(states.before.first, gradients, by, &mut out);
    out
}

/// Second moments that gradients lead to, before they are rounded.
fn squared(states: States<'_>, gradients: &[u8], by: Second) -> Vec<u8> {
    let mut out = vec![0; gradients.len()];
    kernel::squares(states.before.second, gradients, by, &mut out);
    out
}

impl Search {
    /// The step of a chunk of first moments.
    pub(super) fn first(&mut self, states: States<'_>) -> Step {
        let few = FewStates::of(states, |data| glance(data, FEW_STRETCHES));
        let score = |known: &Known| (mean_length(few.lent(), known.step), *known);
        // A group of parameters without weight decay shares all other numbers.
        let plain =
            self.known.iter().filter(|known| known.step.step.decay < 1.0).map(|known| Known { step: undecayed(known.step), ..*known });
        let all: Vec<Known> = self.known.iter().copied().chain(plain).collect();
        let best = all.iter().map(score).reduce(|a, b| if b.0 < a.0 { b } else { a });
        if let Some((length, known)) = best
            && length <= known.length + SLACK
        {
            if !self.known.iter().any(|other| other.step == known.step) {
                self.known.insert(0, known);
                self.known.truncate(REMEMBERED);
            }
            return known.step;
        }
        let best_length = best.map_or(f64::INFINITY, |(_, known)| known.length);
        let (length, best) = best.map_or((f64::INFINITY, USUAL), |(length, known)| (length, known.step));
        let is_searchable = states.weights.iter().any(|byte| *byte != 0) && states.first.len() >= 4 * LEAST_ELEMENTS;
        if length > best_length + NEW_STEP {
            // No known step explains the weights: another step, with numbers of its own.
            self.wait = self.wait.min(MOST_CHUNKS_TO_WAIT_FOR_NEW_STEP);
        }
        if !is_searchable || self.wait > 0 {
            self.wait = self.wait.saturating_sub(u32::from(is_searchable));
            return best;
        }
        let sample = FewStates::of(states, |data| glance(data, STRETCHES));
        let large = FewStates::of(states, |data| glance(data, FIT_STRETCHES));
        let found = search(large.lent(), sample.lent(), few.lent()).map(|step| (mean_length(few.lent(), step), step));
        match found.filter(|(found, _)| *found + 0.25 < length) {
            Some((length, step)) => {
                self.known.insert(0, Known { step, length });
                self.known.truncate(REMEMBERED);
                (self.wait, self.next_wait) = (0, 0);
                step
            }
            None => {
                self.next_wait = self.next_wait.saturating_mul(4).clamp(2, MOST_CHUNKS_TO_WAIT);
                self.wait = self.next_wait;
                best
            }
        }
    }

    /// Searches for a step whose gradients are known, and remembers it. `None` if it is not time for a search.
    pub(super) fn learn(&mut self, states: States<'_>, gradients: &[u8]) -> Option<()> {
        if self.learn_wait > 0 {
            self.learn_wait -= 1;
            return None;
        }
        self.next_learn_wait = self.next_learn_wait.saturating_mul(8).clamp(2, MOST_CHUNKS_TO_WAIT);
        self.learn_wait = self.next_learn_wait;
        let sample = FewStates::of(states, |data| glance(data, STRETCHES));
        let states = sample.lent();
        let gradients = glance(gradients, STRETCHES);
        let better = |a: (usize, First), b: (usize, First)| if b.0 > a.0 { b } else { a };
        let firsts = FIRST_BETAS
            .iter()
            .flat_map(|&beta| Blend::ALL.map(|blend| First { blend, decay: beta as f32, weight: (1.0 - beta) as f32, ..USUAL.first }));
        let firsts = firsts.map(|by| (count_equal(states.first, blended(states, &gradients, by), states.first_cut), by));
        let (_, first) = firsts.reduce(better)?;
        let better = |a: (usize, Second), b: (usize, Second)| if b.0 > a.0 { b } else { a };
        let seconds = SECOND_BETAS
            .iter()
            .flat_map(|&beta| Square::ALL.map(|square| Second { square, decay: beta as f32, share: (1.0 - beta) as f32 }));
        let seconds = seconds.map(|by| (count_equal(states.second, squared(states, &gradients, by), states.second_cut), by));
        let (_, second) = seconds.reduce(better)?;
        let moments = [blended(states, &gradients, first), squared(states, &gradients, second)];
        let found = step_of(&mut Default::default(), states.before.weights, &moments[0], &moments[1], states.weights)?;
        if found.exact_percent() >= 50 {
            self.known.insert(0, Known { step: Step { first, second, step: found.rule }, length: 0.0 });
            self.known.truncate(REMEMBERED);
            (self.learn_wait, self.next_learn_wait) = (0, 0);
        }
        Some(())
    }

    /// The rule that gives the most elements of a chunk of weights or second moments exactly.
    pub(super) fn rule(&self, inputs: Lent<'_>, data: &[u8], dtype: Dtype) -> Option<Found> {
        let few = |data: &[u8]| glance(data, 2 * FEW_STRETCHES);
        let base = few(inputs.base);
        let gradients = few(inputs.gradients);
        let moments = inputs.moments.map(|moments| moments.map(few));
        let wide = widen(dtype.number_format(), data).ok()?;
        let data = few(&wide);
        let of = base.len() / 4;
        let lent =
            Lent { base: &base, gradients: &gradients, moments: moments.as_ref().map(|moments| moments.each_ref().map(Vec::as_slice)) };
        let count = |rule: Rule| {
            let mut out = vec![0; base.len()];
            lent.replay(rule, dtype, &mut out);
            (out.as_chunks::<4>().0.iter().zip(data.as_chunks::<4>().0).filter(|(a, b)| a == b).count(), rule)
        };
        let better = |a: (usize, Rule), b: (usize, Rule)| if b.0 > a.0 { b } else { a };
        let known = self.known.iter().map(|known| match inputs.moments {
            Some(_) => Rule::Step(known.step),
            None => Rule::Moment(known.step.second),
        });
        let mut best = known.map(count).reduce(better);
        if inputs.moments.is_none() && best.is_none_or(|(exact, _)| 100 * exact < 90 * of) {
            let points = floats(&base).zip(floats(&data)).zip(floats(&gradients)).map(|((v0, v1), g)| [v0, v1, g].map(f64::from));
            let beta = second_beta(points)?;
            for beta in candidates(beta).into_iter().chain(SECOND_BETAS) {
                for square in Square::ALL {
                    let found = count(Rule::Moment(Second { square, decay: beta as f32, share: (1.0 - beta) as f32 }));
                    best = Some(best.map_or(found, |best| better(best, found)));
                }
            }
        }
        best.map(|(exact, rule)| Found { rule, exact_percent: 100 * exact / of.max(1) })
    }
}

/// Searches for a step: a fit in a large sample, numbers in a smaller one, forms in a few elements.
fn search(large: States<'_>, sample: States<'_>, few: States<'_>) -> Option<Step> {
    let [loss, scale, epsilon] = fit(large)?;
    let second_fit = second_beta_of(sample);
    let mut best: Option<(f64, Step)> = None;
    for beta in FIRST_BETAS {
        let first = First { decay: beta as f32, weight: (1.0 - beta) as f32, ..USUAL.first };
        let mut seconds: Vec<f64> = SECOND_BETAS.to_vec();
        seconds.sort_by(|a, b| distance(*a, second_fit).total_cmp(&distance(*b, second_fit)));
        for second in seconds.into_iter().take(2) {
            let second = Second { decay: second as f32, share: (1.0 - second) as f32, ..USUAL.second };
            let step = replays::Step { decay: (1.0 + loss) as f32, scale: scale as f32, epsilon: epsilon as f32, ..USUAL.step };
            let start = Step { first, second, step };
            let solved = kernel::solve_all(sample, start);
            if agreement(sample, start, &solved) < 0.6 {
                continue;
            }
            let mut found = vec![start, refined(start, &solved, 1.0).1];
            let elections = (-6..=6).filter_map(|ulps| {
                let start = Step { step: replays::Step { decay: nudged(step.decay, ulps), ..step }, ..start };
                let (clip, share) = elected(&kernel::solve_all(sample, start))?;
                Some((share, clip, start))
            });
            let elected = elections.reduce(|a, b| if b.0 > a.0 { b } else { a });
            found.extend(elected.and_then(|(_, clip, start)| {
                let refine = |start: Step| (refined(start, &kernel::solve_all(sample, start), clip), start);
                let better = |a: ((usize, Step), Step), b: ((usize, Step), Step)| if b.0.0 > a.0.0 { b } else { a };
                let coarse = std::iter::once(start).chain(EPSILONS.map(|epsilon| with_epsilon(start, epsilon)));
                let coarse = coarse.map(refine).reduce(better)?;
                let fine = uncorrected(coarse.1).map(refine).reduce(better);
                // A usual epsilon is as good as any other near it.
                match fine.filter(|fine| fine.0.0 + fine.0.0 / 64 >= coarse.0.0) {
                    Some(((_, step), _)) => Some(corrected(step)),
                    None => Some(coarse.0.1),
                }
            }));
            for step in found {
                let length = mean_length(few, step);
                if best.is_none_or(|(least, _)| length < least) {
                    best = Some((length, step));
                }
            }
        }
        if best.is_some_and(|(length, _)| length < 12.0) {
            break;
        }
    }
    best.map(|best| climb(few, best))
}

/// Distance of betas, as the ratio of what they forget.
fn distance(a: f64, b: f64) -> f64 {
    ((1.0 - a) / (1.0 - b)).ln().abs()
}

/// The second beta by least squares, with gradients from first moments of the usual beta.
fn second_beta_of(states: States<'_>) -> f64 {
    let gradients = floats(states.before.first).zip(floats(states.first)).map(|(m0, m1)| (f64::from(m1) - 0.9 * f64::from(m0)) * 10.0);
    let seconds = floats(states.before.second).zip(floats(states.second));
    let points = seconds.zip(gradients).map(|((v0, v1), g)| [f64::from(v0), f64::from(v1), g]);
    second_beta(points).unwrap_or(0.99)
}

/// Decay less one, scale and epsilon by least squares in which the rounding error of the first moment has the same weight
/// everywhere. Twice more without the worst tenth, from the last epsilon.
fn fit(states: States<'_>) -> Option<[f64; 3]> {
    let mut loss = 0.0;
    let mut scale = 0.0;
    let mut epsilon = 1e-8;
    let mut worst = f64::INFINITY;
    for _ in 0..3 {
        let moments = floats(states.first).zip(floats(states.second));
        let weights = floats(states.before.weights).zip(floats(states.weights));
        let rows = weights.zip(moments).filter_map(|((w0, w1), (m, v))| {
            let [w0, w1, m, v] = [w0, w1, m, v].map(f64::from);
            let divisor = v.sqrt() + epsilon;
            let y = m / divisor;
            let weight = 1.0 / y.abs();
            // The last column is the derivative by epsilon, in parts of epsilon.
            let row = [w0 * weight, y * weight, -y * weight * epsilon / divisor, (w1 - w0) * weight];
            (y.abs() > 1e-6 && row.iter().all(|x| x.is_finite())).then_some(row)
        });
        let rows: Vec<[f64; 4]> = rows.collect();
        if rows.len() < LEAST_ELEMENTS / 2 {
            return None;
        }
        let error = |row: &[f64; 4], [a, b, c]: [f64; 3]| (row[3] - a * row[0] - b * row[1] - c * row[2]).abs();
        let solution = [loss, scale, 0.0];
        let used: Vec<[f64; 4]> = rows.iter().filter(|row| error(row, solution) <= worst).copied().collect();
        let [a, b, c] = least_squares(&used)?;
        let mut errors: Vec<f64> = rows.iter().map(|row| error(row, [a, b, c])).collect();
        let (_, tenth, _) = errors.select_nth_unstable_by(rows.len() * 9 / 10, f64::total_cmp);
        worst = *tenth;
        (loss, scale) = (a, b);
        epsilon = (epsilon * (1.0 + c / b)).clamp(epsilon / 16.0, epsilon * 16.0);
    }
    let found = [loss, scale, epsilon];
    (found.iter().all(|x| x.is_finite()) && scale != 0.0).then_some(found)
}

/// Solves the normal equations of three unknowns, after each column is scaled to the same length.
fn least_squares(rows: &[[f64; 4]]) -> Option<[f64; 3]> {
    let mut lengths = [0.0f64; 3];
    for row in rows {
        lengths.iter_mut().zip(row).for_each(|(length, x)| *length += x * x);
    }
    let lengths = lengths.map(f64::sqrt);
    let mut system = [[0.0f64; 4]; 3];
    for row in rows {
        let scaled = [row[0] / lengths[0], row[1] / lengths[1], row[2] / lengths[2], row[3]];
        for (equation, x) in system.iter_mut().zip(scaled) {
            equation.iter_mut().zip(scaled).for_each(|(sum, y)| *sum += x * y);
        }
    }
    for at in 0..3 {
        let pivot = system[at];
        if pivot[at].is_nan() || pivot[at].abs() < 1e-10 {
            return None;
        }
        for (_, equation) in system.iter_mut().enumerate().filter(|(other, _)| *other != at) {
            let factor = equation[at] / pivot[at];
            equation.iter_mut().zip(pivot).for_each(|(x, y)| *x -= factor * y);
        }
    }
    Some([0, 1, 2].map(|at| system[at][3] / system[at][at] / lengths[at]))
}

/// Share of the elements whose first moment agrees with the gradient that the weight tells.
fn agreement(states: States<'_>, by: Step, solved: &[Solved]) -> f64 {
    let moments = floats(states.before.first).zip(floats(states.first));
    let agrees = moments.zip(solved).filter(|((m0, m1), solved)| {
        let m = f64::from(by.first.decay) * f64::from(*m0) + f64::from(by.first.weight) * solved.gradient;
        (m - f64::from(*m1)).abs() <= f64::from(m1.abs()) / 128.0
    });
    agrees.count() as f64 / solved.len().max(1) as f64
}

/// Epsilons that are tried beside that of the fit, which is far off where epsilon hardly matters.
const EPSILONS: [f64; 14] = [1e-8, 9e-9, 8e-9, 7e-9, 6e-9, 5e-9, 4e-9, 3.2e-9, 2.5e-9, 2e-9, 1.5e-9, 1e-9, 6e-10, 1e-15];

/// Relative error of the scale by least squares, and error of the decay after its neighbours are tried, that voters must
/// not depend on.
const SCALE_ERROR: f64 = 5e-5;
const DECAY_ERROR: f64 = 1e-8;
const VOTERS: usize = 200;
/// Elements by which scale and decay are refined.
const MOST_USED: usize = 3000;

/// The clip factor, and the share of its voters, that the elements elect whose gradients depend least on the scale.
fn elected(solved: &[Solved]) -> Option<(f64, f64)> {
    let mut voters: Vec<(f64, f64)> = solved
        .iter()
        .map(|solved| {
            let error = solved.width / solved.gradient.abs() + SCALE_ERROR * solved.by_scale.abs() + DECAY_ERROR * solved.by_decay.abs();
            (error, solved.gradient.abs())
        })
        .filter(|(error, gradient)| error.is_finite() && *gradient > f64::from(f32::MIN_POSITIVE) && gradient.is_finite())
        .collect();
    voters.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let voters: Vec<f64> = voters.into_iter().take(VOTERS).map(|(_, gradient)| mantissa(gradient)).collect();
    elect(&voters, 2e-5, 5..9)
}

/// Moves scale and decay until most gradients are short multiples of the clip factor.
fn refined(start: Step, solved: &[Solved], clip: f64) -> (usize, Step) {
    // Derivatives at the start. A change of the scale by a part of it, and of the decay.
    let usable: Vec<&Solved> = solved
        .iter()
        .filter(|solved| solved.width < 2e-5 * solved.gradient.abs() && solved.by_scale.abs() < 30.0 && solved.gradient.is_finite())
        .take(MOST_USED)
        .collect();
    let near = |scale: f64, decay: f64, widths: f64| {
        let short = usable.iter().filter(|solved| {
            let gradient = solved.gradient * (1.0 + solved.by_scale * scale + solved.by_decay * decay);
            let x = mantissa((gradient / clip).abs()) * 128.0;
            (x - x.round()).abs() < widths * solved.width / solved.gradient.abs() * x
        });
        short.count()
    };
    let ulp = 2f64.powi(-24);
    let mut scale = 0.0f64;
    let mut decay = 0.0f64;
    for (width, count, widths) in [(256.0, 48, 16.0), (32.0, 12, 6.0), (4.0, 12, 2.0), (1.0, 6, 1.2)] {
        let scales = (-count..=count).map(|k| scale + f64::from(k) * width * ulp);
        let best = scales.map(|scale| (near(scale, decay, widths), scale)).fold((0, scale), |a, b| if b.0 > a.0 { b } else { a });
        scale = best.1;
        if width <= 32.0 {
            let decays = (-4..=4).map(|k| decay + f64::from(k) * ulp);
            let best = decays.map(|decay| (near(scale, decay, widths), decay)).fold((0, decay), |a, b| if b.0 > a.0 { b } else { a });
            decay = best.1;
        }
    }
    let step = replays::Step {
        scale: (f64::from(start.step.scale) * (1.0 + scale)) as f32,
        decay: (f64::from(start.step.decay) + decay) as f32,
        ..start.step
    };
    let count = near(scale, decay, 1.2);
    (count, Step { first: First { clip: clip as f32, ..start.first }, step, ..start })
}

/// The step without weight decay.
fn undecayed(by: Step) -> Step {
    let decay = if by.step.update.takes_loss() { 0.0 } else { 1.0 };
    Step { step: replays::Step { decay, ..by.step }, ..by }
}

/// Returns the number some ulps away.
fn nudged(x: f32, ulps: i32) -> f32 {
    let moved = f32::from_bits(x.to_bits().wrapping_add_signed(ulps));
    if moved.is_finite() && x != 0.0 { moved } else { x }
}

/// Usual epsilons, and the bias correction of each step early in training: a product of both may be the epsilon of a fit.
fn corrections(beta: f64, epsilon: f64) -> impl Iterator<Item = (f64, f64)> {
    let powers = std::iter::successors(Some(beta), move |power| Some(power * beta)).take_while(|power| *power > 1e-9);
    let corrections = powers.map(|power| f64::sqrt(1.0 - power)).chain([1.0]);
    let pairs = corrections.flat_map(|correction| [1e-8, 1e-6, 1e-7, 1e-5, 1e-15].map(|usual| (usual, correction)));
    pairs.filter(move |(usual, correction)| (epsilon / (usual * correction) - 1.0).abs() < 0.1).take(64)
}

fn with_epsilon(by: Step, epsilon: f64) -> Step {
    Step { step: replays::Step { epsilon: epsilon as f32, ..by.step }, ..by }
}

/// The step with each usual epsilon near its own, times a bias correction.
fn uncorrected(by: Step) -> impl Iterator<Item = Step> {
    let found = corrections(by.second.decay.into(), by.step.epsilon.into());
    found.map(move |(usual, correction)| with_epsilon(by, usual * correction))
}

/// The step with the bias correction apart from scale and epsilon.
fn corrected(by: Step) -> Step {
    let same = |(usual, correction): &(f64, f64)| (usual * correction) as f32 == by.step.epsilon;
    match corrections(by.second.decay.into(), by.step.epsilon.into()).find(same) {
        Some((usual, correction)) => {
            let scale = (f64::from(by.step.scale) / correction) as f32;
            Step { step: replays::Step { scale, correction: correction as f32, epsilon: usual as f32, ..by.step }, ..by }
        }
        None => by,
    }
}

/// Tries the neighbours of each number, and the other forms.
fn climb(few: States<'_>, (mut length, mut best): (f64, Step)) -> Step {
    let mut attempt = |best: &mut Step, step: Step| {
        let found = mean_length(few, step);
        if found < length {
            (length, *best) = (found, step);
        }
    };
    for round in 0..2 {
        for ulps in [-4, -2, -1, 1, 2, 4] {
            let step = replays::Step { scale: nudged(best.step.scale, ulps * if round == 0 { 4 } else { 1 }), ..best.step };
            let tried = Step { step, ..best };
            attempt(&mut best, tried);
        }
        for ulps in [-2, -1, 1, 2] {
            let step = replays::Step { decay: nudged(best.step.decay, ulps), ..best.step };
            let tried = Step { step, ..best };
            attempt(&mut best, tried);
        }
        for ulps in [-4, -2, -1, 1, 2, 4] {
            let first = First { clip: nudged(best.first.clip, ulps), ..best.first };
            let tried = Step { first, ..best };
            attempt(&mut best, tried);
        }
        if round == 0 {
            for blend in Blend::ALL {
                let tried = Step { first: First { blend, ..best.first }, ..best };
                attempt(&mut best, tried);
            }
            for square in Square::ALL {
                let tried = Step { second: Second { square, ..best.second }, ..best };
                attempt(&mut best, tried);
            }
            for update in Update::ALL {
                let decay = match (update.takes_loss(), best.step.update.takes_loss()) {
                    (true, false) => (f64::from(best.step.decay) - 1.0) as f32,
                    (false, true) => (f64::from(best.step.decay) + 1.0) as f32,
                    _ => best.step.decay,
                };
                let tried = Step { step: replays::Step { update, decay, ..best.step }, ..best };
                attempt(&mut best, tried);
            }
        }
    }
    best
}
