"""Codecs without a store: measure the size and speed of each codec on your tensors.

Runs on the calling thread, without the interpreter lock. To keep a state, save it into a store: an encoded tensor here
has neither a name nor a place.

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
    """Lists the ids of all codecs."""
    return _native.codecs()


class Coder:
    """Encodes and decodes one tensor, with its base and partners.

    Borrows contiguous arrays on the CPU (torch, numpy, jax, :class:`tensorcask.RawTensor`) without a copy.

    Args:
        tensor: Tensor to encode.
        base: The same tensor of the parent snapshot. Without a base there are no deltas.
        role: Role of the tensor.
        partners: Other tensors of the parameter by role (``model``, ``master``, ``exp_avg``, ``exp_avg_sq``), each
            alone or in a pair with its own base.
        codec: Id of the codec to use; it has to be able to store every chunk. Without it, ``objective`` chooses a codec
            for each chunk, as in a save.
        objective: As for :meth:`tensorcask.Store.save`.
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

    def encode(self, *, checks: bool = True) -> Encoded:
        """Encodes all chunks.

        With ``checks``, as in a save: computes checksums of the input and of every column, decodes each chunk again and
        compares it. Without ``checks``, runs the codec alone. A lossy codec (``tc.cluster``, ``tc.kmeans``,
        ``tc.blockwise8``) is used only if ``codec`` names it.
        """
        return self._coder.encode(checks)

    def decode_into(self, encoded: Encoded, out: Any) -> None:
        """Decodes into a writable buffer of the tensor's size. Compares checksums if encoded with ``checks``."""
        self._coder.decode_into(encoded, out)
