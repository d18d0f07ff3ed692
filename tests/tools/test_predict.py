"""`ascend-moe predict`: its cost table, its calibration, its output."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import commands
import pytest

from ascend_moe.errors import ArgumentError
from ascend_moe.plan import Request
from ascend_moe.timed import calibration, report
from ascend_moe.timed.calibration import CALIBRATION, HELD_OUT, Compared, Point
from ascend_moe.timed.costs import KINDS, cost_table, fitted_names, known_socs, read_data
from ascend_moe.timed.world import timed_library

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import calibration_fit  # noqa: E402
import predict_page  # noqa: E402
import source_hash  # noqa: E402

SMALL = ["--ep", "2,4", "--bs", "4", "--hidden", "512", "-k", "2", "-e", "8", "--cores", "4"]


def test_every_figure_has_a_value_and_a_source() -> None:
    names = set(timed_library().am_timed_cost_names().decode().split())
    assert {"Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4"} < set(known_socs())
    for soc in known_socs():
        table = cost_table(soc)
        assert set(table) == names
        for one in table.values():
            assert one.kind in KINDS, one
            assert len(one.source) > 10, one
            assert one.value >= 0, one


def test_no_more_free_parameters_than_half_of_the_points() -> None:
    assert 2 * len(fitted_names()) <= len(calibration.points(calibration.CALIBRATION))
    with pytest.raises(ArgumentError, match=r"3 fitted figures .* for 4 calibration points"):
        calibration_fit.calibrate(["launch_ns", "scalar_scale", "link_share"])
    fitted, priors = read_data("calibration.json")["fitted"], calibration_fit.priors()
    assert set(fitted) == set(fitted_names())
    for soc in known_socs():
        table = {name: one.value for name, one in cost_table(soc).items()}
        assert {name: table[name] for name in priors} == priors | fitted


def test_the_split_is_older_than_the_fit() -> None:
    """In a checkout: the roles of the points are those of the commit that brought them."""
    data = Path(calibration.__file__).parents[1] / "data"

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(data), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    first = git("log", "--diff-filter=A", "--format=%H", "--", "published_times.json")
    if not first or git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("no history here")
    then = json.loads(git("show", f"{first}:./published_times.json"))["points"]
    now = read_data("published_times.json")["points"]
    assert {one["id"]: (one["role"], one["us"]) for one in then} == {
        one["id"]: (one["role"], one["us"]) for one in now
    }


def test_held_out_times_are_within_the_limit() -> None:
    compared = calibration.compare(calibration.points(calibration.HELD_OUT))
    assert len(compared) >= 4
    known = read_data("calibration.json")["errors"]
    roles = ("calibration", "held-out", "shown")
    assert set(known) == {point.id for point in calibration.points(*roles)}
    assert all(0 < error < 0.25 for error in calibration.known_errors())
    for one in compared:
        assert abs(one.error) <= calibration.held_out_limit() <= 0.25, one
        assert one.error == pytest.approx(known[one.point.id], abs=0.002)


def test_the_fitted_pair_is_the_plausible_one_with_the_least_calibration_error() -> None:
    tried = calibration_fit.tried()
    assert [list(one.values) for one in tried] == read_data("soc_costs.json")["pairs"]
    chosen = calibration_fit.choose(tried)
    known = read_data("calibration.json")
    assert chosen.values == known["fitted"]
    assert chosen.errors == known["errors"]
    assert chosen.plausible
    assert all(chosen.spread(CALIBRATION) <= one.spread(CALIBRATION) for one in tried if one.plausible)
    assert not all(one.plausible for one in tried)


def off_by(error: float) -> Callable[..., list[Compared]]:
    """In place of ``calibration.compare``: all of the model's times are off by this much."""

    def compare(chosen: list[Point], costs: object = None) -> list[Compared]:
        return [Compared(point, point.us * (1 + error)) for point in chosen]

    return compare


@pytest.mark.parametrize(("error", "code"), [(0.2, 0), (-0.2, 0), (0.3, 1), (-0.3, 1)])
def test_check_judges_the_held_out_times(
    error: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "compare", off_by(error))
    assert commands.run("predict", ["--check"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(calibration.points("calibration", "held-out", "shown"))
    assert f"off by {abs(error):.1%} at most, {'over' if code else 'within'} the limit" in lines[-1]
    assert commands.run("predict", ["--check", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["held_out_error"] == pytest.approx(abs(error))
    assert {one["id"] for one in found["points"]} == set(read_data("calibration.json")["errors"])


def test_the_page_is_written_from_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = Request(ranks=2, experts=8, topk=2, hidden=512, batch=4, quant=True, cores=4)
    for name, value in (("CALL", small), ("WORLDS", [2, 4]), ("BATCHES", [2]), ("SHOWN", 2)):
        monkeypatch.setattr(predict_page, name, value)
    monkeypatch.setattr(calibration, "compare", off_by(0.1))
    predict_page.write(tmp_path)
    page = (tmp_path / "predict.md").read_text()
    assert page.startswith("# Predicted times on NPUs\n\n**Model, not a measurement")
    for each in report.predictions(small, [2, 4], ["window", "direct"]):
        assert (
            f"| {each.request.ranks} | {each.algorithm} | {each.dispatch_us:.1f} | {each.combine_us:.1f} |"
            in page
        )
    for point in calibration.points():
        assert point.source in page
    for one in cost_table("Ascend910_9391").values():
        assert one.source in page
    for fit in calibration_fit.tried():
        assert f"{fit.largest(HELD_OUT):.1%}" in page
    assert ET.parse(tmp_path / "predict" / "a3.svg").getroot().tag.endswith("svg")


@pytest.mark.nightly
def test_the_page_is_of_these_sources() -> None:
    """A change of the kernels or of the engine changes times: tools/predict_page.py writes them anew."""
    page = (ROOT / "docs" / "predict.md").read_text()
    noted = predict_page.noted_hash(page)
    assert len(noted) == 12 and source_hash.source_hash(ROOT).startswith(noted)


def test_text_json_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert commands.run("predict", [*SMALL, "--algorithm", "window,direct"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Ascend910_9391, 4 cores, BS 4, H 512, K 2, E 8")
    assert lines[1].startswith("model, not a measurement: fitted to published times")
    assert "on held-out ones" in lines[1] and any("AlltoAllDispatch" in line for line in lines)
    rows = [line.split() for line in lines if line.split()[1:2] in (["window"], ["direct"])]
    assert [row[0] for row in rows] == ["2", "2", "4", "4"]
    picture = tmp_path / "steps.svg"
    assert commands.run("predict", [*SMALL, "--algorithm", "window", "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["note"].startswith("model, not a measurement")
    assert found["held_out_error"] == calibration.known_errors()[1]
    assert [one["ep"] for one in found["predictions"]] == [2, 4]
    for one in found["predictions"]:
        for op in (one["dispatch"], one["combine"]):
            assert sum(op["phases_us"].values()) == pytest.approx(op["us"], rel=1e-3)
    drawn = "".join(ET.parse(picture).getroot().itertext())
    assert "model, not a measurement" in drawn and "LocalWindowCopy" in drawn


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "ring"], "algorithm is 'ring'; need one of cann-style, window, direct, zero-copy"),
        (["--soc", "Ascend310"], "Ascend310"),
        (["--ep", "eight"], "--ep eight is no list of whole numbers"),
        (["--ep", "3"], "moe_expert_num"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("predict", [*SMALL, *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("ascend-moe predict: ")
    assert message in said.err and said.err.count("\n") == 1
