"""What others store and is no tensor, or a tensor of few elements: read as plain values, and as nothing else."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch

from .catalog import StoredTensor
from .catalog.dcp import ByteRange, DcpCheckpoint
from .dtypes import torch_dtype
from .errors import FormatError, SourceError
from .read import FileReader

__all__ = ["Objects", "nested", "plain_tensor", "plain_values", "step_in"]


class Objects:
    """Reads pickled items of DCP files. Equal bytes are one value: each parameter repeats its group's settings."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}
        self._reader = FileReader()

    def __enter__(self) -> Objects:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def value(self, where: ByteRange) -> Any:
        content = bytearray(where.nbytes)
        self._reader.read_into(where.path, where.offset_bytes, memoryview(content))
        key = bytes(content)
        if key not in self._known:
            self._known[key] = plain_values(key, where.path)
        return self._known[key]


def plain_values(content: bytes, path: str) -> Any:
    """Plain values and tensors from what ``torch.save`` wrote; nothing else is built."""
    try:
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # a pickle can fail in any way
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(
            f"holds more than plain values, which are all that is read: {first}", path=path
        ) from error


def plain_tensor(stored: StoredTensor) -> torch.Tensor:
    """A (small) stored tensor, read whole."""
    found = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
    view = memoryview(found.reshape(-1).view(torch.uint8).numpy().data)
    with FileReader() as reader:
        for chunk in stored.chunks:
            if chunk.box.sizes != stored.shape:
                raise FormatError(f"{stored.name!r} is small and was spread over ranks", path=chunk.path)
            reader.read_into(chunk.path, chunk.offset_bytes, view)
    return found


def step_in(found: DcpCheckpoint) -> int:
    """``step`` of a state dict, or of torchtitan's ``train_state``: a number, or a tensor of one element."""
    for name in ("step", "train_state.step"):
        if name in found.objects:
            with Objects() as read:
                value = read.value(found.objects[name])
        elif name in found.catalog.tensors and found.catalog.tensors[name].shape in ((), (1,)):
            value = plain_tensor(found.catalog.tensors[name])
        else:
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = int(value.item())
        if isinstance(value, int):
            return value
    return 0


def nested(found: DcpCheckpoint, keys: Sequence[str]) -> dict[Any, Any]:
    """An entry of the state dict that was saved, put together from its items; empty if there is none."""
    root: dict[Any, Any] = {}
    with Objects() as read:
        for name in (*found.objects, *found.catalog.tensors):
            path = found.paths.get(name, (name,))
            if len(path) < 2 or path[0] not in keys:
                continue
            node = root
            for part in path[1:-1]:
                node = node.setdefault(part, {})
            where = found.objects.get(name)
            node[path[-1]] = read.value(where) if where else plain_tensor(found.catalog.tensors[name])
    return {k: _with_lists(v) for k, v in root.items()}


def _with_lists(value: Any) -> Any:
    """Numbers stand for places in a list; keys of mappings are text."""
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(k, int) for k in value):
        return [_with_lists(value[k]) for k in sorted(value)]
    return {k: _with_lists(v) for k, v in value.items()}
