"""The transfers of a plan, in the order of the files.

From a checkpoint of 1,024 ranks a rank reads a few slices of each of 60,000 tensors, and nearly every tensor is cut
like thousands more. Their transfers differ only in names and offset: columns hold them, and execution makes them one
by one. Tensors stored in other ways have single transfers from the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ..catalog.records import Chunks, StoredTensor
from ..dtypes import itemsize
from ..layout.wanted import Wanted
from ..recipe.tiles import Tile, is_identity
from .cuts import common_part, transfers_of
from .records import StridedLoop, Transfer

__all__ = ["Collector", "Transfers"]


class Transfers(Sequence[Transfer]):
    """Transfers by path and offset. Each differs from the example of its kind in ``kinds`` only in names and offset.

    ``kind``, ``offset_bytes`` and ``names`` (an index into the list of names) are columns.
    """

    def __init__(
        self,
        kinds: Sequence[Transfer],
        names: Sequence[tuple[str, str]],
        kind: NDArray[np.int64],
        name: NDArray[np.int64],
        offset_bytes: NDArray[np.int64],
    ) -> None:
        paths = sorted({t.path for t in kinds})
        place = {path: k for k, path in enumerate(paths)}
        path = np.array([place[t.path] for t in kinds], np.int64)[kind]
        order = np.lexsort((offset_bytes, path))
        self.kinds, self._names = kinds, names
        self._kind, self._name, self._offset = kind[order], name[order], offset_bytes[order]

    def __len__(self) -> int:
        return len(self._kind)

    @overload
    def __getitem__(self, index: int) -> Transfer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Transfer, ...]: ...
    def __getitem__(self, index: int | slice) -> Transfer | tuple[Transfer, ...]:
        if isinstance(index, slice):
            return tuple([self[k] for k in range(*index.indices(len(self)))])
        return self._make(int(self._kind[index]), int(self._name[index]), int(self._offset[index]))

    def __iter__(self) -> Iterator[Transfer]:
        return map(self._make, self._kind.tolist(), self._name.tolist(), self._offset.tolist())

    def counts(self) -> list[int]:
        """The number of transfers of each kind."""
        found: list[int] = np.bincount(self._kind, minlength=len(self.kinds)).tolist()
        return found

    def _make(self, kind: int, name: int, offset_bytes: int) -> Transfer:
        like, (wanted, stored) = self.kinds[kind], self._names[name]
        return Transfer(
            wanted,
            stored,
            like.path,
            offset_bytes,
            like.source_dtype,
            like.target_dtype,
            like.target_offset,
            like.loops,
        )


@dataclass(slots=True)
class _Alike:
    """Tensors wanted in the same boxes and stored in chunks that are cut alike."""

    first: Wanted
    source: StoredTensor
    chunks: Chunks
    names: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


#: A transfer without names: its offset in the chunk, its offset in the local tensor, its loops.
_Cut = tuple[int, int, tuple[StridedLoop, ...]]


class Collector:
    """Collects this rank's transfers of tiles."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self._single: list[Transfer] = []
        self._alike: dict[tuple[object, ...], _Alike] = {}
        self._names: list[tuple[str, str]] = []
        self._cuts: dict[tuple[object, ...], tuple[list[_Cut], object]] = {}

    def add(self, tile: Tile, wanted: Wanted) -> None:
        """Add the part of a tile that lies on this rank."""
        source = self._stored[tile.source]
        chunks = source.chunks
        if not (
            isinstance(chunks, Chunks) and source.shape == wanted.shape and is_identity(tile, wanted.shape)
        ):
            self._single += self._cut(tile, wanted, source)
            return
        # By identity: tensors that are spread alike share one object for equal boxes and strides, and hashing those
        # would take longer than the rest of this function. The group keeps them alive.
        key = (id(chunks.cut), id(wanted.boxes), id(wanted.local_strides), wanted.dtype)
        group = self._alike.get(key)
        if group is None:
            group = self._alike[key] = _Alike(wanted, source, chunks)
        group.names.append(len(self._names))
        group.positions.append(chunks.position)
        self._names.append((wanted.name, source.name))

    def _cut(self, tile: Tile, wanted: Wanted, source: StoredTensor) -> Iterable[Transfer]:
        """The transfers of one tile. Tiles that are cut alike, as those of all layers are, are cut once."""
        if len(source.chunks) != 1:
            return transfers_of(tile, wanted, self._stored)
        (chunk,) = source.chunks
        # By identity, as above: these objects are shared, and hashing them would take longer than cutting the tile.
        key = (
            *(id(tile.loops), id(tile.source_start), id(tile.target_start), id(source.shape), id(chunk.box)),
            *(id(wanted.boxes), id(wanted.local_strides), source.dtype, wanted.dtype, wanted.shape),
        )
        found = self._cuts.get(key)
        if found is None:
            transfers = list(transfers_of(tile, wanted, self._stored))
            parts = [(t.offset_bytes - chunk.offset_bytes, t.target_offset, t.loops) for t in transfers]
            self._cuts[key] = (
                parts,
                (tile, source, chunk, wanted),
            )  # which keeps the objects, and so their ids
            return transfers
        name, stored, path, start = wanted.name, source.name, chunk.path, chunk.offset_bytes
        dtypes = source.dtype, wanted.dtype
        return [
            Transfer(name, stored, path, start + begin, *dtypes, target, loops)
            for begin, target, loops in found[0]
        ]

    def in_order(self) -> tuple[Sequence[Transfer], Sequence[Transfer]]:
        """All transfers by path and offset, and one of each kind."""
        if not self._alike:
            self._single.sort(key=lambda t: (t.path, t.offset_bytes))
            return tuple(self._single), self._single
        kinds: list[Transfer] = []
        columns: list[tuple[int, list[int], NDArray[np.int64]]] = []
        for group in self._alike.values():
            for like, offsets in _kinds_of(group):
                columns.append((len(kinds), group.names, offsets))
                kinds.append(like)
        for transfer in self._single:
            columns.append((len(kinds), [len(self._names)], np.array([transfer.offset_bytes])))
            kinds.append(transfer)
            self._names.append((transfer.wanted, transfer.stored))
        if not columns:
            return (), ()
        transfers = Transfers(
            kinds,
            self._names,
            np.repeat([kind for kind, _, _ in columns], [len(names) for _, names, _ in columns]),
            np.concatenate([np.array(names, np.int64) for _, names, _ in columns]),
            np.concatenate([offsets for _, _, offsets in columns]),
        )
        return transfers, kinds


def _kinds_of(group: _Alike) -> Iterator[tuple[Transfer, NDArray[np.int64]]]:
    """The transfers of a group's first tensor, each with its offsets for all tensors of the group."""
    first, source = group.first, group.source
    size = itemsize(source.dtype)
    for local in first.boxes:
        for shared in group.chunks.cut.touching(local.box):
            copy = common_part(local, shared.box, first.local_strides)
            if copy is not None:
                begin, target, loops = copy
                offsets = shared.offsets_bytes[group.positions] + begin * size
                yield (
                    Transfer(
                        wanted=first.name,
                        stored=source.name,
                        path=shared.path,
                        offset_bytes=int(offsets[0]),
                        source_dtype=source.dtype,
                        target_dtype=first.dtype,
                        target_offset=target,
                        loops=loops,
                    ),
                    offsets,
                )
