"""The source of a model whose layers hold its codes and scales as they are stored: checked, and noted for reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..catalog import Catalog
from ..dtypes import code_of, torch_dtype
from ..errors import PlanError, ShardError
from ..models.kept import kept_in
from ..names import canonical_name
from ..quantized.dequantized import dequantized
from ..recipe.match import Made, Rules
from ..sharding.fsdp import ShardPolicy
from ..sharding.groups import find_wrapping

__all__ = ["as_stored_in", "kept_parts", "refuse_policy"]


def kept_parts(catalog: Catalog) -> Catalog:
    """The catalog, with a note of which tensors are codes and what goes with them. Pure.

    Raises as :func:`.dequantized` does: parts that are missing, surplus or of the wrong shape, or that contradict the config.
    """
    if catalog.has_module_names:
        return catalog
    return replace(catalog, kept=tuple(dequantized(catalog).coded.values()))


def as_stored_in(catalog: Catalog, rules: Rules, layers: Mapping[str, Any]) -> Rules:
    """The rules for a model on meta whose ``layers`` (:class:`.KeptLayer`, by path) take stored tensors bit for bit.

    Gives packed zero points the shape in which they are stored. Raises :class:`PlanError` with every tensor that is stored in another
    dtype or shape than its layer holds.
    """
    held = {f"{path}.{name}": (layer, name) for path, layer in layers.items() for name in layer.stored_dtypes}
    made = list(rules.resolve(catalog.tensors))
    problems = []
    for one in made:
        found = held.get(one.target) or held.get(canonical_name(one.target))
        if found is not None and (problem := _misfit(one, *found)) is not None:
            problems.append(f"{one.target!r}: {problem}")
    if problems:
        raise PlanError(
            f"{catalog.root}: {len(problems)} tensors can't be kept as they are stored; use quantized='dequantize'",
            tuple(problems),
        )
    return replace(rules, resolve=lambda _: made)


def refuse_policy(model: Any, mesh: DeviceMesh, policy: ShardPolicy) -> None:
    """Raises :class:`ShardError` for a policy by which FSDP2 would cast stored codes (it casts float8, too), or could not gather them.

    ``model``: on meta, not sharded yet.
    """
    held = kept_in(model)
    if not held:
        return
    if policy.mixed_precision is not None and policy.mixed_precision.param_dtype is not None:
        raise ShardError(
            f"ShardPolicy(mixed_precision=…) casts parameters, and {next(iter(held))!r} and {len(held) - 1} other layers hold "
            f"stored codes and scales, which must not be cast; leave it out: the plain parameters have the dtype of dtype="
        )
    if mesh.device_type != "cpu":
        return
    for candidate, own in find_wrapping(model, policy).groups:
        if {p.dtype for p in own} and all(p.is_floating_point() and p.element_size() == 1 for p in own):
            raise ShardError(
                f"{candidate.path!r} would be an FSDP2 group of float8 codes alone, which gloo can't gather; leave out "
                f"ShardPolicy(block_classes=…), so that they are gathered with their block"
            )


def _misfit(made: Made, layer: Any, name: str) -> str | None:
    """Why a layer can't hold a tensor; None if it can."""
    wanted = getattr(layer, name)
    if name == "weight_zero_point" and made.dtype == "I32" and len(made.shape) == wanted.dim():
        # compressed-tensors packs them when it saves, and not on meta.
        layer.take_shape(name, torch_dtype(made.dtype), made.shape)
        return None
    dtype, shape = code_of(wanted.dtype), tuple(wanted.shape)
    is_exact = made.dtype == dtype or (dtype == "F32" and made.dtype in ("BF16", "F16") and "scale" in name)
    if is_exact and made.shape == shape:
        return None
    return f"is stored as {made.dtype} {list(made.shape)}; the layer holds {dtype} {list(shape)}"
