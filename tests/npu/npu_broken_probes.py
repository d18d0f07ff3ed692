"""One rank of `ascend-moe validate --bringup` on NPUs that do what every probe rules out; under torchrun."""

from __future__ import annotations

import functools
import sys

import commands

from ascend_moe.validate import bringup
from ascend_moe.validate.probes_kernel import Npu

if __name__ == "__main__":
    bringup.Npu = functools.partial(Npu, broken=True)  # type: ignore[misc,assignment]
    bringup.OP_PROBES = ()
    sys.exit(commands.run("validate", ["--bringup", "--device", "npu", "--json"]))
