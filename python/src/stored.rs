//! Places of the bytes of tensors, and the check of bytes that Python has mapped.

use std::path::PathBuf;

use pyo3::prelude::*;
use tensorcask::{CopyReason, PartPlace, StoredPart, StoredTensor};

use crate::buffer::Source;
use crate::errors::raise;
use crate::snapshot::Snapshot;
use crate::wait::until_done;

/// Bytes that are checked between two looks for signals.
const CHECKED_BYTES: u64 = 1 << 30;

/// Tensors of a snapshot, with the places of their bytes.
#[pyclass(module = "tensorcask._native", frozen)]
pub(crate) struct StoredTensors(Vec<StoredTensor>);

/// Offset and shape of the shard, first element and end, size in bytes, path and first byte in the file, and reason of
/// a copy.
type Row = (Vec<u64>, Vec<u64>, u64, u64, u64, Option<PathBuf>, Option<u64>, Option<String>);

#[pymethods]
impl StoredTensors {
    /// Returns the parts of a tensor, by its number in the list.
    fn parts(&self, tensor: usize) -> Vec<Row> {
        self.0.get(tensor).map_or_else(Vec::new, |tensor| tensor.parts.iter().map(row).collect())
    }

    /// Returns number in the list, path, position in the file and size of each tensor that is one part of a file.
    fn files(&self) -> Vec<(usize, PathBuf, u64, u64)> {
        let file = |(number, tensor): (usize, &StoredTensor)| {
            let part = tensor.in_one_file()?;
            match &part.place {
                PartPlace::File { path, first_byte } => Some((number, path.clone(), *first_byte, part.bytes)),
                _ => None,
            }
        };
        self.0.iter().enumerate().filter_map(file).collect()
    }

    /// Compares the bytes of tensors of `files`, by their numbers in the list, with their checksums.
    fn check(&self, py: Python<'_>, mapped: Vec<(usize, Bound<'_, PyAny>)>) -> PyResult<()> {
        let mut parts = Vec::with_capacity(mapped.len());
        for (number, bytes) in &mapped {
            let part = self.0.get(*number).and_then(StoredTensor::in_one_file);
            let part = part.ok_or_else(|| raise(&tensorcask::Error::invalid(format!("tensor {number} is not in one file"))))?;
            parts.push((part, Source::new(bytes)?));
        }
        let parts: Vec<(&StoredPart, &[u8])> = parts.iter().map(|(part, source)| (*part, source.bytes())).collect();
        let mut rest = parts.as_slice();
        while !rest.is_empty() {
            let mut bytes = 0u64;
            let before = |(part, _): &&(&StoredPart, &[u8])| {
                let fits = bytes < CHECKED_BYTES;
                bytes = bytes.saturating_add(part.bytes);
                fits
            };
            let (batch, others) = rest.split_at(rest.iter().take_while(before).count());
            py.detach(|| StoredPart::check(batch)).map_err(|e| raise(&e))?;
            py.check_signals()?;
            rest = others;
        }
        Ok(())
    }
}

/// Finds the places of the bytes of tensors. Reads no tensor.
#[pyfunction]
pub(crate) fn stored_tensors(py: Python<'_>, snapshot: &Snapshot, names: Vec<String>) -> PyResult<StoredTensors> {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    py.detach(|| until_done(&snapshot.store, StoredTensor::list(&snapshot.inner, &names))).map(StoredTensors)
}

fn row(part: &StoredPart) -> Row {
    let (path, first_byte, reason) = match &part.place {
        PartPlace::File { path, first_byte } => (Some(path.clone()), Some(*first_byte), None),
        PartPlace::LogEntry => (None, None, Some("log entry".to_owned())),
        PartPlace::Copy(reason) => (None, None, Some(text_of(reason))),
        _ => (None, None, Some("unknown".to_owned())),
    };
    (part.shard.offset.clone(), part.shard.shape.clone(), part.elements.start, part.elements.end, part.bytes, path, first_byte, reason)
}

fn text_of(reason: &CopyReason) -> String {
    match reason {
        CopyReason::Delta => "delta".to_owned(),
        CopyReason::Codec(id) => format!("codec {id}"),
        CopyReason::NotLocal => "not local".to_owned(),
        _ => "unknown".to_owned(),
    }
}
