//! Inputs of a replay: the base of a chunk, and its partners.

use tensorcask_kernels::replay::{self as kernel, Divisor, Moment, Square, Step, Update};

use super::super::{Chunk, Partner, sample};
use super::rule::Rule;
use crate::Dtype;
use crate::tensor::is_parameter;

pub(super) const FIRST: &str = "exp_avg";
pub(super) const SECOND: &str = "exp_avg_sq";

/// Inputs of a replay.
#[derive(Debug, Clone, Copy)]
pub(super) enum Inputs<'a> {
    /// Earlier weights, and both moments after the step.
    Step { weights: &'a [u8], first: &'a [u8], second: &'a [u8] },
    /// Earlier second moments, and the first moments before and after the step.
    Moment { second: &'a [u8], before: &'a [u8], now: &'a [u8] },
}

impl<'a> Inputs<'a> {
    pub(super) fn of(chunk: &'a Chunk<'_>) -> Option<Self> {
        let base = chunk.whole_base().filter(|_| chunk.dtype == Dtype::F32)?;
        match chunk.role {
            role if is_parameter(role) => {
                Some(Self::Step { weights: base, first: now(chunk.partner(FIRST))?, second: now(chunk.partner(SECOND))? })
            }
            SECOND => Some(Self::Moment { second: base, before: before(chunk.partner(FIRST))?, now: now(chunk.partner(FIRST))? }),
            _ => None,
        }
    }

    /// Replays the step. `out` has the length of the inputs.
    pub(super) fn replay(&self, rule: Rule, out: &mut [u8]) {
        match (*self, rule) {
            (Self::Step { weights, first, second }, Rule::Step(by)) => kernel::step(weights, first, second, by, out),
            (Self::Moment { second, before, now }, Rule::Moment(by)) => kernel::moment(second, before, now, by, out),
            // Callers pass the rule of their inputs.
            _ => out.fill(0),
        }
    }

    /// Rule for a chunk whose rule is not found again, because threads share the rules that were found. Any rule
    /// restores every bit; the right one takes few bytes.
    pub(super) fn usual_rule(&self) -> Rule {
        match self {
            Self::Step { .. } => {
                let update = Update::ScaleFirst;
                let divisor = Divisor::Divided;
                Rule::Step(Step { update, divisor, decay: 1.0, scale: 0.0, correction: 1.0, epsilon: 1e-8 })
            }
            Self::Moment { .. } => Rule::Moment(Moment { square: Square::Fused, decay: 0.95, share: 0.05, weight: 0.1 }),
        }
    }

    /// Replays the elements of [`sample`].
    pub(super) fn replay_sample(&self, rule: Rule) -> Vec<u8> {
        let run = |inputs: Inputs<'_>, bytes: usize| {
            let mut out = vec![0; bytes];
            inputs.replay(rule, &mut out);
            out
        };
        match *self {
            Self::Step { weights, first, second } => {
                let [weights, first, second] = [weights, first, second].map(|data| sample(data, 4));
                run(Inputs::Step { weights: &weights, first: &first, second: &second }, weights.len())
            }
            Self::Moment { second, before, now } => {
                let [second, before, now] = [second, before, now].map(|data| sample(data, 4));
                run(Inputs::Moment { second: &second, before: &before, now: &now }, second.len())
            }
        }
    }
}

/// The partner's elements, if they are f32.
pub(super) fn now<'a>(partner: Option<&'a Partner<'a>>) -> Option<&'a [u8]> {
    partner.filter(|partner| partner.dtype == Dtype::F32).map(|partner| partner.data)
}

/// The partner's elements in the parent, if they are f32.
pub(super) fn before<'a>(partner: Option<&'a Partner<'a>>) -> Option<&'a [u8]> {
    let partner = partner.filter(|partner| partner.dtype == Dtype::F32)?;
    partner.base.filter(|base| base.len() == partner.data.len())
}
