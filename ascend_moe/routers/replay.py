"""Replay and capture of routing.

Given ids, ``(T, k)`` int16, int32 or int64, replace a router's choice; the weights are the router's own for these
experts, with their gradients. -1 is no expert: its weight is 0 and it is in no sum. So two models of different dtypes,
one that generates and one that trains, route each token to the same experts.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ascend_moe._tensors import FittedModule, need_values, runs_again
from ascend_moe.errors import ArgumentError, need, need_dims, need_one_of, need_shape, typed_methods, with_typed_errors

ID_DTYPES = (torch.int16, torch.int32, torch.int64)


def given_ids(ids: Tensor, tokens: int, k: int, experts: int) -> Tensor:
    """Return ids ``(T, k)`` as int64. Raises ArgumentError for other shapes or, on the CPU only, ids not in -1..E-1."""
    need_shape("ids", ids, (tokens, k), dtypes=ID_DTYPES)
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = (int(end) for end in ids.aminmax())
        need(low >= -1 and high < experts, "ids", "are {}..{}; they must be -1..{}", low, high, experts - 1)
    return ids.long()


def need_held(name: str, ids: Tensor, dtype: torch.dtype) -> None:
    """Raise ArgumentError, naming ``name``, if an id exceeds ``dtype``'s maximum; ids are checked on the CPU only."""
    most = torch.iinfo(dtype).max
    if torch.iinfo(ids.dtype).max > most and ids.device.type == "cpu" and not torch.compiler.is_compiling():
        highest = int(ids.max()) if ids.numel() else 0
        need(highest <= most, name, "contains id {}; {} holds ids up to {}: use a wider dtype", highest, dtype, most)


def taken(values: Tensor, ids: Tensor, absent: float = 0.0) -> Tensor:
    """Return the values ``(T, k)`` of ``(T, E)`` at given ids; ``absent`` where the id is -1."""
    return torch.where(ids >= 0, values.gather(1, ids.clamp(min=0)), absent)


def divided(weights: Tensor, eps: float = 0.0) -> Tensor:
    """Return weights ``(T, k)`` divided by their sum over k + eps; zeros if all are zeros, as with ids of -1."""
    total = weights.sum(-1, keepdim=True)
    return weights / (total + ((total == 0).to(total.dtype) + eps))


class RouterReplayAction(Enum):
    """Mode of a `RouterReplay` in the next forwards. Instead of a mode, None makes it inactive."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


@typed_methods
class RouterReplay:
    """Records the experts that one router chooses, or replaces them by given ids, depending on its action.

    REPLAY_FORWARD uses the ids that were set last. REPLAY_BACKWARD, for forwards that a backward recomputes, takes the
    ids of one `set_target_indices` per forward, oldest first. The static methods apply to all registered objects.

    Args:
        register: register it for the static methods, in order of creation; this keeps it alive until
            `clear_global_router_replay_instances`.

    Attributes:
        target_topk_idx, recorded_topk_idx: ``(T, k)``, or None.
        router_replay_action: a `RouterReplayAction`, or None.

    Raises (its methods):
        ArgumentError: a replay without ids, ids with a shape other than ``(T, k)``, or the wrong number of tensors.

    Source: Megatron-LM ``RouterReplay``.
    """

    global_router_replay_instances: list[RouterReplay] = []  # noqa: RUF012 - Megatron-LM's callers clear it

    def __init__(self, *, register: bool = True) -> None:
        self.target_topk_idx: Tensor | None = None
        self.recorded_topk_idx: Tensor | None = None
        self.router_replay_action: RouterReplayAction | None = None
        self.replay_backward_list: list[Tensor] = []
        self.static_buffer: Tensor | None = None
        if register:
            RouterReplay.global_router_replay_instances.append(self)

    @staticmethod
    def set_replay_data(all_layers_topk_indices: list[Tensor]) -> None:
        """Call `set_target_indices` of every registered RouterReplay (one per router), in order of creation.

        Raises ArgumentError unless all_layers_topk_indices has one ``(T, k)`` int16, int32 or int64 tensor for each.
        """
        there = RouterReplay.global_router_replay_instances
        rule = "has {} tensors for {} routers; pass one per router, in order of creation"
        need(len(all_layers_topk_indices) == len(there), "all_layers_topk_indices", rule,
             len(all_layers_topk_indices), len(there))  # fmt: skip
        for replay, ids in zip(there, all_layers_topk_indices, strict=True):
            replay.set_target_indices(ids)

    @staticmethod
    def get_recorded_data() -> list[Tensor | None]:
        """Return the recorded ids of every registered RouterReplay, ``(T, k)`` or None, in order of creation."""
        return [replay.recorded_topk_idx for replay in RouterReplay.global_router_replay_instances]

    @staticmethod
    def clear_global_indices() -> None:
        """Call `clear_indices` of every registered RouterReplay."""
        for replay in RouterReplay.global_router_replay_instances:
            replay.clear_indices()

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction) -> None:
        """Set the action of every registered RouterReplay to ``router_replay_action``."""
        for replay in RouterReplay.global_router_replay_instances:
            replay.set_router_replay_action(router_replay_action)

    @staticmethod
    def clear_global_router_replay_action() -> None:
        """Set the action of every registered RouterReplay to None, which makes it inactive."""
        for replay in RouterReplay.global_router_replay_instances:
            replay.clear_router_replay_action()

    @staticmethod
    def clear_global_router_replay_instances() -> None:
        """Unregister every RouterReplay. Call it before another model is built."""
        RouterReplay.global_router_replay_instances.clear()

    @staticmethod
    def set_global_static_buffers(static_buffer: Tensor) -> None:
        """Call `set_static_buffer` of the n-th registered RouterReplay, for every n, with ``static_buffer[:, n]``.

        Raises ArgumentError unless static_buffer is ``(max tokens, N, k)`` for N registered objects.
        """
        there = RouterReplay.global_router_replay_instances
        fits = static_buffer.dim() == 3 and static_buffer.shape[1] == len(there)
        need(fits, "static_buffer", "is {}; need (max tokens, {}, k)", static_buffer.shape, len(there))
        for place, replay in enumerate(there):
            replay.set_static_buffer(static_buffer[:, place])

    @staticmethod
    def clear_global_static_buffers() -> None:
        """Remove the buffer of every registered RouterReplay."""
        for replay in RouterReplay.global_router_replay_instances:
            replay.clear_static_buffer()

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Set the ids that replace the choices of the next forward, and of its recomputation by a backward.

        Raises ArgumentError unless ``topk_indices`` are ``(T, k)`` int16, int32 or int64.
        """
        need_dims("topk_indices", topk_indices, 2, dtypes=ID_DTYPES)
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> Tensor | None:
        """Return the ids ``(T, k)`` of the last recorded forward, or None."""
        return self.recorded_topk_idx

    def clear_indices(self) -> None:
        """Drop the recorded ids and the ids to be replayed."""
        self.recorded_topk_idx = self.target_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Set this object's action. Raises ArgumentError unless ``router_replay_action`` is a RouterReplayAction."""
        need_one_of("router_replay_action", router_replay_action, tuple(RouterReplayAction))
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Set this object's action to None, which makes it inactive."""
        self.router_replay_action = None

    def set_static_buffer(self, buffer: Tensor) -> None:
        """Copy recorded ids into ``buffer`` from now on, so that a captured graph can record them.

        Raises ArgumentError unless it is ``(max tokens, k)`` int16, int32 or int64.
        """
        need_dims("buffer", buffer, 2, dtypes=ID_DTYPES)
        self.static_buffer = buffer

    def clear_static_buffer(self) -> None:
        """Remove the buffer: recorded ids are then the router's own tensors."""
        self.static_buffer = None

    def next_ids(self) -> Tensor | None:
        """Return the ids ``(T, k)`` to replay in this forward, or None without a replay; REPLAY_BACKWARD removes them.

        Raises ArgumentError if ids are to be replayed and none are set.
        """
        if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            need(self.target_topk_idx is not None, "replay", "has no ids to replay; call set_target_indices")
            return self.target_topk_idx
        if self.router_replay_action is RouterReplayAction.REPLAY_BACKWARD:
            rule = "has no ids left for a backward: call set_target_indices once per forward"
            need(len(self.replay_backward_list) > 0, "replay", rule)
            return self.replay_backward_list.pop(0)
        return None

    def chose(self, ids: Tensor) -> None:
        """Record a router's choice ``ids`` ``(T, k)``, if the action is RECORD."""
        if self.router_replay_action is RouterReplayAction.RECORD and not runs_again():
            self.record_indices(ids)

    def record_indices(self, topk_indices: Tensor) -> None:
        """Record ids ``(T, k)``: store ``topk_indices``, or copy it into the static buffer.

        Raises ArgumentError for more tokens than the buffer has, another k, or on the CPU an id outside of the buffer's
        dtype. Rows of the buffer after the tokens are unchanged.
        """
        if self.static_buffer is None:
            self.recorded_topk_idx = topk_indices
            return
        tokens, most = topk_indices.shape[0], self.static_buffer.shape[0]
        need(tokens <= most, "topk_indices", "has {} tokens, the static buffer {}; make it larger", tokens, most)
        need_shape("topk_indices", topk_indices, (tokens, self.static_buffer.shape[1]))
        need_held("topk_indices", topk_indices, self.static_buffer.dtype)
        self.recorded_topk_idx = self.static_buffer[:tokens].copy_(topk_indices)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and ids of the experts to replay; without a replay those from default_compute_topk.

        Both are ``(T, k)``, for scores ``(T, E)`` and k = topk. default_compute_topk receives scores, topk, num_groups
        and group_topk. Raises ArgumentError if it is None and no ids are replayed, or if replayed ids do not fit.
        """
        ids = self.next_ids()
        if ids is not None:
            ids = given_ids(ids.to(scores.device), scores.shape[0], topk, scores.shape[1])
            return taken(scores, ids), ids
        if default_compute_topk is None:
            text = "default_compute_topk is None, but no ids are replayed: pass it"
            raise ArgumentError(text, argument="default_compute_topk")
        values, ids = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.chose(ids)
        return values, ids


class RouteCapture(FittedModule):
    """Stores the choices of a router's last steps in a ring buffer on the device. Reads nothing on the host.

    A step is one call, ``capture(ids)``, of a forward that is no recomputation. It works in torch.compile and captured
    graphs, since the position in the ring is counted on the device: each replay of a graph is a step. Layers pass
    logical ids, before any placement. It can be passed to vLLM's routers: ``router.set_capture_fn(capture)``.

    Args:
        max_tokens: most tokens per step.
        top_k: k.
        steps: number of stored steps.
        dtype: int16 (ids up to 32767) or int32.
        device: device of the ring.

    Attributes:
        ring: ``(steps, max_tokens, k)``, -1 after a step's tokens.
        tokens: ``(steps,)`` int32, tokens of each step.
        seen: ``(1,)`` int64, all steps so far; step n is at ``n % steps``.

    Raises:
        ArgumentError: a number below 1, another dtype; in a call: ids that are not ``(T <= max_tokens, k)`` integers,
            or on the CPU an id outside of ``dtype``'s range.
    """

    ring: Tensor
    tokens: Tensor
    seen: Tensor

    @with_typed_errors
    def __init__(
        self,
        max_tokens: int,
        top_k: int,
        *,
        steps: int = 1,
        dtype: torch.dtype = torch.int16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("max_tokens", max_tokens), ("top_k", top_k), ("steps", steps)):
            need(type(value) is int and value >= 1, name, "is {}; need a whole number of at least 1", value)
        need(dtype in (torch.int16, torch.int32), "dtype", "is {}; need torch.int16 or torch.int32", dtype)
        ring = torch.full((steps, max_tokens, top_k), -1, dtype=dtype, device=device)
        self.register_buffer("ring", ring, persistent=False)
        self.register_buffer("tokens", torch.zeros(steps, dtype=torch.int32, device=device), persistent=False)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64, device=device), persistent=False)

    def _new_buffer(self, name: str, like: Tensor) -> Tensor:
        return torch.full_like(like, -1 if name == "ring" else 0)

    @torch.no_grad()
    def forward(self, ids: Tensor) -> None:
        """Store ids ``(T, k)`` as the newest step, replacing the oldest.

        Raises ArgumentError for more tokens than max_tokens, another k, or on the CPU an id outside of the ring's
        dtype.
        """
        steps, most, top_k = self.ring.shape
        need_dims("ids", ids, 2, dtypes=ID_DTYPES)
        need_values(self, ids)
        fits = ids.shape[0] <= most and ids.shape[1] == top_k
        need(fits, "ids", "are {}; the capture takes up to {} tokens of {}", ids.shape, most, top_k)
        if runs_again():
            return
        need_held("ids", ids, self.ring.dtype)
        place = self.seen % steps
        step = nn.functional.pad(ids.to(self.ring.dtype), (0, 0, 0, most - ids.shape[0]), value=-1)
        self.ring.index_copy_(0, place, step[None])
        self.tokens.index_copy_(0, place, self.tokens.new_full((1,), ids.shape[0]))
        self.seen.add_(1)

    def last(self, steps: int | None = None) -> list[Tensor]:
        """Return the ids ``(T, k)`` of the last steps, oldest first, as copies; reads on the host.

        steps: how many at most; None: all. Raises ArgumentError if the ring cannot store that many.
        """
        seen, kept = int(self.seen), self.ring.shape[0]
        wanted = min(seen, kept if steps is None else steps)
        rule = "is {}; the ring stores {}: pass at most that, or make a capture with more steps"
        need(steps is None or 0 <= steps <= kept, "steps", rule, steps, kept)
        tokens = self.tokens.tolist()
        return [self.ring[n % kept, : tokens[n % kept]].clone() for n in range(seen - wanted, seen)]

    def clear(self) -> None:
        """Clear all steps, in the same memory."""
        self.ring.fill_(-1)
        self.tokens.zero_()
        self.seen.zero_()

    def extra_repr(self) -> str:
        """Return steps, tokens, k and dtype, for print(capture)."""
        return f"{self.ring.shape[0]} steps of {self.ring.shape[1]} x {self.ring.shape[2]} {self.ring.dtype}"


def replayed(replay: RouterReplay | None, route: Callable[[Tensor | None], tuple[Tensor, Tensor]]) -> Any:
    """Return weights and ids of ``route``, called with the ids to replay or None; ``replay`` may record its choice."""
    if replay is None:
        return route(None)
    weights, ids = route(replay.next_ids())
    replay.chose(ids)
    return weights, ids
