"""Writes docs/predict.md and its pictures: every number in them comes out of the model or its data files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..native import library
from ..plan import Request
from ..timed import ALGORITHMS, Prediction, calibration, calibration_fit, predict
from ..timed.calibration import CALIBRATION, HELD_OUT, Compared
from ..timed.costs import KINDS, cost_table, fitted_names, known_socs, read_data
from . import predict_plot
from .predict import ERROR_HEAD, banner, error_rows, run

_WORLDS, _BATCHES = [8, 16, 32, 64], [8, 32, 128, 512]
_SHOWN = 16  # EP ranks where one table has one
_EVENTS = 4_000_000  # more than an op has
_DOUBTED = ("scalar_scale", "sync_ns", "launch_ns", "inflight_bytes")  # assumed figures that times hang on
_CALL = Request(ranks=8, experts=256, topk=8, hidden=7168, batch=128, quant=True)


def write(folder: Path) -> None:
    """``folder``/predict.md and ``folder``/predict/*.svg."""
    pictures = folder / "predict"
    pictures.mkdir(parents=True, exist_ok=True)
    by_world = run(_CALL, _WORLDS, list(ALGORITHMS))
    by_batch = [
        each
        for batch in _BATCHES
        for each in run(Request(**(vars(_CALL) | {"batch": batch})), [_SHOWN], list(ALGORITHMS))
    ]
    chosen = calibration.points(CALIBRATION, HELD_OUT, "shown")
    compared = calibration.compare(chosen)
    (pictures / "a3.svg").write_text(predict_plot.stacked(by_world), encoding="utf-8")
    page = [
        *_what(),
        *_errors(compared),
        *_choice(),
        *_sync_share(),
        *_predictions(by_world),
        *_batches(by_batch),
        *_sensitivity([each for each in by_world if each.request.ranks == _SHOWN]),
        *_costs(),
        *_limits(),
    ]
    (folder / "predict.md").write_text("\n".join(page) + "\n", encoding="utf-8")


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines] + [""]


def _what() -> list[str]:
    return [
        "# Predicted times on NPUs",
        "",
        f"**{banner()[0].upper()}{banner()[1:]}.**",
        "",
        "Written by `ascend-moe predict --docs docs`; no number on this page is typed by hand. Native",
        f"sources {library.lib().am_source_hash().decode()[:12]}.",
        "",
        "No NPU was at hand, so `ascend-moe predict` runs the kernels themselves, the same sources as",
        "on the NPU, on a third engine of the CPU twin. It keeps a clock for every pipe (S, V, MTE2,",
        "MTE3) of every core of every rank: an instruction starts when S has issued it, its pipe is",
        "free and the flags that it waits for are up. Copies share what they pass: the memory of a",
        "rank, the links between dies. A status block is seen when it has travelled, a poll sees what",
        "has landed by then, SyncAll waits for the last core. All of it is simulated in one thread,",
        "in the order of modelled time, so that the same call gives the same nanosecond. With",
        "`payload=True` (`ascend_moe.timed.predict`) the outputs are computed as well, and are the",
        "reference's.",
        "",
    ]


def _errors(compared: list[Compared]) -> list[str]:
    every = calibration.points()
    calibrated = [point for point in every if point.role == CALIBRATION]
    names = fitted_names()
    limit = calibration.held_out_limit()
    unused = [point for point in every if point.role == "not used"]
    rows = error_rows(compared)
    lines = [
        "## Against published times",
        "",
        f"{len(names)} figures are fitted ({', '.join(f'`{name}`' for name in names)}) to",
        f"{len(calibrated)} published times. Which points may be fitted to and which are held out was",
        "committed before the first fit (`ascend_moe/data/published_times.json`). The published",
        "kernels are CANN's or of its style; what is compared is a model of such a kernel, written",
        "for this engine from its public description (`csrc/engines/models`): a row is read and",
        "quantised for every (token, k), cores meet before the status leaves, an expert a 32-byte",
        "status store, cores meet again over the counts and at the end, rows leave the window with",
        "three stores each; combine has a flag a row, tokens are polled for one by one, no SyncAll.",
        "",
        *_table(ERROR_HEAD, rows),
        f"Held-out times may be off by {limit:.0%}; a test computes them afresh. Role *shown*: the",
        "published batch is a guess, so the error is printed and not judged. *From memory*: quoted",
        "without the text at hand.",
        "",
        "Sources:",
        "",
    ]
    sources = list(dict.fromkeys(point.source for point in every))
    lines += [f"- {source}" for source in sources] + [""]
    lines += [f"Not used: {point.id} ({point.us:.0f} us): {point.why}." for point in unused] + [""]
    return lines


def _predictions(found: list[Prediction]) -> list[str]:
    rows = []
    base: dict[int, Prediction] = {}
    for each in found:
        if each.algorithm == "window":
            base[each.request.ranks] = each
    for each in found:
        window = base[each.request.ranks]
        total, usual = each.dispatch_us + each.combine_us, window.dispatch_us + window.combine_us
        link = max(share for name, share in each.link_use.items() if name != "memory")
        rows.append(
            [
                each.request.ranks,
                each.algorithm,
                f"{each.dispatch_us:.1f}",
                f"{each.combine_us:.1f}",
                f"{usual / total:.2f}",
                f"{link:.0%}",
            ]
        )
    one = found[0].request
    lines = [
        f"## {one.soc}, BS {one.batch}, H {one.hidden}, K {one.topk}, E {one.experts}",
        "",
        f"int8 rows in dispatch, bf16 rows in combine, {one.cores} cores, contract {one.contract}.",
        f"{banner()}.",
        "",
        *_table(["EP", "algorithm", "dispatch us", "combine us", "speed, window = 1", "busiest link"], rows),
        "![steps by algorithm and EP](predict/a3.svg)",
        "",
        "Where the time of the critical path goes, us:",
        "",
    ]
    for op in ("dispatch", "combine"):
        rows = []
        for each in found:
            one_op = each.dispatch if op == "dispatch" else each.combine
            steps = ", ".join(f"{name} {us:.1f}" for name, us in one_op.phases.items())
            pipes = ", ".join(f"{name} {us:.1f}" for name, us in one_op.pipes.items())
            rows.append([each.request.ranks, each.algorithm, steps, pipes])
        lines += _table(["EP", op, "by step of the kernel", "by what S did or waited for"], rows)
    return lines


def _batches(found: list[Prediction]) -> list[str]:
    rows = [
        [each.request.batch, each.algorithm, f"{each.dispatch_us:.1f}", f"{each.combine_us:.1f}"]
        for each in found
    ]
    return [
        f"## By batch, EP {found[0].request.ranks}",
        "",
        banner() + ".",
        "",
        *_table(["BS", "algorithm", "dispatch us", "combine us"], rows),
    ]


def _choice() -> list[str]:
    """Which pairs of figures were tried, and why these two."""
    document, tried = read_data("soc_costs.json"), calibration_fit.tried()
    chosen = calibration_fit.choose(tried)
    rows = [
        [
            _values(one.values) + (" (taken)" if one is chosen else ""),
            "yes" if one.plausible else "no",
            f"{one.spread(CALIBRATION):.1%}",
            f"{one.largest(CALIBRATION):.1%}",
            f"{one.largest(HELD_OUT):.1%}",
        ]
        for one in tried
    ]
    head = ["fitted to", "plausible", "calibration error, rms", "largest", "largest held-out error"]
    bounds = [
        [f"`{name}`", f"{one['prior']:g}", f"{one['least']:g} to {one['most']:g}", one["why"]]
        for name, one in document["unknown"].items()
    ]
    return [
        "### Which two figures are fitted",
        "",
        "Several figures are unknown, and four points allow two. Every pair in the table below was",
        "fitted, the other unknown figures staying at what they are taken to be. Of the pairs whose",
        "values are plausible the one with the least calibration error is taken. What is plausible is",
        "a judgement, written down when first fits had been seen. Held-out errors have",
        "no part in that rule; they were known, though, from an earlier fit, which was of `launch_ns`",
        "and `scalar_scale`: it is the last line, and what it wants of a launch is no kernel's start.",
        "",
        *_table(head, rows),
        *_table(["figure", "taken to be, if not fitted", "plausible", "why"], bounds),
    ]


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"`{name}` {value:g}" for name, value in values.items())


def _sync_share() -> list[str]:
    """What SyncAll takes of the op: a published share that nothing is fitted to."""
    found = predict(_CALL, algorithm="cann-style", events=_EVENTS).dispatch
    meetings = [event for event in found.events if event.name == "SyncAll"]
    cores = len({(event.rank, event.core) for event in meetings})
    stood = sum(event.ns for event in meetings) / cores / 1e3
    alone = found.pipes["SyncAll"]
    return [
        "A check that nothing was fitted to: the public notes on UBEP give SyncAll about 15% of the",
        "time of the MC2 design, and do not say whether waiting for the last core counts. In the model",
        f"the {len(meetings) // cores} meetings of a CANN-style dispatch at EP {_CALL.ranks} take"
        f" {alone:.1f} of {found.us:.1f} us ({alone / found.us:.0%}); with the waits a core",
        f"stands in them for {stood:.1f} us ({stood / found.us:.0%}) on average.",
        "",
    ]


def _sensitivity(usual: list[Prediction]) -> list[str]:
    """The same predictions by every fit that was tried, and with assumed figures halved and doubled."""
    table = {name: one.value for name, one in cost_table(_CALL.soc).items()}
    cases: list[tuple[str, dict[str, float]]] = [("as fitted", {})]
    chosen = calibration_fit.choose(calibration_fit.tried())
    priors = calibration_fit.priors()
    cases += [
        (("" if one.plausible else "not plausible: ") + _values(one.values), priors | one.values)
        for one in calibration_fit.tried()
        if one.values != chosen.values
    ]
    cases += [
        (f"`{name}` x {factor:g}, nothing fitted again", {name: factor * table[name]})
        for name in _DOUBTED
        for factor in (0.5, 2.0)
    ]
    rows = []
    for name, costs in cases:
        found = [predict(_CALL, world=_SHOWN, algorithm=each.algorithm, costs=costs) for each in usual]
        rows.append([name, *_largest(costs), *_pairs(found), f"{_gain(found):.2f}"])
    names = [each.algorithm for each in usual]
    return [
        f"## What hangs on the fit, EP {_SHOWN}",
        "",
        "The same predictions, dispatch / combine us, by the other fits to the same points, and with",
        "assumed figures halved and doubled. The last column is what a choice between algorithms",
        "rests on: the round trip of window over that of direct.",
        "",
        *_table(["figures", "calibration error", *names, "window / direct"], rows),
    ]


def _gain(found: list[Prediction]) -> float:
    trip = {each.algorithm: each.dispatch_us + each.combine_us for each in found}
    return trip["window"] / trip["direct"]


def _largest(costs: Mapping[str, float]) -> list[str]:
    compared = calibration.compare(calibration.points(CALIBRATION), costs)
    return [f"{calibration.errors_of(compared):.1%}"]


def _pairs(found: list[Prediction]) -> list[str]:
    return [f"{each.dispatch_us:.0f} / {each.combine_us:.0f}" for each in found]


def _costs() -> list[str]:
    lines = [
        "## What the hardware is taken to cost",
        "",
        "`ascend_moe/data/soc_costs.json`: nanoseconds, GB/s, bytes. *Published*: the source says",
        "where; *assumed*: nothing public is known to us, the source says why this number; *fitted*:",
        "see above.",
        "",
    ]
    first = {soc: cost_table(soc) for soc in known_socs()}
    names = list(first["Ascend910_9391"])
    per_soc = [name for name in names if len({first[soc][name].value for soc in first}) > 1]
    lines += _table(
        ["SoC", *per_soc], [[soc, *(f"{first[soc][name].value:g}" for name in per_soc)] for soc in first]
    )
    rows = []
    for kind in KINDS:
        for name in names:
            one = first["Ascend910_9391"][name]
            if one.kind == kind:
                rows.append([f"`{name}`", f"{one.value:g}", kind, one.source])
    lines += ["Of Ascend910_9391, all of them:", "", *_table(["figure", "value", "kind", "source"], rows)]
    return [*lines, "The fit is `ascend-moe predict --calibrate`.", ""]


def _limits() -> list[str]:
    return [
        "## Limits",
        "",
        "- Four points fit two figures; other pairs of figures fit about as well, see above. Trust",
        "  ratios within a few tens of per cent, and orders of magnitude elsewhere (other SoCs, batches,",
        "  EP over 32).",
        "- `link_share` and `latency_scale` were fitted to kernels that store over the links; that reads",
        "  get the same share and take the same trip is assumed. `direct` and zero-copy read over the",
        "  links and depend on it.",
        "- `direct` moves the same bytes over the same links as `window` (but for dispatch, where a row is",
        "  read once for all experts of a rank). It is faster by what it does not wait for: most of the copy",
        "  into combine's window runs on some cores while others read and sum what is there already, and",
        "  links alone take most of what is left. Status blocks wait behind rows on a link here, as in one",
        "  queue; where links let short stores pass, stages could be more and shorter.",
        "- Direct dispatch sorts a few hundred list entries on every core. A sort is charged as one",
        "  instruction at the vector unit's full rate; merging takes an NPU longer, how long is not known.",
        "- SyncAll costs what a published share of an op's time leaves for it, not what was measured.",
        "- A copy's trip to another rank is the published round trip of a load or store, and own",
        "  memory's latency; how MTE pipes pipeline such copies is assumed.",
        "- Ranks start together and routing is uniform: no skew, no hot experts, no other traffic.",
        "- Instruction cache, UB bank conflicts, L2 misses and the compiler's scalar code are inside",
        "  `scalar_scale`.",
        "- A2: a mesh of links in a server; BatchWrite between servers is modelled with assumed",
        "  latencies only.",
        "",
    ]
