"""The checked engine finds nothing in the kernels under any schedule, and finds what must be found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from explored_programs import LARGE_SHARES, MODES, Worlds, assert_nothing_found

from ascend_moe import explore
from ascend_moe.errors import ArgumentError
from ascend_moe.explore import Options, Program, World, draws
from ascend_moe.explore.reached import reached

REGISTERED = Program(world=2, cores=2, local=2, topk=2, batch=3, algorithm="direct", rows="registered", ids="distinct")

each_mode = pytest.mark.parametrize("mode", MODES)


# ---- cases


def test_a_case_is_what_its_text_says() -> None:
    assert explore.parse("") == Program()
    case = explore.parse("w3,c4,l2,k3,b1,u4,v2,s9,fp32,smooth,mask:pair,ids:hot,equal,DDCC")
    assert (case.world, case.cores, case.local, case.topk, case.batch, case.units) == (3, 4, 2, 3, 1, 4)
    assert (case.contract, case.seed, case.dtype, case.quant) == (2, 9, "fp32", "smooth")
    assert (case.mask, case.ids, case.batches, case.sequence) == ("pair", "hot", "equal", "DDCC")


def test_every_kind_of_case_is_spelled_out_and_fits() -> None:
    """A drawn program can be written down and read again; a seed draws the same."""
    for kind in draws.KINDS:
        for seed in range(30):
            case = draws.draw_of(kind, seed)
            assert explore.parse(str(case)) == case == draws.draw_of(kind, seed), (kind, seed)


@pytest.mark.parametrize(
    "text",
    [
        *("w385", "k3", "l0", "v1,measured", "v3", "CD", "DCC", "mask:odd", "bf17", "x4", "v2,h1", "v1,h2", "n2", "t2"),
        *("fault:x", "v1,fault:source_index", "w1,fault:kill"),
    ],
)
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="explore: ") as caught:
        explore.parse(text)
    assert "\n" not in str(caught.value)


def test_what_a_change_of_the_kernels_explores() -> None:
    """The begin of `ascend-moe explore`: its cases use every ring, and come to the second of all chunks and batches."""
    result = explore.campaign(schedules=440)
    assert_nothing_found(result)
    assert result.cases > 100 and result.distinct > 400
    assert [name for name in explore.REACHED if not result.reached[name]] == []


REACHES = {
    "w1,c1,l3,k3,b171,u1,v1,equal,DC": "routed-tokens send-ring window-copies index return-ring sum-ring sums",
    "w1,c1,l1,k1,b513,u1,v2,equal,ids:distinct,DC": "routed-tokens send-ring sum-ring sums source-indices",
    "w2,c4,l512,k2,b1,u1,v2,equal,ids:distinct,D": "histograms",
    "w1,c3,l1,k1,b1,u66,v2,equal,ids:distinct,DC,h2": "parts shorter-part shared-in-parts",
    "w1,c8,l1,k1,b40,u1,v2,equal,ids:distinct,D": "send-ring trailer-ring",
    "w1,c1,l1,k1,b1,u449,v1,equal,ids:distinct,int8,D": "quantized-pieces",
    "w1,c1,l1,k1,b1,u448,v1,equal,ids:distinct,int8,D": "",
    "w2,c1,l2,k2,b2,u1,v2,equal,ids:distinct,r1,D": "aligned-ends window-copies",
    "w4,c2,l2,k8,b2,u1,v2,equal,ids:distinct,r2,weights,dc,hierarchy": "records servers'-sums two-launches",
    "w8,c2,l1,k1,b1,u1,v2,equal,ids:distinct,D": "counts-by-vectors",
    "w1,c3,l2,k1,b2,u1,v2,m2,equal,ids:distinct,D,direct": "roles",
    "w1,c8,l2,k2,b32,u1,v2,m2,equal,ids:distinct,D,direct": "roles shared-rows gather-chunks send-ring",
    "w1,c1,l1,k1,b65,u1,v1,equal,ids:distinct,D,direct,weights": "weights send-ring",
    "w4,c1,l8,k32,b33,u1,v2,equal,ids:none,r2,weights,D,hierarchy": "routed-tokens record-batches server-chunks",
    "w2,c1,l1,k1,b10,u400,v2,equal,ids:popular,r1,flags,D": "flag-loads send-ring window-copies",
    "w2,c1,l1,k1,b1,u1,v2,measured,ids:none,equal,D": "times",
    "w1,c4,l1,k1,b1,u449,v2,equal,ids:distinct,comm_quant_mode:2,DC": "parts coded-pieces coded-parts shorter-part",
    "w1,c2,l1,k1,b2,u1,v1,equal,ids:distinct,dc": "two-launches",
    "w1,c1,l1,k1,b9,u1,v1,equal,ids:none,D": "",
}


@pytest.mark.parametrize("text", REACHES)
def test_what_a_case_reaches(text: str, worlds: Worlds) -> None:
    program = worlds(explore.parse(text).world).load(explore.parse(text))
    found = reached(program)
    assert {name.replace(" ", "-") for name in found} == {*REACHES[text].split()} and found <= {*explore.REACHED}


@pytest.mark.parametrize("text", LARGE_SHARES)
def test_large_and_empty_shares_have_no_finding(text: str) -> None:
    assert_nothing_found(explore.explore(explore.parse(text), schedules=2))


@pytest.mark.parametrize("policy", ["late", "random", "lazy", "pct"])
@pytest.mark.parametrize("stores", ["fifo", "unordered"])
@each_mode
def test_every_policy_and_order_of_stores(mode: str, policy: str, stores: str) -> None:
    case = Program(world=2, cores=3, local=2, sequence="DDCC", quant_mode=2, seed=3)
    options = Options(policy=policy, store_order=stores)
    result = explore.explore(replace(case, **MODES[mode]), 8, 7, options)
    assert_nothing_found(result)
    assert result.distinct == 1 if policy == "late" else result.distinct > 5


@pytest.mark.parametrize("algorithm", ["window", "direct"])
def test_all_schedules_with_a_switch(algorithm: str) -> None:
    result = explore.exhaustive(explore.parse(f"w2,c1,k1,b1,u1,DC,{algorithm}"), preemptions=1)
    assert_nothing_found(result)
    assert result.schedules > 100  # to the end, no limit was given
    assert result.distinct > 15
    finding = explore.ScheduleFinding("race", "", Program(), 1, Options(policy="exhaustive"), (0, 2, 0, 1))
    assert finding.command().endswith(" --replay 1:2,3:1")


def test_a_seed_is_a_schedule() -> None:
    with World(2) as world:
        world.load(Program(world=2, cores=2, seed=1))
        first = [world.run(seed, 1).last_hash for seed in range(20)]
        assert [world.run(seed, 1).last_hash for seed in range(20)] == first
        assert len(set(first)) > 15
        # A replay of the choices is the same schedule.
        for seed in range(10):
            options = Options(policy="random", store_order="fifo", vary_epoch=False)
            want = world.run(seed, 1, options).last_hash
            again = replace(options, policy="replay", choices=tuple(world.choices()))
            assert world.run(seed, 1, again).last_hash == want


# ---- what must be found


def test_a_result_that_is_not_the_references_is_a_finding() -> None:
    case = Program(seed=2, batch=3)
    with World(case.world) as world:
        program = world.load(case)
        victim = next(call for call in program.calls if call.name.endswith("combine") and call.expected[0].numel())
        victim.expected[0].view(torch.uint8)[0, 0] ^= 1
        run = world.run(0, 5)
    assert run.failed and run.kind == b"wrong result" and run.schedules == 1
    assert f"of rank {victim.rank} (combine): output 0 differs" in run.message.decode()


@pytest.mark.parametrize("sequence", ["DDCC", "DCDC", "DDDCCC"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_buffer_registered_one_op_too_early_is_found(sequence: str, seed: int) -> None:
    """The positive control: C1 has returned here, C2's rows are put where other ranks still read C1's."""
    case = replace(REGISTERED, sequence=sequence, rows="early", seed=seed, batches="equal")
    result = explore.explore(case, 200 if "CC" in sequence else 60)
    if "CC" in sequence:
        assert result.finding is not None, "no schedule has found it"
        assert result.finding.kind == "race between ranks", result.finding.line()
        assert "write of the host" in result.finding.line()
    else:  # an op lies between: the same memory again is lawful
        assert_nothing_found(result)


def test_rows_that_do_not_fit_into_registered_areas() -> None:
    """Windows are made large enough for a case; the engine itself refuses one that is too large for them."""
    case = explore.parse("w2,c2,l3,k3,b520,u16,v1,registered,direct,DC,equal,ids:distinct")
    assert_nothing_found(explore.explore(case, schedules=1))
    with World(case.world, window_mib=1) as world:
        world.window_bytes = 4 << 20  # for the plans
        with pytest.raises(MemoryError, match=": rows do not fit into 4 MiB: pass a larger window_mib"):
            world.load(case)
        world.window_bytes = 1 << 20
        world.load(REGISTERED)
        assert not world.run(0).failed


def between_servers() -> Iterator[Program]:
    """Drawn cases between servers, all with rows of more than one block."""
    for seed in range(10_000):
        case = replace(explore.draw(seed), algorithm="window", rows="own", list_cores=0, units=5 + seed % 40)
        yield replace(case, servers=1 + seed % 2, stores=seed // 2 % 2 == 1)


def test_without_flags_blocks_in_any_order_are_found() -> None:
    """The control of ASCEND_MOE_RDMA_FLAGS: rows are missing behind a message that has come."""
    result = explore.campaign(between_servers(), 300, seed=0, a_case=5, options=Options(reordered=True))
    assert result.finding is not None and result.finding.kind == "wrong result", result
    assert_nothing_found(explore.campaign(between_servers(), 60, seed=0, a_case=5))
