"""Where a wrong element is, in words: expert, source rank, token and k instead of an offset."""

from __future__ import annotations

import torch

from .bits import bits, differing, gap, words
from .records import DispatchResult


class Places:
    """Puts a position in one of dispatch's outputs into words."""

    def __init__(self, expected: DispatchResult, rank: int) -> None:
        self.expected = expected
        self.rank = rank
        self.locals = int(expected.expert_token_nums.shape[0])
        self.world = len(expected.rows_sent)
        self.triples: list[list[int]] = expected.assist_info.tolist()
        self.counts: list[int] = expected.ep_recv_counts.tolist()

    def difference(self, name: str, got: torch.Tensor, want: torch.Tensor) -> str:
        """Name the first difference of two tensors that have one shape and are not equal."""
        first = int(differing(got, want).reshape(got.shape[0], -1).any(axis=1).argmax())
        tell = {
            "ep_recv_counts": self._counts,
            "expert_token_nums": self._nums,
            "tp_recv_counts": self._tp,
            "expand_idx": self._idx,
            "assist_info_for_combine": self._triple,
            "expand_x": self._row,
            "dynamic_scales": self._scale,
        }[name]
        return tell(got, want, first)

    def _expert(self, local: int) -> str:
        return f"local expert {local} = expert {self.rank * self.locals + local}"

    def _place(self, row: int) -> str:
        """Where row i of expand_x comes from."""
        local = sum(total <= row for total in self.counts) // self.world
        source, token, k = self.triples[row]
        return f"({self._expert(local)}, from rank {source}, token {token}, k {k})"

    def _counts(self, got: torch.Tensor, want: torch.Tensor, i: int) -> str:
        before = int(want[i - 1]) if i else 0
        segment = f"{int(got[i]) - before} rows there instead of {int(want[i]) - before}"
        return (
            f"ep_recv_counts[{i}] ({self._expert(i // self.world)}, from rank {i % self.world}; inclusive "
            f"prefix sum): expected {int(want[i])}, got {int(got[i])}, that is {segment}; "
            f"{tally(got, want, 'counts')} differ"
        )

    def _nums(self, got: torch.Tensor, want: torch.Tensor, i: int) -> str:
        cumulative = torch.tensor(self.counts[self.world - 1 :: self.world], dtype=torch.int64)
        each = torch.diff(cumulative, prepend=torch.zeros(1, dtype=torch.int64))
        hint = ""
        if torch.equal(got, cumulative):
            hint = "; these are the cumulative numbers of expert_token_nums_type 0, type 1 was asked for"
        elif torch.equal(got, each):
            hint = "; these are the numbers per expert of expert_token_nums_type 1, type 0 was asked for"
        return (
            f"expert_token_nums[{i}] ({self._expert(i)}): expected {int(want[i])}, got {int(got[i])}; "
            f"{tally(got, want, 'numbers')} differ{hint}"
        )

    def _tp(self, got: torch.Tensor, want: torch.Tensor, i: int) -> str:
        return f"tp_recv_counts[{i}] (all rows of this rank): expected {int(want[i])}, got {int(got[i])}"

    def _idx(self, got: torch.Tensor, want: torch.Tensor, i: int) -> str:
        topk = int(self.expected.expert_ids.shape[1])
        expert = int(self.expected.expert_ids.reshape(-1)[i])
        return (
            f"expand_idx[{i}] (token {i // topk}, k {i % topk}, expert {expert}): expected {int(want[i])}, "
            f"got {int(got[i])}; it counts this rank's earlier routed pairs of that expert (0 where the pair "
            f"is not routed); {tally(got, want, 'indices')} differ"
        )

    def _triple(self, got: torch.Tensor, want: torch.Tensor, i: int) -> str:
        row = i // 3
        found = got[3 * row : 3 * row + 3].tolist()
        hint = ""
        if found in self.triples:
            other = self.triples.index(found)
            hint = f"; that is the triple of row {other} {self._place(other)}"
        wrong = int(differing(got, want).reshape(-1, 3).any(axis=1).sum())
        return (
            f"assist_info_for_combine, the triple of row {row} {self._place(row)}: expected (source rank, "
            f"token, k) = {tuple(self.triples[row])}, got {tuple(found)}; "
            f"{wrong} of {len(self.triples)} triples differ{hint}"
        )

    def _row(self, got: torch.Tensor, want: torch.Tensor, i: int) -> str:
        hint = row_hint(got, want, i)
        if isinstance(hint, int):
            hint = f"; it holds the bits of row {hint} {self._place(hint)}"
        return f"expand_x row {i} {self._place(i)}{elements(got, want, i, 'rows')}{hint}"

    def _scale(self, got: torch.Tensor, want: torch.Tensor, i: int) -> str:
        reciprocal = not differing(1 / got[i], want[i]).any() or not differing(got[i], 1 / want[i]).any()
        hint = "; got is the reciprocal, 127 / max|x| rather than its inverse" if reciprocal else ""
        return (
            f"dynamic_scales row {i} {self._place(i)}: expected {words(want[i])}, got {words(got[i])}"
            f"{gap(got[i], want[i])}; {tally(got, want, 'scales')} differ{hint}"
        )


def tally(got: torch.Tensor, want: torch.Tensor, noun: str) -> str:
    """Say how many elements differ: ``3 of 50 scales``."""
    unequal = differing(got, want)
    return f"{int(unequal.sum())} of {unequal.size} {noun}"


def elements(got: torch.Tensor, want: torch.Tensor, row: int, noun: str) -> str:
    """Name the first wrong element of a (rows, H) pair and how much else is wrong."""
    unequal = differing(got, want)
    h = int(unequal[row].argmax())
    g, w = got[row, h], want[row, h]
    return (
        f", element {h}: expected {words(w)}, got {words(g)}{gap(g, w)}; "
        f"{int(unequal[row].sum())} of its {unequal.shape[1]} elements differ, in all "
        f"{int(unequal.any(axis=1).sum())} of {unequal.shape[0]} {noun}"
    )


def row_hint(got: torch.Tensor, want: torch.Tensor, row: int) -> int | str:
    """Find the other row whose bits are here by mistake, or say what else is plain to see."""
    raw = bits(got[row])
    if not raw.any():
        return "; it is all zeros, as if nothing had been written"
    same = (bits(want) == raw).all(axis=1)
    return int(same.argmax()) if same.any() else ""
