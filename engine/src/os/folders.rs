//! The engine's folders on a host: one per user, one per run, one per rank.
//!
//! ```text
//! /dev/shm/tensorcask-<uid>/              mode 0700
//!   agent.sock agent.lock agent.log       the agent
//!   <key>/                                one run
//!     run.json                            description of the run, for the agent
//!     seen.json seen.lock                 newest known snapshot and writer of each tier
//!     saves.json                          saves that failed for good, and those that the first tier may lack
//!     encoding.json                       the save that is being encoded, and how often an agent has died at it
//!     over                                exists once the run has finished: memory is freed after the last upload
//!     memory-<n>/                         encoded snapshots: a store; the highest number is in use
//!     mirror/                             many hosts: a part of the first tier, with the casks of this host's ranks
//!     replica-<h>/                        many hosts: a copy of the casks of another host's ranks
//!     meeting/                            many hosts: messages to other hosts, which their ranks read
//!     hosts.json hosts.lock               many hosts: what the hosts have in memory
//!     agreement.lock                      many hosts: one rank asks for all
//!     session.json session.lock           many hosts: notes about the session, its ranks and leader
//!     undecided.json                      many hosts: saves that wait for their commit
//!     damaged.json                        many hosts: damaged copies
//!     rank-<r>/lock arena                 one trainer
//! ```

use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use tensorcask::{Error, Result};

use super::files::{list_folders, list_numbered, remove_file, remove_folder, replace_file};

/// Name of the list of damaged copies in the memory of hosts, in the folder of a run.
pub(crate) const DAMAGED_COPIES: &str = "damaged.json";
/// Name of the notes about saves that failed for good, and about those that the first tier may lack.
pub(crate) const NOTED_SAVES: &str = "saves.json";
/// Name of the notes about the steps that wait for their commit, and about the newest durable one.
pub(crate) const UNDECIDED_SAVES: &str = "undecided.json";

/// Name of the notes about the save that is being encoded.
pub(crate) const ENCODING_ATTEMPT: &str = "encoding.json";

/// Environment variable that names the engine's folder.
pub const FOLDER_VARIABLE: &str = "TENSORCASK_ENGINE_DIR";

/// The engine's folder on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EngineFolder {
    root: PathBuf,
}

impl EngineFolder {
    /// Opens the folder; creates it if it is missing.
    pub(crate) fn open(folder: Option<&Path>) -> Result<Self> {
        let root = Self::path(folder)?;
        create_private_folder(&root)?;
        Ok(Self { root })
    }

    /// Finds the folder; `None` if it is missing.
    pub(crate) fn find(folder: Option<&Path>) -> Option<Self> {
        let root = Self::path(folder).ok()?;
        root.is_dir().then_some(Self { root })
    }

    /// The path from the root on: the agent has another working directory.
    fn path(folder: Option<&Path>) -> Result<PathBuf> {
        let named =
            folder.map(Path::to_owned).or_else(|| std::env::var_os(FOLDER_VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from));
        let path = named.unwrap_or_else(|| PathBuf::from(format!("/dev/shm/tensorcask-{}", rustix::process::getuid().as_raw())));
        std::path::absolute(&path).map_err(|e| Error::io(path.display().to_string(), e))
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.root.join("agent.sock")
    }

    pub(crate) fn agent_lock(&self) -> PathBuf {
        self.root.join("agent.lock")
    }

    pub(crate) fn agent_log(&self) -> PathBuf {
        self.root.join("agent.log")
    }

    /// The folder of a run.
    pub(crate) fn run(&self, key: &str) -> RunFolder {
        RunFolder { root: self.root.join(key) }
    }

    /// Lists the folders of all runs that left a description here.
    pub(crate) fn runs(&self) -> Result<Vec<RunFolder>> {
        let runs = list_folders(&self.root)?.into_iter().map(|root| RunFolder { root });
        Ok(runs.filter(|run| run.spec().is_file()).collect())
    }

    /// Size of the file system in bytes. One without a limit can take all memory of the machine.
    pub(crate) fn capacity_bytes(&self) -> Result<u64> {
        let found = rustix::fs::statvfs(&self.root).map_err(|e| Error::io(self.root.display().to_string(), e.into()))?;
        Ok(match found.f_blocks.saturating_mul(found.f_frsize) {
            0 => {
                let memory = rustix::system::sysinfo();
                memory.totalram.saturating_mul(memory.mem_unit.into())
            }
            bytes => bytes,
        })
    }
}

/// The folder of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunFolder {
    root: PathBuf,
}

impl RunFolder {
    pub(crate) fn create(&self) -> Result<()> {
        create_private_folder(&self.root)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn spec(&self) -> PathBuf {
        self.root.join("run.json")
    }

    /// Path of the notes about the tiers.
    pub(crate) fn known_tiers(&self) -> PathBuf {
        self.root.join("seen.json")
    }

    /// Path of the notes about the session of many hosts.
    pub(crate) fn session_notes(&self) -> PathBuf {
        self.root.join("session.json")
    }

    /// Whether a trainer has finished the run.
    pub(crate) fn is_finished(&self) -> bool {
        finished_mark(&self.root).exists()
    }

    /// Notes for later agents that the run has finished.
    pub(crate) fn mark_finished(&self) -> Result<()> {
        replace_file(&finished_mark(&self.root), b"")
    }

    /// Notes for later agents that the run continues.
    pub(crate) fn mark_active(&self) -> Result<()> {
        remove_file(&finished_mark(&self.root))
    }

    pub(crate) fn rank(&self, rank: u32) -> RankFolder {
        RankFolder { root: self.root.join(format!("rank-{rank}")) }
    }

    /// Lists the ranks that have a folder here.
    pub(crate) fn ranks(&self) -> Result<Vec<u32>> {
        list_numbered(&self.root, "rank-").map(|found| found.into_iter().filter_map(|rank| u32::try_from(rank).ok()).collect())
    }

    /// Path of the mirror of the first tier.
    pub(crate) fn mirror(&self) -> PathBuf {
        self.root.join("mirror")
    }

    /// Path of the copy of another host's mirror.
    pub(crate) fn replica(&self, host: u32) -> PathBuf {
        self.root.join(format!("replica-{host}"))
    }

    /// Path of the messages to other hosts.
    pub(crate) fn meeting(&self) -> PathBuf {
        self.root.join("meeting")
    }

    /// Path of the survey of the memory of all hosts.
    pub(crate) fn hosts_survey(&self) -> PathBuf {
        self.root.join("hosts.json")
    }

    /// Path of the lock that one rank of this host holds while it asks other hosts for all, about their memory.
    pub(crate) fn hosts_lock(&self) -> PathBuf {
        self.root.join("hosts.lock")
    }

    /// The same for an agreement on a step. Ranks that have not asked about memory yet must not wait for it.
    pub(crate) fn agreement_lock(&self) -> PathBuf {
        self.root.join("agreement.lock")
    }

    /// Lists the hosts of which there is a copy.
    pub(crate) fn replicas(&self) -> Result<Vec<u32>> {
        list_numbered(&self.root, "replica-").map(|found| found.into_iter().filter_map(|host| u32::try_from(host).ok()).collect())
    }

    /// Path of the store in memory with this number.
    pub(crate) fn memory(&self, epoch: u64) -> PathBuf {
        self.root.join(format!("memory-{epoch}"))
    }

    /// Lists the numbers of the stores in memory, ascending.
    pub(crate) fn epochs(&self) -> Result<Vec<u64>> {
        list_numbered(&self.root, "memory-")
    }

    /// Removes everything except locks, because other processes may wait for them.
    pub(crate) fn clear(&self) -> Result<()> {
        remove_folder(&self.mirror())?;
        remove_folder(&self.meeting())?;
        remove_file(&self.hosts_survey())?;
        remove_file(&self.root.join(DAMAGED_COPIES))?;
        for host in self.replicas()? {
            remove_folder(&self.replica(host))?;
        }
        for epoch in self.epochs()? {
            remove_folder(&self.memory(epoch))?;
        }
        for rank in self.ranks()? {
            remove_file(&self.rank(rank).arena())?;
            remove_file(&self.rank(rank).new_arena())?;
        }
        remove_file(&self.root.join(NOTED_SAVES))?;
        remove_file(&self.root.join(UNDECIDED_SAVES))?;
        remove_file(&self.root.join(ENCODING_ATTEMPT))?;
        remove_file(&self.known_tiers())?;
        remove_file(&self.spec())?;
        self.mark_active()
    }
}

/// Path of the file that exists once the run has finished.
fn finished_mark(run: &Path) -> PathBuf {
    run.join("over")
}

/// The folder of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RankFolder {
    root: PathBuf,
}

impl RankFolder {
    pub(crate) fn create(&self) -> Result<()> {
        create_private_folder(&self.root)
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    pub(crate) fn arena(&self) -> PathBuf {
        self.root.join("arena")
    }

    /// Path of an arena while it is being created.
    pub(crate) fn new_arena(&self) -> PathBuf {
        self.arena().with_extension("new")
    }
}

/// Publishes a message to other hosts under a name with folders. Two threads never publish one message at once.
pub(crate) fn publish(run: &RunFolder, name: &str, bytes: &[u8]) -> Result<()> {
    let path = run.meeting().join(name);
    if let Some(folder) = path.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|e| Error::io(folder.display().to_string(), e))?;
    }
    replace_file(&path, bytes)
}

/// The end of an error message about too little space: free bytes of the file system, and how to get more.
pub(crate) fn describe_free_space(folder: &Path) -> String {
    let free = match rustix::fs::statvfs(folder) {
        Ok(found) if found.f_blocks == 0 => "no limit, and the machine has no memory left".to_owned(),
        found => format!("{} free", found.map_or(0, |found| found.f_bavail.saturating_mul(found.f_frsize))),
    };
    format!(
        "{} has {free}. Make it larger (mount -o remount,size=..., docker --shm-size, a larger emptyDir of medium Memory), or point \
         {FOLDER_VARIABLE} to a folder with room, or remove the folders of finished runs",
        folder.display()
    )
}

/// Creates a folder for this user alone. An existing folder must belong to this user with mode 0700: anybody can create
/// names in `/dev/shm`.
fn create_private_folder(path: &Path) -> Result<()> {
    let fail = |e: std::io::Error| Error::io(path.display().to_string(), e);
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => return Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(fail(e)),
    }
    let meta = std::fs::symlink_metadata(path).map_err(fail)?;
    if !meta.is_dir() || meta.uid() != rustix::process::getuid().as_raw() || meta.mode() & 0o077 != 0 {
        let message = format!("must be a folder of this user with mode 0700; remove it, or set {FOLDER_VARIABLE} to another folder");
        return Err(Error::invalid(message).object(path.display().to_string()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use tensorcask::ErrorKind;

    use super::EngineFolder;

    #[test]
    fn a_relative_folder_is_named_from_the_root_on() {
        assert_eq!(EngineFolder::path(Some("some/engine".as_ref())).unwrap(), std::env::current_dir().unwrap().join("some/engine"));
    }

    #[test]
    fn a_folder_that_others_can_enter_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("engine");
        EngineFolder::open(Some(&root)).unwrap();
        EngineFolder::open(Some(&root)).unwrap();
        std::fs::set_permissions(&root, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(EngineFolder::open(Some(&root)).unwrap_err().kind(), ErrorKind::InvalidArgument);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        assert!(EngineFolder::open(Some(&link)).is_err());
    }
}
