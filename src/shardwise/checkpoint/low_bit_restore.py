"""Restores optimizer states of few bits: whether they fit the cuts of this run, and what is to be made of their parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import FormatError, StateError
from ..layout.blocks import fitting_ranks
from ..layout.placements import Geometry, mesh_text
from ..limits import brief
from ..state.low_bit import PARTS, PLAIN, Form, StoredForm, part_name, state_by_rank
from .fill_optimizer import TrainedBy
from .stored_checkpoint import StoredCheckpoint

__all__ = ["check_low_bit", "stored_by_rank", "stored_forms"]


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


def stored_by_rank(
    part: TrainedBy, stored: StoredCheckpoint, parameters: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
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
            of_one[state] = state_by_rank(held, parameters[name], form, book)
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
                    f"the state {brief(state)} of {brief(name)} has another shape than its parameter, and {part.low_bit} does "
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
