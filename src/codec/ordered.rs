//! `tc.ordered`: differences of floats as ordered integers, in classes by the base's exponent.
//!
//! Spec:   spec/codecs/ordered.md
//! Input:  n floats of width w (1, 2, 4 bytes) and n floats of the base
//! Output: tokens, entropy-coded as one plane per class, and the extra bits of large differences
//! Errors: `Corrupt` if classes, planes or bits disagree with the base and with n; `InvalidArgument` without a base
//! Cost:   one pass to make tokens, one pass to group tokens by class, then the coders
//! Source: ours: an update moves a weight by a number of ulps that depends on the weight's exponent, so tokens of
//!         similar exponents share a code

use tensorcask_kernels::bytes;
use tensorcask_kernels::ordered::{self as kernel, Exponent, MAX_CLASSES};
use tensorcask_kernels::spare::Spare;

use super::classes::{self, Base, Clauses, TokenClasses};
use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, sample};
use crate::entropy::{self, entropy_bits};
use crate::{Dtype, Error, Result};

/// Stores how many representable numbers lie between each element and its value in the parent snapshot.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Ordered}};
/// let base: Vec<u8> = (0..10_000).flat_map(|i| (0.5f32 + i as f32 * 1e-5).to_le_bytes()).collect();
/// let data: Vec<u8> = (0..10_000).flat_map(|i| (0.5f32 + i as f32 * 1e-5).next_up().to_le_bytes()).collect();
/// let chunk = Chunk { base: Some(&base), ..Chunk::new(Dtype::F32, 10_000, &data) };
/// let bytes: usize = Ordered.encode(&chunk)?.columns.iter().map(|(_, bytes)| bytes.len()).sum();
/// assert!(bytes < 40);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Ordered;

const CLAUSES: Clauses = Clauses { bounds: "ordered 3", planes: "ordered 3.1" };

/// Returns the position of the exponent, for types that this codec accepts.
pub(super) fn exponent_of(dtype: Dtype) -> Option<Exponent> {
    let (shift, bits) = match dtype {
        Dtype::F8E4M3 | Dtype::F8E4M3Fnuz => (3, 4),
        Dtype::F8E5M2 | Dtype::F8E5M2Fnuz => (2, 5),
        Dtype::F16 => (10, 5),
        Dtype::Bf16 => (7, 8),
        Dtype::F32 | Dtype::C64 => (23, 8),
        _ => return None,
    };
    Some(Exponent { shift, mask: (1 << bits) - 1 })
}

fn exponent_for(dtype: Dtype) -> Result<Exponent> {
    exponent_of(dtype).ok_or_else(|| Error::corrupt(format!("chunks of {dtype}")).clause("ordered 1"))
}

impl Ordered {
    /// Encodes like [`Codec::encode`], with the tokens in these classes.
    pub(super) fn encode_in(chunk: &Chunk<'_>, token_classes: TokenClasses) -> Result<Encoded> {
        let base = chunk.base.filter(|base| base.len() == chunk.data.len());
        let base = base.ok_or_else(|| Error::invalid("needs a base chunk of equal length"))?;
        let exponent = exponent_of(chunk.dtype).ok_or_else(|| Error::invalid(format!("cannot store {}", chunk.dtype)))?;
        let width = chunk.dtype.unit_bytes();
        let units = chunk.data.len() / width;
        let mut tokens = Spare::new(units, "tokens")?;
        let bits = kernel::encode(width, base, chunk.data, &mut tokens);
        let code = match token_classes {
            TokenClasses::ByExponent => classes::encode(Base { width, exponent, data: base }, &tokens)?,
            TokenClasses::One => classes::encode_as_one(&tokens),
        };
        Ok(Encoded { uses_base: true, columns: vec![("tokens", code), ("bits", bits)] })
    }

    /// Decodes the columns `tokens` and `bits` of a base that is in `out`.
    pub(super) fn decode_in_place(dtype: Dtype, [code, bits]: [&[u8]; 2], out: &mut [u8]) -> Result<()> {
        let tokens = decode_tokens(dtype, code, out)?;
        ends(kernel::apply_in_place(dtype.unit_bytes(), &tokens, bits, out))
    }
}

impl Codec for Ordered {
    fn id(&self) -> &str {
        "tc.ordered"
    }

    fn supports(&self, dtype: Dtype, _: &str) -> bool {
        exponent_of(dtype).is_some()
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Always
    }

    fn cost(&self) -> Cost {
        Cost { encode: 10.0, decode: 8.0 }
    }

    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64 {
        let bytes = dtype.byte_count(element_count).unwrap_or(u64::MAX);
        let units = bytes / dtype.unit_bytes() as u64;
        let classes = MAX_CLASSES as u64;
        entropy::max_encoded_bytes(units).saturating_add(8 * classes).saturating_add(bytes)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let exponent = exponent_of(chunk.dtype)?;
        let base = chunk.base.filter(|base| base.len() == chunk.data.len())?;
        let width = chunk.dtype.unit_bytes();
        let units = (chunk.data.len() / width) as u64;
        let data = sample(chunk.data, width);
        let base = sample(base, width);
        let mut tokens = Spare::new(data.len() / width, "tokens").ok()?;
        let mut exponents = Spare::new(data.len() / width, "classes").ok()?;
        kernel::tokens(width, &base, &data, &mut tokens);
        let bounds = classes::choose(Base { width, exponent, data: &base }, &mut exponents, bytes::histogram);
        let mut histograms = vec![[0u32; 256]; bounds.len() + 1];
        let mut extra = 0u64;
        for (&token, &class) in tokens.iter().zip(exponents.iter()) {
            if let Some(slot) = histograms.get_mut(usize::from(class)) {
                slot[usize::from(token)] += 1;
            }
            extra += u64::from(kernel::extra_bits(token));
        }
        let sampled = (tokens.len() as u64).max(1);
        let scale = |bits: u64| bits.saturating_mul(units) / sampled / 8;
        let ideal = histograms.iter().map(|histogram| entropy_bits(histogram)).sum::<u64>();
        let used = histograms.iter().map(|histogram| histogram.iter().filter(|&&n| n > 0).count() as u64).sum::<u64>();
        Some(vec![scale(ideal + ideal / 64) + 5 * histograms.len() as u64 + used.min(units), scale(extra)])
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        Self::encode_in(chunk, TokenClasses::ByExponent)
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        exponent_for(dtype)?;
        super::are_columns(names.iter().copied(), &["tokens", "bits"])
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        let [code, bits] = columns.exactly(["tokens", "bits"])?;
        let base = columns.base(out.len())?;
        let tokens = decode_tokens(columns.dtype, code, base)?;
        ends(kernel::apply(columns.dtype.unit_bytes(), base, &tokens, bits, out))
    }
}

fn decode_tokens(dtype: Dtype, code: &[u8], base: &[u8]) -> Result<Spare> {
    let exponent = exponent_for(dtype)?;
    let width = dtype.unit_bytes();
    let mut tokens = Spare::new(base.len() / width, "tokens")?;
    classes::decode(code, Base { width, exponent, data: base }, CLAUSES, &mut tokens)?;
    if tokens.iter().copied().fold(0, u8::max) > kernel::max_token(width) {
        return Err(Error::corrupt("a token is out of range").clause("ordered 3.2"));
    }
    Ok(tokens)
}

fn ends(at_last_element: bool) -> Result<()> {
    match at_last_element {
        true => Ok(()),
        false => Err(Error::corrupt("extra bits do not end with the last element").clause("ordered 3.3")),
    }
}
