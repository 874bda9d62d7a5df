//! Huffman streams: codes of at most 11 bits, least significant bit first, several streams per block.
//!
//! One look-up of 11 bits yields all whole symbols in them. The decoder interleaves the streams: it does one look-up in
//! each, five times, then refills all. So the processor overlaps the look-ups.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod encode;

use super::Level;
pub use encode::{encode, room_for};

/// Length of the longest code.
pub const MAX_BITS: u32 = 11;
/// Number of streams in a block.
pub const STREAMS: usize = 4;

/// Code and length of each symbol, in the form of vector look-ups.
#[derive(Debug, Clone)]
pub struct Codes {
    /// Low 8 bits of each code.
    pub low: [u8; 256],
    /// Remaining bits of each code.
    pub high: [u8; 256],
    /// Length of each code in bits; 0 for a symbol without a code.
    pub length: [u8; 256],
}

/// Decoding table of a code.
#[derive(Debug, Clone)]
pub struct Table {
    /// Entry of each window of 11 bits, from the lowest bits: the number of bits of its whole symbols (8 bits), up to 6
    /// symbols (48 bits), and the number of symbols (8 bits).
    many: Box<[u64; 1 << MAX_BITS]>,
    /// Length of each symbol's code in bits.
    length: [u8; 256],
}

impl Table {
    /// Builds the table of a complete code.
    pub fn new(codes: &Codes) -> Self {
        let mut many = Box::new([0u64; 1 << MAX_BITS]);
        fill_entries(&codes.length, &mut many);
        Self { many, length: codes.length }
    }

    /// Symbol and length of the first code in a window.
    fn first(&self, window: usize) -> (u8, u8) {
        let symbol = (self.many[window] >> 8) as u8;
        (symbol, self.length[usize::from(symbol)])
    }
}

super::for_every_level! {
    /// Fills in the entries of all windows of a complete code.
    fn fill_entries / fill_entries_at(lengths: &[u8; 256], out: &mut [u64; 1 << MAX_BITS]) = fill_entries_any;
}

/// The entry of a window is its first symbol, followed by the entry of the remaining bits. So entries of shorter windows
/// are built first.
#[inline(always)]
fn fill_entries_any(lengths: &[u8; 256], out: &mut [u64; 1 << MAX_BITS]) {
    // Symbols by length, which is the order of their codes, and the position of the first symbol of each length.
    let mut counts = [0u16; 256];
    lengths.iter().for_each(|&length| counts[usize::from(length)] = counts[usize::from(length)].wrapping_add(1));
    let mut starts = [0usize; MAX_BITS as usize + 2];
    for length in 1..=MAX_BITS as usize {
        starts[length + 1] = starts[length].wrapping_add(usize::from(counts[length]));
    }
    let mut symbols = [0u8; 256];
    let mut next = starts;
    for (symbol, &length) in (0..=255u8).zip(lengths).filter(|(_, length)| **length > 0) {
        let slot = &mut next[usize::from(length)];
        symbols[*slot] = symbol;
        *slot = slot.wrapping_add(1);
    }
    // Bit n is set if entries of windows of n bits are needed.
    let mut needed = 1u32 << MAX_BITS;
    for bits in (1..=MAX_BITS).rev() {
        let is_needed = needed >> bits & 1;
        let used = (1..=bits).filter(|&length| counts[length as usize] > 0);
        needed |= used.fold(0, |rests, length| rests | is_needed << (bits - length));
    }
    // Entries of windows of n bits begin at 2^n. The first bit of a window is the top bit of its index here, so windows
    // that begin with one code lie side by side. A window without a whole symbol has the entry 0.
    let mut entries = [0u64; 2 << MAX_BITS];
    for bits in (1..=MAX_BITS).filter(|bits| needed >> bits & 1 != 0) {
        let (before, here) = entries.split_at_mut(1 << bits);
        let mut here = &mut here[..1 << bits];
        for length in (1..=bits).filter(|&length| counts[length as usize] > 0) {
            let rest = 1 << (bits - length);
            let after = &before[rest..2 * rest];
            let symbols = &symbols[starts[length as usize]..starts[length as usize + 1]];
            let (own, others) = here.split_at_mut(symbols.len().wrapping_mul(rest));
            for (own, &symbol) in own.chunks_exact_mut(rest).zip(symbols) {
                if counts[1] > 0 {
                    own.iter_mut().zip(after).for_each(|(slot, &after)| *slot = prepend_to_many(symbol, length, after, lengths));
                } else {
                    own.iter_mut().zip(after).for_each(|(slot, &after)| *slot = prepend(symbol, length, after));
                }
            }
            here = others;
        }
    }
    // In a stream, the first bit is the lowest one.
    // Reversals of so many low bits are kept in a table.
    const LOW: u32 = 5;
    let reversed = |value: usize, bits: u32| value.reverse_bits() >> (usize::BITS - bits);
    let by_low: [usize; 1 << LOW] = std::array::from_fn(|low| reversed(low, LOW) << (MAX_BITS - LOW));
    let last = &entries[1 << MAX_BITS..];
    for (high, slots) in out.chunks_exact_mut(1 << LOW).enumerate() {
        let last = &last[reversed(high, MAX_BITS - LOW)..];
        for (slot, low) in slots.iter_mut().zip(by_low) {
            *slot = last[low];
        }
    }
}

/// Returns the entry of a symbol of `length` bits, followed by the symbols of another entry, which must have room for one
/// more.
#[inline(always)]
fn prepend(symbol: u8, length: u32, after: u64) -> u64 {
    let symbols = (after & 0x0000_ffff_ffff_ff00) << 8 | u64::from(symbol) << 8;
    (after & (0xff << 56 | 0xff)).wrapping_add(1 << 56 | u64::from(length)) | symbols
}

/// Like [`prepend`]. Of a full entry, the last symbol is dropped.
#[inline(always)]
fn prepend_to_many(symbol: u8, length: u32, after: u64, lengths: &[u8; 256]) -> u64 {
    const MOST_SYMBOLS: u64 = 6;
    let is_full = u64::from(after >> 56 == MOST_SYMBOLS).wrapping_neg();
    let last = 1 << 56 | u64::from(lengths[usize::from((after >> 48) as u8)]);
    prepend(symbol, length, after.wrapping_sub(last & is_full))
}

/// Position of a reader in one stream.
#[derive(Debug, Clone, Copy, Default)]
struct Reader {
    /// Byte in `streams` of the next bit, and the number of used bits in that byte (below 8).
    at: usize,
    used: u32,
    out: usize,
    end: usize,
}

/// Number of look-ups between refills.
const BURST: usize = 5;
/// Greatest number of bytes that a burst writes, including its last store.
const BURST_OUT: usize = 6 * (BURST - 1) + 8;

/// Decodes [`STREAMS`] consecutive streams of `sizes` bytes. Each stream fills `step` bytes of `out`; the last stream
/// fills the rest. Returns false if a stream does not end with its last symbol and zero bits.
pub fn decode(streams: &[u8], sizes: &[usize; STREAMS], table: &Table, step: usize, out: &mut [u8]) -> bool {
    decode_at(Level::best(), streams, sizes, table, step, out)
}

fn decode_at(level: Level, streams: &[u8], sizes: &[usize; STREAMS], table: &Table, step: usize, out: &mut [u8]) -> bool {
    let mut readers = [Reader::default(); STREAMS];
    let mut at = 0;
    let mut from = 0;
    for (reader, size) in readers.iter_mut().zip(sizes) {
        let end = (from + step).min(out.len());
        *reader = Reader { at, used: 0, out: from, end };
        at += size;
        from = end;
    }
    if at != streams.len() || from != out.len() {
        return false;
    }
    bursts(level, streams, table, &mut readers, out);
    // Continue each stream alone, because streams end after different numbers of bursts.
    readers.iter_mut().for_each(|reader| bursts(level, streams, table, std::array::from_mut(reader), out));
    let mut end = 0;
    readers.iter_mut().zip(sizes).all(|(reader, size)| {
        let start = end;
        end += size;
        finish(streams, start, end, table, reader, out)
    })
}

/// Decodes all streams in turn, while every stream has room for a burst.
fn bursts<const N: usize>(level: Level, streams: &[u8], table: &Table, readers: &mut [Reader; N], out: &mut [u8]) {
    // This function is not compiled for vectors. The compiler would merge four parallel streams into gathers, which
    // take twice the time.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "bmi1,bmi2,lzcnt")]
    fn bmi2<const N: usize>(streams: &[u8], table: &Table, readers: &mut [Reader; N], out: &mut [u8]) {
        bursts_any(streams, table, readers, out);
    }
    match level {
        Level::Scalar => bursts_any(streams, table, readers, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        _ => unsafe { bmi2(streams, table, readers, out) },
    }
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, clippy::host_endian_bytes, reason = "a kernel: the order of the stream and of the table's symbols")]
fn bursts_any<const N: usize>(streams: &[u8], table: &Table, readers: &mut [Reader; N], out: &mut [u8]) {
    // A sentinel bit marks the end of the word. Its position counts the used bits.
    const SENTINEL: u64 = 1 << 63;
    let table: &[u64; 1 << MAX_BITS] = &table.many;
    let mut local = *readers;
    loop {
        // A burst uses 55 bits, after up to 7 used bits. So it reads 8 bytes and advances by at most 7.
        let rounds = |reader: &Reader| {
            let room = reader.end.saturating_sub(reader.out) / BURST_OUT;
            room.min(streams.len().saturating_sub(reader.at) / 8)
        };
        let rounds = local.iter().map(rounds).min().unwrap_or(0);
        if rounds == 0 {
            break;
        }
        for _ in 0..rounds {
            let mut bits: [u64; N] = std::array::from_fn(|i| {
                // SAFETY: each of the rounds moves `at` by 7 bytes at most, and there were 8 times as many bytes as rounds.
                let word = u64::from_le(unsafe { streams.as_ptr().add(local[i].at).cast::<u64>().read_unaligned() });
                (word | SENTINEL) >> (local[i].used & 7)
            });
            for _ in 0..BURST {
                for (reader, bits) in local.iter_mut().zip(&mut bits) {
                    let entry = table[(*bits & ((1 << MAX_BITS) - 1)) as usize];
                    // SAFETY: a look-up writes 8 bytes and advances by 6 at most, so five stay within BURST_OUT bytes from
                    // `reader.out`; there is room for that in every round before `end`, and `end` is within `out`.
                    unsafe { out.as_mut_ptr().add(reader.out).cast::<[u8; 8]>().write_unaligned((entry >> 8).to_le_bytes()) };
                    *bits >>= entry & 63;
                    reader.out = reader.out.wrapping_add((entry >> 56) as usize);
                }
            }
            for (reader, bits) in local.iter_mut().zip(bits) {
                let gone = bits.leading_zeros();
                reader.at = reader.at.wrapping_add((gone >> 3) as usize);
                reader.used = gone & 7;
            }
        }
    }
    *readers = local;
}

/// Decodes the rest of one stream symbol by symbol, and checks the end of the stream.
fn finish(streams: &[u8], start: usize, end: usize, table: &Table, reader: &mut Reader, out: &mut [u8]) -> bool {
    let mut position = 8 * (reader.at - start) + reader.used as usize;
    let stream = &streams[start..end];
    let window = |position: usize| {
        let byte = |i: usize| stream.get(position / 8 + i).copied().map_or(0, usize::from);
        ((byte(0) | byte(1) << 8 | byte(2) << 16) >> (position % 8)) & ((1 << MAX_BITS) - 1)
    };
    for slot in &mut out[reader.out..reader.end] {
        let (symbol, length) = table.first(window(position));
        *slot = symbol;
        position += usize::from(length);
    }
    let rest = if position.is_multiple_of(8) { 0 } else { stream.get(position / 8).map_or(0, |last| last >> (position % 8)) };
    position.div_ceil(8) == stream.len() && rest == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A complete code with the given lengths, in ascending order. Longer codes may have lower symbols.
    fn codes_of(lengths: &[u8]) -> Codes {
        let mut codes = Codes { low: [0; 256], high: [0; 256], length: [0; 256] };
        let mut next = 0u32;
        for (i, &length) in lengths.iter().enumerate() {
            let code = (next >> (MAX_BITS - u32::from(length))).reverse_bits() >> (32 - u32::from(length));
            next += 1 << (MAX_BITS - u32::from(length));
            // Symbols of one length ascend, as in stored codes.
            let alike = lengths.iter().filter(|other| **other == length).count();
            let nth = lengths[..i].iter().filter(|other| **other == length).count();
            let symbol = if alike == 256 { i } else { usize::from(length) + 12 * nth };
            assert_eq!(codes.length[symbol], 0);
            (codes.low[symbol], codes.high[symbol], codes.length[symbol]) = (code as u8, (code >> 8) as u8, length);
        }
        assert_eq!(next, 1 << MAX_BITS, "the code is complete");
        codes
    }

    #[test]
    fn each_entry_has_the_whole_symbols_of_its_window() {
        let chain: Vec<u8> = (1..=11).chain([11]).collect();
        let even = [8; 256];
        let mixed = [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 10, 10];
        for lengths in [&[1, 1][..], &[1, 2, 2], &chain, &even, &mixed] {
            let codes = codes_of(lengths);
            let table = Table::new(&codes);
            for level in Level::available() {
                let mut many = [0; 1 << MAX_BITS];
                fill_entries_at(level, &codes.length, &mut many);
                assert!(many == *table.many, "{level:?}, {lengths:?}");
            }
            let starts = |window: usize, left: u32, i: usize| {
                let length = u32::from(codes.length[i]);
                let code = usize::from(codes.low[i]) | usize::from(codes.high[i]) << 8;
                length > 0 && length <= left && window & ((1 << length) - 1) == code
            };
            for window in 0..1usize << MAX_BITS {
                let mut bits = 0;
                let mut found = vec![];
                while found.len() < 6
                    && let Some(symbol) = (0..256).find(|&i| starts(window >> bits, MAX_BITS - bits, i))
                {
                    bits += u32::from(codes.length[symbol]);
                    found.push(symbol as u8);
                }
                let symbols = found.iter().rev().fold(0, |symbols, &symbol| symbols << 8 | u64::from(symbol));
                let expected = u64::from(bits) | symbols << 8 | (found.len() as u64) << 56;
                assert_eq!(table.many[window], expected, "{lengths:?}, window {window:011b}");
                assert_eq!(table.first(window), (found[0], codes.length[usize::from(found[0])]));
            }
        }
    }

    #[test]
    fn every_level_decodes_streams_of_any_sizes() {
        let chain: Vec<u8> = (1..=11).chain([11]).collect();
        let codes = codes_of(&chain);
        let table = Table::new(&codes);
        let of_length = |length| (0..=255u8).find(|&symbol| codes.length[usize::from(symbol)] == length).unwrap();
        let all: Vec<u8> = (0..=255u8).filter(|&symbol| codes.length[usize::from(symbol)] > 0).collect();
        for count in [4usize, 7, 100, 1000, 20_001] {
            let step = count.div_ceil(STREAMS);
            let symbols: Vec<u8> = (0..count)
                .map(|i| match i / step {
                    0 => of_length(1),
                    1 => of_length(11),
                    _ => all[i * i % all.len()],
                })
                .collect();
            let mut streams = vec![];
            let mut sizes = [0; STREAMS];
            for (part, size) in symbols.chunks(step).zip(&mut sizes) {
                let mut room = vec![0; room_for(part.len())];
                *size = encode(part, &codes, &mut room).unwrap();
                streams.extend(&room[..*size]);
            }
            for level in Level::available() {
                let mut out = vec![0; count];
                assert!(decode_at(level, &streams, &sizes, &table, step, &mut out), "{level:?}, {count} symbols");
                assert!(out == symbols, "{level:?}, {count} symbols");
                let mut moved = sizes;
                (moved[0], moved[1]) = (moved[0] + 1, moved[1] - 1);
                assert!(!decode_at(level, &streams, &moved, &table, step, &mut out), "{level:?}, {count} symbols");
            }
        }
    }
}
