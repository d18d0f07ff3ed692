"""Status runs and abort blocks in the windows of a LocalCluster, to read, forge and spoil between ops."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import ascend_moe
from ascend_moe.native import library
from ascend_moe.native.windows import CONTEXT_A2, context_kind

BLOCK = 32  # bytes
WORDS = 8  # of a block
STATUS_MAGIC, ABORT_MAGIC, RECORD_MAGIC, FAIL_MAGIC = 0x4D4F4530, 0x41424F52, 0x4D4F4552, 0x4641494C
TIMEOUT = 17  # CommTimeout
MAX_SLOTS = 2048  # (source, local expert) pairs of a rank
RECORD_AT, FAIL_AT, ABORTS_AT = 512, 768, 1024  # the error record stands behind the control block
HEADER_BLOCKS, COUNTS_PER_BLOCK = 2, 4


def next_epoch(epoch: int) -> int:
    return 2 if epoch == 0xFFFFFFFF else epoch + 1


@dataclass(frozen=True)
class State:
    """The state area of one rank, and its data area for poisoning."""

    base: int
    data: int
    data_bytes: int
    world: int

    @classmethod
    def of(cls, cluster: ascend_moe.LocalCluster, rank: int) -> State:
        layout = (ctypes.c_uint64 * 3)()
        library.lib().am_window_layout(cluster.world_size, layout)
        windows = cluster._windows
        assert windows is not None, "no op has run"
        base, end = windows._bases[rank], windows.communicators[rank]
        if context_kind() == CONTEXT_A2:  # what is in front of the data elsewhere lies behind them
            data = base + layout[1]
            return cls(data + end.data_bytes + end.registered_bytes, data, end.data_bytes, cluster.world_size)
        return cls(base + layout[1], base + layout[0], end.data_bytes, cluster.world_size)

    def words(self, offset: int, count: int) -> ctypes.Array[ctypes.c_uint32]:
        return (ctypes.c_uint32 * count).from_address(self.base + offset)

    @property
    def epoch(self) -> int:
        return self.words(0, 2)[1]

    def run(self, epoch: int, source: int, local_experts: int) -> ctypes.Array[ctypes.c_uint32]:
        """Where the run of a source lies in an epoch: two headers, then four counts a block."""
        most = -(-MAX_SLOTS // self.world)
        stride = (HEADER_BLOCKS + -(-most // COUNTS_PER_BLOCK)) * BLOCK
        runs = -(-(ABORTS_AT + BLOCK * self.world) // 512) * 512
        blocks = HEADER_BLOCKS + -(-local_experts // COUNTS_PER_BLOCK)
        return self.words(runs + ((epoch & 1) * self.world + source) * stride, blocks * WORDS)

    def half(self, epoch: int) -> tuple[int, int]:
        """Address and bytes of the half of an epoch."""
        size = self.data_bytes // 2 // 512 * 512
        return self.data + (epoch & 1) * size, size

    def poison(self, epoch: int, byte: int = 0xFF) -> None:
        """Fills the half of an epoch with what is no row of anybody."""
        address, size = self.half(epoch)
        ctypes.memset(address, byte, size)

    def poisoned(self, epoch: int) -> bool:
        """Whether nothing has been written there since."""
        address, size = self.half(epoch)
        return ctypes.string_at(address, size) == b"\xff" * size

    def forge_abort(self, source: int, word: int, value: int) -> None:
        """The source has seen a timeout of itself in the last op, but for one word of the block."""
        block = [ABORT_MAGIC, self.epoch, TIMEOUT, source, source, 0, 0, ABORT_MAGIC]
        block[word] = value
        self.abort(source)[:] = block

    def forge_fail(self) -> None:
        """The last op of the rank has failed for good."""
        self.words(FAIL_AT, 3)[:] = [FAIL_MAGIC ^ self.epoch, self.epoch, TIMEOUT]

    @property
    def has_failed(self) -> bool:
        """Whether the fail block says so to the rank's next op, in whatever op that was."""
        magic, epoch, code = self.words(FAIL_AT, 3)
        return magic == FAIL_MAGIC ^ epoch and code == TIMEOUT

    @property
    def record(self) -> list[int]:
        """The first words of the error record: magic, code, op, epoch, rank, culprit."""
        return list(self.words(RECORD_AT, 6))

    def abort(self, source: int) -> ctypes.Array[ctypes.c_uint32]:
        return self.words(ABORTS_AT + BLOCK * source, WORDS)


def set_epoch(cluster: ascend_moe.LocalCluster, rank: int, epoch: int) -> None:
    """The rank's next op runs as the one after this epoch. All ranks do it before their first op."""
    with cluster.communicator(rank).use() as handle:
        library.lib().am_comm_set_epoch(handle, epoch)


def of_epoch(run: list[int], epoch: int) -> list[int]:
    """The same run as if written in another epoch."""
    moved = list(run)
    for block in range(len(run) // WORDS):
        moved[block * WORDS] = epoch if block else STATUS_MAGIC ^ epoch
        moved[block * WORDS + WORDS - 1] = epoch
    return moved
