//! A survey of the memory of all hosts: which objects each has. One rank of each host asks for all, and shares the result
//! on its host: every host asks every other host once.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::ObjectMeta;
use object_store::local::LocalFileSystem;
use serde::{Deserialize, Serialize};
use tensorcask::wire::{Id, LogEntry};
use tensorcask::{Error, Result};

use super::damaged_copies::CopyId;
use crate::os::files::{may_exist, replace_file};
use crate::os::folders::RunFolder;
use crate::os::lock::wait_for_lock;
use crate::peers::other_hosts::{HostFolder, OtherHosts, list};
use crate::peers::{ListedPlace, MEETING, Place};

/// Objects in the memory of all hosts, at one time in a session.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostsSurvey {
    session: Id,
    /// Hosts that did not answer.
    pub silent: Vec<u32>,
    /// Folders, those of this host first.
    folders: Vec<SurveyedFolder>,
}

/// A folder of a host: its mirror, a replica, or its messages.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SurveyedFolder {
    host: u32,
    folder: String,
    objects: Vec<SurveyedObject>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SurveyedObject {
    path: String,
    bytes: u64,
    modified_ms: u64,
}

/// How long a survey waits for hosts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SurveyWait {
    pub timeout: Duration,
    /// Log entry that some host must have; agents follow the log soon after they start.
    pub entry: Option<u64>,
}

impl HostsSurvey {
    /// The survey of this host in this session: the one that another rank has made, or a new one. The caller holds
    /// [`hosts_lock`](RunFolder::hosts_lock).
    pub(crate) async fn shared(run: &RunFolder, session: Id, others: &OtherHosts, wait: SurveyWait) -> Result<Self> {
        let found: Option<Self> = std::fs::read(run.hosts_survey()).ok().and_then(|json| serde_json::from_slice(&json).ok());
        if let Some(found) = found.filter(|found| found.session == session) {
            return Ok(found);
        }
        let made = Self::make(run, session, others, wait).await?;
        let json = serde_json::to_vec(&made).map_err(|e| Error::invalid(format!("cannot encode the survey of hosts: {e}")))?;
        replace_file(&run.hosts_survey(), &json)?;
        Ok(made)
    }

    /// The same, for a caller that does not hold the lock.
    pub(crate) async fn locked(run: &RunFolder, session: Id, others: &OtherHosts, wait: SurveyWait) -> Result<Self> {
        let _held = wait_for_lock(&run.hosts_lock()).await?;
        Self::shared(run, session, others, wait).await
    }

    async fn make(run: &RunFolder, session: Id, others: &OtherHosts, wait: SurveyWait) -> Result<Self> {
        let begun = tokio::time::Instant::now();
        let mut answered: BTreeMap<u32, Vec<HostFolder>> = BTreeMap::new();
        let mut is_reported = false;
        loop {
            let missing = others.numbers().filter(|host| !answered.contains_key(host)).collect();
            let mut silent = Vec::new();
            for (host, listed) in others.list(missing).await {
                match listed {
                    Ok(folders) => _ = answered.insert(host, folders),
                    Err(error) => {
                        if !is_reported {
                            tracing::warn!(host, %error, "this host does not answer yet");
                        }
                        silent.push(host);
                    }
                }
            }
            is_reported = true;
            let own = local_folders(run).await?;
            let is_late = begun.elapsed() >= wait.timeout;
            let has_entry =
                wait.entry.is_none_or(|entry| own.iter().chain(answered.values().flatten()).any(|found| found.has_entry(entry)));
            if is_late || (silent.is_empty() && has_entry) {
                silent.sort_unstable();
                let surveyed = |host: u32, found: &HostFolder| SurveyedFolder {
                    host,
                    folder: found.folder.clone(),
                    objects: found.objects.iter().map(SurveyedObject::of).collect(),
                };
                let of_others = answered.iter().flat_map(|(host, found)| found.iter().map(|found| surveyed(*host, found)));
                let folders = own.iter().map(|found| surveyed(others.own, found)).chain(of_others).collect();
                return Ok(Self { session, silent, folders });
            }
            if !has_entry && silent.is_empty() {
                answered.clear();
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Leaves out damaged copies.
    pub(crate) fn without(mut self, damaged: &BTreeSet<CopyId>) -> Self {
        if !damaged.is_empty() {
            for SurveyedFolder { host, folder, objects } in &mut self.folders {
                objects.retain(|object| !damaged.contains(&object.copy_id(*host, folder)));
            }
        }
        self
    }

    /// The copy of an object that a reader of [`stores`](Self::stores) takes.
    pub(crate) fn first_copy(&self, path: &str) -> Option<CopyId> {
        self.folders.iter().filter(|found| found.folder != MEETING).find_map(|SurveyedFolder { host, folder, objects }| {
            objects.iter().find(|object| object.path == path).map(|object| object.copy_id(*host, folder))
        })
    }

    /// Mirrors and replicas as places of a union, those of this host first.
    pub(crate) fn stores(&self, run: &RunFolder, others: &OtherHosts) -> Result<Vec<ListedPlace>> {
        let stores = self.folders.iter().filter(|found| found.folder != MEETING);
        stores.filter_map(|found| found.listed(run, others).transpose()).collect()
    }

    /// Messages of hosts whose name ends like this.
    pub(crate) fn messages(&self, run: &RunFolder, others: &OtherHosts, suffix: &str) -> Result<Vec<(Place, String)>> {
        let mut messages = Vec::new();
        for found in self.folders.iter().filter(|found| found.folder == MEETING) {
            let Some(listed) = found.listed(run, others)? else { continue };
            let names = found.objects.iter().map(|object| &object.path).filter(|path| path.ends_with(suffix));
            messages.extend(names.map(|name| (listed.place.clone(), name.clone())));
        }
        Ok(messages)
    }
}

impl HostFolder {
    fn has_entry(&self, entry: u64) -> bool {
        let path = LogEntry::path_of(entry);
        self.objects.iter().any(|object| object.location.as_ref() == path)
    }
}

impl SurveyedFolder {
    fn listed(&self, run: &RunFolder, others: &OtherHosts) -> Result<Option<ListedPlace>> {
        let place = match self.host == others.own {
            true => Some(local_place(run, &self.folder)?).filter(|_| may_exist(&run.root().join(&self.folder))),
            false => others.place(self.host, &self.folder),
        };
        let objects = self.objects.iter().map(SurveyedObject::meta).collect();
        Ok(place.map(|place| ListedPlace { place, objects }))
    }
}

impl SurveyedObject {
    fn of(meta: &ObjectMeta) -> Self {
        let since = SystemTime::from(meta.last_modified).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let modified_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        Self { path: meta.location.to_string(), bytes: meta.size, modified_ms }
    }

    fn copy_id(&self, host: u32, folder: &str) -> CopyId {
        CopyId { host, folder: folder.to_owned(), path: self.path.clone(), modified_ms: self.modified_ms }
    }

    fn meta(&self) -> ObjectMeta {
        let modified = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(self.modified_ms)).unwrap_or(SystemTime::UNIX_EPOCH);
        ObjectMeta {
            location: object_store::path::Path::from(self.path.as_str()),
            last_modified: modified.into(),
            size: self.bytes,
            e_tag: None,
            version: None,
        }
    }
}

async fn local_folders(run: &RunFolder) -> Result<Vec<HostFolder>> {
    let replicas = run.replicas()?.into_iter().map(|host| format!("replica-{host}"));
    let mut found = Vec::new();
    for folder in ["mirror".to_owned(), MEETING.to_owned()].into_iter().chain(replicas) {
        if may_exist(&run.root().join(&folder)) {
            let objects = list(&local_place(run, &folder)?).await?;
            found.push(HostFolder { folder, objects });
        }
    }
    Ok(found)
}

fn local_place(run: &RunFolder, folder: &str) -> Result<Place> {
    let path: PathBuf = run.root().join(folder);
    Ok(Arc::new(LocalFileSystem::new_with_prefix(&path).map_err(|e| Error::io(path.display().to_string(), e.into()))?))
}

/// Time between questions to hosts that do not answer.
const RETRY: Duration = Duration::from_millis(200);
