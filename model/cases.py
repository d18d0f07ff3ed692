"""The runs of the model. Every run that must pass has mutants beside it that must not."""

from __future__ import annotations

from dataclasses import dataclass

from constants import Shape

HANG, ROW, COUNTS = "hang", "a row of another op is read", "counts of another op are accepted"
KEPT = "counts of another op are read"
DATA, STATUS = "a row lands in a buffer in use", "a status block lands in a buffer in use"
EPOCHS, CORES = "cores of a rank are in different epochs", "cores of a rank leave with different status codes"
RANKS, WORD = "ranks do not agree on the error", "a status word that nobody can have written"
LIST = "a list of another op is read"
REGISTERED, COUNTED = "registered rows of another op are read", "places are counted before all cores have"
LEAVES = "a core leaves an op that core 0 continues"
SUMS_KEPT = "a core stores its sums of an op that has failed"
BLAME = "an error names a rank that is not to blame"
COMPLETED = "an op fails that another rank has completed"
STICKY = "a failed communicator is used again"

BEFORE_3 = 0xFFFFFFFD  # three ops across the wrap: 0xFFFFFFFE, 0xFFFFFFFF, 2


@dataclass(frozen=True)
class Mutant:
    """A removed rule; ``finds``: symptoms, one of which must occur."""

    name: str
    finds: tuple[str, ...]
    broken: str = ""  # a corrupted table instead of a macro


@dataclass(frozen=True)
class Case:
    """A run that must pass, and its mutants."""

    name: str
    shape: Shape
    macros: tuple[str, ...] = ()
    mutants: tuple[Mutant, ...] = ()
    full: bool = False  # only with --full
    depth: int = 100_000  # of the search, in steps
    model: str = "window.pml"


def three(world: int = 2, cores: int = 1, local_experts: int = 1) -> Shape:
    return Shape(world, cores, local_experts, epochs=3, before=BEFORE_3)


def two(world: int) -> Shape:
    return Shape(world, epochs=2, before=0xFFFFFFFE)


SENDING = (
    Mutant("no_drain_before_flags", (ROW,)),
    Mutant("flag_before_data", (ROW,)),
    Mutant("single_half", (DATA, ROW)),
    Mutant("single_status_half", (STATUS, WORD, HANG)),
    Mutant("skip_flag_when_zero_rows", (HANG,)),
    Mutant("wrong_half_for_combine", (DATA, ROW)),
)
JUDGING = (Mutant("torn_run", (COUNTS,)), Mutant("no_epoch", (COUNTS,)), Mutant("stale_epoch_accepted", (COUNTS,)))
TABLES = (
    Mutant("wrap_to_one", (DATA, STATUS, ROW, WORD), broken="wrap_to_one"),
    Mutant("stale_unknown_across_wrap", (WORD,), broken="stale_unknown_across_wrap"),
)
BARRIERS = (
    Mutant("no_sync_before_flags", (ROW,)),
    Mutant("no_sync_after_wait", (ROW, RANKS)),
    Mutant("wait_for_own_share_only", (ROW, KEPT)),
    Mutant("publish_epoch_too_early", (EPOCHS,)),
)
COLLECTIVE = (
    Mutant("publish_epoch_too_late", (ROW, COUNTS, RANKS, DATA, STATUS)),
    Mutant("error_without_status", (HANG,)),
    Mutant("leave_on_collective_error", (DATA, STATUS, RANKS, WORD)),
)
DEADLINE = (Mutant("sticky_abort_missing", (STICKY,)), Mutant("abort_kept_to_oneself", (HANG,)))
DEADLINE_2 = (*DEADLINE, Mutant("timeout_leaves_alone", (HANG,)), Mutant("no_sync_after_wait", (ROW, RANKS, CORES)))

DIRECT = (
    Mutant("no_first_barrier", (COUNTED,)),
    Mutant("follower_does_not_wait", (ROW, LIST)),
    Mutant("lists_still_leaving", (LIST, ROW)),
    Mutant("rows_after_runs", (ROW,)),
    Mutant("single_half", (ROW, LIST)),
)


def direct(
    name: str, cores: int, ops: int, macros: tuple[str, ...], mutants: tuple[Mutant, ...], *, full: bool = False
) -> Case:
    """A run of direct.pml, with two ranks, or three of one core each."""
    sizes = (f"W={4 - cores}", f"C={cores}", f"N={ops}")
    return Case(name, Shape(), (*sizes, *macros), mutants, full, model="direct.pml")


RELAYING = (
    Mutant("relays_after_its_own_wait", (HANG,)),
    Mutant("relayed_to_the_other_parity", (HANG,)),
    Mutant("relayed_message_not_awaited", (ROW,)),
    Mutant("messages_overtake_forwarded_rows", (ROW,)),
    Mutant("messages_before_rows", (ROW,)),
)
IN_PASSES = (Mutant("own_rows_not_awaited", (ROW,)), Mutant("own_message_overtakes_rows", (ROW,)))
OUT_EARLY = Mutant("single_half_of_windows_out", (HANG, ROW))
ASKING = (
    Mutant("nobody_is_asked", (BLAME,)),
    Mutant("first_wait_names_its_neighbour", (BLAME,)),
    Mutant("asked_rank_waits_on", (BLAME,)),
    Mutant("accused_waits_as_long", (BLAME,)),
)
HEEDING = (Mutant("abort_of_the_next_op_heeded", (COMPLETED,)), Mutant("abort_within_the_server", (HANG,)))


def hierarchy(name: str, ops: int, macros: tuple[str, ...], mutants: tuple[Mutant, ...], *, full: bool = False) -> Case:
    """A run of hierarchy.pml: two servers of two ranks."""
    shape = Shape(4, epochs=ops, before=BEFORE_3, per_server=2)
    return Case(f"hierarchy w4, {name}", shape, macros, mutants, full, depth=300_000, model="hierarchy.pml")


ALL_WHOLE = ("ALL_ROWS", "WHOLE_RUN", "FIFO")
NOT_COMPARED = (Mutant("config_not_compared", (RANKS,)),)
ONE_ROUND = Mutant("single_status_round", (CORES, RANKS))
REGISTERED_EARLY = (Mutant("registered_free_too_early", (REGISTERED,)),)
GIVING_UP = (
    Mutant("local_abort_flag_ignored", (HANG,)),
    Mutant("follower_decides", (LEAVES,)),
    Mutant("sums_not_heard", (SUMS_KEPT,)),
)
# V2's window combine: of DIRECT the mutants that change it.
RETURNING = (DIRECT[0], Mutant("follower_does_not_wait", (ROW,)), DIRECT[3], Mutant("single_half", (ROW,)))

CASES = [
    # W = 2, one core: every order of every 32 B block
    Case("w2 l1", Shape(), (), (*SENDING, *JUDGING)),
    Case("w2 l1 fifo", Shape(epochs=6), ("FIFO",), (SENDING[1], *TABLES)),
    Case("w2 l2", three(local_experts=2), ("WHOLE_RUN",), SENDING[:3]),
    Case("w2 l5, two count blocks", three(local_experts=5), ("FIFO",), (SENDING[1], JUDGING[0])),
    Case("w2 l1, rows by owner", Shape(per_owner=True), ("WHOLE_RUN",), (SENDING[4], SENDING[2])),
    Case("w2 l1, endless", Shape(epochs=0), ("WHOLE_RUN",), (*SENDING[2:4], JUDGING[2]), depth=3_000_000),
    # two cores a rank: two row slots, one a core, which stand for one local expert as well as for two
    Case("w2 c2", three(cores=2), ("WHOLE_RUN",), (*BARRIERS, SENDING[0])),
    Case("w2 c2 fifo", three(cores=2), ("FIFO", "ALL_ROWS"), (*BARRIERS, SENDING[0], SENDING[2]), full=True),
    # ops at odds and errors that travel
    Case("w2 mismatch", three(), ("MISMATCH",), NOT_COMPARED),
    Case("w2 collective", three(), ("COLLECTIVE", "FIFO"), COLLECTIVE),
    Case("w2 c2 collective", three(cores=2), ("COLLECTIVE", *ALL_WHOLE), (ONE_ROUND, *COLLECTIVE), full=True),
    # failures
    Case("w2 deadline of one", three(), ("DEADLINES=1",), DEADLINE),
    Case("w2 deadlines of all", three(), ("DEADLINES=2",), DEADLINE[:1]),
    Case("w2 stopped rank", three(), ("KILL", "FIFO"), DEADLINE[:1]),
    Case("w2 c2 deadline of one", three(cores=2), ("DEADLINES=1", *ALL_WHOLE), DEADLINE_2, full=True),
    # W = 3
    Case("w3 l1", three(3), ("WHOLE_RUN",), SENDING, full=True),
    Case("w3 l1 fifo, two ops", two(3), ("FIFO", "ALL_ROWS"), (SENDING[1], JUDGING[0]), full=True),
    Case("w3 l2", three(3, local_experts=2), ALL_WHOLE, SENDING[1:3], full=True),
    Case("w3 mismatch", three(3), ("MISMATCH", *ALL_WHOLE), NOT_COMPARED, full=True),
    Case("w3 collective, two ops", two(3), ("COLLECTIVE", *ALL_WHOLE), COLLECTIVE, full=True),
    Case("w3 deadline of one, two ops", two(3), ("DEADLINES=1", *ALL_WHOLE), DEADLINE, full=True),
    Case("w3 stopped rank, one op", Shape(3, epochs=1), ("KILL", *ALL_WHOLE), DEADLINE[:1], full=True),
    # algorithm "direct", mixed with "window" in any order
    direct("direct w2 c2", 2, 3, (), DIRECT),
    direct("direct w2 c2, roles", 2, 3, ("ROLES",), (DIRECT[2], DIRECT[4])),
    direct("direct w2 c2, registered rows", 2, 3, ("REGISTERED",), REGISTERED_EARLY),
    direct("direct w2 c2, giving up", 2, 3, ("GIVEUP",), GIVING_UP),
    direct("direct w2 c2, v2 window combine", 2, 3, ("SLOTS",), RETURNING),
    direct("direct w2 c2, v2 window combine giving up", 2, 3, ("SLOTS", "GIVEUP"), GIVING_UP, full=True),
    direct("direct w2 c2, four ops", 2, 4, (), DIRECT, full=True),
    direct("direct w3 c1", 1, 3, (), DIRECT[2:], full=True),
    # algorithm "hierarchy"
    hierarchy("three ops", 3, (), (*RELAYING, OUT_EARLY)),
    hierarchy("stopped rank", 2, ("KILL", "FINALIZE"), ASKING),
    hierarchy("deadline of one", 2, ("DEADLINES", "FINALIZE"), HEEDING),
    hierarchy("collective, one op", 1, ("COLLECTIVE", "FINALIZE"), (Mutant("error_stops_messages", (HANG,)),)),
    hierarchy("misread message", 2, ("ODD", "FINALIZE"), (Mutant("error_stops_forwarding", (ROW,)),)),
    hierarchy("passes", 2, ("PASSES",), IN_PASSES),
    hierarchy("misread in passes", 1, ("PASSES", "ODD"), (Mutant("error_stops_own_rows", (ROW,)),)),
    hierarchy("three ops, finalize", 3, ("FINALIZE",), RELAYING[:2], full=True),
]
