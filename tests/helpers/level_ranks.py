"""What a rank process does for the tests of hierarchy: layer after layer, compared with the reference."""

from __future__ import annotations

import ctypes
import signal

import op_runs
from failure_cases import here

from ascend_moe import comm
from ascend_moe.errors import AscendMoeError
from ascend_moe.reference.cases import Case, legal

CASE = legal(
    Case(world=4, local=2, topk=3, share=2, batches="unequal", cores=2, quant_mode=2, comm_quant_mode=2, seed=21)
)
_sums = CASE.combined(
    [CASE.expert_rows(r, d.expand_x, d.dynamic_scales, d.ep_recv_counts) for r, d in enumerate(CASE.dispatched())],
    CASE.dispatched(),
)


def layers(count: int) -> str:
    """Runs so many round trips, up to the first error."""
    place = here()
    for _ in range(count):
        outcome = op_runs.run_rank(CASE, place.rank, place.group_ep)
        if isinstance(outcome, AscendMoeError):
            raise outcome
        assert outcome.algorithms == ("hierarchy", "hierarchy")
        op_runs.check_combine(place.rank, outcome.result, _sums[place.rank])
    return "right"


PAGE = 4096
_sent: list[object] = []


def dispatch() -> str:
    """Runs a dispatch alone; combine() goes on from it."""
    place = here()
    _sent[:] = op_runs.dispatch(CASE, place.rank, place.group_ep)
    return "right"


def combine() -> str:
    place = here()
    rows = op_runs.expert_rows(CASE, place.rank, _sent)  # type: ignore[arg-type]
    result = op_runs.combine(CASE, place.rank, place.group_ep, rows, _sent)  # type: ignore[arg-type]
    op_runs.check_combine(place.rank, result, _sums[place.rank])
    return "right"


def halt_before_passing_on(op: str) -> None:
    """This process stands still for good at the first store by which it would pass on what level 1 has brought.

    In dispatch that of a message from its lane's other rank to the other rank of its server; in combine that of a sum
    of its own, before the sums for others leave. Their pages may be read only, and the thread that stores there waits.
    """
    place = here()
    end = comm.lookup(place.group_ep, CASE.world, place.rank)
    own, server, world = end.vote._bases[place.rank] + PAGE, place.rank // 2, CASE.world
    if op == "dispatch":
        neighbour, lane = place.rank ^ 1, (place.rank + 2) % world
        state = end.vote._bases[neighbour] + PAGE + end.data_bytes + end.lent_bytes  # on A2 it comes last
        runs = -(-(1024 + 32 * world) // 512) * 512
        stride = 32 * (2 + 2048 // world // 4)
        pages = [((state + runs + stride * (parity * world + lane)) // PAGE * PAGE, PAGE) for parity in (0, 1)]
    else:  # the region of its own server's sums
        half = end.data_bytes // 2 // 512 * 512
        region = half // (world + world // 2) // 512 * 512
        begins = [-(-(own + parity * half + (world + server) * region) // PAGE) * PAGE for parity in (0, 1)]
        pages = [(begin, region // PAGE * PAGE - PAGE) for begin in begins]
    library = ctypes.CDLL(None, use_errno=True)
    library.signal(signal.SIGSEGV, ctypes.cast(library.pause, ctypes.c_void_p))
    for begin, size in pages:
        assert library.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(size), 1) == 0, ctypes.get_errno()
