"""`ascend-moe doctor`: checks of this machine, as diagnostics with a reason and a fix."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..errors import AscendMoeError
from ..plan import Request, WindowFit, both, plan

OK, WARN, ERROR = "ok", "warn", "error"


@dataclass(frozen=True)
class Diagnostic:
    """Result of one check: level (OK, WARN or ERROR), topic, what was seen and, unless OK, why it matters and a fix."""

    level: str
    topic: str
    what: str
    why: str = ""
    fix: str = ""


#: Make a diagnostic of what needs no action, of what may fail under some conditions, of what cannot work.
fine, warn, error = (partial(Diagnostic, level) for level in (OK, WARN, ERROR))


def text(diagnostics: Sequence[Diagnostic]) -> str:
    """Format diagnostics and their counts as plain text, which can be pasted into an issue."""
    width = max(len(each.topic) for each in diagnostics)
    lines = []
    for each in diagnostics:
        lines.append(f"{each.level:<5}  {each.topic:<{width}}  {each.what}")
        reasons = [f"{name}: {words}" for name, words in (("why", each.why), ("fix", each.fix)) if words]
        lines += [f"{'':<{width + 9}}{words}" for words in reasons]
    errors, warnings, good = (sum(each.level == level for each in diagnostics) for level in (ERROR, WARN, OK))
    many = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    return "\n".join([*lines, "", f"{many}, {good} ok"])


# ---- the ranks: torchrun's variables, whether rank 0 answers, whether a call fits

CONNECT_S = 3.0


def group_diagnostics(address: str = "") -> Iterator[Diagnostic]:
    """Check torchrun's variables, and whether rank 0 answers at ``address`` (HOST:PORT; "": MASTER_ADDR and _PORT)."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    given = {name: os.environ[name] for name in (*names, "MASTER_ADDR") if os.environ.get(name)}
    for name in names:
        if name in given and not given[name].isdigit():
            why = "torch.distributed expects an integer"
            yield error(name, f"is {given[name]!r}", why, "start with torchrun")
            return
    if {"RANK", "WORLD_SIZE"} <= given.keys():
        rank, world = int(given["RANK"]), int(given["WORLD_SIZE"])
        if rank >= world:
            what = f"RANK={rank} of WORLD_SIZE={world}"
            yield error("ranks", what, "ranks count from 0", "start with torchrun")
            return
        yield fine("ranks", f"this is rank {rank} of {world}")
    if not address and {"MASTER_ADDR", "MASTER_PORT"} <= given.keys():
        address = f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
    if address:
        yield _reach(address, own=given.get("RANK") == "0")
    what = "use a dedicated process group for MoE ops: HCCL's collectives and CANN's MC2 ops"
    yield fine("communicator", f"{what} write into a group's windows too")


def _reach(address: str, own: bool) -> Diagnostic:
    topic, (host, _, port) = "rank 0", address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        what, why = f"{address!r} is not HOST:PORT", "rank 0's address must have a host and a port"
        return error(topic, what, why, "use an address like 10.0.0.1:29500")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return fine(topic, f"{address} answers")
    except socket.gaierror as problem:
        what, why = f"{host} has no address: {problem.strerror}", "this host cannot resolve rank 0's name"
        return error(topic, what, why, "use an IP address, or /etc/hosts")
    except ConnectionRefusedError:
        why = "no process listens there: rank 0 has not started, or has ended"
        if own:
            return fine(topic, f"no process listens on {address} yet; this rank will")
        return warn(topic, f"{address} refuses connections", why, "start rank 0 first, on that host and port")
    except OSError as problem:
        why = "a firewall, another network, or a host that is down"
        fix = f"open TCP port {port}, ping {host}, or set MASTER_ADDR to an address of the ranks' own network"
        return error(topic, f"{address} does not answer within {CONNECT_S:g} s ({problem})", why, fix)


def fits(request: Request) -> Iterator[Diagnostic]:
    """Check a configuration by `plan` against the operators' limits and, unless it is 0, the size ``window_mib``."""
    topic = "configuration"
    try:
        report = plan(request)
    except AscendMoeError as problem:
        what, why = str(problem).partition("\n")[0], "the configuration cannot be checked"
        yield error(topic, what, why, "correct the options")
        return
    fit = report.fit
    for violation in report.violations:
        fix = "stay within that limit" if fit is None else _export(fit) + _less_by_auto(request, fit)
        yield error(topic, violation.message, "the operators refuse it", fix)
    if fit is None or not fit.ok:
        return
    if fit.fallen_back:
        why = "direct is the faster algorithm (docs/performance.md)"
        yield warn(topic, f"HCCL_BUFFSIZE={fit.about()}", why, _export(fit))
        return
    peak = max(op.ub_peak for op in report.ops.values())
    window = [f"HCCL_BUFFSIZE={fit.about()}"] * bool(fit.mib)
    yield fine(topic, "fits: " + "; ".join([*window, fit.needs(), f"{peak} of {report.ub_bytes} bytes of UB"]))


def _export(fit: WindowFit) -> str:
    if not fit.least_mib:
        return f"use smaller batches: {fit.needs()}"
    best = f"export HCCL_BUFFSIZE={fit.best_mib} on all ranks"
    return best if fit.best_mib == fit.least_mib else f"{best}; the minimum is {fit.least_mib} ({both(fit.least)})"


def _less_by_auto(request: Request, fit: WindowFit) -> str:
    """Return a hint if comm_alg auto needs a smaller window than the algorithm asked for, else ""."""
    by_auto = plan(replace(request, comm_alg="auto")).fit
    if by_auto is None or not by_auto.least_mib or 0 < fit.least_mib <= by_auto.least_mib:
        return ""
    return f"; comm_alg auto needs only {by_auto.least_mib} ({both(by_auto.least)})"
