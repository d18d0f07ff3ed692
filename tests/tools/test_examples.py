"""Every example runs as its first lines say and prints what its end shows; ascend_moe.npu has its names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import commands
import pytest

from ascend_moe import npu
from ascend_moe.ops.registration import SCHEMAS, TORCH_NPU_SCHEMAS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
RUNS = [
    ("quickstart.py", []),
    ("moe_layer_torchrun.py", [*TORCHRUN, "4"]),
    ("vllm_ascend_style.py", []),
    ("vllm_pairs.py", []),
]
ON_NPU = ["npu_moe_layer.py"]  # test_npu_adapter.py runs these
INSIDE = ["megatron", "sglang"]  # frameworks, each with a program in examples/inside
ELSEWHERE = ["all_ways.py", "train_moe_lm.py"]  # a test below and test_train_example.py do

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="not in a source tree")


def run(name: str, launcher: list[str], cwd: Path) -> str:
    return commands.process([sys.executable, *launcher, str(EXAMPLES / name)], cwd).stdout


def pasted_output(name: str) -> str:
    """The comment at the end of the file, below "# Output:"."""
    lines = (EXAMPLES / name).read_text().partition("\n# Output:\n")[2].splitlines()
    assert lines and all(line.startswith("# ") for line in lines)
    return "".join(f"{line[2:]}\n" for line in lines)


@pytest.mark.parametrize(
    "name, launcher", [RUNS[0], *(pytest.param(*run, marks=pytest.mark.nightly) for run in RUNS[1:])]
)
def test_output_is_the_pasted_one(name: str, launcher: list[str], tmp_path: Path) -> None:
    assert run(name, launcher, tmp_path) == pasted_output(name)


@pytest.mark.nightly
@pytest.mark.parametrize("framework", INSIDE)
def test_a_framework_runs_over_this_package(framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(framework)
    monkeypatch.setenv("DEEP_USE_MODE", "ops")
    name = f"inside/in_{framework}.py"
    assert run(name, [*TORCHRUN, "2"], tmp_path) == pasted_output(name)


@pytest.mark.nightly
def test_every_interface_returns_the_layer_as_the_page_shows(tmp_path: Path) -> None:
    """But for the differences: their last bits depend on the CPU. The page shows the first lines of each rule."""
    page = (EXAMPLES.parent / "docs" / "frameworks.md").read_text()
    shown = re.findall(r"^(?:interface|\w.*  \d).*", page.partition("## All interfaces")[2], re.MULTILINE)
    printed = [line[:36] + line[56:] for line in run("all_ways.py", [], tmp_path).splitlines()]
    assert len(printed) == 22 and len(shown) > 4 and {line[:36] + line[56:] for line in shown} <= {*printed}


def test_every_example_is_run_and_listed() -> None:
    assert sorted(path.name for path in (EXAMPLES / "inside").glob("*.py")) == [f"in_{name}.py" for name in INSIDE]
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names == sorted([*(name for name, _ in RUNS), *ON_NPU, *ELSEWHERE])


def test_one_line_differs_from_npu_code() -> None:
    """The caller's half of the vllm-ascend example: its import and the group's name, nothing else of ours."""
    source = (EXAMPLES / "vllm_ascend_style.py").read_text()
    caller = source.partition("# ---- the model around it")[0]
    code = [line for line in caller.partition('"""\n\nfrom')[2].splitlines() if "ascend_moe" in line]
    assert code == [
        "import ascend_moe",
        "from ascend_moe import npu as torch_npu  # on an NPU: import torch_npu",
        "        self.moe_all_to_all_group_name = ascend_moe.comm_name(group)",
    ]


def test_npu_has_the_names_of_torch_npu() -> None:
    names = {name.partition(".")[0] for name in (*SCHEMAS, *TORCH_NPU_SCHEMAS)}
    assert set(npu.__all__) == {*names, "patch_torch_npu"}


@pytest.mark.nightly
def test_find_a_race_says_what_its_readme_shows(tmp_path: Path) -> None:
    shown = (EXAMPLES / "find_a_race" / "README.md").read_text().split("```\n")[1]
    assert run("find_a_race/find_a_race.py", [], tmp_path).strip() == shown.strip()


@pytest.mark.nightly
def test_a_run_of_the_notebook_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """`jupyter nbconvert --to notebook --execute --inplace` writes its outputs."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    stored = nbformat.read(EXAMPLES / "first_layer.ipynb", as_version=4)
    made = nbformat.read(EXAMPLES / "first_layer.ipynb", as_version=4)
    nbclient.NotebookClient(made, timeout=600, kernel_name="python3").execute(cwd=str(EXAMPLES))
    shown, printed = ([o.text for cell in each.cells for o in cell.get("outputs", []) if o.get("name") == "stdout"]
                      for each in (stored, made))  # fmt: skip
    assert printed[:-1] == shown[:-1] and any("missing pipe synchronisation" in text for text in shown)
    before, after = (float(text) for text in printed[-1].removeprefix("loss ").split(" -> "))
    assert after < 0.6 * before, "rounding may differ between machines; that it learns does not"
