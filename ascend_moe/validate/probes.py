"""Bring-up: one probe for each thing that dispatch and combine assume of hardware, HCCL and CANN.

Probes run in order; a later one stands on what the earlier ones have shown. docs/cluster.md says what each
failure means. On the CPU the twin is the device, so that the probes themselves are known to work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import settings
from .probes_kernel import CYCLES_PER_MICRO, DIFFERS, MISMATCH, PASSED, ROW_BYTES, TIMEOUT, Seen
from .run import Stopped

PASS, FAIL, SKIPPED = "PASS", "FAIL", "SKIPPED"
ROUNDS = 200
NEIGHBOUR_ROUNDS = 1000
ITEM_SIZES = 7  # moe::kProbeItemSizes
STRIDES = (14336, 14368, 14848)  # moe::ProbeStride
SPIN_S = 0.3  # that the cycle counter is compared with the host's clock over
CLOCK_TOLERANCE = 0.2


@dataclass(frozen=True)
class ProbeResult:
    """Holds the finding of one probe. ``detail``: what was seen, or why it was not run; ``figures``: for a verdict."""

    name: str
    assumption: str
    verdict: str
    detail: str
    figures: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.name}: {self.assumption}\n         {self.detail}"


Judged = tuple[str, str, dict[str, float]]  # verdict, detail, figures


class Skipped(Exception):
    """This device cannot run the probe; the text says why."""


@dataclass(frozen=True)
class Probe:
    """``run`` returns what it has seen; it raises AssertionError or an AscendMoeError where that is wrong.

    Some return figures by name behind it, which later launches go by.
    """

    name: str
    assumption: str
    run: Callable[[Any], str | tuple[str, dict[str, float]]]

    def skipped(self, why: str) -> ProbeResult:
        """The finding of a probe that is not run."""
        return ProbeResult(self.name, self.assumption, SKIPPED, f"not run: {why}")

    def on(self, device: Any) -> ProbeResult:
        """Runs it; whatever happens becomes a finding."""
        return ProbeResult(self.name, self.assumption, *self.verdict(device))

    def verdict(self, device: Any) -> Judged:
        """Verdict, detail and figures of a run."""
        try:
            seen = self.run(device)
            return (PASS, seen, {}) if isinstance(seen, str) else (PASS, *seen)
        except Skipped as why:
            return SKIPPED, f"not run: {why}", {}
        except (AssertionError, Stopped, RuntimeError) as error:  # AscendMoeError is one
            return FAIL, str(error.__cause__ or error).partition("\n")[0], {}


# ---- by the probe kernel ----


def _judge(found: Sequence[Seen]) -> None:
    """Raises about the first core that saw something wrong."""
    for seen in found:
        who = f"rank {seen.rank}, core {seen.core}"
        if seen.code == MISMATCH:
            names = ("address", "magic", "rank", "world", "peer table", "window KiB", "state KiB")
            field = names[seen.where] if seen.where < len(names) else f"field {seen.where}"
            raise AssertionError(f"{who}: the context's {field} is {seen.seen}, the host side says {seen.wanted}")
        if seen.code == TIMEOUT:
            raise AssertionError(f"{who}: nothing came from rank {seen.where} (round {seen.wanted})")
        if seen.code == DIFFERS:
            raise AssertionError(f"{who}: at {seen.where} is {seen.seen:#x}, not {seen.wanted:#x}")
        assert seen.code == PASSED, f"{who}: the kernel left no report ({seen.code:#x})"


def _launch(device: Any, mode: str, rounds: int = 1, cycles: int = 0) -> tuple[list[Seen], float]:
    found, seconds = device.launch(mode, rounds, cycles)
    _judge(found)
    return found, seconds


def _servers(device: Any) -> str:
    """No kernel runs: where this fails, a later probe would store to a rank that stores do not reach."""
    hosts, names = device.hosts, len(set(device.hosts))
    if device.layout == "a3":
        return f"{device.world} ranks on {names} host(s): on an A3 stores reach them all, within a supernode"
    share = device.near or device.world
    for rank, host in enumerate(hosts):
        first = rank // share * share
        assert host == hosts[first], (
            f"ranks {first} and {rank} are to share a server ({share} ranks do), but their host names are "
            f"{hosts[first]} and {host}: correct {settings.RANKS_PER_SERVER.name}, or give the containers of a "
            "server its host name"
        )
    machines = -(-device.world // share)
    detail = f"{share} ranks a server, {machines} server(s), {names} host name(s)"
    return detail if names == machines else f"{detail}; {settings.RANKS_PER_SERVER.name} goes before the names"


def _context(device: Any) -> str:
    found, _ = device.launch("context", 1, 0)
    for seen in found:
        assert seen.code != DIFFERS, (
            f"rank {seen.rank}, core {seen.core}: of rank {seen.where}'s window MTE2 finds another address in the "
            f"context than the scalar unit, {seen.seen:#x} and {seen.wanted:#x} in their lower halves"
        )
    _judge(found)
    return f"{device.layout} context: rank, world, window size and all windows agree on {len(found)} cores"


def _store(device: Any) -> str:
    found, _ = _launch(device, "store")
    share = device.near or device.world
    near = [min(share, device.world - rank // share * share) for rank in device.ranks]
    rows, sent = sum(seen.done for seen in found), sum(near)
    assert rows == sent, f"{rows} rows arrived, {sent} were sent"
    detail = f"twice a row of 16 KiB to {near[0]} ranks from each, read back over the link"
    if share < device.world:
        detail += f"; stores reach all ranks of a server: {settings.INTRA_NODE_STORES.name}=1 lets the ops use them"
    return detail


def _atomic(device: Any) -> str:
    _launch(device, "atomic", ROUNDS)
    return f"{ROUNDS} blocks a rank, never a word that was older"


def _order(device: Any) -> str:
    _launch(device, "order", ROUNDS)
    return f"{ROUNDS} rows of 16 KiB a rank, each complete when its flag was seen"


def _meeting(device: Any) -> tuple[str, dict[str, float]]:
    found, _ = _launch(device, "core barrier", ROUNDS)
    assert {seen.done for seen in found} == {ROUNDS}, "cores left the loop early"
    sync, blocks = (max(each) / ROUNDS / CYCLES_PER_MICRO for each in _meeting_cycles(found))
    faster = "syncall" if sync < blocks else "blocks"
    return (
        f"{ROUNDS} meetings of {device.cores} cores, every other by SyncAll; one takes {sync:.2f} us by SyncAll, "
        f"{blocks:.2f} us by blocks: {settings.CORE_BARRIER.name}={faster} is the faster",
        {"blocks": blocks, "syncall": sync},
    )


def _meeting_cycles(found: Sequence[Seen]) -> tuple[list[int], list[int]]:
    """Of each core: its cycles for ROUNDS meetings by SyncAll, and by blocks."""
    times = [seen.cycles for seen in found], [seen.where for seen in found]
    assert all(cycles > 0 for each in times for cycles in each), "a core counted no cycles"
    return times


def _writers(device: Any) -> str:
    found, _ = _launch(device, "writers", ROUNDS)
    assert {seen.done for seen in found} == {ROUNDS}, "cores left the loop early"
    return f"{ROUNDS} rounds of {device.cores} writers, half of them into the reader's window, half into the own"


def _neighbours(device: Any) -> str:
    _launch(device, "neighbours", NEIGHBOUR_ROUNDS)
    return f"{NEIGHBOUR_ROUNDS} rounds of two cores, pieces of 4, 12 and 20 bytes at odd offsets"


def _batch(device: Any) -> str:
    """A launch a round, as an op posts one list. Sizes and numbers of peers go by the round."""
    world = device.world
    if not (device.layout == "a2" and 0 < device.near < world):
        return "nothing to show: BatchWrite reaches no rank of this group"
    most = 0
    for number in range(1, ROUNDS + 1):
        found, _ = _launch(device, "batch", number)
        peers = 1 + (number - 1) // ITEM_SIZES % (world - 1)
        assert {seen.done for seen in found} == {peers}, f"round {number}: cores saw other than {peers} items"
        most = max(most, *(seen.where * ROW_BYTES for seen in found))
    return (
        f"{ROUNDS} rounds, items of up to {most >> 10} KiB to up to {world - 1} ranks, whole when their end was there"
    )


def _levels(device: Any) -> str:
    """A launch a round, as between two ops nobody waits; items grow by the round."""
    world, lanes = device.world, device.near
    if not (device.layout == "a2" and 1 < lanes < world and world % lanes == 0):
        return "nothing to show: this group has not several servers of equal numbers of ranks, and more than one"
    most = 0
    for number in range(1, ROUNDS + 1):
        found, _ = _launch(device, "levels", number)
        messages = {rank: sum(seen.done for seen in found if seen.rank == rank) for rank in device.ranks}
        due = 4 * (world - lanes)  # of items and of ranks of the own server, there and back
        assert all(seen.where for seen in found), "the window has no room for a row of each rank: take a larger one"
        assert set(messages.values()) == {due}, f"round {number}: {due} messages are due, ranks saw {messages}"
        most = max(most, *(seen.where for seen in found))
    return (
        f"{ROUNDS} trips between {world // lanes} servers of {lanes} ranks, items of up to {most * ROW_BYTES >> 10} "
        "KiB, there and back through the ranks of a lane; every row was there when its message was"
    )


def _stride(device: Any) -> str:
    found, _ = _launch(device, "stride")
    rows = {seen.where for seen in found}
    assert len(rows) == 1 and rows != {0}, f"cores moved {sorted(rows)} rows"
    assert all(min(seen.wanted, seen.seen, seen.cycles) > 0 for seen in found), "a core counted no cycles for a stride"
    moved = rows.pop() * STRIDES[0] * CYCLES_PER_MICRO / 1e3

    def speeds(odd: int) -> list[float]:
        """GB/s of the slowest core, by stride; stores are the even cores', loads the odd ones'."""
        cores = [(seen.wanted, seen.seen, seen.cycles) for seen in found if seen.core % 2 == odd]
        return [moved / max(max(cycles), 1) for cycles in zip(*cores, strict=True)]

    stores, loads = (" / ".join(f"{speed:.1f}" for speed in speeds(odd)) for odd in (0, 1))
    strides = " / ".join(map(str, STRIDES))
    return f"rows of {STRIDES[0]} bytes at strides {strides}: a core stores {stores} GB/s and loads {loads}"


def _cycles(device: Any) -> str:
    """Counted cycles over the host's time for them; of the quickest launches, with and without a spin."""

    def quickest(cycles: int) -> tuple[float, int]:
        tries = [_launch(device, "cycles", cycles=cycles) for _ in range(3)]
        return min((seconds, found[0].cycles) for found, seconds in tries)

    _launch(device, "cycles", cycles=1)  # the first launch loads the kernel
    empty, none = quickest(1)
    seconds, counted = quickest(int(SPIN_S * 1e6 * CYCLES_PER_MICRO))
    assert seconds > empty, f"{counted} cycles took no longer than {none}"
    rate = (counted - none) / (seconds - empty) / 1e6
    low, high = CYCLES_PER_MICRO * (1 - CLOCK_TOLERANCE), CYCLES_PER_MICRO * (1 + CLOCK_TOLERANCE)
    assert low <= rate <= high, f"{rate:.1f} cycles a microsecond, {CYCLES_PER_MICRO} are assumed"
    return f"{rate:.1f} a microsecond (assumed {CYCLES_PER_MICRO})"


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
    detail = f"{ROUNDS} rows a rank; a core loads {pull:.1f} GB/s from a peer and stores {push:.1f}"
    if pull < push / 2:
        detail += f": loads are slow, try {settings.COMM_ALG.name}=window"
    return detail


def _relay(device: Any) -> str:
    _launch(device, "relay", ROUNDS)
    return f"{ROUNDS} rows a rank, each complete for a core that another core told"


def _queue(device: Any) -> str:
    found, _ = _launch(device, "queue", ROUNDS)
    return f"{ROUNDS} fillings of two queues of 6 on {len(found)} cores"


# Goes before all others: after its failure none of them is run.
SERVERS = Probe("servers", "ranks that loads and stores are to reach have one host name", _servers)
KERNEL_PROBES = (
    Probe("context layout", "HCCL's context has rank, world and windows where the kernels read them", _context),
    Probe("peer store and read", "a store to a peer's window arrives, and can be read back from there", _store),
    Probe(
        "32-byte atomicity",
        "of an aligned block of 32 bytes no word is older than both its first and its last",
        _atomic,
    ),
    Probe("data before flag", "rows drained by PipeBarrier are there when a later flag is seen", _order),
    Probe("relay", "a core that another core has told sees what that one was told of", _relay),
    Probe("pull", "rows that a peer has written into its own memory are read as they are, not from stale lines", _pull),
    Probe("queues", "six event ids a pipe pair, and flags alone, order loads, sums and stores", _queue),
    Probe("core barrier", "after SyncAll, or the block of every core, all see each other's drained stores", _meeting),
    Probe(
        "writer-side relay",
        "what all cores have written before a meeting is there when one core's flag is, stored or pulled",
        _writers,
    ),
    Probe("neighbours", "two cores that write parts of one block of 32 bytes keep each other's", _neighbours),
    Probe("BatchWrite order", "an item of up to 64 MiB is whole when its last block is there", _batch),
    Probe(
        "two levels",
        "rows that came by RDMA are stored on, stored ones leave by RDMA, and their messages come last, every time",
        _levels,
    ),
    Probe("row stride", "rows at multiples of 32 bytes move as fast as at multiples of 512 (a figure)", _stride),
    Probe("cycle rate", "GetSystemCycle counts 50 a microsecond: deadlines are what they say", _cycles),
    Probe("zero-initialised state", "HCCL zeroes the state area when a communicator is made", _zero_state),
)


def summary(findings: Sequence[ProbeResult]) -> str:
    """The last line: skipped probes are not passed ones."""
    verdicts = [finding.verdict for finding in findings]
    parts = [f"{verdicts.count(PASS)} of {len(findings)} probes passed"]
    for verdict, word in ((FAIL, "failed"), (SKIPPED, "not run")):
        if verdict in verdicts:
            parts.append(f"{verdicts.count(verdict)} {word}")
    return ", ".join(parts)


def exit_code(findings: Sequence[ProbeResult]) -> int:
    """0: all passed. 1: one failed. 3: none failed, but some could not be run here."""
    if any(finding.verdict == FAIL for finding in findings):
        return 1
    return 0 if findings and all(finding.verdict == PASS for finding in findings) else 3
