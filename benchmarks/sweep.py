"""Every architecture of transformers that can be built small: sharded loads beside the ordinary one, bit for bit.

    python benchmarks/sweep.py                                     # all of them
    python benchmarks/sweep.py --only 'mixtral,qwen*' --json out.json
    python benchmarks/sweep.py --table docs/architectures.md

For each: a tiny random model is saved by the library (so in the hub's layout), loaded by ``from_pretrained``, and
then by ``load_pretrained`` on 2 and on 3 ranks, with shards on dim 1 where that divides, and with FSDP 2 × TP 2
where the class has a plan for tensor parallelism. Every parameter, buffer and tie is compared. The sharded model
is exported, the files are compared with the checkpoint, and the ordinary load of them with the first one.

Modules are imported once; every architecture runs in processes forked from there, with a time limit, so that one
that hangs or crashes costs only itself. Exit status 1 if anything is wrong, or fails although the ordinary load
works.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw
from benchmarks.architectures import Architecture, architectures, write_checkpoint
from shardwise.dist import Ranks
from shardwise.parallelize import describe_groups
from shardwise.pretrained import build_meta

#: Bytes read, as a multiple of those that the ranks hold (buffers and 0-d parameters are held by each), above
#: which a load doesn't keep to its own bytes.
MOST_BYTES = 1.05

#: Conversions that cut, join or permute dim 0, as sharding does.
ON_DIM_0 = re.compile(r"(Chunk|Split|Concatenate|Interleave)\(0|Transpose\(0|PermuteForRope")

#: Chosen for their conversions; see tests/dist/test_sweep.py.
SUBSET = (
    "afmoe",
    "altclip",
    "audio-spectrogram-transformer",
    "bert",
    "clip",
    "deepseek_v3",
    "deepseek_v4",
    "dinov3_vit",
    "ernie4_5_vl_moe",
    "esm",
    "glm4_moe",
    "gpt2",
    "gpt_oss",
    "granitemoe",
    "gte",
    "hrm_text",
    "inkling2_text",
    "inkling_mm_model",
    "jamba",
    "kimi_k25",
    "kimi_linear",
    "laguna",
    "llava",
    "mamba",
    "minimax_m3_vl",
    "mistral_large4",
    "mixtral",
    "molmo2_text",
    "nemotron_h",
    "nomic_bert",
    "olmo_hybrid",
    "phimoe",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_moe",
    "qwen3_vl_moe",
    "radio",
    "segformer",
    "swin",
    "t5",
    "timesfm2_5",
    "vit",
    "whisper",
)


Ratios = tuple[float, float]


@dataclass(slots=True)
class Row:
    """What was found for one architecture."""

    model_type: str
    class_name: str
    parameters: int = 0
    conversions: tuple[str, ...] = ()
    ordinary: str = ""
    """Empty if ``from_pretrained`` gives back what ``save_pretrained`` wrote, else what is wrong with it."""
    results: dict[str, str] = field(default_factory=dict)
    """By setting: ``right``, ``wrong: …``, ``failed: …`` or ``-`` where there is nothing to do."""
    bytes_ratio: float = 0.0
    """Bytes that all ranks read, as a multiple of those that they hold."""
    model_bytes_ratio: float = 0.0
    """The same, as a multiple of the model's bytes: more where each rank holds large buffers."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """The worst of the settings; ``not built`` or ``not handled`` where the library itself can't."""
        for kind in ("wrong", "failed"):
            if any(r.startswith(kind) for r in self.results.values()):
                return kind
        return self.ordinary.split(":")[0] or "right"


# ----------------------------------------------------------------------------------------------------
# The ordinary load


@dataclass(slots=True)
class Reference:
    """What ``from_pretrained`` gives, and what it says about the checkpoint."""

    directory: Path
    tensors: dict[str, torch.Tensor]
    kinds: dict[str, tuple[str, bool]]
    """Parameter or buffer, and ``requires_grad``, by name."""
    ties: set[tuple[str, str]]
    missing: list[str]
    unexpected: list[str]
    conversions: tuple[str, ...]
    has_tp_plan: bool
    generation: dict[str, Any] | None
    stored: dict[str, torch.Tensor]
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    """What ``from_pretrained`` makes something else of, as it was saved."""


def make_reference(architecture: Architecture, directory: Path, dtype: torch.dtype) -> tuple[Row, Reference]:
    """Write the checkpoint, load it the ordinary way, and compare with what was saved."""
    row = Row(architecture.model_type, architecture.class_name)
    model, small = write_checkpoint(architecture, directory, dtype)
    row.parameters = small.parameters
    reference = ordinary_load(architecture, directory)
    row.conversions = reference.conversions
    if architecture.saved_as:
        return row, bare_reference(architecture, row, reference)
    # from_pretrained makes every loaded parameter trainable, also those that the class freezes (5.23). Those
    # of construction are right, as in the library's own distributed load.
    built = kinds_of(model)
    thawed = [n for n, kind in built.items() if reference.kinds.get(n) != kind]
    if thawed:
        row.notes.append(f"frozen by the class, which from_pretrained undoes: {len(thawed)} parameters")
    reference.kinds = built
    if reference.missing:
        row.notes.append(f"not saved by the library: {', '.join(reference.missing[:3])}")
    if reference.unexpected:
        row.notes.append(f"saved but not loaded by the library: {', '.join(reference.unexpected[:3])}")
    reference.changed = {
        name: tensor.detach()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in reference.missing and not same_bits(tensor, reference.tensors[name])
    }
    if reference.changed:
        names = ", ".join(list(reference.changed)[:3])
        row.ordinary = f"not handled: from_pretrained changes {len(reference.changed)} tensors: {names}"
    lost = [n for n in reference.missing if n in model.state_dict()]
    if lost and reference.unexpected:
        # What it doesn't find it makes up: nothing is left to compare with.
        raise ValueError(
            f"from_pretrained does not find {len(lost)} tensors that were saved: {', '.join(lost[:3])}"
        )
    return row, reference


def bare_reference(architecture: Architecture, row: Row, reference: Reference) -> Reference:
    """Of a bare model, from the checkpoint of one with a head: what belongs to the head is left over."""
    row.notes.append(f"from the checkpoint of {architecture.saved_as}")
    if reference.missing:
        raise ValueError(f"{architecture.saved_as} has no {', '.join(reference.missing[:3])}")
    model = build_meta(reference.directory, auto_class=architecture.model_class)
    reference.kinds = kinds_of(model)
    reference.unexpected = ["*"]
    return reference


def ordinary_load(architecture: Architecture, directory: Path) -> Reference:
    """``from_pretrained`` and what it reports."""
    load = architecture.model_class.from_pretrained
    try:
        model, report = load(directory, output_loading_info=True, local_files_only=True)
    except AttributeError:
        # Classes for decisions can't report (5.23); what is missing then shows as a failure of ours.
        model = load(directory, local_files_only=True)
        report = {"mismatched_keys": (), "missing_keys": (), "unexpected_keys": ()}
    if report["mismatched_keys"]:
        raise ValueError(f"from_pretrained finds shapes that don't fit: {report['mismatched_keys']}")
    tensors = tensors_of(model)
    return Reference(
        directory=directory,
        tensors={n: t.detach() for n, t in tensors.items()},
        kinds=kinds_of(model),
        ties=ties_of(tensors),
        missing=sorted(report["missing_keys"]),
        unexpected=sorted(report["unexpected_keys"]),
        conversions=conversions_of(model),
        has_tp_plan=bool(model.tp_plan),
        generation=model.generation_config.to_dict() if model.can_generate() else None,
        stored=stored_tensors(directory),
    )


def conversions_of(model: Any) -> tuple[str, ...]:
    """Kinds of the conversions that a load used."""
    found: Counter[str] = Counter()
    for used in getattr(model, "_weight_conversions", None) or ():
        operations = getattr(used, "operations", None)
        if operations is None:
            kind = type(used).__name__
            found["rename" if kind == "WeightRenaming" else kind] += 1
        else:
            found[" + ".join(_operation(o) for o in operations)] += 1
    return tuple(sorted(found))


def _operation(operation: Any) -> str:
    dims = [
        str(getattr(operation, a))
        for a in ("dim", "dim0", "dim1", "stack_dim", "concat_dim")
        if hasattr(operation, a)
    ]
    return f"{type(operation).__name__}({', '.join(dims)})"


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory's safetensors files."""
    from safetensors.torch import load_file

    return {n: t for file in sorted(directory.glob("*.safetensors")) for n, t in load_file(file).items()}


# ----------------------------------------------------------------------------------------------------
# Comparing


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under every name, persistent or not."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def kinds_of(model: nn.Module) -> dict[str, tuple[str, bool]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        n: ("parameter" if n in parameters else "buffer", t.requires_grad)
        for n, t in tensors_of(model).items()
    }


def ties_of(tensors: dict[str, torch.Tensor]) -> set[tuple[str, str]]:
    """Pairs of names that are one object."""
    by_object: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_object.setdefault(id(tensor), []).append(name)
    return {pair for names in by_object.values() for pair in combinations(sorted(names), 2)}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*as_bytes)


def differences(model: Any, reference: Reference) -> list[str]:
    """What of a sharded model, put together, is not as in the ordinary one. Collective."""
    found, expected = tensors_of(model), reference.tensors
    problems = []
    if list(found) != list(expected):
        odd = sorted(set(found) ^ set(expected))
        problems.append(f"names: {odd[:4] if odd else 'another order'}")
    if (ties := ties_of(found)) != reference.ties:
        problems.append(f"ties: {sorted(ties ^ reference.ties)[:3]}")
    if (kinds := kinds_of(model)) != reference.kinds:
        problems.append(f"kinds: {[n for n in kinds if kinds[n] != reference.kinds.get(n)][:3]}")
    different = []
    whole: dict[int, torch.Tensor] = {}
    for name, tensor in found.items():
        if id(tensor) not in whole:
            whole[id(tensor)] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        # Where the ordinary load changes what is stored, what is stored counts.
        mine, theirs = whole[id(tensor)], reference.changed.get(name, expected.get(name))
        if theirs is None or name in reference.missing:
            continue
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            different.append(
                f"{name} {mine.dtype} {tuple(mine.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
            )
        elif not same_bits(mine, theirs):
            different.append(name)
    if different:
        problems.append(f"values of {len(different)}: {'; '.join(different[:3])}")
    if model.training:
        problems.append("training mode")
    return problems


def export_differences(directory: Path, reference: Reference, architecture: Architecture) -> list[str]:
    """What of exported files is not as in the checkpoint that was loaded, by bytes and by an ordinary load."""
    stored = stored_tensors(directory)
    if architecture.saved_as:
        odd = sorted(set(stored) - set(reference.stored))
    else:
        odd = sorted(set(stored) ^ (set(reference.stored) - set(reference.unexpected)))
    problems = [f"names: {odd[:4]}"] if odd else []
    bad = [n for n, t in stored.items() if n in reference.stored and not same_bits(t, reference.stored[n])]
    if bad:
        problems.append(f"values of {len(bad)}: {bad[:3]}")
    again = ordinary_load(architecture, directory)
    unlike = [
        n
        for n, t in reference.tensors.items()
        if n not in {*reference.missing, *reference.changed}
        and (n not in again.tensors or not same_bits(t, again.tensors[n]))
    ]
    if unlike or again.ties != reference.ties:
        problems.append(f"another model after an ordinary load: {unlike[:3]}")
    return problems


# ----------------------------------------------------------------------------------------------------
# What the ranks do


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
            outcomes[step] = f"failed: {type(error).__name__}: {_short(error)}", (0.0, 0.0)
            if os.environ.get("SWEEP_TRACE"):
                traceback.print_exc()
            # Other ranks may be inside a collective that this one has left.
            break
        outcomes[step] = f"wrong: {'; '.join(problems)}" if problems else "right", ratios
    return outcomes


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " | ".join(lines[:4])[:400]


def _load(
    job: Job, placement: Callable[[nn.Parameter], Shard | None] | None = None
) -> tuple[Any, list[str], Ratios]:
    mesh = init_device_mesh("cpu", (job.world_size,))
    # Nobody can shard a trainable parameter without dims (CLIP's logit_scale): the caller has to name it.
    scalars = tuple(n for n, t in job.reference.tensors.items() if t.ndim == 0 and job.reference.kinds[n][1])
    model, report = sw.load_pretrained(
        job.directory,
        mesh,
        policy=sw.ShardPolicy(placement=placement, ignored=scalars),
        auto_class=job.architecture.model_class,
        unused=tuple(job.reference.unexpected),
        init=dict.fromkeys(job.reference.missing, "model"),
    )
    problems = differences(model, job.reference)
    if model.can_generate() and model.generation_config.to_dict() != job.reference.generation:
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
    out = job.work / f"export-{len(list(job.work.iterdir()))}"
    out = Path(Ranks.current().share("export", str(out).encode()).decode())
    sw.export_hf(model, out)
    problems = export_differences(out, job.reference, job.architecture) if dist.get_rank() == 0 else []
    return problems, (0.0, 0.0)


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
    scalars = {p for p in model.parameters() if p.ndim == 0 or not p.numel()}
    for group in describe_groups(model, sw.ShardPolicy(ignored=_named(model, scalars))):
        module = model.get_submodule(group.name) if group.name else model
        fully_shard(module, mesh=mesh["dp"], ignored_params=scalars or None)
    report = sw.load(
        model,
        job.directory,
        unused=tuple(job.reference.unexpected),
        init=dict.fromkeys(job.reference.missing, "model"),
    )
    model.eval()
    problems = differences(model, job.reference)
    return problems, ratios_of(report)


def _named(model: nn.Module, chosen: set[nn.Parameter]) -> tuple[str, ...]:
    return tuple(n for n, p in model.named_parameters() if p in chosen)


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
    "export": exported,
    "dim 1": dim_1_shards,
    "tp": fsdp_and_tp,
}


# ----------------------------------------------------------------------------------------------------
# Processes


def in_children(count: int, work: Path, timeout_s: float, function: Callable[[int], Any]) -> list[Any]:
    """``function(rank)`` in forked processes. A result that is a str tells how the process failed."""
    work.mkdir(parents=True, exist_ok=True)
    children = {}
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            _child(work, rank, function)
        children[pid] = rank
    ended: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while len(ended) < count:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            code = os.waitstatus_to_exitcode(status)
            ended[children[pid]] = f"ended with status {code}"
            if code:  # the others may wait for it for long
                deadline = min(deadline, time.monotonic() + 15)
        elif time.monotonic() > deadline:
            for pid, rank in children.items():
                if rank not in ended:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    ended[rank] = f"no end after {timeout_s:g} s"
        else:
            time.sleep(0.01)
    return [_result_of(work, rank, ended[rank]) for rank in range(count)]


def _result_of(work: Path, rank: int, otherwise: str) -> Any:
    try:
        return pickle.loads((work / f"result-{rank}").read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        log = (work / f"log-{rank}").read_text(errors="replace").strip().splitlines()
        return f"{otherwise}; last output: {' | '.join(log[-2:])[-300:]}"


def _child(work: Path, rank: int, function: Callable[[int], Any]) -> None:
    """Runs the function, writes its result, and never returns."""
    code = 1
    try:
        log = os.open(work / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        result = pickle.dumps(function(rank))
        (work / f"result-{rank}").write_bytes(result)
        code = 0
    except BaseException:  # this process ends here, whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def on_ranks(job: Job, timeout_s: float) -> dict[str, tuple[str, Ratios]]:
    """The steps of a job on its ranks: the first rank that is not right decides."""
    port = _free_port()

    def run(rank: int) -> dict[str, tuple[str, Ratios]]:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=rank, world_size=job.world_size)
        return run_steps(job)

    results = in_children(job.world_size, job.work / f"ranks-{job.world_size}-{port}", timeout_s, run)
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
        wrong.sort(key=lambda f: "ended with" in f[0] or "Connection closed" in f[0])
        outcomes[step] = wrong[0] if wrong else found[0]
        if wrong and wrong[0][0].startswith("failed"):
            break
    return outcomes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def examine(architecture: Architecture, work: Path, options: argparse.Namespace) -> Row:
    """All settings for one architecture."""
    started = time.monotonic()
    try:
        _ = architecture.model_class  # imported here once, so that no child has to
    except Exception as error:  # optional packages that are not there
        return Row(architecture.model_type, architecture.class_name, ordinary=f"not built: {_short(error)}")
    directory = work / "checkpoint"

    def build(_: int) -> tuple[Row, Reference | None]:
        try:
            return make_reference(architecture, directory, getattr(torch, options.dtype))
        except Exception as error:
            if os.environ.get("SWEEP_TRACE"):
                traceback.print_exc()
            stage = "not handled" if (directory / "config.json").exists() else "not built"
            reason = f"{stage}: {type(error).__name__}: {_short(error)}"
            return Row(architecture.model_type, architecture.class_name, ordinary=reason), None

    (built,) = in_children(1, work / "build", options.timeout_s, build)
    if isinstance(built, str):
        return Row(architecture.model_type, architecture.class_name, ordinary=f"not built: {built}")
    row, reference = built
    if reference is not None:
        for world_size, steps in settings(reference, options):
            job = Job(architecture, directory, work, reference, world_size, steps)
            pending = list(steps)
            while pending:  # a step that failed took its processes with it: the next ones get new ones
                job.steps = tuple(pending)
                outcomes = on_ranks(job, options.timeout_s)
                for step, (outcome, ratios) in outcomes.items():
                    row.results[f"{step} {world_size}"] = outcome
                    if step == "load":
                        row.bytes_ratio = max(row.bytes_ratio, ratios[0])
                        row.model_bytes_ratio = max(row.model_bytes_ratio, ratios[1])
                    pending.remove(step)
                if not outcomes:
                    break
                if row.results[f"{steps[0]} {world_size}"].startswith("failed"):
                    break  # nothing further can be right
    row.seconds = time.monotonic() - started
    return row


def settings(reference: Reference, options: argparse.Namespace) -> list[tuple[int, tuple[str, ...]]]:
    """Numbers of ranks and what to do on them."""
    found: list[tuple[int, tuple[str, ...]]] = []
    for world_size in map(int, options.ranks.split(",")):
        steps = ("load", "export", "dim 1") if world_size == 2 else ("load",)
        found.append((world_size, steps))
    if reference.has_tp_plan and not options.no_tp:
        found.append((4, ("tp",)))
    return found


def lane(
    chosen: Sequence[Architecture],
    counter: Any,
    lock: Any,
    queue: Any,
    root: Path,
    options: argparse.Namespace,
) -> None:
    """Takes one architecture after the other until none is left."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    quiet()
    parent = os.getppid()
    while os.getppid() == parent:
        with lock:
            index = counter.value
            counter.value += 1
        if index >= len(chosen):
            return
        work = root / f"{chosen[index].model_type}-{chosen[index].class_name}"
        try:
            row = examine(chosen[index], work, options)
        except Exception as error:
            traceback.print_exc()
            row = Row(chosen[index].model_type, chosen[index].class_name)
            row.results["sweep"] = f"failed: {type(error).__name__}: {_short(error)}"
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)
        queue.put(row)


def quiet() -> None:
    """No progress bars and no advice, in every process."""
    import warnings

    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


def sweep(chosen: Sequence[Architecture], options: argparse.Namespace) -> list[Row]:
    """Rows for all of them, in ``options.jobs`` lanes; one line of output each, as they are done."""
    import transformers.modeling_utils  # noqa: F401  (imported once, before processes are forked)

    context = multiprocessing.get_context("fork")
    counter, lock, queue = context.Value("i", 0), context.Lock(), context.SimpleQueue()
    root = Path(options.keep or tempfile.mkdtemp(prefix="sweep-"))
    rows: list[Row] = []
    again = {(a.model_type, a.class_name) for a in chosen}
    earlier = read_json(Path(options.json)) if options.json and options.add else []
    earlier = [row for row in earlier if (row.model_type, row.class_name) not in again]
    lanes = [
        context.Process(target=lane, args=(chosen, counter, lock, queue, root, options))
        for _ in range(max(1, options.jobs))
    ]
    for process in lanes:
        process.start()
    try:
        while len(rows) < len(chosen):
            if queue.empty():
                if not any(p.is_alive() for p in lanes) and queue.empty():
                    break
                time.sleep(0.05)
                continue
            rows.append(queue.get())
            show(rows[-1], len(rows), len(chosen))
            if options.json:
                write_json([*earlier, *rows], Path(options.json))
    finally:
        for process in lanes:
            process.terminate()
            process.join()
        if not options.keep:
            shutil.rmtree(root, ignore_errors=True)
    return in_order([*earlier, *rows])


def in_order(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.model_type.lower(), row.class_name))


# ----------------------------------------------------------------------------------------------------
# Output


def show(row: Row, done: int, total: int) -> None:
    reasons = [row.ordinary] if row.ordinary else []
    reasons += [f"{s}: {r}" for s, r in row.results.items() if r not in ("right", "-")]
    print(
        f"[{done}/{total}] {row.model_type} ({row.class_name}) {row.verdict} {row.bytes_ratio:.3f} "
        f"{row.seconds:.1f} s {' || '.join(reasons)}",
        flush=True,
    )


def read_json(file: Path) -> list[Row]:
    """The rows of an earlier run."""
    found = json.loads(file.read_text()) if file.exists() else []
    rows = [Row(**{k: v for k, v in each.items() if k != "verdict"}) for each in found]
    for row in rows:
        row.conversions = tuple(row.conversions)
    return rows


def write_json(rows: Sequence[Row], file: Path) -> None:
    document = [asdict(row) | {"verdict": row.verdict} for row in in_order(rows)]
    temporary = file.with_name(file.name + ".part")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(file)


def summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{counts[k]} {k}" for k in ("right", "wrong", "failed", "not handled", "not built"))


def main() -> int:
    """Runs the sweep that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="model types or classes: patterns, separated by commas")
    parser.add_argument("--subset", action="store_true", help="those that CI runs")
    parser.add_argument("--bare", action="store_true", help="the class without a head, too")
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks for one-axis meshes")
    parser.add_argument("--no-tp", action="store_true", help="leave out FSDP 2 × TP 2")
    parser.add_argument("--dtype", default="float32", help="of the checkpoints")
    parser.add_argument("--limit", type=int, default=None, help="stop after so many architectures")
    parser.add_argument("--jobs", type=int, default=2, help="architectures at a time")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="for one architecture on one mesh")
    parser.add_argument("--json", help="write all rows to this file, as they are done")
    parser.add_argument(
        "--add", action="store_true", help="keep the rows of other architectures in that file"
    )
    parser.add_argument("--table", help="write a table in Markdown to this file")
    parser.add_argument("--keep", help="work in this directory and leave everything there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen = architectures(",".join(SUBSET) if options.subset else options.only, bare=options.bare)[
        : options.limit
    ]
    started = time.monotonic()
    rows = sweep(chosen, options)
    if options.table:
        Path(options.table).write_text(table(rows))
    print(f"{len(rows)} architectures in {time.monotonic() - started:.0f} s: {summary(rows)}")
    complete = len(rows) >= len(chosen)
    return int(not complete or any(row.verdict in ("wrong", "failed") for row in rows))


def table(rows: Sequence[Row]) -> str:
    """The rows as a page of documentation."""
    import transformers

    done = [row for row in rows if row.results]
    rest = [row for row in rows if not row.results]
    widest = max((row.bytes_ratio for row in done), default=0.0)
    on_dim_0 = [row for row in done if any(ON_DIM_0.search(c) for c in row.conversions)]
    converted = [row for row in done if any("(" in c for c in row.conversions)]
    lines = [
        "# Architectures",
        "",
        "Written by `python benchmarks/sweep.py --table docs/architectures.md`, which says how; not by hand.",
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, gloo, CPU.",
        "",
        f"**{summary(rows)}**, of {len(rows)} classes. *right*: every parameter, buffer and tie of the sharded load is,",
        "bit for bit, that of `from_pretrained` on the same files. *export*: the files that `export_hf` writes hold the",
        "checkpoint's tensors under its names, bit for bit, and `from_pretrained` makes the same model of them. A dash:",
        f"nothing to do there (no plan for tensor parallelism). Bytes read over all ranks are at most {widest:.3f} × those",
        f"that the ranks hold. {len(converted)} have conversions other than renames; of {len(on_dim_0)} these act on dim 0 by",
        "chunk, split, concatenate, interleave, transpose or permute: bytes read are at most "
        f"{max((row.model_bytes_ratio for row in on_dim_0), default=0.0):.3f} × the model's there.",
        "",
        "| architecture | class | conversions | 2 ranks | 3 ranks | dim 1, 2 ranks | FSDP 2 × TP 2 | export | notes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in done:
        marks = [_mark(row, setting) for setting in ("load 2", "load 3", "dim 1 2", "tp 4", "export 2")]
        reasons = [f"{s}: {r}" for s, r in row.results.items() if r != "right"]
        notes = "; ".join([*filter(None, [row.ordinary]), *row.notes, *reasons]).replace("|", "/")
        conversions = ", ".join(row.conversions)
        lines.append(
            f"| {row.model_type} | {row.class_name} | {conversions} | {' | '.join(marks)} | {notes} |"
        )
    lines += [
        "",
        "## Left out",
        "",
        "*not built*: the library itself makes no model here (a package that is not there, a config without a default).",
        "*not handled*: the library makes one, but `save_pretrained` or `from_pretrained` of it fails.",
        "",
        "| architecture | class | reason |",
        "|---|---|---|",
    ]
    lines += [f"| {r.model_type} | {r.class_name} | {_cell(r.ordinary)} |" for r in rest]
    return "\n".join(lines) + "\n"


def _mark(row: Row, setting: str) -> str:
    return row.results.get(setting, "–").split(":")[0]


def _cell(text: str) -> str:
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) < 160 else text[:157] + "…"


if __name__ == "__main__":
    raise SystemExit(main())
