"""Random states, saved by the project's writer, read by this reader: every byte of every step must come back, and what was rounded must be what
the writer's own reader gives, as far from the state as its receipt says.

    writer_check.py TENSORCASK [--stores N] [--seed N]
"""

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tensorcask_reference.store import Store  # noqa: E402

# dtype of safetensors, ours, bits
DTYPES = [
    ("BOOL", "bool", 8), ("U8", "u8", 8), ("I8", "i8", 8), ("F8_E5M2", "f8_e5m2", 8), ("F8_E4M3", "f8_e4m3", 8), ("F8_E8M0", "f8_e8m0", 8),
    ("I16", "i16", 16), ("U16", "u16", 16), ("F16", "f16", 16), ("BF16", "bf16", 16), ("I32", "i32", 32), ("U32", "u32", 32), ("F32", "f32", 32),
    ("F64", "f64", 64), ("I64", "i64", 64), ("U64", "u64", 64), ("F4", "f4_e2m1", 4), ("F6_E2M3", "f6_e2m3", 6), ("F6_E3M2", "f6_e3m2", 6),
    ("C64", "c64", 64),
]
NAMES = [
    "w", "a.b", "model.layers.0.weight", "optimizer.exp_avg", "exp_avg_sq/x", "..", "", "\u00e9\u0000\n", "master.w", "lm_head.weight", "ema.w",
    "z" * 300,
]
FLOATS = {"F16": "<f2", "BF16": None, "F32": "<f4", "F64": "<f8", "C64": "<f4"}
State = dict[str, tuple[str, str, list[int], bytes]]
ERRORS = b"tc.errors"
SETTINGS = [
    "near", "compact", "*=loguniform:1", "*=loguniform:16", "*=loguniform:128", "*=remainder:0", "*=remainder:5", "*=blockwise8", "*=kmeans:8",
    "*=kmeans:256:pruned=100:protected=100", "*=kmeans:16:sensitive", "*=cluster", "*=cluster:4:normal:dynamic", "*=cluster<=0.01", "exp_avg*=kmeans:16:absolute",
]


def random_shape(rng: random.Random, bits: int) -> list[int]:
    """Mostly small; sometimes empty, a scalar, or of several chunks. Packed elements must fill bytes, as safetensors asks."""
    kind = rng.random()
    if kind < 0.08 and bits >= 8:
        return []
    if kind < 0.14:
        return [rng.choice([0, 3]), 0, rng.randrange(5)]
    if kind < 0.2:
        return [rng.choice([100, 3000, 20000])] if bits >= 8 else [rng.choice([96, 3000])]
    if kind < 0.21:
        return [rng.randrange(2, 5), 1 << 17, 1][: rng.randrange(2, 4)]
    shape = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 5))]
    return shape if bits >= 8 else shape + [8]


def random_bytes(rng: random.Random, size: int) -> bytes:
    if rng.random() < 0.25:
        return bytes([rng.choice([0, 7, 255])]) * size
    return rng.randbytes(size)


def random_floats(rng: random.Random, theirs: str, size: int) -> bytes:
    """Like weights, in the dtypes that numpy can make them of."""
    values = np.random.default_rng(rng.randrange(1 << 32)).standard_normal(size).astype(np.float32) * np.float32(0.02)
    return to_floats(theirs, values)[:size]


def to_floats(theirs: str, values: np.ndarray) -> bytes:
    if theirs == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype(FLOATS[theirs]).tobytes()


def from_floats(theirs: str, data: bytes) -> np.ndarray:
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4") if theirs == "BF16" else np.frombuffer(data, FLOATS[theirs])


def moved(rng: random.Random, theirs: str, data: bytes) -> bytes:
    """Every weight a little."""
    generator, values = np.random.default_rng(rng.randrange(1 << 32)), from_floats(theirs, data)
    with np.errstate(all="ignore"):
        return to_floats(theirs, values * (1 + generator.standard_normal(values.size) * 1e-3))


def changed(rng: random.Random, data: bytes) -> bytes:
    """A sparse change, a dense one, or none."""
    kind = rng.random()
    if kind < 0.25 or not data:
        return data
    if kind < 0.35:
        return random_bytes(rng, len(data))
    array = np.frombuffer(data, np.uint8).copy()
    generator = np.random.default_rng(rng.randrange(1 << 32))
    array[generator.integers(0, len(data), max(1, int(len(data) * rng.choice([0.001, 0.01, 0.2]))))] ^= generator.integers(1, 256, dtype=np.uint8)
    return array.tobytes()


def new_tensor(rng: random.Random) -> tuple[str, str, list[int], bytes]:
    theirs, ours, bits = rng.choice(DTYPES)
    shape = random_shape(rng, bits)
    size = int(np.prod(shape, dtype=np.int64)) * bits // 8
    floats = theirs in FLOATS and rng.random() < 0.6
    return theirs, ours, shape, random_floats(rng, theirs, size) if floats else random_bytes(rng, size)


ADAM = {"model": "model.p", "master": "master.p", "m": "optimizer.exp_avg.p", "v": "optimizer.exp_avg_sq.p"}


def adam(rng: random.Random, state: State) -> State:
    """A parameter with its master and moments, or the same after a step of Adam: codecs store them by one another."""
    generator = np.random.default_rng(rng.randrange(1 << 32))
    np.seterr(invalid="ignore")  # noise that other changes put there
    if all(name in state for name in ADAM.values()):
        shape = state[ADAM["master"]][2]
        w, m, v = (np.frombuffer(state[ADAM[part]][3], "<f4").astype(np.float64) for part in ("master", "m", "v"))
        g = generator.standard_normal(w.size) * 1e-3
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w - 1e-3 * m / (np.sqrt(v) + 1e-8)
    else:
        shape = [rng.randrange(1, 60), rng.choice([1, 7, 64])]
        n = shape[0] * shape[1]
        w, m, v = generator.standard_normal(n) * 0.02, generator.standard_normal(n) * 1e-4, generator.random(n) * 1e-6
    w, m, v = (part.astype("<f4") for part in (w, m, v))
    half = rng.choice(["BF16", "F16"]) if ADAM["model"] not in state else state[ADAM["model"]][0]
    if half == "F16":
        model = w.astype("<f2").tobytes()
    else:
        bits = w.view("<u4")
        model = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2").tobytes()
    parts = {"model": (half, half.lower(), shape, model)}
    parts |= {part: ("F32", "f32", shape, data.tobytes()) for part, data in (("master", w), ("m", m), ("v", v))}
    return state | {ADAM[part]: tensor for part, tensor in parts.items()}


def next_state(rng: random.Random, state: State) -> State:
    result = {}
    for name, (theirs, ours, shape, data) in state.items():
        if rng.random() > 0.05:
            move = theirs in FLOATS and rng.random() < 0.5
            result[name] = (theirs, ours, shape, moved(rng, theirs, data) if move else changed(rng, data))
    for name in rng.sample(NAMES, 2):
        if rng.random() < 0.1:
            result[name] = new_tensor(rng)
    family = [name for name in ADAM.values() if name in state]
    if family and rng.random() < 0.8:
        result = adam(rng, {name: tensor for name, tensor in result.items() if name not in family} | {name: state[name] for name in family})
    return result


def safetensors(state: State, metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (theirs, _, shape, data) in state.items():
        header[name] = {"dtype": theirs, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensor[3] for tensor in state.values())


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def check_step(store: Store, step: int, state: State, metadata: dict[str, str], user: dict[str, Any], blob: bytes | None) -> None:
    snapshot = store.at(step)
    layout = snapshot.directory.layout
    expect([t.name for t in layout.tensors] == sorted(name.encode() for name in state), "names")
    for tensor in layout.tensors:
        name = tensor.name.decode()
        _, ours, shape, data = state[name]
        expect((tensor.dtype.name, list(tensor.shape)) == (ours, shape), f"{name!r}: dtype or shape")
        expect(store.tensor(step, name) == data, f"{name!r}: bytes")
    # Keys that begin with `tc.` are the writer's own.
    own_user = {key: value for key, value in snapshot.manifest["user"].items() if not key.startswith("tc.")}
    expect((snapshot.manifest["metadata"], own_user) == (metadata, user), "metadata or user")
    blobs = [cask.page(page) for cask in snapshot.casks.values() for _, name, page in cask.blobs if name != ERRORS]
    expect(blobs == ([] if blob is None else [blob]), "blobs")


def rounded(program: str, store: Path, step: int, state: State) -> State:
    """The state as the writer's own reader gives it; checks the receipt of its errors."""
    file = store.parent / "restored.safetensors"
    subprocess.run([program, "restore", str(store), "--step", str(step), "-o", str(file)], check=True, stdout=subprocess.DEVNULL)
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, content = json.loads(content[8 : 8 + size]), content[8 + size :]
    stored = {name: (*tensor[:3], content[slice(*header[name]["data_offsets"])]) for name, tensor in state.items()}
    snapshot = Store(store).at(step)
    receipts = [cask.page(page) for cask in snapshot.casks.values() for _, name, page in cask.blobs if name == ERRORS]
    told = {shard["tensor"]: shard["chunks"] for receipt in receipts for shard in json.loads(receipt[:-72])["shards"]}
    for name, tensor in state.items():
        if name not in told:
            expect(stored[name][3] == tensor[3], f"{name!r} was rounded without a receipt")
            continue
        with np.errstate(all="ignore"):
            before, after = (from_floats(t[0], t[3]).astype(np.float64) for t in (tensor, stored[name]))
            counts = np.isfinite(before) & (before != 0)
            errors = np.abs(after - before)[counts] / np.abs(before)[counts]
        expect(sum(chunk[1] for chunk in told[name]) == counts.sum(), f"{name!r}: elements of the receipt")
        worst = max((chunk[2] for chunk in told[name]), default=0)
        expect(np.isclose(worst, errors.max(initial=0), rtol=1e-9, atol=0), f"{name!r}: {worst} told, {errors.max(initial=0)} found")
        expect(np.isclose(sum(chunk[3] for chunk in told[name]), errors.sum(), rtol=1e-9), f"{name!r}: the sum of errors")
    return stored


def housekeeping(rng: random.Random, program: str, store: Path, saved: list[tuple]) -> list[tuple]:
    """Compacts, forgets and collects; returns what must still be there."""
    def run(*arguments: str) -> None:
        subprocess.run([program, *arguments], check=True, stdout=subprocess.DEVNULL)

    for row in rng.sample(saved, rng.randrange(min(3, len(saved)) + 1)):
        run("compact", str(store), "--step", str(row[0]))
    gone = {row[0] for row in saved[:-1] if rng.random() < 0.5}
    if gone:
        run("forget", str(store), "--step", *map(str, sorted(gone)))
    kept = [row for row in saved if row[0] not in gone]
    if rng.random() < 0.3:
        kept = reduce(program, store, rng.sample(kept, 1)[0], kept)
    for _ in range(rng.randrange(3)):
        run("gc", "--apply", "--age-floor", "0s", str(store))
    return kept


def reduce(program: str, store: Path, row: tuple, saved: list[tuple]) -> list[tuple]:
    """Reduces a step to its model weights; returns what must still be there."""
    command = [program, "forget", "--json", "--keep-role", "model", "--step", str(row[0]), "--", str(store)]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    if report["reduced"][0]["held"] is not None:
        return saved
    left = Store(store).read()["steps"][str(row[0])]["tensors"]
    state = {name: tensor for name, tensor in row[1].items() if name in left}
    # A reduction keeps tensors that only their names call masters or averages.
    expect(0 < len(state) < len(row[1]) and {tensor["role"] for tensor in left.values()} <= {"model", "master", "ema"}, "a step that was reduced")
    return [(row[0], state, *row[2:]) if other is row else other for other in saved]


def one_store(rng: random.Random, program: str, folder: Path) -> int:
    """Saves some steps, then reads all; returns how many."""
    state: State = {name: new_tensor(rng) for name in rng.sample(NAMES, rng.randrange(0, 7))}
    state = adam(rng, state) if rng.random() < 0.4 else state
    saved = []
    steps = 33 if rng.random() < 0.01 else rng.randrange(1, 6)  # 33 saves are more than 64 entries, hence a catalog
    policy = rng.choice(["full", "one_shot", "consecutive", "intermittent"])
    precision = rng.choice(SETTINGS) if rng.random() < 0.4 else None
    for step in rng.sample(range(1000), steps):
        metadata = {"format": "pt"} if rng.random() < 0.3 else {}
        user: dict[str, Any] = {"loss": rng.choice([2.5, 1e-9, True, "text", 3])} if rng.random() < 0.3 else {}
        blob = rng.randbytes(rng.randrange(50)) if rng.random() < 0.2 else None
        (folder / "state.safetensors").write_bytes(safetensors(state, metadata))
        (folder / "blob").write_bytes(blob or b"")
        command = [program, "save", "--step", str(step), "--policy", policy, str(folder / "store")]
        command += ["--every", str(rng.randrange(1, 4))] if policy == "intermittent" else []
        command += [str(folder / "state.safetensors")] + ([f"--blob=rng={folder / 'blob'}"] if blob is not None else [])
        command += [f"--user={key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in user.items()]
        command += [f"--precision={precision}"] if precision else []
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        kept = rounded(program, folder / "store", step, state) if precision else state
        saved.append((step, kept, metadata, user, blob))
        state = next_state(rng, state)
    if rng.random() < 0.4:
        saved = housekeeping(rng, program, folder / "store", saved)
    store = Store(folder / "store")
    expect(store.state.live().keys() == {row[0] for row in saved} and store.read()["latest"] == saved[-1][0], "steps")
    for row in saved:
        check_step(store, *row)
    return len(saved)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--stores", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    steps = 0
    for number in range(options.stores):
        with tempfile.TemporaryDirectory() as folder:
            try:
                steps += one_store(random.Random(f"{options.seed}/{number}"), options.program, Path(folder))
            except Exception as error:
                print(f"store {number} of seed {options.seed}: {type(error).__name__}: {error}", file=sys.stderr)
                return 1
    print(f"{options.stores} stores, {steps} steps: all bytes came back")
    return 0


if __name__ == "__main__":
    sys.exit(main())
