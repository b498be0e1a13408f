"""Tensors of documents come back to where the run's own are, and documents name no device by its number."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import pytest
import torch

from shardwise.state.typed_json import Places, decode, encode, own_device


def read(value: Any, kind: str) -> tuple[Any, Places]:
    """``value`` as it is read from a document that was written where tensors lie on ``kind``."""
    encoded = encode(value)

    def moved(node: Any) -> Any:
        if isinstance(node, list):
            return [moved(part) for part in node]
        if not isinstance(node, dict):
            return node
        node = {key: moved(part) for key, part in node.items()}
        return node | {"device": kind} if node.get("$type") == "tensor" else node

    places = Places()
    return decode(moved(encoded.document), encoded.tensors, places), places


def test_documents_name_the_type_of_a_device() -> None:
    assert encode(torch.zeros(1)).document["device"] == "cpu"
    assert decode(encode(torch.device("xla:3")).document, {}) == torch.device("xla:3")
    own = {"$type": "torch.device", "name": "xla", "own": True}  # there is none: nothing to point at
    assert decode(own, {}) == torch.device("xla")


def test_documents_of_before_name_a_device_by_its_number() -> None:
    value, places = read({"a": torch.ones(2)}, "cuda:0")
    found = places.put(value)["a"]
    assert found.device == own_device("cuda")
    assert torch.equal(found.cpu(), torch.ones(2))


def test_where_there_is_no_such_device_the_report_says_so() -> None:
    value, places = read({"a": torch.ones(2), "b": 3}, "xla")
    assert places.differences == ()
    assert places.put(value)["a"].device.type == "cpu"
    assert places.differences == ("state.a: a tensor on xla when saved, on cpu now",)


def test_tensors_follow_the_live_ones_through_containers() -> None:
    one = torch.ones(2)
    given = {
        "list": [one, (torch.zeros(1), 5)],
        "ordered": OrderedDict(a=one),
        "deque": deque([one], maxlen=3),
        "gone": one,
        "text": "x",
    }
    value, places = read(given, "xla")
    calls = []

    def live() -> Any:
        calls.append(1)
        unlike = {
            "list": [torch.empty(2), [torch.empty(1, device="meta")]],
            "deque": None,
            "gone": torch.empty(9),
        }
        return unlike | {"ordered": {"a": torch.empty(2)}}

    found = places.put(value, live)
    assert calls == [1]
    assert [type(found[name]) for name in given] == [list, OrderedDict, deque, torch.Tensor, str]
    assert type(found["list"][1]) is tuple
    assert found["list"][0] is found["ordered"]["a"] is found["deque"][0] is found["gone"]
    assert found["list"][1][1] == 5
    assert places.put({"n": [1, (2, "x")]}, lambda: calls.append(2)) == {"n": [1, (2, "x")]}
    assert calls == [1], "what this run has is asked for only where there are tensors"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensors_follow_the_live_ones() -> None:
    given = torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8)
    value, places = read({"a": [given]}, "xla")
    found = places.put(value, lambda: {"a": [given]})["a"][0]
    assert torch.equal(found.int_repr(), given.int_repr())
    assert places.differences == ("state.a[0]: a tensor on xla when saved, on cpu now",)
    value, places = read({"a": [given]}, "cpu")
    moved = value["a"][0]
    assert places.put(value, lambda: {"a": [torch.empty(3)]})["a"][0].device == moved.device
    assert places.differences == ()
