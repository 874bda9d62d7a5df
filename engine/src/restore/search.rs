//! The search order of a restore: the nearest complete copy of a state.
//!
//! The order is: newest raw state in the arena, encoded snapshots in memory, older raw states, the memory of other hosts,
//! then the tiers. A damaged copy is passed over; if another tier has the same snapshot, that one is read before an older step.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tensorcask::wire::Id;
use tensorcask::{Error, ErrorKind, Result, StepSelector, Store};

use super::freshness::UnreachableTier;
use super::hosts_memory::{note_damage, open_hosts_memory};
use super::read::{read_slot, read_snapshot};
use super::request::{RestoreRequest, Wanted};
use super::restored::{PassedOver, Restored, Source};
use crate::arena::{Arena, SlotHeader};
use crate::memory::stores::open_epoch;
use crate::os::folders::RunFolder;
use crate::run::known_tiers::KnownTiers;
use crate::run::spec::{RunSpec, is_local};
use crate::run::tier_query::{newest_step, query_tier, restorable_snapshots, restore_order};

/// The places that a restore searches.
pub(crate) struct RestorePlaces<'a> {
    pub spec: &'a RunSpec,
    pub run: &'a RunFolder,
    pub rank: u32,
    pub arena: Option<&'a Arena>,
    /// Whether memory is out of date and must not be used.
    pub is_stale: bool,
    /// Whether this session began while the store did not answer, and the store has not accepted it yet.
    pub is_without_store: bool,
    /// Tiers that did not answer when the engine began.
    pub unreachable: &'a [UnreachableTier],
    pub store_timeout: Duration,
}

/// Finds and reads the nearest complete copy.
pub(crate) async fn find<'a>(places: &RestorePlaces<'a>, request: &mut RestoreRequest<'_>) -> Result<Restored<'a>> {
    let stores = places.spec.stores()?;
    if !places.is_stale
        && let Some(found) = find_in_memory(places, &stores, request).await?
    {
        return Ok(found);
    }
    if let Some(found) = find_on_hosts(places, request).await? {
        return Ok(found);
    }
    if let Some(found) = find_in_tiers(places, &stores, request).await? {
        return Ok(found);
    }
    Err(match (take_worst(&mut request.passed_over), request.at) {
        (Some(error), _) => error,
        (None, StepSelector::Step(step)) => {
            Error::not_found(format!("step {step} is neither in memory nor in a tier")).object(&places.spec.run)
        }
        (None, StepSelector::Latest) => Error::not_found("no step has been saved yet").object(&places.spec.run),
    })
}

/// Takes the error that explains most. Damage explains more than another snapshot than the agreed one, that more than a
/// snapshot that cannot fill the caller's tensors, and that more than another failure. A raw state may lack tensors that a
/// snapshot has. "Not found" means that there is no step at all, so it counts only if there is nothing else.
fn take_worst(passed_over: &mut Vec<PassedOver>) -> Option<Error> {
    let place_of = |is_cause: fn(&PassedOver) -> bool| passed_over.iter().position(is_cause);
    let worst = place_of(|passed| passed.error.kind() == ErrorKind::Corrupt)
        .or_else(|| place_of(|passed| passed.error.kind() == ErrorKind::Conflict))
        .or_else(|| place_of(|passed| passed.error.kind() == ErrorKind::Template && passed.source != Source::Slot))
        .or_else(|| place_of(|passed| !matches!(passed.error.kind(), ErrorKind::NotFound | ErrorKind::Template)))
        .or_else(|| place_of(|passed| passed.error.kind() == ErrorKind::Template));
    worst.map(|at| passed_over.swap_remove(at).error)
}

async fn find_in_memory<'a>(
    places: &RestorePlaces<'a>,
    stores: &[Store],
    request: &mut RestoreRequest<'_>,
) -> Result<Option<Restored<'a>>> {
    let encoded = places.arena.map(Arena::encoded).transpose()?.unwrap_or(0);
    request.passed_over.extend(places.unreachable.iter().map(UnreachableTier::passed_over));
    if let Some(found) = find_slot(places, request, |header| header.word.generation >= encoded)? {
        return Ok(Some(found));
    }
    let mut is_readable = true;
    let tiers: Vec<NumberedStore<'_>> = stores.iter().enumerate().collect();
    for epoch in places.run.epochs()?.into_iter().rev() {
        let store = open_epoch(places.run, epoch)?;
        if let Some(found) = read_store(places, &store, &tiers, Source::Memory, request).await? {
            return Ok(Some(found));
        }
        // It may pass, and the tiers may have older steps only.
        let fails = |passed: &PassedOver| passed.source == Source::Memory && passed.error.kind() == ErrorKind::Storage;
        if let Some(at) = request.passed_over.iter().position(fails) {
            return Err(request.passed_over.swap_remove(at).error);
        }
        is_readable &= store.history().records().await.map_or_else(|e| e.kind() == ErrorKind::NotFound, |_| true);
    }
    let is_damaged = |kind: ErrorKind, source: &Source| *source == Source::Memory && kind == ErrorKind::Corrupt;
    is_readable &= !request.passed_over.iter().any(|passed| is_damaged(passed.error.kind(), &passed.source));
    // Older raw states come last. If encoded memory is damaged, a tier may have a newer step than they have.
    let newest = match is_readable || request.at != StepSelector::Latest {
        true => None,
        false => newest_step(stores, places.store_timeout).await,
    };
    let is_older = |header: &SlotHeader| header.word.generation < encoded && newest.is_none_or(|newest| header.step >= newest);
    find_slot(places, request, is_older)
}

/// Reads a step from the memory of all hosts. The newest step is not looked for there: the ranks agree on a step first.
async fn find_on_hosts(places: &RestorePlaces<'_>, request: &mut RestoreRequest<'_>) -> Result<Option<Restored<'static>>> {
    let StepSelector::Step(_) = request.at else { return Ok(None) };
    for _ in 0..MOST_DAMAGED {
        let opened = open_hosts_memory(places.spec, places.run, places.store_timeout).await;
        let before = request.passed_over.len();
        let Some(memory) = opened else { return Ok(None) };
        // The memory of the hosts commits other steps under ids of its own.
        let agreed = request.agreed.take_if(|agreed| !memory.committed.contains(&agreed.step));
        let found = read_store(places, &memory.store, &[], Source::Hosts, request).await?;
        request.agreed = agreed.or(request.agreed);
        if found.is_some() {
            return Ok(found);
        }
        let damage = request.passed_over.iter().skip(before).find(|passed| passed.error.kind() == ErrorKind::Corrupt);
        // Another place may have an undamaged copy. Each turn leaves out one more.
        match damage.and_then(|passed| passed.error.object_name()) {
            Some(path) if note_damage(places.spec, places.run, path, &memory.damaged).await? => {}
            _ => return Ok(None),
        }
    }
    Ok(None)
}

/// Number of damaged copies after which a restore no longer reads from the hosts.
const MOST_DAMAGED: usize = 64;

async fn find_in_tiers(
    places: &RestorePlaces<'_>,
    stores: &[Store],
    request: &mut RestoreRequest<'_>,
) -> Result<Option<Restored<'static>>> {
    let order = restore_order(stores, places.store_timeout).await;
    let mut tiers = order.into_iter().filter_map(|tier| Some((tier, stores.get(tier)?))).collect::<VecDeque<_>>();
    while let Some((tier, store)) = tiers.pop_front() {
        let source = Source::Tier(tier, store.url().to_owned());
        if let Err(error) = check_answers(store, places.store_timeout).await {
            request.pass_over(source, None, error)?;
            continue;
        }
        let Some(found) = read_store(places, store, tiers.make_contiguous(), source, request).await? else { continue };
        if tier == 0 {
            // The job continues from the newest snapshot of this tier, so the agent may take the tier over.
            let latest = query_tier(store, places.store_timeout).await.ok().and_then(|contents| contents.latest);
            KnownTiers::update(places.run, store.url(), |known| known.latest = latest.map_or(known.latest, |latest| Some(latest.id)))?;
        }
        return Ok(Some(found));
    }
    Ok(None)
}

/// Fails if a folder does not answer in time: a file system that hangs would keep the restore for ever. Other stores have time
/// limits of their own.
async fn check_answers(store: &Store, timeout: Duration) -> Result<()> {
    if !is_local(store.url()) {
        return Ok(());
    }
    let asked = tokio::time::timeout(timeout, store.history().run()).await;
    let silent = || Error::new(ErrorKind::Storage, format!("no answer within {timeout:?}; the file system may hang")).object(store.url());
    asked.map(|_| ()).map_err(|_| silent())
}

/// Reads the newest raw state that is wanted and undamaged.
fn find_slot<'a>(
    places: &RestorePlaces<'a>,
    request: &mut RestoreRequest<'_>,
    is_wanted: impl Fn(&SlotHeader) -> bool,
) -> Result<Option<Restored<'a>>> {
    let Some(arena) = places.arena else { return Ok(None) };
    for (slot, header) in complete_slots(places)?.into_iter().filter(|(_, header)| is_wanted(header)) {
        // With another number of ranks, the part of this rank is not all that it needs.
        let is_share = header.world == places.spec.world || matches!(request.wanted, Wanted::Parts(_));
        if matches!(request.at, StepSelector::Step(step) if step != header.step) {
            continue;
        }
        if !is_share {
            let message = format!(
                "is a raw state of {} ranks, and this job has {}; it can be restored whole once the agent has encoded it",
                header.world, places.spec.world
            );
            request.pass_over(Source::Slot, Some(header.step), Error::unsupported(message))?;
            continue;
        }
        match read_slot(arena, slot, request) {
            Ok(found) => return Ok(Some(found)),
            Err(error) => request.pass_over(Source::Slot, Some(header.step), error)?,
        }
    }
    Ok(None)
}

/// Slots with raw states that all ranks have, newest first. A state that some rank lacks is useless to the others.
pub(crate) fn complete_slots(places: &RestorePlaces<'_>) -> Result<Vec<(usize, SlotHeader)>> {
    let Some(arena) = places.arena else { return Ok(Vec::new()) };
    let mut others: HashMap<u32, Vec<SlotHeader>> = HashMap::new();
    let key = |header: &SlotHeader| (header.session, header.attempt, header.step, header.world);
    let mut others_have = |header: &SlotHeader| -> Result<bool> {
        for rank in (0..header.world).filter(|rank| *rank != places.rank) {
            let theirs = match others.entry(rank) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(entry) => entry.insert(headers_of(places.run, rank)?),
            };
            if !theirs.iter().any(|theirs| key(theirs) == key(header)) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    let views = arena.views()?.into_iter().enumerate();
    let mut complete: Vec<(usize, SlotHeader)> = Vec::new();
    for (slot, header) in views.filter_map(|(slot, view)| Some((slot, view.header?))) {
        if others_have(&header)? {
            complete.push((slot, header));
        }
    }
    complete.sort_by_key(|(_, header)| Reverse(header.word.generation));
    Ok(complete)
}

/// Headers of the raw states of another rank. None if its arena is missing or damaged. Any other failure may pass, so it does not
/// count as a missing state.
fn headers_of(run: &RunFolder, rank: u32) -> Result<Vec<SlotHeader>> {
    match Arena::open(&run.rank(rank).arena()).and_then(|arena| arena.headers()) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => Ok(Vec::new()),
        headers => headers,
    }
}

/// A store and its number among the tiers.
type NumberedStore<'s> = (usize, &'s Store);

/// Reads the wanted snapshot of a store, or the newest undamaged one. Notes in the request why others could not be
/// used. A damaged snapshot is read from one of `tiers` if possible.
async fn read_store(
    places: &RestorePlaces<'_>,
    store: &Store,
    tiers: &[NumberedStore<'_>],
    source: Source,
    request: &mut RestoreRequest<'_>,
) -> Result<Option<Restored<'static>>> {
    let mut excluded: Vec<Id> = Vec::new();
    let mut freed = 0;
    loop {
        let before = excluded.len();
        let opened = match request.at {
            StepSelector::Step(_) => store.snapshot(request.at).await,
            StepSelector::Latest => match store.recover(&excluded).await {
                Ok(recovered) => {
                    for skipped in recovered.skipped {
                        excluded.push(skipped.snapshot);
                        request.pass_over(source.clone(), Some(skipped.step), skipped.error)?;
                    }
                    Ok(recovered.snapshot)
                }
                // No snapshot can be opened.
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    let known = restorable_snapshots(store).await.unwrap_or_default();
                    excluded.extend(known.iter().map(|record| record.id).filter(|id| !excluded.contains(id)).collect::<Vec<_>>());
                    Err(error)
                }
                Err(error) => Err(error),
            },
        };
        // These are newer than the opened snapshot.
        for id in excluded.iter().skip(before) {
            if let Some(found) = read_copy(places, *id, tiers, request).await? {
                return Ok(Some(found));
            }
        }
        let (snapshot, error) = match opened {
            Ok(snapshot) => match read_snapshot(&snapshot, source.clone(), request).await {
                Ok(found) => return Ok(Some(found)),
                // There is a newer one.
                Err(error)
                    if error.is_given_up() && request.may_begin_again() && request.at == StepSelector::Latest && freed < MOST_FREED =>
                {
                    freed += 1;
                    continue;
                }
                Err(error) => (Some(snapshot), error),
            },
            // No store, or no such step.
            Err(e) if e.kind() == ErrorKind::NotFound && excluded.is_empty() => return Ok(None),
            Err(error) => (None, error),
        };
        let is_damaged = error.kind() == ErrorKind::Corrupt && request.at == StepSelector::Latest;
        request.pass_over(source.clone(), snapshot.as_ref().map(|snapshot| snapshot.step()), error)?;
        let Some(id) = snapshot.filter(|_| is_damaged).map(|snapshot| snapshot.record().id) else { return Ok(None) };
        if let Some(found) = read_copy(places, id, tiers, request).await? {
            return Ok(Some(found));
        }
        excluded.push(id);
    }
}

/// Number of times that a restore begins again because a job frees the step that is read.
const MOST_FREED: u32 = 16;

/// Reads a damaged snapshot from the nearest tier that has another copy of it.
async fn read_copy(
    places: &RestorePlaces<'_>,
    id: Id,
    tiers: &[NumberedStore<'_>],
    request: &mut RestoreRequest<'_>,
) -> Result<Option<Restored<'static>>> {
    for (number, tier) in tiers {
        let source = Source::Tier(*number, tier.url().to_owned());
        let read = async {
            let contents = query_tier(tier, places.store_timeout).await?;
            let Some(record) = contents.records.iter().find(|record| record.id == id) else { return Ok(None) };
            let snapshot = tier.snapshot(record.step).await?;
            match snapshot.record().id == id {
                true => read_snapshot(&snapshot, source.clone(), request).await.map(Some),
                false => Ok(None),
            }
        };
        match read.await {
            Ok(None) => {}
            Ok(found) => return Ok(found),
            Err(error) => request.pass_over(source, None, error)?,
        }
    }
    Ok(None)
}
