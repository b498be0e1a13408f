"""Pipelines of diffusers with some of their models sharded: the same components, and the same samples."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import shardwise as sw
from shardwise.errors import SourceError
from tests.diffusion.models import sample, write_pipeline
from tests.harness.on_ranks import on_ranks
from tests.loading._load_fns import bits, tensors_of, whole

#: What ``from_pretrained`` calls it.
DTYPE = "dtype" if Version(diffusers.__version__) >= Version("0.40") else "torch_dtype"
SHARDED = {"flux": ("transformer", "text_encoder_2"), "wan": ("transformer", "transformer_2")}


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipelines")
    for kind in SHARDED:
        write_pipeline(kind, root / kind)
        write_pipeline(kind, root / f"{kind}-fp16", half=True)
    return root


ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}),
    ("", {"dtype": torch.bfloat16}),
    ("", {"dtype": {"transformer": torch.bfloat16, "default": torch.float32}}),
    ("-fp16", {"dtype": torch.float16, "variant": "fp16"}),
)


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Weights are compared bitwise; what is computed with them isn't: on AMD's CPUs, MKL's results depend on where a matrix begins in memory."""
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@on_ranks(2)
def test_as_diffusers_loads_it(pipelines: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind, shard in SHARDED.items():
        for suffix, options in ASKED:
            source = pipelines / f"{kind}{suffix}"
            given = {DTYPE if name == "dtype" else name: value for name, value in options.items()}
            theirs = diffusers.DiffusionPipeline.from_pretrained(str(source), **given)
            ours = sw.load_pipeline(source, mesh, shard=shard, **options)
            assert type(ours) is type(theirs)
            assert json.loads(ours.to_json_string()) == json.loads(theirs.to_json_string())
            for name, component in theirs.components.items():
                own = ours.components[name]
                if not isinstance(component, torch.nn.Module):
                    assert type(own) is type(component), name
                    continue
                assert isinstance(own, FSDPModule) is (name in shard), name
                assert not own.training
                expected, found = tensors_of(component), tensors_of(own)
                assert found.keys() == expected.keys(), name
                for tensor, value in expected.items():
                    assert found[tensor].dtype == value.dtype, f"{source} {options} {name}.{tensor}"
                    assert torch.equal(bits(whole(found[tensor])), bits(value)), f"{name}.{tensor}"
            if not options:
                assert_alike(sample(ours), sample(theirs))


@on_ranks(1)
def test_other_components(pipelines: Path) -> None:
    """Left out, or the caller's own."""
    mesh = init_device_mesh("cpu", (1,))
    own = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    given = {"text_encoder": None, "scheduler": own}
    pipeline = sw.load_pipeline(pipelines / "wan", mesh, shard=("transformer",), components=given)
    assert pipeline.text_encoder is None
    assert pipeline.scheduler is own
    assert isinstance(pipeline.transformer, FSDPModule)
    assert not isinstance(pipeline.transformer_2, FSDPModule)
    assert sw.reports.load_report(pipeline.transformer).bytes_read > 0


@on_ranks(1)
def test_saved_without_a_component(pipelines: Path, tmp_path: Path) -> None:
    """It can be left out again, as diffusers asks of its caller."""
    mesh = init_device_mesh("cpu", (1,))
    none = {"text_encoder": None, "tokenizer": None}
    pipeline = sw.load_pipeline(pipelines / "wan", mesh, shard=("transformer",), components=none)
    sw.export_hf(pipeline, tmp_path / "out")
    again = sw.load_pipeline(tmp_path / "out", mesh, shard=("transformer",), components=none)
    assert again.text_encoder is None
    assert_alike(sample(again), sample(pipeline))
    with pytest.raises(SourceError, match=r"components=\{'text_encoder': None, 'tokenizer': None\}"):
        sw.load_pipeline(tmp_path / "out", mesh, shard=("transformer",))
    with pytest.raises(SourceError, match=r"has no component 'text_encoder'; it has scheduler, transformer"):
        sw.load_pipeline(tmp_path / "out", mesh, shard=("text_encoder",))
    with pytest.raises(SourceError, match=r"has no component 'text_encoder'"):
        sw.export_hf({"text_encoder": pipeline.transformer}, tmp_path / "copy", pipeline=tmp_path / "out")


@on_ranks(2, 3)
def test_trained_and_exported(pipelines: Path, tmp_path: Path) -> None:
    """What diffusers opens afterwards samples as the live pipeline does; parts alone go into a copy of the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    folder = Path(_of_first(str(tmp_path)))
    for kind, shard in SHARDED.items():
        live = sw.load_pipeline(pipelines / kind, mesh, shard=shard)
        for name in shard:
            optimizer = torch.optim.SGD(live.components[name].parameters(), lr=0.1)
            for parameter in live.components[name].parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        report = sw.export_hf(live, folder / kind)
        assert report.tensors > 0
        assert f"{shard[0]}/diffusion_pytorch_model.safetensors" in report.files
        models = {name: live.components[name] for name in shard}
        sw.export_hf(models, folder / f"{kind}-parts", pipeline=pipelines / kind)
        expected = sample(live)
        for written in (folder / kind, folder / f"{kind}-parts"):
            again = diffusers.DiffusionPipeline.from_pretrained(str(written))
            assert type(again) is type(live)
            assert_alike(sample(again), expected)
        assert sorted(os.listdir(folder / kind)) == sorted(os.listdir(pipelines / kind))
        with pytest.raises(sw.errors.ShardwiseError, match="exists already"):
            sw.export_hf(live, folder / kind)
        with pytest.raises(SourceError, match=r"has no component 'unet'"):
            sw.export_hf({"unet": models[shard[0]]}, folder / "other", pipeline=pipelines / kind)
        with pytest.raises(ValueError, match=r"a dict of models needs pipeline="):
            sw.export_hf(models, folder / "other")
        # What the live pipeline lacks comes from the original.
        left_out = {next(name for name in live.components if name.startswith("text_encoder")): None}
        part = sw.load_pipeline(pipelines / kind, mesh, shard=shard[:1], components=left_out)
        sw.export_hf(part, folder / f"{kind}-filled", pipeline=pipelines / kind)
        filled = diffusers.DiffusionPipeline.from_pretrained(str(folder / f"{kind}-filled"))
        assert_alike(
            sample(filled), sample(diffusers.DiffusionPipeline.from_pretrained(str(pipelines / kind)))
        )
    assert not (folder / "other").exists()


def _of_first(text: str) -> str:
    """Rank 0's text, on every rank."""
    told = [text]
    dist.broadcast_object_list(told)
    return told[0]


def test_what_is_refused(pipelines: Path, tmp_path: Path) -> None:
    flux = pipelines / "flux"
    with pytest.raises(SourceError, match=r"has no component 'unet'; it has scheduler, .*transformer"):
        sw.load_pipeline(flux, shard=("unet",))
    with pytest.raises(TypeError, match=r"shard=\('transformer',\)"):
        sw.load_pipeline(flux, shard="transformer")
    with pytest.raises(SourceError, match=r"has no component 'vea'; it has scheduler"):
        sw.load_pipeline(
            flux, shard=("transformer",), dtype={"default": torch.bfloat16, "vea": torch.float32}
        )
    with pytest.raises(TypeError, match=r"is a str; expected a dict .*adapter=\{'transformer': …\}"):
        sw.load_pipeline(flux, shard=("transformer",), adapter="lora")
    with pytest.raises(ValueError, match=r"adapter= names \['vae'\]"):
        sw.load_pipeline(flux, shard=("transformer",), adapter={"vae": "x"})
    with pytest.raises(SourceError, match=r"no model_index.json, which a diffusers pipeline has"):
        sw.load_pipeline(flux / "transformer", shard=("transformer",))
    with pytest.raises(SourceError, match=r"is a diffusers pipeline .*sw.load_pipeline"):
        sw.load_pretrained(flux)
    (tmp_path / "model_index.json").write_text(json.dumps([1]))
    with pytest.raises(sw.errors.FormatError, match=r"not a list of components"):
        sw.load_pipeline(tmp_path, shard=())
