"""The `ascend-moe` command: one module of this folder a command, read when it is asked for.

typer and rich come with the extra [cli]. This module imports neither before it knows that they are there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ascend_moe.cli.commands import COMMANDS

_EXTRA = ("typer", "click", "rich")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command of ``arguments``, sys.argv's when None; ends in SystemExit with its exit code."""
    try:
        root = importlib.import_module("ascend_moe.cli.root")
        root.app(args=_with_json(sys.argv[1:] if arguments is None else arguments), prog_name="ascend-moe")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        words = sys.argv[1:] if arguments is None else arguments
        command = next((word for word in words if word in COMMANDS), "")
        sys.exit(
            f"ascend-moe {command}".rstrip() + f" needs {error.name}, which is not installed: "
            "pip install 'ascend_moe[cli]'"
        )


def _with_json(words: Sequence[str]) -> list[str]:
    """`--json` without a value means `--json -`."""
    made = list(words)
    for at, word in reversed(list(enumerate(words))):
        following = words[at + 1] if at + 1 < len(words) else "--"
        if word == "--json" and words[0] not in ("vnpu", "standin") and following.startswith("-") and following != "-":
            made.insert(at + 1, "-")
    return made


if __name__ == "__main__":
    main()
