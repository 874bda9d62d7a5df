//! From memory to the first tier, and from each tier to the next: byte by byte, as a commit of each snapshot.

use std::sync::Arc;
use std::time::Instant;

use tensorcask::{Copier, CopyOptions, ErrorKind, Result, Store};
use tracing::Instrument;

use super::encode::WAITS;
use super::run::{Run, Seen, Uploaded};
use crate::tier::open_epoch;

/// Fills a tier from the one before, for as long as the agent lives.
pub(super) async fn upload_loop(run: Arc<Run>, tier: usize) {
    let Some(notify) = run.upload.get(tier) else { return };
    let mut copier = None;
    let mut wait = WAITS.0;
    loop {
        let span = tracing::info_span!("upload", run = run.spec.run, tier);
        match upload(&run, tier, &mut copier).instrument(span).await {
            Ok(()) => {
                wait = WAITS.0;
                notify.notified().await;
            }
            Err(error) if error.kind() == ErrorKind::Fenced && tier == 0 => {
                copier = None;
                run.stop(error.to_string());
                notify.notified().await;
            }
            Err(error) => {
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

async fn upload(run: &Run, tier: usize, copier: &mut Option<Copier>) -> Result<()> {
    // What is out of date must not go up.
    let idle = run.stopped() || run.is_out_of_date();
    let (Some(destination), false) = (run.tiers.get(tier), idle) else { return Ok(()) };
    let Some((source, epoch)) = source(run, tier).await? else { return Ok(()) };
    let takes_over = run.takes_over(tier);
    if takes_over {
        *copier = None;
    }
    if copier.is_none() {
        let resume = Seen::read(&run.place).writers.get(tier).copied().flatten().filter(|_| !takes_over);
        let opened = source.copier(destination, CopyOptions::default(), resume).await?;
        Seen::update(&run.place, |seen| {
            seen.writers.resize(run.tiers.len(), None);
            if let Some(writer) = seen.writers.get_mut(tier) {
                *writer = Some(opened.id());
            }
            // Whoever resumes may find that another has written there: that is not what this run knows.
            if tier == 0 && resume.is_none() {
                seen.latest = opened.latest().map(|latest| latest.id);
            }
        })?;
        run.taken_over(tier);
        *copier = Some(opened);
    }
    let Some(copier) = copier.as_mut() else { return Ok(()) };
    let pending = run.pending(tier);
    let (records, begun) = (source.records().await?, Instant::now());
    let report = copier.copy_new(&source).await?;
    let upload_ms = begun.elapsed().as_secs_f64() * 1e3;
    if tier == 0 && report.snapshots > 0 {
        Seen::update(&run.place, |seen| seen.latest = copier.latest().map(|latest| latest.id))?;
    }
    let newest = records.last();
    let uploaded = Uploaded {
        epoch,
        sequence: newest.map_or(0, |record| record.sequence),
        step: newest.map(|record| record.step),
        pending_before: pending,
        copied: report.snapshots,
        upload_ms,
    };
    run.uploaded(tier, &uploaded);
    Ok(())
}

/// Where the snapshots of a tier come from, if there is anything yet, and its epoch if that is memory.
async fn source(run: &Run, tier: usize) -> Result<Option<(Store, u64)>> {
    let source = match tier.checked_sub(1) {
        None => match run.place.epochs()?.last() {
            Some(epoch) => (open_epoch(&run.place, *epoch)?, *epoch),
            None => return Ok(None),
        },
        Some(before) => match run.tiers.get(before) {
            Some(store) => (store.clone(), 0),
            None => return Ok(None),
        },
    };
    match source.0.run().await {
        Ok(_) => Ok(Some(source)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}
