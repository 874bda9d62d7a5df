//! Inputs of a replay: the base of a chunk of weights or second moments, and its partners.

use tensorcask_kernels::floats::{narrow_to, widen};
use tensorcask_kernels::joint::{self as kernel, Before};
use tensorcask_kernels::spare::{MaybeSpare, Spare};

use super::super::{Chunk, Partner, sample};
use super::rule::Rule;
use crate::tensor::is_parameter;
use crate::{Dtype, Error, Result};

pub(super) const FIRST: &str = "exp_avg";
pub(super) const SECOND: &str = "exp_avg_sq";
/// Roles of the weights, the most precise first.
pub(super) const WEIGHTS: [&str; 2] = ["master", "model"];

/// Base and partners of a chunk of weights or second moments, as f32: a replay takes these.
pub(super) struct Inputs<'a> {
    pub base: MaybeSpare<'a>,
    pub gradients: &'a [u8],
    /// Both moments of the parent, for weights.
    pub moments: Option<(MaybeSpare<'a>, MaybeSpare<'a>)>,
}

impl<'a> Inputs<'a> {
    /// Inputs of a chunk of the role. `None` without a partner, or with one of another type.
    pub(super) fn of(
        role: &str,
        dtype: Dtype,
        base: &'a [u8],
        partner: impl Fn(&'static str) -> Option<&'a Partner<'a>>,
    ) -> Option<Result<Self>> {
        let count = base.len() / dtype.unit_bytes();
        let gradients = partner(FIRST)?.gradient.filter(|gradients| gradients.len() == 4 * count)?;
        let before = |role| {
            let partner = partner(role).filter(|partner| is_number(partner.dtype))?;
            let base = partner.base.filter(|base| base.len() == count * partner.dtype.unit_bytes())?;
            Some(widen(partner.dtype.number_format(), base))
        };
        let moments = if is_parameter(role) { Some((before(FIRST)?, before(SECOND)?)) } else { None };
        let widened = || {
            let moments = moments.map(|(first, second)| Ok::<_, Error>((first?, second?))).transpose()?;
            Ok(Self { base: widen(dtype.number_format(), base)?, gradients, moments })
        };
        Some(widened())
    }

    /// The same for the elements of [`sample`].
    pub(super) fn sampled(&self) -> Sampled {
        let of = |data: &[u8]| sample(data, 4).into_owned();
        let moments = self.moments.as_ref().map(|(first, second)| (of(first), of(second)));
        Sampled { base: of(&self.base), gradients: of(self.gradients), moments }
    }

    pub(super) fn lent(&self) -> Lent<'_> {
        Lent { base: &self.base, gradients: self.gradients, moments: self.moments.as_ref().map(|(first, second)| [&**first, &**second]) }
    }
}

/// Inputs of a few elements.
pub(super) struct Sampled {
    pub base: Vec<u8>,
    pub gradients: Vec<u8>,
    pub moments: Option<(Vec<u8>, Vec<u8>)>,
}

impl Sampled {
    pub(super) fn lent(&self) -> Lent<'_> {
        let moments = self.moments.as_ref().map(|(first, second)| [first.as_slice(), second.as_slice()]);
        Lent { base: &self.base, gradients: &self.gradients, moments }
    }
}

/// Inputs of a replay, as f32.
#[derive(Clone, Copy)]
pub(super) struct Lent<'a> {
    pub base: &'a [u8],
    pub gradients: &'a [u8],
    pub moments: Option<[&'a [u8]; 2]>,
}

impl Lent<'_> {
    /// Replays a step, as f32 of the type's precision.
    pub(super) fn replay(self, rule: Rule, dtype: Dtype, out: &mut [u8]) {
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

/// Fills `out` with replayed elements of the type.
pub(super) fn replay(inputs: &Inputs<'_>, rule: Rule, dtype: Dtype, out: &mut [u8]) -> Result<()> {
    if dtype == Dtype::F32 {
        inputs.lent().replay(rule, dtype, out);
        return Ok(());
    }
    let mut wide = Spare::new(inputs.base.len(), "replayed elements")?;
    inputs.lent().replay(rule, dtype, &mut wide);
    narrow_to(dtype.number_format(), &wide, out);
    Ok(())
}

/// Number of low bits that are zero in every number of a type, widened to f32.
pub(super) fn cut_of(dtype: Dtype) -> u32 {
    if dtype == Dtype::Bf16 { 16 } else { 0 }
}

pub(super) fn is_number(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::Bf16)
}

/// Base of a chunk that this codec may take.
pub(super) fn base_of<'a>(chunk: &Chunk<'a>) -> Option<&'a [u8]> {
    chunk.whole_base().filter(|_| is_number(chunk.dtype))
}
