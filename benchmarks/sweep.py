"""Every architecture of transformers that can be built small: sharded loads beside the ordinary one, bit for bit.

    python benchmarks/sweep.py                                     # all of them
    python benchmarks/sweep.py --only 'mixtral,qwen*' --json out.json
    python benchmarks/sweep.py --table docs/supported-models.md

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

from benchmarks.architectures import Architecture, architectures
from benchmarks.sweeping.children import in_children
from benchmarks.sweeping.ordinary import Reference, make_reference
from benchmarks.sweeping.ranks import MOST_BYTES, Job, on_ranks, short
from benchmarks.sweeping.rows import Row, in_order, read_json, show, summary, table, write_json

__all__ = ["MOST_BYTES", "SUBSET", "sweep"]

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


def examine(architecture: Architecture, work: Path, options: argparse.Namespace) -> Row:
    """All settings for one architecture."""
    started = time.monotonic()
    try:
        _ = architecture.model_class  # imported here once, so that no child has to
    except Exception as error:  # optional packages that are not there
        return Row(architecture.model_type, architecture.class_name, ordinary=f"not built: {short(error)}")
    directory = work / "checkpoint"

    def build(_: int) -> tuple[Row, Reference | None]:
        try:
            return make_reference(architecture, directory, getattr(torch, options.dtype))
        except Exception as error:
            if os.environ.get("SWEEP_TRACE"):
                traceback.print_exc()
            stage = "not handled" if (directory / "config.json").exists() else "not built"
            reason = f"{stage}: {type(error).__name__}: {short(error)}"
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
            row.results["sweep"] = f"failed: {type(error).__name__}: {short(error)}"
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
        swept = {row.model_type for row in rows}
        pending = [a.model_type for a in architectures() if a.model_type not in swept]
        Path(options.table).write_text(table(rows, pending))
    print(f"{len(rows)} architectures in {time.monotonic() - started:.0f} s: {summary(rows)}")
    complete = len(rows) >= len(chosen)
    return int(not complete or any(row.verdict in ("wrong", "failed") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
