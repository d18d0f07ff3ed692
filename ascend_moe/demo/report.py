"""What a run prints: heat map, rows, windows, times, checks, verdict; and the same as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ascend_moe.demo import heatmap
from ascend_moe.demo.check import Verdict, tolerance_of
from ascend_moe.demo.layers import RunSpec
from ascend_moe.demo.rank import PHASES, RankRecord

_MATRIX_UP_TO = 8  # ranks whose rows are shown pair by pair
_MIB = 1 << 20


class Report:
    """The numbers of one finished run, and their two forms."""

    def __init__(
        self,
        spec: RunSpec,
        head: Sequence[str],
        backend: str,
        records: Sequence[RankRecord],
        verdict: Verdict,
        seconds: float,
    ) -> None:
        """``head``: sentences about what was run; ``seconds``: the whole run."""
        self.spec = spec
        self.head = list(head)
        self.backend = backend
        self.records = records
        self.verdict = verdict
        self.seconds = seconds
        self.counts = heatmap.tokens_per_expert([one.expert_ids for one in records], spec.config.num_experts)
        #: [source][owner] rows that dispatch carries.
        self.rows: Tensor = self.counts.reshape(spec.ranks, spec.ranks, -1).sum(2)

    def window_bytes(self) -> int:
        """Most bytes of rows that lay in one rank's window after one op."""
        return max(one.traffic[op]["read_window_data"] for one in self.records for op in one.traffic)

    def phase_ms(self) -> dict[str, float]:
        """Median over the passes of the slowest rank's milliseconds, by phase."""
        passes = range(self.spec.iterations)
        return {
            phase: 1e3 * statistics.median(max(one.seconds[phase][n] for one in self.records) for n in passes)
            for phase in PHASES
        }

    def json(self) -> dict[str, Any]:
        """Everything that ``show`` prints, machine-readable."""
        spec, first = self.spec, self.records[0]
        return {
            "pass": self.verdict.ok,
            "about": self.head,
            "backend": self.backend,
            "ranks": spec.ranks,
            "config": asdict(spec.config),
            "dtype": str(spec.dtype).removeprefix("torch."),
            "quant": spec.quant,
            "seed": spec.seed,
            "batches": list(spec.batches),
            "tokens_per_expert": self.counts.tolist(),
            "rows": self.rows.tolist(),
            "window": {
                "mib": first.window_mib,
                "used_mib": self.window_bytes() / _MIB,
                "needed_mib": first.needed_mib,
            },
            "iterations": spec.iterations,
            "phase_ms": self.phase_ms(),
            "checks": [asdict(check) for check in self.verdict.checks],
            "reference_difference": self.verdict.reference_difference,
            "dense_difference": self.verdict.dense_difference,
            "dense_rms": self.verdict.dense_rms,
            "dense_tolerance": tolerance_of(spec),
            "seconds": self.seconds,
        }

    def show(self, console: Console) -> None:
        """Prints the report."""
        for sentence in self.head:
            console.print(sentence, markup=False, highlight=False)
        self._title(console, "Tokens per expert and rank")
        for line in heatmap.render(self.counts, console.width):
            console.print(line, no_wrap=True, crop=False)
        console.print("  " + heatmap.summary(self.counts), highlight=False)
        self._title(console, "Rows from each rank to each rank")
        console.print(self._row_table())
        self._title(console, "Windows")
        console.print(self._window_text(), highlight=False)
        self._title(console, f"Time: median of {self.spec.iterations} passes, slowest rank")
        times = "   ".join(f"{phase} {ms:.1f} ms" for phase, ms in self.phase_ms().items())
        console.print(f"  {times}", highlight=False)
        console.print("  [dim]of the kernels on this CPU, waiting included; they say nothing about an NPU")
        self._title(console, "Checks")
        console.print(self._check_table())
        self._show_differences(console)
        word, style = ("PASS", "bold green") if self.verdict.ok else ("FAIL", "bold red")
        console.print(Text(word, style).append(f" in {self.seconds:.1f} s", "not bold default"))

    @staticmethod
    def _title(console: Console, text: str) -> None:
        console.print()
        console.print(text, style="bold", highlight=False)

    def _row_table(self) -> Table:
        sent, received = self.rows.sum(1), self.rows.sum(0)
        table = _table()
        if self.spec.ranks > _MATRIX_UP_TO:
            for name in ("", "tokens", "sent", "received"):
                table.add_column(name, justify="right")
            for rank, batch in enumerate(self.spec.batches):
                table.add_row(f"rank {rank}", str(batch), str(int(sent[rank])), str(int(received[rank])))
            return table
        names = [f"to {rank}" for rank in range(self.spec.ranks)]
        for name in ("", "tokens", *names, "sent"):
            table.add_column(name, justify="right")
        for rank, batch in enumerate(self.spec.batches):
            cells = [str(int(value)) for value in self.rows[rank]]
            table.add_row(f"rank {rank}", str(batch), *cells, str(int(sent[rank])))
        totals = [str(int(value)) for value in received]
        table.add_row("received", "", *totals, str(int(sent.sum())), style="bold")
        return table

    def _window_text(self) -> str:
        first = self.records[0]
        used = self.window_bytes() / _MIB
        return (
            f"  {used:.2f} MiB of rows at most in one window; an op fills one of its two halves of "
            f"{first.window_mib / 2:g} MiB\n"
            f"  HCCL_BUFFSIZE is {first.window_mib} MiB; any routing of these batches fits in "
            f"{first.needed_mib} MiB"
        )

    def _check_table(self) -> Table:
        table = _table(head=False)
        for check in self.verdict.checks:
            mark = Text("ok", "green") if check.ok else Text("WRONG", "bold red")
            table.add_row(mark, Text(check.name), Text(check.detail.partition("\n")[0]))
        return table

    def _show_differences(self, console: Console) -> None:
        """What is wrong, in the words of the reference, after the table of checks."""
        for check in self.verdict.checks:
            more = check.detail.partition("\n")[2]
            if more and not check.ok:
                console.print(Text(f"{check.name}: ", "red").append(more, "default"))


def _table(head: bool = True) -> Table:
    return Table(box=None, show_header=head, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)


def about(spec: RunSpec, source: str, backend: str, width: int | None, text: str, note: str) -> list[str]:
    """The sentences at the top.

    Args:
        source: what layer this is.
        width: the published experts' width where the run's is smaller, else None.
        text: name of the text.
        note: one more sentence, or "".
    """
    config = spec.config
    rows = "int8 rows and experts (W8A8)" if spec.quant else f"{str(spec.dtype).removeprefix('torch.')} rows"
    local = config.num_experts // spec.ranks
    router = "sigmoid router" if config.router == "deepseek_v3" else "softmax router"
    if config.n_group > 1:
        router += f", {config.topk_group} of {config.n_group} groups"
    shared = ", a shared expert" if config.shared_intermediate_size else ""
    lines = [
        source,
        f"{spec.ranks} ranks ({backend}), {rows}; dispatch and combine are AscendC kernels on the CPU twin",
        f"H {config.hidden_size}, K {config.top_k}, E {config.num_experts} ({local} a rank), "
        f"{router}{shared}",
    ]
    wide = 3 * config.num_experts * config.hidden_size * spec.dtype.itemsize / 1e9
    if width is not None:
        lines.append(
            f"experts are {config.moe_intermediate_size} wide, the model's {width}: their weights take "
            f"{wide * config.moe_intermediate_size:.2g} GB instead of {wide * width:.2g} GB"
        )
    batches = " + ".join(str(batch) for batch in spec.batches[:8]) + (" + ..." if spec.ranks > 8 else "")
    lines.append(f"{text}: one token a byte, {batches} = {sum(spec.batches)} tokens")
    return [*lines, note] if note else lines
