//! The doctor: examines a store for damage, an unsafe storage and leftovers, and gives advice.
//!
//! It checks the log and the objects that the log names, races creates on the storage, and lists leftovers as garbage
//! collection would. It deletes leftovers only if asked, and only in a store without damage.

use std::time::Duration;

use super::gc::staged;
use super::{Deletable, GcOptions, Problem, VerifyDepth, VerifyOptions, gc, verify};
use crate::commit::{DEFAULT_AGE_FLOOR, read_store_file};
use crate::store::{Medium, ProbeReport, probe, probe_without_store};
use crate::{Error, ErrorKind, Result, Store};

/// Options of an examination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DoctorOptions {
    /// Whether to delete leftovers. Otherwise they are only reported.
    pub apply: bool,
    /// Smallest age of leftovers that may be deleted: see [`GcOptions::age_floor`].
    pub age_floor: Duration,
}

impl Default for DoctorOptions {
    fn default() -> Self {
        Self { apply: false, age_floor: DEFAULT_AGE_FLOOR }
    }
}

/// Result of an examination.
#[derive(Debug, Default)]
pub struct DoctorReport {
    /// Whether there is a store. A place without one is only probed, to test a storage before the first save.
    pub has_store: bool,
    /// Whether leftovers were deleted.
    pub applied: bool,
    /// Objects that the log names and that are missing or damaged. Casks are not read.
    pub problems: Vec<Problem>,
    /// Result of racing creates, of which exactly one must win; `None` if the storage failed the race.
    pub probe: Option<ProbeReport>,
    /// Objects that nothing names, old enough to be deleted.
    pub orphans: Vec<Deletable>,
    /// Objects that nothing names, but too young to be deleted, or directories.
    pub young: Vec<Deletable>,
    /// Files that a killed writer left on local disk, old enough to be deleted. Listings of the store do not show them.
    pub staging: Vec<Deletable>,
    /// Advice on settings outside the store.
    pub advice: Vec<String>,
}

impl DoctorReport {
    /// Whether there is a store and it has no problem. Leftovers do no harm.
    pub fn is_healthy(&self) -> bool {
        self.has_store && self.problems.is_empty()
    }
}

/// Examines a store: broken links, an unsafe storage, leftovers. Deletes leftovers if the options say so, and
/// nothing else. In a place without a store, it only tests the storage.
pub async fn doctor(store: &Store, options: &DoctorOptions) -> Result<DoctorReport> {
    let mut report = DoctorReport { applied: options.apply, ..DoctorReport::default() };
    // First, because they may fill the disk on which the storage is tested. They are no objects.
    report.staging = staged(store, options.age_floor, options.apply).await?.into_iter().map(Deletable::of).collect();
    let depth = VerifyOptions { depth: VerifyDepth::Log, ..VerifyOptions::default() };
    let verified = match verify(store, &depth).await {
        Err(e) if e.kind() == ErrorKind::NotFound && is_absent(store).await => return without_store(store).await,
        verified => verified?,
    };
    (report.has_store, report.problems) = (true, verified.problems);
    let is_whole = report.problems.is_empty();
    let note = |error: Error| Problem { step: None, steps: Vec::new(), error };
    match probe(store.objects()).await {
        Ok(probe) => report.probe = Some(probe),
        Err(e) => report.problems.push(note(e)),
    }
    // With a broken link, the objects that are needed are unknown. A storage that fails, such as a full disk, breaks no link.
    if is_whole && report.problems.iter().all(|problem| problem.error.kind() == ErrorKind::Storage) {
        let leftovers = GcOptions { apply: options.apply, age_floor: options.age_floor, collect: false, directories: false };
        match gc(store, &leftovers).await {
            Ok(found) => (report.orphans, report.young) = (found.deleted, found.waiting),
            Err(e) if e.kind() == ErrorKind::Corrupt => report.problems.push(note(e)),
            Err(e) => return Err(e),
        }
        report.orphans.retain(|orphan| !is_interrupted_write(&orphan.path));
    } else {
        report.advice.push("leftovers were not looked for: while something is broken, nothing is deleted".to_owned());
    }
    report.advice.extend(advice(store));
    Ok(report)
}

/// Whether a place has no store.
async fn is_absent(store: &Store) -> bool {
    read_store_file(store).await.is_err_and(|e| e.kind() == ErrorKind::NotFound)
}

async fn without_store(store: &Store) -> Result<DoctorReport> {
    let mut report = DoctorReport { advice: advice(store), ..DoctorReport::default() };
    match probe_without_store(store.objects()).await {
        Ok(probe) => report.probe = Some(probe),
        Err(error) => report.problems.push(Problem { step: None, steps: Vec::new(), error }),
    }
    Ok(report)
}

/// Whether a file in a store on a local disk is one of a write under way, or of one that was interrupted: `name#number`.
///
/// ```
/// assert!(tensorcask::maintain::is_interrupted_write("cask#1"));
/// assert!(!tensorcask::maintain::is_interrupted_write("cask"));
/// ```
pub fn is_interrupted_write(name: &str) -> bool {
    name.rsplit_once('#').is_some_and(|(_, number)| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

fn advice(store: &Store) -> Vec<String> {
    if store.objects().medium != Medium::Remote {
        return vec![];
    }
    let uploads = "unfinished multipart uploads cannot be listed from here, and are paid for: let a lifecycle rule of the bucket end \
                   them after some days (AbortIncompleteMultipartUpload on S3 and GCS; Azure drops uncommitted blocks after a week)";
    let expiry = "lifecycle rules cannot be read from here: make sure that none expires or archives objects below this root; a base \
                  is old and needed";
    vec![uploads.to_owned(), expiry.to_owned()]
}
