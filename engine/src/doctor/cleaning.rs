//! Removal of runs from shared memory that nobody trains any more: `tensorcask agent clean`.

use std::path::Path;
use std::time::{Duration, SystemTime};

use tensorcask::{Error, ErrorKind, Result};

use crate::ipc::connection::remove_run;
use crate::os::folders::{EngineFolder, RunFolder};
use crate::os::lock::{Lock, is_held};
use crate::run::spec::RunSpec;

/// Whether runs are removed, or only shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cleaning {
    /// Only show what would be removed.
    Show,
    /// Remove the memory. Saves that the store does not have are lost.
    Apply,
}

/// A run in shared memory.
#[derive(Debug, Clone, PartialEq)]
pub struct CleanedRun {
    /// Name of the run.
    pub run: String,
    /// Bytes of shared memory that it uses.
    pub bytes: u64,
    /// Seconds since its files changed.
    pub seconds_since_change: f64,
    /// Result for this run.
    pub result: CleanResult,
}

/// Result of cleaning one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CleanResult {
    /// A process trains it.
    InUse,
    /// Its files have changed within a day, and it was not named.
    Recent,
    /// It would be removed.
    Removable,
    /// It was removed.
    Removed,
}

impl CleanResult {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::InUse => "in_use",
            Self::Recent => "recent",
            Self::Removable => "removable",
            Self::Removed => "removed",
        }
    }

    /// A sentence for people.
    pub fn describe(self) -> &'static str {
        match self {
            Self::InUse => "kept: a process trains it",
            Self::Recent => "kept: it has changed within a day; name the run to remove it nevertheless",
            Self::Removable => "would be removed with --apply; saves that the store does not have would be lost",
            Self::Removed => "removed",
        }
    }
}

/// Removes runs from shared memory that no process trains: the run of this name, or all that have not changed for a day. Fails with
/// `NotFound` if no run has the name.
pub fn clean_runs(folder: Option<&Path>, run: Option<&str>, cleaning: Cleaning) -> Result<Vec<CleanedRun>> {
    let none = || Error::not_found(format!("no run `{}` is in shared memory", run.unwrap_or_default().escape_debug()));
    let Some(folder) = EngineFolder::find(folder) else { return if run.is_some() { Err(none()) } else { Ok(Vec::new()) } };
    let mut found = Vec::new();
    for place in folder.runs()? {
        let spec = RunSpec::read(&place);
        let name = spec.map_or_else(|| place.root().display().to_string(), |spec| spec.run);
        if run.is_some_and(|wanted| wanted != name) {
            continue;
        }
        let (bytes, changed) = usage(place.root())?;
        let age = changed.and_then(|changed| changed.elapsed().ok()).unwrap_or_default();
        let result = match (is_trained(&place)?, run.is_some() || age >= UNCHANGED) {
            (true, _) => CleanResult::InUse,
            (false, false) => CleanResult::Recent,
            (false, true) => match cleaning {
                Cleaning::Show => CleanResult::Removable,
                Cleaning::Apply => {
                    remove(&folder, &place)?;
                    CleanResult::Removed
                }
            },
        };
        found.push(CleanedRun { run: name, bytes, seconds_since_change: age.as_secs_f64(), result });
    }
    if run.is_some() && found.is_empty() { Err(none()) } else { Ok(found) }
}

/// Removes a run by the agent, or without one, in its place.
fn remove(folder: &EngineFolder, run: &RunFolder) -> Result<()> {
    let key = run.root().file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match Lock::acquire(&folder.agent_lock()) {
        Ok(_no_agent) => match is_trained(run)? {
            true => Err(Error::new(ErrorKind::Conflict, "a process has begun to train this run").object(run.root().display().to_string())),
            false => run.clear(),
        },
        Err(error) if error.kind() == ErrorKind::Conflict => remove_run(folder, key),
        Err(error) => Err(error),
    }
}

/// Whether a process trains a rank of the run.
fn is_trained(run: &RunFolder) -> Result<bool> {
    Ok(run.ranks()?.into_iter().any(|rank| is_held(&run.rank(rank).lock())))
}

/// Bytes that the files of a folder take, and the time of the last change.
fn usage(folder: &Path) -> Result<(u64, Option<SystemTime>)> {
    use std::os::unix::fs::MetadataExt;
    let mut bytes = 0u64;
    let mut changed = None;
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        let fail = |e: std::io::Error| Error::io(next.display().to_string(), e);
        for entry in std::fs::read_dir(&next).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            // A file that an agent removes meanwhile takes nothing.
            let Ok(found) = entry.metadata() else { continue };
            if found.is_dir() {
                folders.push(entry.path());
            } else {
                bytes = bytes.saturating_add(found.blocks().saturating_mul(512));
            }
            changed = changed.max(found.modified().ok());
        }
    }
    Ok((bytes, changed))
}

/// Time without a change after which a run counts as abandoned.
const UNCHANGED: Duration = Duration::from_secs(24 * 3600);
