"""Explore mode: our kernels have no finding in any schedule, and the harness sees what it must see."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from error_codes import CORRUPT, PEER_LOST, TIMEOUT
from killed_ranks import killed

from ascend_moe import explore
from ascend_moe.errors import ArgumentError
from ascend_moe.explore import Faults, Options, Program, World
from ascend_moe.explore.program import SEQUENCES

COLLECTIVE = range(1, 7)
LENT = Program(world=2, cores=2, local=2, topk=2, batch=3, algorithm="direct", rows="lent", ids="distinct")
#: What a case is changed to, by what it then explores.
MODES = {
    "window": {"algorithm": "window"},
    "servers": {"algorithm": "window", "servers": 1},
    "direct": {"algorithm": "direct"},
    "mixed": {"algorithm": "mixed"},
    "lent": {"algorithm": "direct", "rows": "lent"},
    "roles": {"algorithm": "direct", "list_cores": 2, "cores": 4},
}
each_mode = pytest.mark.parametrize("mode", MODES)


def assert_nothing_found(result: explore.Result) -> None:
    assert result.finding is None, result.finding.line()


# ---- cases


def test_a_case_is_what_its_text_says() -> None:
    for seed in range(200):
        case = explore.draw(seed)
        assert explore.parse(str(case)) == case
    assert explore.parse("") == Program()
    assert explore.parse("w3,c4,l2,k3,b1,u4,v2,s9,fp32,smooth,mask:pair,ids:hot,equal,DDCC") == Program(
        world=3,
        cores=4,
        local=2,
        topk=3,
        batch=1,
        units=4,
        dtype="fp32",
        quant="smooth",
        contract=2,
        mask="pair",
        ids="hot",
        batches="equal",
        sequence="DDCC",
        seed=9,
    )
    for changes in MODES.values():
        case = Program(**changes)
        assert explore.parse(str(case)) == case
    assert explore.parse("partly").rows == "partly" and explore.parse("").rows == "own"


@pytest.mark.parametrize("text", ["w9", "k3", "l0", "v3", "CD", "DCC", "mask:odd", "bf17", "x4"])
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="explore: ") as caught:
        explore.parse(text)
    assert "\n" not in str(caught.value)


# ---- no schedule has a finding


def drawn(mode: str, first: int, count: int) -> Iterator[Program]:
    for seed in range(first, first + count):
        case = replace(explore.draw(seed), **MODES[mode])
        if mode == "servers":
            case = replace(case, servers=1 + seed % 2)
        elif mode == "lent":
            rows, algorithm = ("partly", "lent")[seed % 2], "direct" if seed % 3 else "mixed"
            case = replace(case, rows=rows, algorithm=algorithm)
        elif mode == "roles":
            cores = explore.draw(seed).cores
            algorithm = "direct" if seed % 2 else "mixed"
            case = replace(case, cores=cores + 1, list_cores=1 + seed % cores, algorithm=algorithm)
        yield case


@each_mode
@pytest.mark.parametrize(
    ("first", "schedules"), [(80_000, 120), pytest.param(90_000, 2000, marks=pytest.mark.nightly)]
)
def test_random_cases_and_schedules_have_no_finding(mode: str, first: int, schedules: int) -> None:
    result = explore.campaign(drawn(mode, first, schedules // 10), schedules, seed=1, a_case=10)
    assert_nothing_found(result)
    assert result.schedules == schedules and 2 * result.distinct >= schedules
    # Status messages and abort blocks; the word by which core 0 calls others off, or the transport.
    assert len(result.polls) == (2 if mode == "window" else 3)


def test_a_row_that_crosses_once_for_many_experts() -> None:
    sizes = ("w2,c8,k3,b4,v2,m2,int8,mask:none", "w3,c8,k2,b3,v1,m3,none,mask:token")
    sizes += ("w2,c9,k4,b5,v2,m1,int8,mask:pair", "w1,c8,k3,b9,v2,m2,none,mask:none")
    cases = [
        explore.parse(f"{size},l8,u1,bf16,ids:any,equal,DC,direct,s{seed}") for seed, size in enumerate(sizes)
    ]
    result = explore.campaign(cases, schedules=40, seed=1, a_case=10)
    assert_nothing_found(result)
    assert result.schedules == 40


@pytest.mark.parametrize("policy", ["late", "random", "lazy", "pct"])
@pytest.mark.parametrize("stores", ["fifo", "unordered"])
@each_mode
def test_every_policy_and_order_of_stores(mode: str, policy: str, stores: str) -> None:
    case = Program(world=2, cores=3, local=2, sequence="DDCC", quant="int8", seed=3)
    options = Options(policy=policy, store_order=stores)
    result = explore.explore(replace(case, **MODES[mode]), 8, 7, options)
    assert_nothing_found(result)
    assert result.distinct == 1 if policy == "late" else result.distinct > 5


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize(
    "case",
    [Program(), LENT, pytest.param(replace(LENT, rows="partly"), marks=pytest.mark.nightly)],
    ids=["own", "lent", "partly"],
)
def test_sequences(sequence: str, contract: int, case: Program) -> None:
    case = replace(case, sequence=sequence, contract=contract, seed=5)
    assert_nothing_found(explore.explore(case, 10))


@pytest.mark.parametrize("algorithm", ["window", "direct"])
def test_all_schedules_with_a_switch(algorithm: str) -> None:
    result = explore.exhaustive(explore.parse(f"w2,c1,k1,b1,u1,DC,{algorithm}"), preemptions=1)
    assert_nothing_found(result)
    assert result.schedules > 100  # to the end, no limit was given
    assert result.distinct > 20


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
        victim = next(
            call for call in program.calls if call.name.endswith("combine") and call.expected[0].numel()
        )
        victim.expected[0].view(torch.uint8)[0, 0] ^= 1
        run = world.run(0, 5)
    assert run.failed and run.kind == b"wrong result" and run.schedules == 1
    assert f"of rank {victim.rank} (combine): output 0 differs" in run.message.decode()


@pytest.mark.parametrize("sequence", ["DDCC", "DCDC", "DDDCCC"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_memory_that_is_lent_one_op_too_early_is_found(sequence: str, seed: int) -> None:
    """The positive control: C1 has returned here, C2's rows are put where other ranks still read C1's."""
    case = replace(LENT, sequence=sequence, rows="early", seed=seed, batches="equal")
    result = explore.explore(case, 200 if "CC" in sequence else 60)
    if "CC" in sequence:
        assert result.finding is not None, "no schedule has found it"
        assert result.finding.kind == "race between ranks", result.finding.line()
        assert "write of the host" in result.finding.line()
    else:  # an op lies between: the same memory again is lawful
        assert_nothing_found(result)


def test_a_run_says_where_its_rows_lie(tmp_path: Path) -> None:
    """Phase, place and generation of the block in header 1, and loads of the peer's lent area."""
    phase_lent, op_combine = 3, 2
    with World(2) as world:
        world.load(replace(LENT, sequence="DCDDCC", batches="equal"))
        run = world.run(0, 1, Options(trace=True, vary_epoch=False))
        assert not run.failed, run.message
        world.write_trace(tmp_path / "trace.jsonl")
    events = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()[1:]]
    places: dict[int, set[tuple[int, int]]] = {0: set(), 1: set()}
    for event in events:
        if event["event"] == "land" and event.get("area") == "state":
            words = [int(word, 16) for word in event["words"].split()]
            if words[1] == op_combine << 24 | phase_lent << 16 | 0xFFFE:
                places[event["rank"]].add((words[7], words[6]))
    for seen in places.values():
        generations, where = zip(*sorted(seen), strict=True)
        assert generations == (1, 2, 3)
        # C1's block is free when D2 has come back: C2 has it again; C3's rows may not lie there.
        assert where[0] == where[1] == 0 and where[2] > 0
    loads = [event for event in events if event["event"] == "load" and event.get("area") == "lent"]
    assert {(event["rank"], event["target"]) for event in loads} == {(0, 0), (0, 1), (1, 0), (1, 1)}


# ---- ranks that are killed, stalled or slow, and turned bits


@pytest.mark.parametrize("mode", ["window", "servers", "direct", "mixed"])
def test_a_killed_rank_is_missed_by_name(mode: str) -> None:
    """Wherever it stops, its stores half on their way too: the others end, right or naming it."""
    case = Program(world=3, cores=2, sequence="DCDC", seed=4)
    lost, finished = killed(replace(case, **MODES[mode]))
    assert lost > 10 and finished > 5


@pytest.mark.parametrize("mode", ["window", "servers", "direct"])
def test_a_stalled_rank_only_delays(mode: str) -> None:
    case = replace(Program(world=3, cores=2, seed=6), **MODES[mode])
    with World(case.world) as world:
        world.load(case)
        for step in range(0, 600, 50):
            run = world.run(step, 1, Options(faults=Faults(stall_rank=1, stall_step=step)))
            assert not run.failed, run.message


@pytest.mark.parametrize("slow", [{"slow_rank": 0}, {"slow_core": 1}, {"slow_link": 1}])
def test_what_is_slow_is_only_slow(slow: dict[str, int]) -> None:
    with World(2) as world:
        world.load(Program(seed=8))
        run = world.run(0, 30, Options(policy="random", faults=Faults(**slow)))
        assert not run.failed, run.message


@pytest.mark.parametrize("algorithm", ["window", "direct"])
def test_a_turned_bit_of_a_status_block_is_never_accepted(algorithm: str) -> None:
    case = Program(world=2, cores=2, local=3, sequence="DC", seed=9, batch=2, algorithm=algorithm)
    # What a bit can look like: another error or configuration, nonsense, or a message that has not come.
    accepted = 1 << CORRUPT | 1 << TIMEOUT | 1 << PEER_LOST | sum(1 << code for code in COLLECTIVE)
    raised = 0
    with World(case.world) as world:
        world.load(case, accepted=accepted | 1)
        for block in range(1, 9):
            for word in range(8):
                turned = 1 << (block * 5 + word) % 32
                faults = Faults(corrupt_block=block, corrupt_word=word, corrupt_xor=turned)
                run = world.run(block, 1, Options(hang_is_finding=False, faults=faults, vary_epoch=False))
                assert not run.failed, (block, word, run.message)
                raised += any(code > 0 for code, _ in world.errors())
    assert raised > 40


def test_the_command_finds_nothing_and_says_what_it_did() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ascend_moe", "explore", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    done = run("-n", "60", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["schedules"] == 60 and said["finding"] is None and said["distinct"] > 30
    done = run("--case", "w2,zebra")
    assert done.returncode == 2 and "zebra" in done.stderr + done.stdout
