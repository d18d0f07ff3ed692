"""Bring-up: one probe for each assumption of dispatch and combine about hardware, HCCL and CANN.

Probes run in order; later ones rely on the earlier ones. docs/cluster.md explains each failure. On the CPU the probes
run on the twin, which tests the probes themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import settings
from ..errors import CommTimeout, PeerLost
from .probes_kernel import CYCLES_PER_MICRO, DIFFERS, MISMATCH, PASSED, ROW_BYTES, TIMEOUT, Seen
from .run import Stopped

PASS, FAIL, SKIPPED, FAULT = "PASS", "FAIL", "SKIPPED", "FAULT"
MOST_TEXT = 8000  # characters of an error in a result
DEVICE_CODES = re.compile(r"\b507\d{3}\b")  # of CANN's runtime, such as 507015: an AI core stopped with an exception
ROUNDS = 200
NEIGHBOUR_ROUNDS = 1000
ITEM_SIZES = 7  # moe::kProbeItemSizes
STRIDES = (14336, 14368, 14848)  # moe::ProbeStride
SPIN_S = 0.3  # duration of the comparison of the cycle counter with the host's clock
CLOCK_TOLERANCE = 0.2


@dataclass(frozen=True)
class ProbeResult:
    """Result of one probe.

    ``detail``: what was observed, an error, or why it was not run; ``figures``: measured values by name; ``links``: how
    HCCL linked the ranks of a server, "" if there is no choice.
    """

    name: str
    assumption: str
    status: str  # PASS, FAIL, SKIPPED, FAULT
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    links: str = ""

    def __str__(self) -> str:
        """Two lines; of an error's text only the first."""
        return f"{self.status:<8} {self.name}: {self.assumption}\n         {self.detail.partition(chr(10))[0]}"


class Judged(NamedTuple):
    """Result of one rank; ``waited``: its op only waited for another rank. Other fields: as in `ProbeResult`."""

    status: str
    detail: str
    figures: Mapping[str, Any] = {}
    links: str = ""
    waited: bool = False


class Skipped(Exception):
    """Raised by a probe that this device cannot run; the text is the reason."""


@dataclass(frozen=True)
class Probe:
    """A test of one ``assumption``. ``run`` takes a device and returns text about what it observed.

    Some also return measured values by name. It raises AssertionError or AscendMoeError if the assumption is false.
    """

    name: str
    assumption: str
    run: Callable[[Any], str | tuple[str, dict[str, Any]]]

    def skipped(self, why: str) -> ProbeResult:
        """Return the result of a probe that is not run."""
        return ProbeResult(self.name, self.assumption, SKIPPED, f"not run: {why}")

    def on(self, device: Any) -> ProbeResult:
        """Run the probe and return its result, as `judge` does; exceptions become FAIL, FAULT or SKIPPED."""
        return ProbeResult(self.name, self.assumption, *self.judge(device)[:4])

    def judge(self, device: Any) -> Judged:
        """Run the probe and return this rank's result: FAULT for the device's error codes and unexpected exceptions."""
        try:
            seen = self.run(device)
            return Judged(PASS, seen) if isinstance(seen, str) else Judged(PASS, *seen)
        except Skipped as why:
            return Judged(SKIPPED, f"not run: {why}")
        except (AssertionError, Stopped, RuntimeError) as error:  # AscendMoeError is one
            cause = error.__cause__ or error
            text, waited = str(cause)[:MOST_TEXT], isinstance(cause, CommTimeout | PeerLost)
            return Judged(FAULT if DEVICE_CODES.search(text) else FAIL, text, waited=waited)
        except Exception as error:
            return Judged(FAULT, f"{type(error).__name__}: {error}"[:MOST_TEXT])


# ---- by the probe kernel ----


def _judge(found: Sequence[Seen]) -> None:
    """Raise AssertionError for the first core that reports a failure."""
    for seen in found:
        who = f"rank {seen.rank}, core {seen.core}"
        if seen.code == MISMATCH:
            names = ("address", "magic", "rank", "world", "peer table", "window KiB", "state KiB")
            field = names[seen.where] if seen.where < len(names) else f"field {seen.where}"
            raise AssertionError(f"{who}: the context's {field} is {seen.seen}, the host expects {seen.wanted}")
        if seen.code == TIMEOUT:
            raise AssertionError(f"{who}: nothing arrived from rank {seen.where} (round {seen.wanted})")
        if seen.code == DIFFERS:
            raise AssertionError(f"{who}: word {seen.where} is {seen.seen:#x}, expected {seen.wanted:#x}")
        assert seen.code == PASSED, f"{who}: the kernel wrote no report ({seen.code:#x})"


def _launch(device: Any, mode: str, rounds: int = 1, cycles: int = 0) -> tuple[list[Seen], float]:
    found, seconds = device.launch(mode, rounds, cycles)
    _judge(found)
    return found, seconds


def _servers(device: Any) -> str:
    """Compare host names without a kernel: if this fails, later probes would store to unreachable ranks."""
    hosts, names = device.hosts, len(set(device.hosts))
    if device.layout == "a3":
        return f"{device.world} ranks on {names} host(s): stores reach all ranks of an A3 supernode"
    share = device.ranks_per_server or device.world
    for rank, host in enumerate(hosts):
        first = rank // share * share
        assert host == hosts[first], (
            f"ranks {first} and {rank} should share a server ({share} ranks per server), but their host names are "
            f"{hosts[first]} and {host}: correct {settings.RANKS_PER_SERVER.name}, or give the containers of a "
            "server its host name"
        )
    machines = -(-device.world // share)
    detail = f"{share} ranks per server, {machines} server(s), {names} host name(s)"
    return (
        detail if names == machines else f"{detail}; {settings.RANKS_PER_SERVER.name} takes precedence over the names"
    )


def _context(device: Any) -> str:
    found, _ = device.launch("context", 1, 0)
    for seen in found:
        assert seen.code != DIFFERS, (
            f"rank {seen.rank}, core {seen.core}: MTE2 and the scalar unit read different addresses of rank "
            f"{seen.where}'s window in the context, {seen.seen:#x} and {seen.wanted:#x} in their lower 32 bits"
        )
    _judge(found)
    return f"{device.layout} context: rank, world, window size and all windows agree on {len(found)} cores"


def _store(device: Any) -> str:
    found, _ = _launch(device, "store")
    share = device.ranks_per_server or device.world
    reached = [min(share, device.world - rank // share * share) for rank in device.ranks]
    rows, sent = sum(seen.done for seen in found), sum(reached)
    assert rows == sent, f"{rows} rows arrived, {sent} were sent"
    detail = f"two rows of 16 KiB from each rank to {reached[0]} ranks, read back over the link"
    if share < device.world:
        detail += f"; stores reach all ranks of a server: {settings.INTRA_NODE_STORES.name}=1 lets the ops use them"
    return detail


def _atomic(device: Any) -> str:
    _launch(device, "atomic", ROUNDS)
    return f"{ROUNDS} blocks per rank, no torn block"


def _order(device: Any) -> str:
    _launch(device, "order", ROUNDS)
    return f"{ROUNDS} rows of 16 KiB per rank, each complete when its flag was seen"


def _core_barrier(device: Any) -> tuple[str, dict[str, float]]:
    found, _ = _launch(device, "core barrier", ROUNDS)
    assert {seen.done for seen in found} == {ROUNDS}, "cores left the loop early"
    cycles = [seen.cycles for seen in found], [seen.where for seen in found]
    assert all(count > 0 for each in cycles for count in each), "a core counted no cycles"
    sync, blocks = (max(each) / ROUNDS / CYCLES_PER_MICRO for each in cycles)
    faster = "syncall" if sync < blocks else "blocks"
    return (
        f"{ROUNDS} barriers of {device.cores} cores, every other by SyncAll; one takes {sync:.2f} us by SyncAll, "
        f"{blocks:.2f} us by blocks: {settings.CORE_BARRIER.name}={faster} is faster",
        {"blocks": blocks, "syncall": sync},
    )


def _writers(device: Any) -> str:
    found, _ = _launch(device, "writers", ROUNDS)
    assert {seen.done for seen in found} == {ROUNDS}, "cores left the loop early"
    return f"{ROUNDS} rounds of {device.cores} writers, half of them into the reader's window, half into their own"


def _neighbours(device: Any) -> str:
    _launch(device, "neighbours", NEIGHBOUR_ROUNDS)
    return f"{NEIGHBOUR_ROUNDS} rounds of two cores, pieces of 4, 12 and 20 bytes at odd offsets"


def _batch(device: Any) -> str:
    """Launch once per round, because an op posts one list. The round selects sizes and numbers of peers."""
    world = device.world
    if not (device.layout == "a2" and 0 < device.ranks_per_server < world):
        return "not applicable: BatchWrite reaches no rank of this group"
    most = 0
    for number in range(1, ROUNDS + 1):
        found, _ = _launch(device, "batch", number)
        peers = 1 + (number - 1) // ITEM_SIZES % (world - 1)
        assert {seen.done for seen in found} == {peers}, f"round {number}: cores saw other than {peers} items"
        most = max(most, *(seen.where * ROW_BYTES for seen in found))
    return f"{ROUNDS} rounds, items of up to {most >> 10} KiB to up to {world - 1} ranks, complete at their end block"


def _levels(device: Any) -> str:
    """Launch once per round, because ranks do not wait between two ops; items grow with the round."""
    world, share = device.world, device.ranks_per_server
    if not (device.layout == "a2" and 1 < share < world and world % share == 0):
        return "not applicable: it needs several servers with the same number of ranks, at least two"
    most = 0
    for number in range(1, ROUNDS + 1):
        found, _ = _launch(device, "levels", number)
        messages = {rank: sum(seen.done for seen in found if seen.rank == rank) for rank in device.ranks}
        due = 4 * (world - share)  # of items and of local ranks, in both directions
        assert all(seen.where for seen in found), "the window has no room for a row of each rank: use a larger one"
        assert set(messages.values()) == {due}, f"round {number}: expected {due} messages, ranks saw {messages}"
        most = max(most, *(seen.where for seen in found))
    return (
        f"{ROUNDS} round trips between {world // share} servers of {share} ranks, items of up to "
        f"{most * ROW_BYTES >> 10} KiB, relayed by ranks of one rail; every row arrived before its message"
    )


def _stride(device: Any) -> str:
    found, _ = _launch(device, "stride")
    rows = {seen.where for seen in found}
    assert len(rows) == 1 and rows != {0}, f"cores moved {sorted(rows)} rows"
    assert all(min(seen.wanted, seen.seen, seen.cycles) > 0 for seen in found), "a core counted no cycles for a stride"
    moved = rows.pop() * STRIDES[0] * CYCLES_PER_MICRO / 1e3

    def speeds(odd: int) -> list[float]:
        """GB/s of the slowest core, by stride; even cores store, odd cores load."""
        cores = [(seen.wanted, seen.seen, seen.cycles) for seen in found if seen.core % 2 == odd]
        return [moved / max(max(cycles), 1) for cycles in zip(*cores, strict=True)]

    stores, loads = (" / ".join(f"{speed:.1f}" for speed in speeds(odd)) for odd in (0, 1))
    strides = " / ".join(map(str, STRIDES))
    return f"rows of {STRIDES[0]} bytes at strides {strides}: a core stores {stores} GB/s and loads {loads}"


def _cycles(device: Any) -> str:
    """Compare the cycle counter with the host's clock, in the fastest launches with and without a spin."""

    def quickest(cycles: int) -> tuple[float, int]:
        tries = [_launch(device, "cycles", cycles=cycles) for _ in range(3)]
        return min((seconds, found[0].cycles) for found, seconds in tries)

    _launch(device, "cycles", cycles=1)  # the first launch loads the kernel
    empty, none = quickest(1)
    seconds, counted = quickest(int(SPIN_S * 1e6 * CYCLES_PER_MICRO))
    assert seconds > empty, f"{counted} cycles took no longer than {none}"
    rate = (counted - none) / (seconds - empty) / 1e6
    low, high = CYCLES_PER_MICRO * (1 - CLOCK_TOLERANCE), CYCLES_PER_MICRO * (1 + CLOCK_TOLERANCE)
    assert low <= rate <= high, f"{rate:.1f} cycles per microsecond, expected {CYCLES_PER_MICRO}"
    return f"{rate:.1f} per microsecond (expected {CYCLES_PER_MICRO})"


def _zero_state(device: Any) -> str:
    _launch(device, "zero")
    return f"the state area of {device.world} ranks is zero"


def _pull(device: Any) -> str:
    found, _ = _launch(device, "pull", ROUNDS)

    def speed(core: int) -> float:
        """GB/s of the slowest rank."""
        return min(
            seen.where * ROW_BYTES * CYCLES_PER_MICRO / max(seen.cycles, 1) / 1e3 for seen in found if seen.core == core
        )

    push, pull = speed(0), speed(1)
    detail = f"{ROUNDS} rows per rank; a core loads {pull:.1f} GB/s from a peer and stores {push:.1f}"
    if pull < push / 2:
        detail += f": loads are slow, try {settings.COMM_ALG.name}=window"
    return detail


def _relay(device: Any) -> str:
    _launch(device, "relay", ROUNDS)
    return f"{ROUNDS} rows per rank, each complete for a core notified by another core"


def _queue(device: Any) -> str:
    found, _ = _launch(device, "queue", ROUNDS)
    return f"{ROUNDS} rounds of two queues with 6 buffers on {len(found)} cores"


# Runs first: if it fails, no other probe is run.
SERVERS = Probe("servers", "ranks of one server, which use loads and stores, have one host name", _servers)
KERNEL_PROBES = (
    Probe("context layout", "HCCL's context contains rank, world and windows where the kernels read them", _context),
    Probe("peer store and read", "a store to a peer's window arrives and can be read back", _store),
    Probe(
        "32-byte atomicity",
        "in an aligned 32-byte block no word is older than both the first and the last",
        _atomic,
    ),
    Probe("data before flag", "rows stored before PipeBarrier have arrived when a later flag is seen", _order),
    Probe("relay", "a core notified by another core sees the rows that the other one was notified of", _relay),
    Probe("pull", "rows that a peer has written into its own memory are read without stale cache lines", _pull),
    Probe("queues", "six event ids per pipe pair order loads, sums and stores", _queue),
    Probe(
        "core barrier", "after SyncAll, or every core's block, all cores see each other's drained stores", _core_barrier
    ),
    Probe(
        "writer-side relay",
        "stores of all cores before a core barrier are visible after one core's flag, stored or pulled",
        _writers,
    ),
    Probe("neighbours", "two cores can write parts of one 32-byte block", _neighbours),
    Probe("BatchWrite order", "an item of up to 64 MiB is complete when its last block has arrived", _batch),
    Probe(
        "two levels",
        "rows are relayed from RDMA to stores and from stores to RDMA, and their messages arrive last",
        _levels,
    ),
    Probe("row stride", "rows aligned to 32 bytes move as fast as rows aligned to 512 (measured only)", _stride),
    Probe("cycle rate", "GetSystemCycle counts 50 per microsecond, so deadlines are correct", _cycles),
    Probe("zero-initialised state", "HCCL zeroes the state area when it creates a communicator", _zero_state),
)


def summary(results: Sequence[ProbeResult]) -> str:
    """Return a line with the numbers of probes that passed, failed, ended by a fault, and were not run."""
    statuses = [result.status for result in results]
    parts = [f"{statuses.count(PASS)} of {len(results)} probes passed"]
    parts += [
        f"{statuses.count(status)} {word}"
        for status, word in ((FAIL, "failed"), (FAULT, "ended by a fault"), (SKIPPED, "not run"))
        if status in statuses
    ]
    return ", ".join(parts)


def exit_code(results: Sequence[ProbeResult]) -> int:
    """Return 0 if all passed, 1 if some failed or ended by a fault, else 3 (some were not run)."""
    statuses = {result.status for result in results}
    return 1 if statuses & {FAIL, FAULT} else 0 if statuses == {PASS} else 3
