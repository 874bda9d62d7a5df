//! Patterns of tensors, as users write them: globs of names, and roles.

use globset::{Glob, GlobMatcher, GlobSet, GlobSetBuilder};

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

/// Pattern of tensors in a rule: a role, or a glob of names.
#[derive(Debug, Clone)]
pub(crate) struct TensorPattern {
    text: String,
    glob: GlobMatcher,
}

impl TensorPattern {
    /// Parses a pattern.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let glob = Glob::new(text).map_err(|e| Error::invalid(format!("`{}` is not a glob of names: {e}", text.escape_debug())))?;
        Ok(Self { text: text.to_owned(), glob: glob.compile_matcher() })
    }

    /// The pattern as it was written.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Whether the pattern is the role of a tensor, or matches the tensor's name.
    pub(crate) fn matches(&self, role: Option<&str>, name: &str) -> bool {
        role == Some(self.text.as_str()) || self.glob.is_match(name)
    }
}
