"""The tool that reports translated pages which are older than their sources or show other code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import translations

SOURCE = """# Title

Call `f(x)`, see [other](other.md).

| a | b |
|---|---|
| 1 | `g` |

    pip install it  # once

```python
f(1)
```
"""
TRANSLATED = """<!-- translation of docs/page.md, text {} -->

# 标题

调用 `f(x)`，见 [other](../other.md)。

| 甲 | 乙 |
|---|---|
| 1 | `g` |

    pip install it  # 一次

```python
f(1)
```
"""


@pytest.fixture
def drawn(tmp_path: Path) -> Iterator[Path]:
    """A repository of one page and its translation, which is up to date."""
    (tmp_path / "docs" / "zh").mkdir(parents=True)
    (tmp_path / "docs" / "page.md").write_text(SOURCE)
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    (tmp_path / "docs" / "zh" / "page.md").write_text(TRANSLATED.format(translations.text_hash(SOURCE)))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first")
    yield tmp_path


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_an_older_page_is_reported_until_it_is_updated(drawn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (drawn / "docs" / "page.md").write_text(SOURCE + "More.\n")
    assert translations.report(drawn) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("docs/zh/page.md is older than docs/page.md:\n")
    assert "\n+More.\n" in printed
    translations.update(drawn, "docs/zh/page.md")
    assert translations.report(drawn) == 0


def test_other_code_than_the_source_is_reported(drawn: Path) -> None:
    path = drawn / "docs" / "zh" / "page.md"
    for ours, other in (("f(1)\n", "f(2)\n"), ("`g` |\n", "`g` |\n| 2 | `g` |\n"), ("../other.md", "../page.md")):
        path.write_text(path.read_text().replace(ours, other))
    found = translations.differences(translations.read(drawn, "docs/zh/page.md"))
    for said in ("block: ", "rows of its tables: [4], its source has [3]", "link: - 'docs/other.md'"):
        assert any(line.startswith(said) for line in found), found
