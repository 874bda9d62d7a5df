//! Rules that state the roles of tensors, for names that [`infer_role`](crate::infer_role) does not know.

use super::NamePatterns;
use crate::{Error, Result};

/// Rules that give tensors a role and a parameter by their names. The last matching rule applies. A role that a rule states
/// is certain: precision rules and reductions act on it.
///
/// A rule is `GLOB=ROLE`, or `GLOB=ROLE:PARAM`. Tensors of one parameter have the same `PARAM`; codecs store them by one
/// another. A `*` in `PARAM` stands for the text that the only `*` of `GLOB` matches. Without `PARAM`, the parameter follows
/// from the name.
///
/// ```
/// use tensorcask::RoleRules;
/// let rules = RoleRules::parse(["app.optim.master.*=master:*", "app.ema.*=ema"])?;
/// assert_eq!(rules.of("app.optim.master.fc.w", "guessed"), Some(("master".into(), "fc.w".into())));
/// assert_eq!(rules.of("app.ema.fc.w", "guessed"), Some(("ema".into(), "guessed".into())));
/// assert_eq!(rules.of("app.model.fc.w", "guessed"), None);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct RoleRules {
    rules: Vec<Rule>,
}

#[derive(Debug, Clone)]
struct Rule {
    /// The rule as it was written.
    words: String,
    names: NamePatterns,
    /// The glob, without the text after its `=`.
    glob: String,
    role: String,
    param: Option<String>,
}

impl PartialEq for RoleRules {
    fn eq(&self, other: &Self) -> bool {
        self.rules.iter().map(|rule| &rule.words).eq(other.rules.iter().map(|rule| &rule.words))
    }
}

impl RoleRules {
    /// Parses rules, in order. Fails with `InvalidArgument` on a rule of another form, or with a glob that is not valid.
    pub fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        Ok(Self { rules: words.into_iter().map(Rule::parse).collect::<Result<_>>()? })
    }

    /// Returns words from which [`RoleRules::parse`] makes the same rules.
    pub fn words(&self) -> Vec<String> {
        self.rules.iter().map(|rule| rule.words.clone()).collect()
    }

    /// Whether there is no rule.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns role and parameter of a tensor. `guessed`: its parameter if the rule names none. `None`: no rule matches.
    pub fn of(&self, name: &str, guessed: &str) -> Option<(String, String)> {
        self.rules.iter().rev().find(|rule| rule.names.matches(name)).map(|rule| (rule.role.clone(), rule.param_of(name, guessed)))
    }
}

impl Rule {
    fn parse(words: &str) -> Result<Self> {
        let fail = |what: &str| Error::invalid(format!("`{}` is not a rule for roles: {what}", words.escape_debug()));
        let parts = words.rsplit_once('=').filter(|(glob, given)| !glob.is_empty() && !given.is_empty());
        let (glob, given) = parts.ok_or_else(|| fail("write GLOB=ROLE or GLOB=ROLE:PARAM, such as app.ema.*=ema"))?;
        let (role, param) = match given.split_once(':') {
            None => (given, None),
            Some((role, param)) if role.is_empty() || param.is_empty() => return Err(fail("write GLOB=ROLE:PARAM")),
            Some((role, param)) => (role, Some(param.to_owned())),
        };
        let has_one_star = glob.matches('*').count() == 1 && !glob.contains(['?', '[', '{', '\\']);
        if param.as_ref().is_some_and(|param| param.contains('*')) && !has_one_star {
            return Err(fail("a `*` in PARAM needs a glob with exactly one `*` and no other wildcard"));
        }
        let names = NamePatterns::parse([glob])?;
        Ok(Self { words: words.to_owned(), names, glob: glob.to_owned(), role: role.to_owned(), param })
    }

    fn param_of(&self, name: &str, guessed: &str) -> String {
        let Some(param) = &self.param else { return guessed.to_owned() };
        // The text of the glob before and after its star.
        let (before, after) = self.glob.split_once('*').unwrap_or_default();
        let star = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after)).unwrap_or(name);
        param.replace('*', star)
    }
}

#[cfg(test)]
mod tests {
    use super::RoleRules;

    #[test]
    fn the_last_rule_that_matches_wins_and_other_forms_are_refused() {
        let rules = RoleRules::parse(["*=model", "ema.*=ema:*"]).unwrap();
        assert_eq!(rules.of("ema.w", "ema.w"), Some(("ema".into(), "w".into())));
        assert_eq!(rules.of("w", "w"), Some(("model".into(), "w".into())));
        assert_eq!(RoleRules::parse(rules.words().iter().map(String::as_str)).unwrap(), rules);
        for bad in ["", "w", "=model", "w=", "w=:p", "w=model:", "a*b*=model:*", "w?=model:*", "[=model"] {
            assert!(RoleRules::parse([bad]).is_err(), "{bad}");
        }
    }
}
