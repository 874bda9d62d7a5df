//! Precision of stored tensors: rules by role and name, the rounding they select, and the report of the rounding error.
//!
//! Rounding happens before encoding: a tensor moves to numbers that take fewer bytes. From then on, the rounded tensor
//! is the state. Codecs restore it bit for bit, its checksums are stored, and deltas use it as base. Therefore errors
//! never add up along a chain, and no later operation on a snapshot loses more.

mod auto;
mod quantize;
mod report;
mod search;
mod search_state;
mod setting;

pub use auto::{MeasuredChange, PrecisionDecision, PrecisionReason, Profile, ProfileErrors};
pub(crate) use auto::{SampledErrors, StateSample};
pub(crate) use quantize::{Rounded, round};
pub use quantize::{RoundedChunk, round_chunk};
pub use report::{ChunkRounding, RoundingReport, TensorRounding};
pub use search::{RoundingChoice, search};
pub use search_state::{StateBudget, StatePrecision, search_state};
pub use setting::Setting;

use crate::tensor::TensorPattern;
use crate::{Error, Result};

/// Rules that select the precision of each tensor. The last matching rule applies. A tensor without a matching rule is
/// stored without loss.
///
/// A profile or a rule that names a role applies to tensors whose role is certain: the caller stated it, the name proves it
/// ([`infer_role`](crate::infer_role)), or the values do (a master that rounds to its 16-bit model weight). All other
/// tensors are stored without loss, unless a rule matches their name.
///
/// ```
/// use tensorcask::{Precision, precision::Setting};
/// let precision = Precision::parse(["near", "exp_avg_sq=loguniform:8", "*.bias=lossless"])?;
/// assert_eq!(precision.of("exp_avg", "optim.exp_avg.w").setting, Setting::LogUniform { steps: 16 });
/// assert_eq!(precision.of("exp_avg_sq", "optim.exp_avg_sq.w").setting, Setting::LogUniform { steps: 8 });
/// assert_eq!(precision.of("master", "optim.master.fc.bias").setting, Setting::Lossless);
/// assert_eq!(precision.of("model", "fc.weight").setting, Setting::Lossless);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Precision {
    /// Whether each save chooses a profile, which stands before the rules.
    is_auto: bool,
    rules: Vec<Rule>,
}

/// A setting and the greatest error it may cause.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BoundedSetting {
    /// Rounding of the numbers.
    pub setting: Setting,
    /// Greatest relative error of a nonzero number; `None` for no bound. A chunk that would exceed the bound is stored
    /// with a finer setting, or without loss.
    pub bound: Option<f64>,
}

#[derive(Debug, Clone)]
struct Rule {
    pattern: TensorPattern,
    /// At least one. The writer chooses between several.
    settings: Vec<Setting>,
    bound: Option<f64>,
}

impl PartialEq for Precision {
    fn eq(&self, other: &Self) -> bool {
        self.words() == other.words()
    }
}

/// Roles that profiles round. Masters share one setting, and so do moments.
const MASTER: [&str; 1] = ["master"];
const MOMENTS: [&str; 4] = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum"];

impl Precision {
    /// Stores everything without loss.
    pub const fn lossless() -> Self {
        Self { is_auto: false, rules: vec![] }
    }

    /// Rounds masters to 8 bits beyond their model weight (mean relative error about 6e-6), and moments to 1/16 of an
    /// octave (error of at most 2.2 %).
    pub fn near() -> Self {
        Self::profile(8, 16)
    }

    /// Rounds masters to 4 bits beyond their model weight (mean relative error about 9e-5), and moments to 1/8 of an
    /// octave (error of at most 4.3 %).
    pub fn compact() -> Self {
        Self::profile(4, 8)
    }

    /// Chooses `lossless`, `near` or `compact` for each save, by the errors of rounding and the stage of the training, both
    /// measured. For saves of whole states by one process: several ranks cannot use it.
    pub const fn auto() -> Self {
        Self { is_auto: true, rules: vec![] }
    }

    /// Returns whether each save chooses a profile.
    pub const fn is_auto(&self) -> bool {
        self.is_auto
    }

    /// Returns whether rounding reads more of the state than the part of one rank may have: with `auto`, and with settings that
    /// weigh errors by sensitivity. Replicas on several ranks would be rounded differently.
    pub fn needs_whole_state(&self) -> bool {
        let is_sensitive =
            |setting: &Setting| matches!(setting, Setting::KMeans(kmeans) if kmeans.error == crate::codec::LevelError::Sensitive);
        self.is_auto || self.rules.iter().flat_map(|rule| &rule.settings).any(is_sensitive)
    }

    /// The precision of a save that chose `profile`: its rules, followed by those of this precision.
    pub(crate) fn with_profile(&self, profile: Profile) -> Self {
        let mut chosen = match profile {
            Profile::Lossless => Self::lossless(),
            Profile::Near => Self::near(),
            Profile::Compact => Self::compact(),
        };
        chosen.rules.extend(self.rules.iter().cloned());
        chosen
    }

    fn profile(bits: u8, steps: u8) -> Self {
        let master = MASTER.iter().map(|role| (role, Setting::Remainder { bits }));
        let moments = MOMENTS.iter().map(|role| (role, Setting::LogUniform { steps }));
        let mut precision = Self::lossless();
        for (role, setting) in master.chain(moments) {
            // Names of roles are valid globs.
            if let Ok(pattern) = TensorPattern::parse(role) {
                precision.rules.push(Rule { pattern, settings: vec![setting], bound: None });
            }
        }
        precision
    }

    /// Adds a rule for tensors of role `pattern`, or whose names match the glob `pattern`.
    pub fn with(self, pattern: &str, setting: Setting, bound: Option<f64>) -> Result<Self> {
        self.with_any(pattern, &[setting], bound)
    }

    /// Adds a rule with several settings. The writer chooses one of them for each tensor, by the scores of size, speed and
    /// precision of its [`Objective`](crate::codec::Objective).
    pub fn with_any(mut self, pattern: &str, settings: &[Setting], bound: Option<f64>) -> Result<Self> {
        if settings.is_empty() {
            return Err(Error::invalid(format!("the rule for `{}` has no setting", pattern.escape_debug())));
        }
        settings.iter().try_for_each(Setting::check)?;
        if let Some(bound) = bound.filter(|bound| !(bound.is_finite() && *bound >= 0.0)) {
            return Err(Error::invalid(format!("the bound {bound} is not a relative error such as 0.01")));
        }
        self.rules.push(Rule { pattern: TensorPattern::parse(pattern)?, settings: settings.to_vec(), bound });
        Ok(self)
    }

    /// Parses profiles (`lossless`, `near`, `compact`, `auto`) and rules (`PATTERN=SETTING`, `PATTERN=SETTING<=BOUND`), in
    /// order. A profile replaces all earlier words. A rule may name several settings: `PATTERN=SETTING|SETTING`.
    pub fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let mut precision = Self::lossless();
        for word in words {
            precision = match word {
                "lossless" => Self::lossless(),
                "near" => Self::near(),
                "compact" => Self::compact(),
                "auto" => Self::auto(),
                rule => {
                    let unknown = || {
                        Error::invalid(format!(
                            "`{}` is not a precision; use lossless, near, compact, auto, or PATTERN=SETTING with a role or a glob of names, \
                             and one or several (A|B) of {}",
                            rule.escape_debug(),
                            Setting::FORMS
                        ))
                    };
                    let (rule, bound) = match rule.rsplit_once("<=") {
                        Some((rule, bound)) => (rule, Some(bound.trim().parse::<f64>().map_err(|_| unknown())?)),
                        None => (rule, None),
                    };
                    // Names and settings may both contain `=`.
                    let splits = rule.match_indices('=').rev().map(|(at, _)| (&rule[..at], &rule[at + 1..]));
                    let parse = |settings: &str| settings.split('|').map(|setting| setting.parse().ok()).collect::<Option<Vec<Setting>>>();
                    let found = splits.into_iter().find_map(|(pattern, settings)| Some((pattern, parse(settings)?)));
                    let (pattern, settings) = found.ok_or_else(unknown)?;
                    precision.with_any(pattern, &settings, bound)?
                }
            };
        }
        Ok(precision)
    }

    /// Returns words from which [`Precision::parse`] makes the same precision.
    ///
    /// ```
    /// use tensorcask::Precision;
    /// let precision = Precision::parse(["near", "*.a=b=kmeans:16:pruned=50<=0.25"])?;
    /// let words = precision.words();
    /// assert_eq!(words.last().map(String::as_str), Some("*.a=b=kmeans:16:pruned=50:protected=5:relative<=0.25"));
    /// assert_eq!(Precision::parse(words.iter().map(String::as_str))?, precision);
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn words(&self) -> Vec<String> {
        let word = |rule: &Rule| {
            let bound = rule.bound.map_or(String::new(), |bound| format!("<={bound}"));
            let settings: Vec<String> = rule.settings.iter().map(Setting::to_string).collect();
            format!("{}={}{bound}", rule.pattern.text(), settings.join("|"))
        };
        self.is_auto.then(|| "auto".to_owned()).into_iter().chain(self.rules.iter().map(word)).collect()
    }

    /// Returns the setting and bound of a tensor; of several settings, the first. With `auto`, those of its own rules.
    pub fn of(&self, role: &str, name: &str) -> BoundedSetting {
        self.of_tensor(Some(role), name)
    }

    /// As [`of`](Self::of). Rules that name a role leave out a tensor without one.
    pub(crate) fn of_tensor(&self, role: Option<&str>, name: &str) -> BoundedSetting {
        let first = self.rule(role, name).and_then(|rule| Some((*rule.settings.first()?, rule.bound)));
        first.map_or(BoundedSetting { setting: Setting::Lossless, bound: None }, |(setting, bound)| BoundedSetting { setting, bound })
    }

    /// Returns all settings that the rule of a tensor allows, each with its bound. Empty without a rule.
    ///
    /// ```
    /// use tensorcask::Precision;
    /// let precision = Precision::parse(["exp_avg=cluster|blockwise8|lossless<=0.05"])?;
    /// let settings = precision.alternatives("exp_avg", "optim.exp_avg.w");
    /// assert_eq!((settings.len(), settings[1].bound), (3, Some(0.05)));
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn alternatives(&self, role: &str, name: &str) -> Vec<BoundedSetting> {
        self.alternatives_of_tensor(Some(role), name)
    }

    /// As [`alternatives`](Self::alternatives). Rules that name a role leave out a tensor without one.
    pub(crate) fn alternatives_of_tensor(&self, role: Option<&str>, name: &str) -> Vec<BoundedSetting> {
        let all = |rule: &Rule| rule.settings.iter().map(|&setting| BoundedSetting { setting, bound: rule.bound }).collect();
        self.rule(role, name).map_or_else(Vec::new, all)
    }

    /// The last rule that matches a tensor.
    fn rule(&self, role: Option<&str>, name: &str) -> Option<&Rule> {
        self.rules.iter().rev().find(|rule| rule.pattern.matches(role, name))
    }

    /// Returns whether no rule rounds, and no save chooses one that does.
    pub fn is_lossless(&self) -> bool {
        !self.is_auto && self.rules.iter().flat_map(|rule| &rule.settings).all(|setting| *setting == Setting::Lossless)
    }
}

/// Joins the words of [`Precision::words`] for display.
impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.words().join(" "))
    }
}
