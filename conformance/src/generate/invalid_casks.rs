//! Casks that every reader must reject. Each is the sample with one fault. All checksums are right, except one that is
//! itself the fault.

use super::casks::{pattern, sample};
use super::dtypes::{BF16, F32, U8};
use super::forge::{self, Blob, Cask, Chunk, DELTA, Draft, Shard, Tensor, fix_header, fix_index, fix_postscript, id};
use super::sketch::{Input, Outcome, Sketch};

const CORRUPT: &str = "corrupt";
const UNSUPPORTED: &str = "unsupported";
const LIMIT: &str = "limit";

/// Row numbers in the head of an index root.
const NAME_BYTES: usize = 1;
const TENSORS: usize = 0;
const SHARDS: usize = 3;
const BLOBS_OFFSET: usize = 10;
const PARTS: usize = 11;
const EXTENSIONS: usize = 12;

fn reject(name: &'static str, clause: &'static str, kind: &'static str, why: &'static str, file: Vec<u8>) -> Sketch {
    Sketch { name: name.into(), clause: clause.into(), why: why.into(), input: Input::Cask(file), outcome: Outcome::Reject(kind) }
}

/// Returns the sample after an edit of its draft.
fn drafted(edit: impl Fn(&mut Draft)) -> Vec<u8> {
    let mut draft = sample().draft();
    edit(&mut draft);
    draft.finish().0
}

/// Returns the sample after an edit of its bytes. `edit` also gets the offset of the root.
fn patched(edit: impl Fn(&mut Vec<u8>, usize)) -> Vec<u8> {
    let (mut file, places) = sample().draft().finish();
    edit(&mut file, places.root_offset);
    file
}

/// Returns a cask of one tensor of five bytes in one chunk.
fn one_chunk(chunk: Chunk) -> Vec<u8> {
    Cask::new(id(0xcb), vec![Tensor::whole("w", U8, &[5], vec![chunk])]).bytes()
}

/// Returns a cask after an edit of its tensors.
fn modelled(edit: impl Fn(&mut Cask)) -> Vec<u8> {
    let mut cask = sample();
    edit(&mut cask);
    cask.bytes()
}

pub(crate) fn cases() -> Vec<Sketch> {
    let mut cases = header_and_postscript();
    cases.extend(index());
    cases.extend(pages_and_codecs());
    cases.extend(limits());
    cases
}

fn header_and_postscript() -> Vec<Sketch> {
    let sample_id = sample().id;
    vec![
        reject(
            "header/magic",
            "container 2.1",
            CORRUPT,
            "a text-mode transfer",
            patched(|file, _| {
                file[4] = b'\n';
                fix_header(file);
            }),
        ),
        reject("header/checksum", "container 2.2", CORRUPT, "one bit of the checksum", patched(|file, _| file[29] ^= 4)),
        reject(
            "header/reserved",
            "container 2.3",
            CORRUPT,
            "a reserved byte, under a right checksum",
            patched(|file, _| {
                file[25] = 1;
                fix_header(file);
            }),
        ),
        reject(
            "header/id",
            "container 3.2",
            CORRUPT,
            "an id that the rest of the file was not written for",
            patched(|file, _| {
                file[8] ^= 1;
                fix_header(file);
            }),
        ),
        reject("postscript/too-short", "container 1", CORRUPT, "127 bytes", sample().bytes()[..127].to_vec()),
        reject("postscript/truncated", "container 3.1", CORRUPT, "the last byte is gone", patched(|file, _| _ = file.pop())),
        reject("postscript/trailing-byte", "container 3.1", CORRUPT, "a byte after the end", patched(|file, _| file.push(0))),
        reject(
            "postscript/checksum",
            "container 3.2",
            CORRUPT,
            "one bit of the checksum",
            patched(|file, _| {
                let at = file.len() - 16;
                file[at] ^= 1;
            }),
        ),
        reject(
            "postscript/alignment-exponent",
            "container 3.3",
            CORRUPT,
            "pages at multiples of 32",
            patched(|file, _| {
                let at = file.len() - 64;
                file[at] = 5;
                fix_postscript(file, sample_id);
            }),
        ),
        reject(
            "postscript/root-offset",
            "container 3.4",
            CORRUPT,
            "a root that begins behind the postscript",
            patched(|file, _| {
                let at = file.len() - 95;
                file[at] = 0x40;
                fix_postscript(file, sample_id);
            }),
        ),
        reject(
            "postscript/reserved",
            "container 3.5",
            CORRUPT,
            "a reserved byte, under a right checksum",
            patched(|file, _| {
                let at = file.len() - 20;
                file[at] = 1;
                fix_postscript(file, sample_id);
            }),
        ),
        reject(
            "postscript/root-checksum",
            "container 3.6",
            CORRUPT,
            "one bit of a tensor's dtype in the root",
            patched(|file, root| file[root + 256] ^= 1),
        ),
        reject("version/major-2", "README 3", UNSUPPORTED, "a major version to come", drafted(|draft| draft.version = (2, 0))),
        reject(
            "version/must-understand",
            "README 4",
            UNSUPPORTED,
            "feature 9 must be understood",
            drafted(|draft| draft.must_understand = 1 << 9),
        ),
        reject(
            "version/before-other-faults",
            "README 3",
            UNSUPPORTED,
            "a major version to come is told, not what it changed",
            patched(|file, _| {
                let at = file.len() - 84;
                file[at] = 2;
                file[at + 20] = 63;
                fix_postscript(file, sample_id);
            }),
        ),
    ]
}

fn index() -> Vec<Sketch> {
    vec![
        reject(
            "index/head-reserved",
            "index 2.1",
            CORRUPT,
            "a reserved byte of the head",
            drafted(|draft| draft.root.column("head")[120] = 1),
        ),
        reject("index/column-padding", "index 1.2", CORRUPT, "a byte of padding behind the dtypes", {
            // Head, name offsets and names take 128, 64 and 64 bytes; the dtypes take 3.
            let (mut file, places) = sample().draft().finish();
            file[places.root_offset + 256 + 3] = 1;
            fix_index(&mut file, sample().id, places.root_offset);
            file
        }),
        reject(
            "index/trailing-column",
            "index 1.2",
            CORRUPT,
            "a column that the head does not announce",
            drafted(|draft| draft.root.column("surplus").push(0)),
        ),
        reject(
            "index/heap-descends",
            "index 1.3",
            CORRUPT,
            "offsets of names that descend",
            drafted(|draft| draft.root.set_u32("tensor name offsets", 1, 3)),
        ),
        reject(
            "index/heap-end",
            "index 1.3",
            CORRUPT,
            "names that end before the number that the head declares",
            drafted(|draft| {
                draft.root.set_u64("head", NAME_BYTES, 4);
            }),
        ),
        reject(
            "index/utf8",
            "index 1.4",
            CORRUPT,
            "a name that is not UTF-8",
            drafted(|draft| draft.root.column("tensor names")[2] = 0xff),
        ),
        reject(
            "index/codec-twice",
            "index 2.3",
            CORRUPT,
            "a codec that stands twice in the dictionary",
            drafted(|draft| {
                // Codec ids `tc.raw`, `tc.constant`, `tc.bitmask`: the last becomes a second `tc.constant`.
                let names = draft.root.column("codec ids");
                names.truncate(17);
                names.extend(b"tc.constant");
                draft.root.set_u32("codec id offsets", 3, 28);
                draft.root.set_u64("head", 5, 28);
            }),
        ),
        reject("index/names-out-of-order", "index 3.1", CORRUPT, "names that do not ascend", modelled(|cask| cask.tensors.swap(0, 1))),
        reject("index/name-twice", "index 3.1", CORRUPT, "a name that stands twice", modelled(|cask| cask.tensors[1].name = "a".into())),
        reject("index/dtype", "container 7", UNSUPPORTED, "a dtype of code 26", drafted(|draft| draft.root.column("dtypes")[1] = 26)),
        reject(
            "index/shape-beyond-64-bits",
            "index 3.2",
            CORRUPT,
            "2^62 elements of 32 bits",
            modelled(|cask| {
                cask.tensors.push(Tensor {
                    name: "z".into(),
                    dtype: F32,
                    shape: vec![1 << 31, 1 << 31],
                    shards: vec![Shard { offset: vec![0, 0], shape: vec![0, 1], chunks: vec![] }],
                });
            }),
        ),
        reject(
            "shards/outside",
            "index 3.4",
            CORRUPT,
            "a shard that reaches out of its tensor",
            modelled(|cask| cask.tensors[1].shards[1].offset[0] = 3),
        ),
        reject(
            "shards/offset-wraps",
            "index 3.4",
            CORRUPT,
            "an offset that wraps at 64 bits",
            modelled(|cask| cask.tensors[1].shards[1].offset[0] = u64::MAX),
        ),
        reject(
            "shards/out-of-order",
            "index 3.3",
            CORRUPT,
            "shards that do not ascend",
            modelled(|cask| {
                cask.tensors[1] = Tensor {
                    name: "b".into(),
                    dtype: BF16,
                    shape: vec![4, 2],
                    shards: [2u64, 0]
                        .map(|row| Shard { offset: vec![row, 0], shape: vec![1, 2], chunks: vec![Chunk::raw(&pattern(4, 2))] })
                        .to_vec(),
                };
            }),
        ),
        reject(
            "shards/tensor-row",
            "index 3.3",
            CORRUPT,
            "a shard of a tensor that is not there",
            drafted(|draft| draft.root.set_u32("shard tensors", 3, 3)),
        ),
        reject(
            "shards/tensor-without-shard",
            "index 3.5",
            CORRUPT,
            "a tensor without a shard",
            modelled(|cask| {
                cask.tensors.push(Tensor { name: "z".into(), dtype: U8, shape: vec![1], shards: vec![] });
            }),
        ),
        reject(
            "index/part-count",
            "index 4.1",
            CORRUPT,
            "no part, though shards have chunks",
            drafted(|draft| {
                draft.root.set_u64("head", PARTS, 0);
                for column in ["part page starts", "part page counts"] {
                    draft.root.column(column).clear();
                }
                draft.parts.clear();
            }),
        ),
        reject("index/part-checksum", "index 4.2", CORRUPT, "one bit of a decoded checksum in the part", {
            let (mut file, places) = sample().draft().finish();
            file[places.index_offset + 192] ^= 1;
            file
        }),
        reject("index/kind", "index 4.3", CORRUPT, "a chunk of kind 3", drafted(|draft| draft.parts[0].column("kinds")[0] = 3)),
        reject(
            "index/unchanged-with-pages",
            "index 4.3",
            CORRUPT,
            "an unchanged chunk with a page",
            drafted(|draft| draft.parts[0].column("kinds")[0] = 0),
        ),
        reject(
            "index/codec-row",
            "index 4.3",
            CORRUPT,
            "a codec that the dictionary lacks",
            drafted(|draft| draft.parts[0].column("codecs")[0] = 3),
        ),
        reject(
            "index/column-row",
            "index 4.3",
            CORRUPT,
            "a column that the dictionary lacks",
            drafted(|draft| draft.parts[0].column("page columns")[0] = 2),
        ),
        reject(
            "index/page-counts",
            "index 4.3",
            CORRUPT,
            "page counts that do not sum to the pages",
            drafted(|draft| draft.parts[0].column("page counts")[3] = 1),
        ),
        reject(
            "index/page-beyond-blobs",
            "index 4.3",
            CORRUPT,
            "a page that ends behind the first blob's",
            drafted(|draft| draft.parts[0].set_u32("page lengths", 4, 65)),
        ),
        reject(
            "index/page-start",
            "index 4.4",
            CORRUPT,
            "pages that do not begin behind the header",
            drafted(|draft| draft.root.set_u64("part page starts", 0, 64)),
        ),
        reject(
            "index/blobs-offset",
            "index 4.4",
            CORRUPT,
            "blobs that do not begin where pages end",
            drafted(|draft| {
                let end = draft.body.len() as u64 - 128;
                draft.root.set_u64("head", BLOBS_OFFSET, end);
            }),
        ),
        reject("blobs/out-of-order", "index 2.4", CORRUPT, "blobs that do not ascend", modelled(|cask| cask.blobs.swap(0, 1))),
        reject(
            "blobs/beyond-64-bits",
            "index 2.4",
            CORRUPT,
            "a blob that ends beyond 2^64",
            drafted(|draft| draft.root.set_u64("blob lengths", 1, u64::MAX)),
        ),
        reject(
            "index/extension-not-declared",
            "index 2.5",
            CORRUPT,
            "an extension of a feature that the postscript lacks",
            drafted(|draft| {
                draft.root.set_u64("head", EXTENSIONS, 1);
                *draft.root.column("extension features") = vec![5];
                *draft.root.column("extension lengths") = forge::u64s([0]);
            }),
        ),
    ]
}

fn pages_and_codecs() -> Vec<Sketch> {
    let data = pattern(5, 1);
    let with = |codec, columns| Chunk::absolute(codec, columns, data.clone());
    vec![
        reject("pages/checksum", "container 5.2", CORRUPT, "one bit of a page", patched(|file, _| file[64] ^= 1)),
        reject("pages/moved", "container 5.2", CORRUPT, "two pages have changed places, and all their checksums with them", {
            let chunk = |seed| Chunk::raw(&pattern(4, seed));
            let tensors = vec![Tensor::whole("a", U8, &[4], vec![chunk(1)]), Tensor::whole("b", U8, &[4], vec![chunk(2)])];
            let mut draft = Cask::new(id(0xcc), tensors).draft();
            for i in 0..4 {
                draft.body.swap(64 + i, 128 + i);
                for column in ["page checksums", "decoded checksums"] {
                    draft.parts[0].column(column).swap(i, 4 + i);
                }
            }
            draft.finish().0
        }),
        reject("pages/padding", "container 4.3", CORRUPT, "a byte between two pages", patched(|file, _| file[64 + 24] = 1)),
        reject(
            "pages/padding-before-index",
            "container 4.3",
            CORRUPT,
            "a byte between the last blob and the index",
            drafted(|draft| {
                if let Some(last) = draft.body.last_mut() {
                    *last = 1;
                }
            }),
        ),
        reject(
            "pages/decoded-checksum",
            "container 5.4",
            CORRUPT,
            "decoded bytes with another checksum",
            one_chunk(Chunk { crc: 1, ..Chunk::raw(&data) }),
        ),
        reject("blobs/checksum", "container 5.2", CORRUPT, "one bit of a blob", {
            let cask = Cask::new(id(0xcd), vec![]).with_blobs(vec![Blob::new(0, "rng", b"state")]);
            let mut file = cask.bytes();
            file[64] ^= 1;
            file
        }),
        reject(
            "codecs/raw-length",
            "raw 3",
            CORRUPT,
            "a byte more than the chunk has",
            one_chunk(with("tc.raw", vec![("values", pattern(6, 1))])),
        ),
        reject(
            "codecs/raw-as-delta",
            "codecs 3",
            CORRUPT,
            "a raw chunk that is a delta",
            one_chunk(Chunk { kind: DELTA, ..Chunk::raw(&data) }),
        ),
        reject(
            "codecs/constant-length",
            "constant 3",
            CORRUPT,
            "two values of a constant",
            one_chunk(with("tc.constant", vec![("values", vec![1, 1])])),
        ),
        reject(
            "codecs/constant-as-delta",
            "codecs 3",
            CORRUPT,
            "a constant chunk that is a delta",
            one_chunk(Chunk { kind: DELTA, ..Chunk::constant(&[1], 5) }),
        ),
        reject(
            "codecs/bitmask-as-absolute",
            "codecs 3",
            CORRUPT,
            "a mask without a base",
            one_chunk(with("tc.bitmask", vec![("mask", vec![0x1f]), ("values", data.clone())])),
        ),
        reject(
            "codecs/column-name",
            "codecs 4.1",
            CORRUPT,
            "a raw chunk whose column is `value`",
            one_chunk(with("tc.raw", vec![("value", data.clone())])),
        ),
        reject("codecs/column-missing", "codecs 4.1", CORRUPT, "a raw chunk without a column", one_chunk(with("tc.raw", vec![]))),
        reject(
            "codecs/column-surplus",
            "codecs 4.1",
            CORRUPT,
            "a raw chunk with a second column",
            one_chunk(with("tc.raw", vec![("values", data.clone()), ("more", vec![])])),
        ),
    ]
}

fn limits() -> Vec<Sketch> {
    vec![
        reject("limits/name-4097", "limits 2", LIMIT, "a name of 4097 bytes", modelled(|cask| cask.tensors[2].name = "n".repeat(4097))),
        reject(
            "limits/dimensions-65",
            "limits 2",
            LIMIT,
            "a shape of 65 dimensions",
            modelled(|cask| {
                cask.tensors.push(Tensor::whole("z", U8, &[1; 65], vec![Chunk::raw(&[1])]));
            }),
        ),
        reject(
            "limits/tensors",
            "limits 2",
            LIMIT,
            "2^40 tensors in a file of 3 kilobytes",
            drafted(|draft| draft.root.set_u64("head", TENSORS, 1 << 40)),
        ),
        reject(
            "limits/shards",
            "limits 2",
            LIMIT,
            "2^40 shards in a file of 3 kilobytes",
            drafted(|draft| draft.root.set_u64("head", SHARDS, 1 << 40)),
        ),
        reject(
            "limits/column-that-does-not-fit",
            "index 1.2",
            CORRUPT,
            "a million tensors in a file of 3 kilobytes",
            drafted(|draft| {
                draft.root.set_u64("head", TENSORS, 1_000_000);
            }),
        ),
        reject("limits/chunks-that-do-not-fit", "index 4.2", CORRUPT, "a constant of 2^36 bytes: its part does not fit the file", {
            Cask::new(id(0xce), vec![Tensor::whole("bomb", U8, &[1 << 36], vec![Chunk::constant(&[0], 1)])]).bytes()
        }),
    ]
}
