"""Resuming from a DCP checkpoint: what Accelerate, the HF Trainer, torchtitan and torch's own examples write.

The model and the optimizer's tensors are read by byte ranges like any source. What is no tensor (settings of
parameter groups, a scheduler's state) is a pickle, which only ``torch.load(weights_only=True)`` gets to see.
"""

from __future__ import annotations

import io as io_module
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .catalog import Catalog, StoredTensor
from .catalog.dcp import METADATA_NAME, ByteRange, DcpCheckpoint, catalog_of_dcp, read_dcp
from .dist import Ranks
from .dtypes import code_of, torch_dtype
from .errors import SourceError, StateError
from .layout.model import geometries_of, local_tensor, wanted_of
from .layout.wanted import Layout, Wanted, whole_tensor
from .loading import fill
from .names import NamedTensor, named_tensors
from .place.copy import Destination, Staging, execute
from .plan import IOOptions, build_plan
from .read import FileReader
from .recipe.match import Rules, match_rules, renamed
from .restoring import ResumeReport
from .state.optimizer import fill_groups, parameter_names, place_scalars, place_states, place_values
from .state.rng import derive_rng
from .state.snapshot import trained_model
from .state.train_state import TrainState

__all__ = ["is_dcp", "restore_dcp"]

#: Folders in which Accelerate and the HF Trainer keep the k-th model and optimizer.
_MODEL, _OPTIMIZER = "pytorch_model_fsdp_{}", "optimizer_{}"
#: Entries of the state dict under which an optimizer lies.
_OPTIMIZER_KEYS = ("optimizer", "optim")
_SCHEDULER_FILES = ("scheduler.bin", "scheduler.pt")
_SCALER_FILES = ("scaler.pt",)


def is_dcp(path: str) -> bool:
    """Whether a directory is a DCP checkpoint, or one of Accelerate's or the Trainer's with such inside."""
    return os.path.isfile(os.path.join(path, METADATA_NAME)) or os.path.isfile(
        os.path.join(path, _MODEL.format(0), METADATA_NAME)
    )


def restore_dcp(state: TrainState, path: str, ranks: Ranks, io: IOOptions) -> ResumeReport:
    """Put a DCP checkpoint into the live objects of ``state``. Collective; under whatever mesh this run has.

    Restored: models, optimizers (tensors, steps, settings of the groups), scheduler and scaler where they are
    stored. Not in such checkpoints in a form that is read: RNG (derived by rule instead), data position.
    Raises as ``restore`` does; :class:`StateError` if the state asks for more than is there.
    """
    started = time.perf_counter()
    with ranks.agree("read checkpoint"):
        source = _Source.open(path, state)
        documents = source.documents(state)
    reports = [
        fill(model, source.models[name], Rules(), io=io, ranks=ranks) for name, model in state.models.items()
    ]
    bytes_read, tensors = sum(r.bytes_read for r in reports), 0
    with ranks.agree("match names"):
        named = {name: named_tensors(model) for name, model in state.models.items()}
    for name, optimizer in state.optimizers.items():
        trained = trained_model(optimizer, named)
        more, filled = _restore_optimizer(
            optimizer, source.optimizers[name], state.models[trained], named[trained], ranks, io
        )
        bytes_read, tensors = bytes_read + more, tensors + filled
    with ranks.agree("restore documents"):
        for name, value in documents.items():
            getattr(state, name).load_state_dict(value)
        rng = derive_rng(seed=torch.initial_seed() % 2**63, step=source.step, rank=ranks.rank)
    return ResumeReport(
        path=path,
        step=source.step,
        run_id="",
        saved_world_size=source.world_size,
        world_size=ranks.world_size,
        exact=False,
        differences=("written by torch.distributed.checkpoint, which records no digests and no versions",),
        tensors=sum(r.tensors for r in reports),
        optimizer_tensors=tensors,
        documents=tuple(documents),
        not_restored=(
            "random generators and data position: not stored in a form that is read",
            *(f"extra.{name}: not read from such a checkpoint" for name in state.extra),
        ),
        caveats=(),
        rng=rng,
        bytes_read=bytes_read,
        seconds=time.perf_counter() - started,
        damaged={},
        superseded=(),
    )


@dataclass(frozen=True, slots=True)
class _StoredOptimizer:
    """An optimizer in a DCP checkpoint: ``<parameter>.<state>`` tensors, and the items of its groups."""

    catalog: Catalog
    group_items: Mapping[str, ByteRange]
    """By what follows ``param_groups.``: ``0.lr``, or ``<parameter>.lr`` where the state dict was flattened."""
    values: Mapping[str, ByteRange]
    """``<parameter>.<state>`` that are no tensors."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where everything lies."""

    path: str
    models: Mapping[str, Catalog]
    optimizers: Mapping[str, _StoredOptimizer]
    step: int
    world_size: int

    @classmethod
    def open(cls, path: str, state: TrainState) -> _Source:
        """Find the parts that ``state`` asks for. Raises :class:`StateError` for one that is not there."""
        has_folders = not os.path.isfile(os.path.join(path, METADATA_NAME))
        if state.dataloader is not None:
            raise StateError(
                f"{path}: a DCP checkpoint holds no data position that can be read; leave dataloader out of the state"
            )
        if not has_folders and len(state.models) + len(state.optimizers) > 2:
            raise StateError(f"{path}: holds one state dict; this run has {sorted(state.models)}")
        models, optimizers, files = {}, {}, set()
        for k, name in enumerate(state.models):
            folder = os.path.join(path, _MODEL.format(k)) if has_folders else path
            models[name] = catalog_of_dcp(folder)
            files |= {os.path.basename(f.path) for f in models[name].files}
        step = _step_beside(path)
        for k, name in enumerate(state.optimizers):
            folder = os.path.join(path, _OPTIMIZER.format(k)) if has_folders else path
            found = read_dcp(folder)
            optimizers[name] = _optimizer_in(found, folder)
            step = step or _step_in(found)
        writers = {m.group(1) for f in files if (m := re.match(r"__(\d+)_", f))}
        return cls(path, models, optimizers, step, len(writers))

    def documents(self, state: TrainState) -> dict[str, Any]:
        """State of scheduler and scaler. Raises :class:`StateError` for one that is asked for and not there."""
        found = {}
        for name, files in (("scheduler", _SCHEDULER_FILES), ("scaler", _SCALER_FILES)):
            if getattr(state, name) is None:
                continue
            if not hasattr(getattr(state, name), "load_state_dict"):
                raise StateError(f"{name}: several by name can't be restored from a DCP checkpoint; give one")
            file = next((f for f in files if os.path.isfile(os.path.join(self.path, f))), None)
            if file is None:
                raise StateError(
                    f"{self.path}: holds no {name} ({' or '.join(files)}); leave it out of the state"
                )
            with open(os.path.join(self.path, file), "rb") as stream:
                found[name] = _plain_values(stream.read(), os.path.join(self.path, file))
        return found


def _step_beside(path: str) -> int:
    """The step that the HF Trainer notes; 0 if nothing does."""
    file = os.path.join(path, "trainer_state.json")
    if not os.path.isfile(file):
        return 0
    with open(file, "rb") as stream:
        return int(json.load(stream).get("global_step", 0))


def _step_in(found: DcpCheckpoint) -> int:
    where = found.objects.get("step")
    value = _read_object(where) if where is not None else 0
    return value if isinstance(value, int) else 0


def _optimizer_in(found: DcpCheckpoint, folder: str) -> _StoredOptimizer:
    def inside(name: str) -> str | None:
        """What follows the optimizer's own entry in a name."""
        path = [str(p) for p in found.paths.get(name, (name,))]
        if path[0] in ("app", "state") and len(path) > 1 and path[1] in _OPTIMIZER_KEYS:
            path = path[1:]
        text = ".".join(path)
        key = next((k for k in _OPTIMIZER_KEYS if text.startswith(f"{k}.")), None)
        return text.removeprefix(f"{key}.") if key else None

    tensors: dict[str, StoredTensor] = {}
    for name, t in found.catalog.tensors.items():
        rest = inside(name)
        if rest is not None and rest.startswith("state."):
            short = rest.removeprefix("state.")
            tensors[short] = replace(t, name=short)
    inner = {rest: where for name, where in found.objects.items() if (rest := inside(name)) is not None}
    items, values = (
        {rest.removeprefix(prefix): where for rest, where in inner.items() if rest.startswith(prefix)}
        for prefix in ("param_groups.", "state.")
    )
    if not tensors and not items:
        raise StateError(f"{folder}: holds no optimizer; leave it out of the state")
    return _StoredOptimizer(replace(found.catalog, tensors=tensors), items, values)


def _read_object(where: ByteRange) -> Any:
    with open(where.path, "rb") as stream:
        stream.seek(where.offset_bytes)
        return _plain_values(stream.read(where.nbytes), where.path)


def _plain_values(content: bytes, path: str) -> Any:
    """Plain values and tensors from what ``torch.save`` wrote; nothing else is built."""
    try:
        return torch.load(io_module.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # a pickle can fail in any way
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(
            f"holds more than plain values, which are all that is read: {first}", path=path
        ) from error


def _restore_optimizer(
    optimizer: Optimizer,
    stored: _StoredOptimizer,
    model: nn.Module,
    named: tuple[NamedTensor, ...],
    ranks: Ranks,
    io: IOOptions,
) -> tuple[int, int]:
    """Returns bytes read by this rank and the number of tensors filled."""
    with ranks.agree("plan optimizer state"):
        names = parameter_names(optimizer, named)
        live = {alias: t.name for t in named for alias in t.names}
        groups = _groups(optimizer, names, live, stored)
        _refuse_other_kind(optimizer, groups)
        values: dict[str, dict[str, Any]] = {}
        for short, where in stored.values.items():
            fqn, _, key = short.rpartition(".")
            values.setdefault(live.get(fqn, fqn), {})[key] = _read_object(where)
        fill_groups(optimizer, names, groups)
        spread: dict[str, dict[str, str]] = {}
        scalars: dict[str, dict[str, torch.Tensor]] = {}
        for short, t in stored.catalog.tensors.items():
            fqn, _, key = short.rpartition(".")
            name = live.get(fqn, fqn)
            if t.shape == ():
                scalars.setdefault(name, {})[key] = torch.empty((), dtype=torch_dtype(t.dtype))
            else:
                spread.setdefault(name, {})[key] = t.dtype
        tensors, before = place_states(optimizer, names, spread)
        geometries = geometries_of(model, named)
        wanted: list[Wanted] = [wanted_of(n, t, geometries[n.rsplit(".", 1)[0]]) for n, t in tensors.items()]
        small = {f"{n}.{k}": t for n, states in scalars.items() for k, t in states.items()}
        wanted += [whole_tensor(n, code_of(t.dtype), ()) for n, t in small.items()]

        def rename(shorts: Sequence[str]) -> dict[str, str]:
            parts = {n: n.rpartition(".") for n in shorts}
            return {n: f"{live.get(p[0], p[0])}.{p[2]}" for n, p in parts.items()}

        matched = match_rules(stored.catalog, wanted, Rules(renamed(rename)))
        plan = build_plan(stored.catalog, Layout(tuple(wanted)), matched, io)
    with ranks.agree("read optimizer state"), FileReader(ranks.tick) as reader:
        destination = Destination({n: local_tensor(t) for n, t in tensors.items()} | small)
        execute(plan.transfers, reader, destination, Staging(io, plan.staging_bytes))
        place_scalars(optimizer, names, scalars, before)
        place_values(optimizer, names, values)
    return reader.bytes_read, len(tensors) + len(small)


def _groups(
    optimizer: Optimizer, names: Mapping[int, str], live: Mapping[str, str], stored: _StoredOptimizer
) -> list[dict[str, Any]]:
    """The stored settings of each group, as :func:`fill_groups` takes them."""
    values: dict[str, dict[str, Any]] = {}
    for rest, where in stored.group_items.items():
        owner, _, key = rest.rpartition(".")
        values.setdefault(owner, {})[key] = _read_object(where)
    if all(owner.isdigit() for owner in values):
        groups = [values[owner] for owner in sorted(values, key=int)]
        return [
            {
                "names": [live.get(n, n) for n in group.get("params", ())],
                "options": {k: v for k, v in group.items() if k != "params"},
            }
            for group in groups
        ]
    # Flattened: settings are stored with each parameter, and groups are not.
    found = []
    by_live = {live.get(owner, owner): options for owner, options in values.items()}
    for k, group in enumerate(optimizer.param_groups):
        members = [names[id(p)] for p in group["params"]]
        each = [{k: v for k, v in by_live.get(n, {}).items() if k != "params"} for n in members]
        if any(options != each[0] for options in each):
            raise StateError(
                f"parameter group {k} of this run holds parameters that had different settings when they were saved; "
                f"build the groups as the saved run did"
            )
        found.append({"names": members, "options": each[0] if each else {}})
    return found


#: What schedulers add to the settings of a group.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


def _refuse_other_kind(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """A DCP checkpoint does not name the optimizer's class; its settings tell."""
    stored = {key for group in groups for key in group["options"]} - _OF_SCHEDULERS
    strange = sorted(stored - set(optimizer.defaults))
    if strange:
        raise StateError(
            f"the checkpoint's optimizer has settings that {type(optimizer).__qualname__} does not: "
            f"{', '.join(strange[:8])}; use the same optimizer as the saved run"
        )
