"""`ascend-moe predict`: its cost table, its calibration, its output."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ascend_moe import calibration, predict_cli
from ascend_moe.errors import ArgumentError
from ascend_moe.soc_costs import KINDS, cost_table, fitted_names, known_socs, read_data
from ascend_moe.timed_world import timed_library

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
    for soc in known_socs():
        assert {name: cost_table(soc)[name].value for name in fitted} == fitted


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
    data = Path(predict_cli.__file__).parent / "data"

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
    monkeypatch.setattr(calibration, "fitted_names", lambda: ["launch_ns", "scalar_scale", "sync_ns"])
    with pytest.raises(ArgumentError, match=r"3 fitted figures .* for 4 calibration points"):
        calibration.calibrate()


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_cli.main([*SMALL, "--algorithm", "window,direct"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Ascend910_9391, 4 cores, BS 4, H 512, K 2, E 8")
    assert lines[1].startswith("model, not a measurement: fitted to published times")
    assert "on held-out ones" in lines[1]
    rows = [line.split() for line in lines if line.split()[1:2] in (["window"], ["direct"])]
    assert [row[0] for row in rows] == ["2", "2", "4", "4"]
    assert any("AlltoAllDispatch" in line for line in lines)


def test_json_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "steps.svg"
    assert predict_cli.main([*SMALL, "--algorithm", "window", "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["note"].startswith("model, not a measurement")
    assert found["held_out_error"] == calibration.known_errors()[1]
    assert [one["ep"] for one in found["predictions"]] == [2, 4]
    for one in found["predictions"]:
        for op in (one["dispatch"], one["combine"]):
            assert sum(op["phases_us"].values()) == pytest.approx(op["us"], rel=1e-3)
    drawn = "".join(ET.parse(picture).getroot().itertext())
    assert "model, not a measurement" in drawn
    assert "LocalWindowCopy" in drawn


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "ring"], "algorithm is 'ring'; need one of cann-style, window, direct, zero-copy"),
        (["--soc", "Ascend310"], "Ascend310"),
        (["--ep", "eight"], "--ep eight is no list of whole numbers"),
        (["--write", "."], "--write goes with --calibrate"),
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
