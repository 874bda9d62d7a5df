//! Contract tests of a storage: the guarantees that commits, uploads and partial reads rely on.

use bytes::Bytes;

use crate::maintain::{VerifyDepth, VerifyOptions, verify};
use crate::store::{Created, Upload, probe};
use crate::wire::Id;
use crate::{Blob, Dtype, Error, ErrorKind, Latest, Metadata, Policy, Result, Slice, Store, TensorView};

/// Runs every check on an empty store. The error names the check that failed. Leaves objects behind.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// tensorcask::testing::store::run_all(&tensorcask::Store::open("memory://")?).await
/// # }
/// ```
pub async fn run_all(store: &Store) -> Result<()> {
    store.objects().ensure_root().await?;
    let named = |name: &'static str| move |e: Error| Error::new(e.kind(), format!("{name}: {e}")).source(e);
    probe_accepts(store).await.map_err(named("probe"))?;
    create_is_exclusive(store).await.map_err(named("create"))?;
    ranges_are_exact(store).await.map_err(named("ranges"))?;
    uploads_arrive(store).await.map_err(named("upload"))?;
    listing_is_complete(store).await.map_err(named("list"))?;
    one_writer_wins(store).await.map_err(named("race"))?;
    cycle(store).await.map_err(named("cycle"))
}

fn ensure(condition: bool, message: impl Into<String>) -> Result<()> {
    if condition { Ok(()) } else { Err(Error::new(ErrorKind::UnsafeStore, message)) }
}

async fn probe_accepts(store: &Store) -> Result<()> {
    probe(store.objects()).await?;
    ensure(store.objects().list("probe").await?.is_empty(), "the probe left scratch objects")
}

async fn create_is_exclusive(store: &Store) -> Result<()> {
    let object = format!("scratch/{}", Id::random()?);
    let storage = |e| Error::storage(&object, e);
    ensure(
        matches!(store.objects().create(&object, Bytes::from_static(b"one")).await.map_err(storage)?, Created::Written),
        "the first create lost",
    )?;
    ensure(
        matches!(store.objects().create(&object, Bytes::from_static(b"two")).await.map_err(storage)?, Created::Exists),
        "the second create won",
    )?;
    ensure(store.objects().get(&object, 10).await?.as_ref() == b"one", "the loser's bytes are there")?;
    ensure(matches!(store.objects().get(&object, 2).await, Err(e) if e.kind() == ErrorKind::LimitExceeded), "a limit was not kept")?;
    ensure(store.objects().get_if_present("scratch/none", 10).await?.is_none(), "an object that nobody wrote")?;
    store.objects().delete(&object).await?;
    store.objects().delete(&object).await?;
    ensure(store.objects().get_if_present(&object, 10).await?.is_none(), "a deleted object is still there")
}

async fn ranges_are_exact(store: &Store) -> Result<()> {
    let object = format!("scratch/{}", Id::random()?);
    let body: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
    store.objects().create_unique(&object, body.clone().into()).await?;
    store.objects().create_unique(&object, body.clone().into()).await?;
    let ranges = [99_990..100_000, 0..1, 50..50, 10..20, 15..40_000];
    for (range, bytes) in ranges.iter().zip(store.objects().get_ranges(&object, &ranges).await?) {
        ensure(bytes == body[range.start as usize..range.end as usize], format!("range {range:?} holds other bytes"))?;
    }
    ensure(
        store.objects().get_ranges(&object, std::slice::from_ref(&(99_990..100_001))).await.is_err(),
        "a range past the end was answered short",
    )
}

async fn uploads_arrive(store: &Store) -> Result<()> {
    for size in [0usize, 1000, 20 << 20] {
        let object = format!("scratch/{}", Id::random()?);
        let body: Vec<u8> = (0..size).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
        let mut upload = Upload::new(store, object.clone(), size as u64);
        for piece in body.chunks(3_000_001) {
            upload.push(vec![Bytes::copy_from_slice(piece)]).await?;
        }
        upload.finish().await?;
        ensure(store.objects().get(&object, size as u64).await? == body, format!("an upload of {size} bytes arrived otherwise"))?;
        store.objects().delete(&object).await?;
    }
    let object = format!("scratch/{}", Id::random()?);
    let mut upload = Upload::new(store, object.clone(), 20 << 20);
    upload.push(vec![Bytes::from(vec![1; 20 << 20])]).await?;
    upload.abort().await;
    drop(upload);
    ensure(store.objects().get_if_present(&object, u64::MAX).await?.is_none(), "an aborted upload is there")
}

async fn listing_is_complete(store: &Store) -> Result<()> {
    let folder = format!("offers/contract-{}", Id::random()?);
    let names: Vec<String> = (0..25).map(|i| format!("{folder}/{}.json", 100 + i)).collect();
    for name in names.iter().rev() {
        store.objects().create_unique(name, Bytes::from_static(b"x")).await?;
    }
    let found: Vec<String> = store.objects().list(&folder).await?.into_iter().map(|listed| listed.path).collect();
    ensure(found == names, format!("listed {found:?}"))?;
    ensure(store.objects().list("no-such-folder").await?.is_empty(), "a folder that is not there lists objects")
}

/// Lets sixteen writers create one name. Exactly one must win, and its bytes must be stored.
async fn one_writer_wins(store: &Store) -> Result<()> {
    for round in 0..4 {
        let object = format!("scratch/race-{}-{round}", Id::random()?);
        let racers = (0..16u8).map(|racer| {
            let store = store.clone();
            let object = object.clone();
            tokio::spawn(async move { (racer, store.objects().create(&object, Bytes::from(vec![racer; 64])).await) })
        });
        let mut winners = Vec::new();
        for racer in racers.collect::<Vec<_>>() {
            let (racer, outcome) = racer.await.map_err(|e| Error::new(ErrorKind::Storage, e.to_string()))?;
            if let Created::Written = outcome.map_err(|e| Error::storage(&object, e))? {
                winners.push(racer);
            }
        }
        let [winner] = winners[..] else { return ensure(false, format!("winners: {winners:?}")) };
        ensure(store.objects().get(&object, 64).await?.as_ref() == [winner; 64], "a loser's bytes are there")?;
    }
    Ok(())
}

/// Saves, restores, slices, pins, forgets and verifies. Then a second writer fences the first.
async fn cycle(store: &Store) -> Result<()> {
    let mut writer = store.writer(Policy::Consecutive).await?;
    let mut weights: Vec<u8> = (0..4 * 600_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    let moments = vec![0u8; 4 * 1000];
    let mut states = Vec::new();
    for step in 1..=3u64 {
        weights[step as usize * 400] ^= 0xff;
        let state = [
            TensorView::new("model.w", Dtype::F32, &[600, 1000], &weights)?,
            TensorView::new("optimizer.exp_avg.w", Dtype::F32, &[1000], &moments)?,
        ];
        let blobs = [Blob::new("rng", step.to_string().into_bytes())];
        writer.save(step, &state, &blobs, &Metadata::default()).await?;
        states.push(weights.clone());
    }
    for (step, state) in (1..).zip(&states) {
        let snapshot = store.snapshot(step).await?;
        ensure(snapshot.read("model.w", &Slice::all()).await?.data == *state, format!("step {step} holds other bytes"))?;
        let rows = snapshot.read("model.w", &Slice::ranges([100..103, 5..900])).await?;
        let expected: Vec<u8> = (100..103).flat_map(|row| state[(row * 1000 + 5) * 4..(row * 1000 + 900) * 4].to_vec()).collect();
        ensure(rows.data == expected, format!("a slice of step {step} holds other bytes"))?;
        ensure(snapshot.read_blob(0, "rng").await? == step.to_string().into_bytes(), "a blob holds other bytes")?;
    }
    store.pin(1).await?;
    ensure(store.forget(&[1]).await.is_err(), "a pinned step was forgotten")?;
    store.forget(&[2]).await?;
    ensure(store.snapshot(2).await.is_err(), "a forgotten step is still there")?;
    ensure(store.snapshot(Latest).await?.step() == 3, "the latest step is not the newest")?;
    let mut second = store.writer(Policy::Consecutive).await?;
    let state = [TensorView::new("model.w", Dtype::F32, &[600, 1000], &weights)?];
    let fenced = writer.save(4, &state, &[], &Metadata::default()).await;
    ensure(matches!(fenced, Err(e) if e.kind() == ErrorKind::Fenced), "a writer went on although another took over")?;
    second.save(4, &state, &[], &Metadata::default()).await?;
    let report = verify(store, &VerifyOptions { depth: VerifyDepth::Full, ..VerifyOptions::default() }).await?;
    match report.problems.into_iter().next() {
        None => Ok(()),
        Some(problem) => Err(problem.error),
    }
}
