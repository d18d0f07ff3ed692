"""The generator of collective calls: cases and the tensors of every rank.

    case = cases.Case(world=4, quant="int8", batches="zero rank", ids="mixed", seed=7)
    case.inputs[rank]          # a RankInput, equal in every process
    case.dispatched()          # expected results of dispatch on all ranks
    cases.draw(seed, world=(2, 4))

A rank's tensors depend only on the case and the rank, so that any process can generate those of any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ascend_moe.call import CallOptions, SpecialExperts

from .exchange import check, combine, dispatch
from .records import DispatchResult, Fault, RankInput

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Rows of dispatch by name: as x has them, int8, int8 of rows times smooth scales.
QUANTS: dict[str, dict[str, Any]] = {"none": {}, "int8": {"quant_mode": 2}, "smooth": {"quant_mode": 2, "smooth": True}}
#: Rows of combine by name.
RETURNS: dict[str, dict[str, Any]] = {"none": {"comm_quant_mode": 0}, "int8": {"comm_quant_mode": 2}}
MASKS = ("none", "prefix", "token", "pair", "nobody")
#: "global_bs": equal batches, and the attribute is given all the same.
BATCHES = ("equal", "global_bs", "unequal", "zero rank", "one rank only", "no tokens")
#: "distinct", "zipf" and "popular": K different experts a token; "zipf": expert e has the weight 1 / (e + 1),
#: "popular": every token goes to the hot expert too. "any": every pair by itself, as in the following ones.
#: "minus": some ids are -1. "hot": 7 of 10 pairs go to the hot expert. "duplicates": a token's ids are all
#: the same. "mixed": hot, duplicate and -1 ids. "none": -1 only.
IDS = ("distinct", "any", "minus", "hot", "duplicates", "mixed", "zipf", "popular", "none")
#: Nine in ten ids are -1, by chance: many pairs, and few rows. Only where it is asked for.
SPARSE = "sparse"
#: What one rank, the guilty one, may do wrong in its ids; every rank has to report it.
FAULTS = ("overflow", "bad")
ODD = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, -1e-38, 3.0e38, 6.0e4, 1e-7)
BAD_IDS = (-2, -3, 2**31 - 1, -(2**31))  # and E

CPU = torch.device("cpu")
# Separate streams of random numbers.
_STREAMS = ("rank", "batches", "guilty", "factors", "draw", "special", "constants")
Values = npt.NDArray[np.float32]
AnyCase = TypeVar("AnyCase", bound="Case")


@dataclass(frozen=True)
class Case(CallOptions):
    """One dispatch and one combine of W = ``world`` ranks: their options, and their tensors, drawn by ``seed``.

    E = W * ``local``, K = ``topk``, maxBS = ``batch``; a row has ``units`` times 32 bytes, or ``width`` elements if not
    0. ``dtype`` and ``mask`` are names of ``DTYPES`` and ``MASKS``; ``batches`` is a name of ``BATCHES`` or the BS of
    every rank. ``ids`` is a name of ``IDS`` or ``FAULTS``, or ``SPARSE``. Without a fault, ids beyond an owner's
    capacity are replaced by -1. If there are special experts, some ids are theirs.
    ``smooth``: dispatch takes smooth scales. ``weights``: dispatch takes expert_scales. ``plain``: combine's
    expert_scales are empty, so that it adds rows without weights. ``shared``: dimensions of shared_expert_x, 2 or 3; 0:
    none. ``alphas``: dimensions of the const experts' alphas, 1 or 2. ``odd``: NaN, infinities and denormals are among
    the values. ``tail``: NaN rows follow the received ones in combine's expand_x. ``contract``: 1, or 2 for the _v2
    functions. ``cores``: AIV cores of a launch. ``share``: ranks per server, with which the ops run hierarchy; 0:
    another algorithm. ``name`` is for reports. ``given``: tensors of every rank that replace drawn ones, see ``of``.
    ``comm_alg`` and ``global_bs`` are computed: "hierarchy" with ``share``; W * maxBS, or 0 for equal batches.
    """

    comm_alg: str = field(init=False, default="")
    global_bs: int = field(init=False, default=0)

    name: str = ""
    world: int = 2
    cores: int = 8
    local: int = 2
    topk: int = 2
    batch: int = 4
    units: int = 2
    dtype: str = "bf16"
    smooth: bool = False
    contract: int = 1
    mask: str = "none"
    ids: str = "any"
    batches: str | tuple[int, ...] = "equal"
    shared: int = 0
    odd: bool = False
    tail: bool = False
    weights: bool = False
    plain: bool = False
    width: int = 0
    alphas: int = 1
    share: int = 0
    seed: int = 0
    given: tuple[RankInput, ...] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, inputs: Sequence[RankInput], experts: int, *, global_bs: int = 0, **attributes: Any) -> Case:
        """Construct a case of given ``inputs`` by rank, ``experts`` (E), ``global_bs`` and other ``attributes``."""
        world, x = len(inputs), inputs[0].x
        return cls(
            world=world,
            local=experts // world,
            topk=int(inputs[0].expert_ids.shape[1]),
            batch=global_bs // world or int(x.shape[0]),
            dtype=next(name for name, dtype in DTYPES.items() if dtype == x.dtype),
            width=int(x.shape[1]),
            batches=tuple(int(entry.x.shape[0]) for entry in inputs) if global_bs else "equal",
            given=tuple(inputs),
            **attributes,
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "comm_alg", "hierarchy" if self.share else "")
        object.__setattr__(self, "global_bs", 0 if self.batches == "equal" else self.world * max(self.batch, 1))

    @property
    def experts(self) -> int:
        """Number of routed experts, E."""
        return self.world * self.local

    @property
    def torch_dtype(self) -> torch.dtype:
        """torch dtype of x and of combine's rows."""
        return DTYPES[self.dtype]

    @property
    def hidden(self) -> int:
        """Number of elements of a row, H."""
        return self.width or self.units * 32 // self.torch_dtype.itemsize

    @property
    def quant(self) -> str:
        """Format of dispatch's rows, a name of ``QUANTS``."""
        return "smooth" if self.smooth else "int8" if self.quant_mode else "none"

    @property
    def mode(self) -> str:
        """Contract, dtype and quantizations as text, by which results are counted."""
        quant = {"none": "", "int8": " int8", "smooth": " int8 smooth"}[self.quant]
        return f"V{self.contract} {self.dtype}{quant}" + " back int8" * self.returns_int8

    # ---- tensors

    @cached_property
    def inputs(self) -> list[RankInput]:
        """Tensors of all ranks, by rank."""
        return [self.rank_input(rank) for rank in range(self.world)] if self.given is None else [*self.given]

    def rank_input(self, rank: int) -> RankInput:
        """Return the tensors of one rank."""
        if self.given is not None:
            return self.given[rank]
        rng, guilty, shape = self._rng("rank", rank), self._guilty(), (self.batch_of(rank), self.hidden)
        batch = shape[0]
        x = torch.from_numpy(_values(rng, shape, self.odd))
        if batch and rng.random() < 0.3:
            x[int(rng.integers(batch))] = 0
        ids = torch.from_numpy(self._ids(rng, batch, rank == guilty).astype(np.int32))
        mask = self._mask(rng, batch)
        if mask is not None and rank == guilty:
            mask = torch.ones_like(mask)
        weights = torch.from_numpy(_values(rng, (batch, self.topk), self.odd))
        shared = None
        if self.shared:
            shared = torch.from_numpy(_values(rng, shape, self.odd)).to(self.torch_dtype)
            if self.shared == 3:
                shared = shared.reshape(2 if batch and batch % 2 == 0 else 1, -1, self.hidden)
        given = RankInput(x.to(self.torch_dtype), ids, self._factors(), mask, weights, shared)
        return self._with_special(given, rank) if self.special.total else given

    def dispatch_tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the tensors that a rank passes to dispatch, by argument name."""
        given = self.inputs[rank]
        tensors = {
            "x": given.x,
            "expert_ids": given.expert_ids,
            "scales": given.scales,
            "x_active_mask": given.x_active_mask,
            "expert_scales": given.expert_scales if self.weights else None,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def combine_tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the tensors that a rank passes to combine, by name, except outputs of its dispatch and its experts."""
        given = self.inputs[rank]
        tensors = {
            "expert_ids": given.expert_ids,
            "expert_scales": self.weights_of(given),
            "x_active_mask": given.x_active_mask,
            **given.local_addends,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def batch_of(self, rank: int) -> int:
        """Return BS of a rank."""
        return self.batch_sizes[rank]

    @cached_property
    def batch_sizes(self) -> list[int]:
        """BS of every rank."""
        if isinstance(self.batches, tuple):
            return [*self.batches]
        rng, sizes = self._rng("batches"), [self.batch] * self.world
        if self.batches in ("unequal", "zero rank"):
            sizes = [int(size) for size in rng.integers(self.batch + 1, size=self.world)]
            if self.world > 1 and self.batch > 0:  # two different ranks, and the largest BS
                sizes[0], sizes[1] = rng.permutation([self.batch, int(rng.integers(self.batch))]).tolist()
        if self.batches == "zero rank":
            sizes[int(rng.integers(self.world))] = 0
        elif self.batches == "one rank only":
            sizes = [0] * self.world
            sizes[int(rng.integers(self.world))] = self.batch
        elif self.batches == "no tokens":
            sizes = [0] * self.world
        if self._guilty() is not None:
            sizes[self._guilty() or 0] = self.batch
        return sizes

    def _rng(self, purpose: str, rank: int = 0) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.world, _STREAMS.index(purpose), rank])

    def _guilty(self) -> int | None:
        """The rank whose ids are wrong."""
        return int(self._rng("guilty").integers(self.world)) if self.ids in FAULTS else None

    def _hot(self) -> int:
        return self.seed % self.experts

    def _factors(self) -> torch.Tensor | None:
        """Smooth scales (E, H), equal on all ranks."""
        if not self.smooth:
            return None
        factors = _values(self._rng("factors"), (self.experts, self.hidden), self.odd)
        return torch.from_numpy(factors).abs() + 0.125

    def _ids(self, rng: np.random.Generator, batch: int, guilty: bool) -> npt.NDArray[np.int64]:
        shape, experts = (batch, self.topk), self.experts
        if self.ids == "overflow" and guilty:
            return np.full(shape, int(rng.integers(experts)))
        if self.ids in ("distinct", "zipf", "popular", "overflow"):
            return self._different(rng, batch)
        if self.ids == "none":
            return np.full(shape, -1)
        ids = rng.integers(-1 if self.ids == "minus" else 0, experts, size=shape)
        if self.ids == "hot":
            ids = np.where(rng.random(shape) < 0.7, self._hot(), ids)
        elif self.ids == "duplicates":
            ids = np.repeat(ids[:, :1], self.topk, axis=1)
        elif self.ids == "mixed":
            _mix(rng, ids, self._hot())
        elif self.ids == SPARSE:
            ids = np.where(rng.random(shape) < 0.9, -1, ids)
        ids = self._within_capacity(ids)
        if self.ids == "bad" and guilty:
            for _ in range(int(rng.integers(1, 4))):
                ids[rng.integers(batch), rng.integers(self.topk)] = rng.choice([*BAD_IDS, experts + self.special.total])
        return ids

    def _with_special(self, given: RankInput, rank: int) -> RankInput:
        """Return the input with some ids of special experts, and the tensors that these need."""
        rng, shape = self._rng("special", rank), given.expert_ids.shape
        ids, special = given.expert_ids.numpy(), self.special
        share = rng.choice([0.3, 0.6, 1.0], size=(shape[0], 1), p=[0.5, 0.3, 0.2])
        theirs = (rng.random(shape) < share) & (ids >= -1) & (ids < self.experts)
        if rank == self._guilty():
            theirs[:] = False
        ids = np.where(theirs, rng.integers(self.experts, self.experts + special.total, size=shape), ids)
        given = replace(given, expert_ids=torch.from_numpy(ids.astype(np.int32)))
        if special.need_rows:
            rows = _values(rng, (shape[0], self.hidden), self.odd)
            given = replace(given, ori_x=torch.from_numpy(rows).to(self.torch_dtype))
        if not special.const_expert_num:
            return given
        rng, sizes = self._rng("constants"), (special.const_expert_num, self.hidden)  # equal on all ranks
        v, *alphas = (
            torch.from_numpy(_values(rng, sizes, odd)).to(self.torch_dtype) for odd in (self.odd, False, False)
        )
        alphas = [alpha if self.alphas == 2 else alpha[:, 0].contiguous() for alpha in alphas]
        return replace(given, const_expert_alpha_1=alphas[0], const_expert_alpha_2=alphas[1], const_expert_v=v)

    def _different(self, rng: np.random.Generator, batch: int) -> npt.NDArray[np.int64]:
        """Draw K different experts per token in any order, including special ones if K is larger than E."""
        scores = rng.random((batch, max(self.experts, min(self.topk, self.experts + self.special.total))))
        if self.ids == "zipf":
            # the largest values of log(weight) + Gumbel noise: weighted draw without replacement
            scores = -np.log(np.arange(1, scores.shape[1] + 1)) - np.log(-np.log(scores.clip(1e-12, 1 - 1e-12)))
        elif self.ids == "popular":
            scores[:, self._hot()] = 2
        ids = np.argsort(-scores, axis=1)[:, : self.topk]
        return rng.permuted(ids, axis=1)

    def _within_capacity(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Replace ids beyond an owner's capacity, maxBS * min(K, L), by -1."""
        most, flat = max(self.batch, 1) * min(self.topk, self.local), ids.reshape(-1)
        owners = flat // self.local
        for owner in range(self.world):
            flat[np.flatnonzero((owners == owner) & (flat >= 0))[most:]] = -1
        return flat.reshape(ids.shape)

    def _mask(self, rng: np.random.Generator, batch: int) -> torch.Tensor | None:
        if self.mask == "none":
            return None
        if self.mask == "nobody":
            return torch.zeros(batch, dtype=torch.bool)
        if self.mask == "prefix":
            most = int(rng.integers(batch + 1)) if rng.random() < 0.2 else (batch + 1) // 2
            return torch.arange(batch) < most
        shape = (batch,) if self.mask == "token" else (batch, self.topk)
        return torch.from_numpy(rng.random(shape) < rng.choice([0.5, 0.8, 0.0], p=[0.45, 0.45, 0.1]))

    # ---- what must come out

    def fault(self) -> Fault | None:
        """Return the error that dispatch must raise on every rank, or None if it must succeed."""
        return check(self.inputs, self.experts, self.global_bs, self.special)

    def dispatched(self) -> list[DispatchResult]:
        """Return the expected results of dispatch on all ranks."""
        return dispatch(
            self.inputs,
            moe_expert_num=self.experts,
            quant_mode=self.quant_mode,
            global_bs=self.global_bs,
            expert_token_nums_type=self.expert_token_nums_type,
            tp_world_size=self.tp_world_size,
            expert_scales_given=self.weights,
            special=self.special,
        )

    def combined(self, rows: Sequence[torch.Tensor], dispatched: Sequence[DispatchResult]) -> list[torch.Tensor]:
        """Return combine's expected outputs by rank; ``rows``: expert outputs (A, H) by rank, after ``dispatched``."""
        inputs = [replace(given, expert_scales=self.weights_of(given)) for given in self.inputs]
        numbers = {"global_bs": self.global_bs, "comm_quant_mode": self.comm_quant_mode}
        numbers["ranks_per_server"] = self.share
        return combine(inputs, rows, dispatched, moe_expert_num=self.experts, special=self.special, **numbers)

    def weights_of(self, inputs: RankInput) -> torch.Tensor | None:
        """Return the expert_scales for combine on the rank with these ``inputs``; empty if ``plain``."""
        return torch.empty(0) if self.plain else inputs.expert_scales

    def expert_rows(
        self, rank: int, expand_x: torch.Tensor, scales: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        """Return outputs of simple experts for a rank's rows: a formula of the row and its expert, in x's dtype.

        ``expand_x`` (A, H), ``scales`` (A,) and ``counts`` (E,) are dispatch's expand_x, dynamic_scales and
        ep_recv_counts. With ``tail``, NaN rows fill the result up to the size of ``expand_x``.
        """
        counts = counts[: self.experts]
        total, ends = int(counts[-1]), counts[self.world - 1 :: self.world].contiguous()
        expert = torch.searchsorted(ends, torch.arange(total, dtype=ends.dtype), right=True)
        factor = (1 + (expert + rank * self.local).float() / 7)[:, None]
        rows = expand_x[:total].float()
        if self.quant_mode and scales is not None:
            rows = rows * scales[:total, None]
        rows = (rows * factor + factor / 3).to(self.torch_dtype)
        if not self.tail:
            return rows
        whole = torch.full(tuple(expand_x.shape), float("nan"), dtype=self.torch_dtype)
        whole[:total] = rows
        return whole

    def rows_of(self, results: Sequence[DispatchResult]) -> list[torch.Tensor]:
        """Return `expert_rows` by rank for the reference's ``results`` of dispatch."""
        of_rank = enumerate(results)
        return [self.expert_rows(r, one.expand_x, one.dynamic_scales, one.ep_recv_counts) for r, one in of_rank]


def _values(rng: np.random.Generator, shape: tuple[int, ...], odd: bool) -> Values:
    values = rng.standard_normal(shape, dtype=np.float32)
    if odd:
        # some rows consist of odd values, the others have a few
        rate = np.where(rng.random((shape[0], 1)) < 0.1, 1.0, 0.03)
        strange = np.array(ODD, dtype=np.float32)[rng.integers(len(ODD), size=shape)]
        values = np.where(rng.random(shape) < rate, strange, values)
    return values


def _mix(rng: np.random.Generator, ids: npt.NDArray[np.int64], hot: int) -> None:
    """Make some ids hot, some equal to the previous id, some -1; each at least once if possible."""
    flat = ids.reshape(-1)
    kinds = rng.choice(4, size=flat.size, p=[0.3, 0.4, 0.2, 0.1])
    kinds[:4] = rng.permutation(4)[: kinds[:4].size]
    for place, kind in enumerate(kinds.tolist()):
        if kind == 1:
            flat[place] = hot
        elif kind == 2:
            flat[place] = flat[place - 1] if place else hot
        elif kind == 3:
            flat[place] = -1


# Values for ``draw``. A value listed twice is chosen twice as often.
CHOICES: dict[str, Sequence[Any]] = {
    "world": (2, 2, 3, 1, 4),
    "local": (1, 2, 2, 3, 5),
    "topk": (1, 2, 2, 3, 4, 8),
    "batch": (1, 2, 4, 4, 7),
    "units": (1, 2, 3, 4, 5),
    "dtype": tuple(DTYPES),
    "quant": ("none", "none", "int8", "smooth"),  # names of ``QUANTS``
    "contract": (1, 2),
    "mask": ("none", "none", *MASKS[1:]),
    "expert_token_nums_type": (0, 1),
    "tp_world_size": (0, 1),
    "shared": (0, 2, 3),
    "odd": (False, False, True),
    "tail": (False, True),
    "weights": (False, True),
    "plain": (False, False, True),
    "cores": (8, 1, 2, 3, 7, 24, 48),
    "batches": BATCHES,
    "ids": IDS,
    "comm_quant_mode": (0, 0, 2),
    "special": (*[(0, 0, 0)] * 5, (2, 0, 0), (0, 3, 0), (0, 0, 2), (1, 1, 1), (2, 3, 1)),
    "alphas": (1, 2),
}
# Chosen in this order after the others, so that seeds keep their values of earlier versions.
_LATER = ("comm_quant_mode", "special", "alphas")
_EARLIER = {"expert_token_nums_type": "nums_type"}


def draw(seed: int, **choices: Sequence[Any]) -> Case:
    """Draw a valid case by ``seed``; ``choices``: the values to choose from by name, in place of those of ``CHOICES``.

    ``batches`` and ``ids`` take turns by seed, so that consecutive seeds always include unequal batches, a rank without
    tokens, hot experts, duplicate ids and ids of -1.
    """
    rng = np.random.default_rng([seed, _STREAMS.index("draw")])
    given = CHOICES | choices
    names = [*sorted(given.keys() - _LATER, key=lambda name: _EARLIER.get(name, name)), *_LATER]
    chosen = {name: given[name][int(rng.integers(len(given[name])))] for name in names}
    batches, ids = (choices.get(name, CHOICES[name]) for name in ("batches", "ids"))
    turn = seed % len(batches)
    chosen |= {"batches": batches[turn], "ids": ids[(seed // len(batches) + turn) % len(ids)]}
    chosen |= QUANTS[chosen.pop("quant")] | SpecialExperts(*chosen.pop("special"))._asdict()
    return legal(Case(seed=seed, **chosen))


def legal(case: AnyCase) -> AnyCase:
    """Return ``case`` less what its contract, share, dtype or E exclude; a fault in ``ids`` gets the sizes it needs."""
    if case.ids == "overflow":
        case = replace(case, world=max(case.world, 2), local=1, topk=max(case.topk, 2))
    if case.ids in FAULTS:
        case = replace(case, batch=max(case.batch, 1))
    if case.share:  # what hierarchy needs
        case = replace(case, contract=2, weights=True, plain=False, smooth=False)
    if case.contract == 1:
        case = replace(case, shared=0, **SpecialExperts()._asdict())
    if case.dtype == "fp32":
        case = replace(case, comm_quant_mode=0)
    alphas = case.alphas if case.const_expert_num else 1
    return replace(case, alphas=alphas, topk=min(case.topk, case.experts + case.special.total))
