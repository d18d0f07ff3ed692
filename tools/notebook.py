"""Runs a notebook in its folder and writes its outputs into it: `python tools/notebook.py examples/first_layer.ipynb`.

Needs nbclient and ipykernel. What changes from run to run without meaning (times, counters) is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def executed(path: Path) -> Any:
    """The notebook with the outputs of a run of its own. Raises CellExecutionError where a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(path.parent))
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("text/plain", None) if "image/png" in output.get("data", {}) else None
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return notebook


def main() -> None:
    import nbformat

    for name in sys.argv[1:]:
        nbformat.write(executed(Path(name)), name)
        print(f"{name}: {Path(name).stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
