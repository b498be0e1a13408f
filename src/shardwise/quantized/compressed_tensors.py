"""The formats of the library compressed-tensors: FP8, INT8, packed integers of 1 to 8 bits, NVFP4, MXFP4, MXFP8.

Every rule is that of the library's ``decompress``, and its result has the dtype of that: the scales' own, or BF16 where scales are
bytes. A module's parts are stored beside each other: ``M.weight`` or ``M.weight_packed``, ``M.weight_scale``, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..catalog.records import StoredTensor
from ..errors import FormatError
from ..internals.regex import check_patterns
from .coded import Coded
from .compressed_modules import ROLES, StoredModule
from .compressed_settings import Scheme, Settings, read_settings
from .families import Found, Source

__all__ = ["find"]

_METHOD = "compressed-tensors"
_PLAIN = ("BF16", "F16", "F32", "F64")
_SIDES = ("scale", "zero_point", "global_scale")
#: Ends of the names of tensors that quantize activations and caches.
_ACTIVATIONS = frozenset(f"{of}_{side}" for of in ("input", "output", "q", "k", "v") for side in _SIDES)
_Stored = Mapping[str, StoredTensor]


def find(source: Source) -> Found:
    """Find every weight that compressed-tensors stored. Implements :class:`.Family`.

    Reads ``weight_shape`` where shapes don't tell the number of columns (packed integers per channel or per tensor), and
    ``weight_g_idx``.
    """
    found = Found()
    modules = _modules(source.tensors)
    if source.settings.get("quant_method") != _METHOD:
        found.problems += _without_settings(modules)
        return found
    settings = read_settings(source.settings)
    found.problems += settings.problems
    try:
        check_patterns(settings.expressions, modules, "an expression in quantization_config", None)
    except FormatError as error:
        found.problems.append(str(error))
    found.unused |= {name for name in source.tensors if name.rpartition(".")[2] in _ACTIVATIONS}
    if not found.problems:
        for module, stored in modules.items():
            _take(found, module, stored, settings, source.content)
    return found


def _modules(tensors: _Stored) -> dict[str, dict[str, StoredTensor]]:
    """The stored tensors of each module that has more than a plain weight, by the ends of their names."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if end in ROLES or end == "weight_packed" or (end == "weight" and tensor.dtype not in _PLAIN):
            modules.setdefault(module, {})[end] = tensor
    for module, stored in modules.items():
        plain = f"{module}.weight".removeprefix(".")
        if "weight" not in stored and plain in tensors:
            stored["weight"] = tensors[plain]
    return modules


def _without_settings(modules: Mapping[str, _Stored]) -> list[str]:
    return [
        f"{stored['weight_packed'].name} is packed as by {_METHOD}, and the config has no quantization_config of that method"
        for stored in modules.values()
        if "weight_packed" in stored
    ]


def _take(
    found: Found, module: str, stored: _Stored, settings: Settings, content: Callable[[str], bytes]
) -> None:
    """Add what the tensors of one module stand for, or what is wrong with them."""
    first = next(iter(stored.values())).name
    schemes = settings.of_module(module)
    if settings.ignored(module):
        found.problems.append(
            f"{first} is part of a quantized weight, and quantization_config.ignore names {module}"
        )
    elif not schemes:
        found.problems.append(
            f"{first} is part of a quantized weight, and no target of quantization_config.config_groups names {module}"
        )
    else:
        read = [_read(module, stored, scheme, content) for scheme in schemes]
        best = next((one for one in read if not isinstance(one, list)), read[0])
        if isinstance(best, list):
            found.problems += best
        elif isinstance(best, Coded):
            found.add(best)
        else:
            found.unused |= best


def _read(
    module: str, stored: _Stored, scheme: Scheme, content: Callable[[str], bytes]
) -> Coded | set[str] | list[str]:
    """The weight that is stored as codes; names beside a weight that is stored as such; or what is wrong."""
    if scheme.format != "dense":
        return StoredModule(module, stored, scheme, content).read()
    codes = [
        part
        for end, part in stored.items()
        if end == "weight_packed" or (end == "weight" and part.dtype not in _PLAIN)
    ]
    if codes:
        return [
            f"{part.name} is stored as codes ({part.dtype}); {scheme.group} has format 'dense'"
            for part in codes
        ]
    return {part.name for end, part in stored.items() if end in ROLES}
