"""Plans conversions that can't be traced: runs them on meta tensors to learn their results and memory.

A conversion that looks at values can't run on meta: the plan then expects the model's own shapes. The real results are
compared with the plan before any of them is placed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..catalog.records import Chunk, StoredTensor
from ..dtypes import code_of, torch_dtype
from ..errors import UnsupportedConversionError
from ..internals.torch import TorchDispatchMode, storage_key
from ..layout.boxes import whole
from ..layout.spec import TensorSpec
from .host_convert import HostConversion

__all__ = ["host_conversion"]


def host_conversion(
    name: str,
    stored: Sequence[StoredTensor],
    expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    run: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    reason: str,
) -> HostConversion:
    """The host conversion of ``stored`` by ``run``, planned without payload.

    ``expected`` gives dtype and shape of the model's own tensors by module name; the plan uses them if ``run`` looks
    at values. Raises :class:`UnsupportedConversionError` if ``run`` can't take these shapes.
    """
    with _Allocations() as allocations:
        symbols = {t.name: torch.empty(t.shape, dtype=torch_dtype(t.dtype), device="meta") for t in stored}
        try:
            results = run(symbols)
            made = {n: (t.dtype, tuple(t.shape)) for n, t in results.items()}
            # Placing copies results that are not row-major.
            copied = sum(_nbytes(made[n]) for n, t in results.items() if not t.is_contiguous())
            staging_bytes = allocations.nbytes + copied
        except Exception as error:
            if not _looks_at_values(error):
                raise UnsupportedConversionError(f"{name}: {error}") from error
            made = dict(expected)
            # Intermediate tensors are unknown: assume a copy of sources and results.
            staging_bytes = 2 * (sum(t.nbytes for t in stored) + sum(map(_nbytes, made.values())))
    group = next(iter(made), "")
    return HostConversion(
        name,
        tuple(t.name for t in stored),
        {target: _virtual(group, target, code_of(dtype), shape) for target, (dtype, shape) in made.items()},
        reason,
        sum(t.nbytes for t in stored),
        staging_bytes,
        run,
    )


def _virtual(group: str, target: str, code: str, shape: tuple[int, ...]) -> StoredTensor:
    """A result as if it were stored. In order of path, the results of one conversion are neighbors."""
    name = f"<converted>/{group}/{target}"
    return StoredTensor(name, code, shape, (Chunk(whole(shape), name, 0),))


def _nbytes(made: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = made
    return TensorSpec(code_of(dtype), shape).nbytes


def _looks_at_values(error: Exception) -> bool:
    """Whether an operation failed because meta tensors have no values, and not because of its input."""
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


class _Allocations(TorchDispatchMode):
    """Adds up the bytes of all storages made inside the block; counts none as freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self._seen: dict[int, torch.UntypedStorage] = {}  # keeps storages alive: no address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if (key := storage_key(value)) not in self._seen:
                    self._seen[key] = storage
                    self.nbytes += storage.nbytes()
        return result
