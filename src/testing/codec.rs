//! Contract tests of [`Codec`].

use bytes::Bytes;

use crate::codec::{Chunk, ChunkKind, Codec, Columns, Encoded, Partner};
use crate::{Dtype, Error, Result};

/// Runs every check of the contract. The error names the check that failed.
///
/// ```
/// tensorcask::testing::codec::run_all(&tensorcask::codec::Bitmask)?;
/// # Ok::<(), tensorcask::Error>(())
/// ```
pub fn run_all(codec: &dyn Codec) -> Result<()> {
    let mut encoded_any = false;
    for &dtype in Dtype::ALL {
        for (what, element_count, data, base) in inputs(dtype) {
            for base in [None, Some(base.as_slice())] {
                let chunk = Chunk { base, ..Chunk::new(dtype, element_count, &data) };
                let partners = partners_of(dtype, &data, base);
                let partners: Vec<Partner<'_>> = partners.iter().map(|own| own.borrow(base.is_some())).collect();
                let name = |e: Error| {
                    let with = if base.is_some() { "with" } else { "without" };
                    Error::new(e.kind(), format!("{} on {what}, {dtype} x {element_count}, {with} a base: {e}", codec.id()))
                };
                // Describes the data as a nearly square matrix, and as elements without a known shape.
                let row_elements =
                    (1..=element_count).take_while(|row| row * row <= element_count).filter(|row| element_count % row == 0).last();
                let mut roles = vec![Chunk { row_elements: row_elements.unwrap_or(0), ..chunk }, chunk];
                if matches!(dtype, Dtype::F32 | Dtype::Bf16) {
                    roles.extend(["exp_avg", "exp_avg_sq", "momentum", "master"].map(|role| Chunk { role, partners: &partners, ..chunk }));
                }
                // Chunks that a codec encodes to the same columns share one round of damages.
                let mut damaged = Vec::new();
                for chunk in &roles {
                    encoded_any |= round_trip(codec, chunk, &mut damaged).map_err(name)?;
                }
            }
        }
    }
    if encoded_any { Ok(()) } else { Err(Error::invalid(format!("{} encoded none of the inputs", codec.id()))) }
}

/// A partner of a chunk: role, element type, bytes, bytes of the base, and gradients.
struct OwnPartner(&'static str, Dtype, Vec<u8>, Vec<u8>, Option<Vec<u8>>);

impl OwnPartner {
    fn borrow(&self, with_base: bool) -> Partner<'_> {
        let Self(role, dtype, data, base, gradient) = self;
        Partner { role, dtype: *dtype, data, base: with_base.then_some(base), gradient: gradient.as_deref().filter(|_| with_base) }
    }
}

/// Returns typical partners of a chunk of f32 or bf16: a model weight with its upper bits, and moments with the same bits,
/// which are also the gradients.
fn partners_of(dtype: Dtype, data: &[u8], base: Option<&[u8]>) -> Vec<OwnPartner> {
    let upper = |data: &[u8]| match dtype {
        Dtype::F32 => data.as_chunks::<4>().0.iter().flat_map(|unit| [unit[2], unit[3]]).collect(),
        _ => data.to_vec(),
    };
    let gradient: Vec<u8> = match dtype {
        Dtype::F32 => data.to_vec(),
        _ => data.as_chunks::<2>().0.iter().flat_map(|unit| [0, 0, unit[0], unit[1]]).collect(),
    };
    let base = base.unwrap_or(data);
    let moment = |role, gradient| OwnPartner(role, dtype, data.to_vec(), base.to_vec(), gradient);
    let model = OwnPartner("model", Dtype::Bf16, upper(data), upper(base), None);
    vec![model, moment("exp_avg", Some(gradient)), moment("exp_avg_sq", None), moment("momentum", None)]
}

fn fail(message: impl Into<String>) -> Error {
    Error::invalid(message)
}

/// Checks a round trip. Returns whether the codec took the chunk.
///
/// Damages the encoded chunk unless `damaged` holds the same chunk, and adds it to `damaged`.
fn round_trip(codec: &dyn Codec, chunk: &Chunk<'_>, damaged: &mut Vec<Encoded>) -> Result<bool> {
    let Some(estimate) = codec.estimate(chunk) else {
        refuse(codec, chunk)?;
        return Ok(false);
    };
    if !codec.supports(chunk.dtype, chunk.role) {
        return Err(fail(format!("estimated a chunk of {} of role `{}`, which it says it does not support", chunk.dtype, chunk.role)));
    }
    let encoded = codec.encode(chunk)?;
    if codec.encode(chunk)? != encoded {
        return Err(fail("encoding the same chunk twice gave different bytes"));
    }
    let bytes: u64 = encoded.columns.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    if estimate.len() != encoded.columns.len() {
        return Err(fail(format!("estimated {} columns, made {}", estimate.len(), encoded.columns.len())));
    }
    if bytes > codec.max_encoded_bytes(chunk.dtype, chunk.element_count) {
        return Err(fail(format!("{bytes} bytes, more than its stated worst case")));
    }
    let kind = if encoded.uses_base { ChunkKind::Delta } else { ChunkKind::Absolute };
    if !codec.base_use().allows(kind) {
        return Err(fail(format!("made a chunk that is {}, against its stated use of bases", kind.name())));
    }
    if encoded.uses_base && chunk.base.is_none() {
        return Err(fail("claims to use a base that was not there"));
    }
    let columns: Vec<(&str, Bytes)> = encoded.columns.iter().map(|(name, bytes)| (*name, Bytes::from(bytes.clone()))).collect();
    let base = chunk.base.filter(|_| encoded.uses_base);
    let input = Columns { dtype: chunk.dtype, element_count: chunk.element_count, columns: &columns, base, partners: chunk.partners };
    let mut decoded = vec![0xaa; chunk.data.len()];
    codec.decode(&input, &mut decoded)?;
    if codec.is_lossless() && decoded != chunk.data {
        return Err(fail("did not decode to what it encoded"));
    }
    let again = codec.encode(&Chunk { data: &decoded, ..*chunk })?;
    let columns_again: Vec<(&str, Bytes)> = again.columns.iter().map(|(name, bytes)| (*name, Bytes::from(bytes.clone()))).collect();
    let mut decoded_again = vec![0x55; decoded.len()];
    let base = chunk.base.filter(|_| again.uses_base);
    codec.decode(&Columns { columns: &columns_again, base, ..input }, &mut decoded_again)?;
    if decoded_again != decoded {
        return Err(fail("encoding what was decoded is not exact"));
    }
    refuse_missing_inputs(codec, &input, chunk)?;
    if !damaged.contains(&encoded) {
        damage(codec, &input, chunk.data.len());
        damaged.push(encoded);
    }
    Ok(true)
}

/// Checks that a chunk without an estimate is refused, or encoded without loss all the same.
fn refuse(codec: &dyn Codec, chunk: &Chunk<'_>) -> Result<()> {
    let Ok(encoded) = codec.encode(chunk) else { return Ok(()) };
    let columns: Vec<(&str, Bytes)> = encoded.columns.iter().map(|(name, bytes)| (*name, Bytes::from(bytes.clone()))).collect();
    let base = chunk.base.filter(|_| encoded.uses_base);
    let input = Columns { dtype: chunk.dtype, element_count: chunk.element_count, columns: &columns, base, partners: chunk.partners };
    let mut decoded = vec![0xaa; chunk.data.len()];
    match codec.decode(&input, &mut decoded) {
        Ok(()) if decoded == chunk.data || !codec.is_lossless() => Ok(()),
        _ => Err(fail("encoded a chunk that it does not estimate, and did not decode to it")),
    }
}

/// Decodes damaged columns, which ends in an error or in a full buffer. A panic fails the suite by itself.
fn damage(codec: &dyn Codec, input: &Columns<'_>, out_bytes: usize) {
    let mut out = vec![0; out_bytes];
    let mut attempt = |columns: &[(&str, Bytes)]| {
        // Both outcomes are right. The check is that `decode` returns.
        let _ = codec.decode(&Columns { columns, ..*input }, &mut out);
    };
    attempt(&[]);
    for column in 0..input.columns.len() {
        let (name, bytes) = &input.columns[column];
        let replaced = |with: Bytes| {
            let mut columns = input.columns.to_vec();
            columns[column] = (name, with);
            columns
        };
        for keep in [0, bytes.len() / 2, bytes.len().saturating_sub(1)] {
            attempt(&replaced(bytes.slice(..keep.min(bytes.len()))));
        }
        attempt(&replaced([bytes.as_ref(), &[0]].concat().into()));
        attempt(&replaced(vec![0xff; bytes.len()].into()));
        let mut random = Random(bytes.len() as u64 + 1);
        for _ in 0..16 {
            let mut damaged = bytes.to_vec();
            if let Some(byte) = damaged.get_mut(random.next() as usize % bytes.len().max(1)) {
                *byte ^= 1 << (random.next() % 8);
            }
            attempt(&replaced(damaged.into()));
        }
        let mut renamed = input.columns.to_vec();
        renamed[column].0 = "no such column";
        attempt(&renamed);
    }
}

/// Checks that decoding without the partners that the codec needs fails, and with a base of the wrong length.
fn refuse_missing_inputs(codec: &dyn Codec, input: &Columns<'_>, chunk: &Chunk<'_>) -> Result<()> {
    let out_bytes = chunk.data.len();
    if !codec.needs(chunk.role).is_empty()
        && codec.decode(&Columns { partners: &[], ..*input }, &mut vec![0; out_bytes]).is_ok()
        && out_bytes > 0
    {
        return Err(fail("decoded without the partners that it says it needs"));
    }
    if codec.decode(&Columns { columns: input.columns, base: Some(&[]), ..*input }, &mut vec![0; out_bytes]).is_ok()
        && input.base.is_some()
        && out_bytes > 0
    {
        return Err(fail("took a base of the wrong length"));
    }
    Ok(())
}

/// Returns test inputs: name, element count, data and base.
fn inputs(dtype: Dtype) -> Vec<(&'static str, u64, Vec<u8>, Vec<u8>)> {
    let mut inputs = Vec::new();
    let mut random = Random(u64::from(dtype.code()) + 99);
    for count in [1u64, 2, 3, 7, 8, 9, 63, 64, 65, 1000, 4099] {
        let bytes = dtype.byte_count(count).unwrap_or(0) as usize;
        let used = (count % 8 * dtype.bits() % 8) as u32;
        let clean = |mut data: Vec<u8>| {
            if let (Some(last), true) = (data.last_mut(), used != 0) {
                *last &= (1 << used) - 1;
            }
            data
        };
        let noise = clean((0..bytes).map(|_| random.next() as u8).collect());
        let mut few = noise.clone();
        let width = dtype.unit_bytes();
        for unit in few.chunks_mut(width).step_by(37) {
            unit[0] ^= 1;
        }
        let other = clean((0..bytes).map(|_| random.next() as u8).collect());
        // First, because searches that fail are repeated less and less often.
        if dtype == Dtype::F32 {
            // First moments of Adam, one step apart, with gradients of few bits.
            let moments: Vec<f32> = (0..count).map(|at| (at as f32).sin()).collect();
            let step = |moment: &f32, number: u64| 0.1f32.mul_add((number % 255) as f32 - 127.0 - moment, *moment);
            let unit = |number: &f32| [0, 8, 16, 24].map(|shift| (number.to_bits() >> shift) as u8);
            let bytes_of = |numbers: &[f32]| numbers.iter().flat_map(unit).collect::<Vec<u8>>();
            let after: Vec<f32> = moments.iter().map(|moment| step(moment, random.next())).collect();
            inputs.push(("short gradients", count, bytes_of(&after), bytes_of(&moments)));
        }
        if dtype == Dtype::Bf16 {
            // The same, rounded.
            let moments: Vec<f32> = (0..count).map(|at| (at as f32).sin()).collect();
            let upper = |number: f32| [16, 24].map(|shift| (number.to_bits() >> shift) as u8);
            let after = moments.iter().map(|moment| 0.1f32.mul_add((random.next() % 255) as f32 / 64.0 - moment, *moment));
            let after: Vec<u8> = after.flat_map(upper).collect();
            inputs.push(("short gradients", count, after, moments.into_iter().flat_map(upper).collect()));
        }
        inputs.push(("zeros", count, vec![0; bytes], noise.clone()));
        inputs.push(("noise", count, noise.clone(), other));
        inputs.push(("few changes", count, clean(few), noise.clone()));
        inputs.push(("no change", count, noise.clone(), noise));
        let mut repeated = vec![0; bytes];
        for unit in repeated.chunks_mut(width) {
            unit.copy_from_slice(&[0x7f, 0x80, 1, 2, 3, 4, 5, 6][..unit.len()]);
        }
        let repeated = clean(repeated);
        inputs.push(("one value", count, repeated, vec![0; bytes]));
        if dtype == Dtype::F32 {
            // Values of both signs, some of them zero, a few NaN or denormal.
            let mut powers = vec![0; bytes];
            for (at, unit) in powers.chunks_mut(width).enumerate() {
                match at % 64 {
                    7 => {}
                    21 => unit.copy_from_slice(&[1, 0, 0xc0, 0x7f]),
                    42 => unit.copy_from_slice(&[5, 0, 0, 0x80]),
                    _ => (unit[2], unit[3]) = ((at % 2) as u8 * 0x80, (0x38 + (random.next() % 8) as u8) | ((at % 3 / 2) as u8 * 0x80)),
                }
            }
            let mut before = powers.clone();
            before.rotate_left(width);
            inputs.push(("powers of two", count, powers, before));
        }
    }
    inputs
}

/// A small deterministic generator. The tests need variety, not quality.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}
