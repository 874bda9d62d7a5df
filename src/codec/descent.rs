//! `tc.descent`: the difference between a weight and a replay of a step of gradient descent with momentum.
//!
//! Spec:   spec/codecs/descent.md
//! Input:  n f32 and n f32 of the base; the momentum in both snapshots
//! Output: the form of the step and its numbers; the columns of `tc.ordered`, with the replayed elements as base
//! Errors: the errors of `tc.ordered`; `Corrupt` without the partner, or for an unknown form
//! Cost:   the cost of `tc.ordered` with one class, and two or three operations per element
//! Source: ours, see `tc.replay`
//!
//! A codec apart from `tc.replay`, because partners follow from codec and role: a weight needs either both moments of Adam
//! or the momentum.

use std::sync::{Mutex, PoisonError};

use tensorcask_kernels::descent::{self as kernel, Direction, Step, Update};
use tensorcask_kernels::floats::floats;
use tensorcask_kernels::spare::Spare;

use super::classes::TokenClasses;
use super::replay::search::{Known, Match};
use super::residual::{self, COLUMNS_OF_STEP};
use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, Need, Ordered, adam, sample};
use crate::tensor::is_parameter;
use crate::wire::{Cursor, Put};
use crate::{Dtype, Error, Result};

/// Stores the difference between each weight and a replay of SGD's step.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Descent, Partner}};
/// let bytes = |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|x| x.to_le_bytes()).collect() };
/// let all = |f: &dyn Fn(f32) -> f32| -> Vec<f32> { (1..5000).map(|i| f(i as f32)).collect() };
/// let (w0, m0, m1) = (all(&|i| i.sin()), all(&|i| i.cos()), all(&|i| (2.0 * i).cos()));
/// let w1: Vec<f32> = w0.iter().zip(&m1).map(|(w, m)| (-0.05f32).mul_add(*m, *w)).collect();
/// let (w0, w1, m0, m1) = (bytes(&w0), bytes(&w1), bytes(&m0), bytes(&m1));
/// let partners = [Partner { role: "momentum", dtype: Dtype::F32, data: &m1, base: Some(&m0), gradient: None }];
/// let chunk = Chunk { base: Some(&w0), partners: &partners, ..Chunk::new(Dtype::F32, 4999, &w1) };
/// let bytes: usize = Descent::default().encode(&chunk)?.columns.iter().map(|(_, bytes)| bytes.len()).sum();
/// assert!(bytes < 4999 / 16, "half a bit for each element of 32");
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Descent {
    steps: Mutex<Known<Step>>,
}

const MOMENTUM: &str = "momentum";
const NEEDS: &[Need] = &[Need::both(MOMENTUM)];
/// Bytes of column `step`: two forms and three numbers.
const STEP_BYTES: usize = 14;

/// Step for a chunk whose step is not found again, because threads share the steps that were found.
const USUAL: Step = Step { update: Update::Fused, direction: Direction::Momentum, decay: 1.0, scale: 0.0, momentum: 0.9 };

/// Inputs of a replay: earlier weights, and the momenta before and after the step.
#[derive(Debug, Clone, Copy)]
struct Inputs<'a> {
    weights: &'a [u8],
    before: &'a [u8],
    now: &'a [u8],
}

impl<'a> Inputs<'a> {
    fn of(chunk: &'a Chunk<'_>) -> Option<Self> {
        let weights = chunk.whole_base().filter(|_| chunk.dtype == Dtype::F32 && is_parameter(chunk.role))?;
        let partner = chunk.partner(MOMENTUM).filter(|partner| partner.dtype == Dtype::F32)?;
        let before = partner.base.filter(|before| before.len() == partner.data.len())?;
        Some(Self { weights, before, now: partner.data })
    }

    fn replay(&self, by: Step, out: &mut [u8]) {
        kernel::step(self.weights, self.before, self.now, by, out);
    }
}

impl Descent {
    fn search(&self, inputs: Inputs<'_>, data: &[u8]) -> Option<Match<Step>> {
        let mut known = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let [weights, before, now, data] = [inputs.weights, inputs.before, inputs.now, data].map(|data| adam::glance(data, STRETCHES));
        let inputs = Inputs { weights: &weights, before: &before, now: &now };
        let count = |by: Step| {
            let mut out = vec![0; data.len()];
            inputs.replay(by, &mut out);
            Match::of(by, &out, &data)
        };
        known.find(count, || climb(&fits(inputs, &data), count))
    }
}

/// Number of stretches in the sample of a search.
const STRETCHES: usize = 64;

/// Returns fits of a step by momentum alone and of Nesterov's step, by least squares relative to the weights. The worst tenth
/// of the elements is left out of the second round of each fit.
fn fits(inputs: Inputs<'_>, data: &[u8]) -> Vec<Step> {
    let rows = floats(inputs.weights).zip(floats(data)).zip(floats(inputs.before).zip(floats(inputs.now)));
    let rows = rows.map(|((w0, w1), (m0, m1))| {
        let [w0, w1, m0, m1] = [w0, w1, m0, m1].map(f64::from);
        [w0, m1, m0, w1 - w0].map(|x| x / (w0.abs() + w1.abs()))
    });
    let rows: Vec<[f64; 4]> = rows.filter(|row| row.iter().all(|x| x.is_finite())).collect();
    let mut found = Vec::new();
    for terms in [2, 3] {
        let Some(first) = solve(&rows, terms) else { continue };
        let error = |[w, m1, m0, change]: &[f64; 4], by: [f64; 3]| (change - by[0] * w - by[1] * m1 - by[2] * m0).abs();
        let mut errors: Vec<f64> = rows.iter().map(|row| error(row, first)).collect();
        let (_, &mut worst, _) = errors.select_nth_unstable_by(rows.len() * 9 / 10, f64::total_cmp);
        let best: Vec<[f64; 4]> = rows.iter().filter(|row| error(row, first) <= worst).copied().collect();
        let [loss, now, before] = solve(&best, terms).unwrap_or(first);
        let scale = now + before;
        let momentum = -before / (now + before);
        let direction = if terms == 2 { Direction::Momentum } else { Direction::Nesterov };
        let [decay, scale, momentum] = [1.0 + loss, scale, momentum].map(|x| x as f32);
        found.push(Step { update: Update::Fused, direction, decay, scale, momentum });
    }
    found
}

/// Least squares: the last number of each row by its first `terms` numbers.
fn solve(rows: &[[f64; 4]], terms: usize) -> Option<[f64; 3]> {
    let mut sums = [[0.0f64; 4]; 3];
    for row in rows {
        for (sums, x) in sums.iter_mut().zip(row).take(terms) {
            sums.iter_mut().zip(row).for_each(|(sum, y)| *sum += x * y);
        }
    }
    // Gauss-Jordan elimination. Columns of terms that are not used are 0.
    for at in 0..terms {
        let pivot_row = *sums.get(at)?;
        let pivot = *pivot_row.get(at)?;
        if pivot.abs() < f64::MIN_POSITIVE {
            return None;
        }
        for (other, row) in sums.iter_mut().enumerate().take(terms) {
            let factor = row.get(at)? / pivot;
            if other != at {
                row.iter_mut().zip(pivot_row).for_each(|(x, y)| *x -= factor * y);
            }
        }
    }
    let mut found = [0.0; 3];
    for (at, (found, row)) in found.iter_mut().zip(&sums).enumerate().take(terms) {
        *found = row.last()? / row.get(at)?;
    }
    found.iter().all(|x| x.is_finite()).then_some(found)
}

/// Returns the numbers at most so many digits long that are nearest.
fn decimals(x: f32) -> impl Iterator<Item = f32> {
    (0..5).filter_map(move |digits| format!("{x:.digits$e}").parse().ok())
}

/// Returns the number some ulps away.
fn nudged(x: f32, ulps: i32) -> f32 {
    let moved = f32::from_bits(x.to_bits().wrapping_add_signed(ulps));
    if moved.is_finite() && x != 0.0 { moved } else { x }
}

/// Tries other forms, short decimals and neighbours of fits.
fn climb(fits: &[Step], count: impl Fn(Step) -> Match<Step>) -> Option<Step> {
    let mut best: Option<Match<Step>> = None;
    for &fit in fits {
        let momenta = if fit.direction == Direction::Momentum { vec![fit.momentum] } else { decimals(fit.momentum).collect() };
        for momentum in momenta {
            for scale in decimals(fit.scale).chain([fit.scale]) {
                for decay in [1.0, fit.decay] {
                    let found = count(Step { momentum, scale, decay, ..fit });
                    best = Some(best.map_or(found, |best| best.or_better(found)));
                }
            }
        }
    }
    let mut best = best?;
    for distance in [64, 16, 4, 1, 1] {
        for ulps in [-3, -2, -1, 1, 2, 3].map(|steps| steps * distance) {
            best = best.or_better(count(Step { scale: nudged(best.rule.scale, ulps), ..best.rule }));
        }
        if best.rule.decay != 1.0 && distance < 4 {
            for ulps in [-2, -1, 1, 2] {
                best = best.or_better(count(Step { decay: nudged(best.rule.decay, ulps), ..best.rule }));
            }
        }
    }
    for update in Update::ALL {
        best = best.or_better(count(Step { update, ..best.rule }));
        if best.rule.direction != Direction::Momentum {
            for direction in Direction::ALL {
                best = best.or_better(count(Step { update, direction, ..best.rule }));
            }
        }
    }
    Some(best.rule)
}

fn column_of(by: Step) -> Vec<u8> {
    let mut column = Vec::with_capacity(STEP_BYTES);
    column.put_u8(Update::ALL.iter().position(|known| *known == by.update).unwrap_or(0) as u8);
    column.put_u8(Direction::ALL.iter().position(|known| *known == by.direction).unwrap_or(0) as u8);
    [by.decay, by.scale, by.momentum].into_iter().for_each(|number| column.put_u32(number.to_bits()));
    column
}

fn read_step(column: &[u8]) -> Result<Step> {
    let mut cursor = Cursor::new(column, "forms and numbers");
    let update = form(&Update::ALL, cursor.u8()?)?;
    let direction = form(&Direction::ALL, cursor.u8()?)?;
    let [decay, scale, momentum] = [cursor.u32()?, cursor.u32()?, cursor.u32()?].map(f32::from_bits);
    cursor.finish()?;
    Ok(Step { update, direction, decay, scale, momentum })
}

fn form<T: Copy>(all: &[T], code: u8) -> Result<T> {
    let found = all.get(usize::from(code)).copied();
    found.ok_or_else(|| Error::corrupt(format!("form {code}; the last one known is {}", all.len() - 1)))
}

fn check_dtype(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 => Ok(()),
        _ => Err(Error::corrupt(format!("a replay of {dtype}")).clause("descent 1")),
    }
}

impl Codec for Descent {
    fn id(&self) -> &str {
        "tc.descent"
    }

    fn supports(&self, dtype: Dtype, role: &str) -> bool {
        dtype == Dtype::F32 && is_parameter(role)
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Always
    }

    fn needs(&self, role: &str) -> &'static [Need] {
        if is_parameter(role) { NEEDS } else { &[] }
    }

    fn is_standalone(&self) -> bool {
        false
    }

    fn cost(&self) -> Cost {
        Ordered.cost()
    }

    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64 {
        Ordered.max_encoded_bytes(dtype, element_count).saturating_add(STEP_BYTES as u64)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let inputs = Inputs::of(chunk)?;
        let found = self.search(inputs, chunk.data).filter(|found| found.exact_percent() >= 50)?;
        let [weights, before, now] = [inputs.weights, inputs.before, inputs.now].map(|data| sample(data, 4));
        let mut replayed = vec![0; weights.len()];
        Inputs { weights: &weights, before: &before, now: &now }.replay(found.rule, &mut replayed);
        residual::estimate(chunk, STEP_BYTES as u64, &replayed)
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let inputs = Inputs::of(chunk).ok_or_else(|| Error::invalid("needs f32, a base, and the momenta of both snapshots"))?;
        let found = self.search(inputs, chunk.data);
        let (by, exact_percent) = found.map_or((USUAL, 0), |found| (found.rule, found.exact_percent()));
        let mut replayed = Spare::new(chunk.data.len(), "replayed elements")?;
        inputs.replay(by, &mut replayed);
        residual::encode(chunk, (COLUMNS_OF_STEP[0], column_of(by)), &replayed, TokenClasses::of(exact_percent))
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        check_dtype(dtype)?;
        super::are_columns(names.iter().copied(), &COLUMNS_OF_STEP)
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        check_dtype(columns.dtype)?;
        let base = columns.base(out.len())?;
        let [column, rest @ ..] = columns.exactly(COLUMNS_OF_STEP)?;
        let by = read_step(column).map_err(|e| e.clause("descent 3"))?;
        let partner = columns.partner(MOMENTUM)?;
        let before = partner.base.filter(|before| partner.dtype == Dtype::F32 && before.len() == partner.data.len());
        let before =
            before.ok_or_else(|| Error::corrupt("the partner of role `momentum` is not f32 in both snapshots").clause("descent 1"))?;
        Inputs { weights: base, before, now: partner.data }.replay(by, out);
        residual::decode(rest, out)
    }
}

#[cfg(test)]
mod tests {
    use super::{Descent, MOMENTUM};
    use crate::Dtype;
    use crate::codec::{Chunk, Codec, Columns, Partner};

    #[test]
    fn a_chunk_whose_step_is_not_found_comes_back() {
        // No search can use numbers that are not finite.
        let base = [0x7f, 0xc0].repeat(2000);
        let data = vec![0xff; base.len()];
        let partners = [Partner { role: MOMENTUM, dtype: Dtype::F32, data: &data, base: Some(&base), gradient: None }];
        let chunk = Chunk { role: "master", base: Some(&base), partners: &partners, ..Chunk::new(Dtype::F32, 1000, &data) };
        assert_eq!(Descent::default().estimate(&chunk), None);
        let encoded = Descent::default().encode(&chunk).unwrap();
        let columns: Vec<(&str, bytes::Bytes)> = encoded.columns.into_iter().map(|(name, bytes)| (name, bytes.into())).collect();
        let mut out = vec![0; data.len()];
        let input = Columns { dtype: Dtype::F32, element_count: 1000, columns: &columns, base: Some(&base), partners: &partners };
        Descent::default().decode(&input, &mut out).unwrap();
        assert!(out == data);
    }
}
