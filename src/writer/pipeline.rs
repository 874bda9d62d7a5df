//! The save pipeline: encodes one state and uploads its casks.
//!
//! ```text
//! for each window of units
//!   encode_window            base chunks -> rounding -> check of changed rows -> encode_unit
//!   SaveRun::append_window   record -> append and upload -> next base
//! for each cask: blobs, index
//! ```
//!
//! A unit is the chunks of one parameter at the same place (see [`schedule`](super::schedule)). All casks are open at
//! once. [`encode_window`] changes nothing, so windows can be encoded ahead of the upload. [`SaveRun::append_window`]
//! takes the windows in order. The pipeline commits nothing: casks that no log entry names do not exist for readers.
//!
//! Memory beyond the state: the base (as [`BaseKeeping`] says), one window, its base chunks, and upload parts.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::base_cache::{BaseCache, NextBase, NextChunk, key_of};
use super::cask_writer::{CaskWriter, Destination, EncodeOptions};
use super::changed_rows::{ChangedRows, NextRows};
use super::choices::Choices;
use super::input::{ChosenSettings, SaveInput, label};
use super::layout::{LayoutTensor, StateLayout};
use super::numbered::NumberedParams;
use super::pace::{ObjectiveReport, Pace, PacedSave};
use super::parent::Parent;
use super::plan::SavePlan;
use super::rounding::RoundingRecord;
use super::schedule::{Entry, Window};
use super::statistics::StatisticsRecord;
use super::unit::UnitResult;
use super::window::{EncodedWindow, WindowChunks, encode_window};
use super::{BaseKeeping, FiniteCheck, WriterOptions};
use crate::chain::{Policy, SaveTimes, content_digests, milliseconds};
use crate::codec::{Objective, ObjectiveSetting};
use crate::precision::Setting;
use crate::store::{PartBudget, Upload, Work, concurrently};
use crate::wire::{CaskRef, ChunkStatistics, Digest, Directory, ErrorsFile, SnapshotKind, blob_slot};
use crate::{AheadUploads, Error, Precision, Result, Store, boxed};

/// Maximum number of casks that are published at once.
const MAX_CASKS_AT_ONCE: usize = 8;

/// Encodes and uploads one state at a time, and keeps what the next delta needs.
#[derive(Debug)]
pub(super) struct SavePipeline {
    pub store: Store,
    pub options: WriterOptions,
    /// Precision of the save under way: that of the options, or the one that `auto` chose.
    precision: Precision,
    /// The state that the next delta is made against.
    pub base: BaseCache,
    /// Rows that changed since that state, as far as callers named them.
    pub changed_rows: ChangedRows,
    /// Settings that were chosen for tensors whose rules allow several.
    settings: ChosenSettings,
    /// Weights of the parameters that an optimizer numbers.
    pub numbered: NumberedParams,
    /// Codecs that were chosen in earlier saves, by objective.
    choices: HashMap<Objective, Choices>,
    /// Measured rates, for the objective `auto`.
    pub pace: Pace,
    /// Second store that casks are sent to while they are being written.
    pub ahead: Option<AheadUploads>,
    /// Paths of the casks of the last save.
    written: Vec<String>,
}

/// Result of a run of the pipeline: all casks are uploaded or ready for one last request, and nothing is committed.
pub(super) struct UploadedCasks {
    pub casks: Vec<CaskRef>,
    /// Small casks that are still to be published. The commit sends them together with its other objects.
    pub unpublished: Vec<Upload>,
    /// Number of chunks by codec id, or `unchanged`.
    pub chunk_counts: BTreeMap<String, u64>,
    /// CRC-32 of decoded chunks, by tensor, shard and chunk.
    pub crcs: Vec<Vec<Vec<u32>>>,
    /// The state, if it becomes the base of the next delta and is kept.
    pub next_base: Option<NextBase>,
    pub rounding: RoundingRecord,
    /// Whether all parameters and moments are finite; `None` without a check.
    pub finite: Option<bool>,
    /// How long encoding took, and for how long it waited for uploads.
    pub times: SaveTimes,
    statistics: StatisticsRecord,
    /// Measurements and choices of the objective `auto`.
    pub objective: Option<ObjectiveReport>,
}

impl UploadedCasks {
    fn new(layout: &StateLayout<'_>, next_base: Option<NextBase>) -> Self {
        let crcs = layout.tensors.iter().map(|tensor| tensor.shards.iter().map(|_| Vec::new()).collect()).collect();
        Self {
            casks: vec![],
            unpublished: vec![],
            chunk_counts: BTreeMap::new(),
            crcs,
            next_base,
            rounding: RoundingRecord::default(),
            finite: None,
            times: SaveTimes::default(),
            statistics: StatisticsRecord::default(),
            objective: None,
        }
    }

    /// Publishes the casks that are still to be published, all at once.
    pub(super) async fn publish(&mut self) -> Result<()> {
        let begun = Instant::now();
        publish(std::mem::take(&mut self.unpublished)).await?;
        self.times.upload_ms = self.times.upload_ms.map(|ms| ms + milliseconds(begun.elapsed()));
        Ok(())
    }

    /// Content digests by role, for the stored form of the state's directory.
    pub(super) fn content(&self, directory: &[u8], store: &Store) -> Result<BTreeMap<String, Digest>> {
        let digest = Digest::of(directory);
        let directory = Directory::decode(Bytes::copy_from_slice(directory), digest, store.limits())?;
        let by_shard: Vec<&Vec<u32>> = self.crcs.iter().flatten().collect();
        content_digests(&directory, |shard, chunk| {
            let crc = by_shard.get(shard).and_then(|chunks| chunks.get(usize::try_from(chunk).ok()?));
            crc.copied().ok_or_else(|| Error::invalid("a chunk was not encoded"))
        })
    }
}

impl SavePipeline {
    pub(super) fn new(store: &Store, options: WriterOptions) -> Self {
        let store = store.clone();
        let base = BaseCache::default();
        let changed_rows = ChangedRows::default();
        let settings = ChosenSettings::default();
        let precision = options.precision.clone();
        Self {
            store,
            options,
            precision,
            base,
            changed_rows,
            settings,
            numbered: NumberedParams::default(),
            choices: HashMap::new(),
            pace: Pace::default(),
            ahead: None,
            written: vec![],
        }
    }

    /// Input of a save of this state against a parent, for stages that run before the save.
    pub(super) fn input<'a>(&'a self, step: u64, layout: &'a StateLayout<'a>, parent: Option<&'a Parent>) -> SaveInput<'a> {
        let Self { store, options, precision, changed_rows, settings, .. } = self;
        SaveInput { store, options, precision, changed_rows, settings, step, layout, parent }
    }

    /// Sets the precision of the next saves. Codecs that were chosen for numbers of another precision are forgotten.
    pub(super) fn set_precision(&mut self, precision: Precision) {
        if self.precision != precision {
            self.choices.clear();
            self.precision = precision;
        }
    }

    /// Chooses a setting for each tensor whose rule allows several: again for a base, and for a delta where none is known.
    pub(super) fn choose_settings(&mut self, step: u64, layout: &StateLayout<'_>, parent: Option<&Parent>) -> Result<()> {
        let mut settings = if parent.is_some() { std::mem::take(&mut self.settings) } else { ChosenSettings::default() };
        let chosen = settings.choose(&self.input(step, layout, parent));
        self.settings = settings;
        chosen
    }

    /// Gives the moments of numbered parameters the parameters of their weights. The layout holds the whole state: ranks that
    /// hold parts of it could find different pairs.
    #[boxed]
    pub(super) async fn pair_numbered(&mut self, step: u64, layout: &mut StateLayout<'_>, parent: Option<&Parent>) {
        let mut numbered = std::mem::take(&mut self.numbered);
        if let Err(error) = numbered.pair(&self.input(step, layout, parent), &self.base).await {
            // The save itself reads the parent again, and deals with its damage.
            tracing::warn!(%error, "the weights of numbered moments were not all looked for; the save goes on");
        }
        layout.give_params(&numbered.weights);
        // A base cannot prove all pairs.
        if parent.is_some() {
            numbered.warn_of_orphans(layout);
        }
        self.numbered = numbered;
    }

    /// Whether the pipeline keeps a state that is saved against this parent, as the base of the next delta.
    pub(super) fn keeps_state(&self, parent: Option<&Parent>) -> bool {
        self.becomes_base(parent) && self.options.base_cache != BaseKeeping::None
    }

    /// Whether the next delta is made against a state that is saved against this parent.
    pub(super) fn becomes_base(&self, parent: Option<&Parent>) -> bool {
        match self.options.policy {
            Policy::Full => false,
            Policy::Consecutive | Policy::Adaptive => true,
            Policy::OneShot => parent.is_none(),
            Policy::Intermittent { every } => parent.is_none() && every > 1,
        }
    }

    /// Rows of a state that is saved against this parent, if the state becomes the base of the next delta. Rows have hashes
    /// if no base is kept to compare them with.
    pub(super) fn next_rows(&self, layout: &StateLayout<'_>, parent: Option<&Parent>) -> Result<Option<NextRows>> {
        if !self.becomes_base(parent) {
            return Ok(None);
        }
        let is_lossless = |tensor: &LayoutTensor<'_>| {
            self.options.precision.of_tensor(tensor.rounding_role(), &tensor.description.name).setting == Setting::Lossless
        };
        let has_no_base = self.options.base_cache == BaseKeeping::None;
        NextRows::of(layout, |tensor| has_no_base && is_lossless(tensor)).map(Some)
    }

    /// Removes the casks of a save that was certainly not committed, from a local disk: it may be full, and nothing can be
    /// written to it until they are gone. An object store keeps them until garbage collection, since a program that saves
    /// may lack the permission to delete.
    pub(super) async fn discard_casks(&mut self) {
        let objects = self.store.objects();
        for path in std::mem::take(&mut self.written).into_iter().filter(|_| objects.local_folder().is_some()) {
            if let Err(error) = objects.delete(&path).await {
                tracing::warn!(%error, "a cask of the failed save could not be removed");
            }
        }
    }

    /// Encodes and uploads all casks of a state: as a delta against `parent`, or as a base.
    #[boxed]
    pub(super) async fn write_casks(&mut self, step: u64, layout: &StateLayout<'_>, parent: Option<&Parent>) -> Result<UploadedCasks> {
        let next_base = self.keeps_state(parent).then(|| NextBase::new(self.options.base_cache.clone()));
        self.input(step, layout, parent).check_codecs()?;
        self.input(step, layout, parent).check_tied()?;
        if parent.is_none() {
            self.input(step, layout, parent).warn_of_guesses();
        }
        self.choose_settings(step, layout, parent)?;
        let Self { store, options, precision, base, changed_rows, settings, choices, pace, ahead, written, .. } = self;
        written.clear();
        let input = SaveInput { store, options, precision, changed_rows, settings, step, layout, parent };
        let mut slots = layout.slots();
        let is_rounded = layout.tensors.iter().any(|tensor| input.precision(tensor).setting != Setting::Lossless);
        if is_rounded || options.statistics {
            // The blob of rounding errors, and that of statistics.
            slots.insert(blob_slot(layout.rank));
        }
        let kind = if parent.is_some() { SnapshotKind::Delta } else { SnapshotKind::Base };
        let (fixed, paced) = match options.objective {
            ObjectiveSetting::Fixed(objective) => (objective, None),
            ObjectiveSetting::Auto => (Objective::default(), Some(pace.begin(kind, layout.tensor_bytes))),
        };
        let budget = paced.as_ref().map_or_else(PartBudget::of_save, PacedSave::budget);
        let destination = Destination { store: input.store, ahead: ahead.as_ref(), budget };
        let options = EncodeOptions::new(input.options, fixed);
        let open = |slot| Ok((slot, CaskWriter::new(&destination, slot, options, layout.slot_bytes(slot))?));
        let casks = slots.into_iter().map(open).collect::<Result<_>>()?;
        let plan = SavePlan::new(&input)?;
        let mut uploaded = UploadedCasks::new(layout, next_base);
        uploaded.finite = options.finite.then_some(true);
        let mut run = SaveRun { input, plan: &plan, base, paced, casks, uploaded, written };
        let mut work = Work::plan(store, layout.tensor_bytes);
        let mut encoding = Duration::ZERO;
        let mut uploading = Duration::ZERO;
        for window in &plan.windows {
            let begun = Instant::now();
            let objective = run.paced.as_mut().map_or(fixed, PacedSave::next_objective);
            let choices = choices.entry(objective).or_default();
            let chunks = WindowChunks::of(&plan, window).prefer(&input, &plan, window, choices)?;
            let options = EncodeOptions { objective, ..options };
            let encoded = encode_window(&input, run.base, options, run.uploaded.next_base.as_ref(), chunks).await?;
            run.append_window(window, encoded, choices)?;
            let encoded = Instant::now();
            if let Some(paced) = &mut run.paced {
                paced.add_window(plan.decoded_bytes(window), encoded.duration_since(begun));
            }
            run.send().await?;
            work.add(plan.decoded_bytes(window));
            encoding = encoding.saturating_add(encoded.duration_since(begun));
            uploading = uploading.saturating_add(encoded.elapsed());
        }
        let begun = Instant::now();
        let mut uploaded = run.finish().await?;
        uploading = uploading.saturating_add(begun.elapsed());
        let encode_ms = Some(milliseconds(encoding));
        let upload_ms = Some(milliseconds(uploading));
        uploaded.times = SaveTimes { encode_ms, upload_ms, ..SaveTimes::default() };
        Ok(uploaded)
    }
}

/// One run of the pipeline.
struct SaveRun<'a> {
    input: SaveInput<'a>,
    plan: &'a SavePlan,
    base: &'a mut BaseCache,
    /// Choice of the objective of each window, if it is `auto`.
    paced: Option<PacedSave<'a>>,
    /// Casks by slot.
    casks: BTreeMap<u32, CaskWriter>,
    uploaded: UploadedCasks,
    written: &'a mut Vec<String>,
}

impl SaveRun<'_> {
    /// Records an encoded window, appends its chunks to their casks, and takes them into the next base.
    fn append_window(&mut self, window: &Window, mut encoded: EncodedWindow<'_>, choices: &mut Choices) -> Result<()> {
        let input = self.input;
        let mut kept = Vec::new();
        for entry in window.in_cask_order() {
            let (Entry::Chunk { shard: position, .. } | Entry::EmptyShard(position)) = entry;
            let shard = &self.plan.shards[position];
            let Some(cask) = self.casks.get_mut(&shard.slot) else { continue };
            let Entry::Chunk { unit, member, .. } = entry else {
                cask.begin_shard(label(input.view(shard.first)))?;
                continue;
            };
            let at = shard.chunk(window.units[unit].chunk);
            let Some((rounded, UnitResult { chosen, standalone, statistics, non_finite })) = encoded.take(unit, member) else {
                return Err(input.locate(at, Error::invalid("a chunk was not encoded")));
            };
            choices.learn(&shard.family, rounded.data.len() as u64, &chosen);
            if let Some(paced) = &mut self.paced {
                paced.add_chunk(rounded.data.len() as u64, &chosen);
            }
            let encoded = chosen.encoded;
            let codec = encoded.codec.as_ref().map_or("unchanged", |codec| codec.id.as_str());
            *self.uploaded.chunk_counts.entry(codec.to_owned()).or_default() += 1;
            self.uploaded.crcs[at.tensor][at.shard].push(encoded.crc);
            self.uploaded.rounding.record(&input, at, rounded.errors)?;
            if let Some(found) = non_finite {
                if input.options.check == FiniteCheck::Refuse {
                    let elements = input.grid(at)?.elements(at.chunk);
                    return Err(input.locate(at, found.refusal(elements.end.saturating_sub(elements.start))));
                }
                self.uploaded.finite = Some(false);
            }
            if let Some(measured) = statistics {
                self.uploaded.statistics.record(&input, at, measured)?;
            }
            let crc = encoded.crc;
            cask.append(&input.place(at), encoded)?;
            if self.uploaded.next_base.is_some() {
                let key = key_of(input.view(at));
                // A unit of a later window may need this base chunk: its codecs use this shard as a partner.
                let is_done = !self.plan.partners_elsewhere.contains(&position);
                let memory = if is_done { self.base.take(&key, at.chunk) } else { None };
                kept.push(NextChunk { key, chunk: at.chunk, data: rounded.data, encoded: standalone, crc, memory });
            }
        }
        match &mut self.uploaded.next_base {
            Some(next) => next.add(kept),
            None => Ok(()),
        }
    }

    /// Uploads what was appended to the casks.
    async fn send(&mut self) -> Result<()> {
        for cask in self.casks.values_mut() {
            cask.send().await?;
        }
        Ok(())
    }

    /// Appends the blobs and the indexes, by slot, and publishes the large casks, all at once. If nothing in a slot
    /// changed, a delta has no cask for it.
    async fn finish(mut self) -> Result<UploadedCasks> {
        let mut large = Vec::new();
        for (slot, mut cask) in std::mem::take(&mut self.casks) {
            for (rank, name, bytes) in self.blobs_of_slot(slot)? {
                cask.append_blob(rank, &name, bytes).await?;
            }
            if !cask.is_empty() || self.input.parent.is_none() {
                let (cask, upload) = cask.seal().await?;
                self.written.push(cask.path());
                match upload.is_one_request() {
                    true => self.uploaded.unpublished.push(upload),
                    false => large.push(upload),
                }
                self.uploaded.casks.push(cask);
            }
        }
        publish(large).await?;
        self.uploaded.objective = self.paced.map(|paced| paced.report());
        if let Some(report) = &self.uploaded.objective {
            tracing::info!(step = self.input.step, "objective auto: {report}");
        }
        Ok(self.uploaded)
    }

    /// Blobs of a slot by rank and name: those of the caller, the errors of all tensors that were rounded, and statistics.
    fn blobs_of_slot(&mut self, slot: u32) -> Result<Vec<(u32, String, Bytes)>> {
        let layout = self.input.layout;
        let own = layout.blobs.iter().filter(|blob| blob_slot(blob.rank) == slot);
        let mut blobs: Vec<(u32, String, Bytes)> =
            own.map(|blob| (blob.rank, blob.name.to_string(), Bytes::copy_from_slice(&blob.data))).collect();
        if blob_slot(layout.rank) == slot {
            let own = [
                (ErrorsFile::BLOB, self.uploaded.rounding.take_blob()?),
                (ChunkStatistics::BLOB, self.uploaded.statistics.take_blob(self.input.store.limits())?),
            ];
            for (name, bytes) in own {
                blobs.extend(bytes.map(|bytes| (layout.rank, name.to_owned(), Bytes::from(bytes))));
            }
            blobs.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        }
        Ok(blobs)
    }
}

/// Publishes casks, all at once. If one fails, waits for the others: each removes what it has written of its cask.
pub(super) async fn publish(uploads: Vec<Upload>) -> Result<()> {
    let finish = |upload: Upload| async move { Ok(upload.finish().await) };
    concurrently(MAX_CASKS_AT_ONCE, uploads.into_iter().map(finish)).await?.into_iter().collect()
}

impl EncodeOptions {
    fn new(options: &WriterOptions, objective: Objective) -> Self {
        let &WriterOptions { verify_after_encode, alignment_exponent, statistics, check, .. } = options;
        let finite = statistics || check != FiniteCheck::Off;
        Self { objective, verify_after_encode, alignment_exponent, statistics, finite }
    }
}
