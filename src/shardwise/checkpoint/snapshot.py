"""A training run at one instant, as named tensors and documents. References, not copies."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..catalog.checkpoint import directory, packed_name
from ..digests import loaded_base, partial_sums, refuse_other_tensors, still_as_loaded
from ..dtypes import code_of, itemsize
from ..errors import StateError
from ..format.header import checked_step
from ..format.manifest import document_of
from ..format.slices import Slice, SliceTensor, StateKey, assign_owners, file_count, file_name, rank_files
from ..host import to_host
from ..internals.low_bit import may_keep_low_bits
from ..internals.peft import is_of_base, places
from ..internals.torch import local_tensor
from ..internals.transformers import is_transformers_model
from ..limits import brief
from ..names import NamedTensor, canonical_name
from ..objects import frozen
from ..ranks.ranks import Ranks
from ..rng import capture_rng
from ..state.arguments import data_settings_of, settings_of
from ..state.beyond import (
    Beyond,
    OwnOfModel,
    OwnOfOptimizer,
    SpreadExtra,
    beyond,
    describe_all,
    extras_in,
    refuse_fsdp1,
)
from ..state.documents import class_text, functions_left_out, unwrapped
from ..state.low_bit import Form, books_of, form_of, part_name, parts_by_rank, parts_of
from ..state.optimizer import (
    NO_FORMS,
    UNSEEN_GRADIENTS,
    AgreedForm,
    Drained,
    TrainState,
    drain,
    parameter_names,
    refuse_unreduced,
)
from ..state.parts import is_several, refuse_unfinished_step, why_unstorable
from ..state.typed_json import Encoded, encode
from ..tensors.boxes import LocalBox
from ..tensors.live import LiveModel, describe, is_declared, world_size
from ..tensors.placements import Geometry, cut_boxes, replicated
from .joined import Joined, agree_on_parts, trained_model

_log = logging.getLogger(__name__)

# ----------------------------------------------------------------------------------------------------
# Saves optimizer states of few bits: as plain tensors spread like their parameter, or else by rank; and their document.


def agree_on_forms(state: TrainState, ranks: Ranks) -> dict[int, dict[str, AgreedForm]]:
    """By id of a parameter and state: the form of states that some ranks hold in few bits. Collective.

    Empty if all ranks hold the same: then each knows it from its own. torchao keeps short shards, and empty ones, as plain
    tensors, so a rank alone can't tell. One small round, two if they differ; none with other optimizers. Raises
    :class:`StateError` on every rank for a state with two forms.
    """
    if ranks.world_size == 1 or not any(map(may_keep_low_bits, state.optimizers.values())):
        return {}
    held = {name: (parameter, key, value) for name, parameter, key, value in _states(state)}
    forms: dict[str, dict[str, Any] | None] = {}

    def summary() -> str:
        for name, (parameter, _, value) in held.items():
            form = form_of(value)
            if local_tensor(parameter).numel():
                forms[name] = None if form is None else form.to_json()
        return xxhash.xxh3_128_hexdigest(json.dumps(forms).encode())

    if ranks.combine("compare states of few bits", summary, lambda each: len(set(each)) == 1):
        return {}

    def of_few_bits(every: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """The states that are of few bits on any rank."""
        return {name: [of, is_plain] for name, (of, is_plain) in every.items() if of}

    found = ranks.reduce("compare each state of few bits", lambda: _forms_of(forms), _merged, of_few_bits)
    if two := [name for name, (each, _) in found.items() if len(each) > 1]:
        texts = " and ".join(Form(**form).text for form in found[two[0]][0])
        raise StateError(
            f"{two[0]} is {texts} on different ranks; expected one form. Make the optimizer with the same options on every rank"
        )
    agreed: dict[int, dict[str, AgreedForm]] = {}
    for name in held.keys() & found.keys():
        (parameter, key, _), ((form,), is_mixed) = held[name], found[name]
        agreed.setdefault(id(parameter), {})[key] = AgreedForm(Form(**form), is_mixed)
    return agreed


def _states(state: TrainState) -> Iterator[tuple[str, torch.Tensor, str, torch.Tensor]]:
    """The tensors that optimizers keep for their parameters, named by place: names of parameters cost a walk."""
    for name, optimizer in state.optimizers.items():
        for g, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.dim() and isinstance(key, str):
                        yield f"optimizer {name}, group {g}, parameter {k}, {key}", parameter, key, value


def _forms_of(held: Mapping[str, dict[str, Any] | None]) -> dict[str, list[Any]]:
    """Of each state of this rank: its forms of few bits, and whether it is plain."""
    return {name: [[] if form is None else [form], form is None] for name, form in held.items()}


def _merged(of_ranks: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """:func:`_forms_of` of several ranks as one; two forms of a state suffice, the same two in any order of ranks."""
    found: dict[str, list[Any]] = {}
    for states in of_ranks:
        for name, (forms, is_plain) in states.items():
            before, was_plain = found.get(name, ([], False))
            every = sorted([*before, *(f for f in forms if f not in before)], key=json.dumps)
            found[name] = [every[:2], was_plain or is_plain]
    return found


def split_low_bit(drained: Drained, geometries: Mapping[str, Geometry]) -> None:
    """Make ``tensors`` of the states of few bits; where a cut lies inside a block, or a rank keeps a plain shard, ``opaque`` ones."""
    for name, states in drained.low_bit.items():
        for key, state in states.items():
            grid = state.form.grid(state.parameter.shape)
            if state.by_rank or grid is None or not grid.falls_on(geometries[name]):
                states[key] = replace(state, by_rank=True)
                into, parts = drained.opaque, parts_by_rank(state.value)
            else:
                into, parts = drained.tensors, parts_of(state.value, state.parameter, state.form, grid)
            of_one = into.setdefault(name, {})
            for part, tensor in parts.items():
                stored = part_name(key, part)
                if stored in of_one:
                    raise StateError(
                        f"the optimizer has a state {StateKey(name, stored).name}, under which a part of the state {key} is "
                        f"stored; give the state another name"
                    )
                of_one[stored] = tensor


def low_bit_document(drained: Drained) -> dict[str, Any]:
    """The document that says what the stored parts are: code books, and the form of each state."""
    every = {StateKey(n, s).name: state for n, of in drained.low_bit.items() for s, state in of.items()}

    def forms(by_rank: bool) -> dict[str, dict[str, Any]]:
        found = {
            n: {s: state.form.to_json() for s, state in of.items() if state.by_rank is by_rank}
            for n, of in drained.low_bit.items()
        }
        return {n: of for n, of in found.items() if of}

    books = books_of({n: (state.value, state.form) for n, state in every.items()})
    return {"books": books, "states": forms(False), "by_rank": forms(True)}


# ----------------------------------------------------------------------------------------------------


class Live(NamedTuple):  # as a slice
    """A stored tensor and its live tensor. ``counted=False`` for a second copy under a tied name."""

    stored: SliceTensor
    tensor: torch.Tensor
    counted: bool = True
    refers: bool = False
    """Whether the checkpoint holds only its digest."""


@frozen
class ModelPart:
    """One model of a snapshot."""

    name: str
    named: tuple[NamedTensor, ...]
    live: tuple[Live, ...]
    stored_aliases: Mapping[str, tuple[str, ...]]
    like: str = ""
    """The model whose config describes it: itself, or the one that an extra averages. May be empty."""

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


@frozen
class Agreed:
    """What ranks agree on before each takes its state: it can't be seen on one rank."""

    forms: Mapping[int, Mapping[str, AgreedForm]]
    """As :func:`agree_on_forms` gives them."""
    joined: Mapping[str, Joined]
    """As :func:`.agree_on_parts` gives them."""


def agree(state: TrainState, ranks: Ranks) -> Agreed:
    """Collective. Nothing is exchanged for most states. Raises :class:`StateError` or :class:`RankError` on every rank."""
    agree_on_base(state, ranks)
    joined = agree_on_parts(state, ranks)  # first: it names what parts can't have
    return Agreed(agree_on_forms(state, ranks), joined)


ALONE = Agreed(NO_FORMS, {})


def take_snapshot(state: TrainState, step: int, agreed: Agreed = ALONE) -> Snapshot:
    """Collect the training state of this rank. Copies only 0-d optimizer states, and tensors of documents from devices.

    Raises :class:`StateError` naming what can't be expressed, before anything is written.
    """
    step = checked_step(step)
    state.watch()
    lives = describe_all(state.models, state.extra)
    models = tuple(_model_part(name, live, referred(state, live)) for name, live in lives.items())
    optimizers = tuple(
        _optimizer_part(name, o, lives, models, agreed) for name, o in state.optimizers.items()
    )
    own = {("model", name): beyond(name, OwnOfModel(live)) for name, live in lives.items()}
    for name, given in state.given_optimizers.items():
        own["optimizer", name] = beyond(name, OwnOfOptimizer(given, state.optimizers[name]))
    documents = {
        name: encode(value, where=name)
        for name, value in _documents(state, lives, models, optimizers, step).items()
    }
    functions = {
        name: {
            path: f"{path}: a function is not stored; this run may have another"
            for path in encoded.not_stored
        }
        for name, encoded in documents.items()
        if encoded.not_stored
    }
    documents |= {
        name: encode(value, where=name) for name, value in _beyond_documents(own, functions).items()
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
            *(line for found in own.values() for line in found.not_stored.values()),
        ),
    )


def _beyond_documents(
    own: Mapping[tuple[str, str], Beyond], functions: dict[str, dict[str, str]]
) -> dict[str, Any]:
    documents: dict[str, Any] = {
        document_of(kind, name, "own"): list(found.leaves)
        for (kind, name), found in own.items()
        if found.leaves
    }
    lost = {
        document_of(kind, name, "own"): dict(found.not_stored)
        for (kind, name), found in own.items()
        if found.not_stored
    } | functions
    return {**documents, "not_stored": lost} if lost else documents


def agree_on_base(state: TrainState, ranks: Ranks) -> None:
    """For ``frozen="auto"``: compare each base under adapters with what its load read. Collective.

    Reads the base, at each save: it may have been merged into or trained since the last one. Without such a base, nothing is exchanged.
    """
    if state.frozen != "auto":
        return
    loaded = {name: loaded_base(model) for name, model in state.models.items()}
    found = {name: base for name, base in loaded.items() if base is not None}
    if not found:
        return

    def told() -> list[bool]:
        return [still_as_loaded(base, describe(state.models[name]), ranks) for name, base in found.items()]

    agreed = ranks.combine(
        "compare the base with its load", told, lambda every: list(map(all, zip(*every, strict=True)))
    )
    for (name, base), is_unchanged in zip(found.items(), agreed, strict=True):
        if ranks.rank == 0 and base.is_unchanged is not is_unchanged:
            why = "is as it was loaded" if is_unchanged else "has changed since it was loaded"
            what = "only digests of it" if is_unchanged else "all of it"
            _log.info("%s: the base under the adapters %s; checkpoints contain %s", name, why, what)
        base.is_unchanged = is_unchanged


def referred(state: TrainState, live: LiveModel) -> frozenset[str]:
    """Names of the parameters that a checkpoint of the state holds only the digests of, by ``TrainState.frozen``."""
    loaded = loaded_base(live.root)
    if is_declared(live.root) and state.frozen == "refer":
        raise StateError("frozen='refer' isn't supported for a model that is declared in parts; use 'hold'")
    if state.frozen == "hold" or (state.frozen == "auto" and not (loaded and loaded.is_unchanged)):
        return frozenset()
    stepped = {id(p) for o in state.optimizers.values() for p, held in o.state.items() if held}
    found = places(live.root)  # an adapter that isn't trained now may have been
    return frozenset(
        t.name
        for t in live.parameters
        if not t.tensor.requires_grad
        and (state.frozen == "refer" or (loaded and t.name in loaded.sums))
        and id(t.tensor) not in stepped
        and is_of_base(t.name, found)
    )


def _model_part(name: str, described: LiveModel, refers: frozenset[str] = frozenset()) -> ModelPart:
    refuse_fsdp1(described.fsdp1_problem)
    persistent = described.stored
    for t in persistent:
        if why := why_unstorable(t.tensor):
            raise StateError(f"{t.name}: {why}")
    geometries, is_hub_model = described.geometries, is_transformers_model(described.unwrapped)
    aliases = {t.name: t.aliases for t in persistent if t.aliases and is_hub_model and t.name not in refers}
    all_of = [SliceTensor(t.name, *described.spec(t), geometries[t.name]) for t in persistent]
    owned = {t.name: t for t in assign_owners([t for t in all_of if t.name not in refers])}
    live = []
    for t, one in zip(persistent, all_of, strict=True):
        stored = owned.get(t.name, one)
        live.append(Live(stored, t.tensor, refers=t.name in refers))
        for alias in aliases.get(t.name, ()):
            copy = SliceTensor(alias, stored.dtype, stored.shape, stored.geometry, stored.owner)
            live.append(Live(copy, t.tensor, counted=False))
    like = described.root.like if isinstance(described.root, SpreadExtra) else name
    return ModelPart(name, described.tensors, tuple(live), aliases, like)


def _optimizer_part(
    name: str,
    optimizer: Optimizer,
    lives: Mapping[str, LiveModel],
    models: tuple[ModelPart, ...],
    agreed: Agreed,
) -> OptimizerPart:
    part = next(p for p in models if p.name == trained_model(name, optimizer, lives))
    refuse_unreduced(optimizer, lives[part.name])
    drained = drain(optimizer, parameter_names(optimizer, part.named), agreed.forms)
    if name in agreed.joined:
        drained = agreed.joined[name].of_whole_model(drained, lives[part.name])
    geometries = lives[part.name].geometries
    split_low_bit(drained, geometries)
    found = [
        (StateKey(of, key).name, tensor, geometries[of])
        for of, states in drained.tensors.items()
        for key, tensor in states.items()
    ]
    whole = replicated(world_size())
    found += [(packed_name(key), tensor, whole) for key, tensor in drained.packed.items()]
    stored = [SliceTensor(n, code_of(t.dtype), g.whole_shape(t.shape), g) for n, t, g in found]
    live = [Live(one, t) for one, (_, t, _) in zip(assign_owners(stored), found, strict=True)]
    return OptimizerPart(name, part.name, tuple(live), drained)


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
        if name not in extras_in(lives):
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
    everywhere = replicated(world_size())
    return {
        f"{part.name}:{t.name}": (part, t)
        for part in snapshot.models
        for geometries in [{v.stored.name: v.stored.geometry for v in part.live}]
        for t in part.named
        if t.persistent and local_tensor(t.tensor) is t.tensor and kind in ("", t.kind)
        if geometries[t.name] == everywhere
    }


def plain_sums(snapshot: Snapshot) -> dict[str, int]:
    """Digest sums of tensors that every rank holds whole, to compare ranks."""
    plain = plain_tensors(snapshot)
    sums = partial_sums((t.tensor.detach(), (0,) * t.tensor.dim()) for _, t in plain.values())
    return dict(zip(plain, sums, strict=True))


# ----------------------------------------------------------------------------------------------------
# Finds the documents and plain tensors that differ between the ranks of a save.
#
# Ranks compare hashes on their way to rank 0, so that no rank receives those of all ranks. One hash covers all plain tensors; only if it
# differs, a second round compares each tensor.

#: Names under which ranks compare the layout of tensors, and all plain tensors, beside the documents.
LAYOUT = "layout"
PLAIN = "plain tensors"
#: The value in place of a hash where ranks differ.
_DIFFERS = ""
#: An error tells of at most so many different models.
_TOLD = 3


def comparable(snapshot: Snapshot, plain: Mapping[str, int], ranks: Ranks) -> dict[str, Any]:
    """This rank's hashes by name, and its tensors in words. ``plain``: sums of plain tensors."""
    if ranks.world_size == 1:
        return {"hashes": {}, "held": {}}
    hashes = {name: document_hash(encoded) for name, encoded in snapshot.documents.items()}
    hashes[LAYOUT] = layout_hash(snapshot)
    hashes[PLAIN] = xxhash.xxh3_128_hexdigest(json.dumps(plain).encode())
    return {"hashes": hashes, "held": {_held(snapshot): ranks.rank}}


def merged(told: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Merges the :func:`comparable` of several ranks: the hash that all of them have, or a mark that they differ; for each text the
    first rank that has it. None if a rank has none."""
    every = [one for one in told if one is not None]
    if len(every) < len(told):
        return None
    hashes = {}
    for name in {name for one in every for name in one["hashes"]}:
        found = {one["hashes"].get(name, _DIFFERS) for one in every}
        hashes[name] = found.pop() if len(found) == 1 else _DIFFERS
    held: dict[str, int] = {}
    for one in every:
        for text, rank in one["held"].items():
            held[text] = min(rank, held.get(text, rank))
    first = sorted(held.items(), key=lambda h: h[1])[:_TOLD]
    return {"hashes": hashes, "held": dict(first)}


def differing_in(told: Mapping[str, Any] | None) -> list[Any] | None:
    """The names whose hashes differ between ranks; then the tensors of some ranks in words, in the order of ranks."""
    if told is None:
        return None
    return [sorted(n for n, value in told["hashes"].items() if value == _DIFFERS), told["held"]]


def differing_tensors(plain: Mapping[str, int], ranks: Ranks) -> set[str]:
    """The plain tensors that differ between ranks; 16 bytes for each travel. Collective."""
    names = list(plain)

    def ends() -> Any:
        sums = np.array(list(plain.values()), dtype=np.uint64)
        return np.concatenate([sums, ~sums])

    def largest(parts: Sequence[Any]) -> Any:
        refuse_other_tensors(parts)
        return np.max(parts, axis=0)

    def unequal(found: Any) -> list[str]:  # the largest sum of any rank is not the least
        high, low = found[: len(names)], ~found[len(names) :]
        return [names[k] for k in np.flatnonzero(high != low).tolist()]

    return set(ranks.reduce("compare plain tensors", ends, largest, unequal))


def _held(snapshot: Snapshot) -> str:
    """The tensors of this rank's models, in words; equal only for equal names."""
    names = [v.stored.name for part in snapshot.models for v in part.live]
    ends = f"from {names[0]} to {names[-1]}" if names else "none"
    return f"{len(names)} tensors {ends} ({xxhash.xxh3_64_hexdigest(json.dumps(names).encode())[:6]})"


# ----------------------------------------------------------------------------------------------------
# The slice files that a rank writes in a save, and the pieces of tensors in them: worked out once, before any payload moves.


class Piece(NamedTuple):  # as a slice
    """One box of a tensor on this rank."""

    live: Live
    held: LocalBox

    @property
    def is_on_device(self) -> bool:
        """Whether it is copied from a device, which then sums its digest."""
        return self.live.tensor.device.type not in ("cpu", "meta")

    @property
    def is_copied(self) -> bool:
        """Whether its bytes go anywhere. Of a tensor that the checkpoint only refers to they are summed where they lie."""
        return not self.live.refers

    @property
    def nbytes(self) -> int:
        return math.prod(self.held.box.sizes) * itemsize(self.live.stored.dtype)


@frozen
class OwnFile:
    """A slice file of this rank."""

    name: str
    """Its path in the checkpoint."""
    slices: Sequence[Slice]
    pieces: Sequence[Piece]
    """The content of each slice, in their order."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of all slices, without the header."""
        return sum(one.nbytes for one in self.slices)


@frozen
class OwnPart:
    """What this rank writes of one model or optimizer, and what it only sums: another rank writes it, or none."""

    files: Sequence[OwnFile]
    summed: Sequence[Piece]


def own_parts(snapshot: Snapshot, rank: int) -> tuple[OwnPart, ...]:
    """The files of a rank, for each of :attr:`Snapshot.parts`. Pure; linear in tensors, whatever the number of ranks."""
    return tuple([_own_part(part, rank) for part in snapshot.parts])


def _own_part(part: ModelPart | OptimizerPart, rank: int) -> OwnPart:
    by_name = {v.stored.name: v for v in part.live}
    stored = [v.stored for v in part.live if not v.refers]
    folder, count = directory(part.kind, part.name), file_count(stored)
    files = [
        OwnFile(
            f"{folder}/{file_name(part.kind, rank, k, count)}",
            slices,
            [Piece(by_name[s.tensor.name], s.held) for s in slices],
        )
        for k, slices in enumerate(rank_files(stored, rank))
    ]
    written = {s.tensor.name for file in files for s in file.slices}
    others = [v for v in part.live if v.counted and v.stored.name not in written]
    return OwnPart(files, [Piece(v, held) for v in others for held in boxes_on(v.stored, rank)])


def boxes_on(stored: SliceTensor, rank: int) -> tuple[LocalBox, ...]:
    """The boxes of a tensor that a rank holds."""
    coordinate = stored.geometry.coordinate(rank)
    return () if coordinate is None else cut_boxes(stored.shape, stored.geometry, coordinate)
