//! Conformance cases on disk: `case.toml`, an input, and the expected result of an accepted input.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::failure::Failure;
use crate::files::{digest_of_folder, files_of, hex};
use crate::verdict::Expect;

/// Content of `case.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Description {
    /// Clause of the spec that decides the case.
    pub clause: String,
    /// Reason in one sentence.
    pub why: String,
    pub expect: Expect,
    /// Required kind of error, if only one is right: `corrupt`, `unsupported` or `limit`.
    pub kind: Option<String>,
    /// SHA-256 of the input: of the file, or of the listing of the folder.
    pub sha256: String,
    /// Whether the input is too large to be kept and is generated when it is needed.
    #[serde(default)]
    pub made: bool,
}

/// A conformance case.
#[derive(Debug)]
pub(crate) struct Case {
    /// `valid/<area>/<case>`, `invalid/<area>/<case>` or `either/<area>/<case>`.
    pub name: String,
    pub description: Description,
    /// Path of `input.cask` or `input/`, stored with the case or generated.
    pub input: PathBuf,
    /// Content of `expected.json`, for a case that may be accepted.
    pub expected: Option<serde_json::Value>,
}

/// Loads the cases below a folder whose name contains `only`, ordered by name. Generates inputs that are not stored
/// below `made`.
pub(crate) fn load_all(cases: &Path, only: &str, made: &Path) -> Result<Vec<Case>, Failure> {
    let mut folders: BTreeMap<String, PathBuf> = BTreeMap::new();
    for (path, _) in files_of(cases)? {
        if let Some(name) = path.strip_suffix("/case.toml").filter(|name| name.contains(only)) {
            folders.insert(name.to_owned(), cases.join(name));
        }
    }
    folders.into_iter().map(|(name, folder)| load(&name, &folder, made).map_err(|e| format!("{name}: {e}").into())).collect()
}

fn load(name: &str, folder: &Path, made: &Path) -> Result<Case, Failure> {
    let description: Description = toml::from_str(&std::fs::read_to_string(folder.join("case.toml"))?)?;
    let kept = ["input.cask", "input"].map(|name| folder.join(name)).into_iter().find(|path| path.exists());
    let input = match (kept, description.made) {
        (Some(input), false) => input,
        (None, true) => {
            crate::generate::make(name, &made.join(name))?;
            made.join(name)
        }
        (Some(_), true) => return Err("has an input, although that is made".into()),
        (None, false) => return Err("has no input".into()),
    };
    let expected = match description.expect {
        Expect::Accept | Expect::Either => Some(parse(&std::fs::read(folder.join("expected.json"))?)?),
        Expect::Reject => None,
    };
    if (description.expect == Expect::Accept) == description.kind.is_some() {
        return Err("`kind` goes with `expect = \"reject\"` and `expect = \"either\"`".into());
    }
    let found = match input.is_dir() {
        true => digest_of_folder(&files_of(&input)?),
        false => hex(&Sha256::digest(std::fs::read(&input)?)),
    };
    if found != description.sha256 {
        return Err("its input is damaged: the digest differs from that in case.toml".into());
    }
    Ok(Case { name: name.to_owned(), description, input, expected })
}

/// Parses one JSON value of any depth. A reader's report is nested deeper than the values that it reports.
pub(crate) fn parse(json: &[u8]) -> Result<serde_json::Value, serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    deserializer.disable_recursion_limit();
    let value = serde_json::Value::deserialize(&mut deserializer)?;
    deserializer.end().map(|()| value)
}
