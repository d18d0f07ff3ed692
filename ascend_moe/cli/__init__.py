"""The `ascend-moe` command: one module of this folder a command, read when it is asked for.

typer and rich come with the extra [cli]. This module imports neither before it knows that they are there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

#: name -> line in the help; module ascend_moe.cli.NAME (`-` as `_`) has its typer application as `app`
COMMANDS = {  # in the order of use
    "run": "Run a MoE layer over EP ranks of this machine on real text, and check every result.",
    "doctor": "Look at this machine: versions, variables, devices; every finding with its fix.",
    "plan": "What a configuration needs: window, HCCL_BUFFSIZE, UB, tiling, limits.",
    "validate": "Dispatch and combine against the reference, on whatever device is here.",
    "vllm-pairs": "Which parts of vLLM's modular kernel fit, and whether a pair computes what it should.",
    "bench": "Time dispatch and combine against torch.distributed, MPI and the machine's limit, in one run.",
    "predict": "Predict times on NPUs by a model; its errors.",
    "trace": "Where the time of dispatch and combine goes, measured or predicted.",
    "explore": "Look for races, missing synchronisation, hangs and wrong results, schedule after schedule.",
    "vnpu": "Run a command with torch_npu on a virtual NPU of this machine.",
    "standin": "Run code written for torch_npu on CPU tensors, without torch_npu.",
    "twin": "AscendC kernels of your own on the CPU.",
}
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
