"""Finds state of a model beyond parameters, persistent buffers and ``get_extra_state``.

``nn.Module.state_dict`` gives exactly these, unless a class overrides part of it or a hook changes it. Only then each
save calls the model's own ``state_dict``, once; its tensors come as references. The hooks of FSDP2 and activation
checkpointing move no data and start no collective.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import StateError
from ..layout.live import LiveModel
from ..names import NamedTensor, canonical_name, unwrap
from .beyond import (
    Beyond,
    Path,
    StoredOwn,
    differing_leaves,
    leaves_beyond,
    put_leaves,
    split_storable,
    with_leaves,
)
from .places import Places

__all__ = [
    "beyond_model",
    "differences_of_model",
    "give_back_to_model",
    "has_own_loading",
    "make_room",
    "refuse_fsdp1",
]

#: Modules whose hooks only put shards in place and rename keys.
_WRAPPERS = (
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
)
_SAVING = ("state_dict", "_save_to_state_dict"), ("_state_dict_hooks", "_state_dict_pre_hooks")
_LOADING = (
    ("load_state_dict", "_load_from_state_dict"),
    ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def refuse_fsdp1(problem: str | None) -> None:
    """Raise :class:`StateError` for a model that FSDP1 wraps: its flat parameters have no names to be stored under.

    ``problem`` is what :func:`..layout.model.fsdp1_problem` says of it.
    """
    if problem is not None:
        raise StateError(problem)


def has_own_loading(live: LiveModel) -> bool:
    """Whether the model's ``load_state_dict`` does more than that of torch's base class."""
    return _differs_from_torch(live, *_LOADING)


def _differs_from_torch(live: LiveModel, methods: tuple[str, ...], hooks: tuple[str, ...]) -> bool:
    plain: set[type] = set()
    for _, module in live.modules:
        cls = type(module)
        if cls not in plain and any(getattr(cls, n) is not getattr(nn.Module, n) for n in methods):
            return True
        plain.add(cls)
        own = module.__dict__
        if any(n in own for n in methods) or any(
            not _is_wrappers(hook) for n in hooks if own[n] for hook in own[n].values()
        ):
            return True
    return False


def _is_wrappers(hook: Any) -> bool:
    return (getattr(getattr(hook, "hook", hook), "__module__", None) or "").startswith(_WRAPPERS)


def beyond_model(name: str, live: LiveModel) -> Beyond:
    """What a checkpoint of the model has to hold besides its tensors and extra state. Rank-local.

    Calls the model's ``state_dict`` if it may hold more than torch's. Paths begin with the canonical key.
    """
    model = live.root
    if not _differs_from_torch(live, *_SAVING):
        return Beyond()
    try:
        leaves = _leaves(model, live.tensors)
    except Exception as error:
        why = f"{type(model).__qualname__}.state_dict failed: {type(error).__name__}: {error}"
        return Beyond(not_stored={"": f"{name}: its own state is not known ({why})"})
    return split_storable(leaves, name)


def _leaves(model: nn.Module, named: Iterable[NamedTensor]) -> list[tuple[Path, Any]]:
    plain = {alias: t.tensor for t in named if t.persistent for alias in t.names}
    extra = {canonical_name(key) for key in _extra_state_keys(model)}
    own = {canonical_name(k): v for k, v in _own_state(model).items() if canonical_name(k) not in extra}
    own = {**_scales_aside(model), **own}
    return list(leaves_beyond(own, plain, {id(t) for t in plain.values()}))


def _scales_aside(model: nn.Module) -> dict[str, Any]:
    """The scales that bitsandbytes' 4-bit layers would save if a shard had not replaced their weight.

    When they save, these layers look for scales on the weight; when they compute, they keep them in the module.
    """
    found = {}
    for path, module in model.named_modules():
        state = getattr(module, "quant_state", None)
        if state is not None and callable(getattr(state, "as_dict", None)):
            prefix = canonical_name(f"{path}.weight" if path else "weight")
            found.update({f"{prefix}.{key}": value for key, value in state.as_dict(packed=True).items()})
    return found


def _extra_state_keys(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{path}._extra_state" if path else "_extra_state"


def _own_state(model: nn.Module) -> dict[str, Any]:
    """The model's own state dict, as references to the live objects if the model gives references."""
    takes = inspect.signature(model.state_dict).parameters.values()
    can_keep = any(p.name == "keep_vars" or p.kind is inspect.Parameter.VAR_KEYWORD for p in takes)
    with torch.no_grad():
        found = model.state_dict(keep_vars=True) if can_keep else model.state_dict()
    if not isinstance(found, dict):
        raise TypeError(f"it gives a {type(found).__name__}, not a dict")
    return found


def give_back_to_model(own: StoredOwn, live: LiveModel, places: Places) -> list[str]:
    """Let the model take its stored state by its own ``load_state_dict``, beside its present tensors. Rank-local.

    Call it after restoring the model's tensors: it passes the live ones, so torch copies nothing. Tensors in
    ``own`` move to the devices of the live ones. Returns reasons for a failure; raises no error of the model.
    """
    if not (own.leaves or has_own_loading(live)):
        return []
    try:
        now = dict(_leaves(live.root, live.tensors))
        own.leaves[:] = put_leaves(own.leaves, now, places)
        _load(live.root, own.leaves, own.stale(now))
    except Exception as error:
        return [f"{own.name}: its own load_state_dict failed ({type(error).__name__}: {error})"]
    return []


def differences_of_model(own: StoredOwn, live: LiveModel) -> list[str]:
    """One line per value of the model's own state that differs from the stored one. Rank-local."""
    if not (own.leaves or _differs_from_torch(live, *_SAVING)):
        return []
    try:
        now = _leaves(live.root, live.tensors)
        return list(differing_leaves(now, own.leaves, own.not_stored.keys(), own.name))
    except Exception as error:
        return [f"{own.name}: its own state is not known ({type(error).__name__}: {error})"]


def _load(model: nn.Module, stored: list[tuple[Path, Any]], stale: list[Path]) -> None:
    own = _own_state(model)
    raw = {canonical_name(key): key for key in own}
    prefix = _prefix_of_root(model)

    def live_path(path: Path) -> Path:
        return (raw.get(path[0], f"{prefix}{path[0]}"), *path[1:])

    given = with_leaves(own, [(live_path(p), value) for p, value in stored], map(live_path, stale))
    takes = inspect.signature(model.load_state_dict).parameters.values()
    can_be_lax = any(p.name == "strict" or p.kind is inspect.Parameter.VAR_KEYWORD for p in takes)
    with torch.no_grad():
        # A hook may have dropped keys from the state dict; differences_of_model checks afterwards what arrived.
        model.load_state_dict(given, strict=False) if can_be_lax else model.load_state_dict(given)


def _prefix_of_root(model: nn.Module) -> str:
    inner = unwrap(model)
    return next((f"{path}." for path, module in model.named_modules() if module is inner and path), "")


def make_room(live: LiveModel, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Let a model with a loading of its own take stored shapes of plain tensors that are not its own. Rank-local.

    A module may give a buffer the shape of the loaded tensor. Its ``load_state_dict`` gets zeros of the stored shapes,
    which are filled later. What it does not take stays as it is, and the plan names it. Returns whether it was called:
    it may have replaced tensors of the model.
    """
    other = [
        t
        for t in live.stored
        if type(t.tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and not t.tensor.is_meta
        and any(tuple(t.tensor.shape) != shapes[n] for n in t.names if n in shapes)
    ]  # fmt: skip
    if not other or not has_own_loading(live):
        return False
    zeros: list[tuple[Path, Any]] = [
        ((n,), t.tensor.new_zeros(shapes[n])) for t in other for n in t.names if n in shapes
    ]
    with contextlib.suppress(Exception):
        _load(live.root, zeros, [])
    return True
