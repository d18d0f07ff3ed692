"""Checks of a process with torch_npu: functions that raise nothing when all is right."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


@contextmanager
def raises(pattern: str) -> Iterator[None]:
    """The block, or waiting for what it has started, raises a RuntimeError that matches."""
    try:
        yield
        torch.npu.synchronize()
    except RuntimeError as error:
        assert re.search(pattern, str(error)), f"{pattern!r} is not in {error}"
    else:
        raise AssertionError(f"nothing was raised; expected {pattern!r}")


def run_checks(names: Iterable[str] = (), to_the_first_failure: bool = False, **more: object) -> None:
    """Prints ``{check: "" or traceback}`` and ``more`` as the last line of this process."""
    found = {}
    for name in names or CHECKS:
        try:
            CHECKS[name]()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            if to_the_first_failure:
                break
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in more.items()}
    print(json.dumps({"found": found, **values}), flush=True)
