//! Byte planes: splits units into planes, with byte k of each unit in plane k, and merges them again.
//!
//! Before the split, a unit may be XORed with the base's unit and rotated left by one bit. The rotation moves the
//! exponent of a binary float to the top bits and the sign to the lowest bit.

super::for_every_level! {
    /// Fills the planes. Each plane has one byte per unit of `planes.len()` bytes (1, 2, 4 or 8).
    pub fn split / split_at(data: &[u8], base: Option<&[u8]>, rotate: bool, planes: &mut [&mut [u8]]) = split_any;
}

super::for_every_level! {
    /// Inverts [`split`]. Fills `out` from planes that have one byte per unit of `out`.
    pub fn merge / merge_at(planes: &[&[u8]], base: Option<&[u8]>, rotate: bool, out: &mut [u8]) = merge_any;
}

/// A unit as an unsigned integer.
trait Unit<const W: usize>: Copy {
    const ZERO: Self;
    fn get(bytes: [u8; W]) -> Self;
    fn bytes(self) -> [u8; W];
    fn byte(self, k: u32) -> u8;
    fn or_byte(self, byte: u8, k: u32) -> Self;
    fn xor(self, other: Self) -> Self;
    fn left(self) -> Self;
    fn right(self) -> Self;
}

macro_rules! unit {
    ($type:ty, $width:literal) => {
        #[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
        impl Unit<$width> for $type {
            const ZERO: Self = 0;
            #[inline(always)]
            fn byte(self, k: u32) -> u8 {
                (self >> (8 * k)) as u8
            }
            #[inline(always)]
            fn or_byte(self, byte: u8, k: u32) -> Self {
                self | <$type>::from(byte) << (8 * k)
            }
            #[inline(always)]
            fn get(bytes: [u8; $width]) -> Self {
                <$type>::from_le_bytes(bytes)
            }
            #[inline(always)]
            fn bytes(self) -> [u8; $width] {
                self.to_le_bytes()
            }
            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
            #[inline(always)]
            fn left(self) -> Self {
                self.rotate_left(1)
            }
            #[inline(always)]
            fn right(self) -> Self {
                self.rotate_right(1)
            }
        }
    };
}
unit!(u8, 1);
unit!(u16, 2);
unit!(u32, 4);
unit!(u64, 8);

/// Number of units per step, so that their bytes stay in the first-level cache.
const BLOCK: usize = 512;

#[inline(always)]
fn split_any(data: &[u8], base: Option<&[u8]>, rotate: bool, planes: &mut [&mut [u8]]) {
    match planes.len() {
        1 => split_width::<u8, 1>(data, base, rotate, planes),
        2 => split_width::<u16, 2>(data, base, rotate, planes),
        4 => split_width::<u32, 4>(data, base, rotate, planes),
        _ => split_width::<u64, 8>(data, base, rotate, planes),
    }
}

#[inline(always)]
fn split_width<U: Unit<W>, const W: usize>(data: &[u8], base: Option<&[u8]>, rotate: bool, planes: &mut [&mut [u8]]) {
    let units = data.as_chunks::<W>().0;
    let bases = base.unwrap_or_default().as_chunks::<W>().0;
    let mut words = [U::ZERO; BLOCK];
    for (i, block) in units.chunks(BLOCK).enumerate() {
        let at = i * BLOCK;
        let words = &mut words[..block.len()];
        match bases.get(at..at + block.len()) {
            Some(bases) if base.is_some() => {
                for ((word, unit), base) in words.iter_mut().zip(block).zip(bases) {
                    let x = U::get(*unit).xor(U::get(*base));
                    *word = if rotate { x.left() } else { x };
                }
            }
            _ => {
                for (word, unit) in words.iter_mut().zip(block) {
                    let x = U::get(*unit);
                    *word = if rotate { x.left() } else { x };
                }
            }
        }
        for (k, plane) in (0..W as u32).zip(planes.iter_mut()) {
            for (byte, word) in plane[at..at + words.len()].iter_mut().zip(words.iter()) {
                *byte = word.byte(k);
            }
        }
    }
}

#[inline(always)]
fn merge_any(planes: &[&[u8]], base: Option<&[u8]>, rotate: bool, out: &mut [u8]) {
    match planes.len() {
        1 => merge_width::<u8, 1>(planes, base, rotate, out),
        2 => merge_width::<u16, 2>(planes, base, rotate, out),
        4 => merge_width::<u32, 4>(planes, base, rotate, out),
        _ => merge_width::<u64, 8>(planes, base, rotate, out),
    }
}

#[inline(always)]
fn merge_width<U: Unit<W>, const W: usize>(planes: &[&[u8]], base: Option<&[u8]>, rotate: bool, out: &mut [u8]) {
    let units = out.as_chunks_mut::<W>().0;
    let bases = base.unwrap_or_default().as_chunks::<W>().0;
    let mut words = [U::ZERO; BLOCK];
    for (i, block) in units.chunks_mut(BLOCK).enumerate() {
        let at = i * BLOCK;
        let words = &mut words[..block.len()];
        words.fill(U::ZERO);
        for (k, plane) in (0..W as u32).zip(planes) {
            for (word, byte) in words.iter_mut().zip(&plane[at..at + block.len()]) {
                *word = word.or_byte(*byte, k);
            }
        }
        match bases.get(at..at + block.len()) {
            Some(bases) if base.is_some() => {
                for ((unit, word), base) in block.iter_mut().zip(words.iter()).zip(bases) {
                    let x = *word;
                    *unit = if rotate { x.right() } else { x }.xor(U::get(*base)).bytes();
                }
            }
            _ => {
                for (unit, word) in block.iter_mut().zip(words.iter()) {
                    let x = *word;
                    *unit = if rotate { x.right() } else { x }.bytes();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;

    fn split_to_vecs(level: Level, width: usize, data: &[u8], base: Option<&[u8]>, rotate: bool) -> Vec<Vec<u8>> {
        let mut planes = vec![vec![0; data.len() / width]; width];
        let mut borrowed: Vec<&mut [u8]> = planes.iter_mut().map(Vec::as_mut_slice).collect();
        split_at(level, data, base, rotate, &mut borrowed);
        planes
    }

    #[test]
    fn every_level_splits_alike_and_merges_back() {
        let data: Vec<u8> = (0..8 * 3000usize).map(|i| ((i * i) >> 5) as u8).collect();
        let base: Vec<u8> = (0..8 * 3000usize).map(|i| (i * 7) as u8).collect();
        for width in [1, 2, 4, 8] {
            for units in [0, 1, 31, 32, 33, 511, 512, 513, 3000] {
                for (rotate, with_base) in [(false, false), (true, false), (false, true), (true, true)] {
                    let data = &data[..units * width];
                    let base = with_base.then_some(&base[..units * width]);
                    let scalar = split_to_vecs(Level::Scalar, width, data, base, rotate);
                    if width == 2 && units > 2 && rotate && base.is_none() {
                        let unit = u16::from(data[2]) | u16::from(data[3]) << 8;
                        assert_eq!((scalar[0][1], scalar[1][1]), (unit.rotate_left(1) as u8, (unit.rotate_left(1) >> 8) as u8));
                    }
                    for level in Level::available() {
                        let planes = split_to_vecs(level, width, data, base, rotate);
                        assert!(planes == scalar);
                        let planes: Vec<&[u8]> = planes.iter().map(Vec::as_slice).collect();
                        let mut out = vec![0xaa; units * width];
                        merge_at(level, &planes, base, rotate, &mut out);
                        assert!(out == data, "{level:?} {width} x {units}, rotated {rotate}, base {with_base}");
                    }
                }
            }
        }
    }
}
