"""The ops on the twin against the reference: equal bits in every defined output, equal bytes moved."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import op_runs
import pytest
import soak_rows
import torch
from op_runs import Clusters
from soak_rows import Tally
from window_library import WindowLibrary

import ascend_moe.reference as ref
from ascend_moe import LocalCluster
from ascend_moe.errors import WindowTooSmall
from ascend_moe.reference.cases import BATCHES, DTYPES, MASKS, QUANTS, Case, draw, legal

PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)

EXAMPLES = soak_rows.pick(12, 700)  # of each stratum
LEAST_EACH = soak_rows.pick(5, 20)
# dtype, quantization and contract of a stratum: all pairs are met.
STRATA = [
    {"dtype": dtype, "contract": contract, **QUANTS[quant]}
    for dtype in DTYPES
    for quant in ("none", "int8", "smooth")
    for contract in (1, 2)
]
CHOICES = {
    "world": (2, 3, 1, 4, 8),
    "local": (2, 1, 3, 5, 9),
    "topk": (2, 1, 3, 4, 8, 16),
    "units": (2, 1, 3, 4, 5, 33, 130),
    "batch": (4, 1, 2, 3, 7, 12, 0),
    "cores": (7, 1, 2, 24, 48),
    "ids": ("distinct", "any", "minus", "hot", "overflow", "bad", "mixed", "duplicates", "zipf"),
}
COVERAGE = {"batches": BATCHES, "ids": CHOICES["ids"], "mask": MASKS, "shared": (0, 2, 3)}
COVERAGE |= dict.fromkeys(("odd", "tail"), (False, True))


@pytest.mark.asan
@pytest.mark.row("twin = reference")
def test_equal_to_reference(clusters: Clusters, tally: Tally) -> None:
    """One test, so that what the cases cover is counted in one process."""
    covered: Counter[tuple[str, Any]] = Counter()
    seen: set[Case] = set()
    sound = 0
    for number, stratum in enumerate(STRATA):
        fixed = {name: (value,) for name, value in stratum.items()}
        for seed in range(EXAMPLES * number, EXAMPLES * (number + 1)):
            case = draw(seed, **CHOICES, **fixed)
            seen.add(case)
            covered.update((name, getattr(case, name)) for name in COVERAGE)
            sound += op_runs.check(case, op_runs.run(clusters[case.world], case))

    assert len(seen) == EXAMPLES * len(STRATA)
    wanted = [(name, value) for name, values in COVERAGE.items() for value in values]
    assert min(covered[kind] for kind in wanted) >= LEAST_EACH, f"hardly covered: {covered.most_common()[-3:]}"
    tally.count("predicted errors", cases=len(seen) - sound)
    tally.count("equal bits", cases=sound)


# ---- many ranks, many experts, many tokens, long rows


MANY = {"batch": 4096, "units": 1}
# Everything that takes UB at once: fp32, H = 16384, smooth scales, E = 1024, 64 cores.
LARGEST_UB: dict[str, Any] = {"topk": 2, "batch": 1, "units": 2048, "dtype": "fp32", **QUANTS["smooth"]}
LARGEST_UB |= {"contract": 2, "mask": "pair", "ids": "distinct", "cores": 64, "seed": 31}
LIMITS = {
    "W 64": Case(world=64, local=4, topk=4, batch=3, batches="zero rank", cores=3, seed=21),
    "W 64, V2": Case(world=64, local=16, topk=16, batch=2, quant_mode=2, smooth=True, contract=2, units=3, seed=22),
    "E 1024": Case(world=4, local=256, topk=16, batch=9, mask="pair", batches="unequal", seed=23),
    "one rank": Case(world=1, local=1024, topk=16, batch=16, contract=2, ids="distinct", cores=48, seed=24),
    "one core": Case(world=64, local=16, topk=2, batch=1, units=1, dtype="fp32", cores=1, seed=25),
    "UB, W 1": Case(world=1, local=1024, **LARGEST_UB),
    "UB, W 16": Case(world=16, local=64, **LARGEST_UB),
    "K 32": Case(world=2, local=16, topk=32, ids="distinct", cores=24, seed=33, batch=70, units=3, mask="pair"),
    "K 1": Case(world=3, local=2, topk=1, mask="token", batches="unequal", seed=27, **MANY),
    "K 16, V2": Case(local=9, topk=16, contract=2, mask="pair", ids="minus", cores=7, seed=28, batch=500),
}
SLOW = ("W 64, V2", "UB, W 16")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in SLOW)) for name in LIMITS])
def test_limits(clusters: Clusters, name: str) -> None:
    case = legal(LIMITS[name])
    op_runs.check(case, op_runs.run(clusters[case.world], case))


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8192, 9216, 16384])
def test_longest_rows(clusters: Clusters, hidden: int, dtype: str, contract: int) -> None:
    """H = 16384 and less with 48 cores, up to 1024 experts, a mask, smooth scales: all of it fits UB."""
    units = hidden * DTYPES[dtype].itemsize // 32
    spec = Case(topk=16, batch=2, units=units, dtype=dtype, contract=contract, cores=48, seed=30)
    for quant, local in (("none", 512), ("int8", 512), ("smooth", 8)):
        case = legal(replace(spec, **QUANTS[quant], local=local, mask="pair", shared=2))
        op_runs.check(case, op_runs.run(clusters[2], case))


@pytest.mark.parametrize("algorithm", ["window", "direct"])
def test_windows_above_4_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse memory, of which an op touches little; regions and halves begin beyond 32 bits."""
    monkeypatch.setenv("ASCEND_MOE_REGISTERED_MIB", "0")
    with LocalCluster(3, window_mib=13 * 1024) as cluster:
        for seed, contract in enumerate((1, 2, 1, 2)):
            case = legal(Case(world=3, local=2, topk=3, batch=5, contract=contract, quant_mode=2, cores=2, seed=seed))
            op_runs.check(case, op_runs.run(cluster, case))


# ---- values


def one_expert_case(x: torch.Tensor, weights: torch.Tensor, **settings: Any) -> Case:
    """Two ranks with the same tokens; token t goes to experts t mod 2 and 1 - t mod 2."""
    batch = x.shape[0]
    ids = torch.stack([torch.arange(batch) % 2, 1 - torch.arange(batch) % 2], dim=1).int()
    return Case.of([ref.RankInput(x, ids, expert_scales=weights) for _ in range(2)], 2, **settings)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("quant", ["none", "int8"])
def test_special_values(clusters: Clusters, dtype: torch.dtype, quant: str) -> None:
    """Rows of one special value, alone and beside ordinary ones; weights that make 0 * NaN and inf - inf."""
    nan, inf = float("nan"), float("inf")
    singles = [0.0, -0.0, nan, inf, -inf, 1e-45, 1e-40, -1e-38, 6e-8, 3e38, 65504.0, 127.0, 1.0]
    rows = [torch.full((32,), value) for value in singles]
    for value in singles:
        row = torch.linspace(-2, 2, 32)
        row[5] = value
        rows.append(row)
    rows.append(torch.tensor([nan, inf, -inf, 0.0] * 8))
    x = torch.stack(rows).to(dtype)
    odd = torch.tensor([0.0, -0.0, nan, inf, -inf, 1e-45, 3e38, -1.0, 1.0])
    weights = torch.stack([odd.repeat(5)[: len(rows)], odd.flip(0).repeat(5)[1 : len(rows) + 1]], dim=1)
    for contract in (1, 2):
        case = one_expert_case(x, weights, contract=contract, **QUANTS[quant])
        runs = op_runs.run(clusters[2], case)
        op_runs.check(case, runs)
        result = runs[0].result  # type: ignore[union-attr]
        assert result[:9].isnan().any(), "0 * NaN must stay NaN"


# ---- ids that are masked, bad or too many, counts that are not dispatch's


@pytest.mark.asan
@pytest.mark.tsan
def test_masked_ids_are_not_looked_at(clusters: Clusters) -> None:
    """Any number at a masked pair; expand_idx is 0 there."""
    for mask in ("token", "pair", "prefix"):
        spec = Case(world=2, local=3, topk=4, batch=8, mask=mask, seed=60)
        case = legal(spec)
        for given in case.inputs:
            assert given.x_active_mask is not None
            given.x_active_mask[0] = False
            active = given.x_active_mask.reshape(8, -1).expand(-1, 4)
            given.expert_ids[~active] = 12345
        runs = op_runs.run(clusters[2], case)
        op_runs.check(case, runs)
        for run in runs:
            assert not run.dispatched[2][:4].any()  # type: ignore[union-attr]
            assert not run.result[0].any()  # type: ignore[union-attr]


# ---- the window


class GuardedLibrary(WindowLibrary):
    """Every window lies between two pages without access; its last byte is the last one before a page."""

    def am_window_alloc(self, total: int) -> int | None:
        assert total % PAGE == 0
        base = int(self.inner.am_window_alloc(total + 2 * PAGE))
        for guard in (base, base + PAGE + total):
            assert _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0) == 0
        self.mapped[base + PAGE] = total
        return base + PAGE

    def am_window_unmap(self, base: int, total: int) -> None:
        assert self.mapped.pop(base) == total
        self.inner.am_window_unmap(base - PAGE, total + 2 * PAGE)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedLibrary]:
    library = GuardedLibrary()
    monkeypatch.setattr("ascend_moe.native.library.lib", lambda: library)
    yield library
    assert not library.mapped


def test_that_the_guard_is_there(guarded: GuardedLibrary) -> None:
    """A byte outside of a window on either side ends the process, the last ones inside do not."""
    base = guarded.am_window_alloc(4 * PAGE)
    assert base is not None
    for at, code in ((0, 0), (4 * PAGE - 1, 0), (-1, -signal.SIGSEGV), (4 * PAGE, -signal.SIGSEGV)):
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            ctypes.memset(base + at, 1, 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code, f"at {at}"
    guarded.am_window_unmap(base, 4 * PAGE)


#: Calls whose rows need half of 1 MiB to the last byte.
FULL = {
    "both ops": Case(world=2, local=2, topk=2, batch=256, units=16),
    "both ops of one rank": Case(world=1, local=4, topk=4, batch=64, units=64, dtype="fp32"),
    "dispatch of source_indices": Case(world=2, local=2, topk=2, batch=256, units=15, contract=2),
    "dispatch of codes and source_indices": Case(
        world=2, local=2, topk=2, batch=256, units=28, quant_mode=2, contract=2
    ),
    "combine of codes": Case(world=2, local=2, topk=4, batch=128, units=31, quant_mode=2, contract=2),
    "both ops of four": Case(world=4, local=1, topk=1, batch=128, units=32, dtype="fp16"),
}


def crammed(case: Case, owner: int) -> Case:
    """All ranks send one of them as much as they may, with the rest of K to those behind it."""
    case = replace(case)
    for given in case.inputs:
        token, k = torch.arange(case.batch)[:, None], torch.arange(case.topk)[None]
        place = (owner + k // case.local) % case.world
        given.expert_ids[:] = (place * case.local + (token + k) % case.local).int()
    return case


@pytest.mark.asan
@pytest.mark.parametrize("algorithm", ["window"])
@pytest.mark.parametrize("name", FULL)
@soak_rows.row("window size", quick=2, full=80)
def test_window_that_is_just_large_enough(guarded: GuardedLibrary, name: str, numbers: range, tally: Tally) -> None:
    """Nothing is touched outside of it, on either side. Wider rows or one more are refused with the need."""
    base = replace(FULL[name], ids="distinct")
    with LocalCluster(base.world, window_mib=1) as cluster:
        for number in numbers:
            spec = replace(base, seed=number, cores=(3, 8, 48)[number % 3])
            case = crammed(spec, spec.world - 1 - number % spec.world)
            op_runs.check(case, op_runs.run(cluster, case))
            for more in ({"units": spec.units + 1}, {"batch": spec.batch + 1}):
                errors = op_runs.run(cluster, replace(spec, **more))  # type: ignore[arg-type]
                for error in errors:
                    assert isinstance(error, WindowTooSmall) and error.needed_mib == 2, error
                    assert "HCCL_BUFFSIZE=2" in str(error)
            op_runs.check(case, op_runs.run(cluster, case))
            tally.count("full to the last byte")
    with LocalCluster(base.world, window_mib=2) as cluster:
        case = replace(base, units=base.units + 1)
        op_runs.check(case, op_runs.run(cluster, case))
