//! `tensorcask stat`: shows totals of a store from its indexes.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use tensorcask::blocking::{Snapshot, Store};
use tensorcask::container::CaskIndex;
use tensorcask::wire::{Id, SnapshotKind};
use tensorcask::{Result, RoundingReport, Slice, SnapshotStatus};

use crate::cask::{self, CodecCounts};
use crate::decision::DecisionJson;
use crate::output::{Outcome, UnreadableStep, code_with};
use crate::precision::PrecisionJson;
use crate::progress::Progress;
use crate::rounding::RoundingJson;
use crate::text::{Text, counted, human_bytes, human_ratio, ratio};

#[derive(Debug, clap::Args)]
#[command(after_help = "Counts the snapshots that `ls` lists. If a step cannot be read, `stat` names it and leaves its bytes out.

`overhead`: headers, indexes and padding of casks, part of `stored`.
`kept`: forgotten or replaced snapshots that newer deltas still need, not part of `stored`.
`precision`: profiles that --precision auto chose. `change`: distance of the weights from those of the save before, of
their norm. `weights`: how far rounding would move them, of that distance. `update`: error of Adam's update.
`after base`: position of the snapshot after the last base, 1 for the first snapshot after it.

Example:
  tensorcask stat runs/a")]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
}

#[derive(Debug, Default, Serialize)]
struct Report<'a> {
    store: &'a str,
    snapshots: u64,
    bases: u64,
    deltas: u64,
    tensor_bytes: u64,
    stored_bytes: u64,
    ratio: Option<f64>,
    /// Bytes of blobs. Part of `stored_bytes`, as is `overhead_bytes`: headers, indexes and padding.
    blob_bytes: u64,
    overhead_bytes: u64,
    /// Number of forgotten and replaced snapshots that chains need. Not part of `stored_bytes`.
    kept_snapshots: u64,
    kept_bytes: u64,
    codecs: BTreeMap<String, CodecCounts>,
    roles: BTreeMap<String, RoleCounts>,
    /// Rounding reports by role, over all snapshots.
    rounding: BTreeMap<String, RoundingJson>,
    #[serde(skip)]
    rounding_reports: BTreeMap<String, RoundingReport>,
    /// Decisions of the policies, by step.
    decisions: Vec<DecisionRow>,
    /// Decisions of the precision `auto`, by step.
    precisions: Vec<PrecisionRow>,
    /// Steps that cannot be read. Only counted in `snapshots`, `bases` and `deltas`.
    unreadable: Vec<UnreadableStep>,
    #[serde(skip)]
    problems: Vec<String>,
}

#[derive(Debug, Serialize)]
struct DecisionRow {
    step: u64,
    kind: &'static str,
    decision: DecisionJson,
}

#[derive(Debug, Serialize)]
struct PrecisionRow {
    step: u64,
    precision: PrecisionJson,
}

#[derive(Debug, Default, Serialize)]
struct RoleCounts {
    tensor_bytes: u64,
    stored_bytes: u64,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    store.history().run()?;
    let progress = Progress::start(&store, "reading indexes");
    let mut report = Report { store: &args.store, ..Report::default() };
    let mut kept = BTreeSet::new();
    let mut code = 0;
    for info in store.snapshots()? {
        report.snapshots += 1;
        match info.record.kind() {
            SnapshotKind::Base => report.bases += 1,
            SnapshotKind::Delta => report.deltas += 1,
        }
        let step = info.record.step;
        if let Err(error) = report.add_step(&store, step, &mut kept) {
            if !error.is_unreadable() {
                return Err(error);
            }
            code = code_with(code, &error);
            report.problems.push(format!("step {step} cannot be read: {error}"));
            report.unreadable.push(UnreadableStep::of(step, &error));
        }
    }
    report.ratio = ratio(report.tensor_bytes, report.stored_bytes);
    report.rounding = report.rounding_reports.iter().map(|(role, rounding)| (role.clone(), RoundingJson::of(rounding))).collect();
    let pages = report.codecs.values().map(|codec| codec.stored_bytes).fold(report.blob_bytes, u64::saturating_add);
    report.overhead_bytes = report.stored_bytes.saturating_sub(pages);
    drop(progress);
    let text = report.describe();
    Ok(Outcome::new(&report, text)?.with_code(code))
}

impl Report<'_> {
    /// Adds a step. Reads its indexes before it counts any of its bytes.
    fn add_step(&mut self, store: &Store, step: u64, kept: &mut BTreeSet<Id>) -> Result<()> {
        let snapshot = store.snapshot(step)?;
        if let Some(decision) = snapshot.inspect().decision() {
            let kind = snapshot.record().kind().name();
            self.decisions.push(DecisionRow { step, kind, decision: DecisionJson::of(&decision) });
        }
        if let Some(decision) = snapshot.inspect().precision() {
            self.precisions.push(PrecisionRow { step, precision: PrecisionJson::of(&decision) });
        }
        for link in snapshot.inspect().chain() {
            if link.record.status != SnapshotStatus::Live && kept.insert(link.record.id) {
                self.kept_snapshots += 1;
                self.kept_bytes = self.kept_bytes.saturating_add(link.stored_bytes);
            }
        }
        let indexes = store.block_on(snapshot.inspect().indexes())?;
        for tensor in snapshot.rounding()? {
            let of_role = self.rounding_reports.entry(tensor.role).or_default();
            *of_role = of_role.and(tensor.total);
        }
        self.add(&snapshot, indexes.iter().map(|(_, index)| index.as_ref()))
    }

    fn add<'i>(&mut self, snapshot: &Snapshot, indexes: impl Iterator<Item = &'i CaskIndex>) -> Result<()> {
        let manifest = snapshot.manifest();
        self.tensor_bytes = self.tensor_bytes.saturating_add(manifest.tensor_bytes);
        self.stored_bytes = self.stored_bytes.saturating_add(manifest.stored_bytes());
        // Chunks and bytes in casks, by tensor.
        let mut found: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        let mut stored: BTreeMap<String, u64> = BTreeMap::new();
        for index in indexes {
            for tensor in cask::tensors(index)? {
                for (codec, counts) in &tensor.codecs {
                    self.codecs.entry(codec.clone()).or_default().add(counts.chunks, counts.decoded_bytes, counts.stored_bytes);
                }
                let chunks: u64 = tensor.codecs.values().map(|counts| counts.chunks).sum();
                let seen = found.entry(tensor.name.clone()).or_default();
                *seen = (seen.0 + chunks, seen.1.saturating_add(tensor.decoded_bytes));
                *stored.entry(tensor.name).or_default() += tensor.stored_bytes;
            }
            self.blob_bytes = cask::blobs(index).iter().map(|blob| blob.bytes).fold(self.blob_bytes, u64::saturating_add);
        }
        for tensor in snapshot.tensors().iter().filter(|tensor| tensor.alias_of.is_none()) {
            let elements = tensor.shape.iter().fold(1, |product: u64, &extent| product.saturating_mul(extent));
            let bytes = tensor.dtype.byte_count(elements).unwrap_or(u64::MAX);
            let role = self.roles.entry(tensor.role.clone()).or_default();
            role.tensor_bytes = role.tensor_bytes.saturating_add(bytes);
            role.stored_bytes = role.stored_bytes.saturating_add(stored.get(&tensor.name).copied().unwrap_or(0));
            // An unchanged shard is in no cask.
            let (seen_chunks, seen_bytes) = found.get(&tensor.name).copied().unwrap_or_default();
            let chunks = snapshot.inspect().chunks_of(&tensor.name, &Slice::all())?.saturating_sub(seen_chunks);
            if chunks > 0 {
                self.codecs.entry("unchanged".to_owned()).or_default().add(chunks, bytes.saturating_sub(seen_bytes), 0);
            }
        }
        Ok(())
    }

    fn describe(&self) -> Text {
        let mut text = Text::default();
        text.fields(&[
            (
                "snapshots",
                format!("{} ({}, {})", self.snapshots, counted(self.bases, "base", "bases"), counted(self.deltas, "delta", "deltas")),
            ),
            ("tensors", human_bytes(self.tensor_bytes)),
            ("stored", human_bytes(self.stored_bytes)),
            ("ratio", human_ratio(self.ratio)),
            ("blobs", human_bytes(self.blob_bytes)),
            ("overhead", human_bytes(self.overhead_bytes)),
            ("kept", format!("{} in {}", human_bytes(self.kept_bytes), counted(self.kept_snapshots, "older snapshot", "older snapshots"))),
        ]);
        if !self.problems.is_empty() {
            text.line("");
            self.problems.iter().for_each(|problem| text.line(problem));
            text.line("run `tensorcask verify` to find all damage; the other tables leave these steps out");
        }
        let codecs: Vec<Vec<String>> = self
            .codecs
            .iter()
            .map(|(codec, counts)| {
                let bytes = [counts.decoded_bytes, counts.stored_bytes, counts.saved_bytes].map(human_bytes);
                // The name reads as lossy, but this codec keeps every bit.
                let name = if codec == "tc.rounded" { "tc.rounded (lossless)".to_owned() } else { codec.clone() };
                [name, counts.chunks.to_string()].into_iter().chain(bytes).collect()
            })
            .collect();
        text.line("");
        text.table(&["codec", ">chunks", ">decoded", ">stored", ">saved"], &codecs);
        let bytes = |counts: &RoleCounts| [counts.tensor_bytes, counts.stored_bytes].map(human_bytes);
        let roles = self.roles.iter().map(|(role, counts)| std::iter::once(role.clone()).chain(bytes(counts)).collect());
        let roles: Vec<Vec<String>> = roles.collect();
        text.line("");
        text.table(&["role", ">tensors", ">stored"], &roles);
        if !self.rounding.is_empty() {
            text.line("");
            self.rounding.iter().for_each(|(role, rounding)| text.line(format!("{role}, rounded: {}", rounding.line())));
        }
        if !self.decisions.is_empty() {
            text.line("");
            let cells = |row: &DecisionRow| [row.step.to_string(), row.kind.to_owned()].into_iter().chain(row.decision.cells()).collect();
            let rows: Vec<Vec<String>> = self.decisions.iter().map(cells).collect();
            text.table(&[">step", "kind", "why", ">after base", ">delta, estimated", ">base, estimated"], &rows);
        }
        if !self.precisions.is_empty() {
            text.line("");
            let rows: Vec<Vec<String>> = self.precisions.iter().map(|row| row.precision.cells(row.step)).collect();
            text.table(&PrecisionJson::HEADINGS, &rows);
        }
        text
    }
}
