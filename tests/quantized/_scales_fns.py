"""On ranks: loads of sources of which one scale is NaN, into models that must stay as they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import IntegrityError, RankError
from tests.quantized._layout_fns import _rows, build_meta_of

__all__ = ["bytes_read", "messages"]


def _sharded(directory: str) -> Any:
    model = build_meta_of(directory, "bfloat16")
    if dist.get_world_size() > 1:
        _rows(model)
    return model


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def messages(directories: Sequence[str], strategy: str) -> list[str]:
    """What each load raises on this rank. No element of the model may be written."""
    found = []
    for directory in directories:
        model = _sharded(directory)
        model.to_empty(device="cpu")
        if dist.get_world_size() == 1:
            model.tie_weights()  # to_empty unties plain parameters
        with torch.no_grad():
            for parameter in model.parameters():
                _local(parameter).fill_(0.5)
        try:
            sw.load(model, directory, io=sw.IOOptions(strategy=strategy))  # type: ignore[arg-type]
        except (IntegrityError, RankError) as error:  # of this rank, or of another
            found.append(str(error))
        else:
            found.append("")
        written = [n for n, p in model.named_parameters() if not torch.all(_local(p) == 0.5)]
        assert not written, (directory, written[:3])
    return found


def bytes_read(directories: Sequence[str], strategy: str) -> list[int]:
    """Bytes that this rank reads of each directory."""
    io = sw.IOOptions(strategy=strategy)  # type: ignore[arg-type]
    return [sw.load(_sharded(directory), directory, io=io).bytes_read for directory in directories]
