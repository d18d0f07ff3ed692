"""Pages, pictures, messages, help, public docstrings and comments of kernels use the terms of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (TREE / "docs").is_dir(), reason="not in a source tree")

_THE = r"(?:an?|the|its|their|this|that|each|every|both|own|other|one|two)"
#: Whole words in any case that are not written -> what is written instead.
WORDS = {
    r"lent|lend(?:s|ing)?|lentarea|spends?": "registered buffer, consume",
    r"meetings?|(?:cores?|ranks?|who|they) meets?": "core barrier, synchronize",
    r"verdicts?|fail(?:ure)? blocks?": "status code, probe results, local abort flag",
    rf"{_THE} tails?|(?:{_THE}|row|message|epoch) marks?": "trailer, sequence tag",
    r"(?:own|local) terms?|terms? of (?:the|a|its) (?:sum|token)s?": "addends",
    r"triples?": "source index",
    rf"{_THE} lanes? of (?:ranks?|servers?)|ranks? of (?:a|the|its) lanes?": "local rank, rail",
    r"(?:near|far) (?:ranks?|peers?|stores?|servers?|ones?|sources?|owners?)": "intra-node, inter-node",
    rf"windows?\W+(?:two|both|its) halves|(?:half|halves) of {_THE} (?:windows?|ops)": "ping-pong buffer",
    rf"{_THE} half(?! (?:an?|as|of|the|value|point)\b)": "ping-pong buffer",
    r"stamps?": "timestamp, sequence tag",
    r"told|tells?|kept|fresh": "reported, stored, new",
    r"on (?:its|their) way|on the way (?:back|home)|settle[sd]?|settling": "in flight, wait",
    r"doors?|guests?|knock(?:s|ed|ing)?": "listener, joiner, connect",
    r"ballots?|carriers?": "vote, transport",
    rf"{_THE} ways? (?:of|for) (?:rows|sending)|carr(?:y|ies) (?:the )?rows": "dispatcher, transport",
    r"foreign|stand-?ins?": "third-party, shim or mock",
    r"spoil(?:t|s|ed)?|wrong rows|finders?": "corrupted, detector",
    r"plans? of ub|far from each other": "UB layout, distant",
}
#: Names of former classes, in this case only.
NAMES = "Begun|OnTheWay|Standing|Regrouped|Grown|Board|Ballot"
PATTERN = re.compile(rf"(?<![\w/:-])(?:(?i:{'|'.join(WORDS)})|{NAMES})(?![\w/-]|\.\w)")  # not in names of files
#: Words that stay in one file, and why.
ALLOWED = {
    ("CHANGELOG.md", "standin"): "the former name of a module and of a command",
    ("op_host/rules/vendor_needs.h", "carries rows"): "a message about what no transport does",
    ("ascend_moe/routers/gating.py", "kept"): "the name of an argument",
    ("ascend_moe/_tensors.py", "kept"): "the name of an argument",
    ("ascend_moe/shim/site/sitecustomize.py", "finders"): "Python's word for import hooks",
}
CHECKED = ("*.md", "docs/**/*.md", "docs/**/*.svg", "twin/*.md", "vnpu/*.md", "examples/**/*.md", "model/*.md")
CHECKED += ("ascend_moe/**/*.py", "twin/ascendc_twin/**/*.py", "vnpu/ascend_vnpu/**/*.py")
CHECKED += tuple(
    f"{folder}/**/*{suffix}" for folder in ("op_kernel", "op_host", "csrc", "twin", "vnpu") for suffix in (".h", ".cpp")
)


#: Parts of the names of files and in code that are not written, and strings and comments, where they may be.
PARTS = re.compile(r"(?<![a-z])(?:lent|told|begun|finders?|verdicts?|meetings?|foreign|spoilt)(?![a-z])", re.IGNORECASE)
STRINGS = r"\"\"\".*?\"\"\"|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|"
IN_TEXT = {suffix: re.compile(STRINGS + r"//[^\n]*|/\*.*?\*/", re.DOTALL) for suffix in (".h", ".cpp", ".pml")}
IN_TEXT[".py"] = re.compile(STRINGS + r"#[^\n]*", re.DOTALL)


def texts(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Lines of a page or picture; string literals and comments of C++; sentences and public docstrings of Python."""
    if name.endswith((".h", ".cpp")):
        for found in re.finditer(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', source, re.DOTALL):
            if " " in found[0]:  # not a key
                yield source.count("\n", 0, found.start()) + 1, found[0]
    elif name.endswith(".py"):
        tree = ast.parse(source)
        private: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("_"):
                private |= {id(node.body[0].value)} if isinstance(node.body[0], ast.Expr) else set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in private and " " in str(node.value):  # not a key
                yield node.lineno, str(node.value)
    else:
        text = re.sub(r"<[^>]*>", "", source) if name.endswith(".svg") else source
        yield from enumerate(text.splitlines(), 1)


def hits(name: str, source: str) -> list[str]:
    return [
        f"{name}:{line}: {found[0]!r} in {text[max(0, found.start() - 40) : found.end() + 30]!r}"
        for line, text in texts(name, source)
        for found in PATTERN.finditer(text)
        if (name, found[0]) not in ALLOWED
    ]


def test_no_private_term_is_left() -> None:
    names = {path.relative_to(TREE).as_posix(): path for pattern in CHECKED for path in TREE.glob(pattern)}
    names = {name: path for name, path in names.items() if "/tests/" not in name}
    wrong = [hit for name, path in sorted(names.items()) for hit in hits(name, path.read_text())]
    assert wrong == []


def names_in(name: str, source: str) -> set[str]:
    """The private terms in a file's name, and in its code outside of strings and comments."""
    code = IN_TEXT[Path(name).suffix].sub("", source)
    if "meta_path" in code:
        code = code.replace("finder", "")  # Python's word for import hooks
    return {found[0].lower() for found in PARTS.finditer(f"{Path(name).stem} {code}")}


def test_no_private_term_is_a_name() -> None:
    folders = ("ascend_moe", "csrc", "examples", "model", "op_host", "op_kernel", "tests", "tools", "twin", "vnpu")
    listed = [path for folder in folders for path in (TREE / folder).rglob("*") if path.suffix in IN_TEXT]
    found = {path.name: names_in(path.name, path.read_text()) for path in listed}
    assert {name: terms for name, terms in found.items() if terms} == {}
    assert names_in("a.cpp", "int told_all;  // a finder") == {"told"} and names_in("test_lent.py", "''") == {"lent"}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("page.md", "Rows go into lent memory."),
        ("page.zh.md", "每个核在 meeting 之后返回"),
        ("page.md", "A stand-in of torch_npu."),
        ("picture.svg", "<title>A window: two halves</title>"),
        ("a.py", "def f(x):\n    need(x, 'dispatch: the verdict of rank 0 is missing')"),
        ("a.py", "raise ArgumentError(f'{name}: {count} triples are spoilt')"),
        ("a.py", "app.option(help='Print what the ranks have told.')"),
        ("a.py", 'class Window:\n    """Windows and their near ranks."""\n'),
        ("a.py", '"""Public: ranks that knock."""\n'),
        ("a.h", "int f();  // All cores meet here."),
        ("a.h", "/* The other half\n   of the window. */"),
        ("a.cpp", 'Fail("rank %u: no fail block");'),
        ("a.cpp", "// A Ballot of ranks."),
    ],
)
def test_a_planted_term_is_found(name: str, source: str) -> None:
    assert hits(name, source)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("page.md", "`DTYPE_X=half`, half of the rows, both halves of a block; rules are met; `tests/doors.py`"),
        ("page.md", "SIMD lanes, the first lanes of a repeat, near zero, so far, a post-release, long-standing"),
        ("a.py", 'def _f():\n    """What was told."""\n    return {\'lent\': stamps}  # not text that users see'),
        ("a.h", "int triples = 0;  // indexes of sources"),
    ],
)
def test_ordinary_words_are_not(name: str, source: str) -> None:
    assert hits(name, source) == []
