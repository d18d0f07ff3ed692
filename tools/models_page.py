"""Writes the table of docs/checkpoints.md: every model type's layer against transformers' own block.

    python tools/models_page.py    # 2 minutes; --print leaves the page as it is

A row is measured by tests/helpers/models_table.py, on a tiny random checkpoint.
"""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from hf_models import LAYER, RENAMED, saved  # noqa: E402
from models_table import MODELS_READ, WORLDS, measured  # noqa: E402

from ascend_moe.checkpoint import load_layer  # noqa: E402
from ascend_moe.checkpoint.config import MODEL_TYPES  # noqa: E402

PAGE = ROOT / "docs" / "checkpoints.md"
BEGIN, END = "<!-- python tools/models_page.py -->\n", "<!-- end -->\n"


def rows() -> list[str]:
    """The table's lines."""
    heads = [f"EP {world}" for world in WORLDS]
    lines = [f"| model type | router | activation | shared expert | {' | '.join(heads)} | fp32 | bf16 |"]
    lines.append("|" + "---|" * (6 + len(WORLDS)))
    for name in sorted(MODELS_READ, key=list(MODEL_TYPES).index):
        row, config = measured(name), load_layer(saved(name).directory, LAYER).config
        numbers = ", ".join(f"{key} {value:g}" for key, value in config.activation_numbers.items())
        shared = "yes" if config.shared_intermediate_size else ""
        shared += ", gated" if config.shared_expert_gate else ""
        router = config.router + (", groups" if config.n_group > 1 else "") + (", bias" if config.router_bias else "")
        router += ", copy experts" if config.copy_expert_num else ""
        cells = [f"`{name}`" + (" ¹" if name in RENAMED else ""), router]
        cells += [config.activation + (f" ({numbers})" if numbers else ""), shared]
        cells += [f"{row.errors[world]:.0e}" for world in WORLDS]
        cells += [f"{100 * row.elsewhere[dtype]:.2f}" for dtype in (torch.float32, torch.bfloat16)]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measures all rows, and puts them between the page's marks."""
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    text = "\n".join([f"Measured on {date.today().isoformat()} with {versions}.", "", *rows(), ""])
    if "--print" not in sys.argv:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
