"""A few SVG shapes: bars, curves and points that can be read at the width of a phone, on a light and on a dark page.

An image follows the page's color scheme by ``prefers-color-scheme``, which browsers take from the element that shows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "Curve", "bars", "curves", "points"]

WIDTH = 440
TOP = 58
STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;fill:#1f2937}
.title{font-size:15px;font-weight:600}
.muted{fill:#6b7280;font-size:12px}
.grid{stroke:#e5e7eb;stroke-width:1}
.ours{fill:#0d9488}.other{fill:#94a3b8}.bad{fill:#dc2626}
.line{fill:none;stroke-linejoin:round}
.line.ours{stroke:#0d9488;fill:none;stroke-width:2}.line.other{stroke:#cbd5e1;fill:none;stroke-width:6}
.line.bad{stroke:#dc2626;fill:none;stroke-width:2}
.mark{stroke:#6b7280;stroke-width:1;stroke-dasharray:3 3}
.point{fill:#0d9488;fill-opacity:.55}
@media (prefers-color-scheme:dark){
text{fill:#e5e7eb}.muted{fill:#9ca3af}.grid{stroke:#3b4252}
.ours{fill:#2dd4bf}.other{fill:#64748b}.bad{fill:#f87171}
.line.ours{stroke:#2dd4bf}.line.other{stroke:#475569}.line.bad{stroke:#f87171}
.mark{stroke:#9ca3af}.point{fill:#2dd4bf}
}"""


@dataclass(frozen=True)
class Bar:
    """One bar; ``group`` stands above the first of its group."""

    label: str
    value: float
    text: str
    kind: str = "other"
    group: str = ""


@dataclass(frozen=True)
class Curve:
    """One curve, and the name that the legend gives it."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str


def bars(title: str, subtitle: str, rows: Sequence[Bar], *, label_width: int = 120) -> str:
    """Horizontal bars, each with its label on the left and its value at its end."""
    most = max(row.value for row in rows)
    widest = max(len(row.text) for row in rows) * 7 + 8
    scale = (WIDTH - label_width - widest - 8) / most
    y, found = TOP, []
    for row in rows:
        if row.group:
            y += 20 if found else 12
            found.append(_text(0, y, row.group, "muted"))
            y += 9
        found.append(_text(label_width - 8, y + 14, row.label, anchor="end"))
        width = max(row.value * scale, 1.5)
        found.append(
            f'<rect class="{row.kind}" x="{label_width}" y="{y}" width="{width:.1f}" height="18" rx="2"/>'
        )
        found.append(_text(label_width + width + 6, y + 14, row.text))
        y += 24
    return _picture(title, subtitle, found, y + 6)


def curves(
    title: str,
    subtitle: str,
    drawn: Sequence[Curve],
    *,
    y_ticks: Sequence[float],
    x_ticks: Sequence[float],
    x_label: str,
    mark: tuple[float, str],
) -> str:
    """Curves over a common axis, with a vertical line at ``mark``; the legend is below."""
    left, right, height = 34, WIDTH - 16, 190
    xs = [x for curve in drawn for x, _ in curve.points]
    low, high = y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + (x - min(xs)) / (max(xs) - min(xs)) * (right - left)
        return across, TOP + height * (1 - (y - low) / (high - low))

    found = []
    for tick in y_ticks:
        y = at(xs[0], tick)[1]
        found.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>')
        found.append(_text(left - 6, y + 4, f"{tick:g}", "muted", anchor="end"))
    for tick in x_ticks:
        found.append(_text(at(tick, low)[0], TOP + height + 16, f"{tick:g}", "muted", anchor="middle"))
    found.append(_text(right, TOP + height + 32, x_label, "muted", anchor="end"))
    x = at(mark[0], low)[0]
    found.append(f'<path class="mark" d="M{x:.1f} {TOP}V{TOP + height}"/>')
    found.append(_text(x - 6, TOP + 12, mark[1], "muted", anchor="end"))
    for curve in drawn:
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in (at(*point) for point in curve.points))
        found.append(f'<path class="line {curve.kind}" d="M{path}"/>')
    y = TOP + height + 52
    for curve in drawn:
        found.append(f'<path class="line {curve.kind}" d="M{left} {y - 4}h22"/>')
        found.append(_text(left + 30, y, curve.name))
        y += 20
    return _picture(title, subtitle, found, y - 8)


def points(
    title: str,
    subtitle: str,
    drawn: Sequence[tuple[float, float]],
    *,
    ticks: Sequence[float],
    labels: tuple[str, str],
) -> str:
    """Points on two logarithmic axes of one range, and the diagonal."""
    left, size = 52, 300
    low, high = math.log(ticks[0]), math.log(ticks[-1])

    def at(value: float) -> float:
        return (math.log(value) - low) / (high - low) * size

    found = []
    for tick in ticks:
        y, x = TOP + size - at(tick), left + at(tick)
        found.append(f'<path class="grid" d="M{left} {y:.1f}h{size}M{x:.1f} {TOP}v{size}"/>')
        found.append(_text(left - 6, y + 4, f"{tick:,g}", "muted", anchor="end"))
        found.append(_text(x, TOP + size + 16, f"{tick:,g}", "muted", anchor="middle"))
    found.append(f'<path class="mark" d="M{left} {TOP + size}L{left + size} {TOP}"/>')
    for across, up in drawn:
        found.append(
            f'<circle class="point" cx="{left + at(across):.1f}" cy="{TOP + size - at(up):.1f}" r="2.6"/>'
        )
    found.append(_text(left + size, TOP + size + 34, labels[0], "muted", anchor="end"))
    found.append(_text(left + 8, TOP + 16, labels[1], "muted"))
    return _picture(title, subtitle, found, TOP + size + 42)


def _text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "") -> str:
    kinds = f' class="{kind}"' if kind else ""
    anchors = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kinds}{anchors}>{escape(text)}</text>'


def _picture(title: str, subtitle: str, shapes: Sequence[str], height: float) -> str:
    head = [_text(0, 18, title, "title"), _text(0, 37, subtitle, "muted")]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            *head,
            *shapes,
            "</svg>",
            "",
        ]
    )
