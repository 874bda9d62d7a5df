//! Read-only memory maps of local files.

use std::path::Path;

use bytes::Bytes;

/// Maps a local file into memory. Empty files need no map.
///
/// The file must not change while the bytes are in use. A finished cask never changes. For other input files, the
/// caller must ensure this, as with every reader of safetensors.
pub fn map_file(path: &Path) -> std::io::Result<Bytes> {
    let file = std::fs::File::open(path)?;
    let bytes = file.metadata()?.len();
    if bytes == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the map is read-only and private to this process, and no reference to it outlives the owner that `Bytes`
    // keeps. Its contents may change only if another process writes the file, which the documentation forbids; every
    // use goes through checksums or copies of plain bytes, for which any value is valid.
    let map = unsafe { memmap2::Mmap::map(&file) }?;
    Ok(Bytes::from_owner(map))
}
