"""Runs of the benchmark that were never measured: marks made up, so that tests know what must come out."""

from __future__ import annotations

from ascend_moe.bench.cases import Case, matrix
from ascend_moe.bench.results import Run, evaluate
from ascend_moe.bench.timing import CaseMarks

# method -> µs of dispatch and combine on every iteration
TIMES_US = {
    "limit-memcpy": (10, 10),
    "limit-nontemporal": (15, 15),
    "limit-ub": (20, 20),
    "direct-zero-copy": (14, 14),
    "direct": (20, 20),
    "window": (50, 50),
    "mpi-a2a-tuned": (100, 100),
    "gloo-a2a-tuned": (200, 200),
    "gloo-a2a": (400, 400),
}

ABOUT = {
    "date": "2026-01-01 00:00 UTC",
    "cpu": "a CPU",
    "cores": 2,
    "kernel": "6",
    "python": "3",
    "torch": "2",
    "mpi": "",
    "sources": "0",
    "load_before": 0.1,
    "engine": "fast",
    "settings": {"OMP_NUM_THREADS": "1"},
}


def marks(
    case: Case, times_us: dict[str, tuple[float, float]], iterations: int = 8, jitter: float = 0.0
) -> list[CaseMarks]:
    """What every rank would have noted. Rank r begins 1 µs after rank r - 1; all end when the last one does.

    ``jitter``: every other iteration takes (1 + jitter) times as long.
    """
    found = []
    for rank in range(case.world):
        one = CaseMarks(missing={"gloo-ag-rs": "not there"}, switched_out=rank)
        for name, (dispatch, combine) in times_us.items():
            one.marks[name] = []
            for i in range(iterations):
                factor = 1 + jitter * (i % 2)
                at, late = i * 10_000_000, rank * 1000
                half = at + 5_000_000
                ends = (at + int(dispatch * factor * 1000), half + int(combine * factor * 1000))
                one.marks[name].append((at + late, ends[0], half + late, ends[1]))
            one.first[name] = (0, int(3 * dispatch * 1000), 5_000_000, 5_000_000 + int(3 * combine * 1000))
        one.exact = list(times_us)
        found.append(one)
    return found


def result(
    case: Case, times_us: dict[str, tuple[float, float]] | None = None, jitter: float = 0.0, cores: int = 2
):
    return evaluate(case, marks(case, times_us or TIMES_US, jitter=jitter), 0.5, cores)


def run(sweep: str = "", presets: tuple[str, ...] = ("small",)) -> Run:
    cases = matrix(presets, [2], [8, 32], sweep=sweep)
    return Run(dict(ABOUT), [result(case) for case in cases])
