"""Entry point ``vllm.general_plugins``: tells vLLM about the backend of :mod:`tensorcask.vllm`.

vLLM calls :func:`register` in each of its processes. The modules of the backend are imported when the backend is chosen.
"""

from __future__ import annotations

_MODULE = "tensorcask.vllm"
_registered = False


def register() -> None:
    """Registers the backend ``tensorcask``, once. Does nothing on a vLLM that has no weight transfer for the trainer."""
    global _registered
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
    except ImportError:
        return
    if _registered:
        return
    WeightTransferEngineFactory.register_engine("tensorcask", _MODULE, "TensorcaskWeightTransferEngine")
    WeightTransferTrainerFactory.register_engine("tensorcask", _MODULE, "TensorcaskTrainerWeightTransferEngine")
    _registered = True
