"""What the ranks of test_convert.py run, and the sources that are converted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.checkpoint._checkpointer_fns import failure


def save_qwen_moe(directory: str, *, seed: int = 5) -> None:
    """A tiny mixture of experts: stored one by one, fused in the module."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)


def save_tied(directory: str) -> None:
    """A tiny model whose head is its embedding."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def convert_on_ranks(source: str, path: str, options: dict[str, Any]) -> dict[str, Any]:
    return sw.convert(source, path, **options).to_json()


def failure_of_convert(source: str, path: str, options: dict[str, Any]) -> tuple[str, str]:
    return failure(lambda: sw.convert(source, path, **options))


def trained(source: str, rate: float = 1e-2) -> sw.TrainState:
    model = sw.load_pretrained(source, init_device_mesh("cpu", (dist.get_world_size(),)))
    return sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=rate))


def train(state: sw.TrainState, steps: int) -> list[float]:
    losses = []
    for k in range(steps):
        ids = torch.arange(8).reshape(2, 4) + k
        loss = state.models["model"](input_ids=ids, labels=ids).loss
        loss.backward()
        state.optimizers["optimizer"].step()
        state.optimizers["optimizer"].zero_grad()
        losses.append(float(loss.detach()))
    return losses


def dcp_saves(source: str, folder: str) -> dict[str, Any]:
    """A trained transformers model and its optimizer as torch's own examples store them; and what comes after."""
    state = trained(source)
    train(state, 2)
    model, optimizer = state.models["model"], state.optimizers["optimizer"]
    content = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save({**content, "step": 2}, checkpoint_id=folder)
    values = whole(model)
    return {"values": values, "losses": train(state, 3), "stored": sorted(content["model"])}


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in model.state_dict().items()
    }


def resumes(source: str, path: str) -> dict[str, Any]:
    """A Checkpointer's resume from a directory with a converted step; the losses after it."""
    state = trained(source, rate=9.0)
    with sw.Checkpointer(path) as checkpointer:
        report = checkpointer.resume(state)
        assert report is not None
        found = {"losses": train(state, 3), "report": report.to_json()}
        checkpointer.save(state, report.step + 1)
    return found


def saves_checkpoint(source: str, path: str) -> dict[str, Any]:
    state = trained(source)
    train(state, 2)
    sw.save(state, path, step=2)
    return {"digests": sw.digest(state.models["model"]), "losses": train(state, 3)}


def restores(source: str, path: str) -> dict[str, Any]:
    state = trained(source, rate=9.0)
    report = sw.restore(state, path)
    return {
        "digests": sw.digest(state.models["model"]),
        "losses": train(state, 3),
        "exact": report.exact,
        "differences": report.differences,
    }
