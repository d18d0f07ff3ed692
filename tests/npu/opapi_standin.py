"""A libopapi.so whose every function does nothing and returns 0, built from the names torch_npu looks up."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

_OBJECTS = (
    "Tensor", "TensorList", "Scalar", "ScalarList", "IntArray", "BoolArray", "FloatArray", "AclOpExecutor"
)  # fmt: skip


def build(wheel: Path, folder: Path) -> Path:
    """Builds it into ``folder`` for the torch_npu in ``wheel``; returns the folder, for LD_LIBRARY_PATH."""
    text = (wheel / "lib" / "libtorch_npu.so").read_bytes()
    operators = {name.decode() for name in re.findall(rb"\0(aclnn[A-Z]\w+)(?=\0)", text)}
    operators = {name.removesuffix("GetWorkspaceSize") for name in operators}
    assert len(operators) > 500
    names = {f"acl{verb}{kind}" for verb in ("Create", "Destroy") for kind in _OBJECTS}
    names |= operators | {f"{name}GetWorkspaceSize" for name in operators}
    source = folder / "standin.c"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names)), "utf-8")
    command = [
        os.environ.get("CC", "cc"),
        "-shared",
        "-fPIC",
        "-O0",
        str(source),
        "-o",
        str(folder / "libopapi.so"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return folder
