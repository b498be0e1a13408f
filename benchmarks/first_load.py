"""The first load of a process, and the second, as users start them: fresh interpreters under torchrun.

    OMP_NUM_THREADS=1 python benchmarks/first_load.py                          # dense on 1, 2, 4 and 8 ranks, small on 1, 2 and 4
    OMP_NUM_THREADS=1 python benchmarks/first_load.py --ranks 2 --rounds 3 --models dense

Each run starts torchrun. Its ranks import torch and transformers, build the model on meta and shard it with torch's own functions; then
the clock starts. Our time includes importing what ``sw.load`` needs. The other loaders' imports are outside of their time. A second
model is then built and loaded in the same process. All loaders take turns; minima of the rounds, in seconds, from when the first rank
starts to when the last one ends. The contracts come last; the exit status is 1 if one is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PEERS = ("ours", "plain_floor", "huge_page_floor", "dcp")
#: Where a floor on huge pages takes less than this part of the plain floor's time, they are cheap.
_CHEAP = 0.8


def rank(peer: str, model: str, directory: str, out: str) -> None:
    """One rank: two loads, and what they took, into a file."""
    import accelerate
    import torch
    import torch.distributed as dist
    import transformers

    from benchmarks.loading.cases import Case, built_before
    from benchmarks.loading.rank import fetch_memory
    from benchmarks.peers import PEERS as LOADERS

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world_size = dist.get_world_size()
    case = Case(model, directory, "dim 0", world_size)
    config = transformers.AutoConfig.from_pretrained(directory)
    found: list[dict[str, float]] = []
    for _ in range(2):
        with accelerate.init_empty_weights(include_buffers=False):
            built_before(case, transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        load = LOADERS[peer].prepare(case)
        if not found and (
            early := [
                name for name in sys.modules if name.startswith("shardwise.") and name != "shardwise.errors"
            ]
        ):
            raise SystemExit(f"{early} were imported before the clock started")
        dist.barrier()
        fetch_memory(case.nbytes // world_size)
        dist.barrier()
        started, cpu = time.perf_counter(), time.process_time()  # one clock for all processes of a machine
        loaded = load()
        ended = time.perf_counter()
        found.append({"started": started, "ended": ended, "cpu_s": time.process_time() - cpu})
        dist.barrier()
        del loaded, load
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(peer: str, model: str, directory: str, ranks: int) -> list[float]:
    """Seconds of the first and of the second load, under torchrun."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, "--rank", peer, model, directory, out]
        done = subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise SystemExit(f"{peer} on {ranks} ranks failed:\n{done.stdout}\n{done.stderr}")
        each = [json.loads(file.read_text()) for file in Path(out).iterdir()]
    return [max(r[turn]["ended"] for r in each) - min(r[turn]["started"] for r in each) for turn in range(2)]


def limits(model: str, seconds: dict[str, list[float]]) -> list[tuple[str, float, float]]:
    """What is promised for a cell: its words, what was measured, and the limit."""
    first, second = 0, 1
    ours, plain, huge = (seconds[peer] for peer in ("ours", "plain_floor", "huge_page_floor"))
    if model == "small":
        return [("first load / plain floor", ours[first] / plain[first], 2.5)]
    found = [
        ("first load / DCP's reader", ours[first] / seconds["dcp"][first], 1.05),
        ("second load / plain floor", ours[second] / plain[second], 1.1),
    ]
    if huge[second] < _CHEAP * plain[second]:
        found.append(("second load / huge-page floor", ours[second] / huge[second], 1.4))
    return found


def main() -> None:
    """Measure, print the table and the contracts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=("dense", "small"), default=["dense", "small"])
    parser.add_argument("--ranks", nargs="+", type=int, help="1 2 4 8, and 1 2 4 for small")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--short", action="store_true", help="tiny models, 2 ranks, one round, no contracts")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(*options.rank)
        return
    broken = False
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as place:
        for model in options.models:
            directory = f"{place}/{model}"
            write(model, directory, short=options.short)
            ranks = (
                [2] if options.short else options.ranks or ([1, 2, 4, 8] if model == "dense" else [1, 2, 4])
            )
            for count in ranks:
                least = {peer: [float("inf")] * 2 for peer in PEERS}
                for turn in range(1 if options.short else options.rounds):
                    order = PEERS[turn % len(PEERS) :] + PEERS[: turn % len(PEERS)]
                    for peer in order[:: -1 if turn % 2 else 1]:
                        taken = run(peer, model, directory, count)
                        least[peer] = [min(pair) for pair in zip(least[peer], taken, strict=True)]
                times = ", ".join(
                    f"{peer} {first:.3f} {second:.3f}" for peer, (first, second) in least.items()
                )
                print(f"{model}, {count} ranks, first and second load: {times}", flush=True)
                for words, value, limit in () if options.short else limits(model, least):
                    broken |= value > limit
                    print(
                        f"  {words}: {value:.2f} ({'holds' if value <= limit else 'BROKEN'}: {limit})",
                        flush=True,
                    )
    sys.exit(broken)


def write(model: str, directory: str, *, short: bool) -> None:
    """Write a model in a process of its own, so that this one stays small."""
    code = "import sys; from benchmarks.loading.models import write_model as w; w(sys.argv[1], sys.argv[2], short=sys.argv[3] == 'True')"
    subprocess.run([sys.executable, "-c", code, model, directory, str(short)], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
