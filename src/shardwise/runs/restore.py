"""``restore``: training state from checkpoints of shardwise, Accelerate, the HF Trainer, torchtitan, torch's examples.

Tensors of model and optimizer are read by byte ranges as from any source; :mod:`.third_party` locates them.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..checkpoint.restore import ResumeReport, restore_into
from ..checkpoint.snapshot import trained_model
from ..dtypes import code_of, torch_dtype
from ..errors import StateError
from ..layout.live import LiveModel, describe
from ..layout.model import local_tensor, wanted_of
from ..layout.placements import mesh_text
from ..layout.wanted import Layout, Wanted, whole_tensor
from ..limits import brief
from ..loading.load import fill
from ..names import NamedTensor
from ..planning import IOOptions, build_plan
from ..ranks.ranks import Ranks
from ..recipe.match import Rules, match_rules, renamed
from ..rng import derive_rng
from ..state.forms import attribute_of_class, refuse_other_kind
from ..state.gradients import clear_gradients
from ..state.optimizer import (
    check_groups,
    fill_groups,
    parameter_names,
    place_scalars,
    place_states,
    place_values,
)
from ..state.train_state import TrainState
from ..transfer import FileReader
from ..transfer.copy import Destination, Staging, execute
from ..transfer.page_cache import page_cache_for
from .third_party import StoredOptimizer, ThirdPartyRun, find_run, is_third_party

__all__ = ["restore"]


def restore(state: TrainState, path: str | os.PathLike[str], *, io: IOOptions | None = None) -> ResumeReport:
    """Put the checkpoint at ``path`` back into the live objects of ``state``, and prove it by digests.

    Also takes checkpoints of Accelerate (``save_state``; sharded, or the full state), the HF Trainer, torchtitan,
    transformers and torch's own examples: without digests, and without RNG and data position, which they do not store
    in a readable form.

    Works under any mesh and world size. The directory may have any name; the report's ``step`` is the manifest's.
    Every rank of the default process group must call it. RNG is restored last. Memory: staging only, besides the state
    itself. Raises :class:`SourceError`, :class:`IntegrityError`, :class:`PlanError`, :class:`StateError` or
    :class:`RankError`, alike on every living rank; the state is then undefined until a restore succeeds.
    """
    io = io or IOOptions()
    root, ranks = os.path.abspath(path), Ranks.current(timeout_s=io.timeout_s)
    if ranks.on_first("look at checkpoint", lambda: is_third_party(root)):
        return _restore_third_party(state, root, ranks, io)
    return restore_into(state, root, ranks, io)


def _restore_third_party(state: TrainState, path: str, ranks: Ranks, io: IOOptions) -> ResumeReport:
    """Put a third-party checkpoint into the live objects of ``state``. Collective; works under any mesh.

    Restores models, optimizers (tensors, steps, settings of the groups), and scheduler and scaler if stored. Such
    checkpoints hold no readable RNG (it is derived by rule instead) and no readable data position. Raises as
    ``restore`` does; :class:`StateError` if the state asks for more than the checkpoint holds.
    """
    started = time.perf_counter()
    with ranks.agree("read checkpoint"):
        state.watch()
        run = find_run(path)
        _check_asked(state, run)
        catalogs = {name: run.model(k) for k, name in enumerate(state.models)}
        stored = {name: run.optimizer(k) for k, name in enumerate(state.optimizers)}
        documents = _documents(state, run)
        lives = {name: describe(model) for name, model in state.models.items()}
        _check_groups(state, lives, stored)
        step, world_size = run.step, run.world_size
    reports = [fill(live, catalogs[name], Rules(), io=io, ranks=ranks) for name, live in lives.items()]
    bytes_read, tensors = sum(r.bytes_read for r in reports), 0
    with ranks.agree("match names"):
        lives = {name: live.refreshed() for name, live in lives.items()}
        for optimizer in state.optimizers.values():
            clear_gradients(optimizer)
    for name, optimizer in state.optimizers.items():
        trained = lives[trained_model(optimizer, lives)]
        more, filled = _restore_optimizer(optimizer, stored[name], trained, ranks, io)
        bytes_read, tensors = bytes_read + more, tensors + filled
    with ranks.agree("restore documents"):
        for name, value in documents.items():
            _apply(state.scheduler if name == "scheduler" else state.scaler, name, value, run.path)
        rng = derive_rng(seed=torch.initial_seed() % 2**63, step=step, rank=ranks.rank)
    return ResumeReport(
        path=path,
        step=step,
        run_id="",
        saved_world_size=world_size,
        world_size=ranks.world_size,
        saved_mesh="not recorded",
        mesh=mesh_text(g for live in lives.values() for g in live.geometries.values()),
        digest="",
        exact=False,
        differences=("not written by shardwise: neither digests nor versions are recorded",),
        tensors=sum(r.tensors for r in reports),
        optimizer_tensors=tensors,
        documents=tuple(documents),
        skipped=(
            "random generators and data position: not stored in a readable form",
            *(f"extra.{name}: not read from such a checkpoint" for name in state.extra),
        ),
        caveats=(),
        rng=rng,
        bytes_read=bytes_read,
        seconds=time.perf_counter() - started,
        damaged={},
        superseded=(),
    )


def _check_asked(state: TrainState, run: ThirdPartyRun) -> None:
    """Refuse a state that asks for more than such a checkpoint holds."""
    if state.dataloader is not None:
        raise StateError(
            f"{run.path}: such a checkpoint holds no readable data position; leave dataloader out of the state"
        )
    if len(state.models) > len(run.models):
        raise StateError(f"{run.path}: holds {len(run.models)} model(s); this run has {sorted(state.models)}")


def _documents(state: TrainState, run: ThirdPartyRun) -> dict[str, Any]:
    """State of scheduler and scaler. Raises :class:`StateError` if one is wanted but not stored."""
    found = {}
    for name in ("scheduler", "scaler"):
        live = state.scheduler if name == "scheduler" else state.scaler
        if live is None:
            continue
        if not hasattr(live, "load_state_dict"):
            raise StateError(f"{name}: several by name can't be restored from such a checkpoint; give one")
        document = run.document(name)
        if hidden := attribute_of_class(live, document):  # torch's schedulers set every entry as an attribute
            raise StateError(
                f"{run.path}: its {name} holds {brief(hidden)}, which is a method of {type(live).__qualname__}: damaged"
            )
        found[name] = _with_keys_of(live.state_dict(), document)
    return found


def _apply(live: Any, name: str, value: Any, path: str) -> None:
    try:
        live.load_state_dict(value)
    except Exception as error:  # any class may raise anything for unexpected values
        raise StateError(
            f"{path}: its {name} can't be put into this run's {type(live).__qualname__} ({type(error).__name__}: "
            f"{brief(str(error))}); use the same class as the saved run, or leave {name} out of the state"
        ) from error


def _with_keys_of(live: Any, stored: Any) -> Any:
    """``stored`` with the keys and mapping types of the live state: DCP stores every key as text."""
    if not isinstance(live, Mapping) or not isinstance(stored, Mapping):
        return stored
    texts = {str(key): key for key in live}
    numbers = bool(live) and all(isinstance(key, int) for key in live)
    found = {}
    for key, value in stored.items():
        own = texts.get(key, int(key) if numbers and re.fullmatch("[0-9]{1,18}", str(key)) else key)
        found[own] = _with_keys_of(live.get(own), value)
    return Counter(found) if isinstance(live, Counter) else found


def _check_groups(
    state: TrainState, lives: Mapping[str, LiveModel], stored: Mapping[str, StoredOptimizer]
) -> None:
    """Refuse, before anything is changed, optimizers with other groups or of another kind."""
    for name, optimizer in state.optimizers.items():
        tensors = lives[trained_model(optimizer, lives)].tensors
        check_groups(
            optimizer, parameter_names(optimizer, tensors), _groups_of(optimizer, stored[name], tensors)
        )


def _groups_of(
    optimizer: Optimizer, stored: StoredOptimizer, named: Sequence[NamedTensor]
) -> list[dict[str, Any]]:
    names = parameter_names(optimizer, named)
    live = {alias: t.name for t in named for alias in t.names}
    members = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    groups = stored.groups_like(members, live)
    refuse_other_kind(optimizer, groups)
    return groups


def _restore_optimizer(
    optimizer: Optimizer,
    stored: StoredOptimizer,
    trained: LiveModel,
    ranks: Ranks,
    io: IOOptions,
) -> tuple[int, int]:
    """Restore one optimizer. Returns the bytes that this rank read and the number of tensors filled."""
    with ranks.agree("plan optimizer state"):
        named = trained.tensors
        names = parameter_names(optimizer, named)
        live = {alias: t.name for t in named for alias in t.names}
        groups = _groups_of(optimizer, stored, named)
        values = {live.get(fqn, fqn): found for fqn, found in stored.values.items()}
        fill_groups(optimizer, names, groups)
        spread: dict[str, dict[str, str]] = {}
        scalars: dict[str, dict[str, torch.Tensor]] = {}
        for short, t in stored.catalog.tensors.items():
            fqn, _, key = short.rpartition(".")
            name = live.get(fqn, fqn)
            if t.shape == ():
                scalars.setdefault(name, {})[key] = torch.empty((), dtype=torch_dtype(t.dtype))
            else:
                spread.setdefault(name, {})[key] = t.dtype
        tensors, before = place_states(optimizer, names, spread)
        geometries = trained.geometries
        wanted: list[Wanted] = [wanted_of(n, t, geometries[n.rsplit(".", 1)[0]]) for n, t in tensors.items()]
        small = {f"{n}.{k}": t for n, states in scalars.items() for k, t in states.items()}
        wanted += [whole_tensor(n, code_of(t.dtype), ()) for n, t in small.items()]

        def rename(shorts: Sequence[str]) -> dict[str, str]:
            parts = {n: n.rpartition(".") for n in shorts}
            return {n: f"{live.get(p[0], p[0])}.{p[2]}" for n, p in parts.items()}

        matched = match_rules(stored.catalog, wanted, Rules(renamed(rename)))
        plan = build_plan(stored.catalog, Layout(tuple(wanted)), matched, io)
    local = {n: local_tensor(t) for n, t in tensors.items()} | small
    page_cache = page_cache_for(io, (t.device for t in local.values()))
    with ranks.agree("read optimizer state"), FileReader(ranks.tick, page_cache=page_cache) as reader:
        execute(plan.transfers, reader, Destination(local), Staging(io, plan.staging_bytes))
        place_scalars(optimizer, names, scalars, before)
        place_values(optimizer, names, values)
    return reader.bytes_read, len(tensors) + len(small)
