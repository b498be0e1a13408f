"""Times a 9.4 GB load onto one GPU, from the page cache and from disk, next to safetensors and a bare copy from pinned memory.

    PYTHONPATH=src python3 -m benchmarks.gpu_load --directory /tmp                    # all that is below, about three minutes
    PYTHONPATH=src python3 -m benchmarks.gpu_load --threads 4 8 16 --staging 32 64    # MiB; each pair is measured
    PYTHONPATH=src python3 -m benchmarks.gpu_load --against OLD/src                   # another state of the library, in turn

Each kind's *first* load is the first one of a process: it counts what a user pays who loads once (planning, first use, pinning, the
first memory of the device; not the imports and the CUDA context). *Later* ones find all that ready; there all kinds take turns
in one process. Minima.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

MIB, GB = 1024**2, 1e9
LAYERS = 18
#: ``cpu``: that this program runs where there is no GPU.
DEVICE = os.environ.get("GPU_LOAD_DEVICE", "cuda")


def _wait() -> None:
    import torch

    if DEVICE != "cpu":
        torch.accelerator.synchronize()


def config(layers: int) -> Any:
    """Qwen3-8B's, with fewer layers: 201 tensors, 9.4 GB in bf16."""
    import transformers

    return transformers.Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def write(directory: Path, layers: int) -> None:
    """The model in five files with an index, of random bytes, on disk."""
    import torch
    import transformers
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config(layers)).to(torch.bfloat16)
    config(layers).save_pretrained(directory)
    names = {name: tensor.shape for name, tensor in model.state_dict().items()}
    total = sum(shape.numel() * 2 for shape in names.values())
    files: list[dict[str, torch.Tensor]] = [{}]
    filled, where = 0, {}
    for name, shape in names.items():
        if filled > total / 5:
            files.append({})
            filled = 0
        files[-1][name] = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE).cpu()
        filled += shape.numel() * 2
    for number, tensors in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        where |= dict.fromkeys(tensors, file)
        save_file(tensors, directory / file, {"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()


def drop(directory: Path) -> None:
    """Give the pages of the files back."""
    for file in directory.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def ours(directory: Path, layers: int, threads: int | None, staging: int) -> dict[str, Any]:
    """Seconds of ``sw.load`` into a sharded model on meta, and of the part that reads and copies."""
    import torch
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import shardwise as sw
    from shardwise.loading import load as carry_out

    mesh = init_device_mesh(DEVICE, (1,))
    with sw.meta_init():
        model = transformers.Qwen3ForCausalLM._from_config(config(layers), dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inner, filling = carry_out.execute_own, []

    def timed(*args: Any) -> None:
        began = time.perf_counter()
        inner(*args)
        filling.append(time.perf_counter() - began)

    carry_out.execute_own = timed
    _wait()
    began = time.perf_counter()
    report = sw.load(model, directory, io=sw.IOOptions(read_threads=threads, staging_bytes=staging * MIB))
    _wait()
    took = time.perf_counter() - began
    carry_out.execute_own = inner
    return {"s": took, "filling": sum(filling), "bytes": report.bytes_read, "reads": report.reads}


def load_file(directory: Path) -> dict[str, Any]:
    """Seconds of safetensors' own loads onto the device, file after file."""
    import safetensors.torch

    _wait()
    began, kept = time.perf_counter(), []
    for file in sorted(directory.glob("*.safetensors")):
        kept.append(safetensors.torch.load_file(file, device=DEVICE))
    _wait()
    took = time.perf_counter() - began
    return {"s": took, "bytes": sum(t.nbytes for one in kept for t in one.values())}


def pinned_copy() -> dict[str, Any]:
    """Seconds for as many bytes, 256 MiB of pinned memory again and again."""
    import torch

    host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=DEVICE)
    best = float("inf")
    for _ in range(10):
        _wait()
        began = time.perf_counter()
        there.copy_(host, non_blocking=True)
        _wait()
        best = min(best, time.perf_counter() - began)
    return {"s": best, "bytes": host.nbytes}


def reads(directory: Path, count: int) -> dict[str, Any]:
    """Seconds of plain reads of the files by so many threads, 4 MiB at a time, into memory that is there."""
    pieces = iter(
        [
            (file, at)
            for file in sorted(directory.glob("*.safetensors"))
            for at in range(0, file.stat().st_size, 4 * MIB)
        ]
    )
    lock, done = threading.Lock(), []

    def one() -> None:
        buffer, fds = memoryview(bytearray(4 * MIB)), {}
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            fd = fds.get(piece[0]) or fds.setdefault(piece[0], os.open(piece[0], os.O_RDONLY))
            done.append(os.preadv(fd, [buffer], piece[1]))

    threads = [threading.Thread(target=one) for _ in range(count)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"s": time.perf_counter() - began, "bytes": sum(done)}


def child(args: argparse.Namespace) -> None:
    """Kinds in turn, as JSON: what each found in each round."""
    import torch
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    backend = (
        {"backend": "nccl", "device_id": torch.device("cuda", 0)} if DEVICE == "cuda" else {"backend": "gloo"}
    )
    dist.init_process_group(**backend)
    torch.ones(1, device=DEVICE).add_(1)
    directory = Path(args.directory)
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for kind in args.kinds:
            if args.cold:
                drop(directory)
            name, *numbers = kind.split()
            if name == "ours":
                one = ours(directory, args.layers, int(numbers[0]) or None, int(numbers[1]))
            elif name == "load_file":
                one = load_file(directory)
            elif name == "copy":
                one = pinned_copy()
            else:
                one = reads(directory, int(numbers[0]))
            gc.collect()
            found.setdefault(kind, []).append(one)
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # the group needs no farewell


def measured(
    args: argparse.Namespace, directory: Path, kinds: list[str], source: str | None, rounds: int, cold: bool
) -> dict[str, list[Any]]:
    """What a process found for these kinds."""
    command = [sys.executable, "-m", "benchmarks.gpu_load", "--kinds", *kinds, "--directory", str(directory)]
    command += ["--layers", str(args.layers), "--rounds", str(rounds), *(["--cold"] if cold else [])]
    environment = os.environ | ({"PYTHONPATH": source} if source else {})
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300)
    if done.returncode or not done.stdout.strip():
        print(kinds, done.stdout[-1000:], done.stderr[-3000:], file=sys.stderr)
        return {}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Write the model, measure in turn, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[0], help="0: as the library chooses")
    parser.add_argument("--staging", type=int, nargs="+", default=[32], help="MiB")
    parser.add_argument("--against", help="another src, measured as well")
    parser.add_argument("--kinds", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kinds:
        child(args)
        return
    pairs = [f"ours {threads} {staging}" for threads in args.threads for staging in args.staging]
    others = ["load_file", "copy", "reads 1", "reads 8"]
    if DEVICE == "cpu":
        others.remove("copy")
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="shardwise-gpu-load-") as root:
        directory = Path(root)
        began = time.perf_counter()
        write(directory, args.layers)
        print(f"written in {time.perf_counter() - began:.0f} s", flush=True)
        for kinds, source in [([pairs[0]], args.against), ([*pairs, *others], None)]:
            if source is not None or len(kinds) > 1:
                for file in directory.glob("*.safetensors"):
                    file.read_bytes()
                _print(
                    "from the page cache",
                    source,
                    measured(args, directory, kinds, source, args.rounds, False),
                )
        _print("first", None, measured(args, directory, ["load_file"], None, 1, False))
        for kinds, source in [([pairs[0]], args.against), ([pairs[0], "load_file", "reads 1"], None)]:
            if source is not None or len(kinds) > 1:
                _print("from disk", source, measured(args, directory, kinds, source, 1, True))


def _print(title: str, source: str | None, found: dict[str, list[Any]]) -> None:
    print(f"\n{title}{' of ' + source if source else ''}", flush=True)
    for kind, rounds in found.items():
        cells = [f"first {_cell(rounds[0])}"]
        if len(rounds) > 1:
            cells.append(f"later {_cell(min(rounds[1:], key=lambda one: one['s']))}")
        print(f"  {kind:14} {'; '.join(cells)}  {rounds[-1].get('reads', '')}", flush=True)


def _cell(one: dict[str, Any]) -> str:
    filling = f" (reading and copying: {one['filling']:.3f})" if "filling" in one else ""
    return f"{one['s']:.3f} s{filling} {one['bytes'] / one['s'] / GB:.1f} GB/s"


if __name__ == "__main__":
    main()
