"""What the ranks run in the tests of expert counts: ``python -m tests.planning._expert_counts_fns RANKS WORK DIRECTORY…``.

Ranks are forked from one process that has imported everything: sixteen that import torch and transformers themselves
would take a minute of a small machine, and gigabytes.
"""

from __future__ import annotations

import copy
import math
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from benchmarks.sweeping.children import in_children
from tests.harness.models import fill_with_noise, hub_model
from tests.harness.process import warnings_as_in_pytest
from tests.loading._load_fns import assert_same_shards, assert_same_whole, bits, local, ordinary_model, whole

EXPERTS = 8
#: Of one checkpoint on all ranks; the ranks are killed after it.
TIMEOUT_S = 150.0


def write_checkpoint(kind: str, directory: Path) -> None:
    """A tiny model of this kind with eight experts, as the library saves it: each expert's weights by themselves."""
    name, config = hub_model(kind)
    setattr(config, "num_local_experts" if kind == "mixtral" else "num_experts", EXPERTS)
    torch.manual_seed(11)
    model = getattr(transformers, name)._from_config(config, dtype=torch.float32)
    fill_with_noise(model)
    model.save_pretrained(directory)


def load_train_save_restore(directory: str, out: str) -> dict[str, Any]:
    """All of it on the ranks of the default group; what is wrong raises."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ordinary = ordinary_model(directory)
    model, report = sw.load_pretrained(directory, mesh, return_report=True)
    assert_same_whole(model, ordinary)
    assert_same_shards(model, sw.shard(copy.deepcopy(ordinary), mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = sw.TrainState(model=model, optimizer=optimizer)
    before = sw.digest(model)
    loss = train_one_step(model, optimizer, ordinary)
    trained = sw.digest(model)
    assert all(trained[n] != before[n] for n in trained), "a step that changes nothing"
    with sw.Checkpointer(out) as checkpoints:
        checkpoints.save(state, 1)
    assert sw.verify(f"{out}/step-00000001").ok
    restore_into_fresh(directory, out, mesh, model, optimizer)
    experts = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    return {
        "loss": loss,
        "digest": trained,
        "bytes_read": report.bytes_read,
        "model_bytes": report.model_bytes,
        "experts": local(experts).shape[0],
    }


def train_one_step(model: Any, optimizer: torch.optim.Optimizer, ordinary: Any) -> float:
    """Every rank has the same batch, so that gradients are those of one process; these are compared."""
    ids = torch.arange(24).reshape(2, 12) * 7 % 90 + 3
    losses = []
    for each in (model, ordinary):
        each.train()
        loss = each(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
    assert math.isfinite(losses[0])
    torch.testing.assert_close(*losses)
    expected = dict(ordinary.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        torch.testing.assert_close(whole(parameter.grad), expected[name].grad, msg=name)
    optimizer.step()
    return float(losses[0])


def restore_into_fresh(
    directory: str, out: str, mesh: DeviceMesh, model: Any, optimizer: torch.optim.Optimizer
) -> None:
    """Another model and optimizer get the values and the state of the trained ones."""
    fresh = sw.load_pretrained(directory, mesh)
    state = sw.TrainState(model=fresh, optimizer=torch.optim.AdamW(fresh.parameters(), lr=1.0))
    assert sw.digest(fresh) != sw.digest(model)
    with sw.Checkpointer(out) as checkpoints:
        resumed = checkpoints.resume(state)
    assert resumed is not None
    assert (resumed.step, resumed.exact) == (1, True), resumed
    assert sw.digest(fresh) == sw.digest(model)
    assert state.optimizer.param_groups[0]["lr"] == 1e-2
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        restored, kept = state.optimizer.state[ours], optimizer.state[theirs]
        assert restored.keys() == kept.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name, value in kept.items():
            assert torch.equal(bits(local(restored[name])), bits(local(value))), name


def main(world_size: int, work: Path, directories: list[str]) -> int:
    """One group for each directory after the other; every rank's output where one fails."""
    for directory in directories:
        part = work / f"{Path(directory).name}-{world_size}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        def run(rank: int, directory: str = directory, part: Path = part, port: int = port) -> Any:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group("gloo", rank=rank, world_size=world_size)
            with warnings_as_in_pytest():
                return load_train_save_restore(directory, str(part / "run"))

        results = in_children(world_size, part, TIMEOUT_S, run)
        if any(isinstance(result, str) for result in results):
            for rank, result in enumerate(results):
                print(f"---- {directory} on {world_size} ranks, rank {rank}: {result}")
                print((part / f"log-{rank}").read_text(errors="replace"))
            return 1
        torch.save(results, part / "results.pt")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Imported before the ranks are forked, not by each of them.
    _ = (transformers.MixtralForCausalLM, transformers.Qwen3MoeForCausalLM)
    try:
        sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
    except Exception:
        traceback.print_exc()
        sys.exit(2)
