"""An export into the format of the quantized source that the model was loaded from.

A tensor that equals, bit for bit, what the source's parts stand for is copied from the source, parts and all. Any other one is
quantized again by the format's own rule. So what was not touched comes out as it went in, also in formats whose codes can't be
found again from rounded weights.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..errors import PlanError, UnsupportedConversionError
from ..layout.boxes import Box
from ..layout.spec import TensorSpec
from ..layout.wanted import Wanted
from ..limits import brief
from ..objects import frozen
from ..planning.build import transfers_of
from ..quantized.encoders import NestedFourBitEncoder, encoder_of
from ..ranks.ranks import Ranks
from ..recipe.tiles import Tile, identity
from ..transfer.box import read_box, wanted_box
from ..transfer.copy import Destination, Filler, Staging, holds, write_back
from .files import HubFiles, lay_out
from .job import Together, Window
from .live_windows import LiveWindows, Piece, by_hub
from .quantized_source import QuantizedSource
from .requantized import Changed, Requantizer
from .stored_windows import share_of
from .tensors import HubTensors
from .weights import Weights

__all__ = ["AsSource", "AsSourceJob", "Requantized"]


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
    beside: tuple[str, ...]
    """Tensors of the source that the model does not hold; they were copied."""


class AsSourceJob:
    """Export of a model in the format of its source. Implements :class:`.Job`. :meth:`compare` comes first."""

    def __init__(self, weights: Weights, source: QuantizedSource, staging: Staging) -> None:
        self._weights, self._source, self._room = weights, source, staging
        self._hub = HubTensors({}, {})
        self._touched: set[str] = set()
        self._changed: dict[str, Changed] = {}
        self._requantizer: Requantizer | None = None
        self._states: dict[str, bytes] = {}

    # What changed

    def compare(self, ranks: Ranks) -> None:
        """Find the tensors that differ from what the source stores. Every rank must call it; reads each element of the source once,
        and of a stored model.

        A tensor counts as changed if any rank has an element that differs. Raises :class:`PlanError` if the tensors of model and source
        do not fit together, :class:`UnsupportedConversionError` for a changed one in a format that can't be quantized again.
        """
        with ranks.agree("compare with the source"):
            self._hub = self._weights.contents(self._source.meant.tensors)
            self._refuse_others()
            pieces = self._weights.pieces(self._hub, ranks)
        differing = ranks.reduce(
            "compare with the source",
            lambda: self._differing(pieces),
            lambda found: sorted({name for names in found for name in names}),
            lambda names: names,
        )
        self._touched = set(differing)
        with ranks.agree("compare with the source"):
            self._changed = self._encoded()
        self._requantizer = Requantizer(
            self._changed, by_hub(pieces), self._near, self._source.files, self._room, ranks
        )
        means = self._requantizer.measure()
        with ranks.agree("compare with the source"):
            self._states = dict(self._state(name, mean) for name, mean in means.items())

    def _differing(self, pieces: Sequence[Piece]) -> list[str]:
        """The tensors of which this rank has an element that differs."""
        stored = self._source.meant.tensors
        found = {n for n, spec in self._hub.hub.items() if n not in stored or stored[n].shape != spec.shape}
        for wanted, tiles in pieces:
            elements = self._weights.whole(wanted, self._room)
            for tile in tiles:
                if tile.source in found:
                    continue
                transfers = transfers_of(tile, wanted, {tile.source: stored[tile.source]})
                if not holds(transfers, self._source.decoded, elements, self._room):
                    found.add(tile.source)
        return sorted(found)

    def _near(self, wanted: Wanted, part: Tile) -> Iterable[tuple[Wanted, Destination]]:
        return self._weights.near(wanted, part, self._room)

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
                f"{self._source.root}: can't be re-quantized in the source's format", tuple(problems)
            )

    def _encoded(self) -> dict[str, Changed]:
        """The changed tensors that the source stores in codes, each with its encoder. The same on every rank."""
        changed: dict[str, Changed] = {}
        problems = []
        for one in self._source.meant.coded.values():
            name = one.tensor.name
            if name in self._touched:
                try:
                    changed[name] = Changed(one, encoder_of(one, self._source.settings), self._hub.hub[name])
                except UnsupportedConversionError as error:
                    problems.append(str(error))
        if problems:
            more = f"; and {len(problems) - 1} more tensors" if len(problems) > 1 else ""
            raise UnsupportedConversionError(problems[0] + more)
        return changed

    def _state(self, name: str, mean: float) -> tuple[str, bytes]:
        """The small tensor that describes a changed one with quantized scales, by name."""
        encoder, content = self._changed[name].encoder, self._source.stored.quantization.content
        assert isinstance(encoder, NestedFourBitEncoder)
        (state,) = (n for n in content if n.startswith(f"{name}.quant_state."))
        return state, encoder.state(content[state], mean)

    # What is written

    def lay_out(self, dtype: str | None, max_shard_bytes: int) -> tuple[HubTensors, HubFiles]:
        """What the model itself writes, and where in which file each stored tensor lies."""
        specs = {n: TensorSpec(t.dtype, t.shape) for n, t in self._source.stored.tensors.items()}
        for name, content in self._states.items():
            specs[name] = TensorSpec("U8", (len(content),))
        for name in self._from_model():
            dtype = specs[name].dtype if name in specs else self._hub.hub[name].dtype
            specs[name] = TensorSpec(dtype, self._hub.hub[name].shape)
        return self._only(self._from_model()), lay_out(specs, None, max_shard_bytes)

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

    def share_bytes(self, contents: HubTensors, output: HubFiles, staging: Staging, ranks: Ranks) -> int:
        """About what this rank writes."""
        return output.total_bytes // ranks.world_size

    def write(
        self, contents: HubTensors, output: HubFiles, filler: Filler, staging: Staging, ranks: Ranks
    ) -> list[int]:
        for dtype in dict.fromkeys(output.tensors[name].dtype for name in contents.hub):
            of_dtype = self._only([name for name in contents.hub if output.tensors[name].dtype == dtype])
            self._weights.write(of_dtype, output, filler, self._room, ranks)
        for name, box in share_of(self.copied(), staging.limit_bytes // 2, ranks):
            self.copy(name, box, output, filler)
        for name, content in self._states.items() if ranks.rank == 0 else ():
            self.write_state(name, 0, len(content), output, filler)
        return self._weights.sums()

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
        wanted, tile = wanted_box(name, stored.dtype, stored.shape, box), identity(name, stored.shape)
        piece = read_box(wanted, (tile,), {name: stored}, self._source.files, self._room)
        transfers = transfers_of(tile, wanted, {name: output.tensors[name]})
        write_back(transfers, filler, Destination({name: piece}), self._room)

    def together(self, output: HubFiles) -> Iterator[Together]:
        """The tensors that are quantized again."""
        yield from self.requantizer.all_windows(output)

    @property
    def requantizer(self) -> Requantizer:
        """What :meth:`compare` prepared for the tensors that are quantized again."""
        assert self._requantizer is not None
        return self._requantizer

    def windows(
        self, contents: HubTensors, output: HubFiles, staging: Staging, ranks: Ranks
    ) -> AsSourceWindows:
        own = LiveWindows(self._near, by_hub(self._weights.pieces(contents, ranks)), output, staging)
        return AsSourceWindows(self, own, output, ranks)

    def sums(self) -> list[int]:
        """This rank's shares of the digest sums of a stored model."""
        return self._weights.sums()

    def check(self, sums: Sequence[int]) -> None:
        """Compare a stored model's digests. Neither a live model nor a hub source has recorded ones."""
        self._weights.check(sums)

    def assets(self) -> Mapping[str, bytes]:
        """Those of the model, with the source's quantization and dtype in its config."""
        found = dict(self._weights.assets())
        config = json.loads(found["config.json"]) if "config.json" in found else dict(self._source.config)
        config.pop("transformers_weights", None)  # the name of the source's file
        if config:
            text = json.dumps(self._source.as_quantized(config), indent=2, sort_keys=True)
            found["config.json"] = (text + "\n").encode()
        return found

    def report(self) -> AsSource:
        by_rule: dict[str, list[str]] = {}
        for name, changed in self._changed.items():
            by_rule.setdefault(changed.encoder.reference, []).append(name)
        meant = self._source.meant.tensors
        beside = tuple(name for name in meant if name not in self._hub.hub)
        return AsSource(
            self._source.root,
            len([name for name in self._hub.hub if name not in self._touched]),
            tuple(Requantized(rule, tuple(names)) for rule, names in by_rule.items()),
            tuple(self._from_model()),
            beside,
        )

    @property
    def home(self) -> str | None:
        """Where a stored model's own code lies."""
        return self._weights.home

    def close(self) -> None:
        """Close the files of source and model."""
        self._source.close()
        self._weights.close()


class AsSourceWindows:
    """As :class:`.Windows`: the model's own elements come from all ranks, each copied piece from one, the rest is made together."""

    is_spread = True

    def __init__(self, job: AsSourceJob, own: LiveWindows, output: HubFiles, ranks: Ranks) -> None:
        self._job, self._own, self._output, self._ranks = job, own, output, ranks
        self._copied = job.copied()

    def fill(self, window: Window, filler: Filler) -> None:
        self._own.fill(window, filler)
        for name, box in window.parts:
            turn = zlib.crc32(f"{name} {box.start}".encode()) % self._ranks.world_size
            if name in self._copied and turn == self._ranks.rank:
                self._job.copy(name, box, self._output, filler)
            if turn == self._ranks.rank and len(box.start) == 1:
                self._job.write_state(name, box.start[0], box.stop[0], self._output, filler)

    def fill_together(self, window: Window, owner: int, filler: Filler) -> None:
        self._job.requantizer.into(window, owner, filler, self._output)

    def finish(self) -> list[int]:
        """This rank's shares of digest sums, which the comparison found."""
        return self._job.sums()
