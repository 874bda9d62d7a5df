//! Reads a store into the data of a report. Reads log, manifests, indexes and statistics, and no tensor.
//!
//! Steps are read one after the other and added to totals of bounded size, so memory does not grow with the store. The
//! statistics of every listed step are read, even if the charts show fewer steps: no NaN is overlooked. A step that cannot
//! be read is marked as damaged.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tensorcask::blocking::{Snapshot, Store, maintain};
use tensorcask::maintain::{VerifyDepth, VerifyOptions};
use tensorcask::wire::{DirectoryTensor, Id};
use tensorcask::{ChunkStatistics, Result, SaveTimes, SnapshotRecord, SnapshotStatus, ValueStatistics};

use super::data::{Bounds, Data, NonfiniteRow, ProblemRow, Role, RoundingRow, SnapshotRow, TensorRow, Verification};
use super::layers::Layers;
use super::totals::{RoleTotal, TensorTotal, nonfinite};
use crate::cask;
use crate::rounding::RoundingJson;
use crate::text::ratio;
use crate::time::human_time;

/// Reads a store. Checks it first if a depth is given.
pub(crate) fn gather(store: &Store, url: &str, verify: Option<VerifyDepth>, bounds: Bounds) -> Result<Data> {
    let verify = verify.map(|depth| verification(store, depth, &bounds)).transpose()?;
    let records = store.history().records()?;
    let mut faults = Vec::new();
    let rows = snapshot_rows(store, &records, &bounds, &mut faults)?;
    let mut run = Run { bounds, snapshots: rows, ..Run::default() };
    run.begin(store)?;
    let mut live: Vec<(u64, usize)> = Vec::new();
    for (at, row) in run.snapshots.iter().enumerate().filter(|(_, row)| row.status == SnapshotStatus::Live.name()) {
        live.push((row.step, at));
    }
    live.sort_unstable();
    for &(step, at) in &live {
        run.read(store, step, at)?;
    }
    Ok(run.finish(url, records.len() as u64, faults, verify))
}

fn verification(store: &Store, depth: VerifyDepth, bounds: &Bounds) -> Result<Verification> {
    let found = maintain::verify(store, &VerifyOptions { depth, ..VerifyOptions::default() })?;
    let problem = |problem: &maintain::Problem| ProblemRow {
        step: problem.step,
        object: bounds.name(problem.error.object_name().unwrap_or_default()),
        tensor: bounds.name(problem.error.tensor_name().unwrap_or_default()),
        message: problem.error.message().to_owned(),
    };
    Ok(Verification {
        depth: depth.name(),
        casks: found.casks,
        chunks: found.chunks,
        all_problems: found.problems.len() as u64,
        problems: found.problems.iter().take(bounds.rows).map(problem).collect(),
    })
}

/// The newest snapshots, in the order of their commits.
fn snapshot_rows(store: &Store, records: &[SnapshotRecord], bounds: &Bounds, faults: &mut Vec<String>) -> Result<Vec<SnapshotRow>> {
    let mut times = BTreeMap::new();
    let sizes: HashMap<Id, [u64; 2]> = match store.snapshots() {
        Ok(infos) => {
            times = SaveTimes::by_step(infos.iter().map(|info| (info.record.step, &info.user)));
            infos.iter().map(|info| (info.record.id, [info.tensor_bytes, info.stored_bytes])).collect()
        }
        Err(error) if error.is_unreadable() => {
            faults.push(error.to_string());
            HashMap::new()
        }
        Err(error) => return Err(error),
    };
    let mut places: HashMap<Id, (u64, u64)> = HashMap::new();
    let mut rows = Vec::new();
    for (at, record) in records.iter().enumerate() {
        let parent = record.parent.and_then(|parent| places.get(&parent).copied());
        let depth = parent.map_or(0, |(_, depth)| depth.saturating_add(1));
        places.insert(record.id, (record.step, depth));
        if records.len() - at > bounds.snapshots {
            continue;
        }
        let mut row = SnapshotRow {
            step: record.step,
            snapshot: record.id.to_hex(),
            kind: record.kind().name(),
            status: record.status.name(),
            pinned: record.pinned,
            time: human_time(record.time_ms),
            time_ms: record.time_ms,
            parent: parent.map(|(step, _)| step),
            depth,
            tensor_bytes: None,
            stored_bytes: None,
            ratio: None,
            times: Default::default(),
            measured: None,
            nan: None,
            positive_infinity: None,
            negative_infinity: None,
            damage: None,
        };
        if let Some(&[tensor_bytes, stored_bytes]) = sizes.get(&record.id) {
            row.set_sizes(tensor_bytes, stored_bytes);
            row.times = times.get(&record.step).copied().unwrap_or_default();
        }
        rows.push(row);
    }
    Ok(rows)
}

impl SnapshotRow {
    fn set_sizes(&mut self, tensor_bytes: u64, stored_bytes: u64) {
        (self.tensor_bytes, self.stored_bytes, self.ratio) = (Some(tensor_bytes), Some(stored_bytes), ratio(tensor_bytes, stored_bytes));
    }
}

/// What was read of a step.
struct StepTotal {
    step: u64,
    roles: BTreeMap<String, RoleTotal>,
    is_nonfinite: bool,
}

/// A store while its steps are read.
struct Run {
    bounds: Bounds,
    snapshots: Vec<SnapshotRow>,
    layers: Layers,
    roles: BTreeSet<String>,
    steps: Vec<StepTotal>,
    tensors_of: Option<u64>,
    tensors: Vec<TensorRow>,
    tensor_at: HashMap<String, usize>,
    all_tensors: u64,
    nonfinite: Vec<NonfiniteRow>,
    all_nonfinite: u64,
    rounding: Vec<RoundingRow>,
    all_rounding: u64,
}

impl Default for Run {
    fn default() -> Self {
        Self {
            bounds: Bounds::DEFAULT,
            snapshots: vec![],
            layers: Layers::default(),
            roles: BTreeSet::new(),
            steps: vec![],
            tensors_of: None,
            tensors: vec![],
            tensor_at: HashMap::new(),
            all_tensors: 0,
            nonfinite: vec![],
            all_nonfinite: 0,
            rounding: vec![],
            all_rounding: 0,
        }
    }
}

impl Run {
    /// Takes layers, roles and the list of tensors from the newest snapshot that can be read.
    fn begin(&mut self, store: &Store) -> Result<()> {
        let live = self.snapshots.iter().rev().filter(|row| row.status == SnapshotStatus::Live.name());
        let steps: Vec<u64> = live.map(|row| row.step).collect();
        for step in steps {
            let snapshot = match store.snapshot(step) {
                Ok(snapshot) => snapshot,
                Err(error) if error.is_unreadable() => continue,
                Err(error) => return Err(error),
            };
            let stored: Vec<DirectoryTensor> = snapshot.tensors().into_iter().filter(|tensor| tensor.alias_of.is_none()).collect();
            self.tensors_of = Some(step);
            self.all_tensors = stored.len() as u64;
            self.layers = Layers::of(stored.iter().map(|tensor| tensor.param.as_str()), self.bounds.layers);
            for (at, tensor) in stored.iter().take(self.bounds.tensors).enumerate() {
                self.tensor_at.insert(tensor.name.clone(), at);
                self.tensors.push(TensorRow::of(tensor, &self.bounds));
            }
            break;
        }
        Ok(())
    }

    /// Reads the live step of a row.
    fn read(&mut self, store: &Store, step: u64, at: usize) -> Result<()> {
        let mut total = StepTotal { step, roles: BTreeMap::new(), is_nonfinite: false };
        let damage = match self.add(store, step, at, &mut total) {
            Ok(()) => None,
            Err(error) if error.is_unreadable() => Some(error.to_string()),
            Err(error) => return Err(error),
        };
        if let Some(row) = self.snapshots.get_mut(at) {
            row.damage = damage;
        }
        self.steps.push(total);
        Ok(())
    }

    /// Adds what can be read, in an order that leaves the most if a part is damaged.
    fn add(&mut self, store: &Store, step: u64, at: usize, total: &mut StepTotal) -> Result<()> {
        let snapshot = store.snapshot(step)?;
        if let Some(row) = self.snapshots.get_mut(at) {
            row.set_sizes(snapshot.manifest().tensor_bytes, snapshot.manifest().stored_bytes());
        }
        let stored = snapshot.tensors().into_iter().filter(|tensor| tensor.alias_of.is_none());
        let tensors: HashMap<String, DirectoryTensor> = stored.map(|tensor| (tensor.name.clone(), tensor)).collect();
        self.add_bytes(store, &snapshot, &tensors, total)?;
        let mut rounded = BTreeMap::new();
        for tensor in snapshot.rounding()? {
            let of_role: &mut Option<tensorcask::RoundingReport> = rounded.entry(self.role(&tensor.role)).or_default();
            *of_role = Some(of_role.unwrap_or_default().and(tensor.total));
        }
        for (role, report) in rounded {
            if let Some(report) = &report {
                self.all_rounding += 1;
                if self.rounding.len() < self.bounds.rows {
                    self.rounding.push(RoundingRow { step, role: role.clone(), rounding: RoundingJson::of(report) });
                }
            }
            total.roles.entry(role).or_default().rounding = report;
        }
        let statistics = snapshot.statistics()?;
        let mut sum: Option<ValueStatistics> = None;
        for chunks in statistics.chunk_by(|a, b| a.tensor == b.tensor) {
            let Some(first) = chunks.first() else { continue };
            let tensor = TensorTotal::of(chunks);
            let row = tensors.get(&first.tensor).map_or(self.layers.rows() - 1, |tensor| self.layers.row_of(&tensor.param));
            let role = self.role(&first.role);
            total.roles.entry(role).or_default().add(&tensor, row, &self.layers);
            total.is_nonfinite |= self.note_tensor(step, first, &tensor);
            sum = tensor.values.map(|values| sum.map_or(values, |sum| sum.and(values))).or(sum);
        }
        if let Some(row) = self.snapshots.get_mut(at) {
            row.measured = Some(!statistics.is_empty() || tensors.is_empty());
            row.nan = sum.map(|sum| sum.nan);
            row.positive_infinity = sum.map(|sum| sum.positive_infinity);
            row.negative_infinity = sum.map(|sum| sum.negative_infinity);
        }
        Ok(())
    }

    /// Adds the bytes of each role. Unchanged tensors are in no cask.
    fn add_bytes(
        &mut self,
        store: &Store,
        snapshot: &Snapshot,
        tensors: &HashMap<String, DirectoryTensor>,
        total: &mut StepTotal,
    ) -> Result<()> {
        let mut stored: HashMap<String, u64> = HashMap::new();
        for (_, index) in store.block_on(snapshot.inspect().indexes())? {
            for tensor in cask::tensors(&index)? {
                let bytes = stored.entry(tensor.name).or_default();
                *bytes = bytes.saturating_add(tensor.stored_bytes);
            }
        }
        for tensor in tensors.values() {
            let elements = tensor.shape.iter().fold(1, |product: u64, &extent| product.saturating_mul(extent));
            let role = self.role(&tensor.role);
            let role = total.roles.entry(role).or_default();
            let bytes = stored.get(&tensor.name).copied().unwrap_or(0);
            role.tensor_bytes = role.tensor_bytes.saturating_add(tensor.dtype.byte_count(elements).unwrap_or(u64::MAX));
            role.stored_bytes = role.stored_bytes.saturating_add(bytes);
            if Some(total.step) == self.tensors_of
                && let Some(row) = self.tensor_at.get(&tensor.name).and_then(|&at| self.tensors.get_mut(at))
            {
                row.stored_bytes = bytes;
            }
        }
        Ok(())
    }

    /// Adds a tensor to the tables. Returns whether it has NaN or infinities.
    fn note_tensor(&mut self, step: u64, chunk: &ChunkStatistics, total: &TensorTotal) -> bool {
        let is_nonfinite = total.values.is_some_and(|values| nonfinite(&values) > 0);
        if let Some(row) = self.tensor_at.get(&chunk.tensor).and_then(|&at| self.tensors.get_mut(at)) {
            row.set_numbers(step, total);
            if is_nonfinite && row.first_nonfinite.is_none() {
                row.first_nonfinite = Some(step);
            }
        }
        if let Some(values) = total.values.filter(|_| is_nonfinite) {
            self.all_nonfinite += 1;
            if self.nonfinite.len() < self.bounds.rows {
                self.nonfinite.push(NonfiniteRow {
                    step,
                    tensor: self.bounds.name(&chunk.tensor),
                    role: self.bounds.name(&chunk.role),
                    nan: values.nan,
                    positive_infinity: values.positive_infinity,
                    negative_infinity: values.negative_infinity,
                });
            }
        }
        is_nonfinite
    }

    /// Name of a role in the charts. Beyond the limit, roles share one name.
    fn role(&mut self, role: &str) -> String {
        let name = self.bounds.name(role);
        if self.roles.contains(&name) || self.roles.len() < self.bounds.roles {
            self.roles.insert(name.clone());
            return name;
        }
        "other roles".to_owned()
    }

    fn finish(self, url: &str, all_snapshots: u64, faults: Vec<String>, verify: Option<Verification>) -> Data {
        let shown = self.shown_steps();
        let live_steps = self.steps.len() as u64;
        let names: BTreeSet<String> = self.steps.iter().flat_map(|step| step.roles.keys().cloned()).collect();
        let roles = names.into_iter().map(|name| Role::over(name, &shown)).collect();
        Data {
            store: url.to_owned(),
            version: env!("CARGO_PKG_VERSION"),
            bounds: self.bounds,
            all_snapshots,
            live_steps,
            steps: shown.iter().map(|step| step.step).collect(),
            layers: self.layers.names(|layer| Bounds { name: 60, ..self.bounds }.name(layer)),
            all_layers: self.layers.count() as u64,
            roles,
            exponents: (0..16).map(ValueStatistics::first_exponent).collect(),
            tensors_of: self.tensors_of,
            tensors: self.tensors,
            all_tensors: self.all_tensors,
            nonfinite: self.nonfinite,
            all_nonfinite: self.all_nonfinite,
            rounding: self.rounding,
            all_rounding: self.all_rounding,
            snapshots: self.snapshots,
            faults,
            verify,
        }
    }

    /// Steps of the charts: evenly spaced, with the first and the last step, and the first with a NaN or an infinity.
    fn shown_steps(&self) -> Vec<&StepTotal> {
        let count = self.steps.len();
        let most = self.bounds.steps;
        if count <= most {
            return self.steps.iter().collect();
        }
        let even = most.saturating_sub(2).max(1);
        let mut shown: BTreeSet<usize> = (0..=even).map(|nth| nth * (count - 1) / even).collect();
        shown.extend(self.steps.iter().position(|step| step.is_nonfinite));
        shown.into_iter().filter_map(|at| self.steps.get(at)).collect()
    }
}

impl Role {
    fn over(name: String, steps: &[&StepTotal]) -> Self {
        let mut role = Self { name, ..Self::default() };
        for step in steps {
            let total = step.roles.get(&role.name);
            role.tensor_bytes.push(total.map(|total| total.tensor_bytes));
            role.stored_bytes.push(total.map(|total| total.stored_bytes));
            let total = total.cloned().unwrap_or_default();
            role.norm.push(total.sums.norm());
            role.update.push(total.sums.update());
            role.exponents.push(total.exponents);
            role.rounding.push(total.rounding.as_ref().map(RoundingJson::of));
            role.layer_norm.push(total.layers.iter().map(|layer| layer.norm()).collect());
            role.layer_update.push(total.layers.iter().map(|layer| layer.update()).collect());
            role.layer_nonfinite.push(total.layers.iter().map(|layer| layer.nonfinite).collect());
        }
        role
    }
}

impl TensorRow {
    fn of(tensor: &DirectoryTensor, bounds: &Bounds) -> Self {
        Self {
            name: bounds.name(&tensor.name),
            role: bounds.name(&tensor.role),
            dtype: tensor.dtype.name(),
            shape: tensor.shape.clone(),
            stored_bytes: 0,
            step: None,
            numbers: None,
            nan: None,
            positive_infinity: None,
            negative_infinity: None,
            zero: None,
            min: None,
            max: None,
            norm: None,
            changed: None,
            update: None,
            first_nonfinite: None,
        }
    }

    fn set_numbers(&mut self, step: u64, total: &TensorTotal) {
        let values = total.values;
        self.step = Some(step);
        self.numbers = Some(total.numbers);
        self.nan = values.map(|values| values.nan);
        self.positive_infinity = values.map(|values| values.positive_infinity);
        self.negative_infinity = values.map(|values| values.negative_infinity);
        self.zero = values.map(|values| values.zero);
        self.min = values.and_then(|values| values.min);
        self.max = values.and_then(|values| values.max);
        self.norm = total.norm();
        self.changed = total.change.map(|change| change.changed);
        self.update = total.update();
    }
}
