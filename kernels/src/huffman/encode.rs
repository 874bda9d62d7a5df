//! The encoder of Huffman streams. Each processor level writes the same bits.

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::{Codes, MAX_BITS};
use crate::Level;
use crate::bits::BitWriter;

/// Returns the room that [`encode`] needs for so many symbols: for the longest codes, and for stores of whole words past
/// the end.
pub fn room_for(symbols: usize) -> usize {
    (symbols * MAX_BITS as usize).div_ceil(8) + 16
}

/// Writes one stream to the front of `room`: the codes of `symbols`, then zero bits up to a whole byte. Returns its bytes,
/// or `None` if a symbol has no code.
pub fn encode(symbols: &[u8], codes: &Codes, room: &mut [u8]) -> Option<usize> {
    encode_at(Level::best(), symbols, codes, room)
}

fn encode_at(level: Level, symbols: &[u8], codes: &Codes, room: &mut [u8]) -> Option<usize> {
    let mut writer = BitWriter::new(room);
    let (rest, mut known) = match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        Level::Avx512 => unsafe { x86::encode(symbols, codes, &mut writer) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { avx2::encode(symbols, codes, &mut writer) },
        Level::Scalar => (symbols, true),
    };
    known &= put_groups_at(level, rest, codes, &mut writer);
    known.then(|| writer.finish())
}

crate::for_every_level! {
    #[allow(dead_code, reason = "its caller knows the level")]
    /// Encodes five symbols at a time, because their codes fit into one word.
    fn put_groups / put_groups_at(symbols: &[u8], codes: &Codes, writer: &mut BitWriter<'_>) -> bool = put_groups_any;
}

#[inline(always)]
fn put_groups_any(symbols: &[u8], codes: &Codes, writer: &mut BitWriter<'_>) -> bool {
    // An entry holds the length, above it the code, and at the top a flag for a missing code. Lengths need no mask
    // before they are added: the sum of five stays in the low byte, and shifts read only that byte.
    const NO_CODE: u32 = 1 << 31;
    let entry = |i: usize| u32::from(codes.high[i]) << 16 | u32::from(codes.low[i]) << 8 | u32::from(codes.length[i]);
    let table: [u32; 256] = std::array::from_fn(|i| if codes.length[i] == 0 { NO_CODE } else { entry(i) });
    let mut seen = 0;
    let (groups, rest) = symbols.as_chunks::<5>();
    for group in groups {
        let mut bits = 0u64;
        let mut count = 0u32;
        for &symbol in group {
            let entry = table[usize::from(symbol)];
            seen |= entry;
            bits |= u64::from(entry >> 8) << (count & 63);
            count = count.wrapping_add(entry);
        }
        writer.put(bits, count & 0xff);
    }
    for &symbol in rest {
        let entry = table[usize::from(symbol)];
        seen |= entry;
        writer.put(u64::from(entry >> 8), entry & 0xff);
    }
    seen & NO_CODE == 0
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use crate::bits::BitWriter;
    use crate::huffman::Codes;

    /// Encodes whole groups of 64 symbols. Returns the remaining symbols, and whether all symbols have codes.
    ///
    /// Byte permutes look up the codes and lengths of 64 symbols. Shifts by variable counts then join neighbours into 8
    /// groups of eight symbols. If a group of eight takes more than 56 bits, 16 groups of four are appended instead.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,bmi1,bmi2,avx2")]
    pub(super) fn encode<'a>(symbols: &'a [u8], codes: &Codes, writer: &mut BitWriter<'_>) -> (&'a [u8], bool) {
        let table = |bytes: &[u8; 256]| -> [__m512i; 4] {
            // SAFETY: four loads of 64 bytes within 256.
            std::array::from_fn(|i| unsafe { _mm512_loadu_si512(bytes.as_ptr().add(64 * i).cast()) })
        };
        let low = table(&codes.low);
        let high = table(&codes.high);
        let length = table(&codes.length);
        let look_up = |table: &[__m512i; 4], symbols: __m512i, upper: __mmask64| {
            let a = _mm512_permutex2var_epi8(table[0], symbols, table[1]);
            let b = _mm512_permutex2var_epi8(table[2], symbols, table[3]);
            _mm512_mask_blend_epi8(upper, a, b)
        };
        let byte = _mm512_set1_epi16(0x00ff);
        let word = _mm512_set1_epi32(0xffff);
        let half = _mm512_set1_epi64(0xffff_ffff);
        let (groups, rest) = symbols.as_chunks::<64>();
        let mut unknown = 0;
        for group in groups {
            // SAFETY: a load of 64 bytes from an array of 64.
            let s = unsafe { _mm512_loadu_si512(group.as_ptr().cast()) };
            let upper = _mm512_movepi8_mask(s);
            let lo = look_up(&low, s, upper);
            let hi = look_up(&high, s, upper);
            let len = look_up(&length, s, upper);
            unknown |= _mm512_testn_epi8_mask(len, len);
            // 16-bit lanes: codes and lengths of even and of odd symbols.
            let even = _mm512_or_si512(_mm512_and_si512(lo, byte), _mm512_slli_epi16::<8>(hi));
            let odd = _mm512_or_si512(_mm512_srli_epi16::<8>(lo), _mm512_andnot_si512(byte, hi));
            let even_len = _mm512_and_si512(len, byte);
            let odd_len = _mm512_srli_epi16::<8>(len);
            let pair_len = _mm512_add_epi16(even_len, odd_len);
            // 32-bit lanes: pairs from even and from odd 16-bit lanes.
            let pair_a = _mm512_or_si512(
                _mm512_and_si512(even, word),
                _mm512_sllv_epi32(_mm512_and_si512(odd, word), _mm512_and_si512(even_len, word)),
            );
            let pair_b = _mm512_or_si512(
                _mm512_srli_epi32::<16>(even),
                _mm512_sllv_epi32(_mm512_srli_epi32::<16>(odd), _mm512_srli_epi32::<16>(even_len)),
            );
            let a_len = _mm512_and_si512(pair_len, word);
            let b_len = _mm512_srli_epi32::<16>(pair_len);
            let quad_len = _mm512_add_epi32(a_len, b_len);
            // 64-bit lanes: quads from even and from odd 32-bit lanes.
            let quad_a = _mm512_or_si512(
                _mm512_and_si512(pair_a, half),
                _mm512_sllv_epi64(_mm512_and_si512(pair_b, half), _mm512_and_si512(a_len, half)),
            );
            let quad_b = _mm512_or_si512(
                _mm512_srli_epi64::<32>(pair_a),
                _mm512_sllv_epi64(_mm512_srli_epi64::<32>(pair_b), _mm512_srli_epi64::<32>(a_len)),
            );
            // Join octets if each fits into one append.
            let a_len = _mm512_and_si512(quad_len, half);
            let b_len = _mm512_srli_epi64::<32>(quad_len);
            let octet_len = _mm512_add_epi64(a_len, b_len);
            let octet = _mm512_or_si512(quad_a, _mm512_sllv_epi64(quad_b, a_len));
            if _mm512_cmpgt_epu64_mask(octet_len, _mm512_set1_epi64(56)) == 0 {
                let mut octets = [0u64; 8];
                let mut lengths = [0u64; 8];
                // SAFETY: stores of 64 bytes into arrays of 64 bytes.
                unsafe {
                    _mm512_storeu_si512(octets.as_mut_ptr().cast(), octet);
                    _mm512_storeu_si512(lengths.as_mut_ptr().cast(), octet_len);
                }
                for (octet, length) in octets.into_iter().zip(lengths) {
                    writer.put(octet, length as u32);
                }
                continue;
            }
            let mut a = [0u64; 8];
            let mut b = [0u64; 8];
            let mut lengths = [0u32; 16];
            // SAFETY: stores of 64 bytes into arrays of 64 bytes.
            unsafe {
                _mm512_storeu_si512(a.as_mut_ptr().cast(), quad_a);
                _mm512_storeu_si512(b.as_mut_ptr().cast(), quad_b);
                _mm512_storeu_si512(lengths.as_mut_ptr().cast(), quad_len);
            }
            for i in 0..8 {
                writer.put(a[i], lengths[2 * i]);
                writer.put(b[i], lengths[2 * i + 1]);
            }
        }
        (rest, unknown == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::{encode_at, room_for};
    use crate::Level;
    use crate::huffman::Codes;

    #[test]
    fn every_level_writes_the_same_stream() {
        let mut codes = Codes { low: [0; 256], high: [0; 256], length: [0; 256] };
        for i in 0..256usize {
            let length = 1 + (i * 7 % 11) as u8;
            let code = (i * 2654435761) as u16 & ((1 << length) - 1);
            (codes.low[i], codes.high[i], codes.length[i]) = (code as u8, (code >> 8) as u8, length);
        }
        let mut symbols: Vec<u8> = (0..5000usize).map(|i| ((i * i) >> 3) as u8).collect();
        let mut without = codes.clone();
        without.length[usize::from(symbols[70])] = 0;
        symbols.iter_mut().take(70).for_each(|symbol| *symbol = 0);
        for count in [0, 1, 63, 64, 65, 1000, 5000] {
            let stream = |level, codes: &Codes| {
                let mut room = vec![0xff; room_for(count)];
                encode_at(level, &symbols[..count], codes, &mut room).map(|bytes| room[..bytes].to_vec())
            };
            let scalar = stream(Level::Scalar, &codes);
            assert!(scalar.is_some());
            for level in Level::available() {
                assert!(stream(level, &codes) == scalar, "{level:?}, {count} symbols");
                assert_eq!(stream(level, &without).is_some(), count <= 70, "{level:?}, {count} symbols");
            }
        }
    }
}
