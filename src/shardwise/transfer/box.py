"""Makes one box of a tensor from stored tensors, in host memory. Streams from files to files go box by box."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..catalog.records import StoredTensor
from ..dtypes import torch_dtype
from ..errors import PlanError
from ..layout.boxes import Box, LocalBox
from ..layout.wanted import Wanted, contiguous_strides
from ..planning.build import transfers_of
from ..recipe.match import Recipe
from ..recipe.tiles import Tile
from .converted import Reader
from .copy import Destination, Staging, execute

__all__ = ["read_box", "read_recipe", "wanted_box"]


def wanted_box(name: str, dtype: str, shape: tuple[int, ...], box: Box) -> Wanted:
    """A box of a tensor as a wanted tensor of its own, contiguous."""
    held = (LocalBox(box, (0,) * len(box.start)),)
    return Wanted(name, dtype, shape, held, box.sizes, contiguous_strides(box.sizes))


def read_box(
    wanted: Wanted,
    tiles: Iterable[Tile],
    stored: Mapping[str, StoredTensor],
    reader: Reader,
    staging: Staging,
    room: Staging | None = None,
) -> torch.Tensor:
    """The elements of :func:`wanted_box`, made by ``tiles`` from stored tensors. Memory: the box, and staging.

    ``room``: memory for the box, reused for the next one. A fresh allocation for each box left 70 MiB in the
    allocator.
    """
    dtype = torch_dtype(wanted.dtype)
    if room is None:
        piece = torch.empty(wanted.local_shape, dtype=dtype)
    else:
        piece = room.take(wanted.local_nbytes).view(dtype).view(wanted.local_shape)
    transfers = [t for tile in tiles for t in transfers_of(tile, wanted, stored)]
    execute(transfers, reader, Destination({wanted.name: piece}), staging)
    return piece


def read_recipe(
    wanted: Wanted,
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
    reader: Reader,
    staging: Staging,
    room: Staging | None = None,
) -> torch.Tensor:
    """:func:`read_box` by a recipe. Raises :class:`PlanError` if a second stored copy of a tied tensor differs."""
    found = read_box(wanted, recipe.tiles, stored, reader, staging, room)
    for tiles in recipe.copies:
        if not torch.equal(_bits(found), _bits(read_box(wanted, tiles, stored, reader, staging))):
            raise PlanError(
                f"{wanted.name}: a second stored copy of it differs from the first, and the model ties the two; remove "
                f"one copy"
            )
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
