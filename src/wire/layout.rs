//! The tensor and shard tables that a cask's index and a directory share. Spec: `spec/index.md`, clause 3.

use super::columns::{Column, ColumnsReader, ColumnsWriter, Heap};
use crate::limits::reserve;
use crate::tensor::{Rect, element_count};
use crate::{Dtype, Error, Limits, Result};

/// Row of the tensor table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorRow {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
}

/// Row of the shard table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShardRow {
    pub tensor: u32,
    pub rect: Rect,
}

/// Counts in the head of the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayoutCounts {
    pub tensors: u64,
    pub name_bytes: u64,
    pub dimensions: u64,
    pub shards: u64,
}

/// Tensors by name and their shards by position, read in place.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub names: Heap<u8>,
    pub dtypes: Column<u8>,
    pub shapes: Heap<u64>,
    pub shard_tensors: Column<u32>,
    pub shard_offsets: Column<u64>,
    pub shard_shapes: Column<u64>,
    /// First dimension of each shard in the columns of offsets and shapes; one entry more than shards.
    shard_dimensions: Vec<u32>,
    /// First shard of each tensor; one entry more than tensors.
    tensor_shards: Vec<u32>,
}

impl Layout {
    pub(crate) fn counts(tensors: &[TensorRow], shards: &[ShardRow]) -> LayoutCounts {
        let sum = |lengths: &mut dyn Iterator<Item = usize>| lengths.fold(0u64, |sum, n| sum.saturating_add(n as u64));
        LayoutCounts {
            tensors: tensors.len() as u64,
            name_bytes: sum(&mut tensors.iter().map(|t| t.name.len())),
            dimensions: sum(&mut tensors.iter().map(|t| t.shape.len())),
            shards: shards.len() as u64,
        }
    }

    pub(crate) fn encode(tensors: &[TensorRow], shards: &[ShardRow], out: &mut ColumnsWriter) -> Result<()> {
        out.heap(tensors.iter().map(|t| t.name.as_bytes()))?;
        out.column(tensors.iter().map(|t| t.dtype.code()));
        out.heap(tensors.iter().map(|t| t.shape.as_slice()))?;
        out.column(shards.iter().map(|s| s.tensor));
        out.column(shards.iter().flat_map(|s| s.rect.offset.iter().copied()));
        out.column(shards.iter().flat_map(|s| s.rect.shape.iter().copied()));
        Ok(())
    }

    pub(crate) fn decode(counts: LayoutCounts, reader: &mut ColumnsReader, limits: &Limits) -> Result<Self> {
        Limits::check(counts.tensors, limits.max_tensors, "number of tensors")?;
        Limits::check(counts.shards, limits.max_shards, "number of shards")?;
        let names = reader.text(counts.tensors, counts.name_bytes, limits.max_name_bytes)?;
        let dtypes: Column<u8> = reader.column(counts.tensors)?;
        let shapes: Heap<u64> = reader.heap(counts.tensors, counts.dimensions)?;
        let mut previous = None;
        for row in 0..names.len() {
            let name = names.text(row).unwrap_or_default();
            if previous.is_some_and(|previous| previous >= name) {
                return Err(Error::corrupt("tensor names do not ascend strictly").tensor(name).clause("index 3.1"));
            }
            previous = Some(name);
            let dtype = dtypes.get(row).unwrap_or_default();
            let dtype = Dtype::from_code(dtype)
                .ok_or_else(|| Error::unsupported(format!("unknown dtype code {dtype}")).tensor(name).clause("container 7"))?;
            let shape = shapes.row(row).unwrap_or_default();
            Limits::check(shape.len() as u64, limits.max_dimensions, "number of dimensions").map_err(|e| e.tensor(name))?;
            if element_count(&shape).and_then(|n| dtype.byte_count(n)).is_none() {
                return Err(Error::corrupt(format!("shape {shape:?} of {dtype} is beyond 2^64 bytes")).tensor(name).clause("index 3.2"));
            }
        }

        let shard_tensors: Column<u32> = reader.column(counts.shards)?;
        let mut shard_dimensions = reserve(shard_tensors.len().saturating_add(1), "shards")?;
        let mut tensor_shards: Vec<u32> = reserve(names.len().saturating_add(1), "tensors")?;
        let mut dimensions = 0u32;
        let mut last_tensor = 0u32;
        shard_dimensions.push(0);
        tensor_shards.push(0);
        for (shard, tensor) in shard_tensors.iter().enumerate() {
            if tensor < last_tensor || tensor as usize >= names.len() {
                return Err(Error::corrupt(format!("shard {shard} belongs to tensor {tensor}: out of order or range")).clause("index 3.3"));
            }
            last_tensor = tensor;
            while tensor_shards.len() <= tensor as usize {
                tensor_shards.push(shard as u32);
            }
            let count = shapes.span(tensor as usize).map_or(0, |span| span.len());
            dimensions = u32::try_from(count)
                .ok()
                .and_then(|count| dimensions.checked_add(count))
                .ok_or_else(|| Error::limit("dimensions of all shards exceed 2^32").clause("limits 2"))?;
            shard_dimensions.push(dimensions);
        }
        while tensor_shards.len() <= names.len() {
            tensor_shards.push(counts.shards as u32);
        }
        let shard_offsets = reader.column(u64::from(dimensions))?;
        let shard_shapes = reader.column(u64::from(dimensions))?;
        let layout = Self { names, dtypes, shapes, shard_tensors, shard_offsets, shard_shapes, shard_dimensions, tensor_shards };
        layout.check_shards()?;
        Ok(layout)
    }

    pub(crate) fn tensor_count(&self) -> usize {
        self.names.len()
    }

    pub(crate) fn shard_count(&self) -> usize {
        self.shard_tensors.len()
    }

    pub(crate) fn name(&self, tensor: usize) -> &str {
        self.names.text(tensor).unwrap_or_default()
    }

    pub(crate) fn dtype(&self, tensor: usize) -> Dtype {
        // The dtype was checked when the table was read.
        self.dtypes.get(tensor).and_then(Dtype::from_code).unwrap_or(Dtype::U8)
    }

    pub(crate) fn shape(&self, tensor: usize) -> Vec<u64> {
        self.shapes.row(tensor).unwrap_or_default()
    }

    pub(crate) fn rect(&self, shard: usize) -> Rect {
        let span = self.dimensions_of(shard);
        Rect { offset: self.shard_offsets.range(span.clone()).collect(), shape: self.shard_shapes.range(span).collect() }
    }

    pub(crate) fn tensor_of(&self, shard: usize) -> usize {
        self.shard_tensors.get(shard).unwrap_or_default() as usize
    }

    /// Shards of a tensor.
    pub(crate) fn shards_of(&self, tensor: usize) -> std::ops::Range<usize> {
        let at = |i: usize| self.tensor_shards.get(i).copied().unwrap_or_default() as usize;
        at(tensor)..at(tensor.saturating_add(1))
    }

    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        let mut low = 0usize;
        let mut high = self.tensor_count();
        while low < high {
            let middle = low.midpoint(high);
            match self.name(middle).cmp(name) {
                std::cmp::Ordering::Equal => return Some(middle),
                std::cmp::Ordering::Less => low = middle.saturating_add(1),
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }

    /// Returns the shard of a tensor that covers exactly `rect`.
    pub(crate) fn find_shard(&self, tensor: usize, rect: &Rect) -> Option<usize> {
        // Shards ascend by position.
        let mut low = self.shards_of(tensor).start;
        let mut high = self.shards_of(tensor).end;
        while low < high {
            let middle = low.midpoint(high);
            match self.rect(middle).cmp(rect) {
                std::cmp::Ordering::Equal => return Some(middle),
                std::cmp::Ordering::Less => low = middle.saturating_add(1),
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }

    pub(crate) fn dimensions_of(&self, shard: usize) -> std::ops::Range<usize> {
        let at = |i: usize| self.shard_dimensions.get(i).copied().unwrap_or_default() as usize;
        at(shard)..at(shard.saturating_add(1))
    }

    fn check_shards(&self) -> Result<()> {
        for tensor in 0..self.tensor_count() {
            let shape = self.shape(tensor);
            let mut previous: Option<Rect> = None;
            for shard in self.shards_of(tensor) {
                let rect = self.rect(shard);
                let fail = |message: &str, clause| {
                    Err(Error::corrupt(format!("shard {shard}: {message}")).tensor(self.name(tensor)).clause(clause))
                };
                if !rect.fits(&shape) {
                    return fail("does not fit the tensor's shape", "index 3.4");
                }
                if previous.as_ref().is_some_and(|previous| *previous >= rect) {
                    return fail("shards of a tensor do not ascend strictly", "index 3.3");
                }
                previous = Some(rect);
            }
        }
        Ok(())
    }
}
