"""The proof that reads cover a model, what they cast, and a source cut into buckets that ranks share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, product, zip_longest
from typing import Protocol

from ..catalog.records import Catalog, Chunk, StoredTensor
from ..dtypes import is_lossless, itemsize
from ..errors import PlanError
from ..objects import frozen
from ..tensors.boxes import Box, Layout, Wanted, whole
from ..tensors.tiles import Tile, bounds, is_identity, is_injective, tiles_overlap
from .match import Matched, Recipe

# ----------------------------------------------------------------------------------------------------
# Cuts a source into buckets, so that ranks can share what one of them reads.
#
# A bucket is a few ranges of bytes of the files. Seen through :attr:`Buckets.tensors`, each stored tensor consists of chunks that
# lie in buckets: an ordinary plan of any rank then says what the rank takes from which bucket. Pure; the same on every rank.

#: Ranges begin in a bucket where they begin in the file, modulo this: elements keep their alignment.
_ALIGNMENT = 64
#: A bucket of which less than this part is free takes no part of a tensor that goes on in the next. Where each bucket is a request,
#: full ones cost less than the transfers of small parts; and no row is larger than that part, so that buckets can be filled.
_NEARLY_FULL, _NEARLY_FULL_REQUEST = 8, 64
#: What buckets of one file hold at least, of 32 parts: one in 64 is left free, and another for a row that does not fit.
_FILLED = 32 - 1

#: Bytes of a file at a path, from a first to one past the last.
Span = tuple[str, int, int]


@frozen
class Range:
    """``nbytes`` bytes at ``offset_bytes`` of a file, and their place in the bucket."""

    path: str
    offset_bytes: int
    nbytes: int
    at: int


@dataclass(slots=True)
class Bucket:
    """Ranges that one rank reads at a time; ``nbytes`` counts the gaps between them, too."""

    nbytes: int = 0
    ranges: list[Range] = field(default_factory=list)

    @property
    def bytes_to_read(self) -> int:
        return sum(r.nbytes for r in self.ranges)


@frozen
class Buckets:
    """A source in buckets. A chunk of ``tensors`` has the :func:`name <path_of>` of its bucket for a path."""

    tensors: Mapping[str, StoredTensor]
    buckets: Sequence[Bucket]

    @staticmethod
    def path_of(index: int) -> str:
        """Names in the order of the buckets, so that a plan, which goes by path, takes them in that order."""
        return f"bucket {index:012d}"

    @staticmethod
    def index_of(path: str) -> int:
        return int(path.removeprefix("bucket "))


@frozen
class _Piece:
    """A part of a chunk: a box of the tensor whose elements lie one after the other."""

    path: str
    offset_bytes: int
    nbytes: int
    name: str
    box: Box


def cut_into_buckets(
    stored: Mapping[str, StoredTensor],
    names: Collection[str],
    most_bytes: int,
    *,
    piece_bytes: int | None = None,
    wanted: Sequence[Span] | None = None,
    of_one_file: bool = False,
) -> Buckets:
    """The tensors called ``names`` in buckets of at most ``most_bytes``, in the order of the files.

    ``wanted``: leave out pieces that touch none of these spans, which are sorted and apart. ``piece_bytes`` bounds a
    piece; less bounds what is read beside ``wanted``, more makes fewer transfers. Default: a bucket. ``of_one_file``: no bucket has
    parts of two files, each of which would be another request to a store; and the buckets of a file are alike in size, as short
    ones would be requests of a few bytes.
    """
    most = min(piece_bytes or most_bytes, most_bytes) - _ALIGNMENT
    chunks = [
        (chunk.path, chunk.offset_bytes, name, chunk) for name in names for chunk in stored[name].chunks
    ]
    chunks.sort(key=lambda c: c[:3])
    found: dict[str, list[Chunk]] = {name: [] for name in names}
    buckets: list[Bucket] = []
    spans = _Spans(wanted)
    nbytes = Counter[str]()
    for path, _, name, chunk in chunks:
        nbytes[path] += chunk.box.numel * itemsize(stored[name].dtype)
    for path, offset_bytes, name, chunk in chunks:
        size = itemsize(stored[name].dtype)
        last = partial(_last, buckets, path if of_one_file else None)
        limit = _alike(nbytes[path], most) if of_one_file else most
        least = limit // (_NEARLY_FULL_REQUEST if of_one_file else _NEARLY_FULL)
        room = partial(_room, last, limit, size, least)
        row = max(1, (least if of_one_file else limit) // size)
        for box, skipped, numel in _pieces(chunk.box, max(1, limit // size), row, room):
            piece = _Piece(path, offset_bytes + skipped * size, numel * size, name, box)
            if spans.touch(piece):
                at = _put(buckets, last(), piece, most_bytes)
                found[name].append(Chunk(box, Buckets.path_of(len(buckets) - 1), at))
    return Buckets(
        {name: replace(stored[name], chunks=tuple(parts)) for name, parts in found.items()}, buckets
    )


def one_reader_each(found: Buckets, readers: int, paths: Collection[str]) -> Buckets:
    """The same buckets in another order: ``readers`` ranks read them in turns, and one rank reads all buckets of each of ``paths``.

    No bucket may have parts of two paths. Each rank gets about as many bytes; a rank with fewer buckets gets empty ones for its turns.
    """
    queues: list[list[int]] = [[] for _ in range(readers)]
    nbytes = [0] * readers
    for _, group in groupby(range(len(found.buckets)), partial(_owned_by, found.buckets, paths)):
        indices = [*group]
        least = min(range(readers), key=nbytes.__getitem__)
        queues[least] += indices
        nbytes[least] += sum(found.buckets[index].bytes_to_read for index in indices)
    order = [index for turn in zip_longest(*queues) for index in turn]
    places = {
        Buckets.path_of(index): Buckets.path_of(at) for at, index in enumerate(order) if index is not None
    }
    tensors = {
        name: replace(t, chunks=tuple(replace(c, path=places[c.path]) for c in t.chunks))
        for name, t in found.tensors.items()
    }
    return Buckets(tensors, [Bucket() if index is None else found.buckets[index] for index in order])


def _owned_by(buckets: Sequence[Bucket], paths: Collection[str], index: int) -> str | int:
    path = buckets[index].ranges[0].path
    return path if path in paths else index


def _alike(nbytes: int, most: int) -> int:
    """The most bytes of a bucket, so that buckets for ``nbytes`` are as few as with ``most``, and alike in size."""
    if nbytes <= most:
        return most
    filled = -(-nbytes * (_FILLED + 1) // _FILLED)
    return min(most, -(-filled // max(1, -(-filled // most))))


def _last(buckets: Sequence[Bucket], path: str | None) -> Bucket | None:
    """The bucket that the next piece may go into, if it has room; with ``path`` only one of this file."""
    if not buckets or (path is not None and buckets[-1].ranges[-1].path != path):
        return None
    return buckets[-1]


def _room(last: Callable[[], Bucket | None], limit: int, size: int, least: int) -> int:
    """Elements that a piece may have to fill the last bucket, or the next one if that is nearly full."""
    bucket = last()
    left = 0 if bucket is None else limit - bucket.nbytes
    return (left if left >= least else limit) // size


def _pieces(box: Box, most: int, most_of_row: int, room: Callable[[], int]) -> Iterator[tuple[Box, int, int]]:
    """Cut a row-major box into boxes that are contiguous in it, in order.

    Each consists of rows of at most ``most_of_row`` elements. It has at most ``most`` elements, and at most ``room()`` if one row
    is that small. Yields it with the number of elements before it, and with its own. Nothing for a box without elements.
    """
    sizes = box.sizes
    if not box.numel:
        return
    dim = next((d for d in range(len(sizes)) if math.prod(sizes[d + 1 :]) <= most_of_row), len(sizes))
    if dim == len(sizes):  # a scalar
        yield box, 0, 1
        return
    row = math.prod(sizes[dim + 1 :])
    before = 0
    for lead in product(*(range(a, b) for a, b in zip(box.start[:dim], box.stop[:dim], strict=True))):
        first = box.start[dim]
        while first < box.stop[dim]:
            last = min(first + max(1, min(room(), most) // row), box.stop[dim])
            start = (*lead, first, *box.start[dim + 1 :])
            stop = (*(i + 1 for i in lead), last, *box.stop[dim + 1 :])
            yield Box(start, stop), before, (last - first) * row
            before += (last - first) * row
            first = last


def _put(buckets: list[Bucket], bucket: Bucket | None, piece: _Piece, most_bytes: int) -> int:
    """Put a piece into ``bucket``, the last one, or into a new one if that is full or None; returns its place there."""
    if bucket is not None:
        last = bucket.ranges[-1]
        if last.path == piece.path and last.offset_bytes <= piece.offset_bytes:
            inside = piece.offset_bytes - last.offset_bytes
            end = inside + piece.nbytes
            if (
                inside <= last.nbytes and last.at + end <= most_bytes
            ):  # goes on where the last ends, or lies in it
                bucket.ranges[-1] = replace(last, nbytes=max(last.nbytes, end))
                bucket.nbytes = max(bucket.nbytes, last.at + end)
                return last.at + inside
        at = bucket.nbytes + (piece.offset_bytes - bucket.nbytes) % _ALIGNMENT
        if at + piece.nbytes <= most_bytes:
            bucket.ranges.append(Range(piece.path, piece.offset_bytes, piece.nbytes, at))
            bucket.nbytes = at + piece.nbytes
            return at
    at = piece.offset_bytes % _ALIGNMENT
    buckets.append(Bucket(at + piece.nbytes, [Range(piece.path, piece.offset_bytes, piece.nbytes, at)]))
    return at


class _Spans:
    """Looks for pieces, which come in the order of the files, in sorted spans that are apart."""

    def __init__(self, spans: Sequence[Span] | None) -> None:
        self._spans = spans
        self._next = 0

    def touch(self, piece: _Piece) -> bool:
        if self._spans is None:
            return True
        while self._next < len(self._spans):
            path, _, stop = self._spans[self._next]
            if (path, stop) > (piece.path, piece.offset_bytes):
                break
            self._next += 1
        else:
            return False
        path, start, _ = self._spans[self._next]
        return path == piece.path and start < piece.offset_bytes + piece.nbytes


# ----------------------------------------------------------------------------------------------------
# Casts of a load that round values: none happens without a line in the report.

_SOME = 20


@frozen
class Cast:
    """Tensors whose stored values the new dtype can't hold exactly."""

    source: str
    """Stored code of the dtype before: "F32"."""
    target: str
    tensors: int
    names: tuple[str, ...]
    """The first 20 of them."""
    kept_in_fp32: int = 0
    """Number of those that the model's class keeps in fp32 (``_keep_in_fp32_modules``): ``from_pretrained`` does not cast them, and a
    load fills the dtype that the model has. Give these parameters fp32 before the load."""

    def __str__(self) -> str:
        return f"{self.tensors} tensors from {self.source} to {self.target} ({self._some_names})"

    def in_words(self) -> str:
        """A line of a restore's report."""
        return f"{self.source} when saved, {self.target} now: {self._some_names}"

    @property
    def _some_names(self) -> str:
        more = f" and {self.tensors - 3} more" if self.tensors > 3 else ""
        return ", ".join(self.names[:3]) + more


def rounded_in(
    stored: Mapping[str, StoredTensor], wanted: Sequence[Wanted], recipes: Mapping[str, Recipe]
) -> dict[tuple[str, str], tuple[str, ...]]:
    """The wanted tensors whose values a load can't hold exactly, by dtype before and after. The same on every rank. Pure."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for w in wanted:
        recipe = recipes.get(w.name)
        for source in {tile.source for tile in recipe.tiles} if recipe is not None else ():
            before = stored[source].dtype
            if before != w.dtype and not is_lossless(before, w.dtype):
                found.setdefault((before, w.dtype), {})[w.name] = None
    return {dtypes: tuple(names) for dtypes, names in found.items()}


class _HasDtype(Protocol):
    @property
    def dtype(self) -> str: ...


def rounded_between(
    before: Mapping[str, _HasDtype], after: Mapping[str, _HasDtype]
) -> dict[tuple[str, str], list[str]]:
    """The same of tensors that keep their names."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, one in after.items():
        if name in before and not is_lossless(before[name].dtype, one.dtype):
            found.setdefault((before[name].dtype, one.dtype), []).append(name)
    return found


def casts_of(
    rounded: Mapping[tuple[str, str], Iterable[str]], is_kept: Callable[[str], bool] = lambda _: False
) -> tuple[Cast, ...]:
    """The records for a report, those of most tensors first. ``is_kept``: whether the model's class keeps a tensor in fp32."""
    found = []
    for (before, after), names in rounded.items():
        all_ = tuple(names)
        kept = [name for name in all_ if is_kept(name)]
        shown = tuple(dict.fromkeys([*kept, *all_]))[:_SOME]
        found.append(Cast(before, after, len(all_), shown, len(kept)))
    return tuple(sorted(found, key=lambda one: -one.tensors))


# ----------------------------------------------------------------------------------------------------
# Proof of cover: every wanted element is written exactly once, every stored tensor is used or declared.
#
# Whole tensors are checked, not a rank's boxes. Cutting a tile by boxes neither adds nor drops elements, so the proof
# holds on every rank, and every rank finds the same problems without talking to another.


def prove_cover(catalog: Catalog, layout: Layout, matched: Matched) -> None:
    """Raise :class:`PlanError` listing every problem, unless recipes cover the wanted tensors exactly once."""
    problems = list(matched.problems)
    proved: dict[tuple[object, ...], object] = {}
    for wanted in layout.wanted:
        recipe = matched.recipes.get(wanted.name)
        if (grown := matched.grown.get(wanted.name)) is not None:  # its rule makes the rest
            wanted = replace(wanted, shape=grown.stored)
        for tiles in () if recipe is None else (recipe.tiles, *recipe.copies):
            # By identity: layers that are made alike share these objects, and hashing them would take longer than the proof.
            shapes = [catalog.tensors[tile.source].shape for tile in tiles]
            parts = [(id(t.loops), id(t.source_start), id(t.target_start)) for t in tiles]
            key = (wanted.shape, *parts, *map(id, shapes))
            if key not in proved:
                if found := cover_problems(wanted, tiles, catalog):
                    problems += found
                else:
                    proved[key] = tiles, shapes  # which keeps the objects, and so their ids
    if problems:
        names = (wanted.name for wanted in layout.wanted)
        adapted = any(".base_layer." in problem for problem in problems)
        because = adapters_of_one(catalog.tensors, names) if adapted else ""
        raise PlanError(
            f"{catalog.root} can't fill this model completely: {len(problems)} problems{because}",
            tuple(problems),
        )


def adapters_of_one(stored: Iterable[str], model: Iterable[str]) -> str:
    """Text to append to an error if either the stored tensors or the model's have adapters, but not both; otherwise empty.

    PEFT 0.18-0.21 puts what it adapts below ``base_layer``.
    """
    has = [any(".base_layer." in name for name in names) for names in (stored, model)]
    if has == [False, True]:
        return ". The model has adapters, and the checkpoint has none: restore into a model without adapters, or load the weights first and then add the adapters"
    if has == [True, False]:
        return ". The checkpoint has adapters, and the model has none: load the model with adapter= first"
    return ""


def cover_problems(wanted: Wanted, tiles: tuple[Tile, ...], catalog: Catalog) -> list[str]:
    """Problems that keep tiles from covering a wanted tensor exactly once, reading only existing elements."""
    whole_shape = catalog.tensors[tiles[0].source].shape if len(tiles) == 1 else None
    if whole_shape == wanted.shape and is_identity(tiles[0], wanted.shape):
        return []  # stored as it is wanted
    problems: list[str] = []
    reaches: list[tuple[Box, Tile]] = []
    target, held = whole(wanted.shape), 0
    for tile in tiles:
        if numel := tile.numel:
            held += numel
            reaches.append((bounds(tile, "target"), tile))
            source = whole(catalog.tensors[tile.source].shape)
            problems += [
                f"not covered: {wanted.name!r}: a tile reaches outside the {side} {tile.source!r}"
                for side, shape, reach in (
                    ("target", target, reaches[-1][0]),
                    ("source", source, bounds(tile, "source")),
                )
                if not shape.contains(reach)
            ]
        if not is_injective(tile, "target"):
            problems.append(
                f"overlapping: {wanted.name!r}: a tile of {tile.source!r} writes an element twice"
            )
    expected = math.prod(wanted.shape)
    if held != expected:
        problems.append(f"not covered: {wanted.name!r} has {expected} elements, its tiles write {held}")
    pair = _overlap(reaches)
    if pair:
        problems.append(
            f"overlapping: {wanted.name!r}: {pair[0].source!r} and {pair[1].source!r} write one element"
        )
    return problems


def _overlap(reaches: list[tuple[Box, Tile]]) -> tuple[Tile, Tile] | None:
    """Two tiles that write a common element, found by a sweep along target dim 0. Each with its bounds, none empty."""
    if len(reaches) < 2:
        return None
    if not reaches[0][1].target_start:
        return reaches[0][1], reaches[1][1]
    open_tiles: list[tuple[int, Tile]] = []
    for box, tile in sorted(reaches, key=lambda pair: pair[0]):
        open_tiles = [(stop, t) for stop, t in open_tiles if stop > box.start[0]]
        for _, other in open_tiles:
            if tiles_overlap(other, tile, "target"):
                return other, tile
        open_tiles.append((box.stop[0], tile))
    return None
