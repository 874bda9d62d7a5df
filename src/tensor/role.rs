//! The role of a tensor in training, guessed from its name unless the caller states the role.
//!
//! A guess may choose a codec, because every codec restores the same bits. It may not round or drop a tensor. A name
//! proves a role only where trainers put it: below the key of an optimizer, or as one of the words that nothing but an
//! optimizer uses. `momentum.weight` may be a momentum, or the weights of a module called `momentum`.

/// Role of a tensor, and its parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleAndParam {
    /// Role: `model`, `master`, `exp_avg`, `exp_avg_sq`, `momentum`, `ema`, `optimizer`, or any other word.
    pub role: String,
    /// Name shared by all tensors of a parameter.
    pub param: String,
    /// Whether the name proves the role. Other roles are guesses: nothing is rounded or dropped because of them.
    pub is_certain: bool,
}

/// Guesses role and param from a tensor's name.
///
/// Known are the names of torch optimizers (also as saved by FSDP and DCP), Megatron distributed checkpoints,
/// DeepSpeed, optax, and Hugging Face models. Every tensor below the key of a model (`model`, `module`, `state_dict`,
/// `params`) is a model weight. A tensor below the key of an optimizer whose place names no role has role `optimizer`.
/// Every other name is a model weight.
///
/// Dots and slashes separate segments. The param is the name without the role's segment, container segments, and wrapper
/// segments. Therefore all tensors of a parameter get the same param, also below a key that is not known, such as `app`.
///
/// ```
/// let guess = |name| {
///     let guess = tensorcask::infer_role(name);
///     (guess.role, guess.param)
/// };
/// let expected = |role: &str, param: &str| (role.to_owned(), param.to_owned());
/// assert_eq!(guess("model.h.0.weight"), expected("model", "h.0.weight"));
/// assert_eq!(guess("model.momentum.weight"), expected("model", "momentum.weight"));
/// assert_eq!(guess("optimizer.exp_avg.h.0.weight"), expected("exp_avg", "h.0.weight"));
/// assert_eq!(guess("optimizer.state.model.h.0.weight.exp_avg_sq"), expected("exp_avg_sq", "h.0.weight"));
/// assert_eq!(guess("optimizer.state.fp32_param.h.0.weight"), expected("master", "h.0.weight"));
/// assert_eq!(guess("optimizer.state.h.0.weight.square_avg"), expected("optimizer", "h.0.weight.square_avg"));
/// assert_eq!(guess("_fsdp_wrapped_module.h.0._orig_mod.weight"), expected("model", "h.0.weight"));
/// assert_eq!(guess("app.model.h.0.weight").1, guess("app.optim.state.h.0.weight.exp_avg").1);
/// assert_eq!(guess("models.0.h.0.weight").1, guess("optimizers.0.state.h.0.weight.exp_avg").1); // Accelerate
/// assert_eq!(guess("state_dict.h.0.weight").1, guess("optimizer_states.1.state.h.0.weight.exp_avg").1); // Lightning
/// assert!(!tensorcask::infer_role("momentum.weight").is_certain);
/// ```
pub fn infer_role(name: &str) -> RoleAndParam {
    let mut segments: Vec<&str> = name.split(['.', '/']).collect();
    // The flat buckets of several optimizers have different parameters, although the rest of their names is the same.
    let is_param_whole = is_in_bucket(&segments);
    let chained = segments.iter().take_while(|segment| is_chained(segment) && !is_param_whole).count();
    segments.drain(..if chained < segments.len() { chained } else { 0 });
    let found = place_of_role(&segments);
    let skip = found.at.unwrap_or(usize::MAX);
    let is_of_param = |&(i, segment): &(usize, &&str)| i != skip && !WRAPPERS.contains(segment) && !is_container(segment);
    let mut param: Vec<&str> = segments.iter().enumerate().filter(is_of_param).map(|(_, segment)| *segment).collect();
    if param.is_empty() {
        // The parameter itself has the name of a container.
        param = segments.iter().enumerate().filter(|&(i, _)| i != skip).map(|(_, segment)| *segment).collect();
    }
    // Lightning lists the optimizers of one module, and the names of its parameters are unique. Accelerate lists models, too.
    let is_named = matches!(param.as_slice(), [number, name, ..] if is_number(number) && !(param.len() == 2 && is_number(name)));
    if segments.contains(&"optimizer_states") && is_named {
        param.remove(0);
    }
    RoleAndParam { role: found.role.to_owned(), param: param.join("."), is_certain: found.is_certain }
}

/// The role that the segments of a name show.
struct FoundRole {
    role: &'static str,
    /// Number of the segment that names the role; `None` if no segment does.
    at: Option<usize>,
    is_certain: bool,
}

/// Finds the segment that names a role. Trainers write it first below the key of the optimizer (Megatron, optax) or
/// last (torch, DeepSpeed).
fn place_of_role(segments: &[&str]) -> FoundRole {
    let role_at = |words: &[(&str, &'static str)], at: usize| {
        let segment = segments.get(at)?;
        words.iter().find(|(word, _)| word == segment).map(|(_, role)| (at, *role))
    };
    let certain = |(at, role): (usize, &'static str)| FoundRole { role, at: Some(at), is_certain: true };
    let guessed = |(at, role): (usize, &'static str)| FoundRole { role, at: Some(at), is_certain: false };
    // The key of a model or an optimizer, unless a word before it already names a role, as in `ema.model.w`.
    let key = segments
        .iter()
        .position(|segment| OPTIMIZERS.contains(segment) || MODELS.contains(segment))
        .filter(|&key| (0..key).all(|at| role_at(WORDS, at).or_else(|| role_at(PLAIN_WORDS, at)).is_none()));
    let is_optimizer = |key: usize| segments.get(key).is_some_and(|segment| OPTIMIZERS.contains(segment));
    if key.is_some_and(|key| !is_optimizer(key)) {
        return FoundRole { role: "model", at: None, is_certain: true };
    }
    let last = segments.len().saturating_sub(1);
    let start = key.unwrap_or(0);
    let is_outer = |segment: &&str| is_container(segment) || WRAPPERS.contains(segment);
    let body = start + segments.iter().skip(start).take_while(|segment| is_outer(segment)).count();
    // A chain of optax transformations is a tuple: `opt_state.0.mu`.
    let first = body + segments.iter().skip(body).take_while(|segment| is_number(segment)).count();
    if let Some(found) = role_at(WORDS, body).or_else(|| role_at(WORDS, last)) {
        return certain(found);
    }
    if key.is_some() {
        let found = role_at(LAST_IN_OPTIMIZER, last).filter(|_| last > body);
        let found = found.or_else(|| role_at(FIRST_IN_OPTIMIZER, last).filter(|_| is_in_bucket(segments)));
        let found = found.or_else(|| role_at(FIRST_IN_OPTIMIZER, first));
        let found = found.or_else(|| role_at(PLAIN_WORDS, first)).or_else(|| role_at(PLAIN_WORDS, last));
        return found.map_or(FoundRole { role: "optimizer", at: None, is_certain: true }, certain);
    }
    let anywhere = (0..segments.len()).find_map(|at| role_at(WORDS, at));
    let found = role_at(PLAIN_WORDS, first).or(anywhere).or_else(|| role_at(PLAIN_WORDS, last));
    found.map_or(FoundRole { role: "model", at: None, is_certain: true }, guessed)
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
    segment.strip_prefix("chained_").is_some_and(is_number)
}

/// Whether a name is that of a flat bucket of Megatron: `gbuf_idx_0.dtype_...bucket_idx_0.param`.
fn is_in_bucket(segments: &[&str]) -> bool {
    segments.iter().rev().nth(1).is_some_and(|segment| segment.starts_with("bucket_idx_"))
}

/// Whether a segment of a name is a number.
pub(crate) fn is_number(segment: &str) -> bool {
    !segment.is_empty() && segment.bytes().all(|byte| byte.is_ascii_digit())
}

/// Keys of optimizer state.
const OPTIMIZERS: &[&str] =
    &["optimizer", "optimizers", "optimizer_states", "optim", "opt_state", "optimizer_state_dict", "base_optimizer_state", "zero"];

/// Keys of model weights.
const MODELS: &[&str] = &["model", "models", "module", "state_dict", "params"];

/// Whether a segment names a container of tensors, not a parameter.
fn is_container(segment: &str) -> bool {
    segment == "state" || OPTIMIZERS.contains(&segment) || MODELS.contains(&segment)
}

/// Segments that wrappers insert anywhere.
const WRAPPERS: &[&str] = &["_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"];

/// Words that only optimizers use.
const WORDS: &[(&str, &str)] = &[
    ("master_param", "master"),
    ("master_weights", "master"),
    ("main_param", "master"),
    ("fp32_param", "master"),
    ("fp32_flat_groups", "master"),
    ("single_partition_of_fp32_groups", "master"),
    ("exp_avg", "exp_avg"),
    ("exp_avg_sq", "exp_avg_sq"),
    ("max_exp_avg_sq", "max_exp_avg_sq"),
    ("momentum_buffer", "momentum"),
];

/// Words that are also names of modules.
const PLAIN_WORDS: &[(&str, &str)] = &[("master", "master"), ("momentum", "momentum"), ("ema", "ema"), ("ema_model", "ema")];

/// Words that name a role first below the key of an optimizer, of optax and Megatron.
const FIRST_IN_OPTIMIZER: &[(&str, &str)] =
    &[("mu", "exp_avg"), ("nu", "exp_avg_sq"), ("fp32", "master"), ("param", "master"), ("step", "step"), ("count", "step")];

/// Words that name a role last below the key of an optimizer, of DeepSpeed and torch.
const LAST_IN_OPTIMIZER: &[(&str, &str)] = &[("fp32", "master"), ("step", "step"), ("count", "step")];

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
            ("lightning", "model", "state_dict.layers.0.mlp.weight"),
            ("lightning", "exp_avg", "optimizer_states.0.state.layers.0.mlp.weight.exp_avg"),
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
    fn tensors_of_one_parameter_meet_below_any_key_and_in_any_module() {
        for (model, others) in [
            ("app.model.h.0.w", ["app.optim.state.h.0.w.exp_avg", "app.optimizer.exp_avg_sq.h.0.w", "app.optimizer.master.h.0.w"]),
            ("l0.model.w", ["l0.optimizer.exp_avg.w", "l0.optimizer.state.w.exp_avg_sq", "l0.optim.state.fp32_param.w"]),
            ("net.model.w", ["optimizer.state.net.model.w.exp_avg", "optim.exp_avg_sq.net.model.w", "optimizer.state.param.net.model.w"]),
            (
                "model.net.model.w",
                ["optim.state.model.net.model.w.exp_avg", "optim.state.net.model.w.exp_avg_sq", "master_param.net.model.w"],
            ),
        ] {
            let param = infer_role(model).param;
            assert_eq!(others.map(|name| infer_role(name).param), [(); 3].map(|()| param.clone()), "{model}");
            assert_eq!(others.map(|name| infer_role(name).role), ["exp_avg", "exp_avg_sq", "master"]);
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
    fn names_that_modules_have_too_prove_no_role() {
        for (name, role, is_certain) in [
            ("momentum.weight", "momentum", false),
            ("master.w", "master", false),
            ("ema.w", "ema", false),
            ("net.exp_avg.w", "exp_avg", false),
            ("exp_avg.w", "exp_avg", true),
            ("layers.0.w.exp_avg_sq", "exp_avg_sq", true),
            ("layers.0.momentum.weight", "model", true),
            ("model.momentum.weight", "model", true),
            ("model.master.weight", "model", true),
            ("state_dict.ema_model.w", "model", true),
            ("params.mu.kernel", "model", true),
            ("optimizer.state.mu.weight.step", "step", true),
            ("optimizer.state.mu.weight.exp_avg", "exp_avg", true),
            ("optimizer.state.momentum.weight.exp_avg_sq", "exp_avg_sq", true),
            ("opt_state.0.nu.params.mu.kernel", "exp_avg_sq", true),
            ("optimizer.state.param.layers.0.w", "master", true),
            ("optim.state.w.master", "master", true),
            ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param", "master", true),
            ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg", "exp_avg", true),
            ("optimizer.state.w.param", "optimizer", true),
            ("optimizer.state.param.exp_avg", "exp_avg", true),
            ("app.optimizer.state.w.exp_avg", "exp_avg", true),
            ("optimizer.state.0.exp_avg.codes", "optimizer", true),
            ("optimizer.state.0.square_avg", "optimizer", true),
            ("optimizer.state.w.sum", "optimizer", true),
            ("ema.model.w", "ema", false),
        ] {
            let guess = infer_role(name);
            assert_eq!((guess.role.as_str(), guess.is_certain), (role, is_certain), "{name}");
        }
    }

    #[test]
    fn buckets_of_several_optimizers_are_several_parameters() {
        let bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0";
        let guess = |chained: usize, part: &str| infer_role(&format!("chained_{chained}.{bucket}.{part}"));
        assert_eq!((guess(1, "param").role.as_str(), guess(1, "exp_avg").role.as_str()), ("master", "exp_avg"));
        assert_eq!(guess(1, "param").param, guess(1, "exp_avg_sq").param);
        assert_ne!(guess(0, "exp_avg").param, guess(1, "exp_avg").param);
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
