"""Checks of environment variables: this package's, HCCL's and gloo's."""

from __future__ import annotations

import difflib
import functools
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from .. import settings
from ..errors import AscendMoeError
from ..native import library, probe_results
from ..native.plans import core_count, hccl_selects_hierarchy
from ..native.windows import (
    MIB,
    context_kind,
    deadline_s,
    ranks_per_server,
    timeout_s,
    window_data_bytes,
    window_registered_bytes,
)
from ..settings import Setting
from . import Diagnostic, error, fine, warn


def diagnostics() -> Iterator[Diagnostic]:
    """Check the environment variables of this package, HCCL and gloo; equal results are reported once."""
    yield from dict.fromkeys(_every())  # reports an invalid variable that others depend on once


def _every() -> Iterator[Diagnostic]:
    always: dict[Setting[Any], Callable[[], str]] = {
        settings.HCCL_BUFFSIZE: _window,
        settings.TIMEOUT_S: lambda: f"ops wait up to {timeout_s():g} s for a peer",
        settings.AIV_CORES: lambda: f"{core_count()} AIV cores per rank on the twin",
    }
    for setting, meaning in always.items():
        yield _checked(setting, meaning)
    yield _engine()
    meanings: dict[Setting[Any], Callable[[], str]] = {
        settings.RANKS_PER_SERVER: lambda: f"{ranks_per_server()} ranks per server, on the twin and on A2",
        settings.COMM_ALG: lambda: f"ops called without comm_alg use {settings.COMM_ALG.get()!r}",
        settings.PROVEN: _proven,
        settings.RDMA_FLAGS: lambda: (
            "512-byte blocks between A2 servers contain rows " + ("and a flag" if settings.RDMA_FLAGS.get() else "only")
        ),
        settings.CORE_BARRIER: lambda: f"the cores of a rank synchronize by {settings.CORE_BARRIER.get()}",
        settings.REGISTERED_MIB: lambda: (
            f"window_empty allocates from {window_registered_bytes(0) // MIB} MiB per rank on the twin"
        ),
        settings.SEED: lambda: f"the checked engine draws schedules from seed {settings.SEED.get()}",
        settings.CONTEXT: lambda: f"context {settings.CONTEXTS[context_kind()]} on the twin",
    }
    for setting in (each for group in settings.TABLE.values() for each in group):
        if setting.is_set() and setting not in always and setting is not settings.ENGINE:
            yield _checked(setting, meanings.get(setting, functools.partial(_value, setting)))
    yield from _unknown()
    yield from _hccl()
    yield from _timeouts()
    yield from _interfaces()


def _checked(setting: Setting[Any], meaning: Callable[[], str]) -> Diagnostic:
    """The meaning of a variable's value, or the rule that it, or another variable it depends on, breaks."""
    given = "" if setting.is_set() else " (not set)"
    try:
        return fine(setting.name, meaning() + given)
    except AscendMoeError as problem:
        setting = settings.setting_of(problem) or setting
        fix = f"unset {setting.name}, or set it to {setting.rule}"
        return error(setting.name, str(problem), "what reads it cannot use this value", fix)


def _window() -> str:
    window_data_bytes()  # raises if an A2 context leaves no room for data
    return f"{settings.HCCL_BUFFSIZE.get()} MiB per rank"


def _value(setting: Setting[Any]) -> str:
    value = setting.get()
    if setting is settings.CALLS and not (value.is_dir() and os.access(value, os.W_OK)):
        raise AscendMoeError(f"{setting.name}={value} must be {setting.rule}")
    return str(value)


def _proven() -> str:
    names = settings.PROVEN.get()
    auto = "direct" if probe_results.allows("direct", frozenset(names)) else "window"
    return f"{', '.join(names) or 'no probe'} of the bring-up are taken as passed: on NPUs comm_alg auto is {auto}"


def _engine() -> Diagnostic:
    world, name = os.environ.get("WORLD_SIZE", "").strip(), settings.ENGINE.name
    if settings.ENGINE.text() == "checked" and world.isdigit() and int(world) > 1:
        what, why = f"engine checked, in one of {world} processes", "its ranks are threads of one LocalCluster"
        return error(name, what, why, f"unset {name}, or run the ranks in one process with ascend_moe.LocalCluster")

    def meaning() -> str:
        threads = "; ranks must be threads of a LocalCluster" if library.engine_name() == "checked" else ""
        return f"engine {library.engine_name()}{threads}"

    return _checked(settings.ENGINE, meaning)


def _unknown() -> Iterator[Diagnostic]:
    known = settings.NAMES
    for name, value in settings.own_variables().items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            fix = f"did you mean {close[0]}?" if close else f"unset it; known variables: {', '.join(sorted(known))}"
            yield warn(name, f"is {value!r}", "this package does not read it", fix)


def _hccl() -> Iterator[Diagnostic]:
    mode = os.environ.get("HCCL_OP_EXPANSION_MODE", "")
    if mode.upper() == "AIV":
        why = "on A3, collectives expanded on AIV cores and CANN's own MC2 operators have deadlocked "
        why += "(107020 after 320 s); the ops of this package also need all AIV cores at once"
        yield warn("HCCL_OP_EXPANSION_MODE", "is AIV", why, "unset it, or set AI_CPU, in processes that run MoE ops")
    elif mode:
        yield fine("HCCL_OP_EXPANSION_MODE", mode)
    if hccl_selects_hierarchy():
        more = ": it needs V2 with expert_scales in dispatch; V1 is refused"
        if settings.COMM_ALG.is_set():
            more = f", but {settings.COMM_ALG.name}={settings.COMM_ALG.text()} overrides them"
        yield fine("HCCL_INTRA_*", f"select hierarchy between A2 servers where a call names no comm_alg{more}")
    elif settings.HCCL_INTRA_PCIE.text() == settings.HCCL_INTRA_ROCE.text() == "1":
        why = "HCCL uses one of them for links inside a server"
        yield error("HCCL_INTRA_*", "PCIE and ROCE are both enabled", why, "set one of them to 0")


def _timeouts() -> Iterator[Diagnostic]:
    for name in ("HCCL_EXEC_TIMEOUT", "HCCL_CONNECT_TIMEOUT"):
        given = os.environ.get(name, "").strip()
        if not given:
            continue
        if not given.isdigit():
            rule = "it must be an integer, in seconds"
            yield error(name, f"is {given!r}", rule, f"unset {name}, or correct it")
        elif name == "HCCL_EXEC_TIMEOUT":
            yield _exec_timeout(int(given))
        elif int(given) < 120:
            why = "ranks that compile or load weights connect later than others; HCCL accepts 120 to 7200 s"
            yield warn(name, f"is {int(given)} s", why, f"export {name}=600")
        else:
            yield fine(name, f"{int(given)} s")


def _exec_timeout(seconds: int) -> Diagnostic:
    """Check HCCL_EXEC_TIMEOUT, after which HCCL stops an operator, against the shorter timeout of our ops."""
    name = "HCCL_EXEC_TIMEOUT"
    try:
        waits = deadline_s(first=True)
    except AscendMoeError:
        return fine(name, f"{seconds} s")
    if 0 < seconds <= waits:
        why = "the runtime stops an operator (507014) before it can report which rank is missing"
        return warn(name, f"is {seconds} s", why, f"export {name}=1836 (its default), or at least 30")
    asked = settings.TIMEOUT_S.text()
    if asked and waits < timeout_s():
        what = f"is {seconds} s, {settings.TIMEOUT_S.name} {asked}"
        why = f"ops on NPUs wait only {waits:g} s, so that they end before HCCL stops them"
        return warn(name, what, why, f"raise {name}, or lower {settings.TIMEOUT_S.name}")
    return fine(name, f"{seconds} s; ops on NPUs wait at most {waits:g} s")


def _interfaces() -> Iterator[Diagnostic]:
    address = os.environ.get("HCCL_IF_IP", "").strip()
    if address:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            try:
                probe.bind((address, 0))
                yield fine("HCCL_IF_IP", address)
            except OSError:
                why = "HCCL listens on it for the other ranks"
                fix = "set it to an address of this host (ip addr), or unset it"
                yield error("HCCL_IF_IP", f"{address} is not an address of this host", why, fix)
    for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = os.environ.get(name, "").strip()
        if not wanted:
            continue
        here = [interface for _, interface in socket.if_nameindex()]
        # gloo takes whole names only.
        pattern = wanted if name.startswith("HCCL") else f"={wanted}"
        if not any(_matches(interface, pattern) for interface in here):
            why = "the ranks connect over it"
            fix = f"use one of {', '.join(here)}, or unset it"
            yield error(name, f"{wanted!r} matches no interface of this host", why, fix)
        else:
            yield fine(name, wanted)


def _matches(interface: str, wanted: str) -> bool:
    """Match HCCL's patterns: prefixes, ``=`` for whole names, ``^`` for names to exclude."""
    exclude = wanted.startswith("^")
    whole = wanted.removeprefix("^").startswith("=")
    names = wanted.lstrip("^=").split(",")
    hit = any(interface == name if whole else interface.startswith(name) for name in names)
    return hit != exclude
