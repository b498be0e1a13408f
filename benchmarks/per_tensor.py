"""CPU time of a load for each stored tensor, and what the first load of a process costs on top.

    OMP_NUM_THREADS=1 python benchmarks/per_tensor.py                          # all cases
    OMP_NUM_THREADS=1 python benchmarks/per_tensor.py --against OTHER/src      # next to another version, in turns

The tensors are tiny, so that bytes cost nothing: one process, the only rank of a group, every block an FSDP group, the collector as
Python sets it. The warm figure is the minimum of the repeats, in microseconds for each stored tensor. First use is measured in fresh
interpreters that have imported torch, transformers and Accelerate: milliseconds to import what ``sw.load`` and then ``Checkpointer``
need (with cached bytecode, as pip installs it), and the full garbage collections during the first load and right after it.

``moe 100450`` shows that the time is linear; the peak of its Python objects is traced in one more load. The last part compares
``load_pretrained`` with ``from_pretrained`` on a model of 46,623 stored tensors, in fresh interpreters that have imported its class.
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
import tracemalloc
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 128, "num_experts_per_tok": 8}
_MANY = {"hidden_size": 16, "moe_intermediate_size": 8, "num_experts": 512}
#: Name → config class, layers, files, and sizes that differ.
CASES: dict[str, tuple[str, int, int, dict[str, int]]] = {
    "dense 531": ("Qwen3Config", 48, 1, {}),
    "dense 3006": ("Qwen3Config", 273, 20, {}),
    "moe 3147": ("Qwen3MoeConfig", 8, 4, {}),
    "moe 20046": ("Qwen3MoeConfig", 51, 20, {}),
    "moe 100450": ("Qwen3MoeConfig", 65, 20, _MANY),
}
#: The same with two layers, to see that it runs.
SHORT: dict[str, tuple[str, int, int, dict[str, int]]] = {
    "dense 25": ("Qwen3Config", 2, 1, {}),
    "moe 789": ("Qwen3MoeConfig", 2, 2, {}),
}
#: For ``load_pretrained`` beside ``from_pretrained``; the short form has two layers.
PRETRAINED = ("Qwen3MoeConfig", 60, 20, {"num_experts": 256})


def write_model(directory: Path, config_class: str, layers: int, files: int, other: dict[str, int]) -> int:
    """A model as the hub stores it; returns how many tensors are stored."""
    import torch
    import transformers
    from safetensors import safe_open

    sizes = {**_SIZES, **(_EXPERTS if "Moe" in config_class else {}), **other}
    config = getattr(transformers, config_class)(**sizes, num_hidden_layers=layers, dtype="bfloat16")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    nbytes = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(directory, max_shard_size=-(-nbytes // files) + 1)
    names: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return len(names)


def group() -> Any:
    """The mesh of one rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def warm(directory: str, repeats: int) -> dict[str, float]:
    """Seconds of CPU of the quickest load, and the most bytes of Python objects during one more."""
    import torch
    import transformers

    import shardwise as sw

    mesh, seconds = group(), []
    config = transformers.AutoConfig.from_pretrained(directory)
    for turn in range(repeats + 2):
        with sw.meta_init():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        sw.shard(model, mesh)
        gc.collect()
        if turn == repeats + 1:
            tracemalloc.start()
        started = time.process_time()
        sw.load(model, directory)
        seconds.append(time.process_time() - started)
    return {"seconds": min(seconds[1:-1]), "peak_bytes": tracemalloc.get_traced_memory()[1]}


def pretrained(directory: str, loader: str) -> dict[str, float]:
    """Seconds of CPU of the first load from the path, building and sharding included."""
    import torch
    import transformers

    import shardwise as sw

    mesh, _ = group(), transformers.Qwen3MoeForCausalLM
    started = time.process_time()
    if loader == "load_pretrained":
        model = sw.load_pretrained(directory, mesh, dtype=torch.bfloat16)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    seconds = time.process_time() - started
    del model
    return {"seconds": seconds}


def first(directory: str) -> dict[str, float]:
    """What the first use costs: milliseconds of CPU, modules, full collections."""
    import accelerate
    import torch
    import transformers
    from torch.distributed.fsdp import fully_shard

    mesh = group()
    config = transformers.AutoConfig.from_pretrained(directory)
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before, full = set(sys.modules), []
    gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
    started = time.process_time()
    import shardwise as sw

    imported = time.process_time()
    load = sw.load
    found = time.process_time()
    modules = len(set(sys.modules) - before)
    load(model, directory)
    loaded = time.process_time()
    collections = full.count("start")
    for _ in range(20_000):  # the program continues, and makes objects
        model.__dict__.setdefault("_made", []).append([None])
    after = full.count("start") - collections
    again = time.process_time()
    _ = sw.Checkpointer
    ended = time.process_time()
    return {
        "import shardwise, ms": (imported - started) * 1e3,
        "first sw.load, ms": (found - imported) * 1e3,
        "modules": modules,
        "first load, ms": (loaded - found) * 1e3,
        "full collections in it": collections,
        "full collections after it": after,
        "then Checkpointer, ms": (ended - again) * 1e3,
    }


def child(source: str, *arguments: str) -> dict[str, float]:
    """The answer of a fresh interpreter that imports shardwise from ``source``."""
    environment = {**os.environ, "PYTHONPATH": source}
    environment.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # an installed package has its bytecode, so this one gets it, too
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", help="the src folder of another version")
    parser.add_argument("--short", action="store_true", help="two layers, one round")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, directory, *rest = options.child
        if what == "warm":
            print(json.dumps(warm(directory, int(rest[0]))))
        else:
            print(json.dumps(first(directory) if what == "first" else pretrained(directory, what)))
        return
    cases, rounds = (SHORT, 1) if options.short else (CASES, options.rounds)
    sources = [str(ROOT / "src"), *([options.against] if options.against else [])]
    with tempfile.TemporaryDirectory() as place:
        stored = {name: write_model(Path(place) / name, *case) for name, case in cases.items()}
        print(
            f"{'microseconds of CPU for each stored tensor':45} here{'     there' if options.against else ''}"
        )
        for name, count in stored.items():
            least, peak = [float("inf")] * len(sources), [0.0] * len(sources)
            for turn in range(rounds):
                for k in list(range(len(sources)))[:: -1 if turn % 2 else 1]:
                    found = child(sources[k], "warm", str(Path(place) / name), str(options.repeats))
                    least[k] = min(least[k], found["seconds"] / count * 1e6)
                    peak[k] = found["peak_bytes"] / 1e6
            print(f"{name:40} {' '.join(f'{value:9.1f}' for value in least)}", flush=True)
        print(f"{f'peak of Python objects of {name}, MB':40} {' '.join(f'{value:9.1f}' for value in peak)}")
        name = next(iter(stored))
        print(f"\nfirst use, {name}")
        runs: list[list[dict[str, float]]] = [[] for _ in sources]
        for source in sources:
            child(source, "first", str(Path(place) / name))  # writes the bytecode
        for turn in range(rounds):
            for k in list(range(len(sources)))[:: -1 if turn % 2 else 1]:
                runs[k].append(child(sources[k], "first", str(Path(place) / name)))
        for what in runs[0][0]:
            print(f"{what:40} {' '.join(f'{min(run[what] for run in one):9.1f}' for one in runs)}")
        config, layers, files, other = PRETRAINED
        directory = str(Path(place) / "pretrained")
        count = write_model(Path(directory), config, 2 if options.short else layers, files, other)
        loaders = ("load_pretrained", "from_pretrained")
        seconds = [
            [child(sources[0], loader, directory)["seconds"] for loader in loaders] for _ in range(rounds)
        ]
        ours, theirs = (min(of) for of in zip(*seconds, strict=True))
        print(
            f"\n{count} tensors: load_pretrained {ours:.2f} s of CPU, from_pretrained {theirs:.2f}: {ours / theirs:.2f}"
        )


if __name__ == "__main__":
    main()
