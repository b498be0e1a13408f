"""No lossy cast without a line in the report, whatever loads or writes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from shardwise.dtypes import ITEMSIZE, is_lossless, torch_dtype
from tests.harness.models import build_reference

FLOATS = ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F16", "BF16", "F32", "F64"]


def test_whether_a_cast_is_lossless_is_what_torch_does_to_every_value() -> None:
    """Of every value of at most 16 bits, and of a few of the longer dtypes."""
    for before, after in product(FLOATS, FLOATS):
        dtype, size = torch_dtype(before), ITEMSIZE[before]
        if size <= 2:
            bits = torch.arange(2 ** (8 * size), dtype=torch.int64)
            values = bits.to(torch.uint8 if size == 1 else torch.uint16).view(dtype).to(torch.float64)
            values = values[values.isfinite()]
        else:
            values = torch.tensor([1.0, 1 / 3, 1e-30, 1e30], dtype=dtype).double()
        survives = torch.equal(values.to(torch_dtype(after)).to(torch.float64), values)
        assert is_lossless(before, after) == survives, (before, after)


class Denoiser(nn.Module):
    """Of a library with its own base class, which says as diffusers does what stays fp32."""

    _keep_in_fp32_modules = ["norm1", "scale_shift_table"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm10, self.proj = nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 4, bias=False)
        self.scale_shift_table = nn.Parameter(torch.zeros(2, 4))


def test_a_load_names_each_lossy_cast(tmp_path: Path) -> None:
    model = Denoiser()
    stored = {n: t.clone() for n, t in model.state_dict().items()}
    stored["norm10.bias"] = stored["norm10.bias"].bfloat16()  # as it is in the model
    save_file(stored, tmp_path / "x.safetensors")
    assert sw.load(model.double(), tmp_path / "x.safetensors").casts == ()
    report = sw.load(model.bfloat16(), tmp_path / "x.safetensors")
    kept = ("norm1.weight", "norm1.bias", "scale_shift_table")
    (floats,) = report.casts
    assert (floats.source, floats.target, floats.tensors, floats.kept_in_fp32) == ("F32", "BF16", 5, 3)
    assert set(floats.names[:3]) == set(kept), "first those that the class keeps in fp32"
    assert set(floats.names[3:]) == {"norm10.weight", "proj.weight"}
    assert report.to_json()["casts"][0]["kept_in_fp32"] == 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("casts") / "source"
    build_reference("qwen3-tied").float().save_pretrained(folder)
    return folder


def cast_of(report: Any) -> tuple[str, str, int]:
    (one,) = report.casts
    return one.source, one.target, one.tensors


def test_a_dtype_that_the_caller_gives_is_in_the_report(source: Path, tmp_path: Path) -> None:
    count = len(load_file(source / "model.safetensors"))
    assert sw.reports.load_report(sw.load_pretrained(source)).casts == ()
    model, report = sw.load_pretrained(source, dtype=torch.bfloat16, return_report=True)
    assert cast_of(report) == ("F32", "BF16", count)
    assert sw.reports.load_report(sw.load_pretrained(source, dtype="float64")).casts == ()
    assert cast_of(sw.plan(source, ranks=1, dtype="bfloat16")) == ("F32", "BF16", count)
    assert sw.export_hf(model, tmp_path / "same").casts == ()
    assert sw.export_hf(model, tmp_path / "wider", dtype="float32").casts == ()
    assert cast_of(sw.export_hf(model, tmp_path / "half", dtype="float16")) == ("BF16", "F16", count)
    assert cast_of(sw.export_hf(source, tmp_path / "stored", dtype="bfloat16")) == ("F32", "BF16", count)
    assert sw.convert(source, tmp_path / "step").tensors == count
    assert cast_of(sw.load(model, tmp_path / "step")) == ("F32", "BF16", count)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_restore_names_each_cast(source: Path, tmp_path: Path) -> None:
    """Of our own checkpoints tensor by tensor, of another program's in one line for each pair of dtypes."""
    import torch.distributed.checkpoint as dcp

    model = sw.load_pretrained(source)
    sw.save(sw.TrainState(model=model), tmp_path / "ours", step=1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    half = model.bfloat16()
    ours = sw.restore(sw.TrainState(model=half), tmp_path / "ours")
    assert sum("F32 when saved, BF16 now" in line for line in ours.differences) == ours.tensors
    theirs = sw.restore(sw.TrainState(model=half), tmp_path / "theirs")
    (line,) = [line for line in theirs.differences if "F32 when saved, BF16 now" in line]
    assert f"and {theirs.tensors - 3} more" in line


def test_what_a_class_of_transformers_keeps_in_fp32(tmp_path: Path) -> None:
    """``load_pretrained`` keeps it, as ``from_pretrained`` does; a model that was cast as a whole is told."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    theirs = T5ForConditionalGeneration.from_pretrained(tmp_path / "t5", dtype=torch.float16)
    model, report = sw.load_pretrained(tmp_path / "t5", dtype=torch.float16, return_report=True)
    assert {n: p.dtype for n, p in model.named_parameters()} == {
        n: p.dtype for n, p in theirs.named_parameters()
    }
    assert [c.kept_in_fp32 for c in report.casts] == [0]
    assert not any(".wo." in name for c in report.casts for name in c.names)
    (cast,) = sw.load(model.half(), tmp_path / "t5").casts
    assert cast.kept_in_fp32 == 2
    assert all(".wo." in name for name in cast.names[:2])


def test_diffusers_own_class(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    options = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
    }
    options |= {
        "text_dim": 16,
        "freq_dim": 64,
        "ffn_dim": 32,
        "num_layers": 3,
        "rope_max_seq_len": 32,
        "cross_attn_norm": True,
    }
    kind = diffusers.WanTransformer3DModel
    kind(**options).save_pretrained(tmp_path)
    theirs = kind.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    fp32 = {n for n, p in theirs.named_parameters() if p.dtype == torch.float32}
    report = sw.load(kind(**options).bfloat16(), tmp_path)
    (cast,) = report.casts
    assert cast.kept_in_fp32 == len(fp32) > 0
    assert set(cast.names[: len(fp32)]) == fp32 or len(fp32) > 20
    assert sw.load(theirs, tmp_path).casts[0].kept_in_fp32 == 0
