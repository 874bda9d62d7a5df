"""The functions that most programs need: :func:`save` and :func:`load`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from ._changed_rows import RowSource
from ._frameworks import RawTensor
from ._native import Saved
from ._options import BaseCache, Check, Device, DType, Framework, Free, Objective, Policy, Slices, Step
from ._progress import Progress
from ._state import OnUnsupported
from ._store import Store, open_store

# RawTensor is here for the examples.
__all__ = ["RawTensor", "load", "load_async", "save", "save_async"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def save(
    state: Any,
    url: str | os.PathLike[str] | Store,
    *,
    step: int,
    config: Mapping[str, str] | None = None,
    policy: Policy = "adaptive",
    user: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    on_unsupported: OnUnsupported = None,
    base_cache: BaseCache = "memory",
    verify_after_encode: bool = True,
    objective: Objective = "balanced",
    codecs: str | Sequence[str] = (),
    roles: str | Sequence[str] = (),
    precision: str | Sequence[str] = "lossless",
    gradients: Mapping[str, Any] | None = None,
    statistics: bool = False,
    check: Check = None,
    frozen: str | Sequence[str] = (),
    changed_rows: Mapping[str, Sequence[int]] | RowSource | None = None,
    overwrite: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_weights_every: int | None = None,
    free: Free = "next_save",
    progress: Progress = None,
) -> Saved:
    """Saves a state into the store at a URL. Creates the store if it does not exist.

    The process keeps the store open between saves. The next save is a delta, unless that would take more than 0.9 of a
    base; a new process continues in the same way. ``config`` overrides settings of the environment, as for
    :class:`Store`. :meth:`Store.save` describes all other arguments.

    >>> save({"w": RawTensor("f32", (4,), bytearray(16)), "epoch": 1}, "memory://save-example", step=1).kind
    'base'
    >>> save({"w": RawTensor("f32", (4,), bytearray(16)), "epoch": 2}, "memory://save-example", step=2).kind
    'delta'
    """
    return open_store(url, config).save(
        state,
        step=step,
        policy=policy,
        user=user,
        metadata=metadata,
        on_unsupported=on_unsupported,
        base_cache=base_cache,
        verify_after_encode=verify_after_encode,
        objective=objective,
        codecs=codecs,
        roles=roles,
        precision=precision,
        gradients=gradients,
        statistics=statistics,
        check=check,
        frozen=frozen,
        changed_rows=changed_rows,
        overwrite=overwrite,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_weights_every=keep_weights_every,
        free=free,
        progress=progress,
    )


def load(
    url: str | os.PathLike[str] | Store,
    step: Step = "latest",
    *,
    tensors: str | Sequence[str] | None = None,
    slices: Slices | None = None,
    out: Any = None,
    device: Device | None = None,
    framework: Framework | None = None,
    strict: bool = False,
    dtype: DType | Mapping[str, DType] | None = None,
    have: int | None = None,
    max_error: float | None = None,
    map_location: Device | None = None,
    strip_prefix: str | None = None,
    mmap: bool = False,
    progress: Progress = None,
    config: Mapping[str, str] | None = None,
) -> Any:
    """Loads a state as it was saved, or a part of it.

    Returns the nested dicts, lists, tuples and values that were saved, with a tensor of its framework for each tensor.
    With ``tensors`` or ``slices``, returns a flat dict of tensors by name.

    Args:
        url: Path, URL or open :class:`Store`.
        step: Training step, or ``"latest"``: the newest step that can be rebuilt. Skips damaged steps with a warning.
        tensors: Names or patterns (``*`` for any characters) of the tensors to read.
        slices: For each tensor name a slice of the first dimension, or a tuple with one slice per leading dimension.
            Only these parts are read.
        out: A state like the saved one. Its tensors are filled in place. Returns the whole state: these tensors, and
            all other values as stored. After an error the tensors hold parts of both states.
        device: Device to move tensors to (torch), or device or sharding (jax). Tensors of ``out`` stay.
        framework: ``torch``, ``numpy``, ``jax`` or ``bytes`` for all tensors, instead of the framework each was saved
            from.
        strict: Whether a damaged newest step is an error instead of a reason to load an older one.
        dtype: Floating-point dtype to convert to, or a mapping of patterns to dtypes; see below.
        have: Step whose state the tensors of ``out`` hold now. Reads only the changes since then.
        max_error: Greatest relative error: refuses a snapshot in which some tensor was rounded by more.
        map_location: Another name of ``device``, for programs that call ``torch.load``.
        strip_prefix: Beginning of names, such as ``"model."``. Loads the tensors under it as a flat dict of names without
            it. With ``tensors``, all of them must begin with it.
        mmap: Whether tensors that a file of a local store holds as they are become tensors over the mapped file; see below.
        progress: A function of the bytes read and written so far, called a few times a second from another thread; or
            True for a bar of tqdm. In a notebook with tqdm and ipywidgets, operations of more than a
            second show the bar by default; False leaves it out.
        config: Settings that override those of the environment, as for :class:`Store`.

    ``dtype`` converts floating-point tensors: weights, masters, moments. These keep their dtype: tensors without
    dimensions, tensors with the role ``step`` or whose last name is ``step`` (step counters), integers, complex
    numbers, elements smaller than a byte, and tensors of ``out``. A dtype may be one of torch, numpy or jax, or a name:
    ``"bf16"``. A mapping chooses by role or name: ``{"model": "bf16", "*.bias": None}``. The last pattern that matches
    a tensor wins; None leaves it as it was saved. A full name converts also a tensor without dimensions and a step
    counter. If f32 weights were stored so that their bf16 roundings can be read alone, ``"bf16"`` reads only those.

    With ``mmap=True``, torch and numpy tensors that are stored raw and in one piece take no memory of their own (jax may copy). Save with
    ``codecs="*=tc.raw"`` and ``policy="full"`` for that. Writes to such a tensor stay in memory and never reach the file. All
    other tensors are read as usual; :meth:`Snapshot.parts` says why. All checksums are compared. A tensor that is moved to
    a GPU, a slice, and a tensor of ``framework="bytes"`` is read as usual, too.

    >>> weights = {"model": {"w": RawTensor("u8", (2,), bytearray(b"ab"))}, "epoch": 1}
    >>> _ = save(weights, "memory://prefix-example", step=1)
    >>> load("memory://prefix-example", strip_prefix="model.", framework="bytes")["w"].data
    bytearray(b'ab')

    >>> _ = save({"w": RawTensor("u8", (4, 2), bytearray(range(8)))}, "memory://load-example", step=3)
    >>> load("memory://load-example", slices={"w": slice(1, 3)}, framework="bytes")["w"].data
    bytearray(b'\\x02\\x03\\x04\\x05')
    """
    return open_store(url, config).load(
        step,
        tensors=tensors,
        slices=slices,
        out=out,
        device=device,
        framework=framework,
        strict=strict,
        dtype=dtype,
        have=have,
        max_error=max_error,
        map_location=map_location,
        strip_prefix=strip_prefix,
        mmap=mmap,
        progress=progress,
    )


def _in_a_thread(work: Callable[_P, _T], documentation: str) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """A coroutine function with the arguments of a function, which runs in a thread."""

    async def run(*args: _P.args, **arguments: _P.kwargs) -> _T:
        return await asyncio.to_thread(work, *args, **arguments)

    run.__name__ = run.__qualname__ = f"{getattr(work, '__name__', '')}_async"
    run.__doc__ = documentation
    # Editors and help() show the arguments.
    run.__wrapped__ = work  # type: ignore[attr-defined]
    return run


save_async = _in_a_thread(
    save,
    """:func:`save` for programs with an event loop. The loop goes on meanwhile; do not change the tensors until it returns.

    A task that is cancelled no longer waits for the save, but the save goes on. To overlap saving with training, use
    :class:`Engine`.

    >>> async def program():
    ...     saved = await save_async({"w": RawTensor("u8", (2,), bytearray(b"ab"))}, "memory://async-example", step=1)
    ...     return saved.step, (await load_async("memory://async-example", framework="bytes"))["w"].data
    >>> asyncio.run(program())
    (1, bytearray(b'ab'))
    """,
)
load_async = _in_a_thread(
    load,
    """:func:`load` for programs with an event loop, which goes on meanwhile. Several loads may run at a time.

    >>> _ = save({"w": RawTensor("u8", (2,), bytearray(b"ab"))}, "memory://load-async-example", step=1)
    >>> async def program():
    ...     return await asyncio.gather(*(load_async("memory://load-async-example", framework="bytes") for _ in range(2)))
    >>> [state["w"].data for state in asyncio.run(program())]
    [bytearray(b'ab'), bytearray(b'ab')]
    """,
)
