//! The blob `tc.statistics`: a Parquet table with a row for each stored chunk. Spec: `spec/statistics.md`.

use std::sync::Arc;

use arrow_array::builder::{ListBuilder, UInt64Builder};
use arrow_array::cast::AsArray;
use arrow_array::types::{Float64Type, UInt64Type};
use arrow_array::{Array, ArrayRef, Float64Array, ListArray, RecordBatch, StringArray, UInt64Array};
use arrow_schema::{ArrowError, DataType, Field, Schema};
use bytes::Bytes;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::arrow::arrow_writer::ArrowWriterOptions;
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use tensorcask_kernels::statistics::{ChangeStatistics, ValueStatistics};

use super::parquet_pages::{TextBudget, check_pages};
use crate::tensor::{ChunkGrid, Rect};
use crate::{Dtype, Error, ErrorKind, Limits, Result};

/// Statistics of a chunk of a snapshot.
#[derive(Debug, Clone, PartialEq)]
pub struct ChunkStatistics {
    /// Name of the tensor.
    pub tensor: String,
    /// Role of the tensor.
    pub role: String,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Place of the shard in the tensor.
    pub shard: Rect,
    /// Number of the chunk in its shard.
    pub chunk: u64,
    /// Number of elements.
    pub elements: u64,
    /// Counts, extremes and sums; `None` for types that are not measured.
    pub values: Option<ValueStatistics>,
    /// Change since the reference step; `None` if the writer did not have the base of the chunk.
    pub change: Option<ChangeStatistics>,
    /// Step that the change refers to. There exactly if `change` is.
    pub reference_step: Option<u64>,
}

impl ChunkStatistics {
    /// Name of the blob with the statistics of a rank. The writer adds the blob if its options ask for statistics; users
    /// must not save the blob again.
    pub const BLOB: &str = "tc.statistics";

    /// Number of numbers, which the counts of `values` and `change` cover: a complex element has two.
    pub fn numbers(&self) -> u64 {
        self.elements.saturating_mul(self.dtype.numbers_per_element())
    }

    /// Returns the statistics of steps as a table: the columns of the blob, after a column `step`.
    pub fn table(steps: &[(u64, Vec<Self>)]) -> Result<RecordBatch> {
        let numbers = steps.iter().flat_map(|(step, rows)| std::iter::repeat_n(*step, rows.len()));
        let numbers: ArrayRef = Arc::new(UInt64Array::from_iter_values(numbers));
        let rows: Vec<&Self> = steps.iter().flat_map(|(_, rows)| rows).collect();
        let with_step = || {
            let table = columns(&rows)?;
            let mut fields = vec![Arc::new(Field::new("step", DataType::UInt64, false))];
            fields.extend(table.schema().fields().iter().cloned());
            RecordBatch::try_new(Arc::new(Schema::new(fields)), std::iter::once(numbers).chain(table.columns().iter().cloned()).collect())
        };
        with_step().map_err(no_table)
    }

    /// Returns the statistics of steps as a Parquet file with the columns of [`ChunkStatistics::table`].
    pub fn parquet(steps: &[(u64, Vec<Self>)]) -> Result<Vec<u8>> {
        parquet(&Self::table(steps)?, EnabledStatistics::Chunk)
    }

    /// Encodes rows, in order, as a blob.
    pub(crate) fn encode(rows: &[Self]) -> Result<Vec<u8>> {
        let rows: Vec<&Self> = rows.iter().collect();
        let bytes = parquet(&columns(&rows).map_err(no_table)?, EnabledStatistics::None)?;
        let mut texts = TextBudget::of(bytes.len());
        let fits = rows.iter().flat_map(|row| [&row.tensor, &row.role]).try_for_each(|text| texts.take(text));
        fits.map_err(|message| Error::limit(format!("the statistics of this snapshot: {message}")).clause("statistics 1.3"))?;
        Ok(bytes)
    }

    /// Reads the rows of a blob.
    pub(crate) fn decode(bytes: Bytes, limits: &Limits) -> Result<Vec<Self>> {
        // The checksum only proves that the bytes are intact. Anybody may have written them, and the Parquet reader is
        // not our code.
        let decoded = std::panic::catch_unwind(|| decode(bytes, limits));
        decoded.unwrap_or_else(|_| Err(bad("the Parquet reader failed on the statistics")))
    }

    /// Order of the rows.
    pub(crate) fn key(&self) -> (&str, &Rect, u64) {
        (&self.tensor, &self.shard, self.chunk)
    }
}

fn no_table(error: ArrowError) -> Error {
    Error::invalid(format!("the statistics are no table: {error}"))
}

fn parquet(table: &RecordBatch, statistics: EnabledStatistics) -> Result<Vec<u8>> {
    let write = || -> std::result::Result<Vec<u8>, ParquetError> {
        let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).set_statistics_enabled(statistics).build();
        let options = ArrowWriterOptions::new().with_properties(properties).with_skip_arrow_metadata(true);
        let mut bytes = Vec::new();
        let mut writer = ArrowWriter::try_new_with_options(&mut bytes, table.schema(), options)?;
        writer.write(table)?;
        writer.close()?;
        Ok(bytes)
    };
    write().map_err(|e| Error::new(ErrorKind::InvalidArgument, format!("the statistics cannot be written: {e}")))
}

fn columns(rows: &[&ChunkStatistics]) -> std::result::Result<RecordBatch, ArrowError> {
    let texts =
        |text: fn(&ChunkStatistics) -> &str| -> ArrayRef { Arc::new(StringArray::from_iter_values(rows.iter().copied().map(text))) };
    let numbers =
        |number: fn(&ChunkStatistics) -> Option<u64>| -> ArrayRef { Arc::new(UInt64Array::from_iter(rows.iter().copied().map(number))) };
    let floats =
        |number: fn(&ChunkStatistics) -> Option<f64>| -> ArrayRef { Arc::new(Float64Array::from_iter(rows.iter().copied().map(number))) };
    let lists = |list: fn(&ChunkStatistics) -> Option<&[u64]>| -> ArrayRef {
        let mut lists = ListBuilder::new(UInt64Builder::new()).with_field(item());
        for &row in rows {
            match list(row) {
                None => lists.append_null(),
                Some(list) => {
                    lists.values().append_slice(list);
                    lists.append(true);
                }
            }
        }
        Arc::new(lists.finish())
    };
    let columns: [ArrayRef; COLUMNS.len()] = [
        texts(|row| &row.tensor),
        texts(|row| &row.role),
        texts(|row| row.dtype.name()),
        lists(|row| Some(&row.shard.offset)),
        lists(|row| Some(&row.shard.shape)),
        numbers(|row| Some(row.chunk)),
        numbers(|row| Some(row.elements)),
        numbers(|row| Some(row.values?.nan)),
        numbers(|row| Some(row.values?.positive_infinity)),
        numbers(|row| Some(row.values?.negative_infinity)),
        numbers(|row| Some(row.values?.zero)),
        numbers(|row| Some(row.values?.subnormal)),
        floats(|row| row.values?.min),
        floats(|row| row.values?.max),
        floats(|row| row.values?.sum),
        floats(|row| row.values?.squares),
        lists(|row| Some(&row.values.as_ref()?.exponents)),
        numbers(|row| row.reference_step),
        numbers(|row| Some(row.change?.changed)),
        floats(|row| row.change?.squares),
        numbers(|row| Some(row.change?.ulps)),
    ];
    let fields: Vec<Field> =
        COLUMNS.iter().map(|&(name, kind, presence)| Field::new(name, kind.data_type(), presence == Nullable)).collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns.into())
}

/// Type of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Number,
    Float,
    List,
}

/// Whether a column may have rows without a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Required,
    Nullable,
}

use Kind::{Float, List, Number, Text};
use Presence::{Nullable, Required};

/// Columns, in order.
const COLUMNS: [(&str, Kind, Presence); 21] = [
    ("tensor", Text, Required),
    ("role", Text, Required),
    ("dtype", Text, Required),
    ("shard_offset", List, Required),
    ("shard_shape", List, Required),
    ("chunk", Number, Required),
    ("elements", Number, Required),
    ("nan", Number, Nullable),
    ("positive_infinity", Number, Nullable),
    ("negative_infinity", Number, Nullable),
    ("zero", Number, Nullable),
    ("subnormal", Number, Nullable),
    ("min", Float, Nullable),
    ("max", Float, Nullable),
    ("sum", Float, Nullable),
    ("sum_squares", Float, Nullable),
    ("exponents", List, Nullable),
    ("reference_step", Number, Nullable),
    ("changed", Number, Nullable),
    ("change_squares", Float, Nullable),
    ("change_ulps", Number, Nullable),
];

/// Columns that are null if the elements were not measured.
const VALUES: [&str; 10] =
    ["nan", "positive_infinity", "negative_infinity", "zero", "subnormal", "min", "max", "sum", "sum_squares", "exponents"];

/// Columns that are null if the change is not known.
const CHANGE: [&str; 3] = ["changed", "change_squares", "change_ulps"];

impl Kind {
    fn data_type(self) -> DataType {
        match self {
            Text => DataType::Utf8,
            Number => DataType::UInt64,
            Float => DataType::Float64,
            List => DataType::List(item()),
        }
    }

    fn matches(self, found: &DataType) -> bool {
        match (self, found) {
            (List, DataType::List(item)) => *item.data_type() == DataType::UInt64,
            _ => *found == self.data_type(),
        }
    }
}

fn item() -> Arc<Field> {
    Arc::new(Field::new("item", DataType::UInt64, false))
}

fn decode(bytes: Bytes, limits: &Limits) -> Result<Vec<ChunkStatistics>> {
    let parquet = |e: ParquetError| bad(format!("not a valid Parquet table: {e}"));
    let builder = ParquetRecordBatchReaderBuilder::try_new(bytes.clone()).map_err(parquet)?;
    let file = builder.metadata();
    let declared = u64::try_from(file.file_metadata().num_rows()).map_err(|_| bad("a negative number of rows"))?;
    Limits::check(declared, limits.max_shards, "number of rows of statistics")?;
    // The reader allocates by these counts.
    let max_values = declared.saturating_mul(limits.max_dimensions.max(16));
    let columns = || file.row_groups().iter().flat_map(|group| group.columns());
    if columns().any(|column| u64::try_from(column.num_values()).is_ok_and(|values| values > max_values)) {
        return Err(bad("a column has more values than its rows can hold"));
    }
    let pages = check_pages(&bytes, file).map_err(|message| bad(message).clause("statistics 1.2"))?;
    let mut texts = TextBudget::of(bytes.len());
    let mut rows: Vec<ChunkStatistics> = Vec::new();
    for batch in builder.with_batch_size(pages.batch_rows()).build().map_err(parquet)? {
        let batch = batch.map_err(|e| bad(format!("not a valid Parquet table: {e}")))?;
        let table = Table::new(&batch)?;
        for row in 0..batch.num_rows() {
            let found = table.row(row)?;
            if rows.last().is_some_and(|last| last.key() >= found.key()) {
                return Err(bad("rows are not in order").tensor(found.tensor));
            }
            if rows.len() as u64 >= declared {
                return Err(bad("more rows than the table says"));
            }
            Limits::check(found.tensor.len() as u64, limits.max_name_bytes, "length of a tensor's name")?;
            for text in [&found.tensor, &found.role] {
                texts.take(text).map_err(|message| bad(message).clause("statistics 1.3"))?;
            }
            rows.push(found);
        }
    }
    Ok(rows)
}

fn bad(message: impl Into<String>) -> Error {
    Error::corrupt(message).clause("statistics 2")
}

/// Typed access to the rows of a table.
struct Table<'a> {
    batch: &'a RecordBatch,
}

impl<'a> Table<'a> {
    /// Checks that the table has exactly the columns of the blob.
    fn new(batch: &'a RecordBatch) -> Result<Self> {
        let schema = batch.schema();
        let is_same =
            |(field, &(name, kind, _)): (&Arc<Field>, &(&str, Kind, Presence))| field.name() == name && kind.matches(field.data_type());
        if schema.fields().len() != COLUMNS.len() || !schema.fields().iter().zip(&COLUMNS).all(is_same) {
            return Err(bad("its columns are not those of this version"));
        }
        Ok(Self { batch })
    }

    fn column(&self, name: &str) -> Result<&'a ArrayRef> {
        self.batch.column_by_name(name).ok_or_else(|| bad(format!("column `{name}` is missing")))
    }

    fn number(&self, name: &str, row: usize) -> Result<Option<u64>> {
        let column = self.column(name)?.as_primitive::<UInt64Type>();
        Ok((!column.is_null(row)).then(|| column.value(row)))
    }

    fn float(&self, name: &str, row: usize) -> Result<Option<f64>> {
        let column = self.column(name)?.as_primitive::<Float64Type>();
        let number = (!column.is_null(row)).then(|| column.value(row));
        match number.is_some_and(|number| !number.is_finite()) {
            true => Err(bad(format!("`{name}` in row {row} is not finite")).clause("statistics 3")),
            false => Ok(number),
        }
    }

    fn text(&self, name: &str, row: usize) -> Result<&'a str> {
        let column = self.column(name)?.as_string::<i32>();
        if column.is_null(row) { Err(missing(name, row)) } else { Ok(column.value(row)) }
    }

    fn list(&self, name: &str, row: usize) -> Result<Option<Vec<u64>>> {
        let column: &ListArray = self.column(name)?.as_list::<i32>();
        if column.is_null(row) {
            return Ok(None);
        }
        let list = column.value(row);
        let list = list.as_primitive::<UInt64Type>();
        if list.null_count() > 0 { Err(missing(name, row)) } else { Ok(Some(list.values().to_vec())) }
    }

    fn row(&self, row: usize) -> Result<ChunkStatistics> {
        let required = |name: &str| self.number(name, row)?.ok_or_else(|| missing(name, row));
        let list = |name: &str| self.list(name, row)?.ok_or_else(|| missing(name, row));
        let dtype = Dtype::from_name(self.text("dtype", row)?).map_err(|e| bad(e.message().to_owned()))?;
        let found = ChunkStatistics {
            tensor: self.text("tensor", row)?.to_owned(),
            role: self.text("role", row)?.to_owned(),
            dtype,
            shard: Rect { offset: list("shard_offset")?, shape: list("shard_shape")? },
            chunk: required("chunk")?,
            elements: required("elements")?,
            values: self.values(row)?,
            change: self.change(row)?,
            reference_step: self.number("reference_step", row)?,
        };
        let refuse = |message: &str, clause: &'static str| Err(bad(message).tensor(&found.tensor).clause(clause));
        let grid = ChunkGrid::new(dtype, &found.shard.shape).map_err(|e| bad(e.message().to_owned()).tensor(&found.tensor))?;
        if found.chunk >= grid.chunk_count() || found.shard.offset.len() != found.shard.shape.len() {
            return refuse("a chunk that its shard does not have", "statistics 2.2");
        }
        let elements = grid.elements(found.chunk);
        if elements.end.saturating_sub(elements.start) != found.elements {
            return refuse("another number of elements than the chunk has", "statistics 2.2");
        }
        let numbers = found.numbers();
        if found.change.is_some() != found.reference_step.is_some() || found.change.is_some_and(|change| change.changed > numbers) {
            return refuse("a change without a reference step, or of more elements than there are", "statistics 4");
        }
        let is_always_measured = matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64);
        if found.values.is_some() && dtype.measured_format().is_none() || found.values.is_none() && is_always_measured {
            return refuse("values of a type that has none, or none of a type that has them", "statistics 3");
        }
        if let Some(values) = &found.values {
            let counts = [values.nan, values.positive_infinity, values.negative_infinity, values.zero, values.subnormal];
            let counted = counts.iter().fold(0u64, |sum, &count| sum.saturating_add(count));
            let sampled = values.exponents.iter().fold(0u64, |sum, &count| sum.saturating_add(count));
            let ordered = values.min.zip(values.max).is_none_or(|(min, max)| min <= max);
            if counted > numbers || sampled > numbers.div_ceil(16) || !ordered || values.min.is_some() != values.max.is_some() {
                return refuse("counts beyond the number of elements, or a minimum above the maximum", "statistics 3");
            }
        }
        Ok(found)
    }

    /// `None`, if these columns have no value in a row.
    fn all_null<T>(&self, names: &[&str], row: usize) -> Result<Option<T>> {
        for name in names {
            if !self.column(name)?.is_null(row) {
                return Err(bad(format!("`{name}` in row {row} has a value, but not the columns that go with it")).clause("statistics 3"));
            }
        }
        Ok(None)
    }

    fn values(&self, row: usize) -> Result<Option<ValueStatistics>> {
        let Some(nan) = self.number("nan", row)? else { return self.all_null(&VALUES, row) };
        let required = |name: &str| self.number(name, row)?.ok_or_else(|| missing(name, row));
        let exponents = self.list("exponents", row)?.ok_or_else(|| missing("exponents", row))?;
        Ok(Some(ValueStatistics {
            nan,
            positive_infinity: required("positive_infinity")?,
            negative_infinity: required("negative_infinity")?,
            zero: required("zero")?,
            subnormal: required("subnormal")?,
            min: self.float("min", row)?,
            max: self.float("max", row)?,
            sum: self.float("sum", row)?,
            squares: self.float("sum_squares", row)?,
            exponents: exponents.try_into().map_err(|_| bad(format!("`exponents` in row {row} has not 16 numbers")))?,
        }))
    }

    fn change(&self, row: usize) -> Result<Option<ChangeStatistics>> {
        let Some(changed) = self.number("changed", row)? else { return self.all_null(&CHANGE, row) };
        let ulps = self.number("change_ulps", row)?.ok_or_else(|| missing("change_ulps", row))?;
        Ok(Some(ChangeStatistics { changed, squares: self.float("change_squares", row)?, ulps }))
    }
}

fn missing(name: &str, row: usize) -> Error {
    bad(format!("column `{name}` has no value in row {row}"))
}
