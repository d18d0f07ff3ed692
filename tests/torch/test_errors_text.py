"""Checks what errors say and carry: one line, the class, the fields; whatever lies in an error record."""

from __future__ import annotations

import copy
import ctypes
import inspect
import pickle
import random
import threading
from types import SimpleNamespace

import failure_cases as cases
import pytest
from failure_cases import caught
from failure_windows import ABORT_MAGIC, State

import ascend_moe
from ascend_moe import errors
from ascend_moe.errors import ArgumentError, AscendMoeError, CommError
from ascend_moe.native import library
from ascend_moe.ops import calls
from ascend_moe.validate.run import DevicePlace

pytestmark = pytest.mark.asan

CLASSES = {
    1: "InvalidExpertId",
    2: "RoutingOverflow",
    3: "ArgumentError",
    4: "ArgumentError",
    5: "ConfigMismatch",
    6: "RoutingMismatch",
    16: "PeerLost",
    17: "CommTimeout",
    18: "CorruptStatus",
    19: "KernelFault",
    20: "KernelFault",
}
CODE, AWAITED_COUNT = 1, 16  # words of a record; source indices of awaited ranks follow


def error_of(record: list[int]) -> AscendMoeError:
    """The exception that Python makes of a record."""
    words = (ctypes.c_int32 * len(record))(*record)
    end = SimpleNamespace(rank=0, describe_peer=lambda rank: "process 1 is running (state S)")
    return calls.error_of(record[CODE], words, "", end)  # type: ignore[arg-type]


def record_of(code: int, **words: int) -> list[int]:
    record = [0] * library.lib().am_error_record_words()
    record[:3] = [0x4D4F4552, code, 1]
    for at, value in words.items():
        record[int(at.removeprefix("w"))] = value
    return record


# ---- records


def test_every_code_has_its_class_and_says_whether_it_is_fatal() -> None:
    for code, name in CLASSES.items():
        assert library.lib().am_error_name(code).decode() == name
        assert bool(library.lib().am_error_is_fatal(code)) == (code >= 16)
        error = error_of(record_of(code, w4=1, w5=2, w9=1))
        assert type(error) is getattr(errors, name)
        assert "\n" not in str(error) and len(str(error)) > 40
        assert code != 6 or str(error).endswith("as dispatch, and the ep_send_counts that it returned")
        assert isinstance(error, CommError) == (name in ("PeerLost", "CommTimeout", "CorruptStatus"))


def test_any_record_makes_one_line_and_fields() -> None:
    """Whatever numbers: no crash, no control character, nothing cut off."""
    rng = random.Random(7)
    extremes = [0, 1, -1, 2**31 - 1, -(2**31), 64, 255, 4096]
    for _ in range(1000):
        record = [rng.choice([*extremes, rng.randrange(-(2**31), 2**31)]) for _ in range(64)]
        record[CODE] = rng.choice([*CLASSES, rng.randrange(-(2**31), 2**31)])
        error = error_of(record)
        text = str(error)
        assert text.isprintable() and len(text) < 1100, text
        assert all(name.isidentifier() for name in error.details), error.details
        assert "rank" in error.details


@pytest.mark.parametrize(("missing", "listed"), [(1, 1), (15, 15), (63, 15)])
def test_timeout_lists_who_is_missing(missing: int, listed: int) -> None:
    record = record_of(17, w4=63, w5=0, w9=63, w16=missing)
    for i in range(listed):
        record[AWAITED_COUNT + 1 + 3 * i : AWAITED_COUNT + 4 + 3 * i] = [i, -1 - i, 2]
    text = str(error_of(record))
    assert text.startswith("dispatch: rank 0 did not arrive within 0.0 s (ASCEND_MOE_TIMEOUT_S), found by rank 63")
    assert all(f"rank {i} (last seen in combine, epoch {2**32 - 1 - i})" in text for i in range(listed))
    assert f" and {missing - listed} more" in text or missing == listed
    assert "the same ops in the same order?" in text


# ---- what travels between ranks


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (16, "PeerLost", ["rank 2 is lost", "close the communicator on all ranks"]),
        (17, "CommTimeout", ["rank 2 did not arrive within 7200.0 s (ASCEND_MOE_TIMEOUT_S)", "same order?"]),
        (18, "CorruptStatus", ["status run of rank 2 holds 0x77 in block 3", "writing into these windows?"]),
        (20, "KernelFault", ["rank 2 has failed with a kernel fault", "its own error says where"]),
    ],
)
def test_failure_found_by_another_rank(code: int, kind: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Met at the entry of an op: the cause, its reporter, and nothing about ranks that nobody waits for."""
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "7200")
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    barrier = threading.Barrier(3)

    def body(rank: int, group_ep: str) -> AscendMoeError | None:
        place = DevicePlace(group_ep, 3, rank)
        cases.dispatch(place)
        barrier.wait()
        state = State.of(cluster, rank)
        state.abort(1)[:] = [ABORT_MAGIC, state.epoch, code, 2, 1, 3, 0x77, ABORT_MAGIC]
        return caught(cases.dispatch, place).error

    with ascend_moe.LocalCluster(3) as cluster:
        for error in cluster.run(body):
            text = str(error)
            assert type(error).__name__ == kind and error is not None, repr(error)
            assert (error.rank, error.reporter) == (2, 1)
            assert "\n" not in text and "missing" not in text and all(word in text for word in words), text
            assert "found by rank 1 at epoch 2" in text or kind in ("CorruptStatus", "KernelFault")


# ---- exceptions as objects


def every_class() -> list[type[AscendMoeError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [kind for kind in found if issubclass(kind, AscendMoeError)]


def test_classes_have_the_bases_that_callers_catch() -> None:
    assert len(every_class()) >= 12
    assert all(kind.__doc__ and issubclass(kind, RuntimeError) for kind in every_class())
    assert issubclass(errors.ArgumentError, ValueError) and issubclass(errors.InvalidExpertId, ValueError)
    assert issubclass(errors.WindowTooSmall, errors.ArgumentError)
    assert issubclass(errors.LibraryError, ImportError)


@pytest.mark.parametrize("kind", every_class())
def test_errors_are_sent_to_another_process(kind: type[AscendMoeError]) -> None:
    error = kind("dispatch: rank 3 is lost", rank=3, argument="x")
    error.others = {1: ValueError("also")}
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind and str(again) == str(error)
        assert again.rank == 3 and again.argument == "x" and again.details == error.details
        assert [str(other) for other in again.others.values()] == ["also"]
    with pytest.raises(AttributeError, match=f"{kind.__name__} has no attribute 'culprit'"):
        _ = error.culprit


class Model:
    def call(self, x: int, scale: float = 2.0, *, unused: str = "") -> float:
        """Has the signature."""
        raise NotImplementedError


@errors.typed_methods
class _Base:
    def length(self, values: list[int]) -> int:
        return len(values)


class Derived(_Base):
    @errors.with_signature_of(Model.call)
    def call(self, x: int, scale: float) -> float:
        return x * scale

    @errors.with_signature_of(Model.call)
    def names(self, **given: object) -> list[str]:
        return sorted(given)


def test_a_method_with_the_signature_of_another_gets_what_it_names() -> None:
    made = Derived()
    assert (made.call(3), made.call(3, unused="y"), made.call(x=3, scale=0.5)) == (6.0, 6.0, 1.5)
    assert made.names(1) == ["scale", "unused", "x"]
    assert inspect.signature(Derived.call) == inspect.signature(Model.call)
    assert Derived.call.__doc__ == "Has the signature."
    with pytest.raises(TypeError, match=r"Derived\.call\(\) missing a required argument: 'x'"):
        made.call()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Derived\.call\(\) too many positional arguments"):
        made.call(1, 2.0, "y")  # type: ignore[call-arg, misc]
    with pytest.raises(TypeError, match=r"Derived\.call\(\) multiple values for argument 'x'"):
        made.call(1, x=2)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'scal'\. Did you mean 'scale'"):
        made.call(3, scal=1.0)  # type: ignore[call-arg]


def test_errors_of_a_private_base_name_the_class_of_the_object() -> None:
    with pytest.raises(ArgumentError, match=r"^Derived\.length cannot work with these arguments: object of type 'int'"):
        Derived().length(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Derived\.length\(\) got an unexpected keyword argument 'value'"):
        Derived().length(value=[])  # type: ignore[call-arg]
    assert Derived().length([1, 2]) == 2
