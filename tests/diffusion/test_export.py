"""Exports of diffusers' models: byte for byte the folders that their own ``save_pretrained`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from tests.diffusion.models import ZOO, outputs, write
from tests.harness.on_ranks import on_ranks

#: Bytes of a file: some tensors are larger.
LIMIT = 30_000
ASKED: tuple[tuple[str | None, dict[str, Any]], ...] = ((None, {}), ("bf16", {"torch_dtype": torch.bfloat16}))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models as the hub has them, and as ``save_pretrained`` writes them again, in ``KIND-VARIANT``."""
    root = tmp_path_factory.mktemp("zoo")
    for kind in ZOO:
        write(kind, root / kind)
        for variant, options in ASKED[: 2 if kind == "wan" else 1]:
            theirs = ZOO[kind].cls.from_pretrained(root / kind, **options)
            theirs.save_pretrained(root / f"{kind}-{variant}", variant=variant, max_shard_size=LIMIT)
    return root


@on_ranks(2)
def test_as_save_pretrained(zoo: Path, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in ZOO:
        for variant, options in ASKED[: 2 if kind == "wan" else 1]:
            ours = sw.load_pretrained(zoo / kind, mesh, **options)
            out = tmp_path / f"{kind}-{variant}"
            sw.export_hf(ours, out, variant=variant, max_shard_bytes=LIMIT)
            assert files(out) == files(zoo / f"{kind}-{variant}"), (kind, variant)
            assert ours.config["_class_name"] == ZOO[kind].name  # the model's own config is as it was
        again = ZOO[kind].cls.from_pretrained(tmp_path / f"{kind}-None")
        torch.testing.assert_close(
            outputs(kind, again), outputs(kind, ZOO[kind].cls.from_pretrained(zoo / kind)), atol=2e-6, rtol=0
        )


@on_ranks(3)
def test_from_a_step(zoo: Path, tmp_path: Path) -> None:
    """Of a stored run, in any dtype; and a load of the step."""
    mesh = init_device_mesh("cpu", (3,))
    for kind, (variant, options) in (("wan", ASKED[1]), ("unet", ASKED[0])):
        model = sw.load_pretrained(zoo / kind, mesh, **options)
        step = tmp_path / f"step-{kind}"
        sw.save(sw.TrainState(model=model), step)
        sw.export_hf(step, tmp_path / kind, variant=variant, max_shard_bytes=LIMIT)
        assert files(tmp_path / kind) == files(zoo / f"{kind}-{variant}")
        again = sw.load_pretrained(step, mesh, **options)
        assert sw.digest(again) == sw.digest(model)
    sw.export_hf(tmp_path / "step-wan", tmp_path / "single", dtype="float16", variant="fp16")
    weights = "diffusion_pytorch_model.fp16.safetensors"
    assert files(tmp_path / "single").keys() == {"config.json", weights}
    assert (tmp_path / "single/config.json").read_bytes() == (zoo / "wan-bf16/config.json").read_bytes()
    assert {t.dtype for t in load_file(tmp_path / "single" / weights).values()} == {torch.float16}


def test_of_a_stored_folder(zoo: Path, tmp_path: Path) -> None:
    """Another variant of a folder, without a live model."""
    sw.export_hf(zoo / "flux", tmp_path / "out", dtype="bfloat16", variant="bf16", max_shard_bytes=LIMIT)
    model = ZOO["flux"].cls.from_pretrained(zoo / "flux").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", variant="bf16", max_shard_size=LIMIT)
    found, expected = files(tmp_path / "out"), files(tmp_path / "theirs")
    assert found["config.json"] == (zoo / "flux/config.json").read_bytes()
    assert "diffusion_pytorch_model.safetensors.index.bf16.json" in found
    assert len(found) == len(expected)
    again = ZOO["flux"].cls.from_pretrained(tmp_path / "out", variant="bf16", torch_dtype=torch.bfloat16)
    theirs = model.state_dict()
    assert again.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.state_dict().items())


def test_names_of_an_old_autoencoder(tmp_path: Path) -> None:
    """A model is written under its own names, whatever names it was loaded from."""
    model = write("vae", tmp_path / "new")
    old = {}
    for name, tensor in model.state_dict().items():
        for new, before in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
            name = name.replace(f".{new}.", f".{before}.")
        old[name] = tensor.contiguous()
    model.save_config(tmp_path / "old")
    save_file(old, tmp_path / "old/diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    sw.export_hf(sw.load_pretrained(tmp_path / "old"), tmp_path / "out")
    found = load_file(tmp_path / "out/diffusion_pytorch_model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_config_of_decoded_weights(zoo: Path, tmp_path: Path) -> None:
    """A quantization that the weights no longer have is not written."""
    config = json.loads((zoo / "wan/config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with sw.meta_init():
        model = ZOO["wan"].cls.from_config(config)
    sw.load(model, zoo / "wan")
    model.register_to_config(quantization_config=config["quantization_config"])
    sw.export_hf(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    ZOO["wan"].cls.from_pretrained(tmp_path / "out")


def test_variant_of_a_transformers_model(tmp_path: Path) -> None:
    """The same names as transformers writes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    for limit in (6000, 10**9):
        model.save_pretrained(tmp_path / f"theirs-{limit}", variant="fp32", max_shard_size=limit)
        sw.export_hf(model, tmp_path / f"ours-{limit}", variant="fp32", max_shard_bytes=limit)
        found, expected = files(tmp_path / f"ours-{limit}"), files(tmp_path / f"theirs-{limit}")
        assert found.keys() == expected.keys()
        assert {n: v for n, v in found.items() if n.endswith(".safetensors")} == {
            n: v for n, v in expected.items() if n.endswith(".safetensors")
        }
