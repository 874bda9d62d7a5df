//! Gradients of steps, from the chunks of first moments and momenta that store them.
//!
//! A chunk of `tc.gradient` or `tc.joint` holds the gradient that led from the moment of the parent to that of the snapshot
//! (spec: codecs 5.4). So a chain of consecutive steps is an archive of gradients. The moment is decoded too, because the
//! checksum of the chunk covers the moment and not the gradient.
//!
//! Invariant: no number is returned for a chunk that holds no gradient of exactly this step. Estimating one from two moments
//! would need the decay of the optimizer, which a store does not know.

use tensorcask_kernels::{NumberFormat, statistics};

use super::Snapshot;
use super::execute::{Apart, Jobs, Target, touched};
use super::open_chain::OpenChain;
use crate::chain::{Plans, Step};
use crate::codec::{ChunkKind, GradientForm, MomentRule};
use crate::limits::{to_usize, zeroed};
use crate::tensor::{Rect, Run, contiguous_runs, copy_run};
use crate::{Dtype, Error, Limits, Result, Slice, Tensor, ValueStatistics, boxed};

/// Gradient of one step, as the optimizer added it to a first moment or a momentum. [`Snapshot::gradient`] returns it.
#[derive(Debug, Clone, PartialEq)]
pub struct StepGradient {
    /// Gradient as f32, in the shape of the slice, under the name that was asked for.
    pub tensor: Tensor,
    /// Name of the first moment or momentum that stores the gradient.
    pub moment: String,
    /// How the gradients give the moments, each rule once, as the writer found it. If the optimizer used another rule, the
    /// gradients are not those of the optimizer.
    pub rules: Vec<MomentRule>,
    /// Greatest number of significant bits of a stored gradient, before the factor of the step. All gradients are bf16 numbers
    /// times one factor if it is 8 or less, f16 numbers if 11 or less. Covers the chunks that the slice touches.
    pub longest_bits: u32,
    /// Mean number of significant bits of the stored gradients of these chunks.
    pub mean_bits: f64,
    /// Number of elements of these chunks that are stored without a gradient. Their gradients are estimated from both moments.
    pub estimated_elements: u64,
}

/// Roles of the tensors whose chunks may hold gradients.
const MOMENTS: [&str; 2] = ["exp_avg", "momentum"];

impl Snapshot {
    /// Returns the gradient of the step from the parent to this snapshot, for a slice of a tensor. `name` is a weight or its
    /// first moment or momentum: the gradient has their shape. Reads only the chunks that the slice touches, and compares
    /// their checksums.
    ///
    /// The gradient is the number that the optimizer added to the moment: after clipping, and still multiplied by a loss scale
    /// that the optimizer did not remove. With Adam's L2 penalty (not AdamW), it includes the penalty.
    ///
    /// - It leads from the moment of the parent to the moment of this snapshot bit by bit, with `rules`. Of the gradients
    ///   that do, it is the shortest number, times one factor for the whole chunk.
    /// - For moments of f32 and a beta1 of 0.9, it differs from the gradient of the optimizer by less than 2^-19 of the larger
    ///   of gradient and moment. A bf16 gradient of more than 2^-10 of its moment is therefore restored exactly, and clipped
    ///   gradients are if the writer found the clip factor (`longest_bits` is then at most 8).
    /// - For moments of bf16, the writer takes the shortest gradient that also explains the weight and the second moment, times a
    ///   factor that it estimates. It is close to the gradient of the optimizer, and low bits differ as a rule. Certain is only
    ///   that it leads to the moment: for a beta1 of 0.9, it differs by less than a tenth of the larger of gradient and moment.
    ///
    /// Fails with `NotFound` for a tensor without moment, and for a chunk that holds no gradient of this step: one of a base, an
    /// unchanged one, one of another codec, or a delta whose parent is not the step before. So does a chunk of an assigned codec
    /// whose gradients were computed in f32: they are not short, so nothing proves the rule. Such snapshots come from another
    /// policy than [`Policy::Consecutive`](crate::Policy::Consecutive), or from optimizers whose gradients are not short.
    ///
    /// ```
    /// use tensorcask::{Dtype, Latest, Metadata, Policy, Slice, TensorView, blocking::Store};
    /// let bytes = |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|x| x.to_le_bytes()).collect() };
    /// let before: Vec<f32> = (1..9000).map(|i| (i as f32).sin()).collect();
    /// // Gradients of eight bits, clipped.
    /// let gradient: Vec<f32> = (1..9000).map(|i| ((i * 97 % 255) as f32 - 127.0) * 0.713_481_2).collect();
    /// let after: Vec<f32> = before.iter().zip(&gradient).map(|(m, g)| 0.1f32.mul_add(g - m, *m)).collect();
    ///
    /// let store = Store::open("memory://gradient-example")?;
    /// let mut writer = store.writer(Policy::Consecutive)?;
    /// for (step, moment) in [(1, before), (2, after)] {
    ///     let moment = bytes(&moment);
    ///     writer.save(step, &[TensorView::new("exp_avg.w", Dtype::F32, &[8999], &moment)?], &[], &Metadata::default())?;
    /// }
    /// let found = store.snapshot(Latest)?.gradient("exp_avg.w", &Slice::rows(0..100))?;
    /// assert_eq!(found.tensor.data, bytes(&gradient[..100]));
    /// assert!(found.longest_bits <= 8);
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub async fn gradient(&self, name: &str, slice: &Slice) -> Result<StepGradient> {
        let tensor = self.chain.find(name)?;
        let directory = &self.chain.newest().directory;
        let moment = moment_of(&self.chain, tensor).ok_or_else(|| {
            let message = "has no first moment or momentum in this step, or its name does not tell which; name the moment itself, as \
                           `tensorcask inspect` lists it";
            Error::not_found(message).tensor(name)
        })?;
        let rect = slice.of(&directory.shape(moment)).map_err(|e| e.tensor(name))?;
        let bytes = Dtype::F32.byte_count(rect.element_count().unwrap_or(u64::MAX)).unwrap_or(u64::MAX);
        Limits::check(bytes, self.chain.store.limits().max_read_bytes, "size of the gradient").map_err(|e| e.tensor(name))?;
        self.chain.check_present(moment, &rect).await?;
        let mut data = zeroed(to_usize(bytes, "a gradient")?, "a gradient")?;
        let forms = self.chain.read_gradient(moment, &rect, &mut data).await?;
        if let Some(unproven) = forms.iter().find(|chunk| chunk.is_unproven()) {
            let bits = unproven.mean_bits();
            let message = format!(
                "stores numbers of {bits:.1} bits on average, which are not the gradients of a training in 16 bits: nothing proves how they \
                 give the moment, so they may not be the gradients of the optimizer"
            );
            let object = self.record().manifest_path();
            return Err(Error::not_found(message).object(object).tensor(directory.name(moment)).chunk(unproven.chunk));
        }
        let tensor = Tensor { name: name.to_owned(), dtype: Dtype::F32, shape: rect.shape, data };
        Ok(StepGradient::new(tensor, directory.name(moment), &forms))
    }
}

impl StepGradient {
    /// Returns extremes, sums and counts of the gradient, such as the sum of its squares.
    pub fn statistics(&self) -> ValueStatistics {
        statistics::values(NumberFormat::F32, &self.tensor.data)
    }

    fn new(tensor: Tensor, moment: &str, forms: &[ChunkForm]) -> Self {
        let mut rules: Vec<MomentRule> = Vec::new();
        for chunk in forms {
            if !rules.contains(&chunk.form.rule) {
                rules.push(chunk.form.rule);
            }
        }
        let estimated_elements: u64 = forms.iter().map(|chunk| chunk.form.estimated_elements).sum();
        let stored: u64 = forms.iter().map(ChunkForm::stored).sum();
        let total_bits: u64 = forms.iter().map(|chunk| chunk.form.total_bits).sum();
        Self {
            tensor,
            moment: moment.to_owned(),
            rules,
            longest_bits: forms.iter().map(|chunk| chunk.form.longest_bits).max().unwrap_or(0),
            mean_bits: total_bits as f64 / stored.max(1) as f64,
            estimated_elements,
        }
    }
}

/// Form of the gradients of one chunk.
struct ChunkForm {
    form: GradientForm,
    chunk: u64,
    elements: u64,
}

impl ChunkForm {
    fn stored(&self) -> u64 {
        self.elements.saturating_sub(self.form.estimated_elements)
    }

    fn mean_bits(&self) -> f64 {
        self.form.total_bits as f64 / self.stored().max(1) as f64
    }

    /// Whether the gradients are not short. A writer finds the rule by the short gradients that it gives; with a wrong rule, they
    /// take about 24 bits.
    fn is_unproven(&self) -> bool {
        self.mean_bits() > MOST_BITS || self.form.estimated_elements > self.stored()
    }
}

/// Mean number of bits of the gradients of 16 micro-batches, and some more.
const MOST_BITS: f64 = 20.0;

/// Returns the tensor that may store the gradient of a tensor: itself, or the moment of its parameter.
fn moment_of(chain: &OpenChain, tensor: usize) -> Option<usize> {
    let directory = &chain.newest().directory;
    let tensor = directory.alias_of(tensor).unwrap_or(tensor);
    if MOMENTS.contains(&directory.role(tensor)) {
        return Some(tensor);
    }
    MOMENTS.iter().find_map(|role| directory.partner(tensor, role))
}

impl OpenChain {
    /// Fills `out` with the gradients of a rectangle of a first moment or a momentum, as f32.
    #[boxed]
    async fn read_gradient(&self, moment: usize, rect: &Rect, out: &mut [u8]) -> Result<Vec<ChunkForm>> {
        let shards = self.shards_in(moment, rect)?;
        let count = shards.len();
        let plans = self.load_family_plans(shards).await?;
        let mut jobs = Jobs::new(self, &plans);
        for (shard, plan) in plans.shards.iter().enumerate().take(count) {
            for chunk in touched(plan.grid, &plan.rect, rect) {
                self.check_gradient(&plans, shard, chunk)?;
                jobs.add(shard, chunk, Target::Gradient { item: 0 })?;
            }
        }
        let jobs = jobs.jobs;
        let mut forms = Vec::with_capacity(jobs.len());
        self.run(&plans.shards, jobs, None, |apart: Apart| {
            let (Some(plan), Some(gradients)) = (plans.shards.get(apart.shard), &apart.decoded.gradients) else { return };
            let window = plan.grid.elements(apart.chunk);
            let start = window.start;
            forms.push(ChunkForm { form: gradients.form, chunk: apart.chunk, elements: window.end - start });
            for run in contiguous_runs(&plan.rect, rect, window) {
                copy_run(Dtype::F32, Run { source: run.source - start, ..run }, &gradients.numbers, out);
            }
        })
        .await?;
        Ok(forms)
    }

    /// Checks that the stored form of a chunk holds the gradient of the newest step.
    fn check_gradient(&self, plans: &Plans, shard: usize, chunk: u64) -> Result<()> {
        let (Some(plan), Some(rows)) = (plans.shards.get(shard), plans.rows.get(shard)) else {
            return Err(Error::invalid("a shard that was not planned"));
        };
        let stored = match self.links.as_slice() {
            [_] => None,
            links => Some(plan.stored(links, rows, chunk, 0)?.0),
        };
        match self.reason_without_gradient(stored.as_ref())? {
            None => Ok(()),
            Some(reason) => {
                let object = self.newest().record.manifest_path();
                Err(Error::not_found(format!("holds no gradient of step {}: {reason}", self.newest().record.step))
                    .object(object)
                    .tensor(&plan.name)
                    .chunk(chunk))
            }
        }
    }

    /// Returns why a chunk holds no gradient of the newest step; `None` if it holds one. `stored` is the newest stored form of
    /// the chunk, if the chain has a parent.
    fn reason_without_gradient(&self, stored: Option<&Step>) -> Result<Option<String>> {
        let (Some(stored), [newest, parent, ..]) = (stored, self.links.as_slice()) else {
            return Ok(Some(format!("the step is stored as a base; {ADVICE}")));
        };
        if stored.link > 0 {
            return Ok(Some("the moment did not change in this step, so no step of the optimizer is stored".to_owned()));
        }
        let codec = stored.entry.codec.as_ref().ok_or_else(|| Error::corrupt("a stored chunk without a codec"))?;
        let names: Vec<&str> = stored.entry.pages.iter().map(|page| page.column.as_str()).collect();
        let registry = self.store.registry();
        if stored.entry.kind != ChunkKind::Delta || !registry.resolve(codec)?.holds_gradients(&names) {
            let id = codec.id.escape_debug();
            return Ok(Some(format!(
                "the chunk is stored by codec `{id}`, which holds none; {ADVICE}, and train with gradients in 16 bits"
            )));
        }
        let before = parent.as_ref().record.step;
        if before.checked_add(1) == Some(newest.as_ref().record.step) {
            return Ok(None);
        }
        Ok(Some(format!("the chunk is a delta against step {before}, which is not the step before; {ADVICE}")))
    }
}

/// Advice of errors: how to save so that steps hold gradients.
const ADVICE: &str = "save each step with the policy `consecutive`";
