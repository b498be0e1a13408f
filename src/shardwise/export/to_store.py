"""An export into a store, where no file can be filled in place: each file has one rank, which writes it from front to back.

Of a live model every rank has a part of each tensor: they are brought to the file's rank window by window, by an integer sum, as
:mod:`.full` does. Of a stored model each rank reads what its own files need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..limits import inside
from ..operations.operation import Operation
from ..ranks.hosts import device_where_ranks_sum
from ..ranks.patience import patiently
from ..ranks.ranks import Ranks
from ..storage import exists, join, stat_of
from ..store.copy import LAST
from ..store.in_store import ObjectWriter, claim, discard_in_store, release
from ..store.write import write_file
from ..transfer.copy import Staging
from .files import INDEX_NAME, HubFiles, check_readable
from .job import Job, Window, Windows, windows_of
from .tensors import HubTensors

__all__ = ["ToStore"]


class ToStore:
    """As :class:`.Place`. Memory: two windows of 32 MiB, and what :class:`.ObjectWriter` takes."""

    def __init__(self, url: str, output: HubFiles, ranks: Ranks, counted: Operation) -> None:
        self._url, self._output, self._ranks, self._counted = url, output, ranks, counted

    def prepare(self) -> None:
        self._url = self._ranks.on_first("claim the URL of the export", self._claim)

    def _claim(self) -> str:
        if patiently(exists, self._url):
            raise CheckpointError(f"{self._url}: exists already; export to a new or empty prefix")
        claim(self._url)
        return self._url

    def write(self, job: Job, contents: HubTensors, staging: Staging) -> tuple[int, list[int]]:
        ranks = self._ranks
        objects = _Objects(self._url, self._output, ranks, self._counted)
        with ranks.agree("write export"):
            own = self._windows_of(ranks.rank)
            self._counted.expect(lambda: sum(window.nbytes for window in own))
            windows = job.windows(contents, self._output, staging, ranks)
            if not windows.is_spread:
                for window in self._windows_of(ranks.rank):
                    objects.write(window, _filled(window, windows))
        if windows.is_spread:
            self._gather(windows, objects)
        with ranks.agree("write export"):
            sums = windows.finish()
        return objects.bytes_written, sums

    def _windows_of(self, rank: int) -> Iterator[Window]:
        """The windows of the files that a rank writes, in order."""
        for file in list(self._output.headers)[rank :: self._ranks.world_size]:
            yield from windows_of(self._output, file)

    def _gather(self, windows: Windows, objects: _Objects) -> None:
        """Bring the ranks' elements together. In each turn every rank gets a window of its own, and then all write theirs."""
        ranks = self._ranks
        cpu = torch.device("cpu")
        with ranks.agree("write export"):
            device = device_where_ranks_sum(cpu) if ranks.world_size > 1 else cpu
        for turn in zip_longest(*(self._windows_of(rank) for rank in range(ranks.world_size))):
            own: tuple[Window, torch.Tensor] | None = None
            for rank, window in enumerate(turn):
                if window is None:
                    continue
                with ranks.agree(
                    "gather for the store"
                ):  # no rank enters a collective until all have their part
                    words = _filled(window, windows).to(device)
                if ranks.world_size > 1 and words.numel():
                    dist.reduce(words, dst=rank)
                words = words.to(cpu)
                windows.fill_together(window, rank, _Memory(window, words))
                if rank == ranks.rank:
                    own = window, words
                del words
            with ranks.agree("write export"):
                if own is not None:
                    objects.write(*own)

    def publish(self, assets: Mapping[str, bytes]) -> None:
        url, output = self._url, self._output
        for file, nbytes in output.sizes.items():
            found = patiently(stat_of, join(url, file))
            if found is None or found.nbytes != nbytes:
                got = "there is none" if found is None else f"it has {found.nbytes} bytes"
                raise CheckpointError(f"{join(url, file)}: was written with {nbytes} bytes, but {got}")
        small = {**assets, **({} if output.index is None else {INDEX_NAME: output.index})}
        for name in sorted(small, key=lambda name: LAST.index(name) if name in LAST else -1):
            write_file(inside(url, name), small[name])
        check_readable(url, url, output)
        release(url)

    def discard(self) -> None:
        if discard_in_store(self._url):
            release(self._url)


def _filled(window: Window, windows: Windows) -> torch.Tensor:
    """This rank's elements of a window as 64-bit words; zeros for the rest."""
    words = torch.zeros(-(-window.nbytes // 8), dtype=torch.int64)
    windows.fill(window, _Memory(window, words))
    return words


class _Memory:
    """As :class:`.Filler`: takes the bytes of one window."""

    def __init__(self, window: Window, words: torch.Tensor) -> None:
        self._window, self._view = window, memoryview(words.view(torch.uint8).numpy().data)

    def write_at(self, name: str, offset_bytes: int, view: memoryview) -> None:
        at = offset_bytes - self._window.start
        assert name == self._window.file
        assert 0 <= at <= self._window.nbytes - view.nbytes
        self._view[at : at + view.nbytes] = view


class _Objects:
    """The objects that one rank writes, one after another."""

    def __init__(self, url: str, output: HubFiles, ranks: Ranks, counted: Operation) -> None:
        self.bytes_written = 0
        self._url, self._output, self._ranks, self._counted = url, output, ranks, counted
        self._writer: ObjectWriter | None = None

    def write(self, window: Window, words: torch.Tensor) -> None:
        """Append a window to its file, which appears with its last one."""
        header, nbytes = self._output.headers[window.file], self._output.sizes[window.file]
        if window.start == len(header):
            self._writer = ObjectWriter(
                inside(self._url, window.file), self._ranks.tick, expected_bytes=nbytes
            )
            self._writer.write(header)
        assert self._writer is not None
        self._writer.write(words.view(torch.uint8).numpy().data[: window.nbytes])
        self.bytes_written += window.nbytes
        self._counted.add(window.nbytes)
        if window.stop == nbytes:
            self._writer.close()
            self._writer = None
