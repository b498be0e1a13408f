"""Weights in 16 bits under an optimizer that adds small steps to them: most steps are rounded away."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.optim import Optimizer

__all__ = ["warn_of_rounded_updates"]

_log = logging.getLogger(__name__)
#: Of the optimizers that were warned about, in this process: one warning is enough.
_warned = False


def warn_of_rounded_updates(optimizers: Mapping[str, Optimizer]) -> None:
    """Log once, on rank 0, if one of torch's own optimizers trains weights of 16 bits.

    Those of other packages are left alone: some keep fp32 masters, or round stochastically.
    """
    global _warned
    if _warned:
        return
    for optimizer in optimizers.values():
        if not type(optimizer).__module__.startswith("torch.optim"):
            continue
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        half = [p for p in parameters if p.dtype in (torch.bfloat16, torch.float16)]
        if not half:
            continue
        _warned = True
        if not (dist.is_initialized() and dist.get_rank()):
            _log.warning(
                "%s trains %d of %d tensors in %s: an update below 1/256 of a bf16 weight is rounded away. Load fp32 weights and "
                "compute in bf16: sw.load_pretrained(path, mesh, dtype=torch.float32, policy=sw.ShardPolicy("
                "mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))",
                type(optimizer).__name__,
                len(half),
                len(parameters),
                str(half[0].dtype).removeprefix("torch."),
            )
        return
