//! Histograms of bytes.

use super::Level;

/// Counts each byte, modulo 2^32.
pub fn histogram(bytes: &[u8]) -> [u32; 256] {
    histogram_at(Level::best(), bytes)
}

fn histogram_at(level: Level, bytes: &[u8]) -> [u32; 256] {
    let mut tables = [[0u32; 256]; 4];
    let most = most_frequent(bytes);
    match (level, most) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        (Level::Avx512, Some(most)) => unsafe { x86::count_others(bytes, most, &mut tables) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (Level::Avx2, Some(most)) => unsafe { x86::count_others_by_words(bytes, most, &mut tables) },
        _ => count(bytes, &mut tables),
    }
    let [mut sum, b, c, d] = tables;
    for (i, slot) in sum.iter_mut().enumerate() {
        *slot = slot.wrapping_add(b[i]).wrapping_add(c[i]).wrapping_add(d[i]);
    }
    sum
}

/// Counts in four tables, so repeated bytes do not wait for one another.
fn count(bytes: &[u8], tables: &mut [[u32; 256]; 4]) {
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        for (i, &byte) in word.iter().enumerate() {
            let slot = &mut tables[i & 3][usize::from(byte)];
            *slot = slot.wrapping_add(1);
        }
    }
    for &byte in rest {
        let slot = &mut tables[0][usize::from(byte)];
        *slot = slot.wrapping_add(1);
    }
}

/// Returns a byte that makes up a third of a long slice, if a sample shows one.
fn most_frequent(bytes: &[u8]) -> Option<u8> {
    const SAMPLE: usize = 256;
    let middle = bytes.len() / 2;
    let sample = bytes.get(middle..middle + SAMPLE).filter(|_| bytes.len() >= 16 * SAMPLE)?;
    let mut seen = [0i16; 256];
    sample.iter().for_each(|&byte| seen[usize::from(byte)] += 1);
    // A fold over plain numbers becomes vector instructions, other than a search for the position.
    let count = seen.iter().copied().fold(0, i16::max);
    let is_frequent = count as usize * 3 >= SAMPLE;
    (0u8..=255).zip(seen).find(|(_, n)| is_frequent && *n == count).map(|(most, _)| most)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use crate::bits::pick_bytes;

    /// Counts the byte `most` by comparison, 64 bytes at a time. Counts all other bytes one by one.
    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn count_others(bytes: &[u8], most: u8, tables: &mut [[u32; 256]; 4]) {
        const ROOM: usize = 4096;
        let mut others = [0u8; ROOM + 64];
        let mut filled = 0usize;
        let (groups, rest) = bytes.as_chunks::<64>();
        for group in groups {
            // SAFETY: a load of 64 bytes from an array of 64.
            let all = unsafe { _mm512_loadu_si512(group.as_ptr().cast()) };
            let other = _mm512_cmpneq_epu8_mask(all, _mm512_set1_epi8(most as i8));
            if let Some(place) = others.get_mut(filled..filled.wrapping_add(64)) {
                // SAFETY: a store of 64 bytes into so many.
                unsafe { _mm512_storeu_si512(place.as_mut_ptr().cast(), _mm512_maskz_compress_epi8(other, all)) };
            }
            let count = other.count_ones();
            filled = filled.wrapping_add(count as usize);
            let slot = &mut tables[0][usize::from(most)];
            *slot = slot.wrapping_add(64 - count);
            if filled > ROOM {
                super::count(&others[..filled], tables);
                filled = 0;
            }
        }
        super::count(&others[..filled], tables);
        super::count(rest, tables);
    }

    /// Like [`count_others`], 32 bytes at a time.
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    #[allow(clippy::host_endian_bytes, reason = "a kernel for little-endian processors")]
    pub(super) fn count_others_by_words(bytes: &[u8], most: u8, tables: &mut [[u32; 256]; 4]) {
        const ROOM: usize = 4096;
        let mut others = [0u8; ROOM + 40];
        let mut filled = 0usize;
        let (groups, rest) = bytes.as_chunks::<32>();
        for group in groups {
            // SAFETY: a load of 32 bytes from an array of 32.
            let all = unsafe { _mm256_loadu_si256(group.as_ptr().cast()) };
            let mut other = !_mm256_movemask_epi8(_mm256_cmpeq_epi8(all, _mm256_set1_epi8(most as i8))) as u32;
            let slot = &mut tables[0][usize::from(most)];
            *slot = slot.wrapping_add(32 - other.count_ones());
            if other == 0 {
                continue;
            }
            for word in group.as_chunks::<8>().0 {
                let of_word = other as u8;
                if let Some(place) = others.get_mut(filled..filled.wrapping_add(8)) {
                    place.copy_from_slice(&pick_bytes(u64::from_ne_bytes(*word), of_word).to_ne_bytes());
                }
                filled = filled.wrapping_add(of_word.count_ones() as usize);
                other >>= 8;
            }
            if filled > ROOM {
                super::count(&others[..filled], tables);
                filled = 0;
            }
        }
        super::count(&others[..filled], tables);
        super::count(rest, tables);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_counts_the_same() {
        let mut state = 1u64;
        for (count, skew) in [(0, 1), (1, 1), (5000, 1), (65_536, 7), (70_001, 40), (200_003, 1000)] {
            let bytes: Vec<u8> = (0..count)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    if (state >> 33).is_multiple_of(skew) { (state >> 56) as u8 } else { 77 }
                })
                .collect();
            let mut expected = [0u32; 256];
            bytes.iter().for_each(|&byte| expected[usize::from(byte)] += 1);
            for level in Level::available() {
                assert!(histogram_at(level, &bytes) == expected, "{level:?}, {count} bytes");
            }
        }
    }
}
