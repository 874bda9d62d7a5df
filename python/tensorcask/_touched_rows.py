"""Rows of embedding tables that an optimizer changes, recorded from gradients."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from ._changed_rows import Claim, RowSource
from ._errors import InvalidValueError

# Optimizers that leave a row without gradient as it is, and its moments too.
_BY_ROWS = (SGD, Adagrad, SparseAdam)
# Integers with as many bytes as a few elements. The bits of a row are zero if all its integers are.
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


class TouchedRows(RowSource):
    """Records which rows of embedding tables a training changes, for ``changed_rows=`` of saves.

    Check-N-Run calls this tracking. After each step of an optimizer, the rows of the gradient that are not zero count as
    changed: rows that other ranks touched as well, once gradients are reduced, and rows of tied tables under any use. Saves
    then need no base of these tables: neither in memory nor read back from the store.

    Args:
        model: Model with tables: weights of ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag``, with sparse or dense
            gradients. DTensors are left out.
        optimizers: Optimizers of the tables: ``SGD``, ``Adagrad`` or ``SparseAdam``, without momentum, weight decay and
            ``maximize``. Any other may change rows without a gradient and is an ``InvalidValueError``. ``Adam`` is one:
            its moments go on moving a row. Optimizers without a table are ignored.

    Pass the object to :meth:`tensorcask.Store.save`, :func:`tensorcask.save`, :meth:`tensorcask.Store.writer` or
    :meth:`tensorcask.Engine.save`. The tables and their moments are found in the state by their memory, so their names do not
    matter. A copy, such as a moving average, is compared with its base as usual. One object serves several stores and engines:
    for each, it names the rows since the last save there that succeeded.

    A table is compared as a whole in the next save if it changed outside of a step: by ``load_state_dict``,
    ``load(out=...)``, ``max_norm`` or any operation of PyTorch in place. A change through ``weight.data`` or numpy is not
    seen, but no snapshot is wrong: each save checks the rows that it takes for equal. If one differs, the save logs a
    warning and compares all rows, and so do all later saves.

    Call :meth:`remove` at the end, or use the object as a context manager. A step that runs inside ``torch.compile`` is
    not supported.

    >>> import tensorcask
    >>> model = nn.Embedding(1000, 16, sparse=True)
    >>> optimizer = torch.optim.SparseAdam(model.parameters())
    >>> store = tensorcask.Store("memory://touched-rows-example")
    >>> with TouchedRows(model, optimizer) as touched:
    ...     for step, rows in enumerate(([1, 2], [2, 700]), 1):
    ...         model(torch.tensor(rows)).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         saved = store.save({"model": model.state_dict()}, step=step, base_cache="none", changed_rows=touched)
    >>> saved.kind, saved.chunks
    ('delta', {'tc.rows': 1})
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer) -> None:
        # Number of the next save. Rows that change now belong to it.
        self._save = 1
        # Last save of each table by each writer that succeeded.
        self._confirmed: dict[tuple[Hashable, int], int] = {}
        self._is_trusted = True
        self._handles: list[Any] = []
        self._tables: dict[int, _Table] = {}
        weights = {id(weight): weight for weight in _weights(model)}
        for optimizer in optimizers:
            found = [(weights[id(weight)], group) for group in optimizer.param_groups for weight in group["params"] if id(weight) in weights]
            for weight, group in found:
                reason = _refusal(optimizer, group)
                if reason is not None:
                    raise InvalidValueError(f"{reason}, which may change rows without a gradient. Save without TouchedRows")
                table = self._tables.setdefault(id(weight), _Table(weight))
                table.optimizers.append(optimizer)
        if not self._tables:
            raise InvalidValueError("no optimizer has the weight of an Embedding or EmbeddingBag of the model")
        for optimizer in {id(owner): owner for table in self._tables.values() for owner in table.optimizers}.values():
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        for table in self._tables.values():
            table.note_versions()

    def remove(self) -> None:
        """Ends the recording. Later saves compare all rows."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def claim(self, writer: Hashable, tensors: Mapping[str, Any]) -> Claim:
        for table in self._tables.values():
            table.check_versions(self._save)
        number = self._save
        self._save += 1
        places = {_place(tensor): key for key, table in self._tables.items() for tensor in table.tensors()}
        places.pop(None, None)
        keys = {name: places.get(_place(tensor)) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
        of_tables = {key: self._rows_of(key, writer) for key in keys.values() if key is not None}
        rows = {name: of_tables[key] for name, key in keys.items() if key is not None}
        return Claim(writer, number, rows, frozenset(of_tables))

    def _rows_of(self, key: int, writer: Hashable) -> list[int] | None:
        since = self._confirmed.get((writer, key))
        return None if since is None or not self._is_trusted or not self._handles else self._tables[key].rows_since(since)

    def confirm(self, claim: Claim) -> None:
        self._confirmed.update({(claim.writer, table): claim.number for table in claim.tables})

    def distrust(self) -> None:
        self._is_trusted = False

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for table in self._tables.values():
            if optimizer in table.optimizers:
                table.check_versions(self._save)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for table in self._tables.values():
            if optimizer in table.optimizers:
                # Schedulers and load_state_dict change groups.
                groups = [group for group in optimizer.param_groups if any(weight is table.weight for weight in group["params"])]
                if any(_refusal(optimizer, group) is not None for group in groups):
                    table.whole = self._save
                table.touch(self._save)


class _Table:
    """A table, with the number of the save that the last change of each row belongs to."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.optimizers: list[Optimizer] = []
        self.last = torch.zeros(weight.shape[0], dtype=torch.int32, device=weight.device)
        # Save that the last change of unknown rows belongs to.
        self.whole = 0
        self._versions: list[Any] = []

    def tensors(self) -> list[torch.Tensor]:
        """The weight and its moments by row."""
        states = (optimizer.state.get(self.weight, {}) for optimizer in self.optimizers)
        moments = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        rows = self.weight.shape[:1]
        return [self.weight, *(value for value in moments if value.layout is torch.strided and value.shape[:1] == rows)]

    def note_versions(self) -> None:
        self._versions = self._current_versions()

    def check_versions(self, save: int) -> None:
        """Notes a change since the last step."""
        versions = self._current_versions()
        if versions != self._versions:
            self.whole, self._versions = save, versions

    def _current_versions(self) -> list[Any]:
        return [(_place(tensor), tensor._version) for tensor in self.tensors()]

    def touch(self, save: int) -> None:
        """Notes the rows that a step has changed."""
        gradient = self.weight.grad
        if self.last.device != self.weight.device or self.last.shape != self.weight.shape[:1]:
            self.last, self.whole = torch.zeros(self.weight.shape[0], dtype=torch.int32, device=self.weight.device), save
        if gradient is not None:
            if gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1:
                self.last.index_fill_(0, gradient._indices()[0], save)
            elif gradient.layout is torch.strided and gradient.shape == self.weight.shape:
                self.last.masked_fill_(_is_nonzero(gradient.detach()), save)
            else:
                self.whole = save
        self.note_versions()

    def rows_since(self, save: int) -> list[int] | None:
        """Rows that changed after a save; None if they are not known."""
        if self.whole > save:
            return None
        rows: list[int] = torch.nonzero(self.last > save).flatten().tolist()
        return rows


def _weights(model: nn.Module) -> list[torch.Tensor]:
    modules = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    return [module.weight for module in modules if type(module.weight) is nn.Parameter and not hasattr(module.weight, "to_local")]


def _refusal(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """Why an optimizer may change rows without a gradient; None if it does not."""
    name = type(optimizer).__name__
    if type(optimizer) not in _BY_ROWS:
        return f"the optimizer of a table is {name}"
    for option in ("momentum", "weight_decay", "maximize"):
        if group.get(option):
            return f"the {name} of a table has {option}={group[option]}"
    if type(optimizer) is Adagrad and not group["eps"] > 0:
        return f"the {name} of a table has eps={group['eps']}"
    return None


def _is_nonzero(gradient: torch.Tensor) -> torch.Tensor:
    """Whether each row has a bit that is not zero. Negative zeros change the sign of a zero."""
    rows = gradient.contiguous().flatten(1)
    row_bytes = rows.shape[1] * rows.element_size()
    if row_bytes == 0:
        return torch.zeros(rows.shape[0], dtype=torch.bool, device=rows.device)
    address = rows.data_ptr()
    integer = next(kind for kind in _INTEGERS if row_bytes % kind.itemsize == 0 and address % kind.itemsize == 0)
    # Several times as fast as any().
    least, greatest = torch.aminmax(rows.view(integer), dim=1)
    return least.ne(0) | greatest.ne(0)


def _place(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same piece of memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.data_ptr() == 0:
        return None
    return (tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
