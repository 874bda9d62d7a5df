//! A plane: blocks, each stored by the coder that takes the fewest bytes. Spec: spec/entropy.md 1 to 3.

use tensorcask_kernels::spare::{self, MaybeSpare, Spare};
use tensorcask_kernels::{huffman as huffman_kernel, mask, split as split_kernel};

use super::histogram::{Histogram, count, entropy_bits};
use super::huffman::{self, Lengths};
use super::runs;
use super::table::Input;
use crate::{Error, Result};

pub(super) const RAW: u8 = 0;
const CONSTANT: u8 = 1;
const RUNS: u8 = 2;
const HUFFMAN: u8 = 3;
const HUFFMAN_AGAIN: u8 = 4;
const SPLIT: u8 = 5;

/// Greatest number of blocks that a block may lie in.
const MAX_DEPTH: u8 = 8;

/// Base-2 logarithm of the block length: the value of writers, and the range that readers accept.
pub(super) const BLOCK_EXPONENT: u8 = 16;
pub(super) const BLOCK_EXPONENTS: std::ops::RangeInclusive<u8> = 12..=20;

/// Bytes before the symbols of a plane that is one raw block.
pub(super) const RAW_HEADER: usize = 2;

/// Greatest number of bytes that `symbols` symbols can take.
pub(crate) fn max_encoded_bytes(symbols: u64) -> u64 {
    symbols.saturating_add(2 + symbols.div_ceil(1 << BLOCK_EXPONENT))
}

/// Number of sampled symbols in the check for noise.
const SAMPLE: usize = 4096;

/// Returns whether a sample shows that no coder will save bytes.
pub(super) fn is_noise(symbols: &[u8]) -> bool {
    if symbols.len() < 4 * SAMPLE {
        return false;
    }
    const STRETCH: usize = SAMPLE / 4;
    // Equal distances would hit the same symbols again and again where rows repeat.
    let step = symbols.len() / 4 + STRETCH;
    let mut histogram = [0u32; 256];
    for start in (0..4).map(|at| (at * step).min(symbols.len() - STRETCH)) {
        for (slot, n) in histogram.iter_mut().zip(count(symbols.get(start..start + STRETCH).unwrap_or_default())) {
            *slot += n;
        }
    }
    // A sample of 4096 symbols from 256 equally likely ones has about 7.955 bits of entropy per symbol.
    entropy_bits(&histogram) * 1000 > 7880 * SAMPLE as u64
}

/// Estimates the bytes of a plane of `symbols` symbols from the histogram of a sample, without tables.
pub(crate) fn estimate(histogram: &Histogram, symbols: u64) -> u64 {
    let sampled: u64 = histogram.iter().map(|&n| u64::from(n)).sum::<u64>().max(1);
    let bits = entropy_bits(histogram);
    if bits * 1000 > 7880 * sampled {
        return symbols;
    }
    (bits * 1013 / 1000).saturating_mul(symbols) / sampled / 8 + 64
}

/// A code, prepared for the encoder.
struct PreparedCode {
    table: Lengths,
    encoder: huffman_kernel::Codes,
}

/// Coder of one block.
enum Choice {
    Raw,
    Constant,
    Runs,
    /// The shared code.
    Shared,
    /// A code for this block alone.
    Own(Box<Lengths>),
}

/// Encodes `symbols` as a column.
pub(crate) fn coded(symbols: &[u8]) -> Vec<u8> {
    let mut code = spare::output(symbols.len() + 64);
    encode(symbols, &mut code);
    code
}

/// Appends the encoded `symbols`.
pub(crate) fn encode(symbols: &[u8], out: &mut Vec<u8>) {
    if symbols.is_empty() {
        return;
    }
    encode_blocks(symbols, out);
}

/// Appends one or more symbols, in blocks of the usual length.
pub(super) fn encode_blocks(symbols: &[u8], out: &mut Vec<u8>) {
    let exponent_at = out.len();
    out.push(BLOCK_EXPONENT);
    let blocks = || symbols.chunks(1 << BLOCK_EXPONENT);
    if is_noise(symbols) {
        for block in blocks() {
            out.push(RAW);
            out.extend_from_slice(block);
        }
        return;
    }
    if let Some((mut writer, histograms)) = Writer::by_sample(symbols) {
        for (block, sampled) in blocks().zip(&histograms) {
            if !writer.put_shared(block, sampled, out) {
                writer.put_best(block, &count(block), out);
            }
        }
        return;
    }
    let histograms: Vec<Histogram> = blocks().map(count).collect();
    let total = sum(&histograms);
    let mut writer = Writer { is_alone: histograms.len() == 1, ..Writer::new(&total, 0) };
    let exponent = symbols.len().next_power_of_two().trailing_zeros() as u8;
    if histograms.len() > 1 && BLOCK_EXPONENTS.contains(&exponent) && writer.is_skewed(&total) {
        // The tables of the parts of a split block are its own, so one block is better than several.
        out[exponent_at] = exponent;
        writer.is_alone = true;
        writer.put_best(symbols, &total, out);
        return;
    }
    for (block, histogram) in blocks().zip(&histograms) {
        writer.put_best(block, histogram, out);
    }
}

fn sum(histograms: &[Histogram]) -> Histogram {
    let mut total = [0u32; 256];
    for histogram in histograms {
        for (sum, n) in total.iter_mut().zip(histogram) {
            *sum += n;
        }
    }
    total
}

/// State that passes from block to block.
#[derive(Default)]
struct Writer {
    /// Code shared by all blocks.
    shared: Option<Lengths>,
    /// Code written last.
    huffman: Option<PreparedCode>,
    /// Number of blocks that the blocks lie in.
    depth: u8,
    /// Whether there is only one block. The shared code is then made for it, so no other code is tried.
    is_alone: bool,
}

/// Sampled counts include one in this many symbols.
const SAMPLED: usize = 16;
/// Length of a sampled stretch: whole cache lines.
const STRETCH: usize = 256;

fn count_some(block: &[u8]) -> Histogram {
    let mut total = [0u32; 256];
    let mut buffer = [0u8; 4096];
    let mut filled = 0;
    let mut flush = |some: &[u8]| {
        for (sum, n) in total.iter_mut().zip(count(some)) {
            *sum += n;
        }
    };
    for (i, stretch) in block.chunks(SAMPLED * STRETCH).enumerate() {
        // Shift the position within each stretch, because rows may have the same length as stretches.
        let from = i % SAMPLED * STRETCH;
        let some = stretch.get(from..from + STRETCH).unwrap_or(&stretch[..stretch.len().min(STRETCH)]);
        if let Some(room) = buffer.get_mut(filled..filled + some.len()) {
            room.copy_from_slice(some);
            filled += some.len();
        }
        if filled + STRETCH > buffer.len() {
            flush(&buffer[..filled]);
            filled = 0;
        }
    }
    flush(&buffer[..filled]);
    total
}

impl Writer {
    /// Prepares a shared code for symbols with this histogram.
    fn new(total: &Histogram, depth: u8) -> Self {
        let several = total.iter().filter(|&&n| n > 0).count() > 1;
        Self { shared: several.then(|| Lengths::new(total)), depth, ..Self::default() }
    }

    /// Whether a Huffman code takes so much more than the entropy that a split block is better: it spends at least one
    /// bit on a frequent symbol that deserves less.
    fn is_skewed(&self, histogram: &Histogram) -> bool {
        let huffman = self.shared.as_ref().and_then(|lengths| lengths.bits(histogram));
        huffman.is_some_and(|huffman| split_bytes(entropy_bits(histogram)) < huffman / 8)
    }

    /// Prepares a shared Huffman code from a sample, for many symbols that such a code suits. Returns the sampled
    /// histograms of the blocks too.
    fn by_sample(symbols: &[u8]) -> Option<(Self, Vec<Histogram>)> {
        if symbols.len() < 2 << BLOCK_EXPONENT {
            return None;
        }
        let histograms: Vec<Histogram> = symbols.chunks(1 << BLOCK_EXPONENT).map(count_some).collect();
        let mut total = sum(&histograms);
        let sampled: u64 = total.iter().map(|&n| u64::from(n)).sum();
        let bits = entropy_bits(&total);
        // Below this range, splits or runs do better. Above, there is little to gain.
        if bits * 10 < sampled * 18 || bits * 100 > sampled * 790 {
            return None;
        }
        // Symbols missing from the sample are most likely near sampled ones.
        const NEAR: usize = 4;
        total.iter_mut().for_each(|n| *n *= SAMPLED as u32);
        let first = total.iter().position(|&n| n > 0)?.saturating_sub(NEAR);
        let last = total.iter().rposition(|&n| n > 0)?.saturating_add(NEAR);
        for n in total.iter_mut().skip(first).take(last - first + 1) {
            *n = (*n).max(1);
        }
        let lengths = Lengths::new(&total);
        // Huffman spends at least one bit on a frequent symbol that deserves less. Accept at most 4 % loss.
        let fits = lengths.bits(&total).is_some_and(|huffman| huffman * 25 < bits * SAMPLED as u64 * 26);
        fits.then(|| (Self { shared: Some(lengths), ..Self::default() }, histograms))
    }

    /// Appends a block with the shared Huffman code. Returns false if the code is too poor for the sampled symbols, or
    /// lacks a symbol of the block.
    fn put_shared(&mut self, block: &[u8], sampled: &Histogram, out: &mut Vec<u8>) -> bool {
        let Some(bits) = self.shared.as_ref().and_then(|lengths| lengths.bits(sampled)) else { return false };
        let ideal = entropy_bits(sampled);
        if ideal + ideal / 24 < bits || block.len() < STRETCH * SAMPLED {
            return false;
        }
        let start = out.len();
        let known = self.put_huffman(block, self.shared.clone(), out);
        // The sample may have missed symbols, so the result can be larger than the raw block.
        if !known || out.len() - start > block.len() {
            out.truncate(start);
            // The truncation also removed the table.
            self.huffman = None;
        }
        known && out.len() > start
    }

    /// Appends a block in the form that takes the fewest bytes, as far as estimates tell.
    fn put_best(&mut self, block: &[u8], histogram: &Histogram, out: &mut Vec<u8>) {
        let entropy_bits = entropy_bits(histogram);
        let (bytes, choice) = self.choose(block, histogram, entropy_bits);
        let start = out.len();
        if self.depth < MAX_DEPTH && split_bytes(entropy_bits) < bytes {
            // After a split block, the last table that a reader has is one of its parts.
            let before = self.huffman.take();
            if self.put_split(block, histogram, out) && ((out.len() - start) as u64) < bytes {
                return;
            }
            out.truncate(start);
            self.huffman = before;
        }
        match choice {
            Choice::Raw => {
                out.push(RAW);
                out.extend_from_slice(block);
            }
            Choice::Constant => {
                out.push(CONSTANT);
                out.extend(block.first());
            }
            Choice::Runs => {
                out.push(RUNS);
                runs::encode(block, out);
            }
            Choice::Shared => {
                self.put_huffman(block, self.shared.clone(), out);
            }
            Choice::Own(code) => {
                self.put_huffman(block, Some(*code), out);
            }
        }
    }

    /// Appends a block in two parts: a mask of the symbols that differ from the most frequent one, and these symbols.
    /// Returns false without memory for the parts.
    fn put_split(&self, block: &[u8], histogram: &Histogram, out: &mut Vec<u8>) -> bool {
        let (frequent, count) = (0u8..=255).zip(histogram).fold((0, 0), |best, (symbol, &n)| if n > best.1 { (symbol, n) } else { best });
        let room = block.len().saturating_sub(count as usize) + split_kernel::ROOM;
        let (Ok(mut mask), Ok(mut others)) = (Spare::new(block.len().div_ceil(8), "a mask"), Spare::new(room, "symbols")) else {
            return false;
        };
        let number = split_kernel::split(block, frequent, &mut mask, &mut others);
        out.extend([SPLIT, frequent]);
        self.put_part(&mask, out);
        if number > 0 {
            self.put_part(&others[..number], out);
        }
        true
    }

    /// Appends a block that lies in a block.
    fn put_part(&self, symbols: &[u8], out: &mut Vec<u8>) {
        let histogram = count(symbols);
        Self { is_alone: true, ..Self::new(&histogram, self.depth + 1) }.put_best(symbols, &histogram, out);
    }

    /// Appends a block in a Huffman code. Returns whether every symbol has a code.
    fn put_huffman(&mut self, block: &[u8], wanted: Option<Lengths>, out: &mut Vec<u8>) -> bool {
        let again = self.huffman.as_ref().is_some_and(|made| Some(&made.table) == wanted.as_ref());
        out.push(if again { HUFFMAN_AGAIN } else { HUFFMAN });
        if let (false, Some(table)) = (again, wanted) {
            table.put(out);
            self.huffman = Some(PreparedCode { encoder: table.codes(), table });
        }
        self.huffman.as_ref().is_some_and(|made| huffman::encode(block, &made.encoder, out))
    }

    /// Returns the form that takes the fewest bytes, and its bytes. Does not consider splits, nor runs that take more than
    /// a split is expected to take.
    fn choose(&self, block: &[u8], histogram: &Histogram, entropy_bits: u64) -> (u64, Choice) {
        let used = histogram.iter().filter(|&&n| n > 0).count();
        if used == 1 {
            return (1, Choice::Constant);
        }
        let mut best = (block.len() as u64, Choice::Raw);
        let offer = |best: &mut (u64, Choice), bytes: u64, choice: Choice| {
            if bytes < best.0 {
                *best = (bytes, choice);
            }
        };
        if let Some(lengths) = &self.shared {
            let table = if self.huffman.as_ref().is_some_and(|made| made.table == *lengths) { 0 } else { lengths.table_bytes() };
            let shared = lengths.bits(histogram).map_or(u64::MAX, |bits| bits / 8 + huffman::OVERHEAD);
            offer(&mut best, shared.saturating_add(table), Choice::Shared);
            let entropy = entropy_bits / 8;
            // A new table takes time to build, for the writer and every reader, so it must save enough.
            if !self.is_alone && entropy + entropy / 64 + 128 < shared {
                let own = Lengths::new(histogram);
                let bytes = own.bits(histogram).map_or(u64::MAX, |bits| bits / 8) + own.table_bytes() + huffman::OVERHEAD;
                if bytes + bytes / 64 < shared {
                    offer(&mut best, bytes, Choice::Own(Box::new(own)));
                }
            }
        }
        let most = histogram.iter().max().copied().unwrap_or(0);
        // A split block is tried later, so runs must take less than it is expected to take.
        let limit = if self.depth < MAX_DEPTH { best.0.min(split_bytes(entropy_bits)) } else { best.0 };
        if (u64::from(most) * 8 > block.len() as u64 * 7 || runs::are_likely(block))
            && let Some(bytes) = runs::size(block, limit as usize)
        {
            offer(&mut best, bytes as u64, Choice::Runs);
        }
        best
    }
}

/// Expected bytes of a split block: the entropy, two tables, and 3 % that the split must save.
fn split_bytes(entropy_bits: u64) -> u64 {
    const TABLES: u64 = 128;
    (entropy_bits + entropy_bits / 32) / 8 + TABLES
}

/// Decodes a plane block by block.
pub(crate) struct PlaneReader<'a> {
    input: Input<'a>,
    /// Number of symbols not yet decoded.
    left: usize,
    block: usize,
    /// Symbols that are left of a plane that is one raw block.
    stored: Option<&'a [u8]>,
    tables: Tables,
}

impl<'a> PlaneReader<'a> {
    /// Reads a plane of exactly `symbols` symbols. `code` must hold nothing else.
    pub(crate) fn new(code: &'a [u8], symbols: usize) -> Result<Self> {
        let stored = stored(code, symbols);
        let mut input = Input::new(if stored.is_some() { &[] } else { code });
        let mut block = 0;
        if symbols > 0 && stored.is_none() {
            let exponent = input.byte("a plane")?;
            if !BLOCK_EXPONENTS.contains(&exponent) {
                return Err(Error::corrupt(format!("blocks of 2^{exponent} symbols")).clause("entropy 1.1"));
            }
            block = 1 << exponent;
        }
        Ok(Self { input, left: symbols, block, stored, tables: Tables::default() })
    }

    /// Number of symbols in each block but the last; `None` if the whole plane is one raw block, of which any number may
    /// be taken.
    pub(crate) fn block(&self) -> Option<usize> {
        self.stored.is_none().then_some(self.block)
    }

    /// Returns the next block if it is stored raw; otherwise decodes it into the front of `out`. Of a plane that is one
    /// raw block, returns as many symbols as `out` has room for. After the last block, `code` must end.
    pub(crate) fn next(&mut self, out: &mut [u8]) -> Result<Option<&'a [u8]>> {
        if let Some(stored) = self.stored {
            let (next, rest) = stored.split_at(out.len().min(stored.len()));
            self.stored = Some(rest);
            return Ok(Some(next));
        }
        let count = self.left.min(self.block);
        self.left -= count;
        let out = out.get_mut(..count).ok_or_else(|| Error::invalid("the block is larger than its buffer"))?;
        let raw = self.tables.block(&mut self.input, out, 0)?;
        if self.left == 0 {
            self.check_end()?;
        }
        Ok(raw)
    }

    fn check_end(&self) -> Result<()> {
        if self.input.is_empty() {
            return Ok(());
        }
        Err(Error::corrupt(format!("{} bytes after a plane", self.input.len())).clause("entropy 1.2"))
    }
}

/// State that passes from block to block of a reader.
#[derive(Default)]
struct Tables {
    /// Code read last.
    huffman: Option<huffman_kernel::Table>,
}

impl Tables {
    /// Returns the symbols of a block if they are stored raw; otherwise decodes them into `out`. The block lies in
    /// `depth` others.
    fn block<'a>(&mut self, input: &mut Input<'a>, out: &mut [u8], depth: u8) -> Result<Option<&'a [u8]>> {
        match input.byte("a block")? {
            RAW => return Ok(Some(input.take(out.len(), "a raw block")?)),
            CONSTANT => out.fill(input.byte("a constant block")?),
            RUNS => runs::decode(input, out)?,
            tag @ (HUFFMAN | HUFFMAN_AGAIN) => {
                if tag == HUFFMAN {
                    self.huffman = Some(huffman::decode_table(&Lengths::get(input)?));
                }
                let no_table = || Error::corrupt("a block reuses the table of an earlier block, but there is none").clause("entropy 3");
                huffman::decode(input, self.huffman.as_ref().ok_or_else(no_table)?, out)?;
            }
            SPLIT if depth < MAX_DEPTH => self.split(input, out, depth)?,
            SPLIT => return Err(Error::corrupt(format!("a split block lies in {depth} others")).clause("entropy 7.2")),
            tag => return Err(Error::corrupt(format!("a block of kind {tag}")).clause("entropy 3")),
        }
        Ok(None)
    }

    fn split(&mut self, input: &mut Input<'_>, out: &mut [u8], depth: u8) -> Result<()> {
        let frequent = input.byte("a split block")?;
        let mask = self.part(input, out.len().div_ceil(8), depth)?;
        let unused = if out.len().is_multiple_of(8) { 0 } else { mask.last().map_or(0, |last| last >> (out.len() % 8)) };
        if unused != 0 {
            return Err(Error::corrupt("an unused bit of a mask is set").clause("entropy 7.1"));
        }
        let others = match mask::count_ones(&mask) {
            0 => MaybeSpare::Borrowed(&[]),
            number => self.part(input, number, depth)?,
        };
        split_kernel::join(&mask, &others, frequent, out);
        Ok(())
    }

    /// Returns the symbols of a block that lies in another one.
    fn part<'a>(&mut self, input: &mut Input<'a>, symbols: usize, depth: u8) -> Result<MaybeSpare<'a>> {
        let mut part = Spare::new(symbols, "a part of a block")?;
        let raw = self.block(input, &mut part, depth + 1)?;
        Ok(raw.map_or(MaybeSpare::Own(part), MaybeSpare::Borrowed))
    }
}

/// Fills `out` from `code`, which must hold exactly as many symbols and nothing else.
pub(crate) fn decode(code: &[u8], out: &mut [u8]) -> Result<()> {
    let mut reader = PlaneReader::new(code, out.len())?;
    if out.is_empty() {
        return reader.check_end();
    }
    for block in out.chunks_mut(reader.block().unwrap_or(usize::MAX)) {
        if let Some(raw) = reader.next(block)? {
            block.copy_from_slice(raw);
        }
    }
    Ok(())
}

/// Returns the symbols of a plane, if it is valid and consists of one raw block.
pub(super) fn stored(code: &[u8], symbols: usize) -> Option<&[u8]> {
    let (&[exponent, RAW], stored) = code.split_first_chunk::<RAW_HEADER>()? else { return None };
    (BLOCK_EXPONENTS.contains(&exponent) && stored.len() == symbols && (1..=1 << exponent).contains(&symbols)).then_some(stored)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Generates symbols: 0 with the given probability, others geometrically distributed.
    fn skewed(seed: u64, count: usize, zeros: f64, tail: f64) -> Vec<u8> {
        let mut state = seed;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / (1u64 << 31) as f64
        };
        (0..count).map(|_| if next() < zeros { 0 } else { (next().max(1e-9).ln() / tail.ln()).min(255.0) as u8 }).collect()
    }

    fn round_trip(symbols: &[u8]) -> usize {
        let mut code = Vec::new();
        encode(symbols, &mut code);
        assert!(code.len() as u64 <= max_encoded_bytes(symbols.len() as u64));
        let mut out = vec![0xee; symbols.len()];
        decode(&code, &mut out).unwrap();
        assert!(out == symbols, "{} symbols came back changed", symbols.len());
        code.len()
    }

    #[test]
    fn symbols_that_a_sample_does_not_tell_stay_within_the_bound() {
        // In each 1024 symbols, the first 256 have 54 values, the others 60 more.
        let symbol = |i: usize| match i % 1024 {
            0..256 => (i % 54 * 255 / 53) as u8,
            _ => (2 + i % 60 * 4) as u8 ^ 1,
        };
        round_trip(&(0..1 << 17).map(symbol).collect::<Vec<u8>>());
    }

    #[test]
    fn noise_that_repeats_is_noise() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        for period in [4096, 16_384, 65_536] {
            let tile: Vec<u8> = (0..period).map(|_| next()).collect();
            for tiles in [1, 4, 16] {
                let symbols = tile.repeat(tiles);
                assert_eq!(is_noise(&symbols), symbols.len() >= 4 * SAMPLE, "{tiles} tiles of {period}");
                assert!(!is_noise(&symbols.iter().map(|symbol| symbol / 3).collect::<Vec<u8>>()));
            }
        }
    }

    #[test]
    fn a_split_that_is_taken_back_keeps_the_table() {
        // A code of 8 bits for 128 symbols, and of 7 bits for 64 others.
        let of_8_bits: Vec<u8> = (0..120).chain(248..=255).collect();
        let frequent: Vec<u8> = (0..1 << 16).map(|i| if i % 2 == 0 { 128 + (i / 2 % 64) as u8 } else { of_8_bits[i / 2 % 128] }).collect();
        let mut writer = Writer::new(&count(&frequent), 0);
        let mut out = Vec::new();
        writer.put_best(&frequent, &count(&frequent), &mut out);
        assert_eq!(out[0], HUFFMAN);
        // This code takes 7.7 bits for each of these symbols, their entropy is 6.6. The tables of a split cost more.
        let rare: Vec<u8> = (0..1000).map(|i| if i % 10 < 7 { of_8_bits[2 * i % 128] } else { 128 + (i * 7 % 32) as u8 }).collect();
        let start = out.len();
        writer.put_best(&rare, &count(&rare), &mut out);
        assert_eq!(out[start], HUFFMAN_AGAIN);
        assert!(out.len() - start <= rare.len() + 1);
    }

    #[test]
    fn every_skew_and_length_comes_back_near_its_entropy() {
        for count in [1usize, 2, 3, 15, 16, 17, 63, 64, 65, 1000, 65_535, 65_536, 65_537, 300_000] {
            for (zeros, tail) in [(0.0, 0.999), (0.0, 0.97), (0.0, 0.7), (0.3, 0.5), (0.9, 0.5), (0.99, 0.5), (0.9999, 0.1), (1.0, 0.5)] {
                let symbols = skewed(count as u64, count, zeros, tail);
                let bytes = round_trip(&symbols);
                let ideal = entropy_bits(&super::super::histogram::count(&symbols)) as usize / 8;
                assert!(bytes <= ideal + ideal / 20 + 240 + 120 * count / 65_536, "{count} {zeros} {tail}: {bytes} for {ideal}");
            }
        }
    }

    #[test]
    fn blocks_that_differ_get_tables_of_their_own() {
        let mut symbols = skewed(1, 65_536, 0.0, 0.6);
        symbols.extend(skewed(2, 65_536, 0.0, 0.6).iter().map(|s| 255 - s));
        symbols.extend(vec![7; 65_536]);
        symbols.extend(skewed(3, 70_000, 0.97, 0.6));
        let apart: usize = symbols.chunks(65_536).map(round_trip).sum();
        assert!(round_trip(&symbols) <= apart + apart / 50);
    }

    proptest! {
        #[test]
        fn any_symbols_come_back(symbols in proptest::collection::vec(any::<u8>(), 0..5000), mask in any::<u8>()) {
            round_trip(&symbols.iter().map(|s| s & mask).collect::<Vec<_>>());
        }

        #[test]
        fn damaged_code_ends_in_an_error_or_a_full_buffer(
            seed in any::<u64>(), count in 1usize..70_000, zeros in 0.0..1.0f64, at in any::<proptest::sample::Index>(), flip in 1u8..
        ) {
            let mut code = Vec::new();
            encode(&skewed(seed, count, zeros, 0.7), &mut code);
            let at = at.index(code.len());
            code[at] ^= flip;
            let _ = decode(&code, &mut vec![0; count]);
            code.truncate(at);
            prop_assert!(decode(&code, &mut vec![0; count]).is_err());
        }
    }
}
