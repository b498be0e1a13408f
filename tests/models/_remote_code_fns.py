"""What the ranks run in the tests of models that bring their own Python code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.loading.pretrained import build_meta
from tests.harness.remote_model import build_class
from tests.loading._load_fns import (
    assert_same_shards,
    assert_same_whole,
    frozen_state,
    mesh_of,
    nothing_else_changes,
    whole,
)

IDS = torch.arange(12).reshape(2, 6) % 90 + 3


def ordinary(directory: str) -> Any:
    """What ``from_pretrained`` gives; of buffers that only ``__init__`` computes, what construction gives.

    transformers builds on meta and leaves uninitialized memory in those. Call it after a load of ours: that
    puts the code into transformers' cache without a race between the ranks.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    if model.config.model_type == "quirky":
        model.core.steps = build_class(directory).core.steps
    return model


def step(model: nn.Module) -> torch.Tensor:
    """One step of training; the loss before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def distinct(model: nn.Module) -> list[torch.Tensor]:
    return list({id(t): t for t in model.state_dict(keep_vars=True).values()}.values())


def equals_the_ordinary_load(directory: str) -> int:
    """load_pretrained, load on a model of the caller's own, and without a mesh. How many conversions were used."""
    from transformers import Qwen3MoeForCausalLM  # noqa: F401 - importing transformers adds warning filters

    mesh = mesh_of((dist.get_world_size(),))
    with nothing_else_changes():
        model, report = sw.load_pretrained(directory, mesh, trust_remote_code=True, return_report=True)
    expected = ordinary(directory)
    assert_same_whole(model, expected)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert report.initialized == ()
    assert report.tensors == len(distinct(expected))
    assert report.model_bytes == sum(t.nbytes for t in distinct(expected))
    assert_same_shards(live_load(directory), model)
    conversions = len(model._weight_conversions)
    assert conversions == len(expected._weight_conversions)
    torch.testing.assert_close(step(model), step(expected))
    trained = dict(model.named_parameters())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(whole(trained[name]), parameter, msg=lambda m, n=name: f"{n}: {m}")
    alone = sw.load_pretrained(directory, trust_remote_code=True)
    assert_same_whole(alone, ordinary(directory))
    if model.config.model_type == "quirky":
        for found in (model, alone):
            assert found.lm_head is found.core.embed
            assert found.core.blocks[3] is found.core.blocks[0]
        assert type(alone.core.blocks[0].scale).__name__ == "Scale"
    return conversions


def live_load(directory: str) -> nn.Module:
    """A model that the caller built from the class and sharded."""
    with sw.meta_init():
        model: nn.Module = build_class(directory)
    sw.shard(model, mesh_of((dist.get_world_size(),)))
    before = frozen_state(model)
    sw.load(model, directory)
    assert frozen_state(model) == before
    return model


def saves_resumes_exports(directory: str, root: str) -> tuple[list[str], list[str]]:
    """Train, save, resume into another model, export both. The files that the exports consist of."""
    mesh = mesh_of((dist.get_world_size(),))
    model = sw.load_pretrained(directory, mesh, trust_remote_code=True)
    step(model)
    saved = f"{root}/run/step-00000001"
    with sw.Checkpointer(f"{root}/run") as checkpoints:
        checkpoints.save(sw.TrainState(model=model), 1)
    again = sw.load_pretrained(directory, mesh, trust_remote_code=True)
    with sw.Checkpointer(f"{root}/run") as checkpoints:
        resumed = checkpoints.resume(sw.TrainState(model=again))
    assert resumed is not None
    assert_same_shards(again, model)
    stored = sw.load_pretrained(saved, mesh, trust_remote_code=True)
    assert_same_shards(stored, model)
    sw.export_hf(model, f"{root}/live")
    refused = outcome(lambda: sw.export_hf(saved, f"{root}/refused"))
    assert "trust_remote_code=True" in refused, refused
    sw.export_hf(saved, f"{root}/stored", trust_remote_code=True)
    for name in ("live", "stored"):
        loaded = sw.load_pretrained(f"{root}/{name}", mesh, trust_remote_code=True)
        assert_same_shards(loaded, model)
        assert_same_whole(model, ordinary(f"{root}/{name}"))
    return sorted(os.listdir(f"{root}/live")), sorted(os.listdir(f"{root}/stored"))


def values_of_missing(directory: str) -> dict[str, torch.Tensor]:
    """What the class's own ``_init_weights`` gives parameters that are not stored."""
    mesh = mesh_of((dist.get_world_size(),))
    new = ("core.blocks.1.up.*", "core.embed.weight")
    model, report = sw.load_pretrained(
        directory, mesh, trust_remote_code=True, allow_missing=new, seed=5, return_report=True
    )
    named = dict(model.named_parameters())
    return {d.name: whole(named[d.name]).detach() for d in report.initialized}


def outcome(work: Callable[[], object]) -> str:
    """Type and text of the error that ``work`` raises."""
    try:
        work()
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def untrusted(directory: str) -> list[str]:
    """The error without the flag. The terminal would answer yes to every prompt."""
    from transformers import AutoModelForCausalLM

    mesh = mesh_of((dist.get_world_size(),))
    terminal, sys.stdin = sys.stdin, io.StringIO("y\n" * 9)
    try:
        found = [
            outcome(lambda: sw.load_pretrained(directory, mesh)),
            outcome(lambda: sw.load_pretrained(directory, mesh, auto_class=AutoModelForCausalLM)),
            outcome(lambda: build_meta(directory)),
        ]
        assert sys.stdin.tell() == 0, "the terminal was asked"
    finally:
        sys.stdin = terminal
    return found


def classes_of_auto_classes(directory: str) -> dict[str, str]:
    """The class that an Auto class stands for, where the library and the directory both have one."""
    from transformers import AutoModelForCausalLM

    return {
        name: type(build_meta(directory, auto_class=AutoModelForCausalLM, trust_remote_code=trust)).__name__
        for name, trust in (("trusted", True), ("not trusted", False))
    }


def load_with_caches(directory: str, caches: list[str]) -> str:
    """Load in a fresh process with the cache of modules that is this rank's."""
    os.environ["HF_MODULES_CACHE"] = caches[dist.get_rank()]
    model = sw.load_pretrained(directory, trust_remote_code=True)
    return str(sys.modules[type(model).__module__].__file__)


def load_own(directories: list[str]) -> str:
    """The error of a load from this rank's own directory."""
    return outcome(lambda: sw.load_pretrained(directories[dist.get_rank()], trust_remote_code=True))
