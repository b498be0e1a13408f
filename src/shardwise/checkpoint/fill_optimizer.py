"""Fills an optimizer with stored states, of our checkpoints and of other programs': plan, make room, read, place.

The caller says where the states are stored (:class:`StoredStates`), and agrees with the other ranks between the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import torch
from torch.optim import Optimizer

from ..catalog import Catalog
from ..dtypes import code_of
from ..format.states import by_name
from ..layout.live import LiveModel
from ..layout.model import local_tensor, wanted_states
from ..layout.placements import Geometry
from ..layout.wanted import Layout, Wanted, whole_tensor
from ..models.host_memory import HostMemory
from ..objects import frozen
from ..operations.operation import this_operation
from ..planning import IOOptions, Plan, build_plan
from ..recipe.match import Rules, match_rules, renamed
from ..state.gradients import GRADIENT
from ..state.low_bit import StoredForm
from ..state.optimizer import fill_groups, parameter_names, place_scalars, place_states, place_values
from ..state.train_state import document_of
from ..transfer import SourceReader
from ..transfer.copy import Destination, Staging
from ..transfer.lanes import execute_own
from ..transfer.page_cache import page_cache_for
from .snapshot import trained_model

__all__ = [
    "OptimizerFill",
    "RestoredOptimizer",
    "StoredStates",
    "TrainedBy",
    "geometries_of_states",
    "plan_fill",
    "plan_states",
    "trained_by",
]


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
