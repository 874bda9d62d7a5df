"""Measures deltas of consecutive steps of real training: a small GPT, mixed precision, optimizers of PyTorch.

    python benches/python/adam_replay.py [--only TEXT] [--width N] [--layers N] [--first-step N] [--deltas N] [--device cuda]

Each trainer runs to the first step, and saves it and the following steps into a store, losslessly. Every step is loaded
and compared bit by bit. Prints a table: bits per element of each role in the newest step, the bytes of that delta divided
by those of the state, and the codecs, each with its share of the elements of a role. Trainers on several ranks run in
processes of their own, on gloo.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "tests"))

import tensorcask
import torch
from ranks import on_ranks
from trainers import Trainer, assert_restored, states

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ROLES = ["model", "master", "exp_avg", "exp_avg_sq", "momentum"]
TRAINERS = [
    *(Trainer(f"AdamW, {kernel}", kernel=kernel) for kernel in ("single", "foreach", "fused")),
    Trainer("AdamW, without clipping", clip=None),
    Trainer("AdamW, each tensor clipped", clip=0.05, clip_each=True),
    Trainer("AdamW, one group", groups=1),
    Trainer("AdamW, betas 0.9 and 0.999", betas=(0.9, 0.999)),
    Trainer("Adam, foreach", optimizer="adam"),
    Trainer("Adam, fused", optimizer="adam", kernel="fused"),
    *(Trainer(f"{count} micro-batches", batches=count) for count in (2, 3, 4, 6, 8, 16)),
    *(Trainer(f"{count} micro-batches, sum divided", batches=count, divide="sum") for count in (3, 4, 5, 6, 7)),
    Trainer("4 micro-batches added up in bf16", batches=4, add_in=None),
    Trainer("f16, loss scale 1024", compute=F16, loss_scale=1024.0),
    Trainer("f16, loss scale 1024, 4 micro-batches", compute=F16, loss_scale=1024.0, batches=4),
    Trainer("f32 gradients", compute=F32),
    Trainer("f32 weights without a role of their own", reduce=None, weights="model"),
    Trainer("f32 weights, moments with numbers", weights="model", numbered=True),
    Trainer("bf16 moments", moments=(BF16, BF16)),
    Trainer("bf16 moments, in the order of Transformer Engine", moments=(BF16, BF16), kernel="te"),
    Trainer("bf16 moments, f32 gradients", moments=(BF16, BF16), compute=F32),
    Trainer("bf16 moments, 16 micro-batches", moments=(BF16, BF16), batches=16),
    Trainer("a bf16 first moment", moments=(BF16, F32)),
    Trainer("a bf16 second moment", moments=(F32, BF16)),
    Trainer("SGD with momentum", optimizer="sgd", decay=0.0),
    Trainer("SGD with momentum, fused", optimizer="sgd", decay=0.0, kernel="fused"),
    Trainer("SGD with Nesterov momentum", optimizer="sgd", decay=0.0, nesterov=True),
    Trainer("SGD with momentum 0.95 and dampening 0.1", optimizer="sgd", decay=0.0, momentum=0.95, dampening=0.1),
    Trainer("SGD with momentum and weight decay 1e-4", optimizer="sgd", decay=1e-4),
    Trainer("Muon for matrices, AdamW for embeddings and vectors", optimizer="muon"),
]
ON_RANKS = [
    (2, Trainer("FSDP2, 2 ranks, reduced in bf16", reduce=BF16)),
    (2, Trainer("FSDP2, 2 ranks, reduced in f32", reduce=F32)),
    (2, Trainer("FSDP2, 2 ranks, reduced in f32, 4 micro-batches", reduce=F32, batches=4)),
    (4, Trainer("FSDP2, 4 ranks, reduced in f32", reduce=F32)),
]


def save_steps(trainer: Trainer, store: tensorcask.Store, arguments: argparse.Namespace) -> None:
    """Trains, saves, and compares what is loaded."""
    size = {"width": arguments.width, "layers": arguments.layers, "length": arguments.length, "device": arguments.device}
    trained = states(trainer, arguments.first_step, arguments.deltas, **size)
    if trainer.reduce is not None and torch.distributed.get_rank() > 0:
        return
    for step, state in trained.items():
        store.save(state, step=step, policy="consecutive")
    assert_restored(store, trained)


def on_rank(index: str, url: str, arguments: str) -> None:
    save_steps(ON_RANKS[int(index)][1], tensorcask.Store(url), argparse.Namespace(**json.loads(arguments) | {"device": "cpu"}))


def row(name: str, url: str) -> str:
    """Returns the row of the newest step of a store."""
    command = [sys.executable, "-m", "tensorcask", "--json", "inspect", url]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    roles = {tensor["name"]: tensor["role"] for tensor in report["tensors"]}
    decoded: dict[str, int] = collections.Counter()
    stored: dict[str, int] = collections.Counter()
    codecs: dict[str, dict[str, int]] = collections.defaultdict(collections.Counter)
    for cask in report["casks"]:
        for tensor in cask["tensors"]:
            role = roles[tensor["name"]]
            decoded[role] += tensor["decoded_bytes"]
            stored[role] += tensor["stored_bytes"]
            for codec, counts in tensor["codecs"].items():
                codecs[role][codec.removeprefix("tc.")] += counts["decoded_bytes"]

    widths = {tensor["role"]: 32 if tensor["dtype"] == "f32" else 16 for tensor in report["tensors"]}

    def bits(role: str) -> str:
        width = widths.get(role, 32)
        return f"{stored[role] * width / decoded[role]:.2f}" if decoded[role] else "-"

    def chosen(role: str) -> str:
        shares = [(count / decoded[role], codec) for codec, count in codecs[role].items()]
        return ", ".join(f"{codec} {share:.0%}" for share, codec in sorted(shares, reverse=True) if share >= 0.01)

    columns = [bits(role) for role in ROLES]
    total = f"{sum(stored.values()) / sum(decoded.values()):.3f}"
    return f"| {name} | {' | '.join(columns)} | **{total}** | {'; '.join(chosen(role) for role in ROLES if decoded[role])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only trainers whose name has this text")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=32, help="tokens in a row of a batch")
    parser.add_argument("--first-step", type=int, default=20)
    parser.add_argument("--deltas", type=int, default=2, help="number of deltas")
    parser.add_argument("--device", default="cpu", help="device of the trainers in one process; ranks train on the CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| | {' | '.join(ROLES)} | whole state | codecs, in this order |")
    print(f"|---|{'---:|' * (len(ROLES) + 1)}---|")
    with tempfile.TemporaryDirectory() as folder:
        for number, trainer in enumerate(TRAINERS):
            if arguments.only in trainer.name:
                url = f"{folder}/{number}"
                save_steps(trainer, tensorcask.Store(url), arguments)
                print(row(trainer.name, url), flush=True)
        for number, (world, trainer) in enumerate(ON_RANKS):
            if arguments.only in trainer.name:
                url = f"{folder}/ranks-{number}"
                on_ranks(world, Path(folder), on_rank, number, url, json.dumps(vars(arguments)))
                print(row(trainer.name, url), flush=True)


if __name__ == "__main__":
    main()
