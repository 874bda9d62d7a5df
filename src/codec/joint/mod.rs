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

mod search;

use std::sync::{Mutex, PoisonError};

use super::classes::TokenClasses;
use super::gradient::{self, COLUMNS_OF_FIRST, FIRST_BYTES};
use super::residual::{self, COLUMNS_OF_MOMENT, COLUMNS_OF_STEP};
use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, GradientForm, Need, Ordered, Partner, no_gradients, sample};
use crate::kernels::floats::{narrow_to, widen};
use crate::kernels::gradient::Second;
use crate::kernels::joint::{self as kernel, Before, Joint as Step, States};
use crate::spare::{MaybeSpare, Spare};
use crate::tensor::is_parameter;
use crate::wire::Cursor;
use crate::{Dtype, Error, Result};
use search::Search;

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

const FIRST: &str = "exp_avg";
const SECOND: &str = "exp_avg_sq";
/// Roles of the weights, the most precise first.
const WEIGHTS: [&str; 2] = ["master", "model"];
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

/// Number of low bits that are zero in every number of a type, widened to f32.
fn cut_of(dtype: Dtype) -> u32 {
    if dtype == Dtype::Bf16 { 16 } else { 0 }
}

fn is_number(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::Bf16)
}

/// Base and partners of a chunk of weights or second moments, as f32: a replay takes these.
struct Inputs<'a> {
    base: MaybeSpare<'a>,
    gradients: &'a [u8],
    /// Both moments of the parent, for weights.
    moments: Option<(MaybeSpare<'a>, MaybeSpare<'a>)>,
}

/// Form and numbers of a replay.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    Step(Step),
    Moment(Second),
}

impl<'a> Inputs<'a> {
    /// Inputs of a chunk of the role. `None` without a partner, or with one of another type.
    fn of(role: &str, dtype: Dtype, base: &'a [u8], partner: impl Fn(&'static str) -> Option<&'a Partner<'a>>) -> Option<Result<Self>> {
        let count = base.len() / dtype.unit_bytes();
        let gradients = partner(FIRST)?.gradient.filter(|gradients| gradients.len() == 4 * count)?;
        let before = |role| {
            let partner = partner(role).filter(|partner| is_number(partner.dtype))?;
            let base = partner.base.filter(|base| base.len() == count * partner.dtype.unit_bytes())?;
            Some(widen(partner.dtype, base))
        };
        let moments = if is_parameter(role) { Some((before(FIRST)?, before(SECOND)?)) } else { None };
        let widened = || {
            let moments = moments.map(|(first, second)| Ok::<_, Error>((first?, second?))).transpose()?;
            Ok(Self { base: widen(dtype, base)?, gradients, moments })
        };
        Some(widened())
    }

    /// The same for the elements of [`sample`].
    fn sampled(&self) -> Sampled {
        let of = |data: &[u8]| sample(data, 4).into_owned();
        let moments = self.moments.as_ref().map(|(first, second)| (of(first), of(second)));
        Sampled { base: of(&self.base), gradients: of(self.gradients), moments }
    }

    fn lent(&self) -> Lent<'_> {
        Lent { base: &self.base, gradients: self.gradients, moments: self.moments.as_ref().map(|(first, second)| [&**first, &**second]) }
    }
}

/// Inputs of a few elements.
struct Sampled {
    base: Vec<u8>,
    gradients: Vec<u8>,
    moments: Option<(Vec<u8>, Vec<u8>)>,
}

impl Sampled {
    fn lent(&self) -> Lent<'_> {
        let moments = self.moments.as_ref().map(|(first, second)| [first.as_slice(), second.as_slice()]);
        Lent { base: &self.base, gradients: &self.gradients, moments }
    }
}

/// Inputs of a replay, as f32.
#[derive(Clone, Copy)]
struct Lent<'a> {
    base: &'a [u8],
    gradients: &'a [u8],
    moments: Option<[&'a [u8]; 2]>,
}

impl Lent<'_> {
    /// Replays a step, as f32 of the type's precision.
    fn replay(self, rule: Rule, dtype: Dtype, out: &mut [u8]) {
        match (rule, self.moments) {
            (Rule::Step(by), Some([first, second])) => {
                kernel::weights(Before { weights: self.base, first, second }, self.gradients, by, out);
            }
            (Rule::Moment(by), _) => kernel::squares(self.base, self.gradients, by, out),
            // Callers pass the rule of their inputs.
            (Rule::Step(_), None) => out.fill(0),
        }
        kernel::cut_all(cut_of(dtype), out);
    }
}

/// Rule that a search found.
struct Found {
    rule: Rule,
    /// Percentage of elements that it gives exactly.
    exact_percent: usize,
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
            Some((widen(partner.dtype, partner.data).ok()?, cut_of(partner.dtype)))
        };
        let ((first, first_cut), (second, second_cut)) = (now(FIRST)?, now(SECOND)?);
        let weights = widen(chunk.dtype, chunk.data).ok()?;
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
        narrow_to(chunk.dtype, &replayed, &mut narrow);
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

/// Fills `out` with replayed elements of the type.
fn replay(inputs: &Inputs<'_>, rule: Rule, dtype: Dtype, out: &mut [u8]) -> Result<()> {
    if dtype == Dtype::F32 {
        inputs.lent().replay(rule, dtype, out);
        return Ok(());
    }
    let mut wide = Spare::new(inputs.base.len(), "replayed elements")?;
    inputs.lent().replay(rule, dtype, &mut wide);
    narrow_to(dtype, &wide, out);
    Ok(())
}

/// Both states of a parameter, as f32.
struct OwnStates<'a> {
    before_weights: MaybeSpare<'a>,
    before_first: MaybeSpare<'a>,
    before_second: MaybeSpare<'a>,
    weights: MaybeSpare<'a>,
    first: MaybeSpare<'a>,
    second: MaybeSpare<'a>,
    cuts: [u32; 3],
}

impl<'a> OwnStates<'a> {
    /// States of a chunk of first moments and of its partners. Numbers of a partner that is missing are zero.
    fn of(chunk: &'a Chunk<'_>, base: &'a [u8]) -> Result<Self> {
        let whole = |role: &str| {
            let partner = chunk.partner(role).filter(|partner| is_number(partner.dtype))?;
            Some((partner.dtype, partner.base.filter(|base| base.len() == partner.data.len())?, partner.data))
        };
        let count = base.len() / chunk.dtype.unit_bytes();
        let wide = |found: Option<(Dtype, &'a [u8], &'a [u8])>| match found {
            Some((dtype, before, now)) => Ok((widen(dtype, before)?, widen(dtype, now)?, cut_of(dtype))),
            None => Ok::<_, Error>((zeros(count)?, zeros(count)?, 0)),
        };
        let (before_weights, weights, weight_cut) = wide(WEIGHTS.iter().find_map(|role| whole(role)))?;
        let (before_second, second, second_cut) = wide(whole(SECOND))?;
        let (before_first, first, first_cut) = wide(Some((chunk.dtype, base, chunk.data)))?;
        let cuts = [weight_cut, first_cut, second_cut];
        Ok(Self { before_weights, before_first, before_second, weights, first, second, cuts })
    }

    fn lent(&self) -> States<'_> {
        let [weight_cut, first_cut, second_cut] = self.cuts;
        let before = Before { weights: &self.before_weights, first: &self.before_first, second: &self.before_second };
        States { before, weights: &self.weights, first: &self.first, second: &self.second, weight_cut, first_cut, second_cut }
    }

    /// The elements of [`sample`].
    fn sampled(&self) -> FewStates {
        FewStates::of(self.lent(), |data| sample(data, 4).into_owned())
    }
}

/// Both states of a few elements.
struct FewStates {
    before: [Vec<u8>; 3],
    weights: Vec<u8>,
    first: Vec<u8>,
    second: Vec<u8>,
    cuts: [u32; 3],
}

impl FewStates {
    fn of(states: States<'_>, few: impl Fn(&[u8]) -> Vec<u8>) -> Self {
        let States { before, weights, first, second, weight_cut, first_cut, second_cut } = states;
        Self {
            before: [before.weights, before.first, before.second].map(&few),
            weights: few(weights),
            first: few(first),
            second: few(second),
            cuts: [weight_cut, first_cut, second_cut],
        }
    }

    fn lent(&self) -> States<'_> {
        let ([weights, first, second], [weight_cut, first_cut, second_cut]) = (&self.before, self.cuts);
        let before = Before { weights, first, second };
        States { before, weights: &self.weights, first: &self.first, second: &self.second, weight_cut, first_cut, second_cut }
    }
}

/// Numbers of a partner that is missing.
fn zeros<'a>(count: usize) -> Result<MaybeSpare<'a>> {
    let mut zeros = Spare::new(4 * count, "numbers")?;
    zeros.fill(0);
    Ok(MaybeSpare::Own(zeros))
}

/// Base of a chunk that this codec may take.
fn base_of<'a>(chunk: &Chunk<'a>) -> Option<&'a [u8]> {
    chunk.whole_base().filter(|_| is_number(chunk.dtype))
}

/// Bytes of the column `step`: forms and numbers of a step, of a first and of a second moment.
const STEP_BYTES: usize = 36;

impl Rule {
    /// Name of its column.
    fn name(&self) -> &'static str {
        match self {
            Self::Step(_) => COLUMNS_OF_STEP[0],
            Self::Moment(_) => COLUMNS_OF_MOMENT[0],
        }
    }

    /// The column: forms and numbers.
    fn column(&self) -> Vec<u8> {
        let mut column = Vec::with_capacity(STEP_BYTES);
        let second = match self {
            Self::Step(by) => {
                super::replay::put_step(by.step, &mut column);
                gradient::put_blend(by.first, &mut column);
                by.second
            }
            Self::Moment(second) => *second,
        };
        gradient::put_second(second, &mut column);
        column
    }

    fn read(column: &[u8], is_step: bool) -> Result<Self> {
        let mut cursor = Cursor::new(column, "forms and numbers");
        let mut read = || match is_step {
            true => {
                let step = super::replay::read_step(&mut cursor)?;
                let first = gradient::read_blend(&mut cursor)?;
                Ok(Self::Step(Step { first, second: gradient::read_second(&mut cursor)?, step }))
            }
            false => Ok(Self::Moment(gradient::read_second(&mut cursor)?)),
        };
        let rule = read().map_err(|e: Error| e.clause("joint 3"))?;
        cursor.finish().map_err(|e| e.clause("joint 3"))?;
        Ok(rule)
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
