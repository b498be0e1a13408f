"""A step in parts as a directory that a restore reads: links to the files that are here, and the
blocks of other hosts' files that this host's ranks need."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ..catalog import StoredTensor
from ..catalog.checkpoint import catalog_of_checkpoint, catalog_of_optimizer
from ..dtypes import itemsize
from ..errors import CheckpointError
from ..format.manifest import BLOCK_BYTES, MANIFEST_NAME, FileEntry, Manifest
from ..format.places import files_by_place
from ..format.states import StateKey
from ..layout.boxes import Box, whole
from ..layout.live import describe
from ..limits import inside
from ..memory.copies import copy_units
from ..memory.link import Reader
from ..memory.units import Unit, units_of
from ..objects import frozen
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from ..store.marks import mark
from .verify import model_of

__all__ = ["PartFiles", "bring", "document_units", "make_view", "slice_units"]

#: Where a stored tensor lies in the model of this run: its shape there, and the boxes of this rank.
_Held = Mapping[str, tuple[tuple[int, ...], Sequence[Box]]]


@frozen
class PartFiles:
    """The files of a step at one place that other hosts may read."""

    path: str
    names: frozenset[str]

    def readable(self, name: str) -> str:
        """The path of a file. Raises :class:`CheckpointError` for any other."""
        if name not in self.names:
            raise CheckpointError(f"{name}: is no file of this part")
        return inside(self.path, name)


def make_view(view: str, path: str, text: bytes, manifest: Manifest, here: frozenset[str]) -> None:
    """Make the directory ``view``: links to the files ``here`` below ``path``, and files without content for the others.

    Raises :class:`CheckpointError`.
    """
    try:
        os.mkdir(view)
        mark(view)
        with open(os.path.join(view, MANIFEST_NAME), "xb") as file:
            file.write(text)
        for name, entry in manifest.files.items():
            new = inside(view, name)
            os.makedirs(os.path.dirname(new), exist_ok=True)
            if name in here:
                os.symlink(os.path.abspath(inside(path, name)), new)
            else:
                with open(new, "xb") as file:
                    file.truncate(entry.nbytes)  # takes no room until units are written
    except OSError as error:
        raise CheckpointError(f"{view}: can't be made: {error.strerror}") from error


def bring(
    view: str,
    needed: Mapping[str, Sequence[Unit]],
    manifest: Manifest,
    reader_of: Callable[[int], Reader],
    ranks: Ranks,
) -> int:
    """Copy units of files that are not here into a view; each is proved when it arrives. Returns their bytes. Rank-local.

    ``reader_of`` gets the number of the place that holds the files. One connection is open at a time, and none afterwards: a host
    serves some ranks at a time. Raises :class:`CheckpointError`, :class:`IntegrityError`.
    """
    total = 0
    for number, names in enumerate(files_by_place(manifest)):
        if wanted := [name for name in names if needed.get(name)]:
            reader = reader_of(number)
            try:
                for name in wanted:
                    total += copy_units(reader, name, needed[name], inside(view, name), ranks.tick)
            finally:
                reader.close()
    return total


def document_units(
    manifest: Manifest,
    lacking: Collection[str],
    ranks: Ranks,
    *,
    with_shared: bool,
    also: Callable[[str], bool],
) -> dict[str, list[Unit]]:
    """The units of the documents among the files ``lacking`` that a restore reads on this rank. Rank-local.

    ``with_shared``: also the documents of all ranks and the files that ``also`` names, of which a host needs one copy.
    """
    stems = ["state"] * with_shared + [f"rank/{ranks.rank:05d}"] * (manifest.world_size == ranks.world_size)
    names = {f"{stem}.{ending}" for stem in stems for ending in ("json", "safetensors")}
    names |= {name for name in lacking if with_shared and also(name)}
    return {name: units_of(manifest.files[name], path=name) for name in sorted(names) if name in lacking}


def slice_units(
    state: TrainState, path: str, manifest: Manifest, lacking: Collection[str]
) -> dict[str, list[Unit]]:
    """The units of slices among the files ``lacking`` that a restore of ``state`` reads on this rank. Reads nothing. Rank-local.

    They share an element with what the rank holds; of a tensor that this run does not know under that name and shape, every slice.
    """
    names = {inside(path, name): name for name in lacking}
    spans = defaultdict[str, list[tuple[int, int]]](list)
    for tensor, held in _tensors(state, path, manifest):
        parameter = held.get(tensor.name)
        boxes = [whole(tensor.shape)] if parameter is None or parameter[0] != tensor.shape else parameter[1]
        for box in boxes:
            for chunk in tensor.chunks_touching(box):
                end = chunk.offset_bytes + chunk.box.numel * itemsize(tensor.dtype)
                if (name := names.get(chunk.path)) is not None:
                    spans[name].append((chunk.offset_bytes, end))
    return {name: _touched(manifest.files[name], of) for name, of in spans.items()}


def _touched(entry: FileEntry, spans: Sequence[tuple[int, int]]) -> list[Unit]:
    """The blocks of payload that share a byte with a span."""
    _, *blocks = units_of(entry)  # first: a manifest may claim a file of any size
    numbers: set[int] = set()
    for start, end in spans:
        first, last = (at - entry.header_bytes for at in (start, end - 1))
        numbers.update(range(first // BLOCK_BYTES, last // BLOCK_BYTES + 1))
    return [blocks[number] for number in sorted(numbers)]


def _tensors(state: TrainState, path: str, manifest: Manifest) -> Iterator[tuple[StoredTensor, _Held]]:
    """The stored tensors of the models and optimizers of a run, and where they lie by stored name."""
    for name, model in state.models.items():
        if name not in manifest.models:
            continue  # the restore says so
        wanted = describe(model).layout().wanted
        held = {n: (w.shape, [b.box for b in w.boxes]) for w in wanted for n in (w.name, *w.aliases)}
        for tensor in catalog_of_checkpoint(path, name, manifest=manifest).tensors.values():
            yield tensor, held
        for optimizer in state.optimizers:
            if optimizer in manifest.packed and model_of(manifest, optimizer) == name:
                for tensor in catalog_of_optimizer(path, manifest, optimizer, name).tensors.values():
                    parameter = held.get(StateKey.of(tensor.name).parameter)
                    yield tensor, {} if parameter is None else {tensor.name: parameter}
