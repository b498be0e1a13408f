"""Throughput of the digest on one thread: ``python benchmarks/digest.py [--repeats N]``.

Prints GB/s (10^9 bytes of tensor content) of ``partial_sum`` per shape and dtype, best of N.
"""

from __future__ import annotations

import argparse
import time

import torch

from shardwise.digests import partial_sum

SHAPES: tuple[tuple[int, ...], ...] = (
    (8192, 4096),
    (32 * 1024 * 1024,),
    (8192, 3, 16, 16),
    (64, 512, 1024),
    (1_000_000, 4),
    (16_000_000, 1),
    (8_000_000, 2),
    (300_000, 50),
    (64, 33, 70_001),
)
DTYPES = (torch.bfloat16, torch.float32, torch.int64)


def gigabytes_per_second(tensor: torch.Tensor, repeats: int) -> float:
    """Best of ``repeats`` runs over ``tensor``, after one that fills the tables."""
    start = (0,) * tensor.ndim
    partial_sum(tensor, start)
    best_s = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        partial_sum(tensor, start)
        best_s = min(best_s, time.perf_counter() - began)
    return tensor.nbytes / best_s / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats: int = parser.parse_args().repeats
    torch.set_num_threads(1)
    names = "".join(f"{str(dtype).removeprefix('torch.'):>10}" for dtype in DTYPES)
    print(f"{'shape':24}{names}   GB/s")
    for shape in SHAPES:
        row = [torch.randint(-(2**15), 2**15, shape).to(dtype) for dtype in DTYPES]
        print(f"{list(shape)!s:24}" + "".join(f"{gigabytes_per_second(t, repeats):10.2f}" for t in row))
    transposed = torch.randint(-(2**15), 2**15, (8192, 4096)).bfloat16().T
    strided = torch.randint(-(2**15), 2**15, (8192, 8192)).bfloat16()[:, ::2]
    print(f"transposed [4096, 8192] bf16 {gigabytes_per_second(transposed, repeats):.2f} GB/s")
    print(f"every second column [8192, 4096] bf16 {gigabytes_per_second(strided, repeats):.2f} GB/s")


if __name__ == "__main__":
    main()
