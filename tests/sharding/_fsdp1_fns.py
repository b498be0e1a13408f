"""What the ranks of test_fsdp1.py run."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError


def attempts(source: str, root: str) -> dict[str, str]:
    """FSDP1 and pipeline stages given to load and save: what the errors say."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except ShardwiseError as error:
            found[name] = str(error)

    for orig in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: FSDP1 without an accelerator, deprecated
            model = FullyShardedDataParallel(
                nn.Sequential(nn.Linear(4, 4)), device_id=torch.device("cpu"), use_orig_params=orig
            )
        attempt(f"load {orig}", lambda model=model: sw.load(model, source))
        attempt(f"save {orig}", lambda model=model: sw.save(sw.TrainState(model=model), root, step=1))
    stage = nn.Linear(4, 4 + dist.get_rank())
    attempt("stage", lambda: sw.save(sw.TrainState(model=stage), root, step=1))
    return found
