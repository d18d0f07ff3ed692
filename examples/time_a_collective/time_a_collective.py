"""Predict the time of a collective of your own on NPUs, over the grid of `ascend-moe predict`, and check its results.

python time_a_collective.py [SOC]
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np

import ascendc_twin

HIDDEN, TOPK, CORES, TILE = 7168, 8, 48, 28672
KERNELS = ascendc_twin.load(Path(__file__).parent / "all_to_all.cpp", engine="timed")


def predict(soc: str, ranks: int, batch: int, itemsize: int) -> ascendc_twin.Timing:
    """Return predicted times of an exchange of batch * TOPK rows per rank, an equal number to each rank."""
    size = batch * TOPK * HIDDEN * itemsize // ranks
    x = np.random.default_rng(0).integers(0, 256, (ranks, ranks, size), np.uint8)
    y = np.zeros_like(x)
    windows = ascendc_twin.Windows(ranks, data_bytes=ranks * size + (64 << 10))
    tiling = np.array([size, TILE], np.uint32)
    args = [[x[rank], y[rank]] for rank in range(ranks)]
    found = KERNELS.launch("all_to_all", args, tiling, CORES, windows=windows, soc=soc)
    assert np.array_equal(y, x.swapaxes(0, 1)), "rows are missing"
    assert found.time is not None
    return found.time


def main() -> None:
    soc = sys.argv[1] if len(sys.argv) > 1 else "Ascend910_9391"
    print(f"{soc}, {CORES} cores, H {HIDDEN}, K {TOPK}: us, a model, not a measurement")
    print("rows  EP  BS 8   BS 32  BS 128")
    for (rows, itemsize), ranks in product((("bf16", 2), ("int8", 1)), (8, 16, 32)):
        times = [predict(soc, ranks, batch, itemsize).us for batch in (8, 32, 128)]
        print(f"{rows}  {ranks:<3} " + " ".join(f"{us:<6.1f}" for us in times).rstrip())


if __name__ == "__main__":
    main()
