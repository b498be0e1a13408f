"""What an export writes and where: hub files and adapters, into a directory or into a store."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..catalog.records import Chunk, StoredTensor
from ..catalog.safetensors import catalog_of_weights
from ..catalog.weights import Choice, Weights, WrittenNames
from ..dtypes import itemsize
from ..engine.engine import Destination, Filler, Staging, write_back
from ..errors import CheckpointError, FormatError, SourceError
from ..format.header import read_headers
from ..format.manifest import MANIFEST_NAME
from ..internals.diffusers import LORA_NAME, is_diffusers_model, lora_metadata, lora_prefix
from ..internals.peft import (
    adapted_model,
    adapter_configs,
    embeddings_to_save,
    stored_config,
)
from ..limits import inside
from ..loading.adapters import CONFIG_NAME, WEIGHTS_NAME
from ..names import NamedTensor
from ..objects import frozen
from ..operations.operation import Operation
from ..planning.hub_rules import adapter_tensors, reverse_tiles
from ..planning.match import Recipe
from ..planning.plan import IOOptions, transfers_of
from ..publish.copy import LAST
from ..publish.lock import NOTE_NAME, mark, remove_ours, unmark
from ..publish.places import make_temporary
from ..publish.write import (
    FileFiller,
    ObjectWriter,
    claim,
    discard_in_store,
    enlarge,
    fsync_directory,
    make_directories,
    release,
    write_file,
)
from ..ranks.ranks import Ranks, device_where_ranks_sum, patiently
from ..storage import exists, stat_of
from ..storage.records import join
from ..tensors.boxes import Box, TensorSpec, Wanted, contiguous_parts, whole
from ..tensors.live import LiveModel
from ..tensors.tiles import Tile, cut, identity, invert

# ----------------------------------------------------------------------------------------------------
# The files of a model in hub format: which tensor lies where in which file.


@frozen
class HubFiles:
    """The files to write: the place of each hub tensor, headers and sizes by file; the index, by name, if there are several."""

    tensors: dict[str, StoredTensor]
    headers: dict[str, bytes]
    sizes: dict[str, int]
    index: Mapping[str, bytes]

    @property
    def total_bytes(self) -> int:
        """Payload of all files."""
        return sum(t.nbytes for t in self.tensors.values())


_FLOATS = ("F16", "BF16", "F32", "F64")


def specs_in(tensors: Mapping[str, TensorSpec], dtype: str | None) -> dict[str, TensorSpec]:
    """Dtypes and shapes with floating-point tensors in ``dtype``; None: as they are."""
    return {
        n: TensorSpec(dtype, spec.shape) if dtype and spec.dtype in _FLOATS else spec
        for n, spec in tensors.items()
    }


def lay_out(
    hub: Mapping[str, TensorSpec], dtype: str | None, limit: int, names: WrittenNames | None = None
) -> HubFiles:
    """Which tensor goes into which file at which offset. Files are filled in the tensors' order."""
    names = names or WrittenNames()
    specs = specs_in(hub, dtype)
    groups = _groups(specs, limit)
    files = {
        file: {name: (name, specs[name]) for name in group}
        for file, group in zip(names.files(len(groups)), groups, strict=True)
    }
    found = _filled(files)
    if len(groups) == 1:
        return found
    weight_map = {name: file for file, held in files.items() for name in held}
    document = {"metadata": {"total_size": found.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return replace(found, index={names.index: (json.dumps(document, indent=2) + "\n").encode()})


def _groups(specs: Mapping[str, TensorSpec], limit: int) -> list[list[str]]:
    """The tensors of each file, at least one file: as ``split_torch_state_dict_into_shards`` of huggingface_hub, by which both libraries save.

    A tensor above the limit has a file of its own, which comes before that of the tensors around it.
    """
    groups: list[list[str]] = []
    group: list[str] = []
    used = 0
    for name, spec in specs.items():
        if spec.nbytes > limit:
            groups.append([name])
            continue
        if used + spec.nbytes > limit:
            groups.append(group)
            group, used = [], 0
        group.append(name)
        used += spec.nbytes
    return [*groups, group] if group or not groups else groups


def _filled(
    files: Mapping[str, Mapping[str, tuple[str, TensorSpec]]],
    metadata: Mapping[str, Mapping[str, str]] | None = None,
) -> HubFiles:
    """Files of these tensors, each by its key with the name that it has in the file. ``metadata``: of some of the files."""
    tensors, headers, sizes = {}, {}, {}
    for file, held in files.items():
        header, offsets, end = header_of(dict(held.values()), (metadata or {}).get(file))
        headers[file], sizes[file] = header, len(header) + end
        for key, (name, (code, shape)) in held.items():
            chunk = Chunk(whole(shape), file, len(header) + offsets[name])
            tensors[key] = StoredTensor(name, code, shape, (chunk,))
    return HubFiles(tensors, headers, sizes, {})


def header_of(
    tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """A safetensors header with ``format: pt`` and more ``metadata``; largest items first, which aligns all tensors."""
    document: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offsets, end = {}, 0
    for name in sorted(tensors, key=lambda n: (-itemsize(tensors[n].dtype), n)):
        spec = tensors[name]
        offsets[name] = end
        stop = end + spec.nbytes
        document[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [end, stop]}
        end = stop
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets, end


def check_readable(root: str, final: str, output: HubFiles) -> None:
    """Read every header, and the index if there is one, as a load does. Raises :class:`CheckpointError`."""
    try:
        paths = [os.path.join(root, file) for file in output.headers]
        found = {
            (file, entry.name): (entry.dtype, entry.shape, entry.offset_bytes)
            for file, header in zip(output.headers, read_headers(paths), strict=True)
            for entry in header.entries.values()
        }
        for name in output.index:
            catalog_of_weights(root, Weights(name), Choice())
    except SourceError as error:
        raise CheckpointError(
            f"{final}: nothing is published, because it couldn't be read back: {error}"
        ) from error
    chunks = [(t, t.chunks[0]) for t in output.tensors.values()]
    if found != {(c.path, t.name): (t.dtype, t.shape, c.offset_bytes) for t, c in chunks}:
        raise CheckpointError(
            f"{final}: nothing is published: its headers don't match what was to be written"
        )


# ----------------------------------------------------------------------------------------------------
# The tensors of an export: hub tensors, and which of their elements each module tensor holds.


@frozen
class HubTensors:
    """Hub tensors by name with dtype and shape, and the tiles of them that each module tensor holds.

    A tile's source is a hub tensor, its target a module tensor: an export runs the load's tiles in reverse.
    """

    hub: dict[str, TensorSpec]
    tiles: dict[str, tuple[Tile, ...]]


def as_named(specs: Mapping[str, TensorSpec]) -> HubTensors:
    """Module tensors under their own names."""
    return HubTensors(dict(specs), {n: (identity(n, spec.shape),) for n, spec in specs.items()})


def reverted(meta_model: Any, specs: Mapping[str, TensorSpec]) -> HubTensors:
    """Module tensors with the hub names and shapes from the library's own reverse transforms."""
    hub, tiles = {}, {n: [] for n in specs}  # type: ignore[var-annotated]
    for made in reverse_tiles(meta_model, specs):
        hub[made.target] = TensorSpec(made.dtype, made.shape)
        for tile in made.tiles:
            tiles[tile.source].append(invert(tile, made.target))
    return _checked(HubTensors(hub, {n: tuple(found) for n, found in tiles.items()}))


def inverted(
    specs: Mapping[str, TensorSpec],
    recipes: Mapping[str, Recipe],
    shapes: Mapping[str, tuple[int, ...]],
) -> HubTensors:
    """Module tensors as the tensors that they were loaded from; initialized tensors keep their own names."""
    hub: dict[str, TensorSpec] = {}
    tiles = {}
    for name, (code, shape) in specs.items():
        recipe = recipes.get(name)
        tiles[name] = recipe.tiles if recipe is not None else (identity(name, shape),)
        for source in recipe.empty if recipe is not None else ():
            hub[source] = TensorSpec(code, tuple(shapes[source]))
        for tile in tiles[name]:
            known = hub.setdefault(tile.source, TensorSpec(code, tuple(shapes.get(tile.source, shape))))
            if known.dtype != code:
                raise FormatError(
                    f"{tile.source!r} would be written from tensors of dtypes {known.dtype} and {code}"
                )
    return _checked(HubTensors(hub, tiles))


def _checked(contents: HubTensors) -> HubTensors:
    """Check that every element of every hub tensor is written once. Raises :class:`FormatError` naming the rest."""
    held: Counter[str] = Counter()
    for found in contents.tiles.values():
        for tile in found:
            held[tile.source] += tile.numel
    wrong = [n for n, spec in contents.hub.items() if held[n] != math.prod(spec.shape)]
    if wrong:
        raise FormatError(
            f"{len(wrong)} tensors can't be given back whole, because the model holds only parts of them: "
            f"{', '.join(wrong[:5])}"
        )
    return contents


# ----------------------------------------------------------------------------------------------------
# What an export writes: jobs, of live and of stored models.

#: Of a file that is written from front to back, so many bytes are put together at a time.
WINDOW_BYTES = 32 * 1024**2


@frozen
class Window:
    """A byte range of a file, and the boxes of hub tensors that fill it."""

    file: str
    start: int
    stop: int
    parts: tuple[tuple[str, Box], ...]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


#: A box of a tensor, or the boxes that a rank holds of it, and the tiles that say what they are of hub tensors.
Share = tuple[Wanted, Sequence[Tile]]
#: Writes what this rank has, or made of what the ranks brought together. Rank-local.
Writes = Callable[[Filler], None]


class Job:
    """One export: hub files are the destinations of a plan, whose sources are live tensors or a catalog.

    A file of a directory is filled in any order, as the tensors come; a file of a store window by window. What reads elements gives
    memory that is used again for the next ones. Rank-local, but for what says that it is collective.
    """

    home: str | None = None
    """Where a stored model's own code is."""
    stem = "model"
    """The first part of the names of the model's files."""
    reads_everything = False
    """Whether each rank can read every element. Then it fills the windows of its own files alone."""

    def __init__(self, io: IOOptions) -> None:
        self.staging = Staging(io)

    def prepare(self, ranks: Ranks) -> None:
        """What must be known of all ranks' elements before the files are laid out. Collective."""

    def contents(self) -> HubTensors:
        """Hub tensors and tiles."""
        raise NotImplementedError

    def lay_out(
        self, dtype: str | None, max_shard_bytes: int, variant: str | None = None
    ) -> tuple[HubTensors, HubFiles]:
        """What each tensor becomes, and where in which file."""
        contents = self.contents()
        names = WrittenNames(stem=self.stem, variant=variant)
        return contents, lay_out(contents.hub, dtype, max_shard_bytes, names)

    def shares(self, contents: HubTensors, ranks: Ranks) -> list[Share]:
        """What this rank brings: each element comes from one rank."""
        raise NotImplementedError

    def elements(
        self, wanted: Wanted, tiles: Sequence[Tile]
    ) -> Iterable[tuple[Wanted, Destination, Sequence[Tile]]]:
        """The elements of a share that tiles are of, in parts; with each, the tiles that it fills."""
        raise NotImplementedError

    def put(self, shares: Iterable[Share], output: HubFiles, filler: Filler) -> None:
        """Write the elements of shares into the files."""
        for wanted, tiles in shares:
            for held, elements, some in self.elements(wanted, tiles):
                for tile in some:
                    write_back(transfers_of(tile, held, output.tensors), filler, elements, self.staging)

    def write(self, contents: HubTensors, output: HubFiles, filler: Filler, ranks: Ranks) -> None:
        """Write this rank's elements of all files, in any order."""
        self.put(self.shares(contents, ranks), output, filler)

    def together(self, output: HubFiles, ranks: Ranks) -> Iterable[Writes]:
        """What ranks only make together, after :meth:`write`. Every rank must go through it, and call each in one round."""
        return ()

    def share_bytes(self, contents: HubTensors, output: HubFiles, ranks: Ranks) -> int:
        """The bytes that :meth:`write` and :meth:`together` write on this rank; about, if that takes long to find out."""
        shares = [(wanted, tile) for wanted, tiles in self.shares(contents, ranks) for tile in tiles]
        found = (one for wanted, tile in shares for one in transfers_of(tile, wanted, output.tensors))
        return sum(one.numel * itemsize(one.source_dtype) for one in found)

    def windows(
        self, contents: HubTensors, output: HubFiles, ranks: Ranks
    ) -> Callable[[Window, Filler], None]:
        """What writes this rank's elements of a window."""
        return self.windows_of_shares(self.shares(contents, ranks), output)

    def windows_of_shares(
        self, shares: Iterable[Share], output: HubFiles
    ) -> Callable[[Window, Filler], None]:
        """The same, of shares. Memory: half the staging limit, for elements that are strided, cast or on a device; a part of a share."""
        brought = by_hub(shares)

        def fill(window: Window, filler: Filler) -> None:
            for key, box in window.parts:
                found = brought.get(key, ())
                self.put(((wanted, list(cut(tile, "source", box))) for wanted, tile in found), output, filler)

        return fill

    def fill_together(
        self, window: Window, owner: int, filler: Filler | None, output: HubFiles, ranks: Ranks
    ) -> None:
        """Write, on the rank ``owner``, which alone gives a filler, what ranks only make together. Collective."""

    def finish(self, ranks: Ranks) -> None:
        """Read what the windows did not read once and whole, for its digests."""

    def sums(self) -> list[int]:
        """This rank's shares of digest sums, after all is written. A live model has no recorded digests."""
        return []

    def check(self, sums: Sequence[int]) -> None:
        """Compare the digest sums of all ranks with what is recorded. Raises :class:`IntegrityError`."""

    def assets(self) -> Mapping[str, bytes]:
        """The small files next to the tensors."""
        raise NotImplementedError

    def report(self) -> Any | None:
        """What the export's report says of a source's format."""
        return None

    def close(self) -> None:
        """Close the files, if any are open."""


def by_hub(shares: Iterable[Share]) -> Mapping[str, Sequence[tuple[Wanted, Tile]]]:
    """Shares by hub tensor."""
    brought: dict[str, list[tuple[Wanted, Tile]]] = {}
    for wanted, tiles in shares:
        for tile in tiles:
            brought.setdefault(tile.source, []).append((wanted, tile))
    return brought


def brought_to(
    owner: int, nbytes: int, fill: Callable[[torch.Tensor], None], label: str, ranks: Ranks
) -> torch.Tensor | None:
    """The sum of the 64-bit words that each rank fills with its elements, on the rank ``owner``; None elsewhere. Collective."""
    cpu = torch.device("cpu")
    with ranks.agree(label):  # no rank enters a collective until all have their part
        words = torch.zeros(-(-nbytes // 8), dtype=torch.int64)
        fill(words)
        words = words.to(device_where_ranks_sum(cpu) if ranks.world_size > 1 else cpu)
    if ranks.world_size > 1 and words.numel():
        dist.reduce(words, dst=owner)
    return words.to(cpu) if ranks.rank == owner else None


def windows_of(output: HubFiles, file: str) -> Iterator[Window]:
    """The payload of a file in order, cut into windows; one that is empty if the file has none."""
    parts: list[tuple[str, Box]] = []
    start = stop = len(output.headers[file])
    for key, box, nbytes in _parts_of(output, file):
        if parts and stop + nbytes - start > WINDOW_BYTES:
            yield Window(file, start, stop, tuple(parts))
            parts, start = [], stop
        parts.append((key, box))
        stop += nbytes
    assert stop == output.sizes[file], (file, stop, output.sizes[file])
    yield Window(file, start, stop, tuple(parts))


def _parts_of(output: HubFiles, file: str) -> Iterator[tuple[str, Box, int]]:
    """The tensors of a file in its order, each in boxes whose bytes follow each other."""
    inside = [
        (t.chunks[0].offset_bytes, key) for key, t in output.tensors.items() if t.chunks[0].path == file
    ]
    for _, key in sorted(inside):
        t = output.tensors[key]
        size = itemsize(t.dtype)
        for box in contiguous_parts(whole(t.shape), WINDOW_BYTES // size):
            yield key, box, box.numel * size


# ----------------------------------------------------------------------------------------------------
# An export into a local directory: every rank fills its bytes into files of their final size, and a rename publishes them.


class ToDirectory:
    """Files of a local directory: all of them appear, or none."""

    def __init__(
        self, final: str, output: HubFiles, ranks: Ranks, counted: Operation, *, overwrite: bool
    ) -> None:
        self.final, self._output, self._ranks = final, output, ranks
        self._counted, self._overwrite = counted, overwrite
        self._temporary = ""

    def prepare(self) -> None:
        """Refuse a place where something is, and make room. Collective. Raises :class:`CheckpointError`."""
        self._temporary = self._ranks.on_first("make export directory", self._make)

    def _make(self) -> str:
        """The temporary directory, with the files in their final size."""
        _refuse_taken(self.final, overwrite=self._overwrite)
        folders = {os.path.dirname(file) for file in self._output.headers}
        path = make_temporary(self.final, sorted(filter(None, folders)))
        try:
            for file, header in self._output.headers.items():
                write_file(os.path.join(path, file), header)
                enlarge(os.path.join(path, file), self._output.sizes[file])
        except (OSError, CheckpointError) as error:
            remove_ours(path)
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"{path}: can't be created: {reason}") from error
        return path

    def write(self, job: Job, contents: HubTensors) -> int:
        """Write the tensors. Collective. Returns the payload bytes of this rank."""
        ranks, output = self._ranks, self._output
        tick = self._counted.counting(ranks.tick)
        with ranks.agree("write export"), FileFiller(self._temporary, tick) as filler:
            self._counted.guess(lambda: job.share_bytes(contents, output, ranks))
            job.write(contents, output, filler, ranks)
        together = job.together(output, ranks)
        if together == ():  # a round of agreement less
            return filler.bytes_written
        with ExitStack() as stack:
            more = stack.enter_context(FileFiller(self._temporary, tick))
            for write in together:
                with ranks.agree("write export"):
                    write(more)
            with ranks.agree("write export"):
                stack.pop_all().close()
        return filler.bytes_written + more.bytes_written

    def publish(self, assets: Mapping[str, bytes]) -> None:
        """Write index and small files, and let all of them appear. For rank 0, after every rank has written.

        Raises :class:`CheckpointError`, also if a reader would refuse the headers.
        """
        temporary, final, output = self._temporary, self.final, self._output
        for name, content in {**assets, **output.index}.items():
            make_directories(os.path.dirname(inside(temporary, name)))
            write_file(inside(temporary, name), content)
        check_readable(temporary, final, output)
        for folder in dict.fromkeys((*map(os.path.dirname, (*output.headers, *assets)), "")):
            fsync_directory(os.path.join(temporary, folder))
        publish_directory(temporary, final, overwrite=self._overwrite)

    def discard(self) -> None:
        """Delete what was written. For rank 0, after a failure since :meth:`prepare`."""
        remove_ours(self._temporary)


def make_room(final: str, folders: Sequence[str], *, overwrite: bool) -> str:
    """A temporary directory for ``final``, with these folders. Raises :class:`CheckpointError` where something is."""
    _refuse_taken(final, overwrite=overwrite)
    return make_temporary(final, folders)


def publish_directory(temporary: str, final: str, *, overwrite: bool = False) -> None:
    """Let a temporary directory appear as ``final``. With ``overwrite`` it is exchanged for an export there, which is then deleted.

    Raises :class:`CheckpointError`.
    """
    replaced = ""
    try:
        unmark(temporary)
        if not os.path.isdir(final):
            patiently(os.rename, temporary, final)
        elif not os.listdir(final):
            patiently(os.rmdir, final)
            patiently(os.rename, temporary, final)
        else:
            _refuse_taken(final, overwrite=overwrite)  # it may have changed since the start
            replaced = _exchange(temporary, final)
    except OSError as error:
        raise CheckpointError(f"{final}: can't be published: {error.strerror}") from error
    fsync_directory(os.path.dirname(final))
    if replaced:
        with contextlib.suppress(CheckpointError):  # what is left of the old export stays, and harms nothing
            mark(replaced)
        remove_ours(replaced)


def _refuse_taken(final: str, *, overwrite: bool) -> None:
    if os.path.islink(final):
        raise CheckpointError(
            f"{final}: is a symbolic link, which can't be exchanged for the finished export; give the directory "
            f"that it stands for, or a new one"
        )
    try:
        taken = os.path.lexists(final) and not (os.path.isdir(final) and not os.listdir(final))
        if not taken:
            return
        if not overwrite:
            raise CheckpointError(
                f"{final}: exists already; export into a new or empty directory, or replace an earlier export (overwrite=True; --overwrite)"
            )
        other = _not_of_an_export(final)
    except OSError as error:
        raise CheckpointError(f"{final}: can't be inspected: {error.strerror}") from error
    if other:
        raise CheckpointError(
            f"{final}: overwrite=True replaces earlier exports only, and {other}; choose another directory, or delete this one yourself"
        )


def _not_of_an_export(final: str) -> str | None:
    """Why a directory can't be an earlier export, so that it must not be deleted; None if it looks like one.

    An export has weights at its top or in the folders of adapters, and neither checkpoints nor repositories.
    """
    if not os.path.isdir(final):
        return "it is not a directory"
    weights = False
    for folder, folders, files in os.walk(final):
        relative = os.path.relpath(folder, final)
        if found := {MANIFEST_NAME, NOTE_NAME, ".git"} & {*folders, *files}:
            return f"{os.path.join(relative, found.pop())} is not part of one"
        weights = weights or any(name.endswith(".safetensors") for name in files)
        if relative.count(os.sep) > 3:
            return f"it has folders as deep as {relative}"
    return None if weights else "it contains no weights"


def _exchange(new: str, old: str) -> str:
    """Let two directories change their names at once; returns the path that the old one has then. Raises ``OSError``.

    File systems without that call (NFS among them) take two renames: for an instant, ``old`` is missing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if libc.renameat2(here, os.fsencode(new), here, os.fsencode(old), exchange) == 0:
        return new
    reason = ctypes.get_errno()
    if reason not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(reason, os.strerror(reason))
    aside = make_temporary(old, [])
    unmark(aside)
    patiently(os.rename, old, aside)
    patiently(os.rename, new, old)
    return aside


# ----------------------------------------------------------------------------------------------------
# Adapters of a live model, full-size, in the files that ``PeftModel.save_pretrained`` writes, or a diffusers pipeline's ``save_lora_weights``.


def chosen_adapters(peft: Any, wanted: str | Sequence[str] | None) -> list[str]:
    """The names that the caller gave, or all of the model's. Raises :class:`ValueError` for one it does not have."""
    there = list(peft.peft_config)
    names = there if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    unknown = [name for name in names if name not in there]
    if unknown or not names:
        raise ValueError(
            f"adapters={wanted!r}: the model has the adapters {', '.join(map(repr, there))}; give one or several"
        )
    return names


def _folder(adapter: str) -> str:
    """Where PEFT's ``save_pretrained`` puts an adapter, inside the directory."""
    return "" if adapter == "default" else adapter


def lay_out_adapters(
    live: LiveModel, adapters: Sequence[str], dtype: str | None
) -> tuple[HubTensors, HubFiles]:
    """One file for each adapter: which bytes of it each tensor of the model is. Rank-local, pure.

    ``dtype`` is the stored dtype of floating-point tensors; None: as they are. Base embeddings are stored next to an adapter as
    with PEFT's ``save_embedding_layers="auto"``.
    """
    peft: Any = adapted_model(live.root)
    is_of_diffusers = is_diffusers_model(peft)
    metadata = {}
    hub: dict[str, TensorSpec] = {}
    tiles: dict[str, list[Tile]] = {}
    files = {}
    for adapter in adapters:
        held = adapter_in_file(live, adapter, embeddings=embeddings_to_save(peft, adapter))
        own = {n: live.spec(t) for n, t in held.items()}
        specs = specs_in(own, dtype)
        file = os.path.join(_folder(adapter), LORA_NAME if is_of_diffusers else WEIGHTS_NAME)
        if is_of_diffusers:
            metadata[file] = lora_metadata(peft, adapter_configs(peft)[adapter])
        files[file] = {f"{adapter}:{stored}": (stored, spec) for stored, spec in specs.items()}
        for stored, spec in own.items():
            hub[f"{adapter}:{stored}"] = spec
            if math.prod(spec.shape):
                tile = identity(f"{adapter}:{stored}", spec.shape)
                tiles.setdefault(held[stored].name, []).append(tile)
    return HubTensors(hub, {n: tuple(found) for n, found in tiles.items()}), _filled(files, metadata)


def adapter_in_file(
    live: LiveModel, adapter: str, *, embeddings: bool | Literal["auto"] = False
) -> dict[str, NamedTensor]:
    """The tensors that are stored for an adapter, by their names in its file. ``embeddings``: as for :func:`.adapter_tensors`."""
    peft = adapted_model(live.root)
    prefix = f"{lora_prefix(peft)}." if peft is not None and is_diffusers_model(peft) else ""
    found = adapter_tensors(live, adapter, embeddings=embeddings)
    return {f"{prefix}{stored}": t for stored, (_, t) in found.items()}


def adapter_assets(peft: Any, adapters: Sequence[str]) -> dict[str, bytes]:
    """The config of each adapter, by file name. For a model of diffusers, it is in the metadata of the weights."""
    if is_diffusers_model(peft):
        return {}
    return {
        os.path.join(_folder(adapter), CONFIG_NAME): json.dumps(
            stored_config(peft, adapter), indent=2, sort_keys=True
        ).encode()
        for adapter in adapters
    }


# ----------------------------------------------------------------------------------------------------
# An export into a store, where no file can be filled in place: each file has one rank, which writes it from front to back.
#
# Of a live model every rank has a part of each tensor: they are brought to the file's rank window by window, by an integer sum, as
# :mod:`.hub` does. Of a stored model each rank reads what its own files need.


class ToStore:
    """As :class:`ToDirectory`, below a URL. Memory: two windows of 32 MiB, and what :class:`.ObjectWriter` takes."""

    def __init__(self, url: str, output: HubFiles, ranks: Ranks, counted: Operation) -> None:
        self.final, self._output, self._ranks, self._counted = url, output, ranks, counted
        self._writer: ObjectWriter | None = None  # of the file that this rank writes
        self._bytes_written = 0

    def prepare(self) -> None:
        self.final = self._ranks.on_first("claim the URL of the export", self._claim)

    def _claim(self) -> str:
        if patiently(exists, self.final):
            raise CheckpointError(f"{self.final}: exists already; export to a new or empty prefix")
        claim(self.final)
        return self.final

    def write(self, job: Job, contents: HubTensors) -> int:
        ranks, output = self._ranks, self._output
        with ranks.agree("write export"):
            own = self._windows_of(ranks.rank)
            self._counted.expect(lambda: sum(window.nbytes for window in own))
            fill = job.windows(contents, output, ranks)
            for window in self._windows_of(ranks.rank) if job.reads_everything else ():
                words = torch.zeros(-(-window.nbytes // 8), dtype=torch.int64)
                fill(window, _Memory(window, words))
                self._append(window, words)
        if not job.reads_everything:
            self._gather(job, fill)
        with ranks.agree("write export"):
            job.finish(ranks)
        return self._bytes_written

    def _windows_of(self, rank: int) -> Iterator[Window]:
        """The windows of the files that a rank writes, in order."""
        for file in list(self._output.headers)[rank :: self._ranks.world_size]:
            yield from windows_of(self._output, file)

    def _gather(self, job: Job, fill: Callable[[Window, Filler], None]) -> None:
        """Bring the ranks' elements together. In each turn every rank gets a window of its own, and then all write theirs."""
        ranks = self._ranks
        for turn in zip_longest(*(self._windows_of(rank) for rank in range(ranks.world_size))):
            own: tuple[Window, torch.Tensor] | None = None
            for rank, window in enumerate(turn):
                if window is None:
                    continue
                words = brought_to(
                    rank,
                    window.nbytes,
                    lambda words, window=window: fill(window, _Memory(window, words)),  # type: ignore[misc]
                    "gather for the store",
                    ranks,
                )
                into = None if words is None else _Overlap(window, words)
                job.fill_together(window, rank, into, self._output, ranks)
                if words is not None:
                    own = window, words
                del words
            with ranks.agree("write export"):
                if own is not None:
                    self._append(*own)

    def _append(self, window: Window, words: torch.Tensor) -> None:
        """Append a window to its object, which appears with its last one."""
        header, nbytes = self._output.headers[window.file], self._output.sizes[window.file]
        if window.start == len(header):
            path = inside(self.final, window.file)
            self._writer = ObjectWriter(path, self._ranks.tick, expected_bytes=nbytes)
            self._writer.write(header)
        assert self._writer is not None
        self._writer.write(words.view(torch.uint8).numpy().data[: window.nbytes])
        self._bytes_written += window.nbytes
        self._counted.add(window.nbytes)
        if window.stop == nbytes:
            self._writer.close()
            self._writer = None

    def publish(self, assets: Mapping[str, bytes]) -> None:
        url, output = self.final, self._output
        for file, nbytes in output.sizes.items():
            found = patiently(stat_of, join(url, file))
            if found is None or found.nbytes != nbytes:
                got = "there is none" if found is None else f"it has {found.nbytes} bytes"
                raise CheckpointError(f"{join(url, file)}: was written with {nbytes} bytes, but {got}")
        small = {**assets, **output.index}
        last = (*LAST, *output.index)
        for name in sorted(small, key=lambda name: last.index(name) if name in last else -1):
            write_file(inside(url, name), small[name])
        check_readable(url, url, output)
        release(url)

    def discard(self) -> None:
        if discard_in_store(self.final):
            release(self.final)


class _Memory:
    """As :class:`.Filler`: takes the bytes of one window."""

    def __init__(self, window: Window, words: torch.Tensor) -> None:
        self._window, self._view = window, memoryview(words.view(torch.uint8).numpy().data)

    def write_at(self, name: str, offset_bytes: int, view: memoryview) -> None:
        at = offset_bytes - self._window.start
        assert name == self._window.file
        assert 0 <= at <= self._window.nbytes - view.nbytes
        self._view[at : at + view.nbytes] = view


class _Overlap(_Memory):
    """As :class:`.Filler`: of the bytes that it is given, takes those of one window."""

    def write_at(self, name: str, offset_bytes: int, view: memoryview) -> None:
        at = offset_bytes - self._window.start
        first, last = max(0, -at), min(view.nbytes, self._window.nbytes - at)
        if name == self._window.file and first < last:
            super().write_at(name, offset_bytes + first, view[first:last])
