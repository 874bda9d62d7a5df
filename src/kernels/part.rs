//! Groups symbols by class, in their order, and restores the original sequence.
//!
//! The vector form compresses (and expands) 64 symbols in registers, once per class. The memory form of vector compress
//! is ten times slower on some processors. The scalar form of the inverse restores [`RUNS`] runs of symbols in turn, so
//! that no symbol waits for the position that the symbol before it, often of the same class, has just advanced.

use super::Level;
use super::ordered::MAX_CLASSES;
use crate::spare::Spare;

/// Symbols grouped by class. Room between the classes allows stores of whole vectors.
#[derive(Debug)]
pub(crate) struct Parted {
    symbols: Spare,
    /// Position of the first symbol of each class, in each run.
    starts: [[usize; MAX_CLASSES]; RUNS],
    counts: [usize; MAX_CLASSES],
    classes: usize,
}

/// Size of a vector in bytes.
const VECTOR: usize = 64;

/// Number of runs. The last may be longer than the others.
const RUNS: usize = 4;

/// Splits a slice into runs of equal length, and the rest of the last run.
fn runs<T>(all: &[T]) -> ([&[T]; RUNS], &[T]) {
    let length = all.len() / RUNS;
    (std::array::from_fn(|run| &all[run * length..][..length]), &all[RUNS * length..])
}

/// Like [`runs`].
fn runs_mut<T>(all: &mut [T]) -> ([&mut [T]; RUNS], &mut [T]) {
    let length = all.len() / RUNS;
    let (a, rest) = all.split_at_mut(length);
    let (b, rest) = rest.split_at_mut(length);
    let (c, rest) = rest.split_at_mut(length);
    let (d, rest) = rest.split_at_mut(length);
    ([a, b, c, d], rest)
}

/// Counts the symbols of each of the first `count` classes.
fn members_at(level: Level, classes: &[u8], count: usize) -> [usize; MAX_CLASSES] {
    let mut members = [0usize; MAX_CLASSES];
    let done = match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        Level::Avx512 => unsafe { x86::members(classes, count, &mut members) },
        _ => 0,
    };
    let rest = super::bytes::histogram(classes.get(done..).unwrap_or_default());
    for (sum, &n) in members.iter_mut().zip(&rest).take(count) {
        *sum = sum.wrapping_add(n as usize);
    }
    members
}

impl Parted {
    /// Reserves room for the symbols of `classes`, each below `count`. Returns `None` if memory is short.
    pub(crate) fn new(classes: &[u8], count: usize) -> Option<Self> {
        let (of_runs, rest) = runs(classes);
        let of_runs = of_runs.map(|run| members_at(Level::best(), run, count));
        let of_rest = members_at(Level::best(), rest, count);
        let (mut starts, mut counts, mut at) = ([[0; MAX_CLASSES]; RUNS], [0; MAX_CLASSES], 0);
        for class in 0..count.min(MAX_CLASSES) {
            let first = at;
            for (starts, members) in starts.iter_mut().zip(&of_runs) {
                starts[class] = at;
                at += members[class];
            }
            at += of_rest[class];
            counts[class] = at - first;
            at += VECTOR;
        }
        let symbols = Spare::new(at, "symbols by class").ok()?;
        Some(Self { symbols, starts, counts, classes: count.min(MAX_CLASSES) })
    }

    /// Symbols of a class.
    pub(crate) fn of(&self, class: usize) -> &[u8] {
        &self.symbols[self.starts[0][class]..][..self.counts[class]]
    }

    /// Symbols of a class, to be filled.
    pub(crate) fn of_mut(&mut self, class: usize) -> &mut [u8] {
        &mut self.symbols[self.starts[0][class]..][..self.counts[class]]
    }

    /// Appends each symbol to its class. `classes` must be the argument of [`Parted::new`].
    pub(crate) fn part(&mut self, classes: &[u8], symbols: &[u8]) {
        self.part_at(Level::best(), classes, symbols);
    }

    fn part_at(&mut self, level: Level, classes: &[u8], symbols: &[u8]) {
        let mut next = self.starts[0];
        let done = match level {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level says that the features were detected.
            Level::Avx512 => unsafe { x86::part(classes, symbols, self.classes, &mut next, &mut self.symbols) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Level::Avx2 => unsafe { x86::part_by_words(classes, symbols, self.classes, &mut next, &mut self.symbols) },
            Level::Scalar => 0,
        };
        for (&class, &symbol) in classes.iter().zip(symbols).skip(done) {
            let next = &mut next[usize::from(class) % MAX_CLASSES];
            if let Some(slot) = self.symbols.get_mut(*next) {
                *slot = symbol;
            }
            *next = next.wrapping_add(1);
        }
    }

    /// Inverts [`Parted::part`].
    pub(crate) fn join(&self, classes: &[u8], out: &mut [u8]) {
        self.join_at(Level::best(), classes, out);
    }

    fn join_at(&self, level: Level, classes: &[u8], out: &mut [u8]) {
        let mut next = self.starts;
        let done = match level {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level says that the features were detected.
            Level::Avx512 => unsafe { x86::join(classes, &self.symbols, self.classes, &mut next[0], out) },
            _ => 0,
        };
        let symbols = &self.symbols[..];
        let take = |next: &mut [usize; MAX_CLASSES], class: u8| {
            let next = &mut next[usize::from(class) % MAX_CLASSES];
            let symbol = symbols.get(*next).copied().unwrap_or_default();
            *next = next.wrapping_add(1);
            symbol
        };
        if done > 0 {
            classes.iter().zip(out).skip(done).for_each(|(&class, slot)| *slot = take(&mut next[0], class));
            return;
        }
        let (([a, b, c, d], rest), ([p, q, r, s], rest_of_out)) = (runs(classes), runs_mut(out));
        for (((((((&a, p), &b), q), &c), r), &d), s) in a.iter().zip(p).zip(b).zip(q).zip(c).zip(r).zip(d).zip(s) {
            *p = take(&mut next[0], a);
            *q = take(&mut next[1], b);
            *r = take(&mut next[2], c);
            *s = take(&mut next[3], d);
        }
        rest.iter().zip(rest_of_out).for_each(|(&class, slot)| *slot = take(&mut next[RUNS - 1], class));
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![allow(clippy::host_endian_bytes, reason = "a kernel for little-endian processors")]

    use std::arch::x86_64::*;

    use super::{MAX_CLASSES, VECTOR};
    use crate::kernels::bits::pick_bytes;

    /// Counts the members of classes in whole vectors. Returns the number of symbols counted.
    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn members(classes: &[u8], count: usize, members: &mut [usize; MAX_CLASSES]) -> usize {
        let vectors = classes.as_chunks::<VECTOR>().0;
        for vector in vectors {
            // SAFETY: a load of 64 bytes from an array of 64.
            let vector = unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) };
            for (class, sum) in (0i8..).zip(members.iter_mut().take(count)) {
                *sum = sum.wrapping_add(_mm512_cmpeq_epi8_mask(vector, _mm512_set1_epi8(class)).count_ones() as usize);
            }
        }
        vectors.len() * VECTOR
    }

    /// Groups whole vectors by class. Returns the number of symbols grouped.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
    pub(super) fn part(classes: &[u8], symbols: &[u8], count: usize, next: &mut [usize; MAX_CLASSES], out: &mut [u8]) -> usize {
        let (groups, _) = classes.as_chunks::<VECTOR>();
        let mut done = 0;
        for (class_group, symbol_group) in groups.iter().zip(symbols.as_chunks::<VECTOR>().0) {
            // SAFETY: loads of 64 bytes from arrays of 64.
            let (c, s) = unsafe { (_mm512_loadu_si512(class_group.as_ptr().cast()), _mm512_loadu_si512(symbol_group.as_ptr().cast())) };
            for (class, next) in (0i8..).zip(next.iter_mut().take(count)) {
                let mask = _mm512_cmpeq_epi8_mask(c, _mm512_set1_epi8(class));
                if let Some(room) = out.get_mut(*next..).and_then(|room| room.first_chunk_mut::<VECTOR>()) {
                    // SAFETY: a store of 64 bytes to an array of 64.
                    unsafe { _mm512_storeu_si512(room.as_mut_ptr().cast(), _mm512_maskz_compress_epi8(mask, s)) };
                }
                *next = next.wrapping_add(mask.count_ones() as usize);
            }
            done += VECTOR;
        }
        done
    }

    /// Groups whole vectors by class, a word of 8 symbols at a time. Returns the number of symbols grouped.
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn part_by_words(classes: &[u8], symbols: &[u8], count: usize, next: &mut [usize; MAX_CLASSES], out: &mut [u8]) -> usize {
        const WORD: usize = 8;
        const WORDS: usize = 4;
        let (groups, _) = classes.as_chunks::<{ WORDS * WORD }>();
        let mut done = 0;
        for (class_group, symbol_group) in groups.iter().zip(symbols.as_chunks::<{ WORDS * WORD }>().0) {
            // SAFETY: a load of 32 bytes from an array of 32.
            let c = unsafe { _mm256_loadu_si256(class_group.as_ptr().cast()) };
            for (class, next) in (0i8..).zip(next.iter_mut().take(count)) {
                let mask = _mm256_movemask_epi8(_mm256_cmpeq_epi8(c, _mm256_set1_epi8(class))) as u32;
                if let Some(room) = out.get_mut(*next..).and_then(|room| room.first_chunk_mut::<{ (WORDS + 1) * WORD }>()) {
                    let (mut left, mut at) = (mask, 0);
                    for symbols in symbol_group.as_chunks::<WORD>().0 {
                        let of_word = left as u8;
                        let picked = pick_bytes(u64::from_ne_bytes(*symbols), of_word);
                        // SAFETY: each of the words before moved `at` by 8 at most, so this store of 8 bytes ends within
                        // the 40 bytes of room.
                        unsafe { room.as_mut_ptr().add(at).cast::<u64>().write_unaligned(picked) };
                        at = at.wrapping_add(of_word.count_ones() as usize);
                        left >>= WORD;
                    }
                }
                *next = next.wrapping_add(mask.count_ones() as usize);
            }
            done += WORDS * WORD;
        }
        done
    }

    /// Joins whole vectors. Returns the number of symbols joined.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
    pub(super) fn join(classes: &[u8], parted: &[u8], count: usize, next: &mut [usize; MAX_CLASSES], out: &mut [u8]) -> usize {
        let (groups, _) = classes.as_chunks::<VECTOR>();
        let mut done = 0;
        for (class_group, out) in groups.iter().zip(out.as_chunks_mut::<VECTOR>().0) {
            // SAFETY: a load of 64 bytes from an array of 64.
            let c = unsafe { _mm512_loadu_si512(class_group.as_ptr().cast()) };
            let mut symbols = _mm512_setzero_si512();
            for (class, next) in (0i8..).zip(next.iter_mut().take(count)) {
                let mask = _mm512_cmpeq_epi8_mask(c, _mm512_set1_epi8(class));
                if let Some(some) = parted.get(*next..).and_then(|rest| rest.first_chunk::<VECTOR>()) {
                    // SAFETY: a load of 64 bytes from an array of 64.
                    let some = unsafe { _mm512_loadu_si512(some.as_ptr().cast()) };
                    symbols = _mm512_mask_expand_epi8(symbols, mask, some);
                }
                *next = next.wrapping_add(mask.count_ones() as usize);
            }
            // SAFETY: a store of 64 bytes to an array of 64.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), symbols) };
            done += VECTOR;
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_parts_alike_and_joins_back() {
        for count in [0usize, 1, 63, 64, 65, 200, 5000] {
            for classes in [1usize, 2, 7, MAX_CLASSES] {
                let symbols: Vec<u8> = (0..count).map(|i| ((i * i) >> 3) as u8).collect();
                let of: Vec<u8> = (0..count).map(|i| (i * 7919 % 251 % classes) as u8).collect();
                for level in Level::available() {
                    let mut parted = Parted::new(&of, classes).unwrap();
                    parted.part_at(level, &of, &symbols);
                    for class in 0..classes {
                        let expected: Vec<u8> =
                            of.iter().zip(&symbols).filter(|(c, _)| usize::from(**c) == class).map(|(_, s)| *s).collect();
                        assert!(parted.of(class) == expected, "{level:?}, class {class} of {classes}, {count} symbols");
                    }
                    let mut out = vec![0xaa; count];
                    parted.join_at(level, &of, &mut out);
                    assert!(out == symbols, "{level:?}, {classes} classes, {count} symbols");
                }
            }
        }
    }
}
