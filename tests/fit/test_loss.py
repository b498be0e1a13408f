"""A training step of models that don't read text: the caller's forward pass, run with tensors without data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
import torch.distributed as dist
import transformers
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
QWEN = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 6,
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "joint_attention_dim": 256,
    "axes_dims_rope": (16, 24, 24),
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


def qwen_loss(model: Any, batch: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    found = model(
        hidden_states=torch.randn(batch, 256, 64, dtype=dtype),
        encoder_hidden_states=torch.randn(batch, 32, 256, dtype=dtype),
        encoder_hidden_states_mask=None,
        timestep=torch.rand(batch, dtype=dtype),
        img_shapes=[[(1, 16, 16)]] * batch,
    ).sample
    return nn.functional.mse_loss(found.float(), torch.randn(batch, 256, 64))


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
    "long flux": (diffusers.FluxTransformer2DModel, FLUX | {"num_single_layers": 12}, flux_loss),
    "qwen-image": (diffusers.QwenImageTransformer2DModel, QWEN, qwen_loss),
    "unet": (diffusers.UNet2DConditionModel, UNET, unet_loss),
}


def tracked(kind: str, ranks: int, training: sw.TrainingSpec) -> int:
    """Peak bytes of a step without the parameters, by ``FSDPMemTracker`` under fake tensors.

    Its hooks keep the gradients of a module's inputs until all are there. Blocks of these models share an input, whose gradient is there
    at the end: so the hooks may fire at the first.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools import mod_tracker
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    at_the_first = partial(mod_tracker.register_multi_grad_hook, mode="any")
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
            with (
                tracker,
                mock.patch.object(mod_tracker, "register_multi_grad_hook", at_the_first),
                warnings.catch_warnings(),
            ):
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
        ("qwen-image", 1, False),
        *nightly_rows(
            ("flux", 4, True),
            ("long flux", 1, True),
            ("long flux", 4, True),
            ("qwen-image", 2, True),
            ("wan", 2, False),
            ("unet", 2, False),
        ),
    ],
)
def test_steps_of_diffusers_models_take_what_torch_tracks(kind: str, batch: int, checkpointing: bool) -> None:
    made, config, loss = KINDS[kind]
    training = sw.TrainingSpec(batch_size=batch, checkpointing=checkpointing, loss=loss)
    with sw.meta_init():
        model = made(**config)
    step = step_of(model.to(torch.bfloat16), sw.ShardPolicy(), 4, training)
    assert step.peak.total_bytes == pytest.approx(tracked(kind, 4, training), rel=0.07)


class Halving(nn.Module):
    """Blocks of one class, each of which returns what has half the length."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv1d(64, 64, 2, stride=2, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class InTurns(nn.Module):
    """Blocks of one class that run in another order, and with two lengths."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.order = order

    def forward(self, x: torch.Tensor) -> Any:
        for k in self.order:
            x = self.blocks[k](x[:, : -1 if k == 2 else None])
        return x


@pytest.mark.parametrize("made", [Halving, lambda: InTurns((0, 1, 2, 3)), lambda: InTurns((3, 2, 1, 0))])
def test_blocks_that_only_look_alike_run_each(made: Callable[[], nn.Module]) -> None:
    with sw.meta_init():
        model = made()
    policy = sw.ShardPolicy(block_classes=(type(model.blocks[0]).__name__,))

    def loss(model: nn.Module, batch: int) -> torch.Tensor:
        x: torch.Tensor = model(torch.randn(batch, 64, 64))
        return x.sum()

    step = step_of(model, policy, 2, sw.TrainingSpec(loss=loss))
    blocks = len(model.blocks)
    assert f"{blocks} of {blocks} blocks run" in step.formula


def test_a_block_with_a_residual_in_another_dtype_is_measured() -> None:
    """Mamba adds in fp32, so its block returns another dtype than it gets."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 3}
    with sw.meta_init():
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    step = step_of(model.to(torch.bfloat16), sw.ShardPolicy(), 2, sw.TrainingSpec(sequence_length=16))
    assert step.formula.startswith("measured with fake tensors")
    assert step.error < 1


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


def looks(model: Any, batch: int) -> torch.Tensor:
    loss = flux_loss(model, batch)
    return loss if loss.item() > 0 else -loss


def on_meta(model: Any, batch: int) -> torch.Tensor:
    return flux_loss(model, batch) + torch.ones(3, device="meta")


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (looks, r"DataDependentOutputException: .*Neither it nor the model may look at values"),
        (on_meta, r"on device|same device|expected a loss|devices"),
        (lambda model, batch: None, "it returned NoneType; expected a loss: one number that has a gradient"),
        (lambda model, batch: torch.ones(2, 3), r"it returned a tensor \[2, 3\] without a gradient"),
    ],
)
def test_what_a_loss_must_not_do_is_named(flux: Path, loss: Any, text: str) -> None:
    with pytest.raises(ShardError, match=rf"TrainingSpec\.loss failed .*({text})"):
        sw.plan(flux, ranks=2, training=sw.TrainingSpec(loss=loss))


def test_a_run_whose_inputs_are_not_known(flux: Path) -> None:
    with pytest.raises(ShardError, match=r"plan doesn't know the inputs of FluxTransformer2DModel"):
        sw.plan(flux, ranks=2, training=sw.TrainingSpec())
    assert sw.plan(flux, ranks=2).run is None
    with pytest.raises(TypeError, match="loss must be a function"):
        sw.TrainingSpec(loss=3)  # type: ignore[arg-type]


def test_checkpointing_that_a_model_has_not() -> None:
    with sw.meta_init():
        model = Halving()
    training = sw.TrainingSpec(
        loss=lambda model, batch: model(torch.randn(batch, 64, 64)).sum(), checkpointing=True
    )
    with pytest.raises(ShardError, match="Halving has no method that turns on checkpointing"):
        step_of(model, sw.ShardPolicy(), 2, training)
