"""One rank of `ascend-moe validate --bringup` on NPUs that do what every probe rules out; under torchrun."""

from __future__ import annotations

import functools
import sys

from ascend_moe import _text
from ascend_moe.cli import bringup as bringup_cli
from ascend_moe.validate.probes_kernel import Npu

if __name__ == "__main__":
    bringup_cli.Npu = functools.partial(Npu, broken=True)  # type: ignore[misc,assignment]
    bringup_cli.OP_PROBES = ()
    sys.exit(_text.run("validate", ["--bringup", "--device", "npu", "--json"]))
