"""Checkpoints that bitsandbytes wrote: every box decodes to the bits that bitsandbytes makes of the whole tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shardwise.catalog.records import Chunk, assemble
from shardwise.errors import FormatError, IntegrityError
from shardwise.quantized.bitsandbytes import find_bitsandbytes as find
from shardwise.quantized.rules import reshaped
from shardwise.tensors.boxes import Box, whole
from tests.quantized._boxes import State, check_boxes, cut, found_in, read_elements, stored

bitsandbytes = pytest.importorskip("bitsandbytes")

_CONFIG = transformers.Qwen3Config(
    hidden_size=64,
    intermediate_size=96,  # rows of down_proj are not whole blocks
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=32,
    tie_word_embeddings=False,
)
#: Options of transformers, and the dtype of the model.
_KINDS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "nf4": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, torch.bfloat16),
    "fp4": ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, torch.float16),
    "nested nf4": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        torch.float32,
    ),
    "nested fp4": (
        {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "fp4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_quant_storage": "bfloat16",
        },
        torch.bfloat16,
    ),
    "int8": ({"load_in_8bit": True}, torch.float16),
}
_Q = "model.layers.0.self_attn.q_proj.weight"
_DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model in every format, written by transformers."""
    root = tmp_path_factory.mktemp("bitsandbytes")
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(_CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():  # blocks of many sizes of scale
            parameter.mul_(torch.logspace(-3, 3, parameter.numel()).view_as(parameter))
    model.save_pretrained(root / "plain")
    found = {}
    for kind, (options, dtype) in _KINDS.items():
        config = transformers.BitsAndBytesConfig(**options)
        quantized = transformers.Qwen3ForCausalLM.from_pretrained(
            root / "plain", quantization_config=config, dtype=dtype, device_map="cpu"
        )
        found[kind] = root / kind
        quantized.save_pretrained(found[kind])
    return found


@pytest.fixture
def opened(checkpoints: dict[str, Path], tmp_path: Path) -> Callable[[str], Any]:
    def _open(kind: str) -> Any:
        state, settings = stored(checkpoints[kind])
        return found_in(find, tmp_path / "source", state, settings), state, settings

    return _open


def _library(state: State, name: str) -> torch.Tensor:
    """What bitsandbytes makes of a stored tensor."""
    if f"{name}.absmax" not in state:
        return bitsandbytes.functional.int8_vectorwise_dequant(state[name], state[f"{name[:-6]}SCB"])
    parts = {n: t.clone() for n, t in state.items() if n.startswith(f"{name}.")}
    found = bitsandbytes.functional.QuantState.from_dict(parts, torch.device("cpu"))
    codes = state[name].view(torch.uint8).reshape(-1)
    by_table = _by_table(codes, found)
    # Its kernel for AVX-512 takes wrong scales where rows are not whole blocks; its torch code is what other machines run.
    if found.shape[-1] % found.blocksize:
        return by_table
    by_kernel = bitsandbytes.functional.dequantize_4bit(state[name], found)
    if found.quant_type != "fp4":
        return by_kernel
    # FP4 has two codes of zero. The table in the file has 0 for both; the kernel of CPUs without AVX-512 makes one of them -0.
    of_each = torch.stack([codes >> 4, codes & 15], dim=1).reshape(-1)[: by_table.numel()]
    return torch.where(of_each.view_as(by_table) == 8, by_table, by_kernel)


def _by_table(codes: torch.Tensor, found: Any) -> torch.Tensor:
    absmax = found.absmax
    if found.nested:
        absmax = bitsandbytes.functional.dequantize_blockwise(absmax, found.state2) + found.offset
    from bitsandbytes.backends.default import ops

    with torch.compiler.set_stance("force_eager"):
        return ops._dequantize_4bit_compute(
            codes, absmax, found.code, found.blocksize, found.shape, found.dtype
        )


@pytest.mark.parametrize("kind", _KINDS)
def test_every_box_is_what_bitsandbytes_makes(kind: str, opened: Callable[[str], Any]) -> None:
    found, state, _ = opened(kind)
    assert found.problems == []
    plain = transformers.Qwen3ForCausalLM(_CONFIG).state_dict()
    linears = {n for n in plain if n.endswith("proj.weight")}
    assert found.coded.keys() == linears
    for name, one in found.coded.items():
        assert one.tensor.shape == tuple(plain[name].shape)
        check_boxes(one, state, _library(state, name))
    rest = state.keys() - set(found.parts()) - found.unused
    assert rest == plain.keys() - linears


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize(
    "shape", [(7, 31), (5, 1), (3, 130), (4, 256), (1, 2), (9, 64), (130,), (2, 3, 128), (3, 2, 5)], ids=str
)
def test_sizes_that_cut_bytes_and_blocks(
    shape: tuple[int, ...], quant_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    for nested, block in ((False, 64), (True, 32), (False, 128)):
        codes, quant_state = bitsandbytes.functional.quantize_4bit(
            torch.randn(shape).to(dtype), blocksize=block, quant_type=quant_type, compress_statistics=nested
        )
        parts = quant_state.as_dict(packed=True)
        state = {"one.weight": codes, **{f"one.weight.{role}": part for role, part in parts.items()}}
        found = found_in(find, tmp_path, state, {"quant_method": "bitsandbytes"})
        assert found.problems == []
        # bitsandbytes takes a column of one byte for a transposed weight, and a vector for a row.
        check_boxes(found.coded["one.weight"], state, _library(state, "one.weight").reshape(shape))


def test_cuts_on_boundaries_read_nothing_else(opened: Callable[[str], Any]) -> None:
    found, _, _ = opened("nf4")
    query, down = found.coded[_Q], found.coded[_DOWN]
    assert query.tensor.shape == (128, 64)
    assert read_elements(query, Box((3, 0), (9, 64))) == {"codes": 6 * 32, "scales": 6}
    assert read_elements(query, Box((0, 32), (128, 64))) == {"codes": 128 * 16, "scales": 128}
    assert down.tensor.shape == (64, 96)
    assert read_elements(down, Box((2, 0), (4, 96))) == {"codes": 96, "scales": 3}
    assert read_elements(down, Box((0, 48), (64, 96)))["codes"] == 64 * 24
    nested = opened("nested nf4")[0].coded[_Q]
    assert read_elements(nested, Box((3, 0), (9, 64))) == {
        "codes": 192,
        "scales": 6,
        "nested": 1,
        "book": 256,
    }
    rows = opened("int8")[0].coded[_Q]
    assert read_elements(rows, Box((3, 5), (9, 7))) == {"codes": 12, "scales": 6}
    assert query.rule.format == "NF4 in blocks of 64"
    assert rows.tensor.dtype == "F32"


@pytest.mark.parametrize(
    ("kind", "part"),
    [("nf4", f"{_Q}.absmax"), ("nested nf4", f"{_Q}.nested_absmax"), ("int8", f"{_Q[:-6]}SCB")],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_must_be_numbers(kind: str, part: str, value: float, opened: Callable[[str], Any]) -> None:
    found, state, _ = opened(kind)
    state[part][0] = value
    with pytest.raises(IntegrityError, match=f"{_Q}: a scale is NaN or infinite"):
        cut(found.coded[_Q], state, whole(found.coded[_Q].tensor.shape))


_STATE = f"{_Q}.quant_state.bitsandbytes__nf4"
Change = Callable[[State, dict[str, Any]], object]


def _bytes(raw: bytes) -> torch.Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


def _says(**changes: Any) -> Change:
    def change(state: State, _: dict[str, Any]) -> None:
        document = json.loads(bytes(state[_STATE].tolist())) | changes
        state[_STATE] = _bytes(json.dumps({k: v for k, v in document.items() if v is not ...}).encode())

    return change


def _puts(**tensors: torch.Tensor | None) -> Change:
    """Sets or removes parts, by the ends of their names with '__' for a dot."""

    def change(state: State, _: dict[str, Any]) -> None:
        for end, tensor in tensors.items():
            name = f"{_Q}{end.replace('__', '.', 1)}" if end != "SCB" else f"{_Q[:-6]}SCB"
            state.pop(name, None)
            if tensor is not None:
                state[name] = tensor

    return change


#: The kind of checkpoint, what happens to it, and the one sentence about it.
_PROBLEMS: dict[str, tuple[str, Change, str]] = {
    "no scales": ("nf4", _puts(__absmax=None), f"{_Q}.absmax: missing: {_Q} can't be decoded without it"),
    "no codes": ("nf4", _puts(**{"": None}), f"{_Q}: missing: {_Q} can't be decoded without it"),
    "no state": (
        "nf4",
        lambda state, _: state.pop(_STATE),
        f"{_Q}: expected one {_STATE} or …fp4; it is missing",
    ),
    "two states": (
        "nf4",
        lambda state, _: state.update({_STATE.replace("nf4", "fp4"): state[_STATE].clone()}),
        f"{_Q}: expected one {_STATE} or …fp4; found {_STATE.replace('nf4', 'fp4')}, {_STATE}",
    ),
    "no code book": ("nf4", _puts(__quant_map=None), f"{_Q}.quant_map: missing"),
    "nothing but codes": (
        "nf4",
        lambda state, _: [state.pop(n) for n in list(state) if n.startswith(f"{_Q}.")],
        f"{_Q}: U8 codes without scales; expected {_Q}.absmax and {_STATE}",
    ),
    "codes in a row": (
        "nf4",
        lambda state, _: state.update({_Q: state[_Q].t().contiguous()}),
        f"{_Q}: expected U8 [4096, 1] for 8192 elements, two a byte, in one column, found U8 [1, 4096]",
    ),
    "codes of another dtype": (
        "nf4",
        lambda state, _: state.update({_Q: state[_Q].view(torch.int8)}),
        f"{_Q}: expected U8 [4096, 1] for 8192 elements, two a byte, in one column, found I8 [4096, 1]",
    ),
    "few scales": (
        "nf4",
        _puts(__absmax=torch.ones(127)),
        f"{_Q}.absmax: expected F32 [128] for 8192 elements in blocks of 64, found F32 [127]",
    ),
    "scales of another dtype": (
        "nf4",
        _puts(__absmax=torch.ones(128).half()),
        f"{_Q}.absmax: expected F32 [128] for 8192 elements in blocks of 64, found F16 [128]",
    ),
    "nested scales of another size": (
        "nested nf4",
        _puts(__nested_absmax=torch.ones(2)),
        f"{_Q}.nested_absmax: expected F32 [1] for 128 scales in blocks of 256, found F32 [2]",
    ),
    "no nested code book": ("nested nf4", _puts(__nested_quant_map=None), f"{_Q}.nested_quant_map: missing"),
    "surplus": (
        "nf4",
        _puts(__nested_quant_map=torch.ones(256)),
        f"{_Q}.nested_quant_map: surplus: the scales of {_Q} are not quantized",
    ),
    "no nested scales": (
        "nested nf4",
        _puts(__nested_absmax=None),
        f"{_STATE}: expected the keys quant_type, blocksize, dtype, shape; found [",
    ),
    "state is not JSON": (
        "nf4",
        lambda s, _: s.update({_STATE: _bytes(b"{")}),
        f"{_STATE}: quantization state is not JSON",
    ),
    "state is deep": (
        "nf4",
        lambda s, _: s.update({_STATE: _bytes(b"[" * 60_000)}),
        f"{_STATE}: quantization state is not JSON",
    ),
    "state is long": (
        "nf4",
        lambda s, _: s.update({_STATE: _bytes(b" " * 70_000)}),
        f"{_STATE}: expected JSON in U8 of at most 65536 bytes, found U8 [70000]",
    ),
    "state is a list": (
        "nf4",
        lambda s, _: s.update({_STATE: _bytes(b"[1]")}),
        f"{_STATE}: expected the keys",
    ),
    "key is missing": (
        "nf4",
        _says(shape=...),
        f"{_STATE}: expected the keys quant_type, blocksize, dtype, shape",
    ),
    "key is unknown": ("nf4", _says(rotated=True), f"{_STATE}: expected the keys quant_type"),
    "type": ("nf4", _says(quant_type="fp4"), f"{_STATE}: expected nf4 as quant_type, found 'fp4'"),
    "type is a list": (
        "nf4",
        _says(quant_type=["nf4"]),
        f"{_STATE}: expected nf4 as quant_type, found ['nf4']",
    ),
    "block size": ("nf4", _says(blocksize=48), f"{_STATE}: expected 32 or 64 or "),
    "block size is true": ("nf4", _says(blocksize=True), f"{_STATE}: expected 32 or 64 or "),
    "dtype": (
        "nf4",
        _says(dtype="int8"),
        f"{_STATE}: expected float32 or float16 or bfloat16 as dtype, found 'int8'",
    ),
    "shape is no list": ("nf4", _says(shape="64"), f"{_STATE}: expected sizes as shape, found '64'"),
    "shape is negative": (
        "nf4",
        _says(shape=[-64, -128]),
        f"{_STATE}: shape: shape [-64, -128] is malformed",
    ),
    "shape is huge": ("nf4", _says(shape=[10**400]), f"{_STATE}: shape: shape"),
    "shape of another size": ("nf4", _says(shape=[64, 64]), f"{_Q}: expected U8 [2048, 1] for 4096 elements"),
    "offset": (
        "nested nf4",
        _says(nested_offset=float("nan")),
        f"{_STATE}: expected a number as nested_offset, found nan",
    ),
    "offset is huge": (
        "nested nf4",
        _says(nested_offset=10**400),
        f"{_STATE}: expected a number as nested_offset",
    ),
    "nested dtype": (
        "nested nf4",
        _says(nested_dtype="bfloat16"),
        f"{_STATE}: expected float32 as nested_dtype",
    ),
    "config says another type": (
        "nf4",
        lambda _, says: says.update(bnb_4bit_quant_type="fp4"),
        f"{_STATE}: config.json says bnb_4bit_quant_type = 'fp4', but the tensor is stored as NF4 in blocks of 64",
    ),
    "config says 8 bits": (
        "nf4",
        lambda _, says: says.update(load_in_8bit=True),
        f"{_STATE}: config.json says load_in_8bit = True, but the tensor is stored as NF4",
    ),
    "config says nested": (
        "nf4",
        lambda _, says: says.update(bnb_4bit_use_double_quant=True),
        f"{_STATE}: config.json says bnb_4bit_use_double_quant = True",
    ),
    "int8 without scales": (
        "int8",
        _puts(SCB=None),
        f"{_Q[:-6]}SCB: missing: {_Q} can't be decoded without it",
    ),
    "int8 scales of another size": (
        "int8",
        _puts(SCB=torch.ones(64)),
        f"{_Q[:-6]}SCB: expected F32 [128] for the 128 rows of {_Q}, found F32 [64]",
    ),
    "int8 codes of another dtype": (
        "int8",
        lambda s, _: s.update({_Q: s[_Q].half()}),
        f"{_Q}: expected I8 in two dims next to {_Q[:-6]}SCB, found F16 [128, 64]",
    ),
    "int8 in tiles": (
        "int8",
        _puts(_format=torch.tensor(2, dtype=torch.uint8)),
        f"{_Q}_format: expected rows of codes (0), found layout col_turing (2)",
    ),
    "int8 of two layouts": (
        "int8",
        _puts(_format=torch.zeros(2, dtype=torch.uint8)),
        f"{_Q}_format: expected one U8, found U8 [2]",
    ),
    "config says 4 bits": (
        "int8",
        lambda _, says: says.update(load_in_4bit=True),
        f"{_Q}: config.json says load_in_4bit, but the tensor is stored in INT8",
    ),
}


@pytest.mark.parametrize("what", _PROBLEMS)
def test_what_is_wrong_is_one_sentence(what: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    kind, change, sentence = _PROBLEMS[what]
    state, settings = stored(checkpoints[kind])
    change(state, settings)
    found = found_in(find, tmp_path, state, settings)
    # What the config says is wrong for all of them.
    (problem,) = [one for one in found.problems if ".q_proj." in one]
    assert problem.startswith(sentence), problem
    assert len(problem) < 700
    assert _Q not in found.coded


def test_a_config_of_old_names_no_method(opened: Callable[[str], Any], tmp_path: Path) -> None:
    """bitsandbytes' tensors tell what they are; bytes that belong to nothing are codes only where the config says so."""
    _, state, _ = opened("nf4")
    assert found_in(find, tmp_path / "a", state, {}).coded.keys() == opened("nf4")[0].coded.keys()
    bare = {
        "one.weight": torch.ones(4, 4, dtype=torch.int8),
        "two.weight": torch.ones(8, 1, dtype=torch.uint8),
    }
    assert found_in(find, tmp_path / "b", bare, {}).problems == []
    problems = found_in(find, tmp_path / "c", bare, {"load_in_8bit": True}).problems
    assert [one.split(":")[0] for one in problems] == ["one.SCB", "two.weight"]


def test_storage_that_no_codes_fill(tmp_path: Path) -> None:
    codes, quant_state = bitsandbytes.functional.quantize_4bit(torch.ones(1, 2), quant_type="nf4")
    state = {f"one.weight.{role}": part for role, part in quant_state.as_dict(packed=True).items()}
    state["one.weight"] = torch.ones(0, 1, dtype=torch.bfloat16)
    (problem,) = found_in(find, tmp_path, state, {}).problems
    assert problem.startswith("one.weight: expected U8 [1, 1] for 2 elements, two a byte"), problem
    assert codes.shape == (1, 1)


def test_codes_in_pieces_are_refused() -> None:
    halves = [Box((0, 0), (2, 1)), Box((2, 0), (4, 1))]
    codes = assemble("one.weight", "U8", [Chunk(box, "file", box.start[0]) for box in halves])
    with pytest.raises(FormatError, match=r"one\.weight: expected one piece, found 2"):
        reshaped(codes, "U8", (2, 2))


def test_other_families_are_left_alone(opened: Callable[[str], Any], tmp_path: Path) -> None:
    _, state, _ = opened("nf4")
    found = found_in(find, tmp_path / "other", state, {"quant_method": "gptq"})
    assert not found.coded
    assert not found.problems
