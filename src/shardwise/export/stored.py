"""Exports of stored models: ranks share the tensors, piece by piece, through staging."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..catalog.checkpoint import catalog_of_checkpoint, check_size, directory, model_named, refuse_referred
from ..catalog.megatron import without_padding
from ..catalog.open import open_catalog
from ..catalog.quantized import method_of_config
from ..catalog.records import Catalog, StoredTensor
from ..catalog.weights import stem_of
from ..digests import finish, partial_sum
from ..dtypes import itemsize, torch_dtype
from ..engine.engine import Destination, Filler, Staging, read_recipe, wanted_box, write_back
from ..engine.files import page_cache_for
from ..engine.objects import SourceReader
from ..errors import CheckpointError, IntegrityError, SourceError
from ..format.manifest import MANIFEST_NAME, Manifest, read_manifest
from ..internals.diffusers import is_diffusers_model
from ..internals.peft import adapted_model, config_of
from ..limits import brief, inside, parse_json, read_small
from ..loading.adapters import attach
from ..loading.pretrained import build_meta
from ..models.build import refuse_source
from ..models.classes import config_and_class
from ..models.homes import ADAPTERS_NAME, read_assets
from ..models.hub import documents_of
from ..objects import frozen
from ..planning.hub_rules import hub_rules
from ..planning.match import Recipe
from ..planning.plan import IOOptions, transfers_of
from ..ranks.ranks import Ranks
from ..runs.run import StoredModel, as_config_says, as_stored, has_module_names
from ..storage import is_directory, is_file, looking_once
from ..storage.records import is_url
from ..tensors.boxes import Box, TensorSpec, Wanted, contiguous_parts, whole
from ..tensors.live import LiveModel, describe
from ..tensors.tiles import Tile, bounds, cut, is_dense
from .write import (
    HubFiles,
    HubTensors,
    Job,
    Share,
    Window,
    adapter_assets,
    as_named,
    by_hub,
    chosen_adapters,
    inverted,
    lay_out_adapters,
    reverted,
    windows_of,
)

# ----------------------------------------------------------------------------------------------------
# Export of a stored model: ranks share the tensors, piece by piece, through staging.


def share_of(specs: Mapping[str, TensorSpec], limit_bytes: int, ranks: Ranks) -> Sequence[tuple[str, Box]]:
    """The pieces of all tensors that one rank copies: a contiguous share of the bytes."""
    found = []
    total = max(1, sum(spec.nbytes for spec in specs.values()))
    done = 0
    for name, (dtype, shape) in specs.items():
        size = itemsize(dtype)
        for box in contiguous_parts(whole(shape), limit_bytes // size):
            if done * ranks.world_size // total == ranks.rank:
                found.append((name, box))
            done += box.numel * size
    return found


_log = logging.getLogger(__name__)


@frozen
class Names:
    """The names of a stored tensor. Implements :class:`.Named`."""

    names: tuple[str, ...]


class StoredJob(Job):
    """Export of a stored model. Into a store, each element is read once, but those of tensors that windows cut across: their bounds are
    read for each window, and once more for the digest.

    Opens its files at the start, as many as the process may have open, so a run that deletes the checkpoint meanwhile
    does no harm. Raises :class:`CheckpointError` if the run was faster.
    """

    reads_everything = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: str | None,
        config: str | os.PathLike[str] | None,
        trust_remote_code: bool,
        on_progress: Callable[[int], None],
        io: IOOptions,
        adapters: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(io)
        self._wanted = adapters
        self._adapted: Any = None
        """The live model on meta, of a checkpoint with PEFT adapters, and the adapters to export."""
        self.piece_bytes = self.staging.limit_bytes // 2
        """Of a tensor, so much is read at a time."""
        self._path = os.fspath(path)
        self._config = None if config is None else os.fspath(config)
        self._trust_remote_code = trust_remote_code
        self._io = io
        self._room = Staging(io)
        self._manifest: Manifest | None = None
        self._model = "model"
        try:
            with looking_once(self._path):
                self._catalog = self._open(model)
        except SourceError as error:
            raise self._unless_deleted(error) from error
        cache = page_cache_for(io, ())
        self._files = SourceReader(on_progress, files=self._catalog.files, io=io, page_cache=cache)
        try:
            self._files.hold(f.path for f in self._catalog.files)
            if is_url(self.home):
                self._config = documents_of(self.home, with_code=trust_remote_code)
            self._documents = read_assets(self.home) if os.path.isdir(self.home) else {}
        except SourceError as error:
            self._files.close()
            raise self._unless_deleted(error) from error
        config_json = json.loads(self._documents.get("config.json", "{}"))
        self.stem = stem_of(config_json)
        if isinstance(tokens := config_json.get("vocab_size"), int):
            self._catalog = without_padding(self._catalog, ((name, tokens) for name in self._catalog.tensors))
        self._stored: StoredModel = as_stored(self._catalog)
        self._sums = {name: 0 for name in self._catalog.tensors if name in self._catalog.digests}
        self._summed_in_parts: Collection[str] = ()
        """Tensors whose digest sums are those of what windows read."""

    def _open(self, model: str | None) -> Catalog:
        if not is_file(os.path.join(self._path, MANIFEST_NAME)):
            return open_catalog(self._path, model)
        self._manifest = read_manifest(self._path)
        self._model = model_named(self._manifest, model, self._path)
        catalog = catalog_of_checkpoint(self._path, self._model, manifest=self._manifest)
        if not self._has_adapters:
            refuse_referred(catalog, "an export")
        for file in catalog.files:
            check_size(file.path, file.nbytes)
        return catalog

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    @property
    def home(self) -> str:  # type: ignore[override]
        """The directory of the config and the other assets."""
        if self._config is not None:
            return self._config
        if self._manifest is not None:
            return inside(self._path, directory("model", self._model))
        return self._path if is_directory(self._path) else os.path.dirname(self._path)

    def _unless_deleted(self, error: SourceError) -> Exception:
        """The error to raise when reading fails: a clearer one if the whole checkpoint was deleted."""
        if self._manifest is None or is_url(self._path):
            return error
        if os.path.exists(os.path.join(self._path, MANIFEST_NAME)):
            return error
        return CheckpointError(
            f"{self._path}: was deleted while it was being read; a running Checkpointer deletes old steps. Take a newer step, or "
            f"let the run keep this one (keep_last, keep_every)"
        )

    def refuse_codes(self) -> None:
        """Codes stay what they are in any dtype, their scales would not. Raises :class:`UnsupportedConversionError`."""
        config = json.loads(self._documents.get("config.json", "{}"))
        if not has_module_names(self._catalog) or method_of_config(config):
            refuse_source(self._catalog)

    def _refuse_blocks(self) -> None:
        """A checkpoint of a 4-bit base: its blocks are no tensors of any hub format. Raises :class:`CheckpointError`."""
        if self._manifest is None or not method_of_config(json.loads(self._documents["config.json"])):
            return
        blocks = [n for n, spec in self._stored.specs.items() if spec.dtype == "U8" and n.endswith(".weight")]
        if blocks:
            raise CheckpointError(
                f"{self._path}: holds weights in 4-bit blocks ({blocks[0]} and {len(blocks) - 1} more), which can't be exported in Hugging Face format: "
                f"load_pretrained({self._path!r}, quantized='keep'), and export the live model, which dequantizes them"
            )

    def lay_out(
        self, dtype: str | None, max_shard_bytes: int, variant: str | None = None
    ) -> tuple[HubTensors, HubFiles]:
        if self._has_adapters:
            if variant is not None:
                raise ValueError("variant= names the files of a model; adapters are written without one")
            live = self._on_meta_with_adapters()
            peft = adapted_model(live.root)
            self._adapted = peft, chosen_adapters(peft, self._wanted)
            contents, output = lay_out_adapters(live, self._adapted[1], dtype)
            self._only(contents.tiles)
            return contents, output
        if self._wanted is not None:
            raise ValueError(f"adapters= needs a model with PEFT adapters; {self._path} has none")
        if dtype is not None:
            self.refuse_codes()
        return super().lay_out(dtype, max_shard_bytes, variant)

    @property
    def _adapters_file(self) -> str:
        return f"{directory('model', self._model)}/{ADAPTERS_NAME}"

    @property
    def _has_adapters(self) -> bool:
        return self._manifest is not None and self._adapters_file in self._manifest.files

    def _on_meta_with_adapters(self) -> LiveModel:
        """The model on meta, in the stored dtypes. Raises :class:`CheckpointError` if the base's config isn't there."""
        if "config.json" not in self._documents:
            raise CheckpointError(
                f"{self._path}: the config of the adapters' base isn't in the checkpoint, which an earlier version wrote: pass the base's directory as "
                "config= (--config)"
            )
        file = inside(self._path, self._adapters_file)
        found = parse_json(read_small(file, "adapters"), file, "adapters")
        config = None
        if method_of_config(json.loads(self._documents["config.json"])):  # adapters don't depend on it
            config, _ = config_and_class(self.home, None, None, trust_remote_code=self._trust_remote_code)
            del config.quantization_config
        base = build_meta(self.home, config=config, trust_remote_code=self._trust_remote_code)
        model, _ = attach(base, {name: config_of(fields) for name, fields in found.items()})
        live = describe(model)
        specs = self._stored.specs
        for tensor in live.stored:
            if tensor.name in specs and tensor.tensor.is_meta:
                dtype = torch_dtype(specs[tensor.name].dtype)
                if tensor.tensor.dtype != dtype and dtype.is_floating_point:
                    tensor.tensor.data = tensor.tensor.data.to(dtype)
        return live

    def _only(self, names: Collection[str]) -> None:
        """Read nothing but these tensors. Raises :class:`CheckpointError` if the checkpoint lacks one."""
        if lacking := [name for name in names if name not in self._stored.specs]:
            if (
                set(lacking) <= self._catalog.referred.keys()
            ):  # embeddings, which PEFT stores with an adapter of theirs
                refuse_referred(self._catalog, "an export of adapters with tensors of the base")
            raise CheckpointError(
                f"{self._path}: lacks {len(lacking)} tensors of its adapters: {brief(', '.join(lacking))}"
            )
        specs = {name: self._stored.specs[name] for name in names}
        self._stored = replace(self._stored, specs=specs)
        self._sums = {name: 0 for name in self._sums if name in names}

    def contents(self) -> HubTensors:
        """As :meth:`.Job.contents`. Builds the model on meta where its class knows the hub's names."""
        specs = self._stored.specs
        if "config.json" not in self._documents:
            return as_named(specs)
        self._refuse_blocks()
        if self._manifest is None and not has_module_names(self._catalog):
            return as_named(specs)
        model = self._on_meta()
        if self._manifest is None:
            found = self._stored = as_config_says(self._catalog, model, self._io)
            if found.prefix and found.unused and Ranks.current().rank == 0:
                _log.warning(
                    "%s: left out everything that isn't in %r: %s",
                    self._path,
                    found.prefix,
                    brief(", ".join(found.unused)),
                )
            return reverted(model, self._stored.specs)
        shapes = self._manifest.hub_tensors.get(self._model)
        if shapes is None or is_diffusers_model(model):
            return reverted(model, specs)
        # Run the class's conversions once more over the tensors that the model was loaded from.
        any_dtype = next((spec.dtype for spec in specs.values()), "F32")
        stored = {n: StoredTensor(n, any_dtype, s, ()) for n, s in shapes.items()}
        by_name = {alias: tied.names[0] for tied in self.named() for alias in tied.names}
        recipes = {
            by_name[made.target]: Recipe(
                by_name[made.target], made.tiles, empty=() if made.tiles else made.sources
            )
            for made in reversed(hub_rules(model).resolve(stored))
            if made.target in by_name
        }
        return inverted(specs, recipes, shapes)

    def _on_meta(self) -> Any:
        return build_meta(self.home, self._catalog, trust_remote_code=self._trust_remote_code)

    def named(self) -> list[Names]:
        """The names of each tensor: its own, then those of ties."""
        if self._manifest is not None:
            return [Names((n, *t.aliases)) for n, t in self._manifest.models[self._model].items()]
        return [Names((n, *self._stored.aliases.get(n, ()))) for n in self._stored.specs]

    def copies(self, contents: HubTensors, stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tile]]:
        """Tiles of tied tensors in further copies, which a source that holds ``stored`` has of them; by tensor."""
        tied = {alias: found.names[0] for found in self.named() if found.names[1:] for alias in found.names}
        if not tied or "config.json" not in self._documents:
            return
        for made in hub_rules(self._on_meta()).resolve(stored):
            name = tied.get(made.target)
            if name in contents.tiles and not any(tile.source in contents.hub for tile in made.tiles):
                yield from ((name, tile) for tile in made.tiles)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Dtype and shape of each stored tensor."""
        return self._stored.specs

    def shares(self, contents: HubTensors, ranks: Ranks) -> list[Share]:
        return [
            (wanted_box(name, *self.specs[name], box), contents.tiles.get(name, ()))
            for name, box in share_of(self.specs, self.piece_bytes, ranks)
        ]

    def whole(self, wanted: Wanted) -> Destination:
        """The elements of a share, whose digests are summed up. To be called once for each."""
        return self._read(wanted, wanted.name in self._sums)

    def elements(
        self, wanted: Wanted, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Wanted, Destination, Sequence[Tile]]]:
        """Reads what each tile has of the share, and what is between its elements."""
        for tile in tiles:
            box = wanted.boxes[0].box.intersect(bounds(tile, "target")) if tile.numel else None
            if box is None:
                continue
            most = self.piece_bytes // itemsize(wanted.dtype)
            for piece in contiguous_parts(box, most):
                held = wanted_box(wanted.name, wanted.dtype, wanted.shape, piece)
                yield held, self._read(held, wanted.name in self._summed_in_parts), (tile,)

    def _read(self, wanted: Wanted, is_summed: bool) -> Destination:
        """The elements of a :func:`.wanted_box`, in memory that the next call uses again."""
        recipe, stored = self._stored.recipes[wanted.name], self._stored.catalog.tensors
        try:
            piece = read_recipe(wanted, recipe, stored, self._files, self.staging, self._room)
        except SourceError as error:
            raise self._unless_deleted(error) from error
        if is_summed:
            total = partial_sum(piece, wanted.boxes[0].box.start)
            self._sums[wanted.name] = (self._sums[wanted.name] + total) % 2**64
        return Destination({wanted.name: piece})

    def write(self, contents: HubTensors, output: HubFiles, filler: Filler, ranks: Ranks) -> None:
        for wanted, tiles in self.shares(contents, ranks):
            elements = self.whole(wanted)
            for tile in tiles:
                write_back(transfers_of(tile, wanted, output.tensors), filler, elements, self.staging)

    def windows(
        self, contents: HubTensors, output: HubFiles, ranks: Ranks
    ) -> Callable[[Window, Filler], None]:
        shares = [
            (wanted_box(name, *self.specs[name], whole(self.specs[name].shape)), tiles)
            for name, tiles in contents.tiles.items()
        ]
        self._summed_in_parts = self._sums.keys() - self._cut_across(shares, output)
        return self.windows_of_shares(shares, output)

    def _cut_across(self, shares: Sequence[Share], output: HubFiles) -> set[str]:
        """Tensors whose digest is not the sum of what windows read: parts that are no boxes, or not of the whole tensor."""
        made_of = by_hub(shares)
        found, numel = set(), dict.fromkeys(self._sums, 0)
        for window in (window for file in output.headers for window in windows_of(output, file)):
            for key, box in window.parts:
                for wanted, tile in made_of.get(key, ()):
                    for part in cut(tile, "source", box) if wanted.name in numel else ():
                        numel[wanted.name] += part.numel
                        if not is_dense(part, "target"):
                            found.add(wanted.name)
        return found | {name for name, n in numel.items() if n != math.prod(self.specs[name].shape)}

    def finish(self, ranks: Ranks) -> None:
        left = {name: self.specs[name] for name in self._sums if name not in self._summed_in_parts}
        for name, box in share_of(left, self.piece_bytes, ranks):
            self.whole(wanted_box(name, *self.specs[name], box))

    def sums(self) -> list[int]:
        return list(self._sums.values())

    def check(self, sums: Sequence[int]) -> None:
        wrong = []
        for name, total in zip(self._sums, sums, strict=True):
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

    def assets(self) -> Mapping[str, bytes]:
        """Config, tokenizer and own code; of adapters, their configs."""
        return adapter_assets(*self._adapted) if self._adapted else self._documents
