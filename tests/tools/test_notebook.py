"""examples/first_layer.ipynb runs, and its outputs are those of a run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

TREE = Path(__file__).resolve().parents[2]
NOTEBOOK = TREE / "examples" / "first_layer.ipynb"
pytestmark = pytest.mark.skipif(not NOTEBOOK.is_file(), reason="not in a source tree")


def texts(notebook: Any) -> list[str]:
    """What the cells print, without what they write to stderr."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]
    return ["".join(output["text"]) for output in outputs if output.get("name") == "stdout"]


def pictures(notebook: Any) -> int:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_the_notebook_is_small_and_has_been_run() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1)) and NOTEBOOK.stat().st_size < 300 * 1024
    assert pictures(notebook) == 2 and any("missing pipe synchronisation" in text for text in texts(notebook))


@pytest.mark.nightly
def test_a_run_prints_what_the_notebook_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    spec = importlib.util.spec_from_file_location("notebook", TREE / "tools" / "notebook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    again, kept = module.executed(NOTEBOOK), json.loads(NOTEBOOK.read_text())
    assert pictures(again) == pictures(kept)
    shown, printed = texts(kept), texts(again)
    assert printed[:-1] == shown[:-1]
    before, after = (float(text) for text in printed[-1].removeprefix("loss ").split(" -> "))
    assert after < 0.6 * before, "rounding may differ between machines; that it learns does not"
