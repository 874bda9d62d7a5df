//! The index tables as Arrow record batches, without a copy if columns are aligned and the machine is little-endian.

use std::sync::Arc;

use arrow_array::{
    ArrayRef, BinaryArray, ListArray, PrimitiveArray, RecordBatch, StringArray, UInt16Array, UInt64Array,
    types::{ArrowPrimitiveType, UInt8Type, UInt32Type, UInt64Type},
};
use arrow_buffer::{Buffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Schema};

use super::CaskIndex;
use crate::wire::columns::{Column, Fixed, Heap};
use crate::wire::part::IndexPart;
use crate::{Error, Result};

/// The tables of an index. [`CaskIndex::tables`] returns them.
#[derive(Debug, Clone, Copy)]
pub struct IndexTables<'a> {
    index: &'a CaskIndex,
}

impl CaskIndex {
    /// Returns the tables of the index, as Arrow record batches.
    pub fn tables(&self) -> IndexTables<'_> {
        IndexTables { index: self }
    }
}

impl IndexTables<'_> {
    /// Table of tensors: name, dtype code, shape.
    pub fn tensors(&self) -> Result<RecordBatch> {
        let layout = &self.index.root.layout;
        batch(vec![("name", text(&layout.names)?), ("dtype", numbers::<UInt8Type>(&layout.dtypes)?), ("shape", lists(&layout.shapes)?)])
    }

    /// Table of shards: tensor row, offset, shape.
    pub fn shards(&self) -> Result<RecordBatch> {
        let layout = &self.index.root.layout;
        let mut ends = vec![0i32];
        ends.extend((0..layout.shard_count()).map(|shard| i32::try_from(layout.dimensions_of(shard).end).unwrap_or(i32::MAX)));
        let list = |values: &Column<u64>| list_of(offsets(ends.clone())?, values);
        batch(vec![
            ("tensor", numbers::<UInt32Type>(&layout.shard_tensors)?),
            ("offset", list(&layout.shard_offsets)?),
            ("shape", list(&layout.shard_shapes)?),
        ])
    }

    /// Table of chunks in a loaded index part: kind code, codec row, CRC-32 of the decoded bytes, number of pages.
    pub fn chunks(&self, part: usize) -> Result<RecordBatch> {
        let part = self.part(part)?;
        let counts = part.chunk_pages.windows(2).map(|w| match w {
            [start, end] => end.saturating_sub(*start) as u16,
            _ => 0,
        });
        batch(vec![
            ("kind", numbers::<UInt8Type>(&part.kinds)?),
            ("codec", numbers::<UInt8Type>(&part.codecs)?),
            ("crc", numbers::<UInt32Type>(&part.crcs)?),
            ("pages", Arc::new(UInt16Array::from_iter_values(counts))),
        ])
    }

    /// Table of pages in a loaded index part: column row, offset, bytes, CRC-32.
    pub fn pages(&self, part: usize) -> Result<RecordBatch> {
        let part = self.part(part)?;
        batch(vec![
            ("column", numbers::<UInt8Type>(&part.page_columns)?),
            ("offset", Arc::new(UInt64Array::from(part.page_offsets.clone()))),
            ("bytes", numbers::<UInt32Type>(&part.page_bytes)?),
            ("crc", numbers::<UInt32Type>(&part.page_crcs)?),
        ])
    }

    /// Table of blobs: rank, name, bytes.
    pub fn blobs(&self) -> Result<RecordBatch> {
        batch(vec![
            ("rank", numbers::<UInt32Type>(&self.index.root.blob_ranks)?),
            ("name", text(&self.index.root.blob_names)?),
            ("bytes", numbers::<UInt64Type>(&self.index.root.blob_bytes)?),
        ])
    }

    fn part(&self, part: usize) -> Result<&IndexPart> {
        let part = self.index.parts.get(part).and_then(|part| part.get());
        part.ok_or_else(|| Error::invalid("the index part does not exist or is not loaded"))
    }
}

fn batch(columns: Vec<(&str, ArrayRef)>) -> Result<RecordBatch> {
    let fields: Vec<Field> = columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), false)).collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns.into_iter().map(|(_, array)| array).collect()).map_err(arrow)
}

fn arrow(error: arrow_schema::ArrowError) -> Error {
    Error::corrupt(format!("not an Arrow table: {error}")).source(error)
}

/// Returns a column's bytes as an Arrow buffer. Copies bytes that are unaligned in memory or must be swapped.
fn buffer<T: Fixed + arrow_buffer::ArrowNativeType>(column: &Column<T>) -> Buffer {
    let bytes = column.bytes();
    if cfg!(target_endian = "little") {
        if bytes.as_ptr().align_offset(align_of::<T>()) == 0 { Buffer::from(bytes.clone()) } else { Buffer::from_slice_ref(bytes) }
    } else {
        Buffer::from_iter(column.iter())
    }
}

fn numbers<P: ArrowPrimitiveType>(column: &Column<P::Native>) -> Result<ArrayRef>
where
    P::Native: Fixed,
{
    let values = ScalarBuffer::new(buffer(column), 0, column.len());
    Ok(Arc::new(PrimitiveArray::<P>::try_new(values, None).map_err(arrow)?))
}

fn text(heap: &Heap<u8>) -> Result<ArrayRef> {
    let binary = BinaryArray::try_new(heap_offsets(heap)?, buffer(&heap.values), None).map_err(arrow)?;
    Ok(Arc::new(StringArray::try_from_binary(binary).map_err(arrow)?))
}

fn lists(heap: &Heap<u64>) -> Result<ArrayRef> {
    list_of(heap_offsets(heap)?, &heap.values)
}

fn list_of(offsets: OffsetBuffer<i32>, values: &Column<u64>) -> Result<ArrayRef> {
    let field = Arc::new(Field::new_list_field(DataType::UInt64, false));
    Ok(Arc::new(ListArray::try_new(field, offsets, numbers::<UInt64Type>(values)?, None).map_err(arrow)?))
}

/// Offsets of a heap. The reader of the heap has checked that offsets ascend from zero and stay below 2^31.
fn heap_offsets<T: Fixed>(heap: &Heap<T>) -> Result<OffsetBuffer<i32>> {
    Ok(OffsetBuffer::new(ScalarBuffer::new(buffer(&heap.offsets), 0, heap.offsets.len())))
}

fn offsets(ends: Vec<i32>) -> Result<OffsetBuffer<i32>> {
    if !ends.is_sorted() {
        return Err(Error::limit("more than 2^31 dimensions in one table"));
    }
    Ok(OffsetBuffer::new(ScalarBuffer::from(ends)))
}
