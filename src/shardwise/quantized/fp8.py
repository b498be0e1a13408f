"""FP8 with scales, as DeepSeek, Qwen and Mistral store it: ``weight`` and ``weight_scale_inv``, or ``weight_scale``.

Both are factors: the weight is ``code × scale``, in spite of the name. Scales are for blocks (``weight_block_size``), channels, or the
tensor. Source: transformers' ``integrations/finegrained_fp8.py`` (``Fp8Dequantize``), and for blocks that the tensor's edge cuts
short the ``weight_dequant`` of DeepSeek-V3's own ``inference/kernel.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..catalog.records import StoredTensor
from ..limits import brief
from ..tensors.boxes import whole
from .open import Found, Source
from .rules import Scaled, coded, reshaped

__all__ = ["find"]

_CODES = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}
_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
#: Suffixes of the scales of a tensor, instead of its own.
_BESIDE = (("_scale_inv", ""), ("_scale", ""), (".scale", ".weight"))
#: Scales of activations and of a cache of keys and values: they run the model in FP8, and are no part of a weight.
_OF_RUNS = (
    ".input_scale",
    ".activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_output_scale",
    ".input_scale_ub",
    "_activation_scale",
)
#: Columns of a block of the MX formats, whose scales are exponents of two.
_MX_BLOCK = 32


def find(source: Source) -> Found:
    """Find the tensors that are stored in FP8 with scales. Implements :class:`.Family`."""
    found = Found()
    block = _block_size(source, found)
    taken: set[str] = set()
    for name, codes in source.tensors.items():
        if codes.dtype not in _CODES:
            continue
        scales, *others = *_scales_of(name, source), None
        if scales is not None and others[:-1]:
            names = " and ".join(repr(one.name) for one in (scales, *others) if one is not None)
            found.problems.append(f"ambiguous: {names} both scale the codes {name!r}; remove one")
            taken |= {one.name for one in (scales, *others) if one is not None}
            continue
        if scales is None:
            ends = " or ".join(repr(name.removesuffix(own) + end) for end, own in _BESIDE[:2])
            found.problems.append(f"missing: scales of the FP8 codes {name!r} ({ends}) are not stored")
            continue
        taken.add(scales.name)
        _add(found, codes, scales, block)
    for name in source.tensors:
        if name.endswith(_OF_RUNS):
            found.unused.add(name)
        elif name.endswith("_scale_inv") and name not in taken:
            of = name.removesuffix("_scale_inv")
            held = source.tensors.get(of)
            what = "is not stored" if held is None else f"is {held.dtype}, not FP8"
            found.problems.append(f"surplus: {name!r} scales {of!r}, which {what}")
    return found


def _block_size(source: Source, found: Found) -> tuple[int, ...] | None:
    size = source.settings.get("weight_block_size")
    if size is None:
        return None
    if (
        isinstance(size, (list, tuple))
        and len(size) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in size)
    ):
        return tuple(size)
    found.problems.append(f"weight_block_size of the config is {brief(size)}, expected two positive integers")
    return None


def _scales_of(name: str, source: Source) -> Iterator[StoredTensor]:
    for end, own in _BESIDE:
        held = source.tensors.get(name.removesuffix(own) + end)
        if name.endswith(own) and held is not None and not held.name.endswith(_OF_RUNS):
            yield held


def _add(found: Found, codes: StoredTensor, scales: StoredTensor, block: tuple[int, ...] | None) -> None:
    if scales.dtype not in _SCALES:
        found.problems.append(
            f"dtype mismatch: the scales {scales.name!r} are {scales.dtype}, expected one of {', '.join(_SCALES)}"
        )
        return
    sizes = _block_of(codes, scales, block)
    grid = None if sizes is None else tuple(-(-n // b) for n, b in zip(codes.shape, sizes, strict=True))
    part = None if grid is None else _viewed(scales, grid)
    if sizes is None or part is None:
        per = " or those of blocks, if the config says their size in weight_block_size,"
        if block is not None:
            per = f" or {list(_grid(codes.shape, block))} for blocks of {brief(list(block))},"
        found.problems.append(
            f"shape mismatch: the scales {scales.name!r} of the codes {codes.name!r} {list(codes.shape)} have shape "
            f"{list(scales.shape)}, expected [] for one,{per} or {list(codes.shape[:-1])} for channels"
        )
        return
    words = f"FP8 ({_CODES[codes.dtype]}) {_described(codes.shape, sizes)}"
    rule = Scaled(words, codes.name, "F32", sizes)
    found.add(coded(codes.name, "F32", codes.shape, {"codes": codes, "scales": part}, rule))


def _block_of(
    codes: StoredTensor, scales: StoredTensor, block: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The elements of a block in each dim, from the shape of the scales; None if they have another shape than any rule gives."""
    shape, held = codes.shape, scales.shape
    if not shape:
        return () if held in ((), (1,)) else None
    lead = shape[:-2]
    if block is not None and len(shape) >= 2 and held == _grid(shape, block):
        return (*(1 for _ in lead), *block)
    exponents = scales.dtype in ("F8_E8M0", "U8")
    if exponents and held == (*shape[:-1], -(-shape[-1] // _MX_BLOCK)):
        return (*(1 for _ in shape[:-1]), _MX_BLOCK)
    if held in ((), (1,)) or set(held) == {1}:
        return tuple(max(1, n) for n in shape)
    if held in (shape[:-1], (*shape[:-1], 1)):
        return (*(1 for _ in shape[:-1]), max(1, shape[-1]))
    if lead and held in (lead, (*lead, 1), (*lead, 1, 1)):  # one for each expert
        return (*(1 for _ in lead), *(max(1, n) for n in shape[-2:]))
    # Not by evenly divided dims, where no config says the size of a block: scales that were transposed might fit, too.
    return None


def _grid(shape: tuple[int, ...], block: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], block, strict=True)))


def _viewed(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor | None:
    """The same elements in another shape; None if there are more or fewer, or if they lie in several chunks."""
    if tensor.shape == shape:
        return tensor
    if len(tensor.chunks) != 1 or whole(tensor.shape).numel != whole(shape).numel:
        return None
    return reshaped(tensor, tensor.dtype, shape)


def _described(shape: Sequence[int], block: Sequence[int]) -> str:
    if all(b >= n for n, b in zip(shape, block, strict=True)):
        return "with one scale a tensor"
    if block[-1] >= shape[-1] and set(block[:-1]) == {1}:
        return "with a scale a channel"
    return f"in blocks of {_times([b for b in block if b > 1])}"


def _times(sizes: Sequence[Any]) -> str:
    return " x ".join(map(str, sizes))
