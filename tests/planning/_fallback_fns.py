"""What the ranks of test_fallback.py run, and the converters that have no map."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import ConversionOps, WeightConverter

import shardwise as sw
from shardwise.errors import ShardwiseError

MIB = 1024**2


class AddOne(ConversionOps):
    """Norm weights stored as their distance from one."""

    def convert(self, input_dict: dict[str, Any], target_patterns: list[str], **_: Any) -> dict[str, Any]:
        (tensors,) = input_dict.values()
        return {target_patterns[0]: tensors[0] + 1}


class Dequantize(ConversionOps):
    """Integers and a scale per row; two stored tensors make one."""

    supports_many_to_many = True

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, Any]:
        (q,), (scale,) = (input_dict[p] for p in source_patterns)
        return {target_patterns[0]: q * scale.unsqueeze(1)}


class LargestRowFirst(ConversionOps):
    """Looks at values: meta tensors can't tell what it makes."""

    def convert(self, input_dict: dict[str, Any], target_patterns: list[str], **_: Any) -> dict[str, Any]:
        (tensors,) = input_dict.values()
        weight = tensors[0]
        if weight.isnan().any().item():
            raise ValueError("NaN is stored")
        return {target_patterns[0]: weight.roll(-int(weight.norm(dim=1).argmax().item()), dims=0)}


@contextmanager
def registered() -> Iterator[None]:
    """For Qwen3 models of this process; ``from_pretrained`` uses them too."""
    kept = get_checkpoint_conversion_mapping("qwen3")
    register_checkpoint_conversion_mapping(
        "qwen3",
        [
            WeightConverter("input_layernorm.offset", "input_layernorm.weight", [AddOne()]),
            WeightConverter(["gate_proj.quantized", "gate_proj.scale"], "gate_proj.weight", [Dequantize()]),
            WeightConverter("down_proj.unsorted", "down_proj.weight", [LargestRowFirst()]),
        ],
        overwrite=True,
    )
    try:
        yield
    finally:
        register_checkpoint_conversion_mapping("qwen3", kept or [], overwrite=True)


def make_checkpoint(directory: Path) -> None:
    """A tiny Qwen3, stored in a way that needs all three."""
    config = Qwen3Config(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=70,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        base, _, _ = name.rpartition(".")
        if name.endswith("input_layernorm.weight"):
            stored[f"{base}.offset"] = torch.randn_like(tensor)
        elif name.endswith("gate_proj.weight"):
            stored[f"{base}.quantized"] = torch.randint(-127, 127, tensor.shape, dtype=torch.int8)
            stored[f"{base}.scale"] = torch.rand(tensor.shape[0])
        elif name.endswith("down_proj.weight"):
            stored[f"{base}.unsorted"] = tensor
        else:
            stored[name] = tensor
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@registered()
def load_beside_ordinary(directory: str, dtype: str) -> dict[str, Any]:
    """Differences from the ordinary load, and what the report says."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model, report = sw.load_pretrained(directory, mesh, dtype=dtype, return_report=True)
    ordinary = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).state_dict()
    found = {n: whole(t) for n, t in model.state_dict().items()}
    for strategy in ("node", "once"):  # then the reader of a bucket converts
        shared = sw.load_pretrained(directory, mesh, dtype=dtype, io=sw.IOOptions(strategy=strategy))
        for name, tensor in shared.state_dict().items():
            assert torch.equal(whole(tensor), found[name]), (strategy, name)
    return {
        "different": [
            n for n, t in ordinary.items() if found[n].dtype != t.dtype or not torch.equal(found[n], t)
        ],
        "names": sorted(found) == sorted(ordinary),
        "converted": [(c.name, c.sources, c.targets, c.reason, c.staging_bytes) for c in report.converted],
        "staging_peak_bytes": report.staging_peak_bytes,
        "bytes_read": report.bytes_read,
    }


@registered()
def load_error(directory: str, staging_bytes: int) -> str:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    try:
        sw.load_pretrained(directory, mesh, io=sw.IOOptions(staging_bytes=staging_bytes, timeout_s=60))
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@registered()
def export_error(directory: str, out: str) -> str:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = sw.load_pretrained(directory, mesh)
    try:
        sw.export_hf(model, out)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "none"
