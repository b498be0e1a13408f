"""The random generators of a process: capture, restore, derive.

These are Python's ``random``, numpy's global generator, torch's CPU generator, and the default generator of
every device of an accelerator that is in use. Generators that a program made itself are not among them.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from ..errors import StateError

__all__ = ["capture_host_rng", "capture_rng", "derive_rng", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """The state of every global generator of this process, in values that typed JSON can hold.

    Draws nothing and does not initialise an accelerator: an accelerator that is not in use is left out.
    Raises :class:`StateError` if numpy's global generator was replaced by one that is no Mersenne twister.
    """
    return {**capture_host_rng(), "accelerator": _capture_accelerator()}


def capture_host_rng() -> dict[str, Any]:
    """As :func:`capture_rng`, without accelerators. :func:`restore_rng` takes it as well."""
    version, words, gauss_next = random.getstate()
    name, keys, position, has_gauss, cached_gauss = np.random.get_state(legacy=True)
    if name != "MT19937":
        raise StateError(
            f"numpy's global generator is a {name}, whose state can't be stored; expected MT19937. "
            "Give your own numpy generator to the state as an extra, and leave the global one as it is"
        )
    return {
        "python": {"version": version, "words": _pack(words), "gauss_next": gauss_next},
        "numpy": {
            "words": _pack(keys),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gauss": float(cached_gauss),
        },
        "torch": torch.get_rng_state(),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Give every generator the state that :func:`capture_rng` found. Do it last when resuming.

    Devices of an accelerator that is not in use yet get their state when it is first used; devices that
    ``state`` does not name keep theirs. Raises :class:`StateError`, before anything is changed, if ``state``
    is not such a capture or names another accelerator or number of devices than this process has.
    """
    accelerator = state.get("accelerator")
    module = _module_for(accelerator) if accelerator else None
    try:
        python, numpy = state["python"], state["numpy"]
        words = _unpack(python["words"])
        keys = np.array(_unpack(numpy["words"]), dtype=np.uint32)
        gauss = (numpy["position"], numpy["has_gauss"], numpy["cached_gauss"])
        python_state = (python["version"], tuple(words), python["gauss_next"])
        random.Random().setstate(python_state)  # a trial, so that a bad state changes nothing below
        np.random.RandomState().set_state(("MT19937", keys, *gauss))
        torch.Generator().set_state(state["torch"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"this is no captured state of random generators: {error!r}") from error
    random.setstate(python_state)
    np.random.set_state(("MT19937", keys, *gauss))
    torch.set_rng_state(state["torch"])
    if accelerator and module:
        for index, device_state in enumerate(accelerator["devices"]):
            module.set_rng_state(device_state, torch.device(accelerator["type"], index))


def derive_rng(*, seed: int, step: int, rank: int) -> str:
    """Seed every global generator from (``seed``, ``step``, ``rank``), and say by which rule, in one line.

    This is the rule for going on at another world size, where no captured state fits. Equal input gives
    equal draws on every machine. Accelerators are seeded too, without being initialised. Ranks that must
    draw alike, such as tensor-parallel peers, pass the same number as ``rank``.
    """
    for name, value in (("seed", seed), ("step", step), ("rank", rank)):
        if not isinstance(value, int):
            raise StateError(f"{name} must be an integer to derive random generators, got {value!r}")
    numpy_seed = np.frombuffer(_derive(seed, step, rank, "numpy"), dtype="<u4")
    random.seed(int.from_bytes(_derive(seed, step, rank, "python"), "little"))
    np.random.seed(numpy_seed)
    torch.manual_seed(int.from_bytes(_derive(seed, step, rank, "torch")[:8], "little") >> 1)
    return f"random generators derived by blake2b from (seed {seed}, step {step}, rank {rank})"


def _derive(seed: int, step: int, rank: int, generator: str) -> bytes:
    text = f"shardwise-rng-1:{seed}:{step}:{rank}:{generator}"
    return hashlib.blake2b(text.encode("ascii"), digest_size=32).digest()


def _pack(words: Any) -> torch.Tensor:
    content = np.asarray(words, dtype="<u4").tobytes()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _unpack(packed: torch.Tensor) -> list[int]:
    words: list[int] = np.frombuffer(packed.numpy().tobytes(), dtype="<u4").tolist()
    return words


def _capture_accelerator() -> dict[str, Any] | None:
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module: Any = torch.get_device_module(device)
    # Asking a device for its state initialises it; a module that can't tell is asked only if it is there.
    in_use = getattr(module, "is_initialized", torch.accelerator.is_available)
    if not in_use():
        return None
    count = torch.accelerator.device_count()
    states = [module.get_rng_state(torch.device(device.type, index)).cpu() for index in range(count)]
    return {"type": device.type, "devices": states}


def _module_for(stored: dict[str, Any]) -> Any:
    device = torch.accelerator.current_accelerator()
    live_type = device.type if device is not None else None
    live_count = torch.accelerator.device_count() if device is not None else 0
    stored_type, stored_count = stored["type"], len(stored["devices"])
    if (live_type, live_count) != (stored_type, stored_count):
        live = f"{live_count} of {live_type}" if live_type else "none"
        raise StateError(
            f"the random state is of {stored_count} {stored_type} devices, and this process sees {live}; "
            "make the same devices visible, or derive new random states with derive_rng"
        )
    return torch.get_device_module(stored_type)
