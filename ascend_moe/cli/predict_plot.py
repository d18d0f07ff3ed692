"""Pictures of predictions: a stacked bar an op, algorithm and EP, its parts the kernel's steps. Plain SVG."""

from __future__ import annotations

from html import escape

from ..timed import OpPrediction, Prediction
from . import predict

# Alike steps of the algorithms have one colour.
_COLOURS = {
    "launch": "#9aa0a6",
    "SendBuffInit": "#c5b0d5",
    "BuffInit": "#c5b0d5",
    "AlltoAllDispatch": "#4c78a8",
    "SetWaitTpStatusAndDisPatch": "#4c78a8",
    "PublishRows": "#4c78a8",
    "SetStatus": "#e45756",
    "WaitStatus": "#f2cf5b",
    "LocalWindowCopy": "#54a24b",
}
_MORE = ("#72b7b2", "#b279a2", "#ff9da6", "#9d755d", "#eeca3b", "#88d27a", "#d67195")
_BAR, _GAP, _LEFT, _TOP, _HEIGHT, _LINE = 26, 10, 56, 64, 300, 16


def stacked(found: list[Prediction]) -> str:
    """Dispatch on the left, combine on the right; bars grouped by EP, an algorithm a bar."""
    names: list[str] = []
    for each in found:
        for op in (each.dispatch, each.combine):
            names += [name for name in op.phases if name not in names]
    spare = iter(_MORE * 8)
    colours = {name: _COLOURS.get(name) or next(spare) for name in names}
    top = max(max(each.dispatch_us, each.combine_us) for each in found) * 1.08
    wide = _width(found)
    parts = []
    for i, title in enumerate(("dispatch", "combine")):
        ops = [(each, each.dispatch if i == 0 else each.combine) for each in found]
        parts += _panel(title, ops, _LEFT + i * (wide + _LEFT), top, colours)
    width = 2 * (wide + _LEFT) + 20
    legend = _legend(colours, width)
    height = _TOP + _HEIGHT + 96 + _LINE * ((len(colours) + 3) // 4)
    one = found[0].request
    head = f"{one.soc}, BS {one.batch}, H {one.hidden}, K {one.topk}, E {one.experts}: us by step"
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" '
            f'viewBox="0 0 {width} {height}">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="12" y="20" font-size="13">{escape(head)}</text>',
            f'<text x="12" y="38" font-size="11" fill="#b00020">{escape(predict.banner())}</text>',
            *parts,
            *legend,
            "</svg>\n",
        ]
    )


def _worlds(found: list[Prediction]) -> list[int]:
    return sorted({each.request.ranks for each in found})


def _width(found: list[Prediction]) -> int:
    return len(found) * _BAR + len(_worlds(found)) * _GAP


def _panel(
    title: str, ops: list[tuple[Prediction, OpPrediction]], left: int, top: float, colours: dict[str, str]
) -> list[str]:
    bottom = _TOP + _HEIGHT
    lines = [f'<text x="{left}" y="{_TOP - 8}" font-size="12" font-weight="bold">{title}</text>']
    step = 10 ** (len(str(int(top))) - 1)
    step = step if top / step > 3 else step / 4
    wide = _width([each for each, _ in ops])
    for i in range(int(top / step) + 1):
        y = bottom - i * step / top * _HEIGHT
        lines.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + wide}" y2="{y:.1f}" stroke="#e0e0e0"/>')
        lines.append(
            f'<text x="{left - 4}" y="{y + 4:.1f}" font-size="10" text-anchor="end">{i * step:g}</text>'
        )
    x, world = float(left), -1
    for each, op in ops:
        if each.request.ranks != world:
            world = each.request.ranks
            x += _GAP
            lines.append(f'<text x="{x:.0f}" y="{bottom + 84}" font-size="11">EP {world}</text>')
        lines += _bar(each, op, x, top, colours)
        x += _BAR
    return lines


def _bar(each: Prediction, op: OpPrediction, x: float, top: float, colours: dict[str, str]) -> list[str]:
    y, lines = float(_TOP + _HEIGHT), []
    for name, us in op.phases.items():
        tall = max(us, 0.0) / top * _HEIGHT
        y -= tall
        lines.append(
            f'<rect x="{x:.1f}" y="{y:.2f}" width="{_BAR - 4}" height="{tall:.2f}" fill="{colours[name]}">'
            f"<title>{escape(each.algorithm)}, {escape(name)}: {us:.1f} us</title></rect>"
        )
    middle = x + (_BAR - 4) / 2
    lines.append(
        f'<text x="{middle:.1f}" y="{y - 3:.1f}" font-size="9" text-anchor="middle">{op.us:.0f}</text>'
    )
    at = _TOP + _HEIGHT + 10
    lines.append(
        f'<text x="{middle + 3:.1f}" y="{at}" font-size="10" text-anchor="end" '
        f'transform="rotate(-60 {middle + 3:.1f} {at})">{escape(each.algorithm)}</text>'
    )
    return lines


def _legend(colours: dict[str, str], width: int) -> list[str]:
    lines = []
    for i, (name, colour) in enumerate(colours.items()):
        x = 12 + i % 4 * max(150, (width - 24) // 4)
        y = _TOP + _HEIGHT + 104 + i // 4 * _LINE
        lines.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{x + 14}" y="{y}" font-size="10">{escape(name)}</text>')
    return lines
