//! Check of a state for NaN and infinities.
//!
//! Checked are parameters and moments, of all types that can hold NaN or infinities. Other tensors may hold anything: a
//! mask buffer holds negative infinities on purpose. Buffers have role `model` unless the caller states another, so
//! negative infinities also pass in tensors whose names say *mask*.

use std::fmt;

use tensorcask_kernels::finite::is_finite;
use tensorcask_kernels::statistics::{ValueStatistics, values};

use crate::tensor::{is_moment, is_parameter};
use crate::{Dtype, Error, Result};

/// How a save treats a state whose parameters or moments hold NaN or infinities.
///
/// Checked are tensors of a float or complex type and role `model`, `master`, `exp_avg`, `exp_avg_sq`,
/// `max_exp_avg_sq`, `momentum` or `ema`. Negative infinities are allowed in tensors whose name contains `mask`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FiniteCheck {
    /// No check.
    #[default]
    Off,
    /// Refusal: the save fails with `InvalidArgument`, which names tensor and chunk, and commits nothing.
    Refuse,
    /// Mark: the snapshot is committed and marked as not finite. Retention then keeps the newest finite snapshot.
    Tag,
}

impl FiniteCheck {
    /// Parses `finite` (refuse) or `tag`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "finite" => Ok(Self::Refuse),
            "tag" => Ok(Self::Tag),
            _ => Err(Error::invalid(format!("unknown check `{}`: use finite or tag", name.escape_debug()))),
        }
    }

    /// Name that [`from_name`](Self::from_name) reads; `None` for no check.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Self::Off => None,
            Self::Refuse => Some("finite"),
            Self::Tag => Some("tag"),
        }
    }
}

/// Number of elements of a chunk that are not finite although they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NonFinite {
    nan: u64,
    infinite: u64,
}

impl NonFinite {
    /// Looks for elements that should be finite; `None` if there are none. `measured` are the statistics of the chunk, if
    /// they are known.
    pub(crate) fn find(tensor: &str, role: &str, dtype: Dtype, data: &[u8], measured: Option<&ValueStatistics>) -> Option<Self> {
        if !is_checked(role) || (measured.is_none() && dtype.measured_format().is_none_or(|format| is_finite(format, data))) {
            return None;
        }
        let ValueStatistics { nan, positive_infinity, negative_infinity, .. } =
            measured.copied().or_else(|| dtype.measured_format().map(|format| values(format, data)))?;
        let is_mask = tensor.to_ascii_lowercase().contains("mask");
        let infinite = positive_infinity.saturating_add(if is_mask { 0 } else { negative_infinity });
        (nan > 0 || infinite > 0).then_some(Self { nan, infinite })
    }

    /// The error of a refused save.
    pub(crate) fn refusal(self, elements: u64) -> Error {
        Error::invalid(format!(
            "this chunk holds {self} among {elements} elements; nothing was saved. Load an earlier step, or save with the check \
             `tag` to keep and mark this state"
        ))
    }
}

impl fmt::Display for NonFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let infinities = if self.infinite == 1 { "infinity" } else { "infinities" };
        match (self.nan, self.infinite) {
            (nan, 0) => write!(f, "{nan} NaN"),
            (0, infinite) => write!(f, "{infinite} {infinities}"),
            (nan, infinite) => write!(f, "{nan} NaN and {infinite} {infinities}"),
        }
    }
}

/// Whether tensors of a role hold parameters, averages of parameters, or state of an optimizer that grows with them.
fn is_checked(role: &str) -> bool {
    is_parameter(role) || is_moment(role) || matches!(role, "ema" | "optimizer")
}

#[cfg(test)]
#[allow(clippy::little_endian_bytes, reason = "test data")]
mod tests {
    use tensorcask_kernels::NumberFormat;
    use tensorcask_kernels::statistics::values;

    use super::NonFinite;
    use crate::Dtype;

    #[test]
    fn parameters_and_moments_are_checked_and_masks_may_hold_negative_infinities() {
        let find = |tensor: &str, role: &str, numbers: &[f32]| {
            let data: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let measured = Some(values(NumberFormat::F32, &data));
            let found = NonFinite::find(tensor, role, Dtype::F32, &data, None);
            assert_eq!(found, NonFinite::find(tensor, role, Dtype::F32, &data, measured.as_ref()));
            found.map(|found| found.to_string())
        };
        let numbers = [1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        assert_eq!(find("h.0.w", "model", &numbers).as_deref(), Some("1 NaN and 2 infinities"));
        assert_eq!(find("h.0.w", "exp_avg_sq", &numbers[2..3]).as_deref(), Some("1 infinity"));
        assert_eq!(find("h.0.w", "model", &numbers[..1]), None);
        assert_eq!(find("h.0.w", "buffer", &numbers), None);
        assert_eq!(find("h.0.attn.causal_mask", "model", &numbers[3..]), None);
        assert_eq!(find("h.0.attn.Mask", "model", &numbers[..2]).as_deref(), Some("1 NaN"));
        assert_eq!(NonFinite::find("ids", "model", Dtype::I32, &[0xff; 4], None), None);
    }
}
