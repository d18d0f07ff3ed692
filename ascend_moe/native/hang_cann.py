"""The state areas of CANN's own operators on an A3, copied from the devices: `ascend-moe hang --layout cann-v1`.

V1 is MoeDistributeDispatch and MoeDistributeCombine, V2 their default algorithm with source indices. The layouts are
those of CANN's public sources. A status block of 32 bytes begins with an fp32 flag:

- V1: two halves, used in turn, each with a block per (local expert, source) for dispatch and per source for combine.
  The flag is 0 and 1 in turn. Each core stores the number of the next half. A rank's block to itself is as new as it.
- V2: a control block per core and op with the op's stage, rank, E, W and number of ops. Dispatch's flag is 1 from its
  arrival until its reader has all. Combine waits for blocks of (token, k), whose sources are not in the area.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from ..errors import need
from .hang import GroupState, RankState, contents

LAYOUTS = ("cann-v1", "cann-v2")
_KIB = 1 << 10
_V1_HALF, _V1_CORES = 512 * _KIB, 900 * _KIB
_V1_MANY_SLOTS = 512  # from here on blocks are 256 bytes apart, else 512
_V2_HALF = 500 * _KIB
_V2_CONTROL = {"dispatch": 950 * _KIB, "combine": 975 * _KIB}
_STARTED = 1  # stage of an op that waits
_AREA = 976 * _KIB  # bytes that are read


def of_files(files: Sequence[Path], layout: str, experts: int = 0) -> GroupState:
    """Return the state of a group from copies of its ranks' windowsExp, one file per rank in rank order.

    Args:
        layout: one of `LAYOUTS`.
        experts: number of experts, for cann-v1 only.

    Raises:
        ArgumentError: a file cannot be read, is too short or not of this layout, there is one file only, or ``experts``
            is not a multiple of the ranks.
    """
    need(len(files) > 1, "files", "has {} entries; pass a copy of windowsExp of every rank, in rank order", len(files))
    areas = [contents(file, _AREA) for file in files]
    for file, area in zip(files, areas, strict=True):
        need(len(area) >= _AREA, "files", "{} has {} bytes; copy at least {} of windowsExp", file, len(area), _AREA)
    if layout == "cann-v1":
        fits = experts > 0 and experts % len(files) == 0
        need(fits, "experts", "is {}; cann-v1 needs the number of experts, a multiple of {} ranks", experts, len(files))
        ranks = [_v1(rank, area, len(files), experts // len(files)) for rank, area in enumerate(areas)]
    else:
        ranks = [_v2(rank, area, len(files)) for rank, area in enumerate(areas)]
    return GroupState("", f"of CANN ({layout})", tuple(ranks))


def _word(area: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", area, at)[0])


def _flag(area: bytes, at: int) -> float:
    return float(struct.unpack_from("<f", area, at)[0])


def _v1(rank: int, area: bytes, world: int, local: int) -> RankState:
    half = (_word(area, _V1_CORES) ^ 1) & 1  # the word is toggled when the op begins
    stride = 256 if world * local > _V1_MANY_SLOTS else 512
    base = half * _V1_HALF
    flags = [_flag(area, base + source * stride) for source in range(world)]
    awaited = tuple(source for source in range(world) if flags[source] != flags[rank])
    phase = "WaitStatus" if awaited else ""
    return RankState(rank, 0, "dispatch or combine", "CANN V1", 0, phase, awaits=awaited, process="")


def _v2(rank: int, area: bytes, world: int) -> RankState:
    counts = {}
    for op, at in _V2_CONTROL.items():
        phase, stage, theirs, experts, ranks, _, count = struct.unpack_from("<6IQ", area, at)
        if not ranks:
            continue
        rule = "are not of cann-v2: rank {} says that it is rank {} of {} with {} experts; pass all {} ranks in order"
        need((theirs, ranks) == (rank, world) and experts > 0, "files", rule, rank, theirs, ranks, experts, ranks)
        counts[op] = count
        if stage != _STARTED:
            continue
        awaited: tuple[int, ...] = ()
        if op == "dispatch":
            base = ((phase ^ 1) & 1) * _V2_HALF
            blocks = [[base + 32 * (e * world + s) for e in range(experts // world)] for s in range(world)]
            awaited = tuple(s for s, places in enumerate(blocks) if any(_flag(area, at) != 1.0 for at in places))
        return RankState(rank, 0, op, "CANN V2", count, "WaitStatus", awaits=awaited, process="")
    op = max(counts, key=lambda each: counts[each]) if counts else ""
    return RankState(rank, 0, op, "CANN V2", counts.get(op, 0), process="")
