"""One module as compressed-tensors stores it: its parts against what its scheme says, and the tensor that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..catalog.records import StoredTensor
from ..objects import frozen
from .coded import Coded, coded
from .codes import Codes, OneEach
from .compressed_settings import FP4, ONE_EACH, PACKED, Scheme
from .fp4 import Fp4Pairs
from .grouped import Grouped
from .packed import PackedIntegers, packed_size

__all__ = ["ROLES", "StoredModule"]

#: Roles of the tensors that may stand beside a module's codes, by the ends of their names.
ROLES = {
    "weight_scale": "scales",
    "weight_zero_point": "zeros",
    "weight_global_scale": "global",
    "weight_shape": "shape",
    "weight_g_idx": "groups",
}
_FLOATS = ("BF16", "F16", "F32")
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
    def _packs(self) -> bool:
        return self.scheme.format not in ONE_EACH

    @property
    def _codes_end(self) -> str:
        return "weight_packed" if self._packs else "weight"

    @property
    def _codes(self) -> StoredTensor:
        return self.stored[self._codes_end]

    @property
    def _scales(self) -> StoredTensor:
        return self.stored["weight_scale"]

    def _wanted(self) -> Iterator[str]:
        yield self._codes_end
        yield "weight_scale"
        if not self.scheme.symmetric:
            yield "weight_zero_point"
        if self.scheme.format == FP4[0]:
            yield "weight_global_scale"
        if self.scheme.format == PACKED:
            yield "weight_shape"

    def _missing(self) -> Iterator[str]:
        held = next(
            self.stored[end].name for end in ("weight_packed", "weight", *ROLES) if end in self.stored
        )
        for end in self._wanted():
            if end not in self.stored:
                yield f"{held} has no {self.name}.{end} next to it, which {self._says()} asks for"

    def _surplus(self) -> Iterator[str]:
        wanted = {*self._wanted(), *(["weight_g_idx"] if self.scheme.format == PACKED else [])}
        for end, part in self.stored.items():
            if end not in wanted:
                yield f"{part.name} is not among the parts that {self._says()} has: {', '.join(self._wanted())}"

    def _says(self) -> str:
        return f"{self.scheme.group} ({self.scheme.format}, {self.scheme.words})"

    # Shapes and dtypes

    def _wrong_codes(self) -> list[str]:
        """What is wrong with the codes and the number of dims of the scales, from which the shape follows."""
        dtype = {PACKED: "I32"}.get(self.scheme.format, "U8" if self._packs else self._code_dtype)
        wrong = (
            []
            if self._codes.dtype == dtype
            else [self._differs(self._codes, "dtype", self._codes.dtype, dtype)]
        )
        if len(self._codes.shape) != 2:
            wrong.append(self._differs(self._codes, "shape", self._codes.shape, "two dims"))
        if self.scheme.group_size and len(self._scales.shape) != 2:
            wrong.append(self._differs(self._scales, "shape", self._scales.shape, "two dims"))
        return wrong

    @property
    def _code_dtype(self) -> str:
        return "F8_E4M3" if self.scheme.is_float else "I8"

    def _shape(self) -> tuple[int, int] | str:
        """The weight's shape, or what is wrong with what tells it."""
        rows, columns = self._codes.shape
        if not self._packs:
            return rows, columns
        if self.scheme.format in FP4:
            return rows, 2 * columns
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
        if self.scheme.format == PACKED:
            yield from self._differences("weight_packed", ["I32"], [(rows, packed_size(columns, bits))])
            yield from self._differences("weight_shape", list(_INTEGERS), [(2,)])
            yield from self._differences("weight_g_idx", list(_INTEGERS), [(columns,)])
        yield from self._differences("weight_scale", self._scale_dtypes(), self._scale_shapes(shape))
        yield from self._differences("weight_zero_point", *self._zeros(rows))
        yield from self._differences("weight_global_scale", ["F32"], [(1,)])

    def _scale_dtypes(self) -> Sequence[str]:
        if self.scheme.is_mx:
            return ["U8"]
        return ["F8_E4M3"] if self.scheme.format in FP4 else _FLOATS

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
        return self.scheme.format == PACKED and self.scheme.strategy in ("group", "channel")

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

    def _rule(self, shape: tuple[int, int], order: bool) -> Grouped:
        return Grouped(
            format=self.scheme.words,
            name=f"{self.name}.weight".removeprefix("."),
            dtype="BF16" if self.scheme.is_mx or self.scheme.format in FP4 else self._scales.dtype,
            codes=self._arrangement(),
            block=self._block(shape),
            scales_shape=self._scales.shape,
            zeros=self._zeros_arrangement(),
            global_shape=(1,) if "weight_global_scale" in self.stored else None,
            groups=self._scales.shape[1] if order else None,
            bits=self.scheme.num_bits,
        )

    def _arrangement(self) -> Codes:
        if self.scheme.format == PACKED:
            return PackedIntegers(self.scheme.num_bits)
        return Fp4Pairs() if self._packs else OneEach()

    def _zeros_arrangement(self) -> Codes | None:
        if self.scheme.symmetric:
            return None
        return PackedIntegers(self.scheme.num_bits, dim=0) if self._packed_zeros else OneEach()
