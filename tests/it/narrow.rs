//! f32 tensors read as bf16.

use std::sync::Arc;

use crate::common::{data, wrap};
use object_store::memory::InMemory;
use tensorcask::interchange::safetensors::Files;
use tensorcask::{Dtype, Metadata, Policy, Slice, TensorView};

fn rounded(data: &[u8]) -> Vec<u8> {
    let values = data.chunks_exact(4).map(|unit| f32::from_le_bytes(unit.try_into().unwrap()));
    values.flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect()
}

/// Returns the masters of a real run without their rounded weights, as a run in f32 has them.
fn weights(step: u64) -> Vec<(String, Vec<u64>, Vec<u8>)> {
    let input = Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
    let views = input.tensors().unwrap();
    let masters = views.iter().filter(|view| view.role() == "master");
    masters.map(|view| (view.name().to_owned(), view.shape().to_vec(), view.data().to_vec())).collect()
}

fn views(weights: &[(String, Vec<u64>, Vec<u8>)]) -> Vec<TensorView<'_>> {
    let mut all = Vec::new();
    for (name, shape, data) in weights {
        all.push(TensorView::new(name.clone(), Dtype::F32, shape, data).unwrap().with_role("model", name.clone()));
    }
    all
}

#[tokio::test]
async fn weights_come_as_bf16_from_a_third_of_the_bytes() {
    let store = wrap(Arc::new(InMemory::new()));
    let mut writer = store.writer(Policy::OneShot).await.unwrap();
    let steps = [1000, 1001, 1010].map(|step| (step, weights(step)));
    for (step, weights) in &steps {
        let saved = writer.save(*step, &views(weights), &[], &Metadata::default()).await.unwrap();
        if *step == 1000 {
            assert!(saved.chunks.contains_key("tc.rounded"), "{:?}", saved.chunks);
        }
    }
    for (step, weights) in &steps {
        let whole = store.snapshot(*step).await.unwrap();
        let narrow = store.snapshot(*step).await.unwrap();
        for (name, shape, data) in weights {
            assert!(whole.read(name, &Slice::all()).await.unwrap().data == *data);
            let read = narrow.as_bf16().read(name, &Slice::all()).await.unwrap();
            assert_eq!((read.dtype, &read.shape), (Dtype::Bf16, shape));
            assert!(read.data == rounded(data), "step {step}, {name}");
        }
        let all = whole.inspect().read_counts().page_bytes;
        let some = narrow.inspect().read_counts().page_bytes;
        if *step == 1000 {
            assert!(some * 100 < all * 43, "{some} of {all} bytes");
        }
        let (name, shape, data) = weights.iter().find(|(_, shape, _)| shape.len() == 2).unwrap();
        let rows = narrow.as_bf16().read(name, &Slice::rows(3..shape[0] - 2)).await.unwrap();
        let row = shape[1] as usize * 4;
        assert!(rows.data == rounded(&data[3 * row..data.len() - 2 * row]));
    }
}

#[tokio::test]
async fn every_special_value_is_rounded_as_a_cast_rounds_it() {
    let store = wrap(Arc::new(InMemory::new()));
    let mut writer = store.writer(Policy::Full).await.unwrap();
    let mut bits: Vec<u32> =
        vec![0, 1, 0x8000, 0x8001, 0x1_8000, 0x7f7f_ffff, 0x7f80_0000, 0xff80_0000, 0x7f80_0001, 0xffc0_1234, 0x3f80_8000, 0x3f81_8000];
    bits.extend((0..20_000u32).map(|i| 0x3c00_0000 + i.wrapping_mul(2_654_435_761) % 0x0100_0000));
    let data: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let view = TensorView::new("w", Dtype::F32, &[bits.len() as u64], &data).unwrap();
    let other = TensorView::new("n", Dtype::I32, &[1], &[1, 2, 3, 4]).unwrap();
    writer.save(1, &[view, other], &[], &Metadata::default()).await.unwrap();
    let snapshot = store.snapshot(1).await.unwrap();
    assert!(snapshot.as_bf16().read("w", &Slice::all()).await.unwrap().data == rounded(&data));
    assert!(snapshot.read("w", &Slice::all()).await.unwrap().data == data);
    assert!(snapshot.as_bf16().read("n", &Slice::all()).await.is_err());
}
