"""Exports of live models: every rank writes the elements that it owns, with adapters merged if asked."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..catalog.records import Chunk, StoredTensor
from ..checkpoint.snapshot import Live, Piece, boxes_on
from ..checkpoint.take import InParts, StagingBuffer, boxes_from, live_piece
from ..dtypes import code_of, itemsize, torch_dtype
from ..engine.engine import Destination, Filler, Staging, wanted_box, write_back
from ..errors import CheckpointError, StateError
from ..format.slices import SliceTensor, assign_owners, owner_ranks
from ..host import copies_late
from ..internals.diffusers import STEM, is_diffusers_model
from ..internals.peft import active_adapters, adapted_model, has_adapters, lora_layers, places
from ..internals.transformers import ignored_on_save, is_transformers_model
from ..models.homes import ADAPTERS_NAME, asset_files, with_dtype
from ..models.layers import blocks_in
from ..models.meta import default_device
from ..names import Named, NamedTensor, canonical_name
from ..objects import frozen
from ..planning.hub_rules import WrappedNames, meta_instance, wrapped_names
from ..planning.match import Origin, Recipe, castable, recall
from ..planning.plan import IOOptions, transfers_of
from ..ranks.ranks import Ranks, device_where_ranks_sum
from ..tensors.boxes import Box, TensorSpec, Wanted, boxes_of_range, whole
from ..tensors.live import LiveModel, wanted_of
from ..tensors.tiles import Loop, Tile, cut, identity
from .write import (
    HubFiles,
    HubTensors,
    Job,
    Share,
    adapter_assets,
    as_named,
    by_hub,
    chosen_adapters,
    inverted,
    lay_out_adapters,
    reverted,
)

# ----------------------------------------------------------------------------------------------------
# Export of tensors on devices: cast there, and copied through a small ring while the files are written.

#: Bytes of a tensor that are cast at a time.
_PART_BYTES = 8 * 1024**2


def write_from_devices(
    tensors: Sequence[tuple[Live, Sequence[Tile]]],
    output: HubFiles,
    filler: Filler,
    staging: Staging,
    rank: int,
) -> None:
    """Write this rank's boxes of tensors, each by its tiles. Memory: two parts of 8 MiB, pinned; one on the device."""
    buffer = StagingBuffer()
    if not tensors:
        return
    buffer.reserve(2 * _PART_BYTES, pinned=any(copies_late(live.tensor.device) for live, _ in tensors))

    def cast() -> Iterator[torch.Tensor]:
        for live, tiles in tensors:
            dtype = torch_dtype(_dtype(tiles, output))
            for _, part in _parts(live, rank):
                if part.dtype != dtype:
                    part = part.to(dtype)
                    buffer.order()
                yield part

    copying = buffer.copying(cast())
    for live, tiles in tensors:
        t, dtype = live.stored, _dtype(tiles, output)
        for held, _ in _parts(live, rank):
            for box, part in boxes_from(lambda: buffer.pull(copying), held, dtype):
                wanted, source = wanted_box(t.name, dtype, t.shape, box), Destination({t.name: part})
                for tile in tiles:
                    write_back(transfers_of(tile, wanted, output.tensors), filler, source, staging)


def _dtype(tiles: Sequence[Tile], output: HubFiles) -> str:
    """The dtype in the files: a tensor's hub tensors all have the same."""
    return output.tensors[tiles[0].source].dtype


def _parts(live: Live, rank: int, part_bytes: int = _PART_BYTES) -> Iterator[tuple[Box, torch.Tensor]]:
    """A rank's boxes of a tensor, in parts."""
    in_parts = InParts(live_piece, part_bytes)
    for held in boxes_on(live.stored, rank):
        yield from in_parts.parts_of(Piece(live, held))


# ----------------------------------------------------------------------------------------------------
# Export of a live model: every rank writes the elements that it owns.


def owned_by(rank: int, live: LiveModel, tensors: Mapping[str, torch.Tensor]) -> list[SliceTensor]:
    """What a rank brings elements of: among replicas one rank does, chosen as in a save. Rank-local."""
    spread = live.geometries
    held = [
        SliceTensor(n, code_of(t.dtype), spread[n].whole_shape(t.shape), spread[n])
        for n, t in tensors.items()
    ]
    return [t for t in assign_owners(held) if rank in owner_ranks(t.geometry, t.owner)]


def _origin(live: LiveModel) -> Origin | None:
    """What a model was loaded from, if an export gives that back. A diffusers model is written under its own names, as by ``save_pretrained``."""
    return None if is_diffusers_model(live.base) else recall(live.root)


def _by_class(live: LiveModel, specs: Mapping[str, TensorSpec]) -> HubTensors:
    """The tensors of a model's base under the names by which its class saves them."""
    return reverted(meta_instance(live.base), specs) if is_transformers_model(live.base) else as_named(specs)


class LiveJob(Job):
    """Export of a live model, or of its adapters: every rank writes the boxes that it owns."""

    def __init__(self, live: LiveModel, io: IOOptions, adapters: str | Sequence[str] | None = None) -> None:
        super().__init__(io)
        self.live = live
        self._peft = adapted_model(live.root)
        self._adapters = chosen_adapters(self._peft, adapters) if self._peft is not None else []
        self.stem = STEM if is_diffusers_model(live.base) else "model"
        ignored = ignored_on_save(live.unwrapped)
        self._named = {t.name: t for t in live.stored if t.name not in ignored}
        self._made: Mapping[str, _Made] = {}
        self._local = Destination(live.local_tensors())

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Dtype and shape of each tensor."""
        made = self._made
        return {n: made[n].spec if n in made else self.live.spec(t) for n, t in self._named.items()}

    def named(self) -> Iterable[Named]:
        """The names of each tensor: its own, then those of ties."""
        return self.live.stored

    def copies(self, contents: HubTensors, stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tile]]:
        """Tiles of tied tensors in further copies of the source; by tensor."""
        origin = recall(self.live.root)
        for name, recipe in origin.recipes.items() if origin is not None else ():
            yield from ((name, tile) for copy in recipe.copies for tile in copy)

    def lay_out(
        self, dtype: str | None, max_shard_bytes: int, variant: str | None = None
    ) -> tuple[HubTensors, HubFiles]:
        if self._adapters:
            if variant is not None:
                raise ValueError("variant= names the files of a model; adapters are written without one")
            return lay_out_adapters(self.live, self._adapters, dtype)
        return super().lay_out(dtype, max_shard_bytes, variant)

    def contents(self) -> HubTensors:
        """Hub tensors and tiles of the whole model. Raises :class:`CheckpointError` if it has adapters."""
        if has_adapters(self.live.root):
            raise CheckpointError(
                "adapters were injected into this model, which is not a PeftModel: it can't be exported in Hugging Face format. Wrap it with "
                "peft.get_peft_model(), and export_hf writes the adapters"
            )
        origin = _origin(self.live)
        if origin is not None:
            return inverted(self.specs, origin.recipes, origin.shapes)
        return _by_class(self.live, self.specs)

    def shares(self, contents: HubTensors, ranks: Ranks) -> list[Share]:
        held = {n: t.tensor for n, t in self._named.items()}
        owned = ((t, contents.tiles.get(t.name, ())) for t in owned_by(ranks.rank, self.live, held))
        return [
            (wanted_of(t.name, self._named[t.name].tensor, t.geometry), tiles) for t, tiles in owned if tiles
        ]

    def whole(self, wanted: Wanted) -> Destination:
        """The elements of a share, where they are."""
        return self._local

    def elements(
        self, wanted: Wanted, tiles: Sequence[Tile]
    ) -> Iterable[tuple[Wanted, Destination, Sequence[Tile]]]:
        return ((wanted, self._local, tiles),)

    def write(self, contents: HubTensors, output: HubFiles, filler: Filler, ranks: Ranks) -> None:
        on_devices: list[tuple[Live, Sequence[Tile]]] = []
        on_host: list[Share] = []
        for wanted, tiles in self.shares(contents, ranks):
            named = self._named[wanted.name]
            tensor = named.tensor
            if tensor.device.type == "cpu" or wanted.name in self._made:
                on_host.append((wanted, tiles))
                continue
            t = SliceTensor(wanted.name, *self.live.spec(named), self.live.geometries[wanted.name])
            on_devices.append((Live(t, tensor), tiles))
        self.put(on_host, output, filler)
        write_from_devices(on_devices, output, filler, self.staging, ranks.rank)

    def assets(self) -> Mapping[str, bytes]:
        if self._adapters:
            return adapter_assets(self._peft, self._adapters)
        return asset_files(self.live.root)


# ----------------------------------------------------------------------------------------------------
# Full tensors of a sharded model, a bucket at a time.
#
# Each rank copies its elements into a zeroed full tensor, by the tiles of an export; an integer all-reduce combines them
# bit-exactly. This works for any layout, with uneven and empty shards, and holds nothing twice.

FullTensors = Generator[tuple[str, torch.Tensor], None, None]


@frozen
class Full:
    """A full tensor, and the elements that this rank contributes."""

    stored: StoredTensor
    parts: tuple[tuple[Wanted, Tile], ...]


def planned(live: LiveModel, contents: HubTensors, dtype: str | None, rank: int) -> list[Full]:
    """Each full tensor with the elements that ``rank`` contributes. Among replicas one rank contributes, chosen as in an export."""
    named = {t.name: t for t in live.stored if t.name in contents.tiles}
    unfilled = [name for name, t in named.items() if t.tensor.is_meta]
    if unfilled:
        raise StateError(f"{len(unfilled)} tensors are on meta, e.g. {unfilled[0]!r}; load the model first")
    owned = owned_by(rank, live, {n: t.tensor for n, t in named.items()})
    brought = by_hub(
        (wanted_of(t.name, named[t.name].tensor, t.geometry), contents.tiles[t.name]) for t in owned
    )
    full = []
    for name, (code, shape) in contents.hub.items():
        given = dtype if dtype is not None and castable(code, dtype) else code
        stored = StoredTensor(name, given, shape, (Chunk(whole(shape), name, 0),))
        full.append(Full(stored, tuple(brought.get(name, ()))))
    return full


def buckets(full: Sequence[Full], bucket_bytes: int) -> Iterator[list[Full]]:
    """The tensors in order, in buckets of as many as fit; a tensor larger than a bucket is alone."""
    bucket: list[Full] = []
    used = 0
    for one in full:
        if bucket and used + one.stored.nbytes > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(one)
        used += one.stored.nbytes
    if bucket:
        yield bucket


def gathered(
    live: LiveModel,
    buckets: Iterator[list[Full]],
    devices: tuple[torch.device, torch.device],
    ranks: Ranks,
) -> FullTensors:
    """The full tensors, in order. Every rank must iterate in step. ``devices``: where ranks add, and where tensors are given."""
    sums_on, given_on = devices
    parts = Destination(live.local_tensors())
    for bucket in buckets:
        # A generator's variables live as long as the caller holds it: no variable may keep a tensor.
        ready = _gather(bucket, parts, sums_on, ranks)
        while ready:
            yield _first(ready, given_on)


def _first(ready: deque[tuple[str, torch.Tensor]], device: torch.device) -> tuple[str, torch.Tensor]:
    name, tensor = ready.popleft()
    return name, tensor.to(device)


@torch.no_grad()
def _gather(
    bucket: Sequence[Full], parts: Destination, device: torch.device, ranks: Ranks
) -> deque[tuple[str, torch.Tensor]]:
    """The full tensors of a bucket. Every rank must call it; no rank enters a collective until all have their part."""
    with ranks.agree("gather full tensors"):
        words = [torch.zeros(-(-one.stored.nbytes // 8), dtype=torch.int64, device=device) for one in bucket]
        views = [
            own.view(torch_dtype(one.stored.dtype))[: math.prod(one.stored.shape)].view(one.stored.shape)
            for own, one in zip(words, bucket, strict=True)
        ]
        for view, one in zip(views, bucket, strict=True):
            _fill(view, one, parts)
            ranks.tick(one.stored.nbytes)
    if ranks.world_size > 1:
        for work in [dist.all_reduce(own, async_op=True) for own in words if own.numel()]:
            work.wait()
    return deque((one.stored.name, view) for one, view in zip(bucket, views, strict=True))


def _fill(full: torch.Tensor, one: Full, parts: Destination) -> None:
    """Copy this rank's elements into a full tensor, with a cast if its dtype differs."""
    stored: Mapping[str, StoredTensor] = {one.stored.name: one.stored}
    for wanted, tile in one.parts:
        for transfer in transfers_of(tile, wanted, stored):
            sizes = [loop.size for loop in transfer.loops]
            strides = [loop.source_stride for loop in transfer.loops]
            first = transfer.offset_bytes // itemsize(one.stored.dtype)
            full.as_strided(sizes, strides, first).copy_(parts.strided(transfer))


def device_of(live: LiveModel) -> torch.device:
    """Where full tensors are given: the device of the model's mesh, or of a model without one itself."""
    tensors = [t.tensor for t in live.tensors]
    if any(isinstance(t, DTensor) for t in tensors) or not tensors:
        return default_device(live.parameters)
    return tensors[0].device


# ----------------------------------------------------------------------------------------------------
# Export of a base model with its active adapters merged, and of a model that holds 4-bit codes, decoded.
#
# Every rank makes the weights of its own shards, a few MiB at a time: it decodes its codes, or takes its elements, and adds what
# PEFT's ``merge`` adds to them. Only the adapters are gathered.


@frozen
class _Delta:
    """What one adapter adds to a weight: ``(B @ A) * scaling``, or the transpose of it."""

    a: str
    b: str
    """Names of the two factors in the model."""
    scaling: float
    is_transposed: bool
    is_rounded: bool
    """To the weight's dtype before it is added: PEFT does so for embeddings, and not for linear layers."""

    def of(self, box: Box, factors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """Of a box of the weight. As ``get_delta_weight`` of PEFT 0.21: on CPUs in fp32, rounded to the factors' dtype."""
        (first, second), (last_first, last_second) = box.start, box.stop
        if self.is_transposed:
            first, last_first, second, last_second = second, last_second, first, last_first
        b, a = factors[self.b][first:last_first].to(device), factors[self.a][:, second:last_second].to(device)
        dtype = b.dtype
        if device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
            a, b = a.float(), b.float()
        made = b @ a
        return ((made.t() if self.is_transposed else made) * self.scaling).to(dtype)


@frozen
class _Made:
    """A weight that is not written as the model holds it."""

    held: NamedTensor
    """What the model holds: a weight, or blocks of codes."""
    spec: TensorSpec
    """Of the weight as it is written."""
    layer: Any | None
    """The layer with 4-bit codes; None for a plain weight."""
    deltas: tuple[_Delta, ...]

    def boxes(self, box: Box) -> list[Box]:
        """Boxes of the weight that a box of what the model holds stands for, in the order of its elements."""
        if self.layer is None:
            return [box]
        start, stop = self.layer.blocks.elements(box)
        return list(boxes_of_range(start, stop, self.spec.shape))

    def values(self, box: Box, held: torch.Tensor) -> list[torch.Tensor]:
        """The elements of :meth:`boxes`, on the device of ``held``, unmerged."""
        if self.layer is None:
            return [held.clone()]
        parts = self.boxes(box)
        flat = self.layer.blocks.decoded(held, box.start[0], box.stop[0]).split([p.numel for p in parts])
        return [one.view(part.sizes) for one, part in zip(flat, parts, strict=True)]


class MergedJob(LiveJob):
    """Export of a base with adapters merged, or of codes, decoded: some weights are not written as the model holds them."""

    def __init__(self, live: LiveModel, io: IOOptions, *, merge: bool) -> None:
        """Raises :class:`CheckpointError` naming every part of the model that has no merged form."""
        super().__init__(live, io)
        self._adapters = []
        self._names = wrapped_names(live)
        self._factors: dict[str, torch.Tensor] = {}
        self._rank = 0
        ignored = ignored_on_save(live.base)
        if merge:
            _refuse_tied_copies(live, self._names)
        of_base = _of_the_base(live, self._names, merge)
        self._named = {t.name: t for base, t in of_base if base not in ignored}
        self._made = {one.held.name: one for one in _made(live, self._named, merge)}

    def prepare(self, ranks: Ranks) -> None:
        """Gather the factors of the adapters onto every rank's host memory."""
        self._rank = ranks.rank
        wanted = {name for one in self._made.values() for d in one.deltas for name in (d.a, d.b)}
        with ranks.agree("plan merged export") as claim:
            contents = as_named({t.name: self.live.spec(t) for t in self.live.stored if t.name in wanted})
            full = planned(self.live, contents, None, ranks.rank)
            claim.alike([[f.stored.name, list(f.stored.shape)] for f in full])
            sums_on = (
                device_where_ranks_sum(device_of(self.live)) if ranks.world_size > 1 else torch.device("cpu")
            )
        found = gathered(self.live, buckets(full, 64 * 1024**2), (sums_on, torch.device("cpu")), ranks)
        self._factors = dict(found)

    def contents(self) -> HubTensors:
        specs = self.specs
        origin = _origin(self.live)
        if origin is not None:
            recipes, shapes = dict(origin.recipes), dict(origin.shapes)
            for name, one in self._made.items():
                if one.layer is not None and name in recipes:
                    source = recipes[name].tiles[0].source
                    recipes[name] = Recipe(name, (_stored_as(source, one),))
                    shapes[source] = one.spec.shape[::-1] if one.layer.is_transposed else one.spec.shape
            return inverted(specs, recipes, shapes)
        bases = {self._names.bases[t.name]: t.name for t in self._named.values()}
        own = {base: specs[name] for base, name in bases.items()}
        if any(one.layer is not None and one.layer.is_transposed for one in self._made.values()):
            raise CheckpointError(
                "GPT-2's layers in 4 bits can be exported only from a model that load_pretrained loaded"
            )
        found = _by_class(self.live, own)
        return HubTensors(found.hub, {bases[base]: tiles for base, tiles in found.tiles.items()})

    def share_bytes(self, contents: HubTensors, output: HubFiles, ranks: Ranks) -> int:
        return output.total_bytes // ranks.world_size

    @torch.no_grad()
    def elements(
        self, wanted: Wanted, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Wanted, Destination, Sequence[Tile]]]:
        """Of a made weight, a few MiB at a time. Parts that the tiles leave out are not decoded; each call decodes the others again."""
        one = self._made.get(wanted.name)
        if one is None:
            yield from super().elements(wanted, tiles)
            return
        tensor = one.held.tensor
        t = SliceTensor(wanted.name, *self.live.spec(one.held), self.live.geometries[wanted.name])
        part_bytes = _PART_BYTES // (4 if one.layer is not None else 1)
        for box, held in _parts(Live(t, tensor), self._rank, part_bytes):
            if one.layer is not None and box.sizes[1] != t.shape[1]:
                raise CheckpointError(
                    f"{t.name}: its blocks of codes are cut between ranks; shard it by dim 0"
                )
            parts = one.boxes(box)
            of_parts = [[x for x in tiles if any(True for _ in cut(x, "target", part))] for part in parts]
            if not any(of_parts):
                continue
            for part, values, some in zip(parts, one.values(box, held), of_parts, strict=True):
                if not some:
                    continue
                for delta in one.deltas:
                    added = delta.of(part, self._factors, values.device)
                    values.add_(added.to(values.dtype) if delta.is_rounded else added)
                made = Destination({t.name: values.cpu().contiguous()})
                yield wanted_box(t.name, *one.spec, part), made, some

    def assets(self) -> Mapping[str, bytes]:
        """Those of the base. Its config says nothing of a quantization: its weights are plain."""
        found = asset_files(self.live.base)
        found.pop(ADAPTERS_NAME, None)  # which are merged, or of which this is the base
        if "config.json" in found:
            config = json.loads(found["config.json"])
            config.pop("quantization_config", None)
            sizes: Counter[str] = Counter()
            for spec in self.specs.values():
                if torch_dtype(spec.dtype).is_floating_point:
                    sizes[spec.dtype] += math.prod(spec.shape)
            if sizes:
                most = torch_dtype(max(sizes, key=lambda d: sizes[d]))
                config = with_dtype(config, str(most).removeprefix("torch."))
            found["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
        return found


def _of_the_base(live: LiveModel, names: WrappedNames, merge: bool) -> Iterator[tuple[str, NamedTensor]]:
    """The tensors of the base by their names in it; with ``merge``, an active adapter's trained copies instead of their originals."""
    held = {name: t for t in live.stored for name in t.names}
    slots = places(live.root)
    active = set(_active(live)) if merge else set()
    found = {base: held[name] for base, name in names.originals.items() if name in held}
    for name, base in names.bases.items():
        if slots[name.rpartition(".")[0]].copy_of in active and name in held:
            found[base] = held[name]
    yield from found.items()


def _refuse_tied_copies(live: LiveModel, names: WrappedNames) -> None:
    """Raises :class:`CheckpointError` for a trained copy of one of two tied tensors: merged, they differ, and the config ties them."""
    slots, active = places(live.root), _active(live)
    tied = [
        f"{own} (tied with {', '.join(others)})"
        for name, (own, *others) in names.copies.items()
        if others and slots[name.rpartition(".")[0]].copy_of in active
    ]
    if tied:
        raise CheckpointError(
            f"modules_to_save trains a copy of {', '.join(tied)}: merged, the two would differ, and the model ties them. Export the "
            f"adapter alone; or train with tie_word_embeddings=False in config="
        )


def _active(live: LiveModel) -> list[str]:
    peft = adapted_model(live.root)
    return [] if peft is None else active_adapters(peft)


def _made(live: LiveModel, stored: Mapping[str, NamedTensor], merge: bool) -> Iterator[_Made]:
    """The weights that are decoded, merged, or both. Raises :class:`CheckpointError` with everything that can't be."""
    layers = {canonical_name(f"{path}.weight"): layer for path, layer in blocks_in(live.root).items()}
    deltas: dict[str, list[_Delta]] = {}
    problems: list[str] = []
    if merge:
        _merge(live, stored, deltas, problems)
    if problems:
        raise CheckpointError("adapters that can't be merged in shards: " + "; ".join(problems[:5]))
    for name, t in stored.items():
        layer = layers.get(name)
        if layer is None and name not in deltas:
            continue
        spec = live.spec(t) if layer is None else TensorSpec(layer.blocks.dtype, layer.blocks.shape)
        yield _Made(t, spec, layer, tuple(deltas.get(name, ())))


def _merge(
    live: LiveModel, stored: Mapping[str, NamedTensor], deltas: dict[str, list[_Delta]], problems: list[str]
) -> None:
    active = _active(live)
    first = live.first_names
    for path, layer in lora_layers(live.root):
        for adapter in active:
            linear, embedding = adapter in layer.lora_A, adapter in layer.lora_embedding_A
            if not (linear or embedding):
                continue
            name = first.get(f"{path}.base_layer.weight", "")
            reason = _obstacle(layer, adapter, stored.get(name))
            if reason is not None:
                problems.append(f"{path}: {reason}")
                continue
            end = ".weight" if linear else ""
            kind = "lora" if linear else "lora_embedding"
            deltas.setdefault(name, []).append(
                _Delta(
                    first[f"{path}.{kind}_A.{adapter}{end}"],
                    first[f"{path}.{kind}_B.{adapter}{end}"],
                    float(layer.scaling[adapter]),
                    embedding or bool(layer.fan_in_fan_out),
                    embedding,
                )
            )


def _obstacle(layer: Any, adapter: str, weight: NamedTensor | None) -> str | None:
    """Why a layer's adapter can't be merged in shards; None if it can."""
    if layer.merged:
        return "is merged already; call unmerge_adapter() first"
    if layer.lora_variant.get(adapter) is not None:
        return f"{type(layer.lora_variant[adapter]).__name__} needs complete weights (DoRA, for example)"
    if layer.lora_bias.get(adapter):
        return "lora_bias=True is not supported"
    if weight is None or weight.tensor.dim() != 2:
        return f"{type(layer).__name__} adapts no matrix; only linear layers and embeddings are merged"
    if len(weight.names) > 1:
        return f"its weight is tied ({', '.join(weight.names)}), and would differ from its twin"
    return None


def _stored_as(source: str, one: _Made) -> Tile:
    """The tile of a weight in its stored tensor: itself, or its transpose."""
    rows, columns = one.spec.shape
    if not one.layer.is_transposed:  # type: ignore[union-attr]
        return identity(source, one.spec.shape)
    return Tile(source, (Loop(rows, 1, 1, 0, 1), Loop(columns, 0, 1, 1, 1)), (0, 0), (0, 0))
