"""What a training step consists of: FSDP2's groups, compiled products, and the events of a forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..objects import frozen
from ..sharding.fsdp import ShardPolicy, find_wrapping
from .records import TrainingSpec


@frozen
class Event:
    """Something that happened in a forward or backward, and the memory of activations around it."""

    kind: str
    """``enter`` and ``exit``: the forward of a group. ``back``: its backward begins. ``grad``: a gradient of it is whole.
    ``done``: the gradient of its input is. ``loss``: the forward is over. ``end``: the backward is."""
    group: int
    nbytes: int
    """Of the gradient."""
    live: int
    """Bytes of activations now, without parameters and whole gradients."""
    peak: int
    """The most bytes of them since the event before."""
    products: int = 0
    """Different dense products in two bytes an element that ran until now."""


@frozen(eq=False)
class StepGroup:
    """A group of parameters that FSDP2 gathers together, with the sizes of its buffers."""

    index: int
    path: str
    kind: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    gathered_bytes: int
    """The gathered parameters, padded, in the dtype of the forward: what FSDP2 allocates once for the all-gather, and once
    more for the parameters that it copies out."""
    cast_bytes: int
    """This rank's part of them, if it has to be cast before the all-gather; else 0."""
    reduced_bytes: int
    """Input of the reduce-scatter: padded gradients in the dtype of the reduction."""
    gradient_bytes: int
    """This rank's part of the gradients, padded, in the dtype of the parameters."""
    last_gradient_bytes: int
    """The whole gradient of its last trained parameter: FSDP2 holds it until the group's reduction is over."""
    is_reduced_apart: bool
    """Whether the reduction has another dtype than the parameters: its output is cast."""
    own_shards: int | None = None
    """Ranks over which FSDP2 cuts this group; None: those of the step. Experts under expert parallelism have their own."""


def groups_of(
    model: nn.Module, policy: ShardPolicy, shards: int, expert_shards: int | None = None
) -> tuple[StepGroup, ...]:
    """The groups that ``shard`` makes of an unsharded model over ``shards`` ranks, the root last.

    ``expert_shards``: the ranks over which FSDP2 cuts experts; None: ``shards``.
    """
    precision = policy.mixed_precision
    compute = precision.param_dtype if precision is not None else None
    reduce = precision.reduce_dtype if precision is not None else None
    found, of_all = [], shards
    for index, (candidate, parameters) in enumerate(find_wrapping(model, policy).groups):
        is_apart = candidate.kind == "experts" and expert_shards not in (None, of_all)
        shards = expert_shards if is_apart and expert_shards else of_all
        dtypes = {
            id(p): compute if compute is not None and p.is_floating_point() else p.dtype for p in parameters
        }
        padded = {id(p): _padded(p, policy, shards) for p in parameters}
        trained = [p for p in parameters if p.requires_grad]
        reduced = [(padded[id(p)], reduce or dtypes[id(p)]) for p in trained]
        found.append(
            StepGroup(
                index=index,
                path=candidate.path,
                kind=candidate.kind,
                module=candidate.module,
                parameters=tuple(parameters),
                gathered_bytes=sum(padded[id(p)] * dtypes[id(p)].itemsize for p in parameters),
                cast_bytes=sum(
                    padded[id(p)] * dtypes[id(p)].itemsize // shards
                    for p in parameters
                    if dtypes[id(p)] != p.dtype
                ),
                reduced_bytes=sum(numel * dtype.itemsize for numel, dtype in reduced),
                gradient_bytes=sum(padded[id(p)] // shards * p.dtype.itemsize for p in trained),
                last_gradient_bytes=trained[-1].numel() * dtypes[id(trained[-1])].itemsize if trained else 0,
                is_reduced_apart=any(
                    dtype != p.dtype for p, (_, dtype) in zip(trained, reduced, strict=True)
                ),
                own_shards=shards if is_apart else None,
            )
        )
    return tuple(found)


def _padded(parameter: nn.Parameter, policy: ShardPolicy, shards: int) -> int:
    """Elements over all ranks with FSDP2's padding: each rank holds as much as the first."""
    shape: Sequence[int] = parameter.shape
    placed = policy.placement(parameter) if policy.placement is not None else None
    dim = 0 if placed is None else placed.dim
    return math.prod((*shape[:dim], -(-shape[dim] // shards) * shards, *shape[dim + 1 :]))


# ----------------------------------------------------------------------------------------------------
# The matrix products that oneDNN compiles on the CPU, and the memory of their code.
#
# oneDNN (3.12 in torch 2.13) compiles a product for its exact shapes, and keeps the last 1,024 (``ONEDNN_PRIMITIVE_CACHE_CAPACITY``).
# In fp32, torch calls MKL instead, which compiles nothing, and keeps its workspaces. A dense layer has one product in the forward and two in the backward; experts
# have these for each number of tokens that the router gives to one of them, because ``grouped_mm`` on the CPU is one product for each expert.

_CACHED = 1024
#: Of one product's code, measured for sizes of 256 to 4,096: 0.54 to 0.58 MiB with AVX512-BF16; 0.04 to 0.07 with AVX512 alone. In a run of
#: 1,024 products of experts 0.55 each.
COMPILED_BYTES, COMPILED_UPPER_BYTES = int(0.55 * 1024**2), int(0.625 * 1024**2)


@frozen
class Products:
    """The products of a model that run in two bytes an element."""

    dense: int
    """Products that are no experts'. Layers of the same shape share one."""
    shapes: int
    """Of experts, for each number of tokens: forward, gradient of the input, gradient of the weight; for each matrix."""
    forward_shapes: int
    """Of these, the forward's."""
    layers: int
    """With experts."""
    experts: int
    """Of a layer."""
    tokens: int
    """That an expert may get: those of a rank in one forward, or of all ranks that send to it."""
    tokens_of_expert: float
    """On average."""

    def so_far(self, dense: int, forwards: int, backwards: int) -> int:
        """Compiled products after ``dense`` different dense ones, and these layers' forwards and backwards."""
        found = float(dense)
        for layers, shapes in (
            (forwards, self.forward_shapes),
            (backwards, self.shapes - self.forward_shapes),
        ):
            if layers and shapes:
                found += shapes * self._distinct(layers * self.experts)
        return min(_CACHED, round(found))

    def after_one_step(self) -> int:
        """Compiled products that a first step leaves."""
        return self.so_far(self.dense, self.layers, self.layers)

    def after_many_steps(self) -> int:
        """Compiled products after many steps: as many as are kept, unless there are fewer numbers of tokens."""
        return min(_CACHED, self.dense + self.shapes * self.tokens)

    def _distinct(self, experts: int) -> float:
        """How many different numbers of tokens so many experts get. Two with as many tokens share their code.

        How evenly a router spreads tokens depends on its weights and on the text. Nothing of it is known but the mean: the share of tokens that
        go to an expert is taken as a beta distribution with Jeffreys' parameter of 1/2, as of one of ``tokens / tokens_of_expert`` outcomes,
        and their number as binomial with that share. No expert gets a token twice.
        """
        tokens, ratio = self.tokens, self.tokens / self.tokens_of_expert
        if ratio <= 1:  # every expert gets all
            return 1.0
        a, b = 0.5, 0.5 * (ratio - 1)
        log = math.lgamma(tokens + b) + math.lgamma(a + b) - math.lgamma(b) - math.lgamma(tokens + a + b)
        share, found = math.exp(log), 0.0
        for number in range(tokens):
            share *= (tokens - number) * (number + a) / ((number + 1) * (tokens - number - 1 + b))
            found += 1 - (1 - share) ** experts
            if found > _CACHED:  # no more are kept
                break
        return min(found, experts)


_OPERATIONS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
)
#: torch computes smaller products itself (``mkldnn_gemm_min_size``).
_LEAST_MULTIPLICATIONS = 16**3


@frozen
class Product:
    """A matrix product: those that are equal share their code. ``rows`` x ``inner`` times ``inner`` x ``columns``."""

    operation: Any
    layouts: tuple[Any, ...]
    rows: int
    inner: int
    columns: int
    itemsize: int


def product_of(func: Any, args: Sequence[Any]) -> Product | None:
    """The product that an operation computes by oneDNN or MKL. None for all else."""
    if func not in _OPERATIONS:
        return None
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    one, other = tensors[-2:]
    if one.numel() * other.shape[-1] <= _LEAST_MULTIPLICATIONS:
        return None
    layouts = tuple((tuple(t.shape), t.stride()) for t in tensors)
    rows, inner = one.shape[-2:]
    return Product(func, layouts, rows, inner, other.shape[-1], one.dtype.itemsize)


#: MKL 2024's blocks of an fp32 product in one thread, with AVX512 on Intel's CPUs: found from what it kept after 57 products of 19 shapes.
_BLOCK, _MOST_COLUMNS = 384, 9984


def workspaces_of(products: Iterable[Product]) -> int:
    """Bytes of the workspaces that MKL keeps after fp32 products, in the order in which they run.

    A product of more than 384 rows copies a block of each matrix. MKL keeps each workspace for later products, and makes another one for a
    product that needs more.
    """
    largest = total = 0
    for product in products:
        if product.rows <= _BLOCK:
            continue
        inner = product.inner
        inner = _BLOCK if inner >= 2 * _BLOCK else -(-inner // 2) if inner > _BLOCK else inner
        nbytes = 4 * inner * (min(product.columns, _MOST_COLUMNS) + _BLOCK)
        if nbytes > largest:
            largest, total = nbytes, total + nbytes
    return total


def products_of(
    model: nn.Module,
    groups: Sequence[StepGroup],
    compute: torch.dtype | None,
    training: TrainingSpec,
    dense: int = 0,
) -> Products | None:
    """The products of ``model``, ``dense`` of them no experts'; None if none runs in two bytes an element."""
    matrices = [
        p
        for g in groups
        if g.kind == "experts"
        for p in g.parameters
        if p.ndim == 3 and (compute or p.dtype).itemsize == 2
    ]
    if not matrices:
        return Products(dense, 0, 0, 0, 0, 0, 0.0) if dense else None
    shapes = {(tuple(p.shape), p.requires_grad) for p in matrices}
    layers = sum(g.kind == "experts" and any(p.ndim == 3 for p in g.parameters) for g in groups)
    each = max(p.shape[0] for p in matrices)
    tokens = training.batch_size * training.sequence_length
    senders = max(1, _setting(model, _EXPERTS, each) // each)  # with expert parallelism
    return Products(
        dense=dense,
        shapes=sum(2 + is_trained for _, is_trained in shapes),
        forward_shapes=len(shapes),
        layers=layers,
        experts=each,
        tokens=tokens * senders,
        tokens_of_expert=tokens * _setting(model, _OF_EACH_TOKEN, 1) / each,
    )


#: As configs of transformers name them: experts of a layer, and those that a token goes to.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OF_EACH_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k")


def text_config(model: Any) -> Any:
    """The config of the model's text; None without one."""
    found: Any = getattr(model, "config", None)
    return found.get_text_config() if hasattr(found, "get_text_config") else found


def _setting(model: Any, names: Sequence[str], default: int) -> int:
    """The first of these numbers that the config of the model's text has."""
    settings = text_config(model)
    return next((n for n in (getattr(settings, name, None) for name in names) if isinstance(n, int)), default)


# ----------------------------------------------------------------------------------------------------
# The events of a step of the whole model, from those of a run in which one of many blocks that are alike ran.


@frozen
class _Block:
    """What a block that ran did: its events, with memory relative to its beginning."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    kept_bytes: int
    """What its forward leaves for its backward."""


def whole_step(
    events: Sequence[Event], groups: Sequence[StepGroup], first: Mapping[int, int]
) -> Iterator[Event]:
    """``events`` with those of the blocks that were passed over. ``first``: see :func:`.alike`."""
    inside = {  # the block, and the groups in it
        block: frozenset(g.index for g in groups if f"{g.path}.".startswith(f"{groups[block].path}."))
        for block in first
    }
    ran = {i: _block(events, i, inside[i]) for i, rep in first.items() if i == rep}
    by_path = {(g.path, g.kind): g.index for g in groups}

    def as_in(event: Event, rep: int, block: int, base: int) -> Event:
        group = event.group
        if group >= 0:
            path = groups[block].path + groups[group].path[len(groups[rep].path) :]
            group = by_path.get((path, groups[group].kind), block)
        return replace(event, group=group, live=event.live + base, peak=event.peak + base)

    kept, in_forward, passed = 0, True, set()
    for event in events:
        event = replace(event, live=event.live + kept, peak=event.peak + kept)
        block = event.group
        yield event
        in_forward = in_forward and event.kind != "loss"
        rep = first.get(block, block)
        if rep == block or rep not in ran or block < 0:
            continue
        if event.kind == "enter" and in_forward:
            yield from (as_in(e, rep, block, event.live) for e in ran[rep].forward)
            kept += ran[rep].kept_bytes
            passed.add(block)
        elif event.kind == "back" and block in passed:
            yield from (as_in(e, rep, block, event.live) for e in ran[rep].backward)
            kept -= ran[rep].kept_bytes


def _block(events: Sequence[Event], block: int, inside: frozenset[int]) -> _Block:
    kinds = [(e.kind, e.group) for e in events]
    if ("enter", block) not in kinds or ("exit", block) not in kinds:
        return _Block((), (), 0)
    start, stop = kinds.index(("enter", block)), kinds.index(("exit", block))
    forward = _relative(events[start + 1 : stop], events[start].live)
    # The peak up to the exit belongs to the forward of the block: it comes as an event of no group.
    last = replace(events[stop], kind="inside", group=-1)
    kept = events[stop].live - events[start].live
    backward: tuple[Event, ...] = ()
    if ("back", block) in kinds:
        begin = kinds.index(("back", block))
        # What comes after the gradient of the block's input is none of the block's: the embedding's gradient, for one.
        end = next(
            i
            for i in range(begin + 1, len(events))
            if kinds[i] in (("end", -1), ("done", block))
            or (kinds[i][0] == "back" and kinds[i][1] not in inside)
        )
        until = replace(events[end], kind="inside", group=-1)
        # The block's output is the next one's input: its backward begins with that one's end, which is not its own.
        own = [
            e if e.group in inside else replace(e, kind="inside", group=-1) for e in events[begin + 1 : end]
        ]
        backward = _relative([*own, until], events[begin].live)
    return _Block((*forward, *_relative([last], events[start].live)), backward, kept)


def _relative(events: Sequence[Event], base: int) -> tuple[Event, ...]:
    return tuple(replace(e, live=e.live - base, peak=e.peak - base) for e in events)
