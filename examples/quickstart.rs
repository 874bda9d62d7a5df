//! Saves a few training steps. Then restores the newest step, a slice of it, and an older step.
//!
//! `cargo run --example quickstart [STORE]`; the default store is in memory.

use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::VerifyOptions;
use tensorcask::{Blob, Dtype, Latest, Metadata, Policy, Result, Slice, TensorView};

fn main() -> Result<()> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory://quickstart".to_owned());
    let store = Store::open(&url)?;
    let mut writer = store.writer(Policy::Intermittent { every: 4 })?;

    // A "model" of 1024 x 256 bf16 weights. Each step changes one in a hundred.
    let mut weights: Vec<u8> = (0..1024 * 256 * 2u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for step in 0..6u64 {
        for weight in weights.chunks_exact_mut(2).skip(step as usize).step_by(100) {
            weight[0] ^= 1;
        }
        let state = [TensorView::new("model.wte.weight", Dtype::Bf16, &[1024, 256], &weights)?];
        let blobs = [Blob::new("rng", step.to_string().into_bytes())];
        let mut metadata = Metadata::default();
        metadata.user.insert("loss".into(), (3.0 / (step as f64 + 1.0)).into());
        let saved = writer.save(step, &state, &blobs, &metadata)?;
        println!("step {step}: {:5} {:>6} of {} bytes", saved.kind.name(), saved.stored_bytes, saved.tensor_bytes);
    }

    let snapshot = store.snapshot(Latest)?;
    assert_eq!(snapshot.read("model.wte.weight", &Slice::all())?.data, weights);
    let rows = snapshot.read("model.wte.weight", &Slice::rows(100..108))?;
    println!("restored step {}, and rows of it: {} {:?}", snapshot.step(), rows.dtype, rows.shape);
    println!("step 2 had loss {}", store.snapshot(2)?.user()["loss"]);

    let report = maintain::verify(&store, &VerifyOptions::default())?;
    println!("verified {} snapshots, {} chunks: {}", report.snapshots, report.chunks, if report.is_clean() { "clean" } else { "damaged" });
    Ok(())
}
