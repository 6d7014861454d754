"""A process group of torch.distributed whose collectives are Poseidon's.

torch's own functions call the methods, which are named as torch names them; torch's C++ code calls some of them, too.
Each returns a `Work`. Sums are made in rank order: all ranks get the same bits, in every run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from poseidon import _core
from poseidon.errors import InvalidArgument
from poseidon.torch.backend.arrays import (
    Finish,
    changeable,
    check_dtypes,
    element_of,
    label_of,
    readable,
    reduced_element,
    writable,
)
from poseidon.torch.backend.home import Home
from poseidon.torch.backend.reductions import Reduction, reduction_of
from poseidon.torch.backend.urgency import current_urgency
from poseidon.torch.backend.work import Work
from poseidon.torch.tensors.memory import borrowed

NAME = "poseidon"
Kind = _core.CollectiveKind


def _several(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


# torch's stubs give its methods other overloads than torch's functions and C++ code call.
_TorchGroup: Any = dist.ProcessGroup


class ProcessGroup(_TorchGroup):  # type: ignore[misc]
    """A group of a home's ranks. The communicator is theirs."""

    def __init__(
        self, home: Home, communicator: int, rank: int, size: int, name: str, timeout_s: float | None, owns_home: bool
    ) -> None:
        super().__init__(rank, size)
        self.home = home
        self._communicator = communicator
        self._rank, self._size = rank, size
        self._name, self._description = name, "undefined"
        self._owns_home = owns_home
        self._timeout_s = timeout_s  # of a call; None: that of the job
        self._coalescing: list[Work] | None = None

    # What torch asks of a group.

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def _get_backend_name(self) -> str:
        return NAME

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, group_name: str) -> None:
        self._name = group_name

    def _set_group_name(self, group_name: str) -> None:
        self._name = group_name

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, group_desc: str) -> None:
        self._description = group_desc

    def _set_group_desc(self, group_desc: str) -> None:
        self._description = group_desc

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_sequence_number_for_group(self) -> None:
        """There is nothing to set: calls have numbers."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def abort(self) -> None:
        self.home.abort("the program aborted its process group")

    def shutdown(self) -> None:
        if self._owns_home:
            self.home.end()

    # Collectives.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        one = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        reduction = reduction_of("all_reduce", opts, self._size)
        return self._together(
            [
                self._sum_sparse(tensor, reduction)
                if tensor.is_sparse
                else self._reduce(Kind.all_reduce, tensor, reduction)
                for tensor in one
            ]
        )

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        return self.allreduce(list(tensors), opts)

    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> Work:
        reduction = reduction_of("reduce", opts, self._size)
        return self._together([self._reduce(Kind.reduce, tensor, reduction, opts.rootRank) for tensor in tensors])

    def _reduce(self, kind: Kind, tensor: torch.Tensor, reduction: Reduction, root: int = 0) -> Work:
        element = reduced_element(kind.name, tensor)
        reduction.check(kind.name, tensor)
        has_result = kind == Kind.all_reduce or root == self._rank
        memory, finish = changeable(tensor) if has_result else (readable(tensor), None)
        call = self._start(
            kind,
            tensor.dtype,
            [borrowed(memory)],
            [borrowed(memory)] if has_result else [],
            element=element,
            op=reduction.op_for(tensor),
            divisor=reduction.divisor_for(tensor),
            root=root,
        )
        finishes = [reduction.finish(memory) if has_result else None, finish]
        return self._work(kind.name, [call], [tensor], finishes)

    def _sum_sparse(self, tensor: torch.Tensor, reduction: Reduction) -> Work:
        """Sums what the ranks have at each index. It is over when this returns: they have more or fewer of them."""
        reduction.check_sparse("all_reduce")
        own = tensor.detach().coalesce()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        self.allgather([counts], [torch.tensor([own._nnz()])]).wait()
        indices = [own.indices().new_empty(own.indices().shape[0], int(count)) for count in counts]
        values = [own.values().new_empty(int(count), *own.values().shape[1:]) for count in counts]
        self.allgather([indices, values], [own.indices(), own.values()]).wait()
        # coalesce() adds what has one index in the order in which it stands here, that of the ranks.
        total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), own.shape).coalesce()
        with torch.no_grad():
            tensor.copy_(total if reduction.mean_of == 1 else total / reduction.mean_of)
        return self._work("all_reduce", [], [tensor], [])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        pairs = [(outputs, inputs)] if isinstance(outputs, torch.Tensor) else list(zip(outputs, inputs, strict=True))
        reduction = reduction_of("reduce_scatter", opts, self._size)
        return self._together([self._scatter_reduced(output, parts, reduction) for output, parts in pairs])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self._scatter_reduced(output, input, reduction_of("reduce_scatter_tensor", opts, self._size))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        reduction = reduction_of("reduce_scatter_tensor", opts, self._size)
        return self._together(
            [self._scatter_reduced(output, one, reduction) for output, one in zip(outputs, inputs, strict=True)]
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_reduced(self, output: torch.Tensor, inputs: Any, reduction: Reduction) -> Work:
        element = reduced_element("reduce_scatter", output)
        reduction.check("reduce_scatter", output)
        dtype = check_dtypes("reduce_scatter", [output, *_several(inputs)])
        arrays, sizes = self._inputs("reduce_scatter", inputs, self._size)
        memory, finish = writable(output)
        call = self._start(
            Kind.reduce_scatter,
            dtype,
            arrays,
            [borrowed(memory)],
            element=element,
            op=reduction.op_for(output),
            divisor=reduction.divisor_for(output),
            input_bytes=sizes,
        )
        finishes = [reduction.finish(memory), finish]
        return self._work("reduce_scatter", [call], [output], finishes)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        one = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = opts if isinstance(opts, int) else opts.rootRank
        return self._together([self._broadcast(tensor, root) for tensor in one])

    def _broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        is_root = self._rank == root
        memory, finish = (readable(tensor), None) if is_root else writable(tensor)
        array = borrowed(memory)
        call = self._start(
            Kind.broadcast,
            tensor.dtype,
            [array] if is_root else [],
            [] if is_root else [array],
            element=element_of(tensor),
            root=root,
        )
        return self._work("broadcast", [call], [tensor], [finish])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        pairs = [(outputs, inputs)] if isinstance(inputs, torch.Tensor) else list(zip(outputs, inputs, strict=True))
        return self._together([self._gather(Kind.all_gather, list(places), one) for places, one in pairs])

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        by_input = zip(*outputs, strict=True)  # torch has a list for each rank
        return self._together(
            [self._gather(Kind.all_gather, list(places), one) for places, one in zip(by_input, inputs, strict=True)]
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self._gather(Kind.all_gather, output, input)

    _allgather_base = all_gather_single
    allgather_into_tensor = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._together(
            [self._gather(Kind.all_gather, output, one) for output, one in zip(outputs, inputs, strict=True)]
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Work:
        root = opts.rootRank
        places = list(outputs[0]) if self._rank == root else []
        return self._gather(Kind.gather, places, inputs[0], root)

    def _gather(self, kind: Kind, outputs: Any, input: torch.Tensor, root: int = 0) -> Work:
        dtype = check_dtypes(kind.name, [input, *_several(outputs)])
        arrays, sizes, finishes, written = self._outputs(kind.name, outputs, self._size)
        own = [borrowed(readable(input))]
        call = self._start(kind, dtype, own, arrays, element=element_of(input), root=root, output_bytes=sizes)
        return self._work(kind.name, [call], written, finishes)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Work:
        root, output = opts.rootRank, outputs[0]
        given = list(inputs[0]) if self._rank == root else []
        dtype = check_dtypes("scatter", [output, *given])
        arrays, _ = self._inputs("scatter", given, self._size)
        memory, finish = writable(output)
        call = self._start(Kind.scatter, dtype, arrays, [borrowed(memory)], element=element_of(output), root=root)
        return self._work("scatter", [call], [output], [finish])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        dtype = check_dtypes("all_to_all", [*outputs, *inputs])
        sources, _ = self._inputs("all_to_all", list(inputs), self._size)
        places, _, finishes, written = self._outputs("all_to_all", list(outputs), self._size)
        call = self._start(Kind.all_to_all, dtype, sources, places, element=element_of(written[0]))
        return self._work("all_to_all", [call], written, finishes)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        dtype = check_dtypes("all_to_all_single", [output, input])
        memory, finish = writable(output)
        call = self._start(
            Kind.all_to_all,
            dtype,
            [borrowed(readable(input))],
            [borrowed(memory)],
            element=element_of(output),
            input_bytes=self._split("input", input, input_splits),
            output_bytes=self._split("output", output, output_splits),
        )
        return self._work("all_to_all_single", [call], [output], [finish])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        limit = getattr(opts, "timeout", None) or timeout
        work = self._work("barrier", [self._start(Kind.barrier, None, [], [])], [], [])
        if limit is not None and limit > timedelta(0):
            work.set_limit(limit.total_seconds())
        return work

    # From one rank to another one.

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int = 0) -> Work:
        collectives = self.home.collectives
        with self.home.telling():
            calls = [
                collectives.send(self._communicator, to, tag, label_of(tensor.dtype), borrowed(readable(tensor)))
                for tensor in tensors
            ]
        return self._work("send", calls, list(tensors), [])

    def recv(self, tensors: Sequence[torch.Tensor], source: int | None, tag: int = 0) -> Work:
        collectives = self.home.collectives
        memories = [writable(tensor) for tensor in tensors]
        with self.home.telling():
            calls = [
                collectives.receive(self._communicator, source, tag, label_of(tensor.dtype), borrowed(memory))
                for tensor, (memory, _) in zip(tensors, memories, strict=True)
            ]
        return self._work("recv", calls, list(tensors), [finish for _, finish in memories])

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Work:
        return self.recv(tensors, None, tag)

    # Several calls that are waited for together.

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return self._together(works)

    def _together(self, works: Sequence[Work]) -> Work:
        return works[0] if len(works) == 1 else Work.of(works, self.home, self._timeout_s)

    def _work(
        self, what: str, calls: Sequence[int], outputs: Sequence[torch.Tensor], finish: Sequence[Finish | None]
    ) -> Work:
        self.home.threads.add(threading.get_ident())
        for call in calls:
            self.home.calls.begin(call, self._name, what, outputs)
        work = Work(self.home, calls, outputs, [one for one in finish if one is not None], self._timeout_s)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _start(
        self, kind: Kind, dtype: torch.dtype | None, inputs: Sequence[Any], outputs: Sequence[Any], **how: Any
    ) -> int:
        how.setdefault("input_bytes", ())
        how.setdefault("output_bytes", ())
        how["label"] = 0 if dtype is None else label_of(dtype)
        how["urgency"] = current_urgency(kind)
        with self.home.telling():
            return int(self.home.collectives.start(self._communicator, kind, inputs, outputs, **how))

    def _inputs(self, caller: str, tensors: Any, count: int) -> tuple[list[Any], list[int]]:
        """Arrays to read: one for each rank, or one of as many parts, with their sizes in bytes."""
        if not isinstance(tensors, torch.Tensor):
            return [borrowed(readable(tensor)) for tensor in tensors], []
        return [borrowed(readable(tensors))], self._even_parts(caller, tensors, count)

    def _outputs(
        self, caller: str, tensors: Any, count: int
    ) -> tuple[list[Any], list[int], list[Finish | None], list[torch.Tensor]]:
        """The same to write, with what finishes them, and the tensors."""
        several = _several(tensors)
        memories = [writable(tensor) for tensor in several]
        sizes = self._even_parts(caller, tensors, count) if isinstance(tensors, torch.Tensor) else []
        return [borrowed(memory) for memory, _ in memories], sizes, [finish for _, finish in memories], list(several)

    def _even_parts(self, caller: str, tensor: torch.Tensor, count: int) -> list[int]:
        if tensor.numel() % count != 0:
            raise InvalidArgument(
                f"{caller} got a tensor of {tensor.numel()} elements for {count} ranks: give as many for each rank"
            )
        return [tensor.nbytes // count] * count

    def _split(self, which: str, tensor: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        """Bytes of each rank's part, in sizes of the first dimension."""
        if not sizes:
            return self._even_parts("all_to_all_single", tensor, self._size)
        rows = tensor.shape[0] if tensor.dim() else 1
        if len(sizes) != self._size or sum(sizes) != rows:
            raise InvalidArgument(
                f"all_to_all_single got {which} splits {list(sizes)} for {self._size} ranks and {rows} rows: give each "
                "rank a part, which together are all rows"
            )
        row_bytes = tensor.nbytes // rows if rows else 0
        return [size * row_bytes for size in sizes]
