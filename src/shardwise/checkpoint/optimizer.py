"""Restores an optimizer from our checkpoints: around the plan for its states, digests, gradients, per-rank states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..catalog.checkpoint import catalog_of_optimizer, packed_name
from ..digests.digest import tensor_digest
from ..digests.live import differing_digests, own_sums
from ..dtypes import torch_dtype
from ..errors import FormatError, IntegrityError, StateError
from ..format.states import StateKey, by_name
from ..layout.placements import Geometry
from ..limits import brief
from ..planning import IOOptions
from ..ranks.ranks import Ranks
from ..state.gradients import place_gradients
from ..state.low_bit import PARTS, part_name
from ..state.optimizer import check_groups, check_stored, differing_groups
from .fill_optimizer import (
    OptimizerFill,
    RestoredOptimizer,
    StoredStates,
    TrainedBy,
    geometries_of_states,
    plan_fill,
)
from .low_bit_restore import check_low_bit, stored_by_rank, stored_forms
from .stored_checkpoint import StoredCheckpoint

__all__ = ["check_optimizer", "restore_optimizer", "stored_states"]


def check_optimizer(part: TrainedBy, stored: StoredCheckpoint) -> None:
    """Raise :class:`StateError` or :class:`FormatError` for state that an optimizer of this run can't take.

    ``stored`` is under the names of this run's models. Changes nothing.
    """
    entries = stored.manifest.models[part.model_name]
    names = part.names()
    document = stored.documents[part.document]
    check_groups(part.optimizer, names, document["groups"])
    check_stored(part.optimizer, names, (n for n, e in entries.items() if e.states.get(part.name)))
    check_stored(part.optimizer, names, document["values"])
    check_low_bit(part, stored)
    _check_opaque(part, stored)


def restore_optimizer(
    part: TrainedBy, stored: StoredCheckpoint, ranks: Ranks, io: IOOptions
) -> RestoredOptimizer:
    """Fill an optimizer and the gradients that wait for its step. Collective.

    ``stored`` is under the names of this run's models. The caller has dropped all other gradients. Memory: staging,
    and the 0-d states. Raises :class:`StateError`, :class:`PlanError`, :class:`SourceError`, and
    :class:`IntegrityError` if a digest differs.
    """
    with ranks.agree("plan optimizer state"):
        _move_documents(part, stored)
        check_low_bit(part, stored)
        _check_opaque(part, stored)
        groups = stored.documents[part.document]["groups"]
        check_groups(part.optimizer, part.names(), groups)
        found = differing_groups(part.optimizer, part.names(), groups)
        fill = plan_fill(part, stored_states(part, stored), io)
    geometries = geometries_of_states(fill.tensors, part.live.geometries)
    with ranks.agree("read optimizer state"):
        bytes_read = fill.read(ranks.tick)
        _check_packs(fill, stored)
        # Before the ranks meet: another rank may still read.
        sums = own_sums(by_name(fill.tensors), geometries, ranks)
    _check_digests(fill, geometries, sums, stored, ranks)
    with ranks.agree("place optimizer state"):
        gradients = fill.gradients
        differences = (*found, *place_gradients(part.optimizer, fill.names, gradients))
        fill.place()
    return fill.restored(bytes_read, len(gradients), differences)


def stored_states(part: TrainedBy, stored: StoredCheckpoint) -> StoredStates:
    """An optimizer's state in a checkpoint, with room for its packs. Reads nothing."""
    entries = stored.manifest.models[part.model_name]
    states = {n: t.states[part.name] for n, t in entries.items() if t.states.get(part.name)}
    packs = stored.manifest.packed[part.name]
    whole = {packed_name(k): torch.empty(p.count, dtype=torch_dtype(p.dtype)) for k, p in packs.items()}
    document, parameters = stored.documents[part.document], part.parameters()
    opaque = stored_by_rank(part, stored, parameters)
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
    groups, parameters = part.optimizer.param_groups, part.parameters()
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
            f"optimizer state of {', '.join(moved[:5])} has another shape than its parameter and was stored per rank; "
            f"the parameter is now spread over ranks otherwise, so it can't be carried over"
        )


def _check_packs(fill: OptimizerFill, stored: StoredCheckpoint) -> None:
    """Compare the digests of the packs, which every rank has read whole, with the recorded ones. Rank-local."""
    packs, whole = stored.manifest.packed[fill.part.name], fill.stored.whole
    wrong = [k for k, pack in packs.items() if tensor_digest(whole[packed_name(k)]) != pack.digest]
    if wrong:
        raise _differs(wrong, stored)


def _check_digests(
    fill: OptimizerFill,
    geometries: Mapping[str, Geometry],
    sums: NDArray[np.uint64],
    stored: StoredCheckpoint,
    ranks: Ranks,
) -> None:
    """Compare the digests of all other tensors that were read with the recorded ones. ``sums``: this rank's. Collective."""
    states, found = fill.stored, by_name(fill.tensors)
    recorded = {states.renames.get(n, n): digest for n, digest in states.catalog.digests.items()}
    wrong = differing_digests(found, geometries, ranks, {n: recorded[n] for n in found}, own=sums)
    if wrong:  # on every rank
        with ranks.agree("compare optimizer digests"):
            raise _differs(list(wrong), stored)


def _differs(wrong: Sequence[str], stored: StoredCheckpoint) -> IntegrityError:
    return IntegrityError(
        f"optimizer state differs from what was saved: {', '.join(wrong[:20])}", path=stored.path
    )
