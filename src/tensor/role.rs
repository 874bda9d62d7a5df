//! What a tensor is to training, guessed from its name when the caller does not say.

/// A role and the parameter it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleAndParam {
    /// `model`, `master`, `exp_avg`, `exp_avg_sq`, `momentum`, `ema`, or any other word.
    pub role: String,
    /// Name shared by all tensors of one parameter.
    pub param: String,
}

/// Guesses role and param from the dotted segments of a name: one that is a word of an optimizer decides; everything
/// else is model weight.
///
/// ```
/// let guess = tensorcask::infer_role("optimizer.exp_avg.h.0.weight");
/// assert_eq!((guess.role.as_str(), guess.param.as_str()), ("exp_avg", "h.0.weight"));
/// let guess = tensorcask::infer_role("model.h.0.weight");
/// assert_eq!((guess.role.as_str(), guess.param.as_str()), ("model", "h.0.weight"));
/// ```
pub fn infer_role(name: &str) -> RoleAndParam {
    let segments: Vec<&str> = name.split('.').collect();
    let found =
        segments.iter().enumerate().find_map(|(i, segment)| WORDS.iter().find(|(word, _)| word == segment).map(|(_, role)| (i, *role)));
    let kept = |i: usize, segment: &str| !(CONTAINERS.contains(&segment) && i == 0);
    let (skip, role) = found.unwrap_or((usize::MAX, "model"));
    let param: Vec<&str> =
        segments.iter().enumerate().filter(|&(i, segment)| i != skip && kept(i, segment)).map(|(_, segment)| *segment).collect();
    RoleAndParam { role: role.to_owned(), param: param.join(".") }
}

const CONTAINERS: &[&str] = &["model", "module", "optimizer", "optim", "state"];

const WORDS: &[(&str, &str)] = &[
    ("master", "master"),
    ("fp32_param", "master"),
    ("exp_avg", "exp_avg"),
    ("exp_avg_sq", "exp_avg_sq"),
    ("momentum", "momentum"),
    ("momentum_buffer", "momentum"),
    ("ema", "ema"),
];
