//! Symbols in classes by the exponent of the base: one plane for each class. `tc.ordered` stores its tokens so, and
//! `tc.gradient` its exponents. Spec: `spec/codecs/ordered.md`, clause 3.

use tensorcask_kernels::ordered::{self as kernel, Exponent, MAX_CLASSES};
use tensorcask_kernels::part::Parted;
use tensorcask_kernels::spare::{self, Spare};

use crate::entropy::{self, Histogram};
use crate::{Error, Result};

/// Greatest number of classes that a writer makes.
const CLASSES: usize = 10;

/// Elements whose exponents give the classes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Base<'a> {
    /// Bytes of an element.
    pub width: usize,
    pub exponent: Exponent,
    pub data: &'a [u8],
}

/// Clauses that errors name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clauses {
    pub bounds: &'static str,
    pub planes: &'static str,
}

/// Share of exact predictions, in percent, from which one class of tokens does as well as many.
pub(super) const ONE_CLASS_PERCENT: usize = 90;

/// Classes of the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenClasses {
    ByExponent,
    One,
}

impl TokenClasses {
    /// Classes for predictions of which this percentage is exact.
    pub(super) fn of(exact_percent: usize) -> Self {
        if exact_percent >= ONE_CLASS_PERCENT { Self::One } else { Self::ByExponent }
    }
}

/// Returns the last exponent of each class but the last. Adjacent exponents are merged, rarest first.
fn choose_bounds(histogram: &Histogram) -> Vec<u8> {
    let mut groups: Vec<(u8, u64)> =
        (0..=255u8).zip(histogram).filter(|(_, n)| **n > 0).map(|(exponent, n)| (exponent, u64::from(*n))).collect();
    let total: u64 = groups.iter().map(|(_, n)| n).sum();
    // A class needs enough members to pay for its table.
    let few = |groups: &[(u8, u64)], at: usize| groups[at].1 + groups[at + 1].1 < total / 64 + 256 || groups.len() > CLASSES;
    while let Some(at) = (0..groups.len().saturating_sub(1)).min_by_key(|&at| groups[at].1 + groups[at + 1].1)
        && few(&groups, at)
    {
        let (_, count) = groups.remove(at);
        groups[at].1 += count;
    }
    groups.pop();
    groups.into_iter().map(|(exponent, _)| exponent).collect()
}

fn padded(bounds: &[u8]) -> [u8; MAX_CLASSES - 1] {
    let mut all = [u8::MAX; MAX_CLASSES - 1];
    for (slot, &bound) in all.iter_mut().zip(bounds) {
        *slot = bound;
    }
    all
}

/// Fills `classes` with the class of each element. Returns the bounds, chosen by `count`.
pub(super) fn choose(base: Base<'_>, classes: &mut [u8], count: impl Fn(&[u8]) -> Histogram) -> Vec<u8> {
    kernel::exponents(base.width, base.exponent, base.data, classes);
    let bounds = choose_bounds(&count(classes));
    kernel::classes(classes, &padded(&bounds));
    bounds
}

/// Encodes symbols, one for each element of the base.
pub(super) fn encode(base: Base<'_>, symbols: &[u8]) -> Result<Vec<u8>> {
    let mut classes = Spare::new(symbols.len(), "classes")?;
    let bounds = choose(base, &mut classes, entropy::count_about);
    let mut parted = parted(classes, bounds.len() + 1)?;
    parted.part(symbols);
    Ok(put(&bounds, symbols.len(), |class| parted.of(class)))
}

/// Encodes symbols in one class. If nearly all are equal, more classes only cost time.
pub(super) fn encode_as_one(symbols: &[u8]) -> Vec<u8> {
    put(&[], symbols.len() / 4, |_| symbols)
}

/// Writes bounds, lengths of planes, and planes.
fn put<'s>(bounds: &[u8], symbols: usize, plane: impl Fn(usize) -> &'s [u8]) -> Vec<u8> {
    let mut code = spare::output(symbols / 2);
    code.push(bounds.len() as u8);
    code.extend(bounds);
    let lengths_at = code.len();
    code.resize(lengths_at + 4 * (bounds.len() + 1), 0);
    for class in 0..=bounds.len() {
        let before = code.len();
        entropy::encode(plane(class), &mut code);
        let bytes = code.len() - before;
        for (i, slot) in code.iter_mut().skip(lengths_at + 4 * class).take(4).enumerate() {
            *slot = (bytes >> (8 * i)) as u8;
        }
    }
    code
}

/// Decodes the symbols of a base into `out`.
pub(super) fn decode(code: &[u8], base: Base<'_>, clauses: Clauses, out: &mut [u8]) -> Result<()> {
    let bad = |message: String, clause: &'static str| Error::corrupt(message).clause(clause);
    let (&count, rest) = code.split_first().ok_or_else(|| bad("no classes".into(), clauses.bounds))?;
    let count = usize::from(count);
    let header = rest.split_at_checked(count).and_then(|(bounds, rest)| Some((bounds, rest.split_at_checked(4 * (count + 1))?)));
    let (bounds, (lengths, mut planes)) =
        header.filter(|_| count < MAX_CLASSES).ok_or_else(|| bad(format!("{count} bounds of classes"), clauses.bounds))?;
    if !bounds.is_sorted_by(|a, b| a < b) || bounds.last() == Some(&u8::MAX) {
        return Err(bad("bounds of classes do not ascend".into(), clauses.bounds));
    }
    let mut classes = Spare::new(if count == 0 { 0 } else { out.len() }, "classes")?;
    if count > 0 {
        kernel::exponents(base.width, base.exponent, base.data, &mut classes);
        kernel::classes(&mut classes, &padded(bounds));
    }
    let mut parted = parted(classes, count + 1)?;
    for (class, length) in lengths.as_chunks::<4>().0.iter().enumerate() {
        let length = length.iter().rev().fold(0usize, |sum, &byte| sum << 8 | usize::from(byte));
        let (plane, rest) =
            planes.split_at_checked(length).ok_or_else(|| bad(format!("the plane of class {class} ends early"), clauses.planes))?;
        planes = rest;
        // The symbols of a single class are in the order of the elements.
        entropy::decode(plane, if count == 0 { &mut *out } else { parted.of_mut(class) })?;
    }
    if !planes.is_empty() {
        return Err(bad(format!("{} bytes after the planes", planes.len()), clauses.planes));
    }
    if count > 0 {
        parted.join(out);
    }
    Ok(())
}

fn parted(classes: Spare, count: usize) -> Result<Parted> {
    let symbols = classes.len();
    Parted::new(classes, count).ok_or_else(|| Error::limit(format!("no memory for {symbols} symbols")))
}
