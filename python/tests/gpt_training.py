"""Training of the small GPT of the examples with FSDP2 on the CPU, for tests of jobs with several ranks."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from train_gpt import GPT  # noqa: E402

LENGTH = 32


class Training:
    """Model, optimizer and position in the data of one rank. All bits of a state follow from ``world`` and the number of steps."""

    def __init__(self, rank, world):
        torch.manual_seed(0)
        self.rank = rank
        self.model = GPT(2, 32, 4, LENGTH)
        mesh = init_device_mesh("cpu", (world,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.text = (torch.arange(20_000) * 7919 % 251 + torch.arange(20_000) // 100) % 256
        self.data = torch.Generator().manual_seed(rank)

    def state(self, step):
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, f"data-{self.rank}": self.data.get_state(), "step": step}

    def load(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.data.set_state(state[f"data-{self.rank}"])

    def step(self):
        """Trains one step; returns the sum of the losses of all ranks."""
        starts = torch.randint(len(self.text) - LENGTH - 1, (4,), generator=self.data)
        rows = torch.stack([self.text[at : at + LENGTH + 1] for at in starts])
        loss = F.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        return whole.item()
