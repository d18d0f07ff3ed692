"""Writes the tables and the picture of predicted times that docs/predict.md speaks of: predict.md and predict.svg.

    PYTHONPATH=. python tools/predict_page.py [FOLDER]        default: build/predict of this tree; minutes; matplotlib

Every number comes out of the model. The files are not in git; docs/predict.md has one dated table of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from string import Template

import calibration_fit

from ascend_moe.native.library import lib
from ascend_moe.plan import Request
from ascend_moe.plan.soc import KINDS, SOCS, cost_table, fitted_names, read_data
from ascend_moe.predict import ALGORITHMS, OpPrediction, Prediction, calibration, predict
from ascend_moe.predict.calibration import CALIBRATION, HELD_OUT
from ascend_moe.predict.report import ERROR_HEAD, banner, error_rows, predictions

ROOT = Path(__file__).resolve().parents[1]
WORLDS, BATCHES = [8, 16, 32, 64], [8, 32, 128, 512]
AIMED = BATCHES[:3]  # batches for which there is an aim
SHOWN = 16  # EP ranks of tables of one number of ranks
CALL = Request(ranks=8, experts=256, topk=8, hidden=7168, batch=128, quant=True)
_EVENTS = 4_000_000  # more than an op has
_DOUBTED = ("scalar_scale", "sync_ns", "launch_ns", "inflight_bytes")  # assumed figures that times hang on
_SOC = "Ascend910_9391"
SHORT_SYNC_NS = 1500.0  # what a SyncAll may cost if the assumed figure is too long


def write(folder: Path) -> None:
    """Write ``folder``/predict.md and ``folder``/predict.svg."""
    by_batch = _predicted_by_batch()
    by_world = by_batch[CALL.batch]
    folder.mkdir(parents=True, exist_ok=True)
    draw(by_world, folder / "predict.svg")
    pieces = {
        "banner": banner(),
        "Banner": banner()[0].upper() + banner()[1:],
        "source_hash": lib().am_source_hash().decode()[:12],
        **_published(),
        **_fits(),
        **_sync_share(),
        **_predicted(by_world),
        "shown": str(SHOWN),
        "batches": _batches(),
        **_aims(by_batch),
        **{f"short_{name}": text for name, text in _aims(_predicted_by_batch({"sync_ns": SHORT_SYNC_NS})).items()},
        "sync_us": f"{cost_table(CALL.soc)['sync_ns'].value / 1e3:g}",
        "short_sync_us": f"{SHORT_SYNC_NS / 1e3:g}",
        "sensitivity": _sensitivity([each for each in by_world if each.request.ranks == SHOWN]),
        **_costs(),
    }
    page = Template((ROOT / "tools" / "predict.md.in").read_text()).substitute(pieces)
    (folder / "predict.md").write_text(page)


def _predicted_by_batch(costs: Mapping[str, float] | None = None) -> dict[int, list[Prediction]]:
    """Of all EP and algorithms; ``costs``: in the place of the table's."""
    found = {}
    for batch in AIMED:
        print(f"predicts {batch} tokens a rank{', a short SyncAll' if costs else ''}", file=sys.stderr)
        found[batch] = predictions(replace(CALL, batch=batch), WORLDS, list(ALGORITHMS), costs)
    return found


def draw(predicted: Sequence[Prediction], path: Path) -> None:
    """A stacked bar an op, algorithm and EP, its parts the kernel's steps. matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ascend_moe", "font.size": 8})
    import matplotlib.pyplot as plt

    ops = {name: [getattr(each, name) for each in predicted] for name in ("dispatch", "combine")}
    steps = list(dict.fromkeys(step for made in ops.values() for op in made for step in op.phases))
    labels = [f"EP {each.request.ranks} {each.algorithm}" for each in predicted]
    figure, panels = plt.subplots(1, 2, figsize=(2 + 0.6 * len(predicted), 4.5), sharey=True)
    for axes, (name, made) in zip(panels, ops.items(), strict=True):
        bottom = [0.0] * len(made)
        for number, step in enumerate(steps):
            heights = [max(op.phases.get(step, 0.0), 0.0) for op in made]
            some = [at for at, height in enumerate(heights) if height > 0]  # empty bars would fill the file
            lengths, lows = [heights[at] for at in some], [bottom[at] for at in some]
            axes.bar(some, lengths, bottom=lows, color=plt.cm.tab20(number % 20))
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        for at, op in enumerate(made):
            axes.text(at, bottom[at], f"{op.us:.0f}", ha="center", va="bottom", fontsize=7)
        axes.set_title(name)
        axes.set_xticks(range(len(made)), labels)
        axes.tick_params(axis="x", rotation=60)
        axes.spines[["top", "right"]].set_visible(False)
    one = predicted[0].request
    shape = f"BS {one.batch}, H {one.hidden}, K {one.topk}, E {one.experts}"
    figure.suptitle(f"{one.soc}, {shape}: us by step\n{banner()}", fontsize=8, x=0.01, ha="left")
    colours = [plt.Rectangle((0, 0), 1, 1, color=plt.cm.tab20(number % 20)) for number in range(len(steps))]
    figure.legend(colours, steps, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.06 + 0.03 * (len(steps) // 4), 1, 0.97))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def _published() -> dict[str, str]:
    points = calibration.points()
    chosen = calibration.points(CALIBRATION, HELD_OUT, "shown")
    unused = [point for point in points if point.role == "not used"]
    names = fitted_names()
    return {
        "fitted_count": str(len(names)),
        "fitted_names": ", ".join(f"`{name}`" for name in names),
        "calibration_count": str(len(calibration.points(CALIBRATION))),
        "errors": _table(ERROR_HEAD, error_rows(calibration.compare(chosen))),
        "held_out_limit": f"{calibration.held_out_limit():.0%}",
        "sources": "\n".join(f"- {source}" for source in dict.fromkeys(point.source for point in points)),
        "not_used": "\n".join(f"Not used: {point.id} ({point.us:.0f} us): {point.why}." for point in unused),
    }


def _fits() -> dict[str, str]:
    """Which pairs of figures were tried, and why these two."""
    tried = calibration_fit.tried()
    chosen = calibration_fit.choose(tried)
    rows = [
        [
            _values(fit.values) + (" (taken)" if fit is chosen else ""),
            "yes" if fit.plausible else "no",
            f"{fit.spread(CALIBRATION):.1%}",
            f"{fit.largest(CALIBRATION):.1%}",
            f"{fit.largest(HELD_OUT):.1%}",
        ]
        for fit in tried
    ]
    head = ["fitted to", "plausible", "calibration error, rms", "largest", "largest held-out error"]
    bounds = [
        [f"`{name}`", f"{known['prior']:g}", f"{known['least']:g} to {known['most']:g}", known["why"]]
        for name, known in read_data("soc_costs.json")["unknown"].items()
    ]
    return {
        "tried": _table(head, rows),
        "bounds": _table(["figure", "taken to be, if not fitted", "plausible", "why"], bounds),
    }


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"`{name}` {value:g}" for name, value in values.items())


def _sync_share() -> dict[str, str]:
    """Returns what SyncAll takes of the op: a published share that nothing is fitted to."""
    dispatch = predict(CALL, algorithm="cann-style", events=_EVENTS).dispatch
    meetings = [event for event in dispatch.events if event.name == "SyncAll"]
    cores = len({(event.rank, event.core) for event in meetings})
    stood, alone = sum(event.ns for event in meetings) / cores / 1e3, dispatch.pipes["SyncAll"]
    return {
        "meetings": str(len(meetings) // cores),
        "ep": str(CALL.ranks),
        "sync_us": f"{alone:.1f}",
        "dispatch_us": f"{dispatch.us:.1f}",
        "sync_share": f"{alone / dispatch.us:.0%}",
        "stood_us": f"{stood:.1f}",
        "stood_share": f"{stood / dispatch.us:.0%}",
    }


def _predicted(by_world: Sequence[Prediction]) -> dict[str, str]:
    window = {each.request.ranks: _trip(each) for each in by_world if each.algorithm == "window"}
    rows = [
        [
            *_times(each.request.ranks, each),
            f"{window[each.request.ranks] / _trip(each):.2f}",
            f"{max(_busiest_link(op) for op in (each.dispatch, each.combine)):.0%}",
        ]
        for each in by_world
    ]
    request = by_world[0].request
    shown = [each for each in by_world if each.request.ranks == SHOWN]
    head = ["EP", "algorithm", "dispatch us", "combine us", "speed, window = 1", "busiest link"]
    return {
        "call": f"{request.soc}, BS {request.batch}, H {request.hidden}, K {request.topk}, E {request.experts}",
        "cores": str(request.cores),
        "contract": request.contract,
        "predictions": _table(head, rows),
        "dispatch_steps": _steps("dispatch", shown),
        "combine_steps": _steps("combine", shown),
    }


def _steps(name: str, by_world: Sequence[Prediction]) -> str:
    rows = []
    for each in by_world:
        op = each.dispatch if name == "dispatch" else each.combine
        parts = [", ".join(f"{part} {us:.1f}" for part, us in by.items()) for by in (op.phases, op.pipes)]
        rows.append([each.request.ranks, each.algorithm, *parts])
    return _table(["EP", name, "by step of the kernel", "by what S did or waited for"], rows)


def _trip(predicted: Prediction) -> float:
    return predicted.dispatch_us + predicted.combine_us


def _times(first: int, predicted: Prediction) -> list[object]:
    return [first, predicted.algorithm, f"{predicted.dispatch_us:.1f}", f"{predicted.combine_us:.1f}"]


def _batches() -> str:
    rows = []
    for batch in BATCHES:
        request = replace(CALL, batch=batch)
        rows += [_times(batch, each) for each in predictions(request, [SHOWN], list(ALGORITHMS))]
    return _table(["BS", "algorithm", "dispatch us", "combine us"], rows)


def _aims(by_batch: Mapping[int, Sequence[Prediction]]) -> dict[str, str]:
    """Round trips against the CANN-style kernels, and what of direct's is neither link nor launch."""
    rows, slowest, reached, least, held = [], 9.0, 0, 9.0, 0
    for batch, predicted in by_batch.items():
        for world in WORLDS:
            of = {each.algorithm: each for each in predicted if each.request.ranks == world}
            speed = {name: _trip(of["cann-style"]) / _trip(each) for name, each in of.items()}
            slowest, least = min(slowest, speed["window"]), min(least, speed["direct"])
            reached += speed["direct"] >= 1.5
            held += speed["window"] >= 1
            ops = (of["direct"].dispatch, of["direct"].combine)
            link = sum(_busiest_link(op) * op.us for op in ops)
            launch = sum(op.phases["launch"] for op in ops)
            trip = _trip(of["direct"])
            rows.append(
                [
                    *(batch, world, f"{_trip(of['cann-style']):.1f}"),
                    *(f"{_trip(of[name]):.1f} ({speed[name]:.2f})" for name in ("window", "direct", "zero-copy")),
                    *(f"{link:.1f}", f"{launch:.1f}", f"{trip - link - launch:.1f}"),
                ]
            )
    counts = {
        name: sorted(
            {
                tuple((op.sync_alls, op.meetings) for op in (each.dispatch, each.combine))
                for each in by_batch[CALL.batch]
                if each.algorithm == name
            }
        )
        for name in ALGORITHMS
    }
    head = ["BS", "EP", "cann-style us", "window us", "direct us", "zero-copy us"]
    return {
        "aims": _table([*head, "direct: busiest link us", "launches us", "rest us"], rows),
        "sync_alls": _table(
            ["algorithm", "SyncAlls + meetings by blocks of dispatch", "of combine"],
            [
                [name, *(" to ".join(f"{s} + {m}" for s, m in sorted(set(op))) for op in zip(*found, strict=True))]
                for name, found in counts.items()
            ],
        ),
        "window_slowest": f"{slowest:.2f}",
        "direct_slowest": f"{least:.2f}",
        "window_held": str(held),
        "direct_reached": str(reached),
        "aim_rows": str(len(rows)),
    }


def _busiest_link(op: OpPrediction) -> float:
    return max((share for name, share in op.link_use.items() if name != "memory"), default=0.0)


def _sensitivity(usual: Sequence[Prediction]) -> str:
    """The same predictions by every fit that was tried, and with assumed figures halved and doubled."""
    figures = {name: cost.value for name, cost in cost_table(CALL.soc).items()}
    tried, priors = calibration_fit.tried(), calibration_fit.priors()
    chosen = calibration_fit.choose(tried)
    cases: list[tuple[str, dict[str, float]]] = [("as fitted", {})]
    cases += [
        (("" if fit.plausible else "not plausible: ") + _values(fit.values), priors | fit.values)
        for fit in tried
        if fit.values != chosen.values
    ]
    cases += [
        (f"`{name}` x {factor:g}, nothing fitted again", {name: factor * figures[name]})
        for name in _DOUBTED
        for factor in (0.5, 2.0)
    ]
    rows = []
    for name, costs in cases:
        print(f"predicts {SHOWN} ranks, {name}", file=sys.stderr)
        error = calibration.errors_of(calibration.compare(calibration.points(CALIBRATION), costs))
        again = {each.algorithm: predict(CALL, world=SHOWN, algorithm=each.algorithm, costs=costs) for each in usual}
        pairs = [f"{each.dispatch_us:.0f} / {each.combine_us:.0f}" for each in again.values()]
        rows.append([name, f"{error:.1%}", *pairs, f"{_trip(again['window']) / _trip(again['direct']):.2f}"])
    names = [each.algorithm for each in usual]
    return _table(["figures", "calibration error", *names, "window / direct"], rows)


def _costs() -> dict[str, str]:
    by_soc = {soc: cost_table(soc) for soc in SOCS}
    names = list(by_soc[_SOC])
    differing = [name for name in names if len({costs[name].value for costs in by_soc.values()}) > 1]
    socs = [[soc, *(f"{costs[name].value:g}" for name in differing)] for soc, costs in by_soc.items()]
    figures = [
        [f"`{name}`", f"{by_soc[_SOC][name].value:g}", kind, by_soc[_SOC][name].source]
        for kind in KINDS
        for name in names
        if by_soc[_SOC][name].kind == kind
    ]
    return {
        "socs": _table(["SoC", *differing], socs),
        "figures": _table(["figure", "value", "kind", "source"], figures),
    }


if __name__ == "__main__":
    if find_spec("matplotlib") is None:
        sys.exit("tools/predict_page.py needs matplotlib: pip install matplotlib")
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "predict")
