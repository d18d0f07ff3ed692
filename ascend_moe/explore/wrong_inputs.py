"""Wrong inputs of one or two ranks in one op of a program, and the expected result of every call.

Each kind returns the tensors that replace a rank's own, and the error that the rules of the ops specify for them: its
class and the words that name rank, position and value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ascend_moe._tensors import id_text
from ascend_moe.reference.cases import BAD_IDS, Case
from ascend_moe.reference.records import DispatchResult, RankInput

Tensors = dict[str, torch.Tensor]
_CHUNK = 512  # routed tokens, and source indices, in UB at a time (kChunkPairs)
_MOST = 2**31 - 1
_BLOCK_WORDS = 8
_WORDS = ("source rank", "token", "k")  # of a source index


@dataclass(frozen=True)
class ExpectedResult:
    """Expected result of a call: name of the error's class and a part of its message; "": no error."""

    error: str = ""
    words: str = ""


RIGHT = ExpectedResult()


@dataclass(frozen=True)
class FaultyCall:
    """The call of an op on ``rank``, for which the functions in KINDS make wrong inputs and the error to expect.

    ``results``: right results of dispatch, by rank. ``direct``: the algorithm is direct. ``rng`` draws what is wrong.
    """

    case: Case
    results: Sequence[DispatchResult]
    rank: int
    by_source: bool  # combine takes source indices
    direct: bool
    rng: np.random.Generator

    @property
    def inputs(self) -> RankInput:
        """The rank's right inputs."""
        return self.case.inputs[self.rank]

    @property
    def index(self) -> str:
        """Name of combine's argument with the positions of rows, which differs between V1 and V2."""
        return "expand_idx" if self.case.contract == 1 else "assist_info_for_combine"

    @property
    def topk(self) -> int:
        """Number of experts per token, K."""
        return self.case.topk

    @property
    def most_tokens(self) -> int:
        """Largest batch of a rank: global_bs / W, or without global_bs the tokens of this rank."""
        return self.case.global_bs // self.case.world or len(self.inputs.x)

    @property
    def capacity(self) -> int:
        """Maximum number of rows that one rank may send to another."""
        return self.most_tokens * min(self.topk, self.case.local)

    def active(self) -> torch.Tensor:
        """Return which (token, k) the mask makes active, (BS, K) bool."""
        mask, ids = self.inputs.x_active_mask, self.inputs.expert_ids
        if mask is None:
            return torch.ones(ids.shape, dtype=torch.bool)
        return mask if mask.dim() == 2 else mask[:, None].expand(ids.shape)

    def routed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return which (token, k) are sent to an expert with ``ids`` (BS, K): active, of a valid id; (BS, K) bool."""
        return self.active() & (ids >= 0) & (ids < self.case.experts)

    def totals(self, ids: torch.Tensor) -> list[int]:
        """Return for each expert the number of tokens that ``ids`` (BS, K) send to it."""
        counts: list[int] = torch.bincount(ids[self.routed(ids)].long(), minlength=self.case.experts).tolist()
        return counts

    def compared(self) -> list[int]:
        """Return the experts in the order in which combine compares their counts: hierarchy's own server first."""
        share, local = self.case.share, self.case.local
        away = [bool(share) and expert // local // share != self.rank // share for expert in range(self.case.experts)]
        return sorted(range(self.case.experts), key=away.__getitem__)

    def place(self, count: int) -> int:
        """Draw an index below ``count``: often the first, the last, or one at the ends of cores' shares and chunks."""
        shares = {core * count // self.case.cores for core in range(self.case.cores)}
        chunks = {at for share in shares for at in (share, *range(share + _CHUNK - 1, share + _CHUNK + 2))}
        borders = sorted({count - 1, *(at for at in chunks if 0 < at < count)} if count > _CHUNK else {0, count - 1})
        return int(self.rng.choice(borders) if self.rng.integers(4) else self.rng.integers(count))

    def pick(self, mask: torch.Tensor) -> int | None:
        """Draw the flat index of a True element of ``mask``; None: it has none."""
        numbers = mask.flatten().nonzero().flatten().tolist()
        return int(numbers[self.place(len(numbers))]) if numbers else None


Wrong = tuple[Tensors, ExpectedResult]


def first_wrong_place(call: FaultyCall, ids: torch.Tensor) -> ExpectedResult:
    """Return combine's error with ``ids`` other than dispatch's, for the first expert with another count, or RIGHT."""
    sent, returns = call.totals(call.inputs.expert_ids), call.totals(ids)
    for expert in call.compared():
        if returns[expert] != sent[expert]:
            return returned(call.rank, expert, returns[expert], sent[expert])
    return RIGHT


def returned(rank: int, expert: int, ours: int, theirs: int) -> ExpectedResult:
    """Return combine's error for an ``expert`` that returns ``theirs`` rows to ``rank``, which expects ``ours``."""
    words = f"expert {expert} returns {theirs} rows to rank {rank}, whose expert_ids and mask route {ours} to it"
    return ExpectedResult("RoutingMismatch", words)


def _bad_ids(call: FaultyCall) -> Wrong | None:
    """Up to three invalid ids; the error names the first."""
    ids, active = call.inputs.expert_ids.clone(), call.active()
    end = call.case.experts + call.case.special.total
    for _ in range(1 + int(call.rng.integers(3))):
        pair = call.pick(active)
        if pair is None:
            return None
        ids.view(-1)[pair] = int(call.rng.choice([*BAD_IDS, end]))
    bad = active & ((ids < -1) | (ids >= end))
    token, k = bad.nonzero()[0].tolist()
    words = f"rank {call.rank}, token {token}, k {k} has expert id {id_text(int(ids[token, k]))};"
    return {"expert_ids": ids}, ExpectedResult("InvalidExpertId", words)


def _overflow(call: FaultyCall) -> Wrong | None:
    """Route most tokens to one owner or two, or each token to all experts of one and to one of them twice."""
    ids, local = call.inputs.expert_ids.clone(), call.case.local
    once = 0 < len(ids) == call.most_tokens and bool(call.active().all()) and bool(call.rng.integers(2))
    for owner in call.rng.integers(call.case.world, size=1 + int(call.rng.integers(2))):
        experts = int(owner) * local + torch.arange(local)
        if once:
            ids[ids // local == int(owner)] = -1
            ids[:, :local] = experts
            ids[call.place(ids.numel()) // call.topk, local] = experts[0]
            continue
        for token in range(len(ids)):
            if call.rng.integers(8):
                ids[token] = experts[(torch.arange(call.topk) + token) % local]
    totals = call.totals(ids)
    for owner in range(call.case.world):
        rows = sum(totals[owner * local : (owner + 1) * local])
        if rows > call.capacity:
            words = f"rank {call.rank} routes {rows} rows to rank {owner}, its capacity"
            return {"expert_ids": ids}, ExpectedResult("RoutingOverflow", words)
    return None


def _counts(call: FaultyCall) -> Wrong | None:
    """Count that fall, that are more than the rows of expand_x, or too many of one source."""
    result, world = call.results[call.rank], call.case.world
    ends, most = result.ep_recv_counts.clone(), result.allocated["expand_x"][0]
    slot = call.place(len(ends))
    match int(call.rng.integers(4)):
        case 0:
            ends[slot] = int(call.rng.choice([-1, -(2**31), (int(ends[slot - 1]) if slot else 0) - 1]))
        case 1:
            ends[-1] = int(call.rng.choice([most + 1, _MOST]))
        case 2:
            ends[slot] = int(call.rng.choice([most + 1, _MOST]))
        case _:
            ends[:slot], ends[slot:] = 0, min(call.capacity + 1, most)
    before = 0
    for at, end in enumerate(ends.tolist()):
        if not before <= end <= most:
            words = f"ep_send_counts of rank {call.rank} is {end} at element {at}:"
            return {"ep_send_counts": ends}, ExpectedResult("ArgumentError", words)
        before = end
    counts = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype)).view(-1, world).sum(0).tolist()
    for source, rows in enumerate(counts):
        if rows > call.capacity:
            words = f"ep_send_counts of rank {call.rank} has {rows} rows of source rank {source},"
            return {"ep_send_counts": ends}, ExpectedResult("ArgumentError", words)
    return None


def _source_index(call: FaultyCall) -> Wrong | None:
    """An invalid word, or in direct a row at another position than in dispatch; hierarchy reads no source indices."""
    if call.case.share:
        return _records(call)
    sources = call.results[call.rank].assist_info.clone()
    rows, limits = len(sources), (call.case.world, call.most_tokens, call.topk)
    if not call.by_source or not rows:
        return None
    row = call.place(rows)
    change = int(call.rng.integers(4 if call.direct else 1))
    if change == 0:
        word = int(call.rng.integers(3))
        sources[row, word] = int(call.rng.choice([limits[word], -1, _MOST]))
    elif change == 1:
        sources[row, 0] = (int(sources[row, 0]) + 1) % call.case.world
    else:  # that of the next row, or both swapped
        other = row - 1 if row else min(1, rows - 1)
        before = sources[row].clone()
        sources[row] = sources[other]
        if change == 2:
            sources[other] = before
    found = first_wrong_source_index(call, sources, limits)
    return ({call.index: sources.flatten()}, found) if found != RIGHT else None


def _records(call: FaultyCall) -> Wrong | None:
    """More records of one or two servers behind the source indices than a rank has tokens, in hierarchy."""
    case, sources = call.case, call.results[call.rank].assist_info.flatten()
    if not call.most_tokens:
        return None
    begin = -(-case.world * call.capacity * 3 // _BLOCK_WORDS)  # block of the first number
    blocks = torch.zeros(begin + case.world // case.share, _BLOCK_WORDS, dtype=torch.int32)
    blocks.view(-1)[: len(sources)] = sources
    for _ in range(1 + int(call.rng.integers(2))):
        blocks[begin + int(call.rng.integers(case.world // case.share)), 0] = int(
            call.rng.choice([call.most_tokens + 1, -1, _MOST])
        )
    numbers = blocks[begin:, 0]
    first = int(numbers[numbers != 0][0])
    words = f"assist_info_for_combine of rank {call.rank} holds {first} behind its source indices"
    return {call.index: blocks.flatten()}, ExpectedResult("ArgumentError", words)


def first_wrong_source_index(call: FaultyCall, sources: torch.Tensor, limits: Sequence[int]) -> ExpectedResult:
    """Return combine's error for the first invalid row of ``sources``, (rank, token, k) below ``limits``, or RIGHT."""
    named = f"assist_info_for_combine of rank {call.rank}"
    ends = call.results[call.rank].ep_recv_counts.tolist()
    slot, before = 0, None
    for row, values in enumerate(sources.tolist()):
        for word, (value, limit) in enumerate(zip(values, limits, strict=True)):
            if not 0 <= value < limit:
                return ExpectedResult("ArgumentError", f"{named} names {_WORDS[word]} {value} in row {row} (")
        while ends[slot] <= row:
            slot, before = slot + 1, None
        source, token, k = values
        if call.direct and (source != slot % call.case.world or (before is not None and before >= (token, k))):
            words = f"{named} is not in dispatch's order at row {row} (token {token}, k {k})"
            return ExpectedResult("ArgumentError", words)
        before = token, k
    return RIGHT


def _index(call: FaultyCall) -> Wrong | None:
    """Positions beyond the rows of their experts; the error names the first."""
    ids, index = call.inputs.expert_ids, call.results[call.rank].expand_idx.clone()
    totals, routed = call.totals(ids), call.routed(ids)
    for _ in range(1 + int(call.rng.integers(2))):
        pair = call.pick(routed)
        if call.by_source or pair is None:
            return None
        index[pair] = int(call.rng.choice([totals[int(ids.view(-1)[pair])], -1, _MOST, -(2**31)]))
    for pair in routed.flatten().nonzero().flatten().tolist():
        expert, place = int(ids.view(-1)[pair]), int(index[pair])
        if not 0 <= place < totals[expert]:
            words = f"rank {call.rank} has expand_idx {place} for expert {expert}, to which it routes {totals[expert]} "
            return {call.index: index}, ExpectedResult("RoutingMismatch", words)
    return None


def _routing(call: FaultyCall) -> Wrong | None:
    """Route some tokens to other experts than in dispatch, or to none."""
    ids = call.inputs.expert_ids.clone()
    for _ in range(1 + int(call.rng.integers(3))):
        pair = call.pick(call.routed(ids))
        if pair is None:
            break
        ids.view(-1)[pair] = int(call.rng.integers(-1, call.case.experts))
    totals, local = call.totals(ids), call.case.local
    full = any(sum(totals[at : at + local]) > call.capacity for at in range(0, len(totals), local))
    outcome = first_wrong_place(call, ids)
    return None if full or outcome == RIGHT else ({"expert_ids": ids}, outcome)


def _routing_and_index(call: FaultyCall) -> Wrong | None:
    """Both on one rank: the error names the different counts, whatever expand_idx is."""
    routing, index = _routing(call), _index(call)
    return None if routing is None or index is None else ({**index[0], **routing[0]}, routing[1])


# Word of a case -> function that corrupts the inputs, and whether it applies to dispatch too.
KINDS: dict[str, tuple[Callable[[FaultyCall], Wrong | None], bool]] = {
    "ids": (_bad_ids, True),
    "overflow": (_overflow, True),
    "counts": (_counts, False),
    "source_index": (_source_index, False),
    "index": (_index, False),
    "routing": (_routing, False),
    "both": (_routing_and_index, False),
}
COLLECTIVE = ("InvalidExpertId", "RoutingOverflow", "ArgumentError")
