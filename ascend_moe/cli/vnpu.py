"""`ascend-moe vnpu`: a command on the virtual NPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .._text import Parser
from ..plan.soc import DEFAULT_SOC, SOCS
from ..vnpu.launch import launch
from ..vnpu.libraries import DEFAULT_DEVICES, MAX_DEVICES

_ABOUT = """Run a command with torch_npu on a virtual NPU: host memory and CPU cores in the place of devices.

  ascend-moe vnpu -- python script.py
  ascend-moe vnpu -- torchrun --nproc-per-node 4 script.py

For correctness only: it is not an NPU, and times measured on it mean nothing.
"""


def main(argv: Sequence[str]) -> int:
    """Does not return when the command starts. 2: wrong options, or no fit torch_npu for the command."""
    own, command = _split(argv)
    parser = Parser("vnpu", _ABOUT)
    parser.usage = "ascend-moe vnpu [options] -- COMMAND [ARGUMENT ...]"
    add = parser.add_argument
    add("--soc", default=DEFAULT_SOC, metavar="NAME", help=f"{', '.join(SOCS)}; default {DEFAULT_SOC}")
    add(
        "--devices",
        type=int,
        default=DEFAULT_DEVICES,
        metavar="N",
        help=f"1 to {MAX_DEVICES}, default {DEFAULT_DEVICES}",
    )
    add("--no-verify", action="store_true", help="do not compare torch_npu's files with its wheel's RECORD")
    add("-q", "--quiet", action="store_true", help="no line on stderr about what this is")
    options, rest = parser.parse_known_args(own)
    if rest and rest[0].startswith("-"):
        parser.error(f"no such option: {rest[0]} (the command's own options come after --)")
    command = [*rest, *command]
    if not command:
        parser.error("a command is needed: ascend-moe vnpu -- python script.py")
    launch(command, options.soc, options.devices, check=not options.no_verify, quiet=options.quiet)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the command after the first `--`."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
