//! The policy `adaptive`: which parent a delta gets, when a chain ends, and what that costs over a training that saves each
//! step.

use crate::common::training::{StateTensor, Training, views};
use crate::common::{data, noise};
use tensorcask::interchange::safetensors::Files;
use tensorcask::maintain::{self, GcOptions, VerifyOptions};
use tensorcask::wire::Id;
use tensorcask::{
    BaseKeeping, DecisionReason, Dtype, Limits, Metadata, Policy, Rank, ReadRequest, SavedSnapshot, Slice, Snapshot, Store, StoreOptions,
    Writer, WriterOptions,
};

/// Form of a snapshot: a base, or a delta with this parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Base,
    OnPrevious,
    OnLastBase,
}

/// Forms of the snapshots of a run, in order. The first delta on a base counts as one on the previous snapshot.
#[derive(Default)]
struct Forms {
    previous: Option<Id>,
    base: Option<Id>,
    saved: Vec<(Form, DecisionReason)>,
}

impl Forms {
    fn add(&mut self, saved: &SavedSnapshot) -> Form {
        let form = match saved.parent {
            None => Form::Base,
            parent if parent == self.previous => Form::OnPrevious,
            parent if parent == self.base => Form::OnLastBase,
            other => panic!("{other:?} is neither the previous snapshot nor the last base"),
        };
        self.previous = Some(saved.id);
        if form == Form::Base {
            self.base = Some(saved.id);
        }
        self.saved.push((form, saved.decision.reason));
        form
    }
}

/// Reads all tensors, compares them, and returns the number of bytes read from the store.
async fn restore(store: &Store, step: u64, state: &[StateTensor]) -> u64 {
    let snapshot: Snapshot = store.snapshot(step).await.unwrap();
    let before = store.io().bytes_read;
    let mut buffers: Vec<Vec<u8>> = state.iter().map(|(.., data)| vec![0; data.len()]).collect();
    let requests = state.iter().zip(&mut buffers).map(|((name, ..), out)| ReadRequest { name, slice: Slice::all(), out });
    snapshot.read_many_into(requests.collect()).await.unwrap();
    assert!(state.iter().zip(&buffers).all(|((.., data), out)| data == out), "step {step}");
    store.io().bytes_read - before
}

async fn save(writer: &mut Writer, step: u64, state: &[StateTensor]) -> SavedSnapshot {
    writer.save(step, &views(state), &[], &Metadata::default()).await.unwrap()
}

async fn assert_clean(store: &Store) {
    let report = maintain::verify(store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}

/// The simulated steps compress like the real one, so their sizes mean something.
#[tokio::test]
async fn simulated_steps_take_as_much_as_the_real_one() {
    let mut training = Training::new(&data(""), 1, 1);
    let [store, real] = [(); 2].map(|()| Store::open("memory://").unwrap());
    let (mut writer, mut real_writer) = (store.writer(Policy::Adaptive).await.unwrap(), real.writer(Policy::Adaptive).await.unwrap());
    for step in [1000, 1001] {
        let files = Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
        let real = real_writer.save(step, &files.tensors().unwrap(), &[], &Metadata::default()).await.unwrap();
        let simulated = save(&mut writer, step, &training.state()).await;
        assert_eq!(simulated.tensor_bytes, real.tensor_bytes);
        assert!(simulated.stored_bytes.abs_diff(real.stored_bytes) * 50 < real.stored_bytes, "{simulated:?}, {real:?}");
        training.train();
    }
}

/// A save of each step takes about half of a base, and a restore reads at most three times as much as that of a base. A
/// program that opens the store anew for each save decides the same.
#[tokio::test]
async fn a_save_of_each_step_is_small_and_a_restore_is_bounded() {
    const STEPS: u64 = 16;
    let [store, other] = [(); 2].map(|()| Store::open("memory://").unwrap());
    let mut writer = store.writer(Policy::default()).await.unwrap();
    let mut training = Training::new(&data(""), 1, 1);
    let mut forms = Forms::default();
    let mut stored = 0;
    let mut total = 0;
    let mut base_read = 0;
    for step in 0..STEPS {
        let state = training.state();
        let saved = save(&mut writer, step, &state).await;
        let form = forms.add(&saved);
        (stored, total) = (stored + saved.stored_bytes, total + saved.tensor_bytes);
        let read = restore(&store, step, &state).await;
        if form == Form::Base {
            base_read = read;
        }
        assert!(read <= 3 * base_read, "step {step} reads {read} bytes, its base {base_read}");
        assert!(store.snapshot(step).await.unwrap().inspect().chain().len() <= 8);

        let mut reopened = other.writer(Policy::default()).await.unwrap();
        let again = save(&mut reopened, step, &state).await;
        assert_eq!((again.decision, again.parent.is_some()), (saved.decision, saved.parent.is_some()), "step {step}");
        let [ours, theirs] = [&store, &other].map(|store| store.snapshot(step));
        let [ours, theirs] = [ours.await.unwrap(), theirs.await.unwrap()].map(|snapshot| snapshot.inspect().chain().len());
        assert_eq!(ours, theirs, "step {step}");
        training.train();
    }
    let bases: Vec<u64> = (0..STEPS).filter(|&step| forms.saved[step as usize].0 == Form::Base).collect();
    assert_eq!(bases, [0, 6, 12]);
    for (form, reason) in &forms.saved[1..] {
        match form {
            Form::Base => assert_eq!(*reason, DecisionReason::LargeChain),
            _ => assert_eq!((*form, *reason), (Form::OnPrevious, DecisionReason::SmallDelta)),
        }
    }
    let average = stored as f64 / total as f64;
    assert!(average < 0.355, "{average} of the state");
    assert_clean(&store).await;
}

/// Tensors of a state, each with content of its own: the seed of its noise.
fn of_seeds(seeds: &[u64]) -> Vec<StateTensor> {
    let tensor = |(number, seed): (usize, &u64)| (format!("model.w{number}"), Dtype::Bf16, vec![1 << 17], noise(*seed, 1 << 18));
    seeds.iter().enumerate().map(tensor).collect()
}

/// Saves these states, compares what is restored, and returns the forms of the snapshots.
async fn forms_of(store: &Store, options: WriterOptions, states: &[Vec<u64>]) -> Vec<(Form, DecisionReason)> {
    let mut writer = store.writer_with(options).await.unwrap();
    let mut forms = Forms::default();
    for (step, seeds) in (1..).zip(states) {
        forms.add(&save(&mut writer, step, &of_seeds(seeds)).await);
    }
    for (step, seeds) in (1..).zip(states) {
        restore(store, step, &of_seeds(seeds)).await;
    }
    assert_clean(store).await;
    forms.saved
}

const SMALL: DecisionReason = DecisionReason::SmallDelta;
const FIRST: (Form, DecisionReason) = (Form::Base, DecisionReason::First);

/// Six of ten tensors change with each step, wholly. A delta against the previous snapshot saves no more than one against the base,
/// and the chain would be longer.
#[tokio::test]
async fn the_base_is_the_parent_where_nothing_is_gained_by_the_previous_snapshot() {
    let states: Vec<Vec<u64>> =
        (1..=9).map(|step| (0..10).map(|tensor| if tensor < 6 { 100 * step + tensor } else { tensor }).collect()).collect();
    for base_cache in [BaseKeeping::Memory, BaseKeeping::Encoded, BaseKeeping::None] {
        let store = Store::open("memory://").unwrap();
        let forms = forms_of(&store, WriterOptions { base_cache, ..WriterOptions::default() }, &states).await;
        let mut expected = vec![FIRST, (Form::OnPrevious, SMALL)];
        expected.extend([(Form::OnLastBase, SMALL); 6]);
        expected.push((Form::Base, DecisionReason::Interval));
        assert_eq!(forms, expected);
    }
}

/// A state that returns to that of the base is a small delta on the base, however far it was from there.
#[tokio::test]
async fn the_base_is_the_parent_of_a_state_that_is_nearer_to_it() {
    let far: Vec<u64> = (0..10).map(|tensor| if tensor < 8 { 100 + tensor } else { tensor }).collect();
    let start: Vec<u64> = (0..10).collect();
    let near: Vec<u64> = (0..10).map(|tensor| if tensor < 1 { 200 } else { tensor }).collect();
    let store = Store::open("memory://").unwrap();
    let forms = forms_of(&store, WriterOptions::default(), &[start, far, near.clone(), near]).await;
    assert_eq!(forms, [FIRST, (Form::OnPrevious, SMALL), (Form::OnLastBase, SMALL), (Form::OnPrevious, SMALL)]);
}

/// Four of ten tensors change with each step. The fifth delta would make the chain larger than three bases. It becomes a delta
/// against the base if that is small, and a base otherwise.
#[tokio::test]
async fn a_chain_that_would_be_too_large_ends() {
    let at = |step: u64| -> Vec<u64> {
        let changed_at = |tensor: u64| (1..=step).rev().find(|step| (tensor + 4 * step) % 10 < 4);
        (0..10).map(|tensor| changed_at(tensor).map_or(tensor, |step| 100 * step + tensor)).collect()
    };
    let mut states: Vec<Vec<u64>> = (0..=5).map(at).collect();
    let mut expected = vec![FIRST];
    expected.extend([(Form::OnPrevious, SMALL); 4]);
    let store = Store::open("memory://").unwrap();
    let forms = forms_of(&store, WriterOptions::default(), &states).await;
    assert_eq!(forms[..5], expected);
    assert_eq!(forms[5], (Form::Base, DecisionReason::LargeChain), "all tensors have changed since the base");

    // The last state has changed half of the tensors since the base.
    states[5] = (0..10).map(|tensor| if tensor < 5 { 900 + tensor } else { tensor }).collect();
    expected.push((Form::OnLastBase, SMALL));
    let store = Store::open("memory://").unwrap();
    assert_eq!(forms_of(&store, WriterOptions::default(), &states).await, expected);
}

/// No chain gets more links than the store allows.
#[tokio::test]
async fn a_limit_of_links_is_kept() {
    let states: Vec<Vec<u64>> = (1..=6).map(|step| (0..10).map(|tensor| if tensor < 1 { 100 * step } else { tensor }).collect()).collect();
    let limits = Limits { max_chain_depth: 3, ..Limits::default() };
    let store = StoreOptions { limits, ..StoreOptions::default() }.open("memory://").unwrap();
    let forms = forms_of(&store, WriterOptions::default(), &states).await;
    let [previous, base] = [Form::OnPrevious, Form::OnLastBase].map(|form| (form, SMALL));
    assert_eq!(forms, [FIRST, previous, previous, base, previous, base]);
}

/// Forgotten links of a chain stay as long as a live step needs them. A base that is forgotten gets no more deltas.
#[tokio::test]
async fn a_chain_of_forgotten_steps_stays_readable() {
    let states: Vec<Vec<u64>> = (1..=8).map(|step| (0..10).map(|tensor| if tensor < 1 { 100 * step } else { tensor }).collect()).collect();
    let store = Store::open("memory://").unwrap();
    let mut writer = store.writer(Policy::Adaptive).await.unwrap();
    let mut forms = Forms::default();
    for (step, seeds) in (1..).zip(&states) {
        forms.add(&save(&mut writer, step, &of_seeds(seeds)).await);
        match step {
            4 => _ = store.forget(&[2, 3]).await.unwrap(),
            6 => _ = store.forget(&[1]).await.unwrap(),
            _ => continue,
        }
        let options = GcOptions { apply: true, age_floor: std::time::Duration::ZERO, collect: true, directories: false };
        maintain::gc(&store, &options).await.unwrap();
        let live: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
        for step in live {
            restore(&store, step, &of_seeds(&states[step as usize - 1])).await;
        }
        assert_clean(&store).await;
    }
    let mut expected = vec![FIRST];
    expected.extend([(Form::OnPrevious, SMALL); 5]);
    expected.extend([(Form::Base, DecisionReason::First), (Form::OnPrevious, SMALL)]);
    assert_eq!(forms.saved, expected);
}

/// The objective `auto` may choose other forms, by measured times. All are restored.
#[tokio::test]
async fn with_measured_times_every_step_is_restored() {
    let mut training = Training::new(&data(""), 1, 1);
    let store = Store::open("memory://").unwrap();
    let options = WriterOptions { objective: tensorcask::codec::ObjectiveSetting::Auto, statistics: true, ..WriterOptions::default() };
    let mut writer = store.writer_with(options).await.unwrap();
    for step in 0..8 {
        let state = training.state();
        save(&mut writer, step, &state).await;
        restore(&store, step, &state).await;
        training.train();
    }
    assert_clean(&store).await;
}

/// Saves these states by two ranks, each with half of the tensors. `reopen`: with new writers for each save.
async fn forms_of_ranks(states: &[Vec<u64>], reopen: bool) -> Vec<(Form, DecisionReason)> {
    let store = Store::open("memory://").unwrap();
    let open = async || {
        let mut ranks = Vec::new();
        for rank in 0..2 {
            ranks.push(store.rank_writer(Rank { rank, world: 2, attempt: 0 }, WriterOptions::default()).await.unwrap());
        }
        ranks
    };
    let mut coordinator = store.writer(Policy::Adaptive).await.unwrap();
    let mut ranks = open().await;
    let mut forms = Forms::default();
    for (step, seeds) in (1..).zip(states) {
        if reopen && step > 1 {
            coordinator = store.writer(Policy::Adaptive).await.unwrap();
            ranks = open().await;
        }
        let state = of_seeds(seeds);
        let all = views(&state);
        let chosen = coordinator.next_parent(step).await.unwrap();
        let mut receipts = Vec::new();
        for (rank, own) in ranks.iter_mut().zip(all.chunks(5)) {
            receipts.push(rank.save(step, own, &[]).await.unwrap());
        }
        assert!(receipts.iter().all(|receipt| receipt.parent.as_ref().map(|parent| parent.snapshot) == chosen), "step {step}");
        let saved = coordinator.commit_receipts(step, &receipts, &Metadata::default()).await.unwrap();
        assert_eq!(store.snapshot(step).await.unwrap().inspect().decision(), Some(saved.decision));
        assert!(saved.decision.estimate.is_none_or(|estimate| estimate.sampled_chunks == 0), "{:?}", saved.decision);
        forms.add(&saved);
    }
    for (step, seeds) in (1..).zip(states) {
        restore(&store, step, &of_seeds(seeds)).await;
    }
    assert_clean(&store).await;
    forms.saved
}

/// No rank has all tensors, so ranks take the sizes of earlier snapshots. The same bounds hold, and all ranks decide alike.
#[tokio::test]
async fn ranks_decide_by_the_sizes_of_earlier_snapshots() {
    // So many of ten tensors change with each step, another one first each time.
    let states = |count: u64| -> Vec<Vec<u64>> {
        let at = |step: u64| (0..10).map(move |tensor| if (tensor + 4 * step) % 10 < count { 100 * step + tensor } else { tensor });
        (0..9).map(|step| at(step).collect()).collect()
    };
    let unknown = (Form::OnPrevious, DecisionReason::NotEstimated);
    let previous = (Form::OnPrevious, SMALL);
    let [large_chain, large_delta, interval] =
        [DecisionReason::LargeChain, DecisionReason::LargeDelta, DecisionReason::Interval].map(|reason| (Form::Base, reason));
    let cases: [(u64, Vec<(Form, DecisionReason)>); 3] = [
        (1, vec![FIRST, unknown, previous, previous, previous, previous, previous, previous, interval]),
        (3, vec![FIRST, unknown, previous, previous, large_chain, unknown, previous, previous, large_chain]),
        (10, vec![FIRST, unknown, large_delta, unknown, large_delta, unknown, large_delta, unknown, large_delta]),
    ];
    for (count, expected) in cases {
        for reopen in [false, true] {
            assert_eq!(forms_of_ranks(&states(count), reopen).await, expected, "{count} of 10, reopened: {reopen}");
        }
    }
}
