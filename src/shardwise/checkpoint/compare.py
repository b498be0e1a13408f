"""Finds the documents and plain tensors that differ between the ranks of a save.

Ranks compare hashes on their way to rank 0, so that no rank receives those of all ranks. One hash covers all plain tensors; only if it
differs, a second round compares each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ..digests.replicas import refuse_other_tensors
from ..ranks.ranks import Ranks
from .snapshot import Snapshot, document_hash, layout_hash

__all__ = ["LAYOUT", "PLAIN", "comparable", "differing_in", "differing_tensors", "merged"]

#: Names under which ranks compare the layout of tensors, and all plain tensors, beside the documents.
LAYOUT = "layout"
PLAIN = "plain tensors"
#: The value in place of a hash where ranks differ.
_DIFFERS = ""
#: An error tells of at most so many different models.
_TOLD = 3


def comparable(snapshot: Snapshot, plain: Mapping[str, int], ranks: Ranks) -> dict[str, Any]:
    """This rank's hashes by name, and its tensors in words. ``plain``: sums of plain tensors."""
    if ranks.world_size == 1:
        return {"hashes": {}, "held": {}}
    hashes = {name: document_hash(encoded) for name, encoded in snapshot.documents.items()}
    hashes[LAYOUT] = layout_hash(snapshot)
    hashes[PLAIN] = xxhash.xxh3_128_hexdigest(json.dumps(plain).encode())
    return {"hashes": hashes, "held": {_held(snapshot): ranks.rank}}


def merged(told: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Merges the :func:`comparable` of several ranks: the hash that all of them have, or a mark that they differ; for each text the
    first rank that has it. None if a rank has none."""
    every = [one for one in told if one is not None]
    return _merged(every) if len(every) == len(told) else None


def _merged(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = {name for one in told for name in one["hashes"]}
    hashes = {}
    for name in names:
        found = {one["hashes"].get(name, _DIFFERS) for one in told}
        hashes[name] = found.pop() if len(found) == 1 else _DIFFERS
    held: dict[str, int] = {}
    for one in told:
        for text, rank in one["held"].items():
            held[text] = min(rank, held.get(text, rank))
    first = sorted(held.items(), key=lambda h: h[1])[:_TOLD]
    return {"hashes": hashes, "held": dict(first)}


def differing_in(told: Mapping[str, Any] | None) -> list[Any] | None:
    """The names whose hashes differ between ranks; then the tensors of some ranks in words, in the order of ranks."""
    if told is None:
        return None
    return [sorted(n for n, value in told["hashes"].items() if value == _DIFFERS), told["held"]]


def differing_tensors(plain: Mapping[str, int], ranks: Ranks) -> set[str]:
    """The plain tensors that differ between ranks; 16 bytes for each travel. Collective."""
    names = list(plain)

    def ends() -> Any:
        sums = np.array(list(plain.values()), dtype=np.uint64)
        return np.concatenate([sums, ~sums])

    def largest(parts: Sequence[Any]) -> Any:
        refuse_other_tensors(parts)
        return np.max(parts, axis=0)

    def unequal(found: Any) -> list[str]:  # the largest sum of any rank is not the least
        high, low = found[: len(names)], ~found[len(names) :]
        return [names[k] for k in np.flatnonzero(high != low).tolist()]

    return set(ranks.reduce("compare plain tensors", ends, largest, unequal))


def _held(snapshot: Snapshot) -> str:
    """The tensors of this rank's models, in words; equal only for equal names."""
    names = [v.stored.name for part in snapshot.models for v in part.live]
    ends = f"from {names[0]} to {names[-1]}" if names else "none"
    return f"{len(names)} tensors {ends} ({xxhash.xxh3_64_hexdigest(json.dumps(names).encode())[:6]})"
