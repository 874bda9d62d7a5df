"""torchft: two replicas, of which one is killed and recovers from the other."""

import os
from datetime import timedelta

import tensorcask
import torch
import torch.distributed as dist
from common import STEPS, Run, optimizer_tensors
from tensorcask.torchft import Transport
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

run = Run()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
patience = timedelta(seconds=60)


def state_dict():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load_state_dict(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


class NotingTransport(Transport):
    def recv_checkpoint(self, src_rank, metadata, step, timeout):
        found = super().recv_checkpoint(src_rank, metadata, step, timeout)
        run.write(resumed=step, source="peer")
        return found


def check_damage():
    """A peer that serves a damaged byte is found out."""
    healthy, recovering, noise = Transport(patience), Transport(patience), torch.randint(256, (100_000,), dtype=torch.uint8)
    healthy.send_checkpoint([1], 3, {"user": noise, "torchft": {"step": 3}}, patience)
    assert torch.equal(recovering.recv_checkpoint(0, healthy.metadata(), 3, patience)["user"], noise)
    largest = max((path for path in healthy._folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    try:
        recovering.recv_checkpoint(0, healthy.metadata(), 3, patience)
    except tensorcask.CorruptionError:
        healthy.shutdown()
        recovering.shutdown()
    else:
        raise AssertionError("a damaged snapshot was accepted")


check_damage()
Transport = NotingTransport
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
# Each step needs both replicas, so that losses do not depend on when one was killed.
options = dict(
    min_replica_size=2, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, replica_id=f"replica{run.rank}_",
    lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"], use_async_quorum=False, init_sync=False, timeout=patience, quorum_timeout=patience,
)  # fmt: skip

# ANCHOR: lines
transport = Transport(timeout=patience)
manager = Manager(
    pg=ProcessGroupGloo(patience), state_dict=state_dict, load_state_dict=load_state_dict, checkpoint_transport=transport, **options
)
# ANCHOR_END: lines
managed, model_of_all = Optimizer(manager, optimizer), DistributedDataParallel(manager, model)
while manager.current_step() < STEPS:
    managed.zero_grad()
    step = manager.current_step() + 1
    batch = torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * step + run.rank))
    loss = (model_of_all(batch) ** 2).mean()
    loss.backward()
    managed.step()
    if manager.current_step() == step:
        run.loss(step, loss)
manager.shutdown()
run.end({**dict(model.named_parameters()), **optimizer_tensors(optimizer)})
