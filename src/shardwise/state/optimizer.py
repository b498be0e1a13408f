"""Training state by parameter name: ``TrainState``, optimizer states and pending gradients, drained and filled directly."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..dtypes import code_of, torch_dtype
from ..errors import StateError
from ..format.manifest import GRADIENT
from ..host import to_host
from ..internals.fsdp import fsdp_gathered_ids, fsdp_unreduced_ids
from ..internals.torch import keeps_flat_history, local_tensor, storage_key, version_of
from ..limits import brief, is_word
from ..names import NamedTensor
from ..objects import frozen
from ..tensors.live import HostMemory, LiveModel, elsewhere_in, fsdp1_problem
from .beyond import refuse_fsdp1
from .low_bit import Form, StoredForm, form_of, part_name, room_for, warn_of_rounded_updates
from .parts import why_unstorable

# ----------------------------------------------------------------------------------------------------
# Gradients that wait for an optimizer step: they are part of the state during an accumulation.
#
# A gradient does not show whether it waits: many loops save first, and clear gradients at the start of the next step.
# So each optimizer of a :class:`TrainState` gets a hook that notes, after every step, the gradients that it used and
# their versions. A new or changed gradient waits. Both mistakes would be silent: losing a waiting gradient, and
# restoring a used one, which a loop that clears after saving would use again. Gradients from before the hook are
# unknown: the save then says so, and the restore does not call itself exact.

UNSEEN_GRADIENTS = "gradients from before the first TrainState (it is not known whether a step has used them)"


@frozen
class _Mark:
    """A gradient after the step that used it, or one from before the hook was set."""

    gradient: weakref.ref[torch.Tensor]
    """An id alone is not enough: a parameter's next gradient often has the address of the last one."""
    versions: tuple[int, int]
    is_used: bool


#: By optimizer, and by id of the gradient.
_MARKS: weakref.WeakKeyDictionary[Optimizer, dict[int, _Mark]] = weakref.WeakKeyDictionary()


def watch_steps(optimizer: Optimizer) -> None:
    """Note the gradients that each later step uses. Further calls for the same optimizer do nothing."""
    inner = bare_optimizer(optimizer)
    if inner in _MARKS:
        return
    try:
        inner.register_step_post_hook(lambda optimizer, *_: _mark(optimizer, is_used=True))
    except AttributeError:  # its class leaves out torch's constructor, and takes no hooks
        return
    _mark(inner, is_used=False)


def _mark(optimizer: Optimizer, *, is_used: bool) -> None:
    _MARKS[optimizer] = {
        id(g): _Mark(weakref.ref(g), _versions(g), is_used) for _, g in _gradients(optimizer)
    }


def waiting_gradients(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """The gradients, with their parameters, that no step of ``optimizer`` has used in their present version.

    Skips gradients whose use is unknown (:func:`has_unseen_gradients`). Does not see changes that bypass torch's
    version counters: ``.data``, the replay of a CUDA graph, ``torch._foreach`` functions on DTensors.
    """
    for parameter, gradient in _gradients(optimizer):
        if _is_waiting(optimizer, gradient):
            yield parameter, gradient


def has_unseen_gradients(optimizer: Optimizer) -> bool:
    """Whether gradients existed before :func:`watch_steps` and no step has run since."""
    return any(_is_waiting(optimizer, gradient) is None for _, gradient in _gradients(optimizer))


def _is_waiting(optimizer: Optimizer, gradient: torch.Tensor) -> bool | None:
    marks = _MARKS.get(bare_optimizer(optimizer))
    if marks is None:  # an optimizer that takes no hooks
        return None
    mark = marks.get(id(gradient))
    if mark is None or mark.gradient() is not gradient:
        return True
    return mark.versions != _versions(gradient) if mark.is_used else None


def clear_gradients(optimizer: Optimizer) -> None:
    """Drop the gradients of an optimizer's parameters, and no other gradients (such as those of frozen parameters)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def refuse_unreduced(optimizer: Optimizer, live: LiveModel) -> None:
    """Raise :class:`StateError` if FSDP2 holds gradients of the optimizer's parameters that it has yet to reduce.

    These gradients are whole, differ between ranks, and lie in FSDP2's own memory.
    """
    held = fsdp_unreduced_ids(live.fsdp_modules)
    if not held:
        return
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [t.name for t in live.tensors if id(t.tensor) in held & optimized]
    if found:
        raise StateError(
            f"FSDP2 has not reduced the gradients of {len(found)} parameters yet ({', '.join(found[:3])}), because of a "
            f"backward without gradient sync: they can be neither stored nor overwritten. Save and "
            f"resume after the optimizer's step, or leave set_requires_gradient_sync on in every "
            f"backward of the accumulation: then its gradients are part of the state"
        )


def _gradients(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                yield parameter, gradient


def _versions(gradient: torch.Tensor) -> tuple[int, int]:
    """A DTensor has two counts: its own, and that of its local tensor, which FSDP2 writes to."""
    return version_of(gradient), version_of(local_tensor(gradient))


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside Accelerate's wrapper (its ``optimizer``), or the optimizer itself."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


# ----------------------------------------------------------------------------------------------------
# Optimizer state by parameter name: drained and filled directly.
#
# No dummy step, no zero gradients, and no ``load_state_dict`` (which casts fp32 state of bf16 parameters to bf16).
# State is filled in place if shape and dtype match, otherwise created as stored, and cleared if none is stored.
# Gradients that wait for a step are stored with it.


@frozen
class AgreedForm:
    """The form in which ranks hold a state in few bits."""

    form: Form
    is_mixed: bool
    """Whether a rank with elements of it holds them in full."""


#: Tensor subclasses may have no storage of their own.
_WITH_STORAGE = (torch.Tensor, torch.nn.Parameter)
NO_FORMS: Mapping[int, Mapping[str, AgreedForm]] = {}
NO_LOW_BIT: Mapping[str, Mapping[str, StoredForm]] = {}


@frozen
class LowBitState:
    """A state of few bits, spread like its parameter."""

    value: torch.Tensor
    parameter: torch.Tensor
    form: Form
    by_rank: bool
    """Whether only its own rank can interpret it."""


@dataclass(slots=True)
class Drained:
    """An optimizer's state, sorted by how it is stored.

    ``tensors``: spread like their parameter. ``packed``: 0-d tensors of many parameters as one 1-D tensor,
    with the parameters in its order. ``values``: states that are not tensors. ``opaque``: tensors with another shape
    than their sharded parameter; only this rank can interpret them. ``low_bit``: states of few bits, of which the caller makes
    ``tensors``.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    packed: dict[str, torch.Tensor] = field(default_factory=dict)
    packed_index: dict[str, dict[str, tuple[str, int]]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    opaque: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    low_bit: dict[str, dict[str, LowBitState]] = field(default_factory=dict)
    has_unseen_gradients: bool = False
    """Such gradients are not among the tensors: it is not known whether a step has used them."""

    @property
    def gradients(self) -> int:
        """Number of gradients that wait for a step; they are among the tensors."""
        return sum(GRADIENT in keys for of in (self.tensors, self.packed_index) for keys in of.values())


def parameter_names(optimizer: Optimizer, tensors: Iterable[NamedTensor]) -> dict[int, str]:
    """id of each optimized parameter → its name. Raises :class:`StateError` for a parameter that the model lacks."""
    named = [t for t in tensors if t.kind == "parameter"]
    names = {id(t.tensor): t.name for t in named}
    strangers = [
        f"group {g}, parameter {k} of shape {list(p.shape)}{_of_whom(p, named)}"
        for g, group in enumerate(optimizer.param_groups)
        for k, p in enumerate(group["params"])
        if id(p) not in names
    ]
    if strangers:
        raise StateError(
            f"the optimizer holds {len(strangers)} parameters that the model does not have: "
            f"{'; '.join(strangers[:5])}. Make the optimizer after sharding and loading the model, and of its parameters. If it "
            f"takes no DTensors (bitsandbytes' do not), keep these parameters whole on each rank, or use torchao's"
        )
    return {id(p): names[id(p)] for group in optimizer.param_groups for p in group["params"]}


def _of_whom(stranger: torch.Tensor, parameters: Iterable[NamedTensor]) -> str:
    """The sharded parameter whose part on this rank a tensor is, in words."""
    if type(stranger) not in _WITH_STORAGE:
        return ""
    for t in parameters:
        local = local_tensor(t.tensor)
        if (
            local is not t.tensor
            and type(local) in _WITH_STORAGE
            and storage_key(local) == storage_key(stranger)
        ):
            return f", which is this rank's part of {t.name}"
    return ""


def drain(
    optimizer: Optimizer, names: Mapping[int, str], forms: Mapping[int, Mapping[str, AgreedForm]] = NO_FORMS
) -> Drained:
    """References to everything in an optimizer, by parameter name. Copies 0-d tensors only.

    ``forms``: by id of a parameter and state, of states that some ranks hold in few bits. Without it, only those that this
    rank holds so.
    """
    if keeps_flat_history(optimizer):
        raise StateError("LBFGS keeps flat history over all parameters, which has no name to be stored under")
    live = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strange = [k for k in optimizer.state if id(k) not in live]
    if strange:
        raise StateError(
            f"the optimizer keeps state under {len(strange)} keys that are not its parameters "
            f"({', '.join(type(k).__name__ for k in strange[:3])}); such state has no name to be stored under"
        )
    found = Drained()
    scalars: dict[str, list[tuple[str, str, torch.Tensor]]] = {}
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k != "params"}
        found.groups.append({"names": [names[id(p)] for p in group["params"]], "options": options})
        for parameter in group["params"]:
            name = names[id(parameter)]
            for key, value in optimizer.state.get(parameter, {}).items():
                is_spread = (
                    isinstance(value, torch.Tensor) and value.dim() > 0 and _is_spread_like(value, parameter)
                )
                agreed = forms.get(id(parameter), {}).get(key)
                form = None if not is_spread else form_of(value) if agreed is None else agreed.form
                if form is None:
                    _sort_state(found, scalars, parameter, name, key, value, is_spread=is_spread)
                else:
                    is_mixed = agreed is not None and agreed.is_mixed
                    found.low_bit.setdefault(name, {})[key] = LowBitState(value, parameter, form, is_mixed)
    found.has_unseen_gradients = has_unseen_gradients(optimizer)
    for parameter, gradient in waiting_gradients(optimizer):
        name = names[id(parameter)]
        _check_gradient(optimizer, parameter, name, gradient)
        _sort_state(found, scalars, parameter, name, GRADIENT, gradient, is_spread=True)
    on_host = iter(to_host([t for entries in scalars.values() for _, _, t in entries]))
    for key, entries in scalars.items():
        found.packed[key] = torch.stack([next(on_host) for _ in entries]).detach()
        for index, (name, state, _) in enumerate(entries):
            found.packed_index.setdefault(name, {})[state] = (key, index)
    return found


def _check_gradient(optimizer: Optimizer, parameter: torch.Tensor, name: str, gradient: torch.Tensor) -> None:
    if GRADIENT in optimizer.state.get(parameter, {}):
        raise StateError(
            f"the optimizer has a state {GRADIENT!r} of {name}, which is the name of stored gradients"
        )
    if gradient.layout is not torch.strided or not _is_spread_like(gradient, parameter):
        placements = getattr(gradient, "placements", "none")
        raise StateError(
            f"the gradient of {name} waits for an optimizer step and can't be stored: it is {gradient.layout} with "
            f"placements {placements}, its parameter has {getattr(parameter, 'placements', 'none')}. Save after the "
            f"step, and make the TrainState before it"
        )


def _sort_state(
    found: Drained,
    scalars: dict[str, list[tuple[str, str, torch.Tensor]]],
    parameter: torch.Tensor,
    name: str,
    key: str,
    value: Any,
    *,
    is_spread: bool,
) -> None:
    """``is_spread``: the value is a tensor, sharded like its parameter."""
    if not isinstance(key, str):
        raise StateError(
            f"the optimizer keeps a state of {name} under {brief(key)}, which is not text; such state has no name to be "
            f"stored under"
        )
    if not isinstance(value, torch.Tensor):
        found.values.setdefault(name, {})[key] = value
        return
    if why := why_unstorable(value):
        raise StateError(f"optimizer state {name}.{key}: {why}")
    if value.dim() == 0:
        scalars.setdefault(f"{key}.{code_of(value.dtype)}", []).append((name, key, local_tensor(value)))
    elif is_spread:
        found.tensors.setdefault(name, {})[key] = value
    elif isinstance(value, DTensor):
        raise StateError(
            f"optimizer state {name}.{key} is a DTensor of shape {list(value.shape)} with placements "
            f"{value.placements}, its parameter has {list(parameter.shape)}: not supported"
        )
    else:
        found.opaque.setdefault(name, {})[key] = value


def _is_spread_like(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state is sharded exactly like its parameter."""
    if value.shape != parameter.shape:
        return False
    if isinstance(parameter, DTensor):
        return (
            isinstance(value, DTensor)
            and value.placements == parameter.placements
            and value.device_mesh == parameter.device_mesh
        )
    return not isinstance(value, DTensor)


@frozen
class TrainedBy:
    """An optimizer of this run, the model that it trains, and its parameters by their names in that model."""

    name: str
    optimizer: Optimizer
    model_name: str
    live: LiveModel
    members: Sequence[Sequence[str]]
    """Names of the parameters in each group."""
    parameters: Mapping[str, torch.Tensor]
    elsewhere: frozenset[str] = frozenset()
    """Names of parameters of the model that only other ranks hold (``declare_part``)."""

    @classmethod
    def of(cls, name: str, optimizer: Optimizer, model_name: str, live: LiveModel) -> TrainedBy:
        """Find the names. Raises :class:`StateError` for a parameter that the model lacks."""
        names = parameter_names(optimizer, live.tensors)
        members = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        return cls(name, optimizer, model_name, live, members, parameters, elsewhere_in(live.tensors))

    def here(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are of parameters that this rank holds."""
        return [n for n in names if n not in self.elsewhere]


def check_groups(part: TrainedBy, groups: list[dict[str, Any]]) -> None:
    """Raise :class:`StateError` if the parameter groups or their order differ from the saved ones (schedulers address
    groups by position), or if a tensor setting had another shape. Changes nothing."""
    live, saved = part.members, [part.here(g["names"]) for g in groups]
    if [set(members) for members in live] != [set(members) for members in saved]:
        raise StateError(
            f"the optimizer has {_counted(live)}, the checkpoint {_counted(saved)}: {_how_groups_differ(live, saved)}"
        )
    for group, stored in zip(part.optimizer.param_groups, groups, strict=True):
        for key, value in stored["options"].items():
            current = group.get(key)
            if (
                isinstance(current, torch.Tensor)
                and isinstance(value, torch.Tensor)
                and current.shape != value.shape
            ):
                raise StateError(
                    f"the setting {key!r} of the optimizer is a tensor of shape {list(current.shape)}, but was saved "
                    f"with shape {list(value.shape)}; make the optimizer as in the saved run"
                )


def _counted(groups: Sequence[Sequence[str]]) -> str:
    return f"{len(groups)} parameter group{'s' * (len(groups) != 1)}"


def _how_groups_differ(live: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> str:
    """What is different, and what to do. The groups are not equal."""
    if sorted(map(sorted, live)) == sorted(map(sorted, saved)):
        return "the same in another order. Give them in the order of the saved run"
    here, there = ({n: k for k, group in enumerate(groups) for n in group} for groups in (live, saved))
    more, fewer = [n for n in here if n not in there], [n for n in there if n not in here]
    found = []
    if more:
        found.append(
            f"{_listed(more)} only in this optimizer's. Resume with the parameters of the saved run, and add the others after "
            f"the resume (optimizer.add_param_group)"
        )
    if fewer:
        found.append(
            f"{_listed(fewer)} only in the checkpoint's. Give this optimizer the same groups before the resume; the saved run may "
            f"have added some while it trained (optimizer.add_param_group)"
        )
    moved = [n for n in here if n in there and here[n] != there[n]]
    if moved and not found:
        n = moved[0]
        found.append(
            f"{_listed(moved)} in other groups: {n} in group {here[n]}, in the checkpoint in group {there[n]}. Build the groups as "
            f"the saved run did"
        )
    return "; ".join(found) or "groups without parameters differ. Build the groups as the saved run did"


def _listed(names: list[str]) -> str:
    more = ", …" * (len(names) > 5)
    return f"{len(names)} parameter{'s' * (len(names) != 1)} ({', '.join(names[:5])}{more}) {'are' if len(names) != 1 else 'is'}"


def differing_groups(part: TrainedBy, groups: list[dict[str, Any]]) -> list[str]:
    """Lines for what a restore does not bring back of groups that fit: the order of their parameters, and options that were not saved."""
    found = []
    for number, (members, group, saved) in enumerate(
        zip(part.members, part.optimizer.param_groups, groups, strict=True)
    ):
        if members != part.here(saved["names"]):
            found.append(f"optimizer: the parameters of group {number} are in another order than when saved")
        new = [key for key in group if key != "params" and key not in saved["options"]]
        if new:
            found.append(
                f"optimizer: {', '.join(new)} of group {number}: not in the checkpoint, so this program's is kept"
            )
    return found


def check_stored(part: TrainedBy, stored: Iterable[str]) -> None:
    """Raise :class:`StateError` for stored state of a parameter that the optimizer lacks. Changes nothing."""
    strange = sorted(set(stored) - part.parameters.keys() - part.elsewhere)
    if strange:
        raise StateError(
            f"the checkpoint holds optimizer state of {len(strange)} parameters that this optimizer does not "
            f"optimize: {', '.join(strange[:5])}. Give it the same parameters as the saved run"
        )


def fill_groups(part: TrainedBy, groups: list[dict[str, Any]]) -> None:
    """Put stored hyper-parameters (learning rate, betas, ``initial_lr``, …) into the groups with the same parameters.

    Raises as :func:`check_groups`.
    """
    check_groups(part, groups)
    for group, stored in zip(part.optimizer.param_groups, groups, strict=True):
        for key, value in stored["options"].items():
            current = group.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                current.detach().copy_(value)
            else:
                group[key] = value


def place_states(
    part: TrainedBy,
    stored: Mapping[str, Mapping[str, str]],
    memory: HostMemory,
    low_bit: Mapping[str, Mapping[str, StoredForm]] = NO_LOW_BIT,
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, torch.Tensor]]]:
    """Allocate stored states: existing tensors if they fit, otherwise new ones (values undefined), those on the CPU from
    ``memory``.

    ``stored`` maps parameter → state → dtype code, ``low_bit`` parameter → state → form of few bits. Clears every other
    state. Returns the tensors to fill (of states of few bits their parts), and the former 0-d tensors, for
    :func:`place_scalars`; both by parameter and state. Tensors for gradients are not put into the optimizer. Raises
    :class:`StateError` for stored state of a parameter that the optimizer lacks.
    """
    check_stored(part, {**stored, **low_bit})
    to_fill: dict[str, dict[str, torch.Tensor]] = {}
    scalars: dict[str, dict[str, torch.Tensor]] = {}
    state_of = part.optimizer.state
    for name, parameter in part.parameters.items():
        before = state_of.pop(parameter, {})
        scalars[name] = {k: v for k, v in before.items() if isinstance(v, torch.Tensor) and v.dim() == 0}
        for key, code in stored.get(name, {}).items():
            dtype, old = torch_dtype(code), before.get(key)
            if not (isinstance(old, torch.Tensor) and old.dtype == dtype and _is_spread_like(old, parameter)):
                old = memory.empty_like(parameter.detach(), dtype)
            to_fill.setdefault(name, {})[key] = old
            if key != GRADIENT:
                state_of[parameter][key] = old
        for key, form in low_bit.get(name, {}).items():
            old = before.get(key)
            fits = isinstance(old, torch.Tensor) and _is_spread_like(old, parameter)
            state, parts = room_for(old if fits else None, parameter, form, memory)
            state_of[parameter][key] = state
            to_fill.setdefault(name, {}).update({part_name(key, p): t for p, t in parts.items()})
    return to_fill, scalars


def place_scalars(
    part: TrainedBy,
    stored: Mapping[str, Mapping[str, torch.Tensor]],
    before: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Put stored 0-d states in place, into the tensors from ``before`` if dtypes match. Leaves gradients out.

    New tensors lie where torch's own ``load_state_dict`` puts them: ``step`` on the CPU unless the group is
    capturable or fused, everything else on the parameter's device.
    """
    values: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for group, names in zip(part.optimizer.param_groups, part.members, strict=True):
        on_device = bool(group.get("capturable") or group.get("fused"))
        for name, parameter in zip(names, group["params"], strict=True):
            for key, value in stored.get(name, {}).items():
                if key == GRADIENT:
                    continue
                old = before.get(name, {}).get(key)
                if old is None or old.dtype != value.dtype:
                    device = parameter.device if on_device or key != "step" else torch.device("cpu")
                    old = torch.empty_like(value, device=device)
                part.optimizer.state[parameter][key] = old
                live = local_tensor(old)
                values.setdefault((live.device, live.dtype), []).append((live, value.reshape(live.shape)))
    for (device, _), pairs in values.items():  # one copy to a device, not one for each parameter
        for (live, _), stored_value in zip(pairs, torch.stack([v for _, v in pairs]).to(device), strict=True):
            live.copy_(stored_value)


def place_values(part: TrainedBy, stored: Mapping[str, Mapping[str, Any]]) -> None:
    """Put stored states that are not tensors, and rank-local tensors, into the optimizer."""
    for name, parameter in part.parameters.items():
        for key, value in stored.get(name, {}).items():
            on_device = value.to(parameter.device) if isinstance(value, torch.Tensor) else value
            part.optimizer.state[parameter][key] = on_device


def place_gradients(part: TrainedBy, stored: Mapping[str, torch.Tensor]) -> list[str]:
    """Give parameters their stored gradients, cast if a parameter now takes another dtype.

    0-d gradients may be plain tensors although the parameter is a DTensor. Returns one line for each cast.
    """
    differences = []
    for name, parameter in part.parameters.items():
        gradient = stored.get(name)
        if gradient is None:
            continue
        wanted = getattr(parameter, "grad_dtype", parameter.dtype)  # None: any
        if wanted is not None and gradient.dtype != wanted:
            differences.append(f"gradient of {name}: {gradient.dtype} when saved, {wanted} now")
            gradient = gradient.to(wanted)
        if not parameter.dim():
            whole = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).detach()
            local_tensor(whole).copy_(gradient)
            gradient = whole
        parameter.grad = gradient
    return differences


# ----------------------------------------------------------------------------------------------------
# ``TrainState``: the live objects that a checkpoint stores.


@dataclass(slots=True)
class TrainState:
    """The objects of a training run that are saved and restored together. It holds references and copies nothing.

    Create it before training: it registers a hook with each optimizer (:meth:`watch`) to record which gradients each step used. A save
    includes gradients that no step has used yet (during gradient accumulation). Gradients that existed before the first
    ``TrainState`` and that no step has used since aren't saved; both reports mention them.

    Custom state that a model or an optimizer saves (through its own ``state_dict``, its modules' ``_save_to_state_dict``, or
    hooks) is stored too, and restored through its own ``load_state_dict``. The reports list the parts that can't be stored or that weren't
    accepted. See docs/state.md.

    A rank can create one on its own, but a save or a restore needs one on every rank, with the same names. Raises :class:`StateError` for a
    model wrapped by FSDP1, for an optimizer of parameters that FSDP2 had gathered, for an object of the wrong type, and for names with characters other than letters, digits, ``_`` and ``-``,
    because names become folder names.
    """

    model: nn.Module | Mapping[str, nn.Module]
    """Any module, sharded or not, or several by name (an actor and a critic, for example). Parameters, persistent buffers and the
    ``get_extra_state`` of modules are stored. Non-persistent buffers aren't, because constructing the model creates them again."""
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None
    """An optimizer over the parameters of one model, or several by name. Its state is stored by parameter name."""
    _: KW_ONLY
    scheduler: Any = None
    """A learning rate scheduler, or any object with ``state_dict`` and ``load_state_dict``, or several by name."""
    dataloader: Any = None
    """Holds the run's position in its data: a :class:`ResumableLoader`, torchdata's StatefulDataLoader, or any object with ``state_dict`` and
    ``load_state_dict``. It must count the batches that were consumed, not the ones that were prefetched."""
    scaler: Any = None
    """A ``torch.amp.GradScaler``."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional state by name: objects with ``state_dict`` and ``load_state_dict``, or plain values, which a restore writes back into this dict.
    If the ``state_dict`` of an object contains sharded tensors (diffusers' ``EMAModel``), its tensors are stored like those of a model."""
    frozen: Literal["hold", "refer", "auto"] = "hold"
    """``"refer"``: for parameters with neither ``requires_grad`` nor optimizer state, such as the base under adapters, a checkpoint stores
    digests instead of content. All adapters are stored, including those that aren't trained. Such a checkpoint needs the same base: load it
    first, and the restore compares each digest with the live tensor before it changes anything. ``export_hf`` writes its adapters; ``load`` fills
    a model that has the base. ``"auto"``: ``"refer"`` for a base that was loaded together with its adapters (``adapter=``), as long as the save finds it
    bit-identical to what the load read, for which it reads the base once more; otherwise ``"hold"``. A restore follows the checkpoint, not this field."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files by relative path, added to the checkpoint for other programs. Only rank 0's files are written. A restore doesn't read them."""

    def __post_init__(self) -> None:
        if self.frozen not in ("hold", "refer", "auto"):
            raise StateError(f"frozen={self.frozen!r}: expected 'hold', 'refer' or 'auto'")
        for model in self.models.values():
            refuse_fsdp1(fsdp1_problem(model.named_modules()))
        self.watch()
        warn_of_rounded_updates(self.optimizers)

    def watch(self) -> None:
        """Record from now on which gradients each optimizer step uses. Each optimizer is watched once, no matter how often you call this.

        Registers a hook (``register_step_post_hook``). Creating the state does this, and so does each save and restore for
        optimizers that were added later.
        """
        _refuse_gathered(self.models, self.optimizers)
        for optimizer in self.optimizers.values():
            watch_steps(optimizer)

    @property
    def not_given(self) -> tuple[str, ...]:
        """Training usually needs ``optimizer`` and ``dataloader``. This lists the ones that the state lacks."""
        return tuple(name for name in ("optimizer", "dataloader") if getattr(self, name) is None)

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name; a single one is named ``model``."""
        named = self.model if isinstance(self.model, Mapping) else {"model": self.model}
        return _checked(named, "model", nn.Module)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name, without wrappers; a single one is named ``optimizer``."""
        return {name: bare_optimizer(optimizer) for name, optimizer in self.given_optimizers.items()}

    @property
    def given_optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name, as they were passed: with Accelerate's wrapper, or one that has its own state."""
        if self.optimizer is None:
            return {}
        named = self.optimizer if isinstance(self.optimizer, Mapping) else {"optimizer": self.optimizer}
        return _checked(named, "optimizer", Optimizer)


def _refuse_gathered(models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
    """Raise :class:`StateError` for an optimizer that was made while FSDP2 had its parameters gathered: the model wouldn't read what it trains."""
    modules = (m for model in models.values() for m in model.modules() if isinstance(m, FSDPModule))
    gathered = fsdp_gathered_ids(modules)
    for name, optimizer in optimizers.items():
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if found := [p for p in held if id(p) in gathered]:
            raise StateError(
                f"{name} was made after a forward pass without gradients: {len(found)} of its {len(held)} parameters are whole tensors that FSDP2 "
                f"gathered for that pass, not the model's shards, so training them would have no effect. Make it before the first forward pass, or call "
                f"reshard() on every FSDPModule in model.modules() before you make it"
            )


def _checked(given: Mapping[str, Any], what: str, cls: type) -> dict[str, Any]:
    """The given objects by name, checked: names become folders of the checkpoint."""
    for name, one in given.items():
        if not isinstance(one, cls):
            raise StateError(
                f"{what}: expected a {cls.__module__}.{cls.__name__}, or several by name, got a "
                f"{type(one).__name__} ({name!r})"
            )
    bad = [name for name in given if not is_word(name)]
    if bad or not given:
        raise StateError(
            f"{what}={{…}}: names must be words (letters, digits, '_', '-'), got {bad}"
            if bad
            else f"{what}={{}}: holds none"
        )
    return dict(given)
