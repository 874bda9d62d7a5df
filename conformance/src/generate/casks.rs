//! Casks that every reader must accept.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::dtypes::{BF16, C64, C128, CHUNK, DTYPES, F6_E2M3, F32, INT4, U8, U16, U64, chunk_elements};
use super::forge::{Blob, Cask, Chunk, Draft, Shard, Tensor, UNCHANGED, digest_of_cask, id};
use super::sketch::{Input, Outcome, Sketch};
use crate::files::hex;

/// Returns chunks of a shard. Each repeats one byte: 1, 2 and so on.
fn counted_chunks(dtype: u8, shape: &[u64]) -> Vec<Chunk> {
    let each = chunk_elements(dtype, shape);
    let total = shape.iter().product::<u64>() as usize;
    let bits = DTYPES[usize::from(dtype) - 1].1;
    let unit = super::dtypes::unit(dtype);
    let chunk = |(number, at): (usize, usize)| {
        let bytes = (each.min(total - at) * bits).div_ceil(8);
        Chunk::constant(&[number as u8 + 1].repeat(unit), bytes)
    };
    (0..total).step_by(each).enumerate().map(chunk).collect()
}

/// Returns bytes that differ from each other.
pub(crate) fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|i| (i as u8).wrapping_mul(37).wrapping_add(seed)).collect()
}

/// Codecs in the cases of single casks. Readers know no other codec of these cases.
const KNOWN: [&str; 13] = [
    "tc.raw",
    "tc.constant",
    "tc.bitmask",
    "tc.planes",
    "tc.ordered",
    "tc.sparse",
    "tc.factored",
    "tc.magnitudes",
    "tc.rounded",
    "tc.loguniform",
    "tc.blockwise8",
    "tc.cluster",
    "tc.kmeans",
];

/// Returns the expected report of a cask.
fn expected(cask: &Cask, draft: &Draft) -> Value {
    let (file, places) = draft.clone().finish();
    let shard = |shard: &Shard| {
        let unknown = |chunk: &Chunk| chunk.kind != UNCHANGED && !KNOWN.contains(&chunk.codec);
        if shard.chunks.iter().any(unknown) {
            return json!({ "offset": shard.offset, "shape": shard.shape, "error": "unsupported" });
        }
        let bytes: Option<Vec<u8>> =
            shard.chunks.iter().map(|chunk| chunk.decoded.as_deref()).collect::<Option<Vec<_>>>().map(|all| all.concat());
        json!({ "offset": shard.offset, "shape": shard.shape, "sha256": bytes.map(|bytes| hex(&Sha256::digest(bytes))) })
    };
    let tensors: serde_json::Map<String, Value> = cask
        .tensors
        .iter()
        .map(|t| {
            let shards: Vec<Value> = t.shards.iter().map(shard).collect();
            (t.name.clone(), json!({ "dtype": DTYPES[usize::from(t.dtype) - 1].0, "shape": t.shape, "shards": shards }))
        })
        .collect();
    let blobs: Vec<Value> =
        cask.blobs.iter().map(|b| json!({ "rank": b.rank, "name": b.name, "sha256": hex(&Sha256::digest(&b.bytes)) })).collect();
    json!({ "id": hex(&cask.id), "digest": hex(&digest_of_cask(&file, places.root_offset)), "tensors": tensors, "blobs": blobs })
}

pub(crate) fn accept(name: &str, clause: &str, why: &str, cask: &Cask) -> Sketch {
    accept_edited(name, clause, why, cask, |_| {})
}

fn accept_edited(name: &str, clause: &str, why: &str, cask: &Cask, edit: impl Fn(&mut Draft)) -> Sketch {
    let mut draft = cask.draft();
    edit(&mut draft);
    let outcome = Outcome::Accept(expected(cask, &draft));
    Sketch { name: name.into(), clause: clause.into(), why: why.into(), input: Input::Cask(draft.finish().0), outcome }
}

/// Returns a cask with a variety of content. Most invalid casks are derived from it.
pub(crate) fn sample() -> Cask {
    let base = pattern(10, 3);
    let mut changed = base.clone();
    (changed[1], changed[9]) = (0, 0);
    let tensors = vec![
        Tensor::whole("a", F32, &[2, 3], vec![Chunk::raw(&pattern(24, 1))]),
        Tensor {
            name: "b".into(),
            dtype: BF16,
            shape: vec![4, 2],
            shards: vec![
                Shard { offset: vec![0, 0], shape: vec![1, 2], chunks: vec![Chunk::raw(&pattern(4, 2))] },
                Shard { offset: vec![2, 0], shape: vec![2, 2], chunks: vec![Chunk::constant(&[0x80, 0x3f], 8)] },
            ],
        },
        Tensor::whole("c", U8, &[10], vec![Chunk::bitmask(&base, &changed, 1)]),
    ];
    Cask::new(id(0xca), tensors).with_blobs(vec![Blob::new(0, "cursor", b"step 7"), Blob::new(0, "rng", &[0xc0, 0xff, 0xee])])
}

pub(crate) fn cases() -> Vec<Sketch> {
    let every_dtype: Vec<Tensor> = (1u8..)
        .zip(DTYPES)
        .map(|(code, (name, bits))| {
            let mut data = pattern((5 * bits).div_ceil(8), code);
            if let (Some(last), used @ 1..) = (data.last_mut(), 5 * bits % 8) {
                *last &= (1 << used) - 1;
            }
            (name, Tensor::whole(name, code, &[5], vec![Chunk::raw(&data)]))
        })
        .collect::<std::collections::BTreeMap<_, _>>()
        .into_values()
        .collect();
    let mut aligned = sample();
    aligned.alignment_exponent = 12;
    // Two adjacent chunks of a packed type, and a third that a constant chunk separates from them.
    let packed = pattern(CHUNK / 2, 5);
    let raw_run =
        Cask::new(id(3), vec![Tensor::whole("run", INT4, &[CHUNK as u64 + 3], vec![Chunk::raw(&packed), Chunk::raw(&[0x21, 0x03])])]);
    let broken_run =
        Cask::new(id(4), vec![Tensor::whole("u", U8, &[CHUNK as u64 + 3], vec![Chunk::constant(&[9], CHUNK), Chunk::raw(&[1, 2, 3])])]);
    let mut many = vec![Chunk::unchanged(7); 1024];
    many.push(Chunk::constant(&[1], 5));
    let two_parts = Cask::new(
        id(5),
        vec![
            Tensor::whole("long", U8, &[1024 * CHUNK as u64 + 5], many),
            Tensor::whole("short", U8, &[3], vec![Chunk::raw(&[1, 2, 3])]),
            Tensor::whole("zero", U8, &[0], vec![]),
        ],
    );
    let constants = Cask::new(
        id(6),
        vec![
            Tensor::whole("c128", C128, &[2], vec![Chunk::constant(&pattern(8, 1), 32)]),
            Tensor::whole("c64", C64, &[2], vec![Chunk::constant(&[0, 0, 0x80, 0x3f], 16)]),
            Tensor::whole("int4", INT4, &[4], vec![Chunk::constant(&[0x77], 2)]),
            Tensor::whole("u16", U16, &[3], vec![Chunk::constant(&[1, 2], 6)]),
            Tensor::whole("u64", U64, &[3], vec![Chunk::constant(&pattern(8, 2), 24)]),
            Tensor::whole("u8", U8, &[3], vec![Chunk::constant(&[1], 3)]),
        ],
    );
    let private = Chunk::absolute("example.zip", vec![("zipped", vec![1, 2, 3])], pattern(9, 1));
    let unknown_codec = Cask::new(
        id(7),
        vec![Tensor::whole("known", U8, &[9], vec![Chunk::raw(&pattern(9, 4))]), Tensor::whole("unknown", U8, &[9], vec![private])],
    );
    let scalars = Cask::new(
        id(8),
        vec![
            Tensor::whole("", U8, &[], vec![Chunk::raw(&[42])]),
            Tensor::whole("empty", F32, &[0, 1 << 40, 1 << 40], vec![]),
            Tensor::whole("scalar", F32, &[], vec![Chunk::raw(&[0, 0, 0x80, 0x7f])]),
            Tensor::whole("\u{1f980}/../\u{0}", U8, &[1], vec![Chunk::raw(&[1])]),
        ],
    );
    let blobs = Cask::new(id(9), vec![]).with_blobs(vec![
        Blob::new(0, "", b""),
        Blob::new(0, "rng", &pattern(70, 1)),
        Blob::new(1, "a", b"rank 1"),
        Blob::new(4_294_967_295, "rng", b""),
    ]);
    let counted = |name: &str, dtype: u8, shape: &[u64]| Tensor::whole(name, dtype, shape, counted_chunks(dtype, shape));
    let columns =
        |from: u64, count: u64| Shard { offset: vec![0, from], shape: vec![300, count], chunks: counted_chunks(U8, &[300, count]) };
    let of_rows = Cask::new(
        id(11),
        vec![
            counted("f6, rows of 5", F6_E2M3, &[52_430, 5]),
            counted("int4, rows of 262143", INT4, &[3, 262_143]),
            counted("int4, rows of 3", INT4, &[87_382, 3]),
            counted("int4, rows of 4", INT4, &[65_537, 4]),
            counted("no matrix", U8, &[300_000]),
            counted("rows of 1000", U8, &[263, 1000]),
            counted("rows of 1000 in blocks", F32, &[3, 100, 1000]),
            counted("rows of 2", U16, &[131_073, 2]),
            counted("rows of 262144", U8, &[2, 1 << 18]),
            counted("rows of 262145", U8, &[2, (1 << 18) + 1]),
            Tensor {
                name: "split by columns".into(),
                dtype: U8,
                shape: vec![300, 1500],
                shards: vec![columns(0, 1000), columns(1000, 500)],
            },
        ],
    );
    let at_limits = Cask::new(
        id(10),
        vec![Tensor::whole(&"n".repeat(4096), U8, &[1], vec![Chunk::raw(&[1])]), Tensor::whole("o", U8, &[1; 64], vec![Chunk::raw(&[2])])],
    );

    vec![
        accept("container/empty", "container 1", "a cask may hold nothing", &Cask::new(id(1), vec![])),
        accept("container/sample", "container 4", "raw, constant and bitmask chunks, shards, blobs", &sample()),
        accept("container/alignment-4096", "container 3.3", "pages at multiples of 4096", &aligned),
        accept("dtypes/every-dtype", "container 7", "one tensor of each dtype, five elements each", &Cask::new(id(2), every_dtype)),
        accept("dtypes/scalars-and-empties", "container 6.1", "scalars, empty tensors, and names that are no paths", &scalars),
        accept("pages/raw-run", "container 4.1", "raw chunks of a shard lie back to back", &raw_run),
        accept("pages/raw-after-constant", "container 4.1", "a raw chunk after another codec's begins at the alignment", &broken_run),
        accept(
            "container/chunks-of-rows",
            "container 6.2",
            "a chunk holds whole rows of its shard, where one fits; packed ones whole bytes, too",
            &of_rows,
        ),
        accept("index/two-parts", "index 4.1", "a part ends after the shard with which it has 1024 chunks", &two_parts),
        accept("codecs/constants", "constant 3", "a unit is an element, half a complex number, or a byte of packed elements", &constants),
        accept("codecs/unknown-codec", "codecs 2", "an unknown codec spoils its own tensor only", &unknown_codec),
        accept("blobs/ranks-and-empties", "index 2.4", "blobs by rank and name; empty names and empty blobs", &blobs),
        accept("limits/at-the-limit", "limits 2", "a name of 4096 bytes and a shape of 64 dimensions", &at_limits),
        accept_edited("version/minor-7", "README 3.1", "a later minor version", &sample(), |draft| draft.version = (1, 7)),
        accept_edited("version/may-ignore-extension", "index 2.5", "a may-ignore feature with an extension", &sample(), |draft| {
            draft.may_ignore = 1 << 5;
            draft.root.set_u64("head", 12, 1);
            *draft.root.column("extension features") = vec![5];
            *draft.root.column("extension lengths") = super::forge::u64s([3]);
            draft.root.column("extension").extend([1, 2, 3]);
        }),
    ]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::super::forge::{self, ABSOLUTE};
    use super::*;
    use tensorcask::codec::{ChunkKind, CodecRef, EncodedChunk};
    use tensorcask::container::CaskEncoder;
    use tensorcask::wire::{Directory, DirectoryShard, DirectoryTensor, Id};
    use tensorcask::{Dtype, Rect};

    /// The forge and the library are independent implementations of the spec.
    #[test]
    fn the_library_writes_the_same_bytes() {
        let sample = sample();
        let mut encoder = CaskEncoder::new(Id(sample.id), 6).unwrap();
        for tensor in &sample.tensors {
            encoder.tensor(&tensor.name, Dtype::from_code(tensor.dtype).unwrap(), &tensor.shape).unwrap();
            for shard in &tensor.shards {
                encoder.shard(&Rect { offset: shard.offset.clone(), shape: shard.shape.clone() }).unwrap();
                for chunk in &shard.chunks {
                    let columns = chunk.columns.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone().into())).collect();
                    let kind = if chunk.kind == ABSOLUTE { ChunkKind::Absolute } else { ChunkKind::Delta };
                    let codec = Some(CodecRef { id: chunk.codec.to_owned(), version: 1 });
                    encoder.chunk(EncodedChunk { kind, codec, columns, crc: chunk.crc }).unwrap();
                }
            }
        }
        for blob in &sample.blobs {
            encoder.blob(blob.rank, &blob.name, blob.bytes.clone().into()).unwrap();
        }
        assert_eq!(encoder.finish().unwrap().0.concat(), sample.bytes());
    }

    #[test]
    fn the_library_writes_the_same_directory() {
        let listed = |name: &str, role: &str, alias_of, shards| forge::Listed {
            name: name.into(),
            dtype: BF16,
            shape: vec![4, 2],
            role: role.into(),
            param: "p".into(),
            alias_of,
            shards,
        };
        let rows = [
            listed("a", "model", None, vec![(vec![0, 0], vec![3, 2], 0), (vec![3, 0], vec![1, 2], 2)]),
            listed("b", "ema", None, vec![(vec![0, 0], vec![4, 2], 1)]),
            listed("c", "model", Some(0), vec![]),
        ];
        let theirs: Vec<(DirectoryTensor, Vec<DirectoryShard>)> = rows
            .iter()
            .map(|row| {
                let tensor = DirectoryTensor {
                    name: row.name.clone(),
                    dtype: Dtype::Bf16,
                    shape: row.shape.clone(),
                    role: row.role.clone(),
                    param: row.param.clone(),
                    alias_of: row.alias_of.map(|alias| alias as usize),
                };
                let shard = |(offset, shape, slot): &(Vec<u64>, Vec<u64>, u32)| DirectoryShard {
                    rect: Rect { offset: offset.clone(), shape: shape.clone() },
                    slot: *slot,
                };
                (tensor, row.shards.iter().map(shard).collect())
            })
            .collect();
        assert_eq!(Directory::encode(&theirs).unwrap(), forge::directory(&rows).bytes());
    }
}
