"""An inference engine's own ``load_weights``, run on tensors that carry tiles instead of data: what it takes is what this rank pulls.

vLLM and SGLang fuse, cut and rename weights as they load them, each rank its own way. Their loaders do that with views and ``copy_``. A
first run records which elements are copied; for each version, another run copies them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import reduce
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..dtypes import torch_dtype
from ..errors import PlanError, StateError
from ..internals.torch import (
    TorchDispatchMode,
    gives_one_tensor,
    storage_key,
    tree_leaves,
    written_tensors,
)
from ..tensors.tiles import Tiles, Untraceable
from ..tensors.trace import Traced, is_untraceable, stored_tensor

#: Takes pairs of a hub name and a tensor. If it has a method ``loading_session``, each run is inside ``with loading_session(is_recording)``. What
#: the session does to the engine when it starts and ends isn't held back, even while parts are recorded.
Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
#: From a part of a tensor to its values; None while parts are recorded.
PartOf = Callable[[Traced], torch.Tensor | None]

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
        self._used = set[str]()
        self.tensors = dict[str, torch.Tensor]()
        self.parts = dict[str, Tiles]()
        if problem := self._run(self._note, is_recording=True):
            raise PlanError(
                f"{problem[0]}. If this engine needs full tensors, give it those of iter_full_tensors"
            ) from problem[1]

    def load(self) -> None:
        """Let the engine load what :attr:`tensors` have. Raises :class:`StateError` if it fails, or doesn't take all of them."""
        self._used.clear()
        problem = self._run(self._given, is_recording=False)
        left = self.tensors.keys() - self._used
        if problem or left:
            words, cause = problem or (
                f"the engine's loader left out {len(left)} parts, e.g. of {min(left)!r}",
                None,
            )
            raise StateError(f"{words}. No version is on; the next pull loads all of it") from cause

    def _run(self, part_of: PartOf, *, is_recording: bool) -> tuple[str, Exception | None] | None:
        """Run the loader. Returns what went wrong, and its cause."""
        session = getattr(self._loader, "loading_session", lambda is_recording: nullcontext())
        symbols, at = _Symbols(self.specs, part_of), ""

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal at
            for at, (code, shape) in self.specs.items():
                yield at, symbols.seen(stored_tensor(at, shape, torch_dtype(code)))

        failed: Exception | None = None
        try:
            with torch.no_grad(), ExitStack() as around:
                if is_recording:
                    around.enter_context(session(True))
                    around.enter_context(_WithoutWrites())
                around.enter_context(symbols)
                around.enter_context(_Copies(part_of))
                if not is_recording:
                    around.enter_context(session(False))  # its end may copy, too
                self._loader(weights())
        except Exception as error:
            failed = error
        if symbols.refused is not None:  # also if the loader went on without the tensor
            name, refused = symbols.refused
            return f"the engine's loader can't be traced at {name!r}: {refused}", refused
        if failed is not None:
            told = f"{type(failed).__name__}: {failed}"
            return f"the engine's loader failed (the last tensor that it took was {at!r}): {told}", failed
        if (kept := symbols.kept()) is not None:
            return f"the engine's loader keeps {kept!r} itself, instead of copying it", None
        return None

    def _note(self, source: Traced) -> None:
        """Give a part memory, in a dtype that holds the sender's values."""
        if not source.numel() or (source.tiles, source.shape) in self._names:
            return
        name = f"{source.tiles[0].source}[{len(self.tensors)}]"
        dtype = reduce(torch.promote_types, {torch_dtype(self.specs[t.source][0]) for t in source.tiles})
        self._names[source.tiles, source.shape] = name
        self.parts[name] = source.tiles
        with torch.inference_mode(False):
            self.tensors[name] = torch.empty(source.shape, dtype=dtype, device="cpu")

    def _given(self, source: Traced) -> torch.Tensor:
        if not source.numel():
            return torch.empty(source.shape, dtype=source.dtype, device="cpu")
        name = self._names.get((source.tiles, source.shape))
        if name is None:
            raise RuntimeError(
                f"it takes another part of {source.tiles[0].source!r} than when it was recorded"
            )
        self._used.add(name)
        return self.tensors[name].to(source.dtype)


class _Copies(TorchFunctionMode):
    """Copies parts into what a loader wants to fill. Before any other mode counts or does that."""

    def __init__(self, part_of: PartOf) -> None:
        super().__init__()
        self._part_of = part_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and len(args) > 1 and isinstance(args[1], Traced):
            return self._copy(args[0], args[1])
        if func is torch.Tensor.__setitem__ and isinstance(args[2], Traced):
            target: torch.Tensor = args[0][args[1]]
            source: Any = args[2]
            # Otherwise the call below says that it can't be traced.
            if storage_key(target) == storage_key(args[0]):
                while source.dim() > target.dim() and source.shape[0] == 1:
                    source = source.squeeze(0)
                return self._copy(target, source)
        return func(*args, **kwargs)

    def _copy(self, target: torch.Tensor, source: Traced) -> torch.Tensor:
        part = self._part_of(source)
        if part is None:
            if torch.broadcast_shapes(target.shape, source.shape) != target.shape:
                raise ValueError(f"shape {tuple(source.shape)} doesn't fit into {tuple(target.shape)}")
            return target
        return target.copy_(part.to("meta") if target.is_meta else part)


class _Symbols(TorchDispatchMode):
    """Casts symbols, gives single values, and remembers the first operation that has no map, and which symbols there are."""

    def __init__(self, specs: Mapping[str, tuple[str, tuple[int, ...]]], part_of: PartOf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._specs, self._part_of = specs, part_of
        self._seen: list[weakref.ref[Traced]] = []
        self.refused: tuple[str, Exception] | None = None

    def seen(self, symbol: Traced) -> Traced:
        self._seen.append(weakref.ref(symbol))
        return symbol

    def kept(self) -> str | None:
        """The name of a tensor that still has a symbol, now that the loader is done."""
        for _ in range(2):
            alive = [one for ref in self._seen if (one := ref()) is not None]
            if not alive:
                return None
            names = [one.tiles[0].source if one.tiles else "a tensor without elements" for one in alive]
            alive.clear()
            gc.collect()
        return names[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        symbols = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Traced)]
        if not symbols:
            return func(*args, **kwargs)
        try:
            found = self._of(func, symbols[0], args, kwargs)
        except Exception as error:
            if is_untraceable(error) and self.refused is None:
                self.refused = symbols[0].tiles[0].source if symbols[0].tiles else "", error
            raise
        for one in tree_leaves(found):
            if isinstance(one, Traced):
                self.seen(one)
        return found

    def _of(self, func: Any, source: Traced, args: Any, kwargs: Any) -> Any:
        dtype = kwargs.get("dtype")
        if func is _aten._to_copy.default and dtype not in (None, source.dtype):
            # A part is cast once, from the sender's dtype to the last one: what was lost between them would come back.
            for tile in source.tiles:
                stored = torch_dtype(self._specs[tile.source][0])
                if torch.promote_types(stored, source.dtype) != source.dtype:
                    raise Untraceable(f"a cast of {stored} to {source.dtype}, and then to {dtype}")
            return Traced(source.shape, dtype, source.tiles)
        if func is _aten._local_scalar_dense.default:
            part = self._part_of(source)
            return torch.ones((), dtype=source.dtype).item() if part is None else part.item()
        return func(*args, **kwargs)


class _WithoutWrites(TorchDispatchMode):
    """Nothing is written to tensors that were there before: those of a live engine must stay as they are while its loader is recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: dict[int, torch.UntypedStorage] = {}  # keeps storages alive: no address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = list(written_tensors(func, args, kwargs))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        is_live = any(storage_key(one) not in self._own for one in written)
        if is_live and not any(isinstance(one, Traced) for one in given):
            if not gives_one_tensor(func):
                raise Untraceable(f"{func} writes to a tensor of the engine")
            return written[0]
        result = func(*args, **kwargs)
        if not written:
            before = {storage_key(one) for one in given}
            for made in tree_leaves(result):
                if isinstance(made, torch.Tensor) and storage_key(made) not in before:
                    self._own[storage_key(made)] = made.untyped_storage()
        return result
