"""Defines a strategy, and the names under which a Buffer finds strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from ascend_moe.dispatchers import AllToAllDispatcher
from ascend_moe.errors import need_one_of
from ascend_moe.interop.deep_ep.events import EventOverlap
from ascend_moe.interop.deep_ep.place import BufferPlace, Group

S = TypeVar("S", bound="EPCommStrategy")

# Those of sgl-kernel-npu; its MX formats are of the 950 series and refused here.
VALID_QUANT_MODES = frozenset(
    ("bf16", "int8", "mx_fp8_e4m3", "mx_fp8_e5m2", "pertoken_fp8_e4m3", "mx_fp4_e2m1"),
)


class NormalStrategy:
    """Names of ``normal_strategy``: the window ops, or torch.distributed's all-to-all."""

    DEFAULT, ALLTOALL = "default", "alltoall"

    @classmethod
    def get_all_strategies(cls) -> list[str]:
        """Both names."""
        return [cls.DEFAULT, cls.ALLTOALL]


class LowLatencyStrategy:
    """Names of ``low_latency_strategy``: default and ops are the window ops."""

    DEFAULT, OPS, ALLTOALL = "default", "ops", "alltoall"

    @classmethod
    def get_all_strategies(cls) -> list[str]:
        """The three names."""
        return [cls.DEFAULT, cls.OPS, cls.ALLTOALL]


class StrategyMap:
    """Maps DEEP_USE_MODE to the normal and the low-latency strategy."""

    strategy_map: ClassVar[dict[str, tuple[str, str]]] = {
        "default": (NormalStrategy.DEFAULT, LowLatencyStrategy.DEFAULT),
        "ops": (NormalStrategy.DEFAULT, LowLatencyStrategy.OPS),
        "alltoall": (NormalStrategy.ALLTOALL, LowLatencyStrategy.ALLTOALL),
    }

    @classmethod
    def get_strategy(cls, deep_mode: str) -> tuple[str, str]:
        """The two names. Raises ArgumentError for another mode."""
        need_one_of("DEEP_USE_MODE", deep_mode.lower(), cls.strategy_map)
        return cls.strategy_map[deep_mode.lower()]


class EPCommStrategy(ABC):
    """Sends and brings home by one means.

    Args:
        runtime: ``Runtime`` of the Buffer, or None.
        group: as ``Buffer``'s. Looked at when it is needed: then the group's windows are opened, collectively.

    A class of your own takes these two by name, and is registered under a name of yours.
    """

    def __init__(self, runtime: Any = None, group: Group | None = None) -> None:
        self.runtime, self.group = runtime, group

    @cached_property
    def place(self) -> BufferPlace:
        """Returns this rank's place: the runtime's, or else by the group."""
        return self.runtime.place if self.runtime is not None else BufferPlace.of_group(self.group)  # type: ignore[arg-type]

    @property
    def group_name(self) -> str:
        """``group_ep`` for the ops."""
        return self.place.group_ep

    @property
    def group_size(self) -> int:
        """W."""
        return self.place.world

    @property
    def rank(self) -> int:
        """Returns this rank, 0..W-1."""
        return self.place.rank

    @abstractmethod
    def get_name(self) -> str:
        """The name under which it is registered."""

    @abstractmethod
    def get_supported_modes(self) -> list[str]:
        """Lists those of "normal" and "low_latency" that it serves."""

    def alltoall(self, experts: int) -> AllToAllDispatcher:
        """The dispatcher of all-to-all."""
        return AllToAllDispatcher(self.place if self.group is None else self.group, experts)


class NormalEPCommStrategy(EPCommStrategy):
    """Serves normal mode."""

    def get_supported_modes(self) -> list[str]:
        """Normal mode alone."""
        return ["normal"]

    @abstractmethod
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """As ``Buffer``'s, with whether a token goes to a rank as int32."""

    @abstractmethod
    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: object = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        quant_mode: str | None = None,
    ) -> Any:
        """Send each (token, expert) row to the expert's rank.

        Args:
            x: ``(T, H)`` bf16, or a tuple of it and a tensor whose dtype int8 asks for int8 rows.
            quant_mode: "bf16", "int8", "pertoken_fp8_e4m3", or None: by x, else by DEEP_NORMAL_MODE_USE_INT8_QUANT.
            dispatch_wait_recv_cost_stats: ``(W,)`` int32 or int64 on the CPU; the microseconds that this call waited
                for each source rank are added.
            others: as ``Buffer``'s; handle must be None, num_worst_tokens 0.

        Returns:
            rows ``(n, H)``, quantized a tuple of them and their scales; ids and weights ``(n, K)``, -1 and 0 but at
            the row's own k; rows of each local expert as a list; the handle; the event.

        Collective. Raises:
            ArgumentError: a rule above is broken. InvalidExpertId: on every rank; an id is none. Others: as the ops.
        """

    @abstractmethod
    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: object = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        combine_send_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Bring rows home, where those of a token are added with dispatch's topk_weights; topk_weights has no effect.

        Returns:
            ``(T, H)``: fp32 sums, k ascending, one rounding; dispatch's topk_weights; the event.
        """


class LowLatencyEPCommStrategy(EPCommStrategy):
    """Serves low-latency mode."""

    def get_supported_modes(self) -> list[str]:
        """Low latency alone."""
        return ["low_latency"]

    @abstractmethod
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        use_mxfp4: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        topk_weights: Tensor | None = None,
        quant_mode: str | None = None,
    ) -> tuple[Any, Tensor, tuple[Any, ...], EventOverlap, Callable[[], None]]:
        """Send each (token, expert) row to the expert's rank.

        Args:
            use_fp8: in a Buffer without quant_mode: int8 rows. use_ue8m0, use_mxfp4: must be False there.
            topk_weights: for strategy "ops" in its handle. Others: as ``Buffer``'s.

        Returns:
            packed rows, quantized a tuple of them and their scales; rows of each local expert ``(L,)`` int64; the
            handle; the event; a hook that does nothing.

        Collective. Raises:
            ArgumentError: a rule above is broken. InvalidExpertId: on every rank; an id is none. Others: as the ops.
        """

    @abstractmethod
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None]]:
        """Bring packed rows home, where those of a token are added with its weights.

        Returns:
            ``(T, H)``: fp32 sums, k ascending, one rounding; the event; a hook that does nothing.
        """


_normal: dict[str, type[NormalEPCommStrategy]] = {}
_low_latency: dict[str, type[LowLatencyEPCommStrategy]] = {}


def _registering(classes: dict[str, type[Any]], name: str) -> Callable[[type[S]], type[S]]:
    def register(cls: type[S]) -> type[S]:
        classes[name] = cls
        return cls

    return register


def register_normal_strategy(name: str) -> Callable[[type[S]], type[S]]:
    """Decorator: ``Buffer(normal_strategy=name)`` makes an object of this class, no longer of an earlier one."""
    return _registering(_normal, name)


def register_low_latency_strategy(name: str) -> Callable[[type[S]], type[S]]:
    """Decorator: ``Buffer(low_latency_strategy=name)`` makes an object of this class, no longer of an earlier one."""
    return _registering(_low_latency, name)


def get_normal_strategy(name: str) -> type[NormalEPCommStrategy]:
    """The class of this name. Raises ArgumentError where there is none."""
    need_one_of("normal_strategy", name, _normal)
    return _normal[name]


def get_low_latency_strategy(name: str) -> type[LowLatencyEPCommStrategy]:
    """The class of this name. Raises ArgumentError where there is none."""
    need_one_of("low_latency_strategy", name, _low_latency)
    return _low_latency[name]
