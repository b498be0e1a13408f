"""Putting a checkpoint back into live objects: plan → prove → read → verify → documents → RNG last."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import xxhash

from .catalog import Catalog
from .catalog.checkpoint import catalog_of_checkpoint, catalog_of_slices, optimizer_tensors, packed_name
from .catalog.manifest import Manifest, TensorEntry, read_manifest
from .dist import Ranks
from .dtypes import code_of
from .errors import IntegrityError, SourceError, StateError
from .layout.model import geometries_of, local_tensor, reshard, wanted_of
from .layout.placements import Geometry
from .layout.wanted import Layout, Wanted, whole_tensor
from .loading import fill
from .names import NamedTensor, named_tensors
from .place.copy import Destination, Staging, execute
from .plan import IOOptions, Plan, build_plan
from .proof.digest import tensor_digest
from .proof.model import live_digests
from .read import FileReader
from .recipe.match import Rules, match_rules, renamed
from .state.optimizer import fill_groups, parameter_names, place_scalars, place_states, place_values
from .state.rng import derive_rng, restore_rng
from .state.snapshot import modules_with_state
from .state.train_state import TrainState
from .state.typed_json import decode
from .store.collect import software_versions

__all__ = ["ResumeReport", "restore_into"]


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What a resume restored, from where, and what by rule it did not."""

    path: str
    step: int
    run_id: str
    saved_world_size: int
    world_size: int
    exact: bool
    """Whether the next steps are promised to be bitwise those of a run that never stopped."""
    differences: tuple[str, ...]
    """Why not, where they are not: other world size, versions, threads, devices, dtypes."""
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

    def with_history(self, damaged: Mapping[int, str], superseded: tuple[int, ...]) -> ResumeReport:
        """The report with what the search for a valid step found."""
        return replace(self, damaged=dict(damaged), superseded=superseded)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def restore_into(state: TrainState, path: str, ranks: Ranks, io: IOOptions) -> ResumeReport:
    """The pipeline behind ``restore`` and ``Checkpointer.resume``. Collective."""
    started = time.perf_counter()
    with ranks.agree("read manifest"):
        reshard(state.model)
        manifest = read_manifest(path)
        catalog = catalog_of_checkpoint(path)
        own_files = ranks.rank if manifest.world_size == ranks.world_size else None
        documents = _read_documents(path, manifest, own_files)
        _check_wanted_documents(state, documents, manifest)
    loaded = fill(state.model, catalog, Rules(), io=io, ranks=ranks, verify="digest")
    with ranks.agree("match names"):
        named = named_tensors(state.model)
        stored = manifest
        manifest, documents = _under_live_names(stored, documents, named)
    bytes_read, states = loaded.bytes_read, 0
    if state.optimizer is not None:
        more, states = _restore_optimizer(state, manifest, stored, path, documents, named, ranks, io)
        bytes_read += more
    with ranks.agree("restore documents"):
        restored, left = _apply_documents(state, documents, named, manifest)
        caveats = tuple(getattr(state.dataloader, "caveats", ()))
        differences = _differences(state, manifest, ranks, named)
        rng = _restore_rng(documents, manifest, ranks)
    return ResumeReport(
        path=path,
        step=manifest.step,
        run_id=manifest.run_id,
        saved_world_size=manifest.world_size,
        world_size=ranks.world_size,
        exact=not (differences or left or caveats),
        differences=differences,
        tensors=loaded.tensors,
        optimizer_tensors=states,
        documents=restored,
        not_restored=left,
        caveats=caveats,
        rng=rng,
        bytes_read=bytes_read,
        seconds=time.perf_counter() - started,
        damaged={},
        superseded=(),
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


def _check_wanted_documents(state: TrainState, documents: dict[str, Any], manifest: Manifest) -> None:
    """Refuse, before anything is changed, to go on without state that the caller asks for."""
    wanted = [n for n in ("scheduler", "scaler", "dataloader") if getattr(state, n) is not None]
    wanted += [f"extra.{n}" for n in state.extra if f"extra.{n}" in manifest.local_documents]
    if state.optimizer is not None:
        wanted.append("optimizer")
        wanted += [n for n in ("optimizer.opaque",) if n in manifest.local_documents]
    if any(True for _ in modules_with_state(state.model)):
        wanted.append("modules")
    for name in wanted:
        if name in documents:
            continue
        if name in manifest.local_documents:
            raise StateError(
                f"{name} was stored per rank by {manifest.world_size} ranks, and this run has another number: its "
                f"state can't be carried over. Use one whose state is equal on all ranks, or leave it out of the state"
            )
        raise StateError(
            f"the checkpoint holds no {name}; leave it out of the state, or give the step that has it"
        )
    if state.optimizer is not None:
        saved, now = documents["optimizer"]["class"], type(state.optimizer).__qualname__
        if saved != now:
            raise StateError(
                f"the checkpoint holds state of {saved}, the optimizer is {now}; use the same one"
            )


def _under_live_names(
    manifest: Manifest, documents: dict[str, Any], named: tuple[NamedTensor, ...]
) -> tuple[Manifest, dict[str, Any]]:
    """The checkpoint as seen by this model: a tied tensor may come first under another of its names."""
    live = {alias: t.name for t in named for alias in t.names}
    entries = {live.get(n, n): t for n, t in manifest.models["model"].items()}
    if list(entries) == list(manifest.models["model"]):
        return manifest, documents
    found = dict(documents)
    if "optimizer" in found:
        groups = [{**g, "names": [live.get(n, n) for n in g["names"]]} for g in found["optimizer"]["groups"]]
        values = {live.get(n, n): v for n, v in found["optimizer"]["values"].items()}
        found["optimizer"] = {**found["optimizer"], "groups": groups, "values": values}
    if "optimizer.opaque" in found:
        found["optimizer.opaque"] = {live.get(n, n): v for n, v in found["optimizer.opaque"].items()}
    return replace(manifest, models={**manifest.models, "model": entries}), found


def _restore_optimizer(
    state: TrainState,
    manifest: Manifest,
    stored: Manifest,
    path: str,
    documents: dict[str, Any],
    named: tuple[NamedTensor, ...],
    ranks: Ranks,
    io: IOOptions,
) -> tuple[int, int]:
    """Fill the optimizer. Returns bytes read by this rank and the number of tensors filled.

    ``manifest`` has the model's names, ``stored`` those by which slice files are ordered.
    """
    assert state.optimizer is not None
    entries = manifest.models["model"]
    with ranks.agree("plan optimizer state"):
        names = parameter_names(state.optimizer, named)
        document = documents["optimizer"]
        fill_groups(state.optimizer, names, document["groups"])
        spread = {n: _spread_states(t) for n, t in entries.items() if t.states.get("optimizer")}
        tensors, scalars_before = place_states(state.optimizer, names, spread)
        packed = {
            k: torch.empty(p.count, dtype=_dtype(p.dtype)) for k, p in manifest.packed["optimizer"].items()
        }
        geometries = geometries_of(state.model, named)
        _check_opaque(documents, manifest, geometries)
        catalog = catalog_of_slices(path, stored, "optimizer", "optimizer", optimizer_tensors(stored))
        live = {alias: t.name for t in named for alias in t.names}
        plan = _plan_states(catalog, tensors, packed, geometries, live, io)
    with ranks.agree("read optimizer state"), FileReader(ranks.tick) as reader:
        destination = Destination(
            {n: local_tensor(t) for n, t in tensors.items()} | {packed_name(k): t for k, t in packed.items()}
        )
        execute(plan.transfers, reader, destination, Staging(io, plan.staging_bytes))
    _check_state_digests(manifest, tensors, packed, geometries, path, ranks)
    with ranks.agree("place optimizer state"):
        scalars: dict[str, dict[str, torch.Tensor]] = {}
        for name, entry in entries.items():
            for key, e in entry.states.get("optimizer", {}).items():
                if e.packed is not None:
                    scalars.setdefault(name, {})[key] = packed[e.packed][e.index]
        place_scalars(state.optimizer, names, scalars, scalars_before)
        place_values(state.optimizer, names, document["values"])
        if "optimizer.opaque" in documents:
            place_values(state.optimizer, names, documents["optimizer.opaque"])
    return reader.bytes_read, len(tensors) + len(packed)


def _check_opaque(documents: dict[str, Any], manifest: Manifest, geometries: Mapping[str, Geometry]) -> None:
    """Rank-local state fits the same cut of its parameter only."""
    entries = manifest.models["model"]
    moved = [
        n
        for n in documents.get("optimizer.opaque", {})
        if not _same_place(manifest.geometries[entries[n].geometry], geometries[n])
    ]
    if moved:
        raise StateError(
            f"optimizer state of {', '.join(moved[:5])} has another shape than its parameter and was stored per rank; "
            f"the parameter is now spread over ranks otherwise, so it can't be carried over"
        )


def _same_place(a: Geometry, b: Geometry) -> bool:
    """Whether two geometries put the same elements on the same ranks; names of axes do not matter."""
    return replace(a, axis_names=b.axis_names) == b


def _spread_states(entry: TensorEntry) -> dict[str, str]:
    return {key: e.dtype for key, e in entry.states["optimizer"].items() if e.packed is None}


def _dtype(code: str) -> torch.dtype:
    from .dtypes import torch_dtype

    return torch_dtype(code)


def _plan_states(
    catalog: Catalog,
    tensors: Mapping[str, torch.Tensor],
    packed: Mapping[str, torch.Tensor],
    geometries: Mapping[str, Geometry],
    live: Mapping[str, str],
    io: IOOptions,
) -> Plan:
    wanted: list[Wanted] = [wanted_of(n, t, geometries[n.rsplit(".", 1)[0]]) for n, t in tensors.items()]
    wanted += [whole_tensor(packed_name(k), code_of(t.dtype), tuple(t.shape)) for k, t in packed.items()]

    def rename(stored: Sequence[str]) -> dict[str, str]:
        parts = {n: n.rsplit(".", 1) for n in stored}
        return {n: f"{live[p[0]]}.{p[1]}" if p[0] in live else n for n, p in parts.items()}

    matched = match_rules(catalog, wanted, Rules(renamed(rename)))
    return build_plan(catalog, Layout(tuple(wanted)), matched, io)


def _check_state_digests(
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    packed: Mapping[str, torch.Tensor],
    geometries: Mapping[str, Geometry],
    path: str,
    ranks: Ranks,
) -> None:
    found = live_digests(tensors, {n: geometries[n.rsplit(".", 1)[0]] for n in tensors}, ranks)
    with ranks.agree("compare optimizer digests"):
        wrong = []
        for name, digest in found.items():
            parameter, key = name.rsplit(".", 1)
            if digest != manifest.models["model"][parameter].states["optimizer"][key].digest:
                wrong.append(name)
        wrong += [k for k, t in packed.items() if tensor_digest(t) != manifest.packed["optimizer"][k].digest]
        if wrong:
            raise IntegrityError(
                f"optimizer state differs from what was saved: {', '.join(wrong[:20])}", path=path
            )


_BUILT_IN = ("step", "rng", "optimizer", "optimizer.opaque")


def _apply_documents(
    state: TrainState, documents: dict[str, Any], named: tuple[NamedTensor, ...], manifest: Manifest
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give scheduler, scaler, data position, extras, modules and rank-local buffers their state back.

    Returns what was restored, and what was not, with the rule.
    """
    restored: list[str] = []
    left = [f"{n}: not in the checkpoint" for n in map("extra.{}".format, state.extra) if n not in documents]
    for name in manifest.local_documents:
        if name not in documents and name not in _BUILT_IN and name != "buffers":
            left.append(f"{name}: stored per rank, and this run has another number of ranks")
    if "buffers" in manifest.local_documents and "buffers" not in documents:
        left.append("buffers that differed between ranks: every rank has those of one rank now")
    if "optimizer" in documents and state.optimizer is None:
        left.append("optimizer: not given to this run")
    for name, value in documents.items():
        if name in _BUILT_IN:
            continue
        if name == "modules":
            for path, module in modules_with_state(state.model):
                module.set_extra_state(value[path])
        elif name == "buffers":
            by_name = {t.name: t.tensor for t in named}
            for buffer, content in value.items():
                by_name[buffer].detach().copy_(content)
        elif name.startswith("extra."):
            key = name.removeprefix("extra.")
            target: Any = state.extra.get(key)
            if hasattr(target, "load_state_dict"):
                target.load_state_dict(value)
            elif key in state.extra:
                state.extra[key] = value
            else:
                left.append(f"{name}: not among this run's extras")
                continue
        elif (target := getattr(state, name)) is None:
            left.append(f"{name}: not given to this run")
            continue
        else:
            target.load_state_dict(value)
        restored.append(name)
    return tuple(restored), tuple(left)


def _restore_rng(documents: dict[str, Any], manifest: Manifest, ranks: Ranks) -> str:
    if "rng" in documents:
        restore_rng(documents["rng"])
        return "restored per rank"
    return derive_rng(seed=manifest.seed, step=manifest.step, rank=ranks.rank)


def _differences(
    state: TrainState, manifest: Manifest, ranks: Ranks, named: tuple[NamedTensor, ...]
) -> tuple[str, ...]:
    """What withdraws the promise of an exact resume. The same on every rank but for per-rank machines."""
    found = []
    if manifest.world_size != ranks.world_size:
        found.append(f"world size: saved {manifest.world_size}, now {ranks.world_size}")
    now = software_versions(state)
    found += [f"{k}: saved {v}, now {now.get(k)}" for k, v in manifest.software.items() if now.get(k) != v]
    entries = manifest.models["model"]
    for t in named:
        if t.persistent and code_of(t.tensor.dtype) != entries[t.name].dtype:
            found.append(f"{t.name}: saved {entries[t.name].dtype}, now {code_of(t.tensor.dtype)}")
    live = geometries_of(state.model, [t for t in named if t.persistent])
    if manifest.world_size == ranks.world_size and any(
        not _same_place(manifest.geometries[entries[n].geometry], g) for n, g in live.items()
    ):
        found.append("mesh or placements: tensors are spread over ranks otherwise than they were")
    return tuple(found)
