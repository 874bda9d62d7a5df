"""Megatron Core on a CPU: what it asks of `torch.cuda`, answered with the CPU. Only ranks of tests call this."""

import contextlib
import sys

import torch
from torch.overrides import TorchFunctionMode


class _Stream:
    """A stream, or an event of one. All work is done when a function returns, so nothing waits."""

    def __init__(self, *arguments, **options):
        pass

    def __getattr__(self, name):
        return lambda *arguments: self


class FusedAdam(torch.optim.Optimizer):
    """Adam with the state of `FusedAdam` in Apex and Transformer Engine: the number of steps is in the groups. With PyTorch's Adam,
    Megatron cannot load what it saves."""

    def __init__(self, params, lr, weight_decay, betas, eps, **other):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                size = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(state["exp_avg"], size, value=-group["lr"] / (1 - first ** group["step"]))


class _CpuForCuda(TorchFunctionMode):
    """Tensors for the device `cuda` are made on the CPU, and types of tensors have the names of CUDA's."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        found = function(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if function is torch.Tensor.type and isinstance(found, str) else found


def without_cuda():
    """Replaces what Megatron calls to save and load."""
    torch.cuda.current_device, torch.cuda.synchronize = (lambda: torch.device("cpu")), (lambda *device: None)


@contextlib.contextmanager
def own_format():
    """For saves in Megatron's own format: ends the process that Megatron starts for them. Ranks end without the work of `atexit`."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    try:
        yield
    finally:
        if filesystem_async._results_queue is not None:
            filesystem_async._results_queue._manager.shutdown()


def train_without_cuda():
    """Replaces what Megatron calls to train with its own optimizer, for the rest of this process."""
    without_cuda()
    torch.cuda.is_initialized = lambda: False
    torch.cuda.current_stream = torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.empty_cache = lambda: None
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, initialize_rng_tracker

    initialize_rng_tracker()
    import megatron.core.optimizer as optimizers

    divided = sys.modules["megatron.core.optimizer.distrib_optimizer"]
    optimizers.Adam = divided.Adam = FusedAdam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    divided.HAVE_APEX_OR_TE = divided.USING_APEX_OPTIMIZER = True
    import megatron.core.transformer.moe.moe_utils as experts

    if not hasattr(experts, "te_general_gemm"):
        # Megatron Core 0.16 reads this name, also without Transformer Engine.
        experts.te_general_gemm = None
    # Dropout takes the generator of the CPU.
    CudaRNGStatesTracker.fork = lambda tracker, *name: contextlib.nullcontext()
    _CpuForCuda().__enter__()


def shard_without_cuda():
    """Replaces what Megatron-FSDP calls, for the rest of this process. It takes no device but `cuda:N`, and makes tensors in hooks of
    autograd, which a mode of PyTorch does not see."""
    train_without_cuda()
    torch.cuda.current_device = lambda: 0

    def on_cpu(value):
        return torch.device("cpu") if isinstance(value, (torch.device, str)) and str(value).startswith("cuda") else value

    def replaced(function):
        return lambda *args, **kwargs: function(*args, **{key: on_cpu(value) for key, value in kwargs.items()})

    class Positional(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*(args if function is torch.device else map(on_cpu, args)), **(kwargs or {}))

    for name in ("empty", "zeros", "ones", "tensor", "full", "empty_like", "zeros_like"):
        setattr(torch, name, replaced(getattr(torch, name)))
    Positional().__enter__()
