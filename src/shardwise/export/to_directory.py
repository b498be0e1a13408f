"""An export into a local directory: every rank fills its bytes into files of their final size, and a rename publishes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

from ..errors import CheckpointError
from ..limits import inside
from ..operations.operation import Operation
from ..ranks.patience import patiently
from ..ranks.ranks import Ranks
from ..store.marks import remove_ours, unmark
from ..store.publish import make_temporary
from ..store.write import fsync_directory, make_directories, write_file
from ..transfer.copy import FileFiller, Staging
from .files import INDEX_NAME, HubFiles, check_readable
from .job import Job
from .tensors import HubTensors

__all__ = ["ToDirectory"]


class ToDirectory:
    """As :class:`.Place`."""

    def __init__(self, final: str, output: HubFiles, ranks: Ranks, counted: Operation) -> None:
        self._final, self._output, self._ranks = final, output, ranks
        self._counted = counted
        self._temporary = ""

    def prepare(self) -> None:
        self._temporary = self._ranks.on_first("make export directory", self._make)

    def _make(self) -> str:
        """The temporary directory, with the files in their final size."""
        _refuse_taken(self._final)
        folders = {os.path.dirname(file) for file in self._output.headers}
        path = make_temporary(self._final, sorted(filter(None, folders)))
        try:
            for file, header in self._output.headers.items():
                write_file(os.path.join(path, file), header)
                patiently(os.truncate, os.path.join(path, file), self._output.sizes[file])
        except (OSError, CheckpointError) as error:
            remove_ours(path)
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"{path}: can't be created: {reason}") from error
        return path

    def write(self, job: Job, contents: HubTensors, staging: Staging) -> tuple[int, list[int]]:
        ranks = self._ranks
        tick = self._counted.counting(ranks.tick)
        with ranks.agree("write export"), FileFiller(self._temporary, tick) as filler:
            self._counted.guess(lambda: job.share_bytes(contents, self._output, staging, ranks))
            sums = job.write(contents, self._output, filler, staging, ranks)
        together = job.together(self._output)
        if together == ():  # a round of agreement less
            return filler.bytes_written, sums
        with ExitStack() as stack:
            more = stack.enter_context(FileFiller(self._temporary, tick))
            for write in together:
                with ranks.agree("write export"):
                    write(more)
            with ranks.agree("write export"):
                stack.pop_all().close()
        return filler.bytes_written + more.bytes_written, sums

    def publish(self, assets: Mapping[str, bytes]) -> None:
        temporary, final, output = self._temporary, self._final, self._output
        if output.index is not None:
            write_file(os.path.join(temporary, INDEX_NAME), output.index)
        for name, content in assets.items():
            make_directories(os.path.dirname(inside(temporary, name)))
            write_file(inside(temporary, name), content)
        check_readable(temporary, final, output)
        for folder in dict.fromkeys((*map(os.path.dirname, (*output.headers, *assets)), "")):
            fsync_directory(os.path.join(temporary, folder))
        try:
            unmark(temporary)
            if os.path.isdir(final):
                patiently(os.rmdir, final)
            patiently(os.rename, temporary, final)
        except OSError as error:
            raise CheckpointError(f"{final}: can't be published: {error.strerror}") from error
        fsync_directory(os.path.dirname(final))

    def discard(self) -> None:
        remove_ours(self._temporary)


def _refuse_taken(final: str) -> None:
    if os.path.islink(final):
        raise CheckpointError(
            f"{final}: is a symbolic link, which can't be exchanged for the finished export; give the directory "
            f"that it stands for, or a new one"
        )
    try:
        taken = os.path.lexists(final) and not (os.path.isdir(final) and not os.listdir(final))
    except OSError as error:
        raise CheckpointError(f"{final}: can't be looked at: {error.strerror}") from error
    if taken:
        raise CheckpointError(f"{final}: is there already; export into a new or empty directory")
