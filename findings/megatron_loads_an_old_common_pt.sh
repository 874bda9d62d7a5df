#!/usr/bin/env bash
# megatron-core 0.19.2 after 0.18.2 (Python 3.12 or later): a checkpoint that replaces an older one loads with the plain values of the older one.
#
# Up to 0.18, dist_checkpointing.save writes all values that are not sharded (iteration, arguments, schedules) to common.pt. 0.19 keeps
# them in its other files, does not remove a common.pt that it finds in the folder, and prefers this file when it loads. So if a run
# goes back to an earlier step, is continued with 0.19, and saves a step again, loading gives the new tensors and the old plain values,
# without an error or a warning about it.
set -euo pipefail
python3 -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { echo "skipped: python3 is older than 3.12" && exit 1; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for version in 0.18.2 0.19.2; do
    bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" megatron-core==$version torch==2.15.0 numpy==2.5.5 psutil==7.2.2 <<'PYTHON'
import os
from importlib.metadata import version

import torch
import torch.distributed as dist

# Megatron asks for CUDA; this program runs on a CPU.
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *device: None
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

if __name__ == "__main__":
    is_new = version("megatron-core") == "0.19.2"
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/rendezvous-{is_new}", rank=0, world_size=1)
    os.makedirs("iter_0000100", exist_ok=True)
    value = 2.0 if is_new else 1.0
    state = {"weight": ShardedTensor.from_rank_offsets("weight", torch.full((4, 2), value)), "learning_rate": value}
    dist_checkpointing.save(state, "iter_0000100")
    into = {"weight": ShardedTensor.from_rank_offsets("weight", torch.zeros(4, 2))}
    loaded = dist_checkpointing.load(into, "iter_0000100")
    found = loaded["weight"][0, 0].item(), loaded["learning_rate"]
    print(version("megatron-core"), "  saved: weight", value, "learning_rate", value, "  loaded: weight", found[0], "learning_rate", found[1])
    assert found == ((2.0, 1.0) if is_new else (1.0, 1.0))
PYTHON
done
