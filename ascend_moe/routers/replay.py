"""Routing that is given from outside, and routing that is handed out.

Ids that are given, ``(T, k)`` int16, int32 or int64, take the place of a router's choice; the weights are the router's
own for these experts, with their gradients. -1 is no expert: its weight is 0 and it has no part in a sum. So two
models of different dtypes, one that generates and one that trains, send each token to the same experts.
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
    """Returns ids ``(T, k)`` as int64; on the CPU their range is checked, on other devices nothing is read."""
    need_shape("ids", ids, (tokens, k), dtypes=ID_DTYPES)
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = (int(end) for end in ids.aminmax())
        need(low >= -1 and high < experts, "ids", "are {}..{}; they must be -1..{}", low, high, experts - 1)
    return ids.long()


def need_held(name: str, ids: Tensor, dtype: torch.dtype) -> None:
    """Raises ArgumentError for an id that ``dtype`` does not hold; on other devices than the CPU nothing is read."""
    most = torch.iinfo(dtype).max
    if torch.iinfo(ids.dtype).max > most and ids.device.type == "cpu" and not torch.compiler.is_compiling():
        highest = int(ids.max()) if ids.numel() else 0
        need(highest <= most, name, "has id {}; {} holds ids to {}: take a wider dtype", highest, dtype, most)


def taken(values: Tensor, ids: Tensor, absent: float = 0.0) -> Tensor:
    """Returns the values ``(T, k)`` of ``(T, E)`` at given ids; ``absent`` where the id is -1."""
    return torch.where(ids >= 0, values.gather(1, ids.clamp(min=0)), absent)


def divided(weights: Tensor, eps: float = 0.0) -> Tensor:
    """Returns weights divided by their sum + eps; zeros where all are zeros, as those of ids of -1."""
    total = weights.sum(-1, keepdim=True)
    return weights / (total + ((total == 0).to(total.dtype) + eps))


class RouterReplayAction(Enum):
    """Says what a `RouterReplay` does in the next forwards; without one it does nothing."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


@typed_methods
class RouterReplay:
    """Records what one router chooses, or gives it what to choose. The static methods do it for all at once.

    REPLAY_FORWARD gives the ids that were set last. REPLAY_BACKWARD gives those that were set first and have not been
    given so yet: for forwards that a backward computes anew, one for each `set_target_indices`, in their order.

    Args:
        register: the static methods reach it, in the order in which the objects were made. They keep it alive until
            `clear_global_router_replay_instances`.

    Attributes:
        target_topk_idx, recorded_topk_idx: ``(T, k)``, or None.
        router_replay_action: a `RouterReplayAction`, or None.

    Raises (its methods):
        ArgumentError: a replay without ids, ids of another shape than ``(T, k)``, or another number of tensors than of
            objects.

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
        """Sets the ids of every object, ``(T, k)`` each, in the order in which the objects were made.

        Raises:
            ArgumentError: all_layers_topk_indices has more or fewer tensors than there are objects.
        """
        there = RouterReplay.global_router_replay_instances
        rule = "has {} tensors for {} routers; give one for each, in the order in which the routers were made"
        need(len(all_layers_topk_indices) == len(there), "all_layers_topk_indices", rule,
             len(all_layers_topk_indices), len(there))  # fmt: skip
        for replay, ids in zip(there, all_layers_topk_indices, strict=True):
            replay.set_target_indices(ids)

    @staticmethod
    def get_recorded_data() -> list[Tensor | None]:
        """Returns what every object has recorded, ``(T, k)`` or None."""
        return [replay.recorded_topk_idx for replay in RouterReplay.global_router_replay_instances]

    @staticmethod
    def clear_global_indices() -> None:
        """Calls `clear_indices` of every object."""
        for replay in RouterReplay.global_router_replay_instances:
            replay.clear_indices()

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction) -> None:
        """Sets what every object does: ``router_replay_action``."""
        for replay in RouterReplay.global_router_replay_instances:
            replay.set_router_replay_action(router_replay_action)

    @staticmethod
    def clear_global_router_replay_action() -> None:
        """Makes every object do nothing."""
        for replay in RouterReplay.global_router_replay_instances:
            replay.clear_router_replay_action()

    @staticmethod
    def clear_global_router_replay_instances() -> None:
        """Forgets all objects: call it before another model is built."""
        RouterReplay.global_router_replay_instances.clear()

    @staticmethod
    def set_global_static_buffers(static_buffer: Tensor) -> None:
        """Sets the memory of every object: its part of ``static_buffer`` ``(max tokens, objects, k)``.

        Raises ArgumentError where it has another shape.
        """
        there = RouterReplay.global_router_replay_instances
        fits = static_buffer.dim() == 3 and static_buffer.shape[1] == len(there)
        need(fits, "static_buffer", "is {}; need (max tokens, {}, k)", static_buffer.shape, len(there))
        for place, replay in enumerate(there):
            replay.set_static_buffer(static_buffer[:, place])

    @staticmethod
    def clear_global_static_buffers() -> None:
        """Takes the memory from every object."""
        for replay in RouterReplay.global_router_replay_instances:
            replay.clear_static_buffer()

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Sets the ids of the next forward, and of the forward that its backward computes anew.

        Raises ArgumentError unless ``topk_indices`` are ``(T, k)`` int16, int32 or int64.
        """
        need_dims("topk_indices", topk_indices, 2, dtypes=ID_DTYPES)
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> Tensor | None:
        """Returns the ids ``(T, k)`` of the last recorded forward, or None."""
        return self.recorded_topk_idx

    def clear_indices(self) -> None:
        """Forgets what was recorded and what was set."""
        self.recorded_topk_idx = self.target_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Sets what this object does. Raises ArgumentError unless ``router_replay_action`` is a RouterReplayAction."""
        need_one_of("router_replay_action", router_replay_action, tuple(RouterReplayAction))
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Makes this object do nothing."""
        self.router_replay_action = None

    def set_static_buffer(self, buffer: Tensor) -> None:
        """Records into ``buffer`` from now on, which a captured graph may hold.

        Raises ArgumentError unless it is ``(max tokens, k)`` int16, int32 or int64.
        """
        need_dims("buffer", buffer, 2, dtypes=ID_DTYPES)
        self.static_buffer = buffer

    def clear_static_buffer(self) -> None:
        """Records tensors as they come again."""
        self.static_buffer = None

    def next_ids(self) -> Tensor | None:
        """Returns the ids that this forward takes, or None where the router chooses; REPLAY_BACKWARD uses them up.

        Raises ArgumentError where ids are to be replayed and none are set.
        """
        if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            need(self.target_topk_idx is not None, "replay", "has no ids to replay; call set_target_indices")
            return self.target_topk_idx
        if self.router_replay_action is RouterReplayAction.REPLAY_BACKWARD:
            rule = "has given the ids of every set_target_indices to a backward; set them for each forward"
            need(len(self.replay_backward_list) > 0, "replay", rule)
            return self.replay_backward_list.pop(0)
        return None

    def chose(self, ids: Tensor) -> None:
        """Takes note of a router's own choice ``ids`` ``(T, k)``, where the action is RECORD."""
        if self.router_replay_action is RouterReplayAction.RECORD and not runs_again():
            self.record_indices(ids)

    def record_indices(self, topk_indices: Tensor) -> None:
        """Records ids ``(T, k)``: keeps ``topk_indices``, or copies it into the static buffer.

        Raises ArgumentError where it has more tokens than the buffer, another k, or on the CPU an id that the buffer's
        dtype does not hold. Rows of the buffer behind the tokens stay as they are.
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
        """Returns scores and ids ``(T, k)`` of scores ``(T, E)``: those given, or default_compute_topk's.

        default_compute_topk gets scores, topk, num_groups and group_topk. Raises ArgumentError where it is None and no
        ids are replayed, or given ids do not fit.
        """
        ids = self.next_ids()
        if ids is not None:
            ids = given_ids(ids.to(scores.device), scores.shape[0], topk, scores.shape[1])
            return taken(scores, ids), ids
        if default_compute_topk is None:
            text = "default_compute_topk is None; it chooses where no ids are replayed: give it"
            raise ArgumentError(text, argument="default_compute_topk")
        values, ids = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.chose(ids)
        return values, ids


class RouteCapture(FittedModule):
    """Keeps the choices of the last steps of one router in a ring of device memory. Nothing is read on the host.

    A step is one call, ``capture(ids)``, of a forward that no backward runs again. It is safe in torch.compile and in
    a captured graph, since the place in the ring is counted on the device: each replay of a graph is a step. A layer
    hands out logical ids, before any placement. vLLM's routers take it as it is: ``router.set_capture_fn(capture)``.

    Args:
        max_tokens: most tokens of a step.
        top_k: k.
        steps: that are kept.
        dtype: int16 (ids up to 32767) or int32.
        device: of the ring.

    Attributes:
        ring: ``(steps, max_tokens, k)``, -1 behind a step's tokens.
        tokens: ``(steps,)`` int32, tokens of each step.
        seen: ``(1,)`` int64, all steps so far; step n is at ``n % steps``.

    Raises:
        ArgumentError: a number below 1, another dtype; in a call: ids that are not ``(T <= max_tokens, k)`` integers,
            or on the CPU an id that ``dtype`` does not hold.
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
        """Keeps ids ``(T, k)`` as the newest step, in place of the oldest.

        Raises ArgumentError where they have more tokens than a step, another k, or on the CPU an id that the ring's
        dtype does not hold.
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
        """Returns the ids ``(T, k)`` of the last steps, the newest last, as copies; reads on the host.

        steps: how many; None: all. Raises ArgumentError where the ring keeps fewer.
        """
        seen, kept = int(self.seen), self.ring.shape[0]
        wanted = min(seen, kept if steps is None else steps)
        rule = "is {}; the ring keeps {}"
        need(steps is None or 0 <= steps <= kept, "steps", rule, steps, kept)
        tokens = self.tokens.tolist()
        return [self.ring[n % kept, : tokens[n % kept]].clone() for n in range(seen - wanted, seen)]

    def clear(self) -> None:
        """Forgets all steps, in the same memory."""
        self.ring.fill_(-1)
        self.tokens.zero_()
        self.seen.zero_()

    def extra_repr(self) -> str:
        """Steps, tokens, k and dtype, for print(capture)."""
        return f"{self.ring.shape[0]} steps of {self.ring.shape[1]} x {self.ring.shape[2]} {self.ring.dtype}"


def replayed(replay: RouterReplay | None, route: Callable[[Tensor | None], tuple[Tensor, Tensor]]) -> Any:
    """Returns ``route(ids)``: weights and ids, with the ids that replay gives; lets it record them."""
    if replay is None:
        return route(None)
    weights, ids = route(replay.next_ids())
    replay.chose(ids)
    return weights, ids
