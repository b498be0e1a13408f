"""Catalog of a torch.distributed.checkpoint directory (``.metadata`` and ``*.distcp``), headers only.

torch's FileSystemWriter writes the format (torch 2.3-2.14, metadata version 1.0.0). ``.metadata`` is a pickle of
dataclasses that lists the chunks of each tensor and, for each chunk, a byte range of a file. Each range is a zip file
of ``torch.save`` for one tensor, with its elements uncompressed. Neither pickle can reach anything of torch or
Python: plain records stand for the few classes of the format, and any other name is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any

from ..errors import FormatError, IntegrityError, SourceError
from ..limits import MAX_DIMS, MAX_PICKLE_DEPTH, brief, check_name, inside, is_count, numel_of
from ..objects import frozen
from ..storage.records import is_url
from ..tensors.boxes import Box
from .pickles import Name, Names, Record, is_name_of, unpickled
from .quantized import OpenFile, each, open_file
from .records import METADATA_NAME, Catalog, Chunk, StoredFile, StoredTensor, assemble
from .torch_files import DTYPE_NAMES, Archive, Dtype, Saved, plain_args, to_dict, to_tuple

#: Files that are open at a time.
_MOST_OPEN = 64
#: Where a state dict has its model: Accelerate, the HF Trainer, Fabric and FSDP1 in Lightning; torch's examples; Composer;
#: Lightning's ModelParallelStrategy.
_MODEL_PATHS: tuple[tuple[str, ...], ...] = (
    ("model",),
    ("app", "model"),
    ("state", "model"),
    ("state_dict",),
)
#: Entries of a state dict that do not belong to the model, if the model's tensors lie at the top (torchtitan).
_BESIDE = frozenset(("optimizer", "optim", "lr_scheduler", "scheduler", "dataloader", "train_state"))
#: Entries of a state dict that are named after an optimizer, also where its groups aren't stored.
_OPTIMIZER = re.compile(r"(?:.*\.)?optim(?:izer)?s?(?:_\d+)?")
#: A word of an entry's name that is an optimizer's, and one that may be a model's, too (OPT).
_NAMED_OPTIMIZER = re.compile(r"(?i:.*(?:\b|_)optim(?:i[sz]ers?|s)?(?:\b|_|\d).*)")
_PERHAPS_OPTIMIZER = re.compile(r"(?i:.*(?:\b|_)opts?(?:\b|_|\d).*)")
#: What torch's optimizers call the tensors of their state. A model may have a ``step``, too, so that alone says nothing.
_STATES = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *(
            "acc_delta",
            "sum",
            "prev",
            "step_size",
            "mu_product",
            "row_var",
            "col_var",
            "variance",
            "ax",
            "mu",
            "eta",
            "step",
        ),
    )
)
_COMMON_STATES = frozenset(("step", "sum", "prev", "ax", "mu", "eta", "variance"))
#: Key of a catalog's metadata: entries with tensors, if it isn't known which one is the model.
UNKNOWN_ENTRIES = "shardwise.unknown_entries"


@frozen
class ByteRange:
    """The place of an item that is not a tensor: a pickle, which only :mod:`.pickles` may read."""

    path: str
    offset_bytes: int
    nbytes: int


@frozen
class DcpCheckpoint:
    """The content of ``.metadata``: tensors by name, other items by name, each name's path in the state dict."""

    catalog: Catalog
    objects: Mapping[str, ByteRange]
    paths: Mapping[str, tuple[str | int, ...]]


def catalog_of_dcp(path: str | os.PathLike[str]) -> Catalog:
    """Catalog of the model in a DCP directory, under module names; see :func:`read_dcp`.

    If the saved state dict has an entry ``model`` (also inside ``app`` or ``state``), as Accelerate, the HF Trainer
    and torch's own examples write it, or ``state_dict``, as Lightning does, these are the tensors of that entry. Otherwise they
    are all tensors at the top (torchtitan), or those of the only entry. No optimizer's tensor is ever one of them
    (:func:`optimizers_in`), also where its groups aren't stored. Several entries whose meaning isn't known are listed under their whole names, and named in the
    metadata as :data:`UNKNOWN_ENTRIES`. May be empty.
    """
    return model_in(read_dcp(path))


def model_in(found: DcpCheckpoint) -> Catalog:
    """The model's part of a DCP directory already read; see :func:`catalog_of_dcp`."""
    taken = {name for items in optimizers_in(found).values() for name in items}
    paths = {n: found.paths.get(n, (n,)) for n in found.catalog.tensors if n not in taken}
    prefix: tuple[str | int, ...] = next(
        (p for p in _MODEL_PATHS if any(path[: len(p)] == p for path in paths.values())), ()
    )
    unknown: set[str | int] = set()
    if not prefix:
        paths = {n: path for n, path in paths.items() if len(path) == 1 or path[0] not in _BESIDE}
        paths, doubtful = _without_optimizers(paths)
        unknown = {path[0] for path in paths.values() if len(path) > 1}
        if len(unknown) == 1 and not doubtful and all(len(path) > 1 for path in paths.values()):
            prefix, unknown = (unknown.pop(),), set()
    tensors = {
        name: replace(found.catalog.tensors[stored], name=name)
        for stored, path in paths.items()
        if path[: len(prefix)] == prefix and (name := ".".join(map(str, path[len(prefix) :])))
    }
    entries = {UNKNOWN_ENTRIES: ", ".join(sorted(map(str, unknown)))} if unknown else {}
    return replace(found.catalog, tensors=tensors, metadata={**found.catalog.metadata, **entries})


def _without_optimizers(
    paths: Mapping[str, tuple[str | int, ...]],
) -> tuple[dict[str, tuple[str | int, ...]], bool]:
    """The paths without those of entries that are optimizers, and whether one of the others may be one.

    An entry is an optimizer if all its tensors are called like states of torch's optimizers, or if its name says it. It may be one
    if its name has the word ``opt``, or if all tensors of something in it, or one of each parameter's, are called like states.
    """
    entries: dict[str, dict[str, tuple[str | int, ...]]] = {}
    for name, path in paths.items():
        entries.setdefault(str(path[0]) if len(path) > 1 else "", {})[name] = path
    kept: dict[str, tuple[str | int, ...]] = {}
    doubtful = False
    for entry, items in entries.items():
        texts = [".".join(map(str, path)) for path in items.values()]
        if _all_states(texts) or _NAMED_OPTIMIZER.fullmatch(entry):
            continue
        kept |= items
        inner: dict[tuple[str | int, ...], list[str]] = {}
        states: dict[str, set[str]] = {}
        for path, text in zip(items.values(), texts, strict=True):
            for depth in range(2, len(path)):
                inner.setdefault(path[:depth], []).append(text)
            states.setdefault(text.rpartition(".")[0], set()).add(text.rpartition(".")[2])
        doubtful |= bool(_PERHAPS_OPTIMIZER.fullmatch(entry)) or any(map(_all_states, inner.values()))
        doubtful |= bool(entry) and all(ends & (_STATES - _COMMON_STATES) for ends in states.values())
        doubtful |= (
            bool(entry) and {"step"} != set().union(*states.values()) <= _STATES
        )  # Adagrad's sum and step
    return kept, doubtful


def _all_states(texts: Iterable[str]) -> bool:
    """Whether tensors with these paths are all called like states, and not only like those that models have, too."""
    ends = {text.rpartition(".")[2] for text in texts}
    return ends <= _STATES and not ends <= _COMMON_STATES


def optimizers_in(found: DcpCheckpoint) -> dict[str, dict[str, str]]:
    """The optimizers of a DCP directory, in order: their entry → stored name → the rest of its path (``state.…``, ``param_groups.…``).

    An optimizer is told by torch's own form of its state dict: ``param_groups`` stands next to ``state``. So is an entry that is named
    after one (``optimizer``, ``optim``, ``optimizer_0``) and has ``state``.
    """
    texts = {
        name: ".".join(map(str, found.paths.get(name, (name,))))
        for name in (*found.catalog.tensors, *found.objects)
    }
    heads = {head for text in texts.values() if (head := _optimizer_of(text)) is not None}
    parts: dict[str, dict[str, str]] = {head: {} for head in sorted(heads, key=lambda h: (len(h), h))}
    for name, text in texts.items():
        for head in parts:
            rest = text.removeprefix(f"{head}.") if head else text
            if (not head or rest != text) and rest.partition(".")[0] in ("state", "param_groups"):
                parts[head][name] = rest
                break
    return parts


def _optimizer_of(text: str) -> str | None:
    """The entry of the optimizer to which an item with this path surely belongs; None for others."""
    head, groups, rest = text.partition("param_groups")
    if groups and rest[:1] in ("", ".") and (not head or head.endswith(".")):
        return head.removesuffix(".")
    head, state, _ = text.partition(".state.")
    return head if state and _OPTIMIZER.fullmatch(head) else None


def entries_left_out(found: DcpCheckpoint, read: Collection[str]) -> list[str]:
    """The entries of a DCP directory, none of whose items is in ``read``, and single items of those in part read."""
    tops: dict[str, set[str]] = {}
    for name in (*found.catalog.tensors, *found.objects):
        path = found.paths.get(name, (name,))
        tops.setdefault(str(path[0]), set()).add(name)
    left: list[str] = []
    for top, names in tops.items():
        lost = names.difference(read)
        left += [top] if lost == names else sorted(lost)
    return left


def read_dcp(path: str | os.PathLike[str]) -> DcpCheckpoint:
    """Describe a DCP directory. Rank-local; reads ``.metadata`` and about 1 KiB per chunk, no payload.

    In a store that takes one to three requests of 16 KiB for each chunk, 16 at a time.

    Raises :class:`SourceError` (missing or not readable), :class:`FormatError` (other classes than DCP's, a path
    outside its directory, chunks that are compressed, strided, overlapping or missing), :class:`IntegrityError` (a
    lost or truncated file).
    """
    root = os.fspath(path)
    file = os.path.join(root, METADATA_NAME)
    try:
        metadata = _read_metadata(file)
        locations = _locations(metadata, root)
        paths = {_name(n): _path(p) for n, p in _mapping(metadata, "planner_data", {}).items()}
        entries: dict[str, Any] = {}
        objects: dict[str, ByteRange] = {}
        for key, entry in _mapping(metadata, "state_dict_metadata").items():
            name = _name(key)
            if type(entry) is Record and entry.kind == _OBJECT:
                objects[name] = _only_place(locations.get(name, {}), name)
            else:
                entries[name] = entry
        with ItemFiles() as files:
            found = each(root, lambda n: _tensor(n, entries[n], locations.get(n, {}), files), entries)
            tensors = dict(zip(entries, found, strict=True))
            stored_files = tuple(files.stored[path] for path in sorted(files.stored))
    except FormatError as error:
        raise error if error.path else FormatError(str(error), path=file) from None
    return DcpCheckpoint(Catalog("dcp", root, tensors, stored_files), objects, paths)


# ----------------------------------------------------------------------------------------------------
# The pickle of the metadata, with plain records for its names


#: BytesStorageMetadata: an item that is not a tensor.
_OBJECT = "an item"


def _memory_format(value: Any) -> str:
    """Stands for the enum of memory formats, which is not used."""
    return "memory format"


def _member(owner: Any, name: Any) -> str:
    """Stands for ``getattr``, by which Python 3.11.0 to 3.11.3 pickle a member of an enum. Gets no attribute."""
    if not is_name_of(owner, _memory_format) or not isinstance(name, str):
        raise ValueError("getattr of something other than a memory format")
    return "memory format"


_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = (
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "StorageMeta"),
    # Megatron-core keeps the plans of its save.
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    ),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    (_METADATA, "MetadataIndex"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)
_NAMES: Names = {
    **{names: Name(partial(Record, names[1])) for names in _RECORDS},
    (_METADATA, "BytesStorageMetadata"): Name(partial(Record, _OBJECT)),
    (_METADATA, "_MEM_FORMAT_ENCODING"): Name(_memory_format),
    ("builtins", "getattr"): Name(_member),
    ("torch", "Size"): Name(to_tuple),
    ("torch.serialization", "_get_layout"): Name(plain_args),
    **{("pathlib", name): Name(plain_args) for name in ("PosixPath", "PurePosixPath", "Path", "WindowsPath")},
    ("collections", "OrderedDict"): Name(to_dict),
    **{("torch", name): Dtype(code) for name, code in DTYPE_NAMES.items()},
}


def _read_metadata(file: str) -> Any:
    try:
        opened = open_file(file)
    except SourceError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise SourceError(
            "no .metadata: not a DCP checkpoint, or its save did not finish", path=file
        ) from error
    at = 0

    def read(nbytes: int) -> bytes:
        nonlocal at
        content = opened.read(at, nbytes)
        at += len(content)
        return content

    with opened:
        return unpickled(read, opened.stored.nbytes, _NAMES, file)


_MISSING: Any = object()


def _part(record: Any, name: str, default: Any = _MISSING) -> Any:
    """A part of a record's state."""
    state = record.state if type(record) is Record else None
    found = state.get(name, default) if type(state) is dict else _MISSING
    if found is _MISSING:
        kind = record.kind if type(record) is Record else "metadata"
        raise FormatError(f"its {kind} has no {name}, which torch's FileSystemWriter writes: damaged")
    return found


def _mapping(record: Any, name: str, default: Any = _MISSING) -> dict[Any, Any]:
    found = _part(record, name, default)
    if found is None and default is not _MISSING:
        return {}
    if type(found) is not dict:
        raise FormatError(f"its {name} is not a dict, as torch's FileSystemWriter writes it: damaged")
    return found


def _name(value: Any) -> str:
    return check_name(value, "tensor")


def _path(value: Any) -> tuple[str | int, ...]:
    """The path of an item in the state dict: keys, and positions in lists."""
    if type(value) is not tuple or not 0 < len(value) <= MAX_PICKLE_DEPTH:
        raise FormatError(f"the path {brief(value)} of an item is malformed: damaged")
    for part in value:
        if not is_count(part):
            check_name(part, "a part of a path")
    return value


def _counts(record: Any, name: str) -> tuple[int, ...]:
    """A shape or an offset."""
    found = _part(record, name)
    if type(found) is not tuple or len(found) > MAX_DIMS or not all(map(is_count, found)):
        got = f"{len(found)} dims" if type(found) is tuple and len(found) > MAX_DIMS else brief(found)
        raise FormatError(f"{name} {got} malformed; a tensor has at most {MAX_DIMS} dims: damaged")
    return found


# ----------------------------------------------------------------------------------------------------
# Chunks


#: The places of a tensor's parts, by the text of each part's first index. Python salts the hash of text: a file can't
#: choose keys that collide, as it can with tuples of numbers.
_Places = dict[str, ByteRange]
_NO_INDEX = "none"


def _locations(metadata: Any, root: str) -> dict[str, _Places]:
    """The places of all items, by name. Byte ranges are disjoint: no byte is read twice."""
    found: dict[str, _Places] = {}
    for index, info in _mapping(metadata, "storage_data").items():
        offset = _part(index, "offset", None)
        begin = _NO_INDEX if offset is None else str(_counts(index, "offset"))
        found.setdefault(_name(_part(index, "fqn")), {})[begin] = _range_of(info, root)
    ranges = sorted((r.path, r.offset_bytes, r.nbytes) for places in found.values() for r in places.values())
    for (path, start, nbytes), (other, after, _) in pairwise(ranges):
        if path == other and after < start + nbytes:
            raise FormatError(f"lists bytes {after} to {start + nbytes} for two items", path=path)
    return found


def _range_of(info: Any, root: str) -> ByteRange:
    relative, offset, nbytes = (_part(info, name) for name in ("relative_path", "offset", "length"))
    if not is_count(offset) or not is_count(nbytes):
        raise FormatError(f"{brief(relative)}: byte range {brief(offset)} + {brief(nbytes)} is malformed")
    if transforms := _part(info, "transform_descriptors", None):
        raise FormatError(
            f"{brief(relative)} is compressed ({brief(transforms)}); save the checkpoint without compression",
            path=root,
        )
    try:
        path = inside(root, check_name(relative, "file"))
    except FormatError:
        raise FormatError(f"points at {brief(relative)}, outside its directory", path=root) from None
    return ByteRange(path, offset, nbytes)


def _only_place(places: _Places, name: str) -> ByteRange:
    where = places.get(_NO_INDEX) or places.get("()")
    if where is None:
        raise FormatError(f"lists no bytes for {name!r}")
    return where


def _tensor(name: str, entry: Any, places: _Places, files: ItemFiles) -> StoredTensor:
    shape, code = _counts(entry, "size"), _code_of(_part(entry, "properties"), name)
    numel_of(shape, f"tensor {name!r}")
    parts = _part(entry, "chunks")
    if type(parts) is not list:
        raise FormatError(f"{name!r} has no list of chunks: damaged")
    if 0 in shape:
        return StoredTensor(name, code, shape, ())
    chunks, seen = [], set()
    for part in parts:
        start, sizes = _counts(part, "offsets"), _counts(part, "sizes")
        if len(start) != len(shape) or any(a + n > m for a, n, m in zip(start, sizes, shape, strict=True)):
            raise FormatError(
                f"a chunk of {name!r} at {brief(start)} with sizes {brief(sizes)} is not a part of shape "
                f"{brief(shape)}: damaged"
            )
        if 0 in sizes:
            continue  # the empty part of a rank without rows
        where = places.get(str(start)) or (None if start else places.get(_NO_INDEX))
        if where is None or str(start) in seen:
            count = "no bytes" if where is None else "two chunks"
            raise FormatError(f"lists {count} for {name!r} at {brief(start)}")
        seen.add(str(start))
        box = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
        chunks.append(Chunk(box, where.path, files.payload(where, code, sizes, name)))
    found = assemble(name, code, chunks) if chunks else None
    if found is None or found.shape != shape:
        got = list(found.shape) if found else "nothing"
        raise FormatError(f"chunks of {name!r} make shape {got}, expected {list(shape)}")
    return found


def _code_of(properties: Any, name: str) -> str:
    """The dtype is the first part of TensorProperties, whose state is a tuple."""
    state = properties.state if type(properties) is Record else None
    dtype = state[0] if type(state) is tuple and state else None
    if type(dtype) is not Dtype or dtype.code is None:
        raise FormatError(f"{name!r} has a dtype that can't be read")
    return dtype.code


class ItemFiles:
    """Keeps the files of items open, and finds the elements of ``torch.save``d tensors in them.

    ``known``: objects of a store as they were first looked at; no other versions of them are read.
    """

    def __init__(self, known: Iterable[StoredFile] = ()) -> None:
        self.stored: dict[str, StoredFile] = {}
        self._known = {file.path: file for file in known}
        self._open: dict[str, OpenFile] = {}
        self._lock = Lock()

    def __enter__(self) -> ItemFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def payload(self, where: ByteRange, code: str, sizes: tuple[int, ...], name: str) -> int:
        """Offset in the file of one chunk's elements. Raises :class:`FormatError` if they are not row-major."""
        archive = Archive(self.file(where), where.offset_bytes, where.nbytes)
        saved = archive.content
        if not isinstance(saved, Saved) or saved.code not in (code, None) or saved.sizes != sizes:
            raise FormatError(
                f"chunk of {name!r} is not a tensor of dtype {code} and shape {list(sizes)}", path=where.path
            )
        return archive.payload(saved, code, name)

    def file(self, where: ByteRange) -> OpenFile:
        """The file that holds the whole of an item. Raises :class:`SourceError`."""
        with self._lock:
            if where.path not in self._open:
                self._open_new(where.path)
            file = self._open[where.path]
        if where.offset_bytes + where.nbytes > file.stored.nbytes:
            raise IntegrityError(
                f"{file.stored.nbytes} bytes, but a chunk ends at {where.offset_bytes + where.nbytes}: truncated",
                path=where.path,
            )
        return file

    def _open_new(self, path: str) -> None:
        try:
            file = open_file(path, self._known.get(path) or self.stored.get(path))
        except SourceError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise IntegrityError(
                    f"lost: no such {'object' if is_url(path) else 'file'}", path=path
                ) from error
            raise
        while len(self._open) >= _MOST_OPEN:
            self._open.pop(next(iter(self._open))).close()
        self._open[path], self.stored[path] = file, file.stored
