"""Storage for the state of a model in training: small deltas, every byte checked, every commit atomic.

>>> import tensorcask
>>> state = {"model": {"w": tensorcask.RawTensor("f32", (2, 2), bytearray(16))}, "lr": 0.5, "step": 7}
>>> saved = tensorcask.save(state, "memory://readme", step=7)
>>> saved.kind, saved.tensor_bytes
('base', 16)
>>> tensorcask.load("memory://readme") == state
True
"""

from ._frameworks import RawTensor
from ._native import (
    Catalog,
    ConflictError,
    CorruptionError,
    Error,
    FencedError,
    Found,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
    OutcomeUnknownError,
    RoundingReport,
    Saved,
    StorageError,
    UnsafeStoreError,
    UnsupportedError,
    __version__,
)
from ._precision import TensorRounding, search_precision
from ._reports import CompactReport, CopyReport, GcReport, SnapshotInfo, TensorInfo, VerifyReport
from ._store import Snapshot, Store, load, save
from .engine import Engine

__all__ = [
    "Catalog",
    "CompactReport",
    "ConflictError",
    "CopyReport",
    "CorruptionError",
    "Engine",
    "Error",
    "FencedError",
    "Found",
    "GcReport",
    "InvalidArgumentError",
    "LimitExceededError",
    "NotFoundError",
    "OutcomeUnknownError",
    "RawTensor",
    "RoundingReport",
    "Saved",
    "Snapshot",
    "SnapshotInfo",
    "StorageError",
    "Store",
    "TensorInfo",
    "TensorRounding",
    "UnsafeStoreError",
    "UnsupportedError",
    "VerifyReport",
    "__version__",
    "load",
    "save",
    "search_precision",
]
