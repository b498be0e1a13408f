"""Weights for SGLang from a :class:`~shardwise.handover.WeightSender`, as a custom weight loader. Read at SGLang 0.5.23; not run with it.

Start SGLang with ``custom_weight_loader=["shardwise.integrations.sglang.pull"]``, and then, for each version::

    engine.update_weights_from_tensor(request(url, wait_s=60), load_format="shardwise.integrations.sglang.pull")
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..handover.receiver import WeightReceiver

__all__ = ["pull", "request"]

#: Of each model in this process: the sender that it was asked to pull from, and its receiver.
_RECEIVERS: WeakKeyDictionary[Any, tuple[str, WeightReceiver]] = WeakKeyDictionary()


def request(url: str, *, wait_s: float = 0.0) -> list[tuple[str, torch.Tensor]]:
    """What to give to ``update_weights_from_tensor``: a sender's ``url``, and how long to wait for a version newer than the one that is on.

    SGLang hands tensors alone to its workers, so the text is bytes of one.
    """
    content = json.dumps({"url": url, "wait_s": wait_s}).encode()
    return [("shardwise", torch.frombuffer(bytearray(content), dtype=torch.uint8))]


def pull(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """In each worker: pull the parts of tensors that the worker's own ``load_weights`` takes, prove them, and load them.

    SGLang calls it with its model and what :func:`request` made. Raises as :meth:`WeightReceiver.pull`.
    """
    ((_, content),) = named_tensors
    asked = json.loads(bytes(content.cpu().numpy()))
    url, receiver = _RECEIVERS.get(model, ("", None))
    if receiver is None or url != asked["url"]:
        receiver = WeightReceiver(model.load_weights, asked["url"])
        _RECEIVERS[model] = asked["url"], receiver
    receiver.pull(wait_s=asked["wait_s"])
