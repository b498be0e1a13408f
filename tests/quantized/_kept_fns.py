"""On ranks: models whose layers hold a source's own codes and scales, beside the stored tensors and the unsharded model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw
from shardwise.errors import ShardError
from shardwise.models.layers import kept_in
from tests.quantized import _qlora_fns as qlora
from tests.quantized._made import plain_tensors

__all__ = ["as_stored", "in_other_layouts", "refuses_casts", "saved_and_exported", "resumed", "trained"]


def kept(source: str, **options: Any) -> tuple[Any, sw.reports.LoadReport]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return sw.load_pretrained(source, mesh, quantized="keep", return_report=True, **options)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(24).view(2, 12)).logits
    return found


def as_stored(source: str, reference: str) -> tuple[int, int, int, int]:
    """Compares codes with the files, the forward with an unsharded model's. Bytes of codes here and in all, a row of each, tensors.

    ``reference``: ``transformers`` as it loads the source, or ``whole``, the kept model on one rank.
    """
    model, report = kept(source)
    assert report.dequantized
    assert all(one.format.endswith(", kept") for one in report.dequantized)
    assert not any(
        p.requires_grad for layer in kept_in(model).values() for p in layer.parameters(recurse=False)
    )
    full = dict(sw.iter_full_tensors(model, naming="module"))
    stored, own, total, rows, compared = plain_tensors(Path(source)), 0, 0, 0, 0
    for path, layer in kept_in(model).items():
        for name in layer.stored_dtypes:
            parameter = getattr(layer, name)
            codes = full[f"{path}.{name}"]
            expected = stored.get(f"{path}.{name}")
            if expected is None:
                expected = _stacked(stored, path, name)
            assert codes.dtype == expected.dtype, (path, name)
            assert torch.equal(raw(codes), raw(expected)), (path, name)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            own, total, compared = own + local.nbytes, total + codes.nbytes, compared + 1
            rows += codes.nbytes // codes.shape[0] if codes.dim() else codes.nbytes
    if reference == "transformers":
        plain: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=model.dtype)
    else:
        plain = sw.load_pretrained(source, quantized="keep")
    assert torch.equal(logits(model), logits(plain))
    return own, total, rows, compared


def _stacked(stored: dict[str, torch.Tensor], path: str, name: str) -> torch.Tensor:
    """A tensor of experts that are stored one by one."""
    last, scale, _ = name.partition("_scale_inv")
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    inside = [k.removeprefix(f"{path}.") for k in stored if k.startswith(f"{path}.")]
    made = [
        torch.cat([stored[f"{path}.{k}.{part}.weight{scale}"].view(torch.uint8) for part in parts])
        for k in sorted({int(k.split(".")[0]) for k in inside})
    ]
    return torch.stack(made).view(torch.float32 if scale else torch.float8_e4m3fn)


def trained(source: str) -> int:
    """Ten steps of LoRA beside transformers and PEFT on one process: losses and gradients, bit for bit."""
    # PEFT 0.21 can't wrap a layer of packed codes before transformers has decompressed it.
    packed = None if "fp8" in source else transformers.CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`", UserWarning)
        return qlora.like_unsharded(source, "keep", packed)


def saved_and_exported(source: str, root: str) -> dict[str, str]:
    """A checkpoint and an export of a kept model; its digests."""
    model, _ = kept(source)
    sw.save(sw.TrainState(model=model), f"{root}/step")
    sw.export_hf(model, f"{root}/out")
    return qlora.digests(model)


def resumed(source: str, root: str, digests: dict[str, str]) -> None:
    """The checkpoint, restored into a model of this number of ranks, and loaded on its own."""
    model, _ = kept(source)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(torch.zeros_like(local))
    sw.restore(sw.TrainState(model=model), f"{root}/step")
    assert qlora.digests(model) == digests
    again, _ = kept(f"{root}/step")
    assert qlora.digests(again) == digests
    assert torch.equal(logits(model), logits(again))


def in_other_layouts(source: str, kind: str) -> None:
    """Replicas (on four ranks), shards in host memory, columns, and codes that stay gathered: the same logits."""
    world = dist.get_world_size()
    expected = logits(sw.load_pretrained(source, quantized="keep"))
    replicas = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cpu", (world,))
    if "per tensor" in source:
        with pytest.raises(ShardError, match="float8 codes alone, which gloo can't gather"):
            kept(source, policy=sw.ShardPolicy(block_classes=(kind,)))
    for mesh, policy in (
        (replicas, sw.ShardPolicy()),
        (flat, sw.ShardPolicy(cpu_offload=True)),
        (flat, sw.ShardPolicy(reshard_after_forward=False)),
        (flat, sw.ShardPolicy(block_classes=None if "per tensor" in source else (kind,))),
        (
            flat,
            sw.ShardPolicy(
                placement=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % world == 0 else None
            ),
        ),
    ):
        model = sw.load_pretrained(source, mesh, policy=policy, quantized="keep")
        assert torch.equal(logits(model), expected), policy


def refuses_casts(sources: Sequence[str]) -> None:
    policy = sw.ShardPolicy(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for source in sources:
        with pytest.raises(ShardError, match="hold stored codes"):
            kept(source, policy=policy)
