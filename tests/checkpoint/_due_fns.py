"""Runs on ranks: saves by time."""

from __future__ import annotations

import random
import time
from datetime import timedelta

import torch.distributed as dist
from torch import nn

import shardwise as sw

__all__ = ["saved_by_time"]


def saved_by_time(root: str) -> list[int]:
    """The steps that this rank saved; each rank's steps take times of its own."""
    draw, found = random.Random(dist.get_rank()), []
    state = sw.TrainState(nn.Linear(2, 2))
    with sw.Checkpointer(root, save_every=timedelta(milliseconds=40)) as checkpoints:
        for step in range(1, 60):
            time.sleep(draw.random() * 0.005)
            if checkpoints.should_save(step):
                checkpoints.save(state, step)
                found.append(step)
    return found
