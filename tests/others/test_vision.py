"""timm, torchvision, open_clip and litgpt: their own models, loaded from their own files."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.errors import SourceError
from tests.harness.on_ranks import on_ranks
from tests.others.compare import check

pytestmark = pytest.mark.skipif(
    not all(find_spec(name) for name in ("timm", "torchvision", "open_clip", "litgpt")),
    reason="needs the packages of the matrix's environment 'others'",
)


def images(size: int) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
@on_ranks(2)
def test_timm(tmp_path: Path, name: str) -> None:
    timm = import_module("timm")
    mesh = init_device_mesh("cpu", (2,))
    options: dict[str, Any] = {"num_classes": 10} | ({"img_size": 32} if "vit" in name else {})
    if dist.get_rank() == 0:
        made = timm.create_model(name, **options)
        made.train()(images(32))  # batch norms have seen something
        timm.models.save_for_hf(made, str(tmp_path / "folder"), safe_serialization=True)
        torch.save(made.state_dict(), tmp_path / "model.pth")
        ema = {name: torch.zeros_like(t) for name, t in made.state_dict().items()}
        torch.save({"state_dict": made.state_dict(), "state_dict_ema": ema}, tmp_path / "last.pth.tar")
    dist.barrier()
    theirs = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True, **options)
    for source in ("folder", "model.pth", "last.pth.tar"):
        with sw.meta_init():
            model = timm.create_model(name, **options)
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sw.load(model, tmp_path / source)
        check(model, theirs, images(32))
    with pytest.raises(SourceError, match=rf"timm\.create_model\('{name}'\)"):
        sw.load_pretrained(tmp_path / "folder", mesh)


@pytest.mark.parametrize("name", ["resnet18", "vit_b_32", "convnext_tiny", "swin_t"])
@on_ranks(2)
def test_torchvision(tmp_path: Path, name: str) -> None:
    torchvision = import_module("torchvision")
    mesh = init_device_mesh("cpu", (2,))
    file = tmp_path / "model.pth"
    if dist.get_rank() == 0:
        torch.save(torchvision.models.get_model(name, num_classes=7).state_dict(), file)
    dist.barrier()
    theirs = torchvision.models.get_model(name, num_classes=7)
    theirs.load_state_dict(torch.load(file, weights_only=True))
    with sw.meta_init():
        model = torchvision.models.get_model(name, num_classes=7)
    sw.shard(model, mesh)
    sw.load(model, file)
    check(model, theirs, images(224)[:1])


@pytest.mark.parametrize("name", ["open_clip_model.safetensors", "open_clip_pytorch_model.bin", "epoch_1.pt"])
@on_ranks(2)
def test_open_clip(tmp_path: Path, name: str) -> None:
    open_clip = import_module("open_clip")
    from safetensors.torch import save_file

    mesh = init_device_mesh("cpu", (2,))
    folder = tmp_path / "clip"
    if dist.get_rank() == 0:
        folder.mkdir()
        vision = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16}
        text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}
        config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
        (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
        made = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
        weights = made.state_dict()
        if name == "epoch_1.pt":  # as its training writes it, under DDP
            weights = {"epoch": 1, "state_dict": {f"module.{n}": t for n, t in weights.items()}}
        (save_file if name.endswith("s") else torch.save)(weights, folder / name)
    dist.barrier()
    theirs = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    open_clip.load_checkpoint(theirs, str(folder / name))
    with sw.meta_init():
        model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    sw.shard(model, mesh)
    sw.load(model, folder / name)
    check(model, theirs, images(32), torch.ones(2, 8, dtype=torch.long))


@on_ranks(2)
def test_litgpt(tmp_path: Path) -> None:
    litgpt = import_module("litgpt")
    mesh = init_device_mesh("cpu", (2,))
    config = litgpt.Config.from_name("pythia-14m", padded_vocab_size=96, n_layer=2)
    if dist.get_rank() == 0:
        torch.save(litgpt.GPT(config).state_dict(), tmp_path / "lit_model.pth")
        torch.save({"model": litgpt.GPT(config).state_dict()}, tmp_path / "finetuned.pth")
    dist.barrier()
    for name in ("lit_model.pth", "finetuned.pth"):
        theirs = litgpt.GPT(config)
        stored = torch.load(tmp_path / name, weights_only=True)
        theirs.load_state_dict(stored.get("model", stored))
        with sw.meta_init():
            model = litgpt.GPT(config)
        sw.shard(model, mesh)
        sw.load(model, tmp_path / name)
        check(model, theirs, torch.arange(8).reshape(2, 4))
    with pytest.raises(SourceError, match=r"give the path of the one to load, such as '.*finetuned\.pth'"):
        sw.load(model, tmp_path)
