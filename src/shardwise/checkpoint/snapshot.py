"""A training run at one instant, as named tensors and documents. References, not copies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..catalog.checkpoint import packed_name
from ..catalog.records import StoredTensor
from ..devices import to_host
from ..digests.pending import partial_sums
from ..dtypes import code_of
from ..errors import StateError
from ..format.slices import SliceTensor, assign_owners
from ..format.states import StateKey
from ..format.steps import checked_step
from ..internals.transformers import is_transformers_model
from ..layout.live import LiveModel, describe
from ..layout.model import local_tensor, world_size
from ..layout.placements import replicated
from ..limits import brief
from ..names import NamedTensor, canonical_name
from ..objects import frozen
from ..recipe.match import Recipe
from ..rng import capture_rng
from ..state.beyond import Beyond
from ..state.beyond_model import beyond_model, refuse_fsdp1
from ..state.beyond_optimizer import beyond_optimizer
from ..state.gradients import UNSEEN_GRADIENTS, refuse_unreduced
from ..state.optimizer import NO_FORMS, AgreedForm, Drained, drain, parameter_names
from ..state.scaler import refuse_unfinished_step
from ..state.schedulers import class_text, functions_left_out, unwrapped
from ..state.settings import data_settings_of, settings_of
from ..state.several import is_several
from ..state.storable import why_unstorable
from ..state.train_state import TrainState, document_of
from ..state.typed_json import Encoded, encode
from .low_bit_save import low_bit_document, split_low_bit

__all__ = ["Live", "MadeOf", "ModelPart", "OptimizerPart", "Snapshot", "take_snapshot", "trained_model"]


@frozen
class MadeOf:
    """A recipe, and the stored tensors that it names."""

    recipe: Recipe
    stored: Mapping[str, StoredTensor]


class Live(NamedTuple):  # as a slice
    """A stored tensor and its live tensor. ``counted=False`` for a second copy under a tied name."""

    stored: SliceTensor
    tensor: torch.Tensor
    counted: bool = True
    made_of: MadeOf | None = None
    """What the tensor is read from when it is written, where it is on meta and nothing live holds it; see ``runs.convert``."""
    refers: bool = False
    """Whether the checkpoint holds only its digest."""


@frozen
class ModelPart:
    """One model of a snapshot."""

    name: str
    named: tuple[NamedTensor, ...]
    live: tuple[Live, ...]
    stored_aliases: Mapping[str, tuple[str, ...]]

    @property
    def kind(self) -> str:
        """The kind of its slice files."""
        return "model"


@frozen
class OptimizerPart:
    """One optimizer of a snapshot, and the model that it trains."""

    name: str
    model: str
    live: tuple[Live, ...]
    drained: Drained

    @property
    def kind(self) -> str:
        """The kind of its slice files."""
        return "optimizer"


@frozen
class Snapshot:
    """One rank's contribution to a checkpoint.

    ``documents`` are by name (``scheduler``, ``rng``, …); the save finds those that are equal on all ranks.
    ``always_local`` documents are kept per rank even if they happen to be equal; ``compared_only`` ones are compared
    between ranks but stored elsewhere (as tensors of ``optimizer/``).
    """

    models: tuple[ModelPart, ...]
    optimizers: tuple[OptimizerPart, ...]
    documents: Mapping[str, Encoded]
    always_local: frozenset[str]
    compared_only: frozenset[str]
    not_stored: tuple[str, ...]

    @property
    def parts(self) -> tuple[ModelPart | OptimizerPart, ...]:
        """Models and optimizers in the order of writing."""
        return (*self.models, *self.optimizers)

    @property
    def gradients(self) -> int:
        """Number of gradients that wait for an optimizer step."""
        return sum(o.drained.gradients for o in self.optimizers)


def take_snapshot(
    state: TrainState, step: int, forms: Mapping[int, Mapping[str, AgreedForm]] = NO_FORMS
) -> Snapshot:
    """Collect the training state of this rank. Copies only 0-d optimizer states, and tensors of documents from devices.

    ``forms``: of states of few bits, as :func:`.low_bit_save.agree_on_forms` gives them.
    Raises :class:`StateError` naming what can't be expressed, before anything is written.
    """
    step = checked_step(step)
    state.watch()
    lives = {name: describe(model) for name, model in state.models.items()}
    models = tuple(_model_part(name, live, referred(state, live)) for name, live in lives.items())
    optimizers = tuple(_optimizer_part(name, o, lives, models, forms) for name, o in state.optimizers.items())
    beyond = _beyond(state, lives)
    documents = {
        name: encode(value, where=name)
        for name, value in _documents(state, lives, models, optimizers, step).items()
    }
    functions = {
        name: _without(encoded.not_stored) for name, encoded in documents.items() if encoded.not_stored
    }
    documents |= {
        name: encode(value, where=name) for name, value in _beyond_documents(beyond, functions).items()
    }
    return Snapshot(
        models=models,
        optimizers=optimizers,
        documents=on_host(documents),
        always_local=frozenset({"rng", *(document_of("optimizer", o.name, "opaque") for o in optimizers)}),
        compared_only=frozenset(document_of("optimizer", o.name, "packed") for o in optimizers),
        not_stored=(
            *(path for encoded in documents.values() for path in encoded.not_stored),
            *functions_left_out(state.scheduler),
            *(
                f"{document_of('optimizer', o.name)}: {UNSEEN_GRADIENTS}"
                for o in optimizers
                if o.drained.has_unseen_gradients
            ),
            *(line for found in beyond.values() for line in found.not_stored.values()),
        ),
    )


def _beyond(state: TrainState, lives: Mapping[str, LiveModel]) -> dict[tuple[str, str], Beyond]:
    """By kind and name, what models and optimizers would save besides."""
    found = {("model", name): beyond_model(name, live) for name, live in lives.items()}
    for name, given in state.given_optimizers.items():
        found["optimizer", name] = beyond_optimizer(name, given, state.optimizers[name])
    return found


def _without(functions: tuple[str, ...]) -> dict[str, str]:
    """Lines for the report of a restore, by path."""
    return {path: f"{path}: a function is not stored; this run may have another" for path in functions}


def _beyond_documents(
    beyond: Mapping[tuple[str, str], Beyond], functions: dict[str, dict[str, str]]
) -> dict[str, Any]:
    documents: dict[str, Any] = {
        document_of(kind, name, "own"): list(found.leaves)
        for (kind, name), found in beyond.items()
        if found.leaves
    }
    lost = {
        document_of(kind, name, "own"): dict(found.not_stored)
        for (kind, name), found in beyond.items()
        if found.not_stored
    } | functions
    return {**documents, "not_stored": lost} if lost else documents


def referred(state: TrainState, live: LiveModel) -> frozenset[str]:
    """Names of the parameters that a checkpoint of the state holds only the digests of, by ``TrainState.frozen``."""
    if state.frozen != "refer":
        return frozenset()
    stepped = {id(p) for o in state.optimizers.values() for p, held in o.state.items() if held}
    return frozenset(
        t.name for t in live.parameters if not t.tensor.requires_grad and id(t.tensor) not in stepped
    )


def _model_part(name: str, described: LiveModel, refers: frozenset[str] = frozenset()) -> ModelPart:
    refuse_fsdp1(described.fsdp1_problem)
    persistent = described.stored
    for t in persistent:
        if why := why_unstorable(t.tensor):
            raise StateError(f"{t.name}: {why}")
    geometries, is_hub_model = described.geometries, is_transformers_model(described.unwrapped)
    aliases = {t.name: t.aliases for t in persistent if t.aliases and is_hub_model and t.name not in refers}
    all_of = [
        SliceTensor(t.name, code_of(t.tensor.dtype), tuple(t.tensor.shape), geometries[t.name])
        for t in persistent
    ]
    owned = {t.name: t for t in assign_owners([t for t in all_of if t.name not in refers])}
    live = []
    for t, one in zip(persistent, all_of, strict=True):
        stored = owned.get(t.name, one)
        live.append(Live(stored, t.tensor, refers=t.name in refers))
        for alias in aliases.get(t.name, ()):
            copy = SliceTensor(alias, stored.dtype, stored.shape, stored.geometry, stored.owner)
            live.append(Live(copy, t.tensor, counted=False))
    return ModelPart(name, described.tensors, tuple(live), aliases)


def _optimizer_part(
    name: str,
    optimizer: Optimizer,
    lives: Mapping[str, LiveModel],
    models: tuple[ModelPart, ...],
    forms: Mapping[int, Mapping[str, AgreedForm]],
) -> OptimizerPart:
    part = next(p for p in models if p.name == trained_model(optimizer, lives))
    refuse_unreduced(optimizer, lives[part.name])
    drained = drain(optimizer, parameter_names(optimizer, part.named), forms)
    split_low_bit(drained, lives[part.name].geometries)
    return OptimizerPart(name, part.name, tuple(_optimizer_live(drained, part)), drained)


def trained_model(optimizer: Optimizer, lives: Mapping[str, LiveModel]) -> str:
    """The name of the first model that holds all parameters of the optimizer; of the first one, if none does."""
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = (n for n, live in lives.items() if optimized <= {id(t.tensor) for t in live.tensors})
    return next(found, next(iter(lives)))


def _optimizer_live(drained: Drained, model: ModelPart) -> list[Live]:
    geometries = {v.stored.name: v.stored.geometry for v in model.live}
    found = [
        (StateKey(name, key).name, tensor, geometries[name])
        for name, states in drained.tensors.items()
        for key, tensor in states.items()
    ]
    whole = replicated(world_size())
    found += [(packed_name(key), tensor, whole) for key, tensor in drained.packed.items()]
    stored = [SliceTensor(name, code_of(t.dtype), tuple(t.shape), geometry) for name, t, geometry in found]
    return [Live(one, t) for one, (_, t, _) in zip(assign_owners(stored), found, strict=True)]


def _documents(
    state: TrainState,
    lives: Mapping[str, LiveModel],
    models: tuple[ModelPart, ...],
    optimizers: tuple[OptimizerPart, ...],
    step: int,
) -> dict[str, Any]:
    devices = {t.tensor.device for part in models for t in part.named}
    documents: dict[str, Any] = {"step": step, "rng": capture_rng(devices)}
    live = state.optimizers
    for o in optimizers:
        documents[document_of("optimizer", o.name)] = {
            "class": type(live[o.name]).__qualname__,
            "model": o.model,
            "groups": o.drained.groups,
            "values": o.drained.values,
        }
        if o.drained.has_unseen_gradients:
            documents[document_of("optimizer", o.name)]["unseen_gradients"] = True
        documents[document_of("optimizer", o.name, "packed")] = o.drained.packed
        if o.drained.low_bit:
            documents[document_of("optimizer", o.name, "low_bit")] = low_bit_document(o.drained)
        if o.drained.opaque:
            documents[document_of("optimizer", o.name, "opaque")] = o.drained.opaque
    refuse_unfinished_step(state.scaler)
    for name in ("scheduler", "scaler", "dataloader"):
        value = getattr(state, name)
        if value is not None:
            documents[name] = _state_of(value, name)
    documents["settings"] = settings_of(state, lives)
    if state.dataloader is not None:
        documents["data_settings"] = data_settings_of(state)
    if classes := classes_of(state):
        documents["classes"] = classes
    for name, value in state.extra.items():
        has_state = hasattr(value, "state_dict") or hasattr(value, "load_state_dict")
        documents[f"extra.{name}"] = _state_of(value, f"extra.{name}") if has_state else value
    for name, described in lives.items():
        modules = {path: m.get_extra_state() for path, m in modules_with_state(described.modules)}
        if modules:
            documents[document_of("model", name, "modules")] = modules
    return documents


def classes_of(state: TrainState) -> dict[str, Any]:
    """The class of each scheduler and of its inner ones. Nothing else distinguishes their states."""
    found = {} if state.scheduler is None else {"scheduler": _classes_in(state.scheduler)}
    extras = {f"extra.{name}": value for name, value in state.extra.items()}
    return found | {n: class_text(v) for n, v in extras.items() if isinstance(unwrapped(v), LRScheduler)}


def _classes_in(scheduler: Any) -> Any:
    if is_several(scheduler):
        return {key: _classes_in(one) for key, one in scheduler.items()}
    return class_text(scheduler)


def modules_with_state(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Those of a model's modules that keep state beside tensors (``get_extra_state``), by canonical name, once each."""
    found: set[int] = set()
    for path, module in modules:
        if type(module).get_extra_state is not nn.Module.get_extra_state and id(module) not in found:
            found.add(id(module))
            yield canonical_name(path), module


def _state_of(value: Any, name: str) -> Any:
    if is_several(value):
        return {key: _state_of(v, f"{name}.{key}") for key, v in value.items()}
    if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
        hint = ""
        if name.startswith("dataloader"):
            hint = "; wrap a plain DataLoader: shardwise.ResumableLoader(loader)"
        raise StateError(f"{name} of type {type(value).__name__} has no state_dict and load_state_dict{hint}")
    found = value.state_dict()
    if isinstance(value, LRScheduler | torch.amp.GradScaler):
        odd = [key for key in found if not isinstance(key, str)]
        if odd:
            raise StateError(
                f"{name}: the state of the {type(value).__name__} has the key {brief(odd[0])}, which is not text; no resume "
                f"would take it"
            )
    return found


def on_host(documents: Mapping[str, Encoded]) -> dict[str, Encoded]:
    """Documents whose tensors all lie on the CPU. The host waits once per device, not for each tensor."""
    found = iter(to_host([t for encoded in documents.values() for t in encoded.tensors.values()]))
    return {
        name: replace(encoded, tensors={key: next(found) for key in encoded.tensors})
        for name, encoded in documents.items()
    }


def document_hash(encoded: Encoded) -> str:
    """Hash of a document and its tensors' bytes, which lie on the CPU."""
    total = xxhash.xxh3_64(json.dumps(encoded.document, allow_nan=False).encode())
    for key in sorted(encoded.tensors):
        tensor = encoded.tensors[key].detach().contiguous()
        total.update(f"{key}{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return total.hexdigest()


def layout_hash(snapshot: Snapshot) -> str:
    """Hash of the stored tensors and their layout on ranks; one manifest can describe only one layout."""
    kinds: dict[tuple[Any, ...], int] = {}  # far fewer than tensors
    parts = []
    for part in snapshot.parts:
        names = [live.stored.name for live in part.live]
        indices = [
            kinds.setdefault((t.dtype, t.shape, t.geometry, refers), len(kinds))
            for t, refers in ((live.stored, live.refers) for live in part.live)
        ]
        parts.append((part.kind, part.name, names, indices))
    return xxhash.xxh3_64_hexdigest(json.dumps([parts, [repr(kind) for kind in kinds]]).encode())


def plain_tensors(snapshot: Snapshot, *, kind: str = "") -> dict[str, tuple[ModelPart, NamedTensor]]:
    """Tensors that every rank holds whole, by ``model:name``; of one kind or of all."""
    return {
        f"{part.name}:{t.name}": (part, t)
        for part in snapshot.models
        for t in part.named
        if t.persistent and local_tensor(t.tensor) is t.tensor and kind in ("", t.kind)
    }


def plain_sums(snapshot: Snapshot) -> dict[str, int]:
    """Digest sums of tensors that every rank holds whole, to compare ranks."""
    plain = plain_tensors(snapshot)
    sums = partial_sums((t.tensor.detach(), (0,) * t.tensor.dim()) for _, t in plain.values())
    return dict(zip(plain, sums, strict=True))
