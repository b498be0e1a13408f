"""Tiny models that compressed-tensors quantizes and writes, and what it makes of the files again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from compressed_tensors.utils.match import match_name
from transformers import LlamaConfig, LlamaForCausalLM

from tests.quantized.boxes import stored_in


def write(
    root: Path, groups: dict[str, Any], dtype: torch.dtype, kv: dict[str, Any] | None = None, inner: int = 160
) -> dict[str, Any]:
    """Quantize a Llama of one layer by ``config_groups``, and write it; returns its ``quantization_config``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=72,
        hidden_size=96,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        dtype=dtype,
    )
    model = LlamaForCausalLM(config).to(dtype)
    settings = QuantizationConfig(
        config_groups=groups, ignore=["lm_head"], kv_cache_scheme=kv, quantization_status="frozen"
    )
    apply_quantization_config(model, settings, show_progress=False)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _calibrate(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(root)
    compressor.update_config(root)
    return json.loads((root / "config.json").read_text())["quantization_config"]


def _calibrate(module: torch.nn.Module) -> None:
    """Scales as a min-max observer finds them."""
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith(("input_", "output_", "k_", "v_")):
            parameter.data.fill_(1)
    args = module.quantization_scheme.weights
    if args is None:
        return
    weight = module.weight.data.float() * 3 + 0.01
    module.weight.data.copy_(weight)
    extra = {}
    if args.strategy == "tensor_group":
        extra["global_scale"] = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(extra["global_scale"].reshape(1))
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": args.block_structure,
    }.get(args.strategy, (1, args.group_size))
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args, **extra)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))


def whole_weights(root: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Each quantized weight of a directory, as the library decompresses it."""
    stored = stored_in(root)
    config = QuantizationConfig.model_validate(settings)
    found = {}
    for name in stored:
        module, _, end = name.rpartition(".")
        if end == "weight_scale":
            state = {n.rpartition(".")[2]: t for n, t in stored.items() if n.rpartition(".")[0] == module}
            scheme = scheme_of(config, module)
            compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
            found[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"]
    return found


def scheme_of(config: QuantizationConfig, module: str) -> Any:
    """A module's scheme: of the group that names it, otherwise of the first."""
    groups = list(config.config_groups.values())
    return next((g for g in groups if any(match_name(module, target) for target in g.targets)), groups[0])
