//! Moments and masters that an optimizer numbers are stored by the weights that they belong to, however both are ordered.

use std::sync::Arc;

use crate::common::{data, wrap};
use object_store::memory::InMemory;
use tensorcask::interchange::safetensors::Files;
use tensorcask::{Dtype, Metadata, Policy, Rank, RoleRules, SavedSnapshot, Slice, Store, TensorView, Writer, WriterOptions};

/// The parameters of `tests/data`, as the optimizer numbers them. Five have the same shape.
const PARAMS: [&str; 6] =
    ["h.2.attn_proj.bias", "h.2.attn_proj.weight", "h.2.ln_1.bias", "h.2.ln_1.weight", "h.2.ln_2.bias", "h.2.ln_2.weight"];

/// Orders of the weights in the state, as places in [`PARAMS`].
const SAME: [usize; 6] = [0, 1, 2, 3, 4, 5];
const OTHER: [usize; 6] = [5, 1, 4, 2, 0, 3];

/// Names under which trainers save the tensors of a step.
#[derive(Clone, Copy)]
struct Names {
    /// Order of the weights.
    order: [usize; 6],
    /// Number of each parameter.
    numbers: [usize; 6],
    /// Whether the weights are of 16 bits and have numbered masters. Otherwise the masters are the weights.
    has_masters: bool,
    /// Whether the model has one more tensor of the common shape.
    has_buffer: bool,
}

impl Names {
    fn tensors<'a>(&self, input: &'a Files) -> Vec<TensorView<'a>> {
        let views = input.tensors().unwrap();
        let named = |source: String, name: String| {
            let view = views.iter().find(|view| view.name() == source).unwrap();
            TensorView::new(name, view.dtype(), view.shape(), view.data()).unwrap()
        };
        let weights = if self.has_masters { "model" } else { "optimizer.master" };
        let params = self.order.map(|place| PARAMS[place]);
        let mut state: Vec<TensorView<'a>> =
            params.iter().map(|param| named(format!("{weights}.{param}"), format!("model.{param}"))).collect();
        if self.has_buffer {
            // Minus infinity, as in a mask.
            let mask: &'static [u8] = [0u8, 0, 0x80, 0xff].repeat(256).leak();
            state.insert(0, TensorView::new("model.mask", Dtype::F32, &[256], mask).unwrap());
        }
        let roles = if self.has_masters { vec!["master", "exp_avg", "exp_avg_sq"] } else { vec!["exp_avg", "exp_avg_sq"] };
        for (number, param) in self.numbers.iter().zip(PARAMS) {
            state.extend(roles.iter().map(|role| named(format!("optimizer.{role}.{param}"), format!("optimizer.state.{number}.{role}"))));
        }
        state
    }
}

/// A run that saves steps of `tests/data`.
struct Run {
    store: Store,
    writer: Writer,
}

impl Run {
    async fn new() -> Self {
        let store = wrap(Arc::new(InMemory::new()));
        let writer = store.writer(Policy::Consecutive).await.unwrap();
        Self { store, writer }
    }

    async fn save(&mut self, step: u64, names: Names) -> SavedSnapshot {
        let input = Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
        let state = names.tensors(&input);
        let saved = self.writer.save(step, &state, &[], &Metadata::default()).await.unwrap();
        let snapshot = self.store.snapshot(step).await.unwrap();
        for tensor in &state {
            let found = snapshot.read(tensor.name(), &Slice::all()).await.unwrap();
            assert!(found.data == tensor.data(), "step {step}, {}", tensor.name());
        }
        saved
    }

    /// Whether every number has the parameter of its weight in a snapshot.
    async fn is_paired(&self, step: u64) -> bool {
        self.has_pairs(step, SAME).await
    }

    async fn has_pairs(&self, step: u64, numbers: [usize; 6]) -> bool {
        let snapshot = self.store.snapshot(step).await.unwrap();
        let param = |number: usize| snapshot.tensor(&format!("optimizer.state.{number}.exp_avg")).unwrap().param;
        numbers.into_iter().zip(PARAMS).all(|(number, name)| param(number) == name)
    }
}

#[tokio::test]
async fn weights_are_replayed_by_moments_with_numbers() {
    let mut run = Run::new().await;
    let names = Names { order: SAME, numbers: SAME, has_masters: false, has_buffer: false };
    run.save(1000, names).await;
    assert!(run.is_paired(1000).await, "the order tells it");
    let saved = run.save(1001, names).await;
    assert!(saved.chunks.contains_key("tc.replay"), "{:?}", saved.chunks);
    assert!(saved.stored_bytes * 100 < saved.tensor_bytes * 31, "{} of {}", saved.stored_bytes, saved.tensor_bytes);
}

#[tokio::test]
async fn a_wrong_order_is_noticed_once_the_weights_have_moved() {
    for has_buffer in [false, true] {
        let mut run = Run::new().await;
        let names = Names { order: OTHER, numbers: SAME, has_masters: false, has_buffer };
        run.save(1000, names).await;
        assert!(!run.is_paired(1000).await);
        run.save(1001, names).await;
        assert!(run.is_paired(1001).await);
        // The pairs are kept, also where weights and moments have moved too far for a proof.
        run.save(1010, names).await;
        assert!(run.is_paired(1010).await);
    }
}

#[tokio::test]
async fn a_new_writer_knows_the_pairs_from_its_parent() {
    let mut run = Run::new().await;
    let names = Names { order: OTHER, numbers: SAME, has_masters: false, has_buffer: true };
    run.save(1000, names).await;
    run.save(1001, names).await;
    run.writer = run.store.writer(Policy::Consecutive).await.unwrap();
    run.save(1010, names).await;
    assert!(run.is_paired(1010).await);
}

#[tokio::test]
async fn masters_with_numbers_prove_their_weights_in_a_base() {
    let mut run = Run::new().await;
    let names = Names { order: OTHER, numbers: SAME, has_masters: true, has_buffer: true };
    let saved = run.save(1000, names).await;
    assert!(run.is_paired(1000).await);
    assert_eq!(saved.chunks.get("tc.remainder"), Some(&6), "{:?}", saved.chunks);
    let saved = run.save(1001, names).await;
    assert!(saved.stored_bytes * 100 < saved.tensor_bytes * 34, "{} of {}", saved.stored_bytes, saved.tensor_bytes);
}

/// An optimizer that is made again may number the same parameters in another order.
#[tokio::test]
async fn another_numbering_is_noticed() {
    let mut run = Run::new().await;
    let names = Names { order: SAME, numbers: SAME, has_masters: false, has_buffer: false };
    run.save(1000, names).await;
    let numbers = [2, 1, 0, 3, 4, 5];
    run.save(1001, names).await;
    run.save(1010, Names { numbers, ..names }).await;
    assert!(run.has_pairs(1010, numbers).await);
}

#[tokio::test]
async fn a_weight_whose_name_is_not_unique_gets_no_moments() {
    let store = wrap(Arc::new(InMemory::new()));
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    let numbers: [Vec<u8>; 4] = [1u8, 2, 3, 4].map(|value| vec![value; 64]);
    let names = ["model.w", "module.w", "optimizer.state.0.exp_avg", "optimizer.state.1.exp_avg"];
    let state: Vec<TensorView<'_>> =
        names.iter().zip(&numbers).map(|(name, data)| TensorView::new(*name, Dtype::F32, &[16], data).unwrap()).collect();
    writer.save(1, &state, &[], &Metadata::default()).await.unwrap();
    let snapshot = store.snapshot(1).await.unwrap();
    assert_eq!(snapshot.tensor(names[2]).unwrap().param, "0");
    assert_eq!(snapshot.tensor(names[3]).unwrap().param, "1");
}

#[tokio::test]
async fn empty_tensors_have_nothing_to_compare() {
    let store = wrap(Arc::new(InMemory::new()));
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    for step in 1..=3u8 {
        let number = vec![step; 4];
        let state = [
            TensorView::new("model.w", Dtype::F32, &[0, 4], &[]).unwrap(),
            TensorView::new("optimizer.state.0.exp_avg", Dtype::F32, &[0, 4], &[]).unwrap(),
            TensorView::new("model.scale", Dtype::F32, &[], &number).unwrap(),
            TensorView::new("optimizer.state.1.exp_avg", Dtype::F32, &[], &number).unwrap(),
        ];
        writer.save(step.into(), &state, &[], &Metadata::default()).await.unwrap();
    }
    assert_eq!(store.snapshot(3).await.unwrap().read("model.scale", &Slice::all()).await.unwrap().data, [3; 4]);
}

#[tokio::test]
async fn the_only_rank_of_a_job_finds_the_weights_too() {
    let mut run = Run::new().await;
    let options = WriterOptions { policy: Policy::Consecutive, ..WriterOptions::default() };
    let mut rank = run.store.rank_writer(Rank { rank: 0, world: 1, attempt: 0 }, options).await.unwrap();
    let names = Names { order: OTHER, numbers: SAME, has_masters: false, has_buffer: true };
    for step in [1000, 1001] {
        let input = Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
        let receipt = rank.save(step, &names.tensors(&input), &[]).await.unwrap();
        run.writer.commit_receipts(step, &[receipt], &Metadata::default()).await.unwrap();
    }
    assert!(run.is_paired(1001).await);
    assert!(run.store.snapshot(1001).await.unwrap().verify().await.is_ok());
}

#[tokio::test]
async fn a_stated_parameter_is_never_replaced() {
    let store = wrap(Arc::new(InMemory::new()));
    let rules = ["optimizer.state.0.exp_avg=exp_avg:mine", "optimizer.state.2.exp_avg=exp_avg:7"];
    let roles = RoleRules::parse(rules).unwrap();
    let mut writer = store.writer_with(WriterOptions { roles, ..WriterOptions::default() }).await.unwrap();
    let input = Files::open(&[data("step-1000.safetensors")]).unwrap();
    let names = Names { order: SAME, numbers: SAME, has_masters: false, has_buffer: false };
    writer.save(1, &names.tensors(&input), &[], &Metadata::default()).await.unwrap();
    let snapshot = store.snapshot(1).await.unwrap();
    assert_eq!(snapshot.tensor("optimizer.state.0.exp_avg").unwrap().param, "mine");
    assert_eq!(snapshot.tensor("optimizer.state.2.exp_avg").unwrap().param, "7");
    assert_eq!(snapshot.tensor("optimizer.state.1.exp_avg").unwrap().param, "h.2.attn_proj.weight");
}

#[tokio::test]
async fn numbers_that_name_weights_keep_their_names() {
    let store = wrap(Arc::new(InMemory::new()));
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    let input = Files::open(&[data("step-1000.safetensors")]).unwrap();
    let views = input.tensors().unwrap();
    let of = |role: &str, param: &str, name: &str| {
        let view = views.iter().find(|view| view.name() == format!("{role}.{param}")).unwrap();
        TensorView::new(name, view.dtype(), view.shape(), view.data()).unwrap()
    };
    // A list of parameters: their names are numbers, too.
    let state = [
        of("optimizer.master", PARAMS[2], "model.1"),
        of("optimizer.master", PARAMS[0], "model.0"),
        of("optimizer.exp_avg", PARAMS[0], "optimizer.state.0.exp_avg"),
        of("optimizer.exp_avg", PARAMS[2], "optimizer.state.1.exp_avg"),
    ];
    writer.save(1, &state, &[], &Metadata::default()).await.unwrap();
    let snapshot = store.snapshot(1).await.unwrap();
    for number in ["0", "1"] {
        assert_eq!(snapshot.tensor(&format!("optimizer.state.{number}.exp_avg")).unwrap().param, number);
    }
}

/// As the engine saves a job with replicated data parallelism: one rank has the state, and the others what is their own.
#[tokio::test]
async fn a_rank_that_has_the_whole_state_replays_it() {
    let store = wrap(Arc::new(InMemory::new()));
    let mut leader = store.writer(Policy::Consecutive).await.unwrap();
    let rank = |rank| Rank { rank, world: 2, attempt: 0 };
    let options = || WriterOptions { policy: Policy::Consecutive, ..WriterOptions::default() };
    let mut ranks = [store.rank_writer(rank(0), options()).await.unwrap(), store.rank_writer(rank(1), options()).await.unwrap()];
    ranks[0].set_alone(true);
    let names = Names { order: OTHER, numbers: SAME, has_masters: false, has_buffer: false };
    let mut sizes = Vec::new();
    for step in [1000, 1001, 1010] {
        let input = Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
        let state = names.tensors(&input);
        let own = [TensorView::new("rank1.rng", Dtype::U8, &[4], &[1, 2, 3, 4]).unwrap()];
        let parent = leader.next_parent(step).await.unwrap();
        let mut receipts = Vec::new();
        for (writer, tensors) in ranks.iter_mut().zip([state.as_slice(), &own]) {
            receipts.push(writer.save_on(step, parent, tensors, &[]).await.unwrap());
        }
        let saved = leader.commit_receipts(step, &receipts, &Metadata::default()).await.unwrap();
        sizes.push(saved.stored_bytes as f64 / saved.tensor_bytes as f64);
        let snapshot = store.snapshot(step).await.unwrap();
        for tensor in state.iter().chain(&own) {
            assert!(snapshot.read(tensor.name(), &Slice::all()).await.unwrap().data == tensor.data(), "step {step}, {}", tensor.name());
        }
    }
    assert!(sizes[1] < 0.31, "the weights are not replayed: {sizes:?}");
}
