"""A small GPT that real optimizers of PyTorch train in mixed precision, for tests of states that training leaves.

`benches/python/adam_replay.py` measures with the same trainers.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorcask
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from train_gpt import GPT  # noqa: E402


@dataclass(frozen=True)
class Trainer:
    """One way to train: an optimizer, and how its gradients come about."""

    name: str
    optimizer: str = "adamw"
    # "single", "foreach" or "fused": the kernel of the optimizer.
    kernel: str = "foreach"
    # Type that gradients are computed in. f32 stands for training without mixed precision.
    compute: torch.dtype = torch.bfloat16
    # Number of micro-batches, whose gradients are added up in f32, or for None in the type of the gradients.
    batches: int = 1
    add_in: torch.dtype | None = torch.float32
    # Whether the loss of a micro-batch is divided by their number, or the sum of the gradients.
    divide: str = "loss"
    # Norm to which gradients are clipped: of the whole model, or of each tensor.
    clip: float | None = 1.0
    clip_each: bool = False
    groups: int = 2
    loss_scale: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    # Types in which the first and the second moments are stored, as Megatron's precision-aware optimizer does.
    moments: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    # Of matrices; only they decay.
    decay: float = 0.1
    # Options of SGD, beside its learning rate.
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    # Type that ranks add up gradients in; None for one rank without FSDP2.
    reduce: torch.dtype | None = None
    # Role of the f32 weights.
    weights: str = "master"
    # Whether the moments have the names of `Optimizer.state_dict()`, which numbers the parameters.
    numbered: bool = False


def _model(width: int, layers: int, length: int) -> nn.Module:
    """Returns the model of the examples, with small weights."""
    model = GPT(layers, width, 4, length)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model


def _text() -> torch.Tensor:
    """Returns real text as bytes: a module of PyTorch that is mostly documentation."""
    text = Path(torch.__file__).with_name("_torch_docs.py").read_bytes()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW that rounds moments when it stores them, and steps with the numbers before."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        moments: tuple[torch.dtype, torch.dtype],
        divides: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self.moments, self.steps = moments, 0
        # Whether moments are divided by their bias corrections and the decay is part of the update, as in Transformer Engine.
        self.divides = divides

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self._step(parameter, group["lr"], group["betas"], group["weight_decay"])

    def _step(self, p: torch.Tensor, lr: float, betas: tuple[float, float], decay: float) -> None:
        state = self.state[p]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p, dtype=dtype) for dtype in self.moments)
        corrections = [1 - beta**self.steps for beta in betas]
        m = state["exp_avg"].float().lerp_(p.grad, 1 - betas[0])
        v = state["exp_avg_sq"].float().mul_(betas[1]).addcmul_(p.grad, p.grad, value=1 - betas[1])
        if self.divides:
            update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + 1e-8) + decay * p
            p.sub_(lr * update)
        else:
            divisor = (v.sqrt() / corrections[1] ** 0.5).add_(1e-8)
            p.mul_(1 - lr * decay).addcdiv_(m, divisor, value=-lr / corrections[0])
        state["exp_avg"].copy_(m)
        state["exp_avg_sq"].copy_(v)


def _optimizers(trainer: Trainer, parameters: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """Returns one optimizer for all parameters, or Muon for the matrices of the blocks and AdamW for the others."""
    if trainer.optimizer == "muon":
        matrices = {name: p for name, p in parameters.items() if p.dim() == 2 and name.startswith("blocks.")}
        others = {name: p for name, p in parameters.items() if name not in matrices}
        muon = torch.optim.Muon(list(matrices.values()), lr=0.01, weight_decay=trainer.decay)
        return [muon, *_optimizers(dataclasses.replace(trainer, optimizer="adamw"), others)]
    return [_optimizer(trainer, parameters)]


def _optimizer(trainer: Trainer, parameters: dict[str, Any]) -> torch.optim.Optimizer:
    flags = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "te": {}}[trainer.kernel]
    matrices = [p for p in parameters.values() if p.dim() > 1]
    others = [p for p in parameters.values() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": trainer.decay}, {"params": others, "weight_decay": 0.0}]
    if trainer.groups == 1:
        groups = [{"params": matrices + others, "weight_decay": trainer.decay}]
    if trainer.moments != (torch.float32, torch.float32):
        return RoundedAdamW(groups, lr=6e-4, betas=trainer.betas, moments=trainer.moments, divides=trainer.kernel == "te")
    if trainer.optimizer == "sgd":
        options = {"momentum": trainer.momentum, "dampening": trainer.dampening, "nesterov": trainer.nesterov}
        return torch.optim.SGD(groups, lr=0.05, **options, **flags)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[trainer.optimizer]
    if trainer.optimizer == "adam":
        # Adam's decay is part of the gradient; few use it.
        groups = [{**group, "weight_decay": 0.0} for group in groups]
    return kind(groups, lr=6e-4, betas=trainer.betas, **flags)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor, gathered from all ranks."""
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather else tensor).detach().clone()


MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum"}


def states(trainer: Trainer, first_step: int, deltas: int, **size: Any) -> dict[int, dict[str, Any]]:
    """Returns the states of consecutive steps. All ranks call this, and all get the whole states."""
    found = {}
    for step, state in enumerate(train(trainer, **size), 1):
        if step >= first_step:
            found[step] = state()
        if step == first_step + deltas:
            break
    return found


def assert_restored(store: tensorcask.Store, saved: dict[int, dict[str, Any]]) -> None:
    """Loads all steps, and compares every bit."""
    for step, state in saved.items():
        loaded = store.load(step=step)
        assert loaded.keys() == state.keys()
        for role, tensors in state.items():
            assert loaded[role].keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(loaded[role][name].view(torch.uint8), tensor.cpu().view(torch.uint8)), (step, role, name)
    assert store.verify().is_clean


def train(
    trainer: Trainer, *, width: int, layers: int, length: int = 64, rows: int = 4, device: str = "cpu"
) -> Iterator[Callable[[], dict[str, Any]]]:
    """Trains on and on. After each step, yields a function that returns a copy of the state."""
    torch.manual_seed(0)
    model = _model(width, layers, length).to(device)
    rank = 0
    if trainer.reduce is not None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        rank = dist.get_rank()
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=trainer.compute, reduce_dtype=trainer.reduce)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        masters = dict(model.named_parameters())
    elif trainer.compute == torch.float32:
        masters = dict(model.named_parameters())
    else:
        masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        model.to(trainer.compute)
    optimizers = _optimizers(trainer, masters)
    text, generator = _text(), torch.Generator().manual_seed(1 + rank)

    def backward() -> None:
        starts = torch.randint(len(text) - length - 1, (rows,), generator=generator).tolist()
        tokens = torch.stack([text[start : start + length + 1] for start in starts]).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        share = trainer.batches if trainer.divide == "loss" else 1
        (loss * (trainer.loss_scale / share)).backward()

    def gradients() -> None:
        """Leaves the gradients of a step in the masters."""
        if trainer.reduce is not None or trainer.compute == torch.float32 or trainer.add_in is None:
            for _ in range(trainer.batches):
                backward()
            for name, parameter in model.named_parameters():
                if parameter is not masters[name]:
                    masters[name].grad = parameter.grad.float()
                    parameter.grad = None
        else:
            for parameter in masters.values():
                parameter.grad = torch.zeros_like(parameter)
            for _ in range(trainer.batches):
                backward()
                for name, parameter in model.named_parameters():
                    masters[name].grad += parameter.grad.to(trainer.add_in)
                    parameter.grad = None
        for parameter in masters.values():
            if trainer.loss_scale != 1.0:
                parameter.grad *= 1.0 / trainer.loss_scale
            if trainer.divide == "sum":
                parameter.grad /= trainer.batches

    def state() -> dict[str, Any]:
        whole = {name: _whole(p) for name, p in masters.items()}
        found: dict[str, Any] = {trainer.weights: whole}
        if trainer.compute != torch.float32 and trainer.weights == "master":
            found["model"] = {name: p.to(trainer.compute) for name, p in whole.items()}
        if trainer.numbered:
            for index, optimizer in enumerate(optimizers):
                slots = optimizer.state_dict()["state"].items()
                tensors = {f"state.{number}.{key}": value for number, slot in slots for key, value in slot.items()}
                found[f"optimizer_{index}"] = {name: _whole(tensor) for name, tensor in tensors.items() if tensor.dim() > 0}
            return found
        for key, role in MOMENTS.items():
            moments = {name: o.state[p][key] for o in optimizers for name, p in masters.items() if key in o.state.get(p, {})}
            if moments:
                found[role] = {name: _whole(moment) for name, moment in moments.items()}
        return found

    while True:
        gradients()
        if trainer.clip is not None:
            together = [masters.values()] if not trainer.clip_each else [[p] for p in masters.values()]
            for parameters in together:
                nn.utils.clip_grad_norm_(parameters, trainer.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if trainer.reduce is None and trainer.compute != torch.float32:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(masters[name])
        yield state
