//! Inputs of a chunk of moments: its base, and for a second moment the first moments.

use tensorcask_kernels::gradient::{self as kernel, First, Second};

use super::super::Chunk;
use crate::Dtype;

pub(super) const FIRST: &str = "exp_avg";

/// Chunk of a second moment, and the first moments.
#[derive(Debug, Clone, Copy)]
pub(super) struct Squared<'a> {
    pub base: &'a [u8],
    pub before: &'a [u8],
    pub now: &'a [u8],
}

impl<'a> Squared<'a> {
    pub(super) fn of(chunk: &'a Chunk<'_>, base: &'a [u8]) -> Option<Self> {
        let partner = chunk.partner(FIRST).filter(|partner| partner.dtype == Dtype::F32)?;
        let before = partner.base.filter(|before| before.len() == partner.data.len())?;
        Some(Self { base, before, now: partner.data })
    }

    pub(super) fn replay(&self, by: (First, Second), out: &mut [u8]) {
        kernel::shorten(self.before, self.now, by.0, out);
        kernel::square(self.base, self.before, self.now, by, out);
    }
}

/// Base of a chunk that this codec may take.
pub(super) fn base_of<'a>(chunk: &Chunk<'a>) -> Option<&'a [u8]> {
    chunk.whole_base().filter(|_| chunk.dtype == Dtype::F32)
}

/// Fills `out` with the shortest gradients.
pub(super) fn shorten(before: &[u8], now: &[u8], by: First, out: &mut [u8]) {
    if by.is_sum() { kernel::shorten_sum(before, now, by, out) } else { kernel::shorten(before, now, by, out) }
}
