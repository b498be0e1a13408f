"""Loads models sharded by Accelerate's FSDP2 plugin, and saves the accelerator's state in shardwise checkpoints.

Your script keeps its YAML and its calls. Only the import and the line that loads the model change::

    from shardwise.integrations.accelerate import ShardwiseAccelerator as Accelerator

    accelerator = Accelerator()
    model = accelerator.load_pretrained("path/to/model")   # for AutoModel….from_pretrained
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.save_state("runs/a/step-100")
    accelerator.load_state("runs/a/step-100")

If your script doesn't create the accelerator itself, use the functions instead of the methods: ``load_pretrained(accelerator, path)``,
``prepare(accelerator, …)``, ``save_state(accelerator, folder)`` and ``load_state(accelerator, folder)``.

No class, module or function of Accelerate is patched: ``prepare`` accepts a model that is already sharded. The objects of your run that
are changed (the plugin, samplers of prepared loaders) are listed in docs/concepts/patching.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Unpack

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from ..checkpoint.checkpointer import save_at
from ..checkpoint.resume_report import ResumeReport
from ..checkpoint.run import FailurePolicy, Failures, LastSave, RefusalError
from ..checkpoint.save import SaveReport
from ..checkpoint.sites import Hosts, hosts_of
from ..errors import CheckpointError, NoCheckpointError, SourceError, StateError
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..internals.trainers import (
    count_own_batches,
    has_state_hooks,
    prepared,
    run_state_hooks,
    without_first_batches,
)
from ..limits import read_small
from ..loading.load import FillOptions, LoadReport, Names
from ..loading.load import load as _load
from ..loading.pretrained import load_wrapped
from ..models.hub import FromPretrained, Pretrained
from ..models.meta import meta_init
from ..planning.hub_rules import Converter
from ..planning.match import GrowRule
from ..planning.plan import IOOptions
from ..publish.places import delete_sealed, set_aside, target_of
from ..publish.write import make_directories, refuse_without_conditions
from ..ranks.ranks import Ranks, patiently
from ..ranks.stop import PreemptionPolicy, Stops
from ..rng import preserve_rng
from ..runs.run import restore
from ..runs.third_party import is_third_party
from ..sharding.fsdp import shard_added
from ..state.optimizer import TrainState, watch_steps
from ..storage import is_directory, is_file, names_in, place_at
from ..storage.records import is_url, join
from ._accelerate import (
    check_kind,
    device_of,
    explained,
    groups_of,
    put_back,
    shard,
)
from ._folders import ACCELERATE, CheckpointFolders, listed, rotate
from ._loaders import LoaderPositions, record

__all__ = [
    "ShardwiseAccelerator",
    "load",
    "load_pretrained",
    "load_state",
    "prepare",
    "save_state",
    "shard",
    "train_state",
]


_log = logging.getLogger(__name__)
#: By accelerator, the digests of what its checkpoints only refer to.
_BASES: weakref.WeakKeyDictionary[Accelerator, dict[tuple[str, str], int]] = weakref.WeakKeyDictionary()


# ----------------------------------------------------------------------------------------------------
# Folders of an accelerator's checkpoints: the caller's, local or URLs, or Accelerate's automatic ``checkpoints/checkpoint_N``.


def _refuse_unfit(fallback: str) -> None:
    """Raise :class:`CheckpointError` or :class:`SourceError` for a fall-back that could take no checkpoint: else the first save that
    fails would find it out. Makes a directory; writes and deletes one small object below a URL. For one rank.
    """
    if is_url(fallback):
        refuse_without_conditions(fallback)
        return
    try:
        patiently(make_directories, fallback)
    except OSError as error:
        raise CheckpointError(f"{fallback}: this fallback can't be created: {error.strerror}") from error


def _folder_for(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> str:
    """The folder that ``accelerator.save_state`` chooses: automatic naming overrules ``output_dir``."""
    if accelerator.project_configuration.automatic_checkpoint_naming:
        line = CheckpointFolders(_root(accelerator), ACCELERATE)
        return os.path.join(line.root, line.fresh_name(accelerator.save_iteration))
    if output_dir is None:
        raise CheckpointError(
            "no output_dir, and automatic_checkpoint_naming is off; give save_state(accelerator, output_dir)"
        )
    return place_at(output_dir)


def _make_room(folder: str, hosts: Hosts, *, automatic: bool) -> None:
    """Make the parent of ``folder``, and remove ``folder`` if it is empty; a store needs neither. Collective.

    A checkpoint that only some hosts hold, because a save was killed when its parts appeared, is set aside with a warning. Raises
    :class:`CheckpointError` for any other folder that is not empty.
    """
    root = os.path.dirname(folder)
    found = hosts.on_each(root, "make room for the checkpoint", lambda: _in_the_way(folder))
    if set(found) == {"", _CHECKPOINT} and not hosts.holds(folder):
        hosts.on_own(root, "rename an incomplete checkpoint", lambda: _rename_torn(folder))
    elif any(found):
        raise CheckpointError(
            f"{folder}: isn't empty, and published checkpoints are never overwritten; "
            + (
                "resume with load_state(accelerator) first, which continues the count, or set project_configuration.iteration"
                if automatic
                else "give each save a folder of its own (f'step-{step}'), or "
                "ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=…) and no output_dir"
            )
        )


_CHECKPOINT = "checkpoint"


def _in_the_way(folder: str) -> str:
    """Why a new folder can't be made here, whose parent is created; empty if it can."""
    if is_url(folder):
        return "objects" if patiently(is_directory, folder) else ""
    if os.path.isdir(folder) and not os.listdir(folder):
        patiently(os.rmdir, folder)
    if os.path.lexists(folder):
        return _CHECKPOINT if os.path.isfile(os.path.join(folder, MANIFEST_NAME)) else "something else"
    patiently(os.makedirs, os.path.dirname(folder), exist_ok=True)
    return ""


def _rename_torn(folder: str) -> None:
    """Under a name that no search takes. For one rank of each host."""
    if os.path.lexists(folder):
        aside = set_aside(folder, "torn", f".torn-{os.path.basename(folder)}")
        _log.warning("%s: only some hosts have it, because its save was killed; renamed to %s", folder, aside)


def _newest_of(
    roots: Sequence[str], hosts: Hosts, steps_of: Callable[[str], Mapping[int, str]]
) -> str | None:
    """The newest checkpoint of :func:`.listed` that all hosts together hold. Collective."""
    hosts.settle(roots[0], is_held=False)
    return next((path for _, path in listed(roots, hosts, steps_of) if hosts.holds(path)), None)


def _steps_in(root: str) -> dict[int, str]:
    """The checkpoints directly below a directory or URL, by step. For one rank.

    A checkpoint whose manifest can't be read does not count, and is logged.
    """
    found: dict[int, str] = {}
    for name in sorted(names_in(root)) if is_directory(root) else ():
        path = join(root, name)
        if name.startswith(".") or not is_file(join(path, MANIFEST_NAME)):
            continue
        try:
            found.setdefault(patiently(read_manifest, path).step, name)
        except SourceError as error:
            _log.warning("skipping %s: %s", path, error)
    return found


def _root(accelerator: Accelerator) -> str:
    return os.path.abspath(os.path.join(accelerator.project_dir or "", "checkpoints"))


# ----------------------------------------------------------------------------------------------------
# What an accelerator has prepared, in and out of shardwise checkpoints.


def save_state(
    accelerator: Accelerator, output_dir: str | os.PathLike[str] | None = None, *, step: int | None = None
) -> SaveReport:
    """Save everything that was prepared or registered as one shardwise checkpoint, completely or not at all.

    This includes models, optimizers, schedulers, the scaler, RNG states, data loader positions, custom objects, the accelerator's own counters,
    and the files that hooks of ``register_save_state_pre_hook`` write. As with Accelerate, ``ProjectConfiguration(automatic_checkpoint_naming=True)`` saves to the
    project's ``checkpoints/checkpoint_N``, which overrides ``output_dir``, and ``total_limit`` deletes the oldest checkpoints after the
    new one is published.

    Args:
        output_dir: a directory or a URL that must not exist or must be empty. Unlike with Accelerate, a save never overwrites a checkpoint, so
            use a different folder for each save (``f"step-{step}"`` instead of ``latest``).
        step: recorded in the checkpoint. Default: the number of earlier saves.

    Every rank must call it. Raises the errors of :func:`shardwise.save`, and :class:`CheckpointError` for a directory that isn't empty.
    """
    number = accelerator.save_iteration if step is None else step
    places = [_folder_for(accelerator, output_dir)]
    return save_to(accelerator, places, number, Failures(), Hosts())


def save_to(
    accelerator: Accelerator, places: Sequence[str], step: int, failures: Failures, hosts: Hosts
) -> SaveReport:
    """:func:`save_state` into the first of ``places`` that storage does not make fail; see :meth:`.Failures.attempt`. Collective."""
    ways = {folder: partial(_save_into, accelerator, folder, step, hosts) for folder in places}
    report = failures.attempt(step, ways, is_first_rank=Ranks.current().rank == 0)
    if report.failure is None:
        accelerator.project_configuration.iteration += 1
    return report


def _save_into(accelerator: Accelerator, folder: str, step: int, hosts: Hosts) -> SaveReport:
    ranks, project = Ranks.current(), accelerator.project_configuration
    automatic = project.automatic_checkpoint_naming
    try:
        _make_room(folder, hosts, automatic=automatic)
    except CheckpointError as error:
        raise RefusalError(error) from error
    with ranks.agree("collect the accelerator's state"):
        state = train_state(accelerator)
    if has_state_hooks(accelerator):
        with _directory_for_hooks(ranks) as directory:
            with ranks.agree("call the hooks of save_state"):
                run_state_hooks(accelerator, "save", directory)
            with ranks.agree("read the hooks' files"):  # once all ranks have written theirs
                state.files = _files_of_hooks(directory) if ranks.rank == 0 else {}
    base = _BASES.setdefault(accelerator, {})
    report = save_at(hosts.target(target_of(folder)), state, step, base=base)
    root, limit = os.path.dirname(folder), project.total_limit if automatic else None

    def clear() -> None:
        if limit is not None and not is_url(root):  # in a store all stay
            rotate(CheckpointFolders(root, ACCELERATE), limit, None)
        if hosts.is_local:  # the directory is the accelerator's own only with automatic naming
            delete_sealed(root, None if automatic else os.path.basename(folder))

    if limit is not None or hosts.is_local:
        hosts.on_own(root, "delete oldest", clear)
    return report


def _places(folder: str, fallback: str | None) -> list[str]:
    """Where a checkpoint may be: at ``folder``, and under the same name in the fall-back."""
    return [folder, *([] if fallback is None else [join(fallback, os.path.basename(folder))])]


def load_state(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None = None) -> ResumeReport:
    """Restore everything that was prepared and registered, from a shardwise checkpoint or one written by ``accelerator.save_state``.

    Works on any mesh. Shardwise checkpoints are checked against their digests. Without
    ``input_dir``, it uses the newest checkpoint of ``automatic_checkpoint_naming``. Accelerate's own checkpoints don't store the data
    position in a readable form, so data loaders stay unchanged. ``input_dir`` can be the URL of a shardwise checkpoint.

    Every rank must call it. Raises the errors of :func:`shardwise.restore`, and :class:`NoCheckpointError` if there is no checkpoint.
    """
    return load_from(accelerator, input_dir, None, Hosts())


def load_from(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str] | None,
    fallback: str | None,
    hosts: Hosts,
) -> ResumeReport:
    """:func:`load_state`, also of checkpoints in ``fallback``. Collective."""
    ranks = Ranks.current()
    if input_dir is None:
        root, newest = _root(accelerator), None
        if accelerator.project_configuration.automatic_checkpoint_naming:
            roots = [root, *([] if fallback is None else [fallback])]
            newest = _newest_of(roots, hosts, lambda root: CheckpointFolders(root, ACCELERATE).steps())
        if newest is None:
            raise NoCheckpointError(f"{root}: no checkpoint_N in it, and no input_dir was given")
        found = newest
    else:
        found, *others = places = _places(place_at(input_dir), fallback)
        if others:
            found = ranks.on_first(
                "find checkpoint",
                lambda: next((path for path in places if patiently(is_directory, path)), found),
            )
        hosts.settle(os.path.dirname(found), is_held=False)
    with ranks.agree("collect the accelerator's state"):
        state = train_state(accelerator)
    with hosts.opened(found, also=lambda name: name.startswith(_HOOKS)) as checkpoint:
        is_theirs = ranks.on_first("look at checkpoint", lambda: is_third_party(checkpoint.path))
        if is_theirs:
            state.dataloader = None
        report = restore(state, checkpoint.path, io=checkpoint.io)
        if has_state_hooks(accelerator):
            place = contextlib.nullcontext(checkpoint.path) if is_theirs else _directory_for_hooks(ranks)
            with place as directory:
                if not is_theirs:
                    ranks.on_first(
                        "copy the hooks' files", partial(_copy_of_hooks, checkpoint.path, directory)
                    )
                with ranks.agree("call the hooks of load_state"), preserve_rng():
                    run_state_hooks(accelerator, "load", directory)
        return replace(report, path=found)


def train_state(accelerator: Accelerator) -> TrainState:
    """Collect all objects that the accelerator prepared or registered, by reference, for a :class:`shardwise.Checkpointer`.

    If there are several models, they are named ``model_0``, ``model_1`` and so on, and so are optimizers and schedulers. A single rank
    can call it.
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
        model=_one_or_numbered("model", held.models),
        optimizer=_one_or_numbered("optimizer", held.optimizers),
        scheduler=_one_or_numbered("scheduler", held.schedulers),
        dataloader=LoaderPositions(held.loaders) if held.loaders else None,
        scaler=accelerator.scaler,
        extra={"accelerate": _Counters(accelerator), **_numbered("custom", held.objects)},
        frozen=getattr(accelerator, "frozen", "auto"),
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


#: Where a checkpoint has the files that the hooks of ``save_state`` wrote.
_HOOKS = "accelerate_hooks/"


def _files_of_hooks(directory: str) -> dict[str, bytes]:
    """The files in a directory, by their paths in a checkpoint. For rank 0."""
    paths = [path for path in sorted(Path(directory).rglob("*")) if path.is_file()]
    return {_HOOKS + path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def _copy_of_hooks(checkpoint: str, directory: str) -> None:
    """Copy the hooks' files from a checkpoint to ``directory``. For rank 0. A manifest can't contain paths outside of its checkpoint."""
    for name, entry in read_manifest(checkpoint).files.items():
        if name.startswith(_HOOKS):
            path = os.path.join(directory, name.removeprefix(_HOOKS))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(read_small(join(checkpoint, name), "file of a hook", entry.nbytes))


@contextmanager
def _directory_for_hooks(ranks: Ranks) -> Iterator[str]:
    """A temporary directory that all ranks can see. Collective. Raises :class:`StateError` or :class:`RankError` if a rank can't."""
    own = TemporaryDirectory(prefix="shardwise-hooks-") if ranks.rank == 0 else contextlib.nullcontext("")
    with own as made:
        path = ranks.on_first("make a directory for hooks", lambda: made)
        with ranks.agree("find the directory for hooks"):
            if not os.path.isdir(path):
                raise StateError(
                    f"the hooks of save_state and load_state need a directory that all hosts see, and {path} is on rank 0's host only. "
                    "Set TMPDIR to a shared directory, or remove the hooks"
                )
        yield path


def load_pretrained(
    accelerator: Accelerator,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    auto_class: Any = None,
    config: Any = None,
    trust_remote_code: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    allow_unused: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    vocab_size: int | None = None,
    grow: Mapping[str, GrowRule] | None = None,
    adapter: Any = None,
    quantized: Any = "dequantize",
    seed: int = 0,
    io: IOOptions | None = None,
    verify: Literal["cover", "digest"] | None = None,
    return_report: bool = False,
    **options: Unpack[FromPretrained],
) -> Any:
    """Load a transformers model, sharded according to the accelerator's FSDP plugin and ready for ``accelerator.prepare``.

    Follows the plugin's wrap policy (class names or size), reshard after forward, mixed precision (trainable parameters become fp32
    master weights, as with Accelerate), CPU offload and ignored modules, and the mesh of ``parallelism_config`` (FSDP, HSDP, or tensor
    parallelism alone, by the model's own plan). Compilation is left to ``prepare``. ``cpu_ram_efficient_loading`` has no effect, because no rank
    holds more than its shards. Without FSDP, every rank loads the complete model onto the accelerator's device; if there are several
    ranks, rank 0 logs a warning.

    Activation checkpointing must be applied before sharding. This function applies it, and then permanently turns it off in the accelerator's
    plugin, because ``prepare`` would add it again. Later calls of this function still apply it. For a model loaded in a different way,
    set ``accelerator.state.fsdp_plugin.activation_checkpointing`` before you prepare it.

    For the other arguments, memory, the ranks that must call it and errors, see :func:`shardwise.load_pretrained`. Also raises
    :class:`ShardError` for unsupported settings.
    """
    request = Pretrained.of(locals())
    filling = FillOptions(io=io or IOOptions(), device=device_of(accelerator), seed=seed, verify=verify)
    model, report = load_wrapped(request, lambda model: shard(accelerator, model), filling)
    return (model, report) if return_report else model


def load(
    accelerator: Accelerator,
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    names: Names | None = None,
    converter: Converter | None = None,
    key_mapping: Mapping[str, str] | None = None,
    allow_unused: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    grow: Mapping[str, GrowRule] | None = None,
    adapter: Any = None,
    seed: int = 0,
    io: IOOptions | None = None,
    verify: Literal["cover", "digest"] | None = None,
) -> LoadReport:
    """Shard any module in place according to the accelerator's FSDP plugin, and load its weights from ``source``.

    Build ``model`` inside ``sw.meta_init()`` if you can. ``accelerator.prepare`` accepts the sharded model. See :func:`load_pretrained` for
    the supported settings and :func:`shardwise.load` for the other arguments.

    Every rank must call it. Memory: as for :func:`shardwise.load`, but a model that wasn't built on meta is complete on every rank until
    it is sharded. Raises the errors of :func:`shardwise.load`, and :class:`ShardError` for unsupported settings.
    """
    ranks = Ranks.current(timeout_s=(io or IOOptions()).timeout_s)
    with ranks.agree("shard as the accelerator says"):
        excluded = shard(accelerator, model)
    return _load(
        model,
        source,
        names=names,
        converter=converter,
        key_mapping=key_mapping,
        allow_unused=allow_unused,
        allow_missing=allow_missing,
        grow=grow,
        adapter=adapter,
        seed=seed,
        device=device_of(accelerator),
        io=io,
        verify=verify,
        allow_plain=excluded,
    )


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """Call ``accelerator.prepare(*objects)`` and add hooks that make a save exact at any point of the loop. Every rank must call it.

    The hooks record which gradients each step used, so that you can save during gradient accumulation, or before the loop clears
    gradients. They also record the RNG states from which each loader's sampler draws an order, so that you can save mid-epoch. After a plain
    ``accelerator.prepare``, recording starts only with the first :func:`save_state` or :func:`load_state`; the first save then skips
    unknown state, and the reports say so.

    The optimizers keep their parameters, even if a model that was loaded in a different way has empty shards. Raises :class:`ShardError` if
    Accelerate's ``cpu_ram_efficient_loading`` can't shard a model that was loaded in full.
    """
    return _prepared(accelerator, accelerator.prepare, objects)


def _prepared(accelerator: Any, by: Callable[..., Any], objects: tuple[Any, ...]) -> Any:
    check_kind(accelerator)
    optimizers = [found for found in objects if isinstance(found, torch.optim.Optimizer)]
    with Ranks.current().agree("shard what was added to the models"):
        added = {
            p: new
            for model in objects
            if isinstance(model, nn.Module)
            for p, new in shard_added(model).items()
        }
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["params"] = [added.get(p, p) for p in group["params"]]
    before = [groups_of(optimizer) for optimizer in optimizers]
    for found in objects:
        if isinstance(found, DataLoader):
            record(found)
    with explained("load_pretrained or load of shardwise.integrations.accelerate"):
        result = by(*objects)
    for optimizer, groups in zip(optimizers, before, strict=True):
        if groups is not None:
            put_back(optimizer, groups)
        watch_steps(optimizer)
    for loader in prepared(accelerator).loaders:
        count_own_batches(loader)
        record(loader)
    return result


class ShardwiseAccelerator(Accelerator):  # type: ignore[misc]
    """An ``Accelerator`` that loads models sharded, and saves and loads shardwise checkpoints.

    Args:
        preemption: the signals that ask the run to stop, and how much time it then has; see :class:`shardwise.PreemptionPolicy` and
            :meth:`should_stop`. ``end_training`` restores the previous signal handlers.
        failures: how to handle a :meth:`save_state` that fails because of a storage problem; see :class:`shardwise.FailurePolicy`. A folder saved to
            the fallback keeps its name, and :meth:`load_state` and :meth:`newest_checkpoint` look there, too. The constructor raises
            :class:`CheckpointError` or :class:`RankError` if the fallback can't be written.
        local: each host only stores its own ranks' files; ``output_dir`` and the project's folders are on a local disk.
            :meth:`load_state` needs every host that saved, or all parts merged. Additional hosts and a different number of ranks are fine.
            See docs/howto/several-hosts.md.
        frozen: whether checkpoints of a LoRA run contain the base (``"hold"``), only its digests (``"refer"``), or only its digests as long as
            it is what the load read (``"auto"``); see :attr:`shardwise.TrainState.frozen`.

    All other arguments and methods are those of ``accelerate.Accelerator``.
    """

    def __init__(
        self,
        *args: Any,
        preemption: PreemptionPolicy | None = None,
        failures: FailurePolicy | None = None,
        local: bool = False,
        frozen: Literal["hold", "refer", "auto"] = "auto",
        **kwargs: Any,
    ) -> None:
        self.frozen = frozen
        self._failures = Failures.under(failures)
        self._hosts = hosts_of(local=local, fallback=self._failures.fallback)
        super().__init__(*args, **kwargs)
        if (fallback := self._failures.fallback) is not None:
            Ranks.current().on_first("checking the fallback", lambda: _refuse_unfit(fallback))
        self._stops, self._last_save = Stops(preemption, Ranks.current()), LastSave()
        self._newest: tuple[str, SaveReport] | None = None

    def should_stop(self, step: int) -> bool:
        """Whether the run was asked to stop; see :meth:`shardwise.Checkpointer.should_stop`.

        When it returns True, call :meth:`save_state`, leave the loop, and end the script with ``sys.exit(accelerator.exit_code)``.
        """
        return self._stops.should_stop(step, Ranks.current())

    def request_stop(self) -> None:
        """Ask all ranks to stop, as a signal would: at a time limit, or when the loss is NaN, for example. One rank's call is enough, and it also works
        without ``preemption=``.
        """
        self._stops.request()

    @property
    def exit_code(self) -> int:
        """Pass this to ``sys.exit``: the policy's ``exit_status`` if the run was stopped, otherwise 0."""
        return self._stops.exit_code

    def end_training(self) -> None:
        """``Accelerator.end_training``, after restoring the previous signal handlers. Every rank must call it."""
        self._stops.close()
        super().end_training()

    def load_pretrained(self, path: str | os.PathLike[str], **options: Any) -> Any:
        """Call :func:`load_pretrained` with this accelerator: same arguments, memory and errors. Every rank must call it."""
        return load_pretrained(self, path, **options)

    def load_model(self, build: Callable[[], nn.Module], source: Any, **options: Any) -> nn.Module:
        """Build a custom model on meta, shard it according to the plugin, and load its weights from ``source``.

        Args:
            build: function that creates the model; called once, inside :func:`shardwise.meta_init`: ``lambda: MyModel(config)``.
            source, options: as for :func:`load`.

        Returns the model, ready for :meth:`prepare`. :func:`shardwise.reports.load_report` returns the report of its load. Every rank must call it.
        Raises the errors of :func:`load`.
        """
        with Ranks.current().agree("build the model"), meta_init():
            model = build()
        load(self, model, source, **options)
        return model

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """``Accelerator.prepare``, with hooks that make a save exact at any point of the loop; see :func:`prepare`.

        Every rank must call it. Raises the errors of :func:`prepare`.
        """
        return _prepared(self, partial(super().prepare, device_placement=device_placement), args)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """``Accelerator.skip_first_batches``. Uses the order of the loader's current epoch even with Accelerate before 1.15."""
        return without_first_batches(dataloader, num_batches)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        step: int | None = None,
    ) -> SaveReport:
        """Save the accelerator's state with :func:`save_state`. ``safe_serialization`` has no effect, because all tensors are safetensors.

        After :meth:`should_stop`, this is the last save: a folder that was just published isn't saved again, and no save is started if
        ``deadline_s`` or a second signal leaves no time for it. In that case the report has ``failure``, and the previous checkpoint stays the newest.
        ``failure`` is also set if a save failed and the :class:`shardwise.FailurePolicy` let training continue.

        Every rank must call it. Raises the errors of :func:`save_state`.
        """
        places = _places(_folder_for(self, output_dir), self._failures.fallback)
        number = self.save_iteration if step is None else step
        if self._stops.has_stopped:
            if self._newest is not None and self._newest[0] == places[0]:
                return self._newest[1]
            if why := self._last_save.refusal(self._stops.left_s(), Ranks.current()):
                return SaveReport.of_failure(places[0], number, why)
        report = save_to(self, places, number, self._failures, self._hosts)
        if report.failure is None:
            self._last_save.saved(report.seconds)
            self._newest = places[0], report
        return report

    def load_state(self, input_dir: str | os.PathLike[str] | None = None) -> ResumeReport:
        """Restore the accelerator's state with :func:`load_state`.

        If only the fallback has the folder, it is read from there. With ``automatic_checkpoint_naming``, the newest of both is used. Every rank must
        call it. Raises the errors of :func:`load_state`.
        """
        report = load_from(self, input_dir, self._failures.fallback, self._hosts)
        self._last_save.resumed()
        return report

    def newest_checkpoint(self, root: str | os.PathLike[str]) -> str | None:
        """Find the checkpoint of the newest step directly below ``root`` or in the fallback, for :meth:`load_state`. None if there is none.

        Use it if your script names the folders. It reads manifests, and skips one that can't be read with a warning. With ``local=True``, it finds
        the newest step that is complete across all hosts. Every rank must call it.
        """
        roots = self._failures.roots(place_at(root))
        return _newest_of(roots, self._hosts, _steps_in)
