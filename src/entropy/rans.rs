//! Range asymmetric numeral systems (Duda), 16 interleaved states. Spec: spec/entropy.md 7.

use super::histogram::Histogram;
use super::table::{Input, put_u32, span};
use crate::kernels::rans::{self as kernel, LANES, SCALE, SCALE_BITS};
use crate::{Error, Result};

/// Frequency of each symbol. The sum is [`SCALE`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frequencies([u16; 256]);

impl Frequencies {
    /// Scales a histogram of at least two symbols. A symbol that occurs gets a frequency of at least 1.
    pub(super) fn new(histogram: &Histogram) -> Self {
        let total: u64 = histogram.iter().map(|&n| u64::from(n)).sum::<u64>().max(1);
        let mut frequencies = [0u16; 256];
        for (slot, &count) in frequencies.iter_mut().zip(histogram) {
            if count > 0 {
                *slot = ((u64::from(count) * u64::from(SCALE) + total / 2) / total).clamp(1, u64::from(SCALE) - 1) as u16;
            }
        }
        let mut sum: i32 = frequencies.iter().map(|&f| i32::from(f)).sum();
        while sum != SCALE as i32 {
            // The most frequent symbol absorbs the rounding error, at the least loss.
            let Some(most) = frequencies.iter_mut().max_by_key(|f| **f) else { break };
            let change = (SCALE as i32 - sum).max(1 - i32::from(*most) / 2 - 1).clamp(-(i32::from(*most) - 1).max(0), SCALE as i32 - 1);
            *most = (i32::from(*most) + change) as u16;
            sum += change;
            if change == 0 {
                break;
            }
        }
        Self(frequencies)
    }

    /// Returns whether every symbol of a histogram has a frequency.
    pub(super) fn covers(&self, histogram: &Histogram) -> bool {
        histogram.iter().zip(&self.0).all(|(&count, &frequency)| count == 0 || frequency > 0)
    }

    pub(super) fn table_bytes(&self) -> u64 {
        let varint = |f: u16| if f < 128 { 1 } else { 2 };
        span(|s| self.0[s] > 0).map_or(0, |(first, last)| 2 + self.0[first..=last].iter().map(|&f| varint(f)).sum::<u64>())
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        let Some((first, last)) = span(|s| self.0[s] > 0) else { return };
        out.extend([first as u8, last as u8]);
        for &frequency in &self.0[first..=last] {
            if frequency < 128 {
                out.push(frequency as u8);
            } else {
                out.extend([(frequency & 127) as u8 | 128, (frequency >> 7) as u8]);
            }
        }
    }

    pub(super) fn get(input: &mut Input<'_>) -> Result<Self> {
        let bad = |message: &str| Err(Error::corrupt(message).clause("entropy 7.1"));
        let (first, last) = (usize::from(input.byte("a table")?), usize::from(input.byte("a table")?));
        if last <= first {
            return bad("a rANS table of fewer than two symbols");
        }
        let mut frequencies = [0u16; 256];
        for slot in &mut frequencies[first..=last] {
            let low = input.byte("a table")?;
            *slot = u16::from(low & 127);
            if low >= 128 {
                let high = input.byte("a table")?;
                if high == 0 || high >= 128 {
                    return bad("a frequency is not in its shortest form");
                }
                *slot |= u16::from(high) << 7;
            }
        }
        if frequencies[first] == 0 || frequencies[last] == 0 {
            return bad("a rANS table begins or ends with a symbol of frequency 0");
        }
        if frequencies.iter().map(|&f| u32::from(f)).sum::<u32>() != SCALE {
            return bad("the frequencies of a rANS table do not add up to 4096");
        }
        Ok(Self(frequencies))
    }

    pub(super) fn encoder(&self) -> Box<kernel::Encoder> {
        kernel::Encoder::new(&self.0)
    }

    pub(super) fn decoder(&self) -> Box<kernel::Decoder> {
        kernel::Decoder::new(&self.0)
    }
}

/// Bytes of the states and of the size field.
pub(super) const OVERHEAD: u64 = 4 * LANES as u64 + 4 + 2;

/// Estimates the encoded bits with these frequencies: the entropy, and the rounding loss of the rarest symbols.
pub(super) fn bits(frequencies: &Frequencies, histogram: &Histogram) -> u64 {
    let mut scaled = 0u64;
    for (&count, &frequency) in histogram.iter().zip(&frequencies.0).filter(|(n, _)| **n > 0) {
        scaled += u64::from(count) * u64::from(super::histogram::log2_ratio(SCALE_BITS, u32::from(frequency)));
    }
    scaled >> 16
}

pub(super) fn encode(symbols: &[u8], encoder: &kernel::Encoder, room: &mut Vec<u8>, out: &mut Vec<u8>) {
    let (states, start) = kernel::encode(symbols, encoder, room);
    let words = room.get(start..).unwrap_or_default();
    put_u32(out, words.len() as u32);
    for state in states {
        put_u32(out, state);
    }
    out.extend_from_slice(words);
}

pub(super) fn decode(input: &mut Input<'_>, decoder: &kernel::Decoder, out: &mut [u8]) -> Result<()> {
    let bad = |message: &str| Err(Error::corrupt(message).clause("entropy 7.3"));
    let bytes = input.u32("the size of the words")? as usize;
    let mut states = [0u32; LANES];
    for state in &mut states {
        *state = input.u32("a state")?;
        if !kernel::is_state(*state) {
            return bad("a rANS state is out of range");
        }
    }
    if !bytes.is_multiple_of(2) {
        return bad("the words end with half a word");
    }
    let words = input.take(bytes, "rANS words")?;
    if kernel::decode(words, states, decoder, out) { Ok(()) } else { bad("a rANS stream does not end where it should") }
}
