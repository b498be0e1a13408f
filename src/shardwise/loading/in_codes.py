"""The source of a model that holds codes: its weights as blocks, kept as they are stored or quantized while they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..catalog import Catalog
from ..catalog.records import Coded
from ..errors import PlanError
from ..names import canonical_name
from ..quantized.blocks4 import encoded, joined
from ..recipe.match import Made, Rules, as_stored
from ..recipe.tiles import is_identity

__all__ = ["in_codes"]

_PLAIN = frozenset({"F16", "BF16", "F32"})


def in_codes(catalog: Catalog, rules: Rules, layers: Mapping[str, Any]) -> tuple[Catalog, Rules]:
    """Catalog and rules for a model whose ``layers`` (:class:`.ShardedLinear4bit`, by path) hold blocks. Pure.

    Raises :class:`PlanError` with every weight that can't be had as blocks.
    """
    weights = {f"{path}.weight": layer for path, layer in layers.items()}
    coded: dict[str, Coded] = {}
    made: list[Made] = []
    problems: list[str] = []
    for one in rules.resolve(catalog.tensors):
        layer = weights.get(one.target) or weights.get(canonical_name(one.target))
        if layer is None:
            made.append(one)
            continue
        found = _as_blocks(one, layer, catalog)
        if isinstance(found, str):
            problems.append(f"{one.target!r}: {found}")
        elif found is None:
            made.append(one)
        else:
            coded[found.path] = found
            made.append(as_stored(found.tensor, one.target))
    if problems:
        raise PlanError(
            f"{catalog.root}: {len(problems)} weights can't be taken as 4-bit codes", tuple(problems)
        )
    kept = {path: one for path, one in catalog.coded.items() if one.tensor.name not in _names(coded)}
    tensors = {**catalog.tensors, **{one.tensor.name: one.tensor for one in coded.values()}}
    catalog = replace(catalog, tensors=tensors, coded={**kept, **coded})
    return catalog, replace(rules, resolve=lambda _: made)


def _names(coded: Mapping[str, Coded]) -> set[str]:
    return {one.tensor.name for one in coded.values()}


def _as_blocks(made: Made, layer: Any, catalog: Catalog) -> Coded | str | None:
    """A layer's weight in blocks; None if it is stored so already (in a checkpoint), or the reason why it can't be had."""
    blocks = layer.blocks
    if (made.dtype, made.shape) == ("U8", blocks.stored_shape):
        return None
    stored = catalog.tensors[made.sources[0]]
    shape = blocks.shape[::-1] if layer.is_transposed else blocks.shape
    if len(made.sources) > 1 or len(made.tiles) != 1 or not is_identity(made.tiles[0], stored.shape):
        return f"is made from {len(made.sources)} stored tensors by a conversion; leave it out by llm_int8_skip_modules"
    one = catalog.coded.get(stored.chunks[0].path) if stored.chunks else None
    if one is not None:
        found = joined(one, blocks.dtype)
        if found is None or found[0] != blocks:
            got = (
                one.rule.format
                if found is None
                else f"{found[0].quant_type.upper()} {list(found[0].shape)} in blocks of {found[0].block}"
            )
            return f"is stored as {got}; the model expects {blocks.quant_type.upper()} {list(blocks.shape)} in blocks of {blocks.block}"
        return found[1]
    if stored.shape != shape or stored.dtype not in _PLAIN:
        return f"is stored as {stored.dtype} {list(stored.shape)}; expected floating point {list(shape)}"
    return encoded(stored, blocks, is_transposed=layer.is_transposed)
