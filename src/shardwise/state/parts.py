"""Parts of objects that hold state: data loaders' parts, gradient scalers, several objects by name."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.data import IterableDataset

from ..dtypes import code_of
from ..errors import FormatError, StateError
from ..internals.torch import local_tensor, scaler_stages
from .beyond import same

# ----------------------------------------------------------------------------------------------------
# The parts of a data loader that keep state between batches: samplers, dataset, collator, and their generators.
#
# For global random generators see :mod:`..rng`.

_TWISTER_WORDS, _PHILOX_WORDS = 624, 4


def parts_of(loader: Any) -> dict[str, Any]:
    """The loader, its dataset and its (nested) samplers, by attribute path, without repeats."""
    found: dict[str, Any] = {"loader": loader, "dataset": loader.dataset}
    if isinstance(loader.dataset, IterableDataset):
        return found  # its sampler is a dummy of torch
    return inner_parts(loader, found, ("sampler", "batch_sampler"))


def all_parts(loader: Any) -> dict[str, Any]:
    """:func:`parts_of`, the datasets inside an iterable dataset, and the collator. For any other object: itself."""
    if not hasattr(loader, "dataset"):
        return {"loader": loader}
    found = parts_of(loader)
    if isinstance(loader.dataset, IterableDataset):
        inner_parts(loader.dataset, found, ("dataset",), "dataset.")
    if (collator := getattr(loader, "collate_fn", None)) is not None:
        found["collate_fn"] = collator
    return found


def inner_parts(
    owner: Any, found: dict[str, Any], names: tuple[str, ...], prefix: str = ""
) -> dict[str, Any]:
    """Add the parts that ``owner`` has under these names, and those in them, to ``found``, without repeats."""
    waiting = [(prefix, owner)]
    while waiting:
        path, owner = waiting.pop(0)
        for name in names:
            part = getattr(owner, name, None)
            if part is not None and not any(part is known for known in found.values()):
                found[path + name] = part
                waiting.append((f"{path}{name}.", part))
    return found


def keeps_workers(loader: Any) -> bool:
    """Whether worker processes live on from epoch to epoch."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "num_workers", 0) > 0


def own_states(loader: Any) -> dict[str, Any]:
    """States of the generators that the loader's parts hold, epoch numbers and seeds; for typed JSON.

    The draws of a sampler that seeds itself for each epoch (Accelerate's) follow from seed and epoch.
    """
    parts = all_parts(loader)
    return {
        "generators": generator_states(parts),
        "epochs": {path: epoch for path, part in parts.items() if (epoch := epoch_of(part)) is not None},
        "seeds": {path: part.initial_seed for path, part in parts.items() if hasattr(part, "initial_seed")},
        **({"orders": changed} if (changed := own_orders(parts)) else {}),
    }


def put_own_states(loader: Any, states: Mapping[str, Any], later: Mapping[str, Any] | None = None) -> None:
    """Give the parts the result of :func:`own_states`. Skips states that no part takes (:func:`unfit_generators`).

    ``later``: the result from a later point, if the parts have already run that far.
    """
    parts = all_parts(loader)
    put_seeds(loader, states["seeds"])
    put_own_orders(parts, states.get("orders", {}), (later or {}).get("orders", ()))
    put_generator_states(parts, states["generators"])
    for path, epoch in states["epochs"].items():
        if path in parts and epoch_of(parts[path]) not in (None, epoch):
            parts[path].set_epoch(epoch)


def generator_states(parts: Mapping[str, Any], known: Iterable[Any] = ()) -> dict[str, Any]:
    """States of the generators that parts hold, but for ``known`` ones, by path; for typed JSON."""
    return {path: _kinds()[type(g)][0](g) for path, g in _generators(parts, known)}


def put_generator_states(parts: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Give parts the result of :func:`generator_states`. Skips states that no part takes (:func:`unfit_states`)."""
    live = dict(_generators(parts))
    for path, state in states.items():
        if path in live and takes(live[path], state):
            _kinds()[type(live[path])][1](live[path], state)


def put_seeds(loader: Any, seeds: Mapping[str, Any]) -> None:
    """Give the parts the seeds of :func:`own_states`."""
    parts = all_parts(loader)
    for path, seed in seeds.items():
        if hasattr(parts.get(path), "initial_seed"):
            parts[path].initial_seed = seed


def unfit_generators(loader: Any, states: Mapping[str, Any]) -> list[str]:
    """:func:`unfit_states` of the loader's parts."""
    return unfit_states(all_parts(loader), states["generators"])


def unfit_states(parts: Mapping[str, Any], stored: Mapping[str, Any], known: Iterable[Any] = ()) -> list[str]:
    """Paths of generators that are only stored, only live, or do not take their stored state."""
    live = dict(_generators(parts, known))
    both = live.keys() & stored.keys()
    return sorted(
        {*(live.keys() ^ stored.keys()), *(path for path in both if not takes(live[path], stored[path]))}
    )


def item_generators(loader: Any) -> dict[str, Any]:
    """States of the generators of dataset and collator, which draw items."""
    held = _generators(all_parts(loader))
    return {p: _kinds()[type(g)][0](g) for p, g in held if p.startswith(("dataset", "collate_fn"))}


def attributes(loader: Any) -> dict[str, str]:
    """Plain attributes of an iterable dataset and of those inside it, as text. They may count items read."""
    found = {}
    for path, part in all_parts(loader).items():
        if path.startswith("dataset") and isinstance(part, IterableDataset):
            for name, value in getattr(part, "__dict__", {}).items():
                found[f"{path}.{name}"] = _described(value)
    return found


def _described(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)[:200]
    kind = type(value).__qualname__
    if isinstance(value, Iterator):
        return f"{kind} that is being read"
    try:
        return f"{kind} of {len(value)}" if isinstance(value, Sized) else kind
    except TypeError:
        return kind


def _generators(parts: Mapping[str, Any], known: Iterable[Any] = ()) -> Iterator[tuple[str, Any]]:
    seen: list[Any] = list(known)
    for path, part in parts.items():
        if hasattr(part, "initial_seed"):
            continue
        held = {"generator": getattr(part, "generator", None), **getattr(part, "__dict__", {})}
        for name, value in held.items():
            if type(value) in _kinds() and not any(value is one for one in seen):
                seen.append(value)
                yield f"{path}.{name}", value


#: By ID of a part that doesn't come from a library: the part, its plain attributes before it ran, and whether it may have run before that.
_FIRST: dict[int, tuple[weakref.ref[Any], dict[str, Any], bool]] = {}
#: More bytes of one attribute are taken for data.
_MOST_BYTES = 64 * 2**20
_ABSENT = object()
_SCALARS = {bool, int, float, str, bytes, type(None)}
_CONTAINERS = {list, tuple, dict, set, frozenset}


def watch_orders(parts: Mapping[str, Any], *, have_run: bool = False) -> None:
    """Record the plain attributes of the user's own samplers, collator and dataset, once. Attributes that iterating changes are state.

    Plain attributes are numbers, text, arrays, and containers of these, up to 64 MiB each. For a dataset, only numbers and text count, because
    anything larger may be a cache. ``have_run``: the parts may have changed already (:func:`unknown_orders`).
    """
    for path, part in _own_parts(parts):
        if id(part) in _FIRST:
            continue
        first = {name: copy.deepcopy(value) for name, value in _plain(path, part)}
        with contextlib.suppress(TypeError):  # a part without weak references isn't watched
            _FIRST[id(part)] = weakref.ref(part, functools.partial(_forget, id(part))), first, have_run


def unknown_orders(parts: Mapping[str, Any]) -> list[str]:
    """The classes of samplers that ran before :func:`watch_orders`."""
    found = [part for path, part in _own_parts(parts) if "sampler" in path]
    return sorted({type(part).__qualname__ for part in found if id(part) in _FIRST and _FIRST[id(part)][2]})


def own_orders(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of what has changed of parts since :func:`watch_orders`, by path: a list that a sampler shuffles in place, for example."""
    watch_orders(parts)
    return {
        f"{path}.{name}": copy.deepcopy(value)
        for path, part in _own_parts(parts)
        if id(part) in _FIRST
        for name, value in _plain(path, part)
        if not same(_FIRST[id(part)][1].get(name, _ABSENT), value)
    }


def put_own_orders(parts: Mapping[str, Any], state: Mapping[str, Any], later: Iterable[str] = ()) -> None:
    """Set attributes of parts to the values from :func:`own_orders`.

    ``later``: attributes that had changed by the time the position was stored. If ``state`` doesn't contain them, they're reset to their first
    values. Raises :class:`StateError` for missing parts, and for attributes that hold another kind of value or can't be set.
    """
    watch_orders(parts)
    own = dict(_own_parts(parts))
    for key in dict.fromkeys((*state, *later)):
        path, _, name = key.rpartition(".")
        part = own.get(path)
        live = getattr(part, name, None)
        value = state.get(key, live)
        if key not in state and id(part) in _FIRST:
            value = _FIRST[id(part)][1].get(name, live)
        if part is None or name.startswith("__") or not (_is_plain(live) and _is_plain(value)):
            raise StateError(
                f"the data position belongs to another loader: it has {key}, a {type(value).__name__}. "
                "Make the loader as in the stored run, or resume without its position"
            )
        if same(live, value):
            continue
        try:
            if not _set_in_place(live, copy.deepcopy(value)):
                setattr(part, name, copy.deepcopy(value))
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise StateError(f"the data position's {key} can't be set: {error}") from error


def _set_in_place(live: Any, value: Any) -> bool:
    """Copy ``value`` into ``live``, because other objects may share it. Returns False if that isn't possible."""
    if type(live) is not type(value):
        return False
    if isinstance(live, list):
        live[:] = value
    elif isinstance(live, (dict, set)):
        live.clear()
        live.update(value)
    elif isinstance(live, (np.ndarray, torch.Tensor)) and (live.dtype, live.shape) == (
        value.dtype,
        value.shape,
    ):
        live[...] = value
    else:
        return False
    return True


def _forget(key: int, _: Any) -> None:
    _FIRST.pop(key, None)


def _own_parts(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    known = ("builtins", "torch.", "torchdata.", "accelerate.", "transformers.", "datasets.", "shardwise.")
    for path, part in parts.items():
        name, kind = path.rpartition(".")[2], type(part)
        is_own = not kind.__module__.startswith(known) and not isinstance(part, IterableDataset)
        if is_own and hasattr(part, "__dict__") and ("sampler" in name or name in ("collate_fn", "dataset")):
            yield path, part


def _plain(path: str, part: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(part).items():
        is_kept = type(value) in _SCALARS if path.endswith("dataset") else _is_plain(value)
        if name != "epoch" and is_kept:
            yield name, value


def _is_plain(value: Any) -> bool:
    return _size(value) <= _MOST_BYTES


def _size(value: Any) -> float:
    """The approximate size of a plain value in bytes; infinite if typed JSON doesn't accept it."""
    kind = type(value)
    if kind in _SCALARS:
        return len(value) if kind in (str, bytes) else 16
    if kind in _CONTAINERS:
        total = 64.0
        for one in value.items() if kind is dict else value:
            total += sum(map(_size, one)) if kind is dict else _size(one)
            if total > _MOST_BYTES:
                return math.inf
        return total
    if kind is np.ndarray:
        return math.inf if value.dtype.hasobject else float(value.nbytes)
    is_dense = kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    if is_dense and value.device.type == "cpu" and not value.requires_grad:
        return float(value.nbytes)
    return math.inf


def _put_numpy(generator: Any, state: Any) -> None:
    """Set a numpy generator. Refuses a position outside its words: numpy would read there unchecked."""
    is_new = isinstance(generator, np.random.Generator)
    live = generator.bit_generator.state if is_new else generator.get_state(legacy=False)
    if not _has_form_of(live, state):
        raise ValueError(f"expected a state of {live['bit_generator']}")
    if not (
        0 <= state["state"].get("pos", 0) <= _TWISTER_WORDS
        and 0 <= state.get("buffer_pos", 0) <= _PHILOX_WORDS
    ):
        raise ValueError("the position is outside of the state")
    if is_new:
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _has_form_of(live: Any, state: Any) -> bool:
    """Whether a state has the keys, types and sizes of the live one."""
    if isinstance(live, dict):
        return (
            isinstance(state, dict)
            and live.keys() == state.keys()
            and all(_has_form_of(value, state[key]) for key, value in live.items())
        )
    if isinstance(live, np.ndarray):
        return isinstance(state, np.ndarray) and (live.dtype, live.shape) == (state.dtype, state.shape)
    return type(live) is type(state) and (not isinstance(live, str) or live == state)


def equal(stored: Any, live: Any) -> bool:
    """``stored == live``, where a damaged document may hold a tensor or an array: neither is ever equal to a number."""
    try:
        return not isinstance(stored, (torch.Tensor, np.ndarray)) and bool(stored == live)
    except (RuntimeError, TypeError, ValueError):  # a list of tensors: their comparison has no single truth
        return False


def takes(generator: Any, state: Any) -> bool:
    """Whether this generator takes the state. Changes nothing: tries it on a new generator of its kind."""
    try:
        if isinstance(generator, torch.Generator):
            trial: Any = torch.Generator(generator.device)
        elif isinstance(generator, np.random.Generator):
            trial = np.random.Generator(type(generator.bit_generator)())
        else:
            trial = type(generator)()
        _kinds()[type(generator)][1](trial, state)
    except (TypeError, ValueError, ArithmeticError, RuntimeError, LookupError, AttributeError):
        return False
    return True


@functools.cache
def _kinds() -> dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]]:
    """Functions that get and set the state of a generator. ``numpy.random`` is imported on the first use of a loader."""
    return {
        torch.Generator: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
        np.random.Generator: (lambda g: g.bit_generator.state, _put_numpy),
        np.random.RandomState: (lambda g: g.get_state(legacy=False), _put_numpy),
        random.Random: (lambda g: g.getstate(), lambda g, state: g.setstate(state)),
    }


def epoch_of(part: Any) -> int | None:
    """The epoch of a sampler or dataset that can be set to another one; None for others."""
    epoch = getattr(part, "epoch", None)
    return epoch if isinstance(epoch, int) and callable(getattr(part, "set_epoch", None)) else None


# ----------------------------------------------------------------------------------------------------
# Refuses to save a gradient scaler except between ``update`` and the next ``unscale_``.


def refuse_unfinished_step(scaler: Any) -> None:
    """Raise :class:`StateError` in the middle of a step of a ``torch.amp.GradScaler``.

    Between ``unscale_`` and ``step`` the scaler knows that gradients are unscaled already, between ``step`` and
    ``update`` whether they were finite. Its ``state_dict`` holds neither.
    """
    stages = scaler_stages(scaler)
    for stage, where in (("UNSCALED", "unscale_ and step"), ("STEPPED", "step and update")):
        if stage in stages:
            raise StateError(
                f"scaler: can't save between {where}, because GradScaler.state_dict() does not record that; save after "
                f"scaler.update()"
            )


# ----------------------------------------------------------------------------------------------------
# Tells one object from several by name: schedulers, loaders and scalers may be given either way.


def is_several(target: Any) -> bool:
    """Whether a part of a training state is several objects by name: a mapping without a state of its own."""
    has_state = hasattr(target, "state_dict") or hasattr(target, "load_state_dict")
    return isinstance(target, Mapping) and not has_state


# ----------------------------------------------------------------------------------------------------
# Refuses tensors that can't be stored directly: expected are dense ones, in real memory, of a safetensors dtype.


def refuse_meta(where: str, tensor: torch.Tensor) -> None:
    """Raise :class:`StateError` naming ``where`` if a tensor has no values."""
    if tensor.is_meta:
        raise StateError(
            f"{where}: is on the meta device and has no values; load or initialize the model before saving"
        )


def why_unstorable(tensor: torch.Tensor) -> str:
    """Why a tensor (the local part of a DTensor) can't be stored, and the way out; empty if it can.

    Accepts tensors on meta, which may be planned but not written: see :func:`refuse_meta`.
    """
    local = local_tensor(tensor)
    if type(local) is not torch.Tensor and (why := _why_not_a(type(local))):
        return why
    if local.is_nested or local.layout is not torch.strided:
        kind = "nested" if local.is_nested else str(local.layout).removeprefix("torch.")
        return (
            f"is a {kind} tensor; expected a dense one. Store it as to_dense(), or as a non-persistent buffer"
        )
    if local.is_quantized:
        return "is a quantized tensor; expected a plain one. Store its int_repr(), scale and zero point"
    if local.is_conj() or local.is_neg():
        return "is a conjugate or negative view; expected its own values. Call resolve_conj().resolve_neg()"
    try:
        code_of(local.dtype)
    except FormatError:
        return f"has the dtype {local.dtype}, which safetensors can't store. Use another dtype"
    return ""


@functools.cache
def _why_not_a(kind: type[torch.Tensor]) -> str:
    """Why no tensor of a class can be stored."""
    if issubclass(kind, UninitializedParameter | UninitializedBuffer):
        return "is lazy and has no shape yet; run the model once before saving"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"is a {kind.__qualname__}, a tensor subclass with its own content, which can't be stored; expected a "
            f"plain tensor. Use one, or keep it outside the TrainState"
        )
    return ""
