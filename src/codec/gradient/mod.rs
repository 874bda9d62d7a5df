//! `tc.gradient`: a first moment or a momentum as the gradient that led to it, and a second moment replayed with that
//! gradient.
//!
//! Spec:   spec/codecs/gradient.md
//! Input:  n f32 and n f32 of the base; for a second moment, the first moment in both snapshots
//! Output: of a first moment or a momentum, the form of the step, and per element exponent, length and bits of the gradient; of a
//!         second moment, the form of both steps, and the columns of `tc.ordered` with the replayed elements as base
//! Errors: `Corrupt` if exponents, lengths and bits disagree, or for an unknown form; the errors of `tc.ordered`
//! Cost:   a search of about 30 operations in binary64 per element, and the coders
//! Source: ours: gradients in 16-bit numbers, added up a few times and clipped by one factor, are far shorter than the
//!         moments that they make
//!
//! The chunk of a second moment does not store the gradient, and reads no more of the first moment than its bytes: the
//! decoder searches for the shortest gradient again. So no other channel between chunks is needed than partners, and
//! the search takes less time than reading the gradient would.

mod inputs;
pub(super) mod search;

use std::sync::{Mutex, PoisonError};

use inputs::{FIRST, Squared, base_of, shorten};
use search::{Kind, Search};
use tensorcask_kernels::digits;
use tensorcask_kernels::floats::{narrow_to, widen};
use tensorcask_kernels::gradient::{self as kernel, Blend, First, Scale, Second};
use tensorcask_kernels::joint;
use tensorcask_kernels::ordered::{Exponent, MAX_CLASSES};
use tensorcask_kernels::replay::Square;
use tensorcask_kernels::spare::{self, Spare};

use super::classes::{self, Base, Clauses, TokenClasses};
use super::residual::{self, COLUMNS_OF_MOMENT};
use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, GradientForm, MomentRule, Need, Ordered, no_gradients, sample};
use crate::entropy::{self, entropy_bits};
use crate::wire::{Cursor, Put};
use crate::{Dtype, Error, Result};

/// Stores a first moment or a momentum as a gradient, and a second moment as what that gradient leaves over.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Gradient}};
/// let bytes = |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|x| x.to_le_bytes()).collect() };
/// let before: Vec<f32> = (1..9000).map(|i| (i as f32).sin()).collect();
/// // Gradients of eight bits, clipped.
/// let gradient = |i: usize| ((i * 97 % 255) as f32 - 127.0) * 0.713_481_2;
/// let now: Vec<f32> = before.iter().enumerate().map(|(i, m)| 0.1f32.mul_add(gradient(i) - m, *m)).collect();
/// let (before, now) = (bytes(&before), bytes(&now));
/// let chunk = Chunk { role: "exp_avg", base: Some(&before), ..Chunk::new(Dtype::F32, 8999, &now) };
/// let stored: usize = Gradient::default().encode(&chunk)?.columns.iter().map(|(_, bytes)| bytes.len()).sum();
/// assert!(stored < 2 * 8999, "less than half");
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Gradient {
    search: Mutex<Search>,
    /// Of momenta: an optimizer that has them uses other decays, and beside it another may have both moments.
    momenta: Mutex<Search>,
}

const MOMENTUM: &str = "momentum";
const SECOND: &str = "exp_avg_sq";
const NEEDS_OF_SECOND: &[Need] = &[Need::both(FIRST)];
pub(super) const COLUMNS_OF_FIRST: [&str; 4] = ["gradient", "exponents", "lengths", "digits"];
const CLAUSES: Clauses = Clauses { bounds: "gradient 4", planes: "gradient 4" };

/// Steps for a chunk whose steps are not found again. Any step restores every bit; the right one takes few bytes.
const USUAL: (First, Second) = (
    First { blend: Blend::Fused, decay: 0.9, weight: 0.1, scale: Scale::None, clip: 1.0 },
    Second { square: Square::Fused, decay: 0.95, share: 0.05 },
);

/// Elements of f32 or bf16 whose exponents give the classes.
pub(super) fn exponents_of(dtype: Dtype, data: &[u8]) -> Base<'_> {
    let shift = if dtype == Dtype::Bf16 { 7 } else { 23 };
    Base { width: dtype.unit_bytes(), exponent: Exponent { shift, mask: 255 }, data }
}

fn check_dtype(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 => Ok(()),
        _ => Err(Error::corrupt(format!("gradients of {dtype}")).clause("gradient 1")),
    }
}

impl Gradient {
    /// The step of first moments or momenta. `None` if their gradients are not short.
    fn first(&self, chunk: &Chunk<'_>, before: &[u8]) -> Option<First> {
        let (search, kind) = if chunk.role == MOMENTUM { (&self.momenta, Kind::Momentum) } else { (&self.search, Kind::First) };
        search.lock().unwrap_or_else(PoisonError::into_inner).first(kind, before, chunk.data)
    }

    /// Both steps of second moments, and the percentage of elements that they give exactly.
    fn second(&self, inputs: Squared<'_>, data: &[u8]) -> Option<(First, Second, usize)> {
        self.search.lock().unwrap_or_else(PoisonError::into_inner).second(inputs, data)
    }

    fn estimate_first(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let base = base_of(chunk)?;
        let by = self.first(chunk, base)?;
        let before = sample(base, 4);
        let now = sample(chunk.data, 4);
        let mut quotients = vec![0; now.len()];
        shorten(&before, &now, by, &mut quotients);
        Some(estimate(chunk, exponents_of(Dtype::F32, &before), &quotients, &now))
    }

    fn encode_first(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let base = base_of(chunk).ok_or_else(unfit)?;
        let by = self.first(chunk, base).unwrap_or(USUAL.0);
        let mut quotients = Spare::new(chunk.data.len(), "gradients")?;
        shorten(base, chunk.data, by, &mut quotients);
        encode(exponents_of(Dtype::F32, base), by, &quotients, chunk.data)
    }

    fn estimate_second(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let inputs = Squared::of(chunk, base_of(chunk)?)?;
        let (first, second, exact) = self.second(inputs, chunk.data)?;
        if exact < 50 {
            return None;
        }
        let [base, before, now] = [inputs.base, inputs.before, inputs.now].map(|data| sample(data, 4));
        let mut replayed = vec![0; base.len()];
        Squared { base: &base, before: &before, now: &now }.replay((first, second), &mut replayed);
        residual::estimate(chunk, SECOND_BYTES as u64, &replayed)
    }

    fn encode_second(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let inputs = base_of(chunk).and_then(|base| Squared::of(chunk, base)).ok_or_else(unfit)?;
        let (first, second, exact) = self.second(inputs, chunk.data).unwrap_or((USUAL.0, USUAL.1, 0));
        let mut replayed = Spare::new(chunk.data.len(), "replayed elements")?;
        inputs.replay((first, second), &mut replayed);
        let mut column = Vec::with_capacity(SECOND_BYTES);
        put_first(first, &mut column);
        put_second(second, &mut column);
        put_scale(first, &mut column);
        residual::encode(chunk, (COLUMNS_OF_MOMENT[0], column), &replayed, TokenClasses::of(exact))
    }
}

/// Estimates the bytes of the columns of first moments, from the quotients of a few. `now` holds their elements as f32.
pub(super) fn estimate(chunk: &Chunk<'_>, base: Base<'_>, quotients: &[u8], now: &[u8]) -> Vec<u64> {
    let units = now.len() / 4;
    let mut found = vec![0; units];
    let mut lengths = vec![0; units];
    let mut classes = vec![0; units];
    let digits = digits::split(quotients, now, &mut found, &mut lengths);
    classes::choose(base, &mut classes, entropy::count_about);
    let mut histograms = vec![[0u32; 256]; MAX_CLASSES + 1];
    for ((&class, &exponent), &length) in classes.iter().zip(&found).zip(&lengths) {
        if let Some(histogram) = histograms.get_mut(usize::from(class)) {
            histogram[usize::from(exponent)] += 1;
        }
        histograms[MAX_CLASSES][usize::from(length)] += 1;
    }
    let scaled = |bytes: u64| bytes.saturating_mul(chunk.element_count) / (units as u64).max(1);
    let bytes = |histograms: &[[u32; 256]]| histograms.iter().map(|histogram| entropy_bits(histogram)).sum::<u64>() * 65 / 64 / 8;
    let (exponents, lengths) = histograms.split_at(MAX_CLASSES);
    vec![FIRST_BYTES as u64, scaled(bytes(exponents)) + 256, scaled(bytes(lengths)) + 16, scaled(digits.len() as u64)]
}

/// Encodes first moments by their quotients. `now` holds the elements as f32.
pub(super) fn encode(base: Base<'_>, by: First, quotients: &[u8], now: &[u8]) -> Result<Encoded> {
    let units = now.len() / 4;
    let mut found = Spare::new(units, "exponents")?;
    let mut lengths = Spare::new(units, "lengths")?;
    let digits = digits::split(quotients, now, &mut found, &mut lengths);
    let code = classes::encode(base, &found)?;
    let mut length_code = spare::output(units / 2);
    entropy::encode(&lengths, &mut length_code);
    let mut column = Vec::with_capacity(FIRST_BYTES);
    put_first(by, &mut column);
    put_scale(by, &mut column);
    let columns = vec![("gradient", column), ("exponents", code), ("lengths", length_code), ("digits", digits)];
    Ok(Encoded { uses_base: true, columns })
}

fn unfit() -> Error {
    Error::invalid("needs f32, a base, and the first moments of both snapshots")
}

fn put_first(by: First, column: &mut Vec<u8>) {
    put_blend(by, column);
    column.put_u32(by.clip.to_bits());
}

/// Writes form and numbers of a first moment without those of the gradient: 9 bytes.
pub(super) fn put_blend(by: First, column: &mut Vec<u8>) {
    column.put_u8(Blend::ALL.iter().position(|known| *known == by.blend).unwrap_or(0) as u8);
    [by.decay, by.weight].into_iter().for_each(|number| column.put_u32(number.to_bits()));
}

/// Writes form and numbers of a second moment: 9 bytes.
pub(super) fn put_second(by: Second, column: &mut Vec<u8>) {
    column.put_u8(Square::ALL.iter().position(|known| *known == by.square).unwrap_or(0) as u8);
    [by.decay, by.share].into_iter().for_each(|number| column.put_u32(number.to_bits()));
}

/// Most bytes of the columns `gradient` and `moment`: with a scale.
pub(super) const FIRST_BYTES: usize = 18;
const SECOND_BYTES: usize = 27;

/// Ends a column. Without a scale, it ends earlier.
fn put_scale(by: First, column: &mut Vec<u8>) {
    let (code, scale) = match by.scale {
        Scale::None => return,
        Scale::Times(scale) => (0, scale),
        Scale::Over(scale) => (1, scale),
    };
    column.put_u8(code);
    column.put_u32(scale.to_bits());
}

fn read_scale(mut cursor: Cursor<'_>) -> Result<Scale> {
    if cursor.is_empty() {
        return Ok(Scale::None);
    }
    let code = cursor.u8()?;
    let scale = f32::from_bits(cursor.u32()?);
    cursor.finish()?;
    match code {
        0 => Ok(Scale::Times(scale)),
        1 => Ok(Scale::Over(scale)),
        _ => Err(Error::corrupt(format!("scale {code}, after the last one known"))),
    }
}

fn read_first(cursor: &mut Cursor<'_>) -> Result<First> {
    let first = read_blend(cursor)?;
    Ok(First { clip: f32::from_bits(cursor.u32()?), ..first })
}

/// Inverts [`put_blend`]. The gradient is not scaled.
pub(super) fn read_blend(cursor: &mut Cursor<'_>) -> Result<First> {
    let code = cursor.u8()?;
    let [decay, weight] = [cursor.u32()?, cursor.u32()?].map(f32::from_bits);
    let blend =
        Blend::ALL.get(usize::from(code)).copied().ok_or_else(|| Error::corrupt(format!("blend {code}, after the last one known")))?;
    Ok(First { blend, decay, weight, scale: Scale::None, clip: 1.0 })
}

/// Inverts [`put_second`].
pub(super) fn read_second(cursor: &mut Cursor<'_>) -> Result<Second> {
    let code = cursor.u8()?;
    let [decay, share] = [cursor.u32()?, cursor.u32()?].map(f32::from_bits);
    let square = Square::ALL.get(usize::from(code)).copied();
    let square = square.ok_or_else(|| Error::corrupt(format!("square {code}, after the last one known")))?;
    Ok(Second { square, decay, share })
}

fn read_moment(column: &[u8]) -> Result<(First, Second)> {
    let mut cursor = Cursor::new(column, "forms and numbers");
    let first = read_first(&mut cursor)?;
    let second = read_second(&mut cursor)?;
    Ok((First { scale: read_scale(cursor)?, ..first }, second))
}

impl Codec for Gradient {
    fn id(&self) -> &str {
        "tc.gradient"
    }

    fn supports(&self, dtype: Dtype, role: &str) -> bool {
        dtype == Dtype::F32 && [FIRST, MOMENTUM, SECOND].contains(&role)
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Always
    }

    fn needs(&self, role: &str) -> &'static [Need] {
        if role == SECOND { NEEDS_OF_SECOND } else { &[] }
    }

    fn is_standalone(&self) -> bool {
        false
    }

    /// Measured on first moments. Second moments take half of that.
    fn cost(&self) -> Cost {
        Cost { encode: 19.0, decode: 13.0 }
    }

    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64 {
        let planes = entropy::max_encoded_bytes(element_count).saturating_mul(2).saturating_add(256);
        let bytes = dtype.byte_count(element_count).unwrap_or(u64::MAX);
        Ordered.max_encoded_bytes(dtype, element_count).max(planes.saturating_add(bytes)).saturating_add(32)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        match chunk.role {
            FIRST | MOMENTUM => self.estimate_first(chunk),
            SECOND => self.estimate_second(chunk),
            _ => None,
        }
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        if chunk.role == SECOND { self.encode_second(chunk) } else { self.encode_first(chunk) }
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        check_dtype(dtype)?;
        match names.first() {
            Some(&"gradient") => super::are_columns(names.iter().copied(), &COLUMNS_OF_FIRST),
            _ => super::are_columns(names.iter().copied(), &COLUMNS_OF_MOMENT),
        }
    }

    fn check_role(&self, role: &str, names: &[&str]) -> Result<()> {
        let other = if role == SECOND { COLUMNS_OF_FIRST[0] } else { COLUMNS_OF_MOMENT[0] };
        residual::check_role(role, names, other, "gradient 2")
    }

    fn holds_gradients(&self, names: &[&str]) -> bool {
        names == COLUMNS_OF_FIRST
    }

    fn offers_gradients(&self, chunk: &Chunk<'_>) -> bool {
        // A replay from moments of f32 needs no gradients.
        chunk.role == FIRST && chunk.partner(SECOND).is_some_and(|partner| partner.dtype == Dtype::Bf16)
    }

    fn decode_gradient(&self, columns: &Columns<'_>, out: &mut [u8], gradient: &mut [u8]) -> Result<GradientForm> {
        check_dtype(columns.dtype)?;
        let base = columns.base(out.len())?;
        match columns.columns {
            [("gradient", _), ..] => decode_first(columns, base, out, Some(gradient)),
            _ => Err(no_gradients(self)),
        }
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        check_dtype(columns.dtype)?;
        let base = columns.base(out.len())?;
        if let [("gradient", _), ..] = columns.columns {
            return decode_first(columns, base, out, None).map(drop);
        }
        let [column, tokens, bits] = columns.exactly(COLUMNS_OF_MOMENT)?;
        let by = read_moment(column).map_err(|e| e.clause("gradient 3"))?;
        let partner = columns.partner(FIRST)?;
        let before = partner.base.filter(|before| partner.dtype == Dtype::F32 && before.len() == partner.data.len());
        let before =
            before.ok_or_else(|| Error::corrupt("the partner of role `exp_avg` is not f32 in both snapshots").clause("gradient 1"))?;
        Squared { base, before, now: partner.data }.replay(by, out);
        residual::decode([tokens, bits], out)
    }
}

/// Decodes first moments of f32 or bf16, and their gradients if they are wanted. Returns how the chunk stores the gradients.
pub(super) fn decode_first(columns: &Columns<'_>, base: &[u8], out: &mut [u8], gradients: Option<&mut [u8]>) -> Result<GradientForm> {
    let [column, exponent_code, length_code, bits] = columns.exactly(COLUMNS_OF_FIRST)?;
    let mut cursor = Cursor::new(column, "form and numbers");
    let by = read_first(&mut cursor).and_then(|by| Ok(First { scale: read_scale(cursor)?, ..by }));
    let by = by.map_err(|e| e.clause("gradient 3"))?;
    let units = out.len() / columns.dtype.unit_bytes();
    let mut found = Spare::new(units, "exponents")?;
    classes::decode(exponent_code, exponents_of(columns.dtype, base), CLAUSES, &mut found)?;
    let mut lengths = Spare::new(units, "lengths")?;
    entropy::decode(length_code, &mut lengths)?;
    let mut quotients = Spare::new(4 * units, "gradients")?;
    if !digits::join(&found, &lengths, bits, &mut quotients) {
        return Err(Error::corrupt("exponents, lengths and digits of gradients disagree").clause("gradient 5"));
    }
    let escapes = || quotients.as_chunks::<4>().0.iter().zip(lengths.iter()).filter(|(_, length)| **length == digits::ESCAPE);
    if columns.dtype == Dtype::F32 {
        kernel::blend(base, &quotients, by, out);
        copy_escapes(&quotients, &lengths, out);
    } else if escapes().any(|([low, lower, ..], _)| *low != 0 || *lower != 0) {
        return Err(Error::corrupt("an element of more than 16 bits").clause("joint 4"));
    } else {
        let mut wide = Spare::new(4 * units, "moments")?;
        kernel::blend(&widen(columns.dtype.number_format(), base)?, &quotients, by, &mut wide);
        joint::cut_all(16, &mut wide);
        copy_escapes(&quotients, &lengths, &mut wide);
        narrow_to(columns.dtype.number_format(), &wide, out);
    }
    if let Some(gradients) = gradients {
        fill_gradients(columns, base, out, (&quotients, &lengths), by, gradients)?;
    }
    Ok(form_of(by, &lengths))
}

/// Returns how a chunk stores gradients of these lengths.
fn form_of(by: First, lengths: &[u8]) -> GradientForm {
    let stored = || lengths.iter().filter(|length| **length != digits::ESCAPE);
    GradientForm {
        rule: MomentRule { decay: by.decay, weight: by.weight },
        longest_bits: stored().max().map_or(0, |length| u32::from(*length)),
        total_bits: stored().map(|length| u64::from(*length)).sum(),
        estimated_elements: (lengths.len() - stored().count()) as u64,
    }
}

/// Copies the elements that are stored as they are.
fn copy_escapes(quotients: &[u8], lengths: &[u8], out: &mut [u8]) {
    let stored = quotients.as_chunks::<4>().0.iter().zip(lengths).zip(out.as_chunks_mut::<4>().0);
    stored.filter(|((_, length), _)| **length == digits::ESCAPE).for_each(|((quotient, _), out)| *out = *quotient);
}

/// Fills `gradients` with the gradient of each quotient. That of an escape is estimated from both moments.
fn fill_gradients(
    columns: &Columns<'_>,
    base: &[u8],
    out: &[u8],
    (quotients, lengths): (&[u8], &[u8]),
    by: First,
    gradients: &mut [u8],
) -> Result<()> {
    let before = widen(columns.dtype.number_format(), base)?;
    let now = widen(columns.dtype.number_format(), out)?;
    kernel::gradients([&before, &now], quotients, lengths, by, gradients);
    Ok(())
}

#[cfg(test)]
mod tests {
    use tensorcask_kernels::floats::to_bytes;

    use super::{FIRST, Gradient};
    use crate::Dtype;
    use crate::codec::{Chunk, Codec, Columns};

    /// Another thread may use up the next search, or replace the step that was found, between estimate and encoding.
    #[test]
    fn a_chunk_whose_step_is_not_found_again_is_stored_as_it_is() {
        let numbers = |factor: f32| to_bytes(&(0..5000).map(|i| (i as f32 * factor).sin()).collect::<Vec<f32>>());
        let before = numbers(0.7);
        let now = numbers(0.3);
        let chunk = Chunk { role: FIRST, base: Some(&before), ..Chunk::new(Dtype::F32, 5000, &now) };
        let codec = Gradient::default();
        assert_eq!(codec.estimate(&chunk), None, "these gradients are not short");
        let encoded = codec.encode(&chunk).unwrap();
        let columns: Vec<(&str, bytes::Bytes)> = encoded.columns.into_iter().map(|(name, bytes)| (name, bytes.into())).collect();
        let mut out = vec![0; now.len()];
        let input = Columns { dtype: Dtype::F32, element_count: 5000, columns: &columns, base: Some(&before), partners: &[] };
        codec.decode(&input, &mut out).unwrap();
        assert!(out == now);
    }
}
