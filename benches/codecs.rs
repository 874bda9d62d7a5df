//! Codecs on the chunks of real training states, one thread: bytes stored, and speed beside memcpy of the same bytes.

#![allow(clippy::unwrap_used, reason = "a benchmark")]

mod common;

use bytes::Bytes;
use common::{Arguments, Memcpy, Owned, Table, alternate, report, seconds, synthetic};
use serde_json::json;
use tensorcask::codec::{Chunk, Codec, Columns, Registry};

/// Elements of a chunk at most, as in the chunk grid.
const CHUNK: usize = 1 << 18;

fn main() {
    let arguments = Arguments::parse(&["mib", "rounds", "codec"]);
    let bytes = (arguments.number("mib", 64.0) * 1048576.0) as u64;
    let rounds = arguments.number("rounds", 5.0) as usize;
    let registry = Registry::default();
    let mut tables = Vec::new();
    for (title, from, to, role) in [
        ("bf16 weights, full", None, 1000, "model."),
        ("bf16 weights, one step (60 % changed)", Some(1000), 1001, "model."),
        ("bf16 weights, ten steps (93 % changed)", Some(1000), 1010, "model."),
        ("bf16 weights, one step of fine-tuning (1.5 % changed)", Some(2400), 2401, "model."),
        ("f32 masters, full", None, 1000, "optimizer.master."),
        ("f32 masters, one step", Some(1000), 1001, "optimizer.master."),
        ("f32 exp_avg, full", None, 1000, "optimizer.exp_avg."),
        ("f32 exp_avg_sq, full", None, 1000, "optimizer.exp_avg_sq."),
        ("f32 exp_avg_sq, one step", Some(1000), 1001, "optimizer.exp_avg_sq."),
    ] {
        let file = |step: u32| arguments.data().join(format!("step-{step}.safetensors"));
        let names = |tensor: &Owned| tensor.name.starts_with(role) && tensor.shape.len() > 1;
        let state: Vec<Owned> = synthetic(bytes, &file(to)).into_iter().filter(names).collect();
        let base: Option<Vec<Owned>> = from.map(|step| synthetic(bytes, &file(step)).into_iter().filter(names).collect());
        let base_of = |name: &str| Some(base.as_ref()?.iter().find(|tensor| tensor.name == name)?.data.as_slice());
        let mut chunks: Vec<Chunk<'_>> = Vec::new();
        for tensor in &state {
            let (width, base) = (tensor.dtype.unit_bytes(), base_of(&tensor.name));
            if from.is_some() && base.is_none() {
                // Files of another size are tiled to another number of layers.
                continue;
            }
            for (i, data) in tensor.data.chunks(CHUNK * width).enumerate() {
                let base = base.map(|base| &base[i * CHUNK * width..][..data.len()]);
                chunks.push(Chunk {
                    dtype: tensor.dtype,
                    element_count: (data.len() / width) as u64,
                    role: "model",
                    data,
                    base,
                    partners: &[],
                });
            }
        }
        let total: usize = chunks.iter().map(|chunk| chunk.data.len()).sum();
        let mut memcpy = Memcpy::new(total);
        let mut table = Table::new(
            format!("{title}: {:.0} MB in {} chunks", total as f64 / 1e6, chunks.len()),
            &["bytes / original", "encode, GB/s", "decode, GB/s", "encode / memcpy", "decode / memcpy"],
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
                    ("encode", &mut || {
                        seconds(|| chunks.iter().for_each(|chunk| drop(std::hint::black_box(codec.encode(chunk).unwrap())))).0
                    }),
                    ("decode", &mut || {
                        seconds(|| {
                            for ((chunk, columns), encoded) in chunks.iter().zip(&columns).zip(&encoded) {
                                let base = chunk.base.filter(|_| encoded.uses_base);
                                let input =
                                    Columns { dtype: chunk.dtype, element_count: chunk.element_count, columns, base, partners: &[] };
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
                    format!("{:.2}", rate(times[1])),
                    format!("{:.2}", rate(times[2])),
                    format!("{:.2}", times[0] / times[1]),
                    format!("{:.2}", times[0] / times[2]),
                ],
                json!({ "stored": stored, "original": total, "memcpy_s": times[0], "encode_s": times[1], "decode_s": times[2] }),
            );
        }
        tables.push(table);
    }
    report("codecs", &tables, arguments.json);
}
