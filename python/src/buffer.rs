//! Borrows memory from Python: whole buffers of bytes, read or written without a copy and without the interpreter lock.
#![allow(unsafe_code, reason = "a buffer's bytes as a slice; the only place of the package that needs it")]

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use rayon::prelude::*;

/// A buffer to read from. Its memory stays valid and in place while this value lives.
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
        // SAFETY: the export keeps `len_bytes` contiguous bytes at `buf_ptr` alive and in place until the PyBuffer is
        // released. The lifetime of the slice ends before that. The caller of a save guarantees that nobody writes to
        // the memory meanwhile, as for every function that reads a buffer without the interpreter lock.
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

/// Returns the bytes of buffers to write into. The buffers must not overlap.
pub(crate) fn writable_some<'t>(targets: impl Iterator<Item = Option<&'t mut Target>>) -> Result<Vec<Option<&'t mut [u8]>>, &'static str> {
    let targets: Vec<Option<&mut Target>> = targets.collect();
    let span = |target: &Target| (target.start(), target.0.len_bytes());
    let mut order: Vec<(usize, usize)> = targets.iter().flatten().map(|target| span(target)).filter(|(_, length)| *length > 0).collect();
    order.sort_unstable();
    if order.iter().zip(order.iter().skip(1)).any(|(a, b)| a.0.saturating_add(a.1) > b.0) {
        return Err("two of the buffers to read into share memory");
    }
    let slice = |target: &'t mut Target| {
        let pointer = target.0.buf_ptr().cast::<u8>();
        let length = target.0.len_bytes();
        if length == 0 {
            return <&mut [u8]>::default();
        }
        // SAFETY: as in `Source::bytes`; the buffer is writable, and no two of these slices overlap. The caller of a
        // load guarantees that nobody else uses the memory meanwhile.
        unsafe { std::slice::from_raw_parts_mut(pointer, length) }
    };
    Ok(targets.into_iter().map(|target| target.map(slice)).collect())
}

/// Does the same as [`writable_some`] for buffers that are all present.
pub(crate) fn writable(targets: &mut [Target]) -> PyResult<Vec<&mut [u8]>> {
    let slices = writable_some(targets.iter_mut().map(Some)).map_err(PyValueError::new_err)?;
    Ok(slices.into_iter().flatten().collect())
}

fn whole(object: &Bound<'_, PyAny>) -> PyResult<PyBuffer<u8>> {
    let buffer = PyBuffer::<u8>::get(object).map_err(|e| PyTypeError::new_err(format!("not a buffer of bytes: {e}")))?;
    match buffer.is_c_contiguous() {
        true => Ok(buffer),
        false => Err(PyValueError::new_err("the buffer is not contiguous")),
    }
}

/// Size of the pieces in which threads share a copy.
const PIECE_BYTES: usize = 4 << 20;

/// Copies buffers into others of the same sizes, on the library's threads.
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
        match target.len() == source.bytes().len() {
            true => pieces.extend(target.chunks_mut(PIECE_BYTES).zip(source.bytes().chunks(PIECE_BYTES))),
            false => return Err(PyValueError::new_err("a buffer to copy into has another size")),
        }
    }
    let copy = || pieces.into_par_iter().for_each(|(target, source)| target.copy_from_slice(source));
    py.detach(|| tensorcask::parallel::run(copy));
    Ok(())
}
