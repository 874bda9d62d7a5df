"""Trains the models of `models.py` and writes steps of their training; see `make`."""

import argparse
import math
import os
import time
from pathlib import Path

import torch
from models import GPT, Recommender, item_loss, text_loss
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from text import VOCABULARY, read_tokens
from torch import nn

THREADS = 2  # sums depend on it


class Adam:
    """AdamW over f32 masters of a bf16 model. The gradient is that of the rounded weights, computed in f32, clipped to norm 1."""

    def __init__(self, model, rate):
        self.model, self.rate = model, rate
        self.master = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.master.values(), lr=rate(0), betas=(0.9, 0.95), weight_decay=0.1)
        self.round()

    def round(self):
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.master[name].bfloat16())

    def step(self, number):
        for name, parameter in self.model.named_parameters():
            self.master[name].grad = parameter.grad
        nn.utils.clip_grad_norm_(self.master.values(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(number)
        self.optimizer.step()
        self.round()

    def state(self):
        model = {f"model.{name}": parameter.detach().bfloat16() for name, parameter in self.model.named_parameters()}
        moments = {
            f"optimizer.{kind}.{name}": self.optimizer.state[master][kind]
            for name, master in self.master.items()
            for kind in ("exp_avg", "exp_avg_sq")
        }
        return model | {f"optimizer.master.{name}": master for name, master in self.master.items()} | moments

    def load(self, state, number):
        for name, master in self.master.items():
            master.copy_(state[f"optimizer.master.{name}"])
            moments = {kind: state[f"optimizer.{kind}.{name}"].clone() for kind in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[master] = {"step": torch.tensor(float(number)), **moments}
        self.round()


class RowsAndMomentum:
    """Adagrad on the rows of the table that a step uses, as recommenders do; SGD with momentum on the rest. All in f32."""

    def __init__(self, model, rate):
        self.model, self.rate = model, rate
        self.sums = torch.zeros(model.table.num_embeddings)
        self.rest = {name: parameter for name, parameter in model.named_parameters() if not name.startswith("table")}
        self.optimizer = torch.optim.SGD(self.rest.values(), lr=rate(0), momentum=0.9)

    def step(self, number):
        self.optimizer.param_groups[0]["lr"] = self.rate(number)
        self.optimizer.step()
        gradient = self.model.table.weight.grad
        rows = gradient.abs().sum(1).nonzero().flatten()
        with torch.no_grad():
            self.sums[rows] += gradient[rows].square().mean(1)
            self.model.table.weight[rows] -= self.rate(number) * gradient[rows] / (self.sums[rows, None].sqrt() + 1e-8)

    def state(self):
        state = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        momentum = {
            f"optimizer.momentum_buffer.{name}": self.optimizer.state[value]["momentum_buffer"] for name, value in self.rest.items()
        }
        return state | momentum | {"optimizer.sum.table.weight": self.sums}

    def load(self, state, number):
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state[f"model.{name}"])
        for name, value in self.rest.items():
            self.optimizer.state[value] = {"momentum_buffer": state[f"optimizer.momentum_buffer.{name}"].clone()}
        self.sums.copy_(state["optimizer.sum.table.weight"])


def falling(peak, end, until, after):
    """Learning rate: 100 steps of growth, a cosine from `peak` to `end` at step `until`, then `after`, as in fine-tuning."""

    def rate(step):
        if step >= until:
            return after
        return peak * (step + 1) / 100 if step < 100 else end + (peak - end) * (1 + math.cos(math.pi * step / until)) / 2

    return rate


def as_items(tokens):
    """Pairs of neighbouring tokens as items of a catalogue of 2^18: few are frequent, most are rare."""
    tokens = tokens.long()
    return (tokens[:-1] * VOCABULARY + tokens[1:]) * 2654435761 % 2**32 >> 14


# Steps that are written, and of these the ones with the optimizer's state.
# Every hundredth, and the first ten after two of them.
GPT_STEPS = sorted({*range(100, 2500, 100), *range(1000, 1011), 1050, 2001, 2010, *range(2400, 2411), 2450})
GPT_WHOLE = {1000, 1001, 1010, 2400, 2410}
SHORT_STEPS = [300, 301, 310, 350]
LARGE_STEPS = [30, 31, 40]
# The model of --small: a thirteenth of the parameters, the same steps and learning rates.
SMALL = dict(layers=3, width=64, heads=4)
# In the root folder: slices with the same names as those in tests/data.
SLICES = ("h.2.attn_", "h.2.ln_", "h.2.mlp_fc", "wte.weight")


def recipes(tokens, small):
    def gpt(**sizes):
        model = GPT(**sizes)
        return model, lambda step: text_loss(model, tokens, step)

    def recommender():
        model, items = Recommender(2**18), as_items(tokens)
        return model, lambda step: item_loss(model, items, step)

    return {
        "gpt": (gpt, SMALL if small else {}, Adam, falling(6e-4, 6e-5, 2400, 2e-6), GPT_STEPS, GPT_WHOLE),
        "experts": (
            gpt,
            dict(layers=4, width=128, heads=4, experts=8),
            Adam,
            falling(6e-4, 6e-5, 1000, 6e-5),
            SHORT_STEPS,
            set(SHORT_STEPS),
        ),
        # 74 million parameters: a state of 1 GB that is no repetition of a smaller one.
        "large": (gpt, dict(layers=10, width=768, heads=12), Adam, falling(6e-4, 6e-5, 2400, 2e-6), LARGE_STEPS, set(LARGE_STEPS)),
        "recommender": (recommender, {}, RowsAndMomentum, falling(0.05, 0.05, 10**9, 0.05), SHORT_STEPS, set(SHORT_STEPS)),
    }


def write(state, path, step):
    part = path.with_suffix(".part")
    save_file({name: value.contiguous() for name, value in state.items()}, part, metadata={"step": str(step)})
    os.replace(part, path)


def newest_state(folder, whole, up_to):
    """Step and path of the newest whole state up to a step, or None: a step that was written, or where an interrupted run was."""
    found = {step: folder / f"step-{step}.safetensors" for step in whole}
    found = {step: path for step, path in found.items() if path.exists()}
    resume = folder / "resume.safetensors"
    if resume.exists():
        with safe_open(resume, "pt") as file:
            found[int(file.metadata()["step"])] = resume
    return max(((step, path) for step, path in found.items() if step <= up_to), default=None)


def train(name, recipe, folder, steps_divisor, until):
    """Trains up to each step whose file is missing, from the newest state up to it. The files are the same as those of one run."""
    make, sizes, method, rate, steps, whole = recipe

    def at(step):
        return max(step // steps_divisor, 1)

    steps, whole = sorted({at(step) for step in steps if step <= until}), {at(step) for step in whole}
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model, loss_of = make(**sizes)
    training = method(model, rate)
    done = trained = 0
    begun = time.monotonic()
    print(f"{name}: {sum(value.numel() for value in model.parameters()):,} parameters, {steps[-1]} steps", flush=True)
    for target in steps:
        path = folder / f"step-{target}.safetensors"
        if path.exists():
            continue
        found = newest_state(folder, whole, target)
        if found is not None and found[0] > done:
            done = found[0]
            training.load(load_file(found[1]), done)
            print(f"{name}: goes on from step {done}", flush=True)
        for step in range(done + 1, target + 1):
            model.zero_grad()
            loss = loss_of(step)
            loss.backward()
            training.step(step)
            trained += 1
            if step % 50 == 0:
                known = newest_state(folder, whole, step)
                if known is None or known[0] < step:
                    write(training.state(), folder / "resume.safetensors", step)
                left = (time.monotonic() - begun) / trained * (steps[-1] - step)
                print(f"{name}: step {step} of {steps[-1]}, loss {loss.item():.3f}, {left / 60:.0f} minutes left", flush=True)
        done = target
        state = training.state()
        write(state if target in whole else {key: value for key, value in state.items() if key.startswith("model.")}, path, target)


def write_slices(source, folder):
    for path in sorted(source.glob("step-*.safetensors")):
        state = load_file(path)
        kept = {name: value for name, value in state.items() if any(word in name for word in SLICES)}
        kept = {name: value[:1024] if "wte" in name else value for name, value in kept.items()}
        write(kept, folder / path.name, int(path.stem.removeprefix("step-")))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=["gpt", "experts", "recommender", "large"])
    parser.add_argument("--quick", action="store_true", help="a hundredth of the steps")
    parser.add_argument("--small", action="store_true", help="only gpt, with 0.43 M parameters in place of 5.85 M")
    parser.add_argument("--until", type=int, default=10**9, metavar="STEP", help="leave out later steps")
    parser.add_argument("--threads", type=int, default=THREADS, help="sums depend on it [%(default)s]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    # Filling all new memory would take a quarter of the time, and nothing here reads memory before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tokens = torch.from_numpy(read_tokens(arguments.folder).astype("int32"))
    print(f"text of {len(tokens):,} tokens", flush=True)
    only = "gpt" if arguments.small else arguments.only
    for name, recipe in recipes(tokens, arguments.small).items():
        # The steps of the large model take 3 GB, so it is trained only if it is named.
        if name == only or (only is None and name != "large"):
            train(name, recipe, arguments.folder / name, 100 if arguments.quick else 1, arguments.until)
    if (arguments.folder / "gpt").exists():
        write_slices(arguments.folder / "gpt", arguments.folder)


if __name__ == "__main__":
    main()
