//! Writes the cases. Their bytes are always the same: ids and times are fixed, and no library code takes part.
//!
//! Each module imports only from modules declared above it.

// Building blocks of cases.
mod dtypes;
mod forge;
mod sketch;

mod writer;

// Cases.
mod casks;
mod lenient;
mod stores;

mod catalogs;
mod coded;
mod gaps;
mod inline;
mod invalid_casks;
mod invalid_stores;
mod large;
mod maintained;
mod partnered;
mod released;
mod reserved;

use std::collections::BTreeMap;
use std::path::Path;

use sha2::{Digest, Sha256};

use sketch::{Input, Outcome, Sketch, sorted};

use crate::failure::{Failure, complain};
use crate::files::{digest_of_folder, files_of, hex};
use crate::verdict::Expect;

/// Writes all cases and removes leftover files.
pub(crate) fn write(cases: &Path) -> Result<(), Failure> {
    let wanted = files()?;
    if cases.exists() {
        for path in files_of(cases)?.into_keys().filter(|path| !wanted.contains_key(path)) {
            let path = cases.join(path);
            std::fs::remove_file(&path)?;
            // Removes the empty parent folders, too.
            let folders = path.ancestors().skip(1).take_while(|folder| *folder != cases);
            let _ = folders.map(std::fs::remove_dir).find(Result::is_err);
        }
    }
    for (path, bytes) in &wanted {
        let path = cases.join(path);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(path, bytes)?;
    }
    Ok(())
}

/// Writes the store of a case that is too large to be kept.
pub(crate) fn make(case: &str, folder: &Path) -> Result<(), Failure> {
    let objects = large::objects(case.split_once('/').map_or("", |(_, name)| name))?;
    if folder.exists() {
        return Err(format!("{} exists", folder.display()).into());
    }
    for (path, bytes) in objects {
        let path = folder.join(path);
        std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
        std::fs::write(path, bytes)?;
    }
    Ok(())
}

/// Lists the new cases as released with this version of the spec.
pub(crate) fn release(list: &Path, version: &str) -> Result<(), Failure> {
    released::add(list, &files()?, version)
}

/// Returns whether the cases equal the output of [`write()`] and the released cases are unchanged.
pub(crate) fn check(cases: &Path, list: &Path) -> Result<bool, Failure> {
    let wanted = files()?;
    let found = files_of(cases)?;
    let mut same = true;
    let paths: std::collections::BTreeSet<&String> = wanted.keys().chain(found.keys()).collect();
    for path in paths {
        let message = match (wanted.get(path), found.get(path)) {
            (Some(wanted), Some(found)) if wanted == found => continue,
            (Some(_), Some(_)) => "differs from what the generator writes",
            (Some(_), None) => "is missing",
            _ => "belongs to no case",
        };
        complain(&format!("{path}: {message}"));
        same = false;
    }
    for complaint in released::complaints(list, &wanted)? {
        complain(&complaint);
        same = false;
    }
    Ok(same)
}

/// Returns all files of all cases.
fn files() -> Result<BTreeMap<String, Vec<u8>>, Failure> {
    let mut files = BTreeMap::new();
    let mut sketches = casks::cases();
    sketches.extend(coded::cases()?);
    sketches.extend(partnered::cases()?);
    sketches.extend(stores::cases()?);
    sketches.extend(catalogs::cases()?);
    sketches.extend(maintained::cases()?);
    sketches.extend(gaps::cases()?);
    sketches.extend(inline::cases()?);
    sketches.extend(reserved::cases()?);
    sketches.extend(invalid_casks::cases());
    sketches.extend(invalid_stores::cases()?);
    sketches.extend(large::cases()?);
    for Sketch { name, clause, why, input, outcome } in sketches {
        let (folder, expect, kind) = match &outcome {
            Outcome::Accept(_) => ("valid", Expect::Accept, None),
            Outcome::Reject(kind) => ("invalid", Expect::Reject, Some(*kind)),
            Outcome::Either(_, kind) => ("either", Expect::Either, Some(*kind)),
        };
        let folder = format!("{folder}/{name}");
        let digest = match &input {
            Input::Cask(bytes) => hex(&Sha256::digest(bytes)),
            Input::Store(objects) | Input::Large(objects) => digest_of_folder(objects),
        };
        let made = if matches!(input, Input::Large(_)) { "made = true\n" } else { "" };
        let kind = kind.map(|kind| format!("kind = \"{kind}\"\n")).unwrap_or_default();
        let description =
            format!("clause = \"{clause}\"\nwhy = \"{why}\"\nexpect = \"{}\"\n{kind}sha256 = \"{digest}\"\n{made}", expect.name());
        let mut add = |path: String, bytes: Vec<u8>| match files.insert(format!("{folder}/{path}"), bytes) {
            None => Ok(()),
            Some(_) => Err(format!("two cases write {folder}/{path}")),
        };
        add("case.toml".into(), description.into_bytes())?;
        if let Outcome::Accept(expected) | Outcome::Either(expected, _) = outcome {
            add("expected.json".into(), format!("{:#}\n", sorted(&expected)).into_bytes())?;
        }
        match input {
            Input::Cask(bytes) => add("input.cask".into(), bytes)?,
            Input::Store(objects) => objects.into_iter().try_for_each(|(path, bytes)| add(format!("input/{path}"), bytes))?,
            Input::Large(_) => {}
        }
    }
    Ok(files)
}
