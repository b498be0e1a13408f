"""What the ranks of test_lightning.py run: Lightning's own writer of sharded checkpoints, and our restores of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.model_parallel import _save_checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.runs._third_party_fns import run_of, train


class Lit(nn.Module):
    """A module around the model, as a LightningModule is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    def full(t: Any) -> Any:
        return getattr(t, "full_tensor", lambda: t)().detach().clone()

    values = {n: full(t) for n, t in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        values |= {f"{name}.{k}": full(v) for k, v in optimizer.state[parameter].items()}
    return values


def lightning_saves(folder: str, program: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """``fabric.save`` of a model and an optimizer, or the state that the Trainer's ModelParallelStrategy hands to the same writer."""
    state = run_of(0)
    train(state, 0, 3)
    model, optimizer = state.models["model"], state.optimizers["optimizer"]
    if program == "fabric":
        content = {
            "model": model,
            "optimizer": optimizer,
            "iter_num": 3,
            "hparams": argparse.Namespace(rate=1),
        }
    else:
        content = {
            "state_dict": Lit(model),
            "optimizer_0": optimizer,
            "epoch": 0,
            "global_step": 3,
            "pytorch-lightning_version": "2.6.6",
            "callbacks": {"timer": torch.zeros(2)},
            "lr_schedulers": [state.scheduler.state_dict()],
            "hyper_parameters": argparse.Namespace(rate=1),
        }
    _save_checkpoint(Path(folder), content, full_state_dict=False, rank=dist.get_rank())
    dist.barrier()
    return moments(model, optimizer), train(state, 3, 4)


def goes_on(folder: str, program: str) -> dict[str, Any]:
    state = run_of(7, rate=1.0)
    model, optimizer = state.models["model"], state.optimizers["optimizer"]
    wrapped: nn.Module = model if program == "fabric" else Lit(model)
    scheduler = {} if program == "fabric" else {"scheduler": state.scheduler}
    report = sw.restore(sw.TrainState(model=wrapped, optimizer=optimizer, **scheduler), folder)
    found = {"report": report, "values": moments(model, optimizer)}
    return found | {"losses": train(state, 3, 4) if scheduler else []}


def lightning_module_saves(path: str, folder: str) -> dict[str, torch.Tensor]:
    """A LightningModule that has a transformers model in an attribute: the tensors of that, and its moments."""
    from lightning.pytorch import LightningModule
    from transformers import AutoModelForCausalLM

    class Finetune(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            self.register_buffer("seen", torch.zeros(3))

    module = Finetune()
    fully_shard(module.model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module.model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    content = {"state_dict": module, "optimizer_0": optimizer, "global_step": 1, "lr_schedulers": []}
    _save_checkpoint(Path(folder), content, full_state_dict=False, rank=dist.get_rank())
    return moments(module.model, optimizer)


def asks_for_a_second(folder: str) -> str:
    state = run_of(1)
    model = Lit(state.models["model"])
    both = {"first": state.optimizers["optimizer"], "second": torch.optim.SGD(model.parameters())}
    try:
        sw.restore(sw.TrainState(model=model, optimizer=both), folder)
    except ShardwiseError as error:
        return str(error)
    return "restored"
