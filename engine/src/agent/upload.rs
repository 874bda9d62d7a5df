//! The uploaders of a run, one per tier: copy snapshots from memory to the first tier, and from each tier to the next.
//!
//! Snapshots are copied byte by byte, each as its own commit.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use tensorcask::maintain::{CompactOptions, Copier, Retainer};
use tensorcask::{Error, ErrorKind, Result, SnapshotRecord, SnapshotStatus, Store};
use tracing::field::Empty;
use tracing::{Instrument, Span};

use super::retry::Backoff;
use super::run::Run;
use super::run_event::{Event, MemoryContents, TierOrders, Upload};
use super::save_log::UploadTimes;
use super::takeover::{Permission, check_permission, is_new_writer, open_copier};
use super::upload_source::{UploadSource, find_sources, give_up, is_damaged};
use crate::memory::stores::memory_bytes;
use crate::os::clock::now_ms;
use crate::run::known_tiers::KnownTiers;

/// Fills a tier until the agent ends.
pub(super) async fn upload_loop(run: Arc<Run>, tier: usize) {
    let mut copier = None;
    let mut retainer = run.tiers.get(tier).zip(run.spec.retention).map(|(store, retention)| {
        // Its log and its manifests stay in memory between uploads.
        Retainer::new(store, retention, CompactOptions::default())
    });
    let mut backoff = Backoff::new();
    loop {
        let span = tracing::info_span!("upload", run = run.spec.run, tier, snapshots = Empty, step = Empty, upload_ms = Empty);
        let orders = run.read(|state, _| state.tiers.get(tier).map(|tier| tier.orders)).unwrap_or_default();
        let uploader = Uploader { copier: &mut copier, retainer: retainer.as_mut() };
        match upload(&run, tier, orders, uploader, &span).instrument(span.clone()).await {
            Ok(()) => {
                backoff.reset();
                run.wakes.uploader_woken(tier).await;
            }
            Err(error) if error.kind() == ErrorKind::Fenced && tier == 0 => {
                copier = None;
                run.apply(Event::Fenced { orders, why: error.to_string() });
                // If a trainer has attached since, the run is not stopped, and takes the store over now.
                if run.is_stopped() {
                    run.wakes.uploader_woken(tier).await;
                }
            }
            Err(error) => {
                // The copier's view of the log may be outdated.
                copier = None;
                run.apply(Event::UploadFailed { tier, message: error.to_string() });
                backoff.wait(run.wakes.uploader_woken(tier)).await;
            }
        }
    }
}

/// State of an uploader between uploads.
struct Uploader<'a> {
    copier: &'a mut Option<Copier>,
    retainer: Option<&'a mut Retainer>,
}

async fn upload(run: &Run, tier: usize, orders: TierOrders, uploader: Uploader<'_>, span: &Span) -> Result<()> {
    let Uploader { copier, mut retainer } = uploader;
    let (Some(destination), false) = (run.tiers.get(tier), run.is_stopped() || run.is_outdated()) else { return Ok(()) };
    if !run.read(|state, _| state.leads()) {
        *copier = None;
        run.apply(Event::NothingToUpload { tier, sources: BTreeSet::new() });
        return Ok(());
    }
    // Read before the sources, which then contain all of these generations.
    let encoded = run.read(|state, _| state.ranks.iter().map(|(rank, state)| (*rank, state.encoded)).collect());
    let sources = find_sources(run, tier).await?;
    let epochs: BTreeSet<u64> = sources.iter().map(|source| source.epoch).collect();
    let Some((newest, _)) = sources.split_last() else {
        run.apply(Event::NothingToUpload { tier, sources: epochs });
        return Ok(());
    };
    if orders.take_over {
        *copier = None;
    }
    let is_new = copier.is_none() && is_new_writer(&KnownTiers::read(&run.folder)?.tier(destination.url()));
    match check_permission(run, tier, orders, &sources, is_new).await? {
        Permission::Granted => {}
        Permission::NothingToDo => {
            run.apply(Event::NothingToUpload { tier, sources: epochs });
            return Ok(());
        }
    }
    let copier = match copier {
        Some(open) => {
            open.set_trainer(run.trainer());
            open
        }
        None => {
            if let Some(retainer) = &mut retainer
                && let Err(error) = retainer.begin().await
            {
                tracing::debug!(run = run.spec.run, tier = destination.url(), %error, "what an earlier agent has forgotten is freed later");
            }
            copier.insert(open_copier(run, tier, orders, &newest.store, destination).await?)
        }
    };
    let pending_before = run.read(|state, _| state.tiers.get(tier).map_or(0, |tier| tier.pending));
    let begun = Instant::now();
    let ahead = if tier == 0 { run.take_ahead() } else { None };
    let mut copied = 0;
    let mut ahead_bytes = 0;
    let mut records = Vec::new();
    for source in &sources {
        let copy = async {
            records = source.store.history().records().await?;
            copier.finish_ahead(ahead.clone());
            copier.copy_new(&source.store).await
        };
        match copy.await {
            Ok(report) => {
                copied += report.snapshots;
                ahead_bytes += report.ahead_bytes;
            }
            Err(error) if tier == 0 => match permanent_failure(copier, source, &error).await? {
                Some(why) => give_up(run, source, destination, format!("{why}: {}", error.message())).await?,
                None => return Err(error),
            },
            Err(error) => return Err(error),
        }
    }
    let upload_ms = begun.elapsed().as_secs_f64() * 1e3;
    if copied > 0 {
        KnownTiers::update(&run.folder, destination.url(), |known| known.latest = copier.latest().map(|latest| latest.id))?;
    }
    if run.spec.inline && tier == 0 {
        note_inline_memory(run, newest.epoch, &records)?;
    }
    let last = records.last();
    if copied > 0 {
        span.record("snapshots", copied).record("step", last.map(|record| record.step)).record("upload_ms", upload_ms);
    }
    run.apply(Event::Uploaded(Upload {
        tier,
        encoded,
        epoch: newest.epoch,
        sources: epochs,
        sequence: last.map_or(0, |record| record.sequence),
        step: last.map(|record| record.step),
        pending_before,
        copied,
        times: UploadTimes { upload_ms, ahead_bytes, time_ms: now_ms() },
    }));
    if let (true, Some(retainer)) = (copied > 0, retainer) {
        retain(run, destination, retainer).await;
    }
    Ok(())
}

/// Returns the reason if snapshots in memory can never be stored in the first tier; `None` if a retry may help. After a permanent
/// failure, the next save writes a base, with other casks.
async fn permanent_failure(copier: &mut Copier, source: &UploadSource, error: &Error) -> Result<Option<&'static str>> {
    Ok(match error.kind() {
        ErrorKind::Corrupt if is_damaged(&source.store).await? => Some("the snapshot was damaged in memory before it reached the store"),
        ErrorKind::Corrupt if copier.lacks_parents_of(&source.store).await? => {
            Some("the store no longer has the whole snapshot that this delta refers to")
        }
        _ if error.is_too_late() => Some("the store has had a part of the snapshot for too long, without a commit"),
        _ => None,
    })
}

/// Forgets the steps of a tier that the options do not keep. A failure is a warning: the next upload tries again.
async fn retain(run: &Run, tier: &Store, retainer: &mut Retainer) {
    match retainer.apply().await {
        Ok(report) => {
            for record in &report.retained.forgotten {
                tracing::info!(run = run.spec.run, tier = tier.url(), step = record.step, "forgotten");
            }
        }
        Err(error) => {
            tracing::warn!(run = run.spec.run, tier = tier.url(), %error, "older steps could not be forgotten or reduced; the next upload tries again");
        }
    }
}

/// Reports the contents of memory that the trainer itself encodes.
fn note_inline_memory(run: &Run, epoch: u64, records: &[SnapshotRecord]) -> Result<()> {
    let live = records.iter().filter(|record| record.status == SnapshotStatus::Live);
    let steps = live.map(|record| record.step).collect();
    let bytes = memory_bytes(&run.folder)?;
    run.apply(Event::MemoryChanged(MemoryContents { epoch, steps, bytes, chain_depth: 0 }));
    Ok(())
}
