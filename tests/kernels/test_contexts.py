"""Every communication context that kernels know gives the same bits; one not of the tiling is refused.

Ranks of other servers are reached by a copy agent instead of stores.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import op_runs
import pytest
from bare_ends import FINISH, SEND, WHOLE, Bare, Planned, plan_of
from failure_windows import ABORT_MAGIC, ABORTS_AT, BLOCK, TIMEOUT, WORDS

import ascendc_twin
from ascend_moe import LocalCluster, comm
from ascend_moe.errors import ArgumentError, KernelFault
from ascend_moe.native import library
from ascend_moe.native.library import lib
from ascend_moe.native.windows import MIB, context_kind, ranks_per_server, window_data_bytes
from ascend_moe.reference.cases import Case
from ascend_moe.settings import CONTEXTS

KINDS = range(len(CONTEXTS))
CODE_CONTEXT_MISMATCH = 19
WINDOW_MIB = 4


# Past 32 ranks A2's addresses are in the array behind `data`.
WIDE = Case(world=34, local=1, topk=2, batch=2, cores=1, batches="unequal", seed=9)


def servers(monkeypatch: pytest.MonkeyPatch, share: int, kind: str, stores: bool = False, flags: bool = False) -> None:
    """So many ranks on each server, 0: all on one; reached by stores; rows between servers in flagged blocks."""
    monkeypatch.setenv("ASCEND_MOE_CONTEXT", kind)
    monkeypatch.setenv("ASCEND_MOE_INTRA_NODE_STORES", str(int(stores)))
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))
    monkeypatch.setenv("ASCEND_MOE_RDMA_FLAGS", str(int(flags)))


# Context, ranks a server, whether the ranks of a server store to each other, and whether blocks have flags.
KNOWN = [("table", 0, False, False), ("a3", 0, False, False), ("a2", 0, False, False), ("a2", 1, True, False)]
KNOWN += [("a2", 2, False, False), ("a2", 3, True, False), ("a2", 2, False, True)]


@pytest.mark.parametrize(("kind", "share", "stores", "flags"), KNOWN)
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 60), marks=pytest.mark.nightly)])
def test_drawn_cases_equal_the_reference_in_every_context(
    monkeypatch: pytest.MonkeyPatch, kind: str, share: int, stores: bool, flags: bool, seeds: range
) -> None:
    servers(monkeypatch, share, kind, stores, flags)
    op_runs.check_drawn(seeds, 5, WINDOW_MIB)


@pytest.mark.parametrize("kind", CONTEXTS)
def test_more_ranks_than_a_context_lists_equal_the_reference(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    servers(monkeypatch, 0, kind)
    with LocalCluster(WIDE.world, window_mib=WINDOW_MIB) as cluster:
        op_runs.check(WIDE, op_runs.run(cluster, WIDE))
        kinds = cluster.run(lambda rank, group: comm.lookup(group, WIDE.world, rank).context_kind)
    assert kinds == [CONTEXTS.index(kind)] * WIDE.world


# ---- the settings


def test_the_context_is_the_one_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_MOE_CONTEXT", raising=False)
    monkeypatch.delenv("ASCEND_MOE_RANKS_PER_SERVER", raising=False)
    assert (context_kind(), ranks_per_server(), window_data_bytes(8)) == (0, 0, 8 * MIB)
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    assert (CONTEXTS[context_kind()], ranks_per_server(), window_data_bytes(8)) == ("a2", 2, 7 * MIB)
    with pytest.raises(ArgumentError, match="window_mib=1 must be at least 2 with an A2 context"):
        window_data_bytes(1)
    monkeypatch.setenv("ASCEND_MOE_CONTEXT", "a3")
    with pytest.raises(ArgumentError, match="servers need a2"):
        context_kind()


# ---- contexts that are not the tiling's


@pytest.fixture
def bare(request: pytest.FixtureRequest) -> Iterator[Bare]:
    end = Bare(*request.param)
    yield end
    end.close()


RECORD_MAGIC, INVALID_ID, OVERFLOW, PEER_LOST = 0x4D4F4552, 1, 2, 16
RECORDS = [
    (0, False, INVALID_ID),
    (0, True, CODE_CONTEXT_MISMATCH),
    (OVERFLOW, False, OVERFLOW),
    (OVERFLOW, True, CODE_CONTEXT_MISMATCH),
    (PEER_LOST, False, PEER_LOST),
    (PEER_LOST, True, PEER_LOST),
]


def launch(end: Bare, planned: Planned, before: int = 0, byte: int = 0) -> tuple[int, KernelFault]:
    """``before``: the error code that the record holds already; ``byte``: of which all inputs are made."""
    record = (ctypes.c_int32 * lib().am_error_record_words())(*((RECORD_MAGIC, before) if before else ()))
    code, fault = end.run(planned, record, byte)
    assert fault == ""
    text = ctypes.create_string_buffer(1024)
    lib().am_error_message(record, text, 1024)
    message = text.value.decode()
    lib().am_error_fields(record, text, 1024)
    fields = dict(field.split("=") for field in text.value.decode().split(";"))
    return code, KernelFault(message, **fields)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize("bare", [(3, 1, kind) for kind in KINDS], ids=CONTEXTS, indirect=True)
@pytest.mark.parametrize(
    ("world", "rank", "mib", "field", "ours", "theirs"),
    [(3, 2, 1, "ep_rank_id", "2", "1"), (2, 1, 1, "ep_world_size", "2", "3"), (3, 1, 2, "data window", "2048", "1024")],
)
def test_a_context_of_another_shape_is_refused_before_any_store(
    bare: Bare, op: str, world: int, rank: int, mib: int, field: str, ours: str, theirs: str
) -> None:
    before = bare.windows()
    code, error = launch(bare, plan_of(op, bare.kind, world, rank, mib))
    assert code == CODE_CONTEXT_MISMATCH
    assert error.details == {"rank": str(rank), "field": field, "ours": ours, "theirs": theirs}
    unit = " KiB" if field == "data window" else ""
    assert f"{field} is {ours}{unit} in this call" in str(error) and f"{theirs}{unit} in the" in str(error)
    assert bare.windows() == before, "a window was written"


@pytest.mark.parametrize("bare", [(1, 0, 0)], indirect=True)
@pytest.mark.parametrize(("before", "fatal", "then"), RECORDS)
def test_a_record_keeps_the_first_failure_until_a_fatal_one(bare: Bare, before: int, fatal: bool, then: int) -> None:
    """On an NPU nobody may have looked at it since."""
    planned = plan_of("dispatch", 0, 1, 0, 2 if fatal else 1, deadline_micros=10_000_000)
    assert launch(bare, planned, before, byte=0 if fatal else 77)[0] == then


@pytest.mark.parametrize("bare", [(3, 1, 0)], indirect=True)
def test_a_table_without_its_magic_is_refused(bare: Bare) -> None:
    assert lib().am_comm_use_context(bare.handle, 1) == 0
    before = bare.windows()
    code, error = launch(bare, plan_of("dispatch", 0, 3, 1, 1))
    assert (code, error.details["field"]) == (CODE_CONTEXT_MISMATCH, "magic")
    assert "not of the same build" in str(error)
    assert bare.windows() == before


PEER_TABLE, WINDOW, NONE = 4, 5, 7  # enum ContextField


def peers(rank: int, table: int, window_kib: int, start: int = 0) -> tuple[list[int], list[int]]:
    """Returns what a kernel reads of the context of a rank of 3, and what it ought to read."""
    windows = ascendc_twin.Windows(3, data_bytes=1 << 20, peer_table=table)
    outs = [np.zeros(17, np.uint64) for _ in range(3)]
    sources = library.native_source_root()
    kernels = ascendc_twin.load(Path(__file__).parent / "show_peers.cpp", includes=[sources / "op_kernel"])
    tilings = [np.array([r, 3, window_kib, start], np.uint32) for r in range(3)]
    kernels.launch("show_peers", [[out] for out in outs], tilings, windows=windows)
    want = [int(area(r).ctypes.data) for r in range(3) for area in (windows.data, windows.state)]
    return outs[rank].tolist(), want


@pytest.mark.parametrize("table", [2984, 3320])
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("window_kib", [1024, 1000])
def test_a3s_peer_table_begins_where_the_context_says(table: int, rank: int, window_kib: int) -> None:
    """And a window larger than planned does no harm."""
    seen, want = peers(rank, table, window_kib)
    assert seen[0] == NONE and seen[2:8] == want
    assert seen[8:] == 3 * want[::2], "in UB, twice, and after the plan of UB"


@pytest.mark.parametrize("start", [8, 192, 2988, 65544, 2**32 - 8])
def test_a_peer_table_in_no_place_is_refused(start: int) -> None:
    assert peers(0, 2984, 1024, start)[0][:2] == [PEER_TABLE, start]


def test_a_window_smaller_than_planned_is_refused() -> None:
    assert peers(0, 2984, 1025)[0][:2] == [WINDOW, 1024]


def test_unknown_contexts_are_refused() -> None:
    end = Bare(2, 0, 0)
    assert [lib().am_comm_use_context(end.handle, kind) for kind in (-1, 3)] == [1, 1]
    assert lib().am_comm_use_servers(end.handle, -1, 0) == 1
    end.close()


# ---- what a rank leaves for the others when its kernel stops: once for each op, in the windows of all ranks

FEW, RANK, EPOCH, FAULT = 3, 1, 7, 20


@pytest.fixture
def end() -> Iterator[Bare]:
    """Rank 1 of 3, whose next op is that of epoch 8; the other ranks do not come."""
    made = Bare(FEW, RANK, kind=0, fill=0)
    lib().am_comm_set_epoch(made.handle, EPOCH)
    yield made
    made.close()


def posted(end: Bare) -> list[tuple[int, int, int, int]]:
    """Epoch, code, culprit and reporter of the rank's abort block in each window."""
    blocks = [end.state(rank, ABORTS_AT + BLOCK * RANK, WORDS) for rank in range(FEW)]
    assert all(block[0] == block[-1] == ABORT_MAGIC for block in blocks), blocks
    return [(block[1], block[2], block[3], block[4]) for block in blocks]


def run_op(end: Bare, part: int = WHOLE, without: str = "", op: str = "dispatch") -> int:
    code, fault = end.run(plan_of(op, 0, FEW, RANK, 1, part), without=without)
    assert bool(fault) == bool(without), fault
    return code


def test_all_ranks_name_the_op_in_which_a_kernel_stopped(end: Bare) -> None:
    """Although it had not taken the op's epoch: a rank that is still in the last op ignores the block."""
    assert run_op(end, without="expert_ids") == FAULT
    assert lib().am_comm_epoch(end.handle) == EPOCH
    assert posted(end) == [(EPOCH + 1, FAULT, RANK, RANK)] * FEW
    assert lib().am_comm_in_op(end.handle, RANK) == 0, "it has left the op"


def test_a_second_launch_that_stops_is_of_the_op_of_the_first(end: Bare) -> None:
    assert run_op(end, SEND, op="combine") == 0
    assert run_op(end, FINISH, "expert_ids", op="combine") == FAULT
    assert posted(end) == [(EPOCH + 1, FAULT, RANK, RANK)] * FEW


def test_a_kernel_that_stops_after_a_failure_leaves_the_first_cause(end: Bare) -> None:
    assert run_op(end) == TIMEOUT
    first = posted(end)
    assert first == [(EPOCH + 1, TIMEOUT, 0, RANK)] * FEW
    assert run_op(end, without="expert_ids") == FAULT
    assert posted(end) == first


# ---- the private ABI


#: (ours, theirs): fields of both; "ours:theirs" where the twin has the vendor's name, as kernels read it.
FIELDS = {
    ("A3Context", "h::A3Context"): (
        "rank:rankId world:rankNum windowBytes:winSize windowsIn:localWindowsIn expBytes:winExpSize "
        "windowsExp:localWindowsExp remoteStart:rWinStart"
    ),
    ("A3Pointer", "h::A3Pointer"): "device:nextDevicePtr",
    ("A3Remote", "h::A3Remote"): "windowsIn windowsExp",
    ("A2Context", "h::A2Context"): (
        "rank:rankId world:rankNum windowBytes:winSize windowsIn windowsOut multiFlag data"
    ),
    ("A2Remote", "h::A2Remote"): "remoteIn:remoteInput localIn:localInput localOut:localOutput",
    ("A2Memory", "h::A2Memory"): "address:addr",
    ("BatchItem", "AscendC::detail::WriteItem"): (
        "local:localBuf remote:remoteBuf bytes:count type:dataType peer:remoteRankId"
    ),
}
HEAD = """
#include <cstddef>
#include "common/contexts.h"
#include "protocol/tiling.h"
#include "twin/api/hccl_context.h"
#include "lib/hccl/hccl.h"
namespace h = twin::hccl;
static_assert(sizeof(moe::A3Pointer) == sizeof(h::A3Pointer), "A3Pointer");
static_assert(sizeof(moe::A2Remote) == sizeof(h::A2Remote), "A2Remote");
static_assert(moe::kA2Ranks == h::kA2Ranks && moe::kA3RemoteStart == h::kA3PeerTables[0], "A3");
static_assert(offsetof(moe::MoeDistributeMc2Head, cc) == 64, "Mc2InitTiling comes first");
"""


def same(ours: str, field: str, theirs: str, other: str) -> str:
    offsets = f"offsetof(moe::{ours}, {field}) == offsetof({theirs}, {other})"
    return f'static_assert({offsets}, "{ours}.{field}");\n'


def test_our_structs_lie_as_those_of_hccl(tmp_path: Path) -> None:
    text = HEAD
    for (ours, theirs), fields in FIELDS.items():
        for field, _, other in (word.partition(":") for word in fields.split()):
            text += same(ours, field, theirs, other or field)
    source = tmp_path / "offsets.cpp"
    source.write_text(text + same("A2Context", "data", "h::A2Context", "aiRMAInfo"))  # the only wrong one
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", str(source)]
    command += [f"-I{library.native_source_root() / folder}" for folder in ("op_kernel", "twin/include")]
    found = subprocess.run(command, capture_output=True, text=True).stderr
    assert re.findall("error: (.*)", found) == ["static assertion failed: A2Context.data"], found
