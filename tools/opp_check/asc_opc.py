#!/usr/bin/env python3
"""Stands in for CANN's kernel compiler driver: writes the two files of a binary, with no code in them.

    asc_opc KERNEL.py --main_func=F --input_param=PARAM.json --soc_version=S --output=DIR ...

What it was given must be there: the generated KERNEL.py, the source in BUILD_KERNEL_SRC, the headers that it includes.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any


def missing_header(source: Path) -> str:
    """Return the first quoted include of a kernel source that is neither beside it nor below op_kernel/, or "".

    CANN's own headers are known by name.
    """
    seen: set[Path] = set()
    todo = [source]
    while todo:
        file = todo.pop()
        seen.add(file)
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(), flags=re.MULTILINE):
            found = [path.resolve() for path in (file.parent / name, source.parent / name) if path.is_file()]
            if not found and not re.fullmatch(r"kernel_operator\.h|(lib|adv_api)/\S+", name):
                return f"{file.name}: {name}"
            todo += [path for path in found[:1] if path not in seen]
    return ""


def binary(param: dict[str, Any], soc: str) -> dict[str, Any]:
    """The description of a binary, as far as CANN's scripts read it."""
    node = param["op_list"][0]
    return {
        "binFileName": node["bin_filename"],
        "binFileSuffix": ".o",
        "coreType": "MIX_VECTOR_CORE" if "910" in soc else "AiCore",
        "supportInfo": {
            "implMode": "high_performance",
            "simplifiedKeyMode": 0,
            "optionalInputMode": "gen_placeholder",
            "opMode": "dynamic",
            "deterministic": "ignore",
            "staticKey": "0",
            **{part: node.get(part, []) for part in ("inputs", "outputs", "attrs")},
        },
    }


def main() -> int:
    options = dict(word[2:].partition("=")[::2] for word in sys.argv[2:] if word.startswith("--"))
    source = Path(os.environ.get("BUILD_KERNEL_SRC", ""))
    if not Path(sys.argv[1]).is_file() or not source.is_file():
        print(f"asc_opc: {sys.argv[1]} or the kernel's source {source} is missing")
        return 1
    missing = missing_header(source)
    if missing:
        print(f"asc_opc: {missing} is found nowhere")
        return 1
    made = binary(json.loads(Path(options["input_param"]).read_text()), options["soc_version"])
    out = Path(options["output"]) / made["binFileName"]
    out.with_suffix(".json").write_text(json.dumps(made, indent=2))
    out.with_suffix(".o").write_bytes(b"")
    return 0


if __name__ == "__main__":
    sys.exit(main())
