"""What an accelerator has prepared, in and out of shardwise checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from accelerate import Accelerator

from ..checkpoint.checkpointer import save_at
from ..checkpoint.failures import Failures, RefusalError
from ..checkpoint.hosts import Hosts, OneForAll
from ..checkpoint.resume_report import ResumeReport
from ..checkpoint.save import SaveReport
from ..errors import CheckpointError, StateError
from ..internals.accelerate import has_state_hooks, prepared
from ..ranks.ranks import Ranks
from ..runs.restore import restore
from ..runs.third_party import is_third_party
from ..state.train_state import TrainState
from ..storage import place_at
from ..store.part_target import delete_sealed
from ..store.target import target_of
from ._accelerate_folders import (
    delete_oldest,
    first_stored,
    folder_for,
    make_room,
    newest,
    places_of,
)
from ._accelerate_loaders import LoaderPositions
from ._accelerate_settings import check_kind

__all__ = ["load_from", "load_state", "save_state", "save_to", "train_state"]


def save_state(
    accelerator: Accelerator, output_dir: str | os.PathLike[str] | None = None, *, step: int | None = None
) -> SaveReport:
    """Save what the accelerator prepared as one shardwise checkpoint, completely or not at all.

    Stores everything that was prepared or registered: models, optimizers, schedulers, scaler, random states, positions of data loaders, custom
    objects, and the accelerator's own counters. As with Accelerate, ``ProjectConfiguration(automatic_checkpoint_naming=True)`` saves to the
    project's ``checkpoints/checkpoint_N``, which overrides ``output_dir``, and ``total_limit`` deletes the oldest checkpoints after the
    new one is published.

    Args:
        output_dir: a directory or a URL that must not exist or must be empty. Unlike Accelerate, a save never overwrites a checkpoint (a
            folder ``latest``), so each save needs its own folder (``f"step-{step}"``).
        step: recorded in the checkpoint. Default: the number of earlier saves.

    Every rank must call it. Raises the errors of :func:`shardwise.save`, :class:`CheckpointError` for a directory that isn't empty, and
    :class:`StateError` for registered save hooks, which would add files that the checkpoint doesn't list.
    """
    number = accelerator.save_iteration if step is None else step
    places = [folder_for(accelerator, output_dir)]
    return save_to(accelerator, places, number, Failures(), OneForAll())


def save_to(
    accelerator: Accelerator, places: Sequence[str], step: int, failures: Failures, hosts: Hosts
) -> SaveReport:
    """:func:`save_state` into the first of ``places`` that storage does not make fail; see :meth:`.Failures.attempt`. Collective."""
    _refuse_hooks(accelerator, "save")
    ways = {folder: partial(_save_into, accelerator, folder, step, hosts) for folder in places}
    report = failures.attempt(step, ways, is_first_rank=Ranks.current().rank == 0)
    if report.failure is None:
        accelerator.project_configuration.iteration += 1
    return report


def _save_into(accelerator: Accelerator, folder: str, step: int, hosts: Hosts) -> SaveReport:
    ranks, project = Ranks.current(), accelerator.project_configuration
    automatic = project.automatic_checkpoint_naming
    try:
        make_room(folder, hosts, automatic=automatic)
    except CheckpointError as error:
        raise RefusalError(error) from error
    with ranks.agree("collect the accelerator's state"):
        state = train_state(accelerator)
    report = save_at(hosts.target(target_of(folder)), state, step)
    root, limit = os.path.dirname(folder), project.total_limit if automatic else None

    def clear() -> None:
        if limit is not None:
            delete_oldest(folder, limit)
        if hosts.is_local:  # the directory is the accelerator's own only with automatic naming
            delete_sealed(root, None if automatic else os.path.basename(folder))

    if limit is not None or hosts.is_local:
        hosts.on_own(root, "delete oldest", clear)
    return report


def load_state(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None = None) -> ResumeReport:
    """Restore what the accelerator prepared from a shardwise checkpoint, or from one written by ``accelerator.save_state``.

    Restores everything that was prepared and registered, on any mesh. Shardwise checkpoints are checked against their digests. Without
    ``input_dir``, it uses the newest checkpoint of ``automatic_checkpoint_naming``. Accelerate's own checkpoints don't store the data
    position in a readable form, so data loaders stay unchanged. ``input_dir`` can be the URL of a shardwise checkpoint.

    Every rank must call it. Raises the errors of :func:`shardwise.restore`, and :class:`NoCheckpointError` if there is no checkpoint.
    """
    return load_from(accelerator, input_dir, None, OneForAll())


def load_from(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str] | None,
    fallback: str | None,
    hosts: Hosts,
) -> ResumeReport:
    """:func:`load_state`, also of checkpoints in ``fallback``. Collective."""
    _refuse_hooks(accelerator, "load")
    ranks = Ranks.current()
    if input_dir is None:
        found = newest(accelerator, hosts, fallback)
    else:
        found = _named(place_at(input_dir), fallback, ranks)
        hosts.settle(os.path.dirname(found), is_held=False)
    with ranks.agree("collect the accelerator's state"):
        state = train_state(accelerator)
    with hosts.opened(found) as checkpoint:
        if ranks.on_first("look at checkpoint", lambda: is_third_party(checkpoint.path)):
            state.dataloader = None
        checkpoint.bring(state)
        return replace(restore(state, checkpoint.path, io=checkpoint.io), path=found)


def _named(path: str, fallback: str | None, ranks: Ranks) -> str:
    """A named checkpoint, or the one with its name in the fallback. Collective."""
    if fallback is None:
        return path
    return ranks.on_first("find checkpoint", lambda: first_stored(places_of(path, fallback)))


def train_state(accelerator: Accelerator) -> TrainState:
    """Collect all objects that the accelerator prepared or registered, by reference, for a :class:`shardwise.Checkpointer`.

    If there are several models, they are named ``model_0``, ``model_1`` and so on, and so are optimizers and schedulers. One rank can call
    it alone.
    """
    check_kind(accelerator)
    held = prepared(accelerator)
    if not held.models:
        raise StateError("the accelerator has no model; call accelerator.prepare(model, optimizer, …) first")
    for optimizer in held.optimizers:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        if len({id(p) for p in every}) < len(every):
            raise StateError(
                "an optimizer holds a parameter twice: Accelerate mixed up empty shards of a model that was not loaded here; call "
                "shardwise.integrations.accelerate.prepare(accelerator, …) instead of accelerator.prepare(…)"
            )
    return TrainState(
        model=held.models[0] if len(held.models) == 1 else _numbered("model", held.models),
        optimizer=_one_or_numbered("optimizer", held.optimizers),
        scheduler=_one_or_numbered("scheduler", held.schedulers),
        dataloader=LoaderPositions(held.loaders) if held.loaders else None,
        scaler=accelerator.scaler,
        extra={"accelerate": _Counters(accelerator), **_numbered("custom", held.objects)},
    )


def _numbered(name: str, objects: Sequence[Any]) -> dict[str, Any]:
    return {f"{name}_{i}": found for i, found in enumerate(objects)}


def _one_or_numbered(name: str, objects: Sequence[Any]) -> Any:
    if not objects:
        return None
    return objects[0] if len(objects) == 1 else _numbered(name, objects)


class _Counters:
    """The accelerator's own counters."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step, "save_iteration": self._accelerator.save_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["save_iteration"] + 1


def _refuse_hooks(accelerator: Accelerator, when: Literal["save", "load"]) -> None:
    if has_state_hooks(accelerator, when):
        raise StateError(
            f"hooks of register_{when}_state_pre_hook write and read files of their own next to Accelerate's state; a shardwise checkpoint holds "
            "listed files only. Remove the hooks, and register objects with state_dict (register_for_checkpointing)"
        )
