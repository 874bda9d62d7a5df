"""Snapshots: reading a state, or a part of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import _collector, _convert, _device, _dtypes, _frameworks, _html, _mapped, _native, _state
from ._errors import InvalidValueError
from ._options import Device, DType, Framework, LoadOptions, Slices, check_slices
from ._precision import TensorRounding
from ._reports import ChainLink, StepGradient, StoredPart, TensorInfo
from ._state import TREE

_log = logging.getLogger("tensorcask")


class SnapshotView(Mapping[str, Any]):
    """Facts about a snapshot, and its tensors by name."""

    def __init__(self, native: _native.Snapshot, store: _native.Store) -> None:
        self._native = native
        self._store = store
        with _collector.paused():
            self._tensors = {row[0]: TensorInfo(row[0], row[1], tuple(row[2]), *row[3:]) for row in native.tensors()}

    def __repr__(self) -> str:
        stored = sum(link.stored_bytes for link in self.chain[:1])
        size = sum(_dtypes.byte_count(info.dtype, info.shape) for info in self._tensors.values() if info.alias_of is None)
        steps = [str(link.step) for link in reversed(self.chain)]
        shown = " <- ".join(steps if len(steps) <= 5 else [steps[0], "...", *steps[-3:]])
        what = f"{_html.counted(len(self._tensors), 'tensor')} of {_html.bytes_text(size)}, {_html.bytes_text(stored)} stored"
        return f"Snapshot(step={self.step}, kind={self.kind!r}, {what}, chain {shown})"

    # Tensors by name. Two snapshots are equal only if they are one object: a comparison would read both.

    def __getitem__(self, name: str) -> Any:
        if name not in self._tensors:
            raise KeyError(f"step {self.step} has no tensor {name!r}")
        return self._load_one(name)

    def _load_one(self, name: str) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __bool__(self) -> bool:
        # A snapshot without tensors is a snapshot.
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    __eq__ = object.__eq__

    def __hash__(self) -> int:
        return id(self)

    def _repr_html_(self) -> str:
        # For notebooks. It reads nothing.
        return _html.of_snapshot(self.step, self.tensors(), self.chain)

    @property
    def native(self) -> _native.Snapshot:
        """Native snapshot."""
        return self._native

    @property
    def step(self) -> int:
        """Training step."""
        return self._native.step

    @property
    def id(self) -> str:
        """Id of the snapshot in the log."""
        return self._native.id

    @property
    def kind(self) -> str:
        """Kind: ``base`` or ``delta``."""
        return self._native.kind

    @property
    def user(self) -> dict[str, Any]:
        """Facts about the step that were passed to ``save(user=...)``. ``tc.policy`` says why it is a base or a delta."""
        found: dict[str, Any] = json.loads(self._native.user)
        return found

    @property
    def metadata(self) -> dict[str, str]:
        """Text that was passed to ``save(metadata=...)`` or read from a safetensors file."""
        return self._native.metadata

    @property
    def chain(self) -> list[ChainLink]:
        """Step, kind and stored bytes of each snapshot needed to rebuild this one, newest first."""
        return [ChainLink(*link) for link in self._native.chain()]

    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors, by name."""
        return dict(self._tensors)

    def blobs(self) -> list[tuple[int, str]]:
        """Rank and name of each blob."""
        return self._native.blobs()

    def blob(self, name: str, *, rank: int = 0) -> bytes:
        """Reads the bytes of a blob."""
        return self._native.read_blob(rank, name)


class Snapshot(SnapshotView):
    """The committed state of one step. Also a read-only mapping: the names of its tensors to the tensors, read on access.

    >>> import tensorcask
    >>> state = {"model": {"w": tensorcask.RawTensor("u8", (3,), bytearray(b"abc"))}, "epoch": 1}
    >>> _ = tensorcask.save(state, "memory://snapshot-example", step=7)
    >>> snapshot = tensorcask.Store("memory://snapshot-example").snapshot()
    >>> list(snapshot), "model.w" in snapshot, snapshot["model.w"].data
    (['model.w'], True, bytearray(b'abc'))
    >>> snapshot  # doctest: +ELLIPSIS
    Snapshot(step=7, kind='base', 1 tensor of 3 B, ... stored, chain 7)
    """

    def rounding(self) -> list[TensorRounding]:
        """Reports the rounding errors of tensors, by name; empty if the snapshot is lossless. Reads no tensor."""
        return [TensorRounding.of(*row) for row in self._native.rounding()]

    def parts(self, name: str) -> list[StoredPart]:
        """Parts of a tensor: those in a file as they are, and those that a read copies, with the reason. Reads no tensor.

        ``load(mmap=True)`` maps a tensor that has one part, with a ``path``.
        """
        return _mapped.parts_of(self._native, name)

    def gradient(self, name: str, slices: slice | tuple[slice, ...] = (), *, framework: Framework | None = None) -> Any:
        """Returns the gradient of this step, as the optimizer added it to its first moment or momentum: after clipping, and
        with a loss scale that was not removed before. Reads only the chunks that the slice touches, and checks them.

        The chunks of ``tc.gradient`` and ``tc.joint`` hold it. Save each step with ``policy="consecutive"``, and train in mixed
        precision: gradients that were computed in f32 are not short, and nothing would prove them.

        With moments in f32, a bf16 gradient is restored exactly unless it is less than a thousandth of its moment; then it
        differs by less than 2**-19 of the moment (for beta1 0.9). A clipped gradient is, too, if the writer found the factor:
        ``longest_bits`` of :meth:`gradient_report` is then at most 8. With moments in bf16, the gradient is an estimate that
        leads to the moments and the weight; low bits differ.

        Args:
            name: Name of a weight, or of its first moment or momentum.
            slices: A slice, or one slice per leading dimension. Default: the whole tensor.
            framework: ``"torch"``, ``"numpy"``, ``"jax"`` or ``"bytes"``. Default: that of the saved tensor.

        Returns:
            A tensor of dtype f32, in the shape of the slice.

        Raises:
            NotFoundError: The tensor has no moment, or a chunk holds no gradient of this step: that of a base, an unchanged
                one, one of another codec, or a delta against another step than the one before.
            TemplateError: No tensor of this name.
            CorruptionError: A chunk that is damaged.

        >>> import tensorcask, torch
        >>> store = tensorcask.Store("memory://gradient-example")
        >>> weight = torch.zeros(100, 100, requires_grad=True)
        >>> optimizer = torch.optim.AdamW([weight])
        >>> for step in range(3):
        ...     weight.grad = torch.randint(-127, 128, (100, 100)).float() / 64  # fits bf16
        ...     optimizer.step()
        ...     _ = store.save({"optimizer": optimizer.state_dict()}, step=step, policy="consecutive")
        >>> torch.equal(store.snapshot(2).gradient("optimizer.state.0.exp_avg"), weight.grad)
        True
        """
        return self.gradient_report(name, slices, framework=framework).gradient

    def gradient_report(
        self, name: str, slices: slice | tuple[slice, ...] = (), *, framework: Framework | None = None
    ) -> StepGradient:
        """Returns the gradient of this step as :meth:`gradient` does, with facts that tell how exact it is."""
        offset, shape = rect_of(self.step, name, self._tensors.get(name), check_slices(name, slices))
        place = _frameworks.place(framework or self._framework_of(name), "f32", shape, name)
        facts = self._native.gradient_into((name, offset, shape, place.buffer))
        return StepGradient(place.finish(), *facts)

    def _framework_of(self, name: str) -> str:
        for _, tree in trees_of(self._native):
            for kind, value in tree:
                if kind == "tensor" and value[0] == name:
                    return str(value[1])
        return _frameworks.default_framework()

    def verify(self) -> None:
        """Decodes and checks every chunk. Raises an error if something is wrong."""
        self._native.verify()

    def load(
        self,
        *,
        tensors: str | Sequence[str] | None = None,
        slices: Slices | None = None,
        out: Any = None,
        device: Device | None = None,
        framework: Framework | None = None,
        dtype: DType | Mapping[str, DType] | None = None,
        have: int | None = None,
        max_error: float | None = None,
        map_location: Device | None = None,
        strip_prefix: str | None = None,
        mmap: bool = False,
    ) -> Any:
        """Loads the state, or a part of it; see :func:`load`."""
        options = LoadOptions(
            tensors=tensors,
            slices=slices,
            out=out,
            device=device,
            framework=framework,
            dtype=dtype,
            have=have,
            max_error=max_error,
            map_location=map_location,
            strip_prefix=strip_prefix,
            mmap=mmap,
        )
        return self.load_with(options)

    def _load_one(self, name: str) -> Any:
        return self.load(slices={name: ()})[name] if _is_pattern(name) else self.load(tensors=name)[name]

    def load_with(self, options: LoadOptions) -> Any:
        """Loads the state, or a part of it; see :func:`load`."""
        if options.max_error is not None:
            self._native.check_rounding(options.max_error)
        out, framework, have, device = options.out, options.framework, options.have, options.device
        partial = options.is_partial
        # A part of the state needs the tree only for the frameworks of its tensors, and a template for their paths.
        trees = [] if partial and framework and out is None else trees_of(self._native)
        targets = {} if out is None else _state.match(out, [tree for _, tree in trees], self._tensors.keys(), self.step)
        wanted = self.matching(options.patterns) if partial else list(self._tensors)
        if options.strip_prefix is not None:
            options.without_prefix(wanted)
        rects = {name: rect_of(self.step, name, self._tensors.get(name), check_slices(name, parts)) for name, parts in (options.slices or {}).items()}
        dtypes = options.conversions(list(self._tensors.values()))
        twice = next((name for name in rects if name in targets), None)
        if twice is not None:
            raise InvalidValueError(f"`{twice}`: a slice cannot be read into `out`")

        saved_as = {value[0]: value[1] for _, tree in trees for kind, value in tree if kind == "tensor"}
        unknown = next((name for name in saved_as if name not in self._tensors), None)
        if unknown is not None:
            raise _native.CorruptionError(f"tc.tree: names tensor `{unknown}`, which the snapshot does not have [spec: tree 2.7]")
        if not partial:
            self._native.check_content()

        def kind_of(name: str) -> str:
            return framework or saved_as.get(name) or _frameworks.default_framework()

        for name in [*wanted, *rects] if dtypes or device is not None else ():
            if name in targets:
                continue
            if name in dtypes and kind_of(name) == "bytes":
                raise InvalidValueError(f"dtype: `{name}` is loaded as bytes; pass framework='torch', 'numpy' or 'jax' to convert it")
            if device is not None:
                _convert.check_device(kind_of(name), device)

        places: dict[str, _frameworks.Place] = {}
        requests: list[tuple[str, Sequence[int], Sequence[int], Any]] = []
        rounded: list[tuple[str, Sequence[int], Sequence[int], Any]] = []

        def is_rounded(name: str) -> bool:
            return dtypes.get(name) == "bf16" and self._tensors[name].dtype == "f32"

        held: list[tuple[str, Any]] = []
        on_device: dict[str, Any] = {}
        filled: set[tuple[str, int]] = set()
        tied: dict[str, str] = {}
        to_map: dict[str, TensorInfo] = {}
        stored: dict[str, str] = {}
        with _collector.paused():
            for name in wanted:
                if name in rects:
                    continue
                info = self._tensors[name]
                if name not in targets:
                    # Tied tensors are one tensor again.
                    first = stored.setdefault(info.alias_of or name, name)
                    if first != name and kind_of(first) == kind_of(name) and dtypes.get(first) == dtypes.get(name):
                        tied[name] = first
                        continue
                    if device is not None and name not in dtypes and kind_of(name) == "torch" and _convert.is_remote(device):
                        on_device[name] = _convert.new_on(device, info.dtype, info.shape, name)
                        places[name] = _giving(on_device[name])
                        continue
                    if is_rounded(name):
                        places[name] = _frameworks.place(kind_of(name), "bf16", info.shape, name)
                        rounded.append((name, (0,) * len(info.shape), info.shape, places[name].buffer))
                        continue
                    if options.mmap:
                        to_map[name] = info
                        continue
                    place = _frameworks.place(kind_of(name), info.dtype, info.shape, name)
                else:
                    target = targets[name]
                    is_direct = have is None and _device.reads_directly(target)
                    place = _frameworks.place_in(target, info.dtype, info.shape, name, _read_later if is_direct else None)
                    if callable(place.buffer):
                        # Tied tensors of the caller are one tensor, too.
                        if (info.alias_of or name, target.data_ptr()) not in filled:
                            on_device[name] = target
                        filled.add((info.alias_of or name, target.data_ptr()))
                        places[name] = place
                        continue
                    if have is not None:
                        places[name] = place
                        held.append((name, place.buffer))
                        continue
                places[name] = place
                requests.append((name, (0,) * len(info.shape), info.shape, place.buffer))
        for name, place in _mapped.places(self._native, to_map, kind_of).items() if to_map else ():
            places[name] = place
            if place.buffer is not None:
                requests.append((name, (0,) * len(to_map[name].shape), to_map[name].shape, place.buffer))
        for name, (offset, shape) in rects.items():
            places[name] = _frameworks.place(kind_of(name), "bf16" if is_rounded(name) else self._tensors[name].dtype, shape, name)
            (rounded if is_rounded(name) else requests).append((name, offset, shape, places[name].buffer))

        if have is not None:
            untied = without_ties(self._tensors, held)
            compare = options.compare
            limit = None if compare is None else compare.limit
            changed = self._native.update_into(self._store.snapshot(have), untied, limit)
            if compare is not None:
                compare.places.update(zip((name for name, _ in untied), changed, strict=True))
        self._native.read_into(without_ties(self._tensors, requests))
        if on_device:
            _device.read_whole(self._native, on_device)
        if rounded:
            self._native.read_as_bf16_into(rounded)
        loaded = {name: place.finish() for name, place in places.items()}
        for name in loaded.keys() - targets.keys() if dtypes or device is not None else ():
            loaded[name] = _convert.convert(loaded[name], dtypes.get(name), device)
        loaded.update({name: loaded[first] for name, first in tied.items()})
        if partial and options.strip_prefix is not None:
            return {short: loaded[name] for name, short in options.without_prefix(list(loaded)).items()}
        if partial or not trees:
            return loaded
        state = self._merged(trees, loaded)
        for path in _state.optimizers_with_text_keys(state):
            _log.warning(
                "step %s: %s['state'] has keys such as '0', but its parameters are numbered 0, 1, ...: DCP turned the keys into text. "
                "Optimizer.load_state_dict ignores these moments without an error. Turn the keys into integers first, or load with "
                "get_state_dict, dcp.load and set_state_dict",
                self.step,
                path,
            )
        return state

    def structure(self) -> tuple[Any, list[str]]:
        """Returns a tuple: the state with a :class:`TensorInfo` in place of each tensor, and the names of all tensors.

        Reads no tensor.
        """
        trees = trees_of(self._native)
        if not trees:
            return dict(self._tensors), list(self._tensors)
        return self._merged(trees, self._tensors), list(self._tensors)

    def _merged(self, trees: list[tuple[int, list[_state.Node]]], tensors: Mapping[str, Any]) -> Any:
        differing: list[str] = []
        state = _state.merge([self._nested(rank, tree, tensors) for rank, tree in trees], differing.append)
        _state.warn_of_differences(self.step, differing)
        return state

    def _nested(self, rank: int, tree: list[_state.Node], tensors: Mapping[str, Any]) -> Any:
        names = [value for kind, value in tree if kind in ("bytes", "file")]
        blobs = dict(zip(names, self._native.read_blobs([(rank, name) for name in names]), strict=True)) if names else {}

        def leaf(kind: str, value: Any) -> Any:
            if kind == "tensor":
                return tensors[value[0]]
            data = blobs[value]
            if kind == "bytes":
                return data
            import io

            return io.BytesIO(data)

        return _state.build(tree, leaf)

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """Names of the tensors that match one of the patterns (``*`` for any characters). A pattern that matches none is
        an error."""
        names = list(self._tensors)
        matches, unused = _native.matching(names, patterns)
        if unused:
            raise _native.TemplateError(f"step {self.step} has no tensor that matches `{unused[0]}`")
        return [name for name, matched in zip(names, matches, strict=True) if matched]


def _is_pattern(name: str) -> bool:
    return any(letter in name for letter in "*?[{")


def _giving(tensor: Any) -> _frameworks.Place:
    """A place without memory, for a tensor that is filled in another way."""
    return _frameworks.Place(None, lambda: tensor)


def _read_later(out: Any, address: int, count: int) -> None:
    """Stands for the read into a tensor on a device, which comes after all others."""
    raise NotImplementedError


def without_ties(tensors: Mapping[str, TensorInfo], requests: list[Any]) -> list[Any]:
    """Drops requests that read a tied tensor into the same memory again."""
    if not any(info.alias_of for info in tensors.values()):
        return requests
    seen: set[tuple[str, int]] = set()
    kept = []
    for request in requests:
        name, buffer = request[0], request[-1]
        address = address_of(buffer)
        key = (tensors[name].alias_of or name, address)
        if address and key in seen:
            continue
        seen.add(key)
        kept.append(request)
    return kept


def rect_of(step: int, name: str, info: TensorInfo | None, ranges: tuple[slice, ...]) -> tuple[list[int], list[int]]:
    """Returns offset and shape of the part of a tensor that the ranges select."""
    if info is None:
        raise _native.TemplateError(f"step {step} has no tensor `{name}`")
    if len(ranges) > len(info.shape):
        raise _native.InvalidArgumentError(f"slices[{name!r}]: {len(ranges)} slices, but the tensor has shape {list(info.shape)}")
    offset, shape = [0] * len(info.shape), list(info.shape)
    for dimension, part in enumerate(ranges):
        start, stop, stride = part.indices(info.shape[dimension])
        if stride != 1:
            raise _native.InvalidArgumentError(f"slices[{name!r}]: a slice with step {stride}; only step 1 can be read")
        offset[dimension], shape[dimension] = start, max(stop - start, 0)
    return offset, shape


def trees_of(snapshot: _native.Snapshot) -> list[tuple[int, list[_state.Node]]]:
    """Returns the tree of each rank that saved one, with the rank."""
    ranks = sorted(rank for rank, name in snapshot.blobs() if name == TREE)
    trees = snapshot.read_blobs([(rank, TREE) for rank in ranks])
    return [(rank, _native.decode_tree(tree)) for rank, tree in zip(ranks, trees, strict=True)]


def address_of(buffer: Any) -> int:
    """Returns the address of a buffer; 0 for a buffer without an array interface, which nothing else shares."""
    interface = getattr(buffer, "__array_interface__", None)
    return int(interface["data"][0]) if interface else 0
