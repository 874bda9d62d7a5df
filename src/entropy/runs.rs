//! Run-length coding: a symbol, then the length of its run. Spec: spec/entropy.md 6.

use tensorcask_kernels::runs as kernel;

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
    // Each run takes at least two bytes, and there are more runs than changes. Counting changes takes much less time.
    if 2 * kernel::count_changes(symbols) > most {
        return None;
    }
    let mut bytes = 0;
    for_each_run(symbols, |_, length| {
        bytes += 1 + varint_bytes(length - 1);
        bytes <= most
    });
    (bytes <= most).then_some(bytes)
}

/// Calls `act` with the symbol and the length of each run, until it returns false.
fn for_each_run(symbols: &[u8], mut act: impl FnMut(u8, usize) -> bool) {
    let mut start = 0;
    let mut end_run = |symbol: u8, end: usize| {
        let length = end - start;
        start = end;
        act(symbol, length)
    };
    if kernel::for_each_change(symbols, &mut end_run)
        && let Some(&last) = symbols.last()
    {
        end_run(last, symbols.len());
    }
}

fn varint_bytes(value: usize) -> usize {
    (usize::BITS - (value | 1).leading_zeros()).div_ceil(7) as usize
}

pub(super) fn encode(symbols: &[u8], out: &mut Vec<u8>) {
    for_each_run(symbols, |symbol, length| {
        out.push(symbol);
        let mut left = length - 1;
        while left >= 128 {
            out.push((left & 127) as u8 | 128);
            left >>= 7;
        }
        out.push(left as u8);
        true
    });
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
        let mut length = 0usize;
        let mut shift = 0;
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

#[cfg(test)]
mod tests {
    use super::for_each_run;

    #[test]
    fn runs_are_those_of_the_plain_loop() {
        for count in [0usize, 1, 2, 7, 8, 9, 63, 64, 65, 66, 127, 128, 129, 1000] {
            for every in [1usize, 2, 3, 8, 63, 64, 65, 200, 2000] {
                let symbols: Vec<u8> = (0..count).map(|i| ((i + 5) / every * 7) as u8).collect();
                let mut found = vec![];
                for_each_run(&symbols, |symbol, length| {
                    found.push((symbol, length));
                    true
                });
                assert_eq!(super::kernel::count_changes(&symbols), found.len().saturating_sub(1));
                let mut encoded = vec![];
                super::encode(&symbols, &mut encoded);
                assert_eq!(super::size(&symbols, encoded.len()), Some(encoded.len()));
                assert!(symbols.is_empty() || super::size(&symbols, encoded.len() - 1).is_none());
                let expected: Vec<(u8, usize)> = symbols.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())).collect();
                assert_eq!(found, expected, "{count} symbols, {every} in a run");
            }
        }
        let mut calls = 0;
        for_each_run(&[1, 2, 3, 4], |_, _| {
            calls += 1;
            calls < 2
        });
        assert_eq!(calls, 2);
    }
}
