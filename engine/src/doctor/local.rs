//! Checks of this host: the engine's folder, shared memory, limits of the process and of its cgroup.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};
use tensorcask::human_bytes;

use super::checks::{Check, DoctorOptions};
use crate::os::folders::EngineFolder;
use crate::run::spec::RunSpec;

pub(super) fn check(options: &DoctorOptions) -> Vec<Check> {
    let mut checks = Vec::new();
    let folder = match EngineFolder::open(options.folder.as_deref()) {
        Ok(folder) => folder,
        Err(error) => {
            let advice = "create its parent, or set TENSORCASK_ENGINE_DIR to a folder in shared memory that only this user may enter (mode \
                          0700). In Kubernetes, mount an emptyDir of medium Memory or a hostPath there";
            return vec![Check::failed("folder", error.to_string(), advice)];
        }
    };
    checks.push(check_folder(&folder));
    checks.extend(folder.runs().unwrap_or_default().iter().filter(|run| RunSpec::read(run).is_none()).map(|run| {
        let path = run.root().display().to_string();
        Check::warning(
            "folder",
            format!("{path} has a description of a run that this version cannot read"),
            "remove the folder, or use the version that wrote it",
        )
    }));
    let memory = SharedMemory::of(folder.root());
    checks.extend(memory.as_ref().map(|memory| memory.check(options.state_bytes)));
    checks.push(check_cgroup(memory.as_ref(), options.state_bytes));
    checks.push(check_open_files());
    checks.push(check_locked_memory());
    checks
}

fn check_folder(folder: &EngineFolder) -> Check {
    let path = folder.root().display().to_string();
    let probe = folder.root().join(format!("doctor-{}", std::process::id()));
    let written = std::fs::write(&probe, b"doctor");
    let _ = std::fs::remove_file(&probe);
    match (written, std::fs::metadata(folder.root())) {
        (Err(error), _) => {
            Check::failed("folder", format!("{path} cannot be written: {error}"), "check its owner, its mode and its mount options")
        }
        (_, Err(error)) => Check::failed("folder", format!("{path}: {error}"), "check its parent folders"),
        (Ok(()), Ok(found)) => Check::ok("folder", format!("{path}: user {}, mode {:o}", found.uid(), found.mode() & 0o7777)),
    }
}

/// The file system of the folder.
struct SharedMemory {
    path: PathBuf,
    is_memory: bool,
    bytes: u64,
    free: u64,
}

impl SharedMemory {
    fn of(path: &Path) -> Option<Self> {
        let sizes = rustix::fs::statvfs(path).ok()?;
        let kind = rustix::fs::statfs(path).ok()?;
        let bytes = sizes.f_blocks.saturating_mul(sizes.f_frsize);
        let free = sizes.f_bavail.saturating_mul(sizes.f_frsize);
        // Types of the kernel: tmpfs, ramfs, hugetlbfs.
        let is_memory = [0x0102_1994_u64, 0x8584_58f6, 0x9584_58f6].contains(&(kind.f_type as u64 & 0xffff_ffff));
        Some(Self { path: path.to_owned(), is_memory, bytes, free })
    }

    fn check(&self, state_bytes: Option<u64>) -> Check {
        let found = format!("{}: {} of {} free", self.path.display(), human_bytes(self.free), human_bytes(self.bytes));
        if !self.is_memory {
            let advice = "put the engine's folder on a tmpfs, such as /dev/shm: on a disk, a save waits for the disk";
            return Check::warning("shared memory", format!("{found}, and not in memory"), advice);
        }
        let grow = "make it larger: mount -o remount,size=... as root; docker --shm-size; in Kubernetes an emptyDir of medium Memory with a \
                    larger sizeLimit; under Slurm ask the administrator, or set TENSORCASK_ENGINE_DIR to a larger tmpfs";
        match state_bytes {
            Some(state) if self.free < needed(state) => {
                let need = format!("two states of {} and their encoded form take up to {}", human_bytes(state), human_bytes(needed(state)));
                Check::failed("shared memory", format!("{found}; {need}"), grow)
            }
            None if self.bytes < SMALL => Check::warning("shared memory", format!("{found}: too little for most states"), grow),
            _ => Check::ok("shared memory", found),
        }
    }
}

/// Two raw states in slots, and as much again for encoded snapshots.
fn needed(state_bytes: u64) -> u64 {
    state_bytes.saturating_mul(4)
}

/// Compares the memory limit of the cgroup with shared memory, which counts against it.
fn check_cgroup(memory: Option<&SharedMemory>, state_bytes: Option<u64>) -> Check {
    let Some((limit, used, source)) = cgroup_limit() else {
        return Check::ok("cgroup", "no memory limit");
    };
    let found = format!("memory limit of {}, {} in use ({})", human_bytes(limit), human_bytes(used), source.display());
    let advice = "files in shared memory count against this limit, and a process beyond it is killed. Under Slurm raise --mem; in \
                  Kubernetes raise resources.limits.memory by the size of shared memory; or lower the engine's `memory_cap` and `slots`";
    let free = limit.saturating_sub(used);
    match (state_bytes, memory) {
        (Some(state), _) if free < needed(state) => {
            Check::failed("cgroup", format!("{found}; the engine needs up to {}", human_bytes(needed(state))), advice)
        }
        (None, Some(memory)) if limit < memory.bytes => {
            Check::warning("cgroup", format!("{found}, less than the {} of shared memory", human_bytes(memory.bytes)), advice)
        }
        _ => Check::ok("cgroup", found),
    }
}

/// The lowest memory limit of this process's cgroups, the memory in use there, and the file of the limit.
fn cgroup_limit() -> Option<(u64, u64, PathBuf)> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let mut lowest: Option<(u64, u64, PathBuf)> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let (root, limit_file, used_file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        let root = Path::new(root);
        // A limit of a parent counts, too. In a container, the path may not exist below the mounted root.
        for ancestor in Path::new(path).ancestors() {
            let group = root.join(ancestor.strip_prefix("/").unwrap_or(ancestor));
            let number = |file: &str| std::fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
            let Some(limit) = number(limit_file).filter(|limit| *limit < NO_LIMIT) else { continue };
            if lowest.as_ref().is_none_or(|(least, ..)| limit < *least) {
                lowest = Some((limit, number(used_file).unwrap_or(0), group.join(limit_file)));
            }
        }
    }
    lowest
}

fn check_open_files() -> Check {
    let limits = getrlimit(Resource::Nofile);
    let text = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let found = format!("{} open files (hard limit {})", text(limits.current), text(limits.maximum));
    match limits.current {
        Some(limit) if limit < FEW_FILES => {
            let advice = "run `ulimit -n 65536` before the job; under Slurm set PropagateResourceLimits or `ulimit -n` in the job script; in a \
                          container raise the limit of its runtime";
            Check::warning("ulimit -n", found, advice)
        }
        _ => Check::ok("ulimit -n", found),
    }
}

/// Slots are pinned for copies from a GPU.
fn check_locked_memory() -> Check {
    let limit = getrlimit(Resource::Memlock).current;
    let has_gpu = Path::new("/dev/nvidiactl").exists();
    let found = limit.map_or("unlimited locked memory".to_owned(), |limit| format!("{} of locked memory", human_bytes(limit)));
    match limit {
        Some(limit) if has_gpu && limit < SMALL => {
            let advice = "copies from a GPU pin the slots; if pinning fails, they are slower. Run `ulimit -l unlimited`; under Slurm set \
                          PropagateResourceLimitsExcept=MEMLOCK; in a container raise the limit of its runtime";
            Check::warning("ulimit -l", found, advice)
        }
        _ => Check::ok("ulimit -l", found),
    }
}

/// Shared memory below which states of today do not fit; the default of containers is 64 MiB.
const SMALL: u64 = 1 << 30;
const FEW_FILES: u64 = 4096;
/// Version 1 of cgroups writes a number of about this size for no limit.
const NO_LIMIT: u64 = 1 << 62;

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::checks::CheckState;
    use super::{SharedMemory, needed};

    #[test]
    fn shared_memory_is_compared_with_the_state() {
        let memory = |free: u64, is_memory| SharedMemory { path: PathBuf::from("/dev/shm"), is_memory, bytes: 2 * free, free };
        let state = |memory: SharedMemory, state| memory.check(state).state;
        assert_eq!(state(memory(8 << 30, true), Some(1 << 30)), CheckState::Ok);
        assert_eq!(state(memory(3 << 30, true), Some(1 << 30)), CheckState::Failed);
        assert_eq!(state(memory(32 << 20, true), None), CheckState::Warning);
        assert_eq!(state(memory(8 << 30, false), None), CheckState::Warning);
        assert_eq!(needed(u64::MAX), u64::MAX);
    }
}
