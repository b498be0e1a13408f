"""Files of ``torch.save``, one for each rank, that hold its shards: DTensors and ShardedTensors, put together as whole tensors.

verl, SkyRL and other RL engines write them (``model_world_size_4_rank_0.pt``), and Accelerate with ``use_dcp=False``. Each pickle says where its
shards belong. This reads these descriptions as plain records: no code of a pickle runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..dtypes import itemsize
from ..errors import FormatError, IntegrityError
from ..limits import brief, is_count, numel_of
from ..tensors.boxes import Box, LocalBox
from ..tensors.placements import Cut, Geometry, cut_boxes, local_shape
from .pickles import AnyNames, Name, Names, Record
from .quantized import open_file
from .records import Chunk, StoredFile, StoredTensor, assemble, rank_files_in, stem_of_ranks
from .torch_files import TENSOR_NAMES, Saved, Shard, read_one_file

_PIECE_BYTES = 1024 * 1024
_HINT = (
    "Either the files are of different steps or runs, or each rank saved its part of FSDP1's flat parameters, which only the same number of "
    "ranks can split: resume there, and save with SHARDED_STATE_DICT"
)
#: Pieces of one shard: of packed weights under tensor parallelism, or of two axes that cut one dim.
_MOST_BLOCKS = 4096


def read_rank_files(path: str, pick: Callable[[Any], Any]) -> tuple[Any, tuple[StoredFile, ...]]:
    """The content of the files of all ranks as one: as :func:`.read_torch_file`, with each tensor's chunks in these files.

    ``path``: the file of any rank. Rank-local; reads no payload, except of shards that several ranks hold if their checksums can't be
    compared. Raises as :func:`rank_files_in`; :class:`FormatError` if the ranks' files differ in what they must share,
    or if a tensor isn't whole; :class:`IntegrityError` if copies of one shard differ.
    """
    paths = rank_files_in(os.path.dirname(path) or ".", stem_of_ranks(path) or "")
    contents, files = [], []
    sums: dict[tuple[str, int], int] = {}
    for one in paths:
        content, file, archive = read_one_file(one, pick, RANK_NAMES)
        contents.append(content)
        files.append(file)
        sums |= {(one, at): crc for at, crc in archive.checksums.items()}
    return Merge(paths, sums, _HINT).merged(contents), tuple(files)


# ----------------------------------------------------------------------------------------------------
# One rank's shards


def _rebuilt(rebuild: Any, kind: Any, args: Any, state: Any, *_: Any) -> Any:
    """Stands for ``torch._tensor._rebuild_from_type_v2``, by which subclasses of tensors are pickled, and tensors with attributes."""
    name = _kind_of(kind)
    if _name_of(kind) == "torch.Tensor" and rebuild in _PLAIN and type(args) is tuple:
        return rebuild.make(*args)
    if name == "DTensor":
        held = _attributes(state)
        return _of_dtensor(held["_local_tensor"], _state(held["_spec"]))
    if name == "ShardedTensor":
        return _of_sharded_tensor(state)
    return Record("torch._tensor._rebuild_from_type_v2", rebuild, kind, args)


#: The functions that make plain tensors.
_PLAIN = [TENSOR_NAMES["torch._utils", f"_rebuild_tensor_v{version}"] for version in (2, 3)]
#: As :data:`.ANY_NAMES`, with shards for what ranks hold of a tensor.
RANK_NAMES: Names = AnyNames({**TENSOR_NAMES, ("torch._tensor", "_rebuild_from_type_v2"): Name(_rebuilt)})


def _name_of(name: Any) -> str:
    """The class that a record or a name of :class:`.AnyNames` stands for."""
    if isinstance(name, Name):
        name = next(iter(getattr(name.make, "args", ())), "")
    return str(name.kind if isinstance(name, Record) else name)


def _kind_of(name: Any) -> str:
    """The same without its module."""
    return _name_of(name).rpartition(".")[2]


def _attributes(state: Any) -> dict[str, Any]:
    """An object's attributes from its pickled state: a dict, or a pair of dicts for a class with ``__slots__``."""
    if type(state) is tuple and len(state) == 2:
        state = {**(state[0] or {}), **(state[1] or {})}
    if type(state) is not dict:
        raise ValueError("a shard without its attributes")
    return state


def _state(record: Any) -> dict[str, Any]:
    if type(record) is not Record:
        raise ValueError(f"a shard described by {brief(record)}")
    return _attributes(record.state)


def _shape(found: Any) -> tuple[int, ...]:
    if type(found) is not tuple:
        raise ValueError(f"a sharded tensor of shape {brief(found)}")
    numel_of(found, "a sharded tensor")
    return found


def _of_dtensor(local: Any, spec: dict[str, Any]) -> Saved:
    mesh, meta = _state(spec["mesh"]), spec["tensor_meta"]
    shape = _shape(meta.args[0] if type(meta) is Record else None)
    sizes, coordinate = _axis_sizes(mesh), tuple(mesh["_coordinate_on_dim"] or ())
    cuts = tuple(_cut(placement, shape) for placement in spec["placements"])
    if not len(sizes) == len(cuts) == len(coordinate) or not all(
        is_count(at) and at < n for at, n in zip(coordinate, sizes, strict=True)
    ):
        raise ValueError(
            f"a shard at {brief(coordinate)} of a mesh of {brief(sizes)}, with {len(cuts)} placements"
        )
    if math.prod(cut.split_factor for cut in cuts) > _MOST_BLOCKS:
        raise ValueError(f"a shard of more than {_MOST_BLOCKS} blocks")
    return _shard(local, shape, cut_boxes(shape, Geometry(sizes, ("",) * len(sizes), cuts, ()), coordinate))


def _axis_sizes(mesh: dict[str, Any]) -> tuple[int, ...]:
    """The shape of a DeviceMesh. Up to 2.9, torch pickles it as a tensor of ranks; since then, as a layout with one entry per axis."""
    ranks = mesh.get("mesh")
    if type(ranks) is Saved:
        return ranks.sizes
    found = _state(mesh["_layout"])
    axes: Any = found.get("shape", ())
    if "axes" in found:
        axes = tuple(_state(axis)["shape"] for axis in found["axes"])
    sizes = tuple(math.prod(n) if type(n) is tuple else n for n in (axes if type(axes) is tuple else (axes,)))
    if not sizes or not all(is_count(n) and n for n in sizes):
        raise ValueError(f"a mesh of shape {brief(axes)}")
    return sizes


def _cut(placement: Any, shape: Sequence[int]) -> Cut:
    kind = _kind_of(placement)
    if kind == "Replicate":
        return Cut("replicate")
    held = _state(placement)
    dim, factor = held["dim"], held.get("split_factor", 1)
    if kind not in ("Shard", "_StridedShard") or type(dim) is not int or not -len(shape) <= dim < len(shape):
        raise ValueError(f"a shard placed by {brief(kind)}")
    if not is_count(factor) or factor == 0:
        raise ValueError(f"a shard of {brief(factor)} blocks")
    return Cut("strided" if kind == "_StridedShard" else "shard", dim % len(shape), factor)


def _of_sharded_tensor(state: Any) -> Saved:
    shards, metadata, *_ = state
    shape = _shape(_state(metadata)["size"])
    if len(shards) != 1:
        raise ValueError(f"{len(shards)} shards of one tensor in one file")
    shard = _state(shards[0])
    place = _state(shard["metadata"])
    start, sizes = tuple(place["shard_offsets"]), tuple(place["shard_sizes"])
    if not len(start) == len(sizes) == len(shape) or not all(
        is_count(a) and is_count(n) and a + n <= most for a, n, most in zip(start, sizes, shape, strict=True)
    ):
        raise ValueError(f"a shard of {brief(sizes)} at {brief(start)} of a tensor of {brief(shape)}")
    box = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
    return _shard(shard["tensor"], shape, (LocalBox(box, (0,) * len(shape)),) if box.numel else ())


def _shard(local: Any, shape: tuple[int, ...], boxes: tuple[LocalBox, ...]) -> Saved:
    """Check that the local tensor has the shape of its boxes, and that each box is contiguous in it."""
    if type(local) is not Saved:
        raise ValueError("a shard that isn't a plain tensor")
    sizes = local_shape(shape, boxes)
    if sizes != local.sizes if sizes is not None else 0 not in local.sizes:
        raise ValueError(f"a shard of shape {brief(local.sizes)} where its mesh gives {brief(sizes or (0,))}")
    if len(boxes) > 1 and any(one.box.sizes[1:] != local.sizes[1:] for one in boxes):
        raise ValueError(
            "a shard whose pieces alternate: two axes cut the same dim, not the first one, unevenly"
        )
    ordered = sorted(boxes, key=lambda one: one.local_start)
    return replace(local, shard=Shard(shape, tuple(one.box for one in ordered)))


# ----------------------------------------------------------------------------------------------------
# What all ranks hold together


class Merge:
    """Puts the contents of all ranks' files together.

    ``sums``: checksums of tensors by path and offset, as far as they're known. ``hint``: why ranks may differ, for the error.
    """

    def __init__(self, paths: Sequence[str], sums: Mapping[tuple[str, int], int], hint: str) -> None:
        self._paths, self._sums, self._hint = paths, sums, hint

    def merged(self, values: Sequence[Any], path: tuple[Any, ...] = ()) -> Any:
        """The ``values`` of the ranks as one, at this ``path`` in their files. Raises as :func:`read_rank_files`."""
        first = values[0]
        for rank, value in enumerate(values):
            if type(value) is not type(first):
                raise self._differs(path, rank)
        if type(first) is StoredTensor:
            return self._tensor(values, path)
        if type(first) is dict:
            for rank, value in enumerate(values):
                if strange := first.keys() ^ value.keys():
                    raise self._differs((*path, next(iter(strange))), rank)
            return {key: self.merged([value[key] for value in values], (*path, key)) for key in first}
        if type(first) in (list, tuple):
            if rank := next((rank for rank, value in enumerate(values) if len(value) != len(first)), 0):
                raise self._differs(path, rank)
            return type(first)(
                self.merged(each, (*path, k)) for k, each in enumerate(zip(*values, strict=True))
            )
        # The caller refuses or ignores other objects.
        if rank := next(
            (r for r, v in enumerate(values) if type(v) is not Record and repr(v) != repr(first)), 0
        ):
            raise self._differs(path, rank)
        return first

    def _tensor(self, values: Sequence[StoredTensor], path: tuple[Any, ...]) -> StoredTensor:
        first = values[0]
        by_box: dict[Box, Chunk] = {}
        for rank, tensor in enumerate(values):
            if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
                raise self._differs(path, rank)
            for chunk in tensor.chunks:
                other = by_box.setdefault(chunk.box, chunk)
                if other is not chunk and not self._same(
                    other, chunk, chunk.box.numel * itemsize(tensor.dtype)
                ):
                    raise self._differs(path, rank)
        held, numel = sum(box.numel for box in by_box), math.prod(first.shape)
        if held < numel:
            raise FormatError(
                f"{brief(first.name)} is only partly there: the files of all ranks hold {held} of {numel} elements; one is a copy of another "
                f"rank's, or of another run",
                path=self._paths[0],
            )
        return assemble(first.name, first.dtype, by_box.values()) if by_box else first

    def _same(self, one: Chunk, other: Chunk, nbytes: int) -> bool:
        sums = [self._sums.get((chunk.path, chunk.offset_bytes)) for chunk in (one, other)]
        if None not in sums:
            return sums[0] == sums[1]
        return all(a == b for a, b in zip(_pieces(one, nbytes), _pieces(other, nbytes), strict=True))

    def _differs(self, path: tuple[Any, ...], rank: int) -> IntegrityError:
        what = ".".join(map(str, path)) or "its content"
        return IntegrityError(
            f"{brief(what)} isn't the same in {os.path.basename(self._paths[0])} and {os.path.basename(self._paths[rank])}, but both ranks must "
            f"hold the same. {self._hint}",
            path=self._paths[rank],
        )


def _pieces(chunk: Chunk, nbytes: int) -> Iterator[bytes]:
    with open_file(chunk.path) as file:
        for at in range(0, nbytes, _PIECE_BYTES):
            yield file.read(chunk.offset_bytes + at, min(_PIECE_BYTES, nbytes - at))
