#!/usr/bin/env bash
# megatron-core 0.19.2 (Python 3.12 or later): with torch.optim.AdamW, loading a dp_reshardable checkpoint leaves wrong numbers of steps.
#
# Without Apex and Transformer Engine, Megatron trains with PyTorch's AdamW, which counts the steps of each parameter in a tensor. One
# would expect that the optimizer goes on as it did after the save. But sharded_state_dict(is_loading=True) keeps the current counters
# beside the tensors that are requested, and load_state_dict copies them over those of the checkpoint. Moments and weights come back.
# So a run that goes back to a checkpoint keeps the number of steps that it has reached. Besides, all parameters share one tensor after
# the load, so each step then counts as many steps as there are parameters. The corrections of AdamW's bias are wrong, and the next
# weights with them, without an error or a warning.
set -euo pipefail
python3 -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { echo "skipped: python3 is older than 3.12" && exit 1; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" megatron-core==0.19.2 torch==2.15.0 numpy==2.5.5 psutil==7.2.2 <<'PYTHON'
import os
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Megatron asks for CUDA; this program runs on a CPU. Tensors for `cuda` are made there, and their types have CUDA's names."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = function(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if function is torch.Tensor.type and isinstance(found, str) else found


class Stream:
    def wait_stream(self, other):
        pass


torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *device: None
torch.cuda.current_stream = Stream
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig


def step(number):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(number)).bfloat16()
    model(inputs).float().square().mean().backward()
    model.finish_grad_sync()
    assert optimizer.step()[0]


def states():
    return [state for part in optimizer.chained_optimizers for state in part.optimizer.state.items()]


def counters():
    return [state["step"] for _, state in states()]


def weights():
    """Of the model in bf16, and their masters."""
    return [value.detach().clone() for value in (*model.parameters(), *(master for master, _ in states()))]


def moments():
    return [state[key].clone() for _, state in states() for key in ("exp_avg", "exp_avg_sq")]


def sharded(is_loading):
    parameters = {name: ShardedTensor.from_rank_offsets(name, value) for name, value in layers.state_dict(keep_vars=True).items()}
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    return {"model": parameters, "optimizer": optimizer.sharded_state_dict(parameters, is_loading=is_loading, metadata=metadata)}


def is_equal(one, other):
    return all(map(torch.equal, one, other))


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    OnCpu().__enter__()
    torch.manual_seed(1)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)).bfloat16()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), layers)
    settings = OptimizerConfig(lr=0.01, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=0.0)
    optimizer = get_megatron_optimizer(settings, [model])
    print(version("megatron-core"), {type(part.optimizer) for part in optimizer.chained_optimizers})

    for number in (1, 2, 3):
        step(number)
    os.mkdir("checkpoint")
    dist_checkpointing.save(sharded(is_loading=False), "checkpoint")
    saved_weights, saved_moments, saved_counters = weights(), moments(), [counter.item() for counter in counters()]
    step(4)
    next_weights, next_moments = weights(), moments()
    step(5)

    loaded = dist_checkpointing.load(sharded(is_loading=True), "checkpoint")
    layers.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    loaded_counters = [counter.item() for counter in counters()]
    is_loaded = is_equal(weights(), saved_weights) and is_equal(moments(), saved_moments)
    print("weights and moments loaded as saved:", is_loaded)
    print("steps saved:", saved_counters, "  loaded:", loaded_counters, "  tensors that count:", len(set(map(id, counters()))))
    assert is_loaded and saved_counters == [3.0] * 4 and loaded_counters == [5.0] * 4

    step(4)
    counted = [counter.item() for counter in counters()]
    is_moment, is_weight = is_equal(moments(), next_moments), is_equal(weights(), next_weights)
    print("step 4 again, steps:", counted, "  moments as before:", is_moment, "  weights as before:", is_weight)
    assert counted == [9.0] * 4 and is_moment and not is_weight
PYTHON
