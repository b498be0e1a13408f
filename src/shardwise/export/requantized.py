"""Tensors that changed, quantized again: the ranks bring windows of whole blocks together, and each encodes some of them.

A window is brought to its rank by an integer sum of the ranks' elements, as :mod:`.full` brings whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ..catalog.records import Chunk, Coded, StoredTensor
from ..dtypes import itemsize, torch_dtype
from ..errors import StateError
from ..layout.boxes import Box, whole
from ..layout.spec import TensorSpec
from ..layout.wanted import contiguous_strides
from ..objects import frozen
from ..planning.build import transfers_of
from ..planning.records import Transfer
from ..quantized.encoders import Encoder, NestedFourBitEncoder
from ..ranks.hosts import device_where_ranks_sum
from ..ranks.ranks import Ranks
from ..recipe.tiles import cut, identity
from ..transfer.box import read_box, wanted_box
from ..transfer.converted import Reader
from ..transfer.copy import Destination, Filler, Staging, write_back
from .files import HubFiles
from .job import Together, Window
from .live_windows import Brought, Near

__all__ = ["Changed", "Requantizer", "windows_in"]

#: Bytes of a window in the model's dtype, unless one unit of the format is larger. Encoding takes a few times as much.
_WINDOW_BYTES = 8 * 1024**2
_LABEL = "quantize for the export"


@frozen
class Changed:
    """A tensor that is quantized again."""

    one: Coded
    encoder: Encoder
    spec: TensorSpec
    """Its dtype and shape in the model."""

    def windows(self) -> Iterator[Box]:
        """The tensor in windows of whole units, in order."""
        most = max(1, _WINDOW_BYTES // itemsize(self.spec.dtype))
        yield from windows_in(self.spec.shape, self.encoder.unit, most)


def windows_in(shape: tuple[int, ...], unit: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes of whole units that cover a tensor, each of at most ``most`` elements or of one unit. Outer dims are cut first."""
    yield from _cut((), (), shape, unit, most)


def _cut(
    start: tuple[int, ...], stop: tuple[int, ...], shape: tuple[int, ...], unit: tuple[int, ...], most: int
) -> Iterator[Box]:
    at = len(start)
    if at == len(shape):
        yield Box(start, stop)
        return
    inner = 1
    for n in shape[at + 1 :]:
        inner *= n
    for a, b in zip(start, stop, strict=True):
        inner *= b - a
    step = max(1, most // max(1, inner * unit[at])) * unit[at]
    for begin in range(0, shape[at], step):
        end = min(begin + step, shape[at])
        yield from _cut((*start, begin), (*stop, end), shape, unit, most)


class Requantizer:
    """Brings windows together and encodes them. Memory: a window, and what encoding takes."""

    def __init__(
        self,
        changed: Mapping[str, Changed],
        brought: Brought,
        near: Near,
        files: Reader,
        staging: Staging,
        ranks: Ranks,
    ) -> None:
        self._changed, self._brought, self._near = changed, brought, near
        self._files, self._staging, self._ranks = files, staging, ranks
        self._measured: dict[str, tuple[torch.Tensor, ...]] = {}

    def measure(self) -> dict[str, float]:
        """Find what some formats need of a whole tensor: extremes, the mean of its scales. Returns the means by name.

        Every rank must call it. For means, rank 0 holds all scales of one tensor before they are quantized.
        """
        self._find_extremes()
        means: dict[str, float] = {}
        for name, changed in self._changed.items():
            if isinstance(changed.encoder, NestedFourBitEncoder):
                mean = self._mean(name, changed, changed.encoder)
                self._measured[name] = (torch.tensor(mean, dtype=torch.float32),)
                means[name] = mean
        return means

    def _mean(self, name: str, changed: Changed, encoder: NestedFourBitEncoder) -> float:
        found: list[torch.Tensor] = []
        for box in changed.windows():
            values = self._gather(name, box, 0)
            with self._ranks.agree(_LABEL):
                if values is not None:
                    _refuse_endless(name, bool(values.isfinite().all()))
                    found.append(encoder.scales(values))
        return self._ranks.on_first(_LABEL, lambda: float(torch.cat(found).mean()))

    def _find_extremes(self) -> None:
        def own() -> dict[str, list[float]]:
            return {n: found for n, c in self._changed.items() if c.encoder.once and (found := self._ends(n))}

        def all_of(ends: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
            found: dict[str, list[float]] = {}
            for some in ends:
                for name, (low, high) in some.items():
                    before = found.get(name, [low, high])
                    found[name] = [min(low, before[0]), max(high, before[1])]
            return found

        for name, (low, high) in self._ranks.reduce(_LABEL, own, all_of, lambda ends: ends).items():
            dtype = torch_dtype(self._changed[name].spec.dtype)
            self._measured[name] = torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype)

    def _ends(self, name: str) -> list[float]:
        """The least and largest of this rank's elements of a tensor."""
        found: list[float] = []
        for elements in self._elements(name):
            low, high = (float(end) for end in torch.aminmax(elements))
            _refuse_endless(name, low - low + high - high == 0)
            found = [min([low, *found]), max([high, *found])]
        return found

    def _elements(self, name: str) -> Iterator[torch.Tensor]:
        for box in self._changed[name].windows():
            for _, elements in self._parts(name, box):
                yield elements

    def _parts(self, name: str, box: Box) -> Iterator[tuple[Transfer, torch.Tensor]]:
        """This rank's elements of a window: views of them, for now, and where they lie in it."""
        code, shape = self._changed[name].spec
        window = StoredTensor(name, code, shape, (Chunk(box, name, 0),))
        for wanted, tile in self._brought.get(name, ()):
            for part in cut(tile, "source", box):
                for held, elements in self._near(wanted, part):
                    for transfer in transfers_of(part, held, {name: window}):
                        yield transfer, elements.strided(transfer)

    def all_windows(self, output: HubFiles) -> Iterator[Together]:
        """Every window of every tensor, in turns of one for each rank; with each turn, what writes this rank's window.

        Every rank must go through it. Nothing fails on one rank alone but what it yields, which is rank-local.
        """
        windows = [(name, box) for name, changed in self._changed.items() for box in changed.windows()]
        size = self._ranks.world_size
        for begin in range(0, len(windows), size):
            own: tuple[str, Box, torch.Tensor] | None = None
            for rank, (name, box) in enumerate(windows[begin : begin + size]):
                values = self._gather(name, box, rank)
                if values is not None:
                    own = name, box, values
            yield _writer(self, own, output)

    def into(self, window: Window, owner: int, filler: Filler, output: HubFiles) -> None:
        """Write what a window of a file has of these tensors, on the rank ``owner``. Every rank must call it."""
        inside = {stored for stored, _ in window.parts}
        for name, changed in self._changed.items():
            roles = [r for r in changed.encoder.makes if changed.one.parts[r].name in inside]
            for box in changed.windows() if roles else ():
                if not any(self._reaches(name, role, box, window, output) for role in roles):
                    continue
                values = self._gather(name, box, owner)
                with self._ranks.agree(_LABEL):
                    if values is not None:
                        self.write(name, box, values, _Within(window, filler), output)

    def _reaches(self, name: str, role: str, box: Box, window: Window, output: HubFiles) -> bool:
        """Whether a window of a tensor has bytes of one of its parts in a window of a file. Sure if not."""
        changed = self._changed[name]
        part, held = changed.one.parts[role], changed.one.rule.boxes(box)[role]
        if not held.numel:
            return False
        first, last = (_place(index, part.shape) for index in (held.start, [n - 1 for n in held.stop]))
        size, begin = itemsize(part.dtype), output.tensors[part.name].chunks[0].offset_bytes
        return begin + first * size < window.stop and window.start < begin + (last + 1) * size

    def _gather(self, name: str, box: Box, owner: int) -> torch.Tensor | None:
        """The elements of a window, on the rank ``owner``; None elsewhere. Collective."""
        ranks, dtype = self._ranks, torch_dtype(self._changed[name].spec.dtype)
        cpu = torch.device("cpu")
        # No rank enters a collective until all have their part.
        with ranks.agree(_LABEL):
            nbytes = box.numel * dtype.itemsize
            words = torch.zeros(-(-nbytes // 8), dtype=torch.int64)
            flat = words.view(dtype)
            for transfer, elements in self._parts(name, box):
                sizes = [loop.size for loop in transfer.loops]
                strides = [loop.source_stride for loop in transfer.loops]
                flat.as_strided(sizes, strides, transfer.offset_bytes // dtype.itemsize).copy_(elements)
            ranks.tick(nbytes)
            words = words.to(device_where_ranks_sum(cpu) if ranks.world_size > 1 else cpu)
        if ranks.world_size > 1 and words.numel():
            dist.reduce(words, dst=owner)
        if ranks.rank != owner:
            return None
        return words.to(cpu).view(dtype)[: box.numel].view(box.sizes)

    def write(self, name: str, box: Box, values: torch.Tensor, filler: Filler, output: HubFiles) -> None:
        """Encode a window and write its parts. Rank-local."""
        changed = self._changed[name]
        one, encoder = changed.one, changed.encoder
        _refuse_endless(name, bool(values.isfinite().all()))
        boxes = one.rule.boxes(box)
        kept = {
            role: self._read(one.parts[role], b) for role, b in boxes.items() if role not in encoder.makes
        }
        made = encoder.encode(box, values, kept, self._measured.get(name, ()))
        for role, elements in made.items():
            if role in encoder.once and any(box.start):
                continue  # the first window writes it
            part = one.parts[role]
            assert (elements.dtype, tuple(elements.shape)) == (torch_dtype(part.dtype), boxes[role].sizes), (
                name
            )
            place = output.tensors[part.name].chunks[0]
            chunk = Chunk(whole(part.shape), place.path, place.offset_bytes)
            file = StoredTensor(part.name, part.dtype, part.shape, (chunk,))
            wanted = wanted_box(part.name, part.dtype, part.shape, boxes[role])
            transfers = transfers_of(identity(part.name, part.shape), wanted, {part.name: file})
            write_back(transfers, filler, Destination({part.name: elements.contiguous()}), self._staging)

    def _read(self, part: StoredTensor, box: Box) -> torch.Tensor:
        wanted = wanted_box(part.name, part.dtype, part.shape, box)
        return read_box(
            wanted, (identity(part.name, part.shape),), {part.name: part}, self._files, self._staging
        )


def _writer(
    requantizer: Requantizer, own: tuple[str, Box, torch.Tensor] | None, output: HubFiles
) -> Together:
    def write(filler: Filler) -> None:
        if own is not None:
            requantizer.write(*own, filler, output)

    return write


class _Within:
    """As :class:`.Filler`: hands on what lies in a window of a file."""

    def __init__(self, window: Window, filler: Filler) -> None:
        self._window, self._filler = window, filler

    def write_at(self, name: str, offset_bytes: int, view: memoryview) -> None:
        window = self._window
        first = max(0, window.start - offset_bytes)
        last = min(view.nbytes, window.stop - offset_bytes)
        if name == window.file and first < last:
            self._filler.write_at(name, offset_bytes + first, view[first:last])


def _place(index: Sequence[int], shape: tuple[int, ...]) -> int:
    """The place of an element in row-major order."""
    return sum(i * s for i, s in zip(index, contiguous_strides(shape), strict=True))


def _refuse_endless(name: str, finite: bool) -> None:
    if not finite:
        raise StateError(
            f"{name}: holds NaN or infinite elements, which no code stands for; nothing was exported"
        )
