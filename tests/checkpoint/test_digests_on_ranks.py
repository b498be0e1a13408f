"""Digests of a restore on two ranks: whatever differs or fails, on whichever rank, every rank raises it in the same round."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
import shardwise.digests as live_module
from shardwise.digests import partial_sums
from shardwise.errors import IntegrityError, RankError, ShardwiseError
from tests.harness.on_ranks import on_ranks

STRATEGIES = ("own", "node", "once")


def _model(last: torch.dtype = torch.bfloat16) -> nn.Module:
    first = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    model = nn.Sequential(first, nn.Linear(16, 16, bias=False, dtype=last))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


def _state(*, is_trained: bool = False) -> sw.TrainState:
    torch.manual_seed(7)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    if is_trained:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return sw.TrainState(model=model, optimizer=optimizer)


def _restore(step: Path, strategy: Any = "own") -> None:
    sw.restore(_state(), str(step), io=sw.IOOptions(strategy=strategy))


def _error(kind: type[ShardwiseError], work: Callable[[], object]) -> str:
    """What ``work`` raises here; the other ranks raise the same text."""
    with pytest.raises(kind) as found:
        work()
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(found.value))
    assert len(set(texts)) == 1, texts
    return str(found.value)


@contextmanager
def _on_rank_1(owner: object, name: str, replaces: Callable[..., Any]) -> Iterator[None]:
    if dist.get_rank() != 1:
        yield
        return
    with mock.patch.object(owner, name, replaces):
        yield


@on_ranks(2)
def test_every_rank_raises_what_differs_or_fails_on_one(tmp_path: Path) -> None:
    step = tmp_path / "step"
    sw.save(_state(is_trained=True), str(step))
    _restore(step)

    for part in ("model", "optimizer"):
        damaged = tmp_path / part
        if dist.get_rank() == 0:
            shutil.copytree(step, damaged)
            file = sorted(damaged.glob(f"{part}/*.safetensors"))[-1]
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        dist.barrier()
        for strategy in STRATEGIES:
            error = _error(IntegrityError, lambda d=damaged, s=strategy: _restore(d, s))  # type: ignore[misc]
            assert "what was saved" in error, error

    def fails(boxes: Any) -> list[int]:
        raise MemoryError("no room for a sum")

    def is_off(boxes: Any) -> list[int]:
        first, *others = partial_sums(boxes)
        return [(first + 1) % 2**64, *others]

    for strategy in STRATEGIES:
        with _on_rank_1(live_module, "partial_sums", fails):
            error = _error(RankError, lambda s=strategy: _restore(step, s))  # type: ignore[misc]
        assert "rank 1: MemoryError: no room for a sum" in error, error
    with _on_rank_1(live_module, "partial_sums", is_off):
        assert "0.weight" in _error(IntegrityError, lambda: _restore(step))
    calls = 0

    def is_off_in_pack(boxes: Any) -> list[int]:
        nonlocal calls
        calls += 1
        *others, last = partial_sums(boxes)
        return [*others, last if calls == 1 else (last + 1) % 2**64]  # the first call is for the model

    with _on_rank_1(live_module, "partial_sums", is_off_in_pack):
        error = _error(IntegrityError, lambda: _restore(step))
    assert "replicas of __packed__.step.F32 differ between ranks" in error, error
    calls = 0
    with mock.patch.object(live_module, "partial_sums", is_off_in_pack):
        error = _error(IntegrityError, lambda: _restore(step))
    assert "content differs from what was saved: __packed__.step.F32: loaded" in error, error
    _restore(step)


@on_ranks(2)
def test_ranks_that_see_other_checkpoints_hear_so_before_anything_is_read(tmp_path: Path) -> None:
    """Each rank has its own directory, with the same names and bytes; the digests tell them apart."""
    for name in "ab":
        torch.manual_seed(ord(name))
        sw.save(sw.TrainState(model=_model()), str(tmp_path / name))
    model = _model()
    before = sw.digest(model)
    own = tmp_path / "ab"[dist.get_rank()]
    error = _error(RankError, lambda: sw.load(model, str(own)))
    assert "rank 1: differs from rank 0" in error, error
    assert sw.digest(model) == before
