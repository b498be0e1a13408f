"""``shardwise doctor``: what will bite on this machine and with these files."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from .commands import main
from .options import AnyPath, common
from .program import FINE, WRONG_DATA, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..doctor.examine import Diagnosis

__all__: list[str] = []


@main.command(short_help="Find problems of this machine, these files and logs.")
@click.argument("path", nargs=-1, type=AnyPath(path_type=str))
@click.option(
    "--ranks",
    type=click.IntRange(1, 16_384),
    default=None,
    metavar="N",
    help="Ranks on this host. Default: as the launcher, a given YAML or the devices say.",
)
@common
def doctor(path: tuple[str, ...], ranks: int | None, as_json: bool) -> int:
    """Say what will bite on this machine and with these files, why, and what to do.

    Each PATH may be an Accelerate YAML, TrainingArguments as JSON, a model directory, a checkpoint or a directory of them, a
    log, or a directory or URL in which the run will write: that one is probed with a few files, which are deleted. Under
    torchrun the ranks compare what they see, and rank 0 names the odd one out. Takes at most 30 s. Status 1 if something will
    fail, or cost time, memory or data; a note, which is worth knowing, leaves it 0.
    """
    from ..doctor.examine import examine
    from .terminal import console

    with _terminated_as_interrupted():
        diagnosis = examine(path, ranks=ranks)
    if not diagnosis.speaks:
        return FINE  # a launcher ends all ranks when one fails: rank 0 must speak first
    if as_json:
        print_json(diagnosis.to_json())
    else:
        _show(console(), diagnosis)
    return WRONG_DATA if diagnosis.bites else FINE


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM raise, so that a probe deletes what it wrote. Leaves a handler that is not Python's default alone."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _show(out: Console, diagnosis: Diagnosis) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from ..doctor.table import RULES
    from .render import plain

    for finding in diagnosis.findings:
        head = (finding.rule, "bold red") if finding.kind == "bites" else (f"note: {finding.rule}", "bold")
        out.print(Text.assemble(head, "  ", plain(finding.where)))
        lines = Table.grid(padding=(0, 1))
        for label, text in (("what", finding.bites), ("why", finding.why), ("do", finding.do)):
            lines.add_row(Text(label, style="dim"), Text(plain(text)))
        lines.add_row(Text("see", style="dim"), Text(finding.source, style="dim"))
        out.print(Padding(lines, (0, 0, 1, 2)))
    facts = diagnosis.facts
    notes = sum(finding.kind == "note" for finding in diagnosis.findings)
    count = len(diagnosis.findings) - notes
    met = (
        ""
        if facts.meeting is None
        else f", {len(facts.meeting.ranks)} of {facts.meeting.world_size} ranks met"
    )
    verdict = "no finding" if not count else f"{count} finding{'s' if count > 1 else ''}"
    verdict += f", {notes} note{'s' if notes > 1 else ''}" if notes else ""
    out.print(Text(f"{verdict}: {len(RULES)} rules, {facts.ranks} ranks on this host{met}"))
