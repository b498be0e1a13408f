"""What ranks do in test_loops.py: the examples' own functions, held against the library's model."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

import shardwise as sw
from examples import fabric_loop, titan_loop
from shardwise.catalog.open import open_catalog

IDS = torch.arange(32).reshape(2, 16) % 90 + 3


def titan(*runs: tuple[str, ...]) -> list[dict[int, Any]]:
    """The example from end to end, several times one after the other."""
    return [titan_loop.main(list(arguments)) for arguments in runs]


def titan_model(base: str) -> dict[str, Any]:
    """Under FSDP 2 × TP 2: every parameter is cut over both axes, and the logits are the library's."""
    path = Path(base)
    if dist.get_rank() == 0:
        titan_loop.write_base(path)
    dist.barrier()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with sw.meta_init():
        model = titan_loop.Transformer(json.loads((path / "config.json").read_text()))
    titan_loop.parallelize(model, mesh)
    report = sw.load(model, path, names=titan_loop.own_name)
    for name, parameter in model.named_parameters():  # before a forward, after which the root's stay gathered
        assert isinstance(parameter, DTensor), name
        assert parameter.device_mesh.mesh_dim_names == ("dp", "tp"), name
    plain = LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), plain(IDS).logits, rtol=1e-5, atol=1e-6)
    return {"names": [n for n, _ in model.named_parameters()], "tensors": report.tensors}


def trained_loss(export: str) -> float:
    """What the library's own model says of a sequence, from an exported directory."""
    model = LlamaForCausalLM.from_pretrained(export)
    tokens = torch.stack(titan_loop.SAMPLES[:12])
    with torch.no_grad():
        return float(titan_loop.loss_of(lambda ids: model(ids).logits, tokens))  # type: ignore[arg-type]


@contextlib.contextmanager
def as_under_torchrun() -> Iterator[None]:
    """What torchrun sets for a rank, and what Fabric looks at."""
    before = dict(os.environ)
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def fabric(*runs: tuple[str, ...]) -> list[dict[int, float]]:
    """The example from end to end, several times one after the other."""
    with as_under_torchrun():
        return [fabric_loop.main(list(arguments)) for arguments in runs]


def stored_tensors(checkpoint: str) -> list[str]:
    """Names of a checkpoint's tensors: without any wrapper's parts."""
    return list(open_catalog(checkpoint).tensors)
