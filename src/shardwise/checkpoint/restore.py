"""Restores a checkpoint into live objects: plan → prove → read → verify → documents → RNG last."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import xxhash

from ..catalog.checkpoint import catalog_of_checkpoint
from ..dtypes import code_of
from ..errors import StateError
from ..format.manifest import Manifest, TensorEntry
from ..gc_paused import gc_paused
from ..layout.live import LiveModel, describe
from ..layout.placements import mesh_text
from ..loading.load import fill
from ..loading.report import LoadReport
from ..names import NamedTensor
from ..planning import IOOptions
from ..ranks.ranks import Ranks
from ..recipe.match import Rules
from ..rng import devices_of, plan_rng
from ..state.beyond_model import make_room, refuse_fsdp1
from ..state.data import data_caveats
from ..state.documents import check_form
from ..state.gradients import clear_gradients, refuse_unreduced
from ..state.places import Places
from ..state.schedulers import functions_left_out
from ..state.train_state import TrainState, document_of
from .collect import software_versions
from .documents import ask_receivers, check_documents, receivers_of, restore_buffers, restore_documents
from .optimizer import TrainedBy, check_optimizer, restore_optimizer, same_place
from .own import OwnState
from .shared_fs import first_view
from .snapshot import trained_model
from .stored_documents import decode_documents, read_documents
from .watch import Watched, changed_anywhere

__all__ = ["ResumeReport", "restore_into"]


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The outcome of a restore: the step, the restored state, and the state that was skipped by rule."""

    path: str
    step: int
    run_id: str
    saved_world_size: int
    world_size: int
    saved_mesh: str
    """Names and sizes of the axes that tensors were spread over: ``dp_shard 2 × tp 2``."""
    mesh: str
    """The same of this run."""
    digest: str
    """Digest of the names and digests of all restored tensors: equal for equal state under any mesh."""
    exact: bool
    """Whether the next steps are promised to be bitwise those of a run that never stopped."""
    differences: tuple[str, ...]
    """Reasons why it is not exact: another world size, other versions, threads, devices, dtypes; own state of a model
    or an optimizer that was not stored, or that its ``load_state_dict`` did not take back."""
    tensors: int
    """Number of restored model tensors. Digests were compared unless the dtype differs (see ``differences``)."""
    optimizer_tensors: int
    """Number of restored optimizer tensors. All their digests were compared."""
    documents: tuple[str, ...]
    """Names of all other restored state."""
    skipped: tuple[str, ...]
    """State in the checkpoint that this run did not take, with the rule."""
    caveats: tuple[str, ...]
    """Why the data loader may not repeat exactly."""
    rng: str
    """The rule by which random generators were set."""
    bytes_read: int
    seconds: float
    damaged: Mapping[int, str]
    """Newer steps that were skipped, with their damage."""
    superseded: tuple[int, ...]
    """Newer steps that were set aside, because the run goes on from this one."""
    functions: tuple[str, ...] = ()
    """Functions of schedulers. No checkpoint holds them: the program gave its own. ``exact`` assumes that they are
    those of the saved run, like all other code."""
    gradients: int = 0
    """Number of restored gradients, among ``optimizer_tensors``: the save was in the middle of an accumulation."""

    def with_history(self, damaged: Mapping[int, str], superseded: tuple[int, ...]) -> ResumeReport:
        """The report, with the damaged and superseded steps of the search."""
        return replace(self, damaged=dict(damaged), superseded=superseded)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


@gc_paused()
def restore_into(state: TrainState, path: str, ranks: Ranks, io: IOOptions) -> ResumeReport:
    """The pipeline of ``restore`` and ``Checkpointer.resume``. Collective."""
    started = time.perf_counter()
    seen = first_view(path, ranks)
    with ranks.agree("read manifest"):
        state.watch()
        lives = {name: describe(model) for name, model in state.models.items()}
        for live in lives.values():
            refuse_fsdp1(live.fsdp1_problem)
            for optimizer in state.optimizers.values():
                refuse_unreduced(optimizer, live)
        manifest = seen.manifest()
        _check_models(state, manifest, path)
        catalogs = {name: catalog_of_checkpoint(path, name, manifest=manifest) for name in state.models}
        own_files = ranks.rank if manifest.world_size == ranks.world_size else None
        places = Places()
        documents = _read_documents(path, manifest, own_files, places)
        receivers = receivers_of(state, lives, path, places)
        check_documents(receivers, documents, manifest, path)
        _check_optimizers(state, lives, manifest, documents)
        own = OwnState(documents, manifest, places)
        rng = plan_rng(
            documents.get("rng"),
            seed=manifest.seed,
            step=manifest.step,
            rank=ranks.rank,
            devices=devices_of(state.models.values()),
        )
        for name, live in lives.items():  # the first that changes anything
            if make_room(live, {n: t.shape for n, t in manifest.models[name].items()}):
                lives[name] = describe(live.root)

    def filled_model(name: str) -> LoadReport:
        report = fill(lives[name], catalogs[name], Rules(), io=io, ranks=ranks, verify="digest")
        lives[name] = lives[name].refreshed()
        return report

    loaded = [filled_model(name) for name in lives]
    for name in own.give_to_models(lives, ranks):
        loaded.append(filled_model(name))
    with ranks.agree("match names"):
        stored = manifest
        for name, live in lives.items():
            manifest, documents = _under_live_names(manifest, documents, name, live.tensors)
        for optimizer in state.optimizers.values():  # before any is given its own: two may share parameters
            clear_gradients(optimizer)
    filled = []
    for name, optimizer in state.optimizers.items():
        trained = trained_model(optimizer, lives)
        part = TrainedBy(name, optimizer, trained, lives[trained])
        filled.append(restore_optimizer(part, manifest, stored, path, documents, places, ranks, io))
    with ranks.agree("give optimizers their own state"):
        own.give_to_optimizers(state.given_optimizers, state.optimizers)
    with ranks.agree("restore documents"):
        restore_buffers(receivers, documents)
        is_watched = any(r.reaches_others() for r in receivers if r.name in documents)
        watched = Watched(state, lives) if is_watched else None
        restored, left = restore_documents(receivers, state, documents, manifest)
        if watched is not None:  # the program's own code ran
            lives.update({name: describe(live.root) for name, live in lives.items()})
        ruined = tuple(watched.put_back(lives)) if watched is not None else ()
    for name in changed_anywhere(watched, lives, ranks):
        loaded.append(filled_model(name))
    with ranks.agree("compare the taken state"):
        restore_buffers(receivers, documents)
        left += ask_receivers(receivers)
        own.ask()
        caveats = data_caveats(state.dataloader)
        differences = _differences(state, lives, manifest, documents, ranks)
        differences += tuple(line for o in filled for line in o.differences)
        differences += ruined + own.differences + places.differences + rng.differences
        rng.apply()
    return ResumeReport(
        path=path,
        step=manifest.step,
        run_id=manifest.run_id,
        saved_world_size=manifest.world_size,
        world_size=ranks.world_size,
        saved_mesh=mesh_text(manifest.geometries),
        mesh=mesh_text(g for live in lives.values() for g in live.geometries.values()),
        digest=_digest_of_all(state, manifest),
        exact=not (differences or left or caveats),
        differences=differences,
        tensors=sum(report.tensors for report in loaded[: len(state.models)]),
        optimizer_tensors=sum(o.tensors for o in filled),
        documents=restored + own.restored,
        skipped=left,
        caveats=caveats,
        rng=rng.rule,
        bytes_read=sum(report.bytes_read for report in loaded) + sum(o.bytes_read for o in filled),
        seconds=time.perf_counter() - started,
        damaged={},
        superseded=(),
        functions=tuple(functions_left_out(state.scheduler)),
        gradients=sum(o.gradients for o in filled),
    )


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


def _check_optimizers(
    state: TrainState, lives: Mapping[str, LiveModel], manifest: Manifest, documents: dict[str, Any]
) -> None:
    """Refuse, before anything is changed, what the optimizers can't take."""
    for name, live in lives.items():
        manifest, documents = _under_live_names(manifest, documents, name, live.tensors)
    for name, optimizer in state.optimizers.items():
        trained = trained_model(optimizer, lives)
        stored = documents[document_of("optimizer", name)].get("model", trained)
        if stored != trained:
            raise StateError(
                f"optimizer {name!r} trained the model {stored!r} when it was saved, and {trained!r} now; give each "
                f"optimizer the name that it had"
            )
        if {t.name for t in lives[trained].stored} == manifest.models[trained].keys():
            part = TrainedBy(name, optimizer, trained, lives[trained])
            check_optimizer(part, manifest, documents)  # of another model, the load says what does not fit


def _check_models(state: TrainState, manifest: Manifest, path: str) -> None:
    """Refuse a checkpoint that lacks a model of this run; it may hold more."""
    lost = [name for name in state.models if name not in manifest.models]
    if lost:
        raise StateError(
            f"{path}: holds models {sorted(manifest.models)}, this run has {', '.join(lost)}, too"
        )


def _read_documents(path: str, manifest: Manifest, rank: int | None, places: Places) -> dict[str, Any]:
    """The documents shared by all ranks and, at the saved world size, this rank's own; their form is checked."""
    stored = read_documents(path, manifest, "state")
    if rank is not None:
        stored |= read_documents(path, manifest, f"rank/{rank:05d}")
    documents = decode_documents(stored, path, places)
    check_form(documents, manifest, path)
    return documents


def _under_live_names(
    manifest: Manifest, documents: dict[str, Any], model: str, named: tuple[NamedTensor, ...]
) -> tuple[Manifest, dict[str, Any]]:
    """Rename the checkpoint's tensors to this model's names: a tied tensor may have another first name."""
    live = {alias: t.name for t in named for alias in t.names}
    entries: dict[str, TensorEntry] = {}
    for n, t in manifest.models[model].items():
        # If a converted checkpoint stores one tensor under two names, the trained one counts.
        if live.get(n, n) not in entries or t.states:
            entries[live.get(n, n)] = t
    if list(entries) == list(manifest.models[model]):
        return manifest, documents
    found = dict(documents)
    for optimizer in manifest.packed:
        name, opaque = document_of("optimizer", optimizer), document_of("optimizer", optimizer, "opaque")
        if name not in found or found[name].get("model", "model") != model:
            continue
        groups = [{**g, "names": [live.get(n, n) for n in g["names"]]} for g in found[name]["groups"]]
        values = {live.get(n, n): v for n, v in found[name]["values"].items()}
        found[name] = {**found[name], "groups": groups, "values": values}
        if opaque in found:
            found[opaque] = {live.get(n, n): v for n, v in found[opaque].items()}
    return replace(manifest, models={**manifest.models, model: entries}), found


def _differences(
    state: TrainState,
    lives: Mapping[str, LiveModel],
    manifest: Manifest,
    documents: Mapping[str, Any],
    ranks: Ranks,
) -> tuple[str, ...]:
    """Reasons why the resume is not exact. The same on every rank, except for differences between machines."""
    found = []
    if manifest.world_size != ranks.world_size:
        found.append(f"world size: saved {manifest.world_size}, now {ranks.world_size}")
    now = software_versions(state)
    found += [f"{k}: saved {v}, now {now.get(k)}" for k, v in manifest.software.items() if now.get(k) != v]
    if "scheduler" in documents and "classes" not in documents:
        found.append("scheduler: the checkpoint does not say of which class it was")
    moved = False
    for name, live in lives.items():
        entries = manifest.models[name]
        for t in live.stored:
            if code_of(t.tensor.dtype) != entries[t.name].dtype:
                found.append(f"{t.name}: saved {entries[t.name].dtype}, now {code_of(t.tensor.dtype)}")
        spread = live.geometries.items()
        moved |= any(not same_place(manifest.geometries[entries[n].geometry], g) for n, g in spread)
    if manifest.world_size == ranks.world_size and moved:
        found.append("mesh or placements: tensors are spread over ranks otherwise than they were")
    return tuple(found)
