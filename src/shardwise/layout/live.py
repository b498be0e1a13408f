"""A live model described once: what an entry point finds out about it first, and hands down to all that it calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field, replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..internals.peft import base_of
from ..internals.torch import original_class
from ..names import NamedTensor, modules_by_path, tensors_of, unwrap
from ..objects import frozen
from .model import fsdp1_problem, geometries_of, layout_of, local_tensor, reshard
from .placements import Geometry
from .wanted import Layout

__all__ = ["LiveModel", "describe"]


@frozen(kw_only=True, eq=False)
class LiveModel:
    """A model as :func:`describe` found it.

    Names, ties, kinds, placements and FSDP2's groups stay true while shardwise works on the model. What gives meta tensors
    memory replaces buffers: :meth:`refreshed` then gives the description with the tensors of now, without a walk. What runs
    the program's own code (a model's ``load_state_dict``) may change anything, and the caller describes the model again.
    """

    root: nn.Module
    """What the caller gave."""
    unwrapped: nn.Module
    """Inside wrappers around the root: what its class and origin are looked up by."""
    base: nn.Module
    """Inside PEFT's wrapper, too: the model that names of stored tensors are about."""
    tensors: tuple[NamedTensor, ...]
    """Every distinct parameter and buffer, in module order; FSDP2's as shards."""
    modules: tuple[tuple[str, nn.Module], ...]
    """Every module with its path, in order; one that stands twice is there twice."""
    fsdp_modules: tuple[FSDPModule, ...]
    """The modules that ``fully_shard`` was applied to."""
    fsdp1_problem: str | None
    """Why the model can be neither filled nor stored, where FSDP1 wraps a part of it."""
    _geometries: dict[str, Geometry] = field(default_factory=dict, repr=False)

    @property
    def kind(self) -> type[nn.Module]:
        """The class of the base, before ``fully_shard`` swapped it."""
        return original_class(self.base)

    @property
    def stored(self) -> tuple[NamedTensor, ...]:
        """What a load fills and a save stores: parameters and persistent buffers."""
        return tuple([t for t in self.tensors if t.persistent])

    @property
    def parameters(self) -> tuple[NamedTensor, ...]:
        """The parameters alone."""
        return tuple([t for t in self.tensors if t.kind == "parameter"])

    @property
    def first_names(self) -> Mapping[str, str]:
        """The first name of each tensor, which shardwise uses, by each of its names: a tied tensor has several."""
        return {alias: t.name for t in self.tensors for alias in t.names}

    @property
    def geometries(self) -> Mapping[str, Geometry]:
        """How each of :attr:`stored` is spread over ranks. Worked out once, when it is first asked for.

        Raises :class:`LayoutError` for placements that are not supported.
        """
        if not self._geometries:
            self._geometries.update(geometries_of(self.fsdp_modules, self.stored))
        return self._geometries

    def layout(self, *, rank: int | None = None) -> Layout:
        """What a load has to fill on this rank, or on another one: see :func:`.model.layout_of`."""
        return layout_of(self.stored, self.geometries, rank=rank)

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """The part of each of :attr:`stored` that lies on this rank now: FSDP2 may have padded it since."""
        return {t.name: local_tensor(t.tensor) for t in self.stored}

    def without(self, names: Collection[str]) -> LiveModel:
        """The same description without some of its tensors."""
        return replace(self, tensors=tuple([t for t in self.tensors if t.name not in names]))

    def refreshed(self) -> LiveModel:
        """The same description with the tensor objects that the modules hold now."""
        return replace(self, tensors=tuple([t.refreshed() for t in self.tensors]))


def describe(model: nn.Module) -> LiveModel:
    """Describe a model; walks its tree once. Puts FSDP2's gathered parameters back to shards first. Rank-local.

    Reads structure only: no payload, no collectives; works on meta and on sharded models.

    Raises :class:`LayoutError` if two different tensors have one name.
    """
    modules = tuple(modules_by_path(model))
    return LiveModel(
        root=model,
        unwrapped=unwrap(model),
        base=base_of(model),
        modules=modules,
        fsdp_modules=reshard(module for _, module in modules),
        tensors=tensors_of(modules),
        fsdp1_problem=fsdp1_problem(modules),
    )
