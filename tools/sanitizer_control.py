"""Positive control of `make asan` and `make tsan`: the library must stop a process that errs on purpose.

    python tools/sanitizer_control.py LIBRARY SANITIZERS      (under the environment of the sanitized tests)

SANITIZERS is what ASCEND_MOE_SANITIZE was when the library was built: ``address,undefined`` or ``thread``.
Such a library exports ``am_sanitizer_control(int which)``: 0 and 4 do nothing wrong, 1 reads past the end of
a heap block, 2 overflows a signed int, 3 is a data race between cores of two ranks. Each has a process of its
own.
"""

from __future__ import annotations

import subprocess
import sys

CALL = (
    "import ctypes, sys; found = ctypes.CDLL(sys.argv[1]).am_sanitizer_control(int(sys.argv[2]));"
    "print('survived', found)"
)

# By sanitizer: which -> what it must say; None: it must stay silent.
EXPECTED: dict[str, dict[int, str | None]] = {
    "address": {0: None, 1: "AddressSanitizer: heap-buffer-overflow"},
    "undefined": {0: None, 2: "runtime error: signed integer overflow"},
    "thread": {0: None, 3: "ThreadSanitizer: data race", 4: None},
}


def problem(library: str, which: int, message: str | None) -> str | None:
    """Run one control; return a description of the failure, or None."""
    run = subprocess.run([sys.executable, "-c", CALL, library, str(which)], capture_output=True, text=True, timeout=120)
    if message is None:
        clean = run.returncode == 0 and "survived 0" in run.stdout and "Sanitizer" not in run.stderr
        return None if clean else f"a clean call failed:\n{run.stdout}{run.stderr}"
    if run.returncode == 0 or "survived" in run.stdout:
        return f"the error went unnoticed (exit {run.returncode})"
    return None if message in run.stderr else f"no {message!r} in:\n{run.stderr}"


def main() -> int:
    if len(sys.argv) != 3 or not set(sys.argv[2].split(",")) <= set(EXPECTED):
        print(__doc__, file=sys.stderr)
        return 2
    expected = {which: message for name in sys.argv[2].split(",") for which, message in EXPECTED[name].items()}
    failed = False
    for which, message in sorted(expected.items()):
        found = problem(sys.argv[1], which, message)
        failed = failed or found is not None
        print(f"sanitizer control {which} ({message or 'clean'}): {found or 'ok'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
