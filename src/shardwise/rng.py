"""The random generators of a process: capture, restore, derive.

These are Python's ``random``, numpy's global generator, torch's CPU generator and, if an accelerator is in use, the
default generator of each of its devices that this process owns. Generators that a program made itself are not
included.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from .errors import StateError
from .host import own_device
from .names import modules_once, own_tensors
from .objects import frozen


@frozen
class RngPlan:
    """How a restore will set the random generators. Making the plan changes nothing."""

    rule: str
    """The rule in one line, for the report."""
    differences: tuple[str, ...]
    """Why the next draws differ from those of a run that never stopped, if ``rule`` alone does not say it."""
    apply: Callable[[], Any]
    """Sets the generators. Do it last when resuming."""


def capture_rng(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """The state of every global generator of this process, in values that typed JSON can hold.

    On an accelerator: the current device of this process, then the other ones among ``devices`` (where its tensors
    lie) by index. Other visible devices belong to other processes. Draws nothing. Does not initialize an accelerator;
    one that is not in use is skipped.
    Raises :class:`StateError` if numpy's global generator was replaced and is not a Mersenne twister.
    """
    own = _own_devices(devices) if _in_use() else []
    states = [torch.get_device_module(d.type).get_rng_state(d).cpu() for d in own]
    return {**capture_host_rng(), "accelerator": {"type": own[0].type, "own": states} if own else None}


def capture_host_rng() -> dict[str, Any]:
    """As :func:`capture_rng`, without accelerators. :func:`restore_rng` accepts it too."""
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
    """Set every generator of this process to the state that :func:`capture_rng` captured.

    Devices that ``state`` does not name keep theirs. Raises :class:`StateError`, before anything is changed, if
    ``state`` is not such a capture or names devices that this process lacks.
    """
    set_host, accelerator = _checked_host(state), state.get("accelerator")
    if accelerator is None:
        set_host()
        return
    own = _own_devices()
    states, why_not = _fitting(accelerator, own)
    if why_not:
        raise StateError(f"{why_not}; restore RNG states in a process with the same devices")
    _set_devices(own, states)
    set_host()


def plan_rng(
    state: dict[str, Any] | None, *, seed: int, step: int, rank: int, devices: Iterable[torch.device] = ()
) -> RngPlan:
    """Plan how to go on from ``state``, which may come from a process with other devices. Changes nothing.

    ``state=None`` (at another world size no captured state fits): :func:`derive_rng` seeds everything. If the
    accelerator has another type, or this process owns another number of devices, the host's generators get their
    state and the devices' are derived. ``devices``: as for :func:`capture_rng`.

    Raises :class:`StateError` if ``state`` is not such a capture.
    """

    def derive() -> None:
        derive_rng(seed=seed, step=step, rank=rank)

    derived = _derived_text(seed=seed, step=step, rank=rank)
    if state is None:
        return RngPlan(derived, (), derive)
    set_host, accelerator, own = _checked_host(state), state.get("accelerator"), _own_devices(devices)
    if accelerator is None and not (own and _in_use()):
        return RngPlan("restored per rank", (), set_host)
    states, why_not = _fitting(accelerator, own)
    if why_not and not own:
        return RngPlan("restored per rank, on the host", (why_not,), set_host)
    if why_not:

        def derive_devices() -> None:
            derive()  # torch seeds all devices at once, also those that are not initialized yet
            set_host()

        return RngPlan(
            f"restored per rank; of the {own[0].type} device: {derived}", (why_not,), derive_devices
        )

    def restore() -> None:
        _set_devices(own, states)
        set_host()

    return RngPlan("restored per rank", (), restore)


def derive_rng(*, seed: int, step: int, rank: int) -> str:
    """Seed every global generator from (``seed``, ``step``, ``rank``). Returns the rule in one line.

    Used at another world size, where no captured state fits. Equal input gives equal draws on every machine.
    Accelerators are seeded without being initialized. Ranks that must draw alike, such as tensor-parallel peers,
    pass the same ``rank``.
    """
    rule = _derived_text(seed=seed, step=step, rank=rank)
    numpy_seed = np.frombuffer(_derive(seed, step, rank, "numpy"), dtype="<u4")
    random.seed(int.from_bytes(_derive(seed, step, rank, "python"), "little"))
    np.random.seed(numpy_seed)
    torch.manual_seed(int.from_bytes(_derive(seed, step, rank, "torch")[:8], "little") >> 1)
    return rule


def devices_of(models: Iterable[nn.Module]) -> set[torch.device]:
    """The devices on which this rank holds tensors of ``models``."""
    return {
        tensor.device
        for model in models
        for _, module in modules_once(model)
        for _, tensor, _, _ in own_tensors(module)
    }


def _derived_text(**numbers: int) -> str:
    for name, value in numbers.items():
        if not isinstance(value, int):
            raise StateError(f"{name} must be an integer to derive RNG states, got {value!r}")
    given = ", ".join(f"{name} {value}" for name, value in numbers.items())
    return f"RNG states derived with blake2b from ({given})"


def _derive(seed: int, step: int, rank: int, generator: str) -> bytes:
    text = f"shardwise-rng-1:{seed}:{step}:{rank}:{generator}"
    return hashlib.blake2b(text.encode("ascii"), digest_size=32).digest()


def _pack(words: Any) -> torch.Tensor:
    content = np.asarray(words, dtype="<u4").tobytes()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _unpack(packed: torch.Tensor) -> list[int]:
    words: list[int] = np.frombuffer(packed.numpy().tobytes(), dtype="<u4").tolist()
    return words


def _checked_host(state: dict[str, Any]) -> Callable[[], None]:
    """A function that sets the host's generators. The state was tried on new generators first."""
    try:
        python, numpy = state["python"], state["numpy"]
        words = _unpack(python["words"])
        keys = np.array(_unpack(numpy["words"]), dtype=np.uint32)
        gauss = (numpy["position"], numpy["has_gauss"], numpy["cached_gauss"])
        python_state = (python["version"], tuple(words), python["gauss_next"])
        random.Random().setstate(python_state)
        np.random.RandomState().set_state(("MT19937", keys, *gauss))
        torch.Generator().set_state(state["torch"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"this is not a captured RNG state: {error!r}") from error

    def set_host() -> None:
        random.setstate(python_state)
        np.random.set_state(("MT19937", keys, *gauss))
        torch.set_rng_state(state["torch"])

    return set_host


def _in_use() -> bool:
    """Whether this process has initialized its accelerator. Does not initialize it."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return False
    # Asking a device for its state initializes it. A backend without is_initialized() counts as in use if available.
    in_use = getattr(torch.get_device_module(device), "is_initialized", torch.accelerator.is_available)
    return bool(in_use())


def _own_devices(devices: Iterable[torch.device] = ()) -> list[torch.device]:
    """This process's devices: the current one first, then those of its tensors. Empty without an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    current = own_device(accelerator.type)
    others = {d.index for d in devices if d.type == current.type and d.index is not None} - {current.index}
    return [current, *(torch.device(current.type, index) for index in sorted(others))]


def _fitting(
    accelerator: dict[str, Any] | None, own: list[torch.device]
) -> tuple[list[torch.Tensor], str | None]:
    """The stored states for this process's devices, or the reason why none fit."""
    if accelerator is None:
        return [], f"RNG state: {own[0].type} wasn't in use when saved, but is now"
    try:
        kind, states = accelerator["type"], _own_states(accelerator, own)
    except (KeyError, TypeError) as error:
        raise StateError(f"this is not a captured RNG state: {error!r}") from error
    if not own or own[0].type != kind:
        now = f"this process has a {own[0].type} device" if own else "this process has no accelerator"
        return [], f"RNG state: saved on a {kind} device, but {now}"
    if states is None:
        seen = f"saved for all {len(accelerator['devices'])} {kind} devices on a host"
        return [], f"RNG state: {seen}, but {torch.accelerator.device_count()} are visible now"
    if len(states) != len(own):
        return [], f"RNG state: saved for {len(states)} {kind} devices, but this process uses {len(own)}"
    for device, state in zip(own, states, strict=True):
        _try_state(device, state)
    return states, None


def _own_states(accelerator: dict[str, Any], own: list[torch.device]) -> list[torch.Tensor] | None:
    if "own" in accelerator:
        return list(accelerator["own"])
    # Older checkpoints hold the states of all visible devices by index, without saying which the process owned.
    every: list[torch.Tensor] = list(accelerator["devices"])
    if len(every) == 1:
        return every
    if own and own[0].type == accelerator["type"] and len(every) == torch.accelerator.device_count():
        return [every[device.index] for device in own]
    return None


def _try_state(device: torch.device, state: Any) -> None:
    """Raises :class:`StateError` if a generator of the device rejects ``state``."""
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8:
        raise StateError(f"this is not a captured state of a {device.type} generator: {type(state).__name__}")
    if _in_use():
        try:
            torch.Generator(device).set_state(state)
        except (RuntimeError, TypeError, ValueError) as error:
            raise StateError(f"this is not a captured state of a {device.type} generator: {error}") from error


def _set_devices(own: list[torch.device], states: list[torch.Tensor]) -> None:
    for device, state in zip(own, states, strict=True):
        torch.get_device_module(device.type).set_rng_state(state, device)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """On exit, also after an error, restore every global random generator to its state on entry."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    cpu_state = torch.get_rng_state()
    device_module = _initialized_accelerator()
    device_states = device_module.get_rng_state_all() if device_module is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if device_module is not None:
            device_module.set_rng_state_all(device_states)


def _initialized_accelerator() -> Any:
    """The device module (``torch.cuda``, …) if it was initialized. Does not initialize it."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    wanted = ("is_initialized", "get_rng_state_all", "set_rng_state_all")
    if not all(hasattr(module, name) for name in wanted):
        return None
    return module if module.is_initialized() else None
