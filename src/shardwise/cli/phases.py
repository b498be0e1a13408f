"""``plan`` of a training run: its options, and how its phases and the verdict are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..objects import frozen
from .program import DTYPES, memory_size

if TYPE_CHECKING:
    from ..fit.plan import PlanReport
    from ..fit.records import Phase, RunPlan, TrainingSpec
    from ..sharding.fsdp import ShardPolicy

__all__ = ["AskedTraining", "as_training", "asked_training", "planned_lines", "show_phases"]

_OPTIMIZERS = ("adamw", "adamw8bit", "sgd", "momentum")
#: Options of which any one asks for the phases of a run.
_NAMES = (
    "batch_size",
    "sequence_length",
    "optimizer",
    "checkpointing",
    "param_dtype",
    "reduce_dtype",
    "offload",
    "device",
    "bandwidth",
    "keep_last",
    "fit",
    "host",
    "explain",
)


def as_training(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that describe a training run. Any one of them asks for its phases."""
    sizes: dict[str, Any] = {"callback": memory_size, "metavar": "SIZE", "default": None}
    options = (
        click.option(
            "--batch-size", type=click.IntRange(1), default=None, help="Samples per rank in one forward pass."
        ),
        click.option("--sequence-length", type=click.IntRange(1), default=None, help="Tokens per sample."),
        click.option("--optimizer", type=click.Choice(_OPTIMIZERS), default=None, help="Default: adamw."),
        click.option("--checkpointing", is_flag=True, help="Use activation checkpointing for each block."),
        click.option(
            "--param-dtype",
            type=click.Choice(DTYPES),
            default=None,
            help="Mixed precision: dtype of the forward pass.",
        ),
        click.option(
            "--reduce-dtype",
            type=click.Choice(DTYPES),
            default=None,
            help="Mixed precision: dtype in which gradients are reduced.",
        ),
        click.option(
            "--offload", is_flag=True, help="Keep shards, gradients and optimizer state in host memory."
        ),
        click.option(
            "--device", type=click.Choice(("cuda", "unified", "cpu")), default=None, help="Default: cuda."
        ),
        click.option(
            "--bandwidth", help="Bandwidth of the checkpoint storage, in bytes per second.", **sizes
        ),
        click.option(
            "--keep-last",
            type=click.IntRange(1),
            default=None,
            help="Number of checkpoints that the run keeps. Default: 3.",
        ),
        click.option(
            "--fit",
            help="Memory of one device: check whether the run fits, or what would make it fit.",
            **sizes,
        ),
        click.option(
            "--host", help="Memory of one host: check whether the run fits into that, too.", **sizes
        ),
        click.option("--explain", is_flag=True, help="Show each number with its formula and error bar."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@frozen
class AskedTraining:
    """The run that the options describe, as arguments of ``plan``; without any of them, none."""

    training: TrainingSpec | None
    policy: ShardPolicy | None
    device_limit_bytes: int | None
    host_limit_bytes: int | None
    explain: bool

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("training", "policy", "device_limit_bytes", "host_limit_bytes")
        return {name: getattr(self, name) for name in names}


def asked_training(options: dict[str, Any]) -> AskedTraining:
    """Take the options of :func:`as_training` out of ``options``."""
    given = {name: options.pop(name) for name in _NAMES}
    if not any(given.values()):
        return AskedTraining(None, None, None, None, False)
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from ..dtypes import named_dtype
    from ..fit.records import TrainingSpec
    from ..sharding.fsdp import ShardPolicy

    fields: Mapping[str, Any] = {
        "batch_size": given["batch_size"],
        "sequence_length": given["sequence_length"],
        "optimizer": given["optimizer"],
        "checkpointing": given["checkpointing"],
        "device": given["device"],
        "bytes_per_s": given["bandwidth"],
        "keep_last": given["keep_last"],
    }
    mixed: dict[str, Any] = {
        name: given[name] and named_dtype(given[name]) for name in ("param_dtype", "reduce_dtype")
    }
    precision = MixedPrecisionPolicy(**mixed) if any(mixed.values()) else None
    return AskedTraining(
        TrainingSpec(**{name: value for name, value in fields.items() if value}),
        ShardPolicy(mixed_precision=precision, cpu_offload=given["offload"]),
        given["fit"],
        given["host"],
        given["explain"],
    )


def planned_lines(report: PlanReport, *, is_own_dtype: bool) -> list[str]:
    """What was planned, for the first lines: the assumptions that change the numbers most. ``is_own_dtype``: nobody gave a dtype."""
    own = " (the model's own dtype; --dtype changes it)" if is_own_dtype else ""
    if report.run is None:
        return [
            f"Planned: loading only, in {', '.join(report.dtypes)}{own}. To plan a training run too, add --fit or another training option"
        ]
    setup = report.run.setup
    trained = f", trained {', '.join(setup.trained)}" if setup.trained != setup.parameters else ""
    states = ", ".join(setup.optimizer_states) or "none"
    lines = [
        f"Planned: {setup.optimizer}; parameters {', '.join(setup.parameters)}{trained}{own}, compute {setup.compute}, reductions "
        f"{setup.reductions}, optimizer states {states}; {setup.batch_size} x {setup.sequence_length} tokens per rank; storage at "
        f"{setup.bytes_per_s / 1e9:g} GB/s"
    ]
    if is_own_dtype and {"bfloat16", "float16"}.issuperset(setup.trained):
        lines.append(
            "  for fp32 weights and bf16 compute, use: --dtype float32 --param-dtype bfloat16 --reduce-dtype float32"
        )
    return lines


def show_phases(out: Console, run: RunPlan, *, explain: bool, size: Callable[[int], str]) -> None:
    """Print the phases of a run."""
    hosted = f"host, {run.ranks_per_host} rank{'s' * (run.ranks_per_host > 1)}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("phase", "device", "at most", hosted, "at most", "page cache"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in run.phases:
        table.add_row(phase.name, *(size(n) if n else "-" for n in _columns(run, phase)))
    out.print(table)
    out.print(Text("\n".join(_lines(run, size))), soft_wrap=True)
    if explain:
        _show_formulas(out, run, size)


def _lines(run: RunPlan, size: Callable[[int], str]) -> list[str]:
    stored, is_alone = run.checkpoint, run.nodes == 1
    lines = [
        f"per checkpoint: {size(stored.nbytes)} in {stored.files} files, {stored.seconds:.0f} s; "
        f"{stored.requests} requests to an object store",
        f"all checkpoints: {size(stored.run_bytes)} with keep_last={stored.kept}, including the one being written",
    ]
    lines += [
        f"{one.phase}: {one.verb} up to {size(one.rank_bytes)} per rank, "
        + ("" if is_alone else f"{size(one.node_bytes)} per node ({run.nodes} nodes), ")
        + f"{size(one.total_bytes)} in total; {one.seconds:.0f} s"
        for one in run.files
    ]
    between = "" if is_alone else f"; {size(run.node_bytes_per_step)} per node from other nodes"
    parts = "; ".join(f"{flow.what}: {size(flow.rank_bytes)}" for flow in run.network)
    lines += [
        f"largest all-gather: {size(run.largest_gather_bytes)}; largest reduce-scatter: {size(run.largest_reduce_bytes)}",
        f"received per step: {size(run.network_bytes_per_step)} per rank"
        + (f" ({parts})" if parts else "")
        + between,
        f"assumed: {'; '.join(run.assumptions)}",
    ]
    return lines


def _columns(run: RunPlan, phase: Phase) -> tuple[int, ...]:
    device, host = phase.nbytes("device"), phase.nbytes("host")
    device_upper, host_upper = run.needed(phase)
    if run.is_unified:
        device, host = device + host, device + host
    return (
        device,
        device_upper,
        host * run.ranks_per_host,
        host_upper,
        phase.nbytes("page cache") * run.ranks_per_host,
    )


def _show_formulas(out: Console, run: RunPlan, size: Callable[[int], str]) -> None:
    for phase in run.phases:
        out.print(Text(phase.name, "bold"))
        for a in phase.amounts:
            if a.nbytes:
                line = f"  {a.what} ({a.where}): {size(a.nbytes)}, at most {size(a.upper_bytes)}: {a.formula}"
                out.print(Text(line), soft_wrap=True)
    out.print(Text("network, each step", "bold"))
    for flow in run.network:
        line = f"  {flow.what}: {size(flow.rank_bytes)} per rank, {size(flow.node_bytes)} per node from other nodes: {flow.formula}"
        out.print(Text(line), soft_wrap=True)
