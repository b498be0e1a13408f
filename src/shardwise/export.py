"""``export_hf``: a live model or a stored checkpoint as a hub-format directory, written by all ranks in place.

The same transfers as a load, with output files as the far side: every rank computes where its boxes lie in
the final files and writes them there. Nobody gathers, nobody holds a whole model.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ._peft import has_adapters
from .catalog import Catalog, StoredTensor
from .catalog.manifest import read_manifest
from .catalog.open import open_catalog
from .catalog.slices import SliceTensor, assign_owners, owner_ranks
from .dist import Ranks
from .dtypes import code_of, itemsize, torch_dtype
from .errors import CheckpointError, FormatError, IntegrityError
from .layout.boxes import Box, LocalBox
from .layout.model import geometries_of, local_tensor, reshard, wanted_of
from .layout.wanted import Wanted, contiguous_strides
from .model_class import import_code, in_turn
from .names import named_tensors, unwrap
from .place.copy import Destination, FileFiller, Staging, execute, write_back
from .plan import IOOptions
from .plan.build import transfers_of
from .pretrained import build_meta
from .proof.digest import finish, partial_sum
from .proof.stored import pieces
from .read import FileReader
from .recipe.match import Recipe
from .recipe.record import recall
from .recipe.tiles import Tile, identity, invert
from .recipe.transformers import hub_rules, is_transformers_model, meta_instance, reverse_tiles
from .store.companions import ADAPTERS_NAME, companion_files, read_companions
from .store.hub_files import HubFiles, lay_out, prepare_files, publish_files

__all__ = ["Contents", "ExportReport", "LiveJob", "export_hf", "write_out"]

_NO_HUB_FORMAT = (
    "has no hub format: write the adapters of the live model with "
    "shardwise.integrations.peft.save_adapter(model, directory); the base is what it was loaded from"
)


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The outcome of an export on this rank."""

    path: str
    files: tuple[str, ...]
    tensors: int
    total_bytes: int
    """Payload bytes of all files."""
    bytes_written: int
    """Payload bytes that this rank wrote."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Contents:
    """What to export: hub tensors by name with dtype and shape, and which tiles of them each module tensor holds.

    A tile's source is a hub tensor, its target a module tensor: the load's tiles, run the other way.
    """

    hub: dict[str, tuple[str, tuple[int, ...]]]
    tiles: dict[str, tuple[Tile, ...]]


def export_hf(
    model_or_path: nn.Module | str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = 5 * 1024**3,
    trust_remote_code: bool = False,
    io: IOOptions | None = None,
) -> ExportReport:
    """Write a model in hub format: hub names, index, config, tokenizer and own code if known; ties once.

    Args:
        model_or_path: a live (sharded) model, a checkpoint directory, or a safetensors directory.
        out_dir: must not exist, or be empty. It appears complete or not at all.
        dtype: floating-point tensors are written in it. Default: as they are.
        max_shard_bytes: payload per file, unless one tensor is larger.
        trust_remote_code: of a checkpoint, run the Python files that its model brings for its classes: they
            know the hub's names. Others need none.

    Every rank of the default process group must call it; each writes its own bytes at precomputed
    offsets of the final files. What is read of a checkpoint is compared with its recorded digests before
    anything appears. Memory: staging only. Raises :class:`CheckpointError`, :class:`SourceError`
    (:class:`IntegrityError` for content that differs), :class:`RankError` alike on every rank.
    """
    started = time.perf_counter()
    io = io or IOOptions()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    final = os.path.abspath(out_dir)
    if trust_remote_code and not isinstance(model_or_path, nn.Module):
        in_turn(ranks, lambda: import_code(model_or_path))
    with ranks.agree("plan export"):
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
        job: LiveJob | _StoredJob = (
            LiveJob(model_or_path)
            if isinstance(model_or_path, nn.Module)
            else _StoredJob(model_or_path, trust_remote_code)
        )
        contents = job.contents()
        output = lay_out(contents.hub, _dtype_code(dtype), max_shard_bytes)
        companions = job.companions(_dtype_code(dtype)) if ranks.rank == 0 else {}
    written = write_out(job, contents, output, companions, final, ranks, io)
    return ExportReport(
        final,
        tuple(output.headers),
        len(output.tensors),
        output.total_bytes,
        written,
        time.perf_counter() - started,
    )


def write_out(
    job: LiveJob | _StoredJob,
    contents: Contents,
    output: HubFiles,
    companions: Mapping[str, bytes],
    final: str,
    ranks: Ranks,
    io: IOOptions,
) -> int:
    """Everything after planning: the files appear at ``final`` complete or not at all. Returns this rank's bytes."""
    temporary = prepare_files(final, output, ranks)
    try:
        with ranks.agree("write export"), FileFiller(temporary, ranks.tick) as filler:
            sums = job.write(contents, output, filler, Staging(io), ranks)
        written = filler.bytes_written
        gathered = ranks.gather("bytes exported", np.array([written, *sums], dtype=np.uint64).tobytes())
        with ranks.agree("publish export"):
            if gathered is not None:
                stacked = np.stack([np.frombuffer(g, dtype=np.uint64) for g in gathered])
                total, *sums = map(int, stacked.sum(axis=0, dtype=np.uint64))
                job.check(sums)
                publish_files(temporary, final, output, companions, total)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return written


def _dtype_code(dtype: torch.dtype | str | None) -> str | None:
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype must be a floating-point torch dtype or its name, got {dtype!r}")
    return code_of(found)


class LiveJob:
    """Export of a live model: every rank writes the boxes that it owns."""

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        self._model = model
        ignored = set(getattr(unwrap(model), "_keys_to_ignore_on_save", None) or ())
        self._named = {t.name: t for t in named_tensors(model) if t.persistent and t.name not in ignored}

    def _kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {n: (code_of(t.tensor.dtype), tuple(t.tensor.shape)) for n, t in self._named.items()}

    def contents(self) -> Contents:
        if has_adapters(self._model):
            raise CheckpointError(f"a model with PEFT adapters {_NO_HUB_FORMAT}")
        origin = recall(self._model)
        if origin is not None:
            return _inverted(self._kinds(), origin.recipes, origin.shapes)
        if is_transformers_model(unwrap(self._model)):
            return _reverted(meta_instance(self._model), self._kinds())
        return _as_named(self._kinds())

    def write(
        self, contents: Contents, output: HubFiles, filler: FileFiller, staging: Staging, ranks: Ranks
    ) -> list[int]:
        geometries = geometries_of(self._model, self._named.values())
        owned = assign_owners([SliceTensor(n, c, s, geometries[n]) for n, (c, s) in self._kinds().items()])
        destination = Destination({n: local_tensor(t.tensor) for n, t in self._named.items()})
        for t in owned:
            if ranks.rank not in owner_ranks(t.geometry, t.owner):
                continue
            wanted = wanted_of(t.name, self._named[t.name].tensor, t.geometry)
            for tile in contents.tiles.get(t.name, ()):
                write_back(transfers_of(tile, wanted, output.tensors), filler, destination, staging)
        return []

    def check(self, sums: Sequence[int]) -> None:
        """Nothing was read."""

    def companions(self, dtype: str | None) -> dict[str, bytes]:
        return _with_dtype(companion_files(self._model), dtype)


class _StoredJob:
    """Export of a stored checkpoint: ranks share the tensors, piece by piece, through staging."""

    def __init__(self, path: str | os.PathLike[str], trust_remote_code: bool) -> None:
        self._path = os.fspath(path)
        self._trust_remote_code = trust_remote_code
        self._catalog: Catalog = open_catalog(self._path)

    def contents(self) -> Contents:
        kinds = {n: (t.dtype, t.shape) for n, t in self._catalog.tensors.items()}
        if self._catalog.kind == "checkpoint" and os.path.isfile(
            os.path.join(self._path, "model", ADAPTERS_NAME)
        ):
            raise CheckpointError(
                f"{self._path}: the checkpoint of a model with PEFT adapters {_NO_HUB_FORMAT}"
            )
        config = os.path.join(self._path, "model", "config.json")
        if self._catalog.kind != "checkpoint" or not os.path.isfile(config):
            return _as_named(kinds)
        manifest = read_manifest(self._path)
        model = build_meta(self._path, self._catalog, trust_remote_code=self._trust_remote_code)
        shapes = manifest.hub_tensors.get("model")
        if shapes is None:
            return _reverted(model, kinds)
        # The tensors that it was loaded from, run through the class's conversions once more.
        stored = {n: StoredTensor(n, _any_dtype(kinds), s, ()) for n, s in shapes.items()}
        by_name = {alias: n for n, t in manifest.models["model"].items() for alias in (n, *t.aliases)}
        recipes = {
            by_name[made.target]: Recipe(
                by_name[made.target], made.tiles, empty=() if made.tiles else made.sources
            )
            for made in reversed(hub_rules(model).resolve(stored))
            if made.target in by_name
        }
        return _inverted(kinds, recipes, shapes)

    def write(
        self, contents: Contents, output: HubFiles, filler: FileFiller, staging: Staging, ranks: Ranks
    ) -> list[int]:
        """Returns this rank's share of the digest sum of each tensor that has a recorded digest."""
        sums = dict.fromkeys(self._recorded(), 0)
        with FileReader(ranks.tick) as reader:
            for name, box in _share_of(self._catalog, staging.limit_bytes // 2, ranks):
                tiles = contents.tiles.get(name, ())
                piece = self._write_piece(name, box, tiles, output, filler, reader, staging)
                if name in sums:
                    sums[name] = (sums[name] + partial_sum(piece, box.start)) % 2**64
        return list(sums.values())

    def check(self, sums: Sequence[int]) -> None:
        """Compare what all ranks read with the recorded digests. Raises :class:`IntegrityError`."""
        wrong = []
        for name, total in zip(self._recorded(), sums, strict=True):
            stored = self._catalog.tensors[name]
            if finish(total, stored.dtype, stored.shape) != self._catalog.digests[name]:
                wrong.append(name)
        if wrong:
            more = f" and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            raise IntegrityError(
                f"content of {len(wrong)} tensors differs from what was saved: {', '.join(wrong[:20])}{more}; nothing "
                f"was exported. Take another step, or see what 'shardwise verify' says of this one",
                path=self._path,
            )

    def _recorded(self) -> list[str]:
        """Tensors with a digest, in one order on all ranks."""
        return [name for name in self._catalog.tensors if name in self._catalog.digests]

    def _write_piece(
        self,
        name: str,
        box: Box,
        tiles: Sequence[Tile],
        output: HubFiles,
        filler: FileFiller,
        reader: FileReader,
        staging: Staging,
    ) -> torch.Tensor:
        """Returns the piece as it was read."""
        stored = self._catalog.tensors[name]
        piece = torch.empty(box.sizes, dtype=torch_dtype(stored.dtype))
        held = (LocalBox(box, (0,) * len(box.start)),)
        strides = contiguous_strides(box.sizes)
        wanted = Wanted(name, stored.dtype, stored.shape, held, box.sizes, strides)
        destination = Destination({name: piece})
        here = identity(name, stored.shape)
        execute(list(transfers_of(here, wanted, self._catalog.tensors)), reader, destination, staging)
        for tile in tiles:
            write_back(transfers_of(tile, wanted, output.tensors), filler, destination, staging)
        return piece

    def companions(self, dtype: str | None) -> dict[str, bytes]:
        folder = (
            os.path.join(self._path, "model") if self._catalog.kind == "checkpoint" else self._catalog.root
        )
        return _with_dtype(read_companions(folder), dtype)


def _any_dtype(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return next((code for code, _ in kinds.values()), "F32")


def _as_named(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> Contents:
    """Module tensors under their own names."""
    return Contents(dict(kinds), {n: (identity(n, shape),) for n, (_, shape) in kinds.items()})


def _reverted(meta_model: Any, kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> Contents:
    """Module tensors as the library's own reverse transforms name and shape them for the hub."""
    hub, tiles = {}, {n: [] for n in kinds}  # type: ignore[var-annotated]
    for made in reverse_tiles(meta_model, kinds):
        hub[made.target] = (made.dtype, made.shape)
        for tile in made.tiles:
            tiles[tile.source].append(invert(tile, made.target))
    return _checked(Contents(hub, {n: tuple(found) for n, found in tiles.items()}))


def _inverted(
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
    recipes: Mapping[str, Recipe],
    shapes: Mapping[str, tuple[int, ...]],
) -> Contents:
    """Module tensors as the tensors that they were loaded from; what was initialised keeps its own name."""
    hub: dict[str, tuple[str, tuple[int, ...]]] = {}
    tiles = {}
    for name, (code, shape) in kinds.items():
        recipe = recipes.get(name)
        tiles[name] = recipe.tiles if recipe is not None else (identity(name, shape),)
        for source in recipe.empty if recipe is not None else ():
            hub[source] = (code, tuple(shapes[source]))
        for tile in tiles[name]:
            known = hub.setdefault(tile.source, (code, tuple(shapes.get(tile.source, shape))))
            if known[0] != code:
                raise FormatError(
                    f"{tile.source!r} would be written from tensors of dtypes {known[0]} and {code}"
                )
    return _checked(Contents(hub, tiles))


def _checked(contents: Contents) -> Contents:
    """Every element of every hub tensor is written once. Raises :class:`FormatError` naming those that are not."""
    held: Counter[str] = Counter()
    for found in contents.tiles.values():
        for tile in found:
            held[tile.source] += tile.numel
    wrong = [n for n, (_, shape) in contents.hub.items() if held[n] != math.prod(shape)]
    if wrong:
        raise FormatError(
            f"{len(wrong)} tensors can't be given back whole, because the model holds only parts of them: "
            f"{', '.join(wrong[:5])}"
        )
    return contents


def _share_of(catalog: Catalog, limit_bytes: int, ranks: Ranks) -> Sequence[tuple[str, Box]]:
    """The pieces of all tensors that one rank copies: a contiguous share of the bytes."""
    found = []
    total = max(1, catalog.nbytes)
    done = 0
    for name, stored in catalog.tensors.items():
        size = itemsize(stored.dtype)
        for start, sizes, _ in pieces((0,) * len(stored.shape), stored.shape, limit_bytes // size):
            if done * ranks.world_size // total == ranks.rank:
                found.append((name, Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))))
            done += math.prod(sizes) * size
    return found


def _with_dtype(files: Mapping[str, bytes], dtype: str | None) -> dict[str, bytes]:
    """The files with the dtype of config.json, a JSON object, set to what is written."""
    found = dict(files)
    if dtype is not None and "config.json" in found:
        config = json.loads(found["config.json"])
        config.pop("torch_dtype", None)
        config["dtype"] = str(torch_dtype(dtype)).removeprefix("torch.")
        found["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return found
