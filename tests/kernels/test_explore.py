"""Explore mode: our kernels have no finding in any schedule, and the harness sees what it must see."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from error_codes import CORRUPT, PEER_LOST, TIMEOUT

from ascend_moe import explore
from ascend_moe.errors import ArgumentError
from ascend_moe.explore import Faults, Options, Program, World
from ascend_moe.explore.program import SEQUENCES

COLLECTIVE = range(1, 7)


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


@pytest.mark.parametrize("text", ["w9", "k3", "l0", "v3", "CD", "DCC", "mask:odd", "bf17", "x4"])
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="explore: ") as caught:
        explore.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.nightly
def test_random_cases_and_schedules_have_no_finding() -> None:
    result = explore.campaign(schedules=2000, seed=0, a_case=10)
    assert result.finding is None, result.finding.line()
    assert result.schedules == 2000 and result.cases == 200
    assert 2 * result.distinct >= result.schedules
    # Status runs, abort blocks; in direct ops the word by which core 0 would call the others off.
    assert len(result.polls) == 3 and all(waiting > 1000 for waiting, _ in result.polls.values())
    found = sorted(ready for _, ready in result.polls.values())
    assert found[0] == 0 and found[1] > 1000


@pytest.mark.parametrize("policy", ["late", "random", "lazy", "pct"])
@pytest.mark.parametrize("stores", ["fifo", "unordered"])
def test_every_policy_and_order_of_stores(policy: str, stores: str) -> None:
    case = Program(world=2, cores=3, local=2, sequence="DDCC", quant="int8", seed=3)
    result = explore.explore(case, 30, 7, Options(policy=policy, store_order=stores))
    assert result.finding is None, result.finding.line()
    assert result.distinct == 1 if policy == "late" else result.distinct > 20


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("contract", [1, 2])
def test_sequences(sequence: str, contract: int) -> None:
    result = explore.explore(Program(sequence=sequence, contract=contract, seed=5), 20)
    assert result.finding is None, result.finding.line()


def test_all_schedules_with_a_switch() -> None:
    result = explore.exhaustive(explore.parse("w2,c1,k1,b1,u1,DC"), preemptions=1)
    assert result.finding is None, result.finding.line()
    assert result.schedules > 100  # to the end, no limit was given
    assert result.distinct > 30


def test_a_seed_is_a_schedule() -> None:
    case = Program(world=2, cores=2, seed=1)
    with World(2) as world:
        world.load(case)
        first = [world.run(seed, 1).last_hash for seed in range(20)]
        assert [world.run(seed, 1).last_hash for seed in range(20)] == first
        assert len(set(first)) > 15
        # A replay of the choices is the same schedule.
        order = "fifo"
        for seed in range(10):
            options = Options(policy="random", store_order=order, vary_epoch=False)
            want = world.run(seed, 1, options).last_hash
            again = Options(
                policy="replay", store_order=order, vary_epoch=False, choices=tuple(world.choices())
            )
            assert world.run(seed, 1, again).last_hash == want


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


def test_a_killed_rank_is_missed_by_name() -> None:
    case = Program(world=3, cores=2, sequence="DCDC", seed=4)
    lost = finished = 0
    with World(case.world) as world:
        world.load(case, accepted=1 | 1 << PEER_LOST | 1 << TIMEOUT)
        for step in range(0, 1200, 60):
            faults = Faults(kill_rank=2, kill_step=step)
            run = world.run(step, 1, Options(hang_is_finding=False, faults=faults))
            assert not run.failed, run.message
            for call, (code, text) in zip(world.program.calls, world.errors(), strict=True):
                if call.rank == 2:
                    continue
                assert code in (0, PEER_LOST), (code, text)
                lost += code == PEER_LOST
                finished += code == 0
                assert code == 0 or "rank 2" in text
    assert lost > 10 and finished > 5


def test_a_stalled_rank_only_delays() -> None:
    case = Program(world=3, cores=2, seed=6)
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


def test_a_turned_bit_of_a_status_block_is_never_accepted() -> None:
    case = Program(world=2, cores=2, local=3, sequence="DC", seed=9, batch=2)
    # What a bit can look like: another error or configuration, nonsense, or a run that has not come.
    accepted = 1 << CORRUPT | 1 << TIMEOUT | 1 << PEER_LOST | sum(1 << code for code in COLLECTIVE)
    raised = 0
    with World(case.world) as world:
        world.load(case, accepted=accepted | 1)
        for block in range(1, 9):
            for word in range(8):
                faults = Faults(
                    corrupt_block=block, corrupt_word=word, corrupt_xor=1 << (block * 5 + word) % 32
                )
                run = world.run(block, 1, Options(hang_is_finding=False, faults=faults, vary_epoch=False))
                assert not run.failed, (block, word, run.message)
                raised += any(code > 0 for code, _ in world.errors())
    assert raised > 40


def test_the_command_finds_nothing_and_says_what_it_did() -> None:
    command = [sys.executable, "-m", "ascend_moe", "explore"]
    done = subprocess.run([*command, "-n", "200", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["schedules"] == 200 and said["finding"] is None and said["distinct"] > 100
    done = subprocess.run([*command, "--case", "w2,zebra"], capture_output=True, text=True)
    assert done.returncode == 2 and "zebra" in done.stderr + done.stdout
