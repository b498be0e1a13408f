"""Staging for async saves: copies of a training state, in one reusable buffer.

The training thread puts pieces in; the writing thread takes them out in the same order. With a buffer for the whole
state, training goes on as soon as everything is copied. With a smaller one it waits, in waves, for the writer to free
room.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import torch

from ..errors import CheckpointError
from ..state.typed_json import Encoded
from .collect import Collected

__all__ = ["StagingBuffer", "detached_documents", "room_for"]

_ALIGNMENT = 64


class StagingBuffer:
    """A ring of host memory (pinned if there is an accelerator) between the training thread and the writing thread.

    ``nbytes`` is its size. :meth:`reserve` allocates and touches it; it is kept for the next save.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._changed = threading.Condition()
        self._reset()

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def reserve(self, nbytes: int) -> None:
        """Make room for ``nbytes``, reusing existing memory. Not while a save runs.

        Raises :class:`CheckpointError` if the system has not enough memory.
        """
        if nbytes > self.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # freed before the next is allocated
            try:
                self._memory = torch.zeros(
                    nbytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available()
                )
            except (RuntimeError, MemoryError) as error:
                raise CheckpointError(
                    f"the system does not give {nbytes} bytes of host memory for the copy of the state "
                    f"({error}); give a smaller max_staging_bytes, or mode='sync'"
                ) from error
        self._reset()

    def _reset(self) -> None:
        self._ready: deque[tuple[int, int, torch.Tensor]] = deque()  # (begin, end, copy), oldest first
        self._taken: tuple[int, int] | None = None
        self._head = 0
        self._error: BaseException | None = None

    def put(self, tensor: torch.Tensor) -> None:
        """Copy a piece in; waits for the writer if there is no room. Called by the training thread.

        Does nothing once the writer has failed: all ranks learn of that together, when they ask for the outcome.
        """
        nbytes = room_for(tensor)
        with self._changed:
            begin = self._room(nbytes)
            while begin is None and self._error is None:
                self._changed.wait()
                begin = self._room(nbytes)
            if begin is None or self._error is not None:
                return
        end = begin + nbytes
        size = tensor.numel() * tensor.element_size()
        copy = self._memory[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        with self._changed:
            self._ready.append((begin, end, copy))
            self._head = end
            self._changed.notify_all()

    def take(self) -> torch.Tensor:
        """The next piece. Frees the one taken before. Called by the writing thread."""
        with self._changed:
            self._taken = None
            self._changed.notify_all()
            while not self._ready:
                if self._error is not None:
                    raise CheckpointError(f"copying the state failed: {self._error}") from self._error
                self._changed.wait()
            begin, end, copy = self._ready.popleft()
            self._taken = (begin, end)
            return copy

    def fail(self, error: BaseException) -> None:
        """Make the other thread raise instead of waiting for ever."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _room(self, nbytes: int) -> int | None:
        """The place for the next piece; None while the writer still needs that memory."""
        assert nbytes <= self.nbytes, (nbytes, self.nbytes)
        held = [self._taken] if self._taken else []
        held += [(begin, end) for begin, end, _ in self._ready]
        if not held:
            return 0
        oldest = held[0][0]
        if self._head > oldest:
            if self._head + nbytes <= self.nbytes:
                return self._head
            return 0 if nbytes <= oldest else None
        return self._head if self._head + nbytes <= oldest else None


def room_for(tensor: torch.Tensor) -> int:
    """Bytes that a piece takes in the buffer."""
    nbytes = max(1, tensor.numel() * tensor.element_size())  # an empty piece also needs a place in the order
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def detached_documents(collected: Collected) -> Collected:
    """``collected`` with copies of the (small) tensors of documents: training may then change the originals."""

    def copies(documents: Mapping[str, Encoded]) -> dict[str, Encoded]:
        return {
            name: replace(encoded, tensors={k: t.detach().clone() for k, t in encoded.tensors.items()})
            for name, encoded in documents.items()
        }

    return replace(collected, shared=copies(collected.shared), local=copies(collected.local))
