"""What a report reads and how it says it: ledgers, stored steps, loss logs; the parts of a page."""

from __future__ import annotations

import html
import io
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..doctor.logs import losses_of_log
from ..errors import FormatError, ShardwiseError, SourceError
from ..limits import MAX_VALUE_BYTES, is_count, is_shallow, read_small
from ..objects import frozen
from ..operations.operation import size
from ..runs.history import RootContents, is_root, losses_in, losses_of_trainer, numbered_steps, steps_below
from ..storage import absolute
from ..storage.records import is_url

# ----------------------------------------------------------------------------------------------------
# How a plot becomes part of the page: SVG in colors of the page's own variables, text as text, with a title and a description.
#
# Each plot is drawn twice, wide and for a phone; the page shows one of them. The same data give the same text.

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


# ----------------------------------------------------------------------------------------------------
# Numbers and names as readers see them.


def counted(number: object, what: str) -> str:
    """``1 rank``, ``3 ranks``; a number from a file may be no number."""
    return f"{plain(str(number), 20)} {what}{'' if number == 1 else 's'}"


def seconds_text(seconds: float) -> str:
    """``0.42 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def time_text(unix_s: float) -> str:
    """``2026-01-31 12:00:00 UTC``."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "unknown"


def plain(text: str, most: int = 200) -> str:
    """A name from a file, without what moves a cursor or changes the direction of text, and cut."""
    shown = "".join(c if c.isprintable() else "�" for c in text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


# ----------------------------------------------------------------------------------------------------
# The parts of a page, before they become HTML.


@frozen
class Cell:
    """A value of a table."""

    text: str
    number: bool = False
    tone: str = ""
    """``good`` or ``bad``."""


@frozen
class Table:
    """A table; without ``head``, one of facts: a name and a value in each row."""

    caption: str
    head: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]


@frozen(kw_only=True)
class Part:
    """A piece of a section: what is given of these, in this order."""

    heading: str = ""
    text: str = ""
    key: bool = False
    """The colors of phases."""
    drawn: Drawn | None = None
    table: Table | None = None


@frozen
class Section:
    """A section with its heading."""

    anchor: str
    title: str
    about: str
    parts: Sequence[Part]


@frozen
class Page:
    """The whole report."""

    title: str
    conclusion: Cell
    """What happened, in a few sentences."""
    cards: Sequence[tuple[str, Cell]]
    sections: Sequence[Section]
    version: str


def cells(*values: object) -> list[Cell]:
    """A row. A head's name that begins with ``>`` stands over numbers; numbers and cells stay what they are."""
    found = []
    for value in values:
        if isinstance(value, Cell):
            found.append(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append(Cell(str(value), number=True))
        else:
            text = str(value)
            found.append(Cell(text.removeprefix(">"), number=text.startswith(">")))
    return found


def number(text: object) -> Cell:
    """A number as text, to the right of its column; ``–`` for None."""
    return Cell("–" if text is None else str(text), number=True)


def bytes_cell(nbytes: object) -> Cell:
    """Bytes from a file, which may hold anything."""
    return number(size(nbytes) if isinstance(nbytes, int) and is_count(nbytes) else None)


def facts(caption: str, rows: Iterable[tuple[str, object]]) -> Table:
    """A table of names and values."""
    return Table(caption, (), [cells(name, value) for name, value in rows])


# ----------------------------------------------------------------------------------------------------
# Reads ledgers: one record per process, and processes that ran together as one start. Takes any file: what does not fit is skipped.

#: Far above what a week writes; a longer file is read up to here.
_MOST_BYTES = 256 * 1024**2
_LONGEST_LINE = 256 * 1024
#: Records with memory of one process that are kept; of more, neighbors become one.
_MOST_SAMPLES = 100_000
#: Memory and bytes of a record; peaks have ``peak_`` before them.
_VALUES = {
    f"{name}_bytes"
    for name in (
        *("anonymous", "file", "shared", "swap", "high_water", "cgroup", "page_cache", "cgroup_high_water"),
        *("device_allocated", "device_reserved", "device_high_water"),
        *("read", "written", "requested_read", "requested_written"),
        *("peak_anonymous", "peak_resident", "peak_cgroup"),
    )
}


@frozen
class Sample:
    """What a process used at one moment, ``t`` seconds after its ledger began; names as in the file."""

    t: float
    values: Mapping[str, int]

    def get(self, name: str) -> int:
        """A value; 0 if the system did not report it."""
        return self.values.get(name, 0)


@frozen
class Phase:
    """A phase of a process."""

    number: int
    name: str
    parent: int | None
    began: Sample
    step: int | None
    ended: Sample | None = None
    """None: the process ended in it."""
    error: str | None = None


@frozen
class Note:
    """An outcome: the report of a load, a save, a resume, an export."""

    t: float
    name: str
    report: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Process:
    """One ledger."""

    file: str
    rank: int
    world_size: int
    host: str
    cgroup: str
    began_s: float
    """Unix time."""
    samples: list[Sample] = field(default_factory=list)
    """All records with memory in order of time, those of phases among them."""
    phases: dict[int, Phase] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    has_ended: bool = False
    """Whether the program left the ledger's block; else it was killed, or still runs."""
    error: str | None = None
    skipped_lines: int = 0

    @property
    def last_t(self) -> float:
        """Seconds from the first record to the last."""
        return max((s.t for s in self.samples), default=0.0)

    @property
    def stopped_in(self) -> Phase | None:
        """The outermost phase in which the process ended without a word."""
        left = [p for p in self.phases.values() if p.ended is None]
        return min(left, key=lambda p: p.number) if left and not self.has_ended else None

    def peak(self, name: str) -> int:
        """The highest value of a kind of memory, looks between the records included."""
        return max(
            (max(s.get(f"{name}_bytes"), s.get(f"peak_{name}_bytes")) for s in self.samples), default=0
        )


@frozen
class Start:
    """The processes of one start of the program, by rank."""

    number: int
    processes: tuple[Process, ...]

    @property
    def began_s(self) -> float:
        """Unix time of the first ledger."""
        return min(p.began_s for p in self.processes)

    @property
    def seconds(self) -> float:
        """To the last record of any rank."""
        return max(p.began_s + p.last_t for p in self.processes) - self.began_s

    @property
    def is_whole(self) -> bool:
        """Whether every process left its block without an error."""
        return all(p.has_ended and p.error is None for p in self.processes)

    @property
    def culprit(self) -> Process | None:
        """The process that a start that did not finish most likely ended by: the first one that failed, otherwise the one whose
        records end first, as a launcher ends the other ranks when one has died. None if every process finished."""
        failed = [p for p in self.processes if p.error is not None]
        died = [p for p in self.processes if not p.has_ended]
        return min(failed or died, key=lambda p: (p.began_s + p.last_t, p.rank), default=None)

    def notes(self, name: str) -> list[tuple[Process, Note]]:
        """Outcomes of one kind, by rank, then by time."""
        return [(p, note) for p in self.processes for note in p.notes if note.name == name]


def json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The objects of a file of JSON lines; None for a line that is none. Raises :class:`SourceError`; never waits for a pipe."""
    try:
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise SourceError("can't be read: not a regular file", path=str(path))
            while stream.tell() < _MOST_BYTES and (line := stream.readline(_LONGEST_LINE)):
                yield json_object(line)
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror or error}", path=str(path)) from error


def json_object(text: bytes) -> dict[str, Any] | None:
    """The object that a JSON text is; None for anything else, and for one nested deeper than any that a report shows."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and is_shallow(found) else None


def read_process(path: Path) -> Process | None:
    """The ledger in a file; None if the file is something else. Raises :class:`SourceError`."""
    process: Process | None = None
    for record in json_lines(path):
        if process is None:
            if record is None or record.get("kind") != "begin":
                return None
            process = Process(
                file=str(path),
                rank=_count(record.get("rank")),
                world_size=_count(record.get("world_size")),
                host=str(record.get("host", "")),
                cgroup=str(record.get("cgroup", "")),
                began_s=_number(record.get("time_s")),
            )
        elif record is None or not _take(process, record):
            process.skipped_lines += 1
            continue
        if (sample := _sample(record)).values:
            process.samples.append(sample)
            if len(process.samples) > _MOST_SAMPLES:
                process.samples = _merged(process.samples)
    return process


def _merged(samples: Sequence[Sample]) -> list[Sample]:
    """Half as many samples: two become one at the time of the later, with the higher of each value."""
    found = []
    for first, second in itertools.zip_longest(samples[::2], samples[1::2]):
        if second is None:
            found.append(first)
        else:
            both = first.values.keys() | second.values.keys()
            found.append(Sample(second.t, {name: max(first.get(name), second.get(name)) for name in both}))
    return found


def _take(process: Process, record: Mapping[str, Any]) -> bool:
    """Add a record. False if it is none that a ledger has."""
    kind, number = record.get("kind"), _count(record.get("id"))
    told = record.get("error")
    if kind == "phase":
        facts, parent = record.get("facts"), record.get("parent")
        step = facts.get("step") if isinstance(facts, dict) else None
        process.phases[number] = Phase(
            number,
            str(record.get("name", "")),
            _count(parent) if parent is not None else None,
            _sample(record),
            _count(step) if step is not None else None,
        )
    elif kind == "phase-end" and number in process.phases:
        phase = process.phases[number]
        process.phases[number] = replace(
            phase, ended=_sample(record), error=None if told is None else str(told)
        )
    elif kind == "note" and isinstance(record.get("report"), dict):
        process.notes.append(Note(_number(record.get("t")), str(record.get("name", "")), record["report"]))
    elif kind == "end":
        process.has_ended = True
        process.error = None if told is None else str(told)
    else:
        return kind == "sample"
    return True


def _sample(record: Mapping[str, Any]) -> Sample:
    values = {n: _count(v) for n, v in record.items() if n in _VALUES}
    return Sample(_number(record.get("t")), values)


def _count(value: object) -> int:
    return int(min(max(_number(value), 0), 2**62))


def _number(value: object) -> float:
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if ok and abs(value) < 2**62 and math.isfinite(value) else 0.0  # type: ignore[arg-type]


def starts_of(processes: Iterable[Process]) -> list[Start]:
    """Processes in groups that ran together: a rank that comes again, or another number of ranks, begins the next one."""
    groups: list[list[Process]] = []
    for process in sorted(processes, key=lambda p: (p.began_s, p.rank, p.file)):
        last = groups[-1] if groups else []
        same = last and last[0].world_size == process.world_size
        if not same or any(p.rank == process.rank for p in last):
            groups.append([])
        groups[-1].append(process)
    ordered = [sorted(group, key=lambda p: p.rank) for group in groups]
    return [Start(k, tuple(group)) for k, group in enumerate(ordered, 1)]


# ----------------------------------------------------------------------------------------------------
# Finds what a report can tell of: steps, ledgers and loss logs, in the places that the caller names.


@frozen
class LossLog:
    """Losses by step, from one file."""

    file: str
    points: Mapping[int, float]
    names_steps: bool = True
    """False: the losses are numbered, because the file names no steps."""
    resumes: tuple[int, ...] = ()
    """The last logged step before each resume that the file tells of."""
    digits: tuple[int, int] | None = None
    """Of a text: the most significant digits and the most decimals that a loss is printed with. None: losses in full."""

    def prints(self, other: LossLog) -> bool:
        """Whether it is a text that prints the losses of the other file: each that both have, to the printed digits."""
        both = self.points.keys() & other.points.keys()
        if self.digits is None or other.digits is not None or not both:
            return False
        significant, decimals = self.digits
        pairs = [(self.points[step], other.points[step]) for step in both]
        return all(float(f"{full:.{significant}g}") == text for text, full in pairs) or all(
            round(full, decimals) == text for text, full in pairs
        )


@dataclass(slots=True)
class Material:
    """All that was found."""

    paths: Sequence[str]
    """As given."""
    runs: list[RootContents] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    losses: list[LossLog] = field(default_factory=list)
    plans: list[Mapping[str, Any]] = field(default_factory=list)
    """Documents of ``shardwise plan --json``."""


def find_material(paths: Sequence[str], plan: str | None = None) -> Material:
    """Look at each path: a directory of checkpoints, or one that holds ``checkpoints``, ``ledger`` or ``loss.jsonl``; a URL of
    checkpoints; a ledger, a loss log, a ``trainer_state.json`` or the text that a run printed. Without ``plan``, those are taken that lie in a directory of ``paths`` as ``plan*.json``.

    Raises :class:`SourceError` for a path that holds none of these, and for a ``plan`` that is none.
    """
    material = Material(paths, plans=[] if plan is None else [_read_plan(Path(plan))])
    files: dict[Path, Path] = {}  # real path -> as the caller reaches it
    for path in paths:
        if is_url(path):
            material.runs.append(steps_below(absolute(path)))
            continue
        place = Path(path)
        if place.is_dir():
            below = [str(one) for one in (place, place / "checkpoints") if one.is_dir()]
            roots = [
                one for one in below if is_root(one) or numbered_steps(one)
            ]  # a model next to them or not
            found = sorted([*place.glob("rank-*.jsonl"), *place.glob("ledger/rank-*.jsonl")])
            found += sorted([*place.glob("loss.jsonl"), *place.glob("*/loss.jsonl")])
            material.runs += [steps_below(root) for root in roots]
            if logged := losses_of_trainer(str(place)):
                roots.append(logged[0])
                material.losses.append(LossLog(*logged))
            if plan is None:
                for file in sorted(place.glob("plan*.json")):
                    with suppress(SourceError, FormatError):  # another program's plan
                        material.plans.append(_read_plan(file))
        elif place.is_file():
            roots, found = [], [place]
        else:
            raise SourceError("no such file or directory", path=path)
        if not roots and not found:
            raise SourceError(
                "holds nothing to report: no steps of a Checkpointer (here or in checkpoints/), no ledger (in ledger/), "
                "no loss.jsonl and no trainer_state.json; give the directory of a run, of its checkpoints or of its ledger, or a log",
                path=path,
            )
        files.update({one.resolve(): one for one in found})
    processes = []
    for file in files.values():
        if (process := read_process(file)) is not None:
            processes.append(process)
        elif points := _losses(file):
            material.losses.append(LossLog(str(file), points))
        elif str(file) in map(str, map(Path, paths)):
            material.losses.append(_log_given(file))
    material.starts = starts_of(processes)
    return material


def _log_given(file: Path) -> LossLog:
    """The losses of the Trainer's state, or of the text that a run printed. Raises :class:`SourceError` if there are none."""
    if file.suffix == ".json":
        found = LossLog(str(file), losses_in(str(file)))
    else:
        logged = losses_of_log(str(file))
        found = LossLog(str(file), logged.points, logged.names_steps, logged.resumes, logged.digits)
    if not found.points:
        raise SourceError(
            "contains no losses: expected a ledger, JSON lines with step and loss, a trainer_state.json, or a log whose lines have a loss",
            path=str(file),
        )
    return found


def _losses(file: Path) -> dict[int, float]:
    points = {}
    for record in json_lines(file):
        step, loss = (record or {}).get("step"), (record or {}).get("loss")
        if isinstance(step, int) and isinstance(loss, int | float) and 0 <= step < 2**53:
            points[step] = float(loss) if abs(loss) < 2**62 else math.nan
    return points


def _read_plan(file: Path) -> Mapping[str, Any]:
    found = json_object(read_small(str(file), "plan", MAX_VALUE_BYTES))
    if found is None or not isinstance(found.get("per_rank"), list):
        raise SourceError("is not what `shardwise plan PATH --ranks N --json` prints", path=str(file))
    return found
