//! The encoder with vectors of 32 symbols.

use std::arch::x86_64::*;

use super::Codes;
use crate::bits::BitWriter;

/// Symbols with the same upper four bits.
struct Row {
    /// The upper four bits.
    upper: __m256i,
    /// Low bits, remaining bits and length of each code, as look-ups by the lower four bits.
    low: __m256i,
    high: __m256i,
    length: __m256i,
}

/// Greatest number of rows for which look-ups are faster than a table in memory.
const MAX_ROWS: usize = 8;

#[inline]
#[target_feature(enable = "avx2")]
fn look_up_of(table: &[u8; 16]) -> __m256i {
    // SAFETY: a load of 16 bytes from an array of 16.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
}

/// Encodes whole groups of 32 symbols, if the code has few enough rows. Returns the remaining symbols, and whether all
/// encoded symbols have codes.
///
/// Byte shuffles look up the codes and lengths. A multiplication by a power of two then joins neighbours into pairs, and
/// a shift joins pairs into groups of four.
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn encode<'a>(symbols: &'a [u8], codes: &Codes, writer: &mut BitWriter<'_>) -> (&'a [u8], bool) {
    let mut rows = Vec::with_capacity(MAX_ROWS);
    let tables = codes.low.as_chunks::<16>().0.iter().zip(codes.high.as_chunks::<16>().0).zip(codes.length.as_chunks::<16>().0);
    for (upper, ((low, high), length)) in (0u8..).zip(tables) {
        if length.iter().all(|&length| length == 0) {
            continue;
        }
        if rows.len() == MAX_ROWS {
            return (symbols, true);
        }
        let upper = _mm256_set1_epi8((upper << 4) as i8);
        rows.push(Row { upper, low: look_up_of(low), high: look_up_of(high), length: look_up_of(length) });
    }
    // Low and high bytes of 1 << n.
    let power_low = look_up_of(&[1, 2, 4, 8, 16, 32, 64, 128, 0, 0, 0, 0, 0, 0, 0, 0]);
    let power_high = look_up_of(&[0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64, 128]);
    let zero = _mm256_setzero_si256();
    let (groups, rest) = symbols.as_chunks::<32>();
    let mut unknown = zero;
    for group in groups {
        // SAFETY: a load of 32 bytes from an array of 32.
        let symbols = unsafe { _mm256_loadu_si256(group.as_ptr().cast()) };
        let mut low = zero;
        let mut high = zero;
        let mut length = zero;
        for row in &rows {
            // The sum is below 0x80 for symbols of this row only. Shuffles give 0 where the top bit is set.
            let index = _mm256_adds_epu8(_mm256_xor_si256(symbols, row.upper), _mm256_set1_epi8(0x70));
            low = _mm256_or_si256(low, _mm256_shuffle_epi8(row.low, index));
            high = _mm256_or_si256(high, _mm256_shuffle_epi8(row.high, index));
            length = _mm256_or_si256(length, _mm256_shuffle_epi8(row.length, index));
        }
        unknown = _mm256_or_si256(unknown, _mm256_cmpeq_epi8(length, zero));
        // Each code times 1, or times a power of two that shifts it past the code before it.
        let before = _mm256_slli_epi16::<8>(length);
        let factor_low = _mm256_shuffle_epi8(power_low, before);
        let factor_high = _mm256_shuffle_epi8(power_high, before);
        let pairs_a = _mm256_madd_epi16(_mm256_unpacklo_epi8(low, high), _mm256_unpacklo_epi8(factor_low, factor_high));
        let pairs_b = _mm256_madd_epi16(_mm256_unpackhi_epi8(low, high), _mm256_unpackhi_epi8(factor_low, factor_high));
        let pair_lengths = _mm256_maddubs_epi16(length, _mm256_set1_epi8(1));
        let (quads_a, lengths_a) = quads(pairs_a, _mm256_unpacklo_epi16(pair_lengths, zero));
        let (quads_b, lengths_b) = quads(pairs_b, _mm256_unpackhi_epi16(pair_lengths, zero));
        let mut a = [0u64; 4];
        let mut b = [0u64; 4];
        let mut a_lengths = [0u64; 4];
        let mut b_lengths = [0u64; 4];
        // SAFETY: stores of 32 bytes into arrays of 32 bytes.
        unsafe {
            _mm256_storeu_si256(a.as_mut_ptr().cast(), quads_a);
            _mm256_storeu_si256(b.as_mut_ptr().cast(), quads_b);
            _mm256_storeu_si256(a_lengths.as_mut_ptr().cast(), lengths_a);
            _mm256_storeu_si256(b_lengths.as_mut_ptr().cast(), lengths_b);
        }
        // Two groups of at most 28 bits each fit into one append.
        let is_long = _mm256_cmpgt_epi64(_mm256_max_epi32(lengths_a, lengths_b), _mm256_set1_epi64x(28));
        let is_short = _mm256_movemask_epi8(is_long) == 0;
        // Each half of a vector holds groups that are neighbours in the stream.
        for half in [0, 2] {
            for (quads, lengths) in [(&a, &a_lengths), (&b, &b_lengths)] {
                let first = lengths[half] as u32;
                let second = lengths[half + 1] as u32;
                if is_short {
                    writer.put(quads[half] | quads[half + 1] << (first & 63), first.wrapping_add(second));
                } else {
                    writer.put(quads[half], first);
                    writer.put(quads[half + 1], second);
                }
            }
        }
    }
    (rest, _mm256_movemask_epi8(unknown) == 0)
}

/// Joins pairs of codes, of at most 22 bits each, into groups of four codes in 64-bit lanes. Returns their lengths too.
#[inline]
#[target_feature(enable = "avx2")]
fn quads(pairs: __m256i, lengths: __m256i) -> (__m256i, __m256i) {
    let lower = _mm256_set1_epi64x(0xffff_ffff);
    let first = _mm256_and_si256(pairs, lower);
    let first_length = _mm256_and_si256(lengths, lower);
    let second = _mm256_sllv_epi64(_mm256_srli_epi64::<32>(pairs), first_length);
    (_mm256_or_si256(first, second), _mm256_add_epi64(first_length, _mm256_srli_epi64::<32>(lengths)))
}
