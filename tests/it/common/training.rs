//! A training that goes on from the real states of `tests/data`, one step at a time: AdamW in the order of operations of
//! PyTorch on a processor, with gradients like the real one between steps 1000 and 1001.

#![allow(unreachable_pub, clippy::unwrap_used, clippy::little_endian_bytes, reason = "for tests and a benchmark")]

use std::path::Path;

use tensorcask::interchange::safetensors::Files;
use tensorcask::{Dtype, TensorView};

/// Learning rate, weight decay, and the shares of the moments that a step keeps.
const RATE: f64 = 5e-4;
const DECAY: f64 = 0.1;
const KEPT_FIRST: f64 = 0.9;
const KEPT_SECOND: f64 = 0.95;

/// A parameter: bf16 weights, and f32 numbers of the optimizer.
struct Parameter {
    name: String,
    shape: Vec<u64>,
    master: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    /// Gradient between the two real states.
    gradient: Vec<f32>,
}

/// Numbers of a training: each step changes all parameters.
pub struct Training {
    parameters: Vec<Parameter>,
    random: u64,
    step: i32,
}

/// A tensor of a state: name, dtype, shape and bytes.
pub type StateTensor = (String, Dtype, Vec<u64>, Vec<u8>);

impl Training {
    /// Starts at step 1000. The rows of a matrix are repeated `tiles` times; there are so many layers.
    pub fn new(folder: &Path, layers: usize, tiles: usize) -> Self {
        let [now, next] = [1000, 1001].map(|step| Files::open(&[folder.join(format!("step-{step}.safetensors"))]).unwrap());
        let [now, next] = [now.tensors().unwrap(), next.tensors().unwrap()];
        let mut parameters = Vec::new();
        for layer in 0..layers {
            for master in now.iter().filter(|view| view.name().starts_with("optimizer.master.")) {
                let name = master.name().trim_start_matches("optimizer.master.").to_owned();
                let tiles = if master.shape().len() > 1 { tiles } else { 1 };
                let numbers = |views: &[TensorView<'_>], role: &str| -> Vec<f32> {
                    let full = format!("optimizer.{role}.{name}");
                    let view = views.iter().find(|view| view.name() == full).unwrap();
                    let numbers: Vec<f32> = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
                    numbers.repeat(tiles)
                };
                let first = numbers(&now, "exp_avg");
                let later = numbers(&next, "exp_avg");
                let share = (1.0 - KEPT_FIRST) as f32;
                let gradient = first.iter().zip(&later).map(|(m, later)| (later - KEPT_FIRST as f32 * m) / share).collect();
                let master_numbers = numbers(&now, "master");
                let second = numbers(&now, "exp_avg_sq");
                let mut shape = master.shape().to_vec();
                shape[0] *= tiles as u64;
                let name = name.replace("h.2.", &format!("h.{layer}."));
                parameters.push(Parameter { name, shape, master: master_numbers, first, second, gradient });
            }
        }
        Self { parameters, random: 11, step: 1000 }
    }

    /// One step. Its gradients are 16-bit numbers of the size of the real ones.
    pub fn train(&mut self) {
        self.step += 1;
        let [one, two] = [KEPT_FIRST, KEPT_SECOND].map(|kept| 1.0 - kept.powi(self.step));
        let decay = (1.0 - RATE * DECAY) as f32;
        let scale = (-RATE / one) as f32;
        let root = two.sqrt() as f32;
        let random = &mut self.random;
        let mut unit = || {
            *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (*random >> 40) as f32 / (1u64 << 24) as f32
        };
        for Parameter { master, first, second, gradient, .. } in &mut self.parameters {
            for i in 0..master.len() {
                // About normal, of variance 1.
                let factor = (0..4).map(|_| unit() - 0.5).sum::<f32>() * 1.732;
                let g = gradient[i] * factor;
                first[i] = (1.0 - KEPT_FIRST as f32).mul_add(g - first[i], first[i]);
                second[i] = ((1.0 - KEPT_SECOND as f32) * g).mul_add(g, second[i] * KEPT_SECOND as f32);
                master[i] = master[i] * decay + (scale * first[i]) / (second[i].sqrt() / root + 1e-8);
            }
        }
    }

    /// Tensors of the state, ascending by name.
    pub fn state(&self) -> Vec<StateTensor> {
        let mut state = Vec::new();
        for Parameter { name, shape, master, first, second, .. } in &self.parameters {
            let weights = master.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
            state.push((format!("model.{name}"), Dtype::Bf16, shape.clone(), weights));
            for (role, numbers) in [("exp_avg", first), ("exp_avg_sq", second), ("master", master)] {
                let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
                state.push((format!("optimizer.{role}.{name}"), Dtype::F32, shape.clone(), bytes));
            }
        }
        state.sort_by(|a, b| a.0.cmp(&b.0));
        state
    }
}

/// Views of a state.
pub fn views(state: &[StateTensor]) -> Vec<TensorView<'_>> {
    state.iter().map(|(name, dtype, shape, data)| TensorView::new(name.as_str(), *dtype, shape, data).unwrap()).collect()
}
