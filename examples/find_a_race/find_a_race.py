"""Four kernels with one mistake each: the findings of the emulator's checked engine, and none after the fix."""

from pathlib import Path
from typing import Any

import torch

import ascendc_twin

SOURCE = Path(__file__).resolve().parent / "races.cpp"
INT = {"dtype": torch.int32}
ARGUMENTS: dict[str, list[Any]] = {
    "missing_event": [torch.randn(1024), torch.zeros(1024)],
    "missing_clean": [torch.zeros(32, **INT), torch.zeros(16, **INT)],
    "missing_sync_all": [torch.zeros(256, **INT), torch.zeros(256, **INT)],
    "rank_race": [[torch.randn(192), torch.zeros(192)] for _ in range(2)],  # a list a rank
}


def main() -> None:
    for name, arguments in ARGUMENTS.items():
        ranks = name == "rank_race"
        found = [
            ascendc_twin.load(SOURCE, defines=defines).explore(
                name,
                arguments,
                block_dim=1 if ranks else 4,
                windows=ascendc_twin.Windows(2) if ranks else None,
                schedules=50,
            )
            for defines in ([], ["FIXED"])
        ]
        broken, mended = found
        assert not broken.ok and mended.ok, f"{name}: {broken} / {mended}"
        print(f"{name}\n  {broken.text}\n  with -DFIXED: no finding in {mended.schedules} schedules")


if __name__ == "__main__":
    main()
