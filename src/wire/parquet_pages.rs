//! Bounds the memory that a Parquet file can ask for.
//!
//! The reader allocates as many bytes and dictionary entries as a page header says. Anybody may have written the file: a
//! forged blob of 5 KB can ask for 15 GB. So [`check_pages`] walks the headers first. It refuses sizes that the stored bytes
//! cannot have, which bounds the memory for pages by a multiple of the file's length.
//!
//! A text is stored once and repeated by number, so 10 KB can also hold millions of rows with a long text each. Two bounds
//! stop that. A batch has as many rows as keep it small if each text is as long as its page ([`Pages::batch_rows`]), and the
//! texts of all rows together have a [`TextBudget`].
//!
//! A header is a struct in the compact protocol of Thrift, described in the specification of Parquet. The `parquet` crate
//! keeps its own parser of headers to itself.

use parquet::basic::Type;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};

/// What the pages of a file have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pages {
    /// Bytes of the largest page with texts. No text is longer.
    largest_text_page: u64,
}

impl Pages {
    /// Number of rows to decode at once.
    pub(crate) fn batch_rows(self) -> usize {
        let rows = MAX_BATCH_TEXT_BYTES.checked_div(self.largest_text_page).unwrap_or(MAX_BATCH_TEXT_BYTES);
        usize::try_from(rows).unwrap_or(MAX_BATCH_ROWS).clamp(1, MAX_BATCH_ROWS)
    }
}

/// Bound on the texts of all rows of a file.
#[derive(Debug)]
pub(crate) struct TextBudget {
    bytes_left: u64,
}

impl TextBudget {
    /// Budget of a file of this length: spec statistics 1.3.
    pub(crate) fn of(file_bytes: usize) -> Self {
        Self { bytes_left: (file_bytes as u64).saturating_mul(TEXT_RATIO).saturating_add(FREE_TEXT_BYTES) }
    }

    /// Takes a text of a row.
    pub(crate) fn take(&mut self, text: &str) -> Result<(), &'static str> {
        self.bytes_left = self.bytes_left.checked_sub(text.len() as u64).ok_or(TOO_MUCH_TEXT)?;
        Ok(())
    }
}

const TOO_MUCH_TEXT: &str = "the texts of its rows take more than 16 MiB and 64 times the bytes of the file";
const FREE_TEXT_BYTES: u64 = 16 << 20;
const TEXT_RATIO: u64 = 64;
/// Bound on the texts of one column in a batch.
const MAX_BATCH_TEXT_BYTES: u64 = 16 << 20;
const MAX_BATCH_ROWS: usize = 1024;

/// Refuses a file if a page claims a size that its stored bytes cannot have, or if the pages of a column have more values
/// than the column. Returns what is wrong.
pub(crate) fn check_pages(file: &[u8], metadata: &ParquetMetaData) -> Result<Pages, &'static str> {
    let mut largest_text_page = 0;
    for column in metadata.row_groups().iter().flat_map(|group| group.columns()) {
        let largest = check_column(file, column)?;
        if column.column_type() == Type::BYTE_ARRAY {
            largest_text_page = largest.max(largest_text_page);
        }
    }
    Ok(Pages { largest_text_page })
}

/// Returns the bytes of the largest page.
fn check_column(file: &[u8], column: &ColumnChunkMetaData) -> Result<u64, &'static str> {
    let start = usize::try_from(column.dictionary_page_offset().unwrap_or_else(|| column.data_page_offset())).ok();
    let length = usize::try_from(column.compressed_size()).ok();
    let range = start.zip(length).and_then(|(start, length)| Some(start..start.checked_add(length)?));
    let mut pages = Input(range.and_then(|range| file.get(range)).ok_or("a column outside of the file")?);
    let mut values_left = column.num_values();
    let mut largest = 0;
    while !pages.0.is_empty() {
        let page = PageHeader::read(&mut pages)?;
        let stored = usize::try_from(page.stored_bytes).map_err(|_| MALFORMED)?;
        pages.take(stored)?;
        if page.bytes > i64::from(page.stored_bytes).saturating_add(1).saturating_mul(LARGEST_RATIO) {
            return Err("a page claims more bytes than its stored bytes can hold");
        }
        // Each entry of a dictionary takes a byte or more.
        if page.dictionary_values > page.bytes {
            return Err("a dictionary claims more values than its bytes can hold");
        }
        values_left = values_left.saturating_sub(page.data_values);
        if values_left < 0 {
            return Err("the pages of a column claim more values than the column has");
        }
        largest = largest.max(page.bytes.cast_unsigned());
    }
    Ok(largest)
}

/// Bound on bytes over compressed bytes. Snappy makes at most 64 bytes from an element of 3 bytes.
const LARGEST_RATIO: i64 = 32;

const MALFORMED: &str = "a malformed page header";

/// Nesting of structs in a page header, with room for fields of later versions.
const MAX_DEPTH: u8 = 8;

/// Numbers of a page header. If a field occurs twice, the largest is kept of those that the reader allocates by.
#[derive(Debug, Default, PartialEq)]
struct PageHeader {
    bytes: i64,
    stored_bytes: i32,
    data_values: i64,
    dictionary_values: i64,
}

impl PageHeader {
    fn read(input: &mut Input<'_>) -> Result<Self, &'static str> {
        let mut header = Self::default();
        let mut field = 0;
        while let Some(kind) = input.next_field(&mut field)? {
            match (field, kind) {
                (2, Kind::I32) => header.bytes = header.bytes.max(input.count()?.into()),
                (3, Kind::I32) => header.stored_bytes = input.count()?,
                (DATA | DATA_V2, Kind::STRUCT) => header.data_values = header.data_values.max(input.first_count()?),
                (DICTIONARY, Kind::STRUCT) => header.dictionary_values = header.dictionary_values.max(input.first_count()?),
                // The reader may read these in their own types, whatever the types here.
                (2 | 3 | DATA | DATA_V2 | DICTIONARY, _) => return Err(MALFORMED),
                (_, kind) => input.skip(kind, MAX_DEPTH)?,
            }
        }
        Ok(header)
    }
}

/// Fields that hold the header of a kind of page. The number of values is field 1 of each.
const DATA: i64 = 5;
const DICTIONARY: i64 = 7;
const DATA_V2: i64 = 8;

/// Type of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind(u8);

impl Kind {
    const TRUE: Self = Self(1);
    const FALSE: Self = Self(2);
    const I8: Self = Self(3);
    const I16: Self = Self(4);
    const I32: Self = Self(5);
    const I64: Self = Self(6);
    const DOUBLE: Self = Self(7);
    const BINARY: Self = Self(8);
    const LIST: Self = Self(9);
    const SET: Self = Self(10);
    const STRUCT: Self = Self(12);
}

/// The bytes that are still to be read.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(MALFORMED)?;
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, &'static str> {
        self.take(1)?.first().copied().ok_or(MALFORMED)
    }

    /// Reads a variable-length number, 7 bits a byte.
    fn varint(&mut self) -> Result<u64, &'static str> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(MALFORMED)
    }

    fn signed(&mut self) -> Result<i64, &'static str> {
        let number = self.varint()?;
        Ok((number >> 1).cast_signed() ^ (number & 1).cast_signed().wrapping_neg())
    }

    /// Reads a number of 32 bits that is not negative.
    fn count(&mut self) -> Result<i32, &'static str> {
        i32::try_from(self.signed()?).ok().filter(|&count| count >= 0).ok_or(MALFORMED)
    }

    /// Reads the head of the next field of a struct, of which `field` is the number; `None` at the end of the struct.
    fn next_field(&mut self, field: &mut i64) -> Result<Option<Kind>, &'static str> {
        let head = self.byte()?;
        if head == 0 {
            return Ok(None);
        }
        *field = match head >> 4 {
            0 => self.signed()?,
            step => field.checked_add(step.into()).ok_or(MALFORMED)?,
        };
        Ok(Some(Kind(head & 0xf)))
    }

    /// Reads a struct and returns its field 1, a count.
    fn first_count(&mut self) -> Result<i64, &'static str> {
        let mut field = 0;
        let mut count = 0;
        while let Some(kind) = self.next_field(&mut field)? {
            match (field, kind) {
                (1, Kind::I32) => count = count.max(i64::from(self.count()?)),
                (1, _) => return Err(MALFORMED),
                (_, kind) => self.skip(kind, MAX_DEPTH)?,
            }
        }
        Ok(count)
    }

    fn skip(&mut self, kind: Kind, depth: u8) -> Result<(), &'static str> {
        let depth = depth.checked_sub(1).ok_or(MALFORMED)?;
        match kind {
            Kind::TRUE | Kind::FALSE => {}
            Kind::I8 => drop(self.byte()?),
            Kind::I16 | Kind::I32 | Kind::I64 => drop(self.varint()?),
            Kind::DOUBLE => drop(self.take(8)?),
            Kind::BINARY => {
                let length = usize::try_from(self.varint()?).map_err(|_| MALFORMED)?;
                self.take(length)?;
            }
            Kind::LIST | Kind::SET => {
                let head = self.byte()?;
                let count = if head >> 4 == 15 { self.varint()? } else { u64::from(head >> 4) };
                for _ in 0..count {
                    match Kind(head & 0xf) {
                        Kind::TRUE | Kind::FALSE => drop(self.byte()?),
                        item => self.skip(item, depth)?,
                    }
                }
            }
            Kind::STRUCT => {
                let mut field = 0;
                while let Some(kind) = self.next_field(&mut field)? {
                    self.skip(kind, depth)?;
                }
            }
            // Maps, which no version of the header has, and types that do not exist.
            _ => return Err(MALFORMED),
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "a panic fails the test")]
mod tests {
    use std::sync::Arc;

    use arrow_array::{ArrayRef, Int64Array, RecordBatch};
    use bytes::Bytes;
    use parquet::arrow::ArrowWriter;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    use super::{Input, MALFORMED, PageHeader, Pages, TOO_MUCH_TEXT, TextBudget, check_pages};

    fn check(file: Vec<u8>) -> Result<Pages, &'static str> {
        let file = Bytes::from(file);
        let builder = ParquetRecordBatchReaderBuilder::try_new(file.clone()).unwrap();
        check_pages(&file, builder.metadata())
    }

    /// A file with a dictionary page and a data page, and the places where their headers start.
    fn file() -> (Vec<u8>, usize, usize) {
        let column: ArrayRef = Arc::new(Int64Array::from(vec![7; 3]));
        let batch = RecordBatch::try_from_iter([("n", column)]).unwrap();
        let mut file = Vec::new();
        let mut writer = ArrowWriter::try_new(&mut file, batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        let metadata = writer.close().unwrap();
        let column = metadata.row_group(0).column(0);
        (file, column.dictionary_page_offset().unwrap() as usize, column.data_page_offset() as usize)
    }

    #[test]
    fn headers_of_real_pages_are_read() {
        let (file, dictionary, data) = file();
        let read = |at: usize| PageHeader::read(&mut Input(&file[at..])).unwrap();
        assert_eq!(read(dictionary), PageHeader { bytes: 8, stored_bytes: 8, data_values: 0, dictionary_values: 1 });
        assert_eq!(read(data).data_values, 3);
        check(file).unwrap();
    }

    #[test]
    fn forged_sizes_are_refused() {
        // Type, bytes, stored bytes, then the header of the dictionary with its number of values.
        let (file, dictionary, data) = file();
        assert_eq!(file[dictionary..dictionary + 9], [0x15, 4, 0x15, 16, 0x15, 16, 0x4c, 0x15, 2]);
        let forged = |at: usize, bytes: &[u8]| {
            let mut file = file.clone();
            file[at..at + bytes.len()].copy_from_slice(bytes);
            check(file).unwrap_err()
        };
        assert!(forged(dictionary + 8, &[0x7e]).contains("more values than its bytes"));
        assert!(forged(dictionary + 5, &[0]).contains("malformed"));
        assert!(forged(dictionary + 2, &[0x18]).contains("malformed"));
        assert!(forged(dictionary, &[0x1b]).contains("malformed"));
        let values = data + file[data..].windows(2).position(|pair| pair == [0x15, 6]).unwrap() + 1;
        assert!(forged(values, &[0x7e]).contains("more values than the column"));
        let mut header = Input(&[0x25, 0xfe, 0xff, 0xff, 0xff, 0x0f, 0x15, 16, 0]);
        assert_eq!(PageHeader::read(&mut header), Ok(PageHeader { bytes: i64::from(i32::MAX), stored_bytes: 8, ..PageHeader::default() }));
    }

    #[test]
    fn long_texts_make_small_batches() {
        let rows = |largest_text_page| Pages { largest_text_page }.batch_rows();
        assert_eq!([rows(0), rows(16 << 10), rows(1 << 20), rows(1 << 30)], [1024, 1024, 16, 1]);
        let (file, ..) = file();
        assert_eq!(check(file).unwrap().batch_rows(), 1024, "numbers do not count");
    }

    #[test]
    fn texts_have_a_budget() {
        let mut budget = TextBudget::of(1000);
        let text = "x".repeat(1 << 20);
        (0..16).for_each(|_| budget.take(&text).unwrap());
        assert_eq!((budget.take(&text[..64_000]), budget.take("x")), (Ok(()), Err(TOO_MUCH_TEXT)));
    }

    #[test]
    fn other_bytes_are_refused_or_read_to_their_end() {
        for seed in 0..2000u32 {
            let bytes: Vec<u8> = (0..40).map(|i| (seed.wrapping_mul(2_654_435_761).rotate_left(i * 7) >> (i % 5)) as u8).collect();
            let _ = PageHeader::read(&mut Input(&bytes));
        }
        // Structs within structs.
        assert_eq!(PageHeader::read(&mut Input(&[0x9c; 100])), Err(MALFORMED));
    }
}
