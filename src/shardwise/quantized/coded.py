"""A tensor that a source stores as codes: seen by a plan as the tensor that the codes stand for.

A source with quantised tensors stores each as several: codes, scales, maybe zero points, an index of groups, a code book. One
:class:`Coded` stands for all of them. A plan sees :attr:`Coded.tensor`, an ordinary stored tensor in a file that does not exist, so
every recipe, mesh and strategy takes it as any other; a read of it reads boxes of its parts, and decodes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..catalog.records import Chunk, StoredTensor
from ..layout.boxes import Box, whole

if TYPE_CHECKING:
    import torch

__all__ = ["Coded", "Rule", "coded"]


class Rule(Protocol):
    """How elements of one tensor are made from its parts. Pure, and the same for every element, however boxes are cut."""

    @property
    def format(self) -> str:
        """In words, for reports: "FP8 (E4M3) in blocks of 128 x 128"."""

    def boxes(self, box: Box) -> Mapping[str, Box]:
        """The box of each part (by its role) that a box of the tensor is made from."""

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The elements of ``box``, with its sizes, in the dtype of :attr:`Coded.tensor`.

        ``parts``: the elements of :meth:`boxes`, each of its box's sizes and of its stored dtype. They may be overwritten by the
        next read. Memory: a few times the elements. Raises :class:`IntegrityError` for scales that are NaN or infinite.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A tensor that is stored in parts: made by :func:`coded`."""

    tensor: StoredTensor
    """The tensor that the parts stand for, as if it were stored: its one chunk names :attr:`path`."""
    parts: Mapping[str, StoredTensor]
    """The stored tensors by their roles: ``codes``, ``scales``, ``zeros``, …"""
    rule: Rule

    @property
    def path(self) -> str:
        """A file that does not exist, which orders like the file and place of the codes."""
        return self.tensor.chunks[0].path

    @property
    def stored_bytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.nbytes for part in self.parts.values())


def coded(
    name: str, dtype: str, shape: tuple[int, ...], parts: Mapping[str, StoredTensor], rule: Rule
) -> Coded:
    """The tensor called ``name``, as its parts stand for it. ``dtype``: that of what the rule decodes."""
    first = next(iter(parts.values())).chunks[0]
    path = f"{first.path}#{first.offset_bytes:016d}#{name}"
    return Coded(StoredTensor(name, dtype, shape, (Chunk(whole(shape), path, 0),)), dict(parts), rule)
