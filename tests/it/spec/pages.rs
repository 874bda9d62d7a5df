//! The tables, clauses and examples of the pages.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use tensorcask::codec::Registry;
use tensorcask::{Dtype, Limits};

use super::casks::cask_vectors;
use super::directories::DirectoryVector;
use super::vectors::vectors;

pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the pages below `spec/`, keyed by the name that clauses use: the file name without its extension.
pub(crate) fn pages() -> BTreeMap<String, String> {
    let mut pages = BTreeMap::new();
    for folder in [root().join("spec"), root().join("spec/codecs")] {
        for path in files(&folder, "md", false) {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            assert!(pages.insert(name, std::fs::read_to_string(&path).unwrap()).is_none(), "two pages named {path:?}");
        }
    }
    pages
}

pub(crate) fn files(folder: &Path, extension: &str, deep: bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && deep {
            found.extend(files(&path, extension, deep));
        } else if path.extension().is_some_and(|e| e == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Returns the number of the clause that starts a line. `**3.4** The ...` is clause 3.4.
pub(crate) fn clause_at(line: &str) -> Option<&str> {
    let (number, _) = line.strip_prefix("**")?.split_once("** ")?;
    number.split('.').all(|part| part.parse::<u32>().is_ok()).then_some(number)
}

/// Returns all clauses, named as in code: `container 3.4`.
pub(crate) fn clauses() -> BTreeSet<String> {
    let mut clauses = BTreeSet::new();
    for (page, text) in pages() {
        for number in text.lines().filter_map(clause_at) {
            assert!(clauses.insert(format!("{page} {number}")), "{page} {number} stands twice");
        }
    }
    clauses
}

/// Returns `page number` at the start of `text`, if a page has this name.
pub(crate) fn reference<'a>(text: &'a str, pages: &BTreeSet<String>) -> Option<&'a str> {
    let (page, rest) = text.split_once(' ')?;
    let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let number = rest[..digits].trim_end_matches('.');
    (pages.contains(page) && !number.is_empty()).then(|| &text[..page.len() + 1 + number.len()])
}

pub(crate) fn table_rows(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().filter(|line| line.starts_with('|')).map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
}

#[test]
fn clauses_that_errors_name_exist() {
    let clauses = clauses();
    let names: BTreeSet<String> = pages().into_keys().collect();
    let mut named = 0;
    for path in ["src", "cli", "conformance"].iter().flat_map(|folder| files(&root().join(folder), "rs", true)) {
        let text = std::fs::read_to_string(&path).unwrap();
        // Checks every string that looks like a clause. Most go to `.clause(...)` directly, some through a helper.
        for literal in text.split('"').skip(1) {
            let Some(found) = reference(literal, &names).filter(|found| found.len() == literal.len()) else { continue };
            assert!(clauses.contains(found), "{}: spec has no clause `{found}`", path.display());
            named += 1;
        }
        for (at, _) in text.match_indices(".clause(\"") {
            let literal = text[at..].split('"').nth(1).unwrap();
            assert!(clauses.contains(literal), "{}: spec has no clause `{literal}`", path.display());
        }
    }
    assert!(named > 50, "only {named} clauses found: does the search still work?");
}

#[test]
fn clauses_that_pages_name_exist() {
    let clauses = clauses();
    let names: BTreeSet<String> = pages().into_keys().collect();
    for (page, text) in pages() {
        for (at, _) in text.match_indices(|c: char| c.is_ascii_alphabetic()) {
            let starts_word = !text[..at].ends_with(|c: char| c.is_ascii_alphanumeric());
            let Some(found) = reference(&text[at..], &names).filter(|_| starts_word) else { continue };
            assert!(clauses.contains(found), "{page}: no clause `{found}`");
        }
    }
}

#[test]
fn limits_are_the_defaults_of_the_page() {
    let pages = pages();
    let documented: BTreeMap<String, u64> = table_rows(&pages["limits"])
        .filter_map(|row| Some((row[0].strip_prefix('`')?.strip_suffix('`')?.to_owned(), row[1].parse().ok()?)))
        .collect();
    // Debug output has the form `Limits { max_dimensions: 64, ... }`.
    let debug = format!("{:?}", Limits::default());
    let fields = debug.split_once('{').unwrap().1.trim_end_matches('}');
    let defaults: BTreeMap<String, u64> = fields
        .split(',')
        .map(|field| field.split_once(':').unwrap())
        .map(|(name, value)| (name.trim().to_owned(), value.trim().parse().unwrap()))
        .collect();
    assert_eq!(documented, defaults);
}

#[test]
fn dtypes_are_those_of_the_page() {
    let pages = pages();
    let documented: Vec<(u8, String, u64, usize)> = table_rows(&pages["container"])
        .filter_map(|row| match row.as_slice() {
            [code, name, bits, unit, _] => {
                Some((code.parse().ok()?, name.trim_matches('`').to_owned(), bits.parse().ok()?, unit.parse().ok()?))
            }
            _ => None,
        })
        .collect();
    let coded: Vec<_> = Dtype::ALL.iter().map(|d| (d.code(), d.name().to_owned(), d.bits(), d.unit_bytes())).collect();
    assert_eq!(documented, coded);
}

#[test]
fn codecs_are_those_of_the_page() {
    let pages = pages();
    let documented: BTreeSet<(String, u16)> = table_rows(&pages["codecs"])
        .filter_map(|row| Some((row[0].trim_matches('`').strip_prefix("tc.")?.to_owned(), row.get(1)?.parse().ok()?)))
        .collect();
    let registry = Registry::default();
    let coded: BTreeSet<_> = registry.iter().map(|c| (c.id().trim_start_matches("tc.").to_owned(), c.version())).collect();
    assert_eq!(documented, coded);
    coded.iter().for_each(|(id, _)| assert!(pages.contains_key(id), "no page for tc.{id}"));
}

/// Hex dumps in the pages. A fence names `hex` and a cask or directory of the vectors.
#[test]
fn dumps_in_pages_are_those_of_the_vectors() {
    let mut files: BTreeMap<String, Vec<u8>> = cask_vectors().into_iter().map(|cask| (cask.name, cask.hex.0)).collect();
    for directory in vectors::<DirectoryVector>("manifest.toml", "directory") {
        files.insert(directory.name, directory.hex.0);
    }
    let mut lines = 0;
    for (page, text) in pages() {
        for block in text.split("\n```hex ").skip(1) {
            let (name, rest) = block.split_once('\n').unwrap();
            for line in rest.split("\n```").next().unwrap().lines().filter(|line| *line != "*") {
                let (offset, bytes) = line.split_at(8);
                let offset = usize::from_str_radix(offset, 16).unwrap();
                let bytes: Vec<u8> = bytes.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
                assert!(files[name][offset..].starts_with(&bytes), "{page}, {name}: {line}");
                lines += 1;
            }
        }
    }
    assert!(lines > 40, "only {lines} lines of dumps found");
}

/// Sealed objects in the pages must be in the vectors, too.
#[test]
fn texts_in_pages_are_those_of_the_vectors() {
    let vectors: String =
        ["log.toml", "manifest.toml"].map(|file| std::fs::read_to_string(root().join("spec/vectors").join(file)).unwrap()).concat();
    for (page, text) in pages() {
        for block in text.split("\n```json\n").skip(1) {
            let object = block.split("\n```").next().unwrap();
            assert!(vectors.contains(object), "{page}: {object}");
        }
    }
}
