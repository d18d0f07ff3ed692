"""`make opp-check`: what it finds in a package, and, where CANN's sources are given, the check itself."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "opp_check"
sys.path.append(str(ROOT / "tools"))
sys.path.append(str(TOOL))

import asc_opc  # noqa: E402
import op_build  # noqa: E402
import op_description  # noqa: E402
import opp_check  # noqa: E402

OPS = op_description.describe(op_description.DESCRIPTION.read_text())


def test_both_trees_must_have_the_same_files_but_those_that_are_meant() -> None:
    template = {"version.info", "op_api/include/aclnn_<op>.h", "op_proto/inc/op_proto.h"}
    own = "op_impl/ai_core/tbe/ascend_moe_impl/dynamic/ascend_moe/common/base.h"
    ours = {"version.info", "op_api/include/aclnn_ascend_moe.h", "op_proto/inc/op_proto.h", own}
    assert not list(opp_check.compare(ours, template))
    rng = random.Random(5)
    for _ in range(40):
        less = rng.choice(sorted(template & ours))
        more = rng.choice(["install.bat", own.replace("dynamic/ascend_moe/", "dynamic/"), "op_api/include/sub/a.h"])
        assert list(opp_check.compare(ours - {less}, template)) == [f"{less} is in the template's package, not in ours"]
        assert list(opp_check.compare(ours | {more}, template)) == [f"{more} is in our package, not in the template's"]


def test_a_kernel_whose_header_is_missing_does_not_compile(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.cpp"
    kernel.write_text('#include "kernel_operator.h"\n#include "ascend_moe/common/a.h"\n')
    header = tmp_path / "ascend_moe/common/a.h"
    header.parent.mkdir(parents=True)
    header.write_text('#pragma once\n#include "b.h"\n#include <cstdint>\n')
    assert asc_opc.missing_header(kernel) == "a.h: b.h"
    (header.parent / "b.h").write_text('#pragma once\n#include "ascend_moe/common/a.h"\n')
    assert asc_opc.missing_header(kernel) == ""


def test_what_stands_for_op_build_writes_every_operator_for_every_soc(tmp_path: Path) -> None:
    op_build.write(OPS, tmp_path, ["ascend910b", "ascend910_93"], "aclnnInner")
    for soc in ("ascend910b", "ascend910_93"):
        text = (tmp_path / f"aic-{soc}-ops-info.ini").read_text()
        assert [line[1:-1] for line in text.splitlines() if line.startswith("[")] == [op["op"] for op in OPS]
        assert f"input0.dtype={','.join(['bfloat16', 'float16', 'float32'] * 2)}\n" in text
        assert "attr_ep_world_size.paramType=required\n" in text
    assert (tmp_path / "aclnnInner_ascend_moe_probe.cpp").is_file() and (tmp_path / "op_proto.cc").is_file()


def test_without_canns_sources_it_says_what_it_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-S", str(TOOL / "opp_check.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "give a checkout of CANN's asc-devkit" in done.stderr


# ---- with them


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif("ASC_DEVKIT" not in os.environ, reason="needs ASC_DEVKIT, a checkout of CANN's asc-devkit")
@pytest.mark.parametrize("socs", [opp_check.SOCS, *((soc,) for soc in opp_check.SOCS)], ids="-".join)
def test_the_package_is_one_of_the_standard_template(socs: tuple[str, ...], tmp_path: Path) -> None:
    """HOST_HEADERS is taken too. In the end a package is spoilt, which must be seen."""
    headers = os.environ.get("HOST_HEADERS")
    toolkit = opp_check.make_toolkit(tmp_path / "cann", Path(os.environ["ASC_DEVKIT"]), headers and Path(headers))
    assert opp_check.check(toolkit, tmp_path, socs) == []
    ops = [op["op"] for op in OPS]
    folder = tmp_path / "ours.tree"
    tbe = folder / "packages/vendors/ascend_moe/op_impl/ai_core/tbe"
    assert json.loads((tbe / f"config/{socs[0]}/aic-{socs[0]}-ops-info.json").read_text()).keys() == set(ops)
    (tbe / "ascend_moe_impl/dynamic/ascend_moe/common/base.h").unlink()
    next((tbe / f"kernel/{socs[-1]}").rglob("*.json")).unlink()
    wrong = list(opp_check.incomplete(folder, ops, socs))
    assert any(re.search(r"base\.h is not in the package", line) for line in wrong), wrong
    assert any("is listed and missing" in line for line in wrong)
