#!/usr/bin/env bash
# megatron-core 0.19.2 (Python 3.12 or later): dist_checkpointing.save ignores the strategy that it is given, unless it is one of its own.
#
# The documentation of the argument sharded_strategy names SaveShardedStrategy and Tuple[str, int], which "configures sharded tensors
# saving behavior and backend". Megatron Core 0.16 uses both. 0.17 and later replace a strategy of any class but
# TorchDistSaveShardedStrategy, and any tuple, by their own format, without an error or a warning. So a storage backend that worked
# with 0.16 is never called, and the checkpoint is in other files than the caller has asked for.
set -euo pipefail
python3 -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { echo "skipped: python3 is older than 3.12" && exit 1; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" megatron-core==0.19.2 torch==2.15.0 numpy==2.5.5 psutil==7.2.2 <<'PYTHON'
import os

import torch
import torch.distributed as dist

# Megatron asks for CUDA; this program runs on a CPU.
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *device: None
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor


class Strategy:
    """Has the methods and attributes of a strategy."""

    backend, version = "own", 1
    calls = 0

    def save(self, sharded_state_dict, checkpoint_dir):
        self.calls += 1

    def async_save(self, sharded_state_dict, checkpoint_dir, async_strategy="mcore"):
        self.calls += 1


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/rendezvous", rank=0, world_size=1)
    documented = " ".join(dist_checkpointing.save.__doc__.split())
    assert "sharded_strategy (SaveShardedStrategy, Tuple[str, int], optional)" in documented
    strategy = Strategy()
    for number, given in enumerate([strategy, ("zarr", 1)]):
        os.mkdir(f"checkpoint-{number}")
        state = {"weight": ShardedTensor.from_rank_offsets("weight", torch.ones(4, 2))}
        dist_checkpointing.save(state, f"checkpoint-{number}", sharded_strategy=given)
        with open(f"checkpoint-{number}/metadata.json") as file:
            print("given:", type(given).__name__, "  files:", sorted(os.listdir(f"checkpoint-{number}")), "  metadata.json:", file.read())
        assert any(name.endswith(".distcp") for name in os.listdir(f"checkpoint-{number}"))
    print("calls of the strategy:", strategy.calls)
    assert strategy.calls == 0
PYTHON
