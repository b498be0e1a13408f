"""``plan`` of a training run: its options, and how its phases and the verdict are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..operations.operation import size
from .program import DTYPES, memory_size, option, options

if TYPE_CHECKING:
    from ..fit.plan import PlanReport
    from ..fit.records import Phase, RunPlan


#: Options of a training run, any of which asks for its phases, and their fields of :class:`TrainingSpec`.
_NAMES = {
    "batch_size": "batch_size",
    "sequence_length": "sequence_length",
    "optimizer": "optimizer",
    "checkpointing": "checkpointing",
    "device": "device",
    "bandwidth": "bytes_per_s",
    "keep_last": "keep_last",
    **dict.fromkeys(("param_dtype", "reduce_dtype", "offload", "fit", "host", "explain")),
}

_COUNT, _DTYPE = click.IntRange(1), click.Choice(DTYPES)
_SIZE: dict[str, Any] = {"callback": memory_size, "metavar": "SIZE"}
#: The options that describe a training run.
as_training = options(
    option("--batch-size", type=_COUNT, help="Samples per rank in one forward pass."),
    option("--sequence-length", type=_COUNT, help="Tokens per sample."),
    option(
        "--optimizer",
        type=click.Choice(("adamw", "adamw8bit", "sgd", "momentum")),
        help="Default: adamw.",
    ),
    click.option("--checkpointing", is_flag=True, help="Use activation checkpointing for each block."),
    option("--param-dtype", type=_DTYPE, help="Mixed precision: dtype of the forward pass."),
    option("--reduce-dtype", type=_DTYPE, help="Mixed precision: dtype in which gradients are reduced."),
    click.option(
        "--offload", is_flag=True, help="Keep shards, gradients and optimizer state in host memory."
    ),
    option("--device", type=click.Choice(("cuda", "unified", "cpu")), help="Default: cuda."),
    option("--bandwidth", help="Bandwidth of the checkpoint storage, in bytes per second.", **_SIZE),
    option("--keep-last", type=_COUNT, help="Number of checkpoints that the run keeps. Default: 3."),
    option(
        "--fit", help="Memory of one device: check whether the run fits, or what would make it fit.", **_SIZE
    ),
    option("--host", help="Memory of one host: check whether the run fits into that, too.", **_SIZE),
    click.option("--explain", is_flag=True, help="Show each number with its formula and error bar."),
)


def asked_training(options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Take the options of :data:`as_training` out of ``options``: the arguments of ``plan`` that they describe, and ``--explain``.

    Without any of them there is no run, and no argument.
    """
    given = {name: options.pop(name) for name in _NAMES}
    if not any(given.values()):
        return {}, False
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from ..dtypes import named_dtype
    from ..fit.records import TrainingSpec
    from ..sharding.fsdp import ShardPolicy

    mixed: dict[str, Any] = {
        name: given[name] and named_dtype(given[name]) for name in ("param_dtype", "reduce_dtype")
    }
    precision = MixedPrecisionPolicy(**mixed) if any(mixed.values()) else None
    arguments = {
        "training": TrainingSpec(**{field: given[n] for n, field in _NAMES.items() if field and given[n]}),
        "policy": ShardPolicy(mixed_precision=precision, cpu_offload=given["offload"]),
        "device_limit_bytes": given["fit"],
        "host_limit_bytes": given["host"],
    }
    return arguments, given["explain"]


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


def show_phases(out: Console, run: RunPlan, *, explain: bool) -> None:
    """Print the phases of a run."""
    hosted = f"host, {run.ranks_per_host} rank{'s' * (run.ranks_per_host > 1)}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("phase", "device", "at most", hosted, "at most", "page cache"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in run.phases:
        table.add_row(phase.name, *(size(n) if n else "-" for n in _columns(run, phase)))
    out.print(table)
    out.print(Text("\n".join(_lines(run))), soft_wrap=True)
    if not explain:
        return
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


def _lines(run: RunPlan) -> list[str]:
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
