"""``restore``: training state from checkpoints of shardwise, Accelerate, the HF Trainer, torchtitan, torch's examples.

Tensors of model and optimizer are read by byte ranges as from any source; :mod:`.third_party` locates them.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..checkpoint.documents import check_documents
from ..checkpoint.fill_optimizer import RestoredOptimizer, StoredStates, TrainedBy, plan_fill, trained_by
from ..checkpoint.receivers import Receiver
from ..checkpoint.restore import Filled, Saved, restore_into
from ..checkpoint.resume_report import ResumeReport, logged
from ..dtypes import torch_dtype
from ..errors import SourceError, StateError
from ..format.states import StateKey, by_name
from ..layout.live import describe
from ..limits import brief
from ..objects import gc_paused
from ..operations.announced import announced
from ..operations.operation import this_operation
from ..planning import IOOptions
from ..ranks.ranks import Ranks
from ..rng import derive_rng
from ..state.forms import attribute_of_class, check_state, refuse_other_kind
from ..state.gradients import clear_gradients
from ..state.optimizer import check_groups
from ..state.settings import given_settings_of, replaced_settings
from ..state.train_state import TrainState
from ..storage import absolute, counting, looking_once
from .third_party import StoredOptimizer, ThirdPartyRun, find_run, is_third_party

__all__ = ["restore", "restore_unlogged"]


@logged
def restore(state: TrainState, path: str | os.PathLike[str], *, io: IOOptions | None = None) -> ResumeReport:
    """Restore the checkpoint at ``path`` into the live objects of ``state``, and check every tensor against its digest.

    Also reads checkpoints of Accelerate (``save_state``; sharded, or the full state), the HF Trainer, Lightning, torchtitan, transformers and
    torch's own examples. They don't have digests, and they don't store random states and the data position in a readable form. An
    optimizer that numbers its parameters is matched by position, as in torch's ``load_state_dict``.

    ``path`` can be a URL in an object store, and a directory may have any name; the report's ``step`` comes from the manifest. Works with any
    mesh and world size. Every rank of the default process group must call it. Random states are restored last. Memory: staging only, in
    addition to the state itself. Raises :class:`SourceError`, :class:`IntegrityError`, :class:`PlanError`, :class:`StateError` or
    :class:`RankError` on every surviving rank. After an error, the state is undefined until a restore succeeds.
    """
    return restore_unlogged(state, path, io=io)


@announced("restore", "path")
@gc_paused()
def restore_unlogged(
    state: TrainState, path: str | os.PathLike[str], *, io: IOOptions | None = None
) -> ResumeReport:
    """:func:`restore` for a caller that adds to the report before it logs it."""
    io = io or IOOptions()
    root, ranks = absolute(path), Ranks.current(timeout_s=io.timeout_s)
    with counting() as asked:
        is_other = ranks.on_first("look at checkpoint", lambda: is_third_party(root))
        this_operation(root)
        report = (_restore_third_party if is_other else restore_into)(state, root, ranks, io)
    return replace(report, requests=asked.total)


def _restore_third_party(state: TrainState, path: str, ranks: Ranks, io: IOOptions) -> ResumeReport:
    """Put a third-party checkpoint into the live objects of ``state``. Collective; works under any mesh.

    Restores models, optimizers (tensors, steps, settings of the groups), and scheduler and scaler if stored. Such
    checkpoints hold no readable RNG (it is derived by rule instead) and no readable data position. Raises as
    ``restore`` does; :class:`StateError` if the state asks for more than the checkpoint holds.
    """
    started = time.perf_counter()
    with ranks.agree("read checkpoint") as claim, looking_once(path):
        state.watch()
        run = find_run(path)
        if run.kind is not None and "restore" not in run.kind.works:
            raise SourceError(
                f"is {run.kind.name}, without training state that can be restored. {run.kind.line(path)}",
                path=path,
            )
        _check_asked(state, run)
        catalogs = {name: run.model(k) for k, name in enumerate(state.models)}
        optimizers = {name: run.optimizer(k) for k, name in enumerate(state.optimizers)}
        receivers = _receivers_of(state, run)
        documents = {receiver.name: receiver.found() for receiver in receivers}
        check_documents(receivers, documents)
        read = (*catalogs.values(), *(optimizer.catalog for optimizer in optimizers.values()))
        claim.alike([[f.path, f.version] for c in read for f in c.files if f.version is not None])
        lives = {name: describe(model) for name, model in state.models.items()}
        differences = ["not written by shardwise: neither digests nor versions are recorded"]
        for name, optimizer in state.optimizers.items():
            part = trained_by(name, optimizer, lives)
            if optimizers[name].is_numbered:
                differences.append(
                    f"{name}: its parameters were matched by their positions, as torch's load_state_dict does"
                )
                optimizers[name] = optimizers[name].named_like(_members(part))
            check_groups(optimizer, part.names(), _groups_of(part, optimizers[name]))
        step, world_size = run.step or 0, run.world_size
        given = given_settings_of(state)
        filled = Filled(lives, catalogs, ranks, io, started)
        filled.expect(lambda: sum(one.catalog.nbytes for one in optimizers.values()))
    filled.fill_models(lives)
    with ranks.agree("match names"):
        for optimizer in state.optimizers.values():
            clear_gradients(optimizer)
    for name, optimizer in state.optimizers.items():
        part = trained_by(name, optimizer, lives)
        filled.optimizers.append(_restore_optimizer(part, optimizers[name], ranks, io))
    with ranks.agree("restore documents"):
        for receiver in receivers:
            receiver.restore(documents[receiver.name])
        rng = derive_rng(seed=torch.initial_seed() % 2**63, step=step, rank=ranks.rank)
    return ResumeReport.of(
        Saved(path=path, step=step, world_size=world_size),
        filled,
        differences=(
            *differences,
            *(cast.in_words() for load in filled.loads for cast in load.casts),
        ),
        documents=tuple(documents),
        skipped=(
            "random generators and data position: not stored in a readable form",
            *(f"extra.{name}: not read from such a checkpoint" for name in state.extra),
        ),
        rng=rng,
        not_given=state.not_given,
        replaced=replaced_settings(given, given_settings_of(state)),
    )


def _check_asked(state: TrainState, run: ThirdPartyRun) -> None:
    """Refuse a state that asks for more than such a checkpoint holds."""
    if state.dataloader is not None:
        raise StateError(
            f"{run.path}: such a checkpoint holds no readable data position; leave dataloader out of the state"
        )
    if len(state.models) > len(run.models):
        raise StateError(f"{run.path}: holds {len(run.models)} model(s); this run has {sorted(state.models)}")


class _Stateful(Receiver):
    """A scheduler or scaler, which takes the state that another program stored."""

    def __init__(self, name: str, target: Any, run: ThirdPartyRun) -> None:
        super().__init__(name)
        self._target, self._run = target, run

    def found(self) -> Any:
        """The stored state in the form of the live one. Raises :class:`StateError` if none is stored."""
        return _with_keys_of(self._target.state_dict(), self._run.document(self.name))

    def check(self, stored: Any) -> None:
        if isinstance(self._target, torch.amp.GradScaler):  # its state's "scale" is a method, too
            check_state(self._target, stored, self.name)
        # torch's schedulers set every entry as an attribute.
        elif hidden := attribute_of_class(self._target, stored):
            kind = type(self._target).__qualname__
            raise StateError(
                f"{self._run.path}: its {self.name} holds {brief(hidden)}, which is a method of {kind}: damaged"
            )

    def missing(self) -> None:
        self.found()  # its error says where such a program stores it

    def restore(self, stored: Any) -> Iterable[str]:
        try:
            self._target.load_state_dict(stored)
        except Exception as error:  # any class may raise anything for unexpected values
            raise StateError(
                f"{self._run.path}: its {self.name} can't be put into this run's {type(self._target).__qualname__} "
                f"({type(error).__name__}: {brief(str(error))}); use the same class as the saved run, or leave "
                f"{self.name} out of the state"
            ) from error
        return ()


def _receivers_of(state: TrainState, run: ThirdPartyRun) -> list[_Stateful]:
    """The run's scheduler and scaler as receivers. Raises :class:`StateError` where the run has several by name."""
    found = []
    for name, target in (("scheduler", state.scheduler), ("scaler", state.scaler)):
        if target is None:
            continue
        if not hasattr(target, "load_state_dict"):
            raise StateError(
                f"{run.path}: this checkpoint stores at most one {name}; pass one, not a mapping of several"
            )
        found.append(_Stateful(name, target, run))
    return found


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


def _members(part: TrainedBy) -> list[list[str]]:
    """The names of this run's parameters, in each group of the optimizer."""
    names = part.names()
    return [[names[id(p)] for p in group["params"]] for group in part.optimizer.param_groups]


def _groups_of(part: TrainedBy, stored: StoredOptimizer) -> list[dict[str, Any]]:
    """The stored settings by group, with this run's names. Refuses the settings of another kind of optimizer."""
    groups = stored.groups_like(_members(part), part.live.first_names)
    refuse_other_kind(part.optimizer, groups)
    return groups


def _restore_optimizer(
    part: TrainedBy, stored: StoredOptimizer, ranks: Ranks, io: IOOptions
) -> RestoredOptimizer:
    """Fill an optimizer: tensors, values, and the settings of its groups. Collective."""
    with ranks.agree("plan optimizer state"):
        fill = plan_fill(part, _stored_states(part, stored), io)
    with ranks.agree("read optimizer state"):
        bytes_read = fill.read(ranks.tick)
        fill.place()
    return fill.restored(bytes_read)


def _stored_states(part: TrainedBy, stored: StoredOptimizer) -> StoredStates:
    """A third-party optimizer's state, with room for its 0-d tensors: each is stored by itself. Reads nothing."""
    first = part.live.first_names
    keys = {short: StateKey(first.get(p, p), s) for short, (p, s) in stored.keys.items()}
    spread: dict[str, dict[str, str]] = {}
    scalars: dict[str, dict[str, torch.Tensor]] = {}
    for short, (name, state) in keys.items():
        t = stored.catalog.tensors[short]
        if t.shape == ():
            scalars.setdefault(name, {})[state] = torch.empty((), dtype=torch_dtype(t.dtype))
        else:
            spread.setdefault(name, {})[state] = t.dtype
    return StoredStates(
        catalog=stored.catalog,
        renames={short: key.name for short, key in keys.items()},
        groups=_groups_of(part, stored),
        spread=spread,
        whole=by_name(scalars),
        scalars=scalars,
        values={first.get(name, name): found for name, found in stored.values.items()},
    )
