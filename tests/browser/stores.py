"""Stores for tests of the report, saved by the command line from safetensors files that are written here."""

import array
import json
import math
import pathlib
import random
import struct
import subprocess

NAN_STEP, NAN_TENSOR = 700, "model.h.4.mlp.weight"
INFINITY_STEP = 720
HOSTILE = [
    "<script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "</script><script>window.hacked=1</script>",
    "<b>bold</b>&amp;<a href='javascript:window.hacked=1'>link</a>",
    "line\u2028paragraph\u2029separators",
    "`${window.hacked=1}` %{x} $x^2$ \\u003c",
    "long." * 800 + "end",
]


class Cli:
    """The program under test."""

    def __init__(self, program: str) -> None:
        self.program = str(pathlib.Path(program).resolve())

    def run(self, *arguments: object, codes: tuple[int, ...] = (0,)) -> dict:
        """Runs a command and returns its JSON."""
        words = [self.program, *map(str, arguments), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode not in codes:
            raise RuntimeError(f"{words[1:]} ended with {done.returncode}: {done.stderr}")
        return json.loads(done.stdout)


def write_safetensors(path: pathlib.Path, tensors: dict[str, array.array]) -> None:
    """Writes one-dimensional f32 tensors."""
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [at, at + 4 * len(values)]}
        at += 4 * len(values)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for values in tensors.values()))


def training(cli: Cli, folder: pathlib.Path) -> pathlib.Path:
    """Saves 100 steps of a small run with one NaN, two infinities, hostile names, pins and forgotten steps."""
    store, state = folder / "run", folder / "state.safetensors"
    noise = random.Random(1)
    names = [f"h.{layer}.{part}.weight" for layer in range(12) for part in ("attn", "mlp")] + ["wte.weight", "ln_f.weight", *HOSTILE]
    weights = {name: array.array("f", (noise.gauss(0, 0.05 + 0.02 * i) for _ in range(64))) for i, name in enumerate(names)}
    moments = {name: array.array("f", [0.0] * 64) for name in names}
    for step in range(10, 1001, 10):
        for i, name in enumerate(names):
            size = 1e-3 * (1 + i % 5) * (1 + 3 * math.exp(-step / 150)) * (20 if 640 <= step < NAN_STEP and "h.4" in name else 1)
            gradient = [noise.gauss(0, 1) for _ in range(64)]
            moments[name] = array.array("f", (0.9 * m + 0.1 * g for m, g in zip(moments[name], gradient, strict=True)))
            weights[name] = array.array("f", (w - size * m for w, m in zip(weights[name], moments[name], strict=True)))
        tensors = {f"model.{name}": values for name, values in weights.items()}
        tensors |= {f"optimizer.exp_avg.{name}": values for name, values in moments.items()}
        if step == NAN_STEP:
            tensors[NAN_TENSOR] = array.array("f", [math.nan, *tensors[NAN_TENSOR][1:]])
        if step == INFINITY_STEP:
            name = f"model.{HOSTILE[0]}"
            tensors[name] = array.array("f", [math.inf, -math.inf, *tensors[name][2:]])
        write_safetensors(state, tensors)
        policy = ["--policy", "intermittent", "--every", 8]
        cli.run("save", store, "--step", step, "--statistics", *policy, state)
        if step == 400:
            weights["wte.weight"][0] += 1.0
            write_safetensors(state, {**tensors, "model.wte.weight": weights["wte.weight"]})
            cli.run("save", store, "--step", step, "--statistics", "--replace", *policy, state)
    cli.run("pin", store, "--step", 500)
    cli.run("forget", store, "--step", 30, 40)
    return store


def real(cli: Cli, folder: pathlib.Path, data: pathlib.Path, *options: str) -> pathlib.Path:
    """Saves three steps of real training: a base and two deltas, in casks."""
    store = folder / "real"
    for step in (1000, 1001, 1010):
        cli.run("save", store, "--step", step, "--policy", "intermittent", *options, data / f"step-{step}.safetensors")
    return store


def many_snapshots(cli: Cli, folder: pathlib.Path, count: int) -> pathlib.Path:
    """Saves a tiny state many times. One element is NaN in the step before the last."""
    store, state = folder / "long", folder / "tiny.safetensors"
    for step in range(1, count + 1):
        value = math.nan if step == count - 1 else float(step)
        write_safetensors(state, {"model.h.0.w": array.array("f", [value, 1.0])})
        cli.run("save", store, "--step", step, "--statistics", state)
    return store


def many_tensors(cli: Cli, folder: pathlib.Path, count: int) -> pathlib.Path:
    """Saves a state of many tiny tensors twice."""
    store, state = folder / "wide", folder / "many.safetensors"
    for step in (1, 2):
        write_safetensors(state, {f"model.h.{i}.w": array.array("f", [float(i), float(step)]) for i in range(count)})
        cli.run("save", store, "--step", step, "--statistics", "--policy", "consecutive", state)
    return store
