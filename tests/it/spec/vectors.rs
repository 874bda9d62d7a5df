//! Format and expectations of the test vectors.

use std::fmt::Debug;

use serde::Deserialize;
use tensorcask::Error;
use tensorcask::wire::Id;

use super::pages::root;

/// Bytes written as hex. White space is ignored.
#[derive(Clone, PartialEq)]
pub(crate) struct Hex(pub(crate) Vec<u8>);

impl Hex {
    pub(crate) fn id(&self) -> Id {
        Id(self.0.as_slice().try_into().unwrap())
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let digits: Vec<u8> = String::deserialize(deserializer)?.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
        let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        assert!(digits.len().is_multiple_of(2), "odd number of hex digits");
        Ok(Self(digits.chunks(2).map(pair).collect()))
    }
}

impl Debug for Hex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Bytes to replace in a valid file.
#[derive(Deserialize)]
pub(crate) struct Patch {
    pub(crate) at: usize,
    pub(crate) hex: Hex,
}

pub(crate) fn patched(bytes: &[u8], patches: &[Patch]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for patch in patches {
        bytes[patch.at..patch.at + patch.hex.0.len()].copy_from_slice(&patch.hex.0);
    }
    bytes
}

pub(crate) fn vectors<T: for<'de> Deserialize<'de>>(file: &str, table: &str) -> Vec<T> {
    let text = std::fs::read_to_string(root().join("spec/vectors").join(file)).unwrap();
    let mut tables: toml::Table = toml::from_str(&text).unwrap();
    let rows = tables.remove(table).unwrap_or_else(|| panic!("{file} has no [[{table}]]"));
    rows.try_into().unwrap_or_else(|e| panic!("{file}, [[{table}]]: {e}"))
}

/// Vectors without the expected error, collected so that one run reports all of them.
#[derive(Default)]
pub(crate) struct Mismatches(Vec<String>);

impl Mismatches {
    pub(crate) fn expect<T>(&mut self, name: &str, result: Result<T, Error>, kind: &str, clause: Option<&str>) {
        match result {
            Ok(_) => self.0.push(format!("{name}: accepted, not {kind} [{}]", clause.unwrap_or_default())),
            Err(e) if e.kind().name() == kind && (clause.is_none() || e.clause_name() == clause) => {}
            Err(e) => self.0.push(format!("{name}: not {kind} [{}], but {e}", clause.unwrap_or_default())),
        }
    }

    pub(crate) fn assert_none(self) {
        assert!(self.0.is_empty(), "{} vectors disagree:\n{}", self.0.len(), self.0.join("\n"));
    }
}
