"""What a fault led to, and the table of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.faults.calls import through
from tests.faults.forks import Forks, Scenario, run_all
from tests.faults.tiny import Attempt, Found, attempt, find, publish
from tests.harness.object_store import S3Server

__all__ = ["Case", "Context", "Row", "agreed", "judge", "render", "rows_of"]

#: What fresh ranks, or those that live, were left with.
Result = Literal["previous", "new", "error", "wrong"]


@dataclass(frozen=True, slots=True)
class Case:
    """One fault at one place."""

    place: str
    result: Result
    heard: Literal["error", "done", ""] = ""
    """What the ranks that lived heard of the save; nothing where none lived or nothing was saved."""
    problem: str = ""
    """Why it is wrong, if it is."""
    hung: bool = False


@dataclass(slots=True)
class Row:
    """All cases of one fault in one place."""

    fault: str
    place: str
    cases: int = 0
    previous: int = 0
    new: int = 0
    error: int = 0
    heard_error: int = 0
    heard_done: int = 0
    undetected: int = 0
    hangs: int = 0
    problems: list[str] = field(default_factory=list)
    not_run: str = ""
    seconds: float = 0.0

    def add(self, case: Case) -> None:
        self.cases += 1
        self.previous += case.result == "previous"
        self.new += case.result == "new"
        self.error += case.result == "error"
        self.heard_error += case.heard == "error"
        self.heard_done += case.heard == "done"
        self.undetected += case.result == "wrong" and not case.hung
        self.hangs += case.hung
        if case.problem:
            self.problems.append(f"{case.place}: {case.problem}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Context:
    """Where faults are tried: directories, ranks, and how many of each."""

    def __init__(self, forks: Forks, base: Path, *, short: bool) -> None:
        self.forks = forks
        self.base = base
        self.short = short
        self.lanes = 4 * (os.cpu_count() or 2)
        self._count = 0
        self._pristine: dict[tuple[int, ...], Path] = {}
        self._servers: list[S3Server] = []

    def close(self) -> None:
        """End the servers."""
        for server in self._servers:
            server.close()

    def servers(self) -> list[S3Server]:
        """S3 servers that start at the first call: one, or for all faults one for each two cores."""
        while len(self._servers) < (1 if self.short else 2):
            self._servers.append(S3Server(self.base / f"moto-{len(self._servers)}.log"))
        return self._servers

    def pristine(self, *steps: int, world_size: int = 2) -> Path:
        """A directory with these steps published; not to be changed."""
        key = (world_size, *steps)
        if key not in self._pristine:
            root = self.base / f"pristine-{os.getpid()}-{'-'.join(map(str, key))}"
            self.forks.run(world_size, lambda: publish(root, steps))
            self._pristine[key] = root
        return self._pristine[key]

    def fresh(self, *steps: int, world_size: int = 2, under: Path | None = None) -> Path:
        """A copy of it that may be changed; without steps, a path where nothing is."""
        self._count += 1
        root = (under or self.base) / f"run-{os.getpid()}-{self._count}"
        if steps:
            shutil.copytree(self.pristine(*steps, world_size=world_size), root)
        return root

    def sample(self, items: Sequence[Any], count: int) -> list[Any]:
        """All of them; in the short form ``count``, evenly spaced, first and last among them; or the middle one."""
        if not self.short or len(items) <= count:
            return list(items)
        if count == 1:
            return [items[len(items) // 2]]
        return [items[round(k * (len(items) - 1) / (count - 1))] for k in range(count)]

    def all(self, scenarios: Iterable[Callable[[], Scenario[Any]]]) -> list[Any]:
        return run_all(scenarios, self.lanes)

    def count_calls(self, mode: str, world_size: int = 2) -> list[list[str]]:
        """Labels of the calls of a save of step 2, by rank."""
        root = self.fresh(1, world_size=world_size)

        def counted() -> tuple[Attempt, list[str]]:
            calls: list[str] = []
            return attempt(root, mode, dict.fromkeys(range(world_size), through(calls))), calls

        found = self.forks.run(world_size, counted)
        assert all(result.is_done for result, _ in found), found
        assert all(calls for _, calls in found)
        shutil.rmtree(root)
        return [calls for _, calls in found]

    def batches(
        self, items: Sequence[Any], work: Callable[[Any], Any], *, world_size: int = 2, size: int = 20
    ) -> list[list[Any] | str]:
        """``work(item)`` on all of ``world_size`` ranks, many items by the same ranks: results by rank, for each item.

        Where ranks end or hang over an item: a text that says so.
        """

        def scenario(batch: Sequence[Any]) -> Scenario[list[list[Any] | str]]:
            launch = self.forks.start(world_size, lambda: [work(item) for item in batch])
            yield launch.ended
            if all(launch.has_result(rank) for rank in range(world_size)):
                by_rank = [launch.result(rank) for rank in range(world_size)]
                launch.forget()
                return [list(results) for results in zip(*by_rank, strict=True)]
            if len(batch) == 1:
                kind = "hung" if launch.hung else "ended"
                return [" ".join([f"ranks {kind}:", *(launch.output(r)[-1500:] for r in range(world_size))])]
            found: list[list[Any] | str] = []
            for item in batch:
                found += yield from scenario([item])
            return found

        chosen = [items[k : k + size] for k in range(0, len(items), size)]
        return [f for batch in self.all([lambda b=b: scenario(b) for b in chosen]) for f in batch]

    def find_all(
        self, roots: Sequence[Path], *, saves_next: bool = True, keep: bool = False
    ) -> list[Found | str]:
        """What fresh pairs of ranks find in directories, which are deleted; a text where they failed otherwise."""
        results = self.batches(roots, lambda root: find(root, saves_next=saves_next))
        if not keep:
            for root in roots:
                shutil.rmtree(root, ignore_errors=True)
        return [agreed(by_rank) for by_rank in results]


def agreed(found: list[Found] | str) -> Found | str:
    """What rank 0 found, if the others found the same."""
    if isinstance(found, str):
        return found
    first = found[0]
    for rank, other in enumerate(found):
        if (first.step, first.line) != (other.step, other.line) or bool(first.error) != bool(other.error):
            return f"ranks found different things: {first} and {other}"
        if other.wrong:
            return f"rank {rank} found {'; '.join(other.wrong)}"
    return first


def judge(
    place: str,
    found: Found | str,
    *,
    heard: Sequence[Attempt] = (),
    previous: int = 1,
    new: int = 2,
    allowed: Sequence[int | None] | None = None,
    problem: str = "",
) -> Case:
    """The case for what fresh ranks found, after what those that lived had heard.

    Wrong is: other values, a step that does not verify, leftovers, another step than ``allowed`` (by default the
    one before or the new one), a resume that fails, ranks that heard different things, and a save that was
    reported done whose step is not found.
    """
    allowed = (previous, new) if allowed is None else allowed
    told = {a.is_done for a in heard}
    said: Literal["error", "done", ""] = "" if not heard else "done" if told == {True} else "error"
    if isinstance(found, str):
        return Case(place, "wrong", said, f"{problem} {found}", hung="ranks hung" in found)
    for raw in (a for a in heard if a.outcome.startswith("raw")):
        problem += f" an error that is not ours: {raw.text};"
    if len(told) > 1:
        problem += " some ranks heard that it is done, others of an error;"
    if said == "done" and found.step != new:
        problem += f" the save was done, and step {found.step} was found;"
    if found.error:
        problem += f" resume: {found.error};"
    elif found.wrong:
        problem += f" {'; '.join(found.wrong)};"
    elif found.step not in allowed:
        problem += f" found step {found.step}, expected one of {list(allowed)};"
    if problem:
        return Case(place, "wrong", said, problem.strip())
    return Case(place, "new" if found.step == new else "previous", said)


def rows_of(fault: str, cases: Iterable[Case], seconds: float = 0.0) -> list[Row]:
    """Rows by place, in order of appearance. The place of a case may go on after ``:`` with what tells it apart."""
    rows: dict[str, Row] = {}
    for case in cases:
        place = case.place.partition(": ")[0]
        rows.setdefault(place, Row(fault, place)).add(case)
    total = sum(row.cases for row in rows.values())
    for row in rows.values():
        row.seconds = seconds * row.cases / total
    return list(rows.values())


_HEAD = (
    *("fault", "place", "cases", "previous", "new", "named error"),
    *("ranks heard", "undetected", "hangs", "s"),
)
_LEGEND = """\
previous, new: the step that fresh ranks found afterwards; every value and checksum of it was compared.
named error: the call was refused, by an error that says why. ranks heard: what living ranks were told of the save,
in how many cases an error and in how many that it is done."""


def render(rows: Sequence[Row], seconds: float) -> str:
    """The table as text, with totals, what went wrong, and the verdict as its last line."""
    total = Row("total", "")
    lines: list[tuple[str, ...]] = []
    last = ""
    for row in rows:
        lines.append(_line(row, row.fault if row.fault != last else ""))
        last = row.fault
        for name in ("cases", "previous", "new", "error", "heard_error", "heard_done", "undetected", "hangs"):
            setattr(total, name, getattr(total, name) + getattr(row, name))
    total.seconds = seconds
    lines.append(_line(total, "total"))
    widths = [max(len(line[k]) for line in [_HEAD, *lines]) for k in range(len(_HEAD))]
    text = [_format(_HEAD, widths), "|" + "|".join("-" * (w + 2) for w in widths) + "|"]
    text += [_format(line, widths) for line in lines]
    text += ["", _LEGEND, ""]
    text += [f"UNDETECTED OR HANG in {r.fault}, {p}" for r in rows for p in r.problems]
    text += [f"not run here: {r.fault}, {r.place}: {r.not_run}" for r in rows if r.not_run]
    text.append(f"{total.undetected} undetected, {total.hangs} hangs")
    return "\n".join(text)


def _line(row: Row, fault: str) -> tuple[str, ...]:
    if row.not_run:
        return (fault, row.place, "not run here", *[""] * 7)
    heard = f"{row.heard_error} / {row.heard_done}" if row.heard_error or row.heard_done else ""
    numbers = (row.cases, row.previous, row.new, row.error)
    return (
        *(fault, row.place, *map(str, numbers), heard),
        *(str(row.undetected), str(row.hangs), f"{row.seconds:.0f}"),
    )


def _format(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = [c.ljust(w) if k < 2 else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))]
    return "| " + " | ".join(cells) + " |"
