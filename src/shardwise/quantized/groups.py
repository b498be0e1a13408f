"""Consecutive elements of rows that share a scale, and a zero point: blocks of bitsandbytes, groups of GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["pieces", "scaled"]


def pieces(values: torch.Tensor, start: int, size: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """The columns of a matrix by groups, the first of which is column ``start``: views [rows, groups, columns of each].

    The groups that are whole come as one view; one at an end that is cut comes as its own. With each, the groups that it is of,
    from the first that the columns touch. So groups are never spread over elements, which costs more than all arithmetic.
    """
    stop, first = start + values.shape[-1], start // size
    whole = min(stop, -(-start // size) * size)
    tail = max(whole, stop // size * size)
    for begin, end in ((start, whole), (whole, tail), (tail, stop)):
        if begin < end:
            groups = slice(begin // size - first, -(-end // size) - first)
            view = values.narrow(-1, begin - start, end - begin)
            yield view.unflatten(-1, (groups.stop - groups.start, -1)), groups


def scaled(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, start: int, size: int) -> None:
    """``(codes − zeros) × scales`` in place, of columns from ``start`` on, in groups of ``size``.

    All in one dtype that holds differences of codes exactly: F32, or F16.
    """
    for view, groups in pieces(codes, start, size):
        view.sub_(zeros[:, groups].unsqueeze(-1)).mul_(scales[:, groups].unsqueeze(-1))
