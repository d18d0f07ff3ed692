"""docs/settings.md, errors.md and operators.md have what the code makes of them."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from ascend_moe import errors

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

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
