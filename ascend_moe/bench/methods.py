"""The methods of the benchmark: the machine's limit, a bare exchange, this package's ops, and peers over gloo and MPI.

Each consists of a dispatch and a combine with the same contract.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_moe.bench.cases import Case, Inputs
from ascend_moe.comm import group_of
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import Dispatched, MC2Dispatcher
from ascend_moe.dispatchers import rows as row_ops
from ascend_moe.errors import ArgumentError, need
from ascend_moe.native import library
from ascend_moe.ops.collectives import by_expert, gather, reduce_scatter

LIMIT, BARE, OURS, PEER = "limit", "bare", "ours", "peer"


@dataclass(frozen=True)
class RankPlace(Place):
    """A rank's `Place` in its group, and mpi4py's communicator of the same ranks; ``mpi`` None: no MPI."""

    mpi: Any = None


def arrived(rows: Tensor, scales: Tensor | None, counts: Tensor, handle: Any) -> Dispatched:
    """Return a dispatch result: ``rows`` (>= sum of counts, H), int8 rows' ``scales``, ``counts`` (L,) per expert."""
    none = torch.empty(0)
    return Dispatched(rows, none if scales is None else scales, counts, none, none, none, handle)


class Method(ABC):
    """A way to run dispatch and combine, which the benchmark times: one object per case and rank, on all ranks."""

    name: str
    kind: str = PEER
    needs_mpi: bool = False

    def __init__(self, case: Case, place: RankPlace, rows_out: Tensor) -> None:
        """``rows_out`` (case.most_rows, H): default buffer for the experts' output."""
        self.case, self.place, self.rows_out = case, place, rows_out

    def ready(self, inputs: Inputs) -> None:  # noqa: B027
        """Prepare these inputs before their first call. Not timed."""

    @abstractmethod
    def dispatch(self, inputs: Inputs) -> Dispatched:
        """Send each row to the ranks of its experts, and return the received rows. Timed. Collective."""

    def expert_output(self, sent: Dispatched) -> Tensor:
        """Return the buffer (>= rows received, H) into which the experts write their output. Timed with dispatch."""
        return self.rows_out

    @abstractmethod
    def combine(self, rows: Tensor, inputs: Inputs, sent: Dispatched) -> Tensor:
        """Send the experts' ``rows`` back and return each token's weighted sum, (BS, H). Timed. Collective."""

    def experts_of(self, sent: Dispatched) -> Tensor:
        """Return the global expert id of each received row, (rows,)."""
        local = torch.arange(self.case.local_experts).repeat_interleave(sent.expert_token_nums)
        return local + self.place.rank * self.case.local_experts


# ---- the limit


def pointers(rows: Tensor, index: Tensor) -> Tensor:
    """Return the addresses (n,) int64 of the rows ``index`` (int64) of a contiguous (m, H) tensor."""
    return torch.mul(index, rows.size(1) * rows.element_size()).add_(rows.data_ptr())


def native_call(name: str, *arguments: Tensor | int) -> Callable[[], None]:
    """Return a function that calls ``name`` of the library with ``arguments``, tensors by address, and keeps them."""
    function = getattr(library.lib(), name)
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]

    def call(_alive: tuple[Tensor | int, ...] = arguments) -> None:
        if function(*values):
            raise ArgumentError(f"{name} refused its arguments: H must be a multiple of 16", argument="methods")

    return call


def weighted_sum(out: Tensor, addresses: Tensor, weights: Tensor) -> Callable[[], None]:
    """Return a function: ``out`` (BS, H) = fp32 sums over K of rows at ``addresses`` (BS * K,) x weights (BS, K)."""
    type_code = library.lib().am_type_code(str(out.dtype).removeprefix("torch.").encode())
    shape = (*weights.shape, out.size(1), type_code)
    return native_call("am_bench_weighted_sum", out, addresses, weights, *shape)


class _Limit(Method):
    """Copy every row once and sum it once, within each rank, without communication.

    No method that moves and reduces each row once is faster. Quantization and preparation are not timed.
    """

    kind = LIMIT
    copy: int  # of am_bench_copy_rows

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        case, pairs = self.case, self.case.batch * self.case.topk
        self._to = torch.empty(pairs, case.hidden, dtype=torch.int8 if case.quant_mode else case.torch_dtype)
        self._out = torch.empty(case.batch, case.hidden, dtype=case.torch_dtype)
        #: id of the inputs -> copy, sum, result of dispatch, and the source rows, which must stay alive
        self._ready: dict[int, tuple[Callable[[], None], Callable[[], None], Dispatched, Tensor]] = {}

    def ready(self, inputs: Inputs) -> None:
        source, scales = row_ops.quantize_dispatch_rows(inputs.x) if self.case.quant_mode else (inputs.x, None)
        pairs = torch.arange(self.case.batch * self.case.topk)
        token_of = pairs // self.case.topk  # token by token: the source row stays in L1
        scales = None if scales is None else scales.index_select(0, token_of)
        row_bytes = self._to.size(1) * self._to.element_size()
        places = pointers(source, token_of)
        self._ready[id(inputs)] = (
            native_call("am_bench_copy_rows", self._to, places, len(pairs), row_bytes, self.copy),
            weighted_sum(self._out, pointers(self.rows_out, pairs), inputs.expert_scales),
            arrived(self._to, scales, torch.empty(0), inputs.expert_ids.reshape(-1)),
            source,
        )

    def dispatch(self, inputs: Inputs) -> Dispatched:
        copy, _, sent, _ = self._ready[id(inputs)]
        copy()
        return sent

    def combine(self, rows: Tensor, inputs: Inputs, sent: Dispatched) -> Tensor:
        self._ready[id(inputs)][1]()
        return self._out

    def experts_of(self, sent: Dispatched) -> Tensor:
        experts: Tensor = sent.handle  # rows are copied in the order of the pairs
        return experts


class LimitMemcpy(_Limit):
    name, copy = "limit-memcpy", 0


class LimitStream(_Limit):
    name, copy = "limit-nontemporal", 1


class LimitThroughUb(_Limit):
    name, copy = "limit-ub", 2


# ---- the bare exchange

_ALIGNED = 4096
FLAG_BYTES = 128  # two cache lines, because of the adjacent-line prefetcher


def shared_memory(place: RankPlace, size: int) -> Tensor:
    """Return ``size`` bytes of memory, initially 0, that all ranks of this machine share. Collective."""
    fd = os.memfd_create("ascend_moe_bench") if place.rank == 0 else -1
    path = [f"/proc/{os.getpid()}/fd/{fd}"]
    dist.broadcast_object_list(path)
    mapped = torch.from_file(path[0], shared=True, size=size, dtype=torch.uint8)
    dist.barrier()
    if fd >= 0:
        os.close(fd)
    return mapped


class BarePush(Method):
    """The bare exchange: copy the rows between ranks with one flag per peer, and sum; all else is precomputed.

    Dispatch and combine start from the same tensors as in `Direct`. Each row is stored where it is read: in the owner's
    ``expand_x``, returned rows in memory of the token's rank, which sums. `ready`, which is not timed, computes all
    addresses and quantizes. There is one buffer, because a barrier precedes each op.
    """

    name, kind, copy, pull = "bare-push", BARE, 0, False  # copy: of am_bench_exchange

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        case, world = self.case, self.place.world
        self._pairs, self._out_bytes = case.batch * case.topk, case.hidden * case.torch_dtype.itemsize
        self._row_type = torch.int8 if case.quant_mode else case.torch_dtype
        self._row_bytes = case.hidden * self._row_type.itemsize
        # of each rank: expand_x, rows of combine, published x
        sizes = (case.most_rows * self._row_bytes, case.most_rows * self._out_bytes, case.batch * self._row_bytes)
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
        self._area = self._starts.pop()
        flags = world * world * FLAG_BYTES
        self._memory = shared_memory(self.place, world * self._area + flags)
        self._flags = self._memory.data_ptr() + world * self._area
        mine = self._memory[self.place.rank * self._area :][: sizes[0]]
        self._expand_x = mine.view(self._row_type).view(case.most_rows, case.hidden)
        self._out = torch.empty(case.batch, case.hidden, dtype=case.torch_dtype)
        self._ready: dict[int, tuple[list[Callable[[], None]], list[Callable[[], None]], Dispatched, Tensor]] = {}

    def _address(self, part: int, rank: Tensor | int, at: Tensor) -> Tensor:
        """Return the addresses (n,) of the bytes ``at`` of part 0 (expand_x), 1 (combine) or 2 (x) of each ``rank``."""
        return at + (rank * torch.tensor(self._area) + self._starts[part] + self._memory.data_ptr())

    def _exchange(self, to: Tensor, source: Tensor, row_bytes: int) -> Callable[[], None]:
        end = (self._flags, self.place.rank, self.place.world)
        return native_call("am_bench_exchange", to, source, len(to), row_bytes, self.copy, *end)

    def ready(self, inputs: Inputs) -> None:
        me, world, pairs, local = self.place.rank, self.place.world, self._pairs, self.case.local_experts
        source, scales = row_ops.quantize_dispatch_rows(inputs.x) if self.case.quant_mode else (inputs.x, None)
        # every routed token: its owner, and its row there
        ids = _gathered(inputs.expert_ids).reshape(-1).long()
        order = torch.sort(ids, stable=True).indices
        counts = torch.bincount(ids, minlength=world * local)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.view(world, -1).sum(1).cumsum(0)])
        row = torch.empty_like(order)
        row[order] = torch.arange(len(order))
        owner = (ids // local)[me * pairs :][:pairs]
        row = row[me * pairs :][:pairs] - starts[owner]
        # every row that arrives: its source, and the routed token there
        come = order[int(starts[me]) : int(starts[me + 1])]
        sender, pair = come // pairs, come % pairs
        token_of, place = torch.arange(pairs) // self.case.topk, torch.arange(len(come))
        x_bytes, out_bytes = self._row_bytes, self._out_bytes
        remote, first = sender != me, torch.zeros(1, dtype=torch.int64)
        if self.pull:
            x = self._address(2, me, first)
            rows = self._address(2, sender, pair // self.case.topk * x_bytes)
            dispatch = [
                self._exchange(x, pointers(source, first), source.nbytes),
                native_call("am_bench_copy_rows", self._expand_x, rows, len(come), x_bytes, 0),
            ]
            give, take = self._address(1, me, place * out_bytes), self._address(1, owner, row * out_bytes)
        else:
            dispatch = [self._exchange(self._address(0, owner, row * x_bytes), pointers(source, token_of), x_bytes)]
            give = self._address(1, sender, pair * out_bytes)
            take = self._address(1, me, torch.arange(pairs) * out_bytes)
        give = give[remote]
        take = torch.where(owner == me, pointers(self.rows_out, row), take)
        combine = [
            self._exchange(give, pointers(self.rows_out, place[remote]), out_bytes),
            weighted_sum(self._out, take, inputs.expert_scales),
        ]
        if scales is not None:
            scales = _gathered(scales).reshape(-1)[sender * self.case.batch + pair // self.case.topk]
        sent = arrived(self._expand_x, scales, counts.view(world, -1)[me], None)
        self._ready[id(inputs)] = (dispatch, combine, sent, source)

    def dispatch(self, inputs: Inputs) -> Dispatched:
        calls, _, sent, _ = self._ready[id(inputs)]
        for call in calls:
            call()
        return sent

    def combine(self, rows: Tensor, inputs: Inputs, sent: Dispatched) -> Tensor:
        for call in self._ready[id(inputs)][1]:
            call()
        return self._out


class BareStream(BarePush):
    """`BarePush` with stores that bypass the caches."""

    name, copy = "bare-nontemporal", 1


class BarePull(BarePush):
    """The bare exchange by reads: each rank publishes x and combine's rows, and the other ranks read theirs there."""

    name, pull = "bare-pull", True


# ---- ours


class Window(Method):
    name, kind, comm_alg, zero_copy = "window", OURS, "window", False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        options: dict[str, Any] = {"comm_alg": self.comm_alg, "zero_copy": self.zero_copy}
        self._dispatcher = MC2Dispatcher.from_group(self.place, self.case.experts, **options)

    def dispatch(self, inputs: Inputs) -> Dispatched:
        return self._dispatcher.dispatch(inputs.x, inputs.expert_ids, quant_mode=self.case.quant_mode)

    def combine(self, rows: Tensor, inputs: Inputs, sent: Dispatched) -> Tensor:
        return self._dispatcher.combine(rows, sent, inputs.expert_scales)


class Direct(Window):
    name = comm_alg = "direct"


class DirectZeroCopy(Direct):
    """`Direct` with zero copy: the experts write into a tensor of this rank's window, allocated for each call."""

    name, zero_copy = "direct-zero-copy", True

    def expert_output(self, sent: Dispatched) -> Tensor:
        rows = self._dispatcher.empty_expert_out(sent, self.case.torch_dtype)
        assert rows is not None
        return rows


# ---- the peers

Counts = Sequence[int]


class GlooAllToAll(Method):
    """The usual all-to-all over gloo in plain torch: sort, permute, exchange, reorder, and the reverse.

    It allocates new tensors in every step, reorders by split and cat, and sums by index_add in fp32.
    """

    name = "gloo-a2a"

    def _exchange(self, out: Tensor, given: Tensor, received: Counts, sent: Counts) -> None:
        """Exchange int32 rows by all_to_all_single: ``sent[d]`` to rank d, ``received[s]`` from rank s."""
        dist.all_to_all_single(out, given, list(received), list(sent))

    def _exchange_counts(self, out: Tensor, given: Tensor) -> None:
        """Exchange E counts, L with each rank."""
        each = [self.case.local_experts] * self.place.world
        self._exchange(out, given, each, each)

    def dispatch(self, inputs: Inputs) -> Dispatched:
        case, world = self.case, self.place.world
        ids = inputs.expert_ids.reshape(-1)
        order = torch.argsort(ids, stable=True)
        permuted = row_ops.payload(inputs.x, inputs.expert_ids, order, None, case.quant_mode)
        given = torch.bincount(ids, minlength=case.experts).to(torch.int32)
        table = torch.empty_like(given)
        self._exchange_counts(table, given)
        sent = given.view(world, -1).sum(1).tolist()
        table = table.view(world, case.local_experts)
        received = table.sum(1).tolist()
        words = permuted.new_empty(sum(received), permuted.size(1))
        self._exchange(words, permuted, received, sent)
        chunks, local = torch.split(words, table.reshape(-1).tolist()), case.local_experts
        words = torch.cat([chunk for expert in range(local) for chunk in chunks[expert::local]])
        rows, scales = row_ops.open_rows(words, case.hidden, case.torch_dtype, case.quant_mode)
        handle = (order, table, sent, received)
        return arrived(rows, scales if case.quant_mode else None, table.sum(0), handle)

    def combine(self, rows: Tensor, inputs: Inputs, sent: Dispatched) -> Tensor:
        order, table, counts, received = sent.handle
        world = self.place.world
        chunks = torch.split(rows[: sum(received)], table.t().reshape(-1).tolist())
        by_source = torch.cat([chunk for source in range(world) for chunk in chunks[source::world]])
        words = row_ops.pack(by_source)
        back = words.new_empty(sum(counts), words.size(1))
        self._exchange(back, words, counts, received)
        (mine,) = row_ops.unpack(back, (self.case.hidden, rows.dtype))
        weighted = mine.float() * inputs.expert_scales.reshape(-1)[order][:, None]
        total = torch.zeros(self.case.batch, self.case.hidden)
        total.index_add_(0, order // self.case.topk, weighted)
        return total.to(rows.dtype)


class MpiAllToAll(GlooAllToAll):
    name, needs_mpi = "mpi-a2a", True

    def _exchange(self, out: Tensor, given: Tensor, received: Counts, sent: Counts) -> None:
        """Exchange by MPI's Alltoallv, directly between the tensors."""

        def part(rows: Tensor, counts: Counts) -> list[Any]:
            sizes = [count * (rows.size(1) if rows.dim() > 1 else 1) for count in counts]
            return [rows.numpy(), (sizes, [sum(sizes[:rank]) for rank in range(len(sizes))]), "i"]

        self.place.mpi.Alltoallv(part(given, sent), part(out, received))


class GlooAllToAllTuned(GlooAllToAll):
    """The all-to-all over gloo, optimized: rows are moved by index_select(out=) into preallocated tensors.

    The returned rows are summed where they arrived, by the C++ loop of the limit.
    """

    name = "gloo-a2a-tuned"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        case, most_rows = self.case, self.case.most_rows
        pairs, back_words = case.batch * case.topk, case.hidden * case.torch_dtype.itemsize // 4
        self._row_words = case.hidden // 4 if case.quant_mode else back_words
        sent_words = self._row_words + bool(case.quant_mode)  # int8 rows are followed by their scale

        def words(rows: int, width: int) -> Tensor:
            return torch.empty(rows, width, dtype=torch.int32)

        self._send, self._receive = words(pairs, sent_words), words(most_rows, sent_words)
        self._rows, self._scales = words(most_rows, self._row_words), words(most_rows, 1)
        self._give_back, self._got_back = words(most_rows, back_words), words(pairs, back_words)
        self._out = torch.empty(case.batch, case.hidden, dtype=case.torch_dtype)
        self._table = torch.empty(case.experts, dtype=torch.int32)
        self._places = torch.arange(max(pairs, most_rows))
        self._place_of = torch.empty(pairs, dtype=torch.int64)

    def dispatch(self, inputs: Inputs) -> Dispatched:
        case, world = self.case, self.place.world
        ids = inputs.expert_ids.view(-1)
        order = torch.sort(ids, stable=True).indices
        given = torch.bincount(ids, minlength=case.experts)
        self._exchange_counts(self._table, given.to(torch.int32))
        table = self._table.view(world, case.local_experts).to(torch.int64)
        sent, received = given.view(world, -1).sum(1).tolist(), table.sum(1).tolist()
        count = sum(received)
        words = row_ops.payload(inputs.x, inputs.expert_ids, None, None, case.quant_mode)
        torch.index_select(words, 0, order // case.topk, out=self._send)
        self._exchange(self._receive[:count], self._send, received, sent)
        # row i of expand_x is received row source[i]; table[s, l]: rows from source s for local expert l
        source = by_expert(table)
        rows = self._rows[:count]
        torch.index_select(self._receive[:, : self._row_words], 0, source, out=rows)
        scales = None
        if case.quant_mode:
            words, picked = self._receive[:, self._row_words :], self._scales[:count]
            scales = torch.index_select(words, 0, source, out=picked).view(torch.float32).view(-1)
        expand_x = rows.view(torch.int8 if case.quant_mode else case.torch_dtype)
        return arrived(expand_x, scales, table.sum(0), (order, source, sent, received))

    def combine(self, rows: Tensor, inputs: Inputs, sent: Dispatched) -> Tensor:
        order, source, counts, received = sent.handle
        count = sum(received)
        arrival = torch.empty_like(source)
        arrival[source] = self._places[:count]
        torch.index_select(rows.view(torch.int32), 0, arrival, out=self._give_back[:count])
        self._exchange(self._got_back, self._give_back[:count], counts, received)
        self._place_of[order] = self._places[: order.numel()]
        weighted_sum(self._out, pointers(self._got_back, self._place_of), inputs.expert_scales)()
        return self._out


class MpiAllToAllTuned(GlooAllToAllTuned, MpiAllToAll):
    """`GlooAllToAllTuned` with MPI's Alltoallv instead of gloo."""

    name = "mpi-a2a-tuned"


class GlooAllGather(Method):
    """All-gather of all tokens as dispatch, reduce-scatter as combine; every rank receives all W * BS tokens.

    A rank selects the rows of its experts and sums its part of each token in fp32; the reduce-scatter sums the parts.
    """

    name = "gloo-ag-rs"

    def dispatch(self, inputs: Inputs) -> Dispatched:
        case = self.case
        words = _gathered(row_ops.payload(inputs.x, inputs.expert_ids, None, None, case.quant_mode))
        ids = _gathered(inputs.expert_ids).reshape(-1)
        weights = _gathered(inputs.expert_scales).reshape(-1)
        local = ids - self.place.rank * case.local_experts
        mine = (local >= 0) & (local < case.local_experts)
        key = torch.where(mine, local, case.local_experts)
        counts = torch.bincount(key, minlength=case.local_experts + 1)[: case.local_experts]
        pairs = torch.argsort(key, stable=True)[: int(counts.sum())]
        tokens = pairs // case.topk
        picked = words.index_select(0, tokens)
        rows, scales = row_ops.open_rows(picked, case.hidden, case.torch_dtype, case.quant_mode)
        return arrived(rows, scales if case.quant_mode else None, counts, (tokens, weights[pairs]))

    def combine(self, rows: Tensor, inputs: Inputs, sent: Dispatched) -> Tensor:
        tokens, weights = sent.handle
        part = torch.zeros(self.place.world * self.case.batch, self.case.hidden)
        part.index_add_(0, tokens, rows[: tokens.numel()].float() * weights[:, None])
        return reduce_scatter(part, group_of("process_group")).to(rows.dtype)


def _gathered(given: Tensor) -> Tensor:
    return gather(given, group_of("process_group")).flatten(0, 1)


# ---- by name, in the order of the table

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        *(LimitMemcpy, LimitStream, LimitThroughUb, BarePush, BareStream, BarePull, DirectZeroCopy, Direct, Window),
        *(MpiAllToAllTuned, MpiAllToAll, GlooAllToAllTuned, GlooAllToAll, GlooAllGather),
    )
}
GROUPS = {kind: [name for name, method in METHODS.items() if method.kind == kind] for kind in (LIMIT, BARE, OURS, PEER)}


def chosen(text: str, comm_alg: str = "") -> list[str]:
    """Return the names of the methods that ``text`` selects: "auto" (all), or names and groups separated by commas.

    Groups are limit, bare, ours and peer; the first two are always included. ``comm_alg`` "window" or "direct" leaves
    out this package's methods with the other algorithm. Raises ArgumentError for other words.
    """
    known = {"auto": list(METHODS), **GROUPS, **{name: [name] for name in METHODS}}
    wanted = {*GROUPS[LIMIT], *GROUPS[BARE]}
    for word in text.split(","):
        need(word in known, "methods", "contains {!r}; need some of {}", word, ", ".join(known))
        wanted.update(known[word])
    if comm_alg in ("window", "direct"):
        wanted -= {name for name in GROUPS[OURS] if getattr(METHODS[name], "comm_alg", comm_alg) != comm_alg}
    return [name for name in METHODS if name in wanted]
