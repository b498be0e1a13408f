"""Ways to load a model, a file each. Every file has the same four names:

``NAME``           as tables show it.
``WHOLE``          True if the time includes building and sharding the model, because the peer does that itself.
``SHARDS``         Only where it is False: the ranks hold no shards that could be compared with ours.
``supports(case)`` None, or the reason why this peer can't load the case.
``prepare(case)``  does what is outside the time and returns a function, which does the load inside the time. That one
                   returns the filled model, or by parameter the bytes of its shard. Every rank calls both.

Peers use public functions of their packages alone. A peer whose package is not installed supports no case.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

__all__ = ["FLOORS", "FROM_STORES", "ON_CPU", "ON_DEVICES", "PEERS"]

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

#: Beside these, loads onto devices.
_FILES_ON_DEVICES = ("host_to_device", "load_file", "device_map")


def _peer(name: str) -> Any:
    try:
        return import_module(f"benchmarks.peers.{name}")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        reason = f"{error.name} is not installed" if missing else str(error)
        return SimpleNamespace(NAME=name.replace("_", " "), WHOLE=False, supports=lambda case: reason)


PEERS: dict[str, Any] = {name: _peer(name) for name in (*_FILES, *_FILES_ON_DEVICES)}
ON_CPU = _FILES
ON_DEVICES = (
    *("ours", "ours_whole", "plain_floor", *_FILES_ON_DEVICES),
    *("dcp", "transformers_native", "torch_broadcast", "safetensors_prefetch"),
)
#: From an object store (benchmarks/store.py).
FROM_STORES: dict[str, Any] = {
    name: _peer(f"store_{name}") for name in ("ours", "bare", "download", "s3_connector", "run_ai")
}
FLOORS = ("plain_floor", "huge_page_floor")
