"""What the ranks do with one architecture: load, compare, export, in several settings."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardwise as sw
from benchmarks.architectures import Architecture
from benchmarks.sweeping.children import in_children
from benchmarks.sweeping.ordinary import Reference, differences, export_differences
from shardwise.loading.pretrained import build_meta
from shardwise.ranks.ranks import Ranks

__all__ = ["MOST_BYTES", "Job", "on_ranks", "short"]

#: Bytes read, as a multiple of those that the ranks hold (buffers and 0-d parameters are held by each), above
#: which a load doesn't keep to its own bytes.
MOST_BYTES = 1.05

#: Bytes read by all ranks: as a multiple of those that they hold, and of the model's.
Ratios = tuple[float, float]


@dataclass(slots=True)
class Job:
    """One architecture on one number of ranks."""

    architecture: Architecture
    directory: Path
    work: Path
    reference: Reference
    world_size: int
    steps: tuple[str, ...]
    model: Any = None
    """What the step ``load`` left for the next one."""


def run_steps(job: Job) -> dict[str, tuple[str, Ratios]]:
    """Outcome and bytes ratio by step, on one rank."""
    outcomes: dict[str, tuple[str, Ratios]] = {}
    for step in job.steps:
        try:
            problems, ratios = STEPS[step](job)
        except Exception as error:  # whatever goes wrong is the finding
            outcomes[step] = f"failed: {type(error).__name__}: {short(error)}", (0.0, 0.0)
            if os.environ.get("SWEEP_TRACE"):
                traceback.print_exc()
            # Other ranks may be inside a collective that this one has left.
            break
        outcomes[step] = f"wrong: {'; '.join(problems)}" if problems else "right", ratios
    return outcomes


def short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " | ".join(lines[:4])[:400]


def _load(
    job: Job,
    placement: Callable[[nn.Parameter], Shard | None] | None = None,
    dtype: torch.dtype | str = "auto",
    whole: bool = False,
) -> tuple[Any, list[str], Ratios]:
    mesh = None if whole else init_device_mesh("cpu", (job.world_size,))
    of_diffusers = job.architecture.library == "diffusers"
    model, report = sw.load_pretrained(
        job.directory,
        mesh,
        policy=sw.ShardPolicy(placement=placement),
        dtype=dtype,
        auto_class=None if of_diffusers else job.architecture.model_class,
        allow_unused=tuple(job.reference.unexpected),
        allow_missing=tuple(job.reference.missing),
        return_report=True,
    )
    reference = job.reference.half if dtype == torch.bfloat16 else job.reference
    assert reference is not None
    problems = differences(model, reference)
    if not isinstance(model, job.architecture.model_class):
        problems.append(f"class {type(model).__name__}")
    if (
        not of_diffusers
        and model.can_generate()
        and model.generation_config.to_dict() != job.reference.generation
    ):
        problems.append("generation config")
    return model, problems, ratios_of(report)


def ratios_of(report: Any) -> Ratios:
    """Bytes read by all ranks, as a multiple of what they hold and of the model."""
    read, held = sum_over_ranks(report.bytes_read), sum_over_ranks(report.local_bytes)
    return read / max(1, held), read / max(1, report.model_bytes)


def sum_over_ranks(value: int) -> int:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return int(total)


def default_shards(job: Job) -> tuple[list[str], Ratios]:
    """One axis, dim 0 of everything."""
    job.model, problems, ratios = _load(job)
    if ratios[0] > MOST_BYTES:
        problems.append(f"{ratios[0]:.2f} × the ranks' own bytes are read")
    return problems, ratios


def exported(job: Job) -> tuple[list[str], Ratios]:
    """Export the loaded model, compare the files and what the ordinary load makes of them."""
    model = job.model if job.model is not None else _load(job)[0]
    job.model = None
    name = Ranks.current().on_first("export", lambda: f"export-{len(list(job.work.iterdir()))}")
    out = job.work / name
    sw.export_hf(model, out)
    problems = export_differences(out, job.reference, job.architecture) if dist.get_rank() == 0 else []
    return problems, (0.0, 0.0)


def in_bf16(job: Job) -> tuple[list[str], Ratios]:
    """One axis, dim 0 of everything, in bf16 but for what the class keeps in fp32."""
    _, problems, ratios = _load(job, dtype=torch.bfloat16)
    return problems, ratios


def not_sharded(job: Job) -> tuple[list[str], Ratios]:
    """Without a mesh."""
    _, problems, ratios = _load(job, whole=True)
    return problems, ratios


def dim_1_shards(job: Job) -> tuple[list[str], Ratios]:
    """Dim 1 of every parameter that has one that divides."""

    def placement(parameter: nn.Parameter) -> Shard | None:
        fits = parameter.ndim > 1 and parameter.shape[1] and parameter.shape[1] % job.world_size == 0
        return Shard(1) if fits else None

    # Rows of a tiny matrix are shorter than the gaps that are worth reading over: bytes say nothing here.
    _, problems, ratios = _load(job, placement)
    return problems, ratios


def fsdp_and_tp(job: Job) -> tuple[list[str], Ratios]:
    """FSDP 2 × TP 2, by the class's own plan; filled by the primitive ``load``."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build_meta(job.directory, auto_class=job.architecture.model_class)
    apply_plan(model, mesh["tp"])
    sw.shard(model, mesh["dp"])
    report = sw.load(
        model,
        job.directory,
        allow_unused=tuple(job.reference.unexpected),
        allow_missing=tuple(job.reference.missing),
    )
    model.eval()
    problems = differences(model, job.reference)
    return problems, ratios_of(report)


def apply_plan(model: Any, mesh: Any) -> None:
    """The parameters of a model on meta, cut by its class's plan for tensor parallelism.

    As ``apply_tensor_parallelism`` does, but for tied parameters too, and without its hooks in ``forward``.
    """
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    done: dict[int, nn.Parameter] = {}
    kept = []  # so that no id is given out again
    for name, style in model._expand_parallel_plan(model.tp_plan).items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module._parameters.get(attribute)
        if parameter is None:  # the plan of a module, not of a parameter
            continue
        if id(parameter) not in done:
            ALL_PARALLEL_STYLES[style].shard_param(module, attribute, mesh)
            done[id(parameter)] = module._parameters[attribute]
            kept.append(parameter)
        module._parameters[attribute] = done[id(parameter)]
    model.tie_weights()


STEPS: dict[str, Callable[[Job], tuple[list[str], Ratios]]] = {
    "load": default_shards,
    "bf16": in_bf16,
    "whole": not_sharded,
    "export": exported,
    "dim 1": dim_1_shards,
    "tp": fsdp_and_tp,
}


def on_ranks(job: Job, timeout_s: float) -> dict[str, tuple[str, Ratios]]:
    """The steps of a job on its ranks: the first rank that is not right decides."""
    work = job.work / f"ranks-{job.world_size}-{'-'.join(job.steps).replace(' ', '-')}"
    (work / "port").unlink(missing_ok=True)

    def run(rank: int) -> dict[str, tuple[str, Ratios]]:
        os.environ.update(GLOO_SOCKET_IFNAME="lo")
        store = _meet(rank, work / "port", timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size)
        return run_steps(job)

    results = in_children(job.world_size, work, timeout_s, run)
    outcomes: dict[str, tuple[str, Ratios]] = {}
    for step in job.steps:
        found = []
        for result in results:
            if isinstance(result, str):
                found.append((f"failed: {result}", (0.0, 0.0)))
            elif step in result:
                found.append(result[step])
        if not found:
            continue
        wrong = [f for f in found if f[0] != "right"]
        # A rank that only saw the others go is not the cause.
        wrong.sort(key=lambda f: "failed: killed" in f[0] or "Connection closed" in f[0])
        outcomes[step] = wrong[0] if wrong else found[0]
        if wrong and wrong[0][0].startswith("failed"):
            break
    return outcomes


def _meet(rank: int, place: Path, timeout_s: float) -> dist.TCPStore:
    """A store on a port that rank 0 gets from the system. A port that is chosen before may be taken by then: sweeps run side by side."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place.with_suffix(".part").write_text(str(store.port))
        place.with_suffix(".part").rename(place)
        return store
    deadline = time.monotonic() + timeout_s
    while not place.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("rank 0 has told no port")
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(place.read_text()), is_master=False)
