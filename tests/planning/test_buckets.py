"""A source in buckets: every byte once, and for stores no bucket of two files."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from shardwise.catalog.records import Chunk, StoredTensor
from shardwise.engine.objects import requests_for
from shardwise.planning.proof import Bucket, Buckets, Span, cut_into_buckets, one_reader_each
from shardwise.tensors.boxes import whole

MOST = 1000


def stored() -> dict[str, StoredTensor]:
    """Twelve tensors of 96 to 1,500 bytes, in three files."""
    found, offsets = {}, {"a": 0, "b": 0, "c": 0}
    for k in range(12):
        path, shape = "abc"[k % 3], (3 + k, 16 if k % 4 else 50)
        found[f"t{k:02}"] = StoredTensor(
            f"t{k:02}", "BF16", shape, (Chunk(whole(shape), path, offsets[path]),)
        )
        offsets[path] += shape[0] * shape[1] * 2
    return found


@pytest.mark.parametrize("of_one_file", [False, True])
def test_every_byte_once(of_one_file: bool) -> None:
    tensors = stored()
    cut = cut_into_buckets(tensors, list(tensors), MOST, of_one_file=of_one_file)
    read = sorted((r.path, r.offset_bytes, r.offset_bytes + r.nbytes) for b in cut.buckets for r in b.ranges)
    assert all(one[0] != other[0] or one[2] <= other[1] for one, other in itertools.pairwise(read))
    assert sum(b.bytes_to_read for b in cut.buckets) == sum(t.nbytes for t in tensors.values())
    assert all(bucket.nbytes <= MOST for bucket in cut.buckets)
    for name, tensor in cut.tensors.items():
        assert sum(c.box.numel for c in tensor.chunks) == whole(tensors[name].shape).numel
    mixed = [bucket for bucket in cut.buckets if len({r.path for r in bucket.ranges}) > 1]
    assert bool(mixed) is not of_one_file


def test_a_bucket_of_one_file_is_one_range() -> None:
    """One request to a store."""
    tensors = stored()
    cut = cut_into_buckets(tensors, list(tensors), MOST, of_one_file=True)
    assert {len(bucket.ranges) for bucket in cut.buckets} == {1}


def files_of(count: int, rows: int, columns: int) -> dict[str, StoredTensor]:
    """Each file has two tensors of ``rows`` rows."""
    found = {}
    for k, half in itertools.product(range(count), range(2)):
        name, shape = f"{k:03}/{half}", (rows, columns)
        at = half * rows * columns * 2
        found[name] = StoredTensor(name, "BF16", shape, (Chunk(whole(shape), f"f{k:03}", at),))
    return found


@pytest.mark.parametrize("columns", [4, 500, 150_000])
@pytest.mark.parametrize("mib", [3, 9, 13.5, 16.5, 23, 40, 100, 333])
def test_buckets_of_small_files_are_few_and_alike(mib: float, columns: int) -> None:
    """A file's requests are at most its bytes / 8 MiB, or one."""
    part, most = 2**23, 14 * 2**20
    rows = int(mib * 2**20 / columns / 4)
    tensors = files_of(3, rows, columns)
    nbytes = sum(t.nbytes for t in tensors.values()) / 3
    cut = cut_into_buckets(tensors, list(tensors), most, of_one_file=True)
    assert len(cut.buckets) == 3 * math.ceil(nbytes * (1 if nbytes < most else 32 / 31) / (most - 64))
    asked = len(list(requests_for(s for b in cut.buckets for s in spans(b)))) / 3
    assert asked <= max(1, 1.05 * nbytes / part)


def spans(bucket: Bucket) -> list[Span]:
    return [(f"s3://b/{r.path}", r.offset_bytes, r.offset_bytes + r.nbytes) for r in bucket.ranges]


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_one_reader_for_each_path(readers: int) -> None:
    """All buckets of a path are of one of those who read in turns; tensors find their bytes where they were."""
    tensors = {
        name: StoredTensor(name, "F32", (rows, 16), (Chunk(whole((rows, 16)), name, 0),))
        for name, rows in (("a", 40), ("b", 1), ("c", 100), ("d", 7), ("plain", 60))
    }
    before = cut_into_buckets(tensors, [*tensors], 1024, of_one_file=True)
    after = one_reader_each(before, readers, {"a", "b", "c", "d"})
    owners = {name: set[int]() for name in tensors}
    for index, bucket in enumerate(after.buckets):
        for part in bucket.ranges:
            owners[part.path].add(index % readers)
    assert all(len(owners[name]) == 1 for name in "abcd")
    nbytes = [sum(bucket.bytes_to_read for bucket in after.buckets[k::readers]) for k in range(readers)]
    assert max(nbytes) - min(nbytes) <= tensors["c"].nbytes
    for name, tensor in before.tensors.items():
        for chunk, moved in zip(tensor.chunks, after.tensors[name].chunks, strict=True):
            assert replace(moved, path=chunk.path) == chunk
            assert after.buckets[Buckets.index_of(moved.path)] is before.buckets[Buckets.index_of(chunk.path)]
