"""Weights of a model that a Trainer trains: all, or only the adapter that PEFT trains."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

CONFIG = "adapter_config.json"


def weights(model: Any) -> dict[str, Any]:
    """Returns the weights of a model as ``model``; with one PEFT adapter only its weights, and its description as ``adapter``.

    Returns all weights if a training changes more than the adapter: several adapters, prompts, unfrozen parameters of the
    base model, or buffers such as the statistics of a batch norm.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel) or len(model.peft_config) != 1:
        return {"model": model.state_dict()}
    name, config = next(iter(model.peft_config.items()))
    adapter = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    saved = {_memory(tensor) for tensor in adapter.values()}
    if not saved.issuperset(map(_memory, _changing(model))):
        return {"model": model.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        described = (Path(folder) / CONFIG).read_text()
    return {"model": adapter, "adapter": described}


def _changing(model: Any) -> list[Any]:
    """The tensors that a training may change: parameters with gradients, and buffers that are part of the state."""
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for module in model.modules():
        left_out = module._non_persistent_buffers_set
        found += [buffer for name, buffer in module._buffers.items() if buffer is not None and name not in left_out]
    return found


def _memory(tensor: Any) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape)
