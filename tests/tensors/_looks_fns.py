"""What test_looks.py runs: each entry point once, counted, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from tests.harness.looks import looks
from tests.harness.models import Mixed, hub_model

#: By entry point: what was counted of it.
Counts = dict[str, dict[str, Any]]


def on_meta() -> Any:
    """A model of the tests' smallest kind, sharded if there are ranks."""
    import transformers

    name, config = hub_model("qwen3-tied")
    with sw.meta_init():
        model = getattr(transformers, name)(config)
    if dist.is_initialized():
        sw.shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def state_of(model: Any) -> sw.TrainState:
    return sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def every_entry_point(hub: str, root: str) -> Counts:
    """Each call of the public surface on one model, in the order of a run."""
    place = Path(root) / str(dist.get_world_size() if dist.is_initialized() else 1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    found: Counts = {}

    def count(name: str, call: Callable[[], Any]) -> None:
        with looks() as seen:
            call()
        found[name] = seen.as_json()

    count("load_pretrained", lambda: sw.load_pretrained(hub, mesh))
    first, second, third = on_meta(), on_meta(), on_meta()
    count("load", lambda: sw.load(first, hub))
    state, other = state_of(first), state_of(second)
    for parameter in first.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizers["optimizer"].step()
    count("save", lambda: sw.save(state, place / "step"))
    count("restore", lambda: sw.restore(other, place / "step"))
    count("restore again", lambda: sw.restore(other, place / "step"))
    count("load of a checkpoint", lambda: sw.load(third, place / "step"))
    count("digest", lambda: sw.digest(first))
    count("initialize", lambda: sw.init_weights(third, seed=1))
    count("iter_full_tensors", lambda: list(sw.iter_full_tensors(first)))
    count("export_hf", lambda: sw.export_hf(first, place / "export"))
    count("clone", lambda: sw.clone(first))
    with sw.Checkpointer(place / "run") as checkpoints:
        count("Checkpointer.save", lambda: checkpoints.save(state, 1))
        count("Checkpointer.resume", lambda: checkpoints.resume(other))
    count("convert", lambda: sw.convert(place / "step", place / "converted"))
    assert sw.digest(first) == sw.digest(second)
    return found


def several_models(root: str) -> Counts:
    """Two models in one state: each is looked at by itself."""
    place = Path(root) / f"several-{dist.get_world_size() if dist.is_initialized() else 1}"
    states = [
        sw.TrainState(
            model={"actor": (actor := Mixed()), "critic": (critic := Mixed())},
            optimizer={
                "actor": torch.optim.AdamW(actor.parameters(), lr=1e-3),
                "critic": torch.optim.SGD(critic.parameters(), lr=1e-3),
            },
        )
        for _ in range(2)
    ]
    found: Counts = {}
    for name, call in (
        ("save", lambda: sw.save(states[0], place)),
        ("restore", lambda: sw.restore(states[1], place)),
    ):
        with looks() as seen:
            call()
        found[name] = seen.as_json()
    return found
