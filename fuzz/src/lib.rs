//! Restores checksums in inputs that the fuzzer has changed, because a fuzzer never guesses a CRC.

use std::ops::Range;

use bytes::Bytes;
use sha2::{Digest, Sha256};
use tensorcask::codec::Partner;
use tensorcask::container::{CaskIndex, IndexDecoder, Progress};
use tensorcask::wire::Id;
use tensorcask::{Dtype, Limits, Result};

const POSTSCRIPT_BYTES: usize = 96;
const SEAL_BYTES: usize = 72;

/// Limits small enough for a fuzzer to reach.
pub fn small_limits() -> Limits {
    Limits {
        max_dimensions: 16,
        max_name_bytes: 256,
        max_tensors: 1 << 12,
        max_shards: 1 << 12,
        max_blobs: 1 << 10,
        max_index_bytes: 1 << 22,
        max_blob_bytes: 1 << 20,
        max_directory_bytes: 1 << 20,
        max_manifest_bytes: 1 << 20,
        max_entry_bytes: 1 << 20,
        ..Limits::default()
    }
}

/// Sets the magics and checksums of a cask, as far as there is room. Leaves page checksums as they are.
pub fn fix_cask(file: &mut [u8]) {
    if file.len() < 32 + POSTSCRIPT_BYTES {
        return;
    }
    file[..8].copy_from_slice(b"\x89TCK\r\n\x1a\n");
    let header_crc = crc32fast::hash(&file[..28]);
    file[28..32].copy_from_slice(&header_crc.to_le_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&file[8..24]);
    let end = file.len() - POSTSCRIPT_BYTES;
    let root = usize::try_from(read(file, end, 8)).unwrap_or(usize::MAX);
    if root < end {
        fix_parts(file, id, root);
        let crc = index_crc(id, root, &file[root..end]);
        file[end + 8..end + 12].copy_from_slice(&crc.to_le_bytes());
    }
    let crc = crc32fast::hash(&[id.as_slice(), &file[end..end + 80]].concat());
    file[end + 80..end + 84].copy_from_slice(&crc.to_le_bytes());
    file[end + 88..].copy_from_slice(b"tck-end\n");
}

/// Sets the checksums of the index parts, if the root gives their places.
fn fix_parts(file: &mut [u8], id: [u8; 16], root: usize) {
    let Some((column, parts)) = part_table(file, root) else { return };
    for (row, range) in parts.into_iter().enumerate() {
        let at = column + 4 * row;
        let (Some(part), true) = (file.get(range.clone()), at + 4 <= file.len()) else { return };
        let crc = index_crc(id, range.start, part);
        file[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Returns the offset of the column of part checksums, and the ranges of the parts. The last part ends at the root.
fn part_table(file: &[u8], root: usize) -> Option<(usize, Vec<Range<usize>>)> {
    let head = |row: usize| usize::try_from(read(file, root + 8 * row, 8)).ok().filter(|&value| value < 1 << 20);
    let tensors = head(0)?;
    let names = head(1)?;
    let dimensions = head(2)?;
    let shards = head(3)?;
    let mut at = root;
    let mut column = |bytes: usize| {
        let start = at;
        at = (at + bytes).next_multiple_of(64);
        start
    };
    column(128);
    column(4 * (tensors + 1));
    column(names);
    let dtypes = column(tensors);
    let shape_offsets = column(4 * (tensors + 1));
    column(8 * dimensions);
    let shard_tensors = column(4 * shards);
    let tensor_of = |shard: usize| read(file, shard_tensors + 4 * shard, 4) as usize;
    let rank = |tensor: usize| {
        let at = |row: usize| read(file, shape_offsets.saturating_add(row.saturating_mul(4)), 4) as usize;
        at(tensor.saturating_add(1)).saturating_sub(at(tensor)).min(64)
    };
    let all: usize = (0..shards).map(|shard| rank(tensor_of(shard))).sum();
    column(8 * all);
    let shapes = column(8 * all);
    column(4 * (head(4)? + 1));
    column(head(5)?);
    column(2 * head(4)?);
    column(4 * (head(6)? + 1));
    column(head(7)?);
    column(4 * head(8)?);
    column(4 * (head(8)? + 1));
    column(head(9)?);
    column(8 * head(8)?);
    column(4 * head(8)?);
    column(8 * head(11)?);
    let page_counts = column(8 * head(11)?);
    let checksums = column(4 * head(11)?);

    // Number of chunks in the run of shards that forms a part.
    let mut counts = Vec::new();
    let mut open = 0u64;
    let mut dimension = 0;
    for shard in 0..shards {
        let tensor = tensor_of(shard);
        let shape: Vec<u64> = (0..rank(tensor)).map(|d| read(file, shapes + 8 * (dimension + d), 8)).collect();
        dimension += shape.len();
        let dtype = Dtype::from_code(*file.get(dtypes.checked_add(tensor)?)?)?;
        open = open.saturating_add(tensorcask::ChunkGrid::new(dtype, &shape).ok()?.chunk_count());
        if open >= 1024 {
            counts.push(std::mem::take(&mut open));
        }
    }
    if open > 0 {
        counts.push(open);
    }
    let lengths: Vec<usize> = counts
        .iter()
        .enumerate()
        .map(|(part, &chunks)| {
            let chunks = usize::try_from(chunks).ok()?;
            let pages = usize::try_from(read(file, page_counts + 8 * part, 8)).ok()?;
            let column = |rows: usize, width: usize| rows.checked_mul(width)?.checked_next_multiple_of(64);
            let columns = [
                column(chunks, 1)?,
                column(chunks, 1)?,
                column(chunks, 1)?,
                column(chunks, 4)?,
                column(pages, 1)?,
                column(pages, 4)?,
                column(pages, 4)?,
            ];
            columns.into_iter().try_fold(0usize, usize::checked_add)
        })
        .collect::<Option<_>>()?;
    let mut end = root;
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for length in lengths.into_iter().rev() {
        let start = end.checked_sub(length)?;
        ranges.insert(0, start..end);
        end = start;
    }
    Some((checksums, ranges))
}

/// Reads a little-endian number. Returns zero past the end.
fn read(file: &[u8], at: usize, width: usize) -> u64 {
    let bytes = at.checked_add(width).and_then(|end| file.get(at..end)).unwrap_or_default();
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn index_crc(id: [u8; 16], offset: usize, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&id);
    hasher.update(&(offset as u64).to_le_bytes());
    hasher.update(bytes);
    hasher.finalize()
}

/// Appends the right seal to a JSON object. Replaces a last line that looks like a seal.
pub fn fix_seal(bytes: &[u8]) -> Vec<u8> {
    let body = match bytes.len().checked_sub(SEAL_BYTES) {
        Some(at) if bytes[at..].starts_with(b"sha256:") => &bytes[..at],
        _ => bytes,
    };
    let mut body = body.to_vec();
    if body.last() != Some(&b'\n') {
        body.push(b'\n');
    }
    let digest: String = Sha256::digest(&body).iter().map(|byte| format!("{byte:02x}")).collect();
    body.extend_from_slice(format!("sha256:{digest}\n").as_bytes());
    body
}

/// Decodes an index. Passes exactly the requested ranges to the decoder.
pub fn decode_index(file: &Bytes, limits: &Limits) -> Result<CaskIndex> {
    let mut decoder = IndexDecoder::new(id_of(file), file.len() as u64, limits.clone());
    let index = loop {
        match decoder.poll()? {
            Progress::Needs(range) => {
                assert!(range.start < range.end && range.end <= file.len() as u64, "{range:?} of {}", file.len());
                decoder.push(range.start, file.slice(range.start as usize..range.end as usize))?;
            }
            Progress::Done(index) => break index,
        }
    };
    load_parts(&index, file)?;
    Ok(index)
}

/// Loads the parts that have not been loaded yet.
pub fn load_parts(index: &CaskIndex, file: &Bytes) -> Result<()> {
    for (part, range) in index.missing_parts() {
        index.load_part(part, file.slice(range.start as usize..range.end as usize))?;
    }
    Ok(())
}

/// Returns the id in the header of a file.
pub fn id_of(file: &[u8]) -> Id {
    let mut id = [0; 16];
    if let Some(bytes) = file.get(8..24) {
        id.copy_from_slice(bytes);
    }
    Id(id)
}

/// Columns of a chunk, named as in its codec. `decoders` parses its input into this, and `seeds` writes the same form.
#[derive(Debug)]
pub struct ChunkInput {
    /// Id of the codec.
    pub codec: &'static str,
    /// Element type.
    pub dtype: Dtype,
    /// Number of elements, 1 to 65,536.
    pub element_count: u64,
    /// Same chunk in the parent.
    pub base: Option<Vec<u8>>,
    /// Names and bytes of the columns.
    pub columns: Vec<(&'static str, Vec<u8>)>,
}

const CODECS: [(&str, &[&str]); 25] = [
    ("tc.planes", &["plane0", "plane1", "plane2", "plane3", "plane4", "plane5", "plane6", "plane7"]),
    ("tc.ordered", &["tokens", "bits"]),
    ("tc.bitmask", &["mask", "values"]),
    ("tc.raw", &["values"]),
    ("tc.constant", &["values"]),
    ("tc.remainder", &["low", "high", "rounding"]),
    ("tc.predict", &["step", "tokens", "bits"]),
    ("tc.predict", &["moment", "tokens", "bits"]),
    ("tc.rows", &["rows", "values"]),
    ("tc.factored", &["rows", "columns", "exponents", "plane0", "plane1", "plane2"]),
    ("tc.rounded", &["rounded0", "rounded1", "low", "high", "rounding"]),
    ("tc.loguniform", &["grid", "rows", "columns", "codes", "signs", "escapes"]),
    ("tc.blockwise8", &["map", "absmax", "codes"]),
    ("tc.cluster", &["labels", "codes", "scale", "offset", "options"]),
    ("tc.kmeans", &["levels", "codes", "protected"]),
    ("tc.magnitudes", &["rows", "columns", "magnitudes", "escapes", "signs", "fractions", "plane0", "plane1"]),
    ("tc.replay", &["step", "tokens", "bits"]),
    ("tc.replay", &["moment", "tokens", "bits"]),
    ("tc.gradient", &["gradient", "exponents", "lengths", "digits"]),
    ("tc.gradient", &["moment", "tokens", "bits"]),
    ("tc.joint", &["gradient", "exponents", "lengths", "digits"]),
    ("tc.joint", &["moment", "tokens", "bits"]),
    ("tc.joint", &["step", "tokens", "bits"]),
    ("tc.descent", &["step", "tokens", "bits"]),
    ("tc.sparse", &["changes"]),
];

impl ChunkInput {
    /// Parses codec (u8), dtype code (u8), elements less 1 (u16), 1 if there is a base (u8), length of each column
    /// (u16), the columns, and the base.
    pub fn parse(data: &[u8]) -> Option<Self> {
        let (head, mut rest) = data.split_at_checked(5)?;
        let (codec, names) = CODECS[usize::from(head[0]) % CODECS.len()];
        let dtype = Dtype::from_code(head[1] % 25 + 1)?;
        let element_count = read(head, 2, 2) + 1;
        let length = usize::try_from(dtype.byte_count(element_count)?).ok()?;
        let names = match codec {
            "tc.planes" => &names[..dtype.unit_bytes()],
            // Four-byte units use all columns, smaller units fewer.
            "tc.factored" | "tc.magnitudes" => &names[..names.len() - 4usize.saturating_sub(dtype.unit_bytes())],
            _ => names,
        };
        let lengths: Vec<usize> = names.iter().enumerate().map(|(i, _)| read(rest, 2 * i, 2) as usize).collect();
        rest = rest.get(2 * names.len()..).unwrap_or_default();
        let mut columns = Vec::new();
        for (name, length) in names.iter().zip(lengths) {
            let (column, after) = rest.split_at(length.min(rest.len()));
            columns.push((*name, column.to_vec()));
            rest = after;
        }
        let base = (head[4] == 1).then(|| stretched(rest, length));
        Some(Self { codec, dtype, element_count, base, columns })
    }
}

/// A chunk with an optional base. `kernels` parses its input into this.
#[derive(Debug)]
pub struct Elements {
    /// Element type.
    pub dtype: Dtype,
    /// Number of elements, 1 to 8,192.
    pub element_count: u64,
    /// Bytes of the chunk.
    pub data: Vec<u8>,
    /// Same chunk in the parent, equal to the chunk except in some places.
    pub base: Option<Vec<u8>>,
}

impl Elements {
    /// Parses dtype code (u8), elements less 1 (u16, modulo 8,192), 1 if there is a base (u8), number of changes (u8),
    /// the changes (place u16, bits u8), and the chunk.
    pub fn parse(data: &[u8]) -> Option<Self> {
        let (head, rest) = data.split_at_checked(5)?;
        let dtype = Dtype::from_code(head[0] % 25 + 1)?;
        let element_count = read(head, 1, 2) % 8192 + 1;
        let length = usize::try_from(dtype.byte_count(element_count)?).ok()?;
        let (changes, rest) = rest.split_at((3 * usize::from(head[4])).min(rest.len()));
        let data = stretched(rest, length);
        let base = (head[3] % 2 == 1).then(|| {
            let mut base = data.clone();
            for change in changes.chunks_exact(3) {
                base[read(change, 0, 2) as usize % length] ^= change[2];
            }
            base
        });
        Some(Self { dtype, element_count, data, base })
    }
}

/// Repeats `bytes` up to `length`, each time slightly changed.
fn stretched(bytes: &[u8], length: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(length);
    let mut turn = 0u8;
    while out.len() < length {
        out.extend(bytes.iter().map(|byte| byte.wrapping_add(turn)).take(length - out.len()));
        if bytes.is_empty() {
            out.resize(length, 0);
        }
        turn = turn.wrapping_add(1);
    }
    out
}

/// Partners of an f32 chunk, made from arbitrary bytes: a weight and both moments, each with its bytes in the parent.
pub struct OwnPartners(Vec<(&'static str, Dtype, Vec<u8>, Vec<u8>)>);

impl OwnPartners {
    /// Makes partners of `element_count` elements.
    pub fn of(element_count: u64, seed: &[u8]) -> Self {
        let bytes = |dtype: Dtype, skip: usize| -> Vec<u8> {
            let length = dtype.byte_count(element_count).unwrap() as usize;
            seed.iter().copied().chain(std::iter::once(0x3f)).cycle().skip(skip % (seed.len() + 1)).take(length).collect()
        };
        let half = if seed.len() % 2 == 0 { Dtype::Bf16 } else { Dtype::F16 };
        let moment = |role, skip| (role, Dtype::F32, bytes(Dtype::F32, skip), bytes(Dtype::F32, skip + 4));
        Self(vec![("model", half, bytes(half, 2), bytes(half, 0)), moment("exp_avg", 8), moment("exp_avg_sq", 12), moment("momentum", 16)])
    }

    /// Borrows the partners in the form that codecs take.
    pub fn borrow(&self) -> Vec<Partner<'_>> {
        // The moments are f32, and so are gradients.
        self.0
            .iter()
            .map(|(role, dtype, data, base)| {
                let gradient = Some(data.as_slice()).filter(|_| *role == "exp_avg");
                Partner { role, dtype: *dtype, data, base: Some(base), gradient }
            })
            .collect()
    }
}

/// Lets panics in the code of dependencies unwind, for decoders that catch them. Other panics abort, and so are findings.
pub fn ignore_panics_of_dependencies() {
    let abort = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let is_ours = |file: &str| !file.contains("/registry/src/") && !file.starts_with("/rustc/");
        if info.location().is_none_or(|location| is_ours(location.file())) {
            abort(info);
        }
    }));
}
