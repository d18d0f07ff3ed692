#!/usr/bin/env python3
"""Replacement for CANN's op_build that writes its files without running the ops' definitions.

    op_build LIBRARY OUT --compute_unit=SOC;SOC

The real one loads LIBRARY and asks the definitions in it. This one reads the ops, as tools/op_description.py prints
them, from the file that OPP_CHECK_OPS names, and wants LIBRARY only to be there. Entry points return 0.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TYPES = {"bf16": "bfloat16", "fp16": "float16", "float": "float32"}


def snake(op: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", op).lower()


def info(op: dict[str, Any]) -> Iterator[str]:
    """The lines of an op in aic-<soc>-ops-info.ini."""
    yield f"[{op['op']}]"
    for kind, part in (("input", "input_desc"), ("output", "output_desc")):
        for number, tensor in enumerate(op[part]):
            yield f"{kind}{number}.name={tensor['name']}"
            yield f"{kind}{number}.paramType={tensor['param_type']}"
            yield f"{kind}{number}.dtype={','.join(TYPES.get(kind, kind) for kind in tensor['type'])}"
            yield f"{kind}{number}.format={','.join(tensor['format'])}"
    if op["attr"]:
        yield f"attr.list={','.join(attribute['name'] for attribute in op['attr'])}"
    for attribute in op["attr"]:
        yield f"attr_{attribute['name']}.type={'str' if attribute['type'] == 'string' else attribute['type']}"
        yield f"attr_{attribute['name']}.value=all"
        yield f"attr_{attribute['name']}.paramType={attribute['param_type']}"
        if "default_value" in attribute:
            yield f"attr_{attribute['name']}.defaultValue={attribute['default_value']}"
    yield "dynamicShapeSupport.flag=true"
    yield f"opFile.value={snake(op['op'])}"
    yield f"opInterface.value={snake(op['op'])}"


def write(ops: list[dict[str, Any]], out: Path, socs: list[str], prefix: str) -> None:
    for soc in socs:
        lines = [line for op in ops for line in info(op)]
        (out / f"aic-{soc}-ops-info.ini").write_text("\n".join(lines) + "\n")
    for op in ops:
        names = [f"{prefix}{op['op']}{end}" for end in ("GetWorkspaceSize", "")]
        exported = 'extern "C" __attribute__((visibility("default"))) int '
        stem = f"{prefix}_{snake(op['op'])}"
        (out / f"{stem}.h").write_text("#pragma once\n" + "".join(f"{exported}{name}();\n" for name in names))
        (out / f"{stem}.cpp").write_text("".join(f"{exported}{name}() {{ return 0; }}\n" for name in names))
    (out / "op_proto.h").write_text("#pragma once\n" + "".join(f"// REG_OP({op['op']})\n" for op in ops))
    (out / "op_proto.cc").write_text('#include "op_proto.h"\n')


def main() -> int:
    library, out = Path(sys.argv[1]), Path(sys.argv[2])
    socs = next((word.partition("=")[2] for word in sys.argv[3:] if word.startswith("--compute_unit=")), "")
    if not library.is_file() or not socs:
        print(f"op_build: {library} is missing, or no --compute_unit in {sys.argv[1:]}", file=sys.stderr)
        return 1
    ops = json.loads(Path(os.environ["OPP_CHECK_OPS"]).read_text())
    write(ops, out, re.split("[;,]", socs), os.environ.get("OPS_PROJECT_NAME") or "aclnn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
