"""``declare_part``: what each rank holds of a model that is spread over ranks by modules: pipeline stages, local experts.

Ranks tell each other once what they hold. From then on :func:`.describe` gives the whole model on every rank: its own tensors under
their names in the whole model, and stand-ins without elements for those of other ranks.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..dtypes import code_of, torch_dtype
from ..errors import LayoutError
from ..internals.fsdp import fsdp_parameter_ids
from ..names import NamedTensor, merged_order, unwrap
from ..objects import frozen
from ..ranks.ranks import Ranks
from ..tensors.live import DECLARED, LiveModel, absent, describe
from ..tensors.placements import Cut, Geometry, geometry_of, one_of_equals, replicated

#: The shape of a whole tensor, and the index in it of this rank's first element.
Place = tuple[Sequence[int], Sequence[int]]

_SHOWN = 10


def declare_part(
    model: nn.Module,
    *,
    rename: Callable[[str], str] | None = None,
    boxes: Mapping[str, Place] | None = None,
) -> None:
    """Declare that ``model`` is this rank's part of one model: a pipeline stage, or a model with this rank's own experts.

    From then on ``load``, ``save``, ``restore``, ``Checkpointer``, ``export_hf``, ``digest``, and ``iter_full_tensors`` treat the parts of all ranks as
    one model. Each tensor has one name and one global shape, whichever ranks hold it, so a checkpoint can be resumed with
    other stages, other experts per rank, or in one piece. Changes nothing in the model.

    Tensors with the same name on several ranks are one tensor: either all of them hold all of it (data parallelism, a tied embedding of the
    first and last stage), and their contents are compared when the model is saved, or each holds the box that ``boxes`` says. DTensors
    (FSDP2, tensor parallelism) are sharded over their own mesh, which must be inside the part.

    Every rank must call it, after sharding and before the model is loaded, saved, or restored; again after anything that changes dtypes, shapes,
    placements, meshes, names, or ``requires_grad``. Ranks exchange names and shapes, a few hundred bytes per tensor. No tensor is read or allocated.

    Args:
        model: the module that is also given to ``TrainState``, ``load``, and ``export_hf``. A rank with several stages gives
            ``nn.ModuleList(stages)``, and ``rename`` strips the number.
        rename: from a tensor's name in this module to its name in the whole model. None: the names are those of the whole model, as they are in the stages of
            torch.distributed.pipelining and of torchtitan.
        boxes: ``fnmatch`` pattern of names in the whole model → global shape, and the index of this rank's first element. For tensors whose
            live tensor (or DTensor) is only a part: packed experts, cut along dim 0. The parts of all ranks must have one
            size and tile the tensor.

    Raises :class:`LayoutError` on every rank, with everything that contradicts: a hole, boxes that overlap, are outside of the tensor, or have different
    sizes; shapes, dtypes, or kinds that differ between ranks; two tensors with one name; a pattern without a tensor; a mesh that isn't inside
    the part.
    """
    DECLARED.pop(unwrap(model), None)
    ranks = Ranks.current()
    part: _Part

    def told() -> str:
        nonlocal part
        part = _Part.of(describe(model), rename or (lambda name: name), boxes or {})
        held = [asdict(one) for one in part.held.values()]
        return json.dumps({"held": held, "problems": part.problems, "patterns": part.patterns})

    found = ranks.combine("declare parts", told, _joined)
    entries = [_Entry.read(one) for one in found["entries"]]
    if found["problems"]:
        problems = found["problems"]
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        shown = "\n".join(f"  - {problem}" for problem in problems[:_SHOWN])
        raise LayoutError(f"the parts of {ranks.world_size} ranks don't make up one model:\n{shown}{more}")
    DECLARED[unwrap(model)] = _Whole(part, tuple(entries)).on_this_rank


@frozen
class _Unit:
    """The ranks that hold one box together, and how they share it."""

    ranks: tuple[int, ...]
    axis_sizes: tuple[int, ...] = ()
    axis_names: tuple[str, ...] = ()
    cuts: tuple[Cut, ...] = ()
    fsdp_order: bool = True


@frozen
class _Held:
    """What a rank tells of one tensor."""

    name: str
    aliases: tuple[str, ...]
    kind: str
    requires_grad: bool
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    """The box of its unit."""
    unit: _Unit

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> _Held:
        """From the JSON of :func:`declare_part`."""
        cuts = tuple(Cut(**cut) for cut in found["unit"]["cuts"])
        return cls(**{**_tuples(found), "unit": _Unit(**{**_tuples(found["unit"]), "cuts": cuts})})


def _tuples(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


@frozen
class _Entry:
    """One tensor of the whole model."""

    name: str
    aliases: tuple[str, ...]
    kind: Any
    requires_grad: bool
    dtype: str
    shape: tuple[int, ...]
    geometry: Geometry

    def to_json(self) -> list[Any]:
        g = self.geometry
        cuts = [[c.kind, c.dim, c.split_factor] for c in g.cuts]
        spread = [list(g.axis_sizes), list(g.axis_names), cuts, list(g.ranks), g.fsdp_order, list(g.parts)]
        return [
            self.name,
            list(self.aliases),
            self.kind,
            self.requires_grad,
            self.dtype,
            list(self.shape),
            spread,
        ]

    @classmethod
    def read(cls, found: Sequence[Any]) -> _Entry:
        name, aliases, kind, requires_grad, dtype, shape, (sizes, names, cuts, ranks, order, parts) = found
        geometry = Geometry(
            tuple(sizes), tuple(names), tuple(Cut(*c) for c in cuts), tuple(ranks), order, tuple(parts)
        )
        return cls(name, tuple(aliases), kind, requires_grad, dtype, tuple(shape), one_of_equals(geometry))


@frozen
class _Part:
    """This rank's part, as it declares it."""

    names: Mapping[str, str]
    """From each tensor's name in this module to its name in the whole model."""
    held: Mapping[str, _Held]
    """By name in the whole model."""
    seen: Mapping[str, _Seen]
    """What must not change until the next declaration, by name."""
    problems: Sequence[str]
    """What this rank alone can see."""
    patterns: Mapping[str, bool]
    """Those of boxes, and whether a tensor of this part has such a name."""

    @classmethod
    def of(cls, live: LiveModel, rename: Callable[[str], str], boxes: Mapping[str, Place]) -> _Part:
        managed, rank = fsdp_parameter_ids(live.fsdp_modules), Ranks.current().rank
        world = Ranks.current().world_size
        held: dict[str, _Held] = {}
        problems, matched = [], set()
        names = {n: rename(n) for t in live.tensors for n in t.names}
        for local, whole in names.items():
            if not isinstance(whole, str):
                problems.append(f"rank {rank}: rename= gives {whole!r} for {local!r}, expected text")
                names[local] = local
        for t in live.stored:
            own = tuple(dict.fromkeys(names[n] for n in t.names))
            name = own[0]
            if name in held:
                problems.append(f"rank {rank}: rename= gives two tensors the name {name!r}")
            sizes = tuple(t.tensor.shape)
            patterns = [p for p in boxes if any(fnmatchcase(n, p) for n in own)]
            matched.update(patterns)
            shape, start = boxes[patterns[0]] if patterns else (sizes, (0,) * len(sizes))
            shape, start = tuple(map(int, shape)), tuple(map(int, start))
            if any(list(map(tuple, boxes[p])) != [shape, start] for p in patterns):
                problems.append(
                    f"rank {rank}: {name}: several patterns of boxes= match it and differ: {patterns}"
                )
            if not len(shape) == len(start) == len(sizes):
                problems.append(
                    f"rank {rank}: {name}: the box has {len(shape)} dims and starts at {len(start)} indices, the tensor has "
                    f"{len(sizes)} dims"
                )
                continue
            if any(a < 0 or a + n > whole for a, n, whole in zip(start, sizes, shape, strict=True)):
                problems.append(
                    f"rank {rank}: {name}: the box from {list(start)} of sizes {list(sizes)} is not inside the global shape {list(shape)}"
                )
                continue
            unit = _unit_of(t.tensor, world, rank, is_managed=id(t.tensor) in managed)
            held[name] = _Held(
                name,
                own[1:],
                t.kind,
                t.tensor.requires_grad,
                code_of(t.tensor.dtype),
                shape,
                start,
                sizes,
                unit,
            )
        seen = {names[t.name]: _Seen.of(t.tensor) for t in live.stored}
        return cls(names, held, seen, problems, {p: p in matched for p in boxes})


@frozen
class _Seen:
    """What must not change of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    placements: str = ""
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Seen:
        found = cls(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
        if not isinstance(tensor, DTensor):
            return found
        return replace(found, placements=str(tensor.placements), mesh=tensor.device_mesh)

    @property
    def text(self) -> str:
        spread = (
            "a plain tensor"
            if self.mesh is None
            else f"placements {self.placements} on ranks {self.mesh.mesh.tolist()}"
        )
        return f"{self.dtype} {list(self.shape)}, requires_grad {self.requires_grad}, {spread}"


def _unit_of(tensor: torch.Tensor, world: int, rank: int, *, is_managed: bool) -> _Unit:
    if not isinstance(tensor, DTensor):
        return _Unit((rank,))
    mesh, found = tensor.device_mesh, geometry_of(tensor, world_size=world, fsdp_order=is_managed)
    sizes, n = tuple(mesh.mesh.shape), mesh.ndim
    return _Unit(
        tuple(mesh.mesh.flatten().tolist()), sizes, found.axis_names[-n:], found.cuts[-n:], found.fsdp_order
    )


# ----------------------------------------------------------------------------------------------------
# Rank 0 joins what all ranks tell. Pure.


def _joined(told: Sequence[str]) -> dict[str, Any]:
    """The whole model's tensors, and everything that contradicts."""
    of_ranks = [json.loads(text) for text in told]
    found = [problem for part in of_ranks for problem in part["problems"]]
    matched = {p for part in of_ranks for p, is_matched in part["patterns"].items() if is_matched}
    for pattern in dict.fromkeys(p for part in of_ranks for p in part["patterns"] if p not in matched):
        found.append(f"boxes={{{pattern!r}: …}} matches no tensor of any rank")
    if found:
        return {"entries": [], "problems": found}
    every = [[_Held.read(one) for one in part["held"]] for part in of_ranks]
    by_name: dict[str, dict[int, _Held]] = defaultdict(dict)
    for rank, part in enumerate(every):
        for one in part:
            by_name[one.name][rank] = one
    order = merged_order([[one.name for one in part] for part in every])
    entries, problems = [], []
    for name in order:
        held = by_name[name]
        aliases = tuple(dict.fromkeys(a for one in held.values() for a in one.aliases))
        problems += [
            f"{alias} is another name of {name} on rank {min(held)}, and a tensor of its own on rank {min(by_name[alias])}; "
            f"give both one name there (rename=)"
            for alias in aliases
            if alias in by_name
        ]
        (_, first), *_ = held.items()
        unlike = _unlike(name, held)
        try:
            geometry = None if unlike else _spread(first.shape, held, len(every))
        except LayoutError as error:
            unlike = [f"{name}: {error}"]
        problems += unlike
        if not unlike and geometry is not None:
            entry = _Entry(name, aliases, first.kind, first.requires_grad, first.dtype, first.shape, geometry)
            entries.append(entry.to_json())
    return {"entries": entries, "problems": problems}


def _unlike(name: str, of_ranks: Mapping[int, _Held]) -> list[str]:
    found = []
    for what in ("kind", "dtype", "shape", "requires_grad"):
        values: dict[Any, int] = {}
        for rank, one in of_ranks.items():
            values.setdefault(getattr(one, what), rank)
        if len(values) > 1:
            label = "global shape" if what == "shape" else what
            texts = [f"{list(v) if isinstance(v, tuple) else v} on rank {rank}" for v, rank in values.items()]
            found.append(f"{name}: its {label} is {', '.join(texts[:3])}")
    return found


def _spread(shape: tuple[int, ...], of_ranks: Mapping[int, _Held], world: int) -> Geometry:
    """How the boxes of all ranks make up a tensor. Raises :class:`LayoutError` for what doesn't."""
    units: dict[tuple[int, ...], _Held] = {}
    for rank, one in of_ranks.items():
        other = units.setdefault(one.unit.ranks, one)
        if (other.start, other.sizes) != (one.start, one.sizes):
            raise LayoutError(
                f"a DTensor whose mesh has ranks {list(one.unit.ranks)}, which declare different boxes: {_box(other)}, and {_box(one)} on "
                f"rank {rank}. Its mesh must be inside one part"
            )
    members = [rank for ranks in units for rank in ranks]
    if sorted(members) != sorted(of_ranks):
        raise LayoutError(
            f"a DTensor over the ranks {sorted(set(members))}, but ranks {sorted(of_ranks)} hold it: a mesh must be inside one part"
        )
    (_, first), *others = units.items()
    for ranks, one in others:
        if one.sizes != first.sizes:
            raise LayoutError(
                f"boxes of different sizes: {_box(first)} on rank {first.unit.ranks[0]}, {_box(one)} on rank {ranks[0]}"
            )
        if replace(one.unit, ranks=()) != replace(first.unit, ranks=()):
            raise LayoutError(
                f"it is sharded one way on rank {first.unit.ranks[0]}, and another on rank {ranks[0]}"
            )
    # Empty tensors have no parts.
    parts = tuple(whole // n if n else 1 for whole, n in zip(shape, first.sizes, strict=True))
    if any(n * k != whole for n, k, whole in zip(first.sizes, parts, shape, strict=True)):
        raise LayoutError(f"boxes of sizes {list(first.sizes)} can't tile the global shape {list(shape)}")
    grid: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for ranks, one in units.items():
        if any(n and a % n for a, n in zip(one.start, one.sizes, strict=True)):
            raise LayoutError(
                f"the box {_box(one)} on rank {ranks[0]} overlaps others: expected multiples of {list(one.sizes)}"
            )
        at = tuple(a // n if n else 0 for a, n in zip(one.start, one.sizes, strict=True))
        grid.setdefault(at, []).append(ranks)
    places = list(product(*map(range, parts)))
    if holes := [at for at in places if at not in grid]:
        start = [i * n for i, n in zip(holes[0], first.sizes, strict=True)]
        raise LayoutError(
            f"no rank holds the box from {start} of sizes {list(first.sizes)}"
            + (f", nor {len(holes) - 1} others" if len(holes) > 1 else "")
            + f", of the global shape {list(shape)}"
        )
    counts = {len(found) for found in grid.values()}
    if len(counts) > 1:
        few, many = (pick(grid.items(), key=lambda g: len(g[1])) for pick in (min, max))
        raise LayoutError(
            f"{len(many[1])} copies of one box, on ranks {sorted(r for u in many[1] for r in u)}, but {len(few[1])} of another, on ranks "
            f"{sorted(r for u in few[1] for r in u)}"
        )
    return _geometry(first.unit, parts, places, grid, counts.pop(), world)


def _geometry(
    unit: _Unit,
    parts: tuple[int, ...],
    places: Sequence[tuple[int, ...]],
    grid: Mapping[tuple[int, ...], list[tuple[int, ...]]],
    copies: int,
    world: int,
) -> Geometry:
    """Copies, then the unit's mesh, then the grid of boxes: the grid cuts a dim before the mesh does."""
    cut_dims = [dim for dim, n in enumerate(parts) if n > 1]
    # The grid is read in FSDP2's order, which gives such a cut another meaning.
    if cut_dims and not unit.fsdp_order and any(cut.kind == "strided" for cut in unit.cuts):
        raise LayoutError("a box whose own mesh cuts it in blocks (_StridedShard): not supported")
    own = []
    for cut in unit.cuts:
        if cut.kind != "replicate" and parts[cut.dim] > 1:
            own.append(Cut("strided", cut.dim, cut.split_factor * parts[cut.dim]))
        else:
            own.append(cut)
    ranks = [
        grid[place][copy][member]
        for copy in range(copies)
        for member in range(math.prod(unit.axis_sizes))
        for place in places
    ]
    if not cut_dims and not unit.cuts and sorted(ranks) == list(range(world)):
        return replicated(world)
    axes: list[tuple[int, str, Cut]] = []
    if copies > 1 or not (unit.cuts or cut_dims):
        axes.append((copies, "copies", Cut("replicate")))
    axes += zip(unit.axis_sizes, unit.axis_names, own, strict=True)
    axes += [
        (parts[dim], "parts" if len(cut_dims) == 1 else f"parts{dim}", Cut("shard", dim)) for dim in cut_dims
    ]
    sizes, names, cuts = (tuple(one) for one in zip(*axes, strict=True))
    order = unit.fsdp_order or bool(cut_dims)
    return Geometry(sizes, names, cuts, tuple(ranks), order, parts if cut_dims else ())


def _box(one: _Held) -> str:
    return f"from {list(one.start)} of sizes {list(one.sizes)}"


# ----------------------------------------------------------------------------------------------------


@frozen
class _Whole:
    """The whole model, as all ranks know it."""

    part: _Part
    entries: tuple[_Entry, ...]

    def on_this_rank(self, live: LiveModel) -> LiveModel:
        """The whole model's description, from that of this rank's module.

        Raises :class:`LayoutError` if the module isn't what was declared.
        """
        part = self.part

        def named(local: str) -> str:
            return part.names.get(local, local)

        own = {named(t.name): t for t in live.stored}
        now = {name: _Seen.of(t.tensor) for name, t in own.items()}
        if changed := [n for n in {**part.seen, **now} if part.seen.get(n) != now.get(n)]:
            name = changed[0]
            was, is_now = part.seen.get(name), now.get(name)
            raise LayoutError(
                f"{len(changed)} tensors have changed since declare_part: {name} was {was.text if was else 'not there'}, and is "
                f"{is_now.text if is_now else 'gone'}. Call declare_part again, on every rank"
            )
        kind = next((t.tensor.device.type for t in live.stored if not t.tensor.is_meta), "cpu")
        tensors = [_entry_on(e, own.get(e.name), kind) for e in self.entries]
        # Each rank makes those again that no state_dict has.
        tensors += [
            replace(t, name=named(t.name), aliases=tuple(map(named, t.aliases)))
            for t in live.tensors
            if not t.persistent
        ]
        geometries = {e.name: e.geometry for e in self.entries}
        return replace(live, tensors=tuple(tensors), _geometries=geometries)


def _entry_on(entry: _Entry, own: NamedTensor | None, device_type: str) -> NamedTensor:
    if own is not None:
        return replace(own, name=entry.name, aliases=entry.aliases)
    return NamedTensor(
        name=entry.name,
        aliases=entry.aliases,
        kind=entry.kind,
        persistent=True,
        tensor=absent(
            entry.shape, entry.geometry, torch_dtype(entry.dtype), device_type, entry.requires_grad
        ),
        owners=(),
    )
