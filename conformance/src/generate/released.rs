//! The list of released cases. A case that was released with a version of the spec never changes.

use std::collections::BTreeMap;
use std::path::Path;

use crate::failure::Failure;
use crate::files::digest_of_folder;

const HEADER: &str = "# Released cases: version of the spec, digest of the case (as of a folder, README), name. Lines are only added:
# tensorcask-conformance generate --release VERSION
";

/// Version and digest of each case, keyed by name.
type List = BTreeMap<String, (String, String)>;

/// Returns the digest of each case, keyed by name, from the files of all cases.
fn digests(files: &BTreeMap<String, Vec<u8>>) -> BTreeMap<String, String> {
    let mut cases: BTreeMap<String, BTreeMap<String, Vec<u8>>> = BTreeMap::new();
    for (path, bytes) in files {
        // Paths have the form `valid/<area>/<case>/<file>`.
        let at = path.match_indices('/').nth(2).map_or(path.len(), |(at, _)| at);
        let (case, file) = path.split_at(at);
        cases.entry(case.to_owned()).or_default().insert(file.trim_start_matches('/').to_owned(), bytes.clone());
    }
    cases.into_iter().map(|(case, files)| (case, digest_of_folder(&files))).collect()
}

fn load(list: &Path) -> Result<List, Failure> {
    let text = match std::fs::read_to_string(list) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(e.into()),
    };
    let mut found = List::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let [version, digest, name] = line.split(' ').collect::<Vec<_>>()[..] else {
            return Err(format!("{}: not a released case: {line}", list.display()).into());
        };
        if found.insert(name.to_owned(), (version.to_owned(), digest.to_owned())).is_some() {
            return Err(format!("{}: {name} stands twice", list.display()).into());
        }
    }
    Ok(found)
}

/// Returns problems of the cases: released ones that changed or are missing, and ones without a release.
pub(super) fn complaints(list: &Path, files: &BTreeMap<String, Vec<u8>>) -> Result<Vec<String>, Failure> {
    let released = load(list)?;
    let found = digests(files);
    let mut complaints = Vec::new();
    for (name, (version, digest)) in &released {
        match found.get(name) {
            Some(now) if now == digest => {}
            Some(_) => complaints.push(format!("{name}: was released with {version}, and has changed")),
            None => complaints.push(format!("{name}: was released with {version}, and is gone")),
        }
    }
    complaints.extend(
        found.keys().filter(|name| !released.contains_key(*name)).map(|name| format!("{name}: is not in the list of released cases")),
    );
    Ok(complaints)
}

/// Adds the cases that are not in the list, as released with `version` of the spec.
pub(super) fn add(list: &Path, files: &BTreeMap<String, Vec<u8>>, version: &str) -> Result<(), Failure> {
    if version.is_empty() || version.contains(|c: char| c.is_whitespace() || c == '#') {
        return Err(format!("`{}` is not a version", version.escape_debug()).into());
    }
    let mut released = load(list)?;
    for (name, digest) in digests(files) {
        released.entry(name).or_insert_with(|| (version.to_owned(), digest));
    }
    let mut lines: Vec<String> = released.iter().map(|(name, (version, digest))| format!("{version} {digest} {name}\n")).collect();
    lines.sort_by_cached_key(|line| (line.split(' ').next().map(str::to_owned), line.rsplit(' ').next().map(str::to_owned)));
    std::fs::write(list, format!("{HEADER}{}", lines.concat()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn changes_of_released_cases_are_told() {
        let folder = std::env::temp_dir().join(format!("tensorcask-released-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let list = folder.join("released.txt");
        let mut files = BTreeMap::from([("valid/a/b/case.toml".to_owned(), vec![1]), ("valid/a/c/case.toml".to_owned(), vec![2])]);
        assert_eq!(complaints(&list, &files).unwrap().len(), 2);
        add(&list, &files, "1.0").unwrap();
        assert!(complaints(&list, &files).unwrap().is_empty());
        files.insert("valid/a/b/input/x".into(), vec![3]);
        files.remove("valid/a/c/case.toml");
        files.insert("either/a/d/case.toml".into(), vec![4]);
        // Adding cases does not repair a changed released case.
        add(&list, &files, "1.1").unwrap();
        let told = complaints(&list, &files).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(told, ["valid/a/b: was released with 1.0, and has changed", "valid/a/c: was released with 1.0, and is gone"]);
    }
}
