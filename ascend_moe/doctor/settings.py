"""What doctor sees of environment variables: ours, HCCL's, torchrun's."""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Callable, Iterator

from ..comm.communicator import (
    CONTEXTS,
    DEFAULT_WINDOW_MIB,
    MIB,
    context_kind,
    ranks_per_server,
    timeout_s,
    window_lent_bytes,
)
from ..errors import AscendMoeError
from ..native import library
from ..ops.calls import comm_algorithm, core_count
from ..ops.npu_communicator import deadline_s
from ..plan import exported_mib
from .finding import Finding, error, fine, warn

OURS = {
    "ASCEND_MOE_AIV_CORES",
    "ASCEND_MOE_CACHE",
    "ASCEND_MOE_CHECKED_LIBRARY",
    "ASCEND_MOE_COMM_ALG",
    "ASCEND_MOE_CONTEXT",
    "ASCEND_MOE_ENGINE",
    "ASCEND_MOE_FORWARD",
    "ASCEND_MOE_ISA",
    "ASCEND_MOE_LENT_MIB",
    "ASCEND_MOE_LIBRARY",
    "ASCEND_MOE_NPU_LIBRARY",
    "ASCEND_MOE_RANKS_PER_SERVER",
    "ASCEND_MOE_SEED",
    "ASCEND_MOE_TIMEOUT_S",
    "ASCEND_MOE_TORCH_OPS",
    "ASCEND_MOE_VALIDATE_OUTCOME",
    "ASCEND_MOE_VNPU",
    "ASCEND_MOE_VNPU_DEVICES",
    "ASCEND_MOE_VNPU_LIBRARIES",
    "ASCEND_MOE_VNPU_REPORT",
    "ASCEND_MOE_VNPU_SOC",
}


def findings() -> Iterator[Finding]:
    """Everything about variables."""
    yield _checked(
        "HCCL_BUFFSIZE", lambda: f"{exported_mib(DEFAULT_WINDOW_MIB)} MiB a rank", "the same on all ranks"
    )
    yield _checked(
        "ASCEND_MOE_TIMEOUT_S", lambda: f"ops wait {timeout_s():g} s for a peer", "a number of seconds"
    )
    yield _checked(
        "ASCEND_MOE_AIV_CORES", lambda: f"{core_count()} AIV cores a launch on the twin", "1 to 64"
    )
    yield _checked("ASCEND_MOE_ENGINE", lambda: f"engine {library.engine_name()}", "one of the engines")
    if os.environ.get("ASCEND_MOE_RANKS_PER_SERVER", "").strip():
        yield _checked("ASCEND_MOE_RANKS_PER_SERVER", _servers, "0 to 64")
    if os.environ.get("ASCEND_MOE_COMM_ALG", "").strip():
        yield _checked("ASCEND_MOE_COMM_ALG", _algorithm, "a name that comm_alg takes")
    if os.environ.get("ASCEND_MOE_LENT_MIB", "").strip():
        yield _checked("ASCEND_MOE_LENT_MIB", _lent, "a whole number of MiB")
    if os.environ.get("ASCEND_MOE_CONTEXT", "").strip():
        yield _checked("ASCEND_MOE_CONTEXT", _context, f"one of {', '.join(CONTEXTS)}")
    yield from _unknown()
    yield from _hccl()
    yield from _timeouts()
    yield from _interfaces()


def _checked(name: str, say: Callable[[], str], rule: str) -> Finding:
    """A variable of ours: what it means, or what is wrong with it."""
    given = "" if os.environ.get(name, "").strip() else " (not set)"
    try:
        return fine(name, say() + given)
    except AscendMoeError as problem:
        return error(name, str(problem), "no op runs with it", f"unset {name}, or set it to {rule}")


def _servers() -> str:
    return f"{ranks_per_server()} ranks a server on the twin"


def _algorithm() -> str:
    name = comm_algorithm("")
    if library.lib().am_comm_algorithm(name.encode()) < 0:
        raise AscendMoeError(f"ASCEND_MOE_COMM_ALG={name} is none of the names that comm_alg takes")
    return f"ops without a comm_alg of their own run as {name!r}"


def _lent() -> str:
    return f"window_empty takes tensors from {window_lent_bytes(0) // MIB} MiB a rank on the twin"


def _context() -> str:
    return f"context {CONTEXTS[context_kind()]} on the twin"


def _unknown() -> Iterator[Finding]:
    for name in sorted(os.environ):
        if name.startswith("ASCEND_MOE_") and name not in OURS:
            near = difflib.get_close_matches(name, OURS, 1)
            fix = f"did you mean {near[0]}?" if near else f"unset it; known are {', '.join(sorted(OURS))}"
            yield warn(name, f"is {os.environ[name]!r}", "no part of this package reads it", fix)


def _hccl() -> Iterator[Finding]:
    mode = os.environ.get("HCCL_OP_EXPANSION_MODE", "")
    if mode.upper() == "AIV":
        yield warn(
            "HCCL_OP_EXPANSION_MODE",
            "is AIV",
            "on A3, collectives expanded on AIV cores and CANN's own MC2 operators have hung together "
            "(107020 after 320 s); ops of ours need all AIV cores at once too",
            "unset it, or set AI_CPU, where MoE ops run",
        )
    elif mode:
        yield fine("HCCL_OP_EXPANSION_MODE", mode)
    pcie, roce = (os.environ.get(f"HCCL_INTRA_{name}_ENABLE", "") for name in ("PCIE", "ROCE"))
    if pcie == "1" and roce == "0":
        yield fine("HCCL_INTRA_*", "select CANN's hierarchy on A2; ops of ours do not read them")
    elif pcie == "1" and roce == "1":
        why = "HCCL takes one of them for links inside a server"
        yield error("HCCL_INTRA_*", "PCIE and ROCE are both enabled", why, "set one of them to 0")


def _timeouts() -> Iterator[Finding]:
    for name in ("HCCL_EXEC_TIMEOUT", "HCCL_CONNECT_TIMEOUT"):
        given = os.environ.get(name, "").strip()
        if not given:
            continue
        if not given.isdigit():
            yield error(
                name, f"is {given!r}", "it is a whole number of seconds", f"unset {name}, or correct it"
            )
            continue
        seconds = int(given)
        if name == "HCCL_CONNECT_TIMEOUT" and seconds < 120:
            why = "ranks that compile or load weights come later than others; HCCL takes 120 to 7200 s"
            yield warn(name, f"is {seconds} s", why, f"export {name}=600")
            continue
        if name == "HCCL_EXEC_TIMEOUT":
            yield _exec_timeout(seconds)
        else:
            yield fine(name, f"{seconds} s")


def _exec_timeout(seconds: int) -> Finding:
    """HCCL stops an operator then; ours wait less long, so that they can say for whom."""
    name = "HCCL_EXEC_TIMEOUT"
    try:
        waits = deadline_s(first=True)
    except AscendMoeError:
        return fine(name, f"{seconds} s")
    if 0 < seconds <= waits:
        why = "the runtime stops an operator (507014) before it can say which rank it waits for"
        return warn(name, f"is {seconds} s", why, f"export {name}=1836 (its default), or at least 30")
    asked = os.environ.get("ASCEND_MOE_TIMEOUT_S", "").strip()
    if asked and waits < timeout_s():
        why = f"ops on NPUs wait {waits:g} s only, so that they end before HCCL stops them"
        return warn(
            name, f"is {seconds} s, ASCEND_MOE_TIMEOUT_S {asked}", why, f"raise {name}, or wait less long"
        )
    return fine(name, f"{seconds} s; ops on NPUs wait at most {waits:g} s")


def _interfaces() -> Iterator[Finding]:
    address = os.environ.get("HCCL_IF_IP", "").strip()
    if address:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            try:
                probe.bind((address, 0))
                yield fine("HCCL_IF_IP", address)
            except OSError:
                why = "HCCL listens there for the other ranks"
                fix = "set it to an address of this host's own (ip addr), or unset it"
                yield error("HCCL_IF_IP", f"{address} is no address of this host", why, fix)
    for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = os.environ.get(name, "").strip()
        if not wanted:
            continue
        here = [interface for _, interface in socket.if_nameindex()]
        if not any(_matches(interface, wanted) for interface in here):
            why = "the ranks find each other over it"
            fix = f"use one of {', '.join(here)}, or unset it"
            yield error(name, f"{wanted!r} matches no interface of this host", why, fix)
        else:
            yield fine(name, wanted)


def _matches(interface: str, wanted: str) -> bool:
    """HCCL's patterns: prefixes, ``=`` whole names, ``^`` what is left out."""
    leave_out = wanted.startswith("^")
    whole = wanted.removeprefix("^").startswith("=")
    names = wanted.lstrip("^=").split(",")
    hit = any(interface == name if whole else interface.startswith(name) for name in names)
    return hit != leave_out
