"""The tool that reports translated pages which are older than their sources or show other code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import translations

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
