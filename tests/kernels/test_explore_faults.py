"""Ranks that are killed, stalled, slow or absent, and corrupted status blocks end as they should under any schedule."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import commands
import pytest
import soak_rows
import torch
from explored_programs import LONG, WRONG_INPUTS, Worlds, assert_nothing_found, faulty, long_faulty
from seen_schedules import CONFIG_MISMATCH, INVALID_EXPERT_ID, OK, PEER_LOST, ROUTING_MISMATCH, bits, seen
from soak_rows import Tally

from ascend_moe import explore
from ascend_moe.explore import Program, World
from ascend_moe.explore.draws import draw_of
from ascend_moe.explore.engine import PlannedProgram  # as tests replace it in the engine
from ascend_moe.explore.faults import WrongInputs, fault_of
from ascend_moe.explore.survivors import SteppedVote, Votes, agreed


def played(cases: Iterable[Program], numbers: range, tally: Tally) -> None:
    """A schedule each: what goes wrong is named by all who must name it, and later ops are right, or fail at once."""
    assert_nothing_found(explore.campaign(cases, len(numbers), numbers.start, a_case=1))
    tally.count(cases=len(numbers))


def with_faults(faults: Sequence[str], numbers: range, tally: Tally) -> None:
    played(faulty(numbers, faults), numbers, tally)


@soak_rows.row("kill, explored", quick=60, full=3000, chunk=750)
def test_killed_at_any_step(numbers: range, tally: Tally) -> None:
    with_faults(["kill"], numbers, tally)


@soak_rows.row("kill, explored", quick=90, full=3000, chunk=750)
def test_no_op_fails_that_the_lost_rank_has_completed(numbers: range, tally: Tally) -> None:
    """It dies between two ops while another stands still in one: who is ahead fails in the next, nobody in this."""
    with_faults(["ended"], numbers, tally)


def test_a_rank_that_is_late_in_an_op_completes_it() -> None:
    """Of four ranks one dies after it, one is ahead and fails in the next one, and this one waits for a slow one."""
    (case,) = faulty(range(109, 110), ["ended"])
    assert_nothing_found(explore.campaign([replace(case, world=4)], 1, 109, a_case=1))


def test_what_is_wrong_after_a_loss_is_a_finding(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control of the ranks that go on: another result than the reference of these."""
    load = World.load

    def corrupted(self: World, case: Program, *args: int) -> PlannedProgram:
        program = load(self, case, *args)
        if case.world < 3:  # of three
            expected = program.calls[-1].expected[0].view(torch.uint8)
            expected ^= 1
        return program

    case = Program(world=3, batch=3, batches="equal", ids="distinct", sequence="DC", seed=2, fault_kind="kill")
    worlds(3).load(case)
    assert not worlds(3).run(1).failed and worlds(3).survived
    monkeypatch.setattr(World, "load", corrupted)
    with World(3) as world:
        world.load(case)
        runs = [world.run(seed) for seed in range(1, 4)]
    assert {run.kind for run in runs} == {b"wrong result"}
    assert all(run.message.startswith(b"after a loss, of w") for run in runs)


class LastOneDecides(SteppedVote):
    """Each rank decides, not the first alone."""

    def _swap(self, rank: int, word: int, expected: int, desired: int) -> int:
        if rank == 0 and desired and word < 64 and rank != self._rank:
            super()._swap(rank, word, super()._swap(rank, word, 0, 0), desired)
        return super()._swap(rank, word, expected, desired)


class VotesOfOtherRounds(SteppedVote):
    """Whoever has ever voted counts as one who votes."""

    def _voted(self, rank: int) -> int:
        return max(super()._voted(rank), 1) + 2 * self.round + 2


@pytest.mark.parametrize("broken", [LastOneDecides, VotesOfOtherRounds])
def test_votes_that_go_wrong_are_findings(broken: type[SteppedVote]) -> None:
    """The positive control of how ranks agree; and the right votes of the same seeds."""
    first = next(seed for seed in range(200) if Votes(4, 1, seed, broken).play().wrong)
    assert not Votes(4, 1, first).play().wrong


@soak_rows.row("votes, explored", quick=60, full=5000, chunk=2500)
def test_ranks_agree_in_any_order_of_steps(numbers: range, tally: Tally) -> None:
    def play(seed: int) -> str:
        world = 2 + seed % 5
        agreement = agreed(world, seed // 5 % world, seed)
        assert not agreement.wrong, agreement.wrong
        return f"{world - len(agreement.members)} lost"

    tally.each(numbers, play)


@soak_rows.row("kill, explored", quick=40, full=2000, chunk=500)
def test_survivors_of_direct_leave_their_rows_alone(numbers: range, tally: Tally) -> None:
    """Two ops after the failure a rank would store again where another that has heard of nothing yet may read."""
    case = explore.parse("w3,c2,l1,k2,b2,u1,v1,equal,ids:any,DCDC,direct,fault:kill")
    cases = [replace(case, seed=seed, cores=2 + seed % 2, list_cores=seed % 2) for seed in numbers]
    played(cases, numbers, tally)


@soak_rows.row("wrong inputs, explored", quick=16, full=1000, chunk=250)
def test_wrong_index_of_two_launches(numbers: range, tally: Tally) -> None:
    """The second launch looks at expand_idx itself."""
    case = explore.parse("w2,c2,l2,k2,b4,u1,v1,equal,ids:distinct,dc,window,fault:index")
    cases = [replace(case, seed=seed, cores=1 + seed % 3) for seed in numbers]
    played(cases, numbers, tally)


@soak_rows.row("stop, explored", quick=60, full=1500, chunk=375)
def test_rank_that_calls_no_more(numbers: range, tally: Tally) -> None:
    """As one that is stopped beyond the deadline."""
    with_faults(["absent"], numbers, tally)


@soak_rows.row("stop, explored", quick=40, full=1500, chunk=375)
def test_rank_that_hangs_at_any_step_between_servers(numbers: range, tally: Tally) -> None:
    """Whoever misses a rank that waits for the one that hangs names that one all the same."""
    drawn = (draw_of(("two levels", "two levels", "servers")[seed % 3], seed) for seed in numbers)
    several = (case for case in drawn if 0 < case.servers < case.world)
    played((replace(case, fault_kind="hang") for case in several), numbers, tally)


@soak_rows.row("wrong inputs, explored", quick=140, full=7000, chunk=700)
def test_inputs_that_one_rank_gets_wrong(numbers: range, tally: Tally) -> None:
    with_faults(WRONG_INPUTS, numbers, tally)


@soak_rows.row("wrong inputs, explored", quick=len(LONG) * 4, full=1000, chunk=100)
def test_wrong_inputs_beyond_the_first_chunk(numbers: range, tally: Tally) -> None:
    """Shares of more than 512 pairs or triples, on one core and on several."""
    played(long_faulty(numbers), numbers, tally)


@pytest.mark.parametrize("fault", WRONG_INPUTS)
def test_wrong_inputs_can_be_drawn_without_tokens(fault: str) -> None:
    """Of 100,000 drawn schedules one had such a program."""
    case = explore.parse("w2,c1,l1,k2,b0,u1,v2,equal,ids:distinct,DC,direct")
    drawn = [replace(case, seed=seed, fault_kind=fault) for seed in range(20)]
    assert all(fault_of(program) for program in drawn if explore.applies(program, fault))


@pytest.mark.parametrize("fault", WRONG_INPUTS)
def test_another_error_than_the_one_to_come_is_a_finding(fault: str, worlds: Worlds) -> None:
    """The positive control of wrong inputs."""
    shown = 0
    for case in (case for case in faulty(range(30), [fault]) if case.world == 2 and case.fault_kind == fault):
        goes_wrong = worlds(2).load(case).fault
        assert isinstance(goes_wrong, WrongInputs)
        for rank, (tensors, outcome) in goes_wrong.wrong.items():
            goes_wrong.wrong[rank] = tensors, replace(outcome, words="something else")
        goes_wrong.by_all = goes_wrong.by_all and replace(goes_wrong.by_all, words="something else")
        if goes_wrong.wrong:
            assert worlds(2).run(case.seed).kind == b"wrong failure"
            shown += 1
    assert shown


def test_what_survivors_must_not_say() -> None:
    """The positive control of ranks that die or call no more: all name them, who found it says so, and stays so."""
    goes_wrong = fault_of(Program(world=3, sequence="DCD", fault_kind="kill"))
    assert goes_wrong is not None
    victim = goes_wrong.victim
    one, two = (rank for rank in range(3) if rank != victim)

    def said(*reporters: int, named: int = victim, more: str = "") -> list[tuple[str, str]]:
        texts = [f"dispatch: rank {named} is lost, found by rank {reporter} at epoch 3{more}" for reporter in reporters]
        return [*[("", "")] * (3 - len(texts)), *[("PeerLost", text) for text in texts]]

    def judged(first: list[tuple[str, str]], second: list[tuple[str, str]], completed: int = 0) -> str:
        others = {one: first, two: second, victim: [("", "")] * completed}
        return goes_wrong.judge([others[rank] for rank in range(3)])

    assert not judged(said(one, one), said(one, one)) and not judged(said(), said(two))
    assert "names another" in judged(said(one), said(one, named=one))
    assert "which has not" in judged(said(two), said(one))
    assert "waits again" in judged(said(one, one, more="; missing: rank 0"), said(one, one))
    assert "does not stay" in judged([*said(one)[2:], *said(one)[1:]], said(one, one, one))
    assert "apart" in judged(said(), said(two, two))
    assert not judged(said(one, one), said(one, one), 1)
    assert f"fails in call 1, which rank {victim} completed" in judged(said(one, one), said(one, one), 2)


def with_a_delay(worlds: Worlds, seed: int, kinds: Sequence[str]) -> str:
    """A drawn case, then the same schedule with a rank that stands still, or something a hundred times less often run.

    Priorities leave no choice that a slow one could be kept out of.
    """
    rng, case = random.Random(seed), explore.draw(seed)
    world, policy, kind = worlds(case.world), rng.choice(("random", "lazy")), rng.choice(kinds)
    world.load(case, accepted=bits(OK))
    plain = seen(world, seed, policy)
    faults = {kind: rng.randrange(case.cores if kind == "slow_core" else case.world)}
    if kind == "stall_rank":
        faults["stall_step"] = rng.randrange(plain.steps + 1)
    found = seen(world, seed, policy, **faults)
    assert not any(map(any, found.errors)) and not found.time_passed, found.texts
    return kind.replace("_", " ")


@soak_rows.row("stop, explored", quick=20, full=3000, chunk=750)
def test_a_rank_stopped_at_any_step_delays_the_others_alone(worlds: Worlds, numbers: range, tally: Tally) -> None:
    tally.each(numbers, lambda seed: with_a_delay(worlds, seed, ["stall_rank"]))


@soak_rows.row("slow, explored", quick=20, full=1500, chunk=375)
def test_a_slow_rank_core_or_link_delays_the_others_alone(worlds: Worlds, numbers: range, tally: Tally) -> None:
    tally.each(numbers, lambda seed: with_a_delay(worlds, seed, ["slow_rank", "slow_core", "slow_link"]))


@soak_rows.row("corrupt status, explored", quick=90, full=10_000, chunk=2500)
def test_corrupted_block_in_flight(numbers: range, tally: Tally) -> None:
    with_faults(["corrupted"], numbers, tally)


def test_what_must_not_become_of_a_corrupted_block() -> None:
    """The positive control: a word that matters is detected, every rank ends, and a fatal error is permanent."""
    goes_wrong = fault_of(Program(world=2, local=3, sequence="DC", fault_kind="corrupted"))
    right, corrupt, timeout = ("", ""), ("CorruptStatus", "text"), ("CommTimeout", "text")
    assert goes_wrong is not None
    drawn = [(seed, goes_wrong.injected(10, 10, seed)) for seed in range(40)]
    seed = next(n for n, one in drawn if (one["corrupt_how"], one["corrupt_word"]) == ("xor", 2))
    goes_wrong.injected(10, 10, seed)
    assert not goes_wrong.judge([[right, corrupt], [corrupt, corrupt]])
    assert "no rank has detected it" in goes_wrong.judge([[right, right], [right, right]])
    assert "does not end" in goes_wrong.judge([[right, ("unfinished", "")], [corrupt, corrupt]])
    assert not goes_wrong.judge([[corrupt, timeout], [corrupt, corrupt]])
    assert "continues" in goes_wrong.judge([[corrupt, right], [corrupt, corrupt]])


@pytest.mark.parametrize("algorithm", ["window", "direct"])
@soak_rows.row("kill, explored", quick=1, full=10)
def test_killed_at_every_step(worlds: Worlds, algorithm: str, numbers: range, tally: Tally) -> None:
    """Also between two blocks of a status message, of which the first is there by then."""
    for seed in numbers:
        case, world = Program(sequence="DC", seed=seed, algorithm=algorithm), worlds(2)
        world.load(case, accepted=bits(OK, PEER_LOST))
        for step in range(seen(world, seed, "random").steps + 1):
            victim = step % 2
            found = seen(world, seed, "random", kill_rank=victim, kill_step=step)
            errors = found.errors[1 - victim]
            assert errors in ([OK, OK], [OK, PEER_LOST], [PEER_LOST, PEER_LOST]), errors
            assert all(f"rank {victim} is lost" in text for text in found.texts[1 - victim] if text)
            tally.count("PeerLost" if PEER_LOST in errors else "killed after it had delivered")


@soak_rows.row("configuration mismatch, explored", quick=20, full=1000, chunk=500)
def test_ranks_that_differ_are_named_by_all(
    worlds: Worlds, numbers: range, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's first dispatch differs in a field: all ranks name it, in any schedule."""

    def play(seed: int) -> str:
        rng = random.Random(seed)
        case = replace(explore.draw(seed), sequence="D", ids="distinct")
        choices: dict[str, dict[str, object]] = {
            "H": {"units": case.units + 1},
            "E": {"local": case.local + 1},
            "quant_mode": {"quant_mode": 2 - case.quant_mode, "smooth": False},
            "contract": {"contract": 3 - case.contract},
        }
        if sum(case.special):  # V1 has none: that rank would be refused before any other hears of it
            del choices["contract"]
        field = rng.choice(list(choices))
        odd = replace(case, **choices[field])  # type: ignore[arg-type]
        guilty, world = rng.randrange(case.world), worlds(case.world)
        mixed, rest = (PlannedProgram(program, world.library) for program in (case, odd))
        for at, call in enumerate(mixed.calls):
            if call.rank == guilty:
                mixed.calls[at], rest.calls[at] = rest.calls[at], call
        monkeypatch.setattr(explore.engine, "PlannedProgram", lambda *args: mixed)
        world.load(case, accepted=bits(CONFIG_MISMATCH))
        found = seen(world, seed, rng.choice(("random", "lazy", "pct")))
        rest.close()
        for rank, (errors, (text,)) in enumerate(zip(found.errors, found.texts, strict=True)):
            assert errors == [CONFIG_MISMATCH], f"rank {rank}: {errors} {text}"
            assert field in text and (rank == guilty or f"rank {guilty}" in text), text
        assert not found.time_passed
        return field

    tally.each(numbers, play)


@pytest.mark.parametrize(("algorithm", "wrong"), [("window", "a count"), ("window", "a row"), ("direct", "a count")])
def test_a_failure_that_one_core_finds_leaves_zeros(
    worlds: Worlds, algorithm: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Core 0 finds another count, and V2's window combine a row that has not come, when other cores may have summed.

    That x is zeros after a failure every schedule here asks.
    """
    shape = {"world": 2, "cores": 4, "local": 2, "topk": 2, "batch": 6, "units": 2}
    case = Program(**shape, contract=2, ids="minus", batches="equal", algorithm=algorithm, sequence="DC", seed=1)
    program, world = PlannedProgram(case, worlds(2).library), worlds(2)
    combine = next(call for call in program.calls if call.op != program.calls[0].op)
    ids = combine.inputs["expert_ids"].clone()
    flat = ids.view(-1)
    routed, none = int((flat >= 0).nonzero()[-1]), int((flat < 0).nonzero()[0])
    flat[none] = flat[routed]
    if wrong == "a row":
        flat[routed] = -1
    combine.inputs["expert_ids"] = ids
    monkeypatch.setattr(explore.engine, "PlannedProgram", lambda *args: program)
    world.load(case, accepted=bits(OK, ROUTING_MISMATCH))
    for seed in range(60):
        found = seen(world, seed, ("random", "lazy", "pct")[seed % 3])
        assert found.errors == [[OK, ROUTING_MISMATCH], [OK, OK]], found.texts


@pytest.mark.parametrize(("at", "output"), [(0, 3), (0, 4), (1, 0)])
def test_what_a_failed_op_leaves_is_a_finding(
    at: int, output: int, worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positive control: the engine looks at other memory than the kernel has written zeros into."""
    case, world = Program(world=1, local=2, batch=3, ids="distinct", batches="equal", sequence="DC"), worlds(1)
    program = PlannedProgram(case, world.library)
    call = program.calls[at]
    call.inputs["expert_ids"] = torch.full_like(call.inputs["expert_ids"], case.experts)
    monkeypatch.setattr(explore.engine, "PlannedProgram", lambda *args: program)
    world.load(case, accepted=bits(OK, INVALID_EXPERT_ID, ROUTING_MISMATCH))
    assert not world.run(1, 4).failed
    other, (_, outputs, *_) = torch.empty_like(call.outputs[output]), world._keep[1 + at]
    outputs[output] = other.data_ptr()
    assert f"it failed, but output {output} is not zeros from byte 0" in world.run(1).message.decode()


def test_the_command_finds_nothing_and_says_what_it_did() -> None:
    done = commands.said("explore", "-n", "60", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["schedules"] == 60 and report["finding"] is None and report["distinct"] > 30
    assert set(report["reached"]) == {*explore.REACHED} and 0 < report["reached"]["send ring"] < report["cases"]
    done = commands.said("explore", "-n", "2", "--no-shrink", "--case", "w2,c2,l2,k1,b0,u1,v1,equal,direct,D")
    assert done.code == 0 and "no finding" in done.out + done.err


def test_a_choice_of_a_replay_has_16_bits() -> None:
    base = ("explore", "--case", "w2,c2,l1,k1,b1,u1,DCDC", "--no-shrink", "--replay")
    assert commands.said(*base, "0:65535").code == 0
    wide = commands.said(*base, "0:65536")  # the same low bits as 0:0
    assert wide.code == 2 and "is no list of AT:CHOICE" in wide.err
