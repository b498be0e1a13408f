"""Quantized folders that diffusers wrote: each weight is what diffusers makes of it itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.diffusion.models import ZOO
from tests.harness.on_ranks import on_ranks

FLUX = ZOO["flux"].cls
#: Rows of a size that torchao takes.
CONFIG = {**ZOO["flux"].config, "attention_head_dim": 32, "axes_dims_rope": [8, 8, 16]}


def quantize(out: Path, config: Any, **saving: Any) -> Path:
    torch.manual_seed(0)
    FLUX(**CONFIG).save_pretrained(out / "plain")
    model = FLUX.from_pretrained(out / "plain", quantization_config=config, torch_dtype=torch.bfloat16)
    model.save_pretrained(out / "quantized", **saving)
    return out / "quantized"


@pytest.fixture(scope="module")
def torchao(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig

    root = tmp_path_factory.mktemp("torchao")
    int8 = Int8WeightOnlyConfig(version=2)
    options: dict[str, tuple[Any, dict[str, Any]]] = {
        "int8": (int8, {"max_shard_size": "60KB"}),
        "fp8": (Float8WeightOnlyConfig(), {}),
        "intx": (IntxWeightOnlyConfig(), {}),
        "bin": (int8, {"safe_serialization": False}),
    }
    return {
        name: quantize(root / name, diffusers.TorchAoConfig(config), **saving)
        for name, (config, saving) in options.items()
    }


def check(folder: Path) -> None:
    """Weights on this rank, and those that diffusers dequantizes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ours = sw.load_pretrained(folder, mesh, dtype=torch.bfloat16)
    theirs = FLUX.from_pretrained(folder, torch_dtype=torch.bfloat16)
    codes = 0
    for (name, found), (other, expected) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other
        assert isinstance(found, DTensor)
        if type(expected) is not nn.Parameter:
            expected, codes = expected.dequantize(), codes + 1
        assert torch.equal(found.full_tensor(), expected), name
    assert codes > 40
    assert "quantization_config" not in ours.config


@pytest.mark.needs("diffusers>=0.39", "saves torchao's tensors by pickle only")
@on_ranks(2)
def test_torchao(torchao: dict[str, Path]) -> None:
    for name in ("int8", "fp8"):
        check(torchao[name])


@pytest.mark.needs("diffusers>=0.39", "saves torchao's tensors by pickle only")
@on_ranks(1)
def test_others_of_torchao_are_refused_by_name(torchao: dict[str, Path]) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(
        ShardwiseError, match=r"IntxUnpackedToInt8Tensor.*save plain weights: \{n: t\.dequantize"
    ):
        sw.load_pretrained(torchao["intx"], mesh)
    with pytest.raises(ShardwiseError, match=r"is quantized by torchao \(Int8Tensor\).*t\.dequantize\(\)"):
        sw.load_pretrained(torchao["bin"], mesh)


@pytest.fixture(scope="module")
def quanto(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("optimum.quanto")
    root = tmp_path_factory.mktemp("quanto")
    return {
        dtype: quantize(root / dtype, diffusers.QuantoConfig(weights_dtype=dtype))
        for dtype in ("int8", "float8", "int4")
    }


@pytest.mark.filterwarnings("ignore:.*Quanto:FutureWarning")
@on_ranks(2)
def test_quanto(quanto: dict[str, Path]) -> None:
    warnings.filterwarnings("ignore", ".*Quanto", FutureWarning)
    for name in ("int8", "float8"):
        check(quanto[name])
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ShardwiseError, match=r"expected quanto's INT8 or FP8"):
        sw.load_pretrained(quanto["int4"], mesh)


def quantize_here(model: nn.Module, weights: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Quantize a model whose layers are bitsandbytes' as diffusers does on a GPU. Returns its parameters as diffusers dequantizes them."""
    import bitsandbytes
    from diffusers.quantizers.bitsandbytes.utils import dequantize_bnb_weight

    expected = dict(weights)
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weights[f"{name}.weight"])
            module.weight = bitsandbytes.nn.Int8Params(
                codes, requires_grad=False, has_fp16_weights=False, SCB=scales
            )
            expected[f"{name}.weight"] = dequantize_bnb_weight(module.weight, module.state, torch.float16)
        elif isinstance(module, bitsandbytes.nn.Linear4bit):
            module.weight = bitsandbytes.nn.Params4bit(
                weights[f"{name}.weight"],
                requires_grad=False,
                quant_type=config.bnb_4bit_quant_type,
                compress_statistics=config.bnb_4bit_use_double_quant,
                module=module,
            ).to("cpu")
            expected[f"{name}.weight"] = dequantize_bnb_weight(module.weight, dtype=torch.float16)
    return expected


@on_ranks(2)
def test_bitsandbytes(tmp_path: Path) -> None:
    """diffusers quantizes on GPUs only, so bitsandbytes' own layers in diffusers' model do it here."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from diffusers.quantizers.bitsandbytes.utils import replace_with_bnb_linear

    layers = {"load_in_8bit": bitsandbytes.nn.Linear8bitLt, "load_in_4bit": bitsandbytes.nn.Linear4bit}
    mesh = init_device_mesh("cpu", (2,))
    for k, options in enumerate(
        (
            {"load_in_8bit": True},
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        )
    ):
        config = diffusers.BitsAndBytesConfig(**options)
        torch.manual_seed(0)
        plain = FLUX(**CONFIG).half()
        model = replace_with_bnb_linear(
            FLUX(**CONFIG).half(), modules_to_not_convert=[], quantization_config=config
        )
        model.load_state_dict(plain.state_dict(), strict=False, assign=True)
        weights = {name: p.detach() for name, p in plain.named_parameters()}
        expected = quantize_here(model, weights, config)
        kind = layers[next(iter(options))]
        assert sum(isinstance(module, kind) for module in model.modules()) > 40
        assert sum(not torch.equal(expected[name], weights[name]) for name in weights) > 40
        model.register_to_config(quantization_config=config)
        folder = tmp_path / str(k)
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.barrier()
        ours = sw.load_pretrained(folder, mesh, dtype=torch.float16)
        for name, p in ours.named_parameters():
            assert torch.equal(p.full_tensor(), expected[name]), f"{options} {name}"
