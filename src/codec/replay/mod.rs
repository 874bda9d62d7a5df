//! `tc.replay`: the difference between a weight or second moment and a replay of Adam's step.
//!
//! Spec:   spec/codecs/replay.md
//! Input:  n f32 and n f32 of the base; for a weight, both moments; for a second moment, the first moment in both
//!         snapshots
//! Output: the form of the step and its numbers; the columns of `tc.ordered`, with the replayed elements as base
//! Errors: the errors of `tc.ordered`; `Corrupt` without the partners, or for an unknown form
//! Cost:   the cost of `tc.ordered` with one class, and per element a root and two divisions in binary32 (`step`) or a
//!         few multiplications (`moment`)
//! Source: ours: a trainer computes the new state from the old one in a fixed order of binary32 operations. The same
//!         operations in the same order give the same bits for nearly all elements, where a fit of the update rule
//!         (`tc.predict`) is off by an ulp or two for most
//!
//! The numbers of a step (learning rate, decay, bias corrections, epsilon, betas) are searched for from the two states
//! alone; see `search`. All chunks of a parameter group share them, so the codec remembers the last ones that it found
//! and tries those first. They decide how many bytes a chunk takes, never what it decodes to.

mod inputs;
pub(super) mod rule;
pub(super) mod search;

use std::sync::{Mutex, PoisonError};

use inputs::{FIRST, Inputs, SECOND, before, now};
use rule::{Rule, STEP_BYTES, read_moment, read_step_column};
use search::Known;
use tensorcask_kernels::replay::{Moment, Step};
use tensorcask_kernels::spare::Spare;

use super::classes::TokenClasses;
use super::residual::{self, COLUMNS_OF_MOMENT, COLUMNS_OF_STEP};
use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, Need, Ordered};
use crate::tensor::is_parameter;
use crate::{Dtype, Error, Result};

/// Stores the difference between each element and its replay.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Partner, Replay}};
/// let bytes = |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|x| x.to_le_bytes()).collect() };
/// let all = |f: &dyn Fn(f32) -> f32| -> Vec<f32> { (1..5000).map(|i| f(i as f32)).collect() };
/// let (m0, g) = (all(&|i| i.sin()), all(&|i| i.cos()));
/// let m1: Vec<f32> = m0.iter().zip(&g).map(|(m, g)| m + 0.1 * (g - m)).collect();
/// let v0 = all(&|i| 1.0 + i.cos().abs());
/// let v1: Vec<f32> = v0.iter().zip(&g).map(|(v, g)| v * 0.999 + (0.001 * g) * g).collect();
/// let (m0, m1, v0, v1) = (bytes(&m0), bytes(&m1), bytes(&v0), bytes(&v1));
/// let partners = [Partner { role: "exp_avg", dtype: Dtype::F32, data: &m1, base: Some(&m0), gradient: None }];
/// let chunk =
///     Chunk { role: "exp_avg_sq", base: Some(&v0), partners: &partners, ..Chunk::new(Dtype::F32, 4999, &v1) };
/// let bytes: usize = Replay::default().encode(&chunk)?.columns.iter().map(|(_, bytes)| bytes.len()).sum();
/// assert!(bytes < 4999 / 16, "half a bit for each element of 32");
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Replay {
    steps: Mutex<Known<Step>>,
    moments: Mutex<Known<Moment>>,
}

const NEEDS_OF_PARAMETER: &[Need] = &[Need::now(FIRST), Need::now(SECOND)];
const NEEDS_OF_SECOND: &[Need] = &[Need::both(FIRST)];

fn check_dtype(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 => Ok(()),
        _ => Err(Error::corrupt(format!("a replay of {dtype}")).clause("replay 1")),
    }
}

/// Rule that a search found.
struct Found {
    rule: Rule,
    /// Percentage of elements that it gives exactly.
    exact_percent: usize,
}

impl Replay {
    /// Returns the rule that gives the most elements exactly. `None` if no element can be used in a search.
    fn search(&self, inputs: Inputs<'_>, data: &[u8]) -> Option<Found> {
        match inputs {
            Inputs::Step { weights, first, second } => {
                let mut known = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
                let found = search::step(&mut known, weights, first, second, data)?;
                Some(Found { rule: Rule::Step(found.rule), exact_percent: found.exact_percent() })
            }
            Inputs::Moment { second, before, now } => {
                let mut known = self.moments.lock().unwrap_or_else(PoisonError::into_inner);
                let found = search::moment(&mut known, second, before, now, data)?;
                Some(Found { rule: Rule::Moment(found.rule), exact_percent: found.exact_percent() })
            }
        }
    }
}

impl Codec for Replay {
    fn id(&self) -> &str {
        "tc.replay"
    }

    fn supports(&self, dtype: Dtype, role: &str) -> bool {
        dtype == Dtype::F32 && (is_parameter(role) || role == SECOND)
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Always
    }

    fn needs(&self, role: &str) -> &'static [Need] {
        match role {
            role if is_parameter(role) => NEEDS_OF_PARAMETER,
            SECOND => NEEDS_OF_SECOND,
            _ => &[],
        }
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
        let found = self.search(inputs, chunk.data).filter(|found| found.exact_percent >= 50)?;
        residual::estimate(chunk, found.rule.column().len() as u64, &inputs.replay_sample(found.rule))
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let unfit = || Error::invalid("needs f32, a base, and moments");
        let inputs = Inputs::of(chunk).ok_or_else(unfit)?;
        let found = self.search(inputs, chunk.data).unwrap_or(Found { rule: inputs.usual_rule(), exact_percent: 0 });
        let mut replayed = Spare::new(chunk.data.len(), "replayed elements")?;
        inputs.replay(found.rule, &mut replayed);
        residual::encode(chunk, (found.rule.name(), found.rule.column()), &replayed, TokenClasses::of(found.exact_percent))
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        check_dtype(dtype)?;
        residual::check_columns(names)
    }

    fn check_role(&self, role: &str, names: &[&str]) -> Result<()> {
        let other = if is_parameter(role) { COLUMNS_OF_MOMENT[0] } else { COLUMNS_OF_STEP[0] };
        residual::check_role(role, names, other, "replay 2")
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        check_dtype(columns.dtype)?;
        let base = columns.base(out.len())?;
        let not_f32 = |role: &str| Error::corrupt(format!("the partner of role `{role}` is not f32")).clause("replay 1");
        let now = |role: &'static str| now(Some(columns.partner(role)?)).ok_or_else(|| not_f32(role));
        let (rule, inputs, rest) = match columns.columns {
            [("step", _), ..] => {
                let [column, rest @ ..] = columns.exactly(COLUMNS_OF_STEP)?;
                (read_step_column(column)?, Inputs::Step { weights: base, first: now(FIRST)?, second: now(SECOND)? }, rest)
            }
            _ => {
                let [column, rest @ ..] = columns.exactly(COLUMNS_OF_MOMENT)?;
                let before = before(Some(columns.partner(FIRST)?)).ok_or_else(|| not_f32(FIRST))?;
                (read_moment(column)?, Inputs::Moment { second: base, before, now: now(FIRST)? }, rest)
            }
        };
        inputs.replay(rule, out);
        residual::decode(rest, out)
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRST, Replay, SECOND};
    use crate::Dtype;
    use crate::codec::{Chunk, Codec, Columns, Partner};

    #[test]
    fn a_chunk_whose_rule_is_not_found_again_comes_back() {
        // No search can use numbers that are not finite.
        let not_finite = [0x7f, 0xc0].repeat(2).repeat(1000);
        let base = not_finite.clone();
        let data = vec![0xff; not_finite.len()];
        let partners = [FIRST, SECOND].map(|role| Partner { role, dtype: Dtype::F32, data: &data, base: Some(&base), gradient: None });
        for role in ["master", "model", SECOND] {
            let chunk = Chunk { role, base: Some(&base), partners: &partners, ..Chunk::new(Dtype::F32, 1000, &data) };
            assert_eq!(Replay::default().estimate(&chunk), None);
            let encoded = Replay::default().encode(&chunk).unwrap();
            let columns: Vec<(&str, bytes::Bytes)> = encoded.columns.into_iter().map(|(name, bytes)| (name, bytes.into())).collect();
            let mut out = vec![0; data.len()];
            let input = Columns { dtype: Dtype::F32, element_count: 1000, columns: &columns, base: Some(&base), partners: &partners };
            Replay::default().decode(&input, &mut out).unwrap();
            assert!(out == data, "{role}");
        }
    }
}
