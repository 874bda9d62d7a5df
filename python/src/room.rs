//! Memory of Python that a restore of the engine fills, and functions of Python that read a restored tensor.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorcask::Error;
use tensorcask_engine::{Destination, Restored, RestoredTensor};

use crate::buffer::{Target, writable_some};

/// Question to Python about a state that was found: the step, a row for each tensor, and the blobs.
pub(crate) struct Question {
    step: u64,
    rows: Vec<Row>,
    blobs: Vec<(u32, String, Vec<u8>)>,
}

/// Name, dtype, global shape, first index and extent per dimension, the name of an earlier tensor that it is tied
/// to, and the name of the first tensor with the same bytes.
type Row = (String, &'static str, Vec<u64>, Vec<u64>, Vec<u64>, Option<String>, String);

/// Destination of a tensor.
pub(crate) enum Room {
    /// It is not wanted.
    Nowhere,
    /// Memory owned by Python.
    Memory(Target),
    /// A function of Python that reads it once the restore is done.
    Reader(Py<PyAny>),
}

/// Memory for a restore. Python provides it when the state to restore is known.
pub(crate) struct Memory {
    pub ask: Sender<Question>,
    pub answers: Receiver<Option<Vec<Room>>>,
    pub rooms: Vec<Room>,
}

impl Destination for Memory {
    fn prepare(&mut self, found: &Restored<'_>) -> tensorcask::Result<()> {
        // Two views of one memory that are not tied, because they have other shapes, have the same bytes.
        let mut places = HashMap::new();
        let row = |tensor: &RestoredTensor<'_>| {
            let first = tensor.tied_to.and_then(|first| found.tensors.get(first)).map(|first| first.name.clone());
            let offset = tensor.rect.offset.clone();
            let extent = tensor.rect.shape.clone();
            let data = &tensor.data;
            let same_bytes = match data.is_empty() {
                true => first.clone().unwrap_or_else(|| tensor.name.clone()),
                false => places.entry((data.as_ptr(), data.len())).or_insert_with(|| tensor.name.clone()).clone(),
            };
            (tensor.name.clone(), tensor.dtype.name(), tensor.shape.clone(), offset, extent, first, same_bytes)
        };
        let question = Question {
            step: found.step,
            rows: found.tensors.iter().map(row).collect(),
            blobs: found.blobs.iter().map(|blob| (blob.rank, blob.name.clone(), blob.data.to_vec())).collect(),
        };
        let refused = || Error::invalid("no buffer was given for the restored state");
        self.ask.send(question).map_err(|_| refused())?;
        self.rooms = self.answers.recv().ok().flatten().ok_or_else(refused)?;
        Ok(())
    }

    fn buffers(&mut self) -> tensorcask::Result<Vec<Option<&mut [u8]>>> {
        writable_rooms(&mut self.rooms).map_err(Error::invalid)
    }

    fn borrows(&self, tensor: usize) -> bool {
        matches!(self.rooms.get(tensor), Some(Room::Reader(_)))
    }
}

fn writable_rooms(rooms: &mut [Room]) -> Result<Vec<Option<&mut [u8]>>, &'static str> {
    writable_some(rooms.iter_mut().map(|room| match room {
        Room::Memory(target) => Some(target),
        Room::Nowhere | Room::Reader(_) => None,
    }))
}

/// Asks Python for the destinations of tensors.
pub(crate) fn rooms_of(py: Python<'_>, question: Question, places: &Py<PyAny>) -> PyResult<Vec<Room>> {
    let blobs: Vec<_> = question.blobs.iter().map(|(rank, name, data)| (rank, name, PyBytes::new(py, data))).collect();
    let given: Vec<Option<Bound<'_, PyAny>>> = places.bind(py).call1((question.step, question.rows, blobs))?.extract()?;
    let room = |given: Option<Bound<'_, PyAny>>| match given {
        None => Ok(Room::Nowhere),
        Some(reader) if reader.is_callable() => Ok(Room::Reader(reader.unbind())),
        Some(buffer) => Target::new(&buffer).map(Room::Memory),
    };
    let mut rooms = given.into_iter().map(room).collect::<PyResult<Vec<Room>>>()?;
    writable_rooms(&mut rooms).map_err(PyValueError::new_err)?;
    Ok(rooms)
}
