"""The matrix products that oneDNN compiles on the CPU, and the memory of their code.

oneDNN (3.12 in torch 2.13) compiles a product for its exact shapes, and keeps the last 1,024 (``ONEDNN_PRIMITIVE_CACHE_CAPACITY``).
In fp32, torch calls MKL instead, which compiles nothing, and keeps its workspaces. A dense layer has one product in the forward and two in the backward; experts
have these for each number of tokens that the router gives to one of them, because ``grouped_mm`` on the CPU is one product for each expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..objects import frozen
from .groups import StepGroup
from .training import TrainingSpec

__all__ = [
    "COMPILED_BYTES",
    "COMPILED_UPPER_BYTES",
    "Product",
    "Products",
    "product_of",
    "products_of",
    "workspaces_of",
]

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


def _setting(model: Any, names: Sequence[str], default: int) -> int:
    """The first of these numbers that the config of the model's text has."""
    settings = getattr(model, "config", None)
    if settings is not None and hasattr(settings, "get_text_config"):
        settings = settings.get_text_config()
    return next((n for n in (getattr(settings, name, None) for name in names) if isinstance(n, int)), default)
