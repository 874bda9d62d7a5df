//! Where a state comes back from: the nearest place that has it whole.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rayon::prelude::*;
use tensorcask::wire::{DirectoryTensor, Id};
use tensorcask::{
    At, Blob, Dtype, Error, ErrorKind, Metadata, Rect, Result, Slice, Snapshot, SnapshotRecord, Status, Store, TensorRounding, TensorView,
};

use crate::arena::{Arena, Kept};
use crate::engine::Engine;
use crate::image::EXTENT_BYTES;
use crate::options::RunSpec;
use crate::place::RunPlace;
use crate::seen::Seen;
use crate::tier::open_epoch;

/// What served a restore.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// The raw state in the arena.
    Slot,
    /// The encoded snapshot in memory.
    Memory,
    /// A tier, by its number from 0 on, and its URL.
    Tier(usize, String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slot => f.write_str("memory (raw)"),
            Self::Memory => f.write_str("memory (encoded)"),
            Self::Tier(_, url) => f.write_str(url),
        }
    }
}

/// Something nearer, or newer, that could not be used.
#[derive(Debug)]
pub struct PassedOver {
    /// Where.
    pub source: Source,
    /// The step, if it is known.
    pub step: Option<u64>,
    /// Why.
    pub error: Error,
}

/// A tensor that was restored.
#[derive(Debug, Clone, PartialEq)]
pub struct RestoredTensor<'a> {
    /// The name.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// The global shape.
    pub shape: Vec<u64>,
    /// What of it is here: all of it from a snapshot, this rank's shard from a slot.
    pub rect: Rect,
    /// What it is to training.
    pub role: String,
    /// The parameter it belongs to.
    pub param: String,
    /// The first of this state that has the same bytes, by its place among the tensors: tied tensors are stored once.
    pub tied_to: Option<usize>,
    /// The elements, which tensors that are tied to each other share.
    pub data: Elements<'a>,
}

/// Bytes of a tensor that was restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Elements<'a> {
    /// In the arena.
    Borrowed(&'a [u8]),
    /// Read.
    Owned(Arc<Vec<u8>>),
    /// Where the caller wanted them: [`Engine::restore_into`].
    Placed,
}

impl Deref for Elements<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Owned(bytes) => bytes,
            Self::Placed => &[],
        }
    }
}

/// The caller's memory, which a restore fills.
pub trait Destination: Send {
    /// Told of a state before it is read: its tensors, its blobs, and what was said of it. An error ends the restore. Told again, of another
    /// state, if that one turns out to be damaged; what has been filled until then is worth nothing.
    fn prepare(&mut self, found: &Restored<'_>) -> Result<()>;

    /// Memory for each tensor of that state, in their order, of exactly its size; none for what is not wanted.
    fn buffers(&mut self) -> Result<Vec<Option<&mut [u8]>>>;
}

/// A state that was restored; every byte has been compared with its checksum.
#[derive(Debug)]
pub struct Restored<'a> {
    /// The step.
    pub step: u64,
    /// Where it came from.
    pub source: Source,
    /// What was tried before.
    pub passed_over: Vec<PassedOver>,
    /// The tensors.
    pub tensors: Vec<RestoredTensor<'a>>,
    /// The blobs; from a snapshot, those of all ranks.
    pub blobs: Vec<Blob<'a>>,
    /// What was said of it.
    pub metadata: Metadata,
    /// How long it took.
    pub seconds: f64,
}

/// What is wanted of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The tensor's shape.
    pub shape: Vec<u64>,
    /// What of it.
    pub rect: Rect,
}

/// A step that can be restored here, and from where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loadable {
    /// The step.
    pub step: u64,
    /// The nearest place that has it.
    pub source: Source,
}

impl Engine {
    /// Restores a step, or the newest, from the nearest place that has it whole: the arena, encoded memory, then the tiers in their order.
    /// What is damaged is passed over, for the newest also in favour of an older step, and told of. `NotFound` where there is nothing.
    ///
    /// From the arena, tensors are borrowed: they are this rank's own, and last until the next save. Several ranks agree on a step
    /// first ([`agree`](crate::agree)).
    pub fn restore(&self, at: impl Into<At>) -> Result<Restored<'_>> {
        self.search(Search::new(at.into(), Wanted::Everything))
    }

    /// As [`restore`](Self::restore), of these tensors alone, by name, and of each this part: what a job on another number of ranks needs.
    /// A raw state that does not have exactly these parts is passed over; of a snapshot, only what is needed is read. `InvalidArgument` if a
    /// tensor has another shape.
    pub fn restore_parts(&self, at: impl Into<At>, parts: &BTreeMap<String, Part>) -> Result<Restored<'_>> {
        self.search(Search::new(at.into(), Wanted::Parts(parts)))
    }

    /// As [`restore`](Self::restore), or [`restore_parts`](Self::restore_parts), straight into the caller's memory, which says where each tensor
    /// goes once it is known what there is. After an error, what that memory holds is worth nothing.
    ///
    /// ```no_run
    /// # use tensorcask::{Latest, Result};
    /// # use tensorcask_engine::{Destination, Engine, EngineOptions, Restored};
    /// struct Model {
    ///     weights: Vec<u8>,
    ///     wanted: Vec<bool>,
    /// }
    ///
    /// impl Destination for Model {
    ///     fn prepare(&mut self, found: &Restored<'_>) -> Result<()> {
    ///         self.wanted = found.tensors.iter().map(|tensor| tensor.name == "model.w").collect();
    ///         Ok(())
    ///     }
    ///
    ///     fn buffers(&mut self) -> Result<Vec<Option<&mut [u8]>>> {
    ///         let mut weights = Some(self.weights.as_mut_slice());
    ///         Ok(self.wanted.iter().map(|wanted| if *wanted { weights.take() } else { None }).collect())
    ///     }
    /// }
    ///
    /// # let engine = Engine::start(EngineOptions::new("s3://bucket/run42"))?;
    /// let mut model = Model { weights: vec![0; 4 << 20], wanted: Vec::new() };
    /// let found = engine.restore_into(Latest, None, &mut model)?;
    /// println!("step {} from {}", found.step, found.source);
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn restore_into(
        &self,
        at: impl Into<At>,
        parts: Option<&BTreeMap<String, Part>>,
        destination: &mut dyn Destination,
    ) -> Result<Restored<'_>> {
        let wanted = parts.map_or(Wanted::Everything, Wanted::Parts);
        self.search(Search { destination: Some(destination), ..Search::new(at.into(), wanted) })
    }

    fn search(&self, mut search: Search<'_>) -> Result<Restored<'_>> {
        let begun = Instant::now();
        let found = self.pool.install(|| self.runtime.block_on(self.find(&mut search)));
        for passed in &search.passed {
            tracing::warn!(run = self.spec.run, from = %passed.source, step = passed.step, error = %passed.error, "could not be restored");
        }
        let mut restored = found?;
        (restored.passed_over, restored.seconds) = (search.passed, begun.elapsed().as_secs_f64());
        tracing::info!(run = self.spec.run, step = restored.step, from = %restored.source, seconds = restored.seconds, "restored");
        Ok(restored)
    }

    async fn find(&self, search: &mut Search<'_>) -> Result<Restored<'_>> {
        let encoded = self.arena.as_ref().map(|arena| arena.encoded()).transpose()?.unwrap_or(0);
        let stores = self.spec.stores()?;
        if !self.stale {
            search.passed.extend(self.unasked.iter().map(Unasked::passed_over));
            if let Some(found) = self.newest_slot(search, |kept| kept.word.generation >= encoded)? {
                return Ok(found);
            }
            let mut is_readable = true;
            for epoch in self.run.epochs()?.into_iter().rev() {
                let store = open_epoch(&self.run, epoch)?;
                let tiers: Vec<(usize, &Store)> = stores.iter().enumerate().collect();
                if let Some(found) = self.read_store(&store, &tiers, Source::Memory, search).await? {
                    return Ok(found);
                }
                is_readable &= store.records().await.map_or_else(|e| e.kind() == ErrorKind::NotFound, |_| true);
            }
            is_readable &= !search.passed.iter().any(|passed| passed.source == Source::Memory && passed.error.kind() == ErrorKind::Corrupt);
            // Older than what is encoded, but whole; newer than what a tier has, if memory that is gone had more than that.
            let newest = match is_readable || search.at != At::Latest {
                true => None,
                false => newest_step(&stores, self.options.store_timeout).await,
            };
            let is_newer = |kept: &Kept| kept.word.generation < encoded && newest.is_none_or(|newest| kept.step >= newest);
            if let Some(found) = self.newest_slot(search, is_newer)? {
                return Ok(found);
            }
        }
        let order = newest_first(&stores, self.options.store_timeout).await;
        let mut tiers = order.into_iter().filter_map(|tier| Some((tier, stores.get(tier)?))).collect::<VecDeque<_>>();
        while let Some((tier, store)) = tiers.pop_front() {
            let source = Source::Tier(tier, store.url().to_owned());
            if let Some(found) = self.read_store(store, tiers.make_contiguous(), source, search).await? {
                if tier == 0 {
                    // What it has is what this job goes on from.
                    let latest = asked(store, self.options.store_timeout).await.ok().and_then(|asked| asked.latest);
                    Seen::update(&self.run, store.url(), |seen| seen.latest = latest.map_or(seen.latest, |latest| Some(latest.id)))?;
                }
                return Ok(found);
            }
        }
        // What went wrong says more than that nothing is left.
        let worst = search.passed.iter().position(|passed| passed.error.kind() != ErrorKind::NotFound);
        Err(match (worst.map(|at| search.passed.swap_remove(at).error), search.at) {
            (Some(error), _) => error,
            (None, At::Step(step)) => Error::not_found(format!("step {step} is neither in memory nor in a tier")).object(&self.spec.run),
            (None, At::Latest) => Error::not_found("nothing has been saved yet").object(&self.spec.run),
        })
    }

    /// The newest raw state that is wanted and whole.
    fn newest_slot(&self, search: &mut Search<'_>, wanted: impl Fn(&Kept) -> bool) -> Result<Option<Restored<'_>>> {
        let Some(arena) = &self.arena else { return Ok(None) };
        for (slot, kept) in self.complete()?.into_iter().filter(|(_, kept)| wanted(kept)) {
            // Of another number of ranks, this one's share is not all that it wants.
            let is_share = kept.world == self.options.world || matches!(search.parts, Wanted::Parts(_));
            if matches!(search.at, At::Step(step) if step != kept.step) || !is_share {
                continue;
            }
            match read_slot(arena, slot, search) {
                Ok(found) => return Ok(Some(found)),
                Err(error) => search.pass(Source::Slot, Some(kept.step), error)?,
            }
        }
        Ok(None)
    }

    /// Raw states that all ranks have, newest first, by slot: of one that some rank lacks, the others' parts are worth nothing.
    fn complete(&self) -> Result<Vec<(usize, Kept)>> {
        let Some(arena) = &self.arena else { return Ok(Vec::new()) };
        let mut others: HashMap<u32, Vec<Kept>> = HashMap::new();
        let mut others_have = |kept: &Kept| {
            (0..kept.world).filter(|rank| *rank != self.options.rank).all(|rank| {
                let theirs = others.entry(rank).or_insert_with(|| {
                    let opened = Arena::open(&self.run.rank(rank).arena()).and_then(|arena| arena.kept());
                    opened.map_or_else(|_| Vec::new(), |all| all.into_iter().filter_map(|(_, kept)| kept).collect())
                });
                let name = |kept: &Kept| (kept.session, kept.attempt, kept.step, kept.world);
                theirs.iter().any(|theirs| name(theirs) == name(kept))
            })
        };
        let kept = arena.kept()?.into_iter().map(|(_, kept)| kept);
        let mut complete: Vec<(usize, Kept)> = kept.enumerate().filter_map(|(slot, kept)| Some((slot, kept?))).collect();
        complete.retain(|(_, kept)| others_have(kept));
        complete.sort_by_key(|(_, kept)| Reverse(kept.word.generation));
        Ok(complete)
    }

    /// The wanted snapshot of a store, or the newest that is whole; why not, the search is told. What is damaged there, and another tier has,
    /// comes from that.
    async fn read_store(
        &self,
        store: &Store,
        tiers: &[(usize, &Store)],
        source: Source,
        search: &mut Search<'_>,
    ) -> Result<Option<Restored<'static>>> {
        let mut excluded: Vec<Id> = Vec::new();
        loop {
            let before = excluded.len();
            let opened = match search.at {
                At::Step(_) => store.snapshot(search.at).await,
                At::Latest => match store.recover(&excluded).await {
                    Ok(recovered) => {
                        for skipped in recovered.skipped {
                            excluded.push(skipped.snapshot);
                            search.pass(source.clone(), Some(skipped.step), skipped.error)?;
                        }
                        Ok(recovered.snapshot)
                    }
                    // None of those that there are can be opened.
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        let known = live(store).await.unwrap_or_default();
                        excluded.extend(known.iter().map(|record| record.id).filter(|id| !excluded.contains(id)).collect::<Vec<_>>());
                        Err(error)
                    }
                    Err(error) => Err(error),
                },
            };
            // Newer than what was opened.
            for id in excluded.iter().skip(before) {
                if let Some(found) = self.same_elsewhere(*id, tiers, search).await? {
                    return Ok(Some(found));
                }
            }
            let (step, id, error) = match opened {
                Ok(snapshot) => match read_all(&snapshot, source.clone(), search).await {
                    Ok(found) => return Ok(Some(found)),
                    Err(error) => (Some(snapshot.step()), Some(snapshot.record().id), error),
                },
                // No store, or no such step: nothing is wrong.
                Err(e) if e.kind() == ErrorKind::NotFound && excluded.is_empty() => return Ok(None),
                Err(error) => (None, None, error),
            };
            let damaged = error.kind() == ErrorKind::Corrupt && search.at == At::Latest;
            search.pass(source.clone(), step, error)?;
            let Some(id) = id.filter(|_| damaged) else { return Ok(None) };
            if let Some(found) = self.same_elsewhere(id, tiers, search).await? {
                return Ok(Some(found));
            }
            excluded.push(id);
        }
    }

    /// A snapshot that is damaged, out of the nearest of these tiers that has it, too.
    async fn same_elsewhere(&self, id: Id, tiers: &[(usize, &Store)], search: &mut Search<'_>) -> Result<Option<Restored<'static>>> {
        for (number, tier) in tiers {
            let source = Source::Tier(*number, tier.url().to_owned());
            let read = async {
                let asked = asked(tier, self.options.store_timeout).await?;
                let Some(record) = asked.records.iter().find(|record| record.id == id) else { return Ok(None) };
                let snapshot = tier.snapshot(record.step).await?;
                match snapshot.record().id == id {
                    true => read_all(&snapshot, source.clone(), search).await.map(Some),
                    false => Ok(None),
                }
            };
            match read.await {
                Ok(None) => {}
                Ok(found) => return Ok(found),
                Err(error) => search.pass(source, None, error)?,
            }
        }
        Ok(None)
    }

    /// Steps that can be restored here, newest first, each from the nearest place that has it. No byte of a tensor is read.
    pub fn loadable(&self) -> Result<Vec<Loadable>> {
        self.runtime.block_on(async {
            let mut found: Vec<Loadable> = Vec::new();
            let mut add = |step: u64, source: Source| {
                if !found.iter().any(|known| known.step == step) {
                    found.push(Loadable { step, source });
                }
            };
            if !self.stale {
                for (_, kept) in self.complete()?.into_iter().filter(|(_, kept)| kept.world == self.options.world) {
                    add(kept.step, Source::Slot);
                }
                for epoch in self.run.epochs()?.into_iter().rev() {
                    for record in live(&open_epoch(&self.run, epoch)?).await.unwrap_or_default() {
                        add(record.step, Source::Memory);
                    }
                }
            }
            // In the order in which a restore asks them: a tier that the job went on without has steps that are not its own any more.
            let stores = self.spec.stores()?;
            for tier in newest_first(&stores, self.options.store_timeout).await {
                let Some(store) = stores.get(tier) else { continue };
                match asked(store, self.options.store_timeout).await {
                    Ok(Asked { latest: Some(_), mut records, .. }) => {
                        records.retain(is_whole);
                        records.iter().rev().for_each(|record| add(record.step, Source::Tier(tier, store.url().to_owned())));
                    }
                    Ok(_) => {}
                    Err(error) => {
                        tracing::warn!(run = self.spec.run, tier = store.url(), %error, "what this tier has cannot be loaded now")
                    }
                }
            }
            Ok(found)
        })
    }
}

/// Live snapshots with all their roles, newest first.
async fn live(store: &Store) -> Result<Vec<SnapshotRecord>> {
    let mut records = store.records().await?;
    records.retain(is_whole);
    records.reverse();
    Ok(records)
}

/// Whether a snapshot can be restored as it was saved.
pub(crate) fn is_whole(record: &SnapshotRecord) -> bool {
    record.status == Status::Live && record.roles.is_none()
}

fn restored<'a>(step: u64, source: Source, tensors: Vec<RestoredTensor<'a>>, blobs: Vec<Blob<'a>>, metadata: Metadata) -> Restored<'a> {
    Restored { step, source, passed_over: Vec::new(), tensors, blobs, metadata, seconds: 0.0 }
}

/// What is to be restored of a state.
#[derive(Debug, Clone, Copy)]
enum Wanted<'w> {
    /// All that is there.
    Everything,
    /// These tensors, of each a rectangle.
    Parts(&'w BTreeMap<String, Part>),
}

impl Wanted<'_> {
    /// Those of a raw state; an error if it has not exactly these.
    fn of_slot<'a>(&self, tensors: Vec<TensorView<'a>>) -> Result<Vec<TensorView<'a>>> {
        let Self::Parts(parts) = self else { return Ok(tensors) };
        let is_part = |tensor: &TensorView<'_>, part: &Part| (tensor.shape(), tensor.rect()) == (&part.shape, &part.rect);
        let found: Vec<_> =
            tensors.into_iter().filter(|tensor| parts.get(tensor.name()).is_some_and(|part| is_part(tensor, part))).collect();
        if found.len() == parts.len() {
            return Ok(found);
        }
        match parts.iter().find(|(name, _)| !found.iter().any(|tensor| tensor.name() == name.as_str())) {
            Some((name, Part { shape, rect })) => {
                let message =
                    format!("the raw state of this rank does not hold {:?} from {:?} on of shape {shape:?}", rect.shape, rect.offset);
                Err(Error::not_found(message).tensor(name))
            }
            None => Ok(found),
        }
    }

    /// Those of a snapshot, with the number of the one that is stored for each, and what of it.
    fn of_snapshot(&self, tensors: Vec<DirectoryTensor>) -> Result<Vec<(DirectoryTensor, usize, Rect)>> {
        let numbered = tensors.into_iter().enumerate().map(|(number, tensor)| (tensor.alias_of.unwrap_or(number), tensor));
        let whole = |(stored, tensor): (usize, DirectoryTensor)| {
            let rect = Rect::whole(&tensor.shape);
            (tensor, stored, rect)
        };
        let Self::Parts(parts) = self else { return Ok(numbered.map(whole).collect()) };
        let mut by_name: HashMap<_, _> = numbered.map(|(stored, tensor)| (tensor.name.clone(), (stored, tensor))).collect();
        let part = |(name, Part { shape, rect }): (&String, &Part)| {
            let (stored, tensor) = by_name.remove(name).ok_or_else(|| Error::not_found("the snapshot has no such tensor").tensor(name))?;
            if *shape != tensor.shape || !rect.fits(shape) {
                let message = format!(
                    "the snapshot has shape {:?}; wanted is {:?} from {:?} on of shape {shape:?}",
                    tensor.shape, rect.shape, rect.offset
                );
                return Err(Error::invalid(message).tensor(name));
            }
            Ok((tensor, stored, rect.clone()))
        };
        parts.iter().map(part).collect()
    }
}

/// A restore under way.
struct Search<'s> {
    at: At,
    parts: Wanted<'s>,
    /// None: new memory.
    destination: Option<&'s mut dyn Destination>,
    /// The destination has ended it.
    is_over: bool,
    passed: Vec<PassedOver>,
}

impl<'s> Search<'s> {
    fn new(at: At, parts: Wanted<'s>) -> Self {
        Self { at, parts, destination: None, is_over: false, passed: Vec::new() }
    }

    /// Something could not be used; an error if nothing else can be, either.
    fn pass(&mut self, source: Source, step: Option<u64>, error: Error) -> Result<()> {
        if self.is_over {
            return Err(error);
        }
        self.passed.push(PassedOver { source, step, error });
        Ok(())
    }

    /// Memory of the caller's for each tensor of a state, if that is where it goes.
    fn places(&mut self, found: &Restored<'_>) -> Result<Option<Vec<Option<&mut [u8]>>>> {
        let Some(destination) = &mut self.destination else { return Ok(None) };
        self.is_over = true;
        destination.prepare(found)?;
        let places = destination.buffers()?;
        for (tensor, place) in found.tensors.iter().zip(&places) {
            let wanted = byte_count(tensor.dtype, &tensor.rect);
            if let Some(place) = place.as_ref().filter(|place| Some(place.len()) != wanted) {
                let message = format!("{} bytes to restore into, for {} from {:?} on", place.len(), tensor.dtype, tensor.rect);
                return Err(Error::invalid(message).tensor(&tensor.name));
            }
        }
        if places.len() != found.tensors.len() {
            return Err(Error::invalid(format!("{} places to restore {} tensors into", places.len(), found.tensors.len())));
        }
        self.is_over = false;
        Ok(Some(places))
    }
}

/// A raw state.
fn read_slot<'a>(arena: &'a Arena, slot: usize, search: &mut Search<'_>) -> Result<Restored<'a>> {
    let stored = arena.read(slot)?;
    stored.verify()?;
    let mut known: HashMap<(*const u8, usize), usize> = HashMap::new();
    let views = search.parts.of_slot(stored.tensors()?)?;
    let tensors = views.into_iter().enumerate().map(|(number, view)| {
        let first = *known.entry((view.data().as_ptr(), view.data().len())).or_insert(number);
        RestoredTensor {
            name: view.name().to_owned(),
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            rect: view.rect().clone(),
            role: view.role().to_owned(),
            param: view.param().to_owned(),
            tied_to: (first != number && !view.data().is_empty()).then_some(first),
            data: Elements::Borrowed(view.data()),
        }
    });
    let mut found = restored(stored.step(), Source::Slot, tensors.collect(), stored.blobs(), stored.metadata());
    if let Some(places) = search.places(&found)? {
        let pairs = places.into_iter().zip(&found.tensors).filter_map(|(place, tensor)| Some((place?, &*tensor.data)));
        let pieces = pairs.flat_map(|(place, data)| place.chunks_mut(EXTENT_BYTES).zip(data.chunks(EXTENT_BYTES)));
        pieces.collect::<Vec<_>>().into_par_iter().for_each(|(place, data)| place.copy_from_slice(data));
        found.tensors.iter_mut().for_each(|tensor| tensor.data = Elements::Placed);
    }
    Ok(found)
}

/// The wanted tensors of a snapshot, and all its blobs.
async fn read_all<'a>(snapshot: &Snapshot, source: Source, search: &mut Search<'_>) -> Result<Restored<'a>> {
    let wanted = search.parts.of_snapshot(snapshot.tensors())?;
    let mut known: HashMap<(usize, Rect), usize> = HashMap::new();
    let tensors = wanted.into_iter().enumerate().map(|(number, (tensor, stored, rect))| {
        let first = *known.entry((stored, rect.clone())).or_insert(number);
        RestoredTensor {
            rect,
            name: tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape,
            role: tensor.role,
            param: tensor.param,
            tied_to: (first != number).then_some(first),
            data: Elements::Placed,
        }
    });
    let tensors: Vec<_> = tensors.collect();
    let mut blobs = Vec::new();
    // The receipt of what was rounded is the writer's, and no part of the state.
    for (rank, name) in snapshot.blobs().await?.into_iter().filter(|(_, name)| name != TensorRounding::BLOB) {
        let data = snapshot.read_blob(rank, &name).await?.into();
        blobs.push(Blob { rank, name, data });
    }
    let mut user = snapshot.user().clone();
    user.retain(|key, _| !key.starts_with("tc."));
    let metadata = Metadata { user, file: snapshot.metadata().clone() };
    let mut found = restored(snapshot.step(), source, tensors, blobs, metadata);
    if let Some(places) = search.places(&found)? {
        read_into(snapshot, &found.tensors, places).await?;
        return Ok(found);
    }
    // Tied tensors share memory.
    let mut data: Vec<Vec<u8>> = Vec::with_capacity(found.tensors.len());
    for tensor in &found.tensors {
        let bytes = match tensor.tied_to {
            Some(_) => 0,
            None => byte_count(tensor.dtype, &tensor.rect).ok_or_else(|| Error::limit("a tensor of this size").tensor(&tensor.name))?,
        };
        let mut buffer = Vec::new();
        buffer.try_reserve_exact(bytes).map_err(|e| Error::limit(format!("no memory for {bytes} bytes")).tensor(&tensor.name).source(e))?;
        buffer.resize(bytes, 0u8);
        data.push(buffer);
    }
    let places = data.iter_mut().zip(&found.tensors).map(|(buffer, tensor)| tensor.tied_to.is_none().then_some(buffer.as_mut_slice()));
    read_into(snapshot, &found.tensors, places.collect()).await?;
    let data: Vec<Arc<Vec<u8>>> = data.into_iter().map(Arc::new).collect();
    for (number, tensor) in found.tensors.iter_mut().enumerate() {
        if let Some(data) = data.get(tensor.tied_to.unwrap_or(number)) {
            tensor.data = Elements::Owned(data.clone());
        }
    }
    Ok(found)
}

/// Reads tensors to where they go; those that are tied to others once.
async fn read_into(snapshot: &Snapshot, tensors: &[RestoredTensor<'_>], mut places: Vec<Option<&mut [u8]>>) -> Result<()> {
    let first = |tensor: &RestoredTensor<'_>, number: usize| tensor.tied_to.unwrap_or(number);
    // The first of those tied to each other that has a place.
    let mut filled: HashMap<usize, usize> = HashMap::new();
    let (mut requests, mut copies) = (Vec::new(), Vec::new());
    for (number, (tensor, place)) in tensors.iter().zip(&mut places).enumerate() {
        let Some(place) = place.as_deref_mut() else { continue };
        match filled.entry(first(tensor, number)) {
            Entry::Occupied(known) => copies.push((*known.get(), number)),
            Entry::Vacant(entry) => {
                entry.insert(number);
                let rect = &tensor.rect;
                let ranges = rect.offset.iter().zip(&rect.shape).map(|(&start, &extent)| start..start.saturating_add(extent));
                requests.push((tensor.name.as_str(), Slice::ranges(ranges.collect::<Vec<_>>()), place));
            }
        }
    }
    snapshot.read_many_into(requests).await?;
    for (from, to) in copies {
        let (before, after) = places.split_at_mut(to);
        if let (Some(Some(from)), Some(Some(to))) = (before.get(from), after.first_mut()) {
            to.copy_from_slice(from);
        }
    }
    Ok(())
}

fn byte_count(dtype: Dtype, rect: &Rect) -> Option<usize> {
    usize::try_from(dtype.byte_count(rect.element_count()?)?).ok()
}

/// What this host's memory is worth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Known {
    /// No tier that could be asked has anything newer.
    Current,
    /// A tier has snapshots that were made elsewhere, or is another run's, or the newest in memory was forgotten. The newest of each tier now.
    Stale(BTreeMap<String, Option<Id>>),
}

/// A tier that could not be asked what it has, while memory was trusted.
#[derive(Debug)]
pub(crate) struct Unasked {
    tier: usize,
    url: String,
    error: Error,
}

impl Unasked {
    fn passed_over(&self) -> PassedOver {
        let message = format!("this tier could not be asked when the engine began; memory was trusted: {}", self.error.message());
        let error = Error::new(self.error.kind(), message);
        PassedOver { source: Source::Tier(self.tier, self.url.clone()), step: None, error }
    }
}

/// What a tier says of itself.
struct Asked {
    /// The run, if there is a store.
    run: Option<Id>,
    /// All that its log tells of.
    records: Vec<SnapshotRecord>,
    /// The newest that is whole.
    latest: Option<SnapshotRecord>,
}

/// What a tier has.
async fn asked(store: &Store, timeout: Duration) -> Result<Asked> {
    let answer = tokio::time::timeout(timeout, async { (store.run().await, store.records().await) }).await;
    let found = match answer {
        Ok((Ok(run), Ok(records))) => {
            let latest = records.iter().rev().find(|record| is_whole(record)).cloned();
            Ok(Asked { run: Some(run), records, latest })
        }
        Ok((Err(e), _)) if e.kind() == ErrorKind::NotFound => Ok(Asked { run: None, records: Vec::new(), latest: None }),
        Ok((Err(error), _) | (_, Err(error))) => Err(error),
        Err(_) => Err(Error::new(ErrorKind::Storage, format!("no answer within {timeout:?}")).object(store.url())),
    };
    if let Err(error) = &found {
        tracing::warn!(store = store.url(), %error, "the store cannot be asked what it has");
    }
    found
}

/// The newest step of all tiers that can be asked.
async fn newest_step(stores: &[Store], timeout: Duration) -> Option<u64> {
    let first = *newest_first(stores, timeout).await.first()?;
    asked(stores.get(first)?, timeout).await.ok()?.latest.map(|latest| latest.step)
}

/// When a snapshot was saved, which copies of it tell alike; of what cannot be asked, when it was committed there.
pub(crate) async fn saved_at(store: &Store, record: &SnapshotRecord, timeout: Duration) -> u64 {
    let opened = tokio::time::timeout(timeout, store.snapshot(record.step)).await;
    match opened {
        Ok(Ok(snapshot)) if snapshot.record().id == record.id => snapshot.manifest().time_ms,
        _ => record.time_ms,
    }
}

/// The tiers in the order in which they are to be restored from: the nearest first, unless one further away has what was saved later, because
/// the job ran elsewhere meanwhile.
async fn newest_first(stores: &[Store], timeout: Duration) -> Vec<usize> {
    let mut order: Vec<usize> = (0..stores.len()).collect();
    if stores.len() < 2 {
        return order;
    }
    let mut best: Option<(usize, Asked, u64)> = None;
    for (tier, store) in stores.iter().enumerate() {
        let Ok(found) = asked(store, timeout).await else { continue };
        let Some(latest) = found.latest.clone() else { continue };
        if best.as_ref().is_some_and(|(_, best, _)| best.records.iter().any(|record| record.id == latest.id)) {
            continue;
        }
        let time = saved_at(store, &latest, timeout).await;
        if best.as_ref().is_none_or(|(_, _, newest)| time > *newest) {
            best = Some((tier, found, time));
        }
    }
    if let Some((best, _, _)) = best.filter(|(best, _, _)| *best > 0) {
        tracing::warn!(tier = stores.get(best).map(Store::url), "this tier has newer snapshots than those before it");
        order.retain(|tier| *tier != best);
        order.insert(0, best);
    }
    order
}

/// Compares what this host has with what the tiers have now, and notes the latter. Memory is stale if the first tier's newest snapshot was
/// made elsewhere, or if that of another was, and later than anything here; and if the newest in memory was forgotten in the first.
pub(crate) async fn look(
    spec: &RunSpec,
    run: &RunPlace,
    seen: &Seen,
    has_arena: bool,
    timeout: Duration,
    unasked: &mut Vec<Unasked>,
) -> Result<Known> {
    let stores = spec.stores()?;
    let epochs = run.epochs()?;
    let mut memory: Vec<(Store, Asked)> = Vec::new();
    for epoch in &epochs {
        let store = open_epoch(run, *epoch)?;
        if let Ok(found) = asked(&store, timeout).await {
            memory.push((store, found));
        }
    }
    let in_memory = |id: Id| memory.iter().any(|(_, found)| found.records.iter().any(|record| record.id == id));
    let nothing_here = epochs.is_empty() && !has_arena;
    let mut first: Option<Asked> = None;
    // When the newest was saved that is known to be ours; further tiers are compared with it.
    let (mut newest_here, has_further) = (0, stores.len() > 1);
    if let (true, Some((store, Asked { latest: Some(latest), .. }))) = (has_further, memory.last()) {
        newest_here = saved_at(store, latest, timeout).await;
    }
    let newest_in_memory = memory.iter().rev().find_map(|(_, found)| found.latest.as_ref()).map(|latest| latest.id);
    let (mut latest_of, mut is_stale) = (BTreeMap::new(), false);
    for (tier, store) in stores.iter().enumerate() {
        let found = match asked(store, timeout).await {
            Ok(found) => found,
            Err(error) => {
                // Trusting what is in memory.
                unasked.push(Unasked { tier, url: store.url().to_owned(), error });
                continue;
            }
        };
        let known = seen.tier(store.url()).latest;
        let latest = found.latest.as_ref().map(|latest| latest.id);
        let elsewhere = match (tier, &found.latest) {
            (0, _) if found.run.is_none() && known.is_some() => {
                // Deleted, or a disk that is not mounted: memory may be all that is left.
                tracing::warn!(store = store.url(), folder = %run.root().display(), "the store is gone; trusting what is in memory (to begin anew, remove the folder)");
                let error = Error::not_found("the store is not there").object(store.url());
                unasked.push(Unasked { tier, url: store.url().to_owned(), error });
                continue;
            }
            (0, _) => {
                let other_run =
                    memory.iter().any(|(_, ours)| matches!((ours.run, found.run), (Some(ours), Some(theirs)) if ours != theirs));
                let is_forgotten = |record: &SnapshotRecord| Some(record.id) == newest_in_memory && record.status != Status::Live;
                other_run || !(latest == known || latest.is_some_and(in_memory)) || found.records.iter().any(is_forgotten)
            }
            (_, None) => false,
            (_, Some(newest)) => {
                let in_first = first.as_ref().is_some_and(|first| first.records.iter().any(|record| record.id == newest.id));
                let ours = latest == known || in_memory(newest.id) || in_first;
                !ours && saved_at(store, newest, timeout).await > newest_here
            }
        };
        if elsewhere && !nothing_here {
            tracing::warn!(
                run = spec.run,
                tier = store.url(),
                "the store has newer snapshots than this host's memory, or not its newest any more; memory goes"
            );
            is_stale = true;
        }
        if let (true, 0, Some(latest)) = (has_further, tier, &found.latest) {
            newest_here = newest_here.max(saved_at(store, latest, timeout).await);
        }
        if tier == 0 {
            first = Some(found);
        }
        latest_of.insert(store.url().to_owned(), latest);
    }
    if is_stale {
        // Noted when memory is gone.
        return Ok(Known::Stale(latest_of));
    }
    // Only by one that goes on: the others may be behind the agent, which notes what it commits.
    for (url, latest) in latest_of {
        Seen::update(run, &url, |seen| seen.latest = latest)?;
    }
    Ok(Known::Current)
}
