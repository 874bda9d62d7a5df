//! Closing of the file descriptors that a detached process inherits.

use std::fs::read_dir;
use std::os::fd::RawFd;

/// Closes all file descriptors except the standard streams. The process that started this one may have passed on pipes
/// and sockets, and their other ends would never see an end of file. Call this before this process opens a file.
#[allow(unsafe_code, reason = "closes descriptors that nothing in this process owns")]
pub(super) fn close_inherited() {
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse::<RawFd>().ok();
    // Collected first: the list includes the descriptor of the folder, which is closed afterwards.
    let open: Vec<RawFd> = match read_dir("/proc/self/fd") {
        Ok(entries) => entries.flatten().filter_map(number).filter(|fd| *fd > 2).collect(),
        Err(error) => {
            tracing::debug!(%error, "inherited file descriptors stay open");
            return;
        }
    };
    for fd in open {
        // The descriptor of the folder is closed by now; all others were inherited.
        if std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_ok() {
            // SAFETY: this process has opened no file yet, so nothing owns the descriptor.
            unsafe { rustix::io::close(fd) };
        }
    }
}
