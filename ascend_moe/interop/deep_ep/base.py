"""Base of both Buffers: group, events, dispatch layout, window size and unsupported calls.

On the CPU a call has finished when it returns.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from ascend_moe import comm, plan, settings
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.dispatchers.base import PendingCall
from ascend_moe.errors import ArgumentError, InvalidExpertId, need, need_dims, need_dtype, need_shape, with_typed_errors
from ascend_moe.ops.collectives import gather_rows

P = ParamSpec("P")
R = TypeVar("R")


def npu_here() -> Any:
    """Return torch.npu if an NPU is available, else None."""
    npu = getattr(torch, "npu", None)
    return npu if npu is not None and npu.is_available() else None


class EventHandle:
    """Event recorded on the NPU's current stream by the constructor, as DeepEP's; without an NPU it does nothing."""

    def __init__(self) -> None:
        npu = npu_here()
        self._event = None if npu is None else npu.current_stream().record_event()

    def current_stream_wait(self) -> None:
        """Make the NPU's current stream wait for the event; do nothing without an NPU."""
        npu = npu_here()
        if npu is not None and self._event is not None:
            npu.current_stream().wait_event(self._event)


class EventOverlap:
    """Event to wait for, and a hook that runs after the wait. Source: DeepEP ``EventOverlap``.

    Args:
        event: an `EventHandle`; None: nothing to wait for.
        extra_tensors: referenced as long as this object exists.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors
        self.hook_after_wait: Callable[[], None] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait for the event, then call the registered hook, if any, and remove it.

        release_handle: drop the event. Raises ArgumentError if there is none: the call had no async_finish, or the
        event was dropped.
        """
        rule = "is None: the call had no async_finish, or the event was released: use the results without a wait"
        need(self.event is not None, "event", rule)
        assert self.event is not None
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """Register ``hook_after_wait``, which the next wait calls. Raises ArgumentError if another is registered."""
        rule = "is a second hook: another is registered, call current_stream_wait first"
        need(self.hook_after_wait is None, "hook_after_wait", rule)
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Return this object: ``with event(release_handle=True):`` waits for the event after the block and drops it."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait at the end of the block, if there is an event."""
        release, self._release = self._release, False
        if self.event is not None:
            self.current_stream_wait(release)


def begin(previous_event: EventOverlap | EventHandle | None) -> None:
    """Make the current stream wait for a call's argument previous_event; do nothing if there is no event."""
    if previous_event is not None and getattr(previous_event, "event", previous_event) is not None:
        previous_event.current_stream_wait()


def finished(async_finish: bool, *tensors: Any) -> EventOverlap:
    """Return the event that a call returns: of the current stream, keeping ``tensors`` alive; empty if not async."""
    return EventOverlap(EventHandle(), tensors) if async_finish else EventOverlap()


def nothing() -> None:
    """Do nothing: the hook of a call that has already received its rows."""


class WaitStats:
    """A caller's tensor of waiting times, to which one op's waits for each source rank are added.

    Args:
        argument: the tensor's name in errors.
        stats: ``(W,)`` int64 or int32 on the device of x: µs for each source rank are added; or ``(W, W)``: to this
            rank's row, so that the sum of the ranks' tensors contains all waits. None: nothing is measured.
        x: the rows of the call. place: this rank's place in the Buffer's group of W ranks.

    Raises ArgumentError if stats has another shape, dtype or device.
    """

    def __init__(self, argument: str, stats: Tensor | None, x: Tensor, place: Place) -> None:
        self._row, self._times, self._ranks = stats, Tensor(), list(range(place.world))
        if stats is None:
            return
        need_shape(argument, stats, (place.world,), (place.world, place.world))
        need_dtype(argument, stats, torch.int64, torch.int32)
        need(stats.device == x.device, argument, "is on {}, x on {}; move it to x's device", stats.device, x.device)
        self._row = stats if stats.dim() == 1 else stats[place.rank]

    def given(self, ranks: list[int] | None = None) -> dict[str, Tensor]:
        """Return {"performance_info": zeros}, an op's argument, which `after` then adds to stats; {} without stats.

        ``ranks``: of the op's group, by their numbers in the Buffer's group, one element for each; None: all.
        """
        if self._row is None:
            return {}
        self._ranks = self._ranks if ranks is None else ranks
        self._times = torch.zeros(len(self._ranks), dtype=torch.int64, device=self._row.device)
        return {"performance_info": self._times}

    def after(self, call: Callable[P, R]) -> Callable[P, R]:
        """Return ``call``, wrapped: it adds the measured waits to stats before it returns."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            result = call(*args, **kwargs)
            if self._row is not None:
                self._row[self._ranks] += self._times.to(self._row.dtype)
            return result

        return timed


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = "ProcessGroup | DeviceMesh | str | tuple[str, int, int]"

MOST_EXPERTS = 1 << 16  # bounds tensors with one element per expert; far above the ops' limit
_LEAVING_OUT = "use Buffer(enable_shrink=True), or ascend_moe.agree, ascend_moe.shrink and a new Buffer"


@dataclass(frozen=True)
class BufferPlace(Place):
    """This rank's place in a Buffer's group (name, W, rank), and the group's servers."""

    @classmethod
    def of_group(cls, group: Group) -> BufferPlace:
        """Return this rank's place in ``group``, as `Place.of` does. Raises ArgumentError for None."""
        need(group is not None, "group", "is None; pass a process group (MPI communicators are not supported)")
        return cls.of(group)

    @cached_property
    def ranks_per_server(self) -> int:
        """Ranks of each server, or 0 for one server. Raises ArgumentError if W is not a multiple of them."""
        here = comm.ranks_per_server(self.group_ep, self.world, self.rank)
        equal = not here or here > self.world or self.world % here == 0
        rule = "has {} ranks on servers of {} (by {} or host names); a Buffer needs equal servers: change the ranks"
        need(equal, "group", rule, self.world, here, settings.RANKS_PER_SERVER.name)
        return here if here < self.world else 0

    def need_one_server(self, what: str, why: str) -> None:
        """Raise ArgumentError if the group has several servers: ``what`` cannot run there, as "hierarchy" ``why``."""
        rule = "has {} ranks, {} per server; {} cannot run between servers, as comm_alg 'hierarchy' {}: use {}"
        servers, instead = self.ranks_per_server, "deep_ep.Buffer's dispatch and combine"
        need(not servers, "group", rule, self.world, servers, what, why, instead)

    def local_experts(self, experts: int) -> int:
        """Return L = E / W for E = ``experts``. Raises ArgumentError unless E is a multiple of W, at most 65536."""
        need_whole("num_experts", experts, self.world, MOST_EXPERTS)
        rule = "is {}; it must be a multiple of the {} ranks"
        need(experts % self.world == 0, "num_experts", rule, experts, self.world)
        return experts // self.world

    def dispatcher(self, experts: int) -> MC2Dispatcher:
        """Return a dispatcher over the V2 ops for E = ``experts``; between servers its comm_alg is "hierarchy"."""
        self.local_experts(experts)
        return MC2Dispatcher.from_group(self, experts, comm_alg="hierarchy" if self.ranks_per_server else "")


class Handle(tuple):  # type: ignore[type-arg]
    """Tuple of DeepEP's values for a call; its attribute ``call`` is the state that later calls with it need."""

    call: Any

    @classmethod
    def of(cls, call: Any, *values: Any) -> Handle:
        """Return the handle of ``call`` with these values."""
        made = cls(values)
        made.call = call
        return made


def call_of(handle: object, kind: type[R], function: str) -> R:
    """Return the state of a handle. Raises ArgumentError unless ``function`` returned the handle."""
    call: Any = handle.get("call") if isinstance(handle, dict) else getattr(handle, "call", None)
    need(isinstance(call, kind), "handle", "is a {}; pass the handle that {} returned", type(handle).__name__, function)
    return call  # type: ignore[no-any-return]


def need_whole(argument: str, value: object, least: int, most: int = 2**31 - 1) -> None:
    """Raise ArgumentError unless ``value`` is a whole number in least..most."""
    rule = "is {!r}; it must be a whole number of {}..{}"
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    need(whole and least <= value <= most, argument, rule, value, least, most)  # type: ignore[operator]


def refused(name: str, instead: str) -> Any:
    """Return a method ``name``, not supported here, that raises ArgumentError; ``instead``: what to use or know."""

    def method(*_: Any, **__: Any) -> Any:
        raise ArgumentError(f"method {name} is not supported; {instead}", argument=name)

    method.__name__, method.__doc__ = name, f"Raise ArgumentError: not supported; {instead}."
    return method


# ---- dispatch layout and window size


def dispatch_layout(
    place: BufferPlace, topk_idx: Tensor, experts: int, previous_event: Any, in_rank_dtype: torch.dtype = torch.bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the first four results of `Buffer.get_dispatch_layout`, the fourth with dtype ``in_rank_dtype``."""
    begin(previous_event)
    need_dims("topk_idx", topk_idx, 2, dtypes=(torch.int64, torch.int32))
    local, world = place.local_experts(experts), place.world
    ranks = torch.where(topk_idx >= 0, topk_idx // local, world).long()
    hit = torch.zeros(topk_idx.shape[0], world + 1, dtype=torch.bool, device=topk_idx.device)
    in_rank = hit.scatter_(1, ranks.clamp(max=world), True)[:, :world].contiguous()
    ids = torch.where((topk_idx >= 0) & (topk_idx < experts), topk_idx, experts).reshape(-1).long()
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    per_expert = counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))[:experts].contiguous()
    servers = None
    if place.ranks_per_server:
        servers = in_rank.view(-1, world // place.ranks_per_server, place.ranks_per_server).any(2)
        servers = servers.sum(0, dtype=torch.int32)
    return in_rank.sum(0, dtype=torch.int32), servers, per_expert, in_rank.to(in_rank_dtype)


def agreed_head(own: int, topk_idx: Tensor | None, experts: int, device: torch.device) -> Tensor:
    """Return ``(4,)`` int32: ``own`` (tokens); 1 + the flat position of the first invalid id, or 0; its two words."""
    tokens = torch.full((1,), own, dtype=torch.int32, device=device)
    if topk_idx is None:
        return torch.cat([tokens, tokens.new_zeros(3)])
    ids = torch.nn.functional.pad(topk_idx.reshape(-1).long(), (1, 0), value=-1)
    wrong = (ids < -1) | (ids >= experts)
    place = torch.where(wrong.any(), wrong.to(torch.uint8).argmax(), 0).reshape(1)
    return torch.cat([tokens, place.to(torch.int32), ids[place].view(torch.int32)])


def most_tokens(heads: Tensor, topk_idx: Tensor | None, experts: int) -> int:
    """Return the largest number of tokens of a rank. ``heads`` ``(W, 4)``: the ranks' `agreed_head`, read on the host.

    Raises InvalidExpertId, on every rank, for the invalid id of the first rank that has one.
    """
    table = heads.tolist()
    for rank, (_, place, low, high) in enumerate(table):
        if place and topk_idx is not None:
            token, k = divmod(place - 1, topk_idx.shape[1])
            expert_id = high * 2**32 + low % 2**32
            text = f"dispatch: rank {rank}, token {token}, k {k} has expert id {expert_id}; need -1 or 0..{experts - 1}"
            found = {"rank": rank, "token": token, "k": k, "expert_id": expert_id}
            raise InvalidExpertId(text, argument="topk_idx", **found)
    return max(int(words[0]) for words in table)


def most_tokens_of(place: BufferPlace, own: int, topk_idx: Tensor, experts: int) -> int:
    """Gather the ranks' heads and return `most_tokens`; ``own``: this rank's number of tokens. Collective."""
    return most_tokens(gather_rows(agreed_head(own, topk_idx, experts, topk_idx.device), place), topk_idx, experts)


@with_typed_errors
def get_low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Return the bytes of window per rank that low-latency dispatch and combine need, a multiple of 1 MiB.

    The arguments are the largest T of a rank, H, W and E; K is assumed to be min(32, E). HCCL_BUFFSIZE sets the window
    size. Raises ArgumentError if an argument is out of range. Source: DeepEP ``get_low_latency_rdma_size_hint``.
    """
    topk = min(plan.limits()["topk"], num_experts)
    return _window(num_ranks, num_experts, topk, hidden, num_max_dispatch_tokens_per_rank)


def _window(ranks: int, experts: int, topk: int, hidden: int, tokens: int) -> int:
    """Return the bytes of ASCEND_MOE_COMM_ALG's algorithm, else of the smaller; between servers of hierarchy."""
    asked = plan.Request(ranks, experts, topk, hidden, tokens, equal_batches=False)
    servers = plan.on_servers(ranks, "hierarchy", weights=True)
    if servers:
        return plan.window_need(replace(asked, **servers))["buffsize_mib"] << 20
    named = settings.COMM_ALG.text()
    algorithms = ("window", "direct") if named in ("", "auto") else (named,)
    needs = [plan.window_need(replace(asked, comm_alg=algorithm)) for algorithm in algorithms]
    return max(min(need[op] for need in needs) for op in ("dispatch_mib", "combine_mib")) << 20


@dataclass
class Config:
    """Configuration of DeepEP's kernels. Its numbers have no effect here; its methods return window sizes.

    They are num_sms, num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens, num_max_rdma_chunked_send_tokens
    and num_max_rdma_chunked_recv_tokens, as in DeepEP's ``Config``.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes of window per rank that normal dispatch and combine need on ``num_ranks`` ranks.

        Assumes rows of ``hidden_bytes``, the ops' largest T (4096) and the ids and weights of 32 experts per token,
        which add 8 bytes per expert to a row.
        """
        limits = plan.limits()
        row_bytes = hidden_bytes + 8 * limits["topk"]
        return _window(num_ranks, num_ranks, min(limits["topk"], num_ranks), -(-row_bytes // 2), limits["batch"])

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0 for any hidden_bytes and num_ranks: `get_nvl_buffer_size_hint`'s window serves other servers too."""
        return 0


# ---- the base class


class BufferBase:
    """Base of both Buffers: their group and options, and the calls that send no rows.

    Args:
        group: a process group (gloo: CPU tensors, hccl: NPU tensors), a DeviceMesh of one dimension, a group's name, a
            ``LocalCluster``'s name in a rank's thread; or the tuple (name, W, rank). Collective on a group's first use.
        num_nvl_bytes, num_rdma_bytes: stored as attributes; HCCL_BUFFSIZE sets the window size.
        low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl: no effect.

    W is at most 384, T at most 4096 per call, K at most 32. As in DeepEP dispatch and combine have no gradients: each
    is the other's backward. ``config`` and ``allocate_on_comm_stream`` have no effect; calls run on the current stream.
    Between servers normal mode uses comm_alg "hierarchy": a token's row is sent once to each server, which returns one
    rounded sum. Low-latency calls raise ArgumentError there, as hierarchy needs the weights in dispatch.
    """

    num_sms: int = 20
    explicitly_destroy = False
    dispatch: Any  # of each Buffer
    combine: Any

    def __init__(
        self, group: Group, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False
    ) -> None:
        self._place = BufferPlace.of_group(group)
        self.group, self.group_size, self.rank = group, self._place.world, self._place.rank
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self._pending = PendingCall.of(self._place)

    get_low_latency_rdma_size_hint = staticmethod(get_low_latency_rdma_size_hint)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: DeepEP's fp8 and low-latency features are supported."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Store new_num_sms as ``Buffer.num_sms``; only `get_dispatch_config` uses it. Raises ArgumentError if odd."""
        need(new_num_sms % 2 == 0, "new_num_sms", "is {}; it must be even", new_num_sms)
        BufferBase.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an EventOverlap that waits for the work launched on the current stream so far."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a `Config`, the same for any num_ranks; passing it to a call has no effect."""
        return Config(BufferBase.num_sms)

    get_combine_config = get_dispatch_config

    def destroy(self) -> None:
        """Raise ArgumentError if explicitly_destroy is False, else do nothing: the windows belong to the group."""
        rule = "is False, so there is nothing to destroy: do not call destroy"
        need(self.explicitly_destroy, "explicitly_destroy", rule)

    def get_comm_stream(self) -> Any:
        """Return the current stream, on which all calls run."""
        npu = getattr(torch, "npu", None)
        return torch.cpu.current_stream() if npu is None else npu.current_stream()

    get_local_buffer_tensor = _no_local_buffer = refused(
        "get_local_buffer_tensor", "ascend_moe.window_empty returns tensors in a window"
    )

    def internode_dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``dispatch`` with DeepEP's order of arguments: without num_worst_tokens, so that the tenth is config."""
        return self.dispatch(*args[:9], *((0, *args[9:]) if len(args) > 9 else ()), **kwargs)

    def internode_combine(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``combine`` with the same arguments."""
        return self.combine(*args, **kwargs)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing, whatever the arguments: no buffer must be cleaned between normal and low-latency calls."""

    low_latency_update_mask_buffer = refused("low_latency_update_mask_buffer", _LEAVING_OUT)
    low_latency_query_mask_buffer = refused("low_latency_query_mask_buffer", _LEAVING_OUT)
    low_latency_clean_mask_buffer = refused("low_latency_clean_mask_buffer", _LEAVING_OUT)
