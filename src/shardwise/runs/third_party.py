"""Third-party training runs in one record: Accelerate, the HF Trainer, torchtitan, transformers, torch."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import torch

from ..catalog.dcp import (
    ByteRange,
    DcpCheckpoint,
    ItemFiles,
    entries_left_out,
    model_in,
    optimizers_in,
    read_dcp,
)
from ..catalog.open import holds_model, open_catalog
from ..catalog.pickles import Names, Record
from ..catalog.quantized import OpenFile, open_file
from ..catalog.records import (
    FULL_STATE_STEM,
    MEGATRON,
    MEGATRON_RUN,
    METADATA_NAME,
    Catalog,
    Kind,
    StoredFile,
    StoredTensor,
    kind_below,
    kind_of,
    megatron_folder,
    rank_files_in,
    refuse_below,
    refuse_foreign,
    stem_of_ranks,
    zero_folder,
)
from ..catalog.torch_files import ANY_NAMES, TENSOR_NAMES, Archive, Dtype, Saved, read_torch_file
from ..dtypes import itemsize, torch_dtype
from ..engine.objects import SourceReader
from ..errors import FormatError, IntegrityError, SourceError, StateError, UnsupportedConversionError
from ..format.header import TRAINER_FILE, describe_steps
from ..format.slices import StateKey
from ..limits import MAX_BYTES_PER_BYTE, MAX_VALUE_BYTES, brief, is_count, read_json
from ..objects import frozen
from ..storage import is_directory, is_file, looking_once, names_in
from .history import ranks_of

if TYPE_CHECKING:
    from ..catalog.megatron import MegatronCheckpoint
    from ..catalog.zero import ZeroCheckpoint

# ----------------------------------------------------------------------------------------------------
# Reads pickled values and small tensors of other programs as plain values; builds no other object.

#: Items up to this size are cached by their bytes.
_SMALL_BYTES = 64 * 1024


class Objects:
    """Reads pickled items of DCP files. Equal bytes give one value: each parameter repeats its group's settings.

    ``files``: as ``known`` of :class:`.ItemFiles`.
    """

    def __init__(self, files: Iterable[StoredFile] = ()) -> None:
        self._known: dict[bytes, Any] = {}
        self._files = ItemFiles(files)

    def __enter__(self) -> Objects:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def value(self, where: ByteRange) -> Any:
        """The value of an item. Raises :class:`SourceError` as :func:`plain_values` does."""
        file = self._files.file(where)
        if where.nbytes > _SMALL_BYTES:
            return _plain_values(file, where.offset_bytes, where.nbytes)
        key = file.read(where.offset_bytes, where.nbytes)
        if key not in self._known:
            self._known[key] = _plain_values(file, where.offset_bytes, where.nbytes)
        return self._known[key]


def plain_values(path: str) -> Any:
    """Plain values and tensors from a file of ``torch.save``; builds no other object.

    Rank-local. Raises :class:`SourceError`, :class:`FormatError` for anything else, and for more bytes of tensors than
    :data:`~shardwise.limits.MAX_VALUE_BYTES`.
    """
    with open_file(path) as file:
        return _plain_values(file, 0, file.stored.nbytes)


def plain_parts(path: str, wanted: Sequence[str]) -> dict[Any, Any]:
    """The entries of the dict in a file of ``torch.save``, with the plain values of those in ``wanted`` and None for the others.

    Other entries may have objects of any class, which aren't built. Raises as :func:`plain_values`.
    """

    def pick(content: Any) -> Any:
        if type(content) is not dict:
            raise FormatError(f"holds {brief(content)}, expected a dict", path=path)
        return {key: value if key in wanted else None for key, value in content.items()}

    with open_file(path) as file:
        found: dict[Any, Any] = _plain_values(file, 0, file.stored.nbytes, ANY_NAMES, pick)
        return found


def _plain_values(
    file: OpenFile,
    offset_bytes: int,
    nbytes: int,
    names: Names = TENSOR_NAMES,
    pick: Callable[[Any], Any] = lambda content: content,
) -> Any:
    archive, path = Archive(file, offset_bytes, nbytes, names), file.stored.path
    known: dict[int, torch.Tensor] = {}

    def read(saved: Any) -> torch.Tensor:
        if id(saved) in known:  # the pickle has it once: one tensor, as torch.load gives it
            return known[id(saved)]
        found = torch.empty(saved.sizes, dtype=torch_dtype(saved.code))
        if found.numel():
            view = memoryview(found.reshape(-1).view(torch.uint8).numpy().data)
            content = file.read(archive.payload(saved, saved.code, "a value"), view.nbytes)
            if len(content) != view.nbytes:
                raise IntegrityError("ends before the end of a value: truncated", path=path)
            view[:] = content
        known[id(saved)] = found
        return found

    return PlainValues(path, nbytes, read).of(pick(archive.content))


class PlainValues:
    """Turns the records from the pickle in a file of ``nbytes`` into plain values. ``read`` gives a tensor's content.

    The tensors of one object have at most :data:`~shardwise.limits.MAX_VALUE_BYTES` together.
    """

    def __init__(self, path: str, nbytes: int, read: Callable[[Any], torch.Tensor]) -> None:
        self._path, self._read = path, read
        self._left = min(MAX_VALUE_BYTES, MAX_BYTES_PER_BYTE * nbytes)

    def of(self, value: Any) -> Any:
        """The plain value. Raises :class:`FormatError` for anything else."""
        cls = type(value)
        if cls is dict:
            return {k: self.of(v) for k, v in value.items()}
        if cls in (list, tuple):
            return cls(map(self.of, value))
        if value is None or cls in _PLAIN:
            return value
        if cls is Dtype and value.code is not None:
            return torch_dtype(value.code)
        if cls is StoredTensor:
            return self._within(value.nbytes, value)
        if cls is Saved and value.code is not None:
            return self._within(math.prod(value.sizes) * itemsize(value.code), value)
        if cls is Record:
            raise FormatError(
                f"holds an object of {brief(value.kind)}, and only plain values are read", path=self._path
            )
        raise FormatError(
            f"holds more than plain values, and only these are read: {brief(value)}", path=self._path
        )

    def _within(self, nbytes: int, value: Any) -> torch.Tensor:
        self._left -= nbytes
        if self._left < 0:
            raise FormatError(f"holds values of more than {MAX_VALUE_BYTES} bytes", path=self._path)
        return self._read(value)


_PLAIN = (bool, int, float, complex, str, bytes, set, Counter)


def plain_tensor(stored: StoredTensor, files: Iterable[StoredFile] = ()) -> torch.Tensor:
    """A (small) stored tensor, read whole. ``files``: as of :class:`.SourceReader`. Raises :class:`FormatError` if it is large, or not in one chunk."""
    if stored.nbytes > MAX_VALUE_BYTES:
        where = stored.chunks[0].path if stored.chunks else None
        raise FormatError(
            f"{brief(stored.name)} has {stored.nbytes} bytes; a value that is not a weight has at most {MAX_VALUE_BYTES}",
            path=where,
        )
    found = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
    view = memoryview(found.reshape(-1).view(torch.uint8).numpy().data)
    with SourceReader(files=files) as reader:
        for chunk in stored.chunks:
            if chunk.box.sizes != stored.shape:
                raise FormatError(f"{stored.name!r} is small but was spread over ranks", path=chunk.path)
            reader.read_into(chunk.path, chunk.offset_bytes, view)
    return found


def step_in(found: DcpCheckpoint) -> int | None:
    """``step`` of a state dict, or of torchtitan's ``train_state``: a number, or a tensor of one element.

    None if there is none. Raises :class:`FormatError` for a number that can't count steps.
    """
    for name in ("step", "train_state.step"):
        if name in found.objects:
            with Objects(found.catalog.files) as read:
                value = read.value(found.objects[name])
        elif name in found.catalog.tensors and found.catalog.tensors[name].shape in ((), (1,)):
            value = plain_tensor(found.catalog.tensors[name], found.catalog.files)
        else:
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
            value = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(value, int | float | complex):
            return count_of_steps(value, name, found.catalog.root)
    return None


def count_of_steps(value: object, what: str, path: str) -> int:
    """``value`` if it counts steps. Raises :class:`FormatError` if not."""
    if type(value) is not int or not is_count(value):
        raise FormatError(f"{what} is {brief(value)}, which can't count steps", path=path)
    return value


def nested(found: DcpCheckpoint, keys: Sequence[str]) -> dict[Any, Any]:
    """An entry of the saved state dict, put together from its items; empty if there is none.

    Raises :class:`FormatError` if one item lies inside another.
    """
    root: dict[Any, Any] = {}
    with Objects(found.catalog.files) as read:
        for name in (*found.objects, *found.catalog.tensors):
            path = found.paths.get(name, (name,))
            if len(path) < 2 or path[0] not in keys:
                continue
            node = root
            for part in path[1:-1]:
                node = node.setdefault(part, _Node())
                if type(node) is not _Node:
                    raise FormatError(
                        f"{brief(name)} is inside another item: damaged", path=found.catalog.root
                    )
            if path[-1] in node:
                raise FormatError(f"{brief(name)} is stored twice: damaged", path=found.catalog.root)
            where = found.objects.get(name)
            node[path[-1]] = (
                read.value(where) if where else plain_tensor(found.catalog.tensors[name], found.catalog.files)
            )
    return {k: _with_lists(v) for k, v in root.items()}


class _Node(dict[Any, Any]):
    """A dict put together from items, as opposed to an item that is a dict."""


def _with_lists(value: Any) -> Any:
    """``value`` with lists for mappings whose keys are numbers; keys of real mappings are text."""
    if type(value) is not _Node:
        return value
    if value and all(isinstance(k, int) for k in value):
        return [_with_lists(value[k]) for k in sorted(value)]
    return {k: _with_lists(v) for k, v in value.items()}


# ----------------------------------------------------------------------------------------------------
# Third-party training runs in one record: Accelerate, the HF Trainer, torchtitan, transformers, torch.
#
# Models are catalogs; optimizers are tensors named ``<parameter>.<state>`` and settings. Values that are not tensors
# (settings of parameter groups, a scheduler's state) are pickles. Only :mod:`..catalog.pickles` reads them, as plain
# values.

_OPTIMIZER_STEM = "optimizer"
_STEP_FOLDER = re.compile(r"(?:global_step_|step-)(\d{1,12})")
#: The stems of the same in the names of per-rank files.
_RANK_FILE_STEMS = {FULL_STATE_STEM: "model", _OPTIMIZER_STEM: "optim"}
#: What Lightning puts next to its DCP files: everything of the state that isn't sharded.
_META_NAME, _LIGHTNING_SCHEDULERS = "meta.pt", "lr_schedulers"
#: Entries of a state dict that hold a scheduler or a scaler.
_FOREIGN_OPTIMIZER = re.compile(r"global_step\d+|.*_optim_states\.pt")
_DOCUMENT_KEYS: Mapping[str, tuple[str, ...]] = {
    "scheduler": ("lr_scheduler", "scheduler"),
    "scaler": ("scaler",),
}
_DOCUMENT_FILES: Mapping[str, tuple[str, ...]] = {
    "scheduler": ("scheduler.bin", "scheduler.pt"),
    "scaler": ("scaler.pt",),
}


@frozen
class StoredOptimizer:
    """A stored optimizer: tensors named ``<parameter>.<state>``, other values, settings."""

    catalog: Catalog
    values: Mapping[str, Mapping[str, Any]]
    """States that are not tensors, by parameter."""
    groups: Sequence[Mapping[str, Any]] | None
    """The settings of each group, with its parameters' names under ``params``; None for a flattened state dict, which
    does not keep the groups."""
    settings: Mapping[str, Mapping[str, Any]]
    """The settings of each parameter, if groups are not stored."""

    @property
    def is_numbered(self) -> bool:
        """Whether parameters have numbers, as ``optimizer.state_dict()`` gives them, in place of names."""
        return self.groups is not None and any(type(n) is int for g in self.groups for n in g["params"])

    def named_like(self, members: Sequence[Sequence[str]]) -> StoredOptimizer:
        """A numbered optimizer with this run's names. The number of a parameter is its position in the groups, as for torch's own
        ``load_state_dict``.

        ``members``: the names in each group of the live optimizer. Raises :class:`StateError` for groups of other sizes, or if
        the stored groups have names (``param_names``) in another order.
        """
        if not self.is_numbered:
            return self
        groups = self.groups or ()
        sizes = [len(g["params"]) for g in groups]
        if sizes != [len(names) for names in members]:
            raise self._not_matched(
                f"in groups of {sizes}; this run's has groups of {[len(m) for m in members]}"
            )
        for group, names in zip(groups, members, strict=True):
            stored = group.get("param_names")
            if stored is not None and list(stored) != list(names):
                first = next(
                    (pair for pair in zip(stored, names, strict=False) if pair[0] != pair[1]), ("", "")
                )
                raise self._not_matched(f"and names {brief(first[0])} where this run has {first[1]}")
        named = {
            str(n): name
            for g, m in zip(groups, members, strict=True)
            for n, name in zip(g["params"], m, strict=True)
        }
        if strange := [key.parameter for key in self.keys.values() if key.parameter not in named]:
            raise FormatError(
                f"has state for parameter {strange[0]}, which is in no group", path=self.catalog.root
            )
        own = [
            {**{k: v for k, v in g.items() if k != "param_names"}, "params": list(m)}
            for g, m in zip(groups, members, strict=True)
        ]
        return replace(self._renamed(lambda n: named.get(n, n)), groups=own, settings={})

    def below(self, prefix: str) -> StoredOptimizer:
        """An optimizer by names, with those of the model that a saved module has under ``prefix``. Raises :class:`StateError` for others."""

        def named(stored: str) -> str:
            if not stored.startswith(prefix):
                raise StateError(
                    f"{self.catalog.root}: contains optimizer state for {brief(stored)}, which is not in {prefix!r}, the part of the saved module "
                    f"that is the model. Restore it in a run (shardwise.restore) and save there"
                )
            return stored.removeprefix(prefix)

        groups = self.groups and [{**g, "params": [named(n) for n in g["params"]]} for g in self.groups]
        return replace(self._renamed(named), groups=groups)

    def _renamed(self, named: Callable[[str], str]) -> StoredOptimizer:
        """The same tensors, values and settings of parameters with other names. The groups stay as they are."""
        tensors = {
            name: replace(self.catalog.tensors[short], name=name)
            for short, key in self.keys.items()
            for name in [StateKey(named(key.parameter), key.state).name]
        }
        return replace(
            self,
            catalog=replace(self.catalog, tensors=tensors),
            values={named(owner): values for owner, values in self.values.items()},
            settings={named(owner): settings for owner, settings in self.settings.items()},
        )

    def _not_matched(self, what: str) -> StateError:
        return StateError(
            f"{self.catalog.root}: stores the optimizer state by parameter index, {what}. Create the optimizer as the saved run did "
            f"(same groups, same order), or restore only the model (TrainState(model=…))"
        )

    @property
    def keys(self) -> dict[str, StateKey]:
        """The stored parameter and its state that each of the catalog's tensors is."""
        return {name: StateKey.of(name) for name in self.catalog.tensors}

    def groups_like(self, members: Sequence[Sequence[str]], live: Mapping[str, str]) -> list[dict[str, Any]]:
        """Names and options of each stored group. If groups are not stored: those of the live groups ``members``, each with
        the settings that its parameters were stored with.

        ``live``: stored name → this run's name. Raises :class:`StateError` if groups are not stored and parameters of
        one group had different settings.
        """
        if self.groups is not None:
            return [
                {
                    "names": [live.get(n, n) for n in group.get("params", ())],
                    "options": {k: v for k, v in group.items() if k != "params"},
                }
                for group in self.groups
            ]
        found = []
        by_live = {live.get(owner, owner): options for owner, options in self.settings.items()}
        for k, names in enumerate(members):
            each = [by_live.get(n, {}) for n in names]
            if len({as_text(options) for options in each}) > 1:
                raise StateError(
                    f"parameter group {k} of this run holds parameters that were saved with different settings; build "
                    f"the groups as the saved run did"
                )
            found.append({"names": list(names), "options": dict(each[0]) if each else {}})
        return found

    def groups_as_stored(self) -> list[dict[str, Any]]:
        """Names and options of each group; without stored groups, one for each set of equal settings."""
        if self.groups is not None:
            return self.groups_like((), {})
        members: dict[str, list[str]] = {}
        for name, options in self.settings.items():
            members.setdefault(as_text(options), []).append(name)
        return self.groups_like(tuple(members.values()), {})


def as_text(value: Any) -> str:
    """Equal values as equal text: tensors can't be compared as a whole."""

    def comparable(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raw = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            return value.dtype, value.shape, hashlib.sha256(raw).hexdigest()
        if type(value) in (list, tuple):
            return type(value)(map(comparable, value))
        if isinstance(value, Mapping):
            return {key: comparable(value[key]) for key in sorted(value, key=repr)}
        return value

    return repr(comparable(value))


def is_third_party(path: str) -> bool:
    """Whether another program wrote a path, as its marks say: a run that can be restored, or one that is refused by its name."""
    with looking_once(path):
        if kind_of(path) is not None:
            return True
        if not is_directory(path) or _has(path, "manifest.json"):
            return False
        if _sources(path, FULL_STATE_STEM) or _sources(path, _OPTIMIZER_STEM):
            return True
        return describe_steps(path) is None and kind_below(path) is not None


def find_run(path: str | os.PathLike[str]) -> ThirdPartyRun:
    """The training run at ``path``. Reads only names of files, and the one in DeepSpeed's ``latest``.

    Raises :class:`SourceError` if there is none, or by its name if it can't be read.
    """
    root = os.fspath(path)
    refuse_foreign(root)
    if (folder := zero_folder(root)) is not None:
        return ThirdPartyRun(root, (folder,), (folder,), kind_of(root), is_zero=True)
    if kind_of(root) in (MEGATRON, MEGATRON_RUN) and not holds_model(root):
        folder = megatron_folder(root) or root
        return ThirdPartyRun(root, (folder,), (folder,), kind_of(root), is_megatron=True)
    models = _sources(root, FULL_STATE_STEM)
    if not models and (is_file(root) or holds_model(root)):
        models = (root,)
    if not models:
        what = describe_steps(root)
        if what is None:
            refuse_below(root)
        _listed(root)  # raises if it can't be read
        raise SourceError(what or "contains no known training state and no model", path=root)
    return ThirdPartyRun(root, models, _sources(root, _OPTIMIZER_STEM), kind_of(root))


def _sources(root: str, stem: str) -> tuple[str, ...]:
    """The paths of models or optimizers, in order: DCP directories or files of the full state."""
    if _has(root, METADATA_NAME):
        return (root,)
    if of_ranks := rank_files_in(root, _RANK_FILE_STEMS[stem]):
        return of_ranks[:1]
    found: list[str] = []
    names: list[tuple[str, ...]] = [
        (f"{stem}_0", f"{stem}.bin", f"{stem}.pt")
    ]  # Accelerate's, and the HF Trainer's
    while names:
        folder, *files = (os.path.join(root, n) for n in names.pop())
        of_ranks = rank_files_in(root, os.path.basename(folder))
        here = folder if _has(folder, METADATA_NAME) else next(filter(is_file, (*of_ranks[:1], *files)), None)
        if here is not None:
            found.append(here)
            names.append((f"{stem}_{len(found)}", f"{stem}_{len(found)}.bin"))
    if not found and _has(os.path.join(root, stem), METADATA_NAME):
        found.append(os.path.join(root, stem))
    return tuple(found)


def _has(root: str, name: str) -> bool:
    return is_file(os.path.join(root, name))


def _listed(root: str) -> list[str]:
    try:
        return sorted(names_in(root))
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror}", path=root) from error


@frozen
class ThirdPartyRun:
    """Locates the parts of a run. Reads a part when it is asked for, and each DCP directory once.

    Rank-local; reads no payload. Raises :class:`SourceError` and its subclasses, :class:`StateError` for a missing
    part.
    """

    path: str
    models: tuple[str, ...]
    optimizers: tuple[str, ...]
    """Files and DCP directories with optimizers; a DCP directory may have several, or none."""
    kind: Kind | None = None
    is_zero: bool = False
    """Whether it's of DeepSpeed ZeRO: one folder has the files of model and optimizer."""
    is_megatron: bool = False
    """Whether it's of Megatron-core."""
    _read: dict[str, DcpCheckpoint] = field(default_factory=dict, repr=False)
    _plain: dict[str, Mapping[Any, Any]] = field(default_factory=dict, repr=False)
    _zeros: list[ZeroCheckpoint] = field(default_factory=list, repr=False)
    _megatrons: list[MegatronCheckpoint] = field(default_factory=list, repr=False)

    def model(self, k: int) -> Catalog:
        """The k-th model, under module names (or hub names, if there is only a hub directory)."""
        source = self.models[k]
        if self._zero is not None:
            return self._zero.catalog
        if self._megatron is not None:
            return self._megatron.catalog
        found = model_in(self._dcp(source)) if _has(source, METADATA_NAME) else None
        if found is None or not found.tensors:
            found = open_catalog(source)
        return replace(found, kind="slices") if "DCP_VERSION" in found.metadata else found

    @property
    def stored_optimizers(self) -> tuple[tuple[str, str], ...]:
        """The path of each optimizer, in order, and its entry in a DCP directory."""
        found: list[tuple[str, str]] = []
        if self._zero is not None and self._zero.optimizer is None:
            return ()
        if self._megatron is not None:
            return ((self.models[0], ""),) if self._megatron.moments else ()
        for source in self.optimizers:
            heads = optimizers_in(self._dcp(source)) if _has(source, METADATA_NAME) else ("",)
            found += [(source, head) for head in heads]
        return tuple(found)

    def optimizer(self, k: int) -> StoredOptimizer:
        """The k-th optimizer."""
        stored = self.stored_optimizers
        if k >= len(stored):
            raise StateError(f"{self.path}: {self._no_optimizer(k)}; leave it out of the state")
        source, head = stored[k]
        if self._zero is not None and self._zero.optimizer is not None:
            return _as_torchs(_of_state_dict(self._zero.optimizer(), self._zero.catalog.files, source))
        if (megatron := self._megatron) is not None:
            catalog = replace(megatron.catalog, tensors=megatron.moments)
            owners = {StateKey.of(name).parameter for name in megatron.moments}
            steps = {owner: {"step": torch.tensor(float(megatron.updates))} for owner in owners}
            # Groups are numbers of ranks' own parameters: this run's settings count.
            return StoredOptimizer(catalog, steps, None, {owner: {} for owner in owners})
        if is_file(source):
            return _of_state_dict(*read_torch_file(source), source)
        return _of_dcp(self._dcp(source), head)

    def unread_optimizer(self) -> str:
        """Why the optimizer that is stored next to the model can't be read; empty if there is none."""
        why = self._no_optimizer(0) if is_directory(self.path) else ""
        return f"{self.path} {why}" if "DeepSpeed" in why else ""

    def _no_optimizer(self, k: int) -> str:
        if self._megatron is not None:
            return (
                "contains no optimizer of Megatron that can be read: of models without experts one can be that has its states in the shapes of "
                "parameters (--dist-ckpt-optim-fully-reshardable)"
            )
        others = [name for name in _listed(self.path) if _FOREIGN_OPTIMIZER.fullmatch(name)] if k == 0 else []
        if others:
            return f"contains no optimizer that can be read ({', '.join(others[:3])} of DeepSpeed can't be)"
        return "contains no optimizer" if k == 0 else f"holds {k} optimizer(s)"

    def document(self, name: str) -> dict[Any, Any]:
        """The stored state of ``scheduler`` or ``scaler``. From DCP, all mapping keys are text."""
        file = next((f for f in _DOCUMENT_FILES[name] if _has(self.path, f)), None)
        if file is not None:
            path = os.path.join(self.path, file)
            found = plain_values(path)
            if type(found) is not dict:
                raise FormatError(f"holds {brief(found)}, but a {name}'s state is a dict", path=path)
            return found
        for dcp in self._dcps:
            if found := nested(dcp, _DOCUMENT_KEYS[name]):
                return found
        if name == "scheduler" and self._zero is not None and type(self._zero.scheduler) is dict:
            zero, path = self._zero, self.models[0]
            plain = PlainValues(path, zero.catalog.nbytes, lambda t: plain_tensor(t, zero.catalog.files))
            found = dict(plain.of(zero.scheduler))
            if "last_epoch" not in found:
                raise UnsupportedConversionError(
                    f"{self.path}: its scheduler is DeepSpeed's own, of step {brief(found.get('last_batch_iteration'))}, which torch's can't "
                    f"take; leave it out of the state, and make one with last_epoch= this step"
                )
            return found
        if type(of_ranks := self._of_ranks(_DOCUMENT_KEYS[name])) is dict:
            return of_ranks
        schedulers = self._meta.get(_LIGHTNING_SCHEDULERS) if name == "scheduler" else None
        if type(schedulers) is list and len(schedulers) == 1 and type(schedulers[0]) is dict:
            return schedulers[0]
        entries = f"no entry {' or '.join(map(repr, _DOCUMENT_KEYS[name]))} in the state dict that DCP saved"
        where = entries if _has(self.path, METADATA_NAME) else " or ".join(_DOCUMENT_FILES[name])
        raise StateError(f"{self.path}: contains no {name} ({where}); leave it out of the state")

    def is_in_a_file(self, name: str) -> bool:
        """Whether the state of ``scheduler`` or ``scaler`` is stored with the types of its keys, not as items of DCP."""
        if any(_has(self.path, file) for file in _DOCUMENT_FILES[name]):
            return True
        return name == "scheduler" and _LIGHTNING_SCHEDULERS in self._meta

    @property
    def step(self) -> int | None:
        """The step from the HF Trainer's file, a state dict or the name of torchtitan's folder; None if none has it."""
        file = os.path.join(self.path, TRAINER_FILE)
        if is_file(file):
            document = read_json(file, "the HF Trainer's state")
            if not isinstance(document, dict):
                raise FormatError("not the HF Trainer's state: not a JSON object", path=file)
            return count_of_steps(document.get("global_step", 0), "global_step", file)
        if self._zero is not None and self._zero.step is not None:
            return self._zero.step
        for dcp in self._dcps:
            if (step := step_in(dcp)) is not None:
                return step
        if self._megatron is not None and self._megatron.step is not None:
            return self._megatron.step
        if "global_step" in self._meta:
            return count_of_steps(
                self._meta["global_step"], "global_step", os.path.join(self.path, _META_NAME)
            )
        folders = os.path.abspath(self.path).split(os.sep)[-2:]  # verl: global_step_20/actor
        named = [m for m in map(_STEP_FOLDER.fullmatch, reversed(folders)) if m]
        return int(named[0][1]) if named else None

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote the run; 0 for a full state alone, which doesn't record it."""
        if self._zero is not None:
            return self._zero.world_size
        if self._megatron is not None:
            return self._megatron.world_size
        files = {os.path.basename(f.path) for f in self.model(0).files}
        if stem_of_ranks(next(iter(files), "")):
            return len(files)
        writers = {m[1] for f in files if (m := re.match(r"__(\d+)_", f))}
        return ranks_of(() if is_file(self.path) else _listed(self.path)) or len(writers)

    def _of_ranks(self, keys: Collection[str]) -> Any:
        """The first of these entries that all ranks saved as their ``extra_state``; None if there is none."""
        if not (paths := rank_files_in(self.path, "extra_state")):
            return None

        def pick(content: Any) -> Any:
            return [content[key] for key in keys if type(content) is dict and key in content][:1]

        content, files = read_torch_file(paths[0], pick)
        plain = PlainValues(self.path, sum(file.nbytes for file in files), lambda t: plain_tensor(t, files))
        return next(iter(plain.of(content)), None)

    @property
    def _meta(self) -> Mapping[Any, Any]:
        """The entries of Lightning's file, and the values of those that are read; empty if there is none."""
        if _META_NAME not in self._plain:
            file = os.path.join(self.path, _META_NAME)
            is_there = _has(self.path, METADATA_NAME) and is_file(file)
            self._plain[_META_NAME] = (
                plain_parts(file, ("global_step", _LIGHTNING_SCHEDULERS)) if is_there else {}
            )
        return self._plain[_META_NAME]

    def left_out(self, documents: Collection[str], assets: Collection[str]) -> list[str]:
        """What is stored here and is neither a model, an optimizer, one of ``documents``, nor one of ``assets``: a line each."""
        lines: list[str] = []
        for found in self._dcps:
            read = {name for items in optimizers_in(found).values() for name in items} | {
                "step",
                "train_state.step",
            }
            kept = {t.chunks[0] for t in model_in(found).tensors.values() if t.chunks}
            read |= {n for n, t in found.catalog.tensors.items() if not t.chunks or t.chunks[0] in kept}
            entries = {key for name in documents for key in _DOCUMENT_KEYS.get(name, ())}
            read |= {n for n, path in found.paths.items() if path[0] in entries}
            lines += [
                f"{name}: an entry of the state dict, not read" for name in entries_left_out(found, read)
            ]
        if self._meta:
            known = {"global_step", *((_LIGHTNING_SCHEDULERS,) if "scheduler" in documents else ())}
            rest = [str(key) for key in self._meta if key not in known]
            lines += [f"{_META_NAME}: its {', '.join(map(brief, rest))}"] if rest else []
        return lines + self._files_left_out(documents, assets)

    def _files_left_out(self, documents: Collection[str], assets: Collection[str]) -> list[str]:
        """Files and folders of a run's directory that nothing was read from."""
        if is_file(self.path) or self.kind is None or "restore" not in self.kind.works:
            return []
        known = {*assets, METADATA_NAME, _META_NAME, TRAINER_FILE, "config.json"}
        known |= {file for name in documents for file in _DOCUMENT_FILES.get(name, ())}
        known |= {
            os.path.basename(source) for source in (*self.models, *self.optimizers) if source != self.path
        }
        for k in range(len(self.models)):
            catalog = self.model(k)
            known |= {os.path.basename(f.path) for f in catalog.files} | set(catalog.ignored_files)
            known |= {"latest"} if self.is_zero else set()
            known |= {name for name in _listed(self.path) if name.endswith((".index.json", ".distcp"))}
        rest = [name for name in _listed(self.path) if name not in known]
        return [f"{name}: not read" for name in rest]

    @property
    def _dcps(self) -> Iterator[DcpCheckpoint]:
        """The DCP directories with models or optimizers, each read when it is come to."""
        sources = {} if self.is_megatron else dict.fromkeys((*self.models, *self.optimizers))
        return (self._dcp(source) for source in sources if _has(source, METADATA_NAME))

    @property
    def _zero(self) -> ZeroCheckpoint | None:
        """What DeepSpeed ZeRO saved, read when it's first asked for; None in other runs."""
        if self.is_zero and not self._zeros:
            from ..catalog.zero import read_zero

            self._zeros.append(read_zero(self.models[0]))
        return self._zeros[0] if self._zeros else None

    @property
    def _megatron(self) -> MegatronCheckpoint | None:
        """What Megatron-core saved, read when it's first asked for; None in other runs."""
        if self.is_megatron and not self._megatrons:
            from ..catalog.megatron import read_megatron

            self._megatrons.append(read_megatron(self.models[0]))
        return self._megatrons[0] if self._megatrons else None

    def _dcp(self, source: str) -> DcpCheckpoint:
        if source not in self._read:
            self._read[source] = read_dcp(source)
        return self._read[source]


# ----------------------------------------------------------------------------------------------------
# Optimizers


def _of_dcp(found: DcpCheckpoint, head: str) -> StoredOptimizer:
    """The optimizer in the entry ``head`` of a DCP directory."""
    parts = optimizers_in(found)[head]
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, dict[str, Any]] = {}
    items: dict[str, dict[str, Any]] = {}
    with Objects(found.catalog.files) as read:
        for name, rest in parts.items():
            part, _, short = rest.partition(".")
            owner, _, key = short.rpartition(".")
            t = found.catalog.tensors.get(name)
            if t is None:
                value = read.value(found.objects[name])
                if not short:
                    if value:
                        raise FormatError(
                            f"its {rest} is one item, not one for each parameter", path=found.catalog.root
                        )
                    continue  # an optimizer without a step has an empty state
                if part == "state" and _has_tensor(value):
                    raise _no_tensor(owner, key, value, found.catalog.root)
                (values if part == "state" else items).setdefault(owner, {})[key] = value
            elif part == "state":
                tensors[short] = replace(t, name=short)
            else:  # a learning rate may be a tensor
                items.setdefault(owner, {})[key] = plain_tensor(t, found.catalog.files)
    catalog = replace(found.catalog, tensors=tensors)
    if all(re.fullmatch("[0-9]{1,9}", owner) for owner in items):
        groups = [_group(items[owner], catalog.root) for owner in sorted(items, key=int)]
        return StoredOptimizer(catalog, values, groups, {})
    settings = {o: {k: v for k, v in options.items() if k != "params"} for o, options in items.items()}
    return StoredOptimizer(catalog, values, None, settings)


def _of_state_dict(content: Any, files: tuple[StoredFile, ...], path: str) -> StoredOptimizer:
    """The optimizer whose state dict, with places for its tensors, is ``content``."""
    state, groups = (
        (content.get(k) for k in ("state", "param_groups")) if isinstance(content, dict) else (0, 0)
    )
    if (
        not isinstance(state, dict)
        or not isinstance(groups, list)
        or not all(type(n) in (int, str) and isinstance(v, dict) for n, v in state.items())
    ):
        raise FormatError("not an optimizer's state dict: expected entries state and param_groups", path=path)
    nbytes = sum(file.nbytes for file in files)
    plain = PlainValues(path, nbytes, lambda t: plain_tensor(t, files))
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for owner, states in state.items():
        for key, value in states.items():
            if isinstance(value, StoredTensor):
                name = StateKey(str(owner), str(key)).name
                tensors[name] = replace(value, name=name)
            elif _has_tensor(value):
                raise _no_tensor(owner, key, value, path)
            else:
                values.setdefault(str(owner), {})[str(key)] = plain.of(value)
    settings = [_group(plain.of(group), path) for group in groups]
    return StoredOptimizer(Catalog("full state", path, tensors, files), values, settings, {})


def _as_torchs(stored: StoredOptimizer) -> StoredOptimizer:
    """The state of DeepSpeed's own Adam as that of torch's, which has the step as a tensor and always corrects the bias."""
    groups = [dict(group) for group in stored.groups or ()]
    values = {owner: dict(own) for owner, own in stored.values.items()}
    for group in groups:
        if group.get("bias_correction") in (True, 1):
            del group["bias_correction"]
        steps = {name: values.get(name, {}).get("step", group.get("step")) for name in group["params"]}
        group.pop("step", None)  # older ones count by group
        for name, step in steps.items():
            if type(step) is int and is_count(step):
                values.setdefault(name, {})["step"] = torch.tensor(float(step))
    return replace(stored, groups=groups, values=values)


def _has_tensor(value: Any) -> bool:
    if type(value) in (list, tuple, dict):
        return any(map(_has_tensor, value.values() if type(value) is dict else value))
    return isinstance(value, StoredTensor | torch.Tensor)


def _no_tensor(owner: Any, key: Any, value: Any, path: str) -> StateError:
    return StateError(
        f"{path}: the optimizer's state {brief(key)} of parameter {brief(owner)} is a {type(value).__name__} of tensors, and only "
        f"tensors and plain values can be put into shards. Restore the model alone (TrainState(model=…))"
    )


def _group(found: Any, path: str) -> dict[str, Any]:
    """The settings of a group. Raises :class:`FormatError` if it does not list its parameters, by name or by number."""
    params = found.get("params") if type(found) is dict else None
    if type(params) is not list or {type(n) for n in params} not in ({int}, {str}, set()):
        raise FormatError(
            f"expected an optimizer's group, a dict with a list of params by name or by number, got {brief(found)}",
            path=path,
        )
    return {str(k): v for k, v in found.items()}
