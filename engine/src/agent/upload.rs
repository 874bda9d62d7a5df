//! From memory to the first tier, and from each tier to the next: byte by byte, as a commit of each snapshot.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcask::wire::Id;
use tensorcask::{Copier, CopyOptions, Depth, Error, ErrorKind, Result, SnapshotRecord, Status, Store, VerifyOptions};
use tracing::field::Empty;
use tracing::{Instrument, Span};

use super::encode::WAITS;
use super::run::{Orders, Run, Uploaded};
use crate::restore::{is_whole, saved_at};
use crate::seen::{Seen, TakingOver};
use crate::tier::open_epoch;

/// How long one snapshot may take to say when it was saved.
const PATIENCE: Duration = Duration::from_secs(30);

/// Fills a tier from the one before, for as long as the agent lives.
pub(super) async fn upload_loop(run: Arc<Run>, tier: usize) {
    let Some(notify) = run.upload.get(tier) else { return };
    let mut copier = None;
    let mut wait = WAITS.0;
    loop {
        let span = tracing::info_span!("upload", run = run.spec.run, tier, snapshots = Empty, step = Empty, upload_ms = Empty);
        let orders = run.orders(tier);
        match upload(&run, tier, orders, &mut copier, &span).instrument(span.clone()).await {
            Ok(()) => {
                wait = WAITS.0;
                notify.notified().await;
            }
            Err(error) if error.kind() == ErrorKind::Fenced && tier == 0 => {
                copier = None;
                // Unless a trainer has come meanwhile, who takes the store over.
                if run.stop(error.to_string(), orders) {
                    notify.notified().await;
                }
            }
            Err(error) => {
                run.upload_failed(tier);
                // What the copier knows of the log may be old.
                copier = None;
                run.tier_problem(tier, Some(error.to_string()));
                tokio::time::sleep(WAITS.0).await;
                let _ = tokio::time::timeout(wait, notify.notified()).await;
                wait = (wait * 2).min(WAITS.1);
            }
        }
    }
}

async fn upload(run: &Run, tier: usize, orders: Orders, copier: &mut Option<Copier>, span: &Span) -> Result<()> {
    // What is out of date must not go up.
    let idle = run.stopped() || run.is_out_of_date();
    let (Some(destination), false) = (run.tiers.get(tier), idle) else { return Ok(()) };
    // Before the sources are looked at: all of it is in them.
    let encoded = run.encoded_by_rank();
    let sources = sources(run, tier).await?;
    let Some(((newest, epoch), _)) = sources.split_last() else {
        run.nothing_to_upload(tier);
        return Ok(());
    };
    if orders.take_over {
        *copier = None;
    }
    let known = Seen::read(&run.place).tier(destination.url());
    let is_unknown = copier.is_none() && (known.taking_over, known.writer) == (None, None);
    if orders.take_over || is_unknown {
        let holds = holds_anything(run, &sources).await;
        if !run.is_attached() && !holds {
            // Whoever wanted it is gone, and there is nothing to bring.
            run.nothing_to_upload(tier);
            return Ok(());
        }
        if holds && (tier == 0 || !run.is_attached()) {
            was_left_alone(run, &sources, destination).await?;
        }
    }
    if copier.is_none() {
        let (url, options) = (destination.url(), CopyOptions::default());
        // The same id where a store is opened again, which may be another copy of it.
        let same = known.taking_over.map(|taking_over| taking_over.id).or(known.writer.filter(|_| !orders.take_over));
        let id = same.map_or_else(Id::random, Ok)?;
        let mut opened = newest.copier(destination, options, id).await?;
        let from = opened.last_writer();
        // An agent before this one was about to, and did not come to it.
        let was_about_to = known.taking_over.is_some_and(|taking_over| taking_over.from == from);
        if orders.take_over || was_about_to || is_unknown {
            // Before it does: an agent after this one has to know itself, whatever came of it.
            Seen::update(&run.place, url, |seen| seen.taking_over = Some(TakingOver { id, from }))?;
            match orders.take_over {
                true => opened.take_over().await?,
                false => opened.take_over_from(from).await?,
            }
            let latest = opened.latest().map(|latest| latest.id);
            Seen::update(&run.place, url, |seen| seen.taken_over(latest, id, from))?;
            if tier > 0 {
                forget_abandoned(run, newest, destination, opened.latest()).await?;
            }
        } else {
            // Another may have written there: that is not what this run knows.
            let earlier: Vec<Id> = known.taking_over.map(|taking_over| taking_over.id).into_iter().chain(known.writer).collect();
            match from {
                // An older copy of the store lies there now.
                Some(former) if !earlier.contains(&former) && known.predecessors.contains(&former) => opened.take_over_from(from).await?,
                _ => opened.go_on_as(&earlier).await?,
            }
        }
        run.taken_over(tier, orders, opened.latest());
        *copier = Some(opened);
    }
    let Some(copier) = copier.as_mut() else { return Ok(()) };
    let (pending, begun) = (run.pending(tier), Instant::now());
    let (mut copied, mut ahead_bytes) = (0, 0);
    let ahead = run.take_ahead(tier);
    let mut records = Vec::new();
    for (source, of) in &sources {
        let copy = async {
            records = source.records().await?;
            copier.finish_ahead(ahead.clone());
            copier.copy_new(source).await
        };
        match copy.await {
            Ok(report) => {
                copied += report.snapshots;
                ahead_bytes += report.ahead_bytes;
            }
            Err(error) if tier == 0 && error.kind() == ErrorKind::Corrupt && is_damaged(source).await? => {
                give_up(run, source, *of, destination, &error).await?;
            }
            Err(error) => return Err(error),
        }
    }
    let upload_ms = begun.elapsed().as_secs_f64() * 1e3;
    if copied > 0 {
        Seen::update(&run.place, destination.url(), |seen| seen.latest = copier.latest().map(|latest| latest.id))?;
    }
    if run.spec.inline && tier == 0 {
        run.note_inline(*epoch, &records)?;
    }
    let newest = records.last();
    if copied > 0 {
        span.record("snapshots", copied).record("step", newest.map(|record| record.step)).record("upload_ms", upload_ms);
    }
    let uploaded = Uploaded {
        encoded,
        epoch: *epoch,
        sequence: newest.map_or(0, |record| record.sequence),
        step: newest.map(|record| record.step),
        pending_before: pending,
        copied,
        ahead_bytes,
        upload_ms,
    };
    run.uploaded(tier, &uploaded);
    Ok(())
}

/// Where the snapshots of a tier come from, if there is anything yet: stores in memory with their epochs, the newest last, or the tier before.
async fn sources(run: &Run, tier: usize) -> Result<Vec<(Store, u64)>> {
    let candidates = match tier.checked_sub(1) {
        None => {
            let damaged = run.memory().damaged;
            let epochs = run.place.epochs()?.into_iter().filter(|epoch| !damaged.contains(epoch));
            epochs.map(|epoch| Ok((open_epoch(&run.place, epoch)?, epoch))).collect::<Result<Vec<_>>>()?
        }
        Some(before) => run.tiers.get(before).map(|store| (store.clone(), 0)).into_iter().collect(),
    };
    let mut sources = Vec::with_capacity(candidates.len());
    for (store, epoch) in candidates {
        match store.run().await {
            Ok(_) => sources.push((store, epoch)),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            // Another has taken its place, or will.
            Err(e) if tier == 0 && e.kind() == ErrorKind::Corrupt => run.memory_is_damaged(epoch, None, &e),
            Err(e) => return Err(e),
        }
    }
    Ok(sources)
}

/// Whether it is the store in memory that is damaged, and not the one that it is copied to.
async fn is_damaged(source: &Store) -> Result<bool> {
    let report = source.verify(&VerifyOptions { depth: Depth::Pages, ..VerifyOptions::default() }).await;
    Ok(report.map_or_else(|error| error.kind() == ErrorKind::Corrupt, |report| !report.is_clean()))
}

/// Snapshots of a damaged store that did not get to the tier are lost: their trainers are told, and memory begins anew.
async fn give_up(run: &Run, source: &Store, epoch: u64, destination: &Store, error: &Error) -> Result<()> {
    let has = ids(destination).await?;
    let lost = match source.records().await {
        Ok(records) => {
            let records = records.into_iter().filter(|record| record.status == Status::Live && !has.contains(&record.id));
            Some(records.map(|record| (record.sequence, record.step)).collect::<Vec<_>>())
        }
        Err(e) if e.kind() == ErrorKind::Corrupt => None,
        Err(e) => return Err(e),
    };
    run.memory_is_damaged(epoch, lost.as_deref(), error);
    Ok(())
}

/// Whether there is anything here that a tier may not have.
async fn holds_anything(run: &Run, sources: &[(Store, u64)]) -> bool {
    for (source, _) in sources {
        if source.records().await.is_ok_and(|records| !records.is_empty()) {
            return true;
        }
    }
    run.holds_states()
}

/// That nobody has written to a tier since this host last saw it, as far as can be told: a job that went on elsewhere while the tier could
/// not be asked must not be fenced by what was left here.
async fn was_left_alone(run: &Run, sources: &[(Store, u64)], destination: &Store) -> Result<()> {
    let records = match destination.records().await {
        Ok(records) => records,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    let Some(latest) = records.iter().rev().find(|record| is_whole(record)) else { return Ok(()) };
    if Seen::read(&run.place).tier(destination.url()).latest == Some(latest.id) {
        return Ok(());
    }
    for (source, _) in sources {
        let ours = source.records().await.unwrap_or_default();
        if ours.iter().any(|record| record.id == latest.id) {
            return Ok(());
        }
    }
    let message = format!(
        "step {} was saved there by another job, while this host could not ask; what this run has saved since is given up. Start it anew, and it goes on from there",
        latest.step
    );
    Err(Error::new(ErrorKind::Fenced, message).object(destination.url()))
}

/// All that a store has ever had, and tells of.
async fn ids(store: &Store) -> Result<BTreeSet<Id>> {
    Ok(store.records().await?.into_iter().map(|record| record.id).collect())
}

/// A job that went on elsewhere, from a tier further away, has left a nearer one behind. What that one has, and the other does not, and was
/// saved before, is of a line that the job did not go on with: it must not come after what it went on to, and is forgotten.
async fn forget_abandoned(run: &Run, source: &Store, destination: &Store, latest: Option<&SnapshotRecord>) -> Result<()> {
    let (Some(latest), records) = (latest, source.records().await?) else { return Ok(()) };
    if records.iter().any(|record| record.id == latest.id) {
        return Ok(());
    }
    let (has, newest) = (ids(destination).await?, saved_at(destination, latest, PATIENCE).await);
    let mut abandoned = Vec::new();
    for record in records.iter().filter(|record| record.status == Status::Live && !has.contains(&record.id)) {
        if saved_at(source, record, PATIENCE).await > newest {
            // The job has come back.
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
            "the job went on from {} without these steps; they are forgotten, and stay until they are collected",
            destination.url()
        );
        source.forget_snapshots(&abandoned.iter().map(|record| record.id).collect::<Vec<_>>()).await?;
    }
    Ok(())
}
