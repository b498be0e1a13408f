"""``load_pretrained``: config, meta model, fully_shard, load. The result of ``from_pretrained``, but sharded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..catalog.open import open_catalog
from ..catalog.records import Catalog, Coded, StoredTensor
from ..catalog.weights import ADAPTER_CONFIG, CONFIG_NAME, Choice, modules_in
from ..dtypes import code_of, named_dtype, torch_dtype
from ..errors import FormatError, PlanError, ShardError, ShardwiseError, SourceError
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..internals.diffusers import build_from_config as build_diffusers
from ..internals.diffusers import is_diffusers_model, note_path
from ..internals.sentence_transformers import (
    has_parameters,
    is_sentence_class,
    on_meta,
    put_transformer,
    transformer_in,
)
from ..internals.transformers import (
    build_from_config,
    default_conversions,
    kept_in_fp32,
    kept_in_fp32_of_class,
)
from ..limits import (
    MAX_BYTES_PER_STORED,
    MAX_MODULES,
    MAX_MODULES_PER_TENSOR,
    MIN_TENSOR_BYTES,
    brief,
    leads_out,
    read_shallow_json,
)
from ..models.build import plain_config, refuse_source
from ..models.classes import config_and_class, home_of, in_turn, without_config
from ..models.homes import remember_home
from ..models.hub import Arguments, Found, FromPretrained, Pretrained, find_for_all
from ..models.layers import asked_of, kept_in, kept_in_checkpoint, put_into
from ..models.meta import NotLarger, at_most, meta_init
from ..names import canonical_name, named_tensors
from ..objects import frozen, gc_paused
from ..operations.operation import announced
from ..planning.hub_rules import HubRules, embedding_names, hub_rules, note_conversions
from ..planning.match import GrowRule, Made, Rules, as_stored, growth, matches_any, same_names
from ..planning.plan import IOOptions
from ..quantized.open import dequantized
from ..ranks.ranks import Ranks
from ..sharding.fsdp import ShardPolicy, find_wrapping, shard
from ..storage.records import counting
from ..tensors.live import describe
from ..tensors.tiles import is_identity
from .adapters import attach, combine
from .load import Filling, FillOptions, LoadReport, fill, load, note_base, noted, open_for_all

# ----------------------------------------------------------------------------------------------------
# The source of a model whose layers hold its codes and scales as they are stored: checked, and noted for reports.


def kept_parts(catalog: Catalog) -> Catalog:
    """The catalog, with a note of which tensors are codes and what goes with them. Pure.

    Raises as :func:`.open` does: parts that are missing, surplus or of the wrong shape, or that contradict the config.
    """
    if catalog.has_module_names:
        return catalog
    return replace(catalog, kept=tuple(dequantized(catalog).coded.values()))


def as_stored_in(catalog: Catalog, rules: Rules, layers: Mapping[str, Any]) -> Rules:
    """The rules for a model on meta whose ``layers`` (:class:`.KeptLayer`, by path) take stored tensors bit for bit.

    Gives packed zero points the shape in which they are stored. Raises :class:`PlanError` with every tensor that is stored in another
    dtype or shape than its layer holds.
    """
    held = {f"{path}.{name}": (layer, name) for path, layer in layers.items() for name in layer.stored_dtypes}
    made = list(rules.resolve(catalog.tensors))
    problems = []
    for one in made:
        found = held.get(one.target) or held.get(canonical_name(one.target))
        if found is not None and (problem := _misfit(one, *found)) is not None:
            problems.append(f"{one.target!r}: {problem}")
    if problems:
        raise PlanError(
            f"{catalog.root}: {len(problems)} tensors can't be kept as they are stored; use quantized='dequantize'",
            tuple(problems),
        )
    return replace(rules, resolve=lambda _: made)


def refuse_policy(model: Any, mesh: DeviceMesh, policy: ShardPolicy) -> None:
    """Raises :class:`ShardError` for a policy by which FSDP2 would cast stored codes (it casts float8, too), or could not gather them.

    ``model``: on meta, not sharded yet.
    """
    held = kept_in(model)
    if not held:
        return
    if policy.mixed_precision is not None and policy.mixed_precision.param_dtype is not None:
        raise ShardError(
            f"ShardPolicy(mixed_precision=…) casts parameters, and {next(iter(held))!r} and {len(held) - 1} other layers hold "
            f"stored codes and scales, which must not be cast; leave it out: the plain parameters have the dtype of dtype="
        )
    if mesh.device_type != "cpu":
        return
    for candidate, own in find_wrapping(model, policy).groups:
        if {p.dtype for p in own} and all(p.is_floating_point() and p.element_size() == 1 for p in own):
            raise ShardError(
                f"{candidate.path!r} would be an FSDP2 group of float8 codes alone, which gloo can't gather; leave out "
                f"ShardPolicy(block_classes=…), so that they are gathered with their block"
            )


def _misfit(made: Made, layer: Any, name: str) -> str | None:
    """Why a layer can't hold a tensor; None if it can."""
    wanted = getattr(layer, name)
    if name == "weight_zero_point" and made.dtype == "I32" and len(made.shape) == wanted.dim():
        # compressed-tensors packs them when it saves, and not on meta.
        layer.take_shape(name, torch_dtype(made.dtype), made.shape)
        return None
    dtype, shape = code_of(wanted.dtype), tuple(wanted.shape)
    is_exact = made.dtype == dtype or (dtype == "F32" and made.dtype in ("BF16", "F16") and "scale" in name)
    if is_exact and made.shape == shape:
        return None
    return f"is stored as {made.dtype} {list(made.shape)}; the layer holds {dtype} {list(shape)}"


# ----------------------------------------------------------------------------------------------------
# The source of a model that holds codes: its weights as blocks, kept as they are stored or quantized while they are read.

_PLAIN = frozenset({"F16", "BF16", "F32"})


def in_codes(catalog: Catalog, rules: Rules, layers: Mapping[str, Any]) -> tuple[Catalog, Rules]:
    """Catalog and rules for a model whose ``layers`` (:class:`.ShardedLinear4bit`, by path) hold blocks. Pure.

    Raises :class:`PlanError` with every weight that can't be had as blocks.
    """
    weights = {f"{path}.weight": layer for path, layer in layers.items()}
    coded: dict[str, Coded] = {}
    made: list[Made] = []
    problems: list[str] = []
    for one in rules.resolve(catalog.tensors):
        layer = weights.get(one.target) or weights.get(canonical_name(one.target))
        if layer is None:
            made.append(one)
            continue
        found = _as_blocks(one, layer, catalog)
        if isinstance(found, str):
            problems.append(f"{one.target!r}: {found}")
        elif found is None:
            made.append(one)
        else:
            coded[found.path] = found
            made.append(as_stored(found.tensor, one.target))
    if problems:
        raise PlanError(
            f"{catalog.root}: {len(problems)} weights can't be taken as 4-bit codes", tuple(problems)
        )
    names = {one.tensor.name for one in coded.values()}
    kept = {path: one for path, one in catalog.coded.items() if one.tensor.name not in names}
    tensors = {**catalog.tensors, **{one.tensor.name: one.tensor for one in coded.values()}}
    catalog = replace(catalog, tensors=tensors, coded={**kept, **coded})
    return catalog, replace(rules, resolve=lambda _: made)


def _as_blocks(made: Made, layer: Any, catalog: Catalog) -> Coded | str | None:
    """A layer's weight in blocks; None if it is stored so already (in a checkpoint), or the reason why it can't be had."""
    from ..quantized.bitsandbytes import encoded, joined  # which a plain load doesn't need

    blocks = layer.blocks
    if (made.dtype, made.shape) == ("U8", blocks.stored_shape):
        return None
    stored = catalog.tensors[made.sources[0]]
    shape = blocks.shape[::-1] if layer.is_transposed else blocks.shape
    if len(made.sources) > 1 or len(made.tiles) != 1 or not is_identity(made.tiles[0], stored.shape):
        return f"is made from {len(made.sources)} stored tensors by a conversion; leave it out by llm_int8_skip_modules"
    one = catalog.coded.get(stored.chunks[0].path) if stored.chunks else None
    if one is not None:
        found = joined(one, blocks.dtype)
        if found is None or found[0] != blocks:
            got = (
                one.rule.format
                if found is None
                else f"{found[0].quant_type.upper()} {list(found[0].shape)} in blocks of {found[0].block}"
            )
            return f"is stored as {got}; the model expects {blocks.quant_type.upper()} {list(blocks.shape)} in blocks of {blocks.block}"
        return found[1]
    if stored.shape != shape or stored.dtype not in _PLAIN:
        return f"is stored as {stored.dtype} {list(stored.shape)}; expected floating point {list(shape)}"
    return encoded(stored, blocks, is_transposed=layer.is_transposed)


# ----------------------------------------------------------------------------------------------------
# Locates what a call of ``load_pretrained`` names: a model, a model with an adapter in its directory, or an adapter alone.


@frozen
class Located:
    """The directory of a base model on this rank, and the request for it."""

    request: Pretrained
    """With the adapter that ``from_pretrained`` would load, and with the path of the base model."""
    found: Found


def locate(request: Pretrained, asked: Arguments, ranks: Ranks) -> Located:
    """The base model and the adapter that ``from_pretrained`` would load from ``request.path``.

    An ``adapter_config.json`` there names an adapter: of the model in the same local directory if it has a
    ``config.json``, otherwise of the base model that the file names. ``request.adapter`` decides if it is given; an
    empty mapping takes the base alone.

    Every rank must call it. Raises as :func:`.find_for_all` does; :class:`SourceError` for a base that is not found.
    """
    found = find_for_all(request.path, asked.hub, ranks, with_code=request.trust_remote_code)
    if request.adapter is not None:
        return Located(request, found)
    with ranks.agree("look for an adapter"):
        has_adapter, is_checkpoint = (
            os.path.isfile(os.path.join(found.directory, name)) for name in (ADAPTER_CONFIG, MANIFEST_NAME)
        )
        if not has_adapter or is_checkpoint:
            return Located(request, found)
        base = _base_named(request, found)
    request = replace(request, adapter=found.directory)
    if base is None:
        return Located(request, found)
    try:
        of_base = find_for_all(base, asked.hub, ranks, with_code=request.trust_remote_code)
    except SourceError as error:
        raise _no_base(found.directory, base, str(error)) from error
    with ranks.agree("look for the adapter's base"):
        if of_base.lent is None and not os.path.isdir(of_base.directory):
            raise _no_base(found.directory, base, "no such directory here")
    return Located(replace(request, path=base), of_base)


def choice_of(request: Pretrained, asked: Arguments, directory: str) -> Choice:
    """Which of several models in ``directory`` a load takes, by its arguments and the config of its class."""
    given = request.config, request.auto_class
    if request.config is None and not holds_config(directory):
        return asked.hub.choice  # whoever opens the weights says whether there is anything at all
    config, _ = config_and_class(directory, *given, trust_remote_code=request.trust_remote_code)
    return replace(asked.hub.choice, config=config)


def holds_config(directory: str) -> bool:
    """Whether a local directory, or the model's directory in a checkpoint, has a ``config.json``."""
    return os.path.isfile(os.path.join(home_of(directory), CONFIG_NAME))


def _base_named(request: Pretrained, found: Found) -> str | None:
    """The base model that an adapter's config names; None if it is the model in the adapter's directory."""
    directory = found.directory
    if found.lent is not None:
        raise SourceError(
            "has an adapter in it, and adapters are read from local directories that every rank has; copy it, or load the "
            "base alone by adapter={}",
            path=found.lent,
        )
    # By transformers' rule a model of the hub with an adapter in it is the adapter alone.
    is_local = os.path.exists(request.path)
    if is_local and os.path.isfile(os.path.join(directory, CONFIG_NAME)):
        return None
    file = os.path.join(directory, ADAPTER_CONFIG)
    document = read_shallow_json(file)
    base = document.get("base_model_name_or_path") if isinstance(document, dict) else None
    if not isinstance(base, str) or not base:
        raise SourceError(
            f"is an adapter alone, and its {ADAPTER_CONFIG} names no base model; give the base: load_pretrained(BASE, "
            f"adapter={os.fspath(request.path)!r})",
            path=directory,
        )
    return base


def _no_base(directory: str, base: str, why: str) -> SourceError:
    return SourceError(
        f"is an adapter alone, of the base model {base!r} ({ADAPTER_CONFIG}), which can't be found: {why}; give the "
        f"base that you have: load_pretrained(BASE, adapter={directory!r})",
        path=directory,
    )


# ----------------------------------------------------------------------------------------------------
# ``load_pretrained``: config → meta model → fully_shard → load. The result of ``from_pretrained``, but sharded.

_log = logging.getLogger(__name__)


def load_pretrained(
    path: str | os.PathLike[str],
    mesh: DeviceMesh | None = None,
    *,
    policy: ShardPolicy | None = None,
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
    device: torch.device | str | None = None,
    io: IOOptions | None = None,
    verify: Literal["cover", "digest"] | None = None,
    return_report: bool = False,
    **options: Unpack[FromPretrained],
) -> Any:
    """Build the transformers or diffusers model at ``path`` on meta, shard it over ``mesh``, and load its weights into the shards.

    Returns the model that ``from_pretrained`` would return (eval mode, generation config, ``name_or_path``, dtype), sharded with FSDP2.
    Call :func:`load_report` for the report. No rank ever holds more than its shards and the staging buffer. The random number
    generators and torch's settings aren't touched.

    Args:
        path: a local directory with ``config.json`` and safetensors files, or the id of a model on the Hugging Face hub, which is read from
            the local cache (missing files are downloaded once per host, see ``options``), or the URL of a directory in an object store. If
            there are several candidates for the weights, it uses the one that ``from_pretrained`` would; the report and a warning
            name the others.
        mesh: 1-D (FSDP) or 2-D (HSDP: replicate, shard). None: not sharded; each rank gets the full model.
        policy: how to wrap the model; see :class:`ShardPolicy`.
        dtype: ``"auto"`` (the config's dtype, otherwise the stored one; for diffusers, float32, as in its ``from_pretrained``), a dtype,
            or its name. Parts that the class keeps in fp32 stay so.
        auto_class: an Auto class or model class. Default: the config's ``architectures[0]``; for diffusers, its ``_class_name``.
            ``SentenceTransformer`` loads all modules of its folder.
        config: a config to use instead of the stored one (for diffusers, a dict), or the directory of one.
        trust_remote_code: run the Python files in the directory for the model's classes (``auto_map``). Ranks that share transformers' module
            cache import them one after another.
        key_mapping: renames before those of the model's class, as for :func:`shardwise.load`.
        allow_unused, allow_missing: patterns as for :func:`shardwise.load`, in addition to those that the model class declares
            (``_keys_to_ignore_on_load_*``, stored copies of non-persistent buffers).
        vocab_size: number of tokens of the model, if it needs more than are stored. It replaces the config's number. If a tensor with as
            many rows is stored with fewer, it's grown by ``"mean"``, unless ``grow`` says otherwise.
        grow: as for :func:`shardwise.load`: for tensors with more rows than stored, pattern → ``"mean"`` or ``"init"``.
        adapter: a PEFT (LoRA) config, the directory of an adapter, or a mapping of adapter names to either, the active one first. The
            result is then a ``PeftModel`` around the sharded base. Its adapters are trainable; adapters without a directory
            are initialized by PEFT's own rule. None: the adapter that ``path`` itself contains (``adapter_config.json``), as in
            ``from_pretrained``. ``{}``: no adapter. A diffusers model gets adapters as from its ``add_adapter`` and ``set_adapter``: it isn't
            wrapped, and only the active adapter is trainable. It also takes what a pipeline's ``save_lora_weights`` wrote.
        quantized: ``"dequantize"``: quantized weights are dequantized. ``"keep"``: the codes and scales of FP8, compressed-tensors and
            bitsandbytes 4-bit sources are kept as they are, 1/N on each rank. A ``BitsAndBytesConfig`` (4-bit): plain weights are
            quantized as they are read. Weights kept in codes are frozen; see :class:`.KeptLayer` and :class:`.ShardedLinear4bit`. Needs
            the method's library.
        seed: seed for initialized parameters, whose values are the same at every world size.
        device: device of the shards. Default: the mesh's device type; ``"cpu"`` with CPU offload.
        io: staging memory and time limits.
        verify: as for :func:`shardwise.load`.
        return_report: return ``(model, report)`` instead of the model.
        options: as for ``from_pretrained``: ``attn_implementation``, ``experts_implementation``, ``torch_dtype`` (the old name of
            ``dtype``), ``subfolder``, ``variant``, ``use_safetensors``; for the hub, ``revision``, ``token``, ``cache_dir``,
            ``local_files_only``, ``force_download``.

    Every rank of the default process group must call it. Raises the errors of :func:`shardwise.load`,
    :class:`UnsupportedConversionError` for stored tensors or a quantization that can't be converted yet, and
    :class:`TypeError` for any other ``from_pretrained`` argument, with its replacement.
    """
    request = Pretrained.of(locals())
    chosen = policy or ShardPolicy()

    def wrap(model: Any) -> tuple[str, ...]:
        if mesh is not None:
            refuse_policy(model, mesh, chosen)
            shard(model, mesh, chosen)
        return chosen.exclude

    if device is None and (chosen.cpu_offload or mesh is None):
        device = "cpu"
    filling = FillOptions(io=io or IOOptions(), device=device, seed=seed, verify=verify)
    if is_sentence_class(auto_class):
        model, report = _load_modules(request, wrap, filling)
    else:
        model, report = load_wrapped(request, wrap, filling)
    return (model, report) if return_report else model


def _load_modules(
    request: Pretrained, wrap: Callable[[Any], tuple[str, ...]], filling: FillOptions
) -> tuple[Any, LoadReport]:
    """A sentence-transformers model, built by its own class on meta; then each module is loaded from its folder.

    FSDP2 can't wrap that library's own module classes, so their children are wrapped. The report covers the transformers model.
    """
    ranks = Ranks.current(timeout_s=filling.io.timeout_s)
    with ranks.agree("check arguments"):
        asked = request.understood()
    found = find_for_all(request.path, asked.hub, ranks, with_code=request.trust_remote_code)
    with ranks.agree("build the modules"):
        if found.lent is not None:
            raise SourceError(
                "is a sentence-transformers model, which must be a local directory on every rank; copy it to every host",
                path=found.lent,
            )
        root = found.directory
        model = on_meta(request.auto_class, root, request.dtype, trust_remote_code=request.trust_remote_code)
        parts = [
            (os.path.join(root, listed.folder), module)
            for listed, module in zip(modules_in(root), model.children(), strict=True)
            if has_parameters(module)
        ]
    options = {**request.options, "subfolder": None}
    reports = []
    for folder, module in parts:
        if (inner := transformer_in(module)) is not None:
            own = replace(request, path=folder, auto_class=type(inner[1]), options=options, with_modules=True)
            loaded, report = load_wrapped(own, wrap, filling)
            put_transformer(module, inner[0], loaded)
            reports.append(report)
            continue
        with ranks.agree("shard the modules"):
            plain = [name for child in module.children() if has_parameters(child) for name in wrap(child)]
        load(module, folder, io=filling.io, device=filling.device, verify=filling.verify, allow_plain=plain)
    model.eval()
    return model, reports[0]


@announced("load")
@gc_paused()
def load_wrapped(
    request: Pretrained, wrap: Callable[[Any], tuple[str, ...]], filling: FillOptions
) -> tuple[Any, LoadReport]:
    """:func:`load_pretrained`, sharded by ``wrap``. It takes the model on meta and returns ``allow_plain``."""
    ranks = Ranks.current(timeout_s=filling.io.timeout_s)
    with ranks.agree("check arguments"):
        asked = request.understood()
    with counting() as looks:
        located = locate(request, asked, ranks)
        request, directory, lent, catalog = located.request, located.found.directory, located.found.lent, None
        if lent is not None:
            with ranks.agree("read the config"):
                choice = choice_of(request, asked, directory)
            catalog = open_for_all(lent, ranks, choice=choice)
    known = None
    if request.trust_remote_code:
        given = request.config, request.auto_class
        known = in_turn(ranks, lambda: config_and_class(directory, *given, trust_remote_code=True))
    prepared: Prepared

    def build() -> Filling:
        nonlocal prepared
        prepared = prepare(request, asked, directory, known, catalog)
        options = replace(filling, allow_plain=wrap(prepared.model))
        return Filling(describe(prepared.model), prepared.catalog, prepared.rules, options)

    report = fill(build, ranks)
    with ranks.agree("finish model"):
        base = prepared.base
        base.eval()
        if not is_diffusers_model(base) and base.can_generate():
            base.generation_config = _generation_config(base, directory)
        note_conversions(base, prepared.conversions())
        prepared.model.eval()
    note_base(prepared.model, prepared.catalog, report, ranks)
    return prepared.model, noted(prepared.model, report.after(looks))


@frozen
class Prepared:
    """A model on meta, its source, and the rules that turn stored tensors into its own."""

    base: Any
    model: Any
    """``base``, or the ``PeftModel`` around it."""
    catalog: Catalog
    rules: Rules
    conversions: Callable[[], list[Any]]
    """The conversions that a later ``save_pretrained`` must invert."""


def prepare(
    request: Pretrained,
    asked: Arguments,
    directory: str,
    known: tuple[Any, Any] | None = None,
    catalog: Catalog | None = None,
    base: Any = None,
) -> Prepared:
    """The part of a load before sharding, which a plan and a load share. Rank-local.

    ``asked``: ``request.understood()``. ``directory``: the model's files. ``known``: config and class, if the model's own
    code is imported already. ``catalog``: its weights, where they lie elsewhere. ``base``: the model on meta, if it is built already.
    """
    given = request.config, request.auto_class
    is_unknown = request.config is None and not holds_config(directory) and not without_config(directory)
    if catalog is None and is_unknown:
        open_catalog(
            directory, choice=asked.hub.choice
        )  # says what is there instead of a model, if that is known
    config, model_class = known or config_and_class(
        directory, *given, trust_remote_code=request.trust_remote_code
    )
    choice = replace(asked.hub.choice, config=config, with_modules=request.with_modules)
    catalog = catalog or open_catalog(directory, choice=choice)
    if asked.implementations and isinstance(config, dict):
        raise TypeError(
            f"diffusers' models take no {next(iter(asked.implementations))[1:]}=; call model.set_attention_backend(…) after the load"
        )
    for field, value in asked.implementations.items():
        setattr(config, field, value)
    settings = asked_of(request.quantized, config, catalog, directory)
    config = plain_config(config, catalog, directory, given=request.config is not None)
    if base is None or request.vocab_size is not None:
        config = _with_tokens(config, request.vocab_size)
        base = _build(config, model_class, directory, catalog, asked.dtype)
    layers = {} if settings is None else put_into(base, settings, base.dtype)
    kept = kept_in(base)
    catalog = kept_parts(catalog) if kept else dequantized(catalog, lambda: named_tensors(base))
    _note_path(base, os.fspath(request.path))
    hub = hub_rules(base, request.key_mapping)
    rules = with_callers(hub, catalog, request.allow_unused, request.allow_missing)
    embeddings = embedding_names(base)  # before PEFT renames them
    grow = growth(request.grow or {})
    rules = replace(rules, embeddings=lambda: embeddings, grow=grow, vocab_size=request.vocab_size)
    if kept:
        rules = as_stored_in(catalog, rules, kept)
    elif layers:
        catalog, rules = in_codes(catalog, rules, layers)
    inverted = _conversions_of_checkpoint(base, hub, catalog, directory) if catalog.has_module_names else None
    model = base
    if request.adapter is not None and request.adapter != {}:
        model, adapters = attach(base, request.adapter)
        catalog, rules = combine(describe(model), catalog, rules, adapters, key_mapping=request.key_mapping)
    if settings is not None and not kept:
        base.config.quantization_config = settings
    return Prepared(base, model, catalog, rules, lambda: hub.used() if inverted is None else inverted)


def _with_tokens(config: Any, vocab_size: int | None) -> Any:
    """The config with another number of tokens, in its text part; as it is for None. Raises :class:`ValueError` if it has no such number."""
    if vocab_size is None:
        return config
    part: Any = None if isinstance(config, dict) else config.get_text_config()
    if not isinstance(getattr(part, "vocab_size", None), int):
        raise ValueError(
            f"vocab_size={vocab_size}: the config ({type(config).__name__}) has no number of tokens"
        )
    part.vocab_size = vocab_size
    return config


def with_callers(
    hub: HubRules, catalog: Catalog, allow_unused: Sequence[str], allow_missing: Sequence[str]
) -> Rules:
    """The rules of a model's class, plus the caller's declarations. A checkpoint has module names already."""
    # Resolved now, while the model in the rules is still unsharded.
    made = (same_names if catalog.has_module_names else hub.resolve)(catalog.tensors)
    return Rules(
        resolve=lambda _: made,
        allow_unused=lambda stored, target: (
            "caller" if matches_any(stored, allow_unused) else hub.allow_unused(stored, target)
        ),
        allow_missing=lambda name: "caller" if matches_any(name, allow_missing) else hub.allow_missing(name),
        caller_declares=True,
    )


def build_meta(
    path: str | os.PathLike[str],
    catalog: Catalog | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    auto_class: Any = None,
    config: Any = None,
    trust_remote_code: bool = False,
) -> Any:
    """The model at ``path`` with its parameters on meta and its buffers real, with the dtypes of ``from_pretrained``.

    Rank-local; allocates buffers only. Raises :class:`UnsupportedConversionError` for a quantized config.
    """
    directory, given = os.fspath(path), config is not None
    config, model_class = config_and_class(path, config, auto_class, trust_remote_code=trust_remote_code)
    config = plain_config(config, catalog, directory, given=given)
    model = _build(config, model_class, directory, catalog, dtype)
    if catalog is not None and (settings := kept_in_checkpoint(config, catalog)) is not None:
        put_into(model, settings, model.dtype)
    elif catalog is not None:
        refuse_source(catalog, lambda: named_tensors(model))
    return model


def _build(
    config: Any, model_class: Any, directory: str, catalog: Catalog | None, dtype: torch.dtype | str
) -> Any:
    """The model of ``config``, which its class may change; see :func:`build_meta`."""
    file = os.path.join(home_of(directory), "config.json")
    chosen = _dtype_of(dtype, config, catalog, file)
    try:
        with meta_init(), _as_large_as_stored(catalog, file):
            if isinstance(config, dict):
                model = build_diffusers(model_class, config, chosen)
            elif hasattr(model_class, "from_config"):  # an Auto class; the code was trusted or refused before
                model = model_class.from_config(config, dtype=chosen, trust_remote_code=False)
            else:
                model = build_from_config(model_class, config, chosen)
    except (ShardwiseError, MemoryError):
        raise
    except Exception as error:
        # Model classes may raise anything for wrong values in a config.
        library = "diffusers" if isinstance(config, dict) else "transformers"
        raise FormatError(
            f"{library} can't build a model from this config: {type(error).__name__}: {error}", path=file
        ) from error
    _note_path(model, directory)
    remember_home(model, home_of(directory))
    if isinstance(config, dict):
        _cast_as_diffusers(model, chosen)
        return model
    is_kept = kept_in_fp32(model, chosen)  # by the class: T5's wo in fp16, routers, …
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):  # still on meta
        if tensor.is_floating_point() and is_kept(name):
            tensor.data = tensor.data.to(torch.float32)
    return model


def _cast_as_diffusers(model: Any, dtype: torch.dtype) -> None:
    """Give what is stored of a model the dtypes of diffusers' ``from_pretrained``: fp32 where the class says so, else ``dtype``."""
    is_kept = kept_in_fp32_of_class(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if is_kept(name) else dtype)


def _note_path(model: Any, path: str) -> None:
    """Note where a model comes from, where its library's ``from_pretrained`` does."""
    if is_diffusers_model(model):
        note_path(model, path)
    else:
        model.config.name_or_path = model.name_or_path = path


@contextmanager
def _as_large_as_stored(catalog: Catalog | None, file: str) -> Iterator[None]:
    """Refuse, before it is built, a model with far more parts than the source has tensors, or with far larger ones."""
    if catalog is None:
        yield
        return
    most = MAX_MODULES + MAX_MODULES_PER_TENSOR * len(catalog.tensors)
    refusal = FormatError(
        f"describes a model with more than {most} modules, parameters and buffers, but the source only has "
        f"{len(catalog.tensors)} tensors; check the numbers of layers",
        path=file,
    )
    most_bytes = max(MIN_TENSOR_BYTES, MAX_BYTES_PER_STORED * sum(t.nbytes for t in catalog.tensors.values()))
    too_large = FormatError(
        f"describes a tensor of more than {most_bytes} bytes, which is {MAX_BYTES_PER_STORED} times what the source holds; "
        f"see the sizes in it",
        path=file,
    )
    with at_most(most, refusal), NotLarger(most_bytes, too_large):
        yield


def _dtype_of(dtype: torch.dtype | str, config: Any, catalog: Catalog | None, file: str) -> torch.dtype:
    """The dtype that ``from_pretrained(dtype=…)`` would choose."""
    if dtype != "auto":
        found = named_dtype(dtype)
        if found is None:
            raise ValueError(f"dtype must be 'auto', a torch dtype or its name, got {dtype!r}")
        return found
    if isinstance(config, dict):
        return torch.float32  # diffusers' default, whatever is stored
    if getattr(config, "dtype", None) is not None:
        declared = named_dtype(config.dtype)
        if declared is None:
            raise FormatError(f"its dtype {brief(config.dtype)} is none of torch's", path=file)
        return declared
    for stored in (catalog.tensors if catalog else {}).values():
        if stored.dtype in ("F32", "BF16", "F16", "F64"):
            return torch_dtype(stored.dtype)
    return torch.float32


def _conversions_of_checkpoint(meta_model: Any, hub: HubRules, catalog: Catalog, directory: str) -> list[Any]:
    """The conversions that a later ``save_pretrained`` must invert for a model from a checkpoint (module names)."""
    known = read_manifest(directory).hub_tensors if catalog.kind == "checkpoint" else {}
    recorded = known.get("model")
    if recorded is None:
        return default_conversions(meta_model)
    hub.resolve({name: StoredTensor(name, "F32", shape, ()) for name, shape in recorded.items()})
    return hub.used()


def _generation_config(model: Any, directory: str) -> Any:
    """The stored generation config, or the one derived from the model's config."""
    from transformers import GenerationConfig

    # Diffusion models have their own class.
    cls = getattr(model, "generation_config_class", GenerationConfig)
    folder = home_of(directory)
    file = os.path.join(folder, "generation_config.json")
    if os.path.isfile(file):
        return _read_generation_config(cls, folder, file)
    try:
        return cls.from_model_config(model.config)
    except NotImplementedError:
        return cls()


def _read_generation_config(cls: Any, folder: str, file: str) -> Any:
    document = read_shallow_json(file, "generation config")
    try:
        if not isinstance(document, dict):
            raise TypeError("not a JSON object")
        if leads_out(folder, file):
            return cls.from_dict(_known_fields(cls, document, file))
        return cls.from_pretrained(folder, local_files_only=True)
    except MemoryError:
        raise
    except Exception as error:  # the class raises errors of many types for wrong fields
        raise FormatError(
            f"not a generation config that transformers can read: {type(error).__name__}: {brief(str(error))}",
            path=file,
        ) from error


def _known_fields(cls: Any, document: dict[str, Any], file: str) -> dict[str, Any]:
    """The class's own fields of a document that is a link out of its directory: they get into what is written for the model."""
    known = vars(cls()).keys()
    if unknown := sorted(document.keys() - known):
        _log.warning(
            "%s: is a link to a file outside its directory, so %s, which %s doesn't have, are left out. If the model needs them, "
            "replace the link with the file",
            file,
            ", ".join(map(brief, unknown[:20])),
            cls.__name__,
        )
    return {name: value for name, value in document.items() if name in known}
