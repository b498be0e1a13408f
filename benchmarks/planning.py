"""How often an entry point looks at a model and its ranks agree; and what planning costs on a model of many tensors.

    OMP_NUM_THREADS=1 python benchmarks/planning.py                          # the counts, and seconds
    OMP_NUM_THREADS=1 python benchmarks/planning.py --against OTHER/src      # seconds beside another version's, in turns

A walk names the tensors of a whole module tree, the model's own or that of a second instance on meta; geometries are how all
tensors of a model are spread; a round is one agreement of all ranks; bytes are all that two ranks send each other and their
store, payload included. Seconds are CPU seconds of one process that is the
only rank of a group: minima of the repeats, in a process and in fresh processes that take turns.
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

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
PLANNED_RANKS = 8


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
    from tests.harness.looks import looks  # of this version, while the seconds may be another's

    hub, place = Path(root) / "hub", Path(root) / f"ranks-{world_size}"
    found: dict[str, dict[str, Any]] = {}

    def count(name: str, call: Callable[[], Any]) -> Any:
        before = sent_bytes()
        with looks() as seen:
            result = call()
        found[name] = seen.as_json() | {"bytes": sent_bytes() - before}
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
    count("iter_full_tensors", lambda: list(sw.iter_full_tensors(model)))
    count("clone", lambda: sw.clone(model))
    count("export_hf", lambda: sw.export_hf(model, place / "export"))
    return found


def sent_bytes() -> int:
    """Bytes that went through the host's loopback so far, once all ranks are here; 0 without ranks."""
    if not dist.is_initialized():
        return 0
    dist.barrier()
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def counts(root: Path) -> dict[str, dict[str, Any]]:
    """By entry point: walks, geometries and rounds in one process, and on two ranks."""
    from benchmarks.fresh import on_fresh_ranks
    from tests.harness.looks import looks

    write_model(root / "hub", 2)
    alone = counted(0, 1, str(root))
    with looks() as seen:
        sw.plan(root / "hub", ranks=PLANNED_RANKS)
    alone[f"plan --ranks {PLANNED_RANKS}"] = seen.as_json()
    (together, *_) = on_fresh_ranks(2, counted, str(root))
    return {name: {"one process": alone[name], "2 ranks": together.get(name)} for name in alone}


def print_counts(found: dict[str, dict[str, Any]]) -> None:
    print(f"{'one process, 2 ranks':20} {'walks':>9} {'geometries':>12} {'rounds':>8} {'KB sent':>8}")
    for name, on in found.items():
        one, two = on["one process"], on["2 ranks"] or {}
        cells = [f"{one[k]}, {two.get(k, '-')}" for k in ("walks", "geometries")]
        sent = f"{two['bytes'] / 1000:.0f}" if "bytes" in two else "-"
        print(f"{name:20} {cells[0]:>9} {cells[1]:>12} {two.get('rounds', '-'):>8} {sent:>8}")


# ----------------------------------------------------------------------------------------------------
# Seconds


def timed(root: Path) -> dict[str, float]:
    """CPU seconds of one process: what is planned, and whole calls on tensors of a few hundred bytes."""
    found: dict[str, float] = {}

    def measure(name: str, call: Callable[[int], Any], times: int = 4) -> None:
        for turn in range(times):
            gc.collect()
            started = time.process_time()
            result = call(turn)
            seconds = {name: time.process_time() - started}
            if hasattr(result, "seconds_plan"):
                seconds[f"of a {name}, the plan"] = result.seconds_plan
            for what, one in seconds.items():
                found[what] = min(found.get(what, one), one)

    hub = root / "many"
    if hasattr(sw, "plan"):  # not in every version
        measure(f"plan --ranks {PLANNED_RANKS}", lambda _: sw.plan(hub, ranks=PLANNED_RANKS), 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, other = on_meta(hub), on_meta(hub)
    measure("load", lambda _: sw.load(model, hub))
    state, second = state_of(model), state_of(other)
    step(state)
    with tempfile.TemporaryDirectory(dir=root) as place:
        measure("save", lambda turn: sw.save(state, Path(place) / f"{turn}"))
        measure("restore", lambda _: sw.restore(second, Path(place) / "0"))
        measure("load (checkpoint)", lambda _: sw.load(model, Path(place) / "0"))
    dist.destroy_process_group()
    return found


def seconds(root: Path, layers: int, repeats: int, against: str | None) -> dict[str, list[float]]:
    """What is measured, here and in the other version, if there is one."""
    write_model(root / "many", layers)
    sources = {"here": str(ROOT / "src"), **({"there": against} if against else {})}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for turn in range(repeats):
        for name in list(sources)[:: -1 if turn % 2 else 1]:
            command = [sys.executable, __file__, "--child", str(root)]
            environment = {**os.environ, "PYTHONPATH": sources[name]}
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    measured = [what for what in runs["here"][0] if all(what in run for one in runs.values() for run in one)]
    return {what: [min(run[what] for run in runs[name]) for name in sources] for what in measured}


def print_seconds(found: dict[str, list[float]], layers: int, repeats: int) -> None:
    print(
        f"\n{layers} layers, CPU s, minimum of {repeats}: here; there and the ratio, if there is another version"
    )
    for what, least in found.items():
        ratio = f"{least[0] / least[1]:8.3f}" if len(least) > 1 else ""
        print(f"{what:34} {'  '.join(f'{s:8.4f}' for s in least)} {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", help="the src folder of another version")
    parser.add_argument("--only", choices=("counts", "seconds"))
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.child:
        print(json.dumps(timed(Path(options.child))))
        return
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        if options.only != "seconds":
            result |= (counted_here := counts(Path(root)))
            print_counts(counted_here)
        if options.only != "counts":
            took = seconds(Path(root), options.layers, options.repeats, options.against)
            result["seconds"] = took
            print_seconds(took, options.layers, options.repeats)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
