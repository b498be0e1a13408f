"""Ways to load a model, a file each. Every file has the same four names:

``NAME``           as tables show it.
``WHOLE``          True if the time includes building and sharding the model, because the peer does that itself.
``supports(case)`` None, or the reason why this peer can't load the case.
``prepare(case)``  does what is outside the time and returns a function, which does the load inside the time. That one
                   returns the filled model, or by parameter the bytes of its shard. Every rank calls both.

Peers use public functions of their packages alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["FLOORS", "PEERS"]

#: Ours first: the other peers are compared with them.
_FILES = (
    "ours",
    "ours_whole",
    "plain_floor",
    "huge_page_floor",
    "dcp",
    "transformers_native",
    "torch_broadcast",
    "accelerate_broadcast",
    "safetensors_prefetch",
)

PEERS: dict[str, Any] = {name: import_module(f"benchmarks.peers.{name}") for name in _FILES}
FLOORS = ("plain_floor", "huge_page_floor")
