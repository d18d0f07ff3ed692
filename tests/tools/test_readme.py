"""README: its code runs, what it shows is what is printed, what it names exists."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
import torch.distributed as dist

import ascend_moe
from ascend_moe import LocalCluster
from ascend_moe.errors import AscendMoeError

TREE = Path(__file__).resolve().parents[2]
README = TREE / "README.md"
pytestmark = pytest.mark.skipif(not README.is_file(), reason="not in a source tree")


def blocks(language: str = "") -> list[str]:
    """The fenced blocks of a language, in order."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in fences if name == language]


def shell_lines() -> list[str]:
    """Commands of the indented blocks, without comments, one a line."""
    lines = re.findall(r"^    (\S.*)", re.sub(r"^```.*?^```$", "", README.read_text(), flags=re.M | re.S), re.M)
    return [command.strip() for line in lines for command in line.partition(" #")[0].split("&&")]


def python(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"__name__": "__main__"})
    return out.getvalue()


def test_it_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 180


def test_the_quickstart_prints_what_is_shown() -> None:
    """It is also examples/quickstart.py."""
    code = blocks("python")[0]
    assert python(code) in blocks()
    source = (TREE / "examples" / "quickstart.py").read_text().partition("\n# Output:\n")[0]
    assert f"import torch{source.partition('import torch')[2].rstrip()}\n" == code


def test_moved_npu_code_runs(tmp_path: Path) -> None:
    before = (
        "import ascend_moe, torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "process_group = dist.group.WORLD\n"
    )
    after = "\nprint(group_name == ascend_moe.comm_name(), callable(torch_npu.npu_moe_distribute_dispatch_v2))"
    assert len(blocks("python")) == 2
    try:
        assert python(before + blocks("python")[1] + after) == "True True\n"
    finally:
        dist.destroy_process_group()


def dispatch(group: str, rank: int, hidden: int, batch: int, experts: int, topk: int) -> Any:
    x = torch.ones(batch, hidden, dtype=torch.bfloat16)
    ids = (torch.arange(batch * topk) % experts).view(batch, topk).int()
    return ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, group, 4, rank, experts)


SIZES = "H is 128 on rank 2 and 64 on rank 0"
FAILURES: list[Callable[[int, str], Any]] = [
    lambda rank, group: dispatch(group, rank, 128 if rank == 2 else 64, 4, 16, 2),
    lambda rank, group: None if rank == 3 else dispatch(group, rank, 64, 4, 16, 2),
]


def test_errors_are_those_that_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "1")
    said = []
    for rank_main in FAILURES:
        with pytest.raises(AscendMoeError) as raised, LocalCluster(4) as cluster:
            cluster.run(rank_main)
        # Any rank may be the first to find it.
        text = re.sub("found by rank [0-2]", "found by rank 0", str(raised.value))
        text = re.sub("H is .* rank 2 and .* rank [013]|H is .* rank [013] and .* rank 2", SIZES, text)
        text = re.sub(r"; the last calls of rank \d: \S+$", "", text)  # a file of that run
        said.append(f"{type(raised.value).__name__}: {text}")
    shown = next(block for block in blocks() if block.startswith("ConfigMismatch: "))
    assert " ".join(shown.split()) == " ".join(said)


def test_the_race_is_that_of_the_example() -> None:
    """test_examples.py runs it."""
    shown = next(block for block in blocks() if block.startswith("rank_race: "))
    assert " ".join(shown.split()) in (TREE / "examples" / "find_a_race" / "README.md").read_text()


def test_commands_exist() -> None:
    """Each command's help ends well, without its work: the longest takes minutes."""
    section = README.read_text().partition("## Commands")[2].partition("## ")[0]
    named = set(re.findall(r"`(?:ascend-moe )?([\w-]+)`", section))
    assert named == set(commands.cli.COMMANDS)
    for name in named:
        assert commands.said(name, "--help").code == 0


def test_shell_lines_name_what_is_there() -> None:
    """Files, make targets and variables, extras; links."""
    makefile, project = (TREE / "Makefile").read_text(), (TREE / "pyproject.toml").read_text()
    text = README.read_text()
    for line in [*shell_lines(), *re.findall("`(make [^`]*)`", text)]:
        for word in line.split()[1:] if line.startswith("make ") else ():
            if found := re.fullmatch(r"([a-z-]+)|([A-Z_]+)=.*", word):
                pattern = rf"^[a-z -]*\b{found[1]}\b[a-z -]*:" if found[1] else rf"^{found[2]} \?="
                assert re.search(pattern, makefile, re.M), line
    for extra in re.findall(r"`\[(\w+)\]`|'\.\[(\w+)\]'", text):
        assert re.search(rf"^{extra[0] or extra[1]} = \[", project, re.M), extra
    for path in re.findall(r"(?<![\w/.])(?:examples|tools|docs)/[\w/.]+\w", text):
        assert (TREE / path).exists(), path
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (TREE / link).exists(), link
    assert any(line.startswith("pip install torch ") for line in shell_lines())


def test_labels_of_the_picture_do_not_touch() -> None:
    """A step has its name on the left and the kernel's function on the right, 10 units of air between them."""
    picture = (TREE / "docs" / "dataflow.svg").read_text()
    steps = re.findall(
        r'<text x="9" y="22">(.*?)</text>\s*<text class="code end" x="(\d+)" y="22">(.*?)</text>', picture
    )
    size = re.search(r"\.code { font-size: (\d+)px", picture)
    assert len(steps) >= 7 and size
    for name, end, code in steps:
        left, right = 9 + 14 * 0.55 * len(name), int(end) - int(size[1]) * 0.61 * len(code)  # of DejaVu
        assert left + 10 <= right, (name, code)
    kernels = "".join(path.read_text() for path in (TREE / "op_kernel").rglob("*.h"))
    assert all(f" {code}(" in kernels for _, _, code in steps)


def test_measured_figures_are_those_of_the_page() -> None:
    """Columns of DeepSeek-V3 and of Qwen3 with 32 tokens, each of the two EPYCs' tables of whole runs."""
    runs = (TREE / "docs" / "performance.md").read_text().split("| than `gloo-a2a-tuned` |\n")[1:]
    columns = []
    for case in ("deepseek-v3, H 7168, BS 32", "qwen3-235b, H 4096, BS 32"):
        for run in runs:
            lines = run.partition(f"| {case} |")[2].splitlines()[1:3]
            direct, window = ([cell.strip() for cell in line.strip("| ").split("|")] for line in lines)
            assert (direct[0], window[0]) == ("direct", "window")
            columns.append([direct[1].split()[0], window[1].split()[0], *(cell.strip(" x") for cell in direct[-2:])])
    section = README.read_text().partition("| [measured]")[2].partition("\n\n")[0]
    assert len(runs) == 2
    assert [line.strip("| ").split(" | ")[1:] for line in section.splitlines()[2:]] == [
        list(row) for row in zip(*columns, strict=True)
    ]
