//! Separates the most frequent symbol of a block from the others: a bit mask, and the other symbols. Joins them again.

use super::Level;

/// Room that [`split`] needs behind the other symbols, for stores of whole vectors.
pub const ROOM: usize = 64;

/// Fills `mask` with a bit for each symbol that differs from `frequent` (least significant bit first, unused bits zero), and
/// the front of `others` with these symbols. Returns their number. `mask` has a byte for every 8 symbols; `others` has
/// room for all other symbols and [`ROOM`] more.
pub fn split(symbols: &[u8], frequent: u8, mask: &mut [u8], others: &mut [u8]) -> usize {
    split_at(Level::best(), symbols, frequent, mask, others)
}

fn split_at(level: Level, symbols: &[u8], frequent: u8, mask: &mut [u8], others: &mut [u8]) -> usize {
    let (done, mut at) = match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        Level::Avx512 => unsafe { x86::split(symbols, frequent, mask, others) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { avx2::split(symbols, frequent, mask, others) },
        Level::Scalar => (0, 0),
    };
    let rest = symbols.get(done..).unwrap_or_default().chunks(8);
    for (bits, group) in mask.iter_mut().skip(done / 8).zip(rest) {
        *bits = 0;
        for (i, &symbol) in group.iter().enumerate() {
            let differs = u8::from(symbol != frequent);
            *bits |= differs << (i & 7);
            if let Some(slot) = others.get_mut(at) {
                *slot = symbol;
            }
            at = at.wrapping_add(usize::from(differs));
        }
    }
    at
}

/// Fills `out` with `frequent`, and with the next of `others` wherever the mask has a bit. `others` has as many symbols as
/// the mask has bits.
pub fn join(mask: &[u8], others: &[u8], frequent: u8, out: &mut [u8]) {
    join_at(Level::best(), mask, others, frequent, out);
}

fn join_at(level: Level, mask: &[u8], others: &[u8], frequent: u8, out: &mut [u8]) {
    let (done, used) = match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        Level::Avx512 => unsafe { x86::join(mask, others, frequent, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { avx2::join(mask, others, frequent, out) },
        Level::Scalar => (0, 0),
    };
    let mut others = others.iter().skip(used);
    for (&bits, group) in mask.iter().skip(done / 8).zip(out.get_mut(done..).unwrap_or_default().chunks_mut(8)) {
        group.fill(frequent);
        let mut left = bits;
        while left != 0 {
            if let (Some(slot), Some(&other)) = (group.get_mut(left.trailing_zeros() as usize), others.next()) {
                *slot = other;
            }
            left &= left.wrapping_sub(1);
        }
    }
}

/// Whole vectors. The functions return the numbers of symbols and of other symbols that they moved.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    const VECTOR: usize = 64;

    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
    #[allow(clippy::little_endian_bytes, reason = "a kernel: the mask is defined byte by byte, and this is its order")]
    pub(super) fn split(symbols: &[u8], frequent: u8, mask: &mut [u8], others: &mut [u8]) -> (usize, usize) {
        let mut done = 0;
        let mut at = 0usize;
        for (vector, bits) in symbols.as_chunks::<VECTOR>().0.iter().zip(mask.as_chunks_mut::<8>().0) {
            let Some(room) = others.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<VECTOR>()) else { break };
            // SAFETY: a load of 64 bytes from an array of 64.
            let vector = unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) };
            let differ = _mm512_cmpneq_epu8_mask(vector, _mm512_set1_epi8(frequent as i8));
            *bits = differ.to_le_bytes();
            if differ != 0 {
                // SAFETY: a store of 64 bytes to an array of 64.
                unsafe { _mm512_storeu_si512(room.as_mut_ptr().cast(), _mm512_maskz_compress_epi8(differ, vector)) };
                at = at.wrapping_add(differ.count_ones() as usize);
            }
            done += VECTOR;
        }
        (done, at)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
    #[allow(clippy::little_endian_bytes, reason = "a kernel: the mask is defined byte by byte, and this is its order")]
    pub(super) fn join(mask: &[u8], others: &[u8], frequent: u8, out: &mut [u8]) -> (usize, usize) {
        let mut done = 0;
        let mut at = 0usize;
        let filler = _mm512_set1_epi8(frequent as i8);
        for (bits, out) in mask.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<VECTOR>().0) {
            let differ = u64::from_le_bytes(*bits);
            let mut vector = filler;
            if differ != 0 {
                let Some(some) = others.get(at..).and_then(|rest| rest.first_chunk::<VECTOR>()) else { break };
                // SAFETY: a load of 64 bytes from an array of 64.
                let some = unsafe { _mm512_loadu_si512(some.as_ptr().cast()) };
                vector = _mm512_mask_expand_epi8(filler, differ, some);
                at = at.wrapping_add(differ.count_ones() as usize);
            }
            // SAFETY: a store of 64 bytes to an array of 64.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), vector) };
            done += VECTOR;
        }
        (done, at)
    }
}

/// Vectors of 32 symbols, whose other symbols move 8 at a time. The functions return the numbers of symbols and of other
/// symbols that they moved.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use crate::bits::{pick_bytes, place_bytes};

    const VECTOR: usize = 32;

    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    #[allow(clippy::little_endian_bytes, reason = "a kernel: symbols and mask are defined byte by byte, and this is their order")]
    pub(super) fn split(symbols: &[u8], frequent: u8, mask: &mut [u8], others: &mut [u8]) -> (usize, usize) {
        let mut done = 0;
        let mut at = 0usize;
        for (group, bits) in symbols.as_chunks::<VECTOR>().0.iter().zip(mask.as_chunks_mut::<4>().0) {
            let Some(room) = others.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<{ VECTOR + 8 }>()) else { break };
            // SAFETY: a load of 32 bytes from an array of 32.
            let vector = unsafe { _mm256_loadu_si256(group.as_ptr().cast()) };
            let differ = !_mm256_movemask_epi8(_mm256_cmpeq_epi8(vector, _mm256_set1_epi8(frequent as i8))) as u32;
            *bits = differ.to_le_bytes();
            if differ != 0 {
                let mut to = 0usize;
                for (word, &differ) in group.as_chunks::<8>().0.iter().zip(&*bits) {
                    if let Some(slot) = room.get_mut(to..to.wrapping_add(8)) {
                        slot.copy_from_slice(&pick_bytes(u64::from_le_bytes(*word), differ).to_le_bytes());
                    }
                    to = to.wrapping_add(differ.count_ones() as usize);
                }
                at = at.wrapping_add(to);
            }
            done += VECTOR;
        }
        (done, at)
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    #[allow(clippy::little_endian_bytes, reason = "a kernel: symbols are defined byte by byte, and this is their order")]
    pub(super) fn join(mask: &[u8], others: &[u8], frequent: u8, out: &mut [u8]) -> (usize, usize) {
        let mut done = 0;
        let mut at = 0usize;
        let filler = u64::from(frequent).wrapping_mul(0x0101_0101_0101_0101);
        for (bits, out) in mask.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<VECTOR>().0) {
            if *bits == [0; 4] {
                out.fill(frequent);
                done += VECTOR;
                continue;
            }
            let Some(some) = others.get(at..).and_then(|rest| rest.first_chunk::<{ VECTOR + 8 }>()) else { break };
            let mut from = 0usize;
            for (&differ, out) in bits.iter().zip(out.as_chunks_mut::<8>().0) {
                let word = some.get(from..).and_then(|rest| rest.first_chunk::<8>()).map_or(0, |word| u64::from_le_bytes(*word));
                *out = place_bytes(word, differ, filler).to_le_bytes();
                from = from.wrapping_add(differ.count_ones() as usize);
            }
            at = at.wrapping_add(from);
            done += VECTOR;
        }
        (done, at)
    }
}

#[cfg(test)]
mod tests {
    use super::{ROOM, join_at, split_at};
    use crate::Level;

    #[test]
    fn every_level_splits_alike_and_joins_what_it_split() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as usize
        };
        for count in [0usize, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 1000, 5000] {
            for one_in in [1, 2, 3, 10, 300, 100_000] {
                let symbols: Vec<u8> = (0..count).map(|_| if next() % one_in == 0 { next() as u8 } else { 9 }).collect();
                let split = |level| {
                    let mut mask = vec![0xff; count.div_ceil(8)];
                    let mut others = vec![0xff; count + ROOM];
                    let number = split_at(level, &symbols, 9, &mut mask, &mut others);
                    others.truncate(number);
                    (mask, others)
                };
                let (mask, others) = split(Level::Scalar);
                assert_eq!(others, symbols.iter().copied().filter(|&symbol| symbol != 9).collect::<Vec<u8>>());
                for level in Level::available() {
                    assert!(split(level) == (mask.clone(), others.clone()), "{level:?}, {count} symbols");
                    let mut out = vec![0xee; count];
                    join_at(level, &mask, &others, 9, &mut out);
                    assert!(out == symbols, "{level:?}, {count} symbols");
                }
            }
        }
    }
}
