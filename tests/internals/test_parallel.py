"""What older versions of transformers lack is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.errors import ShardError
from shardwise.internals.parallel import parallel_plans


def test_a_model_without_plans_names_the_version_that_has_them() -> None:
    """A module of this test stands for a model of transformers before 5.22, which has no such method."""
    with pytest.raises(ShardError, match=r"need transformers 5\.22 or newer, and this is \d"):
        parallel_plans(nn.Linear(2, 2, device=torch.device("meta")), tp=True, ep=False)
