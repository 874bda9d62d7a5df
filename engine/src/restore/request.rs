//! A restore under way: the requested step and tensors, the caller's memory, and the copies that were passed over.

use std::collections::{BTreeMap, HashMap};

use tensorcask::wire::DirectoryTensor;
use tensorcask::{Dtype, Error, ErrorKind, Rect, Result, SnapshotRecord, StepSelector, TensorView};

use super::agreement::AgreedStep;
use super::restored::{Destination, Part, PassedOver, Restored, Source};

/// Tensors to restore.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wanted<'w> {
    /// All tensors.
    Everything,
    /// A part of each of these tensors, by name.
    Parts(&'w BTreeMap<String, Part>),
}

/// A tensor of a snapshot, and the part to restore.
pub(crate) struct SelectedTensor {
    pub tensor: DirectoryTensor,
    /// Index of the tensor that holds the bytes: of the tensor itself, or of the one it is tied to.
    pub stored: usize,
    pub rect: Rect,
}

impl Wanted<'_> {
    /// Selects tensors of a raw state. Fails unless the state has exactly the wanted parts.
    pub(crate) fn select_from_slot<'a>(&self, tensors: Vec<TensorView<'a>>) -> Result<Vec<TensorView<'a>>> {
        let Self::Parts(parts) = self else { return Ok(tensors) };
        let is_part = |tensor: &TensorView<'_>, part: &Part| (tensor.shape(), tensor.rect()) == (&part.shape, &part.rect);
        let found: Vec<_> =
            tensors.into_iter().filter(|tensor| parts.get(tensor.name()).is_some_and(|part| is_part(tensor, part))).collect();
        if found.len() == parts.len() {
            return Ok(found);
        }
        match parts.iter().find(|(name, _)| !found.iter().any(|tensor| tensor.name() == name.as_str())) {
            Some((name, Part { shape, rect })) => {
                let message = format!(
                    "the raw state of this rank does not hold the part with offset {:?} and shape {:?} of shape {shape:?}",
                    rect.offset, rect.shape
                );
                Err(Error::template(message).tensor(name))
            }
            None => Ok(found),
        }
    }

    /// Selects tensors of a snapshot.
    pub(crate) fn select_from_snapshot(&self, tensors: Vec<DirectoryTensor>) -> Result<Vec<SelectedTensor>> {
        let numbered = tensors.into_iter().enumerate().map(|(number, tensor)| (tensor.alias_of.unwrap_or(number), tensor));
        let whole = |(stored, tensor): (usize, DirectoryTensor)| {
            let rect = Rect::whole(&tensor.shape);
            SelectedTensor { tensor, stored, rect }
        };
        let Self::Parts(parts) = self else { return Ok(numbered.map(whole).collect()) };
        let mut by_name: HashMap<_, _> = numbered.map(|(stored, tensor)| (tensor.name.clone(), (stored, tensor))).collect();
        let part = |(name, Part { shape, rect }): (&String, &Part)| {
            let (stored, tensor) = by_name.remove(name).ok_or_else(|| Error::template("the snapshot has no such tensor").tensor(name))?;
            if *shape != tensor.shape || !rect.fits(shape) {
                let message = format!(
                    "the snapshot has shape {:?}; wanted is the part with offset {:?} and shape {:?} of shape {shape:?}",
                    tensor.shape, rect.offset, rect.shape
                );
                return Err(Error::template(message).tensor(name));
            }
            Ok(SelectedTensor { tensor, stored, rect: rect.clone() })
        };
        parts.iter().map(part).collect()
    }
}

/// Memory of the caller for the tensors of a state.
pub(crate) struct Buffers<'m> {
    /// A buffer for each tensor that is written to the caller's memory.
    pub buffers: Vec<Option<&'m mut [u8]>>,
    /// Whether the caller borrows the data of a tensor.
    pub borrowed: Vec<bool>,
}

impl Buffers<'_> {
    /// No buffers: the caller borrows all tensors.
    pub(crate) fn all_borrowed(tensors: usize) -> Self {
        Self { buffers: (0..tensors).map(|_| None).collect(), borrowed: vec![true; tensors] }
    }
}

/// A restore under way.
pub(crate) struct RestoreRequest<'s> {
    pub at: StepSelector,
    pub wanted: Wanted<'s>,
    /// The step that the ranks have agreed on.
    pub agreed: Option<AgreedStep>,
    /// The caller's memory; `None` allocates new memory.
    destination: Option<&'s mut dyn Destination>,
    /// Whether the destination has ended the restore.
    is_refused: bool,
    pub passed_over: Vec<PassedOver>,
}

impl<'s> RestoreRequest<'s> {
    /// A restore into new memory.
    pub(crate) fn new(at: StepSelector, wanted: Wanted<'s>) -> Self {
        Self { at, wanted, agreed: None, destination: None, is_refused: false, passed_over: Vec::new() }
    }

    /// Accepts no other snapshot of the step that the ranks have agreed on.
    pub(crate) fn of_agreed(self, agreed: Option<AgreedStep>) -> Self {
        Self { agreed, ..self }
    }

    /// Fails if a snapshot of the wanted step is not the one that the ranks have agreed on.
    pub(crate) fn check_agreed(&self, record: &SnapshotRecord) -> Result<()> {
        match self.agreed {
            Some(AgreedStep { step, snapshot: Some(id) }) if self.at == StepSelector::Step(step) && record.id != id => {
                let message = format!("step {step} is snapshot {} here, and the ranks have agreed on snapshot {id}", record.id);
                Err(Error::new(ErrorKind::Conflict, message))
            }
            _ => Ok(()),
        }
    }

    /// A restore into the caller's memory.
    pub(crate) fn into(self, destination: &'s mut dyn Destination) -> Self {
        Self { destination: Some(destination), ..self }
    }

    /// Whether the destination has not ended the restore.
    pub(crate) fn may_begin_again(&self) -> bool {
        !self.is_refused
    }

    /// Notes that a copy could not be used. Returns the error if the destination has ended the restore.
    pub(crate) fn pass_over(&mut self, source: Source, step: Option<u64>, error: Error) -> Result<()> {
        if self.is_refused {
            return Err(error);
        }
        self.passed_over.push(PassedOver { source, step, error });
        Ok(())
    }

    /// Asks the destination, if there is one, for a buffer of each tensor, and for the tensors that it borrows.
    pub(crate) fn buffers(&mut self, found: &Restored<'_>) -> Result<Option<Buffers<'_>>> {
        let Some(destination) = &mut self.destination else { return Ok(None) };
        self.is_refused = true;
        destination.prepare(found)?;
        let borrowed: Vec<bool> = (0..found.tensors.len()).map(|tensor| destination.borrows(tensor)).collect();
        let buffers = destination.buffers()?;
        for (tensor, buffer) in found.tensors.iter().zip(&buffers) {
            let expected = byte_count(tensor.dtype, &tensor.rect);
            if let Some(buffer) = buffer.as_ref().filter(|buffer| Some(buffer.len()) != expected) {
                let message =
                    format!("the buffer has {} bytes, which does not fit {} of shape {:?}", buffer.len(), tensor.dtype, tensor.rect.shape);
                return Err(Error::invalid(message).tensor(&tensor.name));
            }
        }
        if buffers.len() != found.tensors.len() {
            return Err(Error::invalid(format!("got {} buffers for {} tensors", buffers.len(), found.tensors.len())));
        }
        self.is_refused = false;
        let borrowed = buffers.iter().zip(borrowed).map(|(buffer, borrowed)| borrowed && buffer.is_none()).collect();
        Ok(Some(Buffers { buffers, borrowed }))
    }
}

/// Size of a part of a tensor; `None` if it exceeds this machine's address space.
pub(crate) fn byte_count(dtype: Dtype, rect: &Rect) -> Option<usize> {
    usize::try_from(dtype.byte_count(rect.element_count()?)?).ok()
}
