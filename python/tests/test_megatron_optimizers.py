"""Megatron's own distributed optimizer, experts and FSDP through a store: real ranks on gloo, the real library."""

import sys
from pathlib import Path

import pytest
import tensorcask
import torch
from megatron_on_cpu import own_format, train_without_cuda
from ranks import on_ranks

pytest.importorskip("megatron.core.dist_checkpointing")
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from tensorcask import megatron  # noqa: E402

VOCABULARY, LENGTH, EXPERTS = 32, 8, 4


class Training:
    """A GPT in bf16 with Megatron's distributed optimizer, which divides masters and moments among the ranks."""

    def __init__(self, *, sharding, experts, tensor=1, expert=1, seed=1):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, expert_model_parallel_size=expert)
        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, add_bias_linear=False, bf16=True,
            params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, attention_dropout=0.0, hidden_dropout=0.0, gated_linear_unit=True,
            activation_func=torch.nn.functional.silu, bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
            gradient_accumulation_fusion=False, tensor_model_parallel_size=tensor, expert_model_parallel_size=expert,
            num_moe_experts=EXPERTS if experts else None, moe_token_dispatcher_type="allgather", moe_router_topk=2,
            moe_router_load_balancing_type="none", sequence_parallel=experts and tensor > 1,
        )  # fmt: skip
        layers = get_gpt_layer_local_spec(num_experts=EXPERTS) if experts else get_gpt_layer_local_spec()
        model = GPTModel(config, layers, vocab_size=VOCABULARY, max_sequence_length=LENGTH, position_embedding_type="learned_absolute")
        divided = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, divided, Float16Module(config, model))
        chosen = OptimizerConfig(
            optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=1.0
        )
        self.optimizer = get_megatron_optimizer(chosen, [self.model])
        self.metadata = {"distrib_optim_sharding_type": sharding, "distrib_optim_fully_reshardable_mem_efficient": False}
        self.metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def step(self, number):
        at = parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(number * 100 + at)
        tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
        positions = torch.arange(LENGTH).expand(2, LENGTH)
        mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean().backward()
        finalize_model_grads([self.model])
        assert self.optimizer.step()[0]

    def sharded(self, *, is_loading):
        """What Megatron-LM saves."""
        model = self.model.module.module.sharded_state_dict(metadata=self.metadata)
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=self.metadata)}

    def save(self, folder):
        megatron.save({**self.sharded(is_loading=False), "iteration": 1}, folder)

    def load(self, folder):
        state = megatron.load(self.sharded(is_loading=True), folder)
        self.model.module.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def tensors(self):
        """Bits of all weights of this rank, of its masters, and of its moments."""
        found = {name: value for name, value in self.model.named_parameters()}
        for at, part in enumerate(getattr(self.optimizer, "chained_optimizers", [self.optimizer])):
            for group, masters in enumerate(part.shard_fp32_from_float16_groups):
                for number, master in enumerate(masters):
                    found[f"{at}.{group}.{number}.master"] = master
                    found |= {f"{at}.{group}.{number}.{key}": value for key, value in part.optimizer.state[master].items()}
        return {name: value.detach().clone() for name, value in found.items()}


def is_same(one, other):
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))]


def resumes(folder, sharding, experts, tensor, expert):
    train_without_cuda()
    options = {"sharding": sharding, "experts": experts == "True", "tensor": int(tensor), "expert": int(expert)}
    training = Training(**options)
    for number in (1, 2):
        training.step(number)
    training.save(f"{folder}/iter_0000010")
    saved = training.tensors()
    assert {name.rsplit(".", 1)[1] for name in saved} >= {"weight", "master", "exp_avg", "exp_avg_sq"}
    training.step(3)
    fresh = Training(**options, seed=2)
    fresh.load(f"{folder}/iter_0000010")
    is_same(fresh.tensors(), saved)
    fresh.step(3)
    is_same(fresh.tensors(), training.tensors())


@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize(
    ("experts", "tensor", "expert"), [(False, 1, 1), (False, 2, 1), (True, 1, 2)], ids=["data", "tensor", "experts"]
)
def test_megatrons_optimizer_resumes(tmp_path, sharding, experts, tensor, expert):
    on_ranks(2, tmp_path, resumes, tmp_path / "run", sharding, experts, tensor, expert)
    assert tensorcask.Store(tmp_path / "run" / "tensorcask").verify().is_clean


def runs_megatron_training(folder, fully_parallel):
    """`save_checkpoint` and `load_checkpoint`, which `pretrain` calls, with the optimizer of the test above."""
    train_without_cuda()
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = torch.get_rng_state, torch.set_rng_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training import checkpointing, global_vars
    from megatron.training.arguments import parse_args

    init_num_microbatches_calculator(0, None, 2, 2, 1)
    sys.argv = ["pretrain_gpt.py"]
    args = parse_args(ignore_unknown_args=True)
    settings = {
        "save": folder, "load": folder, "ckpt_format": "torch_dist", "use_dist_ckpt": True, "async_save": False, "num_layers": 2,
        "hidden_size": 16, "num_attention_heads": 4, "bf16": True, "use_distributed_optimizer": True, "add_position_embedding": True,
        "dist_ckpt_optim_fully_reshardable": True, "ckpt_fully_parallel_save": fully_parallel == "True", "consumed_train_samples": 0,
        "skipped_train_samples": 0, "consumed_valid_samples": 0, "no_save_rng": True, "no_load_rng": True,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
        "ckpt_fully_parallel_load": fully_parallel == "True", "ckpt_fully_parallel_load_exchange_algo": "gather_object", "vocab_file": None,
    }  # fmt: skip
    for name, value in settings.items():
        setattr(args, name, value)
    global_vars.set_args(args)
    training = Training(sharding="fully_reshardable", experts=False)
    training.step(1)
    models = [training.model]
    with own_format():
        checkpointing.save_checkpoint(5, models, training.optimizer, None, 0, checkpointing_context={})
    megatron.install()
    for iteration in (10, 20):
        training.step(iteration)
        checkpointing.save_checkpoint(iteration, models, training.optimizer, None, 0, checkpointing_context={})
        assert not list(Path(folder, f"iter_{iteration:07}").glob("*.distcp"))
    fresh = Training(sharding="fully_reshardable", experts=False, seed=2)
    assert checkpointing.load_checkpoint([fresh.model], fresh.optimizer, None, checkpointing_context={})[0] == 20
    is_same(fresh.tensors(), training.tensors())
    # A checkpoint that Megatron has saved in its own format.
    Path(folder, megatron.TRACKER).write_text("5")
    assert checkpointing.load_checkpoint([fresh.model], fresh.optimizer, None, checkpointing_context={})[0] == 5
    context = {"save_strategy": megatron.SaveStrategy()}
    checkpointing.save_checkpoint(30, [fresh.model], fresh.optimizer, None, 0, checkpointing_context=context)
    args.ckpt_format = "torch_dcp"
    with pytest.raises(tensorcask.UnsupportedError, match="--ckpt-format torch_dcp does not use tensorcask"):
        checkpointing.save_checkpoint(40, [fresh.model], fresh.optimizer, None, 0)


@pytest.mark.parametrize("fully_parallel", [False, True])
def test_megatron_training(tmp_path, fully_parallel):
    pytest.importorskip("megatron.training", reason="packages of Megatron Core before 0.17 do not have it")
    pytest.importorskip("yaml", reason="megatron.training imports it")
    on_ranks(2 if fully_parallel else 1, tmp_path, runs_megatron_training, tmp_path / "run", fully_parallel)
    store = tensorcask.Store(tmp_path / "run" / "tensorcask")
    assert store.steps == [10, 20, 30] and store.verify().is_clean
