//! The binary `tensorcask`.

use std::process::ExitCode;

/// mimalloc keeps freed blocks. The system allocator returns each freed window of chunks to the kernel, and mapping
/// fresh pages costs more than reading and decoding: a restore took three times as long.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    tensorcask_cli::show_warnings();
    ExitCode::from(tensorcask_cli::run(std::env::args_os()))
}
