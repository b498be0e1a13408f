"""Putting a checkpoint back into live objects: plan → prove → read → verify → documents → RNG last."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import xxhash

from .catalog.checkpoint import catalog_of_checkpoint
from .catalog.manifest import Manifest, TensorEntry
from .dist import Ranks
from .dtypes import code_of
from .errors import IntegrityError, SourceError, StateError
from .foreign import refuse_other_kind
from .garbage import no_collections
from .layout.model import geometries_of, reshard
from .layout.placements import mesh_text
from .loading import fill
from .names import NamedTensor, named_tensors
from .plan import IOOptions
from .proof.report import LoadReport
from .recipe.match import Rules
from .restoring_optimizer import TrainedBy, restore_optimizer, same_place
from .restoring_own import OwnState
from .state.beyond_model import make_room, refuse_fsdp1
from .state.data import data_caveats, make_iterator
from .state.gradients import UNSEEN_GRADIENTS, clear_gradients, refuse_unreduced
from .state.rng import derive_rng, restore_rng
from .state.snapshot import classes_of, modules_with_state, trained_model
from .state.train_state import TrainState, document_of
from .state.typed_json import decode
from .store.collect import software_versions
from .store.visible import first_view

__all__ = ["ResumeReport", "restore_into"]


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What a resume restored, from where, and what by rule it did not."""

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
    """Of the names and digests of all tensors restored: equal for equal state, whatever the mesh."""
    exact: bool
    """Whether the next steps are promised to be bitwise those of a run that never stopped."""
    differences: tuple[str, ...]
    """Why not, where they are not: other world size, versions, threads, devices, dtypes; what a model or an optimizer
    would save by itself that was not stored, or that its own ``load_state_dict`` did not take back."""
    tensors: int
    """Model tensors restored; digests compared of all but those whose dtype differs (see ``differences``)."""
    optimizer_tensors: int
    """Optimizer tensors restored; every one's digest was compared."""
    documents: tuple[str, ...]
    """What else was restored."""
    not_restored: tuple[str, ...]
    """What the checkpoint holds and this run did not take, with the rule."""
    caveats: tuple[str, ...]
    """What the data loader can't promise to repeat exactly."""
    rng: str
    """The rule by which random generators were set."""
    bytes_read: int
    seconds: float
    damaged: Mapping[int, str]
    """Newer steps that were skipped, with their damage."""
    superseded: tuple[int, ...]
    """Newer steps that were set aside, because the run goes on from this one."""
    gradients: int = 0
    """Gradients restored, of the ``optimizer_tensors``: the save was in the middle of an accumulation."""

    def with_history(self, damaged: Mapping[int, str], superseded: tuple[int, ...]) -> ResumeReport:
        """The report with what the search for a valid step found."""
        return replace(self, damaged=dict(damaged), superseded=superseded)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


@no_collections()
def restore_into(state: TrainState, path: str, ranks: Ranks, io: IOOptions) -> ResumeReport:
    """The pipeline behind ``restore`` and ``Checkpointer.resume``. Collective."""
    started = time.perf_counter()
    seen = first_view(path, ranks)
    with ranks.agree("read manifest"):
        for model in state.models.values():
            refuse_fsdp1(model)
            reshard(model)
            for optimizer in state.optimizers.values():
                refuse_unreduced(optimizer, model)
        manifest = seen.manifest()
        _check_models(state, manifest, path)
        for name, model in state.models.items():
            make_room(model, {n: t.shape for n, t in manifest.models[name].items()})
        catalogs = {name: catalog_of_checkpoint(path, name, manifest=manifest) for name in state.models}
        own_files = ranks.rank if manifest.world_size == ranks.world_size else None
        documents = _read_documents(path, manifest, own_files)
        _check_wanted_documents(state, documents, manifest, path)
        own = OwnState(documents)

    def filled_model(name: str) -> LoadReport:
        return fill(state.models[name], catalogs[name], Rules(), io=io, ranks=ranks, verify="digest")

    loaded = [filled_model(name) for name in state.models]
    for name in own.give_to_models(state.models, ranks):
        loaded.append(filled_model(name))
    with ranks.agree("match names"):
        named = {name: named_tensors(model) for name, model in state.models.items()}
        stored = manifest
        for name in named:
            manifest, documents = _under_live_names(manifest, documents, name, named[name])
        for optimizer in state.optimizers.values():  # before any is given its own: two may share parameters
            clear_gradients(optimizer)
    filled = []
    for name, optimizer in state.optimizers.items():
        trained = _same_model(name, trained_model(optimizer, named), documents, ranks)
        part = TrainedBy(name, optimizer, trained, state.models[trained], named[trained])
        filled.append(restore_optimizer(part, manifest, stored, path, documents, ranks, io))
    with ranks.agree("give optimizers their own state"):
        own.give_to_optimizers(state.given_optimizers, state.optimizers)
    with ranks.agree("restore documents"):
        restored, left = _apply_documents(state, documents, named, manifest, own.documents)
        caveats = data_caveats(state.dataloader)
        differences = _differences(state, manifest, ranks, named)
        differences += tuple(line for o in filled for line in o.differences) + own.differences
        rng = _restore_rng(documents, manifest, ranks)
    return ResumeReport(
        path=path,
        step=manifest.step,
        run_id=manifest.run_id,
        saved_world_size=manifest.world_size,
        world_size=ranks.world_size,
        saved_mesh=mesh_text(manifest.geometries),
        mesh=mesh_text(g for n, t in named.items() for g in geometries_of(state.models[n], t).values()),
        digest=_digest_of_all(state, manifest),
        exact=not (differences or left or caveats),
        differences=differences,
        tensors=sum(report.tensors for report in loaded[: len(state.models)]),
        optimizer_tensors=sum(o.tensors for o in filled),
        documents=restored + own.restored,
        not_restored=left,
        caveats=caveats,
        rng=rng,
        bytes_read=sum(report.bytes_read for report in loaded) + sum(o.bytes_read for o in filled),
        seconds=time.perf_counter() - started,
        damaged={},
        superseded=(),
        gradients=sum(o.gradients for o in filled),
    )


def _digest_of_all(state: TrainState, manifest: Manifest) -> str:
    """Of what the manifest records, which was compared with what is here."""
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


def _same_model(optimizer: str, trained: str, documents: Mapping[str, Any], ranks: Ranks) -> str:
    """The model that an optimizer trains, as it was. Raises :class:`StateError` if it was another one."""
    with ranks.agree("match optimizers"):
        stored = documents[document_of("optimizer", optimizer)].get("model", trained)
        if stored != trained:
            raise StateError(
                f"optimizer {optimizer!r} trained the model {stored!r} when it was saved, and {trained!r} now; give each "
                f"optimizer the name that it had"
            )
    return trained


def _check_models(state: TrainState, manifest: Manifest, path: str) -> None:
    """A checkpoint may hold more models than this run asks for, not fewer."""
    lost = [name for name in state.models if name not in manifest.models]
    if lost:
        raise StateError(
            f"{path}: holds models {sorted(manifest.models)}, this run has {', '.join(lost)}, too"
        )


def _read_documents(path: str, manifest: Manifest, rank: int | None) -> dict[str, Any]:
    """The documents shared by all ranks, and this rank's own if the world size is the saved one."""
    documents = _read_document(path, manifest, "state")
    if rank is not None:
        documents |= _read_document(path, manifest, f"rank/{rank:05d}")
    return documents


def _read_document(path: str, manifest: Manifest, stem: str) -> dict[str, Any]:
    from safetensors.torch import load

    text = read_checked(path, manifest, f"{stem}.json")
    tensors: dict[str, torch.Tensor] = {}
    if f"{stem}.safetensors" in manifest.files:
        tensors = load(read_checked(path, manifest, f"{stem}.safetensors"))
    documents = {}
    for name, document in json.loads(text).items():
        own = {k.removeprefix(f"{name}/"): t for k, t in tensors.items() if k.startswith(f"{name}/")}
        documents[name] = decode(document, own)
    return documents


def read_checked(path: str, manifest: Manifest, name: str) -> bytes:
    """A small file of a checkpoint, compared with its checksum. Raises :class:`IntegrityError`."""
    entry = manifest.files.get(name)
    file = os.path.join(path, name)
    if entry is None:
        raise IntegrityError("is not listed in the manifest", path=file)
    try:
        with open(file, "rb") as stream:
            content = stream.read(entry.nbytes + 1)
    except FileNotFoundError as error:
        raise IntegrityError("lost: no such file", path=file) from error
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror}", path=file) from error
    if len(content) != entry.nbytes or xxhash.xxh3_64_hexdigest(content) != entry.header_xxh3:
        raise IntegrityError("content differs from its checksum: damaged", path=file)
    return content


def _check_wanted_documents(
    state: TrainState, documents: dict[str, Any], manifest: Manifest, path: str
) -> None:
    """Refuse, before anything is changed, to go on without state that the caller asks for."""
    wanted = [n for n in ("scheduler", "scaler", "dataloader") if getattr(state, n) is not None]
    wanted += [f"extra.{n}" for n in state.extra if f"extra.{n}" in manifest.local_documents]
    for name in state.optimizers:
        wanted.append(document_of("optimizer", name))
        wanted += [n for n in (document_of("optimizer", name, "opaque"),) if n in manifest.local_documents]
    for name, model in state.models.items():
        if any(True for _ in modules_with_state(model)):
            wanted.append(document_of("model", name, "modules"))
    for name in wanted:
        if name in documents:
            several: Any = getattr(state, name) if name in ("scheduler", "scaler", "dataloader") else None
            lost = sorted(several.keys() - documents[name].keys()) if _is_several(several) else []
            if lost:
                raise StateError(f"{path}: holds no {name} of {lost}; leave it out of the state")
            continue
        if name in manifest.local_documents:
            raise StateError(
                f"{path}: {name} was stored per rank by {manifest.world_size} ranks, and this run has another number: its "
                f"state can't be carried over. Use one whose state is equal on all ranks, or leave it out of the state"
            )
        raise StateError(f"{path}: holds no {name}; leave it out of the state, or give the step that has it")
    _check_schedulers(
        documents.get("classes", {}).get("scheduler", {}), classes_of(state).get("scheduler", {})
    )
    for name, optimizer in state.optimizers.items():
        saved = documents[document_of("optimizer", name)]["class"]
        now = type(optimizer).__qualname__
        if saved is None:  # a converted checkpoint, whose source did not say
            refuse_other_kind(optimizer, documents[document_of("optimizer", name)]["groups"])
        elif saved != now:
            raise StateError(f"{path}: holds state of {saved}, the optimizer is {now}; use the same one")


def _check_schedulers(saved: Any, now: Any, name: str = "scheduler") -> None:
    """A scheduler takes the state of any other without a word."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in saved.keys() & now.keys():
            _check_schedulers(saved[key], now[key], f"{name}.{key}")
    elif saved and now and saved != now:
        raise StateError(
            f"{name}: the checkpoint holds the state of a {saved}, this run has a {now}; use the same one, or leave it "
            f"out of the state"
        )


def _under_live_names(
    manifest: Manifest, documents: dict[str, Any], model: str, named: tuple[NamedTensor, ...]
) -> tuple[Manifest, dict[str, Any]]:
    """The checkpoint as seen by this model: a tied tensor may come first under another of its names."""
    live = {alias: t.name for t in named for alias in t.names}
    entries: dict[str, TensorEntry] = {}
    for n, t in manifest.models[model].items():
        # Of two stored names of one tensor (a converted checkpoint may have both) the trained one counts.
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


def _apply_documents(
    state: TrainState,
    documents: dict[str, Any],
    named: Mapping[str, tuple[NamedTensor, ...]],
    manifest: Manifest,
    own: frozenset[str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give scheduler, scaler, data position, extras, modules and rank-local buffers their state back.

    Returns what was restored, and what was not, with the rule.
    """
    optimizers = {document_of("optimizer", n): n for n in manifest.packed}
    applied = {
        "step",
        "rng",
        "classes",
        *own,
        *optimizers,
        *(document_of("optimizer", n, "opaque") for n in manifest.packed),
    }
    buffers = {document_of("model", n, "buffers"): n for n in manifest.models}
    modules = {document_of("model", n, "modules"): n for n in manifest.models}
    restored: list[str] = []
    left = [f"{n}: not in the checkpoint" for n in map("extra.{}".format, state.extra) if n not in documents]
    for name in manifest.local_documents:
        if name in buffers and name not in documents:
            left.append(f"{name} that differed between ranks: every rank has those of one rank now")
        elif name not in documents and name not in applied:
            left.append(f"{name}: stored per rank, and this run has another number of ranks")
    given = state.optimizers
    left += [
        f"{d}: not given to this run" for d, n in optimizers.items() if d in documents and n not in given
    ]
    left += [f"model {n}: not given to this run" for n in manifest.models if n not in state.models]
    left += [
        f"{d}: not stored: {UNSEEN_GRADIENTS}"
        for d in optimizers
        if d in documents and documents[d].get("unseen_gradients")
    ]
    for name, value in documents.items():
        if name in applied or {**buffers, **modules}.get(name, next(iter(state.models))) not in state.models:
            continue
        if name in modules:
            for path, module in modules_with_state(state.models[modules[name]]):
                module.set_extra_state(value[path])
        elif name in buffers:
            by_name = {t.name: t.tensor for t in named[buffers[name]]}
            for buffer, content in value.items():
                by_name[buffer].detach().copy_(content)
        elif name.startswith("extra."):
            key = name.removeprefix("extra.")
            target: Any = state.extra.get(key)
            if hasattr(target, "load_state_dict"):
                _load_state(target, value, name)
            elif key in state.extra:
                state.extra[key] = value
            else:
                left.append(f"{name}: not among this run's extras")
                continue
        elif (target := getattr(state, name)) is None:
            left.append(f"{name}: not given to this run")
            continue
        else:
            left += _give(target, value, name)
        restored.append(name)
    return tuple(restored), tuple(left)


def _give(target: Any, value: Any, name: str) -> Iterator[str]:
    """State to an object, or to several by name. Yields what is stored and was not asked for."""
    if not _is_several(target):
        _load_state(target, value, name)
        if name == "scaler" and value and not target.state_dict():
            yield "scaler: it is disabled in this run"
        if name.partition(".")[0] == "dataloader":
            make_iterator(target)
        return
    for key, one in value.items():
        if key in target:
            yield from _give(target[key], one, f"{name}.{key}")
        else:
            yield f"{name}.{key}: not given to this run"


def _load_state(target: Any, value: Any, name: str) -> None:
    """Raises :class:`StateError` naming the object, whatever it raises itself."""
    try:
        target.load_state_dict(value)
    except StateError:
        raise
    except Exception as error:
        raise StateError(
            f"{name}: {type(target).__qualname__}.load_state_dict does not take what was saved ({type(error).__name__}: "
            f"{error}); use the same object as the saved run, or leave it out of the state"
        ) from error


def _is_several(target: Any) -> bool:
    return isinstance(target, Mapping) and not hasattr(target, "load_state_dict")


def _restore_rng(documents: dict[str, Any], manifest: Manifest, ranks: Ranks) -> str:
    if "rng" in documents:
        restore_rng(documents["rng"])
        return "restored per rank"
    return derive_rng(seed=manifest.seed, step=manifest.step, rank=ranks.rank)


def _differences(
    state: TrainState, manifest: Manifest, ranks: Ranks, named: Mapping[str, tuple[NamedTensor, ...]]
) -> tuple[str, ...]:
    """What withdraws the promise of an exact resume. The same on every rank but for per-rank machines."""
    found = []
    if manifest.world_size != ranks.world_size:
        found.append(f"world size: saved {manifest.world_size}, now {ranks.world_size}")
    now = software_versions(state)
    found += [f"{k}: saved {v}, now {now.get(k)}" for k, v in manifest.software.items() if now.get(k) != v]
    moved = False
    for name, model in state.models.items():
        entries = manifest.models[name]
        persistent = [t for t in named[name] if t.persistent]
        for t in persistent:
            if code_of(t.tensor.dtype) != entries[t.name].dtype:
                found.append(f"{t.name}: saved {entries[t.name].dtype}, now {code_of(t.tensor.dtype)}")
        live = geometries_of(model, persistent)
        moved |= any(not same_place(manifest.geometries[entries[n].geometry], g) for n, g in live.items())
    if manifest.world_size == ranks.world_size and moved:
        found.append("mesh or placements: tensors are spread over ranks otherwise than they were")
    return tuple(found)
