"""PEFT adapters in a load: opens their directories, refuses unsupported ones, and gives them initial values."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ..catalog.records import Catalog, StoredTensor
from ..catalog.safetensors import catalog_of_safetensors
from ..catalog.torch_files import catalog_of_torch_file
from ..catalog.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ..errors import FormatError, PlanError, SourceError
from ..internals.diffusers import LORA_METADATA, LORA_NAME, is_diffusers_model, lora_config, lora_prefix
from ..internals.peft import (
    adapted_model,
    adapter_configs,
    add_adapter,
    base_of,
    expressions_in,
    inject_adapter,
    lora_layers,
)
from ..internals.regex import check_patterns
from ..internals.torch import local_tensor
from ..internals.transformers import is_transformers_model
from ..limits import MAX_ADAPTER_RANK, brief, cause, parse_json, read_shallow_json, refuse_deep
from ..models.classes import Rule
from ..models.layers import blocks_in, kept_in
from ..models.meta import meta_init
from ..names import children, own_parameter
from ..objects import frozen
from ..planning.hub_rules import adapter_tensors, meta_instance, resolve_adapter, wrapped_names, wrapped_rules
from ..planning.match import Made, Rules, renaming
from ..tensors.boxes import LocalBox
from ..tensors.live import LiveModel

# ----------------------------------------------------------------------------------------------------
# Initial values of LoRA adapters, by PEFT's own rules.
#
# ``lora_A`` and ``lora_B`` come from ``reset_lora_parameters``, which runs on a meta copy of the model like any other
# rule (see :mod:`..models.rules`). DoRA's magnitudes are the norms of the *loaded* base weights, because ``B`` is zero
# at first. They are computed last, from this rank's rows if it holds whole rows.

#: Values of ``init_lora_weights`` whose rule only draws, without looking at weights or data.
SEEDED_INITS = (True, "gaussian")

T = TypeVar("T")

#: Rows of a weight whose norms are computed at a time.
_ROWS = 256


def adapter_rules(model: nn.Module) -> Iterator[Rule]:
    """PEFT's call for each layer and adapter of a model (or of a meta copy) whose rule can be repeated."""
    configs = adapter_configs(model)
    for _, layer in lora_layers(model):
        for adapter in layer.scaling:
            rule = configs[adapter].init_lora_weights
            if rule in SEEDED_INITS:
                yield Rule(layer, partial(layer.reset_lora_parameters, adapter, rule))


def without_rule(model: nn.Module) -> dict[int, str]:
    """Parameters, by id, of adapters whose rule can't be repeated, each with the reason."""
    found: dict[int, str] = {}
    for adapter, config in adapter_configs(model).items():
        rule = getattr(config, "init_lora_weights", None)
        if rule not in SEEDED_INITS:
            reason = (
                f"init_lora_weights={rule!r} of adapter {adapter!r} can't give the same values at every "
                f"world size; load it from a directory"
            )
            for _, layer in lora_layers(model):
                found |= dict.fromkeys(map(id, _own(layer, adapter)), reason)
    return found


def _own(layer: Any, adapter: str) -> Iterator[nn.Parameter]:
    """What an adapter adds to a layer."""
    for name, container in children(layer):
        if name == "base_layer":
            continue
        held = dict(children(container)).get(adapter)
        parameter = own_parameter(container, adapter)
        if held is not None:
            yield from held.parameters()
        elif parameter is not None:
            yield parameter


# ----------------------------------------------------------------------------------------------------
# DoRA


@frozen
class Magnitude:
    """The magnitudes of one layer and adapter, and the weight whose norms are their initial values."""

    dora: Any
    layer: Any
    adapter: str

    @property
    def drawn_with(self) -> torch.Tensor:
        """The parameter ``B``, which has to be zero for the weight's norms to be the magnitudes."""
        linear: Any = dict(children(self.layer.lora_B)).get(self.adapter)
        found: torch.Tensor = self.layer.lora_embedding_A[self.adapter] if linear is None else linear.weight
        return found

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter to fill."""
        found: torch.Tensor = self.dora.weight
        return found

    def fill(self, boxes: tuple[LocalBox, ...]) -> None:
        """Write this rank's part of the norms.

        Memory: a block of rows. If a norm includes other ranks' elements (a transposed weight, a convolution, another
        sharding), the whole weight: it is gathered over its mesh, and every rank must call this.
        """
        weight: torch.Tensor = self.layer.get_base_layer().weight
        with torch.no_grad():
            if self._rows_are_local(weight):
                rows = self._norms_by_row(local_tensor(weight))
                for local in boxes:
                    local_tensor(self.tensor)[local.slices].copy_(rows[local.slices])
                return
            full = weight.full_tensor() if isinstance(weight, DTensor) else weight
            norms = self._norms(full)
            for local in boxes:
                local_tensor(self.tensor)[local.slices].copy_(norms[local.box.slices])

    def _norms(self, weight: torch.Tensor) -> torch.Tensor:
        norms: torch.Tensor = self.dora.get_weight_norm(weight, weight.new_zeros(()), 0.0)
        return norms

    def _norms_by_row(self, weight: torch.Tensor) -> torch.Tensor:
        """Norms in blocks of one fixed shape: a kernel's order of summation may depend on the shape."""
        block = weight.new_zeros((_ROWS, weight.shape[1]))
        norms = weight.new_empty(weight.shape[:1])
        for begin in range(0, weight.shape[0], _ROWS):
            rows = weight[begin : begin + _ROWS]
            block[: len(rows)].copy_(rows)
            norms[begin : begin + _ROWS].copy_(self._norms(block)[: len(rows)])
        return norms

    def _rows_are_local(self, weight: torch.Tensor) -> bool:
        """Whether each rank holds whole rows for its magnitudes. The same on every rank."""
        target = self.tensor
        if self.dora.fan_in_fan_out or weight.ndim != 2 or target.ndim != 1:
            return False
        if not isinstance(weight, DTensor) or not isinstance(target, DTensor):
            return not isinstance(weight, DTensor) and not isinstance(target, DTensor)
        # Cut along dim 0 in the same way, both have the same rows on this rank.
        by_rows = all(isinstance(p, Replicate) or getattr(p, "dim", None) == 0 for p in weight.placements)
        return by_rows and (weight.device_mesh, weight.placements) == (target.device_mesh, target.placements)


def magnitudes(model: nn.Module) -> dict[int, Magnitude]:
    """Every magnitude parameter of a live model, by id."""
    return {
        id(dora.weight): Magnitude(dora, layer, adapter)
        for _, layer in lora_layers(model)
        for adapter, dora in layer.lora_magnitude_vector.items()
    }


# ----------------------------------------------------------------------------------------------------
# Adapters in a load: opens their directories, refuses unsupported ones, and merges catalog and rules with the base.

CONFIG_NAME = ADAPTER_CONFIG
WEIGHTS_NAME, TORCH_WEIGHTS_NAME = ADAPTER_WEIGHTS

#: Values of ``init_lora_weights`` that do not change the base's weights.
_BASE_IS_KEPT = (*SEEDED_INITS, False, "eva", "orthogonal", "mica")


#: Settings that add tensors of other kinds, tie them, or change the base.
_UNSUPPORTED = (
    "arrow_config",
    "ensure_weight_tying",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "velora_config",
)

#: Settings that change an adapter's result although its tensors may still fit.
_SETTINGS = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora")


@frozen
class AdapterFiles:
    """An adapter's directory: its config, and its tensors by their names in the file, without those of a pipeline's component."""

    directory: str
    catalog: Catalog
    config: Any
    config_file: str
    """The file with the config."""


def open_adapter(directory: str | os.PathLike[str], base: nn.Module | None = None) -> AdapterFiles:
    """The files of an adapter of ``base``. As :func:`_of_peft` or, for a model of diffusers, :func:`_of_diffusers`."""
    root = os.fspath(directory)
    return _of_diffusers(root, base) if base is not None and is_diffusers_model(base) else _of_peft(root)


def _of_diffusers(path: str, base: nn.Module) -> AdapterFiles:
    """Config and headers of an adapter that a pipeline's ``save_lora_weights``, ``save_lora_adapter`` or PEFT wrote: a file, or its directory.

    As with ``load_lora_adapter``, a file may have adapters of several components, and without metadata the config follows from the
    tensors. Rank-local; no payload is read. Raises as :func:`_of_peft`.
    """
    names = (LORA_NAME, WEIGHTS_NAME)
    files = [path, *(os.path.join(path, name) for name in names)]
    file = next((file for file in files if os.path.isfile(file)), None)
    if file is None:
        if os.path.isdir(path):
            raise SourceError(f"no {LORA_NAME} and no {WEIGHTS_NAME}", path=path)
        raise SourceError("no such directory; give the local directory or file of an adapter", path=path)
    catalog = catalog_of_safetensors(file)
    prefix = next((p for p in (lora_prefix(base), "base_model.model") if _below(p, catalog.tensors)), "")
    tensors = _below(prefix, catalog.tensors)
    root = os.path.dirname(file)
    if os.path.isfile(beside := os.path.join(root, CONFIG_NAME)) and LORA_METADATA not in catalog.metadata:
        return AdapterFiles(root, replace(catalog, tensors=tensors), read_adapter_config(root), beside)
    strange = [name for name in tensors if not _OF_PEFT.search(name)]
    if strange and LORA_METADATA not in catalog.metadata:
        raise FormatError(
            f"{strange[0]!r} is not a name of PEFT's; load it into the pipeline by load_lora_weights in one process, save it there by "
            f"save_lora_weights, and give the saved file",
            path=file,
        )
    config = _config_in(catalog, prefix, tensors, file)
    return AdapterFiles(root, replace(catalog, tensors=tensors), config, file)


#: The names of a LoRA's tensors in the files of PEFT and of those that follow it.
_OF_PEFT = re.compile(r"\.lora_(A|B|magnitude_vector)(\.|$)")


def _below(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """What is below a prefix, without it. Without a prefix, everything."""
    start = f"{prefix}." if prefix else ""
    return {name.removeprefix(start): value for name, value in named.items() if name.startswith(start)}


def _config_in(catalog: Catalog, prefix: str, tensors: Mapping[str, StoredTensor], file: str) -> Any:
    """The config of an adapter's file, from its metadata, else from its tensors. Raises :class:`FormatError`."""
    _import_peft()
    settings = None
    if LORA_METADATA in catalog.metadata:
        what = "adapter's config"
        settings = refuse_deep(parse_json(catalog.metadata[LORA_METADATA], file, what), file, what)
        settings = _below(prefix, settings) if isinstance(settings, dict) else settings
        _check_config(settings, file)
    try:
        return lora_config({name: t.shape for name, t in tensors.items()}, settings)
    except Exception as error:  # as from PEFT's config classes
        raise FormatError(
            f"not a config that PEFT can read: {type(error).__name__}: {brief(str(error))}", path=file
        ) from error


def _of_peft(root: str) -> AdapterFiles:
    """Config and headers of a directory that PEFT or :func:`shardwise.export_hf` wrote. Rank-local; no payload is read.

    Raises :class:`SourceError` naming a missing file, :class:`FormatError` for one that can't be read.
    """
    file = os.path.join(root, CONFIG_NAME)
    weights = os.path.join(root, WEIGHTS_NAME)
    if not os.path.isdir(root):
        raise SourceError("no such directory; give the local directory of an adapter", path=root)
    if not os.path.isfile(file):
        raise SourceError(f"no {CONFIG_NAME}; PEFT writes one next to an adapter's tensors", path=root)
    if os.path.isfile(weights):
        catalog = catalog_of_safetensors(weights)
    elif os.path.isfile(pickled := os.path.join(root, TORCH_WEIGHTS_NAME)):
        catalog = catalog_of_torch_file(pickled)
    else:
        raise SourceError(f"no {WEIGHTS_NAME} and no {TORCH_WEIGHTS_NAME}", path=root)
    return AdapterFiles(root, catalog, read_adapter_config(root), file)


def read_adapter_config(root: str) -> Any:
    """The PEFT config in a directory. Rank-local. Raises :class:`FormatError` if it can't be read."""
    peft, file = _import_peft(), os.path.join(root, CONFIG_NAME)
    _check_config(read_shallow_json(file, "not a config that PEFT can read: it"), file)
    try:
        return peft.PeftConfig.from_pretrained(root)
    except Exception as error:
        # Config classes raise errors of many types for wrong fields, some not derived from ValueError.
        raise FormatError(
            f"not a config that PEFT can read: {type(error).__name__}: {brief(str(error))}", path=file
        ) from error


def _check_config(document: Any, file: str) -> None:
    """Raise :class:`FormatError` for settings that would cost PEFT more memory than a model."""
    if not isinstance(document, dict):
        raise FormatError("not a config that PEFT can read: not a JSON object", path=file)
    patterns, ranks = document.get("rank_pattern"), [document.get("r", 1)]
    ranks += list(patterns.values()) if isinstance(patterns, dict) else []
    for rank in ranks:
        if type(rank) is not int or not 0 < rank <= MAX_ADAPTER_RANK:
            raise FormatError(f"rank {brief(rank)} is not a number from 1 to {MAX_ADAPTER_RANK}", path=file)


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError("adapters need PEFT: pip install 'shardwise[peft]'") from error
    return peft


@frozen
class Adapters:
    """Where the adapters of a load come from."""

    files: Mapping[str, AdapterFiles]
    """Those that are read from a directory, by name."""
    seeded: frozenset[str] = frozenset()
    """Those that get PEFT's initial values."""


def attach(base: nn.Module, adapter: Any) -> tuple[Any, Adapters]:
    """Let PEFT wrap a base model on meta. Returns the ``PeftModel`` and where its adapters come from.

    A model of diffusers is returned itself, with the adapters inside, as its own ``add_adapter`` puts them there. ``adapter`` is a PEFT config, a directory, or a mapping of adapter names to either; the first becomes the active
    one. An adapter from a directory can be trained. Allocates and draws nothing; copies the caller's configs.

    Rank-local. Raises as :func:`open_adapters` does.
    """
    peft = _import_peft()
    files, own = _opened(base, dict(adapter) if isinstance(adapter, Mapping) else {"default": adapter})
    configs: dict[str, Any] = {}
    for name in (*files, *own):
        configs[name] = copy.deepcopy(files[name].config if name in files else own[name])
        if name in files:
            configs[name].inference_mode = False
    if isinstance(adapter, Mapping):  # the first is the active one
        configs = {name: configs[name] for name in adapter}
    _refuse(base, configs, files)
    model: Any = None
    for name, config in configs.items():
        _check_patterns(base, config, files[name].config_file if name in files else None)
        trained_on = config.base_model_name_or_path
        config.base_model_name_or_path = None  # PEFT then takes the base's without a warning
        try:
            with meta_init():
                if is_diffusers_model(base):
                    model = base
                    inject_adapter(model, name, config)
                elif model is None:
                    model = peft.get_peft_model(base, config, adapter_name=name)
                else:
                    add_adapter(model, name, config)
        except Exception as error:
            if name not in files:
                raise  # the caller's own config
            # PEFT may raise anything for a setting of the wrong type.
            raise FormatError(
                f"PEFT can't add this adapter to {type(base).__name__} ({cause(error)})",
                path=files[name].config_file,
            ) from error
        if trained_on is not None:
            model.peft_config[name].base_model_name_or_path = trained_on
    if model is base:
        base.set_adapter(next(iter(configs)))  # add_adapter makes the last one the active one
    return model, Adapters(files, frozenset(own))


def _check_patterns(base: nn.Module, config: Any, file: str | None) -> None:
    """Raise :class:`FormatError` for expressions of a config that PEFT would match forever with the base's modules."""
    names = [name for name, _ in base.named_modules()]
    for setting, form, patterns in expressions_in(config):
        check_patterns(patterns, names, setting, file, form)


def _opened(base: nn.Module, given: Mapping[str, Any]) -> tuple[dict[str, AdapterFiles], dict[str, Any]]:
    """What the caller gave by name: directories, opened, and configs."""
    config_class = _import_peft().PeftConfig
    files: dict[str, AdapterFiles] = {}
    configs: dict[str, Any] = {}
    for name, source in given.items():
        if isinstance(source, config_class):
            configs[name] = source
        elif isinstance(source, str | os.PathLike):
            files[name] = open_adapter(source, base)
        else:
            raise TypeError(f"adapter {name!r} must be a PEFT config or a directory, got {source!r}")
    return files, configs


def open_adapters(model: nn.Module, adapter: Any) -> Adapters:
    """Where the adapters of a live ``PeftModel`` come from, or of a diffusers model with adapters inside.

    ``adapter`` is a directory or a PEFT config (for a model with one adapter), or a mapping of adapter names to either.
    A directory is read; a config stands for PEFT's initial values, and must agree with the model's own. Rank-local; no
    payload is read.

    Raises :class:`SourceError` and :class:`FormatError` as :func:`open_adapter` does, :class:`PlanError` naming
    every adapter that can't be loaded, with the reason.
    """
    peft = adapted_model(model)
    if peft is None:
        raise TypeError(
            f"adapter=: {type(model).__name__} is not a PeftModel; wrap the base with peft.get_peft_model() inside "
            f"sw.meta_init()"
        )
    configs = adapter_configs(peft)
    if isinstance(adapter, Mapping):
        given = dict(adapter)
    elif len(configs) == 1:
        given = {next(iter(configs)): adapter}
    else:
        raise ValueError(
            f"the model has the adapters {', '.join(map(repr, configs))}: give adapter={{name: directory}}"
        )
    unknown = sorted(given.keys() - configs.keys())
    if unknown:
        raise ValueError(
            f"adapter= names {', '.join(map(repr, unknown))}; the model has {', '.join(map(repr, configs))}"
        )
    files, own = _opened(base_of(peft), given)
    _refuse(base_of(peft), {name: configs[name] for name in given}, files, own)
    return Adapters(files, frozenset(own))


# ----------------------------------------------------------------------------------------------------
# Unsupported adapters


def _refuse(
    base: nn.Module,
    configs: Mapping[str, Any],
    files: Mapping[str, AdapterFiles],
    own: Mapping[str, Any] | None = None,
) -> None:
    """Raise :class:`PlanError` for what has no sharded form, or is not what ``configs``, the model's, say."""
    problems = []
    quantized = getattr(getattr(base, "config", None), "quantization_config", None)
    is_ours = bool(blocks_in(base) or kept_in(base))
    if not is_ours and (quantized is not None or getattr(base, "hf_quantizer", None) is not None):
        problems.append(
            f"the base {type(base).__name__} is quantized ({type(quantized).__name__}), and can't be sharded; load it by "
            f"load_pretrained(…, quantized='keep')"
        )
    for name, config in configs.items():
        problems += [f"adapter {name!r}: {reason}" for reason in _obstacles(config, name in files)]
        if is_ours and getattr(config, "use_dora", False):
            problems.append(f"adapter {name!r}: use_dora=True needs plain weights, and the base holds codes")
        if name in files:
            place = f"in {files[name].config_file}"
            problems += _differences(name, config, files[name].config, place)
        elif own is not None:
            problems += _differences(name, config, own[name], "in adapter=")
    if problems:
        raise PlanError("adapters that can't be loaded into a sharded model", tuple(problems))


def _obstacles(config: Any, has_files: bool) -> list[str]:
    """Settings of an adapter's config that have no sharded form."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        return [f"its method is {kind}; only LoRA (with DoRA, modules_to_save, biases) can be loaded"]
    found = [f"{setting}= is not supported" for setting in _UNSUPPORTED if getattr(config, setting, None)]
    rule = config.init_lora_weights or False
    if rule not in _BASE_IS_KEPT:
        found.append(
            f"init_lora_weights={rule!r} changes the base's weights, so it was not trained with the stored ones; "
            f"convert it to plain LoRA with PEFT (path_initial_model_for_weight_conversion=)"
        )
    elif rule not in SEEDED_INITS and not has_files:
        found.append(
            f"init_lora_weights={rule!r} can't give the same values at every world size; use True or "
            f"'gaussian', or initialize it with PEFT in one process, save it there, and pass its directory"
        )
    return found


def _differences(name: str, config: Any, given: Any, place: str) -> list[str]:
    """Settings in which the adapter that the caller gave is not the one that the model holds."""
    found = [
        (setting, getattr(given, setting, None), getattr(config, setting, None)) for setting in _SETTINGS
    ]
    patterns = getattr(given, "alpha_pattern", None)
    if patterns:  # PEFT adds to an empty one where layers were fused since the adapter was trained
        found.append(("alpha_pattern", patterns, config.alpha_pattern))
    return [
        f"adapter {name!r}: {setting} is {stored!r} {place}, but {live!r} in the model"
        for setting, stored, live in found
        if stored != live
    ]


# ----------------------------------------------------------------------------------------------------
# One catalog, one set of rules


def combine(
    live: LiveModel,
    base: Catalog,
    rules: Rules,
    adapters: Adapters,
    *,
    key_mapping: Mapping[str, str] | None = None,
) -> tuple[Catalog, Rules]:
    """Base and adapters as one source for one plan and one proof of cover. Pure.

    ``live`` is the ``PeftModel``, ``rules`` are those of the base model. Stored names of an adapter's tensors get its
    name as prefix (``default:base_model.model.…``), because several files may hold equal names. Trained copies
    (``modules_to_save``) of an adapter without files get the base's values. If an adapter's file holds a tensor of the
    base (biases, embeddings), the file's one is loaded. PEFT stores a trained embedding twice if the vocabulary was
    resized: the second copy is declared unused. ``key_mapping`` renames an adapter's tensors, too.
    """
    files = adapters.files
    outer = wrapped_rules(live, rules)
    meta_base = meta_instance(live.base) if files and is_transformers_model(live.base) else None
    brought: dict[str, str] = {}
    made: list[Made] = []
    tensors = dict(base.tensors)
    expected_in: dict[str, str] = {}
    for name, adapter in files.items():
        held = (held for held, _ in adapter_tensors(live, name).values())
        expected_in |= dict.fromkeys(held, adapter.catalog.files[0].path)
        stored = {n: replace(t, name=f"{name}:{n}") for n, t in adapter.catalog.tensors.items()}
        tensors |= {t.name: t for t in stored.values()}
        for one in resolve_adapter(live, name, meta_base, renaming(key_mapping or {}))(stored):
            made.append(one)
            brought[one.target] = name
    replaced: dict[str, str] = {}
    for one in outer.resolve(base.tensors):
        if one.target in brought:
            replaced |= dict.fromkeys(one.sources, f"adapter {brought[one.target]!r} (has its own copy)")
            one = replace(one, target=f"{one.target} (of the base)")  # not the name of any module
        made.append(one)
    seeded = _seeded(live, adapters.seeded)

    def allow_unused(stored: str, target: str) -> str | None:
        if stored.replace(".modules_to_save.", ".") in tensors and ".modules_to_save." in stored:
            return "PEFT (a second copy)"
        return replaced.get(stored) or outer.allow_unused(stored, target)

    own = [file for f in files.values() for file in f.catalog.files]
    loaded = {file.path for file in own}
    roots = dict.fromkeys((base.root, *(f.directory for f in files.values())))
    catalog = replace(
        base,
        root=" and ".join(roots),
        tensors=tensors,
        files=(*base.files, *own),
        ignored_files=tuple(n for n in base.ignored_files if os.path.join(base.root, n) not in loaded),
    )
    rules = replace(
        outer,
        resolve=lambda _: made,
        expected_in=expected_in,
        allow_unused=allow_unused,
        allow_missing=lambda name: outer.allow_missing(name) or seeded.get(name),
    )
    return catalog, rules


def _seeded(live: LiveModel, adapters: Collection[str]) -> dict[str, str]:
    """The tensors that these adapters add to the model, each with the rule that initializes it."""
    of_the_base = wrapped_names(live).bases
    return {
        held: f"PEFT (init_lora_weights of {name!r})"
        for name in adapters
        for held, _ in adapter_tensors(live, name).values()
        if held not in of_the_base
    }
