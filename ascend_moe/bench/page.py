"""Measures what docs/performance.md shows, and writes its tables and pictures: ``make bench-docs``.

``python -m ascend_moe.bench.page DOCS`` measures; ``--quick``: with a few iterations, to try it out. With
``--again`` it only writes the page anew from the numbers of the last time, docs/performance/runs.json. No
number on the page is typed by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ascend_moe.bench import gate, plots, published, report, results_json, steps
from ascend_moe.bench.cases import SWEEPS, Case, matrix
from ascend_moe.bench.methods import LIMIT, METHODS, PEER, chosen
from ascend_moe.bench.results import Run
from ascend_moe.bench.runner import run

_QUICK = 4  # iterations
_PROFILED = 30  # rounds


@dataclass(frozen=True)
class Part:
    """One run of the page: its cases, methods and iterations."""

    cases: list[Case]
    methods: list[str]
    iterations: int


def parts() -> dict[str, Part]:
    """All runs of the page by name."""
    every = chosen("auto")
    tuned = [name for name in every if METHODS[name].kind != PEER or METHODS[name].tuned_for_table]
    main = matrix(["deepseek-v3"], [2], [8, 32, 128]) + matrix(["qwen3"], [2], [32])
    main += matrix(["small"], [2], [8, 32])
    many = matrix(["deepseek-v3"], [4, 8], [8, 32])
    other = [one for skew in ("zipf", "hot") for one in matrix(["deepseek-v3"], [2], [32], skew=skew)]
    other += matrix(["deepseek-v3"], [2], [32], quant="int8")
    return {
        "main": Part(main, every, 100),
        "many ranks": Part(many, every, 40),
        "skewed and int8": Part(other, every, 60),
        "tokens": Part(matrix(["deepseek-v3"], [2], [], sweep="tokens"), tuned, 30),
        "ranks": Part(matrix(["deepseek-v3"], [], [16], sweep="ranks"), tuned, 40),
        "hidden": Part(matrix(["deepseek-v3"], [2], [32], sweep="hidden"), tuned, 40),
    }


def measure(say: Callable[[str], None], quick: bool) -> dict[str, Run]:
    """Every part, one after the other."""
    found = {}
    for name, part in parts().items():
        say(f"{name}: {len(part.cases)} cases")
        iterations = _QUICK if quick else part.iterations
        limits = name in ("main", "many ranks")
        found[name] = run(part.cases, part.methods, iterations, with_limits=limits, progress=_quiet)
    return found


def _quiet(case: Case, done: int) -> None:
    pass


def write(docs: Path, runs: dict[str, Run], profiles: Sequence[steps.Profile] = ()) -> None:
    """The pictures and, between the marks of performance.md, the tables."""
    folder = docs / "performance"
    plots.roofline(runs["main"], _made(folder) / "roofline.svg")
    for sweep in SWEEPS:
        plots.scaling(runs[sweep], sweep, folder / f"scaling_{sweep}.svg")
    path = docs / "performance.md"
    path.write_text(fill(path.read_text(), pieces(runs, profiles)))


def pieces(runs: dict[str, Run], profiles: Sequence[steps.Profile] = ()) -> dict[str, str]:
    """Mark -> Markdown. ``rules`` and ``published`` come from the code alone, the others from the runs."""
    found = static_pieces()
    for mark, name in (("main", "main"), ("many", "many ranks"), ("skewed", "skewed and int8")):
        if name in runs:
            found[mark] = "\n\n".join(
                _case_markdown(runs[name], number) for number in range(len(runs[name].cases))
            )
    for sweep in SWEEPS:
        if sweep in runs:
            found[f"growth {sweep}"] = _growth(runs[sweep], sweep)
    if profiles:
        found["steps"] = "\n\n".join(
            f"**{one.case}, {one.algorithm}, {one.op}: {one.us:.0f} µs**\n\n{markdown(steps.table(one))}"
            for one in profiles
        )
    if "main" in runs:
        one = runs["main"]
        found["about"] = "\n".join(f"- {line}" for line in report.about_lines(one.about))
        found["limits"] = "\n\n".join(_limits_markdown(one, number) for number in range(len(one.limits)))
        found["headlines"] = "\n".join(f"- {report.headline(case)}" for case in one.cases)
        found["judged"] = _judged(one)
    return found


def static_pieces() -> dict[str, str]:
    """What does not depend on a run."""
    rules = [["method", "against", "aim", "`make bench-check` holds it to"]]
    for rule in gate.RULES:
        word, held = ("at most", rule.most) if rule.most else ("at least", rule.least)
        rules.append([rule.method, rule.against, f"{word} {rule.aim or held:g} x", f"{word} {held:g} x"])
    table = [["W, H, K, E, BS", "limit", published.MPI_TUNED, published.GLOO_TUNED]]
    for shape, row in published.TABLE.items():
        cells = [f"{us:g} ({us / row.limit:.1f} x)" for us in (row.mpi_tuned, row.gloo_tuned)]
        table.append([", ".join(str(n) for n in shape), f"{row.limit:g}", *cells])
    return {"rules": markdown(rules), "published": markdown(table)}


def _case_markdown(one: Run, number: int) -> str:
    case = one.cases[number]
    lines = "\n".join(f"- {line}" for line in report.notes(case))
    return f"**{report.case_title(case)}**\n\n{markdown(report.case_table(case))}\n\n{lines}"


def _growth(one: Run, sweep: str) -> str:
    """Ratios to the limit along a sweep: level or falling ones grow no faster than the limit."""
    label, at = plots.AXES[sweep]
    cases = sorted(one.cases, key=at)
    rows = [[f"÷ limit at {label}", *(str(at(case)) for case in cases)]]
    for name in METHODS:
        cells = [case.row(name) for case in cases]
        if METHODS[name].kind != LIMIT and all(cells):
            rows.append([name, *(f"{row.to_limit.p50:.2f}" for row in cells if row)])
    limits = [case.row(case.limit) for case in cases]
    rows.append(["the limit, µs", *(f"{row.round_trip.p50:.0f}" for row in limits if row)])
    return markdown(rows)


def _limits_markdown(one: Run, number: int) -> str:
    title, rows = report.limit_table(one.limits[number])
    return f"**{title}**\n\n{markdown(rows)}"


def _judged(one: Run) -> str:
    wanted = gate.cases()
    verdicts = [verdict for case in one.cases if case.case in wanted for verdict in gate.judge(case)]
    rows = [["case", "rule", "measured", "kept", "aim"]]
    for verdict in verdicts:
        value, aim = "", ""
        if verdict.value is not None:
            value = f"{verdict.value:.2f}"
            rule = verdict.rule
            aim = (
                "reached"
                if rule.reached(verdict.value)
                else f"**not**: {rule.aim or rule.most or rule.least:g}"
            )
        word = {True: "yes", False: "**no**", None: "not judged"}[verdict.ok]
        why = f": {verdict.why}" if verdict.why else ""
        rows.append([verdict.case, verdict.rule.text, value, word + why, aim])
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head, all columns but the first to the right."""
    safe = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = ["---", *["--:"] * (len(rows[0]) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [safe[0], rule, *safe[1:]])


def fill(text: str, given: dict[str, str]) -> str:
    """Puts each piece between its marks; pieces without marks, and marks without pieces, stay as they are."""
    for mark, piece in given.items():
        begin, end = f"<!-- measured: {mark} -->", f"<!-- end: {mark} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        text = re.sub(pattern, lambda _, new=f"{begin}\n{piece}\n{end}": new, text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read(numbers: Path) -> tuple[dict[str, Run], list[steps.Profile]]:
    """The runs and profiles of docs/performance/runs.json."""
    values = json.loads(numbers.read_text())
    runs = {name: results_json.load(one) for name, one in values["runs"].items()}
    return runs, [steps.Profile.of(one) for one in values["profiles"]]


def main(arguments: Sequence[str]) -> None:
    """See the module's docstring."""
    docs = Path(next(one for one in arguments if not one.startswith("-")))
    numbers = _made(docs / "performance") / "runs.json"
    if "--again" not in arguments:
        quick = "--quick" in arguments
        runs = measure(lambda line: print(line, file=sys.stderr), quick)
        profiles = steps.profiles(gate.cases(), _QUICK if quick else _PROFILED)
        kept = {
            "runs": {name: results_json.dump(one, samples=False) for name, one in runs.items()},
            "profiles": [one.as_dict() for one in profiles],
        }
        numbers.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    write(docs, *read(numbers))


if __name__ == "__main__":
    main(sys.argv[1:])
