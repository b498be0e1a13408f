"""On ranks: quantized directories are loaded in several layouts, and exported in their own format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.export import again as requantized
from shardwise.export import again as weights
from tests.quantized import _layout_fns as layouts

__all__ = ["CHANGED", "export_all", "export_one", "touch"]

#: Ends of the names of the parameters that are changed: dense, fused experts, plain.
CHANGED = (
    "layers.0.self_attn.q_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "experts.down_proj",
    "model.norm.weight",
)
_LAYOUT = {1: layouts._whole, 2: layouts._rows, 3: layouts._uneven_columns}


def _loaded(directory: str) -> nn.Module:
    return layouts._loaded(directory, _LAYOUT[dist.get_world_size()], sw.IOOptions(), "bfloat16")


def touch(model: nn.Module, ends: Sequence[str] = CHANGED) -> None:
    """Change some parameters, by elements."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(tuple(ends)):
                parameter.mul_(1.3)


def export_all(
    directories: Sequence[str], out: str, saved: Sequence[str]
) -> list[tuple[dict[str, Any], dict[str, Any] | str]]:
    """Each directory, loaded and exported: untouched, and with changed parameters. Reports, or the error of the second.

    The models of directories in ``saved`` are saved and exported from their checkpoints, too.
    """
    own = requantized._WINDOW_BYTES, weights._PIECE_BYTES
    requantized._WINDOW_BYTES, weights._PIECE_BYTES = 4096, 1500
    try:
        return [_both(directory, f"{out}/{k}", directory in saved) for k, directory in enumerate(directories)]
    finally:
        requantized._WINDOW_BYTES, weights._PIECE_BYTES = own


def _both(directory: str, out: str, save: bool) -> tuple[dict[str, Any], dict[str, Any] | str]:
    model = _loaded(directory)
    same = sw.export_hf(model, f"{out}/same", quantize="as-source", max_shard_bytes=20_000).to_json()
    if save:
        _stored(model, directory, f"{out}/stored same", same)
    touch(model)
    try:
        changed = sw.export_hf(model, f"{out}/changed", quantize="as-source").to_json()
        if save:
            _stored(model, directory, f"{out}/stored changed", changed)
        return same, changed
    except sw.errors.UnsupportedConversionError as error:
        return same, str(error)


def _stored(model: nn.Module, directory: str, out: str, live: dict[str, Any]) -> None:
    """Save, and export the checkpoint, which must report what the live model's export did."""
    sw.save(sw.TrainState(model=model), f"{out} step")
    report = sw.export_hf(f"{out} step", out, quantize="as-source", source=directory).to_json()
    assert _in_any_order(report["as_source"]) == _in_any_order(live["as_source"])


def _in_any_order(origin: dict[str, Any]) -> dict[str, Any]:
    rules = {rule["reference"]: sorted(rule["names"]) for rule in origin["requantized"]}
    return {
        **origin,
        "requantized": rules,
        "written": sorted(origin["written"]),
        "not_in_model": sorted(origin["not_in_model"]),
    }


def export_one(directory: str, out: str, ends: Sequence[str], fill: float) -> str:
    """One rank's part of a parameter is filled with a value: the error of the export."""
    model = _loaded(directory)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(tuple(ends)) and dist.get_rank() == dist.get_world_size() - 1:
                parameter.to_local().fill_(fill)  # type: ignore[operator]
    try:
        sw.export_hf(model, out, quantize="as-source")
    except sw.errors.ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""
