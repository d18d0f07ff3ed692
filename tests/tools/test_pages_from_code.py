"""docs/settings.md, errors.md and operators.md have what the code makes of them; what docstrings lack is found."""

from __future__ import annotations

import inspect
import random
import sys
from pathlib import Path

import griffe
import pytest

from ascend_moe import errors

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import docs_docstrings
import pages_from_code

pytestmark = pytest.mark.skipif(not pages_from_code.DOCS.is_dir(), reason="not in a source tree")


@pytest.mark.parametrize("name", ["settings.md", "errors.md", "operators.md", "zh/operators.md"])
def test_a_page_has_what_the_code_makes(name: str) -> None:
    path = pages_from_code.DOCS / name
    assert path.read_text() == dict(pages_from_code.pages())[path], "run tools/pages_from_code.py"


def test_every_error_stands_in_a_table() -> None:
    """But for the bases, which are never raised themselves."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    defined = {value.__name__ for value in classes if value.__module__ == errors.__name__}
    listed = {name for names in pages_from_code.ERRORS.values() for name in names}
    assert listed == defined - {"AscendMoeError", "CommError"}


def test_a_docstring_that_says_no_remedy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.PeerLost, "__doc__", "Raised where a rank has gone.")
    with pytest.raises(ValueError, match="the docstring of PeerLost does not say"):
        pages_from_code.errors_table("fatal errors")


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/errors.md has no <!-- begin generated: errors of one rank -->"):
        pages_from_code.filled("errors.md", "# Errors\n")


# ---- docstrings of public names


def described(names: list[str]) -> str:
    return "Args:\n" + "".join(f"        {name}: a number.\n" for name in names)


def test_an_argument_is_described_here_or_in_the_docstring_that_is_referred_to() -> None:
    """200 drawn pairs of functions; the second describes its arguments, or refers to the first, or to none."""
    draw = random.Random(48)
    for _ in range(200):
        names = draw.sample(["alpha", "beta", "gamma", "delta"], draw.randint(1, 4))
        told = [name for name in names if draw.random() < 0.6]
        target = draw.choice(["", "ascend_moe.first", "ascend_moe.nowhere"])
        own = f"The arguments are those of `{target}`." if target else described(told)
        code = "".join(
            f'def {name}({", ".join(names)}):\n    """Does something.\n\n    {text}\n    """\n'
            for name, text in (("first", described(told)), ("second", own))
        )
        with griffe.temporary_visited_package(
            "ascend_moe", {"__init__.py": code}, extensions=griffe.Extensions(docs_docstrings.Docstrings())
        ) as package:
            lacking = docs_docstrings.left_out(package["second"])
            shown = package["second"].docstring.parse("google")
        known = told if target != "ascend_moe.nowhere" else []
        assert lacking == [f"argument {name}" for name in names if name not in known], code
        listed = [each.name for part in shown if part.kind.value == "parameters" for each in part.value]
        assert listed == known, code
