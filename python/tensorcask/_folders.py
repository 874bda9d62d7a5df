"""Folders of trainers: `checkpoint-N` of the Trainer of Transformers, and what `Accelerator.save_state` writes.

Each file of PyTorch becomes a key of the state, such as ``optimizer``. Files of other kinds, such as ``config.json``, are kept as bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

# Files of `torch.save`, by what they hold.
_TORCH = re.compile(r"((?:optimizer|scheduler|scaler|sampler|rng_state|random_states|custom_checkpoint|dl_state_dict)(?:_\d+)?)\.(?:pt|pth|bin|pkl)")
_WEIGHTS = re.compile(r"((?:pytorch_model|adapter_model)(?:_\d+)?)\.bin")
_INDEX = re.compile(r"(.+)\.(safetensors|bin)\.index\.json")
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.(safetensors|bin)")
_STATE = "trainer_state.json"
# Larger files that are of no known kind are left out.
_MOST_BYTES = 64 << 20


def is_of_trainer(folder: Path) -> bool:
    """Whether a folder holds the state of a training beside a model."""
    return any(path.name == _STATE or _TORCH.fullmatch(path.name) for path in folder.iterdir() if path.is_file())


def step_in(folder: Path) -> int | None:
    """The step that the Trainer of Transformers has noted."""
    try:
        found = json.loads((folder / _STATE).read_text())["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None


def read(folder: Path, allow: Sequence[str], read_dcp: Callable[[Path, Sequence[str]], Any]) -> tuple[dict[str, Any], list[str]]:
    """The state in a folder of a trainer, and the names of files and folders that are left out. ``read_dcp`` reads a folder of DCP.

    The folder of a Trainer gives the state that :class:`tensorcask.transformers.Callback` saves.
    """
    from safetensors.torch import load_file

    from ._unpickle import RefusedPickle, load

    state: dict[str, Any] = {}
    refused: list[RefusedPickle] = []
    used: set[str] = set()

    def of_torch(path: Path) -> Any:
        try:
            return load(path, allow)
        except RefusedPickle as error:
            refused.append(error)
            return None

    def weights(path: Path, key: str) -> None:
        used.add(path.name)
        found = load_file(path) if path.suffix == ".safetensors" else of_torch(path)
        state.setdefault("model" if key == "pytorch_model" else key, {}).update(found or {})

    entries = sorted(folder.iterdir())
    for path in entries:
        if found := _INDEX.fullmatch(path.name):
            used.add(path.name)
            for shard in sorted(set(json.loads(path.read_text())["weight_map"].values())):
                if Path(shard).name != shard:
                    raise ValueError(f"{path} names a file outside of its folder: {shard}")
                weights(folder / shard, found[1])
    for path in entries:
        if path.name in used:
            continue
        if path.is_dir():
            if (path / ".metadata").is_file():
                # A part in shards, such as `optimizer_0` of FSDP.
                try:
                    state[path.name] = read_dcp(path, allow)
                except RefusedPickle as error:
                    refused.append(error)
                used.add(path.name)
        elif path.name == _STATE:
            state["trainer_state"] = path.read_text()
            used.add(path.name)
        elif path.suffix == ".safetensors" and not _SHARD.fullmatch(path.name):
            weights(path, path.stem)
        elif (found := _WEIGHTS.fullmatch(path.name)) and found[1] not in state and not ("model" in state and found[1] == "pytorch_model"):
            weights(path, found[1])
        elif found := _TORCH.fullmatch(path.name):
            state[found[1].replace("rng_state", "rng")] = of_torch(path)
            used.add(path.name)
    if refused:
        names = {name for error in refused for name in error.names}
        raise RefusedPickle(sorted(names) if all(error.names for error in refused) else [], "; ".join(map(str, refused)))
    files, left_out = other_files(folder, used)
    if files:
        state["files"] = files
    return state, left_out


def other_files(folder: Path, used: Collection[str]) -> tuple[dict[str, bytes], list[str]]:
    """The files of a folder that are not used yet, and the names of what is left out: large files, and folders. Hidden files belong to
    other tools."""
    files: dict[str, bytes] = {}
    left_out: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name in used or path.name.startswith("."):
            continue
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            files[path.name] = path.read_bytes()
        else:
            left_out.append(f"{path.name}/" if path.is_dir() else path.name)
    return files, left_out
