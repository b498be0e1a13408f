"""``diff``: compares two stored sources: tensors added, removed and changed, and by how much."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import torch

from ..catalog.checkpoint import catalog_of_checkpoint, catalog_of_optimizer
from ..catalog.open import open_catalog
from ..catalog.records import Catalog, StoredFile, StoredTensor
from ..checkpoint.verify import model_of
from ..digests import finish, partial_sum
from ..dtypes import itemsize
from ..engine.engine import Staging, read_box, wanted_box
from ..engine.objects import SourceReader
from ..errors import ShardwiseError, SourceError
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..objects import frozen
from ..operations.operation import announced, this_operation
from ..operations.printed import Printed
from ..planning.plan import IOOptions
from ..storage import absolute, is_file
from ..storage.records import is_url
from ..tensors.boxes import Box, contiguous_parts, whole
from ..tensors.tiles import identity
from .third_party import StoredOptimizer, as_text, find_run

_PIECE_BYTES = 16 * 1024**2
_SETTING_CHARS = 40


@frozen
class Change:
    """A tensor that differs between the two sources."""

    name: str
    what: str
    """``dtype``, ``shape`` or ``content``, with both sides; ``setting``, with both values, for what an optimizer has besides tensors."""
    elements: int
    """Number of elements that differ; 0 if the shapes differ."""
    largest: float
    """The largest difference between two elements, in float64; inf if only one of two elements is finite."""
    relative: float
    """Norm of the difference over the norm of the first side."""


@frozen
class DiffReport(Printed):
    """The differences between two sources, from the first to the second."""

    first: str
    second: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[Change, ...]
    equal: int
    """Number of tensors that are bit-identical."""
    by_digest: int
    """How many of those were compared by recorded digests, without reading them."""
    bytes_read: int
    not_compared: tuple[str, ...] = ()
    """The optimizers of either source that weren't compared, each with the reason."""

    @property
    def ok(self) -> bool:
        """Whether there are no differences in what was compared."""
        return not (self.added or self.removed or self.changed)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**Printed.to_json(self), "ok": self.ok}


@announced("diff", "first", "second")
def diff(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> DiffReport:
    """Compare two models or checkpoints tensor by tensor. If both are checkpoints, their optimizers are compared, too.

    The report's ``not_compared`` lists optimizers that weren't compared, with the reason. Schedulers, RNG states and data positions
    are never compared.

    Call it in one process; ranks don't share the work. Memory: 32 MiB. Tensors whose recorded digests, dtypes and shapes are equal
    aren't read. Raises :class:`SourceError` (or a more specific subclass) for a source that can't be read.
    """
    files: list[StoredFile] = []
    left, right = _contents(first, files), _contents(second, files)
    not_compared = _not_compared(left, right)
    a, b = left.tensors, right.tensors
    if left.optimizers != right.optimizers or not_compared:
        a, b = _models_only(a), _models_only(b)
    both = [n for n in a if n in b]
    changed, equal, by_digest = _changed_settings(left, right) if not not_compared else [], 0, 0
    counted = this_operation(os.fspath(second))
    with SourceReader(files=files) as reader:
        counted.expect(lambda: sum(a[n][0].nbytes for n in both))
        for name in both:
            (x, x_digest), (y, y_digest) = a[name], b[name]
            same_kind = (x.dtype, x.shape) == (y.dtype, y.shape)
            if same_kind and x_digest is not None and x_digest == y_digest:
                equal, by_digest = equal + 1, by_digest + 1
            elif not (_is_held(x) and _is_held(y)):
                own = [_digest_of(t, d, reader) if same_kind else None for t, d in (a[name], b[name])]
                if own[0] is not None and own[0] == own[1]:
                    equal, by_digest = equal + 1, by_digest + 1
                else:
                    what = "content" if same_kind else f"{_spec(x)} and {_spec(y)}"
                    changed.append(
                        Change(name, f"{what} (only its digest is held)", 0, float("nan"), float("nan"))
                    )
            elif (change := _compare(name, x, y, reader)) is None:
                equal += 1
            else:
                changed.append(change)
            counted.add(x.nbytes)
        bytes_read = reader.bytes_read
    return DiffReport(
        first=os.fspath(first),
        second=os.fspath(second),
        added=tuple(n for n in b if n not in a),
        removed=tuple(n for n in a if n not in b),
        changed=tuple(changed),
        equal=equal,
        by_digest=by_digest,
        bytes_read=bytes_read,
        not_compared=not_compared,
    )


TensorsByName = Mapping[str, tuple[StoredTensor, int | None]]


@frozen
class _Contents:
    """A source: tensors by name, in one with optimizers by ``part:name``, and how its optimizers are stored."""

    path: str
    tensors: TensorsByName
    optimizers: str = ""
    """``own`` for a checkpoint of ours, ``by number`` or ``by name`` for another program's; empty: it has none that can be read."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of another program's optimizers: what isn't a tensor, as text."""
    unread: str = ""
    """Why an optimizer can't be read."""


def _contents(path: str | os.PathLike[str], files: list[StoredFile]) -> _Contents:
    """Everything of a source that can be compared. Adds its files to ``files``."""
    root = absolute(path) if is_url(os.fspath(path)) else os.fspath(path)
    if not is_file(os.path.join(root, MANIFEST_NAME)):
        catalog = open_catalog(root)
        files += catalog.files
        return _with_optimizers(root, _of(catalog), files)
    manifest = read_manifest(root)
    found: dict[str, tuple[StoredTensor, int | None]] = {}
    for model in manifest.models:
        catalog = catalog_of_checkpoint(root, model)
        files += catalog.files
        found |= {f"{model}:{n}": v for n, v in _of(catalog).items()}
        held = manifest.models[model].items()
        found |= {
            f"{model}:{n}": (StoredTensor(n, t.dtype, t.shape, ()), t.digest) for n, t in held if t.refers
        }
    for optimizer in manifest.packed:
        catalog = catalog_of_optimizer(root, manifest, optimizer, model_of(manifest, optimizer))
        files += catalog.files
        found |= {f"{optimizer}:{n}": v for n, v in _of(catalog).items()}
    return _Contents(root, found, "own")


def _with_optimizers(root: str, model: TensorsByName, files: list[StoredFile]) -> _Contents:
    """Another program's model, with the optimizers next to it if there are any."""
    try:
        run = find_run(root)
    except SourceError:
        return _Contents(root, model)
    try:
        optimizers = [run.optimizer(k) for k in range(len(run.stored_optimizers))]
        unread = "" if optimizers else run.unread_optimizer()
        parts = {f"optimizer{k or ''}": one for k, one in enumerate(optimizers)}
        settings = {f"{part}:{n}": v for part, one in parts.items() for n, v in _settings_of(one).items()}
    except ShardwiseError as error:
        return _Contents(root, model, unread=str(error))
    if not optimizers:
        return _Contents(root, model, unread=unread)
    found = {f"model:{n}": v for n, v in model.items()}
    for part, optimizer in parts.items():
        files += optimizer.catalog.files
        found |= {f"{part}:{n}": v for n, v in _of(optimizer.catalog).items()}
    numbered = any(optimizer.is_numbered for optimizer in optimizers)
    return _Contents(root, found, "by number" if numbered else "by name", settings)


def _settings_of(optimizer: StoredOptimizer) -> dict[str, str]:
    """What isn't a tensor, as text: a parameter's other values, and each group's parameters and settings."""
    groups = {
        f"group {k}": {"params": group["names"], **group["options"]}
        for k, group in enumerate(optimizer.groups_as_stored())
    }
    every = {**optimizer.values, **groups}
    return {
        f"{owner}.{key}": as_text(value) for owner, values in every.items() for key, value in values.items()
    }


def _not_compared(a: _Contents, b: _Contents) -> tuple[str, ...]:
    """The optimizers that are not compared, and why."""
    unread = tuple(f"optimizer: {one.unread}" for one in (a, b) if one.unread)
    if unread or a.optimizers == b.optimizers:
        return unread
    if not (a.optimizers and b.optimizers):
        there, lacks = (a, b) if a.optimizers else (b, a)
        return (f"optimizer: {there.path} contains one, and {lacks.path} doesn't",)
    stored = {
        "own": "in shardwise's format",
        "by number": "by parameter index",
        "by name": "by parameter name",
    }
    return (
        f"optimizer: {a.path} stores it {stored[a.optimizers]}, {b.path} {stored[b.optimizers]}, so the names don't match",
    )


def _changed_settings(a: _Contents, b: _Contents) -> list[Change]:
    """Values and settings of optimizers that differ and aren't tensors."""
    sides = {n: (a.settings.get(n, "none"), b.settings.get(n, "none")) for n in {**a.settings, **b.settings}}
    return [
        Change(n, f"setting: {_short(x)} and {_short(y)}", 0, float("nan"), float("nan"))
        for n, (x, y) in sides.items()
        if x != y
    ]


def _short(text: str) -> str:
    return text if len(text) <= _SETTING_CHARS else f"{text[: _SETTING_CHARS - 1]}…"


def _of(catalog: Catalog) -> dict[str, tuple[StoredTensor, int | None]]:
    return {n: (t, catalog.digests.get(n)) for n, t in catalog.tensors.items()}


def _is_held(tensor: StoredTensor) -> bool:
    """Whether its content is stored; a checkpoint may only refer to it, by its digest."""
    return bool(tensor.chunks) or not tensor.nbytes


def _spec(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _digest_of(tensor: StoredTensor, recorded: int | None, reader: SourceReader) -> int:
    """The recorded digest of a tensor, or that of its content."""
    if recorded is not None:
        return recorded
    total = 0
    for box in contiguous_parts(whole(tensor.shape), _PIECE_BYTES // itemsize(tensor.dtype)):
        total += partial_sum(_piece(tensor, box, reader).reshape(box.sizes), box.start)
    return finish(total % 2**64, tensor.dtype, tensor.shape)


def _models_only(contents: TensorsByName) -> TensorsByName:
    """Drop names of parts: a checkpoint's model is compared with a plain source."""
    if not any(name.startswith("model:") for name in contents):
        return contents
    return {n.removeprefix("model:"): v for n, v in contents.items() if n.startswith("model:")}


def _compare(name: str, x: StoredTensor, y: StoredTensor, reader: SourceReader) -> Change | None:
    """The change, or None if both are equal bit for bit."""
    if x.shape != y.shape:
        return Change(name, f"shape: {list(x.shape)} and {list(y.shape)}", 0, float("nan"), float("nan"))
    if x.dtype != y.dtype and "C64" in (x.dtype, y.dtype):
        return Change(name, f"dtype: {x.dtype} and {y.dtype}", 0, float("nan"), float("nan"))
    elements, largest, square, norm = 0, 0.0, 0.0, 0.0
    limit = _PIECE_BYTES // max(itemsize(x.dtype), itemsize(y.dtype))
    for box in contiguous_parts(whole(x.shape), limit):
        left, right = _read(x, box, reader), _read(y, box, reader)
        if x.dtype == y.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
            norm += float(left.double().nan_to_num().square().sum())
            continue
        p, q = left.double(), right.double()
        unlike = _bits(left) != _bits(right) if x.dtype == y.dtype else (p != q) & ~(p.isnan() & q.isnan())
        gap = torch.where(unlike & (p != q), (p - q).abs(), 0.0)
        gap = torch.where(gap.isnan(), float("inf"), gap)
        elements += int(unlike.sum())
        largest = max(largest, float(gap.max()))
        square += float(gap.square().sum())
        norm += float(p.nan_to_num().square().sum())
    if x.dtype != y.dtype:
        what = f"dtype: {x.dtype} and {y.dtype}"
    elif elements:
        what = "content"
    else:
        return None
    relative = (square / norm) ** 0.5 if norm else float("inf") if square else 0.0
    return Change(name, what, elements, largest, relative)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


def _read(tensor: StoredTensor, box: Box, reader: SourceReader) -> Any:
    piece = _piece(tensor, box, reader)
    return (torch.view_as_real(piece) if piece.is_complex() else piece).reshape(-1)


def _piece(tensor: StoredTensor, box: Box, reader: SourceReader) -> torch.Tensor:
    wanted = wanted_box("piece", tensor.dtype, tensor.shape, box)
    here = identity(tensor.name, tensor.shape)
    return read_box(wanted, (here,), {tensor.name: tensor}, reader, Staging(IOOptions()))
