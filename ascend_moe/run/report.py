"""The report of a run as text and JSON: heat map, rows, windows, times, checks, result."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ascend_moe.run.check import RunChecks, tolerance_of
from ascend_moe.run.layers import PHASES, RankRecord, RunSpec

_MATRIX_UP_TO = 8  # ranks for which rows are shown for each pair
_MIB = 1 << 20


@dataclass
class RunReport:
    """The report of a finished run. ``head``: sentences about it, see `about`; ``seconds``: of the whole run."""

    spec: RunSpec
    head: Sequence[str]
    backend: str
    records: Sequence[RankRecord]
    checked: RunChecks
    seconds: float

    def __post_init__(self) -> None:
        spec, records = self.spec, self.records
        self.counts = tokens_per_expert([record.expert_ids for record in records], spec.config.num_experts)
        #: [source][owner] rows that dispatch sends
        self.rows: Tensor = self.counts.reshape(spec.ranks, spec.ranks, -1).sum(2)

    def window_bytes(self) -> int:
        """Return the largest number of bytes of rows in one rank's window after an op."""
        # the window's owner reads them, or has written them
        side = {"window": "read", "hierarchy": "read", "direct": "written"}
        return max(
            record.traffic[op][f"{side[algorithm]}_window_data"]
            for record in self.records
            for op, algorithm in record.algorithms.items()
        )

    def phase_ms(self) -> dict[str, float]:
        """Return phase -> milliseconds: of each pass the slowest rank's, of these the median."""
        passes = range(self.spec.iterations)
        return {
            phase: 1e3 * statistics.median(max(record.seconds[phase][n] for record in self.records) for n in passes)
            for phase in PHASES
        }

    def json(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        spec, first = self.spec, self.records[0]
        return {
            "pass": self.checked.ok,
            "about": list(self.head),
            "backend": self.backend,
            "config": asdict(spec.config),
            "dtype": str(spec.dtype).removeprefix("torch."),
            **{name: getattr(spec, name) for name in ("ranks", "quant_mode", "seed", "batches", "iterations")},
            "tokens_per_expert": self.counts.tolist(),
            "rows": self.rows.tolist(),
            "window": {
                "mib": first.window_mib + first.state_mib,
                "used_mib": self.window_bytes() / _MIB,
                "needed_mib": first.needed_mib,
            },
            "algorithms": [record.algorithms for record in self.records],
            "phase_ms": self.phase_ms(),
            **asdict(self.checked),
            "dense_tolerance": tolerance_of(spec),
            "seconds": self.seconds,
        }

    def show(self, console: Console) -> None:
        """Print the report without ``head``."""
        self._title(console, "Tokens per expert and rank")
        for line in render(self.counts, console.width):
            console.print(line, no_wrap=True, crop=False)
        console.print("  " + summary(self.counts), highlight=False)
        self._title(console, "Rows from each rank to each rank")
        console.print(self._row_table())
        self._title(console, "Windows")
        first, used = self.records[0], self.window_bytes() / _MIB
        console.print(
            f"  at most {used:.2f} MiB of rows in one window; an op uses one of its two ping-pong buffers of "
            f"{first.window_mib / 2:g} MiB\n"
            f"  HCCL_BUFFSIZE is {first.window_mib + first.state_mib} MiB; any routing of these batches fits in "
            f"{first.needed_mib} MiB",
            highlight=False,
        )
        self._title(console, f"Time: median of {self.spec.iterations} passes, slowest rank")
        times = "   ".join(f"{phase} {ms:.1f} ms" for phase, ms in self.phase_ms().items())
        console.print(f"  {times}", highlight=False)
        console.print("  [dim]of the kernels on this CPU, including waits; they do not apply to NPUs")
        self._title(console, "Checks")
        table = _table(head=False)
        for check in self.checked.checks:
            mark = Text("ok", "green") if check.ok else Text("WRONG", "bold red")
            table.add_row(mark, Text(check.name), Text(check.detail.partition("\n")[0]))
        console.print(table)
        for check in self.checked.checks:  # details of failed checks
            more = check.detail.partition("\n")[2]
            if more and not check.ok:
                console.print(Text(f"{check.name}: ", "red").append(more, "default"))
        word, style = ("PASS", "bold green") if self.checked.ok else ("FAIL", "bold red")
        console.print(Text(word, style).append(f" in {self.seconds:.1f} s", "not bold default"))

    @staticmethod
    def _title(console: Console, text: str) -> None:
        console.print(f"\n{text}", style="bold", highlight=False)

    def _row_table(self) -> Table:
        """Rows between each pair of ranks if they are few, else rows sent and received by each rank."""
        spec, rows, table = self.spec, self.rows, _table()
        sent, received = rows.sum(1), rows.sum(0)
        pairs = spec.ranks <= _MATRIX_UP_TO
        names = [f"to {rank}" for rank in range(spec.ranks)] + ["sent"] if pairs else ["sent", "received"]
        for name in ("", "tokens", *names):
            table.add_column(name, justify="right")
        for rank, batch in enumerate(spec.batches):
            cells = [*rows[rank], sent[rank]] if pairs else [sent[rank], received[rank]]
            table.add_row(f"rank {rank}", str(batch), *(str(int(cell)) for cell in cells))
        if pairs:
            totals = (str(int(cell)) for cell in (*received, sent.sum()))
            table.add_row("received", "", *totals, style="bold")
        return table


def _table(head: bool = True) -> Table:
    return Table(box=None, show_header=head, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)


def about(spec: RunSpec, source: str, backend: str, width: int | None, text: str, note: str) -> list[str]:
    """Return the sentences at the top of the report.

    ``source``: description of the layer. ``backend``: how the ranks run. ``width``: the model's width of an expert if
    the run's are narrower, else None. ``text``: name of the text. ``note``: a last sentence; "": none.
    """
    config, dtype = spec.config, str(spec.dtype).removeprefix("torch.")
    experts = "quantized experts" if spec.checkpoint else "int8 experts (W8A8)"
    rows = f"int8 rows, {experts}" if spec.quant_mode else f"{dtype} rows"
    router = f"{'sigmoid' if config.router == 'deepseek_v3' else config.router} router"
    if config.n_group > 1:
        router += f", {config.topk_group} of {config.n_group} groups"
    shared = ", a shared expert" if config.shared_intermediate_size else ""
    kinds = [f"{number} {name.split('_')[0]}" for name, number in config.special.given.items()]
    special = f" + {' + '.join(kinds)} experts" if kinds else ""
    lines = [
        source,
        f"{spec.ranks} ranks ({backend}), {rows}; dispatch and combine are AscendC kernels on the CPU twin",
        f"H {config.hidden_size}, K {config.top_k}, E {config.num_experts} "
        f"({config.num_experts // spec.ranks} per rank){special}, {router}{shared}",
    ]
    if width is not None:
        gb = 3 * config.num_experts * config.row_size * spec.dtype.itemsize / 1e9
        lines.append(
            f"experts are {config.moe_intermediate_size} wide, the model's {width}: their weights take "
            f"{gb * config.moe_intermediate_size:.2g} GB instead of {gb * width:.2g} GB"
        )
    batches = " + ".join(str(batch) for batch in spec.batches[:8]) + (" + ..." if spec.ranks > 8 else "")
    lines.append(f"{text}: one token per byte, {batches} = {sum(spec.batches)} tokens")
    return [*lines, note] if note else lines


# ---- the heat map: tokens per expert and rank as blocks in the terminal

# Levels in ascending order; shades distinguish them without colours too.
_SHADES = " ░▒▓█"
_COLOURS = ("#1b1b2f", "#2c4a8a", "#1f9e89", "#b5c93a", "#fde725")
_RULES_UP_TO = 16  # ranks with rules between owners
_LABEL, _TOTAL = 9, 8  # columns of "  rank 0 ", and of the row's sum


def tokens_per_expert(expert_ids: Sequence[Tensor], experts: int) -> Tensor:
    """Return the numbers of rows from each rank to each expert, (W, E) int64. Ids outside 0..E-1 are ignored."""
    routed = [ids[(ids >= 0) & (ids < experts)].flatten().long() for ids in expert_ids]
    counts = [torch.bincount(ids, minlength=experts) for ids in routed]
    return torch.stack(counts)


def render(counts: Tensor, width: int = 100) -> list[Text]:
    """Draw (W, E) counts as a heat map of at most ``width`` columns: one line per rank, experts from left to right.

    Owners (ranks) whose experts do not fit into the width follow below.
    """
    world, experts = counts.shape
    local, rule = experts // world, "│" if world <= _RULES_UP_TO else ""
    room = width - _LABEL - _TOTAL - (world + 1) * len(rule)
    span = next(n for n in range(1, local + 1) if local % n == 0 and (experts // n <= room or n == local))
    cells = counts.reshape(world, world, local // span, span).sum(3)
    most, step = max(1, int(cells.max())), local // span + len(rule)
    beside = max(1, (width - _LABEL - _TOTAL - len(rule)) // step)
    lines = []
    for owners in (range(first, min(first + beside, world)) for first in range(0, world, beside)):
        name = "rank {}" if step > len(f"rank {world}") else "{}"
        lines.append(_axis("owner", [name.format(owner) for owner in owners], step, rule))
        lines.append(_axis("expert", [str(owner * local) for owner in owners], step, rule, "  rows"))
        for rank in range(world):
            line = Text(f"  rank {rank:<2}")
            for owner in owners:
                line.append(rule)
                for cell in cells[rank, owner].tolist():
                    line.append(*_block(_level(cell, most)))
            lines.append(line.append(f"{rule} {int(cells[rank, owners.start : owners.stop].sum()):>6}"))
        received = cells.sum((0, 2))[owners.start : owners.stop].tolist()
        sums = _axis("sum", [str(rows) for rows in received], step, rule)
        sums.rstrip()
        lines.append(sums.append(str(sum(received)).rjust(len(lines[-1]) - len(sums)), style="dim"))
    ruled = f"; │ between the {local} experts of each rank" if rule and world > 1 else ""
    wide = "1 expert" if span == 1 else f"{span} experts"
    return [*lines, _legend(most), Text(f"  a column: {wide}{ruled}")]


def _axis(name: str, words: list[str], step: int, rule: str, end: str = "") -> Text:
    """Label the columns of each owner; words that do not fit are omitted."""
    fitting = "".join((word if len(word) < max(step, 2) else "").ljust(step) for word in words)
    return Text(f"  {name:<{_LABEL - 2}}{' ' * len(rule)}{fitting}{end}", style="dim")


def summary(counts: Tensor) -> str:
    """Return a line on the balance of (W, E) counts: hottest expert, idle experts, busiest rank."""
    world, experts = counts.shape
    by_expert = counts.sum(0)
    by_owner = by_expert.reshape(world, -1).sum(1)
    hot = int(by_expert.argmax())
    mean = max(float(by_owner.float().mean()), 1e-9)
    return (
        f"hottest expert {hot}: {int(by_expert[hot])} rows; {int((by_expert == 0).sum())} of {experts} "
        f"experts idle; busiest rank {int(by_owner.argmax())}: {int(by_owner.max()) / mean:.2f} x the mean"
    )


def _level(value: int, most: int) -> int:
    """Level of a count: 0 for 0, then by the square root, which separates small counts."""
    top = len(_SHADES) - 1
    return next(level for level in range(top + 1) if value * top * top <= level * level * most)


def _block(level: int, columns: int = 1) -> tuple[str, str]:
    return _SHADES[level] * columns, f"{_COLOURS[level]} on {_COLOURS[level]}"


def _legend(most: int) -> Text:
    line = Text("  rows: ")
    for level in range(len(_SHADES)):
        values = [value for value in range(most + 1) if _level(value, most) == level]
        if values:
            low, high = values[0], values[-1]
            line.append(*_block(level, 2)).append(f" {low}   " if low == high else f" {low}-{high}   ")
    return line
