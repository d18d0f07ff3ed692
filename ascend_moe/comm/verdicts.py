"""Why windows could not be opened: finds the rank at fault and words the error."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ascend_moe.comm.communicator import MIB
from ascend_moe.comm.liveness import describe_process, listener_pid, process_stat
from ascend_moe.errors import CommTimeout, ConfigMismatch, PeerLost

if TYPE_CHECKING:
    from ascend_moe.comm.board import Post
    from ascend_moe.comm.link import Hello, Link
    from ascend_moe.comm.rendezvous import Opening

SILENT_S = 1.0  # a store that has not answered for so long, or half the deadline, is part of the report
FIX = "every rank of the group must make the same call"


def lost(opening: Opening, rank: int, seen: str) -> PeerLost:
    return PeerLost(
        f"rank {opening.rank}: opening the windows of group {opening.name!r}: rank {rank} is lost: {seen}; "
        f"see its log for why",
        rank=rank,
        phase="open",
    )


def judge_losses(opening: Opening) -> None:
    """Raises when a rank that has said hello will never complete."""
    for link in opening.linked():
        bye = link.bye
        culprit = bye.rank if bye and bye.rank != opening.rank else None
        if bye and culprit is not None and bye.kind == "PeerLost":
            raise lost(opening, culprit, f"rank {link.rank} has found out ({bye.text})")
        # It cannot come back for another attempt: what it waited for is what we would wait for.
        over = link.dead or opening.board.failed is not None
        if over and bye and culprit is not None and bye.kind == "CommTimeout":
            raise CommTimeout(
                f"rank {opening.rank}: opening the windows of group {opening.name!r}: rank {culprit} did not "
                f"arrive, rank {link.rank} has waited for it in vain; {FIX}",
                rank=culprit,
                ranks=[culprit],
                phase="open",
            )
        if link.dead:
            raise lost(opening, link.rank, f"process {link.pid} has ended")
        if link.closed and not bye and not link.done:
            raise lost(opening, link.rank, f"its connection broke, {describe_process(link.pid)}")


def store_lost(opening: Opening, error: Exception) -> PeerLost:
    rank = opening.host.rank
    host = "its host is not known" if rank is None else f"rank {rank} normally hosts it"
    reason = str(error).partition("\n")[0]
    return PeerLost(
        f"rank {opening.rank}: opening the windows of group {opening.name!r}: the store of the process group "
        f"has failed ({reason}); {host}; see the host's log for why",
        rank=rank,
        phase="open",
    )


def other_machine(opening: Opening, rank: int, post: Post) -> ConfigMismatch:
    ours, theirs = socket.gethostname(), post.host
    return ConfigMismatch(
        f"rank {opening.rank} on {ours} and rank {rank} on {theirs} cannot share the windows of group "
        f"{opening.name!r}: they need one machine (one boot, one network namespace); "
        f"across machines use ascend_moe.dispatchers",
        field="machine",
        rank=rank,
        ours=ours,
        theirs=theirs,
    )


def other_size(opening: Opening, hello: Hello) -> ConfigMismatch:
    if hello.data_bytes != opening.data_bytes:
        field, ours, theirs = "HCCL_BUFFSIZE", opening.data_bytes // MIB, hello.data_bytes // MIB
        unit, fix = " MiB", "export one value on every rank"
    elif hello.lent_bytes != opening.lent_bytes:
        field, ours, theirs = "ASCEND_MOE_LENT_MIB", opening.lent_bytes // MIB, hello.lent_bytes // MIB
        unit, fix = " MiB", "export one value on every rank"
    else:
        field, ours, theirs = "window layout", opening.total, hello.total
        unit, fix = " bytes", "install one version of ascend_moe on every rank"
    return ConfigMismatch(
        f"{field} differs in group {opening.name!r}: {ours}{unit} on rank {opening.rank}, "
        f"{theirs}{unit} on rank {hello.rank}: {fix}",
        field=field,
        rank=hello.rank,
        ours=ours,
        theirs=theirs,
    )


def timed_out(opening: Opening) -> CommTimeout:
    """Names whoever is missing: ranks that never came first, ranks that waited as we did last."""
    reports = []
    for rank in range(opening.world):
        if rank != opening.rank:
            blame, seen = _report(opening, rank)
            if seen:
                reports.append((blame, rank, f"rank {rank} {seen}"))
    # The store's silence hides who has called: then its host is at fault, when it can be told.
    silent = opening.board.silent_for()
    if opening.stalled:
        reports.append((4, -1, f"this rank itself did not run for {opening.stalled:.1f} s of that"))
    elif opening.absent() and silent > min(SILENT_S, opening.timeout / 2):
        host = opening.host.rank
        who = "" if host is None else f", hosted by rank {host}"
        pid = listener_pid(opening.host.port) if opening.host.port else 0
        state = f" ({describe_process(pid)})" if pid else ""
        silence = f"the group's store{who}{state} has not answered for {silent:.1f} s"
        reports.append((-1, -1 if host is None else host, silence))
    reports.sort()
    blamed = sorted({rank for blame, rank, _ in reports if blame < 3 and rank >= 0})
    missing = blamed or sorted(rank for _, rank, _ in reports if rank >= 0)
    first = next((rank for _, rank, _ in reports if rank >= 0), None)
    noun = "rank" if len(missing) == 1 else "ranks"
    return CommTimeout(
        f"rank {opening.rank}: opening the windows of group {opening.name!r}: {noun} "
        f"{', '.join(map(str, missing))} did not arrive within {opening.timeout:g} s (ASCEND_MOE_TIMEOUT_S): "
        f"{'; '.join(text for _, _, text in reports)}; {FIX}",
        rank=first,
        ranks=missing,
        phase="open",
    )


def _report(opening: Opening, rank: int) -> tuple[int, str]:
    """How much one rank is to blame (0 most, 3 least), and what is known of it; no words when it is fine."""
    link = opening.links[rank]
    if link is not None:
        return _report_link(opening, link)
    post = opening.board.posts.get(rank)
    if post is None:
        return 0, "has not called"
    process = describe_process(post.visible_pid)
    if post.nonce == opening.refused.get(rank):
        return 0, f"has not called since its last windows were closed, {process}"
    return 0, f"has not connected, {process}"


def _report_link(opening: Opening, link: Link) -> tuple[int, str]:
    if link.bye:
        about = "" if link.bye.rank is None else f" about rank {link.bye.rank}"
        return 3, f"gave up before with {link.bye.kind}{about}"
    if link.closed:
        return 3, "has opened windows with an earlier attempt and closed them"
    stat = process_stat(link.pid)
    if stat is not None and stat.state in "Tt":
        return 1, f"does not go on, {describe_process(link.pid)}"
    if opening.digest and link.ready != opening.digest:
        return 2, f"is not ready, {describe_process(link.pid)}"
    return 3, ""
