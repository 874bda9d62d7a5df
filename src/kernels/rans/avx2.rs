//! The coder with vectors of eight states. A byte shuffle looked up by a mask of lanes replaces the compress and expand
//! instructions of AVX-512.

use std::arch::x86_64::*;

use super::{BIAS_AT, BIAS_MASK, Decoder, Encoder, FREQUENCY_MASK, LANES, LEAST, SCALE, SCALE_BITS, SHIFT_AT};

/// Number of states in a vector.
const HALF: usize = LANES / 2;
/// Number of symbols in a short table.
const SHORT: usize = 4 * HALF;

/// For each mask of lanes: the bytes that move the 16-bit words of these lanes to the upper end, in their order.
static TO_UPPER_END: [[u8; 2 * HALF]; 256] = {
    let mut table = [[0; 2 * HALF]; 256];
    let mut mask = 0usize;
    while mask < 256 {
        let mut to = HALF - mask.count_ones() as usize;
        let mut lane = 0;
        while lane < HALF {
            if mask >> lane & 1 == 1 {
                table[mask][2 * to] = 2 * lane as u8;
                table[mask][2 * to + 1] = 2 * lane as u8 + 1;
                to += 1;
            }
            lane += 1;
        }
        mask += 1;
    }
    table
};

/// For each mask of lanes: the number of set lanes below each lane. A set lane takes the word at that position.
static SET_BELOW: [[u8; HALF]; 256] = {
    let mut table = [[0; HALF]; 256];
    let mut mask = 0usize;
    while mask < 256 {
        let mut lane = 0;
        while lane < HALF {
            table[mask][lane] = (mask & ((1 << lane) - 1)).count_ones() as u8;
            lane += 1;
        }
        mask += 1;
    }
    table
};

#[inline]
#[target_feature(enable = "avx2")]
fn load(states: &[u32; LANES]) -> [__m256i; 2] {
    // SAFETY: two loads of 32 bytes from an array of 64.
    unsafe { [_mm256_loadu_si256(states.as_ptr().cast()), _mm256_loadu_si256(states.as_ptr().add(HALF).cast())] }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(halves: [__m256i; 2], states: &mut [u32; LANES]) {
    // SAFETY: two stores of 32 bytes into an array of 64.
    unsafe {
        _mm256_storeu_si256(states.as_mut_ptr().cast(), halves[0]);
        _mm256_storeu_si256(states.as_mut_ptr().add(HALF).cast(), halves[1]);
    }
}

/// Returns the mask of lanes whose top bit is set.
#[inline]
#[target_feature(enable = "avx2")]
fn mask_of(lanes: __m256i) -> usize {
    (_mm256_movemask_ps(_mm256_castsi256_ps(lanes)) & 0xff) as usize
}

/// Encodes all groups, last group first.
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn encode(groups: &[[u8; LANES]], encoder: &Encoder, states: &mut [u32; LANES], room: &mut [u8], at: &mut usize) {
    let from_memory = |table: &[u32; 256], symbols: __m256i| {
        // SAFETY: indices are below 256, and the table has 256 entries.
        unsafe { _mm256_i32gather_epi32::<4>(table.as_ptr().cast(), symbols) }
    };
    // Most tables are short enough for registers, each of which holds 8 entries.
    if encoder.others[SHORT..].iter().any(|&other| other != 0) {
        return encode_with(
            groups,
            |symbols| (from_memory(&encoder.reciprocals, symbols), from_memory(&encoder.others, symbols)),
            states,
            room,
            at,
        );
    }
    let registers = |table: &[u32; 256]| -> [__m256i; SHORT / HALF] {
        // SAFETY: loads of 8 entries each, of the first `SHORT` of 256.
        std::array::from_fn(|i| unsafe { _mm256_loadu_si256(table.as_ptr().add(HALF * i).cast()) })
    };
    let (reciprocals, others) = (registers(&encoder.reciprocals), registers(&encoder.others));
    let look_up = |table: &[__m256i; SHORT / HALF], symbols: __m256i| {
        let of = |i: usize| _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(table[i], symbols));
        // Blends look at the top bit of a lane.
        let (odd, upper) = (_mm256_slli_epi32::<28>(symbols), _mm256_slli_epi32::<27>(symbols));
        let low = _mm256_blendv_ps(of(0), of(1), _mm256_castsi256_ps(odd));
        let high = _mm256_blendv_ps(of(2), of(3), _mm256_castsi256_ps(odd));
        _mm256_castps_si256(_mm256_blendv_ps(low, high, _mm256_castsi256_ps(upper)))
    };
    encode_with(groups, |symbols| (look_up(&reciprocals, symbols), look_up(&others, symbols)), states, room, at);
}

#[inline(always)]
fn encode_with(
    groups: &[[u8; LANES]],
    look_up: impl Fn(__m256i) -> (__m256i, __m256i),
    states: &mut [u32; LANES],
    room: &mut [u8],
    at: &mut usize,
) {
    // SAFETY: the caller is compiled for AVX2, and this function becomes part of it.
    unsafe {
        let mut halves = load(states);
        for group in groups.iter().rev() {
            for (x, symbols) in halves.iter_mut().zip(group.as_chunks::<HALF>().0).rev() {
                let symbols = _mm256_cvtepu8_epi32(_mm_loadl_epi64(symbols.as_ptr().cast()));
                let (reciprocal, other) = look_up(symbols);
                let frequency = _mm256_and_si256(other, _mm256_set1_epi32(FREQUENCY_MASK as i32));
                // States and limits are below 2^31, so a signed comparison will do.
                let is_low = _mm256_cmpgt_epi32(_mm256_slli_epi32::<19>(frequency), *x);
                let full = !mask_of(is_low) & 0xff;
                let words = _mm256_and_si256(*x, _mm256_set1_epi32(0xffff));
                let words = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
                let words = _mm_shuffle_epi8(words, _mm_loadu_si128(TO_UPPER_END[full].as_ptr().cast()));
                if let Some(place) = at.checked_sub(2 * HALF).and_then(|from| room.get_mut(from..*at)) {
                    _mm_storeu_si128(place.as_mut_ptr().cast(), words);
                }
                *at = at.wrapping_sub(2 * full.count_ones() as usize);
                let reduced = _mm256_srlv_epi32(*x, _mm256_andnot_si256(is_low, _mm256_set1_epi32(16)));
                let even = _mm256_srli_epi64::<32>(_mm256_mul_epu32(reduced, reciprocal));
                let odd = _mm256_mul_epu32(_mm256_srli_epi64::<32>(reduced), _mm256_srli_epi64::<32>(reciprocal));
                let high = _mm256_blend_epi32::<0b1010_1010>(even, odd);
                let shift = _mm256_and_si256(_mm256_srli_epi32::<{ SHIFT_AT as i32 }>(other), _mm256_set1_epi32(15));
                let bias = _mm256_and_si256(_mm256_srli_epi32::<{ BIAS_AT as i32 }>(other), _mm256_set1_epi32(BIAS_MASK as i32));
                let complement = _mm256_sub_epi32(_mm256_set1_epi32(SCALE as i32), frequency);
                let product = _mm256_mullo_epi32(_mm256_srlv_epi32(high, shift), complement);
                *x = _mm256_add_epi32(_mm256_add_epi32(reduced, bias), product);
            }
        }
        store(halves, states);
    }
}

/// Decodes groups while there are words for all states. Returns the number of groups decoded and of words used.
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn decode(words: &[[u8; 2]], states: &mut [u32; LANES], decoder: &Decoder, groups: &mut [[u8; LANES]]) -> (usize, usize) {
    let mut halves = load(states);
    let (mut done, mut at) = (0, 0usize);
    let most = decoder.most.map(|most| (most, _mm256_set1_epi32(most.start as i32), _mm256_set1_epi32(most.frequency as i32)));
    let low_bytes = _mm256_set1_epi32(0x0c08_0400);
    for group in groups {
        if words.len().saturating_sub(at) < LANES {
            break;
        }
        for (half, out) in halves.iter_mut().zip(group.as_chunks_mut::<HALF>().0) {
            let index = _mm256_and_si256(*half, _mm256_set1_epi32(SCALE as i32 - 1));
            let upper = _mm256_srli_epi32::<{ SCALE_BITS as i32 }>(*half);
            // Skip the table if all eight symbols are the dominant one.
            let dominant = most.and_then(|(most, start, frequency)| {
                let from_start = _mm256_sub_epi32(index, start);
                let is_other = _mm256_or_si256(
                    _mm256_cmpgt_epi32(start, index),
                    _mm256_cmpgt_epi32(_mm256_add_epi32(from_start, _mm256_set1_epi32(1)), frequency),
                );
                let x = _mm256_add_epi32(_mm256_mullo_epi32(frequency, upper), from_start);
                (mask_of(is_other) == 0).then_some((most.symbol, x))
            });
            let x = match dominant {
                Some((symbol, x)) => {
                    *out = [symbol; HALF];
                    x
                }
                None => {
                    // SAFETY: indices are below `SCALE`, as many as the table has entries.
                    let slot = unsafe { _mm256_i32gather_epi32::<4>(decoder.slots.as_ptr().cast(), index) };
                    let symbols = _mm256_shuffle_epi8(slot, low_bytes);
                    let symbols = _mm_unpacklo_epi32(_mm256_castsi256_si128(symbols), _mm256_extracti128_si256::<1>(symbols));
                    // SAFETY: a store of 8 bytes into an array of 8.
                    unsafe { _mm_storel_epi64(out.as_mut_ptr().cast(), symbols) };
                    let frequency = _mm256_and_si256(_mm256_srli_epi32::<8>(slot), _mm256_set1_epi32(SCALE as i32 - 1));
                    let frequency = _mm256_add_epi32(frequency, _mm256_set1_epi32(1));
                    _mm256_add_epi32(_mm256_mullo_epi32(frequency, upper), _mm256_srli_epi32::<20>(slot))
                }
            };
            // States are below 2^31, so a signed comparison will do.
            let few = _mm256_cmpgt_epi32(_mm256_set1_epi32(LEAST as i32), x);
            let mask = mask_of(few);
            // SAFETY: 16 words were there for the group, of which the first half took 8 at most; a row of the table has
            // 8 bytes.
            let (next, from) =
                unsafe { (_mm_loadu_si128(words.as_ptr().add(at).cast()), _mm_loadl_epi64(SET_BELOW[mask].as_ptr().cast())) };
            let word = _mm256_permutevar8x32_epi32(_mm256_cvtepu16_epi32(next), _mm256_cvtepu8_epi32(from));
            let shifted = _mm256_sllv_epi32(x, _mm256_and_si256(few, _mm256_set1_epi32(16)));
            *half = _mm256_or_si256(shifted, _mm256_and_si256(word, few));
            at = at.wrapping_add(mask.count_ones() as usize);
        }
        done += 1;
    }
    store(halves, states);
    (done, at)
}
