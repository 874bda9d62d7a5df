//! Canonical Huffman codes of at most 11 bits, four streams per block. Spec: spec/entropy.md 5.

use tensorcask_kernels::huffman::{self as kernel, MAX_BITS, STREAMS};
use tensorcask_kernels::spare::Spare;

use super::histogram::Histogram;
use super::table::{Input, span};
use crate::{Error, Result};

/// Code length of each symbol; 0 if the symbol does not occur.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Lengths([u8; 256]);

impl Lengths {
    /// Computes near-optimal lengths for a histogram of at least two symbols.
    pub(super) fn new(histogram: &Histogram) -> Self {
        let mut symbols: Vec<(u32, u8)> = (0..=255u8).zip(histogram).filter(|(_, n)| **n > 0).map(|(s, n)| (*n, s)).collect();
        symbols.sort_unstable();
        let mut lengths = [0u8; 256];
        // Two-queue construction: leaves are sorted, and inner nodes are created in ascending order.
        let leaves = symbols.len();
        let mut weights: Vec<u64> = symbols.iter().map(|(n, _)| u64::from(*n)).collect();
        let mut parents = vec![0usize; (2 * leaves).saturating_sub(1)];
        let mut leaf = 0;
        let mut inner = leaves;
        for node in leaves..(2 * leaves).saturating_sub(1) {
            let mut sum = 0;
            for _ in 0..2 {
                let pick = if leaf < leaves && (inner >= node || weights[leaf] <= weights[inner]) { &mut leaf } else { &mut inner };
                sum += weights[*pick];
                parents[*pick] = node;
                *pick += 1;
            }
            weights.push(sum);
        }
        let mut depths = vec![0u32; parents.len()];
        for node in (0..parents.len().saturating_sub(1)).rev() {
            depths[node] = depths[parents[node]] + 1;
        }
        for ((_, symbol), depth) in symbols.iter().zip(&depths) {
            lengths[usize::from(*symbol)] = (*depth).clamp(1, MAX_BITS) as u8;
        }
        // The clamp to 11 bits may exceed the code space. Lengthen the rarest symbols until the code fits, then give
        // the remaining space to the most frequent symbols.
        let unit = |length: u8| 1i32 << (MAX_BITS - u32::from(length));
        let mut left = (1i32 << MAX_BITS) - symbols.iter().map(|(_, s)| unit(lengths[usize::from(*s)])).sum::<i32>();
        while left < 0 {
            for (_, symbol) in &symbols {
                let length = &mut lengths[usize::from(*symbol)];
                if left < 0 && u32::from(*length) < MAX_BITS {
                    left += unit(*length) - unit(*length + 1);
                    *length += 1;
                }
            }
        }
        while left > 0 {
            for (_, symbol) in symbols.iter().rev() {
                let length = &mut lengths[usize::from(*symbol)];
                if *length > 1 && unit(*length) <= left {
                    left -= unit(*length);
                    *length -= 1;
                }
            }
        }
        Self(lengths)
    }

    /// Returns the encoded bits of a histogram's symbols, or `None` if a symbol has no code.
    pub(super) fn bits(&self, histogram: &Histogram) -> Option<u64> {
        let mut bits = 0;
        for (&count, &length) in histogram.iter().zip(&self.0) {
            if count > 0 && length == 0 {
                return None;
            }
            bits += u64::from(count) * u64::from(length);
        }
        Some(bits)
    }

    /// Returns the size of the stored table in bytes.
    pub(super) fn table_bytes(&self) -> u64 {
        span(|s| self.0[s] > 0).map_or(0, |(first, last)| 2 + (last - first + 1).div_ceil(2) as u64)
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        let Some((first, last)) = span(|s| self.0[s] > 0) else { return };
        out.extend([first as u8, last as u8]);
        out.extend(self.0[first..=last].chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 4)));
    }

    pub(super) fn get(input: &mut Input<'_>) -> Result<Self> {
        let bad = |message: &str| Err(Error::corrupt(message).clause("entropy 5.1"));
        let first = usize::from(input.byte("a table")?);
        let last = usize::from(input.byte("a table")?);
        if last <= first {
            return bad("a Huffman table of fewer than two symbols");
        }
        let mut lengths = [0u8; 256];
        let nibbles = input.take((last - first + 1).div_ceil(2), "a table")?;
        for (i, byte) in nibbles.iter().enumerate() {
            for (at, length) in [(first + 2 * i, byte & 15), (first + 2 * i + 1, byte >> 4)] {
                match lengths.get_mut(at).filter(|_| at <= last) {
                    Some(slot) => *slot = length,
                    None if length == 0 => {}
                    None => return bad("the unused half of a table's last byte is not zero"),
                }
            }
        }
        if lengths[first] == 0 || lengths[last] == 0 {
            return bad("a Huffman table begins or ends with a symbol that has no code");
        }
        if lengths.iter().any(|&length| u32::from(length) > MAX_BITS) {
            return bad("a Huffman code is longer than 11 bits");
        }
        let used: u32 = lengths.iter().filter(|&&length| length > 0).map(|&length| 1 << (MAX_BITS - u32::from(length))).sum();
        if used != 1 << MAX_BITS {
            return bad("the lengths of a Huffman table do not make a complete code");
        }
        Ok(Self(lengths))
    }

    /// Returns the code (least significant bit first) and length of each symbol.
    pub(super) fn codes(&self) -> kernel::Codes {
        let mut counts = [0u16; 256];
        self.0.iter().for_each(|&length| counts[usize::from(length)] += 1);
        let mut next = [0u16; MAX_BITS as usize + 2];
        for length in 1..=MAX_BITS as usize {
            next[length + 1] = next[length].wrapping_add(counts[length]) << 1;
        }
        let mut codes = kernel::Codes { low: [0; 256], high: [0; 256], length: self.0 };
        for (symbol, &length) in self.0.iter().enumerate().filter(|(_, l)| **l > 0) {
            let slot = &mut next[usize::from(length)];
            let code = slot.reverse_bits() >> (16 - u32::from(length));
            *slot = slot.wrapping_add(1);
            codes.low[symbol] = code as u8;
            codes.high[symbol] = (code >> 8) as u8;
        }
        codes
    }
}

/// Returns the number of symbols in each stream but the last, for a block of `count` symbols.
fn segment(count: usize) -> usize {
    count.div_ceil(STREAMS)
}

/// Appends the streams of a block. Returns false if a symbol has no code, or without memory; the appended bytes are then
/// invalid.
#[must_use]
pub(super) fn encode(symbols: &[u8], codes: &kernel::Codes, out: &mut Vec<u8>) -> bool {
    let length = segment(symbols.len()).max(1);
    let Ok(mut room) = Spare::new(kernel::room_for(length), "a Huffman stream") else { return false };
    let sizes_at = out.len();
    out.extend([0; 4 * STREAMS]);
    let mut parts = symbols.chunks(length);
    for stream in 0..STREAMS {
        let Some(bytes) = kernel::encode(parts.next().unwrap_or_default(), codes, &mut room) else { return false };
        out.extend_from_slice(&room[..bytes]);
        for i in 0..4 {
            out[sizes_at + 4 * stream + i] = (bytes >> (8 * i)) as u8;
        }
    }
    true
}

/// Bytes that [`encode`] adds to the streams: their sizes and their partial last bytes.
pub(super) const OVERHEAD: u64 = 4 * STREAMS as u64 + STREAMS as u64;

pub(super) fn decode(input: &mut Input<'_>, table: &kernel::Table, out: &mut [u8]) -> Result<()> {
    let mut sizes = [0usize; STREAMS];
    for size in &mut sizes {
        *size = input.u32("the sizes of streams")? as usize;
    }
    let total = sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size));
    let streams = input.take(total.unwrap_or(usize::MAX), "Huffman streams")?;
    let step = segment(out.len());
    if kernel::decode(streams, &sizes, table, step, out) {
        return Ok(());
    }
    Err(Error::corrupt("a Huffman stream does not end where it should").clause("entropy 5.3"))
}

/// Builds the decoding table of a code.
pub(super) fn decode_table(lengths: &Lengths) -> kernel::Table {
    kernel::Table::new(&lengths.codes())
}
