"""docs/zero_copy.md: its example runs, and gives what the copying combine gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import ascend_moe
from ascend_moe.comm import lookup
from ascend_moe.ops import calls

DOC = Path(__file__).resolve().parents[3] / "docs" / "zero_copy.md"
WORLD, EXPERTS, HIDDEN, INNER = 2, 4, 64, 32


def example() -> Any:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(DOC), "exec"), names)
    return names


def test_the_example() -> None:
    names = example()

    def work(rank: int, group: str) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(8, HIDDEN, generator=generator).bfloat16()
        ids = torch.randint(0, EXPERTS, (8, 2), generator=generator, dtype=torch.int32)
        weights = torch.rand(8, 2, generator=generator)
        gate_up = torch.randn(2, HIDDEN, 2 * INNER, generator=generator).bfloat16()
        down = torch.randn(2, INNER, HIDDEN, generator=generator).bfloat16()
        place = {"group_ep": group, "ep_world_size": WORLD, "ep_rank_id": rank}
        result = names["moe"](x, ids, weights, gate_up, down, **place)
        moved = calls.traffic(lookup(group, WORLD, rank))
        return result, moved["written_window_data"], moved["read_window_lent"]

    with ascend_moe.LocalCluster(WORLD, window_mib=1) as cluster:
        lent = cluster.run(work)
    names["ascend_moe"] = Copying()
    with ascend_moe.LocalCluster(WORLD, window_mib=1) as cluster:
        copied = cluster.run(work)
    for one, two in zip(lent, copied, strict=True):
        assert torch.equal(one[0], two[0]) and one[0].any()
        assert one[1] < 256 and one[2] == 8 * 2 * HIDDEN * 2  # a table; a row a pair
        assert two[1] > 4 * HIDDEN * 2 and two[2] == 0


class Copying:
    """The package with tensors of torch in the place of window tensors."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ascend_moe, name)

    @staticmethod
    def window_empty(shape: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)
