"""Positive control of `make asan`: the sanitized library must stop a process that errs on purpose.

    python tools/sanitizer_control.py LIBRARY      (under the environment of the sanitized tests)

The library exports ``am_sanitizer_control(int which)`` when it is built with ASCEND_MOE_SANITIZE: 0 does
nothing wrong, 1 reads past the end of a heap block, 2 overflows a signed int. Each has a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

CALL = (
    "import ctypes, sys; ctypes.CDLL(sys.argv[1]).am_sanitizer_control(int(sys.argv[2])); print('survived')"
)

# which -> what the sanitizer must say; None: it must stay silent.
EXPECTED = {0: None, 1: "AddressSanitizer: heap-buffer-overflow", 2: "runtime error: signed integer overflow"}


def problem(library: str, which: int, message: str | None) -> str | None:
    """Runs one control; what went wrong in words, or None."""
    run = subprocess.run(
        [sys.executable, "-c", CALL, library, str(which)], capture_output=True, text=True, timeout=120
    )
    if message is None:
        return None if run.returncode == 0 else f"a clean call failed:\n{run.stderr}"
    if run.returncode == 0 or "survived" in run.stdout:
        return f"the error went unnoticed (exit {run.returncode})"
    return None if message in run.stderr else f"no {message!r} in:\n{run.stderr}"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    failed = False
    for which, message in EXPECTED.items():
        found = problem(sys.argv[1], which, message)
        failed = failed or found is not None
        print(f"sanitizer control {which} ({message or 'clean'}): {found or 'ok'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
