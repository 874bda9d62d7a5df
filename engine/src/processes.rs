//! Processes of this host, and whether they have ended.

use serde::{Deserialize, Serialize};

/// A process of this host. Its number alone may belong to another process later.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Process {
    pid: u32,
    /// Start of the process, in clock ticks since the start of the host.
    started: u64,
    /// Namespace of process numbers, in which the number counts.
    namespace: String,
}

impl Process {
    /// This process; `None` if `/proc` does not show it.
    pub(crate) fn current() -> Option<Self> {
        Self::find(std::process::id())
    }

    /// The process with a number; `None` if it has ended.
    pub(crate) fn find(pid: u32) -> Option<Self> {
        Some(Self { pid, started: start_of(pid)?, namespace: own_namespace()? })
    }

    /// Whether the process has ended. `false` if that cannot be seen from here.
    pub(crate) fn has_ended(&self) -> bool {
        own_namespace().as_ref() == Some(&self.namespace) && start_of(self.pid) != Some(self.started)
    }
}

/// Start of a process; `None` if it has ended. A zombie has ended.
fn start_of(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the command, in parentheses, may contain anything.
    let mut fields = stat.rsplit_once(") ")?.1.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(START_AFTER_STATE)?.parse().ok()
}

fn own_namespace() -> Option<String> {
    std::fs::read_link("/proc/self/ns/pid").ok()?.into_os_string().into_string().ok()
}

/// Fields of `/proc/PID/stat` between the state and the start.
const START_AFTER_STATE: usize = 18;

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::Process;

    #[test]
    fn the_end_of_a_process_is_seen() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process::find(child.id()).unwrap();
        assert!(!process.has_ended() && !Process::current().unwrap().has_ended());
        let another = Process { started: process.started + 1, ..process.clone() };
        assert!(another.has_ended(), "the number belongs to another process");
        let elsewhere = Process { namespace: "pid:[1]".to_owned(), ..another };
        assert!(!elsewhere.has_ended(), "the number says nothing here");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_ended() && Process::find(child.id()).is_none());
    }
}
