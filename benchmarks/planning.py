"""How often an entry point looks at a model and its ranks agree; and what planning costs on a model of many tensors.

    OMP_NUM_THREADS=1 python benchmarks/planning.py                          # the counts, and seconds
    OMP_NUM_THREADS=1 python benchmarks/planning.py --against OTHER/src      # seconds beside another version's, in turns

A walk names the tensors of a whole module tree, the model's own or that of a second instance on meta; geometries are how all
tensors of a model are spread; a round is one agreement of all ranks. Seconds are CPU seconds of one process that is the
only rank of a group, minima of the repeats in fresh processes that take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from benchmarks.fresh import on_fresh_ranks
from shardwise.loading.plan_pretrained import plan_pretrained
from tests.harness.looks import looks

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
PLANNED_RANKS = 32


def write_model(directory: Path, layers: int) -> None:
    """A Qwen3 of many small tensors, as the hub stores it."""
    config = transformers.Qwen3Config(**SIZES, head_dim=8, vocab_size=64, num_hidden_layers=layers)
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)


def on_meta(directory: Path) -> Any:
    """The same, sharded over all ranks if there are any."""
    config = transformers.AutoConfig.from_pretrained(directory)
    with sw.meta_init():
        model = transformers.Qwen3ForCausalLM(config)
    if dist.is_initialized():
        sw.shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def state_of(model: Any) -> sw.TrainState:
    return sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def step(state: sw.TrainState) -> None:
    """Optimizer state without a forward pass, which would take longer than all that is measured."""
    optimizer = state.optimizers["optimizer"]
    for parameter in state.models["model"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


# ----------------------------------------------------------------------------------------------------
# Counts


def counted(rank: int, world_size: int, root: str) -> dict[str, dict[str, Any]]:
    """By entry point; a rank of a group, or the only process."""
    hub, place = Path(root) / "hub", Path(root) / f"ranks-{world_size}"
    found: dict[str, dict[str, Any]] = {}

    def count(name: str, call: Callable[[], Any]) -> Any:
        with looks() as seen:
            result = call()
        found[name] = seen.as_json()
        return result

    mesh = init_device_mesh("cpu", (world_size,)) if dist.is_initialized() else None
    count("load_pretrained", lambda: sw.load_pretrained(hub, mesh))
    model = on_meta(hub)
    count("load", lambda: sw.load(model, hub))
    state, second, third = state_of(model), state_of(on_meta(hub)), on_meta(hub)
    step(state)
    count("save", lambda: sw.save(state, place / "step"))
    count("restore", lambda: sw.restore(second, place / "step"))
    count("load (checkpoint)", lambda: sw.load(third, place / "step"))
    count("digest", lambda: sw.digest(model))
    count("iter_full", lambda: list(sw.iter_full(model)))
    count("clone", lambda: sw.clone(model))
    count("export_hf", lambda: sw.export_hf(model, place / "export"))
    return found


def print_counts(root: Path) -> None:
    write_model(root / "hub", 2)
    alone = counted(0, 1, str(root))
    with looks() as seen:
        plan_pretrained(root / "hub", ranks=PLANNED_RANKS)
    alone[f"plan --ranks {PLANNED_RANKS}"] = seen.as_json()
    (together, *_) = on_fresh_ranks(2, counted, str(root))
    print(f"{'one process, 2 ranks':20} {'walks':>9} {'geometries':>12} {'rounds':>8}")
    for name, one in alone.items():
        two = together.get(name, {})
        cells = [f"{one[k]}, {two.get(k, '-')}" for k in ("walks", "geometries")]
        print(f"{name:20} {cells[0]:>9} {cells[1]:>12} {two.get('rounds', '-'):>8}")


# ----------------------------------------------------------------------------------------------------
# Seconds


def timed(root: Path) -> dict[str, float]:
    """CPU seconds of one process: what is planned, and whole calls on tensors of a few hundred bytes."""
    found: dict[str, float] = {}

    def measure(name: str, call: Callable[[], Any]) -> Any:
        gc.collect()
        started = time.process_time()
        result = call()
        found[name] = time.process_time() - started
        return result

    hub = root / "many"
    measure(f"plan_pretrained, {PLANNED_RANKS} ranks", lambda: plan_pretrained(hub, ranks=PLANNED_RANKS))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    first, second, third = (on_meta(hub) for _ in range(3))
    report = measure("load", lambda: sw.load(first, hub))
    found["of a load, the plan"] = report.seconds_plan
    state, other = state_of(first), state_of(second)
    step(state)
    with tempfile.TemporaryDirectory(dir=root) as place:
        measure("save", lambda: sw.save(state, Path(place) / "step"))
        measure("restore", lambda: sw.restore(other, Path(place) / "step"))
        report = measure("load (checkpoint)", lambda: sw.load(third, Path(place) / "step"))
        found["of a load (checkpoint), the plan"] = report.seconds_plan
    dist.destroy_process_group()
    return found


def print_seconds(root: Path, layers: int, repeats: int, against: str | None) -> None:
    write_model(root / "many", layers)
    sources = {"here": str(ROOT / "src"), **({"there": against} if against else {})}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for turn in range(repeats):
        for name in list(sources)[:: -1 if turn % 2 else 1]:
            command = [sys.executable, __file__, "--child", str(root)]
            environment = {**os.environ, "PYTHONPATH": sources[name]}
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"\n{layers} layers, CPU s, minimum of {repeats}: {', '.join(sources)}, and their ratio")
    for what in runs["here"][0]:
        least = [min(run[what] for run in runs[name]) for name in sources]
        ratio = f"{least[0] / least[1]:8.3f}" if against else ""
        print(f"{what:34} {'  '.join(f'{s:8.4f}' for s in least)} {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--against", help="the src folder of another version")
    parser.add_argument("--only", choices=("counts", "seconds"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.child:
        print(json.dumps(timed(Path(options.child))))
        return
    with tempfile.TemporaryDirectory() as root:
        if options.only != "seconds":
            print_counts(Path(root))
        if options.only != "counts":
            print_seconds(Path(root), options.layers, options.repeats, options.against)


if __name__ == "__main__":
    main()
