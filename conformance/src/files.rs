//! Folders of files, and their digests.

use std::collections::BTreeMap;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::failure::Failure;

/// Returns the files below a folder, keyed by path with `/`.
pub(crate) fn files_of(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>, Failure> {
    let mut found = BTreeMap::new();
    let mut rest = vec![(String::new(), folder.to_path_buf())];
    while let Some((prefix, next)) = rest.pop() {
        for entry in std::fs::read_dir(&next).map_err(|e| format!("{}: {e}", next.display()))? {
            let entry = entry?;
            let name = entry.file_name().into_string().map_err(|name| format!("{name:?}: not UTF-8"))?;
            let path = format!("{prefix}{name}");
            match entry.file_type()?.is_dir() {
                true => rest.push((format!("{path}/"), entry.path())),
                false => _ = found.insert(path, std::fs::read(entry.path())?),
            }
        }
    }
    Ok(found)
}

/// Returns the digest of a folder: SHA-256 over one line `<sha256>  <path>` per file, ordered by path, as `sha256sum`
/// writes them.
pub(crate) fn digest_of_folder(files: &BTreeMap<String, Vec<u8>>) -> String {
    let lines: String = files.iter().map(|(path, bytes)| format!("{}  {path}\n", hex(&Sha256::digest(bytes)))).collect();
    hex(&Sha256::digest(lines))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
