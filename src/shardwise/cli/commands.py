"""The commands. Each parses, calls the library and renders. Heavy imports wait until they are needed."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from .. import __version__
from ..errors import NoCheckpointError, ShardwiseError, SourceError
from .phases import as_training, asked_training, show_phases
from .program import (
    DTYPES,
    ERRORS,
    FINE,
    ONLY_A_PART,
    WRONG_DATA,
    AnyPath,
    Program,
    anchor_of,
    answer,
    as_load_pretrained,
    byte_count,
    check_axes,
    common,
    config,
    console,
    debug,
    doctors_rules,
    model_class,
    new_adapter,
    one_model,
    one_step,
    option,
    print_json,
    quantized_as,
    rank_of_launcher,
    rows_of,
    section_of,
    source_path,
    trust_remote_code,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..doctor.examine import Diagnosis
    from .render import Inspection


_COUNT, _RANKS = click.IntRange(1), click.IntRange(1, 16_384)


@click.group(cls=Program, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@debug
def main() -> None:
    """Load, save, and resume sharded PyTorch models (FSDP2, DTensor).

    Exit status: 0 success, 1 a problem with your data, 2 usage error.
    """


@main.command(short_help="Show the tensors and sizes of a model or checkpoint.")
@source_path
@common
def inspect(path: str, as_json: bool) -> int:
    """Show the contents of a model, a diffusers pipeline, a checkpoint, or a directory of checkpoints.

    Only headers and manifests are read. PATH can be the ID of a model on the hub if it's in the local cache; nothing is downloaded.
    The exit code is 1 if a published step or a pipeline's component is damaged. One host's part of a step doesn't count as damaged.
    """
    from .render import contents_of, show_contents, to_json

    contents = contents_of(path)
    if as_json:
        print_json({**to_json(contents), "ok": _is_sound(contents)})
    else:
        show_contents(console(), contents)
    return FINE if _is_sound(contents) else WRONG_DATA


def _is_sound(contents: Inspection) -> bool:
    from ..runs.history import RootContents
    from .render import SourceContents

    if isinstance(contents, RootContents):
        return bool(contents.steps) and all(step.ok is not False for step in contents.steps)
    return isinstance(contents, SourceContents) or not contents.problems


@main.command(short_help="Show how many GPUs a model needs, or whether it fits.")
@source_path
@option(
    "--ranks",
    type=_RANKS,
    metavar="N",
    help="Number of ranks. With --fit, the default is the smallest number that fits.",
)
@option(
    "--replicas", type=_COUNT, default=1, metavar="R", help="Copies of the model (HSDP). R must divide N."
)
@option("--dtype", type=click.Choice(("auto", *DTYPES)), default="auto", help="Default: the config's dtype.")
@option("--tp", type=_COUNT, default=1, metavar="T", help="Ranks for tensor parallelism.")
@option("--ep", type=_COUNT, default=1, metavar="E", help="Ranks for expert parallelism.")
@option(
    "--nodes",
    type=_COUNT,
    metavar="H",
    help="Number of hosts. Default: as many as the ranks need if every host has as many devices as this one; 1 if it has none.",
)
@as_training
@as_load_pretrained
@config
@trust_remote_code
@common
def plan(
    path: str,
    ranks: int | None,
    nodes: int | None,
    auto_class: str | None,
    key_mapping: tuple[tuple[str, str], ...],
    adapter: str | None,
    quantized: str,
    as_json: bool,
    **options: Any,
) -> int:
    """Show how many GPUs a model needs, and what it takes to load and train it on N ranks, without loading it.

    For example, plan PATH --fit 80GiB tells you how many 80 GiB GPUs a training run needs, and what takes the memory.

    The command creates the plan that load_pretrained would run on each rank, and checks that it's complete. PATH is a directory, the ID of a
    model on the hub (only the headers of its weights are downloaded), or a URL (the requests to it are counted). With --device cpu, you get
    a warning if this host, or its container, doesn't have enough memory for its share of the ranks.

    With any of the training options (--batch-size through --explain), you also see each phase of the run: load, steps, saves, resume,
    export. For these, a config.json without weights is enough. The exit code is 1 if the run doesn't fit into --fit or --host.

    If PATH is a diffusers pipeline, you see each of its models, whole and sharded. With --fit, you also see which ones to shard. To
    plan the load of one model, add --subfolder transformer. To plan its training, use sw.plan from Python.
    """
    from ..fit.plan import plan as plan_model
    from .render import nodes_like_this, show_plan, this_host

    if not options["subfolder"] and _is_pipeline(path, options):
        return _plan_pipeline(path, ranks, as_json, options)
    on_this_host, is_own_dtype = options["device"] == "cpu", options["dtype"] == "auto"
    asked, is_explained = asked_training(options)
    if ranks is None:
        if asked.get("device_limit_bytes") is None:
            raise click.UsageError("pass --ranks N, or --fit SIZE to find out how many ranks the run needs")
        if nodes is not None:
            raise click.UsageError("--nodes needs --ranks; without it, hosts have 8 ranks")
    else:
        axes = {axis: options[axis] for axis in ("replicas", "tp", "ep")}
        check_axes(ranks=ranks, nodes=nodes or 1, **axes)
        nodes = nodes or nodes_like_this(ranks)
    report = plan_model(
        one_step(path),
        ranks=ranks,
        nodes=nodes or 1,
        auto_class=model_class(auto_class),
        key_mapping=dict(key_mapping),
        adapter=new_adapter(adapter),
        quantized=quantized_as(quantized),
        **asked,
        **options,
    )
    host = this_host(report, -(-report.ranks // (nodes or -(-report.ranks // 8))))
    if as_json:
        print_json({**report.to_json(), "host": None if host is None else host.to_json()})
    else:
        show_plan(console(), report, host if on_this_host else None, is_own_dtype=is_own_dtype)
        if report.run is not None:
            show_phases(console(), report.run, explain=is_explained)
    return FINE if report.verdict is None or report.verdict.outcome == "fits" else WRONG_DATA


def _is_pipeline(path: str, options: dict[str, Any]) -> bool:
    from ..fit.pipelines import find_components
    from ..models.hub import HubOptions

    hub = HubOptions(revision=options["revision"], cache_dir=options["cache_dir"])
    return find_components(path, hub) is not None


#: The options of ``plan`` that apply to a pipeline.
_OF_PIPELINES = {"path", "ranks", "replicas", "dtype", "fit", "revision", "variant", "cache_dir", "as_json"}


def _plan_pipeline(path: str, ranks: int | None, as_json: bool, options: dict[str, Any]) -> int:
    from ..dtypes import named_dtype
    from ..fit.pipelines import plan_pipeline
    from .render import show_pipeline_plan

    context = click.get_current_context()
    for name in context.params.keys() - _OF_PIPELINES:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            given = f"--{name.replace('_', '-')}"
            raise click.UsageError(
                f"{given} doesn't apply to a pipeline; with --subfolder, one of its models is planned"
            )
    if ranks is None and options["fit"] is None:
        raise click.UsageError("pass --ranks N, or --fit SIZE to find out how many ranks the pipeline needs")
    if ranks is not None:
        check_axes(ranks=ranks, nodes=1, replicas=options["replicas"], tp=1, ep=1)
    dtype = None if options["dtype"] == "auto" else options["dtype"]
    report = plan_pipeline(
        path,
        ranks=ranks,
        device_limit_bytes=options["fit"],
        dtype=dtype and named_dtype(dtype),
        **{name: options[name] for name in ("replicas", "revision", "variant", "cache_dir")},
    )
    given = f", dtype=torch.{dtype}" * (dtype is not None)
    given += "".join(
        f", {name}={options[name]!r}" for name in ("variant", "revision", "cache_dir") if options[name]
    )
    answer(report, as_json, partial(show_pipeline_plan, given=given))
    return WRONG_DATA if report.device_limit_bytes is not None and report.shard is None else FINE


@main.command(short_help="Check every byte of a checkpoint, or of a whole run.")
@source_path
@option("--threads", type=click.IntRange(1, 256), metavar="N", help="Default: number of cores, at most 8.")
@common
def verify(path: str, threads: int | None, as_json: bool) -> int:
    """Check every byte of a checkpoint, or of every step in a directory of checkpoints.

    If PATH is a diffusers pipeline, its indexes and headers are checked, and that each model's files contain exactly the tensors that its
    class wants. Published weights have no checksums to compare their values with.

    If PATH is one host's part of a step (Checkpointer(local=True)), only that host's files are checked. If they're intact, the exit code
    is 3, because the rest of the step wasn't checked.
    """
    from ..catalog.pipelines import pipeline_at
    from ..checkpoint.verify import verify as verify_one
    from ..runs.history import is_root
    from .render import show_pipeline_proof, show_verify

    if pipeline_at(path) is not None:
        from ..fit.pipelines import verify_pipeline

        proof = verify_pipeline(path)
        answer(proof, as_json, show_pipeline_proof)
        return WRONG_DATA if proof.problems else FINE
    if not is_root(path):
        report = verify_one(path, threads=threads)
        answer(report, as_json, show_verify)
        return WRONG_DATA if report.problems else ONLY_A_PART if report.part is not None else FINE
    return _verify_steps(path, threads, as_json)


@main.command(short_help="Compare two models or checkpoints tensor by tensor.")
@click.argument("first", type=click.Path(path_type=str))
@click.argument("second", type=click.Path(path_type=str))
@click.option(
    "--all", "every", is_flag=True, help="Show every changed tensor, not only the 20 that changed most."
)
@common
def diff(first: str, second: str, every: bool, as_json: bool) -> int:
    """Compare two models or checkpoints tensor by tensor: added, removed, changed, and by how much.

    If both are checkpoints, their optimizers are compared, too; the output tells you if that isn't possible. Schedulers, RNG states and data
    positions aren't compared. If you pass a run's directory, its newest valid step is used. The exit code is 1 if the two differ.
    """
    from ..runs.diff import diff as diff_sources
    from .render import show_diff

    report = diff_sources(one_step(first), one_step(second))
    answer(report, as_json, partial(show_diff, every=every))
    return FINE if report.ok else WRONG_DATA


def _verify_steps(root: str, threads: int | None, as_json: bool) -> int:
    from ..checkpoint.verify import verify as verify_one
    from ..format.manifest import MANIFEST_NAME
    from ..publish.line import line_of
    from ..runs.history import others_steps
    from ..storage import is_file
    from ..storage.records import is_url, join
    from .render import show_problems, show_verify

    line = line_of(root)
    steps = {step: join(root, name) for step, name in line.steps().items()}
    if not steps and not is_url(root) and (others := others_steps(root)):
        steps = {step: path for step, path in others.items() if is_file(join(path, MANIFEST_NAME))}
        if not steps:
            raise NoCheckpointError(
                f"{root}: contains checkpoints of the HF Trainer or Accelerate, which have no checksums to verify. To check for missing "
                f"files that a resume needs: shardwise doctor {shlex.quote(root)}"
            )
    if not steps:
        raise NoCheckpointError(
            line.strangers()
            or f"{root}: steps were published, but all were renamed as damaged or superseded; give the path of one to verify it"
        )
    documents: list[dict[str, Any]] = []
    for step, path in steps.items():
        try:
            report = verify_one(path, threads=threads)
            documents.append(report.to_json())
            if not as_json:
                show_verify(console(), report)
        except ShardwiseError as error:
            documents.append(
                {"path": path, "step": step, "ok": False, "problems": [str(error)], "part": None}
            )
            if not as_json:
                show_problems(console(), [str(error)])
    ok = all(document["ok"] for document in documents)
    sound = [step for step, document in zip(steps, documents, strict=True) if document["ok"]]
    newest = max(sound) if sound else None
    if as_json:
        print_json({"path": root, "ok": ok, "resumes_from": newest, "steps": documents})
    elif newest is None:
        click.echo("no step is intact: resuming would raise NoCheckpointError")
    elif not any(document["part"] for document in documents):  # of parts, all hosts' together decide
        click.echo(f"resuming would use step {newest}" + f", not {max(steps)}" * (newest != max(steps)))
    if any(document["problems"] for document in documents):
        return WRONG_DATA
    return ONLY_A_PART if any(document["part"] for document in documents) else FINE


@main.command(short_help="Copy a model or checkpoint, and verify the copy.")
@source_path
@click.argument("out", type=click.Path(path_type=str))
@common
def copy(path: str, out: str, as_json: bool) -> None:
    """Copy the checkpoint or model directory PATH to OUT, and verify the copy.

    Either can be a URL in an object store (s3://bucket/prefix). A local OUT must not exist. If a copy is interrupted, run the command again to
    continue it.
    """
    from ..publish.copy import copy_checkpoint
    from .render import show_report

    report = copy_checkpoint(path, out)
    answer(report, as_json, show_report)


@main.command(short_help="Write a checkpoint as a Hugging Face model.")
@source_path
@click.argument("out", type=click.Path(path_type=str))
@option("--dtype", type=click.Choice(DTYPES), help="Default: unchanged.")
@click.option(
    "--max-shard-bytes",
    callback=byte_count,
    default="5GiB",
    show_default=True,
    metavar="SIZE",
    help="Maximum size of a file.",
)
@option(
    "--quantize",
    type=click.Choice(["as-source"]),
    help="Write the quantized format of --source. Default: plain weights.",
)
@option("--source", metavar="PATH", help="The quantized model from which this one was loaded.")
@option("--variant", help="Part of the file names, such as bf16. Changes no dtype.")
@option(
    "--pipeline",
    metavar="DIR",
    help="Diffusers pipeline, a directory or Hub ID: write a copy of it with the checkpoint's models.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier export at OUT, atomically.")
@one_model
@config
@trust_remote_code
@common
def export(
    path: str,
    out: str,
    dtype: str | None,
    quantize: Literal["as-source"] | None,
    source: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Export the model at PATH to OUT, as a Hugging Face directory.

    PATH is a shardwise or DCP checkpoint, or safetensors files. If it's a run's directory, its newest valid step is exported; the run can keep
    saving and deleting steps in the meantime. PATH and OUT can be URLs in object stores. Run the command in one process, or with torchrun
    to share the work among ranks. With --pipeline, each model of the checkpoint replaces the component of its name; if the checkpoint has only
    one model, give the component with --model. With --quantize as-source, unchanged tensors are copied from the quantized source, byte for byte.
    """
    if (quantize is None) != (source is None):
        raise click.UsageError(
            "--quantize as-source and --source must be used together: pass both or neither"
        )
    if quantize is not None and dtype is not None:
        raise click.UsageError(
            "--dtype and --quantize can't be combined, because the source determines the dtypes; give one of them"
        )
    from ..export.hub import export_hf
    from .render import show_export

    with _ranks_of_launcher() as rank:
        report = export_hf(one_step(path), out, dtype=dtype, quantize=quantize, source=source, **options)
        if rank != 0:
            return
        answer(report, as_json, show_export)


@main.command(short_help="Convert a training checkpoint from another library.")
@source_path
@click.argument("out", type=click.Path(path_type=str))
@click.option("--to", type=click.Choice(("checkpoint", "hf")), required=True, help="Format of OUT.")
@one_model
@config
@trust_remote_code
@common
def convert(path: str, out: str, to: str, model_name: str | None, as_json: bool, **given: Any) -> None:
    """Convert the run at PATH to a checkpoint, or its model to a Hugging Face directory (like export).

    PATH is a checkpoint from Accelerate, the HF Trainer, torchtitan, transformers or torch.distributed.checkpoint (sharded or full); safetensors
    files; or a shardwise checkpoint, to re-shard it. If it's a run's directory, its newest valid step is used. If PATH contains an optimizer,
    a scheduler or a scaler, a checkpoint gets them, too. To resume from OUT with a Checkpointer, name it step-NNNNNNNN and put it in the
    Checkpointer's directory. PATH and OUT can be URLs in object stores. Run the command in one process, or with torchrun to share the work
    among ranks.
    """
    if model_name is not None and to != "hf":
        raise click.BadParameter(
            "a checkpoint contains all models; use this option with --to hf", param_hint="'--model-name'"
        )
    from ..export.hub import export_hf
    from ..runs.convert import convert as to_checkpoint
    from .render import show_export, show_report

    with _ranks_of_launcher() as rank:
        report: Any
        path = one_step(path)
        if to == "hf":
            report, show = export_hf(path, out, model_name=model_name, **given), show_export
        else:
            report, show = to_checkpoint(path, out, **given), show_report
        if rank != 0:
            return
        answer(report, as_json, show)


@main.command(short_help="Write an HTML page about a run.")
@click.argument("paths", type=click.Path(path_type=str), nargs=-1, required=True, metavar="RUN...")
@click.option("--out", default="report.html", show_default=True, metavar="FILE", help="The file to write.")
@option(
    "--plan",
    metavar="FILE",
    help="A saved output of `shardwise plan --json` to compare with. Default: RUN/plan*.json.",
)
@common
def report(paths: tuple[str, ...], out: str, plan: str | None, as_json: bool) -> None:
    """Write one HTML file about a run: losses, crashes, whether each resume was exact, memory by phase, checkpoints.

    RUN is a run's directory (it contains checkpoints, or checkpoints/, ledger/ and loss.jsonl; or it's the HF Trainer's output_dir), the
    URL of a run's checkpoints, a directory written by sw.reports.memory_ledger, a JSON Lines file with step and loss, a trainer_state.json, or a
    log that contains losses. You can pass several, for one combined report. The file works offline. The command needs the extra "plot".
    """
    from ..report.report import write_report

    written = write_report(paths, out, plan=plan)
    nbytes = written.stat().st_size
    if as_json:
        print_json({"path": str(written), "bytes": nbytes})
    else:
        click.echo(f"{written}: {nbytes / 1024:.0f} KiB, a single file to open or send")


@main.command(short_help="Show the causes of an error, and how to fix it.")
@click.argument("error", metavar="ERROR")
@common
def explain(error: str, as_json: bool) -> None:
    """Show the causes of an error, and how to fix it.

    ERROR is an error type (PlanError), part of an error message ("missing: parameter"), or one of doctor's checks (log.loss-jump).
    """
    from rich.markdown import Markdown

    if error in ERRORS:
        text, page = section_of(error), anchor_of(error)
    elif rows := rows_of(error):
        text = "\n\n".join(f"**{name}**: {cause}\n\n{fix}" for name, cause, fix in rows)
        page = anchor_of(rows[0][0])
    elif text := doctors_rules(error):
        page = "docs/howto/doctor.md"
    else:
        raise click.BadParameter(
            f"no known error matches {error!r}; give a part of its message, or its type: {', '.join(ERRORS)}",
            param_hint="'ERROR'",
        )
    if as_json:
        print_json({"name": error, "page": page, "text": text})
    else:
        console().print(Markdown(text, hyperlinks=False))


@contextmanager
def _ranks_of_launcher() -> Iterator[int]:
    """Under torchrun, a gloo group during the block. Yields this process's rank."""
    rank, world_size = rank_of_launcher()
    if world_size == 1:
        yield rank
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield rank
    finally:
        dist.destroy_process_group()


@main.command(short_help="Load, train, crash, resume and export on this machine.")
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option(
    "--out",
    default="shardwise-demo",
    show_default=True,
    metavar="DIR",
    help="A directory, or a URL for the checkpoints; all other files are then written locally.",
)
@click.option(
    "--ranks", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N", help="Ranks to start."
)
@common
def demo(path: Path | None, out: str, ranks: int, as_json: bool) -> int:
    """Demonstrate the main features on this machine: load, train, get killed, resume, reshard, export.

    PATH is a local directory with a causal, masked or encoder model. Default: a small sentence encoder.
    """
    if path is not None and not path.is_dir():
        raise SourceError("no such directory; give a local model directory", path=str(path))
    from ..demo.run import run_demo

    result = run_demo(out, model=path, ranks=ranks, console=console(err=as_json))
    if as_json:
        print_json(result)
    return FINE if result.get("ok", True) else WRONG_DATA


# ----------------------------------------------------------------------------------------------------
# ``shardwise doctor``: checks this machine and the given files for known problems.


@main.command(short_help="Find problems with this machine, your files and logs.")
@click.argument("path", nargs=-1, type=AnyPath(path_type=str))
@option(
    "--ranks",
    type=_RANKS,
    metavar="N",
    help="Ranks on this host. Default: taken from the launcher, an Accelerate YAML, or the number of devices.",
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
    """Check this machine and your files for known problems, and explain how to fix each one.

    Each PATH can be an Accelerate YAML, TrainingArguments (as JSON, or training_args.bin), a model directory, a checkpoint, a directory of
    checkpoints (including the HF Trainer's output_dir and Accelerate projects), a trainer_state.json, a log, or a directory or URL that the run
    will write to. Doctor tests that one by writing a few files, and deletes them afterwards.

    The output starts with the type of each PATH. Under torchrun, the ranks compare their findings, and rank 0 names the ranks that differ. The
    command takes at most 30 s. The exit code is 1 if something will fail, or cost time, memory or data. Notes don't affect it.
    """
    from ..doctor.examine import examine

    with _terminated_as_interrupted():
        diagnosis = examine(path, outputs=run, ranks=ranks)
    if not diagnosis.speaks:
        return FINE  # a launcher ends all ranks when one fails: rank 0 must speak first
    answer(diagnosis, as_json, _show)
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

    from ..doctor.facts import count
    from ..doctor.rules import RULES
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
