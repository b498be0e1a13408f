"""A sharded model against its library's own."""

from __future__ import annotations

import torch
from torch import nn

from tests.loading._load_fns import assert_same_whole


def check(model: nn.Module, theirs: nn.Module, *inputs: torch.Tensor) -> None:
    """The same tensors, and the same outputs, bit for bit."""
    assert_same_whole(model, theirs)
    with torch.no_grad():
        ours, expected = model.eval()(*inputs), theirs.eval()(*inputs)
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (ours, expected)), strict=True):
        assert one is other is None or torch.equal(one, other)
