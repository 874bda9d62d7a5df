"""Cases: tensors of a real run, tiled to a useful size, with their bases and partners."""

import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors

WIDTHS = {"u8": 1, "bf16": 2, "f32": 4}
NAMES = {"U8": "u8", "BF16": "bf16", "F32": "f32"}
ROLES = ("model", "master", "exp_avg", "exp_avg_sq")


@dataclass
class Tensor:
    """Elements as flat bytes; partners by role as dtype, bytes, bytes of the base."""

    name: str
    role: str
    dtype: str
    shape: tuple
    data: np.ndarray
    base: np.ndarray | None
    partners: dict = field(default_factory=dict)

    @property
    def width(self):
        return WIDTHS[self.dtype]

    def words(self, which):
        """Elements as unsigned integers."""
        return which.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[self.width])


@dataclass
class Case:
    key: str
    title: str
    tensors: list

    @property
    def bytes(self):
        return sum(tensor.data.nbytes for tensor in self.tensors)


# Key, title, step of the base, step, role; no role: the whole state.
CASES = [
    ("bf16-full", "bf16 weights, full", None, 1000, "model"),
    ("plane", "exponents of the bf16 weights, one byte each", None, 1000, "exponents"),
    ("bf16-k1", "bf16 weights, k = 1, learning rate 5e-4", 1000, 1001, "model"),
    ("bf16-k5", "bf16 weights, k = 5, learning rate 5e-4", 1000, 1005, "model"),
    ("bf16-k10", "bf16 weights, k = 10, learning rate 5e-4", 1000, 1010, "model"),
    ("bf16-k50", "bf16 weights, k = 50, learning rate 5e-4", 1000, 1050, "model"),
    ("bf16-k100", "bf16 weights, k = 100, learning rate 5e-4", 1000, 1100, "model"),
    ("bf16-k1000", "bf16 weights, k = 1000, learning rate 5e-4 to 1e-4", 1000, 2000, "model"),
    ("bf16-mid-k1", "bf16 weights, k = 1, learning rate 1e-4", 2000, 2001, "model"),
    ("bf16-mid-k10", "bf16 weights, k = 10, learning rate 1e-4", 2000, 2010, "model"),
    ("bf16-low-k1", "bf16 weights, k = 1, learning rate 2e-6", 2400, 2401, "model"),
    ("bf16-low-k10", "bf16 weights, k = 10, learning rate 2e-6", 2400, 2410, "model"),
    ("rows-k1", "bf16 embedding of which a batch touches 18 % of the rows, k = 1, learning rate 5e-4", 1000, 1001, "rows"),
    ("master-full", "f32 masters, full", None, 1000, "master"),
    ("master-k1", "f32 masters, k = 1", 1000, 1001, "master"),
    ("master-k10", "f32 masters, k = 10", 1000, 1010, "master"),
    ("m-full", "f32 first moments, full", None, 1000, "exp_avg"),
    ("m-k1", "f32 first moments, k = 1", 1000, 1001, "exp_avg"),
    ("m-k10", "f32 first moments, k = 10", 1000, 1010, "exp_avg"),
    ("v-full", "f32 second moments, full", None, 1000, "exp_avg_sq"),
    ("v-k1", "f32 second moments, k = 1", 1000, 1001, "exp_avg_sq"),
    ("v-k10", "f32 second moments, k = 10", 1000, 1010, "exp_avg_sq"),
    ("state-full", "whole state (model, master, both moments), full", None, 1000, None),
    ("state-k1", "whole state, k = 1", 1000, 1001, None),
    ("state-k10", "whole state, k = 10", 1000, 1010, None),
]


def _split(name):
    """Role and parameter."""
    if name.startswith("model."):
        return "model", name.removeprefix("model.")
    role, _, param = name.removeprefix("optimizer.").partition(".")
    return role, param


def load(path, matrices_only=True):
    """Tensors by role and parameter: dtype, and elements as unsigned integers."""
    tensors = {}
    for name, found in safetensors.deserialize(path.read_bytes()):
        dtype = NAMES.get(found["dtype"])
        if dtype is None or (matrices_only and len(found["shape"]) != 2):
            continue
        words = {1: np.uint8, 2: np.uint16, 4: np.uint32}[WIDTHS[dtype]]
        tensors[_split(name)] = (dtype, np.frombuffer(bytes(found["data"]), words).reshape(found["shape"]))
    return tensors


def tile(array, param, copies):
    """Copies below one another. Each but the first has its rows and columns in an order of its own, the same for every tensor of the
    parameter and every step: what stands beside what in real states stays, and no copy repeats the bytes of another."""
    tiles = [array]
    for copy in range(1, copies):
        order = np.random.default_rng([copy, zlib.crc32(param.encode())])
        rows, columns = order.permutation(array.shape[0]), order.permutation(array.shape[1])
        tiles.append(array[rows][:, columns])
    return np.ascontiguousarray(np.concatenate(tiles))


def _some_rows(data, base, rows):
    """Elements of the base, but in 18 % of the rows: those of an embedding that a batch of a fine-tune touches. The real run ties its embedding to its
    output layer, so that each step changes every row."""
    touched = np.random.default_rng(rows).random(rows) < 0.18
    return np.where(touched[:, None], data.reshape(rows, -1), base.reshape(rows, -1)).reshape(-1)


def _flat(array):
    return array.reshape(-1).view(np.uint8)


def cases(folder, mib, only):
    """The cases whose files are there, one after the other; and for the others, why not."""
    folder = Path(folder)
    files = {}

    def step(number):
        if number not in files:
            path = folder / f"step-{number}.safetensors"
            files[number] = load(path) if path.exists() else None
        return files[number]

    for key, title, before, now, role in CASES:
        if only and key not in only:
            continue
        missing = [str(number) for number in (before, now) if number is not None and step(number) is None]
        if missing:
            yield key, title, f"no file of step {' and '.join(missing)} in the data"
            continue
        wanted = {"exponents": ("model",), "rows": ("model",), None: ROLES}.get(role, (role,))
        new, old = step(now), step(before) if before is not None else None
        names = [name for name in new if name[0] in wanted and (old is None or name in old) and (role != "rows" or "wte" in name[1])]
        if not names or {name[0] for name in names} != set(wanted):
            yield key, title, "the files hold no such tensors"
            continue
        size = sum(new[name][1].nbytes for name in names)
        copies = max(1, round(mib * 2**20 / size))
        tiled = {}

        def elements(state, name):
            """Tiled bytes of a tensor of a step, made once."""
            place = (id(state), name)
            if place not in tiled:
                tiled[place] = _flat(tile(state[name][1], name[1], copies))
            return tiled[place]

        tensors = []
        for name in sorted(names, key=lambda name: (ROLES.index(name[0]), name[1])):
            kind, param = name
            dtype, array = new[name]
            shape = (array.shape[0] * copies, array.shape[1])
            data, base = elements(new, name), None if old is None else elements(old, name)
            if role == "rows":
                data = _some_rows(data, base, shape[0])
            if role == "exponents":
                data = (data.view(np.uint16) >> 7 & 0xFF).astype(np.uint8)
                tensors.append(Tensor(param, kind, "u8", shape, data, None))
                continue
            partners = {}
            for other in ROLES:
                theirs = (other, param)
                if other != kind and theirs in new and (old is None or theirs in old) and kind != "model":
                    partners[other] = (new[theirs][0], elements(new, theirs), None if old is None else elements(old, theirs))
            tensors.append(Tensor(f"{kind}.{param}", kind, dtype, shape, data, base, partners))
        yield key, title, Case(key, title, tensors)
