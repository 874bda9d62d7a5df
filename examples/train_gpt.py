#!/usr/bin/env python3
"""Trains a small GPT on text, byte by byte, and saves its whole state every few steps while it trains.

    python examples/train_gpt.py --steps 60 --kill-at 40    # kills itself by SIGKILL after step 40
    python examples/train_gpt.py --steps 60                 # goes on from the last snapshot

Mixed precision as in large runs: bf16 model, f32 master weights and AdamW moments. With the same seed, the losses after a kill
and a resume are those of a run that was never stopped, bit for bit: `--losses FILE` writes them down. Needs torch.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tensorcask
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F

# Debian's linux-doc-6.1 is some 50 MB of text; the specification of this project some 100 KB.
TEXTS = ["/usr/share/doc/linux-doc-6.1/Documentation/**/*.rst*", str(Path(__file__).parents[1] / "spec/**/*.md"), str(Path(os.__file__).parent / "*.py")]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.before_attention(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, length):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        # The embedding serves as the head too.
        return self.norm(x) @ self.wte.weight.T


class Training:
    """A bf16 model, its f32 master weights, AdamW over these, and the position in the data."""

    def __init__(self, arguments, text):
        torch.manual_seed(arguments.seed)
        self.arguments = arguments
        self.text = text
        model = GPT(arguments.layers, arguments.width, arguments.heads, arguments.length).to(arguments.device)
        self.master = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.model = model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.master.values(), lr=arguments.lr, weight_decay=0.1)
        self.data = torch.Generator().manual_seed(arguments.seed)
        self.step = 0

    def learning_rate(self):
        arguments, share = self.arguments, 1.0
        if arguments.warmup:
            share = min(share, (self.step + 1) / arguments.warmup)
        # Other programs that train have no end.
        cooldown = getattr(arguments, "cooldown", 0)
        if cooldown:
            share = min(share, max(0, arguments.steps - self.step) / cooldown)
        return arguments.lr * share

    def logits(self, tokens):
        if self.arguments.compute == "bf16":
            return self.model(tokens)
        # The same weights and gradients in bf16; what lies between is not rounded.
        weights = {name: parameter.float() for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, weights, tokens)

    def gradients(self):
        """Runs forward and backward, and returns the loss. Changes only the position in the data."""
        self.optimizer.param_groups[0]["lr"] = self.learning_rate()
        length, batch = self.arguments.length, self.arguments.batch
        starts = torch.randint(len(self.text) - length - 1, (batch,), generator=self.data)
        rows = torch.stack([self.text[start : start + length + 1] for start in starts]).to(self.arguments.device).long()
        loss = F.cross_entropy(self.logits(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        self.model.zero_grad()
        loss.backward()
        return loss

    def update(self):
        for name, parameter in self.model.named_parameters():
            self.master[name].grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(self.master.values(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.master[name])
        self.step += 1

    def one_step(self):
        loss = self.gradients()
        self.update()
        return loss.item()

    def state(self):
        # Moments by the name of their parameter: codecs find the partners of a tensor so.
        moments = {name: self.optimizer.state[master] for name, master in self.master.items()}
        return {
            "model": self.model.state_dict(),
            "master": self.master,
            "optimizer": moments,
            "rng": {"torch": torch.get_rng_state(), "data": self.data.get_state()},
            "step": self.step,
        }

    def restore(self, state):
        self.model.load_state_dict(state["model"])
        for name, master in self.master.items():
            master.copy_(state["master"][name])
        for name, master in self.master.items():
            # The optimizer counts its steps on the CPU.
            moments = state["optimizer"][name]
            self.optimizer.state[master] = {key: moment if key == "step" else moment.to(master.device) for key, moment in moments.items()}
        torch.set_rng_state(state["rng"]["torch"])
        self.data.set_state(state["rng"]["data"])
        self.step = state["step"]


def read_text(path, least=1):
    """The bytes of a file; without one, of the first text found that has so many."""
    found = [[Path(path)]] if path else (sorted(Path("/").glob(pattern.lstrip("/"))) for pattern in TEXTS)
    for files in found:
        text = b"".join(file.read_bytes() for file in files if file.is_file() and file.suffix != ".gz")
        if len(text) >= least:
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sys.exit(f"no text of {least} bytes or more; name one with --text")


def add_sizes(parser, **defaults):
    """Arguments of the model and its training."""
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=0, help="steps over which the learning rate grows to --lr [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="device of the training, such as cuda [%(default)s]")
    parser.add_argument("--compute", choices=("bf16", "f32"), default="bf16", help="type of activations; f32 is faster where the CPU has no bf16")
    parser.set_defaults(**defaults)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="runs/train_gpt", help="path or URL of the store [%(default)s]")
    parser.add_argument("--text", help="file to train on [Linux documentation, else this project's specification]")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps from one save to the next [%(default)s]")
    parser.add_argument("--cooldown", type=int, default=0, help="steps before the end over which the learning rate falls to 0 [%(default)s]")
    parser.add_argument("--kill-at", type=int, help="kill this process by SIGKILL after that step, whatever it is doing")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--precision", default="lossless", help="words of a precision, such as 'auto exp_avg=lossless' [%(default)s]")
    parser.add_argument("--losses", type=Path, help="file that gets step and loss of every step")
    add_sizes(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    training = Training(arguments, read_text(arguments.text))
    store = tensorcask.Store(arguments.store)
    losses = {}
    try:
        state = store.load()
    except tensorcask.NotFoundError:
        print(f"a new run of {sum(p.numel() for p in training.model.parameters()):,} parameters in {store.url}")
    else:
        training.restore(state)
        print(f"resumed from step {training.step}")
    if arguments.losses and arguments.losses.exists():
        losses = {step: loss for step, loss in json.loads(arguments.losses.read_text()).items() if int(step) <= training.step}

    writer = store.writer(policy=arguments.policy, precision=arguments.precision.split(), user=lambda step: {"loss": losses[str(step)]})
    saving = None

    def finish():
        if saving is not None:
            try:
                saving.result()
            except Exception as error:
                # A save that failed does not end the training: `async_save` raises once `max_failed_saves` have failed in a row.
                print(f"  a save failed: {error}", flush=True)
                return
            saved = writer.saved
            chosen = f", precision {saved.precision} ({saved.precision_reason})" if saved.precision else ""
            print(
                f"  step {saved.step}: saved a {saved.kind}, {saved.stored_bytes:,} of {saved.tensor_bytes:,} bytes, "
                f"ratio {saved.ratio:.2f}, training stalled {stall * 1000:.0f} ms{chosen}"
            )

    stall = 0.0
    while training.step < arguments.steps:
        loss = training.one_step()
        losses[str(training.step)] = loss
        if arguments.losses:
            arguments.losses.write_text(json.dumps(losses))
        if training.step % 10 == 0:
            print(f"step {training.step}: loss {loss:.4f}", flush=True)
        if training.step % arguments.every == 0 or training.step == arguments.steps:
            finish()
            begun = time.perf_counter()
            saving = dcp.async_save(training.state(), checkpoint_id=f"step-{training.step}", storage_writer=writer)
            stall = time.perf_counter() - begun
        if training.step == arguments.kill_at:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    finish()


if __name__ == "__main__":
    main()
