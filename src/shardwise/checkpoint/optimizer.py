"""Restores optimizers: plans and fills their states, and sets what isn't a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from ..catalog.checkpoint import catalog_of_optimizer, packed_name
from ..catalog.records import Catalog
from ..digests import differing_digests, own_sums, tensor_digest
from ..dtypes import code_of, torch_dtype
from ..engine.engine import Destination, Staging, execute_own
from ..engine.files import page_cache_for
from ..engine.objects import SourceReader
from ..errors import FormatError, IntegrityError, StateError
from ..format.manifest import GRADIENT, document_of
from ..format.slices import StateKey, by_name
from ..internals.torch import local_tensor
from ..limits import brief
from ..objects import frozen
from ..operations.operation import this_operation
from ..planning.match import Rules, match_rules, renamed
from ..planning.plan import IOOptions, Plan, build_plan
from ..ranks.ranks import Ranks
from ..state.low_bit import PARTS, PLAIN, Form, StoredForm, part_name, state_by_rank
from ..state.optimizer import (
    check_groups,
    check_stored,
    differing_groups,
    fill_groups,
    parameter_names,
    place_gradients,
    place_scalars,
    place_states,
    place_values,
)
from ..tensors.boxes import Layout, Wanted, whole_tensor
from ..tensors.live import HostMemory, LiveModel, wanted_states
from ..tensors.placements import Geometry, fitting_ranks, mesh_text
from .snapshot import trained_model
from .stored import StoredCheckpoint

__all__ = [
    "OptimizerFill",
    "RestoredOptimizer",
    "StoredStates",
    "TrainedBy",
    "check_low_bit",
    "check_optimizer",
    "geometries_of_states",
    "plan_fill",
    "plan_states",
    "restore_optimizer",
    "stored_by_rank",
    "stored_forms",
    "stored_states",
    "trained_by",
]


# ----------------------------------------------------------------------------------------------------
# Fills an optimizer with stored states, of our checkpoints and of other programs': plan, make room, read, place.
#
# The caller says where the states are stored (:class:`StoredStates`), and agrees with the other ranks between the steps.


@frozen
class TrainedBy:
    """An optimizer of this run, and the model whose parameters it holds."""

    name: str
    optimizer: Optimizer
    model_name: str
    live: LiveModel

    @property
    def document(self) -> str:
        """Name of the document with its settings."""
        return document_of("optimizer", self.name)

    @property
    def opaque(self) -> str:
        """Name of the document with its tensors that only their own rank can interpret."""
        return document_of("optimizer", self.name, "opaque")

    @property
    def low_bit(self) -> str:
        """Name of the document that says what its states of few bits are."""
        return document_of("optimizer", self.name, "low_bit")

    def names(self) -> dict[int, str]:
        """id of each parameter → its name. Raises :class:`StateError` for a parameter that the model lacks."""
        return parameter_names(self.optimizer, self.live.tensors)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Each parameter by name. Raises as :meth:`names`."""
        names = self.names()
        return {names[id(p)]: p for group in self.optimizer.param_groups for p in group["params"]}


def trained_by(name: str, optimizer: Optimizer, lives: Mapping[str, LiveModel]) -> TrainedBy:
    """An optimizer with the model that :func:`trained_model` finds for it."""
    model = trained_model(optimizer, lives)
    return TrainedBy(name, optimizer, model, lives[model])


@frozen
class RestoredOptimizer:
    """The result of restoring an optimizer on this rank."""

    bytes_read: int
    tensors: int
    """Number of stored tensors, gradients included."""
    gradients: int = 0
    """Number of gradients that wait for a step."""
    differences: tuple[str, ...] = ()
    """Gradients whose dtype changed."""


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


@frozen
class OptimizerFill:
    """An optimizer that has its stored settings and room for its stored states, and the plan to read them."""

    part: TrainedBy
    names: Mapping[int, str]
    stored: StoredStates
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    """Parameter → state → tensor to read into, of those in ``stored.spread``, and parts of those in ``stored.low_bit``."""
    before: Mapping[str, Mapping[str, torch.Tensor]]
    """The 0-d states that the optimizer had."""
    plan: Plan
    io: IOOptions
    memory: HostMemory
    """Where the tensors lie that the optimizer did not have."""

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """The stored gradients by parameter, which :meth:`place` leaves to the caller."""
        found = {n: states[GRADIENT] for n, states in self.tensors.items() if GRADIENT in states}
        return found | {n: s[GRADIENT] for n, s in self.stored.scalars.items() if GRADIENT in s}

    def read(self, tick: Callable[[int], None]) -> int:
        """Read this rank's parts of all tensors. Calls ``tick`` while it reads; returns the bytes read. Rank-local.

        Memory: staging only. Raises :class:`SourceError`.
        """
        local = {n: local_tensor(t) for n, t in by_name(self.tensors).items()} | dict(self.stored.whole)
        page_cache = page_cache_for(self.io, (t.device for t in local.values()))
        files = self.stored.catalog.files
        counted = this_operation()
        counted.expect(lambda: self.plan.bytes_to_read)
        tick = counted.counting(tick)
        with SourceReader(tick, files=files, io=self.io, page_cache=page_cache) as reader:
            staging = Staging(self.io, self.plan.staging_bytes)
            execute_own(self.plan.transfers, reader, reader, Destination(local), staging, self.memory)
            self.memory.settle()
        return reader.bytes_read

    def place(self) -> None:
        """Put 0-d states and other values into the optimizer, once everything is read. Rank-local."""
        place_scalars(self.part.optimizer, self.names, self.stored.scalars, self.before)
        place_values(self.part.optimizer, self.names, self.stored.values)

    def restored(
        self, bytes_read: int, gradients: int = 0, differences: tuple[str, ...] = ()
    ) -> RestoredOptimizer:
        """The result, for the report."""
        tensors = sum(map(len, self.tensors.values())) + len(self.stored.whole)
        return RestoredOptimizer(bytes_read, tensors, gradients, differences)


def plan_fill(part: TrainedBy, stored: StoredStates, io: IOOptions) -> OptimizerFill:
    """Give an optimizer its stored settings and room for its stored states; plan the reads. Rank-local.

    Clears every state that is not stored. Raises :class:`StateError` for other groups or parameters than the stored
    ones, :class:`PlanError` if the catalog's tensors are not those that are wanted.
    """
    names = part.names()
    fill_groups(part.optimizer, names, stored.groups)
    memory = HostMemory(io.pages)
    tensors, before = place_states(part.optimizer, names, stored.spread, memory, stored.low_bit)
    plan = plan_states(stored, tensors, part.live.geometries, io)
    return OptimizerFill(part, names, stored, tensors, before, plan, io, memory)


def plan_states(
    stored: StoredStates,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    geometries: Mapping[str, Geometry],
    io: IOOptions,
) -> Plan:
    """The reads that fill this rank's part of ``tensors`` (parameter → state → tensor) and of ``stored.whole``."""
    wanted: list[Wanted] = wanted_states(by_name(tensors), geometries_of_states(tensors, geometries))
    wanted += [whole_tensor(n, code_of(t.dtype), tuple(t.shape)) for n, t in stored.whole.items()]
    rename = renamed(lambda names: {n: stored.renames.get(n, n) for n in names})
    matched = match_rules(stored.catalog, wanted, Rules(rename))
    return build_plan(stored.catalog, Layout(tuple(wanted)), matched, io)


def geometries_of_states(
    tensors: Mapping[str, Mapping[str, torch.Tensor]], geometries: Mapping[str, Geometry]
) -> dict[str, Geometry]:
    """The geometry of each state's parameter, by the state's name."""
    return by_name({n: dict.fromkeys(states, geometries[n]) for n, states in tensors.items()})


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
# Restores an optimizer from our checkpoints: around the plan for its states, digests, gradients, per-rank states.


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
            f"optimizer state of {', '.join(moved[:5])} has a different shape than its parameter, and was stored per rank; "
            f"the parameter is now sharded differently, so the state can't be carried over"
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
