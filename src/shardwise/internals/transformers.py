"""What shardwise uses of transformers that is private, or moves between releases. transformers 5.20-5.23."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..objects import frozen
from .torch import original_class

# ----------------------------------------------------------------------------------------------------
# transformers' table of conversions, of which only what one model needs is made. transformers 5.20-5.23.


def get_model_conversion_mapping(*args: Any, **options: Any) -> Any:
    """``conversion_mapping.get_model_conversion_mapping``, in a tenth of the time of its first call in a process.

    That first call makes the conversions of all classes that transformers has, with 860 regular expressions, which takes
    60 ms of CPU time on each rank: as long as all else that a load of 500 tensors does beside reading. Here the same
    functions run in a namespace of their own, in which a conversion is made when it is first asked for. transformers itself
    is not changed; once it has its table (the caller registered a conversion, or loaded a model by ``from_pretrained``),
    its own function is called. transformers 5.20-5.23: ``conversion_mapping._checkpoint_conversion_mapping_cache``.
    Without it, loads are right and slower.
    """
    module = importlib.import_module("transformers.conversion_mapping")
    if getattr(module, "_checkpoint_conversion_mapping_cache", ()) is not None:
        return module.get_model_conversion_mapping(*args, **options)
    return _postponing()["get_model_conversion_mapping"](*args, **options)


@functools.cache
def _postponing() -> dict[str, Any]:
    """The namespace of ``transformers.conversion_mapping`` anew, with constructors of conversions that postpone."""
    from transformers.core_model_loading import WeightTransform

    module = importlib.import_module("transformers.conversion_mapping")
    space = dict(vars(module))
    for name, value in vars(module).items():
        if inspect.isclass(value) and issubclass(value, WeightTransform):
            space[name] = functools.partial(_Postponed, value)
        elif inspect.isfunction(value) and value.__module__ == module.__name__:
            space[name] = _in(space, value)
    return space


def _in(space: dict[str, Any], function: FunctionType) -> FunctionType:
    """The same function, which looks its global names up in ``space``."""
    again = FunctionType(
        function.__code__, space, function.__name__, function.__defaults__, function.__closure__
    )
    again.__kwdefaults__ = function.__kwdefaults__
    return again


class _Postponed:
    """A conversion that is made when it is copied, as the table's reader does, or when it is asked for a field."""

    __slots__ = ("_args", "_kind", "_options")

    def __init__(self, kind: Callable[..., Any], *args: Any, **options: Any) -> None:
        self._kind, self._args, self._options = kind, args, options

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Constructors change the lists that they are given.
        return self._kind(*copy.deepcopy(self._args), **copy.deepcopy(self._options))

    def __getattr__(self, name: str) -> Any:
        return getattr(copy.deepcopy(self), name)


# ----------------------------------------------------------------------------------------------------
# What shardwise uses of transformers that is private, or moves between releases. transformers 5.20-5.23.
#
# Importing this does not import transformers, and asking whether a module is a transformers model doesn't either.


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a transformers model; never imports transformers itself.

    Without it, callers would import transformers for models of other kinds, too.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def config_settings(config: object) -> dict[str, Any] | None:
    """What a model is built with, in a config of transformers: its own class's arguments and the kernels of its attention and
    experts; None for any other object.

    transformers 5.20-5.23. The base class's arguments are left out: loading and training change them (``architectures``,
    ``problem_type``). Without it, a resume with another implementation of attention would be called exact.
    """
    module = sys.modules.get("transformers.configuration_utils")
    if module is None or not isinstance(config, module.PreTrainedConfig):
        return None
    general = inspect.signature(module.PreTrainedConfig.__init__).parameters
    own = [n for n in inspect.signature(type(config).__init__).parameters if n not in general]
    found = {name: getattr(config, name) for name in own if hasattr(config, name)}
    found["attn_implementation"] = getattr(config, "_attn_implementation", None)
    found["experts_implementation"] = getattr(config, "_experts_implementation", None)
    return found


# ----------------------------------------------------------------------------------------------------
# Classes, and models made of a config


def can_be_built(kind: Any) -> bool:
    """Whether something is a model class or an Auto class of transformers: what a model is built by from a config.

    Without it, ``--auto-class`` would take any name of a module, and the command would fail later, in another way.
    """
    return hasattr(kind, "from_config") or hasattr(kind, "_from_config")


def build_from_config(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model of a class (no Auto class) from a config alone, in a dtype, as ``from_pretrained`` builds it.

    transformers 5.0-5.23: ``PreTrainedModel._from_config``. The public constructor takes no dtype. Without it, parts
    that a class keeps in fp32 would get another one. In 5.0-5.3 only ``from_pretrained`` notes the dtype in the config and its
    parts; without that here, an export's ``config.json`` would name another dtype than its weights have.
    """
    for part in (config, *(getattr(config, key) for key in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    return kind._from_config(config, dtype=dtype)


@contextmanager
def one_sequence_a_sample() -> Iterator[None]:
    """Inside, models take it that no sample packs several sequences, as they find out from positions in a real run.

    transformers 5.20-5.23: ``masking_utils.find_packed_sequence_indices`` looks at the values, and gives up on fake tensors. Without
    it, attention on tensors without memory gets a mask, and with it a copy of keys and values for each head.
    """
    masking = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return
    setattr(masking, "find_packed_sequence_indices", lambda *_, **__: None)  # noqa: B010
    try:
        yield
    finally:
        setattr(masking, "find_packed_sequence_indices", original)  # noqa: B010


def without_initialization() -> AbstractContextManager[None]:
    """Inside, models are built without initial values. transformers 5.20-5.23; without it, building takes longer."""
    from transformers.initialization import no_init_weights

    found: AbstractContextManager[None] = no_init_weights()
    return found


def kept_in_fp32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Whether a tensor's name is one that the class keeps in fp32 (T5's ``wo`` in fp16, routers, …).

    transformers 5.20-5.23: ``_get_dtype_plan`` and ``core_model_loading.build_glob_alternation``. Without it, such a
    model has other dtypes than ``from_pretrained`` gives it, and other values.
    """
    from transformers.core_model_loading import build_glob_alternation

    if hasattr(model, "_get_dtype_plan"):
        plan = model._get_dtype_plan(dtype)
    else:  # transformers 5.0 and 5.1: one plan, whatever the dtype
        plan = dict(model.dtype_plan or {})
    if not plan:
        return lambda name: False
    pattern, _, _ = build_glob_alternation(list(plan))
    return lambda name: pattern.search(name) is not None


def kept_in_fp32_of_class(module: nn.Module) -> Callable[[str], bool]:
    """Whether a class's own words keep a tensor of its model in fp32, in the dtype that the model has; never imports transformers.

    Of transformers' models as :func:`kept_in_fp32`; of any other class that has ``_keep_in_fp32_modules``, as diffusers 0.37-0.42
    reads it: the name of a module or parameter on the way to the tensor. Without it, a report would not say that a cast is one that
    ``from_pretrained`` does not make.
    """
    if is_transformers_model(module):
        plans = [kept_in_fp32(module, dtype) for dtype in {p.dtype for p in module.parameters()}]
        return lambda name: any(is_kept(name) for is_kept in plans)
    said = getattr(module, "_keep_in_fp32_modules", None) or ()
    kept = {said} if isinstance(said, str) else set(said)
    return lambda name: not kept.isdisjoint(name.split("."))


def known_class(auto_class: Any, config: Any) -> Any:
    """The class that an Auto class has for a config, or a tuple of them; None if it has none.

    transformers 5.20-5.23: ``_BaseAutoModelClass._model_mapping``. Without it, a class that the caller registered
    would be passed by for code that lies beside the weights.
    """
    return auto_class._model_mapping.get(type(config), None)


def auto_class_of(kind: type) -> str | None:
    """The Auto class that a user's own class (of a model or a config) was registered for; None for any other class.

    transformers 5.20-5.23: ``register_for_auto_class`` notes it in ``_auto_class``. Without it, a checkpoint lacks the
    Python files of its classes.
    """
    found: str | None = getattr(kind, "_auto_class", None)
    return found


def blocks_not_to_split(module: nn.Module) -> tuple[str, ...]:
    """The classes of a model's blocks: those that must be on one device as a whole. None of a module that says none.

    transformers 5.20-5.23 and diffusers 0.37-0.42: ``_no_split_modules``, which Accelerate and FSDP look at, too; diffusers also
    ``_repeated_blocks``. Without it, models whose blocks are in no list would be one FSDP2 group.
    """
    names = (getattr(module, name, None) or () for name in ("_no_split_modules", "_repeated_blocks"))
    return tuple(chain.from_iterable(names))


def initializer_of(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """``_init_weights(module)`` of a module that initializes those inside it; None for any other.

    transformers 5.20-5.23 and most code written like it. Without it, new parameters (a head, say) have no rule.
    """
    method = getattr(module, "_init_weights", None)
    return method if callable(method) else None


def ignored_on_load(model: Any) -> tuple[set[str], set[str]]:
    """Patterns of names that a class declares: stored ones that it has no use for, own ones that may be missing.

    transformers 5.20-5.23: ``_keys_to_ignore_on_load_unexpected`` and ``…_missing``. Without it, loads that
    ``from_pretrained`` takes without a word are refused.
    """
    unexpected, missing = model._keys_to_ignore_on_load_unexpected, model._keys_to_ignore_on_load_missing
    return set(unexpected or ()), set(missing or ())


def ignored_on_save(module: nn.Module) -> set[str]:
    """Names of tensors that a class leaves out of what ``save_pretrained`` writes; none of other modules.

    transformers 5.20-5.23: ``_keys_to_ignore_on_save``. Without it, an export has tensors that ``from_pretrained`` then
    calls unexpected.
    """
    return set(getattr(module, "_keys_to_ignore_on_save", None) or ())


# ----------------------------------------------------------------------------------------------------
# Names and conversions of the hub


def transformers_conversions(meta_model: Any, key_mapping: Mapping[str, str] | None) -> list[Any]:
    """The renames and converters that ``from_pretrained`` would apply, in its order.

    ``meta_model`` must be an unsharded instance of the original class: on a wrapped one the mapping comes
    back empty. transformers 5.20-5.23: ``conversion_mapping.get_model_conversion_mapping``. Without it, tensors that
    the hub stores under other names, or in other parts, would be missing in a load.
    """
    model_class: Any = type(meta_model)
    if original_class(meta_model) is not model_class:
        raise TypeError(f"{model_class.__name__} is wrapped: its conversions would come back empty")
    quantizer = getattr(meta_model, "hf_quantizer", None)  # of a model whose modules hold codes
    mapping = dict(key_mapping) if key_mapping else None
    return list(get_model_conversion_mapping(meta_model, mapping, quantizer))


def default_conversions(meta_model: Any) -> list[Any]:
    """What ``save_pretrained`` inverts of a model that was not loaded from the hub's files.

    transformers 5.20-5.23: as in ``core_model_loading.revert_weight_conversion``, which finds nothing on a model
    whose class FSDP2 swapped. Without it, ``save_pretrained`` of such a model would write the model's own names.
    """
    from transformers import core_model_loading

    found = get_model_conversion_mapping(meta_model, add_legacy=False)
    prefix_change = getattr(core_model_loading, "PrefixChange", ())  # transformers before 5.6 has none
    return [conversion for conversion in found if not isinstance(conversion, prefix_change)]


def used_conversions(conversions: Sequence[Any]) -> list[Any]:
    """The conversions that a load has used: ``from_pretrained`` leaves these on a model.

    transformers before 5.6 doesn't track use and leaves all of them. Without it, ``save_pretrained`` would invert renames that the
    stored files never had.
    """
    return [c for c in conversions if not hasattr(c, "was_used") or c.was_used()]


def set_conversions(model: Any, conversions: list[Any]) -> None:
    """Leave on a live model what ``save_pretrained`` inverts to give the hub's names back, as ``from_pretrained`` does.

    transformers 5.20-5.23: ``_weight_conversions``. Without it, ``save_pretrained`` takes all that the class has,
    or nothing where FSDP2 swapped the class.
    """
    model._weight_conversions = conversions


def copy_conversions(of: Any, to: Any) -> None:
    """:func:`set_conversions` on a second model, if it was done to the first.

    transformers 5.20-5.23: ``_weight_conversions``. Without it, ``save_pretrained`` of the second could write other
    names than that of the first.
    """
    if hasattr(of, "_weight_conversions"):
        to._weight_conversions = copy.copy(of._weight_conversions)


@frozen
class HubGroup:
    """Stored tensors that one converter takes together: a layer's experts, the parts of a fused weight.

    The smallest set that the conversion can be run on. transformers 5.20-5.23: ``core_model_loading.WeightConverter``.
    Without it, no plan could say which stored tensors a converted one needs.
    """

    target: str
    """Module name of the (first) tensor that it makes."""
    parts: tuple[tuple[str, str], ...]
    """(stored name, source pattern that it matched), in the order in which the converter takes them."""
    converter: Any
    meta_model: Any

    @property
    def sources(self) -> tuple[str, ...]:
        """Stored names."""
        return tuple(name for name, _ in self.parts)

    @property
    def kinds(self) -> str:
        """The operations, in words."""
        return " + ".join(type(op).__name__ for op in self.converter.operations)

    @property
    def targets(self) -> tuple[str, ...]:
        """Module names of all tensors that it makes, as far as the converter's patterns tell."""
        patterns: list[str] = list(self.converter.target_patterns)
        found = next((p for p in patterns if p in self.target), None)
        if found is None:
            return (self.target,)
        prefix, _, suffix = self.target.partition(found)
        return tuple(prefix + p + suffix for p in patterns)

    def run(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Convert ``tensors`` (by stored name; real ones or symbols). Returns the converted tensors by module name."""
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.parts:
            converter.add_tensor(self.target, name, pattern, tensors[name])
        with torch.no_grad():
            made = converter.convert(self.target, model=self.meta_model, config=self.meta_model.config)
        if isinstance(made, tuple):  # transformers 5.0 returns the errors, too
            made, _ = made
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def hub_groups(
    stored: Iterable[str], conversions: Sequence[Any], meta_model: Any, wanted: dict[str, torch.Tensor]
) -> tuple[list[tuple[str, str]], list[HubGroup]]:
    """Sort stored names into those that are only renamed and those that a converter takes, as ``from_pretrained``.

    A function of the whole list of names: some renames only start once another key was seen, in natural
    order. ``wanted``: the model's state dict. Returns (module name, stored name) for the first kind, names that the
    model does not have included.

    transformers 5.20-5.23: follows ``core_model_loading.convert_and_load_state_dict_in_model``. Without it, no plan
    could say which stored tensors become which of the model's: transformers sorts them only while it loads all.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    prefix = meta_model.base_model_prefix

    def rename(name: str) -> tuple[str, str | None]:
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        return target, pattern

    def in_order(names: Iterable[str]) -> list[str]:
        natural = functools.cache(dot_natural_key)
        return sorted(names, key=lambda name: [key for part in name.split(".") for key in natural(part)])

    if _tell_no_numbers_apart(renamings, converters):
        renamed = _renamed_by_kind(dict.fromkeys(stored), rename, wanted)
    else:
        renamed = {name: rename(name) for name in in_order(set(stored))}
    plain: list[tuple[str, str]] = []
    left: list[str] = []
    taken: dict[str, tuple[str, str]] = {}
    for name in dict.fromkeys(stored):
        target, pattern = renamed[name]
        if target not in wanted:
            left.append(name)
        elif pattern is None:
            plain.append((target, name))
        else:
            taken[name] = target, pattern
    plain += [(renamed[name][0], name) for name in in_order(left)]
    parts: dict[str, list[tuple[str, str]]] = {}
    for name in in_order(taken):
        target, pattern = taken[name]
        parts.setdefault(target, []).append((name, pattern))
    groups = [
        HubGroup(target, tuple(found), by_pattern[found[0][1]], meta_model) for target, found in parts.items()
    ]
    return plain, groups


#: What tells numbers apart in a regular expression: a digit that isn't the end of a word or an escape; ``\d`` that is one digit.
_OF_ONE_NUMBER = re.compile(r"(?<![A-Za-z0-9_\\])[0-9]|\\d(?![+*])")


def _tell_no_numbers_apart(renamings: Sequence[Any], converters: Sequence[Any]) -> bool:
    """Whether the renames ignore the values of numbers in names, and keep no state between names.

    transformers 5.6-5.24: ``WeightTransform.rename_source_key``, which ``GroupWeightRename`` and others replace by methods with a
    state or with arithmetic. Without it, all 20,000 names of a mixture of experts go through the same dozen regular expressions.
    """
    from transformers import core_model_loading

    method = getattr(getattr(core_model_loading, "WeightTransform", None), "rename_source_key", None)
    return method is not None and not any(
        getattr(type(one), "rename_source_key", None) is not method
        or any(map(_OF_ONE_NUMBER.search, (*one.source_patterns, *one.target_patterns)))
        for one in (*renamings, *converters)
    )


def _renamed_by_kind(
    names: Iterable[str],
    rename: Callable[[str], tuple[str, str | None]],
    wanted: Mapping[str, Any],
) -> dict[str, tuple[str, str | None]]:
    """Rename names that differ only in numbers the way two of them are renamed.

    A name is renamed individually if its target isn't in the model, or if these two disagree.
    """
    found: dict[str, tuple[str, str | None]] = {}
    kinds: dict[str, list[tuple[str, list[str]]]] = {}
    for name in names:
        split = name.split(".")
        numbers = [part for part in split if part.isdecimal()]
        if numbers:
            kind = ".".join(["#" if part.isdecimal() else part for part in split])
            kinds.setdefault(kind, []).append((name, numbers))
        else:
            found[name] = rename(name)
    for members in kinds.values():
        form, pattern = _form(members, rename)
        for name, numbers in members:
            target = ".".join([p if isinstance(p, str) else numbers[p] for p in form])
            found[name] = (target, pattern) if target in wanted else rename(name)
    return found


def _form(
    members: Sequence[tuple[str, list[str]]], rename: Callable[[str], tuple[str, str | None]]
) -> tuple[list[str | int], str | None]:
    """The target of names that differ only in numbers, with placeholders for the numbers, and its pattern. Empty if unknown."""
    if len(members) < 3:
        return [], None
    # Two names show where each number goes: those of each are distinct, and none is the other's at the same place.
    first, numbers = next(_of_distinct_numbers(members), ("", []))
    others_of = _of_distinct_numbers(reversed(members))
    second, others = next((m for m in others_of if all(map(operator.ne, numbers, m[1]))), ("", []))
    if not numbers or not others:
        return [], None
    target, pattern = rename(first)
    place = {number: k for k, number in enumerate(numbers)}
    form = [place.get(part, part) for part in target.split(".")]
    predicted = ".".join([p if isinstance(p, str) else others[p] for p in form])
    return (form, pattern) if rename(second) == (predicted, pattern) else ([], None)


def _of_distinct_numbers(members: Iterable[tuple[str, list[str]]]) -> Iterator[tuple[str, list[str]]]:
    return (member for member in members if len(set(member[1])) == len(member[1]))


def revert_to_hub(meta_model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Module tensors (or symbols of them) under hub names, as ``save_pretrained`` reverts them.

    transformers 5.20-5.23: ``core_model_loading.revert_weight_conversion``. Without it, a model that was never loaded
    could not be written under hub names.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        return dict(revert_weight_conversion(meta_model, dict(tensors)))


def tie_map(model: Any) -> dict[str, str]:
    """Names that a transformers model ties, target to source; empty for other modules.

    transformers 5.20-5.23: ``all_tied_weights_keys``. Without it, a tied parameter could be initialized by the
    rule of its second name instead of its first.
    """
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def modules_cache() -> str:
    """The directory into which transformers copies the Python files of models.

    transformers 5.20-5.23: ``utils.hub.HF_MODULES_CACHE``. Without it, ranks that share the directory would copy the
    same files into it at once.
    """
    from transformers.utils.hub import HF_MODULES_CACHE

    return str(HF_MODULES_CACHE)


def remote_class(reference: str, directory: str, auto_class: str) -> Any:
    """The model class that a directory's own code defines, as ``from_pretrained(trust_remote_code=True)`` takes it.

    Runs that code. ``reference`` is ``[repository--]module.Class``; another repository's is taken from the local
    cache of the hub only. transformers 5.20-5.23: as in ``_BaseAutoModelClass.from_config``. Without it, a model whose
    code lies beside its weights could not be built.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

    found: Any = get_class_from_dynamic_module(reference, directory, local_files_only=True)
    found.register_for_auto_class(auto_class)  # so that a later save_pretrained carries the files along
    return add_generation_mixin_to_remote_model(found)
