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
    """HOST_HEADERS is taken too. In the end a package is corrupted, which must be seen."""
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
