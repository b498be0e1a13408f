"""Models with parameters that FSDP2 can't shard, or not together with the others; and a loss for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Block(nn.Module):
    """Parameters without dims, one of them held by all blocks; run once more in backward if asked to."""

    def __init__(self, shared: nn.Parameter, again: bool | None = None) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shared = shared
        self.again = again

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.lin(x) * self.scale + self.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.again)  # type: ignore[no-any-return]


class Net(nn.Module):
    """0-d parameters in blocks and at the root, which in bf16 also holds some of fp32 itself."""

    def __init__(self, dtype: torch.dtype = torch.float32, again: bool | None = None) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        shared = nn.Parameter(torch.tensor(0.25))
        self.blocks = nn.ModuleList(Block(shared, again) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.tensor(3.0))
        self.to(dtype)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x.to(self.enter.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return x * self.gain * self.temperature


class Convolution(nn.Module):
    """Takes the weight of its convolution without calling it, beside parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False, dtype=torch.float32)
        self.decay = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float32))
        self.offset = nn.Parameter(torch.full((WIDTH,), 0.1, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.full((WIDTH,), 0.3, dtype=torch.float64))
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.conv1d(x.float().T[None], self.conv.weight, padding=1)[0].T * self.decay
        return self.inner(x.double() * self.wide) + self.offset


class Caller(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class DtypeBlock(nn.Module):
    """bf16, with a container that is not called and a layer that two modules call, both of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, 8 * WIDTH, dtype=torch.bfloat16)
        self.back = nn.Linear(8 * WIDTH, WIDTH, dtype=torch.bfloat16)
        self.mix = Convolution()
        self.listed = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.left = Caller(nn.Linear(WIDTH, WIDTH))
        self.right = Caller(self.left.layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(self.back(self.lin(x))).float()
        for layer in self.listed:
            y = layer(y)
        y = self.right(self.left(y))
        return x + y.to(x.dtype)


class Dtypes(nn.Module):
    """Three dtypes in one block, two of them in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DtypeBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16()
        for block in self.blocks:
            x = block(x)
        return x


class Beside(nn.Module):
    """fp32 that is sharded, and fp32 that the root holds itself, in a model of bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH, dtype=torch.bfloat16)
        self.narrow = nn.Linear(4 * WIDTH, 2)
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x.bfloat16()).float()) * self.gain


class Lonely(nn.Module):
    """A 0-d parameter of a dtype that no other has."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.scale


def clip() -> Any:
    import transformers

    body = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        "vocab_size": 31,
        "max_position_embeddings": 8,
        "eos_token_id": 2,
        "bos_token_id": 0,
        "pad_token_id": 1,
    }
    config = transformers.CLIPConfig(
        text_config=body | text, vision_config=body | {"image_size": 8, "patch_size": 4}, projection_dim=8
    )
    return transformers.CLIPModel(config)


def olmo_hybrid() -> nn.Module:
    """bf16 beside ``A_log`` in fp32, as ``from_pretrained`` gives it."""
    import transformers

    config = transformers.OlmoHybridConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        pad_token_id=0,
        eos_token_id=2,
    )
    model: nn.Module = transformers.OlmoHybridForCausalLM._from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data = parameter.data.float()
    return model


def dinov3() -> nn.Module:
    """Without register tokens: a parameter of no elements."""
    import transformers

    config = transformers.DINOv3ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        num_register_tokens=0,
    )
    return transformers.DINOv3ViTModel(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "clip": clip,
    "olmo_hybrid": olmo_hybrid,
    "dinov3": dinov3,
    "net": Net,
    "bf16 net": lambda: Net(torch.bfloat16),
    "run again": lambda: Net(again=False),
    "run again, reentrant": lambda: Net(again=True),
    "dtypes": Dtypes,
    "beside": Beside,
    "lonely": Lonely,
}


def loss_of(kind: str, model: nn.Module, seed: int) -> torch.Tensor:
    """The loss on a batch that the seed gives."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(3, 3, 8, 8, generator=generator)
    ids = torch.randint(3, 31, (3, 6), generator=generator)
    if kind == "clip":
        ids[:, -1] = 2
        return model(input_ids=ids, pixel_values=images, return_loss=True).loss  # type: ignore[no-any-return]
    if kind == "olmo_hybrid":
        return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]
    if kind == "dinov3":
        return model(pixel_values=images).last_hidden_state.square().mean()  # type: ignore[no-any-return]
    x = torch.randn(5, WIDTH, generator=generator, requires_grad=True)
    return (model(x).float() - 1).square().mean()
