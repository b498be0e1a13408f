"""The formats of the library compressed-tensors: FP8, INT8, packed integers of 1 to 8 bits, NVFP4, MXFP4, MXFP8."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..catalog.quantized import Found, Source
from ..catalog.records import Coded, StoredTensor
from ..errors import FormatError
from ..internals.regex import check_patterns
from ..limits import brief
from ..objects import frozen
from .rules import Codes, Fp4Pairs, OneEach, PackedIntegers, Scaled, coded, packed_size

# ----------------------------------------------------------------------------------------------------
# What ``quantization_config`` of compressed-tensors says: which modules are stored in which format.

_FLOATS = ("BF16", "F16", "F32")


@frozen
class Format:
    """What a format stores of a module's weight."""

    codes: str = "weight"
    """The end of the codes' name."""
    dtype: str = ""
    """Of the codes; "": F8_E4M3 for floats, I8 for integers, one element each."""
    scales: tuple[str, ...] = _FLOATS
    """Their dtypes. Bytes are exponents of two."""
    more: str = ""
    """The end of the name of another part that there must be."""
    kind: str = ""
    """Of the numbers, in words."""


#: The library decodes all formats alike that store one element each.
FORMATS: Mapping[str, Format] = {
    "float-quantized": Format(),
    "int-quantized": Format(),
    "naive-quantized": Format(),
    "mxfp8-quantized": Format(scales=("U8",), kind="MXFP"),
    "pack-quantized": Format("weight_packed", "I32", more="weight_shape", kind="packed INT"),
    "nvfp4-pack-quantized": Format("weight_packed", "U8", ("F8_E4M3",), "weight_global_scale", "NVFP"),
    "mxfp4-pack-quantized": Format("weight_packed", "U8", ("U8",), kind="MXFP"),
    "dense": Format(),
}
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
    def is_grouped(self) -> bool:
        """Whether some columns of a row share a scale."""
        return self.strategy in ("group", "tensor_group")

    @property
    def words(self) -> str:
        """In words, for reports."""
        kind = FORMATS[self.format].kind or ("FP" if self.is_float else "INT")
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
    if not isinstance(form, str) or form not in FORMATS:
        return f"{where} has format {brief(form)}; known are {', '.join(FORMATS)}"
    if not isinstance(weights, Mapping):
        return f"{where}.weights is {brief(weights)}; expected its settings"
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if type(bits) is not int or not 1 <= bits <= 8:
        return f"{where}.weights has num_bits {brief(bits)}; expected 1 to 8"
    if kind not in ("int", "float"):
        return f"{where}.weights has type {brief(kind)}; expected 'int' or 'float'"
    size, block = weights.get("group_size"), _block(weights.get("block_structure"))
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or implied
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
    dtype, is_mx = FORMATS[scheme.format].dtype, scheme.format == "mxfp8-quantized"
    if dtype == "I32":
        return None if not scheme.is_float and scheme.strategy != "block" else "integers, not in blocks"
    if dtype == "U8" or is_mx:
        bits = 8 if is_mx else 4
        right = scheme.is_float and scheme.num_bits == bits and scheme.symmetric and scheme.is_grouped
        return None if right else f"symmetric floats of {bits} bits in groups"
    if scheme.format == "int-quantized" and scheme.is_float:
        return "integers"
    if scheme.format == "float-quantized" and not scheme.is_float:
        return "floats"
    if scheme.is_float and not (scheme.num_bits == 8 and scheme.symmetric) and scheme.format != "dense":
        return "symmetric floats of 8 bits"
    return None


# ----------------------------------------------------------------------------------------------------
# One module as compressed-tensors stores it: its parts against what its scheme says, and the tensor that they stand for.

#: Roles of the tensors that may stand beside a module's codes, by the ends of their names.
ROLES = {
    "weight_scale": "scales",
    "weight_zero_point": "zeros",
    "weight_global_scale": "global",
    "weight_shape": "shape",
    "weight_g_idx": "groups",
}
_INTEGERS = {"I32": "<i4", "I64": "<i8"}
_Shape = tuple[int, ...]


@frozen
class StoredModule:
    """A module's stored tensors, taken for those of one scheme."""

    name: str
    stored: Mapping[str, StoredTensor]
    """By the ends of their names: ``weight`` or ``weight_packed``, and those of :data:`ROLES`."""
    scheme: Scheme
    content: Callable[[str], bytes]

    def read(self) -> Coded | list[str]:
        """The weight that the parts stand for, or everything that is wrong with them."""
        if wrong := [*self._missing(), *self._surplus()]:
            return wrong
        if wrong := self._wrong_codes():
            return wrong
        shape = self._shape()
        if isinstance(shape, str):
            return [shape]
        order = self._order(shape)
        wrong = [*self._wrong_shapes(shape), *([order] if isinstance(order, str) else [])]
        if wrong or isinstance(order, str):
            return wrong
        parts = {
            "codes": self._codes,
            **{role: self.stored[end] for end, role in ROLES.items() if end in self.stored},
        }
        rule = self._rule(shape, order)
        return coded(f"{self.name}.weight".removeprefix("."), rule.dtype, shape, parts, rule)

    # What there must be

    @property
    def _format(self) -> Format:
        return FORMATS[self.scheme.format]

    @property
    def _codes(self) -> StoredTensor:
        return self.stored[self._format.codes]

    @property
    def _scales(self) -> StoredTensor:
        return self.stored["weight_scale"]

    def _wanted(self) -> Iterator[str]:
        yield self._format.codes
        yield "weight_scale"
        if not self.scheme.symmetric:
            yield "weight_zero_point"
        if self._format.more:
            yield self._format.more

    def _missing(self) -> Iterator[str]:
        held = next(
            self.stored[end].name for end in ("weight_packed", "weight", *ROLES) if end in self.stored
        )
        for end in self._wanted():
            if end not in self.stored:
                yield f"{held} has no {self.name}.{end} next to it, which {self._says()} asks for"

    def _surplus(self) -> Iterator[str]:
        wanted = {*self._wanted(), *(["weight_g_idx"] if self._format.dtype == "I32" else [])}
        for end, part in self.stored.items():
            if end not in wanted:
                yield f"{part.name} is not among the parts that {self._says()} has: {', '.join(self._wanted())}"

    def _says(self) -> str:
        return f"{self.scheme.group} ({self.scheme.format}, {self.scheme.words})"

    # Shapes and dtypes

    def _wrong_codes(self) -> list[str]:
        """What is wrong with the codes and the number of dims of the scales, from which the shape follows."""
        dtype = self._format.dtype or ("F8_E4M3" if self.scheme.is_float else "I8")
        wrong = []
        if self._codes.dtype != dtype:
            wrong.append(self._differs(self._codes, "dtype", self._codes.dtype, dtype))
        if len(self._codes.shape) != 2:
            wrong.append(self._differs(self._codes, "shape", self._codes.shape, "two dims"))
        if self.scheme.group_size and len(self._scales.shape) != 2:
            wrong.append(self._differs(self._scales, "shape", self._scales.shape, "two dims"))
        return wrong

    def _shape(self) -> tuple[int, int] | str:
        """The weight's shape, or what is wrong with what tells it."""
        rows, columns = self._codes.shape
        if self._format.dtype != "I32":
            return rows, 2 * columns if self._format.dtype == "U8" else columns
        if self.scheme.group_size:  # scales tell it; weight_shape need not be read
            return rows, self._scales.shape[1] * self.scheme.group_size
        part = self.stored["weight_shape"]
        if part.shape != (2,) or part.dtype not in _INTEGERS:
            return self._differs(part, "shape and dtype", f"{part.shape}, {part.dtype}", "(2,), I64")
        shape = tuple(int(n) for n in np.frombuffer(self.content(part.name), _INTEGERS[part.dtype]))
        if shape[0] != rows or packed_size(shape[1], self.scheme.num_bits) != columns:
            return (
                f"{part.name} says {shape}, and {self._codes.name} of shape {self._codes.shape} can't hold so many codes of "
                f"{self.scheme.num_bits} bits ({self._says()})"
            )
        return shape[0], shape[1]

    def _wrong_shapes(self, shape: tuple[int, int]) -> Iterator[str]:
        rows, columns = shape
        bits, size = self.scheme.num_bits, self.scheme.group_size
        if size and columns % size:
            yield self._differs(self._codes, "columns", columns, f"a multiple of group_size {size}")
        if self._format.dtype == "I32":
            yield from self._differences("weight_packed", ["I32"], [(rows, packed_size(columns, bits))])
            yield from self._differences("weight_shape", list(_INTEGERS), [(2,)])
            yield from self._differences("weight_g_idx", list(_INTEGERS), [(columns,)])
        yield from self._differences("weight_scale", self._format.scales, self._scale_shapes(shape))
        yield from self._differences("weight_zero_point", *self._zeros(rows))
        yield from self._differences("weight_global_scale", ["F32"], [(1,)])

    def _scale_shapes(self, shape: tuple[int, int]) -> Sequence[_Shape]:
        if self.scheme.strategy == "tensor":
            return [(1,), (), (1, 1)]
        block = self._block(shape)
        return [(-(-shape[0] // block[0]), -(-shape[1] // block[1]))]

    def _zeros(self, rows: int) -> tuple[Sequence[str], Sequence[_Shape]]:
        if self._packed_zeros:
            return ["I32"], [(packed_size(rows, self.scheme.num_bits), *self._scales.shape[1:])]
        return ["I8"], [self._scales.shape]

    @property
    def _packed_zeros(self) -> bool:
        return self._format.dtype == "I32" and self.scheme.strategy in ("group", "channel")

    def _block(self, shape: tuple[int, int]) -> tuple[int, int]:
        whole = max(1, shape[0]), max(1, shape[1])
        return {
            "tensor": whole,
            "channel": (1, whole[1]),
            "block": self.scheme.block,
        }.get(self.scheme.strategy, (1, self.scheme.group_size))

    def _differences(self, end: str, dtypes: Sequence[str], shapes: Sequence[_Shape]) -> Iterator[str]:
        part = self.stored.get(end)
        if part is not None and part.dtype not in dtypes:
            yield self._differs(part, "dtype", part.dtype, " or ".join(dtypes))
        if part is not None and part.shape not in shapes:
            yield self._differs(part, "shape", part.shape, " or ".join(map(str, shapes)))

    def _differs(self, part: StoredTensor, what: str, found: object, expected: object) -> str:
        return f"{part.name} has {what} {found}; expected {expected}, as {self._says()} says"

    # The order of columns

    def _order(self, shape: tuple[int, int]) -> bool | str:
        """Whether columns are of other groups than their places say; or what is wrong with the groups that they name."""
        part, size = self.stored.get("weight_g_idx"), self.scheme.group_size
        if part is None or part.dtype not in _INTEGERS or part.shape != (shape[1],):
            return False
        groups = np.frombuffer(self.content(part.name), _INTEGERS[part.dtype])
        if not size or (groups == -1).any():  # the library's mark for columns in their places
            return False
        count = shape[1] // size
        if (
            not ((groups >= 0) & (groups < count)).all()
            or (np.bincount(groups, minlength=count) != size).any()
        ):
            return (
                f"{part.name} does not name each of {count} groups {size} times, as {self._says()} asks for"
            )
        return bool((groups != np.arange(shape[1]) // size).any())

    # The rule

    def _rule(self, shape: tuple[int, int], order: bool) -> Scaled:
        bits, dims = self.scheme.num_bits, len(self._scales.shape)
        codes: Codes = OneEach(bits=bits)
        if self._format.dtype:
            codes = PackedIntegers(bits) if self._format.dtype == "I32" else Fp4Pairs()
        zeros: Codes = PackedIntegers(bits, dim=0) if self._packed_zeros else OneEach(dims)
        return Scaled(
            _METHOD,
            self.scheme.words,
            f"{self.name}.weight".removeprefix("."),
            self._scales.dtype if self._format.scales == _FLOATS else "BF16",
            codes,
            OneEach(dims),
            self._block(shape),
            zeros=None if self.scheme.symmetric else zeros,
            has_global="weight_global_scale" in self.stored,
            groups=self._scales.shape[1] if order else None,
        )


# ----------------------------------------------------------------------------------------------------
# The formats of the library compressed-tensors: FP8, INT8, packed integers of 1 to 8 bits, NVFP4, MXFP4, MXFP8.
#
# Every rule is that of the library's ``decompress``, and its result has the dtype of that: the scales' own, or BF16 where scales are
# bytes. A module's parts are stored beside each other: ``M.weight`` or ``M.weight_packed``, ``M.weight_scale``, and so on.

_METHOD = "compressed-tensors"
_PLAIN = ("BF16", "F16", "F32", "F64")
_SIDES = ("scale", "zero_point", "global_scale")
#: Ends of the names of tensors that quantize activations and caches.
_ACTIVATIONS = frozenset(f"{of}_{side}" for of in ("input", "output", "q", "k", "v") for side in _SIDES)
_Stored = Mapping[str, StoredTensor]


def find_compressed_tensors(source: Source) -> Found:
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
