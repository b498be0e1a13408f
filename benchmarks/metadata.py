"""What checkpoints of many tensors on many ranks cost before any payload moves: manifest, planning, agreement.

    OMP_NUM_THREADS=1 python benchmarks/metadata.py --params 20000 --ranks 1024

One process plays one rank of a group that is not there; model (a mixture of experts, 70 billion parameters in bf16) and
optimizer (AdamW, fp32 moments) are on meta, sharded by FSDP2 as they would be. The state is described, cut into slice
files and written into a manifest by the code of a save, as all ranks would have written it, with block checksums of
every 16 MiB that they would hold; only the checksums' digits are stand-ins. Then a resume from that manifest is planned
by the code of a resume, on one rank of the same mesh and of others. Seconds are CPU seconds, medians of the repeats.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from shardwise.catalog.checkpoint import catalog_of_checkpoint
from shardwise.checkpoint.optimizer import OptimizerInCheckpoint, trained_by
from shardwise.checkpoint.save import (
    checked_texts,
    file_records,
    manifest_of,
    merged_records,
    payload_bytes,
    refuse_unequal,
)
from shardwise.checkpoint.snapshot import Snapshot, comparable, own_parts, plain_sums, take_snapshot
from shardwise.checkpoint.stored import StoredCheckpoint
from shardwise.checkpoint.take import Collected, Lineage
from shardwise.format.manifest import BLOCK_BYTES, MANIFEST_NAME, FileEntry, Manifest, read_manifest
from shardwise.format.slices import boxes_to_write, file_count, file_name, header_bytes
from shardwise.internals.fsdp import lazy_chunks
from shardwise.loading.load import fingerprint, in_words, plan_load
from shardwise.loading.strategies import facts_of
from shardwise.objects import gc_paused
from shardwise.planning.match import Rules
from shardwise.planning.plan import IOOptions, Plan
from shardwise.ranks.ranks import Ranks
from shardwise.state.optimizer import place_states
from shardwise.state.typed_json import Places
from shardwise.tensors.live import HostMemory, describe

HIDDEN, EXPERT, EXPERTS, LAYER = 2048, 1728, 64, 200
VOCABULARY = 129_280
#: What a mesh is made of: the part of all ranks that each axis takes (None: what is left), and its role.
MESHES: dict[str, dict[str, int | None]] = {
    "1-D": {"shard": None},
    "HSDP": {"replicate": 8, "shard": None},
    "FSDP x TP 8": {"shard": None, "tp": 8},
    "FSDP x TP 2": {"shard": None, "tp": 2},
}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, EXPERT, bias=False)
        self.up_proj = nn.Linear(HIDDEN, EXPERT, bias=False)
        self.down_proj = nn.Linear(EXPERT, HIDDEN, bias=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN // 4, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN // 4, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.shared_gate = nn.Linear(HIDDEN, 1, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))


class Layer(nn.Module):
    """200 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = Mixture()
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN)

    def forward(self) -> None:
        """Never called: FSDP2 wants one to hook into."""


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self) -> None:
        """Never called, see above."""


TP_PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.experts.*.gate_proj": ColwiseParallel(),
    "mlp.experts.*.up_proj": ColwiseParallel(),
    "mlp.experts.*.down_proj": RowwiseParallel(),
}


@contextmanager
def ranks_not_there(ranks: int, rank: int | None = None) -> Iterator[None]:
    """A process group of so many ranks, of which this process is one (:func:`rank_of` them) and no other exists."""
    # Private, and registers the backend "fake" when imported; what torch's own planners use (torch 2.11-2.13).
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        "fake", store=FakeStore(), rank=rank_of(ranks) if rank is None else rank, world_size=ranks
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_of(ranks: int) -> int:
    """The rank that is played: one in the middle, which reads from several old ones."""
    return ranks // 2 + 1


def make_state(params: int, ranks: int, mesh_kind: str) -> sw.TrainState:
    """A model on meta under the mesh, and AdamW with its state."""
    axes = MESHES[mesh_kind]
    rest = ranks // int(np.prod([n for n in axes.values() if n]))
    mesh = init_device_mesh("cpu", tuple(n or rest for n in axes.values()), mesh_dim_names=tuple(axes))
    with torch.device("meta"):
        model = Model(max(1, params // LAYER)).bfloat16()
    with lazy_chunks():  # else FSDP2 makes a tensor of each parameter for each rank: minutes at 4,096 ranks
        for layer in model.layers:
            if "tp" in axes:
                parallelize_module(layer, mesh["tp"], TP_PLAN)
            fully_shard(layer, mesh=mesh["shard"] if "tp" in axes else mesh)
        fully_shard(model, mesh=mesh["shard"] if "tp" in axes else mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        moments = [torch.empty_like(p, dtype=torch.float32, requires_grad=False) for _ in range(2)]
        optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    return sw.TrainState(model=model, optimizer=optimizer)


def timed(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median CPU seconds, and what the last run returned."""
    found, result = [], None
    for _ in range(repeats):
        result = None
        gc.collect()
        begun = time.process_time()
        result = work()
        found.append(time.process_time() - begun)
    return statistics.median(found), result


# ----------------------------------------------------------------------------------------------------
# A save


def plan_save(state: sw.TrainState, rank: int) -> tuple[Snapshot, list[tuple[str, bytes]]]:
    """What a rank works out before it writes: its state by reference, hashes to compare it with that of other ranks, its slice
    files, a reader's check of its documents, the bytes of all, and its files' headers."""
    ranks = Ranks(rank=rank, world_size=dist.get_world_size())
    with gc_paused():  # as a save does
        snapshot = take_snapshot(state, 1)
        collected = collected_of(snapshot, rank)
        comparable(snapshot, plain_sums(snapshot), ranks)
    checked_texts(collected, ranks, "")
    payload_bytes(collected)
    return snapshot, [(f.name, header_bytes(f.slices)) for part in collected.own for f in part.files]


def records_of_all(collected: Collected, ranks: int, header: int) -> Callable[[int], dict[str, Any]]:
    """What a rank would send when it has written: its files' entries and its share of the digest sums.

    Sizes are those of the files, headers taken as long as this rank's; checksums and sums are stand-ins.
    """
    snapshot = collected.snapshot
    sums = np.zeros(sum(v.counted for part in snapshot.parts for v in part.live), np.uint64)
    share = file_records(collected, 0, {}, sums)[
        "sums"
    ]  # as long on every rank, and made once: of thousands it takes minutes
    by_kind = {}
    for part in snapshot.parts:
        kinds: dict[tuple[Any, ...], list[Any]] = {}
        for v in part.live:
            t = v.stored
            kinds.setdefault((t.shape, t.geometry, t.owner, t.dtype), [t, 0])[1] += 1
        by_kind[part.kind] = [*kinds.values()], file_count([t for t, _ in kinds.values()])

    def record(rank: int) -> dict[str, Any]:
        files = {f"rank/{rank:05d}.json": small(300), f"rank/{rank:05d}.safetensors": small(5200)}
        if rank == 0:
            files["state.json"] = small(2_000_000)
        for kind, (kinds, count) in by_kind.items():
            nbytes = [0] * count
            for tensor, n in kinds:
                for k, held in enumerate(boxes_to_write(tensor, rank)):
                    nbytes[k] += n * held.box.numel * {"BF16": 2, "F32": 4}[tensor.dtype]
            for k, payload in enumerate(nbytes):
                if payload:
                    blocks = tuple(f"{7 * j + rank:016x}" for j in range(-(-payload // BLOCK_BYTES)))
                    name = f"{kind}/{file_name(kind, rank, k, count)}"
                    files[name] = FileEntry(header + payload, header, f"{rank:016x}", blocks)
        return {
            "files": {n: {**asdict(f), "blocks": list(f.blocks)} for n, f in files.items()},
            "sums": share,
        }

    return record


def collected_of(snapshot: Snapshot, rank: int = 0) -> Collected:
    """A snapshot as a save collects it on a rank."""
    return Collected(
        snapshot=snapshot,
        shared={},
        local={"rng": snapshot.documents["rng"]},
        assets={},
        step=1,
        lineage=Lineage("0123456789abcdef", None),
        seed=0,
        software={"torch": torch.__version__},
        hub_tensors={},
        own=own_parts(snapshot, rank),
    )


def small(nbytes: int) -> FileEntry:
    return FileEntry(nbytes, nbytes, "0123456789abcdef")


def decision(collected: Collected, ranks: int, merged: Mapping[str, Any]) -> Manifest:
    """What rank 0 makes of the records of all ranks."""
    refuse_unequal(collected.snapshot, merged["sums"])
    return manifest_of(collected, Ranks(world_size=ranks), merged)


def measure_save(state: sw.TrainState, ranks: int, folder: str, repeats: int) -> dict[str, Any]:
    """One rank's planning, rank 0's agreement, and the manifest that comes out of it, in ``folder``."""
    seconds, (snapshot, headers) = timed(lambda: plan_save(state, rank_of(ranks)), repeats)
    collected = collected_of(snapshot)
    record = records_of_all(collected, ranks, max(len(h) for _, h in headers))
    merged = merged_records([record(rank) for rank in range(ranks)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    decide_s, manifest = timed(lambda: decision(collected, ranks, merged), 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text_s, text = timed(manifest.to_text, 1)
    os.makedirs(folder)
    Path(folder, MANIFEST_NAME).write_text(text)
    blocks = sum(len(f.blocks) for f in manifest.files.values())
    entries = {n: replace(f, blocks=()) for n, f in manifest.files.items()}
    without = len(text) - len(replace(manifest, files=entries).to_text())
    return {
        "tensors": sum(len(part.live) for part in snapshot.parts),
        "files": len(manifest.files),
        "blocks": blocks,
        "payload GB": round(sum(f.nbytes for f in manifest.files.values()) / 1e9, 1),
        "manifest MB": round(len(text) / 1e6, 2),
        "of it block checksums MB": round(without / 1e6, 2),
        "planning of a save, CPU s": round(seconds, 2),
        "rank 0's agreement, CPU s": round(decide_s, 2),
        "rank 0's agreement, MB over what it received": round((peak - before) / 1e3, 1),
        "manifest's text, CPU s": round(text_s, 2),
    }


# ----------------------------------------------------------------------------------------------------
# A resume


@gc_paused()  # as the whole of a resume
def plan_resume(
    state: sw.TrainState, path: str, tensors: dict[str, dict[str, torch.Tensor]]
) -> tuple[Plan, Plan]:
    """What a rank works out before it reads: manifest, catalogs, layout, recipes, plans, proofs.

    ``tensors`` are the states of its optimizer, for which there is room already.
    """
    model, io = state.models["model"], IOOptions()
    manifest = read_manifest(path)
    catalog = catalog_of_checkpoint(path, manifest=manifest)
    described = describe(model)
    planned = plan_load(described, catalog, Rules(), io=io)
    facts_of(planned, fingerprint(planned.plan, {}), in_words(planned.plan, {}))
    part = trained_by("optimizer", state.optimizers["optimizer"], {"model": described})
    states = OptimizerInCheckpoint(part, stored_settings(path, manifest)).states()
    given = states.filling(described, tensors, HostMemory(), io, grow=lambda *_: None)
    return planned.plan, plan_load(given.live, given.catalog, given.rules, io=io).plan


def stored_settings(path: str, manifest: Manifest) -> StoredCheckpoint:
    """The manifest, with an optimizer's document that holds nothing."""
    documents = {"optimizer": {"groups": [], "values": {}}}
    return StoredCheckpoint(path, manifest, documents, Places(), manifest)


def measure_resume(state: sw.TrainState, path: str, repeats: int) -> dict[str, Any]:
    """One rank's planning of a resume from the manifest in ``path``."""
    optimizer, model = state.optimizers["optimizer"], state.models["model"]
    part = trained_by("optimizer", optimizer, {"model": describe(model)})
    spread = OptimizerInCheckpoint(part, stored_settings(path, read_manifest(path))).states().spread
    tensors, _ = place_states(part, spread, HostMemory())
    del spread
    seconds, plans = timed(lambda: plan_resume(state, path, tensors), repeats)
    read = sum(p.bytes_to_read for p in plans)
    held = sum(p.local_nbytes for p in plans)
    return {
        "CPU s": round(seconds, 2),
        "reads": sum(len(p.transfers) for p in plans),
        "from files": len({t.path for p in plans for t in p.transfers}),
        "bytes read / held": round(read / held, 4),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All meshes: saves on ``--ranks``, resumes of each save on its own mesh and on two others."""
    result: dict[str, Any] = {"params, ranks": f"{args.params}, {args.ranks}"}
    saved = ("1-D", "HSDP", "FSDP x TP 8")
    others = [(args.ranks, "FSDP x TP 2"), (args.ranks * 3 // 4, "1-D")]
    planning, sizes = [], []
    started = time.perf_counter()

    def tell(what: str, found: dict[str, Any]) -> None:
        result[what] = found
        print(f"{time.perf_counter() - started:.0f} s: {what}: {found}", file=sys.stderr, flush=True)

    def resume(state: sw.TrainState, source: str, label: str) -> None:
        found = measure_resume(state, os.path.join(root, source), args.repeats)
        planning.append(found["CPU s"])
        tell(f"resume of {source} on {label}", found)

    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as root:
        with ranks_not_there(args.ranks):
            for kind in saved:
                state = make_state(args.params, args.ranks, kind)
                found = measure_save(state, args.ranks, os.path.join(root, kind), args.repeats)
                tell(f"save on {kind}", found)
                planning.append(found["planning of a save, CPU s"])
                sizes.append(found["manifest MB"])
                resume(state, kind, f"{args.ranks} ranks {kind}")
        for ranks, kind in others:
            with ranks_not_there(ranks):
                state = make_state(args.params, ranks, kind)
                for source in saved:
                    resume(state, source, f"{ranks} ranks {kind}")
    result["largest manifest, MB"] = max(sizes)
    result["slowest planning of one rank, CPU s"] = max(planning)
    result["contract: manifest <= 10 MB"] = "holds" if max(sizes) <= 10 else "BROKEN"
    result["contract: planning <= 2 s a rank"] = "holds" if max(planning) <= 2 else "BROKEN"
    return result


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=int, default=20_000, help="in steps of 200")
    parser.add_argument("--ranks", type=int, default=1024, help="a multiple of 16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(args)
    broken = [name for name, value in result.items() if value == "BROKEN"]
    print(json.dumps(result) if args.json else "\n".join(f"{k:48} {v}" for k, v in result.items()))
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
