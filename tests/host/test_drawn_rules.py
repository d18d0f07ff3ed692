"""The rules of op_host against statements of them in Python: windows of drawn configurations, and every border of what
an argument may be, in drawn calls."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from plan_requests import A2, SIZES, drawn_requests

from ascend_moe import plan
from ascend_moe.errors import ArgumentError, WindowTooSmall
from ascend_moe.native import plans
from ascend_moe.plan import Request

BLOCK, ROW_UNIT, HALF_UNIT = 32, 512, 512


def up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


class Need(NamedTuple):
    """Bytes that one op fills: of each region of a half, and of a half as a whole."""

    region: int
    half: int


class Needs:
    """What dispatch and combine fill of the window, by algorithm, with rows at multiples of ``unit``."""

    def __init__(self, of: Request, unit: int) -> None:
        self.of, self.unit = of, unit
        self.capacity = of.batch * min(of.topk, of.experts // of.ranks)
        self.inter_node = of.ranks_per_server < of.ranks
        most = up(plan.limits()["slots"], of.ranks) // of.ranks  # local experts
        self.message = BLOCK * (2 + up(most, 4) // 4)  # two headers, four counts a block
        self.run = up(self.message, 512)
        wire = of.hidden if of.quant_mode else of.hidden * SIZES[of.dtype]
        self.row = up(wire, BLOCK) + BLOCK * (of.quant_mode != 0)
        self.back = of.hidden * SIZES[of.dtype]

    def wired(self, rows: int) -> int:
        return -(-rows // 480) * 512 if self.of.rdma_flags else rows

    def window(self) -> tuple[Need, Need]:
        source_indices = self.of.contract == "v2" and not self.inter_node
        run, tails = self.run * self.inter_node, BLOCK * (source_indices + self.of.weights)
        sent = Need(self.wired(self.capacity * up(self.row + tails, self.unit)) + run, 0)
        if source_indices:  # each routed token has a place of its own, with a mark
            return sent, Need(0, self.of.batch * self.of.topk * up(self.back + BLOCK, self.unit))
        return sent, Need(self.wired(self.capacity * up(self.back, self.unit)) + run, 0)

    def direct(self) -> tuple[Need, Need]:
        lists = up(self.of.ranks * up(4 * self.capacity, BLOCK), 512)
        rows = self.of.batch * (self.of.topk if self.of.smooth else 1) * up(self.row, self.unit)
        weights = 4 * self.of.batch * self.of.topk * self.of.weights
        return Need(0, lists + rows + weights), Need(0, self.of.ranks * self.capacity * up(self.back, self.unit))

    def hierarchy(self) -> tuple[Need, Need]:
        tail = up(BLOCK + self.of.ranks_per_server * self.message, 512)
        record = BLOCK + 3 * up(4 * self.of.topk, BLOCK)
        intra_node = self.capacity * (self.row + 2 * BLOCK) + self.run
        back = self.capacity * self.back + self.run
        return (
            Need(max(intra_node, self.of.batch * (self.row + record) + tail), 0),
            Need(max(back, self.of.batch * self.back + tail), 0),
        )

    def regions(self, algorithm: str) -> int:
        return self.of.ranks + (self.of.ranks // self.of.ranks_per_server) * (algorithm == "hierarchy")

    def bytes_of(self, algorithm: str) -> list[int]:
        """Of both halves, for dispatch and combine."""
        needs: tuple[Need, Need] = getattr(self, algorithm)()
        return [
            2 * max(self.regions(algorithm) * up(need.region, HALF_UNIT), up(need.half, HALF_UNIT)) for need in needs
        ]

    def mib_of(self, *sizes: int) -> int:
        return -(-max(sizes) // 2**20) + (self.of.soc == A2)  # whose state is in the window

    def mib(self) -> dict[str, list[int]]:
        """HCCL_BUFFSIZE by algorithm, for dispatch and combine."""
        return {name: [*map(self.mib_of, self.bytes_of(name))] for name in plans.ALGORITHMS[1:]}


def algorithms_at(needs: Needs, mib: int) -> list[str] | None:
    """What the two ops run in a window of this size with rows at multiples of 32, None where one has no room."""
    fits = {name: [need <= mib for need in both] for name, both in needs.mib().items()}
    if needs.of.comm_alg != "auto":
        chosen = [needs.of.comm_alg] * 2
    elif needs.inter_node:
        chosen = ["window"] * 2
    else:  # dispatch takes direct where the rows can come back, by either algorithm
        direct, window = fits["direct"], fits["window"]
        first = "direct" if direct[0] and (direct[1] or window[1]) else "window"
        chosen = [first, "direct" if direct[1] else "window"]
    return chosen if all(fits[name][op] for op, name in enumerate(chosen)) else None


def test_windows_are_what_python_states_of_drawn_configurations() -> None:
    """The least window is that of packed rows; in a larger one rows begin at multiples of 512 bytes."""
    seen: Counter[str] = Counter()
    for number, one in enumerate(drawn_requests(1, 1000)):
        packed, spread = Needs(one, BLOCK), Needs(one, ROW_UNIT)
        found = plan.window_need(one)
        name = plans.ALGORITHMS[found["algorithm"]]
        assert [found["dispatch_bytes"], found["combine_bytes"]] == packed.bytes_of(name), one
        assert found["buffsize_mib"] == packed.mib_of(*packed.bytes_of(name)), one
        aligned = 0 if packed.inter_node else spread.mib_of(*spread.bytes_of(name))
        assert found["aligned_mib"] == aligned, one
        if number % 4 != 0:
            continue
        steps = {1 + (one.soc == A2), *itertools.chain(*packed.mib().values())}
        least = min(mib for mib in steps if mib > (one.soc == A2) and algorithms_at(packed, mib))
        edges = {found["buffsize_mib"] - 1, found["buffsize_mib"], aligned - 1, aligned}
        for mib in {least, *(mib for mib in edges if mib > least)}:
            report = plan.plan(replace(one, window_mib=mib))
            assert [report.ops[op].algorithm for op in ("dispatch", "combine")] == algorithms_at(packed, mib), one
            for at, op in enumerate(report.ops.values()):
                room = not packed.inter_node and spread.mib()[op.algorithm][at] <= mib
                assert op.tiling["row_unit"] == (ROW_UNIT if room else BLOCK), one
            seen[" ".join(op.algorithm for op in report.ops.values())] += 1
        if least > 1 + (one.soc == A2):
            (refused, *_) = plan.plan(replace(one, window_mib=least - 1)).violations
            assert f"HCCL_BUFFSIZE={least} " in refused.message, one
            seen["too small"] += 1
    assert min(seen.values()) >= 2 and len(seen) == 5, seen


# ---- borders of arguments


class Border(NamedTuple):
    """The last value that is allowed and the first that is not, of an attribute or of a size of a tensor."""

    argument: str
    size: int | None  # None: an attribute
    allowed: int
    refused: int
    words: str = ""


def spec_of(one: Request, op: str, rng: random.Random) -> Any:
    """The native call, with all optional tensors that its op may have."""
    spec = plan.describe(op, one)
    names, ids = plans.tensor_names(), (one.batch, one.topk)

    def give(name: str, dtype: int, *sizes: int) -> None:
        tensor = spec.tensors[names.index(name)]
        tensor.dtype, tensor.rank = dtype, len(sizes)
        for at, size in enumerate(sizes):
            tensor.dims[at] = size

    boolean, long = (plans._type_codes()[name] for name in ("bool", "int64"))
    give("x_active_mask", boolean, *ids[: rng.choice([1, 2])])
    if one.contract == "v2" and one.comm_alg != "hierarchy":
        give("performance_info", long, one.ranks)
    if op == "combine":  # of which not all rows need be given
        received = spec.tensors[names.index("expand_x")]
        received.dims[0] = rng.choice([0, 1, received.dims[0]])
    if one.contract == "v2" and op == "combine":
        rows = received.dtype
        parts = [(one.batch,), *((n, one.batch // n) for n in (1, 2, 3) if one.batch % n == 0)]
        give("shared_expert_x", rows, *rng.choice(parts), one.hidden)
    return spec


def borders(one: Request, op: str, spec: Any) -> Iterator[Border]:
    limits, names = plan.limits(), plans.tensor_names()
    pairs, experts = one.batch * one.topk, one.experts
    unit = BLOCK // SIZES[one.dtype]
    rows = "x" if op == "dispatch" else "expand_x"
    yield Border(rows, 1, unit, 0, "H = 0, it must be in 1..")
    yield Border(rows, 1, one.hidden, one.hidden + 1, f"pad H to {up(one.hidden + 1, unit)}")
    yield Border(rows, 1, limits["hidden"], limits["hidden"] + unit, f"H = {limits['hidden'] + unit}")
    yield Border("expert_ids", 0, one.batch, limits["batch"] + 1, f"BS = {limits['batch'] + 1}")
    most = min(limits["topk"], experts + one.special.total)
    yield Border("expert_ids", 1, most, most + 1, f"1..{most}")
    yield Border("expert_ids", 1, 1, 0, f"1..{most}")
    if op == "dispatch" or one.comm_alg != "hierarchy":  # whose records would need more room
        yield Border("global_bs", None, one.ranks * limits["batch"], one.ranks * (limits["batch"] + 1))
    if one.batch > 1:
        yield Border("global_bs", None, one.ranks * one.batch, one.ranks * (one.batch - 1))
    if one.ranks > 1:
        yield Border("global_bs", None, one.ranks * one.batch, one.ranks * one.batch + 1)
        yield Border("moe_expert_num", None, experts, experts + 1)
    if one.contract == "v2":
        most = limits["special_experts"]
        yield Border("zero_expert_num", None, most, most + 1)
    exact = {name: spec.tensors[index] for index, name in enumerate(names) if spec.tensors[index].dtype != 0}
    same = {"scales", "expert_scales", "x_active_mask", "performance_info", "ori_x", "shared_expert_x"}
    same |= {"const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"}
    for name in sorted(same & exact.keys()):
        sizes = exact[name].dims[: exact[name].rank]
        for at, size in enumerate(sizes):
            for other in (size + 1, *[size - 1] * (size > 1)):
                given = tuple(other if i == at else n for i, n in enumerate(sizes))
                shape = f"has {other} elements" if name == "performance_info" else f"has shape {given}"
                yield Border(name, at, size, other, shape)
    if op == "dispatch":
        return
    yield Border("ep_send_counts", 0, experts, experts - 1)
    if one.contract == "v1":
        yield Border("expand_idx", 0, pairs, pairs + 1)
        return
    inter_node, local = one.ranks_per_server < one.ranks, experts // one.ranks
    needed = 3 * exact["expand_x"].dims[0]
    if inter_node:
        needed = max(needed, pairs)
    if one.comm_alg == "hierarchy":  # records lie behind the source indices
        kept = up(12 * one.ranks * one.batch * min(one.topk, local), BLOCK)
        records = BLOCK + one.batch * (BLOCK + 3 * up(4 * one.topk, BLOCK))
        needed = max(needed, (kept + one.ranks // one.ranks_per_server * records) // 4)
    yield Border("assist_info_for_combine", 0, needed, needed - 1, f" {needed}")


def error_of(spec: Any, border: Border, value: int) -> ArgumentError | None:
    """What the rules say of the call with this value there."""
    if border.size is None:
        place: Any = spec.attributes
        at = plans.attribute_names().index(border.argument)
    else:
        place, at = spec.tensors[plans.tensor_names().index(border.argument)].dims, border.size
    before, place[at] = place[at], value
    try:
        plans.Plan("op", spec)
    except WindowTooSmall:
        return None
    except ArgumentError as error:
        return error
    finally:
        place[at] = before
    return None


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_every_border_of_an_argument_in_drawn_calls(op: str) -> None:
    rng, seen = random.Random(2), Counter[str]()
    for one in drawn_requests(3, 120):
        one = replace(one, batch=max(one.batch, 1))
        spec = spec_of(one, op, rng)
        plans.Plan(op, spec)
        for border in borders(one, op, spec):
            allowed, refused = (error_of(spec, border, value) for value in (border.allowed, border.refused))
            assert allowed is None or allowed.argument != border.argument, (one, border, allowed)
            assert refused is not None and refused.argument == border.argument, (one, border, refused)
            assert border.words in str(refused), (one, border, refused)
            seen[border.argument] += 1
    assert min(seen.values()) >= 10 and len(seen) >= (9 if op == "dispatch" else 14), seen


def test_no_drawn_call_of_the_largest_sizes_lacks_room_in_ub() -> None:
    """With all optional tensors, the most experts, and rows that are short or of which few fit: rings shrink."""
    rng, limits = random.Random(4), plan.limits()
    for one in drawn_requests(5, 8000):
        inter_node, ub = one.ranks_per_server < one.ranks, rng.choice([180_000, limits["ub_bytes"]])
        ranks = 384 if inter_node and 384 % one.ranks_per_server == 0 and rng.random() < 0.8 else one.ranks
        longest = (ub - rng.randrange(60_000)) // rng.randint(2, 4) // SIZES[one.dtype]
        hidden = 16 * rng.choice([1, 2, min(longest, limits["hidden"]) // 16])
        one = replace(
            one,
            ranks=ranks,
            batch=max(one.batch, 1),
            experts=ranks * (limits["moe_expert_num"] // ranks),
            hidden=hidden,
            topk=rng.choice([one.topk, min(limits["topk"], ranks)]),
            cores=rng.choice([1, 1, 2, 3, 8, limits["cores"]]),
            comm_quant_mode=0 if one.dtype == "fp32" or hidden % 32 != 0 else rng.choice([0, 2]),
        )
        for op in ("dispatch", "combine"):
            spec = spec_of(one, op, rng)
            spec.ub_bytes, spec.window_mib = ub, 1 << 20
            plans.Plan(op, spec)
