//! Decodes planes and `tc.ordered` without checks, like a reader that forgets one. The decoded checksum of an invalid
//! case is the checksum of this result, so only the missing check can reject the case.
#![allow(clippy::little_endian_bytes, reason = "a second implementation of the byte layouts")]

use std::collections::BTreeMap;

/// Takes bytes from the front. Returns zeros past the end.
struct Source<'a>(&'a [u8]);

impl<'a> Source<'a> {
    fn take(&mut self, bytes: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn number(&mut self, bytes: usize) -> u32 {
        self.take(bytes).iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte))
    }

    fn byte(&mut self) -> u8 {
        self.number(1) as u8
    }
}

/// Returns a bit of a column. The least significant bit of each byte comes first.
fn bit(data: &[u8], at: usize) -> u32 {
    data.get(at / 8).map_or(0, |byte| u32::from(byte >> (at % 8) & 1))
}

/// Symbols by length and code (entropy 5.2).
type Huffman = BTreeMap<(u32, u32), u8>;

fn huffman_table(source: &mut Source<'_>) -> Huffman {
    let first = source.byte();
    let last = source.byte();
    let symbols: Vec<u8> = (first..=last).collect();
    let halves: Vec<u8> = source.take(symbols.len().div_ceil(2)).iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
    let mut table = Huffman::new();
    let mut code = 0;
    for length in 1..=15 {
        for (&symbol, _) in symbols.iter().zip(&halves).filter(|(_, of)| **of == length) {
            table.insert((length.into(), code), symbol);
            code += 1;
        }
        code *= 2;
    }
    table
}

fn huffman_block(source: &mut Source<'_>, table: &Huffman, count: usize) -> Vec<u8> {
    let sizes: Vec<u32> = (0..4).map(|_| source.number(4)).collect();
    let quarter = count.div_ceil(4);
    let mut out = Vec::new();
    for (i, &size) in sizes.iter().enumerate() {
        let stream = source.take(size as usize);
        let mut at = 0;
        for _ in (i * quarter).min(count)..((i + 1) * quarter).min(count) {
            let mut length = 0;
            let mut code = 0;
            let symbol = loop {
                code = code << 1 | bit(stream, at);
                (length, at) = (length + 1, at + 1);
                match table.get(&(length, code)) {
                    Some(&symbol) => break symbol,
                    None if length > 15 => break 0,
                    None => {}
                }
            };
            out.push(symbol);
        }
    }
    out
}

fn runs(source: &mut Source<'_>, count: usize) -> Vec<u8> {
    let mut out = Vec::new();
    while out.len() < count {
        let symbol = source.byte();
        let mut length = 1usize;
        let mut shift = 0;
        loop {
            let byte = source.byte();
            length += usize::from(byte & 127) << shift;
            shift += 7;
            if byte < 128 || shift > 28 {
                break;
            }
        }
        out.resize((out.len() + length).min(count), symbol);
    }
    out
}

/// Decodes the symbols of a plane.
pub(crate) fn plane(data: &[u8], count: usize) -> Vec<u8> {
    let mut source = Source(data);
    let block_symbols = 1usize << source.byte().min(20);
    let mut table = Huffman::new();
    let mut out = Vec::new();
    while out.len() < count {
        out.extend(block(&mut source, &mut table, block_symbols.min(count - out.len())));
    }
    out
}

/// Decodes a block. Returns zeros once the data has ended, so that nested blocks end too.
fn block(source: &mut Source<'_>, table: &mut Huffman, count: usize) -> Vec<u8> {
    if source.0.is_empty() {
        return vec![0; count];
    }
    let kind = source.byte();
    if kind == 3 {
        *table = huffman_table(source);
    }
    let mut symbols = match kind {
        1 => vec![source.byte(); count],
        2 => runs(source, count),
        3 | 4 => huffman_block(source, table, count),
        5 => split(source, table, count),
        _ => source.take(count).to_vec(),
    };
    symbols.resize(count, 0);
    symbols
}

fn split(source: &mut Source<'_>, table: &mut Huffman, count: usize) -> Vec<u8> {
    let most = source.byte();
    let mask = block(source, table, count.div_ceil(8));
    let number = mask.iter().map(|byte| byte.count_ones() as usize).sum();
    let mut others = if number == 0 { vec![] } else { block(source, table, number) }.into_iter();
    (0..count).map(|i| if bit(&mask, i) == 0 { most } else { others.next().unwrap_or_default() }).collect()
}

/// Decodes a chunk of `tc.planes` (planes 3) with units of `width` bytes, rotated or not.
pub(crate) fn planes(columns: &[&[u8]], units: usize, width: usize, rotated: bool, base: Option<&[u8]>) -> Vec<u8> {
    let planes: Vec<Vec<u8>> = (0..width).map(|k| plane(columns.get(k).copied().unwrap_or_default(), units)).collect();
    let mut out = Vec::new();
    for i in 0..units {
        let t = planes.iter().rev().fold(0u64, |t, plane| t << 8 | u64::from(plane[i]));
        let u = if rotated { t >> 1 | (t & 1) << (8 * width - 1) } else { t };
        out.extend_from_slice(&u.to_le_bytes()[..width]);
    }
    base.into_iter().for_each(|base| out.iter_mut().zip(base).for_each(|(byte, old)| *byte ^= old));
    out
}

/// Decodes a chunk of `tc.ordered` (ordered 5). The exponent has `exponent_bits` bits, starting at bit `shift`.
pub(crate) fn ordered(tokens: &[u8], bits: &[u8], base: &[u8], width: usize, (shift, exponent_bits): (u32, u32)) -> Vec<u8> {
    let units: Vec<u64> = base.chunks(width).map(|unit| unit.iter().rev().fold(0, |u, &byte| u << 8 | u64::from(byte))).collect();
    let mut source = Source(tokens);
    let count = source.byte() as usize;
    let bounds = source.take(count);
    let lengths: Vec<u32> = (0..=count).map(|_| source.number(4)).collect();
    let class = |unit: u64| {
        let exponent = unit >> shift & ((1 << exponent_bits) - 1);
        bounds.iter().filter(|&&bound| u64::from(bound) < exponent).count()
    };
    let mut planes: Vec<std::vec::IntoIter<u8>> = lengths
        .iter()
        .enumerate()
        .map(|(number, &length)| {
            let members = units.iter().filter(|&&unit| class(unit) == number).count();
            plane(source.take(length as usize), members).into_iter()
        })
        .collect();
    let half = 1u64 << (8 * width - 1);
    let mask = u64::MAX >> (64 - 8 * width);
    let mut at = 0;
    let mut out = Vec::new();
    for &unit in &units {
        let token = u64::from(planes.get_mut(class(unit)).and_then(Iterator::next).unwrap_or_default());
        let mut z = token;
        if token >= 16 {
            let extra = (token - 16) / 8 + 1;
            z = (8 + (token - 16) % 8) << extra;
            for i in 0..extra {
                z |= u64::from(bit(bits, at)) << i;
                at += 1;
            }
        }
        let d = if z % 2 == 0 { z / 2 } else { (z / 2 + 1).wrapping_neg() };
        let o = if unit < half { unit + half } else { mask - unit };
        let v = o.wrapping_add(d) & mask;
        let u = if v >= half { v - half } else { mask - v };
        out.extend_from_slice(&u.to_le_bytes()[..width]);
    }
    out
}
