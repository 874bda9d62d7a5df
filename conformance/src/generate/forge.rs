//! Writes casks and directories from drafts, including ones that the library would refuse to write. Implements `spec/`
//! independently of the library.
#![allow(clippy::little_endian_bytes, reason = "a second implementation of the byte layouts")]

use sha2::{Digest, Sha256};

/// Returns an id that is easy to see in a dump.
pub(crate) fn id(number: u8) -> [u8; 16] {
    [number; 16]
}

/// Stored form of a chunk.
#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    pub kind: u8,
    pub codec: &'static str,
    /// Names and bytes of the columns.
    pub columns: Vec<(&'static str, Vec<u8>)>,
    /// CRC-32 of the decoded bytes.
    pub crc: u32,
    /// Decoded bytes of an absolute chunk.
    pub decoded: Option<Vec<u8>>,
}

pub(crate) const UNCHANGED: u8 = 0;
pub(crate) const ABSOLUTE: u8 = 1;
pub(crate) const DELTA: u8 = 2;

impl Chunk {
    pub(crate) fn raw(data: &[u8]) -> Self {
        Self::absolute("tc.raw", vec![("values", data.to_vec())], data.to_vec())
    }

    /// Returns a constant chunk: `unit`, repeated to `bytes`.
    pub(crate) fn constant(unit: &[u8], bytes: usize) -> Self {
        Self::absolute("tc.constant", vec![("values", unit.to_vec())], unit.repeat(bytes / unit.len()))
    }

    pub(crate) fn absolute(codec: &'static str, columns: Vec<(&'static str, Vec<u8>)>, decoded: Vec<u8>) -> Self {
        Self { kind: ABSOLUTE, codec, columns, crc: crc32fast::hash(&decoded), decoded: Some(decoded) }
    }

    pub(crate) fn unchanged(crc: u32) -> Self {
        Self { kind: UNCHANGED, codec: "", columns: vec![], crc, decoded: None }
    }

    /// Returns a `tc.bitmask` delta of units of `width` bytes.
    pub(crate) fn bitmask(base: &[u8], new: &[u8], width: usize) -> Self {
        let mut mask = vec![0u8; (new.len() / width).div_ceil(8)];
        let mut values = Vec::new();
        for (i, (old, new)) in base.chunks(width).zip(new.chunks(width)).enumerate() {
            if old != new {
                mask[i / 8] |= 1 << (i % 8);
                values.extend_from_slice(new);
            }
        }
        Self {
            kind: DELTA,
            codec: "tc.bitmask",
            columns: vec![("mask", mask), ("values", values)],
            crc: crc32fast::hash(new),
            decoded: None,
        }
    }
}

/// A shard with its chunks.
#[derive(Debug, Clone)]
pub(crate) struct Shard {
    pub offset: Vec<u64>,
    pub shape: Vec<u64>,
    pub chunks: Vec<Chunk>,
}

/// A tensor with its shards.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub name: String,
    pub dtype: u8,
    pub shape: Vec<u64>,
    pub shards: Vec<Shard>,
}

impl Tensor {
    pub(crate) fn whole(name: &str, dtype: u8, shape: &[u64], chunks: Vec<Chunk>) -> Self {
        let shard = Shard { offset: vec![0; shape.len()], shape: shape.to_vec(), chunks };
        Self { name: name.to_owned(), dtype, shape: shape.to_vec(), shards: vec![shard] }
    }
}

/// A blob.
#[derive(Debug, Clone)]
pub(crate) struct Blob {
    pub rank: u32,
    pub name: String,
    pub bytes: Vec<u8>,
}

impl Blob {
    pub(crate) fn new(rank: u32, name: &str, bytes: &[u8]) -> Self {
        Self { rank, name: name.to_owned(), bytes: bytes.to_vec() }
    }
}

/// Content of a cask. Dictionaries and pages follow from the chunks.
#[derive(Debug, Clone)]
pub(crate) struct Cask {
    pub id: [u8; 16],
    pub alignment_exponent: u8,
    pub tensors: Vec<Tensor>,
    pub blobs: Vec<Blob>,
}

/// Columns by name, in order, before padding.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table(pub Vec<(&'static str, Vec<u8>)>);

/// A cask before its checksums are set. Edits make one thing wrong while the checksums stay right.
#[derive(Debug, Clone)]
pub(crate) struct Draft {
    pub id: [u8; 16],
    /// Header, pages, blobs and their padding, up to the index.
    pub body: Vec<u8>,
    pub parts: Vec<Table>,
    /// Index root. [`Draft::finish`] enters the checksums of the parts.
    pub root: Table,
    pub version: (u16, u16),
    pub must_understand: u64,
    pub may_ignore: u64,
    pub alignment_exponent: u8,
}

/// Offsets in a finished cask.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places {
    pub index_offset: usize,
    pub root_offset: usize,
}

const POSTSCRIPT_BYTES: usize = 96;

impl Cask {
    pub(crate) fn new(id: [u8; 16], tensors: Vec<Tensor>) -> Self {
        Self { id, alignment_exponent: 6, tensors, blobs: vec![] }
    }

    pub(crate) fn with_blobs(mut self, blobs: Vec<Blob>) -> Self {
        self.blobs = blobs;
        self
    }

    pub(crate) fn draft(&self) -> Draft {
        let alignment = 1usize << self.alignment_exponent;
        let mut body = header(self.id);
        let mut codecs = Vec::new();
        let mut columns = Vec::new();
        let mut parts: Vec<Part> = vec![Part { page_start: 32, ..Part::default() }];
        let mut shard_row = 0u64;
        for shard in self.tensors.iter().flat_map(|tensor| &tensor.shards) {
            if parts.last().is_some_and(|part| part.kinds.len() >= 1024) {
                parts.push(Part { page_start: body.len() as u64, ..Part::default() });
            }
            let mut raw_before = false;
            for (number, chunk) in (0u64..).zip(&shard.chunks) {
                let raw = chunk.kind == ABSOLUTE && chunk.codec == "tc.raw";
                let codec = if chunk.kind == UNCHANGED { 0 } else { row_of(&mut codecs, chunk.codec) };
                let Some(part) = parts.last_mut() else { continue };
                part.kinds.push(chunk.kind);
                part.codecs.push(codec);
                part.page_counts.push(chunk.columns.len() as u8);
                part.decoded_crcs.push(chunk.crc);
                for (nth, (column, bytes)) in chunk.columns.iter().enumerate() {
                    let column = row_of(&mut columns, column);
                    if !(raw && raw_before && nth == 0) {
                        pad(&mut body, alignment);
                    }
                    part.page_columns.push(column);
                    part.page_bytes.push(bytes.len() as u32);
                    part.page_crcs.push(page_crc(self.id, shard_row, number, column.into(), body.len() as u64, bytes));
                    body.extend_from_slice(bytes);
                }
                raw_before = raw;
            }
            shard_row += 1;
        }
        parts.retain(|part| !part.kinds.is_empty());
        let blobs_offset = body.len() as u64;
        let mut blob_crcs = Vec::new();
        for (row, blob) in (0u64..).zip(&self.blobs) {
            pad(&mut body, alignment);
            blob_crcs.push(page_crc(self.id, row, 0, u64::MAX, body.len() as u64, &blob.bytes));
            body.extend_from_slice(&blob.bytes);
        }
        pad(&mut body, 64);

        let shards = self.tensors.iter().enumerate().flat_map(|(i, tensor)| tensor.shards.iter().map(move |shard| (i as u32, shard)));
        let rects: Vec<(u32, Vec<u64>, Vec<u64>)> =
            shards.map(|(tensor, shard)| (tensor, shard.offset.clone(), shard.shape.clone())).collect();
        let tensors: Vec<(&str, u8, &[u64])> = self.tensors.iter().map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice())).collect();
        let head = u64s([
            tensors.len() as u64,
            bytes_of(tensors.iter().map(|t| t.0)),
            tensors.iter().map(|t| t.2.len() as u64).sum(),
            rects.len() as u64,
            codecs.len() as u64,
            bytes_of(codecs.iter().copied()),
            columns.len() as u64,
            bytes_of(columns.iter().copied()),
            self.blobs.len() as u64,
            bytes_of(self.blobs.iter().map(|blob| blob.name.as_str())),
            blobs_offset,
            parts.len() as u64,
            0,
            0,
            0,
            0,
        ]);
        let mut root = Table(vec![("head", head)]);
        root.layout(&tensors, &rects);
        root.text("codec ids", codecs.iter().copied());
        root.0.push(("codec versions", codecs.iter().flat_map(|_| 1u16.to_le_bytes()).collect()));
        root.text("column names", columns.iter().copied());
        root.0.push(("blob ranks", u32s(self.blobs.iter().map(|blob| blob.rank))));
        root.text("blob names", self.blobs.iter().map(|blob| blob.name.as_str()));
        root.0.push(("blob lengths", u64s(self.blobs.iter().map(|blob| blob.bytes.len() as u64))));
        root.0.push(("blob checksums", u32s(blob_crcs)));
        root.0.push(("part page starts", u64s(parts.iter().map(|part| part.page_start))));
        root.0.push(("part page counts", u64s(parts.iter().map(|part| part.page_bytes.len() as u64))));
        root.0.push(("part checksums", u32s(parts.iter().map(|_| 0))));
        root.0.push(("extension features", vec![]));
        root.0.push(("extension lengths", vec![]));
        Draft {
            id: self.id,
            body,
            parts: parts.into_iter().map(Part::table).collect(),
            root,
            version: (1, 0),
            must_understand: 0,
            may_ignore: 0,
            alignment_exponent: self.alignment_exponent,
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.draft().finish().0
    }
}

#[derive(Default)]
struct Part {
    page_start: u64,
    kinds: Vec<u8>,
    codecs: Vec<u8>,
    page_counts: Vec<u8>,
    decoded_crcs: Vec<u32>,
    page_columns: Vec<u8>,
    page_bytes: Vec<u32>,
    page_crcs: Vec<u32>,
}

impl Part {
    fn table(self) -> Table {
        Table(vec![
            ("kinds", self.kinds),
            ("codecs", self.codecs),
            ("page counts", self.page_counts),
            ("decoded checksums", u32s(self.decoded_crcs)),
            ("page columns", self.page_columns),
            ("page lengths", u32s(self.page_bytes)),
            ("page checksums", u32s(self.page_crcs)),
        ])
    }
}

impl Draft {
    /// Sets all checksums and returns the file.
    pub(crate) fn finish(mut self) -> (Vec<u8>, Places) {
        let mut file = self.body;
        let index_offset = file.len();
        let mut crcs = Vec::new();
        for part in &self.parts {
            let bytes = part.bytes();
            crcs.push(index_crc(self.id, file.len(), &bytes));
            file.extend_from_slice(&bytes);
        }
        *self.root.column("part checksums") = u32s(crcs);
        let root_offset = file.len();
        file.extend_from_slice(&self.root.bytes());
        let mut postscript = Vec::new();
        postscript.extend_from_slice(&(root_offset as u64).to_le_bytes());
        postscript.extend_from_slice(&[0; 4]);
        postscript.extend_from_slice(&self.version.0.to_le_bytes());
        postscript.extend_from_slice(&self.version.1.to_le_bytes());
        postscript.extend_from_slice(&self.must_understand.to_le_bytes());
        postscript.extend_from_slice(&self.may_ignore.to_le_bytes());
        postscript.push(self.alignment_exponent);
        postscript.resize(88, 0);
        postscript.extend_from_slice(b"tck-end\n");
        file.extend_from_slice(&postscript);
        fix_index(&mut file, self.id, root_offset);
        (file, Places { index_offset, root_offset })
    }
}

/// Sets the checksums of root and postscript.
pub(crate) fn fix_index(file: &mut [u8], id: [u8; 16], root_offset: usize) {
    let end = file.len() - POSTSCRIPT_BYTES;
    let root_crc = index_crc(id, root_offset, &file[root_offset..end]);
    file[end + 8..end + 12].copy_from_slice(&root_crc.to_le_bytes());
    fix_postscript(file, id);
}

/// Sets the checksum of the postscript.
pub(crate) fn fix_postscript(file: &mut [u8], id: [u8; 16]) {
    let end = file.len() - POSTSCRIPT_BYTES;
    let crc = crc32fast::hash(&[id.as_slice(), &file[end..end + 80]].concat());
    file[end + 80..end + 84].copy_from_slice(&crc.to_le_bytes());
}

/// Sets the checksum of the header.
pub(crate) fn fix_header(file: &mut [u8]) {
    let crc = crc32fast::hash(&file[..28]);
    file[28..32].copy_from_slice(&crc.to_le_bytes());
}

/// Returns SHA-256 over header, root and postscript.
pub(crate) fn digest_of_cask(file: &[u8], root_offset: usize) -> [u8; 32] {
    Sha256::digest([&file[..32], &file[root_offset..]].concat()).into()
}

fn header(id: [u8; 16]) -> Vec<u8> {
    let mut header = b"\x89TCK\r\n\x1a\n".to_vec();
    header.extend_from_slice(&id);
    header.extend_from_slice(&[0; 8]);
    fix_header(&mut header);
    header
}

impl Table {
    /// Returns a column to edit.
    pub(crate) fn column(&mut self, name: &'static str) -> &mut Vec<u8> {
        let at = self.0.iter().position(|(known, _)| *known == name).unwrap_or(self.0.len());
        if at == self.0.len() {
            self.0.push((name, vec![]));
        }
        &mut self.0[at].1
    }

    /// Overwrites row `row` of a column of `u32`.
    pub(crate) fn set_u32(&mut self, name: &'static str, row: usize, value: u32) {
        self.column(name)[4 * row..4 * row + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// Overwrites row `row` of a column of `u64`.
    pub(crate) fn set_u64(&mut self, name: &'static str, row: usize, value: u64) {
        self.column(name)[8 * row..8 * row + 8].copy_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (_, column) in &self.0 {
            bytes.extend_from_slice(column);
            pad(&mut bytes, 64);
        }
        bytes
    }

    /// Adds the tables that casks and directories share.
    fn layout(&mut self, tensors: &[(&str, u8, &[u64])], shards: &[(u32, Vec<u64>, Vec<u64>)]) {
        self.text("tensor names", tensors.iter().map(|t| t.0));
        self.0.push(("dtypes", tensors.iter().map(|t| t.1).collect()));
        self.0.push(("shape offsets", u32s(offsets(tensors.iter().map(|t| t.2.len())))));
        self.0.push(("shapes", u64s(tensors.iter().flat_map(|t| t.2.iter().copied()))));
        self.0.push(("shard tensors", u32s(shards.iter().map(|s| s.0))));
        self.0.push(("shard offsets", u64s(shards.iter().flat_map(|s| s.1.iter().copied()))));
        self.0.push(("shard shapes", u64s(shards.iter().flat_map(|s| s.2.iter().copied()))));
    }

    /// Adds a text heap. The column of its offsets precedes the column with its name.
    fn text<'a>(&mut self, name: &'static str, rows: impl Iterator<Item = &'a str> + Clone) {
        let offsets_name = match name {
            "tensor names" => "tensor name offsets",
            "codec ids" => "codec id offsets",
            "column names" => "column name offsets",
            "blob names" => "blob name offsets",
            "roles" => "role offsets",
            _ => "param offsets",
        };
        self.0.push((offsets_name, u32s(offsets(rows.clone().map(str::len)))));
        self.0.push((name, rows.flat_map(str::bytes).collect()));
    }
}

/// A tensor of a directory.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    pub name: String,
    pub dtype: u8,
    pub shape: Vec<u64>,
    pub role: String,
    pub param: String,
    pub alias_of: Option<u32>,
    /// Offset, shape and slot of each shard.
    pub shards: Vec<(Vec<u64>, Vec<u64>, u32)>,
}

/// Returns the columns of a directory.
pub(crate) fn directory(tensors: &[Listed]) -> Table {
    let mut roles: Vec<&str> = tensors.iter().map(|t| t.role.as_str()).collect();
    roles.sort_unstable();
    roles.dedup();
    let rows: Vec<(&str, u8, &[u64])> = tensors.iter().map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice())).collect();
    let shards: Vec<(u32, Vec<u64>, Vec<u64>)> = (0u32..)
        .zip(tensors)
        .flat_map(|(i, t)| t.shards.iter().map(move |(offset, shape, _)| (i, offset.clone(), shape.clone())))
        .collect();
    let mut head = b"\x89TCD\r\n\x1a\n".to_vec();
    head.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
    head.resize(32, 0);
    head.extend(u64s([
        rows.len() as u64,
        bytes_of(rows.iter().map(|t| t.0)),
        rows.iter().map(|t| t.2.len() as u64).sum(),
        shards.len() as u64,
        roles.len() as u64,
        bytes_of(roles.iter().copied()),
        bytes_of(tensors.iter().map(|t| t.param.as_str())),
    ]));
    head.resize(128, 0);
    let mut table = Table(vec![("head", head)]);
    table.layout(&rows, &shards);
    table.text("roles", roles.iter().copied());
    let role_of = |t: &Listed| roles.binary_search(&t.role.as_str()).unwrap_or_default() as u8;
    table.0.push(("tensor roles", tensors.iter().map(role_of).collect()));
    table.text("params", tensors.iter().map(|t| t.param.as_str()));
    table.0.push(("aliases", u32s(tensors.iter().map(|t| t.alias_of.unwrap_or(u32::MAX)))));
    table.0.push(("slots", u32s(tensors.iter().flat_map(|t| t.shards.iter().map(|s| s.2)))));
    table
}

/// Returns the CRC-32 of a page or blob and of its place.
fn page_crc(id: [u8; 16], shard: u64, chunk: u64, column: u64, offset: u64, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&id);
    [shard, chunk, column, offset].iter().for_each(|value| hasher.update(&value.to_le_bytes()));
    hasher.update(bytes);
    hasher.finalize()
}

fn index_crc(id: [u8; 16], offset: usize, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&id);
    hasher.update(&(offset as u64).to_le_bytes());
    hasher.update(bytes);
    hasher.finalize()
}

/// Returns the row of a name in a dictionary. Adds a new name.
fn row_of(dictionary: &mut Vec<&'static str>, name: &'static str) -> u8 {
    let row = dictionary.iter().position(|known| *known == name).unwrap_or(dictionary.len());
    if row == dictionary.len() {
        dictionary.push(name);
    }
    row as u8
}

fn pad(bytes: &mut Vec<u8>, alignment: usize) {
    bytes.resize(bytes.len().next_multiple_of(alignment), 0);
}

fn bytes_of<'a>(rows: impl Iterator<Item = &'a str>) -> u64 {
    rows.map(|row| row.len() as u64).sum()
}

fn offsets(lengths: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut end = 0;
    std::iter::once(0)
        .chain(lengths.map(|length| {
            end += length as u32;
            end
        }))
        .collect()
}

pub(crate) fn u32s(values: impl IntoIterator<Item = u32>) -> Vec<u8> {
    values.into_iter().flat_map(u32::to_le_bytes).collect()
}

pub(crate) fn u64s(values: impl IntoIterator<Item = u64>) -> Vec<u8> {
    values.into_iter().flat_map(u64::to_le_bytes).collect()
}
