//! Groups symbols by class, in their order, and restores the original sequence.
//!
//! The form for AVX-512 compresses (and expands) 64 symbols in registers, once per class. The memory form of vector
//! compress is ten times slower on some processors. The other forms take a symbol of each of `RUNS` runs in turn, so
//! that no symbol waits for the position that the symbol before it, often of the same class, has just advanced.

use super::ordered::MAX_CLASSES;
use super::{Level, VECTOR_BYTES};
use crate::spare::Spare;

/// Symbols grouped by class. Room between the classes allows stores of whole vectors.
#[derive(Debug)]
pub struct Parted {
    /// Class of each symbol, below `class_count`.
    classes: Spare,
    symbols: Spare,
    /// Position of the first symbol of each class, in each run of `classes`. The symbols of a class follow one another
    /// within `symbols`.
    starts: [[usize; MAX_CLASSES]; RUNS],
    counts: [usize; MAX_CLASSES],
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only the forms for vectors ask for it"))]
    class_count: usize,
}

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
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { x86::members_avx2(classes, count, &mut members) },
        Level::Scalar => 0,
    };
    for &class in classes.iter().skip(done) {
        let sum = &mut members[usize::from(class) % MAX_CLASSES];
        *sum = sum.wrapping_add(usize::from(usize::from(class) < count));
    }
    members
}

/// Stores a symbol at the next position of its class.
#[inline(always)]
fn put(symbols: &mut [u8], next: &mut [usize; MAX_CLASSES], class: u8, symbol: u8) {
    let next = &mut next[usize::from(class) % MAX_CLASSES];
    if let Some(slot) = symbols.get_mut(*next) {
        *slot = symbol;
    }
    *next = next.wrapping_add(1);
}

impl Parted {
    /// Reserves room for the symbols of `classes`, each below `count`. Returns `None` if memory is short, or a class is
    /// not below `count`.
    pub fn new(classes: Spare, count: usize) -> Option<Self> {
        Self::new_at(Level::best(), classes, count)
    }

    fn new_at(level: Level, classes: Spare, count: usize) -> Option<Self> {
        let count = count.min(MAX_CLASSES);
        let (of_runs, rest) = runs(&classes);
        let of_runs = of_runs.map(|run| members_at(level, run, count));
        let of_rest = members_at(level, rest, count);
        let mut starts = [[0; MAX_CLASSES]; RUNS];
        let mut counts = [0; MAX_CLASSES];
        let mut at = 0;
        for class in 0..count {
            let first = at;
            for (starts, members) in starts.iter_mut().zip(&of_runs) {
                starts[class] = at;
                at += members[class];
            }
            at += of_rest[class];
            counts[class] = at - first;
            at += VECTOR_BYTES;
        }
        let symbols = Spare::new(at, "symbols by class").ok()?;
        let all_counted = counts.iter().sum::<usize>() == classes.len();
        all_counted.then_some(Self { classes, symbols, starts, counts, class_count: count })
    }

    /// Symbols of a class.
    pub fn of(&self, class: usize) -> &[u8] {
        &self.symbols[self.starts[0][class]..][..self.counts[class]]
    }

    /// Symbols of a class, to be filled.
    pub fn of_mut(&mut self, class: usize) -> &mut [u8] {
        &mut self.symbols[self.starts[0][class]..][..self.counts[class]]
    }

    /// Appends each symbol to its class. There are as many symbols as classes were given.
    pub fn part(&mut self, symbols: &[u8]) {
        self.part_at(Level::best(), symbols);
    }

    fn part_at(&mut self, level: Level, symbols: &[u8]) {
        debug_assert_eq!(symbols.len(), self.classes.len());
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                let mut next = self.starts[0];
                // SAFETY: the level says that the features were detected.
                let done = unsafe { x86::part(&self.classes, symbols, self.class_count, &mut next, &mut self.symbols) };
                for (&class, &symbol) in self.classes.iter().zip(symbols).skip(done) {
                    put(&mut self.symbols, &mut next, class, symbol);
                }
            }
            _ => self.part_runs(symbols),
        }
    }

    fn part_runs(&mut self, symbols: &[u8]) {
        let mut next = self.starts;
        let out = &mut self.symbols[..];
        let (([a, b, c, d], rest), ([p, q, r, s], rest_of_symbols)) = (runs(&self.classes), runs(symbols));
        for (((((((&a, &p), &b), &q), &c), &r), &d), &s) in a.iter().zip(p).zip(b).zip(q).zip(c).zip(r).zip(d).zip(s) {
            put(out, &mut next[0], a, p);
            put(out, &mut next[1], b, q);
            put(out, &mut next[2], c, r);
            put(out, &mut next[3], d, s);
        }
        rest.iter().zip(rest_of_symbols).for_each(|(&class, &symbol)| put(out, &mut next[RUNS - 1], class, symbol));
    }

    /// Inverts [`Parted::part`].
    pub fn join(&self, out: &mut [u8]) {
        self.join_at(Level::best(), out);
    }

    fn join_at(&self, level: Level, out: &mut [u8]) {
        match level {
            Level::Scalar => {
                let symbols = &self.symbols[..];
                self.join_runs(out, |at| symbols.get(at).copied().unwrap_or_default());
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                let symbols = self.symbols.as_ptr();
                // SAFETY: `join_runs` asks for a symbol of each class as often as the class has symbols, one after
                // another from its start. All of them are within `symbols`.
                self.join_runs(out, |at| unsafe { *symbols.add(at) });
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                let mut next = self.starts[0];
                // SAFETY: the level says that the features were detected.
                let done = unsafe { x86::join(&self.classes, &self.symbols, self.class_count, &mut next, out) };
                for (&class, slot) in self.classes.iter().zip(out).skip(done) {
                    let next = &mut next[usize::from(class) % MAX_CLASSES];
                    *slot = self.symbols.get(*next).copied().unwrap_or_default();
                    *next = next.wrapping_add(1);
                }
            }
        }
    }

    /// Fills `out` with the symbols at the next position of each class. No class is asked for more symbols than it has.
    #[inline(always)]
    fn join_runs(&self, out: &mut [u8], symbol: impl Fn(usize) -> u8) {
        let mut next = self.starts;
        let take = |next: &mut [usize; MAX_CLASSES], class: u8| {
            let next = &mut next[usize::from(class) % MAX_CLASSES];
            let symbol = symbol(*next);
            *next = next.wrapping_add(1);
            symbol
        };
        let Some(out) = out.get_mut(..self.classes.len()) else { return };
        let (([a, b, c, d], rest), ([p, q, r, s], rest_of_out)) = (runs(&self.classes), runs_mut(out));
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
mod x86;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_parts_alike_and_joins_back() {
        // A member is counted in a byte, which overflows after 255 vectors. 70,000 symbols are more vectors than that in each run.
        for count in [0usize, 1, 63, 64, 65, 200, 5000, 70_000] {
            for classes in [1usize, 2, 7, MAX_CLASSES] {
                let symbols: Vec<u8> = (0..count).map(|i| ((i * i) >> 3) as u8).collect();
                let of: Vec<u8> = (0..count).map(|i| (i * 7919 % 251 % classes) as u8).collect();
                let spare = || Spare::copy_of(&of).unwrap();
                if count > 7 && classes > 1 {
                    assert!(Parted::new(spare(), classes - 1).is_none(), "a class too many");
                }
                for level in Level::available() {
                    let mut parted = Parted::new_at(level, spare(), classes).unwrap();
                    parted.part_at(level, &symbols);
                    for class in 0..classes {
                        let expected: Vec<u8> =
                            of.iter().zip(&symbols).filter(|(c, _)| usize::from(**c) == class).map(|(_, s)| *s).collect();
                        assert!(parted.of(class) == expected, "{level:?}, class {class} of {classes}, {count} symbols");
                    }
                    let mut out = vec![0xaa; count];
                    parted.join_at(level, &mut out);
                    assert!(out == symbols, "{level:?}, {classes} classes, {count} symbols");
                }
            }
        }
    }
}
