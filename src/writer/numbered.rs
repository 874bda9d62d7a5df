//! Parameters that an optimizer numbers, and their weights.
//!
//! PyTorch's `Optimizer.state_dict()` names tensors by the number of a parameter: `state.0.exp_avg` belongs to some weight
//! `h.0.weight`. Codecs store a weight by its moments, so the writer finds the weight of each number, and gives all tensors of
//! the number the parameter of the weight. Readers find partners by this parameter (manifest 3.2); they need no search.
//!
//! ```text
//! numbers and weights of one shape, equally many    the n-th number belongs to the n-th weight     a guess
//! a number with a master                            a sample of the master rounds to the weight    a proof
//! a weight that has moved since the parent          a sample moved as the moments say              a proof
//! ```
//!
//! The writer proves all masters, and some pairs of each shape. If one is wrong, or if the counts differ, it takes the weights that
//! moved, in their order, and at last compares all numbers with all weights of the shape. It keeps the pairs for its later saves,
//! and proves one again in each. A later writer takes them from the directory of its parent.
//!
//! A wrong pair costs bytes and nothing else: a codec stores a chunk by its partners only if they rebuild the chunk exactly. No
//! rounding depends on a pair that is not proven.

use std::collections::{BTreeMap, HashMap, HashSet};

use rayon::prelude::*;
use tensorcask_kernels::floats::numbers;

use super::BaseKeeping;
use super::base_cache::BaseCache;
use super::base_chunks::base_chunks;
use super::input::{ChunkRef, SaveInput};
use super::layout::{LayoutTensor, StateLayout};
use crate::tensor::{is_moment, is_parameter};
use crate::{Dtype, Result, parallel};

/// Weights of numbered parameters, as a writer knows them from save to save.
#[derive(Debug, Default)]
pub(super) struct NumberedParams {
    /// Parameter of the weight of each numbered parameter, by the parameter that the name of its tensors tells.
    pub weights: HashMap<String, String>,
    /// Searches in the tensors of one shape.
    searches: HashMap<Vec<u64>, Search>,
    has_warned: bool,
}

/// State of the search for pairs among the tensors of one shape.
#[derive(Debug, Default, PartialEq)]
struct Search {
    /// Names of the tensors. With other names, the search begins again.
    names: Vec<String>,
    /// Cost of the searches that did not prove all pairs, up to [`ATTEMPTS`].
    attempts: u32,
    is_settled: bool,
}

/// Numbered parameters and weights of one shape, in the order of the state.
#[derive(Debug, Default)]
struct ShapeClass {
    entries: Vec<Entry>,
    /// Numbers of the weights in the layout.
    weights: Vec<usize>,
}

/// A numbered parameter: the numbers of its tensors in the layout.
#[derive(Debug, Default, Clone)]
struct Entry {
    param: String,
    exp_avg: Option<usize>,
    exp_avg_sq: Option<usize>,
    momentum: Option<usize>,
    master: Option<usize>,
}

/// Result of comparing the values of a numbered parameter and a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Verdict {
    /// They belong together. A larger score is a better match.
    Proven(f64),
    Refuted,
    /// The weight did not move, or the sample is too small.
    Unknown,
}

impl NumberedParams {
    /// Finds the weights of the numbered parameters of a layout.
    pub(super) async fn pair(&mut self, input: &SaveInput<'_>, cache: &BaseCache) -> Result<()> {
        let classes = classes(input.layout);
        let entries: HashSet<&str> = classes.values().flat_map(|class| &class.entries).map(|entry| entry.param.as_str()).collect();
        self.weights.retain(|param, _| entries.contains(param.as_str()));
        for (shape, class) in &classes {
            let tensors = class.weights.iter().copied().chain(class.entries.iter().filter_map(Entry::any_tensor));
            let names: Vec<String> = tensors.map(|tensor| input.layout.tensors[tensor].description.name.clone()).collect();
            let search = self.searches.entry(shape.clone()).or_default();
            if search.names != names {
                *search = Search { names, ..Search::default() };
            }
            let mut pairs = first_guess(input, class, &self.weights);
            if search.is_settled && input.options.base_cache != BaseKeeping::None {
                search.is_settled = !probe(input, cache, class, &pairs, 1).await?.0;
            }
            if !search.is_settled && search.attempts < ATTEMPTS {
                pairs = settle(input, cache, class, pairs, search).await?;
            }
            for (entry, weight) in class.entries.iter().zip(&pairs) {
                match weight {
                    Some(weight) => {
                        let param = input.layout.tensors[class.weights[*weight]].description.param.clone();
                        self.weights.insert(entry.param.clone(), param);
                    }
                    None => _ = self.weights.remove(&entry.param),
                }
            }
        }
        Ok(())
    }

    /// Warns, once, of moments without a weight beside weights of the same shape without moments. `layout`: with the pairs.
    pub(super) fn warn_of_orphans(&mut self, layout: &StateLayout<'_>) {
        if self.has_warned {
            return;
        }
        let params = |is_wanted: fn(&str) -> bool| -> HashSet<&str> {
            let wanted = layout.tensors.iter().filter(|tensor| is_wanted(&tensor.description.role));
            wanted.map(|tensor| tensor.description.param.as_str()).collect()
        };
        let with_moment = params(is_moment);
        let with_weight = params(is_parameter);
        let is_free = |tensor: &&LayoutTensor<'_>| is_weight(tensor) && !with_moment.contains(tensor.description.param.as_str());
        let free: HashSet<&[u64]> = layout.tensors.iter().filter(is_free).map(|tensor| tensor.description.shape.as_slice()).collect();
        let is_orphan = |tensor: &&LayoutTensor<'_>| {
            let description = &tensor.description;
            is_moment(&description.role) && !with_weight.contains(description.param.as_str()) && free.contains(description.shape.as_slice())
        };
        let mut orphans = layout.tensors.iter().filter(is_orphan);
        if let Some(first) = orphans.next() {
            let others = orphans.count();
            tracing::warn!(
                tensor = %first.description.name,
                others,
                "no weight is known for these moments, so deltas take more bytes; if their names hold those of the weights, state role \
                 and parameter with `roles` (command line: --role), as in `m.*=exp_avg:*`"
            );
            self.has_warned = true;
        }
    }
}

impl Entry {
    /// A tensor of the shape of the weight.
    fn any_tensor(&self) -> Option<usize> {
        self.exp_avg.or(self.momentum).or(self.master).or(self.exp_avg_sq)
    }
}

/// The numbered parameters of a layout and the weights that have no moments yet, by shape. Shapes without both are left out.
fn classes(layout: &StateLayout<'_>) -> BTreeMap<Vec<u64>, ShapeClass> {
    if layout.tensors.iter().all(|tensor| tensor.numbered_param().is_none()) {
        return BTreeMap::new();
    }
    let named: HashSet<(&str, &str)> = layout.tensors.iter().map(|tensor| (tensor.description.role.as_str(), tensor.own_param())).collect();
    let mut entries: BTreeMap<(&str, u64), Entry> = BTreeMap::new();
    for (number, tensor) in layout.tensors.iter().enumerate() {
        let Some((prefix, index)) = tensor.numbered_param() else { continue };
        let entry = entries.entry((prefix, index)).or_default();
        let place = match tensor.description.role.as_str() {
            "exp_avg" => &mut entry.exp_avg,
            "exp_avg_sq" => &mut entry.exp_avg_sq,
            "momentum" => &mut entry.momentum,
            "master" => &mut entry.master,
            _ => continue,
        };
        *place = Some(number);
        entry.param = tensor.own_param().to_owned();
    }
    let mut classes: BTreeMap<Vec<u64>, ShapeClass> = BTreeMap::new();
    // Optimizers in the order of the state.
    let position = |entry: &Entry| entry.any_tensor().map_or(0, |tensor| layout.tensors[tensor].position);
    let mut of_prefix: BTreeMap<&str, Vec<Entry>> = BTreeMap::new();
    for ((prefix, _), entry) in entries {
        of_prefix.entry(prefix).or_default().push(entry);
    }
    let mut prefixes: Vec<Vec<Entry>> = of_prefix.into_values().collect();
    prefixes.sort_by_key(|entries| entries.iter().map(position).min());
    for entry in prefixes.into_iter().flatten() {
        let Some(tensor) = entry.any_tensor() else { continue };
        // The name of the weight is the number.
        if named.contains(&("model", entry.param.as_str())) {
            continue;
        }
        classes.entry(layout.tensors[tensor].description.shape.clone()).or_default().entries.push(entry);
    }
    if classes.is_empty() {
        return classes;
    }
    let mut weights: Vec<usize> = (0..layout.tensors.len()).filter(|&tensor| is_free_weight(layout, tensor, &named)).collect();
    weights.sort_by_key(|&tensor| layout.tensors[tensor].position);
    for tensor in weights {
        if let Some(class) = classes.get_mut(&layout.tensors[tensor].description.shape) {
            class.weights.push(tensor);
        }
    }
    classes.retain(|_, class| !class.weights.is_empty());
    classes
}

/// Whether a tensor is a weight whose moments no name tells. `named`: role and parameter of each tensor, as its name tells.
fn is_free_weight(layout: &StateLayout<'_>, number: usize, named: &HashSet<(&str, &str)>) -> bool {
    let tensor = &layout.tensors[number];
    is_weight(tensor) && layout.is_only(number) && !MOMENTS.iter().any(|role| named.contains(&(*role, tensor.own_param())))
}

/// Whether a tensor may be the weight of a parameter that an optimizer trains.
fn is_weight(tensor: &LayoutTensor<'_>) -> bool {
    let is_float = matches!(tensor.description.dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16);
    tensor.description.role == "model" && is_float && !tensor.shards.is_empty() && !tensor.description.shape.contains(&0)
}

/// Weight of each entry, by its place in the class: as this writer or the one of the parent found it, or by the order.
fn first_guess(input: &SaveInput<'_>, class: &ShapeClass, known: &HashMap<String, String>) -> Vec<Option<usize>> {
    let by_param: HashMap<&str, usize> =
        (0usize..).zip(&class.weights).map(|(place, &tensor)| (input.layout.tensors[tensor].description.param.as_str(), place)).collect();
    let directory = input.parent.map(|parent| &parent.snapshot.chain.newest().directory);
    let earlier = |entry: &Entry| {
        let of_writer = known.get(&entry.param).and_then(|param| by_param.get(param.as_str()));
        let name = &input.layout.tensors[entry.any_tensor()?].description.name;
        let of_parent = || directory.and_then(|directory| by_param.get(directory.param(directory.find(name)?)));
        of_writer.or_else(of_parent).copied()
    };
    // A parent that paired other tensors may name a weight twice.
    let mut taken = HashSet::new();
    let found: Vec<Option<usize>> = class.entries.iter().map(|entry| earlier(entry).filter(|weight| taken.insert(*weight))).collect();
    if found.iter().any(Option::is_some) {
        return found;
    }
    let is_same_count = class.entries.len() == class.weights.len();
    (0..class.entries.len()).map(|place| Some(place).filter(|_| is_same_count)).collect()
}

/// Places of an entry and of its weight in their class.
type Pair = (usize, usize);

/// Proves the pairs of a class, or finds better ones.
async fn settle(
    input: &SaveInput<'_>,
    cache: &BaseCache,
    class: &ShapeClass,
    pairs: Vec<Option<usize>>,
    search: &mut Search,
) -> Result<Vec<Option<usize>>> {
    let has_masters = class.entries.iter().any(|entry| entry.master.is_some());
    if input.parent.is_none() && !has_masters {
        return Ok(pairs);
    }
    // Masters are rounded by their weights, so each is proven.
    let probes = if has_masters { class.entries.len() } else { PROBES };
    if pairs.iter().all(Option::is_some) {
        let (is_refuted, is_proven) = probe(input, cache, class, &pairs, probes).await?;
        if !is_refuted {
            search.is_settled = is_proven;
            return Ok(pairs);
        }
    }
    let samples = Samples::read(input, cache, class, &(0..class.weights.len()).collect::<Vec<_>>()).await?;
    // Buffers and frozen weights do not move.
    let moved: Vec<usize> = (0..class.weights.len()).filter(|weight| samples.has_moved(*weight)).collect();
    if moved.len() == class.entries.len() && !has_masters {
        let verdicts: Vec<Verdict> = every(moved.len(), PROBES)
            .map(|entry| {
                samples.judge(input, class, &class.entries[entry], samples.update(input, &class.entries[entry]).as_ref(), moved[entry])
            })
            .collect();
        if !verdicts.contains(&Verdict::Refuted) {
            search.is_settled = true;
            return Ok(moved.into_iter().map(Some).collect());
        }
    }
    let candidates = if has_masters { (0..class.weights.len()).collect() } else { moved };
    let mut found = vec![None; class.entries.len()];
    let mut is_taken = vec![false; class.weights.len()];
    let is_too_large = candidates.len().saturating_mul(class.entries.len()) > MOST_PAIRS;
    let scores = if is_too_large { Vec::new() } else { scores(input, class, &samples, &candidates) };
    for (_, (entry, weight)) in scores {
        if found[entry].is_none() && !is_taken[weight] {
            found[entry] = Some(weight);
            is_taken[weight] = true;
        }
    }
    search.is_settled = found.iter().all(Option::is_some);
    if !search.is_settled {
        search.attempts += if is_too_large || !candidates.is_empty() { ATTEMPTS / 3 } else { 1 };
        // A guess is better than no partner: not every update follows its moments closely.
        for (entry, guess) in pairs.into_iter().enumerate() {
            let is_free = |weight: &usize| found[entry].is_none() && !is_taken[*weight];
            let is_refuted = |weight: &usize| {
                let master = class.entries[entry].master;
                master.is_some_and(|master| input.layout.is_master(master, class.weights[*weight]) == Some(false))
            };
            if let Some(weight) = guess.filter(|weight| is_free(weight) && !is_refuted(weight)) {
                found[entry] = Some(weight);
                is_taken[weight] = true;
            }
        }
    }
    Ok(found)
}

/// Compares some pairs of a class. Returns whether one is refuted, and whether one is proven.
async fn probe(
    input: &SaveInput<'_>,
    cache: &BaseCache,
    class: &ShapeClass,
    pairs: &[Option<usize>],
    probes: usize,
) -> Result<(bool, bool)> {
    let given: Vec<Pair> = pairs.iter().enumerate().filter_map(|(entry, weight)| Some((entry, (*weight)?))).collect();
    let probes: Vec<Pair> = every(given.len(), probes).map(|place| given[place]).collect();
    let wanted: Vec<usize> = probes.iter().map(|(_, weight)| *weight).collect();
    let samples = Samples::read(input, cache, class, &wanted).await?;
    let judge = |&(entry, weight): &Pair| {
        let entry = &class.entries[entry];
        samples.judge(input, class, entry, samples.update(input, entry).as_ref(), weight)
    };
    let verdicts: Vec<Verdict> = probes.iter().map(judge).collect();
    let is_proven = verdicts.iter().any(|verdict| matches!(verdict, Verdict::Proven(_)));
    Ok((verdicts.contains(&Verdict::Refuted), is_proven))
}

/// At most `most` of the places below `count`, at equal distances.
fn every(count: usize, most: usize) -> impl Iterator<Item = usize> {
    (0..count).step_by(count.div_ceil(most.max(1)).max(1))
}

/// Proven pairs of all entries and some weights of a class, best first.
fn scores(input: &SaveInput<'_>, class: &ShapeClass, samples: &Samples, weights: &[usize]) -> Vec<(f64, Pair)> {
    let of_entry = |number: usize| {
        let entry = &class.entries[number];
        let update = samples.update(input, entry);
        let scored = |&weight: &usize| match samples.judge(input, class, entry, update.as_ref(), weight) {
            Verdict::Proven(score) => Some((score, (number, weight))),
            Verdict::Refuted | Verdict::Unknown => None,
        };
        weights.iter().filter_map(scored).collect::<Vec<_>>()
    };
    let mut scores: Vec<(f64, Pair)> = parallel::run(|| (0..class.entries.len()).into_par_iter().flat_map_iter(of_entry).collect());
    scores.sort_by(|one, other| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1)));
    scores
}

/// Samples of the weights of a class: how far each moved since the parent.
struct Samples {
    /// Places of the sample in the tensors.
    places: Vec<usize>,
    /// By the place of the weight in the class; empty without a parent, and for weights that were not asked for.
    moves: HashMap<usize, Movement>,
}

impl Samples {
    /// Reads the weights at these places of the class.
    async fn read(input: &SaveInput<'_>, cache: &BaseCache, class: &ShapeClass, wanted: &[usize]) -> Result<Self> {
        let mut samples = Self { places: Vec::new(), moves: HashMap::new() };
        let Some(parent) = input.parent else { return Ok(samples) };
        // The master of a weight moves more finely.
        let moving = |weight: usize| {
            let tensor = class.weights[weight];
            let rect = input.layout.tensors[tensor].shards.first()?.rect();
            let (tensor, shard) = input.layout.partner(tensor, "master", rect).unwrap_or((tensor, 0));
            let at = ChunkRef { tensor, shard, chunk: 0, base: None };
            Some((weight, ChunkRef { base: Some(parent.find(input.view(at))?), ..at }))
        };
        let chunks: Vec<(usize, ChunkRef)> = wanted.iter().filter_map(|&weight| moving(weight)).collect();
        let elements = |at: ChunkRef| Ok(input.grid(at)?.elements(0).end);
        let shared = chunks.iter().map(|(_, at)| elements(*at)).collect::<Result<Vec<u64>>>()?.into_iter().min().unwrap_or(0);
        let pairs = (class.entries.len() * wanted.len()).max(1) as u64;
        let stride = shared.div_ceil((MOST_WORK / pairs).clamp(SMALL_SAMPLE, LARGE_SAMPLE)).max(1);
        samples.places = (0..shared).step_by(stride as usize).map(|place| place as usize).collect();
        for batch in chunks.chunks(BATCH) {
            let refs: Vec<ChunkRef> = batch.iter().map(|(_, at)| *at).collect();
            let bases = base_chunks(input, cache, &refs, &vec![false; refs.len()]).await?;
            for ((weight, at), base) in batch.iter().zip(bases) {
                let Some(base) = base else { continue };
                let dtype = input.tensor(*at).description.dtype;
                let old = samples.take(dtype, &base);
                let new = samples.take(dtype, input.original(*at)?);
                samples.moves.insert(*weight, Movement::between(old, &new));
            }
        }
        Ok(samples)
    }

    fn has_moved(&self, weight: usize) -> bool {
        self.moves.get(&weight).is_some_and(|movement| !movement.moved.is_none())
    }

    /// Compares the values of an entry, whose moments tell `update`, and of a weight.
    fn judge(&self, input: &SaveInput<'_>, class: &ShapeClass, entry: &Entry, update: Option<&Direction>, weight: usize) -> Verdict {
        if let Some(master) = entry.master
            && let Some(is_master) = input.layout.is_master(master, class.weights[weight])
        {
            return if is_master { Verdict::Proven(1.0) } else { Verdict::Refuted };
        }
        let Some((moved, update)) = self.moves.get(&weight).zip(update) else { return Verdict::Unknown };
        moved.judge(update)
    }

    /// Direction of the step that the moments of an entry tell; `None` without moments.
    fn update(&self, input: &SaveInput<'_>, entry: &Entry) -> Option<Direction> {
        let of = |tensor: usize| {
            let tensor = &input.layout.tensors[tensor];
            Some(self.take(tensor.description.dtype, tensor.shards.first()?.data()))
        };
        let first = of(entry.exp_avg.or(entry.momentum)?)?;
        let Some(second) = entry.exp_avg_sq.and_then(of) else { return Some(Direction::of(first)) };
        Some(Direction::of(first.iter().zip(&second).map(|(first, second)| first / (second.sqrt() + EPSILON)).collect()))
    }

    /// Numbers of a tensor at the places of the sample.
    fn take(&self, dtype: Dtype, data: &[u8]) -> Vec<f64> {
        let width = if dtype == Dtype::F32 { 4 } else { 2 };
        let at = |&place: &usize| data.get(place * width..(place + 1) * width);
        self.places.iter().filter_map(at).flat_map(|unit| numbers(dtype.number_format(), unit)).map(f64::from).collect()
    }
}

/// A vector of mean 0 and length 1; of length 0 if it has no direction.
struct Direction(Vec<f64>);

impl Direction {
    fn of(mut numbers: Vec<f64>) -> Self {
        let mean = numbers.iter().sum::<f64>() / (numbers.len().max(1) as f64);
        numbers.iter_mut().for_each(|number| *number -= mean);
        let length = numbers.iter().map(|number| number * number).sum::<f64>().sqrt();
        // Infinities and NaN have no direction.
        numbers.iter_mut().for_each(|number| *number = if length.is_normal() { *number / length } else { 0.0 });
        Self(numbers)
    }

    /// Cosine of the angle between two directions.
    fn cosine(&self, other: &Self) -> f64 {
        self.0.iter().zip(&other.0).map(|(one, other)| one * other).sum()
    }

    fn is_none(&self) -> bool {
        self.0.iter().all(|&number| number == 0.0)
    }
}

/// How a weight moved since the parent.
struct Movement {
    /// The weight before.
    weight: Direction,
    /// The movement without the part along the weight, which weight decay may have made.
    moved: Direction,
}

impl Movement {
    fn between(old: Vec<f64>, new: &[f64]) -> Self {
        let moved = Direction::of(new.iter().zip(&old).map(|(new, old)| new - old).collect());
        let weight = Direction::of(old);
        let along = moved.cosine(&weight);
        let across = moved.0.iter().zip(&weight.0).map(|(moved, weight)| moved - along * weight).collect();
        Self { weight, moved: Direction::of(across) }
    }

    /// Judges whether the weight moved along `update`, by Student's t of the partial correlation given the weight.
    fn judge(&self, update: &Direction) -> Verdict {
        let count = update.0.len();
        if count < SMALLEST_SAMPLE || self.moved.0.len() != count || self.moved.is_none() || update.is_none() {
            return Verdict::Unknown;
        }
        let along = update.cosine(&self.weight);
        let across = (1.0 - along * along).max(f64::EPSILON).sqrt();
        let correlation = self.moved.cosine(update).abs() / across;
        if !correlation.is_finite() {
            return Verdict::Unknown;
        }
        let correlation = correlation.min(1.0);
        let freedom = (count - 3) as f64;
        let t = correlation * (freedom / (1.0 - correlation * correlation).max(f64::EPSILON)).sqrt();
        if t >= PROOF_T { Verdict::Proven(correlation) } else { Verdict::Refuted }
    }
}

/// Roles of tensors that an optimizer keeps for a parameter.
const MOMENTS: [&str; 3] = ["exp_avg", "exp_avg_sq", "momentum"];

/// Number of pairs of a shape that are proven in the first place.
const PROBES: usize = 4;

/// Cost of searches after which a writer gives up: 3 that compare pairs, or 12 in which no weight moves, as at the start of a
/// training.
const ATTEMPTS: u32 = 12;

/// Largest number of pairs that a search compares.
const MOST_PAIRS: usize = 1 << 20;

/// Largest number of elements in a sample: of many tensors, and of few. The update of Muon follows its momentum loosely, and is
/// proven by a large sample only.
const SMALL_SAMPLE: u64 = 256;
const LARGE_SAMPLE: u64 = 4096;

/// Numbers to compare from which samples become smaller.
const MOST_WORK: u64 = 1 << 22;

/// Number of base chunks in memory at a time.
const BATCH: usize = 16;

/// Smallest sample that can prove or refute a pair.
const SMALLEST_SAMPLE: usize = 8;

/// Student's t from which a correlation is a proof. In 256 elements, this is a correlation of 0.45, in 4,096 one of 0.12.
const PROOF_T: f64 = 8.0;

/// Adam's default epsilon.
const EPSILON: f64 = 1e-8;
