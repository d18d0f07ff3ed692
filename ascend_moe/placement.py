"""Expert placement: contiguous ranges, copies of hot experts, load counters, the ranks of process groups.

Pure functions and counters; nothing here moves weights. A caller computes a placement, loads weights accordingly, and
maps the router's ids (logical experts) to copies (physical experts) with `remap` before dispatch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ascend_moe._tensors import narrow, on_the_host, runs_again
from ascend_moe.errors import need, need_dims, need_shape, with_typed_errors
from ascend_moe.experts.groups import COUNTS, as_counts

_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class ExpertPlacement:
    """Placement of ``num_experts`` experts, with expert e on rank ``e // local_experts``.

    Attributes:
        num_experts: E, a multiple of ranks.
        ranks: W.
    """

    num_experts: int
    ranks: int

    @classmethod
    def contiguous(cls, num_experts: int, ranks: int) -> ExpertPlacement:
        """Return the placement of E = num_experts experts in contiguous ranges of E / ranks.

        Raises ArgumentError if ``num_experts`` is no multiple of ``ranks``, or one of them is below 1.

        Source: SGLang EPMoE.
        """
        divides = num_experts >= 1 and ranks >= 1 and num_experts % ranks == 0
        need(divides, "num_experts", "is {}; it must be a multiple of the {} ranks", num_experts, ranks)
        return cls(num_experts, ranks)

    @property
    def local_experts(self) -> int:
        """L, experts per rank."""
        return self.num_experts // self.ranks

    def range_of(self, rank: int) -> tuple[int, int]:
        """Return the first and last expert of a rank, both inclusive. Raises ArgumentError for an unknown rank."""
        need(0 <= rank < self.ranks, "rank", "is {}; need 0..{}", rank, self.ranks - 1)
        return rank * self.local_experts, (rank + 1) * self.local_experts - 1

    def expert_map(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return ``(E,)`` int32 on ``device``: each expert's local index on ``rank``, or -1 for experts of other ranks.

        Raises ArgumentError for an unknown rank.
        """
        first, last = self.range_of(rank)
        experts = torch.arange(self.num_experts, dtype=torch.int32, device=device)
        return torch.where((experts >= first) & (experts <= last), experts - first, -1).to(torch.int32)


class Balance(NamedTuple):
    """Placement of the copies of all experts. Physical expert p is on rank ``p // (replicas / ranks)``.

    Attributes:
        physical_to_logical: ``(layers, replicas)`` int64: the logical expert of each physical expert.
        logical_to_physical: ``(layers, E, most copies)`` int64: the copies of each expert, ascending, padded with -1.
        replica_counts: ``(layers, E)`` int64: the number of copies of each logical expert.
    """

    physical_to_logical: torch.Tensor
    logical_to_physical: torch.Tensor
    replica_counts: torch.Tensor


@on_the_host
@with_typed_errors
def balance(load: torch.Tensor, replicas: int, ranks: int, groups: int = 1) -> Balance:
    """Replicate hot experts and distribute all copies so that the ranks' loads are balanced.

    Each further copy goes to the expert with the highest load per copy. Then the copies, in descending order of load,
    go to the least loaded rank that has room and no copy of this expert; if there is none, copies are exchanged so that
    no rank has an expert twice. Ranks are then numbered in descending order of load. Equal input gives equal output on
    every rank. Reads values on the host.

    Args:
        load: ``(layers, E)``, non-negative: rows per logical expert.
        replicas: copies of all experts together; a multiple of ranks, E to ``E * ranks / groups``.
        ranks: W.
        groups: number of groups of consecutive experts; each group stays on W / groups consecutive ranks (servers, for
            routers that choose groups first). Divides E and W. Groups, and the ranks in each, descend by load.

    Raises:
        ArgumentError: an argument breaks one of these rules.
    """
    need_dims("load", load, 2)
    layers, experts = load.shape
    divides = groups >= 1 and experts >= 1 and experts % groups == 0 and ranks % groups == 0
    need(divides, "groups", "is {}; it must divide the {} experts and the {} ranks", groups, experts, ranks)
    most = experts * ranks // groups
    fits = ranks >= 1 and replicas % ranks == 0 and experts <= replicas <= most
    need(fits, "replicas", "is {}; need a multiple of the {} ranks from {} to {}", replicas, ranks, experts, most)
    sound = bool((load.double().isfinite() & (load >= 0)).all())
    need(sound, "load", "contains a negative or non-finite value; rows per expert must be at least 0")
    members, places = experts // groups, ranks // groups
    share = load.detach().cpu().double().reshape(layers * groups, members)
    counts = _copies(share, replicas // groups, places)
    places_of, heat = _assigned(share / counts, counts, places, replicas // ranks)
    order = heat.argsort(dim=1, descending=True, stable=True)
    places_of = places_of.gather(1, order[..., None].expand_as(places_of)).reshape(layers, groups, replicas // groups)
    first = torch.arange(groups)[:, None] * members
    hottest = heat.amax(1).reshape(layers, groups).argsort(dim=1, descending=True, stable=True)
    physical = (places_of + first).gather(1, hottest[..., None].expand_as(places_of)).reshape(layers, replicas)
    counts = counts.reshape(layers, experts)
    return Balance(*(each.to(load.device) for each in (physical, _inverse(physical, counts), counts)))


def _copies(load: torch.Tensor, copies: int, most: int) -> torch.Tensor:
    """Return (rows, experts) int64: copies of each expert, 1 to ``most``, ``copies`` per row."""
    counts = torch.ones_like(load, dtype=torch.int64)
    row = torch.arange(load.shape[0])
    for _ in range(copies - load.shape[1]):
        each = (load / counts).masked_fill(counts == most, -1)
        # Tie break: the expert with the fewest copies.
        chosen = counts.masked_fill(each != each.amax(1, keepdim=True), most + 1).argmin(1)
        counts[row, chosen] += 1
    return counts


def _assigned(load: torch.Tensor, counts: torch.Tensor, ranks: int, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts by rank and place (rows, ranks, room) and the ranks' loads; ``load``: per copy."""
    rows, experts = load.shape
    heavy = load.argsort(dim=1, descending=True, stable=True)
    items = heavy.reshape(-1).repeat_interleave(counts.gather(1, heavy).reshape(-1)).reshape(rows, ranks * room)
    assigned = torch.empty(rows, ranks, room, dtype=torch.int64)
    heat, filled = torch.zeros(rows, ranks, dtype=torch.float64), torch.zeros(rows, ranks, dtype=torch.int64)
    holds = torch.zeros(rows, ranks, experts, dtype=torch.bool)
    row = torch.arange(rows)
    for expert in items.unbind(1):
        free = heat.masked_fill(filled == room, torch.inf)
        apart = free.masked_fill(holds[row, :, expert], torch.inf)  # may leave no rank for the last copies
        rank = torch.where(apart.amin(1, keepdim=True).isfinite(), apart, free).argmin(1)
        assigned[row, rank, filled[row, rank]] = expert
        filled[row, rank] += 1
        heat[row, rank] += load[row, expert]
        holds[row, rank, expert] = True
    for each in (holds.sum((1, 2)) < ranks * room).nonzero().squeeze(1).tolist():
        assigned[each] = torch.tensor(_apart(assigned[each].tolist(), load[each].tolist()))
        heat[each] = load[each][assigned[each]].sum(1)
    return assigned, heat


def _apart(ranks: list[list[int]], load: list[float]) -> list[list[int]]:
    """Exchange copies between ranks until no rank has an expert twice; return the experts of each rank.

    A duplicate copy goes to a rank without this expert, in exchange for a copy that is a duplicate there or missing
    here. Of all such exchanges the one that minimizes the larger load of the two ranks is taken.
    """
    for here, experts in enumerate(ranks):
        while len(set(experts)) < len(experts):
            heat = [sum(load[expert] for expert in own) for own in ranks]
            doubled = next(expert for expert in experts if experts.count(expert) > 1)
            changes = [
                (max(heat[here] - load[doubled] + load[other], heat[there] + load[doubled] - load[other]), there, other)
                for there, others in enumerate(ranks)
                if doubled not in others
                for other in others
                if other not in experts or others.count(other) > 1
            ]
            _, there, other = min(changes)
            experts[experts.index(doubled)], ranks[there][ranks[there].index(other)] = other, doubled
    return ranks


def _inverse(physical: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return (layers, E, most copies): the indices of each expert in ``physical``, padded with -1."""
    layers, experts = counts.shape
    logical, places = physical.sort(dim=1, stable=True)
    starts = counts.cumsum(1) - counts
    column = torch.arange(physical.shape[1]) - starts.gather(1, logical)
    table = torch.full((layers, experts, int(counts.max()) if layers else 1), -1)
    table[torch.arange(layers)[:, None], logical, column] = places
    return table


@on_the_host
def contiguous_balance(experts: int, layers: int = 1) -> Balance:
    """Return the placement of ``experts`` experts without copies: expert e is physical expert e in all ``layers``."""
    order = torch.arange(experts)
    return Balance(
        order.expand(layers, -1), order[:, None].expand(layers, -1, 1), torch.ones(layers, experts, dtype=torch.int64)
    )


@on_the_host
@with_typed_errors
def shrunk(found: Balance, ranks: int, alive: Sequence[int]) -> Balance:
    """Return the placement for the remaining ranks of a group, with physical experts renumbered for the smaller group.

    Each rank of ``alive`` keeps its physical experts. An expert whose copies were all on lost ranks has none left: its
    row of logical_to_physical is -1, `remap` maps its ids to -1, and no row is sent for them.

    Args:
        found: the placement of the original group.
        ranks: W of the original group, which divides its physical experts.
        alive: the result of ``ascend_moe.agree``: at least one original rank, ascending.

    Raises:
        ArgumentError: an argument breaks one of these rules.
    """
    replicas = found.physical_to_logical.shape[1]
    divides = ranks >= 1 and replicas % ranks == 0
    need(divides, "ranks", "is {}; it must divide the {} physical experts", ranks, replicas)
    fits = list(alive) == sorted(set(alive)) and len(alive) > 0 and alive[0] >= 0 and alive[-1] < ranks
    need(fits, "alive", "is {}; it must be ranks of 0..{}, ascending", list(alive), ranks - 1)
    layers, experts = found.replica_counts.shape
    left = found.physical_to_logical.reshape(layers, ranks, replicas // ranks)[:, list(alive)].flatten(1).cpu()
    counts = torch.zeros(layers, experts, dtype=torch.int64).scatter_add_(1, left, torch.ones_like(left))
    device = found.physical_to_logical.device
    return Balance(*(each.to(device) for each in (left, _inverse(left, counts), counts)))


@with_typed_errors
def remap(
    ids: torch.Tensor,
    table: torch.Tensor,
    token_index: torch.Tensor | None = None,
    *,
    source_rank: int | torch.Tensor | None = None,
    world_size: int = 0,
    replicas: int = 0,
) -> torch.Tensor:
    """Replace logical experts by one of their copies, chosen from these arguments alone.

    Ranks that see the same tokens (all-gather, all-reduce layers) choose the same copies if they number the tokens
    equally. Reads nothing on the host.

    Args:
        ids: ``(T, K)`` int32 or int64, logical experts; negative ids are unchanged. With replicas, id E + i of a zero,
            copy or const expert, which has no copies, becomes replicas + i.
        table: ``(E, C)`` int32 or int64: copies of each expert, padded with -1; one layer of
            `Balance.logical_to_physical`.
        token_index: ``(T,)`` int32 or int64, the number of each token: selects copy ``token_index % copies``
            (balance_mode 1 of npu_moe_update_expert, where it is the position in the batch).
        source_rank: source rank of all tokens or ``(T,)``: selects copy ``source_rank // ceil(world_size / copies)``
            (balance_mode 0). Instead of token_index.
        world_size: W, with source_rank.
        replicas: copies of all experts together, dispatch's number of experts; 0: all ids are below E.

    Returns:
        Physical experts with the shape and dtype of ids; -1 for an expert without copies.

    Raises:
        ArgumentError: an argument breaks one of these rules.
    """
    need_dims("ids", ids, 2, dtypes=_INDEX_DTYPES)
    need_dims("table", table, 2, dtypes=_INDEX_DTYPES)
    need((token_index is None) != (source_rank is None), "token_index", "or source_rank must be given, but not both")
    need(replicas >= 0, "replicas", "is {}; need the number of all copies, or 0", replicas)
    logical = ids.clamp(min=0, max=len(table) - 1 if replicas else None).long()
    copies = (table >= 0).sum(1).clamp(min=1)[logical]
    if token_index is not None:
        need_shape("token_index", token_index, (ids.shape[0],), dtypes=_INDEX_DTYPES)
        column = token_index[:, None] % copies
    else:
        need(world_size >= 1, "world_size", "is {}; with source_rank it must be at least 1", world_size)
        ranks = torch.as_tensor(source_rank, device=ids.device)
        column = ranks.reshape(-1, 1) // ((world_size + copies - 1) // copies)
    physical = torch.where(ids >= 0, table[logical, column], ids)
    if replicas:
        physical = torch.where(ids >= len(table), ids - len(table) + replicas, physical)
    return narrow("table", physical) if ids.dtype == torch.int32 else physical.to(ids.dtype)


@with_typed_errors
def eplb_table(table: torch.Tensor) -> torch.Tensor:
    """Return the table that ``npu_moe_update_expert`` takes: ``(E, C + 1)`` int32, number of copies, then the copies.

    Args:
        table: ``(E, C)``, as in `remap`; padding with -1 follows the copies. It becomes 0.

    Raises:
        ArgumentError: table is not 2-D int32 or int64.
    """
    need_dims("table", table, 2, dtypes=_INDEX_DTYPES)
    return narrow("table", torch.cat([(table >= 0).sum(1, keepdim=True), table.clamp(min=0)], 1))


class LoadCounter:
    """Rows received by this rank's experts, per layer, accumulated on their device.

    ``add`` reads nothing on the host and always writes to the same memory, so it can be captured in a graph. A forward
    that a backward recomputes (torch.utils.checkpoint) adds nothing.

    Args:
        layers: MoE layers of the model.
        local_experts: L, physical experts of this rank.
        device: device of dispatch's expert_token_nums.

    Attributes:
        counts: ``(layers, L)`` int64.

    Raises:
        ArgumentError: layers or local_experts is below 1.
    """

    def __init__(self, layers: int, local_experts: int, device: torch.device | str | None = None) -> None:
        for name, value in (("layers", layers), ("local_experts", local_experts)):
            need(value >= 1, name, "is {}; need at least 1", value)
        self.counts = torch.zeros(layers, local_experts, dtype=torch.int64, device=device)

    def add(self, layer: int, expert_token_nums: torch.Tensor, expert_token_nums_type: int = COUNTS) -> None:
        """Add the rows of one dispatch of a layer.

        Args:
            layer: 0..layers-1.
            expert_token_nums: ``(L,)`` int32 or int64, from dispatch.
            expert_token_nums_type: 1 counts, 0 running sums, as passed to dispatch.

        Raises:
            ArgumentError: an argument breaks one of these rules.
        """
        layers, experts = self.counts.shape
        need(0 <= layer < layers, "layer", "is {}; need 0..{}", layer, layers - 1)
        need_shape("expert_token_nums", expert_token_nums, (experts,), dtypes=_INDEX_DTYPES)
        if not runs_again():
            self.counts[layer].add_(as_counts(expert_token_nums, expert_token_nums_type))

    def reset(self) -> None:
        """Set all counts to zero."""
        self.counts.zero_()


@with_typed_errors
def logical_load(counts: torch.Tensor, physical_to_logical: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the load that `balance` takes: counts of physical experts summed per logical expert.

    Args:
        counts: ``(layers, replicas)`` int64: the `LoadCounter.counts` of all ranks side by side, in rank order.
        physical_to_logical: ``(layers, replicas)`` int64, `Balance.physical_to_logical`.
        num_experts: E.

    Returns:
        ``(layers, E)`` int64.

    Raises:
        ArgumentError: a shape or dtype is wrong.
    """
    need_dims("counts", counts, 2, dtypes=(torch.int64,))
    need_shape("physical_to_logical", physical_to_logical, tuple(counts.shape), dtypes=(torch.int64,))
    return counts.new_zeros(counts.shape[0], num_experts).scatter_add_(1, physical_to_logical, counts)


@on_the_host
@with_typed_errors
def rank_groups(order: str, sizes: Mapping[str, int]) -> dict[str, list[list[int]]]:
    """Return the ranks of every process group of a parallel layout.

    Args:
        order: axes joined by "-", fastest-varying first: "tp-cp-ep-dp-pp".
        sizes: ranks per axis, 1 for an axis that is left out. The world size is their product.

    Returns:
        The groups by the axes that vary within a group, in the order of ``order``: "tp", "ep", "tp-ep", ...; the ranks
        of a group ascend, and so do the first ranks of the groups.

    Raises:
        ArgumentError: an axis is repeated or unknown, or a size is below 1.

    Source: Megatron-LM ``RankGenerator``.
    """
    axes = order.split("-")
    need(len(set(axes)) == len(axes) and "" not in axes, "order", "is {!r}; need different axes joined by '-'", order)
    for name, size in sizes.items():
        need(name in axes, "sizes", "contains {!r}, which is not an axis of {!r}", name, order)
        need(size >= 1, "sizes", "contains {} ranks for {!r}; need at least 1", size, name)
    shape = [sizes.get(axis, 1) for axis in axes]
    # The first axis varies fastest, so it is the last dimension.
    ranks = torch.arange(math.prod(shape)).reshape(shape[::-1])
    groups = {}
    for length in range(1, len(axes) + 1):
        for chosen in itertools.combinations(range(len(axes)), length):
            inside = [len(axes) - 1 - axis for axis in reversed(chosen)]
            outside = [dim for dim in range(len(axes)) if dim not in inside]
            table = ranks.permute(outside + inside).reshape(-1, math.prod(shape[axis] for axis in chosen))
            groups["-".join(axes[axis] for axis in chosen)] = table.tolist()
    return groups


class RankGenerator:
    """Megatron-LM's interface to `rank_groups`, with an offset.

    Args:
        tp, ep, dp, pp, cp: ranks per axis; ep or cp must be 1.
        order: as in `rank_groups`, in upper or lower case. An axis that is left out has 1 rank.
        rank_offset: first rank of the layout.

    Attributes:
        world_size: ranks of the layout.
        order: the order with all five axes.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``RankGenerator``.
    """

    @with_typed_errors
    def __init__(self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0) -> None:
        need(ep == 1 or cp == 1, "ep", "is {} and cp {}; one of them must be 1: use two generators", ep, cp)
        self.tp, self.ep, self.dp, self.pp, self.cp, self.rank_offset = tp, ep, dp, pp, cp, rank_offset
        sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        axes = order.lower().split("-")
        for name, size in sizes.items():
            if name not in axes:
                need(size == 1, "order", "is {!r} without {}, which has {} ranks; add it", order, name, size)
                axes.append(name)
        self.order, self.world_size = "-".join(axes), math.prod(sizes.values())
        self._groups = rank_groups(self.order, sizes)

    @with_typed_errors
    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the groups whose ranks differ exactly in the axes of ``token``, such as "tp-dp".

        Raises ArgumentError for an unknown axis.
        """
        axes, asked = self.order.split("-"), token.split("-")
        need(set(asked) <= set(axes), "token", "is {!r}; need axes of {!r}", token, self.order)
        groups = self._groups["-".join(axis for axis in axes if axis in asked)]
        return [[rank + self.rank_offset for rank in group] for group in groups]


@with_typed_errors
def folded_groups(
    order: str, world: int, *, tp: int = 1, cp: int = 1, etp: int = 1, ep: int = 1, pp: int = 1
) -> tuple[dict[str, list[list[int]]], dict[str, list[list[int]]]]:
    """Return `rank_groups` of attention (tp, cp, dp, pp) and of the experts (etp as "tp", ep, edp as "dp", pp).

    Args:
        order: as in `rank_groups`, with "tp", "cp", "ep", "dp" and "pp".
        world: ranks of both layouts. tp, cp, etp, ep, pp: ranks per axis; dp and edp are derived.

    Raises:
        ArgumentError: tp * cp * pp or etp * ep * pp does not divide the world, or the pipeline groups of the two
            layouts differ: end the order with pp.

    Source: Megatron-LM ``initialize_model_parallel``.
    """
    made = []
    for name, one, two in (("tp * cp * pp", tp, cp), ("etp * ep * pp", etp, ep)):
        product = one * two * pp
        rule = "is {}; it must be a multiple of {} = {}"
        need(product >= 1 and world % product == 0, "world", rule, world, name, product)
        second = {"cp": two} if name.startswith("tp") else {"ep": two}
        made.append(rank_groups(order, {"tp": one, "pp": pp, "dp": world // product, **second}))
    same = sorted(made[0]["pp"]) == sorted(made[1]["pp"])
    need(same, "order", "is {!r}: attention and experts would have different pipeline groups; put pp last", order)
    return made[0], made[1]
