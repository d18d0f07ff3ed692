"""What the ranks of a run are told, and where in the scratch folder they leave what they found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ascend_moe.bench.cases import Case
from ascend_moe.bench.timing import CaseMarks


@dataclass(frozen=True)
class Job:
    """The cases of one number of ranks, all measured by the same processes.

    Attributes:
        mpi: the ranks are started by mpiexec.
        limits: measure the machine before the cases.
        window_mib, lent_mib: HCCL_BUFFSIZE and ASCEND_MOE_LENT_MIB of the ranks.
    """

    world: int
    cases: list[Case]
    methods: list[str]
    iterations: int
    mpi: bool
    limits: bool
    window_mib: int
    lent_mib: int
    bench_pid: int
    cores: list[int] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        (folder / "job.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Job:
        values = json.loads((folder / "job.json").read_text())
        return cls(**{**values, "cases": [Case(**one) for one in values["cases"]]})


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


def marks_path(folder: Path, case: int, rank: int) -> Path:
    return folder / f"case{case}.rank{rank}.json"


def read_marks(folder: Path, case: int, rank: int) -> CaseMarks:
    return CaseMarks(**json.loads(marks_path(folder, case, rank).read_text()))
