//! Memory that Python lends: whole buffers of bytes, read or written without a copy and without the interpreter lock.
#![allow(unsafe_code, reason = "a buffer's bytes as a slice; the only place of the package that needs it")]

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use rayon::prelude::*;

/// A buffer to read from. Its memory stays where it is for as long as this lives.
pub(crate) struct Source(PyBuffer<u8>);

/// A buffer to write into.
pub(crate) struct Target(PyBuffer<u8>);

impl Source {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        whole(object).map(Self)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        if self.0.len_bytes() == 0 {
            return &[];
        }
        // SAFETY: the export keeps `len_bytes` contiguous bytes at `buf_ptr` alive and in place until the PyBuffer is released,
        // which the lifetime of the slice precedes. That nobody writes meanwhile is what the caller of a save promises, as
        // for every function that reads a buffer without the interpreter lock.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast(), self.0.len_bytes()) }
    }
}

impl Target {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = whole(object)?;
        match buffer.readonly() {
            true => Err(PyValueError::new_err("the buffer to read into is read-only")),
            false => Ok(Self(buffer)),
        }
    }

    fn start(&self) -> usize {
        self.0.buf_ptr() as usize
    }
}

/// The bytes of buffers to write into, which must not overlap.
pub(crate) fn writable(targets: &mut [Target]) -> PyResult<Vec<&mut [u8]>> {
    let mut order: Vec<(usize, usize)> = targets.iter().map(|t| (t.start(), t.0.len_bytes())).filter(|(_, length)| *length > 0).collect();
    order.sort_unstable();
    if order.iter().zip(order.iter().skip(1)).any(|(a, b)| a.0.saturating_add(a.1) > b.0) {
        return Err(PyValueError::new_err("two of the buffers to read into share memory"));
    }
    let slice = |target: &mut Target| {
        let (pointer, length) = (target.0.buf_ptr().cast::<u8>(), target.0.len_bytes());
        if length == 0 {
            return <&mut [u8]>::default();
        }
        // SAFETY: as in `Source::bytes`; the buffer is writable, and no two of these slices overlap. That nobody else uses the
        // memory meanwhile is what the caller of a load promises.
        unsafe { std::slice::from_raw_parts_mut(pointer, length) }
    };
    Ok(targets.iter_mut().map(slice).collect())
}

fn whole(object: &Bound<'_, PyAny>) -> PyResult<PyBuffer<u8>> {
    let buffer = PyBuffer::<u8>::get(object).map_err(|e| PyTypeError::new_err(format!("not a buffer of bytes: {e}")))?;
    match buffer.is_c_contiguous() {
        true => Ok(buffer),
        false => Err(PyValueError::new_err("the buffer is not contiguous")),
    }
}

/// Pieces in which copies are shared among threads.
const PIECE_BYTES: usize = 4 << 20;

/// A copy in pieces, for threads to share.
pub(crate) fn pieces<'t, 's>(target: &'t mut [u8], source: &'s [u8]) -> PyResult<impl Iterator<Item = (&'t mut [u8], &'s [u8])>> {
    match target.len() == source.len() {
        true => Ok(target.chunks_mut(PIECE_BYTES).zip(source.chunks(PIECE_BYTES))),
        false => Err(PyValueError::new_err("a buffer to copy into has another size")),
    }
}

/// Copies buffers into others of the same size, on the library's threads.
#[pyfunction]
pub(crate) fn copy_all(py: Python<'_>, pairs: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)>) -> PyResult<()> {
    let mut sources = Vec::with_capacity(pairs.len());
    let mut targets = Vec::with_capacity(pairs.len());
    for (target, source) in &pairs {
        targets.push(Target::new(target)?);
        sources.push(Source::new(source)?);
    }
    let targets = writable(&mut targets)?;
    let mut pieces = Vec::new();
    for (target, source) in targets.into_iter().zip(&sources) {
        pieces.extend(self::pieces(target, source.bytes())?);
    }
    py.detach(|| pieces.into_par_iter().for_each(|(target, source)| target.copy_from_slice(source)));
    Ok(())
}
