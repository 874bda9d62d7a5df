"""Megatron Core: a GPT with tensor parallelism of 2, its distributed checkpoints and its queue of asynchronous calls.

Megatron Core expects CUDA. For a CPU this program replaces three functions of `torch.cuda` (the device of a tensor that ranks add up, and
two that wait for a device), and Megatron's tracker of CUDA's random states, so that dropout takes the generator of the CPU.
"""

import contextlib
import warnings
from pathlib import Path

import tensorcask
import torch
import torch.distributed as dist
from common import EVERY, STEPS, Run

warnings.filterwarnings("ignore")
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *device: None
torch.cuda.is_initialized = lambda: False

from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, initialize_rng_tracker  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from tensorcask import megatron  # noqa: E402

run = Run()
initialize_rng_tracker()
CudaRNGStatesTracker.fork = lambda tracker, *name: contextlib.nullcontext()
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=run.world)
torch.manual_seed(1)
config = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, gated_linear_unit=True, add_bias_linear=False,
    activation_func=torch.nn.functional.silu, bias_activation_fusion=False, attention_dropout=0.1, hidden_dropout=0.1,
    pipeline_dtype=torch.float32, tensor_model_parallel_size=run.world, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
)  # fmt: skip
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=16, position_embedding_type="learned_absolute")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# Moments must exist before they can be loaded.
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
optimizer.param_groups[0]["lr"] = 0.0
optimizer.step()
optimizer.param_groups[0]["lr"] = 1e-2
optimizer.zero_grad()


def sharded(iteration):
    """What Megatron-LM saves."""
    state = {"model": model.sharded_state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
    # The same for all parameters, and so no tensor of its own. Megatron-LM does this, too.
    state["common_step"] = float(next(iter(state["optimizer"]["state"].values()))["step"])
    known = get_param_id_to_sharded_param_map(state["model"], model.parameters())
    optim_state_to_sharding_state(state["optimizer"], known, exclude_keys=("step",))
    state["random"] = ShardedObject("random", {"torch": torch.get_rng_state()}, (run.world,), (run.rank,))
    return state


def train(step):
    tokens = torch.randint(32, (2, 17), generator=torch.Generator().manual_seed(step))
    positions = torch.arange(16).expand(2, 16)
    mask = torch.ones(1, 1, 16, 16).tril() < 0.5
    loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def set_state(state):
    model.load_state_dict(state["model"])
    for moments in state["optimizer"]["state"].values():
        moments["step"] = torch.tensor(state["common_step"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"]["torch"])
    return state["iteration"]


def tensors():
    moments = {f"{at}.{key}": value for at, state in optimizer.state_dict()["state"].items() for key, value in state.items()}
    return {**{key: value for key, value in model.state_dict().items() if torch.is_tensor(value)}, **moments}


def steps(done):
    return run.steps(done, tensors)


# ANCHOR: lines
engine = tensorcask.Engine(run.store, rank=dist.get_rank(), world=dist.get_world_size())
try:
    done = set_state(megatron.load(sharded(0), megatron.latest(run.work, engine=engine), engine=engine))
except tensorcask.NotFoundError:
    done = 0
calls = AsyncCallsQueue()
for step in steps(done):
    loss = train(step)
    calls.maybe_finalize_async_calls()
    if step % EVERY == 0:
        calls.schedule_async_request(megatron.save(sharded(step), f"{run.work}/iter_{step:07}", engine=engine))
    # ANCHOR_END: lines
    run.loss(step, loss)
calls.maybe_finalize_async_calls(blocking=True)
engine.finish()
assert megatron.latest(run.work) == Path(run.work) / f"iter_{STEPS // EVERY * EVERY:07}"
run.end(tensors())
