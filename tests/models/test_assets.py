"""The small files beside weights: what a config says of the model that it is written for."""

from __future__ import annotations

import json

import torch

from shardwise.models.homes import asset_files
from shardwise.models.meta import meta_init
from tests.sharding import _shard_fns as fns


def test_the_dtype_of_a_config_is_that_of_most_elements() -> None:
    """Not of most parameters, nor of the first: a load as the config says would cast the weights."""
    with meta_init():
        model = fns.build("gpt2").bfloat16()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data = parameter.data.float()
    dtypes = [p.dtype for p in model.parameters()]
    assert dtypes.count(torch.float32) > dtypes.count(torch.bfloat16)
    assert json.loads(asset_files(model)["config.json"])["dtype"] == "bfloat16"
