//! Rules that assign codecs to tensors, instead of the choice by size and speed.

use super::{Codec, Registry};
use crate::tensor::TensorPattern;
use crate::{Dtype, Error, Result};

/// Rules that assign a codec to tensors. The last matching rule applies. The codecs of all other tensors are chosen by
/// the [`Objective`](super::Objective).
///
/// The writer uses an assigned codec for each chunk that the codec can encode, even if another codec stores fewer bytes.
/// For a chunk that the codec cannot encode, such as a chunk without a base for `tc.bitmask`, the writer chooses a codec
/// as usual. A chunk that equals its base takes no bytes, whatever the rule.
///
/// ```
/// use tensorcask::codec::CodecRules;
/// let rules = CodecRules::parse(["model=tc.bitmask", "*.norm=tc.raw"])?;
/// assert_eq!(rules.of("model", "fc.weight"), Some("tc.bitmask"));
/// assert_eq!(rules.of("model", "layer.norm"), Some("tc.raw"));
/// assert_eq!(rules.of("master", "optim.master.fc.weight"), None);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct CodecRules {
    rules: Vec<Rule>,
}

#[derive(Debug, Clone)]
struct Rule {
    pattern: TensorPattern,
    /// Id of the codec.
    codec: String,
}

impl PartialEq for CodecRules {
    fn eq(&self, other: &Self) -> bool {
        self.words() == other.words()
    }
}

impl CodecRules {
    /// Adds a rule for tensors of role `pattern`, or whose names match the glob `pattern`.
    pub fn with(mut self, pattern: &str, codec: &str) -> Result<Self> {
        self.rules.push(Rule { pattern: TensorPattern::parse(pattern)?, codec: codec.to_owned() });
        Ok(self)
    }

    /// Parses rules `PATTERN=CODEC`, in order.
    pub fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        words.into_iter().try_fold(Self::default(), |rules, word| {
            let rule = word.rsplit_once('=').filter(|(pattern, codec)| !pattern.is_empty() && !codec.is_empty());
            let (pattern, codec) = rule.ok_or_else(|| {
                let message = "is not a rule for codecs; use PATTERN=CODEC with a role or a glob of names, such as model=tc.bitmask";
                Error::invalid(format!("`{}` {message}", word.escape_debug()))
            })?;
            rules.with(pattern, codec)
        })
    }

    /// Returns words from which [`CodecRules::parse`] makes the same rules.
    pub fn words(&self) -> Vec<String> {
        self.rules.iter().map(|Rule { pattern, codec }| format!("{}={codec}", pattern.text())).collect()
    }

    /// Returns the id of the codec that is assigned to a tensor.
    pub fn of(&self, role: &str, name: &str) -> Option<&str> {
        let found = self.rules.iter().rev().find(|rule| rule.pattern.matches(Some(role), name));
        found.map(|rule| rule.codec.as_str())
    }

    /// Checks that a registry has all codecs of the rules.
    pub fn check(&self, registry: &Registry) -> Result<()> {
        match self.rules.iter().find(|rule| registry.get(&rule.codec).is_none()) {
            None => Ok(()),
            Some(Rule { pattern, codec }) => {
                let pattern = pattern.text().escape_debug();
                let codec = codec.escape_debug();
                let known: Vec<&str> = registry.iter().map(|codec| codec.id()).collect();
                Err(Error::invalid(format!("the rule `{pattern}={codec}` names an unknown codec; use one of {}", known.join(", "))))
            }
        }
    }
}

/// Checks that an assigned codec can encode chunks of a tensor at all. `may_round`: whether a precision rule allows the codec
/// to round the tensor.
pub(crate) fn check_assigned(codec: &dyn Codec, dtype: Dtype, role: &str, may_round: bool) -> Result<()> {
    let id = codec.id();
    if !codec.supports(dtype, role) {
        return Err(Error::invalid(format!(
            "codec `{id}` is assigned to this tensor, but cannot store {dtype} of role `{}`; assign another codec, or narrow the pattern",
            role.escape_debug()
        )));
    }
    if !codec.is_lossless() && !may_round {
        let setting = id.strip_prefix("tc.").unwrap_or(id);
        return Err(Error::invalid(format!(
            "codec `{id}` is assigned to this tensor, but rounds numbers, and the precision of this tensor does not allow that; \
             set its precision to `{setting}`, too"
        )));
    }
    Ok(())
}
