//! One save: chunks in windows of bounded size, encoded in parallel, streamed up in order, then committed.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;

use super::base::{NextBase, Parent, ShardKey, Wanted};
use super::commit::{Commit, Prepared, is_damage};
use super::estimate::estimate;
use super::hints::Hints;
use super::layout::{LayoutTensor, StateLayout};
use super::*;
use crate::chain::{Reason, content_digests};
use crate::codec::{Candidate, Chunk, ChunkKind, CodecRef, EncodedChunk, Objective, Partner, Registry, encode_given};
use crate::commit::Age;
use crate::container::CaskEncoder;
use crate::limits::zeroed;
use crate::parallel;
use crate::precision::{Bounded, Rounded, round};
use crate::reader::ChunkItem;
use crate::store::{Ahead, Upload};
use crate::tensor::ChunkGrid;
use crate::wire::{CaskRef, ChunkErrors, Directory, ErrorsFile, ShardErrors, blob_slot};
use crate::{Blob, Dtype, Setting, TensorView, boxed};

/// Bytes of tensors that are encoded at once, unless one chunk is larger.
const WINDOW_BYTES: u64 = 32 << 20;
/// How often a save begins again because the store was changed from outside.
const ATTEMPTS: u32 = 3;

/// A chunk to encode.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job {
    pub tensor: usize,
    pub shard: usize,
    pub chunk: u64,
    /// The tensor's number in the parent's directory, if the parent has the shard.
    pub base: Option<usize>,
}

/// What encodes and uploads: a store, options, and the base that deltas are made against.
#[derive(Debug)]
pub(super) struct Saver {
    pub store: Store,
    pub options: WriterOptions,
    pub base: BaseCache,
    pub hints: Hints,
    /// Where casks go, too.
    pub ahead: Option<Ahead>,
}

/// What the save knows when all casks are up.
pub(super) struct Written {
    pub casks: Vec<CaskRef>,
    pub chunks: BTreeMap<String, u64>,
    /// CRC-32 of decoded chunks, by tensor, shard and chunk.
    pub crcs: Vec<Vec<Vec<u32>>>,
    /// The state, if the snapshot becomes the next base.
    pub kept: Option<NextBase>,
    /// Roles of tensors whose bases others need, too.
    held_roles: BTreeSet<&'static str>,
    /// Errors of the shards that were rounded.
    errors: Vec<ShardErrors>,
    /// The same, summed up.
    pub rounding: Option<RoundingReport>,
}

impl Written {
    /// Takes down how far a chunk is from what was saved.
    fn note_errors(&mut self, setting: Setting, job: Job, view: &TensorView<'_>, grid: ChunkGrid, rounded: &Rounded<'_>) {
        let Some(errors) = rounded.errors else { return };
        let rect = view.rect();
        let is_open =
            self.errors.last().is_some_and(|last| last.tensor == view.name() && last.offset == rect.offset && last.shape == rect.shape);
        if !is_open {
            let (offset, shape) = (rect.offset.clone(), rect.shape.clone());
            self.errors.push(ShardErrors { tensor: view.name().to_owned(), offset, shape, setting: setting.to_string(), chunks: vec![] });
        }
        if let Some(shard) = self.errors.last_mut() {
            shard.chunks.push(ChunkErrors { chunk: job.chunk, ..errors });
        }
        let elements = grid.elements(job.chunk);
        let report = RoundingReport::of_chunk(&errors, elements.end.saturating_sub(elements.start));
        self.rounding = Some(self.rounding.unwrap_or_default().and(report));
    }

    /// Content digests of a layout that is whole.
    fn content(&self, directory: &[u8], store: &Store) -> Result<BTreeMap<String, Digest>> {
        let digest = Digest::of(directory);
        let directory = Directory::decode(bytes::Bytes::copy_from_slice(directory), digest, store.limits())?;
        let flat: Vec<&Vec<u32>> = self.crcs.iter().flatten().collect();
        content_digests(&directory, |shard, chunk| {
            let crc = flat.get(shard).and_then(|chunks| chunks.get(usize::try_from(chunk).ok()?));
            crc.copied().ok_or_else(|| Error::invalid("a chunk was not encoded"))
        })
    }
}

impl Writer {
    /// Saves a state: all its tensors (or all shards of them), its blobs, and what the user says of it.
    ///
    /// Encoding runs on rayon's pool, called from this task; uploads go on meanwhile on a multi-threaded runtime. When
    /// this returns `Ok`, the snapshot is durable. Memory beyond the state: the base (unless
    /// [`BaseKeeping::None`]), a window of 32 MiB, at most five upload parts, and one blob.
    pub async fn save(&mut self, step: u64, tensors: &[TensorView<'_>], blobs: &[Blob<'_>], metadata: &Metadata) -> Result<Saved> {
        self.check_usable()?;
        check_user(metadata)?;
        let layout = StateLayout::new(tensors, blobs, self.saver.store.limits())?;
        let saved = self.save_layout(step, &layout, metadata).await;
        self.stop_if_final(&saved);
        saved
    }

    #[boxed]
    async fn save_layout(&mut self, step: u64, layout: &StateLayout<'_>, metadata: &Metadata) -> Result<Saved> {
        self.saver.hints.note(layout);
        let mut refusal: Option<Error> = None;
        for _ in 0..ATTEMPTS {
            let (mut parent, mut decision) = self.parent(step).await?;
            if refusal.is_some() && parent.is_some() {
                (parent, decision.reason) = (None, Reason::BrokenParent);
            }
            self.judge(layout, &mut parent, &mut decision).await?;
            let keep = self.saver.keeps(parent.is_none());
            let error = match self.attempt(step, layout, parent.as_ref(), decision, keep, metadata).await {
                Ok(Commit::Done(saved)) => return Ok(saved),
                Ok(Commit::Stale(stale)) if stale.replaced => {
                    self.begin_anew(&stale.error).await?;
                    stale.error
                }
                Ok(Commit::Stale(stale)) => stale.error,
                Ok(Commit::ParentLost(error)) => error,
                Err(error) if parent.is_some() && is_damage(&error) => error,
                Err(error) => {
                    if keep {
                        // Shards of the old base may have been released.
                        self.saver.base.clear();
                    }
                    return Err(error);
                }
            };
            self.saver.base.clear();
            tracing::warn!(%error, "saving a base instead");
            refusal = Some(error);
        }
        let cause = refusal.unwrap_or_else(|| Error::invalid("no attempt was made"));
        let message = format!("the store changed during each of {ATTEMPTS} attempts to save step {step}: {}", cause.message());
        Err(Error::new(ErrorKind::Conflict, message).object(self.saver.store.url()).source(cause))
    }

    /// Gives up a delta that would save too little, or whose parent cannot be read.
    #[boxed]
    async fn judge(&self, layout: &StateLayout<'_>, parent: &mut Option<Parent>, decision: &mut Decision) -> Result<()> {
        let (Policy::Adaptive, Some(base)) = (self.saver.options.policy, &parent) else { return Ok(()) };
        match estimate(&self.saver, layout, base).await {
            Ok(found) => {
                if found.is_too_large() {
                    (*parent, decision.reason) = (None, Reason::LargeDelta);
                }
                decision.estimate = Some(found);
            }
            Err(error) if is_damage(&error) => {
                tracing::warn!(%error, "no delta can be made; saving a base instead");
                (*parent, decision.reason) = (None, Reason::BrokenParent);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Encodes, uploads, and tries to commit.
    #[boxed]
    async fn attempt(
        &mut self,
        step: u64,
        layout: &StateLayout<'_>,
        parent: Option<&Parent>,
        decision: Decision,
        keep: bool,
        metadata: &Metadata,
    ) -> Result<Commit> {
        let age = Age::start();
        let written = self.saver.write_casks(layout, parent, keep).await?;
        let directory = layout.directory()?;
        let prepared = Prepared {
            content: written.content(&directory, &self.saver.store)?,
            directory,
            casks: written.casks,
            tensor_bytes: layout.tensor_bytes,
            blobs: Some(&layout.blobs),
            chunks: written.chunks,
            rounding: written.rounding,
            decision,
            age,
        };
        let committed = self.commit(step, parent, &prepared, metadata).await?;
        if let Commit::Done(saved) = &committed {
            if let Some(kept) = written.kept {
                self.saver.base.promote(saved.id, kept);
            }
            if self.saver.becomes_base(parent.is_none()) {
                self.saver.hints.start(saved.id, layout);
            }
        }
        Ok(committed)
    }
}

impl Saver {
    pub(super) fn new(store: &Store, options: WriterOptions) -> Self {
        Self { store: store.clone(), options, base: BaseCache::default(), hints: Hints::default(), ahead: None }
    }

    /// Whether what is being saved is to be kept.
    pub(super) fn keeps(&self, is_base: bool) -> bool {
        self.becomes_base(is_base) && self.options.base_cache != BaseKeeping::None
    }

    /// Whether the next delta will be made against what is being saved.
    fn becomes_base(&self, is_base: bool) -> bool {
        match self.options.policy {
            Policy::Full => false,
            Policy::Consecutive => true,
            Policy::OneShot | Policy::Adaptive => is_base,
            Policy::Intermittent { every } => is_base && every > 1,
        }
    }

    /// Rows of a job's chunk that may differ from its base, where the caller said so.
    pub(super) fn changed_rows(&self, job: Job, layout: &StateLayout<'_>, parent: Option<&Parent>) -> Result<Option<Vec<u64>>> {
        let (Some(_), Some(parent)) = (job.base, parent) else { return Ok(None) };
        // Rounded by what else is in the chunk, rows that did not change may differ from the base all the same.
        if !self.bounded(&layout.tensors[job.tensor]).setting.is_elementwise() {
            return Ok(None);
        }
        self.hints.of_chunk(parent.snapshot.record().id, layout.tensors[job.tensor].shards[job.shard], job.chunk)
    }

    /// Encodes and uploads all casks.
    #[boxed]
    pub(super) async fn write_casks(&mut self, layout: &StateLayout<'_>, parent: Option<&Parent>, keep: bool) -> Result<Written> {
        let kept = keep.then(|| NextBase::new(self.options.base_cache.clone()));
        let crcs = layout.tensors.iter().map(|t| t.shards.iter().map(|_| Vec::new()).collect()).collect();
        let roles: BTreeSet<&str> = layout.tensors.iter().map(|tensor| tensor.description.role.as_str()).collect();
        let needs = roles.into_iter().flat_map(|role| self.store.registry().partner_roles(role));
        let held_roles = needs.filter(|need| need.base).map(|need| need.role).collect();
        let mut written = Written { casks: vec![], chunks: BTreeMap::new(), crcs, kept, held_roles, errors: vec![], rounding: None };
        let mut slots = layout.slots();
        if layout.tensors.iter().any(|tensor| self.bounded(tensor).setting != Setting::Lossless) {
            slots.insert(blob_slot(layout.rank));
        }
        for slot in slots {
            let mut encoder = CaskEncoder::new(Id::random()?, self.options.alignment_exponent)?.with_limits(self.store.limits().clone());
            let tensors = layout.tensors.iter().filter(|t| t.slot == slot).flat_map(|t| &t.shards).map(|s| s.data().len() as u64);
            let blobs = layout.blobs.iter().filter(|blob| blob_slot(blob.rank) == slot).map(|blob| blob.data.len() as u64);
            let expected = tensors.chain(blobs).sum();
            let path = format!("casks/{}.cask", encoder.id());
            let mut upload = Upload::new(&self.store, path, expected).sent_ahead(self.ahead.as_ref(), expected);
            self.encode_slot(slot, layout, parent, &mut encoder, &mut upload, &mut written).await?;
            // A delta in which nothing of this slot changed has no cask for it.
            if encoder.is_empty() && parent.is_some() {
                continue;
            }
            let (rest, receipt) = encoder.finish()?;
            upload.push(rest).await?;
            upload.finish().await?;
            written.casks.push(receipt.in_slot(slot));
        }
        Ok(written)
    }

    #[boxed]
    async fn encode_slot(
        &mut self,
        slot: u32,
        layout: &StateLayout<'_>,
        parent: Option<&Parent>,
        encoder: &mut CaskEncoder,
        upload: &mut Upload,
        written: &mut Written,
    ) -> Result<()> {
        let mut jobs = Vec::new();
        let mut window = 0u64;
        for (at, tensor) in layout.tensors.iter().enumerate() {
            if tensor.slot != slot {
                continue;
            }
            for (shard, view) in tensor.shards.iter().enumerate() {
                let base = parent.and_then(|parent| parent.find(view));
                let grid = ChunkGrid::new(view.dtype(), &view.rect().shape)?;
                for chunk in 0..grid.chunk_count() {
                    let bytes = grid.bytes(chunk);
                    if window + (bytes.end - bytes.start) > WINDOW_BYTES && !jobs.is_empty() {
                        self.encode_window(&std::mem::take(&mut jobs), layout, parent, encoder, upload, written).await?;
                        window = 0;
                    }
                    window += bytes.end - bytes.start;
                    jobs.push(Job { tensor: at, shard, chunk, base });
                }
                if grid.chunk_count() == 0 && base.is_none() {
                    // The empty shard comes between chunks of its neighbours.
                    self.encode_window(&std::mem::take(&mut jobs), layout, parent, encoder, upload, written).await?;
                    window = 0;
                    encoder.tensor(view.name(), view.dtype(), view.shape())?;
                    encoder.shard(view.rect())?;
                }
            }
        }
        self.encode_window(&jobs, layout, parent, encoder, upload, written).await?;
        let mut blobs: Vec<(u32, &str, bytes::Bytes)> = Vec::new();
        for blob in layout.blobs.iter().filter(|blob| blob_slot(blob.rank) == slot) {
            blobs.push((blob.rank, &blob.name, bytes::Bytes::copy_from_slice(&blob.data)));
        }
        // The receipt of what was rounded; all other tensors of the rank come before.
        if blob_slot(layout.rank) == slot && !written.errors.is_empty() {
            let mut shards = std::mem::take(&mut written.errors);
            shards.sort_by(|a, b| (&a.tensor, &a.offset, &a.shape).cmp(&(&b.tensor, &b.offset, &b.shape)));
            blobs.push((layout.rank, ErrorsFile::BLOB, ErrorsFile::new(shards).encode()?.into()));
            blobs.sort_by_key(|(rank, name, _)| (*rank, *name));
        }
        for (rank, name, bytes) in blobs {
            encoder.blob(rank, name, bytes)?;
            upload.push(encoder.take_output()).await?;
        }
        Ok(())
    }

    #[boxed]
    async fn encode_window(
        &mut self,
        jobs: &[Job],
        layout: &StateLayout<'_>,
        parent: Option<&Parent>,
        encoder: &mut CaskEncoder,
        upload: &mut Upload,
        written: &mut Written,
    ) -> Result<()> {
        let (registry, objective) = (self.store.registry(), self.options.objective);
        let verify = self.options.verify_after_encode;
        let keep_encoded = written.kept.as_ref().is_some_and(NextBase::wants_encoded);
        // A window is much work without a wait: whoever runs this beside something else, such as a look for Ctrl-C, gets a turn here.
        tokio::task::yield_now().await;
        let bases = self.bases(jobs, layout, parent).await?;
        let rounded = jobs.par_iter().zip(&bases).map(|(job, base)| self.rounded(*job, layout, base.as_deref()));
        let rounded: Vec<Rounded<'_>> = parallel::run(|| rounded.collect::<Result<_>>())?;
        let partners = self.partners(jobs, layout, parent).await?;
        self.check_hints(jobs, &rounded, &bases, layout, parent).await?;
        let encoded = jobs.par_iter().zip(&rounded).zip(bases.par_iter().zip(&partners)).map(|((job, rounded), (base, partners))| {
            let tensor = &layout.tensors[job.tensor];
            let rows = if base.is_none() { self.changed_rows(*job, layout, parent)? } else { None };
            let known = Known {
                base: base.as_deref(),
                changed_rows: rows.as_deref(),
                partners: &borrowed(partners),
                given: rounded.given.as_ref(),
            };
            let encode = |known: Known<'_>, verify| encode_job(registry, objective, tensor, *job, &rounded.data, known, verify);
            let encoded = encode(known, verify)?;
            let alone = |codec: &CodecRef| registry.needs(codec, &tensor.description.role).is_empty();
            let kept = match keep_encoded {
                false => None,
                true if encoded.kind == ChunkKind::Absolute && encoded.codec.as_ref().is_some_and(alone) => Some(encoded.clone()),
                true => Some(encode(Known::default(), false)?),
            };
            Ok((encoded, kept))
        });
        let encoded: Vec<(EncodedChunk, Option<EncodedChunk>)> = parallel::run(|| encoded.collect::<Result<_>>())?;
        drop((bases, partners));
        for ((job, rounded), (chunk, kept)) in jobs.iter().zip(&rounded).zip(encoded) {
            let tensor = &layout.tensors[job.tensor];
            let view = tensor.shards[job.shard];
            let grid = ChunkGrid::new(view.dtype(), &view.rect().shape)?;
            written.note_errors(self.bounded(tensor).setting, *job, view, grid, rounded);
            if job.chunk == 0 {
                if job.shard == 0 {
                    encoder.tensor(view.name(), view.dtype(), view.shape())?;
                }
                encoder.shard(view.rect())?;
            }
            let kind = chunk.codec.as_ref().map_or("unchanged", |codec| codec.id.as_str()).to_owned();
            *written.chunks.entry(kind).or_default() += 1;
            let shard_crcs = &mut written.crcs[job.tensor][job.shard];
            shard_crcs.push(chunk.crc);
            encoder.chunk(chunk).map_err(|e| e.tensor(view.name()).chunk(job.chunk))?;
            let Some(next) = &mut written.kept else { continue };
            next.chunk(view.data().len(), &rounded.data, kept)?;
            if job.chunk + 1 == grid.chunk_count() {
                if !written.held_roles.contains(tensor.description.role.as_str()) {
                    self.base.release(&(view.name().to_owned(), view.rect().clone()));
                }
                next.shard(view, shard_crcs.clone());
            }
        }
        upload.push(encoder.take_output()).await
    }

    /// What is asked of the precision of a tensor.
    fn bounded(&self, tensor: &LayoutTensor<'_>) -> Bounded {
        self.options.precision.of(&tensor.description.role, &tensor.description.name)
    }

    /// A job's chunk as it will be stored.
    pub(super) fn rounded<'s>(&self, job: Job, layout: &'s StateLayout<'_>, base: Option<&[u8]>) -> Result<Rounded<'s>> {
        let tensor = &layout.tensors[job.tensor];
        let view = tensor.shards[job.shard];
        let bounded = self.bounded(tensor);
        let data = chunk_of(tensor, job)?;
        if bounded.setting == Setting::Lossless {
            return Ok(Rounded::lossless(data));
        }
        let locate = |e: Error| e.tensor(view.name()).chunk(job.chunk);
        let of_partner = |role: &str| {
            let (number, shard) = layout.partner(job.tensor, role, view.rect())?;
            Some((&layout.tensors[number], Job { tensor: number, shard, chunk: job.chunk, base: None }))
        };
        // A master lies beside its model weight as that will be stored.
        let model = match (bounded.setting, of_partner("model")) {
            (Setting::Remainder { .. }, Some((model, job))) if model.description.role != tensor.description.role => {
                Some((model.description.dtype, self.rounded_alone(job, layout)?))
            }
            _ => None,
        };
        let model = model.as_ref().map(|(dtype, rounded)| Partner { role: "model", dtype: *dtype, data: &rounded.data, base: None });
        let chunk = Chunk { base, partners: model.as_slice(), ..chunk_to_encode(tensor, job, data, None, &[])? };
        let mut rounded = round(bounded, &chunk).map_err(locate)?;
        let first =
            of_partner("exp_avg").filter(|(first, _)| tensor.description.role == "exp_avg_sq" && first.description.dtype == Dtype::F32);
        if let (Some(errors), Some((first, job))) = (&mut rounded.errors, first) {
            let stored = self.rounded_alone(job, layout)?;
            errors.update = crate::kernels::errors::updates([chunk_of(first, job)?, &stored.data], [data, &rounded.data]);
        }
        let Rounded { data: stored, given, errors } = rounded;
        let data = match stored {
            Cow::Owned(stored) => Cow::Owned(stored),
            Cow::Borrowed(_) => Cow::Borrowed(data),
        };
        Ok(Rounded { data, given, errors })
    }

    /// A chunk as it will be stored, of a tensor whose rounding needs no other.
    fn rounded_alone<'s>(&self, job: Job, layout: &'s StateLayout<'_>) -> Result<Rounded<'s>> {
        let tensor = &layout.tensors[job.tensor];
        let chunk = chunk_to_encode(tensor, job, chunk_of(tensor, job)?, None, &[])?;
        round(self.bounded(tensor), &chunk).map_err(|e| e.tensor(&tensor.description.name).chunk(job.chunk))
    }

    /// For each job the chunks of its partners, as far as the state has them and some codec can use them.
    #[boxed]
    pub(super) async fn partners<'s>(
        &'s self,
        jobs: &[Job],
        layout: &'s StateLayout<'_>,
        parent: Option<&Parent>,
    ) -> Result<Vec<Vec<OwnPartner<'s>>>> {
        let mut found: Vec<Vec<OwnPartner<'s>>> = Vec::with_capacity(jobs.len());
        // Partners of which the base is wanted, too: the job, the place in its list, and the job that reads it.
        let mut wanted = Vec::new();
        for (at, job) in jobs.iter().enumerate() {
            let tensor = &layout.tensors[job.tensor];
            let mut partners = Vec::new();
            for need in self.store.registry().partner_roles(&tensor.description.role) {
                let rect = tensor.shards[job.shard].rect();
                let Some((number, shard)) = layout.partner(job.tensor, need.role, rect) else { continue };
                let partner = &layout.tensors[number];
                let is_rounded = self.bounded(partner).setting != Setting::Lossless;
                if is_rounded && need.base {
                    // What is predicted of rounded moments is not worth its work.
                    continue;
                }
                let base = match (need.base, job.base, parent) {
                    (true, Some(ours), Some(parent)) => {
                        let theirs = parent.find(partner.shards[shard]);
                        theirs.filter(|_| parent.snapshot.newest().directory.partner(ours, need.role) == theirs)
                    }
                    _ => None,
                };
                let job = Job { tensor: number, shard, chunk: job.chunk, base };
                if base.is_some() {
                    wanted.push((at, partners.len(), job));
                }
                let data = if is_rounded { self.rounded_alone(job, layout)?.data } else { Cow::Borrowed(chunk_of(partner, job)?) };
                partners.push(OwnPartner { role: need.role, dtype: partner.description.dtype, data, base: None });
            }
            found.push(partners);
        }
        let jobs: Vec<Job> = wanted.iter().map(|(_, _, job)| *job).collect();
        for ((at, place, _), base) in wanted.into_iter().zip(self.bases(&jobs, layout, parent).await?) {
            if let Some(partner) = found.get_mut(at).and_then(|partners| partners.get_mut(place)) {
                partner.base = base;
            }
        }
        Ok(found)
    }

    /// For each job the chunk of the base, kept or read back; none where the parent does not have it.
    pub(super) async fn bases(
        &self,
        jobs: &[Job],
        layout: &StateLayout<'_>,
        parent: Option<&Parent>,
    ) -> Result<Vec<Option<Cow<'_, [u8]>>>> {
        let Some(parent) = parent else { return Ok(jobs.iter().map(|_| None).collect()) };
        let snapshot = parent.snapshot.record().id;
        let kept = |job: &Job| {
            job.base?;
            let view = layout.tensors[job.tensor].shards[job.shard];
            let key: ShardKey = (view.name().to_owned(), view.rect().clone());
            let grid = ChunkGrid::new(view.dtype(), &view.rect().shape).ok()?;
            self.base.chunk(&Wanted { snapshot, key: &key, grid, chunk: job.chunk }, self.store.registry())
        };
        let mut bases: Vec<Option<Cow<'_, [u8]>>> = parallel::run(|| jobs.par_iter().map(kept).collect());
        let mut items = Vec::new();
        for (job, base) in jobs.iter().zip(&mut bases) {
            let (Some(tensor), None) = (job.base, &base) else { continue };
            let view = layout.tensors[job.tensor].shards[job.shard];
            // What did not change is known without it.
            if self.changed_rows(*job, layout, Some(parent))?.is_some() {
                continue;
            }
            let rect = view.rect();
            let buffer = zeroed(chunk_of(&layout.tensors[job.tensor], *job)?.len(), "a base chunk")?;
            let Cow::Owned(out) = base.insert(Cow::Owned(buffer)) else { continue };
            items.push(ChunkItem { tensor, rect: rect.clone(), chunk: job.chunk, out });
        }
        if !items.is_empty() {
            parent.read(items).await?;
        }
        Ok(bases)
    }

    /// Compares what the caller says of changed rows with what is known: the base where it is kept, else the checksums of chunks in
    /// which nothing shall have changed. A row left out would make a snapshot that cannot be read.
    #[boxed]
    async fn check_hints(
        &self,
        jobs: &[Job],
        rounded: &[Rounded<'_>],
        bases: &[Option<Cow<'_, [u8]>>],
        layout: &StateLayout<'_>,
        parent: Option<&Parent>,
    ) -> Result<()> {
        let mut unchanged = Vec::new();
        for ((job, rounded), base) in jobs.iter().zip(rounded).zip(bases) {
            let (Some(number), tensor) = (job.base, &layout.tensors[job.tensor]) else { continue };
            let view = tensor.shards[job.shard];
            let Some(rows) = self.changed_rows(*job, layout, parent)? else { continue };
            match base {
                Some(base) => {
                    let chunk = chunk_to_encode(tensor, *job, &rounded.data, Some(base), &[])?;
                    let Some((row_bytes, _)) = chunk.rows() else { continue };
                    let pairs = chunk.data.chunks_exact(row_bytes).zip(base.chunks_exact(row_bytes)).zip(0u64..);
                    let mut changed = pairs.filter(|((ours, theirs), _)| ours != theirs).map(|(_, row)| row);
                    if let Some(row) = changed.find(|row| rows.binary_search(row).is_err()) {
                        return Err(left_out(&format!("row {row}"), view, job.chunk));
                    }
                }
                None if rows.is_empty() => unchanged.push((job, rounded, (number, view.rect().clone(), job.chunk))),
                None => {}
            }
        }
        let (Some(parent), false) = (parent, unchanged.is_empty()) else { return Ok(()) };
        let wanted: Vec<_> = unchanged.iter().map(|(_, _, wanted)| wanted.clone()).collect();
        let crcs = parent.snapshot.chunk_crcs(&wanted).await?;
        for ((job, rounded, _), crc) in unchanged.into_iter().zip(crcs) {
            if crc32fast::hash(&rounded.data) != crc {
                return Err(left_out("a row", layout.tensors[job.tensor].shards[job.shard], job.chunk));
            }
        }
        Ok(())
    }
}

/// The caller's account of changed rows is wrong.
fn left_out(row: &str, view: &TensorView<'_>, chunk: u64) -> Error {
    let message =
        format!("{row} of this chunk changed since the parent, but `changed_rows` leaves it out; give all rows that changed, or none");
    Error::invalid(message).tensor(view.name()).chunk(chunk)
}

/// A partner's chunk, and its base, which may have been read back.
pub(super) struct OwnPartner<'a> {
    role: &'static str,
    dtype: Dtype,
    data: Cow<'a, [u8]>,
    base: Option<Cow<'a, [u8]>>,
}

pub(super) fn borrowed<'a>(partners: &'a [OwnPartner<'_>]) -> Vec<Partner<'a>> {
    let borrow = |partner: &'a OwnPartner<'_>| Partner {
        role: partner.role,
        dtype: partner.dtype,
        data: &partner.data,
        base: partner.base.as_deref(),
    };
    partners.iter().map(borrow).collect()
}

/// The bytes of a job's chunk.
fn chunk_of<'a>(tensor: &LayoutTensor<'a>, job: Job) -> Result<&'a [u8]> {
    let view = tensor.shards[job.shard];
    let range = ChunkGrid::new(view.dtype(), &view.rect().shape)?.bytes(job.chunk);
    view.data().get(range.start as usize..range.end as usize).ok_or_else(|| Error::invalid("a chunk outside its shard").tensor(view.name()))
}

/// A job's chunk with this content, as codecs take it.
pub(super) fn chunk_to_encode<'a>(
    tensor: &'a LayoutTensor<'_>,
    job: Job,
    data: &'a [u8],
    base: Option<&'a [u8]>,
    partners: &'a [Partner<'a>],
) -> Result<Chunk<'a>> {
    let view = tensor.shards[job.shard];
    let grid = ChunkGrid::new(view.dtype(), &view.rect().shape)?;
    let elements = grid.elements(job.chunk);
    Ok(Chunk {
        role: &tensor.description.role,
        base,
        partners,
        row_elements: grid.row_elements(),
        ..Chunk::new(view.dtype(), elements.end - elements.start, data)
    })
}

/// What is known of a chunk beside its bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Known<'a> {
    base: Option<&'a [u8]>,
    changed_rows: Option<&'a [u64]>,
    partners: &'a [Partner<'a>],
    given: Option<&'a Candidate>,
}

fn encode_job(
    registry: &Registry,
    objective: Objective,
    tensor: &LayoutTensor<'_>,
    job: Job,
    data: &[u8],
    Known { base, changed_rows, partners, given }: Known<'_>,
    verify: bool,
) -> Result<EncodedChunk> {
    let view = tensor.shards[job.shard];
    let locate = |e: Error| e.tensor(view.name()).chunk(job.chunk);
    let chunk = Chunk { changed_rows, ..chunk_to_encode(tensor, job, data, base, partners).map_err(locate)? };
    let encoded = encode_given(registry, objective, &chunk, given, verify).map_err(locate)?;
    // Without a base, nothing can be unchanged or a delta, unless the caller knows what changed.
    if base.is_none() && changed_rows.is_none() && encoded.kind != ChunkKind::Absolute {
        return Err(locate(Error::invalid("a codec made a delta without a base")));
    }
    Ok(encoded)
}
