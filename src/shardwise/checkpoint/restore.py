"""Restores a stored run into live objects: plan → prove → read → verify → documents → RNG last."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import xxhash
from torch.optim import Optimizer

from ..catalog.checkpoint import catalog_of_checkpoint
from ..catalog.records import Catalog, StoredFile
from ..dtypes import code_of, itemsize
from ..errors import StateError
from ..format.manifest import CONVERTED, GRADIENT, Manifest
from ..internals.torch import local_tensor
from ..loading.load import Filling, FillOptions, LoadReport, compare_referred, fill
from ..objects import gc_paused
from ..operations.operation import phase, this_operation
from ..planning.match import Grow, GrowRule, Rules, growth
from ..planning.plan import IOOptions
from ..publish.lock import manifest_seen_by_first
from ..ranks.ranks import Ranks
from ..state.arguments import (
    changed_settings,
    data_settings_of,
    given_settings_of,
    replaced_settings,
    settings_of,
)
from ..state.beyond import add_extra, describe_all, make_room, refuse_fsdp1
from ..state.data import data_caveats
from ..state.documents import functions_left_out
from ..state.optimizer import (
    TrainedBy,
    TrainState,
    clear_gradients,
    differing_groups,
    fill_groups,
    place_gradients,
    place_scalars,
    place_states,
    place_values,
    refuse_unreduced,
)
from ..storage.records import counting
from ..tensors.live import HostMemory, LiveModel, describe
from ..tensors.placements import mesh_text
from .optimizer import OptimizerInCheckpoint, StoredStates, trained_by
from .own import OwnState, Watched, changed_anywhere
from .receivers import Buffers, Generators, check_documents, receivers_of, restore_documents
from .resume_report import ResumeReport
from .stored import StoredCheckpoint, read_checkpoint
from .take import software_versions

# ----------------------------------------------------------------------------------------------------
# The restore of any stored run.

#: By parameter and state.
States = Mapping[str, Mapping[str, torch.Tensor]]


class Run(ABC):
    """A stored run as a restore sees it: a checkpoint of ours, or of another program. Methods are rank-local unless they say otherwise."""

    path: str
    step: int
    world_size: int
    """Ranks that saved it; 0 if that is not recorded."""
    run_id: str = ""
    mesh: str = "not recorded"
    catalogs: Mapping[str, Catalog]
    """Where the tensors of each model are stored."""

    @property
    def files(self) -> list[StoredFile]:
        """The files that are read, in the versions that were looked at."""
        return [file for catalog in self.catalogs.values() for file in catalog.files]

    @property
    def digest(self) -> str:
        """Digest of the restored tensors; empty if their digests are not recorded."""
        return ""

    @abstractmethod
    def optimizer_bytes(self) -> int:
        """Stored bytes of the optimizers' states, about."""

    @abstractmethod
    def give_to_models(self, restored: Restored) -> None:
        """Restore the state that models keep besides their tensors, which are filled. Collective."""

    @abstractmethod
    def states_of(self, part: TrainedBy) -> StoredStates:
        """The stored state of an optimizer. Raises :class:`StateError` if this run's can't take it."""

    @abstractmethod
    def give_documents(self, restored: Restored) -> None:
        """Restore everything that is left, random generators last, and note it. Collective."""


@dataclass(slots=True)
class Restored:
    """What a restore has read and put in place so far."""

    lives: dict[str, LiveModel]
    """The models by name, as they are now."""
    run: Run
    ranks: Ranks
    io: IOOptions
    grow: Grow
    """As in :class:`.Rules`."""
    loads: list[LoadReport] = field(default_factory=list)
    """The first load of each model, then those after its own code or another object had changed it."""
    optimizers: list[LoadReport] = field(default_factory=list)
    gradients: int = 0
    """Number of gradients that wait for a step, among the tensors of the optimizers."""
    differences: list[str] = field(default_factory=list)
    """This and what follows: as in :class:`ResumeReport`."""
    documents: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    caveats: tuple[str, ...] = ()
    rng: str = ""

    def expect(self) -> None:
        """Tell listeners about how much this rank will read: its share of the models, and as much of their optimizers."""

        def share() -> int:
            tensors = [t.tensor for live in self.lives.values() for t in live.stored]
            own, whole = sum(local_tensor(t).numel() for t in tensors), sum(t.numel() for t in tensors)
            models = sum(catalog.nbytes for catalog in self.run.catalogs.values())
            return (models + self.run.optimizer_bytes()) * own // max(1, whole)

        this_operation().guess(share)

    def fill_models(self, names: Iterable[str]) -> None:
        """Fill models from their catalogs, and compare digests where they are recorded. Collective.

        What a checkpoint only refers to is compared first, and must be there: raises :class:`StateError`.
        """
        names, catalogs = list(names), self.run.catalogs
        bases = {name: compare_referred(catalogs[name], self.lives[name], self.ranks) for name in names}
        for name, base in bases.items():
            live, options = self.lives[name].without(base), FillOptions(io=self.io)
            rules = Rules(grow=self.grow)
            self.loads.append(fill(partial(Filling, live, catalogs[name], rules, options), self.ranks))
            self.differences += [f"{name}: {one}" for one in self.loads[-1].grown]
            self.lives[name] = self.lives[name].refreshed()

    def fill_optimizer(self, name: str, optimizer: Optimizer) -> None:
        """Fill an optimizer, and the gradients that wait for its step. Collective.

        The caller has dropped all other gradients. Clears every state that is not stored. Raises as a load, and :class:`StateError`
        for other groups or parameters than the stored ones.
        """
        memory = HostMemory(self.io.pages)
        longer = {one.shape[one.dim] for load in self.loads for one in load.grown}
        part: TrainedBy
        stored: StoredStates
        tensors: States = {}
        before: States = {}

        def prepare() -> Filling:
            nonlocal part, stored, tensors, before
            part = trained_by(name, optimizer, self.lives)
            stored = self.run.states_of(part)
            fill_groups(part, stored.groups)
            tensors, before = place_states(part, stored.spread, memory, stored.low_bit)
            return stored.filling(
                part.live, tensors, memory, self.io, grow=lambda _, rows: "zeros" if rows in longer else None
            )

        self.optimizers.append(fill(prepare, self.ranks))
        self.differences += [f"{name}: {one}" for one in self.optimizers[-1].grown]
        with self.ranks.agree("place optimizer state"):
            held = (*tensors.items(), *stored.scalars.items())
            gradients = {n: states[GRADIENT] for n, states in held if GRADIENT in states}
            self.differences += [*differing_groups(part, stored.groups), *place_gradients(part, gradients)]
            self.gradients += len(gradients)
            place_scalars(part, stored.scalars, before)
            place_values(part, stored.values)


def restore_run(
    state: TrainState,
    ranks: Ranks,
    io: IOOptions,
    label: str,
    find: Callable[[dict[str, LiveModel]], Run],
    *,
    grow: Mapping[str, GrowRule] | None = None,
) -> ResumeReport:
    """Put a stored run into the live objects of ``state``. Collective; the pipeline of ``restore`` and ``Checkpointer.resume``.

    ``find`` describes the run for the models of ``state``, and refuses what these objects can't take; it is rank-local. ``label``
    names the agreement on it.
    """
    started = time.perf_counter()
    with ranks.agree(label) as claim:
        state.watch()
        lives = describe_all(state.models, state.extra)
        for live in lives.values():
            refuse_fsdp1(live.fsdp1_problem)
            for optimizer in state.optimizers.values():
                refuse_unreduced(optimizer, live)
        run, given = find(lives), given_settings_of(state)
        claim.alike([[file.path, file.version] for file in run.files if file.version is not None])
        restored = Restored(lives, run, ranks, io, growth(grow or {}))
        restored.expect()
    restored.fill_models(lives)
    run.give_to_models(restored)
    with ranks.agree("clear gradients"):
        for optimizer in state.optimizers.values():  # before any is given its own: two may share parameters
            clear_gradients(optimizer)
    with phase("optimizer"):
        for name, optimizer in state.optimizers.items():
            restored.fill_optimizer(name, optimizer)
    run.give_documents(restored)
    return ResumeReport(
        path=run.path,
        step=run.step,
        run_id=run.run_id,
        saved_world_size=run.world_size,
        world_size=ranks.world_size,
        saved_mesh=run.mesh,
        mesh=mesh_text(g for live in lives.values() for g in live.geometries.values()),
        digest="" if any(load.grown for load in restored.loads) else run.digest,
        exact=not (restored.differences or restored.skipped or restored.caveats),
        differences=tuple(restored.differences),
        tensors=sum(load.tensors for load in restored.loads[: len(lives)]),
        optimizer_tensors=sum(load.tensors for load in restored.optimizers),
        documents=tuple(restored.documents),
        skipped=tuple(restored.skipped),
        caveats=restored.caveats,
        rng=restored.rng,
        bytes_read=sum(load.bytes_read for load in (*restored.loads, *restored.optimizers)),
        seconds=time.perf_counter() - started,
        damaged={},
        superseded=(),
        functions=tuple(functions_left_out(state.scheduler)),
        not_given=state.not_given,
        replaced=replaced_settings(given, given_settings_of(state)),
        gradients=restored.gradients,
    )


# ----------------------------------------------------------------------------------------------------
# The restore of our checkpoints.


@gc_paused()
def restore_into(
    state: TrainState,
    path: str,
    ranks: Ranks,
    io: IOOptions,
    *,
    grow: Mapping[str, GrowRule] | None = None,
) -> ResumeReport:
    """Restore one of our checkpoints, and count the requests to stores. Collective."""
    with counting() as asked:
        found = partial(_Checkpoint, state, path, manifest_seen_by_first(path, ranks), ranks)
        report = restore_run(state, ranks, io, "read manifest", found, grow=grow)
    return replace(report, requests=asked.total)


class _Checkpoint(Run):
    """A checkpoint of ours."""

    def __init__(
        self,
        state: TrainState,
        path: str,
        read: Callable[[], Manifest],
        ranks: Ranks,
        lives: dict[str, LiveModel],
    ) -> None:
        manifest = read()
        # The first that misses a file says what to do if others hold it.
        self.catalogs = {
            n: catalog_of_checkpoint(path, n, manifest=manifest) for n in lives if n in manifest.models
        }
        stored = self._stored = read_checkpoint(path, manifest, ranks, lives)
        for name, extra in state.extra.items():  # sharded when saved, and not now
            if name in manifest.models and f"extra.{name}" not in stored.documents and name not in lives:
                add_extra(lives, name, extra)
        lost = [name for name in lives if name not in manifest.models]  # it may hold more
        if whole := [name for name in lost if f"extra.{name}" in stored.documents]:
            raise StateError(
                f"{path}: extra.{whole[0]} was saved unsharded, but its tensors are sharded in this run. Restore it unsharded, "
                f"or leave it out of the state"
            )
        if lost:
            raise StateError(
                f"{path}: holds models {sorted(manifest.models)}, but this run also has {', '.join(lost)}"
            )
        for name in lives.keys() - self.catalogs.keys():
            self.catalogs[name] = catalog_of_checkpoint(path, name, manifest=manifest)
        self.path, self.step, self.run_id = path, manifest.step, manifest.run_id
        self.world_size, self.mesh = manifest.world_size, mesh_text(manifest.geometries)
        self._state, self._generators = state, Generators(state, stored, ranks.rank)
        self._receivers = receivers_of(state, lives, stored)
        check_documents([*self._receivers, self._generators], stored.documents)
        self._own = OwnState(stored.documents, manifest, stored.places)
        for name, live in lives.items():  # the first that changes anything
            if make_room(live, {n: t.shape for n, t in manifest.models[name].items()}):
                lives[name] = describe(live.root)

    @property
    def digest(self) -> str:
        """Digest of the manifest's digests, which were compared with the live tensors."""
        lines, optimizers, manifest = [], sorted(self._state.optimizers), self._stored.manifest
        for model in sorted(self.catalogs):
            for name, entry in sorted(manifest.models[model].items()):
                lines.append(f"{model} {name} {entry.digest:016x}")
                for optimizer in optimizers:
                    for key, e in sorted(entry.states.get(optimizer, {}).items()):
                        where = f"{e.packed} {e.index}" if e.packed is not None else f"{e.digest:016x}"
                        lines.append(f"{optimizer} {key} {where}")
        for optimizer in optimizers:
            packed = manifest.packed.get(optimizer, {})
            lines += [f"{optimizer} {key} {p.digest:016x}" for key, p in sorted(packed.items())]
        return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())

    def optimizer_bytes(self) -> int:
        """Stored bytes of the states of this run's optimizers that are spread over ranks."""
        return sum(
            itemsize(one.dtype) * math.prod(entry.shape_of(one))
            for model in self._state.models
            for entry in self._stored.manifest.models[model].values()
            for optimizer in self._state.optimizers
            for one in entry.states.get(optimizer, {}).values()
            if one.packed is None
        )

    def give_to_models(self, restored: Restored) -> None:
        restored.fill_models(self._own.give_to_models(restored.lives, restored.ranks))
        self._stored = self._stored.under_names_of(restored.lives)

    def states_of(self, part: TrainedBy) -> StoredStates:
        return OptimizerInCheckpoint(part, self._stored).states()

    def give_documents(self, restored: Restored) -> None:
        state, lives, ranks = self._state, restored.lives, restored.ranks
        receivers, documents = self._receivers, self._stored.documents
        with ranks.agree("give optimizers their own state"):
            self._own.give_to_optimizers(state.given_optimizers, state.optimizers)
        with ranks.agree("restore documents"):
            self._restore_buffers()
            reach = any(one.reaches_others() for one in receivers if one.name in documents)
            watched = Watched(state, lives) if reach else None
            taken, skipped = restore_documents(receivers, state, lives, documents, self._stored.manifest)
            ruined = watched.put_back(lives) if watched is not None else ()
        restored.fill_models(changed_anywhere(watched, lives, ranks))
        with ranks.agree("compare the taken state"):
            self._restore_buffers()
            restored.skipped += [
                *skipped,
                *(line for one in receivers for ask in one.asked for line in ask()),
            ]
            self._own.ask()
            restored.documents += [*taken, *self._own.restored]
            restored.caveats = data_caveats(state.dataloader)
            restored.differences = [
                *_differences(state, self._stored, restored),
                *restored.differences,
                *ruined,
                *self._own.differences,
                *_changed_settings(state, self._stored, lives),
                *self._stored.places.differences,
                *self._generators.plan.differences,
            ]
            restored.rng = self._generators.plan.rule
            self._generators.restore(documents.get(self._generators.name))

    def _restore_buffers(self) -> None:
        """Restore this rank's own buffers, after a model was filled."""
        documents = self._stored.documents
        for receiver in self._receivers:
            if isinstance(receiver, Buffers) and receiver.name in documents:
                receiver.restore(documents[receiver.name])


def _changed_settings(
    state: TrainState, stored: StoredCheckpoint, lives: Mapping[str, LiveModel]
) -> Iterator[str]:
    """Lines for settings that differ from the saved run's. An older checkpoint, or another number of ranks, has none to compare."""
    was = stored.documents
    if "settings" in was:
        yield from changed_settings(was["settings"], settings_of(state, lives))
    if "data_settings" in was and state.dataloader is not None:
        yield from changed_settings(was["data_settings"], data_settings_of(state))


def _differences(state: TrainState, stored: StoredCheckpoint, restored: Restored) -> list[str]:
    """Reasons why the resume is not exact. The same on every rank, except for differences between machines."""
    found, manifest = [], stored.manifest
    ranks, kind = restored.ranks.world_size, manifest.software.get(CONVERTED)
    if kind is not None:  # the manifest has the ranks that converted
        found.append(f"converted from {kind}: the saved run's RNG states and number of ranks are not in it")
    elif manifest.world_size != ranks:
        found.append(f"world size: {manifest.world_size} when saved, {ranks} now")
    now = software_versions(state)
    found += [
        f"{k}: {v} when saved, {now[k]} now" for k, v in manifest.software.items() if now.get(k, v) != v
    ]
    if "scheduler" in stored.documents and "classes" not in stored.documents:
        found.append("scheduler: the checkpoint does not name its class")
    moved = False
    for name, live in restored.lives.items():
        entries = manifest.models[name]
        for t in live.stored:
            if code_of(t.tensor.dtype) != entries[t.name].dtype:
                found.append(f"{t.name}: {entries[t.name].dtype} when saved, {code_of(t.tensor.dtype)} now")
        spread = live.geometries.items()
        moved |= any(not manifest.geometries[entries[n].geometry].is_same_place(g) for n, g in spread)
    if kind is None and manifest.world_size == ranks and moved:
        found.append("mesh or placements: tensors are now sharded differently")
    return found
