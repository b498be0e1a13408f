"""Typed JSON: what goes in comes out, with its types; what can't is refused by name."""

from __future__ import annotations

import collections
import enum
import functools
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shardwise.errors import FormatError, StateError
from shardwise.state.typed_json import Encoded, decode, encode
from tests.harness.tiers import examples


class Color(enum.Enum):
    RED = "red"
    CRIMSON = "red"
    BLUE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


def through_text(encoded: Encoded) -> Any:
    text = json.dumps(encoded.document, allow_nan=False)
    return decode(json.loads(text), encoded.tensors)


def round_trip(value: Any) -> Any:
    encoded = encode(value)
    assert encoded.not_stored == ()
    return through_text(encoded)


def same(a: Any, b: Any) -> bool:
    """Equal value and types all through, order of dicts included; NaN is NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, (np.str_, np.bytes_)):
        return list(a) == list(b)  # trailing NULs count
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        if isinstance(a, collections.defaultdict) and a.default_factory is not b.default_factory:
            return False
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple, collections.deque)):
        if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
            return False
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return sorted(map(printed, a)) == sorted(map(printed, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


def printed(value: Any) -> str:
    """Text of a hashable value and its types; the order of sets in it does not matter."""
    if isinstance(value, (tuple, frozenset)) and not isinstance(value, torch.Size):
        parts = map(printed, value)
        return f"{type(value)}{sorted(parts) if isinstance(value, frozenset) else list(parts)}"
    return f"{type(value)}{value!r}"


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


paths = st.sampled_from([pathlib.Path("a/b"), pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("c:/y")])
small = st.integers(-(10**6), 10**6)
plain_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63), -(2**63) - 1])
    | st.floats()
    | st.text(st.characters(exclude_categories=()))  # lone surrogates too
    | st.sampled_from(["$type", "\ud83d", "\ude00", "\ud83d\ude00"])
    | st.complex_numbers()
    | st.binary()
    | st.sampled_from([*Color, Level.LOW, Bits.A, torch.float16, torch.device("cuda:3"), torch.Size([2, 3])])
    | paths
    | st.builds(range, small, small, small.filter(bool))
)


@st.composite
def hashable_leaf(draw: st.DrawFn) -> Any:
    return draw(plain_leaves)  # a name of its own keeps hypothesis' texts about strategies short


hashable_leaves = hashable_leaf()
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.complex128, torch.bool, torch.float8_e4m3fnuz])
tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).to(dtype).reshape(shape),
    dtypes,
    st.lists(st.integers(0, 3), max_size=3),
)
arrays = hnp.arrays(hnp.scalar_dtypes() | hnp.array_dtypes(), hnp.array_shapes(min_dims=0, min_side=0))
leaves = (
    hashable_leaves
    | st.binary().map(bytearray)
    | tensors
    | arrays
    | hnp.arrays(hnp.scalar_dtypes() | hnp.array_dtypes(), 1).map(lambda array: array[0])
    | st.text().map(np.str_)
    | st.binary().map(np.bytes_)
    | st.builds(slice, st.none() | small, st.none() | small, st.none() | small)
)
hashables = st.recursive(
    hashable_leaves, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3)
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    any_dict = st.dictionaries(hashables, inner, max_size=4)
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.just("$type"), inner, max_size=4)
        | any_dict
        | any_dict.map(collections.OrderedDict)
        | any_dict.map(collections.Counter)
        | st.builds(collections.defaultdict, st.sampled_from([None, int, list, dict, set]), any_dict)
        | st.builds(collections.deque, st.lists(inner, max_size=4), st.none() | st.integers(4, 9))
        | st.sets(hashables, max_size=4)
    )


@examples(400, deadline=None)
@given(st.recursive(leaves, containers, max_leaves=12))
def test_round_trip_keeps_values_and_types(value: Any) -> None:
    assert same(round_trip(value), value)


def test_plain_json_stays_plain_and_readable() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}
    encoded = encode(value)
    assert encoded.document == value
    assert encoded.tensors == {}


def test_integers_too_long_to_print() -> None:
    value = {10**5000: {-(10**5000)}, 10**6000: torch.zeros(1)}
    assert same(list(round_trip(value)), list(value))
    assert round_trip(value)[10**5000] == {-(10**5000)}


@pytest.mark.parametrize("value", [np.str_("a\0"), np.bytes_(b"a\0"), np.str_(""), np.bytes_(b"\0")])
def test_numpy_texts_keep_their_nuls(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize("value", [np.longlong(3), np.float16(1), np.bool_(True), np.datetime64(5, "ns")])
def test_numpy_scalars_keep_their_class(value: np.generic) -> None:
    assert type(round_trip(value)) is type(value)


def test_structured_and_foreign_order_arrays() -> None:
    value = np.array([(1, 2.0, "ab")], dtype=[("x", ">i4"), ("y", "<f8", (1,)), ("z", "U3")])
    assert same(round_trip(value), value)
    assert same(round_trip(value.dtype), value.dtype)
    assert same(round_trip(np.asfortranarray(np.arange(6.0).reshape(2, 3))), np.arange(6.0).reshape(2, 3))


def test_tensors_are_kept_aside_by_path_and_once() -> None:
    weight = torch.randn(3, 2, requires_grad=True)
    encoded = encode({"a": [weight.t(), weight.detach()], "b": weight.detach().conj()}, where="scaler")
    assert set(encoded.tensors) == {"scaler.a[0]", "scaler.a[1]", "scaler.b"}
    assert all(t.is_contiguous() and not t.requires_grad for t in encoded.tensors.values())
    shared = torch.zeros(2)
    back = round_trip([shared, (shared,)])
    assert back[0] is back[1][0]
    assert back[0] is not shared


def test_dict_keys_that_print_alike_keep_their_tensors_apart() -> None:
    value = {float("nan"): torch.zeros(1), -float("nan"): torch.ones(1)}
    assert [t.item() for t in round_trip(value).values()] == [0.0, 1.0]


def test_file_does_not_depend_on_hash_order() -> None:
    names = [f"name{i}" for i in range(50)]
    assert encode(set(names)).document["items"] == sorted(names)


def test_functions_are_reported_and_left_out() -> None:
    value = {
        "lambdas": [lambda step: 1.0, 2],
        "partial": functools.partial(max, 1),
        "builtin": len,
        "method": [].append,
        "keep": 1,
        "set": {len, 3},
        ("odd", len): 1,
    }
    encoded = encode(value, where="scheduler")
    assert len(encoded.not_stored) == 6
    assert through_text(encoded) == {"lambdas": [None, 2], "keep": 1, "set": {3}, ("odd", None): 1}
    assert encoded.not_stored[:4] == (
        "scheduler.lambdas[0]",
        "scheduler.partial",
        "scheduler.builtin",
        "scheduler.method",
    )
    assert through_text(encode(len)) is None


def local_enum() -> Any:
    class Local(enum.Enum):
        A = 1

    return Local


class Called:
    def __call__(self) -> None: ...


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        (Called(), "Called"),
        (Point(1, 2), "Point"),
        (int, "builtins.type"),
        (np.array([object()], dtype=object), "objects"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (torch.nn.Parameter(torch.zeros(1)), "Parameter"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (Bits.A | Bits.B, "Bits"),
        (local_enum().A, "Local"),
        (collections.defaultdict(lambda: 1), "factory"),
        (type("Sub", (dict,), {})(), "Sub"),
        (torch.Generator(), "Generator"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_path(value: Any, kind: str) -> None:
    state = {"base_lrs": [0, 1, 2, {"foo": {("a", 1): value}}]}
    with pytest.raises(StateError) as caught:
        encode(state, where="scheduler")
    message = str(caught.value)
    assert message.startswith("scheduler.base_lrs[3].foo[('a', 1)]: ")
    assert kind in message
    assert "state_dict/load_state_dict" in message


def test_unhashable_looking_keys_and_members_are_named() -> None:
    with pytest.raises(StateError, match=r"state\.a\{key <object"):
        encode({"a": {object(): 1}})
    with pytest.raises(StateError, match=r"state\.a\{<object"):
        encode({"a": {object()}})


def test_cycles_and_great_depth_are_refused() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(StateError, match=r"state\[1\]\.again: .* cycle"):
        encode(loop)
    twice = [1]
    assert round_trip([twice, twice]) == [[1], [1]]  # the same object twice is no cycle
    deep: Any = 0
    for _ in range(99):
        deep = {(1,): deep}
    assert same(round_trip(deep), deep)
    for _ in range(2):
        deep = [deep]
    with pytest.raises(StateError, match="nested deeper"):
        encode(deep)


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    "document",
    [
        {"$type": "python/object/apply:os.system", "items": ["true"]},
        {"$type": ["tuple"]},
        {"$type": "tuple"},
        {"$type": "tuple", "items": "ab"},
        {"$type": "set", "items": [[1]]},
        {"$type": "dict", "items": [[1]]},
        {"$type": "dict", "items": [[[], 1]]},
        {"$type": "int", "hex": "zz"},
        {"$type": "float", "value": "1e5"},
        {"$type": "bytes", "base64": "%%%"},
        {"$type": "range", "items": [0, 1, 0]},
        {"$type": "defaultdict", "factory": "eval", "items": []},
        {"$type": "deque", "maxlen": -1, "items": []},
        {"$type": "torch.dtype", "name": "load"},
        {"$type": "torch.device", "name": "nowhere"},
        {"$type": "numpy.scalar", "dtype": "|O", "base64": "AAAAAAAAAAA="},
        {"$type": "numpy.array", "dtype": "|O", "key": "t", "shape": [1]},
        {"$type": "numpy.array", "dtype": "<f8", "key": "t", "shape": [2]},
        {"$type": "numpy.array", "dtype": "<f8", "key": "t", "shape": [-1, -1]},
        {"$type": "numpy.array", "dtype": "nonsense", "key": "t", "shape": [1]},
        {"$type": "tensor", "key": "gone", "dtype": "float32", "shape": [2]},
        {"$type": "tensor", "key": "t", "dtype": "float32", "shape": [3]},
        {"$type": "tensor", "key": "f", "dtype": "float64", "shape": [1]},
        {"$type": "enum", "class": 5, "name": "A"},
        object(),
        nested(400),
    ],
)
def test_foreign_documents_are_refused(document: Any) -> None:
    with pytest.raises(FormatError):
        decode(document, {"t": torch.zeros(8, dtype=torch.uint8), "f": torch.zeros(1)})


@pytest.mark.parametrize(
    "name", ["os:system", "not_imported_module:X", "builtins:dict", f"{__name__}:Gone", ":"]
)
def test_enums_come_only_from_imported_enum_classes(name: str) -> None:
    with pytest.raises(StateError, match="import"):
        decode({"$type": "enum", "class": name, "name": "A"}, {})


def test_renamed_enum_member_is_named() -> None:
    with pytest.raises(StateError, match="GREEN"):
        decode({"$type": "enum", "class": f"{__name__}:Color", "name": "GREEN"}, {})


# ------------------------------------------------------------------------------- what training really holds


def test_generator_states_and_optimizer_state() -> None:
    generator = torch.Generator().manual_seed(3)
    state = round_trip({"g": generator.get_state()})
    other = torch.Generator()
    other.set_state(state["g"])
    assert torch.equal(torch.rand(4, generator=other), torch.rand(4, generator=generator))

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    assert same(round_trip(optimizer.state_dict()), optimizer.state_dict())
