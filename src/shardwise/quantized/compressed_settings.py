"""What ``quantization_config`` of compressed-tensors says: which modules are stored in which format."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..limits import brief
from ..objects import frozen

__all__ = ["FP4", "ONE_EACH", "PACKED", "Scheme", "Settings", "read_settings"]

#: Formats that store one element each; the library decodes them all alike.
ONE_EACH = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized")
PACKED = "pack-quantized"
FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_FORMATS = (*ONE_EACH, PACKED, *FP4, "dense")
#: Transforms of these are part of the stored weights.
_OFFLINE = frozenset({"weight_input", "weight_output"})
_IS_EXPRESSION = "re:"
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


@frozen
class Scheme:
    """How the modules of one group store their weights."""

    group: str
    """Where the settings have it, for messages: ``config_groups.group_0``."""
    targets: tuple[str, ...]
    format: str
    is_float: bool
    num_bits: int
    symmetric: bool
    strategy: str
    group_size: int
    """Columns of a group; 0 for other strategies."""
    block: tuple[int, int]
    """Elements of a block in each dim; (0, 0) for other strategies."""

    @property
    def is_mx(self) -> bool:
        """Whether scales are exponents of two, a byte each."""
        return self.format.startswith("mx")

    @property
    def words(self) -> str:
        """In words, for reports."""
        kind = {PACKED: "packed INT", FP4[0]: "NVFP", FP4[1]: "MXFP"}.get(self.format)
        kind = kind or ("MXFP" if self.is_mx else "FP" if self.is_float else "INT")
        scope = {
            "tensor": "per tensor",
            "channel": "per channel",
            "block": f"in blocks of {self.block[0]} x {self.block[1]}",
        }.get(self.strategy, f"in groups of {self.group_size}")
        return f"{kind}{self.num_bits} {scope}{'' if self.symmetric else ', with zero points'}"


@frozen
class Settings:
    """All groups that quantize weights, and what is wrong with the settings.

    Only for names with which :func:`.check_patterns` took the ``expressions``.
    """

    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def expressions(self) -> list[str]:
        """The regular expressions among targets and ignored names, which come from a file."""
        named = [*self.ignore, *(target for scheme in self.schemes for target in scheme.targets)]
        return [one.removeprefix(_IS_EXPRESSION) for one in named if one.startswith(_IS_EXPRESSION)]

    def ignored(self, module: str) -> bool:
        return any(_matches(pattern, module) for pattern in self.ignore)

    def of_module(self, module: str) -> tuple[Scheme, ...]:
        """The schemes that may be meant for a module, as the library prefers them: by name, by pattern, then by class.

        Stored tensors don't tell classes, so every target that may be a class's name counts.
        """
        ranked = [
            (rank, scheme) for scheme in self.schemes if (rank := _rank(scheme.targets, module)) is not None
        ]
        best = min((rank for rank, _ in ranked), default=0)
        return tuple(scheme for rank, scheme in ranked if rank == best)


def _matches(pattern: str, module: str) -> bool:
    if not pattern.startswith(_IS_EXPRESSION):
        return pattern == module
    return _compiled(pattern.removeprefix(_IS_EXPRESSION)).match(module) is not None


@functools.lru_cache(maxsize=2**15)  # re keeps 512, and compiles more than those again for every module
def _compiled(expression: str) -> re.Pattern[str]:
    return re.compile(expression)


def _rank(targets: Sequence[str], module: str) -> int | None:
    if module in targets:
        return 0
    if any(_matches(target, module) for target in targets):
        return 1
    return 2 if any(target.isidentifier() and target[:1].isupper() for target in targets) else None


# ----------------------------------------------------------------------------------------------------
# Reading


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The groups of a ``quantization_config``. Whatever can't be understood is a problem."""
    problems = list(_unknown_features(config))
    schemes = []
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping):
        problems.append(f"quantization_config.config_groups is {brief(groups)}; expected groups by name")
        groups = {}
    for name, group in groups.items():
        where = f"quantization_config.config_groups.{name}"
        if not isinstance(group, Mapping):
            problems.append(f"{where} is {brief(group)}; expected its targets and weights")
        elif group.get("weights") is not None:
            scheme = _scheme(where, group, config.get("format"))
            problems += [scheme] if isinstance(scheme, str) else _contradictions(scheme)
            schemes += [] if isinstance(scheme, str) else [scheme]
    return Settings(tuple(schemes), _strings(config.get("ignore")), tuple(problems))


def _unknown_features(config: Mapping[str, Any]) -> Iterator[str]:
    sparsity = config.get("sparsity_config")
    kind = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else "dense"
    if kind != "dense":
        yield f"quantization_config.sparsity_config has format {brief(kind)}, which is not known; store the weights without it"
    places = sorted(set(_transformed(config.get("transform_config"))) - _OFFLINE)
    if places:
        yield (
            f"quantization_config.transform_config transforms {', '.join(places)} while the model runs, which is not known; "
            "weights without it would be those of another model"
        )


def _transformed(config: Any) -> Iterator[str]:
    """What the transforms of a config apply to."""
    groups = config.get("config_groups") if isinstance(config, Mapping) else None
    for group in groups.values() if isinstance(groups, Mapping) else ():
        applied = group.get("apply") if isinstance(group, Mapping) else None
        for one in applied if isinstance(applied, list) else ():
            yield str(one.get("location")) if isinstance(one, Mapping) else str(one)


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, Sequence) else ()


def _scheme(where: str, group: Mapping[str, Any], default_format: Any) -> Scheme | str:
    """The scheme of a group, or what is wrong with it."""
    form, weights = group.get("format") or default_format, group["weights"]
    if form not in _FORMATS:
        return f"{where} has format {brief(form)}; known are {', '.join(_FORMATS)}"
    if not isinstance(weights, Mapping):
        return f"{where}.weights is {brief(weights)}; expected its settings"
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if type(bits) is not int or not 1 <= bits <= 8:
        return f"{where}.weights has num_bits {brief(bits)}; expected 1 to 8"
    if kind not in ("int", "float"):
        return f"{where}.weights has type {brief(kind)}; expected 'int' or 'float'"
    size, block = weights.get("group_size"), _block(weights.get("block_structure"))
    strategy = weights.get("strategy") or _implied_strategy(size)
    if strategy not in _STRATEGIES:
        return f"{where}.weights has strategy {brief(strategy)}; known are {', '.join(_STRATEGIES)}"
    if strategy in ("group", "tensor_group") and (type(size) is not int or size < 1):
        return f"{where}.weights has strategy {brief(strategy)} and group_size {brief(size)}; expected a positive number"
    if strategy == "block" and block is None:
        return (
            f"{where}.weights has strategy 'block' and block_structure {brief(weights.get('block_structure'))}; "
            "expected two positive numbers"
        )
    grouped = strategy in ("group", "tensor_group")
    return Scheme(
        where.removeprefix("quantization_config."),
        _strings(group.get("targets")),
        form,
        kind == "float",
        bits,
        bool(weights.get("symmetric", True)),
        strategy,
        size if grouped and type(size) is int else 0,
        block if strategy == "block" and block else (0, 0),
    )


def _implied_strategy(group_size: Any) -> str:
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _block(value: Any) -> tuple[int, int] | None:
    """Rows and columns of a block, also as written by old versions: "128x128"."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", value):
        value = [int(size) for size in value.split("x")]
    if isinstance(value, Sequence) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    return None


def _contradictions(scheme: Scheme) -> list[str]:
    """A format, and numbers that it can't hold."""
    expected = _expected(scheme)
    if expected is None:
        return []
    number = f"{'float' if scheme.is_float else 'int'} of {scheme.num_bits} bits"
    zeros = "" if scheme.symmetric else ", not symmetric"
    return [
        f"quantization_config.{scheme.group} has format {scheme.format!r} and weights of type {number}{zeros}, "
        f"strategy {scheme.strategy!r}; expected {expected}"
    ]


def _expected(scheme: Scheme) -> str | None:
    """The numbers that a format holds, if the scheme has others."""
    grouped = scheme.strategy in ("group", "tensor_group")
    if scheme.format in FP4:
        right = scheme.is_float and scheme.num_bits == 4 and scheme.symmetric and grouped
        return None if right else "symmetric floats of 4 bits in groups"
    if scheme.format == PACKED:
        return None if not scheme.is_float and scheme.strategy != "block" else "integers, not in blocks"
    if scheme.format == "mxfp8-quantized":
        right = scheme.is_float and scheme.num_bits == 8 and scheme.symmetric and grouped
        return None if right else "symmetric floats of 8 bits in groups"
    if scheme.format == "int-quantized" and scheme.is_float:
        return "integers"
    if scheme.format == "float-quantized" and not scheme.is_float:
        return "floats"
    if scheme.is_float and not (scheme.num_bits == 8 and scheme.symmetric) and scheme.format != "dense":
        return "symmetric floats of 8 bits"
    return None
