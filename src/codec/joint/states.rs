//! Both states of a parameter, in which a step is searched for.

use tensorcask_kernels::floats::widen;
use tensorcask_kernels::joint::{Before, States};
use tensorcask_kernels::spare::{MaybeSpare, Spare};

use super::super::{Chunk, sample};
use super::inputs::{SECOND, WEIGHTS, cut_of, is_number};
use crate::{Dtype, Error, Result};

/// Both states of a parameter, as f32.
pub(super) struct OwnStates<'a> {
    pub before_weights: MaybeSpare<'a>,
    pub before_first: MaybeSpare<'a>,
    pub before_second: MaybeSpare<'a>,
    pub weights: MaybeSpare<'a>,
    pub first: MaybeSpare<'a>,
    pub second: MaybeSpare<'a>,
    pub cuts: [u32; 3],
}

impl<'a> OwnStates<'a> {
    /// States of a chunk of first moments and of its partners. Numbers of a partner that is missing are zero.
    pub(super) fn of(chunk: &'a Chunk<'_>, base: &'a [u8]) -> Result<Self> {
        let whole = |role: &str| {
            let partner = chunk.partner(role).filter(|partner| is_number(partner.dtype))?;
            Some((partner.dtype, partner.base.filter(|base| base.len() == partner.data.len())?, partner.data))
        };
        let count = base.len() / chunk.dtype.unit_bytes();
        let wide = |found: Option<(Dtype, &'a [u8], &'a [u8])>| match found {
            Some((dtype, before, now)) => Ok((widen(dtype.number_format(), before)?, widen(dtype.number_format(), now)?, cut_of(dtype))),
            None => Ok::<_, Error>((zeros(count)?, zeros(count)?, 0)),
        };
        let (before_weights, weights, weight_cut) = wide(WEIGHTS.iter().find_map(|role| whole(role)))?;
        let (before_second, second, second_cut) = wide(whole(SECOND))?;
        let (before_first, first, first_cut) = wide(Some((chunk.dtype, base, chunk.data)))?;
        let cuts = [weight_cut, first_cut, second_cut];
        Ok(Self { before_weights, before_first, before_second, weights, first, second, cuts })
    }

    pub(super) fn lent(&self) -> States<'_> {
        let [weight_cut, first_cut, second_cut] = self.cuts;
        let before = Before { weights: &self.before_weights, first: &self.before_first, second: &self.before_second };
        States { before, weights: &self.weights, first: &self.first, second: &self.second, weight_cut, first_cut, second_cut }
    }

    /// The elements of [`sample`].
    pub(super) fn sampled(&self) -> FewStates {
        FewStates::of(self.lent(), |data| sample(data, 4).into_owned())
    }
}

/// Both states of a few elements.
pub(super) struct FewStates {
    pub before: [Vec<u8>; 3],
    pub weights: Vec<u8>,
    pub first: Vec<u8>,
    pub second: Vec<u8>,
    pub cuts: [u32; 3],
}

impl FewStates {
    pub(super) fn of(states: States<'_>, few: impl Fn(&[u8]) -> Vec<u8>) -> Self {
        let States { before, weights, first, second, weight_cut, first_cut, second_cut } = states;
        Self {
            before: [before.weights, before.first, before.second].map(&few),
            weights: few(weights),
            first: few(first),
            second: few(second),
            cuts: [weight_cut, first_cut, second_cut],
        }
    }

    pub(super) fn lent(&self) -> States<'_> {
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
