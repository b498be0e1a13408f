"""What the ranks run in the tests of shard() and init_weights()."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.errors import ShardError
from shardwise.loading.initialize import init_weights
from shardwise.models.meta import meta_init
from shardwise.names import named_tensors
from shardwise.sharding.fsdp import ShardPolicy, describe_groups, shard
from tests.harness.versions import is_open

WIDTH = 8


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class TinyExperts(nn.Module):
    """All experts in one tensor; fp32 routing weights come in beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        assert routing.dtype is torch.float32
        return (torch.einsum("bd,edf->bef", x, self.weight) * routing[..., None]).sum(1).to(x.dtype)


class MoEBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.mix = nn.Linear(WIDTH, 3), TinyExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.mix(x, self.gate(x).float().softmax(-1))


class Net(nn.Module):
    """Embedding, blocks, norm, head; the head tied or not."""

    block: type[nn.Module] = Block

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.register_buffer("scale", torch.tensor(1.5), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MoENet(Net):
    block = MoEBlock


class Shared(nn.Module):
    """Two blocks that hold one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].up = self.blocks[0].up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Oddments(nn.Module):
    """Parameters that FSDP2 has trouble with."""

    def __init__(self, trainable: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(2.0), requires_grad=trainable)
        self.bias = nn.Parameter(torch.tensor(0.5), requires_grad=trainable)
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.temperature + self.bias + self.codes.sum()


class TwoDtypes(nn.Module):
    """A root that holds a parameter of another dtype than the layer in it."""

    def __init__(self, size: int, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.table = layer, nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.bfloat16()) + self.table[:4]


def _mesh(shape: tuple[int, ...] | None = None) -> DeviceMesh:
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        t.name: (t.tensor.full_tensor() if isinstance(t.tensor, DTensor) else t.tensor).detach().clone()
        for t in named_tensors(model)
    }


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    grads = {t.name: t.tensor.grad for t in named_tensors(model) if t.tensor.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def train_step_agrees(kind: str, tied: bool, shape: tuple[int, ...] | None) -> list[str]:
    """Loss and gradients of a sharded model are those of the plain one; returns its groups."""
    torch.manual_seed(0)
    model: nn.Module = {"net": Net, "moe": MoENet}[kind](tied)
    plain = copy.deepcopy(model)
    before = {n: p.clone() for n, p in _full(model).items()}
    assert shard(model, _mesh(shape)) is model
    groups = [n for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    assert sorted(groups) == sorted(g.name for g in describe_groups(plain))
    assert sorted(groups) == sorted(g.name for g in describe_groups(model)), "also of a sharded model"
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for name, value in _full(model).items():
        assert torch.equal(value, before[name]), name
    ids = torch.arange(10).reshape(2, 5) % 11
    for _ in range(2):
        loss = model(ids.flatten()).float().logsumexp(-1).mean()
        loss.backward()
    for _ in range(2):
        expected = plain(ids.flatten()).float().logsumexp(-1).mean()
        expected.backward()
    torch.testing.assert_close(loss, expected)
    mine, theirs = _gradients(model), _gradients(plain)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], msg=name)
    assert (model.head.weight is model.embed.weight) is tied
    return groups


def shared_layer_has_one_owner() -> list[str]:
    torch.manual_seed(0)
    model = Shared()
    plain = copy.deepcopy(model)
    shard(model, _mesh())
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    plain(x).sum().backward()
    for name, gradient in _gradients(plain).items():
        torch.testing.assert_close(_gradients(model)[name], gradient, msg=name)
    assert model.blocks[0].up.weight is model.blocks[2].up.weight
    return [n for n, m in model.named_modules() if isinstance(m, FSDPModule)]


def _refusal(model: nn.Module, mesh: DeviceMesh, policy: ShardPolicy | None = None) -> str:
    """The text of the ShardError; the model must be untouched after it."""
    try:
        shard(model, mesh, policy or ShardPolicy())
    except ShardError as error:
        assert not any(isinstance(m, FSDPModule) for m in model.modules())
        return str(error)
    raise AssertionError("not refused")


def refusals() -> dict[str, str]:
    mesh = _mesh()
    strided = nn.Linear(4, 4)
    strided.weight = nn.Parameter(torch.zeros(4, 4).T.contiguous().T)
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    with torch.device("meta"):
        large = TwoDtypes(17 * 2**20, nn.Linear(2**13, 2**13, dtype=torch.bfloat16))
    scalar = TwoDtypes(4, nn.Linear(4, 4, dtype=torch.bfloat16))
    scalar.register_parameter(
        "scale", nn.Parameter(distribute_tensor(torch.tensor(1.0), mesh, [Replicate()]))
    )
    scalar.register_parameter("phase", nn.Parameter(torch.tensor(1j)))
    only = nn.Module()
    only.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    return {
        "large": _refusal(large, mesh),
        "kinds": _refusal(scalar, mesh),
        "only": _refusal(only, mesh),
        "pattern": _refusal(Net(), mesh, ShardPolicy(exclude=("no.such.*", "embed.*"))),
        "class": _refusal(Net(), mesh, ShardPolicy(block_classes=("Block", "Blok"))),
        "list": _refusal(nn.ModuleList([nn.Linear(2, 2)]), mesh),
        "strided": _refusal(strided, mesh),
        "lazy": _refusal(lazy, mesh),
        "dim": _refusal(nn.Linear(5, 4), mesh, ShardPolicy(placement=lambda p: Shard(1))),
        "unnamed mesh": _refusal(Net(), DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(1, -1))),
    }


def sharded_twice() -> str:
    model = shard(Net(), _mesh())
    try:
        shard(model, _mesh())
    except ShardError as error:
        return str(error)
    raise AssertionError("not refused")


def scalars_and_integers(trainable: bool) -> dict[str, bool]:
    model = Oddments(trainable)
    plain = copy.deepcopy(model)
    policy = ShardPolicy() if is_open("integers") else ShardPolicy(exclude=("codes",))
    shard(model, _mesh(), policy)
    kinds = {n: isinstance(p, DTensor) for n, p in model.named_parameters()}
    x = torch.ones(2, WIDTH)
    losses = [each(x).square().mean() for each in (model, plain)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    mine, theirs = _gradients(model), _gradients(plain)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], msg=name)
    return kinds


def integers_refused() -> str:
    with pytest.raises(ShardError) as caught:
        shard(Oddments(trainable=True), _mesh())
    return str(caught.value)


def ignored_by_name() -> dict[str, bool]:
    model = shard(
        Oddments(trainable=True), _mesh(), ShardPolicy(exclude=("temperature", "bias", "lin.b*", "codes"))
    )
    kinds = {n: isinstance(p, DTensor) for n, p in model.named_parameters()}
    model(torch.ones(2, WIDTH)).sum().backward()
    return kinds


# ----------------------------------------------------------------------------------------------------
# init_weights


class Rules(nn.Module):
    """Ties, a rule that reaches into a child, several parameters in one module, uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)
        self.embed = nn.Embedding(7, 6, padding_idx=1)
        self.layers = nn.ModuleList(nn.Linear(6, 5 + i) for i in range(3))
        self.rnn = nn.LSTM(6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def tiny_config(kind: str) -> tuple[str, Any]:
    import transformers

    small = {"vocab_size": 31, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    body = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "llama":
        config = transformers.LlamaConfig(**small, **body, tie_word_embeddings=True)
        return "AutoModelForCausalLM", config
    if kind == "mixtral":
        moe = {"num_key_value_heads": 2, "num_local_experts": 3}
        return "AutoModelForCausalLM", transformers.MixtralConfig(**small, **body, **moe)
    if kind == "gpt2":
        ids = {k: v for k, v in small.items() if k != "pad_token_id"}
        return "AutoModelForCausalLM", transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, **ids)
    if kind == "t5":
        sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(**sizes, vocab_size=31, decoder_start_token_id=0)
        return "AutoModelForSeq2SeqLM", config
    assert kind == "mamba"
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 31}
    return "AutoModelForCausalLM", transformers.MambaConfig(**sizes)


def build(kind: str) -> nn.Module:
    if kind == "rules":
        return Rules()
    import transformers

    auto, config = tiny_config(kind)
    model: nn.Module = getattr(transformers, auto).from_config(config)
    return model


def initialized(kind: str, shape: tuple[int, ...] | None, seed: int) -> dict[str, torch.Tensor]:
    """The global values after init_weights() of a meta model; checks what must not change."""
    with meta_init():
        model = build(kind)
    shard(model, _mesh(shape), ShardPolicy(exclude=("*.bias",)) if kind == "rules" else ShardPolicy())
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    identities = [id(p) for p in model.parameters()]
    state = torch.get_rng_state()
    filled = init_weights(model, seed)
    assert torch.equal(torch.get_rng_state(), state)
    assert identities == [id(p) for p in model.parameters()]
    assert len(filled) == len(identities)
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    return {n: v for n, v in _full(model).items() if n in filled}


def initialized_in_part(kind: str, pattern: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Values before and after; everything starts as 7."""
    model = build(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    shard(model, _mesh())
    before = _full(model)
    init_weights(model, 0, only=[pattern])
    return before, _full(model)
