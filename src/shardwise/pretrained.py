"""``load_pretrained``: config → meta model → fully_shard → load. What ``from_pretrained`` gives, only sharded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .catalog import Catalog
from .catalog.open import open_catalog
from .dist import Ranks
from .errors import FormatError, ShardwiseError, SourceError
from .loading import _init_rules, fill
from .parallelize import ShardPolicy, shard
from .place.meta_init import meta_init
from .plan import IOOptions
from .proof.report import LoadReport
from .recipe.match import Rules, matches_any, same_names
from .recipe.record import remember_home
from .recipe.transformers import HubRules, hub_rules

__all__ = ["build_meta", "load_pretrained"]


def load_pretrained(
    path: str | os.PathLike[str],
    mesh: DeviceMesh | None = None,
    *,
    policy: ShardPolicy | None = None,
    dtype: torch.dtype | str = "auto",
    auto_class: Any = None,
    config: Any = None,
    key_mapping: Mapping[str, str] | None = None,
    unused: Sequence[str] = (),
    init: Mapping[str, str] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    io: IOOptions | None = None,
) -> tuple[Any, LoadReport]:
    """Build the transformers model at ``path`` on meta, shard it over ``mesh`` and fill the shards.

    Returns the model as ``from_pretrained`` would (eval mode, generation config, ``name_or_path``,
    dtype), sharded by FSDP2, and the report of the load. No rank ever holds more than its shards and
    the staging; RNG state and torch settings are untouched.

    Args:
        path: local directory with ``config.json`` and safetensors files.
        mesh: 1-D (FSDP) or 2-D (HSDP: replicate, shard). None: not sharded, the whole model on each rank.
        policy: how to wrap; see :class:`ShardPolicy`.
        dtype: ``"auto"`` (as the config says, else as stored), a dtype or its name.
        auto_class: a transformers Auto class or model class. Default: the config's ``architectures[0]``.
        config: a config object to use instead of the stored one.
        key_mapping: further renames, regex → replacement, as ``from_pretrained`` takes them.
        unused, init: declarations as for :func:`shardwise.load`; what the model class itself declares
            (``_keys_to_ignore_on_load_*``, stored copies of non-persistent buffers) is added.
        seed: for what is initialised: same values at every world size.
        device: where shards lie. Default: the mesh's device type; ``"cpu"`` with CPU offload.
        io: staging and time limits.

    Every rank of the default process group must call it. Raises as :func:`shardwise.load` does;
    :class:`UnsupportedConversionError` names stored tensors whose conversion is not supported yet.
    """
    io = io or IOOptions()
    policy = policy or ShardPolicy()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    with ranks.agree("build model"):
        catalog = open_catalog(path)
        model = build_meta(path, catalog, dtype=dtype, auto_class=auto_class, config=config)
        declared = _init_rules(init)
        hub = hub_rules(model, key_mapping)
        rules = with_callers(hub, catalog, unused, tuple(declared))
        if mesh is not None:
            shard(model, mesh, policy)
    if device is None and (policy.cpu_offload or mesh is None):
        device = "cpu"
    report = fill(model, catalog, rules, device=device, io=io, ranks=ranks, seed=seed, ignored=policy.ignored)
    with ranks.agree("finish model"):
        _finish(model, path, hub)
    return model, report


def with_callers(
    hub: HubRules, catalog: Catalog, unused: Sequence[str] = (), init: Sequence[str] = ()
) -> Rules:
    """The rules of a model's class, with what the caller declares added. A checkpoint has module names already."""
    # Resolved at once, while the model that the rules hold is still unsharded.
    made = (same_names if catalog.kind == "checkpoint" else hub.resolve)(catalog.tensors)
    return Rules(
        resolve=lambda _: made,
        unused=lambda stored, target: "caller" if matches_any(stored, unused) else hub.unused(stored, target),
        init=lambda name: "caller" if matches_any(name, init) else hub.init(name),
    )


def build_meta(
    path: str | os.PathLike[str],
    catalog: Catalog | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    auto_class: Any = None,
    config: Any = None,
) -> Any:
    """The model at ``path`` with its parameters on meta and its buffers real, as ``from_pretrained`` would type it.

    Rank-local; allocates buffers only.
    """
    directory = os.fspath(path)
    if config is None:
        config = read_config(directory)
    if auto_class is None:
        auto_class = _class_of(config, directory)
    chosen = _dtype_of(dtype, config, catalog)
    try:
        with meta_init():
            build = auto_class.from_config if hasattr(auto_class, "from_config") else auto_class._from_config
            model = build(config, dtype=chosen)
    except (ShardwiseError, MemoryError):
        raise
    except Exception as error:
        # Model classes fail with whatever comes up when a config holds the wrong values.
        raise FormatError(
            f"transformers can't build a model from this config: {type(error).__name__}: {error}",
            path=os.path.join(directory, "config.json"),
        ) from error
    model.config.name_or_path = directory
    model.name_or_path = directory
    remember_home(model, _home_of(directory))
    _keep_in_fp32(model, chosen)
    return model


def _home_of(directory: str) -> str:
    """Where config and tokenizer lie: the directory itself, or the model's of a checkpoint."""
    nested = os.path.join(directory, "model")
    has_own = os.path.isfile(os.path.join(directory, "config.json"))
    return nested if not has_own and os.path.isfile(os.path.join(nested, "config.json")) else directory


def read_config(directory: str) -> Any:
    """The transformers config of a local directory. Raises :class:`SourceError` or :class:`FormatError`."""
    from transformers import AutoConfig

    file = os.path.join(directory, "config.json")
    if not os.path.isdir(directory):
        raise SourceError("no such directory; give a local model directory", path=directory)
    if not os.path.isfile(file):
        nested = os.path.join(directory, "model")
        if os.path.isfile(os.path.join(nested, "config.json")):
            return read_config(nested)
        raise SourceError("no config.json; a transformers model directory has one", path=directory)
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        # Config classes check their fields with errors of many kinds, some not derived from ValueError.
        raise FormatError(f"not a config that transformers can read: {error}", path=file) from error


def _class_of(config: Any, directory: str) -> Any:
    import transformers

    names = getattr(config, "architectures", None) or []
    for name in names if isinstance(names, (list, tuple)) else ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if found is not None:
            return found
    raise FormatError(
        f"config names architectures {names}, none of which transformers {transformers.__version__} has; "
        f"give auto_class=",
        path=os.path.join(directory, "config.json"),
    )


def _dtype_of(dtype: torch.dtype | str, config: Any, catalog: Catalog | None) -> torch.dtype:
    """The dtype that ``from_pretrained(dtype=…)`` would settle on."""
    from .dtypes import torch_dtype

    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"dtype must be 'auto', a torch dtype or its name, got {dtype!r}")
        return found
    if getattr(config, "dtype", None) is not None:
        declared = config.dtype
        return getattr(torch, declared) if isinstance(declared, str) else declared  # type: ignore[no-any-return]
    for stored in (catalog.tensors if catalog else {}).values():
        if stored.dtype in ("F32", "BF16", "F16", "F64"):
            return torch_dtype(stored.dtype)
    return torch.float32


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Modules that the class keeps in fp32 (T5's ``wo`` in fp16, routers, …) get fp32 parameters, still on meta."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, _, _ = build_glob_alternation(list(plan))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and pattern.search(name):
            tensor.data = tensor.data.to(torch.float32)


def _finish(model: Any, path: str | os.PathLike[str], rules: HubRules) -> None:
    """What ``from_pretrained`` does last: eval mode, generation config, the conversions that a later save inverts."""
    model.eval()
    if model.can_generate():
        model.generation_config = _generation_config(model, os.fspath(path))
    model._weight_conversions = [c for c in rules.conversions if c.was_used()]


def _generation_config(model: Any, directory: str) -> Any:
    """The stored generation config, or the one that follows from the model's config."""
    from transformers import GenerationConfig

    kind = getattr(
        model, "generation_config_class", GenerationConfig
    )  # a class of its own for diffusion models
    for folder in (directory, os.path.join(directory, "model")):
        if os.path.isfile(os.path.join(folder, "generation_config.json")):
            return kind.from_pretrained(folder, local_files_only=True)
    try:
        return kind.from_model_config(model.config)
    except NotImplementedError:
        return kind()
