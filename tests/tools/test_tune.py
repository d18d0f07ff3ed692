"""Tuning tables: reading and writing, lookup, what ops do with them, ranks whose tables differ."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ascend_moe
from ascend_moe import plan, tuning
from ascend_moe.doctor import settings
from ascend_moe.errors import ArgumentError, ConfigMismatch
from ascend_moe.ops import calls as native
from ascend_moe.tuning import Entry, Facts, Table, load

WORLD, BATCH, HIDDEN, TOPK, EXPERTS = 2, 12, 1024, 4, 8
FACTS = Facts("dispatch", "cpu", WORLD, EXPERTS, TOPK, HIDDEN, BATCH, "bf16", False, 32)
HERE = Entry("dispatch", "cpu", WORLD, EXPERTS, TOPK, HIDDEN, 16)


def both(**values: Any) -> tuple[Entry, Entry]:
    """Entries of both ops for the calls below."""
    return (
        dataclasses.replace(HERE, **values),
        dataclasses.replace(HERE, op="combine", **values),
    )


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    def write(*entries: Entry, name: str = "t.json") -> Path:
        path = tmp_path / name
        path.write_text(Table(entries, {"by": "a test"}).text())
        monkeypatch.setenv(tuning.VARIABLE, str(path))
        return path

    return write


def round_trip(rank: int, group: str, batches: tuple[int, ...] = (BATCH, BATCH), comm_alg: str = "") -> Any:
    generator = torch.Generator().manual_seed(rank)
    batch, global_bs = batches[rank], 0 if len(set(batches)) == 1 else max(batches) * WORLD
    x = torch.randn(batch, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(batch, EXPERTS, generator=generator).topk(TOPK).indices.int()
    weights = torch.rand(batch, TOPK, generator=generator)
    place = (group, WORLD, rank, EXPERTS)
    options = {"global_bs": global_bs, "comm_alg": comm_alg}
    sent = ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, *place, **options)
    out = ascend_moe.npu_moe_distribute_combine_v2(sent[0], ids, sent[2], sent[4], weights, *place, **options)
    rows = int(sent[4][-1])
    return [sent[0][:rows], sent[2][: rows * 3], sent[3], sent[4], out]


def run(fn: Callable[..., Any] = round_trip) -> list[Any]:
    with ascend_moe.LocalCluster(WORLD, window_mib=32) as cluster:
        return cluster.run(fn)


# ---- tables


def test_round_trip(tmp_path: Path) -> None:
    table = Table((*both(cores=4, ring=2, rows=3, algorithm="window", tuned_us=1.5), HERE), {"soc": "x"})
    path = tmp_path / "t.json"
    path.write_text(table.text())
    again = load(path)
    assert (again.entries, again.about, again.hash) == (table.entries, table.about, table.hash)
    assert again.text() == table.text()


def test_hash_is_of_what_counts() -> None:
    first = Table((HERE,))
    assert first.hash == Table((dataclasses.replace(HERE, tuned_us=7.0),), {"by": "me"}).hash
    others = [
        Table((dataclasses.replace(HERE, **{name: value}),)).hash
        for name, value in [("cores", 3), ("rows", 1), ("ring", 1), ("max_bs", 17), ("algorithm", "window")]
    ]
    others.append(Table((dataclasses.replace(HERE, list_cores=1),)).hash)
    assert len({first.hash, Table(()).hash, Table((HERE, HERE)).hash, *others}) == 9
    assert "list_cores" not in HERE.said(), "tables that ask for no roles have the hash they had before"


def test_lookup() -> None:
    near, far = dataclasses.replace(HERE, max_bs=12), dataclasses.replace(HERE, max_bs=64, cores=2)
    direct = dataclasses.replace(HERE, algorithm="direct", cores=5)
    window = dataclasses.replace(HERE, algorithm="window", cores=6)
    assert Table((far, near)).lookup(FACTS, "auto") is near
    assert Table((far, near)).lookup(dataclasses.replace(FACTS, max_bs=13), "") is far
    assert Table((far, near)).lookup(dataclasses.replace(FACTS, max_bs=65), "") is None
    table = Table((direct, window))
    for comm_alg, found in [("auto", direct), ("direct", direct), ("", window), ("window", window)]:
        assert table.lookup(FACTS, comm_alg) is found
    assert Table((direct,)).lookup(FACTS, "fullmesh_v1") is None
    assert Table((dataclasses.replace(HERE, min_window_mib=33),)).lookup(FACTS, "") is None
    for name, value in [("soc", "Ascend910_9391"), ("ranks", 4), ("quant", True), ("dtype", "fp16")]:
        assert Table((HERE,)).lookup(dataclasses.replace(FACTS, **{name: value}), "") is None


def test_lookup_is_by_what_all_ranks_share() -> None:
    """Unequal batches: maxBS is global_bs / W, whatever a rank's own BS."""
    attributes = dict.fromkeys(native.attribute_names(), 0) | {"moe_expert_num": EXPERTS, "global_bs": 24}
    for batch in (0, 5, 12):
        shapes = (
            ("x", torch.bfloat16, (batch, HIDDEN)),
            ("expert_ids", torch.int32, (batch, TOPK)),
        )
        assert tuning.facts_of("dispatch", "cpu", WORLD, 32, shapes, attributes) == FACTS


GOOD = json.loads(Table((HERE,)).text())
HOSTILE: list[tuple[Any, str]] = [
    ("", "no JSON"),
    ("{", "no JSON"),
    ("[" * 200_000, "no JSON"),
    ("\x00\xff", "no JSON"),
    ([], "must be an object"),
    ({}, "must be an object"),
    ({**GOOD, "version": 2}, "version is 2, this package reads 1"),
    ({**GOOD, "version": "x" * 5000}, "version is"),
    ({**GOOD, "entries": None}, '"entries" must be a list'),
    ({**GOOD, "hash": "abcdef"}, "its hash is 'abcdef', but that of its entries is"),
    ({**GOOD, "entries": []}, "but that of its entries is"),
    ({**GOOD, "entries": [1]}, "entry 0: it is no object"),
]
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"corez": 3}, "'corez' is unknown"),
    ({"cores": -1}, "cores is -1, it must be a whole number"),
    ({"cores": True}, "cores is True"),
    ({"cores": 1e300}, "cores is 1e\\+300"),
    ({"cores": 256}, "cores is 256, it must be at most 255"),
    ({"rows": 2048}, "at most 2047"),
    ({"list_cores": 256}, "at most 255"),
    ({"rows": 2**40}, "rows is"),
    ({"max_bs": None}, "max_bs is None"),
    ({"op": "reduce"}, "op is 'reduce', need one of 'dispatch', 'combine'"),
    ({"algorithm": "x" * 999}, "algorithm is 'xxx"),
    ({"op": "combine", "quant": True}, "quant is for dispatch"),
    ({"quant": 1}, "quant is 1, it must be true or false"),
    ({"tuned_us": "fast"}, "tuned_us is 'fast', it must be a number"),
    ({"soc": []}, "soc is \\[\\], it must be a string"),
]


def refused(text: str, tmp_path: Path, what: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ArgumentError, match=what) as caught:
        load(path)
    assert caught.value.details["argument"] == tuning.VARIABLE
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(("content", "what"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files(content: Any, what: str, tmp_path: Path) -> None:
    refused(content if isinstance(content, str) else json.dumps(content), tmp_path, what)


@pytest.mark.parametrize(("values", "what"), BAD_FIELDS, ids=range(len(BAD_FIELDS)))
def test_hostile_entries(values: dict[str, Any], what: str, tmp_path: Path) -> None:
    document = {"format": tuning.FORMAT, "version": 1, "entries": [GOOD["entries"][0] | values]}
    refused(json.dumps(document), tmp_path, f"entry 0: .*{what}")


def test_turned_bytes_never_pass_for_another_table(tmp_path: Path) -> None:
    """Any byte changed: an error of one line, or a table that says the same."""
    text = Table(both(cores=4, ring=2)).text()
    told = load_text(text, tmp_path)
    rng = random.Random(1)
    caught = 0
    for _ in range(300):
        at = rng.randrange(len(text))
        changed = text[:at] + chr(rng.randrange(32, 127)) + text[at + 1 :]
        try:
            assert load_text(changed, tmp_path).hash == told.hash
        except ArgumentError as error:
            caught += 1
            assert "\n" not in str(error)
    assert caught > 100


def load_text(text: str, tmp_path: Path) -> Table:
    path = tmp_path / "x.json"
    path.write_text(text)
    return load(path)


@pytest.mark.parametrize("path", ["/nowhere/t.json", "/", "/proc/self/mem"])
def test_unreadable_files(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, path)
    with pytest.raises(ArgumentError, match=f"{tuning.VARIABLE}: {path} is no tuning table"):
        run()


# ---- ops


def planned(algorithm: str = "", **values: int) -> dict[str, int]:
    """Tiling of the calls of ``round_trip`` with these things asked for."""
    request = plan.Request(WORLD, EXPERTS, TOPK, HIDDEN, BATCH, cores=8)
    found = {}
    for name in ("dispatch", "combine"):
        spec = plan.describe(name, request, algorithm)
        packed = native._lib.lib().am_tuning_pack(
            1, algorithm.encode(), *(values.get(word, 0) for word in ("cores", "ring", "rows", "list_cores"))
        )
        native._lib.lib().am_spec_tune(native.ctypes.byref(spec), packed)
        made = native.Plan(name, spec)
        found |= {f"{name} {key}": value for key, value in plan.tiling_of(made).items()}
    return found


def test_tiling_takes_what_fits() -> None:
    default, less = planned(), planned(cores=3, ring=1, rows=2)
    assert (less["dispatch block_dim"], less["combine block_dim"]) == (3, 3)
    assert (less["dispatch send_ring"], less["dispatch copy_rows"], less["combine send_rows"]) == (1, 2, 2)
    assert min(default["dispatch send_ring"], default["dispatch copy_rows"]) > 2
    assert planned(cores=255, ring=255, rows=2047, list_cores=255) == default, (
        "more than fits is cut to what fits"
    )


def test_roles_are_of_direct_dispatch() -> None:
    assert planned(list_cores=3)["dispatch list_cores"] == 0
    direct = planned("direct", list_cores=3, cores=5)
    assert (direct["dispatch list_cores"], direct["dispatch block_dim"]) == (3, 5)
    assert planned("direct", list_cores=99, cores=5)["dispatch list_cores"] == 4, "one core publishes rows"
    assert planned("direct", list_cores=99, cores=1)["dispatch list_cores"] == 0


def test_pack_refuses_what_has_no_room() -> None:
    pack = native._lib.lib().am_tuning_pack
    assert pack(0, b"", 0, 0, 0, 0) == 0 and pack(0xFFFFFF, b"direct", 255, 255, 2047, 255) > 0
    for bad in [(1 << 24, b"", 0, 0, 0, 0), (0, b"push", 0, 0, 0, 0), (0, b"", 256, 0, 0, 0)]:
        assert pack(*bad) == -1
    for bad in [
        (0, b"", 0, -1, 0, 0),
        (0, b"", 0, 0, 2048, 0),
        (0, b"", 0, 0, 0, 256),
        (0, b"", 0, 0, 0, -1),
    ]:
        assert pack(*bad) == -1


@pytest.mark.parametrize("comm_alg", ["", "direct"])
def test_results_are_the_same_bits_with_any_table(
    comm_alg: str, use: Callable[..., Path], monkeypatch: Any
) -> None:
    def body(rank: int, group: str) -> Any:
        return round_trip(rank, group, comm_alg=comm_alg)

    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    plain = run(body)
    rng = random.Random(5)
    for number in range(6):
        values = {"cores": rng.randrange(1, 12), "ring": rng.randrange(6), "rows": rng.randrange(9)}
        values |= {"list_cores": rng.randrange(9)}
        use(*both(**values), name=f"{number}.json")
        for before, after in zip(plain, run(body), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), values


def test_the_table_is_read_once_and_used(use: Callable[..., Path]) -> None:
    path = use(*both(cores=3))
    with ascend_moe.LocalCluster(WORLD, window_mib=32) as cluster, ascend_moe.trace() as recording:
        cluster.run(round_trip)
        path.write_text("gone")
        cluster.run(round_trip)
    assert {event.core for event in recording.timeline.events} == {0, 1, 2}


def test_unequal_batches_use_the_same_entry(use: Callable[..., Path]) -> None:
    use(*both(cores=3))
    with ascend_moe.trace() as recording:
        run(lambda rank, group: round_trip(rank, group, (3, BATCH)))
    seen = {(event.rank, event.core) for event in recording.timeline.events}
    assert seen == {(rank, core) for rank in range(WORLD) for core in range(3)}


@pytest.mark.parametrize("other", ["another table", "none"])
def test_ranks_with_different_tables_are_told(
    use: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Also where no entry is for the call: all ranks raise, and can go on once the tables agree."""
    hashes = [load(use(*both(cores=3))).hash, load(use(HERE, name="b.json")).hash]
    tables = [load(use(*both(cores=3))), load(use(HERE, name="b.json")) if other != "none" else None]
    which = {}
    monkeypatch.setattr(tuning, "current", lambda: tables[which[threading.get_ident()]])

    def body(rank: int, group: str) -> str:
        which[threading.get_ident()] = rank
        with pytest.raises(ConfigMismatch) as caught:
            round_trip(rank, group)
        return str(caught.value)

    texts = run(body)
    second = f"the table {hashes[1]}" if other != "none" else "not set"
    for rank, text in enumerate(texts):
        ours, theirs = (f"the table {hashes[0]}", second) if rank == 0 else (second, f"the table {hashes[0]}")
        assert f"ASCEND_MOE_TUNING_TABLE is {ours} on rank {rank} and {theirs} on rank {1 - rank}" in text


# ---- doctor


def findings() -> list[tuple[str, str]]:
    return [(one.level, one.what) for one in settings.findings() if one.topic == tuning.VARIABLE]


def test_doctor_reads_it(use: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    assert findings() == []
    path = use(*both(cores=3, ring=1, rows=2))
    assert findings() == [("ok", f"2 entries for cpu, hash {load(path).hash}; the same file on all ranks")]
    use(*both(cores=200, ring=9), dataclasses.replace(HERE, topk=99))
    said = findings()
    assert [level for level, _ in said] == ["warn", "warn", "warn", "ok"]
    assert "for dispatch, W 2, maxBS 16, H 1024 asks for cores 200, 8 fit, ring 9, 4 fit" in said[0][1]
    assert "refuse" in said[2][1]
    path.write_text("{")
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    assert [level for level, _ in findings()] == ["error"]


def test_the_documented_table_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "tune.md").read_text()
    (entry,) = load_text(text.partition("```json\n")[2].partition("```")[0], tmp_path).entries
    assert (entry.soc, entry.cores, entry.ring) == ("Ascend910_9391", 24, 0)
