"""``shardwise doctor``: checks this machine and the given files for known problems."""

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


@main.command(short_help="Find problems with this machine, these files and logs.")
@click.argument("path", nargs=-1, type=AnyPath(path_type=str))
@click.option(
    "--ranks",
    type=click.IntRange(1, 16_384),
    default=None,
    metavar="N",
    help="Ranks on this host. Default: from the launcher, a given YAML, or the devices.",
)
@click.option(
    "--run",
    multiple=True,
    type=AnyPath(path_type=str),
    metavar="PATH",
    help="Directory or URL that the run will write to; it doesn't have to exist yet. Can be repeated.",
)
@common
def doctor(path: tuple[str, ...], run: tuple[str, ...], ranks: int | None, as_json: bool) -> int:
    """Check this machine and these files for known problems; explain each and how to fix it.

    Each PATH may be an Accelerate YAML, TrainingArguments as JSON or in training_args.bin, a model directory, a checkpoint or a
    directory of them (also the HF Trainer's output_dir or an Accelerate project), a trainer_state.json, a log, or a directory or
    URL in which the run will write:
    that one is tried with a few files, which are deleted. It says first what each PATH was taken for. Under
    torchrun the ranks compare what they see, and rank 0 names the odd one out. Takes at most 30 s. Status 1 if something will
    fail, or cost time, memory or data; a note, which is worth knowing, leaves it 0.
    """
    from ..doctor.examine import examine
    from .terminal import console

    with _terminated_as_interrupted():
        diagnosis = examine(path, outputs=run, ranks=ranks)
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

    from ..doctor.rule import count
    from ..doctor.table import RULES
    from .render import plain

    facts = diagnosis.facts
    for path, words in facts.taken_for.items():
        out.print(Text.assemble(plain(path), (": " + plain(words), "dim")), soft_wrap=True)
    if facts.taken_for:
        out.print()
    for finding in diagnosis.findings:
        head = (finding.rule, "bold red") if finding.kind == "problem" else (f"note: {finding.rule}", "bold")
        out.print(Text.assemble(head, "  ", plain(finding.where)))
        lines = Table.grid(padding=(0, 1))
        for label, text in (("what", finding.bites), ("why", finding.why), ("do", finding.do)):
            lines.add_row(Text(label, style="dim"), Text(plain(text)))
        lines.add_row(Text("see", style="dim"), Text(finding.source, style="dim"))
        out.print(Padding(lines, (0, 0, 1, 2)))
    notes = sum(finding.kind == "note" for finding in diagnosis.findings)
    bites = len(diagnosis.findings) - notes
    verdict = f"{count(bites, 'problem')} found" if bites else "No problems found"
    verdict += f", {count(notes, 'note')}" if notes else ""
    about = f"{count(len(RULES), 'check')}, {count(facts.ranks, 'rank')} on this host"
    if facts.meeting is not None:
        about += f", {len(facts.meeting.ranks)} of {count(facts.meeting.world_size, 'rank')} met"
    out.print(Text(f"{verdict} ({about}).", "bold red" if bites else "green"))
