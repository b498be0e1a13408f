"""Lightning on two ranks: checkpoints that its own Trainer wrote, and the program of docs/migrate/lightning.md."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import shardwise as sw
from tests.docs.blocks import ROOT, blocks
from tests.examples._loops_fns import as_under_torchrun
from tests.harness.on_ranks import on_ranks
from tests.loading._load_fns import assert_same_shards, assert_same_whole

lightning = pytest.importorskip("lightning", reason="lightning is not installed")
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

PAGE = ROOT / "docs/migrate/lightning.md"
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "accelerator": "cpu",
}
#: The same batch at each step: the page's program doesn't store the data position.
DATA = [torch.arange(3, 11)] * 8


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without Lightning's own warnings, which tests would take for errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3Config(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
    folder = tmp_path_factory.mktemp("lightning") / "base"
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


class Finetune(lightning.LightningModule):
    """As without shardwise: ordinary, or each rank reads the whole model and shards it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
        self.register_buffer("seen", torch.arange(3.0))

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for block in self.model.model.layers:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-5)


@pytest.fixture(scope="module")
def ckpt(base: Path) -> Path:
    """Of a Trainer in one process."""
    with quietly():
        trainer = lightning.Trainer(**QUIET, devices=1, max_steps=2, default_root_dir=base.parent)
        trainer.fit(Finetune(str(base)), DataLoader(DATA, batch_size=2))
        trainer.save_checkpoint(base.parent / "last.ckpt")
    return base.parent / "last.ckpt"


@on_ranks(2)
def test_a_ckpt_file_into_a_sharded_module(base: Path, ckpt: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    theirs = Finetune.load_from_checkpoint(ckpt, map_location="cpu", weights_only=False)
    module = Finetune(str(base))
    sw.shard(module.model, mesh)
    sw.load(module, ckpt)
    assert_same_whole(module, theirs)
    model = sw.load_pretrained(base, mesh, dtype=torch.float32)
    assert not torch.equal(model.lm_head.weight.full_tensor(), theirs.model.lm_head.weight), "it was trained"
    sw.load(model, ckpt, names=lambda name: name.removeprefix("model."), allow_unused=("seen",))
    assert_same_whole(model, theirs.model)


def train(base: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Run the page's program in ``folder``, with two ranks; its names."""
    text = next(block.text for block in blocks(PAGE))
    for before, after in {
        "ModelParallelStrategy()": "ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), devices=2",
        "save_every=100": "save_every=2",
        "max_steps=1000": f"max_steps={steps}, **quiet",
        '"path/to/base"': "base",
    }.items():
        assert before in text
        text = text.replace(before, after)
    names = {"my_dataloader": DataLoader(DATA, batch_size=2), "base": base, "quiet": QUIET}
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder), as_under_torchrun(), quietly():
        exec(compile(text, str(PAGE), "exec"), names)
    return names


@on_ranks(2)
def test_the_page_with_two_ranks(base: Path, tmp_path: Path) -> None:
    """Its result is Lightning's own, bit for bit: also after a stop, and from the folder that Lightning saved."""
    whole = train(base, tmp_path / "whole", 4)["module"]
    train(base, tmp_path / "stopped", 2)
    stopped = train(base, tmp_path / "stopped", 2)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    with as_under_torchrun(), quietly():
        trainer = lightning.Trainer(
            strategy=strategy, devices=2, enable_checkpointing=False, max_steps=4, **QUIET
        )
        theirs = Finetune(str(base))
        trainer.fit(theirs, DataLoader(DATA, batch_size=2))
        trainer.save_checkpoint(tmp_path / "theirs.ckpt")
    for model in (whole.model, stopped["module"].model):
        assert_same_shards(model, theirs.model)
    step = sorted(p.name for p in (tmp_path / "stopped/runs/a").glob("step-*"))
    assert step == ["step-00000002", "step-00000004"]

    assert (tmp_path / "theirs.ckpt/.metadata").is_file()
    again = sw.load_pretrained(base, theirs.device_mesh["data_parallel"], dtype=torch.float32)
    sw.load(again, tmp_path / "theirs.ckpt", names=lambda n: n.removeprefix("model."), allow_unused=("seen",))
    assert_same_shards(again, theirs.model)
