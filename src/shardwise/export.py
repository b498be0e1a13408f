"""``export_hf``: a live model or a stored checkpoint as a hub-format directory, written by all ranks in place.

The same transfers as a load, with output files as the far side: every rank computes where its boxes lie in
the final files and writes them there. Nobody gathers, nobody holds a whole model.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .catalog import Catalog, Chunk, StoredTensor
from .catalog.manifest import read_manifest
from .catalog.open import open_catalog
from .catalog.slices import SliceTensor, assign_owners, owner_ranks
from .dist import Ranks
from .dtypes import code_of, itemsize, torch_dtype
from .errors import CheckpointError, FormatError, SourceError
from .layout.boxes import Box, LocalBox, whole
from .layout.model import geometries_of, local_tensor, reshard, wanted_of
from .layout.wanted import Wanted, contiguous_strides
from .names import named_tensors
from .place.copy import Destination, FileFiller, Staging, execute, write_back
from .plan import IOOptions
from .plan.build import transfers_of
from .proof.stored import pieces
from .read import FileReader
from .recipe.record import recall
from .recipe.tiles import identity
from .recipe.transformers import is_transformers_model, meta_instance, reverse_names
from .store.companions import companion_files, read_companions
from .store.write import fsync_directory, write_file

__all__ = ["ExportReport", "export_hf"]

INDEX_NAME = "model.safetensors.index.json"


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
class _Output:
    """The files to write: where each tensor lies, by module name; hub names; headers by file."""

    tensors: dict[str, StoredTensor]
    headers: dict[str, bytes]
    sizes: dict[str, int]
    index: bytes | None

    @property
    def total_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def export_hf(
    model_or_path: nn.Module | str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = 5 * 1024**3,
    io: IOOptions | None = None,
) -> ExportReport:
    """Write a model in hub format: hub names, index, config, tokenizer if known; ties once.

    Args:
        model_or_path: a live (sharded) model, a checkpoint directory, or a safetensors directory.
        out_dir: must not exist, or be empty. It appears complete or not at all.
        dtype: floating-point tensors are written in it. Default: as they are.
        max_shard_bytes: payload per file, unless one tensor is larger.

    Every rank of the default process group must call it; each writes its own bytes at precomputed
    offsets of the final files. Memory: staging only. Raises :class:`CheckpointError`,
    :class:`SourceError`, :class:`RankError` alike on every rank.
    """
    started = time.perf_counter()
    io = io or IOOptions()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    final = os.path.abspath(out_dir)
    with ranks.agree("plan export"):
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
        job = _LiveJob(model_or_path) if isinstance(model_or_path, nn.Module) else _StoredJob(model_or_path)
        output = _lay_out(job.tensors(), job.hub_names(), _dtype_code(dtype), max_shard_bytes)
    temporary = _prepare(final, output, ranks)
    try:
        with ranks.agree("write export"), FileFiller(temporary, ranks.tick) as filler:
            job.write(output, filler, Staging(io), ranks)
        written = filler.bytes_written
        totals = ranks.gather("bytes exported", str(written).encode())
        with ranks.agree("publish export"):
            if totals is not None:
                _publish(temporary, final, output, job.companions(_dtype_code(dtype)), sum(map(int, totals)))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return ExportReport(
        final,
        tuple(output.headers),
        len(output.tensors),
        output.total_bytes,
        written,
        time.perf_counter() - started,
    )


def _dtype_code(dtype: torch.dtype | str | None) -> str | None:
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype must be a floating-point torch dtype or its name, got {dtype!r}")
    return code_of(found)


_FLOATS = ("F16", "BF16", "F32", "F64")


def _lay_out(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], hub: Mapping[str, str], dtype: str | None, limit: int
) -> _Output:
    """Which tensor goes into which file at which offset. Files are filled in the tensors' order."""
    groups: list[list[str]] = [[]]
    used = 0
    kinds = {n: (dtype if dtype and code in _FLOATS else code, shape) for n, (code, shape) in tensors.items()}
    for name, (code, shape) in kinds.items():
        nbytes = math.prod(shape) * itemsize(code)
        if groups[-1] and used + nbytes > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += nbytes
    repeated = sorted(h for h, n in Counter(hub.values()).items() if n > 1)[:5]
    if repeated:
        raise FormatError(f"several tensors would be exported under one hub name: {', '.join(repeated)}")
    stored, headers, sizes, weight_map = {}, {}, {}, {}
    for k, group in enumerate(groups):
        file = (
            "model.safetensors" if len(groups) == 1 else f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors"
        )
        header, offsets, end = _header({hub[n]: kinds[n] for n in group})
        headers[file], sizes[file] = header, len(header) + end
        for name in group:
            code, shape = kinds[name]
            chunk = Chunk(whole(shape), file, len(header) + offsets[hub[name]])
            stored[name] = StoredTensor(name, code, shape, (chunk,))
            weight_map[hub[name]] = file
    total = sum(t.nbytes for t in stored.values())
    index = None
    if len(groups) > 1:
        document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        index = (json.dumps(document, indent=2) + "\n").encode()
    return _Output(stored, headers, sizes, index)


def _header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int], int]:
    """A safetensors header with ``format: pt``; largest items first, so that everything is aligned."""
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in sorted(tensors, key=lambda n: (-itemsize(tensors[n][0]), n)):
        code, shape = tensors[name]
        nbytes = math.prod(shape) * itemsize(code)
        offsets[name] = end
        document[name] = {"dtype": code, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets, end


def _prepare(final: str, output: _Output, ranks: Ranks) -> str:
    """Rank 0 makes the temporary directory and the files in their final size. Returns its path on all ranks."""
    path = ""
    with ranks.agree("make export directory"):
        if ranks.rank == 0:
            if os.path.lexists(final) and not (os.path.isdir(final) and not os.listdir(final)):
                raise CheckpointError(f"{final}: is there already; export into a new or empty directory")
            parent, name = os.path.split(final)
            path = os.path.join(parent, f".tmp-{name}-{secrets.token_hex(8)}")
            try:
                os.makedirs(path)
                for file, header in output.headers.items():
                    write_file(os.path.join(path, file), header)
                    os.truncate(os.path.join(path, file), output.sizes[file])
            except OSError as error:
                raise CheckpointError(f"{path}: can't be created: {error.strerror}") from error
    return ranks.share("export directory", path.encode() if ranks.rank == 0 else None).decode()


def _publish(
    temporary: str, final: str, output: _Output, companions: Mapping[str, bytes], bytes_written: int
) -> None:
    if bytes_written != output.total_bytes:
        raise CheckpointError(f"{final}: ranks wrote {bytes_written} bytes, expected {output.total_bytes}")
    if output.index is not None:
        write_file(os.path.join(temporary, INDEX_NAME), output.index)
    for name, content in companions.items():
        write_file(os.path.join(temporary, name), content)
    fsync_directory(temporary)
    try:
        if os.path.isdir(final):
            os.rmdir(final)
        os.rename(temporary, final)
    except OSError as error:
        raise CheckpointError(f"{final}: can't be published: {error.strerror}") from error
    fsync_directory(os.path.dirname(final))


class _LiveJob:
    """Export of a live model: every rank writes the boxes that it owns."""

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        self._model = model
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        self._named = {t.name: t for t in named_tensors(model) if t.persistent and t.name not in ignored}

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {n: (code_of(t.tensor.dtype), tuple(t.tensor.shape)) for n, t in self._named.items()}

    def hub_names(self) -> dict[str, str]:
        recipes = recall(self._model)
        if recipes is not None:
            return {n: recipes[n].tiles[0].source if n in recipes else n for n in self._named}
        if is_transformers_model(self._model):
            return reverse_names(meta_instance(self._model), list(self._named))
        return {n: n for n in self._named}

    def write(self, output: _Output, filler: FileFiller, staging: Staging, ranks: Ranks) -> None:
        geometries = geometries_of(self._model, self._named.values())
        owned = assign_owners([SliceTensor(n, c, s, geometries[n]) for n, (c, s) in self.tensors().items()])
        destination = Destination({n: local_tensor(t.tensor) for n, t in self._named.items()})
        for t in owned:
            if ranks.rank not in owner_ranks(t.geometry, t.owner):
                continue
            wanted = wanted_of(t.name, self._named[t.name].tensor, t.geometry)
            tile = identity(t.name, t.shape)
            write_back(transfers_of(tile, wanted, output.tensors), filler, destination, staging)

    def companions(self, dtype: str | None) -> dict[str, bytes]:
        return _with_dtype(companion_files(self._model), dtype)


class _StoredJob:
    """Export of a stored checkpoint: ranks share the tensors, piece by piece, through staging."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._catalog: Catalog = open_catalog(self._path)

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {n: (t.dtype, t.shape) for n, t in self._catalog.tensors.items()}

    def hub_names(self) -> dict[str, str]:
        names = list(self._catalog.tensors)
        if self._catalog.kind != "checkpoint":
            return {n: n for n in names}
        recorded = read_manifest(self._path).hub_names.get("model")
        if recorded is not None:
            return {n: recorded.get(n, n) for n in names}
        if os.path.isfile(os.path.join(self._path, "model", "config.json")):
            from .pretrained import build_meta

            return reverse_names(build_meta(self._path), names)
        return {n: n for n in names}

    def write(self, output: _Output, filler: FileFiller, staging: Staging, ranks: Ranks) -> None:
        with FileReader() as reader:
            for name, box in _share_of(self._catalog, staging.limit_bytes // 2, ranks):
                self._write_piece(name, box, output, filler, reader, staging)

    def _write_piece(
        self, name: str, box: Box, output: _Output, filler: FileFiller, reader: FileReader, staging: Staging
    ) -> None:
        stored = self._catalog.tensors[name]
        piece = torch.empty(box.sizes, dtype=torch_dtype(stored.dtype))
        wanted = Wanted(
            name,
            stored.dtype,
            stored.shape,
            (LocalBox(box, (0,) * len(box.start)),),
            box.sizes,
            contiguous_strides(box.sizes),
        )
        tile = identity(name, stored.shape)
        destination = Destination({name: piece})
        execute(list(transfers_of(tile, wanted, self._catalog.tensors)), reader, destination, staging)
        write_back(transfers_of(tile, wanted, output.tensors), filler, destination, staging)

    def companions(self, dtype: str | None) -> dict[str, bytes]:
        folder = (
            os.path.join(self._path, "model") if self._catalog.kind == "checkpoint" else self._catalog.root
        )
        return _with_dtype(read_companions(folder), dtype)


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
    """The files with config.json's dtype set to what is written."""
    found = dict(files)
    if dtype is not None and "config.json" in found:
        try:
            config = json.loads(found["config.json"])
        except ValueError as error:
            raise SourceError(f"config.json is not JSON ({error})") from error
        config.pop("torch_dtype", None)
        config["dtype"] = str(torch_dtype(dtype)).removeprefix("torch.")
        found["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return found
