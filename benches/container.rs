//! Measures the container in memory: writing a cask of encoded chunks, reading it back, and opening a large index.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark ends where something fails")]

mod common;

use bytes::Bytes;
use common::{Arguments, Memcpy, SPEED, Table, alternate, bytes_of, report, seconds, synthetic};
use serde_json::json;
use tensorcask::codec::{ChunkKind, CodecRef, EncodedChunk};
use tensorcask::container::{CaskEncoder, CaskIndex, CaskReceipt, IndexDecoder, Progress};
use tensorcask::wire::Id;
use tensorcask::{ChunkGrid, Dtype, Limits, Rect};

const ROUNDS: usize = 7;

fn main() {
    let arguments = Arguments::parse(&["mib", "chunks"]);
    let state = synthetic((arguments.number("mib", 256.0) * (1 << 20) as f64) as u64, &arguments.data().join("step-1000.safetensors"));
    let tables = [raw(&state), index(arguments.number("chunks", 1e6) as u64)];
    report("container", &tables, arguments.json);
}

fn stored(codec: &str, data: Bytes, crc: u32) -> EncodedChunk {
    let codec = Some(CodecRef { id: codec.to_owned(), version: 1 });
    EncodedChunk { kind: ChunkKind::Absolute, codec, columns: vec![("values".into(), data)], crc }
}

/// Measures all pages of a state, uncompressed.
fn raw(state: &[common::Owned]) -> Table {
    let bytes = bytes_of(state);
    let buffers: Vec<Bytes> = state.iter().map(|tensor| Bytes::copy_from_slice(&tensor.data)).collect();
    let chunks: Vec<Vec<EncodedChunk>> = state
        .iter()
        .zip(&buffers)
        .map(|(tensor, data)| {
            let grid = ChunkGrid::new(tensor.dtype, &tensor.shape).unwrap();
            let chunk = |number| data.slice(grid.bytes(number).start as usize..grid.bytes(number).end as usize);
            (0..grid.chunk_count()).map(|number| stored("tc.raw", chunk(number), crc32fast::hash(&chunk(number)))).collect()
        })
        .collect();
    let encode = || -> (Vec<Bytes>, CaskReceipt) {
        let mut encoder = CaskEncoder::new(Id([1; 16]), 6).unwrap();
        let mut output = Vec::new();
        for (tensor, chunks) in state.iter().zip(&chunks) {
            encoder.tensor(&tensor.name, tensor.dtype, &tensor.shape).unwrap();
            encoder.shard(&Rect::whole(&tensor.shape)).unwrap();
            for chunk in chunks {
                encoder.chunk(chunk.clone()).unwrap();
            }
            output.append(&mut encoder.take_output());
        }
        let (mut rest, receipt) = encoder.finish().unwrap();
        output.append(&mut rest);
        (output, receipt)
    };
    let (parts, receipt) = encode();
    let file: Bytes = parts.concat().into();
    let mut memcpy = Memcpy::new(bytes as usize);
    let times = alternate(
        ROUNDS,
        &mut [
            ("memcpy", &mut || memcpy.seconds(buffers.iter().map(AsRef::as_ref))),
            ("crc", &mut || seconds(|| buffers.iter().fold(0, |sum, data| sum ^ crc32fast::hash(data))).0),
            ("write", &mut || seconds(encode).0),
            ("read", &mut || {
                seconds(|| {
                    let index = open(&file, &receipt, true);
                    check_pages(&index, &file)
                })
                .0
            }),
        ],
    );
    let [copy, crc, write, read] = times[..] else { unreachable!() };
    let title = format!(
        "A cask of {:.2} GB in {} tensors and {} chunks, `tc.raw`, in memory, one thread",
        bytes as f64 / 1e9,
        state.len(),
        chunks.iter().map(Vec::len).sum::<usize>()
    );
    let mut table = Table::new(title, &SPEED);
    table.speed("memcpy", bytes, copy, copy);
    table.speed("CRC-32 alone", bytes, crc, copy);
    table.speed("write: encoder, page checksums included", bytes, write, copy);
    table.speed("read: index, and all page checksums", bytes, read, copy);
    table
}

/// Measures a cask with a large index and tiny pages.
fn index(chunks: u64) -> Table {
    const CHUNKS_PER_TENSOR: u64 = 100;
    let shape = [CHUNKS_PER_TENSOR << 18];
    let tensors = chunks.div_ceil(CHUNKS_PER_TENSOR);
    let zero = Bytes::from_static(&[0]);
    let encode = || {
        let mut encoder = CaskEncoder::new(Id([2; 16]), 6).unwrap();
        let mut output = Vec::new();
        for tensor in 0..tensors {
            encoder.tensor(&format!("model.layers.{tensor:06}.weight"), Dtype::U8, &shape).unwrap();
            encoder.shard(&Rect::whole(&shape)).unwrap();
            for _ in 0..CHUNKS_PER_TENSOR {
                encoder.chunk(stored("tc.constant", zero.clone(), 7)).unwrap();
            }
            output.append(&mut encoder.take_output());
        }
        let (mut rest, receipt) = encoder.finish().unwrap();
        output.append(&mut rest);
        (output, receipt)
    };
    let (encode_seconds, (parts, receipt)) = seconds(encode);
    let file: Bytes = parts.concat().into();
    let index_bytes = receipt.bytes - receipt.index_offset;
    let one = |index: &CaskIndex| {
        let shard = index.shard_count() / 2;
        let (part, range) = index.missing_part(shard).unwrap();
        index.load_part(part, file.slice(range.start as usize..range.end as usize)).unwrap();
        index.chunk(shard, 0).unwrap()
    };
    let times = alternate(
        ROUNDS,
        &mut [
            ("root", &mut || seconds(|| open(&file, &receipt, false)).0),
            ("one", &mut || seconds(|| one(&open(&file, &receipt, false))).0),
            ("all", &mut || seconds(|| open(&file, &receipt, true)).0),
        ],
    );
    let [root, part, all] = times[..] else { unreachable!() };
    let title = format!(
        "An index of {} chunks in {tensors} tensors: {:.1} MB, root {:.1} MB",
        tensors * CHUNKS_PER_TENSOR,
        mega(index_bytes),
        mega(receipt.bytes - receipt.root_offset)
    );
    let mut table = Table::new(title, &["ms"]);
    let mut row = |name: &str, seconds: f64| table.row(name, vec![format!("{:.1}", seconds * 1e3)], json!({ "seconds": seconds }));
    row("write the cask", encode_seconds);
    row("open: root", root);
    row("open: root and one part, find a chunk", part);
    row("open: root and all parts", all);
    table
}

fn mega(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

fn open(file: &Bytes, receipt: &CaskReceipt, whole: bool) -> CaskIndex {
    let slice = |range: std::ops::Range<u64>| file.slice(range.start as usize..range.end as usize);
    let mut decoder = IndexDecoder::new(receipt.id, receipt.bytes, Limits::default());
    decoder.push(receipt.root_offset, slice(receipt.root_offset..receipt.bytes)).unwrap();
    let Progress::Done(index) = decoder.poll().unwrap() else { unreachable!() };
    if whole {
        for (part, range) in index.missing_parts() {
            index.load_part(part, slice(range)).unwrap();
        }
    }
    index
}

fn check_pages(index: &CaskIndex, file: &Bytes) -> u64 {
    let mut count = 0;
    for shard in 0..index.shard_count() {
        for number in 0..index.grid(shard).unwrap().chunk_count() {
            for page in index.chunk(shard, number).unwrap().pages {
                page.check(&file[page.range.start as usize..page.range.end as usize]).unwrap();
                count += 1;
            }
        }
    }
    count
}
