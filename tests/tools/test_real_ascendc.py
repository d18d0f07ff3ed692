"""Checks what `make real-ascendc` runs, and how it counts; its run needs CANN's sources, its controls are in itself."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from ascend_moe.explore import program
from ascend_moe.reference.cases import DTYPES, MASKS, QUANTS

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools/real_ascendc"))

import check


def test_the_matrix_has_every_mode_and_option() -> None:
    cases = [program.checked(case) for case in check.matrix()]
    modes = {(case.dtype, case.algorithm, case.quant, case.contract) for case in cases}
    assert modes == set(itertools.product(DTYPES, ("window", "direct"), QUANTS, (1, 2)))
    for name, has in check.FEATURES.items():
        having = {(case.dtype, case.algorithm) for case in cases if has(case)}
        expected = {"A2's context": {"window"}, "registered rows": {"direct"}}.get(name, {"window", "direct"})
        dtypes = set(DTYPES) - ({"fp32"} if name == "int8 return" else set())
        assert having == set(itertools.product(dtypes, expected)), name
    for contract in (1, 2):
        assert {case.mask for case in cases if case.contract == contract} == set(MASKS)
    on_a2 = {(case.dtype, case.quant, case.contract) for case in cases if case.servers}
    assert on_a2 == set(itertools.product(DTYPES, QUANTS, (1, 2)))


def test_every_control_still_changes_a_kernel() -> None:
    for control in check.CONTROLS:
        text = (check.ROOT / "op_kernel" / control.file).read_text()
        assert text.count(control.old) == 1 and control.new != control.old, control.name
