"""Every Python block of every page runs as it stands; every public name and module stands in a page."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ascend_moe
from ascend_moe.checkpoint.config import MODEL_TYPES
from ascend_moe.checkpoint.keys import NEUTRAL

TREE = Path(__file__).resolve().parents[2]
PAGES = {page.name: page for page in [*sorted(TREE.glob("docs/*.md")), *sorted(TREE.glob("*.md"))]}
PAGES.pop("README.zh.md", None)  # test_translations.py: translated pages have the code of their sources
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.skipif(not (TREE / "docs").is_dir(), reason="not in a source tree")

# Tests of their own run these: test_frameworks_page, test_from_cuda, test_readme, test_debugging, ...
ELSEWHERE = [
    "debugging.md",
    "frameworks.md",
    "from_cuda.md",
    "README.md",
    "training.md",
    "operators.md",
    "zero_copy.md",
]
STANDIN = "from ascend_moe.standin import torch_npu as standin; standin.install()\n"
#: page -> what its blocks need around them: an NPU's names.
BEFORE = {"cluster.md": STANDIN}
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
COMPILED = ["foreign_kernels.md"]  # kernels for both engines: minutes in all


def blocks(page: str, language: str = "python") -> list[str]:
    return [text for name, text in FENCE.findall(PAGES[page].read_text()) if name == language]


def cases() -> list[object]:
    marks = {page: [pytest.mark.nightly] for page in COMPILED}
    return [
        pytest.param(page, number, id=f"{page}-{number}", marks=marks.get(page, []))
        for page in PAGES
        if page not in ELSEWHERE
        for number in range(len(blocks(page)))
    ]


@pytest.mark.parametrize(("page", "number"), cases())
def test_a_block_runs(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the kernels of examples/, without a name from another block; it prints what stands below, if that does."""
    for kernel in TREE.glob("examples/*/*.cpp"):
        shutil.copy(kernel, tmp_path)
    monkeypatch.chdir(tmp_path)
    block = blocks(page)[number]
    printed = in_a_process(BEFORE[page] + block) if page in BEFORE else here(block)
    below = PAGES[page].read_text().split(block, 1)[1]
    if below.startswith("```\n\n```\n"):
        # For how many tokens torch.topk chooses another of equal experts is the machine's; that it is 0 in bf16 is not.
        said, shown = (re.sub(r"\b[1-9]\d* of 400", "n of 400", text) for text in (printed, below.split("```\n")[2]))
        assert said == shown


def here(block: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(block, {"__name__": "__main__"})
    return out.getvalue()


def in_a_process(program: str) -> str:
    env = {**os.environ, **RANK}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_block_is_python_or_names_its_language() -> None:
    """No block hides from the test above: a page marks code of Python as python, and with nothing behind it."""
    for page in PAGES:
        for language, text in FENCE.findall(PAGES[page].read_text()):
            assert language in ("", "python", "sh"), (page, language)
            assert language or not re.search(r"^(from \S+ )?import \w+", text, re.MULTILINE), (page, text)
    assert all(blocks(page) for page in [*ELSEWHERE, *BEFORE, *COMPILED])


STARTS = r"ascend-moe|bash|export|git|make|pip|python|torchrun|\./\S+"
SHELL = re.compile(rf"^(?: {{4}})?((?:[A-Z_]+=\S* )*(?:{STARTS}) .*)", re.MULTILINE)


def test_a_command_can_be_copied() -> None:
    """What is said of a command stands behind a #, and no word of it is left out."""
    pages = [*PAGES.values(), *TREE.glob("[a-z]*/README.md"), *TREE.glob("examples/*/README.md")]
    lines = [(page, line) for page in pages for line in SHELL.findall(page.read_text())]
    assert len(lines) > 40
    assert not [line for line in lines if re.search(r" {2,}(?![-# ])|^[^#]*…", line[1])]


def in_code(text: str) -> str:
    """Returns what stands in blocks, indented lines and between backticks."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return "\n".join([*(block for _, block in FENCE.findall(text)), *spans])


@pytest.mark.parametrize("name", ascend_moe.__all__)
def test_every_public_name_stands_in_a_page(name: str) -> None:
    code = "\n".join(in_code(page.read_text()) for page in PAGES.values())
    # Words of plain English count as the name only behind the package's.
    pattern = rf"\bascend_moe\.{name}\b" if name.isalpha() and name.islower() else rf"\b{name}\b"
    assert re.search(pattern, code)


MODULES = ["checkpoint", "dispatchers", "errors", "experts", "fused", "npu", "permute", "placement", "reference"]
MODULES += ["foreign", "routing", "standin.torch_npu"]
MODULES += [f"interop.{name}" for name in ("deep_ep", "fused_moe", "megatron", "sglang", "vllm", "vllm_ascend")]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_for_users_stands_in_a_page(module: str) -> None:
    code = "\n".join(in_code(page.read_text()) for page in PAGES.values())
    parent, _, name = f"ascend_moe.{module}".rpartition(".")
    assert re.search(rf"\bascend_moe\.{re.escape(module)}\b|from {re.escape(parent)} import [^\n]*\b{name}\b", code)


def test_the_page_about_layers_names_what_the_modules_have() -> None:
    """The page names all of dispatchers and placement, and every router."""
    page = in_code(PAGES["layers.md"].read_text())
    from ascend_moe import dispatchers, placement, routing

    public = [name for name, value in vars(placement).items() if getattr(value, "__module__", "") == placement.__name__]
    wanted = [*public, *dispatchers.__all__, *(name for name in routing.__all__ if not name.startswith("npu_"))]
    losses = set(routing.__all__) & set(vars(routing.losses))
    left = [name for name in wanted if not re.search(rf"\b{name}\b", page) and not name.startswith("_")]
    assert set(left) <= losses | {"Balance", "Dispatched", "Dispatcher"}, left


def test_the_page_about_checkpoints_names_types_and_keys() -> None:
    spans = set(re.findall(r"`([^`\n]+)`", PAGES["checkpoints.md"].read_text()))
    assert set(MODEL_TYPES) | set(NEUTRAL) <= spans
