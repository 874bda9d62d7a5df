"""Storage for training checkpoints: small deltas, checksums over every byte, atomic commits.

>>> import tensorcask
>>> state = {"model": {"w": tensorcask.RawTensor("f32", (2, 2), bytearray(16))}, "lr": 0.5, "step": 7}
>>> saved = tensorcask.save(state, "memory://readme", step=7)
>>> saved.kind, saved.tensor_bytes
('base', 16)
>>> tensorcask.load("memory://readme") == state
True
"""

# Modules, from the ground up; each imports only modules before it:
# _collector _native _errors _shard _dtypes _refusals _device _frameworks _convert _files _progress _source _subclasses _inert _unpickle _folders _foreign
# _precision _state _state_search _steps _staging _planners _options _changed_rows _touched_rows _reports _html _mapped _snapshot _handle
# _process_stores _sql _upkeep _hosts _peers _preemption _dcp_reader _dcp_paths torch _store _save_load _markers codec engine _ranks
# _run_parts _run_saver _run interchange weights slime accelerate deepspeed lightning megatron orbax orbax_v1 torchft torchtitan
# _adapters _rank_saves _trainer_parts _trainer_resume transformers _vllm_plugin vllm agent
# ray _conversions __main__

from ._dtypes import UnstorableTypeError
from ._errors import InvalidTypeError, InvalidValueError
from ._frameworks import RawTensor
from ._hosts import Hosts
from ._native import (
    Catalog,
    ConflictError,
    CorruptionError,
    Error,
    FencedError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
    OutcomeUnknownError,
    RoundingChoice,
    RoundingReport,
    Saved,
    Statistics,
    StorageError,
    TemplateError,
    UnsafeStoreError,
    UnsupportedError,
    __version__,
)
from ._peers import Peers
from ._precision import TensorRounding, search_precision
from ._preemption import Drained, Preempted, Preemption
from ._reports import (
    Advice,
    BisectReport,
    CompactReport,
    CopyReport,
    GcReport,
    MatchedTensor,
    SnapshotInfo,
    StepGradient,
    StoredPart,
    TensorInfo,
    TimeEstimate,
    VerifyReport,
)
from ._run import Run
from ._save_load import load, load_async, save, save_async
from ._shard import Shard
from ._snapshot import Snapshot
from ._state_search import StatePrecision, search_state_precision
from ._store import Store
from .engine import Engine

__all__ = [
    "Advice",
    "BisectReport",
    "Catalog",
    "CompactReport",
    "ConflictError",
    "CopyReport",
    "CorruptionError",
    "Drained",
    "Engine",
    "Error",
    "FencedError",
    "GcReport",
    "Hosts",
    "InvalidArgumentError",
    "InvalidTypeError",
    "InvalidValueError",
    "TimeEstimate",
    "LimitExceededError",
    "MatchedTensor",
    "NotFoundError",
    "OutcomeUnknownError",
    "Peers",
    "Preempted",
    "Preemption",
    "RawTensor",
    "RoundingChoice",
    "RoundingReport",
    "Run",
    "Saved",
    "Shard",
    "Snapshot",
    "SnapshotInfo",
    "StatePrecision",
    "Statistics",
    "StorageError",
    "StepGradient",
    "Store",
    "StoredPart",
    "TemplateError",
    "TensorInfo",
    "TensorRounding",
    "UnsafeStoreError",
    "UnstorableTypeError",
    "UnsupportedError",
    "VerifyReport",
    "__version__",
    "load",
    "load_async",
    "save",
    "save_async",
    "search_precision",
    "search_state_precision",
]
