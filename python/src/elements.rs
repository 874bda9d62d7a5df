//! Element types by name, packed elements smaller than a byte, and patterns of names.

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorcask::Dtype;

use crate::buffer::Source;
use crate::errors::raise;

/// Returns name and bits of every element type.
#[pyfunction]
pub(crate) fn dtypes() -> Vec<(&'static str, u64)> {
    Dtype::ALL.iter().map(|dtype| (dtype.name(), dtype.bits())).collect()
}

/// Packs elements that take one byte each.
#[pyfunction]
pub(crate) fn pack<'py>(py: Python<'py>, dtype: &str, elements: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let bits = packed_bits(dtype)?;
    let source = Source::new(elements)?;
    let packed = py.detach(|| {
        let mut packed = vec![0u8; (source.bytes().len() * bits).div_ceil(8)];
        for (at, element) in source.bytes().iter().enumerate() {
            for bit in 0..bits {
                let position = at * bits + bit;
                packed[position / 8] |= (element >> bit & 1) << (position % 8);
            }
        }
        packed
    });
    Ok(PyBytes::new(py, &packed))
}

/// Unpacks elements to one byte each. `signed` elements keep their sign in the upper bits.
#[pyfunction]
pub(crate) fn unpack<'py>(
    py: Python<'py>,
    dtype: &str,
    packed: &Bound<'py, PyAny>,
    count: usize,
    signed: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    let bits = packed_bits(dtype)?;
    let source = Source::new(packed)?;
    if count.checked_mul(bits).map(|bits| bits.div_ceil(8)) != Some(source.bytes().len()) {
        return Err(PyValueError::new_err(format!("{} bytes do not hold {count} elements of {dtype}", source.bytes().len())));
    }
    let elements = py.detach(|| {
        let element = |at: usize| {
            let bit = |bit: usize| source.bytes()[(at * bits + bit) / 8] >> ((at * bits + bit) % 8) & 1;
            let value = (0..bits).fold(0u8, |value, at| value | bit(at) << at);
            let negative = signed && value >> (bits - 1) == 1;
            if negative { value | 0xff << bits } else { value }
        };
        (0..count).map(element).collect::<Vec<u8>>()
    });
    Ok(PyBytes::new(py, &elements))
}

fn packed_bits(dtype: &str) -> PyResult<usize> {
    let found = Dtype::from_name(dtype).map_err(|e| raise(&e))?;
    match found.is_packed() {
        true => Ok(found.bits() as usize),
        false => Err(PyValueError::new_err(format!("{dtype} is not packed"))),
    }
}

/// Returns for each name whether a pattern matches it, and the patterns that match no name. `*` stands for any
/// characters.
#[pyfunction]
pub(crate) fn matching(names: Vec<String>, patterns: Vec<String>) -> PyResult<(Vec<bool>, Vec<String>)> {
    let bad = |e: globset::Error| PyValueError::new_err(format!("tensors: {e}"));
    let mut set = GlobSetBuilder::new();
    for pattern in &patterns {
        set.add(GlobBuilder::new(pattern).build().map_err(bad)?);
    }
    let set: GlobSet = set.build().map_err(bad)?;
    let mut used = vec![false; patterns.len()];
    let mut selected = Vec::with_capacity(names.len());
    for name in &names {
        // A name may contain characters that are special in patterns.
        let exact = patterns.iter().position(|pattern| pattern == name);
        let found = set.matches(name);
        selected.push(exact.is_some() || !found.is_empty());
        found.into_iter().chain(exact).for_each(|at| used[at] = true);
    }
    let unused = patterns.into_iter().zip(used).filter(|(_, used)| !used).map(|(pattern, _)| pattern).collect();
    Ok((selected, unused))
}
