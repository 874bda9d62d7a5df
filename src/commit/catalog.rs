//! The catalog: a Parquet table of all snapshots, for fast opening and SQL queries. Spec: `spec/log.md`, clause 6.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::UInt64Type;
use arrow_array::{Array, ArrayRef, BooleanArray, Float64Array, RecordBatch, StringArray, UInt64Array};
use arrow_schema::{DataType, Field, Schema};
use bytes::Bytes;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::arrow::{ArrowWriter, ProjectionMask};
use parquet::file::metadata::{KeyValue, ParquetMetaData};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::state::LastWriter;
use super::{LeaderState, Leadership, LogState, SnapshotRecord, SnapshotStatus, Summary};
use crate::store::Store;
use crate::wire::facts::{fact_column, may_hold_nan};
use crate::wire::parquet_pages::{TextBudget, check_pages};
use crate::wire::{Digest, Id, SnapshotKind, catalog_of};
use crate::{Error, ErrorKind, Result, boxed};

/// Number of log entries from one catalog to the next.
pub(crate) const CATALOG_INTERVAL: u64 = 64;

/// Limit on the user metadata of all snapshots, as text. More does not fit columns with 32-bit offsets and slows
/// opening down.
const MAX_USER_BYTES: usize = 1 << 28;
/// Limit on the number of snapshots times the number of their different keys of user metadata: the values that are in memory while
/// the table is made.
const MAX_USER_CELLS: usize = 1 << 22;
/// Column of snapshots in log entries. Older catalogs lack it.
const INLINE_COLUMN: &str = "inline";
const USER_PREFIX: &str = "user.";
const SEQUENCE_KEY: &str = "tensorcask.sequence";
const ENTRY_KEY: &str = "tensorcask.entry";
const STATE_KEY: &str = "tensorcask.state";
const DIRECTORY_KEY: &str = "tensorcask.directory";
const LEADERSHIP_KEY: &str = "tensorcask.leadership";

/// Columns that are read back.
const COLUMNS: &[&str] = &[
    "sequence",
    "revision",
    "step",
    "snapshot",
    "kind",
    "parent",
    "manifest",
    "status",
    "pinned",
    "roles",
    "tensor_bytes",
    "stored_bytes",
    "time_ms",
    "user",
];

/// Facts of the log that are not stored as rows.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateNote {
    writer: Option<Id>,
    writer_sequence: Option<u64>,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
}

/// Reads and writes catalogs.
pub(crate) struct Catalog;

impl Catalog {
    /// Lists the paths of catalogs, newest first. Ignores objects whose names are not catalog names.
    #[boxed]
    pub(crate) async fn list(store: &Store) -> Result<Vec<String>> {
        let mut names: Vec<(u64, String)> = store
            .objects()
            .list("catalog")
            .await?
            .into_iter()
            .filter_map(|listed| Some((catalog_of(&listed.path)?.0, listed.path)))
            .collect();
        names.sort_unstable_by(|a, b| b.cmp(a));
        Ok(names.into_iter().map(|(_, path)| path).collect())
    }

    /// Returns the log entry that the newest catalog follows; `None` if no catalog follows an entry after `sequence`. Sends one
    /// request.
    #[boxed]
    pub(crate) async fn newest_after(store: &Store, sequence: u64) -> Result<Option<u64>> {
        // Sorts after the names of all catalogs that follow `sequence`.
        let names = store.objects().names_after("catalog", &format!("{sequence:020}.")).await?;
        Ok(names.iter().rev().find_map(|name| Self::sequence_of(&format!("catalog/{name}"))))
    }

    /// Returns the log entry that a catalog follows, according to its name.
    pub(crate) fn sequence_of(path: &str) -> Option<u64> {
        catalog_of(path).map(|(sequence, _)| sequence)
    }

    /// Reads the state in a catalog. Compares the bytes with the digest in the name before they are decoded.
    #[boxed]
    pub(crate) async fn read(store: &Store, path: &str) -> Result<LogState> {
        let bytes = Self::read_bytes(store, path).await?;
        let sequence = Self::sequence_of(path).unwrap_or_default();
        // The digest only proves that the bytes are intact. Anybody may have written them, and the Parquet reader is
        // not our code.
        let decoded = std::panic::catch_unwind(|| decode(bytes, sequence));
        let decoded = decoded.unwrap_or_else(|_| Err(Error::corrupt("the Parquet reader failed on the catalog").clause("log 6.3")));
        decoded.map_err(|e| e.object(path))
    }

    /// Reads a catalog and compares its bytes with the digest in its name.
    #[boxed]
    pub(crate) async fn read_bytes(store: &Store, path: &str) -> Result<Bytes> {
        let (_, digest) = catalog_of(path).ok_or_else(|| Error::invalid("not the name of a catalog").object(path))?;
        let bytes = store.objects().get(path, store.limits().max_catalog_bytes).await?;
        match Digest::of(&bytes) == digest {
            true => Ok(bytes),
            false => Err(Error::corrupt("its bytes do not have the digest in its name").object(path).clause("log 6.2")),
        }
    }

    /// Returns the rows of a catalog. All records must be summarised.
    pub(crate) fn table(records: &[&SnapshotRecord]) -> Result<RecordBatch> {
        table(records)
    }

    /// Writes the catalog of a state and returns its path. All records of `state` must be summarised.
    #[boxed]
    pub(crate) async fn write(store: &Store, state: &LogState) -> Result<String> {
        let bytes = encode(state)?;
        crate::Limits::check(bytes.len() as u64, store.limits().max_catalog_bytes, "size of the catalog")?;
        let path = format!("catalog/{:020}-{}.parquet", state.sequence, Digest::of(&bytes));
        store.objects().create_unique(&path, bytes).await?;
        Ok(path)
    }
}

/// Builds the rows of a catalog. All records must be summarised.
fn table(records: &[&SnapshotRecord]) -> Result<RecordBatch> {
    let user_bytes = |r: &SnapshotRecord| r.summary.as_ref().map_or(0, |s| s.user.iter().map(|(k, v)| k.len() + v.to_string().len()).sum());
    if records.iter().copied().map(user_bytes).sum::<usize>() > MAX_USER_BYTES {
        return Err(Error::limit(format!("user metadata of all snapshots exceeds {MAX_USER_BYTES} bytes")).clause("log 6"));
    }
    let summary = |record: &SnapshotRecord| record.summary.clone().unwrap_or_default();
    let numbers = |value: &dyn Fn(&SnapshotRecord) -> u64| -> ArrayRef {
        Arc::new(UInt64Array::from_iter_values(records.iter().copied().map(value)))
    };
    let texts = |value: &dyn Fn(&SnapshotRecord) -> Option<String>| -> ArrayRef {
        Arc::new(StringArray::from_iter(records.iter().copied().map(value)))
    };
    let ratios = records.iter().map(|record| {
        let summary = summary(record);
        summary.stored_bytes as f64 / summary.tensor_bytes.max(1) as f64
    });
    let mut columns: Vec<(String, ArrayRef, bool)> = vec![
        ("sequence".into(), numbers(&|r| r.sequence), false),
        ("revision".into(), numbers(&|r| r.revision), false),
        ("step".into(), numbers(&|r| r.step), false),
        ("snapshot".into(), texts(&|r| Some(r.id.to_hex())), false),
        ("kind".into(), texts(&|r| Some(r.kind().name().into())), false),
        ("parent".into(), texts(&|r| r.parent.map(|id| id.to_hex())), true),
        ("manifest".into(), texts(&|r| Some(r.manifest.to_hex())), false),
        ("status".into(), texts(&|r| Some(r.status.name().into())), false),
        ("pinned".into(), Arc::new(BooleanArray::from_iter(records.iter().map(|r| Some(r.pinned)))), false),
        ("roles".into(), texts(&|r| r.roles.as_ref().map(|roles| Value::from(roles.clone()).to_string())), true),
        ("tensor_bytes".into(), numbers(&|r| summary(r).tensor_bytes), false),
        ("stored_bytes".into(), numbers(&|r| summary(r).stored_bytes), false),
        ("ratio".into(), Arc::new(Float64Array::from_iter_values(ratios)), false),
        ("time_ms".into(), numbers(&|r| r.time_ms), false),
        ("user".into(), texts(&|r| Some(Value::Object(summary(r).user).to_string())), false),
    ];
    if records.iter().any(|record| record.inline.is_some()) {
        let inline = UInt64Array::from_iter(records.iter().map(|record| record.inline));
        columns.push((INLINE_COLUMN.into(), Arc::new(inline), true));
    }
    let mut user: BTreeMap<String, Vec<Option<Value>>> = BTreeMap::new();
    for (row, record) in records.iter().enumerate() {
        for (key, value) in summary(record).user {
            if user.len().saturating_mul(records.len()) > MAX_USER_CELLS {
                let message = "the snapshots have too many different keys of user metadata for a catalog; use the same keys in each save";
                return Err(Error::limit(message).clause("log 6"));
            }
            user.entry(key).or_insert_with(|| vec![None; records.len()])[row] = Some(value);
        }
    }
    for (key, values) in user {
        columns.push((format!("{USER_PREFIX}{key}"), fact_column(&values), true));
    }

    let fields: Vec<Field> = columns.iter().map(|(name, array, nullable)| Field::new(name, array.data_type().clone(), *nullable)).collect();
    let batch = RecordBatch::try_new(Arc::new(Schema::new(fields)), columns.into_iter().map(|(_, array, _)| array).collect());
    batch.map_err(|e| Error::invalid(format!("the catalog is no table: {e}")))
}

fn encode(state: &LogState) -> Result<Bytes> {
    let batch = table(&state.snapshots().iter().collect::<Vec<_>>())?;
    let bytes = write(state, &batch)?;
    let mut budget = TextBudget::of(bytes.len());
    let texts = ["user", "roles"].into_iter().filter_map(|name| batch.column_by_name(name));
    let fits = texts.flat_map(|column| column.as_string::<i32>().iter().flatten()).try_for_each(|text| budget.take(text));
    fits.map_err(|message| Error::limit(format!("the catalog: {message}; save less user metadata with each step")).clause("log 6.3"))?;
    Ok(bytes)
}

/// Writes rows as Parquet, with the facts of the state that are no rows.
fn write(state: &LogState, batch: &RecordBatch) -> Result<Bytes> {
    let note = StateNote {
        writer: state.last_writer.map(|last| last.writer),
        writer_sequence: state.last_writer.map(|last| last.sequence),
        must_understand: state.must_understand.clone(),
        may_ignore: state.may_ignore.clone(),
    };
    let note = serde_json::to_string(&note).map_err(|e| Error::invalid(format!("cannot be written as JSON: {e}")))?;
    let head = state.head.map(|digest| digest.to_hex()).unwrap_or_default();
    let mut pairs = vec![(SEQUENCE_KEY, state.sequence.to_string()), (ENTRY_KEY, head), (STATE_KEY, note)];
    let newest = state.snapshots().last().and_then(|record| record.summary.as_ref()?.directory).or(state.directory);
    pairs.extend(newest.map(|digest| (DIRECTORY_KEY, digest.to_hex())));
    if let Some(leading) = state.leadership.leading() {
        let json = serde_json::to_string(leading).map_err(|e| Error::invalid(format!("cannot be written as JSON: {e}")))?;
        pairs.push((LEADERSHIP_KEY, json));
    }
    let pairs = pairs.into_iter().map(|(key, value)| KeyValue::new(key.to_owned(), value)).collect();
    let mut properties = WriterProperties::builder().set_key_value_metadata(Some(pairs));
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        let path = ColumnPath::new(vec![field.name().clone()]);
        if column.null_count() == column.len() {
            // fastparquet cannot read an empty dictionary.
            properties = properties.set_column_dictionary_enabled(path.clone(), false);
        }
        if may_hold_nan(column) {
            // Extremes leave NaN out, so DuckDB skips rows with NaN if a file has extremes.
            properties = properties.set_column_statistics_enabled(path, EnabledStatistics::None);
        }
    }
    let properties = properties.build();
    let mut bytes = Vec::new();
    let written = || -> Result<(), parquet::errors::ParquetError> {
        let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties))?;
        writer.write(batch)?;
        writer.close()?;
        Ok(())
    };
    written().map_err(|e| Error::new(ErrorKind::InvalidArgument, format!("the catalog cannot be written: {e}")))?;
    Ok(bytes.into())
}

fn decode(bytes: Bytes, sequence: u64) -> Result<LogState> {
    let bad = |message: String| Error::corrupt(message).clause("log 6.3");
    let parquet = |e: parquet::errors::ParquetError| bad(format!("not a valid Parquet table: {e}"));
    let builder = ParquetRecordBatchReaderBuilder::try_new(bytes.clone()).map_err(parquet)?;
    let pages = check_pages(&bytes, builder.metadata()).map_err(|message| bad(message.to_owned()))?;
    check_rows(&bytes, builder.metadata()).map_err(|message| bad(message.to_owned()))?;
    let mut texts = TextBudget::of(bytes.len());
    let pairs: BTreeMap<String, String> = builder
        .metadata()
        .file_metadata()
        .key_value_metadata()
        .into_iter()
        .flatten()
        .filter_map(|pair| Some((pair.key.clone(), pair.value.clone()?)))
        .collect();
    let pair = |key: &str| pairs.get(key).ok_or_else(|| bad(format!("`{key}` is missing")));
    if pair(SEQUENCE_KEY)?.parse() != Ok(sequence) {
        return Err(bad("its name and its metadata name different entries".into()));
    }
    let note: StateNote = serde_json::from_str(pair(STATE_KEY)?).map_err(|e| bad(format!("`{STATE_KEY}`: {e}")))?;
    crate::version::check_feature_names(&note.must_understand)?;
    let mut state = LogState::default();
    state.sequence = sequence;
    state.head = Some(Digest::from_hex(pair(ENTRY_KEY)?).map_err(|e| e.clause("log 6.3"))?);
    state.last_writer = note.writer.zip(note.writer_sequence).map(|(writer, sequence)| LastWriter { writer, sequence });
    state.writers.extend(note.writer);
    state.must_understand = note.must_understand;
    state.may_ignore = note.may_ignore;
    state.directory = pairs.get(DIRECTORY_KEY).and_then(|digest| Digest::from_hex(digest).ok());
    let leading: Option<LeaderState> = pairs
        .get(LEADERSHIP_KEY)
        .map(|json| serde_json::from_str(json))
        .transpose()
        .map_err(|e| bad(format!("`{LEADERSHIP_KEY}`: {e}")))?;
    state.leadership = Leadership::from_catalog(leading, note.writer_sequence);
    // Checks that every column is there, even in a table without rows. The typed columns of user metadata are only for
    // SQL.
    let schema = builder.schema().clone();
    if let Some(missing) = COLUMNS.iter().find(|name| schema.column_with_name(name).is_none()) {
        return Err(bad(format!("column `{missing}` is missing")));
    }
    let has_inline = schema.column_with_name(INLINE_COLUMN).is_some();
    let names = COLUMNS.iter().copied().chain(has_inline.then_some(INLINE_COLUMN));
    let wanted = ProjectionMask::columns(builder.parquet_schema(), names);
    for batch in builder.with_projection(wanted).with_batch_size(pages.batch_rows()).build().map_err(parquet)? {
        let batch = batch.map_err(|e| bad(format!("not a valid Parquet table: {e}")))?;
        let rows = Rows { batch: &batch };
        for row in 0..batch.num_rows() {
            for name in ["user", "roles"] {
                let text = rows.text_if_present(name, row)?.unwrap_or_default();
                texts.take(&text).map_err(|message| bad(message.to_owned()))?;
            }
            let id = |text: String| Id::from_hex(&text).map_err(|e| e.clause("log 6.3"));
            let parent = rows.text_if_present("parent", row)?.map(id).transpose()?;
            let record = SnapshotRecord {
                sequence: rows.number("sequence", row)?,
                revision: rows.number("revision", row)?,
                id: id(rows.text("snapshot", row)?)?,
                step: rows.number("step", row)?,
                parent,
                manifest: Digest::from_hex(&rows.text("manifest", row)?).map_err(|e| e.clause("log 6.3"))?,
                status: SnapshotStatus::from_name(&rows.text("status", row)?).ok_or_else(|| bad("unknown status".into()))?,
                pinned: rows.boolean("pinned", row)?,
                time_ms: rows.number("time_ms", row)?,
                roles: rows.roles(row)?,
                inline: if has_inline { rows.number_if_present(INLINE_COLUMN, row)? } else { None },
                summary: Some(Summary {
                    tensor_bytes: rows.number("tensor_bytes", row)?,
                    stored_bytes: rows.number("stored_bytes", row)?,
                    user: rows.user(row)?,
                    directory: None,
                }),
            };
            let expected = if parent.is_some() { SnapshotKind::Delta } else { SnapshotKind::Base };
            if rows.text("kind", row)? != expected.name() {
                return Err(bad(format!("row {row}: kind and parent disagree")));
            }
            if record.inline.is_some() && record.revision != record.sequence {
                return Err(bad(format!("row {row}: a compacted snapshot is not in its log entry")));
            }
            if record.revision < record.sequence || record.revision > sequence {
                return Err(bad(format!("row {row}: its revision is not an entry from its own to that of the catalog")));
            }
            if record.sequence > sequence || state.snapshots().last().is_some_and(|last| last.sequence >= record.sequence) {
                return Err(bad(format!("row {row}: sequences do not ascend to that of the catalog")));
            }
            // A chain therefore ends, and every snapshot is there that another one needs.
            if let Some(parent) = record.parent.filter(|parent| state.by_id(*parent).is_none()) {
                return Err(bad(format!("row {row}: no earlier row has its parent {parent}")));
            }
            state.insert(record).map_err(|e| e.clause("log 6.3"))?;
        }
    }
    Ok(state)
}

/// Refuses a file that claims more rows than it can hold: each row has an id of its own, which takes more than a byte.
fn check_rows(bytes: &[u8], metadata: &ParquetMetaData) -> Result<(), &'static str> {
    let rows = metadata.file_metadata().num_rows();
    if !usize::try_from(rows).is_ok_and(|rows| rows <= bytes.len()) {
        return Err("it claims more rows than it has bytes");
    }
    let mut columns = metadata.row_groups().iter().flat_map(|group| group.columns());
    match columns.any(|column| column.column_descr().max_rep_level() == 0 && column.num_values() > rows) {
        true => Err("a column has more values than there are rows"),
        false => Ok(()),
    }
}

/// Typed access to the rows of the table. A missing or mistyped column is an error.
struct Rows<'a> {
    batch: &'a RecordBatch,
}

impl Rows<'_> {
    fn column(&self, name: &str, wanted: &DataType) -> Result<&ArrayRef> {
        let column = self.batch.column_by_name(name).filter(|column| column.data_type() == wanted);
        column.ok_or_else(|| Error::corrupt(format!("column `{name}` is missing or not {wanted}")).clause("log 6.3"))
    }

    fn number_if_present(&self, name: &str, row: usize) -> Result<Option<u64>> {
        let column = self.column(name, &DataType::UInt64)?.as_primitive::<UInt64Type>();
        Ok((!column.is_null(row)).then(|| column.value(row)))
    }

    fn number(&self, name: &str, row: usize) -> Result<u64> {
        self.number_if_present(name, row)?.ok_or_else(|| null(name, row))
    }

    fn boolean(&self, name: &str, row: usize) -> Result<bool> {
        let column = self.column(name, &DataType::Boolean)?.as_boolean();
        if column.is_null(row) { Err(null(name, row)) } else { Ok(column.value(row)) }
    }

    fn text_if_present(&self, name: &str, row: usize) -> Result<Option<String>> {
        let column = self.column(name, &DataType::Utf8)?.as_string::<i32>();
        Ok((!column.is_null(row)).then(|| column.value(row).to_owned()))
    }

    fn text(&self, name: &str, row: usize) -> Result<String> {
        self.text_if_present(name, row)?.ok_or_else(|| null(name, row))
    }

    fn roles(&self, row: usize) -> Result<Option<Vec<String>>> {
        let bad = |e| Error::corrupt(format!("roles in row {row}: {e}")).clause("log 6.3");
        self.text_if_present("roles", row)?.map(|text| serde_json::from_str(&text).map_err(bad)).transpose()
    }

    fn user(&self, row: usize) -> Result<Map<String, Value>> {
        let text = self.text("user", row)?;
        serde_json::from_str(&text).map_err(|e| Error::corrupt(format!("user metadata in row {row}: {e}")).clause("log 6.3"))
    }
}

fn null(name: &str, row: usize) -> Error {
    Error::corrupt(format!("column `{name}` has no value in row {row}")).clause("log 6.3")
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value};

    use super::super::{LogState, SnapshotRecord, SnapshotStatus, Summary};
    use super::{decode, encode, table, write};
    use crate::ErrorKind;
    use crate::wire::{Digest, Id};

    fn with_user(row: u64, key: String) -> SnapshotRecord {
        with_fact(row, key, 1.into())
    }

    fn with_fact(row: u64, key: String, value: Value) -> SnapshotRecord {
        let user = Map::from_iter([(key, value)]);
        SnapshotRecord {
            sequence: row + 1,
            revision: row + 1,
            id: Id(std::array::from_fn(|at| (row >> (8 * at.min(7))) as u8)),
            step: row,
            parent: None,
            manifest: Digest::of(&[]),
            status: SnapshotStatus::Live,
            pinned: false,
            time_ms: 0,
            roles: None,
            inline: None,
            summary: Some(Summary { user, ..Summary::default() }),
        }
    }

    /// A chain that does not end would be followed for ever.
    #[test]
    fn a_parent_is_an_earlier_row() {
        let first = with_user(0, "loss".into());
        let second = with_user(1, "loss".into());
        let decoded = |parents: [Option<Id>; 2]| {
            let mut state = LogState::default();
            (state.sequence, state.head) = (2, Some(Digest::of(&[])));
            for (record, parent) in [&first, &second].into_iter().zip(parents) {
                state.insert(SnapshotRecord { parent, ..record.clone() }).unwrap();
            }
            decode(encode(&state).unwrap(), 2)
        };
        assert_eq!(decoded([None, Some(first.id)]).unwrap().snapshots().len(), 2);
        for parents in [[Some(second.id), Some(first.id)], [None, Some(second.id)], [None, Some(Id([7; 16]))]] {
            let error = decoded(parents).unwrap_err();
            assert_eq!((error.kind(), error.clause_name()), (ErrorKind::Corrupt, Some("log 6.3")));
        }
    }

    /// A table has a column for each key, so keys that name the step would fill memory.
    #[test]
    fn keys_that_differ_in_each_snapshot_are_a_limit() {
        let of = |key: fn(u64) -> String| {
            let records: Vec<SnapshotRecord> = (0..2_100).map(|row| with_user(row, key(row))).collect();
            table(&records.iter().collect::<Vec<_>>()).map(|table| table.num_rows())
        };
        assert_eq!(of(|_| "loss".into()).unwrap(), 2_100);
        assert_eq!(of(|row| format!("loss at step {row}")).unwrap_err().kind(), ErrorKind::LimitExceeded);
    }

    fn state(rows: u64, value: impl Fn(u64) -> Value) -> LogState {
        let mut state = LogState::default();
        state.sequence = rows;
        state.head = Some(Digest::of(&[]));
        (0..rows).for_each(|row| state.insert(with_fact(row, "note".into(), value(row))).unwrap());
        state
    }

    /// Parquet stores a text once, so a small file could hold gigabytes of it.
    #[test]
    fn a_text_that_is_repeated_by_number_has_a_bound() {
        let repeated = state(1000, |_| "x".repeat(50_000).into());
        let batch = table(&repeated.snapshots().iter().collect::<Vec<_>>()).unwrap();
        let bytes = write(&repeated, &batch).unwrap();
        assert!(bytes.len() < 1 << 20, "{}", bytes.len());
        let error = decode(bytes, 1000).unwrap_err();
        assert!(error.kind() == ErrorKind::Corrupt && error.message().contains("64 times"), "{error}");
        assert_eq!(encode(&repeated).unwrap_err().kind(), ErrorKind::LimitExceeded, "what is written can be read");
        // Long texts make small batches, which change nothing else.
        let kept = state(200, |row| format!("{row}{}", "x".repeat(20_000)).into());
        assert_eq!(decode(encode(&kept).unwrap(), 200).unwrap().snapshots(), kept.snapshots());
    }
}
