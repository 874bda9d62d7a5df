//! Run-length coding: a symbol, then the length of its run. Spec: spec/entropy.md 6.

use super::table::Input;
use crate::{Error, Result};

/// Samples two stretches. Returns whether runs of eight or more symbols are likely.
pub(super) fn are_likely(symbols: &[u8]) -> bool {
    const LOOK: usize = 256;
    let changes = |stretch: &[u8]| stretch.iter().zip(stretch.iter().skip(1)).filter(|(a, b)| a != b).count();
    let middle = symbols.get(symbols.len() / 2..).unwrap_or_default();
    [symbols, middle].iter().map(|from| changes(&from[..from.len().min(LOOK)])).sum::<usize>() <= symbols.len().min(2 * LOOK) / 8
}

/// Returns the encoded bytes, or `None` if they exceed `most`.
pub(super) fn size(symbols: &[u8], most: usize) -> Option<usize> {
    let mut bytes = 0;
    for run in symbols.chunk_by(|a, b| a == b) {
        bytes += 1 + varint_bytes(run.len() - 1);
        if bytes > most {
            return None;
        }
    }
    Some(bytes)
}

fn varint_bytes(value: usize) -> usize {
    (usize::BITS - (value | 1).leading_zeros()).div_ceil(7) as usize
}

pub(super) fn encode(symbols: &[u8], out: &mut Vec<u8>) {
    for run in symbols.chunk_by(|a, b| a == b) {
        out.extend(run.first());
        let mut length = run.len() - 1;
        while length >= 128 {
            out.push((length & 127) as u8 | 128);
            length >>= 7;
        }
        out.push(length as u8);
    }
}

pub(super) fn decode(input: &mut Input<'_>, mut out: &mut [u8]) -> Result<()> {
    let bad = |message: &str| Err(Error::corrupt(message).clause("entropy 6"));
    let mut before = None;
    while !out.is_empty() {
        let symbol = input.byte("a run")?;
        if before == Some(symbol) {
            return bad("two runs of one symbol follow one another");
        }
        before = Some(symbol);
        let (mut length, mut shift) = (0usize, 0);
        loop {
            let byte = input.byte("the length of a run")?;
            if shift > 21 || (byte == 0 && shift > 0) {
                return bad("the length of a run is not in its shortest form");
            }
            length |= usize::from(byte & 127) << shift;
            shift += 7;
            if byte < 128 {
                break;
            }
        }
        match out.split_at_mut_checked(length + 1) {
            Some((run, rest)) => {
                run.fill(symbol);
                out = rest;
            }
            None => return bad("a run is longer than its block"),
        }
    }
    Ok(())
}
