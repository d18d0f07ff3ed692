"""ASCEND_MOE_ENGINE chooses the engine of the ops; both give the same tensors and the same errors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch, ascend_moe
from ascend_moe.native import library as _lib
from ascend_moe.errors import AscendMoeError

W, E, K, H, BS = 2, 4, 2, 64, 3

def work(rank, group):
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(BS, H, generator=g).bfloat16()
    ids = torch.rand(BS, E, generator=g).topk(K).indices.int()
    total = torch.zeros(())
    for quant in (0, 2):
        rows, scales, idx, nums, counts, _, _ = ascend_moe.npu_moe_distribute_dispatch(
            x, ids, group, W, rank, E, quant_mode=quant)
        rows = rows.bfloat16()
        y = ascend_moe.npu_moe_distribute_combine(
            rows, ids, idx, counts, torch.full((BS, K), 0.5), group, W, rank, E)
        total = total + y.double().abs().sum()
    if "mismatch" in sys.argv:
        ascend_moe.npu_moe_distribute_dispatch(x[:, : H // (rank + 1)].contiguous(), ids, group, W, rank, E)
    if "absent" in sys.argv and rank == 0:
        ascend_moe.npu_moe_distribute_dispatch(x, ids, group, W, rank, E)
    return float(total)

print(int(_lib.lib().am_engine_is_checked()))
with ascend_moe.LocalCluster(W) as cluster:
    try:
        print(cluster.run(work))
    except AscendMoeError as error:
        print(type(error).__name__, error)
"""


def run(engine: str | None, *arguments: str) -> list[str]:
    env = {**os.environ, "ASCEND_MOE_TIMEOUT_S": "2"}
    env.pop("ASCEND_MOE_ENGINE", None)
    library = env.pop("ASCEND_MOE_LIBRARY", None)
    if engine is not None:
        env["ASCEND_MOE_ENGINE"] = engine
    if library is not None and engine != "quick":  # the engines' libraries lie side by side
        name = "libascend_moe_checked.so" if engine == "checked" else "libascend_moe.so"
        env["ASCEND_MOE_LIBRARY"] = os.path.join(os.path.dirname(library), name)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=env, capture_output=True, text=True, timeout=120
    )
    return (done.stdout + done.stderr).strip().splitlines()


def test_both_engines_give_the_same_tensors() -> None:
    fast, checked = run(None), run("checked")
    assert fast[0] == "0" and checked[0] == "1"
    assert fast[1] == checked[1] and fast[1].startswith("[")


@pytest.mark.parametrize(
    "what, kind", [("mismatch", "ConfigMismatch"), ("absent", "CommTimeout")], ids=["mismatch", "absent"]
)
def test_the_checked_engine_raises_what_the_fast_one_raises(what: str, kind: str) -> None:
    fast, checked = run("fast", what), run("checked", what)
    assert fast[1].startswith(kind) and checked[1].startswith(kind), (fast, checked)


def test_an_engine_that_is_none() -> None:
    lines = run("quick")
    assert "ASCEND_MOE_ENGINE=quick is no engine" in lines[-1] and "fast, checked" in lines[-1]
