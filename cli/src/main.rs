//! The binary `tensorcask`.

use std::process::ExitCode;

/// Windows of chunks are allocated and dropped all the time. The system's allocator gives such blocks back to the kernel
/// each time, and taking fresh pages costs more than reading and decoding: a restore took three times as long.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    tensorcask_cli::show_warnings();
    ExitCode::from(tensorcask_cli::run(std::env::args_os()))
}
