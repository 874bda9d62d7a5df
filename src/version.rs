//! Format version and feature bits. Spec: `spec/README.md`, clauses 3 and 4.

use crate::{Error, Result};

/// Version of the format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FormatVersion {
    /// Major version. A reader refuses a major version that it does not know.
    pub major: u16,
    /// Minor version. Minor versions only add what feature bits announce.
    pub minor: u16,
}

impl FormatVersion {
    /// Version that this library writes.
    pub const CURRENT: Self = Self { major: 1, minor: 0 };

    pub(crate) fn check(self) -> Result<()> {
        if self.major == Self::CURRENT.major {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "format version {self} is not one that this reader knows ({}.x); upgrade tensorcask",
            Self::CURRENT.major
        ))
        .clause("README 3"))
    }

    pub(crate) fn parse(text: &str) -> Result<Self> {
        let parsed =
            text.split_once('.').and_then(|(major, minor)| Some(Self { major: canonical_number(major)?, minor: canonical_number(minor)? }));
        parsed.ok_or_else(|| Error::corrupt(format!("`{}` is not a version", text.escape_debug())).clause("README 3"))
    }
}

impl std::fmt::Display for FormatVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Feature bits of a cask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// Bits of features that a reader must know; otherwise it refuses the cask.
    pub must_understand: u64,
    /// Bits of features that a reader may ignore. Garbage collection, compaction and writers must know them.
    pub may_ignore: u64,
}

impl Features {
    /// Features that this library knows. Version 1.0 defines no feature.
    pub const KNOWN: Self = Self { must_understand: 0, may_ignore: 0 };

    /// Refuses to read a cask with unknown features.
    pub(crate) fn check_readable(self) -> Result<()> {
        let unknown = self.must_understand & !Self::KNOWN.must_understand;
        if unknown == 0 {
            return Ok(());
        }
        let bits: Vec<String> = (0..64).filter(|bit| unknown >> bit & 1 == 1).map(|bit: u32| bit.to_string()).collect();
        Err(Error::unsupported(format!("needs feature bit {} that this reader does not understand; upgrade tensorcask", bits.join(", ")))
            .clause("README 4"))
    }
}

/// Refuses unknown feature names in JSON objects.
pub(crate) fn check_feature_names(must_understand: &[String]) -> Result<()> {
    match must_understand.first() {
        None => Ok(()),
        Some(name) => Err(Error::unsupported(format!(
            "needs feature `{}` that this version does not understand; upgrade tensorcask",
            name.escape_debug()
        ))
        .clause("README 4")),
    }
}

fn canonical_number(text: &str) -> Option<u16> {
    let value: u16 = text.parse().ok()?;
    (value.to_string() == text).then_some(value)
}
