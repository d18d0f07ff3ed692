"""`ascend-moe predict`: its cost table, its calibration, its output."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from calibration_fit import Fit  # noqa: E402

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
    fitted = read_data("calibration.json")["fitted"]
    assert set(fitted) == set(fitted_names())
    priors = calibration_fit.priors()
    for soc in known_socs():
        table = {name: one.value for name, one in cost_table(soc).items()}
        assert {name: table[name] for name in priors} == priors | fitted


def test_points_say_where_they_are_from() -> None:
    roles = {point.role for point in calibration.points()}
    assert roles == {"calibration", "held-out", "shown", "not used"}
    for point in calibration.points():
        assert point.source, point
        assert point.trust in ("read", "from memory", "shape unsure")
        assert point.why, point
        assert point.role != calibration.CALIBRATION or point.trust == "read"


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
    for one in compared:
        assert abs(one.error) <= calibration.held_out_limit() <= 0.25, one
        assert one.error == pytest.approx(known[one.point.id], abs=0.002)


def test_known_errors_are_of_all_points() -> None:
    roles = ("calibration", "held-out", "shown")
    assert set(read_data("calibration.json")["errors"]) == {point.id for point in calibration.points(*roles)}
    fitted, held_out = calibration.known_errors()
    assert 0 < fitted < 0.25
    assert 0 < held_out < 0.25


def test_a_fit_may_not_have_more_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["launch_ns", "scalar_scale", "link_share"]
    with pytest.raises(ArgumentError, match=r"3 fitted figures .* for 4 calibration points"):
        calibration_fit.calibrate(names)
    monkeypatch.setattr(calibration_fit, "fitted_names", lambda: names)
    with pytest.raises(ArgumentError, match=r"3 fitted figures .* for 4 calibration points"):
        calibration_fit.calibrate()


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


def test_held_out_errors_choose_nothing() -> None:
    """Swapping them between two fits leaves the choice as it was."""

    def made(scale: float, fitted: float, held_out: float) -> Fit:
        errors = dict.fromkeys((point.id for point in calibration.points(CALIBRATION)), fitted)
        errors |= dict.fromkeys((point.id for point in calibration.points(HELD_OUT)), held_out)
        return Fit({"scalar_scale": scale}, errors)

    good, bad, absurd = made(2.0, 0.01, 0.24), made(3.0, 0.02, 0.0), made(99.0, 0.0, 0.0)
    assert calibration_fit.choose([bad, absurd, good]) is good
    assert good.largest(HELD_OUT) == 0.24


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


def test_the_fit_finds_what_made_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a model whose answer is known: times that are linear in the free parameters."""

    def compare(chosen: list[Point], costs: Mapping[str, float]) -> list[Compared]:
        def us(point: Point, launch: float, scale: float) -> float:
            return launch / 1e3 + scale * (point.ep + (40 if point.op == "dispatch" else 9))

        return [
            Compared(
                replace(point, us=us(point, 12_300, 1.5)),
                us(point, costs["launch_ns"], costs["scalar_scale"]),
            )
            for point in chosen
        ]

    monkeypatch.setattr(calibration, "compare", compare)
    found = calibration_fit.calibrate(["launch_ns", "scalar_scale"])
    assert found == {"launch_ns": 12_300, "scalar_scale": 1.5}


def test_a_step_that_goes_too_far_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that grow faster than their slope at the start says: whole steps alone would swing for ever."""

    def compare(chosen: list[Point], costs: Mapping[str, float]) -> list[Compared]:
        off = math.atan(8 * (costs["scalar_scale"] - 1.2))
        return [Compared(point, point.us * (1 + off)) for point in chosen]

    monkeypatch.setattr(calibration, "compare", compare)
    assert calibration_fit.calibrate(["scalar_scale"]) == {"scalar_scale": pytest.approx(1.2, abs=0.01)}


def test_a_fit_is_written_to_the_data_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = Path(calibration.__file__).parents[1] / "data"
    shutil.copy(data / "soc_costs.json", tmp_path)
    monkeypatch.setattr(calibration, "compare", off_by(0.125))
    fitted = {"launch_ns": 1234.0, "scalar_scale": 2.5}
    calibration_fit.write(fitted, tmp_path)
    before, after = (json.loads((folder / "soc_costs.json").read_text()) for folder in (data, tmp_path))
    for series, figures in after["series"].items():
        for name, one in figures.items():
            assert one["value"] == fitted.get(name, before["series"][series][name]["value"])
            assert one["source"] == before["series"][series][name]["source"]
    written = json.loads((tmp_path / "calibration.json").read_text())
    assert written["fitted"] == fitted
    assert set(written["errors"].values()) == {0.125}
    assert [list(one["values"]) for one in written["tried"]] == read_data("soc_costs.json")["pairs"]


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


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("predict", [*SMALL, "--algorithm", "window,direct"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Ascend910_9391, 4 cores, BS 4, H 512, K 2, E 8")
    assert lines[1].startswith("model, not a measurement: fitted to published times")
    assert "on held-out ones" in lines[1]
    rows = [line.split() for line in lines if line.split()[1:2] in (["window"], ["direct"])]
    assert [row[0] for row in rows] == ["2", "2", "4", "4"]
    assert any("AlltoAllDispatch" in line for line in lines)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("predict", [*SMALL, "--algorithm", "window", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["note"].startswith("model, not a measurement")
    assert found["held_out_error"] == calibration.known_errors()[1]
    assert [one["ep"] for one in found["predictions"]] == [2, 4]
    for one in found["predictions"]:
        for op in (one["dispatch"], one["combine"]):
            assert sum(op["phases_us"].values()) == pytest.approx(op["us"], rel=1e-3)


def test_the_picture_of_the_page(tmp_path: Path) -> None:
    small = Request(ranks=2, experts=8, topk=2, hidden=512, batch=4, cores=4)
    predict_page.draw(report.predictions(small, [2], ["window"]), tmp_path / "steps.svg")
    drawn = "".join(ET.parse(tmp_path / "steps.svg").getroot().itertext())
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
def test_wrong_options(words: list[str], message: str) -> None:
    command = [sys.executable, "-m", "ascend_moe", "predict", *SMALL, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("ascend-moe predict: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
