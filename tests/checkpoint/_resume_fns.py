"""What the ranks run in the tests of resuming: build, train, save, build anew, resume, compare bits."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

import shardwise as sw
from shardwise.names import named_tensors

WIDTH = 10
VOCAB = 37
Bits = dict[str, tuple[torch.dtype, torch.Tensor]]


class Block(nn.Module):
    """Residual, with dropout. Sizes are uneven for 2 and for 3 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.relu(self.up(x))))


class Net(nn.Module):
    """Blocks, a head, a persistent buffer; and a tower that text alone never reaches (case 13)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.vision = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, pixels: torch.Tensor | None = None) -> torch.Tensor:
        self.seen += 1
        if pixels is not None:
            x = x + self.vision(pixels)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class MasterSGD(torch.optim.Optimizer):
    """SGD over an fp32 copy of low-precision parameters: state of another dtype than the parameter's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["master"], state["count"] = parameter.float(), 0
                state["count"] += 1
                state["master"].add_(parameter.grad.float(), alpha=-group["lr"])
                parameter.copy_(state["master"])


class EightBitSGD(torch.optim.Optimizer):
    """Momentum in eight bits with a scale, as bitsandbytes and torchao keep it: integer state shaped like its parameter."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.full_like(parameter, 128, dtype=torch.uint8)
                    state["scale"] = torch.tensor(1.0)
                momentum = (state["momentum"].float() - 128) * state["scale"] * 0.9 + parameter.grad
                state["momentum"].copy_((momentum * 50).clamp(-127, 127).round() + 128)
                state["scale"].fill_(1 / 50)
                parameter.add_(momentum, alpha=-group["lr"])


def groups(model: nn.Module, **special: Any) -> list[dict[str, Any]]:
    """Two groups; the one without weight decay has settings of its own."""
    flat = [p for p in model.parameters() if p.ndim < 2]
    deep = [p for p in model.parameters() if p.ndim >= 2]
    return [{"params": deep}, {"params": flat, "weight_decay": 0.0, **special}]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model, lr=3e-3, betas=(0.8, 0.99)), lr=1e-2, weight_decay=0.1)


def _amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), amsgrad=True, foreach=False)


def _adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(groups(model, lr=0.05), lr=0.1, initial_accumulator_value=0.1, lr_decay=0.01)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model, momentum=0.5, lr=0.03), lr=0.1, momentum=0.9, nesterov=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "amsgrad": _amsgrad,
    "adagrad": _adagrad,
    "sgd": _sgd,
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "foreach": lambda model: torch.optim.AdamW(groups(model, lr=3e-3), lr=1e-2, foreach=True),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-2),
    "radam": lambda model: torch.optim.RAdam(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(
        groups(model, lr=3e-3), lr=1e-2, momentum=0.9, centered=True
    ),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=1e-2, t0=2),
    "muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2),
    "eight bits": lambda model: EightBitSGD(model.parameters(), lr=1e-2),
    "master": lambda model: MasterSGD(model.parameters(), lr=0.1),
}


def build(optimizer: str, model_dir: str | None = None, *, seed: int = 1) -> sw.TrainState:
    """A whole run of new objects. From ``model_dir`` by load_pretrained, else the plain net by shard."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if model_dir is not None:
        model = sw.load_pretrained(model_dir, mesh, dtype=torch.float32)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Net().to(torch.bfloat16 if optimizer == "master" else torch.float32)
        sw.shard(model, mesh)
    model.train()
    made = OPTIMIZERS[optimizer](model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(made, T_0=4, T_mult=2)
    return sw.TrainState(model=model, optimizer=made, scheduler=scheduler, extra={"tokens": 0})


def scramble(seed: int) -> None:
    """Every global generator elsewhere than where the run left it; another stream on each rank."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(1000 * seed + dist.get_rank())


def train(state: sw.TrainState, steps: int) -> list[tuple[float, list[float]]]:
    """(loss, learning rates) of each step. The data are drawn from the global generators."""
    model, found = state.model, []
    dtype = next(model.parameters()).dtype
    assert state.optimizer is not None
    for _ in range(steps):
        if isinstance(model, Net):
            scale = random.random() + numpy.random.rand()
            x, labels = torch.randn(6, WIDTH).to(dtype), torch.randint(3, (6,))
            loss = nn.functional.cross_entropy(model(x * scale).float(), labels)
        else:
            ids = torch.randint(VOCAB, (2, 7))
            loss = model(input_ids=ids, labels=ids).loss
        rates = advance(state, loss)
        found.append((loss.item(), rates))
    state.extra["tokens"] += steps
    return found


def advance(state: sw.TrainState, loss: torch.Tensor) -> list[float]:
    """Backward, step, schedule; the learning rates that were used."""
    assert state.optimizer is not None
    loss.backward()
    rates = [float(g["lr"]) for g in state.optimizer.param_groups]
    state.optimizer.step()
    state.optimizer.zero_grad()
    if state.scheduler is not None:
        state.scheduler.step()
    return rates


def bits(state: sw.TrainState) -> Bits:
    """This rank's part of every parameter, buffer and optimizer tensor, and draws from the generators."""
    found = {}
    names = {}
    for t in named_tensors(state.model):
        names[id(t.tensor)] = t.name
        found[f"model {t.name}"] = _local(t.tensor)
    if state.optimizer is not None:
        for parameter, states in state.optimizer.state.items():
            for key, value in states.items():
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                found[f"optimizer {names[id(parameter)]} {key}"] = _local(tensor)
    return {name: (t.dtype, t.detach().clone()) for name, t in found.items()}


def draws() -> list[Any]:
    """One draw of each generator: equal if and only if the states are."""
    return [random.random(), float(numpy.random.rand()), torch.rand(3).tolist()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def assert_same_bits(found: Bits, expected: Bits) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, (dtype, tensor) in expected.items():
        assert found[name][0] is dtype, (name, found[name][0], dtype)
        assert torch.equal(found[name][1], tensor), name


def hyper(state: sw.TrainState) -> list[dict[str, Any]]:
    """The groups' settings without the parameters."""
    assert state.optimizer is not None
    return [{k: v for k, v in g.items() if k != "params"} for g in state.optimizer.param_groups]


# ------------------------------------------------------------------------------------- same world size


def resumed_equals_uninterrupted(root: str, optimizer: str, model_dir: str | None = None) -> dict[str, Any]:
    """Ten steps after a resume, against the ten of the run that went on."""
    scramble(3)
    first = build(optimizer, model_dir)
    train(first, 5)
    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(first, 5)
        at_save, settings = bits(first), str(hyper(first))
        expected = train(first, 10)
        last, drawn = bits(first), draws()

    scramble(77)
    second = build(optimizer, model_dir, seed=99)
    train(second, 2)  # state of its own, which must not shine through
    scramble(78)
    second = build(optimizer, model_dir, seed=99)
    before = {id(t.tensor) for t in named_tensors(second.model)}
    with sw.Checkpointer(root) as checkpoints:
        report = checkpoints.resume(second)
    assert report is not None
    assert before == {id(t.tensor) for t in named_tensors(second.model)}
    assert report.exact, report.differences
    assert (report.step, report.rng, report.damaged, report.superseded) == (5, "restored per rank", {}, ())
    assert_same_bits(bits(second), at_save)
    assert str(hyper(second)) == settings
    assert second.extra["tokens"] == 5
    assert train(second, 10) == expected
    assert_same_bits(bits(second), last)
    assert draws() == drawn
    return {"tensors": report.tensors, "optimizer": report.optimizer_tensors, "loss": expected[-1][0]}


# ------------------------------------------------------------------------------------ other world sizes


def global_digests(state: sw.TrainState) -> dict[str, str]:
    """Digests of the global content of parameters, buffers and moments."""
    found = sw.digest(state.model)
    assert isinstance(found, dict)
    assert state.optimizer is not None
    names = {id(t.tensor): t.name for t in named_tensors(state.model)}
    parameters = [p for g in state.optimizer.param_groups for p in g["params"]]
    for parameter in parameters:
        for key, value in state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{names[id(parameter)]} {key}"] = str(sw.digest(value))
    return found


def next_stage(
    root: str, step: int, model_dir: str | None, optimizer: str, train_on: bool
) -> tuple[Any, dict[str, str], dict[str, str], list[dict[str, Any]]]:
    """Resume with new objects (if there is anything), train one step, save. Digests after resume and at save."""
    scramble(step + 1)
    state = build(optimizer, model_dir, seed=step)
    with sw.Checkpointer(root) as checkpoints:
        report = checkpoints.resume(state)
        resumed = global_digests(state)
        settings = hyper(state)
        train(state, 1 if train_on else 0)
        checkpoints.save(state, step)
    return report.to_json() if report else None, resumed, global_digests(state), settings


# ------------------------------------------------------------------------------------------ data position


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Samples that are augmented by the generators of whoever reads them."""

    def __len__(self) -> int:
        return 34

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(WIDTH) + random.random() + float(numpy.random.rand())
        return torch.full((WIDTH,), index / 34) + 0.1 * noise, index


# ------------------------------------------------------------------------------------------- model folders


def save_tiny_model(directory: str, kind: str) -> None:
    """A tiny transformers model with dropout, as ``save_pretrained`` writes it. Rank 0 only."""
    import transformers

    if dist.is_initialized() and dist.get_rank():
        return
    torch.manual_seed(21)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        sizes = {"n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": VOCAB}
        config: Any = transformers.GPT2Config(**sizes, **ids, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)
    else:
        assert kind == "llama"
        sizes = {"hidden_size": 12, "intermediate_size": 22, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(**sizes, vocab_size=VOCAB, attention_dropout=0.1, **ids)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    Path(directory, "tokenizer_config.json").write_text("{}\n")


def listing(root: str) -> list[str]:
    """What lies in a checkpoint root, the lock and the hint left out."""
    return sorted(n for n in os.listdir(root) if n not in (".lock", "latest"))
