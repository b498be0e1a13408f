"""An inference engine's own ``load_weights``, run on tensors that carry tiles instead of data: what it takes is what this rank pulls.

vLLM and SGLang fuse, cut and rename weights as they load them, each rank its own way. Their loaders do that with views and ``copy_``. A
first run records which elements are copied; for each version, another run copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..dtypes import torch_dtype
from ..errors import PlanError
from ..internals.torch import TorchDispatchMode, storage_key, written_tensors
from ..tensors.tiles import Tiles, Untraceable
from ..tensors.trace import Traced, is_untraceable, stored_tensor

#: Takes pairs of a Hub name and a tensor.
Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_aten = torch.ops.aten


class Loaded:
    """What a loader takes of the hub's tensors on this rank.

    ``specs``: dtype and shape by name. ``tensors``: memory for each part that it takes, by a name that tells where it is from; they
    have to be filled before :meth:`load`. ``parts``: the tiles of each. Raises :class:`PlanError` if the loader fails, or does more with
    a tensor than take views, cast and copy.
    """

    def __init__(self, loader: Loader, specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._loader, self.specs = loader, dict(specs)
        self._names = dict[tuple[Tiles, torch.Size], str]()
        self.tensors = dict[str, torch.Tensor]()
        self.parts = dict[str, Tiles]()
        with _WithoutWrites():  # type: ignore[no-untyped-call]
            self._run(self._note)

    def load(self) -> None:
        """Let the engine load what :attr:`tensors` have."""
        self._run(self._given)

    def _run(self, part_of: Callable[[Traced], torch.Tensor | None]) -> None:
        at = ""

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal at
            for at, (code, shape) in self.specs.items():
                yield at, stored_tensor(at, shape, torch_dtype(code))

        try:
            with torch.no_grad(), _Casts(self.specs, part_of), _Copies(part_of):
                self._loader(weights())
        except Exception as error:
            why = "can't be traced" if is_untraceable(error) else "failed"
            raise PlanError(
                f"the engine's loader {why} at {at!r}: {type(error).__name__}: {error}. If this engine needs full tensors, "
                "give it those of iter_full_tensors"
            ) from error

    def _note(self, source: Traced) -> None:
        """Give a part memory, in the sender's dtype."""
        if not source.numel() or (source.tiles, source.shape) in self._names:
            return
        name = f"{source.tiles[0].source}[{len(self.tensors)}]"
        code, _ = self.specs[source.tiles[0].source]
        self._names[source.tiles, source.shape] = name
        self.parts[name] = source.tiles
        self.tensors[name] = torch.empty(source.shape, dtype=torch_dtype(code), device="cpu")

    def _given(self, source: Traced) -> torch.Tensor:
        if not source.numel():
            return torch.empty(source.shape, dtype=source.dtype, device="cpu")
        name = self._names.get((source.tiles, source.shape))
        if name is None:
            raise RuntimeError(
                f"it takes another part of {source.tiles[0].source!r} than when the receiver planned its pulls"
            )
        return self.tensors[name].to(source.dtype)


class _Copies(TorchFunctionMode):
    """Copies parts into what a loader wants to fill. Before any other mode counts or does that."""

    def __init__(self, part_of: Callable[[Traced], torch.Tensor | None]) -> None:
        super().__init__()
        self._part_of = part_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and isinstance(args[1], Traced):
            return self._copy(args[0], args[1])
        if func is torch.Tensor.__setitem__ and isinstance(args[2], Traced):
            target = args[0][args[1]]
            if storage_key(target) != storage_key(args[0]):
                raise Untraceable("elements that are picked by a tensor of indexes")
            return self._copy(target, args[2])
        return func(*args, **kwargs)

    def _copy(self, target: torch.Tensor, source: Traced) -> torch.Tensor:
        part = self._part_of(source)
        if part is None:
            if torch.broadcast_shapes(target.shape, source.shape) != target.shape:
                raise ValueError(f"shape {tuple(source.shape)} doesn't fit into {tuple(target.shape)}")
            return target
        return target.copy_(part.to("meta") if target.is_meta else part)


class _Casts(TorchDispatchMode):
    """Casts symbols, and gives single values."""

    def __init__(
        self,
        specs: Mapping[str, tuple[str, tuple[int, ...]]],
        part_of: Callable[[Traced], torch.Tensor | None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._specs, self._part_of = specs, part_of

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Traced):
            source, dtype = args[0], kwargs.get("dtype")
            if func is _aten._to_copy.default and dtype not in (None, source.dtype):
                self._check(source)
                return Traced(source.shape, dtype, source.tiles)
            if func is _aten._local_scalar_dense.default:
                part = self._part_of(source)
                return torch.ones((), dtype=source.dtype).item() if part is None else part.item()
        return func(*args, **kwargs)

    def _check(self, source: Traced) -> None:
        """A part is cast once, from the sender's dtype to the last one: what was lost between them would come back."""
        for tile in source.tiles:
            stored = torch_dtype(self._specs[tile.source][0])
            if torch.promote_types(stored, source.dtype) != source.dtype:
                raise Untraceable(f"a cast of {stored} to {source.dtype}, and then to another dtype")


class _WithoutWrites(TorchDispatchMode):
    """Nothing is written to an existing tensor: those of a live engine must stay as they are while its loader is recorded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for written in written_tensors(func, args, kwargs or {}):
            return written
        return func(*args, **(kwargs or {}))
