"""The `ascend-moe` command. typer and rich come with the extra [cli] and are imported only here."""

from __future__ import annotations

import sys

from ascend_moe import _text

_EXTRA = ("typer", "click", "rich")


def main() -> None:
    """Entry point; says what to install when typer or rich is missing and the command needs them."""
    if len(sys.argv) > 1 and sys.argv[1] in _text.COMMANDS:
        sys.exit(_text.run(sys.argv[1], sys.argv[2:]))
    try:
        from ascend_moe.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        sys.exit(_without(error.name))
    app()


def _without(package: str) -> str:
    """What is missing and for which commands, and those that work all the same."""
    wanted = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    lines = [
        f"ascend-moe {wanted}".rstrip() + f" needs {package}, which is not installed: "
        "pip install 'ascend_moe[cli]'",
        "These commands work without it; each has its own --help:",
        *_text.table([[name, about] for name, (_, about) in _text.COMMANDS.items()]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
