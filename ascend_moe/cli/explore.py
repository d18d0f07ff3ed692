"""`ascend-moe explore`: schedules of the kernels on the checked engine, with a table of the results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ascend_moe._text import POLICIES, USUAL_CASE, show
from ascend_moe.cli.options import MAX_SEED, Json, bad, bar, started
from ascend_moe.errors import need_one_of

if TYPE_CHECKING:
    from ascend_moe.explore import Options, Program, Result

_STORES = ("both", "fifo", "unordered")


app = typer.Typer()


@app.command("explore")
def explore_command(
    case: Annotated[
        str | None, typer.Option("--case", help=f"Case to run, like {USUAL_CASE}; default: random cases.")
    ] = None,
    schedules: Annotated[int, typer.Option("--schedules", "-n", min=1, help="Number of schedules.")] = 2000,
    seed: Annotated[int, typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of the first case and schedule.")] = 0,
    policy: Annotated[
        str, typer.Option("--policy", metavar="|".join(POLICIES), help="How to choose schedules.")
    ] = "mixed",
    stores: Annotated[
        str, typer.Option("--stores", metavar="|".join(_STORES), help="Order in which stores of a core arrive.")
    ] = "both",
    preemptions: Annotated[
        int, typer.Option("--preemptions", min=0, max=3, help="With --policy exhaustive: core switches per schedule.")
    ] = 1,
    replay: Annotated[
        str | None, typer.Option("--replay", metavar="AT:CHOICE,…", help="Replay the choices of one schedule.")
    ] = None,
    shorten: Annotated[
        bool, typer.Option("--shrink/--no-shrink", help="Search for the shortest schedule with the same finding.")
    ] = True,
    as_json: Json = "",
) -> None:
    """Search many schedules for races, missing synchronization, hangs and wrong results.

    Exit code 0: nothing found. 1: a finding; the last line is the command that repeats it. 2: wrong options.
    """
    need_one_of("policy", policy, POLICIES)
    need_one_of("stores", stores, _STORES)
    from ascend_moe.explore import Options, Program, exhaustive, parse, shrink

    chosen = parse(case) if case is not None else None
    options = Options(policy=policy, store_order=stores)
    if replay is not None:
        kind = "exhaustive" if policy == "exhaustive" else "replay"
        options = replace(options, policy=kind, choices=_choices(replay))
        schedules = 1
    if chosen is None and (policy in ("replay", "exhaustive") or replay is not None):
        bad("--replay" if replay else "--policy", "needs one case: give --case")
    if policy == "exhaustive" and replay is None:
        result = exhaustive(chosen or Program(), preemptions, limit=schedules)
    else:
        result = _run(chosen, schedules, seed, options)
    if result.finding is not None and replay is None and shorten:
        result.finding = shrink(result.finding)
    _print(result, as_json)
    raise typer.Exit(1 if result.finding is not None else 0)


def _run(case: Program | None, schedules: int, seed: int, options: Options) -> Result:
    from ascend_moe import explore

    started("explore", f"{schedules} schedules")
    if case is not None:
        return explore.explore(case, schedules, seed, options)
    with bar("schedules") as advance:
        return explore.campaign(
            None, schedules, seed, options, progress=lambda found: advance("schedules", found.schedules, schedules)
        )


_MAX_CHOICES = 10_000_000  # of a replay


def _choices(text: str) -> tuple[int, ...]:
    try:
        pairs = [tuple(map(int, word.split(":"))) for word in text.split(",")]
        if not all(0 <= at < _MAX_CHOICES and 0 <= choice < 2**16 for at, choice in pairs):
            raise ValueError
        choices = [0] * (max(at for at, _ in pairs) + 1)
        for at, choice in pairs:
            choices[at] = choice
    except ValueError:
        rule = f"need AT below {_MAX_CHOICES}, CHOICE below {2**16}"
        bad("--replay", f"{text!r} is no list of AT:CHOICE, like 12:1,40:2; {rule}")
    return tuple(choices)


def _print(result: Result, as_json: str) -> None:
    from ascend_moe.explore import REACHED

    found = result.finding
    counts = ("schedules", "cases", "distinct", "steps", "instructions")
    values = {name: getattr(result, name) for name in counts} | {
        "seconds": round(result.seconds, 3),
        "polls": {place: {"waiting": w, "ready": r} for place, (w, r) in result.polls.items()},
        "reached": {name: result.reached[name] for name in REACHED},
        "finding": None,
    }
    if found is not None:
        values["finding"] = {name: getattr(found, name) for name in ("kind", "message", "seed")}
        values["finding"] |= {"case": str(found.case), "command": found.command()}
    show(values, as_json, lambda: _print_text(result))


def _print_text(result: Result) -> None:
    from ascend_moe.explore import REACHED

    console, found = Console(), result.finding
    rate = result.schedules / result.seconds if result.seconds else 0.0
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (
        ("schedules", f"{result.schedules} of {result.cases} cases, {result.distinct} distinct traces"),
        ("time", f"{result.seconds:.1f} s, {rate:.0f} schedules/s"),
        ("instructions", f"{result.instructions}, {result.steps} scheduling steps"),
        ("again", ", ".join(f"{name} {result.reached[name]}" for name in REACHED) + " (cases)"),
        *((f"poll {place}", f"{w} times waiting, {r} times ready") for place, (w, r) in result.polls.items()),
    ):
        table.add_row(name, value)
    console.print(table)
    if found is None:
        console.print("no finding", style="bold green")
        return
    console.print(found.message, style="bold red", markup=False, soft_wrap=True)
    switches = sum(1 for choice in found.choices if choice)
    console.print(f"{switches} switches from the default schedule; repeat it with", markup=False)
    console.print(found.command(), markup=False, soft_wrap=True)
