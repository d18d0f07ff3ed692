"""The `ascend-moe` command. typer and rich come with the extra [cli] and are imported only here."""

from __future__ import annotations

import sys

from ascend_moe import plain

_EXTRA = ("typer", "click", "rich")


def main() -> None:
    """Entry point; says what to install when typer or rich is missing and the command needs them."""
    if len(sys.argv) > 1 and sys.argv[1] in plain.COMMANDS:
        sys.exit(plain.run(sys.argv[1], sys.argv[2:]))
    try:
        from ascend_moe.cli_app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        sys.exit(f"ascend-moe needs {error.name}, which is not installed: pip install 'ascend_moe[cli]'")
    app()


if __name__ == "__main__":
    main()
