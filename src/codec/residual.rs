//! Residuals: a column that says how to predict the elements, then the columns of `tc.ordered` with the predictions as
//! base. `tc.predict`, `tc.replay` and `tc.gradient` store their chunks so.

use super::classes::TokenClasses;
use super::{Chunk, Codec, Encoded, Ordered, are_columns, sample};
use crate::{Dtype, Error, Result};

/// Columns of a master: `step` says how to predict the elements.
pub(super) const COLUMNS_OF_STEP: [&str; 3] = ["step", "tokens", "bits"];
/// Columns of a second moment.
pub(super) const COLUMNS_OF_MOMENT: [&str; 3] = ["moment", "tokens", "bits"];

/// Checks that columns are `step`, `tokens`, `bits` (a master) or `moment`, `tokens`, `bits` (a second moment).
pub(super) fn check_columns(names: &[&str]) -> Result<()> {
    let columns = if names.first() == Some(&COLUMNS_OF_STEP[0]) { COLUMNS_OF_STEP } else { COLUMNS_OF_MOMENT };
    are_columns(names.iter().copied(), &columns)
}

/// Refuses columns whose first is that of another role.
pub(super) fn check_role(role: &str, names: &[&str], of_other: &str, clause: &'static str) -> Result<()> {
    match names.first() {
        Some(first) if *first == of_other => {
            Err(Error::corrupt(format!("columns {} in a chunk of role `{role}`", names.join(", "))).clause(clause))
        }
        _ => Ok(()),
    }
}

/// Estimates the bytes of all columns of a chunk, from predictions of the elements of [`sample`].
pub(super) fn estimate(chunk: &Chunk<'_>, column_bytes: u64, predicted: &[u8]) -> Option<Vec<u64>> {
    let width = chunk.dtype.unit_bytes();
    let data = sample(chunk.data, width);
    let seen = (data.len() / width) as u64;
    let small = Chunk { element_count: seen, data: &data, base: Some(predicted), partners: &[], ..*chunk };
    let scaled = |bytes: u64| bytes.saturating_mul(chunk.element_count) / seen.max(1);
    let mut pages = vec![column_bytes];
    pages.extend(Ordered.estimate(&small)?.into_iter().map(scaled));
    Some(pages)
}

/// Encodes a chunk by its predictions.
pub(super) fn encode(chunk: &Chunk<'_>, column: (&'static str, Vec<u8>), predicted: &[u8], classes: TokenClasses) -> Result<Encoded> {
    let rest = Chunk { base: Some(predicted), partners: &[], ..*chunk };
    let mut columns = vec![column];
    columns.extend(Ordered::encode_in(&rest, classes)?.columns);
    Ok(Encoded { uses_base: true, columns })
}

/// Decodes the columns `tokens` and `bits` of f32 predictions that are in `out`.
pub(super) fn decode(columns: [&[u8]; 2], out: &mut [u8]) -> Result<()> {
    decode_in(Dtype::F32, columns, out)
}

/// Decodes the columns `tokens` and `bits` of predictions that are in `out`.
pub(super) fn decode_in(dtype: Dtype, columns: [&[u8]; 2], out: &mut [u8]) -> Result<()> {
    Ordered::decode_in_place(dtype, columns, out)
}
