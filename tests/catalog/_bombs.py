"""Small checkpoints that ask for much: each is tried in one process, and what it took is printed as JSON.

``python -m tests.catalog._bombs DIRECTORY``. A bomb that takes minutes ends with the process, by the test's time limit.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.verify import quick_check
from shardwise.errors import ShardwiseError
from shardwise.format.manifest import read_manifest
from tests.harness.hostile import edit_documents, edit_manifest, put_file

Bomb = Callable[[Path], Callable[[], object]]
_PRIME = 2**61 - 1  # Python's numbers hash to what is left when divided by it


def saved(folder: Path) -> Path:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sw.save(sw.TrainState(model=model, optimizer=optimizer), folder / "step")
    return folder / "step"


def resumed(step: Path) -> object:
    model = nn.Linear(3, 2)
    return sw.restore(sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters())), step)


def strided_twice(folder: Path) -> Callable[[], object]:
    step = saved(folder)

    def change(manifest: dict[str, Any]) -> None:
        cuts = [["strided", 0, 65536], ["strided", 0, 65536]]
        manifest["geometries"][0].update(axis_sizes=[1, 1], axis_names=["a", "b"], cuts=cuts)
        manifest["models"]["model"]["weight"]["shape"] = [2**40, 3]

    edit_manifest(step, change)
    return lambda: sw.verify(step)


def many_dims_strided(folder: Path) -> Callable[[], object]:
    step = saved(folder)

    def change(manifest: dict[str, Any]) -> None:
        n = 16
        cuts = [["strided", dim, 256] for dim in range(n)]
        manifest["geometries"][0].update(axis_sizes=[1] * n, axis_names=["a"] * n, cuts=cuts)
        for entry in manifest["models"]["model"].values():
            entry.update(shape=[8] * n, states={})

    edit_manifest(step, change)
    return lambda: sw.verify(step)


def many_ranks(folder: Path) -> Callable[[], object]:
    """Whole tensors are replicated over a million ranks, of which one has files."""
    step = saved(folder)
    edit_manifest(step, lambda m: m.update(world_size=2**20))
    return lambda: sw.verify(step)


def many_places(folder: Path) -> Callable[[], object]:
    """3,000 shapes, cut for 3,000 ranks, of which all but the first hold nothing."""
    step = saved(folder)

    def change(manifest: dict[str, Any]) -> None:
        manifest["world_size"] = 3000
        manifest["files"] |= {f"rank/{r:05d}.json": manifest["files"]["rank/00000.json"] for r in range(3000)}
        manifest["geometries"][0].update(
            axis_sizes=[3000], cuts=[["shard", 0, 1]], ranks=list(range(3000)), axis_names=["a"]
        )
        entry = {**manifest["models"]["model"]["bias"], "states": {}}
        manifest["models"]["model"] = {str(k): {**entry, "shape": [1, k + 1]} for k in range(3000)}
        manifest["packed"] = {}

    edit_manifest(step, change)
    return lambda: sw.verify(step)


def packed_count(folder: Path) -> Callable[[], object]:
    step = saved(folder)
    edit_manifest(step, lambda m: next(iter(m["packed"]["optimizer"].values())).update(count=2**40))
    return lambda: resumed(step)


def header_sparse(use: Callable[[Path], object]) -> Bomb:
    def bomb(folder: Path) -> Callable[[], object]:
        step = saved(folder)
        file = next(step.glob("model/*.safetensors"))
        os.truncate(file, 64 * 1024**3)
        entry = {"nbytes": 64 * 1024**3, "header_bytes": 64 * 1024**3}
        edit_manifest(step, lambda m: m["files"][f"model/{file.name}"].update(entry))
        return lambda: use(step)

    return bomb


def header_shape(folder: Path) -> Callable[[], object]:
    header = {"weight": {"dtype": "F32", "shape": [0, 2**61, 2**61], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return lambda: sw.convert(folder, folder.with_name(f"{folder.name}-out"))


def manifest_shape(folder: Path) -> Callable[[], object]:
    step = saved(folder)
    edit_manifest(step, lambda m: m["models"]["model"]["weight"].update(shape=[0, 2**61, 2**61]))
    return lambda: sw.convert(step, folder / "out")


def document(value: Any) -> Bomb:
    def bomb(folder: Path) -> Callable[[], object]:
        step = saved(folder)
        edit_documents(step, lambda d: d.update({"extra.x": value}))
        return lambda: resumed(step)

    return bomb


def integer(value: int) -> dict[str, str]:
    return {"$type": "int", "hex": hex(value)}


def items(kind: str, values: list[Any]) -> dict[str, Any]:
    return {"$type": kind, "items": values}


_INTEGERS = [integer(k * _PRIME) for k in range(20_000)]
_COMPLEX = [{"$type": "complex", "real": -1000003.0 * k, "imag": float(k)} for k in range(20_000)]


def arrays_of_one_tensor(folder: Path) -> Callable[[], object]:
    """10,000 arrays of 1 MiB each, of which one is stored."""
    from safetensors.torch import save

    step = saved(folder)
    content = torch.zeros(2**20, dtype=torch.uint8)
    put_file(step, "state.safetensors", save({"extra.x/k": content}))
    array = {"$type": "numpy.array", "key": "k", "dtype": "|u1", "shape": [2**20]}
    edit_documents(step, lambda d: d.update({"extra.x": [array] * 10_000}))
    return lambda: resumed(step)


def array_of_many_dims(folder: Path) -> Callable[[], object]:
    from safetensors.torch import save

    step = saved(folder)
    put_file(step, "state.safetensors", save({"extra.x/k": torch.zeros(8, dtype=torch.uint8)}))
    array = {"$type": "numpy.array", "key": "k", "dtype": "|u1", "shape": [2**62] * 100_000}
    edit_documents(step, lambda d: d.update({"extra.x": array}))
    return lambda: resumed(step)


def pipe(name: str, use: Callable[[Path], object]) -> Bomb:
    def bomb(folder: Path) -> Callable[[], object]:
        step = saved(folder)
        (step / name).unlink()
        os.mkfifo(step / name)
        return lambda: use(step)

    return bomb


def empty_pipe(folder: Path) -> Callable[[], object]:
    """A pipe has the size of an empty file."""
    step = saved(folder)
    put_file(step, "note", b"")
    (step / "note").unlink()
    os.mkfifo(step / "note")
    return lambda: quick_check(str(step), 0)


BOMBS: dict[str, Bomb] = {
    "pipe for state.json, restore": pipe("state.json", resumed),
    "pipe for state.json, convert": pipe("state.json", lambda s: sw.convert(s, s.with_name("out"))),
    "pipe for the manifest": pipe("manifest.json", lambda s: read_manifest(s)),
    "pipe for an empty file": empty_pipe,
    "packed count": packed_count,
    "shape with an empty dim, header": header_shape,
    "shape with an empty dim, manifest": manifest_shape,
    "sparse header, quick check": header_sparse(lambda s: quick_check(str(s), 0)),
    "sparse header, verify": header_sparse(lambda s: sw.verify(s)),
    "sparse header, restore": header_sparse(resumed),
    "a million ranks": many_ranks,
    "many places": many_places,
    "cuts of many dims": many_dims_strided,
    "arrays of many dims": array_of_many_dims,
    "arrays of one tensor": arrays_of_one_tensor,
    "colliding set": document(items("set", _INTEGERS)),
    "colliding frozenset": document(items("frozenset", _INTEGERS)),
    "colliding dict": document(items("dict", [[n, 0] for n in _INTEGERS])),
    "colliding counter": document(items("Counter", [[n, 0] for n in _INTEGERS])),
    "colliding tuples": document(items("set", [items("tuple", [n]) for n in _INTEGERS])),
    "colliding complex numbers": document(items("set", _COMPLEX)),
    "two strided cuts": strided_twice,
}


def _tried(attempt: Callable[[], object]) -> dict[str, Any]:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    try:
        found = attempt()
        said = f"nothing: {str(found)[:200]}"
    except ShardwiseError as error:
        said = f"{type(error).__name__}: {error}"
    except Exception as error:
        said = f"raw {type(error).__name__}: {str(error)[:200]}"
    return {
        "said": said,
        "seconds": time.perf_counter() - started,
        "bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024,
    }


def main(root: Path) -> None:
    for k, (name, bomb) in enumerate(BOMBS.items()):
        folder = root / str(k)
        folder.mkdir()
        attempt = bomb(folder)
        tried = _tried(attempt)
        for _ in range(2):  # work that is slow is slow each time; a shared processor makes some runs slower
            if tried["seconds"] > 1:
                tried |= {"seconds": min(tried["seconds"], _tried(attempt)["seconds"])}
        print(json.dumps({"name": name, **tried}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
