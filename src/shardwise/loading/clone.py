"""``clone``: a frozen copy of a live model, shard by shard on the device, without reads, gathers or messages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..dtypes import torch_dtype
from ..errors import LayoutError, ShardError, StateError
from ..internals.peft import has_adapters
from ..internals.transformers import build_from_config, copy_conversions, is_transformers_model
from ..layout.live import LiveModel, describe
from ..layout.model import local_tensor
from ..models.kept import blocks_in, kept_in, put_into
from ..models.memory import materialize
from ..models.meta_init import forget_meta_buffers, meta_init
from ..names import NamedTensor, canonical_name, named_tensors
from ..operations.recorder import phase
from ..ranks.ranks import Ranks
from ..recipe.origin import inherit
from ..sharding.fsdp import shard_alike

__all__ = ["clone"]


def clone(model: nn.Module, *, build: Callable[[], nn.Module] | None = None, timeout_s: float = 300.0) -> Any:
    """Copy ``model`` with its current values into a second model that is sharded the same way, frozen and in eval mode.

    Use it for a reference model, for example. Parameters and all buffers, including non-persistent ones, are copied on their own
    device; ties are kept. ``export_hf`` and ``iter_full_tensors`` treat the clone like ``model``.

    Args:
        build: function that creates the second model, on meta (inside :func:`meta_init`) and wrapped like the first. Default: a
            transformers model of the same class and config, sharded like the first by :func:`shard`, :func:`load_pretrained` or
            ``integrations.accelerate`` (also through ``integrations.trainer``).
        timeout_s: as in :class:`IOOptions`; nothing is read here.

    Every rank of the default process group must call it. Ranks agree through the store, without collectives. Memory: this
    rank's shards once more, with no full tensors and no staging. Raises, on every rank, :class:`StateError` if the model
    can't be built again or the second one differs, :class:`ShardError`, :class:`LayoutError` or :class:`RankError`.
    """
    with phase("clone"), Ranks.current(timeout_s=timeout_s).agree("clone model"):
        live = describe(model)
        second = build() if build is not None else _built_again(live)
        copied = describe(second)
        pairs = _paired(live, copied)
        device = next((local_tensor(t.tensor).device for t, _ in pairs if t.kind == "parameter"), None)
        materialize(copied, device or "cpu")
        with torch.no_grad():
            for given, own in pairs:
                _copy(given, own.refreshed())
        forget_meta_buffers(second)
        inherit(second, model)
        second.requires_grad_(False)
        return second.eval()


def _built_again(live: LiveModel) -> Any:
    """A model on meta of the same class, wrapped in the same way."""
    if has_adapters(live.root):
        raise StateError(
            "a model with PEFT adapters needs no second copy as a reference: use its base, inside "
            "`with model.disable_adapter()`. Else give build="
        )
    inner: Any = live.unwrapped
    if not is_transformers_model(inner):
        raise StateError(
            f"{type(inner).__name__} is not a transformers model, so shardwise can't build a second one. Give build=, a "
            f"function that builds it in shardwise.meta_init() and shards it as the first"
        )
    model_class: Any = live.kind
    try:
        with meta_init():
            second: Any = build_from_config(model_class, copy.deepcopy(inner.config), inner.dtype)
    except MemoryError:
        raise
    except Exception as error:  # the class may need more than a config
        raise StateError(
            f"a second {model_class.__name__} can't be built, because {model_class.__name__}(config) fails "
            f"({type(error).__name__}: {error}); give build="
        ) from error
    layers = blocks_in(inner)
    if layers:
        dtype = torch_dtype(next(iter(layers.values())).blocks.dtype)
        put_into(second, inner.config.quantization_config, dtype)
    given = {t.name: t.tensor for t in live.tensors}
    if kept := kept_in(inner):
        put_into(second, inner.config.quantization_config, next(iter(kept.values())).plain_dtype)
        for path, layer in kept_in(second).items():
            for name in layer.stored_dtypes:
                first = given[canonical_name(f"{path}.{name}")]
                layer.take_shape(name, first.dtype, first.shape)
    for t in named_tensors(second):
        if t.kind == "parameter" and t.name in given:  # some classes keep some in fp32
            t.tensor.data = t.tensor.data.to(given[t.name].dtype)
            t.tensor.requires_grad_(given[t.name].requires_grad)  # shard() groups by it; frozen afterwards
    if not shard_alike(second, inner) and any(isinstance(p, DTensor) for p in given.values()):
        raise ShardError(
            "the model was not sharded by shardwise.shard(), load_pretrained() or shardwise.integrations.accelerate, so "
            "shardwise can't tell how to shard the copy. Give build=, a function that builds it in shardwise.meta_init() and "
            "shards it as the first"
        )
    if hasattr(inner, "generation_config"):
        second.generation_config = copy.copy(inner.generation_config)
    copy_conversions(inner, second)
    second.name_or_path = inner.name_or_path
    return second


def _paired(live: LiveModel, second: LiveModel) -> list[tuple[NamedTensor, NamedTensor]]:
    """The tensors of both, each beside its like. Raises :class:`LayoutError` naming those that are not alike."""
    given, own = ({t.name: t for t in m.tensors} for m in (live, second))
    problems = [f"{name}: in one of the two only" for name in sorted(given.keys() ^ own.keys())]
    pairs = [(t, own[name]) for name, t in given.items() if name in own]
    for t, other in pairs:
        for what, a, b in (
            ("names", t.names, other.names),
            ("shape", tuple(t.tensor.shape), tuple(other.tensor.shape)),
            ("dtype", t.tensor.dtype, other.tensor.dtype),
            ("shards", live.geometries.get(t.name), second.geometries.get(t.name)),
        ):
            if a != b and (t.kind == "parameter" or what == "names"):
                problems.append(f"{t.name}: {what} {a} in the first, {b} in the second")
        if t.tensor.is_meta:
            problems.append(f"{t.name}: on meta in the first; load it before")
    if problems:
        shown = "\n".join(f"  - {p}" for p in problems[:20])
        raise LayoutError(f"{len(problems)} differences between the model and its second:\n{shown}")
    return pairs


def _copy(given: NamedTensor, own: NamedTensor) -> None:
    """Parameters in place: FSDP2 holds on to their memory. Buffers as new tensors: some change their shape as they live."""
    if own.kind == "parameter":
        local_tensor(own.tensor).copy_(local_tensor(given.tensor))
        return
    content = given.tensor.clone()
    for module, attribute in own.owners:
        setattr(module, attribute, content)
