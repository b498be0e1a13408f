"""Every architecture of transformers and model class of diffusers that can be built small: sharded loads and the ordinary one, bit for bit.

    python benchmarks/sweep.py                                     # all of them
    python benchmarks/sweep.py --only 'mixtral,qwen*' --json out.json
    python benchmarks/sweep.py --library diffusers --table docs/supported-models.md

For each: a tiny random model is saved by the library (so in the hub's layout), loaded by ``from_pretrained``, and
then by ``load_pretrained`` on 2 and on 3 ranks, with shards on dim 1 where that divides. Every parameter, buffer and
tie is compared. Models of transformers are also loaded with FSDP 2 × TP 2 where the class has a plan for tensor
parallelism, and exported: the files are compared with the checkpoint, and the ordinary load of them with the first
one. Models of diffusers are saved in several files, and also loaded in bf16, in which a class may keep modules in fp32,
and by one process without a mesh.

Modules are imported once; every architecture runs in processes forked from there, with a time limit, so that one
that hangs or crashes costs only itself. Exit status 1 if anything is wrong, or fails although the ordinary load
works.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.architectures import Architecture, architectures, diffusion_models
from benchmarks.sweeping.children import in_children
from benchmarks.sweeping.ordinary import Reference, make_reference
from benchmarks.sweeping.ranks import MOST_BYTES, Job, on_ranks, short
from benchmarks.sweeping.rows import (
    Row,
    first_cell,
    in_order,
    read_json,
    show,
    summary,
    write_json,
    write_page,
)

__all__ = ["DIFFUSION_SUBSET", "LIBRARIES", "MOST_BYTES", "SUBSET", "sweep"]

#: Chosen for their conversions; see tests/meta/test_sweep.py.
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

#: Classes of diffusers of each kind, with and without modules that stay in fp32; see tests/diffusion/test_sweep.py.
DIFFUSION_SUBSET = (
    "AutoencoderKL",
    "Cosmos3AVAEAudioTokenizer",
    "CosmosTransformer3DModel",
    "DiTTransformer2DModel",
    "PriorTransformer",
    "SanaControlNetModel",
    "T2IAdapter",
    "UNet1DModel",
    "WanTransformer3DModel",
)

#: What there is of each library, by a pattern of names, and the part of it that CI runs.
LIBRARIES = {
    "transformers": (architectures, SUBSET),
    "diffusers": (diffusion_models, DIFFUSION_SUBSET),
}


def examine(architecture: Architecture, work: Path, options: argparse.Namespace) -> Row:
    """All settings for one architecture."""
    started = time.monotonic()

    def unbuilt(reason: str) -> Row:
        return Row(
            architecture.model_type, architecture.class_name, ordinary=reason, library=architecture.library
        )

    try:
        _ = architecture.model_class  # imported here once, so that no child has to
    except Exception as error:  # optional packages that are not there
        return unbuilt(f"not built: {short(error)}")
    directory = work / "checkpoint"

    def build(_: int) -> tuple[Row, Reference | None]:
        try:
            return make_reference(architecture, directory, getattr(torch, options.dtype))
        except Exception as error:
            if os.environ.get("SWEEP_TRACE"):
                traceback.print_exc()
            stage = "not handled" if (directory / "config.json").exists() else "not built"
            return unbuilt(f"{stage}: {type(error).__name__}: {short(error)}"), None

    (built,) = in_children(1, work / "build", options.timeout_s, build)
    if isinstance(built, str):
        return unbuilt(f"not built: {built}")
    row, reference = built
    if reference is not None:
        for world_size, steps in settings(architecture, reference, options):
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


def settings(
    architecture: Architecture, reference: Reference, options: argparse.Namespace
) -> list[tuple[int, tuple[str, ...]]]:
    """Numbers of ranks and what to do on them."""
    found: list[tuple[int, tuple[str, ...]]] = []
    always, once = ("load",), ("export", "dim 1")
    if architecture.library == "diffusers":
        always, once = ("load", "bf16"), ("dim 1",)
    for world_size in map(int, options.ranks.split(",")):
        found.append((world_size, always + once if world_size == 2 else always))
    if architecture.library == "diffusers":
        found.append((1, ("whole",)))
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
            row = Row(chosen[index].model_type, chosen[index].class_name, library=chosen[index].library)
            row.results["sweep"] = f"failed: {type(error).__name__}: {short(error)}"
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)
        queue.put(row)


def quiet() -> None:
    """No progress bars and no advice, in every process."""
    import warnings

    warnings.simplefilter("ignore")
    for library in LIBRARIES:
        if (imported := sys.modules.get(library)) is not None:
            imported.logging.set_verbosity_error()
            imported.logging.disable_progress_bar()
    torch.set_num_threads(1)


def sweep(chosen: Sequence[Architecture], options: argparse.Namespace) -> list[Row]:
    """Rows for all of them, in ``options.jobs`` lanes; one line of output each, as they are done."""
    for library in {architecture.library for architecture in chosen}:
        # once, before processes are forked
        importlib.import_module(
            "transformers.modeling_utils" if library == "transformers" else "diffusers.models.modeling_utils"
        )

    context = multiprocessing.get_context("fork")
    counter, lock, queue = context.Value("i", 0), context.Lock(), context.SimpleQueue()
    root = Path(options.keep or tempfile.mkdtemp(prefix="sweep-"))
    rows: list[Row] = []
    again = {(a.library, a.model_type, a.class_name) for a in chosen}
    earlier = read_json(Path(options.json)) if options.json and options.add else []
    earlier = [row for row in earlier if (row.library, row.model_type, row.class_name) not in again]
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


def main() -> int:
    """Runs the sweep that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", choices=[*LIBRARIES], help="only this one's; default: both")
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
    libraries = [options.library] if options.library else [*LIBRARIES]
    chosen = []
    for library in libraries:
        every, subset = LIBRARIES[library]
        more = {"bare": True} if options.bare and library == "transformers" else {}
        chosen += every(",".join(subset) if options.subset else options.only, **more)[: options.limit]
    started = time.monotonic()
    rows = sweep(chosen, options)
    if options.table:
        swept = {(row.library, first_cell(row)) for row in rows}
        every = [(a.library, first_cell(a)) for library in libraries for a in LIBRARIES[library][0]()]
        write_page(Path(options.table), rows, [one for one in every if one not in swept])
    print(f"{len(rows)} architectures in {time.monotonic() - started:.0f} s: {summary(rows)}")
    complete = len(rows) >= len(chosen)
    return int(not complete or any(row.verdict in ("wrong", "failed") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
