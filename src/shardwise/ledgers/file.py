"""The file of one process's ledger: JSON lines, each written by one call, so that a killed process leaves whole lines."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError

__all__ = ["LedgerFile", "rank_and_world_size", "shortened"]

_log = logging.getLogger(__name__)
_LONGEST_LIST = 32
_LONGEST_TEXT = 2_000
#: Variables that launchers set: torchrun and Accelerate, SLURM, Open MPI.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


class LedgerFile:
    """Appends records. A disk that is full or lost ends the ledger with one warning, never the program."""

    def __init__(self, directory: str) -> None:
        """Make ``directory`` if needed, and a new file in it. Raises :class:`CheckpointError`."""
        rank, _ = rank_and_world_size()
        host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:64] or "host"
        started = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        name = f"rank-{rank:05d}.{host}.{started}.{os.getpid()}"
        try:
            os.makedirs(directory, exist_ok=True)
            for more in (
                "",
                *(f".{k}" for k in range(1, 100)),
            ):  # containers of a host may have equal names and pids
                self.path = os.path.join(directory, f"{name}{more}.jsonl")
                try:
                    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    self._file: int | None = os.open(self.path, flags, 0o644)
                    return
                except FileExistsError:
                    continue
            raise FileExistsError(f"{name}.jsonl, and 99 more")
        except OSError as error:
            raise CheckpointError(
                f"{directory}: a ledger can't be written there ({error.strerror or error}); give a directory, which may not exist yet"
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._file is None:
            return
        line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
        try:
            while line:  # a line is cut only where the disk is full: the reader skips it
                line = line[os.write(self._file, line) :]
        except OSError as error:
            _log.warning("%s: the ledger ends here: %s", self.path, error.strerror or error)
            self.close()

    def close(self) -> None:
        """Close the file; later records are dropped."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def rank_and_world_size() -> tuple[int, int]:
    """Of the default process group, else as the launcher says, else (0, 1)."""
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for rank, world_size in _LAUNCHERS:
        try:
            return int(os.environ[rank]), int(os.environ[world_size])
        except (KeyError, ValueError):
            continue
    return 0, 1


def shortened(value: Any) -> Any:
    """A report's values with long lists and texts cut, so that no outcome fills the file."""
    if isinstance(value, Mapping):
        kept = list(value.items())[:_LONGEST_LIST]
        return {str(name): shortened(one) for name, one in kept}
    if isinstance(value, list | tuple | set | frozenset):
        items = [shortened(one) for one in list(value)[:_LONGEST_LIST]]
        return [*items, f"and {len(value) - _LONGEST_LIST} more"] if len(value) > _LONGEST_LIST else items
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]}…"
    if isinstance(value, bool | int | float) or value is None:
        return value
    return shortened(str(value))
