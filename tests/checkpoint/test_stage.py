"""The ring between the training and the writer: what goes in comes out, whatever its strides and the ring's size."""

from __future__ import annotations

import random

import pytest
import torch

from shardwise import host
from shardwise.checkpoint.take import StagingBuffer, _device_name, pinned_sizes, room_for

MIB = 1024**2


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def tensors(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    wide = torch.randn(40, 60)
    found = [
        *(torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (1, 63, 64, 65, 4096)),
        torch.tensor(7, dtype=torch.int64),
        torch.empty(0, 3),
        wide,
        wide.t(),
        wide[::2, 1:50:3],
        torch.randn(3, 1, 70, 5).permute(2, 0, 3, 1),
        torch.randn(2, 9, dtype=torch.complex64).conj(),
        torch.randn(1).expand(300),
    ]
    random.Random(seed).shuffle(found)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("nbytes", [64, 320, 4096, 10_000, None])
def test_bytes_come_out_as_they_went_in(
    monkeypatch: pytest.MonkeyPatch, seed: int, nbytes: int | None
) -> None:
    monkeypatch.setattr(host, "_DENSE_BYTES", 1000)
    given = tensors(seed)
    needed = sum(map(room_for, given))
    buffer = StagingBuffer()
    buffer.reserve(needed, nbytes)
    assert buffer.nbytes == (needed if nbytes is None else nbytes // 64 * 64)
    copying = buffer.copying(given)
    if nbytes is None:
        assert list(copying) == [], "with room for all, nothing waits for the writer"
    found = b""
    expected = b"".join(map(raw, given))
    while len(found) < len(expected):
        found += bytes(buffer.pull(copying).numpy().data)
    assert found == expected
    assert list(copying) == []


def test_a_larger_buffer_is_kept() -> None:
    buffer = StagingBuffer()
    buffer.reserve(1000)
    assert buffer.nbytes == 1024
    first = buffer._blocks[0].data_ptr()
    buffer.reserve(500)
    assert (buffer.nbytes, buffer._blocks[0].data_ptr()) == (1024, first)
    buffer.reserve(2000)
    assert buffer.nbytes == 2048


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, 100 * MIB, 1000 * MIB + 1])
@pytest.mark.parametrize("most_bytes", [None, 1, 100, 4096, 10_000, 3 * MIB, 500 * MIB])
def test_pinned_blocks_are_what_torch_takes_for_them(nbytes: int, most_bytes: int | None) -> None:
    sizes = pinned_sizes(nbytes, most_bytes)
    assert all(size.bit_count() == 1 and 64 <= size <= 64 * MIB for size in sizes)
    if most_bytes is None or nbytes + 4096 <= most_bytes:
        assert nbytes <= sum(sizes) < nbytes + 4096
    else:
        assert sum(sizes) <= max(most_bytes, 64)
        assert sum(sizes) > min(nbytes, most_bytes) - 4096


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps"])
def test_a_device_without_a_name_goes_by_its_type(kind: str) -> None:
    assert _device_name(kind) == kind
