"""Models of diffusers, sharded while they are loaded: bit for bit what ``from_pretrained`` gives."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.catalog.weights import Choice
from shardwise.errors import SourceError
from tests.diffusion.models import ZOO, outputs, write
from tests.harness.on_ranks import on_ranks
from tests.loading._load_fns import bits, tensors_of, whole

ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"torch_dtype": torch.bfloat16},
    {"torch_dtype": torch.float16, "variant": "fp16"},
)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("zoo")
    for kind in ZOO:
        write(kind, root / kind, half=True)
    return root


@on_ranks(2)
def test_as_from_pretrained(zoo: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind, options in product(ZOO, ASKED):
        theirs = ZOO[kind].cls.from_pretrained(zoo / kind, **options)
        ours = sw.load_pretrained(zoo / kind, mesh, **options)
        assert isinstance(ours, FSDPModule)
        assert isinstance(ours, ZOO[kind].cls)
        assert not ours.training
        assert ours.config["_name_or_path"] == str(zoo / kind)
        expected, found = tensors_of(theirs), tensors_of(ours)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, f"{kind} {options}: {name}"
            assert torch.equal(bits(whole(found[name])), bits(tensor)), f"{kind} {options}: {name}"
        # The same operations on the same bits; where tensors are in memory changes the last bit of some.
        dtype = options.get("torch_dtype", torch.float32)
        close = {"atol": 2e-6, "rtol": 0} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
        torch.testing.assert_close(outputs(kind, ours, dtype), outputs(kind, theirs, dtype), **close)


@on_ranks(2)
def test_each_rank_reads_its_own_bytes(zoo: Path) -> None:
    _, report = sw.load_pretrained(zoo / "flux", init_device_mesh("cpu", (2,)), return_report=True)
    index = json.loads((zoo / "flux/diffusion_pytorch_model.safetensors.index.json").read_text())
    assert report.bytes_read <= 0.55 * index["metadata"]["total_size"]
    assert report.casts == ()


def test_blocks_become_groups(zoo: Path) -> None:
    """Those that a class calls repeated, and those that it doesn't split: none is cut by the border of a group."""
    from shardwise.sharding.fsdp import ShardPolicy, find_wrapping

    named = Counter[str]()
    for kind in ZOO:
        with sw.meta_init():
            model = ZOO[kind].cls(**ZOO[kind].config)
        groups = {candidate.path for candidate, _ in find_wrapping(model, ShardPolicy()).groups}
        for path, module in model.named_modules():
            name = type(module).__name__
            holds = any(group.startswith(f"{path}.") for group in groups)
            inside = any(path.startswith(f"{group}.") for group in groups if group)
            if name in (type(model)._repeated_blocks or ()):
                assert path in groups or inside, (kind, path)
                named[kind] += 1
            elif name in (type(model)._no_split_modules or ()) and list(module.parameters()):
                assert path in groups or inside or holds, (kind, path)
                named[kind] += 1
    assert set(named) == set(ZOO)


#: What may be in a folder: one value is in each, which says which file was read.
PRESENT = (
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.fp16.safetensors",
    "diffusion_pytorch_model.safetensors.index.fp16.json",
    "diffusion_pytorch_model.safetensors.fp16.index.json",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.fp16.bin",
)


class Scale(diffusers.ModelMixin, diffusers.ConfigMixin):
    """A model of one number."""

    config_name = "config.json"

    @diffusers.configuration_utils.register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(1))


@pytest.mark.filterwarnings("ignore:This serialization format is now deprecated")
@pytest.mark.parametrize(("variant", "use_safetensors"), [*product((None, "fp16"), (None, True, False))])
def test_the_files_that_diffusers_takes(
    tmp_path: Path, variant: str | None, use_safetensors: bool | None
) -> None:
    """All combinations of files, read by both."""
    for number in range(1, 2 ** len(PRESENT)):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        (folder / "config.json").write_text('{"_class_name": "Scale", "_diffusers_version": "0.42.1"}')
        for k, name in enumerate(PRESENT):
            if not number >> k & 1:
                continue
            tensors = {"scale": torch.full((1,), float(k + 1))}
            if name.endswith(".json"):
                file = f"part-{k}.safetensors"
                index = {"metadata": {"total_size": 4}, "weight_map": {"scale": file}}
                (folder / name).write_text(json.dumps(index))
                save_file(tensors, folder / file, metadata={"format": "pt"})
            elif name.endswith(".bin"):
                torch.save(tensors, folder / name)
            else:
                save_file(tensors, folder / name, metadata={"format": "pt"})
        options = {"variant": variant, "use_safetensors": use_safetensors}
        try:
            theirs = Scale.from_pretrained(folder, **options).scale.item()
        except OSError:
            theirs = None
        ours = torch.nn.Module()
        ours.scale = torch.nn.Parameter(torch.zeros(1))
        try:
            catalog = open_catalog(folder, choice=Choice(**options))
        except SourceError:
            found = None
        else:
            (chunk,) = catalog.tensors["scale"].chunks
            found = _value(chunk.path, chunk.offset_bytes)
        names = sorted(os.listdir(folder))
        if theirs is None and not Choice(**options).is_asked:
            continue  # a plain path reads whatever tensors there are
        assert found == theirs, (names, options)


def _value(path: str, offset: int) -> float:
    if path.endswith(".safetensors"):
        return load_file(path)["scale"].item()
    return torch.load(path, weights_only=True)["scale"].item()


def test_what_is_refused(tmp_path: Path, zoo: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"_class_name": "DDPMScheduler", "_diffusers_version": "0.42.1"})
    )
    save_file({"scale": torch.zeros(1)}, tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(sw.errors.FormatError, match=r"'DDPMScheduler', which is no model of diffusers"):
        sw.load_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"no attn_implementation=; call model.set_attention_backend"):
        sw.load_pretrained(zoo / "flux", attn_implementation="sdpa")
    with pytest.raises(SourceError, match=r"contains no diffusion_pytorch_model.safetensors.index.bf16.json"):
        sw.load_pretrained(zoo / "flux", variant="bf16")


def test_attention_of_an_old_autoencoder(tmp_path: Path) -> None:
    """Names that diffusers changes when it loads a file."""
    model = write("vae", tmp_path / "new")
    options = {**ZOO["vae"].config}
    old = {}
    for name, tensor in model.state_dict().items():
        for new, before in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
            name = name.replace(f".{new}.", f".{before}.")
        old[name] = tensor.contiguous()
    assert old.keys() != model.state_dict().keys()
    model.save_config(tmp_path)
    save_file(old, tmp_path / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    theirs = ZOO["vae"].cls.from_pretrained(tmp_path)
    with sw.meta_init():
        by_hand = ZOO["vae"].cls(**options)
    sw.load(by_hand, tmp_path)
    for ours in (by_hand, sw.load_pretrained(tmp_path)):
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], tensor), name


@pytest.mark.needs("diffusers>=0.39", "lacks this class")
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_an_argument_model_type_is_no_config_of_transformers(tmp_path: Path) -> None:
    """A class may have an argument of this name, which is then in its config. This one also has weights under ``weight_norm``."""
    sizes = {"dec_dim": 8, "dec_c_mults": (1, 2), "dec_strides": (2, 2), "vocoder_input_dim": 16}
    encoder = {
        "enc_dim": 8,
        "enc_intermediate_dim": 16,
        "enc_num_layers": 1,
        "enc_latent_dim": 16,
        "enc_c_mults": (1, 2),
        "enc_strides": (2, 2),
    }
    torch.manual_seed(0)
    diffusers.Cosmos3AVAEAudioTokenizer(**sizes, **encoder).save_pretrained(tmp_path)
    assert "model_type" in json.loads((tmp_path / "config.json").read_text())
    theirs = diffusers.Cosmos3AVAEAudioTokenizer.from_pretrained(tmp_path)
    ours = sw.load_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    latents = torch.linspace(-1, 1, 16 * 4).reshape(1, 16, 4)
    with torch.no_grad():
        torch.testing.assert_close(ours.decode(latents), theirs.decode(latents))
