"""Steps of a training run, as `benches/data/make` writes them."""

from pathlib import Path

import numpy as np
import states


class TooFew(Exception):
    """The data lacks steps that a part needs."""


class Run:
    """Steps of one model: whole tensors in `FOLDER/gpt`, or the slices in `FOLDER` if that folder is missing."""

    def __init__(self, folder):
        own = Path(folder) / "gpt"
        self.whole = own.is_dir()
        self.folder = own if self.whole else Path(folder)
        files = self.folder.glob("step-*.safetensors")
        self.paths = {int(path.stem.removeprefix("step-")): path for path in files}
        self.steps = sorted(self.paths)

    def describe(self):
        elements = sum(words.size for words in self.load(self.steps[0], matrices_only=False).values())
        return f"`gpt` of {elements / 1e6:.2f} M parameters" if self.whole else f"slices of `gpt`, {elements / 1e6:.2f} M parameters"

    def inputs(self, steps=None):
        """Names and sizes of the files of steps, of all by default: results are measured again if these differ."""
        found = [step for step in self.steps if steps is None or step in steps]
        return {self.paths[step].name: self.paths[step].stat().st_size for step in found}

    def need(self, *steps):
        missing = [str(step) for step in steps if step not in self.paths]
        if missing:
            raise TooFew(f"step {' and '.join(missing)}")

    def load(self, step, role="model", matrices_only=True):
        """Tensors of a role by parameter, as unsigned integers."""
        found = states.load(self.paths[step], matrices_only)
        return {param: words for (kind, param), (_, words) in sorted(found.items()) if kind == role}

    def roles(self, step):
        return {role for role, _ in states.load(self.paths[step])}

    def tensors(self, step, base, matrices_only=True):
        """Model tensors of a step with their base, as the candidates of `benches/peers` take them."""
        new, old = (self.load(which, matrices_only=matrices_only) for which in (step, base))
        return [
            states.Tensor(f"model.{param}", "model", "bf16", words.shape, flat(words), flat(old[param]))
            for param, words in new.items()
            if param in old
        ]


def flat(words):
    return np.ascontiguousarray(words).reshape(-1).view(np.uint8)


def to_f32(words):
    """bf16 as f32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values):
    """f32 as bf16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
