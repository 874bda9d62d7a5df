//! Reads one copy of a state: a slot of the arena, or a snapshot.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use rayon::prelude::*;
use tensorcask::{Blob, Error, Metadata, ReadRequest, Rect, Result, Slice, Snapshot, is_writers_blob};

use crate::arena::Arena;
use crate::image::EXTENT_BYTES;
use crate::restore_request::{RestoreRequest, byte_count};
use crate::restored::{Elements, Restored, RestoredTensor, Source};

/// Reads the raw state in a slot.
pub(crate) fn read_slot<'a>(arena: &'a Arena, slot: usize, request: &mut RestoreRequest<'_>) -> Result<Restored<'a>> {
    let stored = arena.read(slot)?;
    stored.verify()?;
    let mut known: HashMap<(*const u8, usize), usize> = HashMap::new();
    let views = request.wanted.select_from_slot(stored.tensors()?)?;
    let tensors = views.into_iter().enumerate().map(|(number, view)| {
        let first = *known.entry((view.data().as_ptr(), view.data().len())).or_insert(number);
        RestoredTensor {
            name: view.name().to_owned(),
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            rect: view.rect().clone(),
            role: view.role().to_owned(),
            param: view.param().to_owned(),
            tied_to: (first != number && !view.data().is_empty()).then_some(first),
            data: Elements::Borrowed(view.data()),
        }
    });
    let (tensors, blobs, metadata) = (tensors.collect(), stored.blobs(), stored.metadata());
    let mut found = Restored { tensors, blobs, metadata, ..empty(stored.step(), Source::Slot) };
    if let Some(buffers) = request.buffers(&found)? {
        let pairs = buffers.into_iter().zip(&found.tensors).filter_map(|(buffer, tensor)| Some((buffer?, &*tensor.data)));
        let pieces = pairs.flat_map(|(buffer, data)| buffer.chunks_mut(EXTENT_BYTES).zip(data.chunks(EXTENT_BYTES)));
        pieces.collect::<Vec<_>>().into_par_iter().for_each(|(buffer, data)| buffer.copy_from_slice(data));
        found.tensors.iter_mut().for_each(|tensor| tensor.data = Elements::Placed);
    }
    Ok(found)
}

/// Reads the wanted tensors of a snapshot, and all its blobs.
pub(crate) async fn read_snapshot<'a>(snapshot: &Snapshot, source: Source, request: &mut RestoreRequest<'_>) -> Result<Restored<'a>> {
    let selected = request.wanted.select_from_snapshot(snapshot.tensors())?;
    let mut known: HashMap<(usize, Rect), usize> = HashMap::new();
    let tensors = selected.into_iter().enumerate().map(|(number, selected)| {
        let first = *known.entry((selected.stored, selected.rect.clone())).or_insert(number);
        RestoredTensor {
            rect: selected.rect,
            name: selected.tensor.name,
            dtype: selected.tensor.dtype,
            shape: selected.tensor.shape,
            role: selected.tensor.role,
            param: selected.tensor.param,
            tied_to: (first != number).then_some(first),
            data: Elements::Placed,
        }
    });
    let tensors = tensors.collect();
    let mut blobs = Vec::new();
    for (rank, name) in snapshot.blobs().await?.into_iter().filter(|(_, name)| !is_writers_blob(name)) {
        let data = snapshot.read_blob(rank, &name).await?.into();
        blobs.push(Blob { rank, name, data });
    }
    let mut user = snapshot.user().clone();
    user.retain(|key, _| !key.starts_with("tc."));
    let metadata = Metadata { user, file: snapshot.metadata().clone() };
    let mut found = Restored { tensors, blobs, metadata, ..empty(snapshot.step(), source) };
    if let Some(buffers) = request.buffers(&found)? {
        read_into(snapshot, &found.tensors, buffers).await?;
        return Ok(found);
    }
    // Tied tensors share memory.
    let mut data: Vec<Vec<u8>> = Vec::with_capacity(found.tensors.len());
    for tensor in &found.tensors {
        let bytes = match tensor.tied_to {
            Some(_) => 0,
            None => byte_count(tensor.dtype, &tensor.rect).ok_or_else(|| Error::limit("the tensor is too large").tensor(&tensor.name))?,
        };
        let mut buffer = Vec::new();
        buffer
            .try_reserve_exact(bytes)
            .map_err(|e| Error::limit(format!("cannot allocate {bytes} bytes")).tensor(&tensor.name).source(e))?;
        buffer.resize(bytes, 0u8);
        data.push(buffer);
    }
    let buffers = data.iter_mut().zip(&found.tensors).map(|(buffer, tensor)| tensor.tied_to.is_none().then_some(buffer.as_mut_slice()));
    read_into(snapshot, &found.tensors, buffers.collect()).await?;
    let data: Vec<Arc<Vec<u8>>> = data.into_iter().map(Arc::new).collect();
    for (number, tensor) in found.tensors.iter_mut().enumerate() {
        if let Some(data) = data.get(tensor.tied_to.unwrap_or(number)) {
            tensor.data = Elements::Owned(data.clone());
        }
    }
    Ok(found)
}

/// Reads tensors into their buffers. Reads tied tensors once and copies them.
async fn read_into(snapshot: &Snapshot, tensors: &[RestoredTensor<'_>], mut buffers: Vec<Option<&mut [u8]>>) -> Result<()> {
    // For each group of tied tensors, the first one that has a buffer.
    let mut filled: HashMap<usize, usize> = HashMap::new();
    let (mut requests, mut copies) = (Vec::new(), Vec::new());
    for (number, (tensor, buffer)) in tensors.iter().zip(&mut buffers).enumerate() {
        let Some(buffer) = buffer.as_deref_mut() else { continue };
        match filled.entry(tensor.tied_to.unwrap_or(number)) {
            Entry::Occupied(known) => copies.push((*known.get(), number)),
            Entry::Vacant(entry) => {
                entry.insert(number);
                let rect = &tensor.rect;
                let ranges = rect.offset.iter().zip(&rect.shape).map(|(&start, &extent)| start..start.saturating_add(extent));
                let slice = Slice::ranges(ranges.collect::<Vec<_>>());
                requests.push(ReadRequest { name: tensor.name.as_str(), slice, out: buffer });
            }
        }
    }
    snapshot.read_many_into(requests).await?;
    for (from, to) in copies {
        let (before, after) = buffers.split_at_mut(to);
        if let (Some(Some(from)), Some(Some(to))) = (before.get(from), after.first_mut()) {
            to.copy_from_slice(from);
        }
    }
    Ok(())
}

fn empty<'a>(step: u64, source: Source) -> Restored<'a> {
    let metadata = Metadata::default();
    Restored { step, source, passed_over: Vec::new(), tensors: Vec::new(), blobs: Vec::new(), metadata, seconds: 0.0 }
}
