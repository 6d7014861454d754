"""The form in which a gradient is exchanged: as it lies in memory, as pairs of real numbers, or as the rows it has.

Every form is a dense tensor of real numbers. Its elements may be added and divided, whatever they stand for.
"""

from __future__ import annotations

from typing import Any

import torch

from poseidon.errors import InvalidArgument


class DenseForm:
    """The gradient as it is. `layout`, on the meta device, is the layout of what is exchanged."""

    is_sparse = False

    def __init__(self, param: torch.Tensor) -> None:
        self.layout = torch.empty_like(param, device="meta", requires_grad=False)

    def check(self, name: str, grad: torch.Tensor | None) -> None:
        """InvalidArgument for a gradient of parameter `name` that cannot be exchanged so."""
        if grad is not None and grad.layout != torch.strided:
            raise InvalidArgument(
                f"the gradient of parameter {name} has layout {grad.layout}, which only weights of nn.Embedding and "
                "nn.EmbeddingBag with sparse=True may have: make the parameter such a module's, or use sparse=False"
            )

    def view(self, grad: torch.Tensor) -> torch.Tensor | None:
        """The gradient's memory as what is exchanged; None where that is another."""
        return grad.detach()

    def write(self, grad: torch.Tensor, buffer: torch.Tensor) -> None:
        """Makes `buffer`, of `layout`, what is exchanged for this gradient."""
        buffer.copy_(grad)

    def read(self, buffer: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """The gradient that `buffer` stands for: `into` overwritten, or a new tensor, maybe in the buffer's memory."""
        return buffer if into is None else into.copy_(buffer)

    def zeros(self, param: torch.Tensor) -> torch.Tensor:
        """A gradient of zeros."""
        return torch.zeros_like(param, requires_grad=False)


class ComplexForm(DenseForm):
    """Complex numbers as pairs of real ones: one more dimension, of size 2."""

    def __init__(self, param: torch.Tensor) -> None:
        super().__init__(param)
        self.layout = torch.view_as_real(self.layout)

    def view(self, grad: torch.Tensor) -> torch.Tensor | None:
        # A conjugate view shows other values than lie in its memory.
        return None if grad.is_conj() else torch.view_as_real(grad.detach())

    def write(self, grad: torch.Tensor, buffer: torch.Tensor) -> None:
        torch.view_as_complex(buffer).copy_(grad)

    def read(self, buffer: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        # Optimizers stumble over conjugate views.
        return super().read(torch.view_as_complex(buffer), None if into is None or into.is_conj() else into)


class RowsForm(DenseForm):
    """A gradient that may travel as some of its rows."""

    def rows_of(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The indices (int32) and values of the rows to send, in ascending order, each row once. None: all rows."""
        raise NotImplementedError

    def from_rows(self, indices: torch.Tensor, rows: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """The gradient that has these rows: `into` overwritten, or a new tensor."""
        raise NotImplementedError


class TouchedRowsForm(RowsForm):
    """The dense gradient of an embedding, as the rows that are not zeros.

    They are found in the gradient itself. What forward was given does not tell them all: other uses of the weight, and
    hooks, add to the gradient, too. A row counts as zeros only if all its bits are.
    """

    def row_mask(self, grad: torch.Tensor) -> torch.Tensor:
        """For each row whether it is not zeros."""
        grad = grad.resolve_neg().contiguous()
        row_bytes = grad.shape[1] * grad.element_size()
        # Fewer, wider numbers take less time, and integers have no negative zero.
        widest = next(kind for kind in (torch.int64, torch.int32, torch.int16) if row_bytes % kind.itemsize == 0)
        return grad.view(widest).any(1)

    def rows_of(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        indices = self.row_mask(grad).nonzero()[:, 0]
        rows, cols = grad.shape
        if indices.numel() * (cols + 1) >= rows * cols:
            return None
        return indices.to(torch.int32), grad.index_select(0, indices)

    def from_rows(self, indices: torch.Tensor, rows: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        into = rows.new_zeros(self.layout.shape) if into is None else into.zero_()
        return into.index_copy_(0, indices.to(torch.int64), rows)


class SparseForm(RowsForm):
    """The sparse gradient of an embedding, as the rows that it has.

    An optimizer treats a row of zeros and a missing row differently, so the result has the rows that some rank has. If
    some rank's gradient is dense, the result is dense, too.
    """

    is_sparse = True

    def __init__(self, param: torch.Tensor) -> None:
        super().__init__(param)
        self._shape = param.shape
        self.layout = self.layout.new_empty(param.shape)  # of a dense gradient: row after row

    def check(self, name: str, grad: torch.Tensor | None) -> None:
        if grad is None or grad.layout == torch.strided:
            return
        if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
            raise InvalidArgument(
                f"the gradient of parameter {name} has layout {grad.layout} and is not one of whole rows: use the "
                "parameter in its embedding only, or create the embedding with sparse=False"
            )

    def view(self, grad: torch.Tensor) -> torch.Tensor | None:
        return None

    def read(self, buffer: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return super().read(buffer, None if into is None or into.is_sparse else into)

    def rows_of(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if grad.layout == torch.strided:
            return None
        rows = grad.coalesce()
        # The rows are sent from their memory, which must not be the gradient's: the program may write there.
        values = rows.values().clone(memory_format=torch.contiguous_format) if rows is grad else rows.values()
        return rows.indices()[0].to(torch.int32), values.contiguous()

    def from_rows(self, indices: torch.Tensor, rows: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        index = indices.to(torch.int64).unsqueeze(0)
        return torch.sparse_coo_tensor(index, rows, self._shape, is_coalesced=True, check_invariants=False)

    def zeros(self, param: torch.Tensor) -> torch.Tensor:
        return self.from_rows(torch.empty(0, dtype=torch.int64, device=param.device), param.detach()[:0])


class CountedRowsForm(SparseForm):
    """The same in 1-D, for schemes that add up arrays: all rows, a count of ranks for each row, and one more count.

    The last element counts the ranks whose gradient is dense.
    """

    def __init__(self, param: torch.Tensor) -> None:
        super().__init__(param)
        self.layout = self.layout.new_empty(param.numel() + param.shape[0] + 1)

    def write(self, grad: torch.Tensor, buffer: torch.Tensor) -> None:
        rows, row_counts, dense_count = self._parts(buffer)
        given = self.rows_of(grad)
        if given is None:
            rows.copy_(grad)
            row_counts.fill_(1)
            dense_count.fill_(1)
            return
        indices, values = given
        buffer.zero_()
        rows[indices] = values
        row_counts[indices] = 1

    def read(self, buffer: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        rows, row_counts, dense_count = self._parts(buffer)
        if dense_count != 0:
            return super().read(rows, into)
        present = row_counts.nonzero()[:, 0]
        return self.from_rows(present, rows[present])

    def _parts(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = self._shape.numel()
        return buffer[:count].view(self._shape), buffer[count:-1], buffer[-1]


def form_of(param: torch.Tensor, sparse: bool, by_rows: bool = False) -> DenseForm:
    """The form of a parameter's gradients; `sparse`: modules that have it make them sparse.

    `by_rows`: they may travel by the scheme `rows`.
    """
    if param.is_complex():  # torch differentiates no complex embedding
        return ComplexForm(param)
    if not sparse:
        return TouchedRowsForm(param) if by_rows else _dense_form_of(param)
    return SparseForm(param) if by_rows else CountedRowsForm(param)


_DENSE_FORMS: dict[Any, DenseForm] = {}  # which nobody changes; a model has few kinds of parameters


def _dense_form_of(param: torch.Tensor) -> DenseForm:
    if param.layout != torch.strided:
        return DenseForm(param)
    kind = (type(param), param.dtype, param.shape, param.stride())
    if kind not in _DENSE_FORMS:
        _DENSE_FORMS[kind] = DenseForm(param)
    return _DENSE_FORMS[kind]
