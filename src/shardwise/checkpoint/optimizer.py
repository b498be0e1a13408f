"""The stored state of an optimizer: what a load fills, and whether this run's optimizer can take it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

import torch
from torch.optim import Optimizer

from ..catalog.checkpoint import catalog_of_optimizer, packed_name
from ..catalog.records import Catalog
from ..dtypes import torch_dtype
from ..errors import FormatError, StateError
from ..format.slices import StateKey, by_name
from ..limits import brief
from ..loading.load import Filling, FillOptions
from ..objects import frozen
from ..planning.match import Rules, renamed
from ..planning.plan import IOOptions
from ..state.low_bit import PARTS, PLAIN, Form, StoredForm, part_name, state_by_rank
from ..state.optimizer import TrainedBy, check_groups, check_stored
from ..tensors.live import HostMemory, LiveModel, world_size
from ..tensors.placements import Geometry, fitting_ranks, mesh_text, replicated
from .snapshot import trained_model
from .stored import StoredCheckpoint

# ----------------------------------------------------------------------------------------------------
# The stored states of an optimizer, of our checkpoints and of other programs', as a load takes them.


def trained_by(name: str, optimizer: Optimizer, lives: Mapping[str, LiveModel]) -> TrainedBy:
    """An optimizer with the model that :func:`trained_model` finds for it. Raises :class:`StateError` for parameters that it lacks."""
    model = trained_model(optimizer, lives)
    return TrainedBy.of(name, optimizer, model, lives[model])


@frozen(kw_only=True)
class StoredStates:
    """The stored state of an optimizer. Parameters have their names in this run, except in ``catalog``."""

    catalog: Catalog
    """The stored tensors, by stored name."""
    renames: Mapping[str, str]
    """Stored name → the same tensor's name in this run, where it is another."""
    groups: list[dict[str, Any]]
    """``names`` and ``options`` of each parameter group."""
    spread: Mapping[str, Mapping[str, str]]
    """Parameter → state → dtype of each tensor that is spread over ranks like its parameter."""
    whole: Mapping[str, torch.Tensor]
    """Room for the other tensors, by name: every rank reads them whole."""
    scalars: Mapping[str, Mapping[str, torch.Tensor]]
    """Parameter → state → element of ``whole``, as a 0-d view: filled once ``whole`` is."""
    values: Mapping[str, Mapping[str, Any]]
    """Parameter → state → value that is in no catalog: not a tensor, or this rank's own tensor."""
    low_bit: Mapping[str, Mapping[str, StoredForm]] = field(default_factory=dict)
    """Parameter → state → form of each state of few bits, whose parts are spread over ranks like its parameter."""

    def filling(
        self,
        live: LiveModel,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        memory: HostMemory,
        io: IOOptions,
    ) -> Filling:
        """What a load needs to fill ``tensors`` and :attr:`whole`.

        ``tensors``: parameter → state → tensor allocated from ``memory``, spread like its parameter in ``live``.
        """
        everywhere = replicated(world_size())
        of_parameters = {n: dict.fromkeys(states, live.geometries[n]) for n, states in tensors.items()}
        geometries = by_name(of_parameters) | dict.fromkeys(self.whole, everywhere)
        rename = renamed(lambda names: {n: self.renames.get(n, n) for n in names})
        states = live.of_states(by_name(tensors) | dict(self.whole), geometries)
        return Filling(states, self.catalog, Rules(rename), FillOptions(io=io), memory)


# ----------------------------------------------------------------------------------------------------
# Restores optimizer states of few bits: whether they fit the cuts of this run, and what is to be made of their parts.


def stored_forms(part: TrainedBy, stored: StoredCheckpoint) -> dict[str, dict[str, StoredForm]]:
    """The states of few bits whose parts are tensors of the whole parameter, by parameter and state."""
    document, entries = _document(part, stored), stored.manifest.models[part.model_name]
    found: dict[str, dict[str, StoredForm]] = {}
    for name, state, form in _forms(document["states"]):
        grid = form.grid(entries[name].shape)
        assert grid is not None, "the form of the document was checked"
        book = document["books"][form.book] if form.book else None
        found.setdefault(name, {})[state] = StoredForm(form, grid, book)
    return found


def stored_by_rank(part: TrainedBy, stored: StoredCheckpoint) -> dict[str, dict[str, Any]]:
    """What this rank stored by itself, ready to be placed, by parameter and state; states of few bits are put together.

    Raises :class:`FormatError` if the parts of one are not there, or do not make it up.
    """
    found = {n: dict(states) for n, states in stored.documents.get(part.opaque, {}).items()}
    document = _document(part, stored)
    for name, state, form in _forms(document["by_rank"]):
        of_one = found.get(name, {})
        held = {p: of_one.pop(part_name(state, p), None) for p in (*PARTS, PLAIN)}
        book = document["books"].get(form.book)
        try:
            of_one[state] = state_by_rank(held, part.parameters[name], form, book)
        except ValueError as error:
            raise FormatError(
                f"{part.opaque}: {brief(name)}.{brief(state)}: {error}", path=stored.path
            ) from error
    return found


def check_low_bit(part: TrainedBy, stored: StoredCheckpoint) -> None:
    """Raise :class:`StateError` naming states whose blocks the cuts of this run divide. Reads nothing, changes nothing.

    :class:`FormatError` for a stored tensor that is not shaped like its parameter and that no document explains.
    """
    document, entries = _document(part, stored), stored.manifest.models[part.model_name]
    for name, t in entries.items():
        known = {part_name(s, p) for s in document["states"].get(name, {}) for p in PARTS}
        for state, e in t.states.get(part.name, {}).items():
            if e.shape is not None and state not in known:
                raise FormatError(
                    f"the state {brief(state)} of {brief(name)} has a different shape than its parameter, and {part.low_bit} does "
                    f"not say what it is",
                    path=stored.path,
                )
    live = part.live.geometries
    bad = [
        (name, state, form)
        for name, state, form in _forms(document["states"])
        if name in live and not _falls_on(form, entries[name].shape, live[name])
    ]
    if bad:
        _refuse_cuts(part, stored, bad)
    moved = [
        (name, state, form)
        for name, state, form in _forms(document["by_rank"])
        if name in live and not stored.manifest.geometries[entries[name].geometry].is_same_place(live[name])
    ]
    if moved:
        name, state, form = moved[0]
        raise StateError(
            f"{stored.path}: the optimizer state {name}.{state} ({form.text}) and {len(moved) - 1} others were stored by rank, "
            f"because cuts of the saved run ({mesh_text(stored.manifest.geometries)}) lay inside their blocks, or some of its "
            f"ranks kept short shards in full. They fit that mesh only; this run has {mesh_text(live.values())}. Resume on the "
            f"saved mesh, or with a new optimizer"
        )


def _falls_on(form: Form, shape: tuple[int, ...], geometry: Geometry) -> bool:
    grid = form.grid(shape)
    return grid is not None and grid.falls_on(geometry)


def _refuse_cuts(part: TrainedBy, stored: StoredCheckpoint, bad: list[tuple[str, str, Form]]) -> None:
    live, entries = part.live.geometries, stored.manifest.models[part.model_name]
    name, state, form = bad[0]
    grid = form.grid(entries[name].shape)
    assert grid is not None, "the form of the document was checked"
    pairs = set()
    for n, of in stored_forms(part, stored).items():
        dims = {cut.dim for cut in live[n].cuts if cut.kind != "replicate"} if n in live else set()
        pairs |= {(one.grid, dim) for one in of.values() for dim in dims}
    fitting = ", ".join(map(str, fitting_ranks(pairs)))
    raise StateError(
        f"{stored.path}: the optimizer state {name}.{state} is {form.text} elements, and this run's cuts of {name} "
        f"(shape {list(grid.shape)}, {mesh_text([live[name]])}) fall inside blocks: expected cuts of dim {grid.dim} at multiples "
        f"of {grid.rows}, and none of later dims. So it is with {len(bad) - 1} other states. Resume on the saved mesh "
        f"({mesh_text(stored.manifest.geometries)})"
        + (f", or cut these dims over one of these numbers of ranks: {fitting}" if fitting else "")
    )


def _forms(states: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Form]]:
    for name, of_one in states.items():
        for state, form in of_one.items():
            yield name, state, Form(**form)


def _document(part: TrainedBy, stored: StoredCheckpoint) -> Mapping[str, Any]:
    empty: Mapping[str, Any] = {"books": {}, "states": {}, "by_rank": {}}
    found: Mapping[str, Any] = stored.documents.get(part.low_bit, empty)
    return found


# ----------------------------------------------------------------------------------------------------
# The state of an optimizer in our checkpoints.


def check_optimizer(part: TrainedBy, stored: StoredCheckpoint) -> None:
    """Raise :class:`StateError` or :class:`FormatError` for state that an optimizer of this run can't take.

    ``stored`` is under the names of this run's models. Changes nothing.
    """
    entries = stored.manifest.models[part.model_name]
    document = stored.documents[part.document]
    check_groups(part, document["groups"])
    check_stored(part, (n for n, e in entries.items() if e.states.get(part.name)))
    check_stored(part, document["values"])
    check_low_bit(part, stored)
    _check_opaque(part, stored)


def stored_states(part: TrainedBy, stored: StoredCheckpoint) -> StoredStates:
    """An optimizer's state in a checkpoint, with room for its packs. Reads nothing. Moves the documents' tensors to their devices.

    ``stored`` is under the names of this run's models. Raises :class:`StateError` or :class:`FormatError` for state that this
    run's optimizer can't take.
    """
    _move_documents(part, stored)
    check_low_bit(part, stored)
    _check_opaque(part, stored)
    entries = stored.manifest.models[part.model_name]
    states = {n: t.states[part.name] for n, t in entries.items() if t.states.get(part.name)}
    packs = stored.manifest.packed[part.name]
    whole = {packed_name(k): torch.empty(p.count, dtype=torch_dtype(p.dtype)) for k, p in packs.items()}
    document, opaque = stored.documents[part.document], stored_by_rank(part, stored)
    first, low_bit = part.live.first_names, stored_forms(part, stored)
    parts = {n: {part_name(s, p) for s in of for p in PARTS} for n, of in low_bit.items()}
    return StoredStates(
        catalog=catalog_of_optimizer(stored.path, stored.as_saved, part.name, part.model_name),
        renames={
            StateKey(n, s).name: StateKey(first[n], s).name
            for n, t in stored.as_saved.models[part.model_name].items()
            if first.get(n, n) != n
            for s in t.states.get(part.name, {})
        },
        groups=document["groups"],
        spread={
            n: {s: e.dtype for s, e in of.items() if e.packed is None and s not in parts.get(n, ())}
            for n, of in states.items()
        },
        low_bit=low_bit,
        whole=whole,
        scalars={
            n: {s: whole[packed_name(e.packed)][e.index] for s, e in of.items() if e.packed is not None}
            for n, of in states.items()
        },
        values={
            n: {**document["values"].get(n, {}), **opaque.get(n, {})}
            for n in {**document["values"], **opaque}
        },
    )


def _move_documents(part: TrainedBy, stored: StoredCheckpoint) -> None:
    """Move the documents' tensors: hyper-parameters to the devices of the live ones, states to their parameter's."""
    groups, parameters = part.optimizer.param_groups, part.parameters
    document = stored.documents[part.document]
    stored.places.put(document["groups"], lambda: [{"options": group} for group in groups])
    for states in (document["values"], stored.documents.get(part.opaque, {})):
        for name, of_one in states.items():
            stored.places.put(of_one, lambda o=of_one, n=name: dict.fromkeys(o, parameters.get(n)))  # type: ignore[misc]


def _check_opaque(part: TrainedBy, stored: StoredCheckpoint) -> None:
    """Refuse rank-local state of a parameter that is now cut differently."""
    opaque, manifest = stored.documents.get(part.opaque, {}), stored.manifest
    entries, geometries = manifest.models[part.model_name], part.live.geometries
    lost = [n for n in opaque if n not in entries or n not in geometries]
    if lost:
        raise FormatError(
            f"the checkpoint holds optimizer state of {brief(lost[0])}, which is not a tensor of its model"
        )
    moved = [n for n in opaque if not manifest.geometries[entries[n].geometry].is_same_place(geometries[n])]
    if moved:
        raise StateError(
            f"optimizer state of {', '.join(moved[:5])} has a different shape than its parameter, and was stored per rank; "
            f"the parameter is now sharded differently, so the state can't be carried over"
        )
