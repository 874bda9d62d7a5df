//! The role of a tensor in training, guessed from its name unless the caller states the role.

/// Role of a tensor, and its parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleAndParam {
    /// Role: `model`, `master`, `exp_avg`, `exp_avg_sq`, `momentum`, `ema`, or any other word.
    pub role: String,
    /// Name shared by all tensors of a parameter.
    pub param: String,
}

/// Guesses role and param from a tensor's name.
///
/// Known are the names of torch optimizers (also as saved by FSDP and DCP), Megatron distributed checkpoints,
/// DeepSpeed, optax, and Hugging Face models. Every other name is a model weight.
///
/// Dots and slashes separate segments. The param is the name without the role's segment, without leading container
/// segments, and without wrapper segments. Therefore all tensors of a parameter get the same param.
///
/// ```
/// let guess = |name| {
///     let guess = tensorcask::infer_role(name);
///     (guess.role, guess.param)
/// };
/// let expected = |role: &str, param: &str| (role.to_owned(), param.to_owned());
/// assert_eq!(guess("model.h.0.weight"), expected("model", "h.0.weight"));
/// assert_eq!(guess("optimizer.exp_avg.h.0.weight"), expected("exp_avg", "h.0.weight"));
/// assert_eq!(guess("optimizer.state.model.h.0.weight.exp_avg_sq"), expected("exp_avg_sq", "h.0.weight"));
/// assert_eq!(guess("optimizer.state.fp32_param.h.0.weight"), expected("master", "h.0.weight"));
/// assert_eq!(guess("_fsdp_wrapped_module.h.0._orig_mod.weight"), expected("model", "h.0.weight"));
/// ```
pub fn infer_role(name: &str) -> RoleAndParam {
    let mut segments: Vec<&str> = name.split(['.', '/']).collect();
    let chained = segments.iter().take_while(|segment| is_chained(segment)).count();
    segments.drain(..if chained < segments.len() { chained } else { 0 });
    let in_optimizer = segments.first().is_some_and(|first| OPTIMIZERS.contains(first));
    let role_of = |segment: &str| {
        let general = WORDS.iter().find(|(word, _)| *word == segment);
        general.or_else(|| OPTIMIZER_WORDS.iter().find(|(word, _)| in_optimizer && *word == segment)).map(|(_, role)| *role)
    };
    let found = segments.iter().enumerate().find_map(|(i, segment)| Some((i, role_of(segment)?)));
    let (skip, role) = found.unwrap_or((usize::MAX, "model"));
    let mut rest =
        segments.iter().enumerate().filter(|&(i, segment)| i != skip && !WRAPPERS.contains(segment)).map(|(_, segment)| *segment);
    let mut param: Vec<&str> = rest.by_ref().skip_while(|segment| CONTAINERS.contains(segment)).collect();
    if param.is_empty() {
        // The parameter itself has the name of a container.
        param = segments.iter().enumerate().filter(|&(i, _)| i != skip).map(|(_, segment)| *segment).collect();
    }
    RoleAndParam { role: role.to_owned(), param: param.join(".") }
}

/// Whether tensors of a role are parameters, as the model or the optimizer holds them.
pub(crate) fn is_parameter(role: &str) -> bool {
    matches!(role, "model" | "master")
}

/// Whether tensors of a role are moments of an optimizer.
pub(crate) fn is_moment(role: &str) -> bool {
    matches!(role, "exp_avg" | "exp_avg_sq" | "max_exp_avg_sq" | "momentum")
}

/// Returns whether a segment names one of several optimizers that Megatron chains.
fn is_chained(segment: &str) -> bool {
    segment.strip_prefix("chained_").is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// First segments of optimizer state.
const OPTIMIZERS: &[&str] = &["optimizer", "optim", "opt_state", "optimizer_state_dict", "base_optimizer_state", "zero"];

/// Leading segments that name a container of tensors, not a parameter.
const CONTAINERS: &[&str] = &[
    "model",
    "module",
    "optimizer",
    "optim",
    "opt_state",
    "optimizer_state_dict",
    "base_optimizer_state",
    "zero",
    "state",
    "state_dict",
    "params",
];

/// Segments that wrappers insert anywhere.
const WRAPPERS: &[&str] = &["_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"];

const WORDS: &[(&str, &str)] = &[
    ("master", "master"),
    ("master_param", "master"),
    ("master_weights", "master"),
    ("main_param", "master"),
    ("fp32_param", "master"),
    ("fp32_flat_groups", "master"),
    ("single_partition_of_fp32_groups", "master"),
    ("exp_avg", "exp_avg"),
    ("exp_avg_sq", "exp_avg_sq"),
    ("max_exp_avg_sq", "max_exp_avg_sq"),
    ("momentum", "momentum"),
    ("momentum_buffer", "momentum"),
    ("ema", "ema"),
    ("ema_model", "ema"),
];

/// Words that name a role only inside an optimizer.
const OPTIMIZER_WORDS: &[(&str, &str)] =
    &[("fp32", "master"), ("mu", "exp_avg"), ("nu", "exp_avg_sq"), ("step", "step"), ("count", "step")];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_one_parameter_meet() {
        // Framework, role, name of a tensor of parameter `layers.0.mlp.weight`.
        let names = [
            ("plain", "model", "layers.0.mlp.weight"),
            ("hugging face", "model", "model.layers.0.mlp.weight"),
            ("compiled", "model", "_orig_mod.layers.0.mlp.weight"),
            ("fsdp", "exp_avg", "optim.state.layers.0.mlp.weight.exp_avg"),
            ("dcp", "exp_avg_sq", "optimizer.state.model.layers.0.mlp.weight.exp_avg_sq"),
            ("dcp", "step", "optimizer.state.model.layers.0.mlp.weight.step"),
            ("megatron", "master", "optimizer.state.fp32_param.layers.0.mlp.weight"),
            ("megatron", "exp_avg", "optimizer.state.exp_avg.layers.0.mlp.weight"),
            ("megatron, several optimizers", "master", "chained_0.optimizer.state.fp32_param.layers.0.mlp.weight"),
            ("megatron, several optimizers", "exp_avg_sq", "chained_12.optimizer.state.exp_avg_sq.layers.0.mlp.weight"),
            ("deepspeed universal", "master", "zero/layers.0.mlp.weight/fp32"),
            ("deepspeed universal", "exp_avg_sq", "zero/layers.0.mlp.weight/exp_avg_sq"),
            ("optax", "exp_avg", "opt_state.mu.params.layers.0.mlp.weight"),
            ("optax", "exp_avg_sq", "opt_state.nu.params.layers.0.mlp.weight"),
            ("sgd", "momentum", "optimizer.state.layers.0.mlp.weight.momentum_buffer"),
        ];
        for (framework, role, name) in names {
            let guess = infer_role(name);
            assert_eq!((guess.role.as_str(), guess.param.as_str()), (role, "layers.0.mlp.weight"), "{framework}: {name}");
        }
    }

    #[test]
    fn parameters_that_have_numbers_for_names_keep_them() {
        for (framework, role, name, param) in [
            ("torch", "exp_avg", "optimizer.state.0.exp_avg", "0"),
            ("torch", "step", "optim.state.17.step", "17"),
            ("deepspeed zero", "exp_avg_sq", "base_optimizer_state.state.0.exp_avg_sq", "0"),
            ("deepspeed zero", "master", "single_partition_of_fp32_groups.0", "0"),
            ("fsdp, flat", "model", "_fsdp_wrapped_module._flat_param", "_flat_param"),
        ] {
            let guess = infer_role(name);
            assert_eq!((guess.role.as_str(), guess.param.as_str()), (role, param), "{framework}: {name}");
        }
    }

    #[test]
    fn words_of_optimizers_are_words_elsewhere() {
        for name in ["encoder.mu.weight", "vae.nu", "noise.step", "fp32.weight"] {
            assert_eq!(infer_role(name).role, "model", "{name}");
        }
        for name in ["", ".", "..", "model", "optimizer", "state.params"] {
            assert_eq!(infer_role(name).param, name, "{name:?}");
        }
    }
}
