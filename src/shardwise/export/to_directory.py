"""An export into a local directory: every rank fills its bytes into files of their final size, and a rename publishes them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Mapping
from contextlib import ExitStack

from ..errors import CheckpointError
from ..format.manifest import MANIFEST_NAME
from ..limits import inside
from ..operations.operation import Operation
from ..ranks.patience import patiently
from ..ranks.ranks import Ranks
from ..store.marks import NOTE_NAME, mark, remove_ours, unmark
from ..store.publish import make_temporary
from ..store.write import fsync_directory, make_directories, write_file
from ..transfer.copy import FileFiller, Staging
from .files import INDEX_NAME, HubFiles, check_readable
from .job import Job
from .tensors import HubTensors

__all__ = ["ToDirectory"]


class ToDirectory:
    """As :class:`.Place`."""

    def __init__(
        self, final: str, output: HubFiles, ranks: Ranks, counted: Operation, *, overwrite: bool
    ) -> None:
        self._final, self._output, self._ranks = final, output, ranks
        self._counted, self._overwrite = counted, overwrite
        self._temporary = ""

    def prepare(self) -> None:
        self._temporary = self._ranks.on_first("make export directory", self._make)

    def _make(self) -> str:
        """The temporary directory, with the files in their final size."""
        _refuse_taken(self._final, overwrite=self._overwrite)
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
        replaced = ""
        try:
            unmark(temporary)
            if not os.path.isdir(final):
                patiently(os.rename, temporary, final)
            elif not os.listdir(final):
                patiently(os.rmdir, final)
                patiently(os.rename, temporary, final)
            else:
                _refuse_taken(final, overwrite=self._overwrite)  # it may have changed since the start
                replaced = _exchange(temporary, final)
        except OSError as error:
            raise CheckpointError(f"{final}: can't be published: {error.strerror}") from error
        fsync_directory(os.path.dirname(final))
        if replaced:
            with contextlib.suppress(
                CheckpointError
            ):  # what is left of the old export stays, and harms nothing
                mark(replaced)
            remove_ours(replaced)

    def discard(self) -> None:
        remove_ours(self._temporary)


def _refuse_taken(final: str, *, overwrite: bool) -> None:
    if os.path.islink(final):
        raise CheckpointError(
            f"{final}: is a symbolic link, which can't be exchanged for the finished export; give the directory "
            f"that it stands for, or a new one"
        )
    try:
        taken = os.path.lexists(final) and not (os.path.isdir(final) and not os.listdir(final))
        if not taken:
            return
        if not overwrite:
            raise CheckpointError(
                f"{final}: exists already; export into a new or empty directory, or pass overwrite=True to replace an earlier export"
            )
        other = _not_of_an_export(final)
    except OSError as error:
        raise CheckpointError(f"{final}: can't be inspected: {error.strerror}") from error
    if other:
        raise CheckpointError(
            f"{final}: overwrite=True replaces earlier exports only, and {other}; choose another directory, or delete this one yourself"
        )


def _not_of_an_export(final: str) -> str | None:
    """Why a directory can't be an earlier export, so that it must not be deleted; None if it looks like one.

    An export has weights at its top or in the folders of adapters, and neither checkpoints nor repositories.
    """
    if not os.path.isdir(final):
        return "it is not a directory"
    weights = False
    for folder, folders, files in os.walk(final):
        relative = os.path.relpath(folder, final)
        if found := {MANIFEST_NAME, NOTE_NAME, ".git"} & {*folders, *files}:
            return f"{os.path.join(relative, found.pop())} is not part of one"
        weights = weights or any(name.endswith(".safetensors") for name in files)
        if relative.count(os.sep) > 3:
            return f"it has folders as deep as {relative}"
    return None if weights else "it holds no weights"


def _exchange(new: str, old: str) -> str:
    """Let two directories change their names at once; returns the path that the old one has then. Raises ``OSError``.

    File systems without that call (NFS among them) take two renames: for an instant, ``old`` is missing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if libc.renameat2(here, os.fsencode(new), here, os.fsencode(old), exchange) == 0:
        return new
    reason = ctypes.get_errno()
    if reason not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(reason, os.strerror(reason))
    aside = make_temporary(old, [])
    unmark(aside)
    patiently(os.rename, old, aside)
    patiently(os.rename, new, old)
    return aside
