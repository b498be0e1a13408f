"""A stored training run, of any program, as tensors with recipes and documents; and ``restore`` from it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..catalog.checkpoint import (
    catalog_of_checkpoint,
    catalog_of_optimizer,
    check_size,
    directory,
    packed_name,
    refuse_referred,
)
from ..catalog.dcp import UNKNOWN_ENTRIES
from ..catalog.megatron import without_padding
from ..catalog.records import Catalog, StoredFile, StoredTensor
from ..checkpoint.optimizer import StoredStates, trained_by
from ..checkpoint.receivers import Receiver, check_documents
from ..checkpoint.restore import Restored, Run, restore_into, restore_run
from ..checkpoint.resume_report import ResumeReport, logged
from ..checkpoint.stored import check_each, read_documents
from ..checkpoint.verify import model_of
from ..dtypes import torch_dtype
from ..errors import FormatError, ShardwiseError, SourceError, StateError
from ..format.manifest import MANIFEST_NAME, Manifest, document_of, read_manifest, refuse_part
from ..format.slices import StateKey, by_name
from ..limits import MAX_COUNT, brief, inside
from ..loading.pretrained import build_meta
from ..models.documents import left_out_of
from ..models.homes import read_assets
from ..models.hub import documents_of
from ..names import NamedTensor, named_tensors
from ..objects import frozen, gc_paused
from ..operations.operation import announced, this_operation
from ..planning.hub_rules import hub_rules
from ..planning.match import GrowRule, HostConversion, Origin, Recipe, Rules, match_rules, renamed
from ..planning.plan import IOOptions, build_plan
from ..ranks.ranks import Ranks
from ..rng import derive_rng
from ..state.beyond import extras_in
from ..state.documents import attribute_of_class, check_state, refuse_other_kind
from ..state.optimizer import TrainedBy, TrainState, check_groups
from ..state.typed_json import Encoded, encode
from ..storage import absolute, is_file, looking_once
from ..storage.records import counting, is_url
from ..tensors.boxes import Layout, TensorSpec, whole_tensor
from ..tensors.live import LiveModel
from ..tensors.tiles import identity
from .third_party import StoredOptimizer, ThirdPartyRun, find_run, is_third_party, plain_tensor

# ----------------------------------------------------------------------------------------------------
# Which parameter has which number in a stored optimizer, as the model and the usual ways to build an optimizer say.


def members_of(
    stored: StoredOptimizer, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[list[str]], str] | None:
    """The parameters' names in the groups of a numbered optimizer, and the rule by which they were found; None if no rule fits.

    A rule fits if its groups have the sizes of the stored ones, and each parameter the shape of its state. ``model``: on meta;
    ``shapes``: of its parameters as they are stored.
    """
    numbers = [[str(n) for n in group["params"]] for group in stored.groups or ()]
    of_states: dict[str, list[tuple[int, ...]]] = {}
    for short, key in stored.keys.items():
        of_states.setdefault(key.parameter, []).append(tuple(stored.catalog.tensors[short].shape))
    for members, rule in _rules(model):
        if [len(names) for names in members] == [len(group) for group in numbers] and all(
            shape in ((), shapes.get(name))
            for group, names in zip(numbers, members, strict=True)
            for number, name in zip(group, names, strict=True)
            for shape in of_states.get(number, ())
        ):
            return members, rule
    return None


def _rules(model: nn.Module) -> Iterator[tuple[list[list[str]], str]]:
    names = [name for name, _ in model.named_parameters()]
    yield [names], "the order of model.parameters()"

    from transformers import Trainer

    decay_rule: Any = Trainer.get_decay_parameter_names  # of the model alone
    decayed = set(decay_rule(None, model))
    yield (
        [[n for n in names if n in decayed], [n for n in names if n not in decayed]],
        "the HF Trainer's groups, with and without weight decay",
    )


# ----------------------------------------------------------------------------------------------------
# A stored training run, of any program, as tensors with recipes and documents: the input of a conversion.


@frozen
class StoredModel:
    """A model's tensors under module names, and how each is made of stored ones."""

    catalog: Catalog
    specs: Mapping[str, TensorSpec]
    """Stored dtype and shape of each tensor."""
    recipes: Mapping[str, Recipe]
    conversions: Mapping[str, HostConversion] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stored_aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names under which readers of other programs look for a tied tensor."""
    hub_tensors: Mapping[str, tuple[int, ...]] | None = None
    """Names and shapes of the source tensors, as the manifest records them."""
    assets: Mapping[str, bytes] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    prefix: str = ""
    """Where the source has the model: in an attribute of the module that was saved, such as ``model.`` in Lightning's."""

    def name_of(self, alias: str) -> str:
        """The name of the tensor that has this name or alias."""
        return next((n for n, others in self.aliases.items() if alias in others), alias)


@frozen
class StoredOptimizerState:
    """An optimizer's tensors: spread like their parameter, or of one element."""

    model: str
    catalog: Catalog
    spread: Mapping[str, Mapping[str, StoredTensor]]
    scalars: Mapping[str, Mapping[str, torch.Tensor]]


@frozen(kw_only=True)
class StoredRun:
    """A run: its models and optimizers by name, and its documents in the form of our checkpoints."""

    kind: str
    models: Mapping[str, StoredModel]
    optimizers: Mapping[str, StoredOptimizerState]
    documents: Mapping[str, Encoded]
    step: int
    run_id: str | None
    parent_step: int | None
    seed: int
    software: Mapping[str, str]
    skipped: tuple[str, ...]
    """Stored state that a conversion skips."""
    caveats: tuple[str, ...] = ()
    """What a conversion had to assume."""


def describe_run(
    root: str, home: str | None, *, step: int, trust_remote_code: bool, io: IOOptions
) -> StoredRun:
    """Describe the run (or the model alone) at ``root``. Rank-local; reads headers and small values, no payload.

    ``home`` is that of :func:`home_of_run`, and ``step`` the step of a source without one. Raises :class:`SourceError`,
    :class:`PlanError` if the source is incomplete for that config, :class:`StateError`.
    """
    with looking_once(root):
        if is_file(os.path.join(root, MANIFEST_NAME)):
            return _of_checkpoint(root)
        return _of_run(find_run(root), home, step=step, trust_remote_code=trust_remote_code, io=io)


def home_of_run(root: str, config: str | None, *, with_code: bool) -> str | None:
    """The local directory with the model's config.json: ``config``, else the source's own; of a URL, a copy of its documents."""
    homes = (root, os.path.join(root, "huggingface"))  # verl saves the config and the tokenizer there
    home = config or next((one for one in homes if is_file(os.path.join(one, "config.json"))), None)
    return documents_of(home, with_code=with_code) if home is not None and is_url(home) else home


def _of_run(
    run: ThirdPartyRun, home: str | None, *, step: int, trust_remote_code: bool, io: IOOptions
) -> StoredRun:
    root = run.path
    if home is not None and len(run.models) > 1:
        raise StateError(f"{root}: holds {len(run.models)} models, but one config can't describe them all")
    names = ["model"] if len(run.models) == 1 else [f"model_{k}" for k in range(len(run.models))]
    models = {name: as_stored(run.model(k)) for k, name in enumerate(names)}
    built = None
    if home is not None:
        catalog = models["model"].catalog
        built = build_meta(home, catalog, trust_remote_code=trust_remote_code)
        models["model"] = replace(as_config_says(catalog, built, io), assets=read_assets(home))
    stored = _of_third_party(run, models, built, step)
    if home is None or not os.path.isdir(home):
        return stored
    left = [f"{one}: not carried" for one in left_out_of(home)]
    if os.path.realpath(home) == os.path.realpath(root) and not stored.optimizers:
        left += _not_carried(home, models["model"], [*stored.skipped, *left])
    return replace(stored, skipped=(*stored.skipped, *left))


def _not_carried(home: str, model: StoredModel, told: Sequence[str]) -> list[str]:
    """What else is in a model's directory, hidden files apart, and gets into no checkpoint."""
    known = {name.partition("/")[0] for name in model.assets}
    known |= {os.path.basename(file.path) for file in model.catalog.files}
    known |= {re.split(" \\(|: ", line)[0] for line in told}
    rest = [n for n in sorted(os.listdir(home)) if n not in known and not n.startswith(".")]
    return [f"{n}: not carried" for n in rest if ".index." not in n]


# ----------------------------------------------------------------------------------------------------
# Models


def as_stored(catalog: Catalog) -> StoredModel:
    """Every stored tensor under its own name. Raises :class:`StateError` if which of them are the model's isn't known."""
    if entries := catalog.metadata.get(UNKNOWN_ENTRIES):
        raise StateError(
            f"{catalog.root}: its state dict has tensors in {brief(entries)}, and none of them is known to be the model (it is looked for "
            f"at the top, and in 'model', 'app.model', 'state.model' and 'state_dict'). Load it by name, sw.load(model, path, names=lambda "
            f"name: name.removeprefix('ENTRY.'), allow_unused=('OTHER.*',)), and save or export the live model"
        )
    specs = {n: TensorSpec(t.dtype, t.shape) for n, t in catalog.tensors.items()}
    recipes = {n: Recipe(n, (identity(n, t.shape),)) for n, t in catalog.tensors.items()}
    return StoredModel(catalog, specs, recipes)


def has_module_names(catalog: Catalog) -> bool:
    """Whether names may be module names, as also in slices of DCP's safetensors writer (transformers' own save)."""
    return catalog.has_module_names or "DCP_VERSION" in catalog.metadata


def as_config_says(catalog: Catalog, model: Any, io: IOOptions) -> StoredModel:
    """The tensors of a transformers model on meta, proved complete, in their stored dtypes."""
    hub = hub_rules(model)
    named = [t for t in named_tensors(model) if t.persistent]
    catalog = without_padding(catalog, ((n, len(t.tensor)) for t in named if t.tensor.ndim for n in t.names))
    known = {name for t in named for name in t.names}
    prefix = _prefix_in(catalog, named) if has_module_names(catalog) or catalog.kind == "torch" else ""
    # DCP's safetensors writer takes any names: transformers gives it module names, torchtitan hub names.
    is_ours = bool(prefix) or catalog.tensors.keys() <= known
    is_ours |= catalog.has_module_names and catalog.kind != "slices"
    below = renamed(lambda names: {n: n.removeprefix(prefix) for n in names if n.startswith(prefix)})
    made = (below if is_ours else hub.resolve)(catalog.tensors)
    stored_as = {m.target: m.dtype for m in reversed(made)}
    wanted = tuple(
        replace(
            whole_tensor(
                t.name, next((stored_as[n] for n in t.names if n in stored_as), "F32"), t.tensor.shape
            ),
            aliases=t.aliases,
        )
        for t in named
    )
    matched = match_rules(catalog, wanted, Rules(lambda _: made, hub.allow_unused, hub.allow_missing))
    plan = build_plan(catalog, Layout(wanted), matched, io)
    if plan.initialized:
        lost = ", ".join(d.name for d in plan.initialized[:5])
        raise StateError(
            f"{catalog.root}: contains no {lost}, which the model has; load it (load_pretrained initializes them) and save"
        )
    results = {t.name: t for host in plan.conversions.values() for t in host.outputs.values()}
    origin = Origin(plan.recipes, {n: t.shape for n, t in catalog.tensors.items()})
    sources = {s for r in plan.recipes.values() for s in (*(t.source for t in r.tiles), *r.empty)}
    shapes = {} if origin.is_plain else {s: catalog.tensors[s].shape for s in sources if s in catalog.tensors}
    aliases = {t.name: t.aliases for t in named if t.aliases}
    return StoredModel(
        catalog=replace(catalog, tensors={**catalog.tensors, **results}),
        specs={w.name: TensorSpec(w.dtype, w.shape) for w in wanted},
        recipes=plan.recipes,
        conversions=plan.conversions,
        buffers=frozenset(t.name for t in named if t.kind == "buffer"),
        aliases=aliases,
        stored_aliases=aliases,
        # Tensors converted whole have no names and shapes from which the class's conversions could be inverted.
        hub_tensors=None if is_ours or plan.conversions else shapes,
        unused=(*(d.name for d in plan.unused), *(n for n in catalog.tensors if not n.startswith(prefix))),
        prefix=prefix,
    )


def _prefix_in(catalog: Catalog, named: Sequence[NamedTensor]) -> str:
    """What stands before all names of the model if a module around it was saved; empty if they are stored as they are.

    Raises :class:`StateError` if several parts of that module could be the model.
    """
    stored = catalog.tensors.keys()

    def lacks(prefix: str) -> bool:
        return any(stored.isdisjoint(prefix + name for name in t.names) for t in named)

    if not named or not lacks(""):
        return ""
    found = {s.removesuffix(name) for name in named[0].names for s in stored if s.endswith(f".{name}")}
    fit = sorted(prefix for prefix in found if not lacks(prefix))
    if len(fit) > 1:
        raise StateError(
            f"{catalog.root}: {' and '.join(map(repr, fit))} each have all tensors of the model. Load one by name, "
            f"sw.load(model, path, names=lambda name: name.removeprefix({fit[0]!r}), allow_unused=({fit[1]!r} + '*',)), and save the live model"
        )
    return fit[0] if fit else ""


# ----------------------------------------------------------------------------------------------------
# A run that another library stored


def _of_third_party(
    run: ThirdPartyRun, models: Mapping[str, StoredModel], built: Any, otherwise: int
) -> StoredRun:
    """``built``: the one model on meta, if there is a config."""
    named = run.step
    step = otherwise if named is None else named
    if not 0 <= step <= MAX_COUNT:
        raise FormatError(f"its step is {step}, expected a number from 0 to {MAX_COUNT}", path=run.path)
    documents: dict[str, Any] = {"step": step}
    caveats = [
        f"tensors were taken from {m.prefix!r}, the part of the saved module that contains all of the model's names"
        for m in models.values()
        if m.prefix
    ]
    optimizers: dict[str, StoredOptimizerState] = {}
    skipped = [f"{n}: not used by the model's class" for m in models.values() for n in m.unused]
    skipped += [
        f"{n}: not one of the model's own files" for m in models.values() for n in m.catalog.ignored_files
    ]
    if named is None:
        skipped.append(
            f"step: the source names none, so it is {step}: that of OUT's name (step-NNNNNNNN), or 0"
        )
    places = run.stored_optimizers
    for k, (source, entry) in enumerate(places):
        name = "optimizer" if len(places) == 1 else f"optimizer_{k}"
        stored, where = run.optimizer(k), entry or os.path.basename(source)
        names = [group.get("param_names") for group in stored.groups or ()]
        if stored.is_numbered and all(names):
            stored = stored.named_like([list(map(str, found)) for found in names if found is not None])
        for prefix in (m.prefix for m in models.values() if m.prefix and not stored.is_numbered):
            stored = stored.below(prefix)
        if stored.is_numbered and built is not None:
            shapes = {n: spec.shape for n, spec in models["model"].specs.items()}
            if known := members_of(stored, built, shapes):
                stored = stored.named_like(known[0])
                caveats.append(
                    f"{where} numbers its parameters; their names were taken from {known[1]}, whose shapes fit"
                )
        if stored.is_numbered:
            skipped.append(
                f"{where}: the optimizer state is stored by parameter index, and neither the order of model.parameters() nor the HF "
                f"Trainer's groups fit it (without a config, --config DIR, neither is known); only an optimizer built as in the saved run can match "
                f"it. To keep it: sw.restore(sw.TrainState(model=model, optimizer=optimizer), {run.path!r}), and sw.save there"
            )
        else:
            optimizers[name], documents[document_of("optimizer", name)] = _optimizer(stored, models, run.path)
    for name in ("scheduler", "scaler"):
        try:
            found = run.document(name)
        except StateError:
            continue  # not stored
        except ShardwiseError as error:
            skipped.append(f"{name}: {error}")
            continue
        if any(isinstance(v, dict) for v in found.values()) and not run.is_in_a_file(name):
            skipped.append(
                f"{name}: a state dict keeps every key as text, so the keys of its mappings lost their types"
            )
            continue
        documents[name] = found
    kind = next(iter(models.values())).catalog.kind
    assets = {file for m in models.values() for file in m.assets}
    skipped += [
        *(
            f"{e}: an entry of the file that isn't read"
            for m in models.values()
            for e in m.catalog.ignored_entries
        ),
        *run.left_out(documents, assets),
    ]
    return StoredRun(
        kind=kind,
        models=models,
        optimizers=optimizers,
        documents={name: encode(value, where=name) for name, value in documents.items()},
        step=step,
        run_id=None,
        parent_step=None,
        seed=0,
        software={},
        skipped=(*skipped, "RNG states and data position: not stored in a readable form"),
        caveats=tuple(caveats),
    )


def _optimizer(
    stored: StoredOptimizer, models: Mapping[str, StoredModel], path: str
) -> tuple[StoredOptimizerState, dict[str, Any]]:
    """An optimizer's contents, and its document."""
    owners = {key.parameter for key in stored.keys.values()}
    name, model = next(
        (
            (n, m)
            for n, m in models.items()
            if owners <= {*m.specs, *(a for al in m.aliases.values() for a in al)}
        ),
        (None, None),
    )
    if name is None or model is None:
        first = next(iter(models.values()))
        strange = sorted(owners - first.specs.keys())
        raise StateError(
            f"{path}: contains optimizer state for {', '.join(strange[:5])}, which the model doesn't have"
        )
    spread: dict[str, dict[str, StoredTensor]] = {}
    scalars: dict[str, dict[str, torch.Tensor]] = {}
    for short, (parameter, key) in stored.keys.items():
        t, owner = stored.catalog.tensors[short], model.name_of(parameter)
        if t.shape == model.specs[owner].shape and t.shape:
            spread.setdefault(owner, {})[key] = t
        elif t.shape == ():
            scalars.setdefault(owner, {})[key] = plain_tensor(t, stored.catalog.files)
        else:
            raise StateError(
                f"{path}: optimizer state {short} has shape {list(t.shape)}, its parameter "
                f"{list(model.specs[owner].shape)}; how ranks held it is not stored: "
                f"restore it in a run (shardwise.restore) and save there"
            )
    groups = [{**g, "names": [model.name_of(n) for n in g["names"]]} for g in stored.groups_as_stored()]
    values = {model.name_of(n): dict(v) for n, v in stored.values.items()}
    # No other library stores the optimizer's class: a restore compares the settings.
    document = {"class": None, "model": name, "groups": groups, "values": values}
    return StoredOptimizerState(name, stored.catalog, spread, scalars), document


# ----------------------------------------------------------------------------------------------------
# A checkpoint of ours, for another number of files


def _of_checkpoint(root: str) -> StoredRun:
    manifest = read_manifest(root)
    refuse_part(root, manifest)
    for name, entry in manifest.files.items():
        check_size(inside(root, name), entry.nbytes)
    models = {}
    for name, entries in manifest.models.items():
        catalog = catalog_of_checkpoint(root, name)
        refuse_referred(catalog, "a conversion")
        found = as_stored(catalog)
        folder = inside(root, directory("model", name))
        models[name] = replace(
            found,
            buffers=frozenset(n for n, t in entries.items() if t.kind == "buffer"),
            aliases={n: t.aliases for n, t in entries.items() if t.aliases},
            stored_aliases={n: t.stored_aliases for n, t in entries.items() if t.stored_aliases},
            hub_tensors=manifest.hub_tensors.get(name),
            assets=read_assets(documents_of(folder, with_code=True) if is_url(folder) else folder),
        )
    documents = read_documents(root, manifest, "state")
    check_each(documents, manifest, root)  # as a restore, which would take each of them
    return StoredRun(
        kind="checkpoint",
        models=models,
        optimizers={name: _stored_optimizer(root, manifest, name) for name in manifest.packed},
        documents=documents,
        step=manifest.step,
        run_id=manifest.run_id,
        parent_step=manifest.parent_step,
        seed=manifest.seed,
        software=manifest.software,
        skipped=(
            *(f"{n}: stored per rank" for n in manifest.local_documents),
            *(f"{n}: a file next to the state" for n in _further_files(manifest, models)),
        ),
    )


def _further_files(manifest: Manifest, models: Mapping[str, StoredModel]) -> list[str]:
    """Files that are neither slices, documents nor assets: ``TrainState.files``, which a conversion drops."""
    known = {f"{directory('model', name)}/{file}" for name, m in models.items() for file in m.assets}
    known |= {"state.json", "state.safetensors"}
    folders = {directory("model", n) for n in models} | {directory("optimizer", n) for n in manifest.packed}

    def is_known(name: str) -> bool:
        folder = name.rpartition("/")[0]
        is_slice = folder in folders and name.endswith(".safetensors")
        is_shown_at_top = manifest.files[name] == manifest.files.get(f"model/{name}")
        return name in known or folder == "rank" or is_slice or is_shown_at_top

    return sorted(n for n in manifest.files if not is_known(n))


def _stored_optimizer(root: str, manifest: Manifest, name: str) -> StoredOptimizerState:
    model = model_of(manifest, name)
    catalog = catalog_of_optimizer(root, manifest, name, model)
    packed = {
        key: plain_tensor(catalog.tensors[packed_name(key)], catalog.files) for key in manifest.packed[name]
    }
    spread: dict[str, dict[str, StoredTensor]] = {}
    scalars: dict[str, dict[str, torch.Tensor]] = {}
    for owner, entry in manifest.models[model].items():
        for key, state in entry.states.get(name, {}).items():
            if state.packed is None:
                spread.setdefault(owner, {})[key] = catalog.tensors[StateKey(owner, key).name]
            else:
                scalars.setdefault(owner, {})[key] = packed[state.packed][state.index]
    return StoredOptimizerState(model, catalog, spread, scalars)


# ----------------------------------------------------------------------------------------------------
# ``restore``: training state from checkpoints of shardwise, Accelerate, the HF Trainer, torchtitan, torch's examples.
#
# Tensors of model and optimizer are read by byte ranges as from any source; :mod:`.third_party` locates them.


@logged
def restore(
    state: TrainState,
    path: str | os.PathLike[str],
    *,
    grow: Mapping[str, GrowRule] | None = None,
    io: IOOptions | None = None,
) -> ResumeReport:
    """Restore the checkpoint at ``path`` into the live objects of ``state``, and check every tensor that isn't grown against its digest.

    Also reads checkpoints of Accelerate (``save_state``; sharded, or the full state), the HF Trainer, Lightning, torchtitan, transformers and
    torch's own examples. They don't have digests, and they don't store RNG states or the data position in a readable form. An
    optimizer that numbers its parameters is matched by position, as in torch's ``load_state_dict``.

    ``path`` can be a URL in an object store, and a directory may have any name; the report's ``step`` comes from the manifest. Works with any
    mesh and world size. If the model has more rows than were saved (new tokens, more labels), ``grow`` makes the others, as for :func:`load`;
    the optimizer's states of new rows are zeros, and the resume isn't exact. Every rank of the default process group must call it. Random
    states are restored last. Memory: staging only, in
    addition to the state itself. Raises :class:`SourceError`, :class:`IntegrityError`, :class:`PlanError`, :class:`StateError` or
    :class:`RankError` on every surviving rank. After an error, the state is undefined until a restore succeeds.
    """
    return restore_unlogged(state, path, grow=grow, io=io)


@announced("restore", "path")
@gc_paused()
def restore_unlogged(
    state: TrainState,
    path: str | os.PathLike[str],
    *,
    grow: Mapping[str, GrowRule] | None = None,
    io: IOOptions | None = None,
) -> ResumeReport:
    """:func:`restore` for a caller that adds to the report before it logs it."""
    io = io or IOOptions()
    root, ranks = absolute(path), Ranks.current(timeout_s=io.timeout_s)
    with counting() as asked:
        is_other = ranks.on_first("look at checkpoint", lambda: is_third_party(root))
        this_operation(root)
        if is_other:
            report = restore_run(
                state, ranks, io, "read checkpoint", partial(_OfAnotherProgram, state, root), grow=grow
            )
        else:
            report = restore_into(state, root, ranks, io, grow=grow)
    return replace(report, requests=asked.total)


class _OfAnotherProgram(Run):
    """A run that another program stored. It has neither digests nor, in a form that can be read, random states and a data position."""

    def __init__(self, state: TrainState, path: str, lives: dict[str, LiveModel]) -> None:
        with looking_once(path):
            run = find_run(path)
            if run.kind is not None and "restore" not in run.kind.works:
                raise SourceError(
                    f"is {run.kind.name}, without training state that can be restored. {run.kind.line(path)}",
                    path=path,
                )
            if state.dataloader is not None:
                raise StateError(
                    f"{path}: such a checkpoint contains no readable data position; leave dataloader out of the state"
                )
            if len(state.models) > len(run.models):
                raise StateError(
                    f"{path}: holds {len(run.models)} model(s); this run has {sorted(state.models)}"
                )
            self.path, self.step, self.world_size = path, run.step or 0, run.world_size
            self.catalogs = {name: run.model(k) for k, name in enumerate(state.models)}
            for name in extras_in(lives):
                del lives[name]
            self._optimizers = {name: run.optimizer(k) for k, name in enumerate(state.optimizers)}
            self._receivers = _receivers_of(state, run)
            self._documents = {receiver.name: receiver.found() for receiver in self._receivers}
            check_documents(self._receivers, self._documents)
        self._skipped = [f"extra.{name}: not read from such a checkpoint" for name in state.extra]
        self._differences = ["not written by shardwise: neither digests nor versions are recorded"]
        for name, optimizer in state.optimizers.items():
            part, stored = trained_by(name, optimizer, lives), self._optimizers[name]
            if stored.is_numbered:
                self._differences.append(
                    f"{name}: its parameters were matched by position, as in torch's load_state_dict"
                )
                stored = self._optimizers[name] = stored.named_like(part.members)
            check_groups(part, _groups_of(part, stored))

    @property
    def files(self) -> list[StoredFile]:
        return [
            *super().files,
            *(file for stored in self._optimizers.values() for file in stored.catalog.files),
        ]

    def optimizer_bytes(self) -> int:
        return sum(stored.catalog.nbytes for stored in self._optimizers.values())

    def states_of(self, part: TrainedBy) -> StoredStates:
        """With room for its 0-d tensors, each of which is stored separately. Reads nothing."""
        stored, first = self._optimizers[part.name], part.live.first_names
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

    def give_to_models(self, restored: Restored) -> None:
        """Such a run has nothing but tensors of its models."""

    def give_documents(self, restored: Restored) -> None:
        with restored.ranks.agree("restore documents"):
            for receiver in self._receivers:
                receiver.restore(self._documents[receiver.name])
            rng = derive_rng(seed=torch.initial_seed() % 2**63, step=self.step, rank=restored.ranks.rank)
        restored.rng, restored.documents = rng, list(self._documents)
        restored.skipped = [
            "RNG states and data position: not stored in a readable form",
            *self._skipped,
        ]
        casts = [cast.in_words() for load in restored.loads for cast in load.casts]
        restored.differences = [*self._differences, *restored.differences, *casts]


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


def _groups_of(part: TrainedBy, stored: StoredOptimizer) -> list[dict[str, Any]]:
    """The stored settings by group, with this run's names. Refuses the settings of another kind of optimizer."""
    groups = stored.groups_like(part.members, part.live.first_names)
    refuse_other_kind(part.optimizer, groups)
    return groups
