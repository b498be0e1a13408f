"""Functions that ranks run for test_hub.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.cli import main
from shardwise.errors import ShardwiseError
from tests.harness.command import runner
from tests.loading._load_fns import tensors_of, whole
from tests.models._hub_fns import fetched

SHARD = ("transformer", "transformer_2")


def _equals(pipeline: Any, other: Any) -> None:
    for name, component in other.components.items():
        own = pipeline.components[name]
        if isinstance(component, torch.nn.Module):
            expected, found = tensors_of(component), tensors_of(own)
            assert found.keys() == expected.keys()
            assert all(torch.equal(whole(found[n]), whole(t)) for n, t in expected.items()), name
        else:
            assert type(own) is type(component), name


def _pipeline(path: str, **options: Any) -> Any:
    return sw.load_pipeline(path, init_device_mesh("cpu", (dist.get_world_size(),)), shard=SHARD, **options)


def _model(path: str, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return sw.load_pretrained(path, mesh, subfolder="transformer", **options)


#: Arguments of a pipeline, and of one model.
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"variant": "fp16", "dtype": torch.float16, "components": {"text_encoder": None}},
}


def load(root: str, cache: str) -> dict[str, Any]:
    """Each pipeline and model, compared with that of the folder. What was fetched until then is noted after each."""
    log: dict[str, Any] = {}
    for name, options in ASKED.items():
        pipeline = _pipeline("tiny/wan", **options)
        _equals(pipeline, _pipeline(root, **options))
        log[name] = _log()
        own = {key: value for key, value in options.items() if key != "components"}
        model, other = (
            _model(path, **own, **more) for path, more in (("tiny/wan", {"cache_dir": cache}), (root, {}))
        )
        expected, found = tensors_of(other), tensors_of(model)
        assert all(torch.equal(whole(found[n]), whole(t)) for n, t in expected.items())
        assert Path(str(sw.reports.load_report(model).source)).is_relative_to(cache)
        log[f"{name}, one"] = _log()
        _pipeline("tiny/wan", **options)
        log[f"{name}, again"] = _log()
    try:
        _pipeline("tiny/nothing")
    except ShardwiseError as error:
        log["no such"] = str(error)
    return log


def _log() -> dict[str, int]:
    return {} if os.environ["HF_HUB_OFFLINE"] == "1" else fetched()


def run(commands: list[list[str]]) -> None:
    """Print the JSON documents of commands, as one list."""
    found = [runner().invoke(main, [*command, "--json"], prog_name="shardwise") for command in commands]
    print(json.dumps([json.loads(one.stdout) for one in found]))
