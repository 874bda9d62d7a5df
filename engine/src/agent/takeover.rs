//! Taking a tier over from its previous writer, or continuing as its writer.
//!
//! The agent notes a takeover before it happens, so that an agent after it recognises the takeover as its own. It
//! refuses to take a tier over for an absent trainer, or after another job has written to it.

use std::time::Duration;

use tensorcask::maintain::{Copier, CopyOptions};
use tensorcask::wire::Id;
use tensorcask::{Error, ErrorKind, Result, SnapshotRecord, SnapshotStatus, Store};

use super::run::Run;
use super::run_event::{Event, TierOrders};
use super::save_log::Commit;
use super::upload_source::{UploadSource, holds_anything, snapshot_ids};
use crate::run::known_tiers::{KnownTier, KnownTiers, Takeover};
use crate::run::tier_query::{is_restorable, saved_at};

/// Whether an upload may proceed.
pub(super) enum Permission {
    Granted,
    /// The trainer that ordered the takeover is gone, and there is nothing to upload.
    NothingToDo,
}

/// Checks whether this run may write to a tier. Fails with `Fenced` if another job has written there in the meantime.
pub(super) async fn check_permission(
    run: &Run,
    tier: usize,
    orders: TierOrders,
    sources: &[UploadSource],
    is_new_writer: bool,
) -> Result<Permission> {
    if !orders.take_over && !is_new_writer {
        return Ok(Permission::Granted);
    }
    let holds = holds_anything(run, sources).await;
    let is_attached = run.read(|state, _| state.is_attached());
    if !is_attached && !holds {
        return Ok(Permission::NothingToDo);
    }
    if let (true, Some(destination)) = (holds && (tier == 0 || !is_attached), run.tiers.get(tier)) {
        check_unchanged(run, sources, destination).await?;
    }
    Ok(Permission::Granted)
}

/// Whether this host has never written to a tier.
pub(super) fn is_new_writer(known: &KnownTier) -> bool {
    (known.taking_over, known.writer) == (None, None)
}

/// Opens a copier that writes to a tier; takes the tier over if necessary.
pub(super) async fn open_copier(run: &Run, tier: usize, orders: TierOrders, source: &Store, destination: &Store) -> Result<Copier> {
    let url = destination.url();
    let options = CopyOptions::default();
    let known = KnownTiers::read(&run.folder)?.tier(url);
    // The same writer id as before, because the store may be another copy of the previous one.
    let same = known.taking_over.map(|takeover| takeover.id).or(known.writer.filter(|_| !orders.take_over));
    let id = same.map_or_else(Id::random, Ok)?;
    let mut copier = Copier::open(source, destination, id, options).await?;
    copier.set_trainer(run.trainer());
    let from = copier.last_writer();
    // An earlier agent was about to take the tier over, and did not.
    let was_about_to = known.taking_over.is_some_and(|takeover| takeover.from == from);
    // The former writer, if a takeover is to be noted.
    let taken_from = if orders.take_over || was_about_to || is_new_writer(&known) {
        // Noted first: whatever happens next, a later agent recognises its own takeover.
        KnownTiers::update(&run.folder, url, |known| known.taking_over = Some(Takeover { id, from }))?;
        match orders.take_over {
            true => copier.take_over().await?,
            false => copier.take_over_from(from).await?,
        }
        Some(from)
    } else {
        let earlier: Vec<Id> = known.taking_over.map(|takeover| takeover.id).into_iter().chain(known.writer).collect();
        let is_entitled = |former: &Id| run.spec.hosts.is_some() || known.predecessors.contains(former);
        match from {
            // An older copy of the store has replaced the newer one, or another host has led in between.
            Some(former) if !earlier.contains(&former) && is_entitled(&former) => copier.take_over_from(from).await?,
            // Fails if another job has written to the tier.
            _ => copier.go_on_as(&earlier).await?,
        }
        // An earlier agent took the tier over, and was killed before it could note that.
        known.taking_over.map(|takeover| takeover.from.filter(|_| from == Some(takeover.id)))
    };
    if let Some(former) = taken_from {
        if tier > 0 {
            // Noted afterwards: an agent that is killed here leaves it to the next one.
            forget_abandoned(run, source, destination, copier.latest()).await?;
        }
        let latest = copier.latest().map(|latest| latest.id);
        KnownTiers::update(&run.folder, url, |known| known.taken_over(latest, id, former))?;
    }
    let latest = copier.latest().map(|latest| Commit { step: latest.step, time_ms: latest.time_ms });
    run.apply(Event::TierTakenOver { tier, orders, latest });
    Ok(copier)
}

/// Fails with `Fenced` if another job has written to a tier since this host last saw it. Without this check, this host
/// could commit old states and so fence a job that went on elsewhere while the tier was unreachable from here.
async fn check_unchanged(run: &Run, sources: &[UploadSource], destination: &Store) -> Result<()> {
    // A refusal ends the run, so it needs the whole log.
    let records = match destination.history().complete_records().await {
        Ok(records) => records,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    let newest = records.iter().rposition(is_restorable);
    let Some((latest, later)) = newest.and_then(|at| records[at..].split_first()) else { return Ok(()) };
    // The known snapshot may have been forgotten since: by `forget_abandoned`, or by hand. Then an older one is the latest.
    let known = KnownTiers::read(&run.folder)?.tier(destination.url()).latest;
    if known.is_some_and(|known| latest.id == known || later.iter().any(|record| record.id == known)) {
        return Ok(());
    }
    for source in sources {
        match source.store.history().records().await {
            Ok(ours) if ours.iter().any(|record| record.id == latest.id) => return Ok(()),
            Ok(_) => {}
            // The upload gives up damaged snapshots.
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {}
            Err(e) => return Err(e),
        }
    }
    let message = format!(
        "step {} was saved there by another job while this host could not reach the store. The steps that this run has saved since are \
         discarded; start the run again to continue from step {0}",
        latest.step
    );
    Err(Error::new(ErrorKind::Fenced, message).object(destination.url()))
}

/// Forgets snapshots of a nearer tier that the job abandoned: it continued on another host from a farther tier without
/// them. They must not be copied behind the snapshots that the job saved there.
async fn forget_abandoned(run: &Run, source: &Store, destination: &Store, latest: Option<&SnapshotRecord>) -> Result<()> {
    let (Some(latest), records) = (latest, source.history().records().await?) else { return Ok(()) };
    if records.iter().any(|record| record.id == latest.id) {
        return Ok(());
    }
    let stored = snapshot_ids(destination).await?;
    let newest = saved_at(destination, latest, QUERY_TIMEOUT).await;
    let mut abandoned = Vec::new();
    for record in records.iter().filter(|record| record.status == SnapshotStatus::Live && !stored.contains(&record.id)) {
        if saved_at(source, record, QUERY_TIMEOUT).await > newest {
            // Saved after the job came back to this host.
            break;
        }
        abandoned.push(record);
    }
    if !abandoned.is_empty() {
        let steps: Vec<u64> = abandoned.iter().map(|record| record.step).collect();
        tracing::warn!(
            run = run.spec.run,
            store = source.url(),
            ?steps,
            "the job continued from {} without these steps; forgetting them (garbage collection removes them)",
            destination.url()
        );
        source.history().forget_snapshots(&abandoned.iter().map(|record| record.id).collect::<Vec<_>>()).await?;
    }
    Ok(())
}

/// Time within which one snapshot must be opened.
const QUERY_TIMEOUT: Duration = Duration::from_secs(30);
