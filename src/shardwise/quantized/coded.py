"""Makes one tensor of the parts that a source stores for it."""

from __future__ import annotations

from collections.abc import Mapping

from ..catalog.records import Chunk, Coded, Rule, StoredTensor
from ..layout.boxes import whole

__all__ = ["Coded", "Rule", "coded"]


def coded(
    name: str, dtype: str, shape: tuple[int, ...], parts: Mapping[str, StoredTensor], rule: Rule
) -> Coded:
    """The tensor called ``name``, as its parts stand for it. ``dtype``: that of what the rule decodes."""
    first = next(iter(parts.values())).chunks[0]
    path = f"{first.path}#{first.offset_bytes:016d}#{name}"
    return Coded(StoredTensor(name, dtype, shape, (Chunk(whole(shape), path, 0),)), dict(parts), rule)
