"""The peak of a training step: measured on tensors without memory, or, where the model's code can't run so, by a formula."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..objects import frozen
from ..sharding.groups import ShardPolicy
from .groups import StepGroup, groups_of
from .measure import Measured, alike, measure
from .products import Products, products_of, workspaces_of
from .step import StepPeak, peak_of
from .timeline import whole_step
from .training import TrainingSpec

__all__ = ["FORMULA_ERROR", "Measurements", "Step", "step_of"]

#: Forwards and backwards of one model, by what they depend on, and how each was made.
Measurements = dict[tuple[object, ...], tuple[Measured, str]]

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class Step:
    """The groups of a model, and what a step with them takes beside parameters and optimizer state."""

    groups: tuple[StepGroup, ...]
    peak: StepPeak
    first_peak: StepPeak
    """Of the first step, in which matrix products are compiled on the way."""
    error: float
    """Of the activations."""
    formula: str
    products: Products | None
    """The matrix products in two bytes an element; None if there are none."""
    workspace_bytes: int | None
    """What MKL keeps after the products in fp32, on the CPU. None: not known."""
    called: frozenset[int]
    """The groups whose forward runs with text alone."""
    reached: frozenset[str] | None
    """Names of the parameters that get a gradient with text alone. None: not known."""
    activation_bytes: int | None
    """The most bytes of activations at one instant, whatever FSDP2 holds then. None: not known."""
    assumptions: tuple[str, ...]


def step_of(
    model: nn.Module,
    policy: ShardPolicy,
    shards: int,
    training: TrainingSpec,
    expert_shards: int | None = None,
    *,
    replicas: int = 1,
    is_wrapped: bool = True,
    whole_gradients: Mapping[str, int] | None = None,
    known: Measurements | None = None,
) -> Step:
    """The step of ``model``, unsharded and on meta, as FSDP2 runs it over ``shards`` ranks and ``replicas`` replicas.

    ``expert_shards``: the ranks over which FSDP2 cuts experts; None: ``shards``.

    ``is_wrapped``: whether FSDP2 wraps it. ``whole_gradients``: see :func:`.measure.measure`. ``known``: measurements of this model, with
    other numbers of ranks or another optimizer; a new one is added. Takes the memory of the model's buffers; 0.1 to 1 s, however many blocks are alike.
    """
    groups = groups_of(model, policy, shards, expert_shards)
    compute = policy.mixed_precision.param_dtype if policy.mixed_precision is not None else None
    first = alike(groups)
    tokens = f"{training.batch_size} x {training.sequence_length} tokens"
    # neither ranks nor optimizer: every rank computes the same
    asked = (training.batch_size, training.sequence_length, training.checkpointing, training.device, compute)
    known = {} if known is None else known
    try:
        if asked not in known:
            known[asked] = _measured(model, groups, training, compute, whole_gradients)
        measured, how = known[asked]
    except MemoryError:
        raise
    except Exception as error:  # a model's own code, which looks at values, may raise anything
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else ""
        _log.info("the model can't run on tensors without memory: %s: %s", type(error).__name__, reason)
        return _by_formula(model, groups, compute, training, f"{type(error).__name__}: {reason}")
    narrow = [] if measured.widened else [p for p in measured.products if p.itemsize == 2]
    wide = [p for p in measured.products if p.itemsize == 4 or measured.widened]
    events = list(whole_step(measured.events, groups, first))
    called = frozenset(e.group for e in events if e.kind == "enter")
    products = products_of(model, groups, compute, training, len(narrow))
    on_cpu = training.device == "cpu"
    peak = partial(
        peak_of,
        events,
        groups,
        shards=shards,
        keeps_gathered=policy.reshard_after_forward is False,
        copies=on_cpu,
        has_replicas=replicas > 1,
        is_wrapped=is_wrapped,
    )
    left = [g for g in groups if g.index not in called and g.kind == "block"]
    assumptions = [
        f"{tokens} on each rank, one forward and backward per optimizer step",
        "no padding and one sequence per sample (otherwise, attention also needs a mask, and copies of keys and values for each head)",
    ]
    if left:
        assumptions.append(
            f"text only: {len(left)} blocks don't run ({left[0].path}, …), and images would need more memory"
        )
    return Step(
        groups=groups,
        peak=peak(),
        first_peak=peak(compiles=products if on_cpu else None),
        error=0.15,
        formula=f"measured on tensors without memory{how}, {tokens}, {len(set(first.values()))} of {len(first)} blocks run",
        products=products,
        workspace_bytes=workspaces_of(wide),
        called=called,
        reached=measured.reached,
        activation_bytes=max(e.peak for e in events),
        assumptions=tuple(assumptions),
    )


def _measured(
    model: nn.Module,
    groups: Sequence[StepGroup],
    training: TrainingSpec,
    compute: torch.dtype | None,
    whole_gradients: Mapping[str, int] | None,
) -> tuple[Measured, str]:
    """A run on tensors without memory, and how it was made: in bf16 where there are no rules for fp32 (grouped products)."""
    try:
        return measure(model, groups, training, compute, whole_gradients=whole_gradients), ""
    except RuntimeError:
        if compute is not None or next(model.parameters()).dtype != torch.float32:
            raise
    measured = measure(model, groups, training, torch.bfloat16, widen=True, whole_gradients=whole_gradients)
    return measured, " in bfloat16, whose tensors count double"


#: The error bar of activations that are counted by a formula.
FORMULA_ERROR = 1.0
#: Bytes kept for each token, element of the hidden state and block, in 2 bytes each, without attention's matrix: Korthikanti
#: et al. 2022 (arXiv 2205.05198) count 34 for a block with an MLP of four times the width; gated MLPs and norms in fp32 more.
_BYTES_PER_ELEMENT = 64


def _by_formula(
    model: nn.Module,
    groups: tuple[StepGroup, ...],
    compute: torch.dtype | None,
    training: TrainingSpec,
    reason: str,
) -> Step:
    """A step whose activations are counted by block, with a wide error bar."""
    settings = getattr(model, "config", None)
    if settings is not None and hasattr(settings, "get_text_config"):
        settings = settings.get_text_config()
    hidden = int(getattr(settings, "hidden_size", 0) or getattr(settings, "d_model", 0) or 1024)
    vocabulary = int(getattr(settings, "vocab_size", 0) or 0)
    blocks = sum(g.kind == "block" for g in groups)
    tokens = training.batch_size * training.sequence_length
    kept = 2 if training.checkpointing else _BYTES_PER_ELEMENT
    activations = tokens * (hidden * (blocks * kept + _BYTES_PER_ELEMENT) + 3 * 4 * vocabulary)
    largest = max((g.gathered_bytes for g in groups), default=0)
    reduced = max((g.reduced_bytes for g in groups), default=0)
    gradients = sum(g.gradient_bytes for g in groups)
    products = products_of(model, groups, compute, training)
    compiled = 0 if products is None or training.device != "cpu" else products.after_one_step()
    peak = StepPeak(3 * largest, 3 * reduced, gradients, activations, "all at once")
    return Step(
        groups=groups,
        peak=peak,
        first_peak=replace(peak, compiled=compiled),
        error=FORMULA_ERROR,
        formula=f"tokens x (hidden x (blocks x {kept} + {_BYTES_PER_ELEMENT}) + 12 x vocabulary) = {tokens} x ({hidden} x "
        f"({blocks} x {kept} + {_BYTES_PER_ELEMENT}) + 12 x {vocabulary})",
        products=products,
        workspace_bytes=None,
        called=frozenset(range(len(groups))),
        reached=None,
        activation_bytes=None,
        assumptions=(
            f"activations by a formula, because the model does not run on tensors without memory ({reason})",
            "attention keeps no matrix of tokens x tokens",
        ),
    )
