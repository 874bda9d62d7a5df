//! Two states side by side: matches their tensors by name and reads their elements in bounded memory.

use std::collections::BTreeMap;
use std::ops::Range;

use tensorcask::blocking::Snapshot;
use tensorcask::{Dtype, Error, Result, Slice, TensorView};

/// Two states to compare.
#[derive(Debug)]
pub(crate) enum Pair<'a> {
    /// Snapshots of a store.
    Snapshots([&'a Snapshot; 2]),
    /// Tensors of memory-mapped files.
    Views([Vec<TensorView<'a>>; 2]),
}

/// Description of a tensor, without its elements.
#[derive(Debug, Clone)]
pub(crate) struct Described {
    pub name: String,
    pub role: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
}

/// Maximum number of bytes of a tensor that are read at once.
const WINDOW_BYTES: u64 = 64 << 20;

impl Pair<'_> {
    /// Returns all tensors by name, described as in the second state if it has them. The text says why a tensor cannot
    /// be compared.
    pub(crate) fn tensors(&self) -> Vec<(Described, Option<&'static str>)> {
        let mut sides: BTreeMap<String, [Option<Described>; 2]> = BTreeMap::new();
        for side in 0..2 {
            for tensor in self.side(side) {
                let name = tensor.name.clone();
                sides.entry(name).or_default()[side] = Some(tensor);
            }
        }
        let matched = sides.into_values().filter_map(|pair| match pair {
            [Some(old), Some(new)] if old.dtype != new.dtype => Some((new, Some("retyped"))),
            [Some(old), Some(new)] if old.shape != new.shape => Some((new, Some("reshaped"))),
            [Some(_), Some(new)] => Some((new, None)),
            [Some(old), None] => Some((old, Some("removed"))),
            [None, Some(new)] => Some((new, Some("added"))),
            [None, None] => None,
        });
        matched.collect()
    }

    fn side(&self, side: usize) -> Vec<Described> {
        match self {
            Self::Snapshots(pair) => {
                let tensors = pair[side].tensors().into_iter();
                tensors.map(|t| Described { name: t.name, role: t.role, dtype: t.dtype, shape: t.shape }).collect()
            }
            Self::Views(pair) => {
                let describe = |view: &TensorView<'_>| Described {
                    name: view.name().to_owned(),
                    role: view.role().to_owned(),
                    dtype: view.dtype(),
                    shape: view.shape().to_vec(),
                };
                pair[side].iter().map(describe).collect()
            }
        }
    }

    /// Reads a tensor that both states have, in row-major windows. Calls `visit` with the number of elements and their
    /// bytes in both states.
    pub(crate) fn each_window(&self, tensor: &Described, mut visit: impl FnMut(u64, &[u8], &[u8])) -> Result<()> {
        let differ = || Error::invalid("the two states returned different lengths for one slice").tensor(&tensor.name);
        match self {
            Self::Snapshots([a, b]) => {
                for ranges in windows(tensor.dtype, &tensor.shape) {
                    let elements = ranges.iter().map(|range| range.end - range.start).product();
                    let slice = Slice::ranges(ranges);
                    let old = a.read(&tensor.name, &slice)?;
                    let new = b.read(&tensor.name, &slice)?;
                    if old.data.len() != new.data.len() {
                        return Err(differ());
                    }
                    visit(elements, &old.data, &new.data);
                }
            }
            Self::Views([a, b]) => {
                let find = |side: &[TensorView<'_>]| side.iter().position(|view| view.name() == tensor.name);
                let (Some(old), Some(new)) = (find(a), find(b)) else { return Err(differ()) };
                let old = a[old].data();
                let new = b[new].data();
                if old.len() != new.len() {
                    return Err(differ());
                }
                visit(tensor.shape.iter().product(), old, new);
            }
        }
        Ok(())
    }
}

/// Splits a tensor into boxes of at most about a window, in row-major order.
fn windows(dtype: Dtype, shape: &[u64]) -> Box<dyn Iterator<Item = Vec<Range<u64>>> + '_> {
    let window_elements = WINDOW_BYTES * 8 / dtype.bits();
    let elements = |extents: &[u64]| extents.iter().fold(1u64, |product, &extent| product.saturating_mul(extent));
    if shape.contains(&0) {
        return Box::new(std::iter::empty());
    }
    // Cut at the first dimension of which one index fits into a window. Dimensions before it are visited index by
    // index.
    let cut = (0..shape.len()).find(|&at| elements(&shape[at + 1..]) <= window_elements);
    let Some(cut) = cut else { return Box::new(std::iter::once(vec![])) };
    let step = (window_elements / elements(&shape[cut + 1..])).clamp(1, shape[cut]);
    let per_row = shape[cut].div_ceil(step);
    Box::new((0..elements(&shape[..cut]) * per_row).map(move |window| {
        let row = window / per_row;
        let start = window % per_row * step;
        let before = (0..cut).map(|at| row / elements(&shape[at + 1..cut]) % shape[at]).map(|index| index..index + 1);
        let after = shape[cut + 1..].iter().map(|&extent| 0..extent);
        before.chain(std::iter::once(start..(start + step).min(shape[cut]))).chain(after).collect()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_a_tensor_once() {
        let pairs = |ranges: Vec<Range<u64>>| ranges.into_iter().map(|range| (range.start, range.end)).collect::<Vec<_>>();
        let of = |dtype, shape: &[u64]| windows(dtype, shape).map(pairs).collect::<Vec<_>>();
        let window = WINDOW_BYTES;
        assert_eq!(of(Dtype::F32, &[]), [vec![]], "a scalar");
        assert!(of(Dtype::F32, &[0, 3]).is_empty());
        assert_eq!(of(Dtype::F32, &[10, 20]), [[(0, 10), (0, 20)]]);
        assert_eq!(of(Dtype::U8, &[window + 1]), [[(0, window)], [(window, window + 1)]]);
        assert_eq!(of(Dtype::U8, &[3, window]), [0, 1, 2].map(|row| [(row, row + 1), (0, window)]));
        let long = of(Dtype::U8, &[2, 2, window + 1]);
        let expected = [(0, 0), (0, 1), (1, 0), (1, 1)]
            .into_iter()
            .flat_map(|(a, b)| [(0, window), (window, window + 1)].map(|columns| [(a, a + 1), (b, b + 1), columns]));
        assert_eq!(long, expected.collect::<Vec<_>>());
    }
}
