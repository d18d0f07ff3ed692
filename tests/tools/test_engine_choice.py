"""ASCEND_MOE_ENGINE chooses the engine of the ops; both give the same tensors and the same errors."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch, ascend_moe
from ascend_moe.native import library as _lib
from ascend_moe.errors import AscendMoeError

W, E, K, H, BS = 2, 4, 2, 64, 3

def work(rank, group, fault=""):
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(BS, H, generator=g).bfloat16()
    ids = torch.rand(BS, E, generator=g).topk(K).indices.int()
    if fault == "mismatch":
        x = x[:, : H // (rank + 1)].contiguous()
    if fault == "absent" and rank == 1:
        return
    total = torch.zeros(())
    for quant in (0, 2):
        rows, scales, idx, nums, counts, _, _ = ascend_moe.npu_moe_distribute_dispatch(
            x, ids, group, W, rank, E, quant_mode=quant)
        y = ascend_moe.npu_moe_distribute_combine(
            rows.bfloat16(), ids, idx, counts, torch.full((BS, K), 0.5), group, W, rank, E)
        total = total + y.double().abs().sum()
    return float(total)

print(int(_lib.lib().am_engine_is_checked()))
for fault in ("", "mismatch", "absent"):
    with ascend_moe.LocalCluster(W) as cluster:
        try:
            print(cluster.run(lambda rank, group: work(rank, group, fault)))
        except AscendMoeError as error:
            print(type(error).__name__, error)
"""


def run(engine: str | None) -> list[str]:
    env = {**os.environ, "ASCEND_MOE_TIMEOUT_S": "2"}
    env.pop("ASCEND_MOE_ENGINE", None)
    library = env.pop("ASCEND_MOE_LIBRARY", None)
    if engine is not None:
        env["ASCEND_MOE_ENGINE"] = engine
    if library is not None:  # the engines' libraries lie side by side
        name = "libascend_moe_checked.so" if engine == "checked" else "libascend_moe.so"
        env["ASCEND_MOE_LIBRARY"] = os.path.join(os.path.dirname(library), name)
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout.splitlines()


def test_both_engines_give_the_same_tensors_and_errors() -> None:
    fast, checked = run(None), run("checked")
    assert fast[0] == "0" and checked[0] == "1"
    assert fast[1] == checked[1] and fast[1].startswith("[")
    for lines in (fast, checked):
        assert [line.split()[0] for line in lines[2:]] == ["ConfigMismatch", "CommTimeout"], lines
