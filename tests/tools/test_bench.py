"""The benchmark's numbers, tables, pictures and rules, from marks that were made up. Starts no process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import bench_runs
import numpy as np
import pytest
import torch

from ascend_moe.bench import bounds, cases, check, plots, report
from ascend_moe.bench.cases import Case, matrix
from ascend_moe.bench.methods import LIMIT, METHODS, Arrived, chosen
from ascend_moe.bench.results import SCHEMA, evaluate, ratio, spans_us, spread, times
from ascend_moe.errors import ArgumentError
from ascend_moe.native.library import native_source_root

TINY = Case("tiny", world=2, batch=4, hidden=64, topk=2, experts=8)


# ---- statistics ----


def test_spans_go_from_the_first_begin_to_the_last_end() -> None:
    begins = [[1000, 5000], [3000, 4000]]
    ends = [[2000, 9000], [8000, 6000]]
    assert spans_us(begins, ends).tolist() == [7.0, 5.0]


def test_times_are_by_half_and_their_sum_is_the_round_trip() -> None:
    ranks = [[(0, 10_000, 50_000, 51_000)], [(5_000, 20_000, 50_500, 53_000)]]
    one = times(ranks)
    assert (one.dispatch.tolist(), one.combine.tolist()) == ([20.0], [3.0])
    assert one.round_trip.tolist() == [23.0]


def test_spread_of_known_numbers() -> None:
    one = spread(list(range(1, 102)))
    assert (one.p10, one.p50, one.p90, one.n) == (11.0, 51.0, 91.0, 101)
    assert one.noisy and not spread([10.0] * 9).noisy
    assert spread([]).n == 0 and np.isnan(spread([]).p50)


def test_ratios_are_taken_iteration_by_iteration() -> None:
    """Load that doubles both on some iterations leaves the ratio alone; the ratio of medians would too, but
    not when it hits different halves."""
    slow = np.array([1.0, 2.0, 1.0, 2.0, 1.0])
    one = ratio(6.0 * slow, 3.0 * slow)
    assert (one.p10, one.p50, one.p90) == (2.0, 2.0, 2.0)


# ---- cases and data ----


def test_matrix_is_ordered_by_ranks() -> None:
    made = matrix(["small", "qwen3"], [4, 2], [8, 32])
    assert [case.world for case in made] == [2] * 4 + [4] * 4
    assert {(c.preset, c.hidden, c.topk, c.experts) for c in made} == {
        ("small", 2048, 6, 64),
        ("qwen3", 4096, 8, 128),
    }


def test_sweeps() -> None:
    assert [case.batch for case in matrix(["small"], [2], [7], sweep="tokens")][-1] == 512
    assert [case.world for case in matrix(["small"], [3], [7], sweep="ranks")] == [1, 2, 4, 8]
    assert [case.hidden for case in matrix(["small"], [2], [7], sweep="hidden")][::7] == [1024, 8192]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("preset", {"presets": ["gpt"]}),
        ("ranks", {"worlds": [3]}),
        ("bs", {"batches": [0]}),
        ("skew", {"skew": "steep"}),
        ("quant", {"quant": "int4"}),
        ("dtype", {"dtype": "fp8"}),
        ("sweep", {"sweep": "time"}),
    ],
)
def test_cases_that_are_none(argument: str, words: dict[str, object]) -> None:
    given = {"presets": ["small"], "worlds": [2], "batches": [8], **words}
    with pytest.raises(ArgumentError, match=argument) as error:
        matrix(**given)  # type: ignore[arg-type]
    assert error.value.argument == argument


@pytest.mark.parametrize("skew", ["uniform", "zipf", "hot"])
def test_routing_is_legal_fresh_and_skewed(skew: str) -> None:
    case = replace(TINY, batch=64, skew=skew, topk=3)
    one, again, other = (cases.inputs(case, 1, entry) for entry in (0, 0, 1))
    assert torch.equal(one.x, again.x) and torch.equal(one.expert_ids, again.expert_ids)
    assert not torch.equal(one.expert_ids, other.expert_ids)
    ids = one.expert_ids.sort(1).values
    assert bool((ids[:, 1:] > ids[:, :-1]).all()) and int(ids.min()) >= 0 and int(ids.max()) < case.experts
    share = float((one.expert_ids == 0).float().mean() * case.topk)  # of the tokens
    low, high = {"uniform": (0.15, 0.6), "zipf": (0.6, 1.0), "hot": (1.0, 1.0)}[skew]
    assert low <= share <= high


# ---- correctness ----


def _arrived() -> tuple[Arrived, check.Expected]:
    want = check.expected(TINY, 0, 0)
    result = want.dispatched
    return Arrived(result.expand_x.clone(), None, result.expert_token_nums.clone()), want


def test_wrong_rows_are_found() -> None:
    arrived, want = _arrived()
    assert check.dispatch_fault(arrived, want) == ""
    arrived.rows[[0, 1]] = arrived.rows[[1, 0]]
    assert "row 0" in check.dispatch_fault(arrived, want)
    arrived.counts[0] += 1
    assert "rows per expert" in check.dispatch_fault(arrived, want)


def test_sums_may_differ_by_rounding_and_no_more() -> None:
    want = _arrived()[1]
    assert check.combine_fault(want.sums, want) == ("", True)
    neighbour = (want.sums.view(torch.int16) + 1).view(torch.bfloat16)
    assert check.combine_fault(neighbour, want) == ("", False)
    for wrong in (want.sums * 1.05, torch.full_like(want.sums, float("nan")), want.sums.roll(1, 0)):
        text, exact = check.combine_fault(wrong, want)
        assert "differs at token" in text and not exact
    assert "is (4, 64)" in check.combine_fault(want.sums.float(), want)[0]


# ---- results, JSON, tables, pictures ----


def test_evaluation_of_known_marks() -> None:
    one = bench_runs.result(matrix(["small"], [2], [32])[0])
    assert one.limit == "limit-memcpy"
    row = one.row("window")
    assert row is not None
    assert (row.round_trip.p50, row.to_limit.p50, row.p10_to_limit, row.first_us) == (100.0, 5.0, 5.0, 300.0)
    assert row.faster["mpi-a2a-tuned"].p50 == 2.0
    assert row.gb_per_s == pytest.approx(2 * 32 * 6 * 2048 * 2 / 100e-6 / 1e9)
    best = one.best_peer()
    assert best is not None and best.name == "mpi-a2a-tuned"
    assert not one.oversubscribed and bench_runs.result(one.case, cores=1).oversubscribed
    assert report.headline(bench_runs.result(one.case, cores=1)).endswith("(2 ranks on 1 cores)")


def test_json_has_every_number() -> None:
    values = json.loads(json.dumps(bench_runs.run().as_dict(), allow_nan=False))
    assert values["schema"] == SCHEMA and set(values) == {"schema", "about", "cases"}
    first = values["cases"][0]
    assert {"case", "rows", "limit", "missing", "switched_out", "page_faults", "too_noisy"} <= set(first)
    direct = next(row for row in first["rows"] if row["name"] == "direct")
    assert set(direct["round_trip"]) == {"p10", "p50", "p90", "n"}
    assert direct["faster"]["mpi-a2a-tuned"]["p50"] == 5.0
    assert len(direct["samples"]["dispatch"]) == 8


def test_more_than_half_noisy_rows_are_too_noisy() -> None:
    case = matrix(["small"], [2], [8])[0]
    wild = bench_runs.marks(case, bench_runs.TIMES_US, jitter=2.0)
    calm = bench_runs.marks(case, bench_runs.TIMES_US)

    def with_wild(names: list[str]) -> bool:
        for rank, noisy in zip(calm, wild, strict=True):
            rank.marks.update({name: noisy.marks[name] for name in names})
        return evaluate(case, calm, 0.0, 2).too_noisy

    names = list(bench_runs.TIMES_US)
    assert not with_wild(names[:4])  # of nine
    assert with_wild(names[:5])


def test_headline_claims_ratios_unless_the_run_is_noisy() -> None:
    case = matrix(["small"], [2], [32])[0]
    calm, wild = bench_runs.result(case), bench_runs.result(case, jitter=2.0)
    assert "direct 2.00 x (2.00..2.00) the limit" in report.headline(calm)
    assert "5.0 x faster than mpi-a2a-tuned" in report.headline(calm)
    slow = bench_runs.result(case, {**bench_runs.TIMES_US, "window": (200, 200)})
    assert "window 20.0 x (20.0..20.0) the limit, 2.0 x slower than mpi-a2a-tuned" in report.headline(slow)
    assert wild.too_noisy and "no ratios claimed" in report.headline(wild)
    assert "2.00 x" in report.headline(wild, force=True) and "(noisy)" in report.headline(wild, force=True)


def test_the_report_shows_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    report.show(bench_runs.run(), Console(width=200), force=False)
    shown = capsys.readouterr().out
    for word in (*bench_runs.TIMES_US, "a CPU", "gloo-ag-rs left out: not there"):
        assert word in shown


def test_a_busy_machine_is_told() -> None:
    assert not any("busy" in line for line in report.about_lines(bench_runs.ABOUT))
    assert any("busy" in line for line in report.about_lines({**bench_runs.ABOUT, "load_before": 1.5}))


@pytest.mark.parametrize("sweep", ["tokens", "ranks", "hidden"])
def test_pictures_are_drawn(sweep: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = plots.draw(bench_runs.run(sweep), tmp_path / "new", sweep)
    assert [path.name for path in paths] == ["roofline.svg", f"scaling_{sweep}.svg"]
    for path in paths:
        text = path.read_text()
        assert "<svg" in text and "direct" in text and 5_000 < len(text) < 200_000


# ---- what make bench-check holds ----


def _judged(times_us: dict[str, tuple[float, float]], jitter: float = 0.0) -> dict[str, bool | None]:
    result = bench_runs.result(bounds.cases()[0], times_us, jitter)
    return {verdict.bound.text: verdict.ok for verdict in bounds.judge(result)}


def test_the_check_passes_what_is_fast_enough_and_only_that() -> None:
    assert set(_judged(bench_runs.TIMES_US).values()) == {True}
    slower = {**bench_runs.TIMES_US, "direct": (32, 32)}
    assert _judged(slower)["direct: at most 3 x the limit"] is False
    near = {**bench_runs.TIMES_US, "gloo-a2a-tuned": (90, 90)}
    assert _judged(near)["window: at least 2 x faster than gloo-a2a-tuned"] is False
    assert set(_judged(bench_runs.TIMES_US, jitter=2.0).values()) == {False}, "noise proves nothing"


def test_the_check_needs_ours_and_gloo_but_not_mpi() -> None:
    without = {name: us for name, us in bench_runs.TIMES_US.items() if name != "mpi-a2a-tuned"}
    assert [ok for ok in _judged(without).values() if ok is not True] == [None]
    without.pop("direct")
    assert list(_judged(without).values()).count(False) == 3


def test_the_check_tries_three_times_and_only_what_failed() -> None:
    tries: list[list[str]] = []

    def measure(cases):  # the second case is fast enough at the third try
        tries.append([case.name for case in cases])
        slow = {**bench_runs.TIMES_US, "direct": (32, 32)}
        second = bounds.cases()[1]
        picked = [slow if case == second and len(tries) < 3 else None for case in cases]
        run = bench_runs.run()
        run.cases = [bench_runs.result(case, us) for case, us in zip(cases, picked, strict=True)]
        return run

    said: list[str] = []
    assert bounds.check(measure, said.append)
    assert [len(one) for one in tries] == [3, 1, 1]
    assert sum("FAIL" in line for line in said) == 2 and "= 3.20" in "\n".join(said)


# ---- the page ----


def test_the_page_names_methods_and_bounds() -> None:
    path = native_source_root() / "docs" / "performance.md"
    if not path.is_file():
        pytest.skip("an installed package has no docs")
    text = path.read_text()
    for name in METHODS:
        assert f"`{name}`" in text
    for bound in bounds.BOUNDS:
        word, against = ("most", "the limit") if bound.against == LIMIT else ("least", bound.against)
        assert f"| {bound.method} | {against} | at {word} {bound.times:g} x |" in text


# ---- options ----


def test_methods_by_name_and_group() -> None:
    assert chosen("auto") == list(METHODS)
    assert chosen("ours")[-1] == "window" and "gloo-a2a" not in chosen("ours")
    assert chosen("gloo-a2a")[:3] == ["limit-memcpy", "limit-nontemporal", "limit-ub"]
    with pytest.raises(ArgumentError, match="nccl"):
        chosen("ours,nccl")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--preset", "gpt"], "preset is 'gpt'"),
        (["--bs", "8,x"], "bs is '8,x'"),
        (["--bs", "-3"], "bs is '-3'"),
        (["--ranks", "3"], "divide the 256 experts"),
        (["--methods", "nccl"], "methods has 'nccl'"),
        (["--sweep", "time"], "sweep is 'time'"),
        (["--skew", "steep"], "skew is 'steep'"),
        (["--json", "/nowhere/at/all.json"], "no folder"),
        (["--iterations", "0"], "--iterations"),
    ],
)
def test_wrong_options_end_before_anything_starts(options: list[str], text: str) -> None:
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    from ascend_moe.cli.bench import bench

    app = typer.Typer()
    app.command()(bench)
    done = CliRunner().invoke(app, options, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 2, done.output
    assert text in " ".join(done.output.replace("│", " ").split())
