"""A backend of vLLM's weight transfer. Read at vLLM 0.32, run with 0.32 on CPUs (``make engines``).

``initialize_layerwise_reload``, ``finalize_layerwise_reload``: vLLM's own backends load weights of a checkpoint's format between these, and
each layer is then turned into what its kernels take. Without them, a layer that vLLM has packed or quantized couldn't be loaded again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)

from ..handover.receiver import WeightReceiver

__all__ = ["InitInfo", "TransferEngine", "UpdateInfo"]


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM isn't installed where types are checked
    """For ``init_weight_transfer_engine``: arguments of :class:`WeightReceiver`."""

    url: str
    allow_unused: list[str] = field(default_factory=list)
    carry: Literal["auto", "tcp", "memory"] = "auto"
    timeout_s: float = 300.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """For ``update_weights``: how long to wait for a version newer than the one that is on."""

    wait_s: float = 0.0


class TransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """In each worker: pulls the parts of tensors that the worker's own ``load_weights`` takes, proves them, and loads them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._has_run = False
        self._receiver = WeightReceiver(
            self._load,
            init_info.url,
            allow_unused=init_info.allow_unused,
            carry=init_info.carry,
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Nothing. The model stays as it is until all workers have everything."""

    def update_weights(self, update_info: dict[str, float]) -> None:
        """Pull the newest version, and load it. Without a newer one, the version that is on stays on."""
        self._receiver.pull(wait_s=self.parse_update_info(update_info).wait_s)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    receive_weights = update_weights

    def finish_weight_update(self) -> None:
        """Nothing. The version is on."""

    def shutdown(self) -> None:
        del self._receiver

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        # The first run counts nothing as loaded, and vLLM warns of each layer.
        logger = logging.getLogger(layerwise.__name__)
        logger.disabled = not self._has_run
        self._has_run = True
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(weights)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
            logger.disabled = False
