"""Tokens per expert and rank as a picture: blocks in the terminal, or a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.text import Text
from torch import Tensor

from ascend_moe.errors import LibraryError

# From nothing to the most: shades tell the levels without colour too.
_SHADES = " ░▒▓█"
_COLOURS = ("#1b1b2f", "#2c4a8a", "#1f9e89", "#b5c93a", "#fde725")
_NUMBERS_UP_TO = 16  # experts; more become blocks
_RULES_UP_TO = 16  # ranks; more owners are not ruled off
_LABEL = 9  # columns of "  rank 0 "
_TOTAL = 8  # columns of the row's sum


def tokens_per_expert(expert_ids: Sequence[Tensor], experts: int) -> Tensor:
    """(W, E) int64: how many (token, k) of rank r go to expert e; ids of (BS, K), -1 not counted."""
    counts = [torch.bincount(ids[ids >= 0].flatten().long(), minlength=experts) for ids in expert_ids]
    return torch.stack(counts)


def render(counts: Tensor, width: int = 100) -> list[Text]:
    """Lines of at most ``width`` columns for (W, E) counts: a row a rank, experts left to right."""
    world, experts = counts.shape
    if experts <= _NUMBERS_UP_TO:
        return _numbers(counts)
    local = experts // world
    rule = world <= _RULES_UP_TO
    room = width - _LABEL - _TOTAL - (world + 1 if rule else 0)
    span = next(n for n in range(1, local + 1) if local % n == 0 and (experts // n <= room or n == local))
    cells = counts.reshape(world, experts // span, span).sum(2)
    per_owner = local // span
    most = max(1, int(cells.max()))
    lines = [_axis(world, local, per_owner, rule)]
    for rank in range(world):
        line = Text(f"  rank {rank:<2}")
        for column in range(world * per_owner):
            if rule and column % per_owner == 0:
                line.append("│")
            line.append(*_block(int(cells[rank, column]), most))
        line.append("│" if rule else "")
        line.append(f" {int(counts[rank].sum()):>6}")
        lines.append(line)
    owners = f"; │ between the {local} experts of each rank" if rule and world > 1 else ""
    wide = "1 expert" if span == 1 else f"{span} experts"
    lines += [_legend(most), Text(f"  a column: {wide}{owners}")]
    return lines


def summary(counts: Tensor) -> str:
    """One line about balance: the hottest expert, idle experts, the busiest owner."""
    world, experts = counts.shape
    by_expert = counts.sum(0)
    by_owner = by_expert.reshape(world, -1).sum(1)
    hot = int(by_expert.argmax())
    mean = max(float(by_owner.float().mean()), 1e-9)
    return (
        f"hottest expert {hot}: {int(by_expert[hot])} rows; {int((by_expert == 0).sum())} of {experts} "
        f"experts idle; busiest rank {int(by_owner.argmax())}: {int(by_owner.max()) / mean:.2f} x the mean"
    )


def plot(counts: Tensor, path: Path, title: str) -> None:
    """Draws (W, E) counts into an image file, every expert a column.

    Raises:
        LibraryError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LibraryError(
            f"--plot needs matplotlib ({error}): pip install 'ascend_moe[cli]'", symbol="matplotlib"
        ) from error
    world, experts = counts.shape
    figure = Figure(figsize=(12, 1.8 + 0.35 * world), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(counts.numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    for owner in range(1, world):
        axes.axvline(owner * experts // world - 0.5, color="white", linewidth=1)
    axes.set(title=title, xlabel="expert (white lines between the ranks that own them)", ylabel="rank")
    axes.set_yticks(range(world))
    figure.colorbar(image, ax=axes, label="rows", pad=0.01)
    figure.savefig(path)


def _level(value: int, most: int) -> int:
    """0 for nothing, then by the square root, so that small counts stay apart."""
    top = len(_SHADES) - 1
    return next(level for level in range(top + 1) if value * top * top <= level * level * most)


def _block(value: int, most: int) -> tuple[str, str]:
    level = _level(value, most)
    return _SHADES[level], f"{_COLOURS[level]} on {_COLOURS[level]}"


def _axis(world: int, local: int, per_owner: int, rule: bool) -> Text:
    line = " " * _LABEL
    for owner in range(world):
        start = _LABEL + owner * (per_owner + rule) + rule
        label = str(owner * local)
        if start > len(line) or owner == 0:
            line = line.ljust(start) + label
    return Text(line.ljust(_LABEL + world * (per_owner + rule) + rule) + "   rows", style="dim")


def _legend(most: int) -> Text:
    line = Text("  rows in a column: ")
    for level in range(len(_SHADES)):
        values = [value for value in range(most + 1) if _level(value, most) == level]
        if values:
            low, high = values[0], values[-1]
            line.append(f"{_SHADES[level]}{_SHADES[level]}", f"{_COLOURS[level]} on {_COLOURS[level]}")
            line.append(f" {low}   " if low == high else f" {low}-{high}   ")
    return line


def _numbers(counts: Tensor) -> list[Text]:
    """Few experts: the counts themselves on coloured cells."""
    world, experts = counts.shape
    most = max(1, int(counts.max()))
    local = experts // world
    head = Text("  expert ", style="dim")
    for expert in range(experts):
        head.append(("│" if expert % local == 0 else "") + f"{expert:>4}")
    lines = [head]
    for rank in range(world):
        line = Text(f"  rank {rank:<2}")
        for expert, value in enumerate(counts[rank].tolist()):
            level = _level(value, most)
            ink = "black" if level >= 2 else "white"
            line.append("│" if expert % local == 0 else "")
            line.append(f"{value:>4}", f"{ink} on {_COLOURS[level]}")
        line.append(f"│ {int(counts[rank].sum()):>6}")
        lines.append(line)
    head.append("│   rows")
    return [*lines, Text("  │ between the experts of each rank")] if world > 1 else lines
