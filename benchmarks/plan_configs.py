"""What plans of public models take: seconds and memory, each in a process of its own, on one core.

    OMP_NUM_THREADS=1 python benchmarks/plan_configs.py            # a minute
    OMP_NUM_THREADS=1 python benchmarks/plan_configs.py --short    # two models

CPU seconds, because machines are shared: ``imports`` of torch, transformers' models and shardwise, and ``plan``, which is
``sw.plan(config, training=…)`` after them. ``process``: seconds of the clock, from its start to its end; ``RSS``: the most memory of the process. Of 2,048 tokens. Exit status 1 if a plan of up to 8 ranks
takes more than 3 s, one of more ranks more than 10 s, or any more than 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "phases" / "configs"
#: Model classes of configs that name another one, which transformers does not have or which has a vision tower.
CLASSES = {"qwen3.5-35b-a3b": "Qwen3_5MoeForCausalLM", "kimi-k2": "DeepseekV3ForCausalLM"}
#: By name: the config, and the ranks.
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "Llama-3-8B": ("llama-3-8b", {"ranks": 8}),
    "Llama-3-70B": ("llama-3-70b", {"ranks": 8}),
    "Qwen3-32B": ("qwen3-32b", {"ranks": 8}),
    "Qwen3-30B-A3B": ("qwen3-30b-a3b", {"ranks": 8}),
    "Qwen3.5-35B-A3B": ("qwen3.5-35b-a3b", {"ranks": 3}),
    "gpt-oss-20b": ("gpt-oss-20b", {"ranks": 8}),
    "gpt-oss-120b": ("gpt-oss-120b", {"ranks": 8}),
    "DeepSeek-V3": ("deepseek-v3", {"ranks": 8}),
    "Kimi-K2": ("kimi-k2", {"ranks": 8}),
    "Kimi-K2, 1,024 ranks": ("kimi-k2", {"ranks": 1024, "nodes": 128}),
    "Llama-3-70B, tp 8": ("llama-3-70b", {"ranks": 64, "nodes": 8, "tp": 8}),
    "DeepSeek-V3, ep 32": ("deepseek-v3", {"ranks": 256, "nodes": 32, "ep": 32}),
    "Kimi-K2, tp 8, ep 64": ("kimi-k2", {"ranks": 1024, "nodes": 128, "tp": 8, "ep": 64}),
}
SHORT = ("Llama-3-8B", "Qwen3-30B-A3B")
MOST_S, MOST_S_OF_MANY, MOST_BYTES = 3.0, 10.0, 2**30


def planned(name: str) -> dict[str, Any]:
    """Plan a case in this process."""
    started = time.process_time()
    import torch
    import transformers
    import transformers.modeling_layers
    import transformers.modeling_utils

    import shardwise as sw

    torch.set_num_threads(1)
    config, ranks = CASES[name]
    training = sw.TrainingSpec(checkpointing=True)
    auto_class = getattr(transformers, CLASSES[config]) if config in CLASSES else None
    imported = time.process_time()
    report = sw.plan(CONFIGS / f"{config}.json", training=training, auto_class=auto_class, **ranks)
    seconds = time.process_time() - imported
    assert report.run is not None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "imports_s": imported - started,
        "plan_s": seconds,
        "rss_bytes": peak * (1 if sys.platform == "darwin" else 1024),
        "model_bytes": report.model_bytes,
        "most_bytes": report.max_shard_bytes,
        "mean_bytes": report.total_shard_bytes / report.ranks,
        "step_bytes": report.run.needed(report.run.phase("steady state"))[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", choices=tuple(CASES))
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--child", choices=tuple(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(planned(options.child)))
        return
    names = [options.only] if options.only else list(SHORT if options.short else CASES)
    found: dict[str, dict[str, Any]] = {}
    print(
        f"{'':22} {'imports':>8} {'plan':>7} {'process':>8} {'RSS':>9}  {'of a rank, mean':>15} {'most':>9}  step, at most"
    )
    for name in names:
        started = time.perf_counter()
        command = [sys.executable, __file__, "--child", name]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        one = found[name] = json.loads(done.stdout.splitlines()[-1])
        one["process_s"] = time.perf_counter() - started
        print(
            f"{name:22} {one['imports_s']:6.2f} s {one['plan_s']:5.2f} s {one['process_s']:6.2f} s {one['rss_bytes'] / 2**30:5.2f} GiB  "
            f"{one['mean_bytes'] / 1e9:12.1f} GB {one['most_bytes'] / 1e9:6.1f} GB  {one['step_bytes'] / 1e9:6.1f} GB",
            flush=True,
        )
    if options.json:
        print(json.dumps(found))
    late = [
        name
        for name, one in found.items()
        if one["plan_s"] > (MOST_S if CASES[name][1]["ranks"] <= 8 else MOST_S_OF_MANY)
    ]
    large = [name for name, one in found.items() if one["rss_bytes"] > MOST_BYTES]
    for what, over in (("took too long", late), ("took too much memory", large)):
        if over:
            print(f"{what}: {', '.join(over)}")
    sys.exit(bool(large or (late and not options.short)))


if __name__ == "__main__":
    main()
