"""The peak of a training step: measured on tensors without memory, or, where the model's code can't run so, by a formula."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..sharding.groups import ShardPolicy
from .groups import Event, StepGroup, groups_of
from .measure import alike, measure
from .step import StepPeak, peak_of
from .timeline import whole_step
from .training import Training

__all__ = ["FORMULA_ERROR", "Step", "step_of"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The groups of a model, and what a step with them takes beside parameters and optimizer state."""

    groups: tuple[StepGroup, ...]
    peak: StepPeak
    error: float
    """Of the activations."""
    formula: str
    has_narrow_experts: bool
    """Whether experts run in two bytes an element."""
    called: frozenset[int]
    """The groups whose forward runs with text alone."""
    assumptions: tuple[str, ...]


def step_of(
    model: nn.Module, policy: ShardPolicy, shards: int, training: Training, expert_shards: int | None = None
) -> Step:
    """The step of ``model``, unsharded and on meta, after it is sharded over ``shards`` ranks, its experts over others.

    Takes the memory of the model's buffers; 0.1 to 1 s, however many blocks are alike.
    """
    groups = groups_of(model, policy, shards, expert_shards)
    compute = policy.mixed_precision.param_dtype if policy.mixed_precision is not None else None
    first = alike(groups)
    tokens = f"{training.batch_size} x {training.sequence_length} tokens"
    try:
        events, how = _events(model, groups, training, compute)
    except MemoryError:
        raise
    except Exception as error:  # a model's own code, which looks at values, may raise anything
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else ""
        _log.info("the model can't run on tensors without memory: %s: %s", type(error).__name__, reason)
        return _by_formula(model, groups, shards, training, f"{type(error).__name__}: {reason}")
    events = list(whole_step(events, groups, first))
    called = frozenset(e.group for e in events if e.kind == "enter")
    left = [g for g in groups if g.index not in called and g.kind == "block"]
    assumptions = [f"{tokens} on each rank, one forward and backward for each optimizer step"]
    if left:
        assumptions.append(
            f"text alone: {len(left)} blocks do not run ({left[0].path}, …), and images come on top"
        )
    return Step(
        groups=groups,
        peak=_peak(events, groups, policy, shards, training),
        error=0.15,
        formula=f"measured on tensors without memory{how}, {tokens}, {len(set(first.values()))} of {len(first)} blocks run",
        has_narrow_experts=_has_narrow_experts(groups, compute),
        called=called,
        assumptions=tuple(assumptions),
    )


def _events(
    model: nn.Module, groups: Sequence[StepGroup], training: Training, compute: torch.dtype | None
) -> tuple[list[Event], str]:
    """The events of a run, and how it was made: in bf16 where there are no rules for fp32 (grouped products)."""
    try:
        return measure(model, groups, training, compute), ""
    except RuntimeError:
        if compute is not None or next(model.parameters()).dtype != torch.float32:
            raise
    events = measure(model, groups, training, torch.bfloat16, widen=True)
    return events, " in bfloat16, whose tensors count double"


def _has_narrow_experts(groups: Sequence[StepGroup], compute: torch.dtype | None) -> bool:
    dtypes = {compute or p.dtype for g in groups if g.kind == "experts" for p in g.parameters}
    return any(dtype.itemsize == 2 for dtype in dtypes)


def _peak(
    events: Sequence[Event],
    groups: Sequence[StepGroup],
    policy: ShardPolicy,
    shards: int,
    training: Training,
) -> StepPeak:
    return peak_of(
        events,
        groups,
        shards=shards,
        keeps_gathered=policy.reshard_after_forward is False,
        copies=training.device == "cpu",
    )


#: The error bar of activations that are counted by a formula.
FORMULA_ERROR = 1.0
#: Bytes kept for each token, element of the hidden state and block, in 2 bytes each, without attention's matrix: Korthikanti
#: et al. 2022 (arXiv 2205.05198) count 34 for a block with an MLP of four times the width; gated MLPs and norms in fp32 more.
_BYTES_PER_ELEMENT = 64


def _by_formula(
    model: nn.Module, groups: tuple[StepGroup, ...], shards: int, training: Training, reason: str
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
    return Step(
        groups=groups,
        peak=StepPeak(3 * largest, 3 * reduced, gradients, activations, "all at once"),
        error=FORMULA_ERROR,
        formula=f"tokens x (hidden x (blocks x {kept} + {_BYTES_PER_ELEMENT}) + 12 x vocabulary) = {tokens} x ({hidden} x "
        f"({blocks} x {kept} + {_BYTES_PER_ELEMENT}) + 12 x {vocabulary})",
        has_narrow_experts=_has_narrow_experts(groups, None),
        called=frozenset(range(len(groups))),
        assumptions=(
            f"activations by a formula, because the model does not run on tensors without memory ({reason})",
            "attention keeps no matrix of tokens x tokens",
        ),
    )
