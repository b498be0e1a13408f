"""The plain floor: each rank only reads its own ranges into fresh memory, a tensor at a time. Makes no model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch

from benchmarks.loading.cases import Case, Range, local_ranges

NAME = "plain floor"
WHOLE = False


def supports(case: Case) -> str | None:
    return None if case.layout == "dim 0" else "only shards along dim 0 are whole ranges of the files"


def prepare(case: Case) -> Callable[[], dict[str, torch.Tensor]]:
    ranges = local_ranges(case)

    def load() -> dict[str, torch.Tensor]:
        files = open_files(ranges.values())
        found = {}
        for name, spans in ranges.items():
            shard = torch.empty(sum(span.nbytes for span in spans), dtype=torch.uint8)
            read_spans(files, spans, memoryview(shard.numpy()))
            found[name] = shard
        return found

    return load


def open_files(ranges: Iterable[list[Range]]) -> dict[str, int]:
    return {path: os.open(path, os.O_RDONLY) for path in {span.path for spans in ranges for span in spans}}


def read_spans(files: dict[str, int], spans: list[Range], into: memoryview, most: int | None = None) -> None:
    """Read ``spans`` one after the other into ``into``, in requests of at most ``most`` bytes."""
    start = 0
    for span in spans:
        done = 0
        while done < span.nbytes:
            end = span.nbytes if most is None else min(span.nbytes, done + most)
            done += os.preadv(files[span.path], [into[start + done : start + end]], span.offset + done)
        start += span.nbytes
