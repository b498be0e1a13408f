"""Scales of blocks: which ones a box needs, and spread over its elements."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from ..errors import IntegrityError
from ..layout.boxes import Box
from .codes import floats

if TYPE_CHECKING:
    import torch

_SLAB_ELEMENTS = 512 * 1024

__all__ = ["blocks_of", "factors", "finite", "in_step", "groups_within", "slabs", "spread", "widened"]


def blocks_of(box: Box, block: tuple[int, ...]) -> Box:
    """The box of the scales, one for each block of ``block`` elements, that the elements of a box need."""
    start = tuple(a // n for a, n in zip(box.start, block, strict=True))
    stop = tuple(-(-b // n) for b, n in zip(box.stop, block, strict=True))
    return Box(start, stop)


def spread(scales: torch.Tensor, box: Box, block: tuple[int, ...]) -> torch.Tensor:
    """The scale of each element of ``box``, from those of :func:`blocks_of`; in dims of one scale, one for all elements."""
    for dim, (start, stop, n) in enumerate(zip(box.start, box.stop, block, strict=True)):
        if n > 1 and scales.shape[dim] > 1:
            first = start % n
            scales = scales.repeat_interleave(n, dim).narrow(dim, first, stop - start)
    return scales


def in_step(
    values: torch.Tensor, scales: torch.Tensor, box: Box, block: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of a box and the scales of :func:`blocks_of`, as views that broadcast. Scales are copied as little as possible."""
    n = block[-1] if block else 1
    if n > 1 and scales.shape[-1] > 1 and box.start[-1] % n == 0 and box.stop[-1] % n == 0:
        columns = spread(scales, box, (*block[:-1], 1))
        return values.unflatten(-1, (-1, n)), columns.unsqueeze(-1)
    return values, spread(scales, box, block)


def slabs(box: Box) -> Iterator[Box]:
    """The box in pieces along its first dim, whose numbers in fp32 stay in a core's own cache from one operation to the next."""
    rows = max(1, _SLAB_ELEMENTS * box.sizes[0] // max(1, box.numel))
    for start in range(box.start[0], box.stop[0], rows):
        stop = min(start + rows, box.stop[0])
        yield Box((start, *box.start[1:]), (stop, *box.stop[1:]))


def widened(scales: torch.Tensor) -> torch.Tensor:
    """The scales in fp32; those of a byte are exponents of two (UE8M0)."""
    import torch

    return floats(scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales)


def finite(name: str, scales: torch.Tensor) -> torch.Tensor:
    """:func:`widened` scales. Raises :class:`IntegrityError` if one is NaN or infinite."""
    found = widened(scales)
    if not _all_finite(found):
        raise IntegrityError(f"{name}: a scale is NaN or infinite")
    return found


def groups_within(name: str, groups: torch.Tensor, count: int) -> torch.Tensor:
    """The group of each input. Raises :class:`IntegrityError` if one is not from 0 to ``count - 1``."""
    if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < count:
        raise IntegrityError(
            f"{name}: expected groups from 0 to {count - 1} in g_idx, found {int(groups.min())} to {int(groups.max())}"
        )
    return groups


def factors(name: str, scales: torch.Tensor, lift: int) -> tuple[torch.Tensor, float]:
    """:func:`finite` scales times ``2 ** lift``, which values lack, and 1; or the scales and ``2 ** lift``, if one would overflow."""
    found = widened(scales)
    if lift:
        high = found * 2.0**lift
        if _all_finite(high):
            return high, 1.0
    return finite(name, found), 2.0**lift


def _all_finite(numbers: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite. Their sum would be, too, and takes a fraction of the time; it may also overflow."""
    return isfinite(numbers.sum().item()) or bool(numbers.isfinite().all())
