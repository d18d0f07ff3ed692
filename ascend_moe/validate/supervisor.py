"""A bring-up that survives its steps: faults, hangs and ends of the processes that run them.

Each rank's supervisor uses no device. It starts a process that runs the steps one after the other (`serve`) and
publishes each result in the job's store, where the supervisors of all ranks read the same results and therefore decide
alike. After a step that did not pass on some rank, all ranks continue with new processes and new process groups. Every
wait has a deadline. Rank 0 appends each result to the run file as soon as it is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .. import settings
from .._text import installed_version, version_numbers
from ..errors import AscendMoeError
from ..native import probe_results
from ..native.build import cache_directory
from ..plan import plan
from . import Device, find, times
from .bringup import BATCH, ROUNDS, Ranks, Session, Step, of_all_ranks, steps, why_skipped
from .probes import FAIL, FAULT, KERNEL_PROBES, MOST_TEXT, PASS, SKIPPED, Judged, ProbeResult, summary
from .run import exchanged

CONTEXT: Any = multiprocessing.get_context("spawn")
START_S = 300.0  # limit for a process to find its device, and for all ranks to join a group
STEP_S = 300.0  # limit for a step, the build of its kernel included
GRACE_S = 30.0  # limit for the other ranks after a fault of one, and for the facts of the servers
EXIT_S = 10.0  # limit for a process to end
_POLL_S, _SMI_S = 0.5, 30.0
_LOG_LINES, _PLOG_LINES = 40, 20
_PR_SET_PDEATHSIG = 1
_KEY = "ascend_moe/bringup"
_LEVELS = (8, 3)  # the first CANN whose links within a server do not follow HCCL's variables
_STORES = {settings.HCCL_INTRA_PCIE.name: "1", settings.HCCL_INTRA_ROCE.name: "0"}
Serve = Callable[[Connection, Ranks, str, str], None]


# ---- in the process that runs the steps


def serve(pipe: Connection, ranks: Ranks, session: str, log: str) -> None:
    """Send device and kind of machine, then the results of each step whose number arrives, until the pipe closes.

    ``session``: name of this process's group; ``log``: file for everything that is printed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a step that hangs must not outlive its supervisor
    for name, value in ranks.variables.items():
        os.environ.pop(name, None)
        os.environ.update({name: value} if value else {})
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    device = find(ranks.device)
    pipe.send(device)
    own, todo = Session(ranks, device, session), steps(device.kind, ranks)
    pipe.send(own.machine)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(own.run(todo[pipe.recv()]))
    own.close()


# ---- in the supervisor


class _Ended(Exception):
    """The process has not sent what it should. ``status``: FAULT, or FAIL if another rank is the cause."""

    def __init__(self, text: str, status: str = FAULT) -> None:
        super().__init__(text)
        self.status = status


class _Worker:
    """A process that runs steps, with its output in a file."""

    def __init__(self, ranks: Ranks, session: str, run: Serve) -> None:
        handle, name = tempfile.mkstemp(prefix="ascend_moe_bringup_", suffix=".log")
        os.close(handle)
        self._log, self.variables, self.joined = Path(name), ranks.variables, False
        self.pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=run, args=(theirs, ranks, session, name), daemon=True)
        self._process.start()
        theirs.close()

    def received(self, seconds: float, cause: Callable[[], str] = lambda: "") -> Any:
        """Return the next object that the process sends.

        ``cause`` returns "", or text on another rank's fault, after which the process has `GRACE_S` seconds left.

        Raises:
            _Ended: the process has ended, or has sent nothing within ``seconds`` and was killed.
        """
        end, status, why = time.monotonic() + seconds, FAULT, f"no result within {seconds:g} s"
        try:
            while not self.pipe.poll(_POLL_S):
                if not self._process.is_alive() and not self.pipe.poll():
                    raise EOFError
                if status == FAULT and (other := cause()):
                    status, why = FAIL, f"no result within {GRACE_S:g} s after {other}"
                    end = min(end, time.monotonic() + GRACE_S)
                if time.monotonic() > end:
                    self.kill(signal.SIGABRT)  # its output then contains the stacks of its threads
                    raise _Ended(self._with_logs(why), status)
            return self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(EXIT_S)
            raise _Ended(self._with_logs(self._end())) from None

    def _end(self) -> str:
        """How the process ended; a crash names itself in its output, and an exception is the last line."""
        code, lines = self._process.exitcode, self._output()
        if code is None:
            return "its process closed its pipe and does not end"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        named = [line for line in lines if code > 0 or line.startswith("Fatal Python error")]
        return ": ".join([f"its process {how}", *named[-1:]])

    def _output(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()

    def _with_logs(self, why: str) -> str:
        """The reason with the last lines of the process's output, then of errors in CANN's log."""
        return "\n".join([why, *self._output()[-_LOG_LINES:], *self.cann_errors()])[:MOST_TEXT]

    def cann_errors(self) -> list[str]:
        """Return the last error lines of the process in CANN's log."""
        folder = Path(os.environ.get("ASCEND_PROCESS_LOG_PATH") or Path.home() / "ascend" / "log")
        found: list[str] = []
        for path in sorted(folder.glob(f"**/plog-{self._process.pid}_*.log")):
            found += [line for line in path.read_text(errors="replace").splitlines() if line.startswith("[ERROR]")]
        return found[-_PLOG_LINES:]

    def kill(self, first: signal.Signals = signal.SIGKILL) -> None:
        """End the process: send ``first``, and SIGKILL if it still runs after `EXIT_S` seconds."""
        for number in (first, signal.SIGKILL):
            if self._process.is_alive():
                os.kill(self._process.pid, number)
                self._process.join(EXIT_S)

    def close(self) -> None:
        """Let the process leave its groups and end, or kill it after `EXIT_S` seconds; remove its log."""
        self.pipe.close()
        self._process.join(EXIT_S)
        self.kill()
        self._log.unlink(missing_ok=True)


@dataclass
class BringUpResult:
    """Results of a bring-up. ``stored``: a sentence about where later calls find them, "" on a CPU."""

    about: str
    ranks: int
    path: str  # of the run file on rank 0's server
    results: list[ProbeResult] = field(default_factory=list)
    phases: list[times.Phase] = field(default_factory=list)
    stored: str = ""


def facts(world: int) -> dict[str, Any]:
    """Return facts on which results on this server depend: versions, NPUs, variables, the plan for ``world`` ranks."""
    smi = shutil.which("npu-smi")
    try:
        shown = subprocess.run([smi, "info"], capture_output=True, text=True, timeout=_SMI_S).stdout if smi else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        shown = str(error)
    packages = {name: installed_version(name) for name in ("ascend_moe", "torch", "torch_npu")}
    return {
        "server": socket.gethostname(),
        "versions": {"CANN": probe_results.cann_version()[0], "driver": probe_results.driver_version(), **packages},
        "npu-smi info": shown,
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("HCCL", "ASCEND"))},
        "plan": plan(times.configuration(world)).as_dict(),
    }


def _variables_of(step: Step, kind: str) -> dict[str, str]:
    """Return HCCL's variables that a step needs; "": not set. From CANN 8.3 on each launch asks for its links."""
    cann = settings.VNPU_CANN.get() or probe_results.cann_version()[0]
    release = version_numbers(cann)[:2]
    if kind != "npu" or not release or release >= _LEVELS:
        return {}
    stores = step.probe.name in {probe.name for probe in KERNEL_PROBES} - {BATCH}
    return _STORES if stores else dict.fromkeys(_STORES, "")


class Supervisor:
    """One rank's part of a bring-up.

    ``store``: the job's; None: there is one process. ``begin`` receives the name of each step that begins, ``show``
    each result; both matter on rank 0 only. ``run``: main function of the processes that run steps.
    """

    def __init__(
        self,
        ranks: Ranks,
        store: Any,
        begin: Callable[[str], object],
        show: Callable[[object], object],
        run: Serve = serve,
    ) -> None:
        self._ranks, self._store, self._begin, self._show, self._serve = ranks, store, begin, show, run
        self._worker: _Worker | None = None
        self._machine: probe_results.Machine | None = None
        self._lost: list[int] = []
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self._path = cache_directory() / "bringup" / f"run-{stamp}-{os.getpid()}.jsonl"

    def run(self) -> BringUpResult:
        """Run all steps and return their results; rank 0 returns the times too.

        Raises:
            AscendMoeError: the first process did not find the device.
        """
        world = self._ranks.world
        rounds: dict[str, list[Any]] = {}
        try:
            device = self._device()
            about = f"{device.about}, {world} {'ranks' if self._ranks.threads else 'processes'}"
            outcome = BringUpResult(about, world, str(self._path))
            seconds = GRACE_S + _SMI_S
            first = os.environ.get("LOCAL_RANK", "0") == "0"
            for server in self._exchanged("facts", facts(world) if first else None, seconds):
                if server:
                    self._append("server", device=about, ranks=world, **server)
            self._show(f"{about}\n")
            for number, step in enumerate(steps(device.kind, self._ranks)):
                found = self._result(number, step, device.kind, outcome.results)
                if step.algorithm and found.status == PASS:
                    rounds[step.algorithm] = found.figures[ROUNDS]
                    continue
                outcome.results.append(found)
                self._show(found)
        finally:
            self._end_worker()
        outcome.stored = self._stored(outcome.results)
        self._append("end", summary=summary(outcome.results), stored=outcome.stored)
        if not self._lost:  # rank 0 may host the store: wait until all ranks have read it
            self._exchanged("end", 0, GRACE_S)
        if self._ranks.rank == 0 and rounds:
            self._begin("the model's times")
            measured = [phase for algorithm, of_ranks in rounds.items() for phase in times.phases(of_ranks, algorithm)]
            soc = self._machine.soc.removeprefix("virtual ") if self._machine is not None else ""
            outcome.phases = times.with_prediction(measured, times.configuration(world), soc)
            self._append("times", phases=[asdict(phase) for phase in outcome.phases])
        return outcome

    def _append(self, line: str, **words: Any) -> None:
        """Append a line to the run file, as rank 0: a JSON document that is there even if this process is killed."""
        if self._ranks.rank == 0:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"line": line, **words}) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def _stored(self, results: Sequence[ProbeResult]) -> str:
        """Store the results of a complete run for this kind of machine and return a sentence about that."""
        if self._machine is None:
            return ""
        if self._lost:
            return f"probe results: not stored, {self._lost_ranks()}; earlier ones stay valid"
        figures = next((result.figures for result in results if result.name == probe_results.BARRIER_PROBE), {})
        statuses = {result.name: result.status for result in results}
        links = {result.name: result.links for result in results if result.links}
        try:
            path = probe_results.write(self._machine, self._ranks.world, statuses, figures, links)
            found = probe_results.read(path)
        except (OSError, AscendMoeError) as error:
            return f"probe results: not stored, {error}: export {settings.PROVEN.name} on all ranks instead"
        about = f"{probe_results.about(found)}; in {path}" if found is not None else f"{path} was removed again"
        return f"probe results: {about}"

    # ---- processes

    def _device(self) -> Device:
        """Start the first process and return the device that it has found."""
        self._begin(f"results are appended to {self._path}")
        try:
            found: Device = self._started("first", {}).received(START_S)
        except _Ended as end:
            self._append("end", summary=str(end))
            raise AscendMoeError(f"bringup: rank {self._ranks.rank}: {str(end).partition(chr(10))[0]}") from None
        return found

    def _started(self, session: str, variables: Mapping[str, str]) -> _Worker:
        self._worker = _Worker(dataclasses.replace(self._ranks, variables=variables), session, self._serve)
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _own(self, number: int, variables: Mapping[str, str]) -> list[Judged]:
        """Run a step in this rank's process, in a new one if there is none with these variables."""
        worker = self._worker
        try:
            if worker is None or worker.variables != variables:
                self._end_worker()
                worker = self._started(f"step {number}", variables)
                worker.received(START_S, lambda: self._cause(number))
            if not worker.joined:
                self._machine = worker.received(START_S, lambda: self._cause(number)) or self._machine
                worker.joined = True
            with contextlib.suppress(BrokenPipeError):  # it has ended, as the next line finds out
                worker.pipe.send(number)
            found: list[Judged] = worker.received(STEP_S, lambda: self._cause(number))
            return [self._with_cann_errors(worker, each) for each in found]
        except _Ended as end:
            return [Judged(end.status, f"rank {self._ranks.rank}: {end}")]

    @staticmethod
    def _with_cann_errors(worker: _Worker, found: Judged) -> Judged:
        if found.status in (PASS, SKIPPED) or not (errors := worker.cann_errors()):
            return found
        return found._replace(detail="\n".join([found.detail, *errors])[:MOST_TEXT])

    # ---- agreement of the ranks

    def _cause(self, number: int) -> str:
        """Name the rank that has published a fault in this step, or ""."""
        key = f"{_KEY}/{number}/fault"
        known = self._store is not None and self._store.check([key])
        return f"the fault of rank {self._store.get(key).decode()}" if known else ""

    def _exchanged(self, name: str, own: Any, seconds: float) -> list[Any]:
        """Publish a value and return those of all ranks; None of a rank whose supervisor did not in time."""
        place = self._ranks.rank, self._ranks.world
        return [own] if self._store is None else exchanged(self._store, f"{_KEY}/{name}", place, own, seconds)

    def _result(self, number: int, step: Step, kind: str, before: Sequence[ProbeResult]) -> ProbeResult:
        """Run a step on all ranks, unless it must not run, and write its result to the run file."""
        probe, ranks = step.probe, list[Judged]()
        start = time.monotonic()
        if why := self._lost_ranks() or why_skipped(step, kind, before):
            found = probe.skipped(why)
        else:
            self._begin(f"probe {probe.name!r}")
            own = self._own(number, _variables_of(step, kind))
            if self._store is not None and any(each.status == FAULT for each in own):
                self._store.set(f"{_KEY}/{number}/fault", str(self._ranks.rank))
            of_ranks = self._exchanged(str(number), own, START_S + STEP_S + GRACE_S)
            self._lost = [rank for rank, each in enumerate(of_ranks) if each is None]
            ranks = [Judged(*each) for of_rank in of_ranks for each in of_rank or ()]
            ranks += [Judged(FAULT, self._lost_ranks())] * bool(self._lost)
            found = of_all_ranks(probe, ranks)
            if found.status in (FAIL, FAULT):
                self._end_worker()
        details = [f"{each.status} {each.detail}" for each in ranks] if found.status != PASS else []
        shown = dataclasses.replace(found, figures={}) if step.algorithm else found
        self._append("probe", **asdict(shown), ranks=details, seconds=round(time.monotonic() - start, 1))
        return found

    def _lost_ranks(self) -> str:
        text = ", ".join(map(str, self._lost))
        return f"rank(s) {text} no longer report: see the output of their server" if text else ""
