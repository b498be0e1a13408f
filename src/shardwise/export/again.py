"""Exports into the format of the quantized source that the model was loaded from."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..catalog.open import open_catalog
from ..catalog.quantized import NAMES_IN_CONFIG
from ..catalog.records import Catalog, Chunk, Coded, StoredTensor
from ..catalog.weights import WrittenNames
from ..dtypes import itemsize, torch_dtype
from ..engine.engine import Destination, Filler, holds, read_box, wanted_box, write_back
from ..engine.objects import SourceReader
from ..engine.shared import DecodingReader
from ..errors import CheckpointError, PlanError, SourceError, StateError, UnsupportedConversionError
from ..limits import brief, read_shallow_json
from ..models.homes import home_of, source_of, versions_of
from ..names import Named
from ..objects import frozen
from ..planning.plan import IOOptions, Transfer, transfers_of
from ..quantized.again import Encoder, encoder_of
from ..quantized.again import Window as Values
from ..quantized.open import dequantized
from ..ranks.ranks import Ranks
from ..storage import absolute, is_file
from ..storage.records import join
from ..tensors.boxes import Box, TensorSpec, Wanted, contiguous_strides, whole
from ..tensors.live import LiveModel
from ..tensors.tiles import Tile, cut, identity
from .live import LiveJob
from .stored import StoredJob, share_of
from .write import HubFiles, HubTensors, Job, Share, Window, Writes, brought_to, by_hub, lay_out

# ----------------------------------------------------------------------------------------------------
# The quantized source whose format an export writes: found, checked to be what the model was loaded from, and held open.

#: Files of a source, with what tells versions apart.
Versions = Mapping[str, tuple[int, object]]


class QuantizedSource:
    """A quantized source: its stored tensors, the tensors that they stand for, and readers of both. Rank-local.

    Opens its files, as many as the process may have open, so a source that is deleted meanwhile does no harm. Raises
    :class:`CheckpointError` if there is none, if it is not what the model was loaded from, or if it is plain.
    """

    def __init__(
        self,
        place: tuple[str, Versions | None],
        own: Callable[[], Iterable[Named]],
        on_progress: Callable[[int], None],
        io: IOOptions,
    ) -> None:
        """``place``: where it lies, and its files as they were, if that is known. ``own`` gives the model's tensors."""
        self.root, loaded = place
        try:
            self.stored: Catalog = open_catalog(self.root)
            self.meant: Catalog = dequantized(self.stored, own)
            if loaded is not None and versions_of(self.stored) != loaded:
                raise CheckpointError(
                    f"{self.root}: has changed since the model was loaded from it: its files, their sizes or their times differ. "
                    f"Give source= to write the format of the files that are there now"
                )
            if not self.meant.coded:
                raise CheckpointError(
                    f"{self.root}: is not quantized, and quantize='as-source' writes the format of a quantized source; leave "
                    f"quantize= out, or give source="
                )
            file = join(self.stored.root, "config.json")
            config = read_shallow_json(file) if is_file(file) else {}
            self.config: Mapping[str, Any] = config if isinstance(config, dict) else {}
            self.files = SourceReader(on_progress, files=self.stored.files, io=io)
            self.files.hold(file.path for file in self.stored.files)
        except (SourceError, OSError) as error:
            raise CheckpointError(
                f"{self.root}: can't be read as the source of quantize='as-source': {error}; give source=, the quantized "
                f"source that the model was loaded from"
            ) from error
        self.decoded = DecodingReader(self.files, self.meant.coded, io)

    def close(self) -> None:
        """Close the files."""
        self.files.close()


def place_of_source(live: LiveModel, given: str | os.PathLike[str] | None) -> tuple[str, Versions | None]:
    """Where the source of a live model lies, and its files as they were, if that is known."""
    if given is not None:
        return absolute(given), None
    loaded = source_of(live.root) or source_of(live.base)
    if loaded is not None:
        return loaded.root, loaded.versions
    home = home_of(live.root) or home_of(live.base)
    if home is None:
        raise CheckpointError(
            "quantize='as-source': can't tell which quantized source this model was loaded from; give source="
        )
    return home, None


def _with_quantization(config: dict[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """A config of the plain model, with what the source's config says of quantization and dtype, where it says it."""
    found = dict(config)
    for name in (*NAMES_IN_CONFIG, "dtype", "torch_dtype"):
        found.pop(name, None)
        if name in source:
            found[name] = source[name]
    for name, part in source.items():
        if name.endswith("_config") and name not in NAMES_IN_CONFIG and isinstance(part, dict):
            own = found.get(name)
            if isinstance(own, dict):
                found[name] = _with_quantization(own, part)
    return found


# ----------------------------------------------------------------------------------------------------
# Tensors that changed, in windows of whole blocks. A window is brought to a rank by an integer sum of the ranks' elements.

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
        return windows_in(self.spec.shape, self.encoder.unit, most)


def windows_in(shape: tuple[int, ...], unit: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes of whole units that cover a tensor, each of at most ``most`` elements or of one unit. Outer dims are cut first."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for dim, n in enumerate(shape):
        cut_here = []
        for start, stop in found:
            held = Box(start, stop).numel * math.prod(shape[dim + 1 :])
            step = max(1, most // max(1, held * unit[dim])) * unit[dim]
            cut_here += [((*start, a), (*stop, min(a + step, n))) for a in range(0, n, step)]
        found = cut_here
    return (Box(*ends) for ends in found)


def _nothing(_: Filler) -> None:
    """What a rank without a window writes."""


def _refuse_endless(name: str, finite: bool) -> None:
    if not finite:
        raise StateError(
            f"{name}: holds NaN or infinite elements, which no code stands for; nothing was exported"
        )


# ----------------------------------------------------------------------------------------------------
# An export into the format of the quantized source that the model was loaded from.
#
# A tensor that equals, bit for bit, what the source's parts stand for is copied from the source, parts and all. Any other one is
# quantized again by the format's own rule. So what was not touched comes out as it went in, also in formats whose codes can't be
# found again from rounded weights.


@frozen
class Requantized:
    """Tensors that were quantized again by one rule."""

    reference: str
    """The rule, in words: "INT8: absolute maximum of the row, as bitsandbytes' int8_vectorwise_quant"."""
    names: tuple[str, ...]


@frozen
class AsSource:
    """Where the tensors of an export with ``quantize="as-source"`` come from."""

    source: str
    copied: int
    """Tensors that equal the source's, whose stored bytes were copied; quantized ones count once."""
    requantized: tuple[Requantized, ...]
    written: tuple[str, ...]
    """Tensors that the source stores plainly, or not at all, and that the model gave."""
    not_in_model: tuple[str, ...]
    """Tensors of the source that the model doesn't have; they were copied."""


#: Bytes of a stored tensor that are read, compared and digested at a time, unless half the staging limit is less.
_PIECE_BYTES = 8 * 1024**2


def _with_ties(weights: LiveJob | StoredJob, stored: Mapping[str, StoredTensor]) -> HubTensors:
    """The hub tensors of a model, with the further names under which the source, which holds ``stored``, stores tied ones."""
    contents, specs = weights.contents(), weights.specs
    hub, tiles = dict(contents.hub), {name: list(found) for name, found in contents.tiles.items()}
    for name, tile in weights.copies(contents, stored):
        hub[tile.source] = TensorSpec(specs[name].dtype, stored[tile.source].shape)
        tiles[name].append(tile)
    for tied in weights.named():
        for alias in tied.names[1:] if tied.names[0] in tiles else ():
            name = tied.names[0]
            shape = specs[name].shape
            if alias not in hub and alias in stored and stored[alias].shape == shape:
                hub[alias] = specs[name]
                tiles[name].append(identity(alias, shape))
    return HubTensors(hub, {name: tuple(found) for name, found in tiles.items()})


class AsSourceJob(Job):
    """Export of a live or stored model in the format of its source."""

    def __init__(self, weights: LiveJob | StoredJob, source: QuantizedSource, io: IOOptions) -> None:
        super().__init__(io)
        self._weights, self._source = weights, source
        weights.staging = self.staging
        if isinstance(weights, StoredJob):
            weights.piece_bytes = min(_PIECE_BYTES, weights.piece_bytes)
        self.home, self.stem = weights.home, weights.stem
        self._hub = HubTensors({}, {})
        self._touched: set[str] = set()
        self._changed: dict[str, Changed] = {}
        self._brought: Mapping[str, Sequence[tuple[Wanted, Tile]]] = {}
        self._measured: dict[str, tuple[torch.Tensor, ...]] = {}
        self._states: dict[str, bytes] = {}

    # What changed

    def prepare(self, ranks: Ranks) -> None:
        """Find the tensors that differ from what the source stores. Reads each element of the source once, and of a stored model.

        A tensor counts as changed if any rank has an element that differs. Raises :class:`PlanError` if the tensors of model and source
        do not fit together, :class:`UnsupportedConversionError` for a changed one in a format that can't be quantized again.
        """
        with ranks.agree("compare with the source"):
            self._hub = _with_ties(self._weights, self._source.meant.tensors)
            self._refuse_others()
            shares = self._weights.shares(self._hub, ranks)
        differing = ranks.reduce(
            "compare with the source",
            lambda: self._differing(shares),
            lambda found: sorted({name for names in found for name in names}),
            lambda names: names,
        )
        self._touched = set(differing)
        with ranks.agree("compare with the source"):
            self._changed = self._encoded()
        self._brought = by_hub(shares)
        means = self._measure(ranks)
        with ranks.agree("compare with the source"):
            self._states = dict(self._state(name, mean) for name, mean in means.items())

    def _differing(self, shares: Sequence[Share]) -> list[str]:
        """The tensors of which this rank has an element that differs."""
        stored = self._source.meant.tensors
        found = {n for n, spec in self._hub.hub.items() if n not in stored or stored[n].shape != spec.shape}
        for wanted, tiles in shares:
            elements = self._weights.whole(wanted)
            for tile in tiles:
                if tile.source in found:
                    continue
                transfers = transfers_of(tile, wanted, {tile.source: stored[tile.source]})
                if not holds(transfers, self._source.decoded, elements, self.staging):
                    found.add(tile.source)
        return sorted(found)

    def _refuse_others(self) -> None:
        """Raise if codes of the source would be copied beside weights that stand for them under another name or shape."""
        coded = {one.tensor.name: one for one in self._source.meant.coded.values()}
        news = [name for name in self._hub.hub if name not in self._source.meant.tensors]
        olds = [name for name in coded if name not in self._hub.hub]
        problems = [
            f"shape mismatch: {name!r} is {list(spec.shape)} in the model, but its codes in the source are for {list(coded[name].tensor.shape)}"
            for name, spec in self._hub.hub.items()
            if name in coded and coded[name].tensor.shape != spec.shape
        ]
        if news and olds:
            problems.append(
                f"the model has {brief(news[:3])}, which the source does not store, and the source has codes of {brief(olds[:3])}, "
                f"which the model does not write: it is not known whether the ones are the others"
            )
        if problems:
            raise PlanError(
                f"{self._source.root}: can't be requantized in the source's format", tuple(problems)
            )

    def _encoded(self) -> dict[str, Changed]:
        """The changed tensors that the source stores in codes, each with its encoder. The same on every rank."""
        changed: dict[str, Changed] = {}
        problems = []
        for one in self._source.meant.coded.values():
            name = one.tensor.name
            if name in self._touched:
                try:
                    changed[name] = Changed(
                        one, encoder_of(one, self._source.stored.quantization.settings), self._hub.hub[name]
                    )
                except UnsupportedConversionError as error:
                    problems.append(str(error))
        if problems:
            more = f"; and {len(problems) - 1} more tensors" if len(problems) > 1 else ""
            raise UnsupportedConversionError(problems[0] + more)
        return changed

    def _state(self, name: str, mean: float) -> tuple[str, bytes]:
        """The small tensor that describes a changed one with quantized scales, by name; as it is with another mean of them."""
        content = self._source.stored.quantization.content
        (state,) = (n for n in content if n.startswith(f"{name}.quant_state."))
        return state, json.dumps({**json.loads(content[state]), "nested_offset": mean}).encode()

    # Requantized tensors: windows of whole blocks are brought together, and each rank encodes some of them

    def _measure(self, ranks: Ranks) -> dict[str, float]:
        """Find what some formats need of a whole tensor: extremes, the mean of its scales. Returns the means by name.

        Every rank must call it. For means, rank 0 holds all scales of one tensor before they are quantized.
        """
        self._find_extremes(ranks)
        means: dict[str, float] = {}
        for name, changed in self._changed.items():
            if changed.encoder.scales is not None:
                mean = self._mean(name, changed.encoder.scales, ranks)
                self._measured[name] = (torch.tensor(mean, dtype=torch.float32),)
                means[name] = mean
        return means

    def _mean(self, name: str, scales_of: Callable[[torch.Tensor], torch.Tensor], ranks: Ranks) -> float:
        found: list[torch.Tensor] = []
        for box in self._changed[name].windows():
            values = self._gather(name, box, 0, ranks)
            with ranks.agree(_LABEL):
                if values is not None:
                    _refuse_endless(name, bool(values.isfinite().all()))
                    found.append(scales_of(values))
        return ranks.on_first(_LABEL, lambda: float(torch.cat(found).mean()))

    def _find_extremes(self, ranks: Ranks) -> None:
        def own() -> dict[str, list[float]]:
            return {n: found for n, c in self._changed.items() if c.encoder.once and (found := self._ends(n))}

        def all_of(ends: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
            found: dict[str, list[float]] = {}
            for some in ends:
                for name, (low, high) in some.items():
                    before = found.get(name, [low, high])
                    found[name] = [min(low, before[0]), max(high, before[1])]
            return found

        for name, (low, high) in ranks.reduce(_LABEL, own, all_of, lambda ends: ends).items():
            dtype = torch_dtype(self._changed[name].spec.dtype)
            self._measured[name] = torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype)

    def _ends(self, name: str) -> list[float]:
        """The least and largest of this rank's elements of a tensor."""
        found: list[float] = []
        windows = self._changed[name].windows()
        for _, elements in (part for box in windows for part in self._parts(name, box)):
            low, high = (float(end) for end in torch.aminmax(elements))
            _refuse_endless(name, low - low + high - high == 0)
            found = [min([low, *found]), max([high, *found])]
        return found

    def _parts(self, name: str, box: Box) -> Iterator[tuple[Transfer, torch.Tensor]]:
        """This rank's elements of a window: views of them, for now, and where they lie in it."""
        code, shape = self._changed[name].spec
        window = StoredTensor(name, code, shape, (Chunk(box, name, 0),))
        for wanted, tile in self._brought.get(name, ()):
            for part in cut(tile, "source", box):
                for held, elements, _ in self._weights.elements(wanted, (part,)):
                    for transfer in transfers_of(part, held, {name: window}):
                        yield transfer, elements.strided(transfer)

    def together(self, output: HubFiles, ranks: Ranks) -> Iterator[Writes]:
        """The tensors that are quantized again: their windows in turns of one for each rank; with each turn, what writes this rank's window.

        Nothing fails on one rank alone but what it yields.
        """
        windows = [(name, box) for name, changed in self._changed.items() for box in changed.windows()]
        size = ranks.world_size
        for begin in range(0, len(windows), size):
            write: Writes = _nothing
            for rank, (name, box) in enumerate(windows[begin : begin + size]):
                values = self._gather(name, box, rank, ranks)
                if values is not None:
                    write = partial(self._write_encoded, name, box, values, output)
            yield write

    def fill_together(
        self, window: Window, owner: int, filler: Filler | None, output: HubFiles, ranks: Ranks
    ) -> None:
        """What a window of a file has of the tensors that are quantized again."""
        inside = {stored for stored, _ in window.parts}
        for name, changed in self._changed.items():
            roles = [r for r in changed.encoder.makes if changed.one.parts[r].name in inside]
            for box in changed.windows() if roles else ():
                if not any(self._reaches(name, role, box, window, output) for role in roles):
                    continue
                values = self._gather(name, box, owner, ranks)
                with ranks.agree(_LABEL):
                    if values is not None and filler is not None:
                        self._write_encoded(name, box, values, output, filler)

    def _reaches(self, name: str, role: str, box: Box, window: Window, output: HubFiles) -> bool:
        """Whether a window of a tensor has bytes of one of its parts in a window of a file. Sure if not."""
        changed = self._changed[name]
        part, held = changed.one.parts[role], changed.one.rule.boxes(box)[role]
        if not held.numel:
            return False
        size, begin = itemsize(part.dtype), output.tensors[part.name].chunks[0].offset_bytes
        strides = contiguous_strides(part.shape)
        first = sum(n * s for n, s in zip(held.start, strides, strict=True))
        last = sum((n - 1) * s for n, s in zip(held.stop, strides, strict=True))
        return begin + first * size < window.stop and window.start < begin + (last + 1) * size

    def _gather(self, name: str, box: Box, owner: int, ranks: Ranks) -> torch.Tensor | None:
        """The elements of a window, on the rank ``owner``; None elsewhere. Collective."""
        dtype = torch_dtype(self._changed[name].spec.dtype)
        nbytes = box.numel * dtype.itemsize

        def fill(words: torch.Tensor) -> None:
            flat = words.view(dtype)
            for transfer, elements in self._parts(name, box):
                sizes = [loop.size for loop in transfer.loops]
                strides = [loop.source_stride for loop in transfer.loops]
                flat.as_strided(sizes, strides, transfer.offset_bytes // dtype.itemsize).copy_(elements)
            ranks.tick(nbytes)

        words = brought_to(owner, nbytes, fill, _LABEL, ranks)
        return None if words is None else words.view(dtype)[: box.numel].view(box.sizes)

    def _write_encoded(
        self, name: str, box: Box, values: torch.Tensor, output: HubFiles, filler: Filler
    ) -> None:
        """Encode a window and write its parts. Rank-local."""
        changed = self._changed[name]
        one, encoder = changed.one, changed.encoder
        _refuse_endless(name, bool(values.isfinite().all()))
        boxes = one.rule.boxes(box)
        kept = {
            role: self._stored_box(one.parts[role], part)
            for role, part in boxes.items()
            if role not in encoder.makes
        }
        made = encoder.encode(Values(box, values, kept, self._measured.get(name, ())))
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
            write_back(transfers, filler, Destination({part.name: elements.contiguous()}), self.staging)

    def _stored_box(self, part: StoredTensor, box: Box) -> torch.Tensor:
        """A box of a tensor of the source, as it is stored."""
        wanted = wanted_box(part.name, part.dtype, part.shape, box)
        tile = identity(part.name, part.shape)
        return read_box(wanted, (tile,), {part.name: part}, self._source.files, self.staging)

    # What is written

    def lay_out(
        self, dtype: str | None, max_shard_bytes: int, variant: str | None = None
    ) -> tuple[HubTensors, HubFiles]:
        """What the model itself writes, and where in which file each stored tensor lies."""
        specs = {n: TensorSpec(t.dtype, t.shape) for n, t in self._source.stored.tensors.items()}
        for name, content in self._states.items():
            specs[name] = TensorSpec("U8", (len(content),))
        for name in self._from_model():
            dtype = specs[name].dtype if name in specs else self._hub.hub[name].dtype
            specs[name] = TensorSpec(dtype, self._hub.hub[name].shape)
        return self._only(self._from_model()), lay_out(
            specs, None, max_shard_bytes, WrittenNames(stem=self.stem, variant=variant)
        )

    def _from_model(self) -> list[str]:
        """The tensors that are written as the model has them."""
        return [name for name in self._hub.hub if name in self._touched and name not in self._changed]

    def _only(self, names: Sequence[str]) -> HubTensors:
        kept = set(names)
        tiles = {n: tuple(t for t in found if t.source in kept) for n, found in self._hub.tiles.items()}
        return HubTensors({n: self._hub.hub[n] for n in names}, tiles)

    def copied(self) -> dict[str, TensorSpec]:
        """The stored tensors that are copied: all that neither the model nor an encoder writes."""
        made = {c.one.parts[role].name for c in self._changed.values() for role in c.encoder.makes}
        gone = made | set(self._from_model()) | self._states.keys()
        stored = self._source.stored.tensors
        return {n: TensorSpec(t.dtype, t.shape) for n, t in stored.items() if n not in gone}

    def share_bytes(self, contents: HubTensors, output: HubFiles, ranks: Ranks) -> int:
        return output.total_bytes // ranks.world_size

    def write(self, contents: HubTensors, output: HubFiles, filler: Filler, ranks: Ranks) -> None:
        for dtype in dict.fromkeys(output.tensors[name].dtype for name in contents.hub):
            of_dtype = self._only([name for name in contents.hub if output.tensors[name].dtype == dtype])
            if isinstance(self._weights, LiveJob):
                self._weights.write(of_dtype, output, filler, ranks)
            else:  # its digests are summed up already
                self._weights.put(self._weights.shares(of_dtype, ranks), output, filler)
        for name, box in share_of(self.copied(), self.staging.limit_bytes // 2, ranks):
            self.copy(name, box, output, filler)
        for name, content in self._states.items() if ranks.rank == 0 else ():
            self.write_state(name, 0, len(content), output, filler)

    def write_state(self, name: str, start: int, stop: int, output: HubFiles, filler: Filler) -> None:
        """Write bytes of a small tensor that describes a changed one, if the name is of one. Rank-local."""
        if name in self._states:
            place = output.tensors[name].chunks[0]
            filler.write_at(
                place.path, place.offset_bytes + start, memoryview(self._states[name])[start:stop]
            )

    def copy(self, name: str, box: Box, output: HubFiles, filler: Filler) -> None:
        """Copy a box of a stored tensor. Rank-local."""
        stored = self._source.stored.tensors[name]
        wanted = wanted_box(name, stored.dtype, stored.shape, box)
        piece = self._stored_box(stored, box)
        transfers = transfers_of(identity(name, stored.shape), wanted, {name: output.tensors[name]})
        write_back(transfers, filler, Destination({name: piece}), self.staging)

    def windows(
        self, contents: HubTensors, output: HubFiles, ranks: Ranks
    ) -> Callable[[Window, Filler], None]:
        """The model's own elements come from all ranks, each copied piece from one."""
        fill_own = self.windows_of_shares(self._weights.shares(contents, ranks), output)
        copied = self.copied()

        def fill(window: Window, filler: Filler) -> None:
            fill_own(window, filler)
            for name, box in window.parts:
                if zlib.crc32(f"{name} {box.start}".encode()) % ranks.world_size != ranks.rank:
                    continue
                if name in copied:
                    self.copy(name, box, output, filler)
                if len(box.start) == 1:
                    self.write_state(name, box.start[0], box.stop[0], output, filler)

        return fill

    def elements(
        self, wanted: Wanted, tiles: Sequence[Tile]
    ) -> Iterable[tuple[Wanted, Destination, Sequence[Tile]]]:
        return self._weights.elements(wanted, tiles)

    def sums(self) -> list[int]:
        return self._weights.sums()

    def check(self, sums: Sequence[int]) -> None:
        self._weights.check(sums)

    def assets(self) -> Mapping[str, bytes]:
        """Those of the model, with the source's quantization and dtype in its config."""
        found = dict(self._weights.assets())
        config = json.loads(found["config.json"]) if "config.json" in found else dict(self._source.config)
        config.pop("transformers_weights", None)  # the name of the source's file
        if config:
            text = json.dumps(_with_quantization(config, self._source.config), indent=2, sort_keys=True)
            found["config.json"] = (text + "\n").encode()
        return found

    def report(self) -> AsSource:
        by_rule: dict[str, list[str]] = {}
        for name, changed in self._changed.items():
            by_rule.setdefault(changed.encoder.reference, []).append(name)
        meant = self._source.meant.tensors
        not_in_model = tuple(name for name in meant if name not in self._hub.hub)
        return AsSource(
            self._source.root,
            len([name for name in self._hub.hub if name not in self._touched]),
            tuple(Requantized(rule, tuple(names)) for rule, names in by_rule.items()),
            tuple(self._from_model()),
            not_in_model,
        )

    def close(self) -> None:
        """Close the files of source and model."""
        self._source.close()
        self._weights.close()
