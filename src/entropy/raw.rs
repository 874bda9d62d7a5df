//! Planes that no coder makes smaller, without a copy: the writer's buffer becomes the column, and a reader borrows the
//! symbols from the column.

use std::ops::{Deref, DerefMut};

use tensorcask_kernels::spare::{self, MaybeSpare, Spare};

use super::plane::{BLOCK_EXPONENT, BLOCK_EXPONENTS, RAW, RAW_HEADER, encode_blocks, is_noise, stored};
use super::{coded, decode};
use crate::Result;

/// A plane to encode: symbols for the caller to fill, with arbitrary content at first.
#[derive(Debug)]
pub(crate) struct PlaneBuffer(Vec<u8>);

impl PlaneBuffer {
    pub(crate) fn new(symbols: usize, what: &str) -> Result<Self> {
        Ok(Self(spare::output_of(RAW_HEADER.saturating_add(symbols), what)?))
    }

    /// Encodes the plane as a column.
    pub(crate) fn encode(self) -> Vec<u8> {
        if !is_noise(&self) {
            let column = coded(&self);
            spare::reuse(self.0);
            return column;
        }
        let exponent = BLOCK_EXPONENT.max(self.len().next_power_of_two().trailing_zeros() as u8);
        let Self(mut column) = self;
        match (BLOCK_EXPONENTS.contains(&exponent), column.first_chunk_mut::<RAW_HEADER>()) {
            (true, Some(header)) => *header = [exponent, RAW],
            // Too long for one block.
            _ => {
                let symbols = column.split_off(RAW_HEADER.min(column.len()));
                column.clear();
                encode_blocks(&symbols, &mut column);
            }
        }
        column
    }
}

impl Deref for PlaneBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.get(RAW_HEADER..).unwrap_or_default()
    }
}

impl DerefMut for PlaneBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.get_mut(RAW_HEADER..).unwrap_or_default()
    }
}

/// Reads a plane of exactly `symbols` symbols. `code` must hold nothing else. A plane that is one raw block is borrowed.
pub(crate) fn read_plane<'a>(code: &'a [u8], symbols: usize, what: &str) -> Result<MaybeSpare<'a>> {
    if let Some(stored) = stored(code, symbols) {
        return Ok(MaybeSpare::Borrowed(stored));
    }
    let mut plane = Spare::new(symbols, what)?;
    decode(code, &mut plane)?;
    Ok(MaybeSpare::Own(plane))
}

#[cfg(test)]
mod tests {
    use tensorcask_kernels::spare::MaybeSpare;

    use super::{PlaneBuffer, RAW_HEADER, decode, read_plane};
    use crate::entropy::max_encoded_bytes;

    fn noise(seed: usize, count: usize) -> Vec<u8> {
        let mut state = seed as u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        (0..count).map(|_| next()).collect()
    }

    fn plane_of(symbols: &[u8]) -> PlaneBuffer {
        let mut plane = PlaneBuffer::new(symbols.len(), "a test").unwrap();
        plane.copy_from_slice(symbols);
        plane
    }

    #[test]
    fn planes_of_all_lengths_come_back() {
        for symbols in [0, 1, 16_384, 65_536, 65_537, 300_000, 1 << 20, (1 << 20) + 1] {
            for plain in [noise(symbols, symbols), vec![7; symbols]] {
                let code = plane_of(&plain).encode();
                assert!(code.len() as u64 <= max_encoded_bytes(symbols as u64));
                let plane = read_plane(&code, symbols, "a test").unwrap();
                assert!(*plane == plain, "{symbols} symbols");
                let mut out = vec![0xee; symbols];
                decode(&code, &mut out).unwrap();
                assert!(out == plain, "{symbols} symbols");
            }
        }
    }

    #[test]
    fn noise_is_neither_copied_by_the_writer_nor_by_the_reader() {
        let plane = plane_of(&noise(1, 200_000));
        let place = plane.as_ptr();
        let code = plane.encode();
        assert_eq!(code[RAW_HEADER..].as_ptr(), place);
        assert!(matches!(read_plane(&code, 200_000, "a test"), Ok(MaybeSpare::Borrowed(symbols)) if symbols.as_ptr() == place));
    }

    #[test]
    fn a_damaged_header_is_found() {
        let good = plane_of(&noise(1, 100_000)).encode();
        for (at, wrong) in [(0, 11), (0, 16), (0, 21), (1, 9)] {
            let mut code = good.clone();
            code[at] = wrong;
            assert!(read_plane(&code, 100_000, "a test").is_err(), "byte {at} is {wrong}");
        }
        assert!(read_plane(&good, 99_999, "a test").is_err());
        assert!(read_plane(&good[..good.len() - 1], 100_000, "a test").is_err());
    }
}
