//! safetensors: reads one or more files, or the index of a sharded model, as a state, and writes a snapshot as one
//! file.
//!
//! The `safetensors` crate parses and checks headers. Its writer cannot stream tensor by tensor, so this module writes
//! the header itself: eight bytes of length, JSON padded with spaces to eight bytes, then the data.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use ::safetensors::SafeTensors;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::limits::{to_usize, zeroed};
use crate::store::map_file;
use crate::{Dtype, Error, ReadRequest, Result, Slice, SlicePart, Snapshot, Tensor, TensorView, boxed};

/// Maximum size of the index of a sharded model. An index of a million tensors has about 100 MB.
const MAX_INDEX_BYTES: usize = 256 << 20;

/// Maximum size of a header. Readers refuse files with larger ones.
const MAX_HEADER_BYTES: usize = 100_000_000;

/// Key of a header that holds strings instead of a tensor.
const METADATA: &str = "__metadata__";

/// Index of a sharded model.
#[derive(Deserialize)]
struct Index {
    /// File of each tensor.
    weight_map: BTreeMap<String, String>,
}

/// Memory-mapped files that together hold one state.
#[derive(Debug)]
pub struct Files {
    files: Vec<(String, Bytes)>,
    /// Names of the tensors that an index lists, each with the index.
    promised: Vec<(String, String)>,
}

impl Files {
    /// Maps files. The files must not change while the value is in use. A path that ends with `.index.json` is the
    /// index of a sharded model, as Hugging Face writes it. Such a path stands for the files that the index names, all
    /// in the folder of the index.
    pub fn open(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let mut found = Self { files: Vec::new(), promised: Vec::new() };
        for path in paths.iter().map(AsRef::as_ref) {
            if path.to_string_lossy().ends_with(".index.json") {
                found.open_index(path)?;
            } else {
                found.files.push((path.display().to_string(), map_file(path)?));
            }
        }
        Ok(found)
    }

    fn open_index(&mut self, path: &Path) -> Result<()> {
        let index = path.display().to_string();
        let bytes = map_file(path)?;
        if bytes.len() > MAX_INDEX_BYTES {
            return Err(
                Error::limit(format!("the index of weights has {} bytes, over the limit of {MAX_INDEX_BYTES}", bytes.len())).object(index)
            );
        }
        let Index { weight_map } =
            serde_json::from_slice(&bytes).map_err(|e| Error::corrupt(format!("not the index of a sharded model: {e}")).object(&index))?;
        let names: BTreeSet<&String> = weight_map.values().collect();
        for name in names {
            if Path::new(name).file_name().is_none_or(|file| file != name.as_str()) {
                return Err(Error::invalid(format!("names a file outside of its folder: `{}`", name.escape_debug())).object(index));
            }
            let shard = path.with_file_name(name);
            self.files.push((shard.display().to_string(), map_file(&shard)?));
        }
        self.promised.extend(weight_map.into_keys().map(|tensor| (tensor, index.clone())));
        Ok(())
    }

    /// Returns the tensors of all files. Fails if two files hold the same name, or if an index lists a name that
    /// no file holds.
    pub fn tensors(&self) -> Result<Vec<TensorView<'_>>> {
        let mut views = Vec::new();
        let mut seen: BTreeMap<String, &str> = BTreeMap::new();
        for (path, bytes) in &self.files {
            let file = parse(path, bytes)?;
            for (name, view) in file.iter() {
                if let Some(other) = seen.insert(name.to_owned(), path) {
                    return Err(Error::invalid(format!("is in {other}, too: each name must be in only one file"))
                        .object(path)
                        .tensor(name));
                }
                let dtype = dtype_of(view.dtype()).map_err(|e| e.object(path).tensor(name))?;
                let shape: Vec<u64> = view.shape().iter().map(|&extent| extent as u64).collect();
                views.push(TensorView::new(name, dtype, &shape, view.data()).map_err(|e| e.object(path))?);
            }
        }
        match self.promised.iter().find(|(name, _)| !seen.contains_key(name)) {
            Some((name, index)) => Err(Error::corrupt("is named by the index, and no file has it").object(index).tensor(name)),
            None => Ok(views),
        }
    }

    /// Returns `__metadata__` of all files. Fails if two files hold different values for a key.
    pub fn metadata(&self) -> Result<BTreeMap<String, String>> {
        let mut merged: BTreeMap<String, String> = BTreeMap::new();
        for (path, bytes) in &self.files {
            let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| not_safetensors(path, &e))?;
            for (key, value) in header.metadata().iter().flatten() {
                if let Some(other) = merged.insert(key.clone(), value.clone())
                    && other != *value
                {
                    return Err(Error::invalid(format!(
                        "__metadata__ `{}` is `{value}` here and `{other}` in another file",
                        key.escape_debug()
                    ))
                    .object(path));
                }
            }
        }
        Ok(merged)
    }
}

/// Part of a snapshot to write.
#[derive(Debug, Clone)]
pub struct Selected {
    /// Name of the tensor.
    pub name: String,
    /// Slice of the tensor.
    pub slice: Slice,
}

/// Part of a tensor that is read and written at once.
struct Piece<'a> {
    name: &'a str,
    slice: Slice,
    bytes: u64,
    /// Position in the output file.
    position: u64,
}

/// Writes tensors of a snapshot, in ascending order of names, as one safetensors file, from the start of `out`. Returns
/// the size of the file. If everything is selected, first compares the whole content with the snapshot's content
/// digests.
///
/// Tensors are read parameter by parameter, because their codecs need each other. So the file is not written front to
/// back. A failure leaves a partial file: write to a temporary name and rename the file on success.
pub async fn write(snapshot: &Snapshot, selected: &[Selected], out: &mut (impl Write + Seek + Send)) -> Result<u64> {
    let io = |e: std::io::Error| Error::io("the output file", e);
    let mut header = Map::new();
    if !snapshot.metadata().is_empty() {
        header.insert(METADATA.into(), json!(snapshot.metadata()));
    }
    let mut end = 0u64;
    let mut slices = Vec::new();
    let mut starts = Vec::new();
    for Selected { name, slice } in selected {
        if name == METADATA {
            return Err(Error::unsupported("safetensors keeps this name for its own use. Select other tensors").tensor(name));
        }
        let tensor = snapshot.tensor(name)?;
        let rect = slice.of(&tensor.shape).map_err(|e| e.tensor(name))?;
        let too_large = || Error::limit("a file beyond 2^64 bytes").tensor(name);
        let bytes = rect.element_count().and_then(|n| tensor.dtype.byte_count(n)).ok_or_else(too_large)?;
        let start = end;
        end = end.checked_add(bytes).ok_or_else(too_large)?;
        let entry = json!({ "dtype": name_of(tensor.dtype, name)?, "shape": rect.shape, "data_offsets": [start, end] });
        if header.insert(name.clone(), entry).is_some() {
            return Err(Error::invalid("selected twice").tensor(name));
        }
        slices.push((name.as_str(), slice.clone()));
        starts.push(start);
    }
    let header = encode_header(header)?;
    if selected.len() == snapshot.tensors().len() {
        snapshot.inspect().check_content().await?;
    }
    let prefix = length_prefix(header.len() as u64);
    let data_start = (prefix.len() as u64).saturating_add(header.len() as u64);
    let file_bytes = data_start.checked_add(end).ok_or_else(|| Error::limit("a file beyond 2^64 bytes"))?;
    out.rewind().and_then(|()| out.write_all(&prefix)).and_then(|()| out.write_all(&header)).map_err(io)?;

    let mut buffer = Vec::new();
    for window in SlicePart::windows(snapshot, &slices, u64::MAX)? {
        let piece = |part: &SlicePart| {
            let (&(name, _), &start) = (slices.get(part.item)?, starts.get(part.item)?);
            Some(Piece { name, slice: part.slice(), bytes: part.bytes, position: data_start + start + part.first_byte })
        };
        let mut pieces: Vec<Piece<'_>> = window.iter().filter_map(piece).collect();
        write_window(snapshot, &mut pieces, &mut buffer, out).await?;
    }
    out.flush().map_err(io)?;
    Ok(file_bytes)
}

/// Writes a tensor in memory as a safetensors file.
pub fn write_tensor(tensor: &Tensor, out: &mut impl Write) -> Result<()> {
    let Tensor { name, dtype, shape, data } = tensor;
    let entry = json!({ "dtype": name_of(*dtype, name)?, "shape": shape, "data_offsets": [0, data.len()] });
    let header = encode_header(Map::from_iter([(name.clone(), entry)]))?;
    let written = [&length_prefix(header.len() as u64)[..], &header, data].into_iter().try_for_each(|bytes| out.write_all(bytes));
    written.and_then(|()| out.flush()).map_err(|e| Error::io("the output file", e).tensor(name))
}

/// Encodes a header as JSON, padded with spaces to eight bytes.
fn encode_header(header: Map<String, Value>) -> Result<Vec<u8>> {
    let mut encoded = serde_json::to_vec(&Value::Object(header)).map_err(|e| Error::invalid(format!("cannot be written as JSON: {e}")))?;
    encoded.resize(encoded.len().next_multiple_of(8), b' ');
    if encoded.len() > MAX_HEADER_BYTES {
        return Err(Error::limit(format!(
            "the header of a safetensors file may have {MAX_HEADER_BYTES} bytes, and this one would have {}. Write shards with \
             `tensorcask export --max-shard-bytes N`, or fewer tensors with `tensorcask restore --tensor GLOB`",
            encoded.len()
        )));
    }
    Ok(encoded)
}

/// Reads a window into `buffer`, which is reused for every window, because fresh pages cost more than reading into existing
/// ones. Then writes the pieces to their places.
#[boxed]
async fn write_window(
    snapshot: &Snapshot,
    window: &mut [Piece<'_>],
    buffer: &mut Vec<u8>,
    out: &mut (impl Write + Seek + Send),
) -> Result<()> {
    window.sort_by_key(|piece| piece.position);
    let total = to_usize(window.iter().map(|piece| piece.bytes).sum(), "a window of tensors")?;
    if buffer.len() < total {
        *buffer = zeroed(total, "a window of tensors")?;
    }
    let mut rest = &mut buffer[..total];
    let mut requests = Vec::with_capacity(window.len());
    for piece in window.iter() {
        // The sizes are parts of the total, which fits `usize`.
        let (head, tail) = rest.split_at_mut(piece.bytes as usize);
        requests.push(ReadRequest { name: piece.name, slice: piece.slice.clone(), out: head });
        rest = tail;
    }
    snapshot.read_many_into(requests).await?;
    let mut rest = &buffer[..total];
    for run in window.chunk_by(|before, after| before.position.saturating_add(before.bytes) == after.position) {
        let Some(first) = run.first() else { continue };
        let (bytes, tail) = rest.split_at(run.iter().map(|piece| piece.bytes as usize).sum());
        let written = out.seek(SeekFrom::Start(first.position)).and_then(|_| out.write_all(bytes));
        written.map_err(|e| Error::io("the output file", e).tensor(first.name))?;
        rest = tail;
    }
    Ok(())
}

fn parse<'a>(path: &str, bytes: &'a Bytes) -> Result<SafeTensors<'a>> {
    SafeTensors::deserialize(bytes).map_err(|e| not_safetensors(path, &e))
}

fn not_safetensors(path: &str, error: &::safetensors::SafeTensorError) -> Error {
    Error::invalid(format!("not a valid safetensors file: {error}")).object(path)
}

#[allow(clippy::little_endian_bytes, reason = "the length prefix of another format")]
fn length_prefix(length: u64) -> [u8; 8] {
    length.to_le_bytes()
}

macro_rules! dtype_names {
    ($($ours:ident = $theirs:ident),* $(,)?) => {
        fn dtype_of(dtype: ::safetensors::Dtype) -> Result<Dtype> {
            match dtype {
                $(::safetensors::Dtype::$theirs => Ok(Dtype::$ours),)*
                other => Err(Error::unsupported(format!("safetensors dtype {other:?} has no counterpart"))),
            }
        }

        /// Returns the name of a dtype in a safetensors header.
        fn name_of(dtype: Dtype, tensor: &str) -> Result<::safetensors::Dtype> {
            match dtype {
                $(Dtype::$ours => Ok(::safetensors::Dtype::$theirs),)*
                other => Err(Error::unsupported(format!("safetensors cannot hold {other}")).tensor(tensor)),
            }
        }
    };
}

dtype_names! {
    Bool = BOOL, U8 = U8, U16 = U16, U32 = U32, U64 = U64, I8 = I8, I16 = I16, I32 = I32, I64 = I64,
    F16 = F16, Bf16 = BF16, F32 = F32, F64 = F64, C64 = C64,
    F8E4M3 = F8_E4M3, F8E5M2 = F8_E5M2, F8E4M3Fnuz = F8_E4M3FNUZ, F8E5M2Fnuz = F8_E5M2FNUZ, F8E8M0 = F8_E8M0,
    F6E2M3 = F6_E2M3, F6E3M2 = F6_E3M2, F4E2M1 = F4,
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value};

    use super::{MAX_HEADER_BYTES, encode_header};
    use crate::ErrorKind;

    #[test]
    fn a_header_that_no_reader_accepts_is_refused() {
        // `{"t":""}` has eight bytes.
        let of_length = |length: usize| Map::from_iter([("t".to_owned(), Value::String("x".repeat(length - 8)))]);
        assert_eq!(encode_header(of_length(9)).map(|header| header.len()).ok(), Some(16));
        assert!(encode_header(of_length(MAX_HEADER_BYTES)).is_ok());
        let refused = encode_header(of_length(MAX_HEADER_BYTES + 1)).err();
        assert_eq!(refused.map(|error| error.kind()), Some(ErrorKind::LimitExceeded));
    }
}
