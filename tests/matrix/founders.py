"""The program of the founding cases, on two ranks: ``torchrun --nproc-per-node 2 founders.py FOLDER (make | train | resume)``.

A tiny Qwen3-MoE in bfloat16, whose experts are stored one by one. ``train`` loads it sharded, compares every parameter with that of
``from_pretrained``, takes two steps, saves, and takes two more. ``resume`` is another job: it resumes, takes the same two steps, and
exports. Losses and bits of all parameters and of the optimizer must be those of the run that did not stop. All of that once with a
loop of one's own, and once with Accelerate.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw


def make(folder: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def whole(p: torch.Tensor) -> torch.Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


def own(source: Path) -> tuple[Any, Any, Any, Any]:
    """A model, its load's report, an optimizer and the function that goes back from a loss: a loop of one's own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, report = sw.load_pretrained(str(source), mesh, return_report=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, report, optimizer, torch.Tensor.backward


def accelerated(source: Path) -> tuple[Any, Any, Any, Any]:
    """The same with an accelerator. Accelerate doesn't choose FSDP on CPUs: its shared state says several GPUs."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from shardwise.integrations.accelerate import ShardwiseAccelerator, load_pretrained

    os.environ["ACCELERATE_USE_CPU"] = "true"
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = ShardwiseAccelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model, report = load_pretrained(accelerator, str(source), return_report=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, report, optimizer, accelerator.backward


def digest(model: Any, optimizer: Any) -> str:
    """Of this rank's bits of all parameters and of the optimizer's state."""
    found = hashlib.sha256()
    state = getattr(optimizer, "optimizer", optimizer).state
    for _, p in model.named_parameters():
        for tensor in (p, *(value for _, value in sorted(state[p].items()))):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def check_rank_files(folder: Path, source: Path, model: Any) -> None:
    """DTensors that this torch pickled, one file for each rank, as verl saves them: their form changes between versions."""
    folder.mkdir(exist_ok=True)
    name = f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    torch.save(model.state_dict(), folder / name)
    dist.barrier()
    other = sw.load_pretrained(str(source), init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    sw.load(other, folder)
    unlike = [
        n
        for (n, p), q in zip(model.named_parameters(), other.parameters(), strict=True)
        if not torch.equal(p.to_local(), q.to_local())
    ]
    assert not unlike, f"not as this torch saved them: {unlike}"


def run(folder: Path, how: str, loop: Callable[[Path], tuple[Any, Any, Any, Any]]) -> None:
    source, rank = folder / "hub", dist.get_rank()
    model, report, optimizer, backward = loop(source)
    reference = dict(
        transformers.Qwen3MoeForCausalLM.from_pretrained(source, dtype=torch.bfloat16).named_parameters()
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        getattr(optimizer, "optimizer", optimizer), lambda step: 1 / (step + 1)
    )
    state = sw.TrainState(model=model, optimizer=optimizer, scheduler=schedule)

    def step(k: int) -> float:
        ids = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(100 * k + rank))
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return float(loss)

    kept = folder / f"{loop.__name__}-{rank}.json"
    with sw.Checkpointer(str(folder / f"run-{loop.__name__}"), keep_last=3) as checkpoints:
        if how == "train":
            full = {name: whole(p) for name, p in model.named_parameters()}
            assert full.keys() == reference.keys()
            unlike = [
                name
                for name, p in full.items()
                if not torch.equal(p.to(reference[name].dtype), reference[name])
            ]
            assert not unlike, f"not as from_pretrained loads them: {unlike}"
            assert sum(isinstance(p, DTensor) for p in model.parameters()) == len(reference)
            needed = report.local_bytes
            assert report.bytes_read <= 1.02 * needed, (
                f"read {report.bytes_read:,} bytes, {needed:,} are this rank's"
            )
            losses = [step(1), step(2)]
            checkpoints.save(state, 2)
            if loop is own:
                check_rank_files(folder / "ranks", source, model)
            losses += [step(3), step(4)]
            kept.write_text(json.dumps([losses[2:], digest(model, optimizer)]))
        else:
            resumed = checkpoints.resume(state)
            assert resumed is not None
            assert (resumed.step, resumed.exact) == (2, True), (resumed.step, resumed.differences)
            losses = [step(3), step(4)]
            assert [losses, digest(model, optimizer)] == json.loads(kept.read_text()), (
                "not the run without a stop"
            )
            exported = folder / f"export-{loop.__name__}"
            sw.export_hf(model, str(exported))
            full = {name: whole(p) for name, p in model.named_parameters()}
            dist.barrier()
            opened = transformers.Qwen3MoeForCausalLM.from_pretrained(exported, dtype=torch.bfloat16)
            assert all(torch.equal(full[name], p) for name, p in opened.named_parameters())


def main(folder: Path, how: str) -> None:
    if how == "make":
        make(folder / "hub")
        return
    dist.init_process_group("gloo")
    for loop in (own, accelerated):
        run(folder, how, loop)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2])
