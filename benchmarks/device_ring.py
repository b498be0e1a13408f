"""The ring of a load onto a device in simulated time: ``python -m benchmarks.device_ring``.

The ring itself (``engine/files.py``) runs on the simulated device of ``tests/device``. Its copies take the time that
their bytes need at a rate, a read takes what a model of the storage says, and a wait of the host lasts until what it waits
for has ended. So the seconds are exact and the same on every machine. Two tables:

1. time / max(all reads, all copies) for nine pairs of rates; exit status 1 where it is more than 1.15;
2. for five storage models, the time of the ring that loads use (eight slots of 8 MiB) over that of the best of a grid: among
   rings of the same memory, and among those of up to 256 MiB.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

MIB = 1024**2
GB = 1e9
#: Bytes are made smaller by this, and rates with them: the seconds stay.
SCALE = 64
#: What one rank loads.
LOAD_BYTES = 1024 * MIB
CHOSEN = (8 * MIB, 8)
BOUND, NEAR = 1.15, 1.10
RATES = (1 * GB, 4 * GB, 12 * GB)
#: Of a copy from pinned memory, for the storage models.
LINK = 12 * GB

#: Seconds of a read of so many bytes.
Read = Callable[[int], float]


#: A reader of files asks storage for so many bytes at a time at most, however large a slot is.
REQUEST_BYTES = 4 * MIB


def steady(bytes_per_s: float, request_s: float) -> Callable[[], Read]:
    """A storage with one rate, and a delay for each request."""
    return lambda: lambda nbytes: -(-nbytes // REQUEST_BYTES) * request_s + nbytes / bytes_per_s


def busy() -> Read:
    """1 GB/s, 0.5 ms for each request, and a stall of 50 ms behind each 60 MB."""
    total = 0

    def read(nbytes: int) -> float:
        nonlocal total
        before, total = total, total + nbytes
        return (
            -(-nbytes // REQUEST_BYTES) * 5e-4
            + nbytes / GB
            + 0.05 * (total // 60_000_000 - before // 60_000_000)
        )

    return read


STORAGE: dict[str, Callable[[], Read]] = {
    "page cache (10 GB/s)": steady(10 * GB, 5e-6),
    "NVMe (5 GB/s, 0.1 ms)": steady(5 * GB, 1e-4),
    "network (1.2 GB/s, 0.5 ms)": steady(1.2 * GB, 5e-4),
    "disk (0.2 GB/s, 4 ms)": steady(0.2 * GB, 4e-3),
    "busy network (1 GB/s, stalls)": busy,
}


def seconds(read: Read, copy_rate: float, slot_bytes: int, slots: int) -> tuple[float, float]:
    """Simulated seconds of a load through the ring, and of its reads alone."""
    from shardwise.engine import files as to_device

    device: Any = torch.get_device_module("simgpu")
    device.copies_take(copy_rate / SCALE)
    count = slot_bytes // SCALE
    target = torch.empty(count, dtype=torch.uint8, device="simgpu:0")
    reads_s = 0.0

    def fill(slot: torch.Tensor) -> torch.Tensor:
        nonlocal reads_s
        spent = read(slot_bytes)
        reads_s += spent
        device.spend(spent)
        return slot

    kept, to_device.SLOTS = to_device.SLOTS, slots
    began = device.now()
    try:
        with to_device.DeviceRings(count * slots) as rings:
            assert rings.slot_bytes == count
            for _ in range(LOAD_BYTES // slot_bytes):
                rings.put(target, count, fill)
    finally:
        to_device.SLOTS = kept
    return device.now() - began, reads_s


def ratios() -> dict[tuple[float, float], float]:
    """By rates of reads and copies: seconds of a load over those of the slower of the two alone."""
    found = {}
    for reads in RATES:
        for copies in RATES:
            took, reads_s = seconds(steady(reads, 0.0)(), copies, *CHOSEN)
            found[reads, copies] = took / max(reads_s, LOAD_BYTES / copies)
    return found


def pairs() -> float:
    """Print the table of rates; its largest number."""
    found = ratios()
    print("time / max(reads, copies), eight slots of 8 MiB, 1 GiB a rank")
    print(f"{'reads, GB/s':>14}" + "".join(f"{f'copies {rate / GB:g} GB/s':>18}" for rate in RATES))
    for reads in RATES:
        print(f"{reads / GB:14g}" + "".join(f"{found[reads, copies]:18.3f}" for copies in RATES))
    took, reads_s = seconds(busy(), 0.55 * GB, *CHOSEN)
    found[0.0, 0.0] = took / max(reads_s, LOAD_BYTES / (0.55 * GB))
    print(f"a network with stalls, 0.55 GB/s on average, and copies of 0.55 GB/s: {found[0.0, 0.0]:.3f}")
    return max(found.values())


def grid() -> float:
    """Print the table of storage models; the largest number against rings of the same memory."""
    cells = [(chunk * MIB, slots) for chunk in (1, 2, 4, 8, 16, 32, 64) for slots in (1, 2, 4, 8, 16, 32)]
    cells = [cell for cell in cells if cell[0] * cell[1] <= 256 * MIB]
    print(f"\nthe chosen ring, time / best of {len(cells)} rings; copies {LINK / GB:g} GB/s")
    print(f"{'storage':32}{'chosen, s':>10}{'of 64 MiB':>24}{'of up to 256 MiB':>24}")
    worst = 0.0
    for name, storage in STORAGE.items():
        took = {cell: seconds(storage(), LINK, *cell)[0] for cell in cells}
        same = min((cell for cell in cells if cell[0] * cell[1] <= 64 * MIB), key=took.__getitem__)
        best = min(cells, key=took.__getitem__)
        worst = max(worst, took[CHOSEN] / took[same])
        shown = [f"{took[CHOSEN] / took[c]:.3f} ({c[1]} × {c[0] // MIB} MiB)" for c in (same, best)]
        print(f"{name:32}{took[CHOSEN]:10.3f}" + "".join(f"{text:>24}" for text in shown))
    return worst


def main() -> int:
    os.environ["SIMGPU_DEVICES"] = "1"
    from tests.device import simgpu  # noqa: F401

    slowest, farthest = pairs(), grid()
    print(f"\nlargest of the rates: {slowest:.3f}, promised {BOUND}")
    print(f"farthest from the best of 64 MiB: {farthest:.3f}, promised {NEAR}")
    return int(slowest > BOUND or farthest > NEAR)


if __name__ == "__main__":
    sys.exit(main())
