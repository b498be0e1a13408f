"""Mutations: bytes, JSON values, pickle opcodes, zip archives. All draw from the generator that they are given."""

from __future__ import annotations

import io
import json
import pickletools
import random
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

__all__ = ["mutate_archive", "mutate_bytes", "mutate_header", "mutate_json", "mutate_pickle", "mutated_text"]

#: Numbers at which readers break: borders of types, of limits, of floats that hold integers.
NUMBERS: tuple[Any, ...] = (
    *(
        -1,
        0,
        1,
        2,
        3,
        7,
        64,
        65,
        255,
        256,
        2**16,
        2**31 - 1,
        2**31,
        2**32,
        2**40,
        2**61 - 1,
        2**62,
        2**63 - 1,
    ),
    *(
        2**63,
        2**64,
        -(2**63),
        10**19,
        10**40,
        0.5,
        -0.0,
        1e308,
        float("inf"),
        float("nan"),
        4294967298,
        60_000,
    ),
)
_MOST_BYTES = 1_000_000
TEXTS: tuple[str, ...] = (
    *(
        "",
        ".",
        "..",
        "../../escaped",
        "/etc/passwd",
        "a/../../b",
        "model",
        "optimizer",
        "state",
        "rank/00000",
        "x" * 300,
    ),
    *(
        "\ud800",
        "\0",
        "é",
        "a\\b",
        "F32",
        "BF16",
        "I64",
        "BOOL",
        "F8_E4M3",
        "float32",
        "tuple",
        "tensor",
        "inf",
        "__class__",
    ),
    *(
        "__reduce__",
        "load_state_dict",
        "$type",
        "extra.step",
        "models.b",
        "optimizers.c",
        "optimizer.opaque",
        "0",
        "-1",
    ),
)


def _leaf(rng: random.Random) -> Any:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice((None, True, False))
    if kind == 3:
        return rng.randrange(-(2 ** rng.randrange(1, 70)), 2 ** rng.randrange(1, 70))
    return rng.choice(
        ([], {}, [0], [[]], {"": 0}, [1, 2, 3], {"a": {"b": []}}, [0] * rng.choice((1, 65, 1000)))
    )


# ------------------------------------------------------------------------------------------------- JSON


def _places(value: Any, found: list[tuple[Any, Any]], most: int = 2000) -> list[tuple[Any, Any]]:
    """Every (container, key) below ``value``, breadth first, at most ``most``."""
    queue = [value]
    for container in queue:
        if len(found) >= most:
            break
        items: Iterator[tuple[Any, Any]] = iter(())
        if isinstance(container, dict):
            items = iter(container.items())
        elif isinstance(container, list):
            items = iter(enumerate(container))
        for key, child in items:
            found.append((container, key))
            if isinstance(child, (dict, list)):
                queue.append(child)
    return found


def _copy(value: Any) -> Any:
    """A copy of a JSON value: several times as fast as ``copy.deepcopy``."""
    return json.loads(json.dumps(value))


def mutate_json(rng: random.Random, value: Any, most: int = 4) -> Any:
    """A JSON value with one to ``most`` changes: other leaves, lost, renamed, swapped, repeated or nested nodes."""
    value = _copy(value)
    for _ in range(rng.randint(1, most)):
        places = _places(value, [])
        if not places:
            return _leaf(rng)
        container, key = rng.choice(places)
        other, other_key = rng.choice(places)
        _change(rng, container, key, _copy(other[other_key]) if other_key in _keys(other) else None)
    return value


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _change(rng: random.Random, container: Any, key: Any, other: Any) -> None:
    kind = rng.randrange(10)
    if kind <= 2:
        container[key] = _leaf(rng)
    elif kind == 3:
        container[key] = other
    elif kind == 4:
        del container[key]
    elif kind == 5:
        new = rng.choice((*TEXTS, str(key) + "x"))
        if isinstance(container, dict):
            container[new] = container.pop(key)
        else:
            container.insert(key, other)
    elif kind == 6 and isinstance(container[key], int) and not isinstance(container[key], bool):
        container[key] += rng.choice((-1, 1, 8, -8, 2**31, 2**62))
    elif kind == 7 and isinstance(container, list):
        text, copies = json.dumps(container[key]), rng.choice((1, 2, 64, 200))
        fitting = 1 + _MOST_BYTES // len(text)  # else copies of copies take seconds to make
        container.extend(json.loads(text) for _ in range(min(copies, fitting)))
    elif kind == 8:
        for _ in range(rng.choice((1, 2, 30, 150))):
            container[key] = [container[key]] if rng.random() < 0.5 else {"x": container[key]}
    elif isinstance(container, dict):
        container[rng.choice(TEXTS)] = other
    else:
        container.reverse()


def mutated_text(rng: random.Random, value: Any) -> bytes:
    """The text of a changed JSON value; now and then a text that is no JSON."""
    text = json.dumps(mutate_json(rng, value)).encode()
    while (
        len(text) > _MOST_BYTES
    ):  # copies of copies; time is to be told per byte, and not only of large files
        text = json.dumps(mutate_json(rng, value)).encode()
    kind = rng.randrange(20)
    if kind == 0:
        return mutate_bytes(rng, text)
    if kind == 1:
        return rng.choice((b"[", b'{"a":')) * rng.choice((10, 1000, 200_000))
    if kind == 2:
        return text.replace(b"1", b"9" * 5000, 1)
    if kind == 3:
        return text.replace(b'"', b'"\\ud800', 1)
    return text


# ------------------------------------------------------------------------------------------------- bytes


def mutate_bytes(rng: random.Random, data: bytes, changes: int = 6) -> bytes:
    """Bytes with one to ``changes`` changes: bits, borders of integers, lost, repeated and foreign stretches."""
    found = bytearray(data)
    for _ in range(rng.randint(1, changes)):
        if not found:
            return rng.randbytes(rng.randrange(64))
        at = rng.randrange(len(found))
        kind = rng.randrange(8)
        if kind == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            width = rng.choice(["<H", ">H", "<I", ">I", "<Q", ">Q"])
            size = struct.calcsize(width)
            most = 2 ** (8 * size) - 1
            border = rng.choice(
                (0, 1, most, 2 ** (8 * size - 1), min(len(found), most), rng.randrange(most + 1))
            )
            found[at : at + size] = struct.pack(width, border)
        elif kind == 3:
            del found[at : at + rng.choice((1, 2, 8, 64))]
        elif kind == 4:
            found[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
        elif kind == 5:
            found[at:at] = found[at : at + rng.choice((1, 8, 64, 512))]
        elif kind == 6:
            end = rng.randrange(len(found))
            found[at : at + 32] = found[end : end + 32]
        elif rng.random() < 0.3:
            del found[at:]
    return bytes(found)


def mutate_header(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with another header, its length made to fit mostly."""
    (length,) = struct.unpack("<Q", data[:8])
    text, payload = data[8 : 8 + length], data[8 + length :]
    kind = rng.randrange(6)
    if kind == 0:
        return mutate_bytes(rng, data)
    text = mutated_text(rng, json.loads(text))
    claimed = (
        len(text) if kind > 1 else rng.choice((0, 1, len(text) - 1, len(text) + 1, 2**32, 2**63, 100_000_001))
    )
    return struct.pack("<Q", claimed % 2**64) + text + payload


# ----------------------------------------------------------------------------------------------- pickles


def _canary_calls() -> tuple[bytes, ...]:
    """Opcodes that would run code: names that no reader may look up."""
    names = (
        b"tests.fuzz.guard\ncanary\n",
        b"builtins\nexec\n",
        b"os\nsystem\n",
        b"subprocess\nPopen\n",
        b"builtins\neval\n",
    )
    argument = b"X\x25\x00\x00\x00" + b"import tests.fuzz.guard as g;g.canary"[:37].ljust(37, b" ")
    return tuple(b"c" + name + b"(" + argument + b"tR" for name in names)


_OPCODES: tuple[bytes, ...] = (
    *(
        b"}",
        b"]",
        b")",
        b"(",
        b"t",
        b"l",
        b"d",
        b"\x85",
        b"\x86",
        b"\x87",
        b"0",
        b"1",
        b"2",
        b"N",
        b"\x88",
        b"\x89",
        b"\x94",
    ),
    *(
        b"e",
        b"a",
        b"u",
        b"s",
        b"R",
        b"b",
        b"\x81",
        b"\x92",
        b"Q",
        b"\x8f",
        b"\x90",
        b"\x91",
        b"\x93",
        b"o",
        b"\x96" + b"\xff" * 8,
    ),
    *(
        b"r\xff\xff\xff\x7f",
        b"j\x00\x00\x00\x00",
        b"h\x00",
        b"h\x05",
        b"q\x01",
        b"J\xff\xff\xff\x7f",
        b"K\x01",
        b"\x8a\x08" + b"\xff" * 8,
    ),
    *(
        b"I99999999999999999999\n",
        b"L1\n",
        b"F1e999\n",
        b"V\\ud800\n",
        b"S'a'\n",
        b"g0\n",
        b"p4000000000\n",
        b"\x82\x01",
        b"\x8b\xff\xff\xff\x7f",
    ),
    *_canary_calls(),
)


def _operations(data: bytes) -> list[bytes]:
    """The opcodes of a pickle, each with its argument."""
    positions = [position for _, _, position in pickletools.genops(data)]
    return [data[a:b] for a, b in zip(positions, [*positions[1:], len(data)], strict=True)]


_SPLIT: dict[bytes, list[bytes]] = {}


def mutate_pickle(rng: random.Random, data: bytes, most: int = 5) -> bytes:
    """A pickle with lost, repeated, moved, foreign and changed opcodes; now and then with changed bytes."""
    if rng.random() < 0.15:
        return mutate_bytes(rng, data)
    if rng.random() < 0.1:
        return _doubling(rng)
    if data not in _SPLIT:
        _SPLIT[data] = _operations(data)
    found = list(_SPLIT[data])
    for _ in range(rng.randint(1, most)):
        at, kind = rng.randrange(len(found)), rng.randrange(7)
        if kind == 0 and len(found) > 2:
            del found[at]
        elif kind == 1:
            found.insert(at, rng.choice(_OPCODES))
        elif kind == 2:
            found.insert(at, found[rng.randrange(len(found))])
        elif kind == 3:
            found[at] = rng.choice(_OPCODES)
        elif kind == 4 and len(found[at]) > 1:
            found[at] = found[at][:1] + mutate_bytes(rng, found[at][1:], 1)
        elif kind == 5:
            end = at + rng.choice((2, 5, 20))
            found[at:at] = found[at:end] * rng.choice((1, 2, 50))
        else:
            other = rng.randrange(len(found))
            found[at], found[other] = found[other], found[at]
    return b"".join(found)


def _doubling(rng: random.Random) -> bytes:
    """A structure in which each level holds the one below twice: text, hash, copy and walk of it are exponential."""
    depth = rng.choice((20, 30, 60, 200))
    if rng.random() < 0.5:
        body = b")" + b"2\x86" * depth  # a tuple of the same tuple twice
    else:
        body = b"]" + b"".join(_twice(k) for k in range(depth))
    if rng.random() < 0.5:
        return b"\x80\x02}" + body + b"K\x01s."
    return b"\x80\x02}X\x05\x00\x00\x00model}X\x01\x00\x00\x00a" + body + b"ss."


def _twice(level: int) -> bytes:
    """Opcodes that replace the list on the stack by a list of it, twice."""
    number = struct.pack("<I", level)
    return b"r" + number + b"0(j" + number + b"j" + number + b"l"


# --------------------------------------------------------------------------------------------- zip files


def mutate_archive(rng: random.Random, data: bytes) -> bytes:
    """A file of ``torch.save`` with a changed description, members or bytes."""
    kind = rng.randrange(8)
    if kind == 0:
        return mutate_bytes(rng, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    stream = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members:
            if name.endswith("data.pkl") and kind > 1:
                content = mutate_pickle(rng, content)
            elif kind == 1 and rng.random() < 0.3:
                name, content = rng.choice(
                    ((name + "x", content), (name, mutate_bytes(rng, content)), ("data.pkl", content))
                )
            elif kind == 2 and rng.random() < 0.2:
                continue
            archive.writestr(name, content)
    return stream.getvalue()
