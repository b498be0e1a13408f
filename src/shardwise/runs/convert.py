"""``convert``: writes a stored run (or model) of any program as a shardwise checkpoint, streaming reads into writes.

It uses the writer of every save, which asks for the pieces of each tensor; each piece is read when it is asked for.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle

import torch

from ..catalog.checkpoint import directory, packed_name
from ..catalog.records import StoredTensor
from ..checkpoint.save import publish_collected
from ..checkpoint.snapshot import (
    Live,
    ModelPart,
    OptimizerPart,
    Piece,
    Snapshot,
    layout_hash,
    own_parts,
)
from ..checkpoint.take import Collected, InParts, Lineage, live_piece
from ..dtypes import code_of, torch_dtype
from ..engine.engine import ConvertingReader, Staging, read_recipe, wanted_box
from ..engine.files import page_cache_for
from ..engine.objects import SourceReader
from ..errors import IntegrityError
from ..format.header import STEP_NAME
from ..format.manifest import CONVERTED, Manifest
from ..format.slices import SliceTensor, StateKey, assign_owners
from ..models.classes import import_code, in_turn
from ..names import NamedTensor
from ..objects import frozen
from ..operations.operation import announced, this_operation
from ..operations.printed import Printed
from ..planning.match import Recipe
from ..planning.plan import IOOptions
from ..publish.places import target_of
from ..ranks.ranks import Ranks
from ..state.optimizer import Drained
from ..storage import absolute
from ..storage.records import is_url
from ..tensors.placements import Cut, Geometry, replicated
from ..tensors.tiles import identity
from .run import StoredModel, StoredOptimizerState, StoredRun, describe_run, home_of_run

#: Bytes read, hashed and written at a time.
_PIECE_BYTES = 8 * 1024**2


@frozen
class ConvertReport(Printed):
    """The result of a conversion on this rank."""

    path: str
    source: str
    source_kind: str
    step: int
    tensors: int
    optimizer_tensors: int
    documents: tuple[str, ...]
    skipped: tuple[str, ...]
    """State in the source that the checkpoint doesn't contain. Also mentions it if the source doesn't record a step."""
    bytes_read: int
    """Bytes that this rank read."""
    bytes_written: int
    """Bytes that this rank wrote, including headers."""
    seconds: float
    caveats: tuple[str, ...] = ()
    """Assumptions that the conversion made: how an optimizer's parameter numbers were mapped to names."""


@announced("convert", "source", "out")
def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    io: IOOptions | None = None,
) -> ConvertReport:
    """Convert the run or model at ``source`` into one checkpoint directory at ``out``, completely or not at all.

    Args:
        source: a path or a URL: a DCP checkpoint (Accelerate, the HF Trainer, torchtitan, transformers, torch), FSDP's full state or
            another ``torch.save`` file, safetensors, or a shardwise checkpoint. Stored optimizers, schedulers and scalers
            are converted; RNG states and the data position aren't. An optimizer that numbers its parameters can be
            converted if the model has a config, and the numbers match the order of its parameters or the HF Trainer's groups; ``caveats``
            then mentions this.
        out: a path or a URL that must not exist. Name it ``step-%08d``, with its step's number, so that a Checkpointer finds it. If the source
            doesn't record a step, the number in this name is used, or 0; ``skipped`` then mentions this.
        config: directory with the model's config.json (and tokenizer and custom code), if the source has none. Without a config, tensors keep
            their names, and missing tensors can't be detected.
        trust_remote_code: run the Python files in the config's directory.
        io: staging memory and time limits.

    Every rank of the default process group must call it. Each tensor is split evenly along dim 0; each rank reads and writes its own
    part. Memory: ``io.staging_bytes`` plus 8 MiB. Tensors from a shardwise checkpoint are checked against their recorded digests. Raises
    :class:`SourceError`, :class:`PlanError` or :class:`StateError` before anything is written, :class:`CheckpointError` if
    ``out`` exists or is named after a different step, and :class:`RankError` on every rank.
    """
    started = time.perf_counter()
    io = io or IOOptions()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    final = absolute(out)
    root = absolute(source) if is_url(os.fspath(source)) else os.fspath(source)
    home, given = None, None if config is None else os.fspath(config)
    if trust_remote_code:
        with ranks.agree("find the config"):
            home = home_of_run(root, given, with_code=True)
        in_turn(ranks, lambda: import_code(home or root))
    with ranks.agree("plan the conversion") as claim:
        home = home or home_of_run(root, given, with_code=False)
        named = STEP_NAME.fullmatch(os.path.basename(final))
        step = int(named[1]) if named else 0
        run = describe_run(root, home, step=step, trust_remote_code=trust_remote_code, io=io)
        snapshot, made_of = _snapshot(run, ranks.world_size)
        own = own_parts(snapshot, ranks.rank)
        catalogs = [m.catalog for m in run.models.values()] + [o.catalog for o in run.optimizers.values()]
        files = list(dict.fromkeys(file for catalog in catalogs for file in catalog.files))
        claim.alike([layout_hash(snapshot), [[f.path, f.version] for f in files if f.version is not None]])
    run_id = run.run_id or ranks.on_first("run id", lambda: secrets.token_hex(8))
    collected = Collected(
        snapshot=snapshot,
        shared=run.documents,
        local={},
        assets={
            f"{directory('model', name)}/{file}": content
            for name, model in run.models.items()
            for file, content in model.assets.items()
        },
        step=run.step,
        lineage=Lineage(run_id, run.parent_step),
        seed=run.seed,
        software={**run.software, CONVERTED: run.kind},
        hub_tensors={n: m.hub_tensors for n, m in run.models.items() if m.hub_tensors is not None},
        own=own,
    )
    this_operation(final)  # counts what is written
    with SourceReader(ranks.tick, files=files, io=io, page_cache=page_cache_for(io, ())) as reader:
        contents = InParts(_reading(run, made_of, reader, Staging(io)), _PIECE_BYTES)
        written = publish_collected(
            collected, target_of(final), ranks, contents, lambda made: _compare_digests(run, made)
        )
    return ConvertReport(
        path=final,
        source=root,
        source_kind=run.kind,
        step=run.step,
        tensors=sum(len(m.specs) for m in run.models.values()),
        optimizer_tensors=sum(
            len(s) for o in run.optimizers.values() for by in (o.spread, o.scalars) for s in by.values()
        ),
        documents=tuple(sorted(run.documents)),
        skipped=run.skipped,
        bytes_read=reader.bytes_read,
        bytes_written=written,
        seconds=time.perf_counter() - started,
        caveats=run.caveats,
    )


def _compare_digests(run: StoredRun, made: Manifest) -> None:
    """Compare with the digests that the source recorded, before anything is published."""
    wrong = [
        f"{name}" if len(run.models) == 1 else f"{model} {name}"
        for model, contents in run.models.items()
        for name, digest in contents.catalog.digests.items()
        if made.models[model][name].digest != digest
    ]
    if wrong:
        raise IntegrityError(
            f"content of {len(wrong)} tensors differs from what was saved: {', '.join(wrong[:20])}; nothing was "
            f"converted. Run 'shardwise verify' on the source",
            path=next(iter(run.models.values())).catalog.root,
        )


# ----------------------------------------------------------------------------------------------------
# Writing


#: By id of a tensor on meta: how its content is made, and the stored tensors that the recipe names.
_MadeOf = dict[int, tuple[Recipe, Mapping[str, StoredTensor]]]


def _snapshot(run: StoredRun, world_size: int) -> tuple[Snapshot, _MadeOf]:
    """The state to write, on meta, and what each of its tensors is made of."""
    geometry_of, made_of = _spread(world_size), _MadeOf()
    models = tuple(_model_part(name, m, geometry_of, made_of) for name, m in run.models.items())
    by_name = {part.name: part for part in models}
    optimizers = tuple(
        _optimizer_part(name, o, by_name[o.model], world_size, made_of) for name, o in run.optimizers.items()
    )
    return Snapshot(models, optimizers, run.documents, frozenset(), frozenset(), ()), made_of


def _spread(world_size: int) -> Callable[[Sequence[int]], Geometry]:
    """Gives a tensor of some shape to ranks: all of them write equal rows; with too few rows one rank writes, in turn."""
    everyone = tuple(range(world_size))
    even = Geometry((world_size,), ("ranks",), (Cut("shard", 0),), everyone)
    single = cycle([Geometry((1,), ("ranks",), (Cut("replicate"),), (rank,)) for rank in everyone])

    def geometry_of(shape: Sequence[int]) -> Geometry:
        return even if world_size > 1 and shape and shape[0] >= world_size else next(single)

    return geometry_of


def _meta(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch_dtype(dtype), device="meta")


def _model_part(
    name: str, model: StoredModel, geometry_of: Callable[[Sequence[int]], Geometry], made_of: _MadeOf
) -> ModelPart:
    named, live = [], []
    for tensor, (dtype, shape) in model.specs.items():
        stand_in = _meta(dtype, shape)
        made_of[id(stand_in)] = model.recipes[tensor], model.catalog.tensors
        aliases, geometry = model.aliases.get(tensor, ()), geometry_of(shape)
        named.append(
            NamedTensor(
                name=tensor,
                aliases=aliases,
                kind="buffer" if tensor in model.buffers else "parameter",
                persistent=True,
                tensor=stand_in,
                owners=(),
            )
        )
        live.append(Live(SliceTensor(tensor, dtype, shape, geometry), stand_in))
        for alias in model.stored_aliases.get(tensor, ()):
            copy = SliceTensor(alias, dtype, shape, geometry)
            live.append(Live(copy, stand_in, counted=False))
    return ModelPart(name, tuple(named), tuple(live), model.stored_aliases)


def _optimizer_part(
    name: str, optimizer: StoredOptimizerState, model: ModelPart, world_size: int, made_of: _MadeOf
) -> OptimizerPart:
    geometries = {v.stored.name: v.stored.geometry for v in model.live}
    drained, live = Drained(), []
    for owner, states in optimizer.spread.items():
        for key, stored in states.items():
            stand_in = _meta(stored.dtype, stored.shape)
            recipe = Recipe(stored.name, (identity(stored.name, stored.shape),))
            made_of[id(stand_in)] = recipe, optimizer.catalog.tensors
            drained.tensors.setdefault(owner, {})[key] = stand_in
            full = SliceTensor(StateKey(owner, key).name, stored.dtype, stored.shape, geometries[owner])
            live.append(Live(full, stand_in))
    scalars: dict[str, list[torch.Tensor]] = {}
    for owner, values in optimizer.scalars.items():
        for key, value in values.items():
            pack = scalars.setdefault(f"{key}.{code_of(value.dtype)}", [])
            drained.packed_index.setdefault(owner, {})[key] = (f"{key}.{code_of(value.dtype)}", len(pack))
            pack.append(value)
    drained.packed = {key: torch.stack(pack) for key, pack in scalars.items()}
    everywhere = replicated(world_size)
    packs = [
        SliceTensor(packed_name(k), code_of(t.dtype), tuple(t.shape), everywhere)
        for k, t in drained.packed.items()
    ]
    live += [Live(t, drained.packed[k]) for t, k in zip(assign_owners(packs), drained.packed, strict=True)]
    return OptimizerPart(name, model.name, tuple(live), drained)


# ----------------------------------------------------------------------------------------------------
# Reading


def _reading(
    run: StoredRun, made_of: _MadeOf, files: SourceReader, staging: Staging
) -> Callable[[Piece], torch.Tensor]:
    """A function that reads a piece when the writer asks for it. It raises :class:`PlanError` if a second stored copy differs."""
    models = run.models.values()
    conversions = {path: host for model in models for path, host in model.conversions.items()}
    sources = {
        n: m.catalog.tensors[n] for m in models for host in m.conversions.values() for n in host.sources
    }
    reader = ConvertingReader(files, conversions, sources)
    room = Staging(IOOptions(staging_bytes=_PIECE_BYTES), _PIECE_BYTES)

    def tensor_of(piece: Piece) -> torch.Tensor:
        made = made_of.get(id(piece.live.tensor))
        if made is None:
            return live_piece(piece)
        t = piece.live.stored
        wanted = wanted_box(t.name, t.dtype, t.shape, piece.held.box)
        return read_recipe(wanted, *made, reader, staging, room)

    return tensor_of
