"""The mutants of op_kernel/common/mutant.h: what each is, how it shows, and who has it too.

`passes_fast_suite` is measured by `pytest -m mutants test_mutants_fast.py`: with the mutant in the kernels,
every test that runs them on the fast engine passes. There program order is execution order and there is no
data cache, so that a missing edge between two pipes changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# Finding classes, as the checked engine and explore mode name them.
SYNC = "missing pipe synchronisation"
HAZARD = "same-pipe hazard"
UNINITIALISED = "uninitialised UB read"
STALE = "stale scalar read"
UNFLUSHED = "unflushed scalar write"
SHARED_LINE = "cache line shared by two writers"
WRONG_HALF = "wrong part of a window"
CORES = "race between cores"
RANKS = "race between ranks"
HANG = "hang"
BOUNDS = "out of bounds"
RESULT = "wrong result"  # outputs differ from the reference
# Errors that no op should have raised: explore mode gives their names.
CORRUPT = "CorruptStatus"
MISMATCH = "RoutingMismatch"


@dataclass(frozen=True)
class MutantCase:
    """One mutant.

    Attributes:
        number: Value of ``ASCEND_MOE_MUTANT``.
        name: Enumerator in the header, in snake case and without its k.
        bug: What is wrong, in a line.
        finds: Classes of the finding that are right; the first is the one to expect.
        passes_fast_suite: Whether all tests on the fast engine pass.
        model: Whether the protocol model has a mutant of this name.
        where: Calls in which it shows: "quantised", "servers" (ranks reached by a copy agent), "direct" (that
            algorithm), "roles" (direct, some cores make lists), "once" (direct, owners read a
            row once for all their experts), "failing" (direct, a rank stops), "lent" (direct, rows in a lent
            area), or "" for any.
    """

    number: int
    name: str
    bug: str
    finds: tuple[str, ...]
    passes_fast_suite: bool
    model: bool = False
    where: str = ""


def _pipe(number: int, name: str, bug: str, *more: str, where: str = "") -> MutantCase:
    return MutantCase(number, name, bug, (SYNC, *more), True, where=where)


MUTANTS = [
    # one core: a pipe does not wait for another
    _pipe(1, "run_sent_before_written", "no S_MTE3 before a status run leaves"),
    _pipe(2, "run_rewritten_before_sent", "no MTE3_S before the run is filled for the next peer"),
    _pipe(3, "status_read_before_loaded", "no MTE2_S before the status words are judged", UNINITIALISED),
    _pipe(
        4, "row_sent_before_loaded", "no EnQue/DeQue between load and store of a token's row", UNINITIALISED
    ),
    _pipe(5, "scale_sent_before_written", "no S_MTE3 between a row's scale and its store", where="quantised"),
    _pipe(
        6, "scale_read_before_reduced", "no V_S before the maximum is read", UNINITIALISED, where="quantised"
    ),
    _pipe(7, "sum_stored_before_added", "no EnQue/DeQue between the sum and its store", UNINITIALISED),
    _pipe(8, "counts_added_before_loaded", "no MTE2_V before histograms are added", UNINITIALISED),
    _pipe(9, "placed_before_added", "no V_S before the totals are read", UNINITIALISED),
    _pipe(10, "segments_before_loaded", "no MTE2_S before kept counts become segments", UNINITIALISED),
    _pipe(11, "counts_rewritten_before_kept", "no MTE3_S before the counts of the next source"),
    # one pipe
    MutantCase(
        12, "added_before_weighted", "no PIPE_V between weighting a row and adding it", (HAZARD,), True
    ),
    MutantCase(
        13,
        "reduced_before_magnitude",
        "no PIPE_V between the absolute values and their maximum",
        (HAZARD,),
        True,
        where="quantised",
    ),
    # the data cache of the scalar unit
    MutantCase(
        14,
        "epoch_read_from_cache",
        "the epoch's line is not invalidated before the read",
        (STALE, HANG),
        True,
    ),
    MutantCase(15, "epoch_left_in_cache", "the epoch's line is not cleaned", (UNFLUSHED,), True),
    MutantCase(16, "totals_left_in_cache", "totals by SetValue, their line not cleaned", (UNFLUSHED,), True),
    MutantCase(
        17, "every_core_publishes", "all cores write the epoch", (SHARED_LINE, CORES, UNFLUSHED), True
    ),
    # the cores of a rank
    MutantCase(
        18,
        "no_sync_before_flags",
        "cores do not meet before the flags, the last one sends them all",
        (CORES, RANKS),
        True,
        model=True,
    ),
    MutantCase(
        19,
        "no_drain_before_flags",
        "cores meet by a flag of the scalar unit, which waits for no store",
        (CORES, RANKS, SYNC),
        True,
        model=True,
    ),
    MutantCase(
        20,
        "no_sync_after_wait",
        "combine: cores do not meet after the wait",
        (RANKS, CORES, RESULT),
        False,
        model=True,
    ),
    MutantCase(
        21,
        "wait_for_own_share_only",
        "dispatch: a core goes on when its own share of the sources is there",
        (CORES, RANKS, RESULT),
        False,
        model=True,
    ),
    MutantCase(
        22,
        "publish_epoch_too_early",
        "the last core publishes the epoch while others have yet to read it",
        (HANG, CORRUPT, WRONG_HALF, STALE, CORES),
        True,
        model=True,
    ),
    MutantCase(23, "slot_stride", "rounds of the verdict board are one block too close", (CORES,), False),
    MutantCase(
        24, "every_core_stores_totals", "all cores write the totals to the same place", (CORES,), True
    ),
    # the ranks
    MutantCase(
        25, "single_half", "rows of all epochs go to half 0", (RANKS, WRONG_HALF, RESULT), False, model=True
    ),
    MutantCase(
        26,
        "single_status_half",
        "status runs of all epochs go to half 0",
        (CORRUPT, WRONG_HALF, RANKS, HANG),
        False,
        model=True,
    ),
    MutantCase(
        27,
        "no_epoch",
        "any status run is taken for this epoch's",
        (RESULT, CORRUPT, MISMATCH, RANKS),
        False,
        model=True,
    ),
    MutantCase(
        28,
        "torn_run",
        "header 0 vouches for the blocks behind it",
        (CORRUPT, RESULT, RANKS),
        False,
        model=True,
    ),
    MutantCase(
        29,
        "skip_flag_when_zero_rows",
        "no status run to a peer that gets no rows",
        (HANG,),
        False,
        model=True,
    ),
    MutantCase(
        30,
        "skip_wait_when_zero_rows",
        "combine does not wait for ranks that return no rows",
        (RANKS, CORRUPT, WRONG_HALF, RESULT, HANG),
        False,
    ),
    MutantCase(
        31,
        "wrong_half_for_combine",
        "combine's rows use the half of the op before",
        (RANKS, WRONG_HALF, RESULT),
        False,
        model=True,
    ),
    MutantCase(
        32,
        "expand_idx_prefix",
        "positions one too high on every core but the first",
        (RESULT, CORES, MISMATCH),
        False,
    ),
    MutantCase(
        33,
        "flag_before_data",
        "combine: status runs leave before the rows",
        (RANKS, CORES, RESULT),
        False,
        model=True,
    ),
    # the transport to other servers: on one server, as in the fast suite's own tests, there is none
    MutantCase(
        35,
        "posted_before_staged",
        "items leave before the cores have met over what they staged",
        (RESULT, HANG),
        True,
        where="servers",
    ),
    MutantCase(
        36,
        "status_item_first",
        "two items a peer: the status run, then the rows",
        (RESULT,),
        True,
        where="servers",
    ),
    MutantCase(
        37,
        "rows_taken_from_start",
        "dispatch takes rows from the start of a region, not towards its end",
        (RESULT,),
        True,
        where="servers",
    ),
    # algorithm "direct": what the fast suite sees of these is what tests/test_direct*.py see
    MutantCase(
        38,
        "lists_still_leaving",
        "dispatch: no second meeting, runs leave while others store their lists",
        (CORES, RANKS, RESULT),
        False,
        model=True,
        where="direct",
    ),
    MutantCase(
        39, "other_half_filled", "rows and lists go to the other half", (WRONG_HALF,), False, where="direct"
    ),
    MutantCase(
        40,
        "fail_block_ignored",
        "cores other than 0 do not look at the fail block",
        (HANG,),
        False,
        where="failing",
    ),
    MutantCase(
        41,
        "no_first_meeting",
        "the cores do not meet over their histograms",
        (CORES, RANKS, RESULT, UNINITIALISED),
        False,
        model=True,
        where="direct",
    ),
    MutantCase(
        42,
        "rows_after_runs",
        "combine: rows are copied into the half after the meeting",
        (RANKS, CORES, RESULT),
        False,
        model=True,
        where="direct",
    ),
    MutantCase(
        43,
        "list_off_by_owner",
        "a list goes to the place of the next owner",
        (BOUNDS, RESULT, RANKS),
        False,
        where="direct",
    ),
    MutantCase(
        44,
        "lent_as_published",
        "rows in a lent area are looked for in the half",
        (RESULT,),
        False,
        where="lent",
    ),
    MutantCase(
        45,
        "follower_does_not_wait",
        "another core than 0 takes the runs as it finds them at its first look",
        (RANKS, RESULT, CORES),
        False,
        model=True,
        where="direct",
    ),
    _pipe(
        46, "list_read_before_loaded", "no MTE2_S before list entries are read", UNINITIALISED, where="direct"
    ),
    _pipe(47, "entry_sent_before_written", "no S_MTE3 before list entries leave", where="direct"),
    _pipe(48, "list_sent_before_selected", "no V_MTE3 before a list leaves", where="roles"),
    _pipe(49, "position_sent_before_written", "no V_MTE3 before positions leave", where="roles"),
    _pipe(
        50,
        "positions_turned_before_sent",
        "no MTE3_V before the table becomes that of the next positions",
        HAZARD,
        where="roles",
    ),
    _pipe(51, "triples_sent_before_written", "rows read once: no S_MTE3 before triples leave", where="once"),
]

# Wrong data in every run: a harness that does not report it cannot fail.
CANARY = MutantCase(34, "canary", "combine leaves out the row of k = 0", (RESULT,), False)

# Bugs that a protocol like CANN's can have, and what stands for them in this one.
CLASSIC = {
    "drop SyncAll before dispatch flags": "no_sync_before_flags",
    "drop SyncAll after combine wait": "no_sync_after_wait",
    "drop MTE3 drain before flags": "no_drain_before_flags",  # SyncAll drains: both go
    "single half": "single_half",
    "flags only, no parity or epoch": "no_epoch",
    "off-by-one slot stride": "slot_stride",  # window slots never touch: a region is more than its capacity
    "expandIdx prefix off by one": "expand_idx_prefix",
    "read counts before wait": "status_read_before_loaded",  # counts are in the run that is waited for
    "missing cache clean": "epoch_left_in_cache",
    "flag before counts (torn slot)": "torn_run",  # the writer's order is free: each block has its epoch
    "skip flags when count == 0": "skip_flag_when_zero_rows",
    "wrong half for combine": "wrong_half_for_combine",
    "reuse UB tensor before MTE3 done": "run_rewritten_before_sent",
    "wait on W instead of W*L slots": "wait_for_own_share_only",  # one run a source: its share is per core
}

# One of each kind, for every run of the suite.
QUICK = (
    "run_rewritten_before_sent",
    "added_before_weighted",
    "epoch_read_from_cache",
    "no_sync_before_flags",
    "every_core_stores_totals",
    "single_half",
)


def by_name(name: str) -> MutantCase:
    """The case of this name; KeyError when there is none."""
    return {case.name: case for case in [*MUTANTS, CANARY]}[name]


def numbers_in(header: Path) -> dict[str, int]:
    """Name (as in MutantCase) to number, of all enumerators with a number but kNone."""
    found = re.findall(r"^    k(\w+) = (\d+),", header.read_text(), re.MULTILINE)
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): int(number) for name, number in found if name != "None"
    }
