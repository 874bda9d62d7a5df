//! `tc.joint`: one step of Adam whose moments have few bits: the gradient with the first moment, and a replay of all else.
//!
//! Spec:   spec/codecs/joint.md
//! Input:  n numbers and n of the base, f32 or bf16; for a second moment, the gradients of the first; for a weight, these
//!         and both moments of the parent
//! Output: of a first moment, the columns of `tc.gradient`; otherwise the forms of the step, and the columns of
//!         `tc.ordered` with the replayed elements as base
//! Errors: `Corrupt` if exponents, lengths and bits disagree, for an unknown form, or without the partners; the errors of
//!         `tc.ordered`
//! Cost:   to encode a first moment, Newton's method in binary64, about 400 operations per element; to replay, a root and
//!         two divisions in binary32
//! Source: ours: a trainer rounds moments to 16 bits when it stores them, and steps with what they were before. So moments
//!         do not give the weight. The gradient gives all three
//!
//! The writer finds the gradient from the weight, in which it leaves more bits than in a moment of 8. Readers need no
//! search.

mod inputs;
mod rule;
mod search;
mod states;

use std::sync::{Mutex, PoisonError};

use inputs::{FIRST, Inputs, SECOND, WEIGHTS, base_of, cut_of, is_number, replay};
use rule::{Found, Rule, STEP_BYTES};
use search::Search;
use states::OwnStates;
use tensorcask_kernels::floats::{narrow_to, widen};
use tensorcask_kernels::joint::{self as kernel, Before, Joint as Step, States};
use tensorcask_kernels::spare::Spare;

use super::classes::TokenClasses;
use super::gradient::{self, COLUMNS_OF_FIRST, FIRST_BYTES};
use super::residual::{self, COLUMNS_OF_MOMENT, COLUMNS_OF_STEP};
use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, GradientForm, Need, Ordered, Partner, no_gradients, sample};
use crate::tensor::is_parameter;
use crate::{Dtype, Error, Result};

/// Stores a first moment of few bits as a gradient, and a second moment or a weight as what that gradient leaves over.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Joint}};
/// let bytes = |numbers: Vec<f32>| -> Vec<u8> { numbers.iter().flat_map(|x| [2, 3].map(|at| x.to_le_bytes()[at])).collect() };
/// let before = bytes((1..9000).map(|i| (i as f32).sin()).collect());
/// let now = bytes((1..9000).map(|i| 0.9 * (i as f32).sin() + 0.1 * (i as f32).cos()).collect());
/// let chunk = Chunk { role: "exp_avg", base: Some(&before), ..Chunk::new(Dtype::Bf16, 8999, &now) };
/// let stored: usize = Joint::default().encode(&chunk)?.columns.iter().map(|(_, bytes)| bytes.len()).sum();
/// assert!(stored < 2 * 8999, "less than the moments take");
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Joint {
    search: Mutex<Search>,
}

const NEEDS_OF_SECOND: &[Need] = &[Need { role: FIRST, base: false, gradient: true }];
const NEEDS_OF_WEIGHTS: &[Need] = &[Need { role: FIRST, base: true, gradient: true }, Need::both(SECOND)];
const HINTS_OF_FIRST: &[Need] = &[Need::both(WEIGHTS[0]), Need::both(WEIGHTS[1]), Need::both(SECOND)];
/// Of first moments of f32: whether second moments of bf16 need their gradients.
const HINTS_OF_WIDE_FIRST: &[Need] = &[Need::now(SECOND)];
/// This codec leaves a model that has a master alone: readers of weights then need no moments.
const HINTS_OF_MODEL: &[Need] = &[Need::now(WEIGHTS[0])];

fn check_dtype(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 | Dtype::Bf16 => Ok(()),
        _ => Err(Error::corrupt(format!("a step of {dtype}")).clause("joint 1")),
    }
}

fn unfit() -> Error {
    Error::invalid("needs f32 or bf16, a base, and the partners of the role")
}

impl Joint {
    fn search<T>(&self, run: impl FnOnce(&mut Search) -> T) -> T {
        run(&mut self.search.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The rule that gives the most elements of a chunk of weights or second moments exactly.
    fn rule(&self, inputs: &Inputs<'_>, chunk: &Chunk<'_>) -> Option<Found> {
        let found = |search: &mut Search| search.rule(inputs.lent(), chunk.data, chunk.dtype);
        let known = self.search(found).filter(|found| found.exact_percent >= 50);
        if known.is_some() || inputs.moments.is_none() {
            return known;
        }
        let now = |role| {
            let partner = chunk.partner(role)?;
            Some((widen(partner.dtype.number_format(), partner.data).ok()?, cut_of(partner.dtype)))
        };
        let ((first, first_cut), (second, second_cut)) = (now(FIRST)?, now(SECOND)?);
        let weights = widen(chunk.dtype.number_format(), chunk.data).ok()?;
        let [before_first, before_second] = inputs.lent().moments?;
        let before = Before { weights: &inputs.base, first: before_first, second: before_second };
        let weight_cut = cut_of(chunk.dtype);
        let states = States { before, weights: &weights, first: &first, second: &second, weight_cut, first_cut, second_cut };
        self.search(|search| search.learn(states, inputs.gradients))?;
        self.search(found)
    }

    /// The step of first moments, and the widened states that it was found in.
    fn first<'a>(&self, chunk: &'a Chunk<'_>) -> Option<Result<(Step, OwnStates<'a>)>> {
        let base = base_of(chunk).filter(|_| chunk.dtype == Dtype::Bf16)?;
        let states = match OwnStates::of(chunk, base) {
            Ok(states) => states,
            Err(e) => return Some(Err(e)),
        };
        let by = self.search(|search| search.first(states.lent()));
        Some(Ok((by, states)))
    }

    fn estimate_first(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let (by, states) = self.first(chunk)?.ok()?;
        let few = states.sampled();
        let mut quotients = vec![0; few.first.len()];
        kernel::quotients(few.lent(), by, &mut quotients);
        let base = sample(base_of(chunk)?, chunk.dtype.unit_bytes());
        Some(gradient::estimate(chunk, gradient::exponents_of(chunk.dtype, &base), &quotients, &few.first))
    }

    fn encode_first(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let (by, states) = self.first(chunk).ok_or_else(unfit)??;
        let mut quotients = Spare::new(states.first.len(), "gradients")?;
        kernel::quotients(states.lent(), by, &mut quotients);
        let base = base_of(chunk).ok_or_else(unfit)?;
        gradient::encode(gradient::exponents_of(chunk.dtype, base), by.first, &quotients, &states.first)
    }

    fn estimate_rest(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        if chunk.role == WEIGHTS[1] && chunk.partner(WEIGHTS[0]).is_some() {
            return None;
        }
        let has_few_bits = |role| chunk.partner(role).is_some_and(|partner| partner.dtype == Dtype::Bf16);
        if !has_few_bits(FIRST) && !has_few_bits(SECOND) && (chunk.role != SECOND || chunk.dtype != Dtype::Bf16) {
            // Moments of f32 give the rest without gradients.
            return None;
        }
        let inputs = Inputs::of(chunk.role, chunk.dtype, base_of(chunk)?, |role| chunk.partner(role))?.ok()?;
        let found = self.rule(&inputs, chunk).filter(|found| found.exact_percent >= 50)?;
        let few = inputs.sampled();
        let mut replayed = vec![0; few.base.len()];
        few.lent().replay(found.rule, chunk.dtype, &mut replayed);
        let mut narrow = vec![0; replayed.len() / 4 * chunk.dtype.unit_bytes()];
        narrow_to(chunk.dtype.number_format(), &replayed, &mut narrow);
        residual::estimate(chunk, found.rule.column().len() as u64, &narrow)
    }

    fn encode_rest(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let base = base_of(chunk).ok_or_else(unfit)?;
        let inputs = Inputs::of(chunk.role, chunk.dtype, base, |role| chunk.partner(role)).ok_or_else(unfit)??;
        let usual = || Found {
            rule: if inputs.moments.is_some() { Rule::Step(search::USUAL) } else { Rule::Moment(search::USUAL.second) },
            exact_percent: 0,
        };
        let found = self.rule(&inputs, chunk).unwrap_or_else(usual);
        let mut replayed = Spare::new(chunk.data.len(), "replayed elements")?;
        replay(&inputs, found.rule, chunk.dtype, &mut replayed)?;
        residual::encode(chunk, (found.rule.name(), found.rule.column()), &replayed, TokenClasses::of(found.exact_percent))
    }
}

/// Decodes first moments, and their gradients if they are wanted.
fn decode_first(columns: &Columns<'_>, base: &[u8], out: &mut [u8], gradients: Option<&mut [u8]>) -> Result<GradientForm> {
    match columns.dtype {
        Dtype::Bf16 => gradient::decode_first(columns, base, out, gradients),
        dtype => Err(Error::corrupt(format!("a first moment of {dtype}")).clause("joint 1")),
    }
}

impl Codec for Joint {
    fn id(&self) -> &str {
        "tc.joint"
    }

    fn supports(&self, dtype: Dtype, role: &str) -> bool {
        match role {
            FIRST => dtype == Dtype::Bf16,
            role => is_number(dtype) && (role == SECOND || is_parameter(role)),
        }
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Always
    }

    fn needs(&self, role: &str) -> &'static [Need] {
        match role {
            SECOND => NEEDS_OF_SECOND,
            role if is_parameter(role) => NEEDS_OF_WEIGHTS,
            _ => &[],
        }
    }

    fn hints(&self, dtype: Dtype, role: &str) -> &'static [Need] {
        match role {
            FIRST if dtype == Dtype::Bf16 => HINTS_OF_FIRST,
            FIRST => HINTS_OF_WIDE_FIRST,
            "model" => HINTS_OF_MODEL,
            _ => &[],
        }
    }

    fn is_standalone(&self) -> bool {
        false
    }

    fn holds_gradients(&self, names: &[&str]) -> bool {
        names == COLUMNS_OF_FIRST
    }

    fn offers_gradients(&self, chunk: &Chunk<'_>) -> bool {
        chunk.role == FIRST
    }

    /// Measured on first moments: Newton's method in binary64. All else is far cheaper.
    fn cost(&self) -> Cost {
        Cost { encode: 250.0, decode: 13.0 }
    }

    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64 {
        let planes = crate::entropy::max_encoded_bytes(element_count).saturating_mul(2).saturating_add(256);
        // An escape takes 4 bytes.
        let escapes = element_count.saturating_mul(4);
        Ordered
            .max_encoded_bytes(dtype, element_count)
            .max(planes.saturating_add(escapes))
            .saturating_add(STEP_BYTES.max(FIRST_BYTES) as u64)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        match chunk.role {
            FIRST => self.estimate_first(chunk),
            role if role == SECOND || is_parameter(role) => self.estimate_rest(chunk),
            _ => None,
        }
    }

    fn saved_elsewhere(&self, chunk: &Chunk<'_>) -> u64 {
        let Some(Ok((by, states))) = (chunk.role == FIRST).then(|| self.first(chunk)).flatten() else { return 0 };
        let [weights, seconds] = search::explained(states.sampled().lent(), by);
        let whole = |role: &str| chunk.partner(role).filter(|partner| is_number(partner.dtype));
        let ordered = |partner: &Partner<'_>| {
            let alone = Chunk { data: partner.data, base: partner.base, ..Chunk::new(partner.dtype, chunk.element_count, partner.data) };
            Ordered.estimate(&alone).map_or(0, |pages| pages.into_iter().fold(0, u64::saturating_add))
        };
        let others = WEIGHTS.iter().find_map(|role| whole(role)).map_or(0, |partner| match whole(WEIGHTS[1]) {
            // A master needs no more than what its 16-bit weight lacks.
            Some(model) if model.dtype == Dtype::Bf16 => ordered(partner).min(chunk.element_count.saturating_mul(2)),
            _ => ordered(partner),
        });
        // Chunks of which less is explained are stored otherwise.
        let saved = |percent: u64, bytes: u64| if percent < 50 { 0 } else { bytes.saturating_mul(percent) / 100 };
        saved(weights, others).saturating_add(saved(seconds, whole(SECOND).map_or(0, ordered)))
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        if chunk.role == FIRST { self.encode_first(chunk) } else { self.encode_rest(chunk) }
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        check_dtype(dtype)?;
        match names.first() {
            Some(&"gradient") => super::are_columns(names.iter().copied(), &COLUMNS_OF_FIRST),
            _ => residual::check_columns(names),
        }
    }

    fn check_role(&self, role: &str, names: &[&str]) -> Result<()> {
        let own = match role {
            FIRST => COLUMNS_OF_FIRST[0],
            SECOND => COLUMNS_OF_MOMENT[0],
            _ => COLUMNS_OF_STEP[0],
        };
        match names.first() {
            Some(first) if *first != own => {
                Err(Error::corrupt(format!("columns {} in a chunk of role `{role}`", names.join(", "))).clause("joint 2"))
            }
            _ => Ok(()),
        }
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        check_dtype(columns.dtype)?;
        let base = columns.base(out.len())?;
        let (role, is_step, column, rest) = match columns.columns {
            [("gradient", _), ..] => return decode_first(columns, base, out, None).map(drop),
            [("step", _), ..] => {
                let [column, rest @ ..] = columns.exactly(COLUMNS_OF_STEP)?;
                (WEIGHTS[0], true, column, rest)
            }
            _ => {
                let [column, rest @ ..] = columns.exactly(COLUMNS_OF_MOMENT)?;
                (SECOND, false, column, rest)
            }
        };
        let rule = Rule::read(column, is_step)?;
        if columns.partner(FIRST)?.gradient.is_none() {
            return Err(Error::corrupt("the partner of role `exp_avg` holds no gradients of this step").clause("codecs 5.4"));
        }
        let inputs = Inputs::of(role, columns.dtype, base, |role| columns.partner(role).ok());
        let unfit = || Error::corrupt("the moments of the parent are not f32 or bf16").clause("joint 1");
        replay(&inputs.ok_or_else(unfit)??, rule, columns.dtype, out)?;
        residual::decode_in(columns.dtype, rest, out)
    }

    fn decode_gradient(&self, columns: &Columns<'_>, out: &mut [u8], gradient: &mut [u8]) -> Result<GradientForm> {
        check_dtype(columns.dtype)?;
        let base = columns.base(out.len())?;
        match columns.columns {
            [("gradient", _), ..] => decode_first(columns, base, out, Some(gradient)),
            _ => Err(no_gradients(self)),
        }
    }
}
