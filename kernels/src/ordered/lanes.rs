//! Differences, tokens and extra bits in blocks. Lanes have the narrowest type that fits: a vector holds twice as many
//! 16-bit lanes as 32-bit lanes.

/// Number of elements per step, so that all that is computed of them stays in the first-level cache.
pub(super) const BLOCK: usize = 1024;

/// Zigzag differences below this value are tokens themselves.
pub(super) const LITERALS: u32 = 16;

/// Unsigned integer of `W` bytes, in the byte order of elements.
pub(super) trait Unit<const W: usize>: Copy {
    fn get(bytes: [u8; W]) -> u32;
    fn put(value: u32) -> [u8; W];
}
macro_rules! unit {
    ($type:ty, $width:literal) => {
        #[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
        impl Unit<$width> for $type {
            #[inline(always)]
            fn get(bytes: [u8; $width]) -> u32 {
                u32::from(<$type>::from_le_bytes(bytes))
            }
            #[inline(always)]
            fn put(value: u32) -> [u8; $width] {
                (value as $type).to_le_bytes()
            }
        }
    };
}
unit!(u8, 1);
unit!(u16, 2);
unit!(u32, 4);

/// Returns the number of extra bits of a token.
#[inline(always)]
pub fn extra_bits(token: u8) -> u32 {
    u32::from((token >> 3).max(1).wrapping_sub(1))
}

/// Returns the token of a difference. A token of 16 or more holds the position of the top bit and the next three bits.
#[inline(always)]
fn token(z: u32) -> u8 {
    // The conversion to binary32 finds the top bit. Clearing the eighth bit below the top bit keeps a carry of its
    // rounding away from the bits of the token; halving keeps the sign bit clear.
    let half = z >> 1;
    let bits = ((half & !(half >> 8)) as i32 as f32).to_bits();
    // The exponent of 8 is 130. The token of 16 is 16.
    let bucket = (bits >> 20).wrapping_sub(130 * 8 - LITERALS);
    (if z < LITERALS { z } else { bucket }) as u8
}

/// Returns whether so few tokens are `least` or more that they are better handled one by one.
#[inline(always)]
fn are_few(tokens: &[u8], least: u8) -> bool {
    count_from(tokens, least) <= tokens.len() / 16
}

/// Returns the number of tokens that are `least` or more.
#[inline(always)]
fn count_from(tokens: &[u8], least: u8) -> usize {
    tokens.iter().map(|&token| u32::from(token >= least)).fold(0, u32::wrapping_add) as usize
}

/// Calls `act` with the position of each token that is `least` or more. `find` gives their bits among 64 tokens.
#[inline(always)]
fn for_each_from(tokens: &[u8], least: u8, find: impl Fn(&[u8; 64], u8) -> u64, mut act: impl FnMut(usize, u8)) {
    let (groups, rest) = tokens.as_chunks::<64>();
    for (group, tokens) in groups.iter().enumerate() {
        let mut found = find(tokens, least);
        while found != 0 {
            let at = found.trailing_zeros() as usize & 63;
            act(group.wrapping_mul(64).wrapping_add(at), tokens[at]);
            found &= found.wrapping_sub(1);
        }
    }
    let first = tokens.len() - rest.len();
    (first..).zip(rest).filter(|(_, token)| **token >= least).for_each(|(at, &token)| act(at, token));
}

/// Returns a bit for each token that is `least` or more. `least` is at most 128.
#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: the position of a byte in a word is its order")]
pub(super) fn find(tokens: &[u8; 64], least: u8) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let mut found = 0;
    for word in tokens.as_chunks::<8>().0.iter().rev() {
        let bytes = u64::from_le_bytes(*word);
        // The sum has the top bit of each byte whose lower bits are `least` or more.
        let sum = (bytes & (0x7f * ONES)).wrapping_add(u64::from(0x80u8.wrapping_sub(least)).wrapping_mul(ONES));
        // Bit 8i of the word, times 2^(56 - 7i) in the factor, lands in bit 56 + i.
        let bits = ((sum | bytes) >> 7 & ONES).wrapping_mul(0x0102_0408_1020_4080) >> 56;
        found = found << 8 | bits;
    }
    found
}

macro_rules! lanes {
    ($name:ident, $lane:ty, $signed:ty) => {
        pub(super) mod $name {
            use crate::bits::{BitAppender, BitReader};
            use crate::ordered::lanes::{BLOCK, LITERALS, Unit, are_few, count_from, extra_bits, for_each_from, token};

            const BITS: u32 = <$lane>::BITS;
            /// Number of lanes in a word.
            const LANES: usize = 64 / BITS as usize;
            type Block = [$lane; BLOCK];

            /// Returns the ordered integer in the upper bits of a lane, with zeros below, so that all widths wrap
            /// alike.
            #[inline(always)]
            fn order<const W: usize>(unit: u32) -> $lane {
                let x = (unit as $lane) << (BITS - 8 * W as u32);
                let negative = ((x as $signed) >> (BITS - 1)) as $lane;
                // The complement of a negative number sets the bits below the integer; clear them.
                (x ^ (negative | 1 << (BITS - 1))) & <$lane>::MAX << (BITS - 8 * W as u32)
            }

            #[inline(always)]
            fn unorder<const W: usize>(x: $lane) -> u32 {
                let positive = ((x as $signed) >> (BITS - 1)) as $lane;
                u32::from((x ^ (!positive | 1 << (BITS - 1))) >> (BITS - 8 * W as u32))
            }

            #[inline(always)]
            pub(in super::super) fn differences<U: Unit<W>, const W: usize>(base: &[u8], data: &[u8], out: &mut [$lane]) {
                for ((slot, base), new) in out.iter_mut().zip(base.as_chunks::<W>().0).zip(data.as_chunks::<W>().0) {
                    let difference = order::<W>(U::get(*new)).wrapping_sub(order::<W>(U::get(*base))) as $signed >> (BITS - 8 * W as u32);
                    let zigzag = (difference as $lane) << 1 ^ (difference >> (BITS - 1)) as $lane;
                    *slot = zigzag & <$lane>::MAX >> (BITS - 8 * W as u32);
                }
            }

            /// Returns the unit at a difference from the base.
            #[inline(always)]
            fn sum<const W: usize>(base: u32, z: $lane) -> u32 {
                let difference = (z >> 1) ^ (z & 1).wrapping_neg();
                unorder::<W>(order::<W>(base).wrapping_add(difference << (BITS - 8 * W as u32)))
            }

            /// Returns a mask of a token's extra bits.
            #[inline(always)]
            fn mask_of(token: u8) -> $lane {
                !(<$lane>::MAX << (extra_bits(token) & (BITS - 1)))
            }

            /// Returns the smallest difference of a token. Its extra bits are zero.
            #[inline(always)]
            pub(in super::super) fn least(token: u8) -> $lane {
                let buckets = <$lane>::from(8 | token & 7) << (extra_bits(token) & (BITS - 1));
                if token < 8 { <$lane>::from(token) } else { buckets }
            }

            #[inline(always)]
            fn join(lanes: &[$lane; LANES]) -> u64 {
                let mut word = 0;
                for (at, &lane) in (0u32..).zip(lanes) {
                    word |= u64::from(lane) << BITS.wrapping_mul(at);
                }
                word
            }

            #[inline(always)]
            fn split(word: u64, lanes: &mut [$lane; LANES]) {
                for (at, lane) in (0u32..).zip(lanes) {
                    *lane = (word >> BITS.wrapping_mul(at)) as $lane;
                }
            }

            #[inline(always)]
            fn to_tokens(block: &Block, out: &mut [u8]) {
                for (slot, &z) in out.iter_mut().zip(block) {
                    *slot = token(u32::from(z));
                }
            }

            #[inline(always)]
            pub(in super::super) fn tokens<U: Unit<W>, const W: usize>(base: &[u8], data: &[u8], out: &mut [u8]) {
                let mut block: Block = [0; BLOCK];
                let inputs = base.chunks(BLOCK * W).zip(data.chunks(BLOCK * W));
                for (out, (base, data)) in out.chunks_mut(BLOCK).zip(inputs) {
                    differences::<U, W>(base, data, &mut block);
                    to_tokens(&block, out);
                }
            }

            #[inline(always)]
            pub(in super::super) fn encode<U: Unit<W>, const W: usize>(
                base: &[u8],
                data: &[u8],
                tokens: &mut [u8],
                (extract, find): (impl Fn(u64, u64) -> u64, impl Fn(&[u8; 64], u8) -> u64 + Copy),
                bits: &mut BitAppender,
            ) {
                let (mut block, mut masks): (Block, Block) = ([0; BLOCK], [0; BLOCK]);
                let inputs = base.chunks(BLOCK * W).zip(data.chunks(BLOCK * W));
                let blocks = tokens.len().div_ceil(BLOCK);
                for (at, (tokens, (base, data))) in tokens.chunks_mut(BLOCK).zip(inputs).enumerate() {
                    differences::<U, W>(base, data, &mut block);
                    to_tokens(&block, tokens);
                    let large = count_from(tokens, LITERALS as u8);
                    if large == 0 {
                        continue;
                    }
                    let total = tokens.iter().map(|&token| extra_bits(token)).fold(0, u32::wrapping_add) as usize;
                    bits.reserve(total, blocks.wrapping_sub(at));
                    if large <= tokens.len() / 4 {
                        for_each_from(tokens, LITERALS as u8, find, |at, token| {
                            let z = block.get(at).copied().unwrap_or_default();
                            bits.put(u64::from(z & mask_of(token)), extra_bits(token));
                        });
                        continue;
                    }
                    for (mask, &token) in masks.iter_mut().zip(tokens.iter()) {
                        *mask = mask_of(token);
                    }
                    masks[tokens.len()..].fill(0);
                    let words = block.as_chunks::<LANES>().0.iter().zip(masks.as_chunks::<LANES>().0);
                    // A word has at most 56 bits under its mask.
                    let words = words.map(|(lanes, masks)| (extract(join(lanes), join(masks)), join(masks).count_ones()));
                    // SAFETY: there is room for the extra bits of all tokens of the block, and the masks are those of the
                    // tokens.
                    unsafe { bits.append(words) };
                }
            }

            /// With no base, `out` holds the base's units.
            #[inline(always)]
            pub(in super::super) fn apply<U: Unit<W>, const W: usize>(
                base: Option<&[u8]>,
                tokens: &[u8],
                reader: &mut BitReader<'_>,
                out: &mut [u8],
                (deposit, find): (impl Fn(u64, u64) -> u64, impl Fn(&[u8; 64], u8) -> u64 + Copy),
            ) {
                let (mut block, mut masks): (Block, Block) = ([0; BLOCK], [0; BLOCK]);
                let mut bases = base.map(|base| base.chunks(BLOCK * W));
                for (tokens, out) in tokens.chunks(BLOCK).zip(out.chunks_mut(BLOCK * W)) {
                    if let Some(bases) = &mut bases {
                        let base = bases.next().unwrap_or_default();
                        out.iter_mut().zip(base).for_each(|(slot, &byte)| *slot = byte);
                    }
                    if are_few(tokens, 1) {
                        let out = out.as_chunks_mut::<W>().0;
                        for_each_from(tokens, 1, find, |at, token| {
                            let extra = reader.peek() as $lane & mask_of(token);
                            reader.skip(extra_bits(token));
                            if let Some(unit) = out.get_mut(at) {
                                *unit = U::put(sum::<W>(U::get(*unit), least(token) | extra));
                            }
                        });
                        continue;
                    }
                    for (slot, &token) in block.iter_mut().zip(tokens) {
                        *slot = least(token);
                    }
                    let large = count_from(tokens, LITERALS as u8);
                    if large > 0 && large <= tokens.len() / 4 {
                        for_each_from(tokens, LITERALS as u8, find, |at, token| {
                            let extra = reader.peek() as $lane & mask_of(token);
                            reader.skip(extra_bits(token));
                            if let Some(z) = block.get_mut(at) {
                                *z |= extra;
                            }
                        });
                    } else if large > 0 {
                        for (mask, &token) in masks.iter_mut().zip(tokens) {
                            *mask = mask_of(token);
                        }
                        masks[tokens.len()..].fill(0);
                        let words = block.as_chunks_mut::<LANES>().0.iter_mut().zip(masks.as_chunks::<LANES>().0);
                        reader.take(words, |word, (lanes, masks)| {
                            let mask = join(masks);
                            // The bits under the mask are zero.
                            split(join(lanes) | deposit(word, mask), lanes);
                            mask.count_ones()
                        });
                    }
                    for (unit, &z) in out.as_chunks_mut::<W>().0.iter_mut().zip(&block) {
                        *unit = U::put(sum::<W>(U::get(*unit), z));
                    }
                }
            }
        }
    };
}
lanes!(narrow, u16, i16);
lanes!(wide, u32, i32);
