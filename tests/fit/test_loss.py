"""A training step of models that don't read text: the caller's forward pass, run with tensors without data."""

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

import shardwise as sw
from shardwise.errors import ShardError
from shardwise.fit.network import step_of
from shardwise.internals.torch import fake_store
from tests.harness.tiers import nightly_rows

FLUX = {
    "in_channels": 64,
    "num_layers": 3,
    "num_single_layers": 4,
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "joint_attention_dim": 256,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (16, 24, 24),
}
WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 256,
    "freq_dim": 64,
    "ffn_dim": 1024,
    "num_layers": 5,
}
UNET = {
    "sample_size": 32,
    "block_out_channels": (64, 128),
    "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 64,
    "attention_head_dim": 8,
}


def flux_loss(model: Any, batch: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    found = model(
        hidden_states=torch.randn(batch, 256, 64, dtype=dtype),
        encoder_hidden_states=torch.randn(batch, 64, 256, dtype=dtype),
        pooled_projections=torch.randn(batch, 64, dtype=dtype),
        timestep=torch.rand(batch, dtype=dtype),
        img_ids=torch.zeros(256, 3),
        txt_ids=torch.zeros(64, 3),
        guidance=None,
    ).sample
    return nn.functional.mse_loss(found.float(), torch.randn(batch, 256, 64))


def wan_loss(model: Any, batch: int) -> torch.Tensor:
    dtype = torch.bfloat16
    found = model(
        hidden_states=torch.randn(batch, 16, 5, 16, 16, dtype=dtype),
        timestep=torch.randint(1000, (batch,)),
        encoder_hidden_states=torch.randn(batch, 32, 256, dtype=dtype),
    ).sample
    return nn.functional.mse_loss(found.float(), torch.randn(batch, 16, 5, 16, 16))


def unet_loss(model: Any, batch: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    found = model(
        torch.randn(batch, 4, 32, 32, dtype=dtype),
        torch.randint(1000, (batch,)),
        torch.randn(batch, 16, 64, dtype=dtype),
    ).sample
    return nn.functional.mse_loss(found.float(), torch.randn(batch, 4, 32, 32))


KINDS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "flux": (diffusers.FluxTransformer2DModel, FLUX, flux_loss),
    "wan": (diffusers.WanTransformer3DModel, WAN, wan_loss),
    "unet": (diffusers.UNet2DConditionModel, UNET, unet_loss),
}


def tracked(kind: str, ranks: int, training: sw.TrainingSpec) -> int:
    """Peak bytes of a step without the parameters, by ``FSDPMemTracker`` under fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    made, config, loss = KINDS[kind]
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            torch.set_default_dtype(torch.bfloat16)
            model = made(**config)
            torch.set_default_dtype(torch.float32)
            if training.checkpointing:
                model.enable_gradient_checkpointing()
            sw.shard(model, mesh)
            own: int = sum(p.to_local().nbytes for p in model.parameters())
            tracker = FSDPMemTracker(model)
            with tracker, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.train()
                loss(model, training.batch_size).backward()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    finally:
        torch.set_default_dtype(torch.float32)
        dist.destroy_process_group()
    return int(peak) - own


@pytest.mark.parametrize(
    ("kind", "batch", "checkpointing"),
    [
        ("flux", 2, False),
        ("wan", 2, True),
        *nightly_rows(("flux", 4, True), ("wan", 2, False), ("unet", 2, False)),
    ],
)
def test_steps_of_diffusers_models_take_what_torch_tracks(kind: str, batch: int, checkpointing: bool) -> None:
    made, config, loss = KINDS[kind]
    training = sw.TrainingSpec(batch_size=batch, checkpointing=checkpointing, loss=loss)
    with sw.meta_init():
        model = made(**config)
    step = step_of(model.to(torch.bfloat16), sw.ShardPolicy(), 4, training)
    assert step.peak.total_bytes == pytest.approx(tracked(kind, 4, training), rel=0.1)


class Halving(nn.Module):
    """Blocks of one class, each of which returns what has half the length."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv1d(64, 64, 2, stride=2, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = nn.functional.relu(block(x))
        return x


def test_blocks_that_change_the_shape_run_each() -> None:
    with sw.meta_init():
        model = Halving()
    policy = sw.ShardPolicy(block_classes=("Conv1d",))
    lengths = []

    def loss(model: nn.Module, batch: int) -> torch.Tensor:
        found = model(torch.randn(batch, 64, 128))
        lengths.append(found.shape[-1])
        return found.sum()

    step = step_of(model, policy, 2, sw.TrainingSpec(loss=loss))
    assert lengths[-1] == 128 // 2**5
    assert "5 of 5 blocks run" in step.formula


@pytest.fixture
def flux(tmp_path: Path) -> Path:
    made: Any = diffusers.FluxTransformer2DModel
    made(**FLUX).to(torch.bfloat16).save_pretrained(tmp_path / "flux")
    return tmp_path / "flux"


def test_a_plan_of_a_run_takes_the_callers_loss(flux: Path) -> None:
    training = sw.TrainingSpec(batch_size=8, loss=flux_loss)
    report = sw.plan(flux, ranks=4, dtype=torch.bfloat16, training=training)
    assert report.run is not None
    assert report.run.setup.sequence_length is None
    activations = {a.what: a for a in report.run.phase("steady state").amounts}["activations"]
    one = sw.plan(flux, ranks=4, dtype=torch.bfloat16, training=sw.TrainingSpec(batch_size=1, loss=flux_loss))
    assert one.run is not None
    alone = {a.what: a for a in one.run.phase("steady state").amounts}["activations"]
    assert activations.nbytes > 7 * alone.nbytes
    # Changes that would make it fit are planned with it, too.
    limit = one.run.phase("steady state").upper_bytes("device") + 2**20
    fitted = sw.plan(flux, ranks=4, dtype=torch.bfloat16, training=training, device_limit_bytes=limit)
    assert fitted.verdict is not None
    assert any("batch size" in change.what for change in fitted.verdict.changes)


def test_what_a_loss_must_not_do_is_named(flux: Path) -> None:
    def looks(model: Any, batch: int) -> torch.Tensor:
        loss = flux_loss(model, batch)
        return loss if loss.item() > 0 else -loss

    with pytest.raises(ShardError, match=r"TrainingSpec\.loss failed .*must not look at their values"):
        sw.plan(flux, ranks=2, training=sw.TrainingSpec(loss=looks))
    with pytest.raises(ShardError, match=r"plan doesn't know the inputs of FluxTransformer2DModel"):
        sw.plan(flux, ranks=2, training=sw.TrainingSpec())
    assert sw.plan(flux, ranks=2).run is None
