"""State documents: schedulers' and others' states, checked in form before any document is used."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..dtypes import torch_dtype
from ..errors import FormatError, StateError
from ..format.manifest import Document, Manifest, TensorEntry, document_named
from ..internals.torch import inner_by_torch, scale_function
from ..limits import MAX_COUNT, MAX_TEXT_CHARS, brief, cause
from .beyond import Path, path_text, same
from .data import ResumableLoader
from .low_bit import PARTS, Form, part_name
from .parts import equal, is_several, takes
from .typed_json import FUNCTIONS

# ----------------------------------------------------------------------------------------------------
# Checks the form of every document of a checkpoint, before any document is used.
#
# A document with the wrong form is damaged: :class:`FormatError`. A document with the right form may still not fit the
# live objects, which is another error.


def check_form(documents: Mapping[str, Any], manifest: Manifest, path: str) -> None:
    """Raise :class:`FormatError` naming the first decoded document with a wrong form, and the place in it.

    ``path`` is the checkpoint's.
    """
    for name, value in documents.items():
        meaning = document_named(name, manifest)
        assert meaning is not None, "unknown names are refused where they are read"
        form = _FORMS.get(meaning.kind)
        if form is None:
            continue
        try:
            form(name, value, meaning, manifest)
        except FormatError as error:
            raise FormatError(f"document {name!r}: {error}", path=path) from error


def _step(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    if type(value) is not int or value != manifest.step:
        raise FormatError(f"{where} is {brief(value)}, but the manifest's is {manifest.step}")


def _classes(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    for of, named in _mapping(value, where).items():
        if of != "scheduler" and not of.startswith("extra."):
            raise FormatError(f"{where}: expected the classes of schedulers only, got {brief(of)}")
        _check_texts(named, f"{where}.{of}")


def _check_texts(value: Any, where: str) -> None:
    if not _is_class(value):
        for key, one in _mapping(value, where, of_text=False).items():
            _check_texts(one, f"{where}.{brief(key)}")


def _is_class(value: Any) -> bool:
    """Whether a value may be the name of a class. Errors repeat it."""
    return isinstance(value, str) and len(value) <= MAX_TEXT_CHARS


def _optimizer(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    found = _mapping(value, where)
    unknown = found.keys() - {"class", "model", "groups", "values", "unseen_gradients"}
    if unknown or "class" not in found or not (found["class"] is None or _is_class(found["class"])):
        raise FormatError(f"{where}: expected a class, groups and values, got {brief(found)}")
    if found.get("model", next(iter(manifest.models))) not in list(manifest.models):
        raise FormatError(f"{where}: the model {brief(found['model'])} is not in the checkpoint")
    groups = found.get("groups")
    if not isinstance(groups, list) or not groups:
        raise FormatError(f"{where}.groups: expected a list of groups, got {brief(groups)}")
    for k, group in enumerate(groups):
        _group(group, f"{where}.groups[{k}]")
    for name, states in _mapping(found.get("values"), f"{where}.values").items():
        _mapping(states, f"{where}.values[{brief(name)}]", of_text=False)


def _group(group: Any, where: str) -> None:
    names = _mapping(group, where).get("names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"{where}.names: expected a list of text, got {brief(names)}")
    options = _mapping(group.get("options"), f"{where}.options")
    if "params" in options:  # a group keeps its parameters under this key
        raise FormatError(f"{where}.options: 'params' is not an option")


def _opaque(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    for name, states in _mapping(value, where).items():
        for key, state in _mapping(states, f"{where}[{brief(name)}]", of_text=False).items():
            if not isinstance(state, torch.Tensor):
                raise FormatError(
                    f"{where}[{brief(name)}].{brief(key)}: expected a tensor, got {brief(state)}"
                )


def _low_bit(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    found = _mapping(value, where)
    if found.keys() != {"books", "states", "by_rank"}:
        raise FormatError(f"{where}: expected books, states and by_rank, got {brief(found)}")
    books = _mapping(found["books"], f"{where}.books")
    for name, states in _mapping(found["by_rank"], f"{where}.by_rank").items():
        for state, one in _mapping(states, f"{where}.by_rank[{brief(name)}]").items():
            at = f"{where}.by_rank[{brief(name)}].{brief(state)}"
            _book(at, Form.of_json(one, at), books)
    entries = {
        n: t for tensors in manifest.models.values() for n, t in tensors.items() if meaning.owner in t.states
    }
    for name, states in _mapping(found["states"], f"{where}.states").items():
        for state, one in _mapping(states, f"{where}[{brief(name)}]").items():
            at = f"{where}[{brief(name)}].{brief(state)}"
            form = Form.of_json(one, at)
            if name not in entries:
                raise FormatError(f"{at}: {brief(name)} has no state in the manifest")
            _parts(at, state, form, entries[name], meaning.owner)
            _book(at, form, books)


def _book(where: str, form: Form, books: Mapping[str, Any]) -> None:
    if not form.book:
        return
    held, length = books.get(form.book), form.book_length
    if not isinstance(held, torch.Tensor) or (held.dtype, tuple(held.shape)) != (torch.float32, (length,)):
        raise FormatError(f"{where}: expected a code book {form.book} of {length} numbers, got {brief(held)}")


def _parts(where: str, state: str, form: Form, entry: TensorEntry, optimizer: str) -> None:
    """The stored parts of a state of few bits: their dtypes and shapes follow from its form."""
    grid = form.grid(entry.shape)
    if grid is None:
        raise FormatError(f"{where}: shape {brief(entry.shape)} has no blocks of {form.block} elements")
    for part in PARTS:
        held = entry.states[optimizer].get(part_name(state, part))
        expected = form.dtype_of(part), grid.part_shape(form.elements(part))
        if held is None or held.packed is not None or (held.dtype, entry.shape_of(held)) != expected:
            raise FormatError(f"{where}: its {part} is not in the manifest as {brief(expected)}")


def _buffers(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    entries = manifest.models[meaning.owner]
    for name, content in _mapping(value, where).items():
        entry = entries.get(name)
        if (
            entry is None
            or not isinstance(content, torch.Tensor)
            or (content.dtype, tuple(content.shape)) != (torch_dtype(entry.dtype), entry.shape)
        ):
            raise FormatError(
                f"{where}: {brief(name)} is not a tensor of the model, or has another dtype or shape"
            )


def _own(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    for pair in value if isinstance(value, list) else [None]:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], tuple) and pair[0]):
            raise FormatError(f"{where}: expected pairs of a path and a value, got {brief(pair)}")
        try:
            hash(pair[0])
        except TypeError as error:
            raise FormatError(f"{where}: {brief(pair[0])} is not a path: {cause(error)}") from error


def _texts(where: str, value: Any, *, depth: int) -> None:
    """Mappings in each other to this depth, with text in the innermost ones."""
    for key, one in _mapping(value, where).items():
        at = f"{where}[{brief(key)}]"
        if depth > 1:
            _texts(at, one, depth=depth - 1)
        elif not isinstance(one, str):
            raise FormatError(f"{at}: expected text, got {brief(one)}")


_FORMS: dict[str, Callable[[str, Any, Document, Manifest], object]] = {
    "step": _step,
    "rng": lambda where, value, *_: check_rng(value, where),
    "classes": _classes,
    "optimizer": _optimizer,
    "opaque": _opaque,
    "low_bit": _low_bit,
    "buffers": _buffers,
    "modules": lambda where, value, *_: _mapping(value, where),
    "own": _own,
    "not_stored": lambda where, value, *_: _texts(where, value, depth=2),
    "settings": lambda where, value, *_: _texts(where, value, depth=1),
    "data_settings": lambda where, value, *_: _texts(where, value, depth=1),
}


#: Number of words in a Mersenne twister's state.
_TWISTER_WORDS = 624


def check_rng(value: Any, where: str) -> None:
    """Raise :class:`FormatError` unless ``value`` has the form of a capture of random generators.

    Tries the host's states on new generators. Whether a device takes an accelerator's states is checked elsewhere.
    """
    state = _mapping(value, where)
    python, numpy = (
        _mapping(state.get("python"), f"{where}.python"),
        _mapping(state.get("numpy"), f"{where}.numpy"),
    )
    for name in ("position", "has_gauss"):
        if (
            type(numpy.get(name)) is not int or not 0 <= numpy[name] <= _TWISTER_WORDS
        ):  # numpy would read from this position unchecked
            raise FormatError(
                f"{where}.numpy.{name} is {brief(numpy.get(name))}, expected 0 to {_TWISTER_WORDS}"
            )
    words = (python.get("words"), numpy.get("words"))
    states = _states_of_devices(state.get("accelerator"), f"{where}.accelerator")
    for content in (*words, state.get("torch"), *states):
        if not isinstance(content, torch.Tensor) or content.dtype is not torch.uint8 or content.dim() != 1:
            raise FormatError(f"{where}: expected the bytes of a generator, got {brief(content)}")
    if python.get("gauss_next") is not None and not isinstance(python["gauss_next"], float):
        raise FormatError(f"{where}.python.gauss_next is {brief(python['gauss_next'])}, expected a number")
    try:
        own, keys = (np.frombuffer(w.numpy().tobytes(), "<u4") for w in words)  # type: ignore[union-attr]
        random.Random().setstate((python.get("version"), tuple(own.tolist()), python.get("gauss_next")))
        if len(keys) != _TWISTER_WORDS:
            raise ValueError(f"{len(keys)} words, expected {_TWISTER_WORDS}")
        np.random.RandomState().set_state(
            ("MT19937", keys, numpy["position"], numpy["has_gauss"], numpy.get("cached_gauss"))  # type: ignore[arg-type]
        )
        torch.Generator().set_state(state["torch"])
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise FormatError(f"{where}: random generators reject it ({cause(error)})") from error


def _states_of_devices(accelerator: Any, where: str) -> list[Any]:
    if accelerator is None:
        return []
    found = _mapping(accelerator, where)
    states = found.get("own", found.get("devices"))
    if not isinstance(found.get("type"), str) or not isinstance(states, list):
        raise FormatError(f"{where}: expected a type of device and states, got {brief(found)}")
    return states


def check_position(value: Any, where: str) -> None:
    """Raise :class:`FormatError` unless ``value`` has the form of a :class:`ResumableLoader`'s state, of any version."""
    position = _mapping(value, where)
    if not equal(position.get("version"), 1):
        return  # the loader itself refuses it
    if "sampler" in position:
        _mapping(position["sampler"], f"{where}.sampler")
        return
    _mapping(position.get("loader"), f"{where}.loader")
    for name in ("epoch", "consumed"):
        if type(position.get(name)) is not int or not 0 <= position[name] <= MAX_COUNT:
            raise FormatError(f"{where}.{name} is {brief(position.get(name))}, expected a number from 0")
    paths = _check_parts(position.get("now"), f"{where}.now")
    start = position.get("start")
    if start is not None:
        if _check_parts(start, f"{where}.start") != paths:
            raise FormatError(f"{where}: the loader's parts are not those with which the epoch began")
        check_rng(start.get("rng"), f"{where}.start.rng")
    for holder in (position, start or {"workers_kept": False}):
        if not isinstance(holder.get("workers_kept"), bool):
            raise FormatError(
                f"{where}.workers_kept is {brief(holder.get('workers_kept'))}, expected true or false"
            )


def _check_parts(value: Any, where: str) -> tuple[list[str], list[str]]:
    """In the states of a loader's parts: the paths of parts with generators, and of parts with epochs."""
    generators = _mapping(_mapping(value, where).get("generators"), f"{where}.generators")
    epochs = _mapping(value.get("epochs"), f"{where}.epochs")
    if not all(takes(torch.Generator(), state) for state in generators.values()):
        raise FormatError(f"{where}.generators: expected states of generators")
    if not all(type(epoch) is int for epoch in epochs.values()):
        raise FormatError(f"{where}.epochs: expected numbers")
    _mapping(value.get("orders", {}), f"{where}.orders")
    return sorted(generators), sorted(epochs)


def _mapping(value: Any, where: str, *, of_text: bool = True) -> dict[Any, Any]:
    if not isinstance(value, dict) or (of_text and not all(isinstance(key, str) for key in value)):
        raise FormatError(f"{where}: expected a mapping{' with text as keys' * of_text}, got {brief(value)}")
    return value


# ----------------------------------------------------------------------------------------------------
# The contents of learning rate schedulers: inner schedulers, stored with them, and functions, which are not stored.


def unwrapped(scheduler: Any) -> Any:
    """The scheduler inside a wrapper without state of its own (Accelerate's); otherwise the object itself."""
    inner = getattr(scheduler, "scheduler", None)
    return inner if hasattr(inner, "state_dict") else scheduler


def class_text(scheduler: Any) -> str:
    """The classes of a scheduler and of its inner ones: ``SequentialLR(LinearLR, StepLR)``."""
    text = _class_text(scheduler, ())
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 1]}…"


def _class_text(scheduler: Any, above: tuple[int, ...]) -> str:
    scheduler = unwrapped(scheduler)
    above = (*above, id(scheduler))  # an inner scheduler may refer to its outer one
    inside = ", ".join(_class_text(s, above) for s in inner_schedulers(scheduler) if id(s) not in above)
    return f"{type(scheduler).__qualname__}({inside})" if inside else type(scheduler).__qualname__


def inner_schedulers(holder: Any) -> Iterator[LRScheduler]:
    """The schedulers in the attributes of a scheduler, or of an object around one."""
    for value in getattr(holder, "__dict__", {}).values():
        several = isinstance(value, list | tuple)
        yield from (one for one in (value if several else [value]) if isinstance(one, LRScheduler))


def inner_states(holder: Any) -> Iterator[tuple[Path, LRScheduler]]:
    """Schedulers in an object, each with the path of its state in the object's. Skips those whose state is not found.

    Calls ``state_dict`` of the object and of these schedulers.
    """
    inner = list(inner_schedulers(holder))
    own = holder.state_dict() if inner else {}
    met: set[Path] = set()
    for one in inner:
        state = one.state_dict()
        path = next((p for p, value in _places(own) if p not in met and same(value, state)), None)
        if path is not None:
            met.add(path)
            yield path, one


def _places(own: Any) -> Iterator[tuple[Path, Any]]:
    yield (), own
    for key, value in own.items() if isinstance(own, Mapping) else ():
        yield (key,), value
        for k, one in enumerate(value) if isinstance(value, list | tuple) else ():
            yield (key, k), one


def functions_left_out(scheduler: Any) -> Iterator[str]:
    """Paths of the functions that the state of a scheduler (or of several by name, or of inner ones) leaves out.

    torch stores the attributes of a callable object, but nothing of a function or of a ``functools.partial`` of one.
    """
    return (path for path, called in callables_in(scheduler) if isinstance(called, FUNCTIONS))


def callables_in(scheduler: Any, where: str = "scheduler") -> Iterator[tuple[str, Any]]:
    """What a scheduler calls, by path: its program gives it again in each run.

    torch's LambdaLR and MultiplicativeLR (and most of transformers' schedules) have ``lr_lambdas``, CyclicLR has
    ``scale_fn``.
    """
    if is_several(scheduler):
        for name, one in scheduler.items():
            yield from callables_in(one, f"{where}.{name}")
        return
    for index, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        yield f"{where}.lr_lambdas[{index}]", function
    if (scale := scale_function(scheduler)) is not None:
        yield f"{where}.scale_fn", scale
    for index, inner in enumerate(inner_by_torch(scheduler)):
        yield from callables_in(inner, f"{where}.schedulers[{index}]")
    if hasattr(inner := getattr(scheduler, "scheduler", None), "state_dict"):  # Accelerate's wrapper
        yield from callables_in(inner, where)


# ----------------------------------------------------------------------------------------------------
# Checks states for torch's own classes against the live object, before it gets them. Changes nothing.
#
# torch itself checks nothing: its schedulers set every entry as an attribute, its optimizers take every setting, and
# only the next step fails.

_SCHEDULERS = "torch.optim.lr_scheduler"
#: Attributes that every release of torch stores, for schedulers that have them.
_ALWAYS = ("last_epoch", "base_lrs", "_schedulers", "lr_lambdas", "_scale_fn_custom")
#: Lists with an entry for each group of the optimizer.
_BY_GROUP = frozenset({"base_lrs", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums"})
#: Attributes of every scheduler of torch. Its subclasses may have any further ones.
_OF_EVERY_SCHEDULER = ("last_epoch", "base_lrs", "_last_lr", "_step_count")
_OF_SCALERS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
#: States of torch's optimizers that are tensors.
_TENSORS = frozenset(
    (
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "square_avg",
        "grad_avg",
        "acc_delta",
    )
    + ("sum", "prev", "step_size", "ax", "row_var", "col_var", "variance")
)
#: Settings that schedulers put into the groups of an optimizer.
_RATES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})


def attribute_of_class(target: Any, state: Mapping[Any, Any]) -> str | None:
    """An entry of a scheduler's state that would hide a method of its class, or an attribute that it never stores."""
    live = getattr(target, "__dict__", {})
    for key in state:
        if not isinstance(key, str):
            continue
        of_class = getattr(type(target), key, None)
        if callable(of_class) or hasattr(of_class, "__set__") or isinstance(live.get(key), Optimizer):
            return key
    return None


def check_state(target: Any, stored: Any, name: str) -> None:
    """Raise :class:`StateError` or :class:`FormatError` for a state that the object can't take. Changes nothing."""
    if is_several(target):
        if not isinstance(stored, Mapping):
            raise FormatError(f"{name}: expected the states of several by name, got {brief(stored)}")
        lost = sorted(target.keys() - stored.keys())
        if lost:
            raise StateError(f"the checkpoint contains no {name} {lost}; leave it out of the state")
        for key, one in target.items():
            check_state(one, stored[key], f"{name}.{key}")
    elif isinstance(target, LRScheduler) or name.partition(".")[0] == "scheduler":
        check_scheduler(target, stored, name)
    elif isinstance(target, torch.amp.GradScaler | ResumableLoader):
        if not isinstance(stored, dict) or not all(isinstance(key, str) for key in stored):
            raise FormatError(
                f"{name}: expected the state of a {type(target).__qualname__}, got {brief(stored)}"
            )
        if isinstance(target, ResumableLoader):
            check_position(stored, name)
        else:
            check_scaler(target, stored, name)


def check_classes(saved: Any, now: Any, name: str = "scheduler") -> None:
    """Raise :class:`StateError` if the saved schedulers had other classes than those of this run."""
    for one, was, is_now in _known_classes(saved, now, name):
        if was not in (is_now, is_now.partition("(")[0]):
            raise StateError(
                f"{one}: the checkpoint contains the state of a {was}, but this run has a {is_now}; use the same one, or leave "
                f"it out of the state"
            )


def unsaid_classes(saved: Any, now: Any, name: str = "scheduler") -> Iterator[str]:
    """One line for each scheduler whose inner classes (:func:`.class_text`) were not recorded."""
    for one, was, is_now in _known_classes(saved, now, name):
        if was != is_now:  # an older checkpoint names the outermost only
            yield f"{one}: the checkpoint does not record the classes of the schedulers in it"


def _known_classes(saved: Any, now: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """The name of each scheduler, and its saved and its live class, where both are known."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in saved.keys() & now.keys():
            yield from _known_classes(saved[key], now[key], f"{name}.{key}")
    elif saved and now:
        yield name, saved, now


def check_scheduler(target: Any, state: Any, name: str) -> None:
    """Raise for a state that can't belong to a scheduler of torch, to one that loads alike, or to a wrapped one.

    :class:`FormatError` for a damaged state, :class:`StateError` for the state of other schedulers or groups.
    """
    if not isinstance(target, LRScheduler):
        return _check_inner(target, state, name)
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise FormatError(f"{name}: expected the state of a {type(target).__qualname__}, got {brief(state)}")
    if type(target).load_state_dict.__module__ != _SCHEDULERS:
        return _check_inner(target, state, name)  # its own entries can't be checked
    if hidden := attribute_of_class(target, state):
        raise FormatError(
            f"{name}: {brief(hidden)} is not part of the state of a {type(target).__qualname__}"
        )
    live = target.state_dict()
    if type(target).__module__ != _SCHEDULERS:
        for key in _OF_EVERY_SCHEDULER:
            if key in state and key in live:
                _check_kind(live[key], state[key], f"{name}.{key}")
        return _check_inner(target, state, name)
    # Releases of torch differ in the rest, and a program may have set harmless attributes on the saved scheduler.
    lost = [key for key in _ALWAYS if key in live and key not in state]
    if lost:
        raise FormatError(
            f"{name}: lacks {brief(lost[0])}, which the state of a {type(target).__qualname__} has"
        )
    for key in live.keys() & state.keys() - {"_schedulers"}:
        _check_kind(live[key], state[key], f"{name}.{key}")
        if key in _BY_GROUP and len(live[key]) != len(state[key]):
            raise StateError(
                f"{name}.{key}: was saved for {len(state[key])} groups, this run has {len(live[key])}"
            )
    _check_phases(live, state, name)
    states = state.get("_schedulers", [])
    if not isinstance(states, list | tuple) or not all(isinstance(one, dict) for one in states):
        raise FormatError(f"{name}._schedulers: expected states of schedulers, got {brief(states)}")
    inner = inner_by_torch(target)
    if len(states) != len(inner):
        raise StateError(f"{name}: was saved with {len(states)} schedulers in it, this run has {len(inner)}")
    for k, (one, of_one) in enumerate(zip(inner, states, strict=True)):
        check_scheduler(one, of_one, f"{name}._schedulers[{k}]")


def _check_inner(holder: Any, state: Any, name: str) -> None:
    """Check the stored states of schedulers inside an object. Missing ones show after the object has taken its state."""
    for path, inner in inner_states(holder):
        found = state
        try:
            for key in path:
                found = found[key]
        except (LookupError, TypeError):
            continue
        if isinstance(found, dict) or not path:
            check_scheduler(inner, found, f"{name}.{path_text(path)}" if path else name)


def _check_phases(live: Mapping[str, Any], state: Mapping[str, Any], name: str) -> None:
    """Check OneCycleLR's phases: each step looks up every entry of them."""
    phases, stored = live.get("_schedule_phases"), state.get("_schedule_phases")
    if not phases or stored is None:
        return
    if not stored:
        raise FormatError(f"{name}._schedule_phases: expected phases, got {brief(stored)}")
    for k, phase in enumerate(stored):
        lost = [key for key in phases[0] if key not in phase]
        if lost:
            raise FormatError(f"{name}._schedule_phases[{k}]: lacks {brief(lost[0])}")


def check_scaler(target: torch.amp.GradScaler, state: Mapping[str, Any], name: str) -> None:
    """Raise :class:`FormatError` for a state that no GradScaler saves, :class:`StateError` for a disabled one's."""
    cls = type(target)
    if cls.load_state_dict is not torch.amp.GradScaler.load_state_dict:
        return
    if not state:
        if target.is_enabled():
            raise StateError(
                f"{name}: the checkpoint contains the state of a disabled {cls.__qualname__}, which load_state_dict does "
                f"not take; disable it, or leave it out of the state"
            )
        return
    for key in _OF_SCALERS:
        if not _is_number(state.get(key)) or isinstance(state[key], bool):
            raise FormatError(f"{name}.{key} is {brief(state.get(key))}, expected a number")


def check_settings(optimizer: Optimizer, groups: list[dict[str, Any]], name: str) -> None:
    """Raise :class:`FormatError` for a setting of another kind than the live one, if its kind is certain."""
    for k, (live, stored) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        for key, value in stored["options"].items():
            where = f"{name}.groups[{k}].options.{brief(key)}"
            now = live.get(key, 0.0 if key in _RATES else None)
            if value is not None or (key == "lr" and _is_number(now)):
                _check_kind(now, value, where)
            of_torch = type(optimizer).__module__.startswith("torch.optim.")
            if not isinstance(now, list | tuple if of_torch else tuple) or not isinstance(
                value, list | tuple
            ):
                continue
            if len(value) != len(now):
                raise FormatError(f"{where}: expected {len(now)} values, got {len(value)}")


def check_values(optimizer: Optimizer, values: Mapping[str, Mapping[Any, Any]], name: str) -> None:
    """Raise :class:`FormatError` if a state that is a tensor in a torch optimizer is stored as another type."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    for parameter, states in values.items():
        for key, value in states.items():
            where = f"{name}.values[{brief(parameter)}].{brief(key)}"
            if key in _TENSORS and not (value is None or isinstance(value, torch.Tensor)):
                raise FormatError(f"{where}: expected a tensor, got {brief(value)}")
            if key == "step" and not _is_number(value):
                raise FormatError(f"{where}: expected a number, got {brief(value)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Number) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _check_kind(live: Any, stored: Any, where: str) -> None:
    """Check the kind of a value: number (also in a tensor), text, list or tuple, mapping. Skip other live values."""
    if isinstance(live, torch.Tensor):
        fits, expected = _is_number(stored) or isinstance(stored, torch.Tensor), "a tensor or a number"
    elif _is_number(live):
        fits, expected = _is_number(stored), "a number"
    elif isinstance(live, str):
        fits, expected = isinstance(stored, str), "text"
    elif isinstance(live, list | tuple):
        fits, expected = isinstance(stored, list | tuple), "a list"
    elif isinstance(live, Mapping):
        is_lambda = stored is None and where.endswith("]")  # LambdaLR saves None for a plain function
        fits, expected = is_lambda or isinstance(stored, Mapping), "a mapping"
    else:
        return
    if not fits:
        raise FormatError(f"{where}: expected {expected}, got {brief(stored)}")
    if isinstance(live, list | tuple) and live:
        for k, one in enumerate(stored):
            _check_kind(live[min(k, len(live) - 1)], one, f"{where}[{k}]")
    if isinstance(live, Mapping) and live and stored:
        key, value = next(iter(live.items()))
        for k, one in stored.items():
            _check_kind(key, k, f"{where}: a key")
            _check_kind(live.get(k, value), one, f"{where}[{brief(k)}]")


def refuse_other_kind(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`StateError` for settings that this optimizer lacks: third-party checkpoints don't store its class."""
    stored = {key for group in groups for key in group["options"]} - _RATES - {"swa_lr"}
    strange = sorted(stored - set(optimizer.defaults))
    if strange:
        raise StateError(
            f"the checkpoint's optimizer has settings that {type(optimizer).__qualname__} does not: "
            f"{', '.join(strange[:8])}; use the same optimizer as the saved run"
        )
