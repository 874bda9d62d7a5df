//! Verifies a store: the log and the objects that it names, every byte of every cask, and every decoded chunk.

use std::collections::{BTreeMap, BTreeSet};

use super::cask_check::CaskCheck;
use crate::chain::{Link, chain_of, check_link};
use crate::commit::{
    Catalog, Contents, LogState, SnapshotRecord, SnapshotStatus, live_step, load_log, read_inline, read_manifest, read_store_file,
    without_store_file,
};
use crate::error::ResultExt;
use crate::reader::{CaskSource, Snapshot, read_directory, read_index, verify_counting};
use crate::store::Work;
use crate::wire::{CaskRef, Id, LogEntry, Manifest};
use crate::{Error, ErrorKind, Limits, Result, Store, boxed};

/// Depth of a verification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VerifyDepth {
    /// Log entries, catalogs, manifests and directories; existence and size of every cask.
    Log,
    /// Also every byte of every cask: header, pages, padding, index, postscript.
    Pages,
    /// Also every decoded chunk of every live snapshot with its checksum, and the content digests.
    #[default]
    Full,
}

impl VerifyDepth {
    /// Returns the depth with this name: `log`, `pages` or `full`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "log" => Ok(Self::Log),
            "pages" => Ok(Self::Pages),
            "full" => Ok(Self::Full),
            _ => Err(Error::invalid(format!("`{}` is not a depth; use log, pages or full", name.escape_debug()))),
        }
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Pages => "pages",
            Self::Full => "full",
        }
    }
}

/// Options of a verification.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VerifyOptions {
    /// Depth of the verification.
    pub depth: VerifyDepth,
    /// Step of the only snapshot to check, together with its chain.
    pub step: Option<u64>,
    /// Part `i` of `n` to check, so that `n` processes share the casks and snapshots. Each process checks the whole
    /// log.
    pub shard: Option<(u64, u64)>,
}

/// One problem that was found.
#[derive(Debug)]
pub struct Problem {
    /// Step in which the problem was found, if any.
    pub step: Option<u64>,
    /// All checked steps that need the damaged object, ascending. Empty if the problem concerns no step.
    pub steps: Vec<u64>,
    /// Description and place of the problem.
    pub error: Error,
}

/// Result of a verification.
#[derive(Debug, Default)]
pub struct VerifyReport {
    /// Number of log entries read.
    pub entries: u64,
    /// Number of snapshots whose manifest was checked.
    pub snapshots: u64,
    /// Number of casks of which every byte was checked.
    pub casks: u64,
    /// Number of cask bytes that were checked.
    pub cask_bytes: u64,
    /// Number of chunks that were read to be decoded and compared. The check of a snapshot ends at its first problem.
    pub chunks: u64,
    /// Problems found; empty for an intact store.
    pub problems: Vec<Problem>,
}

impl VerifyReport {
    /// Returns whether no problem was found.
    pub fn is_clean(&self) -> bool {
        self.problems.is_empty()
    }

    /// Counts a cask whose bytes were checked, and adds its problem.
    fn cask(&mut self, step: u64, cask: &CaskRef, checked: Result<()>) {
        self.casks += 1;
        self.cask_bytes += cask.bytes;
        self.note(Some(step), checked);
    }

    /// Adds a problem, unless the same problem of the same object is reported already. All deltas on a base report its
    /// missing cask.
    fn note(&mut self, step: Option<u64>, result: Result<()>) {
        let Err(error) = result else { return };
        if !self.has(&error) {
            self.problems.push(Problem { step, steps: step.into_iter().collect(), error });
        }
    }

    /// Names all steps that need a damaged object. `holders`: the snapshots that name an object; `needing`: the steps that need
    /// a snapshot.
    fn name_steps(&mut self, holders: &BTreeMap<String, Vec<Id>>, needing: &BTreeMap<Id, BTreeSet<u64>>) {
        for problem in self.problems.iter_mut().filter(|problem| problem.step.is_some()) {
            let named = problem.error.object_name().and_then(|object| holders.get(object)).into_iter().flatten();
            let steps = named.filter_map(|id| needing.get(id)).flatten().copied();
            problem.steps = steps.chain(problem.step).collect::<BTreeSet<u64>>().into_iter().collect();
        }
    }

    /// Whether this problem of this object is reported.
    fn has(&self, error: &Error) -> bool {
        let what = |error: &Error| (error.tensor_name().map(str::to_owned), error.chunk_number(), error.byte_offset());
        self.problems.iter().any(|Problem { error: known, .. }| {
            let same = known.object_name() == error.object_name() && known.message() == error.message();
            same && error.object_name().is_some() && what(known) == what(error)
        })
    }
}

/// Verifies the store and collects problems in the report. An error means that the verification itself could not
/// run.
pub async fn verify(store: &Store, options: &VerifyOptions) -> Result<VerifyReport> {
    if let Some((part, of)) = options.shard
        && (of == 0 || part >= of)
    {
        return Err(Error::invalid(format!("shard {part}/{of}: the first number is below the second")));
    }
    let mine = |number: u64| options.shard.is_none_or(|(part, of)| number % of == part);
    let mut report = VerifyReport::default();
    match read_store_file(store).await {
        Err(e) if e.kind() == ErrorKind::NotFound => return Err(without_store_file(store).await?.unwrap_or(e)),
        found => report.note(None, found.map(|_| ())),
    }
    let state = verify_log(store, &mut report).await?;
    let wanted: Vec<&SnapshotRecord> = match options.step {
        None => state.live().collect(),
        Some(step) => vec![live_step(&state, step)?],
    };

    // Manifests of all snapshots that the wanted ones need, each read once.
    let mut manifests: BTreeMap<Id, Option<Manifest>> = BTreeMap::new();
    let mut casks: BTreeMap<Id, (u64, bool, CaskRef)> = BTreeMap::new();
    let sizes: BTreeMap<String, u64> = store.objects().list("casks").await?.into_iter().map(|listed| (listed.path, listed.bytes)).collect();
    for record in &wanted {
        let chain = match chain_of(&state, record.id, store.limits().max_chain_depth) {
            Ok(chain) => chain,
            Err(e) => {
                report.note(Some(record.step), Err(e));
                continue;
            }
        };
        for link in chain.iter().rev() {
            if manifests.contains_key(&link.id) {
                continue;
            }
            let parent = link.parent.and_then(|parent| manifests.get(&parent)?.as_ref());
            let manifest = verify_manifest(store, link, parent, &sizes).await;
            match manifest {
                Ok((verified, problems)) => {
                    let manifest = verified.manifest.clone();
                    let of_base = link.parent.is_none();
                    for (at, cask) in manifest.casks.iter().enumerate() {
                        match CaskSource::of_link(store, &verified, at) {
                            CaskSource::Object { .. } => _ = casks.insert(cask.id, (link.step, of_base, cask.clone())),
                            // Checked now, so that the bytes need not be kept or read again.
                            source if options.depth != VerifyDepth::Log && mine(u64::from(cask.id.0[0])) => {
                                report.cask(link.step, cask, verify_cask(&source, cask, of_base, store.limits()).await);
                            }
                            CaskSource::Inline { .. } => {}
                        }
                    }
                    problems.into_iter().for_each(|e| report.note(Some(link.step), Err(e)));
                    manifests.insert(link.id, Some(manifest));
                }
                Err(e) => {
                    report.note(Some(link.step), Err(e));
                    manifests.insert(link.id, None);
                }
            }
            report.snapshots += 1;
        }
    }
    if options.depth == VerifyDepth::Log {
        name_steps(&mut report, store, &state, &wanted, &manifests);
        leave_out_given_up(&mut report, store, &wanted).await;
        return Ok(report);
    }

    // Skips casks that are missing or have the wrong size. The comparison of sizes has already reported them.
    casks.retain(|_, (.., cask)| sizes.get(&cask.path()) == Some(&cask.bytes));
    let (casks, of_others): (BTreeMap<_, _>, BTreeMap<_, _>) = casks.into_iter().partition(|(id, _)| mine(u64::from(id.0[0])));
    let decoded: Vec<(&SnapshotRecord, u64)> = match options.depth {
        VerifyDepth::Full => {
            let all = wanted.iter().copied().filter(|record| mine(record.sequence));
            all.map(|record| (record, chain_bytes(store, &state, record, &manifests))).collect()
        }
        _ => vec![],
    };
    let mut left = decoded.iter().map(|(_, bytes)| *bytes).chain(casks.values().map(|(.., cask)| cask.bytes)).fold(0, u64::saturating_add);
    let mut work = Work::plan(store, left);
    for (step, of_base, cask) in casks.values() {
        let source = CaskSource::object(store, cask);
        let checked = verify_bytes(&source, cask, *of_base, store.limits(), Some(&mut work)).await;
        report.cask(*step, cask, checked.map_err(|e| source.locate(e)));
        left = left.saturating_sub(cask.bytes);
        work.leave(left);
    }
    let mut elsewhere = VerifyReport::default();
    for (record, bytes) in decoded {
        let step = Some(record.step);
        match Snapshot::load(store, &state, record.id).await {
            Ok(snapshot) => {
                match verify_counting(&snapshot, &mut work).await {
                    // The part that checks the cask reports its damage.
                    Err(error) if is_damage_of(store, &of_others, &mut elsewhere, &error).await => {}
                    result => report.note(step, result),
                }
                report.chunks += snapshot.inspect().read_counts().chunks;
            }
            Err(e) => {
                // The damage may already have been reported with the manifest that it concerns.
                let chain = chain_of(&state, record.id, store.limits().max_chain_depth);
                let told =
                    chain.is_err() || chain.is_ok_and(|chain| chain.iter().any(|link| matches!(manifests.get(&link.id), Some(None))));
                if !told {
                    report.note(step, Err(e));
                }
            }
        }
        left = left.saturating_sub(bytes);
        work.leave(left);
    }
    name_steps(&mut report, store, &state, &wanted, &manifests);
    leave_out_given_up(&mut report, store, &wanted).await;
    Ok(report)
}

/// Leaves out the problems of snapshots that were given up during the verification: a job deletes the objects of steps that it forgets
/// (log 7.6).
#[boxed]
async fn leave_out_given_up(report: &mut VerifyReport, store: &Store, checked: &[&SnapshotRecord]) {
    if report.problems.iter().all(|problem| problem.steps.is_empty()) {
        return;
    }
    // The report has the problems of a log that cannot be read.
    let Ok(now) = load_log(store).await else { return };
    let is_given_up = |record: &&SnapshotRecord| now.state().by_id(record.id).is_some_and(|now| now.status == SnapshotStatus::Collected);
    report.problems.retain(|problem| {
        let concerned: Vec<&&SnapshotRecord> = checked.iter().filter(|record| problem.steps.contains(&record.step)).collect();
        concerned.is_empty() || !concerned.into_iter().all(is_given_up)
    });
}

/// Names the checked steps that need each damaged object.
fn name_steps(
    report: &mut VerifyReport,
    store: &Store,
    state: &LogState,
    wanted: &[&SnapshotRecord],
    manifests: &BTreeMap<Id, Option<Manifest>>,
) {
    let damaged: BTreeSet<String> = report.problems.iter().filter_map(|problem| problem.error.object_name().map(str::to_owned)).collect();
    if damaged.is_empty() {
        return;
    }
    let mut holders: BTreeMap<String, Vec<Id>> = BTreeMap::new();
    for (id, manifest) in manifests {
        let path = state.by_id(*id).map(SnapshotRecord::manifest_path);
        let named = manifest.iter().flat_map(|manifest| {
            let directory = format!("directories/{}", manifest.directory);
            manifest.casks.iter().map(CaskRef::path).chain([directory])
        });
        for object in path.into_iter().chain(named).filter(|object| damaged.contains(object)) {
            holders.entry(object).or_default().push(*id);
        }
    }
    let mut needing: BTreeMap<Id, BTreeSet<u64>> = BTreeMap::new();
    for record in wanted {
        for link in chain_of(state, record.id, store.limits().max_chain_depth).unwrap_or_default() {
            needing.entry(link.id).or_default().insert(record.step);
        }
    }
    report.name_steps(&holders, &needing);
}

/// Whether an error that came up while a snapshot was decoded is found by a check of one of these casks, too. `found`: what such
/// checks have found.
#[boxed]
async fn is_damage_of(store: &Store, casks: &BTreeMap<Id, (u64, bool, CaskRef)>, found: &mut VerifyReport, error: &Error) -> bool {
    let named = casks.values().find(|(.., cask)| error.object_name() == Some(cask.path().as_str()));
    let Some((step, of_base, cask)) = named else { return false };
    if !found.problems.iter().any(|problem| problem.error.object_name() == error.object_name()) {
        let source = CaskSource::object(store, cask);
        found.note(Some(*step), verify_cask(&source, cask, *of_base, store.limits()).await);
    }
    found.has(error)
}

/// Size of the casks of a chain, in bytes, as far as its manifests could be read.
fn chain_bytes(store: &Store, state: &LogState, record: &SnapshotRecord, manifests: &BTreeMap<Id, Option<Manifest>>) -> u64 {
    let chain = chain_of(state, record.id, store.limits().max_chain_depth).unwrap_or_default();
    let links = chain.iter().filter_map(|link| manifests.get(&link.id)?.as_ref());
    links.map(Manifest::stored_bytes).fold(0, u64::saturating_add)
}

/// Reads all entries from the first on, and compares catalogs with them. Stops at a broken entry, because later
/// entries cannot be trusted.
#[boxed]
async fn verify_log(store: &Store, report: &mut VerifyReport) -> Result<LogState> {
    let mut state = LogState::default();
    // Lists catalogs before it reads the log. A commit in between then adds an entry without a catalog, and never a
    // catalog without its entry.
    let mut catalogs = Catalog::list(store).await?;
    // Ignores objects with other names (README 2.2 of the spec).
    let listed = store.objects().list("log").await?.into_iter().map(|listed| listed.path);
    let mut listed: BTreeSet<String> = listed.filter(|path| LogEntry::is_path(path)).collect();
    if listed.is_empty() {
        // A storage that does not list its objects, a lost log, or a store to which nothing was ever saved.
        let bytes = store.objects().head_if_present(&LogEntry::path_of(1)).await?;
        let unlisted =
            bytes.map(|_| Error::new(ErrorKind::Storage, "is there, but the storage does not list it").object(LogEntry::path_of(1)));
        let folders = ["catalog", "directories", "snapshots", "casks"];
        let lost = Contents::of(store, &folders).await?.lost_log();
        if let Some(error) = unlisted.or(lost) {
            report.note(None, Err(error));
            return Ok(state);
        }
    }
    let mut broken = false;
    for sequence in 1..=listed.len() as u64 {
        let path = LogEntry::path_of(sequence);
        let read = async {
            let bytes = store.objects().get_if_present(&path, store.limits().max_entry_bytes).await?;
            let bytes = bytes.ok_or_else(|| Error::corrupt("is missing, although later entries are there").clause("log 3.1"))?;
            let (entry, digest) = LogEntry::decode(&bytes, sequence, store.limits())?;
            state.apply(&entry, digest)
        };
        if let Err(e) = read.await.in_object(path.as_str()) {
            report.note(None, Err(e));
            broken = true;
            break;
        }
        listed.remove(&path);
        report.entries += 1;
        // Catalogs are ordered newest first, so the last one is the next that the log reaches.
        while let Some(catalog) = catalogs.pop_if(|path| Catalog::sequence_of(path) == Some(sequence)) {
            report.note(None, verify_catalog(store, &catalog, &state).await);
        }
    }
    if !broken {
        for path in listed {
            report.note(
                None,
                Err(Error::corrupt("does not belong to the log: its number does not continue the log").object(path).clause("log 3.1")),
            );
        }
        for path in catalogs {
            report.note(None, Err(Error::corrupt("belongs to an entry that the log does not have").object(path).clause("log 6.4")));
        }
    }
    Ok(state)
}

/// Compares a catalog with the state of the log at its entry.
#[boxed]
async fn verify_catalog(store: &Store, path: &str, state: &LogState) -> Result<()> {
    let catalog = Catalog::read(store, path).await?;
    let fail = |message: String| Err(Error::corrupt(message).object(path).clause("log 6.4"));
    // Compares names as sets, because their order does not matter.
    let set = |names: &[String]| names.iter().cloned().collect::<BTreeSet<String>>();
    let features = |state: &LogState| (set(&state.must_understand), set(&state.may_ignore));
    if catalog.head != state.head
        || catalog.last_writer != state.last_writer
        || catalog.leadership != state.leadership
        || features(&catalog) != features(state)
    {
        return fail("was made from another log".into());
    }
    let rows = catalog.snapshots().iter().map(SnapshotRecord::facts);
    if let Some((_, theirs)) = state.snapshots().iter().map(SnapshotRecord::facts).zip(rows).find(|(ours, theirs)| ours != theirs) {
        return fail(format!("its row of snapshot {} disagrees with the log", theirs.id));
    }
    if catalog.snapshots().len() != state.snapshots().len() {
        return fail(format!("has {} rows for {} snapshots", catalog.snapshots().len(), state.snapshots().len()));
    }
    Ok(())
}

/// Reads a manifest with its directory. Returns them as a link, and the problems of the casks that are objects.
#[boxed]
async fn verify_manifest(
    store: &Store,
    record: &SnapshotRecord,
    parent: Option<&Manifest>,
    sizes: &BTreeMap<String, u64>,
) -> Result<(Link, Vec<Error>)> {
    let mut problems = Vec::new();
    let place = record.manifest_place();
    let (manifest, inline) = match place.inline_in {
        Some(sequence) => {
            let inline = read_inline(store, &place, sequence, None).await?;
            (inline.manifest.clone(), Some(inline))
        }
        None => (read_manifest(store, &place).await?, None),
    };
    check_link(record, &manifest, parent)?;
    let directory = read_directory(store, manifest.directory).await?;
    let link = match inline {
        Some(inline) => Link::new_inline(record.clone(), inline, directory)?,
        None => Link::new(record.clone(), manifest, directory)?,
    };
    for cask in link.manifest.casks.iter().filter(|_| link.inline.is_none()) {
        let message = match sizes.get(&cask.path()) {
            None => "a cask of a committed snapshot is missing".to_owned(),
            Some(&bytes) if bytes != cask.bytes => {
                format!("has {bytes} bytes, but the manifest says {}: truncated or replaced", cask.bytes)
            }
            Some(_) => continue,
        };
        problems.push(Error::corrupt(message).object(cask.path()).clause("manifest 2.3"));
    }
    Ok((link, problems))
}

/// Checks every byte of a cask of a base or a delta.
#[boxed]
pub(crate) async fn verify_cask(source: &CaskSource, cask: &CaskRef, of_base: bool, limits: &Limits) -> Result<()> {
    verify_bytes(source, cask, of_base, limits, None).await.map_err(|e| source.locate(e))
}

/// Counts the bytes of pages as work.
#[boxed]
async fn verify_bytes(source: &CaskSource, cask: &CaskRef, of_base: bool, limits: &Limits, mut work: Option<&mut Work>) -> Result<()> {
    let index = read_index(source, cask, limits).await?;
    for (part, range) in index.missing_parts() {
        let bytes = source.get_range(range.clone()).await?;
        index.load_part(part, bytes)?;
    }
    let mut check = CaskCheck::new(cask, &index, of_base)?;
    for window in check.windows() {
        let bytes = source.get_range(window.clone()).await?;
        check.check(&bytes)?;
        if let Some(work) = &mut work {
            work.add(window.end - window.start);
        }
    }
    Ok(())
}
