//! Measures codecs on the chunks of real training states, on one thread: bytes stored, and speed next to memcpy of the
//! same bytes.

#![allow(clippy::unwrap_used, reason = "a benchmark")]

mod common;

use bytes::Bytes;
use common::{Arguments, Memcpy, Owned, Table, alternate, report, seconds, synthetic};
use serde_json::json;
use tensorcask::codec::{Chunk, Codec, Columns, Partner, Registry};
use tensorcask::infer_role;

/// Maximum number of elements of a chunk, as in the chunk grid.
const CHUNK: usize = 1 << 18;

fn main() {
    let arguments = Arguments::parse(&["mib", "rounds", "codec", "only"]);
    let bytes = (arguments.number("mib", 64.0) * 1048576.0) as u64;
    let rounds = arguments.number("rounds", 5.0) as usize;
    let registry = Registry::default();
    let mut tables = Vec::new();
    for (title, from, to, role) in [
        ("bf16 weights, full", None, 1000, "model."),
        ("bf16 weights, one step", Some(1000), 1001, "model."),
        ("bf16 weights, ten steps", Some(1000), 1010, "model."),
        ("bf16 weights, one step of fine-tuning", Some(2400), 2401, "model."),
        ("f32 masters, full", None, 1000, "optimizer.master."),
        ("f32 masters, one step", Some(1000), 1001, "optimizer.master."),
        ("f32 exp_avg, full", None, 1000, "optimizer.exp_avg."),
        ("f32 exp_avg_sq, full", None, 1000, "optimizer.exp_avg_sq."),
        ("f32 exp_avg_sq, one step", Some(1000), 1001, "optimizer.exp_avg_sq."),
    ] {
        if arguments.text("only").is_some_and(|text| !title.contains(text)) {
            continue;
        }
        let file = |step: u32| arguments.data().join(format!("step-{step}.safetensors"));
        let whole =
            |step: u32| -> Vec<Owned> { synthetic(bytes, &file(step)).into_iter().filter(|tensor| tensor.shape.len() > 1).collect() };
        let state = whole(to);
        let base: Option<Vec<Owned>> = from.map(whole);
        let in_base = |name: &str| base.as_ref().and_then(|base| base.iter().find(|tensor| tensor.name == name));
        // Returns another tensor of the same parameter, by role, because codecs may ask for it.
        let partner_of = |tensor: &Owned, role: &str| {
            let param = infer_role(&tensor.name).param;
            let fits = |other: &&Owned| {
                let guess = infer_role(&other.name);
                guess.role == role && guess.param == param && other.shape == tensor.shape
            };
            state.iter().find(fits)
        };
        let mut places = Vec::new();
        for tensor in state.iter().filter(|tensor| tensor.name.starts_with(role)) {
            let base = in_base(&tensor.name).map(|base| base.data.as_slice());
            if from.is_some() && base.is_none() {
                // Skips files of another size, which are tiled to another number of layers.
                continue;
            }
            let partners: Vec<(&str, &Owned)> =
                ["model", "exp_avg", "exp_avg_sq"].into_iter().filter_map(|role| Some((role, partner_of(tensor, role)?))).collect();
            let count = tensor.data.len() / tensor.dtype.unit_bytes();
            places.extend((0..count.div_ceil(CHUNK)).map(|at| (tensor, base, partners.clone(), at * CHUNK..count.min((at + 1) * CHUNK))));
        }
        fn cut<'a>(data: &'a [u8], width: usize, range: &std::ops::Range<usize>) -> &'a [u8] {
            &data[range.start * width..range.end * width]
        }
        let partners: Vec<Vec<Partner<'_>>> = places
            .iter()
            .map(|(_, _, partners, range)| {
                let mut all = Vec::new();
                for &(role, tensor) in partners {
                    let width = tensor.dtype.unit_bytes();
                    let before = in_base(&tensor.name).map(|base| cut(&base.data, width, range));
                    all.push(Partner { role, dtype: tensor.dtype, data: cut(&tensor.data, width, range), base: before, gradient: None });
                }
                all
            })
            .collect();
        let roles: Vec<String> = places.iter().map(|(tensor, ..)| infer_role(&tensor.name).role).collect();
        let chunks: Vec<Chunk<'_>> = places
            .iter()
            .zip(&partners)
            .zip(&roles)
            .map(|(((tensor, base, _, range), partners), role)| {
                let width = tensor.dtype.unit_bytes();
                Chunk {
                    role,
                    base: base.map(|base| cut(base, width, range)),
                    partners,
                    row_elements: tensor.shape.last().copied().unwrap_or(0),
                    ..Chunk::new(tensor.dtype, range.len() as u64, cut(&tensor.data, width, range))
                }
            })
            .collect();
        let total: usize = chunks.iter().map(|chunk| chunk.data.len()).sum();
        let mut memcpy = Memcpy::new(total);
        let mut table = Table::new(
            format!("{title}: {:.0} MB in {} chunks", total as f64 / 1e6, chunks.len()),
            &["bytes / original", "estimate, GB/s", "encode, GB/s", "decode, GB/s", "encode / memcpy", "decode / memcpy"],
        );
        for codec in registry.iter().filter(|codec| arguments.text("codec").is_none_or(|id| codec.id() == id)) {
            if chunks.iter().any(|chunk| codec.estimate(chunk).is_none()) {
                continue;
            }
            let codec: &dyn Codec = codec.as_ref();
            let encoded: Vec<_> = chunks.iter().map(|chunk| codec.encode(chunk).unwrap()).collect();
            let stored: usize = encoded.iter().flat_map(|e| &e.columns).map(|(_, bytes)| bytes.len()).sum();
            let columns: Vec<Vec<(&str, Bytes)>> =
                encoded.iter().map(|e| e.columns.iter().map(|(name, bytes)| (*name, Bytes::from(bytes.clone()))).collect()).collect();
            let mut out = vec![1u8; chunks.iter().map(|chunk| chunk.data.len()).max().unwrap_or(0)];
            let times = alternate(
                rounds,
                &mut [
                    ("memcpy", &mut || memcpy.seconds(chunks.iter().map(|chunk| chunk.data))),
                    ("estimate", &mut || seconds(|| chunks.iter().for_each(|chunk| drop(std::hint::black_box(codec.estimate(chunk))))).0),
                    ("encode", &mut || {
                        seconds(|| chunks.iter().for_each(|chunk| drop(std::hint::black_box(codec.encode(chunk).unwrap().into_bytes())))).0
                    }),
                    ("decode", &mut || {
                        seconds(|| {
                            for ((chunk, columns), encoded) in chunks.iter().zip(&columns).zip(&encoded) {
                                let base = chunk.base.filter(|_| encoded.uses_base);
                                let &Chunk { dtype, element_count, partners, .. } = chunk;
                                let input = Columns { dtype, element_count, columns, base, partners };
                                codec.decode(&input, &mut out[..chunk.data.len()]).unwrap();
                            }
                        })
                        .0
                    }),
                ],
            );
            let rate = |seconds: f64| total as f64 / seconds / 1e9;
            table.row(
                codec.id(),
                vec![
                    format!("{:.4}", stored as f64 / total as f64),
                    format!("{:.1}", rate(times[1])),
                    format!("{:.2}", rate(times[2])),
                    format!("{:.2}", rate(times[3])),
                    format!("{:.2}", times[0] / times[2]),
                    format!("{:.2}", times[0] / times[3]),
                ],
                json!({ "stored": stored, "original": total, "memcpy_s": times[0], "estimate_s": times[1], "encode_s": times[2], "decode_s": times[3] }),
            );
        }
        tables.push(table);
    }
    report("codecs", &tables, arguments.json);
}
