//! Bases that a save neither reads nor decodes, because deltas would save little: sizes, bytes read, unchanged chunks,
//! and states that differ from those before.

use std::sync::Arc;

use crate::common::{data, noise, wrap};
use object_store::memory::InMemory;
use tensorcask::codec::Objective;
use tensorcask::interchange::safetensors::Files;
use tensorcask::{BaseKeeping, Dtype, Metadata, Policy, ReadRequest, SavedSnapshot, Slice, Store, TensorView, Writer, WriterOptions};

/// Number of decoded bytes of a state: several windows.
const STATE_BYTES: usize = 100 << 20;

fn memory() -> Store {
    wrap(Arc::new(InMemory::new()))
}

async fn writer(store: &Store, objective: Objective, base_cache: BaseKeeping) -> Writer {
    let options = WriterOptions { policy: Policy::Consecutive, objective, base_cache, ..WriterOptions::default() };
    store.writer_with(options).await.unwrap()
}

/// A large state: copies of a real one, as layers of a model. The last `frozen` layers are those of step 1000.
struct Layers {
    own: Files,
    /// Bytes of the layers. Each has memory of its own: tensors that share memory would be tied.
    layers: Vec<Vec<Vec<u8>>>,
}

impl Layers {
    fn of(step: u64, frozen: usize) -> Self {
        let open = |step: u64| Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
        let bytes = |files: &Files| -> Vec<Vec<u8>> { by_name(files).iter().map(|view| view.data().to_vec()).collect() };
        let own = open(step);
        let count = STATE_BYTES / bytes(&own).iter().map(Vec::len).sum::<usize>();
        let mut layers = vec![bytes(&own); count - frozen];
        layers.extend(vec![bytes(&open(1000)); frozen]);
        Self { own, layers }
    }

    fn tensors(&self) -> Vec<TensorView<'_>> {
        let views = by_name(&self.own);
        let mut tensors = Vec::new();
        for (layer, contents) in self.layers.iter().enumerate() {
            for (view, bytes) in views.iter().zip(contents) {
                let (name, param) = (format!("{}.{layer:03}", view.name()), format!("{}.{layer:03}", view.param()));
                let tensor = TensorView::new(name, view.dtype(), view.shape(), bytes).unwrap();
                tensors.push(tensor.with_role(view.role().to_owned(), param));
            }
        }
        tensors
    }
}

fn by_name(files: &Files) -> Vec<TensorView<'_>> {
    let mut views = files.tensors().unwrap();
    views.sort_by(|a, b| a.name().cmp(b.name()));
    views
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
    let mut sizes = Vec::new();
    for objective in [Objective::BALANCED, Objective::SMALLEST] {
        let store = memory();
        let mut writer = writer(&store, objective, BaseKeeping::None).await;
        let base = save(&mut writer, 1000, &Layers::of(1000, 0).tensors()).await;
        let layers = Layers::of(1010, 0);
        let before = store.io().bytes_read;
        let delta = writer.save(1010, &layers.tensors(), &[], &Metadata::default()).await.unwrap();
        let read = store.io().bytes_read - before;
        sizes.push((delta.stored_bytes, read as f64 / base.stored_bytes as f64));
        assert_eq!(delta.kind.name(), "delta");
    }
    let [(balanced, few), (smallest, all)] = sizes[..] else { panic!() };
    assert!(few < 0.5 && all > 0.6, "{few} and {all} of the base were read");
    assert!(balanced as f64 <= smallest as f64 * 1.02, "{balanced} and {smallest} bytes");
}

#[tokio::test]
async fn unchanged_chunks_are_found_without_their_bases() {
    for base_cache in [BaseKeeping::Memory, BaseKeeping::Encoded, BaseKeeping::None] {
        let store = memory();
        let mut writer = writer(&store, Objective::BALANCED, base_cache).await;
        save(&mut writer, 1000, &Layers::of(1000, 0).tensors()).await;
        let layers = Layers::of(1010, 20);
        let tensors = layers.tensors();
        let saved = save(&mut writer, 1010, &tensors).await;
        let per_layer = layers.layers[0].len() as u64;
        assert_eq!(saved.chunks.get("unchanged"), Some(&(20 * per_layer)), "{:?}", saved.chunks);
        let again = save(&mut writer, 1020, &tensors).await;
        assert_eq!(again.chunks.get("unchanged"), Some(&(tensors.len() as u64)), "{:?}", again.chunks);
    }
}

#[tokio::test]
async fn a_step_is_replayed_as_soon_as_the_distance_is_one_again() {
    let store = memory();
    let mut writer = writer(&store, Objective::BALANCED, BaseKeeping::None).await;
    save(&mut writer, 990, &Layers::of(1010, 0).tensors()).await;
    let apart = save(&mut writer, 1000, &Layers::of(1000, 0).tensors()).await;
    assert!(!apart.chunks.contains_key("tc.replay"), "{:?}", apart.chunks);
    let layers = Layers::of(1001, 0);
    let tensors = layers.tensors();
    let one_later = save(&mut writer, 1001, &tensors).await;
    let replayed = tensors.iter().filter(|tensor| ["master", "exp_avg_sq"].contains(&tensor.role())).count() as u64;
    assert!(one_later.chunks["tc.replay"] * 10 > replayed * 9, "{:?}", one_later.chunks);
}

/// A codec without the base was best for the first tensors. It is far too large for those that follow.
#[tokio::test]
async fn a_base_is_read_when_the_chosen_codec_disappoints() {
    const BYTES: usize = 1 << 20;
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
