"""Initial values of LoRA adapters, by PEFT's own rules.

``lora_A`` and ``lora_B`` come from ``reset_lora_parameters``, which runs on a meta copy of the model like any other
rule (see :mod:`..models.rules`). DoRA's magnitudes are the norms of the *loaded* base weights, because ``B`` is zero
at first. They are computed last, from this rank's rows if it holds whole rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ..internals.peft import adapter_configs, lora_layers
from ..internals.torch import local_tensor
from ..layout.boxes import LocalBox
from ..models.rules import Rule
from ..names import children, own_parameter
from ..objects import frozen

__all__ = ["SEEDED_INITS", "Magnitude", "adapter_rules", "magnitudes", "without_rule"]

#: Values of ``init_lora_weights`` whose rule only draws, without looking at weights or data.
SEEDED_INITS = (True, "gaussian")

#: Rows of a weight whose norms are computed at a time.
_ROWS = 256


def adapter_rules(model: nn.Module) -> Iterator[Rule]:
    """PEFT's call for each layer and adapter of a model (or of a meta copy) whose rule can be repeated."""
    configs = adapter_configs(model)
    for _, layer in lora_layers(model):
        for adapter in layer.scaling:
            rule = configs[adapter].init_lora_weights
            if rule in SEEDED_INITS:
                yield Rule(layer, partial(layer.reset_lora_parameters, adapter, rule))


def without_rule(model: nn.Module) -> dict[int, str]:
    """Parameters, by id, of adapters whose rule can't be repeated, each with the reason."""
    found: dict[int, str] = {}
    for adapter, config in adapter_configs(model).items():
        rule = getattr(config, "init_lora_weights", None)
        if rule not in SEEDED_INITS:
            reason = (
                f"init_lora_weights={rule!r} of adapter {adapter!r} has no rule that gives the same values at every "
                f"world size; load it from a directory"
            )
            for _, layer in lora_layers(model):
                found |= dict.fromkeys(map(id, _own(layer, adapter)), reason)
    return found


def _own(layer: Any, adapter: str) -> Iterator[nn.Parameter]:
    """What an adapter adds to a layer."""
    for name, container in children(layer):
        if name == "base_layer":
            continue
        held = dict(children(container)).get(adapter)
        parameter = own_parameter(container, adapter)
        if held is not None:
            yield from held.parameters()
        elif parameter is not None:
            yield parameter


# ----------------------------------------------------------------------------------------------------
# DoRA


@frozen
class Magnitude:
    """The magnitudes of one layer and adapter, and the weight whose norms are their initial values."""

    dora: Any
    layer: Any
    adapter: str

    @property
    def drawn_with(self) -> torch.Tensor:
        """The parameter ``B``, which has to be zero for the weight's norms to be the magnitudes."""
        linear: Any = dict(children(self.layer.lora_B)).get(self.adapter)
        found: torch.Tensor = self.layer.lora_embedding_A[self.adapter] if linear is None else linear.weight
        return found

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter to fill."""
        found: torch.Tensor = self.dora.weight
        return found

    def fill(self, boxes: tuple[LocalBox, ...]) -> None:
        """Write this rank's part of the norms.

        Memory: a block of rows. If a norm includes other ranks' elements (a transposed weight, a convolution, another
        sharding), the whole weight: it is gathered over its mesh, and every rank must call this.
        """
        weight: torch.Tensor = self.layer.get_base_layer().weight
        with torch.no_grad():
            if self._rows_are_local(weight):
                local_tensor(self.tensor).copy_(self._norms_by_row(local_tensor(weight)))
                return
            full = weight.full_tensor() if isinstance(weight, DTensor) else weight
            norms = self._norms(full)
            for local in boxes:
                local_tensor(self.tensor)[local.slices].copy_(norms[local.box.slices])

    def _norms(self, weight: torch.Tensor) -> torch.Tensor:
        norms: torch.Tensor = self.dora.get_weight_norm(weight, weight.new_zeros(()), 0.0)
        return norms

    def _norms_by_row(self, weight: torch.Tensor) -> torch.Tensor:
        """Norms in blocks of one fixed shape: a kernel's order of summation may depend on the shape."""
        block = weight.new_zeros((_ROWS, weight.shape[1]))
        norms = weight.new_empty(weight.shape[:1])
        for begin in range(0, weight.shape[0], _ROWS):
            rows = weight[begin : begin + _ROWS]
            block[: len(rows)].copy_(rows)
            norms[begin : begin + _ROWS].copy_(self._norms(block)[: len(rows)])
        return norms

    def _rows_are_local(self, weight: torch.Tensor) -> bool:
        """Whether each rank holds whole rows for its magnitudes. The same on every rank."""
        target = self.tensor
        if self.dora.fan_in_fan_out or weight.ndim != 2 or target.ndim != 1:
            return False
        if not isinstance(weight, DTensor) or not isinstance(target, DTensor):
            return not isinstance(weight, DTensor) and not isinstance(target, DTensor)
        # Cut along dim 0 in the same way, both have the same rows on this rank.
        by_rows = all(isinstance(p, Replicate) or getattr(p, "dim", None) == 0 for p in weight.placements)
        return by_rows and (weight.device_mesh, weight.placements) == (target.device_mesh, target.placements)


def magnitudes(model: nn.Module) -> dict[int, Magnitude]:
    """Every magnitude parameter of a live model, by id."""
    return {
        id(dora.weight): Magnitude(dora, layer, adapter)
        for _, layer in lora_layers(model)
        for adapter, dora in layer.lora_magnitude_vector.items()
    }
