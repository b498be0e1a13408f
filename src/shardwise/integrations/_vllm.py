"""A backend of vLLM's weight transfer. Read at vLLM 0.32, run with 0.32 on CPUs (``make engines``).

``initialize_layerwise_reload``, ``finalize_layerwise_reload``: vLLM's own backends load weights of a checkpoint's format between these, and
each layer is then turned into what its kernels take. Without them, a layer that vLLM has packed or quantized couldn't be loaded again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from vllm.config import ModelConfig
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

from ..errors import StateError
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


class _Reload:
    """A model's ``load_weights``, as vLLM's own backends run it: it then turns weights into what its kernels take."""

    def __init__(self, model: Any, model_config: ModelConfig) -> None:
        self._model, self._model_config = model, model_config

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        found: object = self._model.load_weights(weights)
        return found

    @contextmanager
    def loading_session(self, is_recording: bool) -> Iterator[None]:
        # Nothing counts as loaded while parts are recorded. vLLM then puts back what was there, and warns of each layer.
        logger = logging.getLogger(layerwise.__name__)
        initialize_layerwise_reload(self._model)
        logger.disabled = is_recording
        try:
            yield
        finally:
            try:
                finalize_layerwise_reload(self._model, self._model_config)
            finally:
                logger.disabled = False


class TransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """In each worker: pulls the parts of tensors that the worker's own ``load_weights`` takes, proves them, and loads them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _receiver: WeightReceiver | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._receiver = WeightReceiver(
            _Reload(self.model, self.model_config),
            init_info.url,
            allow_unused=init_info.allow_unused,
            carry=init_info.carry,
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Nothing. The model stays as it is until all workers have everything."""

    def update_weights(self, update_info: dict[str, float]) -> None:
        """Pull the newest version, and load it. Without a newer one, the version that is on stays on."""
        if self._receiver is None:
            raise StateError("update_weights: call init_weight_transfer_engine first")
        self._receiver.pull(wait_s=self.parse_update_info(update_info).wait_s)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    receive_weights = update_weights

    def finish_weight_update(self) -> None:
        """Nothing. The version is on."""

    def shutdown(self) -> None:
        self._receiver = None
