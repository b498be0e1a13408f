"""Finds state beyond parameters, buffers, ``state`` and ``param_groups`` in an object's own state dict."""

from __future__ import annotations

import contextlib
import inspect
import struct
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field
from functools import partial, reduce
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..digests import partial_sums
from ..errors import ShardwiseError, StateError
from ..internals.torch import keep_metadata, local_tensor
from ..limits import is_word
from ..names import canonical_name, put_buffer, unwrap
from ..objects import frozen
from ..tensors.live import Copies, LiveModel, describe, is_declared
from .low_bit import contents_of
from .typed_json import MAX_DEPTH, Places, encode, quantized_parts

# ----------------------------------------------------------------------------------------------------
# Finds state beyond parameters, buffers, ``state`` and ``param_groups`` in an object's own state dict.
#
# A model or an optimizer may save more than torch's base classes do: by its own ``state_dict``, by a module's
# ``_save_to_state_dict``, by hooks. Its state dict is compared with the state that the checkpoint holds anyway. The rest
# is a set of *leaves*: values by their path in the state dict. Leaves become a typed JSON document, and a restore gives
# them back through the object's own ``load_state_dict``. Reports name leaves that can't be stored. A second look at the
# state dict shows whether they arrived.

#: Path of a value in a state dict: keys of dicts, indices of lists.
Path = tuple[Any, ...]
#: Tensors in documents are held in host memory, so one object may not have many.
MAX_BEYOND_BYTES = 64 * 1024**2
_MISSING = object()


@frozen
class Beyond:
    """State of one object that only its own saving would store."""

    leaves: tuple[tuple[Path, Any], ...] = ()
    """Values that can be stored, by path."""
    not_stored: Mapping[str, str] = field(default_factory=dict)
    """Values that can't be stored: one line each, by :func:`_path_key`."""


@frozen
class StoredOwn:
    """The own state of one object as a checkpoint holds it."""

    name: str
    """The object's, for reports."""
    leaves: list[tuple[Path, Any]]
    """Stored values by path. Their tensors move when the object takes them."""
    not_stored: Mapping[str, str]
    """As in :class:`Beyond`."""

    def stale(self, live: Iterable[Path]) -> list[Path]:
        """Live paths to delete before inserting stored values: those under a stored top-level key, except parts that were
        not stored."""
        heads = {path[0] for path, _ in self.leaves}
        return [path for path in live if path[0] in heads and _path_key(path) not in self.not_stored]


def leaves_beyond(
    own: Any, plain: Any, known: Collection[int], path: Path = (), inside: tuple[int, ...] = ()
) -> Iterator[tuple[Path, Any]]:
    """Values of a state dict ``own`` that neither follow from ``plain`` nor are objects with an id in ``known``.

    ``plain`` is the state dict of torch's base class; a tensor that is a cast of the plain one holds nothing new.
    ``inside``: ids of the containers on the path; a container inside itself is a leaf.
    """
    within = (*inside, id(own))
    if isinstance(own, dict) and id(own) not in inside:
        below = plain if isinstance(plain, dict) else {}
        for key, value in own.items():
            yield from leaves_beyond(value, below.get(key, _MISSING), known, (*path, key), within)
    elif (
        isinstance(own, list) and isinstance(plain, list) and len(own) == len(plain) and id(own) not in inside
    ):
        for index, (value, under) in enumerate(zip(own, plain, strict=True)):
            yield from leaves_beyond(value, under, known, (*path, index), within)
    elif own is not plain and id(own) not in known and not _follows(own, plain):
        yield path, own


def _follows(own: Any, plain: Any) -> bool:
    if not (isinstance(own, torch.Tensor) and isinstance(plain, torch.Tensor)):
        return plain is not _MISSING and same(own, plain)
    try:
        mine, live = local_tensor(own).detach(), local_tensor(plain).detach()
        return mine.shape == live.shape and _same_bits(mine, live.to(mine.dtype))
    except (RuntimeError, NotImplementedError, TypeError):  # quantized, sparse, another device's, …
        return False


def same(a: Any, b: Any) -> bool:
    """Whether two values of state dicts have one type and are equal: tensors and floats bit for bit, on one device type."""
    try:
        if isinstance(a, torch.Tensor):
            is_alike = isinstance(b, torch.Tensor) and a.shape == b.shape and a.device.type == b.device.type
            return is_alike and _same_bits(a, b)
        if isinstance(a, np.ndarray):
            return type(b) is np.ndarray and (a.dtype, a.shape, a.tobytes()) == (
                b.dtype,
                b.shape,
                b.tobytes(),
            )
        if type(a) is not type(b):
            return False
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, np.generic):
            return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
        if isinstance(a, deque):
            return a.maxlen == b.maxlen and same(list(a), list(b))
        if isinstance(a, float):
            return struct.pack("d", a) == struct.pack("d", b) or (a != a and b != b)
        if isinstance(a, complex):
            return same((a.real, a.imag), (b.real, b.imag))
        return bool(a == b)
    except Exception:  # a state dict may hold any class, with any __eq__
        return False


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype:
        return False
    if a.is_quantized:
        return b.is_quantized and same(quantized_parts(a), quantized_parts(b))
    left, right = (local_tensor(t).detach().to("cpu").contiguous().reshape(-1) for t in (a, b))
    return bool(torch.equal(left.view(torch.uint8), right.view(torch.uint8)))


def split_storable(leaves: Iterable[tuple[Path, Any]], what: str) -> Beyond:
    """Split leaves into those that typed JSON can hold and a line for each other one. ``what`` begins the lines."""
    kept: list[tuple[Path, Any]] = []
    lines: dict[str, str] = {}
    nbytes = 0
    for path, live in leaves:
        value, why = live, ""
        try:
            value = _without_parameters(live)
            encoded = encode((path, value), where="it")
        except RecursionError:
            why = "it contains itself or is nested too deeply"
        except ShardwiseError as error:
            why = str(error)
        else:
            size = sum(t.numel() * t.element_size() for t in encoded.tensors.values())
            if encoded.not_stored:
                why = "it holds a function"
            elif nbytes + size > MAX_BEYOND_BYTES:
                why = f"with it such state has {nbytes + size} bytes; the limit is {MAX_BEYOND_BYTES}"
            else:
                nbytes += size
        if why:
            text = path_text(path)
            lines[_path_key(path)] = (
                f"{what}: {text}, which the object would save itself, is not stored ({why})"
            )
        else:
            kept.append((path, value))
    return Beyond(tuple(kept), lines)


def _without_parameters(value: Any) -> Any:
    """``value`` (tuples, lists, dicts) with tensors in place of its parameters. Containers that hold any are new."""
    if isinstance(value, nn.Parameter):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(map(_without_parameters, value))
    return {k: _without_parameters(v) for k, v in value.items()} if type(value) is dict else value


def path_text(path: Path) -> str:
    """A path for people: ``state[0].momentum``."""
    text = ""
    for part in path:
        text += f"{'.' if text else ''}{part}" if isinstance(part, str) else f"[{part!r:.80}]"
    return text or "all of it"


def _path_key(path: Path) -> str:
    """A path as Python writes it: unlike ``a.b``, it tells ``('a.b',)`` from ``('a', 'b')``."""
    try:
        return repr(path)
    except Exception:  # a key may have any class, and Python refuses to print integers of 4300 digits
        return path_text(tuple(part if isinstance(part, str) else type(part).__qualname__ for part in path))


def with_leaves(own: Any, stored: Iterable[tuple[Path, Any]], stale: Iterable[Path]) -> Any:
    """A copy of a live state dict with ``stored`` leaves in it, and without the ``stale`` ones.

    Containers are new, tensors are not. Raises :class:`LookupError` or :class:`TypeError` for a path that the live
    state dict does not have.
    """
    made = _copied(own)
    for path in stale:
        parent = reduce(getitem, path[:-1], made)
        if isinstance(parent, dict):
            parent.pop(path[-1], None)
    for path, value in stored:
        parent = made
        for key in path[:-1]:
            parent = parent.setdefault(key, {}) if isinstance(parent, dict) else parent[key]
        parent[path[-1]] = value
    return made


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        made = value.copy()  # keeps its class, and what a module's state dict says of versions
        keep_metadata(value, made)
        for key, one in value.items():
            made[key] = _copied(one)
        return made
    return [_copied(one) for one in value] if type(value) is list else value


def differing_leaves(
    now: Iterable[tuple[Path, Any]],
    stored: Iterable[tuple[Path, Any]],
    not_stored: Collection[str],
    what: str,
) -> Iterator[str]:
    """One line for each leaf that differs from the stored one. ``not_stored``: keys of paths already reported."""
    found, wanted = dict(now), dict(stored)
    for path in sorted(found.keys() | wanted.keys(), key=path_text):
        if _path_key(path) in not_stored:
            continue
        text = path_text(path)
        if path not in wanted:
            yield f"{what}: {text}, which the object would save itself, is not in the checkpoint"
        elif path not in found or not same(found[path], wanted[path]):
            yield f"{what}: {text}, which the object saved itself, was not accepted by its load_state_dict"


# ----------------------------------------------------------------------------------------------------
# Finds state of a model beyond parameters, persistent buffers and ``get_extra_state``.
#
# ``nn.Module.state_dict`` gives exactly these, unless a class overrides part of it or a hook changes it. Only then each
# save calls the model's own ``state_dict``, once; its tensors come as references. The hooks of FSDP2 and activation
# checkpointing move no data and start no collective.

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


def _own_state(model: nn.Module) -> dict[str, Any]:
    """The model's own state dict, as references to the live objects if the model gives references."""
    takes = inspect.signature(model.state_dict).parameters.values()
    can_keep = any(p.name == "keep_vars" or p.kind is inspect.Parameter.VAR_KEYWORD for p in takes)
    with torch.no_grad():
        found = model.state_dict(keep_vars=True) if can_keep else model.state_dict()
    if not isinstance(found, dict):
        raise TypeError(f"it gives a {type(found).__name__}, not a dict")
    return found


class OwnOfModel:
    """The own state of a model. Paths begin with the canonical key."""

    def __init__(self, live: LiveModel) -> None:
        self._live, self._model = live, live.root

    @property
    def kind(self) -> str:
        return type(self._model).__qualname__

    @property
    def saves_more(self) -> bool:
        return _differs_from_torch(self._live, *_SAVING)

    @property
    def loads_more(self) -> bool:
        return _differs_from_torch(self._live, *_LOADING)

    def leaves(self) -> list[tuple[Path, Any]]:
        plain = {alias: t.tensor for t in self._live.tensors if t.persistent for alias in t.names}
        extra = {
            canonical_name(f"{path}._extra_state" if path else "_extra_state")
            for path, module in self._model.named_modules(remove_duplicate=False)
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        own = {canonical_name(k): v for k, v in _own_state(self._model).items()}
        own = {key: value for key, value in own.items() if key not in extra}
        own = {**_scales_aside(self._model), **own}
        return list(leaves_beyond(own, plain, {id(t) for t in plain.values()}))

    def load(self, stored: list[tuple[Path, Any]], stale: list[Path]) -> list[str]:
        """Call it after restoring the model's tensors: it passes the live ones, so torch copies nothing."""
        own, inner = _own_state(self._model), unwrap(self._model)
        raw = {canonical_name(key): key for key in own}
        prefix = next(
            (f"{path}." for path, module in self._model.named_modules() if module is inner and path), ""
        )

        def live_path(path: Path) -> Path:
            return (raw.get(path[0], f"{prefix}{path[0]}"), *path[1:])

        given = with_leaves(own, [(live_path(p), value) for p, value in stored], map(live_path, stale))
        takes = inspect.signature(self._model.load_state_dict).parameters.values()
        can_be_lax = any(p.name == "strict" or p.kind is inspect.Parameter.VAR_KEYWORD for p in takes)
        with torch.no_grad():
            # A hook may have dropped keys from the state dict; a comparison shows afterwards what arrived.
            self._model.load_state_dict(given, strict=False) if can_be_lax else self._model.load_state_dict(
                given
            )
        return []


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
        and any(live.spec(t).shape != shapes[n] for n in t.names if n in shapes)
    ]  # fmt: skip
    if not other or not OwnOfModel(live).loads_more:
        return False
    zeros: list[tuple[Path, Any]] = [
        ((n,), t.tensor.new_zeros(shapes[n])) for t in other for n in t.names if n in shapes
    ]
    with contextlib.suppress(Exception):
        OwnOfModel(live).load(zeros, [])
    return True


# ----------------------------------------------------------------------------------------------------
# Finds state of an optimizer beyond ``state`` and ``param_groups``.
#
# ``Optimizer.state_dict`` gives exactly these, unless a class overrides it, a hook changes it, or another optimizer
# wraps this one. Only then each save calls the ``state_dict`` of the outermost optimizer, once.

_OPTIMIZER_SAVING = "state_dict", ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_OPTIMIZER_LOADING = (
    "load_state_dict",
    ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)


def _optimizer_differs_from_torch(optimizer: Optimizer, method: str, hooks: tuple[str, ...]) -> bool:
    return (
        getattr(type(optimizer), method) is not getattr(Optimizer, method)
        or method in vars(optimizer)
        or any(getattr(optimizer, hook, None) for hook in hooks)
    )


def _plain(optimizer: Optimizer) -> dict[str, Any]:
    """The result of ``Optimizer.state_dict`` without hooks: parameters by their number."""
    numbers: dict[int, int] = {}
    groups = []
    start = 0
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"], start):
            numbers.setdefault(id(parameter), number)
        groups.append(
            {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[id(p)] for p in group["params"]]}
        )  # fmt: skip
        start += len(group["params"])
    state = {numbers[id(k)]: v for k, v in optimizer.state.items() if id(k) in numbers}
    return {"state": state, "param_groups": groups}


class OwnOfOptimizer:
    """The own state of ``outer``, the optimizer that the program steps: ``inner``, or its wrapper."""

    def __init__(self, outer: Optimizer, inner: Optimizer) -> None:
        self._outer, self._inner = outer, inner

    @property
    def kind(self) -> str:
        return type(self._outer).__qualname__

    @property
    def saves_more(self) -> bool:
        is_wrapped = self._outer is not self._inner
        return is_wrapped or _optimizer_differs_from_torch(self._inner, *_OPTIMIZER_SAVING)

    @property
    def loads_more(self) -> bool:
        return _optimizer_differs_from_torch(self._inner, *_OPTIMIZER_LOADING)

    def leaves(self) -> list[tuple[Path, Any]]:
        own, inner = self._outer.state_dict(), self._inner
        if not isinstance(own, dict):
            raise TypeError(f"it gives a {type(own).__name__}, not a dict")
        known = {
            id(v) for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)
        }
        known |= {id(p) for group in inner.param_groups for p in group["params"]}
        return list(leaves_beyond(own, _plain(inner), known))

    def load(self, stored: list[tuple[Path, Any]], stale: list[Path]) -> list[str]:
        """Call it after restoring ``inner``. torch's own ``load_state_dict`` casts state and replaces groups, so both are put back
        afterwards."""
        given = with_leaves(self._outer.state_dict(), stored, stale)
        kept = KeptOptimizer(self._outer, self._inner)
        try:
            self._outer.load_state_dict(given)
        finally:
            changed = kept.put_back()
        return changed


class KeptOptimizer:
    """Keeps state and groups of an optimizer, and puts them back after its ``load_state_dict``."""

    def __init__(self, outer: Optimizer, inner: Optimizer) -> None:
        self._inner = inner
        self._state, self._groups = inner.state, inner.param_groups
        self._states = {parameter: dict(state) for parameter, state in inner.state.items()}
        self._each = list(inner.param_groups)
        self._options = [dict(group) for group in self._each]
        self._rates = [
            (v, v.detach().clone()) for o in self._options for v in o.values() if isinstance(v, torch.Tensor)
        ]
        shared = (id(inner.state), id(inner.param_groups))
        self._shared = [(outer, k, v) for k, v in vars(outer).items() if id(v) in shared]
        self._sums = self._digests()

    def _digests(self) -> dict[tuple[int, str], int]:
        states = [
            ((number, key), content.detach())
            for number, state in enumerate(self._states.values())
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
            for content in contents_of(local_tensor(value))
        ]
        found: dict[tuple[int, str], int] = {}
        sums = partial_sums((t, (0,) * t.dim()) for _, t in states)
        for place, ((where, _), total) in enumerate(zip(states, sums, strict=True), 1):
            found[where] = found.get(where, 0) + place * total
        return found

    def put_back(self) -> list[str]:
        """Put state and groups back. Returns the tensors that were changed in place."""
        self._groups[:] = self._each
        for live, value in self._rates:
            live.detach().copy_(value)
        for group, options in zip(self._groups, self._options, strict=True):
            group.clear()
            group.update(options)
        self._state.clear()
        self._state.update(self._states)
        self._inner.state, self._inner.param_groups = self._state, self._groups
        for owner, attribute, value in self._shared:
            setattr(owner, attribute, value)
        now = self._digests()
        return [
            f"state[{number}].{key}"
            for (number, key), total in self._sums.items()
            if now[number, key] != total
        ]


# ----------------------------------------------------------------------------------------------------
# Extras that contain sharded tensors (diffusers' EMAModel) are stored as models: their tensors shard by shard, and the rest
# of their state as a model's own state.


class SpreadExtra(Copies):
    """An extra as a model: its tensors are buffers, and the rest of its state is the model's own state.

    A list of tensors with the shapes of a model's parameters (or of the trainable ones), in their order, gets their names.
    Other tensors are named by their path in the extra's state dict.
    """

    def __init__(self, name: str, extra: Any, lives: Mapping[str, LiveModel]) -> None:
        super().__init__()
        self.like = ""
        """The model whose parameters these are copies of, all of them; or none."""
        self._extra = (extra,)  # in a tuple, a module doesn't become a submodule
        found = dict(_tensors_in(extra.state_dict()))
        self._names = self._named(found, lives)
        if len({canonical_name(n) for n in self._names.values()}) < len(found):
            raise StateError(f"extra.{name}: two tensors of its state have the same name; rename one")
        self._hold(found)

    def _named(self, found: Mapping[Path, torch.Tensor], lives: Mapping[str, LiveModel]) -> dict[Path, str]:
        names = {path: ".".join(map(str, path)) for path in found}
        lists: dict[Path, list[Path]] = {}
        for path in found:
            if isinstance(path[-1], int):
                lists.setdefault(path[:-1], []).append(path)
        for paths in lists.values():
            shapes = [found[path].shape for path in paths]
            for model, live in lives.items():
                for chosen in (live.parameters, [t for t in live.parameters if t.tensor.requires_grad]):
                    if [t.tensor.shape for t in chosen] == shapes:
                        self.like = model if len(chosen) == len(live.parameters) else ""
                        return names | {path: t.name for path, t in zip(paths, chosen, strict=True)}
        return names

    def _hold(self, found: Mapping[Path, torch.Tensor]) -> None:
        for path, tensor in found.items():
            put_buffer(self, self._names[path], tensor)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        own = self._extra[0].state_dict()
        found = dict(_tensors_in(own))
        rest = with_leaves(own, [(path, None) for path in found], ())
        return {"": rest, **{self._names[path]: tensor for path, tensor in found.items()}}

    def load_state_dict(self, given: Mapping[str, Any], *_: Any, **__: Any) -> None:  # type: ignore[override]
        tensors = [(path, given[name]) for path, name in self._names.items()]
        self._extra[0].load_state_dict(with_leaves(given[""], tensors, ()))
        self._hold(dict(_tensors_in(self._extra[0].state_dict())))


def _tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors in dicts and lists, by path."""
    if isinstance(value, torch.Tensor):
        yield path, value.detach() if isinstance(value, nn.Parameter) else value
    elif isinstance(value, dict | list) and len(path) < MAX_DEPTH:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(one, (*path, key))


def has_state(extra: Any) -> bool:
    """Whether an extra is an object that gives and takes its own state, not a plain value."""
    return hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict")


def describe_all(models: Mapping[str, nn.Module], extras: Mapping[str, Any]) -> dict[str, LiveModel]:
    """Describe the models of a training state, and its extras with sharded tensors. Rank-local."""
    lives = {name: describe(model) for name, model in models.items()}
    for name, extra in extras.items():
        if has_state(extra) and _is_sharded(extra):
            add_extra(lives, name, extra)
    return lives


def _is_sharded(extra: Any) -> bool:
    try:
        own = extra.state_dict()
    except Exception:  # whoever stores the extra says why
        return False
    return any(isinstance(tensor, DTensor) for _, tensor in _tensors_in(own))


def add_extra(lives: dict[str, LiveModel], name: str, extra: Any) -> None:
    """Describe an extra as a model. Raises :class:`StateError` for a name that it can't have."""
    if name in lives or not is_word(name):
        why = "a model has this name, too" if name in lives else "expected letters, digits, '_' and '-'"
        raise StateError(
            f"extra.{name} has sharded tensors, which are stored like a model: {why}. Rename the extra"
        )
    if any(is_declared(live.root) for live in lives.values()):
        raise StateError(
            f"extra.{name} has sharded tensors, and a model of this state is declared in parts: not supported. Keep the copies in a module, call "
            f"declare_part on it, and give it to TrainState as another model"
        )
    lives[name] = describe(SpreadExtra(name, extra, lives))


def extras_in(lives: Mapping[str, LiveModel]) -> set[str]:
    """The names in ``lives`` that are extras."""
    return {name for name, live in lives.items() if isinstance(live.root, SpreadExtra)}


# ----------------------------------------------------------------------------------------------------
# The own state of one object, a model or an optimizer: found, given back, and compared.


#: An object that may save more than torch's base class does. ``saves_more``, ``loads_more``: whether its ``state_dict`` or its
#: ``load_state_dict`` may do more; ``leaves``: its own state; ``load``: let it take that, and name what it changed for good.
Owner = OwnOfModel | OwnOfOptimizer


def beyond(name: str, owner: Owner) -> Beyond:
    """What a checkpoint has to hold besides the state that torch's base class would save. Rank-local.

    Calls the object's ``state_dict`` if it may hold more than torch's.
    """
    if not owner.saves_more:
        return Beyond()
    try:
        leaves = owner.leaves()
    except Exception as error:
        why = f"{owner.kind}.state_dict failed: {type(error).__name__}: {error}"
        return Beyond(not_stored={"": f"{name}: its own state is unknown ({why})"})
    return split_storable(leaves, name)


def give_back(own: StoredOwn, owner: Owner, places: Places) -> list[str]:
    """Let an object take its stored own state. Rank-local.

    Call it after restoring the state that torch's base class would save. Tensors in ``own`` move to the devices of the live ones. Returns
    a line for each change that could not be undone, or for the failure; raises no error of the object.
    """
    if not (own.leaves or owner.loads_more):
        return []
    try:
        now = dict(owner.leaves())
        # Tensors go to the devices of the live ones at their paths.
        own.leaves[:] = [(path, places.put(value, partial(now.get, path))) for path, value in own.leaves]
        changed = owner.load(own.leaves, own.stale(now))
    except Exception as error:
        return [f"{own.name}: its own load_state_dict failed ({type(error).__name__}: {error})"]
    return [f"{own.name}: its own load_state_dict changed {what}, which may differ now" for what in changed]


def differences(own: StoredOwn, owner: Owner) -> list[str]:
    """One line per value of an object's own state that differs from the stored one. Rank-local."""
    if not (own.leaves or owner.saves_more):
        return []
    try:
        return list(differing_leaves(owner.leaves(), own.leaves, own.not_stored.keys(), own.name))
    except Exception as error:
        return [f"{own.name}: its own state is unknown ({type(error).__name__}: {error})"]
