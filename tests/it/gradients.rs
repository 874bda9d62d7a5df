//! States that a simulated trainer leaves: Adam's step in the order of operations of PyTorch, with gradients that are
//! sums of 16-bit numbers, clipped by one factor.

use tensorcask::codec::{CodecRules, MomentRule};
use tensorcask::maintain::{self, VerifyOptions};
use tensorcask::{Dtype, ErrorKind, Metadata, Policy, Slice, Snapshot, Store, TensorView, WriterOptions};

const COUNT: usize = 20_000;

struct Random(u64);

impl Random {
    /// Returns a number from -1 to 1, most often near 0.
    fn next(&mut self) -> f32 {
        let mut unit = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1u64 << 24) as f32
        };
        (0..4).map(|_| unit() - 0.5).sum::<f32>() / 2.0
    }
}

/// Order of operations of PyTorch's AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kernel {
    /// On a processor with fused multiply-add.
    Processor,
    /// On CUDA, one kernel for each operation.
    CudaEach,
    /// On CUDA, one kernel for the whole step. Its numbers are binary32.
    CudaFused,
}

struct Trainer {
    kernel: Kernel,
    /// Whether moments are rounded to bf16 when they are stored.
    rounds: bool,
    random: Random,
    /// Size of gradients.
    size: f32,
    /// Whether gradients are clipped.
    clips: bool,
    step: i32,
    /// Gradients of the last step.
    gradient: Vec<f32>,
    master: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Trainer {
    fn new(kernel: Kernel, size: f32) -> Self {
        let mut random = Random(11);
        let master = (0..COUNT).map(|_| random.next() * 0.1).collect();
        let zeros = || vec![0.0; COUNT];
        Self { kernel, rounds: false, random, size, clips: true, step: 0, gradient: zeros(), master, first: zeros(), second: zeros() }
    }

    /// One step with gradients of so many micro-batches; 0 stands for gradients in f32.
    fn train(&mut self, batches: usize) {
        self.step += 1;
        self.gradient = self.gradients(batches);
        for i in 0..COUNT {
            self.update(i, self.gradient[i]);
        }
        self.round();
    }

    fn gradients(&mut self, batches: usize) -> Vec<f32> {
        let clip = if self.clips { 0.3 + self.random.next().abs() } else { 1.0 };
        let gradient = |i: usize| {
            let size = self.size * 2f32.powi(i as i32 % 12 - 6);
            let sum: f32 = (0..batches).map(|_| half::bf16::from_f32(self.random.next() * size).to_f32()).sum();
            if batches == 0 { self.random.next() * size * clip } else { sum / batches as f32 * clip }
        };
        (0..COUNT).map(gradient).collect()
    }

    fn update(&mut self, i: usize, g: f32) {
        let lr = 6e-4f64;
        let eps = 1e-8f32;
        let m = self.first[i];
        let v = self.second[i];
        let w = self.master[i];
        let powers = [0.9f64.powi(self.step), 0.95f64.powi(self.step)];
        let [one, two] = powers.map(|power| 1.0 - power);
        let decay = (1.0 - lr * 0.1) as f32;
        let scale = (-lr / one) as f32;
        let root = two.sqrt() as f32;
        match self.kernel {
            Kernel::Processor => {
                self.first[i] = 0.1f32.mul_add(g - m, m);
                self.second[i] = (0.05 * g).mul_add(g, v * 0.95);
                self.master[i] = w * decay + (scale * self.first[i]) / (self.second[i].sqrt() / root + eps);
            }
            Kernel::CudaEach => {
                self.first[i] = 0.1f32.mul_add(g - m, m);
                self.second[i] = 0.05f32.mul_add(g * g, v * 0.95);
                self.master[i] = scale.mul_add(self.first[i] / (self.second[i].sqrt() / root + eps), w * decay);
            }
            Kernel::CudaFused => {
                // One ulp from the root of a binary64 correction, as a power of binary32 gives it.
                let root = f32::from_bits(root.to_bits() + 1);
                let scale = f32::from_bits(scale.to_bits() - 1);
                self.first[i] = 0.9f32.mul_add(m, (1.0 - 0.9f32) * g);
                self.second[i] = 0.95f32.mul_add(v, (1.0 - 0.95f32) * (g * g));
                let loss = (-lr * 0.1) as f32;
                self.master[i] = loss.mul_add(w, w) + (scale * self.first[i]) / (self.second[i].sqrt() / root + eps);
            }
        }
    }

    /// Stores the moments in 16 bits.
    fn round(&mut self) {
        if self.rounds {
            for moment in self.first.iter_mut().chain(&mut self.second) {
                *moment = half::bf16::from_f32(*moment).to_f32();
            }
        }
    }

    fn moments(&self) -> Dtype {
        if self.rounds { Dtype::Bf16 } else { Dtype::F32 }
    }

    /// The state, with moments of 16 bits.
    fn rounded(&self) -> [(&'static str, Dtype, Vec<u8>); 3] {
        let upper = |numbers: &[f32]| numbers.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
        let master = self.master.iter().flat_map(|x| x.to_le_bytes()).collect();
        let first = upper(&self.first);
        let second = upper(&self.second);
        [("master.w", Dtype::F32, master), ("exp_avg.w", self.moments(), first), ("exp_avg_sq.w", self.moments(), second)]
    }

    fn tensors(&self) -> [(&'static str, Vec<u8>); 3] {
        [("master.w", &self.master), ("exp_avg.w", &self.first), ("exp_avg_sq.w", &self.second)]
            .map(|(name, numbers)| (name, numbers.iter().flat_map(|x| x.to_le_bytes()).collect()))
    }
}

#[tokio::test]
async fn a_chain_of_steps_is_stored_as_gradients_and_restored_bit_by_bit() {
    let on_processor = [(1, 14.0), (3, 17.0), (4, 18.0), (7, 18.9), (16, 22.0), (0, 32.0)].map(|case| (Kernel::Processor, case));
    let on_cuda = [Kernel::CudaFused, Kernel::CudaEach].map(|kernel| (kernel, (1, 13.0)));
    for (kernel, (batches, most_bits)) in on_processor.into_iter().chain(on_cuda) {
        let store = Store::open("memory://").unwrap();
        let mut writer = store.writer(Policy::Consecutive).await.unwrap();
        let mut trainer = Trainer::new(kernel, 1e-3);
        (0..20).for_each(|_| trainer.train(batches));
        let mut states = Vec::new();
        for step in 0..16 {
            let state = trainer.tensors();
            let views: Vec<TensorView<'_>> =
                state.iter().map(|(name, data)| TensorView::new(*name, Dtype::F32, &[100, 200], data).unwrap()).collect();
            let saved = writer.save(step, &views, &[], &Metadata::default()).await.unwrap();
            if step > 0 {
                let gradients = saved.chunks.get("tc.gradient").copied().unwrap_or(0);
                assert_eq!(gradients, if batches == 0 { 0 } else { 2 }, "{kernel:?}, {batches}, step {step}: {:?}", saved.chunks);
                assert!(saved.chunks.contains_key("tc.replay"), "{kernel:?}, {batches}, step {step}: {:?}", saved.chunks);
                // Includes the master, and the cask itself.
                let bits = 8.0 * saved.stored_bytes as f64 / COUNT as f64;
                assert!(bits < most_bits, "{kernel:?}, {batches}, step {step}: {bits} bits");
            }
            states.push(state);
            trainer.train(batches);
        }
        for (step, state) in states.iter().enumerate() {
            let snapshot = store.snapshot(step as u64).await.unwrap();
            for (name, data) in state {
                assert!(snapshot.read(name, &Slice::all()).await.unwrap().data == *data, "{kernel:?}, {batches}, step {step}, {name}");
            }
        }
        assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    }
}

#[tokio::test]
async fn small_tensors_do_not_put_off_the_search_in_large_ones() {
    const FEW: usize = 60;
    let store = Store::open("memory://").unwrap();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    let mut trainer = Trainer::new(Kernel::Processor, 1e-3);
    let mut noise = Random(5);
    for step in 0..2 {
        trainer.train(1);
        let [_, (_, first), (_, second)] = trainer.tensors();
        let small: Vec<u8> = (0..FEW).flat_map(|_| noise.next().to_le_bytes()).collect();
        let mut views = vec![
            TensorView::new("exp_avg.w", Dtype::F32, &[COUNT as u64], &first).unwrap(),
            TensorView::new("exp_avg_sq.w", Dtype::F32, &[COUNT as u64], &second).unwrap(),
        ];
        views.extend(["exp_avg.a", "exp_avg.b"].map(|name| TensorView::new(name, Dtype::F32, &[FEW as u64], &small).unwrap()));
        let saved = writer.save(step, &views, &[], &Metadata::default()).await.unwrap();
        assert_eq!(saved.chunks.get("tc.gradient").copied().unwrap_or(0), 2 * step, "{:?}", saved.chunks);
    }
}

#[tokio::test]
async fn moments_of_16_bits_are_stored_as_gradients_and_restored_bit_by_bit() {
    // Kernel, micro-batches, and bits of a step of a master and both moments.
    for (kernel, batches, most_bits) in [(Kernel::Processor, 1, 16.0), (Kernel::CudaFused, 1, 19.0), (Kernel::Processor, 0, 26.0)] {
        let store = Store::open("memory://").unwrap();
        let mut writer = store.writer(Policy::Consecutive).await.unwrap();
        let mut trainer = Trainer { rounds: true, ..Trainer::new(kernel, 1e-3) };
        (0..20).for_each(|_| trainer.train(batches));
        let mut states = Vec::new();
        for step in 0..4 {
            let state = trainer.rounded();
            let views: Vec<TensorView<'_>> =
                state.iter().map(|(name, dtype, data)| TensorView::new(*name, *dtype, &[100, 200], data).unwrap()).collect();
            let saved = writer.save(step, &views, &[], &Metadata::default()).await.unwrap();
            if step > 0 {
                assert_eq!(saved.chunks.get("tc.joint"), Some(&3), "{kernel:?}, {batches}, step {step}: {:?}", saved.chunks);
                let bits = 8.0 * saved.stored_bytes as f64 / COUNT as f64;
                assert!(bits < most_bits, "{kernel:?}, {batches}, step {step}: {bits} bits");
            }
            states.push(state);
            trainer.train(batches);
        }
        for (step, state) in states.iter().enumerate() {
            let snapshot = store.snapshot(step as u64).await.unwrap();
            for (name, dtype, data) in state {
                // Each tensor alone, and a part of it.
                assert!(snapshot.read(name, &Slice::all()).await.unwrap().data == *data, "{kernel:?}, {batches}, step {step}, {name}");
                let width = dtype.bits() as usize / 8;
                let rows = snapshot.read(name, &Slice::rows(3..5)).await.unwrap();
                assert!(rows.data == data[600 * width..1000 * width], "{kernel:?}, {batches}, step {step}, {name}");
            }
        }
        assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    }
}

/// Momenta of SGD and Muon: their decays, and their weights.
const MOMENTA: [(f32, f32); 4] = [(0.9, 1.0), (0.99, 1.0), (0.9, 0.1), (0.95, 0.05)];

#[tokio::test]
async fn a_chain_of_momenta_is_stored_as_gradients_and_restored_bit_by_bit() {
    for ((decay, weight), (batches, most_bits)) in MOMENTA.into_iter().flat_map(|kind| [(1, 14.0), (4, 17.5)].map(|case| (kind, case))) {
        let store = Store::open("memory://").unwrap();
        let mut writer = store.writer(Policy::Consecutive).await.unwrap();
        let mut trainer = Trainer::new(Kernel::Processor, 1e-3);
        let mut momentum = vec![0.0f32; COUNT];
        let mut states = Vec::new();
        for step in 0..24 {
            let gradients = trainer.gradients(batches);
            for (m, g) in momentum.iter_mut().zip(gradients) {
                *m = if weight == 1.0 { g.mul_add(weight, *m * decay) } else { weight.mul_add(g - *m, *m) };
            }
            if step < 8 {
                continue;
            }
            let state: Vec<u8> = momentum.iter().flat_map(|x| x.to_le_bytes()).collect();
            let view = TensorView::new("optimizer.state.w.momentum_buffer", Dtype::F32, &[100, 200], &state).unwrap();
            let saved = writer.save(step, &[view], &[], &Metadata::default()).await.unwrap();
            if step > 8 {
                assert!(saved.chunks.contains_key("tc.gradient"), "{decay}, {weight}, {batches}, step {step}: {:?}", saved.chunks);
                let bits = 8.0 * saved.stored_bytes as f64 / COUNT as f64;
                assert!(bits < most_bits, "{decay}, {weight}, {batches}, step {step}: {bits} bits");
            }
            states.push((step, state));
        }
        for (step, state) in states {
            let snapshot = store.snapshot(step).await.unwrap();
            let read = snapshot.read("optimizer.state.w.momentum_buffer", &Slice::all()).await.unwrap();
            assert!(read.data == state, "{decay}, {weight}, {batches}, step {step}");
        }
        assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    }
}

#[tokio::test]
async fn a_chain_of_descents_is_replayed_and_restored_bit_by_bit() {
    for (nesterov, decay) in [(false, 1.0f32), (true, 1.0), (false, 0.9995)] {
        let store = Store::open("memory://").unwrap();
        let mut writer = store.writer(Policy::Consecutive).await.unwrap();
        let mut trainer = Trainer::new(Kernel::Processor, 1e-3);
        let mut weights = trainer.master.clone();
        let mut momentum = vec![0.0f32; COUNT];
        let mut states = Vec::new();
        for step in 0..12 {
            for ((w, m), g) in weights.iter_mut().zip(&mut momentum).zip(trainer.gradients(1)) {
                *m = g.mul_add(1.0, *m * 0.9);
                let direction = if nesterov { 0.9f32.mul_add(*m, g) } else { *m };
                *w = (-0.05f32).mul_add(direction, *w * decay);
            }
            let state = [("master.w", &weights), ("momentum.w", &momentum)]
                .map(|(name, numbers)| (name, numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()));
            let views: Vec<TensorView<'_>> =
                state.iter().map(|(name, data)| TensorView::new(*name, Dtype::F32, &[100, 200], data).unwrap()).collect();
            let saved = writer.save(step, &views, &[], &Metadata::default()).await.unwrap();
            if step > 2 {
                assert!(saved.chunks.contains_key("tc.descent"), "{nesterov}, {decay}, step {step}: {:?}", saved.chunks);
                let bits = 8.0 * saved.stored_bytes as f64 / COUNT as f64;
                assert!(bits < 15.0, "{nesterov}, {decay}, step {step}: {bits} bits");
            }
            states.push((step, state));
        }
        for (step, state) in states {
            let snapshot = store.snapshot(step).await.unwrap();
            for (name, data) in state {
                assert!(snapshot.read(name, &Slice::all()).await.unwrap().data == data, "{nesterov}, {decay}, step {step}, {name}");
            }
        }
        assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    }
}

/// Saves the states of a few steps, from step 1 on, and the gradients that led to them.
async fn archive(trainer: &mut Trainer, batches: usize, policy: Policy) -> (Store, Vec<Vec<f32>>) {
    let store = Store::open("memory://").unwrap();
    let mut writer = store.writer(policy).await.unwrap();
    let mut gradients = Vec::new();
    for step in 1..4 {
        trainer.train(batches);
        let state = if trainer.rounds { trainer.rounded() } else { trainer.tensors().map(|(name, data)| (name, Dtype::F32, data)) };
        let views: Vec<TensorView<'_>> =
            state.iter().map(|(name, dtype, data)| TensorView::new(*name, *dtype, &[100, 200], data).unwrap()).collect();
        writer.save(step, &views, &[], &Metadata::default()).await.unwrap();
        gradients.push(trainer.gradient.clone());
    }
    (store, gradients)
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

async fn gradient_of(snapshot: &Snapshot, name: &str) -> Vec<f32> {
    numbers(&snapshot.gradient(name, &Slice::all()).await.unwrap().tensor.data)
}

/// Compares the gradients that were read with those that an optimizer used. Another number leads to the same moment only if it is
/// close, and a shorter one than 8 bits only if the gradient is far smaller than its moment.
fn assert_exact(found: &[f32], used: &[f32], moments: &[f32], is_bf16: bool, case: &str) {
    assert!(found.len() == used.len() && found.len() == moments.len(), "{case}");
    for ((found, used), moment) in found.iter().zip(used).zip(moments) {
        let is_certain = is_bf16 && used.abs() > 2f32.powi(-10) * moment.abs();
        let is_close = (found - used).abs() < 2f32.powi(-19) * used.abs().max(moment.abs());
        assert!(found == used || (!is_certain && is_close), "{case}: {found}, not {used}, with {moment}");
    }
}

#[tokio::test]
async fn the_gradient_of_a_step_is_read_bit_for_bit() {
    let one_batch = [Kernel::Processor, Kernel::CudaEach, Kernel::CudaFused].map(|kernel| (kernel, 1));
    for (kernel, batches) in one_batch.into_iter().chain([(Kernel::Processor, 4)]) {
        let mut trainer = Trainer::new(kernel, 1e-3);
        (0..20).for_each(|_| trainer.train(batches));
        let (store, gradients) = archive(&mut trainer, batches, Policy::Consecutive).await;
        for (step, used) in [(2, &gradients[1]), (3, &gradients[2])] {
            let snapshot = store.snapshot(step).await.unwrap();
            let found = snapshot.gradient("master.w", &Slice::all()).await.unwrap();
            let case = format!("{kernel:?}, {batches}, step {step}");
            assert_eq!((found.moment.as_str(), &found.tensor.shape[..]), ("exp_avg.w", &[100, 200][..]), "{case}");
            let is_adam = |rule: &MomentRule| rule.decay == 0.9 && (rule.weight - 0.1).abs() < 1e-7;
            assert!(matches!(&found.rules[..], [rule] if is_adam(rule)) && found.estimated_elements == 0, "{case}: {:?}", found.rules);
            assert!(found.mean_bits < 12.0 && (batches > 1 || found.longest_bits <= 8), "{case}: {} bits", found.longest_bits);
            let moments = numbers(&snapshot.read("exp_avg.w", &Slice::all()).await.unwrap().data);
            assert_exact(&numbers(&found.tensor.data), used, &moments, batches == 1, &case);
            assert!(named(snapshot.gradient("exp_avg.w", &Slice::all()).await.unwrap(), "master.w") == found, "{case}");
            let squares: f64 = numbers(&found.tensor.data).iter().map(|g| f64::from(*g).powi(2)).sum();
            assert!((found.statistics().squares.unwrap() / squares - 1.0).abs() < 1e-9, "{case}");
        }
    }
}

fn named(mut gradient: tensorcask::StepGradient, name: &str) -> tensorcask::StepGradient {
    gradient.tensor.name = name.to_owned();
    gradient
}

#[tokio::test]
async fn the_gradient_of_moments_of_16_bits_is_read() {
    for clips in [false, true] {
        let mut trainer = Trainer { rounds: true, clips, ..Trainer::new(Kernel::Processor, 1e-3) };
        (0..20).for_each(|_| trainer.train(1));
        let (store, gradients) = archive(&mut trainer, 1, Policy::Consecutive).await;
        for step in [2, 3] {
            let snapshot = store.snapshot(step).await.unwrap();
            let found = snapshot.gradient("master.w", &Slice::all()).await.unwrap();
            let moments: Vec<f32> = snapshot.read("exp_avg.w", &Slice::all()).await.unwrap().data.chunks_exact(2).map(widened).collect();
            let pairs = numbers(&found.tensor.data).into_iter().zip(&gradients[step as usize - 1]).zip(moments);
            for ((found, used), moment) in pairs {
                let bound = 0.1 * used.abs().max(moment.abs());
                assert!((found - used).abs() <= bound, "{clips}, step {step}: {found}, not {used}, with {moment}");
            }
        }
    }
}

fn widened(bytes: &[u8]) -> f32 {
    half::bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32()
}

#[tokio::test]
async fn a_slice_of_a_gradient_reads_only_its_chunks() {
    // Several chunks.
    const ROWS: u64 = 4096;
    let count = ROWS as usize * 256;
    let mut random = Random(3);
    let before: Vec<f32> = (0..count).map(|_| random.next() * 1e-6).collect();
    let gradient: Vec<f32> = (0..count).map(|_| half::bf16::from_f32(random.next()).to_f32() * 0.712_345).collect();
    let after: Vec<f32> = before.iter().zip(&gradient).map(|(m, g)| 0.1f32.mul_add(g - m, *m)).collect();
    let store = Store::open("memory://").unwrap();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    for (step, moment) in [(7, &before), (8, &after)] {
        let data: Vec<u8> = moment.iter().flat_map(|x| x.to_le_bytes()).collect();
        let view = TensorView::new("exp_avg.w", Dtype::F32, &[ROWS, 256], &data).unwrap();
        writer.save(step, &[view], &[], &Metadata::default()).await.unwrap();
    }
    let whole = gradient_of(&store.snapshot(8).await.unwrap(), "exp_avg.w").await;
    assert!(whole == gradient);
    for (rows, columns) in [(0..1, 0..256), (1000..3000, 17..19), (4095..4096, 0..1), (5..5, 0..256)] {
        let snapshot = store.snapshot(8).await.unwrap();
        let slice = Slice::ranges([rows.clone(), columns.clone()]);
        let found = snapshot.gradient("exp_avg.w", &slice).await.unwrap();
        let expected: Vec<f32> =
            rows.clone().flat_map(|row| columns.clone().map(move |column| (row * 256 + column) as usize)).map(|at| gradient[at]).collect();
        assert_eq!(found.tensor.shape, [rows.end - rows.start, columns.end - columns.start]);
        assert!(numbers(&found.tensor.data) == expected, "{rows:?}, {columns:?}");
        assert_eq!(snapshot.inspect().read_counts().chunks, snapshot.inspect().chunks_of("exp_avg.w", &slice).unwrap());
    }
    let snapshot = store.snapshot(8).await.unwrap();
    assert!(snapshot.inspect().chunks_of("exp_avg.w", &Slice::all()).unwrap() > 1);
    let beyond = snapshot.gradient("exp_avg.w", &Slice::rows(0..ROWS + 1)).await.unwrap_err();
    assert_eq!(beyond.kind(), ErrorKind::InvalidArgument);
}

#[tokio::test]
async fn the_gradient_of_a_momentum_is_read() {
    let store = Store::open("memory://").unwrap();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    let mut trainer = Trainer::new(Kernel::Processor, 1e-3);
    let mut momentum = vec![0.0f32; COUNT];
    let mut used = Vec::new();
    for step in 0..10 {
        used = trainer.gradients(1);
        momentum.iter_mut().zip(&used).for_each(|(m, g)| *m = g.mul_add(1.0, *m * 0.9));
        let state: Vec<u8> = momentum.iter().flat_map(|x| x.to_le_bytes()).collect();
        let view = TensorView::new("optimizer.state.w.momentum_buffer", Dtype::F32, &[100, 200], &state).unwrap();
        writer.save(step, &[view], &[], &Metadata::default()).await.unwrap();
    }
    let found = store.snapshot(9).await.unwrap().gradient("optimizer.state.w.momentum_buffer", &Slice::all()).await.unwrap();
    assert_eq!((&found.rules[..], found.longest_bits), (&[MomentRule { decay: 0.9, weight: 1.0 }][..], 8));
    assert_exact(&numbers(&found.tensor.data), &used, &momentum, true, "momentum");
}

#[tokio::test]
async fn a_chunk_without_the_gradient_of_its_step_is_an_error() {
    let trained = || {
        let mut trainer = Trainer::new(Kernel::Processor, 1e-3);
        (0..20).for_each(|_| trainer.train(1));
        trainer
    };
    let fails = |found: tensorcask::Result<tensorcask::StepGradient>, words: &str| {
        let error = found.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.to_string().contains(words), "{error}");
        error
    };
    let (store, _) = archive(&mut trained(), 1, Policy::Consecutive).await;
    let snapshot = store.snapshot(1).await.unwrap();
    let error = fails(snapshot.gradient("master.w", &Slice::all()).await, "stored as a base; save each step");
    assert_eq!((error.tensor_name(), error.chunk_number()), (Some("exp_avg.w"), Some(0)));
    fails(store.snapshot(3).await.unwrap().gradient("master.x", &Slice::all()).await, "no tensor of this name");
    // Against the last base, step 1.
    let (store, _) = archive(&mut trained(), 1, Policy::Intermittent { every: 8 }).await;
    assert!(store.snapshot(2).await.unwrap().gradient("master.w", &Slice::all()).await.is_ok());
    fails(store.snapshot(3).await.unwrap().gradient("master.w", &Slice::all()).await, "");
    // Gradients of f32.
    let (store, _) = archive(&mut trained(), 0, Policy::Consecutive).await;
    fails(store.snapshot(3).await.unwrap().gradient("master.w", &Slice::all()).await, "which holds none; save each step");

    let store = Store::open("memory://").unwrap();
    let options = WriterOptions {
        policy: Policy::Consecutive,
        codecs: CodecRules::parse(["exp_avg=tc.gradient"]).unwrap(),
        ..WriterOptions::default()
    };
    let mut writer = store.writer_with(options).await.unwrap();
    let mut trainer = trained();
    for step in [1, 2, 4, 5] {
        let [_, (_, first), _] = trainer.tensors();
        let views = [
            TensorView::new("exp_avg.w", Dtype::F32, &[100, 200], &first).unwrap(),
            TensorView::new("model.buffer", Dtype::F32, &[100, 200], &first).unwrap(),
        ];
        writer.save(step, &views, &[], &Metadata::default()).await.unwrap();
        if step < 4 {
            trainer.train(1);
        }
    }
    assert!(store.snapshot(2).await.unwrap().gradient("exp_avg.w", &Slice::all()).await.is_ok());
    fails(
        store.snapshot(4).await.unwrap().gradient("exp_avg.w", &Slice::all()).await,
        "a delta against step 2, which is not the step before",
    );
    let snapshot = store.snapshot(5).await.unwrap();
    fails(snapshot.gradient("exp_avg.w", &Slice::all()).await, "did not change in this step");
    fails(snapshot.gradient("model.buffer", &Slice::all()).await, "has no first moment or momentum");
    // No element, so no chunk.
    assert!(snapshot.gradient("exp_avg.w", &Slice::rows(0..0)).await.unwrap().tensor.data.is_empty());
}
