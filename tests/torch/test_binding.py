"""The binding of the torch ops: which calls are prepared anew, what ends them, threads, processes, errors."""

from __future__ import annotations

import contextlib
import cProfile
import os
import pstats
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch_calls import EXPERTS, VARIANTS, Variant, overload, run

import ascend_moe
from ascend_moe import comm, settings
from ascend_moe.errors import (
    ArgumentError,
    AscendMoeError,
    CommClosed,
    ConfigMismatch,
    InvalidExpertId,
    LibraryError,
    PeerLost,
)
from ascend_moe.native import binding
from ascend_moe.ops import callbacks

PLAIN, PLAIN_V2 = VARIANTS[0], VARIANTS[1]
OP = overload(PLAIN.dispatch_name)


class Counted:
    """Calls within the block: those that were prepared before, and those that were prepared in it."""

    def __enter__(self) -> Counted:
        self._before = binding.counts()
        return self

    def __exit__(self, *_: object) -> None:
        after = binding.counts()
        self.known, self.prepared = after[0] - self._before[0], after[1] - self._before[1]


def dispatch(group_ep: str, world: int = 1, rank: int = 0) -> Any:
    args, kwargs = PLAIN.dispatch(rank, world, group_ep)
    return OP(*args, **kwargs)


def assert_calls(known: int, prepared: int, call: Callable[[], Any]) -> Any:
    with Counted() as calls:
        made = call()
    assert (calls.known, calls.prepared) == (known, prepared)
    return made


def warm(group_ep: str) -> None:
    """After this an equal dispatch is not prepared again."""
    dispatch(group_ep)
    assert_calls(1, 0, lambda: dispatch(group_ep))


# ---- which kernels


@pytest.mark.asan
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_equal_calls_are_prepared_once_and_give_the_same(variant: Variant, group_ep: str) -> None:
    with binding.prepare_always():
        slow = assert_calls(0, 2, lambda: run(variant, 0, 1, group_ep))
    run(variant, 0, 1, group_ep)
    profile = cProfile.Profile()
    fast = assert_calls(2, 0, lambda: profile.runcall(run, variant, 0, 1, group_ep))
    # Python's functions and C's: two calls of 130 to 145, and making the arguments.
    assert pstats.Stats(profile).total_calls <= 460  # type: ignore[attr-defined]
    for one, other in zip((*slow[0], slow[1]), (*fast[0], fast[1]), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert other.device.type == "cpu" and not other.requires_grad
    count = int(slow[0][4][-1])
    assert all(torch.equal(a[:count], b[:count]) for a, b in zip(slow[0][:3], fast[0][:3], strict=True))
    assert torch.equal(slow[1], fast[1])


def test_calls_that_differ_in_anything_are_planned_anew(group_ep: str) -> None:
    args, kwargs = PLAIN.dispatch(0, 1, group_ep)
    OP(*args, **kwargs)
    x, ids, *place = args
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x.float(), ids, *place), kwargs),
        ((x[:2], ids[:2], *place), kwargs),
        (args, {**kwargs, "quant_mode": 2}),
        (args, {**kwargs, "global_bs": 7}),
        (args, {**kwargs, "x_active_mask": torch.ones(len(x), dtype=torch.bool)}),
        (args, {**kwargs, "group_tp": "tp"}),
        ((x, ids, *place[:3], EXPERTS * 2), kwargs),
    ]
    for other_args, other_kwargs in others:
        with Counted() as calls:
            OP(*other_args, **other_kwargs)
            OP(*other_args, **other_kwargs)
            OP(*args, **kwargs)
        assert (calls.known, calls.prepared) == (2, 1)


# ---- errors


def test_a_call_that_was_forgotten_while_it_was_prepared_is_prepared_again(
    group_ep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that another thread closes meanwhile must not come back."""
    warm(group_ep)
    opened = callbacks._open

    def closed_meanwhile(*given: Any) -> None:
        binding.forget()
        opened(*given)

    with monkeypatch.context() as patch:
        patch.setattr(callbacks, "_open", closed_meanwhile)
        binding.forget()
        assert_calls(0, 1, lambda: dispatch(group_ep))
    assert_calls(0, 1, lambda: dispatch(group_ep))
    assert_calls(1, 0, lambda: dispatch(group_ep))


def both_ways(call: Callable[[], Any], kind: type[Exception]) -> None:
    """The same error from a remembered call, and from Python's path."""
    with pytest.raises(kind) as fast:
        call()
    with binding.prepare_always(), pytest.raises(kind) as slow:
        call()
    assert type(fast.value) is type(slow.value) and str(fast.value) == str(slow.value)
    assert getattr(fast.value, "details", None) == getattr(slow.value, "details", None)


@pytest.mark.asan
def test_an_error_that_a_kernel_finds_is_the_same(group_ep: str) -> None:
    warm(group_ep)
    (x, ids, *place), kwargs = PLAIN.dispatch(0, 1, group_ep)
    bad = ids.clone()
    bad[1, 1] = 99
    both_ways(lambda: OP(x, bad, *place, **kwargs), InvalidExpertId)
    warm(group_ep)  # that was not fatal


def test_a_disagreement_of_known_calls_is_reported_on_both_ranks() -> None:
    def each(rank: int, group_ep: str) -> None:
        args, kwargs = PLAIN.combine(rank, 2, group_ep, run(PLAIN, rank, 2, group_ep)[0])
        with Counted() as calls, pytest.raises(ConfigMismatch, match="must be the same on all ranks"):
            if rank:
                overload(PLAIN.combine_name)(*args, **kwargs)
            else:
                dispatch(group_ep, 2, rank)
        assert calls.prepared == 0
        run(PLAIN, rank, 2, group_ep)
        with pytest.raises(ArgumentError, match=f"this is rank {rank} of group"):
            dispatch(group_ep, 2, 1 - rank)  # a thread of one rank cannot be another

    with ascend_moe.LocalCluster(2) as cluster:
        cluster.run(each)


def test_a_fatal_error_marks_the_communicator() -> None:
    def each(rank: int, group_ep: str) -> None:
        run(PLAIN, rank, 2, group_ep)
        if rank:
            raise KeyError("this rank is lost")
        with Counted() as calls, pytest.raises(PeerLost) as first:
            dispatch(group_ep, 2, rank)
        assert calls.prepared == 0  # it was a known call
        assert comm.lookup(group_ep, 2, rank).failed is first.value
        for _ in range(2):
            with pytest.raises(PeerLost) as again:
                dispatch(group_ep, 2, rank)
            # A traceback grows with every raise: the object that is kept is not the one that is raised.
            assert again.value is not first.value and again.value.__cause__ is first.value
            assert (str(again.value), again.value.details) == (str(first.value), first.value.details)

    with ascend_moe.LocalCluster(2) as cluster, pytest.raises(KeyError, match="this rank is lost") as lost:
        cluster.run(each)
    assert not lost.value.others  # type: ignore[attr-defined]


def test_errors_of_the_place_are_the_same_after_a_good_call(group_ep: str) -> None:
    warm(group_ep)
    (x, ids, *_), _ = PLAIN.dispatch(0, 1, group_ep)
    for place in ((group_ep, 2, 0, EXPERTS), (group_ep, 1, 1, EXPERTS), ("nobody", 1, 0, EXPERTS)):
        both_ways(lambda place=place: OP(x, ids, *place), ArgumentError)  # type: ignore[misc]
    warm(group_ep)
    comm.lookup(group_ep, 1, 0).failed = ConfigMismatch("it failed", rank=0)
    both_ways(lambda: dispatch(group_ep), ConfigMismatch)


def test_a_variable_that_changes_takes_effect(group_ep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warm(group_ep)
    for name, good, bad in (
        ("ASCEND_MOE_AIV_CORES", "5", "0"),
        ("ASCEND_MOE_TIMEOUT_S", "9", "never"),
        ("ASCEND_MOE_COMM_ALG", "fullmesh", "pigeons"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(name, bad)
            both_ways(lambda: dispatch(group_ep), ArgumentError)
            changed.setenv(name, good)
            assert_calls(0, 1, lambda: dispatch(group_ep))
            assert_calls(1, 0, lambda: dispatch(group_ep))
        assert_calls(1, 0, lambda: dispatch(group_ep))


def test_every_variable_that_a_call_reads_is_watched(group_ep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    known = os.environ

    class Recording(dict[str, str]):
        def get(self, key: str, default: Any = None) -> Any:
            seen.add(key)
            return known.get(key, default)

        def __contains__(self, key: object) -> bool:
            seen.add(str(key))
            return key in known

        def __getitem__(self, key: str) -> str:
            seen.add(key)
            return known[key]

    warm(group_ep)
    with binding.prepare_always(), monkeypatch.context() as watched:
        watched.setattr(os, "environ", Recording())
        dispatch(group_ep)
    assert settings.CHECK_ROUTING.name in seen  # which every dispatch reads itself
    assert seen - {settings.CHECK_ROUTING.name} == set(callbacks.VARIABLES) - {
        "HCCL_EXEC_TIMEOUT"
    }  # read on an NPU alone


# ---- what calls mean may change


def test_a_group_that_is_destroyed_is_unknown_though_it_lives(group_ep: str) -> None:
    warm(group_ep)
    held = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(ArgumentError, match="names no live communicator"):
        dispatch(group_ep)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert ascend_moe.comm_name() == group_ep and dist.group.WORLD is not held
    assert_calls(0, 1, lambda: dispatch(group_ep))
    warm(group_ep)


# ---- threads, processes


@pytest.mark.tsan
def test_two_threads_take_turns_on_one_communicator() -> None:
    def many(group_ep: str) -> None:
        for _ in range(200):
            rows, y = run(PLAIN, 0, 1, group_ep)
            assert int(rows[4][-1]) == 6 and y.shape == (3, 32)

    with ascend_moe.LocalCluster(1) as cluster, ThreadPoolExecutor(2) as pool:
        cluster.run(lambda _, group_ep: run(PLAIN, 0, 1, group_ep))
        with Counted() as calls:
            for work in [pool.submit(many, cluster.name) for _ in range(2)]:
                work.result(timeout=60)
    assert calls.known + calls.prepared == 800 and calls.known >= 700


@pytest.mark.tsan
def test_closing_waits_for_a_launch_and_ends_the_others(group_ep: str) -> None:
    """Calls go on in another thread while the communicator is closed and opened again and again."""
    stop = threading.Event()

    def calls() -> int:
        done = 0
        while not stop.is_set():
            try:
                dispatch(group_ep)
                done += 1
            except CommClosed:  # between its look-up and its turn
                pass
        return done

    warm(group_ep)
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(calls)
        for _ in range(100):
            ascend_moe.close(group_ep)
        stop.set()
        assert work.result(timeout=60) > 0
    warm(group_ep)


def test_a_forked_child_has_nothing_of_its_parent(group_ep: str) -> None:
    warm(group_ep)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with ascend_moe.LocalCluster(1) as cluster:
                cluster.run(lambda _, name: warm(name))
            with Counted() as calls:
                with contextlib.suppress(AscendMoeError):
                    dispatch(group_ep)
            code = 0 if calls.known == 0 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    warm(group_ep)


# ---- the library


def test_a_broken_library_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / binding.LIBRARY_NAME
    broken.write_bytes(b"not a library")
    monkeypatch.setenv("ASCEND_MOE_LIBRARY", str(broken))
    with pytest.raises(LibraryError, match=r"cannot be loaded .*rebuild it with (make -C|cmake -S) "):
        binding.library.__wrapped__()
    monkeypatch.setattr(binding, "LIBRARY_NAME", "libnone.so")
    with pytest.raises(LibraryError, match=r"no libnone\.so in .*: build it with (make -C|cmake -S) "):
        binding.library_path()


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "installed_version", lambda package: "2.9.1+cpu")
    with pytest.raises(LibraryError, match=r"torch is 2\.9\.1\+cpu, the ops need 2\.10 or newer"):
        binding.library.__wrapped__()


WITHOUT = """
from pathlib import Path
is_file = Path.is_file
Path.is_file = lambda path: path.name != "libascend_moe_torch.so" and is_file(path)
import torch, ascend_moe
x, ids = torch.ones(2, 32).bfloat16(), torch.zeros(2, 1, dtype=torch.int32)
meta = ascend_moe.npu_moe_distribute_dispatch(x.to("meta"), ids.to("meta"), "g", 1, 0, 2)
print(tuple(meta[0].shape))
ascend_moe.npu_moe_distribute_dispatch(x, ids, "g", 1, 0, 2)
"""


def test_without_the_library_the_package_loads_and_the_ops_say_so() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "(2, 32)", done.stderr
    assert "LibraryError: no libascend_moe_torch.so in " in done.stderr


def test_it_belongs_to_no_python_and_no_torch() -> None:
    """It needs nothing of torch but the stable C interface, and nothing of Python."""
    path = binding.library_path()
    done = subprocess.run(["nm", "-DC", "--undefined-only", path], capture_output=True, text=True, check=True)
    names = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines()]
    assert any(name.startswith("aoti_torch_") for name in names)
    outside = [name for name in names if name.startswith(("at::", "c10::", "torch::", "Py", "_Py"))]
    assert not outside


# ---- errors by every way


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_errors_keep_their_classes_in_compiled_programs(backend: str, group_ep: str) -> None:
    (x, ids, *place), kwargs = PLAIN.dispatch(0, 1, group_ep)
    op = ascend_moe.npu_moe_distribute_dispatch
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=backend)
    def program(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = op(x, ids, *place, **kwargs)[0]
        return rows + 1

    program(x, ids)
    assert_calls(1, 0, lambda: program(x, ids))
    bad = torch.full_like(ids, EXPERTS)
    with pytest.raises(InvalidExpertId) as compiled:
        program(x, bad)
    with pytest.raises(InvalidExpertId) as eager:
        op(x, bad, *place, **kwargs)
    assert str(compiled.value) == str(eager.value)


def test_torch_alone_raises_the_same_text(group_ep: str) -> None:
    (x, ids, *place), kwargs = PLAIN.dispatch(0, 1, group_ep)
    raw, _ = torch._C._jit_get_operation(f"ascend_moe::{PLAIN.dispatch_name}")
    for wrong in (torch.full_like(ids, EXPERTS), ids[:, :0]):
        with pytest.raises(RuntimeError) as ours:
            OP(x, wrong, *place, **kwargs)
        with pytest.raises(RuntimeError) as theirs:
            raw(x, wrong, *place, **kwargs)
        assert isinstance(ours.value, AscendMoeError) and type(theirs.value) is RuntimeError
        assert str(theirs.value) == str(ours.value)


def test_an_interrupt_while_a_group_is_opened_arrives(group_ep: str) -> None:
    with mock.patch.object(comm, "lookup", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        dispatch(group_ep)
    warm(group_ep)
