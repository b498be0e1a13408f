"""Third-party training runs in one record: Accelerate, the HF Trainer, torchtitan, transformers, torch.

Models are catalogs; optimizers are tensors named ``<parameter>.<state>`` and settings. Values that are not tensors
(settings of parameter groups, a scheduler's state) are pickles. Only :mod:`..catalog.pickles` reads them, as plain
values.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..catalog import Catalog, StoredTensor
from ..catalog.dcp import METADATA_NAME, DcpCheckpoint, model_in, read_dcp
from ..catalog.open import holds_model, open_catalog
from ..catalog.torchfile import FULL_STATE_STEM, read_torch_file
from ..errors import FormatError, SourceError, StateError
from ..format.states import StateKey
from ..format.steps import describe_steps
from ..limits import brief, read_json
from ..storage import is_directory, is_file, looking_once, names_in
from .pickled_values import Objects, PlainValues, count_of_steps, nested, plain_tensor, plain_values, step_in

__all__ = ["StoredOptimizer", "ThirdPartyRun", "find_run", "is_third_party"]

_OPTIMIZER_STEM = "optimizer"
#: Names of slices by transformers (and DCP's safetensors writer), and of single ranks' parts by Accelerate.
_SLICE_OR_PART = re.compile(rf"shard-\d+-model-\d+-of-\d+\.safetensors|{FULL_STATE_STEM}.*_rank\d+\.bin")
#: Entries of a state dict that hold an optimizer, a scheduler or a scaler.
_OPTIMIZER_KEYS = ("optimizer", "optim")
_DOCUMENT_KEYS: Mapping[str, tuple[str, ...]] = {
    "scheduler": ("lr_scheduler", "scheduler"),
    "scaler": ("scaler",),
}
_DOCUMENT_FILES: Mapping[str, tuple[str, ...]] = {
    "scheduler": ("scheduler.bin", "scheduler.pt"),
    "scaler": ("scaler.pt",),
}


@dataclass(frozen=True, slots=True)
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
            if len({_as_text(options) for options in each}) > 1:
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
            members.setdefault(_as_text(options), []).append(name)
        return self.groups_like(tuple(members.values()), {})


def _as_text(options: Mapping[str, Any]) -> str:
    """Equal settings as equal text: tensors can't be compared as a whole."""

    def comparable(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raw = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            return value.dtype, value.shape, hashlib.sha256(raw).hexdigest()
        if type(value) in (list, tuple):
            return [type(value), *map(comparable, value)]
        return value

    return repr([(key, comparable(options[key])) for key in sorted(options)])


def is_third_party(path: str) -> bool:
    """Whether a directory holds a third-party training run: DCP, FSDP's full state, or slices."""
    with looking_once(path):
        if not is_directory(path) or _has(path, "manifest.json"):
            return False
        if _sources(path, FULL_STATE_STEM) or _sources(path, _OPTIMIZER_STEM):
            return True
        return any(_SLICE_OR_PART.fullmatch(name) for name in _listed(path))


def find_run(path: str | os.PathLike[str]) -> ThirdPartyRun:
    """The training run at ``path``. Reads only names of files.

    Raises :class:`SourceError` if there is none, or if its ranks stored parts that only they can read.
    """
    root = os.fspath(path)
    models = _sources(root, FULL_STATE_STEM)
    if not models and (is_file(root) or holds_model(root)):
        models = (root,)
    if not models:
        per_rank = [n for n in _listed(root) if re.fullmatch(rf"{FULL_STATE_STEM}.*_rank\d+\.bin", n)]
        if per_rank:
            raise SourceError(
                f"{per_rank[0]} and similar files hold the parts of single ranks, without their place in each tensor; "
                f"save with SHARDED_STATE_DICT and DCP (use_dcp=True), or with FULL_STATE_DICT",
                path=root,
            )
        what = describe_steps(root) or "holds no known training state and no model"
        raise SourceError(what, path=root)
    return ThirdPartyRun(root, models, _sources(root, _OPTIMIZER_STEM))


def _sources(root: str, stem: str) -> tuple[str, ...]:
    """The paths of models or optimizers, in order: DCP directories or files of the full state."""
    if _has(root, METADATA_NAME):
        return (root,)
    found: list[str] = []
    names = [(f"{stem}_0", f"{stem}.bin")]
    while names:
        folder, file = (os.path.join(root, n) for n in names.pop())
        here = folder if _has(folder, METADATA_NAME) else file if is_file(file) else None
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


@dataclass(frozen=True, slots=True)
class ThirdPartyRun:
    """Locates the parts of a run. Reads a part when it is asked for, and each DCP directory once.

    Rank-local; reads no payload. Raises :class:`SourceError` and its subclasses, :class:`StateError` for a missing
    part.
    """

    path: str
    models: tuple[str, ...]
    optimizers: tuple[str, ...]
    _read: dict[str, DcpCheckpoint] = field(default_factory=dict, repr=False)

    def model(self, k: int) -> Catalog:
        """The k-th model, under module names (or hub names, if there is only a hub directory)."""
        source = self.models[k]
        found = model_in(self._dcp(source)) if _has(source, METADATA_NAME) else None
        if found is None or not found.tensors:
            found = open_catalog(source)
        return replace(found, kind="slices") if "DCP_VERSION" in found.metadata else found

    def has_optimizer(self, k: int) -> bool:
        """Whether a k-th optimizer is stored."""
        if k >= len(self.optimizers):
            return False
        source = self.optimizers[k]
        if not _has(source, METADATA_NAME):
            return True
        found = self._dcp(source)
        return any(map(_inside(found), (*found.catalog.tensors, *found.objects)))

    def optimizer(self, k: int) -> StoredOptimizer:
        """The k-th optimizer."""
        if not self.has_optimizer(k):
            raise StateError(f"{self.path}: holds no optimizer; leave it out of the state")
        source = self.optimizers[k]
        return _of_file(source) if is_file(source) else _of_dcp(self._dcp(source))

    def document(self, name: str) -> dict[Any, Any]:
        """The stored state of ``scheduler`` or ``scaler``. From DCP, all mapping keys are text."""
        file = next((f for f in _DOCUMENT_FILES[name] if _has(self.path, f)), None)
        if file is not None:
            path = os.path.join(self.path, file)
            found = plain_values(path)
            if type(found) is not dict:
                raise FormatError(f"holds {brief(found)}, but a {name}'s state is a dict", path=path)
            return found
        for source in dict.fromkeys((*self.models, *self.optimizers)):
            if _has(source, METADATA_NAME):
                found = nested(self._dcp(source), _DOCUMENT_KEYS[name])
                if found:
                    return found
        entries = f"no entry {' or '.join(map(repr, _DOCUMENT_KEYS[name]))} in the state dict that DCP saved"
        where = entries if _has(self.path, METADATA_NAME) else " or ".join(_DOCUMENT_FILES[name])
        raise StateError(f"{self.path}: holds no {name} ({where}); leave it out of the state")

    @property
    def step(self) -> int | None:
        """The step from the HF Trainer's file, a state dict or the name of torchtitan's folder; None if none has it."""
        file = os.path.join(self.path, "trainer_state.json")
        if is_file(file):
            document = read_json(file, "the HF Trainer's state")
            if not isinstance(document, dict):
                raise FormatError("not the HF Trainer's state: not a JSON object", path=file)
            return count_of_steps(document.get("global_step", 0), "global_step", file)
        for source in dict.fromkeys((*self.models, *self.optimizers)):
            if _has(source, METADATA_NAME) and (step := step_in(self._dcp(source))) is not None:
                return step
        named = re.fullmatch(r"step-(\d{1,12})", os.path.basename(self.path))
        return int(named[1]) if named else None

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote the model; 1 for a full state, which doesn't record it."""
        files = {os.path.basename(f.path) for f in self.model(0).files}
        return len({m[1] for f in files if (m := re.match(r"__(\d+)_", f))}) or 1

    def _dcp(self, source: str) -> DcpCheckpoint:
        if source not in self._read:
            self._read[source] = read_dcp(source)
        return self._read[source]


# ----------------------------------------------------------------------------------------------------
# Optimizers


def _inside(found: DcpCheckpoint) -> Any:
    """A function from a stored name to its part inside the optimizer's entry; None for other entries."""

    def inside(name: str) -> str | None:
        path = [str(p) for p in found.paths.get(name, (name,))]
        if path[0] in ("app", "state") and len(path) > 1 and path[1] in _OPTIMIZER_KEYS:
            path = path[1:]
        text = ".".join(path)
        key = next(
            (k for k in _OPTIMIZER_KEYS if text.startswith((f"{k}.state.", f"{k}.param_groups."))), None
        )
        return text.removeprefix(f"{key}.") if key else None

    return inside


def _of_dcp(found: DcpCheckpoint) -> StoredOptimizer:
    inside = _inside(found)
    tensors: dict[str, StoredTensor] = {}
    for name, t in found.catalog.tensors.items():
        rest = inside(name)
        if rest is not None and rest.startswith("state."):
            short = rest.removeprefix("state.")
            tensors[short] = replace(t, name=short)
    values: dict[str, dict[str, Any]] = {}
    items: dict[str, dict[str, Any]] = {}
    read = Objects(found.catalog.files)
    with read:
        for name, where in found.objects.items():
            rest = inside(name)
            if rest is not None:
                part, _, short = rest.partition(".")
                owner, _, key = short.rpartition(".")
                (values if part == "state" else items).setdefault(owner, {})[key] = read.value(where)
    for name, t in found.catalog.tensors.items():  # a learning rate may be a tensor
        rest = inside(name)
        if rest is not None and rest.startswith("param_groups."):
            owner, _, key = rest.removeprefix("param_groups.").rpartition(".")
            items.setdefault(owner, {})[key] = plain_tensor(t, found.catalog.files)
    catalog = replace(found.catalog, tensors=tensors)
    if all(re.fullmatch("[0-9]{1,9}", owner) for owner in items):
        groups = [_group(items[owner], catalog.root) for owner in sorted(items, key=int)]
        return StoredOptimizer(catalog, values, groups, {})
    settings = {o: {k: v for k, v in options.items() if k != "params"} for o, options in items.items()}
    return StoredOptimizer(catalog, values, None, settings)


def _of_file(path: str) -> StoredOptimizer:
    content, file = read_torch_file(path)
    state, groups = (
        (content.get(k) for k in ("state", "param_groups")) if isinstance(content, dict) else (0, 0)
    )
    if not isinstance(state, dict) or not isinstance(groups, list):
        raise FormatError("not an optimizer's state dict: expected entries state and param_groups", path=path)
    if not all(isinstance(n, str) and isinstance(v, dict) for n, v in state.items()):
        raise _numbered(path)
    plain = PlainValues(path, file.nbytes, lambda t: plain_tensor(t, (file,)))
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for owner, states in state.items():
        for key, value in states.items():
            if isinstance(value, StoredTensor):
                name = StateKey(owner, key).name
                tensors[name] = replace(value, name=name)
            else:
                values.setdefault(owner, {})[str(key)] = plain.of(value)
    settings = [_group(plain.of(group), path) for group in groups]
    return StoredOptimizer(Catalog("full state", path, tensors, (file,)), values, settings, {})


def _numbered(path: str) -> StateError:
    """The error for what ``optimizer.state_dict()`` returned."""
    return StateError(
        f"{path}: keeps the optimizer's state by parameter number, not by name, so it can't be matched with shards. Restore "
        f"the model alone (TrainState(model=…)), or save the optimizer with get_optimizer_state_dict"
    )


def _group(found: Any, path: str) -> dict[str, Any]:
    """The settings of a group. Raises :class:`StateError` if it numbers its parameters, :class:`FormatError` if it does
    not list them."""
    params = found.get("params") if type(found) is dict else None
    if type(params) is list and params and all(type(n) is int for n in params):
        raise _numbered(path)
    if type(params) is not list or not all(isinstance(n, str) for n in params):
        raise FormatError(
            f"expected an optimizer's group, a dict with a list of params by name, got {brief(found)}",
            path=path,
        )
    return {str(k): v for k, v in found.items()}
