//! What a detached process must not keep of the one that started it.

use std::fs::read_dir;
use std::os::fd::RawFd;

/// Closes all file descriptors but the first three: pipes and sockets that whoever started this process passed on without knowing it, and
/// whose other ends wait for their end. For a process that has opened nothing yet.
#[allow(unsafe_code, reason = "closes descriptors that nothing in this process owns")]
pub(super) fn close_inherited() {
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse::<RawFd>().ok();
    // Collected first: the folder itself is one of them, and is closed by then.
    let open: Vec<RawFd> = match read_dir("/proc/self/fd") {
        Ok(entries) => entries.flatten().filter_map(number).filter(|fd| *fd > 2).collect(),
        Err(error) => {
            tracing::debug!(%error, "what was inherited stays open");
            return;
        }
    };
    for fd in open {
        // The one that listed the folder is gone; all others came with `exec`.
        if std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_ok() {
            // SAFETY: nothing in this process has opened a file yet, so nothing owns the descriptor.
            unsafe { rustix::io::close(fd) };
        }
    }
}
