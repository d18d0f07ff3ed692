"""Pages: blocks run and print what is shown; links, names, options, files, limits and generated tables are right."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
import typer
from rank_processes import printed_by

import ascend_moe
from ascend_moe import LocalCluster, errors, settings
from ascend_moe.cli import root
from ascend_moe.errors import AscendMoeError

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import pages_from_code
import translations

TREE = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (TREE / "docs").is_dir(), reason="not in a source tree")

#: name -> page, in English; all markdown files, of which only links and names are checked.
PAGES = {page.name: page for page in [TREE / "README.md", *sorted(TREE.glob("docs/*.md"))]}
ALL = [*sorted(TREE.glob("*.md")), *sorted(TREE.glob("docs/**/*.md"))]
ALL += [*sorted(TREE.glob("[a-z]*/README.md")), *sorted(TREE.glob("examples/**/README.md"))]
IN_ENGLISH = [page for page in ALL if "zh" not in page.as_posix() and page.name != "CHANGELOG.md"]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^ {4}((?:[A-Z_]+=\S+ )*(?:ascend-moe|python|torchrun) [^\n]*)\n\n```\n(.*?)^```$", re.M | re.S)
SAVED = re.compile(r"[Ss]ave it as `(\w+\.py)`[^`]*```python\n(.*?)^```$", re.M | re.S)


def text_of(page: str) -> str:
    return PAGES[page].read_text() if page in PAGES else ""


# ---- blocks and what is shown below them

#: Blocks that need names of a program around them: a pattern of the block -> what comes before it.
BEFORE = {
    r"\bprocess_group\)": "import torch.distributed as dist\ndist.init_process_group('gloo', store=dist.HashStore(), "
    "rank=0, world_size=1)\nprocess_group = dist.group.WORLD\n",
    r"torch\.npu\.set_device": "from ascend_moe.shim import torch_npu as shim; shim.install()\n",
}
LAUNCH: dict[str, list[str]] = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
OF_A_PROCESS = re.compile(r"init_process_group|\.install\(\)|process_group\)|import torch_npu")
ON_GPUS = re.compile(r"^\.\.\.$", re.MULTILINE)
#: What differs from run to run: who finds it first, the group, the time, the file, tokens that torch.topk chooses.
OF_A_RUN = [
    (r"found by rank \d", "found by rank N"),
    (r"local_cluster_\d+_\d+", "GROUP"),
    (r"process \d+", "process N"),
    (r"\d\d:\d\d:\d\d\.\d+ call", "TIME call"),
    (r"\d\d\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d+", "DATE"),
    (r"\d+ µs", "N µs"),
    (r"\S+_calls\.txt", "FILE"),
    (r"\b[1-9]\d* of 400", "n of 400"),
]


def neutral(text: str) -> list[str]:
    for pattern, name in OF_A_RUN:
        text = re.sub(pattern, name, text)
    return [line.rstrip() for line in text.splitlines()]


def blocks(page: str, language: str = "python") -> list[str]:
    return [text for name, text in FENCE.findall(text_of(page)) if name == language]


def block_cases() -> list[object]:
    cases: list[object] = []
    for page in PAGES:
        for number, block in enumerate(blocks(page)):
            slow = number > 0 and "kernels.explore(" not in block and re.search(r"\bascendc_twin\.(load|build)", block)
            marks = [pytest.mark.nightly] if slow else []
            if not ON_GPUS.search(block):
                cases.append(pytest.param(page, block, id=f"{page}-{number}", marks=marks))
    return cases


@pytest.mark.parametrize(("page", "block"), block_cases())
def test_a_block_runs_and_prints_what_is_shown(
    page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the kernels of examples/, without a name from another block; the output is the block below, if any."""
    for kernel in TREE.glob("examples/*/*.cpp"):
        shutil.copy(kernel, tmp_path)
    monkeypatch.chdir(tmp_path)
    before = "".join(text for pattern, text in BEFORE.items() if re.search(pattern, block))
    if before or OF_A_PROCESS.search(block):
        printed = printed_by(before + block, tmp_path, **RANK)
    elif "late.py" in text_of(page).partition(block)[0][-300:]:
        return  # the command below it runs it
    else:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, {"__name__": "__main__"})
        printed = out.getvalue()
    below = text_of(page).split(block, 1)[1]
    if below.startswith("```\n\n```\n"):
        assert neutral(printed) == neutral(below.split("```\n")[2])
    for drawn in tmp_path.glob("*.svg"):  # the picture that the page has
        assert f"({PAGES[page].stem}/{drawn.name})" in below
        assert drawn.read_text() == (TREE / "docs" / PAGES[page].stem / drawn.name).read_text()


def command_cases() -> list[object]:
    """Indented commands with their output below."""
    cases = [(page, *found) for page in PAGES for found in SHELL.findall(text_of(page))]
    quick = re.compile(r"late\.py|validate|explore")
    return [
        pytest.param(*case, id=case[1][:60], marks=[] if quick.search(case[1]) else [pytest.mark.nightly])
        for case in cases
    ]


@pytest.mark.parametrize(("page", "command", "shown"), command_cases())
def test_a_command_prints_what_is_shown(page: str, command: str, shown: str, tmp_path: Path) -> None:
    """Programs that the page says to save lie beside it; numbers of `ascend-moe` are of the machine."""
    for name, block in SAVED.findall(text_of(page)):
        (tmp_path / name).write_text(block)
    variables = dict(re.findall(r"([A-Z_]+)=(\S+)", command)) | {"ASCEND_MOE_CALLS": str(tmp_path)}
    words = re.sub(r"^(?:[A-Z_]+=\S+ )*", "", command).split()
    words = [str(TREE / word) if (TREE / word).is_file() else word for word in words]
    launch = LAUNCH.get(words[0], ["-m", "ascend_moe"])
    done = commands.process([sys.executable, *launch, *words[1:]], tmp_path, **variables)
    printed, wanted = neutral(done.stdout + done.stderr), neutral(shown)
    if words[0] == "ascend-moe":
        printed, wanted = ([re.sub(r"\s*[\d.]+\s*", " N ", line) for line in lines] for lines in (printed, wanted))
    assert [line for line in wanted if line not in printed] == []


def test_a_block_is_python_or_names_its_language() -> None:
    """No block hides from the tests above: a page marks code of Python as python, and with nothing behind it."""
    for page in PAGES:
        for language, text in FENCE.findall(text_of(page)):
            assert language in ("", "python", "sh", "yaml"), (page, language)
            assert language or not re.search(r"^(from \S+ )?import \w+", text, re.MULTILINE), (page, text)


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.relative_to(TREE).as_posix())
def test_tables_begin_with_their_heads(page: Path) -> None:
    """Rows behind a blank line would be shown as text."""
    for table in re.findall(r"(?:^|(?<=\n)(?<!\|\n))\|[^\n]*\n(?:\|[^\n]*\n)*", FENCE.sub("", page.read_text())):
        assert re.match(r"[^\n]+\n\|[-:| ]+\|\n\|", table), table.partition("\n")[0]


# ---- links and names


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.relative_to(TREE).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", FENCE.sub("", page.read_text())):
        found = (page.parent / target).resolve() if target else page
        if "://" in target:
            continue
        assert found.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target}#{anchor}"


def in_code(text: str) -> str:
    """What stands in blocks, indented lines and between backticks."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return "\n".join([*(block for _, block in FENCE.findall(text)), *re.findall(r"^ {4}(\S.*)", text, re.M), *spans])


def options_of(command: str) -> set[str]:
    group: Any = typer.main.get_command(root.application(command))
    parts = [group, *getattr(group, "commands", {}).values()]
    return {option for part in parts for each in part.params for option in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("page", IN_ENGLISH, ids=lambda page: page.relative_to(TREE).as_posix())
def test_commands_options_and_targets_exist(page: Path) -> None:
    code = re.sub(r'"[^"\n]*"', '""', in_code(page.read_text()))
    makefile, project = (TREE / "Makefile").read_text(), (TREE / "pyproject.toml").read_text()
    for command, words in re.findall(r"\bascend-moe ([a-z][\w-]*)((?: [^\n`#&]*)?)", code):
        assert command in root.COMMANDS, command
        own = words.partition(" -- ")[0]
        wrong = set(re.findall(r"(?<= )--?[a-z][\w-]*", own)) - options_of(command) - {"--help", "--json"}
        assert not wrong, f"ascend-moe {command}{words}: {wrong}"
    for words in re.findall(r"^make ((?:[a-z-]+|[A-Z_]+=\S*)(?: (?:[a-z-]+|[A-Z_]+=\S*))*)", code, re.M):
        for word in words.split():
            name = word.partition("=")[0]
            pattern = rf"^[a-z -]*\b{name}\b[a-z -]*:" if name == word else rf"\b{name}\b"
            assert re.search(pattern, makefile, re.M), f"make {words}"
    for extra in re.findall(r"'\.\[(\w+)\]'", code):
        assert re.search(rf"^{extra} = \[", project, re.M), extra


FOLDERS = "ascend_moe|cmake|csrc|docker|docs|examples|model|op_host|op_kernel|tests|tools|twin|vnpu"
#: Names of files that a reader shall make, or a build makes.
TO_WRITE = re.compile(r"my_op|NAME|[*{]|^ascend_moe/lib\b|^tests/(ut|e2e)\b")  # the last: of vllm-ascend


@pytest.mark.parametrize("page", IN_ENGLISH, ids=lambda page: page.relative_to(TREE).as_posix())
def test_files_tests_variables_and_modules_exist(page: Path) -> None:
    code = in_code(page.read_text())
    for path in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.*{{}}]+\w", code):
        found = TREE / path, TREE / "tests" / path, page.parent / path
        assert TO_WRITE.search(path) or any(each.exists() for each in found), f"{page.name}: {path}"
    macros = "".join((TREE / name).read_text() for name in ("CMakeLists.txt", "op_host/rules/op.h", "Makefile"))
    macros += "".join(path.read_text() for path in (TREE / "op_kernel" / "protocol").glob("*.h"))
    for name in re.findall(r"\bASCEND_MOE_[A-Z0-9_]+[A-Z0-9]\b", code):
        assert name in settings.NAMES or re.search(rf"\b{name}\b", macros), f"{page.name}: {name}"
    tests = {
        name for path in (TREE / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)|", path.read_text())
    }
    files = {path.stem for path in TREE.rglob("tests/**/test_*.py")}
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        assert name in tests | files, f"{page.name}: {name}"
    for dotted in re.findall(r"(?<![\w.-])ascend_moe((?:\.[A-Za-z_]\w*)+)", code):
        assert dotted.endswith((".py", ".cpp", ".egg", ".pt", ".so")) or exists(dotted), f"{page.name}: {dotted}"


def exists(dotted: str) -> bool:
    found: Any = ascend_moe
    for name in dotted.split(".")[1:]:
        if not hasattr(found, name):
            try:
                importlib.import_module(f"{found.__name__}.{name}")
            except (ImportError, AttributeError):
                return False
        found = getattr(found, name)
    return True


@pytest.mark.parametrize("folder", FOLDERS.replace("docs|", "").split("|"))
def test_pages_that_sources_name_exist(folder: str) -> None:
    for path in (TREE / folder).rglob("*.*"):
        if path.suffix in (".py", ".h", ".cpp", ".in", ".pml", ".toml", ".md") and "_src" not in path.parts:
            for name in re.findall(r"(?<![\w/.])docs/(\w+\.md)", path.read_text()):
                assert name in {*PAGES, "page.md", "other.md", "none.md", "b.md"}, f"{path}: docs/{name}"


def test_public_names_modules_and_commands_stand_in_a_page() -> None:
    code = "\n".join(in_code(text_of(page)) for page in PAGES)
    for name in ascend_moe.__all__:  # words of plain English count as the name only behind the package's
        plain = name.isalpha() and name.islower()
        assert re.search(rf"\bascend_moe\.{name}\b" if plain else rf"\b{name}\b", code), name
    modules = [
        "checkpoint",
        "dispatchers",
        "errors",
        "experts",
        "layer_ops",
        "npu",
        "permute",
        "placement",
        "reference",
    ]
    modules += ["routers", "shim.torch_npu"]
    modules += [f"interop.{name}" for name in ("deep_ep", "fused_moe", "megatron", "sglang", "vllm", "vllm_ascend")]
    for module in modules:
        parent, _, name = f"ascend_moe.{module}".rpartition(".")
        assert re.search(rf"\bascend_moe\.{re.escape(module)}\b|from {re.escape(parent)} import [^\n]*\b{name}\b", code)
    section = text_of("README.md").partition("## Commands")[2].partition("## ")[0]
    named = set(re.findall(r"`(?:ascend-moe )?([\w-]+)`", section))
    assert named == set(root.COMMANDS) and all(commands.said(name, "--help").code == 0 for name in named)


# ---- numbers and tables of the code


@pytest.mark.parametrize("path", sorted(pages_from_code.GENERATED), ids=str)
def test_generated_tables_are_those_of_the_code(path: str) -> None:
    page = pages_from_code.DOCS / path
    assert page.read_text() == pages_from_code.filled(path, page.read_text()), "run tools/pages_from_code.py"


def test_every_error_stands_in_a_table() -> None:
    """But for the bases, which are never raised themselves."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    defined = {value.__name__ for value in classes if value.__module__ == errors.__name__}
    listed = {name for names in pages_from_code.ERRORS.values() for name in names}
    assert listed == defined - {"AscendMoeError", "CommError"}


# ---- README and pictures


def dispatch(group: str, rank: int, hidden: int) -> Any:
    x = torch.ones(4, hidden, dtype=torch.bfloat16)
    ids = (torch.arange(8) % 16).view(4, 2).int()
    return ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, group, 4, rank, 16)


SIZES = "H is 128 on rank 2 and 64 on rank 0"
FAILURES: list[Callable[[int, str], Any]] = [
    lambda rank, group: dispatch(group, rank, 128 if rank == 2 else 64),
    lambda rank, group: None if rank == 3 else dispatch(group, rank, 64),
]


def test_errors_that_readme_shows_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "1")
    raised_texts = []
    for rank_main in FAILURES:
        with pytest.raises(AscendMoeError) as raised, LocalCluster(4) as cluster:
            cluster.run(rank_main)
        # Any rank may be the first to find it.
        text = re.sub("found by rank [0-2]", "found by rank 0", str(raised.value))
        text = re.sub("H is .* rank 2 and .* rank [013]|H is .* rank [013] and .* rank 2", SIZES, text)
        text = re.sub(r"; the last calls of rank \d: \S+$", "", text)  # a file of that run
        raised_texts.append(f"{type(raised.value).__name__}: {text}")
    shown = next(block for block in blocks("README.md", "") if block.startswith("ConfigMismatch: "))
    assert " ".join(shown.split()) == " ".join(raised_texts)


def test_what_readme_shows_is_what_examples_and_pages_have() -> None:
    readme = text_of("README.md")
    assert len(readme.splitlines()) <= 150
    source = (TREE / "examples" / "quickstart.py").read_text().partition("\n# Output:\n")[0]
    assert f"import torch{source.partition('import torch')[2].rstrip()}\n" == blocks("README.md")[0]
    race = (TREE / "examples" / "find_a_race" / "README.md").read_text()
    for page in ("README.md", "debugging.md"):
        shown = next(block for block in blocks(page, "") if block.startswith("rank_race: "))
        assert " ".join(shown.split()).partition(" [mode=")[0] in race
    kernels = "".join(path.read_text() for path in (TREE / "op_kernel").rglob("*.h"))
    steps = re.findall(r'<text class="code end"[^>]*>(.*?)</text>', (TREE / "docs" / "dataflow.svg").read_text())
    assert len(steps) >= 7 and all(f" {code}(" in kernels for code in steps)


def test_translated_pages_show_the_code_of_their_sources() -> None:
    """While they are up to date; `make translations` reports the others."""
    for page in translations.pages(TREE):
        translation = translations.read(TREE, page)
        assert translation.source == page.replace("docs/zh/", "docs/").replace(".zh.md", ".md")
        assert translation.is_stale or translations.differences(translation) == [], page


# ---- the tool that reports translated pages which are older than their sources or show other code

SOURCE = "# Title\n\n[other](other.md)\n\n| `a` |\n|---|\n| 1 |\n\n```python\nf(1)\n```\n"


def test_an_older_page_and_one_with_other_code_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs" / "zh").mkdir(parents=True)
    source, page = tmp_path / "docs" / "page.md", tmp_path / "docs" / "zh" / "page.md"
    source.write_text(SOURCE)
    head = f"<!-- translation of docs/page.md, text {translations.text_hash(SOURCE)} -->\n\n"
    page.write_text(head + SOURCE.replace("Title", "标题").replace("other.md", "../other.md"))
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert translations.report(tmp_path) == 0
    source.write_text(SOURCE + "More.\n")
    assert translations.report(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "docs/zh/page.md is older than docs/page.md:\n" in printed and "\n+More.\n" in printed
    translations.update(tmp_path, "docs/zh/page.md")
    assert translations.report(tmp_path) == 0
    for ours, other in (("f(1)\n", "f(2)\n"), ("| 1 |\n", "| 1 |\n| 2 |\n"), ("../other.md", "../page.md")):
        page.write_text(page.read_text().replace(ours, other))
    found = translations.differences(translations.read(tmp_path, "docs/zh/page.md"))
    for said in ("block: ", "rows of its tables: [4], its source has [3]", "link: - 'docs/other.md'"):
        assert any(line.startswith(said) for line in found), found
