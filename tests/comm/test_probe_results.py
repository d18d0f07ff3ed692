"""What a bring-up leaves for later processes: its file, who may have written it, how old it is, and the variable."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ascend_moe import settings
from ascend_moe.errors import ArgumentError, AscendMoeError
from ascend_moe.native import probe_results
from ascend_moe.native.probe_results import ONE_SERVER, SEVERAL_SERVERS
from ascend_moe.ops.npu_communicator import LINKS
from ascend_moe.validate.probes import KERNEL_PROBES

SOC = "Ascend910_9391"
ALL = dict.fromkeys((probe.name for probe in KERNEL_PROBES), "PASS")
EVERY = frozenset(settings.PROVABLE)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ASCEND_MOE_PROVEN", raising=False)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    (tmp_path / "cann").mkdir()
    (tmp_path / "cann" / "version.info").write_text("Version=8.3.RC1\n")


def kept(topology: str = ONE_SERVER, ranks: int = 8, **changes: str) -> Path:
    return probe_results.write(probe_results.machine(SOC, topology), ranks, {**ALL, **changes})


def test_the_names_are_probes() -> None:
    assert EVERY and set(settings.PROVABLE) <= set(ALL)
    assert all(set(names) <= EVERY for names in probe_results.NEEDS.values())


def test_probe_results_count_for_their_soc_cann_topology_and_as_many_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe_results.proven(SOC, ONE_SERVER, 2) == frozenset(), "without any"
    assert kept().name == "Ascend910_9391-cann_8.3.RC1-one_server.json"
    assert probe_results.proven(SOC, ONE_SERVER, 8) == EVERY and probe_results.allows("direct", EVERY)
    for other in ((SOC, ONE_SERVER, 9), (SOC, SEVERAL_SERVERS, 8), ("Ascend910B3", ONE_SERVER, 8)):
        assert probe_results.proven(*other) == frozenset()
    (tmp_path / "cann" / "version.info").write_text("Version=8.5.0\n")
    assert probe_results.proven(SOC, ONE_SERVER, 8) == frozenset()
    (tmp_path / "cann" / "version.info").write_text("Version=8.3.RC1\n")
    monkeypatch.setenv("ASCEND_MOE_VNPU", "/somewhere")  # what the virtual NPU has shown is not the NPU's
    assert probe_results.proven(SOC, ONE_SERVER, 8) == frozenset()


def test_results_of_several_servers_count_for_one_where_it_has_none() -> None:
    several = kept(SEVERAL_SERVERS, 16)
    assert probe_results.proven(SOC, SEVERAL_SERVERS, 16) == probe_results.proven(SOC, ONE_SERVER, 16) == EVERY
    links = dict.fromkeys(ALL, LINKS[True]) | {"pull": LINKS[False]}  # a result holds for the links of its probe
    probe_results.write(probe_results.machine(SOC, SEVERAL_SERVERS), 16, ALL, links=links)
    found = probe_results.read(several)
    assert found is not None and found.links == links and "pull" in found.passed
    assert probe_results.proven(SOC, ONE_SERVER, 16) == EVERY - {"pull"}
    kept(ONE_SERVER, 16, pull="FAIL")
    assert "pull" not in probe_results.proven(SOC, ONE_SERVER, 16)
    assert probe_results.proven(SOC, SEVERAL_SERVERS, 16) == EVERY


@pytest.mark.parametrize("word", ["FAIL", "SKIPPED"])
def test_what_did_not_pass_is_not_proven(word: str) -> None:
    kept()
    kept(pull=word)  # in the place of the outcome before
    passed = probe_results.proven(SOC, ONE_SERVER, 8)
    assert passed == EVERY - {"pull"} and not probe_results.allows("direct", passed)
    assert "comm_alg auto is window (pull not passed)" in probe_results.about(
        probe_results.read(probe_results.files()[0])
    )


def test_the_umask_does_not_change_the_mode_of_results() -> None:
    before = os.umask(0o002)
    try:
        path = kept()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644 and probe_results.proven(SOC, ONE_SERVER, 8) == EVERY


def another_owner(path: Path, patch: pytest.MonkeyPatch) -> None:
    owner = path.stat().st_uid
    if owner == 0:  # root's files count for everybody
        os.chown(path, 12345, -1)
    else:
        patch.setattr(os, "getuid", lambda: owner + 1)


def linked(path: Path, _: pytest.MonkeyPatch) -> None:
    path.rename(path.parent.parent / "elsewhere.json")
    path.symlink_to(path.parent.parent / "elsewhere.json")


def aged(days: float) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def change(path: Path, _: pytest.MonkeyPatch) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), "written": time.time() - days * 86400}))

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        *((lambda path, _, mode=mode: path.chmod(mode), rf"may be written by others \(mode {mode:o}\): run `ascend-moe")
          for mode in (0o664, 0o646)),
        (another_owner, r"belongs to user \d+, not to this user"),
        (linked, "cannot be read"),
        (aged(181), "is 181 days old, the limit is 180"),
        (aged(-2), "has a time in the future"),
        (aged(179), ""),
        *((lambda path, _, text=text: path.write_text(text, "latin-1"), "is not a result file of this version: run")
          for text in ("\xe9", "", "{}", "[]", '{"format": 1}', '{"format": 2, "soc": "x"}', "\x00")),
    ],
)  # fmt: skip
def test_a_file_that_others_wrote_or_that_is_old_or_broken_does_not_count(
    change: Callable[[Path, pytest.MonkeyPatch], Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept()
    change(path, monkeypatch)
    if text:
        with pytest.raises(AscendMoeError, match=text):
            probe_results.read(path)
    assert probe_results.proven(SOC, ONE_SERVER, 8) == (frozenset() if text else EVERY)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all", EVERY),
        ("none", frozenset()),
        ("pull", {"pull"}),
        ("pull, data before flag", {"pull", "data before flag"}),
    ],
)
def test_the_variable_goes_before_the_file(text: str, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept(pull="FAIL" if "pull" in names or text == "all" else "PASS")
    monkeypatch.setenv("ASCEND_MOE_PROVEN", text)
    assert probe_results.proven(SOC, SEVERAL_SERVERS, 384) == names


@pytest.mark.parametrize("text", ["push", "pull,", "all,pull", "1"])
def test_a_bad_variable_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_PROVEN", text)
    with pytest.raises(ArgumentError, match=r"ASCEND_MOE_PROVEN=.* must be none, all, or a comma-separated list"):
        probe_results.proven(SOC, ONE_SERVER, 2)


def test_the_faster_core_barrier_is_the_one_that_was_timed(tmp_path: Path) -> None:
    """Only where its probe has passed and both were timed; of any number of ranks; that of several servers too."""
    kind = probe_results.machine(SOC, SEVERAL_SERVERS)
    for barriers, faster in (
        ({"blocks": 2.0, "syncall": 1.5}, "syncall"),
        ({"blocks": 1.5, "syncall": 2.0}, "blocks"),
        ({"blocks": 2.0, "syncall": 2.0}, "blocks"),
        ({"syncall": 1.0}, ""),
        ({}, ""),
    ):
        path = probe_results.write(kind, 2, ALL, barriers)
        assert {probe_results.faster_barrier(SOC, topology) for topology in probe_results.TOPOLOGIES} == {faster}
        found = probe_results.read(path)
        assert found is not None and found.barriers == barriers
        assert ("us by syncall" in probe_results.about(found)) == ("syncall" in barriers)
    probe_results.write(kind, 2, {**ALL, "core barrier": "FAIL"}, {"blocks": 2.0, "syncall": 1.5})
    assert probe_results.faster_barrier(SOC, SEVERAL_SERVERS) == ""
    assert probe_results.faster_barrier("Ascend910B3", SEVERAL_SERVERS) == ""
    words = json.loads(kind.path.read_text())
    del words["barriers"]  # an older version's
    kind.path.write_text(json.dumps(words))
    found = probe_results.read(kind.path)
    assert found is not None and not found.barriers
    kind.path.write_text(json.dumps(words | {"barriers": {"blocks": "soon"}}))
    with pytest.raises(AscendMoeError, match="is not a result file of this version"):
        probe_results.read(kind.path)
