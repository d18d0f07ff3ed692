"""Records of the inputs and outputs of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

#: Terms of combine's sums that never travel, by the op's names; each is a field of ``RankInput``.
OWN_TERMS = ("shared_expert_x", "ori_x", "const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v")


@dataclass
class RankInput:
    """The tensors one EP rank passes to dispatch and combine (CPU tensors; BS may differ between ranks).

    x: (BS, H) bf16, fp16 or fp32. Combine does not read it.
    expert_ids: (BS, K) int32: -1 (none), 0..E-1, or from E on zero, copy and const experts, to which no row is sent.
    scales: (E, H) fp32 smooth scales, with quant_mode 2 only; None: rows are not multiplied.
    x_active_mask: (BS,) or (BS, K) bool; None: everything is active.
    expert_scales: (BS, K) fp32, the weights of combine; an empty tensor: combine adds rows without weights.
    shared_expert_x: (BS, H), or (a, b, H) with a * b = BS, in combine's dtype; added last with weight 1.
    ori_x: (BS, H), the rows of copy and const experts, in combine's dtype.
    const_expert_alpha_1, const_expert_alpha_2: (C,) or (C, H), in combine's dtype, for C const experts.
    const_expert_v: (C, H), in combine's dtype.
    """

    x: torch.Tensor
    expert_ids: torch.Tensor
    scales: torch.Tensor | None = None
    x_active_mask: torch.Tensor | None = None
    expert_scales: torch.Tensor | None = None
    shared_expert_x: torch.Tensor | None = None
    ori_x: torch.Tensor | None = None
    const_expert_alpha_1: torch.Tensor | None = None
    const_expert_alpha_2: torch.Tensor | None = None
    const_expert_v: torch.Tensor | None = None

    @property
    def local_addends(self) -> dict[str, torch.Tensor]:
        """Tensors of ``OWN_TERMS`` that are not None, by name."""
        return {name: tensor for name in OWN_TERMS if (tensor := getattr(self, name)) is not None}

    def shared_row(self, token: int) -> torch.Tensor | None:
        """Return the row of shared_expert_x for a token, (H,) fp32, or None without shared_expert_x."""
        if self.shared_expert_x is None:
            return None
        return self.shared_expert_x.detach().flatten(0, -2)[token].float()


@dataclass
class DispatchResult:
    """The defined parts of dispatch's outputs on one EP rank. R rows arrive; L local experts, W ranks.

    expand_x: (R, H) in x's dtype, or int8 when quantized.
    dynamic_scales: (R,) fp32, or None when unquantized.
    expand_scales: (R,) fp32, the weight of every row, or None when dispatch gets no expert_scales.
    expand_idx: (BS*K,) int32: number of this rank's earlier (token, k) with the same expert; 0 where not routed.
    assist_info: (R, 3) int32, row i's (source rank, token, k).
    expert_token_nums: (L,) int64, cumulative (type 0) or per expert (type 1).
    ep_recv_counts: (W*L,) int32, inclusive prefix sums over [local expert][source rank].
    tp_recv_counts: (tp_world_size,) int32.
    rows_sent: W ints, rows this rank sends to each owner, itself included.
    expert_ids: (BS, K) this rank's own ids, for the text of ``validate``.
    allocated: output name -> shape of the whole tensor that the operator allocates.
    """

    expand_x: torch.Tensor
    dynamic_scales: torch.Tensor | None
    expand_idx: torch.Tensor
    assist_info: torch.Tensor
    expert_token_nums: torch.Tensor
    ep_recv_counts: torch.Tensor
    tp_recv_counts: torch.Tensor
    rows_sent: list[int]
    expert_ids: torch.Tensor
    allocated: dict[str, tuple[int, ...]] = field(default_factory=dict)
    expand_scales: torch.Tensor | None = None


@dataclass(frozen=True)
class Fault:
    """An error in the ids of ``rank``, which the ops raise on every rank.

    Kind "InvalidExpertId" has token, k and expert_id; "RoutingOverflow" has owner, rows and capacity.
    """

    kind: str
    rank: int
    token: int | None = None
    k: int | None = None
    expert_id: int | None = None
    owner: int | None = None
    rows: int | None = None
    capacity: int | None = None

    def __str__(self) -> str:
        if self.kind == "InvalidExpertId":
            return f"InvalidExpertId: rank {self.rank}, token {self.token}, k {self.k}: id {self.expert_id}"
        return (
            f"RoutingOverflow: rank {self.rank} routes {self.rows} rows to rank {self.owner}; "
            f"the capacity is {self.capacity}"
        )


@dataclass(frozen=True)
class Traffic:
    """Bytes of rows, their lists and weights that an EP rank moves by MTE, without status blocks and counts.

    Attributes:
        dispatch_window_write, dispatch_window_read, combine_window_write, combine_window_read: to and from windows.
        expand_x_write: to expand_x.
        dispatch_window_read_slack: at most how many bytes more cores read with algorithm direct, reading some again.
        combine_window_read_slack: the same with algorithm window and contract v2: cores may read a row's trailer again.
    """

    dispatch_window_write: int
    dispatch_window_read: int
    expand_x_write: int
    combine_window_write: int
    combine_window_read: int
    dispatch_window_read_slack: int = 0
    combine_window_read_slack: int = 0


@dataclass(frozen=True)
class Comparison:
    """Result of `validate`.

    Attributes:
        ok: whether the defined parts of all outputs equal the reference, bit for bit.
        text: text to print.
        differences: one sentence for each tensor that differs.
    """

    ok: bool
    text: str
    differences: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Group:
    """Numbers that are equal on all ranks of a call: W, K, E, L = E / W and maxBS."""

    world: int
    topk: int
    moe_experts: int
    local_experts: int
    max_bs: int

    @property
    def capacity(self) -> int:
        """Maximum number of rows that one rank may send to another."""
        return self.max_bs * min(self.topk, self.local_experts)


def group_of(inputs: Sequence[RankInput], moe_expert_num: int, global_bs: int) -> Group:
    """Return W, K, E, L and maxBS of a call. Raises ValueError if E, K, the batches or a mask do not fit."""
    world = len(inputs)
    if world == 0 or moe_expert_num <= 0 or moe_expert_num % world:
        raise ValueError(f"moe_expert_num is {moe_expert_num}; it must be a positive multiple of the {world} ranks")
    topks = {int(given.expert_ids.shape[1]) for given in inputs}
    if len(topks) != 1:
        raise ValueError(f"the ranks disagree on K: {sorted(topks)}; expert_ids must be (BS, K) with one K")
    batches = [int(given.expert_ids.shape[0]) for given in inputs]
    if global_bs == 0 and len(set(batches)) != 1:
        raise ValueError(f"global_bs 0 means equal batches; they are {batches}: pass W * the largest batch")
    if global_bs % world or (global_bs and max(batches) > global_bs // world):
        rule = f"pass W * maxBS, a multiple of {world} of at least {world} * {max(batches)}"
        raise ValueError(f"global_bs is {global_bs}; {rule}")
    for rank, given in enumerate(inputs):
        mask = given.x_active_mask
        fits = (batches[rank],), tuple(given.expert_ids.shape)
        if mask is not None and tuple(mask.shape) not in fits:
            raise ValueError(f"rank {rank}: x_active_mask has shape {tuple(mask.shape)}; need {fits[0]} or {fits[1]}")
    max_bs = global_bs // world if global_bs else batches[0]
    return Group(world, topks.pop(), moe_expert_num, moe_expert_num // world, max_bs)


def active_pairs(given: RankInput) -> list[tuple[int, int, int]]:
    """Return (token, k, id) of every (token, k) that the mask does not exclude, token by token, also ids of -1."""
    mask = None if given.x_active_mask is None else given.x_active_mask.tolist()
    pairs = []
    for token, ids in enumerate(given.expert_ids.tolist()):
        for k, expert in enumerate(ids):
            if mask is None:
                active = True
            elif isinstance(mask[token], list):
                active = mask[token][k]
            else:
                active = mask[token]
            if active:
                pairs.append((token, k, expert))
    return pairs


def routed_pairs(given: RankInput, experts: int) -> list[tuple[int, int, int]]:
    """Return those of `active_pairs` whose id is that of a routed expert, 0..``experts``-1."""
    return [pair for pair in active_pairs(given) if 0 <= pair[2] < experts]
