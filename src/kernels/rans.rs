//! Interleaved rANS: 31-bit states, 16-bit words, 12-bit probabilities. After Duda (arXiv 1311.2540), with Giesen's
//! interleaving (arXiv 1402.3392) and Alverson's division by multiplication.

use super::Level;

/// Number of interleaved states.
pub(crate) const LANES: usize = 16;
/// Number of bits of a probability.
pub(crate) const SCALE_BITS: u32 = 12;
/// Sum of all frequencies.
pub(crate) const SCALE: u32 = 1 << SCALE_BITS;
/// Least state.
const LEAST: u32 = 1 << 15;

/// Returns whether an encoder can end in this state.
pub(crate) fn is_state(state: u32) -> bool {
    (LEAST..1 << 31).contains(&state)
}

/// Encoding table.
#[derive(Debug, Clone)]
pub(crate) struct Encoder {
    /// Reciprocal of each symbol's frequency, for the division.
    reciprocals: [u32; 256],
    /// Frequency (12 bits), bias (13 bits), and shift after the multiplication (4 bits) of each symbol.
    others: [u32; 256],
}

const FREQUENCY_MASK: u32 = SCALE - 1;
const BIAS_MASK: u32 = 2 * SCALE - 1;
const BIAS_AT: u32 = 12;
const SHIFT_AT: u32 = 25;

impl Encoder {
    /// Builds the table from frequencies below [`SCALE`] whose sum is [`SCALE`].
    pub(crate) fn new(frequencies: &[u16; 256]) -> Box<Self> {
        let mut encoder = Box::new(Self { reciprocals: [0; 256], others: [0; 256] });
        let mut start = 0u32;
        for ((reciprocal, other), &frequency) in encoder.reciprocals.iter_mut().zip(&mut encoder.others).zip(frequencies) {
            let frequency = u32::from(frequency) & FREQUENCY_MASK;
            if frequency > 0 {
                let (shift, by, bias) = if frequency < 2 {
                    (0, u32::MAX, start + SCALE - 1)
                } else {
                    let shift = u32::BITS - (frequency - 1).leading_zeros();
                    let by = (1u64 << (shift + 31)).div_ceil(u64::from(frequency));
                    (shift - 1, by as u32, start)
                };
                (*reciprocal, *other) = (by, frequency | (bias & BIAS_MASK) << BIAS_AT | shift << SHIFT_AT);
            }
            start += frequency;
        }
        encoder
    }
}

/// Encodes symbols into the end of `room`, in the order of decoding. Returns the final states and the position of the
/// first word.
pub(crate) fn encode(symbols: &[u8], encoder: &Encoder, room: &mut Vec<u8>) -> ([u32; LANES], usize) {
    encode_at(Level::best(), symbols, encoder, room)
}

fn encode_at(level: Level, symbols: &[u8], encoder: &Encoder, room: &mut Vec<u8>) -> ([u32; LANES], usize) {
    // Each symbol emits at most one word. Vector stores may begin up to one group earlier.
    room.resize(2 * (symbols.len() + LANES), 0);
    let mut at = room.len();
    let mut states = [LEAST; LANES];
    // rANS encodes in reverse order.
    let (groups, rest) = symbols.as_chunks::<LANES>();
    put(rest, encoder, &mut states, room, &mut at);
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        Level::Avx512 => unsafe { x86::encode(groups, encoder, &mut states, room, &mut at) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { avx2::encode(groups, encoder, &mut states, room, &mut at) },
        Level::Scalar => groups.iter().rev().for_each(|group| put(group, encoder, &mut states, room, &mut at)),
    }
    (states, at)
}

/// Encodes a group of symbols, or a part of one, without branches: they would be mispredicted too often.
#[inline(always)]
fn put(group: &[u8], encoder: &Encoder, states: &mut [u32; LANES], room: &mut [u8], at: &mut usize) {
    for (state, &symbol) in states.iter_mut().zip(group).rev() {
        let (reciprocal, other) = (encoder.reciprocals[usize::from(symbol)], encoder.others[usize::from(symbol)]);
        let frequency = other & FREQUENCY_MASK;
        let x = *state;
        let full = u32::from(x >= frequency << 19);
        if let Some(word) = room.get_mut(at.wrapping_sub(2)..*at) {
            word.copy_from_slice(&[x as u8, (x >> 8) as u8]);
        }
        *at = at.wrapping_sub(2 * full as usize);
        let x = x >> (16 * full);
        let quotient = ((u64::from(x) * u64::from(reciprocal)) >> 32) as u32 >> (other >> SHIFT_AT & 15);
        let bias = other >> BIAS_AT & BIAS_MASK;
        *state = x.wrapping_add(bias).wrapping_add(quotient.wrapping_mul(SCALE.wrapping_sub(frequency)));
    }
}

/// Decoding table.
#[derive(Debug, Clone)]
pub(crate) struct Decoder {
    /// Symbol, frequency - 1, and distance from the symbol's first slot, for each slot.
    slots: [u32; SCALE as usize],
    /// Symbol that owns nearly all slots, if there is one.
    most: Option<Most>,
}

#[derive(Debug, Clone, Copy)]
struct Most {
    symbol: u8,
    /// First slot and number of slots of the symbol.
    start: u32,
    frequency: u32,
}

impl Decoder {
    /// Builds the table from frequencies whose sum is [`SCALE`].
    pub(crate) fn new(frequencies: &[u16; 256]) -> Box<Self> {
        let mut decoder = Box::new(Self { slots: [0; SCALE as usize], most: None });
        let mut at = 0u32;
        for (symbol, &frequency) in (0u8..=255).zip(frequencies) {
            let frequency = u32::from(frequency);
            // At this frequency, seven of eight groups of eight symbols consist of this symbol alone.
            if frequency > SCALE - SCALE / 64 {
                decoder.most = Some(Most { symbol, start: at, frequency });
            }
            for i in 0..frequency {
                if let Some(slot) = decoder.slots.get_mut(at.wrapping_add(i) as usize) {
                    *slot = u32::from(symbol) | (frequency - 1) << 8 | i << 20;
                }
            }
            at = at.wrapping_add(frequency);
        }
        decoder
    }
}

/// Decodes into `out`. Returns false if words are missing or left over, or if a state does not end at the start state
/// of encoders.
pub(crate) fn decode(words: &[u8], states: [u32; LANES], decoder: &Decoder, out: &mut [u8]) -> bool {
    decode_at(Level::best(), words, states, decoder, out)
}

fn decode_at(level: Level, words: &[u8], mut states: [u32; LANES], decoder: &Decoder, out: &mut [u8]) -> bool {
    let words = words.as_chunks::<2>().0;
    let (groups, rest) = out.as_chunks_mut::<LANES>();
    let (mut done, mut at) = decode_groups(level, words, &mut states, decoder, groups);
    // Pad the last words with zeros, because a few words may encode many symbols. If padding is used, the check of the
    // end fails.
    let mut padded = [[0u8; 2]; 2 * LANES];
    padded.iter_mut().zip(words.get(at..).unwrap_or_default()).for_each(|(slot, word)| *slot = *word);
    let (more, taken) = decode_groups(level, &padded, &mut states, decoder, groups.get_mut(done..).unwrap_or_default());
    (done, at) = (done + more, at + taken);
    let mut enough = true;
    for group in groups.iter_mut().skip(done) {
        enough &= take(words, &mut at, &mut states, decoder, group);
    }
    enough &= take(words, &mut at, &mut states, decoder, rest);
    enough && at == words.len() && states.iter().all(|&state| state == LEAST)
}

/// Decodes groups with vectors, while there are words for all states. Returns the number of groups decoded and of words
/// used.
fn decode_groups(
    level: Level,
    words: &[[u8; 2]],
    states: &mut [u32; LANES],
    decoder: &Decoder,
    groups: &mut [[u8; LANES]],
) -> (usize, usize) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        Level::Avx512 => unsafe { x86::decode(words, states, decoder, groups) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { avx2::decode(words, states, decoder, groups) },
        Level::Scalar => (0, 0),
    }
}

/// Decodes a group, or a part of one. Returns false if words are missing.
#[inline(always)]
fn take(words: &[[u8; 2]], at: &mut usize, states: &mut [u32; LANES], decoder: &Decoder, group: &mut [u8]) -> bool {
    // Provide enough words for all states, so that the loop needs no checks and no branches.
    let mut buffer = [[0u8; 2]; LANES];
    let rest = words.get(*at..).unwrap_or_default();
    let next = match rest.first_chunk::<LANES>() {
        Some(next) => next,
        None => {
            buffer.iter_mut().zip(rest).for_each(|(slot, word)| *slot = *word);
            &buffer
        }
    };
    let mut taken = 0usize;
    for (state, out) in states.iter_mut().zip(group) {
        let slot = decoder.slots[(*state & (SCALE - 1)) as usize];
        *out = slot as u8;
        let frequency = (slot >> 8 & (SCALE - 1)) + 1;
        let x = frequency.wrapping_mul(*state >> SCALE_BITS).wrapping_add(slot >> 20);
        let few = u32::from(x < LEAST);
        let [low, high] = next[taken & (LANES - 1)];
        let word = u32::from(high) << 8 | u32::from(low);
        *state = x << (16 * few) | (word & few.wrapping_neg());
        taken = taken.wrapping_add(few as usize);
    }
    *at = at.wrapping_add(taken);
    taken <= rest.len()
}

#[cfg(target_arch = "x86_64")]
mod avx2;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BIAS_AT, BIAS_MASK, Decoder, Encoder, FREQUENCY_MASK, LANES, LEAST, Most, SCALE, SCALE_BITS, SHIFT_AT};

    /// Number of symbols in a short table.
    const SHORT: usize = 4 * LANES;

    /// Encodes all groups, last group first, with all states at once.
    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn encode(groups: &[[u8; LANES]], encoder: &Encoder, states: &mut [u32; LANES], room: &mut [u8], at: &mut usize) {
        let lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        // SAFETY: a load of 64 bytes from an array of 64.
        let mut x = unsafe { _mm512_loadu_si512(states.as_ptr().cast()) };
        // Most tables are short enough for registers, each of which holds 16 entries.
        let short = encoder.others[SHORT..].iter().all(|&other| other == 0);
        let registers = |table: &[u32; 256]| -> [__m512i; SHORT / LANES] {
            // SAFETY: loads of 16 entries each, of the first `SHORT` of 256.
            std::array::from_fn(|i| unsafe { _mm512_loadu_si512(table.as_ptr().add(LANES * i).cast()) })
        };
        let (reciprocals, others) = (registers(&encoder.reciprocals), registers(&encoder.others));
        let look_up = |table: &[__m512i; SHORT / LANES], symbols: __m512i, upper: __mmask16| {
            let low = _mm512_permutex2var_epi32(table[0], symbols, table[1]);
            let high = _mm512_permutex2var_epi32(table[2], symbols, table[3]);
            _mm512_mask_blend_epi32(upper, low, high)
        };
        for group in groups.iter().rev() {
            // SAFETY: a load of 16 bytes from an array of 16.
            let symbols = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(group.as_ptr().cast()) });
            let (reciprocal, other) = if short {
                let upper = _mm512_test_epi32_mask(symbols, _mm512_set1_epi32(SHORT as i32 / 2));
                (look_up(&reciprocals, symbols, upper), look_up(&others, symbols, upper))
            } else {
                // SAFETY: indices are below 256, and both tables have 256 entries.
                let from = |table: &[u32; 256]| unsafe { _mm512_i32gather_epi32::<4>(symbols, table.as_ptr().cast()) };
                (from(&encoder.reciprocals), from(&encoder.others))
            };
            let frequency = _mm512_and_si512(other, _mm512_set1_epi32(FREQUENCY_MASK as i32));
            let full = _mm512_cmpge_epu32_mask(x, _mm512_slli_epi32::<19>(frequency));
            let count = full.count_ones();
            // Move the words of full states to the upper lanes.
            let words = _mm512_maskz_compress_epi32(full, x);
            let words = _mm512_permutexvar_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(count as i32)), words);
            if let Some(place) = at.checked_sub(2 * LANES).and_then(|from| room.get_mut(from..*at)) {
                // SAFETY: a store of 32 bytes into so many.
                unsafe { _mm256_storeu_si256(place.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(words)) };
            }
            *at = at.wrapping_sub(2 * count as usize);
            x = _mm512_mask_srli_epi32::<16>(x, full, x);
            let even = _mm512_srli_epi64::<32>(_mm512_mul_epu32(x, reciprocal));
            let odd = _mm512_mul_epu32(_mm512_srli_epi64::<32>(x), _mm512_srli_epi64::<32>(reciprocal));
            let high = _mm512_mask_blend_epi32(0xaaaa, even, odd);
            let shift = _mm512_and_si512(_mm512_srli_epi32::<SHIFT_AT>(other), _mm512_set1_epi32(15));
            let bias = _mm512_and_si512(_mm512_srli_epi32::<BIAS_AT>(other), _mm512_set1_epi32(BIAS_MASK as i32));
            let complement = _mm512_sub_epi32(_mm512_set1_epi32(SCALE as i32), frequency);
            let product = _mm512_mullo_epi32(_mm512_srlv_epi32(high, shift), complement);
            x = _mm512_add_epi32(_mm512_add_epi32(x, bias), product);
        }
        // SAFETY: a store of 64 bytes into an array of 64.
        unsafe { _mm512_storeu_si512(states.as_mut_ptr().cast(), x) };
    }

    /// Decodes groups while there are words for all states. Returns the number of groups decoded and of words used.
    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn decode(words: &[[u8; 2]], states: &mut [u32; LANES], decoder: &Decoder, groups: &mut [[u8; LANES]]) -> (usize, usize) {
        let (low, high) = states.split_at_mut(LANES / 2);
        // SAFETY: loads of 32 bytes from 8 states each.
        let mut halves = unsafe { [_mm256_loadu_si256(low.as_ptr().cast()), _mm256_loadu_si256(high.as_ptr().cast())] };
        let (mut done, mut at) = (0, 0usize);
        // Without a dominant symbol, use one that has no slots.
        let most = decoder.most.unwrap_or(Most { symbol: 0, start: 0, frequency: 0 });
        for group in groups {
            if words.len().saturating_sub(at) < LANES {
                break;
            }
            for (half, out) in halves.iter_mut().zip(group.as_chunks_mut::<{ LANES / 2 }>().0) {
                let x = *half;
                let index = _mm256_and_si256(x, _mm256_set1_epi32(SCALE as i32 - 1));
                let upper = _mm256_srli_epi32::<{ SCALE_BITS as i32 }>(x);
                // Skip the table if all eight symbols are the dominant one.
                let from_start = _mm256_sub_epi32(index, _mm256_set1_epi32(most.start as i32));
                let x = if _mm256_cmplt_epu32_mask(from_start, _mm256_set1_epi32(most.frequency as i32)) == 0xff {
                    *out = [most.symbol; LANES / 2];
                    _mm256_add_epi32(_mm256_mullo_epi32(_mm256_set1_epi32(most.frequency as i32), upper), from_start)
                } else {
                    // SAFETY: indices are below `SCALE`, as many as the table has entries.
                    let slot = unsafe { _mm256_i32gather_epi32::<4>(decoder.slots.as_ptr().cast(), index) };
                    // SAFETY: a store of 8 bytes into an array of 8.
                    unsafe { _mm_storeu_si64(out.as_mut_ptr().cast(), _mm256_cvtepi32_epi8(slot)) };
                    let frequency = _mm256_and_si256(_mm256_srli_epi32::<8>(slot), _mm256_set1_epi32(SCALE as i32 - 1));
                    let frequency = _mm256_add_epi32(frequency, _mm256_set1_epi32(1));
                    _mm256_add_epi32(_mm256_mullo_epi32(frequency, upper), _mm256_srli_epi32::<20>(slot))
                };
                let few = _mm256_cmplt_epu32_mask(x, _mm256_set1_epi32(LEAST as i32));
                // SAFETY: 16 words were there for the group, of which the first half took 8 at most.
                let next = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(words.as_ptr().add(at).cast()) });
                let word = _mm256_maskz_expand_epi32(few, next);
                *half = _mm256_or_si256(_mm256_mask_slli_epi32::<16>(x, few, x), word);
                at = at.wrapping_add(few.count_ones() as usize);
            }
            done += 1;
        }
        // SAFETY: stores of 32 bytes into 8 states each.
        unsafe {
            _mm256_storeu_si256(low.as_mut_ptr().cast(), halves[0]);
            _mm256_storeu_si256(high.as_mut_ptr().cast(), halves[1]);
        }
        (done, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_writes_the_same_words_and_reads_them() {
        let mut state = 1u64;
        let mut noise = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32
        };
        // Frequencies of all sizes: one symbol nearly alone, halves, and least frequencies.
        for skew in [0, 1, 4, 12, 3000] {
            let mut frequencies = [0u16; 256];
            for _ in 0..SCALE {
                let symbol = (0..=skew).map(|_| noise() % 200).min().unwrap_or_default();
                frequencies[symbol as usize] += 1;
            }
            // One symbol nearly alone: a few words encode many symbols.
            if frequencies[0] > 4000 {
                frequencies[0] -= 3;
                frequencies[200] = 3;
            }
            let symbols: Vec<u8> = (0u8..=255).zip(frequencies).flat_map(|(symbol, count)| vec![symbol; usize::from(count)]).collect();
            let (encoder, decoder) = (Encoder::new(&frequencies), Decoder::new(&frequencies));
            for count in [0, 1, 15, 16, 17, 31, 33, 1000, 5003, 30_000] {
                let symbols: Vec<u8> = (0..count).map(|_| symbols[noise() as usize % symbols.len()]).collect();
                let mut room = Vec::new();
                let (states, start) = encode_at(Level::Scalar, &symbols, &encoder, &mut room);
                let words = &room[start..];
                for level in Level::available() {
                    let mut other = vec![7; 10];
                    let (their_states, start) = encode_at(level, &symbols, &encoder, &mut other);
                    assert!(their_states == states && other[start..] == *words, "{level:?}, {count} symbols");
                    let mut out = vec![0xaa; count];
                    assert!(decode_at(level, words, states, &decoder, &mut out), "{level:?}, {count} symbols");
                    assert!(out == symbols, "{level:?}, {count} symbols");
                    assert!(!decode_at(level, &[words, &[0, 0]].concat(), states, &decoder, &mut out), "a word too many");
                    if let Some((_, fewer)) = words.split_first_chunk::<2>() {
                        assert!(!decode_at(level, fewer, states, &decoder, &mut out), "a word too few");
                    }
                }
            }
        }
    }
}
