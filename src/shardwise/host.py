"""Devices of this process, and tensors that come from them to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

#: Bytes that :func:`to_host` packs at a time.
_BATCH_BYTES = 32 * 1024**2
#: Bytes of a tensor without a dense memory order that become dense at a time.
_DENSE_BYTES = 4 * 1024**2


def own_device(kind: str) -> torch.device:
    """This process's current device of a type; the CPU if it has none of that type."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != kind:
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def copies_late(device: torch.device) -> bool:
    """Whether copies from a device to pinned memory can run beside its current stream: not on the CPU, nor on MPS."""
    return device.type not in ("cpu", "meta", "mps")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as a vector of ``uint8``: a view if they lie so in memory, else a copy."""
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    # Not reshape: it keeps the odd stride of a single element, and view() refuses that.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in row-major order as parts that are contiguous, or small enough to be made so."""
    if tensor.is_contiguous() or tensor.nbytes <= _DENSE_BYTES:
        yield tensor
        return
    rows = max(1, _DENSE_BYTES * tensor.shape[0] // tensor.nbytes)
    for part in tensor.split(rows):
        yield from dense_parts(part[0] if part.shape[0] == 1 else part)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the CPU: a tensor there as it is, a tensor on a device as a copy.

    A device packs its tensors, so that the host waits once for each 32 MiB and not for each tensor. Memory on the
    device: 32 MiB, or the largest tensor if that is more. For small tensors.
    """
    found = list(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            by_device.setdefault(tensor.device, []).append(index)
    for indices in by_device.values():
        # The largest items first: then every tensor begins at a multiple of its item's size.
        indices.sort(key=lambda index: -tensors[index].element_size())
        for batch in _batches(indices, tensors):
            packed = torch.cat([flat_bytes(tensors[index]) for index in batch]).cpu()
            parts = packed.split([tensors[index].nbytes for index in batch])
            for index, part in zip(batch, parts, strict=True):
                found[index] = part.view(tensors[index].dtype).view(tensors[index].shape)
    return found


def _batches(indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    used = 0
    for index in indices:
        if batches[-1] and used + tensors[index].nbytes > _BATCH_BYTES:
            batches.append([])
            used = 0
        batches[-1].append(index)
        used += tensors[index].nbytes
    return batches
