"""The formats of FP8, GPTQ, AWQ and gpt-oss' MXFP4: what must be stored for each tensor, and the rule that it is a row of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from ..catalog.quantized import Found, Source
from ..catalog.records import Coded, StoredTensor
from ..dtypes import code_of
from ..errors import FormatError
from ..limits import brief, parse_json
from ..objects import frozen
from ..tensors.boxes import whole
from .rules import AwqWords, FieldWords, Fp4Columns, OneEach, Scaled, check, coded, require, reshaped

# ----------------------------------------------------------------------------------------------------
# FP8 with scales, as DeepSeek, Qwen and Mistral store it: ``weight`` and ``weight_scale_inv``, or ``weight_scale``.
#
# Both are factors: the weight is ``code × scale``, in spite of the name. Scales are for blocks (``weight_block_size``), channels, or the
# tensor. Source: transformers' ``integrations/finegrained_fp8.py`` (``Fp8Dequantize``), and for blocks that the tensor's edge cuts
# short the ``weight_dequant`` of DeepSeek-V3's own ``inference/kernel.py``.

_FP8 = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}
_FP8_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
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


def find_fp8(source: Source) -> Found:
    """Find the tensors that are stored in FP8 with scales. Implements :class:`.Family`."""
    found = Found()
    block = _block_size(source, found)
    taken: set[str] = set()
    for name, codes in source.tensors.items():
        if codes.dtype not in _FP8:
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
    if scales.dtype not in _FP8_SCALES:
        found.problems.append(
            f"dtype mismatch: the scales {scales.name!r} are {scales.dtype}, expected one of {', '.join(_FP8_SCALES)}"
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
    words = f"FP8 ({_FP8[codes.dtype]}) {_described(codes.shape, sizes)}"
    rule = Scaled("fp8", words, codes.name, "F32", OneEach(), OneEach(), sizes)
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
    return f"in blocks of {' x '.join(str(b) for b in block if b > 1)}"


# ----------------------------------------------------------------------------------------------------
# MXFP4 of OpenAI's gpt-oss: experts as ``X_blocks``, 16 bytes of two FP4 each, and ``X_scales``, an exponent per block.
#
# Source: ``convert_moe_packed_tensors`` in transformers' ``integrations/mxfp4.py``. Its result is the transpose of what is stored.

_BYTES = 16
_BLOCKS, _SCALES = "_blocks", "_scales"


def find_mxfp4(source: Source) -> Found:
    """Find experts in MXFP4. Implements :class:`.Family`."""
    found = Found()
    pairs = {name.removesuffix(_BLOCKS) for name in source.tensors if name.endswith(_BLOCKS)}
    method = source.settings.get("quant_method")
    if method != "mxfp4":
        return found
    pairs |= {
        name.removesuffix(_SCALES)
        for name, tensor in source.tensors.items()
        if name.endswith(_SCALES) and tensor.dtype == "U8"
    }
    for name in sorted(pairs):
        blocks, scales = source.tensors.get(name + _BLOCKS), source.tensors.get(name + _SCALES)
        if blocks is None:
            found.problems.append(f"{name}{_SCALES} has no {name}{_BLOCKS} next to it")
        elif scales is None:
            found.problems.append(
                f"{name}{_BLOCKS} has no {name}{_SCALES} next to it: codes without scales are not weights"
            )
        elif name in source.tensors:
            found.problems.append(f"{name} is stored twice: as {name} and as {name}{_BLOCKS}; remove one")
        elif wrong := [*_wrong_blocks(blocks), *_wrong_scales(scales, blocks)]:
            found.problems += wrong
        else:
            experts, rows, count, _ = blocks.shape
            rule = Scaled(
                "mxfp4",
                "MXFP4 in blocks of 32",
                name,
                "BF16",
                Fp4Columns(),
                OneEach(is_turned=True),
                (1, 32, 1),
            )
            parts = {"codes": blocks, "scales": scales}
            found.add(coded(name, "BF16", (experts, count * 32, rows), parts, rule))
    if not pairs:
        found.problems.append(
            f"the config says quant_method 'mxfp4', and no stored tensor ends in {_BLOCKS!r} or {_SCALES!r}"
        )
    return found


def _wrong_blocks(blocks: StoredTensor) -> list[str]:
    wrong = _wrong_dtype(blocks)
    if len(blocks.shape) != 4 or blocks.shape[-1] != _BYTES:
        wrong.append(
            f"{blocks.name} has shape {blocks.shape}; expected four dims: experts, rows, blocks and {_BYTES} bytes"
        )
    return wrong


def _wrong_scales(scales: StoredTensor, blocks: StoredTensor) -> list[str]:
    wrong = _wrong_dtype(scales)
    if scales.shape != blocks.shape[:-1]:
        wrong.append(
            f"{scales.name} has shape {scales.shape}; expected {blocks.shape[:-1]}, one scale for each block of {blocks.name}"
        )
    return wrong


def _wrong_dtype(part: StoredTensor) -> list[str]:
    return [] if part.dtype == "U8" else [f"{part.name} has dtype {part.dtype}; expected U8"]


# ----------------------------------------------------------------------------------------------------
# torchao's ``Int8Tensor`` and ``Float8Tensor`` in safetensors: ``X._weight_qdata``, ``X._weight_scale`` and perhaps
# ``X._weight_zero_point`` for ``X.weight``. The file's metadata has the class, the block and the dtype.
#
# Sources: ``flatten_tensor_state_dict`` and the classes' ``dequantize``, in torchao 0.16-0.18.

_TORCHAO = {"Int8Tensor": {"I8": "INT8"}, "Float8Tensor": _FP8}


def find_torchao(source: Source) -> Found:
    """Find the tensors that torchao stored as INT8 or FP8. Implements :class:`.Family`."""
    found = Found()
    for name in source.tensors:
        if name.endswith("_qdata"):
            found.take(partial(_of_torchao, source, name.removesuffix("_qdata")))
    return found


def _of_torchao(source: Source, stem: str) -> Coded:
    module, _, last = stem.rpartition("_")
    name = module + last
    said = parse_json(source.content(name), name)
    codes, scales = (require(source.tensors, f"{stem}_{part}", name) for part in ("qdata", "scale"))
    try:
        kind, data = said["_type"], said["_data"]
        block, dtype = tuple(map(int, data["block_size"])), code_of(getattr(torch, data["dtype"]["_data"]))
        words = _TORCHAO[kind][codes.dtype]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{codes.dtype}, and {brief(said)} in the file's metadata; expected torchao's Int8Tensor or Float8Tensor. Load the model "
            f"from which it was quantized, or save plain weights: {{n: t.dequantize() for n, t in state_dict.items()}}",
            path=name,
        ) from error
    parts = {"codes": codes, "scales": scales}
    if f"{stem}_zero_point" in source.tensors:
        parts["zeros"] = source.tensors[f"{stem}_zero_point"]
    grid = _grid_of(codes.shape, block)
    for part in (one for key, one in parts.items() if key != "codes"):
        if part.shape != grid:
            raise FormatError(
                f"has shape {list(part.shape)}; expected {list(grid)}, one for each block of {list(block)}",
                path=part.name,
            )
    zeros = OneEach() if "zeros" in parts else None
    rule = Scaled(
        "torchao",
        f"{words} {_described(codes.shape, block)}",
        name,
        dtype,
        OneEach(),
        OneEach(),
        block,
        zeros,
    )
    return coded(name, dtype, codes.shape, parts, rule)


def _grid_of(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) != len(block) or min(block, default=0) < 1:
        raise FormatError(f"blocks of {brief(list(block))} in a tensor of shape {list(shape)}")
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


# ----------------------------------------------------------------------------------------------------
# optimum-quanto's INT8 and FP8: ``X.weight._data`` and ``X.weight._scale``, in the dtype of the scales.
#
# Source: ``WeightQBytesTensor`` and ``QBytesDequantizer`` in optimum-quanto 0.2.7.


def find_quanto(source: Source) -> Found:
    """Find the tensors that quanto stored as INT8 or FP8. Implements :class:`.Family`."""
    found = Found()
    for name, codes in source.tensors.items():
        if name.endswith("._data"):
            stem = name.removesuffix("._data").removesuffix("._data")  # of packed codes, there are two
            found.take(partial(_of_quanto, source, codes, stem))
        elif name.endswith(_OF_RUNS):
            found.unused.add(name)
    return found


def _of_quanto(source: Source, codes: StoredTensor, name: str) -> Coded:
    scales = require(source.tensors, f"{name}._scale", name)
    block = _block_of(codes, scales, None)
    part = None if block is None else _viewed(scales, _grid_of(codes.shape, block))
    words = {"I8": "INT8", **_FP8}.get(codes.dtype)
    if block is None or part is None or words is None:
        raise FormatError(
            f"stored as {codes.dtype} {list(codes.shape)} with scales {list(scales.shape)}; expected quanto's INT8 or FP8 with a scale for "
            f"each row. Load the model from which it was quantized",
            path=name,
        )
    words = f"{words} {_described(codes.shape, block)}"
    rule = Scaled("quanto", words, name, scales.dtype, OneEach(), OneEach(), block)
    return coded(name, scales.dtype, codes.shape, {"codes": codes, "scales": part}, rule)


# ----------------------------------------------------------------------------------------------------
# GPTQ, as AutoGPTQ, GPTQModel and Optimum store it, and AWQ, as AutoAWQ's ``WQLinear_GEMM`` does: ``(code − zero) × scale`` in F16.
#
# ``X.qweight``, ``X.qzeros``, ``X.scales``, and in GPTQ ``X.g_idx``, stand for ``X.weight``. All are stored turned: [inputs, outputs], with
# codes in words along the inputs (GPTQ) or the outputs (AWQ), zero points along the outputs. The first format of GPTQ stores zero points
# less one. Sources: ``dequantize_weight`` of GPTQModel's ``TorchLinear``, ``dequantize_gemm`` of AutoAWQ.

T = TypeVar("T")


def _each_module(
    source: Source,
    method: str,
    last: tuple[str, ...],
    settings_of: Callable[[Mapping[str, Any]], T],
    make: Callable[[Source, str, T], Coded],
) -> Found:
    """What is found whose modules each have tensors of these last names. Errors of ``settings_of`` and ``make`` become problems."""
    found = Found()
    parted = (name.rpartition(".") for name in source.tensors)
    stems = sorted({stem + dot for stem, dot, end in parted if end in last})
    if source.settings.get("quant_method") != method or not stems:
        return found
    try:
        settings = settings_of(source.settings)
    except FormatError as error:
        found.problems.append(f"{stems[0]}qweight can't be decoded, as {len(stems)} modules in all: {error}")
        return found
    for stem in stems:
        found.take(partial(make, source, stem, settings))
    return found


def _group_size_of(size: object) -> int:
    """Inputs of a group; -1: all of them. Raises :class:`FormatError`."""
    if type(size) is not int or (size < 1 and size != -1):
        raise FormatError(
            f"expected a positive number or -1 as group_size in config.json, found {brief(size)}"
        )
    return size


def _words_of(
    tensors: Mapping[str, StoredTensor], stem: str
) -> tuple[StoredTensor, StoredTensor, StoredTensor]:
    """``qweight``, ``qzeros`` and ``scales`` of a module, each in two dims. Raises :class:`FormatError` if it has no such three."""
    if f"{stem}weight" in tensors:
        raise FormatError(f"stored plainly, too: expected either it or {stem}qweight", path=f"{stem}weight")
    codes, zeros, scales = (
        require(tensors, stem + one, f"{stem}weight") for one in ("qweight", "qzeros", "scales")
    )
    for part, dtype in ((codes, "I32"), (zeros, "I32"), (scales, "F16")):
        if part.dtype != dtype or len(part.shape) != 2 or not all(part.shape):
            raise FormatError(
                f"expected {dtype} in two dims, found {part.dtype} {list(part.shape)}", path=part.name
            )
    return codes, zeros, scales


_BITS = (2, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


@frozen
class _GptqSettings:
    bits: int
    group_size: int
    """-1: all inputs are one group."""
    in_order: bool
    plus_one: bool
    dynamic: bool
    """Modules may have bits and groups of their own, which their tensors tell."""


def find_gptq(source: Source) -> Found:
    """Every tensor in codes of GPTQ. Implements :class:`.Family`."""
    return _each_module(source, "gptq", ("qweight", "qzeros", "g_idx"), _gptq_settings, _gptq)


def _gptq_settings(given: Mapping[str, Any]) -> _GptqSettings:
    """What config.json says of all modules. Raises :class:`FormatError` for what this version can't decode."""
    bits, size, by_activation = (
        given.get(k, d) for k, d in (("bits", None), ("group_size", 128), ("desc_act", False))
    )
    layout = given.get("checkpoint_format") or given.get("format") or "gptq"
    if type(bits) is not int or bits not in _BITS:
        raise FormatError(f"expected 2, 4 or 8 as bits in config.json, found {brief(bits)}")
    if not isinstance(by_activation, bool):
        raise FormatError(f"expected true or false as desc_act in config.json, found {brief(by_activation)}")
    if layout not in _FORMATS or given.get("is_marlin_format"):
        found = brief(layout) if layout not in _FORMATS else "is_marlin_format"
        raise FormatError(f"expected gptq or gptq_v2 as checkpoint_format in config.json, found {found}")
    if given.get("rotation"):
        raise FormatError(
            f"config.json says rotation = {brief(given['rotation'])}: the codes are of rotated weights"
        )
    return _GptqSettings(
        bits, _group_size_of(size), not by_activation, layout == "gptq", bool(given.get("dynamic"))
    )


def _gptq(source: Source, stem: str, settings: _GptqSettings) -> Coded:
    codes, zeros, scales = _words_of(source.tensors, stem)
    index = require(source.tensors, f"{stem}g_idx", f"{stem}weight")
    if index.dtype != "I32" or len(index.shape) != 1 or not index.shape[0]:
        raise FormatError(
            f"expected I32 in one dim, found {index.dtype} {list(index.shape)}", path=index.name
        )
    (inputs,), outputs = index.shape, codes.shape[1]
    bits, size = settings.bits, min(settings.group_size, inputs) if settings.group_size > 0 else inputs
    in_order, groups = settings.in_order, -(-inputs // size)
    if settings.dynamic:
        bits = next((n for n in _BITS if codes.shape[0] == -(-inputs * n // 32)), bits)
        in_order, groups = in_order and groups == scales.shape[0], scales.shape[0]
    check(
        codes, "I32", (-(-inputs * bits // 32), outputs), f"{inputs} inputs (as {index.name}) of {bits} bits"
    )
    check(scales, "F16", (groups, outputs), f"{inputs} inputs in groups of {size} and {outputs} outputs")
    check(
        zeros,
        "I32",
        (groups, -(-outputs * bits // 32)),
        f"{groups} groups and {outputs} outputs of {bits} bits",
    )
    order = f"in groups of {size}" if in_order else "in groups by activation order"
    rule = Scaled(
        "gptq",
        f"GPTQ with {bits} bits {order}",
        f"{stem}weight",
        "F16",
        FieldWords(bits),
        OneEach(is_turned=True),
        (1, size),
        zeros=FieldWords(bits, dim=0, plus_one=settings.plus_one),
        groups=groups,
        in_order=in_order,
    )
    parts = {"codes": codes, "zeros": zeros, "scales": scales, "groups": index}
    return coded(rule.name, "F16", (outputs, inputs), parts, rule)


def find_awq(source: Source) -> Found:
    """Every tensor in codes of AWQ. Implements :class:`.Family`."""
    return _each_module(source, "awq", ("qweight", "qzeros"), _awq_group_size, _awq)


def _awq_group_size(given: Mapping[str, Any]) -> int:
    """Inputs of a group; -1: all of them. Raises :class:`FormatError` for what this version can't decode."""
    bits, size = (
        given.get("bits", given.get("w_bit", 4)),
        given.get("group_size", given.get("q_group_size", 128)),
    )
    version = given.get("version") or given.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise FormatError(f"expected gemm as version in config.json, found {brief(version)}")
    if type(bits) is not int or bits != 4:
        raise FormatError(f"expected 4 as bits in config.json, found {brief(bits)}")
    return _group_size_of(size)


def _awq(source: Source, stem: str, group_size: int) -> Coded:
    codes, zeros, scales = _words_of(source.tensors, stem)
    inputs, outputs = codes.shape[0], codes.shape[1] * 8
    size = group_size if group_size > 0 else inputs
    groups = -(-inputs // size)
    why = f"{inputs} inputs in groups of {size} and {outputs} outputs (as {codes.name})"
    check(scales, "F16", (groups, outputs), why)
    check(zeros, "I32", (groups, outputs // 8), why)
    rule = Scaled(
        "awq",
        f"AWQ with 4 bits in groups of {size}",
        f"{stem}weight",
        "F16",
        AwqWords(),
        OneEach(is_turned=True),
        (1, size),
        zeros=AwqWords(),
    )
    parts = {"codes": codes, "zeros": zeros, "scales": scales}
    return coded(rule.name, "F16", (outputs, inputs), parts, rule)
