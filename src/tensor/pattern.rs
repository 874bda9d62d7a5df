//! Patterns of tensor names, as users write them.

use globset::{Glob, GlobSet, GlobSetBuilder};

use crate::{Error, Result};

/// Patterns of names: `*` stands for any characters, `?` for one, and `[ab]` and `{a,b}` for alternatives.
///
/// ```
/// let patterns = tensorcask::NamePatterns::parse(["layers.*.w", "head"])?;
/// assert!(patterns.matches("layers.0.mlp.w") && !patterns.matches("embed.w"));
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct NamePatterns(GlobSet);

impl NamePatterns {
    /// Parses patterns. Fails with `InvalidArgument` on a pattern that is not valid.
    pub fn parse<T: AsRef<str>>(patterns: impl IntoIterator<Item = T>) -> Result<Self> {
        let bad = |e: globset::Error| Error::invalid(format!("pattern of names: {e}"));
        let mut set = GlobSetBuilder::new();
        for pattern in patterns {
            set.add(Glob::new(pattern.as_ref()).map_err(bad)?);
        }
        Ok(Self(set.build().map_err(bad)?))
    }

    /// Whether a name matches one of the patterns.
    pub fn matches(&self, name: &str) -> bool {
        self.0.is_match(name)
    }
}
