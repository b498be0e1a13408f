"""Tiny runs of several kinds, their training, and what a restore must give back of each.

``write.py`` runs this with an earlier shardwise, ``tests/checkpoint/test_earlier_checkpoints.py`` with the present one. So it uses
only public names that both have, and describes state without shardwise's help.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import shardwise as sw

VOCAB = 19
SAMPLES, BATCH = 40, 6  # the last batch of an epoch is filled up; 2 and 3 ranks divide a batch
_SIZES = {
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 4,
}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(slots=True)
class Run:
    """A state in training, and the batches that it has not seen yet."""

    state: sw.TrainState
    mode: str
    """Of the Checkpointer: ``sync`` or ``async``."""
    batches: Iterator[torch.Tensor] | None = None

    def next_batch(self) -> torch.Tensor:
        """This rank's next batch, of this epoch or the next one."""
        while True:
            if self.batches is None:
                self.batches = iter(self.state.dataloader)
            for batch in self.batches:
                return batch
            self.batches = None


class Oddities(nn.Module):
    """Tied weights, 0-d, integer, boolean and frozen parameters, buffers, several dtypes, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(3, 7).to(torch.bfloat16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def get_extra_state(self) -> Any:
        """A value beside the tensors."""
        return {"calls": int(self.seen), "about": "odd"}

    def set_extra_state(self, state: Any) -> None:
        """Takes the value: ``seen`` is a buffer already."""
        self.about = state["about"]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embed(ids) + self.scale.float().sum(0)
        return self.head(self.norm(x)) * self.temperature


def _qwen(tied: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    import transformers

    config = transformers.Qwen3Config(
        **_IDS,
        **_SIZES,
        vocab_size=VOCAB,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        attention_dropout=0.1,
    )
    return transformers.Qwen3ForCausalLM(config).to(dtype)


def _moe() -> nn.Module:
    import transformers

    config = transformers.Qwen3MoeConfig(
        **_IDS,
        **_SIZES,
        vocab_size=VOCAB,
        num_key_value_heads=1,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # what PEFT and transformers warn each other about depends on their versions
        return peft.get_peft_model(_qwen(tied=False), config)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
    deep = {"params": [p for p in trained if p.ndim >= 2], "lr": 3e-3, "betas": (0.8, 0.99)}
    return torch.optim.AdamW([g for g in (deep, flat) if g["params"]], lr=1e-2, weight_decay=0.1)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, nesterov=True)


#: Kind of run → its model, its optimizer, and how it is saved.
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "dense": (lambda: _qwen(tied=False), _adamw, "sync"),
    "tied": (lambda: _qwen(tied=True, dtype=torch.bfloat16), _sgd, "async"),
    "experts": (_moe, _adamw, "async"),
    "lora": (_lora, _adamw, "sync"),
    "two": (Oddities, _adamw, "sync"),
    "parts": (lambda: _qwen(tied=True), _sgd, "sync"),
}
#: Steps before the save. ``tied`` is saved in the middle of an accumulation, ``parts`` by two hosts whose parts are merged.
STEPS = 3


def build(kind: str, seed: int) -> Run:
    """A new run, sharded over all ranks. Every rank must call it."""
    make, optimize, mode = KINDS[kind]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed)
    model = make()
    sw.shard(model, mesh)
    model.train()
    optimizer = optimize(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4, T_mult=2)
    samples = torch.randint(3, VOCAB, (SAMPLES, 5), generator=torch.Generator().manual_seed(7))
    sampler = sw.ElasticSampler(samples, global_batch_size=BATCH, seed=11)
    loader = sw.ResumableLoader(DataLoader(samples, batch_sampler=sampler))  # type: ignore[arg-type]
    models: Any = model
    optimizers: Any = optimizer
    if kind == "two":
        critic = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))
        sw.shard(critic, mesh)
        models, optimizers = {"actor": model, "critic": critic}, {"actor": optimizer, "critic": _sgd(critic)}
    state = sw.TrainState(
        model=models,
        optimizer=optimizers,
        scheduler=scheduler,
        dataloader=loader,
        scaler=torch.amp.GradScaler("cpu", init_scale=128.0),
        extra={"tokens": 0, "best": {"loss": None, "name": "none"}},
    )
    return Run(state, mode)


def scramble(seed: int) -> None:
    """Another state of every global generator, and another on each rank."""
    random.seed(seed + dist.get_rank())
    numpy.random.seed(seed + dist.get_rank())
    torch.manual_seed(1000 * seed + dist.get_rank())


def train(run: Run, steps: int, *, spare_gradients: bool = False) -> list[float]:
    """The losses of this rank. ``spare_gradients`` ends with a backward pass that no optimizer has used."""
    losses = []
    for _ in range(steps):
        losses.append(_backward(run))
        for optimizer in _named(run.state.optimizer, "optimizer").values():
            optimizer.step()
            optimizer.zero_grad()
        run.state.scheduler.step()
        run.state.extra["tokens"] += BATCH * 5
        run.state.extra["best"] = {"loss": 0.1 + 0.2, "name": f"after {run.state.extra['tokens']}"}
    if spare_gradients:
        losses.append(_backward(run))
    return losses


def _backward(run: Run) -> float:
    ids = run.next_batch()
    if "critic" not in (models := _named(run.state.model, "model")):
        loss = models["model"](input_ids=ids, labels=ids).loss
    else:
        logits, value = models["actor"](ids), models["critic"](ids.float())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) + value.square().mean()
    loss.backward()
    return float(loss.detach())


def _named(value: Any, name: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else {name: value}


def tensors(models: Any) -> dict[str, str]:
    """Digests of the whole content of parameters, buffers and gradients, by name. Every rank must call it."""
    found = {}
    for name, model in _named(models, "model").items():
        for key, parameter in model.named_parameters():
            found[f"{name} {key}"] = _digest(parameter)
            if parameter.grad is not None:
                found[f"{name} {key} gradient"] = _digest(parameter.grad)
        found |= {f"{name} {key}": _digest(buffer) for key, buffer in model.named_buffers()}
    return found


def content(run: Run) -> dict[str, Any]:
    """What every number of ranks must give back: digests of all tensors, and all settings. Every rank must call it."""
    state, found = run.state, tensors(run.state.model)
    names = {
        id(p): f"{m} {n}"
        for m, model in _named(state.model, "model").items()
        for n, p in model.named_parameters()
    }
    groups = {}
    for name, optimizer in _named(state.optimizer, "optimizer").items():
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                found[f"{name}: {names[id(parameter)]} {key}"] = _digest(value)
        groups[name] = [
            {k: repr(v) for k, v in group.items() if k != "params"}
            | {"params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
    return {
        "tensors": found,
        "groups": groups,
        "scheduler": repr(sorted(state.scheduler.state_dict().items())),
        "scaler": repr(sorted(state.scaler.state_dict().items())),
        "extra": repr(state.extra),
    }


def to_come(run: Run) -> dict[str, Any]:
    """What comes next: draws of this rank's generators, and the samples of all ranks for two batches. Uses them up."""
    draws = [random.random(), float(numpy.random.rand()), torch.rand(3).tolist()]
    samples = []
    for _ in range(2):
        blocks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(blocks, run.next_batch().tolist())
        samples += [sample for block in blocks for sample in block]
    return {"draws": draws, "samples": samples}


def _digest(value: Any) -> str:
    """Of dtype, shape and bytes of a whole tensor, or of a plain value."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    whole = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
    head = f"{whole.dtype} {list(whole.shape)} ".encode()
    return hashlib.sha256(head + whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[
        :16
    ]
