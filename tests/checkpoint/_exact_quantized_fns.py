"""Kinds whose states or weights have few bits: the real optimizers and modules of torchao and bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.checkpoint._exact_matrix_fns import WIDTH, Kind, mlp, outcomes_of, sgd

#: Both keep states of fewer than 4,096 values in full.
HIDDEN = 128


def wide(middle: Callable[[], nn.Module] = lambda: nn.Linear(HIDDEN, HIDDEN)) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), middle(), nn.Tanh(), nn.Linear(HIDDEN, 3))


def torchao(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    def made(parameters: Any) -> torch.optim.Optimizer:
        import torchao.optim

        return getattr(torchao.optim, name)(list(parameters), lr=0.01)  # type: ignore[no-any-return]

    return made


def bitsandbytes(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    def made(parameters: Any) -> torch.optim.Optimizer:
        import bitsandbytes

        return getattr(bitsandbytes.optim, name)(list(parameters), lr=0.01)  # type: ignore[no-any-return]

    return made


def int8_weight_only() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = wide()
    quantize_(model[1], Int8WeightOnlyConfig())  # type: ignore[index]
    return model


def linear(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A layer of bitsandbytes; moving it to a device is what packs its weight."""

    def made() -> nn.Module:
        import bitsandbytes

        return getattr(bitsandbytes.nn, name)(HIDDEN, HIDDEN, **options).to("cpu")  # type: ignore[no-any-return]

    return lambda: wide(made)


def of_one_base(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """As in fine-tuning: every run packs the same weights."""

    def made() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return model()

    return made


def modules(make: Callable[[], nn.Module], expected: str = "exact", says: str = "") -> Kind:
    return Kind(make, sgd, expected, says)


KINDS: dict[str, Kind] = {
    "torchao AdamW8bit": Kind(wide, torchao("AdamW8bit")),
    "torchao AdamW4bit": Kind(wide, torchao("AdamW4bit")),
    "torchao AdamWFp8": Kind(wide, torchao("AdamWFp8")),
    "torchao AdamW8bit, small": Kind(mlp, torchao("AdamW8bit")),
    "torchao int8 weights": modules(int8_weight_only, "refused", "Tensor, a tensor subclass"),
    "bitsandbytes AdamW": Kind(wide, bitsandbytes("AdamW")),
    "bitsandbytes AdamW8bit": Kind(wide, bitsandbytes("AdamW8bit")),
    "bitsandbytes PagedAdamW8bit": Kind(wide, bitsandbytes("PagedAdamW8bit")),
    "bitsandbytes Lion8bit": Kind(wide, bitsandbytes("Lion8bit")),
    "bitsandbytes Linear8bitLt": modules(linear("Linear8bitLt", has_fp16_weights=False)),
    "bitsandbytes Linear4bit": modules(linear("Linear4bit"), "named", "model: 1.weight.absmax"),
    "bitsandbytes Linear4bit, same base": modules(of_one_base(linear("Linear4bit"))),
}

#: bitsandbytes' optimizers and its Linear8bitLt do not run on sharded parameters.
SHARDED: dict[str, Kind] = {
    name: Kind(**{**vars(KINDS[name]), "sharded": True})
    for name in (
        "torchao AdamW8bit", "torchao AdamW4bit", "torchao AdamWFp8", "torchao AdamW8bit, small", "bitsandbytes Linear4bit",
        "bitsandbytes Linear4bit, same base",
    )
}  # fmt: skip


def outcomes(root: str, names: list[str], sharded: bool) -> dict[str, dict[str, Any]]:
    """Of these kinds, in one launch, in eager mode: torchao compiles its steps, which takes longer than all the rest."""
    kinds = SHARDED if sharded else KINDS
    with torch.compiler.set_stance("force_eager"):
        return outcomes_of({name: kinds[name] for name in names}, root)
