"""CANN's side of the ops: tiling, shape functions and definition, run through the shim of CANN.

The tiling function's bytes are compared with the plan that the twin runs, made from Python's own description
of the same call; nothing of op_host's CANN side is used for the latter.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import struct
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from op_host_calls import A2, A3, GROUP, ONE_CARD_TYPE, PROBE_TYPE, OpCall, Tiled, definition, plan, probe, shapes, tile
from torch_calls import local_addends

from ascend_moe.ops import calls as native
from ascend_moe.reference.cases import Case, draw
from ascend_moe.validate.probes_kernel import CYCLES_PER_MICRO, MODES, TILING_KEY, WORKSPACE_BYTES, ProbeTiling

INT = torch.int32
ROWS = (torch.bfloat16, torch.float16, torch.float32)
SYSTEM_WORKSPACE = 16 * 1024 * 1024


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "20")


def made(
    op: int,
    batch: int = 16,
    hidden: int = 256,
    topk: int = 4,
    world: int = 8,
    local: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    contract: int = 1,
    soc: str = A3,
    cores: int = 48,
    share: int | None = None,
) -> OpCall:
    """``share``: ranks a server; None: all."""
    numbers = {"ep_world_size": world, "ep_rank_id": world - 1, "moe_expert_num": world * local}
    numbers["ranks_per_server"] = world if share is None else share
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"expert_ids": (INT, (batch, topk))}
    if op == native.OP_DISPATCH:
        tensors["x"] = (dtype, (batch, hidden))
        return OpCall(op, contract, tensors, numbers, soc, cores)
    rows = batch * world * min(local, topk)
    tensors["expand_x"] = (dtype, (rows, hidden))
    index = batch * topk if contract == 1 else max(batch * topk, rows * 128)
    tensors["expand_idx"] = (INT, (index,))
    tensors["ep_send_counts"] = (INT, (world * local,))
    tensors["expert_scales"] = (torch.float32, (batch, topk))
    return OpCall(op, contract, tensors, numbers, soc, cores)


dispatch = partial(made, native.OP_DISPATCH)
combine = partial(made, native.OP_COMBINE)


def of_case(case: Case, op: int, soc: str, cores: int) -> OpCall:
    """The call of a case's last rank, with all that the case gives."""
    one = case.inputs[-1]
    batch, topk = one.expert_ids.shape
    make = dispatch if op == native.OP_DISPATCH else combine
    shape = {"batch": batch, "hidden": case.hidden, "topk": topk, "world": case.world, "local": case.local}
    share = max(case.world >> case.seed % 3, 1)
    call = make(**shape, dtype=case.torch_dtype, contract=case.contract, soc=soc, cores=cores, share=share)
    changes: dict[str, Any] = {"tp_world_size": case.tp_world_size, "comm_alg": ALGORITHMS[case.seed % 3]}
    if case.global_bs:
        changes["global_bs"] = case.global_bs
    given = case.combine_tensors(case.world - 1)
    changes["comm_quant_mode"] = case.comm_quant_mode
    if op == native.OP_DISPATCH:
        changes |= {"expert_token_nums_type": case.expert_token_nums_type, "quant_mode": case.quant_mode}
        changes.pop("comm_quant_mode")
        given = case.dispatch_tensors(case.world - 1)
    optional = {name: tensor for name, tensor in given.items() if name not in call.tensors}
    changes |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in optional.items()}
    return call.changed(**changes)


ALGORITHMS = ("fullmesh_v1", "window", "fullmesh")
SIZES = {"world": (2, 4, 8), "batch": (0, 1, 7, 33), "units": (4, 32, 64), "topk": (1, 2, 6), "shared": (0, 2)}
MATRIX = [
    of_case(draw(5 * seed + at, **SIZES, contract=(1 + at % 2,), ids=("distinct",)), op, soc, (24, 40, 48)[seed % 3])
    for at, (op, soc, seed) in enumerate(
        itertools.product((native.OP_DISPATCH, native.OP_COMBINE), (A3, A2), range(24))
    )
]


REFUSED = [
    dispatch().changed(ep_rank_id=8),
    dispatch().changed(scales=(torch.float32, (32, 256))),
    dispatch().changed(x=(INT, (16, 256))),
    dispatch().changed(x_active_mask=(torch.bool, (15,))),
    dispatch().changed(comm_alg="quick"),
    dispatch(contract=2).changed(copy_expert_num=1025),
    combine(contract=2).changed(expand_idx=(INT, (3,))),
    combine(dtype=torch.float32).changed(comm_quant_mode=2),
    combine().changed(**local_addends((torch.bfloat16, (16, 256)))),
    dispatch(soc=A2, share=4).changed(comm_alg="direct"),
    dispatch(soc=A2, share=4, contract=2).changed(comm_alg="hierarchy"),
    combine(soc=A2, share=1, contract=2).changed(comm_alg="hierarchy"),
    combine(soc=A2, share=4).changed(comm_alg="hierarchy"),
]
# Two levels, between servers.
LEVELS = [
    dispatch(soc=A2, share=4, contract=2).changed(comm_alg="hierarchy", expert_scales=(torch.float32, (16, 4))),
    combine(soc=A2, share=4, contract=2).changed(comm_alg="hierarchy"),
    combine(soc=A2, share=2, contract=2).changed(comm_alg="hierarchy", comm_quant_mode=2),
]


def test_tiling_is_the_twins_plan() -> None:
    """The same bytes behind CANN's head, key, cores and workspace; or the same refusal, word for word."""
    accepted, head = [], probe().probe_head_bytes()
    for call in [*MATRIX, *LEVELS, *REFUSED]:
        cann, twin = tile(call), plan(call)
        if twin.error:
            assert cann.error == f"{call.op_type}: {twin.error}", call
            continue
        assert cann.error == "" and call not in REFUSED, call
        assert cann.data[head:] == twin.data[head:], call
        assert (cann.key, cann.cores) == (twin.key, call.cores) == (twin.key, twin.cores), call
        assert cann.schedule_mode == 1  # all cores start together: they wait for each other
        assert (cann.workspaces, cann.workspace) == (1, SYSTEM_WORKSPACE + twin.workspace), call
        accepted.append((call, twin))
    assert len({twin.data for _, twin in accepted}) >= 50
    assert {twin.key for _, twin in accepted} == {1000, 1002, 1012, 1100, 1102, 3000, 3002}
    assert 0 in {call.tensors["expert_ids"][1][0] for call, _ in accepted}


ONE_SERVER, STORES, RDMA = "BatchWrite=level0:fullmesh", "BatchWrite=level1:hierarchy", "BatchWrite=level1:fullmesh"


def algorithm_of(tiled: Tiled) -> str:
    """The algConfig in the head of tiling data, or the error."""
    at = probe().probe_head_cc() + 128
    return tiled.error or tiled.data[at : at + 128].rstrip(b"\0").decode()


@pytest.mark.parametrize(
    ("soc", "task", "engine", "algorithm"),
    [(A3, 8, 3, "AlltoAll=level0:fullmesh;level1:pairwise"), (A2, 18, 0, ONE_SERVER)],
)
@pytest.mark.parametrize("make", [dispatch, combine])
def test_head_asks_hccl_for_the_task_of_the_soc(make, soc: str, task: int, engine: int, algorithm: str) -> None:
    """One task, of group_ep, at the place that the init block names; the twin's own head is empty. No AICPU on A3."""
    call = make(soc=soc)
    data, bare = tile(call).data, plan(call).data
    head, cc = probe().probe_head_bytes(), probe().probe_head_cc()
    word = [int.from_bytes(data[at : at + 4], "little") for at in range(0, head, 4)]
    assert word[1:3] == [1, cc]
    assert data[cc : cc + 128].rstrip(b"\0") == GROUP.encode()
    assert algorithm_of(tile(call)) == algorithm
    assert word[(cc + 256) // 4 : (cc + 264) // 4] == [task, engine]
    assert cc == 64  # CANN's Mc2InitTiling
    assert head - cc >= 512  # Mc2CcTiling of CANN 9.1, the larger
    assert not any(bare[:head])


LEVELS_CALL = {"comm_alg": "hierarchy", "expert_scales": (torch.float32, (16, 4))}
PCIE, ROCE = "HCCL_INTRA_PCIE_ENABLE", "HCCL_INTRA_ROCE_ENABLE"


@pytest.mark.parametrize(
    ("version", "variables", "share", "stores", "rdma"),
    [
        (None, {}, 4, STORES, RDMA),
        ("8.3.RC1", {PCIE: "1", ROCE: "0"}, 4, STORES, RDMA),
        ("9.1.0", {}, 1, RDMA, RDMA),  # a rank a server: nobody to store to
        ("8.2.RC1", {}, 8, ONE_SERVER, ONE_SERVER),
        ("8.2.RC1", {PCIE: "1", ROCE: "0"}, 4, ONE_SERVER, "RDMA between all ranks (comm_alg 'window') needs CANN 8.3"),
        ("8.2.RC1", {PCIE: "1", ROCE: "0"}, 1, ONE_SERVER, ONE_SERVER),
        ("8.2.RC1", {PCIE: "1"}, 4, ONE_SERVER, "RDMA between all ranks (comm_alg 'window') needs CANN 8.3"),
        ("8.1.RC1", {}, 4, "stores within a server (comm_alg 'hierarchy', ASCEND_MOE_INTRA", ONE_SERVER),
        ("8.1.RC1", {PCIE: "0", ROCE: "1"}, 4, "stores within a server (comm_alg 'hierarchy'", ONE_SERVER),
    ],
)
def test_links_of_an_a2_are_what_the_call_needs(version, variables, share, stores, rdma, monkeypatch) -> None:
    """By the toolkit that runs: its names for them, or the variables that its HCCL reads; else refused."""
    text = None if version is None else version.encode()
    monkeypatch.setattr(ctypes.c_char_p.in_dll(probe(), "probe_hccl_version"), "value", text)
    for name in (PCIE, ROCE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    window = dispatch(soc=A2, share=share, contract=2)
    asks = tile(probe_call(A2, ep_world_size=8, ranks_per_server=share, intra_node_stores=1))
    needs = {"stores": [asks], "rdma": [tile(window), tile(probe_call(A2, ep_world_size=8, ranks_per_server=share))]}
    if share == 4:
        needs["stores"].append(tile(window.changed(**LEVELS_CALL)))
        monkeypatch.setenv("ASCEND_MOE_INTRA_NODE_STORES", "1")
        needs["stores"].append(tile(combine(soc=A2, share=share)))
    for wanted, tiled in ((stores, needs["stores"]), (rdma, needs["rdma"])):
        for each in tiled:
            assert algorithm_of(each) == wanted or f": 8 ranks with {share} a server: {wanted}" in each.error


def test_hccls_server_posts_with_more_threads_above_8_ranks_of_an_a2() -> None:
    for soc, world, blocks in ((A2, 8, 0), (A2, 16, 6), (A3, 16, 0)):
        assert tile(dispatch(soc=soc, world=world)).aicpu_blocks == blocks
        assert tile(probe_call(soc, ep_world_size=world, ranks_per_server=world)).aicpu_blocks == blocks


@pytest.mark.parametrize(
    ("settings", "changes", "planned"),
    [
        ({}, {}, {}),
        ({"HCCL_BUFFSIZE": "120"}, {}, {"window_mib": 120}),
        ({"HCCL_BUFFSIZE": "120"}, {"window_mib": 64}, {"window_mib": 64}),
        ({"ASCEND_MOE_TIMEOUT_S": "0.5"}, {}, {"deadline_micros": 500_000}),
        ({"ASCEND_MOE_TIMEOUT_S": "0.5"}, {"timeout_us": 1234}, {"deadline_micros": 1234}),
        ({"ASCEND_MOE_TIMEOUT_S": ""}, {}, {"deadline_micros": 300_000_000}),
        ({"ASCEND_MOE_TIMESTAMPS": "1"}, {}, {"timestamps": 1}),
        ({"ASCEND_MOE_CORE_BARRIER": "syncall"}, {}, {"core_barrier": 1}),
        ({"ASCEND_MOE_CORE_BARRIER": "syncall"}, {"core_barrier": 1}, {"core_barrier": 1}),
        ({"ASCEND_MOE_CORE_BARRIER": "blocks"}, {"core_barrier": 2}, {"core_barrier": 0}),
        ({"ASCEND_MOE_CORE_BARRIER": ""}, {"core_barrier": 2}, {"core_barrier": 1}),  # as bring-up has timed
        ({}, {"core_barrier": 1}, {"core_barrier": 0}),
        # Without ASCEND_MOE_TIMEOUT_S 10 s less than the op-execute timeout in ms, but something.
        (100_000, {}, {"deadline_micros": 90_000_000}),
        (5_000, {}, {"deadline_micros": 1_000_000}),
        (1_090_000, {}, {"deadline_micros": 300_000_000}),
    ],
)
def test_window_and_deadline_of_attributes_and_environment(settings, changes, planned, monkeypatch) -> None:
    if isinstance(settings, int):
        monkeypatch.setattr(ctypes.c_uint32.in_dll(probe(), "probe_op_timeout"), "value", settings)
        settings = {"ASCEND_MOE_TIMEOUT_S": ""}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    call, head = dispatch(), probe().probe_head_bytes()
    assert tile(call.changed(**changes)).data[head:] == plan(call, **planned).data[head:] != b""


SERVERS = [(world, share) for world in (*range(1, 17), 24, 33, 48, 64) for share in range(-1, world + 3)]


@pytest.mark.parametrize("make", [dispatch, combine])
def test_servers_of_an_a2(make) -> None:
    """Every number of ranks a server: a whole number of servers, told, or refused; none reads between them."""
    head = probe().probe_head_bytes()
    for world, share in SERVERS:
        call = make(batch=1, world=world, local=1, topk=1, soc=A2, share=share)
        tiled = tile(call)
        if 1 <= share <= world and world % share == 0:
            assert tiled.error == "" and tiled.data[head:] == plan(call).data[head:], (world, share)
            direct = call.changed(comm_alg="direct")
            refused = (
                f"{call.op_type}: comm_alg is 'direct', which reads other ranks' windows; {world} ranks with {share} "
            )
            assert tile(direct).error.startswith(refused) if share < world else tile(direct).error == ""
            assert tile(replace(direct, soc=A3)).error == ""  # stores reach a supernode
        else:
            rule = f"ranks_per_server is {share}, it must divide the {world} ranks of group_ep: on Ascend910B"
            assert tiled.error.startswith(f"{call.op_type}: {rule}"), (world, share, tiled.error)


def test_variables_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("many", "0", "-3", "1.5"):
        monkeypatch.setenv("HCCL_BUFFSIZE", text)
        assert "HCCL_BUFFSIZE is no whole number of MiB" in tile(dispatch()).error
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    assert "HCCL_BUFFSIZE is 1, it must be more than 1: the state area of Ascend910B" in tile(dispatch(soc=A2)).error
    assert tile(dispatch()).error == ""
    monkeypatch.setenv("ASCEND_MOE_REGISTERED_MIB", "1")
    assert "HCCL_BUFFSIZE is 1, it must be more than 1: " in tile(dispatch()).error
    for text in ("-1", "some", "1.5"):
        monkeypatch.setenv("ASCEND_MOE_REGISTERED_MIB", text)
        assert "ASCEND_MOE_REGISTERED_MIB is no whole number of MiB" in tile(dispatch()).error
    monkeypatch.delenv("ASCEND_MOE_REGISTERED_MIB")
    monkeypatch.delenv("HCCL_BUFFSIZE")
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "soon")
    assert "ASCEND_MOE_TIMEOUT_S is no number of seconds above 0" in tile(dispatch()).error


@pytest.mark.parametrize("make", [dispatch, combine])
def test_window_too_small(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused in the plan's own words; with the MiB that they ask for it is tiled."""
    call = make(batch=512, hidden=7168, topk=8, world=16, local=16, contract=2, soc=A2, share=8)
    monkeypatch.setenv("HCCL_BUFFSIZE", "20")
    error = tile(call).error
    assert error == f"{call.op_type}: {plan(call, 20).error}"
    monkeypatch.setenv("HCCL_BUFFSIZE", error.split("export HCCL_BUFFSIZE=")[1].split(" ")[0])
    assert tile(call).error == ""


def test_soc_of_the_platform_or_else_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    running = ctypes.c_char_p.in_dll(probe(), "probe_soc")
    assert "the SoC is unknown, the kernels are built for" in tile(dispatch(soc="")).error
    unknown = tile(dispatch(soc="Ascend310P3")).error
    assert "the SoC is Ascend310P3, the kernels are built for Ascend910B and Ascend910_93" in unknown
    assert tile(dispatch(soc="Ascend910B1")).data == tile(dispatch(soc=A2)).data
    for soc, other in ((A2, A3), (A3, A2)):
        monkeypatch.setattr(running, "value", soc.encode())
        assert tile(dispatch(soc="")).data == tile(dispatch(soc=soc)).data != b""
        assert tile(dispatch(soc=other)).data != tile(dispatch(soc="")).data  # the platform comes first


def test_what_the_definition_asks_for_is_missing() -> None:
    call = dispatch()
    assert tile(call.changed(x=None)).error.endswith("input expert_ids is missing, it is required")
    assert "contract is 3, it must be 1 or 2" in tile(call.changed(contract=3)).error
    for name in ("contract", "part"):
        for wide in (2**32 + 1, -(2**32) + 1, 2**63 - 1):  # whose low bits are allowed
            assert (
                f"{name} is {min(max(wide, -(2**31)), 2**31 - 1)}, it must be"
                in tile(call.changed(**{name: wide})).error
            )
    assert "group_ep has 128 characters" in tile(replace(call, group="g" * 128)).error


def test_shapes_are_those_that_are_allocated() -> None:
    for call in MATRIX:
        expected = [(dtype, tuple(shape)) for dtype, shape in native.outputs_of(call.spec(200, 1))]
        assert shapes(call) == [*expected, (INT, (64,))], call


def test_sizes_that_a_graph_does_not_know() -> None:
    call = dispatch(batch=-1)
    inferred = shapes(call)
    assert not isinstance(inferred, str)
    assert [len(shape) for _, shape in inferred] == [2, 1, 1, 1, 1, 1, 1, 1]
    assert {size for _, shape in inferred[:-1] for size in shape} == {-1}
    assert inferred[-1] == (INT, (64,))


def test_definition_of_the_probe() -> None:
    known = definition(PROBE_TYPE)
    assert (known.inputs, known.outputs, known.types) == ([], ["report"], {"report": (3,)})
    assert shapes(probe_call()) == [(INT, (64, 8))] and known.groups == ["group_ep"]


@pytest.mark.parametrize("op_type", ["AscendMoeDistributeDispatch", "AscendMoeDistributeCombine"])
def test_definitions_list_nd_formats_and_aligned_types(op_type: str) -> None:
    """ND everywhere, aligned type lists, both SoCs, the one group that exists."""
    known = definition(op_type)
    rows = known.types["x"]
    assert rows[:3] == (27, 1, 0)  # bf16, fp16, fp32: the dtypes of the kernels
    assert {len(types) for types in known.types.values()} == {len(rows)} == set(known.formats.values())
    if op_type.endswith("Dispatch"):
        assert list(zip(known.types["x"], known.types["expand_x"], strict=True)) == [
            *((row, row) for row in rows[:3]),
            *((row, 2) for row in rows[:3]),
        ]
    assert known.groups == ["group_ep"]
    assert "group_ep" in known.required
    common = {
        "aclnnSupport.value": "support_aclnn",
        "prebuildPattern.value": "Opaque",
        "multiKernelSupportDynamicGraph.value": "multi_kernel",
        "needCheckSupport.flag": "true",
    }
    for soc, jit in (("ascend910b", "static_false"), ("ascend910_93", "static_true")):
        wanted = {(soc, name): value for name, value in {**common, "jitCompile.flag": jit}.items()}
        assert wanted.items() <= known.configs.items()
    assert {soc for soc, _ in known.configs} == {"ascend910b", "ascend910_93"}
    supported, reason = known.graph.split(" ", 1)
    assert supported == "0"
    assert json.loads(reason)["ret_code"] == "0"
    assert "cannot be part of a GE graph (torchair)" in json.loads(reason)["reason"]


# ---- the probe of the bring-up


def probe_call(soc: str = A3, cores: int = 48, **attributes: int | str) -> str:
    """For ``probe_tile``: rank 1 of 4, the probe of stores."""
    values: dict[str, int | str] = {
        "group_ep": GROUP,
        "ep_world_size": 4,
        "ep_rank_id": 1,
        "mode": MODES["store"],
        "nonce": 77,
        "ranks_per_server": 4,
        **attributes,
    }
    return call_of(PROBE_TYPE, soc, cores, values)


def call_of(op_type: str, soc: str, cores: int, values: dict[str, int | str]) -> str:
    lines = [f"op {op_type}", f"soc {soc}", f"cores {cores}"]
    for name, (kind, default) in definition(op_type).attributes.items():
        lines.append(f"{'number' if kind == 'int' else 'text'} {values.get(name, default)}")
    return "\n".join(lines)


@pytest.mark.parametrize(("soc", "kind", "cores"), [(A3, 1, 48), (A2, 2, 40)])
def test_the_probes_tiling_is_that_of_the_twin(soc: str, kind: int, cores: int) -> None:
    """The bytes that the twin's own launches of the probe have, behind CANN's head."""
    tiled = tile(probe_call(soc, cores, rounds=9, timeout_us=10, window_mib=30))
    head = probe().probe_head_bytes()
    wanted = ProbeTiling(mode=MODES["store"], world=4, rank=1, cores=cores, context_kind=kind, nonce=77, rounds=9)
    wanted.data_bytes = (30 - (kind == 2)) << 20
    wanted.intra_node_ranks = 4 * (kind == 2)
    wanted.deadline_cycles = 10 * CYCLES_PER_MICRO
    assert (tiled.error, tiled.data[head:]) == ("", bytes(wanted))
    assert (tiled.key, tiled.cores, tiled.schedule_mode, tiled.workspaces) == (TILING_KEY, cores, 1, 1)
    assert tiled.workspace == SYSTEM_WORKSPACE + WORKSPACE_BYTES
    assert tiled.data[:head] == tile(dispatch(soc=soc)).data[:head]
    for stores, reached in ((0, 1), (1, 2)):
        half = tile(probe_call(soc, cores, ranks_per_server=2, intra_node_stores=stores))
        assert ProbeTiling.from_buffer_copy(half.data[head:]).intra_node_ranks == reached * (kind == 2)
    by_settings = ProbeTiling.from_buffer_copy(tile(probe_call(soc, cycles=1234)).data[head:])
    assert (by_settings.deadline_cycles, by_settings.data_bytes) == (1234, (200 - (kind == 2)) << 20)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mode": 0}, "mode is 0, it must be 1 to 17"),
        ({"mode": 18}, "mode is 18, it must be 1 to 17"),
        ({"ep_rank_id": 4}, "ep_rank_id is 4, it must be 0 to 3"),
        ({"ep_world_size": 385}, "ep_world_size is 385, it must be 1 to 384"),
        ({"nonce": 0}, "nonce is 0, it must be 1 to 4294967295"),
        ({"rounds": 0}, "rounds is 0, it must be 1 to 4294967295"),
        ({"cycles": -1}, "cycles is -1, it must be 0 to"),
        ({"cores": 1}, "the number of vector cores is 1, it must be 3 to 64"),
        ({"soc": A2, "ranks_per_server": 0}, "ranks_per_server is 0, it must divide the 4 ranks of group_ep: on A"),
        ({"soc": A2, "ranks_per_server": 8}, "ranks_per_server is 8, it must divide the 4 ranks of group_ep: on A"),
        ({"soc": A2, "ranks_per_server": 3}, "ranks_per_server is 3, it must divide the 4 ranks of group_ep: on A"),
        ({"intra_node_stores": 2}, "intra_node_stores is 2, it must be 0 to 1"),
        ({"soc": "Ascend310P3"}, "the SoC is Ascend310P3, the kernels are built for"),
    ],
)
def test_probe_refuses(changes: dict[str, int | str], text: str) -> None:
    error = tile(probe_call(**changes)).error
    assert error.startswith(f"{PROBE_TYPE}: {text}")


# ---- several ranks in one launch


def test_one_card_launches_what_its_caller_has_planned() -> None:
    """The address, key and cores that it is given, without a group; not more cores than there are."""

    def call(cores: int) -> str:
        values: dict[str, int | str] = {"ranks": 4096, "world": 4, "cores": cores, "tiling_key": 11102}
        return call_of(ONE_CARD_TYPE, A3, 48, values)

    tiled = tile(call(12))
    assert (tiled.error, tiled.data) == ("", struct.pack("<QII", 4096, 4, 12))
    assert (tiled.key, tiled.cores, tiled.schedule_mode) == (11102, 48, 1)
    assert shapes(call(12)) == [(INT, (64, 8))] and definition(ONE_CARD_TYPE).groups == []
    assert tile(call(13)).error == f"{ONE_CARD_TYPE}: cores is 13, it must be 1 to 12"
