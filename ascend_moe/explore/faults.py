"""Faults of a program (``Program.fault_kind``), and their expected consequences on every rank.

A fault follows from the program alone: a rank that dies at some step or between two calls, makes only its first calls,
or has wrong inputs in one op; ranks with another algorithm in one op; or a status block corrupted in flight. All other
ranks must report it, and in later ops either be right again or fail at once. The survivors of a dead rank agree on
their membership and continue as a group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ascend_moe.reference import cases

from . import wrong_inputs
from .survivors import agreed
from .wrong_inputs import RIGHT, ExpectedResult

if TYPE_CHECKING:
    from .engine import OpCall
    from .program import Program

KILL, ENDED, HANG, ABSENT, CORRUPTED, ALGORITHM = "kill", "ended", "hang", "absent", "corrupted", "algorithm"
FAULTS = (KILL, ENDED, HANG, ABSENT, CORRUPTED, ALGORITHM, *wrong_inputs.KINDS)
SEND, FINISH = 1, 2  # kPartSend, kPartFinish
PEER_LOST, TIMEOUT = "PeerLost", "CommTimeout"
_FATAL = (TIMEOUT, "CorruptStatus")  # possible errors of a corrupted word
_ERRORS = (*_FATAL, "ConfigMismatch", "RoutingMismatch", *wrong_inputs.COLLECTIVE)
_STREAM = 5
_NEVER = 2**63  # steps
Seen = Sequence[tuple[str, str]]  # error name and text of each call of a rank; "unfinished" has no text
UNFINISHED = "unfinished"


def applies(program: Program, fault: str) -> bool:
    """Return whether ``fault``, one of FAULTS, can occur in the program."""
    if fault in (KILL, ENDED, ABSENT, CORRUPTED):
        return program.world > 1
    if fault == HANG:
        return 0 < program.servers < program.world
    if fault == ALGORITHM:  # rows of such an op race with each other, except between these two
        return program.algorithm == "hierarchy"
    if fault == "overflow":
        return program.topk > program.local
    if fault == "source_index":
        return takes_source_indices(program) and _combines(program)
    if fault in ("index", "both"):
        return not takes_source_indices(program) and _combines(program)
    return fault == "ids" or _combines(program)


def _combines(program: Program) -> bool:
    return "C" in program.sequence.upper()


def takes_source_indices(program: Program) -> bool:
    """Return whether combine takes source indices: with V2, but between servers only with hierarchy."""
    one_level = 0 < program.servers < program.world and program.algorithm != "hierarchy"
    return program.contract == 2 and not one_level


def with_fault(program: Program, seed: int) -> Program:
    """Return a copy of the program with one of the faults that can occur in it, drawn by ``seed``."""
    rng = np.random.default_rng([seed, _STREAM])
    return replace(program, fault_kind=str(rng.choice([fault for fault in FAULTS if applies(program, fault)])))


def fault_of(program: Program) -> Fault | None:
    """Return the object that injects and judges the program's ``fault_kind``, or None if it has none."""
    if not program.fault_kind:
        return None
    made = {
        KILL: Killed,
        ENDED: Ended,
        HANG: Hung,
        ABSENT: Absent,
        CORRUPTED: CorruptedBlock,
        ALGORITHM: OtherAlgorithm,
    }
    return made.get(program.fault_kind, WrongInputs)(program)


class Fault:
    """Base class of faults, without one: a fault changes calls or schedules, and judges the errors of all ranks."""

    in_flight = False  # whether it happens during a schedule, see ``injected``
    impatient = -1  # a rank with a shorter timeout

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rng = np.random.default_rng([program.seed, _STREAM])
        self.victim = -1

    def corrupt(self, call: OpCall) -> None:
        """Change inputs or algorithm of a call before it is planned, if this fault needs that."""

    def left_out(self, calls: list[OpCall]) -> list[OpCall]:
        """Return those of ``calls`` that are not made because of the fault."""
        return []

    def outcomes(self, call: OpCall) -> list[ExpectedResult]:
        """Return the results that the call may have: no error (RIGHT) or certain errors."""
        return [RIGHT]

    def injected(self, steps: int, blocks: int, seed: int) -> dict[str, Any]:
        """Return fields of `engine.Faults` for schedule ``seed``, of about ``steps`` steps and ``blocks`` blocks."""
        return {}

    def _of(self, seed: int) -> np.random.Generator:
        return np.random.default_rng([self.program.seed, _STREAM, seed])

    def judge(self, by_rank: Sequence[Seen]) -> str:
        """Return what is wrong with the errors of all calls, listed by rank, or "" if they are as expected."""
        return ""

    def goes_on(self, seed: int) -> tuple[Program | None, str]:
        """Return the program that the survivors run next, or None, and what is wrong with their agreement, or ""."""
        return None, ""


# ---- a lost rank


def _own_words(by_rank: Sequence[Seen], victim: int) -> str:
    """Check that failures name the victim, and a detector that has itself reported it."""
    detectors = {}
    for rank, seen in enumerate(by_rank):
        texts = [text for error, text in seen if error not in ("", UNFINISHED)]
        if rank == victim or not texts:
            continue
        detectors[rank] = [int(found) for text in texts for found in re.findall(r"found by rank (\d+)", text)]
        if len(detectors[rank]) != len(texts) or not all(f": rank {victim} " in text for text in texts):
            return f"rank {rank} names another rank than {victim}: {texts}"
        if any("missing: rank" in text for text in texts[1:]):
            return f"rank {rank} waits again after its failure: {texts}"
    for rank, found in detectors.items():
        for detector in found:
            if detector not in detectors or detectors[detector][0] != detector:
                return f"rank {rank} names rank {detector} as detector, which has not reported it: {detectors}"
    return ""


class Killed(Fault):
    """A rank dies at a step. The others' ops are right until they detect it, and raise PeerLost from then on.

    Ops that the dead rank has completed do not fail on the others. The survivors agree on their membership and continue
    with new windows and other tokens.
    """

    in_flight = True
    error = PEER_LOST

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.victim = int(self.rng.integers(program.world))

    def outcomes(self, call: OpCall) -> list[ExpectedResult]:
        return [RIGHT, ExpectedResult(self.error)]

    def injected(self, steps: int, blocks: int, seed: int) -> dict[str, Any]:
        return {"kill_rank": self.victim, "kill_step": int(self._of(seed).integers(steps + 1))}

    def judge(self, by_rank: Sequence[Seen]) -> str:
        first, completed = set(), self._completed(by_rank[self.victim])
        for rank, seen in enumerate(by_rank):
            if rank == self.victim:
                continue
            errors = [error for error, _ in seen]
            failed = errors.index(self.error) if self.error in errors else len(errors)
            if failed < min(completed, len(errors)):
                return f"rank {rank} fails in call {failed}, which rank {self.victim} completed: {seen[failed][1]}"
            if errors != [""] * failed + [self.error] * (len(errors) - failed):
                return f"rank {rank} does not stay as it is: {errors}"
            first.add(failed)
        apart = 2 if set(self.program.sequence) & set("dc") else 1
        if max(first) - min(first) > apart:
            return f"survivors fail more than an op apart: {sorted(first)}"
        return _own_words(by_rank, self.victim)

    def _completed(self, seen: Seen) -> int:
        """Return the number of completed calls of the victim, without unfinished ones."""
        parts = [part for op in self.program.sequence for part in ((SEND, FINISH) if op.islower() else (0,))]
        count = next((at for at, (error, _) in enumerate(seen) if error), len(seen))
        return count - 1 if count and parts[count - 1] == SEND else count

    def goes_on(self, seed: int) -> tuple[Program | None, str]:
        agreement = agreed(self.program.world, self.victim, int(self._of(seed).integers(2**32)))
        return _of_fewer(self.program, len(agreement.members)), agreement.wrong


class Ended(Killed):
    """A rank dies after it has completed its first calls, or before any, while another rank pauses at any step."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._count = _some_calls(self.rng, program)

    def left_out(self, calls: list[OpCall]) -> list[OpCall]:
        own = [call for call in calls if call.rank == self.victim]
        return own[self._count :]

    def injected(self, steps: int, blocks: int, seed: int) -> dict[str, Any]:
        rng = self._of(seed)
        other = (self.victim + 1 + int(rng.integers(self.program.world - 1))) % self.program.world
        stalled = {"stall_rank": other, "stall_step": int(rng.integers(steps + 1))}
        return {"kill_rank": self.victim, "kill_step": _NEVER, **stalled}


class Hung(Killed):
    """A rank stops forever at a step while its process lives. The others raise CommTimeout, which names it.

    Between servers only, where a rank can ask a late rank for whom that one waits. Elsewhere a store to a rank that has
    not arrived may fault.
    """

    error = TIMEOUT

    def injected(self, steps: int, blocks: int, seed: int) -> dict[str, Any]:
        return super().injected(steps, blocks, seed) | {"kill_unseen": True}

    def goes_on(self, seed: int) -> tuple[Program | None, str]:
        return None, ""


def _some_calls(rng: np.random.Generator, program: Program) -> int:
    """Draw the number of calls that a rank makes; at least one is missing."""
    return int(rng.integers(sum(2 if op in "dc" else 1 for op in program.sequence)))


def _of_fewer(program: Program, world: int) -> Program | None:
    """Return the program with ``world`` ranks and the same experts per rank, or None without ranks."""
    if not world:
        return None
    # servers of unequal size support window only
    uneven = program.algorithm == "hierarchy" and (world % program.servers or world == program.servers)
    algorithm = "window" if uneven else program.algorithm
    fewer = replace(program, world=world, algorithm=algorithm, fault_kind="", seed=program.seed + 1)
    return cases.legal(fewer)


class Absent(Fault):
    """A rank makes only its first calls. On the others the next op raises CommTimeout, and later ops at once.

    One of them has a shorter timeout and notifies the rest by its abort blocks. In hierarchy it may wait for a relaying
    rank that itself waits for the absent one; when asked, that rank names the absent one.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.victim, self.impatient = (int(rank) for rank in self.rng.permutation(program.world)[:2])
        self._count = _some_calls(self.rng, program)
        self._calls: list[list[OpCall]] = []

    def left_out(self, calls: list[OpCall]) -> list[OpCall]:
        self._calls = [[call for call in calls if call.rank == rank] for rank in range(self.program.world)]
        own = self._calls[self.victim]
        self._calls[self.victim] = own[: self._count]
        return own[self._count :]

    def outcomes(self, call: OpCall) -> list[ExpectedResult]:
        return [RIGHT] if call.rank == self.victim else [RIGHT, ExpectedResult(TIMEOUT)]

    def judge(self, by_rank: Sequence[Seen]) -> str:
        if self.program.algorithm == "hierarchy":
            return self._judge_levels(by_rank, _Levels(self.program.servers, self._calls))
        sent = {call.number for call in self._calls[self.victim] if call.part != FINISH}
        for rank, (calls, seen) in enumerate(zip(self._calls, by_rank, strict=True)):
            failed, wanted = False, []
            for call in calls:
                failed = failed or (call.part != SEND and call.number not in sent)
                wanted.append(TIMEOUT if failed else "")
            if (errors := [error for error, _ in seen]) != wanted:
                return f"rank {rank} has {errors}, not {wanted}: rank {self.victim} makes {self._count} calls"
            late = [text for error, text in seen if error and f"found by rank {self.impatient} " not in text]
            if late:
                return f"rank {rank} has not heard of rank {self.impatient}: {late}"
        return _own_words(by_rank, self.victim)

    def _judge_levels(self, by_rank: Sequence[Seen], levels: _Levels) -> str:
        for rank, (calls, seen) in enumerate(zip(self._calls, by_rank, strict=True)):
            made = levels.made[rank]
            wanted = [""] * made + [TIMEOUT] * (len(calls) - made)
            if (errors := [error for error, _ in seen]) != wanted:
                return f"rank {rank} has {errors}, not {wanted}: rank {self.victim} makes {self._count} calls"
        return _own_words(by_rank, self.victim)


class _Levels:
    """Progress of hierarchy's ranks with these calls. ``made``: number of successful calls of each rank."""

    def __init__(self, share: int, calls: list[list[OpCall]]) -> None:
        self._share, self._calls, ranks = share, calls, range(len(calls))
        self.made = [0 for _ in ranks]
        self._sent: list[set[int]] = [set() for _ in ranks]  # ops
        self._passed: list[set[int]] = [set() for _ in ranks]  # ops whose first wait has ended
        while sum(self._step(rank) for rank in ranks):
            pass

    def _step(self, rank: int) -> bool:
        if self.made[rank] == len(self._calls[rank]):
            return False
        call = self._calls[rank][self.made[rank]]
        before = len(self._sent[rank]), len(self._passed[rank]), self.made[rank]
        if call.part != FINISH:
            self._sent[rank].add(call.number)
        level, missing = self._missing(rank)
        if call.part != SEND and level == 2:
            self._passed[rank].add(call.number)
        if call.part == SEND or (level == 2 and not missing):
            self.made[rank] += 1
        return before != (len(self._sent[rank]), len(self._passed[rank]), self.made[rank])

    def _missing(self, rank: int) -> tuple[int, set[int]]:
        """Return the wait at which the rank's call stops, and the missing ranks (Awaited in common/status_wait.h)."""
        call, share = self._calls[rank][self.made[rank]], self._share
        in_server = set(range(rank // share * share, rank // share * share + share))
        same_local_rank = set(range(rank % share, len(self._calls), share))
        dispatches = "dispatch" in call.name
        senders = in_server | same_local_rank if dispatches else in_server
        first = {other for other in senders if call.number not in self._sent[other]}
        if first:
            return 1, first
        relays = in_server if dispatches else same_local_rank
        return 2, {other for other in relays - {rank} if call.number not in self._passed[other]}


# ---- a corrupted status block


class CorruptedBlock(Fault):
    """A status block arrives with a changed word, by half, or not at all: ranks must not use it as valid data."""

    in_flight = True

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._how, self._word = "", 0  # of the last schedule

    def injected(self, steps: int, blocks: int, seed: int) -> dict[str, Any]:
        rng = self._of(seed)
        self._how, self._word = str(rng.choice(["xor", "xor", "xor", "stale", "torn"])), int(rng.integers(8))
        turned = 1 << int(rng.integers(32)) if rng.integers(2) else int(rng.integers(1, 2**32))
        block = 1 + int(rng.integers(blocks))
        return {"corrupt_block": block, "corrupt_how": self._how, "corrupt_word": self._word, "corrupt_xor": turned}

    def outcomes(self, call: OpCall) -> list[ExpectedResult]:
        return [RIGHT, *map(ExpectedResult, _ERRORS)]

    def judge(self, by_rank: Sequence[Seen]) -> str:
        said = [[error for error, _ in seen] for seen in by_rank]
        for rank, errors in enumerate(said):
            if UNFINISHED in errors:
                return f"rank {rank} does not end: {errors}"
            fatal = next((at for at, error in enumerate(errors) if error in _FATAL), len(errors))
            if not {*errors[fatal:]} <= {*_FATAL}:
                return f"rank {rank} continues after its failure: {errors}"
        if self._how == "xor" and self._word not in self._spare() and not any(map(any, said)):
            return f"word {self._word} of a block was changed, and no rank has detected it"
        return ""

    def _spare(self) -> range | tuple[int, ...]:
        """Return the words that no rank may need to read, so that a change of them need not cause an error.

        A rank that knows the counts does not read them: in V2's window combine, and between servers.
        """
        if self.program.servers or (self.program.contract == 2 and self.program.local > 4):
            return range(2, 7)
        return (5, 6) if self.program.contract == 1 else range(min(2 + self.program.local, 5), 7)


# ---- an op with an error on some ranks


class WrongOp(Fault):
    """Base class of faults in one op: all ranks raise the same error, or only some raise one; later ops are right."""

    def __init__(self, program: Program, ops: Sequence[int]) -> None:
        super().__init__(program)
        self.number = int(self.rng.choice(ops))
        self.dispatches = _dispatch_of(program.sequence)
        self._calls: list[list[OpCall]] = []

    def left_out(self, calls: list[OpCall]) -> list[OpCall]:
        self._calls = [[call for call in calls if call.rank == rank] for rank in range(self.program.world)]
        return []

    def judge(self, by_rank: Sequence[Seen]) -> str:
        for rank, (calls, seen) in enumerate(zip(self._calls, by_rank, strict=True)):
            for call, (error, text) in zip(calls, seen, strict=True):
                wanted = [outcome.words for outcome in self.outcomes(call) if outcome.error == error]
                if not any(words in text for words in wanted):
                    return f"rank {rank} raises {text!r}, not {wanted}"
        return ""

    def _combines_failed(self, call: OpCall) -> bool:
        """Whether the call is the combine of a failed dispatch."""
        return call.number != self.number and self.dispatches[call.number] == self.number


class WrongInputs(WrongOp):
    """Wrong inputs of one op on one or two ranks: all ranks raise the same error, or only these ranks their own."""

    def __init__(self, program: Program) -> None:
        kind, in_dispatch = wrong_inputs.KINDS[program.fault_kind]
        super().__init__(program, [at for at, op in enumerate(program.sequence.upper()) if op == "C" or in_dispatch])
        self.case = program.case_of(self.dispatches[self.number])
        self.results = self.case.dispatched()
        self.wrong: dict[int, wrong_inputs.Wrong] = {}
        ranks = [int(rank) for rank in self.rng.permutation(program.world)]
        for rank in ranks:  # the first that can
            if self._make(kind, rank):
                break
        if self.wrong and len(ranks) > 1 and self.rng.integers(2):
            others = [make for name, (make, early) in wrong_inputs.KINDS.items() if self._can(name, early)]
            self._make(others[int(self.rng.integers(len(others)))], next(r for r in ranks if r not in self.wrong))
        collective = [rank for rank, (_, outcome) in self.wrong.items() if outcome.error in wrong_inputs.COLLECTIVE]
        self.by_all = self.wrong[min(collective)][1] if collective else None

    def _can(self, name: str, in_dispatch: bool) -> bool:
        is_combine = self.program.sequence[self.number] in "Cc"
        return (is_combine or in_dispatch) and applies(self.program, name)

    def _make(self, kind: Callable[[wrong_inputs.FaultyCall], wrong_inputs.Wrong | None], rank: int) -> bool:
        algorithm = self.program.algorithm_of(self.number)
        place = self.case, self.results, rank, takes_source_indices(self.program), algorithm == "direct"
        wrong = kind(wrong_inputs.FaultyCall(*place, self.rng))
        if wrong is not None:
            self.wrong[rank] = wrong
        return wrong is not None

    def left_out(self, calls: list[OpCall]) -> list[OpCall]:
        """Return for odd seeds the second launch of ranks whose first launch already fails; else none."""
        unfinished = [call for call in calls if call.part == FINISH and self._fails_early(call)]
        unfinished = unfinished if self.program.seed % 2 else []
        super().left_out([call for call in calls if call not in unfinished])
        return unfinished

    def _fails_early(self, call: OpCall) -> bool:
        """Whether the rank's first launch already detects its own wrong inputs."""
        if call.number != self.number or call.rank not in self.wrong:
            return False
        tensors, outcome = self.wrong[call.rank]
        bad_index = set(tensors) == {"expand_idx"} and self.program.algorithm_of(self.number) == "window"
        return outcome.error in wrong_inputs.COLLECTIVE or bad_index

    def corrupt(self, call: OpCall) -> None:
        if call.number != self.number or call.rank not in self.wrong:
            return
        for name, values in self.wrong[call.rank][0].items():
            given = call.inputs[name]  # larger than its defined part
            call.inputs[name] = torch.zeros_like(given).flatten()
            call.inputs[name][: values.numel()] = values.flatten()
            call.inputs[name] = call.inputs[name].view(given.shape)

    def outcomes(self, call: OpCall) -> list[ExpectedResult]:
        if call.number == self.number:
            wanted = self.by_all or self.wrong.get(call.rank, ({}, RIGHT))[1]
        elif self.by_all and self._combines_failed(call):
            wanted = self._after_a_failed_dispatch(call.rank)
        else:
            return [RIGHT]
        if call.part != SEND or self._fails_early(call):
            return [wanted]
        # a rank may detect its own wrong routing in the first launch, errors of others only in the second
        return [wanted, RIGHT] if call.rank in self.wrong else [RIGHT]

    def _after_a_failed_dispatch(self, rank: int) -> ExpectedResult:
        """Its counts are 0: a rank misses the rows of its first expert with any."""
        place = self.case, self.results, rank, False, False
        call = wrong_inputs.FaultyCall(*place, self.rng)
        totals = call.totals(call.inputs.expert_ids)
        experts = [expert for expert in call.compared() if totals[expert]]
        return wrong_inputs.returned(rank, experts[0], totals[experts[0]], 0) if experts else RIGHT


class OtherAlgorithm(WrongOp):
    """Some ranks, often all of a server, run one op by window instead of hierarchy: all raise ConfigMismatch."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, range(len(program.sequence)))
        share = program.servers
        self._by_window = self.rng.permutation(program.world)[: 1 + int(self.rng.integers(program.world - 1))].tolist()
        if self.rng.integers(2):
            server = int(self.rng.integers(program.world // share))
            self._by_window = [*range(server * share, (server + 1) * share)]
        case = program.case_of(self.dispatches[self.number])
        self._tokens = case.global_bs or max(len(given.x) for given in case.inputs)

    def corrupt(self, call: OpCall) -> None:
        if call.number == self.number:
            call.algorithm = self._algorithm_of(call.rank)

    def outcomes(self, call: OpCall) -> list[ExpectedResult]:
        if call.number == self.number:
            # the first launch of a late rank detects what the others have reported
            return self._differ(call.rank) + ([RIGHT] if call.part == SEND else [])
        if not self._combines_failed(call) or not self._tokens:
            return [RIGHT]
        # window writes no records behind the source indices, where hierarchy reads them
        lowest, known = min(self._by_window), call.part != SEND or call.rank in self._by_window
        text = "assist_info_for_combine of rank {} holds "
        if not known:
            return [RIGHT]
        return [ExpectedResult("ArgumentError", text.format(rank)) for rank in {lowest, call.rank}]

    def _algorithm_of(self, rank: int) -> str:
        return "window" if rank in self._by_window else "hierarchy"

    def _differ(self, rank: int) -> list[ExpectedResult]:
        ours, texts = self._algorithm_of(rank), list[str]()
        for other in range(self.program.world):
            theirs = self._algorithm_of(other)
            if theirs != ours:
                texts.append(f"comm_alg is {ours} on rank {rank} and {theirs} on rank {other}; it must be the same")
        return [ExpectedResult("ConfigMismatch", text) for text in texts]


def _dispatch_of(sequence: str) -> list[int]:
    """Return for each op its dispatch: itself, or the one whose rows it combines."""
    found, waiting = [], list[int]()
    for number, op in enumerate(sequence.upper()):
        waiting += [number] if op == "D" else []
        found.append(number if op == "D" else waiting.pop(0))
    return found
