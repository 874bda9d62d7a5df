//! Hex dump of a cask that names each byte: header, pages, blobs, padding, columns of the index, postscript.
//!
//! Spec: `spec/container.md`, `spec/index.md`.

use std::fmt::Write as _;
use std::ops::Range;

use serde::Serialize;
use tensorcask::Result;
use tensorcask::container::{BlobEntry, CaskIndex};
use tensorcask::wire::POSTSCRIPT_BYTES;

use crate::text::{Text, printable};

/// Range of bytes with one meaning.
#[derive(Debug, Serialize)]
pub(crate) struct Region {
    pub offset: u64,
    pub bytes: u64,
    /// Part of the file: `header`, `page`, `blob`, `padding`, `index part`, `index root`, `postscript`.
    pub part: &'static str,
    pub what: String,
    /// First bytes of the region.
    #[serde(skip)]
    head: Vec<u8>,
}

/// Maximum number of bytes of a region in the dump.
const SHOWN: u64 = 64;
/// Maximum number of rows of a column whose values are printed.
const TOLD: usize = 8;
const LINE: usize = 16;
const COLUMN_ALIGNMENT: u64 = 64;

/// Function that reads a range of a file.
pub(crate) type Read<'a> = dyn FnMut(Range<u64>) -> Result<Vec<u8>> + 'a;

struct Map<'a> {
    regions: Vec<Region>,
    end: u64,
    read: &'a mut Read<'a>,
}

/// Content of a column of a table.
enum Kind {
    Numbers(u64),
    Text,
    Opaque,
}

/// Returns all regions of a cask, in order and without gaps.
pub(crate) fn regions<'a>(index: &CaskIndex, read: &'a mut Read<'a>) -> Result<Vec<Region>> {
    let mut map = Map { regions: Vec::new(), end: 0, read };
    for (bytes, what) in [(8, "magic"), (16, "id"), (4, "reserved"), (4, "CRC-32 of the 28 bytes before")] {
        map.take("header", bytes, what)?;
    }
    for tensor in 0..index.tensor_count() {
        let name = index.tensor(tensor).name.to_owned();
        for shard in index.shards_of(tensor) {
            for number in 0..index.grid(shard)?.chunk_count() {
                let chunk = index.chunk(shard, number)?;
                let codec = chunk.codec.map(|codec| codec.id).unwrap_or_default();
                for page in chunk.pages {
                    map.pad_to(page.range.start)?;
                    let bytes = page.range.end.saturating_sub(page.range.start);
                    let kind = chunk.kind.name();
                    map.take(
                        "page",
                        bytes,
                        format!("`{name}`, shard {shard}, chunk {number} ({kind}, {codec}), column `{}`", page.column),
                    )?;
                }
            }
        }
    }
    for BlobEntry { rank, name, page } in index.blobs() {
        map.pad_to(page.range.start)?;
        map.take("blob", page.range.end.saturating_sub(page.range.start), format!("rank {rank}, `{name}`"))?;
    }
    map.pad_to(index.file().index_offset)?;
    map.index(index)?;
    for (bytes, what) in [
        (8, "root_offset"),
        (4, "root_crc: CRC-32 of id, root_offset and root"),
        (2, "version, major"),
        (2, "version, minor"),
        (8, "must-understand features"),
        (8, "may-ignore features"),
        (1, "alignment exponent"),
        (47, "reserved"),
        (4, "CRC-32 of the id and the 80 bytes before"),
        (4, "reserved"),
        (8, "magic"),
    ] {
        map.take("postscript", bytes, what)?;
    }
    Ok(map.regions)
}

impl Map<'_> {
    /// Adds a region of the next bytes; adds nothing for zero bytes.
    fn take(&mut self, part: &'static str, bytes: u64, what: impl Into<String>) -> Result<()> {
        if bytes > 0 {
            let head = (self.read)(self.end..self.end.saturating_add(bytes.min(SHOWN)))?;
            self.regions.push(Region { offset: self.end, bytes, part, what: what.into(), head });
            self.end = self.end.saturating_add(bytes);
        }
        Ok(())
    }

    fn pad_to(&mut self, offset: u64) -> Result<()> {
        self.take("padding", offset.saturating_sub(self.end), "")
    }

    /// Adds a column and its padding. Prints and returns the values of a short column.
    fn column(&mut self, part: &'static str, name: &str, kind: &Kind, bytes: u64) -> Result<Vec<u64>> {
        let mut values = Vec::new();
        let mut what = name.to_owned();
        if bytes > 0 {
            let width = if let Kind::Numbers(width) = kind { *width } else { 1 };
            let short = bytes / width <= TOLD as u64;
            match kind {
                Kind::Numbers(_) if short => {
                    let all = (self.read)(self.end..self.end.saturating_add(bytes))?;
                    values = all.chunks(usize::try_from(width).unwrap_or(1)).map(number).collect();
                    let told: Vec<String> = values
                        .iter()
                        .map(|value| if name.contains("checksum") { format!("{value:08x}") } else { value.to_string() })
                        .collect();
                    let _ = write!(what, ": {}", told.join(", "));
                }
                Kind::Text if bytes <= SHOWN => {
                    let all = (self.read)(self.end..self.end.saturating_add(bytes))?;
                    let _ = write!(what, ": `{}`", String::from_utf8_lossy(&all));
                }
                _ => {}
            }
        }
        self.take(part, bytes, what)?;
        self.pad_to(self.end.next_multiple_of(COLUMN_ALIGNMENT))?;
        Ok(values)
    }

    /// Adds the parts and the root (clauses index 2 to 4). The library has checked that their columns lie where the
    /// head says.
    fn index(&mut self, index: &CaskIndex) -> Result<()> {
        const FIELDS: [&str; 13] = [
            "tensors",
            "name_bytes",
            "dimensions",
            "shards",
            "codecs",
            "codec_bytes",
            "columns",
            "column_bytes",
            "blobs",
            "blob_name_bytes",
            "blobs_offset",
            "parts",
            "extensions",
        ];
        let root = index.file().root_offset;
        let head = (self.read)(root..root.saturating_add(128))?;
        let fields: Vec<u64> = head.chunks(8).map(number).collect();
        let [
            tensors,
            name_bytes,
            dimensions,
            shards,
            codecs,
            codec_bytes,
            columns,
            column_bytes,
            blobs,
            blob_name_bytes,
            _,
            parts,
            extensions,
        ] = fields[..13]
        else {
            return Ok(());
        };
        // A part ends with the shard that brings it to 1024 chunks.
        let mut open = (0u64, 0u64);
        let mut sizes = Vec::new();
        for shard in 0..index.shard_count() {
            let count = index.grid(shard)?.chunk_count();
            open.0 += count;
            for chunk in 0..count {
                open.1 += index.chunk(shard, chunk)?.pages.len() as u64;
            }
            if open.0 >= 1024 {
                sizes.push(std::mem::take(&mut open));
            }
        }
        if open.0 > 0 {
            sizes.push(open);
        }
        for (nth, (chunks, pages)) in sizes.into_iter().enumerate() {
            let columns = [
                ("kinds", 1, chunks),
                ("codecs", 1, chunks),
                ("page counts", 1, chunks),
                ("decoded checksums", 4, chunks),
                ("page columns", 1, pages),
                ("page lengths", 4, pages),
                ("page checksums", 4, pages),
            ];
            for (name, width, rows) in columns {
                self.column("index part", &format!("part {nth}, {name}"), &Kind::Numbers(width), width * rows)?;
            }
        }
        for name in FIELDS {
            self.column_of_head(name)?;
        }
        self.take("index root", 24, "head: reserved")?;
        let ranks: u64 = (0..index.shard_count()).map(|shard| index.rect(shard).offset.len() as u64).sum();
        let heap = |rows: u64| Kind::Numbers(4).bytes(rows + 1);
        let columns: [(&str, Kind, u64); 24] = [
            ("tensor names: offsets", Kind::Numbers(4), heap(tensors)),
            ("tensor names", Kind::Text, name_bytes),
            ("dtypes", Kind::Numbers(1), tensors),
            ("shapes: offsets", Kind::Numbers(4), heap(tensors)),
            ("shapes", Kind::Numbers(8), 8 * dimensions),
            ("shard tensors", Kind::Numbers(4), 4 * shards),
            ("shard offsets", Kind::Numbers(8), 8 * ranks),
            ("shard shapes", Kind::Numbers(8), 8 * ranks),
            ("codec ids: offsets", Kind::Numbers(4), heap(codecs)),
            ("codec ids", Kind::Text, codec_bytes),
            ("codec versions", Kind::Numbers(2), 2 * codecs),
            ("column names: offsets", Kind::Numbers(4), heap(columns)),
            ("column names", Kind::Text, column_bytes),
            ("blob ranks", Kind::Numbers(4), 4 * blobs),
            ("blob names: offsets", Kind::Numbers(4), heap(blobs)),
            ("blob names", Kind::Text, blob_name_bytes),
            ("blob lengths", Kind::Numbers(8), 8 * blobs),
            ("blob checksums", Kind::Numbers(4), 4 * blobs),
            ("part page starts", Kind::Numbers(8), 8 * parts),
            ("part page counts", Kind::Numbers(8), 8 * parts),
            ("part checksums", Kind::Numbers(4), 4 * parts),
            ("extension features", Kind::Numbers(1), extensions),
            ("extension lengths", Kind::Numbers(8), 8 * extensions),
            ("extensions", Kind::Opaque, 0),
        ];
        let mut lengths = Vec::new();
        for (name, kind, bytes) in columns {
            let values = self.column("index root", name, &kind, bytes)?;
            if name == "extension lengths" {
                lengths = values;
            }
        }
        for (nth, length) in lengths.into_iter().enumerate() {
            self.column("index root", &format!("extension {nth}"), &Kind::Opaque, length)?;
        }
        // There are too many extensions to list one by one.
        self.take("index root", index.file().bytes.saturating_sub(POSTSCRIPT_BYTES).saturating_sub(self.end), "extensions")
    }

    /// Adds a field of the head.
    fn column_of_head(&mut self, name: &str) -> Result<()> {
        let value = number(&(self.read)(self.end..self.end.saturating_add(8))?);
        self.take("index root", 8, format!("head: {name} = {value}"))
    }
}

impl Kind {
    fn bytes(&self, rows: u64) -> u64 {
        if let Self::Numbers(width) = self { width * rows } else { rows }
    }
}

/// Reads a little-endian number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// Prints the dump: offset, bytes and meaning. Zero padding takes one line.
pub(crate) fn describe(regions: &[Region], text: &mut Text) {
    for region in regions {
        let what = if region.what.is_empty() { region.part.to_owned() } else { format!("{}: {}", region.part, region.what) };
        let what = printable(&what);
        if region.part == "padding" || region.what.ends_with("reserved") {
            let bytes = region.bytes;
            let zero = region.head.iter().all(|&byte| byte == 0);
            let shown = if zero { format!("00, {bytes} times") } else { format!("{bytes} bytes, not all 00") };
            text.line(format!("{:08x}  {shown:<47}  {what}", region.offset));
            continue;
        }
        for (nth, line) in region.head.chunks(LINE).enumerate() {
            let bytes: Vec<String> = line.iter().map(|byte| format!("{byte:02x}")).collect();
            let what = if nth == 0 { what.as_str() } else { "" };
            text.line(format!("{:08x}  {:<47}  {what}", region.offset + (nth * LINE) as u64, bytes.join(" ")).trim_end());
        }
        if region.bytes > SHOWN {
            text.line(format!("{:8}  {:<47}", "", format!("... {} more bytes", region.bytes - SHOWN)).trim_end());
        }
    }
}
