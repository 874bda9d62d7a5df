//! Search for the clip factor and the forms of a step, from a few elements of both states.
//!
//! A precise element is one whose gradient is known to about 20 bits. If its gradient has few significant bits, then
//! dividing it by the right one of all short mantissas gives the clip factor, up to a power of two. So each such
//! quotient of a few precise elements is a proposal, and the proposal under which most of the other elements are close
//! to short mantissas wins. Its neighbours are then compared by the mean length of the gradients that they give.
//!
//! A momentum is searched for both as a sum and as a moving average.
//!
//! A sum that was divided by 3 before it was clipped was rounded twice. With one factor for both, the true quotient gives
//! many elements only nearly. So small odd divisors are tried too, and kept if they make gradients shorter.
//!
//! Gradients that were computed in binary32 are not short. The search fails, and is repeated only after 2, 16, 128, ...
//! further chunks, each time with another beta beside the usual one: most of the cost is the search for a factor. Chunks of
//! first and second moments count alike, because both are searched for the same factor. What was found before is tried on
//! every chunk.

use std::ops::Range;

use tensorcask_kernels::digits::{ESCAPE, shape};
use tensorcask_kernels::floats::floats;
use tensorcask_kernels::gradient::{self as kernel, Blend, First, Near, Scale, Second};
use tensorcask_kernels::replay::Square;

use super::super::adam::{candidates, glance, second_beta};
use super::super::classes::ONE_CLASS_PERCENT;
use super::inputs::{Squared, shorten};

/// Kind of moment, which tells what decay and weight may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Decay and weight of a first moment add up to 1.
    First,
    /// The weight of a momentum is that of a first moment, or 1.
    Momentum,
}

/// Steps that were found last, the most recent first, and the pace of searches.
#[derive(Debug, Default)]
pub(super) struct Search {
    firsts: Vec<First>,
    seconds: Vec<Second>,
    pace: Pace,
}

/// Pace of searches that fail.
#[derive(Debug, Default)]
struct Pace {
    /// Number of chunks to pass over before the next search, and after its failure.
    wait: u32,
    next_wait: u32,
    failures: usize,
}

impl Pace {
    /// Whether it is time for a search.
    fn is_due(&mut self) -> bool {
        let is_due = self.wait == 0;
        self.wait = self.wait.saturating_sub(1);
        is_due
    }

    fn fail(&mut self) {
        self.next_wait = self.next_wait.saturating_mul(8).clamp(LEAST_CHUNKS_TO_WAIT, MOST_CHUNKS_TO_WAIT);
        self.wait = self.next_wait;
        self.failures = self.failures.wrapping_add(1);
    }
}

const REMEMBERED: usize = 8;
const LEAST_CHUNKS_TO_WAIT: u32 = 2;
const MOST_CHUNKS_TO_WAIT: u32 = 4096;

/// Bits by which gradients must be shorter than under a wrong clip factor. Gradients of binary32 are shorter by up to two
/// bits under the factor 1, which is their own.
const GAIN: f64 = 3.0;

/// Returns the mean length of gradients, in bits.
fn mean_length(before: &[u8], now: &[u8], by: First) -> f64 {
    let mut quotients = vec![0; now.len()];
    shorten(before, now, by, &mut quotients);
    let length = |quotient: f32| match shape(quotient).1 {
        ESCAPE => 32.0,
        length => f64::from(length),
    };
    floats(&quotients).map(length).sum::<f64>() / (now.len() / 4).max(1) as f64
}

/// Whether a step makes gradients short: shorter than with a factor that nothing speaks for.
fn is_short(before: &[u8], now: &[u8], by: First) -> bool {
    mean_length(before, now, by) + GAIN < mean_length(before, now, First { clip: by.clip * 1.234_567_8, ..by })
}

impl Search {
    /// Returns the best of the steps that were found before, if it makes gradients short.
    fn known(&self, before: &[u8], now: &[u8]) -> Option<First> {
        let few_before = glance(before, 32);
        let few_now = glance(now, 32);
        let score = |by: &First| (mean_length(&few_before, &few_now, *by), *by);
        let best = self.firsts.iter().map(score).reduce(|a, b| if b.0 < a.0 { b } else { a });
        best.map(|(_, known)| known).filter(|known| is_short(&few_before, &few_now, *known))
    }

    pub(super) fn first(&mut self, kind: Kind, before: &[u8], now: &[u8]) -> Option<First> {
        self.known(before, now).or_else(|| search_paced(&mut self.pace, &mut self.firsts, kind, before, now))
    }

    pub(super) fn second(&mut self, inputs: Squared<'_>, data: &[u8]) -> Option<(First, Second, usize)> {
        let known = self.known(inputs.before, inputs.now);
        let first = known.or_else(|| search_paced(&mut self.pace, &mut self.firsts, Kind::First, inputs.before, inputs.now))?;
        let [base, before, now, data] = [inputs.base, inputs.before, inputs.now, data].map(|data| glance(data, 64));
        let mut quotients = vec![0; now.len()];
        kernel::shorten(&before, &now, first, &mut quotients);
        let count = |second: Second| {
            let mut out = quotients.clone();
            kernel::square(&base, &before, &now, (first, second), &mut out);
            out.as_chunks::<4>().0.iter().zip(data.as_chunks::<4>().0).filter(|(a, b)| a == b).count()
        };
        let percent = |exact: usize| 100 * exact / (data.len() / 4).max(1);
        let better = |a: (usize, Second), b: (usize, Second)| if b.0 > a.0 { b } else { a };
        let known = self.seconds.iter().map(|second| (count(*second), *second)).reduce(better);
        if let Some((exact, second)) = known.filter(|(exact, _)| percent(*exact) >= ONE_CLASS_PERCENT) {
            return Some((first, second, percent(exact)));
        }
        let gradients = floats(&quotients).map(|quotient| first.gradient(quotient));
        let beta = second_beta(floats(&base).zip(floats(&data)).zip(gradients).map(|((v0, v1), g)| [v0, v1, g].map(f64::from)))?;
        let mut best = known;
        for beta in candidates(beta) {
            for share in [(1.0 - beta) as f32, 1.0 - beta as f32] {
                for square in Square::ALL {
                    let second = Second { square, decay: beta as f32, share };
                    let found = (count(second), second);
                    best = Some(best.map_or(found, |best| better(best, found)));
                }
            }
        }
        let (exact, second) = best?;
        self.seconds.retain(|known| *known != second);
        self.seconds.insert(0, second);
        self.seconds.truncate(REMEMBERED);
        Some((first, second, percent(exact)))
    }
}

/// Bytes of a chunk below which no search is tried. A few elements do not tell the factor, and a search that fails
/// would put off that of the next large chunk.
const LEAST_BYTES_TO_SEARCH: usize = 4 * 256;

/// Usual first betas, the most usual first.
const BETAS: [f64; 5] = [0.9, 0.95, 0.8, 0.98, 0.99];

/// Usual decays of momenta, the most usual first.
const DECAYS: [f64; 8] = [0.9, 0.95, 0.99, 0.8, 0.85, 0.98, 0.97, 0.5];

/// Decays to try in a search, after so many failures.
fn decays(kind: Kind, failures: usize) -> Vec<f64> {
    let (usual, others) = match kind {
        Kind::First => BETAS.split_at(1),
        Kind::Momentum => DECAYS.split_at(2),
    };
    let other = others.get(failures % others.len().max(1));
    usual.iter().chain(other).copied().collect()
}

/// Searches for a step, if it is time for a search, and remembers it.
fn search_paced(pace: &mut Pace, firsts: &mut Vec<First>, kind: Kind, before: &[u8], now: &[u8]) -> Option<First> {
    if now.len() < LEAST_BYTES_TO_SEARCH || !pace.is_due() {
        return None;
    }
    let before = glance(before, 256);
    let now = glance(now, 256);
    let Some(found) = search(kind, &before, &now, &decays(kind, pace.failures)) else {
        pace.fail();
        return None;
    };
    *pace = Pace::default();
    firsts.insert(0, found);
    firsts.truncate(REMEMBERED);
    Some(found)
}

fn search(kind: Kind, before: &[u8], now: &[u8], decays: &[f64]) -> Option<First> {
    for &decay in decays {
        let proposed = propose(before, now, decay);
        let mean = Average { decay, weight: 1.0 - decay, blends: &Blend::ALL };
        let sums = WEIGHTS.map(|weight| Average { decay, weight, blends: &SUMS });
        let averages = [mean].into_iter().chain(sums.into_iter().filter(|_| kind == Kind::Momentum));
        let found = averages.filter_map(|average| {
            let clips = [Some(1.0), proposed.map(|clip| mantissa(clip / average.weight) as f32)];
            clips.into_iter().flatten().find_map(|clip| average.search(clip, before, now))
        });
        // A wrong weight makes gradients short, too, but not as short: it moves into the factor, and only rounding differs.
        let best = shortest(cut(before), cut(now), found);
        if best.is_some() {
            return best;
        }
    }
    None
}

/// Weights of a momentum that is a sum: 1 less usual dampenings.
const WEIGHTS: [f64; 4] = [1.0, 0.9, 0.5, 0.1];

/// Decay and weight of a moment, and the blends that they are for, the most usual first.
#[derive(Debug, Clone, Copy)]
struct Average {
    decay: f64,
    weight: f64,
    blends: &'static [Blend],
}

/// Blends of a moment whose weight is 1.
const SUMS: [Blend; 3] = [Blend::FusedGradient, Blend::Sum, Blend::FusedDecay];

impl Average {
    /// Tries factors near this one, and all blends. `None` if that makes no gradients short.
    fn search(self, clip: f32, before: &[u8], now: &[u8]) -> Option<First> {
        let decay = self.decay as f32;
        let weight = self.weight as f32;
        let first = First { blend: *self.blends.first()?, decay, weight, scale: Scale::None, clip };
        let before = cut(before);
        let now = cut(now);
        let near: Vec<f32> = if clip == 1.0 { vec![1.0] } else { neighbours(clip, 8).collect() };
        let best = shortest(before, now, near.into_iter().map(|clip| First { clip, ..first }))?;
        // The other weight is some ulps away, and so is the factor that goes with it.
        let most_ulps = if clip == 1.0 { 0 } else { 4 };
        let other_weight = if first.is_sum() { weight } else { 1.0 - decay };
        let forms = [weight, other_weight].into_iter().flat_map(|weight| {
            let clips = neighbours(best.clip * (first.weight / weight), most_ulps);
            clips.flat_map(move |clip| self.blends.iter().map(move |blend| First { blend: *blend, weight, clip, ..best }))
        });
        let best = shortest(before, now, forms)?;
        is_short(before, now, best).then(|| divided(before, now, best))
    }
}

/// Returns the numbers at most so many ulps away.
fn neighbours(x: f32, most_ulps: i32) -> impl Iterator<Item = f32> {
    (-most_ulps..=most_ulps).map(move |ulps| f32::from_bits(x.to_bits().wrapping_add_signed(ulps)))
}

/// Odd numbers of micro-batches or ranks. Powers of two change no length.
const DIVISORS: [f32; 7] = [3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0];

/// Bits by which a scale must shorten gradients.
const GAIN_OF_SCALE: f64 = 0.2;

/// Splits the factor of a step into a division by a small number and a factor, if that makes gradients shorter.
fn divided(before: &[u8], now: &[u8], best: First) -> First {
    let forms = DIVISORS.into_iter().flat_map(|divisor| {
        let clips = neighbours(best.clip * divisor, 4);
        clips.flat_map(move |clip| [Scale::Over(divisor), Scale::Times(1.0 / divisor)].map(|scale| First { scale, clip, ..best }))
    });
    let found =
        shortest(before, now, forms).filter(|found| mean_length(before, now, *found) + GAIN_OF_SCALE < mean_length(before, now, best));
    found.unwrap_or(best)
}

/// Returns the first thousand elements of a sample.
fn cut(data: &[u8]) -> &[u8] {
    data.get(..4096).unwrap_or(data)
}

fn shortest(before: &[u8], now: &[u8], forms: impl Iterator<Item = First>) -> Option<First> {
    let scored = forms.map(|by| (mean_length(before, now, by), by));
    scored.reduce(|a, b| if b.0 < a.0 { b } else { a }).map(|(_, by)| by)
}

/// Returns the mantissa of a positive number, from 1 to 2.
pub(in super::super) fn mantissa(x: f64) -> f64 {
    f64::from_bits(x.to_bits() & ((1 << 52) - 1) | 1023 << 52)
}

/// Number of elements that propose, and that vote.
const ANCHORS: usize = 12;
const VOTERS: usize = 200;
const FIRST_VOTERS: usize = 40;
/// Greatest relative distance from a short mantissa.
const TOLERANCE: f64 = 7.6e-6;
/// Share of votes beyond those of chance that a proposal needs.
const LEAST_SCORE: f64 = 0.08;

/// Proposes the mantissa of the clip factor, times the weight.
fn propose(before: &[u8], now: &[u8], decay: f64) -> Option<f64> {
    let mut precise: Vec<(f64, f64)> = floats(before)
        .zip(floats(now))
        .map(|(m0, m1)| {
            let m0 = f64::from(m0);
            let m1 = f64::from(m1);
            let gradient = (m1 - decay * m0).abs();
            (m1.abs() / gradient, gradient)
        })
        .filter(|(error, gradient)| error.is_finite() && *gradient > f64::from(f32::MIN_POSITIVE) && gradient.is_finite() && *error > 0.0)
        .collect();
    precise.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let voters: Vec<f64> = precise.iter().take(VOTERS).map(|(_, gradient)| mantissa(*gradient)).collect();
    elect(&voters, TOLERANCE, 5..12).map(|(clip, _)| clip)
}

/// Proposes the mantissa of the clip factor: that by which most voters, mantissas of gradients, are short. `bits` are the
/// lengths that count as short. Returns it with the share of the voters, without those of chance.
pub(in super::super) fn elect(voters: &[f64], tolerance: f64, bits: Range<u32>) -> Option<(f64, f64)> {
    if voters.len() < 8 {
        return None;
    }
    let first_voters = voters.get(..FIRST_VOTERS).unwrap_or(voters);
    let mut best = (LEAST_SCORE, None);
    for bits in bits {
        let grid = f64::from(1u32 << bits);
        let chance = 4.0 * tolerance * grid;
        for &anchor in voters.iter().take(ANCHORS) {
            for k in 1 << bits..2u32 << bits {
                let clip = mantissa(anchor * grid / f64::from(k));
                let by = Near { inverse: 1.0 / clip, grid, tolerance };
                let share = |voters: &[f64]| kernel::count_near(voters, by) as f64 / voters.len() as f64;
                if share(first_voters) < best.0 / 2.0 + chance {
                    continue;
                }
                let score = share(voters) - chance;
                if score > best.0 + 1e-9 {
                    best = (score, Some((clip, grid)));
                }
            }
        }
    }
    let (clip, grid) = best.1?;
    let mut ratios: Vec<f64> = voters
        .iter()
        .filter_map(|voter| {
            let x = mantissa(voter / clip);
            let nearest = (x * grid).round() / grid;
            ((x - nearest).abs() < tolerance).then_some(x / nearest)
        })
        .collect();
    ratios.sort_unstable_by(f64::total_cmp);
    Some((clip * ratios.get(ratios.len() / 2)?, best.0))
}
