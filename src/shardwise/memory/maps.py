"""Files of a ring as memory of this process, kept from one step to the next."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence

import torch

from ..store.slice_file import tensor_bytes
from .ring import Slot

__all__ = ["Maps", "copy_tensors"]


#: A tensor, memory, and the first byte there.
Copy = tuple[torch.Tensor, torch.Tensor, int]


def copy_tensors(copies: Sequence[Copy]) -> int:
    """Copy elements of CPU tensors in row-major order into memory. Returns their bytes.

    The C library copies: it writes past the caches, which ``Tensor.copy_`` does not. Memory: at most 16 MiB for a tensor that is not
    contiguous; for one whose conjugate or negative is only marked (``is_conj``, ``is_neg``) that of the tensor.
    """
    moves, others = [], []
    for tensor, target, at in copies:
        assert at + tensor.nbytes <= target.numel()
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            moves.append((target.data_ptr() + at, tensor.data_ptr(), tensor.nbytes))
        else:
            others.append((tensor, target, at))
    for move in moves:  # nothing else between two of them: Python would find the caches full of the tensors
        ctypes.memmove(*move)
    for tensor, target, at in others:
        for view in tensor_bytes(tensor.resolve_conj().resolve_neg()):
            target[at : at + view.nbytes] = torch.frombuffer(view, dtype=torch.uint8)
            at += view.nbytes
    return sum(tensor.nbytes for tensor, _, _ in copies)


class Maps:
    """What one rank has mapped. A slot's files keep their pages from step to step, and here the process keeps its way to them: to meet
    a page for the first time costs several times what it takes to copy into it."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[str, tuple[int, torch.Tensor]]] = {}

    def has(self, slot: Slot, sizes: Mapping[str, int]) -> bool:
        """Whether the files of a slot were mapped last with these names and sizes."""
        return {n: memory.numel() for n, (_, memory) in self._slots.get(slot.path, {}).items()} == sizes

    def of(self, slot: Slot, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Files of a slot, with room for so many bytes (at least one), as memory by name. Lets go of other files of the slot.

        Raises as :meth:`Slot.room_for`.
        """
        before, found = self._slots.pop(slot.path, {}), {}
        for name, nbytes in sizes.items():
            path = slot.room_for(name, nbytes)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                inode = os.fstat(fd).st_ino
                known = before.pop(name, None)
                if known is None or known[0] != inode or known[1].numel() != nbytes:
                    known = inode, torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
                found[name] = known
            finally:
                os.close(fd)
        self._slots[slot.path] = found
        return {name: memory for name, (_, memory) in found.items()}

    def forget(self) -> None:
        """Let go of all files: those that are deleted give their memory back."""
        self._slots.clear()
