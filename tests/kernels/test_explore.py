"""Explore mode: our kernels have no finding in any schedule, and the harness sees what it must see."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import commands
import pytest
import soak_rows
import torch
from faulty_programs import LONG, WRONG_INPUTS, faulty, long_faulty
from large_shares import LARGE_SHARES
from soak_rows import Tally

from ascend_moe import explore
from ascend_moe.errors import ArgumentError
from ascend_moe.explore import Faults, Options, Program, World, draws
from ascend_moe.explore.engine import PlannedProgram  # as tests replace it in the engine
from ascend_moe.explore.faults import WrongInputs, fault_of
from ascend_moe.explore.program import SEQUENCES
from ascend_moe.explore.reached import reached
from ascend_moe.native.library import lib

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
    case = explore.parse("w3,c4,l2,k3,b1,u4,v2,s9,fp32,smooth,mask:pair,ids:hot,equal,DDCC")
    assert (case.world, case.cores, case.local, case.topk, case.batch, case.units) == (3, 4, 2, 3, 1, 4)
    assert (case.contract, case.seed, case.dtype, case.quant) == (2, 9, "fp32", "smooth")
    assert (case.mask, case.ids, case.batches, case.sequence) == ("pair", "hot", "equal", "DDCC")
    case = explore.parse("v2,s7,fault:triple")
    assert (case.fault_kind, explore.with_fault(case, 3).seed) == ("triple", 7) and explore.parse(str(case)) == case
    for changes in MODES.values():
        case = Program(**changes)
        assert explore.parse(str(case)) == case
    assert explore.parse("partly").rows == "partly" and explore.parse("").rows == "own"
    case = explore.parse("v2,h3,n0,t1")
    assert (case.shared, case.nums_type, case.tp) == (3, 0, 1) and explore.parse(str(case)) == case


def test_every_kind_of_case_is_spelled_out_and_fits() -> None:
    """What is drawn can be written down and read again; a seed draws the same."""
    for kind in draws.KINDS:
        for seed in range(30):
            case = draws.draw_of(kind, seed)
            assert explore.parse(str(case)) == case == draws.draw_of(kind, seed), (kind, seed)


@pytest.mark.parametrize(
    "text",
    [
        *("w65", "k3", "l0", "v3", "CD", "DCC", "mask:odd", "bf17", "x4", "v2,h1", "v1,h2", "n2", "t2"),
        *("fault:x", "v1,fault:triple", "w1,fault:kill"),
    ],
)
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="explore: ") as caught:
        explore.parse(text)
    assert "\n" not in str(caught.value)


# ---- no schedule has a finding


def drawn(mode: str, first: int, count: int) -> Iterator[Program]:
    for seed in range(first, first + count):
        case = replace(explore.draw(seed), **MODES[mode])
        if mode == "servers":
            case = replace(case, servers=1 + seed % 2, near=seed // 2 % 2 == 1)
        elif mode == "lent":
            rows, algorithm = ("partly", "lent")[seed % 2], "direct" if seed % 3 else "mixed"
            case = replace(case, rows=rows, algorithm=algorithm)
        elif mode == "roles":
            cores = explore.draw(seed).cores
            algorithm = "direct" if seed % 2 else "mixed"
            case = replace(case, cores=cores + 1, list_cores=1 + seed % cores, algorithm=algorithm)
        yield case


@each_mode
@pytest.mark.parametrize(("first", "schedules"), [(80_000, 120), pytest.param(90_000, 2000, marks=pytest.mark.nightly)])
def test_random_cases_and_schedules_have_no_finding(mode: str, first: int, schedules: int) -> None:
    result = explore.campaign(drawn(mode, first, schedules // 10), schedules, seed=1, a_case=10)
    assert_nothing_found(result)
    assert result.schedules == schedules and 2 * result.distinct >= schedules
    # Verdicts of the cores, status messages, abort blocks; the word by which core 0 calls others off, or the transport,
    # or, in many schedules over servers, both.
    assert len(result.polls) in ((4, 5) if mode == "servers" else (4,))


NIGHTLY_LARGE = [pytest.param(first, 300, marks=pytest.mark.nightly) for first in range(5000, 6200, 300)]


# The sizes of shares, chunks and batches of lists: what the small cases never reach.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("first", "cases"), [(0, 8), pytest.param(8, 4, marks=pytest.mark.nightly), *NIGHTLY_LARGE])
def test_large_cases_have_no_finding(first: int, cases: int) -> None:
    drawn = [explore.draw_large(seed) for seed in range(first, first + cases)]
    assert all(explore.parse(str(case)) == case for case in drawn[:100])
    result = explore.campaign(drawn, schedules=2 * cases, seed=1, a_case=2)
    assert_nothing_found(result)
    assert result.cases == cases


def test_what_a_change_of_the_kernels_explores() -> None:
    """The begin of `ascend-moe explore`: its cases use every ring, and come to the second of all chunks and batches."""
    result = explore.campaign(schedules=440)
    assert_nothing_found(result)
    assert result.cases > 100 and result.distinct > 400
    assert [name for name in explore.REACHED if not result.reached[name]] == []


REACHES = {
    "w1,c1,l3,k3,b171,u1,v1,equal,DC": "pairs send-ring window-copies index return-ring sum-ring sums",
    "w1,c1,l3,k2,b256,u1,v1,equal,ids:any,D": "send-ring window-copies",
    "w1,c1,l1,k1,b513,u1,v2,equal,ids:distinct,DC": "pairs send-ring sum-ring sums triples",
    "w2,c4,l512,k2,b1,u1,v2,equal,ids:distinct,D": "histograms",
    "w2,c3,l512,k2,b1,u1,v2,equal,ids:distinct,D": "",
    "w1,c3,l1,k1,b1,u66,v2,equal,ids:distinct,DC,h2": "parts shorter-part shared-in-parts",
    "w1,c3,l1,k1,b1,u66,v2,equal,ids:distinct,DC": "parts shorter-part",
    "w1,c3,l1,k1,b1,u64,v2,equal,ids:distinct,DC": "parts",
    "w1,c8,l1,k1,b40,u1,v2,equal,ids:distinct,D": "send-ring tail-ring",
    "w1,c8,l1,k1,b32,u1,v2,equal,ids:distinct,D": "",
    "w1,c1,l1,k1,b1,u449,v1,equal,ids:distinct,int8,D": "quantized-pieces",
    "w1,c1,l1,k1,b1,u448,v1,equal,ids:distinct,int8,D": "",
    "w1,c1,l1,k1,b1,u449,v1,equal,ids:distinct,none,D": "",
    "w2,c1,l2,k2,b2,u1,v2,equal,ids:distinct,r1,D": "aligned-ends window-copies",
    "w2,c1,l1,k2,b2,u1,v2,equal,ids:distinct,r1,D": "",
    "w8,c2,l1,k1,b1,u1,v2,equal,ids:distinct,D": "counts-by-vectors",
    "w8,c1,l1,k1,b1,u1,v2,equal,ids:distinct,D": "",
    "w1,c3,l2,k1,b2,u1,v2,m2,equal,ids:distinct,D,direct": "roles",
    "w1,c8,l2,k2,b32,u1,v2,m2,equal,ids:distinct,D,direct": "roles shared-rows gather-chunks send-ring",
    "w1,c1,l1,k1,b65,u1,v1,equal,ids:distinct,D,direct,weights": "weights send-ring",
    "w1,c1,l1,k1,b64,u1,v1,equal,ids:distinct,D,direct": "send-ring",
    "w1,c1,l1,k1,b513,u1,v1,equal,ids:distinct,D,direct": "pairs send-ring lists",
    "w1,c2,l1,k1,b2,u1,v1,equal,ids:distinct,dc": "two-launches",
    "w1,c1,l1,k1,b9,u1,v1,equal,ids:none,D": "",
}


@pytest.mark.parametrize("text", REACHES)
def test_what_a_case_reaches(text: str, worlds: Worlds) -> None:
    program = worlds(explore.parse(text).world).load(explore.parse(text))
    assert {name.replace(" ", "-") for name in reached(program)} == {*REACHES[text].split()}


def test_large_cases_reach_every_size() -> None:
    drawn = [explore.draw_large(seed) for seed in range(500)]
    assert {case.world for case in drawn} >= {1, 2, 16, 33, 64} and {case.cores for case in drawn} >= {1, 48}
    assert max(case.local for case in drawn) == 32 and max(case.topk for case in drawn) == 32
    for algorithm in ("window", "direct"):
        shares = [case.batch * case.topk / case.cores for case in drawn if case.algorithm == algorithm]
        assert max(shares) > 512 and min(shares) == 0


def test_a_row_that_crosses_once_for_many_experts() -> None:
    sizes = ("w2,c8,k3,b4,v2,m2,int8,mask:none", "w3,c8,k2,b3,v1,m3,none,mask:token")
    sizes += ("w2,c9,k4,b5,v2,m1,int8,mask:pair", "w1,c8,k3,b9,v2,m2,none,mask:none")
    cases = [explore.parse(f"{size},l8,u1,bf16,ids:any,equal,DC,direct,s{seed}") for seed, size in enumerate(sizes)]
    result = explore.campaign(cases, schedules=40, seed=1, a_case=10)
    assert_nothing_found(result)
    assert result.schedules == 40


@pytest.mark.parametrize("algorithm", ["window", "direct"])
@pytest.mark.parametrize(
    ("given", "op", "output"), [("h2", "combine_v2", 0), ("h3", "combine_v2", 0), ("n0", "dispatch_v2", 3)]
)
def test_options_that_are_never_drawn(algorithm: str, given: str, op: str, output: int) -> None:
    case = explore.parse(f"w2,c3,l2,k2,b3,v2,s4,equal,ids:any,DC,{given},t1,{algorithm}")
    assert_nothing_found(explore.explore(case, schedules=4))
    with World(case.world) as world, World(case.world) as other:
        plain = replace(case, shared=0, nums_type=1)
        for call, without in zip(world.load(case).calls, other.load(plain).calls, strict=True):
            if call.name.endswith(op):
                assert not torch.equal(call.expected[output], without.expected[output])
            if call.name.endswith("dispatch_v2"):
                assert call.expected[5].tolist() == [call.expected[0].shape[0]]


@pytest.mark.parametrize("text", LARGE_SHARES)
def test_large_and_empty_shares(text: str) -> None:
    assert_nothing_found(explore.explore(explore.parse(text), schedules=2))


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
    assert result.distinct > 15


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


def test_rows_for_which_the_lent_areas_have_no_room() -> None:
    """Windows are made large enough for a case; the engine itself refuses one that is too large for them."""
    case = explore.parse("w2,c2,l3,k3,b520,u16,v1,lent,direct,DC,equal,ids:distinct")
    assert_nothing_found(explore.explore(case, schedules=1))
    with World(case.world, window_mib=1) as world:
        world.window_bytes = 4 << 20  # for the plans
        with pytest.raises(MemoryError, match="no room for its rows"):
            world.load(case)
        world.window_bytes = 1 << 20
        world.load(LENT)
        assert not world.run(0).failed


# ---- ranks that are killed, stalled, slow or absent, and spoilt status blocks


def code_of(name: str) -> int:
    """The first error code with this name."""
    return next(code for code in range(1, 64) if lib().am_error_name(code).decode() == name)


OK = 0
PEER_LOST = code_of("PeerLost")
CONFIG_MISMATCH = code_of("ConfigMismatch")
ROUTING_MISMATCH = code_of("RoutingMismatch")
Worlds = Callable[[int], World]


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """One world a size, kept between cases."""
    with contextlib.ExitStack() as opened:
        yield functools.cache(lambda size: opened.enter_context(World(size)))


@dataclass
class Seen:
    """One schedule: by rank, the error codes of its ops and their messages; -1 for one that did not end."""

    codes: list[list[int]]
    texts: list[list[str]]
    steps: int
    blocks: int
    time_passed: bool

    def all_right(self) -> bool:
        return not any(code for codes in self.codes for code in codes)


def seen(world: World, seed: int, policy: str, **faults: object) -> Seen:
    """Runs one schedule. No races, no hang, no wrong result, no error that is not accepted.

    Time passes when nothing can move, and waits end at their deadline.
    """
    options = Options(policy=policy, hang_is_finding=False, faults=Faults(**faults))  # type: ignore[arg-type]
    run = world.run(seed, 1, options)
    assert not run.failed, f"{run.kind.decode()}: {run.message.decode()}\n{options}"
    program = world.program
    assert program is not None
    codes: list[list[int]] = [[] for _ in range(world.size)]
    texts: list[list[str]] = [[] for _ in range(world.size)]
    for call, (code, text) in zip(program.calls, world.errors(), strict=True):
        codes[call.rank].append(code)
        texts[call.rank].append(text)
        assert "\n" not in text
    return Seen(codes, texts, run.steps, run.status_blocks, bool(run.time_passed))


def bits(*codes: int) -> int:
    return sum(1 << code for code in codes)


def stalled(rng: random.Random, case: Program, plain: Seen) -> dict[str, object]:
    """Until nobody else can move."""
    return {"stall_rank": rng.randrange(case.world), "stall_step": rng.randrange(plain.steps + 1)}


def slow(rng: random.Random, case: Program, plain: Seen) -> dict[str, object]:
    """A hundred times less often chosen."""
    kind = rng.choice(["rank", "core", "link"])
    return {f"slow_{kind}": rng.randrange(case.cores if kind == "core" else case.world)}


def only_delayed(case: Program, found: Seen, faults: dict[str, object]) -> str:
    assert found.all_right() and not found.time_passed, found.texts
    return next(iter(faults)).replace("_", " ")


FAULTS = {
    "stop": (stalled, only_delayed, bits(OK)),
    "slow": (slow, only_delayed, bits(OK)),
}


def played(cases: Iterable[Program], numbers: range, tally: Tally) -> None:
    """A schedule each: what goes wrong is named by all who must name it, and later ops are right, or fail at once."""
    assert_nothing_found(explore.campaign(cases, len(numbers), numbers.start, a_case=1))
    tally.count(cases=len(numbers))


def with_faults(faults: Sequence[str], numbers: range, tally: Tally) -> None:
    played(faulty(numbers, faults), numbers, tally)


def with_a_fault(worlds: Worlds, name: str, seed: int) -> str:
    """A drawn case without a fault, then the same schedule with one; what became of it."""
    fault, check, accepted = FAULTS[name]
    rng, case = random.Random(seed), explore.draw(seed)
    world = worlds(case.world)
    world.load(case, accepted=accepted)
    # Priorities leave no choice that a slow one could be kept out of.
    policy = rng.choice(("random", "lazy") if fault is slow else ("random", "lazy", "pct"))
    plain = seen(world, seed, policy)
    assert plain.all_right(), plain.texts
    faults = fault(rng, case, plain)
    return check(case, seen(world, seed, policy, **faults), faults)


@soak_rows.row("kill, explored", quick=60, full=3000, chunk=750)
def test_killed_at_any_step(numbers: range, tally: Tally) -> None:
    with_faults(["kill"], numbers, tally)


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


@soak_rows.row("wrong inputs, explored", quick=140, full=7000, chunk=700)
def test_inputs_that_one_rank_gets_wrong(numbers: range, tally: Tally) -> None:
    with_faults(WRONG_INPUTS, numbers, tally)


@soak_rows.row("wrong inputs, explored", quick=len(LONG) * 4, full=1000, chunk=100)
def test_wrong_inputs_beyond_the_first_chunk(numbers: range, tally: Tally) -> None:
    """Shares of more than 512 pairs or triples, on one core and on several."""
    played(long_faulty(numbers), numbers, tally)


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

    def said(*finders: int, named: int = victim, more: str = "") -> list[tuple[str, str]]:
        texts = [f"dispatch: rank {named} is lost, found by rank {finder} at epoch 3{more}" for finder in finders]
        return [*[("", "")] * (3 - len(texts)), *[("PeerLost", text) for text in texts]]

    def judged(first: list[tuple[str, str]], second: list[tuple[str, str]]) -> str:
        return goes_wrong.judge([first if rank == one else second if rank == two else [] for rank in range(3)])

    assert not judged(said(one, one), said(one, one)) and not judged(said(), said(two))
    assert "names another" in judged(said(one), said(one, named=one))
    assert "which has not" in judged(said(two), said(one))
    assert "waits again" in judged(said(one, one, more="; missing: rank 0"), said(one, one))
    assert "does not stay" in judged([*said(one)[2:], *said(one)[1:]], said(one, one, one))
    assert "apart" in judged(said(), said(two, two))


@soak_rows.row("stop, explored", quick=20, full=3000, chunk=750)
def test_stalled_at_any_step(worlds: Worlds, numbers: range, tally: Tally) -> None:
    tally.each(numbers, lambda seed: with_a_fault(worlds, "stop", seed))


@soak_rows.row("slow, explored", quick=20, full=1500, chunk=375)
def test_slow_rank_core_or_link(worlds: Worlds, numbers: range, tally: Tally) -> None:
    tally.each(numbers, lambda seed: with_a_fault(worlds, "slow", seed))


@soak_rows.row("corrupt status, explored", quick=90, full=10_000, chunk=2500)
def test_spoilt_block_in_flight(numbers: range, tally: Tally) -> None:
    with_faults(["spoilt"], numbers, tally)


def test_what_must_not_become_of_a_spoilt_block() -> None:
    """The positive control: a word that counts is noticed, nobody stands still, and a fatal error stays."""
    goes_wrong = fault_of(Program(world=2, local=3, sequence="DC", fault_kind="spoilt"))
    right, corrupt, timeout = ("", ""), ("CorruptStatus", "text"), ("CommTimeout", "text")
    assert goes_wrong is not None
    drawn = [(seed, goes_wrong.injected(10, 10, seed)) for seed in range(40)]
    seed = next(n for n, one in drawn if (one["corrupt_how"], one["corrupt_word"]) == ("xor", 2))
    goes_wrong.injected(10, 10, seed)
    assert not goes_wrong.judge([[right, corrupt], [corrupt, corrupt]])
    assert "nobody has noticed" in goes_wrong.judge([[right, right], [right, right]])
    assert "stands still" in goes_wrong.judge([[right, ("unfinished", "")], [corrupt, corrupt]])
    assert not goes_wrong.judge([[corrupt, timeout], [corrupt, corrupt]])
    assert "goes on" in goes_wrong.judge([[corrupt, right], [corrupt, corrupt]])


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
            codes = found.codes[1 - victim]
            assert codes in ([OK, OK], [OK, PEER_LOST], [PEER_LOST, PEER_LOST]), codes
            assert all(f"rank {victim} is lost" in text for text in found.texts[1 - victim] if text)
            tally.count("PeerLost" if PEER_LOST in codes else "killed after it had delivered")


@soak_rows.row("configuration mismatch, explored", quick=20, full=1000, chunk=500)
def test_ranks_that_differ(worlds: Worlds, numbers: range, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's first dispatch differs in a field: all ranks name it, in any schedule."""

    def play(seed: int) -> str:
        rng = random.Random(seed)
        case = replace(explore.draw(seed), sequence="D", ids="distinct")
        choices: dict[str, dict[str, object]] = {
            "H": {"units": case.units + 1},
            "E": {"local": case.local + 1},
            "quant_mode": {"quant": "none" if case.quant != "none" else "int8"},
            "contract": {"contract": 3 - case.contract},
        }
        field = rng.choice(list(choices))
        odd = replace(case, **choices[field])  # type: ignore[arg-type]
        guilty, world = rng.randrange(case.world), worlds(case.world)
        mixed, rest = (PlannedProgram(one, world.library) for one in (case, odd))
        for at, call in enumerate(mixed.calls):
            if call.rank == guilty:
                mixed.calls[at], rest.calls[at] = rest.calls[at], call
        monkeypatch.setattr(explore.engine, "PlannedProgram", lambda *args: mixed)
        world.load(case, accepted=bits(CONFIG_MISMATCH))
        found = seen(world, seed, rng.choice(("random", "lazy", "pct")))
        rest.close()
        for rank, (codes, (text,)) in enumerate(zip(found.codes, found.texts, strict=True)):
            assert codes == [CONFIG_MISMATCH], f"rank {rank}: {codes} {text}"
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
        assert found.codes == [[OK, ROUTING_MISMATCH], [OK, OK]], found.texts


def test_the_command_finds_nothing_and_says_what_it_did() -> None:
    done = commands.said("explore", "-n", "60", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["schedules"] == 60 and report["finding"] is None and report["distinct"] > 30
    assert set(report["reached"]) == {*explore.REACHED} and 0 < report["reached"]["send ring"] < report["cases"]
    done = commands.said("explore", "-n", "2", "--no-shrink", "--case", "w2,c2,l2,k1,b0,u1,v1,equal,direct,D")
    assert done.code == 0 and "no finding" in done.out + done.err
    done = commands.said("explore", "--case", "w2,zebra")
    assert done.code == 2 and "zebra" in done.err + done.out
