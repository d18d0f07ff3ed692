"""Windows of a group of ranks in this process, in HCCL's layouts."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import abi
from .errors import ArgumentError, need

Bytes: TypeAlias = NDArray[np.uint8]
MIB = 1 << 20
PAGE = mmap.PAGESIZE
PEER_TABLES = (2984, 3320)
_DOORBELL = 64 + 4  # in the header page of a rank: sleepers, then the doorbell
_WORKSPACE_BYTES = 16 * MIB
_numbers = itertools.count()


class _Area:
    """Zeroed memory, of which only touched pages are allocated."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)[:size]
        self.address = int(self.bytes.ctypes.data)

    def clear(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def pages(self) -> dict[int, Bytes]:
        """Copy of the pages that are not all zero, by offset. Reads every page: for small areas."""
        pages = {begin: self.bytes[begin : begin + PAGE] for begin in range(0, self.size, PAGE)}
        return {begin: page.copy() for begin, page in pages.items() if page.any()}

    def restore(self, pages: dict[int, Bytes]) -> None:
        self.clear()
        for begin, page in pages.items():
            self.bytes[begin : begin + len(page)] = page


class Windows:
    """HCCL windows (memory that peers access) of ``world`` ranks, zeroed, and the contexts by which kernels find them.

    Args:
        world: number of ranks of the group, at least 1.
        data_bytes: bytes of windowsIn and of windowsOut of each rank (HCCL_BUFFSIZE in bytes); default 200 MiB.
            Only touched pages cost memory.
        state_bytes: bytes of windowsExp of each rank; default 2 MiB.
        layout: the context's struct. "a3": HcclOpResParam, peers through remoteRes[rank].nextDevicePtr; "a2": the A2
            context with windowsIn[] and windowsOut[], for more than 32 ranks through its data table.
        peer_table: layout "a3": byte offset of remoteRes in the context, which its rWinStart contains: 2984, or 3320
            as in newer releases of HCCL.
        name: the group's name, up to 127 characters.
        ranks_per_server: layout "a2": number of consecutive ranks that share a server; 0: all. Windows of other servers
            are reached by BatchWrite only: a load or store there is a finding.
        links: with several servers, how HCCL links the ranks of one. "stores": their windows are mapped, and
            BatchWrite to them is a finding (algConfig BatchWrite=level1:hierarchy). "rdma": like those of other servers
            (BatchWrite=level1:fullmesh).
        flags_in_data: flags travel inside longer stores. The checked engine then takes every 32-byte block of
            the windows for a flag and reports no races in them: an error appears as a wrong result.

    ``data(r)``, ``out(r)`` and ``state(r)`` are the bytes of rank r's windows, as numpy arrays: read and write
    them between launches. Several libraries can use the same windows, one launch at a time.

    Raises:
        ArgumentError: a rule above is broken.
    """

    def __init__(
        self,
        world: int,
        *,
        data_bytes: int = 200 * MIB,
        state_bytes: int = 2 * MIB,
        layout: str = "a3",
        peer_table: int = 2984,
        name: str = "hccl_world_group",
        ranks_per_server: int = 0,
        links: str = "stores",
        flags_in_data: bool = False,
    ) -> None:
        need(world >= 1, f"world is {world}: a group has at least 1 rank", "world")
        need(layout in abi.LAYOUTS, f"layout is a3 or a2, not {layout!r}", "layout")
        need(peer_table in PEER_TABLES, f"peer_table is 2984 or 3320, not {peer_table!r}", "peer_table")
        text = f"data_bytes is {data_bytes}, state_bytes is {state_bytes}; both must be at least 1"
        need(data_bytes >= 1 and state_bytes >= 1, text, "data_bytes")
        text = f"ranks_per_server is {ranks_per_server} with layout {layout!r}: pass 0, or 1.. with layout 'a2'"
        need(ranks_per_server == 0 or (ranks_per_server > 0 and layout == "a2"), text, "ranks_per_server")
        need(links in abi.LINKS, f"links is stores or rdma, not {links!r}", "links")
        need(len(name) <= 127, f"name has {len(name)} characters; pass at most 127", "name")
        self.world, self.layout, self.name, self.peer_table = world, layout, name, peer_table
        self.data_bytes, self.state_bytes = data_bytes, state_bytes
        self.ranks_per_server, self.links = ranks_per_server or world, links
        self.flags_in_data = flags_in_data
        self.number = next(_numbers)  # what libraries know the group by
        self._in = [_Area(data_bytes) for _ in range(world)]
        self._out = [_Area(data_bytes) for _ in range(world)]
        self._exp = [_Area(state_bytes) for _ in range(world)]
        self._headers = [_Area(PAGE) for _ in range(world)]
        self._workspaces = [_Area(_WORKSPACE_BYTES) for _ in range(world)]
        self._contexts: list[_Area | None] = [None] * world
        self._zero = True  # nothing has been written
        self._viewed = False  # the caller has an array, which it may write to at any time

    def data(self, rank: int) -> Bytes:
        """Return the bytes of a rank's windowsIn."""
        return self._view(self._in[rank])

    def out(self, rank: int) -> Bytes:
        """Return the bytes of a rank's windowsOut."""
        return self._view(self._out[rank])

    def state(self, rank: int) -> Bytes:
        """Return the bytes of a rank's windowsExp."""
        return self._view(self._exp[rank])

    def member(self, rank: int) -> Member:
        """Return rank ``rank`` of this group, for launches whose ranks have other numbers in a second group."""
        return Member(self, rank)

    def clear(self) -> None:
        """Zero all windows."""
        for area in self._areas():
            area.clear()
        self._zero = not self._viewed

    def snapshot(self) -> list[dict[int, Bytes]]:
        """Return a copy of all windows' contents, for `restore`."""
        areas = list(self._areas())
        return [{} for _ in areas] if self._zero else [area.pages() for area in areas]

    def restore(self, saved: list[dict[int, Bytes]]) -> None:
        """Restore the contents ``saved`` by `snapshot`."""
        for area, pages in zip(self._areas(), saved, strict=True):
            area.restore(pages)
        self._zero = not self._viewed and not any(saved)

    def _view(self, area: _Area) -> Bytes:
        self._zero, self._viewed = False, True
        return area.bytes

    def _areas(self) -> Iterator[_Area]:
        yield from (*self._in, *self._out, *self._exp, *self._workspaces)

    # ---- for launches ----

    def doorbell(self, rank: int) -> int:
        """Return the address of the word that stores to a rank's windows increment."""
        return self._headers[rank].address + _DOORBELL

    def touch(self) -> None:
        """Record that a kernel is about to write."""
        self._zero = False

    def ranges(self, viewer: int, *, atomic: bool) -> list[abi.Range]:
        """Return a range of global memory for every window of every rank, with the access that rank ``viewer`` has.

        ``atomic``: 32-byte blocks are stored and read whole.
        """
        made, atomic = [], atomic or self.flags_in_data
        for rank in range(self.world):
            reach = self._reach(viewer, rank)
            for area, name, kind in (
                (self._in[rank], "windowsIn", abi.WINDOW_DATA),
                (self._out[rank], "windowsOut", abi.WINDOW_DATA),
                (self._exp[rank], "windowsExp", abi.WINDOW_STATE),
            ):
                where = (area.address, area.size, f"{name} of rank {rank}")
                bell = self.doorbell(rank)
                made.append(abi.range_of(*where, kind=kind, doorbell=bell, atomic=atomic, owner=rank, reach=reach))
        return made

    def _reach(self, viewer: int, rank: int) -> int:
        share = self.ranks_per_server
        if share == self.world or viewer == rank:
            return abi.REACH_ALL
        return abi.LINKS[self.links] if viewer // share == rank // share else abi.REACH_RDMA

    def context(self, library: ctypes.CDLL, rank: int) -> _Area:
        """Return the memory of a rank's communication context, which ``library`` fills in its layout."""
        layout = abi.LAYOUTS[self.layout]
        size = int(library.twin_context_bytes(layout, self.world))
        area = self._contexts[rank]
        if area is None or area.size < size:
            area = self._contexts[rank] = _Area(size)
        sizes = (self.data_bytes, self.state_bytes, _WORKSPACE_BYTES)
        several = int(self.ranks_per_server < self.world)
        group = abi.Group(layout, self.world, self.peer_table, *sizes, name=self.name.encode(), multi_server=several)
        tables = [
            (ctypes.c_uint64 * self.world)(*(a.address for a in areas)) for areas in (self._in, self._out, self._exp)
        ]
        group.windows_in, group.windows_out, group.windows_exp = tables
        library.twin_context_fill(ctypes.byref(group), rank, area.address, self._workspaces[rank].address)
        return area

    def workspace(self, rank: int) -> _Area:
        """Return the workspace whose address is in a rank's context."""
        return self._workspaces[rank]


@dataclass(frozen=True)
class Member:
    """One rank of a group of windows.

    Attributes:
        windows: the group.
        rank: its number, from 0.

    Raises:
        ArgumentError: the group has no such rank.
    """

    windows: Windows
    rank: int

    def __post_init__(self) -> None:
        text = f"rank is {self.rank}; the windows have {self.windows.world} ranks"
        need(0 <= self.rank < self.windows.world, text, "windows")


# One group, two, or for each rank its members of one or two.
Groups: TypeAlias = "Windows | Member | Sequence[Windows | Member | Sequence[Member]] | None"


def members_of(groups: Groups, rank: int | None) -> list[tuple[Member, ...]]:
    """Return for each rank to launch its members, one per group; [()] without groups. ``rank``: only it; None: all."""
    if groups is None:
        return [()]
    listed = [groups] if isinstance(groups, (Windows, Member)) else list(groups)
    if listed and not any(isinstance(place, (Windows, Member)) for place in listed):
        places = [_places(given) for given in listed]
        return [places[rank]] if rank is not None else places
    need(1 <= len(listed) <= 2, f"windows has {len(listed)} groups; it must have one or two", "windows")
    if all(isinstance(group, Member) for group in listed):
        return [_places(listed)]
    whole = [group for group in listed if isinstance(group, Windows)]
    need(len(whole) == len(listed), "windows has both Windows and Members: pass only one kind", "windows")
    ranks = [rank] if rank is not None else range(whole[0].world)
    return [tuple(group.member(r) for group in whole) for r in ranks]


def _places(given: object) -> tuple[Member, ...]:
    if isinstance(given, Sequence) and 1 <= len(given) <= 2 and all(isinstance(m, Member) for m in given):
        return tuple(given)
    raise ArgumentError(f"windows must list one Member or two for each rank, not {given!r}", argument="windows")
