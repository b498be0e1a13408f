"""The device ``simgpu`` for Python: importing this module makes ``torch.simgpu`` and the c10d backend ``simccl``.

Once in a process there is no way back, so only processes that a test starts for it import this. SIMGPU_DEVICES, read
at the import, says how many devices the process sees; SIMGPU_DEVICES=0 none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.device.build import MODULE, built

__all__ = ["NAME"]

NAME = "simgpu"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(MODULE, built())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_C = _load()
torch.utils.rename_privateuse1_backend(NAME)


def _index(device: object = None) -> int:
    found = device if isinstance(device, int) or device is None else torch.device(device).index  # type: ignore[call-overload]
    return _C.current_device() if found is None else found


class _Module(types.ModuleType):
    """``torch.simgpu``: what torch, FSDP2 and a training script ask a device module for, as ``torch.cuda`` has it."""

    def __init__(self) -> None:
        super().__init__(f"torch.{NAME}")
        self._initialized = False

    def _lazy_init(self) -> None:
        self._initialized = True

    init = _lazy_init

    def _is_in_bad_fork(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        return self._initialized

    def is_available(self) -> bool:
        return _C.device_count() > 0

    def device_count(self) -> int:
        return _C.device_count()

    def current_device(self) -> int:
        self.init()
        return _C.current_device()

    def set_device(self, device: object) -> None:
        self.init()
        _C.set_device(_index(device))

    @contextlib.contextmanager
    def device(self, where: object) -> Any:
        before = _C.current_device()
        _C.set_device(_index(where))
        try:
            yield
        finally:
            _C.set_device(before)

    def get_device_name(self, device: object = None) -> str:
        return "simulated accelerator"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        _C.synchronize()

    def counts(self, *, own: bool = False) -> dict[str, int]:
        """Copies by kind, and the host's waits, since the start: of the process, or of the calling thread."""
        return _C.counts(own)

    def pinned_bytes(self) -> int:
        """Pinned memory that is in use, or freed and kept."""
        return _C.pinned_bytes()

    def used_bytes(self, device: object = None) -> int:
        """Memory of the tensors on a device."""
        return _C.used_bytes(_index(device))

    def peak_bytes(self, device: object = None) -> int:
        """The most that :meth:`used_bytes` was since :meth:`reset_peak`."""
        return _C.peak_bytes(_index(device))

    def reset_peak(self, device: object = None) -> None:
        _C.reset_peak(_index(device))

    def schedule(self, seed: int | None) -> None:
        """From now on streams run on by chance, as ``seed`` says, beyond what something waited for. None: no longer."""
        _C.schedule(seed)

    def advance(self) -> None:
        """A moment at which streams may go on; enqueuing work is one, too."""
        _C.advance()

    def copies_take(self, bytes_per_s: float) -> None:
        """The rate of copies to a device in simulated time; 0: they take none."""
        _C.copies_take(bytes_per_s)

    def spend(self, seconds: float) -> None:
        """The host works for so long, in simulated time."""
        _C.spend(seconds)

    def now(self) -> float:
        """Simulated seconds; a wait of the host lasts until what it waits for has ended."""
        return _C.now()

    def default_stream(self, device: object = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=_index(device), device_type=20)

    def current_stream(self, device: object = None) -> torch.Stream:
        return torch.accelerator.current_stream(_index(device))

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    def stream(self, chosen: Any) -> Any:
        return contextlib.nullcontext() if chosen is None else chosen

    def get_rng_state(self, device: object = NAME) -> torch.Tensor:
        self.init()
        return _C.default_generator(_index(device)).get_state()

    def set_rng_state(self, state: torch.Tensor, device: object = NAME) -> None:
        self.init()
        _C.default_generator(_index(device)).set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(index) for index in range(_C.device_count())]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        for index, state in enumerate(states):
            self.set_rng_state(state, index)

    def manual_seed(self, seed: int) -> None:
        _C.default_generator(_C.current_device()).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(_C.device_count()):
            _C.default_generator(index).manual_seed(seed)


class _Stream(torch.Stream):
    def __new__(cls, device: object = None, priority: int = 0, **kwargs: Any) -> _Stream:
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)


class _Event(torch.Event):
    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> _Event:
        return super().__new__(cls, torch.device(NAME, _C.current_device()), enable_timing=enable_timing)


def _make_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return _C.collectives(dist.ProcessGroupGloo(store, rank, size, timeout))


_module: Any = _Module()
_module.Stream, _module.Event = _Stream, _Event
torch._register_device_module(NAME, _module)
sys.modules[f"torch.{NAME}"] = _module
torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
dist.Backend.register_backend("simccl", _make_backend, devices=[NAME])
