"""How a plot becomes part of the page: SVG in colors of the page's own variables, text as text, with a title and a description.

Each plot is drawn twice, wide and for a phone; the page shows one of them. The same data give the same text.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ShardwiseError
from ..objects import frozen

__all__ = [
    "AREA_ALPHA",
    "BAD",
    "BAR_ALPHAS",
    "BY_NAME",
    "COLORS",
    "Drawn",
    "SERIES",
    "SMALLEST_TEXT",
    "TEXT",
    "WIDTHS",
    "drawn",
    "legend",
    "plotting",
]

#: Stands for a color in what matplotlib writes -> the page's variable.
COLORS = {
    "#0000f0": "currentColor",
    "#0000f1": "var(--anonymous)",
    "#0000f2": "var(--file)",
    "#0000f3": "var(--shared)",
    "#0000f4": "var(--device)",
    "#0000f5": "var(--faint)",
    "#0000e1": "var(--load)",
    "#0000e2": "var(--save)",
    "#0000e3": "var(--resume)",
    "#0000e4": "var(--export)",
    "#0000e5": "var(--other)",
    "#0000e6": "var(--bad)",
    "#0000e7": "var(--on-bar)",
}
BY_NAME = {value.removeprefix("var(--").removesuffix(")"): name for name, value in COLORS.items()}
TEXT, FAINT, BAD = BY_NAME["currentColor"], BY_NAME["faint"], BY_NAME["bad"]
SERIES = [BY_NAME[n] for n in ("anonymous", "shared", "file", "device")]
#: Of areas, and of the bars of phases: outer ones, and those within.
AREA_ALPHA, BAR_ALPHAS = 0.9, (0.85, 0.45)
_LONG_NUMBER = re.compile(r"(\d\.\d)\d+")  # in points: a tenth is finer than a screen
WIDTHS = {"wide": 8.6, "narrow": 4.1}
#: In points. The page shows a plot at 1.3 to 1.4 of its size, so that this is at least 13 px.
SMALLEST_TEXT = 10


@frozen
class Drawn:
    """A plot for the page."""

    title: str
    wide: str
    narrow: str


@contextmanager
def plotting() -> Iterator[None]:
    """Around all drawing. Raises :class:`ShardwiseError` without matplotlib; its settings are as before afterwards."""
    try:
        import matplotlib
    except ImportError as error:
        raise ShardwiseError(
            "matplotlib is not installed, and draws the report's plots: pip install 'shardwise[plot]'"
        ) from error
    settings: Any = {
        "svg.fonttype": "none",  # text stays text: it is searched, read aloud, and has the page's font
        "text.parse_math": False,  # names from files are no formulas
        "font.family": "DejaVu Sans",
        "font.size": SMALLEST_TEXT,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": TEXT,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.unicode_minus": False,
        "text.color": TEXT,
        "xtick.color": TEXT,
        "ytick.color": TEXT,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(settings):
        yield


def drawn(key: str, title: str, description: str, height: float, draw: Callable[[Any, str], None]) -> Drawn:
    """The plot that ``draw(figure, form)`` makes, in both forms, ``wide`` and ``narrow``; ``height`` in inches."""
    found = {}
    for form, width in WIDTHS.items():
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context({"svg.hashsalt": f"{key}-{form}"}):
            figure = Figure(figsize=(width, height), layout="constrained")
            draw(figure, form)
            stream = io.StringIO()
            figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        found[form] = _for_page(stream.getvalue(), f"{key}-{form}", title, description)
    return Drawn(title, found["wide"], found["narrow"])


def _for_page(text: str, key: str, title: str, description: str) -> str:
    """matplotlib's document as an element of the page: names of its own, the page's colors and font, accessible."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', text)
    text = re.sub(r'xlink:href="#|url\(#', lambda found: f"{found[0]}{key}-", text)
    text = re.sub(r' d="[^"]*"', lambda found: _LONG_NUMBER.sub(r"\1", found[0]), text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r" font-family: [^;\"]*;?", "", text)
    for color, variable in COLORS.items():
        text = text.replace(color, variable)
    named = f'role="img" aria-labelledby="{key}-t {key}-d"'
    head = f'<title id="{key}-t">{html.escape(title)}</title><desc id="{key}-d">{html.escape(description)}</desc>'
    text = re.sub(r'<svg ([^>]*?)width="([\d.]+)pt" height="[\d.]+pt"', rf"<svg {named} \1", text, count=1)
    return re.sub(r"(<svg [^>]*>)", lambda found: found[1] + head, text, count=1)


def legend(axes: Any, form: str) -> None:
    """The legend above the axes."""
    columns = 5 if form == "wide" else 2
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, fontsize=SMALLEST_TEXT
    )
