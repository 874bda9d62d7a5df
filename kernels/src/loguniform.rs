//! Conversion between numbers and codes of the logarithmic grid. Spec: spec/codecs/loguniform.md.

/// Base-2 logarithm of the steps per octave in the finest grid.
pub const MAX_LOG2: u32 = 7;

/// Symbols that do not stand for a difference.
pub const ZERO: u8 = 128;
pub const ESCAPE: u8 = 129;

/// Markers for numbers without a code: both zeros, and numbers off the grid.
pub const NO_CODE_ZERO: i16 = -1;
pub const NO_CODE: i16 = -2;

const MAGNITUDE: u32 = 0x7fff_ffff;
const FRACTION: u32 = 0x7f_ffff;

/// Mantissa field of each step: (2^(k / 128) - 1) * 2^23, rounded.
const MANTISSAS: [u32; 128] = [
    0x000000, 0x00b1ed, 0x0164d2, 0x0218af, 0x02cd87, 0x038359, 0x043a29, 0x04f1f6, 0x05aac3, 0x066491, 0x071f62, 0x07db35, 0x08980f,
    0x0955ee, 0x0a14d5, 0x0ad4c6, 0x0b95c2, 0x0c57ca, 0x0d1adf, 0x0ddf04, 0x0ea43a, 0x0f6a81, 0x1031dc, 0x10fa4d, 0x11c3d3, 0x128e72,
    0x135a2b, 0x1426ff, 0x14f4f0, 0x15c3ff, 0x16942d, 0x17657d, 0x1837f0, 0x190b88, 0x19e046, 0x1ab62b, 0x1b8d3a, 0x1c6573, 0x1d3eda,
    0x1e196e, 0x1ef532, 0x1fd228, 0x20b051, 0x218faf, 0x227043, 0x23520f, 0x243516, 0x251958, 0x25fed7, 0x26e595, 0x27cd94, 0x28b6d5,
    0x29a15b, 0x2a8d26, 0x2b7a3a, 0x2c6897, 0x2d583f, 0x2e4934, 0x2f3b79, 0x302f0e, 0x3123f6, 0x321a32, 0x3311c4, 0x340aaf, 0x3504f3,
    0x360094, 0x36fd92, 0x37fbf0, 0x38fbaf, 0x39fcd2, 0x3aff5b, 0x3c034a, 0x3d08a4, 0x3e0f68, 0x3f179a, 0x40213b, 0x412c4d, 0x4238d2,
    0x4346cd, 0x44563f, 0x45672a, 0x467991, 0x478d75, 0x48a2d8, 0x49b9be, 0x4ad226, 0x4bec15, 0x4d078c, 0x4e248c, 0x4f4319, 0x506334,
    0x5184df, 0x52a81e, 0x53ccf1, 0x54f35b, 0x561b5e, 0x5744fd, 0x587039, 0x599d16, 0x5acb94, 0x5bfbb8, 0x5d2d82, 0x5e60f5, 0x5f9613,
    0x60ccdf, 0x62055b, 0x633f89, 0x647b6d, 0x65b907, 0x66f85b, 0x68396a, 0x697c38, 0x6ac0c7, 0x6c0719, 0x6d4f30, 0x6e9910, 0x6fe4ba,
    0x713231, 0x728177, 0x73d290, 0x75257d, 0x767a41, 0x77d0df, 0x79295a, 0x7a83b3, 0x7bdfed, 0x7d3e0c, 0x7e9e11,
];

/// A grid with a fixed number of steps per octave.
#[derive(Debug, Clone)]
pub struct Grid {
    log2: u32,
    /// Mantissa field of each step.
    mantissas: [u32; 128],
    /// For each value of a mantissa's upper eight bits, the step nearest to the first such mantissa. At most one bound
    /// lies in each range.
    cells: [u8; 256],
    /// Least mantissa field that is nearer to the next step, for each step.
    bounds: [u32; 129],
}

impl Grid {
    /// Creates a grid of `1 << log2` steps per octave. Larger values count as [`MAX_LOG2`].
    pub fn new(log2: u32) -> Self {
        let log2 = log2.min(MAX_LOG2);
        let steps = 1usize << log2;
        let mut grid = Self { log2, mantissas: [0; 128], cells: [0; 256], bounds: [u32::MAX; 129] };
        for (slot, &mantissa) in grid.mantissas.iter_mut().zip(MANTISSAS.iter().step_by(128 >> log2)) {
            *slot = mantissa;
        }
        for step in 0..steps {
            let next = if step + 1 < steps { grid.mantissas[step + 1] } else { FRACTION + 1 };
            grid.bounds[step] = (grid.mantissas[step] + next).div_ceil(2);
        }
        for (cell, slot) in grid.cells.iter_mut().enumerate() {
            let first = (cell as u32) << 15;
            *slot = grid.bounds.iter().take(steps).filter(|bound| **bound <= first).count() as u8;
        }
        grid
    }

    pub fn log2(&self) -> u32 {
        self.log2
    }

    /// Range of valid codes.
    pub fn codes(&self) -> std::ops::Range<i32> {
        1 << self.log2..255 << self.log2
    }

    /// Returns the code nearest to a magnitude whose exponent field is from 1 to 254. The result may be one past the
    /// last valid code.
    #[inline(always)]
    fn nearest(&self, magnitude: u32) -> i32 {
        let fraction = magnitude & FRACTION;
        let step = u32::from(self.cells[(fraction >> 15) as usize]);
        let step = step + u32::from(fraction >= self.bounds[(step & 0xff).min(128) as usize]);
        (((magnitude >> 23) << self.log2) + step) as i32
    }

    /// Returns the magnitude of a code.
    #[inline(always)]
    fn magnitude(&self, code: i32) -> u32 {
        let step = code as u32 & ((1 << self.log2) - 1);
        ((code as u32) >> self.log2) << 23 | self.mantissas[(step & 127) as usize]
    }

    /// Returns the predicted code for a number of the base.
    #[inline(always)]
    fn expected(&self, bits: u32) -> i32 {
        let magnitude = bits & MAGNITUDE;
        match magnitude >> 23 {
            0 => 1 << self.log2,
            255 => (255 << self.log2) - 1,
            _ => self.nearest(magnitude),
        }
    }
}

/// Returns the base-2 logarithm of the steps in the coarsest grid that contains this number. The inner `None` marks a
/// number off every grid. The outer `None` marks zeros, denormals and non-finite numbers, which every grid keeps.
pub fn coarsest(bits: [u8; 4]) -> Option<Option<u32>> {
    let magnitude = word(bits) & MAGNITUDE;
    if !(1..255).contains(&(magnitude >> 23)) {
        return None;
    }
    let found = MANTISSAS.binary_search(&(magnitude & FRACTION));
    Some(found.ok().map(|k| MAX_LOG2 - (k as u32 | 128).trailing_zeros()))
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn word(bytes: [u8; 4]) -> u32 {
    u32::from_le_bytes(bytes)
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn bytes(word: u32) -> [u8; 4] {
    word.to_le_bytes()
}

super::for_every_level! {
    /// Rounds each number to the nearest of the grid. Zeros, denormals and non-finite numbers stay, and so do numbers
    /// that would round to infinity.
    pub fn quantize / quantize_at(grid: &Grid, data: &[u8], out: &mut [u8]) = quantize_any;
}

super::for_every_level! {
    /// Returns the code of each number, or [`NO_CODE_ZERO`] or [`NO_CODE`].
    pub fn codes / codes_at(grid: &Grid, data: &[u8], out: &mut [i16]) = codes_any;
}

super::for_every_level! {
    /// Returns the predicted code for each number of a base.
    pub fn expected / expected_at(grid: &Grid, base: &[u8], out: &mut [i16]) = expected_any;
}

super::for_every_level! {
    /// Returns the predicted codes of a row: `(row + columns[j]) * steps / 4`. Without columns, each prediction is `row
    /// * steps / 4`.
    pub fn expected_of_row / expected_of_row_at(grid: &Grid, row: i32, columns: &[i8], out: &mut [i16]) = expected_of_row_any;
}

super::for_every_level! {
    /// Returns the symbol of each code: its difference from the prediction.
    pub fn symbols / symbols_at(codes: &[i16], expected: &[i16], out: &mut [u8]) = symbols_any;
}

super::for_every_level! {
    /// Packs the sign bit of each number that is not an escape, least significant bit first. With a base, signs are
    /// XORed with the signs of the base.
    pub fn signs / signs_at(symbols: &[u8], data: &[u8], base: Option<&[u8]>, out: &mut [u8]) = signs_any;
}

super::for_every_level! {
    /// Decodes symbols to numbers without signs; escapes become zero. Returns false if a code is outside the grid.
    pub fn numbers / numbers_at(grid: &Grid, symbols: &[u8], expected: &[i16], out: &mut [u8]) -> bool = numbers_any;
}

super::for_every_level! {
    /// Applies signs. Returns false if an escape has a sign. The caller checks unused bits.
    pub fn put_signs / put_signs_at(symbols: &[u8], signs: &[u8], base: Option<&[u8]>, out: &mut [u8]) -> bool = put_signs_any;
}

#[inline(always)]
fn quantize_any(grid: &Grid, data: &[u8], out: &mut [u8]) {
    let end = grid.codes().end;
    for (data, out) in data.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<4>().0) {
        let bits = word(*data);
        let magnitude = bits & MAGNITUDE;
        let code = grid.nearest(magnitude);
        let moves = (1..255).contains(&(magnitude >> 23)) & (code < end);
        let moved = grid.magnitude(code) | bits & !MAGNITUDE;
        *out = bytes(if moves { moved } else { bits });
    }
}

#[inline(always)]
fn codes_any(grid: &Grid, data: &[u8], out: &mut [i16]) {
    for (data, out) in data.as_chunks::<4>().0.iter().zip(out) {
        let magnitude = word(*data) & MAGNITUDE;
        let code = grid.nearest(magnitude);
        let is_on = (1..255).contains(&(magnitude >> 23)) & (grid.magnitude(code) == magnitude);
        let other = if magnitude == 0 { NO_CODE_ZERO } else { NO_CODE };
        *out = if is_on { code as i16 } else { other };
    }
}

#[inline(always)]
fn expected_any(grid: &Grid, base: &[u8], out: &mut [i16]) {
    for (base, out) in base.as_chunks::<4>().0.iter().zip(out) {
        *out = grid.expected(word(*base)) as i16;
    }
}

#[inline(always)]
fn expected_of_row_any(grid: &Grid, row: i32, columns: &[i8], out: &mut [i16]) {
    // A prediction beyond `i16` is farther from every code than a symbol can express.
    let at = |quarters: i32| ((quarters << grid.log2) >> 2).min(i32::from(i16::MAX)) as i16;
    if columns.is_empty() {
        out.fill(at(row));
    }
    for (&column, out) in columns.iter().zip(out) {
        *out = at(row + i32::from(column));
    }
}

#[inline(always)]
fn symbols_any(codes: &[i16], expected: &[i16], out: &mut [u8]) {
    for ((&code, &expected), out) in codes.iter().zip(expected).zip(out) {
        let difference = i32::from(code) - i32::from(expected);
        let fits = (-126..=127).contains(&difference) & (code >= 0);
        let other = if code == NO_CODE_ZERO { ZERO } else { ESCAPE };
        *out = if fits { difference as u8 } else { other };
    }
}

/// Packs the sign bits of up to eight numbers, least significant bit first.
#[inline(always)]
fn sign_bits(data: &[u8]) -> u8 {
    let mut units = [[0u8; 4]; 8];
    for (slot, unit) in units.iter_mut().zip(data.as_chunks::<4>().0) {
        *slot = *unit;
    }
    units.iter().enumerate().fold(0, |bits, (at, unit)| bits | (unit[3] >> 7) << at)
}

#[inline(always)]
fn signs_any(symbols: &[u8], data: &[u8], base: Option<&[u8]>, out: &mut [u8]) {
    let mut bases = base.unwrap_or_default().chunks(32);
    for ((symbols, data), out) in symbols.chunks(8).zip(data.chunks(32)).zip(out) {
        let base = bases.next().unwrap_or_default();
        let mut byte = sign_bits(data) ^ sign_bits(base);
        for (bit, _) in symbols.iter().enumerate().filter(|(_, symbol)| **symbol == ESCAPE) {
            byte &= !(1 << bit);
        }
        *out = byte;
    }
}

#[inline(always)]
fn numbers_any(grid: &Grid, symbols: &[u8], expected: &[i16], out: &mut [u8]) -> bool {
    let range = grid.codes();
    let mut good = true;
    for ((&symbol, &expected), out) in symbols.iter().zip(expected).zip(out.as_chunks_mut::<4>().0) {
        let is_code = symbol != ZERO && symbol != ESCAPE;
        let code = i32::from(expected) + i32::from(symbol as i8);
        good &= !is_code | range.contains(&code);
        *out = bytes(if is_code { grid.magnitude(code) } else { 0 });
    }
    good
}

#[inline(always)]
fn put_signs_any(symbols: &[u8], signs: &[u8], base: Option<&[u8]>, out: &mut [u8]) -> bool {
    let mut good = true;
    let mut bases = base.unwrap_or_default().chunks(32);
    for ((symbols, &signs), out) in symbols.chunks(8).zip(signs).zip(out.chunks_mut(32)) {
        let theirs = sign_bits(bases.next().unwrap_or_default());
        let ours = u32::from(signs ^ theirs);
        for (at, unit) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *unit = bytes(word(*unit) | (ours >> at & 1) << 31);
        }
        // Escapes are written later, with their own signs.
        let escapes = symbols.iter().enumerate().fold(0, |bits, (at, symbol)| bits | u8::from(*symbol == ESCAPE) << at);
        good &= signs & escapes == 0;
    }
    good
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;

    fn numbers_of_all_kinds() -> Vec<u8> {
        let mut x = 5u64;
        let mut random = || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 32) as u32
        };
        let edges = [0, 1, 0x7f_ffff, 0x80_0000, 0x3f80_0000, 0x7f7f_ffff, 0x7f80_0000, 0x7fc0_0001];
        let signed = edges.into_iter().flat_map(|bits| [bits, bits | 1 << 31]);
        signed.chain((0..5000).map(|_| random())).flat_map(bytes).collect()
    }

    #[test]
    fn the_table_is_that_of_the_powers_of_two() {
        for (k, &mantissa) in MANTISSAS.iter().enumerate() {
            assert_eq!(mantissa, (((k as f64 / 128.0).exp2() - 1.0) * 8_388_608.0).round() as u32);
        }
    }

    #[test]
    fn the_nearest_is_within_the_bound_and_none_is_nearer() {
        for log2 in 0..=MAX_LOG2 {
            let grid = Grid::new(log2);
            let ratio = (1.0 / f64::from(1 << log2)).exp2();
            for fraction in (0..=FRACTION).step_by(331) {
                let magnitude = 127 << 23 | fraction;
                let x = f64::from(f32::from_bits(magnitude));
                let code = grid.nearest(magnitude);
                let error = |code: i32| (f64::from(f32::from_bits(grid.magnitude(code))) - x).abs();
                assert!(error(code) / x <= (ratio - 1.0) / (ratio + 1.0) + 1e-7, "{log2} {fraction}");
                assert!(error(code) <= error(code - 1) && error(code) <= error(code + 1), "{log2} {fraction}");
            }
        }
    }

    #[test]
    fn what_is_on_the_grid_stays_and_all_levels_agree() {
        let data = numbers_of_all_kinds();
        let units = data.len() / 4;
        for log2 in 0..=MAX_LOG2 {
            let grid = Grid::new(log2);
            let mut moved = vec![0; data.len()];
            quantize_at(Level::Scalar, &grid, &data, &mut moved);
            let mut again = vec![0; data.len()];
            quantize_at(Level::Scalar, &grid, &moved, &mut again);
            assert!(again == moved, "a second rounding changes nothing");
            let mut base = moved.clone();
            base.rotate_left(4);
            let mut found = vec![0; units];
            let mut near = vec![0; units];
            codes_at(Level::Scalar, &grid, &moved, &mut found);
            expected_at(Level::Scalar, &grid, &base, &mut near);
            let mut of = vec![0; units];
            symbols_at(Level::Scalar, &found, &near, &mut of);
            let mut bits = vec![0; units.div_ceil(8)];
            signs_at(Level::Scalar, &of, &moved, Some(&base), &mut bits);
            for level in Level::available() {
                let mut bytes = vec![0; data.len()];
                quantize_at(level, &grid, &data, &mut bytes);
                assert!(bytes == moved, "{level:?}");
                let mut other = vec![0; units];
                codes_at(level, &grid, &moved, &mut other);
                assert!(other == found, "{level:?}");
                expected_at(level, &grid, &base, &mut other);
                assert!(other == near, "{level:?}");
                let mut symbols = vec![0; units];
                symbols_at(level, &found, &near, &mut symbols);
                assert!(symbols == of, "{level:?}");
                let mut signs = vec![0; bits.len()];
                signs_at(level, &of, &moved, Some(&base), &mut signs);
                assert!(signs == bits, "{level:?}");
                assert!(numbers_at(level, &grid, &of, &near, &mut bytes), "{level:?}");
                assert!(put_signs_at(level, &of, &bits, Some(&base), &mut bytes), "{level:?}");
                let pairs = bytes.as_chunks::<4>().0.iter().zip(moved.as_chunks::<4>().0).zip(&of);
                for ((ours, theirs), symbol) in pairs.filter(|(_, symbol)| **symbol != ESCAPE) {
                    assert_eq!(ours, theirs, "{level:?} {symbol}");
                }
            }
        }
    }
}
