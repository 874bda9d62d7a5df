"""Codecs alone, without a store: what each makes of a tensor of yours, and how fast.

One thread, the calling one, without the interpreter lock. To keep a state, save it into a store: what is encoded here knows
neither its name nor its place.

>>> from tensorcask import RawTensor
>>> from tensorcask.codec import Coder
>>> base = RawTensor("f32", (1000,), bytearray(4000))
>>> tensor = RawTensor("f32", (1000,), bytearray(3996) + b"0123")
>>> coder = Coder(tensor, base=base, codec="tc.bitmask")
>>> encoded = coder.encode()
>>> encoded.stored_bytes, encoded.chunks
(129, {'tc.bitmask': 1})
>>> out = bytearray(4000)
>>> coder.decode_into(encoded, out)
>>> out == tensor.data
True
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _frameworks, _native
from ._errors import InvalidValueError
from ._native import Encoded

__all__ = ["Coder", "Encoded", "codecs"]


def codecs() -> list[str]:
    """Ids of the codecs."""
    return _native.codecs()


class Coder:
    """A tensor, and what its codecs may look at.

    ``base`` is the same tensor of the parent snapshot: without it there are no deltas. ``partners`` are other tensors of the parameter
    by role (``model``, ``master``, ``exp_avg``, ``exp_avg_sq``), each alone or with its own base in a pair. ``codec`` names the one to
    use, and must be able to store every chunk; without it each chunk gets the codec that ``objective`` asks for, as a writer chooses.
    Arrays of torch, numpy and jax, and :class:`tensorcask.RawTensor`, are lent, not copied, where they are contiguous and on the CPU.
    """

    def __init__(
        self,
        tensor: Any,
        *,
        base: Any = None,
        role: str = "model",
        partners: Mapping[str, Any] | None = None,
        codec: str | None = None,
        objective: str = "balanced",
    ) -> None:
        lent = _frameworks.lend(tensor, "tensor")
        old = None if base is None else _frameworks.lend(base, "base")
        if old is not None and (old.dtype, old.shape) != (lent.dtype, lent.shape):
            raise InvalidValueError(f"base: {old.dtype} of shape {list(old.shape)}; the tensor is {lent.dtype} of shape {list(lent.shape)}")
        others = []
        self._keep = [lent, old]
        for name, pair in (partners or {}).items():
            now, before = pair if isinstance(pair, tuple) else (pair, None)
            theirs = _frameworks.lend(now, f"partner {name}")
            earlier = None if before is None else _frameworks.lend(before, f"base of partner {name}")
            for found in (theirs, earlier):
                if found is not None and (found.dtype, found.shape) != (theirs.dtype, lent.shape):
                    raise InvalidValueError(f"partner {name}: {found.dtype} of shape {list(found.shape)}; the tensor is of shape {list(lent.shape)}")
            self._keep += [theirs, earlier]
            others.append((name, theirs.dtype, theirs.buffer, None if earlier is None else earlier.buffer))
        self._coder = _native.Coder(
            lent.dtype, lent.shape, lent.buffer, role, None if old is None else old.buffer, others, codec, objective
        )

    def encode(self, checks: bool = True) -> Encoded:
        """Encodes all chunks.

        With ``checks`` as a writer does it: checksums of what goes in and of every column, and each chunk is decoded again and compared.
        Without, the codec alone. A codec that rounds (``tc.cluster``, ``tc.kmeans``, ``tc.blockwise8``) is used only where it is named.
        """
        return self._coder.encode(checks)

    def decode_into(self, encoded: Encoded, out: Any) -> None:
        """Decodes into a writable buffer of bytes, of the tensor's size; checksums are compared if it was encoded with ``checks``."""
        self._coder.decode_into(encoded, out)
