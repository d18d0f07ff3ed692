"""Four kernels with one mistake each: what the checked twin says of them, and of the mended ones."""

from pathlib import Path

import torch

from ascend_moe import twin

HERE = Path(__file__).resolve().parent


def explore(name: str, fixed: bool) -> twin.Exploration:
    kernels = twin.load(HERE / f"{name}.cpp", defines=["FIXED"] if fixed else [])
    if name == "rank_race":
        rows = [[torch.randn(192), torch.zeros(192)] for _ in range(2)]
        return kernels.explore(name, rows, None, block_dim=1, windows=twin.Windows(2), schedules=50)
    arguments = {
        "missing_event": [torch.randn(1024), torch.zeros(1024)],
        "missing_clean": [torch.zeros(32, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)],
        "missing_sync_all": [torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)],
    }[name]
    return kernels.explore(name, arguments, None, block_dim=4, schedules=50)


def main() -> None:
    for name in ("missing_event", "missing_clean", "missing_sync_all", "rank_race"):
        broken, mended = explore(name, fixed=False), explore(name, fixed=True)
        assert not broken.ok and mended.ok, f"{name}: {broken} / {mended}"
        print(f"{name}.cpp\n  {broken.text}\n  with -DFIXED: no finding in {mended.schedules} schedules")


if __name__ == "__main__":
    main()
