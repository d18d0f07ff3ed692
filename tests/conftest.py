"""Settings of every test: one OpenMP thread a process, a short deadline for a rank that never comes."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported; processes that tests start inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ASCEND_MOE_TIMEOUT_S", "20")
os.environ.setdefault("ASCEND_MOE_AIV_CORES", "8")  # the default of one core has nobody to meet
_TREE = Path(__file__).resolve().parents[1]
_HELPERS = (str(_TREE / "tests" / "helpers"), str(_TREE / "vnpu" / "tests"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), *_HELPERS)))

from soak_rows import pytest_runtest_logreport, pytest_terminal_summary, tally  # noqa: E402, F401

_CALLS = pytest.StashKey[str]()  # the folder of what failing ranks write


def pytest_configure(config: pytest.Config) -> None:
    if "ASCEND_MOE_CALLS" not in os.environ:  # the first process of the session: its workers and ranks inherit it
        config.stash[_CALLS] = os.environ["ASCEND_MOE_CALLS"] = tempfile.mkdtemp(prefix="ascend_moe_calls_")
    if not config.option.markexpr:
        config.option.markexpr = "not nightly and not mutants"


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CALLS in config.stash:
        shutil.rmtree(config.stash[_CALLS], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Takes what stands now, some million objects, out of later collections: tests that collect take a tenth."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    return "without -m, tests marked nightly and mutants are left to `make nightly`"


@pytest.fixture(scope="module")
def clusters() -> Iterator[Any]:
    """``Clusters`` of a module's tests."""
    from op_runs import Clusters  # not before a test asks: it imports the package

    opened = Clusters()
    yield opened
    opened.close()


@pytest.fixture
def group_ep() -> Iterator[str]:
    """The name of the default group, of one rank in this process."""
    import torch.distributed as dist  # as above

    import ascend_moe

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ascend_moe.comm_name()
    ascend_moe.close("0")
    if dist.is_initialized():
        dist.destroy_process_group()
