"""Runs on the virtual NPU with a libopapi that does nothing: what torch_npu's own C++ allocates, and ours.

torch_npu's C++ checks the arguments, allocates the outputs and calls aclnn, which does nothing here; the
outputs' sizes and dtypes are what is asked for.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from torch_npu_cases import INT32, Case, T, matrix
from torch_npu_child import answer
from torch_npu_contradictions import PROBES


def both(case: Case) -> dict[str, Any]:
    found = {"cpp": answer("npu", case, "npu:0"), "ours": answer("ascend_moe", case, "meta")}
    return {"op": case.op, "call": repr((case.args, case.kwargs)), "refuses": case.cpp, **found}


def first_call_decides() -> list[Any]:
    """Sizes of the expert tokens of calls with different expert_num, in a process that made others before."""
    found = []
    for experts in (9, 5, 12):
        kwargs = {"expert_num": experts, "expert_tokens_num_flag": True}
        case = Case("npu_moe_init_routing_v2", (T((7, 8)), T((7, 2), INT32)), kwargs)
        sides = both(case)
        found.append([sides[side]["outputs"][2][1] for side in ("cpp", "ours")])
    return found


def main(target: str) -> int:
    logging.disable(logging.CRITICAL)
    report = {
        "cases": [both(case) for case in matrix()],
        "probes": {name: both(case) for name, case in PROBES.items()},
        "first call": first_call_decides(),
    }
    Path(target).write_text(json.dumps(report), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
