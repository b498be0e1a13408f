"""Adapters inside diffusers' models: added as ``add_adapter`` does, resumed, and exported as pipelines read them."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.diffusion.models import ZOO, outputs, write
from tests.harness.on_ranks import on_ranks
from tests.loading._load_fns import bits, whole

TARGETS = {"flux": ["to_q", "to_k", "proj_out"], "wan": ["to_q", "to_out.0"], "unet": ["to_q", "to_v"]}
LORA = "pytorch_lora_weights.safetensors"


def config(kind: str, **more: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[kind], init_lora_weights="gaussian", **more)


def trained(model: Any, *, seed: int = 0) -> Any:
    """The same values on every rank in the factors that are zero at first."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                drawn = torch.randn(parameter.shape, generator=noise).to(parameter.dtype)
                parameter.copy_(sharded_like(drawn, parameter))
    return model


def content(file: Path) -> Any:
    """Names, dtypes, places and settings of an adapter's file, and its bytes; safetensors writes the metadata in any order."""
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    settings = json.loads(header["__metadata__"].pop("lora_adapter_metadata"))
    settings = {key: sorted(v) if isinstance(v, list) else v for key, v in settings.items()}  # sets
    return header, settings, raw[end:]


def sharded_like(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, torch.distributed.tensor.DTensor):
        return full
    return torch.distributed.tensor.distribute_tensor(full, parameter.device_mesh, parameter.placements)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and in ``KIND-lora`` what one process makes of each: its adapter, with the first values that it got in ``KIND-first``."""
    root = tmp_path_factory.mktemp("zoo")
    for kind in TARGETS:
        write(kind, root / kind)
        model = sw.load_pretrained(root / kind, adapter=config(kind))
        save_file({n: p.detach().clone() for n, p in model.named_parameters()}, root / f"{kind}-first")
        trained(model)
        pipeline = {"unet": diffusers.StableDiffusionPipeline, "wan": diffusers.WanPipeline}
        part = "unet" if kind == "unet" else "transformer"
        pipeline.get(kind, diffusers.FluxPipeline).save_lora_weights(
            root / f"{kind}-lora",
            **{f"{part}_lora_layers": get_peft_model_state_dict(model)},
            **_collate_lora_metadata({part: model}),
        )
    return root


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_add_adapter(zoo: Path, dtype: torch.dtype) -> None:
    for kind in TARGETS:
        theirs = ZOO[kind].cls.from_pretrained(zoo / kind, torch_dtype=dtype)
        theirs.add_adapter(config(kind))
        given = config(kind)
        before = copy.deepcopy(given)
        ours = sw.load_pretrained(zoo / kind, dtype=dtype, adapter=given)
        assert given == before  # the caller's own
        assert type(ours) is type(theirs)
        assert ours.peft_config == theirs.peft_config
        assert ours.active_adapters() == theirs.active_adapters()
        expected, found = dict(theirs.named_parameters()), dict(ours.named_parameters())
        assert found.keys() == expected.keys()
        for name, parameter in expected.items():
            assert found[name].dtype == parameter.dtype, name
            assert found[name].requires_grad == parameter.requires_grad, name
            if "lora_" not in name:
                assert torch.equal(found[name], parameter), name
        # The base is frozen, and the adapter changes nothing yet.
        assert {n for n, p in found.items() if p.requires_grad} == {n for n in found if "lora_" in n}
        plain = sw.load_pretrained(zoo / kind, dtype=dtype)
        torch.testing.assert_close(outputs(kind, ours, dtype), outputs(kind, plain, dtype))


@on_ranks(2, 3)
def test_loaded_and_exported_on_ranks(zoo: Path, tmp_path: Path) -> None:
    """The first values, and the file, are those of one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in TARGETS:
        model = sw.load_pretrained(zoo / kind, mesh, adapter=config(kind))
        first = load_file(zoo / f"{kind}-first")
        for name, parameter in model.named_parameters():
            assert torch.equal(bits(whole(parameter)), bits(first[name])), (kind, name)
        sw.export_hf(trained(model), tmp_path / kind)
        assert content(tmp_path / kind / LORA) == content(zoo / f"{kind}-lora" / LORA), kind
        assert [path.name for path in (tmp_path / kind).iterdir()] == [LORA]
        sw.save(sw.TrainState(model), tmp_path / f"{kind}-step", step=1)
        sw.export_hf(tmp_path / f"{kind}-step", tmp_path / f"{kind}-stored")
        assert content(tmp_path / f"{kind}-stored" / LORA) == content(tmp_path / kind / LORA), kind
        with pytest.raises(ShardwiseError, match="has adapters, and a pipeline needs the whole model"):
            sw.export_hf(tmp_path / f"{kind}-step", tmp_path / "none", pipeline=zoo, model_name="transformer")
        named = {name for name, _ in sw.iter_full_tensors(model, naming="adapter")}
        assert named == load_file(tmp_path / kind / LORA).keys()
        again = sw.load_pretrained(zoo / kind, mesh, adapter=zoo / f"{kind}-lora")
        assert sw.digest(again) == sw.digest(model)


def _image(pipe: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    drawn: Any = {"num_inference_steps": 2, "output_type": "latent", "generator": noise}
    if isinstance(pipe, diffusers.FluxPipeline):
        prompt = {
            "prompt_embeds": torch.randn(1, 8, 32, generator=noise),
            "pooled_prompt_embeds": torch.randn(1, 32, generator=noise),
        }
        return pipe(**prompt, height=8, width=8, **drawn).images
    prompt = {
        name: torch.randn(1, 8, 16, generator=noise) for name in ("prompt_embeds", "negative_prompt_embeds")
    }
    return pipe(**prompt, height=16, width=16, num_frames=5, **drawn).frames


def _pipeline(kind: str, transformer: Any) -> Any:
    none = dict.fromkeys(("text_encoder", "tokenizer"))
    torch.manual_seed(0)
    if kind == "flux":
        vae = diffusers.AutoencoderKL(
            block_out_channels=(4,), latent_channels=1, norm_num_groups=1, use_quant_conv=False
        )
        none |= dict.fromkeys(("text_encoder_2", "tokenizer_2"))
        return diffusers.FluxPipeline(
            diffusers.FlowMatchEulerDiscreteScheduler(), vae, transformer=transformer, **none
        )
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    return diffusers.WanPipeline(vae=vae, scheduler=scheduler, transformer=transformer, **none)


@pytest.mark.parametrize("kind", ["flux", "wan"])
def test_a_pipeline_opens_it(zoo: Path, tmp_path: Path, kind: str) -> None:
    """With the same images as the live model's, and as the merged export's."""
    model = trained(sw.load_pretrained(zoo / kind, adapter=config(kind)))
    sw.export_hf(model, tmp_path / "lora")
    sw.export_hf(model, tmp_path / "merged", merge=True)
    cls = ZOO[kind].cls
    opened = _pipeline(kind, cls.from_pretrained(zoo / kind))
    opened.load_lora_weights(tmp_path / "lora", weight_name=LORA)  # offline, diffusers 0.37 asks for the name
    expected = _image(_pipeline(kind, model))
    torch.testing.assert_close(_image(opened), expected, atol=1e-5, rtol=1e-5)  # MKL: see test_pipelines
    assert not torch.allclose(_image(_pipeline(kind, cls.from_pretrained(zoo / kind))), expected, atol=1e-3)
    merged = cls.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(_image(_pipeline(kind, merged)), expected, atol=1e-4, rtol=1e-4)


@on_ranks(2)
def test_merged_on_ranks(zoo: Path, tmp_path: Path) -> None:
    """What diffusers merges in one process, in a folder like its own; bit for bit, except where MKL rounds the product by alignment."""
    mesh = init_device_mesh("cpu", (2,))
    for kind, dtype in (("flux", torch.float32), ("wan", torch.bfloat16)):
        out = tmp_path / f"{kind}-merged"
        model = sw.load_pretrained(zoo / kind, mesh, dtype=dtype, adapter=zoo / f"{kind}-lora")
        sw.export_hf(model, out, merge=True, variant="x")
        theirs = ZOO[kind].cls.from_pretrained(zoo / kind, torch_dtype=dtype)
        theirs.load_lora_adapter(zoo / f"{kind}-lora", weight_name=LORA, adapter_name="default")
        theirs.fuse_lora()
        theirs.unload_lora()
        if dist.get_rank() == 0:
            theirs.save_pretrained(tmp_path / f"{kind}-theirs", variant="x")
            for path in (tmp_path / f"{kind}-theirs").iterdir():
                if path.suffix == ".safetensors":
                    ours, expected = load_file(out / path.name), load_file(path)
                    assert ours.keys() == expected.keys()
                    for name, tensor in ours.items():
                        torch.testing.assert_close(
                            tensor, expected[name], atol=1e-6, rtol=1e-2 if dtype != torch.float32 else 1e-5
                        )
                    continue
                assert (out / path.name).read_bytes() == path.read_bytes(), (kind, path.name)
            assert len(list(out.iterdir())) == len(list((tmp_path / f"{kind}-theirs").iterdir()))


@on_ranks(2)
def test_resume(zoo: Path, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("flux", "unet"):
        first, again = (_state(zoo, kind, mesh, seed) for seed in (0, 1))
        _steps(kind, first, 2)
        sw.save(first, tmp_path / kind)
        report = sw.restore(again, tmp_path / kind)
        assert report.exact, report
        _same(again, first)
        assert torch.equal(_steps(kind, first, 2), _steps(kind, again, 2))
        _same(again, first)


def _same(one: Any, other: Any) -> None:
    assert sw.digest(one.model) == sw.digest(other.model)
    states = (state.optimizer.state_dict()["state"] for state in (one, other))
    for held, expected in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(whole(held[name]), whole(expected[name])) for name in expected)


def test_resume_on_another_number_of_ranks(zoo: Path, tmp_path: Path, ranks: Any) -> None:
    assert ranks.run_ranks(2, _saved, str(zoo), str(tmp_path))[0] is None
    for losses, differences in ranks.run_ranks(3, _resumed, str(zoo), str(tmp_path)):
        assert any("world size" in difference for difference in differences)
        torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-5)


def _saved(zoo: str, out: str) -> None:
    state = _state(Path(zoo), "flux", init_device_mesh("cpu", (2,)), 0)
    _steps("flux", state, 2)
    sw.save(state, f"{out}/step")
    torch.save(_steps("flux", state, 2), f"{out}/losses")


def _resumed(zoo: str, out: str) -> Any:
    state = _state(Path(zoo), "flux", init_device_mesh("cpu", (3,)), 1)
    report = sw.restore(state, f"{out}/step")
    return (_steps("flux", state, 2), torch.load(f"{out}/losses")), list(report.differences)


def _state(zoo: Path, kind: str, mesh: Any, seed: int) -> Any:
    model = sw.load_pretrained(zoo / kind, mesh, adapter=config(kind), seed=seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return sw.TrainState(model=model, optimizer=optimizer)


def _steps(kind: str, state: Any, count: int) -> torch.Tensor:
    losses = []
    model, optimizer = state.model, state.optimizer
    for _ in range(count):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # of Flux's blocks
            loss = model(**ZOO[kind].inputs(), return_dict=False)[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_several_adapters(zoo: Path, tmp_path: Path) -> None:
    model = sw.load_pretrained(
        zoo / "flux", adapter={"style": zoo / "flux-lora", "default": config("flux", use_dora=True)}
    )
    theirs = ZOO["flux"].cls.from_pretrained(zoo / "flux")
    for name in ("style", "default"):
        theirs.add_adapter(config("flux", use_dora=name == "default"), name)
    theirs.set_adapter("style")
    expected = {name: p.requires_grad for name, p in theirs.named_parameters()}
    assert {name: p.requires_grad for name, p in model.named_parameters()} == expected
    assert model.active_adapters() == ["style"]
    sw.export_hf(model, tmp_path / "out")
    assert content(tmp_path / "out/style" / LORA) == content(zoo / "flux-lora" / LORA)
    sw.export_hf(model, tmp_path / "one", adapters="default")
    assert [path.name for path in (tmp_path / "one").iterdir()] == [LORA]
    opened = ZOO["flux"].cls.from_pretrained(zoo / "flux")
    opened.load_lora_adapter(tmp_path / "out", weight_name=LORA)
    assert opened.peft_config["default_0"].use_dora


def test_other_files_of_an_adapter(zoo: Path, tmp_path: Path) -> None:
    """Without a prefix, without metadata, with PEFT's config, with another component's adapter; a file instead of its directory."""
    stored = load_file(zoo / "flux-lora" / LORA)
    model = sw.load_pretrained(zoo / "flux", adapter=zoo / "flux-lora")
    model.save_lora_adapter(tmp_path / "bare")
    for name in ("unsaid", "peft", "both"):
        (tmp_path / name).mkdir()
    save_file(stored, tmp_path / "unsaid" / LORA)
    of_peft = {name.replace("transformer.", "base_model.model.", 1): t for name, t in stored.items()}
    save_file(of_peft, tmp_path / "peft/adapter_model.safetensors")
    config("flux").save_pretrained(tmp_path / "peft")
    with safe_open(zoo / "flux-lora" / LORA, "pt") as file:
        metadata = file.metadata()
    settings = json.loads(metadata["lora_adapter_metadata"])
    settings |= {f"text_encoder.{name.split('.', 1)[1]}": 0 for name in settings}
    metadata["lora_adapter_metadata"] = json.dumps(settings)
    save_file(
        {**stored, "text_encoder.q_proj.lora_A.weight": torch.zeros(2)},
        tmp_path / "both" / LORA,
        metadata=metadata,
    )
    for place in ("bare", "unsaid", "peft", "both", f"both/{LORA}"):
        again = sw.load_pretrained(zoo / "flux", adapter=tmp_path / place)
        for name, parameter in model.named_parameters():
            assert torch.equal(again.get_parameter(name), parameter), (place, name)
        if place != "peft":  # which diffusers doesn't read
            theirs = ZOO["flux"].cls.from_pretrained(zoo / "flux")
            prefix = None if place == "bare" else "transformer"
            theirs.load_lora_adapter(tmp_path / place.partition("/")[0], weight_name=LORA, prefix=prefix)
            (opened,) = theirs.peft_config.values()
            own = again.peft_config["default"]
            assert (
                (own.r, own.lora_alpha) == (opened.r, opened.lora_alpha) == (4, 4 if place == "unsaid" else 8)
            )
            torch.testing.assert_close(outputs("flux", again), outputs("flux", theirs), atol=1e-5, rtol=0)


def test_into_a_model_with_adapters(zoo: Path) -> None:
    """``load`` into a model of the caller's, which has adapters already."""
    for given in (zoo / "flux-lora", config("flux")):
        with sw.meta_init():
            model = ZOO["flux"].cls.from_config(ZOO["flux"].cls.load_config(zoo / "flux"))
            model.add_adapter(config("flux"))
        sw.load(model, zoo / "flux", adapter=given)
        expected = sw.load_pretrained(zoo / "flux", adapter=given)
        for name, parameter in expected.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name


def test_what_is_refused(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(sw.errors.SourceError, match=f"no {LORA} and no adapter_model.safetensors"):
        sw.load_pretrained(zoo / "flux", adapter=tmp_path)
    save_file({"transformer.lora_unet_x.lora_down.weight": torch.zeros(2, 2)}, tmp_path / LORA)
    with pytest.raises(sw.errors.FormatError, match=r"is not a name of PEFT's; load it into the pipeline by"):
        sw.load_pretrained(zoo / "flux", adapter=tmp_path)
    settings = json.dumps({"transformer.r": 10**9, "transformer.target_modules": ["to_q"]})
    save_file(
        {"transformer.x.lora_A.weight": torch.zeros(2, 2)},
        tmp_path / LORA,
        metadata={"lora_adapter_metadata": settings},
    )
    with pytest.raises(sw.errors.FormatError, match="rank 1000000000 is not a number from 1"):
        sw.load_pretrained(zoo / "flux", adapter=tmp_path)
    model = sw.load_pretrained(zoo / "flux", adapter=zoo / "flux-lora")
    with pytest.raises(ValueError, match=re.escape("adapters are written without one")):
        sw.export_hf(model, tmp_path / "out", variant="bf16")


@pytest.mark.parametrize("frozen", ["hold", "auto"])
def test_adapters_on_one_side_alone(zoo: Path, tmp_path: Path, frozen: Any) -> None:
    """A step and a model, one with adapters and one without: said in a word, before the names."""
    plain = sw.TrainState(model=sw.load_pretrained(zoo / "flux"))
    adapted = sw.TrainState(model=sw.load_pretrained(zoo / "flux", adapter=config("flux")), frozen=frozen)
    sw.save(plain, tmp_path / "plain")
    sw.save(adapted, tmp_path / "adapted")
    with pytest.raises(sw.errors.PlanError, match="The model has adapters, and the checkpoint has none"):
        sw.restore(adapted, tmp_path / "plain")
    with pytest.raises(sw.errors.ShardwiseError, match="The checkpoint has adapters, and the model has none"):
        sw.restore(plain, tmp_path / "adapted")
