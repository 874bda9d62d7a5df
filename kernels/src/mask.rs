//! Compares arrays of equally wide units. Packs changed units into a bit mask and their new values, and expands them
//! again.

use super::Level;

/// Returns the mask (least significant bit first, unused bits zero) and the values of changed units.
pub fn pack(width: usize, base: &[u8], new: &[u8]) -> (Vec<u8>, Vec<u8>) {
    pack_at(Level::best(), width, base, new)
}

fn pack_at(level: Level, width: usize, base: &[u8], new: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let mut mask = crate::spare::output((new.len() / width).div_ceil(8));
    // Reserve room for all units, and for stores of whole vectors.
    let mut values = crate::spare::output(new.len() + 64);
    let done = match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        Level::Avx512 => unsafe { x86::pack(width, base, new, &mut mask, &mut values) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        Level::Avx2 if width == 2 || width == 4 => unsafe { avx2::pack(width, base, new, &mut mask, &mut values) },
        _ => 0,
    };
    let base = base.get(done..).unwrap_or_default();
    let new = new.get(done..).unwrap_or_default();
    match width {
        1 => pack_width::<1>(base, new, &mut mask, &mut values),
        2 => pack_width::<2>(base, new, &mut mask, &mut values),
        4 => pack_width::<4>(base, new, &mut mask, &mut values),
        _ => pack_width::<8>(base, new, &mut mask, &mut values),
    }
    (mask, values)
}

/// Fills `out` with `base`, except for units whose bit is set: they come from `values`. The caller has checked that the
/// popcount matches the values, and that `base` and `out` have equal lengths.
pub fn expand(width: usize, base: &[u8], mask: &[u8], values: &[u8], out: &mut [u8]) {
    expand_at(Level::best(), width, base, mask, values, out);
}

fn expand_at(level: Level, width: usize, base: &[u8], mask: &[u8], values: &[u8], out: &mut [u8]) {
    let (units, used) = match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        Level::Avx512 => unsafe { x86::expand(width, base, mask, values, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        Level::Avx2 if width == 2 || width == 4 => unsafe { avx2::expand(width, base, mask, values, out) },
        _ => (0, 0),
    };
    let rest = |bytes: usize| bytes..;
    let (Some(base), Some(out)) = (base.get(rest(units * width)), out.get_mut(rest(units * width))) else { return };
    let mask = mask.get(rest(units / 8)).unwrap_or_default();
    let values = values.get(rest(used)).unwrap_or_default();
    out.copy_from_slice(base);
    match width {
        1 => expand_width::<1>(mask, values, out),
        2 => expand_width::<2>(mask, values, out),
        4 => expand_width::<4>(mask, values, out),
        _ => expand_width::<8>(mask, values, out),
    }
}

/// Counts the changed units.
pub fn count_changed(width: usize, base: &[u8], new: &[u8]) -> usize {
    pack(width, base, new).1.len() / width
}

super::for_every_level! {
    /// Counts the bits that are set in a mask.
    pub fn count_ones / count_ones_at(mask: &[u8]) -> usize = count_ones_any;
}

#[inline(always)]
#[allow(clippy::host_endian_bytes, reason = "a kernel: bits are counted, in whichever order")]
fn count_ones_any(mask: &[u8]) -> usize {
    let (words, rest) = mask.as_chunks::<8>();
    let of_words = words.iter().fold(0usize, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word).count_ones() as usize));
    rest.iter().fold(of_words, |sum, byte| sum.wrapping_add(byte.count_ones() as usize))
}

fn pack_width<const W: usize>(base: &[u8], new: &[u8], mask: &mut Vec<u8>, values: &mut Vec<u8>) {
    let base = base.as_chunks::<W>().0;
    let new = new.as_chunks::<W>().0;
    for (base, new) in base.chunks(8).zip(new.chunks(8)) {
        let mut bits = 0u8;
        for (i, (a, b)) in base.iter().zip(new).enumerate() {
            bits |= u8::from(a != b) << i;
        }
        mask.push(bits);
        while bits != 0 {
            values.extend_from_slice(&new[bits.trailing_zeros() as usize]);
            bits &= bits - 1;
        }
    }
}

fn expand_width<const W: usize>(mask: &[u8], values: &[u8], out: &mut [u8]) {
    let mut values = values.as_chunks::<W>().0.iter();
    for (&byte, units) in mask.iter().zip(out.as_chunks_mut::<W>().0.chunks_mut(8)) {
        let mut bits = byte;
        while bits != 0 {
            if let (Some(unit), Some(value)) = (units.get_mut(bits.trailing_zeros() as usize), values.next()) {
                *unit = *value;
            }
            bits &= bits - 1;
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// Size of a vector in bytes.
    const VECTOR: usize = 64;

    /// Packs whole vectors and returns the number of bytes packed. `values` must have room for all changed units and
    /// one more vector.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt,bmi1,bmi2")]
    pub(super) fn pack(width: usize, base: &[u8], new: &[u8], mask: &mut Vec<u8>, values: &mut Vec<u8>) -> usize {
        match width {
            1 => pack_width::<1>(base, new, mask, values),
            2 => pack_width::<2>(base, new, mask, values),
            4 => pack_width::<4>(base, new, mask, values),
            _ => pack_width::<8>(base, new, mask, values),
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt,bmi1,bmi2")]
    #[allow(clippy::little_endian_bytes, reason = "a kernel: the mask is defined byte by byte, and this is its order")]
    fn pack_width<const W: usize>(base: &[u8], new: &[u8], mask: &mut Vec<u8>, values: &mut Vec<u8>) -> usize {
        let vectors = base.as_chunks::<VECTOR>().0.iter().zip(new.as_chunks::<VECTOR>().0);
        let count = vectors.len();
        let capacity = values.capacity();
        let mut at = values.len();
        for (base, new) in vectors {
            if at + VECTOR > capacity {
                // Unreachable, because there is room for all units.
                break;
            }
            // SAFETY: loads of 64 bytes from arrays of 64.
            let (base, new) = unsafe { (_mm512_loadu_si512(base.as_ptr().cast()), _mm512_loadu_si512(new.as_ptr().cast())) };
            let (bits, packed) = match W {
                1 => {
                    let bits = _mm512_cmpneq_epi8_mask(base, new);
                    (bits, _mm512_maskz_compress_epi8(bits, new))
                }
                2 => {
                    let bits = _mm512_cmpneq_epi16_mask(base, new);
                    (u64::from(bits), _mm512_maskz_compress_epi16(bits, new))
                }
                4 => {
                    let bits = _mm512_cmpneq_epi32_mask(base, new);
                    (u64::from(bits), _mm512_maskz_compress_epi32(bits, new))
                }
                _ => {
                    let bits = _mm512_cmpneq_epi64_mask(base, new);
                    (u64::from(bits), _mm512_maskz_compress_epi64(bits, new))
                }
            };
            mask.extend_from_slice(bits.to_le_bytes().get(..VECTOR / W / 8).unwrap_or_default());
            // SAFETY: the check above leaves room for a vector at `at`, within the capacity.
            unsafe { _mm512_storeu_si512(values.as_mut_ptr().add(at).cast(), packed) };
            at += W * bits.count_ones() as usize;
        }
        // SAFETY: all bytes before `at` were written, and `at` is within the capacity.
        unsafe { values.set_len(at) };
        count * VECTOR
    }

    /// Expands whole vectors while a vector of values can be read. Returns the number of units expanded and of value
    /// bytes used.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt,bmi1,bmi2")]
    pub(super) fn expand(width: usize, base: &[u8], mask: &[u8], values: &[u8], out: &mut [u8]) -> (usize, usize) {
        match width {
            1 => expand_width::<1>(base, mask, values, out),
            2 => expand_width::<2>(base, mask, values, out),
            4 => expand_width::<4>(base, mask, values, out),
            _ => expand_width::<8>(base, mask, values, out),
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt,bmi1,bmi2")]
    fn expand_width<const W: usize>(base: &[u8], mask: &[u8], values: &[u8], out: &mut [u8]) -> (usize, usize) {
        let per_vector = VECTOR / W;
        let masks = mask.chunks_exact(per_vector / 8);
        let vectors = base.as_chunks::<VECTOR>().0.iter().zip(out.as_chunks_mut::<VECTOR>().0).zip(masks);
        let mut units = 0;
        let mut at = 0;
        for ((base, out), mask) in vectors {
            if values.len() - at < VECTOR {
                break;
            }
            let bits = mask.iter().rev().fold(0u64, |bits, &byte| bits << 8 | u64::from(byte));
            // SAFETY: loads of 64 bytes: an array, and values of which as many are left.
            let (base, new) = unsafe { (_mm512_loadu_si512(base.as_ptr().cast()), _mm512_loadu_si512(values.as_ptr().add(at).cast())) };
            let merged = match W {
                1 => _mm512_mask_expand_epi8(base, bits, new),
                2 => _mm512_mask_expand_epi16(base, bits as u32, new),
                4 => _mm512_mask_expand_epi32(base, bits as u16, new),
                _ => _mm512_mask_expand_epi64(base, bits as u8, new),
            };
            // SAFETY: a store of 64 bytes into an array of 64.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), merged) };
            at += W * bits.count_ones() as usize;
            units += per_vector;
        }
        (units, at)
    }
}

/// Packs eight units of 2 or 4 bytes at a time, with a table of shuffles for each byte of the mask.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use crate::shuffles::{COMPRESS, EXPAND};

    /// Converts a table of lanes to a table of bytes in 16-bit lanes.
    const fn by_bytes(lanes: &[[u8; 8]; 256]) -> [[u8; 16]; 256] {
        let mut table = [[128; 16]; 256];
        let mut mask = 0;
        while mask < 256 {
            let mut lane = 0;
            while lane < 8 {
                if lanes[mask][lane] < 128 {
                    table[mask][2 * lane] = 2 * lanes[mask][lane];
                    table[mask][2 * lane + 1] = 2 * lanes[mask][lane] + 1;
                }
                lane += 1;
            }
            mask += 1;
        }
        table
    }

    static COMPRESS_BYTES: [[u8; 16]; 256] = by_bytes(&COMPRESS);
    static EXPAND_BYTES: [[u8; 16]; 256] = by_bytes(&EXPAND);

    /// Packs whole groups of eight units and returns the number of bytes packed. `values` must have room for all
    /// changed units and one more vector.
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    pub(super) fn pack(width: usize, base: &[u8], new: &[u8], mask: &mut Vec<u8>, values: &mut Vec<u8>) -> usize {
        let group = 8 * width;
        let capacity = values.capacity();
        let mut at = values.len();
        let mut done = 0;
        for (base, new) in base.chunks_exact(group).zip(new.chunks_exact(group)) {
            if at + 32 > capacity {
                // Unreachable, because there is room for all units.
                break;
            }
            let bits = if width == 2 {
                // SAFETY: loads of 16 bytes from 8 units of 2.
                let (base, new) = unsafe { (_mm_loadu_si128(base.as_ptr().cast()), _mm_loadu_si128(new.as_ptr().cast())) };
                let equal = _mm_cmpeq_epi16(base, new);
                let bits = !_mm_movemask_epi8(_mm_packs_epi16(equal, equal)) as u8;
                // SAFETY: a load of 16 bytes from a row of 16; the check above leaves room for 32 bytes at `at`, within the capacity.
                unsafe {
                    let order = _mm_loadu_si128(COMPRESS_BYTES[usize::from(bits)].as_ptr().cast());
                    _mm_storeu_si128(values.as_mut_ptr().add(at).cast(), _mm_shuffle_epi8(new, order));
                }
                bits
            } else {
                // SAFETY: loads of 32 bytes from 8 units of 4.
                let (base, new) = unsafe { (_mm256_loadu_si256(base.as_ptr().cast()), _mm256_loadu_si256(new.as_ptr().cast())) };
                let equal = _mm256_cmpeq_epi32(base, new);
                let bits = !_mm256_movemask_ps(_mm256_castsi256_ps(equal)) as u8;
                // SAFETY: a load of 8 bytes from a row of 8; the check above leaves room for 32 bytes at `at`, within the capacity.
                unsafe {
                    let order = _mm256_cvtepu8_epi32(_mm_loadl_epi64(COMPRESS[usize::from(bits)].as_ptr().cast()));
                    _mm256_storeu_si256(values.as_mut_ptr().add(at).cast(), _mm256_permutevar8x32_epi32(new, order));
                }
                bits
            };
            mask.push(bits);
            at += width * bits.count_ones() as usize;
            done += group;
        }
        // SAFETY: all bytes before `at` were written, and `at` is within the capacity.
        unsafe { values.set_len(at) };
        done
    }

    /// Expands whole groups of eight units while 32 bytes of values can be read. Returns the number of units expanded
    /// and of value bytes used.
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    pub(super) fn expand(width: usize, base: &[u8], mask: &[u8], values: &[u8], out: &mut [u8]) -> (usize, usize) {
        let group = 8 * width;
        let mut units = 0;
        let mut at = 0;
        for ((base, out), &bits) in base.chunks_exact(group).zip(out.chunks_exact_mut(group)).zip(mask) {
            if values.len() - at < 32 {
                break;
            }
            // SAFETY: 8 units of base and out are read and written. At most 32 bytes of values are read, and as many
            // are left. Each table has a row for every mask byte.
            unsafe {
                let from = values.as_ptr().add(at);
                if width == 2 {
                    let base = _mm_loadu_si128(base.as_ptr().cast());
                    let order = _mm_loadu_si128(EXPAND_BYTES[usize::from(bits)].as_ptr().cast());
                    let new = _mm_shuffle_epi8(_mm_loadu_si128(from.cast()), order);
                    _mm_storeu_si128(out.as_mut_ptr().cast(), _mm_blendv_epi8(new, base, order));
                } else {
                    let base = _mm256_loadu_si256(base.as_ptr().cast());
                    let order = _mm_loadl_epi64(EXPAND[usize::from(bits)].as_ptr().cast());
                    let stay = _mm256_castsi256_ps(_mm256_slli_epi32::<24>(_mm256_cvtepu8_epi32(order)));
                    let new = _mm256_permutevar8x32_epi32(_mm256_loadu_si256(from.cast()), _mm256_cvtepu8_epi32(order));
                    let merged = _mm256_blendv_ps(_mm256_castsi256_ps(new), _mm256_castsi256_ps(base), stay);
                    _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm256_castps_si256(merged));
                }
            }
            at += width * bits.count_ones() as usize;
            units += 8;
        }
        (units, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expand_inverts_pack_at_every_width_and_length() {
        let mut seed = 7u64;
        let mut next = move || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 56) as u8
        };
        for width in [1, 2, 4, 8] {
            for (units, rate) in [0, 1, 7, 8, 9, 64, 100, 1000].into_iter().flat_map(|units| [(units, 0), (units, 60), (units, 255)]) {
                let base: Vec<u8> = (0..units * width).map(|_| next()).collect();
                let new: Vec<u8> = base.iter().map(|&b| if next() < rate { next() } else { b }).collect();
                let scalar = pack_at(Level::Scalar, width, &base, &new);
                let changed = base.chunks(width).zip(new.chunks(width)).filter(|(a, b)| a != b).count();
                assert_eq!(scalar.1.len(), changed * width);
                assert_eq!(count_changed(width, &base, &new), changed);
                for level in Level::available() {
                    assert_eq!(pack_at(level, width, &base, &new), scalar, "{level:?}, {units} units of {width}");
                    assert_eq!(count_ones_at(level, &scalar.0), changed);
                    let mut out = vec![0xaa; new.len()];
                    expand_at(level, width, &base, &scalar.0, &scalar.1, &mut out);
                    assert_eq!(out, new, "{level:?}, {units} units of {width}");
                }
            }
        }
    }
}
