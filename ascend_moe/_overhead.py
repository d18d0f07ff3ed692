"""What a call of the ops costs on the CPU beside its kernel: ``python -m ascend_moe._overhead``.

One rank, tiny shapes. Of every call the time in am_run (the kernel on the twin) is taken off: what is left is
torch's binding of arguments and dispatch, the plan's look-up, the outputs, the lock, the C ABI. Compiled and
Python kernels are measured by turns in two processes, as a process has one kind of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import comm, ops
from .errors import AscendMoeError
from .native import library as _lib
from .ops import compiled

CALLS = 3000
TOKENS, TOPK, HIDDEN, EXPERTS = 4, 2, 32, 4
KERNELS = ("python", "compiled")
_WARM = 50
_PROGRAM = "python -m ascend_moe._overhead"


@dataclass(frozen=True)
class Cost:
    """Of many calls of one op. Microseconds: the 10th percentile and the median.

    Attributes:
        op: its name; caller: ``public`` (ascend_moe.npu_*), or ``torch.ops``; kernels: one of ``KERNELS``.
        overhead: the call without am_run.
        am_run: the kernel on the twin.
        binding, before, after: of the overhead, torch and Python around the kernel; the compiled kernel's
            parts before and after am_run, 0 with Python's.
    """

    op: str
    caller: str
    kernels: str
    overhead: tuple[float, float]
    am_run: tuple[float, float]
    binding: tuple[float, float]
    before: tuple[float, float]
    after: tuple[float, float]


Marks = Callable[[], tuple[int, int, int, int]]


def measure(calls: int = CALLS) -> list[Cost]:
    """Costs in this process, with whichever kernels it has."""
    with _marks() as marks, comm.LocalCluster(1) as cluster:
        return cluster.run(lambda _, group_ep: _measure(group_ep, calls, marks))[0]


def compare(calls: int = CALLS, rounds: int = 3) -> list[Cost]:
    """Costs with both kinds of kernels, processes by turns; of the rounds the one with the least median.

    Raises:
        AscendMoeError: a process could not measure: there are no compiled kernels here.
    """
    best: dict[tuple[str, str, str], Cost] = {}
    for _ in range(rounds):
        for kernels in KERNELS:
            command = [sys.executable, "-m", "ascend_moe._overhead", "--json", "--calls", str(calls)]
            env = {**os.environ, compiled.SWITCH: kernels}
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode != 0:
                said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                raise AscendMoeError(f"{kernels} kernels: {said[-1].removeprefix(f'{_PROGRAM}: ')}")
            for fields in json.loads(done.stdout):
                cost = Cost(**fields)
                key = cost.op, cost.caller, cost.kernels
                if key not in best or cost.overhead[1] < best[key].overhead[1]:
                    best[key] = cost
    return sorted(best.values(), key=lambda cost: (cost.op, cost.caller, cost.kernels))


@contextlib.contextmanager
def _marks() -> Iterator[Marks]:
    """Like ``compiled.clocks``; of Python's kernels only am_run is marked, which costs them a little."""
    if compiled.active():
        with compiled.clocks() as marks:
            yield marks
        return
    library: Any = _lib.lib()
    run, seen = library.am_run, [0, 0]

    def timed(*args: Any) -> Any:
        seen[0] = time.monotonic_ns()
        code = run(*args)
        seen[1] = time.monotonic_ns()
        return code

    library.am_run = timed
    try:
        yield lambda: (seen[0], seen[0], seen[1], seen[1])
    finally:
        library.am_run = run


def _measure(group_ep: str, calls: int, marks: Marks) -> list[Cost]:
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    ids = torch.arange(TOKENS * TOPK, dtype=torch.int32).reshape(TOKENS, TOPK) % EXPERTS
    weights, place = torch.full((TOKENS, TOPK), 0.5), (group_ep, 1, 0, EXPERTS)
    found = []
    for version in ("", "_v2"):
        rows = _call("dispatch", version)(x, ids, *place)
        arguments = {
            "dispatch": (x, ids, *place),
            "combine": (rows[0], ids, rows[2], rows[4], weights, *place),
        }
        for name, given in arguments.items():
            public = _call(name, version)
            overload = getattr(torch.ops.ascend_moe, public.__name__).default
            for caller, op in (("public", public), ("torch.ops", overload)):
                found.append(_cost(public.__name__, caller, op, given, calls, marks))
    return found


def _call(name: str, version: str) -> Callable[..., Any]:
    op: Callable[..., Any] = getattr(ops, f"npu_moe_distribute_{name}{version}")
    return op


def _cost(name: str, caller: str, op: Callable[..., Any], given: Any, calls: int, marks: Marks) -> Cost:
    for _ in range(_WARM):
        op(*given)
    seen: list[tuple[int, ...]] = []
    for _ in range(calls):
        start = time.monotonic_ns()
        op(*given)
        end = time.monotonic_ns()
        entered, launched, returned, left = marks()
        run = returned - launched
        binding = end - start - (left - entered)
        seen.append((end - start - run, run, binding, launched - entered, left - returned))
    columns = [sorted(column) for column in zip(*seen, strict=True)]
    parts = [(column[calls // 10] / 1000, column[calls // 2] / 1000) for column in columns]
    return Cost(name, caller, "compiled" if compiled.active() else "python", *parts)


def text(costs: list[Cost]) -> str:
    """A table."""
    parts = ("overhead", "am_run", "binding", "before", "after")
    head = f"{'op':<33}{'by':<11}{'kernels':<10}" + "".join(f"{part:>15}" for part in parts)
    lines = [f"microseconds a call, p10 / p50; {TOKENS} tokens, H {HIDDEN}, K {TOPK}, one rank", head]
    for cost in costs:
        columns = ["{:.1f} / {:.1f}".format(*getattr(cost, part)) for part in parts]
        lines.append(
            f"{cost.op:<33}{cost.caller:<11}{cost.kernels:<10}" + "".join(f"{one:>15}" for one in columns)
        )
    return "\n".join(lines)


def main() -> int:
    """Exit code 0; 2: it could not measure, one line on stderr says why."""
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--json", action="store_true", help="this process alone, as JSON")
    options = parser.parse_args()
    try:
        if options.json:
            print(json.dumps([asdict(cost) for cost in measure(options.calls)]))
        else:
            print(text(compare(options.calls)))
    except AscendMoeError as error:
        print(f"{_PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
