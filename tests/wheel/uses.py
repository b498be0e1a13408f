"""What a user does who has the wheel and its required dependencies alone: load, train, save, resume, export.

    torchrun --nproc-per-node 2 uses.py DIRECTORY

tests/wheel/check.py runs it in an environment of its own. Nothing here imports from the source tree.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

import shardwise as sw

#: Extras, and what only developers have. If one is there, the environment proves nothing.
OPTIONAL = ("accelerate", "datasets", "matplotlib", "peft", "pytest", "scipy", "torchdata", "trl")


def write_model(directory: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def new_state(model_directory: Path, mesh: DeviceMesh) -> sw.TrainState:
    model, report = sw.load_pretrained(model_directory, mesh, return_report=True)
    assert report.tensors > 0
    return sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(state: sw.TrainState, step: int) -> float:
    rows = torch.Generator().manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(0, 101, (2, 8), generator=rows)
    loss = state.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return float(loss.detach())


def main(place: Path) -> None:
    there = [name for name in OPTIONAL if find_spec(name)]
    assert not there, f"no optional package may be installed here: {there}"
    assert Path(sys.prefix) in Path(sw.__file__).parents, f"{sw.__file__} is not the installed wheel"
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if dist.get_rank() == 0:
        write_model(place / "model")
    dist.barrier()

    first = new_state(place / "model", mesh)
    with sw.Checkpointer(place / "steps") as checkpoints:
        assert checkpoints.resume(first) is None
        train(first, 1)
        checkpoints.save(first, 1)
    expected = train(first, 2)

    second = new_state(place / "model", mesh)
    with sw.Checkpointer(place / "steps") as checkpoints:
        resumed = checkpoints.resume(second)
    assert resumed is not None
    assert resumed.exact, resumed
    assert train(second, 2) == expected, "the step after the resume"

    sw.export_hf(second.model, place / "export")
    with sw.meta_init():
        model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(place / "export"))
    sw.shard(model, mesh)
    sw.load(model, place / "export")
    assert sw.digest(model) == sw.digest(second.model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
