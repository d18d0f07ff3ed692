"""`ascend-moe plan`: windows, CANN's formulas, UB, tiling and limits, against numbers worked out by hand."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import commands
import op_runs
import pytest
import torch
from plan_requests import drawn_requests

import ascend_moe
from ascend_moe import comm, doctor, moe_config, plan, predict
from ascend_moe.cli import plan as plan_command
from ascend_moe.errors import ArgumentError, AscendMoeError, WindowTooSmall
from ascend_moe.native import library
from ascend_moe.ops import calls
from ascend_moe.plan import Request
from ascendc_twin import soc

PUBLISHED = Request(ranks=2, experts=128, hidden=2048, topk=8, batch=512)
DEEPSEEK = Request(ranks=64, experts=256, hidden=7168, topk=8, batch=128)

# What CANN's own operators need in MiB, from the formulas as documented. Worked out on paper:
#   A3 V1            the larger of W*BS*H*4*L, and of 2 + 4*BS*(H+128)*(W*L+K+1) / 2^20
#   A3 V2            2 * (BS*W*L*rows of dispatch + BS*K*rows of combine), rows rounded up to 512 bytes
#   fullmesh_v2      the same, rows of dispatch in packets of 480 in 512 bytes
#   A2 fullmesh      BS*W*min(L,K)*H*4 + 4 MiB
#   A3 V2 hierarchy  E*BS*(2H+3*K)*4 + 64 bytes + 404 MiB
#   A2 hierarchy     E*BS*(2H+16*K) + 104 MiB; later (E+W/4) * round512(BS*(2H+16*K)) + 8 MiB
POINTS = [
    # 512*128*4608 + 512*8*4096 = 318767104, twice that is 608 MiB; the operator's error says 609
    (PUBLISHED, "A3 V2", 608),
    (PUBLISHED, "A3 V2 fullmesh_v2", 608),
    (DEEPSEEK, "A3 V2", 956),
    (DEEPSEEK, "A3 V2 fullmesh_v2", 988),
    (replace(DEEPSEEK, ranks=16, batch=64), "A3 V1", 475),
    (replace(DEEPSEEK, ranks=8, experts=128, batch=512), "A3 V1", 1955),
    (replace(DEEPSEEK, ranks=256, batch=512), "A3 V1", 3779),
    # 256*128*(14336+24)*4 = 1795 MiB, and 64 bytes: the next one
    (DEEPSEEK, "A3 V2 hierarchy", 1795 + 404 + 1),
    (replace(DEEPSEEK, ranks=16, batch=256), "A2 fullmesh", 900),
    (DEEPSEEK, "A2 fullmesh", 900),
    (replace(DEEPSEEK, ranks=16, batch=256), "A2 hierarchy", 1008),
    (replace(DEEPSEEK, ranks=16, batch=256), "A2 hierarchy, later", 927),
    (Request(ranks=8, experts=64, hidden=1024, topk=2, batch=1), "A3 V2", 1),
]


@pytest.mark.parametrize(("request_", "version", "mib"), POINTS)
def test_needs_of_canns_versions_are_the_published_ones(request_: Request, version: str, mib: int) -> None:
    found = {need.version: need for need in plan.cann_need(request_)}
    assert found[version].mib == mib
    assert found[version].bytes > (mib - 1) * 2**20


REFUSALS = [
    (DEEPSEEK, "A3 V2", ""),
    (DEEPSEEK, "A3 V1", ""),
    (replace(DEEPSEEK, hidden=4096), "A3 V1", "H is 4096, must be 7168"),
    (replace(DEEPSEEK, ranks=48, experts=480), "A3 V1", "W is 48, must be 8, 16, 32, 64, 128, 144, 256 or"),
    (replace(DEEPSEEK, batch=513), "A3 V2", "BS is 513, must be in 1..512"),
    (replace(DEEPSEEK, hidden=1008), "A3 V2", "H is 1008, must be in 1024..8192"),
    (replace(DEEPSEEK, ranks=1025, experts=4100), "A3 V2", "W*L is 4100, must be in 1..2048"),
    (replace(DEEPSEEK, equal_batches=False), "A3 V2 fullmesh_v2", "fullmesh_v2 needs equal ones"),
    (DEEPSEEK, "A3 V2 hierarchy", ""),
    (replace(DEEPSEEK, ranks=8), "A3 V2 hierarchy", "W is 8, must be in 16..256 and a multiple of 16"),
    (replace(DEEPSEEK, ranks=16, experts=400), "A3 V2 hierarchy", "L is 25, must be in 1..24"),
    (replace(DEEPSEEK, hidden=1040), "A3 V2 hierarchy", "H is 1040, must be a multiple of 32"),
    (replace(DEEPSEEK, batch=257), "A3 V2 hierarchy", "BS is 257, must be in 1..256"),
    (replace(DEEPSEEK, equal_batches=False), "A3 V2 hierarchy", "A3 V2 hierarchy needs equal ones"),
    (
        replace(DEEPSEEK, zero_expert_num=2, copy_expert_num=1),
        "A3 V2 hierarchy",
        "3 zero, copy and const experts, A3 V2 hier",
    ),
    (replace(DEEPSEEK, zero_expert_num=2, copy_expert_num=1), "A3 V2", ""),
    (replace(DEEPSEEK, ranks=8), "A2 fullmesh", "L is 32, must be in 1..24"),
    (replace(DEEPSEEK, ranks=128), "A2 hierarchy", "W is 128, must be 16, 32 or 64"),
    (replace(DEEPSEEK, dtype="fp32"), "A3 V2", "dtype is fp32, must be bf16 or fp16"),
    (replace(DEEPSEEK, experts=255), "A3 V2", "E is 255, must be a multiple of W = 64"),
]


@pytest.mark.parametrize(("request_", "version", "text"), REFUSALS)
def test_what_cann_refuses(request_: Request, version: str, text: str) -> None:
    refused = {need.version: need.refuses for need in plan.cann_need(request_)}[version]
    assert (text in refused) if text else refused == ""


def test_the_numbers_of_ranks_that_canns_versions_take() -> None:
    stated = {
        "A3 V1": {8, 16, 32, 64, 128, 144, 256, 288},
        **dict.fromkeys(("A3 V2", "A3 V2 fullmesh_v2"), frozenset(range(2, 769))),
        "A3 V2 hierarchy": {*range(16, 257, 16)},
        "A2 fullmesh": {*range(2, 9), *range(16, 257, 8)},
        **dict.fromkeys(("A2 hierarchy", "A2 hierarchy, later"), frozenset({16, 32, 64})),
    }
    taken: dict[str, set[int]] = {version: set() for version in stated}
    for ranks in range(1, 800):
        for need in plan.cann_need(Request(ranks=ranks, experts=ranks, hidden=7168, topk=1, batch=1)):
            taken[need.version] |= set() if "W is " in need.refuses else {ranks}
    assert taken == stated


# ---- ours


def test_ranks_on_several_super_pods_are_refused_with_canns_number() -> None:
    """Whatever comm_alg is; by hand, E*BS*(2H+3*K)*4 bytes: 256*64*(14336+24)*4 = 897.5 MiB, and 64 bytes + 404 MiB."""
    options = ["-r", "32", "-e", "256", "-b", "64", "--hidden", "7168", "-k", "8"]
    for comm_alg in ("hierarchy", "auto"):
        code, said, _ = commands.said("plan", *options, "--super-pods", "2", "--comm-alg", comm_alg, "--weights")
        assert code == 1 and "not possible: super_pods is 2: nothing here carries rows from one A3 super-pod" in said
        assert "BS to 256, K to 16, L to 24" in said and said.rstrip().endswith("HCCL_BUFFSIZE=1302 here")
    few = plan.plan(replace(DEEPSEEK, ranks=8, super_pods=2)).violations[0]
    assert "it refuses this configuration: W is 8, must be in 16..256" in few.message
    a2 = plan.plan(replace(DEEPSEEK, soc="Ascend910B1", super_pods=2)).violations[0]
    assert "super_pods is 2, only A3 has super-pods; Ascend910B1 has ranks_per_" in a2.message
    with pytest.raises(ArgumentError, match=r"super_pods is 65; need 1\.\.64"):
        plan.plan(replace(DEEPSEEK, super_pods=65))


def test_hierarchy_between_servers_is_planned_with_weights() -> None:
    """16 ranks on two servers of A2: V1, and dispatch without weights, are refused."""
    options = ["-r", "16", "--soc", "Ascend910B1", "--comm-alg", "hierarchy"]
    code, said, _ = commands.said("plan", *options)
    assert code == 1 and "comm_alg 'hierarchy' needs it" in said and said.rstrip().endswith("give --weights")
    code, said, _ = commands.said("plan", *options, "--weights")
    assert code == 0 and "(both by hierarchy), direct does not support it" in said
    assert "dispatch: algorithm hierarchy" in said and "combine: algorithm hierarchy" in said
    code, said, _ = commands.said("plan", *options, "--contract", "v1")
    assert code == 1 and "V1 has no way for it" in said


def ops_of(request: Request) -> list[Any]:
    tail = "_v2" if request.contract == "v2" else ""
    return [getattr(ascend_moe, f"npu_moe_distribute_{name}{tail}") for name in ("dispatch", "combine")]


@pytest.mark.parametrize("contract", ["v1", "v2"])
@pytest.mark.parametrize("quant_mode", [0, 2])
def test_window_is_what_the_operator_asks_for(contract: str, quant_mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plan asks for, in the same words."""
    one = Request(ranks=2, experts=16, hidden=1024, topk=4, batch=300, contract=contract, quant_mode=quant_mode)
    one = replace(one, equal_batches=False, comm_alg="window")
    want = plan.plan(one).buffsize_mib
    x, ids = torch.ones(1, 1024, dtype=torch.bfloat16), torch.zeros(1, 4, dtype=torch.int32)
    dispatch, combine = ops_of(one)

    def rank_body(rank: int, group_ep: str) -> None:
        place = (group_ep, 2, rank, 16)
        sent = dispatch(x, ids, *place, quant_mode=quant_mode, global_bs=600)
        combine(sent[0].to(x.dtype), ids, sent[2], sent[4], torch.ones(1, 4), *place, global_bs=600)

    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "window")
    for mib in (1, want - 1):  # too small for either op, and for one
        monkeypatch.setenv("HCCL_BUFFSIZE", str(mib))
        with ascend_moe.LocalCluster(2) as cluster, pytest.raises(WindowTooSmall) as caught:
            cluster.run(rank_body)
        assert caught.value.needed_mib == want
    message = str(caught.value)
    exported = plan.plan(replace(one, window_mib=want - 1))
    assert not exported.ok and exported.violations[0].message in message
    cann = {found.version: found.mib for found in plan.cann_need(one)}
    version = "A3 V2" if contract == "v2" else "A3 V1"
    said = f"needs {want} (CANN's own operator: {cann[version]} on {version}, {cann['A2 fullmesh']} on A2)"
    assert said in message and f"HCCL_BUFFSIZE={want} " in message and "\n" not in message
    assert plan.plan(replace(one, window_mib=want)).ok


def test_every_limit_that_is_violated_is_listed() -> None:
    bad = Request(ranks=385, experts=1030, hidden=17001, topk=80, batch=5000)
    said = " ".join(violation.message for violation in plan.plan(bad).violations)
    for text in ("ep_world_size is 385", "moe_expert_num is 1030", "H = 17001", "BS = 5000", "K = 80"):
        assert text in said
    assert plan.plan(bad).ops == {}
    (few,) = plan.plan(replace(DEEPSEEK, ranks=16, experts=8)).violations
    assert few.message.startswith("moe_expert_num is 8")


def _taken(end: comm.Communicator) -> int:
    function = library.lib().am_need_ub_taken
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_void_p,)
    with end.use() as handle:
        return int(function(handle))


# With rows in one piece, or more of them at a time, these would not fit.
TIGHT = Request(8, 256, 4, 7168, 8, dtype="fp32", quant_mode=2, smooth=True, weights=True, cores=40, comm_alg="window")
FULL: list[tuple[Request, dict[str, int]]] = [
    (TIGHT, {"quant_piece": 2048, "send_ring": 2}),
    (replace(TIGHT, ranks=2, experts=1024), {"quant_piece": 7168, "send_ring": 1}),
    (replace(TIGHT, ranks=2, experts=1024, hidden=16384, batch=2), {"quant_piece": 2048, "send_ring": 1}),
]


def ub_requests() -> Iterator[Request]:
    """Rows of every kind, special experts, messages in parts, tight plans, and ranks on two servers of A2."""
    usual = Request(ranks=3, experts=36, hidden=64, topk=4, batch=70)
    special = Request(2, 4, 9, 304, 40, cores=6, zero_expert_num=1, copy_expert_num=1, const_expert_num=3)
    every_row: list[dict[str, Any]] = [{}, {"quant_mode": 2}, {"quant_mode": 2, "smooth": True}]
    sizes = ((64, 6), (2048, 1), (7168, 2), (7168, 8))
    for algorithm, contract in itertools.product(("window", "direct"), ("v1", "v2")):
        for dtype, rows, (hidden, cores) in itertools.product(("bf16", "fp32"), every_row, sizes):
            one = replace(usual, comm_alg=algorithm, contract=contract, dtype=dtype, **rows)
            yield replace(one, hidden=hidden, cores=cores)
        for ranks, local in ((72, 14), (256, 4)):
            parts = Request(ranks, ranks * local, 4, 64, 2, dtype="fp32", cores=2)
            yield replace(parts, comm_alg=algorithm, contract=contract)
        if contract == "v2":
            yield from (replace(special, comm_alg=algorithm, hidden=h, cores=n) for h, n in ((304, 6), (7168, 8)))
    yield from (one for one, _ in FULL)
    for contract, flags in (("v1", False), ("v2", False), ("v1", True)):
        server = {"soc": "Ascend910B1", "ranks_per_server": 2, "rdma_flags": flags}
        yield Request(4, 16, 2, 1024, 20, contract=contract, cores=3, **server)


def is_nightly(one: Request) -> bool:
    return one.ranks == 256 or (one.batch == 70 and (one.contract == "v1") != (one.dtype == "fp32"))


@pytest.mark.parametrize(
    "one", [pytest.param(each, marks=[pytest.mark.nightly] * is_nightly(each)) for each in ub_requests()]
)
def test_ub_is_what_the_kernels_take(one: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget's peak equals the most UB that any core of the run had carved."""
    for name, value in (
        ("AIV_CORES", one.cores),
        ("COMM_ALG", one.comm_alg),
        ("RANKS_PER_SERVER", one.ranks_per_server),
        ("RDMA_FLAGS", int(one.rdma_flags)),
        ("TIMEOUT_S", op_runs.CROWDED_S),
    ):
        monkeypatch.setenv(f"ASCEND_MOE_{name}", str(value))
    dispatch, combine = ops_of(one)
    x = torch.ones(one.batch, one.hidden, dtype=getattr(torch, plan.DTYPES[one.dtype]))
    ids = torch.arange(one.batch * one.topk, dtype=torch.int32) % (one.experts + one.special.total)
    ids = ids.reshape(one.batch, one.topk)
    own = {}
    if one.special.total:
        names = ("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v")
        own = {name: torch.ones(one.const_expert_num, one.hidden, dtype=x.dtype) for name in names}
        own |= {"ori_x": x, **one.special.given}
    scales = torch.ones(one.experts, one.hidden) if one.smooth else None
    weights = torch.ones(ids.shape) if one.weights else None

    def rank_body(rank: int, group_ep: str) -> list[int]:
        place = (group_ep, one.ranks, rank, one.experts)
        end = comm.lookup(*place[:3])
        sent = dispatch(
            x, ids, *place, scales=scales, expert_scales=weights, quant_mode=one.quant_mode, **one.special.given
        )
        taken = [_taken(end)]
        # Combine is given as many rows as dispatch allocates, as in the plan.
        combine(sent[0].to(x.dtype), ids, sent[2], sent[4], torch.ones(ids.shape), *place, **own)
        return [*taken, _taken(end)]

    with ascend_moe.LocalCluster(one.ranks) as cluster:
        found = cluster.run(rank_body)
    planned = plan.plan(one)
    assert [max(taken) for taken in zip(*found, strict=True)] == [
        planned.ops["dispatch"].ub_peak,
        planned.ops["combine"].ub_peak,
    ]
    assert planned.ub_bytes == 196352 and all(item.bytes % 32 == 0 for op in planned.ops.values() for item in op.ub)


@pytest.mark.parametrize(("one", "tiling"), FULL)
def test_a_tight_plan_divides_rows(one: Request, tiling: dict[str, int]) -> None:
    planned = plan.plan(one).ops["dispatch"]
    assert planned.fullest == "send" and tiling.items() <= planned.tiling.items()


def test_special_experts_are_in_the_plan() -> None:
    """What breaks a limit is named once."""
    few = Request(ranks=16, experts=16, hidden=6144, topk=20, batch=128, copy_expert_num=256)
    assert plan.plan(few).ok
    for wrong, names in (
        (replace(few, copy_expert_num=3), ["expert_ids"]),
        (replace(few, copy_expert_num=2000), ["copy_expert_num"]),
        (replace(few, topk=12, contract="v1"), ["copy_expert_num"]),
    ):
        assert [found.argument for found in plan.plan(wrong).violations] == names, wrong
    with pytest.raises(ArgumentError, match=r"zero_expert_num is -1; need 0\.\."):
        plan.plan(replace(few, zero_expert_num=-1))


def test_a_call_that_does_not_fit_is_refused_by_name() -> None:
    """Where a platform grants less UB than any that is known."""
    for name, argument in (("dispatch", "x"), ("combine", "expand_x")):
        spec = plan.describe(name, TIGHT)
        spec.ub_bytes = 40_000
        with pytest.raises(ArgumentError) as caught:
            calls.Plan(name, spec)
        assert caught.value.argument == argument and "\n" not in str(caught.value)
        said = "bytes of UB a core in the step send of 'window', a core has 40000: use bfloat16 or float16, a smaller H"
        assert said in str(caught.value)


def test_tiling_follows_the_soc() -> None:
    def tiling(op: str = "dispatch", **more: Any) -> dict[str, int]:
        return plan.plan(replace(DEEPSEEK, **more)).ops[op].tiling

    ways: list[dict[str, Any]] = [{}, {"quant_mode": 2}, {"quant_mode": 2, "smooth": True}]
    for name, first in (("window", 1000), ("direct", 2000), ("", 2000)):
        keys = [tiling(comm_alg=name, **more)["tiling_key"] for more in ways]
        assert keys == [first, first + 2, first + 12]
    few = tiling("combine", batch=4)
    assert few["parts_per_token"] == 12 and few["part_elements"] * 12 >= 7168
    # RDMA only beyond a server of A2.
    places = [("Ascend910B2", 0, 1), ("Ascend910B2", 16, 0), ("Ascend910_9391", 8, 0)]
    for name, ranks_per_server, transport in places:
        found = tiling(ranks=16, soc=name, ranks_per_server=ranks_per_server)
        assert (found["transport"], found["block_dim"]) == (transport, plan.soc_of(name).aiv)
    assert plan.limits()["ub_bytes"] == 196352 < soc.UB_KIB * 1024
    assert all(chip.aiv == 2 * chip.aic and chip.aiv <= calls.MAX_CORES for chip in soc.SOCS.values())


def test_servers_of_an_a2_have_as_many_ranks() -> None:
    """As where a group opens on NPUs; an A3's servers may have any."""
    for ranks, share, right in ((16, 0, True), (12, 0, False), (12, 6, True), (8, 3, False)):
        found = plan.plan(replace(DEEPSEEK, ranks=ranks, experts=16 * ranks, soc="Ascend910B2", ranks_per_server=share))
        assert found.ok == right == bool(found.ops), found.violations
        if not right:
            (one,) = found.violations
            rule = f"ranks_per_server is {share or 8}, it must divide the {ranks} ranks: "
            assert one.argument == "ranks_per_server" and one.message.startswith(rule)
        assert plan.plan(replace(found.request, soc="Ascend910_9391")).ok


# ---- the command


def test_command_says_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    words = ["plan", "--ranks", "2", "--experts", "128", "--hidden", "2048", "--batch", "512"]
    short = commands.said(*words).out.splitlines()
    assert len(short) == 11 and short[-1].startswith("Use --details ")
    code, said, _ = commands.said(*words, "--details")
    assert code == 0 and said.isascii() and said.splitlines()[:10] == short[:10]
    assert re.search(r"^  A3 V2 +608  MiB$", said, re.MULTILINE)
    assert f"export HCCL_BUFFSIZE={plan.plan(PUBLISHED).buffsize_mib}\n" in said
    assert "tiling key 2000" in said and "UB of a core" in said and "workspace bytes" in said
    options = "-r 8 -e 256 --hidden 7168 --dtype fp32 --smooth --weights --cores 40 --comm-alg window --details"
    code, said, _ = commands.said("plan", *options.split())
    assert code == 0 and "sent as int8, smooth scales, sent with expert_scales" in said
    assert re.search(r"UB of a core: 1\d\d \d{3} of 196 352 bytes at its peak, in step send\n", said)
    code, said, _ = commands.said("plan", "-p", "qwen3-30b", "-r", "8", "--global-bs", "512", "--json")
    found = json.loads(said)
    assert code == 0 and found["ok"] is True
    hidden = moe_config.preset("qwen3-30b").published.hidden_size
    wanted = {"ranks": 8, "batch": 64, "equal_batches": False, "hidden": hidden}
    assert wanted.items() <= found["request"].items()
    words = ["plan", "-p", "longcat-flash", "--zero-expert-num", "3", "--const-expert-num", "2", "--details"]
    code, said, _ = commands.said(*words)
    assert code == 0 and "E 512 (32 per rank) + 3 zero + 256 copy + 2 const experts, W 16" in said
    assert "factors of const experts" in said
    code, _, said = commands.said("predict", "-p", "longcat-flash")
    assert code == 2 and "has 256 zero, copy or const experts, which this" in " ".join(said.split())
    assert {need["version"] for need in found["cann"]} >= {"A3 V1", "A3 V2", "A2 fullmesh", "A2 hierarchy"}
    assert found["ops"]["dispatch"]["ub_peak"] > 0


def test_command_fails_when_a_limit_is_violated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    assert commands.said("plan", "-p", "deepseek-v3", "--window", "20").code == 1
    monkeypatch.setenv("HCCL_BUFFSIZE", "20")
    code, said, _ = commands.said("plan", "-p", "deepseek-v3")
    assert code == 1 and "HCCL_BUFFSIZE=20 is too small" in said and "(CANN's own operator: " in said
    code, said, _ = commands.said("plan", "--hidden", "20000")
    assert code == 1 and said.splitlines()[-1].startswith("not possible: x has H = 20000")


HOSTILE = [-1, 0, 1.5, True, None, "x", b"x", [], float("nan"), *(2**power for power in (31, 62, 63, 64)), -(2**63)]


@pytest.mark.parametrize("field", [field.name for field in fields(Request) if field.init])
def test_no_value_of_a_request_is_an_error_of_python(field: str) -> None:
    """Every function that takes one: a result or one line of ours."""
    base = Request(ranks=4, experts=8, topk=2, hidden=256, batch=4)
    for value in HOSTILE:
        request = replace(base, **{field: value})
        for function in (plan.plan, plan.window_need, plan.cann_need, predict.predict):
            with contextlib.suppress(AscendMoeError):
                function(request)


@pytest.mark.parametrize("argument", ["soc", "world", "cores", "algorithm", "costs", "events", "seed"])
def test_no_argument_of_predict_is_an_error_of_python(argument: str) -> None:
    for value in HOSTILE:
        with contextlib.suppress(AscendMoeError):
            predict.predict(Request(ranks=2, experts=8, topk=2, hidden=256, batch=4), **{argument: value})


# ---- windows: plan, doctor and the ops say the same


@pytest.mark.parametrize("count", [120, pytest.param(1000, marks=pytest.mark.nightly)])
def test_doctor_and_plan_say_the_same_of_drawn_windows(count: int) -> None:
    """Of windows that are too small, enough, or enough for one algorithm only."""
    rng, seen = random.Random(31), Counter[str]()
    for drawn_request in drawn_requests(30, count):
        others = {"hidden": 17000} if rng.random() < 0.1 else {"comm_alg": rng.choice(["auto", drawn_request.comm_alg])}
        drawn_request = replace(drawn_request, **others, window_mib=rng.choice([0, 1, *range(2, 30, 4), 100, 400]))
        report = plan.plan(drawn_request)
        findings = list(doctor.fits(drawn_request))
        shown = plan_command.text(report)
        assert any(found.level == doctor.ERROR for found in findings) == (not report.ok), drawn_request
        if report.fit is None:
            assert not report.ok and "HCCL_BUFFSIZE=" not in shown.partition("CANN's")[0], drawn_request
            seen["other rules"] += 1
            continue
        (found,), fit = findings, report.fit
        assert fit.needs() in shown and str(fit.least_mib) in found.what + found.fix, drawn_request
        assert fit.ok == report.ok == (not drawn_request.window_mib or drawn_request.window_mib >= fit.least_mib), (
            drawn_request
        )
        assert fit.best_mib == report.buffsize_mib, drawn_request
        text = fit.about() if fit.ok else report.violations[0].message
        assert text in found.what and text in shown, drawn_request
        assert (found.level == doctor.WARN) == bool(fit.fallen_back), drawn_request
        if fit.ok:
            assert {name: op.algorithm for name, op in report.ops.items()} == fit.algorithms, drawn_request
        seen[found.level] += 1
    assert len(seen) == 4, seen  # each kind was met
