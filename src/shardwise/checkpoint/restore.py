"""Restores a checkpoint into live objects: plan → prove → read → verify → documents → RNG last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import xxhash

from ..catalog.checkpoint import catalog_of_checkpoint
from ..catalog.records import Catalog
from ..dtypes import code_of, itemsize
from ..errors import StateError
from ..format.manifest import CONVERTED, Manifest, TensorEntry
from ..internals.torch import local_tensor
from ..loading.load import Filling, FillOptions, LoadReport, fill
from ..objects import frozen, gc_paused
from ..operations.operation import phase, this_operation
from ..planning.match import Rules
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
from ..state.beyond import make_room, refuse_fsdp1
from ..state.data import data_caveats
from ..state.documents import functions_left_out
from ..state.optimizer import TrainState, clear_gradients, refuse_unreduced
from ..storage.records import counting
from ..tensors.live import LiveModel, describe
from ..tensors.placements import mesh_text
from .optimizer import RestoredOptimizer, restore_optimizer, trained_by
from .own import OwnState, Watched, changed_anywhere
from .receivers import (
    Generators,
    ask_receivers,
    check_documents,
    receivers_of,
    restore_buffers,
    restore_documents,
)
from .receivers import document_reaches_others as reaches_others
from .resume_report import ResumeReport
from .stored import StoredCheckpoint, compare_referred, read_checkpoint, referred_by
from .take import software_versions

__all__ = ["Filled", "Saved", "restore_into"]


@frozen
class Saved:
    """The run that saved a checkpoint, as the checkpoint records it. :class:`ResumeReport` has the same facts."""

    path: str
    step: int
    world_size: int
    run_id: str = ""
    mesh: str = "not recorded"
    digest: str = ""


@dataclass(slots=True)
class Filled:
    """The models and optimizers that a restore has filled so far, and what it read for them."""

    lives: dict[str, LiveModel]
    """The models by name, as they are now."""
    catalogs: Mapping[str, Catalog]
    """Where the tensors of each model are stored."""
    ranks: Ranks
    io: IOOptions
    started: float
    """By ``time.perf_counter()``."""
    referred: Mapping[str, Mapping[str, TensorEntry]] = field(default_factory=dict)
    """By model, what the checkpoint holds only digests of."""
    loads: list[LoadReport] = field(default_factory=list)
    """The first load of each model, then those after its own code or another object had changed it."""
    optimizers: list[RestoredOptimizer] = field(default_factory=list)

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank requested from storage, for models and optimizers."""
        return sum(load.bytes_read for load in self.loads) + sum(o.bytes_read for o in self.optimizers)

    def expect(self, optimizer_bytes: Callable[[], int]) -> None:
        """Tell listeners about how much this rank will read: its share of the models, and as much of their optimizers."""

        def share() -> int:
            tensors = [t.tensor for live in self.lives.values() for t in live.stored]
            own, whole = sum(local_tensor(t).numel() for t in tensors), sum(t.numel() for t in tensors)
            stored = sum(catalog.nbytes for catalog in self.catalogs.values()) + optimizer_bytes()
            return stored * own // max(1, whole)

        this_operation().guess(share)

    def fill_models(self, names: Iterable[str]) -> None:
        """Fill models from their catalogs, and compare digests where they are recorded. Collective.

        What a checkpoint only refers to is compared first, and must be there: raises :class:`StateError`.
        """
        names = list(names)
        for name in names:
            if referred := self.referred.get(name):
                path = self.catalogs[name].root
                compare_referred(referred, self.lives[name], path, self.ranks)
        for name in names:
            live, options = self.lives[name].without(self.referred.get(name, ())), FillOptions(io=self.io)
            filled = fill(partial(Filling, live, self.catalogs[name], Rules(), options), self.ranks)
            self.loads.append(filled.report)
            self.lives[name] = self.lives[name].refreshed()


@gc_paused()
def restore_into(state: TrainState, path: str, ranks: Ranks, io: IOOptions) -> ResumeReport:
    """Restore, and count the requests to stores. Collective."""
    with counting() as asked:
        report = _restore_into(state, path, ranks, io)
    return replace(report, requests=asked.total)


def _restore_into(state: TrainState, path: str, ranks: Ranks, io: IOOptions) -> ResumeReport:
    """The pipeline of ``restore`` and ``Checkpointer.resume``."""
    started = time.perf_counter()
    seen = manifest_seen_by_first(path, ranks)
    with ranks.agree("read manifest"):
        lives = _describe_models(state)
        manifest = seen.manifest()
        _check_models(state, manifest, path)
        catalogs = {name: catalog_of_checkpoint(path, name, manifest=manifest) for name in lives}
        stored = read_checkpoint(path, manifest, ranks)
        receivers, generators = receivers_of(state, lives, stored), Generators(state, stored, ranks.rank)
        check_documents([*receivers, generators], stored.documents)
        given = given_settings_of(state)
        own = OwnState(stored.documents, manifest, stored.places)
        referred = {name: referred_by(manifest, name, live) for name, live in lives.items()}
        filled = Filled(lives, catalogs, ranks, io, started, referred)
        filled.expect(lambda: _optimizer_bytes(state, manifest))
        _make_room(lives, manifest)  # the first that changes anything
    filled.fill_models(lives)
    filled.fill_models(own.give_to_models(lives, ranks))
    with ranks.agree("match names"):
        stored = stored.under_names_of(lives)
        for optimizer in state.optimizers.values():  # before any is given its own: two may share parameters
            clear_gradients(optimizer)
    with phase("optimizer"):
        for name, optimizer in state.optimizers.items():
            part = trained_by(name, optimizer, lives)
            filled.optimizers.append(restore_optimizer(part, stored, ranks, io))
    with ranks.agree("give optimizers their own state"):
        own.give_to_optimizers(state.given_optimizers, state.optimizers)
    with ranks.agree("restore documents"):
        restore_buffers(receivers, stored.documents)
        watched = Watched(state, lives) if reaches_others(receivers, stored.documents) else None
        taken, skipped = restore_documents(receivers, state, stored.documents, stored.manifest)
        ruined = watched.put_back(lives) if watched is not None else ()
    filled.fill_models(changed_anywhere(watched, lives, ranks))
    with ranks.agree("compare the taken state"):
        restore_buffers(receivers, stored.documents)
        skipped += ask_receivers(receivers)
        own.ask()
        caveats = data_caveats(state.dataloader)
        found = [*_differences(state, stored, filled), *ruined, *own.differences]
        found += _changed_settings(state, stored, filled)
        found += [*stored.places.differences, *generators.plan.differences]
        generators.restore(stored.documents.get(generators.name))
    saved = Saved(
        path=path,
        step=manifest.step,
        run_id=manifest.run_id,
        world_size=manifest.world_size,
        mesh=mesh_text(manifest.geometries),
        digest=_digest_of_all(state, stored.manifest),
    )
    return ResumeReport.of(
        saved,
        filled,
        differences=tuple(found),
        documents=taken + own.restored,
        skipped=skipped,
        caveats=caveats,
        rng=generators.plan.rule,
        functions=tuple(functions_left_out(state.scheduler)),
        not_given=state.not_given,
        replaced=replaced_settings(given, given_settings_of(state)),
    )


def _optimizer_bytes(state: TrainState, manifest: Manifest) -> int:
    """Stored bytes of the states of this run's optimizers that are spread over ranks."""
    return sum(
        itemsize(one.dtype) * math.prod(entry.shape_of(one))
        for model in state.models
        for entry in manifest.models[model].values()
        for optimizer in state.optimizers
        for one in entry.states.get(optimizer, {}).values()
        if one.packed is None
    )


def _describe_models(state: TrainState) -> dict[str, LiveModel]:
    """The models of a state by name. Refuses those of FSDP1, and gradients that FSDP2 has yet to reduce."""
    state.watch()
    lives = {name: describe(model) for name, model in state.models.items()}
    for live in lives.values():
        refuse_fsdp1(live.fsdp1_problem)
        for optimizer in state.optimizers.values():
            refuse_unreduced(optimizer, live)
    return lives


def _make_room(lives: dict[str, LiveModel], manifest: Manifest) -> None:
    """Resize tensors to their stored shapes in models whose own ``load_state_dict`` does so."""
    for name, live in lives.items():
        if make_room(live, {n: t.shape for n, t in manifest.models[name].items()}):
            lives[name] = describe(live.root)


def _digest_of_all(state: TrainState, manifest: Manifest) -> str:
    """Digest of the manifest's digests, which were compared with the live tensors."""
    lines, optimizers = [], sorted(state.optimizers)
    for model in sorted(state.models):
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


def _check_models(state: TrainState, manifest: Manifest, path: str) -> None:
    """Refuse a checkpoint that lacks a model of this run; it may hold more."""
    lost = [name for name in state.models if name not in manifest.models]
    if lost:
        raise StateError(
            f"{path}: holds models {sorted(manifest.models)}, but this run also has {', '.join(lost)}"
        )


def _changed_settings(state: TrainState, stored: StoredCheckpoint, filled: Filled) -> list[str]:
    """Lines for settings that differ from the saved run's. An older checkpoint, or another number of ranks, has none to compare."""
    was, found = stored.documents, []
    if "settings" in was:
        found += changed_settings(was["settings"], settings_of(state, filled.lives))
    if "data_settings" in was and state.dataloader is not None:
        found += changed_settings(was["data_settings"], data_settings_of(state))
    return found


def _differences(state: TrainState, stored: StoredCheckpoint, filled: Filled) -> list[str]:
    """Reasons why the resume is not exact. The same on every rank, except for differences between machines."""
    found, manifest = [], stored.manifest
    ranks, kind = filled.ranks.world_size, manifest.software.get(CONVERTED)
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
    for name, live in filled.lives.items():
        entries = manifest.models[name]
        for t in live.stored:
            if code_of(t.tensor.dtype) != entries[t.name].dtype:
                found.append(f"{t.name}: {entries[t.name].dtype} when saved, {code_of(t.tensor.dtype)} now")
        spread = live.geometries.items()
        moved |= any(not manifest.geometries[entries[n].geometry].is_same_place(g) for n, g in spread)
    if kind is None and manifest.world_size == ranks and moved:
        found.append("mesh or placements: tensors are now sharded differently")
    return found + [line for o in filled.optimizers for line in o.differences]
