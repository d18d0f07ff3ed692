"""The ops on the twin against the reference: equal bits in every defined output, equal bytes moved, equal errors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import op_cases
import pytest
import torch
from op_cases import Case, Clusters, Spec

import ascend_moe.reference as ref
from ascend_moe.errors import ArgumentError, AscendMoeError, InvalidExpertId

LEAST_CASES, LEAST_EACH = 300, 20
EXAMPLES = 40  # of each stratum
# dtype, quantisation and contract of a stratum, and how its ids are made: all pairs are met.
STRATA = [
    {"dtype": dtype, "quant": quant, "contract": contract}
    for dtype in op_cases.DTYPES
    for quant in ("none", "int8", "smooth")
    for contract in (1, 2)
]
COVERAGE = [
    *("W > 1", "L > 1", "zero-batch rank", "unequal batches", "global_bs 0", "global_bs given"),
    *("mask 1-D, a prefix", "mask 1-D, no prefix", "mask 2-D", "rank without an active token"),
    *("id -1", "duplicates within capacity", "RoutingOverflow", "InvalidExpertId", "hot expert"),
    *("bf16", "fp16", "fp32", "quant 0", "quant 2", "smooth scales", "int8, H not a multiple of 32"),
    *("V1", "V2", "shared_expert_x", "expert_token_nums_type 0", "expert_token_nums_type 1", "tp 0", "tp 1"),
    *("special values", "NaN rows behind expand_x", *(f"AIV cores {count}" for count in (1, 2, 7, 24, 48))),
]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    opened = Clusters()
    yield opened
    opened.close()


def specs(fixed: dict[str, Any]) -> st.SearchStrategy[Spec]:
    """Legal specs with some fields given."""
    fields: dict[str, st.SearchStrategy[Any]] = {
        "world": st.sampled_from([2, 3, 1, 4, 8]),
        "local": st.sampled_from([2, 1, 3, 5, 9]),
        "topk": st.sampled_from([2, 1, 3, 4, 8, 16]),
        "units": st.sampled_from([2, 1, 3, 4, 5, 33, 130]),
        "max_bs": st.sampled_from([4, 1, 2, 3, 7, 12]),
        "batches": st.sampled_from(op_cases.BATCHES),
        "mask": st.sampled_from(op_cases.MASKS),
        "nums_type": st.sampled_from([0, 1]),
        "tp": st.sampled_from([0, 1]),
        "shared": st.booleans(),
        "special": st.booleans(),
        "tail": st.booleans(),
        "cores": st.sampled_from([7, 1, 2, 24, 48]),
        "seed": st.integers(0, 2**32 - 1),
    }
    return st.builds(Spec, **fields, **{name: st.just(value) for name, value in fixed.items()}).map(
        op_cases.legal
    )


def table(covered: Counter[str], distinct: int) -> str:
    lines = [f"{distinct} distinct cases, twin = reference; of them"]
    lines += [f"{covered[label]:6d}  {label}" for label in COVERAGE]
    return "\n".join(lines)


def test_equal_to_reference(
    clusters: Clusters, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """One test, so that what the cases cover is counted in one process."""
    covered: Counter[str] = Counter()
    seen: set[str] = set()

    def example(spec: Spec) -> None:
        case = op_cases.build(spec)
        name = op_cases.digest(case)
        if name not in seen:
            seen.add(name)
            covered.update(op_cases.labels(case))
        op_cases.check(case, op_cases.run(clusters[case.world], case))

    for number, stratum in enumerate(STRATA):
        fixed = {**stratum, "ids": op_cases.IDS[(number + number // 6) % len(op_cases.IDS)]}
        once = hypothesis.given(spec=specs(fixed))(lambda spec: example(spec))
        once = hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )(once)
        hypothesis.seed(number)(once)()

    text = table(covered, len(seen))
    record_property("coverage", text)
    with capsys.disabled():
        print(
            f"\n{text}", file=sys.stderr, flush=True
        )  # stderr reaches the terminal from a worker of xdist too
    assert len(seen) >= LEAST_CASES
    few = {label: covered[label] for label in COVERAGE if covered[label] < LEAST_EACH}
    assert not few, f"hardly covered: {few}"


# A quick walk through the kernels; real processes and mutants run the same specs.
FIXED = [
    Spec(seed=1),
    Spec(world=3, local=3, topk=3, units=3, max_bs=6, batches="unequal", seed=2, cores=2),
    Spec(
        world=2, local=5, topk=4, units=5, max_bs=9, dtype="fp16", quant="int8", batches="zero rank", seed=3
    ),
    Spec(
        world=2,
        local=3,
        topk=3,
        units=3,
        dtype="fp32",
        quant="smooth",
        contract=2,
        mask="2-D",
        seed=4,
        cores=24,
    ),
    Spec(world=3, local=2, topk=4, max_bs=7, contract=2, ids="minus", shared=True, batches="unequal", seed=5),
    Spec(world=2, local=4, topk=2, max_bs=8, ids="hot", mask="1-D", nums_type=0, tp=1, seed=6, cores=7),
    Spec(world=2, local=2, topk=3, max_bs=5, quant="int8", special=True, tail=True, seed=7, cores=3),
    Spec(world=3, local=1, topk=2, ids="overflow", seed=8),
    Spec(world=3, local=2, topk=2, ids="bad", contract=2, seed=9),
    Spec(world=2, local=2, topk=4, max_bs=6, contract=2, special=True, tail=True, mask="1-D prefix", seed=10),
    Spec(world=2, local=40, topk=8, max_bs=70, ids="any", batches="unequal", units=1, seed=11, cores=5),
    Spec(
        world=2,
        local=2,
        topk=2,
        max_bs=1,
        units=130,
        dtype="fp32",
        contract=2,
        shared=True,
        seed=12,
        cores=48,
    ),
]


@pytest.mark.parametrize("spec", FIXED, ids=lambda spec: f"case{spec.seed}")
def test_fixed(clusters: Clusters, spec: Spec) -> None:
    case = op_cases.build(op_cases.legal(spec))
    op_cases.check(case, op_cases.run(clusters[case.world], case))


# ---- many ranks, many experts, many tokens, long rows


LIMITS = {
    "W 64": Spec(world=64, local=4, topk=4, max_bs=3, batches="zero rank", cores=3, seed=21),
    "W 64, quantised, V2": Spec(
        world=64, local=16, topk=16, max_bs=2, quant="smooth", contract=2, units=3, seed=22
    ),
    "E 1024": Spec(world=4, local=256, topk=16, max_bs=9, mask="2-D", batches="unequal", seed=23),
    "E 1024, one rank": Spec(
        world=1, local=1024, topk=16, max_bs=16, contract=2, ids="distinct", cores=48, seed=24
    ),
    "W 64, E 1024, one core": Spec(
        world=64, local=16, topk=2, max_bs=1, units=1, dtype="fp32", cores=1, seed=25
    ),
    "K 16, BS 4096": Spec(world=2, local=8, topk=16, units=1, max_bs=4096, ids="distinct", cores=24, seed=26),
    "K 1, BS 4096": Spec(
        world=3, local=2, topk=1, units=1, max_bs=4096, mask="1-D", batches="unequal", seed=27
    ),
    "K 16, BS 4096, V2": Spec(
        world=2, local=9, topk=16, units=1, max_bs=4096, contract=2, mask="2-D", ids="minus", cores=7, seed=28
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(clusters: Clusters, name: str) -> None:
    case = op_cases.build(op_cases.legal(LIMITS[name]))
    op_cases.check(case, op_cases.run(clusters[case.world], case))


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("dtype", op_cases.DTYPES)
def test_longest_rows(clusters: Clusters, dtype: str, contract: int) -> None:
    """H = 8192 with 48 cores and 1024 experts: the largest UB plan there is, a mask and smooth scales included."""
    units = 8192 * op_cases.DTYPES[dtype].itemsize // 32
    for quant in ("none", "int8", "smooth"):
        shape = {
            "world": 2,
            "local": 512 if quant != "smooth" else 8,
            "topk": 16,
            "max_bs": 2,
            "units": units,
        }
        spec = Spec(
            **shape, dtype=dtype, quant=quant, contract=contract, mask="2-D", shared=True, cores=48, seed=30
        )
        case = op_cases.build(op_cases.legal(spec))
        op_cases.check(case, op_cases.run(clusters[2], case))


def test_largest_ub_plan(clusters: Clusters) -> None:
    """Everything that takes UB at once: fp32, H = 8192, smooth scales, E = 1024, 64 cores."""
    for world in (1, 16):
        spec = Spec(
            world=world, local=1024 // world, topk=2, max_bs=1, units=1024, dtype="fp32", quant="smooth"
        )
        case = op_cases.build(replace(spec, contract=2, mask="2-D", ids="distinct", cores=64, seed=31))
        op_cases.check(case, op_cases.run(clusters[world], case))


# ---- the number of cores


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("quant", ["none", "int8", "smooth"])
def test_same_with_any_number_of_cores(clusters: Clusters, quant: str, contract: int) -> None:
    spec = Spec(
        world=3, local=4, topk=4, units=67, max_bs=11, quant=quant, contract=contract, shared=True, seed=40
    )
    spec = op_cases.legal(replace(spec, ids="minus", mask="2-D", batches="unequal", special=True))
    first: list[Any] = []
    for count in (1, 2, 7, 24, 48):
        case = op_cases.build(replace(spec, cores=count))
        runs = op_cases.run(clusters[3], case)
        op_cases.check(case, runs)
        first = first or runs
        for rank, (one, other) in enumerate(zip(runs, first, strict=True)):
            assert op_cases.same_bits(one.result, other.result), f"rank {rank}, {count} cores"
            rows = int(one.dispatched[4][case.experts - 1])
            same = [
                op_cases.same_bits(a[:rows], b[:rows])
                for a, b in zip(one.dispatched, other.dispatched, strict=True)
            ]
            assert same[0] and (quant == "none" or same[1]) and same[3], f"rank {rank}, {count} cores: {same}"


# ---- values


def one_expert_case(x: torch.Tensor, weights: torch.Tensor, **settings: Any) -> Case:
    """Two ranks with the same tokens; token t goes to experts t mod 2 and 1 - t mod 2."""
    batch = x.shape[0]
    ids = torch.stack([torch.arange(batch) % 2, 1 - torch.arange(batch) % 2], dim=1).int()
    return Case([ref.RankInput(x, ids, expert_scales=weights) for _ in range(2)], 2, **settings)


@pytest.mark.parametrize("dtype", op_cases.DTYPES.values(), ids=str)
@pytest.mark.parametrize("quant_mode", [0, 2])
def test_special_values(clusters: Clusters, dtype: torch.dtype, quant_mode: int) -> None:
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
        case = one_expert_case(x, weights, contract=contract, quant_mode=quant_mode)
        runs = op_cases.run(clusters[2], case)
        op_cases.check(case, runs)
        result = runs[0].result  # type: ignore[union-attr]
        assert result[:9].isnan().any(), "0 * NaN must stay NaN"


def test_zero_rows_quantised(clusters: Clusters) -> None:
    """Scale 1 and codes 0; the rows around them keep their own scales."""
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[::2] = 0
    case = one_expert_case(x, torch.ones(6, 2), quant_mode=2)
    for one in op_cases.run(clusters[2], case):
        rows, scales = one.dispatched[0][:12], one.dispatched[1][:12]  # type: ignore[union-attr]
        zero = ~rows.any(dim=1)
        assert int(zero.sum()) == 6
        assert torch.equal(scales[zero], torch.ones(6))
        assert bool((scales[~zero] != 1).all())


# ---- errors that every rank raises


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("guilty", [0, 2])
@pytest.mark.parametrize("bad", [-2, -(2**31), 6, 2**31 - 1])
def test_invalid_expert_id(clusters: Clusters, bad: int, guilty: int, contract: int) -> None:
    """Named by rank, token, k and id on every rank; nobody is stuck, the next call works."""
    sound = op_cases.build(Spec(world=3, local=2, topk=3, max_bs=5, contract=contract, seed=50, cores=4))
    broken = op_cases.build(Spec(world=3, local=2, topk=3, max_bs=5, contract=contract, seed=50, cores=4))
    broken.inputs[guilty].expert_ids[3, 1] = bad
    broken.inputs[2].expert_ids[4, 2] = bad  # later, or on a later rank
    runs = op_cases.run(clusters[3], broken)
    for error in runs:
        assert isinstance(error, InvalidExpertId) and isinstance(error, ValueError)
        assert error.details == {"rank": guilty, "token": 3, "k": 1, "expert_id": bad}
        assert str(error).startswith(f"dispatch: rank {guilty}, token 3, k 1 has expert id {bad}")
    op_cases.check(sound, op_cases.run(clusters[3], sound))


def test_masked_ids_are_not_looked_at(clusters: Clusters) -> None:
    """Any number at a masked pair; expand_idx is 0 there."""
    for mask in ("1-D", "2-D", "1-D prefix"):
        spec = Spec(world=2, local=3, topk=4, max_bs=8, mask=mask, seed=60)
        case = op_cases.build(op_cases.legal(spec))
        for one in case.inputs:
            assert one.x_active_mask is not None
            one.x_active_mask[0] = False
            live = (
                one.x_active_mask
                if one.x_active_mask.dim() == 2
                else one.x_active_mask[:, None].expand(-1, 4)
            )
            one.expert_ids[~live] = 12345
        runs = op_cases.run(clusters[2], case)
        op_cases.check(case, runs)
        for one in runs:
            assert not one.dispatched[2][:4].any()  # type: ignore[union-attr]
            assert not one.result[0].any()  # type: ignore[union-attr]


def test_overflow_beyond_the_capacity_by_one(clusters: Clusters) -> None:
    """maxBS * min(K, L) rows from one source to one owner pass, one more does not."""
    ids = torch.tensor([[0, 1, 2], [0, 1, 3], [2, 3, 1], [0, 1, 2]], dtype=torch.int32)
    inputs = [
        ref.RankInput(torch.randn(4, 16), ids.clone(), expert_scales=torch.rand(4, 3)) for _ in range(2)
    ]
    case = Case(inputs, 4, global_bs=8)
    op_cases.check(case, op_cases.run(clusters[2], case))
    inputs[1].expert_ids[:] = torch.tensor([0, 1, 0])  # 12 rows; the capacity is 4 * 2
    fault = ref.check(inputs, 4, 8)
    assert fault is not None and (fault.rank, fault.owner, fault.rows, fault.capacity) == (1, 0, 12, 8)
    op_cases.check_fault(fault, op_cases.run(clusters[2], case))
    inputs[1].expert_ids[0] = torch.tensor([2, 3, 2])
    inputs[1].expert_ids[1, 0] = 3
    assert ref.check(inputs, 4, 8) is None  # 8 rows
    op_cases.check(case, op_cases.run(clusters[2], case))
    inputs[1].expert_ids[1, 0] = 0
    assert ref.check(inputs, 4, 8) is not None  # 9 rows
    op_cases.check(case, op_cases.run(clusters[2], case))


# ---- tensors of combine that are not dispatch's


def spoiled(
    clusters: Clusters, contract: int, spoil: Callable[[Case, int, list[torch.Tensor]], Case]
) -> tuple[Case, list[Any]]:
    """A sound dispatch, then a combine whose case and tensors ``spoil`` may change; results or errors by rank."""
    case = op_cases.build(
        Spec(world=2, local=3, topk=3, max_bs=6, contract=contract, ids="distinct", seed=70)
    )

    def fn(rank: int, group_ep: str) -> Any:
        sent = list(op_cases.dispatch(case, rank, group_ep))
        rows = op_cases.expert_rows(case, rank, sent)
        try:
            return op_cases.combine(spoil(case, rank, sent), rank, group_ep, rows, sent)
        except AscendMoeError as error:
            return error

    with op_cases.cores(4):
        results = clusters[2].run(fn)
    # The communicator stays usable.
    op_cases.check(case, op_cases.run(clusters[2], case))
    return case, results


def right_result(clusters: Clusters, case: Case, rank: int) -> torch.Tensor:
    one = op_cases.run(clusters[2], case)[rank]
    assert isinstance(one, op_cases.RankRun)
    return one.result


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("fewer", [True, False])
def test_routing_mismatch(clusters: Clusters, contract: int, fewer: bool) -> None:
    """Other ids in combine than in dispatch: raised where it is seen, with the expert and both numbers."""

    def spoil(case: Case, rank: int, sent: list[torch.Tensor]) -> Case:
        ids = case.inputs[1].expert_ids.clone()
        if fewer:
            ids[2] = -1
        else:
            ids[2] = ids[3] = torch.tensor([0, 0, 0])
        inputs = [case.inputs[0], replace(case.inputs[1], expert_ids=ids)]
        return replace(case, inputs=inputs) if rank == 1 else case

    case, (other, error) = spoiled(clusters, contract, spoil)
    assert type(error).__name__ == "RoutingMismatch" and error.rank == 1
    before = Counter(case.inputs[1].expert_ids.reshape(-1).tolist())
    after = Counter(spoil(case, 1, []).inputs[1].expert_ids.reshape(-1).tolist())
    assert error.ours == after[error.expert] != before[error.expert]
    if "expand_idx" not in str(error):  # V1 may meet a position past the expert's pairs first
        assert error.theirs == before[error.expert]
    assert op_cases.same_bits(other, right_result(clusters, case, 0))


def test_mask_for_one_op_only(clusters: Clusters) -> None:
    def spoil(case: Case, rank: int, sent: list[torch.Tensor]) -> Case:
        masked = replace(case.inputs[0], x_active_mask=torch.arange(6) < 5)
        return replace(case, inputs=[masked, case.inputs[1]]) if rank == 0 else case

    _, (error, other) = spoiled(clusters, 1, spoil)
    assert type(error).__name__ == "RoutingMismatch" and error.rank == 0
    assert isinstance(other, torch.Tensor)


def test_expand_idx_out_of_its_expert(clusters: Clusters) -> None:
    for value in (-1, 6, 1000, 2**31 - 1):

        def spoil(case: Case, rank: int, sent: list[torch.Tensor], value: int = value) -> Case:
            if rank == 1:
                sent[2][7] = value
            return case

        case, (other, error) = spoiled(clusters, 1, spoil)
        assert type(error).__name__ == "RoutingMismatch" and error.rank == 1
        assert error.expert == int(case.inputs[1].expert_ids.reshape(-1)[7]) and error.theirs == value
        assert op_cases.same_bits(other, right_result(clusters, case, 0))


@pytest.mark.parametrize("word, value", [(0, 2), (0, -1), (1, 6), (1, -1), (2, 3), (2, -1)])
def test_triple_out_of_range(clusters: Clusters, word: int, value: int) -> None:
    """Would store outside of a window or of its slot: refused on every rank."""

    def spoil(case: Case, rank: int, sent: list[torch.Tensor]) -> Case:
        if rank == 1:
            sent[2][3 * 4 + word] = value
        return case

    _, errors = spoiled(clusters, 2, spoil)
    for error in errors:
        assert isinstance(error, ArgumentError), repr(error)
        assert (error.argument, error.rank) == ("assist_info_for_combine", 1)


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("at, value", [(0, -1), (3, 0), (5, 10**6), (5, 2**31 - 1)])
def test_ep_send_counts_that_are_none(clusters: Clusters, at: int, value: int, contract: int) -> None:
    """Negative, falling or more than expand_x's rows: refused on every rank."""

    def spoil(case: Case, rank: int, sent: list[torch.Tensor]) -> Case:
        if rank == 0:
            sent[4][at] = value
        return case

    _, errors = spoiled(clusters, contract, spoil)
    for error in errors:
        assert isinstance(error, ArgumentError), repr(error)
        assert (error.argument, error.rank) == ("ep_send_counts", 0)
