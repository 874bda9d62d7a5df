//! `tc.blockwise8`: dynamic 8-bit quantization in blocks, the format of bitsandbytes optimizer states.
//!
//! Spec:   spec/codecs/blockwise8.md
//! Input:  n finite f32
//! Output: the map; the greatest magnitude of each block of 256 numbers; one code per number, coded by spec/entropy.md
//! Errors: `Corrupt` if a scale is not finite, or the sizes of the columns do not fit the chunk
//! Cost:   a search of 8 steps per number to encode; one multiplication per number to decode
//! Source: Dettmers, Lewis, Shleifer, Zettlemoyer, 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861)

use tensorcask_kernels::floats::{floats, to_bytes, unit};
use tensorcask_kernels::spare::Spare;

use super::{Chunk, Codec, Columns, Cost, Encoded, maps};
use crate::entropy;
use crate::{Dtype, Error, Result};

/// Stores numbers in 8 bits each. Rounds numbers, except those that an earlier decode of this codec produced.
///
/// ```
/// use tensorcask::{Dtype, codec::{Blockwise8, Chunk, Codec}};
/// let data: Vec<u8> = (1..=1000).flat_map(|i| (1.0 / i as f32).to_le_bytes()).collect();
/// let encoded = Blockwise8.encode(&Chunk::new(Dtype::F32, 1000, &data))?;
/// let names: Vec<&str> = encoded.columns.iter().map(|(name, _)| *name).collect();
/// assert_eq!(names, ["map", "absmax", "codes"]);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Blockwise8;

const COLUMNS: [&str; 3] = ["map", "absmax", "codes"];
const BLOCK: usize = 256;

fn check_dtype(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 => Ok(()),
        _ => Err(Error::corrupt(format!("blocks of {dtype}")).clause("blockwise8 1")),
    }
}

/// A quantized chunk.
struct Blocks {
    signed: bool,
    absmax: Vec<f32>,
    codes: Vec<u8>,
}

/// Quantizes a chunk. Returns `None` if a number is not finite.
fn quantize(data: &[u8]) -> Option<Blocks> {
    if !floats(data).all(f32::is_finite) {
        return None;
    }
    let negative = floats(data).any(|x| x < 0.0);
    // Try the exact form on both maps first: numbers that this codec decoded earlier must come back exactly.
    let tries = [(negative, true), (true, true), (negative, false)];
    tries.into_iter().find_map(|(signed, exactly)| quantize_on(signed, exactly, data))
}

fn quantize_on(signed: bool, exactly: bool, data: &[u8]) -> Option<Blocks> {
    let map = if signed { &*maps::SIGNED } else { &*maps::UNSIGNED };
    let mut absmax = Vec::new();
    let mut codes = Vec::with_capacity(data.len() / 4);
    for block in data.chunks(BLOCK * 4) {
        let greatest = floats(block).fold(0f32, |most, x| if x.abs() > most { x.abs() } else { most });
        // Denormals become zero. Their products with the map would be zero too, and some of those would be negative
        // zero.
        let greatest = if greatest < f32::MIN_POSITIVE { 0.0 } else { greatest };
        // The smallest number of the signed map is above -1, so an earlier decode may have shrunk the greatest
        // magnitude.
        let exact = |scale: &f32| floats(block).all(|x| x.to_bits() == (map[usize::from(code(map, x, *scale))] * scale).to_bits());
        let scale = match exactly {
            true if signed => std::iter::once(greatest).chain(shrunk_from(greatest, map[0].abs())).find(exact)?,
            true => Some(greatest).filter(exact)?,
            false => greatest,
        };
        absmax.push(scale);
        codes.extend(floats(block).map(|x| code(map, x, scale)));
    }
    Some(Blocks { signed, absmax, codes })
}

/// Returns the scales whose product with `least` is `product`.
fn shrunk_from(product: f32, least: f32) -> impl Iterator<Item = f32> {
    let about = product / least;
    let near = [about, about.next_up(), about.next_down()].into_iter();
    near.filter(move |scale| scale.is_finite() && scale * least == product)
}

fn code(map: &maps::Map, x: f32, scale: f32) -> u8 {
    maps::nearest(map, if scale > 0.0 { x / scale } else { 0.0 })
}

impl Codec for Blockwise8 {
    fn id(&self) -> &str {
        "tc.blockwise8"
    }

    fn supports(&self, dtype: Dtype, _: &str) -> bool {
        dtype == Dtype::F32
    }

    fn is_lossless(&self) -> bool {
        false
    }

    fn cost(&self) -> Cost {
        Cost { encode: 12.0, decode: 3.0 }
    }

    fn max_encoded_bytes(&self, _: Dtype, element_count: u64) -> u64 {
        entropy::max_encoded_bytes(element_count).saturating_add(element_count.div_ceil(BLOCK as u64).saturating_mul(4)).saturating_add(1)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let finite = chunk.dtype == Dtype::F32 && floats(chunk.data).all(f32::is_finite);
        finite.then(|| vec![1, (chunk.element_count.div_ceil(BLOCK as u64)) * 4, chunk.element_count])
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let blocks = quantize(chunk.data).filter(|_| chunk.dtype == Dtype::F32);
        let blocks = blocks.ok_or_else(|| Error::invalid("needs finite f32"))?;
        let codes = entropy::coded(&blocks.codes);
        let stored = [vec![u8::from(!blocks.signed)], to_bytes(&blocks.absmax), codes];
        Ok(Encoded { uses_base: false, columns: COLUMNS.into_iter().zip(stored).collect() })
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        check_dtype(dtype)?;
        super::are_columns(names.iter().copied(), &COLUMNS)
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        check_dtype(columns.dtype)?;
        let [map, absmax, codes] = columns.exactly(COLUMNS)?;
        let bad = |message: String, clause| Err(Error::corrupt(message).clause(clause));
        let map = match map {
            [0] => &*maps::SIGNED,
            [1] => &*maps::UNSIGNED,
            _ => return bad("a map that is neither signed nor unsigned".into(), "blockwise8 1"),
        };
        let units = out.len() / 4;
        if absmax.len() != units.div_ceil(BLOCK) * 4 {
            return bad(format!("{} bytes of scales for {units} elements", absmax.len()), "blockwise8 1");
        }
        if let Some(scale) = floats(absmax).find(|scale| !scale.is_finite() || scale.is_sign_negative()) {
            return bad(format!("a scale of {scale}"), "blockwise8 1.1");
        }
        let mut symbols = Spare::new(units, "codes")?;
        entropy::decode(codes, &mut symbols)?;
        for ((scale, symbols), out) in floats(absmax).zip(symbols.chunks(BLOCK)).zip(out.chunks_mut(BLOCK * 4)) {
            for (symbol, out) in symbols.iter().zip(out.as_chunks_mut::<4>().0) {
                *out = unit(map[usize::from(*symbol)] * scale);
            }
        }
        Ok(())
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn the_environment_of_the_program_does_not_matter_to_what_is_decoded() {
        let data: Vec<u8> = (0..2000u32).flat_map(|i| unit(i as f32 * 1e-41)).collect();
        let chunk = Chunk::new(Dtype::F32, 2000, &data);
        let stored = Blockwise8.encode(&chunk).unwrap().into_bytes();
        let input = Columns { dtype: Dtype::F32, element_count: 2000, columns: &stored, base: None, partners: &[] };
        let mut out = vec![0; 8000];
        let mut other = vec![0; 8000];
        super::super::decode(&Blockwise8, &input, &mut out).unwrap();
        tensorcask_kernels::with_odd_environment(|| super::super::decode(&Blockwise8, &input, &mut other)).unwrap();
        assert!(out.iter().any(|byte| *byte != 0));
        assert_eq!(out, other);
    }
}
