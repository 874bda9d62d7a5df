//! Bases that a save neither reads nor decodes, because deltas would save little: sizes, bytes read, unchanged chunks,
//! and states that differ from those before.

use std::sync::Arc;

use crate::common::{Layers, is_thorough, noise, wrap};
use object_store::memory::InMemory;
use tensorcask::codec::Objective;
use tensorcask::{BaseKeeping, Dtype, Metadata, Policy, ReadRequest, SavedSnapshot, Slice, Store, TensorView, Writer, WriterOptions};

/// Layers of a state of several windows: three with two threads, fewer with more threads. What a window teaches is used in
/// the next.
const SEVERAL_WINDOWS: usize = 50;
/// Layers of a state of one window. What a save teaches is used in the next.
const ONE_WINDOW: usize = 6;

fn memory() -> Store {
    wrap(Arc::new(InMemory::new()))
}

async fn writer(store: &Store, objective: Objective, base_cache: BaseKeeping) -> Writer {
    let options = WriterOptions { policy: Policy::Consecutive, objective: objective.into(), base_cache, ..WriterOptions::default() };
    store.writer_with(options).await.unwrap()
}

async fn save(writer: &mut Writer, step: u64, tensors: &[TensorView<'_>]) -> SavedSnapshot {
    let saved = writer.save(step, tensors, &[], &Metadata::default()).await.unwrap();
    let snapshot = writer.store().snapshot(step).await.unwrap();
    let mut buffers: Vec<Vec<u8>> = tensors.iter().map(|tensor| vec![0xaa; tensor.data().len()]).collect();
    let wanted = tensors.iter().zip(&mut buffers).map(|(tensor, out)| ReadRequest { name: tensor.name(), slice: Slice::all(), out });
    snapshot.read_many_into(wanted.collect()).await.unwrap();
    for (tensor, buffer) in tensors.iter().zip(&buffers) {
        assert!(tensor.data() == buffer, "step {step}, {}", tensor.name());
    }
    saved
}

#[tokio::test]
async fn several_steps_later_most_bases_are_not_read() {
    let objectives = match is_thorough() {
        true => vec![Objective::BALANCED, Objective::SMALLEST],
        false => vec![Objective::BALANCED],
    };
    let mut sizes = Vec::new();
    for objective in objectives {
        let store = memory();
        let mut writer = writer(&store, objective, BaseKeeping::None).await;
        let base = writer.save(1000, &Layers::at_steps(&[1000; SEVERAL_WINDOWS]).tensors(), &[], &Metadata::default()).await.unwrap();
        let before = store.io().bytes_read;
        let delta = writer.save(1010, &Layers::at_steps(&[1010; SEVERAL_WINDOWS]).tensors(), &[], &Metadata::default()).await.unwrap();
        let read = (store.io().bytes_read - before) as f64 / base.stored_bytes as f64;
        assert_eq!(delta.kind.name(), "delta");
        assert_eq!(read < 0.6, objective == Objective::BALANCED, "{read} of the base was read for {objective:?}");
        sizes.push(delta.stored_bytes as f64);
    }
    if let [balanced, smallest] = sizes[..] {
        assert!(balanced <= smallest * 1.02, "{balanced} and {smallest} bytes");
    }
}

#[tokio::test]
async fn unchanged_chunks_are_found_without_their_bases() {
    for base_cache in [BaseKeeping::Memory, BaseKeeping::Encoded, BaseKeeping::None] {
        let store = memory();
        let mut writer = writer(&store, Objective::BALANCED, base_cache).await;
        save(&mut writer, 1000, &Layers::at_steps(&[1000; ONE_WINDOW]).tensors()).await;
        let mut steps = [1010; ONE_WINDOW];
        save(&mut writer, 1010, &Layers::at_steps(&steps).tensors()).await;
        // All layers go back by ten steps, except the last one.
        steps[..ONE_WINDOW - 1].fill(1000);
        let layers = Layers::at_steps(&steps);
        let tensors = layers.tensors();
        let saved = save(&mut writer, 1020, &tensors).await;
        assert_eq!(saved.chunks.get("unchanged"), Some(&(layers.layers[0].len() as u64)), "{:?}", saved.chunks);
        let again = save(&mut writer, 1030, &tensors).await;
        assert_eq!(again.chunks.get("unchanged"), Some(&(tensors.len() as u64)), "{:?}", again.chunks);
    }
}

#[tokio::test]
async fn a_step_is_replayed_as_soon_as_the_distance_is_one_again() {
    let store = memory();
    let mut writer = writer(&store, Objective::BALANCED, BaseKeeping::None).await;
    save(&mut writer, 990, &Layers::at_steps(&[1010; ONE_WINDOW]).tensors()).await;
    let apart = save(&mut writer, 1000, &Layers::at_steps(&[1000; ONE_WINDOW]).tensors()).await;
    assert!(!apart.chunks.contains_key("tc.replay"), "{:?}", apart.chunks);
    let layers = Layers::at_steps(&[1001; ONE_WINDOW]);
    let tensors = layers.tensors();
    let one_later = save(&mut writer, 1001, &tensors).await;
    let replayed = tensors.iter().filter(|tensor| ["master", "exp_avg_sq"].contains(&tensor.role())).count() as u64;
    assert!(one_later.chunks["tc.replay"] * 10 > replayed * 9, "{:?}", one_later.chunks);
}

/// A codec without the base was best for the first tensors. It is far too large for those that follow.
#[tokio::test]
async fn a_base_is_read_when_the_chosen_codec_disappoints() {
    const BYTES: usize = 512 << 10;
    const TENSORS: usize = 100;
    let before: Vec<Vec<u8>> = (0..TENSORS).map(|seed| noise(seed as u64, BYTES)).collect();
    let mut after = before.clone();
    for (number, bytes) in after.iter_mut().enumerate() {
        if number < TENSORS / 2 {
            bytes.iter_mut().zip(noise(7, BYTES)).for_each(|(byte, new)| *byte = new & 3);
        } else {
            bytes[number] ^= 1;
        }
    }
    let store = memory();
    let mut writer = writer(&store, Objective::BALANCED, BaseKeeping::None).await;
    let mut saved = None;
    for (step, state) in [(10, &before), (20, &after)] {
        let view = |(number, bytes)| TensorView::new(format!("w.{number:03}"), Dtype::U8, &[BYTES as u64], bytes).unwrap();
        let tensors: Vec<TensorView<'_>> =
            state.iter().enumerate().map(|(number, bytes): (usize, &Vec<u8>)| view((number, bytes.as_slice()))).collect();
        saved = Some(save(&mut writer, step, &tensors).await);
    }
    let saved = saved.unwrap();
    assert_eq!(saved.kind.name(), "delta");
    assert!(saved.stored_bytes < (TENSORS * BYTES) as u64 / 5, "{} bytes, {:?}", saved.stored_bytes, saved.chunks);
}
